"""Every generated module, compiled for sm_90a without a GPU: the facts of PTX, cubin and SASS are what its plan says.

That includes no spills, no stack, no WGMMA that ptxas serialised, no wait beside those of the plan, no maximum that
propagates NaN, and the widths of all stores.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fa3gen.compile.census import Census, compare, take_census
from fa3gen.design import footprint, work
from fa3gen.design.footprint import sums_in_smem, thread_rows
from fa3gen.design.own_bits import own_bits
from fa3gen.design.schedule import full_tiles, schedule_of
from fa3gen.design.splits import whole_parts
from fa3gen.design.workspace import Workspace
from fa3gen.generate.plan import make_plan
from fa3gen.hardware import hopper
from fa3gen.spec.model import Forward

WORKSPACE = Workspace.find(Path(__file__).parent)
# Of these ptxas moves registers to and fro in the loop, all 255 of a thread being in use: 604 instructions, where 500
# do the same in what is compiled without prefetching tensor maps in two warps; no slower (docs/performance.md).
# And of these with tiles of 96 keys and no mask: 451, where 392 do with a causal one.
MOVED = {
    "fwd_packed_decode_d256",
    "fwd_paged_decode_d256",
    "fwd_packed_decode_fixed_d128",
    "fwd_paged_decode_fixed_d128",
}
# Fused multiplications and additions of a thread outside of its softmaxes, without and with sinks: of divisions.
FUSED_ELSEWHERE = {False: 13, True: 4}
VARIANTS = {variant.stem: variant for spec_file in WORKSPACE.load_all() for variant in spec_file.variants}


@pytest.mark.parametrize("stem", VARIANTS)
def test_compiles_as_planned(stem: str) -> None:
    from fa3gen.compile.cache import cached_compile
    from fa3gen.compile.compiler import analyse

    expectation = make_plan(VARIANTS[stem]).expectation
    assert None not in (expectation.sass.waits, expectation.sass.min_maxima, expectation.sass.max_comparisons)
    assert expectation.sass.global_stores is not None
    assert (expectation.spills, expectation.stack_bytes, expectation.serialized_wgmma) == (0, 0, False)
    census = analyse(cached_compile(WORKSPACE.module_path(stem))).census
    assert compare(census, expectation) == []
    if isinstance(VARIANTS[stem].spec, Forward):
        assert_loop_as_counted(stem, VARIANTS[stem].spec, census)
        assert_fused_alike(VARIANTS[stem].spec, census)


def assert_fused_alike(spec: Forward, census: Census) -> None:
    """A row has its own bits only if ptxas fuses the same multiplications and additions wherever the row may be.

    PTX leaves that to ptxas, and the tiles of keys before the first step, and those with each edge of a mask, have a
    softmax of their own in the code. In each of them it fuses those of all exponents, and the first one of both sums.
    Of 8 bits no call asks for that.
    """
    if spec.problem.layout == "dense" or not own_bits(spec) or footprint.eight_bits(spec):
        return
    softmaxes = schedule_of(spec).count("softmax")
    assert softmaxes == {"all": 2, "before": 3, "between": 4}[full_tiles(spec)]
    elsewhere = 0 if whole_parts(spec) else FUSED_ELSEWHERE[spec.softmax.sink]  # of these another kernel divides O
    # Where a CTA adds up parts, for each element of O and each sum one, which the module asks for.
    rows, lanes = thread_rows(spec)
    elsewhere += schedule_of(spec).count("add_part") * rows * (1 + spec.problem.v_dim // lanes)
    fused = census.kernels[0].sass.opcodes["FFMA"] - elsewhere
    expected = softmaxes * (footprint.thread_scores(spec) + rows)
    if spec.softmax.restart_every is None:
        assert fused == expected
    else:
        # Maxima begin anew by one for each row, in each step but the first of a tile. And of the first addition of a
        # sum ptxas makes two that are the same, of the same registers: one for the branch that holds the wait back.
        fused -= (softmaxes - 1) * rows
        assert expected < fused <= expected + softmaxes


def assert_loop_as_counted(stem: str, spec: Forward, census: Census) -> None:
    """`fa3gen.design.work` counts the instructions of a step about right, where compiled loops tell them from masking.

    That is in kernels with overlap, which without a mask mask in front of the loop and when persistent in other ones,
    each longer than the one that masks nothing; and in scalar kernels without a mask, where little of the loop is
    masking.
    """
    loops = sorted((loop for loop in census.kernels[0].sass.loops if not loop.waits), key=lambda loop: loop.address)
    warps = footprint.computing_threads(spec) / hopper.WARP
    if footprint.overlapped(spec) and (spec.mask.kind == "none" or footprint.persistent(spec)):
        steps = [loop.instructions for loop in loops if loop.gmma and loop.innermost]
        # A loop for the tiles without an edge of the mask, if there are any, and one for those with each edge.
        assert len(steps) == {"all": 1, "before": 2, "between": 3, "none": 1}[full_tiles(spec)]
        if full_tiles(spec) == "none":
            return
        compiled = min(steps)
        if stem in MOVED:
            assert compiled > 1.2 * work.step(spec).instructions / warps, "ptxas no longer does that: take it out"
            return
        if spec.softmax.restart_every is not None:
            # Of two branches one multiplies O, adds it and sets it to 0, now and then; the other one rescales it. From
            # and to shared memory vectors of four numbers are moved, and where there is no sum yet one of 0 is added.
            # Behind them ptxas makes descriptors of Q, K and V anew, in 40 uniform registers.
            rows, lanes = thread_rows(spec)
            elements, steps = rows * spec.problem.v_dim // lanes, spec.softmax.restart_every / spec.tile.kv
            compiled -= int((3 + 1.5 * sums_in_smem(spec)) * elements * (1 - 1 / steps))
            assert 1.08 < compiled * warps / work.step(spec).instructions < 1.35
            return
        if spec.softmax.rescale_above is not None:  # O is rescaled in a branch that is seldom taken
            compiled -= thread_rows(spec)[0] * spec.problem.v_dim // thread_rows(spec)[1]
        if footprint.block_scales(spec):  # P V is brought to the unit of O in a branch that is seldom taken
            compiled -= thread_rows(spec)[0] * spec.problem.v_dim // thread_rows(spec)[1]
        if footprint.promote_every(spec) > 1:  # a step takes one of two branches, each as long
            compiled -= thread_rows(spec)[0] * spec.problem.v_dim // thread_rows(spec)[1]
    elif spec.handoff.through == "smem_f32" and spec.qk.engine == "scalar" and spec.mask.kind == "none":
        # Inside the loop over tiles of keys are one over vectors of the head dim and one over a few keys.
        qk, pv = [loop.instructions for loop in loops if loop.depth == 2]
        [tile] = [loop.instructions for loop in loops if loop.ex2]
        keys = spec.tile.kv // footprint.SCALAR_LANES
        compiled = tile - qk - pv + spec.problem.head_dim // footprint.SCALAR_VECTOR * qk + spec.tile.kv // keys * pv
    else:
        return
    assert work.step(spec).instructions / warps == pytest.approx(compiled, rel=0.08)


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
    from fa3gen.compile import toolchain
    from fa3gen.compile.cache import cached_compile

    compiled = cached_compile(WORKSPACE.module_path(stem))
    pattern = re.compile(rf"^.*\b{re.escape(opcode)}\b.*\n", re.MULTILINE)
    sass, edits = pattern.subn(lambda found: edit(found[0]), toolchain.disassemble(compiled.cubin))
    assert edits > 0
    usage = toolchain.resource_usage(compiled.cubin)
    census = take_census(compiled.ptx, sass, usage, compiled.ptxas_log, compiled.host_module)
    found = [mismatch.fact for mismatch in compare(census, make_plan(VARIANTS[stem]).expectation)]
    assert found == [f"SASS: {fact}" for fact in facts]
