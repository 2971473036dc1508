"""Run a module for packed sequences on the CPU model of sm_90a: the criteria of `fa3gen.verify.attention_on_cpu`.

Of those of `fa3gen.verify.packed_on_gpu` what a model can show; a read outside of any tensor ends a case.
"""

from __future__ import annotations

from typing import Any

from fa3gen.spec.model import Forward
from fa3gen.verify.attention_on_cpu import CpuRunner
from fa3gen.verify.packed_inputs import PackedInputs
from fa3gen.verify.packed_on_gpu import PackedRunner
from fa3gen.verify.paged_on_gpu import PagedRunner


class CpuPackedRunner(CpuRunner, PackedRunner):
    """One module on the model: runs and judges as the former, with the calls and checks of the latter."""

    def __init__(self, module: Any, spec: Forward, seed: int, count: int) -> None:
        """As the former."""
        super().__init__(module, spec, seed, count)
        module.cpu.settings.lengths_may_lie = True  # as a case does, to see that the kernel clamps them

    def _smallest(self) -> PackedInputs:
        return PackedRunner._smallest(self)


class CpuPagedRunner(CpuPackedRunner, PagedRunner):
    """The same of a module with K and V in pages."""
