"""`fa3gen.attention_packed`: one call for all generated modules of packed sequences, eager or compiled.

How such a call finds its module, and who sees it: `fa3gen.run.calls`. Its operators are `fa3gen::attention_packed` and
`fa3gen::attention_packed_out`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fa3gen.design.family import TILE_ROWS, Family
from fa3gen.design.workspace import Workspace
from fa3gen.run import calls, dispatch, gpu
from fa3gen.run.calls import Attention, Returned, Window, dispatch_modes, functorch_transforms, need, stretches
from fa3gen.run.dispatch import Choice, NotRendered, Size


def _explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    render: bool = False,
) -> Choice:
    """Which module `fa3gen.attention_packed` takes for these arguments, and why; `print` it.

    Looks at dtypes and shapes only: tensors on any device will do, "meta" too, and no GPU is needed. How many tiles an
    SM gets is then counted with the SMs of an H200, and the answer says so. Raises as `fa3gen.attention_packed` where
    no module is found; with `render`, one is rendered, and not yet compiled.
    """
    family = _family(q, k, v, cu_seqlens_q, out, causal, window)
    size = _size(q, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    choose = functools.partial(dispatch.choose, family, size, lse=return_lse, workspace=Workspace.find())
    return calls.or_rendered(choose, compiled=False) if render else choose()


@calls.explained_by(_explain)
def attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    render: bool = False,
) -> Any:
    """O = softmax(scale Q K^T) V of packed sequences (varlen) on a Hopper GPU, by the fastest generated module.

    Sequence i begins at row cu_seqlens_q[i] of q and O and at row cu_seqlens_k[i] of k and v, and ends where the next
    one begins. Lengths are read on the device, on torch's current stream, and the host waits for nothing: a CUDA graph
    can be replayed with other lengths in the same tensors. The host chooses the module by what it knows, which is the
    mean length. As for `fa3gen.attention`, call it once with tensors of the same sizes before capturing a graph.

    Args:
        q: (total_q, heads_q, d), bfloat16 or float16. Any strides with a contiguous last dimension and 16-byte aligned
            rows, here and below.
        k: (total_k, heads_kv, d), heads_q a multiple of heads_kv (GQA, MQA).
        v: (total_k, heads_kv, d_v).
        cu_seqlens_q, cu_seqlens_k: (sequences + 1,), int32, on the GPU, where the rows of each sequence begin, and at
            last where those of the last one end. They do not decrease; what lies is clamped to the tensors.
        max_seqlen_q, max_seqlen_k: The longest sequences, if known. They bound the mean lengths, where tensors have
            more rows than are used; results do not depend on them.
        seqused_q, seqused_k: (sequences,), int32, on the GPU: how many rows of each sequence there are, from its first
            one; by default all.
        causal: Query i sees keys j <= i + seq_k - seq_q, by the lengths of its sequence.
        window: (left, right), as for `fa3gen.attention`.
        scale: Factor of the scores, finite and positive; 1 / sqrt(d) by default.
        out: (total_q, heads_q, d_v) of q's dtype to write O to; a new contiguous tensor by default.
        return_lse: Return (O, LSE), LSE the natural logarithm of each row's sum of exponentials,
            (heads_q, total_q) float32.
        render: Where no module serves the call, render and compile one, as for `fa3gen.attention`.

    Returns:
        O, (total_q, heads_q, d_v); with return_lse, (O, LSE). A row with no visible key has O = 0, LSE = -inf; rows
        that are in no sequence are not written.

    Raises:
        NoKernel: No module computes this, or none was measured; the message says what to do. A UserError.
        NotCompiled: A kernel would have to be rendered or compiled, and $FA3GEN_NO_JIT forbids that. A UserError.
        TypeError, ValueError: An argument is of another type, dtype, device, shape, stride or alignment; or one
            requires grad in grad mode, since this is forward only.
    """
    # Tensors on a GPU that nobody watches? Then nothing is lost by leaving the dispatcher out.
    if (
        is_dynamo_compiling()
        or not (type(q) is type(k) is type(v) is Tensor and q.is_cuda)
        or dispatch_modes()
        or functorch_transforms()
    ):
        if not is_dynamo_compiling():
            _family(q, k, v, cu_seqlens_q, out, causal, window)  # its messages are better than those of a schema
        options: dict[str, Any] = {
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
            "causal": causal,
            "window": window,
        }
        options |= {"seqused_q": seqused_q, "seqused_k": seqused_k, "scale": scale, "return_lse": return_lse}
        options |= {"render": True} if render else {}
        return _by_operator(q, k, v, cu_seqlens_q, cu_seqlens_k, out, options)
    if window is not None and type(window) is not tuple:
        window = calls.window_tuple(window)
    try:
        serving = _serving(q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k, out, causal, window, return_lse)
    except NotRendered as missing:
        calls.render(missing, allowed=render, compiled=True)
        serving = _serving(q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k, out, causal, window, return_lse)
    return serving(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        scale=scale,
        out=out,
        return_lse=return_lse,
    )


def _family(q: Any, k: Any, v: Any, cu_seqlens_q: Any, out: Any, causal: bool, window: Window) -> Family:
    """What the module has to be compiled for. Raises ArgumentError, TypeError."""
    calls.check_tensors({"q": q, "k": k, "v": v}, "(total, heads, head dim)")
    calls.check_tensors({"cu_seqlens_q": cu_seqlens_q}, "(sequences + 1)")
    dtype, written = calls.dtypes_of(q, out, "fa3gen.attention_packed")
    mask = dispatch.mask_of(causal, window)
    return Family(dtype, int(q.shape[2]), int(v.shape[2]), mask, written, layout="packed")


def _size(q: Any, v: Any, cu_seqlens_q: Any, max_seqlen_q: int | None, max_seqlen_k: int | None) -> Size:
    """The size of a call as the host knows it."""
    (total_q, heads_q, _), (total_k, heads_kv, _) = q.shape, v.shape
    keys, tiles = _extents(total_q, total_k, cu_seqlens_q.shape[0], heads_q, max_seqlen_q, max_seqlen_k)
    return Size(keys, tiles, gpu.sm_count(q.get_device()), heads_q // (heads_kv or 1))


def _extents(total_q: int, total_k: int, offsets: int, heads: int, max_q: Any, max_k: Any) -> tuple[int, int]:
    """Keys of a sequence in the mean, rounded up, and tiles of 128 queries, if all sequences were as long as that."""
    sequences = offsets - 1 or 1  # without any there is nothing to compute
    seq_q, keys = -(-total_q // sequences), -(-total_k // sequences)
    if type(max_q) is int and max_q < seq_q:  # a tensor may lie on the GPU, where nobody looks
        seq_q = max_q
    if type(max_k) is int and max_k < keys:
        keys = max_k
    return keys, sequences * heads * -(-seq_q // TILE_ROWS)


def _serving(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    out: Any,
    causal: bool,
    window: Any,
    return_lse: bool,
) -> Attention:
    """The `attention` of the module for a call; `window` is None or a tuple."""
    key: tuple[Any, ...] = ()
    try:
        total_q, heads_q, dim = q.shape  # asked for once: each `.shape` is a new object
        total_k, heads_kv, v_dim = v.shape
        out_dtype, group = None if out is None else out.dtype, heads_q // (heads_kv or 1)
        key = "packed", q.get_device(), q.dtype, out_dtype, dim, v_dim, group, causal, window, return_lse
        keys, tiles = _extents(total_q, total_k, cu_seqlens_q.shape[0], heads_q, max_seqlen_q, max_seqlen_k)
        for least_keys, most_keys, least_tiles, most_tiles, attention in stretches.get(key, ()):
            if least_keys <= keys <= most_keys and least_tiles <= tiles <= most_tiles:
                return attention
    except (AttributeError, IndexError, ValueError):
        pass  # not three dimensions, or no tensor: what follows says so
    family = _family(q, k, v, cu_seqlens_q, out, causal, window)
    return calls.found(key, family, _size(q, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k), lse=return_lse)


def _rendered(q: Any, *asked: Any) -> Attention:
    """As `_serving`; where no module serves the call, one is rendered."""
    return calls.or_rendered(_serving, q, *asked, compiled=q.is_cuda)


# Operators, for whatever looks at calls instead of making them


def _by_operator(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, out: Any, options: Any) -> Returned:
    """Call the operators. Without an out, LSE is empty where nobody asked for it."""
    calls.refuse_grad(q, k, v)
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
    cu_seqlens_k: Tensor,
    out: Tensor | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window: list[int] | None = None,
    return_lse: bool = False,
    render: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`fa3gen::attention_packed`: O and LSE, which has no rows unless `return_lse`."""
    reach = None if window is None else tuple(window)
    serving = (_rendered if render else _serving)(
        q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k, out, causal, reach, return_lse
    )
    returned = serving(q, k, v, cu_seqlens_q, cu_seqlens_k, out=out, return_lse=return_lse, **options)
    return returned if return_lse else (returned, _lse_like(q, False))


def _packed_out(q: Tensor, k: Tensor, v: Tensor, *offsets_and_out: Tensor, **options: Any) -> Tensor:
    """`fa3gen::attention_packed_out`: writes O to `out` and returns LSE, which has no rows unless `return_lse`."""
    return _packed(q, k, v, *offsets_and_out, **options)[1]


def _packed_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    out: Tensor | None = None,
    *,
    causal: bool = False,
    window: list[int] | None = None,
    return_lse: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """What can be wrong with tensors that have no memory shows when a model is traced."""
    _family(q, k, v, cu_seqlens_q, out, causal, window)
    need(
        k.shape[2] == q.shape[2],
        lambda: f"k has shape {tuple(k.shape)}, q {tuple(q.shape)}; they need the same head dim",
    )
    need(
        v.shape[:2] == k.shape[:2],
        lambda: f"v has shape {tuple(v.shape)}, k {tuple(k.shape)}; they may only differ in the head dim",
    )
    need(
        cu_seqlens_q.shape == cu_seqlens_k.shape,
        lambda: f"cu_seqlens_k has shape {tuple(cu_seqlens_k.shape)}; it needs to be {tuple(cu_seqlens_q.shape)}",
    )
    wanted = (*q.shape[:2], v.shape[2])
    need(
        out is None or tuple(out.shape) == wanted,
        lambda: f"out has shape {tuple(out.shape) if out is not None else None}; it needs to be {wanted}",
    )
    return q.new_empty(wanted), _lse_like(q, return_lse)


def _packed_out_fake(q: Tensor, k: Tensor, v: Tensor, *offsets_and_out: Tensor, **options: Any) -> Tensor:
    return _packed_fake(q, k, v, *offsets_and_out, **options)[1]


def _lse_like(q: Tensor, wanted: bool) -> Tensor:
    """An LSE for q, without rows unless it is wanted."""
    total_q, heads_q, _ = q.shape
    return q.new_empty((heads_q, total_q if wanted else 0), dtype=torch.float32)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k"
_OPTIONS = (
    "*, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, "
    "bool causal=False, int[]? window=None, float? scale=None, bool return_lse=False, bool render=False"
)
calls.register(f"attention_packed({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)", _packed, _packed_fake)
calls.register(f"attention_packed_out({_INPUTS}, Tensor(a!) out, {_OPTIONS}) -> Tensor", _packed_out, _packed_out_fake)
