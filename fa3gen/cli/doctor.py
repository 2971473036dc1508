"""`fa3gen doctor`: what works on this machine, what does not, and how to mend it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from fa3gen.doctor.doctor import EvidenceSummary, Report

_STYLES = {"ok": "green", "note": "yellow", "broken": "bold red"}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Say what will and will not work on this machine, and how to mend it.

    Looks at packages, driver and GPU and compiles a trial kernel; takes a few seconds. Exits with 1 when something is
    broken that fa3gen itself needs; a machine without a GPU is not broken.
    """
    from fa3gen.doctor.doctor import examine

    report = examine(_generated_dir())
    if as_json:
        import json

        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        _print(report)
    if not report.healthy:
        raise typer.Exit(1)


def _generated_dir() -> Path | None:
    """The workspace's modules, or those of the package. None when even finding them needs what is broken."""
    try:
        from fa3gen.design.workspace import Workspace
    except ImportError:
        return None
    workspace = Workspace.find()
    if workspace.generated_dir.is_dir():
        return workspace.generated_dir
    bundled = workspace.bundled / "generated"
    return bundled if bundled.is_dir() else None


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in report.checks:
        found = f"{check.found}\n-> {check.mend}" if check.mend else check.found
        table.add_row(Text(check.name), Text(check.status, style=_STYLES[check.status]), Text(found))
    console.print(table)
    console.print("\nWhat works here:", style="bold")
    for ability in report.abilities:
        if ability.works:
            console.print(Text.assemble(("  yes  ", "green"), ability.name))
        else:
            console.print(Text.assemble(("  no   ", "yellow"), f"{ability.name}: {ability.why}"))
            if ability.mend:
                console.print(Text(f"       -> {ability.mend}"))
    if report.evidence is not None:
        _print_evidence(console, report.evidence)


def _print_evidence(console: Console, evidence: EvidenceSummary) -> None:
    from rich.text import Text

    total = len(evidence.verified) + len(evidence.other_dsl) + len(evidence.unverified)
    installed = f"the installed DSL ({evidence.dsl})" if evidence.dsl else "the installed DSL (none)"
    console.print("\nGPU evidence of the generated modules:", style="bold")
    console.print(Text(f"  {len(evidence.verified)} of {total} verified with {installed}"))
    if evidence.other_dsl:
        versions = ", ".join(sorted(set(evidence.other_dsl.values())))
        console.print(Text(f"  {len(evidence.other_dsl)} verified with another DSL ({versions})"))
    if evidence.unverified:
        console.print(Text(f"  {len(evidence.unverified)} not verified on a GPU: {', '.join(evidence.unverified)}"))
