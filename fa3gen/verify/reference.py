"""Attention as its definition says it, to measure kernels against. Runs on whatever device the tensors are on.

Shapes throughout: q (batch, seq_q, heads_q, d), k (batch, seq_k, heads_kv, d), v (batch, seq_k, heads_kv, d_v), O
(batch, seq_q, heads_q, d_v), LSE (batch, heads_q, seq_q); d_v is d unless v has a head dim of its own. A mask comes
as the reach (left, right): a query i sees the keys j with -left <= j - i - (seq_k - seq_q) <= right, without a bound
where a side is None. With `softcap`, scores are softcap tanh(scale Q K^T / softcap) before the mask; `sinks`
(heads_q,) are logits without a value, of which each row of a head has one.

Nothing of specs or of the generator is imported: a mistake there has to show here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

TANH_ERROR = 2.0**-11  # most that tanh.approx.f32 is off, of its result (PTX ISA, "tanh")
# Of products of 8 bits a tensor core keeps so much of the largest, and adds so many at once (`fa3gen.cpu.tensor_core`).
KEPT_8BIT, DEPTH_8BIT = 2.0**-13, 32
SIGMAS = 4.0  # of an error whose parts have random signs
SCORE_BYTES = 1 << 28  # scores held at one time: 256 MiB, so that 16k x 16k with 32 heads fits anywhere

Reach = tuple[int | None, int | None]  # keys left and right of the diagonal, as the mask shows them


class Attention(NamedTuple):
    """O and the natural logarithm of each row's sum of exponentials."""

    out: torch.Tensor
    lse: torch.Tensor


def joined(parts: list[Attention]) -> Attention:
    """Results of one batch size and as many heads each, one behind the other along the queries."""
    if len(parts) == 1:
        return parts[0]
    return Attention(torch.cat([part.out for part in parts], dim=1), torch.cat([part.lse for part in parts], dim=2))


def visible_keys(reach: Reach, *, seq_q: int, seq_k: int, rows: torch.Tensor) -> torch.Tensor | None:
    """Return the boolean matrix (rows, seq_k) of keys that each query row sees; None when all see all."""
    left, right = reach
    if left is None and right is None:
        return None
    # distance of a key from the row's diagonal, which ends in the bottom right corner
    distance = torch.arange(seq_k, device=rows.device)[None, :] - rows[:, None] - (seq_k - seq_q)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    reach: Reach,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> Attention:
    """Compute softmax(scale * Q K^T) V wholly in `compute_dtype` (float64; float32 for large inputs).

    `scale` defaults to 1 / sqrt(d). A row that sees no key gives O = 0 and LSE = -inf, or its sink.
    """
    dtypes = _Dtypes(scores=compute_dtype, softmax=compute_dtype, p=compute_dtype, out=compute_dtype)
    return _attention(q, k, v, scale=scale, reach=reach, sinks=sinks, softcap=softcap, dtypes=dtypes)


def tanh_slack(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    reach: Reach,
    sinks: torch.Tensor | None = None,
    softcap: float,
) -> Attention:
    """How far O and LSE in float64 may move when each tanh of the cap is off by TANH_ERROR of itself.

    A score S then moves by e, |e| <= TANH_ERROR |S|, which is at most E = TANH_ERROR softcap. With p the exact
    probabilities, O moves by sum p (exp(e) - 1) (v - O) / sum p exp(e), hence by no more than
    exp(2 E) (sum p |e| |v| + |O| sum p |e|), and LSE by log(sum p exp(e)), no more than exp(E) sum p |e|.
    """
    exact = attention(q, k, v, scale=scale, reach=reach, sinks=sinks, softcap=softcap)
    slack, worst = Attention(torch.empty_like(exact.out), torch.empty_like(exact.lse)), math.exp(TANH_ERROR * softcap)
    sizes = v.double().abs().permute(0, 2, 1, 3)  # (batch, heads_kv, seq_k, d)
    for rows, scores in _scores(q, k, scale=scale, reach=reach, softcap=softcap, dtypes=_FLOAT64):
        lse = exact.lse[:, :, rows]
        p = torch.exp(scores.flatten(1, 2) - lse.masked_fill(lse == -math.inf, 0)[..., None])
        moves = p * scores.flatten(1, 2).masked_fill(p == 0, 0).abs() * TANH_ERROR  # (batch, heads_q, rows, seq_k)
        of_row = moves.sum(-1)
        of_out = exact.out[:, rows].abs() * of_row.transpose(1, 2)[..., None]
        slack.out[:, rows] = worst**2 * (_times_values(moves.view_as(scores), sizes) + of_out)
        slack.lse[:, :, rows] = worst * of_row
    return slack


def same_precision(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    reach: Reach,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    out_dtype: torch.dtype | None = None,
    p_scale: float = 1.0,
) -> Attention:
    """Compute attention the plain PyTorch way in the inputs' own 16-bit dtype: the yardstick of a fair error.

    As in FlashAttention's tests: Q K^T rounded to 16 bits, softmax in float32, P rounded to 16 bits, O rounded to
    16 bits. O comes in the inputs' dtype, LSE in float32. With `out_dtype` float32 nothing but P is rounded to 16 bits,
    which is all that a kernel has to round. P is rounded as `p_scale` times itself, with the factor taken out of O:
    other factors than powers of two give other errors of the same size.
    """
    if out_dtype in (None, q.dtype):
        dtypes = _Dtypes(scores=q.dtype, softmax=torch.float32, p=q.dtype, out=q.dtype)
    else:
        dtypes = _Dtypes(scores=torch.float32, softmax=torch.float32, p=q.dtype, out=torch.float32)
    return _attention(q, k, v, scale=scale, reach=reach, sinks=sinks, softcap=softcap, dtypes=dtypes, p_scale=p_scale)


def eight_bit_precision(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    reach: Reach,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    out_dtype: torch.dtype,
    p_dtype: torch.dtype,
    p_scale: float,
) -> Attention:
    """Compute attention with P in 8 bits: the yardstick of kernels whose products are of 8-bit operands.

    Of q, k and v, in any dtype, nothing is rounded but to float32. exp(S - max) is rounded as `p_scale` times itself;
    all sums are in float32. O comes in `out_dtype`, LSE in float32.
    """
    dtypes = _Dtypes(scores=torch.float32, softmax=torch.float32, p=p_dtype, out=torch.float32)
    facts: dict[str, Any] = {"scale": scale, "reach": reach, "sinks": sinks, "softcap": softcap}
    found = _attention(q, k, v, **facts, dtypes=dtypes, p_scale=p_scale, of_largest=True)
    return Attention(found.out.to(out_dtype), found.lse)


def sum_slack(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    scale: float | None = None,
    reach: Reach,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """How far LSE (batch, heads_q, seq_q) may be off because a tensor core cuts off sums of products of 8 bits.

    An instruction cuts each of DEPTH_8BIT products and the sum so far off to KEPT_8BIT of the largest of these, and
    then their sum. If signs are random, a score S is off by e, of mean square the sum of (DEPTH_8BIT + 2) / 3 squares
    of that over its instructions, and LSE by sum p e. This is SIGMAS times sum p |e|. A cap makes e as much smaller as
    its slope is, a sink p.
    """
    exact = attention(q, k, k, scale=scale, reach=reach, sinks=sinks, softcap=softcap).lse
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    group, slack = q.shape[2] // k.shape[2], torch.empty_like(exact)
    keys = k.double().repeat_interleave(group, dim=2).permute(0, 2, 3, 1)  # (batch, heads_q, d, seq_k)
    for rows, scores in _scores(q, k, scale=scale, reach=reach, softcap=softcap, dtypes=_FLOAT64):
        lse = exact[:, :, rows]
        p = torch.exp(scores.flatten(1, 2) - lse.masked_fill(lse == -math.inf, 0)[..., None])
        if softcap is not None:
            p *= (1 - (scores.flatten(1, 2) / softcap).square()).clamp(min=0)  # of hidden keys p is 0
        queries = q[:, rows].double().transpose(1, 2)  # (batch, heads_q, rows, d)
        total, variance = torch.zeros_like(p), torch.zeros_like(p)
        for first in range(0, q.shape[-1], DEPTH_8BIT):
            a, b = queries[..., first : first + DEPTH_8BIT], keys[..., first : first + DEPTH_8BIT, :]
            before, total = total, total + a @ b
            largest = a.abs().amax(-1, keepdim=True) * b.abs().amax(-2, keepdim=True)
            largest = torch.maximum(largest, torch.maximum(before.abs(), total.abs()))
            variance += (DEPTH_8BIT + 2) / 3 * (KEPT_8BIT * largest).square()
        slack[:, :, rows] = SIGMAS * factor * (p * variance.sqrt()).sum(-1)
    return slack


class _Dtypes(NamedTuple):
    """What is computed in which dtype: Q K^T, the softmax, P as it goes into P V, and P V."""

    scores: torch.dtype
    softmax: torch.dtype
    p: torch.dtype
    out: torch.dtype


_FLOAT64 = _Dtypes(*[torch.float64] * 4)


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    reach: Reach,
    sinks: torch.Tensor | None,
    softcap: float | None,
    dtypes: _Dtypes,
    p_scale: float = 1.0,
    of_largest: bool = False,
) -> Attention:
    """Chunk over query rows. What is rounded is exp(S - LSE), or exp(S - max) if it is `of_largest`."""
    batch, seq_q, heads_q, _ = q.shape
    values = v.to(dtypes.out).permute(0, 2, 1, 3)  # (batch, heads_kv, seq_k, d)
    out = torch.empty((batch, seq_q, heads_q, v.shape[3]), dtype=dtypes.out, device=q.device)
    lse = torch.empty((batch, heads_q, seq_q), dtype=dtypes.softmax, device=q.device)
    for rows, scores in _scores(q, k, scale=scale, reach=reach, softcap=softcap, dtypes=dtypes):
        row_lse = torch.logsumexp(scores, dim=-1)  # (batch, heads_kv, group, rows); -inf where no key is seen
        if sinks is not None:
            row_lse = torch.logaddexp(row_lse, sinks.to(row_lse.dtype).reshape(*scores.shape[1:3], 1))
        shift = scores.amax(-1) if of_largest and scores.shape[-1] else row_lse
        sees = shift > -math.inf
        shift = shift.where(sees, 0)  # exp(-inf - 0) = 0 rather than exp(nan)
        weights = (p_scale * torch.exp(scores - shift[..., None])).to(dtypes.p).to(dtypes.out)
        if of_largest:
            weights *= torch.exp(shift - row_lse).where(sees, 0)[..., None].to(dtypes.out)
        out[:, rows] = _times_values(weights, values) / p_scale
        lse[:, :, rows] = row_lse.flatten(1, 2)
    return Attention(out, lse)


def _scores(
    q: torch.Tensor, k: torch.Tensor, *, scale: float | None, reach: Reach, softcap: float | None, dtypes: _Dtypes
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield query rows, as many as fit, and their scores (batch, heads_kv, group, rows, seq_k), capped and masked."""
    batch, seq_q, heads_q, dim = q.shape
    seq_k, heads_kv = k.shape[1], k.shape[2]
    scale = 1 / math.sqrt(dim) if scale is None else scale
    # query heads that share a kv head become rows of one product: (batch, heads_kv, group, seq_q, d)
    group = heads_q // heads_kv
    queries = q.to(dtypes.scores).reshape(batch, seq_q, heads_kv, group, dim).permute(0, 2, 3, 1, 4)
    keys = k.to(dtypes.scores).permute(0, 2, 3, 1)  # (batch, heads_kv, d, seq_k)
    bytes_per_row = batch * heads_q * seq_k * torch.finfo(dtypes.softmax).bits // 8
    step = max(1, SCORE_BYTES // max(1, bytes_per_row))
    for start in range(0, seq_q, step):
        stop = min(start + step, seq_q)
        block = queries[:, :, :, start:stop].flatten(2, 3)  # (batch, heads_kv, group * rows, d)
        scores = (block @ keys).to(dtypes.softmax).reshape(batch, heads_kv, group, stop - start, seq_k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = visible_keys(reach, seq_q=seq_q, seq_k=seq_k, rows=torch.arange(start, stop, device=q.device))
        yield slice(start, stop), scores if seen is None else scores.masked_fill(~seen, -math.inf)


def _times_values(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(batch, heads_kv, group, rows, seq_k) times (batch, heads_kv, seq_k, d), as O has it: (batch, rows, heads, d)."""
    batch, heads_kv, group, rows, _ = weights.shape
    product = weights.flatten(2, 3) @ values
    return product.reshape(batch, heads_kv * group, rows, values.shape[3]).transpose(1, 2)


def combine(out_partial: torch.Tensor, lse_partial: torch.Tensor) -> Attention:
    """O and LSE of all keys, in the dtype of those of parts, which are the first dimension: O (parts, .., d), LSE
    (parts, ..). A part whose LSE is -inf may hold anything, and counts nothing.
    """
    lse = torch.logsumexp(lse_partial, dim=0)
    weights = torch.exp(lse_partial - lse.masked_fill(torch.isneginf(lse), 0))[..., None]
    return Attention(torch.where(torch.isneginf(lse_partial)[..., None], 0, weights * out_partial).sum(0), lse)


def matmul(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
    """A B, or A B + C, in float64."""
    product = a.double() @ b.double()
    return product if c is None else product + c.double()


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix, H[2n] = [[H[n], H[n]], [H[n], -H[n]]], of a power of two as size; in float64."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while found.shape[0] < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found


def rotate(x: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """H D x / sqrt(d) of each row of x, (.., d), D the diagonal matrix of `signs`, (d,); in float64."""
    size = x.shape[-1]
    return (x.double() * signs.double()) @ hadamard(size).to(x.device) / math.sqrt(size)


def round_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of e4m3 to x, ties to even, at most 448: three bits behind the first, down to 2^-6; float64.

    OCP 8-bit Floating Point Specification, E4M3; saturating.
    """
    x = x.double()
    exponent = (torch.frexp(x).exponent - 1).clamp(min=-6)  # x = m 2^exponent with 1 <= |m| < 2, or a subnormal number
    unit = torch.ldexp(torch.ones_like(x), exponent - 3)
    return (torch.round(x / unit) * unit).clamp(-448, 448)
