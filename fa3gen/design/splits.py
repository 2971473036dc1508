"""Keys in parts (flash decoding): how many parts a call has, as the entry points of generated modules find it.

Few queries have few tiles, and with a CTA for each most of a GPU would wait while a few SMs read a long cache. So a CTA
takes a part of the keys of a tile, and a second kernel adds the parts up, each weighed by its sum of exponentials.
"""

from __future__ import annotations

from fa3gen.design import footprint
from fa3gen.design.family import PackedShape, Shape
from fa3gen.design.masks import of_call, reach
from fa3gen.design.tile_order import head_tiles, positions
from fa3gen.spec.model import Forward

# Tiles of keys of a part, at least: with one of them loads, products and the merge would all wait for each other.
STEPS_OF_PART = 2
# What a CTA of scheduler even leaves of a tile which it begins and another CTA ends: see `combine_kernel`.
SHARE_WORDS = 4


def num_parts(spec: Forward, shape: Shape | PackedShape, num_sms: int) -> int:
    """Parts of the keys of a tile of queries, by a formula of lengths, heads and SMs alone; 1 without `split`.

    As many as let all CTAs be on the GPU at once; where there are several, none of fewer than STEPS_OF_PART tiles. Of
    a fixed number of keys, as many as there are keys for.
    """
    if spec.split is None:
        return 1
    assert isinstance(shape, Shape)  # a rule: dense tensors
    assert spec.scheduler != "even", "tiles have different numbers of parts"
    if spec.split.keys is not None:
        return max(-(-shape.seq_k // spec.split.keys), 1)
    steps = -(-shape.seq_k // spec.tile.kv)
    tiles = -(-shape.seq_q // positions(spec)) * head_tiles(spec, shape) * shape.batch
    most = max(min(num_sms * spec.tile.ctas_per_sm // max(tiles, 1), steps // STEPS_OF_PART), 1)
    return -(-steps // -(-steps // most)) if steps else 1


def steps_of(spec: Forward, shape: Shape | PackedShape) -> int:
    """Steps that scheduler even shares out: those that a mask hides, too, and one at least of a tile of queries."""
    rows = positions(spec)
    of_heads = (-(-seq_q // rows) * steps_of_tile(spec, shape, seq_k) for seq_q, seq_k in shape.sequences)
    return sum(of_heads) * head_tiles(spec, shape)


def steps_of_tile(spec: Forward, shape: Shape | PackedShape, seq_k: int) -> int:
    """Steps of a tile of queries of a sequence of so many keys: of windows, as many as hold what they show its rows."""
    kv = spec.tile.kv
    steps = max(-(-seq_k // kv), 1)
    if spec.tile.kv_from != "window":
        return steps
    left, right = reach(of_call(spec.mask, shape.window))
    assert left is not None and right is not None  # of windows that calls give
    return min(steps, -(-(left + right + positions(spec) + (footprint.page_rows(spec) or 1) - 1) // kv))


def share_of(spec: Forward, shape: Shape | PackedShape, num_sms: int) -> int:
    """Steps of a CTA with scheduler even: as many as of all others, one behind the other, wherever tiles end."""
    return max(-(-steps_of(spec, shape) // max(num_sms, 1)), STEPS_OF_PART)
