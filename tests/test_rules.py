"""Every rule: who objects, the exact message on hand-derived numbers, and silence right beside the limit."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering import variants

from fa3gen.design import footprint, rules
from fa3gen.design.rules import (
    Kind,
    Violation,
    converting,
    memory,
    output,
    pages,
    parts,
    products,
    scalar,
    schedules,
    splits,
    taste,
    threads,
)
from fa3gen.spec.model import Forward

WGMMA = {
    "problem": {"head_dim": 128},
    "tile": {"q": 128, "kv": 128, "warpgroups": 2},
    "load": {"engine": "tma", "kv_stages": 2, "barrier": "separate"},
    "smem": {"q": "128B", "k": "128B", "v": "128B"},
    "qk": {"engine": "wgmma", "a": {"source": "smem", "major": "k"}, "b": {"major": "k"}},
    "pv": {"engine": "wgmma", "a": {"source": "registers", "major": "k"}, "b": {"major": "mn"}},
    "handoff": {"through": "registers"},
}
SCALAR = {
    "problem": {"head_dim": 64},
    "tile": {"q": 64, "kv": 64, "threads": 256},
    "load": {"engine": "sync"},
    "smem": {"q": "none", "k": "none", "v": "none"},
    "qk": {"engine": "scalar"},
    "pv": {"engine": "scalar"},
    "handoff": {"through": "smem_f32"},
}
NAIVE = {**SCALAR, "tile": {"q": 16, "kv": 16, "threads": 256}, "smem": None, "handoff": {"through": "global_f32"}}


def violations(base: dict[str, Any], **changes: Any) -> dict[str, str]:
    """Field -> message of what `check` finds; a field with two violations fails the test."""
    found = rules.check(Forward.model_validate({**base, **changes}))
    assert len({violation.field for violation in found}) == len(found), found
    return {violation.field: violation.message for violation in found}


def shared_memory_violations(base: dict[str, Any], **changes: Any) -> list[Violation]:
    """What the rule `shared_memory` alone finds, whatever else is wrong."""
    found = rules.check(Forward.model_validate({**base, **changes}))
    return [violation for violation in found if violation.message.startswith("shared memory")]


@pytest.mark.parametrize("spec", [WGMMA, SCALAR, NAIVE])
def test_the_usual_specs_are_legal(spec: dict[str, Any]) -> None:
    assert rules.check(Forward.model_validate(spec)) == []


# WGMMA shapes


def test_wgmma_rows() -> None:
    assert products.wgmma_rows(128, 2) is None
    assert products.wgmma_rows(128, 1) is None  # that is for rows_per_warpgroup to say
    assert products.wgmma_rows(100, 1) == Violation(
        "tile.q", "a warpgroup's WGMMA has M = 64 and each warpgroup owns one: 1 x 64 = 64 rows, not 100; use tile.q 64"
    )


def test_rows_per_warpgroup() -> None:
    assert products.rows_per_warpgroup(128, 2) is None
    assert products.rows_per_warpgroup(100, 1) is None  # that is for wgmma_rows to say
    assert products.rows_per_warpgroup(192, 2) == Violation(
        "tile.q",
        "a warpgroup's WGMMA has M = 64 and each warpgroup owns one: 2 x 64 = 128 rows, not 192; "
        "use tile.q 128 or tile.warpgroups 3",
    )


def test_wgmma_columns() -> None:
    assert products.wgmma_columns("tile.kv", "QK", 256) is None
    assert products.wgmma_columns("tile.kv", "QK", 8) is None
    assert products.wgmma_columns("tile.kv", "QK", 264) == Violation(
        "tile.kv", "N of the QK product is 264 > 256, the widest WGMMA; use at most 256"
    )
    assert products.wgmma_columns("problem.head_dim", "PV", 100) == Violation(
        "problem.head_dim", "N of the PV product is 100, no multiple of 8 (100 = 12 x 8 + 4); use 96 or 104"
    )


def test_wgmma_depth() -> None:
    assert products.wgmma_depth("tile.kv", "PV", 80) is None
    assert products.wgmma_depth("tile.kv", "PV", 88) == Violation(
        "tile.kv",
        "K of the PV product is 88, no multiple of 16 (88 = 5 x 16 + 8), the K of a 16-bit WGMMA; use 80 or 96",
    )
    assert products.wgmma_depth("problem.head_dim", "QK", 8) == Violation(
        "problem.head_dim",
        "K of the QK product is 8, no multiple of 16 (8 = 0 x 16 + 8), the K of a 16-bit WGMMA; use 16",
    )


# WGMMA operands


def test_a_from_registers() -> None:
    assert products.a_from_registers("pv", "registers", "k") is None
    assert products.a_from_registers("pv", "smem", "mn") is None
    assert products.a_from_registers("pv", "registers", "mn") == Violation(
        "pv.a.major",
        "A from registers is always K-major, its fragment has no transposed form; use major: k or source: smem",
    )


def test_b_from_smem() -> None:
    assert products.b_from_smem("qk", "smem") is None
    assert products.b_from_smem("qk", "registers") == Violation(
        "qk.b.source", "WGMMA reads B through a shared-memory descriptor only; use source: smem"
    )


def test_q_from_registers() -> None:
    assert products.q_from_registers("smem", "ping_pong", "wgmma") is None
    assert products.q_from_registers("registers", "cooperative", "wgmma") is None
    assert products.q_from_registers("registers", "ping_pong", "wgmma") == Violation(
        "qk.a.source",
        "Q in registers is rendered with schedule cooperative and both products on WGMMA only, not with ping_pong and "
        "a wgmma pv; use source: smem, or extend k4_2",
    )
    assert products.q_from_registers("registers", "cooperative", "scalar") is not None


def test_operands_apart() -> None:
    assert products.operands_apart("registers", "registers", 64, 128) is None
    assert products.operands_apart("registers", "smem", 64, 64) is None
    assert products.operands_apart("smem", "registers", 64, 64) is None
    assert products.operands_apart("registers", "registers", 64, 64) == Violation(
        "tile.kv",
        "a thread holds Q in 64 / 4 and P in 64 / 4 = 16 registers, and of equally many ptxas 12.9 puts P in those of "
        "Q; use tile.kv 128, or source: smem for one of them",
    )
    found = products.operands_apart("registers", "registers", 128, 128)
    assert found is not None and "use tile.kv 64" in found.message


def test_input_major() -> None:
    assert products.input_major("qk.a.major", "Q", "k", "k", "ping_pong", "wgmma") is None
    assert products.input_major("qk.b.major", "K", "mn", "k", "cooperative", "wgmma") is None
    assert products.input_major("qk.b.major", "K", "mn", "k", "ping_pong", "wgmma") == Violation(
        "qk.b.major",
        "head_dim is contiguous in k and is the K of this product, so K is K-major; mn takes a k whose sequence is "
        "contiguous, which is rendered with schedule cooperative and both products on WGMMA only, not with ping_pong "
        "and a wgmma pv; use k, or extend k4_2",
    )
    assert products.input_major("pv.b.major", "V", "k", "mn", "cooperative", "scalar") == Violation(
        "pv.b.major",
        "head_dim is contiguous in v and is the N of this product, so V is MN-major; k takes a v whose sequence is "
        "contiguous, which is rendered with schedule cooperative and both products on WGMMA only, not with cooperative "
        "and a scalar pv; use mn, or extend k4_2",
    )


def test_forms_of_operands() -> None:
    """All of them where all warps do the same; a specialised kernel has q, k and v with contiguous rows."""
    mn, k = {"source": "smem", "major": "mn"}, {"source": "smem", "major": "k"}
    turned = {"qk": {"engine": "wgmma", "a": mn, "b": mn}, "pv": {"engine": "wgmma", "a": k | mn, "b": k}}
    handoff = {"through": "smem_16bit", "swizzle": "128B"}
    assert violations(WGMMA, **turned, handoff=handoff) == {}
    found = violations(WGMMA, **turned, handoff=handoff, schedule={"kind": "ping_pong", "overlap": False})
    assert {"qk.a.major", "qk.b.major", "pv.b.major"} < found.keys()
    # 60 keys of K side by side are 120 bytes, as many of V; rows of 64 head dims would have been spans of 128.
    tile = {"q": 128, "kv": 96, "warpgroups": 2}
    assert violations(WGMMA, **turned, handoff=handoff, tile=tile, problem={"head_dim": 64}) == {
        f"smem.{name}": f"a column of {name.upper()} is 96 x 2 = 192 bytes, no whole number of 128-byte swizzle spans "
        "(192 = 1 x 128 + 64), and TMA cannot split it into boxes of 64 elements; use swizzle 64B"
        for name in "kv"
    }
    # The other dimension of a box of such a tile is the head dim.
    wide = Forward.model_validate({**WGMMA, **turned, "handoff": handoff, "problem": {"head_dim": 272}})
    box = Violation("problem.head_dim", "one TMA box would have 272 rows > 256; use at most 256")
    assert box in rules.check(wide)
    # O takes the place of Q, and has rows of 96 head dims.
    found = violations(WGMMA, **turned, handoff=handoff, problem={"head_dim": 96})
    assert list(found) == ["smem.q"] and found["smem.q"].startswith("a row of O, in Q's place, is 96 x 2 = 192 bytes")


# Shared-memory layout and TMA


def test_swizzle_span() -> None:
    assert memory.swizzle_span("smem.k", "K", 64, "128B", tma=True) is None
    assert memory.swizzle_span("smem.k", "K", 8, "none", tma=True) is None
    # 96 x 2 = 192 bytes: one span of 128 and half of another; three spans of 64.
    assert memory.swizzle_span("smem.k", "K", 96, "128B", tma=True) == Violation(
        "smem.k",
        "a row of K is 96 x 2 = 192 bytes, no whole number of 128-byte swizzle spans (192 = 1 x 128 + 64), "
        "and TMA cannot split it into boxes of 64 elements; use swizzle 64B",
    )
    assert memory.swizzle_span("handoff.swizzle", "P", 80, "64B", tma=False) == Violation(
        "handoff.swizzle",
        "a row of P is 80 x 2 = 160 bytes, no whole number of 64-byte swizzle spans (160 = 2 x 64 + 32); "
        "use swizzle 32B",
    )
    assert memory.swizzle_span("smem.q", "Q", 12, "none", tma=True) == Violation(
        "smem.q",
        "a row of Q is 12 x 2 = 24 bytes, no whole number of 16-byte rows of a core matrix (24 = 1 x 16 + 8), "
        "and TMA cannot split it into boxes of 8 elements; use a row that is a multiple of 8 elements",
    )


def test_tma_box() -> None:
    assert memory.tma_box("tile.kv", 256) is None
    assert memory.tma_box("tile.kv", 272) == Violation(
        "tile.kv", "one TMA box would have 272 rows > 256; use at most 256"
    )


def test_tma_stride() -> None:
    assert memory.tma_stride(64) is None
    assert memory.tma_stride(60) == Violation(
        "problem.head_dim",
        "TMA needs strides of whole 16 bytes, and a head of 60 x 2 = 120, no multiple of 16 (120 = 7 x 16 + 8); "
        "use 56 or 64",
    )


# Stages and shared memory


def test_q_stages() -> None:
    assert memory.q_stages(1, "cooperative") is None
    assert memory.q_stages(3, "ping_pong") is None
    assert memory.q_stages(2, "cooperative") == Violation(
        "load.q_stages", "with schedule cooperative a CTA loads one Q tile into one buffer, not 2; use 1"
    )


def test_shared_memory() -> None:
    # 32768 + 98304 + 98304 = 229376, which leaves 232448 - 229376 = 3072 bytes.
    regions = [("Q", 32768), ("K", 98304), ("V", 98304)]
    assert memory.shared_memory(regions, 2048, 1024) is None
    assert memory.shared_memory(
        regions, 2056, 1024, field="load.kv_stages", ways_out=["at most 2 stages", "tile.kv 112"]
    ) == Violation(
        "load.kv_stages",
        "shared memory: Q 32768 + K 98304 + V 98304 = 229376, + 2056 of barriers + 1024 of alignment = 232456 > "
        "232448 bytes; use at most 2 stages or tile.kv 112",
    )
    assert memory.shared_memory([("S", 232449)], 0, 0) == Violation(
        "tile.kv",
        "shared memory: S 232449 = 232449, + 0 of barriers + 0 of alignment = 232449 > 232448 bytes; "
        "use a smaller tile.q or tile.kv",
    )


# Registers and threads


def test_registers_per_thread() -> None:
    assert threads.registers_per_thread([("O", 128), ("S", 64), ("P", 32), ("other", 31)]) is None
    assert threads.registers_per_thread([("O", 64), ("S", 128), ("P", 64), ("other", 24)]) == Violation(
        "tile.kv",
        "registers per thread: O 64 + S 128 + P 64 + other 24 = 280 > 255, so that they would spill; "
        "use a smaller tile.kv or head_dim",
    )


def test_registers_per_sm() -> None:
    # 65536 / 384 threads = 170.7, so 168 registers fit and 176 do not.
    assert threads.registers_per_sm("tile.warpgroups", 384, [("O", 64), ("S", 104)]) is None
    assert threads.registers_per_sm("tile.warpgroups", 384, [("O", 64), ("S", 105)]) == Violation(
        "tile.warpgroups",
        "registers per SM: O 64 + S 105 = 169, rounded up to 176; x 384 threads = 67584 > 65536; "
        "use a smaller tile.q or tile.kv",
    )


def test_scalar_threads() -> None:
    assert threads.scalar_threads(1024) is None
    assert threads.scalar_threads(1056) == Violation(
        "tile.threads", "a CTA has at most 1024 threads, not 1056; use fewer"
    )


def test_whole_warps() -> None:
    assert threads.whole_warps(96) is None
    assert threads.whole_warps(1100) is None  # that is for scalar_threads to say
    assert threads.whole_warps(100) == Violation(
        "tile.threads",
        "a CTA has whole warps, and tile.threads is 100, no multiple of 32 (100 = 3 x 32 + 4); use 96 or 128",
    )


def test_scalar_grid() -> None:
    assert scalar.scalar_grid("tile.q", 64, 256) is None
    assert scalar.scalar_grid("tile.q", 40, 256) == Violation(
        "tile.q",
        "256 threads form 16 rows x 16 columns, and tile.q is 40, no multiple of 16 (40 = 2 x 16 + 8); use 32 or 48",
    )
    assert scalar.scalar_grid("tile.q", 12, 128) == Violation(
        "tile.q",
        "128 threads form 8 rows x 16 columns, and tile.q is 12, no multiple of 8 (12 = 1 x 8 + 4); use 8 or 16",
    )
    assert scalar.scalar_grid("problem.head_dim", 72, 128) == Violation(
        "problem.head_dim",
        "128 threads form 8 rows x 16 columns, and problem.head_dim is 72, no multiple of 16 (72 = 4 x 16 + 8); "
        "use 64 or 80",
    )


def test_wgmma_threads() -> None:
    assert threads.wgmma_threads(8) is None
    assert threads.wgmma_threads(9) == Violation(
        "tile.warpgroups", "9 warpgroups x 128 = 1152 threads > 1024; use at most 8"
    )


# Which parts go together


def test_scalar_vector() -> None:
    assert [head_dim for head_dim in range(16, 257, 16) if scalar.scalar_vector(head_dim) is None] == [16, 32, 64, 128]
    assert scalar.scalar_vector(96) == Violation(
        "problem.head_dim",
        "a thread owns 96 / 16 = 6 adjacent columns of V, and 6 elements do not divide a 16-byte vector of 8; "
        "use 16, 32, 64 or 128, or wgmma for pv",
    )


def test_copy_rows() -> None:
    # 128 threads, 128 / 8 = 16 vectors per row: 8 rows at a time.
    assert scalar.copy_rows("tile.kv", 64, 128, 128) is None
    assert scalar.copy_rows("tile.kv", 36, 128, 128) == Violation(
        "tile.kv",
        "128 threads copy 128 / (128 / 8) = 8 rows at a time, "
        "and tile.kv is 36, no multiple of 8 (36 = 4 x 8 + 4); use 32 or 40",
    )
    assert scalar.copy_rows("tile.q", 64, 96, 128) == Violation(
        "tile.threads",
        "a row is 96 / 8 = 12 vectors of 16 bytes, and 128 threads copy no whole number of rows at a time; "
        "use 96 or 192",
    )


def test_naive_scores() -> None:
    assert scalar.naive_scores(16, 16, 256) is None
    assert scalar.naive_scores(16, 8, 256) == Violation(
        "tile.threads", "one thread computes one score of the tile: 16 x 8 = 128 threads, not 256"
    )


def test_naive_rows() -> None:
    assert scalar.naive_rows(128, 256) is None
    assert scalar.naive_rows(128, 192) == Violation(
        "tile.threads",
        "one thread computes one element of O, in whole rows, and 192 is 1 x 128 + 64; use 128 or 256",
    )


def test_scattered_scores() -> None:
    assert scalar.scattered_scores(1) is None
    assert scalar.scattered_scores(2) == Violation(
        "tile.warpgroups",
        "scores scattered to shared memory are shared by 1 warpgroup, not 2; "
        "use warpgroups 1 with tile.q 64, or wgmma for pv",
    )


def test_optional_lse() -> None:
    assert parts.optional_lse(True, "scalar") is None
    assert parts.optional_lse(False, "wgmma") is None
    assert parts.optional_lse(False, "scalar") == Violation(
        "outputs.lse",
        "a kernel without LSE is rendered with both products on WGMMA only; use lse: true (attention() returns O alone "
        "unless asked), or extend k4_2",
    )


def test_window_sides() -> None:
    assert parts.window_sides("window", 512, 0) is None
    assert parts.window_sides("window", None, None) is None
    assert parts.window_sides("causal", None, None) is None
    assert parts.window_sides("window", 0, None) == Violation(
        "mask.right",
        "a window has both sides compiled in, or gets both with each call, and here is left: 0 alone; give right as "
        "well (1073741824 for all keys), or leave both out",
    )
    assert parts.window_sides("window", None, 7) == Violation(
        "mask.left",
        "a window has both sides compiled in, or gets both with each call, and here is right: 7 alone; give left as "
        "well (1073741824 for all keys), or leave both out",
    )


def test_window_product() -> None:
    assert parts.window_product("window", "wgmma") is None
    assert parts.window_product("causal", "scalar") is None
    assert parts.window_product("window", "scalar") == Violation(
        "mask", "a sliding window is rendered with both products on WGMMA only; use mask causal or none, or extend k4_2"
    )


def test_thread_unit() -> None:
    assert threads.thread_unit(True, None, 2) is None
    assert threads.thread_unit(False, 256, None) is None
    assert threads.thread_unit(True, 256, None) == Violation(
        "tile.threads",
        "WGMMA is issued by warpgroups of 128 threads; give tile.warpgroups 2 in place of tile.threads "
        "(threads: null, where a base gives it)",
    )
    assert threads.thread_unit(False, None, 2) == Violation(
        "tile.warpgroups",
        "without WGMMA there are no warpgroups; give tile.threads 256 in place of tile.warpgroups "
        "(warpgroups: null, where a base gives it)",
    )


def test_engine_pair() -> None:
    assert parts.engine_pair("wgmma", "scalar") is None
    assert parts.engine_pair("scalar", "wgmma") == Violation(
        "qk.engine", "a scalar QK product before a WGMMA PV product is not rendered; use wgmma for both"
    )


def test_wgmma_load() -> None:
    assert parts.wgmma_load(True, "tma") is None
    assert parts.wgmma_load(False, "sync") is None
    assert parts.wgmma_load(True, "cp_async") == Violation(
        "load.engine", "WGMMA reads tiles that TMA wrote; cp_async loads are not rendered with it; use tma"
    )


@pytest.mark.parametrize(
    ("facts", "field", "message"),
    [
        (
            ("global_f32", "wgmma", "scalar", None),
            "handoff.through",
            "global_f32 needs scalar qk and pv, got wgmma and scalar; use smem_f32",
        ),
        (
            ("smem_f32", "wgmma", "wgmma", "registers"),
            "handoff.through",
            "smem_f32 needs a scalar pv, got wgmma and wgmma; use registers",
        ),
        (
            ("smem_16bit", "wgmma", "scalar", None),
            "handoff.through",
            "smem_16bit needs wgmma for qk and pv, got wgmma and scalar; use smem_f32",
        ),
        (
            ("registers", "scalar", "scalar", None),
            "handoff.through",
            "registers needs wgmma for qk and pv, got scalar and scalar; use smem_f32",
        ),
        (
            ("smem_16bit", "wgmma", "wgmma", "registers"),
            "pv.a.source",
            "P goes through shared memory (handoff smem_16bit); use source: smem",
        ),
        (
            ("registers", "wgmma", "wgmma", "smem"),
            "pv.a.source",
            "P stays in registers (handoff registers); use source: registers",
        ),
    ],
)
def test_handoff_engines(facts: tuple[str, str, str, str | None], field: str, message: str) -> None:
    assert parts.handoff_engines(*facts) == Violation(field, message)


@pytest.mark.parametrize(
    "facts",
    [
        ("global_f32", "scalar", "scalar", None),
        ("smem_f32", "scalar", "scalar", None),
        ("smem_f32", "wgmma", "scalar", None),
        ("smem_16bit", "wgmma", "wgmma", "smem"),
        ("registers", "wgmma", "wgmma", "registers"),
    ],
)
def test_handoffs_of_the_ladder(facts: tuple[str, str, str, str | None]) -> None:
    assert parts.handoff_engines(*facts) is None


def test_global_handoff_load() -> None:
    assert parts.global_handoff_load("global_f32", "sync") is None
    assert parts.global_handoff_load("smem_f32", "tma") is None
    assert parts.global_handoff_load("global_f32", "tma") == Violation(
        "load.engine", "handoff global_f32 reads global memory directly, so that tma has nothing to fill; use sync"
    )


def test_smem_section() -> None:
    assert parts.smem_section("global_f32", False) is None
    assert parts.smem_section("registers", True) is None
    assert parts.smem_section("global_f32", True) == Violation(
        "smem", "handoff global_f32 keeps no tile in shared memory; take smem out (smem: null, over a base)"
    )
    assert parts.smem_section("smem_f32", False) == Violation(
        "smem", "Q, K and V pass through shared memory; give their swizzles, {q: none, k: none, v: none}"
    )


# check


@pytest.mark.parametrize(
    ("base", "changes", "fields"),
    [
        (WGMMA, {"tile": {"q": 64, "kv": 128, "warpgroups": 2}}, {"tile.q"}),
        (WGMMA, {"tile": {"q": 128, "kv": 128, "threads": 256}}, {"tile.threads"}),
        (WGMMA, {"tile": {"q": 128, "kv": 88, "warpgroups": 2}}, {"tile.kv"}),
        (WGMMA, {"problem": {"head_dim": 96}}, {"smem.q", "smem.k", "smem.v"}),
        (WGMMA, {"load": {"engine": "cp_async", "kv_stages": 2}}, {"load.engine"}),
        (
            WGMMA,
            {"load": {"engine": "tma", "q_stages": 2, "kv_stages": 1, "barrier": "shared"}},
            {"load.q_stages"},
        ),
        (WGMMA, {"smem": None}, {"smem"}),
        (WGMMA, {"handoff": {"through": "smem_16bit", "swizzle": "128B"}}, {"pv.a.source"}),
        (WGMMA, {"tile": {"q": 128, "kv": 128}}, {"tile"}),
        (WGMMA, {"tile": {"q": 128, "kv": 128, "warpgroups": 2, "threads": 256}}, {"tile"}),
        (WGMMA, {"tile": {"q": 100, "kv": 128, "warpgroups": 2}}, {"tile.q"}),
        (SCALAR, {"tile": {"q": 40, "kv": 40, "threads": 256}}, {"tile.q", "tile.kv"}),
        (SCALAR, {"tile": {"q": 64, "kv": 64, "warpgroups": 2}}, {"tile.warpgroups"}),
        (SCALAR, {"handoff": {"through": "registers"}}, {"handoff.through"}),
        (NAIVE, {"smem": SCALAR["smem"]}, {"smem"}),
        (NAIVE, {"load": {"engine": "cp_async", "kv_stages": 2}}, {"load.engine"}),
    ],
)
def test_check_maps_specs_to_facts(base: dict[str, Any], changes: dict[str, Any], fields: set[str]) -> None:
    assert set(violations(base, **changes)) == fields


# Schedules


def test_schedule_engines() -> None:
    assert schedules.schedule_engines("cooperative", "scalar", "scalar") is None
    assert schedules.schedule_engines("ping_pong", "wgmma", "wgmma") is None
    assert schedules.schedule_engines("warp_specialized", "wgmma", "scalar") == Violation(
        "schedule.kind",
        "warp_specialized needs wgmma for qk and pv, got wgmma and scalar; use cooperative, or extend k4_2",
    )


def test_schedule_handoff() -> None:
    assert schedules.schedule_handoff("cooperative", "smem_16bit") is None
    assert schedules.schedule_handoff("ping_pong", "registers") is None
    assert schedules.schedule_handoff("ping_pong", "smem_16bit") == Violation(
        "handoff.through",
        "P through shared memory is rendered with schedule cooperative only, not ping_pong; use registers",
    )


def test_schedule_barrier() -> None:
    assert schedules.schedule_barrier("cooperative", "shared") is None
    assert schedules.schedule_barrier("warp_specialized", "separate") is None
    assert schedules.schedule_barrier("warp_specialized", "shared") == Violation(
        "load.barrier",
        "with warp_specialized K of the next tile is in use before V of this one is free, so that they cannot share a "
        "barrier; use separate",
    )


def test_consumer_warpgroups() -> None:
    assert [count for count in range(1, 9) if threads.consumer_warpgroups(count) is None] == [1, 2, 3]
    # 65536 / 640 = 102.4, 96 in units of 8; 5 x 96 - 24 = 456, / 4 = 114, 112 in units of 8.
    assert threads.consumer_warpgroups(4) == Violation(
        "tile.warpgroups",
        "4 consumer warpgroups and the producer are 640 threads, launched with 96 registers each; setmaxnreg could "
        "raise a consumer to 112 only ((5 x 96 - 24) / 4); use 1 to 3",
    )


def test_ping_pong_partners() -> None:
    assert schedules.ping_pong_partners("warp_specialized", 1) is None
    assert schedules.ping_pong_partners("ping_pong", 2) is None
    assert schedules.ping_pong_partners("ping_pong", 1) == Violation(
        "tile.warpgroups",
        "ping_pong needs consumer warpgroups that take turns, and there is 1; "
        "use warpgroups 2 with tile.q 128, or schedule warp_specialized",
    )


def test_consumer_registers() -> None:
    assert threads.consumer_registers([("O", 64), ("S", 176)], 2, False, 240) is None
    assert threads.consumer_registers([("O", 64), ("S", 172)], 2, True, 240) is None
    assert threads.consumer_registers([("O", 64), ("S", 173)], 2, True, 240) == Violation(
        "tile.kv",
        "registers per consumer thread: O 64 + S 173 = 237, + 4 to spare = 241 > 240, what setmaxnreg gives to each of "
        "2 consumer warpgroups, so that they would spill; use a smaller tile.kv or overlap: false",
    )
    assert threads.consumer_registers([("O", 32), ("S", 129)], 3, False, 160) == Violation(
        "tile.kv",
        "registers per consumer thread: O 32 + S 129 = 161 > 160, what setmaxnreg gives to each of 3 consumer "
        "warpgroups, so that they would spill; use a smaller tile.kv or fewer warpgroups",
    )
    assert threads.consumer_registers([("O", 257)], 1, False, 256) == Violation(
        "tile.kv",
        "registers per consumer thread: O 257 = 257 > 256, what setmaxnreg gives to each of 1 consumer warpgroup, "
        "so that they would spill; use a smaller tile.kv",
    )


def test_schedule_ctas() -> None:
    assert schedules.schedule_ctas("cooperative", 1) is None
    assert schedules.schedule_ctas("warp_specialized", 2) is None
    assert schedules.schedule_ctas("cooperative", 2) == Violation(
        "tile.ctas_per_sm",
        "CTAs of a cooperative kernel share an SM as far as they fit; use ctas_per_sm 1, or schedule warp_specialized",
    )


def test_grid_loads() -> None:
    assert schedules.grid_loads("single_tile", False, 2) is None
    assert schedules.grid_loads("grid", True, 1) is None
    assert schedules.grid_loads("grid", False, 1) == Violation(
        "scheduler", "grid is rendered with overlap: true only; use single_tile, or a schedule with overlap: true"
    )
    assert schedules.grid_loads("grid", True, 2) == Violation(
        "load.q_stages", "with scheduler grid a CTA has one tile of queries, not 2; use 1"
    )


def test_accumulator_at_launch() -> None:
    assert threads.accumulator_at_launch(2, 208, 128) is None  # 104 + 24
    assert threads.accumulator_at_launch(2, 256, 128) == Violation(
        "tile.ctas_per_sm",
        "with 2 CTAs on an SM a thread is launched with 128 registers, and a product of 256 columns takes 256 / 2 + 24 "
        "= 152; use fewer CTAs or columns",
    )


def test_shared_sm() -> None:
    assert memory.shared_sm(2, 113 * 1024) is None  # 2 x 114 KB of 228
    assert memory.shared_sm(2, 148480) == Violation(
        "tile.ctas_per_sm",
        "shared memory of 2 CTAs: 2 x (148480 + 1024) = 299008 > 233472 bytes of an SM; use fewer CTAs or a smaller "
        "tile.kv",
    )


def test_schedule_v_dim() -> None:
    assert schedules.schedule_v_dim("cooperative", 128, 128) is None
    assert schedules.schedule_v_dim("ping_pong", 192, 128) is None
    assert schedules.schedule_v_dim("cooperative", 192, 128) == Violation(
        "problem.head_dim_v",
        "head_dim_v 128 beside head_dim 192 is rendered with schedule warp_specialized or ping_pong only; "
        "extend k5 or k6, or leave head_dim_v out",
    )


def test_schedule_pack() -> None:
    assert schedules.schedule_pack("cooperative", 1) is None
    assert schedules.schedule_pack("ping_pong", 4) is None
    assert schedules.schedule_pack("cooperative", 4) == Violation(
        "tile.pack_heads",
        "a tile of 4 query heads is rendered with schedule warp_specialized or ping_pong only; "
        "extend k5 or k6, or use pack_heads 1",
    )


def test_packed_rows() -> None:
    assert output.packed_rows(192, 8) is None
    assert output.packed_rows(128, 6) == Violation(
        "tile.pack_heads",
        "a tile of 128 query rows holds no whole number of positions of 6 heads (128 = 21 x 6 + 2); "
        "use a divisor of 128",
    )


def test_output_over_q() -> None:
    assert output.output_over_q(128, 128) is None
    assert output.output_over_q(128, 192) == Violation(
        "problem.head_dim_v",
        "O takes the place of Q in shared memory, and rows of 192 are wider than its 128; use at most 128",
    )


def test_output_columns() -> None:
    assert output.output_columns(112) is None
    assert output.output_columns(120) == Violation(
        "problem.head_dim_v",
        "O is stored 16 columns at a time (stmatrix), and its rows are 120, no multiple of 16 (120 = 7 x 16 + 8); "
        "use 112 or 128",
    )


SPECIALIZED = {**WGMMA, "schedule": {"kind": "warp_specialized", "overlap": True}}


def test_rules_of_packing_are_applied() -> None:
    assert violations(SPECIALIZED, tile={"q": 128, "kv": 64, "warpgroups": 2, "pack_heads": 4}) == {}
    packed = {"q": 128, "kv": 64, "warpgroups": 2, "pack_heads": 3}
    assert list(violations(SPECIALIZED, tile=packed)) == ["tile.pack_heads"]
    assert list(violations(WGMMA, tile={**packed, "pack_heads": 4})) == ["tile.pack_heads"]


def test_rules_of_v_are_applied() -> None:
    """V is the B operand of P V, O takes its rows and Q's place: each rule looks at the head dim that is v's."""
    tile = {"q": 128, "kv": 64, "warpgroups": 2}
    narrow = {"head_dim": 192, "head_dim_v": 128}
    assert violations(SPECIALIZED, tile=tile, problem=narrow) == {}
    assert list(violations(WGMMA, tile=tile, problem=narrow)) == ["problem.head_dim_v"]
    wide = {**SPECIALIZED, "tile": tile, "problem": {"head_dim": 128, "head_dim_v": 320}}
    found_wide = [v.message for v in rules.check(Forward.model_validate(wide)) if v.field == "problem.head_dim_v"]
    assert [message.partition(";")[0] for message in found_wide] == [
        "N of the PV product is 320 > 256, the widest WGMMA",
        "O takes the place of Q in shared memory, and rows of 320 are wider than its 128",
    ]
    found = violations(SPECIALIZED, tile=tile, problem={"head_dim": 192, "head_dim_v": 96})
    assert "a row of V is 96 x 2 = 192 bytes" in found["smem.v"]
    assert "a row of O, in Q's place, is 96 x 2 = 192 bytes" in found["smem.q"]
    odd = {**SPECIALIZED, "tile": tile, "problem": {"head_dim": 128, "head_dim_v": 60}}
    found_odd = [v.message for v in rules.check(Forward.model_validate(odd)) if v.field == "problem.head_dim_v"]
    assert any(message.startswith("TMA needs strides of whole 16 bytes") for message in found_odd)


def test_registers_of_a_consumer() -> None:
    # O 128 x 128 / 256 = 64; S 128 x 208 / 256 = 104, P half of it; 24 others.
    stages = {"engine": "tma", "kv_stages": 1, "barrier": "separate"}
    found = violations(SPECIALIZED, tile={"q": 128, "kv": 208, "warpgroups": 2}, load=stages)
    assert found == {
        "tile.kv": "registers per consumer thread: O 64 + S 104 + P 52 + other 24 = 244, + 4 to spare = 248 > 240, "
        "what setmaxnreg gives to each of 2 consumer warpgroups, so that they would spill; use a smaller tile.kv or "
        "overlap: false"
    }
    # Without overlap P takes the place of S: 64 + 104 + 104 / 8 + 24 = 205.
    sequential = {"kind": "warp_specialized", "overlap": False}
    tile = {"q": 128, "kv": 208, "warpgroups": 2}
    assert violations(SPECIALIZED, tile=tile, load=stages, schedule=sequential) == {}


def test_rules_of_schedules_are_applied() -> None:
    found = violations(
        SPECIALIZED,
        tile={"q": 256, "kv": 64, "warpgroups": 4},
        load={"engine": "tma", "kv_stages": 2, "barrier": "shared"},
    )
    assert list(found) == ["load.barrier", "tile.warpgroups"]
    found = violations(SCALAR, schedule={"kind": "ping_pong", "overlap": False})
    assert list(found) == ["schedule.kind"]
    smem = {"engine": "wgmma", "a": {"source": "smem", "major": "k"}, "b": {"major": "mn"}}
    handoff = {"through": "smem_16bit", "swizzle": "128B"}
    assert list(violations(SPECIALIZED, pv=smem, handoff=handoff)) == ["handoff.through"]
    tile = {"q": 64, "kv": 64, "warpgroups": 1}
    assert violations(SPECIALIZED, tile=tile) == {}
    assert list(violations(SPECIALIZED, tile=tile, schedule={"kind": "ping_pong", "overlap": True})) == [
        "tile.warpgroups"
    ]


# Persistent kernels


def test_scheduler_schedule() -> None:
    assert schedules.scheduler_schedule("single_tile", "cooperative") is None
    assert schedules.scheduler_schedule("static", "warp_specialized") is None
    assert schedules.scheduler_schedule("dynamic", "ping_pong") is None
    assert schedules.scheduler_schedule("static", "cooperative") == Violation(
        "scheduler",
        "static needs schedule warp_specialized or ping_pong, got cooperative; use single_tile, or extend k6",
    )


def test_scheduler_mask() -> None:
    for mask in ("none", "causal", "window"):
        for scheduler in ("single_tile", "static", "dynamic"):
            assert schedules.scheduler_mask(scheduler, mask, "dense") is None
    assert schedules.scheduler_mask("stream_k", "none", "packed") is None
    legal = {("causal", "dense"): "dynamic", ("window", "dense"): "static", ("window", "packed"): "dynamic"}
    for (mask, layout), other in legal.items():
        assert schedules.scheduler_mask("stream_k", mask, layout) == Violation(
            "scheduler",
            f"stream_k deals out the last wave as if every tile of queries visited all keys, and mask {mask} hides "
            f"some; use {other}",
        )


def test_scheduler_output() -> None:
    for engine in ("wgmma", "scalar"):
        assert output.scheduler_output("single_tile", "over_q", "cooperative", engine) is None
    for scheduler in ("single_tile", "static"):
        for o in ("own_buffer", "direct"):
            assert output.scheduler_output(scheduler, o, "ping_pong", "wgmma") is None
    assert output.scheduler_output("single_tile", "direct", "cooperative", "wgmma") is None
    assert output.scheduler_output("single_tile", "direct", "cooperative", "scalar") == Violation(
        "outputs.o", "direct says how O leaves a WGMMA's accumulator, and pv is scalar; use over_q, the default"
    )
    for engine, ways in (("wgmma", "over_q or direct"), ("scalar", "over_q")):
        assert output.scheduler_output("single_tile", "own_buffer", "cooperative", engine) == Violation(
            "outputs.o",
            f"own_buffer is rendered with schedule warp_specialized or ping_pong only, not cooperative; use {ways}",
        )
    assert output.scheduler_output("dynamic", "over_q", "ping_pong", "wgmma") == Violation(
        "outputs.o",
        "with scheduler dynamic the next Q is loaded while O is stored, so that O cannot lie over Q; use own_buffer, "
        "or direct where shared memory is short",
    )


def test_packed_slices() -> None:
    # A warp stores 64 / 4 = 16 rows: 2 positions of 8 heads, but 5 and a third of 3.
    assert output.packed_slices("own_buffer", 8) is None
    assert output.packed_slices("direct", 3) is None
    assert output.packed_slices("own_buffer", 3) == Violation(
        "outputs.o",
        "own_buffer stores the rows of each warp as whole positions of 3 heads, and a warp has 16, no multiple of 3 "
        "(16 = 5 x 3 + 1); use over_q with scheduler single_tile or grid, or direct",
    )


def test_rescale_overlap() -> None:
    assert schedules.rescale_overlap(None, False) is None
    assert schedules.rescale_overlap(8, True) is None
    assert schedules.rescale_overlap(8, False) == Violation(
        "softmax.rescale_above",
        "rescaling now and then is rendered with overlap: true only; use null, or a schedule with overlap: true",
    )


def test_packed_scheduler() -> None:
    assert schedules.packed_scheduler("packed", "dynamic") is schedules.packed_scheduler("paged", "even") is None
    found = schedules.packed_scheduler("dense", "even")
    assert found is not None and "of dense tensors the host knows them; use grid with split" in found.message
    assert schedules.packed_scheduler("dense", "static") is None
    assert schedules.packed_scheduler("packed", "static") == Violation(
        "scheduler",
        "static takes tiles that are known when the kernel starts, and of packed sequences only the device knows the "
        "lengths; use dynamic with schedule warp_specialized or ping_pong (extend k5 or k6), or layout dense",
    )
    assert schedules.packed_scheduler("packed", "stream_k") is None
    assert schedules.packed_scheduler("paged", "stream_k") == Violation(
        "scheduler",
        "shares of the last wave of paged sequences are not rendered; use dynamic or even, or layout packed",
    )


def test_packed_shares() -> None:
    assert schedules.packed_shares("problem.dtype", "fp16", ("bf16", "fp16")) is None
    for field, value, values, allowed in (
        ("tile.pack_heads", 4, (1,), "1"),
        ("softmax.softcap", True, (False,), "false"),
        ("problem.dtype", "e4m3", ("bf16", "fp16"), "bf16 or fp16"),
    ):
        assert schedules.packed_shares(field, value, values) == Violation(
            field,
            f"with layout packed, stream_k is rendered with {field}: {allowed} only; use that, or scheduler dynamic",
        )


def test_rules_of_packed_shares_are_applied() -> None:
    shared = variants()["fwd_packed_shared_d64"].spec.model_dump()
    assert violations(shared) == {}
    assert violations({**shared, "problem": {**shared["problem"], "dtype": "fp16"}}) == {}
    broken: dict[str, dict[str, Any]] = {
        "scheduler": {"mask": {"kind": "causal"}},
        "order": {"order": "by_head"},
        "tile.pack_heads": {"tile": {**shared["tile"], "pack_heads": 8}},
        "tile.ctas_per_sm": {"tile": {**shared["tile"], "ctas_per_sm": 2}},
        "softmax.softcap": {"softmax": {**shared["softmax"], "softcap": True}},
        "kv.dtype": {"kv": {"dtype": "e4m3"}},
    }
    for field, changes in broken.items():
        assert field in violations({**shared, **changes}), field
    paged = {"problem": {**shared["problem"], "layout": "paged"}, "load": {**shared["load"], "page_rows": 16}}
    assert "scheduler" in violations({**shared, **paged})
    sunk = violations({**shared, "softmax": {**shared["softmax"], "sink": True}})
    assert "scheduler" in sunk


def test_order_of_packed() -> None:
    legal = [("by_sequence", "dense", "static"), ("by_head", "packed", "dynamic"), ("woven", "paged", "dynamic")]
    assert [schedules.order_of_packed(*asked) for asked in legal] == [None] * 3
    for order, layout, scheduler in (("by_head", "dense", "dynamic"), ("woven", "packed", "even")):
        assert schedules.order_of_packed(order, layout, scheduler) == Violation(
            "order",
            f"{order} is rendered for packed sequences and pages with scheduler dynamic, not for layout "
            f"{layout} with {scheduler}; use by_sequence, or layout packed with scheduler dynamic",
        )


def test_order_woven() -> None:
    """Any schedule, mask and group has the other orders; of warpgroups without rows nobody waits for a turn."""
    for group in ("multiple", "any"):
        assert schedules.order_woven("woven", "warp_specialized", "causal", group, bare=True) is None
    assert schedules.order_woven("by_head", "ping_pong", "none", "any", bare=False) is None
    words = (
        "woven is rendered with schedule warp_specialized, mask causal and tile.group: multiple or any, of 16 bits, "
        "with one level of sums and softmax.row_max: online; use these, or by_head"
    )
    for kind, mask, group, bare in (
        ("ping_pong", "causal", "multiple", True),
        ("warp_specialized", "none", "multiple", True),
        ("warp_specialized", "causal", "fitted", True),
        ("warp_specialized", "causal", "multiple", False),
    ):
        assert schedules.order_woven("woven", kind, mask, group, bare=bare) == Violation("order", words)


def test_order_woven_is_applied() -> None:
    """What its loops over keys lack: the shift of scores from a first maximum, sums anew, turns, and 8 bits."""
    woven = variants()["fwd_packed_woven_d128_causal"].spec.model_dump()
    legal: list[dict[str, Any]] = [
        {},
        {"softmax": {**woven["softmax"], "softcap": True}},
        {"tile": {**woven["tile"], "group": "any"}},
    ]
    assert [each for each in legal if violations(woven, **each)] == []
    changes: list[dict[str, Any]] = [
        {"softmax": {**woven["softmax"], "softcap": True, "row_max": "first"}},
        {"schedule": {"kind": "ping_pong", "overlap": True}},
        {"mask": {"kind": "none"}},
        {"kv": {"dtype": "e4m3"}},
    ]
    assert [each for each in changes if "order" not in violations(woven, **each)] == []


def test_packed_overlap() -> None:
    assert schedules.packed_overlap("packed", True) is schedules.packed_overlap("dense", False) is None
    assert schedules.packed_overlap("packed", False) == Violation(
        "schedule.overlap", "layout packed is rendered with overlap: true only; use that, or layout dense"
    )


def test_unbounded_scores() -> None:
    legal = [("online", False, "fp16"), ("online", True, "bf16"), ("first", True, "bf16")]
    assert [schedules.unbounded_scores(*asked) for asked in legal] == [None] * 3
    assert schedules.unbounded_scores("first", False, "bf16") == Violation(
        "softmax.row_max",
        "scores without a cap may exceed a first maximum by any size; use softcap: true, or row_max: online",
    )
    assert schedules.unbounded_scores("first", True, "fp16") == Violation(
        "softmax.row_max",
        "relative to a first maximum P may be 2^86, and fp16 ends before; use row_max: online",
    )


def test_first_maximum() -> None:
    assert schedules.first_maximum("online", False, 8, True, "stream_k") is None
    assert schedules.first_maximum("first", True, None, False, "dynamic") is None
    assert schedules.first_maximum("first", True, 8, False, "dynamic") == Violation(
        "softmax.rescale_above", "row_max: first never rescales O; use null, or row_max: online"
    )
    for asked, needed in {
        (False, None, False, "dynamic"): "with overlap: true",
        (True, None, True, "dynamic"): "without sinks",
        (True, None, False, "stream_k"): "with schedulers but stream_k",
    }.items():
        assert schedules.first_maximum("first", *asked) == Violation(
            "softmax.row_max", f"row_max: first is rendered {needed} only; use row_max: online"
        )


def test_sink_scheduler() -> None:
    assert output.sink_scheduler("static") is output.sink_scheduler("single_tile") is None
    assert output.sink_scheduler("stream_k") == Violation(
        "scheduler", "sinks are rendered with schedulers but stream_k; use static or dynamic"
    )


def test_kv_from_window() -> None:
    legal = [
        ("first_key", False, False, "single_tile"),
        ("window", True, True, "static"),
        ("window", True, True, "dynamic"),
        ("window", True, True, "even"),
    ]
    assert [schedules.kv_from_window(*asked) for asked in legal] == [None] * 4
    for asked in ((False, True, "dynamic"), (True, False, "dynamic"), (True, True, "grid")):
        assert schedules.kv_from_window("window", *asked) == Violation(
            "tile.kv_from",
            "kv_from: window is rendered with windows that calls give (mask {kind: window}), overlap: true, and "
            "scheduler static, dynamic or even; use first_key",
        )


def test_split_scheduler() -> None:
    assert splits.split_scheduler("grid", "dense", "at_most") is None
    assert (
        splits.split_scheduler("even", "packed", "at_most")
        is splits.split_scheduler("even", "paged", "at_most")
        is None
    )
    for asked, field in (
        (("grid", "dense", "multiple"), "tile.group"),
        (("grid", "paged", "at_most"), "split"),
        (("even", "dense", "at_most"), "split"),
        (("static", "dense", "at_most"), "split"),
    ):
        found = splits.split_scheduler(*asked)
        assert found is not None and found.field == field


def test_even_shares() -> None:
    assert splits.even_shares("even", True) is splits.even_shares("dynamic", False) is None
    assert splits.even_shares("even", False) == Violation(
        "scheduler", "even cuts tiles into parts of their keys; use dynamic, or split: {count: auto}"
    )


def test_even_parts() -> None:
    """CTAs that have even shares of tiles may share an SM; of whole parts they do not."""
    assert splits.even_parts("even", None, 2) is splits.even_parts("even", 512, 1) is splits.even_parts("grid", 512, 2)
    assert splits.even_parts("even", None, 2) is None
    found = splits.even_parts("even", 512, 2)
    assert found is not None and found.field == "tile.ctas_per_sm"
    assert "even with parts of 512 keys is rendered for a CTA on each SM, not 2; use ctas_per_sm 1" in found.message


def test_even_whole_parts() -> None:
    assert splits.even_whole_parts("mask", "causal", ("none", "causal")) is None
    assert splits.even_whole_parts("mask", "window", ("none", "causal")) == Violation(
        "mask", "split.keys is rendered with scheduler even and mask: none or causal only; use that, or count: auto"
    )


def test_rows_in_warps() -> None:
    assert splits.rows_in_warps(64) is splits.rows_in_warps(128) is None
    found = splits.rows_in_warps(192)
    assert found is not None and found.field == "problem.head_dim" and "192 columns" in found.message


def test_restarted_parts() -> None:
    assert splits.restarted_parts(384, 96, None) is None
    assert splits.restarted_parts(384, 128, None) is None
    assert splits.restarted_parts(400, 96, None) == Violation(
        "softmax.restart_every", "parts are whole tiles of 96 keys; use a multiple of tile.kv, not 400"
    )
    found = splits.restarted_parts(384, 96, 8)
    assert found is not None and found.field == "softmax.rescale_above"


def test_restarted_kernel() -> None:
    assert splits.restarted_kernel("softmax.sink", False, (False,)) is None
    assert splits.restarted_kernel("softmax.sink", True, (False,)) == Violation(
        "softmax.sink",
        "softmax.restart_every is rendered with softmax.sink: false only; use that, or leave restart_every out",
    )


def test_split_unit() -> None:
    assert splits.split_unit("auto", None) is splits.split_unit(None, 512) is None
    neither, both = splits.split_unit(None, None), splits.split_unit("auto", 512)
    assert neither is not None and neither.field == "split"
    assert both is not None and both.field == "split.keys"


def test_split_keys() -> None:
    assert splits.split_keys(512, 64, None) is splits.split_keys(80, 80, None) is None
    assert splits.split_keys(512, 80, None) == Violation(
        "split.keys", "parts are whole tiles of 80 keys; use a multiple of tile.kv, not 512"
    )
    found = splits.split_keys(512, 64, 8)
    assert found is not None and found.field == "softmax.rescale_above"


def test_split_output() -> None:
    assert splits.split_output("direct", True, "bf16", "bf16") is None
    for asked, field in (
        (("own_buffer", True, "bf16", "bf16"), "outputs.o"),
        (("direct", False, "bf16", "bf16"), "outputs.lse"),
        (("direct", True, "fp32", "bf16"), "o.dtype"),
    ):
        found = splits.split_output(*asked)
        assert found is not None and found.field == field


def test_split_scores() -> None:
    for legal in (
        ("none", "first_key", False, "online", "grid"),
        ("causal", "first_key", True, "online", "even"),
        ("window", "window", True, "online", "even"),
    ):
        assert splits.split_scores(*legal) is None
    for asked, field in (
        (("window", "window", False, "online", "grid"), "mask"),
        (("window", "first_key", False, "online", "even"), "tile.kv_from"),
        (("none", "first_key", True, "online", "grid"), "softmax.sink"),
        (("none", "first_key", False, "first", "even"), "softmax.row_max"),
    ):
        found = splits.split_scores(*asked)
        assert found is not None and found.field == field


def test_padded_heads() -> None:
    assert splits.padded_heads(True, 16) is None
    assert splits.padded_heads(True, 1) == Violation(
        "tile.group", "group: at_most needs room for several heads; use tile.pack_heads of 2 or more"
    )
    assert splits.padded_heads(False, 16) == Violation(
        "tile.group", "group: at_most is rendered with keys in parts only; add split: {count: auto}, or use multiple"
    )


def test_any_group() -> None:
    legal: dict[str, Any] = {"split": False, "sink": False}
    for order in ("by_head", "woven"):
        assert splits.any_group(order, "direct", 8, **legal) is None
    assert splits.any_group("by_sequence", "direct", 8, **legal) == Violation(
        "tile.group", "group: any is rendered with order by_head or woven, not by_sequence; use one, or multiple"
    )
    assert splits.any_group("by_head", "direct", 1, **legal) == Violation(
        "tile.group", "a tile of one head takes any group without it; leave tile.group out"
    )
    assert splits.any_group("by_head", "own_buffer", 8, **legal) == Violation(
        "outputs.o", "group: any is rendered with outputs.o: direct only, not own_buffer; use that"
    )
    for field, asked in (("split", "split"), ("softmax.sink", "sink")):
        assert splits.any_group("by_head", "direct", 8, **(legal | {asked: True})) == Violation(
            field, f"group: any is rendered without {field}; leave it out, or use group: multiple"
        )


def test_fitted_heads() -> None:
    legal: dict[str, Any] = dict.fromkeys(("sink", "whole", "from_window"), False) | {"overlap": True}
    assert (
        splits.fitted_heads("even", "causal", 16, **legal) is splits.fitted_heads("even", "causal", 1, **legal) is None
    )
    assert splits.fitted_heads("even", "causal", 12, **legal) == Violation(
        "tile.pack_heads", "group: fitted takes powers of two, and 12 is none; use 8 or 16"
    )
    for changed in ({"sink": True}, {"overlap": False}, {"whole": True}, {"from_window": True}):
        found = splits.fitted_heads("even", "causal", 8, **(legal | changed))
        assert found is not None and found.field == "tile.group" and "group: fitted" in found.message
    for scheduler, mask in (("dynamic", "causal"), ("even", "window"), ("even", "none")):
        assert splits.fitted_heads(scheduler, mask, 8, **legal) is not None


def test_combine_columns() -> None:
    assert [columns for columns in range(8, 260, 8) if splits.combine_columns(columns) is None] == list(
        range(32, 260, 32)
    )
    assert "80 columns are no multiple of 32; leave split out" in str(splits.combine_columns(80))


def test_late_draws() -> None:
    """Room for one drawn tile, of packed sequences alone: of others a CTA's tiles are its own, or none are found."""
    assert memory.late_draws(None, drawn=False) is memory.late_draws(1, drawn=True) is None
    told = "it is for packed sequences whose tiles are drawn; leave it out"
    assert memory.late_draws(1, drawn=False) == Violation("load.tile_slots", told)
    two = "packed_d128_causal", "fp8_paged_d128_causal"
    one = "packed_d128", "packed_kv8_d128_causal", "packed_late_d128_causal", "fp8_paged_late_d128_causal"
    for name in (*two, *one):
        assert footprint.tile_slots(variants()[f"fwd_{name}"].spec) == (2 if name in two else 1)
    for stem in ("fwd_d128_causal", "fwd_packed_chunks_d128_causal"):
        spec = variants()[stem].spec
        late = spec.model_copy(update={"load": spec.load.model_copy(update={"tile_slots": 1})})
        assert [(each.field, each.message) for each in rules.check(late)] == [("load.tile_slots", told)]


def test_page_layout() -> None:
    assert pages.page_layout("paged", 16) is pages.page_layout("packed", None) is None
    assert pages.page_layout("packed", 16) == Violation(
        "load.page_rows", "with layout packed there are no pages; leave it out, or use layout paged"
    )
    assert pages.page_layout("paged", None) == Violation(
        "load.page_rows",
        "layout paged needs to know how many keys of a page are copied at once; use 16 for page sizes that are "
        "multiples of 16, or 1 for any",
    )


def test_page_boxes() -> None:
    """Whole swizzles of 8 rows, and a whole number of them in a tile of keys."""
    assert [rows for rows in range(1, 90) if pages.page_boxes(rows, 80) is None] == [8, 16, 40, 80]
    assert pages.page_boxes(64, 80) == Violation(
        "load.page_rows",
        "a tile of 80 keys is to be whole boxes, of whole swizzles of 8 rows, and 64 is no such number; "
        "use 8, 16, 40, 80, or 1 for single rows",
    )


def test_stored_stages() -> None:
    assert converting.stored_stages(1, False) is None
    assert converting.stored_stages(4, True) is None
    assert converting.stored_stages(4, False) == Violation(
        "kv.stages",
        "4 stages of tiles that are converted, and none are; leave stages out, or give kv.dtype beside dtype bf16 or "
        "fp16",
    )


def test_converting_kernel() -> None:
    """Behind warps that load, of packed sequences or pages, for consumers that registers are shared out for."""
    right = ("ping_pong", "paged", "tma", True, 2, 1)
    assert converting.converting_kernel(*right) is None
    assert converting.converting_kernel("warp_specialized", "packed", "tma", True, 1, 2) is None
    assert converting.converting_kernel("ping_pong", "paged", "tma", True, 2, 2) is None
    for at, value, field, words in (
        (0, "cooperative", "kv.dtype", "extend fwd_packed_kv8 or fwd_paged_kv8"),
        (1, "dense", "kv.dtype", "use layout packed"),
        (3, False, "schedule.overlap", "use overlap: true"),
        (4, 3, "tile.warpgroups", "not for 3 beside 1; use one of these"),
        (5, 3, "tile.warpgroups", "not for 2 beside 3; use one of these"),
    ):
        found = converting.converting_kernel(*right[:at], value, *right[at + 1 :])
        assert found is not None and found.field == field and words in found.message


def test_converted_rows() -> None:
    """Two warps have 64 units of 8 elements: whole rows of 64, 128, 256 and 512, so many at a time."""
    assert [d for d in range(8, 600, 8) if converting.converted_rows("problem.head_dim", d, 96, 2) is None] == [
        *(16, 32, 64, 128, 256, 512),
    ]
    assert converting.converted_rows("problem.head_dim", 192, 96, 2) == Violation(
        "problem.head_dim",
        "64 threads convert 8 elements each, and rows of 192 are not a whole part of that, 96 of them at a time; use "
        "16, 32, 64, 128, 256, 512",
    )


def test_accumulator_beside_converters() -> None:
    assert converting.accumulator_beside_converters(2, 128, 96) is None
    assert converting.accumulator_beside_converters(2, 256, 128) == Violation(
        "kv.warpgroups",
        "with 2 of them beside the others a thread is launched with 128 registers, and a product of 256 columns takes "
        "256 / 2 + 24 = 152; use fewer, or fewer columns",
    )
    assert converting.accumulator_beside_converters(1, 256, 128) == Violation(
        "tile.warpgroups",
        "with one that converts beside the others a thread is launched with 128 registers, and a product of 256 "
        "columns takes 256 / 2 + 24 = 152; use fewer, or fewer columns",
    )


def test_gathered_rows() -> None:
    assert pages.gathered_rows("problem.head_dim", 192) is None
    assert pages.gathered_rows("problem.head_dim", 96) == Violation(
        "problem.head_dim",
        "rows of 96 elements are not whole 128 bytes, by which single rows are copied; use a multiple of 64, or "
        "load.page_rows 8 or more",
    )


def test_gathered_swizzle() -> None:
    """The widest whose span is a whole part of a row: eight pieces of 16 bytes, or the four that lanes copy at once."""
    assert [pages.gathered_swizzle("smem.k", "128B", row_bytes) for row_bytes in (128, 256, 512)] == [None] * 3
    assert [pages.gathered_swizzle("smem.v", "64B", row_bytes) for row_bytes in (64, 192)] == [None] * 2
    assert pages.gathered_swizzle("smem.v", "64B", 256) == Violation(
        "smem.v",
        "single rows of 256 bytes are copied to where swizzle 128B has them, not 64B; use 128B, or load.page_rows 8 or "
        "more",
    )
    found = pages.gathered_swizzle("smem.k", "32B", 64)
    assert found is not None and found.message.endswith("use 64B, or load.page_rows 8 or more")


def test_packed_output() -> None:
    assert schedules.packed_output("packed", True, "bf16", "bf16") is None
    assert schedules.packed_output("dense", False, "fp32", "bf16") is None
    assert schedules.packed_output("packed", False, "bf16", "bf16") == Violation(
        "outputs.lse", "layout packed is rendered with outputs.lse: true only; use that, or layout dense"
    )
    assert schedules.packed_output("packed", True, "fp32", "bf16") == Violation(
        "o.dtype", "layout packed is rendered with o.dtype: bf16 only; use that, or layout dense"
    )


def test_persistent_ctas() -> None:
    for scheduler, layout, ctas in (("grid", "dense", 2), ("dynamic", "packed", 2), ("static", "dense", 1)):
        assert schedules.persistent_ctas(scheduler, layout, ctas) is None
    assert schedules.persistent_ctas("dynamic", "dense", 2) == Violation(
        "tile.ctas_per_sm",
        "dynamic with layout dense is rendered for a CTA on each SM, not 2; use ctas_per_sm 1, or scheduler grid or "
        "single_tile",
    )


def test_exp_before_wait() -> None:
    assert schedules.exp_before_wait(None, 64, False) is None
    assert schedules.exp_before_wait(16, 64, True) is None
    assert schedules.exp_before_wait(17, 64, True) == Violation(
        "softmax.exp_before_wait",
        "17 > 16, a thread's exponentials of one row with tile.kv 64; use at most 16",
    )
    assert schedules.exp_before_wait(1, 64, False) == Violation(
        "softmax.exp_before_wait",
        "without overlap no P V runs beside the exponentials; use null or a schedule with overlap: true",
    )


def test_score_fields() -> None:
    for kind, overlap in (("cooperative", False), ("ping_pong", True), ("warp_specialized", True)):
        assert schedules.score_fields("softmax.sink", "wgmma", kind, overlap) is None
    assert schedules.score_fields("softmax.sink", "scalar", "cooperative", False) == Violation(
        "softmax.sink",
        "softmax.sink needs wgmma for qk and pv, got pv scalar; leave it out, or extend k4_2",
    )
    assert schedules.score_fields("softmax.softcap", "wgmma", "ping_pong", False) == Violation(
        "softmax.softcap",
        "softmax.softcap is rendered with overlap: true only for ping_pong; use that, or leave it out",
    )
    sequential = {"kind": "warp_specialized", "overlap": False}
    for field in ("sink", "softcap"):
        assert list(violations(SCALAR, softmax={field: True})) == [f"softmax.{field}"]
        assert list(violations(SPECIALIZED, schedule=sequential, softmax={field: True})) == [f"softmax.{field}"]
        for base in (WGMMA, SPECIALIZED, PERSISTENT):
            assert violations(base, softmax={field: True}) == {}
        packed = {"scheduler": "dynamic", "problem": {"head_dim": 128, "layout": "packed"}}
        assert violations(PERSISTENT, **packed, softmax={field: True}) == {}


def test_sink_lse() -> None:
    assert output.sink_lse(True) is None
    assert output.sink_lse(False) == Violation(
        "outputs.lse", "a sink is rendered with LSE; use lse: true, or leave softmax.sink out"
    )
    assert list(violations(WGMMA, outputs={"lse": False}, softmax={"sink": True})) == ["outputs.lse"]


def test_mask_end() -> None:
    assert schedules.mask_end("always", "causal", False) is None
    assert schedules.mask_end("when_cut", "none", True) is None
    assert schedules.mask_end("when_cut", "none", False) == Violation(
        "softmax.mask_end",
        "without overlap the last tile of keys is masked only when the end cuts it anyway; leave mask_end out, or use "
        "a schedule with overlap: true",
    )
    assert schedules.mask_end("when_cut", "causal", True) == Violation(
        "softmax.mask_end",
        "the last tile of keys that a row visits holds an edge of the causal mask as well; use mask_end: always",
    )


def test_output_dtype() -> None:
    assert output.output_dtype("bf16", "bf16") is None
    assert output.output_dtype("fp16", "fp32") is None
    assert output.output_dtype("bf16", "fp16") == Violation(
        "o.dtype", "O in fp16 beside q, k and v in bf16 is not rendered; use bf16"
    )


def test_float32_output() -> None:
    assert output.float32_output("ping_pong", "direct", 128, 128) is None
    # 128 x 128 x 4 = 65536.
    assert output.float32_output("ping_pong", "own_buffer", 128, 128) == Violation(
        "outputs.o",
        "a tile of O in fp32 would take 128 x 128 x 4 = 65536 bytes of shared memory, and stmatrix, which fills it, "
        "stores 16-bit elements only; use direct",
    )
    assert output.float32_output("cooperative", "over_q", 128, 128) == Violation(
        "o.dtype",
        "O in fp32 goes straight from the registers, which is rendered with schedule warp_specialized or ping_pong "
        "only, not cooperative; leave o.dtype out, or extend fwd_d128_fp32_out",
    )


@pytest.mark.parametrize("o", ["over_q", "own_buffer"])
def test_the_way_out_for_float32_is_legal_in_one_step(o: str) -> None:
    float32: dict[str, Any] = {"o": {"dtype": "fp32"}}
    assert list(violations(PERSISTENT, **float32, outputs={"o": o})) == ["outputs.o"]
    assert violations(PERSISTENT, **float32, outputs={"o": "direct"}) == {}
    assert list(violations(WGMMA, **float32)) == list(violations(SCALAR, **float32)) == ["o.dtype"]
    assert violations(WGMMA, o={"dtype": None}) == violations(SCALAR, o={"dtype": "bf16"}) == {}


def test_float32_output_takes_any_columns_of_a_product() -> None:
    """80 columns are no multiple of the 32 that 16-bit stores need."""
    facts: dict[str, Any] = {"problem": {"head_dim": 80}, "smem": {"q": "32B", "k": "32B", "v": "32B"}}
    assert list(violations(PERSISTENT, **facts, outputs={"o": "direct"})) == ["problem.head_dim"]
    assert violations(PERSISTENT, **facts, outputs={"o": "direct"}, o={"dtype": "fp32"}) == {}


def test_direct_columns() -> None:
    assert output.direct_columns("problem.head_dim", 96, "ping_pong") is None
    assert output.direct_columns("problem.head_dim", 80, "ping_pong") == Violation(
        "problem.head_dim",
        "outputs.o direct writes 32 columns at a time, and O has 80, no multiple of 32 (80 = 2 x 32 + 16); "
        "use 64 or 96, or outputs.o own_buffer",
    )
    cooperative = output.direct_columns("problem.head_dim", 80, "cooperative")
    assert cooperative is not None and cooperative.message.endswith("use 64 or 96, or outputs.o over_q")


PERSISTENT = {
    **WGMMA,
    "tile": {"q": 128, "kv": 64, "warpgroups": 2},
    "load": {"engine": "tma", "q_stages": 2, "kv_stages": 2, "barrier": "separate"},
    "schedule": {"kind": "ping_pong", "overlap": True},
    "scheduler": "static",
    "outputs": {"o": "own_buffer"},
}


def test_rules_of_persistent_kernels_are_applied() -> None:
    assert violations(PERSISTENT) == {}
    assert violations(PERSISTENT, scheduler="dynamic", mask="causal", outputs={"o": "direct"}) == {}
    assert violations(PERSISTENT, softmax={"rescale_above": 1}, problem={"head_dim": 128, "dtype": "fp16"}) == {}
    broken: dict[str, dict[str, Any]] = {
        "scheduler": {"scheduler": "stream_k", "mask": "causal"},
        "outputs.o": {"outputs": {}},
        "load.barrier": {"load": {"engine": "tma", "q_stages": 2, "kv_stages": 2, "barrier": "shared"}},
    }
    for field, changes in broken.items():
        assert list(violations(PERSISTENT, **changes)) == [field]
    sequential = {"kind": "warp_specialized", "overlap": False}
    assert list(violations(PERSISTENT, schedule=sequential, softmax={"rescale_above": 8})) == ["softmax.rescale_above"]
    packed = {"q": 192, "kv": 64, "warpgroups": 3, "pack_heads": 3}
    assert list(violations(PERSISTENT, tile=packed)) == ["outputs.o"]
    legal: list[dict[str, Any]] = [
        {"mask": {"kind": "window", "left": 512, "right": 0}},
        {"outputs": {"o": "own_buffer", "lse": False}},
        {"tile": {"q": 128, "kv": 64, "warpgroups": 2, "pack_heads": 4}},
        {"schedule": sequential},
        {"scheduler": "single_tile", "load": SPECIALIZED["load"], "softmax": {"rescale_above": 8}},
    ]
    for changes in legal:
        assert violations(PERSISTENT, **changes) == {}


def test_rules_of_a_persistent_kernel_s_output() -> None:
    """O in a buffer of its own is laid out like Q; straight from the registers it needs no layout, but 32 columns."""
    narrow, swizzles = {"head_dim": 128, "head_dim_v": 96}, {"q": "128B", "k": "64B", "v": "64B"}
    own = violations(PERSISTENT, problem=narrow, smem=swizzles)
    assert list(own) == ["smem.q"]
    assert own["smem.q"].startswith(
        "a row of O, laid out like Q, is 96 x 2 = 192 bytes, no whole number of 128-byte swizzle spans"
    )
    assert violations(PERSISTENT, problem=narrow, smem=swizzles, outputs={"o": "direct"}) == {}
    # O may be wider than Q where it does not lie over Q.
    assert violations(PERSISTENT, problem={"head_dim": 64, "head_dim_v": 128}) == {}
    swizzles = dict.fromkeys("qkv", "32B")
    for field, problem in {
        "problem.head_dim_v": {"head_dim": 128, "head_dim_v": 80},
        "problem.head_dim": {"head_dim": 80},
    }.items():
        found = violations(PERSISTENT, problem=problem, smem=swizzles, outputs={"o": "direct"})
        assert list(found) == [field] and found[field].endswith("use 64 or 96, or outputs.o own_buffer")


def test_shared_memory_of_a_persistent_kernel() -> None:
    # Q 2 x 128 x 128 x 2 = 65536, K and V 2 x 128 x 128 x 2 = 65536 each, O 32768: 229376; 2 x (2 + 2 + 2) = 12
    # barriers, 96 bytes: 229472, up to 230400 = 225 x 1024. Three stages of K and V are 65536 bytes more.
    tile = {"q": 128, "kv": 128, "warpgroups": 2}
    assert violations(PERSISTENT, tile=tile) == {}
    load = {"engine": "tma", "q_stages": 2, "kv_stages": 3, "barrier": "separate"}
    # At kv 80: 65536 + 2 x 3 x 80 x 256 = 122880, + 32768 = 221184; at kv 96: 245760.
    assert violations(PERSISTENT, tile=tile, load=load) == {
        "load.kv_stages": "shared memory: sQ (2 stages x 128 x 128 x 2) 65536 + sK (3 stages x 128 x 128 x 2) 98304 + "
        "sV (3 stages x 128 x 128 x 2) 98304 + sO (128 x 128 x 2) 32768 = 294912, + 128 of barriers + 896 of alignment "
        "= 295936 > 232448 bytes; use at most 2 stages or tile.kv 80"
    }


# Taste


def test_drawn_without_mask() -> None:
    assert taste.drawn_without_mask("dynamic", "causal") is None
    assert taste.drawn_without_mask("static", "none") is None
    assert taste.drawn_without_mask("dynamic", "none") == Violation(
        "scheduler",
        "without a mask all tiles are equally long, and a counter has nothing to even out; use static or stream_k",
    )


def test_dealt_under_causal() -> None:
    assert taste.dealt_under_causal("dynamic", "causal") is None
    assert taste.dealt_under_causal("static", "window") is None
    assert taste.dealt_under_causal("static", "causal") == Violation(
        "scheduler",
        "under a causal mask tiles differ in length, so that CTAs with tiles known from the start would end at "
        "different times; use dynamic",
    )


def test_rescale_few_columns() -> None:
    assert taste.rescale_few_columns(None, 64) is None
    assert taste.rescale_few_columns(8, 192) is None
    assert taste.rescale_few_columns(8, 128) == Violation(
        "softmax.rescale_above",
        "up to 128 columns of O are rescaled in less time than a vote and a branch take, and O has 128; use null",
    )


def test_idle_q_stages() -> None:
    assert taste.idle_q_stages(1, False) is None
    assert taste.idle_q_stages(2, True) is None
    assert taste.idle_q_stages(2, False) == Violation(
        "load.q_stages",
        "with scheduler single_tile a CTA loads one Q tile, so that 2 Q buffers are of no use; use 1",
    )
    assert taste.idle_q_stages(3, True) == Violation(
        "load.q_stages", "a CTA needs Q of this tile and of the next, not of 3; use 1 or 2"
    )


def test_buffer_for_one_output() -> None:
    assert taste.buffer_for_one_output("static", "own_buffer", 128, 128, 128) is None
    assert taste.buffer_for_one_output("single_tile", "direct", 128, 128, 128) is None
    assert taste.buffer_for_one_output("single_tile", "own_buffer", 128, 64, 128) is None  # too wide for Q's place
    assert taste.buffer_for_one_output("single_tile", "own_buffer", 128, 128, 64) == Violation(
        "outputs.o",
        "with scheduler single_tile no next Q is loaded, and a buffer for O takes 128 x 64 x 2 = 16384 bytes of shared "
        "memory for nothing; use over_q",
    )


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, []),
        ({"scheduler": "dynamic"}, ["scheduler"]),
        ({"mask": "causal"}, ["scheduler"]),
        ({"softmax": {"rescale_above": 8}}, ["softmax.rescale_above"]),
        ({"scheduler": "single_tile"}, ["load.q_stages", "outputs.o"]),
        ({"scheduler": "single_tile", "load": WGMMA["load"]}, ["outputs.o"]),
        ({"scheduler": "dynamic", "softmax": {"rescale_above": 8}}, ["scheduler", "softmax.rescale_above"]),
    ],
)
def test_taste_warns_and_refuses_nothing(changes: dict[str, Any], fields: list[str]) -> None:
    spec = Forward.model_validate({**PERSISTENT, **changes})
    assert rules.check(spec) == []
    assert [warning.field for warning in rules.warnings(spec)] == fields


def test_a_refused_spec_is_not_warned_of() -> None:
    spec = Forward.model_validate({**PERSISTENT, "scheduler": "dynamic", "outputs": {"o": "over_q"}})
    assert rules.check(spec) and rules.warnings(spec) == []


# All rules


def test_who_objects() -> None:
    """Each rule by hand: a limit of the chip, or something that no template does."""
    hardware = """
        wgmma_rows wgmma_columns wgmma_depth a_from_registers b_from_smem swizzle_span tma_box tma_stride shared_memory
        page_boxes scalar_threads wgmma_threads registers_per_thread registers_per_sm consumer_registers shared_sm
        accumulator_at_launch accumulator_beside_converters gemm_rows gemm_eight_bit_major eight_bit_major
        box_extents box_row box_span box_start map_rank row_strides folded_row unbounded_scores
        combine_threads combine_registers quantize_threads quantize_registers quantize_smem
    """
    matters_of_taste = """
        drawn_without_mask dealt_under_causal rescale_few_columns buffer_for_one_output idle_q_stages combine_lines
    """
    kinds = {Kind.HARDWARE: set(hardware.split()), Kind.TASTE: set(matters_of_taste.split())}
    for kind, names in kinds.items():
        assert {name for name, found in rules.RULES.items() if found.kind is kind} == names


def test_every_rule_is_asked_and_tested() -> None:
    """A rule that `asking` does not name is dead, and one that is no `@rule` says neither who nor what it is about."""
    asked, written = set(), set()
    for path in Path(rules.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        asked |= {
            node.func.value.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "ask"
            and isinstance(node.func.value, ast.Attribute)
        }
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.returns is not None]
        written |= {node.name for node in functions if ast.unparse(node.returns) == "Violation | None"}
    assert asked == written == set(rules.RULES)
    tests = "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("test_*rules.py")))
    assert [name for name in rules.RULES if f"\ndef test_{name}(" not in tests] == []


def test_a_rule_without_kind_or_topic_cannot_be_written() -> None:
    def judged(rows: int) -> Violation | None:
        """Some rule."""

    undocumented = lambda: None  # noqa: E731
    undocumented.__name__ = "undocumented"
    for missing in ({"kind": Kind.TASTE}, {"topic": "tile"}, {}):
        with pytest.raises(TypeError):
            rules.rule(**missing)(judged)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        rules.rule(judged)  # type: ignore[misc, arg-type]
    with pytest.raises(ValueError, match=r"hardware, generator, taste"):
        rules.rule(kind="taste", topic="tile")(judged)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="shared memory"):
        rules.rule(kind=Kind.TASTE, topic="tiles")(judged)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="undocumented has no docstring"):
        rules.rule(kind=Kind.TASTE, topic="tile")(undocumented)
    judged.__name__ = "wgmma_rows"
    with pytest.raises(ValueError, match="there is a rule wgmma_rows already"):
        rules.rule(kind=Kind.TASTE, topic="tile")(judged)
    assert "judged" not in rules.RULES


def test_an_answer_keeps_its_question() -> None:
    answer = products.wgmma_columns.ask("problem.head_dim", "PV", 100)
    assert answer.rule is rules.RULES["wgmma_columns"] and answer.refuses
    assert answer.violation == products.wgmma_columns("problem.head_dim", "PV", 100)
    assert answer.facts == (("field", "problem.head_dim"), ("product", "PV"), ("n", "100"))
    assert (
        answer.about == "O = P V"
        and products.input_major.ask("qk.b.major", "K", "k", "k", "cooperative", "wgmma").about == "S = Q K^T"
    )
    assert not taste.drawn_without_mask.ask("dynamic", "none").refuses
    assert memory.tma_box.ask("tile.q", 128).violation is None


# From a spec to facts


def test_check_never_stops_at_the_first_violation() -> None:
    found = rules.check(
        Forward.model_validate(
            {
                **WGMMA,
                "problem": {"head_dim": 60},
                "tile": {"q": 300, "kv": 300, "warpgroups": 9},
                "load": {"engine": "tma", "q_stages": 2, "kv_stages": 1, "barrier": "shared"},
                "qk": {
                    "engine": "wgmma",
                    "a": {"source": "registers", "major": "mn"},
                    "b": {"source": "registers", "major": "mn"},
                },
                "pv": {
                    "engine": "wgmma",
                    "a": {"source": "smem", "major": "mn"},
                    "b": {"source": "registers", "major": "k"},
                },
            }
        )
    )
    assert [violation.field for violation in found] == [
        "pv.a.source",
        "load.q_stages",
        "qk.a.major",
        "qk.b.source",
        "tile.kv",
        "problem.head_dim",
        "pv.b.source",
        "problem.head_dim",
        "tile.kv",
        "tile.q",
        "tile.warpgroups",
        "smem.q",
        "smem.k",
        "smem.v",
        "tile.q",
        "tile.kv",
        "problem.head_dim",
    ]


def test_the_ways_out_of_too_much_shared_memory_do_fit() -> None:
    # A tile of 128 x 128 16-bit elements is 32768 bytes. 4 stages: 9 tiles = 294912; barriers: 1 for Q, and full and
    # empty for 4 stages of 2 rings = 17, 136 bytes, rounded up with the tiles to 1024: 295936.
    # 3 stages are 7 tiles = 229376 + 104, rounded up 230400 and within 232448. With kv 80: (128 + 8 x 80) x 256 =
    # 196608; kv 96 gives 229376; kv 112 gives 262144.
    found = violations(WGMMA, load={"engine": "tma", "kv_stages": 4, "barrier": "separate"})
    assert found == {
        "load.kv_stages": "shared memory: sQ (128 x 128 x 2) 32768 + sK (4 stages x 128 x 128 x 2) 131072 + "
        "sV (4 stages x 128 x 128 x 2) 131072 = 294912, + 136 of barriers + 888 of alignment = 295936 > 232448 bytes; "
        "use at most 3 stages or tile.kv 96"
    }
    assert not violations(WGMMA, load={"engine": "tma", "kv_stages": 3, "barrier": "separate"})


def test_too_much_shared_memory_without_stages_to_save() -> None:
    # Q 64 x 256 x 2 = 32768; K and V share 256 x 256 x 2 = 131072; scores 64 x (256 + 8) x 4 = 67584: 231424 fit.
    # With kv 272: 32768 + 139264 + 64 x 280 x 4 = 71680 are 243712, a multiple of 1024.
    tile = {"q": 64, "kv": 256, "threads": 256}
    assert shared_memory_violations(SCALAR, problem={"head_dim": 256}, tile=tile) == []
    assert shared_memory_violations(SCALAR, problem={"head_dim": 256}, tile={**tile, "kv": 272}) == [
        Violation(
            "tile.kv",
            "shared memory: sQ (64 x 256 x 2) 32768 + sKV (272 x 256 x 2) 139264 + sS (64 x 280 x 4) 71680 = 243712, "
            "+ 0 of barriers + 0 of alignment = 243712 > 232448 bytes; use tile.kv 256",
        )
    ]


def test_no_way_out_through_kv_alone() -> None:
    # Q alone, 256 x 512 x 2 = 262144, is too much.
    tile = {"q": 256, "kv": 16, "threads": 256}
    (found,) = shared_memory_violations(SCALAR, problem={"head_dim": 512}, tile=tile)
    assert found.message.endswith("> 232448 bytes; use a smaller tile.q or head_dim")


def test_registers_of_a_spec() -> None:
    # 4 warpgroups: O 256 x 128 / 512 = 64, S 256 x 64 / 512 = 32, P half of S, 24 others: 136 x 512 = 69632.
    found = violations(WGMMA, tile={"q": 256, "kv": 64, "warpgroups": 4})
    assert found == {
        "tile.warpgroups": "registers per SM: O 64 + S 32 + P 16 + other 24 = 136, rounded up to 136; x 512 threads = "
        "69632 > 65536; use a smaller tile.q or tile.kv"
    }


@settings(max_examples=300, deadline=None)
@given(
    warpgroups=st.integers(1, 5),
    kv=st.integers(1, 20).map(lambda n: 16 * n),
    head_dim=st.integers(1, 20).map(lambda n: 16 * n),
    stages=st.integers(1, 6),
    swizzle=st.sampled_from(["none", "32B", "64B", "128B"]),
)
def test_what_is_accepted_fits(warpgroups: int, kv: int, head_dim: int, stages: int, swizzle: str) -> None:
    """The sums are made here once more, by hand: no barriers, no padding, no registers but those of O, S and P."""
    q = 64 * warpgroups
    spec = {
        **WGMMA,
        "problem": {"head_dim": head_dim},
        "tile": {"q": q, "kv": kv, "warpgroups": warpgroups},
        "load": {"engine": "tma", "kv_stages": stages, "barrier": "separate"},
        "smem": {"q": swizzle, "k": swizzle, "v": swizzle},
    }
    found = rules.check(Forward.model_validate(spec))
    shared = 2 * head_dim * (q + 2 * stages * kv)
    registers = head_dim // 2 + kv // 2 + kv // 4
    if shared > 232448 or registers > 255 or 128 * warpgroups * registers > 65536 or head_dim > 256:
        assert found
    if not found:
        assert q <= 256 and kv <= 256
        assert head_dim * 2 % {"none": 16, "32B": 32, "64B": 64, "128B": 128}[swizzle] == 0
