"""One variant from its spec to a verdict: is the committed file what the spec renders to, does it compile with the
facts its plan predicts, and does it compute attention. `fa3gen.verify.on_gpu` does the last of the three on a GPU,
`fa3gen.verify.on_cpu` on the CPU model of sm_90a.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from fa3gen.base.errors import UserError
from fa3gen.base.parts import Part
from fa3gen.design.workspace import Workspace
from fa3gen.spec.specfile import Variant

if TYPE_CHECKING:
    from fa3gen.compile.compiler import Compiled
    from fa3gen.verify.on_cpu import CpuReport
    from fa3gen.verify.on_gpu import Report


class CompileFacts(Part):
    """What the compiled file holds, in sum over its kernels; registers and shared memory of the largest."""

    registers: int
    stack_bytes: int
    spills: int = Field(description="Local-memory loads and stores in SASS.")
    smem_bytes: int | None
    wgmma: dict[str, int] = Field(description="wgmma.mma_async in PTX, by shape.")
    serialized_wgmma: bool


@dataclass(frozen=True)
class Stage:
    """How one step ended: `passed` None means that it was not done, and `detail` says why."""

    passed: bool | None
    detail: str = ""

    @property
    def word(self) -> str:
        """Return `passed`, `FAILED` or `NOT run`."""
        return {True: "passed", False: "FAILED", None: "NOT run"}[self.passed]


@dataclass(frozen=True)
class Verification:
    """All that is known about one variant after `fa3gen verify`.

    `source_sha256` is of the file as the first step found it; a record names that file and no later one.
    """

    variant: Variant
    render: Stage
    compile: Stage
    run: Stage
    facts: CompileFacts | None = None
    ptxas: str | None = None
    report: Report | CpuReport | None = None
    source_sha256: str | None = None

    @property
    def failed(self) -> bool:
        """Whether any step failed. A step that was not done has not failed."""
        return False in (self.render.passed, self.compile.passed, self.run.passed)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        stages = {"render": self.render, "compile": self.compile, "run": self.run}
        return {
            "stem": self.variant.stem,
            **{name: {"status": stage.word, "detail": stage.detail} for name, stage in stages.items()},
            "compile_facts": self.facts.model_dump() if self.facts else None,
            "report": self.report.as_dict() if self.report else None,
            "failed": self.failed,
        }


def check_render(variant: Variant, workspace: Workspace) -> Stage:
    """Render in memory and compare with the file that is there."""
    from fa3gen.generate.render import render_at

    place = workspace.place_of(variant)
    rendered = render_at(place.module_path(variant.stem), variant, workspace)
    name = str(rendered.path if place.loose else place.shown(rendered.path))
    if rendered.change == "new":
        wanted = variant.source if place.loose else variant.stem
        return Stage(False, f"{name} does not exist; run `fa3gen render {wanted}`")
    if rendered.change == "changed":
        text = f"{name} is not what {variant.source} renders to"
        return Stage(False, f"{text}; `fa3gen render --check` shows the difference")
    return Stage(True)


def compile_all(
    variants: Sequence[Variant], workspace: Workspace, on_done: Callable[[str], None], *, for_launch: bool = False
) -> dict[str, Compiled | UserError]:
    """Compile every variant whose file exists, several at a time, or take it from the cache; by stem.

    `for_launch`: so that `fa3gen.run.launch` finds each in the cache.
    """
    from fa3gen.compile.cache import cached_compile_many

    paths = {workspace.path_of(variant): variant.stem for variant in variants}
    present = [path for path in paths if path.exists()]
    done = cached_compile_many(present, on_done=lambda path, outcome: on_done(path.stem), for_launch=for_launch)
    return {paths[path]: outcome for path, outcome in done.items()}


def check_compile(
    variant: Variant, outcome: Compiled | UserError | None
) -> tuple[Stage, CompileFacts | None, str | None]:
    """Return the verdict on a compile, the facts for the record, and the version of ptxas."""
    from fa3gen.compile.census import compare
    from fa3gen.compile.compiler import CompileError, analyse
    from fa3gen.generate.plan import make_plan

    if outcome is None:
        return Stage(None, "not compiled: there is no file"), None, None
    if isinstance(outcome, UserError):
        return Stage(False, str(outcome)), None, None
    try:
        census = analyse(outcome).census
    except CompileError as error:  # PTX, SASS and cubin that do not fit together
        return Stage(False, str(error)), None, outcome.ptxas
    except UserError as missing:  # a disassembler that is not installed says nothing about the module
        return Stage(None, f"compiled, but its facts were not read: {missing}"), None, outcome.ptxas
    wgmma: Counter[str] = Counter()
    for kind, count in census.ptx.wgmma.items():
        wgmma[f"m{kind.m}n{kind.n}k{kind.k}{'_rs' if kind.a_source == 'registers' else ''}"] += count
    facts = CompileFacts(
        registers=census.registers,
        stack_bytes=census.stack,
        spills=census.spills,
        smem_bytes=census.smem,
        wgmma=dict(wgmma),
        serialized_wgmma=census.serialized_wgmma,
    )
    mismatches = compare(census, make_plan(variant).expectation)
    return Stage(not mismatches, "; ".join(str(mismatch) for mismatch in mismatches)), facts, outcome.ptxas
