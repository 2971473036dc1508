"""Production kernels with a window or packed heads on the CPU model, where a CTA takes several tiles of queries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hosting import module, path_of
from rendering import CHECKOUT, changed, variants

from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.module import load_on_cpu
from fa3gen.design import tile_order
from fa3gen.design.masks import of_call, reach
from fa3gen.design.work import KeyTiles, key_tiles
from fa3gen.generate.plan import make_plan
from fa3gen.generate.render import render_variant
from fa3gen.spec.model import Spec, WindowMask
from fa3gen.verify.inputs import Case
from fa3gen.verify.on_cpu import verify_on_cpu

torch.set_num_threads(1)  # the workers of xdist share the cores
STEMS = [
    stem
    for stem, variant in variants().items()
    if stem.startswith("fwd_")
    and variant.spec.problem.layout == "dense"
    and (variant.spec.mask.kind == "window" or variant.spec.tile.pack_heads > 1)
]
SMS = Settings().sms  # as many as `verify_on_cpu` tells a kernel of


def cases(spec: Spec) -> list[Case]:
    """Two heads, or packs of heads, with two or three tiles of queries each, the last one cut short."""
    m, n, heads = tile_order.positions(spec), spec.tile.kv, 2 * spec.tile.pack_heads
    left, right = reach(of_call(spec.mask)) if isinstance(spec.mask, WindowMask) else (0, 0)
    assert left is not None and right is not None
    few = n // 2 + 3
    return [
        Case("more_queries", "a whole tile sees no key", 1, m + right + few, few, heads, 1),
        Case(
            "more_keys",
            "keys beyond both sides of a window; the last tile cut short",
            1,
            m + 9,
            left + max(3 * n, m + 2 * n) + 7,
            heads,
            1,
        ),
    ]


def visited(spec: Spec, case: Case) -> list[KeyTiles]:
    """The tiles of keys that each tile of queries of one head visits."""
    blocks = range(-(-case.seq_q // tile_order.positions(spec)))
    return [key_tiles(spec, (case.seq_q, case.seq_k), block) for block in blocks]


def check(found: Any, spec: Spec, stem: str) -> None:
    for case in cases(spec):
        assert 2 * len(visited(spec, case)) > SMS  # some CTA takes two tiles
    report = verify_on_cpu(found, spec, stem=stem, cases=cases(spec), calls=False)
    assert report.failures == (), f"seed {report.seed}"


@pytest.mark.parametrize("stem", STEMS)
def test_the_cases_have_what_they_are_for(stem: str) -> None:
    spec = variants()[stem].spec
    queries, keys = cases(spec)
    m, n = tile_order.positions(spec), spec.tile.kv
    right = reach(of_call(spec.mask)).right if isinstance(spec.mask, WindowMask) else 0
    assert queries.seq_q - queries.seq_k - right >= m  # the last key that row m - 1 could see is none
    first = visited(spec, keys)[0]
    assert keys.seq_k % n and first.end - first.start > 1
    if isinstance(spec.mask, WindowMask):
        # A skipped tile, tiles with the left edge before full ones, or before those with the right edge.
        assert first.first_key + first.start > 0 and first.full_start > first.start


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
    last = visited(spec, case)[-1]
    assert (last.start, last.end) == (2, 3) and case.seq_k % spec.tile.kv and case.seq_k - 40 - 60 >= 2 * spec.tile.kv
    found = load_on_cpu(path_of(tmp_path, "narrow", render_variant(variant, CHECKOUT)))
    report = verify_on_cpu(found, spec, stem="narrow", cases=[case, *cases(spec)])
    assert report.failures == (), f"seed {report.seed}"
