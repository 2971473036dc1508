"""Which specs are legal on Hopper, and which of those this generator renders.

Each rule is a pure function of facts (integers and strings) that returns a `Violation` or None. A message shows the
arithmetic and a way out. `check` maps a spec to facts and runs every rule that the facts allow, never stopping at the
first violation. Sources are named by section title, because section numbers move between releases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from fa3gen.design import footprint
from fa3gen.design.footprint import SCALAR_LANES, SCALAR_VECTOR
from fa3gen.hardware import hopper
from fa3gen.hardware.dtypes import FP32
from fa3gen.spec.model import CpAsyncLoad, GlobalHandoff, ScalarProduct, SmemHandoff, Spec, TmaLoad, WgmmaProduct


class Violation(NamedTuple):
    """A rule that a spec breaks: the dotted path of the field to change, and why."""

    field: str
    message: str


# WGMMA shapes


def wgmma_rows(tile_q: int, warpgroups: int) -> Violation | None:
    """M: one 64-row product per warpgroup. PTX ISA, "Asynchronous Warpgroup Level Matrix Shape" (m64nNk16)."""
    rows = hopper.WGMMA_M * warpgroups
    if tile_q == rows:
        return None
    fewer = f" or tile.warpgroups {tile_q // hopper.WGMMA_M}" if tile_q % hopper.WGMMA_M == 0 else ""
    return Violation(
        "tile.q",
        f"a warpgroup's WGMMA has M = {hopper.WGMMA_M} and each warpgroup owns one: "
        f"{warpgroups} x {hopper.WGMMA_M} = {rows} rows, not {tile_q}; use tile.q {rows}{fewer}",
    )


def wgmma_columns(field: str, product: str, n: int) -> Violation | None:
    """N: a multiple of 8 up to 256. PTX ISA, "Asynchronous Warpgroup Level Matrix Shape"."""
    step, most = hopper.WGMMA_N_STEP, hopper.WGMMA_N_MAX
    if n > most:
        return Violation(field, f"N of the {product} product is {n} > {most}, the widest WGMMA; use at most {most}")
    if n % step:
        return Violation(field, f"N of the {product} product is {_remainder(n, step)}; use {_around(n, step)}")
    return None


def wgmma_depth(field: str, product: str, k: int) -> Violation | None:
    """K: 16 per instruction for 16-bit operands. PTX ISA, "Asynchronous Warpgroup Level Matrix Shape"."""
    step = hopper.WGMMA_K_16BIT
    if k % step == 0:
        return None
    return Violation(
        field, f"K of the {product} product is {_remainder(k, step)}, the K of a 16-bit WGMMA; use {_around(k, step)}"
    )


# WGMMA operands


def a_from_registers(product: str, source: str, major: str) -> Violation | None:
    """A register A fragment has one layout, K-major. PTX ISA, "wgmma.mma_async" (imm-trans-a needs A in memory)."""
    if source != "registers" or major == "k":
        return None
    return Violation(
        f"{product}.a.major",
        "A from registers is always K-major, its fragment has no transposed form; use major: k or source: smem",
    )


def b_from_smem(product: str, source: str) -> Violation | None:
    """B is given by a matrix descriptor only. PTX ISA, "wgmma.mma_async" (operand b-desc)."""
    if source == "smem":
        return None
    return Violation(f"{product}.b.source", "WGMMA reads B through a shared-memory descriptor only; use source: smem")


def q_from_smem(source: str) -> Violation | None:
    """Design rule: Q stays in shared memory, where TMA puts it."""
    if source == "smem":
        return None
    return Violation(
        "qk.a.source",
        "Q is read from shared memory, where TMA puts it; Q in registers is not rendered; use source: smem",
    )


def input_major(field: str, tensor: str, major: str, needed: str) -> Violation | None:
    """Design rule: head_dim is the contiguous dimension of q, k and v, which fixes the major of Q, K and V.

    16-bit WGMMA could read either (PTX ISA, "wgmma.mma_async", imm-trans-a and imm-trans-b), from transposed inputs.
    """
    if major == needed:
        return None
    inner = "K" if needed == "k" else "N"
    return Violation(
        field,
        f"head_dim is contiguous in {tensor.lower()} and is the {inner} of this product, so {tensor} is "
        f"{needed.upper()}-major; {major} would need a transposed {tensor.lower()}; use {needed}",
    )


def p_major(source: str, major: str) -> Violation | None:
    """Design rule: stmatrix without .trans stores P row by row, kv contiguous. PTX ISA, "stmatrix"."""
    if source != "smem" or major == "k":
        return None
    return Violation(
        "pv.a.major", "stmatrix stores P with kv contiguous, and kv is the K of this product; use major: k"
    )


# Shared-memory layout and TMA


def swizzle_span(field: str, tensor: str, elements: int, swizzle: str, *, tma: bool) -> Violation | None:
    """A tile row is a whole number of swizzle spans, each one an inner TMA box.

    `elements` is the contiguous extent of the 16-bit tile. PTX ISA, "Matrix Descriptor Format" of wgmma and "Swizzling
    modes"; CUDA Driver API, cuTensorMapEncodeTiled: boxDim[0] * elementSize at most the swizzle span, so that a wider
    row is split into several boxes.
    """
    row = elements * hopper.BYTES_16BIT
    span = hopper.SWIZZLE_SPAN[swizzle]
    if row % span == 0:
        return None
    name = "16-byte rows of a core matrix" if swizzle == "none" else f"{span}-byte swizzle spans"
    boxes = f", and TMA cannot split it into boxes of {span // hopper.BYTES_16BIT} elements" if tma else ""
    fitting = [name for name, other in hopper.SWIZZLE_SPAN.items() if row % other == 0]
    way_out = f"use swizzle {fitting[-1]}" if fitting else "use a row that is a multiple of 8 elements"
    return Violation(
        field,
        f"a row of {tensor} is {elements} x {hopper.BYTES_16BIT} = {row} bytes, "
        f"no whole number of {name} ({row} = {row // span} x {span} + {row % span}){boxes}; {way_out}",
    )


def tma_box(field: str, rows: int) -> Violation | None:
    """At most 256 elements along each dimension. CUDA Driver API, cuTensorMapEncodeTiled, boxDim."""
    if rows <= hopper.TMA_BOX:
        return None
    return Violation(field, f"one TMA box would have {rows} rows > {hopper.TMA_BOX}; use at most {hopper.TMA_BOX}")


def tma_stride(head_dim: int, field: str = "problem.head_dim") -> Violation | None:
    """Strides of a tensor map are multiples of 16 bytes. CUDA Driver API, cuTensorMapEncodeTiled, globalStrides."""
    stride, align = head_dim * hopper.BYTES_16BIT, hopper.TMA_STRIDE_ALIGN
    if stride % align == 0:
        return None
    return Violation(
        field,
        f"TMA needs strides of whole 16 bytes, and a head of {head_dim} x {hopper.BYTES_16BIT} = "
        f"{_remainder(stride, align)}; use {_around(head_dim, align // hopper.BYTES_16BIT)}",
    )


# Stages and shared memory


def kv_stages(stages: int) -> Violation | None:
    """A ring has at least one buffer."""
    if stages >= 1:
        return None
    return Violation("load.kv_stages", f"a ring of {stages} stages can hold no tile; use at least 1")


def q_stages(stages: int, persistent: bool) -> Violation | None:
    """Design rule: one buffer of Q for each tile that a CTA has in hand: the present one, the next if it takes many."""
    if stages == 1 or (persistent and stages == 2):
        return None
    if persistent:
        return Violation("load.q_stages", f"a CTA needs Q of this tile and of the next, not of {stages}; use 1 or 2")
    return Violation(
        "load.q_stages",
        f"with scheduler single_tile a CTA loads one Q tile, so that {stages} Q buffers are of no use; use 1",
    )


def shared_memory(
    regions: Sequence[tuple[str, int]],
    barrier_bytes: int,
    alignment_slack: int,
    *,
    field: str = "tile.kv",
    ways_out: Sequence[str] = (),
) -> Violation | None:
    """All regions, the barriers and the padding for alignment within 232,448 bytes per CTA.

    CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 227 KB per thread block.
    """
    data = sum(size for _, size in regions)
    total = data + barrier_bytes + alignment_slack
    if total <= hopper.SMEM_PER_CTA:
        return None
    terms = _terms(regions)
    return Violation(
        field,
        f"shared memory: {terms} = {data}, + {barrier_bytes} of barriers + {alignment_slack} of alignment = {total} > "
        f"{hopper.SMEM_PER_CTA} bytes; use {' or '.join(ways_out) or 'a smaller tile.q or tile.kv'}",
    )


# Registers and threads


def registers_per_thread(parts: Sequence[tuple[str, int]]) -> Violation | None:
    """What a thread holds at once (an estimate, by what it is for) within 255 registers.

    CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    """
    total = sum(count for _, count in parts)
    if total <= hopper.REGISTERS_PER_THREAD:
        return None
    return Violation(
        "tile.kv",
        f"registers per thread: {_terms(parts)} = {total} > {hopper.REGISTERS_PER_THREAD}, so that they would spill; "
        "use a smaller tile.kv or head_dim",
    )


def registers_per_sm(field: str, threads: int, parts: Sequence[tuple[str, int]]) -> Violation | None:
    """All threads of a CTA within the 65,536 registers of a multiprocessor, handed out in units of 8 per thread.

    CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". `field` is what counts the threads.
    """
    count = sum(count for _, count in parts)
    unit = hopper.REGISTER_UNIT_PER_THREAD
    rounded = -(-count // unit) * unit
    if threads * rounded <= hopper.REGISTERS_PER_SM:
        return None
    return Violation(
        field,
        f"registers per SM: {_terms(parts)} = {count}, rounded up to {rounded}; x {threads} threads = "
        f"{threads * rounded} > {hopper.REGISTERS_PER_SM}; use a smaller tile.q or tile.kv",
    )


def scalar_threads(threads: int) -> Violation | None:
    """Whole warps, at most 1024 threads.

    CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    """
    if threads > hopper.THREADS_PER_CTA:
        return Violation(
            "tile.threads", f"a CTA has at most {hopper.THREADS_PER_CTA} threads, not {threads}; use fewer"
        )
    if threads % hopper.WARP:
        return Violation(
            "tile.threads",
            f"a CTA has whole warps, and tile.threads is {_remainder(threads, hopper.WARP)}; "
            f"use {_around(threads, hopper.WARP)}",
        )
    return None


def scalar_grid(field: str, extent: int, threads: int) -> Violation | None:
    """Design rule: scalar products spread (threads / 16) x 16 threads evenly over the rows and columns of a tile.

    `tile.q` is the rows; every other field is a number of columns.
    """
    rows = field == "tile.q"
    share = threads // SCALAR_LANES if rows else SCALAR_LANES
    if extent % share == 0:
        return None
    return Violation(
        field,
        f"{threads} threads form {threads // SCALAR_LANES} rows x {SCALAR_LANES} columns, and "
        f"{field} is {_remainder(extent, share)}; use {_around(extent, share)}",
    )


def scalar_vector(head_dim: int) -> Violation | None:
    """Design rule: a thread reads its adjacent columns of V as part of one 16-byte vector.

    A swizzle moves vectors of 16 bytes as wholes, so what straddles two of them is not contiguous in shared memory.
    """
    columns, vector = head_dim // SCALAR_LANES, SCALAR_VECTOR
    if columns == 0 or vector % columns == 0:
        return None
    return Violation(
        "problem.head_dim",
        f"a thread owns {head_dim} / {SCALAR_LANES} = {columns} adjacent columns of V, and {columns} elements do not "
        f"divide a 16-byte vector of {vector}; use 16, 32, 64 or 128, or wgmma for pv",
    )


def copy_rows(field: str, rows: int, head_dim: int, threads: int) -> Violation | None:
    """Design rule: all threads of the CTA copy whole rows of a tile together, 16 bytes each, pass after pass."""
    vectors = max(1, head_dim // SCALAR_VECTOR)
    if threads % vectors:
        return Violation(
            "tile.threads",
            f"a row is {head_dim} / {SCALAR_VECTOR} = {vectors} vectors of 16 bytes, and {threads} threads copy no "
            f"whole number of rows at a time; use {_around(threads, math.lcm(vectors, hopper.WARP))}",
        )
    share = threads // vectors
    if rows % share == 0:
        return None
    return Violation(
        field,
        f"{threads} threads copy {threads} / ({head_dim} / {SCALAR_VECTOR}) = {share} rows at a time, and "
        f"{field} is {_remainder(rows, share)}; use {_around(rows, share)}",
    )


def naive_grid(q: int, kv: int, head_dim: int, threads: int) -> list[Violation]:
    """Design rule: without tiles in shared memory one thread computes one score, and later one element of O."""
    found = []
    if q * kv != threads:
        found.append(
            Violation(
                "tile.threads",
                f"one thread computes one score of the tile: {q} x {kv} = {q * kv} threads, not {threads}",
            )
        )
    if threads % head_dim:
        found.append(
            Violation(
                "tile.threads",
                f"one thread computes one element of O, in whole rows, and {threads} is "
                f"{threads // head_dim} x {head_dim} + {threads % head_dim}; use {_around(threads, head_dim)}",
            )
        )
    return found


def scattered_scores(warpgroups: int) -> Violation | None:
    """Design rule: the scalar PV product after WGMMA QK divides the rows among the four warps of one warpgroup."""
    if warpgroups == 1:
        return None
    return Violation(
        "tile.warpgroups",
        f"scores scattered to shared memory are shared by 1 warpgroup, not {warpgroups}; "
        "use warpgroups 1 with tile.q 64, or wgmma for pv",
    )


def window_product(mask: str, pv_engine: str) -> Violation | None:
    """Design rule: sliding windows are rendered where the softmax works on the accumulator fragment."""
    if mask != "window" or pv_engine == "wgmma":
        return None
    return Violation(
        "mask", "a sliding window is rendered with both products on WGMMA only; use mask causal or none, or extend k4_2"
    )


def optional_lse(lse: bool, pv_engine: str) -> Violation | None:
    """Design rule: LSE is left out where it could cost time, and that is not in the scalar kernels."""
    if lse or pv_engine == "wgmma":
        return None
    return Violation(
        "outputs.lse",
        "a kernel without LSE is rendered with both products on WGMMA only; use lse: true (attention() returns O alone "
        "unless asked), or extend k4_2",
    )


def wgmma_threads(warpgroups: int) -> Violation | None:
    """At most 1024 threads. CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""
    threads = warpgroups * hopper.WARPGROUP
    if threads <= hopper.THREADS_PER_CTA:
        return None
    most = hopper.THREADS_PER_CTA // hopper.WARPGROUP
    return Violation(
        "tile.warpgroups",
        f"{warpgroups} warpgroups x {hopper.WARPGROUP} = {threads} threads > {hopper.THREADS_PER_CTA}; "
        f"use at most {most}",
    )


# Which parts go together


def thread_unit(wgmma: bool, threads: int | None, warpgroups: int | None) -> Violation | None:
    """WGMMA is issued by warpgroups (PTX ISA, "Warpgroup"); scalar kernels count threads."""
    if wgmma and warpgroups is None:
        wanted = max(1, (threads or 0) // hopper.WARPGROUP)
        return Violation(
            "tile.threads",
            f"WGMMA is issued by warpgroups of {hopper.WARPGROUP} threads; give tile.warpgroups {wanted} "
            "in place of tile.threads (threads: null, where a base gives it)",
        )
    if not wgmma and threads is None:
        wanted = (warpgroups or 0) * hopper.WARPGROUP
        return Violation(
            "tile.warpgroups",
            f"without WGMMA there are no warpgroups; give tile.threads {wanted} in place of tile.warpgroups "
            "(warpgroups: null, where a base gives it)",
        )
    return None


def engine_pair(qk_engine: str, pv_engine: str) -> Violation | None:
    """Design rule: P of a scalar QK^T product is not in the layout that a WGMMA PV product reads."""
    if qk_engine != "scalar" or pv_engine != "wgmma":
        return None
    return Violation("qk.engine", "a scalar QK product before a WGMMA PV product is not rendered; use wgmma for both")


def wgmma_load(wgmma: bool, load_engine: str) -> Violation | None:
    """Design rule: the tiles that WGMMA reads are written by TMA, in the same (async) proxy.

    PTX ISA, "Async Proxy": writes by other loads would need a fence.proxy.async of their own.
    """
    if not wgmma or load_engine == "tma":
        return None
    return Violation(
        "load.engine", f"WGMMA reads tiles that TMA wrote; {load_engine} loads are not rendered with it; use tma"
    )


def handoff_engines(through: str, qk_engine: str, pv_engine: str, pv_a_source: str | None) -> Violation | None:
    """Design rule: the way P takes fits the product that makes it and the one that reads it.

    `pv_a_source` is None for a scalar PV product.
    """
    have = f"{qk_engine} and {pv_engine}"
    match through:
        case "global_f32" if (qk_engine, pv_engine) != ("scalar", "scalar"):
            return Violation(
                "handoff.through", f"global_f32 needs scalar qk and pv, got {have}; use {_usual(qk_engine, pv_engine)}"
            )
        case "smem_f32" if pv_engine != "scalar":
            return Violation(
                "handoff.through", f"smem_f32 needs a scalar pv, got {have}; use {_usual(qk_engine, pv_engine)}"
            )
        case "smem_16bit" | "registers" if (qk_engine, pv_engine) != ("wgmma", "wgmma"):
            return Violation(
                "handoff.through",
                f"{through} needs wgmma for qk and pv, got {have}; use {_usual(qk_engine, pv_engine)}",
            )
        case "smem_16bit" if pv_a_source != "smem":
            return Violation("pv.a.source", "P goes through shared memory (handoff smem_16bit); use source: smem")
        case "registers" if pv_a_source != "registers":
            return Violation("pv.a.source", "P stays in registers (handoff registers); use source: registers")
    return None


def global_handoff_load(through: str, load_engine: str) -> Violation | None:
    """Design rule: the three kernels of a global handoff read global memory directly."""
    if through != "global_f32" or load_engine == "sync":
        return None
    return Violation(
        "load.engine",
        f"handoff global_f32 reads global memory directly, so that {load_engine} has nothing to fill; use sync",
    )


def smem_section(through: str, given: bool) -> Violation | None:
    """Design rule: all kernels but those of a global handoff keep Q, K and V in shared memory."""
    if through == "global_f32" and given:
        return Violation(
            "smem", "handoff global_f32 keeps no tile in shared memory; take smem out (smem: null, over a base)"
        )
    if through != "global_f32" and not given:
        return Violation(
            "smem", "Q, K and V pass through shared memory; give their swizzles, {q: none, k: none, v: none}"
        )
    return None


# Schedules


def schedule_engines(kind: str, qk_engine: str, pv_engine: str) -> Violation | None:
    """Design rule: a warpgroup of its own for the copies pays where the others feed the tensor core only."""
    if kind == "cooperative" or (qk_engine, pv_engine) == ("wgmma", "wgmma"):
        return None
    return Violation(
        "schedule.kind",
        f"{kind} needs wgmma for qk and pv, got {qk_engine} and {pv_engine}; use cooperative, or extend k4_2",
    )


def schedule_handoff(kind: str, through: str) -> Violation | None:
    """Design rule: in a specialised kernel P goes from one product to the next without leaving the registers."""
    if kind == "cooperative" or through != "smem_16bit":
        return None
    return Violation(
        "handoff.through",
        f"P through shared memory is rendered with schedule cooperative only, not {kind}; use registers",
    )


def schedule_barrier(kind: str, barrier: str) -> Violation | None:
    """Design rule: K and V each have their barriers. With one for both, Q K^T of a tile would wait for V of it, too."""
    if kind == "cooperative" or barrier != "shared":
        return None
    return Violation(
        "load.barrier",
        f"with {kind} K of the next tile is in use before V of this one is free, so that they cannot share a barrier; "
        "use separate",
    )


def schedule_v_dim(kind: str, head_dim: int, v_dim: int) -> Violation | None:
    """Design rule: a head dim of its own for v and O is rendered for specialised kernels, which serve such models."""
    if kind != "cooperative" or v_dim == head_dim:
        return None
    return Violation(
        "problem.head_dim_v",
        f"head_dim_v {v_dim} beside head_dim {head_dim} is rendered with schedule warp_specialized or ping_pong only; "
        "extend k5 or k6, or leave head_dim_v out",
    )


def packed_rows(tile_q: int, pack_heads: int) -> Violation | None:
    """Each of the heads in a tile has as many positions there."""
    if tile_q % pack_heads == 0:
        return None
    return Violation(
        "tile.pack_heads",
        f"a tile of {tile_q} query rows holds no whole number of positions of {pack_heads} heads "
        f"({tile_q} = {tile_q // pack_heads} x {pack_heads} + {tile_q % pack_heads}); use a divisor of {tile_q}",
    )


def schedule_pack(kind: str, pack_heads: int) -> Violation | None:
    """Design rule: packing of query heads is rendered for specialised kernels, as grouped heads use them."""
    if kind != "cooperative" or pack_heads == 1:
        return None
    return Violation(
        "tile.pack_heads",
        f"a tile of {pack_heads} query heads is rendered with schedule warp_specialized or ping_pong only; "
        "extend k5 or k6, or use pack_heads 1",
    )


def output_over_q(head_dim: int, v_dim: int) -> Violation | None:
    """Design rule: O is gathered in shared memory where Q was, so that its rows may not be wider."""
    if v_dim <= head_dim:
        return None
    return Violation(
        "problem.head_dim_v",
        f"O takes the place of Q in shared memory, and rows of {v_dim} are wider than its {head_dim}; "
        f"use at most {head_dim}",
    )


def output_columns(v_dim: int) -> Violation | None:
    """Design rule: stmatrix.x4 stores O 16 columns at a time. PTX ISA, "stmatrix"."""
    if v_dim % hopper.WGMMA_K_16BIT == 0:
        return None
    return Violation(
        "problem.head_dim_v",
        f"O is stored 16 columns at a time (stmatrix), and its rows are {_remainder(v_dim, hopper.WGMMA_K_16BIT)}; "
        f"use {_around(v_dim, hopper.WGMMA_K_16BIT)}",
    )


def consumer_warpgroups(count: int) -> Violation | None:
    """One to three: with more, setmaxnreg has too little to share out. PTX ISA, "setmaxnreg"."""
    if count in footprint.REGISTER_BUDGETS:
        return None
    unit = hopper.REGISTER_UNIT_PER_THREAD
    threads = (count + 1) * hopper.WARPGROUP
    launched = hopper.REGISTERS_PER_SM // threads // unit * unit
    share = ((count + 1) * launched - hopper.SETMAXNREG_MIN) // count // unit * unit
    return Violation(
        "tile.warpgroups",
        f"{count} consumer warpgroups and the producer are {threads} threads, launched with {launched} registers each; "
        f"setmaxnreg could raise a consumer to {share} only (({count + 1} x {launched} - {hopper.SETMAXNREG_MIN}) / "
        f"{count}); use 1 to {max(footprint.REGISTER_BUDGETS)}",
    )


def ping_pong_partners(kind: str, count: int) -> Violation | None:
    """Turns are taken by two warpgroups or more."""
    if kind != "ping_pong" or count > 1:
        return None
    return Violation(
        "tile.warpgroups",
        "ping_pong needs consumer warpgroups that take turns, and there is 1; "
        "use warpgroups 2 with tile.q 128, or schedule warp_specialized",
    )


def consumer_registers(parts: Sequence[tuple[str, int]], consumers: int, overlap: bool) -> Violation | None:
    """What a consumer thread holds at once (an estimate) within what setmaxnreg gives it. PTX ISA, "setmaxnreg"."""
    total = sum(count for _, count in parts)
    _, budget = footprint.REGISTER_BUDGETS[consumers]
    spare = footprint.OVERLAP_SPARE if overlap else 0
    if total + spare <= budget:
        return None
    needed = f"{_terms(parts)} = {total}" + f", + {spare} to spare = {total + spare}" * overlap
    ways_out = ["a smaller tile.kv", *["overlap: false"] * overlap, *["fewer warpgroups"] * (consumers > 2)]
    return Violation(
        "tile.kv",
        f"registers per consumer thread: {needed} > {budget}, what setmaxnreg gives to each of "
        f"{consumers} consumer warpgroup{'s' if consumers > 1 else ''}, so that they would spill; "
        f"use {' or '.join(ways_out)}",
    )


# Persistent kernels


def scheduler_schedule(scheduler: str, kind: str, overlap: bool) -> Violation | None:
    """Design rule: a CTA that takes many tiles pays where loads run ahead and products overlap from tile to tile."""
    if scheduler == "single_tile" or (kind != "cooperative" and overlap):
        return None
    have = kind if kind == "cooperative" else f"{kind} without overlap"
    return Violation(
        "scheduler",
        f"{scheduler} needs schedule warp_specialized or ping_pong with overlap: true, got {have}; use single_tile, or "
        "extend k6",
    )


def scheduler_mask(scheduler: str, mask: str) -> Violation | None:
    """Design rule: tiles of equal length are dealt out, those of a causal mask are drawn, longest first."""
    match scheduler, mask:
        case ("single_tile", _) | ("static" | "stream_k", "none") | ("dynamic", "causal"):
            return None
        case "static" | "stream_k", "causal":
            return Violation(
                "scheduler",
                "under a causal mask tiles differ in length, so that CTAs with tiles known from the start would end at "
                "different times; use dynamic",
            )
        case "dynamic", "none":
            return Violation(
                "scheduler",
                "without a mask all tiles are equally long, and a counter has nothing to even out; use static or "
                "stream_k",
            )
    return Violation(
        "scheduler", f"a sliding window is rendered with scheduler single_tile only, not {scheduler}; use single_tile"
    )


def scheduler_lse(scheduler: str, lse: bool) -> Violation | None:
    """Design rule: leaving LSE out is rendered for kernels with a CTA per tile."""
    if scheduler == "single_tile" or lse:
        return None
    return Violation(
        "outputs.lse",
        f"a kernel without LSE is rendered with scheduler single_tile only, not {scheduler}; use lse: true "
        "(attention() returns O alone unless asked)",
    )


def scheduler_pack(scheduler: str, pack_heads: int) -> Violation | None:
    """Design rule: heads are packed into the tile in kernels with a CTA per tile."""
    if scheduler == "single_tile" or pack_heads == 1:
        return None
    return Violation(
        "tile.pack_heads",
        f"{pack_heads} heads in one tile are rendered with scheduler single_tile only, not {scheduler}; use 1",
    )


def scheduler_output(scheduler: str, o: str) -> Violation | None:
    """Design rule: O takes Q's place only where no next Q does."""
    if (scheduler == "single_tile") == (o == "over_q"):
        return None
    if scheduler == "single_tile":
        return Violation(
            "outputs.o", f"{o} is rendered with scheduler static, stream_k or dynamic only, not single_tile; use over_q"
        )
    return Violation(
        "outputs.o",
        f"with scheduler {scheduler} the next Q is loaded while O is stored, so that O cannot lie over Q; "
        "use own_buffer, or direct where shared memory is short",
    )


def scheduler_rescale(scheduler: str, rescale_above: int | None) -> Violation | None:
    """Design rule: rescaling now and then is rendered for persistent kernels."""
    if scheduler != "single_tile" or rescale_above is None:
        return None
    return Violation(
        "softmax.rescale_above",
        "rescaling now and then is rendered with scheduler static, stream_k or dynamic only, not single_tile; use null",
    )


def exp_before_wait(exponentials: int | None, kv: int, overlap: bool) -> Violation | None:
    """Design rule: where P V runs beside the softmax, its wait is held back among the exponentials of the first row.

    A thread has kv / 4 of them (PTX ISA, wgmma accumulator fragment).
    """
    if exponentials is None:
        return None
    if not overlap:
        return Violation(
            "softmax.exp_before_wait",
            "without overlap no P V runs beside the exponentials; use null or a schedule with overlap: true",
        )
    if exponentials <= kv // 4:
        return None
    return Violation(
        "softmax.exp_before_wait",
        f"{exponentials} > {kv // 4}, a thread's exponentials of one row with tile.kv {kv}; use at most {kv // 4}",
    )


def direct_columns(field: str, v_dim: int) -> Violation | None:
    """Design rule: a quad writes 32 columns of a row at a time, 8 (16 bytes) from each of its four threads."""
    if v_dim % footprint.DIRECT_COLUMNS == 0:
        return None
    return Violation(
        field,
        f"outputs.o direct writes {footprint.DIRECT_COLUMNS} columns at a time, and O has "
        f"{_remainder(v_dim, footprint.DIRECT_COLUMNS)}; use {_around(v_dim, footprint.DIRECT_COLUMNS)}, "
        "or outputs.o own_buffer",
    )


def output_dtype(dtype: str, o_dtype: str) -> Violation | None:
    """Design rule: O is rounded to the dtype of q, k and v, or not at all."""
    if o_dtype in (dtype, "fp32"):
        return None
    return Violation("o.dtype", f"O in {o_dtype} beside q, k and v in {dtype} is not rendered; use {dtype}")


def float32_output(scheduler: str, o: str, rows: int, columns: int) -> Violation | None:
    """Design rule: O in float32 goes straight from the registers. PTX ISA, "stmatrix": 8 x 8 matrices of 16 bits.

    `rows` and `columns` are those of a tile of O.
    """
    if scheduler == "single_tile":
        return Violation(
            "o.dtype",
            "O in fp32 goes straight from the registers, which is rendered with scheduler static, stream_k or dynamic "
            "only, not single_tile; leave o.dtype out, or extend fwd_d128_fp32_out",
        )
    if o == "direct":
        return None
    return Violation(
        "outputs.o",
        f"a tile of O in fp32 would take {rows} x {columns} x {FP32.bytes} = {rows * columns * FP32.bytes} bytes of "
        "shared memory, and stmatrix, which fills it, stores 16-bit elements only; use direct",
    )


# From a spec to facts


def check(spec: Spec) -> list[Violation]:
    """Every violation of every rule, in the order of the spec's fields as far as the rules go.

    The footprint rules (shared memory, registers) need a spec whose parts go together, and are run on those only.
    """
    found = [violation for violation in _structure(spec) if violation]
    sound = not found
    found += [violation for violation in _shapes(spec) if violation]
    if sound:
        found += [violation for violation in _footprint(spec) if violation]
    return list(dict.fromkeys(found))


def _structure(spec: Spec) -> Iterable[Violation | None]:
    wgmma = "wgmma" in (spec.qk.engine, spec.pv.engine)
    through = spec.handoff.through
    pv_a_source = spec.pv.a.source if isinstance(spec.pv, WgmmaProduct) else None
    yield thread_unit(wgmma, spec.tile.threads, spec.tile.warpgroups)
    yield engine_pair(spec.qk.engine, spec.pv.engine)
    yield wgmma_load(wgmma, spec.load.engine)
    yield handoff_engines(through, spec.qk.engine, spec.pv.engine, pv_a_source)
    yield global_handoff_load(through, spec.load.engine)
    yield smem_section(through, spec.smem is not None)
    yield window_product(spec.mask.kind, spec.pv.engine)
    yield optional_lse(spec.outputs.lse, spec.pv.engine)
    if isinstance(spec.load, CpAsyncLoad | TmaLoad):
        yield kv_stages(spec.load.kv_stages)
    if isinstance(spec.load, TmaLoad):
        yield q_stages(spec.load.q_stages, footprint.persistent(spec))
    yield from _schedule(spec)


def _schedule(spec: Spec) -> Iterable[Violation | None]:
    kind = spec.schedule.kind
    yield schedule_engines(kind, spec.qk.engine, spec.pv.engine)
    yield schedule_handoff(kind, spec.handoff.through)
    yield schedule_pack(kind, spec.tile.pack_heads)
    yield schedule_v_dim(kind, spec.problem.head_dim, spec.problem.v_dim)
    if isinstance(spec.load, TmaLoad):
        yield schedule_barrier(kind, spec.load.barrier)
    yield from _scheduler(spec)
    if footprint.specialized(spec) and spec.tile.warpgroups is not None:
        yield consumer_warpgroups(spec.tile.warpgroups)
        yield ping_pong_partners(kind, spec.tile.warpgroups)


def _scheduler(spec: Spec) -> Iterable[Violation | None]:
    yield scheduler_schedule(spec.scheduler, spec.schedule.kind, footprint.overlapped(spec))
    yield scheduler_mask(spec.scheduler, spec.mask.kind)
    yield scheduler_lse(spec.scheduler, spec.outputs.lse)
    yield scheduler_pack(spec.scheduler, spec.tile.pack_heads)
    if spec.o_dtype == "fp32":
        yield float32_output(spec.scheduler, spec.outputs.o, spec.tile.q, spec.problem.v_dim)
    else:
        yield scheduler_output(spec.scheduler, spec.outputs.o)
    yield output_dtype(spec.problem.dtype, spec.o_dtype)
    yield scheduler_rescale(spec.scheduler, spec.softmax.rescale_above)
    yield exp_before_wait(spec.softmax.exp_before_wait, spec.tile.kv, footprint.overlapped(spec))


def _shapes(spec: Spec) -> Iterable[Violation | None]:
    head_dim, tile = spec.problem.head_dim, spec.tile
    if isinstance(spec.qk, WgmmaProduct):
        yield from _qk_operands(spec.qk)
        yield wgmma_columns("tile.kv", "QK", tile.kv)
        yield wgmma_depth("problem.head_dim", "QK", head_dim)
    if isinstance(spec.pv, WgmmaProduct):
        yield from _pv_operands(spec.pv)
        yield wgmma_columns(_v_dim_field(spec), "PV", spec.problem.v_dim)
        yield wgmma_depth("tile.kv", "PV", tile.kv)
    if tile.warpgroups is not None and "wgmma" in (spec.qk.engine, spec.pv.engine):
        yield wgmma_rows(tile.q, tile.warpgroups)
        yield wgmma_threads(tile.warpgroups)
        if spec.qk.engine == "wgmma" and spec.pv.engine == "scalar":
            yield scattered_scores(tile.warpgroups)
    yield packed_rows(tile.q, tile.pack_heads)
    if spec.problem.v_dim != head_dim:
        if spec.outputs.o == "over_q":
            yield output_over_q(head_dim, spec.problem.v_dim)
        if spec.outputs.o != "direct":
            yield output_columns(spec.problem.v_dim)
    if spec.outputs.o == "direct" and spec.o_dtype != "fp32":
        yield direct_columns(_v_dim_field(spec), spec.problem.v_dim)
    if tile.threads is not None:
        yield from _thread_tile(spec, tile.threads)
    if isinstance(spec.pv, ScalarProduct) and not isinstance(spec.handoff, GlobalHandoff):
        yield scalar_vector(head_dim)
    yield from _tiles_in_smem(spec)


def _v_dim_field(spec: Spec) -> str:
    return "problem.head_dim" if spec.problem.head_dim_v is None else "problem.head_dim_v"


def _qk_operands(qk: WgmmaProduct) -> Iterable[Violation | None]:
    yield q_from_smem(qk.a.source)
    yield a_from_registers("qk", qk.a.source, qk.a.major)
    if qk.a.source == "smem":
        yield input_major("qk.a.major", "Q", qk.a.major, "k")
    yield b_from_smem("qk", qk.b.source)
    yield input_major("qk.b.major", "K", qk.b.major, "k")


def _pv_operands(pv: WgmmaProduct) -> Iterable[Violation | None]:
    yield a_from_registers("pv", pv.a.source, pv.a.major)
    yield p_major(pv.a.source, pv.a.major)
    yield b_from_smem("pv", pv.b.source)
    yield input_major("pv.b.major", "V", pv.b.major, "mn")


def _thread_tile(spec: Spec, threads: int) -> Iterable[Violation | None]:
    whole_warps = scalar_threads(threads)
    yield whole_warps
    if whole_warps is not None or not isinstance(spec.qk, ScalarProduct) or not isinstance(spec.pv, ScalarProduct):
        return
    if isinstance(spec.handoff, GlobalHandoff):
        yield from naive_grid(spec.tile.q, spec.tile.kv, spec.problem.head_dim, threads)
    else:
        yield scalar_grid("tile.q", spec.tile.q, threads)
        yield scalar_grid("tile.kv", spec.tile.kv, threads)
        yield scalar_grid("problem.head_dim", spec.problem.head_dim, threads)
        if spec.load.engine != "tma":
            for field, rows in (("tile.q", spec.tile.q), ("tile.kv", spec.tile.kv)):
                if scalar_grid(field, rows, threads) is None:
                    yield copy_rows(field, rows, spec.problem.head_dim, threads)


def _tiles_in_smem(spec: Spec) -> Iterable[Violation | None]:
    head_dim = spec.problem.head_dim
    tma = spec.load.engine == "tma"
    v_dim = spec.problem.v_dim
    if spec.smem is not None:
        rows = [("q", "Q", head_dim, spec.smem.q), ("k", "K", head_dim, spec.smem.k), ("v", "V", v_dim, spec.smem.v)]
        if v_dim != head_dim and spec.outputs.o != "direct":
            where = "in Q's place" if spec.outputs.o == "over_q" else "laid out like Q"
            rows.append(("q", f"O, {where},", v_dim, spec.smem.q))
        for name, tensor, extent, swizzle in rows:
            yield swizzle_span(f"smem.{name}", tensor, extent, swizzle, tma=tma)
    if isinstance(spec.handoff, SmemHandoff):
        yield swizzle_span("handoff.swizzle", "P", spec.tile.kv, spec.handoff.swizzle, tma=False)
    if tma:
        yield tma_box("tile.q", spec.tile.q)
        yield tma_box("tile.kv", spec.tile.kv)
        yield tma_stride(head_dim)
        yield tma_stride(v_dim, _v_dim_field(spec))


def _footprint(spec: Spec) -> Iterable[Violation | None]:
    yield _shared_memory_of(spec)
    parts = footprint.registers_per_thread(spec)
    if footprint.specialized(spec):
        yield consumer_registers(parts, spec.tile.warpgroups or 0, footprint.overlapped(spec))
        return
    yield registers_per_thread(parts)
    field = "tile.threads" if spec.tile.threads is not None else "tile.warpgroups"
    yield registers_per_sm(field, footprint.threads(spec), parts)


def _shared_memory_of(spec: Spec) -> Violation | None:
    """The rule `shared_memory`, with the most stages and the widest kv tile that would fit as ways out."""
    facts = _smem_facts(spec)
    if shared_memory(*facts) is None:
        return None
    ways_out = []
    field = "tile.kv"
    if isinstance(spec.load, CpAsyncLoad | TmaLoad):
        stages = _largest(spec.load.kv_stages - 1, lambda count: _fits(_with(spec, "load", kv_stages=count)))
        if stages:
            field = "load.kv_stages"
            ways_out.append(f"at most {stages} stage{'s' if stages > 1 else ''}")
    step = hopper.WGMMA_K_16BIT
    tiles = _largest((spec.tile.kv - 1) // step, lambda count: _fits(_with(spec, "tile", kv=count * step)))
    if tiles:
        ways_out.append(f"tile.kv {tiles * step}")
    if not ways_out:
        ways_out.append("a smaller tile.q or head_dim")
    return shared_memory(*facts, field=field, ways_out=ways_out)


def _smem_facts(spec: Spec) -> tuple[list[tuple[str, int]], int, int]:
    """Regions with their arithmetic, barrier bytes, and the bytes that aligning them all costs."""
    regions = footprint.shared_memory_map(spec)
    barriers = footprint.barrier_bytes(spec)
    data = sum(region.bytes for region in regions)
    slack = footprint.total_bytes(regions, barriers) - data - barriers
    return [(f"{region.name} ({region.formula})", region.bytes) for region in regions], barriers, slack


def _fits(spec: Spec) -> bool:
    return shared_memory(*_smem_facts(spec)) is None


def _with(spec: Spec, part: str, **changes: int) -> Spec:
    return spec.model_copy(update={part: getattr(spec, part).model_copy(update=changes)})


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest count in 1..most that fits, given that every smaller one fits too; 0 when none does."""
    low, high = 0, max(most, 0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


# Wording


def _terms(parts: Sequence[tuple[str, int]]) -> str:
    return " + ".join(f"{name} {count}" for name, count in parts)


def _remainder(value: int, step: int) -> str:
    """A value beside its division: 100, no multiple of 16 (100 = 6 x 16 + 4)."""
    return f"{value}, no multiple of {step} ({value} = {value // step} x {step} + {value % step})"


def _around(value: int, step: int) -> str:
    """The multiples of `step` on both sides of `value`."""
    below = value // step * step
    return f"{below} or {below + step}" if below else f"{step}"


def _usual(qk_engine: str, pv_engine: str) -> str:
    """The handoff to use between two engines."""
    return "registers" if (qk_engine, pv_engine) == ("wgmma", "wgmma") else "smem_f32"
