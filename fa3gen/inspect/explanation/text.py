"""An explanation as a screen of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fa3gen.design import footprint
from fa3gen.design.ceiling import ProblemCeiling
from fa3gen.design.family import heads_text
from fa3gen.design.rules import Answer, Kind
from fa3gen.design.splits import num_parts, share_of, told
from fa3gen.generate.header import PLACE_TITLES
from fa3gen.hardware import hopper
from fa3gen.inspect.explanation.facts import AttentionWork, Explanation
from fa3gen.inspect.explanation.legality import Limit
from fa3gen.spec.model import GlobalHandoff

GAP = 3  # columns between tables that stand side by side
# Limits that the screen shows; all are in the JSON document.
_SHOWN_LIMITS = ("load.kv_stages", "tile.kv")
# Facts of a rule that its place on the screen says already.
_UNSAID = {"field", "product", "tma", "tensor", "wgmma", "kind", "source", "overlap", "consumers"}


def show(explanation: Explanation, console: Console, *, rules: bool = False) -> None:
    """Print one explanation; with `rules` every rule that was checked, too."""
    with console.capture() as captured:
        for renderable in screen(explanation, console, rules=rules):
            console.print(renderable)
    for line in captured.get().splitlines():
        console.out(line.rstrip(), highlight=False)


def screen(explanation: Explanation, console: Console, *, rules: bool = False) -> Iterable[RenderableType]:
    """The parts of the screen, from top to bottom; two stand side by side where they fit."""
    yield Text(f"{explanation.stem}: {explanation.description.title}", style="bold")
    yield Text(f"{explanation.source.as_posix()}. {explanation.description.sentence}", style="dim")
    yield _heading("Decisions, and the rules of the hardware that they keep")
    yield _decisions(explanation)
    yield from _limits(explanation)
    yield from _warnings(explanation)
    if set(explanation.fields_from) - {explanation.source.as_posix()}:
        given = (f"{', '.join(fields)} in {file}" for file, fields in explanation.fields_from.items())
        yield _note(f"Fields are given by: {'; '.join(given)}", style="dim")
    yield _heading("Warps and registers")
    yield Group(*(_note(line) for line in explanation.description.threads))
    for title, rows in (
        ("Barriers", explanation.description.barriers),
        ("Named barriers", explanation.description.named_barriers),
    ):
        if rows:
            yield _heading(title)
            yield _table(rows[1:], header=rows[0])
    if explanation.work is None:
        yield from _shared_memory(explanation)
        yield from _steps(explanation)
        yield _heading("Occupancy")
        yield _occupancy(explanation)
    else:
        yield from _side_by_side(console, _shared_memory(explanation), _counts(explanation.work))
        yield from _side_by_side(console, _steps(explanation), _bounds(explanation.work))
        yield from _ceilings(explanation.work)
        yield _occupancy(explanation)
        yield from _problems(explanation.work, console)
        yield from _parts(explanation.work)
    if rules:
        yield _heading(f"The {len(explanation.asked)} answers of the rules")
        yield _all_rules(explanation)


def _heading(text: str) -> Text:
    return Text(text, style="bold cyan")


def _note(text: str, style: str = "") -> Padding:
    """A paragraph, indented by two."""
    return Padding(Text(text, style=style), (0, 0, 0, 2))


def _side_by_side(
    console: Console, left: Sequence[RenderableType], right: Sequence[RenderableType]
) -> list[RenderableType]:
    """Both beside each other where there is room and both are there, else one below the other."""
    if not (left and right) or _width(console, left) + GAP + _width(console, right) > console.width:
        return [*left, *right]
    table = Table.grid(padding=(0, GAP))
    table.add_column()
    table.add_column()
    table.add_row(Group(*left), Group(*right))
    return [table]


def _width(console: Console, parts: Sequence[RenderableType]) -> int:
    """Columns that the widest part takes when nothing is wrapped."""
    options = console.options.update(max_width=1000)
    return max(Measurement.get(console, options, part).maximum for part in parts)


def _table(rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), header: Sequence[str] = ()) -> Table:
    """Rows in columns, indented by two; `right` are the columns of numbers."""
    rows = [tuple(row) for row in rows]
    columns = max((len(row) for row in rows), default=len(header))
    table = Table(box=None, show_header=bool(header), header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for index in range(columns):
        name = header[index] if header else ""
        last = index == columns - 1
        table.add_column(
            ("  " if index == 0 else "") + name,
            justify="right" if index in right else "left",
            no_wrap=not last,
            overflow="fold" if last else "ellipsis",
        )
    for row in rows:
        cells = [Text(("  " if index == 0 else "") + cell) for index, cell in enumerate(row)]
        table.add_row(*cells, *[""] * (columns - len(cells)))
    return table


# -- decisions


def _decisions(explanation: Explanation) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in explanation.description.decisions:
        why = _why(explanation.asked, name)
        table.add_row(f"  {name}", Text(text) if not why else Text.assemble(text, "\n", (why, "dim")))
    return table


def _why(asked: Sequence[Answer], about: str) -> str:
    """The hardware's rules about one decision with their facts, in one paragraph."""
    found: dict[str, list[str]] = {}
    for question in asked:
        if question.rule.kind is Kind.HARDWARE and question.about == about:
            said = [(key, value) for key, value in question.facts if key not in _UNSAID and value != "None"]
            facts = ", ".join(f"{_words(key)} {value}" for key, value in said)
            values = found.setdefault(question.rule.statement, [])
            if facts and facts not in values:
                values.append(facts)
    return "; ".join(statement + (f" ({'; '.join(facts)})" if facts else "") for statement, facts in found.items())


def _words(name: str) -> str:
    return name.replace("_", " ")


def _limits(explanation: Explanation) -> list[RenderableType]:
    asked = Counter(question.rule.kind for question in explanation.asked)
    who = ", ".join(f"{kind} {asked[kind]}" for kind in Kind)
    told = f"The rules answered {asked.total()} questions ({who}); none refuses (--rules shows them)"
    shown = [_limit(limit) for limit in explanation.limits if limit.field in _SHOWN_LIMITS]
    parts: list[RenderableType] = [_note(told, style="dim")]
    if shown:
        parts += [_heading("The nearest that is refused"), _table(shown)]
    return parts


def _limit(limit: Limit) -> tuple[str, str]:
    reach = f"up to {limit.largest}, " if limit.largest != limit.value else ""
    return (
        f"{limit.field} {limit.value}",
        f"{reach}not {limit.refused} ({limit.kind}): {limit.message.partition('; use')[0]}",
    )


def _warnings(explanation: Explanation) -> list[RenderableType]:
    """What the rules of taste have against it."""
    found = [answer.violation for answer in explanation.asked if answer.violation is not None]
    if not found:
        return []
    return [_heading("Legal, but not advisable (taste)"), _table(found)]


def _all_rules(explanation: Explanation) -> Table:
    rows = []
    for question in explanation.asked:
        facts = ", ".join(f"{_words(key)} {value}" for key, value in question.facts)
        rows.append((question.about, question.rule.kind, question.rule.name, f"{question.rule.text} ({facts})"))
    return _table(rows, header=("about", "who says it", "rule", "what it says, and of what"))


# -- the parts of the module


def _shared_memory(explanation: Explanation) -> list[RenderableType]:
    if not explanation.smem:
        return []
    rows = [
        (str(offset), f"{region.bytes:,}", region.name, f"{region.formula}: {region.what}".rstrip(": "))
        for offset, region in explanation.smem
    ]
    total = f"of {hopper.SMEM_PER_CTA:,} per CTA, {explanation.smem_left:,} left"
    rows.append(("", f"{explanation.smem_total:,}", "total", total))
    header = ("offset", "bytes", "what", "")
    return [_heading("Shared memory"), _table(rows, right=(0, 1), header=header)]


def _steps(explanation: Explanation) -> list[RenderableType]:
    """Those of a tile of keys, on which the bounds are; the module's header and the JSON document have all of them."""
    every = explanation.description.steps
    steps = [row for row in every if row.place in ("", PLACE_TITLES["step"])] or list(every)
    rows = [(str(number), *step[1:]) for number, step in enumerate(steps, 1)]
    title = explanation.description.steps_title
    return [
        _heading(f"Steps, {title.rpartition('a step takes ')[2]}" if "a step takes" in title else title),
        _table(rows),
    ]


def _counts(work: AttentionWork) -> list[RenderableType]:
    """Counts of one step and of a tile of queries."""
    spec, step, tile = work.spec, work.step, work.query_tile
    groups = spec.tile.warpgroups or 1
    rows = [("FLOP", f"{step.flops:,}")]
    if step.wgmma_qk:
        shape = f"m{hopper.WGMMA_M}n{spec.tile.kv}k{spec.element.wgmma_k}"
        rows.append(("WGMMA, Q K^T", f"{step.wgmma_qk} {shape}, {step.wgmma_qk // groups} per warpgroup"))
    if step.wgmma_pv:
        shape = f"m{hopper.WGMMA_M}n{footprint.promoted_columns(spec)}k{spec.element.wgmma_k}"
        rows.append(("WGMMA, P V", f"{step.wgmma_pv} {shape}, {step.wgmma_pv // groups} per warpgroup"))
    if step.scalar_fmas:
        rows.append(("multiply-adds", f"{step.scalar_fmas:,}"))
    warps = max(1, footprint.computing_threads(spec) // hopper.WARP)
    rows.append(("exponentials", f"{step.exponentials:,}"))
    rows.append(("instructions", f"about {step.instructions / warps:,.0f} in each warp that computes"))
    if step.tma_loads:
        rows.append(("TMA loads", f"{step.tma_loads} of K and V, {step.l2_bytes:,} bytes"))
        stores = f"; {tile.tma_stores} stores of O" if tile.tma_stores else ""
        rows.append(("a tile of queries", f"{tile.tma_loads} loads of Q{stores}"))
    naive = isinstance(spec.handoff, GlobalHandoff)
    through = "L1" if naive else "shared memory"
    intensity = f"{step.flops / step.l2_bytes:.3g} of L2, {step.flops / step.smem_bytes:.2g} of {through}"
    rows.append(("FLOP per byte", intensity))
    title = "Counts, a tile of scores in all kernels" if naive else "Counts, one tile of keys, one CTA"
    return [_heading(title), _table(rows)]


# -- speed


def _bounds(work: AttentionWork) -> list[RenderableType]:
    """What each unit takes for a step."""
    [first, *_] = work.ceilings
    longest = first.binding.cycles
    rows = [
        (bound.unit, f"{bound.cycles:,.0f}", f"{bound.cycles / longest:.0%}")
        for bound in sorted(first.bounds, key=lambda bound: -bound.cycles)
    ]
    table = _table(rows, right=(1, 2), header=("of a step, on one SM", "cycles", "busy"))
    return [_heading(f"What bounds it: {first.binding.unit}"), table]


def _ceilings(work: AttentionWork) -> list[RenderableType]:
    operand_bytes = work.spec.element.bytes
    speeds = "; ".join(
        f"{ceiling.chip.name} {ceiling.tflops:,.0f} TFLOP/s of {ceiling.chip.tensor_tflops(operand_bytes):,.0f}"
        for ceiling in work.ceilings
    )
    clock = work.ceilings[0].chip.clock_hz.value / 1e6
    return [
        _heading("Speed and occupancy"),
        _note(f"at most {speeds}, at {clock:,.0f} MHz"),
    ]


def _occupancy(explanation: Explanation) -> Padding:
    found = explanation.occupancy
    origin = "as compiled" if found.registers_known else "as expected"
    allowed = ", ".join(f"{name} {count}" for name, count in found.allowed)
    return _note(f"CTAs per SM: {found.ctas} (at most {allowed}; {found.registers} registers a thread, {origin})")


def _problems(work: AttentionWork, console: Console) -> list[RenderableType]:
    """One table where it fits, two where not."""
    if not work.problems:
        return []
    chips = [f"{row.chip.name}" for row in work.problems[0]]
    first = ("q x k", "batch", "heads", "tiles", "waves", "SMs busy", "computed")
    second = ("steps", "masked", "skipped", "FLOP/B", *chips)
    rows = [_problem(row) for row in work.problems]
    of_one_length = ", all sequences equally long" if work.spec.problem.layout != "dense" else ""
    split = len(first)
    whole = _table(rows, right=range(1, split + len(second)), header=(*first, *second))
    note = (
        "computed: FLOPs done over those counted; steps: tiles of keys; FLOP/B: for each byte of HBM; "
        "chips: TFLOP/s at most, with HBM where that bounds it"
    )
    if work.spec.split is not None:
        sms = work.problems[0][0].chip.sms
        even = work.spec.scheduler == "even"
        count = share_of if even else num_parts
        problems = [row[0].problem for row in work.problems]
        counts = ", ".join(str(count(work.spec, each.shape, sms, each.num_splits)) for each in problems)
        note += f"; {'steps of each CTA' if even else 'parts of the keys of each tile'} on {sms} SMs: {counts}"
    if window := work.problems[0][0].problem.shape.window:
        note += f"; window {window} of each call"
    heading, told = _heading(f"Waves and ceilings, whole problems{of_one_length}"), _note(note, style="dim")
    if _width(console, [whole]) <= console.width:
        return [heading, whole, told]
    left = _table([row[:split] for row in rows], right=range(1, split), header=first)
    narrow = [(row[0], *row[split:]) for row in rows]
    return [heading, left, _table(narrow, right=range(1, 1 + len(second)), header=("q x k", *second)), told]


def _parts(work: AttentionWork) -> list[RenderableType]:
    """Where keys come in parts: how many, and why, for each problem."""
    if work.spec.split is None or not work.problems:
        return []
    sms, problems = work.problems[0][0].chip.sms, [row[0].problem for row in work.problems]
    rows = [(each.shape.lengths_text, told(work.spec, each.shape, sms, each.num_splits)) for each in problems]
    return [_heading(f"Parts of the keys, on {sms} SMs"), _table(rows, header=("q x k", "parts"))]


def _problem(row: tuple[ProblemCeiling, ...]) -> tuple[str, ...]:
    problem = row[0].problem
    shape = problem.shape
    heads = heads_text(shape.heads_q, shape.heads_kv)
    return (
        shape.lengths_text,
        str(shape.batch),
        heads,
        f"{problem.tiles:,}",
        f"{row[0].waves:.2f}",
        f"{row[0].balance:.0%}",
        f"{problem.over_compute:.2f}",
        f"{problem.visited:,}",
        f"{problem.masked:,}",
        f"{problem.skipped:,}",
        f"{problem.intensity:.0f}",
        *(f"{cell.tflops:,.0f}{' HBM' if cell.bounded_by == 'HBM' else ''}" for cell in row),
    )
