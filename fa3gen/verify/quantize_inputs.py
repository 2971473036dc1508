"""The inputs that quantisations are verified on: few, named, and each there to catch something.

Rows are normal random numbers of their own sizes. All tensors lie inside larger buffers of NaN, out and what is left
beside it are poisoned, so that what is read or left unwritten shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fa3gen.design.key_order import whole_units
from fa3gen.design.operation import operation_of
from fa3gen.spec.model import Quantize
from fa3gen.verify.inputs import case_seed, keys_in_order, poison

Distribution = Literal["normal", "outliers", "zeros", "small", "ties"]
Layout = Literal["padded", "contiguous", "by_head", "fused"]
GUARD = 1  # elements of every dimension but the contiguous one around a padded tensor
ROW_GUARD = 16  # and of that one: whole vectors
SPREAD = 1.5  # of the logarithm of a row's size
OUTLIER = 300.0  # times as large as the other elements
TIES = (-480, 481)  # multiples of 1/16: every number of e4m3 between 0.5 and 30, all that lies between two, and more
SMALL = 2.0**-120  # near the smallest numbers of bfloat16


@dataclass(frozen=True)
class QuantizeCase:
    """One named set of sizes; with `given` a call says scales, so that some values saturate.

    `heads_kv` are those of a module with a scale for each head of k; 0: as many as `heads`.
    """

    name: str
    why: str
    batch: int
    seq: int
    heads: int
    heads_kv: int = 0
    given: bool = False
    distribution: Distribution = "normal"
    layout: Layout = "padded"

    @property
    def shape(self) -> str:
        """`2 x 133 x 4 (2)`: sequences, rows, heads, and in brackets heads of k."""
        sizes = " x ".join(map(str, (self.batch, self.seq, self.heads)))
        return sizes + f" ({self.heads_kv})" * (self.heads_kv > 0)


@dataclass(frozen=True)
class QuantizeInputs:
    """Tensors of one case; `given` by name and in order, `named` by keyword. `out` lies inside `out_storage`."""

    given: dict[str, torch.Tensor]
    named: dict[str, Any]
    out: torch.Tensor
    out_storage: torch.Tensor


def cpu_cases(spec: Quantize) -> tuple[QuantizeCase, ...]:
    """The cases for the CPU model of sm_90a: small, and cut to the tile of `spec`."""
    rows, by_head = spec.tile.rows, spec.problem.scale == "head"
    cases = [
        QuantizeCase("ragged", "two tiles, the last one not full", 2, rows + 21, 3),
        QuantizeCase("one_row", "a single row", 1, 1, 1, layout="contiguous"),
        QuantizeCase("short", "less than a vector of rows", 2, 7, 2, layout="by_head"),
        QuantizeCase("whole", "tiles without an edge; x is a part of fused rows", 1, 2 * rows, 1, layout="fused"),
        QuantizeCase("outliers", "one element outweighs all others", 1, 33, 2, distribution="outliers"),
        QuantizeCase("zeros", "some rows are 0, and some heads", 2, 19, 4, 2 * by_head, distribution="zeros"),
        QuantizeCase("small", "scales that are not normal numbers are not taken", 1, 9, 2, distribution="small"),
    ]
    if by_head:
        cases += [
            QuantizeCase("group", "heads that share a scale", 2, rows + 5, 6, 2),
            QuantizeCase("given", "scales of a call; what is larger saturates", 2, 23, 4, 2, given=True),
            QuantizeCase("ties", "given scales: ties go to even", 1, rows, 2, given=True, distribution="ties"),
        ]
    return tuple(cases)


def gpu_cases(spec: Quantize) -> tuple[QuantizeCase, ...]:
    """The cases for a GPU: those of the CPU model, and larger ones."""
    return (
        *cpu_cases(spec),
        QuantizeCase("long", "more tiles than CTAs of all SMs", 2, 4099, 16, 0),
        QuantizeCase("wide_batch", "many sequences", 37, 515, 8, 0, layout="by_head"),
        QuantizeCase("one_head", "one head, whose maximum all SMs look for", 1, 16411, 1, 0, layout="fused"),
    )


def make(spec: Quantize, case: QuantizeCase, *, device: torch.device, seed: int) -> QuantizeInputs:
    """Draw the tensors of `case`; the same seed gives the same numbers on every device."""
    generator = torch.Generator().manual_seed(case_seed(case.name, seed))
    shape = case.batch, case.seq, case.heads, spec.problem.head_dim
    values = _values(case, shape, generator).to(spec.element.in_torch())
    given = {"x": _placed(values, case.layout, device)}
    if spec.problem.rotate:
        signs = 2.0 * torch.randint(0, 2, (spec.problem.head_dim,), generator=generator) - 1.0
        given["signs"] = signs.to(device)
    named: dict[str, Any] = {}
    heads_kv = case.heads_kv or case.heads
    if case.given:
        powers = torch.randint(-1, 2, (case.batch, heads_kv), generator=generator)
        factor = torch.full(powers.shape, 2.0**-3) if case.distribution == "ties" else 2.0**powers / 300.0
        # With strides of its own.
        named["descale"] = factor.repeat_interleave(2, 1)[:, ::2].to(device)
    elif case.heads_kv:
        named["heads_kv"] = heads_kv
    storage, out = _surrounded(spec, written_shape(spec, shape), device)
    return QuantizeInputs(given, named, out, storage)


def written_shape(spec: Quantize, shape: tuple[int, ...]) -> tuple[int, ...]:
    """That of the output for this x: where keys are permuted, it has whole units of rows."""
    batch, seq, *others = shape
    return batch, whole_units(seq) if spec.problem.permute_keys else seq, *others


def rows_in_order(spec: Quantize, out: torch.Tensor, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of an output (batch, seq_out, heads, d) the rows of x in order, and what stands for rows that x has not."""
    return keys_in_order(out, seq) if spec.problem.permute_keys else (out[:, :seq], out[:, seq:])


def _values(case: QuantizeCase, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if case.distribution == "ties":
        return torch.randint(*TIES, shape, generator=generator) / 128
    values = torch.randn(shape, generator=generator)
    values *= torch.exp(SPREAD * torch.randn(shape[:-1], generator=generator))[..., None]
    if case.distribution == "outliers":
        values[0, case.seq // 2, :, 5] = OUTLIER
    if case.distribution == "zeros":
        values[:, ::2] = 0
        values[:, :, -2:] = 0
    if case.distribution == "small":
        values *= SMALL
    return values


def _placed(values: torch.Tensor, layout: Layout, device: torch.device) -> torch.Tensor:
    """The values where this layout has them, NaN around them."""
    if layout == "contiguous":
        return values.to(device)
    if layout == "fused":  # the second of three heads side by side
        batch, seq, heads, d = values.shape
        fused = torch.full((batch, seq, 3 * heads, d), math.nan, dtype=values.dtype, device=device)
        fused[:, :, heads : 2 * heads] = values.to(device)
        return fused[:, :, heads : 2 * heads]
    order = (0, 2, 1, 3) if layout == "by_head" else (0, 1, 2, 3)
    turned = values.permute(order)
    guards = (GUARD, GUARD, GUARD, ROW_GUARD)
    sizes = [size + 2 * guard for size, guard in zip(turned.shape, guards, strict=True)]
    storage = torch.full(sizes, math.nan, dtype=values.dtype, device=device)
    inside = tuple(slice(guard, guard + size) for size, guard in zip(turned.shape, guards, strict=True))
    storage[inside] = turned.to(device)
    return storage[inside].permute(order)


def _surrounded(spec: Quantize, shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned buffer, and where the output goes in its middle."""
    tensor = operation_of(spec).output
    order = [axis for axis in range(len(shape)) if axis != tensor.contiguous] + [tensor.contiguous]
    guards = [GUARD] * (len(shape) - 1) + [ROW_GUARD]
    sizes = [shape[axis] + 2 * guard for axis, guard in zip(order, guards, strict=True)]
    sizes[-1] = -(-sizes[-1] // ROW_GUARD) * ROW_GUARD  # columns begin aligned
    storage = poison(torch.empty(sizes, dtype=spec.out_element.in_torch(), device=device))
    inside = tuple(slice(guard, guard + shape[axis]) for axis, guard in zip(order, guards, strict=True))
    back = [order.index(axis) for axis in range(len(shape))]
    return storage, storage[inside].permute(back)
