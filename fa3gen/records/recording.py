"""From a verification to the record of it: what ran, on what, with which tools, and what came out."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fa3gen.base.errors import UserError
from fa3gen.base.files import sha256
from fa3gen.compile import toolchain
from fa3gen.design.workspace import Workspace
from fa3gen.records.evidence import CpuRecord, Record
from fa3gen.run import gpu
from fa3gen.verify.pipeline import Verification


def record_of(
    verification: Verification,
    workspace: Workspace,
    *,
    seed: int = 0,
    failures: Sequence[str] = (),
) -> Record:
    """Make the evidence record of a run on the GPU, passed or failed; speeds are added by `evidence.set_tflops`.

    `failures` are for a run that left no report: a lost device, a launch that never ended. Raises UserError for a run
    on the CPU, which is no evidence.
    """
    from fa3gen.verify.attention_on_gpu import FACTOR, LSE_TOLERANCE
    from fa3gen.verify.on_gpu import Report

    report, stem = verification.report, verification.variant.stem
    if report is not None and (not isinstance(report, Report) or report.device == "cpu"):
        raise UserError(f"{stem} was run on the CPU; run `fa3gen verify {stem} --evidence` on a Hopper GPU")
    around = gpu.environment(verification.ptxas)
    found = [*failures, *(report.failures if report else ()), *_failed_before(verification)]
    cases = [asdict(case) for case in report.cases] if report else []
    checks = [asdict(check) for check in report.checks] if report else []
    fields = {
        **_identity(verification, workspace, found),
        **asdict(around),
        "gpu": around.gpu or (report.device if report else "unknown"),
        "seed": report.seed if report else seed,
        "o_factor": FACTOR,
        "lse_tolerance": LSE_TOLERANCE,
        "cases": cases,
        "checks": checks,
        "compile": verification.facts,
    }
    return Record.model_validate(_without_paths(fields, workspace))


def cpu_record_of(verification: Verification, workspace: Workspace, *, failures: Sequence[str] = ()) -> CpuRecord:
    """Make the record of a run on the CPU model, passed or failed; `failures` are for a run that left no report.

    Raises UserError for the report of anything else.
    """
    from fa3gen.verify.attention_on_gpu import LSE_TOLERANCE
    from fa3gen.verify.on_cpu import EXECUTED_ON, CpuReport
    from fa3gen.verify.on_model import SPREAD_LIMIT

    report, stem = verification.report, verification.variant.stem
    if report is not None and not isinstance(report, CpuReport):
        raise UserError(f"{stem} was run on {report.device}, not on the {EXECUTED_ON}")
    around = gpu.environment(verification.ptxas)
    found = [*failures, *(report.failures if report else ()), *_failed_before(verification)]
    fields = {
        **_identity(verification, workspace, found),
        "executed_on": EXECUTED_ON,
        "torch": around.torch,
        "numpy": toolchain.installed_version("numpy"),
        "dsl": around.dsl,
        "ptxas": around.ptxas,
        "python": around.python,
        "seed": report.seed if report else 0,
        "schedules": list(report.schedules) if report else [],
        "o_spread": report.o_spread if report else None,
        "o_spread_limit": SPREAD_LIMIT,
        "lse_tolerance": LSE_TOLERANCE,
        "cases": [asdict(case) for case in report.cases] if report else [],
        "checks": [asdict(check) for check in report.checks] if report else [],
    }
    return CpuRecord.model_validate(_without_paths(fields, workspace))


def _failed_before(verification: Verification) -> list[str]:
    """What failed before the run: rendering, compilation."""
    stages = {"render": verification.render, "compile": verification.compile}
    return [f"{name}: {stage.detail}" for name, stage in stages.items() if stage.passed is False]


def _identity(verification: Verification, workspace: Workspace, failures: Sequence[str]) -> dict[str, Any]:
    """What any record begins with: of which file it is, when it was made, and whether something failed."""
    stem = verification.variant.stem
    return {
        "stem": stem,
        "source_sha256": verification.source_sha256 or sha256(workspace.module_path(stem)),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "passed": not failures,
        "failures": list(failures),
    }


def _without_paths(value: Any, workspace: Workspace) -> Any:
    """Take the directories of this machine out of every text: a record is read elsewhere."""
    if isinstance(value, str):
        return value.replace(f"{workspace.root}/", "").replace(str(workspace.root), ".")
    if isinstance(value, dict):
        return {key: _without_paths(item, workspace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(item, workspace) for item in value]
    return value
