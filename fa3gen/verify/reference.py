"""Attention as its definition says it, to measure kernels against. Runs on whatever device the tensors are on.

Shapes throughout: q (batch, seq_q, heads_q, d), k (batch, seq_k, heads_kv, d), v (batch, seq_k, heads_kv, d_v), O
(batch, seq_q, heads_q, d_v), LSE (batch, heads_q, seq_q); d_v is d unless v has a head dim of its own. A mask comes
as the reach (left, right): a query i sees the keys j with -left <= j - i - (seq_k - seq_q) <= right, without a bound
where a side is None. Nothing of specs or of the generator is imported: a mistake there has to show here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

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
    compute_dtype: torch.dtype = torch.float64,
) -> Attention:
    """Compute softmax(scale * Q K^T) V wholly in `compute_dtype` (float64; float32 for large inputs).

    `scale` defaults to 1 / sqrt(d). A row that sees no key gives O = 0 and LSE = -inf.
    """
    dtypes = _Dtypes(scores=compute_dtype, softmax=compute_dtype, p=compute_dtype, out=compute_dtype)
    return _attention(q, k, v, scale=scale, reach=reach, dtypes=dtypes)


def same_precision(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    reach: Reach,
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
    return _attention(q, k, v, scale=scale, reach=reach, dtypes=dtypes, p_scale=p_scale)


class _Dtypes(NamedTuple):
    """What is computed in which dtype: Q K^T, the softmax, P as it goes into P V, and P V."""

    scores: torch.dtype
    softmax: torch.dtype
    p: torch.dtype
    out: torch.dtype


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None,
    reach: Reach,
    dtypes: _Dtypes,
    p_scale: float = 1.0,
) -> Attention:
    """Chunk over query rows."""
    batch, seq_q, heads_q, dim = q.shape
    seq_k, heads_kv = k.shape[1], k.shape[2]
    scale = 1 / math.sqrt(dim) if scale is None else scale
    # query heads that share a kv head become rows of one product: (batch, heads_kv, group, seq_q, d)
    group = heads_q // heads_kv
    queries = q.to(dtypes.scores).reshape(batch, seq_q, heads_kv, group, dim).permute(0, 2, 3, 1, 4)
    keys = k.to(dtypes.scores).permute(0, 2, 3, 1)  # (batch, heads_kv, d, seq_k)
    values = v.to(dtypes.out).permute(0, 2, 1, 3)  # (batch, heads_kv, seq_k, d)
    out = torch.empty((batch, seq_q, heads_q, v.shape[3]), dtype=dtypes.out, device=q.device)
    lse = torch.empty((batch, heads_q, seq_q), dtype=dtypes.softmax, device=q.device)
    bytes_per_row = batch * heads_q * seq_k * torch.finfo(dtypes.softmax).bits // 8
    step = max(1, SCORE_BYTES // max(1, bytes_per_row))
    for start in range(0, seq_q, step):
        stop = min(start + step, seq_q)
        rows = torch.arange(start, stop, device=q.device)
        block = queries[:, :, :, start:stop].flatten(2, 3)  # (batch, heads_kv, group * rows, d)
        scores = (block @ keys).to(dtypes.softmax).reshape(batch, heads_kv, group, stop - start, seq_k) * scale
        seen = visible_keys(reach, seq_q=seq_q, seq_k=seq_k, rows=rows)
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)
        row_lse = torch.logsumexp(scores, dim=-1)  # (batch, heads_kv, group, rows); -inf where no key is seen
        shift = row_lse.masked_fill(row_lse == -math.inf, 0)  # exp(-inf - 0) = 0 rather than exp(nan)
        weights = (p_scale * torch.exp(scores - shift[..., None])).to(dtypes.p).to(dtypes.out)
        rows_out = weights.flatten(2, 3) @ values / p_scale
        out[:, start:stop] = rows_out.reshape(batch, heads_q, stop - start, v.shape[3]).transpose(1, 2)
        lse[:, :, start:stop] = row_lse.flatten(1, 2)
    return Attention(out, lse)


def matmul(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
    """A B, or A B + C, in float64."""
    product = a.double() @ b.double()
    return product if c is None else product + c.double()
