"""Run a generated GEMM on a GPU against float64; `fa3gen.verify.gemm_on_cpu` does the same on the CPU model of sm_90a.

Products of 16-bit numbers are exact in float32 (8 + 8 bits of bfloat16, 11 + 11 of float16), so only sums are rounded,
and D at last. With S = sum |a| |b| + |c| for an element of D, no partial sum is larger than S, and

    e     = roundings x 2^-23 x S          roundings: of its sum, see below
    limit = e + half an ulp of the output dtype at |ref| + e, for 16 bits; e for float32

A scalar product rounds once for each of k multiply-adds. A WGMMA instruction adds as many products as it is deep to the
accumulator; what it cuts off of each addend is below 2^-23 of the largest of them (a unit in the last place, since the
tensor core truncates), so it counts as one rounding more than it has addends. Adding C is another one. In the case
"integers" float32 holds every sum exactly, so that e = 0: D has to be the float64 result, rounded once.

Of products of 8-bit numbers the tensor core keeps 13 bits below the largest addend, and of their sum
(`fa3gen.cpu.tensor_core`). S times that would allow anything, so e follows the float64 sum from instruction to
instruction, see `cut_off`; the steps of two levels are added as float32 numbers.

On a GPU, PyTorch's own error on the same inputs stands beside the module's. Besides: no NaN, nothing written outside
`out`, inputs unchanged, every launch bitwise like the first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fa3gen.design import gemm
from fa3gen.design.operation import operation_of
from fa3gen.hardware import hopper
from fa3gen.spec.model import Gemm, WgmmaProduct
from fa3gen.verify import gemm_inputs, reference
from fa3gen.verify.gemm_inputs import GemmCase, GemmInputs
from fa3gen.verify.inputs import poison, untouched
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

ROUNDOFF = 2.0**-23  # of a sum that is cut off, not rounded
KEPT_8BIT = 2.0**-13  # of the largest addend: what lies below is cut off of each
SMALLEST_8BIT = 2.0**-6  # subnormal numbers are lined up as if they were as large as this one


@dataclass(frozen=True)
class Expected:
    """D in float64, how far each element may be off, and the mean square of its error when roundings are random."""

    out: torch.Tensor
    limit: torch.Tensor
    variance: torch.Tensor


def expected(spec: Gemm, made: GemmInputs, exact: bool = False) -> Expected:
    """The criteria of this module's docstring; `exact`: every sum is one that float32 holds."""
    a, b, c = (None if x is None else x.double() for x in (made.given["a"], made.given["b"], made.c))
    assert a is not None and b is not None
    out, k = reference.matmul(a, b, c), a.shape[1]
    sizes = reference.matmul(a.abs(), b.abs(), None if c is None else c.abs())
    squares = reference.matmul(a.square(), b.square(), None if c is None else c.square())
    e = ROUNDOFF * _roundings(spec, k) * sizes
    variance = (ROUNDOFF**2 * max(1, k) / 3) * squares
    if spec.element.bytes < hopper.BYTES_16BIT:
        lost, its_variance = cut_off(spec, a, b)
        e, variance = e + lost, variance + its_variance
    e = torch.zeros_like(e) if exact else e
    limit = e
    if spec.d_element.bytes == hopper.BYTES_16BIT:  # rounded at last
        dtype = spec.d_element.in_torch()
        limit = limit + half_ulp(out.abs() + e, dtype)
        variance = variance + half_ulp(out, dtype).square() / 3
    return Expected(out, limit, variance)


def cut_off(spec: Gemm, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(at most, mean square) of what the tensor core cuts off of products of 8-bit numbers; a and b in float64.

    Each instruction cuts off less than a unit of each of its products and of the sum so far, where a unit is KEPT_8BIT
    of the largest of them, and of their sum. Sums begin anew with each step where threads add the steps.
    """
    k, depth = a.shape[1], spec.element.wgmma_k
    most, variance = (torch.zeros((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device) for _ in range(2))
    total, off = torch.zeros_like(most), torch.zeros_like(most)
    for first in range(0, k, depth):
        if gemm.two_levels(spec) and first % spec.tile.k == 0:
            total, off = torch.zeros_like(most), torch.zeros_like(most)
        rows, columns = a[:, first : first + depth], b[first : first + depth]
        sizes = (x.abs().amax(mode).clamp(min=SMALLEST_8BIT) for x, mode in ((rows, 1), (columns, 0)))
        before, total = total.abs(), total + rows @ columns
        unit = KEPT_8BIT * (torch.maximum(torch.maximum(before, total.abs()), torch.outer(*sizes)) + off)
        cut = rows.shape[1] + 2
        off = off + cut * unit
        most, variance = most + cut * unit, variance + cut * unit.square() / 3
    return most, variance


def _roundings(spec: Gemm, k: int) -> int:
    if not isinstance(spec.product, WgmmaProduct):
        return k + spec.d.add_c
    depth = spec.element.wgmma_k
    return -(-k // depth) * (depth + 1) + spec.d.add_c


class GemmRunner(ModuleRunner):
    """One GEMM module on one device: calls it, measures it, checks it."""

    def __init__(self, module: Any, spec: Gemm, device: torch.device, seed: int) -> None:
        """`seed` decides all inputs."""
        super().__init__(module, operation_of(spec), device, seed)
        self.spec = spec
        self.dtype, self.out_dtype = (self.operation.tensor(name).dtype.in_torch() for name in ("a", "out"))

    def run_case(self, case: GemmCase) -> Any:
        """Launch a few times on fresh poison, compare the first with the reference and the others with the first.

        Returns a CaseResult; its `o_block_ratio` is that of the worst element.
        """
        made = self._make(case)
        wanted = expected(self.spec, made, case.distribution == "integers")
        try:
            first, failures = self._launch_all(made)
        except Exception as error:  # whatever a module raises is that module's failure
            raise_if_lost(self.device, error)
            return nothing_measured(case, f"raised {essence(error)}")
        worst, wrong = compare(first, wanted)
        torch_error = errors(self._torch(made), wanted.out)
        limit = wanted.limit.max().item()
        return CaseResult(
            name=case.name,
            shape=case.shape,
            o_error=errors(first, wanted.out),
            o_yardstick=torch_error,
            o_max_abs_limit=limit,
            o_block_ratio=worst,
            lse_error=None,
            lse_yardstick=None,
            failures=(*failures, *wrong),
        )

    def _make(self, case: GemmCase) -> GemmInputs:
        return gemm_inputs.make(self.spec, case, device=self.device, seed=self.seed)

    def _torch(self, made: GemmInputs) -> torch.Tensor:
        """What PyTorch makes of the same inputs in the same dtypes."""
        a, b = (made.given[name].to(self.out_dtype) for name in ("a", "b"))
        return a @ b if made.c is None else a @ b + made.c

    def _launch_all(self, made: GemmInputs) -> tuple[torch.Tensor, tuple[str, ...]]:
        failures: list[str] = []
        before = snapshots(made.given)
        first: torch.Tensor | None = None
        for launch in range(LAUNCHES):
            out = self._call(made)
            if first is None:
                first = out
                failures += wrote_outside(made)
            elif not same_bits(out, first):
                failures.append(f"launch {launch + 1} differs from the first on the same inputs")
                break
        assert first is not None
        return first, (*failures, *changed_inputs(made.given, before))

    def _call(self, made: GemmInputs) -> torch.Tensor:
        """Call with `out` given, poisoned; returns a copy of it."""
        poison(made.out_storage)
        returned = self.entry(*made.given.values(), out=made.out)
        self._same_out(returned, made.out)
        return made.out.clone()

    # -- checks

    def _tries(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("allocates D when not given one", self._allocates_out),
            ("empty matrices", self._empty),
            ("bad arguments are refused", self._refuses),
        ]

    def _small(self, m: int = 40, n: int = 72, k: int = 24) -> GemmInputs:
        return self._make(GemmCase("checks", "inputs of the checks", m, n, k))

    def _wrong(self, made: GemmInputs, out: torch.Tensor) -> str:
        return "; ".join(compare(out, expected(self.spec, made))[1])

    def _allocates_out(self) -> str:
        made = self._small(5, 11, 3)
        out = self.entry(*made.given.values())
        if not isinstance(out, torch.Tensor):
            return f"it should return a tensor, not {type(out).__name__}"
        if (out.shape, out.dtype, out.device) != (made.out.shape, self.out_dtype, made.out.device):
            wanted = f"{tuple(made.out.shape)} {self.out_dtype} on a's device"
            return f"D is {tuple(out.shape)} {out.dtype} {out.device} instead of {wanted}"
        return self._wrong(made, out)

    def _empty(self) -> str:
        """Without rows or columns there is nothing to write; a sum of nothing is 0, or C."""
        for m, n, k in ((0, 8, 8), (8, 0, 8), (8, 8, 0)):
            made = self._small(m, n, k)
            out = self.entry(*made.given.values())
            wanted = torch.zeros_like(made.out) if made.c is None else made.c
            if out.shape != (m, n) or not torch.equal(out, wanted):
                return f"of sizes {m} x {n} x {k} D is {tuple(out.shape)}, {out.flatten()[:3].tolist()}..."
        return ""

    def _bad_calls(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        made = self._small()
        good: dict[str, Any] = dict(made.given)
        a, b = good["a"], good["b"]
        elsewhere = "cpu" if self.device.type == "cuda" else "meta"
        other = torch.float16 if self.dtype == torch.bfloat16 else torch.bfloat16
        yield "float32 a", "a", {**good, "a": a.float()}
        yield f"{other} b", "b", {**good, "b": b.to(other)}
        yield f"b on {elsewhere}", "b", {**good, "b": b.to(elsewhere)}
        yield "a that is not a tensor", "a", {**good, "a": [1.0]}
        yield "a with three modes", "a", {**good, "a": a[None]}
        yield "half of k in b", "[ab]", {**good, "b": b[: b.shape[0] // 2]}
        yield "a contiguous along its other dimension", "a", {**good, "a": _turned(a)}
        yield "b contiguous along its other dimension", "b", {**good, "b": _turned(b)}
        yield "a that starts off a 16-byte boundary", "a", {**good, "a": _shifted(a)}
        yield "b whose other stride is no multiple of 16 bytes", "b", {**good, "b": _odd(b)}
        yield "out of another shape", "out", {**good, "out": torch.empty_like(made.out)[:, :-1]}
        wrong = torch.float32 if self.out_dtype == self.dtype else self.dtype
        yield "out of another dtype", "out", {**good, "out": torch.empty_like(made.out, dtype=wrong)}
        yield "out whose rows are one row", "out", {**good, "out": made.out[:1].expand(made.out.shape)}
        if made.c is not None:
            yield "c of another shape", "c", {**good, "c": made.c[:-1]}
            yield "c of another dtype", "c", {**good, "c": made.c.to(wrong)}

    def _current_stream(self) -> str:
        """Fill a late on a side stream; a kernel on any other stream would read what was there before."""
        made = self._small()
        a, strides = made.given["a"], self.operation.tensor("a").strides(made.given["a"].shape)
        late = torch.empty_strided(a.shape, strides, dtype=a.dtype, device=self.device).fill_(math.nan)
        torch.cuda.synchronize(self.device)
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]  # cycles: about 20 ms
            late.copy_(a)
            self.entry(*{**made.given, "a": late}.values(), out=made.out)
            copy = made.out.clone()
        side.synchronize()
        return self._wrong(made, copy)

    def _call_given_out(self) -> tuple[Callable[[], Any], int]:
        made = self._small()
        return functools.partial(self.entry, *made.given.values(), out=made.out), 0


def compare(out: torch.Tensor, wanted: Expected) -> tuple[float | None, tuple[str, ...]]:
    """The largest error over its limit, None where D is not finite, and what is wrong."""
    if not torch.isfinite(out).all():
        wrong = int((~torch.isfinite(out)).sum())
        return None, (f"D has NaN or infinity in {wrong} of {out.numel()} elements (written nowhere, or computed so)",)
    error = (out.double() - wanted.out).abs()
    used = torch.where(error == 0, 0.0, error / wanted.limit)
    worst = used.max().item()
    if worst <= 1:
        return worst, ()
    row, column = (int(index) for index in torch.unravel_index(used.argmax(), used.shape))
    count = int((used > 1).sum())
    text = f"D is off by {worst:.3g} times what is allowed at row {row}, column {column}; {count} of {used.numel()} are"
    return worst, (text,)


def nothing_measured(case: GemmCase, failure: str) -> CaseResult:
    """The result of a case whose launch failed."""
    return CaseResult(
        name=case.name,
        shape=case.shape,
        o_error=None,
        o_yardstick=None,
        o_max_abs_limit=None,
        o_block_ratio=None,
        lse_error=None,
        lse_yardstick=None,
        failures=(failure,),
    )


def wrote_outside(made: GemmInputs) -> tuple[str, ...]:
    """What is wrong when the poison around `out` is gone."""
    return () if untouched(made.out_storage, [made.out]) else ("wrote outside `out`",)


def _turned(x: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous along the other dimension."""
    return x.t().contiguous().t() if x.stride(1) == 1 else x.contiguous()


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """The same layout, two bytes further on."""
    flat = torch.zeros(x.numel() + 8, dtype=x.dtype, device=x.device)[1:]
    rows, columns = x.shape
    return flat.as_strided((rows, columns), (columns, 1) if x.stride(1) == 1 else (1, rows))


def _odd(x: torch.Tensor) -> torch.Tensor:
    """The same, with a stride of four elements more than a multiple of eight."""
    rows, columns = x.shape
    strides = (columns + 4, 1) if x.stride(1) == 1 else (1, rows + 4)
    return torch.zeros((max(x.shape) + 4) ** 2, dtype=x.dtype, device=x.device).as_strided((rows, columns), strides)
