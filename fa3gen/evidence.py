"""What was verified, on which GPU, with which tools: one JSON record per generated module, and tables made of them.

`generated/evidence/<stem>.json` is written by `fa3gen verify --evidence` (and its speeds by `fa3gen bench
--evidence`), never by hand. A record speaks of one exact generated file, named by its SHA-256; once that file
changes, the record is stale and the module reads "not verified on a GPU" again. `generated/EVIDENCE.md` and the
ladder table in the README are renderings of the records; `check` proves that they still are.

Runs on the CPU model of sm_90a have records of another kind in another place, `generated/evidence/cpu_model/`, and a
section of their own in EVIDENCE.md. They never make a module "verified on a GPU". `docs/matrix.md`
(`fa3gen.matrix`) shows both.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fa3gen.errors import UserError
from fa3gen.files import write_text
from fa3gen.spec import CausalMask, NoMask, Spec

if TYPE_CHECKING:
    from fa3gen.gpu import Environment
    from fa3gen.workspace import Workspace

CPU_FOLDER = "cpu_model"  # below the folder of the GPU records
SEQ_LENS = (4096, 16384)  # speeds that a record holds
RUNGS = ("k1", "k2", "k2_cp_async", "k3_1", "k3_2", "k3_3", "k4_1", "k4_smem", "k4_2", "k5", "k6")
LADDER_BEGIN, LADDER_END = "<!-- ladder:begin -->", "<!-- ladder:end -->"
PEERS_BEGIN, PEERS_END = "<!-- peers:begin -->", "<!-- peers:end -->"
REFRESH = "fa3gen verify --evidence"  # the command that writes records and renderings


class Part(BaseModel):
    """Base of all parts of a record: closed against unknown keys, so that a record says what it seems to say."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Errors(Part):
    """As `fa3gen.verify.Errors`."""

    max_abs: float | None
    relative: float | None


class Case(Part):
    """As `fa3gen.verify.CaseResult`: errors beside yardsticks and limits."""

    name: str
    shape: str
    o_error: Errors | None
    o_yardstick: Errors | None
    o_max_abs_limit: float | None
    o_block_ratio: float | None
    lse_error: Errors | None
    lse_yardstick: Errors | None
    failures: list[str]


class Check(Part):
    """As `fa3gen.verify.Check`."""

    name: str
    passed: bool | None
    detail: str


class CpuCase(Part):
    """As `fa3gen.cpu.verify.CpuCaseResult`: errors, and the share of their limits that they use."""

    name: str
    shape: str
    o_error: Errors | None
    o_used: float | None
    o_spread: float | None
    lse_error: Errors | None
    failures: list[str]


class CompileFacts(Part):
    """What the compiled file holds, in sum over its kernels; registers and shared memory of the largest."""

    registers: int
    stack_bytes: int
    spills: int = Field(description="Local-memory loads and stores in SASS.")
    smem_bytes: int | None
    wgmma: dict[str, int] = Field(description="wgmma.mma_async in PTX, by shape.")
    serialized_wgmma: bool


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
    cases: Sequence[Case | CpuCase]
    checks: list[Check]

    @model_validator(mode="after")
    def _passed_says_what_the_rest_says(self) -> Self:
        in_cases = any(case.failures for case in self.cases) or any(check.passed is False for check in self.checks)
        if self.passed and (self.failures or in_cases or not self.cases):
            raise ValueError("passed is true, but there are failures or there is no case")
        if not self.passed and not self.failures:
            raise ValueError("passed is false, but there is no failure")
        return self


class Record(Verdict):
    """One module on one GPU on one day."""

    gpu: str
    driver: str | None
    cuda_driver: str | None
    o_factor: float
    cases: list[Case]
    tflops: dict[str, float] = Field(default={}, description="By sequence length; 16,384 tokens in all.")
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
    cases: list[CpuCase]


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


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _rounded(value: Any) -> Any:
    """Keep four significant digits of every float: more would only be noise in a diff."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return value


def dumps(record: Verdict) -> str:
    """Return the JSON text of a record: sorted keys, two spaces, one newline at the end."""
    return json.dumps(_rounded(record.model_dump()), indent=2, sort_keys=True, allow_nan=False) + "\n"


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
    if not path.exists():
        return None
    try:
        record = kind.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "file"
        raise UserError(f"{path} is not {what} ({place}: {first['msg']}); delete it and run {again}") from error
    if record.stem != stem:
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


def set_tflops(workspace: Workspace, stem: str, tflops: Mapping[int, float], around: Environment) -> bool:
    """Put new speeds into a record that is of the present file and was made on this GPU with this DSL and torch.

    Returns False, changing nothing, without one: a record names one machine for all that it holds.
    """
    state, record = status(workspace, stem)
    if record is None or state not in (Status.VERIFIED, Status.FAILED):
        return False
    if (record.gpu, record.dsl, record.torch) != (around.gpu, around.dsl, around.torch):
        return False
    kept = {seq_len: value for seq_len, value in tflops.items() if seq_len in SEQ_LENS}
    merged = {**record.tflops, **{str(seq_len): value for seq_len, value in kept.items()}}
    write(workspace, record.model_copy(update={"tflops": merged}))
    return True


def generated_stems(workspace: Workspace) -> list[str]:
    """Return every stem that the specs generate, in the order of the ladder, then by name."""
    files = sorted(workspace.load_all(), key=lambda file: ladder_order(file.stem))
    return [variant.stem for file in files for variant in file.variants]


def ladder_order(spec_stem: str) -> tuple[int, str]:
    """What specs are sorted by: the ladder first, then by name."""
    return (RUNGS.index(spec_stem) if spec_stem in RUNGS else len(RUNGS)), spec_stem


def verified(workspace: Workspace, stem: str) -> Record | None:
    """Return the record of a module that is verified as it stands."""
    state, record = status(workspace, stem)
    return record if state is Status.VERIFIED else None


def compiled_registers(workspace: Workspace, stem: str) -> int | None:
    """Return the registers per thread of a module as compiled, if it is verified as it stands."""
    record = verified(workspace, stem)
    return record.compile.registers if record and record.compile else None


# -- EVIDENCE.md

_INTRO = f"""# Evidence

Written by `{REFRESH}`; do not edit. A record counts only for the exact file it was made with (SHA-256).

## On a GPU

Every module is run on {{cases}} named inputs (random, outlier, ragged, grouped heads, strided, masked rows) on poisoned
outputs and compared with float64 attention. It passes when O is within twice the error of PyTorch in the same precision
(plus half an ulp), for the maximum and for every block of 64 rows, and LSE within 1e-5 relative.
*O* and *PyTorch* are relative Frobenius errors on the case `random`; *of limit* is the worst case's share of what is
allowed; *LSE* is the worst case's relative error. TFLOP/s: forward, 16,384 tokens in all, heads x head dim = 2048.
"""

_CPU_INTRO = """
## On the CPU model of sm_90a

No GPU took part in what this section says. A model executed the PTX of each module on small inputs made for its tiles
and its ring of stages, every case under several schedules, with the same bits each time and no hazard. *O of limit*:
the worst element's share of half an output ulp plus the rounding of P. *O spread*: mean squared error of O over what
rounding explains, at most {limit}. *LSE*: the worst row's relative error.
"""

_CPU_COLUMNS = ("module", "status", "cases", "schedules", "O of limit", "O spread", "LSE", "made with", "date")

_COLUMNS = (
    *("module", "status", "O", "PyTorch", "of limit", "LSE", "TFLOP/s 4k", "TFLOP/s 16k"),
    *("registers", "spills", "smem", "WGMMA", "serialized", "GPU", "made with", "date"),
)


def render_markdown(workspace: Workspace) -> str:
    """Return the text of EVIDENCE.md: for each kind of run a row per generated stem and every failure in words."""
    states = [(stem, *status(workspace, stem)) for stem in generated_stems(workspace)]
    counts = {len(record.cases) for _, state, record in states if record and state is Status.VERIFIED}
    verified = sum(state is Status.VERIFIED for _, state, _ in states)
    lines = [_INTRO.format(cases=" or ".join(str(count) for count in sorted(counts)) or "a set of")]
    lines.append(f"{verified} of {len(states)} modules are verified on a GPU.\n")
    lines += table(_COLUMNS, [_row(stem, state, record) for stem, state, record in states])
    lines += _failures([(stem, record) for stem, state, record in states if record and state is Status.FAILED])
    return "\n".join([*lines, *_cpu_section(workspace)]) + "\n"


def _failures(failing: Sequence[tuple[str, Verdict]]) -> list[str]:
    if not failing:
        return []
    return ["", "### Failures", "", *(f"- `{stem}`: {text}" for stem, record in failing for text in record.failures)]


def _cpu_section(workspace: Workspace) -> list[str]:
    """What was executed on the CPU model; nothing where there is no record of it."""
    states = [(stem, *cpu_status(workspace, stem)) for stem in generated_stems(workspace)]
    limits = {record.o_spread_limit for _, _, record in states if record}
    if not limits:
        return []
    passed = sum(state is CpuStatus.PASSED for _, state, _ in states)
    lines = [_CPU_INTRO.format(limit=" or ".join(f"{limit:g}" for limit in sorted(limits)))]
    lines.append(f"{passed} of {len(states)} modules passed on the CPU model.\n")
    lines += table(_CPU_COLUMNS, [_cpu_row(stem, state, record) for stem, state, record in states])
    return lines + _failures([(stem, record) for stem, state, record in states if record and state is CpuStatus.FAILED])


def _cpu_row(stem: str, state: CpuStatus, record: CpuRecord | None) -> list[str]:
    if record is None or state is CpuStatus.STALE:
        return [f"`{stem}`", state.value, *[""] * (len(_CPU_COLUMNS) - 2)]
    used = [case.o_used for case in record.cases if case.o_used is not None]
    made_with = f"DSL {record.dsl or '?'}, torch {record.torch or '?'}, NumPy {record.numpy or '?'}"
    return [
        f"`{stem}`",
        state.value,
        str(len(record.cases)),
        str(len(record.schedules)),
        f"{max(used):.0%}" if used else "",
        "" if record.o_spread is None else f"{record.o_spread:.2f}",
        _scientific(_worst_lse(record.cases)),
        made_with,
        record.date,
    ]


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return head + [f"| {' | '.join(row)} |" for row in rows]


def _row(stem: str, state: Status, record: Record | None) -> list[str]:
    if record is None or state is Status.STALE:
        return [f"`{stem}`", state.value, *[""] * (len(_COLUMNS) - 2)]
    plain = next((case for case in record.cases if case.name == "random"), None)
    error, yardstick = (plain.o_error, plain.o_yardstick) if plain else (None, None)
    made_with = f"DSL {record.dsl or '?'}, ptxas {record.ptxas or '?'}, torch {record.torch or '?'}"
    return [
        f"`{stem}`",
        state.value,
        _scientific(error.relative if error else None),
        _scientific(yardstick.relative if yardstick else None),
        _share(record.cases),
        _scientific(_worst_lse(record.cases)),
        *(speed(record.tflops.get(str(seq_len))) for seq_len in SEQ_LENS),
        *_compile_cells(record.compile),
        f"{record.gpu}, driver {record.driver or '?'} (CUDA {record.cuda_driver or '?'})",
        made_with,
        record.date,
    ]


def _scientific(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def speed(tflops: float | None) -> str:
    """Print a speed as precisely as it is repeatable: whole TFLOP/s from 10 on."""
    if tflops is None:
        return ""
    return f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}"


def _share(cases: Sequence[Case]) -> str:
    """Return the worst case's error as a share of its limit, of the maximum or of a block, whichever is worse."""
    shares = [
        max(case.o_error.max_abs / case.o_max_abs_limit, case.o_block_ratio or 0.0)
        for case in cases
        if case.o_error and case.o_error.max_abs is not None and case.o_max_abs_limit
    ]
    return f"{max(shares):.0%}" if len(shares) == len(cases) and shares else ""


def _worst_lse(cases: Sequence[Case | CpuCase]) -> float | None:
    values = [case.lse_error.relative for case in cases if case.lse_error and case.lse_error.relative is not None]
    return max(values, default=None)


def _compile_cells(facts: CompileFacts | None) -> list[str]:
    if facts is None:
        return [""] * 5
    wgmma = ", ".join(f"{count} {shape}" for shape, count in sorted(facts.wgmma.items()))
    smem = "" if facts.smem_bytes is None else str(facts.smem_bytes)
    serialized = ("yes" if facts.serialized_wgmma else "no") if facts.wgmma else ""
    return [str(facts.registers), str(facts.spills), smem, wgmma, serialized]


# -- README ladder


def ladder_table(workspace: Workspace) -> str:
    """Return the README's table: each rung's TFLOP/s at both lengths, head dims and masks; empty without evidence."""
    columns = [(d, mask, seq_len) for d in (64, 128) for mask in ("full", "causal") for seq_len in SEQ_LENS]
    names = [f"d{d} {mask} {seq_len // 1024}k" for d, mask, seq_len in columns]
    files = {file.stem: file for file in workspace.load_all()}
    rows, machines = [], set()
    for rung in (rung for rung in RUNGS if rung in files):
        cells = []
        for d, mask, seq_len in columns:
            record = _verified_of(workspace, files[rung].variants, head_dim=d, mask=mask)
            cells.append(speed(record.tflops.get(str(seq_len))) if record else "")
            if record:
                machines.add(f"{record.gpu}, {record.date}")
        rows.append([f"`{rung}`", *(cell or "–" for cell in cells)])
    measured = "; ".join(sorted(machines)) or "nothing yet"
    note = f"TFLOP/s, bf16 forward, 16,384 tokens in all, heads x head dim = 2048. Measured: {measured}."
    return "\n".join([*table(["rung", *names], rows), "", f"{note} –: not verified on a GPU."]) + "\n"


def _verified_of(workspace: Workspace, variants: Sequence[Any], *, head_dim: int, mask: str) -> Record | None:
    """Return the record of the bf16 variant with this head dim and mask, if it is verified as it stands."""
    kind = NoMask if mask == "full" else CausalMask
    for variant in variants:
        spec: Spec = variant.spec
        if spec.problem.head_dim == head_dim and spec.problem.dtype == "bf16" and isinstance(spec.mask, kind):
            return verified(workspace, variant.stem)
    return None


def with_ladder(readme: str, table: str) -> str:
    """Return the README's text with `table` between its markers; UserError when the markers are not there."""
    return between(readme, "README.md", LADDER_BEGIN, table, LADDER_END)


def between(text: str, name: str, begin: str, written: str, end: str) -> str:
    """Return the text of the file `name` with `written` between its markers; UserError without these."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise UserError(f"{name} holds no {begin} ... {end}; put both where the table should stand")
    return f"{before}{begin}\n{written}{end}{after}"


# -- what is derived from the records


def _renderings(workspace: Workspace) -> Iterator[tuple[Path, str]]:
    """Yield every file that the records render to, with its text."""
    yield workspace.generated_dir / "EVIDENCE.md", render_markdown(workspace)
    readme = workspace.root / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    if LADDER_BEGIN in text or LADDER_END in text:  # the README of someone else's workspace need not have the table
        yield readme, with_ladder(text, ladder_table(workspace))
    from fa3gen import matrix, tuning_records  # which read the records by means of this module
    from fa3gen.tuning import report

    page = workspace.root / "docs" / "performance.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    if PEERS_BEGIN in text or PEERS_END in text:  # nor does it need this page
        written = report.peers(tuning_records.load_all(workspace))
        yield page, between(text, "docs/performance.md", PEERS_BEGIN, written, PEERS_END)
    if (workspace.root / matrix.DOCUMENT).exists():  # nor the matrix
        yield workspace.root / matrix.DOCUMENT, matrix.markdown(workspace)


def refresh(workspace: Workspace) -> list[Path]:
    """Write all files that the records render to anew; return what changed."""
    changed = []
    for path, text in _renderings(workspace):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
            changed.append(path)
    return changed


def check(workspace: Workspace) -> list[str]:
    """Return what is not as the records render it, and records of no generated stem; empty when all is well."""
    problems = []
    for path, text in _renderings(workspace):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            name, command = path.relative_to(workspace.root), "fa3gen verify --refresh-evidence"
            problems.append(f"{name} is not what the records in generated/evidence render to; run `{command}`")
    known = set(generated_stems(workspace))
    folders = (workspace.evidence_dir, workspace.evidence_dir / CPU_FOLDER)
    for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
        if path.stem not in known:
            problems.append(f"{path.relative_to(workspace.root)} is a record of no generated module; delete it")
    return problems
