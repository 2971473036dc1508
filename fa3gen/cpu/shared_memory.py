"""Shared memory of one CTA: its bytes, and for each granule of them who wrote and who read it last.

Addresses are shared-window addresses, in bytes. The first KIB belongs to the system, as on the hardware (CUDA
Programming Guide, compute capability 9.0: 1 KB of shared memory is reserved per CTA), so that 0 is no valid address.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3gen.cpu.clocks import CAUSAL, SEVERAL_LANES, Clocks, stamp
from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.types import Type

BASE = 1024
Indices = NDArray[Any]  # of integers
_REMEMBERED_READS = 512  # instructions


@dataclass(frozen=True, eq=False)
class _Access:
    """What lanes access in one instruction: for each of them `size` bytes, which are row `rows` of that size.

    `warps` and `stamps` (epoch and lane) belong to the rows one by one, or are one for all.
    """

    rows: Indices
    size: int
    warps: Any
    stamps: Any


class SharedMemory:
    """`size` bytes from BASE on. Every access is checked for bounds, and against the clocks for races.

    A granule is the narrowest access of the kernel, so that two accesses never share one without overlapping.
    """

    def __init__(self, size: int, granule: int, clocks: Clocks) -> None:
        """Nothing is written yet; unwritten bytes are 0xFF, which reads as NaN."""
        self.size = size
        self.granule = granule
        self.clocks = clocks
        self.end = BASE + size
        total = -(-self.end // 16) * 16
        self.bytes = np.full(total, 0xFF, np.uint8)
        self.chunks = self.bytes.view(np.complex128)  # 16 bytes each, moved as one
        count = total // granule
        self.writer = np.full(count, clocks.nobody, np.int16)
        self.written = np.full(count, stamp(1, 0), np.int64)
        self.read = np.zeros((clocks.readers, count), np.int64)
        # Which lane of a warp has read a granule matters only if the warp writes it in the same epoch: reads are
        # remembered, and sorted out when that happens.
        self._recent: list[_Access] = []
        self._lane_of_read: NDArray[np.int64] | None = None  # like `read`, for warps, with exact lanes

    # ------------------------------------------------------------------ accesses of lanes

    def load(self, group: Any, address: Any, type_: Type, count: int, mask: Any) -> list[Any]:
        """`count` consecutive elements for each lane, as vectors; scalars where the address is one for all lanes."""
        uniform = mask is None and address.ndim == 0
        size = np.dtype(type_).itemsize * count
        access = self._access(group, address, size, mask, uniform=uniform)
        self._lanes_read(access)
        values = self.bytes.view(type_).reshape(-1, count)[access.rows]
        if uniform:
            return list(values[0])
        columns = values.T if count == 1 else np.ascontiguousarray(values.T)
        if mask is None:
            return list(columns)
        full = np.zeros((count, group.lanes), type_)
        full[:, mask] = columns
        return list(full)

    def store(self, group: Any, address: Any, values: tuple[Any, ...], type_: Type, mask: Any) -> None:
        """Consecutive elements of each lane; `values` has one vector or scalar for each of them."""
        count = len(values)
        access = self._access(group, address, np.dtype(type_).itemsize * count, mask, uniform=False)
        self._lanes_write(access)
        memory = self.bytes.view(type_).reshape(-1, count)
        for item, value in enumerate(values):
            memory[access.rows, item] = value[mask] if mask is not None and value.ndim else value

    def load_rows(self, group: Any, addresses: Indices) -> NDArray[np.complex128]:
        """16-byte rows for ldmatrix; `addresses` is (warps of the group, rows), and so is what comes back."""
        self._lanes_read(self._collective(group, addresses))
        values: NDArray[np.complex128] = self.chunks[addresses >> 4]
        return values

    def store_rows(self, group: Any, addresses: Indices, values: NDArray[np.complex128]) -> None:
        """16-byte rows of stmatrix; both arrays are (warps of the group, rows)."""
        self._lanes_write(self._collective(group, addresses))
        self.chunks[addresses >> 4] = values

    def _access(self, group: Any, address: Any, size: int, mask: Any, *, uniform: bool) -> _Access:
        """The access of the active lanes; `uniform` makes it one for each warp, by all of its lanes."""
        epochs = self.clocks.epoch(group.warps)
        if mask is None:
            self.clocks.last_access[group.warps] = epochs[:, None]
        else:
            active = mask.reshape(-1, 32)
            self.clocks.last_access[group.warps] = np.where(
                active, epochs[:, None], self.clocks.last_access[group.warps]
            )
        if uniform:
            rows = np.full(len(group.warps), int(address), np.int64)
            self.check_range(rows, size)
            return _Access(rows // size, size, group.warps, stamp(epochs, SEVERAL_LANES))
        if address.ndim == 0:
            address = np.full(group.lanes, address, np.int64)
        if len(group.warps) == 1:
            warps: Any = group.warps[0]
            stamps = stamp(epochs[0], group.lane_number)
        else:
            warps = group.warp_of_lane
            stamps = stamp(epochs.repeat(32), group.lane_number)
        if mask is not None:
            address, stamps = address[mask], stamps[mask]
            warps = warps if warps.ndim == 0 else warps[mask]
        self.check_range(address, size)
        return _Access(address // size, size, warps, stamps)

    def _collective(self, group: Any, addresses: Indices) -> _Access:
        """Rows that the lanes of a warp access together, (warps of the group, rows)."""
        self.check_range(addresses, 16)
        warps = np.repeat(group.warps, addresses.shape[1])
        self.clocks.last_access[group.warps] = self.clocks.epoch(group.warps)[:, None]
        return _Access(addresses.ravel() >> 4, 16, warps, stamp(self.clocks.epoch(warps), SEVERAL_LANES))

    # ------------------------------------------------------------------ accesses of asynchronous operations

    def chunk_granules(self, chunks: Indices) -> Indices:
        """Granules of 16-byte chunks."""
        return chunks if self.granule == 16 else self.granules(chunks.ravel() << 4, 16)

    def granules(self, addresses: Indices, size: int) -> Indices:
        """Granules of accesses of `size` bytes."""
        first = addresses // self.granule
        count = size // self.granule
        return first if count == 1 else (first[:, None] + np.arange(count)).ravel()

    def guard(self, address: int, size: int, *, on: bool) -> None:
        """Let nothing read or write these bytes any more, or let them be memory that nobody has written."""
        place = slice(address // self.granule, (address + size - 1) // self.granule + 1)
        self.writer[place] = self.clocks.mbarrier_objects if on else self.clocks.nobody
        self.written[place] = stamp(1, 0)

    def check_chunks(self, chunks: Indices, what: str) -> None:
        """Raise OUT_OF_BOUNDS unless the 16-byte chunks lie in shared memory."""
        low, high = int(chunks.min()) * 16, int(chunks.max()) * 16 + 16
        if low < BASE or high > self.end:
            raise Hazard(
                Kind.OUT_OF_BOUNDS,
                f"{what} touches shared bytes {low - BASE} to {high - BASE} of {self.size}",
            )

    def async_read(
        self, granules: Indices, warps: Indices, agent: int, epoch: int, what: str, visible: Any = None
    ) -> None:
        """An asynchronous operation issued by `warps` starts to read; it reads until `agent` completes `epoch`.

        `visible` is what the warps may rely on (Clocks.visible_to_async), where the caller has it already.
        """
        if visible is None:
            visible = self.clocks.visible_to_async(warps)
        writer, written = self.writer[granules], self.written[granules] >> 6
        late = written > visible[writer]
        if late.any():
            self._unready(granules[late], writer[late], written[late], warps, what, asynchronous=True)
        self.read[agent, granules] = stamp(epoch, 0)

    def async_write(
        self, granules: Indices, warps: Indices, agent: int, epoch: int, what: str, *, generic: bool = False
    ) -> None:
        """An asynchronous operation issued by `warps` starts to write, and does until `agent` completes `epoch`.

        `generic` says that it writes through the generic proxy, as cp.async does.
        """
        known = self.clocks.known_to_all(warps)
        still = self.read[:, granules] >> 6 > known[: self.clocks.readers, None]
        if still.any():
            reader, row = np.argwhere(still)[0]
            raise Hazard(
                Kind.OVERWRITE,
                f"{what} overwrites {self._where(granules[row])}, and nothing says that "
                f"{self.clocks.describe(int(reader))} has read it",
            )
        writer, written = self.writer[granules], self.written[granules] >> 6
        ready = known if generic else self.clocks.visible_to_async(warps)
        late = (written > ready[writer]) & (writer != self.clocks.nobody)
        if late.any():
            self._unready(granules[late], writer[late], written[late], warps, what, asynchronous=not generic)
        self.writer[granules] = agent
        self.written[granules] = stamp(epoch, 0)

    # ------------------------------------------------------------------ checks

    def check_range(self, addresses: Indices, size: int) -> None:
        """Raise OUT_OF_BOUNDS or MISALIGNED unless accesses of `size` bytes at these addresses are good."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        if low < BASE or high > self.end:
            raise Hazard(Kind.OUT_OF_BOUNDS, f"shared bytes {low - BASE} to {high - BASE} of {self.size} are accessed")
        if np.bitwise_or.reduce(addresses, axis=None) & (size - 1):
            bad = int(addresses[(addresses & (size - 1)) != 0][0])
            raise Hazard(
                Kind.MISALIGNED, f"shared byte {bad - BASE} is accessed as {size} bytes, which needs a multiple"
            )

    def _lanes_read(self, access: _Access) -> None:
        clocks, count = self.clocks, access.size // self.granule
        rows, warps = access.rows, access.warps
        writer = self.writer.reshape(-1, count)[rows]
        written = self.written.reshape(-1, count)[rows]
        if warps.ndim == 0:
            late = written >> 6 > clocks.time[warps, CAUSAL][writer]
        else:
            late = written >> 6 > clocks.time[warps[:, None], CAUSAL, writer]
        if late.any():
            late &= (writer != _column(warps)) | (written != _column(access.stamps))  # a lane reads its own write
            if late.any():
                self._report_unready(access, writer, written, late, "read")
        self.read.reshape(clocks.readers, -1, count)[warps, rows] = _column(access.stamps | SEVERAL_LANES)
        if len(self._recent) == _REMEMBERED_READS:
            self._sort_out_reads()
        self._recent.append(access)

    def _lanes_write(self, access: _Access) -> None:
        clocks, count = self.clocks, access.size // self.granule
        rows, warps, stamps = access.rows, access.warps, _column(access.stamps)
        writers, writtens = self.writer.reshape(-1, count), self.written.reshape(-1, count)
        writer, written = writers[rows], writtens[rows]
        known = clocks.time[_column(warps), CAUSAL, writer]
        late = written >> 6 > known
        if late.any():
            late &= (writer != clocks.nobody) & ((writer != _column(warps)) | (written != stamps))
            if late.any():
                self._report_unready(access, writer, written, late, "written")
        reads = self.read.reshape(clocks.readers, -1, count)[:, rows] >> 6
        still = reads > clocks.time[np.atleast_1d(warps), CAUSAL, : clocks.readers].T[:, :, None]
        if still.any():
            self._check_overwritten(access, still)
        writers[rows] = _column(warps)
        writtens[rows] = stamps
        clash = (writtens[rows] != stamps) | (writers[rows] != _column(warps))
        if clash.any():
            raise Hazard(Kind.RACE, f"two lanes write {self._place(access, clash)} in one instruction")

    def _check_overwritten(self, access: _Access, still: NDArray[np.bool_]) -> None:
        """Raise a Hazard unless every read that is not known to be over was made by the very lane that writes."""
        count = access.size // self.granule
        warps = np.broadcast_to(access.warps, access.rows.shape)
        own = np.arange(self.clocks.readers)[:, None, None] == warps[None, :, None]
        foreign = still & ~own
        if foreign.any():
            reader, row, item = np.argwhere(foreign)[0]
            warp = int(warps[row])
            kind = Kind.RACE if reader < self.clocks.warps else Kind.OVERWRITE
            place = self._where(int(access.rows[row]) * count + item)
            raise Hazard(
                kind,
                f"warp {warp} overwrites {place}, and nothing says that {self.clocks.describe(int(reader))} has "
                "read it",
            )
        exact = self._sort_out_reads().reshape(self.clocks.warps, -1, count)[warps, access.rows]
        stamps = np.broadcast_to(_column(access.stamps), exact.shape)
        other = still.any(axis=0) & (exact != stamps) & (exact >> 6 == stamps >> 6)
        if other.any():
            warp = int(warps[np.argwhere(other)[0][0]])
            raise Hazard(
                Kind.RACE,
                f"{self._place(access, other)} is written by one lane of warp {warp} and was read by another; nothing "
                "synchronises the two (bar.warp.sync)",
            )

    def _sort_out_reads(self) -> NDArray[np.int64]:
        """For each warp and granule the stamp of the last read with its lane, SEVERAL_LANES where several read."""
        if self._lane_of_read is None:
            self._lane_of_read = np.zeros((self.clocks.warps, len(self.writer)), np.int64)
        for access in self._recent:
            # Reads of ended epochs are in order with everything that their warp does now.
            if (access.stamps >> 6 < self.clocks.epoch(access.warps)).all():
                continue
            count = access.size // self.granule
            exact = self._lane_of_read.reshape(self.clocks.warps, -1, count)
            stamps = _column(access.stamps)
            before = exact[access.warps, access.rows]
            stamps = np.where((before >> 6 == stamps >> 6) & (before != stamps), stamps | SEVERAL_LANES, stamps)
            exact[access.warps, access.rows] = stamps
            after = exact[access.warps, access.rows]
            if (after != stamps).any():  # two lanes of this instruction read one granule
                row, item = np.nonzero(after != stamps)
                warps = np.broadcast_to(access.warps, access.rows.shape)[row]
                exact[warps, access.rows[row], item] |= SEVERAL_LANES
        self._recent.clear()
        return self._lane_of_read

    def _report_unready(
        self, access: _Access, writer: Indices, written: Indices, late: NDArray[np.bool_], verb: str
    ) -> None:
        row, item = np.argwhere(late)[0]
        warp = int(np.broadcast_to(access.warps, access.rows.shape)[row])
        granule = int(access.rows[row]) * (access.size // self.granule) + int(item)
        if int(writer[row, item]) == warp:
            raise Hazard(
                Kind.RACE,
                f"{self._where(granule)} is {verb} by one lane of warp {warp} and was written by another; "
                "nothing synchronises the two (bar.warp.sync)",
            )
        self._unready(
            np.array([granule]),
            writer[row, item : item + 1],
            written[row, item : item + 1] >> 6,
            np.array([warp]),
            f"warp {warp}",
            asynchronous=False,
        )

    def _unready(
        self, granules: Indices, writer: Indices, epochs: Indices, warps: Indices, what: str, *, asynchronous: bool
    ) -> None:
        """Say why the first of some granules must not be accessed yet."""
        clocks = self.clocks
        place, who, epoch = self._where(granules[0]), int(writer[0]), int(epochs[0])
        if who == clocks.nobody:
            raise Hazard(Kind.UNINITIALISED_READ, f"{what} reads {place}, which nothing has written")
        if who == clocks.mbarrier_objects:
            raise Hazard(Kind.OUT_OF_BOUNDS, f"{what} accesses {place}, which holds an mbarrier")
        if asynchronous and epoch <= int(clocks.known_to_all(warps)[who]):
            raise Hazard(
                Kind.MISSING_PROXY_FENCE,
                f"{what} accesses {place}, written by {clocks.describe(who)} through the generic proxy; "
                "a fence.proxy.async must come between",
            )
        if who >= clocks.cp_async:
            raise Hazard(
                Kind.UNAWAITED_LOAD, f"{what} accesses {place} before it has waited for {clocks.describe(who)}"
            )
        raise Hazard(
            Kind.RACE, f"{what} accesses {place}, written by {clocks.describe(who)}; nothing synchronises the two"
        )

    def _place(self, access: _Access, where: NDArray[np.bool_]) -> str:
        """The first place of an access for which `where`, (rows, granules of each), holds."""
        row, item = np.argwhere(where)[0]
        return self._where(int(access.rows[row]) * (access.size // self.granule) + int(item))

    def _where(self, granule: Any) -> str:
        return f"shared byte {int(granule) * self.granule - BASE}"


def _column(values: Any) -> Any:
    """One value for each row, beside the granules of the row."""
    return values if values.ndim == 0 else values[:, None]
