"""Modules in plain PyTorch with the interface of generated ones: a right one, and what is wrong with others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from fa3gen.cpu.kernel import Settings
from fa3gen.design.masks import reach
from fa3gen.spec.model import Mask
from fa3gen.verify import packed_inputs, reference
from fa3gen.verify.packed_inputs import Span
from fa3gen.verify.reference import Attention


def check_arguments(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    *,
    dtype: torch.dtype,
    head_dim: int,
    out_dtype: torch.dtype | None = None,
    modes: int = 4,
) -> None:
    for name, tensor in {"q": q, "k": k, "v": v, "out": q if out is None else out}.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}; it needs to be a tensor")
        wanted = out_dtype if name == "out" and out is not None and out_dtype else dtype
        if tensor.dtype != wanted:
            raise TypeError(f"{name} is {tensor.dtype}; it needs to be {wanted}")
        if tensor.dim() != modes or tensor.shape[-1] != head_dim or tensor.stride(-1) != 1:
            raise ValueError(f"{name} needs {modes} modes, the last {head_dim} contiguous elements")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}")
        strides = [tensor.stride(mode) for mode in range(modes - 1) if tensor.shape[mode] > 1]
        if tensor.data_ptr() % 16 or any(stride % 8 for stride in strides):
            raise ValueError(f"{name} needs 16-byte alignment")
    if k.shape[:-3] != q.shape[:-3] or k.shape != v.shape:
        raise ValueError(f"k {tuple(k.shape)} and v {tuple(v.shape)} do not match q {tuple(q.shape)}")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q has {q.shape[-2]} heads, no multiple of k's {k.shape[-2]}")
    if out is not None and out.shape != q.shape:
        raise ValueError(f"out is {tuple(out.shape)}; it needs to be {tuple(q.shape)}")


def check_scores(q: torch.Tensor, sinks: Any, softcap: Any) -> None:
    """What a module with sinks and a cap refuses of these; q (.., heads, head dim)."""
    if not (isinstance(softcap, float) and 0 < softcap < math.inf):
        raise ValueError("softcap needs to be positive")
    right = isinstance(sinks, torch.Tensor) and sinks.dtype != torch.float16 and sinks.device == q.device
    if not right or sinks.shape != q.shape[-2:-1] or not sinks.is_contiguous():
        raise ValueError("sinks need to be as many as heads")


Compute = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, mask: Mask) -> Any:
    return reference.attention(q, k, v, scale=scale, reach=reach(mask), compute_dtype=torch.float32)


@dataclass
class Module:
    """A module in plain PyTorch. `compute` gives O and LSE in float32; the other fields break something else."""

    mask: Mask
    compute: Compute = exact
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None  # of O, where it is not `dtype`
    head_dim: int = 64
    check: Callable[..., None] = check_arguments
    store: Callable[[torch.Tensor, torch.Tensor], Any] = torch.Tensor.copy_
    before: Callable[..., Any] = lambda q, k, v: None
    after: Callable[..., Any] = lambda out, lse: None
    cpu: Any = field(default_factory=lambda: SimpleNamespace(settings=Settings()))

    def attention(self, q: Any, k: Any, v: Any, *, scale: Any = None, out: Any = None, return_lse: bool = False) -> Any:
        self.check(q, k, v, out, dtype=self.dtype, head_dim=self.head_dim, out_dtype=self.out_dtype)
        out = torch.empty_like(q, dtype=self.out_dtype) if out is None else out
        result, lse = self.compute(q, k, v, scale, self.mask)
        self.before(q, k, v)
        self.store(out, result)
        self.after(out, lse)
        return (out, lse) if return_lse else out


def online(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: Any,
    mask: Mask,
    *,
    rescale: bool = True,
    tile_k: int = 64,
    round_p: Callable[[torch.Tensor], torch.Tensor] | None = None,
    hide_last: bool = False,
) -> Any:
    """Tiled online softmax as a kernel does it: P rounded to 16 bits, sums and O in float32.

    `rescale` False leaves O as it was when a row's maximum moves, `round_p` rounds P in another way, `hide_last` hides
    the last key where there are others.
    """
    group = q.shape[2] // k.shape[2]
    round_p = round_p or (lambda p: p.to(q.dtype).float())
    keys, values = (tensor.float().repeat_interleave(group, dim=2).transpose(1, 2) for tensor in (k, v))
    scores = q.float().transpose(1, 2) @ keys.transpose(2, 3) * (scale or q.shape[-1] ** -0.5)
    seen = reference.visible_keys(reach(mask), seq_q=q.shape[1], seq_k=k.shape[1], rows=torch.arange(q.shape[1]))
    scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
    if hide_last and k.shape[1] > 1:
        scores[..., -1] = -math.inf
    top = torch.full(scores.shape[:3], -math.inf)
    total, out = torch.zeros(scores.shape[:3]), torch.zeros_like(q.float().transpose(1, 2))
    for start in range(0, k.shape[1], tile_k):
        tile = scores[..., start : start + tile_k]
        new = torch.maximum(top, tile.amax(-1))
        shift = new.masked_fill(torch.isneginf(new), 0)  # a row that has seen no key yet
        decay = torch.exp(top - shift)
        weights = torch.exp(tile - shift[..., None])
        total = total * decay + weights.sum(-1)
        products = round_p(weights) @ values[:, :, start : start + tile_k]
        out = out * (decay if rescale else torch.ones_like(decay))[..., None] + products
        top = new
    return (out / total.clamp(min=1e-30)[..., None]).transpose(1, 2), top + torch.log(total)


def to_bits(p: torch.Tensor, bits: int) -> torch.Tensor:
    """Rounded to nearest, with so many significant bits (bf16 has 8)."""
    mantissa, exponent = torch.frexp(p)
    return torch.ldexp(torch.round(mantissa * 2**bits) / 2**bits, exponent)


def nan_rows(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
    """The classic 0 / 0 of rows that see no key."""
    out, lse = exact(q, k, v, scale, mask)
    empty = torch.isneginf(lse).transpose(1, 2)[..., None]
    return out.masked_fill(empty, math.nan), lse


def whole_tiles_only(out: torch.Tensor, result: torch.Tensor) -> None:
    rows = out.shape[1] // 64 * 64
    out[:, :rows].copy_(result[:, :rows])


def past_the_end(out: torch.Tensor, result: torch.Tensor) -> None:
    out.copy_(result)
    if out.stride(1) < out.stride(0) or out.shape[0] == 1:
        out.as_strided((out.shape[3],), (1,), out.storage_offset() + out.shape[1] * out.stride(1)).fill_(0)


def check_packed(tensors: dict[str, Any], *, dtype: torch.dtype, head_dim: int) -> None:
    """What a module for packed sequences refuses."""
    q, k, v, out, *words = tensors.values()
    check_arguments(q, k, v, out, dtype=dtype, head_dim=head_dim, modes=3)
    for name, tensor in list(tensors.items())[4:]:
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32:
            raise TypeError(f"{name} needs to be an int32 tensor")
        if tensor.device != q.device or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name} needs to be contiguous, of one dimension and on {q.device}")
    of_q, of_k, *used = words
    if of_q.shape != of_k.shape or not len(of_q):
        raise ValueError(f"cu_seqlens_q {tuple(of_q.shape)} and cu_seqlens_k {tuple(of_k.shape)} need to be alike")
    for name, tensor in zip(("seqused_q", "seqused_k"), used, strict=True):
        if tensor is not None and len(tensor) != len(of_q) - 1:
            raise ValueError(f"{name} needs {len(of_q) - 1} elements")


@dataclass
class PackedModule:
    """A module for packed sequences in plain PyTorch; each method of it is one that a wrong one overrides."""

    mask: Mask
    compute: Compute = online
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    cpu: Any = field(default_factory=lambda: SimpleNamespace(settings=Settings()))

    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        *,
        seqused_q: Any = None,
        seqused_k: Any = None,
        scale: Any = None,
        out: Any = None,
        return_lse: bool = False,
    ) -> Any:
        offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        used = {"seqused_q": seqused_q, "seqused_k": seqused_k}
        tensors = {"q": q, "k": k, "v": v, "out": out, **offsets, **used}
        self.check(tensors)
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        lse = torch.full((q.shape[1], q.shape[0]), math.nan)
        of_q, of_k = self.spans(cu_seqlens_q, seqused_q, len(q)), self.spans(cu_seqlens_k, seqused_k, len(k))
        for number, (rows, keys) in enumerate(zip(of_q, of_k, strict=True)):
            if rows[0] < rows[1]:
                self.sequence(number, (q, k, v), rows, keys, scale, out, lse)
        return (out, lse) if return_lse else out

    def check(self, tensors: dict[str, Any]) -> None:
        check_packed(tensors, dtype=self.dtype, head_dim=self.head_dim)

    def spans(self, offsets: torch.Tensor, used: torch.Tensor | None, total: int) -> list[Span]:
        return packed_inputs.spans(offsets.tolist(), None if used is None else used.tolist(), total)

    def sequence(self, number: int, given: Any, rows: Span, keys: Span, scale: Any, out: Any, lse: Any) -> None:
        """One sequence, which has queries."""
        self.store(out, lse, rows, self.attend(given, rows, keys, scale))

    def attend(self, given: Any, rows: Span, keys: Span, scale: Any) -> Attention:
        """O (1, rows, heads, d) and LSE of the rows."""
        q, k, v = given
        of_q, of_k = slice(*rows), slice(*keys)
        if keys[0] == keys[1]:
            return exact(q[None, of_q], k[None, of_k], v[None, of_k], scale, self.mask)
        return Attention(*self.compute(q[None, of_q], k[None, of_k], v[None, of_k], scale, self.mask))

    def store(self, out: torch.Tensor, lse: torch.Tensor, rows: Span, result: Attention) -> None:
        out[slice(*rows)] = result.out[0].to(out.dtype)
        lse[:, slice(*rows)] = result.lse[0]
