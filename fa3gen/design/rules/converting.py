"""Rules about K and V that have 8 bits in memory, of which a warpgroup makes the operands of the products."""

from __future__ import annotations

from fa3gen.design import footprint
from fa3gen.design.rules.registry import GENERATOR, HARDWARE, Violation, rule
from fa3gen.hardware import hopper

UNIT = 8  # elements of a row that a thread converts at once: 8 bytes to 16


@rule(kind=GENERATOR, topic="structure")
def stored_stages(stages: int, stored: bool) -> Violation | None:
    """Stages of tiles in 8 bits mean something where there are such tiles."""
    if stored or stages == 1:
        return None
    return Violation(
        "kv.stages",
        f"{stages} stages of tiles that are converted, and none are; leave stages out, or give kv.dtype beside dtype "
        "bf16 or fp16",
    )


@rule(kind=GENERATOR, topic="structure")
def converting_kernel(
    kind: str, layout: str, engine: str, overlap: bool, consumers: int, converters: int
) -> Violation | None:
    """A warpgroup that converts is rendered where another one loads, for packed sequences and pages."""
    if kind == "cooperative" or engine != "tma":
        return Violation(
            "kv.dtype",
            f"who converts stands between who loads and who multiplies, and with schedule {kind} all warps do both; "
            "extend fwd_packed_kv8 or fwd_paged_kv8",
        )
    if layout == "dense":
        return Violation(
            "kv.dtype",
            "8-bit K and V are rendered for layout packed or paged, not dense; a dense cache is packed sequences with "
            "offsets 0, seq, 2 seq and so on: use layout packed",
        )
    if not overlap:
        return Violation(
            "schedule.overlap",
            "factors of 8-bit K and V are rendered with products beside the softmax; use overlap: true",
        )
    if (consumers, converters) not in footprint.CONVERTING_BUDGETS:
        return Violation(
            "tile.warpgroups",
            "registers are shared out for 1 or 2 consumers beside 1 or 2 warpgroups that convert, "
            f"not for {consumers} beside {converters}; use one of these",
        )
    return None


@rule(kind=GENERATOR, topic="tile")
def converted_rows(field: str, head_dim: int, kv: int, warps: int) -> Violation | None:
    """The threads that convert K, or V, stand in whole rows of the tile, as many rows at a time as divide it."""
    threads, columns = warps * hopper.WARP, head_dim // UNIT
    if head_dim % UNIT == 0 and threads % columns == 0 and kv % (threads // columns) == 0:
        return None
    fitting = [str(UNIT * count) for count in (2, 4, 8, 16, 32, 64) if kv % (threads // count) == 0]
    return Violation(
        field,
        f"{threads} threads convert {UNIT} elements each, and rows of {head_dim} are not a whole part of that, {kv} of "
        f"them at a time; use {', '.join(fitting)}",
    )


@rule(kind=HARDWARE, topic="registers")
def accumulator_beside_converters(warpgroups: int, columns: int, launched: int) -> Violation | None:
    """A product's accumulator, a register for two columns, within what a thread is launched with.

    ptxas allots registers of instructions by the launch, whatever setmaxnreg gives later (its error C7602).
    """
    held = footprint.registers_of_product(columns)
    if held <= launched:
        return None
    field, beside = (
        ("kv.warpgroups", f"{warpgroups} of them") if warpgroups > 1 else ("tile.warpgroups", "one that converts")
    )
    return Violation(
        field,
        f"with {beside} beside the others a thread is launched with {launched} registers, and a product of {columns} "
        f"columns takes {columns} / 2 + {footprint.OTHER_REGISTERS} = {held}; use fewer, or fewer columns",
    )
