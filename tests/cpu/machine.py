"""Runs small PTX kernels on the whole machine: parser, translation, memories, asynchronous units and schedules.

A kernel is written as the body of its entry. Every name of `buffers` and `maps` is a parameter, whose 64-bit address
the body finds in the register of that name with a `%` before it. These registers exist besides:

    %t      thread in the CTA            %lane, %warp   lane and warp of the thread
    %s      address of shared memory     %rs %r %rd %f %p   families of 16, 32, 64-bit, f32 and predicate registers
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fa3gen.cpu import ptx
from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.global_memory import GlobalMemory
from fa3gen.cpu.launch import Execution, Index, Sums
from fa3gen.cpu.schedule import FAST, Schedule, schedules
from fa3gen.cpu.trace import Trace
from fa3gen.cpu.translate import Program

Buffers = dict[str, NDArray[Any]]

HEADER = """.version 8.8
.target sm_90a
.address_size 64
.file 1 "generated/tested.py"
.extern .shared .align 1024 .b8 dynamic_memory[];
"""
REGISTERS = """.reg .b16 %rs<64>; .reg .b32 %r<256>; .reg .b64 %rd<64>; .reg .f32 %f<256>; .reg .pred %p<32>;
.reg .b32 %t, %lane, %warp, %s;
mov.u32 %t, %tid.x; and.b32 %lane, %t, 31; shr.u32 %warp, %t, 5; mov.b32 %s, dynamic_memory;
"""


@dataclass
class Machine:
    """One kernel and how it is launched; `run` may be called several times."""

    body: str
    threads: int = 32
    shared: int = 1024
    buffers: Buffers = field(default_factory=dict)
    maps: dict[str, bytes] = field(default_factory=dict)
    grid: Index = (1, 1, 1)
    registers: int | None = None
    trace: Trace | None = None
    sums: Sums = "float32"
    instructions: int = 0  # executed in the last run, counted per warp

    def __post_init__(self) -> None:
        self.text, self.first_line = self._entry()
        self.kernel = ptx.parse(self.text)["kernel"]
        self._programs: dict[bool, Program] = {}

    def _entry(self) -> tuple[str, int]:
        """(the PTX module, line of the body's first line)."""
        parameters = [f".param .u64 {name}_address" for name in self.buffers]
        parameters += [f".param .align 64 .b8 {name}_map[128]" for name in self.maps]
        loads = [f".reg .b64 %{name}; ld.param.b64 %{name}, [{name}_address];" for name in self.buffers]
        loads += [f".reg .b64 %{name}; mov.b64 %{name}, {name}_map;" for name in self.maps]
        before = f"{HEADER}.visible .entry kernel({', '.join(parameters)})\n{{\n{REGISTERS}{' '.join(loads)}\n"
        return f"{before}{self.body}\nret;\n}}\n", before.count("\n") + 1

    def line(self, text: str) -> int:
        """The PTX line of the only line of the body that holds `text`."""
        found = [number for number, line in enumerate(self.body.split("\n")) if text in line]
        assert len(found) == 1, f"{text!r} is on {len(found)} lines"
        return self.first_line + found[0]

    def program(self, preemptive: bool) -> Program:
        """The kernel, translated once for each kind of schedule."""
        if preemptive not in self._programs:
            self._programs[preemptive] = Program(self.kernel, preemptive=preemptive)
        return self._programs[preemptive]

    def run(self, schedule: Schedule = FAST) -> Buffers:
        """Copies of the buffers as the launch leaves them. Raises Hazard and OutsideModel."""
        after = {name: _apart(buffer) for name, buffer in self.buffers.items()}
        memory = GlobalMemory()
        for name, buffer in after.items():
            memory.add(name, buffer.ctypes.data, buffer.nbytes)
        parameters = [struct.pack("<Q", buffer.ctypes.data) for buffer in after.values()]
        parameters += [_moved(data, self.buffers, after) for data in self.maps.values()]
        execution = Execution(
            self.program(schedule.granularity == "warp"),
            grid=self.grid,
            block=(self.threads, 1, 1),
            dynamic_shared_bytes=self.shared,
            parameters=parameters,
            memory=memory,
            schedule=schedule,
            trace=self.trace,
            sums=self.sums,
            registers_per_thread=self.registers,
        )
        execution.run()
        self.instructions = execution.instructions
        return after

    def everywhere(self, count: int = 12) -> list[Schedule]:
        """Schedules to try."""
        return schedules(count, -(-self.threads // 32))


# Bytes on both sides of a copy that belong to no buffer of a launch.
APART = 2**13


def _apart(buffer: NDArray[Any]) -> NDArray[Any]:
    """A copy with nothing beside it: what lies just outside a buffer is never another one.

    Where the allocator puts two copies side by side, an access that is outside one of them would be inside the other.
    """
    copy = aligned((buffer.nbytes + 2 * APART,), np.uint8)[APART : APART + buffer.nbytes]
    copy = copy.view(buffer.dtype).reshape(buffer.shape)
    copy[...] = buffer
    return copy


def _moved(tensor_map: bytes, of: Buffers, to: Buffers) -> bytes:
    """A tensor map of one of the buffers `of`, for its copy; it may begin a little before it."""
    (address,) = struct.unpack_from("<Q", tensor_map)
    for before in (0, 2**12):
        for name, buffer in of.items():
            offset = address - buffer.ctypes.data
            if -before <= offset < buffer.nbytes:
                return struct.pack("<Q", to[name].ctypes.data + offset) + tensor_map[8:]
    raise AssertionError("the tensor map is of no buffer")


def run(body: str, **settings: Any) -> Buffers:
    """Run once, under the fast schedule."""
    return Machine(body, **settings).run()


def results(body: str, *, count: int = 12, **settings: Any) -> list[Buffers]:
    """What the kernel leaves in its buffers under each of `count` schedules."""
    machine = Machine(body, **settings)
    return [machine.run(schedule) for schedule in machine.everywhere(count)]


def clean(body: str, *, count: int = 12, **settings: Any) -> Buffers:
    """The buffers that the kernel leaves, the same under every schedule and without a report."""
    first, *others = results(body, count=count, **settings)
    for other in others:
        for name, buffer in first.items():
            assert buffer.tobytes() == other[name].tobytes(), f"{name} depends on the schedule"
    return first


def hazards(body: str, *, count: int = 12, **settings: Any) -> list[Hazard | None]:
    """What each of `count` schedules reports; None where it reports nothing."""
    machine = Machine(body, **settings)
    found: list[Hazard | None] = []
    for schedule in machine.everywhere(count):
        try:
            machine.run(schedule)
            found.append(None)
        except Hazard as hazard:
            found.append(hazard)
    return found


def refused(
    body: str, kind: Kind | set[Kind], words: str = "", *, at: str | None = None, count: int = 12, **settings: Any
) -> Hazard:
    """The last report; every schedule gives one, of `kind` or one of several, with `words` (a pattern).

    `at` is text on the line of the body where it has to be.
    """
    kinds = {kind} if isinstance(kind, Kind) else kind
    machine = Machine(body, **settings)
    hazard = None
    for schedule in machine.everywhere(count):
        with pytest.raises(Hazard) as report:
            machine.run(schedule)
        hazard = report.value
        assert hazard.kind in kinds, f"{schedule}: {hazard}"
        assert re.search(words, hazard.detail), f"{schedule}: {hazard}"
        assert hazard.place.cta == (0, 0, 0), f"{schedule}: {hazard}"
        if at is not None:
            assert hazard.place.ptx_line == machine.line(at), f"{schedule}: {hazard}"
            assert hazard.place.warps, f"{schedule}: {hazard}"
    assert hazard is not None
    return hazard


# ---------------------------------------------------------------------- tensor maps

# Codes of the element types and swizzles (docstring of fa3gen.cpu.tensor_map).
ELEMENT_CODES = {
    "u8": (0, 1),
    "u16": (1, 2),
    "u32": (2, 4),
    "u64": (4, 8),
    "f16": (6, 2),
    "f32": (7, 4),
    "bf16": (10, 2),
}
SWIZZLE_CODES = {0: 0, 32: 1, 64: 2, 128: 3}


def tensor_map(buffer: NDArray[Any], type_: str, box: Iterable[int], swizzle: int = 0) -> bytes:
    """The 128 bytes of a map of a C-contiguous or strided array; its last axis is dimension 0, as is box[0]."""
    code, element = ELEMENT_CODES[type_]
    assert buffer.itemsize == element and buffer.strides[-1] == element
    dims = [*reversed(buffer.shape)] + [1] * (5 - buffer.ndim)
    strides = [*reversed(buffer.strides[:-1])] + [0] * (5 - buffer.ndim)
    boxes = list(box) + [1] * (5 - buffer.ndim)
    span = element + sum(
        (size - 1) * stride for size, stride in zip(reversed(buffer.shape), [element, *strides], strict=False)
    )
    words = [0] * 16
    words[0] = buffer.ctypes.data
    words[1] = 1 << 1 | (buffer.ndim - 1) << 4 | code << 7 | SWIZZLE_CODES[swizzle] << 13 | 2 << 17
    words[1] |= (1 << 21 if span >= 2**17 else 0) | (strides[0] >> 4 & 0xFFFFFFFF) << 32
    words[2] = strides[1] >> 4 | strides[2] >> 4 << 32
    words[3] = strides[3] >> 4
    words[4] = dims[0] - 1 | (dims[1] - 1) << 32
    words[5] = dims[2] - 1 | (dims[3] - 1) << 32
    words[6] = dims[4] - 1 | (boxes[0] - 1) << 56
    words[7] = sum((extent - 1) << 8 * index for index, extent in enumerate(boxes[1:]))
    return struct.pack("<16Q", *words)


def aligned(shape: tuple[int, ...], dtype: Any, alignment: int = 128) -> NDArray[Any]:
    """An array of zeros whose address is a multiple of `alignment` bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype).reshape(shape)


def put(register: str, buffer: str = "out") -> str:
    """PTX that stores a 32-bit register to the thread's element of a buffer; changes %rd60."""
    return f"mad.wide.u32 %rd60, %t, 4, %{buffer}; st.global.b32 [%rd60], {register};"


def wait(barrier: str, parity: str | int, label: str) -> str:
    """PTX that waits for the phase of an mbarrier; changes %p31."""
    return f"{label}:\nmbarrier.try_wait.parity.shared.b64 %p31, [{barrier}], {parity};\n@!%p31 bra {label};\n"


# Thread 0 of the CTA: predicate %p30.
LEADER = "setp.eq.u32 %p30, %t, 0;\n"
