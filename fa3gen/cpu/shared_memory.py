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
from fa3gen.cpu.truth import some
from fa3gen.cpu.types import Type

BASE = 1024
Indices = NDArray[Any]  # of integers
Rows = Indices | slice  # rows of some size: their numbers, or neighbours
_REMEMBERED_READS = 512  # instructions
WHOLE: dict[int, Any] = {
    1: np.int8,
    2: np.int16,
    4: np.int32,
    8: np.int64,
    16: np.complex128,
}  # by bytes, to move bits


@dataclass(slots=True, eq=False)
class _Access:
    """What lanes of `group` access in one instruction: `size` bytes each, which are row `rows` of that size.

    `warps`, `epochs` and `lanes` belong to the rows one by one, or are one for all: numbers where there is one warp,
    and SEVERAL_LANES where a row is accessed by no single lane.
    """

    rows: Indices
    size: int
    group: Indices
    warps: Any
    epochs: Any
    lanes: Any

    @property
    def stamps(self) -> NDArray[np.int32]:
        """Epoch and lane of each row, or of all."""
        stamps: NDArray[np.int32] = np.asarray(stamp(self.epochs, self.lanes), np.int32)
        return stamps


class _InRows:
    """A vector seen in rows of `count` elements, which NumPy moves as one where it has a type of so many bytes."""

    __slots__ = ("_type", "count", "view", "_whole")

    def __init__(self, vector: NDArray[Any], count: int) -> None:
        """`view` is the vector with one element for each row, or (rows, count)."""
        whole = WHOLE.get(vector.itemsize * count)
        self._type, self.count, self._whole = vector.dtype, count, whole is not None
        self.view = vector.reshape(-1, count) if whole is None else vector.view(whole)

    def take(self, rows: Rows) -> NDArray[Any]:
        """(rows, count), perhaps a view of the vector."""
        taken = self.view[rows]
        return taken.view(self._type).reshape(-1, self.count)

    def put(self, rows: Rows, values: Any) -> None:
        """One value for all elements of all rows, one for those of each row, or (rows, count)."""
        values = np.asarray(values, self._type)
        if self._whole:
            if values.ndim == 2:
                values = np.ascontiguousarray(values).reshape(-1)
            elif self.count > 1:
                values = values.repeat(self.count)
            values = values.view(self.view.dtype)
        elif values.ndim == 1:
            values = values[:, None]
        self.view[rows] = values


class SharedMemory:
    """`size` bytes from BASE on. Every access is checked for bounds, and against the clocks for races.

    A granule is the narrowest access of the kernel, so that two accesses never share one without overlapping. Wider
    accesses take its state in rows.
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
        self.written = np.full(count, stamp(1, 0), np.int32)
        self.read = np.zeros((clocks.readers, count), np.int32)
        self.guards = 0  # how often `guard` was called
        self._rows: dict[int, tuple[_InRows, _InRows, _InRows]] = {}
        self._elements: dict[tuple[Type, int], _InRows] = {}
        # Which lane of a warp has read a granule matters only if the warp writes it in the same epoch: reads are
        # remembered, and sorted out when that happens.
        self._recent: list[_Access] = []
        self._lane_of_read: NDArray[np.int32] | None = None  # like `read`, for warps, with exact lanes

    def _in_rows(self, count: int) -> tuple[_InRows, _InRows, _InRows]:
        """`writer`, `written` and `read` in rows of `count` granules; those of `read` go on from agent to agent."""
        found = self._rows.get(count)
        if found is None:
            vectors = (self.writer, self.written, self.read.reshape(-1))
            writer, written, read = (_InRows(vector, count) for vector in vectors)
            found = self._rows[count] = writer, written, read
        return found

    def _elements_in_rows(self, type_: Type, count: int) -> _InRows:
        """The memory in rows of `count` elements of a type."""
        found = self._elements.get((type_, count))
        if found is None:
            found = self._elements[type_, count] = _InRows(self.bytes.view(type_), count)
        return found

    def _all_reads(self, rows: Rows, count: int) -> NDArray[np.int32]:
        """(agents, rows, count): stamps of the reads of all agents."""
        if isinstance(rows, slice):
            return self.read[:, rows.start * count : rows.stop * count].reshape(self.clocks.readers, -1, count)
        view = self._in_rows(count)[2].view
        taken = view.reshape(self.clocks.readers, -1, *view.shape[1:]).take(rows, axis=1)
        reads: NDArray[np.int32] = taken.view(np.int32).reshape(self.clocks.readers, -1, count)
        return reads

    # ------------------------------------------------------------------ accesses of lanes

    def load(self, group: Any, address: Any, type_: Type, count: int, mask: Any) -> list[Any]:
        """`count` consecutive elements for each lane, as vectors; scalars where the address is one for all lanes."""
        uniform = mask is None and address.ndim == 0
        size = np.dtype(type_).itemsize * count
        access = self._access(group, address, size, mask, uniform=uniform)
        self._lanes_read(access)
        values = self._elements_in_rows(type_, count).take(access.rows)
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
        data = np.empty((len(access.rows), count), type_)
        for item, value in enumerate(values):
            data[:, item] = value[mask] if mask is not None and value.ndim else value
        self._elements_in_rows(type_, count).put(access.rows, data)

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
        clocks, lanes = self.clocks, group.lane_number
        if len(group.warps) == 1:
            warps: Any = group.warps[0]
            epochs: Any = clocks.running[warps]
            if mask is None:
                clocks.last_access[warps] = epochs
            else:
                clocks.last_access[warps, mask] = epochs
        else:
            running = clocks.running[group.warps]
            active = True if mask is None else mask.reshape(-1, 32)
            clocks.last_access[group.warps] = np.where(active, running[:, None], clocks.last_access[group.warps])
            warps, epochs = (group.warps, running) if uniform else (group.warp_of_lane, running.repeat(32))
        if uniform:
            address, lanes = np.full(len(group.warps), address, np.int64), SEVERAL_LANES
        elif address.ndim == 0:
            address = np.full(group.lanes, address, np.int64)
        if mask is not None:
            address, lanes = address[mask], lanes[mask]
            if warps.ndim:
                warps, epochs = warps[mask], epochs[mask]
        self.check_range(address, size)
        return _Access(address >> (size.bit_length() - 1), size, group.warps, warps, epochs, lanes)

    def _collective(self, group: Any, addresses: Indices) -> _Access:
        """Rows that the lanes of a warp access together, (warps of the group, rows)."""
        self.check_range(addresses, 16)
        epochs = self.clocks.running[group.warps]
        self.clocks.last_access[group.warps] = epochs[:, None]
        warps: Any = group.warps[0] if len(group.warps) == 1 else group.warps.repeat(addresses.shape[1])
        epochs = epochs[0] if len(group.warps) == 1 else epochs.repeat(addresses.shape[1])
        return _Access(addresses.ravel() >> 4, 16, group.warps, warps, epochs, SEVERAL_LANES)

    # ------------------------------------------------------------------ accesses of asynchronous operations

    def guard(self, address: int, size: int, *, on: bool) -> None:
        """Let nothing read or write these bytes any more, or let them be memory that nobody has written."""
        self.guards += 1
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

    def _state(self, rows: Rows, size: int) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
        """Writers and stamps of the granules in rows of `size` bytes, row by row."""
        count = size // self.granule
        if isinstance(rows, slice):
            place = slice(rows.start * count, rows.stop * count)
            return self.writer[place], self.written[place]
        writer, written, _ = self._in_rows(count)
        return writer.take(rows).reshape(-1), written.take(rows).reshape(-1)

    def _granule_of(self, rows: Rows, size: int, position: int) -> int:
        """The granule at a position of `_state`."""
        row, item = divmod(position, size // self.granule)
        return int(rows.start + row if isinstance(rows, slice) else rows[row]) * (size // self.granule) + item

    def async_read(
        self, rows: Rows, size: int, warps: Indices, agent: int, epoch: int, what: str, visible: Any = None
    ) -> None:
        """An asynchronous operation issued by `warps` starts to read; it reads until `agent` completes `epoch`.

        It reads `rows` of `size` bytes. `visible` is what the warps may rely on (Clocks.visible_to_async), where the
        caller has it already.
        """
        if visible is None:
            visible = self.clocks.visible_to_async(warps)
        writer, written = self._state(rows, size)
        late = written >> 6 > visible[writer]
        if some(late):
            self._unready(rows, size, late, warps, what, asynchronous=True)
        count = size // self.granule
        first = agent * (len(self.writer) // count)
        rows = slice(first + rows.start, first + rows.stop) if isinstance(rows, slice) else rows + first
        self._in_rows(count)[2].put(rows, stamp(epoch, 0))

    def latest_writes(self, rows: Indices, size: int) -> NDArray[np.int32]:
        """For each agent the last epoch of it that has written to these rows, 0 where it has not."""
        writer, written = self._state(rows, size)
        latest = np.zeros(self.clocks.time.shape[2], np.int32)
        np.maximum.at(latest, writer, written >> 6)
        return latest

    def async_write(
        self, rows: Rows, size: int, warps: Indices, agent: int, epoch: int, what: str, *, generic: bool = False
    ) -> None:
        """An asynchronous operation issued by `warps` starts to write, and does until `agent` completes `epoch`.

        It writes `rows` of `size` bytes. `generic` says that it writes through the generic proxy, as cp.async does.
        """
        count = size // self.granule
        writers, writtens, _ = self._in_rows(count)
        known = self.clocks.known_to_all(warps)
        still = self._all_reads(rows, count) >= stamp(known[: self.clocks.readers, None, None] + 1, 0)
        if some(still):
            reader, row, item = np.argwhere(still)[0]
            place = self._where(self._granule_of(rows, size, int(row) * count + int(item)))
            raise Hazard(
                Kind.OVERWRITE,
                f"{what} overwrites {place}, and nothing says that " f"{self.clocks.describe(int(reader))} has read it",
            )
        writer, written = self._state(rows, size)
        ready = known if generic else self.clocks.visible_to_async(warps)
        late = written >> 6 > ready[writer]
        if some(late):
            late &= writer != self.clocks.nobody
            if some(late):
                self._unready(rows, size, late, warps, what, asynchronous=not generic)
        writers.put(rows, agent)
        writtens.put(rows, stamp(epoch, 0))

    def writes_apart(self, rows: Indices, size: int, warps: Indices, agents: Indices, epochs: Indices) -> bool:
        """`async_write` through the generic proxy by several warps at once, with an agent and epoch for each row.

        False, with nothing noted, where rows of two agents are the same or something may be to be reported.
        """
        writers, writtens, _ = self._in_rows(size // self.granule)
        known = self.clocks.known_to_all(warps)
        reads = self._all_reads(rows, size // self.granule)
        if some(reads >= stamp(known[: self.clocks.readers, None, None] + 1, 0)):
            return False
        writer, written = writers.take(rows), writtens.take(rows)
        late = written >> 6 > known[writer]
        if some(late) and some(late & (writer != self.clocks.nobody)):
            return False
        writers.put(rows, agents)
        if len(warps) > 1 and some(writers.take(rows) != _column(agents)):
            writers.put(rows, writer)
            return False
        writtens.put(rows, stamp(epochs, 0))
        return True

    # ------------------------------------------------------------------ checks

    def outside(self, addresses: Indices, size: int) -> bool:
        """Whether any access of `size` bytes at these addresses is not within shared memory."""
        low, high = int(np.minimum.reduce(addresses, axis=None)), int(np.maximum.reduce(addresses, axis=None)) + size
        return low < BASE or high > self.end

    def check_range(self, addresses: Indices, size: int) -> None:
        """Raise OUT_OF_BOUNDS or MISALIGNED unless accesses of `size` bytes at these addresses are good."""
        if self.outside(addresses, size):
            low, high = int(addresses.min()), int(addresses.max()) + size
            raise Hazard(Kind.OUT_OF_BOUNDS, f"shared bytes {low - BASE} to {high - BASE} of {self.size} are accessed")
        if np.bitwise_or.reduce(addresses, axis=None) & (size - 1):
            bad = int(addresses[(addresses & (size - 1)) != 0][0])
            raise Hazard(
                Kind.MISALIGNED, f"shared byte {bad - BASE} is accessed as {size} bytes, which needs a multiple"
            )

    def _lanes_read(self, access: _Access) -> None:
        clocks, count = self.clocks, access.size // self.granule
        rows, warps = access.rows, access.warps
        writers, writtens, reads = self._in_rows(count)
        writer, written = writers.take(rows), writtens.take(rows)
        # What all warps of the group know is mostly enough, and found out faster than what each of them does.
        if some(written >> 6 > clocks.known_to_all(access.group)[writer]):
            late = written >> 6 > clocks.time[_column(warps), CAUSAL, writer]
            late &= (writer != _column(warps)) | (written != _column(access.stamps))  # a lane reads its own write
            if some(late):
                self._report_unready(access, writer, written, late, "read")
        reads.put(rows + warps * (len(self.writer) // count), stamp(access.epochs, SEVERAL_LANES))
        if len(self._recent) == _REMEMBERED_READS:
            self._sort_out_reads()
        self._recent.append(access)

    def _lanes_write(self, access: _Access) -> None:
        clocks, count = self.clocks, access.size // self.granule
        rows, warps, stamps = access.rows, access.warps, access.stamps
        writers, writtens, _ = self._in_rows(count)
        writer, written = writers.take(rows), writtens.take(rows)
        known = clocks.known_to_all(access.group)  # as in _lanes_read
        if some(written >> 6 > known[writer]):
            late = written >> 6 > clocks.time[_column(warps), CAUSAL, writer]
            late &= (writer != clocks.nobody) & ((writer != _column(warps)) | (written != _column(stamps)))
            if some(late):
                self._report_unready(access, writer, written, late, "written")
        reads = self._all_reads(rows, count)
        if some(reads >= stamp(known[: clocks.readers, None, None] + 1, 0)):
            still = reads >> 6 > clocks.time[np.atleast_1d(warps), CAUSAL, : clocks.readers].T[:, :, None]
            if some(still):
                self._check_overwritten(access, still)
        writers.put(rows, warps)
        writtens.put(rows, stamps)
        clash = writtens.take(rows) != _column(stamps)
        if warps.ndim:
            clash |= writers.take(rows) != _column(warps)
        if some(clash):
            raise Hazard(Kind.RACE, f"two lanes write {self._place(access, clash)} in one instruction")

    def _check_overwritten(self, access: _Access, still: NDArray[np.bool_]) -> None:
        """Raise a Hazard unless every read that is not known to be over was made by the very lane that writes."""
        count = access.size // self.granule
        warps = np.broadcast_to(access.warps, access.rows.shape)
        own = np.arange(self.clocks.readers)[:, None, None] == warps[None, :, None]
        foreign = still & ~own
        if some(foreign):
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
        if some(other):
            warp = int(warps[np.argwhere(other)[0][0]])
            raise Hazard(
                Kind.RACE,
                f"{self._place(access, other)} is written by one lane of warp {warp} and was read by another; nothing "
                "synchronises the two (bar.warp.sync)",
            )

    def _sort_out_reads(self) -> NDArray[np.int32]:
        """For each warp and granule the stamp of the last read with its lane, SEVERAL_LANES where several read."""
        if self._lane_of_read is None:
            self._lane_of_read = np.zeros((self.clocks.warps, len(self.writer)), np.int32)
        for access in self._recent:
            # Reads of ended epochs are in order with everything that their warp does now.
            if (access.epochs < self.clocks.running[access.warps]).all():
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
            np.array([granule]), self.granule, np.array([True]), np.array([warp]), f"warp {warp}", asynchronous=False
        )

    def _unready(
        self, rows: Rows, size: int, late: NDArray[np.bool_], warps: Indices, what: str, *, asynchronous: bool
    ) -> None:
        """Say why the first of the granules that are `late`, in the order of `_state`, must not be accessed yet."""
        clocks = self.clocks
        granule = self._granule_of(rows, size, int(late.argmax()))
        place, who, epoch = self._where(granule), int(self.writer[granule]), int(self.written[granule]) >> 6
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
