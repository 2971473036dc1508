"""Vector clocks: what each warp of a CTA knows to have happened before.

An access to shared memory is a race unless an earlier conflicting access is known to the one who makes it. Warps learn
from each other through barriers, and of asynchronous operations through the wait that belongs to them (Flanagan and
Freund, "FastTrack", PLDI 2009; PTX ISA, "Memory Consistency Model" and "Async proxy").

Agents are columns of a clock: the warps, the wgmma queue of each warpgroup, the bulk stores and the cp.async copies of
each warp, and one column for the transactions of each mbarrier. Each agent counts its own epochs:

- a warp's epoch ends with every release it makes and every synchronisation of its lanes. Accesses of the running epoch
  are ordered only within one lane;
- a wgmma, a bulk store and a group of cp.async copies are one epoch each of their agent;
- the loads that a phase of an mbarrier counts are one epoch of that mbarrier.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Clock = NDArray[np.int32]  # (planes, agents)

CAUSAL, PROXY, INIT = range(3)
"""Planes of a clock: what happened before; what of it a proxy fence has made visible to the async proxy; what of it
fence.mbarrier_init has."""

SEVERAL_LANES = 63  # stands for "not one lane" in a stamp


def stamp(epoch: Any, lane: Any) -> Any:
    """Epoch and lane in one number; scalars or vectors."""
    return epoch * 64 + lane


class Clocks:
    """The clocks of all warps of one CTA."""

    def __init__(self, warps: int) -> None:
        """All agents at rest; only warps have an epoch from the start."""
        warpgroups = -(-warps // 4)
        self.warps = warps
        self.wgmma = warps  # first column of each kind of agent
        self.bulk = self.wgmma + warpgroups
        self.cp_async = self.bulk + warps
        self.nobody = self.cp_async + warps  # never catches up: the writer of memory that nobody wrote
        self.readers = self.cp_async  # columns below this may read shared memory
        self.mbarrier_objects = self.nobody + 1  # nor does the writer of the bytes that mbarriers are
        self._next = self.mbarrier_objects + 1
        columns = self._next + 32
        self.time = np.zeros((warps, 3, columns), np.int32)
        self.running = np.ones(warps, np.int32)  # the running epoch of each warp: one more than what its lanes share
        self.last_access = np.zeros((warps, 32), np.int32)  # epoch in which each lane last accessed shared memory
        self._is_generic = np.zeros(columns, bool)
        self._is_generic[:warps] = True
        # cp.async writes through the generic proxy (PTX ISA, "cp.async").
        self._is_generic[self.cp_async : self.nobody] = True

    def new_column(self) -> int:
        """A column for one more mbarrier."""
        if self._next == self.time.shape[2]:
            self.time = np.concatenate([self.time, np.zeros_like(self.time)], axis=2)
            self._is_generic = np.concatenate([self._is_generic, np.zeros_like(self._is_generic)])
        self._next += 1
        return self._next - 1

    def epoch(self, warps: Any) -> Any:
        """The running epoch of each warp."""
        return self.running[warps]

    def end_epoch(self, warps: Any) -> None:
        """Order everything that these warps have done before what any of their lanes does next."""
        self.time[warps, CAUSAL, warps] += 1
        self.running[warps] += 1

    def release(self, warps: NDArray[np.intp], active: NDArray[np.bool_] | None = None) -> Clock:
        """What these warps know and have done, for others to acquire; their epochs end.

        `active`, (warps, 32), tells which lanes release when not all do. A lane speaks for the others only up to the
        last synchronisation of the warp: where one of them has accessed shared memory since, the epoch stays open.
        """
        if active is None:
            self.end_epoch(warps)
        else:
            silent = (self.last_access[warps] == self.epoch(warps)[:, None]) & ~active
            self.end_epoch(warps[~silent.any(axis=1)])
        released: Clock = self.time[_span(warps)].max(axis=0)
        return released

    def acquire(self, warps: NDArray[np.intp], clock: Clock) -> None:
        """Let these warps know what `clock` knows."""
        columns = clock.shape[1]
        span = _span(warps)
        self.time[span, :, :columns] = np.maximum(self.time[span, :, :columns], clock)

    def learn(self, warps: NDArray[np.intp], column: int, epoch: int) -> None:
        """Let these warps know that an asynchronous agent has completed `epoch`."""
        self.time[warps, CAUSAL, column] = np.maximum(self.time[warps, CAUSAL, column], epoch)

    def fence(self, warps: NDArray[np.intp], plane: int) -> None:
        """Make what these warps know visible in another plane as well."""
        self.end_epoch(warps)
        self.time[warps, plane] = self.time[warps, CAUSAL]

    def visible_to_async(self, warps: NDArray[np.intp]) -> NDArray[np.int32]:
        """What an asynchronous operation issued by these warps may rely on, per agent.

        Generic accesses have to be fenced; other asynchronous ones only have to have been waited for.
        """
        if len(warps) == 1:
            mine = self.time[warps[0]]
            alone: NDArray[np.int32] = np.where(self._is_generic, mine[PROXY], mine[CAUSAL])
            return alone
        time = self.time[_span(warps)]
        visible: NDArray[np.int32] = np.where(self._is_generic, time[:, PROXY], time[:, CAUSAL]).min(axis=0)
        return visible

    def known_to_all(self, warps: NDArray[np.intp]) -> NDArray[np.int32]:
        """What every one of these warps knows, per agent; perhaps a view."""
        if len(warps) == 1:
            alone: NDArray[np.int32] = self.time[warps[0], CAUSAL]
            return alone
        known: NDArray[np.int32] = self.time[_span(warps), CAUSAL].min(axis=0)
        return known

    def describe(self, column: int) -> str:
        """An agent in words."""
        if column < self.wgmma:
            return f"warp {column}"
        if column < self.bulk:
            return f"a wgmma of warpgroup {column - self.wgmma}"
        if column < self.cp_async:
            return f"a bulk store of warp {column - self.bulk}"
        if column < self.nobody:
            return f"a cp.async of warp {column - self.cp_async}"
        return "nobody" if column == self.nobody else "a TMA load"


def _span(warps: NDArray[np.intp]) -> Any:
    """An index for these warps: a slice where they are neighbours, which NumPy need not copy."""
    first, last = warps[0], warps[-1]
    return slice(first, last + 1) if last - first + 1 == len(warps) else warps
