"""`fa3gen trace`: what each warp of one CTA did when, on the CPU model of sm_90a."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fa3gen.cli import completion
from fa3gen.cli import lengths as lengths_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from fa3gen.cpu.findings import Hazard
    from fa3gen.cpu.launch import Index
    from fa3gen.cpu.schedule import Schedule
    from fa3gen.design.family import PackedShape, Shape
    from fa3gen.design.workspace import Workspace
    from fa3gen.spec.model import Forward
    from fa3gen.spec.specfile import Variant

LONGEST = 3  # waits that the summary names for each warp


@dataclass(frozen=True)
class Request:
    """What the command line asks for; None stands for a default that depends on the module."""

    batch: int | None
    seq_q: int | None
    seq_k: int | None
    lengths: str | None
    page: int | None
    heads: int | None
    heads_kv: int | None
    cta: str | None
    schedule: int | None
    seed: int
    sms: int | None
    directory: Path


def trace(
    specs: Annotated[
        list[str],
        typer.Argument(
            metavar="SPEC", autocompletion=completion.specs, help="Spec files, spec stems or generated stems."
        ),
    ],
    seq_q: Annotated[
        int | None, typer.Option(min=1, help="Queries (default: one tile; of a persistent kernel two).")
    ] = None,
    seq_k: Annotated[
        int | None, typer.Option(min=1, help="Keys (default: as many tiles as go round the ring twice, and one more).")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="N,QxK,..", help=f"{lengths_option.HELP} (default: three, one of which is empty)."),
    ] = None,
    page: Annotated[
        int | None, typer.Option(min=1, help="Rows of a page, where keys are in pages (default: as few as it takes).")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Query heads (default: as many as a tile holds, mostly 1).")
    ] = None,
    heads_kv: Annotated[
        int | None, typer.Option(min=1, help="Key and value heads (default: as query heads, or as the tile packs).")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch entries (default: 1).")] = None,
    cta: Annotated[
        str | None,
        typer.Option(
            metavar="N|X,Y,Z|all",
            help="CTA to run and trace: a number, x first, or an index (default: the one with the most tiles of keys).",
        ),
    ] = None,
    schedule: Annotated[
        int | None,
        typer.Option(
            min=0, help="Number of a schedule in the model's list, 0 the fast one (default: warp by warp, in turn)."
        ),
    ] = None,
    sms: Annotated[
        int | None,
        typer.Option(
            min=1, help="SMs that the kernel is told of (default: 1; 3 where it splits keys, which they share)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the inputs and of schedules with chance.")] = 0,
    directory: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Where to write; files of these names are replaced.")
    ] = Path("."),
) -> None:
    """Run one CTA on the CPU model of sm_90a and write what each warp did when.

    Writes STEM.trace.json (a schema of its own) and STEM.perfetto.json (for ui.perfetto.dev) for each module, and
    prints a summary. The kernel is the compiled one, its PTX is interpreted; nothing comes from a GPU. Time is logical:
    a tick for each instruction of a warp, waits end no earlier than what they wait for. It shows order, dependences and
    overlap, and not speed. A persistent kernel runs as on one SM: its only CTA takes all tiles of queries. One that
    splits keys runs as on three, of which one CTA's part or share is traced.

    Exits with 1 when the model reports a fault; the files then show what led to it.
    """
    from rich.console import Console

    from fa3gen.design.workspace import Workspace
    from fa3gen.spec.specfile import attention_only

    workspace = Workspace.find()
    variants = attention_only(workspace.select(specs), "fa3gen trace")
    missing = [variant for variant in variants if not workspace.path_of(variant).is_file()]
    if missing:
        raise workspace.not_rendered(missing)
    request = Request(batch, seq_q, seq_k, lengths, page, heads, heads_kv, cta, schedule, seed, sms, directory)
    console = Console(highlight=False)
    reports = [_trace_one(workspace, variant, request, console) for variant in variants]
    if any(reports):
        raise typer.Exit(1)


def _trace_one(workspace: Workspace, variant: Variant[Forward], request: Request, console: Console) -> Hazard | None:
    """Trace one module, write its files and say what happened; returns the fault that the model found."""
    from fa3gen.base.errors import UserError
    from fa3gen.base.files import write_text
    from fa3gen.cpu.places import SharedPlaces
    from fa3gen.cpu.trace import Trace
    from fa3gen.cpu.trace_files import Source, document, perfetto
    from fa3gen.design import splits
    from fa3gen.inspect.tracing import Problem, run

    problem = Problem(_shape(variant, request), request.seed, request.sms)
    ctas = _ctas(variant.spec, problem.shape, request.cta)
    schedule = _schedule(variant.spec, request)
    recorded = Trace()
    path = workspace.path_of(variant)
    hazard = run(path, variant, problem, ctas, schedule, recorded)
    source = Source(variant.stem, workspace.shown(path).as_posix(), str(path.resolve()), path.read_text("utf-8"))
    # The compiler names the file by its absolute path; people write it as it lies in the workspace.
    report = None if hazard is None else str(hazard).replace(source.path, source.file)
    written = document(
        recorded,
        source,
        SharedPlaces.of(variant.spec),
        problem=problem.facts(variant.spec),
        schedule=str(schedule),
        report=report,
    )
    files = {
        request.directory / f"{variant.stem}.trace.json": written,
        request.directory / f"{variant.stem}.perfetto.json": perfetto(written),
    }
    try:
        for file, content in files.items():
            write_text(file, json.dumps(content, separators=(",", ":")) + "\n")
    except OSError as error:
        raise UserError(f"cannot write to {request.directory}: {error.strerror}; choose another --output") from None
    what = problem.shape.in_full
    if variant.spec.split is not None:
        what += f"; keys in parts: {splits.told(variant.spec, problem.shape, problem.sms_of(variant.spec))}"
    _show(console, written, what, list(files))
    return hazard


def _shape(variant: Variant[Forward], request: Request) -> Shape | PackedShape:
    """Fill in what is not asked for; UserError for options that mean nothing to the module."""
    from fa3gen.base.errors import UserError
    from fa3gen.design.family import Shape
    from fa3gen.inspect.tracing import default_shape

    spec, default = variant.spec, default_shape(variant.spec)
    dense = isinstance(default, Shape)
    of_others = ("lengths", "page") if dense else ("batch", "seq_q", "seq_k")
    if meaningless := [name for name in of_others if getattr(request, name) is not None]:
        instead = "--batch, --seq-q and --seq-k" if dense else "--lengths"
        raise UserError(
            f"{variant.stem} takes {'dense tensors' if dense else 'packed sequences'}, of which "
            f"--{meaningless[0].replace('_', '-')} says nothing; give {instead}"
        )
    heads = _heads(spec, request)
    if not isinstance(default, Shape):
        return lengths_option.call_of(spec, request.lengths, request.page, heads=heads, usual=default)
    sizes = request.batch or 1, request.seq_q or default.seq_q, request.seq_k or default.seq_k
    return Shape(*sizes, *heads)


def _heads(spec: Forward, request: Request) -> tuple[int, int]:
    """Of queries, and of keys and values."""
    from fa3gen.base.errors import UserError
    from fa3gen.design.tile_order import takes_group

    pack = spec.tile.pack_heads
    heads = request.heads or pack * (request.heads_kv or 1)
    heads_kv = request.heads_kv or heads // pack or 1
    if heads % heads_kv:
        raise UserError(f"--heads {heads} is no multiple of --heads-kv {heads_kv}; choose one that is")
    if not takes_group(spec, heads // heads_kv):
        raise UserError(f"a tile of this module holds {pack} query heads of one kv head; use --heads {pack * heads_kv}")
    return heads, heads_kv


def _ctas(spec: Forward, shape: Shape | PackedShape, wanted: str | None) -> Sequence[Index | int] | None:
    """The CTAs to run; None for all."""
    from fa3gen.base.errors import UserError
    from fa3gen.inspect.tracing import busiest

    if wanted == "all":
        return None
    if wanted is None:
        return [busiest(spec, shape)]
    try:
        numbers = [int(number) for number in wanted.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 3) or min(numbers) < 0:
        raise UserError(f"--cta {wanted}: a number N, an index X,Y,Z, or all")
    if len(numbers) == 1:
        return [numbers[0]]
    x, y, z = numbers
    return [(x, y, z)]


def _schedule(spec: Forward, request: Request) -> Schedule:
    """Warp by warp, so that no warp waits for the others of its group; or one of the model's list."""
    from fa3gen.cpu.schedule import Schedule, schedules
    from fa3gen.design import footprint
    from fa3gen.hardware import hopper

    if request.schedule is None:
        return Schedule("warp", seed=request.seed)
    warps = footprint.threads(spec) // hopper.WARP
    return schedules(request.schedule + 1, warps, request.seed)[-1]


# -- summary


def _show(console: Console, document: dict[str, Any], shape: str, files: list[Path]) -> None:
    """Print what ran, a line for each warp, and where the files are."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    say(f"{document['module']}: executed on the {document['executed_on']}; {shape}; {document['schedule']}", "bold")
    for cta in document["ctas"]:
        kinds = [event["kind"] for event in cta["events"]]
        counts = {"load": "TMA loads", "copies": "groups of cp.async", "product": "wgmma", "store": "TMA stores"}
        found = ", ".join(f"{kinds.count(kind)} {name}" for kind, name in counts.items() if kind in kinds)
        say(f"{cta['kernel']}, CTA {tuple(cta['index'])} of {tuple(cta['grid'])}" + (f": {found}" if found else ""))
        console.print(_warp_table(cta))
    say("A tick is one instruction of a warp. The times show order, dependences and overlap, and not speed.")
    if document["report"] is not None:
        say(document["report"], "bold red")
    for file in files:
        say(f"wrote {file}")


def _warp_table(cta: dict[str, Any]) -> Any:
    """A line for each run of warps that did the same."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("  warps", "instructions", "end at", "waits", "waited"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("longest waits", overflow="fold")
    rows = [(warp["warp"], _cells(cta, warp)) for warp in cta["warps"]]
    for cells, same in itertools.groupby(rows, key=lambda row: row[1]):
        numbers = [number for number, _ in same]
        span = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        table.add_row(span, *cells[:-1], Text(cells[-1]))
    return table


def _cells(cta: dict[str, Any], warp: dict[str, Any]) -> tuple[str, ...]:
    from fa3gen.cpu.trace_files import waited

    waits = [event for event in cta["events"] if event["kind"] == "wait" and warp["warp"] in event["warps"]]
    # A wait that never ended is the most telling one.
    longest = sorted(waits, key=lambda event: (event["end"] is not None, -waited(event), event["begin"]))
    texts = []
    for event in longest[:LONGEST]:
        line = f", line {event['line']}" if event["line"] is not None else ""
        if event["end"] is None:
            texts.append(f"{event['label']}{line}: for ever")
        elif waited(event):
            texts.append(f"{event['label']}{line}: {waited(event)}")
    numbers = (warp["instructions"], warp["ticks"], warp["waits"], warp["waited"])
    return (*map(str, numbers), "; ".join(texts))
