"""Host time of one call, each way of calling beside the others: what `fa3gen bench --host` shows.

A row is something to call: a module's `attention`, `fa3gen.attention`, a peer. A column is a way of calling it: for O
alone, for O and LSE, or with O written into a given tensor. All are timed on a problem so small that the GPU keeps up,
under `torch.no_grad()`. They take turns, and of many short measurements the fastest counts: whatever else the host does
only adds to a measurement, and disturbs a host for longer than one of them takes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fa3gen.base.files import write_text
from fa3gen.design.family import Family
from fa3gen.design.masks import of_call, options_of_call
from fa3gen.design.operation import operation_of
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.measure.launch_times import BATCH, CALLS, HEADS, ROUNDS, SEQ_LEN, host_microseconds, small_problem
from fa3gen.measure.peers import PEERS, Peer, Tensors, Unavailable
from fa3gen.run import calls, gpu
from fa3gen.spec.model import CausalMask, Forward, Mask, OutputDType, WindowMask, usual_output
from fa3gen.verify.inputs import usual_keywords

if TYPE_CHECKING:
    from rich.table import Table

Launch = Callable[[], Any]

WAYS = ("O", "O and LSE", "out=")
MEASUREMENTS = 20  # of each call; one takes about 10 ms


@dataclass(frozen=True)
class Problem:
    """What is asked for: a family, and how many heads of q share one of k and v."""

    family: Family
    group: int = 1

    def __str__(self) -> str:
        """`bf16, head dim 128, causal`, and the group where there is one."""
        return f"{self.family}" + (f", {self.group} heads of q for each of k and v" if self.group > 1 else "")

    @classmethod
    def of(cls, spec: Forward) -> Problem:
        """The problem that a spec's module serves."""
        return cls(Family.of(spec), spec.tile.pack_heads)

    def tensors(self, device: torch.device) -> Tensors:
        """Return q, k, v: (1, 128, 2 x group, d), (1, 128, 2, d), (1, 128, 2, d_v)."""
        family = self.family
        q, k, v = small_problem(family.dtype, family.head_dim, family.head_dim_v, device, family.by_sequence)
        return q.repeat(1, 1, self.group, 1) if self.group > 1 else q, k, v


@dataclass(frozen=True)
class Callee:
    """Something to call. `ways` returns a launch for each of WAYS that it has, or raises Unavailable.

    What `setting` returns is entered once around each measurement, not around each call.
    """

    name: str
    generated: bool
    ways: Callable[[Tensors], Mapping[str, Launch]]
    setting: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True)
class HostTimes:
    """One row: microseconds of a call in each way, or the reason why there are none."""

    name: str
    generated: bool
    microseconds: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True)
class HostBench:
    """Everything measured in one process: for each problem its rows."""

    environment: gpu.Environment
    problems: tuple[tuple[Problem, tuple[HostTimes, ...]], ...]

    def failures(self, limit: float | None) -> list[str]:
        """What a generated module or `fa3gen.attention` did wrong: it raised, or took longer than `limit`."""
        return [text for problem, rows in self.problems for row in rows for text in _failures(problem, row, limit)]

    def reasons(self) -> list[str]:
        """Why rows are empty, with the problem."""
        return [
            f"{row.name}: {row.reason} ({problem})" for problem, rows in self.problems for row in rows if row.reason
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        protocol = {
            "shape": {"batch": BATCH, "seq_len": SEQ_LEN, "heads": HEADS},
            "timing": f"fastest of {MEASUREMENTS} measurements in turns, each the median of {ROUNDS} x {CALLS} calls",
            "unit": "microseconds",
        }
        problems = [
            {
                "dtype": problem.family.dtype,
                "head_dim": problem.family.head_dim,
                "head_dim_v": problem.family.head_dim_v,
                "mask": problem.family.mask.model_dump(),
                "heads_per_kv_head": problem.group,
                "calls": [asdict(row) for row in rows],
            }
            for problem, rows in self.problems
        ]
        return {"version": 1, "protocol": protocol, "environment": asdict(self.environment), "problems": problems}


def _failures(problem: Problem, row: HostTimes, limit: float | None) -> Iterator[str]:
    if not row.generated:
        return
    if row.reason is not None and row.reason.startswith("raised"):
        yield f"{row.name}: {row.reason} ({problem})"
    for way, microseconds in row.microseconds.items():
        if limit is not None and microseconds > limit:
            yield f"{row.name}, {way}: {microseconds:.1f} us, more than {limit:g} ({problem})"


def module_callee(name: str, spec: Forward, load: Callable[[], Any]) -> Callee:
    """A generated module's entry point, in every way that its spec has."""
    entry_of, names = operation_of(spec).entry_of, Family.of(spec).keywords

    def ways(tensors: Tensors) -> Mapping[str, Launch]:
        named = options_of_call(spec.mask) | usual_keywords(names, tensors[0].shape[2], tensors[0].device)
        out = _out_for(tensors, spec.o_dtype)
        return _own_ways(entry_of(load()), tensors, named, out, lse=spec.outputs.lse)

    return Callee(name, True, ways)


def dispatched_callee(mask: Mask, names: Sequence[str] = (), *, v_permuted: bool = False) -> Callee:
    """`fa3gen.attention`, which finds the module by its table; `names` as in `Family.keywords`."""

    def ways(tensors: Tensors) -> Mapping[str, Launch]:
        from fa3gen.run import ops
        from fa3gen.run.dispatch import NoKernel

        options: dict[str, Any] = {"causal": True} if isinstance(mask, CausalMask) else {}
        options |= usual_keywords(names, tensors[0].shape[2], tensors[0].device)
        if isinstance(mask, WindowMask):
            options["window"] = (mask.left, mask.right)
        options |= {"v_permuted": True} if v_permuted else {}
        out = _out_for(tensors, usual_output(calls.INPUTS[tensors[0].dtype]))
        try:
            ops.attention.explain(*tensors, **options)
        except NoKernel as reason:
            raise Unavailable(str(reason)) from None
        try:
            ops.attention.explain(*tensors, **options, return_lse=True)
        except NoKernel:
            return _own_ways(ops.attention, tensors, options, out, lse=False)
        return _own_ways(ops.attention, tensors, options, out, lse=True)

    return Callee("fa3gen.attention", True, ways)


def peer_callee(peer: Peer, mask: Mask) -> Callee:
    """A peer, which is called for O alone: the others have no such call for all of them."""

    def ways(tensors: Tensors) -> Mapping[str, Launch]:
        attend = peer.bare(mask)
        return {WAYS[0]: lambda: attend(*tensors)}

    return Callee(peer.name, False, ways, peer.setting or contextlib.nullcontext)


def _out_for(tensors: Tensors, dtype: OutputDType) -> torch.Tensor:
    """An O of this dtype to be written to."""
    q, _, v = tensors
    return torch.empty((*q.shape[:3], v.shape[3]), dtype=DTYPES[dtype].in_torch(), device=q.device)


def _own_ways(
    attention: Callable[..., Any], tensors: Tensors, options: Mapping[str, Any], out: torch.Tensor, *, lse: bool
) -> dict[str, Launch]:
    q, k, v = tensors
    ways: dict[str, Launch] = {WAYS[0]: lambda: attention(q, k, v, **options)}
    if lse:
        ways[WAYS[1]] = lambda: attention(q, k, v, **options, return_lse=True)
    ways[WAYS[2]] = lambda: attention(q, k, v, **options, out=out)
    return ways


def callees(problem: Problem, modules: Sequence[Callee], peers: Sequence[Peer] = PEERS) -> list[Callee]:
    """The rows of one problem: its modules, `fa3gen.attention`, the peers."""
    mask, names = of_call(problem.family.mask), problem.family.keywords
    fair = [] if names else peers  # they have no such arguments
    dispatched = dispatched_callee(mask, names, v_permuted=problem.family.v_permuted)
    return [*modules, dispatched, *(peer_callee(peer, mask) for peer in fair)]


def measure(callees: Sequence[Callee], tensors: Tensors, synchronize: Callable[[], Any]) -> tuple[HostTimes, ...]:
    """Time every way of every callee, in turns. Who raises is left out of the turns that follow, with the reason."""
    rows = [_Row(callee, tensors, synchronize) for callee in callees]
    with torch.no_grad():
        for _ in range(MEASUREMENTS):
            for row in rows:
                row.take_turn()
    return tuple(row.result() for row in rows)


class _Row:
    """A callee while it is measured."""

    def __init__(self, callee: Callee, tensors: Tensors, synchronize: Callable[[], Any]) -> None:
        """Prepare its ways, or keep the reason why not."""
        self.callee, self.synchronize = callee, synchronize
        self.best: dict[str, float] = {}
        self.reason: str | None = None
        self.ways: Mapping[str, Launch] = {}
        with self._keeping_the_reason():
            self.ways = callee.ways(tensors)

    def take_turn(self) -> None:
        """Measure each way once."""
        with self._keeping_the_reason():
            for way, launch in self.ways.items():
                with self.callee.setting():
                    found = host_microseconds(launch, self.synchronize)
                self.best[way] = min(found, self.best.get(way, found))

    @contextlib.contextmanager
    def _keeping_the_reason(self) -> Iterator[None]:
        try:
            yield
        except Unavailable as reason:
            self.ways, self.reason = {}, str(reason)
        except Exception as error:  # anything may be wrong with a module or a peer; the others go on
            self.ways = {}
            self.reason = f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"

    def result(self) -> HostTimes:
        """Times, or the reason why there are none."""
        found = self.best if self.reason is None else {}
        return HostTimes(self.callee.name, self.callee.generated, found, self.reason)


def table(problem: Problem, rows: Sequence[HostTimes]) -> Table:
    """Return the table of one problem."""
    from rich.table import Table

    title = f"Host time of a call in microseconds, {problem}"
    shown = Table(title=title, title_justify="left", min_width=len(title))
    shown.add_column("call")
    for way in WAYS:
        shown.add_column(way, justify="right")
    for row in rows:
        found = (row.microseconds.get(way) for way in WAYS)
        shown.add_row(row.name, *("" if value is None else f"{value:.1f}" for value in found))
    return shown


def write_json(bench: HostBench, path: Path) -> None:
    """Write everything measured as one JSON document."""
    write_text(path, json.dumps(bench.as_dict(), indent=2, sort_keys=True) + "\n")
