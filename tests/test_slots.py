"""The zeros that persistent modules keep between launches: who has which, when they are made, and in which thread."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from inspect import signature
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings.driver import CUresult
from pretended_cuda import PretendedCuda, distinct
from rendering import CHECKOUT, STEMS, plans
from torch.utils._python_dispatch import TorchDispatchMode

from fa3gen.compile.loading import load_file

# Tiles from a counter, with and without an LSE, and the last of them in shares.
DYNAMIC, DYNAMIC_O_ONLY, SPLIT = "fwd_d64_causal", "fwd_d64_window_o_only", "fwd_d64"
BOTH = "fwd_packed_shared_d64"
ALL = pytest.mark.parametrize("stem", [DYNAMIC, DYNAMIC_O_ONLY, SPLIT, BOTH])
# With factors of tensors of 8 bits: of K and V in a cache, of all of them.
FACTORS = [
    "fwd_packed_kv8_d128_causal",
    "fwd_paged_kv8_d128_causal",
    "fwd_fp8_d128_causal",
    "fwd_fp8_paged_d256_causal",
]
ONE, OTHER = 0x7000, 0x8000  # handles of streams


@pytest.fixture
def gpu() -> PretendedCuda:
    return PretendedCuda()


@pytest.fixture
def module(stem: str, gpu: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Fresh from its file: no slot was made yet."""
    fresh = load_file(CHECKOUT.module_path(stem), variety="slots")
    gpu.install(fresh, monkeypatch)
    monkeypatch.setattr(
        fresh, "empty", lambda shape, strides, dtype, gpu: torch.empty_strided(shape, strides, dtype=dtype)
    )
    return fresh


def scratch(module: ModuleType, gpu: int = 0) -> tuple[torch.Tensor, ...]:
    """What a launch is given: a counter, or flags and parts."""
    if hasattr(module, "tile_counter"):
        return (module.tile_counter(gpu),)
    return (module.flags_and_parts if hasattr(module, "flags_and_parts") else module.counter_flags_and_parts)(gpu)


def zeros(module: ModuleType, gpu: int = 0) -> torch.Tensor:
    """The slot of a launch: its counter, or its flags."""
    return scratch(module, gpu)[0]


def on(module: ModuleType, gpu: PretendedCuda, handle: int, *, device: int = 0) -> torch.Tensor:
    """The slot of a launch on this stream."""
    with gpu.stream(handle, device):
        return zeros(module, device)


def captured(module: ModuleType, gpu: PretendedCuda, handle: int, number: int) -> torch.Tensor:
    """The slot of a captured launch."""
    with gpu.capture(handle, number):
        return zeros(module)


@ALL
def test_a_slot_is_what_the_kernel_was_compiled_for(module: ModuleType, gpu: PretendedCuda) -> None:
    shape = (gpu.sms, module.CONSUMER_WARPS) if hasattr(module, "flags_and_parts") else (1,)
    for slot in (zeros(module), on(module, gpu, ONE)):
        assert (slot.shape, slot.dtype, slot.is_contiguous()) == (shape, torch.int32, True)
        assert not slot.any() and gpu.gave(slot)


@ALL
def test_launches_that_follow_one_another_share_a_slot(module: ModuleType, gpu: PretendedCuda) -> None:
    assert zeros(module) is zeros(module)
    assert on(module, gpu, ONE) is on(module, gpu, ONE)
    with gpu.capture(ONE, 1):
        assert zeros(module) is zeros(module)
    with ThreadPoolExecutor(1) as thread:  # threads take turns on a stream
        assert thread.submit(on, module, gpu, ONE).result() is on(module, gpu, ONE)


@ALL
def test_launches_that_may_run_at_once_share_none(module: ModuleType, gpu: PretendedCuda) -> None:
    slots = [zeros(module), on(module, gpu, ONE), on(module, gpu, OTHER)]
    slots += [captured(module, gpu, ONE, 1), captured(module, gpu, ONE, 2)]  # two graphs from one stream
    slots += [captured(module, gpu, OTHER, 2)]  # a graph with two branches
    slots += [zeros(module, 1), on(module, gpu, ONE, device=1)]  # two GPUs
    assert distinct(slots) and gpu.batches == [0, 1]
    again = [zeros(module), on(module, gpu, ONE), on(module, gpu, OTHER), captured(module, gpu, ONE, 1)]
    assert all(x is y for x, y in zip(again, slots, strict=False))


@ALL
def test_slots_do_not_run_out(module: ModuleType, gpu: PretendedCuda) -> None:
    count = 2 * module.SLOTS + 3
    slots = [captured(module, gpu, ONE, number) for number in range(1, count + 1)]
    assert distinct(slots) and not any(slot.any() for slot in slots)
    assert len(gpu.batches) == 3
    assert slots[0] is captured(module, gpu, ONE, 1)


@pytest.mark.parametrize("stem", [DYNAMIC])
def test_no_two_counters_share_a_cache_line(module: ModuleType, gpu: PretendedCuda) -> None:
    places = sorted(captured(module, gpu, ONE, number).data_ptr() for number in range(1, module.SLOTS + 1))
    assert {after - before for before, after in zip(places, places[1:], strict=False)} == {128}


@pytest.mark.parametrize("stem", [BOTH])
def test_counter_and_flags_stand_side_by_side(module: ModuleType, gpu: PretendedCuda) -> None:
    """In one slot, the counter in a cache line of its own; parts are a stream's, too, or else a call's."""
    for handle in (0, ONE):
        with gpu.stream(handle, 0):
            counter, flags, parts = scratch(module)
            again = scratch(module)
        assert (flags.shape, flags.dtype) == ((gpu.sms, module.CONSUMER_WARPS), torch.int32)
        assert flags.is_contiguous() and not flags.any() and gpu.gave(flags)
        assert flags.data_ptr() == counter.data_ptr() + 128
        assert parts.shape == (gpu.sms, *module.PART_SHAPE) and parts.is_contiguous()
        assert again[0] is counter and again[1] is flags and (again[2] is parts) == (handle == 0)


@ALL
def test_slots_are_zero_before_anybody_has_one(module: ModuleType, gpu: PretendedCuda) -> None:
    """For any stream, and in a graph: the fill is waited for, as nothing orders it before a launch elsewhere."""
    with gpu.capture(ONE, 1):
        assert not zeros(module).any()
    assert len(gpu.batches) == 1 and gpu.unfinished == set() and gpu.streams == []


@ALL
def test_the_calling_thread_stays_as_it_is(module: ModuleType, gpu: PretendedCuda) -> None:
    """It may capture, in a mode of its choice, and may be on another GPU's context."""
    before = {**vars(gpu.of_thread)}
    zeros(module)
    assert {**vars(gpu.of_thread), "handles": {}} == {**before, "handles": {}}


class Operations(TorchDispatchMode):
    """What torch is asked to do in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stem", [stem for stem in STEMS if plans()[stem].entry.keeps_scratch])
@pytest.mark.parametrize("handle", [0, ONE], ids=["default stream", "captured"])
def test_a_call_allocates_and_fills_nothing(
    module: ModuleType, handle: int, gpu: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the memory of its results, and parts on other streams: what torch does there, a graph repeats."""
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "compile_for_sm90a", lambda: lambda *arguments: launches.append(arguments))
    constants: dict[str, Any] = {"launch_constants": (gpu.sms, torch.empty(1, 1, 0)), "sm_count": gpu.sms}
    constants["packed_constants"] = gpu.sms, torch.empty(0, dtype=torch.int32), torch.empty(1, 0)
    constants["unit_factor"] = torch.ones(1, 1)
    for name, shared in constants.items():
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda gpu, shared=shared: shared)
    v_dim, cpu = getattr(module, "HEAD_DIM_V", module.HEAD_DIM), -1  # what CPU tensors say for their GPU
    q, k = (torch.empty((1, 8, heads, module.HEAD_DIM), dtype=module.TORCH_DTYPE) for heads in (8, 1))
    v = torch.empty((1, 8, 1, v_dim), dtype=module.TORCH_DTYPE)
    if hasattr(module, "KEYS_OF_UNIT"):  # of a v whose keys are permuted: whole units, side by side
        v = torch.empty((1, v_dim, 1, module.KEYS_OF_UNIT), dtype=module.TORCH_DTYPE).permute(0, 3, 2, 1)
    arguments, options = [q, k, v], {"sinks": torch.zeros(8), "softcap": 30.0}
    if packed := hasattr(module, "packed_constants"):
        arguments = [q[0], k[0], v[0], *[torch.tensor([0, 8], dtype=torch.int32)] * 2]
    if "page_table" in signature(module.attention).parameters:  # a page of 128 keys
        k, v = (x[:, :1].expand(1, 128, 1, -1).contiguous() for x in (k, v))
        arguments = [q[0], k, v, torch.tensor([0, 8], dtype=torch.int32)]
        arguments += [torch.zeros((1, 1), dtype=torch.int32), torch.tensor([8], dtype=torch.int32)]
    options = {name: option for name, option in options.items() if name in signature(module.attention).parameters}
    gpu.current_gpu = cpu
    if handle:
        gpu.captures[handle] = 1
    with gpu.stream(handle, cpu), torch.no_grad():
        splits = hasattr(module, "default_scratch")
        for parts in (splits, splits and handle != 0):
            with Operations() as seen:
                module.attention(*arguments, **options)
            asked = [
                name for name in seen.names if not re.match(r"aten\.(view|slice|detach|expand)\.", name)
            ]  # which are no memory
            assert asked == ["aten.empty_strided.default"] * (1 + parts)
    first, second = ([x for x in launch if getattr(x, "dtype", None) == torch.int32] for launch in launches)
    # Behind the offsets, and the lengths that were not given: a counter, flags, or both.
    kept = 1 + hasattr(module, "counter_flags_and_parts")
    assert len(first) == kept + 4 * packed
    assert all(x is y for x, y in zip(first[-kept:], second[-kept:], strict=True))


@pytest.mark.parametrize("stem", FACTORS)
def test_a_factor_that_a_graph_fills_is_not_kept(
    module: ModuleType, gpu: PretendedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is the graph's, which other calls would read; one that is kept is waited for: any stream reads it."""
    ones, waits = torch.ones, list[int]()
    monkeypatch.setattr(torch, "ones", lambda *shape, device, **facts: ones(*shape, **facts))
    streams = {number: SimpleNamespace(synchronize=partial(waits.append, number)) for number in range(2)}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    with gpu.capture(ONE, 1):
        found = [module.unit_factor(0), module.unit_factor(0)]
    assert waits == []
    kept = module.unit_factor(0)
    assert distinct([*found, kept]) and waits == [0]
    with gpu.capture(ONE, 2):
        assert module.unit_factor(0) is kept
    assert distinct([kept, module.unit_factor(1)]) and waits == [0, 1]


@pytest.mark.parametrize("stem", [SPLIT])
def test_parts(module: ModuleType, gpu: PretendedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the default stream they stay; others come from torch's allocator, which keeps those of a graph for it."""
    _, parts = scratch(module)
    assert parts.shape == (gpu.sms, *module.PART_SHAPE) and parts.is_contiguous()
    assert scratch(module)[1] is parts
    for number in range(2):
        with gpu.capture(ONE, number + 1):
            others = [scratch(module)[1], scratch(module)[1]]
        assert distinct([parts, *others])
        assert all((x.shape, x.stride(), x.dtype) == (parts.shape, parts.stride(), parts.dtype) for x in others)


# The driver


@ALL
def test_the_driver_is_asked_only_where_a_graph_may_be_captured(module: ModuleType, gpu: PretendedCuda) -> None:
    zeros(module)
    on(module, gpu, ONE)
    assert gpu.asked == []
    captured(module, gpu, ONE, 1)
    assert gpu.asked == [ONE]


@ALL
def test_a_capture_on_another_than_the_current_gpu(module: ModuleType, gpu: PretendedCuda) -> None:
    """torch says of the current GPU's stream whether it is captured; the driver says it of any."""
    gpu.current_gpu = 1
    assert distinct([captured(module, gpu, ONE, 1), captured(module, gpu, ONE, 2), on(module, gpu, ONE)])


@ALL
@pytest.mark.parametrize("told", [("graph", [], 0), ("graph", [], [], 0)], ids=["12", "13"])
def test_what_two_versions_of_cuda_bindings_return(module: ModuleType, told: Any, gpu: PretendedCuda) -> None:
    gpu.told = told
    assert distinct([captured(module, gpu, ONE, 1), captured(module, gpu, ONE, 2)])


@pytest.mark.parametrize("stem", [DYNAMIC])
def test_an_error_of_the_driver(module: ModuleType, gpu: PretendedCuda) -> None:
    gpu.error = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    message = "the CUDA driver returned .*CUDA_ERROR_ILLEGAL_ADDRESS"
    with gpu.capture(ONE, 1), pytest.raises(RuntimeError, match=message):
        zeros(module)


@ALL
def test_no_memory_is_an_error_of_that_call_only(module: ModuleType, gpu: PretendedCuda) -> None:
    gpu.out_of_memory = True
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        zeros(module)
    gpu.out_of_memory = False
    assert not zeros(module).any()


@ALL
def test_many_threads_at_once(module: ModuleType, gpu: PretendedCuda) -> None:
    """Each on a stream of its own, all for the first time."""
    count = module.SLOTS + 8
    at_once = threading.Barrier(count, timeout=60)

    def launch(number: int) -> torch.Tensor:
        at_once.wait()
        return on(module, gpu, 8 * (number + 1))

    with ThreadPoolExecutor(count) as threads:
        assert distinct(threads.map(launch, range(count)))
    assert len(gpu.batches) == 2
