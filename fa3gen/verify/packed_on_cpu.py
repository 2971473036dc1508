"""Run a module for packed sequences on the CPU model of sm_90a: the criteria of `fa3gen.verify.attention_on_cpu`.

Of those of `fa3gen.verify.packed_on_gpu` what a model can show; a read outside of any tensor ends a case.
"""

from __future__ import annotations

from fa3gen.verify.attention_on_cpu import CpuRunner
from fa3gen.verify.packed_inputs import PackedInputs
from fa3gen.verify.packed_on_gpu import PackedRunner
from fa3gen.verify.paged_on_gpu import PagedRunner


class CpuPackedRunner(CpuRunner, PackedRunner):
    """One module on the model: runs and judges as the former, with the calls and checks of the latter."""

    def _smallest(self) -> PackedInputs:
        return PackedRunner._smallest(self)


class CpuPagedRunner(CpuRunner, PagedRunner):
    """The same of a module with K and V in pages."""

    def _smallest(self) -> PackedInputs:
        return PagedRunner._smallest(self)
