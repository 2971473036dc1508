"""Timing modules and peers on one GPU, in rounds. Runs in the measuring process; see `fa3gen.measure.tuning.worker`.

Inputs are normal random numbers. A competitor is first checked: a module on a few small ragged inputs against float64
attention with the limits of `fa3gen verify`, then everybody in the last rows at the shape itself. A timing is as many
launches as fill the time that the request names, replayed from a CUDA graph, between two events, so that a peer with a
slow host side is not taken for a slow kernel; who cannot be captured is launched as usual and said to be. Beside it
stands an eager figure: calls one after the other, as a model without graphs makes them, whatever the host takes. Inputs
and outputs of the usual shapes (16,384 tokens of width 2048: 268 MB) are larger than the L2; those of small shapes stay
in it.
"""

from __future__ import annotations

import functools
import gc
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from fa3gen.compile import toolchain
from fa3gen.compile.cache import cached_object
from fa3gen.design.masks import options_for
from fa3gen.design.operation import operation_of
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.measure.bench import check_tolerance, error_in_last_rows, last_rows
from fa3gen.measure.peers import PEERS, Attend, Peer, Tensors, Unavailable
from fa3gen.records.tuning_records import TunedProblem
from fa3gen.run import gpu
from fa3gen.run.launch import load_for_launch
from fa3gen.spec.model import Forward
from fa3gen.verify import inputs
from fa3gen.verify.attention_on_gpu import Runner
from fa3gen.verify.runner import essence, raise_if_lost

MOST_LAUNCHES = 200
# Ragged on both sides, rows without a key, several trips round a ring, grouped heads: what a wrong module stumbles on.
QUICK_CASES = ("ragged", "ragged_more_queries", "wrap", "gqa", "many_tiles", "many_tiles_few_keys")
SEED = 0

Launch = Callable[[], Any]


class Timer(Protocol):
    """How launches are timed; CUDA here, made up in tests."""

    def once(self, launch: Launch) -> float:
        """Milliseconds of one launch."""

    def eager(self, launch: Launch, count: int) -> Callable[[], float]:
        """A function that makes `count` launches one after the other and returns milliseconds per launch."""

    def burst(self, launch: Launch, count: int) -> tuple[Callable[[], float], bool]:
        """The same from a CUDA graph, and True; what `eager` gives, and False, for who cannot be captured."""


class CudaTimer:
    """Times with CUDA events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        """Keep the device."""
        self.device = device

    def once(self, launch: Launch) -> float:
        """See Timer."""
        return self._between_events(launch, 1)()

    def eager(self, launch: Launch, count: int) -> Callable[[], float]:
        """See Timer. The GPU is idle at the beginning, so that it waits for a host that is slower."""

        def work() -> None:
            for _ in range(count):
                launch()

        return self._between_events(work, count)

    def burst(self, launch: Launch, count: int) -> tuple[Callable[[], float], bool]:
        """See Timer. The launches were made before, so that nothing is compiled or allocated anew in the capture."""

        def work() -> torch.Tensor:
            for _ in range(count - 1):
                launch()
            out: torch.Tensor = launch()
            return out

        torch.cuda.synchronize(self.device)
        stream = torch.cuda.current_stream(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                out = work()
            run = self._between_events(graph.replay, count)
            # Who launches on a stream of its own would leave the graph empty, and be timed as doing nothing at all.
            out.fill_(math.nan)
            run()
            if not out.isnan().any():
                return run, True
        except Exception as error:  # a peer may do on the host what a capture does not allow
            torch.cuda.set_stream(stream)  # a capture that could not end leaves its own stream the current one
            raise_if_lost(self.device, error)
        return self.eager(launch, count), False

    def _between_events(self, work: Launch, count: int) -> Callable[[], float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

        def run() -> float:
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize(self.device)
            milliseconds: float = begin.elapsed_time(end)
            return milliseconds / count

        return run


def in_turns(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each run gives in rounds, in each of which all have a turn, in an order of its own: nobody always follows
    the same one."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    shuffle = random.Random(SEED)
    for _ in range(rounds):
        for name in shuffle.sample(list(runs), len(runs)):
            times[name].append(runs[name]())
    return times


def _assembler(paths: Iterable[Path]) -> str | None:
    """Version of the ptxas that assembled modules, one for all of them; None when none comes from the compile cache."""
    for path in paths:
        code = cached_object(path, may_compile=False)
        if code:
            return toolchain.ptxas_version_of_object(code)
    return None


@dataclass(frozen=True)
class _Ready:
    """Somebody to be timed: how, whether from a CUDA graph, how else, and the relative error of O in the last rows."""

    run: Callable[[], float]
    captured: bool
    eager: Callable[[], float]
    error: float


@dataclass(frozen=True)
class _Task:
    """What competitors are timed at: the problem, its inputs, the last rows of O, and milliseconds of one timing."""

    problem: TunedProblem
    tensors: Tensors
    expected: torch.Tensor
    burst_ms: float

    def launches(self, milliseconds: float) -> int:
        """How many launches of so many milliseconds make one timing."""
        return min(MOST_LAUNCHES, max(1, math.ceil(self.burst_ms / max(milliseconds, 1e-4))))


@dataclass
class Bench:
    """What one measuring process knows: loaded modules, which of them are wrong. `who` is being worked on.

    `refused` has the peers that cannot even run a small problem, by name and query heads of a group: they may have
    compiled for seconds before they found out.
    """

    device: torch.device
    timer: Timer
    announce: Callable[[str, str], None]
    peers: Sequence[Peer] = PEERS
    load: Callable[[Path], Any] = load_for_launch
    who: str = ""
    modules: dict[str, Any] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)
    refused: dict[tuple[str, int], str] = field(default_factory=dict)
    ptxas: str | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a request asks for. Raises verify.DeviceLost when nothing more can be done in this process."""
        match request["do"]:
            case "hello":
                around = gpu.environment()
                sms = None if self.device.index is None else gpu.sm_count(self.device.index)
                versions = {"driver": around.driver, "torch": around.torch, "dsl": around.dsl}
                return {"gpu": around.gpu, "sms": sms, **versions}
            case "load":
                for module in request["modules"]:
                    self._loaded(module)
                self._load_peers(request)
                return {"wrong": self._wrong_of(request)}
            case _:
                return self._heat(request)

    def _wrong_of(self, request: Mapping[str, Any]) -> dict[str, str]:
        return {m["stem"]: self.wrong[m["stem"]] for m in request["modules"] if m["stem"] in self.wrong}

    def _at(self, what: str, who: str) -> None:
        self.who = who
        self.announce(what, who)

    def _loaded(self, module: Mapping[str, Any]) -> Any:
        """The module, imported and compiled at the first time; None when that fails."""
        stem = module["stem"]
        if stem not in self.modules and stem not in self.wrong:
            self._at("load", stem)
            try:
                loaded = self.load(Path(module["path"]))
                loaded.compile_for_sm90a()
            except Exception as error:  # whatever a module raises is that module's failure
                self.wrong[stem] = f"cannot be loaded: {essence(error)}"
                return None
            self.modules[stem] = loaded
            gc.freeze()  # what the DSL leaves behind is large, and a collection during timing would walk through it
        return self.modules.get(stem)

    def _peers(self, request: Mapping[str, Any]) -> list[Peer]:
        return [peer for peer in self.peers if request["peers"] and peer.name not in request["without"]]

    def _load_peers(self, request: Mapping[str, Any]) -> None:
        """Call every peer on a small problem of each group of heads that will be timed: some of them compile then."""
        problems = [TunedProblem.model_validate(problem) for problem in request["problems"]]
        for group, problem in {problem.group: problem for problem in problems}.items():
            small = {"batch": 1, "heads_q": group, "heads_kv": 1, "seq_q": 256, "seq_k": 256}
            tensors = self._inputs(problem.model_copy(update=small))
            for peer in self._peers(request):
                self._at("warm", peer.name)
                try:
                    peer.prepare(problem.mask.spec_mask())(*tensors)
                except Unavailable:  # why is told where it is to be timed
                    pass
                except Exception as error:  # a peer may raise anything; the others go on
                    raise_if_lost(self.device, error)
                    self.refused[peer.name, group] = f"raised {essence(error)}"
        gc.freeze()  # as after a module

    def _right(self, module: Mapping[str, Any]) -> Any:
        """The module, if it can be loaded and is right on small inputs; else None."""
        loaded, stem = self._loaded(module), module["stem"]
        if loaded is None or stem in self.wrong:
            return None
        if stem not in self.checked:
            self._at("check", stem)
            spec = Forward.model_validate(module["spec"])
            runner = Runner(loaded, spec, self.device, SEED)
            cases = [case for case in inputs.gpu_cases(spec) if case.name in QUICK_CASES]
            results = [runner.run_case(case) for case in cases]
            failures = [f"{result.name}: {failure}" for result in results for failure in result.failures]
            if failures:
                self.wrong[stem] = "computes something wrong: " + "; ".join(failures)
                return None
            self.checked.add(stem)
        return loaded

    def _heat(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Check, warm up and time all competitors of one problem; times by name, or why there are none."""
        problem = TunedProblem.model_validate(request["problem"])
        attends: dict[str, Callable[[], Attend]] = {}
        names = problem.family.keywords
        named = inputs.usual_keywords(names, problem.heads_q, self.device)
        for module in request["modules"]:
            if (loaded := self._right(module)) is not None:
                spec = Forward.model_validate(module["spec"])
                options = {**options_for(spec.mask, problem.mask.spec_mask()), **named}
                entry = functools.partial(operation_of(spec).entry_of(loaded), **options)
                attends[module["stem"]] = lambda entry=entry: entry  # type: ignore[misc]
        for peer in () if named else self._peers(request):  # they have no such arguments
            attends[peer.name] = lambda peer=peer: peer.prepare(problem.mask.spec_mask())  # type: ignore[misc]
        tensors = self._inputs(problem)
        task = _Task(problem, tensors, last_rows(problem.mask.spec_mask(), tensors, names), float(request["burst"]))
        ready: dict[str, _Ready] = {}
        failed: dict[str, str] = {}
        own = task  # of modules, whose v may have its keys permuted; peers have them in order
        if problem.v_permuted:
            q, k, v = tensors
            own = replace(task, tensors=(q, k, inputs.permuted_keys(v, fill=0.0)))
        modules = {module["stem"] for module in request["modules"]}
        for name, prepare in attends.items():
            asked = own if name in modules else task
            found = self.refused.get((name, problem.group)) or self._ready(name, prepare, asked)
            if isinstance(found, str):
                failed[name] = found
            else:
                ready[name] = found
        times = self._rounds({name: found.run for name, found in ready.items()}, int(request["rounds"]))
        eager = self._rounds({name: found.eager for name, found in ready.items()}, int(request["eager_rounds"]))
        self.ptxas = self.ptxas or _assembler(Path(module["path"]) for module in request["modules"])
        return {
            "times": times,
            "eager": {name: statistics.median(rounds) for name, rounds in eager.items() if rounds},
            "errors": {name: found.error for name, found in ready.items()},
            "failed": failed,
            "wrong": self._wrong_of(request),
            "uncaptured": [name for name, found in ready.items() if not found.captured],
            "ptxas": self.ptxas,
        }

    def _inputs(self, problem: TunedProblem) -> Tensors:
        generator = torch.Generator(self.device).manual_seed(SEED)

        def normal(seq: int, heads: int, dim: int) -> torch.Tensor:
            return inputs.normal((problem.batch, seq, heads, dim), DTYPES[problem.dtype], self.device, generator)

        q = normal(problem.seq_q, problem.heads_q, problem.head_dim)
        k = normal(problem.seq_k, problem.heads_kv, problem.head_dim)
        v = normal(problem.seq_k, problem.heads_kv, problem.head_dim_v)
        return q, k, inputs.by_sequence(v) if problem.by_sequence else v

    def _ready(self, name: str, prepare: Callable[[], Attend], task: _Task) -> _Ready | str:
        """Launch, check and prepare a timing; a text says why there is none."""
        self._at("warm", name)
        try:
            attend = prepare()
            error = error_in_last_rows(attend(*task.tensors), task.expected)
            if not error <= check_tolerance(task.problem.dtype):
                return f"wrong result: relative error {error:.2g} in the last rows"

            def launch() -> Any:
                return attend(*task.tensors)

            launch()
            count = task.launches(self.timer.once(launch))
            run, captured = self.timer.burst(launch, count)
            # One launch takes as long as the host does; a graph of small kernels has to hold more of them.
            if captured and (more := task.launches(run())) >= 2 * count:
                run, captured = self.timer.burst(launch, more)
            return _Ready(run, captured, self.timer.eager(launch, count), error)
        except Unavailable as reason:
            return str(reason)
        except Exception as error:  # a competitor may raise anything; the others go on
            raise_if_lost(self.device, error)
            return f"raised {essence(error)}"

    def _rounds(self, bursts: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
        """As `in_turns`, and say whose turn it is."""

        def timed(name: str) -> float:
            self._at("time", name)
            return bursts[name]()

        return in_turns({name: functools.partial(timed, name) for name in bursts}, rounds)
