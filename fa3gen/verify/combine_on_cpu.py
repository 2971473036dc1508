"""Run a generated merge on the CPU model of sm_90a: the criteria of `fa3gen.verify.combine_on_gpu`, under schedules."""

from __future__ import annotations

from typing import Any

from fa3gen.cpu.schedule import schedules
from fa3gen.hardware import hopper
from fa3gen.spec.model import Combine
from fa3gen.verify.combine_inputs import CombineCase
from fa3gen.verify.combine_on_gpu import CombineRunner, compare, expected, wrote_outside
from fa3gen.verify.on_model import CPU, ScheduledRunner
from fa3gen.verify.reference import Attention
from fa3gen.verify.results import CpuCaseResult
from fa3gen.verify.runner import errors


class CpuCombineRunner(ScheduledRunner, CombineRunner):
    """One merge on the model: calls it under each schedule, measures it, checks it."""

    def __init__(self, module: Any, spec: Combine, seed: int, count: int) -> None:
        """`count` schedules for each case, the fast one first."""
        super().__init__(module, spec, CPU, seed)
        self.schedules = schedules(count, spec.cta.threads // hopper.WARP, seed)

    def run_case(self, case: CombineCase) -> CpuCaseResult:
        """Run under every schedule, compare the first with the reference and the others with the first."""
        made = self._make(case)
        outputs, failures = self._under_schedules(made.given, lambda: self._call(made), lambda: wrote_outside(made))
        if outputs is None:
            return CpuCaseResult(case.name, case.shape, None, None, None, None, tuple(failures))
        found, wanted = Attention(*outputs), expected(self.spec, made)
        worst, wrong = compare(found, wanted)
        o_error, lse_error = errors(found.out, wanted.out), errors(found.lse, wanted.lse)
        return CpuCaseResult(case.name, case.shape, o_error, worst, None, lse_error, (*failures, *wrong))
