"""The order in which CTAs take the tiles of queries: `tile_coordinates` of the generated modules, tile by tile."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fa3gen.design import footprint
from fa3gen.design.family import PackedShape, Shape
from fa3gen.hardware.chips import H200
from fa3gen.spec.model import CausalMask, Forward

# Bytes of K and V that a dynamic scheduler works on at a time, so that they stay in L2; `KEYS_IN_L2` in the modules.
BYTES_IN_L2 = 32 * 2**20
# Up to so many keys memory binds. There it works on as many heads at a time as a wave of tiles of queries has on so
# many SMs: some CTAs read K and V from memory, while others find theirs in L2. Of many heads all do the same at a time.
SHORT_KEYS, WAVE_SMS = 1024, H200.sms
# Of the last wave of a stream_k scheduler: parts of a tile of queries at most, and steps that splitting has to save,
# about what handing over and merging a part of O takes.
PARTS, STEPS_SAVED = 8, 4
# Of packed sequences it is shared if its longest tile has at most so many halves of their mean length.
LONGEST_HALVES = 3
# Tiles of sequences that have several for each head come between so many eighths of the others: with all of them a
# prompt's tiles are still at work when nothing else is left, with fewer the last part of a launch has none
# (docs/performance.md).
SPREAD_EIGHTHS = 7


class Taken(NamedTuple):
    """A tile of queries in the order in which tiles are taken."""

    number: int
    m_block: int
    head: int
    batch: int


def positions(spec: Forward) -> int:
    """Query positions of a tile, at least; its other rows are further heads of them."""
    return spec.tile.q // spec.tile.pack_heads


def packs(spec: Forward) -> tuple[int, ...]:
    """How many query heads a tile may hold: one number, or where sequences decide it the powers of two up to that."""
    most = spec.tile.pack_heads
    return tuple(1 << log2 for log2 in range(most.bit_length())) if spec.tile.group == "fitted" else (most,)


def fewest(numbers: Sequence[int], group: int) -> int:
    """Of the numbers of heads that a tile may hold the first that holds a group; the last one, if none does."""
    return next((heads for heads in numbers if heads >= group), numbers[-1])


def fitted(spec: Forward, shape: Shape | PackedShape, seq_q: int) -> Forward:
    """The spec as it is for a sequence of so many queries: with as many heads in a tile, where these decide it.

    For more than one such spec stays what it is: of a sequence of few queries tiles may hold more heads.
    """
    if spec.tile.group != "fitted":
        return spec
    group = max(shape.heads_q // max(shape.heads_kv, 1), 1)
    pack = heads_in_a_tile(packs(spec), spec.tile.q, group, seq_q)
    return spec.model_copy(update={"tile": spec.tile.model_copy(update={"pack_heads": pack})})


def mean_queries(shape: Shape | PackedShape) -> int:
    """Queries of a sequence in the mean, rounded up: all that a host knows of how many there are."""
    return -(-sum(seq_q for seq_q, _ in shape.sequences) // max(shape.batch, 1))


def heads_in_a_tile(packs: Sequence[int], tile_q: int, group: int, rows: int) -> int:
    """Of the numbers of heads that a tile may hold the one for so many queries: `pack_log2_of` of the modules.

    All heads of a kv head; or as many as leave no room for heads empty, where that takes fewer tiles, and two at least.
    """
    filled, together = group & -group, fewest(packs, group)
    of_group, of_pack = (-(-rows * heads // tile_q) for heads in (together, filled))
    return filled if of_pack > 1 and group // filled * of_pack < of_group else together


def takes_group(spec: Forward, group: int) -> bool:
    """Whether tiles can hold the query heads of kv heads that so many share."""
    if spec.tile.group == "any":
        return True
    if spec.tile.holds_group:
        return group <= spec.tile.pack_heads
    return group % spec.tile.pack_heads == 0


def head_tiles(spec: Forward, shape: Shape | PackedShape) -> int:
    """Tiles of the same positions: of each kv head as many as hold the query heads that share it.

    Where sequences decide how many a tile holds, `spec` is `fitted` for one.
    """
    if spec.tile.group == "multiple":
        return shape.heads_q // spec.tile.pack_heads
    return shape.heads_kv * -(-shape.heads_q // (spec.tile.pack_heads * max(shape.heads_kv, 1)))


def packs_of_kv(spec: Forward, shape: Shape | PackedShape) -> int:
    """Packs of query heads that share a kv head, each in tiles of its own; `spec` is `fitted` for a sequence."""
    return head_tiles(spec, shape) // max(shape.heads_kv, 1)


def taken(spec: Forward, shape: Shape | PackedShape) -> Iterator[Taken]:
    """Tiles of queries in the order of their numbers: CTAs are started, dealt out or draw in this order.

    `head` counts the heads that have tiles of their own: packs of query heads where tiles hold several. `batch` is the
    number of a sequence where these are packed, which is one behind the other in this order, too.
    """
    if isinstance(shape, Shape) and not footprint.packed_sequences(spec):
        yield from _of_batch(spec, shape.seq_q, shape.seq_k, head_tiles(spec, shape), shape.batch)
        return
    if spec.order == "woven":
        yield from _woven(spec, shape)
        return
    before, one_by_one = 0, spec.order == "by_head"
    for first in range(head_tiles(spec, shape) if one_by_one else 1):
        for sequence, (seq_q, seq_k) in enumerate(shape.sequences):
            own = fitted(spec, shape, seq_q)
            together = 1 if one_by_one else head_tiles(own, shape)
            for entry in _of_batch(own, seq_q, seq_k, together, 1):
                yield Taken(before + entry.number, entry.m_block, first + entry.head, sequence)
            before += -(-seq_q // positions(own)) * together


def _woven(spec: Forward, shape: Shape | PackedShape) -> Iterator[Taken]:
    """Those of sequences that have several for each head, evenly between those of sequences that have one."""
    heads = range(head_tiles(spec, shape))
    blocks = [-(-seq_q // positions(spec)) for seq_q, _ in shape.sequences]
    single = [(0, head, sequence) for sequence, count in enumerate(blocks) if count == 1 for head in heads]
    several = [
        (block, head, sequence)
        for sequence, count in enumerate(blocks)
        if count > 1
        for head in heads
        for block in reversed(range(count))
    ]
    between = max(len(several) + len(single) // 8 * SPREAD_EIGHTHS, 1)
    before = [min(-(-number * len(several) // between), len(several)) for number in range(len(single + several) + 1)]
    for number, (ours, next_ones) in enumerate(itertools.pairwise(before)):
        yield Taken(number, *(several[ours] if next_ones > ours else single[number - ours]))


def _of_batch(spec: Forward, seq_q: int, seq_k: int, heads: int, batch: int) -> Iterator[Taken]:
    """Those of sequences of one length."""
    blocks, everything = -(-seq_q // positions(spec)), heads * batch
    if footprint.draws_tiles(spec):
        yield from _drawn(spec, blocks, seq_k, heads, everything)
        return
    if spec.scheduler == "grid":
        yield from _placed(spec, blocks, heads, batch)
        return
    # A CTA for each tile: those that see the most keys are started first.
    longest_first = isinstance(spec.mask, CausalMask) and not footprint.persistent(spec)
    for number in range(blocks * everything):
        block, head = number % blocks, number // blocks
        yield Taken(number, blocks - 1 - block if longest_first else block, head % heads, head // heads)


def _placed(spec: Forward, blocks: int, heads: int, batch: int) -> Iterator[Taken]:
    """By the grid: all heads' tiles of the same rows next to each other, under a causal mask the last rows first.

    Not where keys come in parts: few queries see nearly the same keys.
    """
    longest_first = isinstance(spec.mask, CausalMask) and spec.split is None
    for number in range(blocks * heads * batch):
        row, head = number // heads % blocks, number % heads
        yield Taken(number, blocks - 1 - row if longest_first else row, head, number // heads // blocks)


def _drawn(spec: Forward, blocks: int, seq_k: int, heads: int, everything: int) -> Iterator[Taken]:
    """Sections of as many heads as have their K and V in L2; in each the last rows, which see the most keys, first.

    Or, of short sequences, as many as a wave has, see `waves_when_short`. The last section also has the heads that are
    left over.
    """
    keys = keys_of_wave(spec) if waves_when_short(spec) and seq_k <= SHORT_KEYS else keys_in_l2(spec)
    share = min(max(keys // max(seq_k, 1), 1), everything)
    for number in range(blocks * everything):
        first = min(number // (share * blocks), everything // share - 1) * share
        together = share if first + 2 * share <= everything else everything - first
        place = number - first * blocks
        head = first + place % together
        yield Taken(number, blocks - 1 - place // together, head % heads, head // heads)


def tail_share(tiles: int, steps: int, sms: int) -> int:
    """Steps of the last wave that each CTA of a stream_k scheduler takes: `launch` of the generated modules.

    The wave has so many tiles, fewer than SMs, of so many steps each, one for each tile of keys.
    """
    share = max(-(-tiles * steps // sms), -(-steps // PARTS))
    return share if share + STEPS_SAVED <= steps else steps


def waves_when_short(spec: Forward) -> bool:
    """Whether heads of short sequences are worked on by waves: measured for 16 bits, causal masks, a head in a tile."""
    sixteen = spec.element.bytes == spec.kv_element.bytes == 2
    causal = isinstance(spec.mask, CausalMask) and spec.tile.pack_heads == 1
    return spec.scheduler == "dynamic" and not footprint.packed_sequences(spec) and sixteen and causal


def keys_of_wave(spec: Forward) -> int:
    """Keys of as many heads as have a tile for each SM, where queries and keys are equally many."""
    return WAVE_SMS * positions(spec)


def keys_in_l2(spec: Forward) -> int:
    """Keys whose K and V a dynamic scheduler lets share the L2 cache."""
    return BYTES_IN_L2 // ((spec.problem.head_dim + spec.problem.v_dim) * spec.kv_element.bytes)
