"""Every generated module, compiled for sm_90a without a GPU: the facts of PTX, cubin and SASS are what its plan says.

That includes no spills, no stack, no WGMMA that ptxas serialised, no wait beside those of the plan, no maximum that
propagates NaN, and the widths of all stores.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fa3gen.census import compare, take_census
from fa3gen.plan import make_plan
from fa3gen.workspace import Workspace

WORKSPACE = Workspace.find(Path(__file__).parent)
VARIANTS = {variant.stem: variant for spec_file in WORKSPACE.load_all() for variant in spec_file.variants}


@pytest.mark.parametrize("stem", VARIANTS)
def test_compiles_as_planned(stem: str) -> None:
    from fa3gen.compile_cache import cached_compile
    from fa3gen.compiler import analyse

    expectation = make_plan(VARIANTS[stem]).expectation
    assert None not in (expectation.sass.waits, expectation.sass.min_maxima, expectation.sass.max_comparisons)
    assert expectation.sass.global_stores is not None
    assert (expectation.spills, expectation.stack_bytes, expectation.serialized_wgmma) == (0, 0, False)
    census = analyse(cached_compile(WORKSPACE.module_path(stem))).census
    assert compare(census, expectation) == []


def nan_propagating(line: str) -> str:
    """What ptxas makes of a maximum that propagates NaN: two comparisons and two selections."""
    return (
        line.replace("FMNMX", "FSETP.GT.AND") + line.replace("FMNMX", "FSEL") + line.replace("FMNMX", "FSETP.NAN.AND")
    )


@pytest.mark.parametrize(
    ("stem", "opcode", "edit", "facts"),
    [
        ("fwd_d128_causal", "WARPGROUP.DEPBAR", lambda line: line * 2, ["warpgroup waits (WARPGROUP.DEPBAR)"]),
        ("fwd_d128_causal", "FMNMX", nan_propagating, ["maxima (FMNMX)", "comparisons of numbers (FSETP)"]),
        ("fwd_d128_causal", "UTMASTG", lambda line: line.replace("UTMASTG", "STG"), ["stores to global memory"]),
        ("fwd_d128_causal", "STSM", lambda line: line.replace("STSM.16.M88.4", "STS"), ["stores to shared memory"]),
        ("fwd_d192_128", "STG.E.128", lambda line: line.replace("128", "64") * 2, ["stores to global memory"]),
    ],
)
def test_worse_code_is_caught(stem: str, opcode: str, edit: Callable[[str], str], facts: list[str]) -> None:
    """The disassembly of a production module with every instruction of one kind made worse."""
    from fa3gen import toolchain
    from fa3gen.compile_cache import cached_compile

    compiled = cached_compile(WORKSPACE.module_path(stem))
    pattern = re.compile(rf"^.*\b{re.escape(opcode)}\b.*\n", re.MULTILINE)
    sass, edits = pattern.subn(lambda found: edit(found[0]), toolchain.disassemble(compiled.cubin))
    assert edits > 0
    usage = toolchain.resource_usage(compiled.cubin)
    census = take_census(compiled.ptx, sass, usage, compiled.ptxas_log, compiled.host_module)
    found = [mismatch.fact for mismatch in compare(census, make_plan(VARIANTS[stem]).expectation)]
    assert found == [f"SASS: {fact}" for fact in facts]
