"""Tiles that hold as many heads as a call's groups have: each number of them right, and mistakes are reported."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hosting import mistaken
from rendering import CHECKOUT, source, variants

from fa3gen.cpu.module import load_on_cpu
from fa3gen.design.family import PackedShape
from fa3gen.design.tile_order import fitted, packs, positions
from fa3gen.spec.model import Forward
from fa3gen.verify import packed_inputs
from fa3gen.verify.packed_on_cpu import CpuPackedRunner

STEM = "fwd_packed_chunks_d64_causal"


def spec() -> Forward:
    found = variants()[STEM].spec
    assert isinstance(found, Forward)
    return found


@cache
def module() -> Any:
    return load_on_cpu(CHECKOUT.module_path(STEM))


def case(group: int) -> packed_inputs.PackedCase:
    """Two tiles of a sequence, the second one cut short, and a sequence of one row, of two kv heads."""
    rows = positions(fitted(spec(), PackedShape((1,), (1,), group, 1)))
    lengths = (rows + 2, 1), (spec().tile.kv + 5, 3)
    return packed_inputs.sequences(f"of {group}", "", *lengths, heads=(2 * group, 2), first=1, behind=2)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 12, 16])
def test_each_group_has_the_fewest_heads_that_hold_it(group: int) -> None:
    shape = PackedShape((1,), (1,), 2 * group, 2)
    pack = fitted(spec(), shape).tile.pack_heads
    assert pack in packs(spec()) and pack >= group and pack // 2 < group
    result = CpuPackedRunner(module(), spec(), seed=2, count=1).run_case(case(group))
    assert result.failures == ()


@pytest.mark.parametrize(
    ("group", "right", "wrong"),
    [
        (4, "pack_log2 += cutlass.Int32(group > heads)", "pack_log2 += cutlass.Int32(group > 2 * heads)"),
        (3, "if 1 << work.pack_log2 == pack:", "if 2 << work.pack_log2 == pack:"),
        (2, "row & ((cutlass.Int32(1) << pack_log2) - 1), row >> pack_log2", "row % PACK_HEADS, row // PACK_HEADS"),
        (2, "(cutlass.Int32(tScS_rows[r, 0][0]) >> pack_log2)", "tScS_rows[r, 0][0] // PACK_HEADS"),
        (2, "diagonal + (TILE_M >> pack_log2)", "diagonal + POSITIONS"),
        (2, "cute.ceil_div(seq_q, positions) * line_heads", "cute.ceil_div(seq_q, 2 * positions) * line_heads"),
    ],
    ids=[
        "too few heads",
        "the box of more heads",
        "rows of O",
        "the diagonal",
        "the last key",
        "tiles of a sequence",
    ],
)
def test_mistakes_are_reported(group: int, right: str, wrong: str, tmp_path: Path) -> None:
    """In the case above: what it shows is no accident of the numbers."""
    assert source(STEM).count(right) == 1
    broken = mistaken(tmp_path, STEM, source(STEM).replace(right, wrong))
    assert CpuPackedRunner(broken, spec(), seed=2, count=1).run_case(case(group)).failures != ()
