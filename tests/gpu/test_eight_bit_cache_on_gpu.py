"""On a machine with a Hopper GPU: caches of 8 bits beside queries of 16, as engines call them, eager and captured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_modules import offsets

from fa3gen.design.workspace import Workspace
from fa3gen.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache
from fa3gen.run.launch import load_for_launch
from fa3gen.verify import reference

WORKSPACE = Workspace.find(Path(__file__).parent)
TOLERANCE = 0.01  # as in test_attention
E4M3 = torch.float8_e4m3fn
HEADS = {64: (16, 2), 128: (32, 8), 256: (16, 4)}
BATCH, ROOM, PAGE = 5, 2048, 16
# Queries of decoding steps, a draft and a chunk of a prompt, before and at the replay, and their keys.
STEPS_AND_CHUNK = ((1, 1, 600, 1, 9), (ROOM, 700, 1700, 1500, 900)), ((1, 600, 9, 1, 1), (33, 1100, 9, ROOM, 1))


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(WORKSPACE.root)
    with torch.no_grad():
        yield


def cache_of(device: Any, dim: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """K and V, (BATCH, ROOM, heads, dim) of 8 bits, and factors of each sequence and head."""
    generator = torch.Generator(device).manual_seed(dim)
    heads_kv = HEADS[dim][1]
    k, v = (torch.randn(BATCH, ROOM, heads_kv, dim, generator=generator, device=device).to(E4M3) for _ in range(2))
    factors = {
        name: torch.rand(BATCH, heads_kv, generator=generator, device=device) + 0.5
        for name in ("k_descale", "v_descale")
    }
    return k, v, factors


def expected(
    q: Sequence[torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    used: torch.Tensor,
    factors: dict[str, Any],
    reach: tuple[int | None, int] = (None, 0),
) -> torch.Tensor:
    """O of each sequence, one behind the other, in float64, with the factors in K and V."""
    rows = []
    for i, keys in enumerate(used.tolist()):
        wide = [
            x[i : i + 1, :keys].double() * factors[name][i, :, None].double()
            for name, x in (("k_descale", k), ("v_descale", v))
        ]
        rows.append(reference.attention(q[i][None], *wide, reach=reach).out[0])
    return torch.cat(rows)


def in_pages(k: torch.Tensor, v: torch.Tensor, page: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Both in pages that lie in any order, and their table."""
    order = torch.randperm(BATCH * ROOM // page, device=k.device)
    pages = [x.view(-1, page, *x.shape[2:]).view(torch.uint8)[order].view(E4M3) for x in (k, v)]
    return pages, order.argsort().int().view(BATCH, -1)


def near(out: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(((out.double() - wanted).norm() / wanted.norm()).item() < TOLERANCE)


@pytest.mark.parametrize("dim, page", [*((dim, page) for dim in HEADS for page in (None, PAGE)), (128, 8), (128, 1)])
@pytest.mark.parametrize("seq_q", [1, 4, 100])
def test_a_cache_of_8_bits(dim: int, page: int | None, seq_q: int, hopper: torch.device) -> None:
    """Contiguous, and in pages that lie in any order; replayed with other lengths."""
    k, v, factors = cache_of(hopper, dim)
    q = torch.randn(BATCH, seq_q, HEADS[dim][0], dim, device=hopper).bfloat16()
    used = torch.tensor([ROOM, 700, seq_q, 1500, 900], dtype=torch.int32, device=hopper)
    given: dict[str, Any] = {"cache_seqlens": used, "causal": True, **factors}
    k_cache, v_cache = k, v
    if page is not None:
        (k_cache, v_cache), given["page_table"] = in_pages(k, v, page)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, **given)
    assert near(out.flatten(0, 1), expected(q, k, v, used, factors))
    into, graph = torch.empty_like(q), torch.cuda.CUDAGraph()
    flash_attn_with_kvcache(q, k_cache, v_cache, out=into, **given)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        flash_attn_with_kvcache(q, k_cache, v_cache, out=into, **given)
    used.copy_(torch.tensor([seq_q, ROOM, 1100, 333, 1800], dtype=torch.int32))
    graph.replay()
    assert near(into.flatten(0, 1), expected(q, k, v, used, factors))


@pytest.mark.parametrize(
    ("dim", "reach", "page"),
    [
        *((dim, (None, 0), page) for dim in HEADS for page in (1, 16, 64)),
        *((dim, (300, 0), page) for dim in (128, 256) for page in (16, 64)),
    ],
)
def test_a_chunk_beside_steps(dim: int, reach: Any, page: int, hopper: torch.device) -> None:
    """In one call, and captured; replayed with the chunk in another place."""
    k, v, factors = cache_of(hopper, dim)
    q = torch.randn(sum(STEPS_AND_CHUNK[0][0]), HEADS[dim][0], dim, device=hopper).bfloat16()
    pages, table = in_pages(k, v, page)
    begins, used = (torch.zeros(BATCH + more, dtype=torch.int32, device=hopper) for more in (1, 0))
    given: dict[str, Any] = {"cache_seqlens": used, "page_table": table, "cu_seqlens_q": begins, "max_seqlen_q": 600}
    given |= factors | ({"causal": True} if reach[0] is None else {"window_size": reach})
    into, graph = torch.full_like(q, torch.nan), None
    for queries, keys in STEPS_AND_CHUNK:
        begins.copy_(offsets(queries))
        used.copy_(torch.tensor(keys))
        wanted = expected(q.split(queries), k, v, used, factors, reach)
        assert near(flash_attn_with_kvcache(q, *pages, **given), wanted)
        if graph is None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                flash_attn_with_kvcache(q, *pages, out=into, **given)
        graph.replay()
        assert near(into, wanted)


def test_a_first_call_that_is_captured(hopper: torch.device) -> None:
    """Without factors: what it makes lies in the memory of the graph, and goes with it; later calls make their own."""
    k, v, _ = cache_of(hopper, 128)
    q = torch.randn(BATCH * 4, HEADS[128][0], 128, device=hopper).bfloat16()
    begins = offsets([4] * BATCH, hopper), offsets([ROOM] * BATCH, hopper)
    module = load_for_launch(WORKSPACE.module_path("fwd_packed_kv8_decode_d128_causal"))
    wanted = module.attention(q, k.flatten(0, 1), v.flatten(0, 1), *begins)
    torch.cuda.synchronize()
    module.units.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module.attention(q, k.flatten(0, 1), v.flatten(0, 1), *begins)
    assert module.units == {}
    graph.replay()
    assert out.equal(wanted)
    del out, graph
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    spoilt = [torch.full((size,), torch.nan, device=hopper) for size in (1, 128, 2**10, 2**20) for _ in range(64)]
    assert module.attention(q, k.flatten(0, 1), v.flatten(0, 1), *begins).equal(wanted) and spoilt


def test_packed_keys_of_8_bits_compiled(hopper: torch.device) -> None:
    k, v, factors = cache_of(hopper, 128)
    q = torch.randn(BATCH, 60, 32, 128, device=hopper).bfloat16()
    begins = offsets([60] * BATCH, hopper), offsets([ROOM] * BATCH, hopper)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = flash_attn_varlen_func(q, k, v, *begins, 60, ROOM, causal=True, **factors)
        return found * 2

    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out = torch.compile(call, fullgraph=True)(*packed)
    wanted = expected(q, k, v, torch.full((BATCH,), ROOM), factors)
    assert near(out / 2, wanted)
