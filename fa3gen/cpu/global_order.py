"""Order between the CTAs of a launch: whether one may use what another has stored in global memory.

CTAs run one after the other here, so that values alone never show that a wait, a release or an acquire is missing. So
who has stored each granule of global memory in this launch is kept, with the epoch of the warp that did, and what each
CTA knows of the others' epochs (vector clocks, as `fa3gen.cpu.clocks` has them within a CTA). A CTA learns only by
synchronising (PTX ISA, "Memory Consistency Model", release and acquire patterns): a word to which another CTA has
released is acquired.

- Releases: `st.release`, `atom` and `red` with `.release` or `.acq_rel`, and a fence before a relaxed one of these.
- Acquires: `ld.acquire`, `atom` with `.acquire` or `.acq_rel`, and a fence behind a relaxed one of these.
- An atomic operation keeps what was released to its word before, a store does not.
- All of that in scope `.gpu` or `.sys`. In `.cta` or `.cluster` nothing gets to a CTA elsewhere.

A load or a store is a data race where another CTA has stored before and that is not known; but where both are strong
(relaxed, acquire, release, volatile, atomic) they do not race. Not watched are: what atomic operations have written, so
that a plain store may put a counter back, as long as the CTA that does no longer counts with it; reads, so that a store
may follow another CTA's load that it does not know of; and proxies: TMA may load what another CTA has stored through
the generic proxy without a fence between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3gen.cpu.clocks import CAUSAL
from fa3gen.cpu.findings import Hazard, Kind

Addresses = NDArray[np.int64]
Lanes = NDArray[np.bool_]  # of one warp
Knowledge = dict[int, NDArray[np.int32]]
"""For a CTA, by its number, the last epoch of each of its agents that is known."""

_ALIGNMENT = 16  # of the first granule of a region; no granule is larger
_EPOCH_BITS = 32  # of a stamp; its agent is above


def cta_index(number: int, grid: tuple[int, int, int]) -> tuple[int, int, int]:
    """Where the CTA of this number is: they are counted as they are launched, x first."""
    width, height, _ = grid
    return number % width, number // width % height, number // (width * height)


@dataclass(frozen=True)
class Learnt:
    """What lanes of a warp have learnt in one of its epochs."""

    warp: int
    epoch: int
    lanes: Lanes
    knowledge: Knowledge


class Region:
    """Bytes of global memory without a gap, and who has stored each granule of them last."""

    def __init__(self, start: int, end: int, granule: int) -> None:
        """Nobody has."""
        self.start, self.end, self.granule = start // _ALIGNMENT * _ALIGNMENT, end, granule
        self.ctas: set[int] = set()  # who have stored anything
        self._count = -(-(end - self.start) // granule)
        self.writer, self.stamp = np.zeros(0, np.int32), np.zeros(0, np.int64)

    def granules(self, addresses: Addresses, size: int) -> NDArray[np.int64]:
        """Those of accesses of `size` bytes, (accesses, granules of one)."""
        first = (addresses - self.start) // self.granule
        found: NDArray[np.int64] = first[:, None] + np.arange(-(-size // self.granule))
        return found

    def stored(self, cta: int, address: int) -> int:
        """The stamp of the last store there where this CTA's, and no strong one, was the last; else 0."""
        granule = (address - self.start) // self.granule
        return int(self.stamp[granule]) if self.ctas and self.writer[granule] == cta + 1 else 0

    def written_by(self, cta: int) -> None:
        """Note that this CTA stores something here. `writer` is its number + 1, negative where the store is strong."""
        if not self.ctas:
            self.writer, self.stamp = np.zeros(self._count, np.int32), np.zeros(self._count, np.int64)
        self.ctas.add(cta)


class GlobalOrder:
    """What the CTAs of one launch have stored and released."""

    def __init__(self, extents: list[tuple[int, int]], granule: int) -> None:
        """Of memory at these addresses, [start, end), which may overlap; `granule` is the narrowest access in bytes."""
        self.regions: list[Region] = []
        self.words: dict[int, Knowledge] = {}  # what has been released to a word
        for start, end in sorted(extents):
            if self.regions and start < self.regions[-1].end:
                last = self.regions.pop()
                start, end = last.start, max(last.end, end)
            self.regions.append(Region(start, end, granule))

    def region(self, address: int) -> Region | None:
        """The region that holds an address, if any does: accesses outside of all are reported elsewhere."""
        return next((region for region in self.regions if region.start <= address < region.end), None)


class CtaOrder:
    """What one CTA does to global memory and what it knows of the others, by warp.

    `launch` is None where there is no other CTA; nothing is watched then.
    """

    def __init__(self, launch: GlobalOrder | None, cta: Any) -> None:
        """Nothing is known of others."""
        self.launch = launch
        width, height, _ = cta.grid
        x, y, z = cta.index
        self.number = x + width * (y + height * z)
        self._grid, self._clocks = cta.grid, cta.clocks
        self._learnt: list[Learnt] = []
        self._seen: list[Learnt] = []  # by relaxed loads: a fence behind them has to come
        self._fenced: dict[int, tuple[Lanes, Knowledge]] = {}  # by warp: what its last fence gives to relaxed stores
        self._last_store = np.zeros((cta.clocks.warps, 32), np.int32)  # epoch in which each lane last stored
        self._counted: dict[int, int] = {}  # words of atomic operations: stamp of this CTA's store before the last one

    # ------------------------------------------------------------------ accesses

    def stores(self, addresses: Addresses, size: int, threads: NDArray[np.intp], *, strong: bool = False) -> None:
        """These threads store `size` bytes each. Raises a Hazard where another CTA has, and they do not know of it."""
        if self.launch is None:
            return
        warps, lanes = threads >> 5, threads & 31
        epochs = self._clocks.running[warps]
        self._last_store[warps, lanes] = epochs
        self._store(self.launch, addresses, size, threads, (warps, epochs), strong=strong)

    def bulk_stores(self, addresses: Addresses, size: int, thread: int, epoch: int) -> None:
        """A bulk store writes rows of `size` bytes; `thread` issued it, `epoch` is that of its group."""
        if self.launch is None:
            return
        agents = np.full(len(addresses), self._clocks.bulk + (thread >> 5))
        threads, epochs = np.full(len(addresses), thread), np.full(len(addresses), epoch)
        self._store(self.launch, addresses, size, threads, (agents, epochs), strong=False)

    def _store(
        self, launch: GlobalOrder, addresses: Addresses, size: int, threads: Any, by: tuple[Any, Any], *, strong: bool
    ) -> None:
        agents, epochs = by
        region = launch.region(int(addresses[0]))
        if region is None:
            return
        self._check(region, addresses, size, threads, "store", strong=strong)
        region.written_by(self.number)
        granules = region.granules(addresses, size)
        region.writer[granules] = -self.number - 1 if strong else self.number + 1
        region.stamp[granules] = (agents.astype(np.int64) << _EPOCH_BITS | epochs)[:, None]
        if launch.words and not strong:
            first, last = int(addresses.min()), int(addresses.max()) + size
            for word in [word for word in launch.words if first <= word < last]:
                if ((addresses <= word) & (word < addresses + size)).any():
                    del launch.words[word]

    def loads(self, addresses: Addresses, size: int, threads: NDArray[np.intp], *, strong: bool = False) -> None:
        """These threads load. Raises a Hazard where another CTA has stored, and they do not know of it."""
        if self.launch is not None and (region := self.launch.region(int(addresses[0]))) is not None:
            self._check(region, addresses, size, threads, "load", strong=strong)

    def others_store_here(self, address: int) -> bool:
        """Whether another CTA has stored anything in the region that holds this address."""
        region = None if self.launch is None else self.launch.region(address)
        return region is not None and bool(region.ctas - {self.number})

    def counts(self, addresses: Addresses, size: int, threads: NDArray[np.intp]) -> None:
        """Atomic operations of these threads. Raises a Hazard as `loads`, and where this CTA goes on counting with a
        word that it has put back: whoever draws tiles so draws the first ones again, and does not end."""
        if self.launch is None or (region := self.launch.region(int(addresses[0]))) is None:
            return
        self._check(region, addresses, size, threads, "load", strong=True)
        for word in np.unique(addresses).tolist():
            stored = region.stored(self.number, word)
            if stored and stored != self._counted.get(word, stored):
                raise Hazard(
                    Kind.NOT_FINISHED,
                    "an atomic operation on a word that this CTA has stored to since its last one: a counter is put "
                    "back by the CTA that counts last, behind its own last count",
                )
            self._counted[word] = stored

    def _check(
        self, region: Region, addresses: Addresses, size: int, threads: NDArray[np.intp], what: str, *, strong: bool
    ) -> None:
        if not region.ctas or region.ctas == {self.number}:
            return
        granules = region.granules(addresses, size)
        writers = region.writer[granules]
        foreign = (writers != 0) & (np.abs(writers) != self.number + 1)
        if strong:
            foreign &= writers > 0
        if not foreign.any():
            return
        accesses, items = np.nonzero(foreign)
        places = granules[accesses, items]
        facts = np.stack([threads[accesses], region.writer[places], region.stamp[places]], axis=1)
        for thread, writer, stamp in np.unique(facts, axis=0).tolist():
            cta, agent, epoch = abs(writer) - 1, stamp >> _EPOCH_BITS, stamp & (1 << _EPOCH_BITS) - 1
            if not self._knows(thread, cta, agent, epoch):
                storer = f"{self._clocks.describe(agent)} of CTA {cta_index(cta, self._grid)}"
                raise Hazard(
                    Kind.GLOBAL_RACE,
                    f"a {what} of global memory that {storer} has stored before, in this launch, and nothing says "
                    "so to this warp: behind the store that CTA has to release to a word (st.release.gpu, or a fence "
                    "and a relaxed store), which this warp has to acquire (ld.acquire.gpu, or a relaxed load and a "
                    "fence)",
                )

    def _knows(self, thread: int, cta: int, agent: int, epoch: int) -> bool:
        warp, lanes = thread >> 5, np.arange(32) == thread & 31
        return any(
            cta in learnt.knowledge and learnt.knowledge[cta][agent] >= epoch and self._known_to(learnt, warp, lanes)
            for learnt in self._learnt
        )

    # ------------------------------------------------------------------ synchronisation

    def load(self, group: Any, address: Any, mask: Any, *, acquires: bool) -> None:
        """A strong load of a word by the active lanes, in the scope of the GPU."""
        if self.launch is not None and self.launch.words:
            for warp, lanes, word in self._words(group, address, mask):
                self._observe(warp, lanes, self.launch.words.get(word), acquires=acquires)

    def store(self, group: Any, address: Any, mask: Any, *, releases: bool) -> None:
        """A strong store to a word, likewise."""
        if self.launch is not None:
            for warp, lanes, word in self._words(group, address, mask):
                self.launch.words.pop(word, None)
                if given := self._given(warp, lanes, releases=releases):
                    self.launch.words[word] = given

    def update(self, group: Any, address: Any, mask: Any, *, acquires: bool, releases: bool) -> None:
        """An atomic operation on a word, likewise: what was released to the word before stays."""
        if self.launch is None:
            return
        for warp, lanes, word in self._words(group, address, mask):
            before = self.launch.words.get(word)
            self._observe(warp, lanes, before, acquires=acquires)
            if given := self._given(warp, lanes, releases=releases):
                self.launch.words[word] = _joined(before or {}, given)

    def fence(self, group: Any, mask: Any) -> None:
        """`fence.acq_rel` or `.sc`, likewise: relaxed loads before it acquire, relaxed stores behind it release."""
        if self.launch is None:
            return
        active = np.ones(group.lanes, bool) if mask is None else mask
        for warp, lanes in zip(group.warps.tolist(), active.reshape(-1, 32), strict=True):
            for seen in self._seen:
                if seen.warp == warp and (seen.lanes & lanes).any():
                    self._observe(warp, seen.lanes & lanes, seen.knowledge, acquires=True)
            if lanes.any():
                self._fenced[warp] = lanes.copy(), self._released(warp, lanes)

    def _words(self, group: Any, address: Any, mask: Any) -> Iterator[tuple[int, Lanes, int]]:
        """(warp, lanes, address): for each warp the words that its active lanes name."""
        active = np.ones(group.lanes, bool) if mask is None else mask
        addresses = np.broadcast_to(np.asarray(address, np.int64), (group.lanes,)).reshape(-1, 32)
        for warp, lanes, named in zip(group.warps.tolist(), active.reshape(-1, 32), addresses, strict=True):
            for word in np.unique(named[lanes]).tolist():
                yield warp, lanes & (named == word), word

    def _observe(self, warp: int, lanes: Lanes, knowledge: Knowledge | None, *, acquires: bool) -> None:
        """Lanes have read what was released with this knowledge, and know it, or will after a fence."""
        into = self._learnt if acquires else self._seen
        if not knowledge or any(  # a loop of loads learns nothing new
            other.knowledge is knowledge and other.warp == warp and not (lanes & ~other.lanes).any() for other in into
        ):
            return
        into.append(Learnt(warp, int(self._clocks.running[warp]), lanes.copy(), knowledge))

    def _given(self, warp: int, lanes: Lanes, *, releases: bool) -> Knowledge | None:
        """What a strong store of these lanes gives: what they know, or with a relaxed one, knew at their last fence."""
        if releases:
            return self._released(warp, lanes)
        fenced, knowledge = self._fenced.get(warp, (None, None))
        return knowledge if fenced is not None and not (lanes & ~fenced).any() else None

    def _released(self, warp: int, lanes: Lanes) -> Knowledge:
        """What these lanes have done and know. As in `Clocks.release` they speak for other lanes up to the last
        synchronisation of the warp only, behind which its epoch stays open where others have done something."""
        clocks = self._clocks
        running = clocks.running[warp]
        busy = (self._last_store[warp] == running) | (clocks.last_access[warp] == running)
        if not (busy & ~lanes).any():
            clocks.end_epoch(warp)
        knowledge: Knowledge = {self.number: clocks.time[warp, CAUSAL, : clocks.nobody].copy()}
        for learnt in self._learnt:
            if self._known_to(learnt, warp, lanes):
                knowledge = _joined(knowledge, learnt.knowledge)
        return knowledge

    def _known_to(self, learnt: Learnt, warp: int, lanes: Lanes) -> bool:
        """Whether lanes of a warp know what lanes of it, or of another, have learnt."""
        if learnt.warp == warp:
            return learnt.epoch < self._clocks.running[warp] or not (lanes & ~learnt.lanes).any()
        return bool(self._clocks.time[warp, CAUSAL, learnt.warp] >= learnt.epoch)


def _joined(one: Knowledge, other: Knowledge) -> Knowledge:
    """What both know, together."""
    return {
        **one,
        **{cta: np.maximum(one[cta], epochs) if cta in one else epochs for cta, epochs in other.items()},
    }
