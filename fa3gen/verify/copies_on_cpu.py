"""Run a generated copy on the CPU model of sm_90a: the criteria of `fa3gen.verify.copies_on_gpu`, under schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fa3gen.compile.compiler import CompileError
from fa3gen.cpu.findings import OutsideModel
from fa3gen.cpu.ptx import PtxError
from fa3gen.cpu.schedule import Schedule, schedules
from fa3gen.spec.model import Copy
from fa3gen.verify.copies import CopyCase
from fa3gen.verify.copies_on_gpu import RIGHT, WRONG, CopyRunner
from fa3gen.verify.on_model import CPU, poisoned_allocations, said
from fa3gen.verify.results import Check, CpuCaseResult
from fa3gen.verify.runner import changed_inputs, snapshots


class CpuCopyRunner(CopyRunner):
    """One copy on the model: calls it under each schedule, compares it, checks it."""

    fatal = (OutsideModel, PtxError, CompileError)

    def __init__(self, module: Any, spec: Copy, seed: int, count: int) -> None:
        """`count` schedules for each case, the fast one first."""
        super().__init__(module, spec, CPU, seed)
        self.schedules: list[Schedule] = schedules(count, 1, seed)

    @property
    def spread(self) -> None:
        """Nothing is rounded."""
        return None

    def run_case(self, case: CopyCase) -> CpuCaseResult:
        """Run under every schedule; no error is allowed under any."""
        made = self._make(case)
        before = snapshots(made.given)
        failures = []
        for schedule in self.schedules:
            self.module.cpu.settings.schedule = schedule
            try:
                with poisoned_allocations():
                    wrong = self._call(made)
            except self.fatal:
                raise
            except Exception as error:  # whatever else a module raises is that module's failure
                wrong = said(error)
            if wrong:
                failures.append(f"{schedule}: {wrong}")
                break
        failures += changed_inputs(made.given, before)
        found = WRONG if failures else RIGHT
        return CpuCaseResult(case.name, case.shape, found, None, None, None, tuple(failures))

    def checks(self) -> Iterator[Check]:
        """As on a GPU, where they can be tried at all."""
        self.module.cpu.settings.schedule = self.schedules[0]
        yield from super().checks()
