"""`fa3gen matrix`: what exists and what is proven."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fa3gen.cli import completion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.text import Text

    from fa3gen.inspect.matrix import Row


def matrix(
    specs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC", autocompletion=completion.specs, help="Spec files, spec stems or module stems; all if none."
        ),
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
    from fa3gen.base.errors import UserError
    from fa3gen.cli.advice import note
    from fa3gen.design.workspace import Workspace
    from fa3gen.inspect import matrix as table

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
    if not specs:
        note(workspace.survey()[1])
    found = table.rows(workspace, specs or ())
    if as_json:
        typer.echo(json.dumps(table.document(found), indent=2))
    elif found:
        _print(found)
    else:
        typer.echo(f"There is no spec in {workspace.specs_dir}.")


def _print(found: Sequence[Row]) -> None:
    """A table for each spec; what all of its modules have in common, proof among it, stands once above them."""
    from itertools import groupby

    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fa3gen.inspect import matrix as table

    console = Console(width=None if sys.stdout.isatty() else 1000, highlight=False, markup=False)
    for (source, *headings), group in groupby(found, key=lambda row: [row.source, *table.columns(row)]):
        proofs = (headings.index("GPU"), headings.index("CPU model"))
        texts = [
            [_styled(row, heading, text) for heading, text in zip(headings, table.cells(row), strict=True)]
            for row in group
        ]
        common = [index for index in range(1, proofs[-1] + 1) if len({str(row[index]) for row in texts}) == 1]
        console.print(Text(source, "bold"))
        features = [f"{headings[i]}: {texts[0][i]}" for i in common if i not in proofs and str(texts[0][i])]
        for words in (
            Text("; ".join(features)),
            *(Text.assemble(f"{headings[i]}: ", texts[0][i]) for i in common if i in proofs),
        ):
            console.print(words)
        shown = [index for index in range(len(headings)) if index not in common]
        view = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for index in shown:
            view.add_column(headings[index], no_wrap=index == 0, overflow="fold")
        for row in texts:
            view.add_row(*(row[index] for index in shown))
        console.print(view)
    console.print(Text(table.summary(found), "bold"))


def _styled(row: Row, heading: str, text: str) -> Text:
    """A cell; proofs are coloured by what they say."""
    from rich.text import Text

    proof = {"GPU": row.gpu, "CPU model": row.cpu}.get(heading)
    styles = {"proven": "green", "failed": "bold red", "stale": "yellow", "none": "dim"}
    return Text(text, styles[proof.state] if proof else "")
