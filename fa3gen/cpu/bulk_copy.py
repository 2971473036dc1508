"""TMA: bulk tensor copies between global and shared memory (PTX ISA, "cp.async.bulk.tensor", "Tensor" chapter).

A load lands as late as it may, when somebody waits for its mbarrier and nobody else can run. A store reads shared
memory and writes global memory when its bulk group is waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3gen.cpu.barriers import Mbarrier
from fa3gen.cpu.commit_groups import CommitGroups
from fa3gen.cpu.findings import Hazard, Kind, OutsideModel
from fa3gen.cpu.global_memory import GlobalMemory
from fa3gen.cpu.shared_memory import BASE
from fa3gen.cpu.tensor_map import TensorMap
from fa3gen.cpu.wgmma import swizzled

SHARED_ALIGNMENT = 128  # bytes, of the box in shared memory
INNER_ALIGNMENT = 16  # bytes; an H200 stops with an illegal instruction at a box that begins elsewhere
_SWIZZLE_BITS = {0: 0, 32: 1, 64: 2, 128: 3}


@dataclass(frozen=True, eq=False)
class Load:
    """A box on its way to shared memory: `size` bytes that its mbarrier will count."""

    tensor_map: TensorMap
    chunks: NDArray[np.intp]
    coordinates: tuple[int, ...]
    barrier: Mbarrier
    size: int
    number: int


@dataclass(frozen=True, eq=False)
class Store:
    """A box on its way to global memory; `lane` issued it."""

    tensor_map: TensorMap
    chunks: NDArray[np.intp]
    coordinates: tuple[int, ...]
    lane: int


class BulkCopyUnit:
    """The bulk tensor copies of a CTA."""

    def __init__(self, cta: Any) -> None:
        """Nothing in flight."""
        self.cta = cta
        self.loads: list[Load] = []
        self.stores = [CommitGroups[Store]() for _ in range(cta.clocks.warps)]
        self._issued = 0

    # ------------------------------------------------------------------ loads

    def load(
        self, group: Any, destination: Any, tensor_map: Any, coordinates: Sequence[Any], barrier: Any, mask: Any
    ) -> None:
        """`cp.async.bulk.tensor.*.shared.global.tile.mbarrier::complete_tx::bytes`: one load for each active lane."""
        for lane in (group.all_lanes if mask is None else np.flatnonzero(mask)).tolist():
            warps = group.warp_of_lane[lane : lane + 1]
            box = self.cta.tensor_map(_of_lane(tensor_map, lane))
            place = tuple(_of_lane(coordinate, lane) for coordinate in coordinates)
            self._load(group, box, _of_lane(destination, lane), place, _of_lane(barrier, lane), warps)

    def _load(
        self,
        group: Any,
        tensor_map: TensorMap,
        destination: int,
        coordinates: tuple[int, ...],
        barrier_address: int,
        warps: NDArray[np.intp],
    ) -> None:
        memory = self.cta.shared
        _check_start(tensor_map, self.cta.memory)
        _check_place(tensor_map, coordinates)
        chunks = box_chunks(tensor_map, destination)
        memory.check_chunks(chunks, "a TMA load")
        if self.cta.order.others_store_here(tensor_map.address):
            rows, size = box_rows(tensor_map, coordinates)
            if len(rows):
                self.cta.order.loads(rows, size, np.full(len(rows), int(warps[0]) * 32))
        barrier = self.cta.mbarriers.for_load(barrier_address, warps)
        size = len(chunks) * 16
        memory.async_write(side_by_side(chunks), 16, warps, barrier.column, barrier.phase + 1, "a TMA load")
        barrier.in_flight += size
        load = Load(tensor_map, chunks, coordinates, barrier, size, self._issued)
        self._issued += 1
        self.cta.note("load issued", group, load=load, warps=warps, destination=destination)
        self.loads.append(load)
        if self.cta.schedule.completion == "early":
            self.land(load)

    def land(self, load: Load) -> None:
        """Let one load complete: write its bytes and count them at its mbarrier."""
        self.loads.remove(load)
        data = read_box(load.tensor_map, load.coordinates, self.cta.memory)
        self.cta.shared.chunks[load.chunks] = data.reshape(-1).view(np.complex128)
        self.cta.progress += 1
        self.cta.note("load landed", None, load=load)
        self.cta.mbarriers.complete(load.barrier, load.size)

    def check_loads_end(self) -> None:
        """Raise a Hazard when the CTA ends with loads that nobody has waited for."""
        if self.loads:
            raise Hazard(
                Kind.UNFINISHED,
                f"the CTA ends with {len(self.loads)} TMA loads in flight, the first for {self.loads[0].barrier}",
            )

    # ------------------------------------------------------------------ stores

    def store(self, group: Any, tensor_map: Any, coordinates: Sequence[Any], source: Any, mask: Any) -> None:
        """`cp.async.bulk.tensor.*.global.shared::cta.tile.bulk_group`.

        Lanes of a warp that name the same box store it once: ptxas makes one warp-level UTMASTG of the instruction.
        """
        seen = set()
        uniform = all(getattr(value, "ndim", 0) == 0 for value in (tensor_map, *coordinates, source))
        lanes = group.all_lanes if mask is None else np.flatnonzero(mask)
        if uniform:  # the first active lane of each warp speaks for the others
            lanes = lanes[np.unique(group.warp_of_lane[lanes], return_index=True)[1]]
        for lane in lanes.tolist():
            warp = int(group.warp_of_lane[lane])
            place = tuple(_of_lane(coordinate, lane) for coordinate in coordinates)
            request = (warp, _of_lane(tensor_map, lane), place, _of_lane(source, lane))
            if request not in seen:
                seen.add(request)
                self._store(group, warp, lane % 32, self.cta.tensor_map(request[1]), place, request[3])

    def _store(
        self, group: Any, warp: int, lane: int, tensor_map: TensorMap, coordinates: tuple[int, ...], source: int
    ) -> None:
        memory, clocks = self.cta.shared, self.cta.clocks
        _check_start(tensor_map, self.cta.memory)
        _check_place(tensor_map, coordinates)
        if min(coordinates) < 0:  # an H200 stops with an illegal instruction at such a store
            raise Hazard(
                Kind.OUT_OF_BOUNDS,
                f"a TMA store to a box at {coordinates}: a box may reach past the end of the tensor, and a load's may "
                "begin before it, but a store's may not",
            )
        chunks = box_chunks(tensor_map, source)
        memory.check_chunks(chunks, "a TMA store")
        stores = self.stores[warp]
        reads = side_by_side(chunks)
        memory.async_read(reads, 16, np.array([warp]), clocks.bulk + warp, stores.open_epoch, "a TMA store")
        stores.open.append(Store(tensor_map, chunks, coordinates, lane))
        self.cta.note("store issued", group, warp=warp, source=source, store=stores.open[-1], epoch=stores.open_epoch)

    def commit(self, group: Any, mask: Any) -> None:
        """`cp.async.bulk.commit_group`."""
        for warp, _ in self._executing(group, mask):
            self.stores[warp].commit()

    def wait(self, group: Any, pending: int, mask: Any) -> None:
        """`cp.async.bulk.wait_group{.read}`: the thread's own groups; a wait by other lanes waits for nothing."""
        for warp, lanes in self._executing(group, mask):
            stores = self.stores[warp]
            stores.wait(pending, functools.partial(self._perform, warp), functools.partial(_issued_by, lanes))
            self.cta.clocks.learn(np.array([warp]), self.cta.clocks.bulk + warp, stores.completed)
        self.cta.note("stores awaited", group, stores=self.stores)

    def check_stores_end(self, warps: list[int]) -> None:
        """Raise a Hazard when a warp ends with stores that it has not waited for."""
        for warp in warps:
            if self.stores[warp].unfinished:
                raise Hazard(
                    Kind.UNFINISHED,
                    f"warp {warp} ends with TMA stores that it has not waited for: they read shared memory that the "
                    "next CTA may use",
                )

    def _executing(self, group: Any, mask: Any) -> list[tuple[int, set[int]]]:
        """(warp, its active lanes)."""
        active = np.ones(group.lanes, bool) if mask is None else mask
        rows = active.reshape(-1, 32)
        return [
            (warp, set(np.flatnonzero(rows[position]).tolist()))
            for position, warp in enumerate(group.warps.tolist())
            if rows[position].any()
        ]

    def _perform(self, warp: int, store: Store) -> None:
        data = self.cta.shared.chunks[store.chunks].view(np.uint8)
        if self.cta.order.launch is not None:
            rows, size = box_rows(store.tensor_map, store.coordinates, whole_units=True)
            if len(rows):
                epoch = self.stores[warp].completed + 1
                self.cta.order.bulk_stores(rows, size, warp * 32 + store.lane, epoch)
        write_box(store.tensor_map, store.coordinates, self.cta.memory, data)


def _issued_by(lanes: set[int], store: Store) -> bool:
    return store.lane in lanes


def _of_lane(value: Any, lane: int) -> int:
    return int(value) if getattr(value, "ndim", 0) == 0 else int(value[lane])


# ---------------------------------------------------------------------- boxes


def _check_start(tensor_map: TensorMap, memory: GlobalMemory) -> None:
    if not memory.holds(tensor_map.address):  # an H200 stops with an illegal memory access where no page is mapped
        raise Hazard(
            Kind.OUT_OF_BOUNDS,
            f"a tensor map that begins at {tensor_map.address:#x}, which is in no tensor of the launch: that address "
            "has to be mapped, although no box may touch it",
        )


def _check_place(tensor_map: TensorMap, coordinates: tuple[int, ...]) -> None:
    if len(coordinates) != len(tensor_map.box):
        raise Hazard(Kind.TENSOR_MAP, f"{len(coordinates)} coordinates for a tensor map of rank {len(tensor_map.box)}")
    inner = coordinates[0] * tensor_map.element_bytes
    if inner % INNER_ALIGNMENT:
        raise Hazard(
            Kind.MISALIGNED,
            f"a TMA box that begins {inner} bytes along the contiguous dimension, at {coordinates}; it needs a "
            f"multiple of {INNER_ALIGNMENT}",
        )


@functools.lru_cache(maxsize=1024)
def _box_layout(box: tuple[int, ...], element_bytes: int, swizzle: int, start: int) -> NDArray[np.intp]:
    size = int(np.prod(box)) * element_bytes
    addresses = start + np.arange(size // 16, dtype=np.int64) * 16
    return (swizzled(addresses, _SWIZZLE_BITS[swizzle]) >> 4).astype(np.intp)


def side_by_side(chunks: NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """The chunks of a box, none of them twice, in the order of their addresses; a slice where they are neighbours."""
    first, last = int(chunks.min()), int(chunks.max())
    return slice(first, last + 1) if last - first + 1 == len(chunks) else chunks


def box_chunks(tensor_map: TensorMap, start: int) -> NDArray[np.intp]:
    """Numbers of the 16-byte chunks of shared memory that hold a box, in the box's own order (dimension 0 fastest)."""
    inner = tensor_map.box[0] * tensor_map.element_bytes
    if tensor_map.swizzle and inner != tensor_map.swizzle:
        raise OutsideModel(
            f"a TMA box with rows of {inner} bytes and a swizzle of {tensor_map.swizzle} bytes: the model has only "
            "rows as wide as the swizzle"
        )
    if tensor_map.interleave or any(stride != 1 for stride in tensor_map.element_strides):
        raise OutsideModel("a tensor map with interleave or element strides other than 1")
    if start % SHARED_ALIGNMENT:
        raise Hazard(
            Kind.MISALIGNED, f"a TMA box at shared byte {start - BASE}; it needs a multiple of {SHARED_ALIGNMENT}"
        )
    return _box_layout(tensor_map.box, tensor_map.element_bytes, tensor_map.swizzle, start)


def _visible(tensor_map: TensorMap, coordinates: tuple[int, ...]) -> tuple[list[int], list[int], list[int]]:
    """Per dimension: first element inside the tensor, how many of the box are inside, how many lie before it."""
    first, count, skip = [], [], []
    for coordinate, box, extent in zip(coordinates, tensor_map.box, tensor_map.dims, strict=True):
        before = max(0, -coordinate)
        end = min(box, extent - coordinate)
        first.append(coordinate + before)
        count.append(max(0, end - before))
        skip.append(before)
    return first, count, skip


def _address(tensor_map: TensorMap, place: list[int]) -> int:
    """That of an element. It wraps around: an H200 takes maps whose strides come back to the tensor from behind the
    end of memory."""
    return (
        tensor_map.address + sum(index * step for index, step in zip(place, tensor_map.strides, strict=True))
    ) % 2**64


def _view(tensor_map: TensorMap, memory: GlobalMemory, first: list[int], count: list[int]) -> NDArray[np.uint8]:
    """The visible part of a box in global memory, bytes, dimensions slowest first."""
    strides, start = tensor_map.strides, _address(tensor_map, first)
    extent = sum((number - 1) * stride for number, stride in zip(count, strides, strict=True))
    allocation = memory.find(start, start + extent + tensor_map.element_bytes)
    return np.lib.stride_tricks.as_strided(
        allocation.bytes[start - allocation.start :],
        (*reversed(count[1:]), count[0] * tensor_map.element_bytes),
        (
            *(stride * (number > 1) for number, stride in zip(reversed(count[1:]), reversed(strides[1:]), strict=True)),
            1,
        ),
    )


def box_rows(
    tensor_map: TensorMap, coordinates: tuple[int, ...], *, whole_units: bool = False
) -> tuple[NDArray[np.int64], int]:
    """Addresses of the contiguous rows of a box inside the tensor, and bytes of one; `whole_units` as `write_box`."""
    first, count, _ = _visible(tensor_map, coordinates)
    size = count[0] * tensor_map.element_bytes
    if whole_units:
        size = -(-size // INNER_ALIGNMENT) * INNER_ALIGNMENT
    if not all(count):
        return np.zeros(0, np.int64), size
    rows = np.zeros(1, np.int64)
    for number, stride in zip(count[1:], tensor_map.strides[1:], strict=True):
        rows = np.add.outer(np.arange(number) * stride, rows).ravel()
    return rows + _address(tensor_map, first), size


def read_box(tensor_map: TensorMap, coordinates: tuple[int, ...], memory: GlobalMemory) -> NDArray[np.uint8]:
    """A box as bytes, dimensions slowest first; elements outside the tensor are zero."""
    if tensor_map.oob_fill != "zeros":
        raise OutsideModel("a tensor map that fills with NaN outside the tensor")
    element = tensor_map.element_bytes
    data = np.zeros((*reversed(tensor_map.box[1:]), tensor_map.box[0] * element), np.uint8)
    first, count, skip = _visible(tensor_map, coordinates)
    if all(count):
        data[_inside(count, skip, element)] = _view(tensor_map, memory, first, count)
    return data


def write_box(
    tensor_map: TensorMap, coordinates: tuple[int, ...], memory: GlobalMemory, data: NDArray[np.uint8]
) -> None:
    """Write the part of a box that lies inside the tensor, along the contiguous dimension in whole 16-byte units.

    A store is not cut inside a unit: an H200 writes what is in shared memory to the end of it, past the end of a row
    whose bytes are no multiple of 16. (A load is cut by elements.)
    """
    element = tensor_map.element_bytes
    first, count, skip = _visible(tensor_map, coordinates)
    unit = INNER_ALIGNMENT // element
    count[0] = -(-count[0] // unit) * unit
    if all(count):
        box = data.reshape(*reversed(tensor_map.box[1:]), tensor_map.box[0] * element)
        _view(tensor_map, memory, first, count)[...] = box[_inside(count, skip, element)]


def _inside(count: list[int], skip: list[int], element: int) -> tuple[slice, ...]:
    outer = [slice(before, before + number) for before, number in zip(skip[1:], count[1:], strict=True)]
    return (*reversed(outer), slice(skip[0] * element, (skip[0] + count[0]) * element))
