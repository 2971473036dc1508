"""Simulations of a spec: one, one for each number of stages, and the speed that follows for a whole problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

from fa3gen import ceiling, footprint, rules, work
from fa3gen.chips import Chip
from fa3gen.errors import UserError
from fa3gen.simulation.engine import Arbitration, Engine
from fa3gen.simulation.programs import LAST_STEP, Cta
from fa3gen.simulation.results import Simulation
from fa3gen.simulation.times import Times, groups
from fa3gen.spec import CpAsyncLoad, Spec, TmaLoad
from fa3gen.work import Problem

SAMPLE = 16  # tiles of keys that a prediction simulates


@dataclass(frozen=True)
class Settings:
    """What one SM is given: `ctas` places, each with `queries` tiles of queries of `tiles` tiles of keys."""

    stages: int
    ctas: int
    tiles: int
    queries: int
    arbitration: Arbitration = "even"


@dataclass(frozen=True)
class StageRow:
    """One number of stages: whether the rules allow it, CTAs of an SM, and how busy that keeps the units.

    `waiting` is the share of its time in which a computing group waits for K or V, on average.
    """

    stages: int
    legal: bool
    ctas: int
    step_cycles: float
    tensor: float
    exponentials: float
    issue: float
    waiting: float


def settings_of(
    spec: Spec,
    *,
    tiles: int = 12,
    registers: int | None = None,
    ctas: int | None = None,
    arbitration: Arbitration = "even",
) -> Settings:
    """The stages of the spec, as many CTAs as fit on an SM, one tile of queries (of a persistent kernel two)."""
    places = ctas or max(1, ceiling.occupancy(spec, registers).ctas)
    return Settings(footprint.kv_stages(spec), places, tiles, 2 if footprint.persistent(spec) else 1, arbitration)


def simulate(spec: Spec, times: Times, settings: Settings) -> Simulation:
    """Run the kernel's roles on one SM until all tiles are done."""
    engine = Engine(times.load_latency, times.load_rate, settings.arbitration)
    # CTAs that share an SM have nothing to do with each other, so that they start apart.
    apart = (sum(times.products_alone) + times.softmax_alone) / settings.ctas
    places = [
        Cta(engine, spec, times, number, settings.stages, settings.tiles, settings.queries, number * apart)
        for number in range(settings.ctas)
    ]
    for place in places:
        place.start()
    end = engine.run()
    count = groups(spec)
    steps = places[0].total
    return Simulation(
        spans=tuple(sorted(engine.spans, key=lambda span: (span.start, span.end))),
        end=end,
        ctas=settings.ctas,
        groups=count,
        steps=steps,
        step_cycles=_step_cycles(places, count, steps),
        busy=tuple(engine.busy.items()),
        step_demand=tuple(_step_demand(times, count).items()),
    )


def _step_cycles(places: list[Cta], count: int, steps: int) -> float:
    """Cycles of the SM for one step of one CTA, from the middle half of the steps; of all where there are too few."""
    first, last = steps // 4, max(steps // 4 + 1, 3 * steps // 4)
    if last >= steps:
        return places[0].engine.now / (steps * len(places))
    rates = []
    for place in places:
        for group in range(count):
            begin, end = (place.engine.when(place.key(LAST_STEP, group, step)) for step in (first, last))
            rates.append((last - first) / (end - begin))
    return count / sum(rates)


def _step_demand(times: Times, count: int) -> dict[str, float]:
    """Cycles that one step of one CTA needs of each unit."""
    pieces = [piece for piece in (times.qk, times.pv, *times.softmax, times.rescale) if piece is not None]
    pieces += [piece for piece in (times.copy_k, times.copy_v) if piece is not None]
    return {
        "tensor cores": count * (times.qk_tensor + times.pv_tensor),
        "exponentials": count * sum(piece.exp for piece in pieces),
        "issue": count * sum(piece.issue for piece in pieces),
        "loads": (times.k_bytes + times.v_bytes) / times.load_rate,
    }


def sweep(
    spec: Spec,
    times: Times,
    stages: Iterable[int],
    *,
    tiles: int = 32,
    registers: int | None = None,
    ctas: int | None = None,
    arbitration: Arbitration = "even",
) -> tuple[StageRow, ...]:
    """Simulate each number of stages; CTAs per SM follow from the shared memory that each takes, unless given.

    A number that the rules refuse is simulated, too, with one CTA: it shows what it would be worth. A kernel without a
    ring has one row.
    """
    if not isinstance(spec.load, CpAsyncLoad | TmaLoad):
        stages = [1]
    rows = []
    for count in stages:
        changed = with_stages(spec, count)
        settings = settings_of(changed, tiles=tiles, registers=registers, ctas=ctas, arbitration=arbitration)
        result = simulate(changed, times, settings)
        waited = sum(stall.share for stall in result.stalls() if stall.what in ("K to land", "V to land"))
        rows.append(
            StageRow(
                stages=count,
                legal=not rules.check(changed),
                ctas=settings.ctas,
                step_cycles=result.step_cycles,
                tensor=result.steady("tensor cores"),
                exponentials=result.steady("exponentials"),
                issue=result.steady("issue"),
                waiting=waited / result.groups,
            )
        )
    return tuple(rows)


def with_stages(spec: Spec, stages: int) -> Spec:
    """The spec with another number of stages; as it is where it has no ring."""
    if not isinstance(spec.load, CpAsyncLoad | TmaLoad):
        return spec
    return spec.model_copy(update={"load": spec.load.model_copy(update={"kv_stages": stages})})


def predict(
    problem: Problem,
    times: Times,
    chip: Chip,
    registers: int | None = None,
    arbitration: Arbitration = "even",
) -> float:
    """TFLOP/s of a problem whose tiles of queries are all equally long, at the chip's boost clock.

    Two tiles of queries of at most SAMPLE tiles of keys are simulated. Further tiles of keys take `step_cycles` each,
    and further tiles of queries what the second one adds. Raises UserError under a mask that makes tiles of different
    lengths.
    """
    spec = problem.spec
    lengths = {tiles.visited for tiles in problem.of_one_head}
    if len(lengths) != 1:
        raise UserError("tiles of queries of different lengths are not predicted; ask for a spec without a mask")
    [length] = lengths
    places = max(1, ceiling.occupancy(spec, registers).ctas)
    rounds = -(-problem.tiles // (chip.sms * places))
    settings = Settings(footprint.kv_stages(spec), places, min(length, SAMPLE), 1, arbitration)
    once, step = _sample(spec, times, settings)
    twice, _ = _sample(spec, times, replace(settings, queries=2)) if rounds > 1 else (once, step)
    longer = (length - settings.tiles) * step * places
    cycles = once + (rounds - 1) * (twice - once) + rounds * longer
    return problem.flops * chip.clock_hz.value / cycles / 1e12


@cache
def _sample(spec: Spec, times: Times, settings: Settings) -> tuple[float, float]:
    """End and cycles of a step: the same for all lengths of a table."""
    result = simulate(spec, times, settings)
    return result.end, result.step_cycles


def measured_shape(spec: Spec, length: int) -> work.Shape:
    """The shape in which the evidence's speeds were measured: 16,384 tokens in all, heads x head dim = 2048."""
    heads_q, heads_kv = work.default_heads(spec)
    return work.Shape(max(1, 16384 // length), length, length, heads_q, heads_kv)
