"""Run a generated copy on a GPU; `fa3gen.verify.copies_on_cpu` does the same on the CPU model of sm_90a.

A copy is right or wrong: out has the bits of x, everything around it the bits that it had before, and of packed rows
also every row that belongs to no sequence. Inputs stay as they are, and every launch does the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fa3gen.design.operation import operation_of
from fa3gen.spec.model import Copy
from fa3gen.verify import copies
from fa3gen.verify.copies import CANARY, CopyCase, CopyInputs
from fa3gen.verify.results import CaseResult, Errors
from fa3gen.verify.runner import LAUNCHES, ModuleRunner, changed_inputs, essence, raise_if_lost, same_bits, snapshots

RIGHT = Errors(0.0, 0.0)
WRONG = Errors(None, None)


class CopyRunner(ModuleRunner):
    """One copy on one device: calls it, compares it, checks it."""

    def __init__(self, module: Any, spec: Copy, device: torch.device, seed: int) -> None:
        """`seed` decides all inputs."""
        super().__init__(module, operation_of(spec), device, seed)
        self.spec, self.dtype = spec, spec.element.in_torch()

    def run_case(self, case: CopyCase) -> Any:
        """Launch a few times on fresh canaries; returns a CaseResult without errors, or with what is wrong."""
        made = self._make(case)
        try:
            failures = self._launch_all(made)
        except Exception as error:  # whatever a module raises is that module's failure
            raise_if_lost(self.device, error)
            failures = (f"raised {essence(error)}",)
        return CaseResult(
            name=case.name,
            shape=case.shape,
            o_error=WRONG if failures else RIGHT,
            o_yardstick=RIGHT,
            o_max_abs_limit=0.0,
            o_block_ratio=None,
            lse_error=None,
            lse_yardstick=None,
            failures=failures,
        )

    def _make(self, case: CopyCase) -> CopyInputs:
        return copies.make(self.spec, case, device=self.device, seed=self.seed)

    def _launch_all(self, made: CopyInputs) -> tuple[str, ...]:
        before = snapshots(made.given)
        failures: tuple[str, ...] = ()
        for launch in range(LAUNCHES):
            self._call(made)
            wrong = "; ".join(difference(made))
            failures = (f"launch {launch + 1}: {wrong}",) if wrong else ()
            failures += changed_inputs(made.given, before)
            if failures:
                break
        return failures

    def _call(self, made: CopyInputs) -> torch.Tensor:
        """Call with `out` given, canaries around it, see `difference`; returns it."""
        made.out_storage.fill_(CANARY)
        returned = self.entry(*made.given.values(), out=made.out)
        self._same_out(returned, made.out)
        return made.out

    # -- checks

    def _tries(self) -> list[tuple[str, Callable[[], str]]]:
        return [
            ("allocates out when not given one", self._allocates_out),
            ("nothing to copy", self._nothing),
            ("bad arguments are refused", self._refuses),
        ]

    def _small(self) -> CopyInputs:
        """Inputs for the checks, larger than a tile."""
        outer = [extent + 1 for extent in self.spec.box.extents[:-1]]
        if "offsets" in (tensor.name for tensor in self.operation.inputs):
            return self._make(copies.sequences("checks", "inputs of the checks", (outer[0], 3)))
        return self._make(CopyCase("checks", "inputs of the checks", tuple(outer), "contiguous"))

    def _allocates_out(self) -> str:
        made = self._small()
        out = self.entry(*made.given.values())
        if not isinstance(out, torch.Tensor):
            return f"it should return a tensor, not {type(out).__name__}"
        if (out.shape, out.dtype, out.device) != (made.x.shape, self.dtype, made.x.device) or not out.is_contiguous():
            return f"out is {tuple(out.shape)} {out.dtype} {out.device} with strides {out.stride()}"
        return "" if same_bits(out, made.x) else "out differs from x"

    def _nothing(self) -> str:
        """A tensor without elements, and packed rows without sequences."""
        made = self._small()
        given = dict(made.given)
        if made.offsets is not None:
            given["offsets"] = made.offsets[:1]
            out = self.entry(**given)
            if out.shape != made.x.shape:
                return f"without sequences out is {tuple(out.shape)}"
        out = self.entry(**{**given, "x": made.x[:0]})
        return (
            ""
            if out.shape == made.x[:0].shape and out.dtype == self.dtype
            else f"out is {tuple(out.shape)} {out.dtype}"
        )

    def _bad_calls(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        made = self._small()
        good: dict[str, Any] = {**made.given, "out": made.out}
        x = made.x
        elsewhere = "cpu" if self.device.type == "cuda" else "meta"
        other = torch.float16 if self.dtype == torch.bfloat16 else torch.bfloat16
        shifted = torch.cat([x.flatten(), x.flatten()[:8]])[1 : 1 + x.numel()].view(x.shape)
        odd = torch.nn.functional.pad(x, (0, 4))[..., : x.shape[-1]]
        yield "float32 x", "x", {**good, "x": x.float()}
        yield f"{other} x", "x", {**good, "x": x.to(other)}
        yield f"out on {elsewhere}", "out", {**good, "out": made.out.to(elsewhere)}
        yield "x that is not a tensor", "x", {**good, "x": [1.0]}
        yield "x with one dimension more", "x", {**good, "x": x[None]}
        yield "half a row in x", "x", {**good, "x": x[..., : x.shape[-1] // 2]}
        yield "x whose rows are not contiguous", "x", {**good, "x": torch.cat([x, x], dim=-1)[..., ::2]}
        yield "x that starts off a 16-byte boundary", "x", {**good, "x": shifted}
        yield "x whose rows are no multiple of 16 bytes apart", "x", {**good, "x": odd}
        yield "out of another shape", "out", {**good, "out": made.out[:-1]}
        yield "out of another dtype", "out", {**good, "out": made.out.to(other)}
        yield "out whose first dimension is one row", "out", {**good, "out": made.out[:1].expand(made.out.shape)}
        if made.offsets is not None:
            yield "int64 offsets", "offsets", {**good, "offsets": made.offsets.long()}
            yield "offsets of two dimensions", "offsets", {**good, "offsets": made.offsets[None]}

    def _current_stream(self) -> str:
        """Fill x late on a side stream; a kernel on any other stream would read what was there before."""
        made = self._small()
        late = torch.zeros_like(made.x)
        made.out_storage.fill_(CANARY)
        torch.cuda.synchronize(self.device)
        side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            torch.cuda._sleep(40_000_000)  # type: ignore[no-untyped-call]  # cycles: about 20 ms
            late.copy_(made.x)
            self.entry(**{**made.given, "x": late}, out=made.out)
        side.synchronize()
        return "; ".join(difference(made))

    def _call_given_out(self) -> tuple[Callable[[], Any], int]:
        made = self._small()
        return functools.partial(self.entry, *made.given.values(), out=made.out), 0


def difference(made: CopyInputs) -> tuple[str, ...]:
    """What is wrong with the buffer that out lies in."""
    wrong = made.out_storage != made.wanted
    if not wrong.any():
        return ()
    inside = torch.zeros_like(wrong)
    inside.as_strided(made.out.shape, made.out.stride(), made.out.storage_offset())[...] = True
    where = [(wrong & inside, "elements of out are wrong"), (wrong & ~inside, "elements around out were written")]
    return tuple(f"{int(found.sum())} {what}" for found, what in where if found.any())
