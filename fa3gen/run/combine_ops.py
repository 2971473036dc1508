"""O and LSE of parts of the keys merged, by the generated module for the dtype of O: eager, compiled, in CUDA graphs.

Who sees a call: `fa3gen.run.calls`. The operators are `fa3gen::combine` and `fa3gen::combine_out`. There is one module
for each dtype of O, for all sizes, so that nothing has to be chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fa3gen.design.workspace import Workspace
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.run import calls
from fa3gen.run.calls import dispatch_modes, functorch_transforms
from fa3gen.run.dispatch import ArgumentError, NoKernel
from fa3gen.run.launch import module_at
from fa3gen.spec.common import OutputDType

# The stems of the modules, those of specs/combine.yaml, by the dtype of O.
STEMS = {DTYPES[name].in_torch(): f"combine_{name}" for name in get_args(OutputDType)}


def combine(
    out_partial: Tensor, lse_partial: Tensor, *, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """O and LSE of all keys from those of parts of them, on a Hopper GPU, on torch's current stream.

    Args:
        out_partial: (parts, batch, seq, heads, d) or (parts, total, heads, d) float32, d a multiple of 8; any strides
            with a contiguous last dimension and 16-byte aligned rows. Where the LSE is -inf it may hold anything.
        lse_partial: The same without d, float32, natural logarithms; any strides.
        out: (batch, seq, heads, d) or (total, heads, d), float32, bfloat16 or float16, to write O to.
        out_dtype: Of a new O, where there is no `out`; float32 by default.

    Returns:
        (O, LSE), LSE float32, in which seq, or total, is contiguous. A row that no part has a key for has O = 0 and
        LSE = -inf.

    Raises:
        NoKernel: There is no module; the message says what to do.
        TypeError, ValueError: An argument is of another type, dtype, device, shape, stride or alignment, or requires
            grad in grad mode, since this is forward only.
    """
    _check(out_partial, lse_partial)
    dtype = _dtype_of(out, out_dtype)
    watched = is_dynamo_compiling() or dispatch_modes() or functorch_transforms()
    # Tensors on a GPU that nobody watches? Then nothing is lost by leaving the dispatcher out.
    if not watched and type(out_partial) is type(lse_partial) is Tensor and out_partial.is_cuda:
        returned: tuple[Tensor, Tensor] = _serving(dtype)(out_partial, lse_partial, out=out)
    elif out is None:
        returned = torch.ops.fa3gen.combine(out_partial, lse_partial, out_dtype=dtype)
    else:
        returned = out, torch.ops.fa3gen.combine_out(out_partial, lse_partial, out)
    return returned


def _serving(dtype: torch.dtype) -> Callable[..., Any]:
    """The `combine` of the module that writes O of this dtype."""
    entry: Callable[..., Any] = module_at(_file(dtype)).combine
    return entry


@functools.cache
def _file(dtype: torch.dtype) -> Path:
    file = Workspace.find().rendered_path(STEMS[dtype])
    if not file.is_file():
        raise NoKernel(f"{file} does not exist; run `fa3gen render combine`")
    return file


def _dtype_of(out: Any, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of O. Raises TypeError, ArgumentError."""
    if out is not None and not isinstance(out, Tensor):
        raise TypeError(f"out is a {type(out).__name__}; it needs to be a torch.Tensor")
    if out is not None and out_dtype not in (None, out.dtype):
        raise ArgumentError(f"out has dtype {out.dtype}, and out_dtype is {out_dtype}; leave one of them out")
    name, dtype = ("out_dtype", out_dtype or torch.float32) if out is None else ("out", out.dtype)
    if dtype not in STEMS:
        raise TypeError(f"{name} is {dtype}; O is one of {', '.join(map(str, STEMS))}")
    return dtype


def _check(out_partial: Any, lse_partial: Any) -> None:
    """Raise TypeError or ValueError for tensors that no module takes, whose messages are better than an operator's."""
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it needs to be a torch.Tensor")
        if x.dtype != torch.float32:
            raise TypeError(f"{name} has dtype {x.dtype}; it needs to be torch.float32")
    if out_partial.ndim not in (4, 5):
        needed = "(parts, batch, seq, heads, d) or (parts, total, heads, d)"
        raise ArgumentError(f"out_partial has shape {tuple(out_partial.shape)}; it needs to be {needed}")
    if out_partial.shape[:-1] != lse_partial.shape:
        needed = f"{tuple(out_partial.shape[:-1])}"
        raise ArgumentError(f"lse_partial has shape {tuple(lse_partial.shape)}; it needs to be {needed}")
    if torch.is_grad_enabled() and (out_partial.requires_grad or lse_partial.requires_grad):
        raise ValueError(
            "out_partial or lse_partial requires grad; this kernel is forward only: call it under torch.no_grad()"
        )


# Operators, for whatever looks at calls instead of making them


def _combine(out_partial: Tensor, lse_partial: Tensor, *, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`fa3gen::combine`: O and LSE."""
    returned: tuple[Tensor, Tensor] = _serving(out_dtype)(out_partial, lse_partial)
    return returned


def _combine_out(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    """`fa3gen::combine_out`: writes O to `out` and returns LSE."""
    lse: Tensor = _serving(out.dtype)(out_partial, lse_partial, out=out)[1]
    return lse


def _combine_fake(out_partial: Tensor, lse_partial: Tensor, *, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    _check(out_partial, lse_partial)
    return out_partial.new_empty(out_partial.shape[1:], dtype=_dtype_of(None, out_dtype)), _lse_like(lse_partial)


def _combine_out_fake(out_partial: Tensor, lse_partial: Tensor, out: Tensor) -> Tensor:
    _check(out_partial, lse_partial)
    calls.need(
        out.shape == out_partial.shape[1:],
        lambda: f"out has shape {tuple(out.shape)}; it needs to be {tuple(out_partial.shape[1:])}",
    )
    return _lse_like(lse_partial)


def _lse_like(lse_partial: Tensor) -> Tensor:
    """An LSE as a module returns it."""
    *batch, seq, heads = lse_partial.shape[1:]
    return lse_partial.new_empty((*batch, heads, seq)).transpose(-1, -2)


calls.register(
    "combine(Tensor out_partial, Tensor lse_partial, *, ScalarType out_dtype) -> (Tensor, Tensor)",
    _combine,
    _combine_fake,
)
calls.register(
    "combine_out(Tensor out_partial, Tensor lse_partial, Tensor(a!) out) -> Tensor", _combine_out, _combine_out_fake
)
