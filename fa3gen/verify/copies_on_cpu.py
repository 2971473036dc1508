"""Run a generated copy on the CPU model of sm_90a: the criteria of `fa3gen.verify.copies_on_gpu`, under schedules."""

from __future__ import annotations

from typing import Any

from fa3gen.cpu.schedule import schedules
from fa3gen.spec.model import Copy
from fa3gen.verify.copies import CopyCase
from fa3gen.verify.copies_on_gpu import RIGHT, WRONG, CopyRunner, difference
from fa3gen.verify.on_model import CPU, ScheduledRunner
from fa3gen.verify.results import CpuCaseResult


class CpuCopyRunner(ScheduledRunner, CopyRunner):
    """One copy on the model: calls it under each schedule, compares it, checks it."""

    def __init__(self, module: Any, spec: Copy, seed: int, count: int) -> None:
        """`count` schedules for each case, the fast one first."""
        super().__init__(module, spec, CPU, seed)
        self.schedules = schedules(count, 1, seed)

    def run_case(self, case: CopyCase) -> CpuCaseResult:
        """Run under every schedule; no error is allowed under any."""
        made = self._make(case)
        _, failures = self._under_schedules(made.given, lambda: (self._call(made),), lambda: difference(made))
        found = WRONG if failures else RIGHT
        return CpuCaseResult(case.name, case.shape, found, None, None, None, tuple(failures))
