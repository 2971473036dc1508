"""Run a generated quantisation on the CPU model of sm_90a: the criteria of `quantize_on_gpu`, under schedules."""

from __future__ import annotations

from typing import Any

from fa3gen.cpu.schedule import schedules
from fa3gen.hardware import hopper
from fa3gen.spec.model import Quantize
from fa3gen.verify.on_model import CPU, ScheduledRunner
from fa3gen.verify.quantize_inputs import QuantizeCase
from fa3gen.verify.quantize_on_gpu import Quantized, QuantizeRunner, all_given, compare, expected, wrote_outside
from fa3gen.verify.results import CpuCaseResult


class CpuQuantizeRunner(ScheduledRunner, QuantizeRunner):
    """One quantisation on the model: calls it under each schedule, measures it, checks it."""

    def __init__(self, module: Any, spec: Quantize, seed: int, count: int) -> None:
        """`count` schedules for each case, the fast one first."""
        super().__init__(module, spec, CPU, seed)
        self.schedules = schedules(count, spec.tile.threads // hopper.WARP, seed)

    def run_case(self, case: QuantizeCase) -> CpuCaseResult:
        """Run under every schedule, compare the first with the reference and the others with the first."""
        made = self._make(case)
        given = all_given(made)
        outputs, failures = self._under_schedules(given, lambda: self._call(made), lambda: wrote_outside(made))
        if outputs is None:
            return CpuCaseResult(case.name, case.shape, None, None, None, None, tuple(failures))
        judged = compare(self.spec, Quantized(*outputs), expected(self.spec, made))
        return CpuCaseResult(case.name, case.shape, judged.error, judged.used, None, None, (*failures, *judged.wrong))
