"""What runs of all operations on the CPU model of sm_90a have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fa3gen.compile.compiler import CompileError
from fa3gen.cpu.findings import Hazard, OutsideModel
from fa3gen.cpu.ptx import PtxError
from fa3gen.cpu.schedule import Schedule
from fa3gen.verify.results import Check
from fa3gen.verify.runner import ModuleRunner, changed_inputs, essence, same_bits, snapshots

SPREAD_LIMIT = 1.25  # of the mean squared error over its variance, which is 0.6 to 1.0 when all is well
CPU = torch.device("cpu")


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Let `torch.empty` give NaN, so that what a kernel leaves unwritten shows.

    By the debug mode, since `torch.use_deterministic_algorithms` imports TorchInductor, which takes seconds.
    """
    settings: Any = torch.utils.deterministic
    was, filled = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(was)
        settings.fill_uninitialized_memory = filled


def said(error: Exception) -> str:
    """A hazard in full, on one line: kind, detail, place. Anything else cut short."""
    return " ".join(str(error).split()) if isinstance(error, Hazard) else f"raised {essence(error)}"


class ScheduledRunner(ModuleRunner):
    """The first base of what runs modules of one operation on the model: every case under each of `schedules`."""

    fatal = (OutsideModel, PtxError, CompileError)
    schedules: list[Schedule]

    @property
    def spread(self) -> float | None:
        """Mean of the squared errors over their variance in all cases so far, where that is known."""
        return None

    def checks(self) -> Iterator[Check]:
        """As on a GPU, where they can be tried at all."""
        self.module.cpu.settings.schedule = self.schedules[0]
        yield from super().checks()

    def of_all_cases(self) -> Iterator[Check]:
        """What the cases so far have to be together."""
        yield from ()

    def _under_schedules(
        self,
        given: Mapping[str, torch.Tensor],
        call: Callable[[], tuple[torch.Tensor, ...]],
        look: Callable[[], tuple[str, ...]],
    ) -> tuple[tuple[torch.Tensor, ...] | None, list[str]]:
        """Outputs of `call` under the first schedule, None when it failed, and what went wrong beside their values.

        `look` says what is wrong after a call, other than outputs that differ between schedules or changed `given`.
        """
        failures: list[str] = []
        before = snapshots(given)
        first: tuple[torch.Tensor, ...] | None = None
        for schedule in self.schedules:
            self.module.cpu.settings.schedule = schedule
            try:
                with poisoned_allocations():
                    found = call()
            except self.fatal:
                raise
            except Exception as error:  # whatever else a module raises is that module's failure
                failures.append(f"{schedule}: {said(error)}")
                break
            if wrong := look():
                failures += (f"{schedule}: {text}" for text in wrong)
            if first is None:
                first = tuple(tensor.clone() for tensor in found)
            elif not all(map(same_bits, found, first)):
                failures.append(f"{schedule}: other bits than {self.schedules[0]}")
            if wrong:
                break
        return first, [*failures, *changed_inputs(given, before)]
