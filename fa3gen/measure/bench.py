"""Measure generated modules beside their peers: TFLOP/s over head dim x mask x sequence length, in one process.

Protocol: 16,384 tokens in all, heads x head dim = 2048, as many kv heads, normal random inputs. Per cell every
competitor is warmed up, its output checked on the last rows, then all take turns, one launch each per round, each round
in another order, so that clocks and temperature are shared fairly. Before each timed launch, which is an eager call and
never of a CUDA graph, a buffer larger than the L2 is overwritten; that takes the GPU longer than most calls take the
host. The launch is timed by CUDA events, and the median over the rounds is reported. A launch predicted (from
the same competitor's previous cell) to exceed the time limit is not made, and the cell says so.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from fa3gen.base.errors import UserError
from fa3gen.design.family import Family, Shape, mask_label, usual_out_dtype
from fa3gen.design.masks import of_call, options_for, reach
from fa3gen.design.operation import operation_of
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.measure.launch_times import LaunchTimes, host_microseconds, small_problem
from fa3gen.measure.peers import PEERS, Attend, Peer, Tensors, Unavailable
from fa3gen.records.evidence import TIMED, TOKENS
from fa3gen.run import gpu
from fa3gen.spec.model import AttentionDType, Forward, Mask
from fa3gen.verify import reference
from fa3gen.verify.inputs import laid_out, normal, usual_keywords

WIDTH = 2048  # heads x head dim
SEQ_LENS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_SEQ_LENS = (4096, 16384)
CHECK_ROWS = 64
CHECK_TOLERANCE = 0.02  # relative Frobenius; 16-bit kernels read about 0.002
CHECK_TOLERANCE_8BIT = 0.08  # where P is rounded to 8 bits, a part in 16
FLUSH_BYTES = 256 << 20  # more than the 50 to 60 MB of L2
MIN_ROUNDS, MAX_ROUNDS = 3, 50
SEED = 0  # of the orders of the rounds


@dataclass(frozen=True)
class Cell:
    """One problem of the grid. Masks compare by value, so cells can be keys."""

    head_dim: int
    mask: Mask
    seq_len: int
    dtype: AttentionDType = "bf16"
    head_dim_v: int | None = None  # of v and O, where it is not head_dim
    sink: bool = False
    softcap: bool = False

    @classmethod
    def of(cls, spec: Forward, seq_len: int) -> Cell:
        """The cell that a spec's module serves at this length."""
        p, v_dim = spec.problem, None if spec.problem.v_dim == spec.problem.head_dim else spec.problem.v_dim
        return cls(p.head_dim, of_call(spec.mask), seq_len, p.dtype, v_dim, spec.softmax.sink, spec.softmax.softcap)

    @property
    def batch(self) -> int:
        """Batch entries that make 16,384 tokens."""
        return TOKENS // self.seq_len

    @property
    def heads(self) -> int:
        """Heads that make a width of 2048, or as many as fit in it where the head dim does not divide it."""
        return WIDTH // self.head_dim

    @property
    def family(self) -> Family:
        """What a module has to be compiled for to serve it."""
        v_dim = self.head_dim if self.head_dim_v is None else self.head_dim_v
        out_dtype = usual_out_dtype(self.dtype)
        return Family(self.dtype, self.head_dim, v_dim, self.mask, out_dtype, sink=self.sink, softcap=self.softcap)

    @property
    def shape(self) -> Shape:
        """The sizes of its call."""
        return Shape(self.batch, self.seq_len, self.seq_len, self.heads, self.heads)

    @property
    def flops(self) -> float:
        """Of both products: `Family.flops`."""
        return self.family.flops(self.shape)


@dataclass(frozen=True)
class Competitor:
    """Something to time. `prepare` returns a function of (q, k, v) for a cell, or raises Unavailable.

    `scratch` counts the bytes of device memory a launch takes beside its outputs. `placed` gives q, k and v the strides
    that it takes, and v the order of keys, before anything is timed.
    """

    name: str
    generated: bool
    serves: Callable[[Cell], bool]
    prepare: Callable[[Cell], Attend]
    scratch: Callable[[Cell], int] = lambda cell: 0
    placed: Callable[[Tensors], Tensors] = lambda tensors: tensors


def module_competitor(name: str, spec: Forward, load: Callable[[], Any]) -> Competitor:
    """Wrap one generated module; it serves the cells of its own head dim, dtype and mask, and is given no factors."""

    operation = operation_of(spec)

    def serves(cell: Cell) -> bool:
        # All as `placed` makes them.
        placed = Family.of(spec)._replace(by_sequence=(), v_permuted=False, block_scales=False, kv_dtype=None)
        return placed.serves(cell.family)

    def prepare(cell: Cell) -> Attend:
        if spec.tile.pack_heads > 1:
            raise Unavailable(f"packs {spec.tile.pack_heads} query heads of one kv head; the grid has no such groups")
        attend: Attend = functools.partial(operation.entry_of(load()), **options_for(spec.mask, cell.mask))

        def with_keywords(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return attend(q, k, v, **usual_keywords(cell.family.keywords, q.shape[2], q.device))

        return with_keywords if cell.family.keywords else attend

    def scratch(cell: Cell) -> int:
        return operation.bytes_made(cell.shape)

    def placed(tensors: Tensors) -> Tensors:
        q, k, v = (
            laid_out(described, x.to(described.dtype.in_torch()))
            for described, x in zip(operation.inputs, tensors, strict=True)
        )
        return q, k, v

    return Competitor(name, True, serves, prepare, scratch, placed)


def peer_competitors(peers: Sequence[Peer] = PEERS) -> list[Competitor]:
    """Wrap the peers; which of them can run shows when they are prepared."""
    return [
        Competitor(peer.name, False, _plain, lambda cell, peer=peer: peer.prepare(cell.mask))  # type: ignore[misc]
        for peer in peers
    ]


def _plain(cell: Cell) -> bool:
    """Whether a peer has all arguments that a call of this cell takes."""
    return not cell.family.keywords


@dataclass(frozen=True)
class Result:
    """One competitor in one cell: a measurement, or the reason why there is none."""

    competitor: str
    generated: bool
    reason: str | None = None
    tflops: float | None = None
    median_ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    rounds: int = 0

    @property
    def failed(self) -> bool:
        """Whether this is a generated module that raised or computed something wrong."""
        return self.generated and self.reason is not None and self.reason.startswith(("raised", "wrong"))


@dataclass(frozen=True)
class CellResult:
    """All results of one cell, and how the GPU ran meanwhile."""

    cell: Cell
    results: tuple[Result, ...]
    sample: gpu.Sample


@dataclass(frozen=True)
class Bench:
    """Everything measured in one process."""

    environment: gpu.Environment
    cells: tuple[CellResult, ...] = field(default=())
    launches: tuple[LaunchTimes, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether a generated module raised or computed something wrong."""
        return any(result.failed for cell in self.cells for result in cell.results)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types: protocol, environment, per cell its shape, results and GPU sample, launch times."""
        protocol = {
            "tokens": TOKENS,
            "heads_x_head_dim": f"{WIDTH}, or as many heads as fit in it",
            "flops": "2 B H S^2 (d + d_v); halved for causal; visible pairs for a window",
            "timing": f"{TIMED}; CUDA events around each, median over rounds, competitors interleaved",
            "flush_bytes": FLUSH_BYTES,
        }
        cells = []
        for entry in self.cells:
            cell = entry.cell
            facts = {"head_dim": cell.head_dim, "head_dim_v": cell.family.head_dim_v, "mask": mask_label(cell.mask)}
            facts |= {"dtype": cell.dtype, "keywords": list(cell.family.keywords)}
            shape = {"seq_len": cell.seq_len, "batch": cell.batch, "heads": cell.heads, "flops": cell.flops}
            results = [asdict(result) for result in entry.results]
            cells.append({**facts, **shape, "results": results, "gpu": asdict(entry.sample)})
        launches = [asdict(launch) for launch in self.launches]
        environment = asdict(self.environment)
        return {"version": 1, "protocol": protocol, "environment": environment, "cells": cells, "launches": launches}


class Timer(Protocol):
    """How launches are timed and memory is asked for; CUDA here, made up in tests."""

    def time(self, launches: Sequence[Callable[[], Any]]) -> list[float]:
        """Make the launches one after the other; return the milliseconds of each."""

    def synchronize(self) -> None:
        """Wait until all launches have ended."""

    def free_bytes(self) -> int:
        """Return the device memory that could still be taken."""

    def sample(self) -> gpu.Sample:
        """Read clocks, power and temperature."""


class CudaTimer:
    """Times with CUDA events; overwrites a buffer larger than the L2 before each launch."""

    def __init__(self, device: torch.device) -> None:
        """Take the buffer that is overwritten before each launch."""
        self.device = device
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def time(self, launches: Sequence[Callable[[], Any]]) -> list[float]:
        """See Timer. All launches are queued before the host waits, so host overhead stays out of the times."""
        events = []
        for launch in launches:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self.flush.zero_()
            begin.record()
            launch()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize(self.device)
        return [begin.elapsed_time(end) for begin, end in events]

    def synchronize(self) -> None:
        """See Timer."""
        torch.cuda.synchronize(self.device)

    def free_bytes(self) -> int:
        """See Timer. What torch has cached counts as free."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def sample(self) -> gpu.Sample:
        """See Timer."""
        return gpu.sample()


def plan_cells(
    specs: Sequence[Forward],
    *,
    head_dims: Sequence[int] = (),
    masks: Sequence[str] = (),
    seq_lens: Sequence[int] = (),
    quick: bool = False,
) -> list[Cell]:
    """Return the cells that at least one of the specs serves, filtered; UserError when nothing is left.

    Sequence lengths must divide 16,384. Cells of one head dim and mask stand together, shortest first.
    """
    for seq_len in seq_lens:
        if seq_len < 1 or TOKENS % seq_len:
            raise UserError(f"--seq-len {seq_len} does not divide {TOKENS}; use one of {', '.join(map(str, SEQ_LENS))}")
    lengths = sorted(set(seq_lens)) or (QUICK_SEQ_LENS if quick else SEQ_LENS)
    chosen = [
        spec
        for spec in sorted(specs, key=_grid_order)
        if (not head_dims or spec.problem.head_dim in head_dims)
        and (not masks or mask_label(of_call(spec.mask)) in masks)
    ]
    if not chosen:
        offered = ", ".join(
            sorted({f"head dim {spec.problem.head_dim} {mask_label(of_call(spec.mask))}" for spec in specs})
        )
        raise UserError(f"no spec given serves that head dim and mask; they serve {offered}")
    return list(dict.fromkeys(Cell.of(spec, seq_len) for spec in chosen for seq_len in lengths))


def _grid_order(spec: Forward) -> tuple[Any, ...]:
    problem, mask = spec.problem, mask_label(of_call(spec.mask))
    return problem.head_dim, problem.v_dim, problem.dtype, mask != "full", Family.of(spec).keywords, mask


@dataclass
class Runner:
    """Runs cells one by one and remembers each competitor's pace, to predict what the next cell would take.

    `spend_ms` is what one competitor should spend on timed launches in one cell, `limit_ms` what all of its launches
    there may take at most (three timed ones are the least).
    """

    competitors: Sequence[Competitor]
    timer: Timer
    device: torch.device
    spend_ms: float
    limit_ms: float
    pace: dict[tuple[str, str, str, str], float] = field(default_factory=dict)  # ms per FLOP

    def run(self, cells: Sequence[Cell], on_progress: Callable[[str], None]) -> Iterator[CellResult]:
        """Measure the cells in order; `on_progress` hears what is being worked on."""
        for number, cell in enumerate(cells, 1):
            place = f"[{number}/{len(cells)}] head dim {cell.family.dims} {mask_label(cell.mask)} {cell.seq_len}"
            yield self.run_cell(cell, lambda name, place=place: on_progress(f"{place}: {name}"))  # type: ignore[misc]

    def run_cell(self, cell: Cell, on_progress: Callable[[str], None] = lambda name: None) -> CellResult:
        """Warm up and check each competitor, then time all that are left in turns."""
        q, k, v = self._inputs(cell)
        results: dict[str, Result] = {}
        ready: dict[str, Callable[[], Any]] = {}
        estimates: dict[str, float] = {}
        serving = [competitor for competitor in self.competitors if competitor.serves(cell)]
        for competitor in serving:
            on_progress(competitor.name)
            reason = self._forbidden(competitor, cell)
            if reason is None:
                reason, launch, estimate = self._warm_up(competitor, cell, (q, k, v))
                if launch is not None:
                    ready[competitor.name], estimates[competitor.name] = launch, estimate
            if reason is not None:
                results[competitor.name] = Result(competitor.name, competitor.generated, reason)
        on_progress("timing")
        times, sample = self._rounds(ready, estimates)
        for competitor in serving:
            if competitor.name in times:
                results[competitor.name] = self._measured(competitor, cell, times[competitor.name])
        return CellResult(cell, tuple(results[competitor.name] for competitor in serving), sample)

    def launch_times(self, competitor: Competitor, cell: Cell) -> LaunchTimes:
        """Measure the host time of a competitor's calls, for the dtype, head dim and mask of a cell."""
        tensors = small_problem(cell.dtype, cell.head_dim, cell.family.head_dim_v, self.device)
        try:
            attend, tensors = competitor.prepare(cell), competitor.placed(tensors)
            microseconds = host_microseconds(lambda: attend(*tensors), self.timer.synchronize)
        except Unavailable as reason:
            return LaunchTimes(competitor.name, None, reason=str(reason))
        except Exception as error:  # a competitor may raise anything; the others go on
            return LaunchTimes(competitor.name, None, reason=f"raised {_in_short(error)}")
        return LaunchTimes(competitor.name, microseconds)

    def _inputs(self, cell: Cell) -> Tensors:
        generator = torch.Generator(self.device).manual_seed(cell.seq_len + cell.head_dim)
        shape = (cell.batch, cell.seq_len, cell.heads)
        q, k, v = (
            normal((*shape, dim), DTYPES[cell.dtype], self.device, generator)
            for dim in (cell.head_dim, cell.head_dim, cell.family.head_dim_v)
        )
        return q, k, v

    def _key(self, competitor: Competitor, cell: Cell) -> tuple[str, str, str, str]:
        return competitor.name, cell.family.dims, cell.dtype, mask_label(cell.mask)

    def _forbidden(self, competitor: Competitor, cell: Cell) -> str | None:
        """Say why this launch should not even be tried: memory, or the time predicted from the previous cell."""
        needed, free = competitor.scratch(cell), self.timer.free_bytes()
        if needed > free:
            return f"out of memory: needs {needed / 2**30:.0f} GiB of scratch, {free / 2**30:.0f} GiB are free"
        pace = self.pace.get(self._key(competitor, cell))
        if pace is None:
            return None
        predicted = pace * cell.flops * (MIN_ROUNDS + 2)  # two launches warm up
        if predicted > self.limit_ms:
            return f"over budget: about {predicted / 1000:.1f} s predicted, {self.limit_ms / 1000:.1f} s allowed"
        return None

    def _warm_up(
        self, competitor: Competitor, cell: Cell, tensors: Tensors
    ) -> tuple[str | None, Callable[[], Any] | None, float]:
        """Launch twice (the first may compile) and check; return a reason, or the launch and its milliseconds."""
        try:
            attend, placed = competitor.prepare(cell), competitor.placed(tensors)
            wrong = self._wrong(attend(*placed), cell, tensors)
            if wrong:
                return wrong, None, 0.0
            (estimate,) = self.timer.time([lambda: attend(*placed)])
        except Unavailable as reason:
            return str(reason), None, 0.0
        except Exception as error:  # a competitor may raise anything; the others go on
            return f"raised {_in_short(error)}", None, 0.0
        return None, lambda: attend(*placed), estimate

    def _wrong(self, out: torch.Tensor, cell: Cell, tensors: Tensors) -> str | None:
        error = error_in_last_rows(out, last_rows(cell.mask, tensors, cell.family.keywords))
        return (
            None
            if error <= check_tolerance(cell.dtype)
            else f"wrong result: relative error {error:.2g} in the last rows"
        )

    def _rounds(
        self, ready: dict[str, Callable[[], Any]], estimates: dict[str, float]
    ) -> tuple[dict[str, list[float]], gpu.Sample]:
        """Let all take turns until each has spent its time; return everyone's milliseconds.

        Every round has an order of its own: a GPU at its power limit changes its clock milliseconds later, so that who
        always came after the same kernel would be timed at a clock which that one has left behind.
        """
        left = {name: self._count(estimate) for name, estimate in estimates.items()}
        times: dict[str, list[float]] = {name: [] for name in ready}
        shuffle = random.Random(SEED)
        while any(left.values()):
            waiting = [name for name in ready if left[name]]
            turn = shuffle.sample(waiting, len(waiting))
            for name, milliseconds in zip(turn, self.timer.time([ready[name] for name in turn]), strict=True):
                times[name].append(milliseconds)
                left[name] -= 1
        return times, self.timer.sample()

    def _count(self, estimate: float) -> int:
        """Return how many timed launches to make."""
        wanted = math.floor(self.spend_ms / max(estimate, 1e-3))
        return max(MIN_ROUNDS, min(MAX_ROUNDS, wanted))

    def _measured(self, competitor: Competitor, cell: Cell, times: list[float]) -> Result:
        median = statistics.median(times)
        self.pace[self._key(competitor, cell)] = median / cell.flops
        return Result(
            competitor=competitor.name,
            generated=competitor.generated,
            tflops=tflops(cell, median),
            median_ms=median,
            min_ms=min(times),
            max_ms=max(times),
            rounds=len(times),
        )


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def tflops(cell: Cell, milliseconds: float) -> float:
    """Return the speed of one launch of `cell` in TFLOP/s."""
    return cell.flops / milliseconds / 1e9


def last_rows(mask: Mask, tensors: Tensors, names: Sequence[str] = ()) -> torch.Tensor:
    """What O has to be in the last CHECK_ROWS rows of the last batch entry, in float32; `names`: `Family.keywords`.

    Bottom-right alignment makes them a problem of their own, small enough for the reference at any length.
    """
    rows = min(CHECK_ROWS, tensors[0].shape[1])
    q, k, v = (tensor[-1:] for tensor in tensors)
    named = usual_keywords(names, q.shape[2], q.device)
    return reference.attention(q[:, -rows:], k, v, reach=reach(mask), **named, compute_dtype=torch.float32).out


def check_tolerance(dtype: AttentionDType) -> float:
    """The largest error in the last rows that is no mistake."""
    return CHECK_TOLERANCE if DTYPES[dtype].bits > 8 else CHECK_TOLERANCE_8BIT


def error_in_last_rows(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error (Frobenius) of O in the rows that `last_rows` gives."""
    error: float = ((out[-1:, -expected.shape[1] :].float() - expected).norm() / expected.norm()).item()
    return error


def require_hopper(command: str = "fa3gen bench") -> torch.device:
    """Return the Hopper GPU; UserError saying what a command needs without one."""
    device = gpu.hopper_device()
    if device is None:
        raise UserError(
            f"{command} needs a Hopper GPU (H100, H200, GH200) and a CUDA build of torch: {gpu.why_no_hopper()}. "
            "Without one, `fa3gen compile` and `fa3gen verify` do what can be done; `fa3gen doctor` says more."
        )
    return device
