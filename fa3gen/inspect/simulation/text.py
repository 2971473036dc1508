"""A simulation as text: timeline, utilisation, stalls, and stages against utilisation."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fa3gen.base.wording import listed
from fa3gen.design import splits
from fa3gen.inspect.simulation.comparison import Cell, speeds, spread
from fa3gen.inspect.simulation.lanes import Lane, lanes
from fa3gen.inspect.simulation.results import Simulation, Span
from fa3gen.inspect.simulation.run import Dealt, Settings, StageRow
from fa3gen.inspect.simulation.times import Times

SHOWN_STALLS = 8
LEGEND = "- in flight, = stage in use; S = Q K^T, O = P V; x exponentials, c other computing, . waiting"


def show(
    console: Console, title: str, times: Times, settings: Settings, simulation: Simulation, rows: Sequence[StageRow]
) -> None:
    """Print everything; without `rows` no table of stages."""
    for line in (*_title(title, times, settings, simulation), *timeline(simulation, console.width)):
        console.print(Text(line) if isinstance(line, str) else line, soft_wrap=True)
    tables = [("Who waits for what", _stalls(simulation))]
    if rows:
        tables.append(("Stages of K and V, in the steady state", _stages(rows, settings.stages)))
    for heading, table in tables:
        _print_table(console, heading, table)


def show_problem(console: Console, dealt: Dealt) -> None:
    """Print how a whole problem is dealt out, and the speed that follows."""
    chip, busy, problem = dealt.chip, f"{dealt.balance:.0%}", dealt.problem
    what = "parts" if problem.spec.split is not None else "tiles"
    lines = [
        _heading("Whole problem"),
        f"  {problem.shape}: {problem.tiles:,} tiles of queries, {problem.visited:,} of keys",
        *_parts(dealt),
        f"  dealt out to {len(dealt.places):,} CTAs on {chip.sms} SMs, which are busy {busy} of the time on average",
        *_memory(dealt),
        f"  {dealt.cycles:,.0f} cycles, {dealt.tflops:,.{_digits(dealt.tflops)}f} TFLOP/s, {dealt.gigabytes:,.0f} GB/s "
        f"at {chip.clock_hz.value / 1e6:,.0f} MHz",
        f"  the timeline is that of the first {what} of the first CTA",
    ]
    for line in lines:
        console.print(Text(line) if isinstance(line, str) else line, soft_wrap=True)


def _parts(dealt: Dealt) -> list[str]:
    """How keys are split, and what adding up takes; nothing where they are not."""
    problem = dealt.problem
    if problem.spec.split is None:
        return []
    how = splits.told(problem.spec, problem.shape, dealt.chip.sms, problem.num_splits)
    return [f"  keys in parts: {how}", f"  adding up parts takes {dealt.adding_up:,.0f} cycles at the end"]


def _memory(dealt: Dealt) -> list[str]:
    """Where K and V come from, how much of them may be under way, and how much that has to be where HBM bounds."""
    memory, chip, times = dealt.memory, dealt.chip, dealt.times
    flight = f"{memory.in_flight / 1e6:,.1f} MB of K and V may be under way"
    if not memory.from_hbm:
        return [f"  {memory.loaded / 1e6:,.1f} MB of K and V are loaded, all taken to be in L2; {flight}"]
    needed = chip.hbm.value / chip.clock_hz.value * times.flight(times.k_bytes) / 1e6
    return [
        f"  {memory.loaded / 1e6:,.1f} MB of K and V are loaded, {memory.from_hbm / 1e6:,.1f} MB of them from HBM, by "
        f"{memory.busy_sms} SMs at a time: {times.load_rate:.1f} bytes a cycle each",
        f"  {flight}; HBM is kept busy by {needed:,.1f} MB",
    ]


def _digits(tflops: float) -> int:
    """Behind the decimal point: two where memory bounds."""
    return 0 if tflops >= 100 else 2


def show_cells(console: Console, cells: Sequence[Cell]) -> None:
    """Print predictions beside what was measured, and how far these are apart."""
    for stem in dict.fromkeys(cell.stem for cell in cells):
        table = _table(("problem", "even", "oldest first", "measured", "measured / predicted"), left=(0,))
        for cell in cells:
            if cell.stem == stem:
                table.add_row(f"  {cell.problem}", *speeds(cell))
        _print_table(console, f"{stem}: TFLOP/s, predicted and measured", table)
    console.print(_heading("By lengths"))
    for line in spread(cells).splitlines():
        console.print(Text(f"  {line.removeprefix('- ')}"), soft_wrap=True)


def _print_table(console: Console, heading: str, table: Table) -> None:
    """Without spaces at the ends of lines."""
    console.print(_heading(heading))
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.out(line.rstrip(), highlight=False)


def _heading(text: str) -> Text:
    return Text(text, style="bold cyan")


def _title(title: str, times: Times, settings: Settings, simulation: Simulation) -> list[Text | str]:
    ctas = f"{settings.ctas} CTA{'s' if settings.ctas > 1 else ''} on an SM"
    busy = ", ".join(f"{unit} {simulation.steady(unit):.0%}" for unit, _ in simulation.busy)
    qk, pv = times.products_alone
    stages = f"{settings.stages} stage{'s' if settings.stages > 1 else ''}"
    overall = f"{simulation.utilisation('tensor cores'):.0%}"
    return [
        Text(title, style="bold"),
        f"  {ctas}, {_tiles(settings.tiles)} tiles of keys, {stages}; products served {_served(settings)}",
        f"  a warpgroup alone: S = Q K^T {qk:,.0f}, softmax {times.softmax_alone:,.0f}, O += P V "
        f"{pv:,.0f} cycles; loads: latency {times.load_latency:,.0f}, {times.load_rate:.1f} bytes a cycle",
        _heading("Steady state"),
        f"  {simulation.step_cycles:,.0f} cycles a tile of keys; busy: {busy}",
        f"  from start to end {simulation.end:,.0f} cycles, tensor cores busy {overall}",
    ]


def _tiles(tiles: Sequence[int]) -> str:
    """`12`, `2 x 12`, or `8, 3 and 1`."""
    if len(set(tiles)) > 1:
        return listed([str(count) for count in tiles])
    return f"{tiles[0]}" if len(tiles) == 1 else f"{len(tiles)} x {tiles[0]}"


def _served(settings: Settings) -> str:
    return "evenly" if settings.arbitration == "even" else "oldest first"


# -- timeline


def timeline(simulation: Simulation, width: int) -> list[Text | str]:
    """A line of characters for each lane, each the span that takes most of its slice of time."""
    rows = lanes(simulation)
    label = max(len(lane.label) for lane in rows) + 2
    columns = max(20, width - label - 2)
    lines: list[Text | str] = [_heading("Timeline"), f"  {LEGEND}"]
    cta = -1
    for lane in rows:
        if simulation.ctas > 1 and lane.cta != cta:
            cta = lane.cta
            lines.append(f"  CTA {cta}")
        lines.append(f"  {lane.label:<{label}}{_characters(lane, simulation.end, columns)}".rstrip())
    return lines


def _characters(lane: Lane, end: float, columns: int) -> str:
    slice_cycles = end / columns
    most = [0.0] * columns
    letters = [" "] * columns
    for span in lane.spans:
        first, last = int(span.start / slice_cycles), min(columns - 1, int(span.end / slice_cycles))
        for index in range(first, last + 1):
            begin = index * slice_cycles
            covered = min(span.end, begin + slice_cycles) - max(span.start, begin)
            if covered > most[index]:
                most[index], letters[index] = covered, _letter(span)
    return "".join(letters)


def _letter(span: Span) -> str:
    if span.kind in ("load", "held", "wait"):
        return {"load": "-", "held": "=", "wait": "."}[span.kind]
    if span.what.startswith(("S =", "O +=")):
        return span.what[0]
    return "x" if span.what == "exponentials" else "c"


# -- tables


def _table(names: Sequence[str], left: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for index, name in enumerate(names):
        heading = ("  " if index == 0 else "") + name
        table.add_column(heading, justify="left" if index in left else "right", overflow="fold")  # nothing is cut off
    return table


def _stalls(simulation: Simulation) -> Table:
    table = _table(("who", "for", "cycles", "of the time"), left=(0, 1))
    for stall in simulation.stalls()[:SHOWN_STALLS]:
        table.add_row(f"  {stall.actor}", stall.what, f"{stall.cycles:,.0f}", f"{stall.share:.0%}")
    return table


def _stages(rows: Sequence[StageRow], present: int) -> Table:
    names = ("stages", "CTAs", "cycles a tile", "tensor", "if even", "exp", "issue", "waits for K, V", "")
    table = _table(names, left=(8,))
    for row in rows:
        notes = [*["this spec"] * (row.stages == present), *["refused by the rules"] * (not row.legal)]
        table.add_row(
            f"{row.stages}",
            f"{row.ctas}",
            f"{row.step_cycles:,.0f}",
            f"{row.tensor:.0%}",
            f"{row.tensor_even:.0%}",
            f"{row.exponentials:.0%}",
            f"{row.issue:.0%}",
            f"{row.waiting:.0%}",
            ", ".join(notes),
        )
    return table
