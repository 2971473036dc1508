"""On a machine with a Hopper GPU: caches of 8 bits beside queries of 16, as engines call them, eager and captured."""

from __future__ import annotations

from collections.abc import Iterator
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
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, used: torch.Tensor, factors: dict[str, Any]
) -> torch.Tensor:
    """O of each sequence, in float64, with the factors in K and V."""
    rows = []
    for i, keys in enumerate(used.tolist()):
        wide = [
            x[i : i + 1, :keys].double() * factors[name][i, :, None].double()
            for name, x in (("k_descale", k), ("v_descale", v))
        ]
        rows.append(reference.attention(q[i : i + 1], *wide, reach=(None, 0)).out)
    return torch.cat(rows)


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
        order = torch.randperm(BATCH * ROOM // page, device=hopper)
        k_cache, v_cache = (x.view(-1, page, *x.shape[2:]).view(torch.uint8)[order].view(E4M3) for x in (k, v))
        given["page_table"] = order.argsort().int().view(BATCH, -1)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, **given)
    assert near(out, expected(q, k, v, used, factors))
    into, graph = torch.empty_like(q), torch.cuda.CUDAGraph()
    flash_attn_with_kvcache(q, k_cache, v_cache, out=into, **given)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        flash_attn_with_kvcache(q, k_cache, v_cache, out=into, **given)
    used.copy_(torch.tensor([seq_q, ROOM, 1100, 333, 1800], dtype=torch.int32))
    graph.replay()
    assert near(into, expected(q, k, v, used, factors))


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
    assert near(out.view(q.shape) / 2, wanted)
