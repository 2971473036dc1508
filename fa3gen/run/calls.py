"""What `fa3gen.attention` and `fa3gen.attention_packed` have in common: who sees a call, and which module serves it.

In eager mode a call goes straight to the module that the dispatch table names, since a torch operator written in
Python costs about as much host time as all the rest. Under torch.compile, torch.export, fake tensors, functorch and
dispatch modes it goes through operators, which do the same and have fake implementations.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, ParamSpec, Protocol, TypeVar, cast, get_args

import torch
from torch._C import _are_functorch_transforms_active, _len_torch_dispatch_stack

from fa3gen.design import splits
from fa3gen.design.family import Family, Shape, usual_out_dtype
from fa3gen.design.workspace import Workspace
from fa3gen.hardware.dtypes import DTYPES, E4M3
from fa3gen.run import dispatch
from fa3gen.run.dispatch import ArgumentError, Choice, NotRendered, Size
from fa3gen.run.equal_lengths import of_dense
from fa3gen.run.launch import module_at
from fa3gen.run.parts import in_parts
from fa3gen.spec.model import (
    MOST_CAP_OF_FIRST_MAX,
    AttentionDType,
    OutputDType,
    StoredDType,
)

Attention = Callable[..., Any]
Returned = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Window = Sequence[int] | None

INPUTS: dict[torch.dtype, AttentionDType] = {DTYPES[name].in_torch(): name for name in get_args(AttentionDType)}
OUTPUTS: dict[Any, OutputDType] = {DTYPES[name].in_torch(): name for name in get_args(OutputDType)}
STORED: dict[torch.dtype, StoredDType] = {DTYPES[name].in_torch(): name for name in get_args(StoredDType)}


# What a function takes to explain itself

P = ParamSpec("P")


class Explained(Protocol[P]):
    """A function whose `explain` takes the same arguments and says which module serves them."""

    explain: Callable[P, Choice]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Call the function."""


def explained_by(explain: Callable[P, Choice]) -> Callable[[Callable[P, Any]], Explained[P]]:
    """Decorate a function with its `explain`. It stays a function: the call of an object first packs its keywords."""

    def decorate(function: Callable[P, Any]) -> Explained[P]:
        explained, named = cast(Explained[P], function), cast(FunctionType, explain)
        # By which Python's own messages call it, as of an argument that it does not have.
        named.__name__, named.__qualname__ = "explain", f"{function.__name__}.explain"
        explained.explain = explain
        return explained

    return decorate


# Which module

# By all that chooses a module beside sizes: the stretches of sizes that were asked for so far, as least and largest
# number of keys, least and largest number of tiles, and the `attention` of the module that serves them. A key holds
# nothing that changes from call to call, so that this stays small; reading it is all that a repeated call does, and
# plain tuples are read fastest.
stretches: dict[tuple[Any, ...], list[tuple[int, int, int, int, Attention]]] = {}


def found(key: tuple[Any, ...], family: Family, size: Size, *, lse: bool) -> Attention:
    """The `attention` for a call unlike all before it, from the table; in `stretches` under a key that is not empty."""
    choice = dispatch.choose(family, size, lse=lse, workspace=Workspace.find())
    module = module_at(choice.file)
    attention: Attention = in_parts(module, size.parts) if size.parts > 1 else module.attention
    if choice.as_packed:
        attention = functools.partial(of_dense, attention, **choice.options)
    elif choice.options:
        attention = functools.partial(attention, **choice.options)
    if key:
        stretches.setdefault(key, []).append((*choice.around, attention))
    return attention


# Where no module serves a call that says render=True

FoundT = TypeVar("FoundT")


def render(missing: NotRendered, *, allowed: bool, compiled: bool) -> None:
    """Have the module rendered that was not found: `rendering.render`. Raises `missing` where that is not allowed."""
    if not allowed:
        raise missing
    from fa3gen.run import rendering  # templates and what formats them, which no other call needs

    rendering.render(missing, compiled=compiled)


def or_rendered(find: Callable[..., FoundT], *asked: Any, allowed: bool, compiled: bool) -> FoundT:
    """What `find` finds; where no module serves the call, and it is allowed, after rendering one.

    Eager calls of the functions have the same in line, since this is a call more.
    """
    try:
        return find(*asked)
    except NotRendered as missing:
        render(missing, allowed=allowed, compiled=compiled)
    return find(*asked)


def explained(family: Family, size: Size, shape: Shape, *, lse: bool, render: bool) -> Choice:
    """The choice for a call that is not made: with `render` a module may be rendered, and is not compiled yet.

    `shape` is that of the call, of packed sequences as if all had the mean length.
    """
    choose = functools.partial(dispatch.choose, family, size, lse=lse, workspace=Workspace.find())
    choice = or_rendered(choose, allowed=render, compiled=False)
    return replace(choice, parts=splits.told(choice.spec, shape, size.sms, size.parts if size.parts > 1 else 0))


# What can be wrong


def check_tensors(tensors: dict[str, Any], dimensions: str) -> None:
    """Raise TypeError for what is no tensor, ArgumentError for one of other dimensions than these, `(total, heads)`."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it needs to be a torch.Tensor")
        if x.ndim != dimensions.count(",") + 1:
            raise ArgumentError(f"{name} has shape {tuple(x.shape)}; it needs to be {dimensions}")


def dtypes_of(q: torch.Tensor, out: Any, function: str) -> tuple[AttentionDType, OutputDType | None]:
    """The dtype of q, and that of O where it differs. An `out` of any other dtype is for the module to refuse."""
    if q.dtype not in INPUTS:
        raise TypeError(f"q has dtype {q.dtype}; {function} takes {' or '.join(map(str, INPUTS))}")
    dtype, given = INPUTS[q.dtype], getattr(out, "dtype", None)
    if dtype == E4M3.name:
        return dtype, OUTPUTS.get(given, usual_out_dtype(dtype))
    return dtype, "fp32" if given == torch.float32 else None


def stored_dtype(k: torch.Tensor, v: torch.Tensor, *factors: Any) -> StoredDType | None:
    """The dtype of k and v where they have 8 bits, of which `factors` are those of k and v.

    Raises TypeError for factors that are no tensors, ArgumentError where only one of k and v has 8 bits, or factors are
    given of what has 16.
    """
    for name, factor in zip(("k_descale", "v_descale"), factors, strict=True):
        if factor is not None and not isinstance(factor, torch.Tensor):
            raise TypeError(f"{name} is a {type(factor).__name__}; it needs to be a torch.Tensor")
        if factor is not None and k.dtype not in STORED:
            raise ArgumentError(
                f"{name} is given, and k has dtype {k.dtype}; factors are of 8-bit k and v: leave it out"
            )
    if k.dtype in STORED and v.dtype != k.dtype:
        raise ArgumentError(f"k has dtype {k.dtype} and v {v.dtype}; they need the same")
    return STORED.get(k.dtype)


def check_scores(sinks: Any, softcap: Any) -> None:
    """Raise TypeError for sinks that are no tensor, ArgumentError for a cap that is none. None is neither."""
    if sinks is not None and not isinstance(sinks, torch.Tensor):
        raise TypeError(f"sinks is a {type(sinks).__name__}; it needs to be a torch.Tensor")
    if softcap is not None:
        check_cap(softcap, "None")


def check_cap(softcap: Any, no_cap: str) -> None:
    """Raise ArgumentError for what is no cap; `no_cap` is what a caller passes for none."""
    if not (isinstance(softcap, (int, float)) and 0.0 < softcap < math.inf):
        needed = f"it needs to be a finite and positive number, or {no_cap} for no cap"
        raise ArgumentError(f"softcap is {softcap!r}; {needed}")


def check_scale(scale: Any) -> None:
    """Raise ArgumentError for a factor of the scores that is none; torch.compile may know it by a symbol."""
    if scale is not None and not (isinstance(scale, (int, float, torch.SymFloat)) and 0.0 < scale < math.inf):
        raise ArgumentError(f"scale is {scale!r}; it needs to be a finite and positive number")


def check_longest(max_seqlen_q: Any, max_seqlen_k: Any) -> None:
    """Raise ArgumentError for longest sequences of packed ones that no sequence can have.

    A tensor is none of them: it may lie on the GPU, where nobody looks.
    """
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is None or isinstance(longest, torch.Tensor):
            continue
        symbol = isinstance(longest, torch.SymInt)  # torch.compile may know it by one
        fits: Any = symbol or hasattr(type(longest), "__index__")
        if fits:
            fits = (longest if symbol else operator.index(longest)) >= 0
        needed = "it needs to be the rows of the longest sequence, 0 or more, or None"
        need(fits, lambda: f"{name} is {longest!r}; {needed}")  # noqa: B023


def check_splits(num_splits: Any, *, deterministic_batch: bool = False, split_keys: Any = None) -> None:
    """Raise ArgumentError for a number of parts of the keys, or of keys of a part, that cannot be asked for."""
    if split_keys is not None and (type(split_keys) is not int or split_keys < 1):
        raise ArgumentError(
            f"split_keys is {split_keys!r}; it needs to be a number of keys, a multiple of a module's tile of them, or "
            "None for parts of any size"
        )
    if not isinstance(num_splits, int) or num_splits < 0:
        raise ArgumentError(
            f"num_splits is {num_splits!r}; it needs to be 0, for whatever was measured to be fastest, 1, for no "
            "module that splits keys, or a number of parts of the keys of a tile of queries"
        )
    if num_splits > 1 and deterministic_batch:
        raise ArgumentError(
            f"num_splits is {num_splits} beside deterministic_batch: where so many parts begin follows from how many "
            "keys there are, and so do the bits of a row; leave one of them out"
        )
    if num_splits > 1 and split_keys is not None:
        raise ArgumentError(
            f"num_splits is {num_splits} beside split_keys, for keys into parts of {split_keys}: leave one of them out"
        )


def keys_of_parts(num_splits: Any, split_keys: Any, deterministic_batch: bool) -> int | None:
    """Of dense tensors the fixed number of keys of a part that a call asks for; None where it asks for none.

    Raises ArgumentError for what cannot be asked for.
    """
    check_splits(num_splits, deterministic_batch=deterministic_batch, split_keys=split_keys)
    keys: int | None = splits.KEYS_OF_OWN_PARTS if deterministic_batch and split_keys is None else split_keys
    if num_splits and keys is not None:
        asked = "deterministic_batch, which splits keys" if split_keys is None else "split_keys, for keys"
        raise ArgumentError(f"num_splits is {num_splits} beside {asked} into parts of {keys}: leave one of them out")
    return keys


def any_cap(softcap: float | None) -> bool:
    """Whether a cap is more than what modules with a first maximum take: `Family.any_cap`."""
    return softcap is not None and softcap > MOST_CAP_OF_FIRST_MAX


def named_scores(sinks: torch.Tensor | None, softcap: float | None) -> dict[str, Any]:
    """What a module's entry point takes of these: those that it is made for."""
    return given(sinks=sinks, softcap=softcap)


def given(**named: Any) -> dict[str, Any]:
    """Those that are not None, by name."""
    return {name: value for name, value in named.items() if value is not None}


def window_tuple(window: Window) -> tuple[int, ...] | None:
    """A window as a tuple, which can be looked up. Raises ArgumentError for what is none."""
    dispatch.mask_of(False, window)  # which says what a window has to be
    return None if window is None else tuple(window)


def refuse_grad(q: Any, k: Any, v: Any, sinks: Any = None) -> None:
    """Raise ValueError where a gradient would be lost without a word."""
    if not torch.is_grad_enabled():
        return
    if q.requires_grad or k.requires_grad or v.requires_grad:
        raise ValueError("q, k or v requires grad; this kernel is forward only: call it under torch.no_grad()")
    if sinks is not None:
        refuse_grad_of("sinks", sinks)


def refuse_grad_of(name: str, x: torch.Tensor) -> None:
    """The same of one tensor."""
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(f"{name} requires grad; this kernel is forward only: call it under torch.no_grad()")


# The same where sizes may not be known yet, while a model is traced. All of it needs no memory of a tensor.


def need(condition: Any, message: Callable[[], str]) -> None:
    """Raise ArgumentError with this message where a condition does not hold: torch._check, with another error.

    The condition may be one of sizes that are not known yet: it is then one of what torch.compile makes.
    """
    if condition is False:
        raise ArgumentError(message())
    if condition is not True:  # which needs much of torch imported
        torch._check_with(ArgumentError, condition, message)


def need_sinks(sinks: torch.Tensor | None, heads_q: Any) -> None:
    """Raise ArgumentError for sinks of another shape or dtype, or apart from one another."""
    if sinks is None:
        return
    found = sinks.shape
    need(
        len(found) == 1 and found[0] == heads_q and sinks.dtype in (torch.bfloat16, torch.float32),
        lambda: f"sinks is {tuple(found)}, {sinks.dtype}; it needs to be ({heads_q},), bfloat16 or float32",
    )
    need_contiguous("sinks", sinks)


def need_contiguous(name: str, x: torch.Tensor) -> None:
    """Raise ArgumentError where the elements of the last dimension do not lie side by side."""
    needed = f"that of its last dimension needs to be 1: pass {name}.contiguous()"
    need(
        x.stride(-1) == 1 or x.shape[-1] <= 1 or x.numel() == 0,
        lambda: f"{name} has strides {tuple(x.stride())}; {needed}",
    )


def need_rows(name: str, x: torch.Tensor, *, by_sequence: bool = False) -> None:
    """Raise ArgumentError for rows that are not contiguous, or not aligned to 16 bytes, by which they are copied.

    `by_sequence`: not the last dimension, but the sequence of x (batch, seq, heads, d) is known to be contiguous. A
    head dim of other than whole 16 bytes is left to be refused as one that there are no modules for.
    """
    if not by_sequence:
        need_contiguous(name, x)
    step, contiguous = 16 // x.dtype.itemsize, 1 if by_sequence else x.ndim - 1
    others = [(x.stride(axis), x.shape[axis]) for axis in range(x.ndim) if axis != contiguous]
    needed = f"all but the one that is 1 need to be multiples of {step}, 16 bytes"
    how = f"pad its sequence to a multiple of {step}" if by_sequence else f"pass {name}.contiguous()"
    need(
        all(stride % step == 0 or size <= 1 for stride, size in others) or x.shape[-1] % step != 0 or x.numel() == 0,
        lambda: f"{name} has strides {tuple(x.stride())}, dtype {x.dtype}; {needed}: {how}",
    )


def need_heads(heads_q: Any, heads_kv: Any) -> None:
    """Raise ArgumentError for query heads that the heads of k do not divide."""
    need(
        heads_q == 0 or (heads_kv != 0 and heads_q % heads_kv == 0),
        lambda: f"q has {heads_q} heads and k has {heads_kv}; heads of q must be a multiple of those of k",
    )


def need_out(out: Any, q: torch.Tensor, wanted: tuple[Any, ...]) -> None:
    """Raise TypeError for an `out` that is no tensor, ArgumentError for one of another shape than O's, of a dtype that
    no module writes, or whose rows are not contiguous or share their places. None is one that is still to be made."""
    if out is None:
        return
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out is a {type(out).__name__}; it needs to be a torch.Tensor")
    need(tuple(out.shape) == wanted, lambda: f"out has shape {tuple(out.shape)}; it needs to be {wanted}")
    dtypes = list(OUTPUTS) if q.dtype.itemsize == 1 else [q.dtype, torch.float32]
    if out.dtype not in dtypes:
        raise ArgumentError(f"out has dtype {out.dtype}; it needs to be {' or '.join(map(str, dtypes))}")
    need(
        not any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)),
        lambda: f"out has strides {out.stride()}: several elements share one address; pass out.contiguous()",
    )
    need_rows("out", out)


# Whoever looks at calls instead of making them: dispatch modes, functorch, and all else that sees operators only

dispatch_modes, functorch_transforms = _len_torch_dispatch_stack, _are_functorch_transforms_active
_LIBRARY = torch.library.Library("fa3gen", "DEF")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def register(signature: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator. One implementation serves every device: the modules themselves ask for a Hopper GPU."""
    name = signature.partition("(")[0]
    _LIBRARY.define(signature, tags=_TAGS)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, real, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"fa3gen::{name}", fake, lib=_LIBRARY)
