"""`fa3gen.attention`: one call for all generated modules, in eager mode, under torch.compile and in CUDA graphs.

In eager mode the call goes straight to the module that the dispatch table names, since a torch operator written in
Python costs about as much host time as all the rest. Under torch.compile, torch.export, fake tensors, functorch and
dispatch modes it goes through the operators `fa3gen::attention_forward` and `fa3gen::attention_forward_out`, which do
the same and have fake implementations.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, Protocol, cast, get_args

import torch
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack
from torch.compiler import is_dynamo_compiling

from fa3gen.design.family import TILE_ROWS, Family, Shape
from fa3gen.design.workspace import Workspace
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.run import dispatch, gpu
from fa3gen.run.dispatch import ArgumentError, Choice, Size
from fa3gen.run.launch import module_at
from fa3gen.spec.model import DType, OutputDType

Returned = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Window = Sequence[int] | None

INPUTS: dict[torch.dtype, DType] = {DTYPES[name].in_torch(): name for name in get_args(DType)}

# By GPU, dtype of q and of `out`, head dims, causal, window and return_lse: the stretches of sizes that were asked for
# so far, as least and largest number of keys, least and largest number of tiles, and the `attention` of the module that
# serves them. A key holds nothing that changes from call to call, so that this stays small; reading it is all that a
# repeated call does, and plain tuples are read fastest.
_stretches: dict[tuple[Any, ...], list[tuple[int, int, int, int, Callable[..., Any]]]] = {}


P = ParamSpec("P")


class Explained(Protocol[P]):
    """A function whose `explain` takes the same arguments and says which module serves them."""

    explain: Callable[P, Choice]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the function."""


def _explained_by(explain: Callable[P, Choice]) -> Callable[[Callable[P, Any]], Explained[P]]:
    """Decorate a function with its `explain`. It stays a function: the call of an object first packs its keywords."""

    def decorate(function: Callable[P, Any]) -> Explained[P]:
        explained = cast(Explained[P], function)
        explained.explain = explain
        return explained

    return decorate


def _explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    enable_pdl: bool = False,
) -> Choice:
    """Which module `fa3gen.attention` takes for these arguments, and why; `print` it.

    Looks at dtypes and shapes only: tensors on any device will do, "meta" too, and no GPU is needed. How many tiles an
    SM gets is then counted with the SMs of an H200, and the answer says so. Raises as `fa3gen.attention` where no
    module is found.
    """
    family, size = _asked(q, k, v, out, causal, window)
    return dispatch.choose(family, size, lse=return_lse, workspace=Workspace.find())


@_explained_by(_explain)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    enable_pdl: bool = False,
) -> Any:
    """O = softmax(scale Q K^T) V on a Hopper GPU, by the fastest generated module, on torch's current stream.

    The first call for a dtype, head dims, mask and range of sizes reads the dispatch table and imports the module; the
    first launch loads the kernel from the compile cache, or compiles it. Make that call, with tensors of the same
    sizes, before capturing a CUDA graph, since code may not be loaded in a capture; all else can be made there, too.

    Args:
        q: (batch, seq_q, heads_q, d), bfloat16 or float16. Any strides with a contiguous last dimension and
            16-byte aligned rows, here and below.
        k: (batch, seq_k, heads_kv, d), heads_q a multiple of heads_kv (GQA, MQA).
        v: (batch, seq_k, heads_kv, d_v).
        causal: Query i sees keys j <= i + seq_k - seq_q.
        window: (left, right), how many keys a query sees left and right of its diagonal, -1 for all; with `causal`,
            none on the right. A module with the window compiled in is taken where there is one, else one for any.
        scale: Factor of the scores, finite and positive; 1 / sqrt(d) by default.
        out: (batch, seq_q, heads_q, d_v) to write O to, of q's dtype, or float32, which takes a module of its own; a
            new contiguous tensor of q's dtype by default.
        return_lse: Return (O, LSE), LSE the natural logarithm of each row's sum of exponentials,
            (batch, heads_q, seq_q) float32.
        enable_pdl: Programmatic dependent launch: where the module serves small problems (scheduler grid), begin beside
            the end of the kernel before on this stream, once that one allows it. Results are the same. Other modules,
            and calls that torch.compile or a dispatch mode sees, are launched as ever.

    Returns:
        O, (batch, seq_q, heads_q, d_v); with return_lse, (O, LSE). A row with no visible key has O = 0, LSE = -inf.

    Raises:
        NoKernel: No module computes this, or none was measured; the message says what to do. A UserError.
        TypeError, ValueError: An argument is of another type, dtype, device, shape, stride or alignment; or one
            requires grad in grad mode, since this is forward only.
    """
    if is_dynamo_compiling():
        return _by_operator(q, k, v, causal, window, scale, out, return_lse)
    if window is not None and type(window) is not tuple:
        dispatch.mask_of(causal, window)  # which says what a window has to be
        window = tuple(window)
    # Tensors on a GPU that nobody watches? Then nothing is lost by leaving the dispatcher out.
    if (
        not (type(q) is type(k) is type(v) is torch.Tensor and q.is_cuda)
        or _len_torch_dispatch_stack()
        or _are_functorch_transforms_active()
    ):
        _asked(q, k, v, out, causal, window)  # its messages are better than those of an operator's schema
        return _by_operator(q, k, v, causal, window, scale, out, return_lse)
    serving = _serving(q, k, v, out, causal, window, return_lse)
    if enable_pdl and _has_pdl(serving):
        return serving(q, k, v, scale=scale, out=out, return_lse=return_lse, enable_pdl=True)
    return serving(q, k, v, scale=scale, out=out, return_lse=return_lse)


@functools.cache
def _has_pdl(attention: Callable[..., Any]) -> bool:
    """Whether a module's `attention` knows programmatic dependent launch."""
    return "enable_pdl" in inspect.signature(attention).parameters


def _asked(q: Any, k: Any, v: Any, out: Any, causal: bool, window: Window) -> tuple[Family, Size]:
    """What the module has to be compiled for, and the size of the call. Raises ArgumentError, TypeError."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it needs to be a torch.Tensor")
        if x.ndim != 4:
            raise ArgumentError(f"{name} has shape {tuple(x.shape)}; it needs to be (batch, seq, heads, head dim)")
    if q.dtype not in INPUTS:
        raise TypeError(f"q has dtype {q.dtype}; fa3gen.attention takes {' or '.join(map(str, INPUTS))}")
    mask = dispatch.mask_of(causal, window)
    # An `out` of any other dtype than q's is for the module to refuse.
    written: OutputDType | None = "fp32" if getattr(out, "dtype", None) == torch.float32 else None
    batch, seq_q, heads_q, head_dim = q.shape
    family = Family(INPUTS[q.dtype], int(head_dim), int(v.shape[3]), mask, written)
    seq_k, heads_kv = k.shape[1], k.shape[2]
    return family, Size(seq_k, Shape(batch, seq_q, seq_k, heads_q, heads_kv).tiles, gpu.sm_count(q.get_device()))


def _serving(q: Any, k: Any, v: Any, out: Any, causal: bool, window: Any, return_lse: bool) -> Callable[..., Any]:
    """The `attention` of the module for a call; `window` is None or a tuple."""
    try:
        batch, seq_q, heads_q, dim = q.shape  # asked for once: each `.shape` is a new object
        _, keys, _, v_dim = v.shape
        key = q.get_device(), q.dtype, None if out is None else out.dtype, dim, v_dim, causal, window, return_lse
        tiles = batch * heads_q * -(-seq_q // TILE_ROWS)  # `Shape.tiles`, without the call
        for least_keys, most_keys, least_tiles, most_tiles, attention in _stretches.get(key, ()):
            if least_keys <= keys <= most_keys and least_tiles <= tiles <= most_tiles:
                return attention
    except (AttributeError, IndexError, ValueError):
        pass  # not four dimensions, or no tensor: what follows says so
    return _find(q, k, v, out, causal, window, return_lse)


def _find(q: Any, k: Any, v: Any, out: Any, causal: bool, window: Any, return_lse: bool) -> Callable[..., Any]:
    """The same for a call that is unlike all before it: look into the table, and remember."""
    family, size = _asked(q, k, v, out, causal, window)
    choice = dispatch.choose(family, size, lse=return_lse, workspace=Workspace.find())
    attention: Callable[..., Any] = module_at(choice.file).attention
    if choice.options:
        attention = functools.partial(attention, **choice.options)
    key = q.get_device(), q.dtype, getattr(out, "dtype", None), q.shape[3], v.shape[3], causal, window, return_lse
    _stretches.setdefault(key, []).append((*choice.around, attention))
    return attention


# Operators, for whatever looks at calls instead of making them

_OPTIONS = "*, bool causal=False, int[]? window=None, float? scale=None, bool return_lse=False"
_LIBRARY = torch.library.Library("fa3gen", "DEF")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def _by_operator(
    q: Any, k: Any, v: Any, causal: bool, window: Window, scale: float | None, out: Any, return_lse: bool
) -> Returned:
    """Call the operators. Without an out, LSE is empty where nobody asked for it."""
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise ValueError("q, k or v requires grad; this kernel is forward only: call it under torch.no_grad()")
    options = {"causal": causal, "window": window, "scale": scale, "return_lse": return_lse}
    if out is None:
        out, lse = torch.ops.fa3gen.attention_forward(q, k, v, **options)
    else:
        lse = torch.ops.fa3gen.attention_forward_out(q, k, v, out, **options)
    return (out, lse) if return_lse else out


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: list[int] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fa3gen::attention_forward`: O and LSE, which has no rows unless `return_lse`."""
    serving = _serving(q, k, v, None, causal, None if window is None else tuple(window), return_lse)
    returned = serving(q, k, v, scale=scale, return_lse=return_lse)
    return returned if return_lse else (returned, _lse_like(q, False))


def _forward_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    causal: bool = False,
    window: list[int] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor:
    """`fa3gen::attention_forward_out`: writes O to `out` and returns LSE, which has no rows unless `return_lse`."""
    serving = _serving(q, k, v, out, causal, None if window is None else tuple(window), return_lse)
    returned = serving(q, k, v, scale=scale, out=out, return_lse=return_lse)
    lse: torch.Tensor = returned[1] if return_lse else _lse_like(q, False)
    return lse


def _forward_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: list[int] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_shapes(q, k, v, None, causal, window)
    return q.new_empty((*q.shape[:3], v.shape[3])), _lse_like(q, return_lse)


def _forward_out_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    causal: bool = False,
    window: list[int] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor:
    _check_shapes(q, k, v, out, causal, window)
    wanted = (*q.shape[:3], v.shape[3])
    torch._check(  # type: ignore[no-untyped-call]
        tuple(out.shape) == wanted,
        lambda: f"out has shape {tuple(out.shape)}; it needs to be {wanted}",
    )
    return _lse_like(q, return_lse)


def _lse_like(q: torch.Tensor, wanted: bool) -> torch.Tensor:
    """An LSE for q, without rows unless it is wanted."""
    batch, seq_q, heads_q, _ = q.shape
    return q.new_empty((batch, heads_q, seq_q if wanted else 0), dtype=torch.float32)


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, causal: bool, window: Any) -> None:
    """What can be wrong with tensors that have no memory, so that it shows when a model is traced."""
    _asked(q, k, v, out, causal, window)
    torch._check(  # type: ignore[no-untyped-call]
        k.shape[0] == q.shape[0] and k.shape[3] == q.shape[3],
        lambda: f"k has shape {tuple(k.shape)}, q {tuple(q.shape)}; they need the same batch and head dim",
    )
    torch._check(  # type: ignore[no-untyped-call]
        v.shape[:3] == k.shape[:3],
        lambda: f"v has shape {tuple(v.shape)}, k {tuple(k.shape)}; they may only differ in the head dim",
    )


def _register(signature: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator. One implementation serves every device: the modules themselves ask for a Hopper GPU."""
    name = signature.partition("(")[0]
    _LIBRARY.define(signature, tags=_TAGS)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fa3gen::{name}", fake, lib=_LIBRARY)


_register(f"attention_forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)", _forward, _forward_fake)
_register(
    f"attention_forward_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, {_OPTIONS}) -> Tensor",
    _forward_out,
    _forward_out_fake,
)
