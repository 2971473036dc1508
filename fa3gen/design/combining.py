"""What follows from the spec of a merge: who has which columns, shared memory, registers."""

from __future__ import annotations

from fa3gen.design.footprint import Region
from fa3gen.hardware.dtypes import FP32, VECTOR_BYTES
from fa3gen.spec.combining import Combine

VECTOR = VECTOR_BYTES // FP32.bytes  # adjacent columns of a part that a thread loads at once
HALVES = 2  # of a row, in each of which a thread has a vector: neighbours read side by side
COLUMNS = HALVES * VECTOR  # of a thread; head dims are multiples of it
OTHER_REGISTERS = 36  # as compiled: strides in 64 bits, addresses, counters


def shared_memory_map(spec: Combine) -> list[Region]:
    """What each thread has added up, for the first share to merge."""
    threads = spec.cta.threads
    rows = [("sums", COLUMNS, "of O"), ("largest", 1, "largest LSE"), ("totals", 1, "sums of weights")]
    return [
        Region(
            name,
            threads * columns * FP32.bytes,
            f"{threads} x {columns} x {FP32.bytes}" if columns > 1 else f"{threads} x {FP32.bytes}",
            VECTOR_BYTES if columns > 1 else FP32.bytes,
            what,
        )
        for name, columns, what in rows
    ]


def registers_per_thread(spec: Combine) -> list[tuple[str, int]]:
    """An estimate of what a thread holds at the widest point, by what."""
    at_once = spec.parts.at_once
    return [
        ("parts of O", at_once * COLUMNS),
        ("their LSE", at_once),
        ("sums", COLUMNS + 2),
        ("addresses and counters", OTHER_REGISTERS),
    ]
