"""On a GPU: deterministic_batch=True gives a row the same bits whatever else a call has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fa3gen

BATCH, QUERIES = 6, 16


@pytest.fixture(autouse=True)
def on_a_gpu(hopper: Any) -> Any:
    return hopper


@pytest.mark.parametrize("heads", [(32, 8), (5, 1), (16, 16)], ids=str)
@pytest.mark.parametrize("keys", [300, 513, 4096, 20000])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_alone_in_a_batch_and_in_chunks(head_dim: int, keys: int, heads: tuple[int, int]) -> None:
    generator = torch.Generator("cuda").manual_seed(keys)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    q = torch.randn(BATCH, QUERIES, heads[0], head_dim, **options)
    k, v = (torch.randn(BATCH, keys, heads[1], head_dim, **options) for _ in range(2))
    out, lse = call(q, k, v)
    for i in (0, BATCH - 1):
        alone = call(*(x[i : i + 1] for x in (q, k, v)))
        assert alone[0].equal(out[i : i + 1]) and alone[1].equal(lse[i : i + 1])
    for ends in (range(1, QUERIES + 1), (5, QUERIES)):
        for begin, end in zip((0, *ends), ends, strict=False):
            seen = keys - QUERIES + end
            chunk = call(q[:, begin:end], k[:, :seen], v[:, :seen])
            assert chunk[0].equal(out[:, begin:end]) and chunk[1].equal(lse[:, :, begin:end])


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE, causal."""
    out, lse = fa3gen.attention(q, k, v, causal=True, return_lse=True, deterministic_batch=True)
    return out, lse
