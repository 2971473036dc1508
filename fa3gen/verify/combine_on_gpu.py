"""Run a generated merge on a GPU against float64; `fa3gen.verify.combine_on_cpu` does the same on the CPU model.

With u = 2^-24, half a unit of float32, the weight exp(LSE_i - LSE) of a part is off, of itself, by

    u (5 steps + 3 |LSE_i - largest| + 8)

steps: of a thread, as many as its parts take, and one for merging shares. In each, all sums are brought to a new
largest LSE: an ex2 of two units (PTX ISA, "ex2") and a product. Differences of LSE, times log2(e), are rounded three
times, and rescaling in steps splits them up. Adding up parts rounds once for each of them. So with A = sum of
|weight O_i|, B = sum of |weight O_i| |LSE_i - largest|, and C the same of weights alone, an element of O is off by

    e = u ((5 steps + parts + 8) (A + |O|) + 3 B + 3 C |O|) + 2^-120

and by half a unit of the dtype of O at |O| + e, where that has 16 bits. LSE is off by

    u (5 steps + parts + 16 + 3 C + 2 (|LSE| + |largest|))

for a log2 of one part in 2^22 (PTX ISA, "lg2"), a product, and a sum. Rows without a key have to be 0 and -inf.
Besides: nothing written outside `out`, inputs unchanged, every launch bitwise like the first. PyTorch's own error in
float32, rounded like O, stands beside the module's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fa3gen.design.combining import COLUMNS
from fa3gen.design.operation import operation_of
from fa3gen.hardware import hopper
from fa3gen.spec.model import Combine
from fa3gen.verify import combine_inputs, reference
from fa3gen.verify.combine_inputs import CombineCase, CombineInputs
from fa3gen.verify.inputs import poison, untouched
from fa3gen.verify.reference import Attention
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
SMALLEST = 2.0**-120  # weights below 2^-126 are 0


@dataclass(frozen=True)
class Expected:
    """O and LSE in float64, and how far each element may be off."""

    out: torch.Tensor
    lse: torch.Tensor
    out_limit: torch.Tensor
    lse_limit: torch.Tensor


def expected(spec: Combine, made: CombineInputs) -> Expected:
    """The criteria of this module's docstring."""
    values, lses = (made.given[name].double() for name in ("out_partial", "lse_partial"))
    out, lse = reference.combine(values, lses)
    has_key = ~torch.isneginf(lses)
    steps, parts = -(-lses.shape[0] // spec.parts.at_once) + 1, lses.shape[0]
    weights = torch.where(has_key, torch.exp(lses - lse.masked_fill(torch.isneginf(lse), 0)), 0)
    largest = lses.amax(0)
    far = torch.where(has_key, largest - lses, 0)
    sizes = torch.where(has_key[..., None], weights[..., None] * values.abs(), 0)
    a, b, c = sizes.sum(0), (sizes * far[..., None]).sum(0), (weights * far).sum(0)
    e = ROUNDOFF * ((5 * steps + parts + 8) * (a + out.abs()) + 3 * b + 3 * c[..., None] * out.abs())
    limit = e + SMALLEST * a.gt(0)
    if spec.element.bytes == hopper.BYTES_16BIT:  # rounded at last
        limit = limit + half_ulp(out.abs() + e, spec.element.in_torch())
    lse_limit = ROUNDOFF * (5 * steps + parts + 16 + 3 * c + 2 * (lse.abs() + largest.abs()))
    return Expected(out, lse, limit, lse_limit)


class CombineRunner(ModuleRunner):
    """One merge on one device: calls it, measures it, checks it."""

    def __init__(self, module: Any, spec: Combine, device: torch.device, seed: int) -> None:
        """`seed` decides all inputs."""
        super().__init__(module, operation_of(spec), device, seed)
        self.spec, self.dtype = spec, spec.element.in_torch()

    def run_case(self, case: CombineCase) -> Any:
        """Launch a few times on fresh poison, compare the first with the reference and the others with the first.

        Returns a CaseResult; its `o_block_ratio` is that of the worst element.
        """
        made = self._make(case)
        wanted = expected(self.spec, made)
        try:
            first, failures = self._launch_all(made)
        except Exception as error:  # whatever a module raises is that module's failure
            raise_if_lost(self.device, error)
            return CaseResult(case.name, case.shape, None, None, None, None, None, None, (f"raised {essence(error)}",))
        worst, wrong = compare(first, wanted)
        torchs = reference.combine(*made.given.values())
        return CaseResult(
            name=case.name,
            shape=case.shape,
            o_error=errors(first.out, wanted.out),
            o_yardstick=errors(torchs.out.to(self.dtype), wanted.out),
            o_max_abs_limit=wanted.out_limit.max().item(),
            o_block_ratio=worst,
            lse_error=errors(first.lse, wanted.lse),
            lse_yardstick=errors(torchs.lse, wanted.lse),
            failures=(*failures, *wrong),
        )

    def _make(self, case: CombineCase) -> CombineInputs:
        return combine_inputs.make(self.spec, case, device=self.device, seed=self.seed)

    def _launch_all(self, made: CombineInputs) -> tuple[Attention, tuple[str, ...]]:
        failures: list[str] = []
        before = snapshots(made.given)
        first: Attention | None = None
        for launch in range(LAUNCHES):
            found = self._call(made)
            if first is None:
                first = found
                failures += wrote_outside(made)
            elif not all(map(same_bits, found, first)):
                failures.append(f"launch {launch + 1} differs from the first on the same inputs")
                break
        assert first is not None
        return first, (*failures, *changed_inputs(made.given, before))

    def _call(self, made: CombineInputs) -> Attention:
        """Call with `out` given, poisoned; returns copies of O and LSE."""
        poison(made.out_storage)
        out, lse = self.entry(*made.given.values(), out=made.out)
        self._same_out(out, made.out)
        return Attention(made.out.clone(), lse.clone())

    # -- checks

    def _tries(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("allocates O when not given one", self._allocates_out),
            ("packed sequences", self._packed),
            ("nothing to merge", self._nothing),
            ("bad arguments are refused", self._refuses),
        ]

    def _small(self, parts: int = 3, batch: int = 2, seq: int = 3, heads: int = 4) -> CombineInputs:
        return self._make(CombineCase("checks", "inputs of the checks", parts, batch, seq, heads, 64))

    def _wrong(self, made: CombineInputs, found: tuple[torch.Tensor, torch.Tensor]) -> str:
        return "; ".join(compare(Attention(*found), expected(self.spec, made))[1])

    def _allocates_out(self) -> str:
        made = self._small()
        out, lse = self.entry(*made.given.values())
        if (out.shape, out.dtype, out.device) != (made.out.shape, self.dtype, made.out.device):
            return f"O is {tuple(out.shape)} {out.dtype} {out.device}"
        if not out.is_contiguous() or not lse.transpose(1, 2).is_contiguous():
            return f"O has strides {out.stride()}, LSE {lse.stride()}"
        return self._wrong(made, (out, lse))

    def _packed(self) -> str:
        """Sequences one behind the other are merged as a batch of one is."""
        made = self._small(5, 1, 7)
        given = [x[:, 0] for x in made.given.values()]
        into = made.out[0]
        for out, lse in (self.entry(*given), self.entry(*given, out=into)):
            if out.shape != into.shape or lse.shape != into.shape[:-1]:
                return f"O is {tuple(out.shape)}, LSE {tuple(lse.shape)}"
            if wrong := self._wrong(made, (out[None], lse[None])):
                return wrong
        return "" if out.data_ptr() == into.data_ptr() else "the tensor returned is not the `out` that was given"

    def _nothing(self) -> str:
        """No parts leave O = 0 and LSE = -inf; without rows there is nothing."""
        made = self._small()
        out, lse = self.entry(*(x[:0] for x in made.given.values()))
        if out.shape != made.out.shape or not out.eq(0).all() or not torch.isneginf(lse).all():
            return f"without parts O is {out.flatten()[:3].tolist()}, LSE {lse.flatten()[:3].tolist()}"
        out, lse = self.entry(*(x[:, :, :0] for x in made.given.values()))
        wanted = (2, 0, 4, 64)
        return "" if out.shape == wanted and lse.shape == wanted[:-1] else f"without rows O is {tuple(out.shape)}"

    def _bad_calls(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        made = self._small()
        good: dict[str, Any] = {**made.given, "out": made.out}
        values, lse = made.given.values()
        elsewhere = "cpu" if self.device.type == "cuda" else "meta"
        other = torch.float16 if self.dtype == torch.bfloat16 else torch.bfloat16
        shifted = torch.zeros(values.numel() + 4, device=self.device)[1 : 1 + values.numel()].view(values.shape)
        yield "bfloat16 parts", "out_partial", {**good, "out_partial": values.bfloat16()}
        yield "float64 LSE", "lse_partial", {**good, "lse_partial": lse.double()}
        yield f"lse_partial on {elsewhere}", "lse_partial", {**good, "lse_partial": lse.to(elsewhere)}
        yield "parts that are no tensor", "out_partial", {**good, "out_partial": [1.0]}
        yield "LSE that is no tensor", "lse_partial", {**good, "lse_partial": 1.0}
        yield "parts with three modes", "out_partial", {**good, "out_partial": values[0, 0]}
        yield "LSE of fewer parts", "lse_partial", {**good, "lse_partial": lse[1:]}
        yield "LSE with seq and heads in another order", "lse_partial", {**good, "lse_partial": lse.mT}
        yield "rows that are not contiguous", "out_partial", {**good, "out_partial": values[..., ::2], "out": None}
        yield "parts that start off a 16-byte boundary", "out_partial", {**good, "out_partial": shifted}
        yield f"{COLUMNS + 4} columns", "out_partial", {**good, "out_partial": values[..., : COLUMNS + 4], "out": None}
        yield "out of another shape", "out", {**good, "out": made.out[:, :-1]}
        yield "out of another dtype", "out", {**good, "out": made.out.to(other)}
        yield "out that repeats a row", "out", {**good, "out": made.out[:, :1].expand(made.out.shape)}

    def _current_stream(self) -> str:
        """Fill the parts late on a side stream; a kernel on any other stream would read what was there before."""
        made = self._small()
        values, lse = made.given.values()
        late = torch.full(values.shape, math.nan, device=self.device)
        torch.cuda.synchronize(self.device)
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]  # cycles: about 20 ms
            late.copy_(values)
            out, found = self.entry(late, lse, out=made.out)
            copies = out.clone(), found.clone()
        side.synchronize()
        return self._wrong(made, copies)

    def _call_given_out(self) -> tuple[Callable[[], Any], int]:
        made = self._small()
        lse_bytes = -(-made.given["lse_partial"][0].numel() * 4 // 512) * 512  # in torch's allocator, which rounds up
        return functools.partial(self.entry, *made.given.values(), out=made.out), lse_bytes


def compare(found: Attention, wanted: Expected) -> tuple[float | None, tuple[str, ...]]:
    """The largest error of O over its limit, None where O is not finite, and what is wrong."""
    wrong: list[str] = []
    empty = torch.isneginf(wanted.lse)
    if not torch.equal(torch.isneginf(found.lse), empty):
        wrong.append(f"LSE is -inf in {int(torch.isneginf(found.lse).sum())} rows, and has to be in {int(empty.sum())}")
    error = torch.where(empty, 0, (found.lse.double() - wanted.lse).abs())
    if not (error <= wanted.lse_limit.masked_fill(empty, 0)).all():  # NaN is not
        wrong.append(
            f"LSE is off by up to {error.max().item():.3g}; up to {wanted.lse_limit[~empty].max().item():.3g} may be"
        )
    if not torch.isfinite(found.out).all():
        count = int((~torch.isfinite(found.out)).sum())
        wrong.append(
            f"O has NaN or infinity in {count} of {found.out.numel()} elements (written nowhere, or computed so)"
        )
        return None, tuple(wrong)
    off = (found.out.double() - wanted.out).abs()
    used = torch.where(off == 0, 0.0, off / wanted.out_limit)
    worst = used.max().item()
    if worst > 1:
        place = tuple(int(index) for index in torch.unravel_index(used.argmax(), used.shape))
        count = int((used > 1).sum())
        text = f"O is off by {worst:.3g} times what is allowed at {place}; {count} of {used.numel()} elements are"
        wrong.append(text)
    return worst, tuple(wrong)


def wrote_outside(made: CombineInputs) -> tuple[str, ...]:
    """What is wrong when the poison around `out` is gone."""
    return () if untouched(made.out_storage, [made.out]) else ("wrote outside `out`",)
