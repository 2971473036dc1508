"""Rules about GEMM: the exact message on hand-derived numbers, and silence right beside the limit."""

from __future__ import annotations

from typing import Any

import pytest

from fa3gen.design import rules
from fa3gen.design.rules import Violation, gemms
from fa3gen.spec.model import Gemm

SWIZZLES = {"a": "128B", "b": "128B", "d": "128B"}
PRODUCT = {"engine": "wgmma", "a": {"source": "smem", "major": "k"}, "b": {"major": "mn"}}
SPECIALIZED: dict[str, Any] = {
    "operation": "gemm",
    "tile": {"m": 128, "n": 256, "k": 64, "warpgroups": 2},
    "load": {"engine": "tma", "stages": 4},
    "smem": SWIZZLES,
    "product": PRODUCT,
    "schedule": {"kind": "warp_specialized", "overlap": True},
}
COOPERATIVE: dict[str, Any] = {
    "operation": "gemm",
    "tile": {"m": 128, "n": 128, "k": 64, "warpgroups": 2},
    "load": {"engine": "tma", "stages": 3},
    "smem": SWIZZLES,
    "product": PRODUCT,
}
SCALAR: dict[str, Any] = {
    "operation": "gemm",
    "tile": {"m": 128, "n": 64, "k": 32, "threads": 128},
    "load": {"engine": "cp_async", "stages": 3},
    "product": {"engine": "scalar"},
}


def violations(base: dict[str, Any], **changes: Any) -> dict[str, str]:
    """Field -> message of what `check` finds."""
    found = rules.check(Gemm.model_validate({**base, **changes}))
    return {violation.field: violation.message for violation in found}


def tile(base: dict[str, Any], **changes: Any) -> dict[str, str]:
    """The same, with another tile."""
    return violations(base, tile={**base["tile"], **changes})


@pytest.mark.parametrize("spec", [SPECIALIZED, COOPERATIVE, SCALAR])
def test_the_usual_specs_are_legal(spec: dict[str, Any]) -> None:
    assert violations(spec) == {}


def test_gemm_load() -> None:
    assert gemms.gemm_load("wgmma", "tma") is gemms.gemm_load("scalar", "cp_async") is None
    assert gemms.gemm_load("wgmma", "cp_async") == Violation(
        "load.engine", "cp_async loads are not rendered with a wgmma product; use tma"
    )
    assert violations(SCALAR, load={"engine": "tma", "stages": 3}) == {
        "load.engine": "tma loads are not rendered with a scalar product; use cp_async"
    }


def test_gemm_layouts() -> None:
    assert violations(SPECIALIZED, smem=None) == {
        "smem": "WGMMA reads swizzled tiles; give their swizzles, {a: 128B, b: 128B, d: 128B}"
    }
    assert violations(SCALAR, smem=SWIZZLES) == {
        "smem": "scalar products read plain rows, which have no swizzle; take smem out (smem: null, over a base)"
    }
    assert gemms.gemm_layouts("wgmma", True) is gemms.gemm_layouts("scalar", False) is None


def test_gemm_schedule() -> None:
    assert gemms.gemm_schedule("wgmma", "warp_specialized") is gemms.gemm_schedule("scalar", "cooperative") is None
    assert gemms.gemm_schedule("scalar", "warp_specialized") == Violation(
        "schedule.kind",
        "warp_specialized is rendered for wgmma products only; use cooperative, or product engine wgmma",
    )


def test_gemm_overlap() -> None:
    assert gemms.gemm_overlap("smem", True) is gemms.gemm_overlap("registers", False) is None
    registers = {**PRODUCT, "a": {"source": "registers", "major": "k"}}
    assert violations(SPECIALIZED, product=registers) == {
        "schedule.overlap": "A of the next step takes the registers of this one's, which its products still read; "
        "use overlap: false"
    }
    assert gemms.gemm_overlap("smem", False) == Violation(
        "schedule.overlap",
        "with A in shared memory nothing keeps the next step's products from being issued; use overlap: true",
    )


def test_gemm_a_registers() -> None:
    assert gemms.gemm_a_registers("warp_specialized", "registers") is gemms.gemm_a_registers("cooperative", "smem")
    assert gemms.gemm_a_registers("cooperative", "registers") == Violation(
        "product.a.source",
        "A from registers is rendered with schedule warp_specialized only, not cooperative; use source: smem",
    )


def test_a_from_registers_is_k_major() -> None:
    """PTX ISA: the register fragment of A has one layout."""
    product = {**PRODUCT, "a": {"source": "registers", "major": "mn"}}
    schedule = {"kind": "warp_specialized", "overlap": False}
    assert violations(SPECIALIZED, product=product, schedule=schedule) == {
        "product.a.major": "A from registers is always K-major, its fragment has no transposed form; use major: k or "
        "source: smem"
    }


def test_gemm_stages() -> None:
    """A stage is given back a step late, or filled a step early: one stage would be waited for by itself."""
    assert gemms.gemm_stages("tma", "cooperative", 1) is gemms.gemm_stages("tma", "warp_specialized", 2) is None
    assert violations(SPECIALIZED, load={"engine": "tma", "stages": 1}) == {
        "load.stages": "a stage is given back after the next step has landed in another, and there is 1; "
        "use at least 2"
    }
    assert violations(SCALAR, load={"engine": "cp_async", "stages": 1}) == {
        "load.stages": "a stage is filled one step ahead, and there is 1; use at least 2"
    }


def test_gemm_rows() -> None:
    assert gemms.gemm_rows(256, 2) is gemms.gemm_rows(64, 1) is None
    # 192 = 1 x 128 + 64
    assert tile(SPECIALIZED, m=192) == {
        "tile.m": "2 warpgroups x 64 rows of a WGMMA = 128, and tile.m is 192, no multiple of 128 (192 = 1 x 128 + "
        "64); use 128 or 256"
    }
    assert gemms.gemm_rows(100, 1) == Violation(
        "tile.m",
        "1 warpgroup x 64 rows of a WGMMA = 64, and tile.m is 100, no multiple of 64 (100 = 1 x 64 + 36); "
        "use 64 or 128",
    )


def test_gemm_output_dtype() -> None:
    assert gemms.gemm_output_dtype("bf16", "bf16") is gemms.gemm_output_dtype("fp16", "fp32") is None
    assert violations(SPECIALIZED, d={"dtype": "fp16"}) == {
        "d.dtype": "D in fp16 beside A and B in bf16 is not rendered; use bf16 or fp32"
    }


def test_gemm_output() -> None:
    assert gemms.gemm_output("warp_specialized", "fp32", True) is gemms.gemm_output("cooperative", "bf16", False)
    assert violations(COOPERATIVE, d={"dtype": "fp32"}) == {
        "d.dtype": "D in fp32 is rendered with schedule warp_specialized only, not cooperative; leave it out, or "
        "extend g3"
    }
    assert violations(SCALAR, d={"add_c": True}) == {
        "d.add_c": "adding C is rendered with schedule warp_specialized only, not cooperative; leave it out, or "
        "extend g3"
    }


def test_gemm_chunk_columns() -> None:
    # 128 bytes are 64 columns of 16 bits, 32 of float32; 96 = 1 x 64 + 32
    assert tile(SPECIALIZED, n=192) == {}
    assert "tile.n" in tile(SPECIALIZED, n=96)
    assert gemms.gemm_chunk_columns(96, 32) is None
    assert gemms.gemm_chunk_columns(96, 64) == Violation(
        "tile.n",
        "each warp stores 128 bytes = 64 columns of D at a time, and tile.n is 96, no multiple of 64 (96 = 1 x 64 + "
        "32); use 64 or 128",
    )


def test_gemm_output_columns() -> None:
    assert gemms.gemm_output_columns(48) is None
    assert gemms.gemm_output_columns(40) == Violation(
        "tile.n",
        "stmatrix gathers 16 columns of D at a time, and tile.n is 40, no multiple of 16 (40 = 2 x 16 + 8); "
        "use 32 or 48",
    )


def test_gemm_output_over_a() -> None:
    # D 128 x 128 x 2 = 32768; a stage of A is 128 x 64 x 2 = 16384.
    assert violations(COOPERATIVE, load={"engine": "tma", "stages": 2}) == {}
    assert violations(COOPERATIVE, load={"engine": "tma", "stages": 1}) == {
        "load.stages": "D takes the place of A, and 128 x 128 x 2 = 32768 bytes > 16384 of all stages of A; "
        "use more stages, a smaller tile.n or schedule warp_specialized"
    }
    assert gemms.gemm_output_over_a(128, 128, 2, 32768) is None


def test_gemm_grid() -> None:
    assert gemms.gemm_grid(128, 64, 128, 8) is None
    # 64 / 8 = 8 threads side by side, 16 one below the other; 100 = 6 x 16 + 4
    assert gemms.gemm_grid(100, 64, 128, 8) == Violation(
        "tile.m",
        "128 / (64 / 8) = 16 threads one below the other, and tile.m is 100, no multiple of 16 (100 = 6 x 16 + 4); "
        "use 96 or 112",
    )
    assert gemms.gemm_grid(128, 60, 128, 8) == Violation(
        "tile.n",
        "a thread owns 8 adjacent columns of D, 16 bytes of B, and tile.n is 60, no multiple of 8 (60 = 7 x 8 + 4); "
        "use 56 or 64",
    )
    assert gemms.gemm_grid(128, 96, 128, 8) == Violation(
        "tile.threads",
        "96 / 8 = 12 threads side by side, and tile.threads is 128, no multiple of 12 (128 = 10 x 12 + 8); "
        "use 120 or 132",
    )


def test_gemm_copies() -> None:
    assert gemms.gemm_copies("A", 128, 32, 128, 8) is None
    assert gemms.gemm_copies("A", 128, 20, 128, 8) == Violation(
        "tile.k",
        "rows of A are copied 16 bytes = 8 elements at a time, and a row of its tile is 20, no multiple of 8 (20 = "
        "2 x 8 + 4); use 16 or 24",
    )
    # 8 x 64 / 8 = 64 vectors for 128 threads
    assert gemms.gemm_copies("B", 8, 64, 128, 8) == Violation(
        "tile.k",
        "a tile of B is 8 x 64 / 8 = 64 times 16 bytes, which 128 threads copy in no whole number of passes (64, no "
        "multiple of 128 (64 = 0 x 128 + 64)); use a larger tile.k or fewer threads",
    )


def test_boxes_and_spans() -> None:
    """A tile wider than a TMA box, and rows that are no whole swizzle spans, in either major."""
    assert tile(SPECIALIZED, m=512)["tile.m"] == "one TMA box would have 512 rows > 256; use at most 256"
    found = tile(SPECIALIZED, k=32)
    assert found == {
        "smem.a": "a row of A is 32 x 2 = 64 bytes, no whole number of 128-byte swizzle spans (64 = 0 x 128 + 64), "
        "and TMA cannot split it into boxes of 64 elements; use swizzle 64B"
    }
    # MN-major, a row of A is as long as the tile is high: 64 rows of one warpgroup are a whole span, whatever k is.
    transposed = {**PRODUCT, "a": {"source": "smem", "major": "mn"}}
    assert violations(SPECIALIZED, product=transposed, tile={**SPECIALIZED["tile"], "k": 32}) == {}


def test_shared_memory() -> None:
    # A stage is (128 + 256) x 64 x 2 = 49152 bytes; D's buffers 8 warps x 2 x 16 x 128 = 32768; five stages:
    # 245760 + 32768 = 278528, + 2 x 8 x 5 = 80 of barriers.
    assert violations(SPECIALIZED, load={"engine": "tma", "stages": 5}) == {
        "load.stages": "shared memory: sA (5 stages x 128 x 64 x 2) 81920 + sB (5 stages x 256 x 64 x 2) 163840 + sD "
        "(8 warps x 2 x 16 x 64 x 2) 32768 = 278528, + 80 of barriers + 944 of alignment = 279552 > 232448 bytes; "
        "use at most 4 stages"
    }


def test_registers() -> None:
    # Two consumers own 256 rows: 256 x 256 / 256 threads = 256 accumulators each.
    found = tile(SPECIALIZED, m=256)
    assert found["tile.n"] == (
        "registers per consumer thread: D 256 + a part of D, rounded 16 + other 24 = 296 > 240, what setmaxnreg gives "
        "to each of 2 consumer warpgroups, so that they would spill; use a smaller tile.n"
    )


EIGHT_BIT: dict[str, Any] = {
    **SPECIALIZED,
    "problem": {"dtype": "e4m3"},
    "tile": {"m": 128, "n": 256, "k": 128, "warpgroups": 2},
    "product": {"engine": "wgmma", "a": {"source": "smem", "major": "k"}, "b": {"major": "k"}},
    "d": {"dtype": "bf16"},
}


def test_gemm_eight_bit_major() -> None:
    assert violations(EIGHT_BIT) == {}
    assert violations(EIGHT_BIT, product=PRODUCT) == {
        "product.b.major": "WGMMA transposes operands of 16 bits only: along k it reads 16 bytes, 16 elements of 8 "
        "bits that have to lie side by side; use major k and give the tensor contiguous along k, or dtype bf16 or fp16"
    }
    assert gemms.gemm_eight_bit_major("product.a.major", "bf16", "mn") is None


def test_gemm_eight_bit() -> None:
    assert gemms.gemm_eight_bit("bf16", "cooperative", "") is None
    wanted = (
        "e4m3 is rendered with schedule warp_specialized and wgmma with A from smem only; use bf16, or extend g3_fp8"
    )
    for schedule, source in (("cooperative", "smem"), ("warp_specialized", "registers")):
        assert gemms.gemm_eight_bit("e4m3", schedule, source) == Violation("problem.dtype", wanted)


def test_gemm_two_levels() -> None:
    two = {"accumulation": "two_levels", "schedule": {"kind": "warp_specialized", "overlap": False}}
    # Two accumulators of 128 x 256 / 256 threads = 128 registers each do not fit 240; of 128 columns they do.
    assert "D 128 + D of one step 128" in violations(EIGHT_BIT, **two)["tile.n"]
    narrow = {**EIGHT_BIT["tile"], "n": 128}
    assert violations(EIGHT_BIT, **two, tile=narrow) == {}
    assert violations(EIGHT_BIT, accumulation="two_levels", tile=narrow) == {
        "schedule.overlap": "sums of the next step take the registers of this one's, which threads still add; "
        "use overlap: false"
    }
    assert gemms.gemm_two_levels(True, "cooperative", "smem") == Violation(
        "accumulation",
        "two_levels is rendered with schedule warp_specialized and wgmma with A from smem only; use one_level",
    )


def test_eight_bits_in_other_rules() -> None:
    """A product is 32 deep, a span of 128 bytes has 128 elements, and D has a dtype of its own."""
    assert gemms.gemm_output_dtype("e4m3", "fp16") is None
    assert violations(EIGHT_BIT, d={}) == {"d.dtype": "D in e4m3 would keep 4 bits of its sums; use bf16, fp16 or fp32"}
    found = violations(EIGHT_BIT, tile={**EIGHT_BIT["tile"], "k": 80})
    assert found["tile.k"] == (
        "K of the D product is 80, no multiple of 32 (80 = 2 x 32 + 16), the K of an 8-bit WGMMA; use 64 or 96"
    )
    assert found["smem.a"] == (
        "a row of A is 80 x 1 = 80 bytes, no whole number of 128-byte swizzle spans (80 = 0 x 128 + 80), and TMA "
        "cannot split it into boxes of 128 elements; use swizzle none"
    )
