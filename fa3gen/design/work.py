"""What a kernel has to do: counts of one step, of one tile of queries, and of a whole problem.

A step is one tile of queries with one tile of keys, on one CTA. Counts follow from the spec alone; only the number of
instructions is partly taken from compiled code (DSL 4.8.1), which is said where it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from fa3gen.base.errors import UserError
from fa3gen.design import footprint, tile_order
from fa3gen.design.family import Family, Lengths, PackedShape, Shape
from fa3gen.design.masks import Window, given_with_calls, of_call, reach
from fa3gen.design.operation import operation_of
from fa3gen.design.tiles import operand_tiles
from fa3gen.hardware import hopper
from fa3gen.spec.model import (
    Forward,
    GlobalHandoff,
    NoMask,
    ScalarProduct,
    SmemHandoff,
    SmemScoresHandoff,
    TmaLoad,
    WgmmaProduct,
)

F32 = 4  # bytes
LINE = 128  # bytes that shared memory or L1 delivers in a cycle; a warp's access takes whole lines
VECTOR_BYTES = 16  # of the widest access of a thread

# Instructions of a warp beside the arithmetic of a step: barriers, address and loop arithmetic, quad exchanges; and
# descriptors and issue of each WGMMA. As compiled, loops without a mask have 75 to 111 with 12 of them, 82 to 117 with
# 16 and 101 to 139 with 20 (k5, k6 and fwd_*).
WGMMA_STEP_INSTRUCTIONS, WGMMA_INSTRUCTIONS = 45, 3.6
# To give back a stage of V transposed by one arrival of a warp: WARPSYNC, ELECT, PLOP3, a branch and what fills it up.
ELECTED_RELEASE = 5
# And for descriptors of more than 64 columns of V transposed, and of Q and K beside these, which ptxas makes anew in
# uniform registers in some of these kernels; as compiled, 1 to 34 (k7 and fwd_fp8_* at head dims 128 and 256).
DESCRIPTORS_ANEW, FEW_COLUMNS = 12, 64
# The vote and the branch around the rescaling, where O is rescaled now and then. As compiled: fwd_d192, fwd_d256.
VOTE_INSTRUCTIONS = 45
# Of a score: maximum, multiply-add, exponential, sum, and half a conversion of two values to 16 bits.
SCORE_INSTRUCTIONS = 4.5
# Where P has 8 bits, two conversions of two values make a register of four, which a byte permute puts together; and
# where keys are exchanged within quads, for each 16 keys two shuffles, two permutes and two choices of what goes where.
MERGED_8BIT, EXCHANGE_8BIT = 0.25, 6
# Where each step has a factor of its own: finding its address, reading it, and scaling maxima; as compiled, 9 to 27.
SCALE_INSTRUCTIONS = 20
# Where V of a step has one, too: reading it, the ratio of two, and whether P V is in its unit; as compiled, 21 to 35.
V_SCALE_INSTRUCTIONS = 28
# Of two elements of 8 bits in registers: to float16 both, each to float32, both to 16 bits.
CONVERSION = 4
# Address arithmetic beside each vector that the scalar products load, of swizzled tiles and of plain ones, and
# instructions for each row of a scalar softmax. As compiled: k2 and k3 at head dims 64 and 128; k3_plain_d64.
QK_ADDRESSING, PV_ADDRESSING, SCALAR_ROW_INSTRUCTIONS = 9, 3, 68
PLAIN_QK_ADDRESSING, PLAIN_PV_ADDRESSING = 4.4, 1.25


@dataclass(frozen=True)
class Step:
    """One tile of queries with one tile of keys, all warps of the CTA.

    `instructions` are warp instructions (an estimate), `smem_bytes` those that shared memory reads and writes (without
    one: that L1 delivers), `l2_bytes` those that come from L2. Masking is left out.
    """

    flops: int
    tensor_flops: int
    wgmma_qk: int
    wgmma_pv: int
    scalar_fmas: int
    exponentials: int
    instructions: float
    smem_bytes: int
    l2_bytes: int
    tma_loads: int


@dataclass(frozen=True)
class SmemBytes:
    """What passes through shared memory in one step: bytes read and written, by who does it.

    `arriving` are K and V as they are written, `qk` and `pv` what the two products read (WGMMA its operands, threads
    whole lines). Threads write `scores` of S = Q K^T and spend `softmax` on reading S and writing P. `transposed` is V,
    read once and written once, where warps transpose it, and `converted` are K and V, read in 8 bits and written
    in 16, where warps do that.
    """

    arriving: int
    qk: int
    scores: int
    softmax: int
    pv: int
    transposed: int = 0
    converted: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.arriving + self.qk + self.scores + self.softmax + self.pv + self.transposed + self.converted


@dataclass(frozen=True)
class QueryTile:
    """What one tile of queries takes beside its steps: bytes of Q in and O out, and TMA copies."""

    q_bytes: int
    o_bytes: int
    tma_loads: int
    tma_stores: int


@dataclass(frozen=True)
class KeyTiles:
    """The tiles of keys [start, end) that a tile of queries visits; those in [full_start, full_end) need no mask.

    They are counted from `first_key` on. `unseen`: how many times one of them is given back unread by a consumer whose
    rows see none of its keys.
    """

    start: int
    end: int
    full_start: int
    full_end: int
    first_key: int = 0
    unseen: int = 0

    @property
    def visited(self) -> int:
        """How many tiles are visited."""
        return self.end - self.start

    @property
    def masked(self) -> int:
        """How many of them hold an edge of the mask or the end of the keys."""
        return self.visited - max(0, min(self.end, self.full_end) - max(self.start, self.full_start))


def step(spec: Forward) -> Step:
    """Count one step. Of k1, which has no loop over tiles of keys, one CTA's tile in each of the three kernels."""
    q, kv, d, v_dim = spec.tile.q, spec.tile.kv, spec.problem.head_dim, spec.problem.v_dim
    qk, pv = isinstance(spec.qk, WgmmaProduct), isinstance(spec.pv, WgmmaProduct)
    groups, by_warps = spec.tile.warpgroups or 0, footprint.by_warps(spec)
    on_tensor_cores = q * kv * (d * (qk or by_warps) + v_dim * (pv or by_warps))
    k_loads, v_loads = _tma_loads(spec)
    return Step(
        flops=2 * q * kv * (d + v_dim),
        tensor_flops=2 * on_tensor_cores,
        wgmma_qk=groups * d // spec.element.wgmma_k * qk,
        wgmma_pv=groups * footprint.stripes(spec) * kv // spec.element.wgmma_k * pv,
        scalar_fmas=q * kv * (d + v_dim) - on_tensor_cores,
        exponentials=_exponentials(spec),
        instructions=_warp_instructions(spec) * footprint.computing_threads(spec) / hopper.WARP,
        smem_bytes=_naive_l1_bytes(spec) if isinstance(spec.handoff, GlobalHandoff) else smem_bytes(spec).total,
        l2_bytes=_l2_bytes(spec),
        tma_loads=k_loads + v_loads,
    )


def query_tile(spec: Forward) -> QueryTile:
    """Count what one tile of queries takes beside its steps."""
    q, d, v_dim = spec.tile.q, spec.problem.head_dim, spec.problem.v_dim
    tiles, loads, stores = operand_tiles(spec), 0, 0
    if isinstance(spec.load, TmaLoad):
        loads = tiles["Q"].boxes
        if "O" in tiles:
            # A warp stores its own rows from a buffer of O, otherwise one thread stores the whole tile.
            senders = footprint.computing_threads(spec) // hopper.WARP if spec.outputs.o == "own_buffer" else 1
            stores = senders * tiles["O"].boxes
    return QueryTile(q * d * spec.element.bytes, q * v_dim * spec.o_element.bytes, loads, stores)


def _tma_loads(spec: Forward) -> tuple[int, int]:
    if not isinstance(spec.load, TmaLoad) or footprint.gathered(spec):
        return 0, 0
    tiles = operand_tiles(spec)
    return tiles["K"].boxes, tiles["V"].boxes


def _exponentials(spec: Forward) -> int:
    """Of every score, and of the factor of each row in each thread that shares the row.

    A capped score takes a tanh as well, which is as long on the same unit.
    """
    if isinstance(spec.handoff, GlobalHandoff):
        return spec.tile.q * spec.tile.kv
    return footprint.computing_threads(spec) * (rescaled_rows(spec) + footprint.thread_scores(spec)) + tanhs(spec)


def rescaled_rows(spec: Forward) -> int:
    """Rows of a thread whose maximum may have moved in a step: each takes an exponential of its own."""
    return footprint.thread_rows(spec)[0] if spec.softmax.row_max == "online" else 0


def tanhs(spec: Forward) -> int:
    """Of every score that is capped, in one step."""
    return footprint.computing_threads(spec) * footprint.thread_scores(spec) * spec.softmax.softcap


# -- instructions


def score_phases(spec: Forward) -> tuple[float, float, float]:
    """Instructions of a warp in the softmax of one step where it works on the fragment.

    They are those of the maxima, and of the cap before them, of exponentials and sums, and of rescaling O and rounding
    P. The rescaling is left out where O is rescaled now and then: after the first tiles of keys it is rare. Where
    the first maximum stays there is neither.
    """
    rows, lanes = footprint.thread_rows(spec)
    scores = footprint.thread_scores(spec)
    capped = 2 * scores * spec.softmax.softcap  # a product and a tanh
    scaled = (SCALE_INSTRUCTIONS + V_SCALE_INSTRUCTIONS) * footprint.block_scales(spec)
    lazy = spec.softmax.rescale_above is not None
    rounded = (SCORE_INSTRUCTIONS - 4) * scores
    if footprint.eight_bits(spec):
        rounded += MERGED_8BIT * scores
        rounded += 0 if footprint.keys_of_p(spec) else EXCHANGE_8BIT * spec.tile.kv // 16
    if spec.softmax.row_max == "first":
        return capped, 3 * scores, rounded
    sharing = footprint.QUAD if footprint.by_warps(spec) else lanes  # a row of O, which is a warp's
    moved: float = VOTE_INSTRUCTIONS if lazy else rows * spec.problem.v_dim // sharing
    if spec.softmax.restart_every is not None:
        # In place of rescaling O is multiplied, added and set to 0, now and then.
        moved += 2 * moved * spec.tile.kv / spec.softmax.restart_every
    return scores + capped + scaled, 3 * scores, moved + rounded


def scalar_qk_instructions(spec: Forward) -> float:
    """Instructions of a warp in a scalar S = Q K^T of one step, operands in shared memory."""
    rows, columns = footprint.thread_rows(spec)[0], spec.tile.kv // footprint.SCALAR_LANES
    vectors, width = spec.problem.head_dim // footprint.SCALAR_VECTOR, footprint.SCALAR_VECTOR
    loads = rows + columns
    addressing = PLAIN_QK_ADDRESSING if spec.smem is not None and spec.smem.k == "none" else QK_ADDRESSING
    return vectors * (rows * columns * width + loads * (1 + width + addressing))


def scalar_pv_instructions(spec: Forward) -> float:
    """Instructions of a warp in a scalar O += P V of one step: as many keys at a time as it has columns of S."""
    rows, keys = footprint.thread_rows(spec)[0], spec.tile.kv // footprint.SCALAR_LANES
    columns = spec.problem.v_dim // footprint.SCALAR_LANES
    addressing = PLAIN_PV_ADDRESSING if spec.smem is not None and spec.smem.v == "none" else PV_ADDRESSING
    once = rows * keys * columns + (rows + keys) * (1 + addressing) + keys * columns
    return spec.tile.kv // keys * once


def scalar_softmax_instructions(spec: Forward) -> float:
    """Instructions of a warp in the softmax on S in shared memory, one step."""
    rows = footprint.thread_rows(spec)[0]
    return rows * (SCALAR_ROW_INSTRUCTIONS + spec.problem.v_dim // footprint.SCALAR_LANES)


def _warp_instructions(spec: Forward) -> float:
    if isinstance(spec.handoff, GlobalHandoff):
        # A score and an element of O for each thread: a multiply-add with two conversions, as good as unrolled.
        return 3 * (spec.problem.head_dim + spec.tile.q * spec.tile.kv / (spec.tile.threads or 1) * spec.problem.v_dim)
    if isinstance(spec.pv, WgmmaProduct):
        return sum(score_phases(spec)) + issue_instructions(spec)
    if footprint.by_warps(spec):
        dims = spec.problem.head_dim, spec.problem.v_dim
        products = sum(read_instructions(spec, dim) + mma_instructions(spec, dim) for dim in dims)
        return sum(score_phases(spec)) + products + issue_instructions(spec)
    qk = issue_instructions(spec) if isinstance(spec.qk, WgmmaProduct) else scalar_qk_instructions(spec)
    return qk + scalar_softmax_instructions(spec) + scalar_pv_instructions(spec)


def mma_instructions(spec: Forward, dim: int) -> int:
    """Instructions of a warp in a product of its keys of one step, from registers: conversions, mma.sync."""
    keys = footprint.of_each_warp(spec)
    elements = keys * dim // hopper.WARP  # of a lane
    converted = CONVERSION * elements // 2 * footprint.eight_bit_cache(spec)
    return converted + keys // hopper.MMA_N * (dim // hopper.MMA_K)


def read_instructions(spec: Forward, dim: int) -> int:
    """Instructions of a warp that read its keys of one step, or their values, from shared memory, 16 bytes a lane."""
    elements = footprint.of_each_warp(spec) * dim // hopper.WARP  # of a lane
    return elements * spec.kv_element.bytes // VECTOR_BYTES


def issue_instructions(spec: Forward) -> float:
    """What issuing the products of a step takes, and all that is no arithmetic."""
    depths = ((spec.qk, spec.problem.head_dim), (spec.pv, spec.tile.kv * footprint.stripes(spec)))
    issued = sum(k // spec.element.wgmma_k for product, k in depths if isinstance(product, WgmmaProduct))
    transposed: float = 0
    if footprint.transposes(spec):
        transposed = ELECTED_RELEASE + DESCRIPTORS_ANEW * (spec.problem.v_dim > FEW_COLUMNS)
    return WGMMA_STEP_INSTRUCTIONS + WGMMA_INSTRUCTIONS * issued + transposed


# -- bytes


def _wgmma_smem_bytes(spec: Forward) -> tuple[int, int]:
    """Bytes that the WGMMA of Q K^T and of P V of one step read from shared memory.

    Each instruction reads its 64 x 16 tile of A, unless that is in registers, and its N x 16 tile of B.
    """
    a_tile, depth = hopper.WGMMA_M * spec.element.wgmma_k * spec.element.bytes, spec.element.wgmma_k
    groups, kv = spec.tile.warpgroups or 0, spec.tile.kv
    sizes = []
    for product, n, k in ((spec.qk, kv, spec.problem.head_dim), (spec.pv, spec.problem.v_dim, kv)):
        if isinstance(product, WgmmaProduct):
            a = a_tile if product.a.source == "smem" else 0
            sizes.append(groups * k // depth * (a + n * depth * spec.element.bytes))
        else:
            sizes.append(0)
    return sizes[0], sizes[1]


def smem_bytes(spec: Forward) -> SmemBytes:
    """What passes through shared memory in one step of a kernel that has a loop over tiles of keys."""
    scores = spec.tile.q * spec.tile.kv
    qk, pv = _wgmma_smem_bytes(spec)
    warps = footprint.computing_threads(spec) // hopper.WARP
    if isinstance(spec.qk, ScalarProduct):
        qk = warps * _scalar_qk_lines(spec) * LINE
    if isinstance(spec.pv, ScalarProduct):
        pv = warps * _scalar_pv_lines(spec) * LINE
    if footprint.by_warps(spec):  # as they were loaded, each byte once
        qk, pv = (spec.tile.kv * dim * spec.kv_element.bytes for dim in (spec.problem.head_dim, spec.problem.v_dim))
    in_f32 = scores * F32 if isinstance(spec.handoff, SmemScoresHandoff) else 0
    in_16_bits = scores * spec.element.bytes if isinstance(spec.handoff, SmemHandoff) else 0
    elements = spec.tile.kv * (spec.problem.head_dim + spec.problem.v_dim)  # of K and V
    return SmemBytes(
        arriving=elements * spec.kv_element.bytes,
        qk=qk,
        scores=in_f32,
        softmax=2 * in_f32 + in_16_bits,  # S is read, and P written over it; or P alone is written
        pv=pv,
        transposed=2 * spec.tile.kv * spec.problem.v_dim * spec.element.bytes * footprint.transposes(spec),
        converted=elements * (spec.kv_element.bytes + spec.element.bytes) * footprint.converts(spec),
    )


def _scalar_qk_lines(spec: Forward) -> int:
    """Lines of shared memory that a warp reads: half a warp has a row of Q in common, both halves the rows of K."""
    rows, columns = footprint.thread_rows(spec)[0], spec.tile.kv // footprint.SCALAR_LANES
    keys = -(-footprint.SCALAR_LANES * VECTOR_BYTES // LINE)
    return spec.problem.head_dim // footprint.SCALAR_VECTOR * (rows + columns * keys)


def _scalar_pv_lines(spec: Forward) -> int:
    """Lines that a warp reads: a row of V for each key, and for each of its rows P of a few keys."""
    rows, keys = footprint.thread_rows(spec)[0], spec.tile.kv // footprint.SCALAR_LANES
    return spec.tile.kv // keys * (rows + keys * -(-spec.problem.v_dim * spec.element.bytes // LINE))


def _naive_l1_bytes(spec: Forward) -> int:
    """k1 reads global memory through L1, a line for each row that a warp touches.

    For a vector of the head dim a warp touches a row of Q for each of its rows of scores and `tile.kv` rows of K.
    For a key the other way round, a warp computes 32 elements of a row of O from one score and one row of V.
    """
    d, threads, scores = spec.problem.head_dim, spec.tile.threads or 1, spec.tile.q * spec.tile.kv
    vectors = d // footprint.SCALAR_VECTOR
    qk = threads // hopper.WARP * vectors * (hopper.WARP // spec.tile.kv + spec.tile.kv)
    pv = scores * spec.problem.v_dim // hopper.WARP * 2
    return (qk + pv) * LINE


def _l2_bytes(spec: Forward) -> int:
    d, v_dim, kv = spec.problem.head_dim, spec.problem.v_dim, spec.tile.kv
    if isinstance(spec.handoff, GlobalHandoff):
        scores = spec.tile.q * kv
        # S is written, read twice (maximum, sum) and written as P, read as P.
        return (spec.tile.q + kv) * (d + v_dim) * spec.element.bytes + 5 * scores * F32
    return kv * (d + v_dim) * spec.kv_element.bytes


# -- the whole problem


def key_tiles(spec: Forward, lengths: Lengths, m_block: int, window: Window | None = None) -> KeyTiles:
    """The tiles of keys that tile `m_block` of the queries visits, as `kv_range` of the generated modules says.

    `lengths` are the queries and keys of its sequence, `window` is that of a call which gives one.
    """
    kv, positions = spec.tile.kv, spec.tile.q // spec.tile.pack_heads
    seq_q, seq_k = lengths
    # The consumers' first tile stands before their loop; and who has no keys is one step of a share, too.
    least = 1 if footprint.overlapped(spec) or spec.scheduler == "even" else 0
    if isinstance(spec.mask, NoMask) or isinstance(spec.handoff, GlobalHandoff):
        return KeyTiles(0, -(-max(seq_k, least) // kv), 0, seq_k // kv)
    diagonal = m_block * positions + seq_k - seq_q
    to_left, right = reach(of_call(spec.mask, window))
    left = diagonal + positions if to_left is None else to_left  # all keys
    assert right is not None  # either mask ends there
    first_key = max(min(diagonal - left, seq_k - 1), 0) if spec.tile.kv_from == "window" else 0
    first_key -= first_key % (footprint.page_rows(spec) or 1)  # boxes of keys lie in a page whole
    diagonal, seq_k = diagonal - first_key, seq_k - first_key

    def of_rows(begin: int, rows: int) -> KeyTiles:
        first = diagonal + begin
        end = max(min(seq_k, first + rows + right), least, 0)
        start = min(end, max(first - left, 0))
        full_start = -(-max(first + rows - 1 - left, 0) // kv)
        full_end = min(seq_k, max(first + right + 1, 0)) // kv
        if given_with_calls(spec.mask):
            full_start = min(full_start, full_end)
        return KeyTiles(start // kv, -(-end // kv), full_start, full_end, first_key)

    whole = of_rows(0, positions)
    if footprint.skips_absent(spec):
        own_positions = positions * hopper.WGMMA_M // spec.tile.q
        absent = sum(m_block * positions + begin >= seq_q for begin in range(0, positions, own_positions))
        return replace(whole, unseen=absent * max(whole.visited - 1, 0))
    if not footprint.own_keys(spec):
        return whole
    own = (of_rows(begin, hopper.WGMMA_M) for begin in range(0, positions, hopper.WGMMA_M))
    return replace(whole, unseen=sum(whole.visited - max(tiles.visited, 1) for tiles in own))


@dataclass(frozen=True)
class Problem:
    """One call of a spec's module. Raises UserError for heads, or a number of parts, that the module does not take."""

    spec: Forward
    shape: Shape | PackedShape
    num_splits: int = 0  # parts of the keys that the call asks for

    def __post_init__(self) -> None:
        """Refuse what the module refuses."""
        pack, shape, split = self.spec.tile.pack_heads, self.shape, self.spec.split
        if self.num_splits and (split is None or split.keys is not None):
            has = "does not split keys" if split is None else f"has parts of {split.keys} keys"
            raise UserError(f"{self.num_splits} parts are asked for, and this module {has}; take one with count: auto")
        if shape.heads_q % shape.heads_kv:
            raise UserError(f"{shape.heads_q} query heads are no multiple of {shape.heads_kv} kv heads; choose others")
        if self.spec.tile.holds_group:
            if shape.heads_q > pack * shape.heads_kv:
                raise UserError(
                    f"a tile of this module holds at most {pack} query heads of one kv head, and here are "
                    f"{shape.heads_q // shape.heads_kv}; give fewer query heads, or more kv heads"
                )
        elif not tile_order.takes_group(self.spec, shape.heads_q // shape.heads_kv):
            raise UserError(
                f"a tile of this module holds {pack} query heads of one kv head; give a multiple of "
                f"{pack * shape.heads_kv} query heads, or fewer kv heads"
            )

    @cached_property
    def of_lengths(self) -> Mapping[Lengths, tuple[KeyTiles, ...]]:
        """The tiles of keys of each tile of queries of one head (or of the heads that share a tile), by lengths."""
        found = {}
        for lengths in set(self.shape.sequences):
            spec = self.fitted(lengths)
            blocks = range(-(-lengths[0] // tile_order.positions(spec)))
            found[lengths] = tuple(key_tiles(spec, lengths, block, self.shape.window) for block in blocks)
        return found

    def fitted(self, lengths: Lengths) -> Forward:
        """The spec as it is for sequences of these lengths, which may decide how many heads a tile holds."""
        return tile_order.fitted(self.spec, self.shape, lengths[0])

    @property
    def tiles(self) -> int:
        """Tiles of queries."""
        return self._sum(lambda _: 1)

    @property
    def visited(self) -> int:
        """Steps: pairs of a tile of queries and a tile of keys that are computed."""
        return self._sum(lambda tiles: tiles.visited)

    @property
    def masked(self) -> int:
        """Steps in which scores are masked."""
        return self._sum(lambda tiles: tiles.masked)

    @property
    def unseen(self) -> float:
        """Steps that consumers give back unread, since only rows of others see their keys: 1/3 for one of three."""
        return self._sum(lambda tiles: tiles.unseen) / (self.spec.tile.warpgroups or 1)

    @property
    def skipped(self) -> int:
        """Steps that the mask saves."""
        counts = Counter(self.shape.sequences).items()
        every = sum(
            count * self._heads(lengths) * len(self.of_lengths[lengths]) * -(-lengths[1] // self.spec.tile.kv)
            for lengths, count in counts
        )
        return every - self.visited

    @property
    def steps_in_order(self) -> list[int]:
        """Steps of each tile of queries, in the order in which tiles are taken."""
        sequences = self.shape.sequences
        order = tile_order.taken(self.spec, self.shape)
        return [self.of_lengths[sequences[entry.batch]][entry.m_block].visited for entry in order]

    def _heads(self, lengths: Lengths) -> int:
        """How many times the tiles of one head come in a sequence: heads that do not share a tile."""
        return tile_order.head_tiles(self.fitted(lengths), self.shape)

    def _sum(self, count: Callable[[KeyTiles], int]) -> int:
        """Over all tiles of queries."""
        counts = Counter(self.shape.sequences).items()
        return sum(
            times * self._heads(lengths) * sum(map(count, self.of_lengths[lengths])) for lengths, times in counts
        )

    @cached_property
    def flops(self) -> float:
        """FLOPs of both products, as `fa3gen bench` counts them."""
        return Family.of(self.spec).flops(self.shape)

    @property
    def over_compute(self) -> float:
        """FLOPs computed over FLOPs counted: edges of the mask, and tiles that the sequences do not fill."""
        computed = (self.visited - self.unseen) * step(self.spec).flops
        return computed / self.flops if self.flops else float("inf")

    @property
    def hbm_bytes(self) -> int:
        """Bytes of q, k, v and O, each once, and of LSE; of k1 also S and P, which it writes and reads."""
        return operation_of(self.spec).bytes(self.shape)

    @property
    def intensity(self) -> float:
        """FLOP for each byte of HBM."""
        return self.flops / self.hbm_bytes


def default_heads(spec: Forward, hidden: int = 2048) -> tuple[int, int]:
    """Query and kv heads of the benchmarks: heads x head dim near `hidden`, one kv head for each packed group."""
    pack = spec.tile.pack_heads
    kv = max(1, hidden // spec.problem.head_dim // pack)
    return kv * pack, kv
