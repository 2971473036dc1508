"""On a machine with a Hopper GPU: num_splits and split_keys, dense, packed and in pages, eager and captured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_modules import offsets, packed_attention, packed_tensors

import fa3gen
from fa3gen.design.workspace import Workspace
from fa3gen.flash_attn_interface import flash_attn_func, flash_attn_with_kvcache
from fa3gen.run.dispatch import mask_of
from fa3gen.spec.model import Split
from fa3gen.verify import reference

WORKSPACE = Workspace.find(Path(__file__).parent)
TOLERANCE, LSE_TOLERANCE = 0.01, 1e-3  # as in test_attention
ASKED = 1, 2, 3, 7, 64, 1000
LENGTHS = [1, 0, 3, 16, 2], [8000, 90, 0, 3333, 64]
PAGE = 64


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(WORKSPACE.root)
    with torch.no_grad():
        yield


def close(out: torch.Tensor, lse: torch.Tensor, wanted: torch.Tensor, wanted_lse: torch.Tensor) -> None:
    assert ((out.float() - wanted).norm() / wanted.norm()).item() <= TOLERANCE
    torch.testing.assert_close(lse, wanted_lse.float(), rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)


def dense(device: Any, dim: int, seq_q: int = 3, seq_k: int = 8000) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(dim)
    shapes = (2, seq_q, 8, dim), (2, seq_k, 2, dim), (2, seq_k, 2, dim)
    return tuple(torch.randn(x, generator=generator, device=device).to(torch.bfloat16) for x in shapes)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seq_q", [1, 3, 300])
def test_dense_keys_in_so_many_parts(dim: int, causal: bool, seq_q: int, hopper: Any) -> None:
    """The same to rounding; a captured call gives the same bits as an eager one."""
    q, k, v = dense(hopper, dim, seq_q)
    wanted = reference.attention(q, k, v, reach=(None, 0 if causal else None), compute_dtype=torch.float32)
    for asked in ASKED:
        choice = fa3gen.attention.explain(q, k, v, causal=causal, num_splits=asked)
        assert choice.spec.split == (None if asked == 1 else Split(count="auto"))
        out, lse = fa3gen.attention(q, k, v, causal=causal, num_splits=asked, return_lse=True)
        close(out, lse, wanted.out, wanted.lse)
        close(
            *flash_attn_func(q, k, v, causal=causal, num_splits=asked, return_attn_probs=True), wanted.out, wanted.lse
        )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = fa3gen.attention(q, k, v, causal=causal, num_splits=asked)
        graph.replay()
        assert captured.equal(out)


@pytest.mark.parametrize("options", [{"window": (700, 0)}, {"causal": True}], ids=["window", "causal"])
@pytest.mark.parametrize("paged", [False, True])
def test_packed_keys_in_so_many_shares(paged: bool, options: dict[str, Any], hopper: Any) -> None:
    """With as many CTAs as that asks for, fewer than SMs or more; replayed with other lengths in the same tensors."""
    q, k, v, begins_q, begins_k = packed_tensors(*LENGTHS, heads=(8, 2), head_dim=128, device=hopper)
    mask = mask_of(options.get("causal", False), options.get("window"))
    used = torch.tensor(LENGTHS[1], dtype=torch.int32, device=hopper)
    keys: tuple[Any, ...] = (k, v, begins_q, begins_k)
    named: dict[str, Any] = {"seqused_k": used, "max_seqlen_q": 16, **options}
    if paged:
        pages, table = in_pages((k, v), LENGTHS[1])
        keys, named = (*pages, begins_q), {**named, "page_table": table}
    for asked in ASKED[1:]:
        used.copy_(torch.tensor(LENGTHS[1]))
        out, lse = fa3gen.attention_packed(q, *keys, num_splits=asked, return_lse=True, **named)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured, captured_lse = fa3gen.attention_packed(q, *keys, num_splits=asked, return_lse=True, **named)
        for lengths in (LENGTHS[1], [17, 90, 0, 3000, 1]):
            used.copy_(torch.tensor(lengths))
            graph.replay()
            wanted = packed_attention(q, k, v, begins_q, begins_k, mask=mask, seqused_k=used)
            close(captured, captured_lse, *wanted)
        used.copy_(torch.tensor(LENGTHS[1]))
        graph.replay()
        assert captured.equal(out) and captured_lse.equal(lse)


def in_pages(tensors: tuple[torch.Tensor, ...], lengths: list[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each sequence in pages of its own, and the table of these."""
    counts = [-(-length // PAGE) for length in lengths]
    begins, firsts = offsets(lengths).tolist(), offsets(counts)
    found = []
    for x in tensors:
        rows = x.new_zeros(sum(counts) * PAGE, *x.shape[1:])
        for begin, first, length in zip(begins, firsts.tolist(), lengths, strict=False):
            rows[first * PAGE : first * PAGE + length] = x[begin : begin + length]
        found.append(rows.unflatten(0, (-1, PAGE)))
    return found, (firsts[:-1, None] + torch.arange(max(counts))).int().to(tensors[0].device)


def test_a_cache_in_so_many_parts(hopper: Any) -> None:
    q, k, v = dense(hopper, 128)
    used = torch.tensor([8000, 77], dtype=torch.int32, device=hopper)
    for asked in (0, *ASKED):
        out, lse, *_ = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=used, causal=True, num_splits=asked, return_softmax_lse=True
        )
        for i, length in enumerate(used.tolist()):
            one = (q[i : i + 1], *(x[i : i + 1, :length] for x in (k, v)))
            wanted = reference.attention(*one, reach=(None, 0), compute_dtype=torch.float32)
            close(out[i], lse[i], wanted.out[0], wanted.lse[0])


def test_parts_of_a_size_that_is_rendered(hopper: Any) -> None:
    """A row's bits are its own: alone they are those that it has in a batch."""
    q, k, v = dense(hopper, 128)
    wanted = reference.attention(q, k, v, reach=(None, 0), compute_dtype=torch.float32)
    for keys in (512, 1024):
        options: dict[str, Any] = {"causal": True, "split_keys": keys, "render": True, "return_lse": True}
        out, lse = fa3gen.attention(q, k, v, **options)
        close(out, lse, wanted.out, wanted.lse)
        alone, alone_lse = fa3gen.attention(*(x[1:] for x in (q, k, v)), **options)
        assert alone.equal(out[1:]) and alone_lse.equal(lse[1:])
