"""How far O may be from float64 attention when every rounding that a kernel does is known.

The model of sm_90a computes exactly what each instruction says, so three things are left that move O: P is rounded to
16 or 8 bits where O = P V runs on WGMMA, sums and exponentials are in float32, and O itself is rounded to its dtype.

With p the exact probabilities of a row, l the row's sum of exp(s - max) with that of its sink, u the unit roundoff of
P's dtype (0 where P stays float32), t half its smallest subnormal, divided by the factor that P is rounded with, and f
the float32 term below, for every element of O

    e     = u sum_j p_j |v_j| + t sum_j |v_j| / l + f sum_j p_j |v_j|
    limit = e + half an ulp of the output dtype at |ref| + e

f = 2^-24 (32 + 4 max_j sum_d scale |q_d k_jd|): a score's rounding error is in proportion to what it sums, and is a
relative error of p. `limit` holds for any order of summation that a kernel may choose, so it is wide where many keys
take part: rounding errors are not all of one sign. `variance` is what they come to when signs are random:

    variance = half_ulp(ref)^2 / 3 + 0.18 u^2 sum_j p_j^2 v_j^2 + t^2 sum_j v_j^2 / (3 l^2) + (f sum_j p_j |v_j|)^2 / 9

0.18 = 0.541 / 3: a third, as for any uniform error, times the mean of 1 / m^2 over mantissas m in [1, 2) whose
logarithm is uniform. The mean of (O - ref)^2 / variance is near 1 for a kernel that rounds as planned.

Beside a sink O is brought to that by a factor in float32, which is 0 where it would be below 2^-126. So with sinks e
has 2^-120 sum_j exp(s_j - max) |v_j|, times what P is multiplied by, as well, and the variance its square: a row whose
sink outweighs all of its keys by so much has O = 0. Between 2^-126 and 2^-120 there is room for factors of v.

LSE moves with the scores, by their mean under p: its slack is 2^-24 sum_j p_j 4 c_j sum_d scale |q_d k_jd|, with c_j
the slope of the cap, 1 without one. It counts where large products cancel: in a score near 0 of products that sum to
thousands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fa3gen.design.masks import reach
from fa3gen.spec.model import Mask
from fa3gen.verify.reference import visible_keys
from fa3gen.verify.runner import half_ulp

FLOAT32_ROUNDOFF = 2.0**-24
MANTISSA_FACTOR = 0.18
LOST_BESIDE_SINK = 2.0**-120  # factors of O that are smaller may be 0
SCORE_ROUNDINGS = 4  # of a score, each of up to a unit roundoff of what it sums


@dataclass(frozen=True)
class Expected:
    """O (batch, seq_q, heads_q, d_v) and LSE (batch, heads_q, seq_q) in float64; limit and variance, shaped like O.

    A row that sees no key has O = 0 and LSE = -inf; its limit is 0: the zeros have to be zeros. `lse_slack`, shaped
    like LSE, is how far that may be off beside what its own criterion allows.
    """

    out: torch.Tensor
    lse: torch.Tensor
    limit: torch.Tensor
    variance: torch.Tensor
    lse_slack: torch.Tensor


def expected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    mask: Mask,
    p_dtype: torch.dtype | None,
    p_factor: float = 1.0,
    out_dtype: torch.dtype | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Expected:
    """Compute attention in float64, and how far a kernel may be from it.

    q is (batch, seq_q, heads_q, d), k (batch, seq_k, heads_kv, d), v (batch, seq_k, heads_kv, d_v); O is written in
    `out_dtype`, by default q's. `p_dtype` is what P is rounded to, None for float32, as `p_factor` times itself: 1 for
    the largest score so far, so that what was rounded before counts less at last, and never more. Scores are capped
    with `softcap`, which makes their errors smaller: the slope of the cap is at most 1. All scores are held at once:
    for small inputs.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    out_dtype = q.dtype if out_dtype is None else out_dtype
    group = q.shape[2] // k.shape[2]
    queries = q.double().transpose(1, 2)  # (batch, heads_q, seq_q, d)
    keys, values = (tensor.double().repeat_interleave(group, dim=2).transpose(1, 2) for tensor in (k, v))
    scores = queries @ keys.transpose(2, 3) * scale
    sizes = queries.abs() @ keys.abs().transpose(2, 3) * scale
    moves = FLOAT32_ROUNDOFF * SCORE_ROUNDINGS * sizes
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
        moves *= 1 - (scores / softcap).square()
    seen = visible_keys(reach(mask), seq_q=q.shape[1], seq_k=k.shape[1], rows=torch.arange(q.shape[1]))
    if seen is None:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool)
    scores = scores.masked_fill(~seen, -math.inf)
    top = _largest(scores, -math.inf)
    sees = top > -math.inf
    top = top.masked_fill(~sees, 0)
    weights = torch.exp(scores - top)
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    # Of a key with the largest score: 1 / l.
    share = torch.exp(top - lse.masked_fill(lse == -math.inf, 0)[..., None]).where(sees, 0)
    p = weights * share

    magnitude = p @ values.abs()
    rest = FLOAT32_ROUNDOFF * (32 + SCORE_ROUNDINGS * _largest(sizes.masked_fill(~seen, 0), 0)) * magnitude
    roundoff, subnormal = (0.0, 0.0) if p_dtype is None else _roundoff(p_dtype)
    subnormal /= p_factor
    seen_sum, seen_squares = (seen.double() @ power for power in (values.abs(), values.square()))
    out = p @ values
    lost = torch.zeros_like(out) if sinks is None else LOST_BESIDE_SINK * p_factor * (weights @ values.abs())
    error = roundoff * magnitude + subnormal * seen_sum * share + rest + lost
    limit = torch.where(sees, half_ulp(out.abs() + error, out_dtype) + error, 0.0)
    variance = (
        half_ulp(out, out_dtype).square() / 3
        + MANTISSA_FACTOR * roundoff**2 * (p.square() @ values.square())
        + subnormal**2 / 3 * seen_squares * share.square()
        + rest.square() / 9
        + lost.square()
    )
    lse_slack = (p * moves).sum(-1)
    return Expected(out.transpose(1, 2), lse, limit.transpose(1, 2), variance.transpose(1, 2), lse_slack)


def joined(parts: Sequence[Expected]) -> Expected:
    """What is expected of parts, one behind the other along the queries, as `reference.joined` has their results."""
    if len(parts) == 1:
        return parts[0]
    return Expected(
        out=torch.cat([part.out for part in parts], dim=1),
        lse=torch.cat([part.lse for part in parts], dim=2),
        limit=torch.cat([part.limit for part in parts], dim=1),
        variance=torch.cat([part.variance for part in parts], dim=1),
        lse_slack=torch.cat([part.lse_slack for part in parts], dim=2),
    )


def _largest(values: torch.Tensor, without: float) -> torch.Tensor:
    """Along the last dimension, which stays; `without` where that has no elements."""
    return torch.nn.functional.pad(values, (0, 1), value=without).amax(-1, keepdim=True)


def _roundoff(dtype: torch.dtype) -> tuple[float, float]:
    """Unit roundoff, and half the smallest subnormal, of a dtype of 16 or 8 bits."""
    info = torch.finfo(dtype)
    return info.eps / 2, info.tiny * info.eps / 2


def used(error: torch.Tensor, wanted: Expected) -> torch.Tensor:
    """The share of its limit that each absolute error uses; infinite where none is allowed and there is one."""
    return torch.where(error > 0, error / wanted.limit, 0.0)
