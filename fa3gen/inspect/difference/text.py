"""A difference in words: lines of styled text for a terminal, a document for JSON."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from fa3gen.inspect.difference import side_by_side
from fa3gen.inspect.difference.comparing import unified
from fa3gen.inspect.difference.model import Difference, FieldChange, PairDifference, Side, SourceChange

OLD, NEW, DIM, TITLE = "red", "green", "dim", "bold"
NOTHING = "(none)"
WIDTH_OF_A_PIPE = 260  # a pipe or a file has none, and what is printed side by side is not folded there
SHORT = 100  # characters that an `old -> new` may take in one line; longer ones stand below each other


def report(found: Difference, *, with_source: bool, width: int | None) -> Iterator[RenderableType]:
    """Everything, line by line; source side by side in `width` columns, or unified where it is None.

    What several pairs have in common is said once, before their sources.
    """
    for note in found.notes:
        yield Text(f"note: {note}", DIM)
    for change in found.spec_texts:
        yield Text()
        yield from _source(change, width)
    for _, group in groupby(found.pairs, key=lambda pair: pair.decided):
        yield from _group(list(group), with_source=with_source, width=width)
    for which, stems in (("first", found.only_old), ("second", found.only_new)):
        if stems:
            yield Text(f"only on the {which} side: {', '.join(stems)}")


def printed(found: Difference, *, with_source: bool) -> str:
    """What `fa3gen diff` prints into a pipe."""
    written = io.StringIO()
    console = Console(file=written, width=WIDTH_OF_A_PIPE, highlight=False, markup=False, color_system=None)
    for item in report(found, with_source=with_source, width=None):
        console.print(item, soft_wrap=True)
    return written.getvalue()


def _group(pairs: Sequence[PairDifference], *, with_source: bool, width: int | None) -> Iterator[RenderableType]:
    for pair in pairs:
        yield Text.assemble((pair.old.name, OLD), " -> ", (pair.new.name, NEW), style=TITLE)
    yield from _decided(pairs[0])
    for pair in pairs:
        for note in dict.fromkeys((*pair.old.notes, *pair.new.notes)):
            yield Text(f"note: {note}", DIM)
        if with_source:
            yield from _pair_source(pair, width, alone=len(pairs) == 1)
    yield Text()


def _decided(pair: PairDifference) -> Iterator[Text]:
    """What differs in spec and plan."""
    if pair.old.spec is None or pair.new.spec is None:
        return
    if not (pair.fields or pair.plan or pair.steps):
        yield Text("same spec, same plan")
    if pair.fields:
        yield Text("\nspec", TITLE)
        yield from _changes([(change.field, _value(change.old), _origin(change)) for change in pair.fields])
    for topic, group in groupby(pair.plan, key=lambda change: change.topic):
        yield Text(f"\n{topic}", TITLE)
        yield from _changes([(change.what, change.old, change.new) for change in group])
    if pair.steps:
        yield Text("\ntimeline", TITLE)
        marks = {"same": ("  ", DIM), "removed": ("- ", OLD), "added": ("+ ", NEW)}
        for step in pair.steps:
            mark, style = marks[step.change]
            yield Text(f"  {mark}{step.text}", style)


def _origin(change: FieldChange) -> str | None:
    """The new value, with the spec file that it comes from where that is a base."""
    value = _value(change.new)
    return f"{value}, from {change.base}" if change.base else value


def _value(value: Any) -> str | None:
    """A field as YAML has it."""
    if value is None:
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _changes(rows: Sequence[tuple[str, str | None, str | None]]) -> Iterator[Text]:
    """`name  old -> new`; long values below each other."""
    widest = max(len(name) for name, _, _ in rows)
    for name, old, new in rows:
        before, after = old or NOTHING, new or NOTHING
        if before == after:
            yield Text.assemble(f"  {name.ljust(widest)}  {before}, on both sides")
        elif len(before) + len(after) <= SHORT:
            yield Text.assemble(f"  {name.ljust(widest)}  ", (before, OLD), " -> ", (after, NEW))
        else:
            yield Text.assemble(f"  {name.ljust(widest)}  ", (f"- {before}", OLD))
            yield Text.assemble(f"  {' ' * widest}  ", (f"+ {after}", NEW))


def _pair_source(pair: PairDifference, width: int | None, *, alone: bool) -> Iterator[RenderableType]:
    if pair.source is not None:
        yield Text("\nsource" if alone else f"\nsource of {pair.old.stem} -> {pair.new.stem}", TITLE)
        yield from _source(pair.source, width)
    elif pair.old.module is not None and pair.new.module is not None:
        yield Text("same source" if alone else f"same source: {pair.new.stem}")


def _source(change: SourceChange, width: int | None) -> Iterator[RenderableType]:
    if width is not None:
        yield side_by_side.table(change, width)
        return
    lines = Text()  # one text: printing line by line takes ten times as long
    for number, line in enumerate(unified(change)):
        style = TITLE if number < 2 else {"-": OLD, "+": NEW, "@": "cyan"}.get(line[:1], "")
        lines.append("\n" if number else "").append(line, style)
    yield lines


# JSON


def document(found: Difference) -> dict[str, Any]:
    """The same as JSON values; `source` holds a unified diff, null where there is none to show."""
    return {
        "version": 1,
        "differ": found.differs,
        "notes": list(found.notes),
        "only_old": list(found.only_old),
        "only_new": list(found.only_new),
        "specs": [_source_document(change) for change in found.spec_texts],
        "pairs": [_pair_document(pair) for pair in found.pairs],
    }


def _pair_document(pair: PairDifference) -> dict[str, Any]:
    return {
        "differ": pair.differs,
        "old": _side_document(pair.old),
        "new": _side_document(pair.new),
        "fields": [vars(change) for change in pair.fields],
        "plan": [vars(change) for change in pair.plan],
        "steps": [vars(step) for step in pair.steps],
        "source": None if pair.source is None else _source_document(pair.source),
    }


def _side_document(side: Side) -> dict[str, Any]:
    return {
        "stem": side.stem,
        "spec": side.source,
        "summary": side.summary,
        "revision": side.revision or None,
        "notes": list(side.notes),
    }


def _source_document(change: SourceChange) -> dict[str, Any]:
    return {"old_name": change.old_name, "new_name": change.new_name, "diff": "\n".join(unified(change))}
