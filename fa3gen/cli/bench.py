"""`fa3gen bench`: speeds beside peers, and with `--host` the host time of calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fa3gen.cli import completion, masks

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from fa3gen.design.workspace import Workspace
    from fa3gen.measure.bench import Bench, Competitor, Runner
    from fa3gen.measure.launch_times import LaunchTimes
    from fa3gen.spec.model import Forward, Other
    from fa3gen.spec.specfile import Variant


def bench(
    specs: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC", autocompletion=completion.specs, help="Spec files, spec stems or generated stems."
        ),
    ],
    head_dim: Annotated[list[int] | None, typer.Option(help="Only this head dim; may be repeated.")] = None,
    mask: Annotated[list[str] | None, typer.Option(help=masks.HELP)] = None,
    seq_len: Annotated[list[int] | None, typer.Option(help="Only this sequence length; may be repeated.")] = None,
    lengths: Annotated[
        list[str] | None,
        typer.Option(metavar="LIST", help="Packed sequences: only this list of lengths, chat16k; may be repeated."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="4k and 16k only, fewer repeats; of packed sequences all lists.")
    ] = False,
    peers: Annotated[bool, typer.Option(help="Measure torch SDPA and FlashAttention beside.")] = True,
    limit: Annotated[float, typer.Option(help="Seconds one kernel may take in one cell before it is skipped.")] = 10.0,
    launch: Annotated[
        bool | None,
        typer.Option(
            help="Measure first calls (compiled, cached) and host time per call too.", show_default="unless --quick"
        ),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all numbers here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a figure here; .png or .svg.")] = None,
    evidence: Annotated[
        bool, typer.Option("--evidence", help="Put the speeds at 4k and 16k into the evidence records.")
    ] = False,
    host: Annotated[
        bool,
        typer.Option(
            "--host",
            help="Measure the host time of calls instead: O, O and LSE, out=; module, fa3gen.attention, peers.",
        ),
    ] = False,
    host_limit: Annotated[
        float | None,
        typer.Option(help="With --host: exit with 1 when a call of ours takes more microseconds.", show_default="none"),
    ] = None,
) -> None:
    """Measure TFLOP/s over head dim, mask and sequence length on a Hopper GPU, beside the peers installed here.

    Modules for packed sequences and pages are timed at lists of lengths and heads of their own, launches replayed from
    a CUDA graph, beside FlashAttention. Modules of other operations than attention are timed at sizes of their own,
    beside torch's call for the same.

    With --host, measure what a call costs the host on a tiny problem instead. The host should have nothing else to do.
    """
    from rich.console import Console

    from fa3gen.base.errors import UserError
    from fa3gen.cli import packed_speeds
    from fa3gen.design.workspace import Workspace
    from fa3gen.measure import bench_report
    from fa3gen.measure.bench import Bench, CudaTimer, Runner, peer_competitors, plan_cells, require_hopper
    from fa3gen.run import gpu
    from fa3gen.spec.specfile import attention_among, others_among

    if host_limit is not None and not host:
        raise UserError("--host-limit is for --host")
    wanted = {"--plot": plot, "--evidence": evidence, "--launch": launch, "--seq-len": seq_len, "--quick": quick}
    if host and (useless := [name for name, value in wanted.items() if value]):
        raise UserError(f"--host times calls on one tiny problem; leave out {', '.join(useless)}")
    if plot is not None:
        bench_report.check_plot_path(plot)
    workspace = Workspace.find()
    selected = workspace.select(specs)
    others, variants = others_among(selected), attention_among(selected)
    packed = [variant for variant in variants if packed_speeds.is_packed(variant)]
    variants = [variant for variant in variants if not packed_speeds.is_packed(variant)]
    if packed:
        dense = {"--seq-len": seq_len, "--host": host, "--plot": plot, "--evidence": evidence, "--launch": launch}
        packed_speeds.refuse(dense | {"--json": variants and json_path})
    elif lengths:
        raise UserError("--lengths is for packed sequences, and none of these modules takes any; use --seq-len")
    if others:
        asked = {"--head-dim": head_dim, "--mask": mask, "--seq-len": seq_len, "--host": host, "--plot": plot}
        if options := [name for name, value in asked.items() if value]:
            raise UserError(f"{others[0].stem} is no attention, and has no {', '.join(options)}; leave that out")
        _beside_torch(workspace, others, evidence=evidence, json_path=json_path)
    errors = Console(stderr=True)
    failed = False
    names = [masks.name(word) for word in mask or ()]
    if packed:
        with errors.status("measuring") as status:
            failed = packed_speeds.bench(
                workspace,
                packed,
                head_dims=head_dim or (),
                masks=names,
                lists=lengths or (),
                quick=quick,
                peers=peers,
                json_path=json_path,
                say=_progress(errors, status.update),
            )
    if not variants:
        if failed:
            raise typer.Exit(1)
        return
    if evidence:
        workspace.require_recordable(variants)
    cells = plan_cells(
        [variant.spec for variant in variants],
        head_dims=head_dim or (),
        masks=names,
        seq_lens=seq_len or (),
        quick=quick,
    )
    device = require_hopper()
    own = _own(workspace, variants)
    if host:
        served = [variant for variant in variants if any(own[variant.stem].serves(cell) for cell in cells)]
        _host(workspace, served, own, device, json_path, peers=peers, limit=host_limit)
        return
    runner = Runner(
        competitors=[*own.values(), *(peer_competitors() if peers else [])],
        timer=CudaTimer(device),
        device=device,
        spend_ms=150 if quick else 400,
        limit_ms=limit * 1000,
    )
    with errors.status("measuring") as status:
        progress = _progress(errors, status.update)
        measured = Bench(gpu.environment(), tuple(runner.run(cells, progress)))
        if launch or (launch is None and not quick):
            measured = replace(measured, launches=tuple(_launches(runner, variants, own, workspace, progress)))
    console = Console()
    for table in bench_report.tables(measured):
        console.print(table)
    if measured.launches:
        console.print(bench_report.launch_table(measured))
    for reason in bench_report.reasons(measured):
        console.print(reason, style="dim", markup=False, highlight=False)
    if json_path is not None:
        bench_report.write_json(measured, json_path)
    if plot is not None:
        bench_report.plot(measured, plot)
    if evidence:
        _record(workspace, measured, own)
    if measured.failed or failed:
        raise typer.Exit(1)


def _beside_torch(
    workspace: Workspace, variants: Sequence[Variant[Other]], *, evidence: bool, json_path: Path | None
) -> None:
    """Time modules of other operations than attention beside torch's own call, and show, and record, the speeds."""
    import json

    from rich.console import Console
    from rich.table import Table

    from fa3gen.base.files import write_text
    from fa3gen.inspect import pages
    from fa3gen.measure.bench import require_hopper
    from fa3gen.measure.beside_torch import speeds
    from fa3gen.measure.tuning.measuring import CudaTimer
    from fa3gen.records import evidence as records
    from fa3gen.run import gpu
    from fa3gen.run.launch import load_for_launch

    device, errors, console = require_hopper(), Console(stderr=True), Console()
    missing = [variant for variant in variants if not workspace.path_of(variant).exists()]
    if missing:
        raise workspace.not_rendered(missing)
    modules = {variant.stem: (variant.spec, load_for_launch(workspace.path_of(variant))) for variant in variants}
    with errors.status("measuring") as status:
        found = speeds(modules, device, CudaTimer(device), _progress(errors, status.update))
    table = Table("module", "problem", "speed", "of torch's", box=None, header_style="dim")
    for stem, of_module in found.items():
        for name, speed in of_module.items():
            share = "" if speed.of_torch is None else f"{speed.of_torch:.3f}"
            table.add_row(stem, name, f"{speed.rate:,.0f} {speed.unit}", share)
    console.print(table)
    if json_path is not None:
        document = {stem: {name: speed.model_dump() for name, speed in rows.items()} for stem, rows in found.items()}
        write_text(json_path, json.dumps(document, indent=2) + "\n")
    if evidence:
        for stem, rows in found.items():
            if not records.set_beside_torch(workspace, stem, rows, gpu.environment()):
                typer.echo(_no_record(stem), err=True)
        pages.refresh(workspace)


def _no_record(stem: str) -> str:
    return (
        f"{stem}: no record of the present file on this GPU with this DSL and torch; "
        f"run `fa3gen verify {stem} --evidence` first"
    )


def _launches(
    runner: Runner,
    variants: list[Variant[Forward]],
    own: dict[str, Competitor],
    workspace: Workspace,
    say: Callable[[str], None],
) -> Iterator[LaunchTimes]:
    """Measure what launches cost the host: of every module, and of the peers on the first module's problem."""
    from fa3gen.base.errors import UserError
    from fa3gen.design.family import Family
    from fa3gen.measure.bench import Cell
    from fa3gen.measure.launch_times import SEQ_LEN, LaunchTimes, first_calls

    def cell(variant: Variant[Forward]) -> Cell:
        return Cell.of(variant.spec, SEQ_LEN)

    for variant in variants:
        name, family = own[variant.stem].name, Family.of(variant.spec)
        say(f"{variant.stem}: first call")
        try:
            path = workspace.path_of(variant)
            compiled, cached = first_calls(path, family)
        except UserError as error:
            yield LaunchTimes(name, None, reason=str(error))
            continue
        yield replace(runner.launch_times(own[variant.stem], cell(variant)), compiled_s=compiled, cached_s=cached)
    for competitor in runner.competitors:
        if not competitor.generated:
            say(f"{competitor.name}: host time")
            yield runner.launch_times(competitor, cell(variants[0]))


def _host(
    workspace: Workspace,
    variants: Sequence[Variant[Forward]],
    own: Mapping[str, Competitor],
    device: torch.device,
    json_path: Path | None,
    *,
    peers: bool,
    limit: float | None,
) -> None:
    """Measure and show the host time of calls; raise typer.Exit(1) when a call of ours fails or takes too long."""
    import torch
    from rich.console import Console

    from fa3gen.measure import host_calls
    from fa3gen.measure.peers import PEERS
    from fa3gen.run import gpu
    from fa3gen.run.launch import load_for_launch

    modules: dict[host_calls.Problem, list[host_calls.Callee]] = {}
    for variant in variants:
        load = functools.partial(load_for_launch, workspace.path_of(variant))
        callee = host_calls.module_callee(own[variant.stem].name, variant.spec, load)
        modules.setdefault(host_calls.Problem.of(variant.spec), []).append(callee)
    errors, console = Console(stderr=True), Console()
    measured = []
    with errors.status("measuring") as status:
        say = _progress(errors, status.update)
        for number, (problem, found) in enumerate(modules.items(), 1):
            say(f"[{number}/{len(modules)}] {problem}")
            callees = host_calls.callees(problem, found, PEERS if peers else ())
            rows = host_calls.measure(callees, problem.tensors(device), lambda: torch.cuda.synchronize(device))
            measured.append((problem, rows))
    result = host_calls.HostBench(gpu.environment(), tuple(measured))
    for problem, rows in result.problems:
        console.print(host_calls.table(problem, rows))
    for reason in result.reasons():
        console.print(reason, style="dim", markup=False, highlight=False)
    if json_path is not None:
        host_calls.write_json(result, json_path)
    if failures := result.failures(limit):
        for failure in failures:
            typer.echo(failure, err=True)
        raise typer.Exit(1)


def _progress(errors: Console, update: Callable[[str], None]) -> Callable[[str], None]:
    """Keep one moving line on a terminal; in a log, write one line per step."""
    return update if errors.is_terminal else lambda text: errors.print(text, markup=False, highlight=False)


def _own(workspace: Workspace, variants: list[Variant[Forward]]) -> dict[str, Competitor]:
    """Return one competitor per variant, by generated stem; called by spec stem where that is not ambiguous."""
    from fa3gen.measure.bench import module_competitor
    from fa3gen.run.launch import load_for_launch

    def problem(variant: Variant[Forward]) -> tuple[object, ...]:
        return variant.source, variant.spec.problem, variant.spec.mask

    problems = [problem(variant) for variant in variants]
    own = {}
    for variant in variants:
        path = workspace.path_of(variant)
        if not path.exists():
            raise workspace.not_rendered([variant])
        name = variant.source.stem if problems.count(problem(variant)) == 1 else variant.stem
        loaded: list[object] = []  # imported once, at the first cell it serves

        def load(path: Path = path, loaded: list[object] = loaded) -> object:
            if not loaded:
                loaded.append(load_for_launch(path))
            return loaded[0]

        own[variant.stem] = module_competitor(name, variant.spec, load)
    return own


def _record(workspace: Workspace, measured: Bench, own: dict[str, Competitor]) -> None:
    """Put speeds into the records and render the tables anew; say which modules have no record to put them in."""
    from fa3gen.inspect import pages
    from fa3gen.records import evidence

    for stem, competitor in own.items():
        speeds = {
            entry.cell.seq_len: result.tflops
            for entry in measured.cells
            if competitor.serves(entry.cell)
            for result in entry.results
            if result.competitor == competitor.name and result.tflops is not None
        }
        if speeds and not evidence.set_tflops(workspace, stem, speeds, measured.environment):
            typer.echo(_no_record(stem), err=True)
    for path in pages.refresh(workspace):
        typer.echo(f"wrote {path}", err=True)
