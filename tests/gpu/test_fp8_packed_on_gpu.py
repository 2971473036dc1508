"""On a machine with a Hopper GPU: q, k and v of 8 bits in packed sequences and caches, eager, captured and compiled.

By whatever modules dispatch chooses. What is expected is attention in float64 to the numbers that the 8 bits stand for,
times their factors, so that what is off is P, which has 4 bits, and sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_modules import offsets

import fa3gen
from fa3gen.design.workspace import Workspace
from fa3gen.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache
from fa3gen.run.eight_bits import FACTORS
from fa3gen.verify import reference

WORKSPACE = Workspace.find(Path(__file__).parent)
E4M3 = torch.float8_e4m3fn
TOLERANCE, LSE_TOLERANCE = 0.04, 1e-3  # as in test_fp8_on_gpu
HEADS = {64: (16, 2), 128: (32, 8), 256: (16, 4)}
WINDOWS = (300, 0), (64, 70)
BATCH, ROOM, PAGE = 5, 2048, 16
LENGTHS_Q, LENGTHS_K = (700, 1, 0, 333, 5, 1200), (700, 900, 9, 1500, 0, 190)
# Queries of decoding steps, a draft and a chunk of a prompt, before and at the replay, and their keys.
STEPS_AND_CHUNK = ((1, 1, 600, 1, 9), (ROOM, 700, 1700, 1500, 900)), ((1, 600, 9, 1, 1), (33, 1100, 9, ROOM, 1))
NANS = 0x7F, 0xFF


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch, hopper: Any) -> Iterator[None]:
    monkeypatch.chdir(WORKSPACE.root)
    with torch.no_grad():
        yield


def random(device: Any, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(E4M3)


def factors_of(count: int, heads_kv: int, device: Any) -> dict[str, torch.Tensor]:
    """For each sequence and head, transposed, and of a stride of 0."""
    draw = torch.Generator(device).manual_seed(count)
    of_q = torch.rand(count, heads_kv, generator=draw, device=device) + 0.3
    of_k = torch.rand(heads_kv, count, generator=draw, device=device).t() + 0.3
    of_v = torch.rand(count, 1, generator=draw, device=device).expand(-1, heads_kv) + 0.3
    return dict(zip(FACTORS, (of_q, of_k, of_v), strict=True))


def attended(q: Any, k: Any, v: Any, number: int, factors: dict[str, torch.Tensor], reach: Any) -> Any:
    """O and LSE of one sequence in float64; q, k and v are (rows, heads, head dim)."""
    group = q.shape[1] // k.shape[1]
    of_q, of_k, of_v = (factors[name][number, :, None].double() for name in FACTORS)
    wide = q.double() * of_q.repeat_interleave(group, 0), k.double() * of_k, v.double() * of_v
    return reference.attention(*(x[None] for x in wide), reach=reach)


def near(out: torch.Tensor, wanted: torch.Tensor) -> bool:
    return out.dtype == torch.bfloat16 and ((out.double() - wanted).norm() / wanted.norm()).item() < TOLERANCE


@pytest.mark.parametrize(
    ("dim", "reach"),
    [
        *((dim, (None, right)) for dim in HEADS for right in (None, 0)),
        *((dim, reach) for dim in HEADS for reach in WINDOWS),
    ],
)
def test_packed_sequences(dim: int, reach: Any, hopper: torch.device) -> None:
    """Between rows that are NaN, which no bit of O shows; without factors, and twice with them."""
    heads_q, heads_kv = HEADS[dim]
    q, k, v = (
        random(hopper, sum(lengths), heads, dim, seed=seed)
        for seed, (lengths, heads) in enumerate(((LENGTHS_Q, heads_q), (LENGTHS_K, heads_kv), (LENGTHS_K, heads_kv)))
    )
    begins, factors = (offsets(LENGTHS_Q, hopper), offsets(LENGTHS_K, hopper)), factors_of(6, heads_kv, hopper)
    left, right = reach
    options: dict[str, Any] = {"causal": reach == (None, 0), "max_seqlen_q": 1200, "max_seqlen_k": 1500}
    options |= {"window": reach} if left is not None else {}
    out, lse = fa3gen.attention_packed(q, k, v, *begins, **options, **factors, return_lse=True)
    for i in range(6):
        rows, keys = (slice(*pair[i : i + 2].tolist()) for pair in begins)
        if rows.start == rows.stop:
            continue
        wanted = attended(q[rows], k[keys], v[keys], i, factors, reach)
        assert near(out[rows], wanted.out[0]) or not wanted.out.any()
        torch.testing.assert_close(lse[:, rows].double(), wanted.lse[0], rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)
    assert fa3gen.attention_packed(q, k, v, *begins, **options, **factors).equal(out)
    apart = offsets([length + 4 for length in LENGTHS_K], hopper)
    used = torch.tensor(LENGTHS_K, dtype=torch.int32, device=hopper)
    for nan in NANS:
        spoilt = [torch.full((int(apart[-1]), *x.shape[1:]), nan, dtype=torch.uint8, device=hopper) for x in (k, v)]
        for x, into in zip((k, v), spoilt, strict=True):
            for begin, first, length in zip(apart.tolist(), begins[1].tolist(), LENGTHS_K, strict=False):
                into[begin : begin + length] = x.view(torch.uint8)[first : first + length]
        keys8 = [x.view(E4M3) for x in spoilt]
        found = fa3gen.attention_packed(q, *keys8, begins[0], apart, seqused_k=used, **options, **factors)
        assert found.equal(out)


def into_pages(x: torch.Tensor, page: int, order: torch.Tensor) -> torch.Tensor:
    """(BATCH, ROOM, heads, dim) in pages of this order; what is left of a sequence's last page is NaN."""
    cells = -(-ROOM // page) * page
    padded = torch.full((BATCH, cells, *x.shape[2:]), NANS[0], dtype=torch.uint8, device=x.device)
    padded[:, :ROOM] = x.view(torch.uint8)
    return padded.view(-1, page, *x.shape[2:])[order].view(E4M3)


ANY_PAGES = [(dim, (None, 0), page) for dim in HEADS for page in (None, PAGE, 8, 3, 1)]
WINDOWS_IN_PAGES = [(dim, reach, page) for dim in HEADS for reach in WINDOWS for page in (None, PAGE)]
UNMASKED = [(dim, (None, None), page) for dim in HEADS for page in (None, PAGE)]


@pytest.mark.parametrize(("dim", "reach", "page"), [*ANY_PAGES, *WINDOWS_IN_PAGES, *UNMASKED])
@pytest.mark.parametrize("seq_q", [1, 4, 100])
def test_a_cache(seq_q: int, page: int | None, dim: int, reach: Any, hopper: torch.device) -> None:
    """Contiguous, and in pages of any size that lie in any order; replayed with other lengths and other factors."""
    heads_q, heads_kv = HEADS[dim]
    q = random(hopper, BATCH, seq_q, heads_q, dim)
    k, v = (random(hopper, BATCH, ROOM, heads_kv, dim, seed=seed) for seed in (1, 2))
    factors = {name: x.contiguous() for name, x in factors_of(BATCH, heads_kv, hopper).items()}
    used = torch.tensor([ROOM, 700, seq_q, 1500, 900], dtype=torch.int32, device=hopper)
    given: dict[str, Any] = {"cache_seqlens": used, "causal": reach == (None, 0), **factors}
    given |= {"window_size": reach} if reach[0] is not None else {}
    k_cache, v_cache = k, v
    if page is not None:
        order = torch.randperm(BATCH * -(-ROOM // page), device=hopper)
        k_cache, v_cache = (into_pages(x, page, order) for x in (k, v))
        given["page_table"] = order.argsort().int().view(BATCH, -1)

    def right(out: torch.Tensor) -> bool:
        rows = [attended(q[i], k[i, :keys], v[i, :keys], i, factors, reach).out for i, keys in enumerate(used.tolist())]
        return near(out, torch.cat(rows))

    assert right(flash_attn_with_kvcache(q, k_cache, v_cache, **given))
    into, graph = torch.empty_like(q, dtype=torch.bfloat16), torch.cuda.CUDAGraph()
    flash_attn_with_kvcache(q, k_cache, v_cache, out=into, **given)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        flash_attn_with_kvcache(q, k_cache, v_cache, out=into, **given)
    used.copy_(torch.tensor([seq_q, ROOM, 1100, 333, 1800], dtype=torch.int32))
    for factor in factors.values():
        factor.mul_(1.5)
    graph.replay()
    assert right(into)


@pytest.mark.parametrize(
    ("dim", "reach", "page"),
    [
        *((dim, (None, 0), page) for dim in HEADS for page in (1, PAGE, 64)),
        *((dim, (300, 0), page) for dim in HEADS for page in (PAGE, 64)),
    ],
)
def test_a_chunk_beside_steps(dim: int, reach: Any, page: int, hopper: torch.device) -> None:
    """In one call, and captured; replayed with the chunk in another place."""
    heads_q, heads_kv = HEADS[dim]
    q = random(hopper, sum(STEPS_AND_CHUNK[0][0]), heads_q, dim)
    k, v = (random(hopper, BATCH, ROOM, heads_kv, dim, seed=seed) for seed in (1, 2))
    factors, order = factors_of(BATCH, heads_kv, hopper), torch.randperm(BATCH * ROOM // page, device=hopper)
    pages, table = [into_pages(x, page, order) for x in (k, v)], order.argsort().int().view(BATCH, -1)
    begins, used = (torch.zeros(BATCH + more, dtype=torch.int32, device=hopper) for more in (1, 0))
    given: dict[str, Any] = {"cache_seqlens": used, "page_table": table, "cu_seqlens_q": begins, "max_seqlen_q": 600}
    given |= factors | ({"causal": True} if reach[0] is None else {"window_size": reach})
    into, graph = torch.full_like(q, torch.nan, dtype=torch.bfloat16), None
    for queries, keys in STEPS_AND_CHUNK:
        begins.copy_(offsets(queries))
        used.copy_(torch.tensor(keys))
        cached = zip(q.split(queries), k, v, keys, strict=True)
        each = [attended(rows, k[:n], v[:n], i, factors, reach).out[0] for i, (rows, k, v, n) in enumerate(cached)]
        assert near(flash_attn_with_kvcache(q, *pages, **given), torch.cat(each))
        if graph is None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                flash_attn_with_kvcache(q, *pages, out=into, **given)
        graph.replay()
        assert near(into, torch.cat(each))


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("dim", HEADS)
def test_parts_of_few_queries(dim: int, num_splits: int, hopper: torch.device) -> None:
    heads_q, heads_kv = HEADS[dim]
    q, k, v = (random(hopper, 3, rows, heads, dim) for rows, heads in ((2, heads_q), *[(5000, heads_kv)] * 2))
    factors, used = factors_of(3, heads_kv, hopper), torch.tensor([5000, 1, 333], dtype=torch.int32, device=hopper)
    out = flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True, num_splits=num_splits, **factors)
    rows = [attended(q[i], k[i, :n], v[i, :n], i, factors, (None, 0)).out for i, n in enumerate(used.tolist())]
    assert near(out, torch.cat(rows))


def test_compiled(hopper: torch.device) -> None:
    heads_q, heads_kv = HEADS[128]
    q, k, v = (random(hopper, BATCH * rows, heads, 128) for rows, heads in ((60, heads_q), *[(300, heads_kv)] * 2))
    begins, factors = (offsets([60] * BATCH, hopper), offsets([300] * BATCH, hopper)), factors_of(5, heads_kv, hopper)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = flash_attn_varlen_func(q, k, v, *begins, 60, 300, causal=True, **factors)
        return found * 2

    out = torch.compile(call, fullgraph=True)(q, k, v) / 2
    each = [
        attended(*(x.view(BATCH, -1, *x.shape[1:])[i] for x in (q, k, v)), i, factors, (None, 0)).out[0]
        for i in range(BATCH)
    ]
    assert near(out, torch.cat(each))
