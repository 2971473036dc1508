"""On a machine with a Hopper GPU: FlashAttention-3's functions by fa3gen's modules, called, compiled and captured.

Packed calls in bfloat16 take every row of the dispatch table for packed sequences, and what needs no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from packed_modules import UNTOUCHED, offsets, packed_attention, packed_tensors

from fa3gen import attention_packed
from fa3gen.design.family import Family
from fa3gen.design.workspace import Workspace
from fa3gen.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from fa3gen.measure.launch_times import host_microseconds
from fa3gen.run import dispatch
from fa3gen.spec.model import CausalMask, Mask, NoMask, WindowMask
from fa3gen.verify import reference

WORKSPACE = Workspace.find(Path(__file__).parent)
TOLERANCE, LSE_TOLERANCE = 0.01, 1e-3  # relative Frobenius error of O; 16-bit kernels read about 0.002
HOST_MICROSECONDS = 15.0  # of an eager call with out=

# Sequences without queries, without keys, without either; of one row, of a tile, of a row more; more keys than queries.
QUERIES = (0, 1, 130, 64, 257, 3, 0, 5)
KEYS = (5, 0, 200, 64, 513, 1, 0, 777)


class Packed(NamedTuple):
    """A family of packed calls."""

    head_dim: int
    heads: tuple[int, int]
    mask: Mask
    keys: int = 200  # about as many for each sequence

    @property
    def options(self) -> dict[str, Any]:
        if isinstance(self.mask, WindowMask):
            return {"window_size": (self.mask.left, self.mask.right)}
        return {"causal": isinstance(self.mask, CausalMask)}

    def tensors(self, device: Any, queries: Any = QUERIES, keys: Any = KEYS) -> tuple[torch.Tensor, ...]:
        longer = [length * max(1, self.keys // 200) for length in keys]
        return packed_tensors(queries, longer, heads=self.heads, head_dim=self.head_dim, device=device)

    def call(self, tensors: Any, **options: Any) -> Any:
        options = {"num_splits": 0, **self.options, **options}  # any module; by default none that splits keys
        return flash_attn_varlen_func(*tensors, max(QUERIES), 4 * self.keys, **options)

    def expected(self, tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return packed_attention(*tensors, mask=self.mask, **options)

    def check(self, found: Any, tensors: Any, **options: Any) -> None:
        """Of (O, LSE), in the rows that are in a sequence."""
        wanted, wanted_lse = self.expected(tensors, **options)
        close(*found, wanted, wanted_lse)


def cases(few: bool) -> Iterator[Packed]:
    """Each row of the table without a window, of those for few queries or of the others."""
    for row in dispatch.read_table(dispatch.table_path(WORKSPACE)).rows:
        wanted = row.layout == "packed" and row.dtype == "bf16" and row.mask.kind != "window"
        if wanted and few == (row.seq_q is not None):
            group = 1 if row.group is None else max(row.group.tests)
            yield Packed(row.head_dim, (2 * group, 2), row.mask, 200 if row.seq_k else 1000)


def families() -> Iterator[Packed]:
    """Families that have one module."""
    for head_dim, heads in ((256, (4, 2)), (256, (3, 3)), (128, (4, 2)), (128, (6, 1))):
        yield from (Packed(head_dim, heads, mask) for mask in (NoMask(), CausalMask()))


CASES = list(dict.fromkeys([*cases(few=False), *families()]))
FEW = list(dict.fromkeys(cases(few=True)))
EVERY = pytest.mark.parametrize("case", CASES, ids=str)
SOME = pytest.mark.parametrize("case", [Packed(256, (4, 2), CausalMask()), Packed(128, (6, 1), NoMask())], ids=str)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WORKSPACE.root)


def close(out: torch.Tensor, lse: torch.Tensor, wanted: torch.Tensor, wanted_lse: torch.Tensor) -> None:
    assert (out.float() - wanted).norm() <= TOLERANCE * wanted.norm()
    torch.testing.assert_close(lse, wanted_lse.float(), rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)


# Packed


@EVERY
def test_varlen(case: Packed, hopper: Any) -> None:
    tensors = case.tensors(hopper)
    out, lse = case.call(tensors, return_attn_probs=True)
    assert lse.shape == (case.heads[0], sum(QUERIES)) and out.shape == tensors[0].shape
    case.check((out, lse), tensors)
    into = torch.full_like(out, torch.nan)
    assert case.call(tensors, out=into) is into and into.equal(out)
    case.check(case.call(tensors, softmax_scale=0.05, return_attn_probs=True), tensors, scale=0.05)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_queries(case: Packed, hopper: Any) -> None:
    """As decoding steps have, by the modules whose CTAs share all keys, or whichever the rows name."""
    tensors = case.tensors(hopper, [min(length, dispatch.FEW_QUERIES) for length in QUERIES])
    options = {**case.options, "return_attn_probs": True, "num_splits": 0}
    case.check(flash_attn_varlen_func(*tensors, dispatch.FEW_QUERIES, 4 * case.keys, **options), tensors)


@EVERY
def test_lengths_in_use(case: Packed, hopper: Any) -> None:
    """Rows behind them are not read, and rows of O are not written."""
    tensors = case.tensors(hopper)
    q, k, v, begins_q, begins_k = tensors
    used = {
        "seqused_q": (begins_q.diff() + 1) // 2,
        "seqused_k": (begins_k.diff() * 2) // 3,
    }
    wanted, wanted_lse = case.expected(tensors, **used)
    for x, begins, lengths in ((k, begins_k, used["seqused_k"]), (v, begins_k, used["seqused_k"])):
        for begin, end, length in zip(begins[:-1].tolist(), begins[1:].tolist(), lengths.tolist(), strict=True):
            x[begin + length : end] = torch.nan
    untouched = wanted[:, 0, 0] == UNTOUCHED
    into = torch.full_like(q, 3.0)
    out, lse = case.call(tensors, **used, out=into, return_attn_probs=True)
    written = ~untouched
    assert out[untouched].eq(3.0).all() and written.any() and untouched.any()
    close(out[written], lse[:, written], wanted[written], wanted_lse[:, written])


SCORED: list[tuple[Packed, dict[str, Any]]] = [
    (Packed(64, (16, 2), CausalMask()), {"s_aux": torch.float32}),
    (Packed(64, (16, 2), WindowMask(left=127, right=0)), {"s_aux": torch.bfloat16}),
    (Packed(128, (4, 2), CausalMask()), {"softcap": 50.0}),
    (Packed(256, (4, 2), CausalMask()), {"softcap": 50.0}),
    (Packed(256, (4, 2), WindowMask(left=300, right=20)), {"softcap": 50.0}),
]


@pytest.mark.parametrize(("case", "scores"), SCORED, ids=str)
def test_sinks_and_caps(case: Packed, scores: dict[str, Any], hopper: Any) -> None:
    """Eager, and in a graph that takes the sinks of its replay; rows without a key have their sink."""
    tensors = case.tensors(hopper)
    options, named = dict(scores), dict(scores)
    if "s_aux" in scores:
        named = {"sinks": torch.linspace(-3, 3, case.heads[0], device=hopper).to(scores["s_aux"])}
        options = {"s_aux": named["sinks"]}
    case.check(case.call(tensors, **options, return_attn_probs=True), tensors, **named)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.call(tensors, **options, return_attn_probs=True)
    if "s_aux" in scores:
        options["s_aux"].neg_()
    graph.replay()
    case.check(found, tensors, **named)


@SOME
def test_a_graph_is_replayed_with_other_lengths(case: Packed, hopper: Any) -> None:
    tensors = case.tensors(hopper)
    case.call(tensors, return_attn_probs=True)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.call(tensors, return_attn_probs=True)
    rest = [sum(KEYS) * max(1, case.keys // 200) - 700]
    for queries, keys in ((QUERIES, None), ((400, 0, 0, 0, 0, 1, 0, 59), (500, 100, 0, 0, 0, 0, 100, *rest))):
        if keys is not None:
            tensors[3].copy_(offsets(queries))
            tensors[4].copy_(offsets(keys))
        graph.replay()
        case.check((out, lse), tensors)


def test_two_graphs_run_beside_each_other(hopper: Any) -> None:
    """Each has a counter of its own."""
    case = Packed(256, (4, 2), CausalMask())
    inputs = [case.tensors(hopper), case.tensors(hopper, QUERIES[::-1], KEYS[::-1])]
    wanted = [case.call(tensors) for tensors in inputs]
    graphs, outs = [], []
    for tensors in inputs:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append(case.call(tensors))
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(out.equal(x) for out, x in zip(outs, wanted, strict=True))


@SOME
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile(case: Packed, mode: str, hopper: Any) -> None:
    options, longest = case.options, (max(QUERIES), max(KEYS))

    def model(q: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash_attn_varlen_func(q * 2, *rest, *longest, **options, return_attn_probs=True)
        return out + 1, lse

    compiled = torch.compile(model, fullgraph=True, mode=mode)
    tensors = case.tensors(hopper)
    for _ in range(4):  # reduce-overhead records a graph at its second call and replays it from then on
        for found, wanted in zip(compiled(*tensors), model(*tensors), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch._dynamo.reset()


@SOME
def test_the_host_never_waits(case: Packed, hopper: Any) -> None:
    tensors = case.tensors(hopper)
    out = torch.empty_like(tensors[0])
    case.call(tensors, out=out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.call(tensors, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (out.float() - case.expected(tensors)[0]).norm() <= TOLERANCE * out.float().norm()


@SOME
def test_host_time_of_an_eager_call(case: Packed, hopper: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """On a host that has nothing else to do."""
    q, k, v, begins_q, begins_k = case.tensors(hopper, (3, 5), (7, 9))
    out, causal = torch.empty_like(q), isinstance(case.mask, CausalMask)

    def call() -> None:
        flash_attn_varlen_func(q, k, v, begins_q, begins_k, 5, 9, causal=causal, out=out)

    with torch.no_grad():
        best = min(host_microseconds(call, torch.cuda.synchronize) for _ in range(5))
    with capsys.disabled():
        print(f"\n{case}: {best:.1f} microseconds of the host for flash_attn_varlen_func(..., out=)")
    assert best < HOST_MICROSECONDS


# Dense


def dense(device: Any, seq_q: int, seq_k: int, head_dim: int, heads: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seq_q)
    shapes = [(2, seq_q, heads[0], head_dim), *[(2, seq_k, heads[1], head_dim)] * 2]
    return tuple(torch.randn(s, generator=generator, device=device, dtype=torch.bfloat16) for s in shapes)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("causal", [False, True])
def test_dense(head_dim: int, heads: tuple[int, int], causal: bool, hopper: Any) -> None:
    for seq_q, seq_k in ((1, 333), (200, 333), (333, 200)):
        q, k, v = dense(hopper, seq_q, seq_k, head_dim, heads)
        into = torch.full_like(q, torch.nan)
        out, lse = flash_attn_func(q, k, v, causal=causal, out=into, return_attn_probs=True)
        expected = reference.attention(q, k, v, reach=(None, 0 if causal else None), compute_dtype=torch.float32)
        assert out is into and lse.shape == (2, heads[0], seq_q)
        close(out, lse, expected.out, expected.lse)


def test_a_window_that_there_is_a_module_for(hopper: Any) -> None:
    q, k, v = dense(hopper, 900, 1100, 128, (4, 4))
    expected = reference.attention(q, k, v, reach=(512, 0), compute_dtype=torch.float32)
    for options in ({"window_size": (512, 0)}, {"window_size": (512, 512), "causal": True}):
        close(*flash_attn_func(q, k, v, **options, return_attn_probs=True), expected.out, expected.lse)


# In chunks


@SOME
def test_chunks(case: Packed, hopper: Any) -> None:
    """Each chunk of a sequence is a call of its own; in a graph that is replayed with other lengths, too."""
    chunk, causal = 100, isinstance(case.mask, CausalMask)
    tensors = case.tensors(hopper)
    case.call(tensors, attention_chunk=chunk, return_attn_probs=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.call(tensors, attention_chunk=chunk, return_attn_probs=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = case.call(tensors, attention_chunk=chunk, return_attn_probs=True)
    q, k, v, begins_q, begins_k = tensors
    for queries in (QUERIES, (130, 64, 0, 5, 200, 1, 3, 57)):
        begins_q.copy_(offsets(queries))
        graph.replay()
        ends = (x.tolist() for x in (begins_q[:-1], begins_q[1:], begins_k[:-1], begins_k[1:]))
        for a, b, c, d in zip(*ends, strict=True):
            for begin in range((d - c - b + a) // chunk * chunk, d - c, chunk):
                keys = slice(c + max(begin, 0), c + max(min(begin + chunk, d - c), 0))
                rows = slice(max(a, b - (d - c) + begin), min(b, b - (d - c) + begin + chunk))
                one = q[None, rows], k[None, keys], v[None, keys]
                wanted = reference.attention(*one, reach=(None, 0 if causal else None), compute_dtype=torch.float32)
                close(out[rows], lse[:, rows], wanted.out[0], wanted.lse[0])


# With a cache


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_q", [1, 70])
def test_cache(heads: tuple[int, int], causal: bool, seq_q: int, hopper: Any) -> None:
    """Contiguous, and with K and V of a row side by side; eager, and in a graph replayed with other lengths."""
    q, *cache = dense(hopper, seq_q, 500, 256, heads)
    side_by_side = torch.cat(cache, dim=-1).split(256, dim=-1)
    used = torch.tensor([500, 123], dtype=torch.int32, device=hopper)
    metadata = get_scheduler_metadata(2, seq_q, 500, *heads, 256, used)
    options: dict[str, Any] = {"cache_seqlens": used, "causal": causal, "scheduler_metadata": metadata}

    def check(out: torch.Tensor, lse: torch.Tensor) -> None:
        for i, length in enumerate(used.tolist()):
            one = q[i : i + 1], *(x[i : i + 1, :length] for x in cache)
            wanted = reference.attention(*one, reach=(None, 0 if causal else None), compute_dtype=torch.float32)
            close(out[i], lse[i], wanted.out[0], wanted.lse[0])

    for k, v in (cache, side_by_side):
        out, lse, *_ = flash_attn_with_kvcache(q, k, v, **options, return_softmax_lse=True)
        check(out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, *_ = flash_attn_with_kvcache(q, *cache, **options, return_softmax_lse=True)
    for lengths in ([77, 1], [0, 400]):
        used.copy_(torch.tensor(lengths))
        graph.replay()
        check(out, lse)
    pad = torch.tensor([0, 64], dtype=torch.int32, device=hopper)
    told = {"cache_seqlens": 500, "cache_leftpad": pad, "causal": causal}
    out, lse, *_ = flash_attn_with_kvcache(q, *cache, **told, return_softmax_lse=True)
    one = q[1:], *(x[1:, 64:] for x in cache)
    wanted = reference.attention(*one, reach=(None, 0 if causal else None), compute_dtype=torch.float32)
    close(out[1], lse[1], wanted.out[0], wanted.lse[0])


@pytest.mark.parametrize("packed", [False, True])
def test_new_keys_are_appended_without_a_wait_and_in_a_graph(packed: bool, hopper: Any) -> None:
    """Replayed with other lengths in the same tensors; what has no room in the cache is not written."""
    q, *cache = dense(hopper, 5, 500, 256, (4, 2))
    new = [x[:, :3].clone() for x in dense(hopper, 7, 9, 256, (4, 2))[1:]]
    rows = [x.flatten(0, 1)[:4].clone() if packed else x for x in new]  # packed: three, and one
    counts, saved = (3, 1) if packed else (3, 3), [x.clone() for x in cache]
    used = torch.tensor([400, 7], dtype=torch.int32, device=hopper)
    options: dict[str, Any] = {"cache_seqlens": used, "causal": True, "return_softmax_lse": True}
    options |= {"cu_seqlens_k_new": offsets(counts, hopper)} if packed else {}
    flash_attn_with_kvcache(q, *cache, *rows, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn_with_kvcache(q, *cache, *rows, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, *_ = flash_attn_with_kvcache(q, *cache, *rows, **options)
    for lengths in ((77, 499), (0, 497), (500, 500)):
        for x, old in zip(cache, saved, strict=True):
            x.copy_(old)
        used.copy_(torch.tensor(lengths))
        graph.replay()
        for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            end = min(500, length + count)
            wanted = [x[i : i + 1].clone() for x in saved]
            for x, appended in zip(wanted, new, strict=True):
                x[0, length:end] = appended[i, : end - length]
            assert all(x[i].equal(y[0]) for x, y in zip(cache, wanted, strict=True))
            one = q[i : i + 1], *(x[:, :end] for x in wanted)
            expected = reference.attention(*one, reach=(None, 0), compute_dtype=torch.float32)
            close(out[i], lse[i], expected.out[0], expected.lse[0])


def test_parts_of_the_keys_are_merged(hopper: Any) -> None:
    q, k, v = dense(hopper, 200, 333, 128, (4, 4))
    parts = [flash_attn_func(q, k[:, s], v[:, s], return_attn_probs=True) for s in (slice(0, 100), slice(100, 333))]
    outs, lses = (torch.stack([part[i] for part in parts]) for i in (0, 1))
    out, lse = flash_attn_combine(outs.float(), lses.transpose(2, 3), out_dtype=torch.bfloat16)
    expected = reference.attention(q, k, v, reach=(None, None), compute_dtype=torch.float32)
    close(out, lse.transpose(1, 2), expected.out, expected.lse)


def test_what_is_explained_is_what_runs(hopper: Any) -> None:
    case = Packed(256, (4, 2), CausalMask())
    tensors = case.tensors(hopper)
    choice = attention_packed.explain(*tensors, causal=True)
    assert Family.of(choice.spec) == Family("bf16", 256, 256, CausalMask(), layout="packed")
    assert f"on {torch.cuda.get_device_properties(hopper).multi_processor_count} SMs" in str(choice)
