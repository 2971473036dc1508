"""The reference against torch's own attention and against loops that spell the definition out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from fa3gen.design.masks import reach, visible_pairs
from fa3gen.spec.model import CausalMask, Mask, NoMask, WindowMask
from fa3gen.verify import reference
from fa3gen.verify.reference import TANH_ERROR, attention, same_precision, tanh_slack

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


# Sinks and capped scores


@pytest.mark.parametrize("mask", [NoMask(), CausalMask()], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_sink_is_one_more_score_without_a_value(mask: Mask, softcap: float | None) -> None:
    """As a key whose score is the sink and whose value is zero. More queries than keys: some rows see none."""
    q, k, v = draw(9, 7)
    sinks = torch.tensor([0.5, -2.0, 4.0, -math.inf], dtype=torch.float64)
    out, lse = attention(q, k, v, scale=1.3, reach=reach(mask), sinks=sinks, softcap=softcap)
    for b, h, i in itertools.product(range(2), range(4), range(9)):
        keys = [j for j in range(7) if sees(mask, i, j, 9, 7)]
        scores = [1.3 * float(q[b, i, h] @ k[b, j, h // 2]) for j in keys]
        if softcap is not None:
            scores = [softcap * math.tanh(score / softcap) for score in scores]
        total = sum(math.exp(score) for score in scores) + math.exp(sinks[h])
        assert float(lse[b, h, i]) == pytest.approx(math.log(total) if total else -math.inf, rel=1e-12)
        weights = zip(scores, keys, strict=True)
        row = sum(
            (math.exp(s) / total * v[b, j, h // 2] for s, j in weights), start=torch.zeros(8, dtype=torch.float64)
        )
        torch.testing.assert_close(out[b, i, h], row, rtol=1e-10, atol=1e-13)


def test_sinks_at_the_ends_of_float32() -> None:
    q, k, v = draw(9, 7)
    sinks = torch.tensor([3e38, -3e38, -math.inf, 0.0])
    out, lse = attention(q, k, v, reach=reach(CausalMask()), sinks=sinks)
    plain = attention(q, k, v, reach=reach(CausalMask()))
    assert torch.isfinite(out).all() and not lse.isnan().any()
    assert (out[:, :, 0] == 0).all() and (lse[:, 0] == sinks[0].double()).all()
    for head in (1, 2):
        torch.testing.assert_close(out[:, :, head], plain.out[:, :, head], rtol=1e-12, atol=0)
    # Rows 0 and 1 see no key.
    assert (
        (lse[:, 1, :2] == sinks[1].double()).all() and (lse[:, 2, :2] == -math.inf).all() and (lse[:, 3, :2] == 0).all()
    )
    torch.testing.assert_close(lse[:, 1:3, 2:], plain.lse[:, 1:3, 2:], rtol=1e-12, atol=0)


@pytest.mark.parametrize("softcap", [15.0, 50.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([1.0, 20.0, -math.inf, 0.0])], ids=["no sinks", "sinks"])
def test_slack_holds_for_every_error_of_tanh_and_is_no_wider_than_it_must_be(
    softcap: float, sinks: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = draw(12, 40, dim=16)
    facts: dict[str, Any] = {"scale": 3.0, "reach": reach(CausalMask()), "sinks": sinks, "softcap": softcap}
    exact, slack, right = attention(q, k, v, **facts), tanh_slack(q, k, v, **facts), torch.tanh
    used = []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)

        def off(x: torch.Tensor, generator: torch.Generator = generator) -> torch.Tensor:
            signs = torch.randint(2, x.shape, generator=generator) * 2.0 - 1
            return right(x) * (1 + TANH_ERROR * signs)

        monkeypatch.setattr(torch, "tanh", off)
        found = attention(q, k, v, **facts)
        monkeypatch.setattr(torch, "tanh", right)
        seen = exact.lse.isfinite()
        assert ((found.out - exact.out).abs() <= slack.out + 1e-12).all()
        assert ((found.lse - exact.lse)[seen].abs() <= slack.lse[seen] + 1e-12).all()
        rows = slack.out > 1e-9
        used.append(((found.out - exact.out).abs()[rows] / slack.out[rows]).max().item())
    assert 0.5 < max(used) <= 1


def test_eight_bit_precision_knows_sinks_and_caps() -> None:
    """With P in float32 nothing is rounded but to that: attention itself, also of rows that see no key."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, rows, heads, 32, generator=generator) for rows, heads in ((9, 4), (5, 2), (5, 2)))
    facts: dict[str, Any] = {"reach": (None, 0), "sinks": torch.tensor([0.5, 3.0, -math.inf, -1.0]), "softcap": 1.5}
    wanted = reference.attention(q, k, v, **facts)
    found = reference.eight_bit_precision(
        q, k, v, **facts, out_dtype=torch.float32, p_dtype=torch.float32, p_scale=256.0
    )
    torch.testing.assert_close(found.out.double(), wanted.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.lse.double(), wanted.lse, rtol=1e-5, atol=1e-6)
    plain = reference.attention(q, k, v, reach=(None, 0))
    assert not torch.allclose(plain.out, wanted.out, atol=1e-3)


def test_what_cut_off_sums_move_beside_sinks_and_caps() -> None:
    """A sink takes as much of a row's weight as its LSE says; a cap makes an error smaller by its slope."""
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, rows, 2, 64, generator=generator) for rows in (6, 40))
    plain, lse = reference.sum_slack(q, k, reach=(None, None)), reference.attention(q, k, k, reach=(None, None)).lse
    sinks = torch.tensor([1.0, 7.0])
    beside = reference.attention(q, k, k, reach=(None, None), sinks=sinks).lse
    found = reference.sum_slack(q, k, reach=(None, None), sinks=sinks)
    torch.testing.assert_close(found, plain * torch.exp(lse - beside))
    one = reference.sum_slack(q, k[:, :1], reach=(None, None))  # a single key has all of the weight
    capped = reference.sum_slack(q, k[:, :1], reach=(None, None), softcap=0.5)
    scores = torch.einsum("bqhd,bkhd->bhq", q.double(), k[:, :1].double()) / 8
    torch.testing.assert_close(capped, one * (1 - torch.tanh(scores / 0.5).square()))
    hidden = reference.sum_slack(q, k, reach=(0, 0), softcap=0.5)
    assert hidden.isfinite().all() and (hidden < plain).any()
