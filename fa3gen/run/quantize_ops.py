"""Rows of 16 bits made 8 bits, by the generated module for them: eager, compiled, in CUDA graphs.

Who sees a call: `fa3gen.run.calls`. The operators are `fa3gen::quantize` and `fa3gen::quantize_out`, and where a call
gives the scales `fa3gen::quantize_by` and `fa3gen::quantize_by_out`. A module serves all sizes; which one it is follows
from the dtype, the head dim and what is asked for, by its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fa3gen.design.family import blocks_of
from fa3gen.design.key_order import whole_units
from fa3gen.design.quantizing import WIDTH
from fa3gen.design.workspace import Workspace
from fa3gen.hardware.dtypes import BF16, DTYPES, E4M3
from fa3gen.run import calls
from fa3gen.run.calls import dispatch_modes, functorch_transforms
from fa3gen.run.dispatch import ArgumentError, NoKernel
from fa3gen.run.launch import module_at
from fa3gen.spec.common import DType
from fa3gen.spec.quantizing import BLOCK_ROWS, ScaledPer

DTYPE_NAMES = {DTYPES[name].in_torch(): name for name in get_args(DType)}
SCALES = get_args(ScaledPer)


def quantize(
    x: Tensor,
    *,
    rotate: Tensor | None = None,
    transpose: bool = False,
    permute_keys: bool = False,
    scale: ScaledPer = "head",
    heads_kv: int | None = None,
    descale: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x in 8 bits, and the factors that make x of it again, on a Hopper GPU, on torch's current stream.

    What attention of 8 bits takes of Q, K and V, whose heads of q share factors as they share heads of k:

        q8, q_descale = fa3gen.quantize(q, rotate=signs, heads_kv=k.shape[2])
        k8, k_descale = fa3gen.quantize(k, rotate=signs)
        v8, v_descale = fa3gen.quantize(v, transpose=True, permute_keys=True)  # for attention(..., v_permuted=True)

    Args:
        x: (batch, seq, heads, d), bfloat16 or float16; any strides with a contiguous last dimension and 16-byte aligned
            rows.
        rotate: (d,) float32, 16-byte aligned: 1 and -1 at random. Each row then is multiplied by these and by a
            Hadamard matrix over sqrt(d), which spreads elements that are far larger than others over all of their row.
            Q K^T of Q and K that are rotated by the same signs is what it was. d has to be a power of two.
        transpose: Whether the sequence is contiguous in the result, as modules want V that do not transpose it; not
            with scale="token".
        permute_keys: With transpose, whether the result has keys in the order in which attention needs no exchange of
            them, as `fa3gen.attention(..., v_permuted=True)` wants V: (batch, seq rounded up to 16, heads, d), position
            4t + j of each 16 having row 2t + j % 2 + 8 (j // 2) of these, and zeros behind the last row.
        scale: What shares a factor. "head": all that one head of k serves; this takes a kernel that reads x before the
            one that writes. "block": 128 rows of a head; "token": a row of a head; x is read once for these.
        heads_kv: With scale="head" the number of factors of each sequence, of heads / heads_kv heads each; by default
            one for each head.
        descale: (batch, heads_kv) float32, positive: factors to use instead of looking for them, with scale="head".
            What is larger than 448 times its factor becomes that.
        out: (batch, seq, heads, d) float8_e4m3fn to write to, its rows 8-byte aligned, or transposed its columns
            16-byte aligned; with permute_keys seq is rounded up to 16.

    Returns:
        (out, descale): out float8_e4m3fn like x; descale float32: (batch, heads_kv), which is what `fa3gen.attention`
        takes by the names q_descale, k_descale and v_descale; of blocks (batch, heads, ceil(seq / 128)), of rows
        (batch, heads, seq). It is max |x| / 448 of what shares it, 2^-100 at least; values are rounded to the nearest,
        ties to even. NaN stay NaN, and count for no maximum; an infinite element makes its descale infinite, itself
        NaN, and 0 of all else that shares it.

    Raises:
        NoKernel: There is no module for this; the message says how to get one.
        TypeError, ValueError: An argument is of another type, dtype, device, shape, stride or alignment, does not go
            with another one, or requires grad in grad mode, since this is forward only.
    """
    dtype = _check(x, rotate, scale, heads_kv, descale, out)
    _check_transposed(transpose, permute_keys, scale)
    columns = {"transpose": transpose, **({"permute_keys": True} if permute_keys else {})}
    watched = is_dynamo_compiling() or dispatch_modes() or functorch_transforms()
    # Tensors on a GPU that nobody watches? Then nothing is lost by leaving the dispatcher out.
    if not watched and type(x) is Tensor and x.is_cuda:
        named = calls.given(heads_kv=heads_kv, descale=descale)
        serving = _serving(dtype, x.shape[-1], rotate is not None, transpose, scale, permute_keys)
        returned: tuple[Tensor, Tensor] = serving(x, *([] if rotate is None else [rotate]), **named, out=out)
    elif descale is not None and out is not None:
        torch.ops.fa3gen.quantize_by_out(x, rotate, descale, out, **columns)
        returned = out, descale
    elif descale is not None:
        returned = torch.ops.fa3gen.quantize_by(x, rotate, descale, **columns), descale
    elif out is not None:
        options = {**columns, "scale": scale, "heads_kv": heads_kv}
        returned = out, torch.ops.fa3gen.quantize_out(x, rotate, out, **options)
    else:
        options = {**columns, "scale": scale, "heads_kv": heads_kv}
        returned = torch.ops.fa3gen.quantize(x, rotate, **options)
    return returned


def _serving(
    dtype: str, head_dim: int, rotate: bool, transpose: bool, scale: str, permute: bool = False
) -> Callable[..., Any]:
    """The `quantize` of the module for this. Raises NoKernel."""
    entry: Callable[..., Any] = module_at(_file(dtype, head_dim, rotate, transpose, scale, permute)).quantize
    return entry


def stem_of(dtype: str, rotate: bool, transpose: bool, scale: str, permute: bool = False) -> str:
    """The stem of the spec of modules for this; theirs is the same with the head dim behind it."""
    parts = ["rotate"] * rotate + ["v"] * transpose + ["permuted"] * permute
    return "_".join(["quantize", *parts, *[scale] * (scale != "head"), *[dtype] * (dtype != BF16.name)])


def proposed(dtype: str, head_dim: int, rotate: bool, transpose: bool, scale: str, permute: bool = False) -> str:
    """A spec of such a module, which nobody tuned, as YAML."""
    rows = BLOCK_ROWS if transpose or scale == "block" else 64
    # Rotated, a thread has two rows of an mma, and four where it packs those of a column into a word.
    threads = 256 if not rotate else rows if transpose else 2 * rows
    problem = {"dtype": dtype, "rotate": rotate, "transpose": transpose, "scale": scale}
    problem |= {"permute_keys": True} if permute else {}
    fields = ", ".join(f"{name}: {str(value).lower()}" for name, value in problem.items())
    return (
        'summary: "Rows in 8 bits"\n'
        "operation: quantize\n"
        f"problem: {{{fields}}}\n"
        f"tile: {{rows: {rows}, threads: {threads}, per_sm: 1}}\n"
        f"matrix: {{problem.head_dim: [{head_dim}]}}\n"
    )


@functools.cache
def _file(dtype: str, head_dim: int, rotate: bool, transpose: bool, scale: str, permute: bool = False) -> Path:
    spec, home = stem_of(dtype, rotate, transpose, scale, permute), Workspace.find()
    file = home.rendered_path(f"{spec}_d{head_dim}")
    if file.is_file():
        return file
    there = next((path for path in (*home.spec_files(), *home.bundled_spec_files()) if path.stem == spec), None)
    own, render = home.specs_dir / f"{spec}.yaml", f"run `fa3gen render {spec}`"
    if there is not None and any(variant.stem == file.stem for variant in home.load(there).variants):
        way_out = f"Its spec is {there}: {render}"
    elif there == own:
        way_out = f"{own} makes other head dims: add {head_dim} to problem.head_dim in its matrix, and {render}"
    else:
        text = proposed(dtype, head_dim, rotate, transpose, scale, permute)
        way_out = f"No spec makes it: save this one as {own}, and {render}:\n\n{text}"
    raise NoKernel(f"{file} does not exist. {way_out}")


# What can be wrong


def _check(x: Any, rotate: Any, scale: Any, heads_kv: Any, descale: Any, out: Any) -> str:
    """The dtype of x. Raises TypeError or ValueError for what no module takes."""
    for name, each in {"x": x, **calls.given(rotate=rotate, descale=descale, out=out)}.items():
        if not isinstance(each, Tensor):
            raise TypeError(f"{name} is a {type(each).__name__}; it needs to be a torch.Tensor")
        calls.refuse_grad_of(name, each)
    if x.dtype not in DTYPE_NAMES:
        raise TypeError(f"x has dtype {x.dtype}; quantize takes {' or '.join(map(str, DTYPE_NAMES))}")
    if x.ndim != 4 or x.shape[-1] % WIDTH:
        raise ArgumentError(
            f"x has shape {tuple(x.shape)}; it needs to be (batch, seq, heads, d), d a multiple of {WIDTH}"
        )
    head_dim = int(x.shape[-1])
    if rotate is not None and (rotate.shape != (head_dim,) or rotate.dtype != torch.float32):
        found = f"rotate is {tuple(rotate.shape)}, {rotate.dtype}"
        raise ArgumentError(f"{found}; it needs to be ({head_dim},), torch.float32, with 1 and -1 at random")
    if rotate is not None and head_dim & (head_dim - 1):
        raise ArgumentError(f"rotate is given, and d is {head_dim}; only rows of a power of two can be rotated")
    if scale not in SCALES:
        raise ArgumentError(f"scale is {scale!r}; it needs to be one of {', '.join(map(repr, SCALES))}")
    for name in calls.given(heads_kv=heads_kv, descale=descale):
        if scale != "head":
            raise ArgumentError(
                f"{name} is given beside scale={scale!r}, and is for scale='head'; leave one of them out"
            )
    heads = x.shape[2]
    if heads_kv is not None and heads_kv < 1:
        raise ArgumentError(f"heads_kv is {heads_kv}; it needs to divide the {heads} heads of x")
    if heads_kv is not None and descale is not None and descale.shape[1:] != (heads_kv,):
        raise ArgumentError(
            f"heads_kv is {heads_kv}, and descale has shape {tuple(descale.shape)}; leave one of them out"
        )
    dtype: str = DTYPE_NAMES[x.dtype]
    return dtype


def _check_transposed(transpose: bool, permute_keys: bool, scale: str) -> None:
    if permute_keys and not transpose:
        raise ArgumentError(
            "permute_keys is True without transpose: keys are permuted of V whose sequence is contiguous; pass "
            "transpose=True, too"
        )
    if transpose and scale == "token":
        raise ArgumentError(
            "transpose is given beside scale='token': transposed is V, of whose rows P V is a sum, out of which no "
            "factor of a row can be taken; use scale='head'"
        )


# Operators, for whatever looks at calls instead of making them


def _call(
    x: Tensor, signs: Tensor | None, transpose: bool, scale: str, permute: bool, **named: Any
) -> tuple[Tensor, Tensor]:
    serving = _serving(DTYPE_NAMES[x.dtype], x.shape[-1], signs is not None, transpose, scale, permute)
    returned: tuple[Tensor, Tensor] = serving(x, *([] if signs is None else [signs]), **calls.given(**named))
    return returned


def _quantize(
    x: Tensor, signs: Tensor | None, *, transpose: bool, scale: str, heads_kv: int | None, permute_keys: bool = False
) -> tuple[Tensor, Tensor]:
    """`fa3gen::quantize`: the output, and scales that are found."""
    return _call(x, signs, transpose, scale, permute_keys, heads_kv=heads_kv)


def _quantize_out(
    x: Tensor,
    signs: Tensor | None,
    out: Tensor,
    *,
    transpose: bool,
    scale: str,
    heads_kv: int | None,
    permute_keys: bool = False,
) -> Tensor:
    """`fa3gen::quantize_out`: writes to `out` and returns scales that are found."""
    return _call(x, signs, transpose, scale, permute_keys, heads_kv=heads_kv, out=out)[1]


def _quantize_by(
    x: Tensor, signs: Tensor | None, descale: Tensor, *, transpose: bool, permute_keys: bool = False
) -> Tensor:
    """`fa3gen::quantize_by`: the output by scales that are given."""
    return _call(x, signs, transpose, "head", permute_keys, descale=descale)[0]


def _quantize_by_out(
    x: Tensor, signs: Tensor | None, descale: Tensor, out: Tensor, *, transpose: bool, permute_keys: bool = False
) -> None:
    """`fa3gen::quantize_by_out`: writes to `out` by scales that are given."""
    _call(x, signs, transpose, "head", permute_keys, descale=descale, out=out)


def _quantize_fake(
    x: Tensor, signs: Tensor | None, *, transpose: bool, scale: str, heads_kv: int | None, permute_keys: bool = False
) -> tuple[Tensor, Tensor]:
    _check(x, signs, scale, heads_kv, None, None)
    return _out_like(x, transpose, permute_keys), _descale_like(x, scale, heads_kv)


def _quantize_out_fake(
    x: Tensor,
    signs: Tensor | None,
    out: Tensor,
    *,
    transpose: bool,
    scale: str,
    heads_kv: int | None,
    permute_keys: bool = False,
) -> Tensor:
    _check(x, signs, scale, heads_kv, None, out)
    _need_out(x, out, permute_keys)
    return _descale_like(x, scale, heads_kv)


def _quantize_by_fake(
    x: Tensor, signs: Tensor | None, descale: Tensor, *, transpose: bool, permute_keys: bool = False
) -> Tensor:
    _check(x, signs, "head", None, descale, None)
    _need_descale(x, descale)
    return _out_like(x, transpose, permute_keys)


def _quantize_by_out_fake(
    x: Tensor, signs: Tensor | None, descale: Tensor, out: Tensor, *, transpose: bool, permute_keys: bool = False
) -> None:
    _check(x, signs, "head", None, descale, out)
    _need_descale(x, descale)
    _need_out(x, out, permute_keys)


def _out_like(x: Tensor, transpose: bool, permute_keys: bool) -> Tensor:
    """An output as a module makes it."""
    batch, seq, heads, head_dim = x.shape
    if not transpose:
        return x.new_empty(x.shape, dtype=E4M3.in_torch())
    length = whole_units(seq)
    strides = heads * head_dim * length, 1, head_dim * length, length
    shape = batch, length if permute_keys else seq, heads, head_dim
    return x.new_empty_strided(shape, strides, dtype=E4M3.in_torch())


def _descale_like(x: Tensor, scale: str, heads_kv: int | None) -> Tensor:
    """Scales as a module returns them."""
    batch, seq, heads, _ = x.shape
    if scale == "head":
        shape: tuple[int, ...] = batch, heads if heads_kv is None else heads_kv
        calls.need(heads % shape[1] == 0, lambda: f"heads_kv is {heads_kv}; it needs to divide the {heads} heads of x")
    else:
        shape = batch, heads, seq if scale == "token" else blocks_of(seq)
    return x.new_empty(shape, dtype=torch.float32)


def _need_out(x: Tensor, out: Tensor, permute_keys: bool) -> None:
    batch, seq, *others = x.shape
    wanted = batch, whole_units(seq) if permute_keys else seq, *others
    calls.need(
        tuple(out.shape) == wanted and out.dtype == E4M3.in_torch(),
        lambda: f"out is {tuple(out.shape)}, {out.dtype}; it needs to be {wanted}, {E4M3.torch_name}",
    )


def _need_descale(x: Tensor, descale: Tensor) -> None:
    batch, _, heads, _ = x.shape
    calls.need(
        descale.ndim == 2 and descale.shape[0] == batch and descale.shape[1] > 0 and heads % descale.shape[1] == 0,
        lambda: f"descale has shape {tuple(descale.shape)}; it needs to be ({batch}, heads_kv) of {heads} heads",
    )


_ROWS = "Tensor x, Tensor? signs"
_OPTIONS = "bool transpose, str scale, SymInt? heads_kv, bool permute_keys=False"
_BY = "bool transpose, bool permute_keys=False"
calls.register(f"quantize({_ROWS}, *, {_OPTIONS}) -> (Tensor, Tensor)", _quantize, _quantize_fake)
calls.register(f"quantize_out({_ROWS}, Tensor(a!) out, *, {_OPTIONS}) -> Tensor", _quantize_out, _quantize_out_fake)
calls.register(f"quantize_by({_ROWS}, Tensor descale, *, {_BY}) -> Tensor", _quantize_by, _quantize_by_fake)
calls.register(
    f"quantize_by_out({_ROWS}, Tensor descale, Tensor(a!) out, *, {_BY}) -> ()",
    _quantize_by_out,
    _quantize_by_out_fake,
)
