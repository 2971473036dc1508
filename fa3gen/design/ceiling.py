"""Which unit bounds a kernel, the speed that it then has at most, and how well its tiles fill the chip.

A roofline: every unit (tensor cores, exponentials, FP32 pipes, instruction issue, shared memory, L2, HBM) takes so
many cycles for its share of a step, and the one that takes most bounds them all. Nothing here knows whether the
schedule overlaps them; `fa3gen simulate` does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

from fa3gen.design import footprint, tile_order, work
from fa3gen.design.cta import cta_of
from fa3gen.design.family import Lengths
from fa3gen.design.splits import (
    counts_seen,
    num_lines,
    num_parts,
    share_of,
    steps_before,
    steps_of,
    tiles_of_step,
)
from fa3gen.design.work import Problem
from fa3gen.hardware import hopper
from fa3gen.hardware.chips import Chip
from fa3gen.spec.model import Forward, GlobalHandoff, Spec

T = TypeVar("T", bound=float)
Unit = Literal[
    "tensor cores",
    "exponentials",
    "FP32 multiply-adds",
    "instruction issue",
    "shared memory",
    "L1",
    "L2",
    "HBM",
]

# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", column 9.0: of one multiprocessor. Of
# shared memory, each CTA takes 1 KB more than it asks for.
SMEM_PER_SM = 228 * 1024
SMEM_RESERVED = 1024
THREADS_PER_SM = 2048
CTAS_PER_SM = 32


@dataclass(frozen=True)
class Bound:
    """What one unit takes for one step on one SM: its amount in `what`, and cycles at its peak rate."""

    unit: Unit
    amount: float
    what: str
    cycles: float


@dataclass(frozen=True)
class Ceiling:
    """The steady state of a spec on a chip: no prologue, no mask, all SMs busy at the chip's boost clock."""

    chip: Chip
    bounds: tuple[Bound, ...]
    flops: int

    @property
    def binding(self) -> Bound:
        """The unit that takes most."""
        return max(self.bounds, key=lambda bound: bound.cycles)

    @property
    def tflops(self) -> float:
        """The speed at which the binding unit is busy all the time."""
        return self.flops / self.binding.cycles * self.chip.sms * self.chip.clock_hz.value / 1e12


@dataclass(frozen=True)
class ProblemCeiling:
    """A whole problem on a chip.

    `balance` is how busy the SMs are on average until the last one ends, when a step takes each of them as long and
    tiles are handed out as the kernel does. `tflops` has the steady state's ceiling, over-compute, balance and HBM in
    it; `bounded_by` is "HBM" or the binding unit.
    """

    chip: Chip
    problem: Problem
    waves: float
    balance: float
    tflops: float
    bounded_by: Unit


@dataclass(frozen=True)
class Occupancy:
    """CTAs of one SM: what each resource would allow, by name, and what registers per thread that counts on."""

    registers: int
    registers_known: bool
    allowed: tuple[tuple[str, int], ...]

    @property
    def ctas(self) -> int:
        """CTAs that fit on one SM."""
        return min(count for _, count in self.allowed)

    @property
    def limited_by(self) -> tuple[str, ...]:
        """The resources that allow no more."""
        return tuple(name for name, count in self.allowed if count == self.ctas)


def steady(spec: Forward, chip: Chip) -> Ceiling:
    """The roofline of one step; HBM is left out, since its share depends on the shape."""
    step = work.step(spec)
    l2_rate = chip.l2.value / chip.sms
    near: Unit = "L1" if isinstance(spec.handoff, GlobalHandoff) else "shared memory"  # the same 128 bytes a cycle
    amounts: list[tuple[Unit, float, str, float]] = [
        ("tensor cores", step.tensor_flops, "FLOP", chip.tensor_rate(spec.element.bytes)),
        ("exponentials", step.exponentials, "ex2", chip.exp2.value),
        ("FP32 multiply-adds", step.scalar_fmas, "FMA", chip.fp32.value),
        ("instruction issue", step.instructions, "warp instructions", chip.issue.value),
        (near, step.smem_bytes, "bytes", chip.smem.value),
        ("L2", step.l2_bytes, "bytes", l2_rate),
    ]
    bounds = tuple(Bound(unit, amount, what, amount / rate) for unit, amount, what, rate in amounts if amount)
    return Ceiling(chip, bounds, step.flops)


def of_problem(problem: Problem, chip: Chip, occupancy: Occupancy) -> ProblemCeiling:
    """The roofline of a whole problem, with its waves."""
    spec, ceiling = problem.spec, steady(problem.spec, chip)
    busiest = busiest_sm(spec, problem, chip.sms)
    cycles = busiest * ceiling.binding.cycles
    seconds, by_hbm = cycles / chip.clock_hz.value, problem.hbm_bytes / chip.hbm.value
    places = chip.sms * occupancy.ctas
    longest = max(seconds, by_hbm)
    return ProblemCeiling(
        chip=chip,
        problem=problem,
        waves=ctas_of(problem, chip.sms) / places,
        balance=problem.visited / (chip.sms * busiest) if busiest else 1.0,
        tflops=problem.flops / longest / 1e12 if longest else 0.0,
        bounded_by="HBM" if by_hbm > seconds else ceiling.binding.unit,
    )


def ctas_of(problem: Problem, sms: int) -> int:
    """Tiles that are handed out to CTAs, or parts of their keys on a GPU of so many SMs; of k1, tiles of scores."""
    if isinstance(problem.spec.handoff, GlobalHandoff):
        return problem.visited
    asked = problem.num_splits
    if problem.spec.scheduler == "even":
        lines = num_lines(problem.spec, problem.shape, sms, asked)
        of_line = steps_of(problem.spec, problem.shape) // lines
        return lines * -(-of_line // share_of(problem.spec, problem.shape, sms, asked))
    return problem.tiles * num_parts(problem.spec, problem.shape, sms, asked)


def busiest_sm(spec: Forward, problem: Problem, sms: int) -> int:
    """Steps of the SM that has most, when each SM takes the next tile of queries as soon as it is through with one.

    CTAs that share an SM are taken for one that does their tiles in turn: that is as long.
    """
    if isinstance(spec.handoff, GlobalHandoff):
        return -(-problem.visited // sms)  # a CTA for each step
    asked = problem.num_splits
    if spec.scheduler == "even":
        share = share_of(spec, problem.shape, sms, asked) * tiles_of_step(spec) if problem.visited else 0
        return share * -(-ctas_of(problem, sms) // sms)
    different = {tiles.visited for of_head in problem.of_lengths.values() for tiles in of_head}
    if len(different) <= 1 or spec.split is not None:  # parts of tiles are about equally long
        steps = -(-max(different, default=0) // num_parts(spec, problem.shape, sms, asked))
        waves, rest = divmod(ctas_of(problem, sms), sms)
        share = tile_order.tail_share(rest, steps, sms) if footprint.splits_tail(spec) else steps
        return waves * steps + share * (rest > 0)
    return max(sum(tiles) for tiles in dealt(problem.steps_in_order, sms))


def dealt(tiles: Iterable[T], places: int, length: Callable[[T], float] = float) -> list[list[T]]:
    """The tiles that each place takes, where it takes the next one as soon as it is through with one: places in use.

    As counters deal them out, and free SMs take CTAs. `length` says how long a tile takes behind another.
    """
    taken: list[list[T]] = []
    ends: list[tuple[float, int]] = []
    for tile in tiles:
        if len(taken) < places:
            heapq.heappush(ends, (length(tile), len(taken)))
            taken.append([tile])
        else:
            end, place = ends[0]
            taken[place].append(tile)
            heapq.heapreplace(ends, (end + length(tile), place))
    return taken


class Part(NamedTuple):
    """A part of the keys of a tile of queries, or all: how many tiles of keys are visited, and of how many parts it is.

    `rows`: those of the tile that exist. A part of several is kept in float32 until all are added up.
    """

    steps: int
    of: int
    rows: int


def parts(problem: Problem, sms: int) -> list[list[Part]]:
    """Parts of tiles of queries as they are handed out on so many SMs, where keys are split.

    Of scheduler even a list for each CTA that has any, elsewhere one for each part. What a mask hides is shared out,
    too, and skipped: a part has one step at least. Where steps that rows see are counted (`splits.counts_seen`), about
    so many are shared out; who has the last of them has all tiles of keys that are left, and a step behind the last
    tile is no part.
    """
    spec, shape = problem.spec, problem.shape
    group = shape.heads_q // max(shape.heads_kv, 1)
    found: list[list[Part]] = []
    unit, even = tiles_of_step(spec), spec.scheduler == "even"
    share = share_of(spec, shape, sms, problem.num_splits) if even else 0
    lines = num_lines(spec, shape, sms, problem.num_splits) if even else 1
    sequences = shape.sequences
    fitted = {lengths: problem.fitted(lengths) for lengths in set(sequences)}
    packs = {lengths: tile_order.packs_of_kv(own, shape) for lengths, own in fitted.items()}
    of_line: list[list[tuple[Lengths, int]]] = [[] for _ in range(lines)]
    for _, m_block, head, batch in tile_order.taken(spec, shape):
        lengths = sequences[batch]
        of_line[head // packs[lengths] % lines].append((lengths, m_block))

    @cache
    def of_tile(lengths: Lengths, m_block: int) -> tuple[int, int, int]:
        """Its steps, behind which tile of keys its rows see none, its rows: alike for all heads of such sequences."""
        own = fitted[lengths]
        before, after = (steps_before(own, shape, m_block + x, lengths) for x in (0, 1))
        positions = tile_order.positions(own)
        rows = min(group, own.tile.pack_heads) * min(positions, lengths[0] - m_block * positions)
        return after - before, problem.of_lengths[lengths][m_block].end, rows

    @cache
    def cut(lengths: Lengths, m_block: int, room: int) -> tuple[tuple[tuple[bool, Part | None], ...], int]:
        """Its parts, where the last CTA has so much room left, and the room that the last one has then.

        Each with whether a CTA begins with it; None where its steps are no part.
        """
        steps, end, rows = of_tile(lengths, m_block)
        cuts, begun = [0], []
        while cuts[-1] < steps:
            begun.append(room == 0 or not even)
            if begun[-1]:
                room = share if even else _steps_of_part(problem, steps, sms)
            taken = min(steps - cuts[-1], room) if unit == 1 else 1  # whole parts are begun anew
            cuts.append(cuts[-1] + taken)
            room -= taken
        if counts_seen(spec):
            cuts = [*(min(cut, max(end, 1)) for cut in cuts[:-1]), max(end, 1)]
        number = sum(begin < behind for begin, behind in pairwise(cuts))
        pieces = (
            Part(max(min(end, behind * unit) - begin * unit, 1), number, rows) if begin < behind else None
            for begin, behind in pairwise(cuts)
        )
        return tuple(zip(begun, pieces, strict=True)), room

    for tiles in of_line:
        room = 0  # shares are of one line
        for lengths, m_block in tiles:
            pieces, room = cut(lengths, m_block, room)
            for begins, part in pieces:
                if begins:
                    found.append([])
                if part is not None:
                    found[-1].append(part)
    return found


def _steps_of_part(problem: Problem, steps: int, sms: int) -> int:
    """Steps of a part of a tile of so many, of dense tensors."""
    spec = problem.spec
    if spec.split is not None and spec.split.keys is not None:
        return spec.split.keys // spec.tile.kv
    return -(-steps // num_parts(spec, problem.shape, sms, problem.num_splits))


def occupancy(spec: Spec, registers: int | None = None) -> Occupancy:
    """CTAs per SM, from `registers` per thread as compiled (None: what the plan expects a thread to hold)."""
    cta = cta_of(spec)
    per_thread = cta.registers if registers is None else registers
    allowed = {
        "registers": hopper.REGISTERS_PER_SM // (cta.threads * _in_units(per_thread)),
        "shared memory": SMEM_PER_SM // (cta.smem_bytes + SMEM_RESERVED),
        "threads": THREADS_PER_SM // cta.threads,
        "CTAs": CTAS_PER_SM,
    }
    if cta.launched_per_sm is not None:
        allowed[f"launch: {cta.launched_per_sm} per SM"] = cta.launched_per_sm
    return Occupancy(per_thread, registers is not None, tuple(allowed.items()))


def _in_units(registers: int) -> int:
    """Registers are handed out 8 at a time for each thread of a warp."""
    unit = hopper.REGISTER_UNIT_PER_THREAD
    return -(-registers // unit) * unit
