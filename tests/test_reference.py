"""The reference against torch's own attention and against loops that spell the definition out."""

from __future__ import annotations

import math

import pytest
import torch

from fa3gen.design.masks import reach, visible_pairs
from fa3gen.spec.model import CausalMask, Mask, NoMask, WindowMask
from fa3gen.verify import reference
from fa3gen.verify.reference import attention, same_precision

MASKS = [NoMask(), CausalMask(), WindowMask(left=3, right=0), WindowMask(left=0, right=2), WindowMask(left=4, right=5)]
LENGTHS = [(1, 1), (1, 9), (7, 7), (5, 12), (12, 5), (9, 1)]


def sees(mask: Mask, row: int, key: int, seq_q: int, seq_k: int) -> bool:
    """The masks as spec.py words them."""
    distance = key - row - (seq_k - seq_q)
    if isinstance(mask, CausalMask):
        return key <= row + (seq_k - seq_q)
    if isinstance(mask, WindowMask):
        return -mask.left <= distance <= mask.right
    return True


def draw(seq_q: int, seq_k: int, *, heads_q: int = 4, heads_kv: int = 2, dim: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seq_q * 100 + seq_k)
    shapes = [(2, seq_q, heads_q, dim), (2, seq_k, heads_kv, dim), (2, seq_k, heads_kv, dim)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("seq_q", "seq_k"), LENGTHS)
def test_attention_equals_loops_over_the_definition(mask: Mask, seq_q: int, seq_k: int) -> None:
    q, k, v = draw(seq_q, seq_k)
    out, lse = attention(q, k, v, scale=0.7, reach=reach(mask))
    for b in range(2):
        for h in range(4):
            for i in range(seq_q):
                keys = [j for j in range(seq_k) if sees(mask, i, j, seq_q, seq_k)]
                scores = [0.7 * sum(float(q[b, i, h, c] * k[b, j, h // 2, c]) for c in range(8)) for j in keys]
                total = sum(math.exp(score) for score in scores)
                assert float(lse[b, h, i]) == pytest.approx(math.log(total) if keys else -math.inf, rel=1e-12)
                for c in range(8):
                    pairs = zip(scores, keys, strict=True)
                    expected = sum(math.exp(s) / total * float(v[b, j, h // 2, c]) for s, j in pairs) if keys else 0.0
                    assert float(out[b, i, h, c]) == pytest.approx(expected, rel=1e-10, abs=1e-13)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_attention_equals_torch_with_an_explicit_mask(mask: Mask) -> None:
    seq_q, seq_k = 33, 40
    q, k, v = draw(seq_q, seq_k, heads_q=6, heads_kv=3, dim=16)
    seen = torch.tensor([[sees(mask, i, j, seq_q, seq_k) for j in range(seq_k)] for i in range(seq_q)])
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=seen, enable_gqa=True)
    torch.testing.assert_close(
        attention(q, k, v, reach=reach(mask)).out, expected.transpose(1, 2), rtol=1e-12, atol=1e-12
    )


def test_chunking_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(50, 30)
    whole = attention(q, k, v, reach=reach(CausalMask()))
    monkeypatch.setattr(reference, "SCORE_BYTES", 2 * 4 * 30 * 8 * 7)  # seven rows at a time
    chunked = attention(q, k, v, reach=reach(CausalMask()))
    torch.testing.assert_close(chunked.out, whole.out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(chunked.lse, whole.lse, rtol=1e-13, atol=1e-13)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = draw(4, 6)
    out, lse = attention(q * 1000, k * 1000, v, reach=reach(NoMask()), compute_dtype=torch.float32)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


def test_same_precision_is_off_by_the_rounding_of_its_dtype() -> None:
    q, k, v = (tensor.bfloat16() for tensor in draw(64, 200, dim=64))
    exact, rounded = attention(q, k, v, reach=reach(NoMask())), same_precision(q, k, v, reach=reach(NoMask()))
    assert rounded.out.dtype == torch.bfloat16 and rounded.lse.dtype == torch.float32
    relative = (rounded.out.double() - exact.out).norm() / exact.out.norm()
    assert 2**-10 < relative < 2**-7  # bf16 keeps 8 bits


def test_same_precision_of_a_row_without_keys_is_zero() -> None:
    q, k, v = (tensor.half() for tensor in draw(12, 5))
    out, lse = same_precision(q, k, v, reach=reach(CausalMask()))
    assert not out[:, :7].any() and torch.isneginf(lse[:, :, :7]).all() and torch.isfinite(lse[:, :, 7:]).all()


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("seq_q", "seq_k"), LENGTHS)
def test_visible_pairs_counts_what_the_mask_shows(mask: Mask, seq_q: int, seq_k: int) -> None:
    expected = sum(sees(mask, i, j, seq_q, seq_k) for i in range(seq_q) for j in range(seq_k))
    assert visible_pairs(mask, seq_q=seq_q, seq_k=seq_k) == expected
