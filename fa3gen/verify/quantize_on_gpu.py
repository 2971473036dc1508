"""Run a generated quantisation on a GPU against float64; `fa3gen.verify.quantize_on_cpu` does so on the CPU model.

With u = 2^-24, half a unit of float32, d = head_dim and y what is rounded, x or its rotation: an element of a rotation
is off by e = u (log2(d) + 2) sum(|x|) / sqrt(d), sum over its row: d^-1/2 is rounded, its product with x is, and so is
each of log2(d) sums, none of which is larger than that. Of x itself e is 0. So

    descale, where it is found, is off by (max(e) + 2 u max(|y|)) / 448, which two roundings of a product add to

(max(|y|) of what shares the scale), and is 2^-100 at least. The output is a number of e4m3 between those nearest to
y / descale - t and y / descale + t, ties to even and no further than 448, with

    t = e / descale + 2.01 u |y / descale|

by the descale that the module gave: 1 / descale is rounded, and a product with it; where descale is a power of two
neither is, and t is e / descale. Where keys are permuted, this is asked of the rows in order, and what stands behind
the last one is 0. Besides: nothing written outside `out`, inputs unchanged, every launch bitwise like the first. What
is called O here is output times descale, beside y; PyTorch's own error is that of rounding y / descale.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fa3gen.design.operation import operation_of
from fa3gen.spec.model import Quantize
from fa3gen.verify import quantize_inputs, reference
from fa3gen.verify.inputs import poison, untouched
from fa3gen.verify.quantize_inputs import QuantizeCase, QuantizeInputs
from fa3gen.verify.results import CaseResult
from fa3gen.verify.runner import (
    LAUNCHES,
    ModuleRunner,
    changed_inputs,
    errors,
    essence,
    half_ulp,
    raise_if_lost,
    same_bits,
    snapshots,
)

ROUNDOFF = 2.0**-24
LARGEST = 448.0  # of e4m3
SMALLEST = 2.0**-100  # descale


class Quantized(NamedTuple):
    """What a call returns."""

    out: torch.Tensor
    descale: torch.Tensor


@dataclass(frozen=True)
class Expected:
    """In float64: what is rounded, (batch, seq, heads, d), and how far it may be off; the same of scales."""

    y: torch.Tensor
    e: torch.Tensor
    descale: torch.Tensor
    descale_limit: torch.Tensor


def expected(spec: Quantize, made: QuantizeInputs) -> Expected:
    """The criteria of this module's docstring."""
    x = made.given["x"].double()
    y, e = x, torch.zeros_like(x)
    if spec.problem.rotate:
        size = spec.problem.head_dim
        y = reference.rotate(x, made.given["signs"])
        e = (ROUNDOFF * (math.log2(size) + 2) / math.sqrt(size) * x.abs().sum(-1, keepdim=True)).expand(x.shape)
    if "descale" in made.named:
        descale = made.named["descale"].double()
        return Expected(y, e, descale, torch.zeros_like(descale))
    heads_kv = made.named.get("heads_kv", x.shape[2])
    largest, most = (_largest(spec, each, heads_kv) for each in (y.abs(), e))
    descale = (largest / LARGEST).clamp(min=SMALLEST)
    return Expected(y, e, descale, (most + 2 * ROUNDOFF * largest) / LARGEST)


def _largest(spec: Quantize, x: torch.Tensor, heads_kv: int) -> torch.Tensor:
    """The largest x of what shares a scale: (batch, heads_kv), (batch, heads, blocks) or (batch, heads, seq)."""
    of_rows = x.amax(-1).transpose(1, 2)  # (batch, heads, seq)
    batch, heads, seq = of_rows.shape
    if spec.problem.scale == "head":
        return of_rows.reshape(batch, heads_kv, -1).amax(2)
    if spec.problem.scale == "block":
        blocks = -(-seq // spec.tile.rows)
        padded = torch.nn.functional.pad(of_rows, (0, blocks * spec.tile.rows - seq))
        return padded.reshape(batch, heads, blocks, spec.tile.rows).amax(3)
    return of_rows


def of_elements(spec: Quantize, descale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scale of each element, in float64: (batch, seq, heads, 1)."""
    _, seq, heads, _ = shape
    descale = descale.double()
    if spec.problem.scale == "head":
        return descale.repeat_interleave(heads // descale.shape[1], 1)[:, None, :, None]
    if spec.problem.scale == "block":
        descale = descale.repeat_interleave(spec.tile.rows, 2)[:, :, :seq]
    return descale.transpose(1, 2)[..., None]


class QuantizeRunner(ModuleRunner):
    """One quantisation on one device: calls it, measures it, checks it."""

    def __init__(self, module: Any, spec: Quantize, device: torch.device, seed: int) -> None:
        """`seed` decides all inputs."""
        super().__init__(module, operation_of(spec), device, seed)
        self.spec = spec

    def run_case(self, case: QuantizeCase) -> Any:
        """Launch a few times on fresh poison, compare the first with the reference and the others with the first.

        Returns a CaseResult; its `o_block_ratio` is that of the worst element: half the distance of numbers, and t.
        """
        made = self._make(case)
        wanted = expected(self.spec, made)
        try:
            first, failures = self._launch_all(made)
        except Exception as error:  # whatever a module raises is that module's failure
            raise_if_lost(self.device, error)
            return CaseResult(case.name, case.shape, None, None, None, None, None, None, (f"raised {essence(error)}",))
        judged = compare(self.spec, first, wanted)
        return CaseResult(
            name=case.name,
            shape=case.shape,
            o_error=judged.error,
            o_yardstick=judged.yardstick,
            o_max_abs_limit=None,
            o_block_ratio=judged.used,
            lse_error=None,
            lse_yardstick=None,
            failures=(*failures, *judged.wrong),
        )

    def _make(self, case: QuantizeCase) -> QuantizeInputs:
        return quantize_inputs.make(self.spec, case, device=self.device, seed=self.seed)

    def _launch_all(self, made: QuantizeInputs) -> tuple[Quantized, tuple[str, ...]]:
        failures: list[str] = []
        tensors = all_given(made)
        before = snapshots(tensors)
        first: Quantized | None = None
        for launch in range(LAUNCHES):
            found = self._call(made)
            if first is None:
                first = found
                failures += wrote_outside(made)
            elif not all(map(same_bits, found, first)):
                failures.append(f"launch {launch + 1} differs from the first on the same inputs")
                break
        assert first is not None
        return first, (*failures, *changed_inputs(tensors, before))

    def _call(self, made: QuantizeInputs) -> Quantized:
        """Call with `out` given, poisoned; returns copies of what it gives."""
        poison(made.out_storage)
        out, descale = self.entry(*made.given.values(), **made.named, out=made.out)
        self._same_out(out, made.out)
        return Quantized(made.out.clone(), descale.clone())

    # -- checks

    def _tries(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("allocates its output when not given one", self._allocates_out),
            ("nothing to quantise", self._nothing),
            ("NaN stays", self._keeps_nan),
            ("bad arguments are refused", self._refuses),
        ]

    def _small(self, batch: int = 2, seq: int = 5, heads: int = 2) -> QuantizeInputs:
        return self._make(QuantizeCase("checks", "inputs of the checks", batch, seq, heads))

    def _wrong(self, made: QuantizeInputs, found: tuple[torch.Tensor, torch.Tensor]) -> str:
        return "; ".join(compare(self.spec, Quantized(*found), expected(self.spec, made)).wrong)

    def _allocates_out(self) -> str:
        made = self._small()
        out, descale = self.entry(*made.given.values())
        if (out.shape, out.dtype, out.device) != (made.out.shape, made.out.dtype, made.out.device):
            return f"out is {tuple(out.shape)} {out.dtype} {out.device}"
        wanted = self.operation.output.strides(out.shape)
        if out.stride() != wanted or not descale.is_contiguous():
            return f"out has strides {out.stride()} instead of {wanted}, descale {descale.stride()}"
        return self._wrong(made, (out, descale))

    def _nothing(self) -> str:
        """Without rows there is nothing to write, and scales, where there are any, are those of zeros."""
        made = self._small()
        x, *signs = made.given.values()
        out, descale = self.entry(x[:, :0], *signs)
        if out.shape != x[:, :0].shape or not descale.eq(SMALLEST).all():
            return f"without rows out is {tuple(out.shape)}, descale {descale.flatten()[:3].tolist()}"
        out, descale = self.entry(x[:0], *signs)
        return (
            "" if out.shape == made.out[:0].shape and descale.shape[0] == 0 else f"without sequences {tuple(out.shape)}"
        )

    def _keeps_nan(self) -> str:
        """A NaN is NaN in the output, with its row where that is rotated; other rows are what they are without it."""
        made = self._small()
        x, *signs = made.given.values()
        x = x.clone()
        x[1, 2, 1, 3] = math.nan
        out, _ = self.entry(x, *signs)
        out, _ = quantize_inputs.rows_in_order(self.spec, out.float(), x.shape[1])
        found, wanted = torch.isnan(out), torch.isnan(x.float())
        if self.spec.problem.rotate:
            wanted = wanted.any(-1, keepdim=True).expand(wanted.shape)
        return (
            "" if torch.equal(found, wanted) else f"{int(found.sum())} values are NaN, {int(wanted.sum())} have to be"
        )

    def _bad_calls(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        made = self._small()
        good: dict[str, Any] = {**made.given, "out": made.out}
        x, out = made.given["x"], made.out
        elsewhere = "cpu" if self.device.type == "cuda" else "meta"
        shifted = torch.zeros(x.numel() + 8, dtype=x.dtype, device=self.device)[1 : 1 + x.numel()].view(x.shape)
        yield "float32 x", "x", {**good, "x": x.float()}
        yield "x that is no tensor", "x", {**good, "x": [1.0]}
        yield "x with three modes", "x", {**good, "x": x[0]}
        yield "x of another head dim", "x", {**good, "x": torch.cat([x, x], -1)}
        yield "x with rows that are not contiguous", "x", {**good, "x": torch.stack([x, x], -1)[..., 0]}
        yield "x that starts off a 16-byte boundary", "x", {**good, "x": shifted}
        many = x[:1, :1, :1].expand(1 << 16, 1, 1, x.shape[-1])
        yield "65536 sequences", "x", {**good, "x": many, "out": None}
        yield "out of another shape", "out", {**good, "out": out[:, :-1]}
        yield "out of another dtype", "out", {**good, "out": out.to(torch.float8_e5m2)}
        yield f"out on {elsewhere}", "out", {**good, "out": torch.empty_like(out, device=elsewhere)}
        yield "out that repeats a sequence", "out", {**good, "out": out[:1].expand(out.shape)}
        turned = out.transpose(1, 3).contiguous().transpose(1, 3)
        if self.spec.problem.transpose:
            turned = out.contiguous()
        yield "out with another contiguous dimension", "out", {**good, "out": turned}
        if self.spec.problem.rotate:
            signs = made.given["signs"]
            yield "signs in float64", "signs", {**good, "signs": signs.double()}
            yield "fewer signs", "signs", {**good, "signs": signs[:-8]}
            yield "signs that are no tensor", "signs", {**good, "signs": 1.0}
        if self.spec.problem.scale == "head":
            scales = torch.ones(x.shape[0], x.shape[2], device=self.device)
            yield "scales in bfloat16", "descale", {**good, "descale": scales.bfloat16()}
            yield "scales of more heads", "descale", {**good, "descale": scales.repeat(1, 2)}
            yield "scales of fewer sequences", "descale", {**good, "descale": scales[1:]}
            yield "scales that are no tensor", "descale", {**good, "descale": 1.0}
            yield "three heads of k for two", "heads_kv", {**good, "heads_kv": 3}
            yield "no heads of k", "heads_kv", {**good, "heads_kv": 0}
            yield "scales of two heads, and one head", "heads_kv", {**good, "descale": scales, "heads_kv": 1}

    def _current_stream(self) -> str:
        """Fill x late on a side stream; a kernel on any other stream would read what was there before."""
        made = self._small()
        x, *signs = made.given.values()
        late = torch.full(x.shape, math.nan, dtype=x.dtype, device=self.device)
        torch.cuda.synchronize(self.device)
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]  # cycles: about 20 ms
            late.copy_(x)
            out, found = self.entry(late, *signs, out=made.out)
            copies = out.clone(), found.clone()
        side.synchronize()
        return self._wrong(made, copies)

    def _call_given_out(self) -> tuple[Callable[[], Any], int]:
        """Scales, and where they are found the maxima of at most two tiles of each head, in units of the allocator."""
        made = self._small()
        x = made.given["x"]
        scales = x.shape[0] * x.shape[2] * {"head": 1, "block": 1, "token": x.shape[1]}[self.spec.problem.scale]
        unit = 512  # bytes that torch's allocator rounds up to
        each = -(-scales * 4 // unit) * unit
        return functools.partial(self.entry, *made.given.values(), out=made.out), 2 * each


@dataclass(frozen=True)
class Judged:
    """Errors of output times descale, and of the nearest numbers times it; the largest share used of a rounding.

    `used` is None for output with NaN.
    """

    error: Any
    yardstick: Any
    used: float | None
    wrong: tuple[str, ...]


def compare(spec: Quantize, found: Quantized, wanted: Expected) -> Judged:
    """What is wrong with a result, and how far it is off."""
    wrong: list[str] = []
    if found.descale.shape != wanted.descale.shape:
        text = f"descale is {tuple(found.descale.shape)}, and has to be {tuple(wanted.descale.shape)}"
        return Judged(None, None, None, (text,))
    off = (found.descale.double() - wanted.descale).abs()
    if not (off <= wanted.descale_limit).all():  # NaN is not
        worst = (off / wanted.descale).nan_to_num(nan=math.inf).max().item()
        wrong.append(f"descale is off by up to {worst:.3g} of itself; {int((off <= wanted.descale_limit).sum())} of "
                     f"{off.numel()} are within their limits")  # fmt: skip
    scale = of_elements(spec, found.descale, wanted.y.shape)
    scaled = wanted.y / scale
    power = torch.frexp(scale).mantissa == 0.5
    t = wanted.e / scale + torch.where(power, 0, 2.01 * ROUNDOFF * scaled.abs())
    low, nearest, high = (reference.round_e4m3(each) for each in (scaled - t, scaled, scaled + t))
    out, behind = quantize_inputs.rows_in_order(spec, found.out.double(), wanted.y.shape[1])
    if not (behind == 0).all():
        wrong.append(f"out has numbers other than 0 behind the last row, such as {behind[behind != 0][0].item():.6g}")
    right = (low <= out) & (out <= high)  # of NaN neither
    if not right.all():
        count = int((~right).sum())
        place = tuple(int(index) for index in torch.nonzero(~right)[0])
        wrong.append(
            f"out is wrong in {count} of {out.numel()} elements; at {place} it is {out[place].item():.6g}, and "
            f"{scaled[place].item():.6g} is to be rounded"
        )
    kept = scaled.clamp(-LARGEST, LARGEST)
    used = ((out - kept).abs() / (half_ulp(kept.abs() + t, found.out.dtype) + t)).max().item()
    return Judged(
        error=errors(out * scale, wanted.y),
        yardstick=errors(nearest * scale, wanted.y),
        used=used if math.isfinite(used) else None,
        wrong=tuple(wrong),
    )


def all_given(made: QuantizeInputs) -> dict[str, torch.Tensor]:
    """All tensors that a call is given and does not write to, by name."""
    return {**made.given, **{name: each for name, each in made.named.items() if isinstance(each, torch.Tensor)}}


def wrote_outside(made: QuantizeInputs) -> tuple[str, ...]:
    """What is wrong when the poison around `out` is gone."""
    return () if untouched(made.out_storage, [made.out]) else ("wrote outside `out`",)
