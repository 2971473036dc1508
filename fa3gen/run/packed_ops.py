"""`fa3gen.attention_packed`: one call for all generated modules of packed sequences and of pages, eager or compiled.

How such a call finds its module, and who sees it: `fa3gen.run.calls`. Its operators are `fa3gen::attention_packed` and
`fa3gen::attention_packed_out`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fa3gen.design import splits
from fa3gen.design.family import Family, Shape
from fa3gen.run import calls, checks, dispatch, eight_bits, gpu
from fa3gen.run.calls import Attention, Returned, Window, dispatch_modes, functorch_transforms, named_scores, stretches
from fa3gen.run.dispatch import FEW_QUERIES, NO_LIMIT, ArgumentError, Choice, NotRendered, Size, queries_in_key
from fa3gen.run.eight_bits import EIGHT_BITS, FACTORS, Factors

# Where keys lie: (cu_seqlens_k, page_table, seqused_k). What changes scores: (sinks, softcap).
Keys = tuple[Any, Any, Any]
Scores = tuple[Any, Any]
# How it is computed: (num_splits, deterministic_batch, split_keys), and what these are by default.
How = tuple[int, bool, int | None]
USUAL: How = 0, False, None


def _explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    deterministic_batch: bool = False,
    num_splits: int = 0,
    split_keys: int | None = None,
    render: bool = False,
) -> Choice:
    """Which module `fa3gen.attention_packed` takes for these arguments, and why; `print` it.

    Looks at dtypes, shapes and strides only: tensors on any device will do, "meta" too, and no GPU is needed. How many
    tiles an SM gets is then counted with the SMs of an H200, and the answer says so. Raises as
    `fa3gen.attention_packed` where no module is found, and for arguments that are wrong, but for where tensors lie, and
    what offsets, lengths and tables say; with `render`, a module is rendered, and not yet compiled.
    """
    keys, scores, factors = (cu_seqlens_k, page_table, seqused_k), (sinks, softcap), (q_descale, k_descale, v_descale)
    how, longest = (num_splits, deterministic_batch, split_keys), (max_seqlen_q, max_seqlen_k)
    asked = q, k, v, cu_seqlens_q, keys, seqused_q, longest, out, causal, window, scores, factors, scale, how
    family = _checked(*asked)._replace(part_keys=split_keys)
    calls.refuse_grad(q, k, v, sinks)
    size = _size(q, v, cu_seqlens_q, page_table, longest, causal, window, how)
    sequences = max(cu_seqlens_q.shape[0] - 1, 1)
    seq_q, seq_k = (-(-rows // sequences) for rows in (q.shape[0], _rows(v, page_table)))
    shape = Shape(sequences, seq_q, seq_k, q.shape[1], v.shape[-2])
    return calls.explained(family, size, shape, lse=return_lse, render=render)


@calls.explained_by(_explain)
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    deterministic_batch: bool = False,
    num_splits: int = 0,
    split_keys: int | None = None,
    render: bool = False,
) -> Any:
    """O = softmax(scale Q K^T) V of packed sequences (varlen) on a Hopper GPU, by the fastest generated module.

    Sequence i begins at row cu_seqlens_q[i] of q and O and at row cu_seqlens_k[i] of k and v, and ends where the next
    one begins. Lengths are read on the device, on torch's current stream, and the host waits for nothing: a CUDA graph
    can be replayed with other lengths in the same tensors. The host chooses the module by what it knows, which are
    mean lengths, or the longest ones where they are given. As for `fa3gen.attention`, call it once with tensors of the
    same sizes before capturing a graph.

    With a page table k and v lie in pages, as in the cache of a serving engine: key j of sequence i is row j % page of
    page page_table[i, j // page].

    Args:
        q: (total_q, heads_q, d), bfloat16, float16 or float8_e4m3fn, beside which there is no deterministic_batch. Any
            strides with a contiguous last dimension and 16-byte aligned rows, here and below.
        k: (total_k, heads_kv, d), heads_q a multiple of heads_kv (GQA, MQA); or (pages, page, heads_kv, d). Of q's
            dtype, or beside q of 16 bits of 8, float8_e4m3fn or float8_e5m2, as a cache may be.
        v: (total_k, heads_kv, d_v), or (pages, page, heads_kv, d_v); of k's dtype.
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,), int32, on the GPU, where the rows of each sequence begin, and at
            last where those of the last one end. They do not decrease; what lies is clamped to the tensors, and with
            $FA3GEN_CHECK set, see `fa3gen.run.checks`, it is an ArgumentError. Pages have no cu_seqlens_k.
        page_table: (sequences, most pages of one), int32, on the GPU: the pages of each sequence. What stands in it
            behind a sequence's last key may be anything; a page that is not there has zeros for keys and values.
        max_seqlen_q, max_seqlen_k: The longest sequences, if known. By them, and by mean lengths where they are not
            given, a module is chosen: only max_seqlen_q tells that all sequences have few queries, as of a draft
            model, and only max_seqlen_k that one has most keys. Results do not depend on them, as long as they are
            true.
        seqused_q, seqused_k: (sequences,), int32, on the GPU: how many rows of each sequence there are, from its first
            one; by default all. With pages seqused_k has to be given.
        causal: Query i sees keys j <= i + seq_k - seq_q, by the lengths of its sequence.
        window, sinks, softcap: As for `fa3gen.attention`.
        k_descale, v_descale: (sequences, heads_kv) float32, any strides, 0 as well: by what k and v of 8 bits are to
            be multiplied, 1 by default. O and LSE are those of q beside k and v in q's dtype, times these: a softcap
            caps scores that have the factors, and sinks are logits beside such scores.
        q_descale: The same of q of 8 bits, for each head of k. Beside such q each factor may be one number, (1,).
        scale: Factor of the scores, finite and positive; 1 / sqrt(d) by default.
        out: (total_q, heads_q, d_v) of q's dtype, or bfloat16 beside q of 8 bits, to write O to; a new contiguous
            tensor by default.
        return_lse: Return (O, LSE), LSE the natural logarithm of each row's sum of exponentials,
            (heads_q, total_q) float32.
        deterministic_batch: O and LSE of a row are the same bits whatever else the call has: alone, in any batch, at
            any place of it, beside sequences of any lengths, all queries at once, in chunks or one by one. Of keys in
            pages there are parts of so many keys, where there are modules for these: see split_keys. Elsewhere, by
            dtype, head dims, mask, page size and group of heads, one module serves calls of any size, which does not
            split keys: for prompts it is about as fast as any, for few queries slower than with split_keys.
        num_splits: In how many parts the keys of a tile of queries come, as for `fa3gen.attention`: 0 for whatever was
            measured to be fastest, 1 for no module that splits them. Of more, as many in the mean: the host knows no
            lengths, and all keys of all sequences are cut into equal shares of CTAs, as many as there would be tiles of
            queries if all sequences were equally long, times num_splits; none has fewer than two tiles of keys, and
            there are no more than leave 2^31 elements. 1 changes nothing beside deterministic_batch, and more are
            refused.
        split_keys: Of how many keys a part is, from the first key on: 384 at head dim 128 and 512 at 64, in bfloat16,
            causal or without a mask, packed or in pages of a multiple of 16. A row's bits are its own. Two modules add
            up parts of as many keys in the same order. One has a CTA for each part: it serves calls of which the host
            knows that no sequence has more than 16 queries, and whose parts take no more than 1 GiB, for which
            max_seqlen_k should be given. In the other a CTA has all keys of its queries, and so it is with
            num_splits=1. Other numbers of splits are refused beside it, and other numbers of keys have to be rendered.
        render: Where no module serves the call, render and compile one, as for `fa3gen.attention`.

    Returns:
        O, (total_q, heads_q, d_v); with return_lse, (O, LSE). A row with no visible key has O = 0, LSE = -inf
        or its sink; rows that are in no sequence are not written.

    Raises:
        NoKernel: No module computes this, or none was measured; the message says what to do. A UserError.
        NotCompiled: A kernel would have to be rendered or compiled, and $FA3GEN_NO_JIT forbids that. A UserError.
        TypeError, ValueError: An argument is of another type, dtype, device, shape, stride or alignment; or one
            requires grad in grad mode, since this is forward only.
    """
    keys, scores, factors = (cu_seqlens_k, page_table, seqused_k), (sinks, softcap), (q_descale, k_descale, v_descale)
    # Tensors on a GPU that nobody watches? Then nothing is lost by leaving the dispatcher out.
    if (
        is_dynamo_compiling()
        or not (type(q) is type(k) is type(v) is Tensor and q.is_cuda)
        or dispatch_modes()
        or functorch_transforms()
    ):
        if not is_dynamo_compiling():
            # Its messages are better than those of a schema.
            how, longest = (num_splits, deterministic_batch, split_keys), (max_seqlen_q, max_seqlen_k)
            _checked(q, k, v, cu_seqlens_q, keys, seqused_q, longest, out, causal, window, scores, factors, scale, how)
        options: dict[str, Any] = {"page_table": page_table, "seqused_q": seqused_q, "seqused_k": seqused_k}
        options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k, "causal": causal, "window": window}
        options |= {"scale": scale, "return_lse": return_lse}
        options |= {**named_scores(sinks, softcap), **_given_factors(factors)}
        options |= ({"num_splits": num_splits} if num_splits else {}) | ({"render": True} if render else {})
        options |= {"deterministic_batch": True} if deterministic_batch else {}
        options |= {"split_keys": split_keys} if split_keys is not None else {}
        return _by_operator(q, k, v, cu_seqlens_q, cu_seqlens_k, out, options)
    if window is not None and type(window) is not tuple:
        window = calls.window_tuple(window)
    how = num_splits, deterministic_batch, split_keys
    longest = max_seqlen_q, max_seqlen_k
    asked = q, k, v, cu_seqlens_q, keys, longest, out, causal, window, scores, return_lse, how, factors
    try:
        serving = _serving(*asked)
    except NotRendered as missing:
        calls.render(missing, allowed=render, compiled=True)
        serving = _serving(*asked)
    if checks.CHECKING:
        _check(q, k, cu_seqlens_q, keys, seqused_q, longest)
    if deterministic_batch or split_keys is not None:
        serving = _told_longest(serving, max_seqlen_k)
    if sinks is not None or softcap is not None:
        serving = functools.partial(serving, **named_scores(sinks, softcap))
    if q_descale is not None or k_descale is not None or v_descale is not None:
        serving = functools.partial(serving, **_named_factors(q, k, cu_seqlens_q, factors))
    if page_table is not None:
        if cu_seqlens_k is not None:
            _family(q, k, v, cu_seqlens_q, keys, out, causal, window, scores, factors)  # which refuses it
        return serving(q, k, v, cu_seqlens_q, page_table, seqused_k, seqused_q=seqused_q, scale=scale, out=out,
                       return_lse=return_lse)  # fmt: skip
    return serving(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k, scale=scale, out=out,
                   return_lse=return_lse)  # fmt: skip


def _family(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    keys: Keys,
    out: Any,
    causal: bool,
    window: Window,
    scores: Scores,
    factors: Factors,
) -> Family:
    """What the module has to be compiled for. Raises ArgumentError, TypeError."""
    cu_seqlens_k, page_table, seqused_k = keys
    calls.check_tensors({"q": q}, "(total, heads, head dim)")
    calls.check_tensors({"cu_seqlens_q": cu_seqlens_q}, "(sequences + 1)")
    page = None
    if page_table is None:
        calls.check_tensors({"k": k, "v": v}, "(total, heads, head dim)")
        calls.check_tensors({"cu_seqlens_k": cu_seqlens_k}, "(sequences + 1)")
    else:
        if cu_seqlens_k is not None:
            raise ArgumentError("cu_seqlens_k is given beside page_table; pages have no offsets: leave one of them out")
        calls.check_tensors({"k": k, "v": v}, "(pages, page, heads, head dim)")
        calls.check_tensors({"page_table": page_table}, "(sequences, most pages)")
        calls.check_tensors({"seqused_k": seqused_k}, "(sequences)")
        page = int(k.shape[1])
    dtype, written = calls.dtypes_of(q, out, "fa3gen.attention_packed")
    mask = dispatch.mask_of(causal, window)
    calls.check_scores(*scores)
    sinks, softcap = scores
    if q.dtype is EIGHT_BITS:
        eight_bits.check_packed(q, k, v)
        kv_dtype = eight_bits.kv_dtype(q, k)
        eight_bits.check_factors(q, k, factors, sequences=cu_seqlens_q.shape[0] - 1)
    else:
        _refuse_q_descale(q, factors)
        kv_dtype = calls.stored_dtype(k, v, *factors[1:])
    return Family(
        *(dtype, int(q.shape[2]), int(v.shape[-1]), mask, written),
        layout="packed" if page is None else "paged",
        sink=sinks is not None,
        softcap=softcap is not None,
        any_cap=calls.any_cap(softcap),
        page_rows=page,
        kv_dtype=kv_dtype,
    )


def _checked(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    keys: Keys,
    seqused_q: Any,
    longest: tuple[Any, Any],
    out: Any,
    causal: bool,
    window: Window,
    scores: Scores,
    factors: Factors,
    scale: Any,
    how: How,
) -> Family:
    """What `_family` returns, of arguments that go together as far as that shows without memory and on any device.

    So it is told before a call is made, and while a model is traced, when sizes may not be known yet. Raises as
    `_family` does, and ArgumentError for what a module would refuse.
    """
    cu_seqlens_k, page_table, seqused_k = keys
    family = _family(q, k, v, cu_seqlens_q, keys, out, causal, window, scores, factors)
    calls.check_tensors(calls.given(seqused_q=seqused_q, seqused_k=seqused_k), "(sequences)")
    _check_how(q, how)
    calls.check_longest(*longest)
    calls.check_scale(scale)
    if k.dtype != v.dtype or (k.dtype != q.dtype and family.kv_dtype is None):
        raise ArgumentError(
            f"q has dtype {q.dtype}, k {k.dtype} and v {v.dtype}; they need the same, or k and v both 8 bits beside q "
            "of 16"
        )
    calls.need(
        k.shape[-1] == q.shape[2],
        lambda: f"k has shape {tuple(k.shape)}, q {tuple(q.shape)}; they need the same head dim",
    )
    calls.need(
        v.shape[:-1] == k.shape[:-1],
        lambda: f"v has shape {tuple(v.shape)}, k {tuple(k.shape)}; they may only differ in the head dim",
    )
    calls.need_heads(q.shape[1], k.shape[-2])
    calls.need_sinks(scores[0], q.shape[1])
    for name, x in (("q", q), ("k", k), ("v", v)):
        calls.need_rows(name, x)
    calls.need_out(out, q, (*q.shape[:2], v.shape[-1]))
    sequences = cu_seqlens_q.shape[0] - 1
    calls.need(
        sequences >= 0,
        lambda: "cu_seqlens_q has no elements; it needs (sequences + 1,), one behind the last sequence",
    )
    _need_words("cu_seqlens_q", cu_seqlens_q, sequences + 1)
    _need_words("cu_seqlens_k", cu_seqlens_k, sequences + 1)
    _need_words("page_table", page_table, sequences)
    _need_words("seqused_q", seqused_q, sequences)
    _need_words("seqused_k", seqused_k, sequences)
    for name, factor in _given_factors(factors).items() if q.dtype != EIGHT_BITS else ():  # else looked at before
        needed = sequences, k.shape[-2]
        calls.need(
            tuple(factor.shape) == needed,
            lambda: f"{name} has shape {tuple(factor.shape)}; it needs to be {needed}",  # noqa: B023
        )
        if factor.dtype != torch.float32:
            raise ArgumentError(f"{name} has dtype {factor.dtype}; it needs to be {torch.float32}")
    return family


def _need_words(name: str, given: Tensor | None, count: int) -> None:
    """Raise ArgumentError for offsets, lengths or a table of another number of rows, another dtype, or with gaps."""
    if given is None:
        return
    needed = (count, *given.shape[1:])
    calls.need(given.shape[0] == count, lambda: f"{name} has shape {tuple(given.shape)}; it needs to be {needed}")
    if given.dtype != torch.int32:
        raise ArgumentError(f"{name} has dtype {given.dtype}; it needs to be {torch.int32}: pass {name}.int()")
    calls.need_contiguous(name, given)


def _given_factors(factors: Factors) -> dict[str, Tensor]:
    """Those that are given, by name."""
    return calls.given(**dict(zip(FACTORS, factors, strict=True)))


def _named_factors(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, factors: Factors) -> dict[str, Tensor]:
    """Those that are given, by name, as modules take them: those for 16-bit k and v take none."""
    if q.dtype is EIGHT_BITS:
        return eight_bits.named_factors(q, k, factors, sequences=cu_seqlens_q.shape[0] - 1)
    _refuse_q_descale(q, factors)
    return _given_factors(factors)


def _refuse_q_descale(q: Tensor, factors: Factors) -> None:
    """Raise ArgumentError for a factor of q, where that has 16 bits."""
    if factors[0] is not None:
        raise ArgumentError(
            f"q_descale is given, and q has dtype {q.dtype}; it is the factor of a q of {EIGHT_BITS}: leave it out"
        )


def _check_how(q: Tensor, how: How) -> None:
    """Raise ArgumentError for what cannot be asked for, and for what calls with q of 8 bits are not served with."""
    num_splits, deterministic_batch, split_keys = how
    calls.check_splits(num_splits, deterministic_batch=deterministic_batch, split_keys=split_keys)
    if (deterministic_batch or split_keys is not None) and q.dtype is EIGHT_BITS:
        asked = {"deterministic_batch": deterministic_batch or None, "split_keys": split_keys}
        eight_bits.refuse(q, {name: given for name, given in asked.items() if given is not None})


def _size(
    q: Any,
    v: Any,
    cu_seqlens_q: Any,
    page_table: Any,
    longest: tuple[Any, Any],
    causal: bool,
    window: Window,
    how: How,
) -> Size:
    """The size of a call as the host knows it. Raises ArgumentError for a number of parts that cannot be asked for, and
    for longest sequences that cannot be."""
    num_splits, deterministic_batch, split_keys = how
    _check_how(q, how)
    calls.check_longest(*longest)
    (total_q, heads_q, _), (heads_kv, _) = q.shape, v.shape[-2:]
    offsets, total_k = cu_seqlens_q.shape[0], _rows(v, page_table)
    paged = page_table is not None
    keys, tiles, queries, mean = _extents(total_q, total_k, offsets, (heads_q, heads_kv), *longest, window, paged)
    group, sms = heads_q // (heads_kv or 1), gpu.sm_count(q.get_device())
    how_many, own = int(num_splits), bool(deterministic_batch) or split_keys is not None
    in_parts = _in_parts(q, v, page_table, queries, longest, how)
    like_causal = dispatch.is_causal(causal, window, longest[1])
    return Size(keys, tiles, sms, group, queries, how_many, own, in_parts, mean_queries=mean, is_causal=like_causal)


def _in_parts(q: Any, v: Any, page_table: Any, queries: int, longest: tuple[Any, Any], how: How) -> bool:
    """Whether parts of so many keys get a CTA each: all sequences have few queries, and there is room for what the
    parts leave of their rows."""
    _, deterministic_batch, split_keys = how
    if split_keys is None and deterministic_batch:
        split_keys = splits.keys_of_own_parts(q.shape[2], paged=page_table is not None)
    if not split_keys or queries > FEW_QUERIES:
        return False
    keys = v.shape[0] if page_table is None else page_table.shape[1] * v.shape[1]
    _, max_k = longest
    keys = min(keys, max_k) if type(max_k) is int else keys
    return splits.room_for_parts(q.shape[0] * q.shape[1], v.shape[-1], keys, split_keys)


def _rows(v: Any, page_table: Any) -> int:
    """Keys of all sequences; with pages as many as the table has room for."""
    if page_table is None:
        return int(v.shape[0])
    sequences, pages = page_table.shape
    return int(sequences * pages * v.shape[1])


def _extents(
    total_q: int,
    total_k: int,
    offsets: int,
    heads: tuple[int, int],
    max_q: Any,
    max_k: Any,
    window: Window,
    paged: bool,
) -> tuple[int, int, int, int]:
    """Keys of the longest sequence, if a call says how many, else of one in the mean, rounded up, or of a full row of
    the page table; and tiles as rows count them, of query heads and heads of k.

    Of the keys as many as a window shows. And queries of the longest sequence: if nobody says how many, one where there
    are no more queries than sequences, else any number, for in the mean a chunk of a prompt among decoding steps is few
    queries, too. And those of a sequence in the mean.
    """
    sequences = offsets - 1 or 1  # without any there is nothing to compute
    seq_q, keys = -(-total_q // sequences), -(-total_k // sequences)
    longest = 1 if seq_q <= 1 else NO_LIMIT
    if type(max_q) is int:  # a tensor may lie on the GPU, where nobody looks
        if max_q < 0:
            calls.check_longest(max_q, max_k)  # which refuses it
        longest, seq_q = max_q, min(seq_q, max_q)
    if type(max_k) is int:  # below 0 there is no stretch, and so `_size` refuses it
        keys = min(max_k, keys if paged else total_k)
    if window is not None:
        keys = dispatch.seen(keys, window)
    return keys, dispatch.tiles_of_packed(total_q, sequences, heads, longest), longest, seq_q


def _serving(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    keys: Keys,
    longest: tuple[int | None, int | None],
    out: Any,
    causal: bool,
    window: Any,
    scores: Scores,
    return_lse: bool,
    how: How,
    factors: Factors,
) -> Attention:
    """The `attention` of the module for a call; `window` is None or a tuple."""
    key: tuple[Any, ...] = ()
    (_, page_table, _), (sinks, softcap) = keys, scores
    try:
        total_q, heads_q, dim = q.shape  # asked for once: each `.shape` is a new object
        if page_table is None:
            (total_k, heads_kv, v_dim), page = v.shape, None
        else:
            _, page, heads_kv, v_dim = v.shape
            total_k = _rows(v, page_table)
        out_dtype, group = None if out is None else out.dtype, heads_q // (heads_kv or 1)
        key = "packed", q.get_device(), q.dtype, out_dtype, dim, v_dim, page, group, causal, window, return_lse
        if window is not None:
            key += (dispatch.is_causal(causal, window, longest[1]),)
        if sinks is not None or softcap is not None:
            key += (sinks is not None, softcap is not None, calls.any_cap(softcap))
        offsets, paged = cu_seqlens_q.shape[0], page is not None
        length, tiles, queries, mean = _extents(total_q, total_k, offsets, (heads_q, heads_kv), *longest, window, paged)
        key += (queries_in_key(queries, mean),)
        if k.dtype is not q.dtype:
            key += (k.dtype, v.dtype)
        if how != USUAL:
            in_parts = _in_parts(q, v, page_table, queries, longest, how)
            key += ("num_splits and deterministic_batch", how, in_parts)
        for least_keys, most_keys, least_tiles, most_tiles, attention in stretches.get(key, ()):
            if least_keys <= length <= most_keys and least_tiles <= tiles <= most_tiles:
                return attention
    except (AttributeError, IndexError, TypeError, ValueError):
        pass  # not three dimensions, or no tensor: what follows says so
    family = _family(q, k, v, cu_seqlens_q, keys, out, causal, window, scores, factors)._replace(part_keys=how[2])
    size = _size(q, v, cu_seqlens_q, page_table, longest, causal, window, how)
    return calls.found(key, family, size, lse=return_lse)


def _told_longest(serving: Attention, max_seqlen_k: Any) -> Attention:
    """The same, told of the longest sequence, if it is known, where by that memory for parts of the keys is made."""
    if type(max_seqlen_k) is not int or "max_seqlen_k" not in (getattr(serving, "__kwdefaults__", None) or ()):
        return serving
    return functools.partial(serving, max_seqlen_k=max_seqlen_k)


def _check(q: Any, k: Any, cu_seqlens_q: Any, keys: Keys, seqused_q: Any, longest: tuple[Any, Any]) -> None:
    """Have offsets, lengths and table looked at, for which the host waits."""
    where = dict(zip(("cu_seqlens_k", "page_table", "seqused_k"), keys, strict=True))
    checks.check_sequences(q, k, cu_seqlens_q, **where, seqused_q=seqused_q, longest=longest)


# Operators, for whatever looks at calls instead of making them


def _by_operator(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, out: Any, options: Any) -> Returned:
    """Call the operators. Without an out, LSE is empty where nobody asked for it."""
    calls.refuse_grad(q, k, v, options.get("sinks"))
    if out is None:
        out, lse = torch.ops.fa3gen.attention_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    else:
        lse = torch.ops.fa3gen.attention_packed_out(q, k, v, cu_seqlens_q, cu_seqlens_k, out, **options)
    return (out, lse) if options["return_lse"] else out


def _packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    out: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: list[int] | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    return_lse: bool = False,
    deterministic_batch: bool = False,
    num_splits: int = 0,
    split_keys: int | None = None,
    render: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`fa3gen::attention_packed`: O and LSE, which has no rows unless `return_lse`."""
    reach = None if window is None else tuple(window)
    keys = cu_seqlens_k, page_table, seqused_k
    scores, factors = (sinks, softcap), (q_descale, k_descale, v_descale)
    how = num_splits, deterministic_batch, split_keys
    longest = max_seqlen_q, max_seqlen_k
    asked = q, k, v, cu_seqlens_q, keys, longest, out, causal, reach, scores, return_lse, how, factors
    serving = calls.or_rendered(_serving, *asked, allowed=render, compiled=q.is_cuda)
    if deterministic_batch or split_keys is not None:
        serving = _told_longest(serving, max_seqlen_k)
    if checks.CHECKING:
        _check(q, k, cu_seqlens_q, keys, options.get("seqused_q"), longest)
    options |= {"out": out, "return_lse": return_lse} | named_scores(sinks, softcap)
    options |= _named_factors(q, k, cu_seqlens_q, factors)
    if page_table is None:
        returned = serving(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k=seqused_k, **options)
    else:
        returned = serving(q, k, v, cu_seqlens_q, page_table, seqused_k, **options)
    return returned if return_lse else (returned, _lse_like(q, False))


def _packed_out(q: Tensor, k: Tensor, v: Tensor, *offsets_and_out: Tensor, **options: Any) -> Tensor:
    """`fa3gen::attention_packed_out`: writes O to `out` and returns LSE, which has no rows unless `return_lse`."""
    return _packed(q, k, v, *offsets_and_out, **options)[1]


def _packed_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    out: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: list[int] | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic_batch: bool = False,
    num_splits: int = 0,
    split_keys: int | None = None,
    render: bool = False,
) -> tuple[Tensor, Tensor]:
    """What can be wrong with tensors that have no memory shows when a model is traced."""
    keys, scores, factors = (cu_seqlens_k, page_table, seqused_k), (sinks, softcap), (q_descale, k_descale, v_descale)
    how, longest = (num_splits, deterministic_batch, split_keys), (max_seqlen_q, max_seqlen_k)
    _checked(q, k, v, cu_seqlens_q, keys, seqused_q, longest, out, causal, window, scores, factors, scale, how)
    return eight_bits.out_like(q, v), _lse_like(q, return_lse)


def _packed_out_fake(q: Tensor, k: Tensor, v: Tensor, *offsets_and_out: Tensor, **options: Any) -> Tensor:
    return _packed_fake(q, k, v, *offsets_and_out, **options)[1]


def _lse_like(q: Tensor, wanted: bool) -> Tensor:
    """An LSE for q, without rows unless it is wanted."""
    total_q, heads_q, _ = q.shape
    return q.new_empty((heads_q, total_q if wanted else 0), dtype=torch.float32)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k"
_OPTIONS = (
    "*, Tensor? page_table=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "bool causal=False, int[]? window=None, Tensor? sinks=None, float? softcap=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, float? scale=None, "
    "bool return_lse=False, bool deterministic_batch=False, int num_splits=0, int? split_keys=None, "
    "bool render=False"
)
calls.register(f"attention_packed({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)", _packed, _packed_fake)
calls.register(f"attention_packed_out({_INPUTS}, Tensor(a!) out, {_OPTIONS}) -> Tensor", _packed_out, _packed_out_fake)
