"""Run a generated GEMM on the CPU model of sm_90a: the criteria of `fa3gen.verify.gemm_on_gpu`, under schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fa3gen.cpu.schedule import schedules
from fa3gen.design import gemm
from fa3gen.hardware import hopper
from fa3gen.spec.model import Gemm
from fa3gen.verify.gemm_inputs import GemmCase
from fa3gen.verify.gemm_on_gpu import Expected, GemmRunner, compare, expected, wrote_outside
from fa3gen.verify.on_model import CPU, SPREAD_LIMIT, ScheduledRunner
from fa3gen.verify.results import Check, CpuCaseResult
from fa3gen.verify.runner import errors

# Elements from which on the mean of their squared errors says something: it is off by 0.9 / sqrt(elements), 0.02.
ENOUGH = 2000


class CpuGemmRunner(ScheduledRunner, GemmRunner):
    """One GEMM module on the model: calls it under each schedule, measures it, checks it."""

    def __init__(self, module: Any, spec: Gemm, seed: int, count: int) -> None:
        """`count` schedules for each case, the fast one first."""
        super().__init__(module, spec, CPU, seed)
        self.schedules = schedules(count, gemm.threads(spec) // hopper.WARP, seed)
        if spec.element.bytes < hopper.BYTES_16BIT:  # what they lose would not show in sums of float32
            module.cpu.settings.sums = "tensor_core"
        self._squares, self._elements = 0.0, 0

    @property
    def spread(self) -> float | None:
        """Mean of (D - ref)^2 over its variance, in all cases so far, where D is rounded to 16 bits; None for few."""
        return self._squares / self._elements if self._elements >= ENOUGH else None

    def run_case(self, case: GemmCase) -> CpuCaseResult:
        """Run under every schedule, compare the first with the reference and the others with the first."""
        made = self._make(case)
        wanted = expected(self.spec, made, case.distribution == "integers")
        outputs, failures = self._under_schedules(made.given, lambda: (self._call(made),), lambda: wrote_outside(made))
        if outputs is None:
            return CpuCaseResult(case.name, case.shape, None, None, None, None, tuple(failures))
        (first,) = outputs
        worst, wrong = compare(first, wanted)
        spread = None if worst is None else self._add_spread(first, wanted)
        error = errors(first, wanted.out)
        return CpuCaseResult(case.name, case.shape, error, worst, spread, None, (*failures, *wrong))

    def _add_spread(self, out: torch.Tensor, wanted: Expected) -> float | None:
        known = wanted.variance > 0
        if self.spec.d_element.bytes != hopper.BYTES_16BIT or not known.any():
            return None
        ratios = ((out.double() - wanted.out).square() / wanted.variance)[known]
        self._squares += ratios.sum().item()
        self._elements += ratios.numel()
        return ratios.mean().item()

    def of_all_cases(self) -> Iterator[Check]:
        """Whether D is rounded as planned."""
        if self.spread is not None:
            text = f"mean squared error of D over what rounding explains: {self.spread:.3g}; {SPREAD_LIMIT} is allowed"
            yield Check("D is rounded as planned", self.spread <= SPREAD_LIMIT, text)
