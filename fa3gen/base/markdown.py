"""Pieces of Markdown pages: tables, speeds in them, and text between the markers of a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fa3gen.base.errors import UserError


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return head + [f"| {' | '.join(row)} |" for row in rows]


def speed(tflops: float | None) -> str:
    """Print a speed as precisely as it is repeatable: whole TFLOP/s from 10 on."""
    if tflops is None:
        return ""
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"


def between(text: str, name: str, begin: str, written: str, end: str) -> str:
    """Return the text of the file `name` with `written` between its markers; UserError without these."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise UserError(f"{name} holds no {begin} ... {end}; put both where the table should stand")
    return f"{before}{begin}\n{written}{end}{after}"
