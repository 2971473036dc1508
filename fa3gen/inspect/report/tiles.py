"""Which tiles of keys each tile of queries of one head visits: skipped, masked and full ones, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fa3gen.design import footprint
from fa3gen.design.family import PackedShape, Shape
from fa3gen.design.masks import of_call, reach
from fa3gen.design.tile_order import positions
from fa3gen.design.work import KeyTiles, key_tiles
from fa3gen.spec.model import Forward, GlobalHandoff, WindowMask

State = Literal["skipped", "masked", "full"]


def state(tiles: KeyTiles, block: int) -> State:
    """What happens to one tile of keys."""
    if not tiles.start <= block < tiles.end:
        return "skipped"
    return "full" if tiles.full_start <= block < tiles.full_end else "masked"


def order(tiles: KeyTiles) -> tuple[int, ...]:
    """The tiles of keys visited, in order: the last one first."""
    return tuple(range(tiles.end - 1, tiles.start - 1, -1))


@dataclass(frozen=True)
class Schedule:
    """One head: rows of tiles of queries, columns of tiles of keys."""

    seq_q: int
    seq_k: int
    key_tiles: int
    rows: tuple[KeyTiles, ...]

    def count(self, wanted: State) -> int:
        """How many tiles of keys are skipped, masked or full."""
        return sum(state(row, block) == wanted for row in self.rows for block in range(self.key_tiles))


def schedule(spec: Forward, seq_q: int, seq_k: int) -> Schedule:
    """All tiles of one head."""
    blocks = range(-(-seq_q // positions(spec)))
    rows = tuple(key_tiles(spec, (seq_q, seq_k), block) for block in blocks)
    return Schedule(seq_q, seq_k, -(-seq_k // spec.tile.kv), rows)


def tiled(spec: Forward) -> bool:
    """Whether there are tiles at all: the naive module's threads each compute one score."""
    return not isinstance(spec.handoff, GlobalHandoff)


def example_call(spec: Forward, heads: int) -> Shape | PackedShape:
    """A call that shows the order of tiles, of so many heads that have their own: the first example, or packed both.

    Between these is a sequence without queries, and behind them one of a few.
    """
    pack, shown = spec.tile.pack_heads, examples(spec)
    if not footprint.packed_sequences(spec):
        return Shape(1, *shown[0], heads * pack, heads)
    few = (positions(spec) // 3, spec.tile.kv // 2)
    lengths_q, lengths_k = zip(shown[1], (0, spec.tile.kv), shown[0], few, strict=True)
    return PackedShape(lengths_q, lengths_k, heads * pack, heads)


def examples(spec: Forward) -> tuple[tuple[int, int], ...]:
    """(seq_q, seq_k) that show the schedule: as many queries as keys, and fewer queries with a last tile cut short.

    It is cut by a third, or by what lets a full tile into a window that is little wider than one.
    """
    m, n = positions(spec), spec.tile.kv
    square = 8 * max(m, n)
    if isinstance(spec.mask, WindowMask):
        left, right = reach(of_call(spec.mask))
        square = max(square, -(-((left or 0) + (right or 0) + 4 * n) // max(m, n)) * max(m, n))
    fewer = square // 2 + m // 3
    cuts = (n // 3, *range(1, n))
    cut = next((cut for cut in cuts if schedule(spec, fewer, square - cut).count("full")), n // 3)
    return (square, square), (fewer, square - cut)
