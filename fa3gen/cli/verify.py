"""`fa3gen verify`: is it what the spec renders to, does it compile as planned, does it compute attention."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from fa3gen.specfile import Variant
    from fa3gen.verification import Verification
    from fa3gen.verify import Errors
    from fa3gen.workspace import Workspace

CASE_TABLES = 4  # with more modules than this, only the summary is printed


def verify(
    specs: Annotated[
        list[str] | None,
        typer.Argument(metavar="SPEC", help="Spec files, spec stems or generated stems; none means all."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Write evidence records, EVIDENCE.md and the README's table.")
    ] = False,
    refresh_evidence: Annotated[
        bool, typer.Option("--refresh-evidence", help="Only render EVIDENCE.md and the README's table; run nothing.")
    ] = False,
    speed: Annotated[bool, typer.Option(help="With --evidence: measure TFLOP/s at 4k and 16k as well.")] = True,
    seed: Annotated[int | None, typer.Option(help="Seed of the inputs; fresh unless given.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds one module may take on the GPU.")] = 120.0,
) -> None:
    """Render, compile and run modules, and compare them with float64 attention.

    Without a Hopper GPU everything else is done, and the summary says that nothing was run.
    """
    from rich.console import Console

    from fa3gen import gpu
    from fa3gen.workspace import Workspace

    workspace, errors = Workspace.find(), Console(stderr=True)
    if refresh_evidence:
        _refresh(workspace, errors)
        return
    variants = workspace.select(specs or ())
    _render_missing(workspace, variants, errors)
    checked = _check_all(workspace, variants, errors)
    device = gpu.hopper_device()
    if device is not None:
        session = _Session(workspace, errors, device, evidence, seed, timeout, speed)
        checked = session.run_all(checked)
    else:
        reason = f"no Hopper GPU: {gpu.why_no_hopper()}"
        checked = [dataclasses.replace(entry, run=dataclasses.replace(entry.run, detail=reason)) for entry in checked]
    failed = any(entry.failed for entry in checked)
    if json_output:
        # null where nothing failed and something was not run: neither passed nor failed
        passed = False if failed else (True if all(entry.run.passed for entry in checked) else None)
        document = {"passed": passed, "run_on_gpu": device is not None, "modules": [e.as_dict() for e in checked]}
        typer.echo(json.dumps(document, indent=2, sort_keys=True))
    else:
        _show(Console(), checked)
    if evidence:
        _refresh(workspace, errors)
    if failed or any(entry.run.passed is None for entry in checked if device is not None):
        raise typer.Exit(1)


def _render_missing(workspace: Workspace, variants: list[Variant], errors: Console) -> None:
    """Write the modules that are not there yet; those that are there are only compared with their rendering."""
    missing = [variant for variant in variants if not workspace.module_path(variant.stem).exists()]
    if missing:
        from fa3gen.render import remember, render_all, write

        rendered = render_all(missing, workspace)
        for item in rendered:
            write(item)
            errors.print(f"rendered {item.path}", markup=False, highlight=False, soft_wrap=True)
        remember(rendered, workspace)


def _refresh(workspace: Workspace, errors: Console) -> None:
    from fa3gen import evidence

    for path in evidence.refresh(workspace):
        errors.print(f"wrote {path.relative_to(workspace.root)}", highlight=False)


def _check_all(workspace: Workspace, variants: list[Variant], errors: Console) -> list[Verification]:
    """Do what needs no GPU: compare every file with its rendering, compile it, compare its facts with the plan."""
    from fa3gen import evidence
    from fa3gen.verification import Stage, Verification, check_compile, check_render, compile_all

    say = _progress(errors, len(variants), "compiled")
    paths = {variant.stem: workspace.module_path(variant.stem) for variant in variants}
    digests = {stem: evidence.sha256(path) for stem, path in paths.items() if path.is_file()}
    renders = {variant.stem: check_render(variant, workspace) for variant in variants}
    outcomes = compile_all(variants, workspace, say)
    checked = []
    for variant in variants:
        stage, facts, ptxas = check_compile(variant, outcomes.get(variant.stem))
        checked.append(
            Verification(
                variant=variant,
                render=renders[variant.stem],
                compile=stage,
                run=Stage(None),
                facts=facts,
                ptxas=ptxas,
                source_sha256=digests.get(variant.stem),
            )
        )
    return checked


def _progress(errors: Console, total: int, verb: str) -> Callable[[str], None]:
    """Count on stderr; nothing for a single module."""
    count = 0

    def say(stem: str) -> None:
        nonlocal count
        count += 1
        if total > 1:
            errors.print(f"[{count}/{total}] {verb} {stem}", markup=False, highlight=False)

    return say


@dataclass
class _Session:
    """Runs modules on one GPU in one process, each under a watchdog, and writes records as it goes."""

    workspace: Workspace
    errors: Console
    device: torch.device
    evidence: bool
    seed: int | None
    timeout: float
    speed: bool = True
    at: str = field(default="", init=False)  # the case that is running

    def run_all(self, checked: list[Verification]) -> list[Verification]:
        """Run all until one leaves the GPU unusable; those after it stay not run, and say so."""
        from fa3gen.verification import Stage
        from fa3gen.verify import DeviceLost

        say = _progress(self.errors, len(checked), "ran")
        done: list[Verification] = []
        for number, entry in enumerate(checked):
            if not self.workspace.module_path(entry.variant.stem).exists():
                done.append(dataclasses.replace(entry, run=Stage(None, "there is no file to run")))
                continue
            try:
                with self._watchdog(entry):
                    done.append(self._run(entry))
            except DeviceLost as lost:
                text = f"{self.at}: the launch left the GPU unusable: {lost}"
                done.append(dataclasses.replace(entry, run=Stage(False, text)))
                self._record_loss(entry, text)
                reason = f"{entry.variant.stem} left the GPU unusable for this process; run this one again"
                done += [dataclasses.replace(rest, run=Stage(None, reason)) for rest in checked[number + 1 :]]
                break
            say(entry.variant.stem)
        return done

    def _run(self, entry: Verification) -> Verification:
        """Run one module's cases and checks; with --evidence measure its speed and write its record."""
        from fa3gen import evidence
        from fa3gen.loading import load_file
        from fa3gen.verification import Stage, record_of, speeds
        from fa3gen.verify import DeviceLost, verify_module

        variant = entry.variant
        try:
            module = load_file(self.workspace.module_path(variant.stem))
        except Exception as error:  # a file edited by hand may raise anything
            text = f"cannot be imported: {type(error).__name__}: {error}"
            self._record_loss(entry, text)
            return dataclasses.replace(entry, run=Stage(False, text))
        report = verify_module(
            module, variant.spec, self.device, stem=variant.stem, seed=self.seed, on_case=self._on_case
        )
        entry = dataclasses.replace(entry, report=report, run=Stage(report.passed, "; ".join(report.failures)))
        if self.evidence:
            self._on_case("speed")
            try:
                tflops = speeds(variant, module, self.device) if self.speed and report.passed else {}
            except RuntimeError as error:  # a launch that works at small sizes may still fail at large ones
                raise DeviceLost(str(error)) from error
            evidence.write(self.workspace, record_of(entry, self.workspace, tflops))
        return entry

    def _on_case(self, name: str) -> None:
        self.at = name

    def _record_loss(self, entry: Verification, text: str) -> None:
        """Record a run that left no report as what it is, a failure."""
        from fa3gen import evidence
        from fa3gen.verification import record_of

        if self.evidence:
            record = record_of(entry, self.workspace, {}, seed=self.seed or 0, failures=[text])
            evidence.write(self.workspace, record)

    @contextlib.contextmanager
    def _watchdog(self, entry: Verification) -> Iterator[None]:
        """End the process when a kernel does not: a deadlocked launch cannot be called back."""

        def give_up() -> None:
            text = f"{self.at}: did not end in {self.timeout:g} s (a pipeline that waits for ever?)"
            print(f"{entry.variant.stem}: {text}; the modules after it were not run", file=sys.stderr, flush=True)
            try:
                self._record_loss(entry, text)
            except Exception as error:  # would end this thread only, and the process would wait for ever
                print(f"{entry.variant.stem}: no record was written: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(1)

        timer = threading.Timer(self.timeout, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


# -- tables


def _show(console: Console, checked: list[Verification]) -> None:
    """Print the cases of a few modules, one line for each module, what failed, and what it all amounts to."""
    for entry in checked:
        if entry.report is not None and len(checked) <= CASE_TABLES:
            console.print(_case_table(entry))
    console.print(_summary_table(checked))
    for entry in checked:
        for name in ("render", "compile", "run"):
            stage = getattr(entry, name)
            if stage.passed is False or (stage.passed is None and name != "run"):
                detail = f"{entry.variant.stem}: {name} {stage.word}: {stage.detail}"
                console.print(detail, markup=False, highlight=False, soft_wrap=True)
    console.print(_verdict(checked), style="bold", markup=False, highlight=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _pair(found: Errors | None) -> tuple[str, str]:
    return (_number(found.max_abs), _number(found.relative)) if found else ("", "")


def _case_table(entry: Verification) -> Table:
    """Return the errors of one module, case by case, beside those of PyTorch."""
    from rich.table import Table

    assert entry.report is not None
    report = entry.report
    table = Table(title=f"{report.stem} on {report.device}, seed {report.seed}", title_justify="left")
    table.add_column("case")
    table.add_column("shape")
    for name in ("O max", "O rel", "torch max", "torch rel", "limit max", "worst block", "LSE max", "LSE rel"):
        table.add_column(name, justify="right")
    table.add_column("")
    for case in report.cases:
        block = "" if case.o_block_ratio is None else f"{case.o_block_ratio:.0%}"
        numbers = (*_pair(case.o_error), *_pair(case.o_yardstick), _number(case.o_max_abs_limit), block)
        verdict = "passed" if case.passed else "[red]FAILED[/]"
        table.add_row(case.name, case.shape, *numbers, *_pair(case.lse_error), verdict)
    for check in report.checks:
        verdict = {True: "passed", False: "[red]FAILED[/]", None: "NOT run"}[check.passed]
        table.add_row(check.name, *[""] * 9, verdict)
    return table


def _summary_table(checked: list[Verification]) -> Table:
    from rich.table import Table

    table = Table()
    for name in ("module", "render", "compile", "run on GPU", "registers", "spills"):
        table.add_column(name, justify="right" if name in ("registers", "spills") else "left")
    colors = {True: "green", False: "red", None: "yellow"}
    for entry in checked:
        words = [f"[{colors[s.passed]}]{s.word}[/]" for s in (entry.render, entry.compile, entry.run)]
        facts = [str(entry.facts.registers), str(entry.facts.spills)] if entry.facts else ["", ""]
        table.add_row(entry.variant.stem, *words, *facts)
    return table


def _verdict(checked: list[Verification]) -> str:
    """Say in one line what was and what was not shown; nobody should take a compile for a verification."""
    total = len(checked)
    modules = "module" if total == 1 else "modules"
    failed = sum(entry.failed for entry in checked)
    ran = [entry for entry in checked if entry.run.passed is not None]
    if not ran:
        reason = checked[0].run.detail
        compiled = sum(entry.compile.passed is True for entry in checked)
        text = f"NOT run on a GPU ({reason}). {compiled} of {total} {modules} compiled for sm_90a as planned"
        return f"{text}, {failed} failed; whether their results are right was NOT checked."
    passed = sum(entry.run.passed is True and not entry.failed for entry in checked)
    device = next((entry.report.device for entry in ran if entry.report), "the GPU")
    rest = f", {total - len(ran)} NOT run" if len(ran) < total else ""
    return f"{passed} of {total} {modules} verified on {device}, {failed} failed{rest}."
