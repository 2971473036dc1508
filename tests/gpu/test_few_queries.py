"""On a machine with a Hopper GPU: few queries, and chunks of prompts beside them, by the public calls, in every group.

All head dims, groups of query heads and numbers of queries of few_queries.py, dense, packed and in pages, against
attention in float32; and what modules for chunks of prompts beside decoding steps compute, of any group.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_modules import offsets, packed_attention

import fa3gen
from fa3gen.design.footprint import eight_bits
from fa3gen.design.masks import options_of_call
from fa3gen.design.tile_order import takes_group
from fa3gen.design.workspace import Workspace
from fa3gen.run.dispatch import mask_of
from fa3gen.spec.model import WINDOW_MAX, Forward
from fa3gen.spec.specfile import attention_among

sys.path.append(str(Path(__file__).parent))

import few_queries

WORKSPACE = Workspace.find(Path(__file__).parent)
TOLERANCE, LSE_TOLERANCE = 0.01, 1e-3  # as in test_attention
LENGTHS = 1500, 16, 0, 3001, 64  # keys; of fewer than queries, the first ones see none under a causal mask
DENSE_LENGTHS = (1501,) * 3
HEADS_KV = 2
COMBINATIONS = pytest.mark.parametrize(("dim", "group", "queries"), list(few_queries.combinations()))
# Those of 8 bits are in test_fp8_packed_on_gpu.py and test_eight_bit_cache_on_gpu.py.
IN_ORDER = {
    variant.stem: variant.spec
    for spec_file in WORKSPACE.load_all()
    for variant in attention_among(spec_file.variants)
    if variant.spec.order != "by_sequence" and not (eight_bits(variant.spec) or variant.spec.kv.dtype)
}
MIXED_GROUPS = 1, 4, 5, 6, 7, 8, 10, 12, 16
# Two chunks beside more steps than a warp looks at at once, and a sequence without queries.
MIXED = (300, *[1] * 40, 0, 77, 1), (900, *range(1, 400, 10), 50, 77, 2000)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(WORKSPACE.root)
    with torch.no_grad():
        yield


def close(found: tuple[torch.Tensor, torch.Tensor], wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    (out, lse), (wanted_out, wanted_lse) = found, wanted
    assert ((out.float() - wanted_out).norm() / wanted_out.norm()).item() <= TOLERANCE
    torch.testing.assert_close(lse, wanted_lse.float(), rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)


@COMBINATIONS
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", few_queries.LAYOUTS)
def test_numbers(layout: str, causal: bool, dim: int, group: int, queries: int, hopper: Any) -> None:
    lengths = DENSE_LENGTHS if layout == "dense" else LENGTHS
    call = few_queries.Call.of(hopper, dim, group, queries, lengths, HEADS_KV)
    out, lse = call.ready(layout, causal=causal, return_lse=True)()
    begins = offsets([queries] * len(lengths), hopper), offsets(lengths, hopper)
    wanted, wanted_lse = packed_attention(call.q, call.k, call.v, *begins, mask=mask_of(causal, None))
    if layout == "dense":  # (batch, seq, heads, d), and LSE (batch, heads, seq)
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    close((out, lse), (wanted, wanted_lse))


def mixed_call(spec: Forward, group: int, device: Any) -> tuple[dict[str, Any], tuple[torch.Tensor, torch.Tensor]]:
    """Arguments by name, and what a causal call of them gives."""
    lengths_q, lengths_k = (list(side) for side in MIXED)
    generator, dim = torch.Generator(device).manual_seed(group), spec.problem.head_dim
    shapes = (sum(lengths_q), HEADS_KV * group, dim), *[(sum(lengths_k), HEADS_KV, dim)] * 2
    q, k, v = (torch.randn(x, generator=generator, device=device).to(torch.bfloat16) for x in shapes)
    begins = offsets(lengths_q, device), offsets(lengths_k, device)
    wanted = packed_attention(q, k, v, *begins, mask=mask_of(True, None))
    if spec.problem.layout == "packed":
        return {"q": q, "k": k, "v": v, "cu_seqlens_q": begins[0], "cu_seqlens_k": begins[1]}, wanted
    pages_k, pages_v, table = few_queries.in_pages((k, v), lengths_k)
    used = torch.tensor(lengths_k, device=device).int()
    named = {"q": q, "k": pages_k, "v": pages_v, "cu_seqlens_q": begins[0], "page_table": table, "seqused_k": used}
    return named, wanted


@pytest.mark.parametrize("group", MIXED_GROUPS)
@pytest.mark.parametrize("stem", IN_ORDER)
def test_chunks_beside_steps(stem: str, group: int, hopper: Any) -> None:
    """By the module itself, eager and captured, and by the public call, whatever serves that."""
    spec = IN_ORDER[stem]
    if not takes_group(spec, group):
        with pytest.raises(ValueError, match=f"must be a multiple of {spec.tile.pack_heads} times those of k"):
            fa3gen.load(stem).attention(**mixed_call(spec, group, hopper)[0])
        return
    named, wanted = mixed_call(spec, group, hopper)
    module, causal = fa3gen.load(stem), options_of_call(spec.mask, (WINDOW_MAX, 0))
    out, lse = module.attention(**named, **causal, return_lse=True)
    close((out, lse), wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = module.attention(**named, **causal)
    graph.replay()
    assert captured.equal(out)
    close(fa3gen.attention_packed(**named, causal=True, return_lse=True), wanted)
