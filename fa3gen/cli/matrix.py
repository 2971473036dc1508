"""`fa3gen matrix`: what exists and what is proven."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa3gen.matrix import Row


def matrix(
    specs: Annotated[
        list[str] | None,
        typer.Argument(metavar="SPEC", help="Spec files, spec stems or module stems; all if none."),
    ] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the text of docs/matrix.md.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Print nothing but whether docs/matrix.md is up to date; exit 1 if not.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, one object per module.")] = False,
) -> None:
    """Show every module, what its spec chooses, and what is proven of it.

    Proof is a record of this exact file: verified on a GPU, executed on the CPU model of sm_90a, stale where the file
    has changed since, unverified without one. Tests that were run without leaving a record count for nothing.
    """
    from fa3gen import matrix as table
    from fa3gen.errors import UserError
    from fa3gen.workspace import Workspace

    workspace = Workspace.find()
    if specs and (as_markdown or check):
        raise UserError(f"docs/matrix.md is about all modules; leave out {', '.join(specs)}")
    if check:
        problem = table.check(workspace)
        typer.echo(problem or f"{table.DOCUMENT} is what specs and records say", err=problem is not None)
        raise typer.Exit(0 if problem is None else 1)
    if as_markdown:
        typer.echo(table.markdown(workspace), nl=False)
        return
    found = table.rows(workspace, specs or ())
    if as_json:
        typer.echo(json.dumps(table.document(found), indent=2))
    elif found:
        _print(found)
    else:
        typer.echo(f"There is no spec in {workspace.specs_dir}.")


def _print(found: Sequence[Row]) -> None:
    """A table for each spec: with all modules in one, what a spec fixes would be said over and over."""
    from itertools import groupby

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fa3gen import matrix as table

    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False, markup=False)
    headings = table.columns()
    for source, group in groupby(found, key=lambda row: row.source):
        rows = list(group)
        texts = [table.cells(row) for row in rows]
        varying = [index for index in range(1, len(headings)) if len({row[index] for row in texts}) > 1]
        shown = [
            0,
            *(index for index in varying if index < _proofs(headings)),
            *range(_proofs(headings), len(headings)),
        ]
        fixed = [f"{headings[index]}: {texts[0][index]}" for index in range(1, _proofs(headings)) if index not in shown]
        console.print(Text.assemble((source, "bold"), *(f"; {text}" for text in fixed if not text.endswith(": "))))
        view = Table(*(headings[index] for index in shown), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        view.columns[0].no_wrap = True
        for row, cells in zip(rows, texts, strict=True):
            styles = {_proofs(headings): _style(row.gpu.state), _proofs(headings) + 1: _style(row.cpu.state)}
            view.add_row(*(Text(cells[index], styles.get(index, "")) for index in shown))
        console.print(view)
    console.print(Text(table.summary(found), "bold"))


def _proofs(headings: Sequence[str]) -> int:
    """Where the columns of features end."""
    return list(headings).index("GPU")


def _style(state: str) -> str:
    return {"proven": "green", "failed": "bold red", "stale": "yellow"}.get(state, "dim")
