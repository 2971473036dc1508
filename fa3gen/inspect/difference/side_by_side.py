"""Two texts beside each other, hunk by hunk, with their line numbers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from fa3gen.inspect.difference.model import SourceChange

NARROWEST = 160  # columns of a terminal from which on two columns of code are a pleasure to read
CONTEXT = 3  # lines around a change, as in a unified diff


@dataclass(frozen=True)
class Line:
    """One row: a line of either side with its number from 1, None where that side has no line here."""

    old_number: int | None
    old: str | None
    new_number: int | None
    new: str | None

    @property
    def same(self) -> bool:
        """Whether both sides have this line."""
        return self.old == self.new


def hunks(old: str, new: str) -> Iterator[list[Line]]:
    """The changed places with the lines around them; replaced lines stand beside what replaces them, in order."""
    before, after = old.splitlines(), new.splitlines()
    matcher = difflib.SequenceMatcher(None, before, after)  # as difflib's own unified diff has it
    for group in matcher.get_grouped_opcodes(CONTEXT):
        rows: list[Line] = []
        for _, low, high, new_low, new_high in group:
            for index in range(max(high - low, new_high - new_low)):
                left, right = low + index, new_low + index
                rows.append(
                    Line(
                        left + 1 if left < high else None,
                        before[left] if left < high else None,
                        right + 1 if right < new_high else None,
                        after[right] if right < new_high else None,
                    )
                )
        yield rows


def table(change: SourceChange, width: int) -> Table:
    """Both texts in `width` columns; long lines are folded, and dots stand between hunks.

    As in `diff -y`, `|` stands between lines that differ, `<` and `>` beside those of one side.
    """
    numbers = len(str(max(change.old.count("\n"), change.new.count("\n")) + 1))
    column = (width - 2 * numbers - 6) // 2
    view = Table(box=None, padding=(0, 1, 0, 0), width=width, header_style="bold")
    for index, name in enumerate((change.old_name, change.new_name)):
        if index:
            view.add_column("", width=1)
        view.add_column("", justify="right", width=numbers, no_wrap=True, style="dim")
        view.add_column(Text(name), width=column, overflow="fold")
    for index, rows in enumerate(hunks(change.old, change.new)):
        if index:
            view.add_row("", Text("...", "cyan"), "", "", Text("...", "cyan"))
        for row in rows:
            view.add_row(*_cells(row))
    return view


def _cells(row: Line) -> tuple[Text, ...]:
    old_style, new_style = ("", "") if row.same else ("red", "green")
    mark = " " if row.same else "<" if row.new is None else ">" if row.old is None else "|"
    return (
        Text("" if row.old_number is None else str(row.old_number)),
        _code(row.old, row.new, old_style),
        Text(mark),
        Text("" if row.new_number is None else str(row.new_number)),
        _code(row.new, row.old, new_style),
    )


def _code(line: str | None, other: str | None, style: str) -> Text:
    """A line, with bold type where it differs from the one beside it, if the two are much alike."""
    text = Text(line or "", style)
    if line is None or other is None or line == other:
        return text
    matcher = difflib.SequenceMatcher(None, other, line, autojunk=False)
    if matcher.ratio() >= 0.6:
        for kind, _, _, low, high in matcher.get_opcodes():
            if kind in ("replace", "insert"):
                text.stylize("bold underline", low, high)
    return text
