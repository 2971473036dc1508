"""Run a generated module on a GPU against a reference and say how far it is off: cases, checks, and a report.

What passes is said where an operation's runner is: `attention_on_gpu`, `packed_on_gpu`, `gemm_on_gpu`,
`copies_on_gpu`, `combine_on_gpu`, `quantize_on_gpu`. `fa3gen.verify.on_cpu` does the same on the CPU model of sm_90a,
with cases and criteria of its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fa3gen.spec.model import Combine, Copy, Forward, Gemm, Quantize, Spec
from fa3gen.verify import combine_inputs, gemm_inputs, inputs, packed_inputs, paged_inputs, quantize_inputs
from fa3gen.verify import copies as copy_inputs
from fa3gen.verify.attention_on_gpu import Runner
from fa3gen.verify.combine_on_gpu import CombineRunner
from fa3gen.verify.copies_on_gpu import CopyRunner
from fa3gen.verify.gemm_on_gpu import GemmRunner
from fa3gen.verify.packed_on_gpu import PackedRunner
from fa3gen.verify.paged_on_gpu import PagedRunner
from fa3gen.verify.quantize_on_gpu import QuantizeRunner
from fa3gen.verify.results import CaseResult, Check, Outcome
from fa3gen.verify.runner import ModuleRunner


@dataclass(frozen=True)
class Report(Outcome):
    """All that `verify_module` found out about one module on one device."""

    stem: str
    device: str
    seed: int
    cases: tuple[CaseResult, ...]
    checks: tuple[Check, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "passed": self.passed}


def verify_module(
    module: Any,
    spec: Spec,
    device: torch.device,
    *,
    stem: str = "",
    cases: Sequence[Any] | None = None,
    seed: int | None = None,
    on_case: Callable[[str], None] = lambda name: None,
) -> Report:
    """Run the module's entry point on every case and check; `on_case` hears each name before it starts.

    `cases` are by default those of the operation and its layout, see `_runner`.
    Raises DeviceLost when a launch left the CUDA context unusable.
    """
    seed = secrets.randbelow(2**31) if seed is None else seed
    runner, usual = _runner(module, spec, device, seed)
    results = []
    for case in usual if cases is None else cases:
        on_case(case.name)
        results.append(runner.run_case(case))
    on_case("checks")
    return Report(
        stem=stem,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        seed=seed,
        cases=tuple(results),
        checks=tuple(runner.checks()),
    )


def _runner(module: Any, spec: Spec, device: torch.device, seed: int) -> tuple[ModuleRunner, Sequence[Any]]:
    """What runs a module of this operation, and its cases."""
    match spec:
        case Forward() if spec.problem.layout == "packed":
            return PackedRunner(module, spec, device, seed), packed_inputs.gpu_cases(spec)
        case Forward() if spec.problem.layout == "paged":
            return PagedRunner(module, spec, device, seed), paged_inputs.gpu_cases(spec)
        case Forward():
            return Runner(module, spec, device, seed), inputs.gpu_cases(spec)
        case Gemm():
            return GemmRunner(module, spec, device, seed), gemm_inputs.gpu_cases(spec)
        case Copy():
            return CopyRunner(module, spec, device, seed), copy_inputs.gpu_cases(spec)
        case Combine():
            return CombineRunner(module, spec, device, seed), combine_inputs.gpu_cases(spec)
        case Quantize():
            return QuantizeRunner(module, spec, device, seed), quantize_inputs.gpu_cases(spec)
