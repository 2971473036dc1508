"""Everything that a report shows, gathered as data: from the spec, the compiler, the CPU model and the records.

Compiling and the CPU model take the time: some 10 seconds where the compile cache is empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fa3gen.base import files
from fa3gen.design import footprint
from fa3gen.design.family import PackedShape, Shape, call_of_lengths
from fa3gen.design.work import Problem, default_heads
from fa3gen.design.workspace import Workspace
from fa3gen.hardware import chips, hopper
from fa3gen.inspect import explanation, simulation
from fa3gen.inspect.report import numerics, speeds, tiles
from fa3gen.inspect.report.listing import Listing, make_listing
from fa3gen.inspect.report.numerics import Card
from fa3gen.inspect.report.speeds import Ladder, Panel
from fa3gen.measure.packed_cells import (
    CHUNK_LENGTHS,
    DECODING_LENGTHS,
    DRAFT_LENGTHS,
    MIXED_LENGTHS,
    PACKED_LENGTHS,
    PAGED_LENGTHS,
)
from fa3gen.records import evidence
from fa3gen.spec.model import Forward

if TYPE_CHECKING:
    from fa3gen.compile.census import Census, Row
    from fa3gen.compile.compiler import Compiled
    from fa3gen.cpu.kernel import CpuKernel
    from fa3gen.hardware.chips import Chip
    from fa3gen.inspect.explanation import Explanation
    from fa3gen.inspect.simulation import Dealt, Simulation, StageRow, Times
    from fa3gen.records.evidence import Record, Status
    from fa3gen.spec.specfile import Variant

SEQ_LENS = (1024, 4096, 16384)  # of the ceilings; 16,384 tokens in all
TOKENS = 16384
CHIP = "h200"  # that is simulated
STAGES = range(1, 7)
SHOWN_TILES = 24  # of keys, in the picture of a CTA whose tiles of queries differ


@dataclass(frozen=True)
class Run:
    """One CTA on the CPU model: the trace document, see `fa3gen.cpu.trace_files`, and of which call in words.

    Or why there is none.
    """

    trace: dict[str, Any] | None
    of: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Simulated:
    """The pipeline simulation of one SM, drawn, and its prediction for other numbers of stages.

    `dealt` are calls on packed sequences by the name of their lengths; the picture is of the first CTA of the first.
    """

    picture: str
    chip: Chip
    times: Times
    simulation: Simulation
    stages: tuple[StageRow, ...]
    dealt: tuple[tuple[str, Dealt], ...]


@dataclass(frozen=True)
class Report:
    """One module, all that is known of it. `file` and `source_file` are paths as people write them.

    `shape_names` are those of the explanation's problems, '' where lengths have none.
    `as_rendered`: the file is what its spec renders to; otherwise it was edited by hand, or spec or templates have
    changed since.
    """

    variant: Variant[Forward]
    file: str
    source_file: str
    source: str
    as_rendered: bool
    sha256: str
    explanation: Explanation
    shape_names: tuple[str, ...]
    compiled: Compiled
    census: Census
    facts: tuple[Row, ...]
    listing: Listing
    simulated: Simulated | None
    run: Run
    on_gpu: Card
    on_cpu: Card
    status: Status
    record: Record | None
    panels: tuple[Panel, ...]
    ladder: Ladder | None


def gather(workspace: Workspace, variant: Variant[Forward]) -> Report:
    """Compile the module, run it on the CPU model, read its records.

    Raises UserError where the module is not rendered yet, where a tool is missing or a record cannot be read,
    CompileError where it does not compile.
    """
    from fa3gen.compile import census as counting
    from fa3gen.compile import compiler
    from fa3gen.compile.cache import cached_compile
    from fa3gen.generate.plan import make_plan
    from fa3gen.generate.render import render_variant

    place = workspace.place_of(variant)
    path = place.module_path(variant.stem)
    if not path.is_file():
        raise workspace.not_rendered([variant])
    workspace = place  # the module, and what is known of it
    compiled = cached_compile(path, line_info=True)
    census = compiler.analyse(compiled).census
    state, record = evidence.status(workspace, variant.stem)
    source = path.read_text(encoding="utf-8")
    run, on_cpu = _on_cpu_model(workspace, variant, compiled)
    shapes = _shapes(variant.spec)
    return Report(
        variant=variant,
        file=workspace.shown(path).as_posix(),
        source_file=str(variant.source),
        source=source,
        as_rendered=render_variant(variant, workspace, formatted=[source]) == source,
        sha256=files.sha256(path),
        explanation=explanation.explain(variant, [shape for _, shape in shapes], chips.select(None), census.registers),
        shape_names=tuple(name for name, _ in shapes),
        compiled=compiled,
        census=census,
        facts=tuple(counting.rows(census, make_plan(variant).expectation)),
        listing=make_listing(path, compiled),
        simulated=_simulated(variant, census.registers, shapes),
        run=run,
        on_gpu=numerics.from_evidence(workspace, variant),
        on_cpu=on_cpu,
        status=state,
        record=record,
        panels=speeds.panels(workspace, variant),
        ladder=speeds.ladder(workspace, variant),
    )


def _shapes(spec: Forward) -> list[tuple[str, Shape | PackedShape]]:
    """Calls that ceilings are computed for, with the name of their lengths where these have one."""
    heads = default_heads(spec)
    if not footprint.packed_sequences(spec):
        return [("", Shape(max(1, TOKENS // length), length, length, *heads)) for length in SEQ_LENS]
    lists = PAGED_LENGTHS if footprint.paged(spec) else PACKED_LENGTHS
    lists = DECODING_LENGTHS if spec.split is not None else MIXED_LENGTHS if spec.order != "by_sequence" else lists
    if spec.split is not None and spec.tile.q > hopper.MMA_M:
        lists = DRAFT_LENGTHS | CHUNK_LENGTHS
    return [(name, call_of_lengths(spec, *lengths, heads=heads)) for name, lengths in lists.items()]


def _simulated(
    variant: Variant[Forward], registers: int, shapes: Sequence[tuple[str, Shape | PackedShape]]
) -> Simulated | None:
    """None for a module without a pipeline."""
    spec, [chip] = variant.spec, chips.select([CHIP])
    if not tiles.tiled(spec):
        return None
    times = simulation.times_of(spec, chip)
    settings = simulation.settings_of(spec, registers=registers)
    dealt = tuple(
        (name, simulation.deal(Problem(spec, shape), times, chip, registers))
        for name, shape in shapes
        if isinstance(shape, PackedShape)
    )
    if dealt:
        settings = replace(settings, tiles=dealt[0][1].first_tiles(SHOWN_TILES))
    result = simulation.simulate(spec, times, settings)
    stages = simulation.sweep(spec, times, STAGES, registers=registers)
    title = f"{variant.stem}: one SM of {chip.name}, simulated"
    return Simulated(simulation.svg(result, title), chip, times, result, stages, dealt)


def _on_cpu_model(workspace: Workspace, variant: Variant[Forward], compiled: Compiled) -> tuple[Run, Card]:
    """Trace one CTA and run the sweep of errors; a kernel that the model does not cover gives neither."""
    from fa3gen.cpu.findings import OutsideModel
    from fa3gen.cpu.kernel import CpuKernel
    from fa3gen.cpu.ptx import PtxError

    try:
        kernel = CpuKernel(compiled)
        return _traced(workspace, variant, kernel), numerics.on_cpu_model(variant, kernel)
    except (OutsideModel, PtxError) as error:
        return Run(None, problem=str(error)), Card("CPU model of sm_90a", False, (), str(error))


def _traced(workspace: Workspace, variant: Variant[Forward], kernel: CpuKernel) -> Run:
    from fa3gen.cpu.places import SharedPlaces
    from fa3gen.cpu.schedule import Schedule
    from fa3gen.cpu.trace import Trace
    from fa3gen.cpu.trace_files import Source, document
    from fa3gen.inspect import tracing

    path, trace, schedule = workspace.module_path(variant.stem), Trace(), Schedule("warp")
    problem = tracing.Problem(tracing.default_shape(variant.spec))
    ctas = [(tracing.busiest(variant.spec, problem.shape), 0, 0)]
    hazard = tracing.run_kernel(kernel, variant, problem, ctas, schedule, trace)
    source = Source(
        variant.stem, workspace.shown(path).as_posix(), str(path.resolve()), path.read_text(encoding="utf-8")
    )
    places = SharedPlaces.of(variant.spec)
    report = None if hazard is None else str(hazard)
    facts = problem.facts(variant.spec)
    return Run(
        document(trace, source, places, problem=facts, schedule=str(schedule), report=report), problem.shape.in_full
    )
