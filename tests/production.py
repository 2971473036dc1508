"""What a production module has to stand on a GPU, as functions of a module and sizes: see tests/gpu/test_production.py.

`tests/cpu/test_production_checks.py` runs those that need no stream at tiny sizes on the CPU model, and all of them on
modules that are wrong on purpose. Each function returns what is wrong in words, nothing when all is well.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fa3gen.design.family import Family
from fa3gen.design.masks import of_call, options_of_call, reach
from fa3gen.design.operation import operation_of
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.spec.model import Forward, Spec
from fa3gen.verify import inputs, reference
from fa3gen.verify.attention_on_gpu import compare_lse
from fa3gen.verify.inputs import Case
from fa3gen.verify.reference import Attention
from fa3gen.verify.runner import raise_if_lost, same_bits

Call = Callable[[], Attention]

# Where a tensor lies in memory: its modes from the slowest to the fastest.
PLACES = {"batch": "bshd", "head": "hbsd", "sequence": "sbhd"}
# Relative Frobenius error of O; 16-bit kernels read about 0.002, those of 8 bits, whose P has 4, 0.025. What it finds
# is a wrong address.
TOLERANCE, TOLERANCE_8BIT = 0.01, 0.04


class Shape(NamedTuple):
    """Sizes of one call."""

    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int


# Tiles of queries are 128 or 192 rows: the first leaves most of the 132 SMs to others, the second takes all of them
# several times.
SMALL, LARGE = Shape(1, 400, 1000, 8, 1), Shape(3, 1500, 900, 16, 2)
# On any device, by the runner of `fa3gen verify`, with its criteria.
MANY_KEYS = Case("keys_128k", "131,072 keys", 1, 200, 131_072, 2, 1, layout="contiguous")
MANY_HEADS = Case("heads_beyond_65535", "257 x 256 = 65,792 heads", 257, 2, 9, 256, 32, layout="contiguous")


class Problem:
    """One call of a module: tensors on a device, and the call itself."""

    def __init__(self, module: Any, spec: Spec, device: torch.device, shape: Shape, seed: int) -> None:
        """Draw the inputs on the device, with as many query heads as the tiles of `spec` need."""
        self.module, self.spec, self.window = module, spec, options_of_call(spec.mask)
        batch, seq_q, seq_k, heads_q, heads_kv = shape
        heads_q = inputs.served_heads(heads_q, heads_kv, whole_pack(spec))
        if isinstance(spec, Forward) and spec.tile.holds_group:  # room for so many heads of a kv head, and no more
            heads_q = min(heads_q, heads_kv * spec.tile.pack_heads)
        generator = torch.Generator(device).manual_seed(seed)
        dim, v_dim = spec.problem.head_dim, spec.problem.v_dim

        def draw(seq: int, heads: int, width: int) -> torch.Tensor:
            return inputs.normal((batch, seq, heads, width), DTYPES[spec.problem.dtype], device, generator)

        self.q, self.k, self.v = draw(seq_q, heads_q, dim), draw(seq_k, heads_kv, dim), draw(seq_k, heads_kv, v_dim)
        self.v_given = inputs.laid_out(operation_of(spec).tensor("v"), self.v)  # as the module takes it
        self.out_shape = (batch, seq_q, heads_q, v_dim)
        self.keywords = keywords_of(spec, self.q)

    def attend(self, out: torch.Tensor | None = None) -> Attention:
        """Call the module on poisoned outputs; without an LSE output the result's LSE is empty."""
        batch, seq_q, heads, _ = self.out_shape
        if out is None:
            out = torch.full(self.out_shape, math.nan, dtype=DTYPES[self.spec.o_dtype].in_torch(), device=self.q.device)
        options: dict[str, Any] = {"return_lse": True} if self.spec.outputs.lse else {}
        options |= self.keywords
        # What the allocator hands out next for an LSE is this, freed again at once.
        torch.full((batch, heads, seq_q), math.nan, dtype=torch.float32, device=self.q.device)
        try:
            found = self.module.attention(self.q, self.k, self.v_given, out=out, **self.window, **options)
        except RuntimeError as error:
            raise_if_lost(self.q.device, error)
            raise
        return Attention(*found) if self.spec.outputs.lse else Attention(out, torch.empty(0, device=out.device))


def whole_pack(spec: Spec) -> int:
    """Query heads of a tile, of which it needs all; 1 where a group may have fewer."""
    return 1 if spec.tile.holds_group else spec.tile.pack_heads


def keywords_of(spec: Spec, q: torch.Tensor) -> dict[str, Any]:
    """What a call of the module takes by name."""
    return inputs.usual_keywords(Family.of(spec).keywords, q.shape[2], q.device)


def differs(found: Attention, wanted: Attention) -> bool:
    """Whether any bit of O or LSE is another."""
    return not (same_bits(found.out, wanted.out) and same_bits(found.lse, wanted.lse))


def wrong_numbers(found: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: Spec, lse: bool) -> str:
    """What is wrong with O and LSE of these tensors, against float64."""
    expected = reference.attention(q, k, v, reach=reach(of_call(spec.mask)), **keywords_of(spec, q))
    error = ((found.out.double() - expected.out).norm() / expected.out.norm()).item()
    if not error <= (TOLERANCE_8BIT if Family.of(spec).eight_bits else TOLERANCE):
        return f"O is off by {error:.3g}"
    if not lse:
        return ""
    of_sums = None
    if Family.of(spec).eight_bits:  # of 8 bits a tensor core cuts sums off
        of_sums = reference.sum_slack(q, k, reach=reach(of_call(spec.mask)), **keywords_of(spec, q))
    _, wrong = compare_lse(found.lse, expected.lse, slack=of_sums)
    return "LSE is off" if wrong else ""


def repeated_launches(problem: Problem, launches: int) -> Iterator[str]:
    """The same bits from every launch. All results are kept, so that none of them is what an earlier one left."""
    first, *others = [problem.attend() for _ in range(launches)]
    wrong = wrong_numbers(first, problem.q, problem.k, problem.v, problem.spec, problem.spec.outputs.lse)
    if wrong:
        yield wrong
    changed = [number for number, other in enumerate(others, 2) if differs(other, first)]
    if changed:
        yield f"{len(changed)} of {launches} launches differ from the first: {changed[:8]}"


def undisturbed(
    problems: Sequence[Problem], at_once: Callable[[Sequence[Call]], Iterator[Sequence[Sequence[Attention]]]]
) -> Iterator[str]:
    """The same bits from calls that run at the same time as from calls one after the other.

    `at_once` yields, for each time that it has run them all, the results of every call.
    """
    alone = [problem.attend() for problem in problems]
    for time, results in enumerate(at_once([problem.attend for problem in problems]), 1):
        for number, (found, wanted) in enumerate(zip(results, alone, strict=True), 1):
            wrong = sum(differs(result, wanted) for result in found)
            if wrong or not found:
                yield f"time {time}: {wrong} of {len(found)} results of call {number} are not what it gives alone"


def streams_at_once(device: torch.device, times: int, launches: int) -> Callable[[Sequence[Call]], Iterator[Any]]:
    """Every call on a stream of its own, `launches` times, launched in turn; all streams are let go at once."""

    def run(calls: Sequence[Call]) -> Iterator[list[list[Attention]]]:
        streams = [torch.cuda.Stream(device) for _ in calls]
        for _ in range(times):
            hold(streams)
            results: list[list[Attention]] = [[] for _ in calls]
            for _ in range(launches):
                for stream, call, found in zip(streams, calls, results, strict=True):
                    with torch.cuda.stream(stream):
                        found.append(call())
            torch.cuda.synchronize(device)
            yield results

    return run


def graphs_at_once(device: torch.device, times: int, launches: int) -> Callable[[Sequence[Call]], Iterator[Any]]:
    """Every call captured in a graph of its own; all graphs replayed at once, each `launches` times, then looked at."""

    def run(calls: Sequence[Call]) -> Iterator[list[list[Attention]]]:
        torch.cuda.synchronize(device)
        captured = [capture(call) for call in calls]
        graphs, results = [graph for graph, _ in captured], [[result] for _, result in captured]
        streams = [torch.cuda.Stream(device) for _ in calls]
        for _ in range(times):
            for (result,) in results:
                poison(result)
            hold(streams)
            for _ in range(launches):
                for stream, graph in zip(streams, graphs, strict=True):
                    with torch.cuda.stream(stream):
                        graph.replay()
            torch.cuda.synchronize(device)
            yield results

    return run


def graphs_beside_streams(device: torch.device, times: int, launches: int) -> Callable[[Sequence[Call]], Iterator[Any]]:
    """Every call `launches` times, all at once: every other one as a graph, the last on the default stream."""

    def run(calls: Sequence[Call]) -> Iterator[list[list[Attention]]]:
        torch.cuda.synchronize(device)
        captured = [capture(call) if number % 2 == 0 else None for number, call in enumerate(calls[:-1])] + [None]
        streams = [torch.cuda.Stream(device) for _ in calls[1:]] + [torch.cuda.default_stream(device)]
        for _ in range(times):
            results: list[list[Attention]] = [[] if graph is None else [graph[1]] for graph in captured]
            for (result,) in (found for found in results if found):
                poison(result)
            hold(streams)
            for _ in range(launches):
                for stream, call, graph, found in zip(streams, calls, captured, results, strict=True):
                    with torch.cuda.stream(stream):
                        if graph is None:
                            found.append(call())
                        else:
                            graph[0].replay()
            torch.cuda.synchronize(device)
            yield results

    return run


def soak(problems: Sequence[Problem], device: torch.device, chance: random.Random) -> Iterator[str]:
    """The same bits from calls in any order, some of them captured, on four streams, as from one after the other."""
    alone = [problem.attend() for problem in problems]
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device) for _ in range(4)]
    captured = {number: capture(problem.attend) for number, problem in enumerate(problems) if chance.random() < 0.4}
    for _, result in captured.values():
        poison(result)
    results: list[list[Attention]] = [
        [captured[number][1]] if number in captured else [] for number in range(len(alone))
    ]
    # A graph may be launched on any stream, even before it has run on another: CUDA lets it run once at a time. But its
    # outputs are poisoned in it, so that what is looked at in the end is what its last run wrote.
    order = [number for number in range(len(problems)) for _ in range(chance.randint(1, 3))]
    chance.shuffle(order)
    hold(streams)
    for number in order:
        with torch.cuda.stream(chance.choice(streams)):
            if number in captured:
                captured[number][0].replay()
            else:
                results[number].append(problems[number].attend())
    torch.cuda.synchronize(device)
    for number, (problem, wanted) in enumerate(zip(problems, alone, strict=True)):
        wrong = sum(differs(result, wanted) for result in results[number])
        if wrong:
            how = "from a graph" if number in captured else "on a stream"
            sizes = tuple(problem.q.shape), tuple(problem.k.shape)
            yield f"{problem.module.__name__}, q and k {sizes}: {wrong} of {len(results[number])} results {how} differ"


def capture(call: Call) -> tuple[torch.cuda.CUDAGraph, Attention]:
    """A graph of one call, and where its results will be."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    # Without torch.cuda.graph, which collects garbage first: that takes longer than all the rest.
    with torch.cuda.stream(stream):
        graph.capture_begin()
        result = call()
        graph.capture_end()
    return graph, result


def poison(result: Attention) -> None:
    """Make all of a result NaN, so that what is not written again shows."""
    result.out.fill_(math.nan)
    result.lse.fill_(math.nan)


def hold(streams: Sequence[Any]) -> None:
    """Have the streams wait for some 20 ms, in which the host queues their work; and for the current stream's."""
    torch.cuda._sleep(40_000_000)  # cycles of about 0.5 ns
    gate = torch.cuda.Event()
    gate.record()
    for stream in streams:
        stream.wait_event(gate)


def large_strides(problem: Problem, elements: int) -> Iterator[str]:
    """The same bits from tensors whose batches, heads or rows lie `elements` and more apart as from dense ones."""
    wanted = problem.attend()
    for mode, order in PLACES.items():
        far = Problem.__new__(Problem)
        far.__dict__.update(problem.__dict__)
        far.q, far.k, far.v = (spread(x, order, elements) for x in (problem.q, problem.k, problem.v))
        far.v_given = far.v
        if Family.of(problem.spec).by_sequence:  # then the rows of other tensors are its columns
            far.v_given = spread(problem.v_given.transpose(1, 3), order, elements).transpose(1, 3)
        out = spread(torch.full_like(wanted.out, math.nan), order, elements)
        if differs(far.attend(out), wanted):
            yield f"O or LSE changes when strides of the {mode} reach over {elements} elements"


def spread(x: torch.Tensor, order: str, elements: int) -> torch.Tensor:
    """A copy of (batch, seq, heads, d) in memory of its own whose first mode of `order` reaches over `elements`."""
    sizes = dict(zip("bshd", x.shape, strict=True))
    slowest, *others = order
    strides, dense = {}, 1
    for mode in reversed(others):
        strides[mode], dense = dense, dense * sizes[mode]
    # Rows stay 16-byte aligned; one more row than asked for, so that the last one begins beyond.
    vector = 16 // x.element_size()
    strides[slowest] = max(dense, -(-elements // max(1, sizes[slowest] - 1)) + vector & -vector)
    storage = torch.empty(strides[slowest] * (sizes[slowest] - 1) + dense, dtype=x.dtype, device=x.device)
    view = storage.as_strided(x.shape, [strides[mode] for mode in "bshd"])
    return view.copy_(x)


def many_elements(
    module: Any, spec: Spec, device: torch.device, elements: int, *, seq: int, heads: int
) -> Iterator[str]:
    """Dense tensors of more than `elements` elements each: batches from all over them, against the reference."""
    heads = inputs.served_heads(heads, heads, whole_pack(spec))
    kv_heads = heads // whole_pack(spec)
    narrow = min(spec.problem.head_dim, spec.problem.v_dim)
    batch = elements * 5 // 4 // (seq * kv_heads * narrow) + 1  # a fifth of the batches begins beyond
    problem = Problem(module, spec, device, Shape(batch, seq, seq, heads, kv_heads), seed=5)
    sizes = [x.numel() for x in (problem.q, problem.k, problem.v)]
    if min(sizes) < elements:
        yield f"the tensors have {sizes} elements; {elements} were wanted"
    found = problem.attend()
    if torch.isnan(found.out[:, 0, 0, 0]).any():
        yield "rows of O were not written"
    for number in sorted({0, 1, batch // 3, batch // 2, batch * 4 // 5, batch - 2, batch - 1}):
        one = slice(number, number + 1)
        part = Attention(found.out[one], found.lse[one])
        wrong = wrong_numbers(part, problem.q[one], problem.k[one], problem.v[one], spec, spec.outputs.lse)
        if wrong:
            yield f"batch {number} of {batch}: {wrong}"
