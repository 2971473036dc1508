"""`fa3gen refresh`: the pages made from specs, modules and records, and what only a run of the modules renews."""

from __future__ import annotations

from typing import Annotated

import typer


def refresh(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 and name the pages that are out of date.")
    ] = False,
) -> None:
    """Renew everything that is made from specs, modules and records and needs no GPU, and say what is stale.

    These are generated/EVIDENCE.md, the tables in README and docs, the excerpts and pictures of docs/ladder.md. Figures
    of a file that has changed since they were measured are left out, and the page says so. Records and the dispatch
    table are not touched: what renews them is printed. Run it after `fa3gen render`.
    """
    from fa3gen.base.errors import UserError
    from fa3gen.design.workspace import Workspace
    from fa3gen.inspect import pages

    workspace = Workspace.find()
    if not (workspace.specs_dir.is_dir() and workspace.generated_dir.is_dir()):
        raise UserError(
            f"there is nothing to renew: {workspace.root} lies in no checkout or workspace, which has specs/ and "
            "generated/; run it there"
        )
    if check:
        problems = pages.check(workspace)
        for problem in problems:
            typer.echo(problem, err=True)
        if not problems:
            typer.echo("every page is what specs, modules and records say")
    else:
        problems = []
        changed = pages.refresh(workspace)
        for path in changed:
            typer.echo(f"wrote {workspace.shown(path)}")
        if not changed:
            typer.echo("every page is what specs, modules and records say; nothing was written")
    for notice in pages.stale(workspace):
        typer.echo(f"stale: {notice}")
    if problems:
        raise typer.Exit(1)
