"""Factors of heads of Q and K of 8 bits on the CPU model: the smallest that quantize makes, those of zeros."""

from __future__ import annotations

import pytest
import torch
from hosting import module

from fa3gen.verify import reference

torch.set_num_threads(1)  # the workers of xdist share the cores
SMALLEST = 2.0**-100  # what quantize makes the factor of a head of zeros; two of them are less than float32 has


@pytest.mark.parametrize("stem", ["k7_two_levels_d64", "k7_d64_causal", "fwd_fp8_d64_causal_short"])
def test_heads_of_zeros(stem: str) -> None:
    """Every score is 0, and hidden keys, whose score is -inf, stay hidden: O is the mean of the rows of v in sight."""
    keys = 70  # the tile has more
    q, k = torch.zeros(1, 40, 2, 64), torch.zeros(1, keys, 1, 64)
    v = torch.randn(1, keys, 1, 64, generator=torch.Generator().manual_seed(3)).to(torch.float8_e4m3fn)
    smallest = torch.full((1, 1), SMALLEST)
    given = {"q_descale": smallest, "k_descale": smallest}
    out, lse = module(stem).attention(*(x.to(v.dtype) for x in (q, k)), v, **given, return_lse=True)
    wanted = reference.attention(q, k, v, reach=(None, 0 if "causal" in stem else None))
    assert ((out.double() - wanted.out).norm() / wanted.out.norm()).item() < 0.04
    torch.testing.assert_close(lse.double(), wanted.lse, rtol=1e-5, atol=1e-5)
