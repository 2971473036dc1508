"""The tables of the stage sweep in docs/ladder.md: measured, simulated, and CTAs that share an SM.

Two blocks, which `fa3gen.inspect.ladder_page` writes:

    sweep HEAD_DIM LENGTH      all kernels of specs/sweep, a column for each number of stages
    held HEAD_DIM SPEC         of one of them, what fewer CTAs on an SM do, a column for each number
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fa3gen.base import markdown
from fa3gen.compile.one_bank import NO_CONFLICTS
from fa3gen.design import footprint
from fa3gen.design.work import Problem
from fa3gen.design.workspace import Workspace
from fa3gen.hardware import chips
from fa3gen.inspect import simulation
from fa3gen.inspect.simulation.run import measured_shape
from fa3gen.records import stage_sweep
from fa3gen.records.stage_sweep import Measured, StageSweep
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import Variant

CHIP = chips.H200
HELD_LENGTH = 4096
MISSING = "–"


@dataclass(frozen=True)
class Row:
    """The modules of one line: a kernel and its threads, by stages."""

    name: str
    by_stages: dict[int, Variant[Forward]]


def rows(workspace: Workspace, head_dim: int) -> Iterator[Row]:
    """The lines of a head dim."""
    found: dict[str, dict[int, Variant[Forward]]] = {}
    for variant in stage_sweep.variants(workspace):
        spec = variant.spec
        if spec.problem.head_dim == head_dim:
            kernel = spec_name(variant)
            found.setdefault(kernel, {})[footprint.kv_stages(spec)] = variant
    yield from (Row(name, by_stages) for name, by_stages in found.items())


def spec_name(variant: Variant[Forward]) -> str:
    """The rung and the tile, as a line of the tables is called."""
    rung = variant.source.stem.rsplit("_", 1)[0]
    tile = variant.spec.tile
    return f"`{rung}`, {footprint.threads(variant.spec)} threads, {tile.q} x {tile.kv}"


def simulated(spec: Forward, row: Measured, length: int) -> tuple[float, float]:
    """TFLOP/s that the simulator predicts for as many CTAs, oldest first and even, at the clock that was read."""
    problem = Problem(spec, measured_shape(spec, length))
    times = simulation.times_of(spec, CHIP, row.one_bank or NO_CONFLICTS)
    oldest = simulation.predict(problem, times, CHIP, arbitration="oldest", ctas=row.ctas)
    even = simulation.predict(problem, times, CHIP, arbitration="even", ctas=row.ctas)
    faster = row.sm_mhz.get(str(length), CHIP.clock_hz.value / 1e6) * 1e6 / CHIP.clock_hz.value
    return oldest * faster, even * faster


def cell(spec: Forward, row: Measured | None, length: int) -> str:
    """CTAs, TFLOP/s measured and simulated."""
    if row is None or str(length) not in row.tflops:
        return MISSING
    answers = dict.fromkeys(f"{answer:.3g}" for answer in sorted(simulated(spec, row, length)))
    return f"{row.tflops[str(length)]:.3g} ({' to '.join(answers)})"


def said(sweep: StageSweep, length: int) -> str:
    """What stands below a table."""
    return (
        f"TFLOP/s unmasked, {length // 1024}k, as measured (as simulated, at the clock that was read); "
        f"measured {sweep.timed}: {sweep.gpu}, {sweep.date}.\n"
    )


def sweep_table(workspace: Workspace, arguments: str) -> str:
    """`HEAD_DIM LENGTH`."""
    head_dim, length = map(int, arguments.split())
    sweep, lines = _read(workspace), list(rows(workspace, head_dim))
    stages = sorted({count for line in lines for count in line.by_stages})
    table = []
    for line in lines:
        cells = []
        for count in stages:
            variant = line.by_stages[count]
            row = sweep.as_it_is(variant.stem)
            ctas = f"{row.ctas} CTA{'s' * (row.ctas > 1)}: " if row else ""
            cells.append(ctas + cell(variant.spec, row, length))
        table.append([line.name, *cells])
    return _table([f"head dim {head_dim}", *map(_stages, stages)], table) + "\n" + said(sweep, length)


def held_table(workspace: Workspace, arguments: str) -> str:
    """`HEAD_DIM SPEC`: those of its modules of which a copy was measured."""
    head_dim, spec_stem = arguments.split()
    sweep, found = _read(workspace), {}
    for line in rows(workspace, int(head_dim)):
        for count, variant in sorted(line.by_stages.items()):
            by_ctas = {row.ctas: row for row in sweep.measured if row.stem == variant.stem}
            if variant.source.stem == spec_stem and len(by_ctas) > 1:
                found[f"{line.name}, {_stages(count)}"] = variant.spec, by_ctas
    columns = sorted({ctas for _, by_ctas in found.values() for ctas in by_ctas})
    table = [
        [name, *(cell(spec, by_ctas.get(ctas), HELD_LENGTH) for ctas in columns)]
        for name, (spec, by_ctas) in found.items()
    ]
    heads = [f"{ctas} CTA{'s' * (ctas > 1)} on an SM" for ctas in columns]
    return _table([f"head dim {head_dim}", *heads], table) + "\n" + said(sweep, HELD_LENGTH)


def _stages(count: int) -> str:
    return f"{count} stage{'s' * (count > 1)}"


def _read(workspace: Workspace) -> StageSweep:
    sweep = stage_sweep.read(workspace)
    if sweep is None:
        raise LookupError(f"there is no {stage_sweep.record_path(workspace)}; {stage_sweep.TOOL} writes it")
    return sweep


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(markdown.table(columns, lines)) + "\n"
