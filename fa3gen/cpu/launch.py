"""One launch: all CTAs of a grid, on the tensors that the host code was given.

They run one after the other, but for those that wait for what another one stores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from fa3gen.base.errors import UserError
from fa3gen.cpu.cta import Cta
from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.global_memory import GlobalMemory
from fa3gen.cpu.global_order import GlobalOrder, cta_index
from fa3gen.cpu.schedule import FAST, Schedule
from fa3gen.cpu.shared_memory import BASE
from fa3gen.cpu.tensor_map import TENSOR_MAP_BYTES, TensorMap, decode
from fa3gen.cpu.trace import Trace
from fa3gen.cpu.translate import Program
from fa3gen.cpu.types import Type

PARAMETER_WINDOW = 1 << 60  # generic addresses of kernel parameters begin here

Index = tuple[int, int, int]
Sums = Literal["float32", "tensor_core"]  # how products of WGMMA add up


class Execution:
    """What the CTAs of one launch share.

    `parameters` are the bytes of each kernel parameter, in order; `dynamic_shared_bytes` as in the launch;
    `registers_per_thread` at launch matter for setmaxnreg only. `locate` gives (file, line) of an instruction where
    the PTX itself has no line information.
    """

    def __init__(
        self,
        program: Program,
        *,
        grid: Index,
        block: Index,
        dynamic_shared_bytes: int,
        parameters: Sequence[bytes],
        memory: GlobalMemory,
        schedule: Schedule = FAST,
        trace: Trace | None = None,
        sums: Sums = "float32",
        registers_per_thread: int | None = None,
        locate: Callable[[int], tuple[str, int] | None] = lambda instruction: None,
    ) -> None:
        """Lay out parameters and shared variables; nothing runs yet."""
        self.program = program
        self.grid, self.block = grid, block
        self.memory, self.schedule, self.trace = memory, schedule, trace
        self.sums = sums
        self.registers_per_thread = registers_per_thread
        self.locate = locate
        self.order: GlobalOrder | None = None  # of several CTAs
        self.instructions = 0  # PTX instructions executed, counted per warp
        self.symbols: dict[str, int] = dict(program.kernel.local)
        self._parameters: dict[str, bytes] = {}
        self._values: dict[tuple[str, int, Type], Any] = {}
        self._tensor_maps: dict[int, TensorMap] = {}
        self._windows: list[tuple[int, bytes]] = []
        offset = 0
        for parameter, data in zip(program.kernel.parameters, parameters, strict=True):
            offset = -(-offset // parameter.align) * parameter.align
            self.symbols[parameter.name] = PARAMETER_WINDOW + offset
            self._parameters[parameter.name] = data
            self._windows.append((PARAMETER_WINDOW + offset, data))
            offset += parameter.size
        self.shared_bytes = self._place_shared(dynamic_shared_bytes)

    def _place_shared(self, dynamic: int) -> int:
        """Static variables first, the dynamic one after them. Returns bytes of shared memory."""
        place = BASE
        for variable in sorted(self.program.kernel.shared, key=lambda variable: variable.dynamic):
            place = -(-place // variable.align) * variable.align
            self.symbols[variable.name] = place
            place += dynamic if variable.dynamic else variable.size
        return place - BASE

    def run(self, ctas: Sequence[Index | int] | None = None) -> None:
        """Run all CTAs, or some of them. Raises a Hazard for the first fault.

        A number counts CTAs as they are launched, x first. Raises UserError for one that the grid does not have.
        """
        count = math.prod(self.grid)
        chosen: Sequence[Index | int] = range(count) if ctas is None else ctas
        if count > 1 and len(chosen) > 1:
            self.order = GlobalOrder(self.memory.extents(), self.program.global_granule)
        if self.schedule.ctas == "first to last":
            self._run_in_turn(chosen)
        else:
            self._run_together(list(reversed(chosen)))

    def _run_in_turn(self, chosen: Sequence[Index | int]) -> None:
        """Each to its end. On a GPU that has no room for all of them those with lower numbers begin first."""
        for number in chosen:
            cta = Cta(self, self._index(number))
            if not cta.run():
                raise cta.waits_in_vain()

    def _run_together(self, chosen: Sequence[Index | int]) -> None:
        """Each until it waits for another; when all have begun, those that wait go on, the last one first."""
        waiting: list[Cta] = []
        for number in chosen:
            cta = Cta(self, self._index(number))
            if not cta.run():
                waiting.insert(0, cta)
        while waiting:
            left = [cta for cta in waiting if not cta.run()]
            if len(left) == len(waiting) and not any(cta.has_moved for cta in left):
                raise left[0].waits_in_vain()
            waiting = left

    def _index(self, chosen: Index | int) -> Index:
        index = cta_index(chosen, self.grid) if isinstance(chosen, int) else chosen
        if not all(0 <= number < extent for number, extent in zip(index, self.grid, strict=True)):
            raise UserError(f"there is no CTA {chosen} in a grid of {self.grid}; choose one inside")
        return index

    def parameter(self, name: str, offset: int, type_: Type) -> Any:
        """An element of a parameter."""
        key = (name, offset, type_)
        if key not in self._values:
            data = self._parameters[name]
            size = np.dtype(type_).itemsize
            if offset < 0 or offset + size > len(data):
                raise Hazard(Kind.OUT_OF_BOUNDS, f"parameter bytes {offset} to {offset + size} of {len(data)} are read")
            self._values[key] = np.frombuffer(data, np.uint8)[offset : offset + size].copy().view(type_)[0]
        return self._values[key]

    def tensor_map(self, address: int) -> TensorMap:
        """The tensor map at a generic address, which has to be one that the driver would have made."""
        found = self._tensor_maps.get(address)
        if found is not None:
            return found
        for start, data in self._windows:
            if start <= address and address + TENSOR_MAP_BYTES <= start + len(data):
                decoded = decode(data[address - start : address - start + TENSOR_MAP_BYTES])
                violations = decoded.violations()
                if violations:
                    raise Hazard(Kind.TENSOR_MAP, "; ".join(violations))
                self._tensor_maps[address] = decoded
                return decoded
        raise Hazard(Kind.TENSOR_MAP, f"there is no tensor map at {address:#x}")
