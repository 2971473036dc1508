"""What differs between two modules: the fields of their specs, their plans, their source."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fa3gen.compile import census
from fa3gen.design import ceiling, footprint, work
from fa3gen.generate.header import StepRow
from fa3gen.generate.module_plan import ModulePlan
from fa3gen.generate.plan import Plan
from fa3gen.hardware import chips, hopper
from fa3gen.inspect.difference.model import FieldChange, PairDifference, PlanChange, Side, SourceChange, Step
from fa3gen.spec.complaints import FIELDS
from fa3gen.spec.model import Forward, Spec

STEP_WORK = "work of a CTA in one step"
KEYS = 4096  # that a tile of queries is followed over where tiles differ

# What the plan says of a module, by topic and by name: {"shared memory": {"sQ": "at 0: 32768 bytes ..."}}.
Facts = dict[str, dict[str, str]]


def compare(old: Side, new: Side) -> PairDifference:
    """Everything that differs; specs and plans only where both sides have them."""
    fields: list[FieldChange] = []
    plan: list[PlanChange] = []
    steps: list[Step] = []
    if old.spec is not None and new.spec is not None:
        fields = field_changes(
            {"summary": old.summary, **leaves(old.spec)}, {"summary": new.summary, **leaves(new.spec)}
        )
        fields = [replace(change, base=_base(new, change.field)) for change in fields]
    if old.plan is not None and new.plan is not None:
        plan = plan_changes(facts(old.plan), facts(new.plan))
        end = max((index for index, change in enumerate(plan, 1) if change.topic == STEP_WORK), default=len(plan))
        if isinstance(old.plan, Plan) and isinstance(new.plan, Plan):
            plan[end:end] = tile_changes(old.plan.spec, new.plan.spec)
        steps = step_changes(old.plan.described.steps, new.plan.described.steps)
    return PairDifference(old, new, tuple(fields), tuple(plan), tuple(steps), source_change(old, new))


# Fields


def _base(side: Side, path: str) -> str | None:
    """The spec file that a field comes from, where it is not the module's own."""
    origin = side.origins.get(path)
    return None if origin is None or origin.as_posix() == side.source else origin.as_posix()


def leaves(spec: Spec) -> dict[str, Any]:
    """Dotted path -> value of every field that is set, defaults among them; null is the same as not there."""
    return dict(_leaves(spec.model_dump(exclude_none=True)))


def _leaves(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def field_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[FieldChange]:
    """The fields that differ, those of one part of the spec next to each other, in the order of the models."""
    parts = ["summary", *FIELDS]
    paths = sorted({**old, **new}, key=lambda path: parts.index(path.partition(".")[0]))
    changes = [FieldChange(path, old.get(path), new.get(path)) for path in paths]
    return [change for change in changes if change.old != change.new]


# Plan


def facts(plan: ModulePlan) -> Facts:
    """The plan as people read it, from the same data as the header of the module and `fa3gen explain`."""
    described, attention = plan.described, isinstance(plan, Plan)
    return {
        "decisions": {"mask" if attention else "computes": described.sentence, **dict(described.decisions)},
        "threads and registers": _thread_facts(plan),
        "shared memory": _smem_facts(plan),
        "barriers": {**_rows(described.barriers), **_rows(described.named_barriers)},
        STEP_WORK: _work_facts(plan.spec) if isinstance(plan, Plan) else {},
        "expected of the compiled code": _counts(plan),
        "templates": _templates(plan),
    }


def _thread_facts(plan: ModulePlan) -> dict[str, str]:
    held = plan.cta.held
    parts = ", ".join(f"{what} {count}" for what, count in held)
    found = {"threads per CTA": str(plan.cta.threads)}
    if isinstance(plan, Plan):
        found["threads that compute"] = str(footprint.computing_threads(plan.spec))
    found["registers of a computing thread"] = f"about {sum(count for _, count in held)}: {parts}"
    if isinstance(plan, Plan) and plan.schedule.specialized:
        found["registers of the producer"] = f"{plan.schedule.producer_registers}, by setmaxnreg"
        found["registers of a consumer"] = f"{plan.schedule.consumer_registers}, by setmaxnreg"
    return found


def _smem_facts(plan: ModulePlan) -> dict[str, str]:
    """Where each array lies, how large it is, and what is left of what a CTA may take."""
    total = plan.cta.smem_bytes
    if not total:
        return {}
    places = {
        region.name: f"at {offset}: {region.bytes} bytes, {f'{region.formula}: {region.what}'.rstrip(': ')}"
        for offset, region in plan.cta.placed()
    }
    # What registers allow is known only once a module is compiled.
    room = dict(ceiling.occupancy(plan.spec).allowed)["shared memory"]
    return {
        **places,
        "total": f"{total} bytes",
        "left for a CTA": f"{hopper.SMEM_PER_CTA - total} bytes",
        "CTAs per SM that it allows": str(room),
    }


def _work_facts(spec: Forward) -> dict[str, str]:
    """What one tile of queries costs with one tile of keys; zero is not said."""
    step = work.step(spec)
    found = {
        "tensor cores": (step.tensor_flops, "FLOP"),
        "multiply-adds": (step.scalar_fmas, ""),
        "exponentials": (step.exponentials, ""),
        "shared memory": (step.smem_bytes, "bytes"),
        "L2": (step.l2_bytes, "bytes"),
    }
    return {what: f"{round(amount):,} {unit}".rstrip() for what, (amount, unit) in found.items() if amount}


def tile_changes(old: Forward, new: Forward) -> list[PlanChange]:
    """Where the tiles differ, a step is another amount of work: what it costs for each unit of it, changed or not."""
    if (old.tile.q, old.tile.kv) == (new.tile.q, new.tile.kv):
        return []
    by_row = old.tile.q != new.tile.q
    unit = "work for each key and query row" if by_row else "work for each key of a tile of queries"
    changes = []
    for topic, before, after in (
        (unit, _unit_facts(old, by_row=by_row), _unit_facts(new, by_row=by_row)),
        (f"work over {KEYS:,} keys", _whole_facts(old), _whole_facts(new)),
    ):
        changes += [PlanChange(topic, what, before.get(what), after.get(what)) for what in _merged([*before], [*after])]
    return changes


def _unit_facts(spec: Forward, *, by_row: bool) -> dict[str, str]:
    """What each unit of an SM does for one key, and how long that takes it."""
    share = spec.tile.kv * (spec.tile.q if by_row else 1)
    bounds = ceiling.steady(spec, chips.H200).bounds
    return {
        bound.unit: f"{_amount(bound.amount / share)} {bound.what}, {_amount(bound.cycles / share)} cycles"
        for bound in bounds
    }


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _whole_facts(spec: Forward) -> dict[str, str]:
    """What a tile of queries takes over so many keys, in whole tiles of keys, and the ceiling in the steady state."""
    steps, steady = -(-KEYS // spec.tile.kv), ceiling.steady(spec, chips.H200)
    cycles, unit = steps * steady.binding.cycles, steady.binding.unit
    return {
        "a tile of queries": f"{spec.tile.q} rows, {steps} steps, {cycles:,.0f} cycles of {unit}",
        "keys computed": f"{steps * spec.tile.kv:,}",
        "ceiling": f"{steady.tflops:.0f} TFLOP/s, bound by {unit} ({steady.chip.name})",
    }


def _rows(table: Sequence[tuple[str, ...]]) -> dict[str, str]:
    """A table with headings, by its column of names; of numbered barriers the name comes second."""
    if not table:
        return {}
    headings, *rows = table
    place = headings.index("name") if "name" in headings else 0
    columns = [index for index in range(len(headings)) if index != place]
    return {row[place]: "; ".join(_cell(headings[index], row[index]) for index in columns) for row in rows}


def _cell(heading: str, text: str) -> str:
    match heading:
        case "stages":
            return "1 stage" if text == "1" else f"{text} stages"
        case "number":
            return f"named barriers {text}" if " to " in text else f"named barrier {text}"
        case "threads":
            return f"{text} threads"
        case "full with" | "empty with":
            return f"{heading} {text}"
        case _:
            return text


def _counts(plan: ModulePlan) -> dict[str, str]:
    """What the compiled code must show, in the words of `fa3gen compile`: a comparison with nothing at all."""
    rows = census.rows(census.Census(()), plan.expectation)
    known = [(row.fact, row.expected) for row in rows if row.fact != census.SMEM_FACT]  # it is in the map
    return {fact: expected for fact, expected in known if expected not in (None, "0", "none")}


def _templates(plan: ModulePlan) -> dict[str, str]:
    return {name: value.removeprefix("sections/").removesuffix(".py.jinja") for name, value in plan.templates.items()}


def plan_changes(old: Facts, new: Facts) -> list[PlanChange]:
    """The facts that differ, topic by topic; what a side does not have is None."""
    changes = []
    for topic in old:
        for what in _merged(list(old[topic]), list(new[topic])):
            before, after = old[topic].get(what), new[topic].get(what)
            if before != after:
                changes.append(PlanChange(topic, what, before, after))
    return changes


def _merged(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """The names of both sides, each once: those of the new side in its order, removed ones where they stood."""
    merged: list[str] = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for _, low, high, new_low, new_high in matcher.get_opcodes():
        merged += [*old[low:high], *new[new_low:new_high]]
    return list(dict.fromkeys(merged))


def step_changes(old: Sequence[StepRow], new: Sequence[StepRow]) -> list[Step]:
    """Both sequences in one, and nothing where they are the same. Who takes a step is no difference by itself."""
    before, after = ([row._replace(who="") for row in side] for side in (old, new))
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    steps: list[Step] = []
    for kind, low, high, new_low, new_high in matcher.get_opcodes():
        if kind == "equal":
            steps += [Step("same", _step_text(row)) for row in new[new_low:new_high]]
        else:
            steps += [Step("removed", _step_text(row)) for row in old[low:high]]
            steps += [Step("added", _step_text(row)) for row in new[new_low:new_high]]
    return steps if any(step.change != "same" for step in steps) else []


def _step_text(row: StepRow) -> str:
    place = f"{row.place}, " * bool(row.place)
    return f"{place}{row.who}: {row.what}{f' ({row.note})' * bool(row.note)}"


# Source


def source_change(old: Side, new: Side) -> SourceChange | None:
    """The two modules, when both are there and they differ."""
    if old.module is None or new.module is None or old.module == new.module:
        return None
    return SourceChange(old.module_name, new.module_name, old.module, new.module)


def unified(change: SourceChange, context: int = 3) -> list[str]:
    """The lines of a unified diff, without line ends."""
    before, after = change.old.splitlines(), change.new.splitlines()
    return list(difflib.unified_diff(before, after, change.old_name, change.new_name, n=context, lineterm=""))
