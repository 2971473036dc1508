"""Barriers of a CTA: named barriers, mbarriers with transaction counts, and the register pool of setmaxnreg."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3gen.cpu.clocks import CAUSAL, INIT, PROXY, Clock, Clocks
from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.shared_memory import BASE, SharedMemory
from fa3gen.cpu.truth import every
from fa3gen.hardware.hopper import MBARRIER_BYTES

NAMED_BARRIERS = 16  # PTX ISA, "bar": barriers 0 to 15
MAX_COUNT = 2**20 - 1  # PTX ISA, "mbarrier object": range of arrivals and of the transaction count


@dataclass
class NamedBarrier:
    """One barrier of `bar` and `barrier`: `generation` counts how often it has completed."""

    generation: int = 0
    arrived: int = 0  # threads
    expected: int = 0
    everybody: bool = False  # expects all threads of the CTA that have not ended
    gathered: Clock | None = None
    released: Clock | None = None


class NamedBarriers:
    """`bar.sync`, `bar.arrive` (PTX ISA, "bar, barrier")."""

    def __init__(self, clocks: Clocks, live_threads: int) -> None:
        """No thread has arrived anywhere."""
        self.clocks = clocks
        self.live_threads = live_threads
        self.barriers: dict[int, NamedBarrier] = {}

    def arrive(self, group: Any, number: Any, threads: Any, mask: Any, *, wait: bool) -> bool:
        """Count the group's warps as arrived. With `wait`, False until the barrier has completed; then call again."""
        if group.ticket is not None:
            return self._passed(group)
        group.whole_warps(mask, "bar")
        if group.part(number) or group.part(threads):  # each warp may name another barrier
            return False
        number = group.one(number, mask, "barrier number")
        barrier = self.barriers.setdefault(number, NamedBarrier())
        self._expect(barrier, number, None if threads is None else group.one(threads, mask, "thread count"))
        barrier.arrived += group.lanes
        group.cta.note("barrier arrive", group, number=number, barrier=barrier, wait=wait)
        clock = self.clocks.release(group.warps)
        barrier.gathered = _join(barrier.gathered, clock)
        group.cta.progress += 1
        if barrier.arrived > barrier.expected:
            raise Hazard(
                Kind.ARRIVAL_COUNT,
                f"{barrier.arrived} threads arrive at barrier {number}, which expects {barrier.expected}",
            )
        if wait:
            group.ticket = (number, barrier.generation)
            group.waits_for = f"barrier {number}"
        self._complete(barrier)
        return not wait or self._passed(group)

    def thread_ended(self, threads: int) -> None:
        """Threads that have ended are not waited for any more."""
        self.live_threads -= threads
        for barrier in self.barriers.values():
            if barrier.everybody and barrier.arrived:
                barrier.expected = self.live_threads
                self._complete(barrier)

    def describe(self, number: int) -> str:
        """State of a barrier that somebody waits at."""
        barrier = self.barriers[number]
        return f"barrier {number}: {barrier.arrived} of {barrier.expected} threads have arrived"

    def _expect(self, barrier: NamedBarrier, number: int, threads: int | None) -> None:
        if not 0 <= number < NAMED_BARRIERS:
            raise Hazard(Kind.ARRIVAL_COUNT, f"barrier {number} does not exist; there are 0 to {NAMED_BARRIERS - 1}")
        if threads is not None and threads % 32:
            raise Hazard(Kind.ARRIVAL_COUNT, f"barrier {number} expects {threads} threads, not a multiple of 32")
        expected = self.live_threads if threads is None else threads
        if barrier.arrived and barrier.expected != expected:
            raise Hazard(
                Kind.ARRIVAL_COUNT, f"barrier {number} is used with {barrier.expected} and with {expected} threads"
            )
        barrier.expected, barrier.everybody = expected, threads is None

    def _complete(self, barrier: NamedBarrier) -> None:
        if barrier.arrived and barrier.arrived == barrier.expected:
            barrier.generation += 1
            barrier.arrived = 0
            # Joined, not replaced: a slow warp of the last generation has yet to learn from it.
            assert barrier.gathered is not None
            barrier.released = _join(barrier.released, barrier.gathered)
            barrier.gathered = None

    def _passed(self, group: Any) -> bool:
        number, generation = group.ticket
        barrier = self.barriers[number]
        if barrier.generation == generation:
            return False
        assert barrier.released is not None
        group.cta.note("barrier passed", group, number=number, generation=generation)
        self.clocks.acquire(group.warps, barrier.released)
        group.ticket = group.waits_for = None
        return True


@dataclass
class Mbarrier:
    """One mbarrier object (PTX ISA, "mbarrier object"): `phase` counts completed phases."""

    address: int
    expected: int
    column: int  # of its transactions in the clocks
    initialiser: int  # warp
    initialised: int  # epoch of that warp
    pending: int = 0
    transactions: int = 0  # bytes that the current phase still waits for
    phase: int = 0
    in_flight: int = 0  # bytes of loads issued for the current phase that have not landed
    gathered: Clock | None = None
    released: Clock | None = None
    seen_by_all: bool = False  # every warp knows that it is initialised

    def __str__(self) -> str:
        """State for reports."""
        return (
            f"mbarrier at shared byte {self.address - BASE}: phase {self.phase}, {self.pending} of {self.expected} "
            f"arrivals pending, {self.transactions} bytes pending"
        )


class Mbarriers:
    """All mbarriers of a CTA by shared address."""

    def __init__(self, clocks: Clocks, memory: SharedMemory) -> None:
        """None initialised yet."""
        self.clocks = clocks
        self.memory = memory
        self.barriers: dict[int, Mbarrier] = {}

    def initialise(self, group: Any, address: Any, count: Any, mask: Any) -> None:
        """`mbarrier.init`: phase 0, `count` arrivals expected in each phase."""
        for location, _, warps in self._targets(group, address, mask):
            expected = group.one(count, mask, "arrival count")
            self._check_place(location)
            if not 1 <= expected <= MAX_COUNT:
                raise Hazard(
                    Kind.ARRIVAL_COUNT, f"mbarrier.init with {expected} arrivals; 1 to {MAX_COUNT} are possible"
                )
            if location in self.barriers:
                raise Hazard(
                    Kind.BARRIER_NOT_INITIALISED, f"{self.barriers[location]} is initialised again while it is valid"
                )
            warp = int(warps[0])
            column = self.clocks.new_column()
            self.barriers[location] = Mbarrier(
                location, expected, column, warp, int(self.clocks.epoch(warp)), pending=expected
            )
            self.memory.guard(location, MBARRIER_BYTES, on=True)

    def invalidate(self, group: Any, address: Any, mask: Any) -> None:
        """`mbarrier.inval`."""
        for location, _, warps in self._targets(group, address, mask):
            self.at(location, warps)
            del self.barriers[location]
            self.memory.guard(location, MBARRIER_BYTES, on=False)

    def arrive(self, group: Any, address: Any, count: Any, mask: Any) -> None:
        """`mbarrier.arrive` with release semantics: each active lane arrives `count` times."""
        for location, lanes, warps in self._targets(group, address, mask):
            barrier = self.at(location, warps)
            arrivals = self._total(group, count, lanes)
            group.cta.note("mbarrier arrive", group, barrier=barrier, warps=warps, arrivals=arrivals, size=0)
            self._arrive(group, barrier, arrivals, warps, lanes)

    def arrive_expect(self, group: Any, address: Any, size: Any, mask: Any) -> None:
        """`mbarrier.arrive.expect_tx`: each active lane expects `size` bytes more, and arrives."""
        for location, lanes, warps in self._targets(group, address, mask):
            barrier = self.at(location, warps)
            expected = self._total(group, size, lanes)
            barrier.transactions += expected
            group.cta.note("mbarrier arrive", group, barrier=barrier, warps=warps, arrivals=len(lanes), size=expected)
            self._arrive(group, barrier, len(lanes), warps, lanes)

    def expect(self, group: Any, address: Any, size: Any, mask: Any) -> None:
        """`mbarrier.expect_tx`."""
        for location, lanes, warps in self._targets(group, address, mask):
            barrier = self.at(location, warps)
            expected = self._total(group, size, lanes)
            barrier.transactions += expected
            group.cta.note("mbarrier arrive", group, barrier=barrier, warps=warps, arrivals=0, size=expected)
            self._check_transactions(barrier)

    def complete(self, barrier: Mbarrier, size: int) -> None:
        """`size` bytes of a load have landed (complete_tx)."""
        barrier.transactions -= size
        barrier.in_flight -= size
        self._check_transactions(barrier)
        self._advance(barrier)

    def wait(self, group: Any, address: Any, parity: Any, mask: Any) -> Any:
        """`mbarrier.try_wait.parity`: whether the phase of that parity has completed; None while that is open.

        A thread may be suspended until the phase completes or a time limit passes, so the answer "not yet" is given
        only when nothing else in the CTA can move (`group.answer_now`), or when the schedule lets the time limit pass.
        """
        targets = self._targets(group, address, mask)
        outcomes = []
        for location, lanes, warps in targets:
            barrier = self.at(location, warps)
            wanted = parity if getattr(parity, "ndim", 0) == 0 else parity[lanes]
            ready = (barrier.phase & 1) != wanted
            whole = every(ready) if getattr(ready, "ndim", 0) else bool(ready)
            outcomes.append((barrier, lanes, warps, ready, whole))
        open_one = next((barrier for barrier, *_, whole in outcomes if not whole), None)
        if open_one is not None and not group.answer_now and not group.cta.time_limit_passes():
            group.waits_for = open_one
            return None
        group.waits_for = None
        group.answer_now = False
        for barrier, _, warps, ready, whole in outcomes:
            group.cta.note("mbarrier waited", group, barrier=barrier, warps=warps, ready=ready)
            if whole:
                self._acquire(barrier, warps)
        if len(outcomes) == 1 and getattr(outcomes[0][3], "ndim", 0) == 0 and mask is None:
            return np.bool_(outcomes[0][3])
        answer = np.zeros(group.lanes, bool)
        for _, lanes, _, ready, _ in outcomes:
            answer[lanes] = ready
        return answer

    def at(self, location: int, warps: NDArray[np.intp]) -> Mbarrier:
        """The mbarrier at an address, usable by these warps. Raises a Hazard when it is not, or not visibly, there."""
        barrier = self.barriers.get(location)
        if barrier is None:
            self._check_place(location)
            raise Hazard(Kind.BARRIER_NOT_INITIALISED, f"no mbarrier was initialised at shared byte {location - BASE}")
        if barrier.seen_by_all:
            return barrier
        everybody = self.clocks.time[:, CAUSAL, barrier.initialiser] >= barrier.initialised
        barrier.seen_by_all = bool(everybody.all())
        known = self.clocks.time[warps, CAUSAL, barrier.initialiser]
        if ((known < barrier.initialised) & (warps != barrier.initialiser)).any():
            raise Hazard(
                Kind.BARRIER_NOT_INITIALISED,
                f"nothing orders the initialisation of the mbarrier at shared byte {location - BASE} by warp "
                f"{barrier.initialiser} before this use",
            )
        return barrier

    def for_load(self, location: int, warps: NDArray[np.intp]) -> Mbarrier:
        """The mbarrier that an asynchronous load is to signal."""
        barrier = self.at(location, warps)
        visible = np.maximum(self.clocks.time[warps, INIT], self.clocks.time[warps, PROXY])
        if (visible[:, barrier.initialiser] < barrier.initialised).any():
            raise Hazard(
                Kind.BARRIER_NOT_INITIALISED,
                f"the initialisation of the mbarrier at shared byte {location - BASE} is not visible to the async "
                "proxy: fence.mbarrier_init is missing",
            )
        return barrier

    def check_end(self) -> None:
        """Raise a Hazard when the CTA ends with bytes expected, or arrived, that do not match."""
        for barrier in self.barriers.values():
            if barrier.transactions:
                raise Hazard(Kind.TRANSACTION_COUNT, f"the CTA ends with {barrier}")

    def _arrive(
        self, group: Any, barrier: Mbarrier, count: int, warps: NDArray[np.intp], lanes: NDArray[np.intp]
    ) -> None:
        if count > barrier.pending:
            raise Hazard(Kind.ARRIVAL_COUNT, f"{count} arrivals at once are too many: {barrier}")
        clock = self.clocks.release(warps, None if len(lanes) == 32 * len(warps) else group.active_lanes(warps, lanes))
        barrier.gathered = _join(barrier.gathered, clock)
        barrier.pending -= count
        group.cta.progress += 1
        self._check_transactions(barrier)
        self._advance(barrier)

    def _advance(self, barrier: Mbarrier) -> None:
        """Complete the phase when nothing is pending any more."""
        if barrier.pending or barrier.transactions:
            if barrier.pending == 0 and barrier.transactions < 0:
                raise Hazard(Kind.TRANSACTION_COUNT, f"more bytes landed than were expected: {barrier}")
            return
        if barrier.in_flight:
            raise Hazard(
                Kind.TRANSACTION_COUNT,
                f"phase {barrier.phase} completes while {barrier.in_flight} bytes that signal it are still on "
                f"their way: fewer bytes were expected than loaded; {barrier}",
            )
        barrier.phase += 1
        barrier.pending = barrier.expected
        if barrier.gathered is not None:
            barrier.released = _join(barrier.released, barrier.gathered)
            barrier.gathered = None

    def _acquire(self, barrier: Mbarrier, warps: NDArray[np.intp]) -> None:
        if barrier.released is not None:
            self.clocks.acquire(warps, barrier.released)
        # The lanes of a warp are no more ordered among each other than before: its epoch goes on.
        self.clocks.learn(warps, barrier.column, barrier.phase)

    def _targets(self, group: Any, address: Any, mask: Any) -> list[tuple[int, NDArray[np.intp], NDArray[np.intp]]]:
        """(address, active lanes, their warps) for each mbarrier that the active lanes name."""
        lanes = group.all_lanes if mask is None else np.flatnonzero(mask)
        if getattr(address, "ndim", 0) == 0:
            return [(int(address), lanes, group.warps_of(lanes, mask))]
        active = address[lanes]
        first = active[0]
        if every(active == first):
            return [(int(first), lanes, group.warps_of(lanes, mask))]
        return [
            (int(location), lanes[active == location], np.unique(group.warp_of_lane[lanes[active == location]]))
            for location in np.unique(active)
        ]

    def _check_place(self, location: int) -> None:
        if location % 8:
            raise Hazard(Kind.MISALIGNED, f"an mbarrier at shared byte {location - BASE} needs a multiple of 8")
        if location < BASE or location + 8 > self.memory.end:
            raise Hazard(Kind.OUT_OF_BOUNDS, f"an mbarrier at shared byte {location - BASE} of {self.memory.size}")

    @staticmethod
    def _total(group: Any, value: Any, lanes: NDArray[np.intp]) -> int:
        return int(value) * len(lanes) if getattr(value, "ndim", 0) == 0 else int(value[lanes].astype(np.int64).sum())

    @staticmethod
    def _check_transactions(barrier: Mbarrier) -> None:
        if abs(barrier.transactions) > MAX_COUNT:
            raise Hazard(Kind.TRANSACTION_COUNT, f"the transaction count leaves +-{MAX_COUNT}: {barrier}")


def _join(first: Clock | None, second: Clock) -> Clock:
    """The later of two clocks, agent by agent; a clock taken before an mbarrier was made lacks its column."""
    if first is None:
        return second
    if first.shape[1] < second.shape[1]:
        first, second = second, first
    joined = first.copy()
    joined[:, : second.shape[1]] = np.maximum(joined[:, : second.shape[1]], second)
    return joined


@dataclass
class RegisterPool:
    """Registers of a CTA's warps (PTX ISA, "setmaxnreg"): released by .dec, taken by .inc when there are enough."""

    warps: int
    per_thread: int  # at launch
    held: dict[int, int] = field(default_factory=dict)  # warp -> registers per thread
    changes: dict[int, list[str]] = field(default_factory=dict)  # warp -> what it has executed

    def change(self, group: Any, action: str, registers: int, mask: Any) -> bool:
        """Whether the group's warps now have `registers` each; False while the pool does not hold enough."""
        group.whole_warps(mask, "setmaxnreg")
        if not 24 <= registers <= 256 or registers % 8:
            raise Hazard(Kind.REGISTER_POOL, f"setmaxnreg {registers}: a multiple of 8 from 24 to 256 is needed")
        for warp in group.warps.tolist():
            now = self.held.get(warp, self.per_thread)
            if (action == "inc" and registers < now) or (action == "dec" and registers > now):
                raise Hazard(
                    Kind.REGISTER_POOL, f"setmaxnreg.{action} {registers} from {now} registers goes the other way"
                )
        wanted = {**self.held, **dict.fromkeys(group.warps.tolist(), registers)}
        total = sum(wanted.get(warp, self.per_thread) for warp in range(self.warps))
        if total > self.per_thread * self.warps:
            group.waits_for = (
                f"setmaxnreg.{action} {registers}: the warps would hold {total * 32} registers of "
                f"{self.per_thread * self.warps * 32}"
            )
            return False
        self.held = wanted
        for warp in group.warps.tolist():
            self.changes.setdefault(warp, []).append(f"{action} {registers}")
        group.cta.note("setmaxnreg", group, action=action, registers=registers)
        group.waits_for = None
        group.cta.progress += 1
        return True

    def check_end(self) -> None:
        """Raise a Hazard unless the warps of each warpgroup have executed the same instructions."""
        for warp in range(self.warps):
            first = warp // 4 * 4
            mine, theirs = self.changes.get(warp, []), self.changes.get(first, [])
            if mine != theirs:
                raise Hazard(
                    Kind.WARPGROUP_DIVERGENCE,
                    f"warp {first} has executed setmaxnreg {theirs} and warp {warp} of its warpgroup {mine}",
                )
