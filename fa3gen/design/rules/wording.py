"""Phrases that several rules share."""

from __future__ import annotations

from collections.abc import Sequence

from fa3gen.hardware import hopper


def terms(parts: Sequence[tuple[str, int]]) -> str:
    """A sum with its names: O 64 + S 32."""
    return " + ".join(f"{name} {count}" for name, count in parts)


def too_many_registers(threads: int, ctas: int, held: Sequence[tuple[str, int]], fewer: str) -> tuple[bool, str] | None:
    """What is wrong where so many CTAs have no room in an SM's registers, and whether fewer of them would have.

    `held`: registers of a thread, by what; `fewer`: what needs less of them.
    """
    count, unit = sum(count for _, count in held), hopper.REGISTER_UNIT_PER_THREAD
    rounded = -(-count // unit) * unit
    total, most = ctas * threads * rounded, hopper.REGISTERS_PER_SM // (threads * rounded)
    if total <= hopper.REGISTERS_PER_SM and rounded <= hopper.REGISTERS_PER_THREAD:
        return None
    if most and rounded <= hopper.REGISTERS_PER_THREAD:
        return True, (
            f"registers per SM: {terms(held)} = {count}, rounded up to {rounded}; x {threads} threads x {ctas} CTAs = "
            f"{total} > {hopper.REGISTERS_PER_SM}; use at most {most}"
        )
    return False, (
        f"registers: {terms(held)} = {count} for each of {threads} threads, of {hopper.REGISTERS_PER_THREAD} for a "
        f"thread and {hopper.REGISTERS_PER_SM} for an SM; use fewer {fewer}"
    )


def remainder(value: int, step: int) -> str:
    """A value beside its division: 100, no multiple of 16 (100 = 6 x 16 + 4)."""
    return f"{value}, no multiple of {step} ({value} = {value // step} x {step} + {value % step})"


def around(value: int, step: int) -> str:
    """The multiples of `step` on both sides of `value`."""
    below = value // step * step
    return f"{below} or {below + step}" if below else f"{step}"


def yaml(value: object) -> str:
    """As a spec has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", False: "false", True: "true"}[value]
    return str(value)
