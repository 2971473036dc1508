"""What a generated module asks of CUDA around a launch, on a machine without a GPU: streams, captures, new zeros.

A GPU's number stands for a device. What CUDA or torch would do to a fill in the wrong place is an AssertionError here:
into a graph that is being captured, into the pool of a thread that prepares one, without leave to allocate.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import pytest
import torch

RELAXED = cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
ACTIVE = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
NO_CAPTURE = cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
PER_THREAD = 2


class Stream(NamedTuple):
    """As torch.cuda.ExternalStream: a handle and the GPU's number."""

    handle: int
    gpu: int


@dataclass
class PretendedCuda:
    """Each thread has a current stream for each GPU, the default one at first; every GPU passes for a Hopper."""

    sms: int = 5
    current_gpu: int = 0
    captures: dict[int, int] = field(default_factory=dict)  # by handle of the stream: the capture that it is in
    asked: list[int] = field(default_factory=list)  # handles that the driver was asked about
    fills: list[int] = field(default_factory=list)  # the GPU of each fill that torch was asked for
    out_of_memory: bool = False
    told: tuple[Any, ...] = ()  # what the driver tells of a capture beside error, status and id
    error: cuda.CUresult = cuda.CUresult.CUDA_SUCCESS
    unfinished: set[Stream] = field(default_factory=set)
    of_thread: threading.local = field(default_factory=threading.local)

    def install(self, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put this in the place of CUDA, for a module and for what it asks of torch."""
        driver = SimpleNamespace(
            cuStreamGetCaptureInfo=self.capture_info,
            cuThreadExchangeStreamCaptureMode=self.exchange_mode,
            CUstreamCaptureMode=cuda.CUstreamCaptureMode,
            CUstreamCaptureStatus=cuda.CUstreamCaptureStatus,
        )
        facts = SimpleNamespace(major=9, minor=0, multi_processor_count=self.sms)
        monkeypatch.setattr(module, "cuda", driver)
        monkeypatch.setattr(module, "current_stream", self.current_stream)
        for name, pretended in {
            "current_device": lambda: self.current_gpu,
            "is_current_stream_capturing": lambda: self.current_stream(self.current_gpu) in self.captures,
            "get_device_properties": lambda gpu: facts,
            "ExternalStream": self.external_stream,
            "stream": self.stream,
        }.items():
            monkeypatch.setattr(torch.cuda, name, pretended)
        # On the devices of a GPU that is not there, torch makes CPU tensors.
        zeros, empty = torch.zeros, torch.empty
        monkeypatch.setattr(torch, "zeros", lambda *args, **facts: self.zeros(zeros, *args, **facts))
        monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **facts: empty(*shape, **facts))

    def current_stream(self, gpu: int) -> int:
        """The handle of the calling thread's current stream."""
        handles: dict[int, int] = self.of_thread.__dict__.setdefault("handles", {})
        return handles.get(gpu, 0)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream the calling thread's current one."""
        before = self.current_stream(stream.gpu)
        self.of_thread.handles[stream.gpu] = stream.handle
        yield
        self.of_thread.handles[stream.gpu] = before

    @contextlib.contextmanager
    def capture(self, handle: int, number: int, gpu: int = 0) -> Iterator[None]:
        """Capture what the calling thread launches on a stream."""
        with self.stream(Stream(handle, gpu)):
            self.captures[handle] = number
            yield
            del self.captures[handle]

    @contextlib.contextmanager
    def preparing_a_graph(self) -> Iterator[None]:
        """As torch.compile does: what the calling thread allocates goes to a pool that torch takes back."""
        self.of_thread.pool = "that of a graph"
        yield
        del self.of_thread.pool

    def external_stream(self, handle: int, gpu: int) -> Any:
        """A stream of this handle; each thread has its own of the handle PER_THREAD."""
        unfinished, stream = self.unfinished, Stream(handle, gpu)

        class External(Stream):
            def synchronize(self) -> None:
                """Wait for all fills."""
                unfinished.discard(stream)

        return External(handle, gpu)

    def capture_info(self, handle: int) -> tuple[Any, ...]:
        """As cuda.bindings.driver has it."""
        assert handle, "the driver refuses to be asked about the default stream while another one captures"
        self.asked.append(handle)
        number = self.captures.get(handle)
        return self.error, NO_CAPTURE if number is None else ACTIVE, cuda.cuuint64_t(number or 0), *self.told

    def exchange_mode(self, mode: Any) -> tuple[Any, Any]:
        """As cuda.bindings.driver has it."""
        self.of_thread.mode = mode
        return cuda.CUresult.CUDA_SUCCESS, None

    def zeros(self, make: Any, *args: Any, device: int | None = None, **facts: Any) -> torch.Tensor:
        """torch.zeros: on a GPU it must not be captured, and be allowed to allocate."""
        made: torch.Tensor = make(*args, **facts)
        if device is None:
            return made
        handle = self.current_stream(device)
        assert handle not in self.captures, "the fill is captured: each replay of the graph repeats it"
        assert handle, "the default stream, which CUDA refuses while a stream that waits for it captures"
        assert getattr(self.of_thread, "mode", None) is RELAXED, "cudaMalloc fails here while any thread captures"
        assert not hasattr(self.of_thread, "pool"), "torch.compile takes this memory back"
        self.fills.append(device)
        if self.out_of_memory:
            raise torch.cuda.OutOfMemoryError("no room for a test")
        self.unfinished.add(Stream(handle, device))
        return made


def distinct(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no two of them have a byte in common."""
    places = sorted((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in tensors)
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
