"""`fa3gen verify`: is it what the spec renders to, does it compile as planned, does it compute attention."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa3gen.base.errors import UserError
from fa3gen.base.wording import counted
from fa3gen.cli import completion

if TYPE_CHECKING:
    import torch
    from rich.console import Console, Group
    from rich.table import Table

    from fa3gen.design.workspace import Workspace
    from fa3gen.run.gpu import Environment
    from fa3gen.spec.specfile import Variant
    from fa3gen.verify.on_cpu import CpuReport
    from fa3gen.verify.on_gpu import Report
    from fa3gen.verify.pipeline import Stage, Verification
    from fa3gen.verify.results import Errors

CPU_RUN = "executed on the CPU model of sm_90a (not a GPU result)"
CASE_TABLES = 4  # with more modules than this, only the summary is printed


class On(enum.StrEnum):
    """Where kernels are executed."""

    GPU = "gpu"
    CPU = "cpu"


def verify(
    specs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SPEC",
            autocompletion=completion.specs,
            help="Spec files, spec stems or generated stems; none means all.",
        ),
    ] = None,
    on: Annotated[
        On | None,
        typer.Option(help="Execute on a Hopper GPU or on the CPU model of sm_90a; the GPU if there is one."),
    ] = None,
    schedules: Annotated[
        int, typer.Option(min=1, help="On the CPU: legal orders of warps and completions to run each case under.")
    ] = 2,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Write evidence records and the pages made of them.")
    ] = False,
    speed: Annotated[bool, typer.Option(help="With --evidence on a GPU: measure speeds of large problems too.")] = True,
    seed: Annotated[int | None, typer.Option(help="Seed of the inputs; fresh unless given.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds one module may take on the GPU.")] = 120.0,
) -> None:
    """Render, compile and run modules, and compare them with float64 attention.

    Without a Hopper GPU the CPU model of sm_90a executes the compiled kernels, on smaller inputs, and reports
    deadlocks, races and other hazards. It always says which of the two ran: the model's result is no result of a GPU.
    """
    from rich.console import Console

    from fa3gen.cli.advice import warn
    from fa3gen.design.workspace import Workspace
    from fa3gen.run import gpu

    workspace, errors = Workspace.find(), Console(stderr=True)
    device = None if on is On.CPU else gpu.hopper_device()
    if on is On.GPU and device is None:
        raise UserError(f"--on gpu: no Hopper GPU: {gpu.why_no_hopper()}; use --on cpu")
    variants = workspace.select(specs or ())
    if evidence:
        workspace.require_recordable(variants)
    warn(variants)
    _render_missing(workspace, variants, errors)
    checked = _check_all(workspace, variants, errors, for_launch=device is not None)
    if device is not None:
        checked = _Session(workspace, errors, device, evidence, seed, timeout, speed).run_all(checked)
    else:
        if on is None:
            _say(errors, f"no Hopper GPU: {gpu.why_no_hopper()}; {CPU_RUN}")
        checked = _CpuSession(workspace, errors, evidence, seed, schedules).run_all(checked)
    failed = any(entry.failed for entry in checked)
    if json_output:
        typer.echo(json.dumps(_document(checked, on_gpu=device is not None), indent=2, sort_keys=True))
    else:
        _show(_console(), checked, on_gpu=device is not None)
    if evidence:
        _refresh(workspace, errors)
    if failed or any(entry.run.passed is None for entry in checked):
        raise typer.Exit(1)


def _document(checked: list[Verification], *, on_gpu: bool) -> dict[str, Any]:
    """What --json prints. `passed` is null, neither true nor false, where nothing failed and something was not run."""
    failed = any(entry.failed for entry in checked)
    return {
        "on": "gpu" if on_gpu else "cpu",
        "executed_on": "a Hopper GPU" if on_gpu else "the CPU model of sm_90a (not a GPU result)",
        "run_on_gpu": on_gpu,
        "passed": False if failed else (True if all(entry.run.passed for entry in checked) else None),
        "modules": [entry.as_dict() for entry in checked],
    }


def _console() -> Console:
    """Standard output, as wide as it is; tables for a file or a pipe need more than the 80 columns of a default."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)


def _say(errors: Console, text: str) -> None:
    errors.print(text, markup=False, highlight=False, soft_wrap=True)


def _render_missing(workspace: Workspace, variants: list[Variant], errors: Console) -> None:
    """Write the modules that are not there yet; those that are there are only compared with their rendering."""
    missing = [variant for variant in variants if not workspace.path_of(variant).exists()]
    if missing:
        from fa3gen.generate.render import render_all
        from fa3gen.generate.writing import alone, write_all

        with alone(missing, workspace):
            rendered = [item for item in render_all(missing, workspace) if item.change == "new"]
            write_all(rendered)
        for item in rendered:
            _say(errors, f"rendered {item.path}")


def _refresh(workspace: Workspace, errors: Console) -> None:
    from fa3gen.inspect import pages

    for path in pages.refresh(workspace):
        errors.print(f"wrote {path.relative_to(workspace.root)}", highlight=False)


def _check_all(
    workspace: Workspace, variants: list[Variant], errors: Console, *, for_launch: bool
) -> list[Verification]:
    """Do what needs no GPU: compare every file with its rendering, compile it, compare its facts with the plan."""
    from fa3gen.base import files
    from fa3gen.verify.pipeline import Stage, Verification, check_compile, check_render, compile_all

    say = _progress(errors, len(variants), "compiled")
    paths = {variant.stem: workspace.path_of(variant) for variant in variants}
    digests = {stem: files.sha256(path) for stem, path in paths.items() if path.is_file()}
    renders = {variant.stem: check_render(variant, workspace) for variant in variants}
    outcomes = compile_all(variants, workspace, say, for_launch=for_launch)
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


def _ended(checked: Sequence[Verification], stems: Sequence[str], run: Stage) -> list[Verification]:
    """All of them, those with these stems with another end of their run."""
    return [dataclasses.replace(each, run=run) if each.variant.stem in stems else each for each in checked]


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
    loaded: dict[str, Any] = field(default_factory=dict, init=False)  # modules that passed

    def run_all(self, checked: list[Verification]) -> list[Verification]:
        """Run all until one leaves the GPU unusable; those after it stay not run, as one without room."""
        from torch import OutOfMemoryError

        from fa3gen.verify.pipeline import Stage
        from fa3gen.verify.runner import DeviceLost

        say = _progress(self.errors, len(checked), "ran")
        done: list[Verification] = []
        for number, entry in enumerate(checked):
            if not self.workspace.path_of(entry.variant).exists():
                done.append(dataclasses.replace(entry, run=Stage(None, "there is no file to run")))
                continue
            try:
                with self._watchdog([entry]):
                    done.append(self._run(entry))
            except DeviceLost as lost:
                text = f"{self.at}: the launch left the GPU unusable: {lost}"
                done.append(dataclasses.replace(entry, run=Stage(False, text)))
                self._record_loss([entry], text)
                reason = f"{entry.variant.stem} left the GPU unusable for this process; run this one again"
                return done + [dataclasses.replace(rest, run=Stage(None, reason)) for rest in checked[number + 1 :]]
            except OutOfMemoryError as error:
                done.append(dataclasses.replace(entry, run=Stage(None, self._without_room(error))))
            say(entry.variant.stem)
        return self._measure(done) if self.evidence and self.speed else done

    def _measure(self, done: list[Verification]) -> list[Verification]:
        """Put speeds into the records of modules that passed, those of one problem and mask measured in turns.

        Large launches may fail where small ones passed. Whose was the fault cannot be told then: the whole group fails.
        """
        from torch import OutOfMemoryError

        from fa3gen.run import gpu
        from fa3gen.spec.model import Forward
        from fa3gen.verify.pipeline import Stage

        groups: dict[Any, list[Verification]] = {}
        for entry in done:
            if entry.run.passed:
                spec = entry.variant.spec
                alike = (spec.problem, spec.mask) if isinstance(spec, Forward) else spec.operation
                groups.setdefault(alike, []).append(entry)
        around = gpu.environment()
        self._on_case("timing large problems")
        for group in groups.values():
            stems = [entry.variant.stem for entry in group]
            try:
                with self._watchdog(group):
                    self._time(group, around)
            except OutOfMemoryError as error:
                done = _ended(done, stems, Stage(None, self._without_room(error)))
            except RuntimeError as error:
                text = f"{self.at}: a launch of {' or '.join(stems)} left the GPU unusable: {error}"
                self._record_loss(group, text)
                return _ended(done, stems, Stage(False, text))
        return done

    def _time(self, group: Sequence[Verification], around: Environment) -> None:
        """Put the speeds of a group of modules into their records: attention at 4k and 16k, others beside torch."""
        from fa3gen.measure import record_speeds
        from fa3gen.records import evidence
        from fa3gen.spec.specfile import attention_among, others_among

        variants = [entry.variant for entry in group]
        attention = {each.stem: (each, self.loaded[each.stem]) for each in attention_among(variants)}
        if attention:
            for stem, tflops in record_speeds.speeds(attention, self.device).items():
                evidence.set_tflops(self.workspace, stem, tflops, around)
        others = {each.stem: (each.spec, self.loaded[each.stem]) for each in others_among(variants)}
        if not others:
            return
        from fa3gen.measure import beside_torch
        from fa3gen.measure.tuning.measuring import CudaTimer

        for stem, found in beside_torch.speeds(others, self.device, CudaTimer(self.device)).items():
            evidence.set_beside_torch(self.workspace, stem, found, around)

    def _run(self, entry: Verification) -> Verification:
        """Run one module's cases and checks; with --evidence write its record, without speeds yet."""
        from fa3gen.records import evidence
        from fa3gen.records.recording import record_of
        from fa3gen.run.launch import load_for_launch
        from fa3gen.verify.on_gpu import verify_module
        from fa3gen.verify.pipeline import Stage

        variant = entry.variant
        try:
            module = load_for_launch(self.workspace.path_of(variant))
        except Exception as error:  # a file edited by hand may raise anything
            text = f"cannot be imported: {type(error).__name__}: {error}"
            self._record_loss([entry], text)
            return dataclasses.replace(entry, run=Stage(False, text))
        report = verify_module(
            module, variant.spec, self.device, stem=variant.stem, seed=self.seed, on_case=self._on_case
        )
        entry = dataclasses.replace(entry, report=report, run=Stage(report.passed, "; ".join(report.failures)))
        if report.passed:
            self.loaded[variant.stem] = module
        if self.evidence:
            evidence.write(self.workspace, record_of(entry, self.workspace))
        return entry

    def _on_case(self, name: str) -> None:
        self.at = name

    def _without_room(self, error: BaseException) -> str:
        """What to do where memory has run out; what this case has had of it is given back to whoever waits for it."""
        from torch.cuda import empty_cache

        from fa3gen.verify.runner import essence

        traceback.clear_frames(error.__traceback__)  # which hold the case's tensors
        empty_cache()
        return f"{self.at}: no room on the GPU; run it again when less else is on it: {essence(error)}"

    def _record_loss(self, running: Sequence[Verification], text: str) -> None:
        """Record a run that left no report, or no speeds, as what it is, a failure."""
        from fa3gen.records import evidence
        from fa3gen.records.recording import record_of

        if self.evidence:
            for entry in running:
                record = record_of(entry, self.workspace, seed=self.seed or 0, failures=[text])
                evidence.write(self.workspace, record)

    @contextlib.contextmanager
    def _watchdog(self, running: Sequence[Verification]) -> Iterator[None]:
        """End the process when a kernel does not: a deadlocked launch cannot be called back."""
        name, seconds = ", ".join(entry.variant.stem for entry in running), self.timeout * len(running)

        def give_up() -> None:
            text = f"{self.at}: did not end in {seconds:g} s (a pipeline that waits for ever?)"
            print(f"{name}: {text}; what comes after it was not run", file=sys.stderr, flush=True)
            try:
                self._record_loss(running, text)
            except Exception as error:  # would end this thread only, and the process would wait for ever
                print(f"{name}: no record was written: {error}", file=sys.stderr, flush=True)
            finally:
                os._exit(1)

        timer = threading.Timer(seconds, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


@dataclass
class _CpuSession:
    """Runs modules on the CPU model, which ends deadlocks by itself, and writes records of its own kind."""

    workspace: Workspace
    errors: Console
    evidence: bool
    seed: int | None
    schedules: int

    def run_all(self, checked: list[Verification]) -> list[Verification]:
        """Run all; one that the model cannot run stays not run, and says why."""
        say = _progress(self.errors, len(checked), "executed")
        done = []
        for entry in checked:
            done.append(self._run(entry))
            say(entry.variant.stem)
        return done

    def _run(self, entry: Verification) -> Verification:
        """Run one module's cases and checks; with --evidence write its record."""
        from fa3gen.cpu.module import load_on_cpu
        from fa3gen.records import evidence
        from fa3gen.records.recording import cpu_record_of
        from fa3gen.verify.on_cpu import verify_on_cpu
        from fa3gen.verify.on_model import ScheduledRunner
        from fa3gen.verify.pipeline import Stage

        variant, path = entry.variant, self.workspace.path_of(entry.variant)
        if not path.exists():
            return dataclasses.replace(entry, run=Stage(None, "there is no file to run"))
        failures = []
        try:
            module = load_on_cpu(path)
        except UserError:
            raise
        except Exception as error:  # a file edited by hand may raise anything
            failures = [f"cannot be imported: {type(error).__name__}: {error}"]
            entry = dataclasses.replace(entry, run=Stage(False, failures[0]))
        else:
            try:
                report = verify_on_cpu(module, variant.spec, stem=variant.stem, seed=self.seed, count=self.schedules)
            except ScheduledRunner.fatal as error:
                return dataclasses.replace(entry, run=Stage(None, str(error)))
            entry = dataclasses.replace(entry, report=report, run=Stage(report.passed, "; ".join(report.failures)))
        if self.evidence:
            evidence.write_cpu(self.workspace, cpu_record_of(entry, self.workspace, failures=failures))
        return entry


# -- tables


def _show(console: Console, checked: list[Verification], *, on_gpu: bool) -> None:
    """Print the cases of a few modules, one line for each module, what failed, and what it all amounts to."""
    for entry in checked:
        if entry.report is not None and len(checked) <= CASE_TABLES:
            console.print(_case_table(entry))
    console.print(_summary_table(checked, on_gpu=on_gpu))
    for entry in checked:
        for name in ("render", "compile", "run"):
            stage = getattr(entry, name)
            if name == "run" and stage.passed is False and entry.report is not None:
                _say_failures(console, entry.variant.stem, entry.report)
            elif stage.passed is not True:
                _say(console, f"{entry.variant.stem}: {name} {stage.word}: {stage.detail}")
    verdict = _verdict(checked, on_gpu=on_gpu)
    console.print(verdict, style="bold", markup=False, highlight=False, soft_wrap=True)


def _say_failures(console: Console, stem: str, report: Report | CpuReport) -> None:
    """Each thing that failed once, and below it the cases and checks that met it."""
    from fa3gen.verify.grouping import grouped

    groups = grouped(report)
    _say(console, f"{stem}: run FAILED: {counted(len(groups), 'failure')}")
    for number, group in enumerate(groups, 1):
        _say(console, f"  {number}. {group.text}")
        _say(console, f"     in {', '.join(group.names)}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _pair(found: Errors | None) -> tuple[str, str]:
    return (_number(found.max_abs), _number(found.relative)) if found else ("", "")


def _case_table(entry: Verification) -> Group:
    """Return the errors of one module, case by case, beside what they are held against; and its checks below."""
    from rich.console import Group

    from fa3gen.verify.on_cpu import CpuReport

    assert entry.report is not None
    report = entry.report
    columns, rows = _cpu_rows(report) if isinstance(report, CpuReport) else _gpu_rows(report)
    table = _table(f"{report.stem} on {report.device}, seed {report.seed}")
    table.add_column("case", no_wrap=True)
    table.add_column("shape", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    checks = _table()
    checks.add_column("check", no_wrap=True)
    checks.add_column("", no_wrap=True)
    for check in report.checks:
        checks.add_row(check.name, {True: "passed", False: "[red]FAILED[/]", None: "NOT run"}[check.passed])
    return Group(table, checks)


def _table(title: str | None = None) -> Table:
    """A table without lines between columns, so that names and numbers have room in a narrow terminal."""
    from rich import box
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


Rows = tuple[list[str], list[list[str]]]  # names of the columns of numbers; all cells of each case


def _gpu_rows(report: Report) -> Rows:
    """Errors beside those of PyTorch in the same precision."""
    rows = []
    for case in report.cases:
        block = "" if case.o_block_ratio is None else f"{case.o_block_ratio:.0%}"
        numbers = [*_pair(case.o_error), *_pair(case.o_yardstick), _number(case.o_max_abs_limit), block]
        rows.append([case.name, case.shape, *numbers, *_pair(case.lse_error), _word(case.passed)])
    return ["O max", "O rel", "torch max", "torch rel", "limit max", "worst block", "LSE max", "LSE rel"], rows


def _cpu_rows(report: CpuReport) -> Rows:
    """Errors, and the share that they use of what the roundings of the kernel allow."""
    rows = []
    for case in report.cases:
        used = "" if case.o_used is None else f"{case.o_used:.0%}"
        spread = "" if case.o_spread is None else f"{case.o_spread:.2f}"
        numbers = [_pair(case.o_error)[0], used, spread, _pair(case.lse_error)[1]]
        rows.append([case.name, case.shape, *numbers, _word(case.passed)])
    return ["O max", "O of limit", "O spread", "LSE rel"], rows


def _word(passed: bool) -> str:
    return "passed" if passed else "[red]FAILED[/]"


def _summary_table(checked: list[Verification], *, on_gpu: bool) -> Table:
    table = _table()
    table.padding = 0  # stems are long, and a terminal may have 80 columns
    run = "run on GPU" if on_gpu else "on CPU model"
    for name in ("module", "render", "compile", run, "regs", "spilt"):
        right = name in ("regs", "spilt")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != run)
    colors = {True: "green", False: "red", None: "yellow"}
    for entry in checked:
        words = [f"[{colors[s.passed]}]{s.word}[/]" for s in (entry.render, entry.compile, entry.run)]
        facts = [str(entry.facts.registers), str(entry.facts.spills)] if entry.facts else ["", ""]
        table.add_row(entry.variant.stem, *words, *facts)
    return table


def _verdict(checked: list[Verification], *, on_gpu: bool) -> str:
    """Say in one line what was and what was not shown; nobody should take a model for a GPU."""
    total = len(checked)
    modules = counted(total, "module")
    failed = sum(entry.failed for entry in checked)
    ran = [entry for entry in checked if entry.run.passed is not None]
    passed = sum(entry.run.passed is True and not entry.failed for entry in checked)
    rest = f", {total - len(ran)} NOT run" if len(ran) < total else ""
    if not on_gpu:
        return f"{passed} of {modules} passed, {failed} failed{rest}: {CPU_RUN}."
    device = next((entry.report.device for entry in ran if entry.report), "the GPU")
    return f"{passed} of {modules} verified on {device}, {failed} failed{rest}."
