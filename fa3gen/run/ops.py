"""`fa3gen.attention`: one call for all generated modules of dense tensors, eager, compiled and in CUDA graphs.

How such a call finds its module, and who sees it: `fa3gen.run.calls`. Its operators are `fa3gen::attention_forward` and
`fa3gen::attention_forward_out`.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fa3gen.design.family import TILE_ROWS, Family, Shape
from fa3gen.run import calls, dispatch, eight_bits, gpu
from fa3gen.run.calls import Attention, Returned, Window, dispatch_modes, functorch_transforms, named_scores, stretches
from fa3gen.run.dispatch import FEW_QUERIES, ArgumentError, Choice, NotRendered, Size
from fa3gen.run.eight_bits import EIGHT_BITS, FACTORS, Factors
from fa3gen.run.equal_lengths import can_be_packed

How = tuple[int, int | None, bool]  # it is computed: num_splits, split_keys, deterministic_batch


def _explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_permuted: bool = False,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    enable_pdl: bool | None = None,
    deterministic_batch: bool = False,
    num_splits: int = 0,
    split_keys: int | None = None,
    render: bool = False,
) -> Choice:
    """Which module `fa3gen.attention` takes for these arguments, and why; `print` it.

    Looks at dtypes, shapes and strides only: tensors on any device will do, "meta" too, and no GPU is needed. How many
    tiles an SM gets is then counted with the SMs of an H200, and the answer says so. Raises as `fa3gen.attention` where
    no module is found, and for arguments that are wrong, but for where tensors lie; with `render`, a module is
    rendered, and not yet compiled.
    """
    how, factors = (num_splits, split_keys, deterministic_batch), (q_descale, k_descale, v_descale)
    family, size = _checked(q, k, v, out, causal, window, sinks, softcap, factors, v_permuted, scale, how)
    calls.refuse_grad(q, k, v, sinks)
    size = replace(size, in_rows=can_be_packed(q, k, v, out, num_splits))
    (batch, seq_q, heads_q, _), (_, seq_k, heads_kv, _) = q.shape, k.shape
    shape = Shape(batch, seq_q, seq_k, heads_q, heads_kv)
    return calls.explained(family, size, shape, lse=return_lse, render=render)


@calls.explained_by(_explain)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_permuted: bool = False,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    enable_pdl: bool | None = None,
    deterministic_batch: bool = False,
    num_splits: int = 0,
    split_keys: int | None = None,
    render: bool = False,
) -> Any:
    """O = softmax(scale Q K^T) V on a Hopper GPU, by the fastest generated module, on torch's current stream.

    The first call for a dtype, head dims, mask and range of sizes reads the dispatch table and imports the module; the
    first launch loads the kernel from the compile cache, or compiles it. Make that call, with tensors of the same
    sizes, before capturing a CUDA graph, since code may not be loaded in a capture; all else can be made there, too.

    Few queries with a window, sinks or a cap, or of 8 bits, and any with num_splits beside these, are served by modules
    for packed sequences, which split keys, where these were measured to be faster or no other fits; k, v and `out` have
    to be rows of one tensor each, and q is copied where it is not.

    Args:
        q: (batch, seq_q, heads_q, d), bfloat16, float16, or float8_e4m3fn, which comes without parts of a fixed number
            of keys. Any strides with a contiguous last dimension and 16-byte aligned rows, here and below.
        k: (batch, seq_k, heads_kv, d), heads_q a multiple of heads_kv (GQA, MQA).
        v: (batch, seq_k, heads_kv, d_v). Of 8 bits its sequence may be contiguous instead of its last dimension, where
            there is a module that reads it so.
        causal: Query i sees keys j <= i + seq_k - seq_q.
        window: (left, right), how many keys a query sees left and right of its diagonal, -1 for all; with `causal`,
            none on the right. One that hides only what `causal` hides takes the module for that. Else a module with the
            window compiled in is taken where there is one, or one for any.
        sinks: (heads_q,), bfloat16 or float32: a logit that takes part in the softmax of each row of its head, without
            a value; -inf for none. It takes a module of its own, as does a softcap.
        softcap: Scores become softcap tanh(scale S / softcap) before the mask; finite and positive. The tanh is that of
            the hardware, off by 2^-11 of itself at most.
        q_descale, k_descale, v_descale: What q, k and v of 8 bits are to be multiplied by, 1 by default: positive
            float32 on the GPU, one element for all of a tensor, or (batch, heads_kv) with any strides, 0 as well; that
            of q is for all query heads of a kv head. Or those of q and k are of blocks of 128 rows of a head, as
            `fa3gen.quantize(scale="block")` returns them, (batch, heads_q, ceil(seq_q / 128)) and (batch, heads_kv,
            ceil(seq_k / 128)), unmasked or causal; beside these that of v is of heads, or as that of k is. Read on the
            device, so that a graph is replayed with what they are then.
        v_permuted: v of 8 bits is what `fa3gen.quantize(v, transpose=True, permute_keys=True)` gives: (batch, seq_v,
            heads_kv, d_v), seq_v being seq_k rounded up to 16, with a contiguous sequence whose position 4t + j of each
            16 has key 2t + j % 2 + 8 (j // 2) of these, and finite numbers behind the last key. It spares the kernel
            the exchange of keys that V in order takes, and takes a module of its own.
        scale: Factor of the scores, finite and positive; 1 / sqrt(d) by default.
        out: (batch, seq_q, heads_q, d_v) to write O to, of q's dtype, or float32, which takes a module of its own;
            bfloat16 beside q of 8 bits. A new contiguous tensor of q's dtype, or bfloat16, by default.
        return_lse: Return (O, LSE), LSE the natural logarithm of each row's sum of exponentials,
            (batch, heads_q, seq_q) float32; of dense tensors taken as packed ones a view that is not contiguous.
        enable_pdl: Programmatic dependent launch: where the module serves small problems (scheduler grid), begin beside
            the end of the kernel before on this stream, once that one allows it. Results are the same. None: where keys
            come in parts, except at head dim 64, where it slows calls down. It says nothing to other modules, and to
            calls that torch.compile or a dispatch mode sees.
        deterministic_batch: O and LSE of a row are the same bits whatever other sequences, heads or queries the call
            has: alone, in any batch, in any place of it, all queries at once or in chunks. Head dims 64, 128 and 256 in
            bfloat16, unmasked or causal, up to 16 query heads for each kv head; made for few queries, and slow for
            many, which it needs 4 x ceil(seq_k / 512) x O's elements bytes of GPU memory for. It is split_keys=512.
        num_splits: In how many parts the keys of a tile of queries come, each with a CTA; a second kernel adds them up.
            What is computed is the same, but for rounding. 0: whatever was measured to be fastest. 1: no such module,
            though one may be faster; persistent kernels without a mask still share tiles of their last wave. More: a
            module that does so, with as many parts, or fewer where whole tiles of keys, equally many in each, make
            fewer, or where 2^31 elements and a grid have no room for as many; for dense tensors taken as packed ones
            see `fa3gen.attention_packed`. Parts take 4 x num_splits x O's elements bytes of GPU memory.
        split_keys: Of how many keys a part is, from the first key on, in place of num_splits: 512, or another multiple
            of 16 for which there is a module (`split: {keys: N}`), which `render` makes. As with deterministic_batch,
            which may stand beside it, a row's bits are its own.
        render: Where no module serves the call, render and compile one, from the spec that the error would propose. It
            takes seconds, once; a line in the log says so. From then on it serves such calls of this process, with
            `render` or without, and later processes find it in the compile cache. Nobody has verified or measured it.

    Returns:
        O, (batch, seq_q, heads_q, d_v); with return_lse, (O, LSE). A row with no visible key has O = 0, LSE = -inf
        or its sink.

    Raises:
        NoKernel: No module computes this, or none was measured; the message says what to do. A UserError.
        NotCompiled: A kernel would have to be rendered or compiled, and $FA3GEN_NO_JIT forbids that. A UserError.
        TypeError, ValueError: An argument is of another type, dtype, device, shape, stride or alignment; or one
            requires grad in grad mode, since this is forward only.
    """
    factors = q_descale, k_descale, v_descale
    if is_dynamo_compiling():
        how = num_splits, split_keys, deterministic_batch
        of_8 = factors, v_permuted
        return _by_operator(q, k, v, causal, window, sinks, softcap, of_8, scale, out, return_lse, how, render)
    if window is not None and type(window) is not tuple:
        window = calls.window_tuple(window)
    # Tensors on a GPU that nobody watches? Then nothing is lost by leaving the dispatcher out.
    if not (type(q) is type(k) is type(v) is Tensor and q.is_cuda) or dispatch_modes() or functorch_transforms():
        how = num_splits, split_keys, deterministic_batch
        # Its messages are better than those of an operator's schema.
        _checked(q, k, v, out, causal, window, sinks, softcap, factors, v_permuted, scale, how)
        of_8 = factors, v_permuted
        return _by_operator(q, k, v, causal, window, sinks, softcap, of_8, scale, out, return_lse, how, render)
    scaled = q_descale is not None or k_descale is not None or v_descale is not None
    blocks = scaled and eight_bits.of_blocks(factors)
    asked = q, k, v, out, causal, window, return_lse, sinks, softcap, v_permuted
    try:
        serving = _serving(*asked, num_splits, split_keys, deterministic_batch, blocks)
    except NotRendered as missing:
        calls.render(missing, allowed=render, compiled=True)
        serving = _serving(*asked, num_splits, split_keys, deterministic_batch, blocks)
    early = _begins_early(serving, enable_pdl)
    if scaled or sinks is not None or softcap is not None:
        named = named_scores(sinks, softcap) | eight_bits.named_factors(q, k, factors, blocks=blocks)
        named |= {"enable_pdl": True} if early else {}
        return serving(q, k, v, **named, scale=scale, out=out, return_lse=return_lse)
    if early:
        return serving(q, k, v, scale=scale, out=out, return_lse=return_lse, enable_pdl=True)
    return serving(q, k, v, scale=scale, out=out, return_lse=return_lse)


@functools.cache
def _begins_early(attention: Attention, asked: bool | None) -> bool:
    """Whether a launch is dependent: as asked, where the module knows of that; of itself where keys come in parts.

    Nothing was slower for it there at head dim 128. At 64, where CTAs share an SM, calls of one to four queries have
    0.95 of the speed so, in the mean of 108, and drafts of more 0.90, in the mean of 56. Of modules without parts, in
    chains of launches, one was slower, in one case of 24.
    """
    if "enable_pdl" not in inspect.signature(attention).parameters:
        return False
    if asked is not None:
        return asked
    names = inspect.unwrap(attention).__globals__
    return "combine_kernel" in names and names.get("CTAS_PER_SM", 1) == 1


def _asked(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    causal: bool,
    window: Window,
    sinks: Any,
    softcap: Any,
    v_permuted: bool,
    how: How,
    blocks: bool,
) -> tuple[Family, Size]:
    """What the module has to be compiled for, and the size of the call. Raises ArgumentError, TypeError."""
    calls.check_tensors({"q": q, "k": k, "v": v}, "(batch, seq, heads, head dim)")
    dtype, written = calls.dtypes_of(q, out, "fa3gen.attention")
    calls.check_scores(sinks, softcap)
    part_keys, mask = calls.keys_of_parts(*how), dispatch.mask_of(causal, window)
    if eight_bits.any_of(q, k, v):
        _, split_keys, deterministic_batch = how
        asked = {"split_keys": split_keys, "deterministic_batch": deterministic_batch}
        eight_bits.check(q, k, v, asked)
    if v_permuted:
        eight_bits.check_permuted(q, v)
    batch, seq_q, heads_q, head_dim = q.shape
    family = Family(
        *(dtype, int(head_dim), int(v.shape[3]), mask, written),
        by_sequence=eight_bits.by_sequence(v),
        kv_dtype=eight_bits.kv_dtype(q, k),
        sink=sinks is not None,
        softcap=softcap is not None,
        any_cap=calls.any_cap(softcap),
        part_keys=part_keys,
        block_scales=blocks,
        v_permuted=bool(v_permuted),
    )
    seq_k, heads_kv = k.shape[1], k.shape[2]
    like_causal = dispatch.is_causal(causal, window, seq_k)
    tiles = Shape(batch, seq_q, seq_k, heads_q, heads_kv).tiles
    group, sms = heads_q // (heads_kv or 1), gpu.sm_count(q.get_device())
    return family, Size(seq_k, tiles, sms, group, seq_q, int(how[0]), is_causal=like_causal)


def _checked(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    causal: bool,
    window: Window,
    sinks: Any,
    softcap: Any,
    factors: Factors,
    v_permuted: bool,
    scale: Any,
    how: How,
) -> tuple[Family, Size]:
    """What `_asked` returns, of arguments that go together as far as that shows without memory and on any device.

    So it is told before a call is made, and while a model is traced, when sizes may not be known yet. Raises as
    `_asked` does, and ArgumentError for what a module would refuse.
    """
    blocks = eight_bits.of_blocks(factors)
    asked = _asked(q, k, v, out, causal, window, sinks, softcap, v_permuted, how, blocks)
    calls.check_scale(scale)
    if not q.dtype == k.dtype == v.dtype and not eight_bits.any_of(q, k, v):  # which `_asked` has looked at
        raise ArgumentError(f"q has dtype {q.dtype}, k {k.dtype} and v {v.dtype}; dense tensors need the same")
    calls.need(
        k.shape[0] == q.shape[0] and k.shape[3] == q.shape[3],
        lambda: f"k has shape {tuple(k.shape)}, q {tuple(q.shape)}; they need the same batch and head dim",
    )
    if v_permuted:
        calls.need(tuple(v.shape[:3]) == eight_bits.keys_permuted(k), lambda: eight_bits.wrong_keys(k, v))
    else:
        calls.need(
            v.shape[:3] == k.shape[:3],
            lambda: f"v has shape {tuple(v.shape)}, k {tuple(k.shape)}; they may only differ in the head dim",
        )
    calls.need_heads(q.shape[2], k.shape[2])
    calls.need_sinks(sinks, q.shape[2])
    calls.need_rows("q", q)
    calls.need_rows("k", k)
    calls.need_rows("v", v, by_sequence=bool(eight_bits.by_sequence(v)))
    calls.need_out(out, q, (*q.shape[:3], v.shape[3]))
    eight_bits.check_factors(q, k, factors, blocks=blocks)
    return asked


def _serving(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    causal: bool,
    window: Any,
    return_lse: bool,
    sinks: Any,
    softcap: Any,
    v_permuted: bool,
    num_splits: int,
    split_keys: int | None,
    deterministic_batch: bool,
    blocks: bool,
) -> Attention:
    """The `attention` of the module for a call; `window` is None or a tuple, `blocks` as in `Family.block_scales`."""
    key: tuple[Any, ...] = ()
    try:
        batch, seq_q, heads_q, dim = q.shape  # asked for once: each `.shape` is a new object
        _, keys, heads_kv, v_dim = v.shape
        out_dtype, group = None if out is None else out.dtype, heads_q // (heads_kv or 1)
        few = seq_q if seq_q <= FEW_QUERIES else 0
        key = q.get_device(), q.dtype, out_dtype, dim, v_dim, group, few, causal, window, return_lse, num_splits
        if window is not None:
            key += (dispatch.is_causal(causal, window, k.shape[1]),)
        if deterministic_batch or split_keys is not None:
            key += ("split_keys and deterministic_batch", split_keys, deterministic_batch)
        if sinks is not None or softcap is not None:
            key += (sinks is not None, softcap is not None, calls.any_cap(softcap))
        if q.dtype is EIGHT_BITS:
            key += (k.dtype, v.dtype, eight_bits.by_sequence(v), blocks)
        if v_permuted:
            key, keys = (*key, "v_permuted"), k.shape[1]  # v has whole units of keys
        scores = window is not None or sinks is not None or softcap is not None
        if scores or (q.dtype is EIGHT_BITS and (few or num_splits > 1)):
            key += ("in rows", can_be_packed(q, k, v, out, num_splits))
        tiles = batch * heads_q * -(-seq_q // TILE_ROWS)  # `Shape.tiles`, without the call
        for least_keys, most_keys, least_tiles, most_tiles, attention in stretches.get(key, ()):
            if least_keys <= keys <= most_keys and least_tiles <= tiles <= most_tiles:
                return attention
    except (AttributeError, IndexError, TypeError, ValueError):
        pass  # not four dimensions, or no tensor: what follows says so
    how = num_splits, split_keys, deterministic_batch
    family, size = _asked(q, k, v, out, causal, window, sinks, softcap, v_permuted, how, blocks)
    size = replace(size, in_rows=can_be_packed(q, k, v, out, num_splits))
    return calls.found(key, family, size, lse=return_lse)


# Operators, for whatever looks at calls instead of making them

_OPTIONS = (
    "*, bool causal=False, int[]? window=None, Tensor? sinks=None, float? softcap=None, Tensor? q_descale=None, "
    "Tensor? k_descale=None, Tensor? v_descale=None, bool v_permuted=False, float? scale=None, "
    "bool return_lse=False, bool deterministic_batch=False, int num_splits=0, int? split_keys=None, bool render=False"
)


def _by_operator(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    window: Window,
    sinks: Any,
    softcap: float | None,
    eight_bit: tuple[Factors, bool],
    scale: float | None,
    out: Any,
    return_lse: bool,
    how: How,
    render: bool,
) -> Returned:
    """Call the operators. Without an out, LSE is empty where nobody asked for it.

    `eight_bit`: factors, and whether v has its keys permuted.
    """
    calls.refuse_grad(q, k, v, sinks)
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "return_lse": return_lse}
    options |= named_scores(sinks, softcap) | ({"render": True} if render else {})
    factors, v_permuted = eight_bit
    options |= calls.given(**dict(zip(FACTORS, factors, strict=True))) | ({"v_permuted": True} if v_permuted else {})
    num_splits, split_keys, deterministic_batch = how
    options |= {"deterministic_batch": True} if deterministic_batch else {}
    options |= {"num_splits": num_splits} if num_splits else {}
    options |= {} if split_keys is None else {"split_keys": split_keys}
    if out is None:
        out, lse = torch.ops.fa3gen.attention_forward(q, k, v, **options)
    else:
        lse = torch.ops.fa3gen.attention_forward_out(q, k, v, out, **options)
    return (out, lse) if return_lse else out


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: list[int] | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_permuted: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic_batch: bool = False,
    num_splits: int = 0,
    split_keys: int | None = None,
    render: bool = False,
) -> tuple[Tensor, Tensor]:
    """`fa3gen::attention_forward`: O and LSE, which has no rows unless `return_lse`."""
    reach, factors = None if window is None else tuple(window), (q_descale, k_descale, v_descale)
    blocks = eight_bits.of_blocks(factors)
    how = num_splits, split_keys, deterministic_batch, blocks
    asked = q, k, v, None, causal, reach, return_lse, sinks, softcap, v_permuted, *how
    serving = calls.or_rendered(_serving, *asked, allowed=render, compiled=q.is_cuda)
    named = named_scores(sinks, softcap) | eight_bits.named_factors(q, k, factors, blocks=blocks)
    returned = serving(q, k, v, **named, scale=scale, return_lse=return_lse)
    if not return_lse:
        return returned, _lse_like(q, False)
    out, lse = returned
    return out, lse.contiguous()  # as the fake one is, also where the module gives it by head


def _forward_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    causal: bool = False,
    window: list[int] | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_permuted: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic_batch: bool = False,
    num_splits: int = 0,
    split_keys: int | None = None,
    render: bool = False,
) -> Tensor:
    """`fa3gen::attention_forward_out`: writes O to `out` and returns LSE, which has no rows unless `return_lse`."""
    reach, factors = None if window is None else tuple(window), (q_descale, k_descale, v_descale)
    blocks = eight_bits.of_blocks(factors)
    how = num_splits, split_keys, deterministic_batch, blocks
    asked = q, k, v, out, causal, reach, return_lse, sinks, softcap, v_permuted, *how
    serving = calls.or_rendered(_serving, *asked, allowed=render, compiled=q.is_cuda)
    named = named_scores(sinks, softcap) | eight_bits.named_factors(q, k, factors, blocks=blocks)
    returned = serving(q, k, v, **named, scale=scale, out=out, return_lse=return_lse)
    lse: Tensor = returned[1].contiguous() if return_lse else _lse_like(q, False)
    return lse


def _forward_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: list[int] | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_permuted: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic_batch: bool = False,
    num_splits: int = 0,
    split_keys: int | None = None,
    render: bool = False,
) -> tuple[Tensor, Tensor]:
    how, factors = (num_splits, split_keys, deterministic_batch), (q_descale, k_descale, v_descale)
    _checked(q, k, v, None, causal, window, sinks, softcap, factors, v_permuted, scale, how)
    return eight_bits.out_like(q, v), _lse_like(q, return_lse)


def _forward_out_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    causal: bool = False,
    window: list[int] | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_permuted: bool = False,
    scale: float | None = None,
    return_lse: bool = False,
    deterministic_batch: bool = False,
    num_splits: int = 0,
    split_keys: int | None = None,
    render: bool = False,
) -> Tensor:
    how, factors = (num_splits, split_keys, deterministic_batch), (q_descale, k_descale, v_descale)
    _checked(q, k, v, out, causal, window, sinks, softcap, factors, v_permuted, scale, how)
    return _lse_like(q, return_lse)


def _lse_like(q: Tensor, wanted: bool) -> Tensor:
    """An LSE for q, without rows unless it is wanted."""
    batch, seq_q, heads_q, _ = q.shape
    return q.new_empty((batch, heads_q, seq_q if wanted else 0), dtype=torch.float32)


calls.register(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)", _forward, _forward_fake
)
calls.register(
    f"attention_forward_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {_OPTIONS}) -> Tensor",
    _forward_out,
    _forward_out_fake,
)
