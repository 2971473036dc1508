"""Which tiles of keys each tile of queries visits, and the order in which CTAs take the tiles of queries.

The same arithmetic as `tile_coordinates` of the generated modules, which the tests hold it against; that of `kv_range`
is in `fa3gen.work`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fa3gen import footprint, hopper
from fa3gen.spec import CausalMask, GlobalHandoff, Spec, WindowMask
from fa3gen.work import KeyTiles, Shape, key_tiles

State = Literal["skipped", "masked", "full"]

# Bytes of K and V that a dynamic scheduler works on at a time, so that they stay in L2; `KEYS_IN_L2` in the modules.
BYTES_IN_L2 = 32 * 2**20


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


@dataclass(frozen=True)
class Taken:
    """A tile of queries in the order in which tiles are taken."""

    number: int
    m_block: int
    head: int
    batch: int


def positions(spec: Spec) -> int:
    """Query positions of a tile; its other rows are further heads of them."""
    return spec.tile.q // spec.tile.pack_heads


def schedule(spec: Spec, seq_q: int, seq_k: int) -> Schedule:
    """All tiles of one head."""
    blocks = range(-(-seq_q // positions(spec)))
    rows = tuple(key_tiles(spec, Shape(1, seq_q, seq_k, 1, 1), block) for block in blocks)
    return Schedule(seq_q, seq_k, -(-seq_k // spec.tile.kv), rows)


def tiled(spec: Spec) -> bool:
    """Whether there are tiles at all: the naive module's threads each compute one score."""
    return not isinstance(spec.handoff, GlobalHandoff)


def examples(spec: Spec) -> tuple[tuple[int, int], ...]:
    """(seq_q, seq_k) that show the schedule: as many queries as keys, and fewer queries with a last tile cut short."""
    m, n = positions(spec), spec.tile.kv
    square = 8 * max(m, n)
    if isinstance(spec.mask, WindowMask):
        square = max(square, -(-(spec.mask.left + spec.mask.right + 4 * n) // max(m, n)) * max(m, n))
    return (square, square), (square // 2 + m // 3, square - n // 3)


def taken(spec: Spec, seq_q: int, seq_k: int, heads: int, batch: int) -> Iterator[Taken]:
    """Tiles of queries in the order of their numbers: CTAs are started, dealt out or draw in this order.

    `heads` counts the heads that have tiles of their own: packs of query heads where tiles hold several.
    """
    blocks, everything = -(-seq_q // positions(spec)), heads * batch
    if spec.scheduler == "dynamic":
        yield from _drawn(spec, blocks, seq_k, heads, everything)
        return
    # A CTA for each tile: those that see the most keys are started first.
    longest_first = isinstance(spec.mask, CausalMask) and not footprint.persistent(spec)
    for number in range(blocks * everything):
        block, head = number % blocks, number // blocks
        yield Taken(number, blocks - 1 - block if longest_first else block, head % heads, head // heads)


def _drawn(spec: Spec, blocks: int, seq_k: int, heads: int, everything: int) -> Iterator[Taken]:
    """Sections of as many heads as have their K and V in L2; in each the last rows, which see the most keys, first."""
    whole = min(max(keys_in_l2(spec) // seq_k, 1), everything)
    for number in range(blocks * everything):
        first = number // (whole * blocks) * whole
        place = number % (whole * blocks)
        share = min(whole, everything - first)
        head = first + place % share
        yield Taken(number, blocks - 1 - place // share, head % heads, head // heads)


def keys_in_l2(spec: Spec) -> int:
    """Keys whose K and V a dynamic scheduler lets share the L2 cache."""
    return BYTES_IN_L2 // ((spec.problem.head_dim + spec.problem.v_dim) * hopper.BYTES_16BIT)
