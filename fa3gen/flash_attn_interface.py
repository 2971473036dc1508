"""FlashAttention-3's functions, by the modules of fa3gen: change the import, and nothing else.

from fa3gen.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Names, order, defaults and what is returned are those of hopper/flash_attn_interface.py of FlashAttention. What is ours
comes behind them, by keyword only: `out`, a tensor to write O to, `s_aux`, attention sinks, and `deterministic_batch`,
the same bits in any batch, of which upstream's `deterministic` says nothing.

Served are the forward of bfloat16 and float16 tensors that need no gradient: dense, packed with offsets (varlen), and
caches, contiguous and paged, to which new keys may be appended; each with lengths on the device, causal, and with the
windows, sinks and caps of the scores that there are modules for. Beside such queries packed keys and caches may have
8 bits, float8_e4m3fn, with `k_descale` and `v_descale`. All of q, k and v may have them, with `q_descale` as well; O is
bfloat16. Both come with the same masks, sinks and caps. With `attention_chunk` sequences are cut where chunks of keys
end, in plain torch on the device (`fa3gen.run.chunks`), and attended as packed ones. Whatever else is asked for raises
NotImplementedError, which names the argument and what to do instead. Where there is no module for the head dim, window,
sinks or cap, NoKernel says how to make one; with FA3GEN_RENDER=1, set before fa3gen is imported, the call
makes it, as with `render=True` of `fa3gen.attention`. Where none can be made, as for head dims above 256, NoKernel says
which rules are against it, and is a NotImplementedError, too.

`num_splits` is a request on how work is divided, as upstream: below 1 for whatever was measured to be fastest, more
than 1 for so many parts of the keys of a tile of queries. 1 is for no module that splits keys, given to
`flash_attn_with_kvcache`; it is the default of the other two, and asks them for nothing.

Accepted and ignored, since they change no result: `pack_gqa` (fa3gen chooses), `sm_margin` (all SMs are used),
`deterministic` (it concerns the backward; the forward always is), `scheduler_metadata` (the modules keep their own
counters), `cu_seqlens_k_new` where no new keys are given, and `rotary_*` but for cos and sin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fa3gen.base.switches import turned_on
from fa3gen.run import calls, chunks
from fa3gen.run.combine_ops import combine
from fa3gen.run.dispatch import ArgumentError
from fa3gen.run.eight_bits import EIGHT_BITS, FACTORS, of_blocks
from fa3gen.run.equal_lengths import even_offsets, of_equal_queries
from fa3gen.run.kv_cache import KvCache, Pair
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
# Upstream's functions have no argument for it: whether a module that is missing is rendered and compiled.
RENDER_VARIABLE = "FA3GEN_RENDER"
RENDER = turned_on(RENDER_VARIABLE)


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
    deterministic_batch: bool = False,
) -> Any:
    """Attention of dense tensors: see `fa3gen.attention`.

    Args:
        q: (batch, seq_q, heads_q, d), bfloat16, float16, or float8_e4m3fn, which comes without deterministic_batch;
            without requires_grad in grad mode.
        k, v: (batch, seq_k, heads_kv, d) and (batch, seq_k, heads_kv, d_v), heads_q a multiple of heads_kv. A v of 8
            bits whose sequence is contiguous is copied; `fa3gen.attention` takes it as it is, where a module does.
        q_descale, k_descale, v_descale: (batch, heads_kv) or one element, float32, factors of q, k and v of 8 bits, as
            for `fa3gen.attention`.
        softmax_scale: Factor of the scores; 1 / sqrt(d) by default.
        causal: Query i sees keys j <= i + seq_k - seq_q.
        window_size: (left, right) of that diagonal, -1 for any number; with `causal`, none on the right.
        return_attn_probs: Return (O, LSE), LSE (batch, heads_q, seq_q) float32.
        softcap: Scores become softcap tanh(softmax_scale S / softcap) before the mask; 0.0 for no cap.
        out: (batch, seq_q, heads_q, d_v) of q's dtype to write O to, bfloat16 beside q of 8 bits.
        s_aux: (heads_q,), bfloat16 or float32, `sinks` of `fa3gen.attention`, as messages call it.
        num_splits: As for `fa3gen.attention`, but 1, the default, asks for nothing, and is as 0.
        deterministic_batch: As for `fa3gen.attention`.
        attention_chunk: Keys of a chunk, 0 for none. Query i, at position p = i + seq_k - seq_q, sees those keys j
            alone with j // attention_chunk = p // attention_chunk, rounded down, as far as the mask shows them. Where
            there are several chunks the call is one of packed sequences: k and v are copied, unless their batch and
            sequence are rows of one tensor, and `out` has to be contiguous.
        qv: Not served but by default.
        pack_gqa, deterministic, sm_margin: Ignored.

    Returns:
        O, (batch, seq_q, heads_q, d_v), or (O, LSE). A row with no visible key has O = 0 and LSE = -inf, or its sink.
    """
    num_splits = num_splits if num_splits > 1 else 0  # 1 is the default, and asks for nothing
    scales = q_descale, k_descale, v_descale
    eight_bits, chunk = _check_served(q, qv, scales, attention_chunk), attention_chunk
    if chunk:
        calls.check_tensors({"q": q, "k": k, "v": v}, "(batch, seq, heads, head dim)")
        chunk = _chunk(chunk, k.shape[1], causal=causal or q.shape[1] <= k.shape[1])
    if k.dtype.itemsize == 1 and not eight_bits:
        raise NotImplementedError(
            f"k has dtype {k.dtype} and q {q.dtype}; pass q, k and v all in {EIGHT_BITS}, or k and v to "
            "flash_attn_varlen_func, or as a cache"
        )
    q, k, v = _contiguous_rows(q), _contiguous_rows(k), _contiguous_rows(v)
    window = None
    if window_size != NO_WINDOW:
        causal, window = _mask(causal, window_size, *_longest((q.shape[1], k.shape[1]), chunk))
    if eight_bits:
        _refuse_beside_8_bits(q, deterministic_batch=deterministic_batch)
        if of_blocks(scales):
            raise NotImplementedError(
                "one of q_descale, k_descale and v_descale is of blocks of rows, and flash_attn_func takes factors of "
                "heads; pass them to fa3gen.attention"
            )
    options: dict[str, Any] = {"causal": causal, "window": window, "sinks": s_aux, "softcap": _cap(softcap)}
    options |= {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale, "scale": softmax_scale}
    options |= {"return_lse": return_attn_probs, "deterministic_batch": deterministic_batch}
    options |= {"num_splits": num_splits, "render": RENDER}
    if chunk:
        options |= {"cu_seqlens_k": even_offsets(k.shape[0], k.shape[1], k)}
        options |= {"max_seqlen_q": q.shape[1], "max_seqlen_k": k.shape[1]}
        return of_equal_queries(_packed(chunk), q, (k.flatten(0, 1), v.flatten(0, 1)), out, options)
    return attention(q, k, v, out=out, **options)


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
    deterministic_batch: bool = False,
) -> Any:
    """Attention of packed sequences: see `fa3gen.attention_packed`.

    Args:
        q: (total_q, heads_q, d), bfloat16, float16, or float8_e4m3fn, which comes without deterministic_batch;
            without requires_grad in grad mode.
        k, v: (total_k, heads_kv, d) and (total_k, heads_kv, d_v), heads_q a multiple of heads_kv; of q's dtype, or
            of 8 bits.
        q_descale, k_descale, v_descale: As for `fa3gen.attention_packed`.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32, where sequences begin, and where the last one ends.
        max_seqlen_q, max_seqlen_k: The longest sequences. No result depends on them but that of a window, which is left
            away where it reaches farther than they say, unless deterministic_batch is asked for; and with
            attention_chunk no query behind max_seqlen_q is sure to be served.
        seqused_q, seqused_k: (sequences,) int32, how many rows of each sequence there are; by default all.
        window_size: As for `flash_attn_func`, by the lengths of each sequence.
        return_attn_probs: Return (O, LSE), LSE (heads_q, total_q) float32.
        out: (total_q, heads_q, d_v) of q's dtype, or bfloat16 beside q of 8 bits, to write O to.
        num_splits: As for `fa3gen.attention_packed`, but 1, the default, asks for nothing, and is as 0.
        deterministic_batch: As for `fa3gen.attention_packed`.
        attention_chunk: As for `flash_attn_func`. Some 30 small kernels cut the sequences anew with each call; engines
            whose layers share lengths cut once, with `fa3gen.run.chunks.in_chunks`, and pass what it returns to
            `fa3gen.attention_packed`.
        softmax_scale, causal, softcap, s_aux, and all others: As for `flash_attn_func`.

    Returns:
        O, (total_q, heads_q, d_v), or (O, LSE). Rows that are in no sequence are not written.
    """
    num_splits = num_splits if num_splits > 1 else 0  # 1 is the default, and asks for nothing
    eight_bits = _check_served(q, qv, (q_descale,), attention_chunk)
    chunk = _chunk(attention_chunk, max_seqlen_k, causal=causal)
    if (k_descale is not None or v_descale is not None) and k.dtype.itemsize > 1:
        _refuse(k_descale=k_descale, v_descale=v_descale)
    if eight_bits:
        _refuse_beside_8_bits(q, deterministic_batch=deterministic_batch)
    window = None
    if window_size != NO_WINDOW:
        longest = (None, None) if deterministic_batch else (max_seqlen_q, max_seqlen_k)  # those beside choose nothing
        causal, window = _mask(causal, window_size, *_longest(longest, chunk))
    return _packed(chunk)(
        _contiguous_rows(q),
        _contiguous_rows(k),
        _contiguous_rows(v),
        cu_seqlens_q.contiguous(),
        cu_seqlens_k.contiguous(),
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_q=None if seqused_q is None else seqused_q.contiguous(),
        seqused_k=None if seqused_k is None else seqused_k.contiguous(),
        causal=causal,
        window=window,
        sinks=s_aux,
        softcap=_cap(softcap),
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        scale=softmax_scale,
        out=out,
        return_lse=return_attn_probs,
        deterministic_batch=deterministic_batch,
        num_splits=num_splits,
        render=RENDER,
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
    deterministic_batch: bool = False,
) -> Any:
    """Attention to a cache, of which each sequence uses as much as `cache_seqlens` says, new keys and values included.

    No cache is copied. A contiguous one is seen as packed sequences, equally far apart; one with cache_batch_idx, or
    whose sequences are no rows of one tensor, as pages of a whole sequence each. The host waits for nothing.

    Args:
        q: (batch, seq_q, heads_q, d), or (total_q, heads_q, d) with cu_seqlens_q and max_seqlen_q; of 8 bits beside a
            cache of 8 bits, as for `flash_attn_varlen_func`.
        k_cache, v_cache: (sequences, seq_cache, heads_kv, d) and (.., d_v), or (pages, page, heads_kv, d) and (.., d_v)
            with page_table; any strides with a contiguous last dimension.
        k, v: (batch, seq_new, heads_kv, d) and (.., d_v), or (total_new, heads_kv, d) with cu_seqlens_k_new: written to
            the cache behind cache_seqlens, in plain torch, before anything else. What falls outside of the cache is not
            written. Where sequences share the place of a new row, any of their rows may be found there.
        cache_seqlens: (batch,) int32 on the GPU, or a number for all: where the keys of each sequence end, before new
            ones are appended; by default at the end of the cache.
        cache_batch_idx: (batch,) int32 on the GPU: which sequence of the cache, or row of page_table, each one has.
        cache_leftpad: (batch,) int32 on the GPU: where the keys of each sequence begin; by default at the first. With
            page_table or cache_batch_idx it makes each row a page of its own, and a table of all keys with each call.
        page_table: (batch, max_pages) int32 on the GPU: the pages of each sequence, in order. Entries that no length
            reaches may hold anything.
        cu_seqlens_q: (batch + 1,) int32, where sequences begin in q, and where the last one ends.
        cu_seqlens_k_new: (batch + 1,) int32, the same of k and v.
        return_softmax_lse: Return (O, LSE, and two tensors without elements, as upstream without splits). LSE is
            (batch, heads_q, seq_q), or (heads_q, total_q).
        out: Tensor of O's shape and q's dtype, or bfloat16 beside q of 8 bits, to write O to, contiguous where it is
            (batch, seq_q, ..).
        attention_chunk: As for `flash_attn_varlen_func`.
        qv, rotary_cos, rotary_sin: Not served but by default.
        q_descale, k_descale, v_descale: (batch, heads_kv) float32, factors of q and a cache of 8 bits, as for
            `fa3gen.attention_packed`.
        rotary_seqlens, rotary_interleaved, scheduler_metadata, pack_gqa, sm_margin: Ignored.
        num_splits: As for `fa3gen.attention_packed`, or `fa3gen.attention` where nothing but a contiguous cache is
            given; below 1 as 0, the default. Whatever it is, parts are added up before O is returned.
        deterministic_batch: As for `fa3gen.attention_packed`; as for `fa3gen.attention` where nothing but a contiguous
            cache is given, all of which is in use.
        softmax_scale, causal, window_size, softcap, s_aux: As for `flash_attn_func`.

    Returns:
        O, (batch, seq_q, heads_q, d_v) or (total_q, heads_q, d_v); with return_softmax_lse, four tensors.
    """
    eight_bits = _check_served(q, qv, (q_descale,), attention_chunk)
    _refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if eight_bits:
        _refuse_beside_8_bits(q, deterministic_batch=deterministic_batch)
    cache = KvCache.of(k_cache, v_cache, page_table, cache_batch_idx)
    if page_table is None or cache_batch_idx is not None:
        _check_batch(q, k_cache, cache_batch_idx, cu_seqlens_q)
    q = _contiguous_rows(q)
    seq_q = q.shape[1] if cu_seqlens_q is None else max_seqlen_q
    longest = (None, None) if deterministic_batch else (seq_q, cache.room)
    chunk = _chunk(attention_chunk, cache.room, causal=causal)
    causal, window = _mask(causal, window_size, *_longest(longest, chunk))
    one_each = seq_q == 1 and cu_seqlens_q is None and window is None
    if one_each and k_cache.dtype.itemsize == 1 and not deterministic_batch:  # whose bits are those of several queries
        causal = True  # hides nothing of a single query, and modules for keys of 8 bits are causal
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": softmax_scale}
    options |= {"sinks": s_aux, "softcap": _cap(softcap), "return_lse": return_softmax_lse, "render": RENDER}
    options |= {"num_splits": max(num_splits, 0), "deterministic_batch": deterministic_batch}
    named = k, v, cu_seqlens_q, cache_seqlens, cache_leftpad, cache_batch_idx, page_table
    if k_cache.dtype.itemsize == 1:
        options |= {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    else:
        _refuse(k_descale=k_descale, v_descale=v_descale)
    if all(x is None for x in named) and k_cache.dtype.itemsize > 1 and not chunk:
        returned = attention(q, k_cache, v_cache, out=out, **options)
    else:
        lengths = _lengths(q, cache, cache_seqlens, cu_seqlens_q)
        if k is not None or v is not None:
            if not is_dynamo_compiling():  # whose operator looks at it
                calls.check_longest(seq_q, None)  # before the cache is written to
            lengths = _appended(q, cache, (k, v), cu_seqlens_k_new, None if cache_seqlens is None else lengths)
        keys, where = _in_use(cache, lengths, cache_leftpad)
        packed = _packed(chunk)
        options |= {**where, "max_seqlen_q": seq_q, "max_seqlen_k": cache.room}
        if cu_seqlens_q is None:
            returned = of_equal_queries(packed, q, keys, out, options)
        else:
            returned = packed(q, *keys, cu_seqlens_q.contiguous(), out=out, **options)
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
    """Merge what parts of the keys gave, each with its own O and LSE, by one kernel: see `fa3gen.run.combine_ops`.

    Args:
        out_partial: (parts, batch, seq, heads, d) float32, d a multiple of 8; of packed sequences (parts, total, heads,
            d), and all others accordingly. Where the LSE is -inf it may hold anything.
        lse_partial: (parts, batch, seq, heads) float32, with any strides.
        out: (batch, seq, heads, d), float32, bfloat16 or float16, to write O to.
        out_dtype: Of O: float32 by default, bfloat16 or float16.

    Returns:
        O, (batch, seq, heads, d), and LSE, (batch, seq, heads), in which seq is contiguous.
    """
    return combine(_contiguous_rows(out_partial), lse_partial, out=out, out_dtype=out_dtype)


# What is not served

_FP8 = (
    "pass q, k and v all in float8_e4m3fn, or q in bfloat16, beside which packed keys and values and caches may have "
    "8 bits"
)
_ROTATE = "rotate q and the new keys before the call"

# By argument: what to do instead.
_INSTEAD = {
    "qv": "pass q and k whole, in head dims up to 256: absorbed MLA is not served",
    "q_descale": "leave it out, or pass q, k and v in float8_e4m3fn",
    "k_descale": "pass k and v of 8 bits, in flash_attn_func q as well, or scale them before the call",
    "v_descale": "pass k and v of 8 bits, in flash_attn_func q as well, or scale them before the call",
    "rotary_cos": _ROTATE,
    "rotary_sin": _ROTATE,
}


def _check_served(q: Tensor, qv: Any, scales: tuple[Any, ...], chunk: Any) -> bool:
    """Whether q has 8 bits. Raises NotImplementedError for the first of what is not served, and ArgumentError for a
    chunk that is no number of keys.

    `scales` are those of q, k and v that are not, beside q of 16 bits.
    """
    eight_bits = q.dtype == EIGHT_BITS
    if q.dtype.itemsize == 1 and not eight_bits:
        raise NotImplementedError(f"q has dtype {q.dtype}; {_FP8}")
    if type(chunk) is not int or chunk < 0:
        raise ArgumentError(f"attention_chunk is {chunk!r}; it needs to be a number of keys, or 0 for no chunks")
    if eight_bits:
        scales = ()
    if qv is not None or any(scale is not None for scale in scales):
        _refuse(qv=qv, **dict(zip(FACTORS, scales, strict=False)))
    return eight_bits


def _refuse(**given: Any) -> None:
    """Raise NotImplementedError for the first of these arguments that is not None."""
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name} is {_said(value)}, which fa3gen does not serve; {_INSTEAD[name]}")


def _refuse_beside_8_bits(q: Tensor, **asked: Any) -> None:
    """Raise NotImplementedError for the first of these arguments that says something beside q, k and v of 8 bits."""
    for name, value in asked.items():
        if isinstance(value, Tensor) or value:
            raise NotImplementedError(
                f"{name} is {_said(value)}, and q has dtype {q.dtype}, beside which it is not served; pass q, k and v "
                "in bfloat16, times their factors"
            )


def _said(value: Any) -> Any:
    """An argument as messages name it."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value


# Windows, chunks and tensors as fa3gen has them


def _chunk(attention_chunk: int, max_k: Any, *, causal: bool) -> int:
    """Keys of a chunk; 0, for none, where the first one has all keys.

    That does not hold for queries in front of the first key, who see none in chunks, but where `causal` says so anyway.
    """
    return 0 if causal and type(max_k) is int and max_k <= attention_chunk else attention_chunk


def _packed(chunk: int) -> Callable[..., Any]:
    """`fa3gen.attention_packed`, in chunks where these are asked for."""
    return functools.partial(chunks.attention_in_chunks, attention_packed, chunk) if chunk else attention_packed


def _longest(longest: tuple[Any, Any], chunk: int) -> tuple[Any, Any]:
    """Most queries and keys of a sequence, if they are known, or of a chunk of one."""
    if not chunk:
        return longest
    most_q, most_k = (min(most, chunk) if type(most) is int else chunk for most in longest)
    return most_q, most_k


def _mask(
    causal: bool, window_size: tuple[int, int], max_q: int | None, max_k: int | None
) -> tuple[bool, tuple[int, int] | None]:
    """`causal` and `window` of `fa3gen.attention`. A side that hides nothing of the longest sequences has no bound."""
    if isinstance(window_size, Tensor):  # on the CPU, as tests of upstream draw it
        window_size = window_size.tolist()
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        needed = "it needs to be (left, right), how many keys a query sees left and right of the diagonal, -1 for all"
        raise ArgumentError(f"window_size is {window_size!r}; {needed}")
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


def _cap(softcap: float) -> float | None:
    """A cap as `fa3gen.attention` has it: None for 0.0, which is none here. Raises ArgumentError for what is no cap."""
    if not softcap:
        return None
    calls.check_cap(softcap, "0.0")
    return softcap


def _contiguous_rows(x: Tensor) -> Tensor:
    """The tensor, or a copy whose last dimension is contiguous."""
    return x if x.is_contiguous() or x.stride(-1) == 1 else x.contiguous()


# Caches


def _batch(q: Tensor, cu_seqlens_q: Tensor | None) -> int:
    """How many sequences of queries there are."""
    return q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1


def _check_batch(q: Tensor, k_cache: Tensor, batch_idx: Tensor | None, cu_seqlens_q: Tensor | None) -> None:
    """Raise ArgumentError where a cache, or what says which of its sequences are meant, has more or fewer than there
    are sequences of queries: `attention_packed` would name a tensor that nobody passed.

    What torch.compile makes of a call is looked at by its operator, since these numbers may not be known yet.
    """
    if is_dynamo_compiling() or (cu_seqlens_q is None and q.dim() != 4):
        return
    batch, whose = _batch(q, cu_seqlens_q), "q" if cu_seqlens_q is None else "cu_seqlens_q"
    found, name = (k_cache, "k_cache") if batch_idx is None else (batch_idx, "cache_batch_idx")
    if found.shape[0] != batch:
        needed = ", or cache_batch_idx has to say which sequences of the cache are meant" * (batch_idx is None)
        raise ArgumentError(f"{name} has batch {found.shape[0]}, {whose} {batch}; they need the same{needed}")


def _check_numbers(name: str, x: Tensor, batch: int) -> None:
    """The same of what has one number for each sequence, and another dtype than int32."""
    if x.dtype != torch.int32 or (not is_dynamo_compiling() and x.shape != (batch,)):
        raise ArgumentError(f"{name} is {tuple(x.shape)}, {x.dtype}; it needs to be ({batch},), {torch.int32}")


def _lengths(q: Tensor, cache: KvCache, seqlens: int | Tensor | None, cu_seqlens_q: Tensor | None) -> Tensor:
    """Where the keys of each sequence end, (batch,) int32. Raises ArgumentError for others."""
    batch = _batch(q, cu_seqlens_q)
    if isinstance(seqlens, Tensor):
        _check_numbers("cache_seqlens", seqlens, batch)
        return seqlens.contiguous()
    return torch.full((batch,), cache.room if seqlens is None else seqlens, dtype=torch.int32, device=q.device)


def _appended(
    q: Tensor, cache: KvCache, new: tuple[Tensor | None, Tensor | None], offsets: Tensor | None, lengths: Tensor | None
) -> Tensor:
    """Where the keys of each sequence end when new ones are written behind `lengths`."""
    k, v = new
    if k is None or v is None or lengths is None:
        missing = "k" if k is None else "v" if v is None else "cache_seqlens"
        raise ArgumentError(f"{missing} is None; to append to the cache, pass k, v, and cache_seqlens: where they go")
    calls.refuse_grad(q, cache.k, cache.v)  # as attention does, but before the cache is written to
    calls.refuse_grad(q, k, v)
    return cache.append(k, v, lengths, None if offsets is None else offsets.contiguous())


def _in_use(cache: KvCache, lengths: Tensor, leftpad: Tensor | None) -> tuple[Pair, dict[str, Tensor]]:
    """K and V as `attention_packed` takes them, and by its names what says where those that are in use lie."""
    if leftpad is not None:
        _check_numbers("cache_leftpad", leftpad, lengths.shape[0])
    if cache.table is None:
        rows, begins, used = cache.as_packed(lengths, leftpad)
        return rows, {"cu_seqlens_k": begins, "seqused_k": used}
    pages, table, used = cache.as_pages(lengths, leftpad)
    return pages, {"page_table": _contiguous_rows(table), "seqused_k": used}
