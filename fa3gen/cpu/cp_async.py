"""`cp.async`: copies of 4, 8 or 16 bytes from global to shared memory (PTX ISA, "cp.async").

The copies are made by the wait that covers them, the latest moment allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3gen.cpu.commit_groups import CommitGroups
from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.global_memory import gather
from fa3gen.cpu.lanes import spread
from fa3gen.cpu.shared_memory import WHOLE
from fa3gen.cpu.truth import some
from fa3gen.cpu.types import U8

Lanes = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # destinations, sources, sizes


@dataclass(frozen=True)
class Copy:
    """One instruction of one warp: an element for each active lane. `sizes` bytes are read, the rest is zero."""

    destinations: NDArray[np.int64]
    sources: NDArray[np.int64]
    sizes: NDArray[np.int64]
    width: int


class CpAsyncUnit:
    """The copies of a CTA, by warp."""

    def __init__(self, cta: Any) -> None:
        """Nothing in flight."""
        self.cta = cta
        self.warps = [CommitGroups[Copy]() for _ in range(cta.clocks.warps)]

    @staticmethod
    def lanes(group: Any, destination: Any, source: Any, size: Any, mask: Any) -> Lanes:
        """What the active lanes copy: destinations, sources, sizes."""
        active = slice(None) if mask is None else mask
        to, origin, sizes = (spread(value, group.lanes)[active] for value in (destination, source, size))
        return to.astype(np.int64), origin.astype(np.int64), sizes.astype(np.int64)

    def issue_together(self, group: Any, instructions: Sequence[Lanes], width: int, mask: Any) -> bool:
        """Several `cp.async` in a row, as `issue`; False, and nothing is done, where something may be to be reported.

        Then, and for a trace, each has to be issued by itself.
        """
        memory, first = self.cta.shared, self.cta.clocks.cp_async
        to, origin, sizes = (
            instructions[0] if len(instructions) == 1 else map(np.concatenate, zip(*instructions, strict=True))
        )
        if not len(to) or self.cta.launch.trace is not None or memory.outside(to, width):
            return False
        if some(_misaligned(to, origin, sizes, width)) or some(sizes > width):
            return False
        rows = to >> (width.bit_length() - 1)
        if len(instructions) > 1 and len(np.unique(rows)) < len(rows):
            return False
        self._check_sources(group, origin, sizes, mask, times=len(instructions))
        warps = group.warp_of_lane if mask is None else group.warp_of_lane[mask]
        warps = warps if len(instructions) == 1 else np.tile(warps, len(instructions))
        epochs = np.array([copies.open_epoch for copies in self.warps])
        if not memory.writes_apart(rows, width, group.warps, first + warps, epochs[warps]):
            return False
        for warp in group.warps.tolist():
            mine = slice(None) if len(group.warps) == 1 else warps == warp
            self.warps[warp].open.append(Copy(to[mine], origin[mine], sizes[mine], width))
        return True

    def issue(self, group: Any, lanes: Lanes, width: int, mask: Any) -> None:
        """`cp.async.c{a,g}.shared.global [dst], [src], width{, size}` of these lanes."""
        memory = self.cta.shared
        active = np.ones(group.lanes, bool) if mask is None else mask
        self._check_sources(group, lanes[1], lanes[2], mask)
        warps = group.warp_of_lane[active]
        for warp in group.warps.tolist():
            to, origin, sizes = (vector[warps == warp] for vector in lanes)
            if not len(to):
                continue
            if some(_misaligned(to, origin, sizes, width)):
                raise Hazard(Kind.MISALIGNED, f"cp.async of {width} bytes needs addresses that are multiples of it")
            if some(sizes > width):
                raise Hazard(Kind.OUT_OF_BOUNDS, f"cp.async reads {int(sizes.max())} bytes for a copy of {width}")
            memory.check_range(to, width)
            copies = self.warps[warp]
            memory.async_write(
                to >> (width.bit_length() - 1),
                width,
                np.array([warp]),
                self.cta.clocks.cp_async + warp,
                copies.open_epoch,
                "a cp.async",
                generic=True,
            )
            copies.open.append(Copy(to, origin, sizes, width))
        places = np.zeros(group.lanes, np.int64)
        places[active] = lanes[0]
        self.cta.note("cp.async issued", group, destination=places, width=width, active=active, copies=self.warps)

    def commit(self, group: Any, mask: Any) -> None:
        """`cp.async.commit_group`; an empty group counts."""
        group.whole_warps(mask, "cp.async.commit_group")
        for warp in group.warps.tolist():
            self.warps[warp].commit()

    def wait(self, group: Any, pending: int, mask: Any) -> None:
        """`cp.async.wait_group`: all but the latest `pending` groups of each warp have landed, for that warp."""
        group.whole_warps(mask, "cp.async.wait_group")
        landing: list[Copy] = []
        for warp in group.warps.tolist():
            copies = self.warps[warp]
            copies.wait(pending, landing.append)
            self.cta.clocks.learn(np.array([warp]), self.cta.clocks.cp_async + warp, copies.completed)
        for width in {copy.width for copy in landing}:
            self._perform([copy for copy in landing if copy.width == width], width)
        self.cta.note("cp.async awaited", group, copies=self.warps)

    def wait_all(self, group: Any, mask: Any) -> None:
        """`cp.async.wait_all`: everything issued so far, committed or not."""
        self.commit(group, mask)
        self.wait(group, 0, mask)

    def check_end(self, warps: list[int]) -> None:
        """Raise a Hazard when a warp ends with copies in flight."""
        for warp in warps:
            if self.warps[warp].unfinished:
                raise Hazard(Kind.UNFINISHED, f"warp {warp} ends with cp.async copies that it has not waited for")

    def _check_sources(
        self, group: Any, origin: NDArray[np.int64], sizes: NDArray[np.int64], mask: Any, times: int = 1
    ) -> None:
        """Raise a Hazard where another CTA has stored what the active lanes copy, in so many instructions, and they do
        not know of it."""
        order = self.cta.order
        if order.launch is None:
            return
        threads = np.tile(group.thread if mask is None else group.thread[mask], times)
        for size in np.unique(sizes[sizes > 0]).tolist():
            rows = sizes == size
            if order.others_store_here(int(origin[rows][0])):
                order.loads(origin[rows], size, threads[rows])

    def _perform(self, copies: Sequence[Copy], width: int) -> None:
        """Make copies of one width, all at once."""
        to, origin, sizes = (
            np.concatenate([getattr(copy, name) for copy in copies]) for name in ("destinations", "sources", "sizes")
        )
        memory, type_ = self.cta.memory, WHOLE[width]
        data = np.zeros(len(to), type_)
        for size in np.unique(sizes[sizes > 0]).tolist():
            rows = np.flatnonzero(sizes == size)
            for allocation, lanes in memory.locate(origin[rows], size):
                chosen = rows if lanes is None else rows[lanes]
                if size == width:
                    data[chosen] = gather(allocation, origin[chosen], type_)
                else:
                    places = (origin[chosen] - allocation.start)[:, None] + np.arange(size)
                    data.view(U8).reshape(-1, width)[chosen[:, None], np.arange(size)] = allocation.bytes[places]
        self.cta.shared.bytes.view(type_)[to >> (width.bit_length() - 1)] = data


def _misaligned(to: NDArray[np.int64], origin: NDArray[np.int64], sizes: NDArray[np.int64], width: int) -> Any:
    """Which copies are from or to addresses that are no multiples of their width.

    Where nothing is read, the source need not be one: H200s fill with zeros and touch no address.
    """
    return (to | np.where(sizes > 0, origin, 0)) & (width - 1)
