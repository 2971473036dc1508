"""One tuning run: heats for every cell, spread over the GPUs of this host, each step in the journal.

All that is compared is compared within a heat, which one process runs on one GPU. A process serves one family of
modules on one GPU. All processes load (compile) their modules at the same time; then, on each GPU, one process after
the other measures. A competitor that hangs, crashes or is wrong is out of the whole run, and the heat is run again
without it in a new process.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fa3gen.base.errors import UserError
from fa3gen.measure.tuning import heats
from fa3gen.measure.tuning.client import LIMITS_S, Gone, Worker
from fa3gen.measure.tuning.heats import Heat
from fa3gen.measure.tuning.journal import Journal
from fa3gen.records.tuning_records import PeerResult, Result, TunedProblem, TuningRecord, timed
from fa3gen.spec.model import Forward

COMMAND = (sys.executable, "-P", "-m", "fa3gen.measure.tuning.worker")


class Stopped(Exception):
    """The run is being ended from outside."""


@dataclass(frozen=True)
class Module:
    """A file to measure, and the spec that it was rendered from."""

    stem: str
    path: Path
    sha256: str
    spec: Forward

    def as_request(self) -> dict[str, Any]:
        """What the measuring process needs to know."""
        return {"stem": self.stem, "path": str(self.path), "spec": self.spec.model_dump()}


@dataclass(frozen=True)
class Cell:
    """One problem, the modules that compete for it, and their heats. The first module holds the title."""

    problem: TunedProblem
    modules: tuple[Module, ...]
    heats: tuple[Heat, ...]

    @property
    def key(self) -> str:
        """What names this cell in the journal: another file in the field makes another cell."""
        field = "\n".join(f"{module.stem} {module.sha256}" for module in self.modules)
        digest = hashlib.sha256(f"{self.problem.model_dump_json()}\n{field}".encode()).hexdigest()
        return f"{self.problem.label} {digest[:16]}"


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: the rounds of its last heat and why others have none. `winner` None: it was not finished.

    `uncaptured` are those whose rounds are not of CUDA graphs. By name, `errors` are those of O and `eager` the
    milliseconds of calls one after the other.
    """

    cell: Cell
    times: Mapping[str, Sequence[float]]  # milliseconds of modules, in the order of the cell
    peers: Mapping[str, Sequence[float]]
    absent: Mapping[str, str]
    uncaptured: Sequence[str]
    around: Mapping[str, Any]
    winner: str | None
    errors: Mapping[str, float] = field(default_factory=dict)
    eager: Mapping[str, float] = field(default_factory=dict)

    def record(self, day: str | None = None) -> TuningRecord | None:
        """What is kept of it; None for a cell without a winner. `day` is the present UTC day unless given."""
        if self.winner is None:
            return None
        problem, modules = self.cell.problem, {module.stem: module for module in self.cell.modules}
        results = [
            Result(
                stem=stem,
                sha256=modules[stem].sha256,
                spec=modules[stem].spec.model_dump(exclude_none=True),
                **self._timed(stem, rounds),
            )
            for stem, rounds in self.times.items()
        ]
        return TuningRecord(
            gpu=self.around["gpu"] or "unknown",
            sms=self.around.get("sms"),
            driver=self.around["driver"],
            torch=self.around["torch"] or "unknown",
            dsl=self.around["dsl"] or "unknown",
            ptxas=self.around.get("ptxas"),
            date=day or datetime.datetime.now(datetime.UTC).date().isoformat(),
            problem=problem,
            results=results,
            peers=[PeerResult(name=name, **self._timed(name, rounds)) for name, rounds in self.peers.items()],
            absent=dict(self.absent),
            winner=self.winner,
        )

    def _timed(self, name: str, rounds: Sequence[float]) -> dict[str, Any]:
        """The fields of a result that were measured or follow from that."""
        error, eager = self.errors.get(name), self.eager.get(name)
        return timed(self.cell.problem, rounds, error=error, eager=eager, captured=name not in self.uncaptured)


def distribute(cells: Sequence[Cell], gpus: Sequence[str]) -> dict[str, list[Cell]]:
    """Cells by GPU, about as much to measure on each; cells of one family side by side, so that few load them."""
    work = dict.fromkeys(gpus, 0)
    shares: dict[str, list[Cell]] = {gpu: [] for gpu in gpus}
    # The largest first, each to the GPU with the least to do.
    for cell in sorted(cells, key=lambda cell: (-_timings(cell), cell.problem.family.label)):
        gpu = min(gpus, key=lambda gpu: (work[gpu], not _has_family(shares[gpu], cell)))
        shares[gpu].append(cell)
        work[gpu] += _timings(cell)
    order = {id(cell): index for index, cell in enumerate(cells)}
    for share in shares.values():
        share.sort(key=lambda cell: (cell.problem.family.label, order[id(cell)]))
    return shares


def _timings(cell: Cell) -> int:
    return len(cell.modules) * sum(heat.rounds for heat in cell.heats)


def _has_family(share: Sequence[Cell], cell: Cell) -> bool:
    return any(other.problem.family == cell.problem.family for other in share)


@dataclass
class _Slot:
    """The process of one family on one GPU; it is started when it is first asked, and after it was lost."""

    gpu: str
    family: str
    cells: list[Cell]
    worker: Worker | None = None
    around: dict[str, Any] = field(default_factory=dict)


@dataclass
class Tuner:
    """Runs cells to their outcomes. `say` gets a line for each heat, `on_event` what is being done at the moment."""

    cells: Sequence[Cell]
    journal: Journal
    gpus: Sequence[str]
    logs: Path
    peers: bool = True
    burst_ms: float = heats.BURST_MS
    jobs: int = 1
    budget_s: float | None = None
    command: Sequence[str] = COMMAND
    limits: Mapping[str, float] = field(default_factory=lambda: LIMITS_S)
    say: Callable[[str], None] = lambda text: None
    on_event: Callable[[str], None] = lambda text: None

    def __post_init__(self) -> None:
        """Take over who is out from the journal."""
        self._files = {module.stem: module.sha256 for cell in self.cells for module in cell.modules}
        entries = self.journal.all("out")
        self.out = {e["name"]: e["reason"] for e in entries if self._files.get(e["name"]) == e["sha256"]}
        self._slots: list[_Slot] = []
        self._stop = threading.Event()
        self._deadline: float | None = None
        self._done = 0
        self._lock = threading.Lock()

    def run(self) -> list[Outcome]:
        """Do all that the journal does not have; outcomes in the order of the cells.

        Raises UserError when a measuring process cannot be started at all. On an interrupt every process is ended;
        what the journal has stays.
        """
        shares = distribute(self.cells, self.gpus)
        self._deadline = None if self.budget_s is None else time.monotonic() + self.budget_s
        self._slots = [slot for gpu, cells in shares.items() for slot in _slots(gpu, cells)]
        try:
            unfinished = [slot for slot in self._slots if not all(self._finished(cell) for cell in slot.cells)]
            self._side_by_side([lambda slot=slot: self._load(slot) for slot in unfinished], self.jobs)  # type: ignore[misc]
            queues = [[slot for slot in self._slots if slot.gpu == gpu] for gpu in self.gpus]
            self._side_by_side([lambda queue=queue: self._measure(queue) for queue in queues], len(queues))  # type: ignore[misc]
        finally:
            self._end()
        return [self._outcome(cell) for cell in self.cells]

    def _side_by_side(self, tasks: Sequence[Callable[[], None]], width: int) -> None:
        """Run tasks in threads, each of which waits for a process; the first failure ends all."""
        with ThreadPoolExecutor(max_workers=max(1, width)) as pool:
            futures = [pool.submit(task) for task in tasks]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                self._end()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _end(self) -> None:
        """End every process: gently where it waits for a request, at once where a thread waits for it."""
        self._stop.set()
        for slot in self._slots:
            if slot.worker is not None:
                slot.worker.kill()

    # -- one slot

    def _load(self, slot: _Slot) -> None:
        """Let a process load all that it will time, peers too: nothing is compiled while somebody is timed."""
        wanted = {m.stem: m for cell in slot.cells if not self._finished(cell) for m in cell.modules}
        while not self._stop.is_set():
            modules = [module.as_request() for stem, module in wanted.items() if stem not in self.out]
            problems = [cell.problem.model_dump() for cell in slot.cells if not self._finished(cell)]
            request = {"do": "load", "modules": modules, "problems": problems, "peers": self.peers}
            answer = self._ask(slot, {**request, "without": sorted(self.out)})
            if answer is not None:
                self._note_wrong(answer)
                self.say(f"GPU {slot.gpu}: loaded {len(modules) - len(answer['wrong'])} modules of {slot.family}")
                return

    def _measure(self, slots: Sequence[_Slot]) -> None:
        """Run all heats of one GPU, slot by slot."""
        for slot in slots:
            for cell in slot.cells:
                self._run_cell(slot, cell)
            if slot.worker is not None:
                slot.worker.kill()  # it has nothing left to do, and leaving in order takes it seconds
                slot.worker = None

    def _ask(self, slot: _Slot, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Ask the slot's process; None when it was lost over a competitor, who is out then, and the caller goes on."""
        try:
            if slot.worker is None:
                slot.worker = self._start(slot)
                if self._stop.is_set():  # `_end` may have looked at this slot before there was a process
                    slot.worker.kill()
                    raise Stopped
                slot.around = slot.worker.ask({"do": "hello"})
            return slot.worker.ask(request)
        except Gone as gone:
            slot.worker = None
            if self._stop.is_set():
                raise Stopped from None
            if not gone.who or gone.who in self.out:  # nobody whom the next process could be started without
                raise UserError(f"a measuring process on GPU {slot.gpu} cannot go on: {gone.reason}") from None
            self._put_out(gone.who, gone.reason)
            return None

    def _start(self, slot: _Slot) -> Worker:
        package = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH")) if part)
        return Worker(
            self.command,
            environ={**os.environ, "CUDA_VISIBLE_DEVICES": slot.gpu, "PYTHONPATH": path},
            log=self.logs / f"gpu{slot.gpu.replace(os.sep, '_')}_{slot.family}.log",
            limits=self.limits,
            on_event=lambda at, who: self.on_event(f"GPU {slot.gpu}, {slot.family}: {at} {who}".rstrip()),
        )

    def _put_out(self, name: str, reason: str) -> None:
        if name not in self.out:
            self.out[name] = reason
            self.journal.append("out", name=name, sha256=self._files.get(name), reason=reason)
            self.say(f"out: {name}: {reason}")

    def _note_wrong(self, answer: Mapping[str, Any]) -> None:
        for stem, reason in answer["wrong"].items():
            self._put_out(stem, reason)

    # -- one cell

    def _entry(self, cell: Cell, stage: int) -> dict[str, Any] | None:
        """What the journal has of a heat as it would be run now."""
        heat = cell.heats[stage]
        peers = self.peers and heat.last
        how = {"rounds": heat.rounds, "burst": self.burst_ms, "peers": peers}
        return self.journal.find("heat", cell=cell.key, stage=stage, **how)

    def _finished(self, cell: Cell) -> bool:
        return self._entry(cell, len(cell.heats) - 1) is not None

    def _run_cell(self, slot: _Slot, cell: Cell) -> None:
        """Run the heats that the journal does not have; stop where nobody is left or the budget is spent."""
        stems = [module.stem for module in cell.modules]
        for stage, heat in enumerate(cell.heats):
            entry = self._entry(cell, stage)
            fresh = entry is None
            if entry is None:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    return
                entry = self._run_heat(slot, cell, stage, heat, stems)
            self._count_heat(
                cell, heat, {stem: entry["times"][stem] for stem in stems if stem in entry["times"]}, fresh
            )
            stems = self._survivors(entry, heat, stems)

    def _run_heat(self, slot: _Slot, cell: Cell, stage: int, heat: Heat, stems: Sequence[str]) -> dict[str, Any]:
        """Time the modules that are left; in the last heat the peers as well."""
        peers = self.peers and heat.last
        while True:
            left = [module for module in cell.modules if module.stem in stems and module.stem not in self.out]
            request = {
                "do": "heat",
                "problem": cell.problem.model_dump(),
                "modules": [module.as_request() for module in left],
                "peers": peers,
                "without": sorted(self.out),
                "rounds": heat.rounds,
                "eager_rounds": heats.EAGER_ROUNDS if heat.last else 0,
                "burst": self.burst_ms,
            }
            answer = self._ask(slot, request)
            if answer is not None:
                break
        self._note_wrong(answer)
        measured = {name: answer[name] for name in ("times", "eager", "errors", "failed", "uncaptured")}
        how = {"rounds": heat.rounds, "burst": self.burst_ms, "peers": peers}
        around = {**slot.around, "ptxas": answer["ptxas"]}
        return self.journal.append("heat", cell=cell.key, stage=stage, **how, **measured, around=around)

    def _survivors(self, entry: Mapping[str, Any], heat: Heat, stems: Sequence[str]) -> list[str]:
        """The holder of the title and the fastest challengers, in their order."""
        times = {stem: entry["times"][stem] for stem in stems if stem in entry["times"] and stem not in self.out}
        holder, challengers = list(times)[:1], {stem: times[stem] for stem in list(times)[1:]}
        return [*holder, *heats.fastest(challengers, heat.keep)]

    def _count_heat(self, cell: Cell, heat: Heat, times: heats.Times, fresh: bool) -> None:
        """Say how a heat ended, unless it is only remembered from the journal."""
        with self._lock:  # the GPUs' threads count together
            self._done += 1
            number = self._done
        if not fresh:
            return
        text = f"[{number}/{sum(len(cell.heats) for cell in self.cells)}] {cell.problem.label}: "
        text += f"{len(times)} modules, {heat.rounds} rounds"
        for best in heats.fastest(times, 1):
            tflops = cell.problem.tflops(statistics.median(times[best]))
            text += f"; {best} {tflops:.0f} TFLOP/s" + ("" if heat.last else " so far")
        self.say(text)

    def _outcome(self, cell: Cell) -> Outcome:
        """What the journal says of a cell, without anybody who is out by now."""
        entry = self._entry(cell, len(cell.heats) - 1)
        if entry is None:
            return Outcome(cell, {}, {}, {}, (), {}, None)
        stems = [module.stem for module in cell.modules]
        times = {stem: entry["times"][stem] for stem in stems if stem in entry["times"] and stem not in self.out}
        peers = {name: rounds for name, rounds in entry["times"].items() if name not in stems and name not in self.out}
        out = {name: reason for name, reason in self.out.items() if name in stems or name not in self._files}
        absent = {**entry["failed"], **out}
        winner = heats.winner(times) if times else None
        measured = {"errors": entry["errors"], "eager": entry["eager"], "uncaptured": entry["uncaptured"]}
        return Outcome(cell, times, peers, absent, around=entry["around"], winner=winner, **measured)


def _slots(gpu: str, cells: Sequence[Cell]) -> list[_Slot]:
    families = dict.fromkeys(cell.problem.family.label for cell in cells)
    return [_Slot(gpu, label, [cell for cell in cells if cell.problem.family.label == label]) for label in families]
