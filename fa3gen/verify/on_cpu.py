"""Run a generated module on the CPU model of sm_90a, under several schedules: cases, checks, and a report.

What passes is said where an operation's runner is: `attention_on_cpu`, `packed_on_cpu`, `gemm_on_cpu`,
`copies_on_cpu`, `combine_on_cpu`, `quantize_on_cpu`. This is a model, not a GPU: what needs one is listed as not run.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fa3gen.spec.model import Combine, Copy, Forward, Gemm, Quantize, Spec
from fa3gen.verify import combine_inputs, gemm_inputs, inputs, packed_inputs, paged_inputs, quantize_inputs
from fa3gen.verify import copies as copy_inputs
from fa3gen.verify.attention_on_cpu import CpuRunner
from fa3gen.verify.combine_on_cpu import CpuCombineRunner
from fa3gen.verify.copies_on_cpu import CpuCopyRunner
from fa3gen.verify.gemm_on_cpu import CpuGemmRunner
from fa3gen.verify.on_model import ScheduledRunner
from fa3gen.verify.packed_on_cpu import CpuPackedRunner, CpuPagedRunner
from fa3gen.verify.quantize_on_cpu import CpuQuantizeRunner
from fa3gen.verify.results import Check, CpuCaseResult, Outcome

EXECUTED_ON = "CPU model of sm_90a"
SCHEDULES = 2  # the fast one and one that preempts


@dataclass(frozen=True)
class CpuReport(Outcome):
    """All that `verify_on_cpu` found out about one module; never the report of a GPU."""

    stem: str
    seed: int
    schedules: tuple[str, ...]
    o_spread: float | None
    cases: tuple[CpuCaseResult, ...]
    checks: tuple[Check, ...]

    @property
    def device(self) -> str:
        """What ran the kernel."""
        return f"{EXECUTED_ON} (not a GPU result)"

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**asdict(self), "executed_on": EXECUTED_ON, "passed": self.passed}


def verify_on_cpu(
    module: Any,
    spec: Spec,
    *,
    stem: str = "",
    cases: Sequence[Any] | None = None,
    seed: int | None = None,
    count: int = SCHEDULES,
    calls: bool = True,
    on_case: Callable[[str], None] = lambda name: None,
) -> CpuReport:
    """Run every case and check on a module that was loaded with on="cpu", each case under `count` schedules.

    `cases` are by default those of the operation and its layout, see `_runner`; without `calls`, nothing but these is
    tried: no call without work, or with bad arguments, which are always made under the first schedule. `on_case` hears
    each name before it starts. Raises OutsideModel or PtxError for a kernel that the model cannot run, CompileError for
    one that does not compile.
    """
    seed = secrets.randbelow(2**31) if seed is None else seed
    runner, usual = _runner(module, spec, seed, count)
    results = []
    for case in usual if cases is None else cases:
        on_case(case.name)
        results.append(runner.run_case(case))
    on_case("checks")
    checks = (*(runner.checks() if calls else ()), *runner.of_all_cases())
    return CpuReport(
        stem=stem,
        seed=seed,
        schedules=tuple(str(schedule) for schedule in runner.schedules),
        o_spread=runner.spread,
        cases=tuple(results),
        checks=checks,
    )


def _runner(module: Any, spec: Spec, seed: int, count: int) -> tuple[ScheduledRunner, Sequence[Any]]:
    """What runs a module of this operation, and its cases."""
    match spec:
        case Forward() if spec.problem.layout == "packed":
            return CpuPackedRunner(module, spec, seed, count), packed_inputs.cpu_cases(spec)
        case Forward() if spec.problem.layout == "paged":
            return CpuPagedRunner(module, spec, seed, count), paged_inputs.cpu_cases(spec)
        case Forward():
            return CpuRunner(module, spec, seed, count), inputs.cpu_cases(spec)
        case Gemm():
            return CpuGemmRunner(module, spec, seed, count), gemm_inputs.cpu_cases(spec)
        case Copy():
            return CpuCopyRunner(module, spec, seed, count), copy_inputs.cpu_cases(spec)
        case Combine():
            return CpuCombineRunner(module, spec, seed, count), combine_inputs.cpu_cases(spec)
        case Quantize():
            return CpuQuantizeRunner(module, spec, seed, count), quantize_inputs.cpu_cases(spec)
