"""`fa3gen cache`: where compiled kernels are kept, how much lies there, and pruning it."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated

import typer

from fa3gen.base.wording import counted

if TYPE_CHECKING:
    from fa3gen.compile.cache_contents import Contents, Entry

UNITS = {"h": 3600, "d": 24 * 3600}


def cache(
    prune: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove what was not used for so long: 30d, 12h; 0d removes all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the compile cache: its place, its size, whether it can be written, and what is kept of which module.

    Nothing is ever removed from it but by --prune; deleting it is always safe, and costs compiling anew.
    """
    from fa3gen.compile.cache import cache_directory
    from fa3gen.compile.cache_contents import contents, megabytes
    from fa3gen.compile.cache_contents import prune as remove

    directory = cache_directory()
    if prune is not None:
        removed = remove(contents(directory), time.time() - seconds(prune))
        count = counted(len(removed), "entry", "entries")
        typer.echo(f"removed {count}, {megabytes(sum(entry.size for entry in removed))}", err=as_json)
    found = contents(directory)
    if as_json:
        import json

        typer.echo(json.dumps(document(found), indent=2))
    else:
        _print(found)


def seconds(age: str) -> float:
    """`30d` or `12h` in seconds; UserError for anything else."""
    from fa3gen.base.errors import UserError

    match = re.fullmatch(r"(\d{1,6})([hd])", age)
    if match is None:
        raise UserError(f"--prune {age}: write days or hours, such as 30d or 12h")
    return float(match.group(1)) * UNITS[match.group(2)]


def document(found: Contents) -> dict[str, object]:
    """The whole of it in types that JSON has; bytes, and seconds since 1970."""
    return {
        "directory": str(found.directory),
        "size": found.size,
        "writable": not found.unwritable,
        "entries": [
            {"module": entry.module, "dsl": entry.dsl, "size": entry.size, "used": entry.used, "path": str(entry.path)}
            for entry in found.entries
        ],
    }


def _print(found: Contents) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fa3gen.compile.cache_contents import megabytes

    console = Console(highlight=False)
    state = f"cannot be written: {found.unwritable}" if found.unwritable else "can be written"
    console.print(Text(f"{found}; {state}"), soft_wrap=True)
    modules: dict[str, list[Entry]] = {}
    for entry in found.entries:
        modules.setdefault(entry.module, []).append(entry)
    if not modules:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("module", overflow="fold")
    for name in ("entries", "size", "DSL", "last used"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, entries in sorted(modules.items()):
        used = time.strftime("%Y-%m-%d", time.localtime(max(entry.used for entry in entries)))
        versions = ", ".join(sorted({entry.dsl for entry in entries}))
        table.add_row(Text(name), str(len(entries)), megabytes(sum(entry.size for entry in entries)), versions, used)
    console.print(table)
