"""Words that messages have in common."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 module`, `2 modules`; `2 entries` with the plural given."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str]) -> str:
    """`q`, `q and k`, `q, k and v`; nothing for no names."""
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)
