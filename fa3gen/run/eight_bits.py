"""Calls whose q, k and v have 8 bits: their factors, what O is, and what is not served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fa3gen.design.family import blocks_of
from fa3gen.design.key_order import UNIT, whole_units
from fa3gen.hardware.dtypes import DTYPES, E4M3, E5M2
from fa3gen.run import calls
from fa3gen.run.dispatch import ArgumentError
from fa3gen.spec.common import StoredDType
from fa3gen.spec.model import usual_output
from fa3gen.spec.quantizing import BLOCK_ROWS

Factors = tuple[Any, Any, Any]  # of q, k and v
FACTORS = "q_descale", "k_descale", "v_descale"
EIGHT_BITS, OTHER_EIGHT_BITS = E4M3.in_torch(), E5M2.in_torch()  # of q, k and v; of k and v alone
PERMUTE = "pass what fa3gen.quantize(v, transpose=True, permute_keys=True) gives, or leave v_permuted out"


def out_like(q: Tensor, v: Tensor) -> Tensor:
    """A new contiguous O for q and v, (.., heads_q, d_v), of the dtype that it has by default."""
    dtype = DTYPES[usual_output(calls.INPUTS[q.dtype])].in_torch()
    return q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype)


def of_blocks(factors: Factors) -> bool:
    """Whether factors of q, k or v are those of blocks of rows: (batch, heads, blocks), more than one number."""
    q_descale, k_descale, v_descale = factors
    return _of_blocks(q_descale) or _of_blocks(k_descale) or _of_blocks(v_descale)


def _of_blocks(factor: Any) -> bool:
    return isinstance(factor, Tensor) and factor.dim() == 3 and factor.numel() != 1


def _wanted(q: Tensor, k: Tensor, factors: Factors, blocks: bool, sequences: int | None) -> tuple[tuple[int, ...], ...]:
    """The shapes that modules take factors in: all of heads, or, of dense tensors, of q and k both of blocks, beside
    which that of v is of blocks or of heads.
    """
    of_heads = (q.shape[0] if sequences is None else sequences), k.shape[-2]
    if not blocks:
        return of_heads, of_heads, of_heads
    of_q, of_k = ((x.shape[0], x.shape[2], blocks_of(x.shape[1])) for x in (q, k))
    return of_q, of_k, of_k if _of_blocks(factors[2]) else of_heads


def named_factors(
    q: Tensor, k: Tensor, factors: Factors, *, blocks: bool = False, sequences: int | None = None
) -> dict[str, Tensor]:
    """Those that are given, by name, as modules take them: see `_wanted`. Raises as `check_factors`."""
    device, named = q.get_device(), {}
    wide = q.dtype is not EIGHT_BITS
    for name, factor, wanted in zip(FACTORS, factors, _wanted(q, k, factors, blocks, sequences), strict=True):
        if factor is not None:
            # What `_check_factor` asks, in line, since each call comes here.
            if wide or type(factor) is not Tensor or factor.dtype is not torch.float32 or factor.requires_grad:
                _check_factor(name, factor, q, wanted)
            if factor.get_device() != device:
                _check_factor(name, factor, q, wanted)
            if factor.shape != wanted:
                if factor.numel() != 1:
                    _check_factor(name, factor, q, wanted)
                factor = factor.as_strided(wanted, (0,) * len(wanted))  # one number for all, without a copy
            named[name] = factor
    return named


def check_factors(
    q: Tensor, k: Tensor, factors: Factors, *, blocks: bool = False, sequences: int | None = None
) -> None:
    """Raise TypeError for a factor that is no tensor, ArgumentError for one of another shape, dtype or device, and for
    any beside q of 16 bits; ValueError where a gradient would be lost.

    `blocks`: whether those of q and k are of blocks of rows, and that of v may be, as `of_blocks` finds them, of dense
    tensors. `sequences`: how many there are, where they are packed; else as many as q has.
    """
    for name, factor, wanted in zip(FACTORS, factors, _wanted(q, k, factors, blocks, sequences), strict=True):
        if factor is not None:
            _check_factor(name, factor, q, wanted)


def _check_factor(name: str, factor: Any, q: Tensor, wanted: tuple[int, ...]) -> None:
    if not isinstance(factor, Tensor):
        raise TypeError(
            f"{name} is a {type(factor).__name__}; it needs to be a torch.Tensor on q's device: each call would "
            "copy a number there, and torch.tensor(number, device=q.device) does it once"
        )
    if q.dtype != EIGHT_BITS:
        raise ArgumentError(
            f"{name} is given, and q has dtype {q.dtype}; factors are of q, k and v in {EIGHT_BITS}: leave it out"
        )
    fits = factor.shape == wanted or factor.numel() == 1
    if not fits or factor.dtype != torch.float32 or factor.get_device() != q.get_device():
        what = "for each sequence and head of k"
        if len(wanted) == 3:
            what = f"for each sequence, head of {name[0]} and block of {BLOCK_ROWS} rows"
            what += ", as another factor is of blocks" * (factor.dim() != 3)
        raise ArgumentError(
            f"{name} is {tuple(factor.shape)}, {factor.dtype} on {factor.device}; it needs to be one number or "
            f"{wanted}, {what}, torch.float32 on {q.device}"
        )
    calls.refuse_grad_of(name, factor)


def any_of(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether any of them has 8 bits."""
    return min(q.dtype.itemsize, k.dtype.itemsize, v.dtype.itemsize) == 1


def check(q: Tensor, k: Tensor, v: Tensor, asked: Mapping[str, Any]) -> None:
    """Raise ArgumentError where only some of q, k and v have 8 bits, or k and v others than they may beside q, and for
    what such calls are not served with: whatever stands in `asked` and is not None, False or 0."""
    if k.dtype != v.dtype or k.dtype not in (q.dtype, *[OTHER_EIGHT_BITS] * (q.dtype == EIGHT_BITS)):
        raise ArgumentError(
            f"q has dtype {q.dtype}, k {k.dtype} and v {v.dtype}; dense tensors need the same. Beside q of 16 bits, k "
            f"and v of 8 go to fa3gen.attention_packed, or as a cache to flash_attn_with_kvcache; beside q of "
            f"{EIGHT_BITS} both may be {OTHER_EIGHT_BITS}"
        )
    refuse(q, asked)


def check_packed(q: Tensor, k: Tensor, v: Tensor) -> None:
    """The same of dtypes of packed sequences and pages, where q has 8 bits."""
    if k.dtype != v.dtype or k.dtype not in (q.dtype, OTHER_EIGHT_BITS):
        raise ArgumentError(
            f"q has dtype {q.dtype}, k {k.dtype} and v {v.dtype}; beside q of 8 bits they need the same, or both "
            f"{OTHER_EIGHT_BITS}, and beside q of 16 bits they may have 8: pass k and v of 8 bits, or q in "
            "torch.bfloat16, times its factor"
        )


def refuse(q: Tensor, asked: Mapping[str, Any]) -> None:
    """Raise ArgumentError for the first of these that says something beside q, k and v of 8 bits."""
    for name, value in asked.items():
        if isinstance(value, Tensor) or value:
            said = "given" if isinstance(value, Tensor) else value
            raise ArgumentError(
                f"{name} is {said}, and q, k and v have dtype {q.dtype}, for which there is no such module; pass "
                "tensors in torch.bfloat16, times their factors, or leave it out"
            )


def check_permuted(q: Tensor, v: Tensor) -> None:
    """Raise ArgumentError for v_permuted beside a q of 16 bits, or a v whose keys do not stand side by side."""
    if q.dtype != EIGHT_BITS:
        raise ArgumentError(f"v_permuted is True, and q has dtype {q.dtype}; it is for {EIGHT_BITS}: leave it out")
    if "v" not in by_sequence(v):
        raise ArgumentError(
            f"v_permuted is True, and v has strides {tuple(v.stride())}; that of its keys needs to be 1: {PERMUTE}"
        )


def keys_permuted(k: Tensor) -> tuple[int, int, int]:
    """Batch, keys and heads of a v whose keys are permuted, beside this k: keys in whole units."""
    batch, seq_k, heads_kv, _ = k.shape
    return batch, whole_units(seq_k), heads_kv


def wrong_keys(k: Tensor, v: Tensor) -> str:
    """What is wrong with a v that has others, and what to pass."""
    return (
        f"v_permuted is True, and v has shape {tuple(v.shape)}; beside k {tuple(k.shape)} it needs to be "
        f"{(*keys_permuted(k), v.shape[3])}, keys in whole units of {UNIT}: {PERMUTE}"
    )


def by_sequence(v: Tensor) -> tuple[str, ...]:
    """`Family.by_sequence` for v (batch, seq, heads, d): of 8 bits keys may stand side by side in place of a row."""
    if v.dtype is not EIGHT_BITS and v.dtype is not OTHER_EIGHT_BITS:
        return ()
    _, of_row, _, of_element = v.stride()
    return ("v",) if of_row == 1 and of_element != 1 else ()


def kv_dtype(q: Tensor, k: Tensor) -> StoredDType | None:
    """`Family.kv_dtype` for dense q and k: that of k and v where q has other 8 bits."""
    return "e5m2" if k.dtype is OTHER_EIGHT_BITS and q.dtype is EIGHT_BITS else None
