"""Every rule: the exact message on hand-derived numbers, and silence right beside the limit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3gen.design import rules
from fa3gen.design.rules import Violation
from fa3gen.spec.model import Spec

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
    found = rules.check(Spec.model_validate({**base, **changes}))
    assert len({violation.field for violation in found}) == len(found), found
    return {violation.field: violation.message for violation in found}


def shared_memory_violations(base: dict[str, Any], **changes: Any) -> list[Violation]:
    """What the rule `shared_memory` alone finds, whatever else is wrong."""
    found = rules.check(Spec.model_validate({**base, **changes}))
    return [violation for violation in found if violation.message.startswith("shared memory")]


@pytest.mark.parametrize("spec", [WGMMA, SCALAR, NAIVE])
def test_the_usual_specs_are_legal(spec: dict[str, Any]) -> None:
    assert rules.check(Spec.model_validate(spec)) == []


# WGMMA shapes


def test_wgmma_rows() -> None:
    assert rules.wgmma_rows(128, 2) is None
    assert rules.wgmma_rows(192, 2) == Violation(
        "tile.q",
        "a warpgroup's WGMMA has M = 64 and each warpgroup owns one: 2 x 64 = 128 rows, not 192; "
        "use tile.q 128 or tile.warpgroups 3",
    )
    assert rules.wgmma_rows(100, 1) == Violation(
        "tile.q", "a warpgroup's WGMMA has M = 64 and each warpgroup owns one: 1 x 64 = 64 rows, not 100; use tile.q 64"
    )


def test_wgmma_columns() -> None:
    assert rules.wgmma_columns("tile.kv", "QK", 256) is None
    assert rules.wgmma_columns("tile.kv", "QK", 8) is None
    assert rules.wgmma_columns("tile.kv", "QK", 264) == Violation(
        "tile.kv", "N of the QK product is 264 > 256, the widest WGMMA; use at most 256"
    )
    assert rules.wgmma_columns("problem.head_dim", "PV", 100) == Violation(
        "problem.head_dim", "N of the PV product is 100, no multiple of 8 (100 = 12 x 8 + 4); use 96 or 104"
    )


def test_wgmma_depth() -> None:
    assert rules.wgmma_depth("tile.kv", "PV", 80) is None
    assert rules.wgmma_depth("tile.kv", "PV", 88) == Violation(
        "tile.kv",
        "K of the PV product is 88, no multiple of 16 (88 = 5 x 16 + 8), the K of a 16-bit WGMMA; use 80 or 96",
    )
    assert rules.wgmma_depth("problem.head_dim", "QK", 8) == Violation(
        "problem.head_dim",
        "K of the QK product is 8, no multiple of 16 (8 = 0 x 16 + 8), the K of a 16-bit WGMMA; use 16",
    )


# WGMMA operands


def test_a_from_registers_is_k_major() -> None:
    assert rules.a_from_registers("pv", "registers", "k") is None
    assert rules.a_from_registers("pv", "smem", "mn") is None
    assert rules.a_from_registers("pv", "registers", "mn") == Violation(
        "pv.a.major",
        "A from registers is always K-major, its fragment has no transposed form; use major: k or source: smem",
    )


def test_b_comes_from_shared_memory() -> None:
    assert rules.b_from_smem("qk", "smem") is None
    assert rules.b_from_smem("qk", "registers") == Violation(
        "qk.b.source", "WGMMA reads B through a shared-memory descriptor only; use source: smem"
    )


def test_q_comes_from_shared_memory() -> None:
    assert rules.q_from_smem("smem") is None
    assert rules.q_from_smem("registers") == Violation(
        "qk.a.source",
        "Q is read from shared memory, where TMA puts it; Q in registers is not rendered; use source: smem",
    )


def test_input_major() -> None:
    assert rules.input_major("qk.a.major", "Q", "k", "k") is None
    assert rules.input_major("qk.b.major", "K", "mn", "k") == Violation(
        "qk.b.major",
        "head_dim is contiguous in k and is the K of this product, so K is K-major; "
        "mn would need a transposed k; use k",
    )
    assert rules.input_major("pv.b.major", "V", "k", "mn") == Violation(
        "pv.b.major",
        "head_dim is contiguous in v and is the N of this product, so V is MN-major; "
        "k would need a transposed v; use mn",
    )


def test_p_major() -> None:
    assert rules.p_major("smem", "k") is None
    assert rules.p_major("registers", "mn") is None  # that is for a_from_registers to say
    assert rules.p_major("smem", "mn") == Violation(
        "pv.a.major", "stmatrix stores P with kv contiguous, and kv is the K of this product; use major: k"
    )


# Shared-memory layout and TMA


def test_swizzle_span() -> None:
    assert rules.swizzle_span("smem.k", "K", 64, "128B", tma=True) is None
    assert rules.swizzle_span("smem.k", "K", 8, "none", tma=True) is None
    # 96 x 2 = 192 bytes: one span of 128 and half of another; three spans of 64.
    assert rules.swizzle_span("smem.k", "K", 96, "128B", tma=True) == Violation(
        "smem.k",
        "a row of K is 96 x 2 = 192 bytes, no whole number of 128-byte swizzle spans (192 = 1 x 128 + 64), "
        "and TMA cannot split it into boxes of 64 elements; use swizzle 64B",
    )
    assert rules.swizzle_span("handoff.swizzle", "P", 80, "64B", tma=False) == Violation(
        "handoff.swizzle",
        "a row of P is 80 x 2 = 160 bytes, no whole number of 64-byte swizzle spans (160 = 2 x 64 + 32); "
        "use swizzle 32B",
    )
    assert rules.swizzle_span("smem.q", "Q", 12, "none", tma=True) == Violation(
        "smem.q",
        "a row of Q is 12 x 2 = 24 bytes, no whole number of 16-byte rows of a core matrix (24 = 1 x 16 + 8), "
        "and TMA cannot split it into boxes of 8 elements; use a row that is a multiple of 8 elements",
    )


def test_tma_box() -> None:
    assert rules.tma_box("tile.kv", 256) is None
    assert rules.tma_box("tile.kv", 272) == Violation(
        "tile.kv", "one TMA box would have 272 rows > 256; use at most 256"
    )


def test_tma_stride() -> None:
    assert rules.tma_stride(64) is None
    assert rules.tma_stride(60) == Violation(
        "problem.head_dim",
        "TMA needs strides of whole 16 bytes, and a head of 60 x 2 = 120, no multiple of 16 (120 = 7 x 16 + 8); "
        "use 56 or 64",
    )


# Stages and shared memory


def test_kv_stages() -> None:
    assert rules.kv_stages(1) is None
    assert rules.kv_stages(0) == Violation("load.kv_stages", "a ring of 0 stages can hold no tile; use at least 1")


def test_q_stages() -> None:
    assert rules.q_stages(1, False) is None
    assert rules.q_stages(1, True) is None
    assert rules.q_stages(2, True) is None
    assert rules.q_stages(2, False) == Violation(
        "load.q_stages",
        "with scheduler single_tile a CTA loads one Q tile, so that 2 Q buffers are of no use; use 1",
    )
    for stages in (0, 3):
        assert rules.q_stages(stages, True) == Violation(
            "load.q_stages", f"a CTA needs Q of this tile and of the next, not of {stages}; use 1 or 2"
        )


def test_shared_memory() -> None:
    # 32768 + 98304 + 98304 = 229376, which leaves 232448 - 229376 = 3072 bytes.
    regions = [("Q", 32768), ("K", 98304), ("V", 98304)]
    assert rules.shared_memory(regions, 2048, 1024) is None
    assert rules.shared_memory(
        regions, 2056, 1024, field="load.kv_stages", ways_out=["at most 2 stages", "tile.kv 112"]
    ) == Violation(
        "load.kv_stages",
        "shared memory: Q 32768 + K 98304 + V 98304 = 229376, + 2056 of barriers + 1024 of alignment = 232456 > "
        "232448 bytes; use at most 2 stages or tile.kv 112",
    )
    assert rules.shared_memory([("S", 232449)], 0, 0) == Violation(
        "tile.kv",
        "shared memory: S 232449 = 232449, + 0 of barriers + 0 of alignment = 232449 > 232448 bytes; "
        "use a smaller tile.q or tile.kv",
    )


# Registers and threads


def test_registers_per_thread() -> None:
    assert rules.registers_per_thread([("O", 128), ("S", 64), ("P", 32), ("other", 31)]) is None
    assert rules.registers_per_thread([("O", 64), ("S", 128), ("P", 64), ("other", 24)]) == Violation(
        "tile.kv",
        "registers per thread: O 64 + S 128 + P 64 + other 24 = 280 > 255, so that they would spill; "
        "use a smaller tile.kv or head_dim",
    )


def test_registers_per_sm() -> None:
    # 65536 / 384 threads = 170.7, so 168 registers fit and 176 do not.
    assert rules.registers_per_sm("tile.warpgroups", 384, [("O", 64), ("S", 104)]) is None
    assert rules.registers_per_sm("tile.warpgroups", 384, [("O", 64), ("S", 105)]) == Violation(
        "tile.warpgroups",
        "registers per SM: O 64 + S 105 = 169, rounded up to 176; x 384 threads = 67584 > 65536; "
        "use a smaller tile.q or tile.kv",
    )


def test_scalar_threads() -> None:
    assert rules.scalar_threads(1024) is None
    assert rules.scalar_threads(1056) == Violation(
        "tile.threads", "a CTA has at most 1024 threads, not 1056; use fewer"
    )
    assert rules.scalar_threads(100) == Violation(
        "tile.threads",
        "a CTA has whole warps, and tile.threads is 100, no multiple of 32 (100 = 3 x 32 + 4); use 96 or 128",
    )


def test_scalar_grid() -> None:
    assert rules.scalar_grid("tile.q", 64, 256) is None
    assert rules.scalar_grid("tile.q", 40, 256) == Violation(
        "tile.q",
        "256 threads form 16 rows x 16 columns, and tile.q is 40, no multiple of 16 (40 = 2 x 16 + 8); use 32 or 48",
    )
    assert rules.scalar_grid("tile.q", 12, 128) == Violation(
        "tile.q",
        "128 threads form 8 rows x 16 columns, and tile.q is 12, no multiple of 8 (12 = 1 x 8 + 4); use 8 or 16",
    )
    assert rules.scalar_grid("problem.head_dim", 72, 128) == Violation(
        "problem.head_dim",
        "128 threads form 8 rows x 16 columns, and problem.head_dim is 72, no multiple of 16 (72 = 4 x 16 + 8); "
        "use 64 or 80",
    )


def test_wgmma_threads() -> None:
    assert rules.wgmma_threads(8) is None
    assert rules.wgmma_threads(9) == Violation(
        "tile.warpgroups", "9 warpgroups x 128 = 1152 threads > 1024; use at most 8"
    )


# Which parts go together


def test_scalar_vector() -> None:
    assert [head_dim for head_dim in range(16, 257, 16) if rules.scalar_vector(head_dim) is None] == [16, 32, 64, 128]
    assert rules.scalar_vector(96) == Violation(
        "problem.head_dim",
        "a thread owns 96 / 16 = 6 adjacent columns of V, and 6 elements do not divide a 16-byte vector of 8; "
        "use 16, 32, 64 or 128, or wgmma for pv",
    )


def test_copy_rows() -> None:
    # 128 threads, 128 / 8 = 16 vectors per row: 8 rows at a time.
    assert rules.copy_rows("tile.kv", 64, 128, 128) is None
    assert rules.copy_rows("tile.kv", 36, 128, 128) == Violation(
        "tile.kv",
        "128 threads copy 128 / (128 / 8) = 8 rows at a time, "
        "and tile.kv is 36, no multiple of 8 (36 = 4 x 8 + 4); use 32 or 40",
    )
    assert rules.copy_rows("tile.q", 64, 96, 128) == Violation(
        "tile.threads",
        "a row is 96 / 8 = 12 vectors of 16 bytes, and 128 threads copy no whole number of rows at a time; "
        "use 96 or 192",
    )


def test_naive_grid() -> None:
    assert rules.naive_grid(16, 16, 128, 256) == []
    assert rules.naive_grid(16, 8, 128, 256) == [
        Violation("tile.threads", "one thread computes one score of the tile: 16 x 8 = 128 threads, not 256")
    ]
    assert rules.naive_grid(16, 12, 128, 192) == [
        Violation(
            "tile.threads",
            "one thread computes one element of O, in whole rows, and 192 is 1 x 128 + 64; use 128 or 256",
        )
    ]


def test_scattered_scores() -> None:
    assert rules.scattered_scores(1) is None
    assert rules.scattered_scores(2) == Violation(
        "tile.warpgroups",
        "scores scattered to shared memory are shared by 1 warpgroup, not 2; "
        "use warpgroups 1 with tile.q 64, or wgmma for pv",
    )


def test_optional_lse() -> None:
    assert rules.optional_lse(True, "scalar") is None
    assert rules.optional_lse(False, "wgmma") is None
    assert rules.optional_lse(False, "scalar") == Violation(
        "outputs.lse",
        "a kernel without LSE is rendered with both products on WGMMA only; use lse: true (attention() returns O alone "
        "unless asked), or extend k4_2",
    )


def test_window_product() -> None:
    assert rules.window_product("window", "wgmma") is None
    assert rules.window_product("causal", "scalar") is None
    assert rules.window_product("window", "scalar") == Violation(
        "mask", "a sliding window is rendered with both products on WGMMA only; use mask causal or none, or extend k4_2"
    )


def test_thread_unit() -> None:
    assert rules.thread_unit(True, None, 2) is None
    assert rules.thread_unit(False, 256, None) is None
    assert rules.thread_unit(True, 256, None) == Violation(
        "tile.threads",
        "WGMMA is issued by warpgroups of 128 threads; give tile.warpgroups 2 in place of tile.threads "
        "(threads: null, where a base gives it)",
    )
    assert rules.thread_unit(False, None, 2) == Violation(
        "tile.warpgroups",
        "without WGMMA there are no warpgroups; give tile.threads 256 in place of tile.warpgroups "
        "(warpgroups: null, where a base gives it)",
    )


def test_engine_pair() -> None:
    assert rules.engine_pair("wgmma", "scalar") is None
    assert rules.engine_pair("scalar", "wgmma") == Violation(
        "qk.engine", "a scalar QK product before a WGMMA PV product is not rendered; use wgmma for both"
    )


def test_wgmma_load() -> None:
    assert rules.wgmma_load(True, "tma") is None
    assert rules.wgmma_load(False, "sync") is None
    assert rules.wgmma_load(True, "cp_async") == Violation(
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
    assert rules.handoff_engines(*facts) == Violation(field, message)


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
    assert rules.handoff_engines(*facts) is None


def test_global_handoff_load() -> None:
    assert rules.global_handoff_load("global_f32", "sync") is None
    assert rules.global_handoff_load("smem_f32", "tma") is None
    assert rules.global_handoff_load("global_f32", "tma") == Violation(
        "load.engine", "handoff global_f32 reads global memory directly, so that tma has nothing to fill; use sync"
    )


def test_smem_section() -> None:
    assert rules.smem_section("global_f32", False) is None
    assert rules.smem_section("registers", True) is None
    assert rules.smem_section("global_f32", True) == Violation(
        "smem", "handoff global_f32 keeps no tile in shared memory; take smem out (smem: null, over a base)"
    )
    assert rules.smem_section("smem_f32", False) == Violation(
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
            {"load": {"engine": "tma", "q_stages": 2, "kv_stages": 0, "barrier": "shared"}},
            {"load.q_stages", "load.kv_stages"},
        ),
        (WGMMA, {"smem": None}, {"smem"}),
        (WGMMA, {"handoff": {"through": "smem_16bit", "swizzle": "128B"}}, {"pv.a.source"}),
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
    assert rules.schedule_engines("cooperative", "scalar", "scalar") is None
    assert rules.schedule_engines("ping_pong", "wgmma", "wgmma") is None
    assert rules.schedule_engines("warp_specialized", "wgmma", "scalar") == Violation(
        "schedule.kind",
        "warp_specialized needs wgmma for qk and pv, got wgmma and scalar; use cooperative, or extend k4_2",
    )


def test_schedule_handoff() -> None:
    assert rules.schedule_handoff("cooperative", "smem_16bit") is None
    assert rules.schedule_handoff("ping_pong", "registers") is None
    assert rules.schedule_handoff("ping_pong", "smem_16bit") == Violation(
        "handoff.through",
        "P through shared memory is rendered with schedule cooperative only, not ping_pong; use registers",
    )


def test_schedule_barrier() -> None:
    assert rules.schedule_barrier("cooperative", "shared") is None
    assert rules.schedule_barrier("warp_specialized", "separate") is None
    assert rules.schedule_barrier("warp_specialized", "shared") == Violation(
        "load.barrier",
        "with warp_specialized K of the next tile is in use before V of this one is free, so that they cannot share a "
        "barrier; use separate",
    )


def test_consumer_warpgroups() -> None:
    assert [count for count in range(1, 9) if rules.consumer_warpgroups(count) is None] == [1, 2, 3]
    # 65536 / 640 = 102.4, 96 in units of 8; 5 x 96 - 24 = 456, / 4 = 114, 112 in units of 8.
    assert rules.consumer_warpgroups(4) == Violation(
        "tile.warpgroups",
        "4 consumer warpgroups and the producer are 640 threads, launched with 96 registers each; setmaxnreg could "
        "raise a consumer to 112 only ((5 x 96 - 24) / 4); use 1 to 3",
    )


def test_ping_pong_partners() -> None:
    assert rules.ping_pong_partners("warp_specialized", 1) is None
    assert rules.ping_pong_partners("ping_pong", 2) is None
    assert rules.ping_pong_partners("ping_pong", 1) == Violation(
        "tile.warpgroups",
        "ping_pong needs consumer warpgroups that take turns, and there is 1; "
        "use warpgroups 2 with tile.q 128, or schedule warp_specialized",
    )


def test_consumer_registers() -> None:
    assert rules.consumer_registers([("O", 64), ("S", 176)], 2, False) is None
    assert rules.consumer_registers([("O", 64), ("S", 172)], 2, True) is None
    assert rules.consumer_registers([("O", 64), ("S", 173)], 2, True) == Violation(
        "tile.kv",
        "registers per consumer thread: O 64 + S 173 = 237, + 4 to spare = 241 > 240, what setmaxnreg gives to each of "
        "2 consumer warpgroups, so that they would spill; use a smaller tile.kv or overlap: false",
    )
    assert rules.consumer_registers([("O", 32), ("S", 129)], 3, False) == Violation(
        "tile.kv",
        "registers per consumer thread: O 32 + S 129 = 161 > 160, what setmaxnreg gives to each of 3 consumer "
        "warpgroups, so that they would spill; use a smaller tile.kv or fewer warpgroups",
    )
    assert rules.consumer_registers([("O", 257)], 1, False) == Violation(
        "tile.kv",
        "registers per consumer thread: O 257 = 257 > 256, what setmaxnreg gives to each of 1 consumer warpgroup, "
        "so that they would spill; use a smaller tile.kv",
    )


def test_schedule_v_dim() -> None:
    assert rules.schedule_v_dim("cooperative", 128, 128) is None
    assert rules.schedule_v_dim("ping_pong", 192, 128) is None
    assert rules.schedule_v_dim("cooperative", 192, 128) == Violation(
        "problem.head_dim_v",
        "head_dim_v 128 beside head_dim 192 is rendered with schedule warp_specialized or ping_pong only; "
        "extend k5 or k6, or leave head_dim_v out",
    )


def test_schedule_pack() -> None:
    assert rules.schedule_pack("cooperative", 1) is None
    assert rules.schedule_pack("ping_pong", 4) is None
    assert rules.schedule_pack("cooperative", 4) == Violation(
        "tile.pack_heads",
        "a tile of 4 query heads is rendered with schedule warp_specialized or ping_pong only; "
        "extend k5 or k6, or use pack_heads 1",
    )


def test_packed_rows() -> None:
    assert rules.packed_rows(192, 8) is None
    assert rules.packed_rows(128, 6) == Violation(
        "tile.pack_heads",
        "a tile of 128 query rows holds no whole number of positions of 6 heads (128 = 21 x 6 + 2); "
        "use a divisor of 128",
    )


def test_output_over_q() -> None:
    assert rules.output_over_q(128, 128) is None
    assert rules.output_over_q(128, 192) == Violation(
        "problem.head_dim_v",
        "O takes the place of Q in shared memory, and rows of 192 are wider than its 128; use at most 128",
    )


def test_output_columns() -> None:
    assert rules.output_columns(112) is None
    assert rules.output_columns(120) == Violation(
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
    found_wide = [v.message for v in rules.check(Spec.model_validate(wide)) if v.field == "problem.head_dim_v"]
    assert [message.partition(";")[0] for message in found_wide] == [
        "N of the PV product is 320 > 256, the widest WGMMA",
        "O takes the place of Q in shared memory, and rows of 320 are wider than its 128",
    ]
    found = violations(SPECIALIZED, tile=tile, problem={"head_dim": 192, "head_dim_v": 96})
    assert "a row of V is 96 x 2 = 192 bytes" in found["smem.v"]
    assert "a row of O, in Q's place, is 96 x 2 = 192 bytes" in found["smem.q"]
    odd = {**SPECIALIZED, "tile": tile, "problem": {"head_dim": 128, "head_dim_v": 60}}
    found_odd = [v.message for v in rules.check(Spec.model_validate(odd)) if v.field == "problem.head_dim_v"]
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
    assert rules.scheduler_schedule("single_tile", "cooperative", False) is None
    assert rules.scheduler_schedule("static", "warp_specialized", True) is None
    assert rules.scheduler_schedule("dynamic", "ping_pong", True) is None
    assert rules.scheduler_schedule("static", "cooperative", False) == Violation(
        "scheduler",
        "static needs schedule warp_specialized or ping_pong with overlap: true, got cooperative; use single_tile, or "
        "extend k6",
    )
    assert rules.scheduler_schedule("dynamic", "ping_pong", False) == Violation(
        "scheduler",
        "dynamic needs schedule warp_specialized or ping_pong with overlap: true, got ping_pong without overlap; use "
        "single_tile, or extend k6",
    )


def test_scheduler_mask() -> None:
    for mask in ("none", "causal", "window"):
        assert rules.scheduler_mask("single_tile", mask) is None
    assert rules.scheduler_mask("dynamic", "causal") is None
    for scheduler in ("static", "stream_k"):
        assert rules.scheduler_mask(scheduler, "none") is None
        assert rules.scheduler_mask(scheduler, "causal") == Violation(
            "scheduler",
            "under a causal mask tiles differ in length, so that CTAs with tiles known from the start would end at "
            "different times; use dynamic",
        )
    assert rules.scheduler_mask("dynamic", "none") == Violation(
        "scheduler",
        "without a mask all tiles are equally long, and a counter has nothing to even out; use static or stream_k",
    )
    for scheduler in ("static", "stream_k", "dynamic"):
        assert rules.scheduler_mask(scheduler, "window") == Violation(
            "scheduler",
            f"a sliding window is rendered with scheduler single_tile only, not {scheduler}; use single_tile",
        )


def test_scheduler_lse() -> None:
    assert rules.scheduler_lse("single_tile", False) is None
    assert rules.scheduler_lse("static", True) is None
    assert rules.scheduler_lse("static", False) == Violation(
        "outputs.lse",
        "a kernel without LSE is rendered with scheduler single_tile only, not static; use lse: true "
        "(attention() returns O alone unless asked)",
    )


def test_scheduler_pack() -> None:
    assert rules.scheduler_pack("single_tile", 4) is None
    assert rules.scheduler_pack("dynamic", 1) is None
    assert rules.scheduler_pack("dynamic", 4) == Violation(
        "tile.pack_heads", "4 heads in one tile are rendered with scheduler single_tile only, not dynamic; use 1"
    )


def test_scheduler_output() -> None:
    assert rules.scheduler_output("single_tile", "over_q") is None
    for o in ("own_buffer", "direct"):
        assert rules.scheduler_output("static", o) is None
        assert rules.scheduler_output("single_tile", o) == Violation(
            "outputs.o", f"{o} is rendered with scheduler static, stream_k or dynamic only, not single_tile; use over_q"
        )
    assert rules.scheduler_output("dynamic", "over_q") == Violation(
        "outputs.o",
        "with scheduler dynamic the next Q is loaded while O is stored, so that O cannot lie over Q; use own_buffer, "
        "or direct where shared memory is short",
    )


def test_scheduler_rescale() -> None:
    assert rules.scheduler_rescale("single_tile", None) is None
    assert rules.scheduler_rescale("dynamic", 8) is None
    assert rules.scheduler_rescale("single_tile", 8) == Violation(
        "softmax.rescale_above",
        "rescaling now and then is rendered with scheduler static, stream_k or dynamic only, not single_tile; use null",
    )


def test_exp_before_wait() -> None:
    assert rules.exp_before_wait(None, 64, False) is None
    assert rules.exp_before_wait(16, 64, True) is None
    assert rules.exp_before_wait(17, 64, True) == Violation(
        "softmax.exp_before_wait",
        "17 > 16, a thread's exponentials of one row with tile.kv 64; use at most 16",
    )
    assert rules.exp_before_wait(1, 64, False) == Violation(
        "softmax.exp_before_wait",
        "without overlap no P V runs beside the exponentials; use null or a schedule with overlap: true",
    )


def test_output_dtype() -> None:
    assert rules.output_dtype("bf16", "bf16") is None
    assert rules.output_dtype("fp16", "fp32") is None
    assert rules.output_dtype("bf16", "fp16") == Violation(
        "o.dtype", "O in fp16 beside q, k and v in bf16 is not rendered; use bf16"
    )


def test_float32_output() -> None:
    assert rules.float32_output("dynamic", "direct", 128, 128) is None
    # 128 x 128 x 4 = 65536.
    assert rules.float32_output("static", "own_buffer", 128, 128) == Violation(
        "outputs.o",
        "a tile of O in fp32 would take 128 x 128 x 4 = 65536 bytes of shared memory, and stmatrix, which fills it, "
        "stores 16-bit elements only; use direct",
    )
    assert rules.float32_output("single_tile", "over_q", 128, 128) == Violation(
        "o.dtype",
        "O in fp32 goes straight from the registers, which is rendered with scheduler static, stream_k or dynamic "
        "only, not single_tile; leave o.dtype out, or extend fwd_d128_fp32_out",
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
    assert rules.direct_columns("problem.head_dim", 96) is None
    assert rules.direct_columns("problem.head_dim", 80) == Violation(
        "problem.head_dim",
        "outputs.o direct writes 32 columns at a time, and O has 80, no multiple of 32 (80 = 2 x 32 + 16); "
        "use 64 or 96, or outputs.o own_buffer",
    )


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
        "scheduler": {"mask": "causal"},
        "outputs.lse": {"outputs": {"o": "own_buffer", "lse": False}},
        "tile.pack_heads": {"tile": {"q": 128, "kv": 64, "warpgroups": 2, "pack_heads": 4}},
        "outputs.o": {"outputs": {}},
        "load.q_stages": {"load": {"engine": "tma", "q_stages": 3, "kv_stages": 2, "barrier": "separate"}},
        "load.barrier": {"load": {"engine": "tma", "q_stages": 2, "kv_stages": 2, "barrier": "shared"}},
    }
    for field, changes in broken.items():
        assert list(violations(PERSISTENT, **changes)) == [field]
    assert list(violations(PERSISTENT, scheduler="single_tile")) == ["load.q_stages", "outputs.o"]
    assert list(violations(SPECIALIZED, tile=PERSISTENT["tile"], softmax={"rescale_above": 8})) == [
        "softmax.rescale_above"
    ]
    sequential = {"kind": "warp_specialized", "overlap": False}
    assert list(violations(PERSISTENT, schedule=sequential)) == ["scheduler"]


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


# From a spec to facts


def test_check_never_stops_at_the_first_violation() -> None:
    found = rules.check(
        Spec.model_validate(
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
        "qk.a.source",
        "qk.a.major",
        "qk.b.source",
        "qk.b.major",
        "tile.kv",
        "problem.head_dim",
        "pv.a.major",
        "pv.b.source",
        "pv.b.major",
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
    stages=st.integers(0, 6),
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
    found = rules.check(Spec.model_validate(spec))
    shared = 2 * head_dim * (q + 2 * stages * kv)
    registers = head_dim // 2 + kv // 2 + kv // 4
    if shared > 232448 or registers > 255 or 128 * warpgroups * registers > 65536 or stages < 1 or head_dim > 256:
        assert found
    if not found:
        assert q <= 256 and kv <= 256
        assert head_dim * 2 % {"none": 16, "32B": 32, "64B": 64, "128B": 128}[swizzle] == 0
