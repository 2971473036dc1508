"""Rules about merges of parts: threads of a CTA and of a share, registers of the CTAs that an SM should have."""

from __future__ import annotations

from collections.abc import Sequence

from fa3gen.design.combining import VECTOR
from fa3gen.design.rules.registry import GENERATOR, HARDWARE, TASTE, Violation, rule
from fa3gen.design.rules.wording import too_many_registers
from fa3gen.hardware import hopper
from fa3gen.hardware.dtypes import FP32

SECTOR = 32  # bytes that memory is read in; "Device Memory Accesses" of the CUDA C++ Best Practices Guide
LINE = 128  # bytes of a line of the caches, of four sectors


@rule(kind=HARDWARE, topic="tile")
def combine_threads(threads: int) -> Violation | None:
    """At most 1024 threads. CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""
    if threads <= hopper.THREADS_PER_CTA:
        return None
    return Violation("cta.threads", f"a CTA has at most {hopper.THREADS_PER_CTA} threads, not {threads}; use fewer")


@rule(kind=GENERATOR, topic="tile")
def combine_power(threads: int) -> Violation | None:
    """A CTA's threads are divided among shares of the parts, whose number is a power of two in each call."""
    if threads >= hopper.WARP and threads & (threads - 1) == 0:
        return None
    below = max(hopper.WARP, 1 << threads.bit_length() - 1)
    around = f"{below} or {2 * below}" if threads > hopper.WARP else f"{hopper.WARP}"
    return Violation(
        "cta.threads",
        f"a CTA has whole warps, divided among 1, 2, 4 and so on shares: a power of two from {hopper.WARP} on, not "
        f"{threads}; use {around}",
    )


@rule(kind=GENERATOR, topic="order")
def combine_shares(shares: int, threads: int) -> Violation | None:
    """Shares of a row's parts are a power of two, and two threads of a share read a sector of 32 bytes at least."""
    most = threads * VECTOR * FP32.bytes // SECTOR
    if shares & (shares - 1):
        below = 1 << shares.bit_length() - 1
        return Violation(
            "parts.shares", f"shares are doubled until all SMs are busy, and {shares} is no power of two; use {below}"
        )
    if shares <= most:
        return None
    return Violation(
        "parts.shares",
        f"with {shares} shares {threads} / {shares} threads of each read 16 bytes side by side, less than a sector of "
        f"{SECTOR}; use at most {most}",
    )


@rule(kind=TASTE, topic="order")
def combine_lines(shares: int, threads: int) -> Violation | None:
    """Threads of a share that read whole lines of 128 bytes ask for each line once."""
    each = threads // shares * VECTOR * FP32.bytes
    if each >= LINE:
        return None
    return Violation(
        "parts.shares",
        f"with {shares} shares {threads} / {shares} = {threads // shares} threads of each read {each} bytes side by "
        f"side, less than a line of {LINE}; use {threads * VECTOR * FP32.bytes // LINE}",
    )


@rule(kind=HARDWARE, topic="registers")
def combine_registers(threads: int, ctas: int, parts: Sequence[tuple[str, int]]) -> Violation | None:
    """All threads of the CTAs that an SM should have within its 65,536 registers, handed out in units of 8 per thread.

    CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    """
    wrong = too_many_registers(threads, ctas, parts, "parts at once")
    if wrong is None:
        return None
    fewer_ctas, message = wrong
    return Violation("cta.per_sm" if fewer_ctas else "parts.at_once", message)
