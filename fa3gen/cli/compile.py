"""`fa3gen compile`: build generated modules for sm_90a without a GPU, and hold their facts against the plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa3gen.cli import completion

if TYPE_CHECKING:
    from rich.console import Console

    from fa3gen.base.errors import UserError
    from fa3gen.compile.census import Loop, Mismatch
    from fa3gen.compile.compiler import Analysis
    from fa3gen.design.workspace import Workspace
    from fa3gen.generate.expected import Expectation
    from fa3gen.spec.specfile import Variant


@dataclass(frozen=True)
class Outcome:
    """One module: its facts beside the plan's prediction, or why it does not compile."""

    variant: Variant
    expectation: Expectation
    analysis: Analysis | None
    mismatches: tuple[Mismatch, ...]
    error: str


def compile(
    specs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC",
            autocompletion=completion.specs,
            help="Spec files, spec stems or generated stems; all if none.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document with every fact.")] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Modules compiled at once (default: one per CPU).")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option("--keep", metavar="DIR", help="Write PTX, cubin and SASS of each module into DIR.")
    ] = None,
) -> None:
    """Compile generated modules for sm_90a (no GPU needed) and compare their facts with what the plan predicts.

    What is compiled is kept: `fa3gen.load` and `fa3gen.attention` then launch it without compiling.

    Exits with 1 when a fact is not as predicted, with 2 when a module is missing or does not compile.
    """
    from fa3gen.base.errors import UserError
    from fa3gen.cli.advice import warn
    from fa3gen.compile import toolchain
    from fa3gen.design.workspace import Workspace
    from fa3gen.generate.plan import make_plan

    for tool in ("cuobjdump", "nvdisasm"):
        toolchain.find_tool(tool)  # before the seconds that compiling takes
    workspace = Workspace.find()
    variants = workspace.select(specs or ())
    warn(variants)
    _require_modules(workspace, variants)
    expectations = {variant.stem: make_plan(variant).expectation for variant in variants}
    outcomes = build(workspace, variants, expectations, jobs)
    if keep is not None:
        write_artifacts(outcomes, keep)
    if as_json:
        import json

        typer.echo(json.dumps(document(outcomes), indent=2))
    else:
        print_outcomes(outcomes)
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors:
        raise UserError("\n".join(errors))
    if any(outcome.mismatches for outcome in outcomes):
        raise typer.Exit(1)


def _require_modules(workspace: Workspace, variants: Sequence[Variant]) -> None:
    missing = [variant for variant in variants if not workspace.path_of(variant).is_file()]
    if missing:
        raise workspace.not_rendered(missing)


def build(
    workspace: Workspace, variants: Sequence[Variant], expectations: dict[str, Expectation], jobs: int | None
) -> list[Outcome]:
    """Compile and examine every variant's module, several at a time, and keep what `fa3gen.load` needs to launch it.

    Progress goes to standard error.
    """
    from fa3gen.compile.cache import compile_and_keep
    from fa3gen.compile.compiler import analyse, preloaded, side_by_side

    paths = {workspace.path_of(variant): variant for variant in variants}
    with _progress(len(paths)) as advance, preloaded():
        work = lambda path: analyse(compile_and_keep(path))  # noqa: E731
        results = side_by_side(work, list(paths), jobs, lambda path, result: advance(path.stem))
    return [judge(variant, expectations[variant.stem], results[path]) for path, variant in paths.items()]


def judge(variant: Variant, expectation: Expectation, result: Analysis | UserError) -> Outcome:
    """Compare a compiled module with its prediction."""
    from fa3gen.base.errors import UserError
    from fa3gen.compile.census import compare

    if isinstance(result, UserError):
        return Outcome(variant, expectation, None, (), str(result))
    return Outcome(variant, expectation, result, tuple(compare(result.census, expectation)), "")


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error, for more than one module and where a person watches; else silence."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if total < 2 or not console.is_terminal:
        yield lambda stem: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("compiling", total=total)
        yield lambda stem: progress.update(task, advance=1, description=f"compiled {stem}")


def write_artifacts(outcomes: Sequence[Outcome], directory: Path) -> None:
    """Write <stem>.ptx, <stem>.cubin and <stem>.sass for every module that compiled; makes the directory."""
    from fa3gen.base.errors import UserError

    try:
        directory.mkdir(parents=True, exist_ok=True)
        for outcome in outcomes:
            if outcome.analysis is not None:
                base = directory / outcome.variant.stem
                base.with_suffix(".ptx").write_text(outcome.analysis.compiled.ptx)
                base.with_suffix(".cubin").write_bytes(outcome.analysis.compiled.cubin)
                base.with_suffix(".sass").write_text(outcome.analysis.sass)
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}; choose another --keep directory") from None


def document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The whole result, in types that JSON has; sizes in bytes, times in seconds."""
    return {
        "ok": all(outcome.analysis is not None and not outcome.mismatches for outcome in outcomes),
        "modules": [_module_document(outcome) for outcome in outcomes],
    }


def _module_document(outcome: Outcome) -> dict[str, Any]:
    head = {"stem": outcome.variant.stem, "spec": str(outcome.variant.source), "error": outcome.error or None}
    if outcome.analysis is None:
        return head
    compiled = outcome.analysis.compiled
    return {
        **head,
        "mismatches": [asdict(mismatch) for mismatch in outcome.mismatches],
        "dsl": compiled.dsl,
        "ptxas": compiled.ptxas,
        "seconds": round(compiled.seconds, 3),
        "peak_bytes": compiled.peak_bytes,
        "facts": outcome.analysis.census.as_dict(),
    }


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """A table of facts for every module, expected beside found, and the mismatches in words."""
    from rich.console import Console

    console = Console(highlight=False)
    for outcome in outcomes:
        if outcome.analysis is not None:
            _print_outcome(console, outcome)


def _print_outcome(console: Console, outcome: Outcome) -> None:
    from rich.table import Table
    from rich.text import Text

    from fa3gen.compile.census import rows

    assert outcome.analysis is not None
    compiled, census = outcome.analysis.compiled, outcome.analysis.census
    memory = "" if compiled.peak_bytes is None else f", {compiled.peak_bytes / 2**20:.0f} MiB"
    console.print(
        Text.assemble(
            (outcome.variant.stem, "bold"),
            f"  {compiled.seconds:.1f} s{memory}, DSL {compiled.dsl}, ptxas {compiled.ptxas or 'unknown'}",
        )
    )
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    table.add_column("  fact", no_wrap=True)
    table.add_column("expected", justify="right")
    table.add_column("found", overflow="fold")
    for row in rows(census, outcome.expectation):
        style = "red" if row.ok is False else ""
        table.add_row(Text(f"  {row.fact}"), Text(row.expected or ""), Text(row.found, style=style))
    console.print(table)
    for loop_line in loop_lines(outcome.analysis):
        console.print(Text(f"  {loop_line}", style="dim"))
    if outcome.mismatches:
        for mismatch in outcome.mismatches:
            console.print(Text(f"  MISMATCH {mismatch}", style="bold red"))
    else:
        console.print(Text("  as predicted", style="green"))
    console.print()


def _multiply_adds(loop: Loop) -> str:
    """Of a loop that multiplies on threads and not on the tensor cores, and how many have all operands in one bank."""
    if loop.gmma or not loop.ffma:
        return ""
    return f", {loop.ffma} FFMA" + (f", {loop.one_bank} in one bank" if loop.one_bank else "")


def loop_lines(analysis: Analysis) -> list[str]:
    """The innermost loops in words: for every kernel those that do more than wait, the longest first, three at most."""
    lines = []
    for kernel in analysis.census.kernels:
        working = [loop for loop in kernel.sass.loops if loop.innermost and not loop.waits]
        for loop in sorted(working, key=lambda loop: -loop.instructions)[:3]:
            where = f"{kernel.label}: " if len(analysis.census.kernels) > 1 else ""
            lines.append(
                f"{where}loop at 0x{loop.address:x}: {loop.instructions} SASS instructions, {loop.gmma} GMMA, "
                f"{loop.ex2} EX2{_multiply_adds(loop)}"
            )
    return lines
