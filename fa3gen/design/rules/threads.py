"""Rules about threads and their registers."""

from __future__ import annotations

from collections.abc import Sequence

from fa3gen.design import footprint
from fa3gen.design.rules.registry import GENERATOR, HARDWARE, Violation, rule
from fa3gen.design.rules.wording import around, remainder, terms
from fa3gen.hardware import hopper


@rule(kind=GENERATOR, topic="structure")
def thread_unit(wgmma: bool, threads: int | None, warpgroups: int | None) -> Violation | None:
    """Kernels with WGMMA count warpgroups, which issue it (PTX ISA, "Warpgroup"); scalar kernels count threads."""
    if (threads is None) == (warpgroups is None):
        return Violation(
            "tile",
            "give either threads (scalar kernels) or warpgroups (WGMMA kernels), not both or neither"
            " (null takes out the one that a base gives)",
        )
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


@rule(kind=HARDWARE, topic="tile")
def scalar_threads(threads: int) -> Violation | None:
    """At most 1024 threads. CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""
    if threads <= hopper.THREADS_PER_CTA:
        return None
    return Violation("tile.threads", f"a CTA has at most {hopper.THREADS_PER_CTA} threads, not {threads}; use fewer")


@rule(kind=GENERATOR, topic="tile")
def whole_warps(threads: int) -> Violation | None:
    """All threads of a warp work alike: the shuffles and barriers of the templates count whole warps."""
    if threads % hopper.WARP == 0 or threads > hopper.THREADS_PER_CTA:
        return None
    return Violation(
        "tile.threads",
        f"a CTA has whole warps, and tile.threads is {remainder(threads, hopper.WARP)}; "
        f"use {around(threads, hopper.WARP)}",
    )


@rule(kind=HARDWARE, topic="structure")
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


@rule(kind=GENERATOR, topic="structure")
def consumer_warpgroups(count: int) -> Violation | None:
    """Register budgets are laid out for one to three: with more, little is left to share out. PTX ISA, "setmaxnreg"."""
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


@rule(kind=HARDWARE, topic="registers")
def registers_per_thread(
    parts: Sequence[tuple[str, int]], *, field: str = "tile.kv", smaller: str = "tile.kv or head_dim"
) -> Violation | None:
    """What a thread holds at once (an estimate, by what it is for) within 255 registers.

    CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    """
    total = sum(count for _, count in parts)
    if total <= hopper.REGISTERS_PER_THREAD:
        return None
    return Violation(
        field,
        f"registers per thread: {terms(parts)} = {total} > {hopper.REGISTERS_PER_THREAD}, so that they would spill; "
        f"use a smaller {smaller}",
    )


@rule(kind=HARDWARE, topic="registers")
def registers_per_sm(
    field: str, threads: int, parts: Sequence[tuple[str, int]], *, smaller: str = "tile.q or tile.kv"
) -> Violation | None:
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
        f"registers per SM: {terms(parts)} = {count}, rounded up to {rounded}; x {threads} threads = "
        f"{threads * rounded} > {hopper.REGISTERS_PER_SM}; use a smaller {smaller}",
    )


@rule(kind=HARDWARE, topic="registers")
def accumulator_at_launch(ctas: int, columns: int, launched: int) -> Violation | None:
    """A product's accumulator, a register for two columns, within what a thread is launched with.

    ptxas allots registers of instructions by the launch, whatever setmaxnreg gives later (its error C7602).
    """
    held = footprint.registers_of_product(columns)
    if held <= launched:
        return None
    return Violation(
        "tile.ctas_per_sm",
        f"with {ctas} CTAs on an SM a thread is launched with {launched} registers, and a product of {columns} columns "
        f"takes {columns} / 2 + {footprint.OTHER_REGISTERS} = {held}; use fewer CTAs or columns",
    )


@rule(kind=HARDWARE, topic="registers")
def consumer_registers(
    parts: Sequence[tuple[str, int]], consumers: int, overlap: bool, budget: int, *, field: str = "tile.kv"
) -> Violation | None:
    """What a consumer thread holds at once (an estimate) within what setmaxnreg gives it. PTX ISA, "setmaxnreg"."""
    total = sum(count for _, count in parts)
    spare = footprint.OVERLAP_SPARE if overlap else 0
    if total + spare <= budget:
        return None
    needed = f"{terms(parts)} = {total}" + f", + {spare} to spare = {total + spare}" * overlap
    ways_out = [f"a smaller {field}", *["overlap: false"] * overlap, *["fewer warpgroups"] * (consumers > 2)]
    return Violation(
        field,
        f"registers per consumer thread: {needed} > {budget}, what setmaxnreg gives to each of "
        f"{consumers} consumer warpgroup{'s' if consumers > 1 else ''}, so that they would spill; "
        f"use {' or '.join(ways_out)}",
    )
