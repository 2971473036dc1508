"""Rules about O on its way out, and the rows of packed heads."""

from __future__ import annotations

from fa3gen.design import footprint
from fa3gen.design.rules.registry import GENERATOR, Violation, rule
from fa3gen.design.rules.wording import around, remainder
from fa3gen.hardware import hopper
from fa3gen.hardware.dtypes import E4M3, FP32


@rule(kind=GENERATOR, topic="output")
def scheduler_output(scheduler: str, o: str, kind: str, pv_engine: str) -> Violation | None:
    """O takes Q's place only where no next Q does; a buffer of its own is rendered for specialised kernels.

    Straight from the registers it goes where they are an accumulator of WGMMA; scalar kernels have no other way.
    """
    if o == "over_q":
        if scheduler in footprint.CTA_PER_TILE:
            return None
        return Violation(
            "outputs.o",
            f"with scheduler {scheduler} the next Q is loaded while O is stored, so that O cannot lie over Q; "
            "use own_buffer, or direct where shared memory is short",
        )
    if kind != "cooperative" or (o, pv_engine) == ("direct", "wgmma"):
        return None
    if o == "direct":
        return Violation(
            "outputs.o",
            f"direct says how O leaves a WGMMA's accumulator, and pv is {pv_engine}; use over_q, the default",
        )
    other = "over_q or direct" if pv_engine == "wgmma" else "over_q"
    return Violation(
        "outputs.o", f"{o} is rendered with schedule warp_specialized or ping_pong only, not {kind}; use {other}"
    )


@rule(kind=GENERATOR, topic="output")
def output_over_q(head_dim: int, v_dim: int) -> Violation | None:
    """O is gathered in shared memory where Q was, so that its rows may not be wider."""
    if v_dim <= head_dim:
        return None
    return Violation(
        "problem.head_dim_v",
        f"O takes the place of Q in shared memory, and rows of {v_dim} are wider than its {head_dim}; "
        f"use at most {head_dim}",
    )


@rule(kind=GENERATOR, topic="output")
def output_columns(v_dim: int) -> Violation | None:
    """O is stored 16 columns at a time, by stmatrix.x4. PTX ISA, "stmatrix"."""
    if v_dim % hopper.WGMMA_K_16BIT == 0:
        return None
    return Violation(
        "problem.head_dim_v",
        f"O is stored 16 columns at a time (stmatrix), and its rows are {remainder(v_dim, hopper.WGMMA_K_16BIT)}; "
        f"use {around(v_dim, hopper.WGMMA_K_16BIT)}",
    )


@rule(kind=GENERATOR, topic="output")
def direct_columns(field: str, v_dim: int, kind: str) -> Violation | None:
    """A quad writes 32 columns of a row at a time, 8 (16 bytes) from each of its four threads."""
    if v_dim % footprint.DIRECT_COLUMNS == 0:
        return None
    other = "over_q" if kind == "cooperative" else "own_buffer"
    return Violation(
        field,
        f"outputs.o direct writes {footprint.DIRECT_COLUMNS} columns at a time, and O has "
        f"{remainder(v_dim, footprint.DIRECT_COLUMNS)}; use {around(v_dim, footprint.DIRECT_COLUMNS)}, "
        f"or outputs.o {other}",
    )


@rule(kind=GENERATOR, topic="output")
def output_dtype(dtype: str, o_dtype: str) -> Violation | None:
    """O is rounded to the dtype of q, k and v, or not at all; to one of 16 bits where these have 8."""
    if o_dtype in (dtype, "fp32") or dtype == E4M3.name:
        return None
    return Violation("o.dtype", f"O in {o_dtype} beside q, k and v in {dtype} is not rendered; use {dtype}")


@rule(kind=GENERATOR, topic="output")
def float32_output(kind: str, o: str, rows: int, columns: int) -> Violation | None:
    """O in float32 goes straight from the registers. PTX ISA, "stmatrix": 8 x 8 matrices of 16 bits.

    `rows` and `columns` are those of a tile of O.
    """
    if kind == "cooperative":
        return Violation(
            "o.dtype",
            "O in fp32 goes straight from the registers, which is rendered with schedule warp_specialized or ping_pong "
            "only, not cooperative; leave o.dtype out, or extend fwd_d128_fp32_out",
        )
    if o == "direct":
        return None
    return Violation(
        "outputs.o",
        f"a tile of O in fp32 would take {rows} x {columns} x {FP32.bytes} = {rows * columns * FP32.bytes} bytes of "
        "shared memory, and stmatrix, which fills it, stores 16-bit elements only; use direct",
    )


@rule(kind=GENERATOR, topic="structure")
def packed_rows(tile_q: int, pack_heads: int) -> Violation | None:
    """Each of the heads in a tile has as many positions there."""
    if tile_q % pack_heads == 0:
        return None
    return Violation(
        "tile.pack_heads",
        f"a tile of {tile_q} query rows holds no whole number of positions of {pack_heads} heads "
        f"({tile_q} = {tile_q // pack_heads} x {pack_heads} + {tile_q % pack_heads}); use a divisor of {tile_q}",
    )


@rule(kind=GENERATOR, topic="output")
def packed_slices(o: str, pack_heads: int) -> Violation | None:
    """A warp stores its 16 rows of O by one TMA copy, as whole positions of all packed heads."""
    rows = hopper.WGMMA_M // 4
    if o != "own_buffer" or rows % pack_heads == 0:
        return None
    return Violation(
        "outputs.o",
        f"own_buffer stores the rows of each warp as whole positions of {pack_heads} heads, and a warp has "
        f"{remainder(rows, pack_heads)}; use over_q with scheduler single_tile or grid, or direct",
    )


@rule(kind=GENERATOR, topic="softmax")
def sink_scheduler(scheduler: str) -> Violation | None:
    """A sink enters the sums while the last P V runs; parts of a tile that CTAs share meet only after that."""
    if scheduler != "stream_k":
        return None
    return Violation("scheduler", "sinks are rendered with schedulers but stream_k; use static or dynamic")


@rule(kind=GENERATOR, topic="output")
def sink_lse(lse: bool) -> Violation | None:
    """With a sink, LSE and the factor of O come from one computation; kernels without LSE have no sink."""
    if lse:
        return None
    return Violation("outputs.lse", "a sink is rendered with LSE; use lse: true, or leave softmax.sink out")
