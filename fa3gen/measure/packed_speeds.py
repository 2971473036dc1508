"""Timing modules for packed sequences, and for pages, at one cell of `packed_cells`, beside peers, on one GPU.

Everybody is checked first, in the sequences that are short enough for the reference, and then timed in rounds, each in
an order of its own, as many launches at once as fill a burst, replayed from a CUDA graph. `fa3gen bench` shows the
speeds, and `fa3gen tune --measure` keeps those of modules as records of which the dispatch table is made.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fa3gen.base.errors import UserError
from fa3gen.design import masks
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.measure.bench import check_tolerance
from fa3gen.measure.peers import PEERS, PackedCall, Peer, Unavailable
from fa3gen.measure.tuning.measuring import Timer, in_turns
from fa3gen.records.packed_records import PackedProblem
from fa3gen.run.launch import load_for_launch
from fa3gen.spec.model import Forward, usual_output
from fa3gen.spec.specfile import Variant
from fa3gen.verify import reference
from fa3gen.verify.inputs import usual_keywords
from fa3gen.verify.runner import essence, raise_if_lost

BURST_MS, ROUNDS, SEED = 8.0, 7, 0
CHECKED_ROWS = 4000  # of queries: most lists of lengths have a shorter sequence
LAST_ROWS = 500  # of the longest one, where none is

Launch = Callable[[], Tensor]


@dataclass(frozen=True)
class Inputs:
    """Tensors of one cell: q, k, v and offsets of packed sequences, in the dtype of O, and the call made of these.

    `wide` are random q (total_q, heads_q, d), k and v (total_k, heads_kv, d), of numbers that the call's dtypes hold,
    and the offsets of queries and of keys; `call` has them in these dtypes, and keys in pages where there are any.
    """

    wide: tuple[Tensor, ...]
    call: PackedCall

    @classmethod
    def of(cls, problem: PackedProblem, device: torch.device) -> Inputs:
        """Those of a problem, the same each time."""
        wide = _tensors(problem, device)
        q, k, v, begins_q, begins_k = wide
        where: dict[str, Any] = {"cu_seqlens_k": begins_k}
        if problem.page is not None:
            k, v, table, lengths = _in_pages(problem, wide)
            where = {"page_table": table, "seqused_k": lengths}
        q, k, v = (x.to(dtype) for x, dtype in zip((q, k, v), _dtypes(problem), strict=True))
        longest = max(problem.lengths_q), max(problem.lengths_k)
        return cls(wide, PackedCall(q, k, v, begins_q, *longest, **where))


def _tensors(problem: PackedProblem, device: torch.device) -> tuple[Tensor, ...]:
    """Random q, k, v, one row behind the other, and the offsets of queries and of keys; what has 8 bits in 16."""
    torch.manual_seed(SEED)
    facts: dict[str, Any] = {"dtype": DTYPES[usual_output(problem.dtype)].in_torch(), "device": device}
    sizes = ((problem.lengths_q, problem.heads_q), *[(problem.lengths_k, problem.heads_kv)] * 2)
    q, k, v = (torch.randn((sum(lengths), heads, problem.head_dim), **facts) for lengths, heads in sizes)
    # Of 8 bits they are numbers that these hold.
    q, k, v = (x.to(dtype).to(x.dtype) for x, dtype in zip((q, k, v), _dtypes(problem), strict=True))
    begins = [torch.tensor([0, *x], device=device).cumsum(0).int() for x in (problem.lengths_q, problem.lengths_k)]
    return q, k, v, *begins


def _dtypes(problem: PackedProblem) -> tuple[torch.dtype, ...]:
    """Those of q, k and v."""
    return tuple(DTYPES[name].in_torch() for name in (problem.dtype, *[problem.kv_dtype or problem.dtype] * 2))


def _in_pages(problem: PackedProblem, wide: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """k and v in pages, which lie in any order, their table, and how many keys each sequence has."""
    (_, k, v, _, _), page, device = wide, problem.page, wide[0].device
    assert page is not None
    counts = [math.ceil(length / page) for length in problem.lengths_k]
    order = torch.randperm(sum(counts), device=device).int()
    table = torch.zeros((len(counts), max(counts)), dtype=torch.int32, device=device)
    pages = [x.new_zeros((sum(counts), page, *x.shape[1:])) for x in (k, v)]
    first = row = 0
    for number, (count, length) in enumerate(zip(counts, problem.lengths_k, strict=True)):
        table[number, :count] = at = order[first : first + count]
        for x, into in zip((k, v), pages, strict=True):
            padded = torch.nn.functional.pad(x[row : row + length], (0, 0, 0, 0, 0, count * page - length))
            into[at.long()] = padded.view(count, page, *x.shape[1:])
        first, row = first + count, row + length
    return *pages, table, torch.tensor(problem.lengths_k, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class Wanted:
    """O of some sequences by the reference: the rows of each in out, and what they ought to be, in float32."""

    rows: tuple[slice, ...]
    out: tuple[Tensor, ...]

    @classmethod
    def of(cls, problem: PackedProblem, wide: Sequence[Tensor]) -> Wanted:
        """Of the sequences that have CHECKED_ROWS in all, the last first, or of the last rows of the longest one."""
        (q, k, v, *begins), reach = wide, masks.reach(problem.mask.spec_mask())
        named = usual_keywords(problem.family.keywords, problem.heads_q, q.device)
        bounds = [itertools.starmap(slice, itertools.pairwise(x.tolist())) for x in begins]
        sequences = list(zip(*bounds, strict=True))
        found: list[tuple[slice, Tensor]] = []
        for rows, keys in _checked(sequences):
            one = (x[None, of] for x, of in ((q, rows), (k, keys), (v, keys)))
            found.append((rows, reference.attention(*one, reach=reach, compute_dtype=torch.float32, **named).out[0]))
        return cls(*zip(*found, strict=True))

    def error_of(self, out: Tensor) -> float:
        """The largest relative error of a sequence; NaN where there is one."""
        errors = [(out[rows] - one).norm() / one.norm() for rows, one in zip(self.rows, self.out, strict=True)]
        return torch.stack(errors).max().item()  # which hands a NaN on


def _checked(sequences: Sequence[tuple[slice, slice]]) -> list[tuple[slice, slice]]:
    """Of sequences, their rows and keys, those that `Wanted` has."""
    found, count = [], 0
    for rows, keys in reversed(sequences):
        if count + rows.stop - rows.start <= CHECKED_ROWS:
            found.append((rows, keys))
            count += rows.stop - rows.start
    if count:
        return found
    # Masks end at the last query and the last key, and so what the last rows see is the same without the others.
    rows, keys = max(sequences, key=lambda sequence: sequence[0].stop - sequence[0].start)
    return [(slice(max(rows.start, rows.stop - LAST_ROWS), rows.stop), keys)]


# Who is timed


@dataclass(frozen=True)
class PackedCompetitor:
    """Something to time. `prepare` returns a launch for a cell and its inputs, or raises Unavailable."""

    name: str
    generated: bool
    prepare: Callable[[PackedProblem, PackedCall], Launch]


def module_competitor(variant: Variant[Forward], path: Path) -> PackedCompetitor:
    """A generated module, called as its entry point is, without factors."""

    def prepare(problem: PackedProblem, call: PackedCall) -> Launch:
        attention = load_for_launch(path).attention
        named = usual_keywords(problem.family.keywords, problem.heads_q, call.q.device)
        window = masks.options_of_call(variant.spec.mask, problem.window)
        dtype = DTYPES[usual_output(problem.dtype)].in_torch()
        # A graph writes to it, and the next capture would give its memory back.
        out = torch.full_like(call.q, math.nan, dtype=dtype)
        where = (call.cu_seqlens_k,) if call.page_table is None else (call.page_table, call.seqused_k)
        return functools.partial(
            attention, call.q, call.k, call.v, call.cu_seqlens_q, *where, out=out, **named, **window
        )

    return PackedCompetitor(variant.stem, True, prepare)


def peer_competitors(peers: Sequence[Peer] = PEERS) -> list[PackedCompetitor]:
    """The peers that know packed sequences; which of them can run shows when they are prepared."""

    def competitor(peer: Peer) -> PackedCompetitor:
        def prepare(problem: PackedProblem, call: PackedCall) -> Launch:
            if problem.family.keywords:
                raise Unavailable(f"{peer.name} is not asked for {' and '.join(problem.family.keywords)}")
            if problem.kv_dtype is not None:
                raise Unavailable(f"{peer.name} takes no k and v of another dtype than q")
            attend = peer.prepare_packed(problem.mask.spec_mask())
            return lambda: attend(call)

        return PackedCompetitor(peer.name, False, prepare)

    return [competitor(peer) for peer in peers]


# Timing


@dataclass(frozen=True)
class Speed:
    """One competitor at a cell: its speed, whether launches came from a CUDA graph, or why there is no speed."""

    name: str
    generated: bool
    tflops: float | None = None
    captured: bool = False
    reason: str | None = None

    @property
    def failed(self) -> bool:
        """Whether this is a generated module without a speed."""
        return self.generated and self.tflops is None


def measure(
    problem: PackedProblem,
    competitors: Iterable[PackedCompetitor],
    device: torch.device,
    timer: Timer,
    *,
    rounds: int = ROUNDS,
    burst_ms: float = BURST_MS,
) -> list[Speed]:
    """Check everybody at a cell, and time in turns those that are right; in the order of the competitors."""
    inputs = Inputs.of(problem, device)
    wanted = Wanted.of(problem, inputs.wide)
    speeds: dict[str, Speed] = {}
    ready: dict[str, Callable[[], float]] = {}
    kept = []  # launches, whose outputs graphs write to
    for one in competitors:
        speeds[one.name], run, launch = _ready(problem, one, inputs.call, wanted, timer, burst_ms)
        if run is not None:
            ready[one.name] = run
            kept.append(launch)
    times = in_turns(ready, rounds)
    flops = problem.family.flops(problem.shape)
    for name, taken in times.items():
        speeds[name] = replace(speeds[name], tflops=flops / statistics.median(taken) / 1e9)
    return list(speeds.values())


def _ready(
    problem: PackedProblem,
    one: PackedCompetitor,
    call: PackedCall,
    wanted: Wanted,
    timer: Timer,
    burst_ms: float,
) -> tuple[Speed, Callable[[], float] | None, Launch | None]:
    """Launch, check and prepare a timing; without one the speed says why."""
    try:
        launch = one.prepare(problem, call)
        error = wanted.error_of(launch())
        if not error < check_tolerance(problem.dtype):
            return Speed(one.name, one.generated, reason=f"wrong result: relative error {error:.2g}"), None, None
        count = max(1, math.ceil(burst_ms / max(timer.once(launch), 1e-4)))
        run, captured = timer.burst(launch, count)
        if one.generated and not captured:
            return Speed(one.name, True, reason="could not be captured in a CUDA graph"), None, None
        return Speed(one.name, one.generated, captured=captured), run, launch
    except (Unavailable, UserError) as reason:
        return Speed(one.name, one.generated, reason=str(reason)), None, None
    except Exception as error:  # a competitor may raise anything; the others go on
        raise_if_lost(call.q.device, error)
        return Speed(one.name, one.generated, reason=f"raised {essence(error)}"), None, None
