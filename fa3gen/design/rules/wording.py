"""Phrases that several rules share."""

from __future__ import annotations

from collections.abc import Sequence


def terms(parts: Sequence[tuple[str, int]]) -> str:
    """A sum with its names: O 64 + S 32."""
    return " + ".join(f"{name} {count}" for name, count in parts)


def remainder(value: int, step: int) -> str:
    """A value beside its division: 100, no multiple of 16 (100 = 6 x 16 + 4)."""
    return f"{value}, no multiple of {step} ({value} = {value // step} x {step} + {value % step})"


def around(value: int, step: int) -> str:
    """The multiples of `step` on both sides of `value`."""
    below = value // step * step
    return f"{below} or {below + step}" if below else f"{step}"
