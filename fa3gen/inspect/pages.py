"""The pages that the records render to: generated/EVIDENCE.md, the README's ladder, the peers and the matrix.

`refresh` writes them, `check` proves that they are as the records say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fa3gen.base.files import write_text
from fa3gen.base.markdown import between, speed, table
from fa3gen.design.ladder import RUNGS, generated_stems
from fa3gen.design.workspace import Workspace
from fa3gen.inspect import matrix
from fa3gen.measure.tuning import report
from fa3gen.records import tuning_records
from fa3gen.records.evidence import (
    CPU_FOLDER,
    SEQ_LENS,
    CpuRecord,
    CpuStatus,
    Record,
    Status,
    Verdict,
    cpu_status,
    status,
    verified,
)
from fa3gen.spec.model import CausalMask, NoMask, Spec
from fa3gen.verify.pipeline import CompileFacts
from fa3gen.verify.results import CaseResult, CpuCaseResult

LADDER_BEGIN, LADDER_END = "<!-- ladder:begin -->", "<!-- ladder:end -->"
PEERS_BEGIN, PEERS_END = "<!-- peers:begin -->", "<!-- peers:end -->"
REFRESH = "fa3gen verify --evidence"  # the command that writes records and renderings

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


def _share(cases: Sequence[CaseResult]) -> str:
    """Return the worst case's error as a share of its limit, of the maximum or of a block, whichever is worse."""
    shares = [
        max(case.o_error.max_abs / case.o_max_abs_limit, case.o_block_ratio or 0.0)
        for case in cases
        if case.o_error and case.o_error.max_abs is not None and case.o_max_abs_limit
    ]
    return f"{max(shares):.0%}" if len(shares) == len(cases) and shares else ""


def _worst_lse(cases: Sequence[CaseResult | CpuCaseResult]) -> float | None:
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


# -- what is derived from the records


def _renderings(workspace: Workspace) -> Iterator[tuple[Path, str]]:
    """Yield every file that the records render to, with its text."""
    yield workspace.generated_dir / "EVIDENCE.md", render_markdown(workspace)
    readme = workspace.root / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    if LADDER_BEGIN in text or LADDER_END in text:  # the README of someone else's workspace need not have the table
        yield readme, with_ladder(text, ladder_table(workspace))

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
