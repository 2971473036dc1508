"""Records what each warp did when: the events behind `fa3gen trace`.

Time is logical and causal: ABOUT_TIME says how. The times do not depend on when the model got round to what: they
follow from the instructions that each warp issued and from who waited for what.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fa3gen.cpu.barriers import Mbarrier
from fa3gen.cpu.shared_memory import BASE

EventKind = Literal["wait", "arrive", "load", "store", "copies", "product", "registers"]
Awaited = Literal["mbarrier", "barrier", "products", "stores", "copies", "registers", "warps"]

ABOUT_TIME = (
    "Time is logical. A warp's clock advances by one tick for each PTX instruction that it issues; what an instruction "
    "causes happens at the end of its tick. A wait ends when the warp has issued it and what it waits for can have "
    "happened, whichever is later: an mbarrier phase completes with its last arrival or load, a named barrier with its "
    "last arrival, a product when all four warps have issued it. Copies and products themselves take no time from "
    "anybody: each is shown as late as delays nobody, until the first warp waits for it. A trace shows order, "
    "dependences and overlap, and nothing about speed."
)

_FRAME = "<ptx block "  # how translated blocks are called in Python's stack
_DESCRIPTOR_START = 0x3FFF  # of a wgmma matrix descriptor: the start address in units of 16 bytes


@dataclass
class Event:
    """Something that `warps` did from tick `begin` to tick `end`; an `end` of None never came.

    `instruction` is the index of the instruction that began it. `details`, with places as bytes from the start of the
    CTA's shared memory:

    - wait: `on`, one of `Awaited`, then what says which; `completed`, the tick at which that had happened, 0 if before
      the kernel, None if it never did or the wait was told "not yet" and ended without
    - arrive: `on` "mbarrier" with `place`, `phase`, `arrivals`, `expected_bytes`; or "barrier" with `number`
    - load, store: `place`, `bytes`, `coordinates`; a load also `barrier` and `phase`
    - copies: `place`, `bytes` of one group of cp.async of one warp
    - product: `warpgroup`, `number` in it, `group` (of wgmma.commit_group), `shape`, `types`, `a` and `b` (places; a
      None for registers), `issued`, the tick at which its last warp had issued it
    - registers: `action` and `registers` of setmaxnreg
    """

    kind: EventKind
    warps: tuple[int, ...]
    begin: int
    end: int | None
    instruction: int | None
    details: dict[str, Any]


@dataclass
class WarpTrace:
    """One warp: its clock, the instructions it has issued, and stretches of them as (end, first, past the last)."""

    clock: int = 0
    instructions: int = 0
    ended: bool = False
    stretches: list[tuple[int, int, int]] = field(default_factory=list)


class CtaTrace:
    """What happened in one CTA of one launch: `events` in the order in which the model met them, `warps` by number."""

    def __init__(self, cta: Any) -> None:
        """Nothing has happened."""
        self.index: tuple[int, int, int] = cta.index
        self.grid: tuple[int, int, int] = cta.grid
        self.kernel = cta.program.kernel
        self.dynamic_start = _dynamic_start(cta)
        self.shared_bytes: int = cta.launch.shared_bytes
        self.warps = [WarpTrace() for _ in range(cta.clocks.warps)]
        self.events: list[Event] = []
        self._cta = cta
        self._phases: dict[tuple[int, int], int] = {}  # (place, phase) -> end of the latest arrival or load issued
        self._first_waits: dict[tuple[int, int], int] = {}  # (place, phase) -> tick of the first wait
        self._first_product_waits: dict[tuple[int, int], int] = {}  # the same of (warpgroup, products waited for)
        self._generations: dict[tuple[int, int], dict[int, int]] = {}  # (barrier, generation) -> warp -> its arrival
        self._released = 0  # tick at which registers were last given back
        self._loads: dict[int, Event] = {}
        self._landed: list[Event] = []
        self._complete: dict[int, int] = {}  # warpgroup -> products complete
        self._products: dict[tuple[int, int], Event] = {}
        self._copies: dict[tuple[int, int], Event] = {}
        self._stores: list[tuple[int, int, Event]] = []  # warp, epoch, event; those not awaited

    # ------------------------------------------------------------------ time

    def advance(self, group: Any, first: int, end: int) -> None:
        """A group has issued the instructions [first, end)."""
        now = self._meet(group) + end - first
        for number in group.warps.tolist():
            warp = self.warps[number]
            warp.clock = now
            warp.instructions += end - first
            warp.stretches.append((now, first, end))

    def finish(self) -> None:
        """The CTA has ended, or cannot go on: note who still waits, and let go of its state."""
        for group in self._cta.groups:
            what = group.waits_for
            details: dict[str, Any] = {"on": "products", "completed": None}
            if group.parked:
                details["on"] = "warps"
            elif what is None:
                continue
            elif isinstance(what, Mbarrier):
                details = {"on": "mbarrier", "place": what.address - BASE, "phase": what.phase, "completed": None}
            elif group.ticket is not None:
                details = {"on": "barrier", "number": group.ticket[0], "completed": None}
            elif what.startswith("setmaxnreg"):
                details["on"] = "registers"
            instruction = self._cta.program.blocks[group.block].first
            self._add("wait", group.warps.tolist(), self._meet(group), None, instruction, details)
        self._settle_loads()
        self._settle_products()
        self._cta = None

    def _settle_loads(self) -> None:
        """Let each load land when the first warp waited for it; phases complete with that."""
        for event in self._landed:
            key = (event.details["barrier"], event.details["phase"])
            event.end = max(event.begin + 1, self._first_waits.get(key, 0))
            self._contribute(*key, event.end)
        for event in self.events:
            if event.kind == "wait" and event.details["on"] == "mbarrier" and event.details["completed"] is not None:
                event.details["completed"] = self._phases.get((event.details["place"], event.details["phase"]), 0)

    def _settle_products(self) -> None:
        """Let each product be complete when the first warp waited for it."""
        for (warpgroup, number), event in self._products.items():
            if number < self._complete.get(warpgroup, 0):
                waits = [
                    begin
                    for (waiting, target), begin in self._first_product_waits.items()
                    if waiting == warpgroup and target > number
                ]
                event.end = max([event.details["issued"], *([min(waits)] if waits else [])])

    def _meet(self, group: Any) -> int:
        """The group's clock. Its warps move together: those that are behind have waited for the others."""
        warps = group.warps.tolist()
        now: int = max(self.warps[warp].clock for warp in warps)
        behind: dict[int, list[int]] = {}
        for warp in warps:
            if self.warps[warp].clock < now:
                behind.setdefault(self.warps[warp].clock, []).append(warp)
                self.warps[warp].clock = now
        for begin, those in behind.items():
            self._add("wait", those, begin, now, None, {"on": "warps", "completed": now})
        return now

    def _moment(self, group: Any) -> tuple[int, int]:
        """(tick, index) of the instruction that the group is executing."""
        first = self._cta.program.blocks[group.block].first
        instruction = _executing(self._cta.program.lines)
        instruction = first if instruction is None else instruction
        return self._meet(group) + instruction - first, instruction

    def _waited(self, group: Any, warps: Iterable[int], completed: int, details: dict[str, Any]) -> None:
        """The group's wait, a block of its own, is over; what it waited for was there at tick `completed`."""
        begin, instruction = self._moment(group)
        last = max(begin, completed - 1)  # the tick in which the instruction ends
        for warp in group.warps.tolist():
            self.warps[warp].clock = max(self.warps[warp].clock, last)
        self._add("wait", warps, begin, last + 1, instruction, {**details, "completed": completed})

    def _add(
        self,
        kind: EventKind,
        warps: Iterable[int],
        begin: int,
        end: int | None,
        instruction: int | None,
        details: dict[str, Any],
    ) -> Event:
        event = Event(kind, tuple(warps), begin, end, instruction, details)
        self.events.append(event)
        return event

    # ------------------------------------------------------------------ barriers

    def mbarrier_arrive(self, group: Any, barrier: Mbarrier, warps: Any, arrivals: int, size: int) -> None:
        """Arrivals, or bytes announced."""
        begin, instruction = self._moment(group)
        place = barrier.address - BASE
        details = {"place": place, "phase": barrier.phase, "arrivals": arrivals, "expected_bytes": size}
        self._add("arrive", warps.tolist(), begin, begin + 1, instruction, {"on": "mbarrier", **details})
        self._contribute(place, barrier.phase, begin + 1)

    def mbarrier_waited(self, group: Any, barrier: Mbarrier, warps: Any, ready: Any) -> None:
        """A wait was answered: the phase before the running one is complete, or the running one is not yet."""
        place = barrier.address - BASE
        if np.all(ready):
            phase = barrier.phase - 1
            begin, _ = self._moment(group)
            self._first_waits[place, phase] = min(self._first_waits.get((place, phase), begin), begin)
            completed = self._phases.get((place, phase), 0)
            self._waited(group, warps.tolist(), completed, {"on": "mbarrier", "place": place, "phase": phase})
            return
        begin, instruction = self._moment(group)
        details = {"on": "mbarrier", "place": place, "phase": barrier.phase, "completed": None}
        self._add("wait", warps.tolist(), begin, begin + 1, instruction, details)

    def barrier_arrive(self, group: Any, number: int, barrier: Any, wait: bool) -> None:
        """An arrival at a named barrier; a wait is recorded when it is over."""
        begin, instruction = self._moment(group)
        warps = group.warps.tolist()
        self._generations.setdefault((number, barrier.generation), {}).update(dict.fromkeys(warps, begin + 1))
        if not wait:
            self._add("arrive", warps, begin, begin + 1, instruction, {"on": "barrier", "number": number})

    def barrier_passed(self, group: Any, number: int, generation: int) -> None:
        """A wait at a named barrier is over."""
        arrivals = self._generations[number, generation]
        completed = max(arrivals.values())
        if self._cta.named_barriers.barriers[number].everybody:
            # All threads that have not ended are waited for: those that never arrived ended before it completed.
            ends = [warp.clock for index, warp in enumerate(self.warps) if warp.ended and index not in arrivals]
            completed = max(completed, *ends, 0)
        self._waited(group, group.warps.tolist(), completed, {"on": "barrier", "number": number})

    def warps_ended(self, group: Any) -> None:
        """Warps have returned."""
        for warp in group.warps.tolist():
            self.warps[warp].ended = True

    def setmaxnreg(self, group: Any, action: str, registers: int) -> None:
        """Registers given back, or taken as soon as there were enough."""
        if action == "inc" and group.waits_for is not None:
            self._waited(group, group.warps.tolist(), self._released, {"on": "registers"})
        begin, instruction = self._moment(group)
        if action == "dec":
            self._released = max(self._released, begin + 1)
        details = {"action": action, "registers": registers}
        self._add("registers", group.warps.tolist(), begin, begin + 1, instruction, details)

    def _contribute(self, place: int, phase: int, tick: int) -> None:
        self._phases[place, phase] = max(self._phases.get((place, phase), 0), tick)

    # ------------------------------------------------------------------ copies

    def load_issued(self, group: Any, load: Any, warps: Any, destination: int) -> None:
        """A TMA load is on its way."""
        begin, instruction = self._moment(group)
        details = {
            "place": destination - BASE,
            "bytes": load.size,
            "coordinates": list(load.coordinates),
            "barrier": load.barrier.address - BASE,
            "phase": load.barrier.phase,
        }
        self._loads[load.number] = self._add("load", warps.tolist(), begin, None, instruction, details)

    def load_landed(self, group: None, load: Any) -> None:
        """The model has let a TMA load land. No time passes: nobody is delayed by more than its issue."""
        event = self._loads[load.number]
        self._landed.append(event)
        self._contribute(load.barrier.address - BASE, load.barrier.phase, event.begin + 1)

    def store_issued(self, group: Any, warp: int, source: int, store: Any, epoch: int) -> None:
        """A TMA store is on its way."""
        begin, instruction = self._moment(group)
        details = {
            "place": source - BASE,
            "bytes": len(store.chunks) * 16,
            "coordinates": list(store.coordinates),
        }
        event = self._add("store", [warp], begin, None, instruction, details)
        self._stores.append((warp, epoch, event))

    def stores_awaited(self, group: Any, stores: list[Any]) -> None:
        """cp.async.bulk.wait_group has returned."""
        done = [entry for entry in self._stores if stores[entry[0]].completed >= entry[1]]
        self._stores = [entry for entry in self._stores if entry not in done]
        begin, instruction = self._moment(group)
        for _, _, event in done:
            event.end = max(begin, event.begin + 1)
        if done:  # other warps execute the wait, too, and wait for nothing
            warps = sorted({warp for warp, _, _ in done})
            self._add("wait", warps, begin, begin + 1, instruction, {"on": "stores", "completed": begin})

    def copies_issued(self, group: Any, destination: Any, width: int, active: Any, copies: list[Any]) -> None:
        """One cp.async instruction; those of one warp and one group are one event."""
        begin, instruction = self._moment(group)
        for position, warp in enumerate(group.warps.tolist()):
            lanes = slice(32 * position, 32 * position + 32)
            places = destination[lanes][active[lanes]]
            if not len(places):
                continue
            key = (warp, copies[warp].open_epoch)
            place = int(places.min()) - BASE
            if key not in self._copies:
                details = {"place": place, "bytes": 0}
                self._copies[key] = self._add("copies", [warp], begin, None, instruction, details)
            event = self._copies[key]
            event.details["place"] = min(event.details["place"], place)
            event.details["bytes"] += len(places) * width

    def copies_awaited(self, group: Any, copies: list[Any]) -> None:
        """cp.async.wait_group has returned."""
        begin, instruction = self._moment(group)
        warps = group.warps.tolist()
        for key in [key for key in self._copies if key[0] in warps and key[1] <= copies[key[0]].completed]:
            event = self._copies.pop(key)
            event.end = max(begin, event.begin + 1)
        self._add("wait", warps, begin, begin + 1, instruction, {"on": "copies", "completed": begin})

    # ------------------------------------------------------------------ products

    def product_issued(self, group: Any, number: int, operation: Any) -> None:
        """wgmma.mma_async; the four warps of a warpgroup may issue it at different times."""
        tick, instruction = self._moment(group)
        warps = group.warps.tolist()
        key = (warps[0] // 4, number)
        if key not in self._products:
            self._products[key] = self._add("product", [], tick, None, instruction, _product(key, operation))
        event = self._products[key]
        event.warps = tuple(sorted({*event.warps, *warps}))
        event.begin = min(event.begin, tick)
        event.details["issued"] = max(event.details["issued"], tick + 1)

    def products_committed(self, group: Any, queue: Any) -> None:
        """wgmma.commit_group."""
        first = int(group.warps[0])
        commits = queue.commits[first % 4]
        for number in range(commits[-2] if len(commits) > 1 else 0, commits[-1]):
            self._products[first // 4, number].details["group"] = len(commits) - 1

    def products_complete(self, group: None, queue: Any) -> None:
        """The model has computed products: all that are waited for, which their four warps have issued."""
        warpgroup = next(number for number, other in enumerate(self._cta.wgmma.queues) if other is queue)
        self._complete[warpgroup] = queue.done

    def products_awaited(self, group: Any, target: int, pending: int) -> None:
        """wgmma.wait_group has returned: the first `target` products are complete, `pending` groups may not be."""
        begin, _ = self._moment(group)
        key = (int(group.warps[0]) // 4, target)
        self._first_product_waits[key] = min(self._first_product_waits.get(key, begin), begin)
        issued = max((self._products[key[0], number].details["issued"] for number in range(target)), default=0)
        details = {"on": "products", "warpgroup": key[0], "products": target, "pending_groups": pending}
        self._waited(group, group.warps.tolist(), issued, details)


_HANDLERS: dict[str, Callable[..., None]] = {
    "mbarrier arrive": CtaTrace.mbarrier_arrive,
    "mbarrier waited": CtaTrace.mbarrier_waited,
    "barrier arrive": CtaTrace.barrier_arrive,
    "barrier passed": CtaTrace.barrier_passed,
    "warps ended": CtaTrace.warps_ended,
    "setmaxnreg": CtaTrace.setmaxnreg,
    "load issued": CtaTrace.load_issued,
    "load landed": CtaTrace.load_landed,
    "store issued": CtaTrace.store_issued,
    "stores awaited": CtaTrace.stores_awaited,
    "cp.async issued": CtaTrace.copies_issued,
    "cp.async awaited": CtaTrace.copies_awaited,
    "wgmma issued": CtaTrace.product_issued,
    "wgmma committed": CtaTrace.products_committed,
    "wgmma complete": CtaTrace.products_complete,
    "wgmma awaited": CtaTrace.products_awaited,
}


@dataclass
class Trace:
    """The CTAs that ran, in the order in which they did; give it to `fa3gen.cpu.kernel.Settings`."""

    ctas: list[CtaTrace] = field(default_factory=list)
    _running: Any = None

    def advance(self, cta: Any, group: Any, first: int, end: int) -> None:
        """A group of warps has issued the instructions [first, end)."""
        self._of(cta).advance(group, first, end)

    def record(self, cta: Any, name: str, group: Any | None, details: dict[str, Any]) -> None:
        """Something happened: to a group of warps, or by itself."""
        _HANDLERS[name](self._of(cta), group, **details)

    def finish(self, cta: Any) -> None:
        """A CTA has ended."""
        self._of(cta).finish()
        self._running = None

    def _of(self, cta: Any) -> CtaTrace:
        if self._running is not cta:
            self._running = cta
            self.ctas.append(CtaTrace(cta))
        return self.ctas[-1]


def _executing(lines: list[dict[int, int]]) -> int | None:
    """The instruction that the innermost translated block in Python's stack executes."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_FRAME):
            return lines[int(name[len(_FRAME) : -1])].get(frame.f_lineno)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def _dynamic_start(cta: Any) -> int:
    """Where dynamic shared memory begins, in bytes from the start of the CTA's shared memory."""
    for variable in cta.program.kernel.shared:
        if variable.dynamic:
            return int(cta.launch.symbols[variable.name]) - BASE
    return 0


def _product(key: tuple[int, int], operation: Any) -> dict[str, Any]:
    shape = operation.shape
    k = 16 if shape.a_type in ("bf16", "f16") else 32
    a, b = operation.a_descriptor, operation.b_descriptor
    return {
        "warpgroup": key[0],
        "number": key[1],
        "group": None,
        "shape": [64, shape.n, k],
        "types": [shape.a_type, shape.b_type, shape.accumulator],
        "a": None if a is None else ((a & _DESCRIPTOR_START) << 4) - BASE,
        "b": ((b & _DESCRIPTOR_START) << 4) - BASE,
        "issued": 0,
    }
