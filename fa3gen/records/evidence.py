"""What was verified, on which GPU, with which tools: one JSON record per generated module.

`generated/evidence/<stem>.json` is written by `fa3gen verify --evidence` (and its speeds by `fa3gen bench
--evidence`), never by hand. A record speaks of one exact generated file, named by its SHA-256; once that file
changes, the record is stale and the module reads "not verified on a GPU" again. `fa3gen.inspect.pages`
makes `generated/EVIDENCE.md` and other pages of the records.

Runs on the CPU model of sm_90a have records of another kind in another place, `generated/evidence/cpu_model/`, and a
section of their own in EVIDENCE.md. They never make a module "verified on a GPU". `docs/matrix.md`
(`fa3gen.inspect.matrix`) shows both.
"""

from __future__ import annotations

import contextlib
import enum
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from fa3gen.base.errors import UserError
from fa3gen.base.files import sha256, write_text
from fa3gen.base.parts import Part, read_file, rounded
from fa3gen.verify.pipeline import CompileFacts
from fa3gen.verify.results import CaseResult, Check, CpuCaseResult

if TYPE_CHECKING:
    from fa3gen.design.workspace import Workspace
    from fa3gen.run.gpu import Environment

CPU_FOLDER = "cpu_model"  # below the folder of the GPU records
# How speeds in records are timed, as `fa3gen bench` does it: what every table of them says.
TIMED = "one launch at a time, without a CUDA graph, L2 overwritten before"
SEQ_LENS = (4096, 16384)  # speeds that a record holds
TOKENS = 16384  # batch x sequence length of these, and of all large problems that modules and peers are compared at


class Verdict(Part):
    """What every record says: of which file, from which day, whether all passed. Closed against contradictions."""

    version: Literal[1] = 1
    stem: str
    source_sha256: str
    date: str = Field(description="UTC day.", pattern=r"^\d{4}-\d{2}-\d{2}$")
    passed: bool
    failures: list[str]
    torch: str | None
    dsl: str | None
    ptxas: str | None
    python: str
    seed: int
    lse_tolerance: float
    cases: Sequence[CaseResult | CpuCaseResult]
    checks: list[Check]

    @model_validator(mode="after")
    def _passed_says_what_the_rest_says(self) -> Self:
        in_cases = any(case.failures for case in self.cases) or any(check.passed is False for check in self.checks)
        if self.passed and (self.failures or in_cases or not self.cases):
            raise ValueError("passed is true, but there are failures or there is no case")
        if not self.passed and not self.failures:
            raise ValueError("passed is false, but there is no failure")
        return self


class Speed(Part):
    """How fast a module is at one problem: `rate` in `unit`, and how that compares with torch's own call beside it.

    `of_torch` is the module's speed over torch's; None where torch has no such call.
    """

    rate: float
    unit: Literal["TFLOP/s", "GB/s"]
    of_torch: float | None


class Record(Verdict):
    """One module on one GPU on one day."""

    gpu: str
    driver: str | None
    cuda_driver: str | None
    o_factor: float
    cases: list[CaseResult]
    tflops: dict[str, float] = Field(default={}, description="By sequence length; 16,384 tokens in all.")
    beside_torch: dict[str, Speed] = Field(default={}, description="Of other operations than attention, by problem.")
    compile: CompileFacts | None

    @field_validator("gpu")
    @classmethod
    def _is_a_gpu(cls, name: str) -> str:
        if re.search(r"\bcpu\b", name, re.IGNORECASE):
            raise ValueError(f"'{name}' is no GPU")
        return name


class CpuRecord(Verdict):
    """One module on the CPU model of sm_90a on one day: no result of a GPU."""

    executed_on: Literal["CPU model of sm_90a"]
    numpy: str | None
    schedules: list[str] = Field(description="Legal orders of warps and completions that each case ran under.")
    o_spread: float | None = Field(description="Mean of (O - ref)^2 over what rounding explains, in all cases.")
    o_spread_limit: float
    cases: list[CpuCaseResult]


class Status(enum.Enum):
    """What the records of GPU runs say about one module."""

    VERIFIED = "verified"
    FAILED = "FAILED"
    STALE = "not verified on a GPU (record is of an older file)"
    NONE = "not verified on a GPU"


class CpuStatus(enum.Enum):
    """What the records of runs on the CPU model say about one module."""

    PASSED = "passed on the CPU model"
    FAILED = "FAILED on the CPU model"
    STALE = "not run (record is of an older file)"
    NONE = "not run"


def dumps(record: Verdict) -> str:
    """Return the JSON text of a record: sorted keys, two spaces, one newline at the end."""
    unsaid = {"beside_torch"} if isinstance(record, Record) and not record.beside_torch else set()
    return json.dumps(rounded(record.model_dump(exclude=unsaid)), indent=2, sort_keys=True, allow_nan=False) + "\n"


def record_path(workspace: Workspace, stem: str) -> Path:
    """Return where the GPU record of a generated stem lies."""
    return workspace.evidence_dir / f"{stem}.json"


def cpu_record_path(workspace: Workspace, stem: str) -> Path:
    """Return where the record of a generated stem's run on the CPU model lies."""
    return workspace.evidence_dir / CPU_FOLDER / f"{stem}.json"


def write(workspace: Workspace, record: Record) -> Path:
    """Write one GPU record, whether it passed or not; return its path. TypeError for a record of the other kind."""
    if not isinstance(record, Record):
        raise TypeError(f"{type(record).__name__} is no record of a GPU")
    path = record_path(workspace, record.stem)
    write_text(path, dumps(record))
    return path


def write_cpu(workspace: Workspace, record: CpuRecord) -> Path:
    """Write one record of the CPU model; return its path. TypeError for a record of the other kind."""
    if not isinstance(record, CpuRecord):
        raise TypeError(f"{type(record).__name__} is no record of the CPU model")
    path = cpu_record_path(workspace, record.stem)
    write_text(path, dumps(record))
    return path


def read(workspace: Workspace, stem: str) -> Record | None:
    """Read the GPU record of a generated stem; None when there is none, UserError when it is not one."""
    again = f"`fa3gen verify {stem} --evidence` on a Hopper GPU"
    return _read(Record, record_path(workspace, stem), stem, "an evidence record", again)


def read_cpu(workspace: Workspace, stem: str) -> CpuRecord | None:
    """Like `read`, for the record of a run on the CPU model."""
    again = f"`fa3gen verify {stem} --on cpu --evidence`"
    return _read(CpuRecord, cpu_record_path(workspace, stem), stem, "a record of the CPU model", again)


_Kind = TypeVar("_Kind", bound=Verdict)


def _read(kind: type[_Kind], path: Path, stem: str, what: str, again: str) -> _Kind | None:
    record = read_file(kind, path, what, f"delete it and run {again}")
    if record is not None and record.stem != stem:
        raise UserError(f"{path} is a record of {record.stem}, not of {stem}; delete it")
    return record


def status(workspace: Workspace, stem: str) -> tuple[Status, Record | None]:
    """Say what the GPU records say of one module; the record comes along unless there is none."""
    record = read(workspace, stem)
    if record is None:
        return Status.NONE, None
    if not _is_of_the_present_file(workspace, record):
        return Status.STALE, record
    return (Status.VERIFIED if record.passed else Status.FAILED), record


def cpu_status(workspace: Workspace, stem: str) -> tuple[CpuStatus, CpuRecord | None]:
    """Like `status`, for runs on the CPU model."""
    record = read_cpu(workspace, stem)
    if record is None:
        return CpuStatus.NONE, None
    if not _is_of_the_present_file(workspace, record):
        return CpuStatus.STALE, record
    return (CpuStatus.PASSED if record.passed else CpuStatus.FAILED), record


def _is_of_the_present_file(workspace: Workspace, record: Verdict) -> bool:
    source = workspace.module_path(record.stem)
    return source.exists() and sha256(source) == record.source_sha256


def digests(workspace: Workspace, stem: str) -> set[str]:
    """SHA-256 of the files that the passing records of a module speak of; a record that cannot be read says nothing."""
    found = set()
    for read_one in (read, read_cpu):
        with contextlib.suppress(UserError, OSError):
            record: Verdict | None = read_one(workspace, stem)
            if record is not None and record.passed:
                found.add(record.source_sha256)
    return found


def set_tflops(workspace: Workspace, stem: str, tflops: Mapping[int, float], around: Environment) -> bool:
    """Put new speeds into a record that is of the present file and was made on this GPU with this DSL and torch.

    Returns False, changing nothing, without one: a record names one machine for all that it holds.
    """
    record = _of_here(workspace, stem, around)
    if record is None:
        return False
    kept = {seq_len: value for seq_len, value in tflops.items() if seq_len in SEQ_LENS}
    merged = {**record.tflops, **{str(seq_len): value for seq_len, value in kept.items()}}
    write(workspace, record.model_copy(update={"tflops": merged}))
    return True


def set_beside_torch(workspace: Workspace, stem: str, speeds: Mapping[str, Speed], around: Environment) -> bool:
    """The same for modules of other operations than attention: their speeds by problem, beside torch's."""
    record = _of_here(workspace, stem, around)
    if record is None:
        return False
    write(workspace, record.model_copy(update={"beside_torch": {**record.beside_torch, **speeds}}))
    return True


def _of_here(workspace: Workspace, stem: str, around: Environment) -> Record | None:
    """The record of the present file, if it was made on this GPU with this DSL and torch."""
    state, record = status(workspace, stem)
    if record is None or state not in (Status.VERIFIED, Status.FAILED):
        return None
    same = (record.gpu, record.dsl, record.torch) == (around.gpu, around.dsl, around.torch)
    return record if same else None


def verified(workspace: Workspace, stem: str) -> Record | None:
    """Return the record of a module that is verified as it stands."""
    state, record = status(workspace, stem)
    return record if state is Status.VERIFIED else None


def compiled_registers(workspace: Workspace, stem: str) -> int | None:
    """Return the registers per thread of a module as compiled, if it is verified as it stands."""
    record = verified(workspace, stem)
    return record.compile.registers if record and record.compile else None
