"""`fa3gen diff`: what differs between two specs, or between two revisions of one."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fa3gen.cli import completion

if TYPE_CHECKING:
    from rich.console import Console

    from fa3gen.design.workspace import Workspace
    from fa3gen.inspect.difference.model import Difference


def diff(
    specs: Annotated[
        list[str],
        typer.Argument(
            metavar="A [B]",
            autocompletion=completion.specs,
            help="Two specs or modules, by stem or file; with --rev only one.",
        ),
    ],
    rev: Annotated[
        list[str] | None,
        typer.Option(
            "--rev", metavar="REVISION", help="Compare A at a git revision with A now, or at two: OLD..NEW, or twice."
        ),
    ] = None,
    side_by_side: Annotated[
        bool | None,
        typer.Option("--side-by-side/--unified", help="How to print source; side by side in a wide terminal."),
    ] = None,
    source: Annotated[bool, typer.Option("--source/--no-source", help="Whether to compare generated modules.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what differs: fields of the specs, what follows in the plans, and the source of the generated modules.

    Modules are rendered in memory. Specs with several modules are paired by the fields that they vary, so k5_d64 is
    compared with k6_d64 and so on.

    Exits with 1 when there is a difference, with 0 when there is none.
    """
    from fa3gen.design.workspace import Workspace

    found = _difference(specs, rev or [], Workspace.find(), with_source=source)
    if as_json:
        from fa3gen.inspect.difference.text import document

        typer.echo(json.dumps(document(found), indent=2))
    else:
        _print(found, side_by_side, with_source=source)
    if found.differs:
        raise typer.Exit(1)


def _difference(specs: list[str], revisions: list[str], workspace: Workspace, *, with_source: bool) -> Difference:
    from fa3gen.base.errors import UserError

    if revisions:
        from fa3gen.inspect.difference.revisions import difference as between_revisions
        from fa3gen.inspect.difference.revisions import revisions_of

        if len(specs) != 1:
            raise UserError(f"--rev compares one spec with itself; name one, not {', '.join(specs)}")
        old, new = revisions_of(revisions)
        return between_revisions(specs[0], old, new, workspace, with_source=with_source)
    from fa3gen.inspect.difference.sides import difference

    if len(specs) == 1:
        raise UserError(
            f"name a second spec to compare {specs[0]} with, or a revision: `fa3gen diff {specs[0]} --rev HEAD`"
        )
    if len(specs) > 2:
        raise UserError(f"two specs can be compared, not {len(specs)}: {', '.join(specs)}")
    return difference(specs[0], specs[1], workspace, with_source=with_source)


def _print(found: Difference, beside: bool | None, *, with_source: bool) -> None:
    from fa3gen.inspect.difference.side_by_side import NARROWEST
    from fa3gen.inspect.difference.text import report

    console = _console()
    if beside is None:
        beside = sys.stdout.isatty() and console.width >= NARROWEST
    for item in report(found, with_source=with_source, width=console.width if beside else None):
        console.print(item, soft_wrap=not beside)


def _console() -> Console:
    from rich.console import Console

    from fa3gen.inspect.difference.text import WIDTH_OF_A_PIPE

    wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if wide else WIDTH_OF_A_PIPE, highlight=False, markup=False)
