"""Modules rendered while a program runs, for calls with render=True that no module serves.

The spec is the one that the error proposes. It is rendered as `fa3gen render` does it, and lies with its module in the
compile cache, in an entry named by the module's bytes; there it is compiled like any other. From then on dispatch
knows the module, in this process.
"""

from __future__ import annotations

import functools
import logging
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from fa3gen.base.files import write_text
from fa3gen.compile.cache import cached_compile_for_launch, kept_rendering
from fa3gen.design.family import Family
from fa3gen.design.proposed import Proposal
from fa3gen.design.workspace import Workspace
from fa3gen.generate.render import render_variant
from fa3gen.run import dispatch
from fa3gen.run.dispatch import NotRendered
from fa3gen.run.launch import NO_JIT_VARIABLE, NotCompiled, compiling_forbidden
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import Variant, attention_among

LOG = logging.getLogger("fa3gen")

_one_at_a_time = threading.Lock()


def render(missing: NotRendered, *, compiled: bool) -> None:
    """Render the module that a call asked for in vain, so that dispatch finds it; with `compiled`, ready for launch.

    Threads that ask for one module at the same time render it once. So do processes compile it; each of them renders
    the text, which says where in the cache it lies. One line in the log, a warning, says what was done: it took
    seconds in the middle of a program, and nobody has verified or measured the result.

    Raises:
        NotRendered: `missing` itself, where no spec is legal.
        NotCompiled: $FA3GEN_NO_JIT forbids it.
        CompileError: The module does not compile.
    """
    proposal = missing.proposal
    if proposal is None:
        raise missing
    if compiling_forbidden():
        raise NotCompiled(
            f"render=True renders and compiles while the program runs, and ${NO_JIT_VARIABLE} is set; do it before: "
            f"save the spec, run `fa3gen render {proposal.stem}` and `fa3gen compile {proposal.stem}`\n{missing}"
        )
    with _one_at_a_time:
        if any(variant.spec == proposal.spec for variant, _ in dispatch.rendered_here):
            return
        started = time.perf_counter()
        variant, file = _rendered(proposal)
        if compiled:
            cached_compile_for_launch(file)
        dispatch.rendered_here.append((variant, file))
        LOG.warning(
            "rendered%s %s in %.1f s from %s beside it, which extends %s, for %s: not verified, not measured",
            " and compiled" * compiled,
            *(file, time.perf_counter() - started, variant.source.name, proposal.base, Family.of(variant.spec)),
        )


def _rendered(proposal: Proposal) -> tuple[Variant[Forward], Path]:
    """The proposed spec, and its module in the cache, beside the spec file."""
    workspace, name = Workspace.find(), f"{proposal.stem}.yaml"
    with tempfile.TemporaryDirectory(prefix="fa3gen-render-") as scratch:
        write_text(Path(scratch) / name, proposal.text)
        [variant] = attention_among(workspace.load(Path(scratch) / name).variants)
        text = render_variant(variant, workspace)
    file = kept_rendering(proposal.stem, spec=proposal.text, module=text)
    if file is None:
        file = Path(_folder_of_this_process().name) / f"{proposal.stem}.py"
        write_text(file.with_suffix(".yaml"), proposal.text)
        write_text(file, text)
    return replace(variant, source=file.with_suffix(".yaml")), file


@functools.cache
def _folder_of_this_process() -> tempfile.TemporaryDirectory[str]:
    """Where modules lie when the cache cannot be written; it goes when the process ends."""
    return tempfile.TemporaryDirectory(prefix="fa3gen-rendered-")
