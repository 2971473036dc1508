"""Keys in parts (flash decoding): how many parts a call has, as the entry points of generated modules find it.

Few queries have few tiles, and with a CTA for each most of a GPU would wait while a few SMs read a long cache. So a CTA
takes a part of the keys of a tile, and a second kernel adds the parts up, each weighed by its sum of exponentials.
"""

from __future__ import annotations

from fa3gen.base.wording import counted
from fa3gen.design import footprint
from fa3gen.design.family import Lengths, PackedShape, PagedShape, Shape
from fa3gen.design.masks import of_call, reach
from fa3gen.design.tile_order import fitted, head_tiles, mean_queries, positions
from fa3gen.spec.model import Forward

# Tiles of keys of a part, at least: with one of them loads, products and the merge would all wait for each other.
STEPS_OF_PART = 2
# Keys of a part of dense tensors where a row's bits are to be its own and nobody says how many: `deterministic_batch`.
KEYS_OF_OWN_PARTS = 512
# The same of pages, by head dim: as many as the modules that add parts up have. Pages hold a cache, which is read by
# steps of decoding most of the time; packed keys belong to prompts, and are not split.
KEYS_OF_PAGED_PARTS = {64: 512, 128: 384}
# Bytes that O of all parts of a call may take, in float32, where these are added up by another kernel; else one CTA has
# all keys of its queries, which gives the same bits.
MOST_BYTES_OF_PARTS = 2**30
# Lines of keys that are read side by side, of a kv head or several each, at most: rows of as many heads are 512 bytes,
# or more, and each further line may leave another CTA without work.
MOST_LINES = 8


def share_words(spec: Forward) -> int:
    """What a CTA of scheduler even leaves of a tile which it begins and another CTA ends: see `combine_kernel`.

    How many parts it has, how many of its positions exist, the first row and head; and how many heads it holds, where
    that differs from tile to tile.
    """
    return 4 + (spec.tile.group == "fitted")


def whole_parts(spec: Forward) -> bool:
    """Whether CTAs of scheduler even have whole parts of so many keys, equally many, and not equal shares of keys."""
    return spec.scheduler == "even" and spec.split is not None and spec.split.keys is not None


def keys_of_own_parts(head_dim: int, *, paged: bool) -> int | None:
    """Keys of a part of packed sequences whose rows' bits are to be their own, if nobody says how many; None: no parts.

    Only those of pages come in parts then, where there are modules for that.
    """
    return KEYS_OF_PAGED_PARTS.get(head_dim) if paged else None


def room_for_parts(rows: int, v_dim: int, keys: int, of_part: int) -> bool:
    """Whether there is room for what parts of up to so many keys, `of_part` in each, leave of rows of all heads."""
    return 4 * rows * v_dim * -(-keys // of_part) <= MOST_BYTES_OF_PARTS


def num_parts(spec: Forward, shape: Shape | PackedShape, num_sms: int, asked: int = 0) -> int:
    """Parts of the keys of a tile of queries, by a formula of lengths, heads and SMs alone; 1 without `split`.

    As many as let all CTAs be on the GPU at once; where there are several, none of fewer than STEPS_OF_PART tiles. Of
    a fixed number of keys, as many as there are keys for. `asked`: as many as a call asks for, by `parts_asked`.
    """
    if spec.split is None:
        return 1
    if whole_parts(spec):
        assert spec.split.keys is not None
        return max(-(-most_keys(shape) // spec.split.keys), 1)
    assert isinstance(shape, Shape)  # a rule: dense tensors
    assert spec.scheduler != "even", "tiles have different numbers of parts"
    if spec.split.keys is not None:
        return max(-(-shape.seq_k // spec.split.keys), 1)
    steps = -(-shape.seq_k // spec.tile.kv)
    if asked:
        return parts_asked(steps, asked)
    tiles = -(-shape.seq_q // positions(spec)) * head_tiles(spec, shape) * shape.batch
    most = max(min(num_sms * spec.tile.ctas_per_sm // max(tiles, 1), steps // STEPS_OF_PART), 1)
    return -(-steps // -(-steps // most)) if steps else 1


def most_keys(shape: Shape | PackedShape) -> int:
    """Keys of the longest sequence, as far as the host knows: all, or as many as a table of pages has room for."""
    if isinstance(shape, PagedShape):
        return shape.extents["most_pages"] * shape.page
    return shape.seq_k if isinstance(shape, Shape) else sum(shape.lengths_k)


def kept_parts(spec: Forward, shape: Shape | PackedShape, num_sms: int) -> int:
    """Parts that there is memory for, all of them; 0 of equal shares, whose parts are those of CTAs.

    Of dense tensors a single one goes to O; whole parts of packed sequences are all added up.
    """
    if whole_parts(spec):
        return num_parts(spec, shape, num_sms)
    several = num_parts(spec, shape, num_sms) if spec.scheduler != "even" else 1
    return several if several > 1 else 0


def parts_asked(steps: int, asked: int) -> int:
    """Parts of so many tiles of keys where a call asks for a number: whole tiles, equally many, and no part without.

    So there may be fewer: of 8 tiles 7 parts would be 2, 2, 2, 2 and three times none, and are 4.
    """
    return -(-steps // -(-steps // min(asked, steps))) if steps else 1


def shares_asked(asked: int, total_q: int, sequences: int, heads: int, rows: int) -> int:
    """CTAs of scheduler even where a call asks for so many parts: as many for each tile of `rows` queries in the mean.

    Tiles are counted as if all sequences were as long as the mean one: the host knows no other length.
    """
    return asked * sequences * heads * -(-total_q // (max(sequences, 1) * rows))


def num_shares(spec: Forward, shape: Shape | PackedShape, num_sms: int, asked: int = 0) -> int:
    """CTAs of scheduler even, each with an equal share of all steps: as many as share an SM on each, or by
    `shares_asked`, in whole SMs."""
    ctas = spec.tile.ctas_per_sm
    if not asked:
        return num_sms * ctas
    total_q, mean = sum(seq_q for seq_q, _ in shape.sequences), fitted(spec, shape, mean_queries(shape))
    return -(-shares_asked(asked, total_q, shape.batch, head_tiles(mean, shape), positions(mean)) // ctas) * ctas


def num_lines(spec: Forward, shape: Shape | PackedShape, num_sms: int, asked: int = 0) -> int:
    """Lines that steps of scheduler even stand in, which CTAs walk through side by side: `lines_of` of the modules.

    One of each kv head, up to MOST_LINES, else as many as the largest power of two that divides them; one with fewer
    CTAs than that.
    """
    heads = shape.heads_kv
    lines = heads if heads <= MOST_LINES else min(heads & -heads, MOST_LINES)
    return max(lines, 1) if lines <= num_shares(spec, shape, num_sms, asked) else 1


def counts_seen(spec: Forward) -> bool:
    """Whether scheduler even counts about as many steps of a tile of queries as its rows see tiles of keys.

    With tiles fitted to heads, which prompts have as well as few queries; others count all tiles of keys. So do those
    of warps with keys of their own: rows of few queries see nearly all, and a tile is found with fewer divisions.
    """
    return spec.tile.group == "fitted" and not footprint.by_warps(spec)  # which takes scheduler even, a causal mask


def deals_rows(spec: Forward) -> bool:
    """Whether rows whose parts are to be added up are dealt out, of all tiles together: where prompts have many.

    Otherwise each tile that is cut has CTAs of its own.
    """
    return counts_seen(spec)


def seen_before(m_block: int, seq_q: int, seq_k: int, rows: int, keys: int) -> int:
    """Steps of the tiles of queries before this one, of one head, where these count: `seen_before` of the modules."""
    blind = max(seq_q - seq_k, 0) // rows
    ahead = max(seq_k - seq_q + blind * rows - keys // 2, -rows)
    tiles = max(m_block - blind, 0)
    return m_block + (tiles * ahead + tiles * (tiles + 1) // 2 * rows) // keys


def steps_of(spec: Forward, shape: Shape | PackedShape) -> int:
    """Steps that scheduler even shares out: those that a mask hides, too, and one at least of a tile of queries.

    Tiles of keys, or whole parts where they are of so many keys; see `counts_seen` for other numbers.
    """
    steps = 0
    for lengths in shape.sequences:
        own = fitted(spec, shape, lengths[0])
        steps += steps_before(own, shape, -(-lengths[0] // positions(own)), lengths) * head_tiles(own, shape)
    return steps


def steps_before(spec: Forward, shape: Shape | PackedShape, m_block: int, lengths: Lengths) -> int:
    """Those of the tiles of queries before this one, of one head of a sequence; `spec` is `fitted` for it."""
    if counts_seen(spec):
        return seen_before(m_block, *lengths, positions(spec), spec.tile.kv)
    return m_block * steps_of_tile(spec, shape, lengths[1])


def steps_of_tile(spec: Forward, shape: Shape | PackedShape, seq_k: int) -> int:
    """Steps of a tile of queries of a sequence of so many keys: of windows, as many as hold what they show its rows."""
    kv = spec.tile.kv * tiles_of_step(spec)
    steps = max(-(-seq_k // kv), 1)
    if spec.tile.kv_from != "window":
        return steps
    left, right = reach(of_call(spec.mask, shape.window))
    assert left is not None and right is not None  # of windows that calls give
    return min(steps, -(-(left + right + positions(spec) + (footprint.page_rows(spec) or 1) - 1) // kv))


def share_of(spec: Forward, shape: Shape | PackedShape, num_sms: int, asked: int = 0) -> int:
    """Steps of a CTA with scheduler even: as many as of all others, one behind the other, wherever tiles end."""
    least = 1 if whole_parts(spec) else STEPS_OF_PART
    lines = num_lines(spec, shape, num_sms, asked)
    ctas = max(num_shares(spec, shape, num_sms, asked) // lines, 1)
    return max(-(-(steps_of(spec, shape) // lines) // ctas), least)


def tiles_of_step(spec: Forward) -> int:
    """Tiles of keys of what scheduler even shares out one by one, at most."""
    whole = spec.split.keys if whole_parts(spec) and spec.split is not None else None
    return 1 if whole is None else whole // spec.tile.kv


def told(spec: Forward, shape: Shape | PackedShape, num_sms: int, asked: int = 0) -> str:
    """How a call's keys are divided, and why: `16 of each tile of queries: as many as 132 SMs have room for`."""
    if spec.split is None:
        alike = " if they are about equally long" * footprint.shares_packed(spec)
        shared = f"; tiles of the last wave are shared by several CTAs{alike}" if footprint.splits_tail(spec) else ""
        return f"1: no second kernel adds up parts{shared}"
    if whole_parts(spec):
        assert spec.split.keys is not None
        each = counted(share_of(spec, shape, num_sms), "part")
        return f"{steps_of(spec, shape)} of {spec.split.keys} keys, {each} for each of {num_sms} SMs"
    if spec.scheduler == "even":
        count = f"{num_shares(spec, shape, num_sms, asked)} equal shares of all keys of all sequences"
        each = "one" if spec.tile.ctas_per_sm == 1 else str(spec.tile.ctas_per_sm)
        why = f"num_splits={asked} of each tile of queries in the mean" if asked else f"{each} for each SM"
        least = f"of at least {STEPS_OF_PART} tiles of {spec.tile.kv} keys"
        return f"{count}, {why}, {least}"
    assert isinstance(shape, Shape)
    parts = f"{num_parts(spec, shape, num_sms, asked)} of each tile of queries"
    if spec.split.keys is not None:
        return f"{parts}: {shape.seq_k} keys in parts of {spec.split.keys}"
    if asked:
        steps = counted(-(-shape.seq_k // spec.tile.kv), "tile")
        return f"{parts}: num_splits={asked} of {steps} of {spec.tile.kv} keys, equally many whole ones in each part"
    room = counted(num_sms * spec.tile.ctas_per_sm, "CTA")
    tiles = counted(-(-shape.seq_q // positions(spec)) * head_tiles(spec, shape) * shape.batch, "tile")
    least = f"where there are several, of at least {STEPS_OF_PART} tiles of {spec.tile.kv} keys"
    return f"{parts}: as many as {num_sms} SMs have room for ({room} at once, {tiles} of queries); {least}"
