"""A compiled module as a function of CPU tensors: the host code sets up each launch, the model of sm_90a runs it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import threadpoolctl
import torch

from fa3gen.compile.compiler import Compiled
from fa3gen.cpu import ptx
from fa3gen.cpu.driver import LaunchRefused
from fa3gen.cpu.global_memory import GlobalMemory
from fa3gen.cpu.host import HostProgram, Launch
from fa3gen.cpu.launch import Execution, Index, Sums
from fa3gen.cpu.schedule import FAST, Schedule
from fa3gen.cpu.trace import Trace
from fa3gen.cpu.translate import Program
from fa3gen.hardware.dtypes import VECTOR_BYTES
from fa3gen.run import checks

Source = tuple[str, int]


@dataclass
class Settings:
    """How launches run. `ctas` limits them to some CTAs, `trace` collects events when given.

    `ctas` are indices, or numbers in the order of launch, x first; None: all.
    `sms` is the number of SMs that a persistent kernel is told of: few, so that a CTA takes several tiles. `sums`: how
    products on the tensor cores add up, in float32, or bit for bit as on an H200, which is many times slower
    (`fa3gen.cpu.tensor_core`). Offsets and lengths of packed sequences that lie are an ArgumentError, unless
    `lengths_may_lie`, to see what a kernel makes of them.
    """

    schedule: Schedule = FAST
    trace: Trace | None = None
    ctas: Sequence[Index | int] | None = None
    sms: int = 3
    sums: Sums = "float32"
    lengths_may_lie: bool = False


@dataclass
class CpuKernel:
    """The kernels of one compiled module and its host code.

    Call it like what `cute.compile` returned: tensors on the CPU, in the order of the module's `launch`, without the
    stream. `settings` may be changed between calls. `instructions` counts the PTX instructions of the last call, once
    per warp. `locate` finds (file, line) of a kernel's instruction where the PTX has no line information. `names` are
    those of the arguments, for messages.
    """

    compiled: Compiled
    settings: Settings = field(default_factory=Settings)
    locate: Callable[[str, int], Source | None] = lambda kernel, instruction: None
    names: Sequence[str] = ()
    instructions: int = 0

    def __post_init__(self) -> None:
        """Parse the PTX and compile the host code. Raises PtxError, UserError."""
        self.take_ptx(self.compiled.ptx)
        self._host = HostProgram(self.compiled.host_module, self._launch, self.names)
        self._tensors: tuple[torch.Tensor, ...] = ()

    def take_ptx(self, text: str) -> None:
        """Run these kernels from now on, under the same host code: what tests do that change an instruction.

        Raises PtxError.
        """
        self.kernels = ptx.parse(text)
        self._programs: dict[tuple[str, bool], Program] = {}

    def __call__(self, *arguments: torch.Tensor | float) -> None:
        """Run on CPU tensors. Raises Hazard for the first fault, OutsideModel for what the model lacks, ArgumentError
        for offsets and lengths that lie."""
        if not self.settings.lengths_may_lie:
            _check_lengths(dict(zip(self.names, arguments, strict=False)))
        self._tensors = tuple(argument for argument in arguments if isinstance(argument, torch.Tensor))
        self.instructions = 0
        try:
            # The products are small: threads would cost more than they save.
            with _thread_pools().limit(limits=1):
                self._host(*arguments)
        finally:
            self._tensors = ()

    def program(self, kernel: str, *, preemptive: bool) -> Program:
        """A kernel made ready to run; kept for the next call."""
        key = (kernel, preemptive)
        if key not in self._programs:
            other = self._programs.get((kernel, not preemptive))
            self._programs[key] = Program(self.kernels[kernel], preemptive=preemptive, other=other)
        return self._programs[key]

    def _launch(self, launch: Launch) -> None:
        program = self.program(launch.kernel, preemptive=self.settings.schedule.granularity == "warp")
        if launch.beside_previous:
            _check_waits(program.kernel)
        parameters = program.kernel.parameters
        pointers = (ctypes.c_void_p * len(parameters)).from_address(launch.arguments)
        memory = GlobalMemory()
        for position, tensor in enumerate(self._tensors):
            memory.add(f"tensor argument {position}", tensor.data_ptr(), _extent(tensor))
        execution = Execution(
            program,
            grid=launch.grid,
            block=launch.block,
            dynamic_shared_bytes=launch.dynamic_shared_bytes,
            parameters=[
                ctypes.string_at(pointer or 0, parameter.size)
                for pointer, parameter in zip(pointers, parameters, strict=True)
            ],
            memory=memory,
            schedule=self.settings.schedule,
            trace=self.settings.trace,
            sums=self.settings.sums,
            locate=functools.partial(self.locate, launch.kernel),
        )
        try:
            execution.run(self.settings.ctas)
        finally:
            self.instructions += execution.instructions


def _check_waits(kernel: ptx.Kernel) -> None:
    """Raise LaunchRefused where a kernel that may begin beside the one before touches memory before it waits for that.

    By the order of the PTX: launches follow one another here, so that no run would show it.
    """
    for instruction in kernel.instructions:
        if instruction.mnemonic == "griddepcontrol.wait":
            return
        if ".global" in instruction.mnemonic and not instruction.mnemonic.startswith(("cvta", "prefetch")):
            break
    raise LaunchRefused(
        f"launch of {kernel.name} refused: it may begin beside the kernel before (programmatic stream serialization), "
        "and uses global memory before griddepcontrol.wait; have it wait first"
    )


def _check_lengths(named: Mapping[str, Any]) -> None:
    """Raise ArgumentError where a module for packed sequences, or pages, is called with numbers that lie."""
    if "cu_seqlens_q" not in named:
        return
    where: dict[str, Any] = {name: named.get(name) for name in ("cu_seqlens_k", "page_table")}
    # Lengths that nobody gave have no elements.
    used: dict[str, Any] = {name: named[name] if named[name].numel() else None for name in ("seqused_q", "seqused_k")}
    checks.check_sequences(named["q"], named["k"], named["cu_seqlens_q"], **where, **used)


@functools.cache
def _thread_pools() -> threadpoolctl.ThreadpoolController:
    """The thread pools of NumPy's linear algebra, looked for once."""
    return threadpoolctl.ThreadpoolController()


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last, and of the 16 bytes that this one is in.

    TMA stores whole 16 bytes: a slice of a matrix whose rows have room for them may end within. Where the memory ends
    before, so does the tensor.
    """
    if tensor.numel() == 0:
        return 0
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end, size = (last + 1) * tensor.element_size(), tensor.element_size()
    room = int(tensor.untyped_storage().nbytes()) - int(tensor.storage_offset()) * size
    return min(-(-end // VECTOR_BYTES) * VECTOR_BYTES, max(end, room))
