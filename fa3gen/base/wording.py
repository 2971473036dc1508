"""Words that messages have in common."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 module`, `2 modules`; `2 entries` with the plural given."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
