"""Rules about warps that multiply keys of their own: exact messages, and silence beside the limit."""

from __future__ import annotations

from typing import Any

import pytest
from rendering import changed

from fa3gen.design import footprint, rules
from fa3gen.design.rules import Violation, parts, warps

NARROW, WIDE = "fwd_packed_kv8_decode_warps_kv128_causal", "fwd_packed_decode_warps_kv128_causal"
NARROW_128 = "fwd_packed_kv8_decode_warps_d128_kv128_causal"
WINDOWS = {"kv_from": "window", "group": "at_most"}


def test_warp_kernel() -> None:
    assert warps.warp_kernel("tile.q", 16, (16,)) is None
    assert warps.warp_kernel("split.keys", None, (None,)) is None
    assert warps.warp_kernel("tile.q", 64, (16,)) == Violation(
        "tile.q",
        "with engine mma 64 is not rendered; use 16, or engine wgmma: extend fwd_packed_kv8_decode",
    )
    assert warps.warp_kernel("schedule.overlap", True, (False,)) == Violation(
        "schedule.overlap",
        "with engine mma true is not rendered; use false, or engine wgmma: extend fwd_packed_kv8_decode",
    )


def test_keys_of_warps() -> None:
    """Four warps with 16 keys each, or a multiple of these."""
    assert [kv for kv in range(16, 300, 16) if warps.keys_of_warps(kv, 4) is None] == [64, 128, 192, 256]
    assert warps.keys_of_warps(96, 4) == Violation(
        "tile.kv", "4 warps take 16 keys at a time each, and 96 keys are no whole number of 64; use a multiple of 64"
    )


def test_both_products_are_of_warps() -> None:
    words = "with engine mma a warp has both products of its keys, not wgmma; use mma for both"
    assert parts.engine_pair("mma", "mma") is None
    assert parts.engine_pair("wgmma", "mma") == Violation("qk.engine", words)
    assert parts.engine_pair("mma", "wgmma") == Violation("pv.engine", words)


# What differs from a module, and the field that is wrong then.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    (NARROW, {"tile": {"q": 64}}, "tile.q"),
    (NARROW, {"tile": {"kv": 96}}, "tile.kv"),
    (NARROW, {"smem": {"k": "32B"}}, "smem.k"),
    (WIDE, {"smem": {"v": "64B"}}, "smem.v"),
    (NARROW, {"problem": {"head_dim": 256}}, "problem.head_dim"),
    (NARROW, {"problem": {"head_dim": 128}}, "smem.k"),
    (NARROW_128, {"smem": {"v": "64B"}}, "smem.v"),
    (NARROW_128, {"problem": {"head_dim_v": 64}}, "problem.head_dim_v"),
    (NARROW_128, {"kv": {"dtype": None}}, "problem.head_dim"),
    (NARROW_128, {"tile": {"ctas_per_sm": 1}}, "tile.ctas_per_sm"),
    (NARROW_128, {"tile": {"kv": 192}}, "tile.kv"),
    (WIDE, {"problem": {"layout": "dense"}, "scheduler": "single_tile"}, "problem.layout"),
    (NARROW, {"schedule": {"overlap": True}}, "schedule.overlap"),
    (NARROW, {"softmax": {"softcap": True}}, "softmax.softcap"),
    (NARROW, {"mask": {"kind": "window", "left": 100, "right": 0}}, "mask.left"),
    (NARROW, {"mask": {"kind": "window"}, "tile": {"kv_from": "window", "group": "fitted"}}, "tile.group"),
    (NARROW, {"softmax": {"sink": True}, "tile": {"group": "fitted"}}, "tile.group"),
    (NARROW, {"tile": {"group": "any"}}, "tile.group"),
    (WIDE, {"tile": {"pack_heads": 12}}, "tile.pack_heads"),
    (NARROW, {"kv": {"stages": 2}}, "kv.stages"),
    (WIDE, {"mask": {"kind": "none"}}, "mask"),
    (NARROW, {"tile": {"ctas_per_sm": 4}}, "tile.ctas_per_sm"),
]


@pytest.mark.parametrize(("stem", "changes", "field"), WRONG)
def test_what_is_not_rendered_is_refused(stem: str, changes: dict[str, Any], field: str) -> None:
    assert field in {violation.field for violation in rules.check(changed(stem, **changes).spec)}


@pytest.mark.parametrize(
    ("stem", "changes"),
    [
        (NARROW, {"kv": {"dtype": "e5m2"}}),
        (NARROW, {"mask": {"kind": "window"}, "tile": WINDOWS, "softmax": {"sink": True}}),
        (NARROW_128, {"mask": {"kind": "window"}, "tile": WINDOWS, "softmax": {"sink": True}}),
        (WIDE, {"softmax": {"sink": True}, "tile": {"group": "at_most"}}),
        (NARROW_128, {"tile": {"group": "at_most"}}),
        (WIDE, {"tile": {"pack_heads": 8}}),
        (WIDE, {"problem": {"dtype": "fp16"}}),
    ],
)
def test_what_is_rendered_beside_the_modules(stem: str, changes: dict[str, Any]) -> None:
    assert rules.check(changed(stem, **changes).spec) == []


def test_k_is_widened_at_once_where_registers_have_room() -> None:
    """Of a warp's 16 keys of 128 elements 64 bytes a lane each of K and V, and in 16 bits 128 of K."""
    held = {kv: dict(footprint.registers_per_thread(changed(NARROW_128, tile={"kv": kv}).spec)) for kv in (64, 128)}
    assert held[64] == {"O": 64, "S": 8, "Q": 32, "K and V": (128 + 64) // 4, "other": 24}
    assert held[128] == {"O": 64, "S": 16, "Q": 32, "K and V": (128 + 128) // 4, "other": 24}  # with 64 more, 232
    assert footprint.register_budget(changed(NARROW_128).spec) == (56, 200)


def test_nobody_converts_for_warps() -> None:
    """K and V have 8 bits up to the registers of who multiplies them."""
    spec = changed(NARROW).spec
    assert footprint.eight_bit_cache(spec) and footprint.by_warps(spec) and not footprint.converts(spec)
    assert footprint.of_each_warp(spec) == 32 and footprint.threads(spec) == 256
    assert {region.name for region in footprint.shared_memory_map(spec)} == {
        *("sQ", "sK", "sV", "sO", "sMax", "sSum", "tiles"),
    }
