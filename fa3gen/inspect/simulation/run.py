"""Simulations of a spec: one, one for each number of stages, and the speed that follows for a whole problem."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain

from fa3gen.design import ceiling, footprint, rules, work
from fa3gen.design.family import Shape
from fa3gen.design.work import Problem
from fa3gen.hardware.chips import Chip
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.inspect.simulation.engine import Arbitration, Engine
from fa3gen.inspect.simulation.programs import LAST_STEP, Cta
from fa3gen.inspect.simulation.results import Simulation
from fa3gen.inspect.simulation.times import UNITS, Times, Unit, groups
from fa3gen.spec.model import CpAsyncLoad, Forward, TmaLoad

SAMPLES = (1, 2, 3, 4, 6, 8, 12, 16)  # tiles of keys that a prediction simulates
FROM_L2 = 8  # tiles of queries that load each key: of more, none of which is taken to wait for HBM


@dataclass(frozen=True)
class Settings:
    """What one SM is given: `ctas` places, each with some tiles of queries, and `tiles` of keys for each of these.

    CTAs that share an SM have nothing to do with each other and start apart: each when the loads that the one before
    begins with are through, and half a step later.
    """

    stages: int
    ctas: int
    tiles: tuple[int, ...]
    arbitration: Arbitration = "oldest"


@dataclass(frozen=True)
class StageRow:
    """One number of stages: whether the rules allow it, CTAs of an SM, and how busy that keeps the units.

    `tensor_even` is that of the tensor cores where they serve all groups evenly, all else is with the oldest product
    first. `waiting` is the share of its time in which a computing group waits for K or V, on average.
    """

    stages: int
    legal: bool
    ctas: int
    step_cycles: float
    tensor: float
    tensor_even: float
    exponentials: float
    issue: float
    waiting: float


def settings_of(
    spec: Forward,
    *,
    tiles: int = 12,
    registers: int | None = None,
    ctas: int | None = None,
    arbitration: Arbitration = "oldest",
) -> Settings:
    """The stages of the spec, as many CTAs as fit on an SM, one tile of queries (of a persistent kernel two).

    `tiles` of keys for each.
    """
    places = ctas or max(1, ceiling.occupancy(spec, registers).ctas)
    queries = 2 if footprint.persistent(spec) else 1
    return Settings(footprint.kv_stages(spec), places, (tiles,) * queries, arbitration)


def simulate(spec: Forward, times: Times, settings: Settings) -> Simulation:
    """Run the kernel's roles on one SM until all tiles are done."""
    spec = with_stages(spec, settings.stages)
    engine = Engine(settings.arbitration)
    apart = _apart(times, settings)
    places = [Cta(engine, spec, times, number, settings.tiles, number * apart) for number in range(settings.ctas)]
    for place in places:
        place.start()
    end = engine.run()
    count = groups(spec)
    steps, demand = places[0].total, _step_demand(spec, times)
    return Simulation(
        spans=tuple(sorted(engine.spans, key=lambda span: (span.start, span.end))),
        end=end,
        ctas=settings.ctas,
        groups=count,
        steps=steps,
        # Between the ends of a few steps there may be less work than in them; no step takes less than a unit needs.
        step_cycles=max(_step_cycles(places, count, steps), *demand.values()),
        busy=tuple(engine.busy.items()),
        step_demand=tuple(demand.items()),
    )


def _apart(times: Times, settings: Settings) -> float:
    """Cycles between the starts of two CTAs."""
    size = times.q_bytes + min(settings.stages, settings.tiles[0]) * (times.k_bytes + times.v_bytes)
    return size / times.load_rate + (sum(times.products_alone) + times.softmax_alone) / 2


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


def _step_demand(spec: Forward, times: Times) -> dict[Unit, float]:
    """Cycles that one step of one CTA needs of each unit."""
    count = groups(spec)
    pieces = [*times.in_a_step * count, *times.copies * (1 if footprint.gathered(spec) else count)]
    needed = [*(piece.needs for piece in pieces), times.transfer(times.k_bytes + times.v_bytes)]
    return {unit: sum(needs.get(unit, 0.0) for needs in needed) for unit in UNITS}


def sweep(
    spec: Forward,
    times: Times,
    stages: Iterable[int],
    *,
    tiles: int = 24,
    registers: int | None = None,
    ctas: int | None = None,
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
        settings = settings_of(changed, tiles=tiles, registers=registers, ctas=ctas)
        rows.append(_stage_row(changed, times, settings))
    return tuple(rows)


def _stage_row(spec: Forward, times: Times, settings: Settings) -> StageRow:
    result = simulate(spec, times, settings)
    tensor = even = result.steady("tensor cores")
    if tensor:
        even = simulate(spec, times, replace(settings, arbitration="even")).steady("tensor cores")
    waited = sum(stall.share for stall in result.stalls() if stall.what in ("K to land", "V to land"))
    return StageRow(
        stages=settings.stages,
        legal=not rules.check(spec),
        ctas=settings.ctas,
        step_cycles=result.step_cycles,
        tensor=tensor,
        tensor_even=even,
        exponentials=result.steady("exponentials"),
        issue=result.steady("issue"),
        waiting=waited / result.groups,
    )


def with_stages(spec: Forward, stages: int) -> Forward:
    """The spec with another number of stages; as it is where it has no ring."""
    if not isinstance(spec.load, CpAsyncLoad | TmaLoad):
        return spec
    return spec.model_copy(update={"load": spec.load.model_copy(update={"kv_stages": stages})})


@dataclass(frozen=True)
class Memory:
    """Where K and V of a problem come from: tiles of queries load `loaded` bytes of them, of which HBM has `from_hbm`.

    The others are in L2, since another tile has loaded them or a launch before. `busy_sms` SMs are at work at a time,
    in the mean until the last one is through. `in_flight` bytes are what all stages of their CTAs have room for.
    """

    loaded: int
    from_hbm: int
    busy_sms: int
    in_flight: int

    @property
    def share(self) -> float:
        """Of what is loaded, as much comes from HBM."""
        return self.from_hbm / self.loaded if self.loaded else 0.0


@dataclass(frozen=True)
class Dealt:
    """A whole problem on a chip: the tiles of queries of each place of its SMs, each with its tiles of keys, in order.

    Where keys are split, parts of tiles take their place. `cycles` is when all is done, of which adding up the parts
    takes `adding_up` at the end, `balance` how busy the places are until then on average. `times` are `memory`'s.
    """

    problem: Problem
    chip: Chip
    places: tuple[tuple[int, ...], ...]
    cycles: float
    balance: float
    times: Times
    memory: Memory
    adding_up: float = 0.0

    @property
    def seconds(self) -> float:
        """At the chip's boost clock."""
        return self.cycles / self.chip.clock_hz.value

    @property
    def tflops(self) -> float:
        """Its speed at the chip's boost clock."""
        return self.problem.flops / self.seconds / 1e12

    @property
    def gigabytes(self) -> float:
        """GB/s of q, k, v and O, each of which is moved once."""
        return self.problem.hbm_bytes / self.seconds / 1e9

    def first_tiles(self, most: int) -> tuple[int, ...]:
        """Those of the first place, until there are more than `most` tiles of keys; one tile of queries at least."""
        first = self.places[0]
        ends = accumulate(first)
        return first[: max(1, sum(end <= most for end in ends))]


def deal(
    problem: Problem,
    times: Times,
    chip: Chip,
    registers: int | None = None,
    arbitration: Arbitration = "oldest",
    *,
    ctas: int | None = None,
    warm: bool = False,
) -> Dealt:
    """Give tiles of queries to the places of all SMs, in the kernel's order, each the next one when it is through.

    Or parts of their keys, where the kernel splits these; with scheduler even each place has an equal share.

    As many CTAs share an SM as fit by `registers`, or as there are for each, unless `ctas` says how many. What a tile
    takes follows from two simulations, one of a tile of as many tiles of keys and one of two of them: the first tile of
    a place takes what the former takes, a later one what the second tile adds. They are simulated for SAMPLES tiles of
    keys; others lie between these, and further ones take `step_cycles` each. K and V come from HBM and L2 as
    `memory_of` has it.
    """
    spec = problem.spec
    parts = ceiling.parts(problem, chip.sms) if spec.split is not None else []
    steps = [[part.steps for part in of_cta] for of_cta in parts] or [[tile] for tile in problem.steps_in_order]
    places = ctas or max(1, min(ceiling.occupancy(spec, registers).ctas, -(-len(steps) // chip.sms)))
    settings = Settings(footprint.kv_stages(spec), places, (), arbitration)
    memory = memory_of(problem, times, chip, steps, places, warm=warm)
    seen = times.from_hbm(memory.share, chip.hbm.value / chip.clock_hz.value / memory.busy_sms)

    @cache
    def lasts(steps: int) -> tuple[float, float]:
        """Cycles of a tile of queries, first in a place and behind another."""
        sample = next((count for count in SAMPLES if count >= steps), SAMPLES[-1])
        if sample > steps > 0:  # in a line with the samples beside it
            less = max(count for count in SAMPLES if count < steps)
            share = (steps - less) / (sample - less)
            first, behind = ((1 - share) * a + share * b for a, b in zip(lasts(less), lasts(sample), strict=True))
            return first, behind
        once, step = _sample(spec, seen, replace(settings, tiles=(sample,)))
        twice, _ = _sample(spec, seen, replace(settings, tiles=(sample, sample)))
        longer = max(steps - sample, 0) * step * places
        return once + longer, twice - once + longer

    adds = {count: lasts(count)[1] for count in set(chain.from_iterable(steps))}.__getitem__
    whole = spec.scheduler != "even"
    dealt = ceiling.dealt([tile for [tile] in steps], chip.sms * places, adds) if whole else steps
    ends = [lasts(first)[0] + sum(map(adds, others)) for first, *others in dealt]
    last = max(ends, default=0.0)
    balance = sum(ends) / (last * chip.sms * places) if last else 1.0
    adding_up = _adding_up(spec, times, chip, [part for of_cta in parts for part in of_cta])
    return Dealt(problem, chip, tuple(map(tuple, dealt)), last + adding_up, balance, seen, memory, adding_up)


def memory_of(
    problem: Problem, times: Times, chip: Chip, steps: Sequence[Sequence[int]], places: int, *, warm: bool
) -> Memory:
    """Where K and V come from; `steps` are those of tiles or parts of tiles that go to one place each.

    Each key is brought from HBM once, to the first tile that loads it. Nothing is where more tiles load each key than
    FROM_L2 says: what HBM adds to so few of the loads is hidden. Nor where the call is `warm`, a launch after another
    on the same tensors, and L2 has room for K and V.
    """
    spec, shape, tile = problem.spec, problem.shape, times.k_bytes + times.v_bytes
    loaded = problem.visited * tile
    keys = sum(seq_k for _, seq_k in shape.sequences) * shape.heads_kv
    distinct = min(loaded, keys * tile // spec.tile.kv)
    in_l2 = loaded > FROM_L2 * distinct or (warm and distinct <= chip.l2_bytes)
    dealt = steps if spec.scheduler == "even" else ceiling.dealt([tile for [tile] in steps], chip.sms * places)
    longest = max(map(sum, dealt), default=0)
    busy = max(1, min(chip.sms, -(-sum(map(sum, dealt)) // (max(longest, 1) * places))))
    in_flight = busy * places * footprint.kv_stages(spec) * tile
    return Memory(loaded, 0 if in_l2 else distinct, busy, in_flight)


def _adding_up(spec: Forward, times: Times, chip: Chip, parts: Iterable[ceiling.Part]) -> float:
    """Cycles from the end of the last part to the end of the kernel that adds them up: 0 where no tile has several.

    Parts of O and their LSE, in float32, go to L2 and come back; the one waits for the other.
    """
    rows = sum(part.rows for part in parts if part.of > 1)
    if not rows:
        return 0.0
    size = rows * (spec.problem.v_dim + 1) * DTYPES["fp32"].bytes
    return 2 * (times.load_latency + size / chip.l2.value)


@cache
def predict(
    problem: Problem,
    times: Times,
    chip: Chip,
    registers: int | None = None,
    arbitration: Arbitration = "oldest",
    *,
    ctas: int | None = None,
    warm: bool = False,
) -> float:
    """TFLOP/s of a problem at the chip's boost clock, as `deal` has it."""
    return deal(problem, times, chip, registers, arbitration, ctas=ctas, warm=warm).tflops


@cache
def _sample(spec: Forward, times: Times, settings: Settings) -> tuple[float, float]:
    """End and cycles of a step: the same for all lengths of a table."""
    result = simulate(spec, times, settings)
    # The last CTA starts late where CTAs have gone on for long; half of that is not the kernel's.
    late = (settings.ctas - 1) / 2 * _apart(times, settings)
    return result.end - late, result.step_cycles


def measured_shape(spec: Forward, length: int) -> Shape:
    """The shape in which the evidence's speeds were measured: 16,384 tokens in all, heads x head dim = 2048."""
    heads_q, heads_kv = work.default_heads(spec)
    return Shape(max(1, 16384 // length), length, length, heads_q, heads_kv)
