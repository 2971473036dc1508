"""What a generated module asks of CUDA around a launch, on a machine without a GPU: streams, captures, new zeros.

What CUDA would refuse, or do where it is wrong, is an AssertionError here: an allocation while somebody captures, a
fill on a stream that may be captured.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import cuda.bindings.driver as cuda
import pytest
import torch

RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
NON_BLOCKING = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
ACTIVE = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
NO_CAPTURE = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
GOOD, NO_MEMORY = cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
STALE = 7  # what stands in new memory


@dataclass
class PretendedCuda:
    """Each thread has a current stream for each GPU, the default one at first; every GPU passes for a Hopper."""

    sms: int = 5
    current_gpu: int = 0
    captures: dict[int, int] = field(default_factory=dict)  # by handle of the stream: the capture that it is in
    asked: list[int] = field(default_factory=list)  # handles that the driver was asked about
    batches: list[int] = field(default_factory=list)  # for each allocation, its GPU
    memory: dict[int, torch.Tensor] = field(default_factory=dict)  # by address
    streams: list[int] = field(default_factory=list)  # handles of those that the driver made
    out_of_memory: bool = False
    told: tuple[Any, ...] = ()  # what the driver tells of a capture beside error, status and id
    error: cuda.CUresult = GOOD
    unfinished: set[int] = field(default_factory=set)  # streams with a fill that nobody waited for
    of_thread: threading.local = field(default_factory=threading.local)

    def install(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put this in the place of CUDA, for a module and for what it asks of torch."""
        enums = ("CUstreamCaptureMode", "CUstreamCaptureStatus", "CUstream_flags")
        calls = (name for name in vars(PretendedCuda) if name.startswith("cu") and name[2].isupper())
        driver = {name: getattr(cuda, name) for name in enums} | {name: getattr(self, name) for name in calls}
        facts = SimpleNamespace(major=9, minor=0, multi_processor_count=self.sms)
        monkeypatch.setattr(module, "cuda", SimpleNamespace(**driver))
        monkeypatch.setattr(module, "current_stream", self.current_stream)
        for name, pretended in {
            "current_device": lambda: self.current_gpu,
            "is_current_stream_capturing": lambda: self.current_stream(self.current_gpu) in self.captures,
            "get_device_properties": lambda gpu: facts,
        }.items():
            monkeypatch.setattr(torch.cuda, name, pretended)
        # On the devices of a GPU that is not there, torch makes CPU tensors.
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **facts: empty(*shape, **facts))
        monkeypatch.setattr(torch, "as_tensor", self.as_tensor)

    def current_stream(self, gpu: int) -> int:
        """The handle of the calling thread's current stream."""
        handles: dict[int, int] = self.of_thread.__dict__.setdefault("handles", {})
        return handles.get(gpu, 0)

    @contextlib.contextmanager
    def stream(self, handle: int, gpu: int = 0) -> Iterator[None]:
        """Make a stream the calling thread's current one."""
        before = self.current_stream(gpu)
        self.of_thread.handles[gpu] = handle
        yield
        self.of_thread.handles[gpu] = before

    @contextlib.contextmanager
    def capture(self, handle: int, number: int, gpu: int = 0) -> Iterator[None]:
        """Capture what the calling thread launches on a stream."""
        with self.stream(handle, gpu):
            self.captures[handle] = number
            yield
            del self.captures[handle]

    def as_tensor(self, shared: Any, *, device: int) -> torch.Tensor:
        """The tensor at an address, as torch.as_tensor makes it of what has a __cuda_array_interface__."""
        array = shared.__cuda_array_interface__
        address, read_only = array["data"]
        assert (array["typestr"], array["version"], read_only) == ("<i4", 2, False)
        assert device == self.batches[-1], "torch would copy it to that device"
        found = self.memory[address]
        assert found.numel() == math.prod(array["shape"])
        return found.view(array["shape"])

    def gave(self, slot: torch.Tensor) -> bool:
        """Whether it lies in memory that the driver gave, and not in torch's."""
        ends = [(address, address + 4 * made.numel()) for address, made in self.memory.items()]
        return any(start <= slot.data_ptr() < end for start, end in ends)

    # What a module calls of cuda.bindings.driver

    def cuStreamGetCaptureInfo(self, handle: int) -> tuple[Any, ...]:
        assert handle, "the driver refuses to be asked about the default stream while another one captures"
        self.asked.append(handle)
        number = self.captures.get(handle)
        return self.error, NO_CAPTURE if number is None else ACTIVE, cuda.cuuint64_t(number or 0), *self.told

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, Any]:
        before, self.of_thread.mode = getattr(self.of_thread, "mode", None), mode
        return GOOD, before

    def cuDeviceGet(self, gpu: int) -> tuple[Any, int]:
        return GOOD, 100 + gpu

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, int]:
        return GOOD, 100 + device

    def cuCtxSetCurrent(self, context: int) -> tuple[Any]:
        self.of_thread.gpu = context - 200
        return (GOOD,)

    def cuMemAlloc(self, size: int) -> tuple[Any, Any]:
        assert getattr(self.of_thread, "mode", None) is RELAXED, "refused while any thread captures"
        if self.out_of_memory:
            return NO_MEMORY, None
        made = torch.full((size // 4,), STALE, dtype=torch.int32)
        self.memory[made.data_ptr()] = made
        self.batches.append(self.of_thread.gpu)
        return GOOD, cuda.CUdeviceptr(made.data_ptr())

    def cuStreamCreate(self, kind: Any) -> tuple[Any, int]:
        assert kind == NON_BLOCKING, "it would wait for the default stream"
        self.streams.append(1000 + len(self.streams))
        return GOOD, self.streams[-1]

    def cuMemsetD8Async(self, memory: Any, value: int, size: int, stream: int) -> tuple[Any]:
        assert stream in self.streams, "somebody else's stream, which may be captured"
        filled = self.memory[int(memory)]
        assert size == 4 * filled.numel()
        filled.view(torch.uint8).fill_(value)
        self.unfinished.add(stream)
        return (GOOD,)

    def cuStreamSynchronize(self, stream: int) -> tuple[Any]:
        self.unfinished.discard(stream)
        return (GOOD,)

    def cuStreamDestroy(self, stream: int) -> tuple[Any]:
        self.streams.remove(stream)
        return (GOOD,)


def distinct(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no two of them have a byte in common."""
    places = sorted((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in tensors)
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
