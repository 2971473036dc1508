"""Global memory: the allocations that a launch may touch, by address."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.types import Type


@dataclass(frozen=True)
class Allocation:
    """Bytes [start, end) that belong to one tensor; `bytes` is the memory itself."""

    name: str
    start: int
    end: int
    bytes: NDArray[np.uint8]


class GlobalMemory:
    """All memory outside these allocations is out of bounds."""

    def __init__(self) -> None:
        """No allocation yet."""
        self.allocations: list[Allocation] = []

    def add(self, name: str, address: int, size: int) -> None:
        """Allow access to `size` bytes at `address`; the caller keeps them alive."""
        if size:
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            self.allocations.append(Allocation(name, address, address + size, memory))

    def extents(self) -> list[tuple[int, int]]:
        """Where the allocations begin and end; they may overlap."""
        return [(allocation.start, allocation.end) for allocation in self.allocations]

    def holds(self, address: int) -> bool:
        """Whether the byte at this address belongs to an allocation."""
        return any(allocation.start <= address < allocation.end for allocation in self.allocations)

    def find(self, low: int, high: int) -> Allocation:
        """The allocation that holds bytes [low, high). Raises a Hazard when none holds all of them."""
        for allocation in self.allocations:
            if allocation.start <= low and high <= allocation.end:
                return allocation
        for allocation in self.allocations:
            if allocation.start <= low < allocation.end or allocation.start < high <= allocation.end:
                raise Hazard(
                    Kind.OUT_OF_BOUNDS,
                    f"global access to bytes {low - allocation.start} to {high - allocation.start} of "
                    f"{allocation.name}, which has {allocation.end - allocation.start}",
                )
        raise Hazard(Kind.OUT_OF_BOUNDS, f"global access at {low:#x}, which is in no tensor of the launch")

    def locate(self, addresses: NDArray[np.int64], size: int) -> list[tuple[Allocation, NDArray[np.bool_] | None]]:
        """The allocation of every address; the lanes (None: all) where they lie in several."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        for allocation in self.allocations:
            if allocation.start <= low and high <= allocation.end:
                return [(allocation, None)]
        found: list[tuple[Allocation, NDArray[np.bool_] | None]] = []
        rest = np.ones(len(addresses), bool)
        while rest.any():
            first = int(addresses[rest][0])
            allocation = self.find(first, first + size)
            inside = rest & (addresses >= allocation.start) & (addresses + size <= allocation.end)
            found.append((allocation, inside))
            rest &= ~inside
        return found

    def load(self, group: Any, address: Any, type_: Type, count: int, mask: Any, *, strong: bool = False) -> list[Any]:
        """`count` consecutive elements for each lane, as vectors; scalars where the address is one for all lanes.

        `strong`: relaxed, acquire or volatile, so that it races with no strong store (`fa3gen.cpu.global_order`).
        """
        element = np.dtype(type_).itemsize
        uniform = mask is None and getattr(address, "ndim", 0) == 0
        addresses = _active(group, address, mask, uniform)
        _check_alignment(addresses, element * count)
        values = np.empty((count, len(addresses)), type_)
        order = group.cta.order
        for allocation, lanes in self.locate(addresses, element * count):
            chosen = addresses if lanes is None else addresses[lanes]
            if order.others_store_here(int(chosen[0])):
                threads = group.warps * 32 if uniform else _threads(group, mask, lanes)
                order.loads(np.broadcast_to(chosen, threads.shape), element * count, threads, strong=strong)
            columns = slice(None) if lanes is None else lanes
            for item in range(count):
                values[item, columns] = gather(allocation, chosen + item * element, type_)
        if uniform:
            return [value[0] for value in values]
        if mask is None:
            return list(values)
        full = np.zeros((count, group.lanes), type_)
        full[:, mask] = values
        return list(full)

    def store(
        self, group: Any, address: Any, values: tuple[Any, ...], type_: Type, mask: Any, *, strong: bool = False
    ) -> None:
        """Consecutive elements of each lane; `values` has one vector or scalar for each of them; `strong` as above."""
        element = np.dtype(type_).itemsize
        addresses = _active(group, address, mask, uniform=False)
        _check_alignment(addresses, element * len(values))
        order = group.cta.order
        for allocation, lanes in self.locate(addresses, element * len(values)):
            chosen = addresses if lanes is None else addresses[lanes]
            if order.launch is not None:
                order.stores(chosen, element * len(values), _threads(group, mask, lanes), strong=strong)
            for item, value in enumerate(values):
                if getattr(value, "ndim", 0):
                    value = value if mask is None else value[mask]
                    value = value if lanes is None else value[lanes]
                _scatter(allocation, chosen + item * element, type_, value)


def _active(group: Any, address: Any, mask: Any, uniform: bool) -> NDArray[np.int64]:
    if uniform:
        return np.array([address], np.int64)
    if getattr(address, "ndim", 0) == 0:
        address = np.full(group.lanes, address, np.int64)
    active: NDArray[np.int64] = address if mask is None else address[mask]
    return active


def _threads(group: Any, mask: Any, lanes: Any) -> NDArray[np.intp]:
    """The threads of the active lanes, or of some of these."""
    threads: NDArray[np.intp] = group.thread if mask is None else group.thread[mask]
    return threads if lanes is None else threads[lanes]


def _check_alignment(addresses: NDArray[np.int64], size: int) -> None:
    if (addresses & (size - 1)).any():
        bad = int(addresses[(addresses & (size - 1)) != 0][0])
        raise Hazard(Kind.MISALIGNED, f"global address {bad:#x} is accessed as {size} bytes, which needs a multiple")


def gather(allocation: Allocation, addresses: NDArray[np.int64], type_: Type) -> Any:
    """Elements at addresses that are aligned for the type; an allocation may start anywhere."""
    element = np.dtype(type_).itemsize
    skip = -allocation.start % element
    size = (len(allocation.bytes) - skip) // element * element
    return allocation.bytes[skip : skip + size].view(type_)[(addresses - allocation.start - skip) // element]


def _scatter(allocation: Allocation, addresses: NDArray[np.int64], type_: Type, value: Any) -> None:
    element = np.dtype(type_).itemsize
    skip = -allocation.start % element
    size = (len(allocation.bytes) - skip) // element * element
    allocation.bytes[skip : skip + size].view(type_)[(addresses - allocation.start - skip) // element] = value
