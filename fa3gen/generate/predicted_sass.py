"""What a spec says of the code that ptxas makes: waits, maxima and the widths of its stores.

Static counts. As compiled (DSL 4.8.1, ptxas 12.9.83), no loop over tiles is unrolled, and what a template unrolls
stands there element by element.
"""

from __future__ import annotations

from fa3gen.design import footprint, splits
from fa3gen.design.schedule import full_tiles
from fa3gen.generate.expected import SassExpectation
from fa3gen.hardware import hopper
from fa3gen.hardware.dtypes import FP32
from fa3gen.spec.model import Forward, GlobalHandoff, MmaProduct, WgmmaProduct

VECTOR_BITS = 128  # of the widest access to memory that a thread makes
SHIFT_COMPARISONS = 2  # of a row, where its first maximum is looked for: whether it has one, and whether there is one
SINK_COMPARISONS = 2  # of a row with a sink, beside the two at the end of every row: for its two exponentials of 2
MERGED_SINK_COMPARISONS = 3  # where a row is merged from warps: whether it, and its sink, has a sum, and both
COMBINE_COMPARISONS = 3  # of the kernel that adds parts up: whether a warp, and all, have a key, and the sum for it
ALONE_COMPARISONS = 2  # where a warp adds up a row alone: whether it has a key, and the sum for it
SUM_COMPARISONS = 1  # of that which adds whole parts up: the sum alone


def expectation(spec: Forward, *, waits: int, softmaxes: int, o_boxes: int, matrices: int) -> SassExpectation:
    """The prediction for one spec.

    `waits` is how many warpgroup waits and `softmaxes` how many softmax steps stand in the code, `o_boxes` the TMA
    stores of O, `matrices` the stmatrix instructions, each of four 8 x 8 matrices.
    """
    if isinstance(spec.handoff, GlobalHandoff):
        # A thread computes one score, then one element of O; in between, a warp walks along a row.
        return SassExpectation(
            waits=waits,
            min_maxima=1 + _exchanges(hopper.WARP),
            max_comparisons=_most_comparisons(rows=1, softmaxes=1),
            global_stores={"STG.32": 2 + spec.outputs.lse, "STG.16": 1},
            shared_stores={},
        )
    rows, lanes = footprint.thread_rows(spec)
    exchanges, merged = _exchanges(lanes), 0
    if footprint.by_warps(spec):  # a row's maxima are those of four threads, then of the warps
        exchanges, merged = _exchanges(footprint.QUAD), footprint.computing_threads(spec) // hopper.WARP - 1
    # A first maximum is looked for in every tile but those without an edge of the mask, which have a loop of their own.
    maxima = softmaxes - (spec.softmax.row_max == "first" and full_tiles(spec) != "none")
    held_back = softmaxes if spec.softmax.exp_before_wait is not None else 0  # a sum is compared, for a branch
    return SassExpectation(
        waits=waits,
        min_maxima=maxima * rows * (spec.tile.kv // lanes + exchanges) + merged + rows * footprint.splits_tail(spec),
        max_comparisons=_most_comparisons(rows, softmaxes if spec.softmax.rescale_above is not None else 0)
        + held_back
        + softmaxes * footprint.block_scales(spec)  # whether P V of a step is in the unit that O gets
        + rows * (SHIFT_COMPARISONS * maxima + 1) * (spec.softmax.row_max == "first")
        + (SINK_COMPARISONS * rows + MERGED_SINK_COMPARISONS * footprint.by_warps(spec)) * spec.softmax.sink
        + (SUM_COMPARISONS if splits.whole_parts(spec) else COMBINE_COMPARISONS) * (spec.split is not None)
        + ALONE_COMPARISONS * splits.deals_rows(spec),
        global_stores=_global_stores(spec, rows, lanes, o_boxes),
        shared_stores=_shared_stores(spec, matrices),
    )


def _exchanges(lanes: int) -> int:
    """Steps in which so many lanes, a power of two, find their common maximum."""
    return lanes.bit_length() - 1


def _most_comparisons(rows: int, softmaxes: int) -> int:
    """FSETP that a kernel needs for its rows: one in each softmax that asks something of a maximum, two at its end.

    It asks how far the maximum grew where O is rescaled rarely; in the softmax that goes over rows in global memory,
    whether there was a key at all.

    Far fewer than the two for each element of a maximum that propagates NaN.
    """
    return rows * (softmaxes + 2)


def _global_stores(spec: Forward, rows: int, lanes: int, o_boxes: int) -> dict[str, int]:
    if footprint.by_warps(spec):
        # What a thread merges: 16-bit columns of a row, or float32 ones of a part, and LSE; words of a share; and a
        # column of O and LSE of what is added up.
        columns = spec.tile.q * spec.problem.v_dim // footprint.computing_threads(spec)
        vectors = columns * (spec.o_element.bits + FP32.bits) // VECTOR_BITS
        return {f"STG.{VECTOR_BITS}": vectors, "STG.32": 3 + splits.share_words(spec), "STG.16": 1}
    # LSE, the counter of tiles set back to zero, the flag of a part set and set back, and O by TMA.
    words = rows * spec.outputs.lse + footprint.draws_tiles(spec) + 2 * footprint.splits_tail(spec)
    stores = {"STG.32": words, "UTMASTG": o_boxes}
    if o_boxes == 0:
        # O straight from registers.
        element = spec.o_element.bits
        bits = spec.problem.v_dim * element // lanes
        vector = min(bits & -bits, VECTOR_BITS)
        if spec.outputs.o == "direct":
            # 16-bit columns are traded in a quad until each thread has whole vectors; two of 32 bits are adjacent.
            vector = VECTOR_BITS if element == 16 else footprint.FRAGMENT_COLUMNS * element
        stores[f"STG.{vector}"] = stores.get(f"STG.{vector}", 0) + rows * bits // vector
    if splits.whole_parts(spec):
        # Maximum and sum of a part, and O in float32, two columns at a time; then two columns of O, and LSE.
        pairs = rows * spec.problem.v_dim // lanes // footprint.FRAGMENT_COLUMNS
        return {"STG.32": 2 * rows + 2, "STG.64": pairs}
    if spec.split is not None:
        # LSE of a part, and O in float32, two columns at a time; then a column of O and LSE of what is added up.
        stores["STG.32"] += rows + 1 + splits.share_words(spec) * (spec.scheduler == "even")
        stores["STG.64"] = rows * spec.problem.v_dim // lanes // footprint.FRAGMENT_COLUMNS
        stores["STG.16"] = 1
    if splits.deals_rows(spec):
        # A lane's columns of a row that a warp adds up alone, and its LSE.
        bits = spec.problem.v_dim // hopper.WARP * spec.o_element.bits
        stores[f"STG.{bits}"] = stores.get(f"STG.{bits}", 0) + 1
        stores["STG.32"] += 1
    if footprint.splits_tail(spec):
        vectors, _, _ = footprint.part_shape(spec)
        stores[f"STG.{VECTOR_BITS}"] = stores.get(f"STG.{VECTOR_BITS}", 0) + vectors
    return stores


def _shared_stores(spec: Forward, matrices: int) -> dict[str, int] | None:
    """None for a kernel whose softmax works in shared memory."""
    if not isinstance(spec.pv, WgmmaProduct | MmaProduct):
        return None
    words = footprint.tile_words(spec) * footprint.tells_tiles(spec)
    vectors, word = divmod(words, VECTOR_BITS // 32)
    # Of the first tile as well, or, with scheduler even, of none.
    times = 1 + (footprint.packed_sequences(spec) and not footprint.shares_packed(spec))
    stores = {"STSM.4": matrices, "STS.128": times * vectors, "STS.32": word}  # O or P; drawn tiles
    if footprint.converts(spec):  # of K and V, 8 elements at a time
        threads = footprint.converting_warps(spec) * hopper.WARP
        elements = spec.tile.kv * (spec.problem.head_dim + spec.problem.v_dim)
        stores["STS.128"] += elements * spec.element.bits // VECTOR_BITS // threads
    if footprint.by_warps(spec):  # what a warp leaves of its rows: O in float32, maxima and sums
        rows, _ = footprint.thread_rows(spec)
        # Four columns side by side, or two of O = P V with V of 16 bits.
        bits = spec.tile.q * spec.problem.v_dim // hopper.WARP * FP32.bits
        vector = VECTOR_BITS if footprint.eight_bit_cache(spec) else VECTOR_BITS // 2
        stores[f"STS.{vector}"] = stores.get(f"STS.{vector}", 0) + bits // vector
        stores["STS.32"] += 2 * rows
    if footprint.sums_in_smem(spec):
        # O of the parts before, in float32, where a step ends: in a loop without mask, and in one with it.
        numbers = spec.tile.q * spec.problem.v_dim // footprint.computing_threads(spec)
        stores["STS.128"] += (1 + (spec.mask.kind != "none")) * numbers * FP32.bits // VECTOR_BITS
    if spec.split is not None and not splits.whole_parts(spec):
        # What a warp has added up: a lane's columns in float32, the largest LSE and a sum.
        bits = spec.problem.v_dim // hopper.WARP * FP32.bits
        vector = min(bits & -bits, VECTOR_BITS)
        stores[f"STS.{vector}"] = stores.get(f"STS.{vector}", 0) + bits // vector
        stores["STS.32"] += 2
        # Of those who deal rows out how many each warp has counted, and then all warps.
        stores["STS.32"] += 2 * splits.deals_rows(spec)
    return stores
