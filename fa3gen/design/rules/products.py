"""Rules about the two products: shapes and operands of WGMMA."""

from __future__ import annotations

from fa3gen.design.rules.registry import GENERATOR, HARDWARE, Violation, rule
from fa3gen.design.rules.wording import around, remainder
from fa3gen.hardware import hopper


@rule(kind=HARDWARE, topic="tile")
def wgmma_rows(tile_q: int, warpgroups: int) -> Violation | None:
    """M: 64 rows per product. PTX ISA, "Asynchronous Warpgroup Level Matrix Shape" (m64nNk16)."""
    if tile_q % hopper.WGMMA_M == 0:
        return None
    return Violation("tile.q", _one_each(tile_q, warpgroups))


@rule(kind=GENERATOR, topic="tile")
def rows_per_warpgroup(tile_q: int, warpgroups: int) -> Violation | None:
    """Each warpgroup owns 64 rows. It could own several products of 64 rows, but none is rendered like that."""
    if tile_q % hopper.WGMMA_M or tile_q == hopper.WGMMA_M * warpgroups:
        return None  # what is no multiple of 64 is for wgmma_rows to say
    return Violation("tile.q", f"{_one_each(tile_q, warpgroups)} or tile.warpgroups {tile_q // hopper.WGMMA_M}")


def _one_each(tile_q: int, warpgroups: int) -> str:
    rows = hopper.WGMMA_M * warpgroups
    return (
        f"a warpgroup's WGMMA has M = {hopper.WGMMA_M} and each warpgroup owns one: "
        f"{warpgroups} x {hopper.WGMMA_M} = {rows} rows, not {tile_q}; use tile.q {rows}"
    )


@rule(kind=HARDWARE, topic="product")
def wgmma_columns(field: str, product: str, n: int) -> Violation | None:
    """N: a multiple of 8 up to 256. PTX ISA, "Asynchronous Warpgroup Level Matrix Shape"."""
    step, most = hopper.WGMMA_N_STEP, hopper.WGMMA_N_MAX
    if n > most:
        return Violation(field, f"N of the {product} product is {n} > {most}, the widest WGMMA; use at most {most}")
    if n % step:
        return Violation(field, f"N of the {product} product is {remainder(n, step)}; use {around(n, step)}")
    return None


@rule(kind=HARDWARE, topic="product")
def wgmma_depth(field: str, product: str, k: int, step: int = hopper.WGMMA_K_16BIT) -> Violation | None:
    """K: 16 per instruction for 16-bit operands, 32 for 8. PTX ISA, "Asynchronous Warpgroup Level Matrix Shape"."""
    if k % step == 0:
        return None
    operands = "a 16-bit" if step == hopper.WGMMA_K_16BIT else "an 8-bit"
    return Violation(
        field, f"K of the {product} product is {remainder(k, step)}, the K of {operands} WGMMA; use {around(k, step)}"
    )


@rule(kind=HARDWARE, topic="structure")
def a_from_registers(product: str, source: str, major: str) -> Violation | None:
    """A register A fragment has one layout, K-major. PTX ISA, "wgmma.mma_async" (imm-trans-a needs A in memory)."""
    if source != "registers" or major == "k":
        return None
    return Violation(
        f"{product}.a.major",
        "A from registers is always K-major, its fragment has no transposed form; use major: k or source: smem",
    )


@rule(kind=HARDWARE, topic="structure")
def b_from_smem(product: str, source: str) -> Violation | None:
    """B is given by a matrix descriptor only. PTX ISA, "wgmma.mma_async" (operand b-desc)."""
    if source == "smem":
        return None
    return Violation(f"{product}.b.source", "WGMMA reads B through a shared-memory descriptor only; use source: smem")


@rule(kind=GENERATOR, topic="S = Q K^T")
def q_from_registers(source: str, kind: str, pv_engine: str) -> Violation | None:
    """Q is brought to the registers once for each tile of queries where all warps do the same, and P V is on WGMMA."""
    if source == "smem" or (kind, pv_engine) == ("cooperative", "wgmma"):
        return None
    return Violation(
        "qk.a.source",
        f"Q in registers is rendered with schedule cooperative and both products on WGMMA only, not with {kind} and a "
        f"{pv_engine} pv; use source: smem, or extend k4_2",
    )


@rule(kind=GENERATOR, topic="registers")
def operands_apart(q_source: str, p_source: str, head_dim: int, kv: int) -> Violation | None:
    """Q and P, both A operands in registers, take different numbers of them.

    Of equal numbers ptxas 12.9.83 puts P where Q is, which the next step needs: PTX and the CPU model's results are
    right, those of an H200 were not. `fa3gen compile` looks for it in the SASS of every module.
    """
    if (q_source, p_source) != ("registers", "registers") or head_dim != kv:
        return None
    other = 128 if kv < 128 else 64
    return Violation(
        "tile.kv",
        f"a thread holds Q in {head_dim} / 4 and P in {kv} / 4 = {kv // 4} registers, and of equally many ptxas 12.9 "
        f"puts P in those of Q; use tile.kv {other}, or source: smem for one of them",
    )


@rule(kind=GENERATOR, topic="product")
def input_major(field: str, tensor: str, major: str, usual: str, kind: str, pv_engine: str) -> Violation | None:
    """16-bit WGMMA reads either major (PTX ISA, "wgmma.mma_async", imm-trans-a and imm-trans-b).

    `usual` is that of a tensor whose rows are contiguous. TMA transposes nothing, so that the other one needs a tensor
    whose sequence is contiguous, which is rendered where all warps do the same and both products are on WGMMA.
    """
    if major == usual or (kind, pv_engine) == ("cooperative", "wgmma"):
        return None
    inner = "K" if usual == "k" else "N"
    return Violation(
        field,
        f"head_dim is contiguous in {tensor.lower()} and is the {inner} of this product, so {tensor} is "
        f"{usual.upper()}-major; {major} takes a {tensor.lower()} whose sequence is contiguous, which is rendered with "
        f"schedule cooperative and both products on WGMMA only, not with {kind} and a {pv_engine} pv; use {usual}, or "
        "extend k4_2",
    )
