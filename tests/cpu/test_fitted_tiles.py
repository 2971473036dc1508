"""Tiles that hold as many heads as suit a sequence's queries: each number of them right, and mistakes are reported."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hosting import mistaken, small
from rendering import CHECKOUT, variants

from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.module import load_on_cpu
from fa3gen.design.family import PackedShape
from fa3gen.design.tile_order import fitted, head_tiles, packs, positions
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


def case(group: int, keys: int | None = None) -> packed_inputs.PackedCase:
    """Two tiles of a sequence, the second one cut short, and a sequence of one row, of two kv heads.

    `keys` are those of a tile.
    """
    rows = positions(fitted(spec(), PackedShape((1,), (1,), group, 1), 1))
    lengths = (rows + 2, 1), ((keys or spec().tile.kv) + 5, 3)
    return packed_inputs.sequences(f"of {group}", "", *lengths, heads=(2 * group, 2), first=1, behind=2)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 8, 12, 16])
def test_each_group_has_the_fewest_heads_that_hold_it(group: int) -> None:
    pack = fitted(spec(), PackedShape((1,), (1,), 2 * group, 2), 1).tile.pack_heads
    assert pack in packs(spec()) and pack >= group and pack // 2 < group
    result = CpuPackedRunner(module(), spec(), seed=2, count=1).run_case(case(group))
    assert result.failures == ()


def chunks(group: int) -> packed_inputs.PackedCase:
    """Three tiles of a pack of heads that fill them, of one kv head."""
    rows = 3 * spec().tile.q // (group & -group) - 3
    return packed_inputs.sequences(f"chunks of {group}", "", (rows,), (rows + 70,), heads=(group, 1), first=1, behind=2)


def chunk_and_steps(group: int) -> packed_inputs.PackedCase:
    """A chunk between steps, of two kv heads: tiles of a pack, the last one cut short, and tiles of all heads."""
    rows = 2 * spec().tile.q // (group & -group) - 3
    lengths = (1, rows, 2, 1), (300, rows + 70, 200, 9)
    return packed_inputs.sequences(f"both of {group}", "", *lengths, heads=(2 * group, 2), first=1, behind=2)


@pytest.mark.parametrize("group", [3, 5, 6, 12])
def test_heads_that_leave_no_room_empty_have_tiles_of_their_own(group: int) -> None:
    """Of a sequence of many queries, as many as the odd part of a group; of one of few, all heads are in a tile."""
    shape = PackedShape((900, 8), (900, 400), group, 1)
    many, few = (fitted(spec(), shape, seq_q) for seq_q in shape.lengths_q)
    assert many.tile.pack_heads == group & -group < few.tile.pack_heads
    assert head_tiles(many, shape) == group // (group & -group) and head_tiles(few, shape) == 1
    result = CpuPackedRunner(module(), spec(), seed=2, count=1).run_case(chunks(group))
    assert result.failures == ()


@pytest.mark.parametrize("group", [3, 5, 6, 12])
@pytest.mark.parametrize("sms", [2, 9])
def test_sequences_of_one_call_have_tiles_of_different_heads(group: int, sms: int) -> None:
    assert failures(module(), chunk_and_steps(group), sms) == ()


def failures(found: Any, case: packed_inputs.PackedCase, sms: int, of: Forward | None = None) -> tuple[str, ...]:
    """With so many SMs, under one schedule; `of` is its spec where it is not the committed module."""
    found.cpu.settings = Settings(sms=sms)
    try:
        return CpuPackedRunner(found, of or spec(), seed=2, count=1).run_case(case).failures
    finally:
        found.cpu.settings = Settings()


def long_and_short(keys: int = 3000) -> packed_inputs.PackedCase:
    """A tile whose keys many CTAs share, and tiles that two do: rows of many parts, and of few, are added up."""
    lengths = (5, 140, 1), (keys, keys // 10, 9)
    return packed_inputs.sequences("long and short", "", *lengths, heads=(3, 1), first=1, behind=2)


@pytest.mark.parametrize("sms", [1, 3, 30])
def test_rows_of_few_and_of_many_parts_are_added_up(sms: int) -> None:
    assert failures(module(), long_and_short(), sms) == ()


def test_more_ctas_than_threads_that_deal_rows_out() -> None:
    """Whose rows are counted 256 CTAs at a time."""
    case = packed_inputs.sequences("many", "", (1,) * 193, (260,) * 193, heads=(1, 1), first=1, behind=2)
    assert failures(module(), case, 290) == ()


@pytest.mark.parametrize(
    ("group", "right", "wrong"),
    [
        (4, "log2 += cutlass.Int32(heads > room)", "log2 += cutlass.Int32(heads > 2 * room)"),
        (3, "if 1 << work.pack_log2 == pack:", "if 2 << work.pack_log2 == pack:"),
        (2, "row & ((cutlass.Int32(1) << pack_log2) - 1), row >> pack_log2", "row % PACK_HEADS, row // PACK_HEADS"),
        (2, "(cutlass.Int32(tScS_rows[r, 0][0]) >> pack_log2)", "tScS_rows[r, 0][0] // PACK_HEADS"),
        (2, "diagonal + (TILE_M >> pack_log2)", "diagonal + POSITIONS"),
        (2, "(TILE_M >> pack_log2) - 1) >>", "(TILE_M >> pack_log2) // 2 - 1) >>"),
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
    text, of = small(STEM)
    assert text.count(right) == 1
    broken = mistaken(tmp_path, STEM, text.replace(right, wrong))
    assert CpuPackedRunner(broken, of, seed=2, count=1).run_case(case(group, of.tile.kv)).failures != ()


MISTAKES = {  # what stands there, what somebody may have written, and the case that shows it
    "the last tile of keys": (
        "n_end = n_blocks if step_end == steps else",
        "n_end = n_blocks if step_end > steps else",
        "both of 5",
    ),
    "how many parts there are": (
        "step + cutlass.min(n_blocks, steps), share",
        "step + steps + 1, share",
        "long and short",
    ),
    "heads and steps": (
        "pack, step = step // of_pack, step % of_pack",
        "pack, step = step % of_pack, step // of_pack",
        "long and short",
    ),
    "packs of a kv head": ("        head = pack // packs\n", "        head = pack % packs\n", "both of 5"),
    "heads of a pack": ("((pack - head * packs) << pack_log2)", "(pack - head * packs)", "both of 6"),
    "rows of a pack": ("((head - head_kv * group, begin),", "((0, begin),", "both of 5"),
    "heads of another sequence": (
        "pack_log2 = cute.arch.shuffle_sync(lane_log2, owner)",
        "pack_log2 = lane_log2",
        "both of 5",
    ),
    "steps of one pack": (
        "steps = of_pack * cutlass.max(heads >> lane_log2, 1) * line_heads",
        "steps = of_pack * line_heads",
        "both of 5",
    ),
    "heads of a cut tile": (
        "q_begin, seq_q, *_), cut_log2 = tile, pack_log2",
        "q_begin, seq_q, *_), cut_log2 = tile, zero",
        "long and short",
    ),
    "rows of a part": ("kept = (position << pack_log2) + head", "kept = position * heads + head", "long and short"),
    "half of the rows": (
        "rows = cutlass.min(group, 1 << pack_log2) *",
        "rows = cutlass.min(group, 1 << pack_log2) // 2 *",
        "long and short",
    ),
    "rows of heads that there are not": (
        "    heads = cutlass.min(group, 1 << pack_log2)\n",
        "    heads = 1 << pack_log2\n",
        "long and short",
    ),
    "rows of many parts": (
        "num_parts > PARTS_OF_WARP else piece * COMBINE_WARPS",
        "num_parts > PARTS_OF_WARP + 8 else piece * COMBINE_WARPS",
        "long and short",
    ),
    "pieces of a tile": (
        "rows = rows if num_parts > PARTS_OF_WARP else",
        "rows = rows if num_parts < PARTS_OF_WARP else",
        "long and short",
    ),
    "pieces of the warps before": (
        "before += of_warps[warp] if warp < warp_idx else 0",
        "before += of_warps[warp] if warp <= warp_idx else 0",
        "long and short",
    ),
    "the first piece of a tile": ("before = ends[owner - 1]", "before = ends[owner]", "long and short"),
    "the next piece": ("            piece += ctas\n", "            piece += ctas + 1\n", "both of 5"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_shares_and_sums_are_reported(mistake: str, tmp_path: Path) -> None:
    (text, of), (right, wrong, shown_by) = small(STEM), MISTAKES[mistake]
    assert text.count(right) == 1
    broken = mistaken(tmp_path, STEM, text.replace(right, wrong))
    [(shown, sms)] = [(case, sms) for case, sms in showing() if case.name == shown_by]
    assert failures(broken, shown, sms, of) != ()


def showing() -> list[tuple[packed_inputs.PackedCase, int]]:
    """Cases that show mistakes, each with a number of SMs."""
    return [(long_and_short(750), 30), (chunk_and_steps(5), 9), (chunk_and_steps(6), 7)]


def test_without_a_mistake_nothing_is_reported(tmp_path: Path) -> None:
    """In the small module, which is no committed one."""
    text, of = small(STEM)
    right = mistaken(tmp_path, STEM, text)
    cases = [*showing(), *((case(group, of.tile.kv), Settings().sms) for group in (2, 3, 4))]
    assert [failures(right, each, sms, of) for each, sms in cases] == [()] * len(cases)
