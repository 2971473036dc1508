"""`cp.async`: copies of 4, 8 or 16 bytes from global to shared memory (PTX ISA, "cp.async").

The copies are made by the wait that covers them, the latest moment allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3gen.cpu.commit_groups import CommitGroups
from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.types import U8


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

    def issue(self, group: Any, destination: Any, source: Any, width: int, size: Any, mask: Any) -> None:
        """`cp.async.c{a,g}.shared.global [dst], [src], width{, size}`."""
        memory = self.cta.shared
        vectors = [np.broadcast_to(value, (group.lanes,)).astype(np.int64) for value in (destination, source, size)]
        active = np.ones(group.lanes, bool) if mask is None else mask
        for position, warp in enumerate(group.warps.tolist()):
            lanes = np.flatnonzero(active[32 * position : 32 * position + 32]) + 32 * position
            if not len(lanes):
                continue
            to, origin, sizes = (vector[lanes] for vector in vectors)
            # Where nothing is read, the source need not be aligned: H200s fill with zeros and touch no address.
            if (to % width).any() or (origin[sizes > 0] % width).any():
                raise Hazard(Kind.MISALIGNED, f"cp.async of {width} bytes needs addresses that are multiples of it")
            if (sizes > width).any():
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
        self.cta.note("cp.async issued", group, destination=vectors[0], width=width, active=active, copies=self.warps)

    def commit(self, group: Any, mask: Any) -> None:
        """`cp.async.commit_group`; an empty group counts."""
        group.whole_warps(mask, "cp.async.commit_group")
        for warp in group.warps.tolist():
            self.warps[warp].commit()

    def wait(self, group: Any, pending: int, mask: Any) -> None:
        """`cp.async.wait_group`: all but the latest `pending` groups of each warp have landed, for that warp."""
        group.whole_warps(mask, "cp.async.wait_group")
        for warp in group.warps.tolist():
            copies = self.warps[warp]
            copies.wait(pending, self._perform)
            self.cta.clocks.learn(np.array([warp]), self.cta.clocks.cp_async + warp, copies.completed)
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

    def _perform(self, copy: Copy) -> None:
        shared, memory = self.cta.shared.bytes, self.cta.memory
        offsets = np.arange(copy.width)
        data = np.zeros((len(copy.sources), copy.width), U8)
        for size in np.unique(copy.sizes).tolist():
            if size == 0:
                continue
            rows = np.flatnonzero(copy.sizes == size)
            sources = copy.sources[rows]
            for allocation, lanes in memory.locate(sources, size):
                chosen = rows if lanes is None else rows[lanes]
                places = (copy.sources[chosen] - allocation.start)[:, None] + offsets[:size]
                data[chosen[:, None], offsets[:size]] = allocation.bytes[places]
        shared[copy.destinations[:, None] + offsets] = data
