"""On a machine with a Hopper GPU: a captured call is one kernel, and nobody is disturbed by another's zeros.

What `tests/test_slots.py` says of the slots of persistent modules, with CUDA's own captures, streams and pools; and a
soak of random calls. See also `test_launches_at_the_same_time_do_not_disturb_each_other`.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda.bindings.driver as cuda
import production
import pytest
import torch
from production import SMALL, Problem, Shape

import fa3gen
from fa3gen.compile.cache import cached_object
from fa3gen.design.operation import operation_of
from fa3gen.design.workspace import Workspace
from fa3gen.run.launch import load_for_launch
from fa3gen.verify.inputs import served_heads
from fa3gen.verify.runner import same_bits

WORKSPACE = Workspace.find(Path(__file__).parent)
VARIANTS = {variant.stem: variant for spec_file in WORKSPACE.load_all() for variant in spec_file.variants}
# Those for packed sequences: test_packed.py.
PRODUCTION = [
    stem for stem, each in VARIANTS.items() if stem.startswith("fwd_") and each.spec.problem.layout == "dense"
]
PERSISTENT = [stem for stem in PRODUCTION if any(each.kept for each in operation_of(VARIANTS[stem].spec).scratch)]
# Tiles from a counter, and the last of them in shares.
SOME = pytest.mark.parametrize("stem", ["fwd_d64_causal", "fwd_d128"])
SOAK_SECONDS, SOAK_SEED = 40, 17
KERNEL = cuda.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch, hopper: Any) -> None:
    """And with nothing of the test before left in torch's allocator."""
    monkeypatch.chdir(WORKSPACE.root)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def fresh(stem: str, hopper: Any) -> tuple[ModuleType, Problem]:
    """A module whose kernel is loaded and that has no slot yet, and a call of it."""
    module = load_for_launch(WORKSPACE.module_path(stem))
    problem = Problem(module, VARIANTS[stem].spec, hopper, SMALL, seed=1)
    problem.attend()
    torch.cuda.synchronize()
    without_slots(module)
    return module, problem


def without_slots(module: Any) -> None:
    """As if nobody had called it."""
    module.unused.clear()
    module.slot.cache_clear()
    for name in ("default_scratch", "counter_and_flags"):
        if hasattr(module, name):
            getattr(module, name).cache_clear()


def slots_made(module: Any) -> int:
    """How many slots were given out."""
    count: int = module.slot.cache_info().currsize
    return count


def recorded_slots(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """A list to which each slot is added when it is given out."""
    slots: list[torch.Tensor] = []
    take: Callable[[int], torch.Tensor] = module.unused_slot

    def recorded(gpu: int) -> torch.Tensor:
        slots.append(take(gpu))
        return slots[-1]

    monkeypatch.setattr(module, "unused_slot", recorded)
    return slots


def past_torch(slots: list[torch.Tensor]) -> bool:
    """Whether none of them lies in memory of torch's allocator, of a graph's pool or any other."""
    ends = [(found["address"], found["address"] + found["total_size"]) for found in torch.cuda.memory_snapshot()]
    return not any(start <= slot.data_ptr() < end for slot in slots for start, end in ends)


def nodes(graph: torch.cuda.CUDAGraph) -> dict[Any, int]:
    """How many nodes of each type a graph has, which was captured with keep_graph."""
    raw = cuda.CUgraph(graph.raw_cuda_graph())
    error, _, count = cuda.cuGraphGetNodes(raw)
    assert not error
    error, found, _ = cuda.cuGraphGetNodes(raw, count)
    assert not error
    return dict(Counter(cuda.cuGraphNodeGetType(node)[1] for node in found))


@pytest.mark.parametrize("stem", PRODUCTION)
def test_a_captured_call_is_kernels_alone(stem: str, hopper: Any) -> None:
    """No fill, no copy; with an out, and with what the call makes. Keys in several parts take a second kernel."""
    spec = VARIANTS[stem].spec
    problem = Problem(load_for_launch(WORKSPACE.module_path(stem)), spec, hopper, SMALL, seed=2)
    wanted = problem.attend()
    options: dict[str, Any] = {"return_lse": True} if spec.outputs.lse else {}
    tensors = problem.q, problem.k, problem.v_given
    for calls in (1, 3):
        for given in ({}, {"out": torch.full_like(wanted.out, torch.nan)}):
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graph):
                named = {**problem.window, **problem.keywords, **options, **given}
                found = [problem.module.attention(*tensors, **named) for _ in range(calls)]
            assert nodes(graph) in [{KERNEL: calls * each} for each in range(1, operation_of(spec).kernels + 1)]
            for _ in range(3):
                graph.replay()
            torch.cuda.synchronize()
            for each in found:
                out, lse = each if options else (each, wanted.lse)
                assert not production.differs(production.Attention(out, lse), wanted)


@SOME
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_the_first_slots_are_made_during_a_capture(
    stem: str, mode: str, hopper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By cudaMalloc and a fill, which a capture forbids or takes for its own."""
    module, problem = fresh(stem, hopper)
    slots = recorded_slots(module, monkeypatch)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, capture_error_mode=mode):
        out, lse = module.attention(problem.q, problem.k, problem.v_given, **problem.keywords, return_lse=True)
    assert len(slots) == 1 and past_torch(slots) and slots[0].is_cuda
    assert nodes(graph) == {KERNEL: 1}
    wanted = problem.attend()
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert not production.differs(production.Attention(out, lse), wanted)
    assert not any(slot.any() for slot in slots)


def test_the_first_slots_are_made_while_another_thread_captures(hopper: Any) -> None:
    """In mode "global", which forbids cudaMalloc in all threads: to torch's allocator, too, which parts would need."""
    module, problem = fresh("fwd_d64_causal", hopper)
    wanted = problem.attend()
    out, x, stream = torch.empty_like(wanted.out), torch.zeros(8, device=hopper), torch.cuda.Stream()

    def launch() -> None:
        with torch.cuda.stream(stream):
            module.attention(problem.q, problem.k, problem.v_given, **problem.keywords, out=out.fill_(torch.nan))

    launch()
    torch.cuda.synchronize()
    without_slots(module)
    graph = torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as thread, torch.cuda.graph(graph, capture_error_mode="global"):
        x += 1
        thread.submit(launch).result()
        x += 1
    torch.cuda.synchronize()
    assert slots_made(module) == 1 and same_bits(out, wanted.out)
    graph.replay()
    assert x.eq(2).all()


@SOME
def test_more_graphs_than_slots_of_a_batch(stem: str, hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All replayed at once."""
    module, _ = fresh(stem, hopper)
    monkeypatch.setattr(module, "SLOTS", 3)
    slots = recorded_slots(module, monkeypatch)
    problems = [Problem(module, VARIANTS[stem].spec, hopper, SMALL, seed) for seed in range(10)]
    wrong = list(production.undisturbed(problems, production.graphs_at_once(hopper, times=3, launches=5)))
    assert not wrong, "\n".join(wrong)
    assert len(slots) == 11 and len({slot.data_ptr() for slot in slots}) == 11  # with that of the default stream
    assert past_torch(slots) and not any(slot.any() for slot in slots)


@SOME
def test_branches_of_one_graph(stem: str, hopper: Any) -> None:
    """Two streams of one capture may run at once in every replay."""
    module, _ = fresh(stem, hopper)
    problems = [Problem(module, VARIANTS[stem].spec, hopper, SMALL, seed) for seed in range(2)]
    wanted = [problem.attend() for problem in problems]
    before = slots_made(module)
    torch.cuda.synchronize()
    graph, branch, found = torch.cuda.CUDAGraph(), torch.cuda.Stream(), []
    with torch.cuda.graph(graph):
        trunk = torch.cuda.current_stream()
        branch.wait_stream(trunk)
        for stream, problem in zip((trunk, branch), problems, strict=True):
            with torch.cuda.stream(stream):
                found += [[problem.attend() for _ in range(4)]]
        trunk.wait_stream(branch)
    assert slots_made(module) == before + 2
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert not any(production.differs(each, right) for some, right in zip(found, wanted, strict=True) for each in some)


@SOME
def test_streams_that_end_while_they_work(stem: str, hopper: Any) -> None:
    """CUDA gives a handle out again when the work of the stream that had it is done."""
    module, problem = fresh(stem, hopper)
    wanted = problem.attend()
    outs = [torch.full_like(wanted.out, torch.nan) for _ in range(60)]
    torch.cuda.synchronize()
    handles = set()
    for out in outs:
        error, stream = cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        assert not error
        handles.add(int(stream))
        with torch.cuda.stream(torch.cuda.ExternalStream(int(stream))):
            torch.cuda._sleep(1_000_000)
            module.attention(problem.q, problem.k, problem.v_given, **problem.keywords, out=out)
        assert not cuda.cuStreamDestroy(stream)[0]
    torch.cuda.synchronize()
    assert slots_made(module) == 1 + len(handles)
    assert [number for number, out in enumerate(outs) if not same_bits(out, wanted.out)] == []


def fills(events: Any) -> list[str]:
    """What of a profile's work on the GPU is a fill."""
    names = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    assert any("attention_kernel" in name for name in names), names
    return [name for name in names if "fill" in name.lower() or "memset" in name.lower()]


@SOME
def test_graph_trees(stem: str, hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile(mode="reduce-overhead"): right over many replays and new graphs, eager calls between them.

    Its graphs share a pool whose memory they take back from one another, warming up and recording; slots made meanwhile
    are not in it. The module is called by an operator of the test, for the dispatch table may name another.
    """
    module, _ = fresh(stem, hopper)
    slots = recorded_slots(module, monkeypatch)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module.attention(q, k, v)
        return out

    operator: Any = torch.library.custom_op(f"test_slots::{stem}", attend, mutates_args=())
    operator.register_fake(lambda q, k, v: torch.empty_like(q))

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        once = operator(q * 0.5, k, v)
        twice: torch.Tensor = operator(once, k, v) + once
        return twice

    generator = torch.Generator(hopper).manual_seed(3)

    def draw(seq: int) -> tuple[torch.Tensor, ...]:
        facts: dict[str, Any] = {"dtype": module.TORCH_DTYPE, "device": hopper, "generator": generator}
        return tuple(torch.randn((2, seq, heads, module.HEAD_DIM), **facts) for heads in (8, 2, 2))

    lengths = (300, 1100, 2000)  # a graph each
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead", dynamic=False)
        for _ in range(2):  # recorded and replayed, then with other graphs replayed before
            for seq in lengths:
                for _ in range(12):
                    torch.compiler.cudagraph_mark_step_begin()
                    tensors = draw(seq)
                    found = compiled(*tensors).clone()
                    assert same_bits(found, model(*tensors))
        assert len(slots) > len(lengths) and past_torch(slots) and not any(slot.any() for slot in slots)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            torch.compiler.cudagraph_mark_step_begin()
            compiled(*tensors)
            torch.cuda.synchronize()
        assert fills(profile.events()) == []
    torch._dynamo.reset()


def decks(stems: list[str], chance: random.Random, size: int) -> Iterator[list[str]]:
    """All modules in turn, so many at a time, in another order each time around."""
    deck: list[str] = []
    while True:
        if len(deck) < size:
            deck += chance.sample(stems, len(stems))
        yield [deck.pop(0) for _ in range(size)]


def random_problem(stem: str, device: Any, chance: random.Random) -> Problem:
    """A call of a random size, from a single tile to some waves of tiles."""
    spec = VARIANTS[stem].spec
    heads_kv = chance.choice([1, 2, 4])
    heads = served_heads(heads_kv * chance.choice([1, 2, 8]), heads_kv, spec.tile.pack_heads)
    seq_q, seq_k = (chance.randint(1, chance.choice(most)) for most in ([64, 400, 1500], [100, 700, 2500]))
    shape = Shape(chance.randint(1, 3), seq_q, seq_k, heads, heads_kv)
    return Problem(fa3gen.load(stem), spec, device, shape, seed=chance.randrange(2**31))


def test_soak(hopper: Any) -> None:
    """Random calls of all persistent modules on four streams, many from graphs: the bits that each gives alone."""
    for stem in PERSISTENT:  # outside the time: compiling takes longer than the soak
        cached_object(WORKSPACE.module_path(stem))
    for stem in PERSISTENT:
        Problem(fa3gen.load(stem), VARIANTS[stem].spec, hopper, SMALL, seed=0).attend()
    chance, called = random.Random(SOAK_SEED), set()
    deck, end = decks(PERSISTENT, chance, size=12), time.monotonic() + SOAK_SECONDS
    for rounds, stems in enumerate(deck, 1):
        chosen = [*stems, *chance.choices(stems, k=12)]  # and calls of one module beside one another
        wrong = list(production.soak([random_problem(stem, hopper, chance) for stem in chosen], hopper, chance))
        assert not wrong, f"round {rounds} of seed {SOAK_SEED}:\n" + "\n".join(wrong)
        called |= set(stems)
        if called == set(PERSISTENT) and time.monotonic() > end:
            break
    print(f"{rounds} rounds of 24 calls")


ABORTED = """
import sys
import torch
import fa3gen

module = fa3gen.load(sys.argv[1])
heads = {"dtype": torch.bfloat16, "device": "cuda"}
q, k, v = (torch.randn((1, 300, 2, module.HEAD_DIM), **heads) for _ in range(3))
module.attention(q, k, v)
torch.cuda.synchronize()
try:
    torch.zeros(1, device="cuda")[torch.full((1,), 7, device="cuda")]  # an assertion on the device ends that kernel
    torch.cuda.synchronize()
except RuntimeError:
    print("aborted")
try:
    module.attention(q, k, v)
    torch.cuda.synchronize()
except RuntimeError:
    print("refused")
"""


@SOME
def test_after_an_aborted_kernel_nothing_is_computed(stem: str) -> None:
    """Any kernel that is aborted takes the context with it, and so all slots: no call after it can find old ones."""
    command = [sys.executable, "-c", ABORTED, stem]
    process = subprocess.run(command, cwd=WORKSPACE.root, capture_output=True, text=True)
    assert process.stdout.split() == ["aborted", "refused"], process.stdout + process.stderr


FIRST_CALL = """
import sys
import torch
import fa3gen

module = fa3gen.load(sys.argv[1])
heads = {"dtype": torch.bfloat16, "device": "cuda"}
q, k, v = (torch.randn((1, 300, 2, module.HEAD_DIM), **heads) for _ in range(3))
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        out = module.attention(q, k, v)
except Exception as error:
    out = None
    print("refused:", *str(error).split())
wanted = module.attention(q, k, v)
for _ in range(3 if out is not None else 0):
    out.fill_(torch.nan)
    graph.replay()
    assert out.equal(wanted)
print("right")
"""


@SOME
def test_a_kernel_that_is_first_called_in_a_capture(stem: str) -> None:
    """README says to call it before: loading code may be refused there. Either way nothing is broken by it."""
    cached_object(WORKSPACE.module_path(stem))
    command = [sys.executable, "-c", FIRST_CALL, stem]
    process = subprocess.run(command, cwd=WORKSPACE.root, capture_output=True, text=True)
    print(process.stdout)
    assert process.returncode == 0 and process.stdout.split()[-1] == "right", process.stdout + process.stderr
