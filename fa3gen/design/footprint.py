"""What a spec costs on the chip: shared memory region by region, mbarriers, registers per thread.

Plain arithmetic on the spec. The rules hold it against the limits, the plan prints it into the header of the module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from fa3gen.design.masks import given_with_calls
from fa3gen.hardware import hopper
from fa3gen.hardware.dtypes import FP32, Dtype
from fa3gen.spec.model import (
    CausalMask,
    CooperativeSchedule,
    CpAsyncLoad,
    Forward,
    GlobalHandoff,
    MmaProduct,
    NoMask,
    PingPongSchedule,
    RegisterHandoff,
    Scheduler,
    SmemHandoff,
    Swizzle,
    SyncLoad,
    TmaLoad,
    WgmmaProduct,
)

# A 128-byte swizzle repeats every 8 rows of 128 bytes, so every operand tile starts at a multiple of 1024.
OPERAND_ALIGN = 1024
# The f32 scores are read in 16-byte vectors; a row of them is padded by 8 elements (32 bytes) so that neither walking
# along a row nor down the accumulator's rows meets a bank conflict.
SCORE_ALIGN = 128
SCORE_PAD = 8
# Scalar products: half a warp shares a query row, and operands are read 8 elements (16 bytes) at a time.
SCALAR_LANES = 16
SCALAR_VECTOR = 8
# Addresses, loop counters, predicates and the running statistics.
OTHER_REGISTERS = 24
# The same where threads add up sums of the tensor core: as compiled, 224 do for head dim 128 and 128 keys, 216 spill.
OTHER_REGISTERS_TWO_LEVELS = 12
# Columns of 16-bit O that a quad of threads writes at once where O goes straight to global memory: 16 bytes from each.
DIRECT_COLUMNS = 32
# Schedulers that start a CTA for each tile of queries; the others start one for each SM.
CTA_PER_TILE: tuple[Scheduler, ...] = ("single_tile", "grid")
# Those of which one warp of a CTA tells the others its tiles.
TELLING: tuple[Scheduler, ...] = ("dynamic", "even")
# Tiles that the warp which draws them may be ahead of the others.
TILE_SLOTS = 2
# Boxes of a tile of keys in pages up to which it pays that all lanes find all: measured were 1, 2, 4, 5 and 8.
MOST_ALIKE = 5
# Left free of a consumer's budget where products run beside the softmax. As compiled (head dims 96 to 256, one to three
# consumers): estimates of 4 below the budget do not spill, those that reach it do, and their products are serialised.
OVERLAP_SPARE = 4
# What setmaxnreg leaves to a thread of the producer and gives to one of the consumers, by consumer warpgroups. The sum
# over all warpgroups is what the launch handed out: setmaxnreg only moves registers between the warps of a CTA.
REGISTER_BUDGETS = {1: (56, 256), 2: (24, 240), 3: (32, 160)}
# A warp that looks for its tile among packed sequences does not make do with 24.
PACKED_BUDGETS = {**REGISTER_BUDGETS, 2: (40, 232)}
# The same where a warpgroup transposes V, which is the second. As compiled (DSL 4.8.1, ptxas 12.9.83), 32 suffice it.
TRANSPOSING_BUDGETS = {1: (56, 192, 256), 2: (32, 32, 224), 3: (24, 48, 136)}
# And where two warps of the producer transpose V: with 24 they would spill, too.
TRANSPOSING_BESIDE_BUDGETS = PACKED_BUDGETS
# And where one warp has rows of K and of V of two tiles on their way, or copies rows of two widths, or of three spans:
# with 40 it would spill, as compiled.
GATHERING_BESIDE_BUDGETS = {**PACKED_BUDGETS, 2: (56, 224)}
WARPGROUP_WARPS = hopper.WARPGROUP // hopper.WARP
TRANSPOSED_KEYS, TRANSPOSED_COLUMNS = 32, 16  # of V, that a warp transposes at a time
P_EXPONENT = 8  # P in 8 bits is 2^8 times itself: 256 at most, of the 448 that e4m3 reaches
# Where warpgroups convert what was loaded: of the producer, of one of those, and of a consumer, by how many consumers
# and converters there are.
CONVERTING_BUDGETS = {(1, 1): (56, 128, 256), (1, 2): (56, 96, 256), (2, 1): (40, 56, 208), (2, 2): (40, 40, 176)}
# The same of two CTAs on an SM, by what each has.
SHARED_CONVERTING_BUDGETS = {(1, 1): (56, 64, 120)}
# The same where one warp gathers rows that a window shows: with 40 it would spill.
WINDOW_CONVERTING_BUDGETS = {(2, 1): (56, 56, 200), (2, 2): (56, 40, 168)}
SHARED_PRODUCER_REGISTERS = 24  # of a producer's thread where CTAs share an SM's registers: as few as setmaxnreg gives
FINDING_PRODUCER_REGISTERS = 56  # the same where one of its warps looks through packed sequences more than once
QUAD = 4  # threads that share the rows of a warpgroup's accumulator (PTX ISA, wgmma register fragments)
FRAGMENT_ROWS = 2  # of a thread in 64 rows of an accumulator
FRAGMENT_COLUMNS = 2  # of a thread in every 8 columns of an accumulator, side by side


@dataclass(frozen=True)
class Region:
    """One array in shared memory: `formula` is the arithmetic behind `bytes`, `align` in bytes."""

    name: str
    bytes: int
    formula: str
    align: int
    what: str


def specialized(spec: Forward) -> bool:
    """Whether a warpgroup of its own loads."""
    return not isinstance(spec.schedule, CooperativeSchedule)


def overlapped(spec: Forward) -> bool:
    """Whether products run beside the softmax of the same warpgroup."""
    return not isinstance(spec.schedule, CooperativeSchedule) and spec.schedule.overlap


def persistent(spec: Forward) -> bool:
    """Whether a CTA takes many tiles of queries, one after the other."""
    return spec.scheduler not in CTA_PER_TILE


def eight_bits(spec: Forward) -> bool:
    """Whether q, k, v and P have 8 bits, which both products multiply."""
    return spec.element.bytes == 1


def transposes(spec: Forward) -> bool:
    """Whether warps make V transposed of what was loaded: products of 8 bits have no other way to read it."""
    return spec.smem is not None and spec.smem.vt is not None


def permuted_keys(spec: Forward) -> bool:
    """Whether v is given with its keys in the order of `fa3gen.design.key_order`."""
    return spec.problem.v_keys == "permuted"


def keys_of_p(spec: Forward) -> bool:
    """Whether V has its keys in the order in which a thread has P of 8 bits, so that nothing is exchanged."""
    return transposes(spec) or permuted_keys(spec)


def transposing_warpgroups(spec: Forward) -> int:
    """Warpgroups that do nothing but transpose V: none where two warps do it beside those that load."""
    return int(transposes(spec) and spec.tile.transposers == WARPGROUP_WARPS)


def loads_together(spec: Forward) -> bool:
    """Whether one warp copies Q, K and V: of the producer's four one finds packed sequences, and two transpose V."""
    return transposes(spec) and packed_sequences(spec)


def two_levels(spec: Forward) -> bool:
    """Whether threads add up P V of tiles of keys, and not the tensor core."""
    return spec.accumulate is not None


def block_scales(spec: Forward) -> bool:
    """Whether each block of BLOCK_ROWS rows of a head of q, of k, and of v has a factor of its own."""
    return spec.problem.scales == "block"


def promote_every(spec: Forward) -> int:
    """After how many tiles of keys threads add what the tensor core has summed to O; 0 where they never do."""
    return spec.accumulate.promote_every if spec.accumulate is not None else 0


def promoted_columns(spec: Forward) -> int:
    """Columns of O whose P V the tensor core sums at a time: fewer than there are only where stripes take turns."""
    return (spec.accumulate and spec.accumulate.columns) or spec.problem.v_dim


def stripes(spec: Forward) -> int:
    """Products into which P V of a tile of keys is divided, since two accumulators as wide as O leave no registers."""
    return -(-spec.problem.v_dim // promoted_columns(spec))


def by_warps(spec: Forward) -> bool:
    """Whether each warp multiplies keys of its own, by mma.sync; what warps have is merged for each tile of queries.

    Operands are in registers, where a warp makes 16 bits of 8, if K and V have these in memory.
    """
    return isinstance(spec.pv, MmaProduct)


def eight_bit_cache(spec: Forward) -> bool:
    """Whether K and V have 8 bits in memory and 16 in the products.

    Beside q of 8 bits they are operands already: WGMMA multiplies e4m3 and e5m2 with each other.
    """
    return spec.kv.dtype is not None and not eight_bits(spec)


def converts(spec: Forward) -> bool:
    """Whether a warpgroup makes the operands of the products of such K and V, from shared to shared memory."""
    return eight_bit_cache(spec) and not by_warps(spec)


def of_each_warp(spec: Forward) -> int:
    """Keys of a tile that a warp multiplies, where it has keys of its own."""
    return spec.tile.kv * hopper.WARP // computing_threads(spec)


def mixed(spec: Forward) -> bool:
    """Whether both products multiply 8 bits of one kind, Q and P, with those of another, K and V."""
    return eight_bits(spec) and spec.kv_element is not spec.element


def converting_warpgroups(spec: Forward) -> int:
    """How many warpgroups convert K and V."""
    return spec.kv.warpgroups if converts(spec) else 0


def converting_warps(spec: Forward) -> int:
    """How many warps convert K; as many convert V."""
    return converting_warpgroups(spec) * WARPGROUP_WARPS // 2


def keys_free_q(spec: Forward) -> bool:
    """Whether nobody gives the one place of Q back: it is free when the last K has been read that Q is multiplied with.

    That is a softmax and a P V earlier than consumers could say so, since no branch may stand between these, and the
    next Q lands while they run (docs/performance.md). With scheduler grid there is no next Q.
    """
    ring = converts(spec) or spec.scheduler == "single_tile"  # who loads K in 8 bits does not meet who multiplies
    return overlapped(spec) and q_stages(spec) == 1 and not ring


def q_in_registers(spec: Forward) -> bool:
    """Whether Q is read to the registers, once for each tile of queries, and stays there as the A operand."""
    return isinstance(spec.qk, WgmmaProduct) and spec.qk.a.source == "registers"


def packed_sequences(spec: Forward) -> bool:
    """Whether queries of sequences of any lengths stand one behind the other, where only the device knows."""
    return spec.problem.layout != "dense"


def paged(spec: Forward) -> bool:
    """Whether K and V lie in pages, of which a table says whose they are."""
    return spec.problem.layout == "paged"


def gathered(spec: Forward) -> bool:
    """Whether K and V come from pages row by row, by cp.async."""
    return page_rows(spec) == 1


def page_rows(spec: Forward) -> int | None:
    """Keys that the module takes from a page at once: page sizes are multiples of it. None without pages."""
    return spec.load.page_rows if isinstance(spec.load, TmaLoad) else None


def in_boxes(spec: Forward) -> bool:
    """Whether K and V come from pages in boxes of TMA."""
    return paged(spec) and not gathered(spec)


def boxes_alike(spec: Forward) -> bool:
    """Whether all lanes of the warp that loads find all boxes of a tile of keys, and not a lane each.

    Then ptxas finds them in uniform registers, beside the softmax instead of between its instructions, and none has to
    be shuffled when a stage is free. That pays for up to MOST_ALIKE boxes; of few queries memory is what one waits for.
    """
    rows = page_rows(spec)
    if not rows or rows == 1 or spec.scheduler == "even" or loads_together(spec) or eight_bit_cache(spec):
        return False
    return spec.tile.kv // rows <= MOST_ALIKE


def many_boxes(spec: Forward) -> bool:
    """Whether the lanes of a warp that loads find the boxes of several tiles of keys at once.

    Memory is what one waits for, and the table lies there, too: read for each tile anew, of pages of 16 keys, it had
    cost 2.5 per cent of a decoding step. Where others convert what has landed it is read a tile ahead instead: several
    at once, with a pause after each time, had made prompts 2 to 4 per cent slower.
    """
    return in_boxes(spec) and not (boxes_alike(spec) or loads_together(spec) or converts(spec))


def splits_tail(spec: Forward) -> bool:
    """Whether the tiles of the last wave, which does not fill the GPU, are dealt out by tiles of keys."""
    return spec.scheduler == "stream_k"


def shares_packed(spec: Forward) -> bool:
    """Whether these are tiles of packed sequences: one warp draws tiles, and then shares of the last wave."""
    return splits_tail(spec) and packed_sequences(spec)


def draws_tiles(spec: Forward) -> bool:
    """Whether CTAs draw their tiles of queries from a counter."""
    return spec.scheduler == "dynamic" or shares_packed(spec)


def tells_tiles(spec: Forward) -> bool:
    """Whether one warp tells the others of the CTA which tiles of queries they have, through a ring."""
    return spec.scheduler in TELLING or shares_packed(spec)


def passes_coordinates(spec: Forward) -> bool:
    """Whether the warp that draws a tile tells the others where it lies, and not its number only.

    That saves each of them five divisions. Not where O goes straight from the registers: with coordinates from memory,
    and no TMA store that takes them, ptxas keeps nothing of the loops in uniform registers (head dims 192 and 256: the
    main loop has a quarter more instructions).
    """
    return spec.scheduler == "dynamic" and spec.outputs.o != "direct"


def drawn_sequences(spec: Forward) -> bool:
    """Whether sequences are packed and their tiles drawn, and not dealt out in even shares."""
    return packed_sequences(spec) and spec.scheduler != "even"


def tile_slots(spec: Forward) -> int:
    """How many drawn tiles there is room for.

    Of packed sequences the warp that finds tiles runs as far ahead, and a tile drawn early keeps others waiting: of few
    long ones for as long as all others take, for which a spec may ask for one slot. Two paid for two consumers with a
    place for the next Q, where a mask has the short tiles come last; for one or three consumers, without a mask, and
    where warps convert the keys, one slot did (docs/performance.md).
    """
    if not drawn_sequences(spec):
        return TILE_SLOTS  # of even shares the tiles of a CTA are its own, however early they are found
    masked = not isinstance(spec.mask, NoMask)
    ahead = masked and spec.tile.warpgroups == 2 and q_stages(spec) > 1 and not converts(spec)
    usual = 2 if ahead else 1
    return (spec.load.tile_slots if isinstance(spec.load, TmaLoad) else None) or usual


def tile_words(spec: Forward) -> int:
    """What the warp that draws a tile tells the others of it, in words of 4 bytes: its number, or where it lies.

    Of packed sequences that is (m_block, head, head_kv, sequence) and the first row and the rows of queries and keys;
    keys in pages have no first row, but words come in fours. Of a share of keys also the first tile of keys, the one
    behind the last, and where its part goes, or which share of the last wave it is.
    """
    if packed_sequences(spec):
        return 12 if spec.scheduler == "even" or shares_packed(spec) else 8
    return 4 if passes_coordinates(spec) else 1


def shuffles_coordinates(spec: Forward) -> bool:
    """Whether a warp of a stream_k kernel takes the coordinates of its tile through shuffles, into ordinary registers.

    In uniform registers, of which there are few, they make ptxas 12.9 spill at head dims 96 and 256. Two consumers
    that find the next Q waiting (head dim 128) do not spill, and shuffles cost them 3 % (docs/performance.md). Of
    packed sequences one warp finds them for all others.
    """
    return splits_tail(spec) and not packed_sequences(spec) and not (flattened(spec) and spec.tile.warpgroups == 2)


def part_shape(spec: Forward) -> tuple[int, int, int]:
    """What a CTA leaves of a tile that it does not complete: 16-byte vectors of a thread, threads, float32 in a vector.

    A vector has maxima and sums of the thread's two rows, the others its elements of O.
    """
    vector, threads = 4, computing_threads(spec)
    return spec.tile.q * spec.problem.v_dim // (threads * vector) + 1, threads, vector


def flattened(spec: Forward) -> bool:
    """Whether the first Q K^T of a tile of queries is issued with the last P V of the one before: Q has to be there."""
    return persistent(spec) and overlapped(spec) and isinstance(spec.load, TmaLoad) and spec.load.q_stages > 1


def own_keys(spec: Forward) -> bool:
    """Whether each consumer visits only the tiles of keys that its own rows see, and gives the others back unread.

    Where rows of a tile of queries see keys of several tiles more than those of one consumer do: with 192 rows, 64 of
    each consumer, and tiles of 128 keys one of a tile's first, or last, is hidden from two of three consumers. Turns
    are passed on, so that the others have the tensor core to themselves (docs/performance.md). A consumer waits for the
    first K of its own before it passes its turn on, and those who read the hidden ones before it come later: the ring
    has to hold all of these. Not rendered with parts of keys, whose ends are no edges of a mask, nor with sums that
    threads add up.
    """
    masked = isinstance(spec.mask, CausalMask) or given_with_calls(spec.mask)
    if not masked or not isinstance(spec.schedule, PingPongSchedule) or not overlapped(spec):
        return False
    hidden = spec.tile.q - hopper.WGMMA_M
    fits = spec.tile.kv <= hidden <= spec.tile.kv * (kv_stages(spec) - 1) and spec.tile.pack_heads == 1
    whole = spec.split is None and spec.softmax.restart_every is None and not eight_bits(spec)
    return fits and whole and spec.scheduler == "dynamic"


def skips_absent(spec: Forward) -> bool:
    """Whether a consumer none of whose rows a sequence has gives K and V back unread.

    A decoding step has one query: with the heads of its group rows of one consumer. The others would multiply as much
    for nothing, and the softmax of what nobody stores takes time that the first one's copies wait for
    (docs/performance.md). The first and the last product of a tile, which are outside of the loop over keys, stay.
    """
    return spec.order == "woven" and (spec.tile.warpgroups or 0) > 1


def threads(spec: Forward) -> int:
    """Threads per CTA, those of the producer warpgroup among them, and of those that convert or transpose."""
    preparing = converting_warpgroups(spec) + transposing_warpgroups(spec)
    return computing_threads(spec) + hopper.WARPGROUP * (specialized(spec) + preparing)


def computing_threads(spec: Forward) -> int:
    """Threads that share the accumulators: the consumers of a specialised kernel, all threads of another one."""
    return spec.tile.threads or (spec.tile.warpgroups or 0) * hopper.WARPGROUP


def register_shares(spec: Forward) -> int:
    """CTAs that the registers of an SM are to suffice for: those that share it, and with keys in parts one more.

    The kernel that adds parts up is launched beside the end of the first one. If that had all registers of its SMs, the
    second would have to wait until its CTAs end. Where a product needs them all, it has them (`accumulator_at_launch`).
    """
    ctas = spec.tile.ctas_per_sm
    # So many warpgroups, or accumulators, leave a product too few registers, and so do operands.
    if converts(spec) or two_levels(spec) or by_warps(spec):
        return ctas
    beside = hopper.registers_at_launch(threads(spec) * (ctas + 1))
    return ctas + (spec.split is not None and registers_of_product(accumulator_columns(spec)) <= beside)


def accumulator_columns(spec: Forward) -> int:
    """Columns of the larger one of S and O."""
    return max(spec.tile.kv, spec.problem.v_dim)


def registers_of_product(columns: int) -> int:
    """Registers that a thread needs at launch for a warpgroup's product: one for two columns, and others (estimate)."""
    return columns // 2 + OTHER_REGISTERS


def launch_registers(spec: Forward) -> int:
    """Registers that each thread can be launched with."""
    return hopper.registers_at_launch(threads(spec) * register_shares(spec))


def register_budget(spec: Forward) -> tuple[int, int]:
    """What setmaxnreg leaves to a thread of the producer and gives to one of the consumers."""
    consumers = spec.tile.warpgroups or 0
    if transposing_warpgroups(spec):
        producer, _, consumer = TRANSPOSING_BUDGETS[consumers]
        return producer, consumer
    if transposes(spec) and register_shares(spec) == 1:
        return (GATHERING_BESIDE_BUDGETS if gathered_ahead(spec) > 1 else TRANSPOSING_BESIDE_BUDGETS)[consumers]
    if converts(spec):
        producer, _, consumer = converting_budget(spec)
        return producer, consumer
    if register_shares(spec) == 1:
        dims = {spec.problem.head_dim, spec.problem.v_dim}
        if gathered(spec) and (len(dims) > 1 or 192 in dims):
            return GATHERING_BESIDE_BUDGETS[consumers]
        return (PACKED_BUDGETS if packed_sequences(spec) else REGISTER_BUDGETS)[consumers]
    pool, unit = (consumers + 1) * launch_registers(spec), hopper.REGISTER_UNIT_PER_THREAD
    searches = spec.scheduler == "even" or spec.order != "by_sequence"
    producer = FINDING_PRODUCER_REGISTERS if searches else SHARED_PRODUCER_REGISTERS
    return producer, (pool - producer) // consumers // unit * unit


def transposed_blocks(spec: Forward) -> int:
    """Blocks of a tile of V, of 32 keys and 16 columns, that a warp transposes."""
    return spec.tile.kv // TRANSPOSED_KEYS * (spec.problem.v_dim // TRANSPOSED_COLUMNS) // spec.tile.transposers


def transposer_registers(spec: Forward) -> int:
    """What setmaxnreg leaves to a thread of a warpgroup that transposes V."""
    return TRANSPOSING_BUDGETS[spec.tile.warpgroups or 0][1]


def converter_registers(spec: Forward) -> int:
    """What setmaxnreg leaves to a thread that converts."""
    return converting_budget(spec)[1]


def converting_budget(spec: Forward) -> tuple[int, int, int]:
    """What setmaxnreg leaves to a thread of the producer, to one that converts, and gives to a consumer's.

    Of CTAs that share an SM and have more of them, for which there is no room, as of one alone.
    """
    warpgroups = spec.tile.warpgroups or 0, spec.kv.warpgroups
    budgets = CONVERTING_BUDGETS
    if spec.tile.ctas_per_sm > 1:
        budgets = budgets | SHARED_CONVERTING_BUDGETS
    if gathered(spec) and spec.mask.kind == "window":  # the warp has to remember the first row that is seen as well
        budgets = budgets | WINDOW_CONVERTING_BUDGETS
    return budgets[warpgroups]


def converted_at_once(spec: Forward) -> int:
    """Units of 8 elements that a thread has read before it converts one: two registers each, and as many as there are.

    A fourth of its registers: as many hold what is being converted, others addresses.
    """
    return converter_registers(spec) // 8


def q_stages(spec: Forward) -> int:
    """Buffers for Q; 1 for engines that have no choice."""
    return spec.load.q_stages if isinstance(spec.load, TmaLoad) else 1


def kv_stages(spec: Forward) -> int:
    """Depth of the K/V ring; 1 for engines without one."""
    return spec.load.kv_stages if isinstance(spec.load, CpAsyncLoad | TmaLoad) else 1


def gathered_ahead(spec: Forward) -> int:
    """Tiles that a warp which gathers rows has on their way at once: two, where the ring has as many more.

    More are not faster: 3 of 6 tiles take 1.02 times as long (docs/performance.md, pages of 1).
    """
    stages = spec.kv.stages if converts(spec) else kv_stages(spec)
    return 2 if gathered(spec) and stages >= 4 else 1


def shared_memory_map(spec: Forward) -> list[Region]:
    """Arrays in shared memory in the order they are laid out, barriers not included."""
    if isinstance(spec.handoff, GlobalHandoff):
        return []
    q, kv, d, stages = spec.tile.q, spec.tile.kv, spec.problem.head_dim, kv_stages(spec)
    v_dim = spec.problem.v_dim
    regions = [_tile(spec, "sQ", q, d, q_stages(spec), "Q")]
    stored = partial(_tile, spec, element=spec.kv_element)
    if converts(spec):
        regions.append(stored("sK8", kv, d, spec.kv.stages, "K as it lies in memory"))
        regions.append(stored("sV8", kv, v_dim, spec.kv.stages, "V as it lies in memory"))
    if isinstance(spec.load, SyncLoad):
        regions.append(_tile(spec, "sKV", kv, d, 1, "K, then V"))
    elif by_warps(spec):
        warps = computing_threads(spec) // hopper.WARP
        regions += [stored("sK", kv, d, stages, "K"), stored("sV", kv, v_dim, stages, "V")]
        regions.append(Region("sO", warps * q * v_dim * 4, f"{warps} x {q} x {v_dim} x 4", 16, "O of each warp, f32"))
        regions.append(Region("sMax", warps * q * 4, f"{warps} x {q} x 4", 4, "maxima of its rows"))
        regions.append(Region("sSum", warps * q * 4, f"{warps} x {q} x 4", 4, "and their sums"))
    else:
        regions += [_tile(spec, "sK", kv, d, stages, "K"), _tile(spec, "sV", kv, v_dim, stages, "V")]
    if transposes(spec):
        regions.append(_tile(spec, "sVt", v_dim, kv, stages, "V transposed"))
    if spec.outputs.o == "own_buffer":
        regions.append(_tile(spec, "sO", q, v_dim, 1, "O", element=spec.o_element))
    if sums_in_smem(spec):
        regions.append(Region("sums", q * v_dim * 4, f"{q} x {v_dim} x 4", 16, "O of the parts before, f32"))
    if tells_tiles(spec):
        numbers = tile_words(spec)
        what = "coordinates of drawn tiles" if numbers > 1 else "numbers of drawn tiles"
        what = "tiles of the CTA's share" if spec.scheduler == "even" else what
        slots = tile_slots(spec)
        formula = f"{slots} x {numbers} x 4" if slots > 1 else f"{numbers} x 4"
        regions.append(Region("tiles", 4 * numbers * slots, formula, 16, what))
    if isinstance(spec.handoff, SmemHandoff):
        regions.append(_tile(spec, "sP", q, kv, 1, "P, 16 bits"))
    elif not isinstance(spec.handoff, RegisterHandoff):
        pitch = kv + SCORE_PAD
        regions.append(Region("sS", q * pitch * 4, f"{q} x {pitch} x 4", SCORE_ALIGN, "S, then P, f32; padded rows"))
    return regions


def barrier_bytes(spec: Forward) -> int:
    """Bytes of mbarriers: one for Q, a full and an empty one for each stage of each ring.

    In a specialised kernel Q is a ring, too, unless `keys_free_q`; so are the numbers of the tiles, where they come
    from a counter.
    """
    if not isinstance(spec.load, TmaLoad):
        return 0
    if specialized(spec):
        slots = tile_slots(spec) if tells_tiles(spec) else 0
        q_barriers = 1 if keys_free_q(spec) else 2 * spec.load.q_stages
        stored = spec.kv.stages if converts(spec) else 0
        stages = 2 * (spec.load.kv_stages + stored) + spec.load.kv_stages * transposes(spec)
        return hopper.MBARRIER_BYTES * (q_barriers + 2 * (stages + slots))
    rings = 1 if spec.load.barrier == "shared" else 2
    return hopper.MBARRIER_BYTES * (spec.load.q_stages + 2 * rings * spec.load.kv_stages)


def total_bytes(regions: Iterable[Region], barriers: int) -> int:
    """Bytes that one CTA asks for: regions at their alignment, then barriers, rounded up to the largest alignment."""
    end, largest = 0, hopper.MBARRIER_BYTES
    for region in regions:
        end = _round_up(end, region.align) + region.bytes
        largest = max(largest, region.align)
    return _round_up(end + barriers, largest) if end else 0


def registers_per_thread(spec: Forward) -> list[tuple[str, int]]:
    """32-bit registers that one computing thread holds at the widest point of the loop, by what (an estimate)."""
    return _registers(spec, with_sums=spec.softmax.restart_every is not None and not sums_in_smem(spec))


def sums_in_smem(spec: Forward) -> bool:
    """Whether O of the parts before, where a CTA adds parts up, lies in shared memory: where registers have no room."""
    if spec.softmax.restart_every is None or not specialized(spec) or spec.tile.warpgroups not in REGISTER_BUDGETS:
        return False
    _, consumer = register_budget(spec)
    return sum(count for _, count in _registers(spec, with_sums=True)) + OVERLAP_SPARE > consumer


def _registers(spec: Forward, *, with_sums: bool) -> list[tuple[str, int]]:
    """The same, with O of the parts before or without it."""
    q, kv, d, count = spec.tile.q, spec.tile.kv, spec.problem.v_dim, computing_threads(spec)
    if isinstance(spec.handoff, GlobalHandoff) or not count:
        return [("other", OTHER_REGISTERS)]
    if by_warps(spec):
        # A row of O is a warp's. Operands: K of a step in 16 bits, while V of it waits as it lies in memory. Where that
        # leaves no room, ptxas widens K product by product: as compiled, with head dim 128 and 32 keys nothing spills.
        keys, (_, budget) = of_each_warp(spec), register_budget(spec)
        held = [("O", q * d // hopper.WARP), ("S", q * keys // hopper.WARP)]
        held.append(("Q", q * spec.problem.head_dim // hopper.WARP // 2))
        rest = budget - OTHER_REGISTERS - sum(count for _, count in held)
        wide, narrow = (
            keys * (each * spec.problem.head_dim + spec.kv_element.bytes * d) // hopper.WARP // 4
            for each in (2, spec.kv_element.bytes)
        )
        return [*held, ("K and V", wide if wide <= rest else narrow), ("other", OTHER_REGISTERS)]
    held, other = [("O", q * d // count)], OTHER_REGISTERS
    if isinstance(spec.pv, WgmmaProduct) and specialized(spec) and not overlapped(spec):
        # P takes the place of S, bit by bit: as compiled, about a quarter of P stands beside the whole of S.
        scores = q * kv // count
        return [*held, ("S", scores), ("P beside S", scores // 8), ("other", OTHER_REGISTERS)]
    if isinstance(spec.pv, WgmmaProduct):
        if q_in_registers(spec):
            held.append(("Q", q * spec.problem.head_dim // count // 2))
        if two_levels(spec):
            held.append(("P V of a step", q * promoted_columns(spec) // count))
            other = OTHER_REGISTERS_TWO_LEVELS
        if with_sums:
            held.append(("O of the parts before", q * d // count))
        p = q * kv // count * spec.element.bytes // FP32.bytes
        return [*held, ("S", q * kv // count), ("P", p), ("other", other)]
    rows, scores, columns = q * SCALAR_LANES // count, kv // SCALAR_LANES, d // SCALAR_LANES
    held.append(("row maxima and sums", 2 * rows))
    if isinstance(spec.qk, WgmmaProduct):
        held.append(("S or one step of P V", max(q * kv // count, scores * columns)))
    else:
        held += [
            ("S", q * kv // count),
            ("one step of K or V", max(scores * SCALAR_VECTOR, scores * columns)),
            ("one step of Q or P", SCALAR_VECTOR),
        ]
    if isinstance(spec.load, CpAsyncLoad):
        # All copies of a tile are issued at once, each from a 64-bit to a 32-bit address.
        held.append(("addresses of copies", 3 * kv * d // SCALAR_VECTOR // count))
    return [*held, ("other", OTHER_REGISTERS)]


def _tile(
    spec: Forward, name: str, rows: int, columns: int, stages: int, what: str, *, element: Dtype | None = None
) -> Region:
    """A tile of this dtype, or of that of the products, `stages` times."""
    size = (element or spec.element).bytes
    formula = f"{rows} x {columns} x {size}"
    if stages != 1:
        formula = f"{stages} stages x {formula}"
    return Region(name, stages * rows * columns * size, formula, OPERAND_ALIGN, what)


def _round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


def thread_rows(spec: Forward) -> tuple[int, int]:
    """Rows of S of a thread, and how many threads share each of them."""
    if isinstance(spec.pv, WgmmaProduct):
        return FRAGMENT_ROWS * spec.tile.q // ((spec.tile.warpgroups or 1) * hopper.WGMMA_M), QUAD
    if by_warps(spec):
        return FRAGMENT_ROWS, computing_threads(spec) // hopper.WARP * QUAD
    return spec.tile.q * SCALAR_LANES // computing_threads(spec), SCALAR_LANES


def thread_scores(spec: Forward) -> int:
    """Elements of S of a thread."""
    rows, lanes = thread_rows(spec)
    return rows * spec.tile.kv // lanes


def tma_boxes(extent_bytes: int, swizzle: Swizzle) -> int:
    """Copies that one tile takes: a TMA box is at most one swizzle span wide (cuTensorMapEncodeTiled)."""
    return -(-extent_bytes // hopper.SWIZZLE_SPAN[swizzle])
