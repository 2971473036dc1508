"""FlashAttention-3's functions, by the modules of fa3gen: change the import, and nothing else.

from fa3gen.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Names, order, defaults and what is returned are those of hopper/flash_attn_interface.py of FlashAttention. What is ours
comes behind them, by keyword only: `out`, a tensor to write O to, and `s_aux`, attention sinks.

Served are the forward of bfloat16 and float16 tensors that need no gradient: dense, packed with offsets (varlen), and a
contiguous cache, each with lengths on the device, causal, and with the windows, sinks and caps of the scores that there
are modules for. Whatever else is asked for raises NotImplementedError, which names the argument and what to do instead.
Where there is no module for the head dim, window, sinks or cap, NoKernel says how to make one.

Accepted and ignored, since they change no result: `pack_gqa` (fa3gen chooses), `sm_margin` (all SMs are used),
`deterministic` (it concerns the backward; the forward always is), `scheduler_metadata` (the modules keep their own
counters), and `cu_seqlens_k_new` where no new keys are given.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fa3gen.run.calls import dispatch_modes
from fa3gen.run.dispatch import ArgumentError
from fa3gen.run.ops import attention
from fa3gen.run.packed_ops import attention_packed
from fa3gen.spec.model import WINDOW_MAX

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

NO_WINDOW = (-1, -1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention of dense tensors: see `fa3gen.attention`.

    Args:
        q: (batch, seq_q, heads_q, d), bfloat16 or float16, without requires_grad in grad mode.
        k, v: (batch, seq_k, heads_kv, d) and (batch, seq_k, heads_kv, d_v), heads_q a multiple of heads_kv.
        softmax_scale: Factor of the scores; 1 / sqrt(d) by default.
        causal: Query i sees keys j <= i + seq_k - seq_q.
        window_size: (left, right) of that diagonal, -1 for any number; with `causal`, none on the right.
        return_attn_probs: Return (O, LSE), LSE (batch, heads_q, seq_q) float32.
        softcap: Scores become softcap tanh(softmax_scale S / softcap) before the mask; 0.0 for no cap.
        out: (batch, seq_q, heads_q, d_v) of q's dtype to write O to.
        s_aux: (heads_q,), bfloat16 or float32, `sinks` of `fa3gen.attention`, as messages call it.
        qv, q_descale, k_descale, v_descale, attention_chunk, num_splits: Not served but by default.
        pack_gqa, deterministic, sm_margin: Ignored.

    Returns:
        O, (batch, seq_q, heads_q, d_v), or (O, LSE). A row with no visible key has O = 0 and LSE = -inf, or its sink.
    """
    _check_served(qv, (q_descale, k_descale, v_descale), chunk=attention_chunk, num_splits=num_splits)
    q, k, v = _contiguous_rows(q), _contiguous_rows(k), _contiguous_rows(v)
    window = None
    if window_size != NO_WINDOW:
        causal, window = _mask(causal, window_size, q.shape[1], k.shape[1])
    return attention(
        q,
        k,
        v,
        causal=causal,
        window=window,
        sinks=s_aux,
        softcap=softcap or None,
        scale=softmax_scale,
        out=out,
        return_lse=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
    *,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention of packed sequences: see `fa3gen.attention_packed`.

    Args:
        q: (total_q, heads_q, d), bfloat16 or float16, without requires_grad in grad mode.
        k, v: (total_k, heads_kv, d) and (total_k, heads_kv, d_v), heads_q a multiple of heads_kv.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32, where sequences begin, and where the last one ends.
        max_seqlen_q, max_seqlen_k: The longest sequences. No result depends on them but that of a window, which is left
            away where it reaches farther than they say.
        seqused_q, seqused_k: (sequences,) int32, how many rows of each sequence there are; by default all.
        window_size: As for `flash_attn_func`, by the lengths of each sequence.
        return_attn_probs: Return (O, LSE), LSE (heads_q, total_q) float32.
        out: (total_q, heads_q, d_v) of q's dtype to write O to.
        softmax_scale, causal, softcap, s_aux, and all others: As for `flash_attn_func`.

    Returns:
        O, (total_q, heads_q, d_v), or (O, LSE). Rows that are in no sequence are not written.
    """
    _check_served(qv, (q_descale, k_descale, v_descale), chunk=attention_chunk, num_splits=num_splits)
    window = None
    if window_size != NO_WINDOW:
        causal, window = _mask(causal, window_size, max_seqlen_q, max_seqlen_k)
    return attention_packed(
        _contiguous_rows(q),
        _contiguous_rows(k),
        _contiguous_rows(v),
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        causal=causal,
        window=window,
        sinks=s_aux,
        softcap=softcap or None,
        scale=softmax_scale,
        out=out,
        return_lse=return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    *,
    out: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Any:
    """Attention to a contiguous cache, of which each sequence uses as much as `cache_seqlens` says.

    The cache is seen as packed sequences, equally far apart, and is not copied; few queries leave most of a module's
    tile of queries empty.

    Args:
        q: (batch, seq_q, heads_q, d), or (total_q, heads_q, d) with cu_seqlens_q and max_seqlen_q.
        k_cache, v_cache: (batch, seq_cache, heads_kv, d) and (.., d_v), with any strides that are multiples of a row's.
        cache_seqlens: (batch,) int32 on the GPU, or a number for all: where the keys of each sequence end; by default
            at the end of the cache.
        cache_leftpad: (batch,) int32 on the GPU: where the keys of each sequence begin; by default at the first.
        cu_seqlens_q: (batch + 1,) int32, where sequences begin in q, and where the last one ends.
        return_softmax_lse: Return (O, LSE, and two tensors without elements, as upstream without splits). LSE is
            (batch, heads_q, seq_q), or (heads_q, total_q).
        out: Tensor of O's shape and q's dtype to write O to, contiguous where it is (batch, seq_q, ..).
        k, v, qv, rotary_cos, rotary_sin, rotary_seqlens, cache_batch_idx, page_table, q_descale, k_descale, v_descale,
            attention_chunk, num_splits: Not served but by default.
        cu_seqlens_k_new, rotary_interleaved, scheduler_metadata, pack_gqa, sm_margin: Ignored.
        softmax_scale, causal, window_size, softcap, s_aux: As for `flash_attn_func`.

    Returns:
        O, (batch, seq_q, heads_q, d_v) or (total_q, heads_q, d_v); with return_softmax_lse, four tensors.
    """
    _check_served(qv, (q_descale, k_descale, v_descale), chunk=attention_chunk, num_splits=num_splits)
    _refuse(k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens)
    _refuse(cache_batch_idx=cache_batch_idx, page_table=page_table)
    if k_cache.stride(-1) != 1 or v_cache.stride(-1) != 1:
        raise ArgumentError("k_cache and v_cache need a contiguous last dimension: a copy would not be the cache")
    q = _contiguous_rows(q)
    seq_q = q.shape[1] if cu_seqlens_q is None else max_seqlen_q
    causal, window = _mask(causal, window_size, seq_q, k_cache.shape[1])
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": softmax_scale}
    options |= {"sinks": s_aux, "softcap": softcap or None, "return_lse": return_softmax_lse}
    if cu_seqlens_q is None and cache_seqlens is None and cache_leftpad is None:
        returned = attention(q, k_cache, v_cache, out=out, **options)
    else:
        cache, begins, used = _cache_as_packed(k_cache, v_cache, cache_seqlens, cache_leftpad)
        options |= {"seqused_k": used, "max_seqlen_q": seq_q}
        if cu_seqlens_q is None:
            returned = _of_equal_lengths(q, cache, begins, out, options)
        else:
            returned = attention_packed(q, *cache, cu_seqlens_q, begins, out=out, **options)
    if not return_softmax_lse:
        return returned
    return *returned, *(q.new_empty(0, dtype=torch.float32) for _ in range(2))


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """A zero, (1,) int32 beside `cache_seqlens`, for callers that pass it on: the modules plan on the device, anew each
    time, and have counters of their own."""
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device)


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge what parts of the keys gave, each with its own O and LSE; in plain torch, several passes over memory.

    Args:
        out_partial: (parts, batch, seq, heads, d) float32. Where the LSE is -inf it may hold anything.
        lse_partial: (parts, batch, seq, heads) float32.
        out: (batch, seq, heads, d) to write O to.
        out_dtype: Of O: float32 by default, bfloat16 or float16.

    Returns:
        O, (batch, seq, heads, d), and LSE, (batch, seq, heads), in which seq is contiguous.
    """
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if x.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {x.dtype}; it needs to be torch.float32")
    if out_partial.shape[:-1] != lse_partial.shape:
        needed = tuple(out_partial.shape[:-1])
        raise ArgumentError(f"lse_partial has shape {tuple(lse_partial.shape)}; it needs to be {needed}")
    if out is not None and out_dtype not in (None, out.dtype):
        raise ArgumentError(f"out has dtype {out.dtype}, and out_dtype is {out_dtype}; leave one of them out")
    lse = torch.logsumexp(lse_partial.transpose(2, 3), dim=0).transpose(1, 2)
    shift = lse.masked_fill(lse == -torch.inf, 0.0)  # where no part has a key: exp(-inf - 0) = 0
    weights = torch.exp(lse_partial - shift)[..., None]
    merged = torch.where(weights > 0, weights * out_partial, 0.0).sum(0)
    if out is None:
        return merged.to(out_dtype or torch.float32), lse
    return out.copy_(merged), lse


# What is not served

_NO_SCALES = None, None, None
_FP8 = "pass bfloat16 or float16 tensors: FP8 is not served"
_ROTATE = "rotate q and the new keys before the call"
_APPEND = "write the new keys and values into the cache, and pass cache_seqlens with them counted"

# By argument: what to do instead.
_INSTEAD = {
    "qv": "pass q and k whole, in head dims up to 256: absorbed MLA is not served",
    "q_descale": _FP8,
    "k_descale": _FP8,
    "v_descale": _FP8,
    "attention_chunk": "cut the sequences at multiples of the chunk, by cu_seqlens_q and cu_seqlens_k",
    "num_splits": "pass 1, or 0, which compute the same: keys are not split",
    "k": _APPEND,
    "v": _APPEND,
    "rotary_cos": _ROTATE,
    "rotary_sin": _ROTATE,
    "rotary_seqlens": _ROTATE,
    "cache_batch_idx": "pass k_cache[cache_batch_idx] and v_cache[cache_batch_idx]",
    "page_table": "gather the pages, k_cache[page_table].flatten(1, 2) and the same of v_cache, and pass cache_seqlens",
}


def _check_served(qv: Any, scales: tuple[Any, Any, Any], *, chunk: int, num_splits: int) -> None:
    """Raise NotImplementedError for the first of what no function serves; `scales` of q, k and v."""
    if scales == _NO_SCALES and qv is None and not chunk and num_splits <= 1:
        return
    _refuse(qv=qv, **dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True)))
    _refuse(attention_chunk=chunk or None, num_splits=num_splits if num_splits > 1 else None)


def _refuse(**given: Any) -> None:
    """Raise NotImplementedError for the first of these arguments that is not None."""
    for name, value in given.items():
        if value is not None:
            said = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
            raise NotImplementedError(f"{name} is {said}, which fa3gen does not serve; {_INSTEAD[name]}")


# Windows and tensors as fa3gen has them


def _mask(
    causal: bool, window_size: tuple[int, int], max_q: int | None, max_k: int | None
) -> tuple[bool, tuple[int, int] | None]:
    """`causal` and `window` of `fa3gen.attention`. A side that hides nothing of the longest sequences has no bound."""
    left, right = window_size
    if type(max_k) is int and left >= max_k - 1:
        left = -1
    if causal:
        right = 0
    elif type(max_q) is int and right >= max_q - 1:
        right = -1
    if left < 0 and right <= 0:
        return right == 0, None
    return False, (WINDOW_MAX if left < 0 else left, WINDOW_MAX if right < 0 else right)


def _contiguous_rows(x: Tensor) -> Tensor:
    """The tensor, or a copy whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _cache_as_packed(
    k_cache: Tensor, v_cache: Tensor, seqlens: int | Tensor | None, leftpad: Tensor | None
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """A cache as packed k and v, the offsets of its sequences, and how many rows of each there are.

    Raises NotImplementedError where the cache would have to be copied.
    """
    batch, rows = k_cache.shape[:2]
    apart = _rows_apart(k_cache, "k_cache")
    if apart != _rows_apart(v_cache, "v_cache") or v_cache.shape[:2] != k_cache.shape[:2]:
        raise NotImplementedError(
            f"k_cache has shape {tuple(k_cache.shape)} and strides {k_cache.stride()}, v_cache {tuple(v_cache.shape)} "
            f"and {v_cache.stride()}; they need the same sequences, equally many rows apart"
        )
    begins = _even_offsets(batch, apart, k_cache)
    if not isinstance(seqlens, Tensor):
        seqlens = begins.new_full((batch,), rows if seqlens is None else seqlens)
    if leftpad is not None:
        begins, seqlens = begins + torch.nn.functional.pad(leftpad, (0, 1)), seqlens - leftpad
    total = max(0, (batch - 1) * apart + rows)
    k, v = (x.as_strided((total, *x.shape[2:]), x.stride()[1:]) for x in (k_cache, v_cache))
    return (k, v), begins, seqlens


def _rows_apart(cache: Tensor, name: str) -> int:
    """How many rows behind a sequence's first one the next one's is. NotImplementedError where that is no number."""
    batch, rows, *_ = cache.shape
    if batch < 2:
        return rows
    apart, rest = divmod(cache.stride(0), cache.stride(1) or 1)
    if rest or apart < rows or not cache.stride(1):
        raise NotImplementedError(
            f"{name} has strides {cache.stride()}, by which its sequences are no rows of one tensor; pass "
            f"{name}.contiguous(), or keep the cache in one tensor (batch, seq, heads, head dim)"
        )
    return apart


def _of_equal_lengths(
    q: Tensor, cache: tuple[Tensor, Tensor], begins: Tensor, out: Tensor | None, options: dict[str, Any]
) -> Any:
    """O, or O and LSE, of q (batch, seq_q, heads_q, d) by packed k and v."""
    batch, seq_q, heads_q, _ = q.shape
    into = None if out is None else out.view(batch * seq_q, *out.shape[2:])
    cu_seqlens_q = _even_offsets(batch, seq_q, q)
    returned = attention_packed(q.flatten(0, 1), *cache, cu_seqlens_q, begins, out=into, **options)
    packed, lse = returned if options["return_lse"] else (returned, None)
    found = packed.view(batch, seq_q, *packed.shape[1:]) if out is None else out
    return found if lse is None else (found, lse.view(heads_q, batch, seq_q).transpose(0, 1))


def _even_offsets(batch: int, rows: int, beside: Tensor) -> Tensor:
    """Where sequences begin that are so many rows apart, and where the last one ends."""
    kept = type(beside) is Tensor and beside.is_cuda and not is_dynamo_compiling() and not dispatch_modes()
    if not kept or torch.cuda.is_current_stream_capturing():  # a graph would fill its tensor when it is replayed
        return _new_offsets(batch, rows, beside.device)
    return _kept_offsets(batch, rows, beside.device, torch.cuda.current_stream(beside.device).cuda_stream)


@functools.lru_cache(maxsize=256)
def _kept_offsets(batch: int, rows: int, device: torch.device, stream: int) -> Tensor:
    """The same, once for each stream: on another one it might be read before it is written."""
    return _new_offsets(batch, rows, device)


def _new_offsets(batch: int, rows: int, device: torch.device) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * rows
