"""ldmatrix, stmatrix, atomics and local memory: what lanes do with memory beyond plain loads and stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.types import Type

_ROWS = 8


def _row_addresses(group: Any, address: Any, count: int, mask: Any, what: str) -> NDArray[np.int64]:
    """(warps, 8 count): the addresses that lanes 0 to 8 count - 1 of each warp give."""
    group.whole_warps(mask, what)
    rows: NDArray[np.int64] = np.broadcast_to(address, (group.lanes,)).reshape(-1, 32)[:, : _ROWS * count]
    return rows


def load_matrices(group: Any, address: Any, count: int, transpose: bool, mask: Any) -> list[NDArray[np.uint32]]:
    """`ldmatrix`: lane l gets elements 2 (l % 4) and the next of row l / 4 of each matrix."""
    rows = group.cta.shared.load_rows(group, _row_addresses(group, address, count, mask, "ldmatrix"))
    matrices = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, count, 8, 8)
    if transpose:
        matrices = matrices.swapaxes(2, 3)
    packed = np.ascontiguousarray(matrices).view(np.uint32).reshape(-1, count, 32)
    return [np.ascontiguousarray(packed[:, matrix]).reshape(-1) for matrix in range(count)]


def store_matrices(group: Any, address: Any, values: tuple[Any, ...], transpose: bool, mask: Any) -> None:
    """`stmatrix`: the inverse of `load_matrices`."""
    rows = _row_addresses(group, address, len(values), mask, "stmatrix")
    vectors = [np.broadcast_to(value, (group.lanes,)).reshape(-1, 32) for value in values]
    matrices = np.stack(vectors, axis=1).view(np.uint16).reshape(-1, len(values), 8, 8)
    if transpose:
        matrices = matrices.swapaxes(2, 3)
    data = np.ascontiguousarray(matrices).reshape(-1, len(values) * 64).view(np.complex128)
    group.cta.shared.store_rows(group, rows, data)


_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, value: old + value,
    "min": np.minimum,
    "max": np.maximum,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "inc": lambda old, value: old.dtype.type(0) if old >= value else old + old.dtype.type(1),
    "dec": lambda old, value: value if old == 0 or old > value else old - old.dtype.type(1),
}


def atomic(group: Any, unit: str, operation: str, address: Any, type_: Type, value: Any, mask: Any) -> Any:
    """`atom` and `red`: the old values. Lanes take turns in their order, which the hardware does not promise."""
    return _each(group, unit, address, type_, (value,), mask, _OPERATIONS[operation])


def compare_and_swap(group: Any, unit: str, address: Any, type_: Type, compare: Any, value: Any, mask: Any) -> Any:
    """`atom.cas`: the old values."""
    return _each(
        group,
        unit,
        address,
        type_,
        (compare, value),
        mask,
        lambda old, compare, value: value if old == compare else old,
    )


def _each(
    group: Any, unit: str, address: Any, type_: Type, values: tuple[Any, ...], mask: Any, change: Callable[..., Any]
) -> NDArray[Any]:
    vectors = [np.broadcast_to(value, (group.lanes,)) for value in values]
    addresses = np.broadcast_to(address, (group.lanes,))
    size = np.dtype(type_).itemsize
    old = np.zeros(group.lanes, type_)
    lanes = group.all_lanes if mask is None else np.flatnonzero(mask)
    if unit == "memory" and len(lanes) and group.cta.order.launch is not None:
        group.cta.order.counts(addresses[lanes].astype(np.int64), size, group.thread[lanes])
    changed = unit != "memory"
    for lane in lanes.tolist():
        place = _element(group.cta, unit, int(addresses[lane]), size).view(type_)
        old[lane] = place[0]
        place[0] = change(old[lane], *(vector[lane] for vector in vectors))
        changed |= place[0] != old[lane]
    if changed:
        group.cta.progress += 1
    else:  # a load of what another CTA may store
        group.cta.polled(group)
    return old


def _element(cta: Any, unit: str, address: int, size: int) -> NDArray[np.uint8]:
    """The bytes of one element. Atomic accesses do not race with each other and are not watched."""
    if address % size:
        raise Hazard(Kind.MISALIGNED, f"an atomic operation on {size} bytes at {address:#x}, which needs a multiple")
    if unit == "shared":
        cta.shared.check_range(np.array([address]), size)
        element: NDArray[np.uint8] = cta.shared.bytes[address : address + size]
        return element
    allocation = cta.memory.find(address, address + size)
    start = address - allocation.start
    found: NDArray[np.uint8] = allocation.bytes[start : start + size]
    return found


class LocalMemory:
    """`.local` variables: each thread has its own bytes; addresses are offsets in them."""

    def __init__(self, threads: int, size: int) -> None:
        """Unwritten bytes are 0xFF."""
        self.size = size
        self.bytes = np.full((threads, max(size, 1)), 0xFF, np.uint8)

    def load(self, group: Any, address: Any, type_: Type, count: int, mask: Any) -> list[Any]:
        """`count` consecutive elements for each lane."""
        element = np.dtype(type_).itemsize
        threads, offsets = self._place(group, address, element * count, mask)
        values = np.zeros((count, group.lanes), type_)
        for item in range(count):
            places = (offsets + item * element)[:, None] + np.arange(element)
            data = np.ascontiguousarray(self.bytes[threads[:, None], places]).view(type_)[:, 0]
            values[item, slice(None) if mask is None else mask] = data
        return list(values)

    def store(self, group: Any, address: Any, values: tuple[Any, ...], type_: Type, mask: Any) -> None:
        """Consecutive elements of each lane."""
        element = np.dtype(type_).itemsize
        threads, offsets = self._place(group, address, element * len(values), mask)
        for item, value in enumerate(values):
            vector = np.broadcast_to(value, (group.lanes,)).astype(type_)
            vector = vector if mask is None else vector[mask]
            places = (offsets + item * element)[:, None] + np.arange(element)
            self.bytes[threads[:, None], places] = np.ascontiguousarray(vector)[:, None].view(np.uint8)

    def _place(self, group: Any, address: Any, size: int, mask: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        offsets = np.broadcast_to(address, (group.lanes,)).astype(np.int64)
        threads = group.thread
        if mask is not None:
            offsets, threads = offsets[mask], threads[mask]
        if (offsets % size).any():
            raise Hazard(Kind.MISALIGNED, f"local memory is accessed as {size} bytes at another multiple")
        if int(offsets.min()) < 0 or int(offsets.max()) + size > self.size:
            raise Hazard(Kind.OUT_OF_BOUNDS, f"local byte {int(offsets.max())} of {self.size} is accessed")
        return threads, offsets
