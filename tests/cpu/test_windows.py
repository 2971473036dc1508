"""Production kernels with a window or packed heads on the CPU model, where a CTA takes several tiles of queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hosting import module, path_of
from rendering import CHECKOUT, changed, variants

from fa3gen.cpu.module import load_on_cpu
from fa3gen.design import tile_order
from fa3gen.design.work import Shape, key_tiles
from fa3gen.generate.plan import make_plan
from fa3gen.generate.render import render_variant
from fa3gen.spec.model import Spec, WindowMask
from fa3gen.verify.inputs import Case
from fa3gen.verify.on_cpu import verify_on_cpu

torch.set_num_threads(1)  # the workers of xdist share the cores
STEMS = [
    stem
    for stem, variant in variants().items()
    if stem.startswith("fwd_") and (variant.spec.mask.kind == "window" or variant.spec.tile.pack_heads > 1)
]
SMS = 3  # of the model, unless told otherwise; each case has 6 tiles of queries


def cases(spec: Spec) -> list[Case]:
    """Two heads, or packs of heads, with three tiles of queries each, the last one cut short."""
    m, n, heads = tile_order.positions(spec), spec.tile.kv, 2 * spec.tile.pack_heads
    seq_q = 2 * m + 9
    right = spec.mask.right if isinstance(spec.mask, WindowMask) else 0
    # A tile and a bit see no key, whatever the window's right side lets them see.
    few = seq_q - m - right - 5
    if few < 1:
        few, seq_q = n // 2 + 3, m + right + 5 + n // 2 + 3
    return [
        Case("more_queries", "whole tiles of rows with no key beside tiles that see some", 1, seq_q, few, heads, 1),
        Case("more_keys", "tiles skipped on both sides; the last one cut short", 1, 2 * m + 9, 3 * n + m + 7, heads, 1),
    ]


def check(found: Any, spec: Spec, stem: str) -> None:
    for case in cases(spec):
        blocks = [
            key_tiles(spec, Shape(1, case.seq_q, case.seq_k, 1, 1), block)
            for block in range(-(-case.seq_q // tile_order.positions(spec)))
        ]
        assert 2 * len(blocks) >= 2 * SMS, "no CTA takes two tiles"
        if case.name == "more_queries":
            assert blocks[0].end == 1 and case.seq_q - case.seq_k > tile_order.positions(spec)
    report = verify_on_cpu(found, spec, stem=stem, cases=cases(spec))
    assert report.failures == (), f"seed {report.seed}"


@pytest.mark.parametrize("stem", STEMS)
def test_several_tiles_for_a_cta(stem: str) -> None:
    check(module(stem), variants()[stem].spec, stem)


def test_both_edges_of_a_window_and_the_end_of_the_keys_in_one_tile(tmp_path: Path) -> None:
    """A window narrower than a tile: one loop, which masks both edges. In the committed ones they are never so near."""
    variant = changed("fwd_d64_window_o_only", mask={"kind": "window", "left": 60, "right": 20}, outputs={"lse": True})
    assert (plan := make_plan(variant)).mask.full_tiles == "none" and plan.mask.both_edges
    spec, m = variant.spec, tile_order.positions(variant.spec)
    # The only tile that the last rows visit has the left edge of some of them, the right edge of others, and the end.
    case = Case("one_tile", "", 1, 2 * m + 40, 2 * spec.tile.kv + 100, 2, 1)
    last = key_tiles(spec, Shape(1, case.seq_q, case.seq_k, 1, 1), case.seq_q // m)
    assert (last.start, last.end) == (2, 3) and case.seq_k % spec.tile.kv and case.seq_k - 40 - 60 >= 2 * spec.tile.kv
    found = load_on_cpu(path_of(tmp_path, "narrow", render_variant(variant, CHECKOUT)))
    report = verify_on_cpu(found, spec, stem="narrow", cases=[case, *cases(spec)])
    assert report.failures == (), f"seed {report.seed}"
