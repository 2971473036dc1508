"""The pages that specs, modules and records render to, which `fa3gen refresh` writes.

They are generated/EVIDENCE.md, the README's ladder, the peers, the matrix, the simulator's tables and the excerpts in
docs/ladder.md. `refresh` writes them, `check` proves that they are what they should be, `stale` names what only a run
of the modules renews.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fa3gen.base.files import write_text
from fa3gen.base.markdown import between, speed, table
from fa3gen.base.wording import counted
from fa3gen.design.ladder import generated_stems
from fa3gen.design.workspace import Workspace
from fa3gen.inspect import ladder_page, matrix
from fa3gen.inspect.ladder_page import ladder_table
from fa3gen.inspect.simulation import comparison as simulator_page
from fa3gen.measure.tuning import report
from fa3gen.records import tuning_records
from fa3gen.records.dispatch_table import rows_without_their_module
from fa3gen.records.evidence import (
    CPU_FOLDER,
    SEQ_LENS,
    TIMED,
    CpuRecord,
    CpuStatus,
    Record,
    Status,
    Verdict,
    cpu_status,
    status,
)
from fa3gen.run.dispatch import table_path
from fa3gen.verify.pipeline import CompileFacts
from fa3gen.verify.results import CaseResult, CpuCaseResult

LADDER_BEGIN, LADDER_END = "<!-- ladder:begin -->", "<!-- ladder:end -->"
PEERS_BEGIN, PEERS_END = "<!-- peers:begin -->", "<!-- peers:end -->"
REFRESH = "fa3gen refresh"
COMPARED = Path("docs/cpu_model.md")

# -- EVIDENCE.md


def evidence_page(workspace: Workspace) -> Path:
    """Where EVIDENCE.md lies; it need not exist yet."""
    return workspace.generated_dir / "EVIDENCE.md"


_INTRO = f"""# Evidence

Written by `{REFRESH}` and `fa3gen verify --evidence`; do not edit. A record counts only for the exact file it was
made with (SHA-256).

## On a GPU

Every module is run on {{cases}} named inputs (random, outlier, ragged, grouped heads, strided, masked rows) on poisoned
outputs and compared with float64 attention. It passes when O is within twice the error of PyTorch in the same precision
(plus half an ulp), for the maximum and for every block of 64 rows, and LSE within 1e-5 relative.
*O* and *PyTorch* are relative Frobenius errors on the case `random`; *of limit* is the worst case's share of what is
allowed; *LSE* is the worst case's relative error. TFLOP/s: forward, 16,384 tokens in all, heads x head dim = 2048;
{TIMED}.
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


def with_ladder(readme: str, table: str) -> str:
    """Return the README's text with `table` between its markers; UserError when the markers are not there."""
    return between(readme, "README.md", LADDER_BEGIN, table, LADDER_END)


# -- all pages


def _renderings(workspace: Workspace) -> Iterator[tuple[Path, str]]:
    """Yield every page with its text; what comes first is written even if a later one cannot be."""
    yield evidence_page(workspace), render_markdown(workspace)
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
    page = workspace.root / simulator_page.DOCUMENT
    if page.exists():  # nor the simulator's tables
        text = page.read_text(encoding="utf-8")
        yield page, simulator_page.with_blocks(text, simulator_page.blocks(workspace))
    yield from _compared(workspace)
    yield from ladder_page.files(workspace)  # nor the ladder


def _compared(workspace: Workspace) -> Iterator[tuple[Path, str]]:
    """The CPU model beside a GPU; a workspace need have neither the page nor the record."""
    path = workspace.root / COMPARED
    if path.is_file() and (workspace.evidence_dir / matrix.COMPARISON).is_file():
        from fa3gen.verify import comparison  # imports torch

        yield path, comparison.page(workspace)


def refresh(workspace: Workspace) -> list[Path]:
    """Write all pages anew; return what changed."""
    changed = []
    for path, text in _renderings(workspace):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
            changed.append(path)
    return changed


def check(workspace: Workspace) -> list[str]:
    """Return which pages are out of date, and records of no generated stem; empty when all is well."""
    problems = [problem for path, text in _renderings(workspace) if (problem := _outdated(workspace, path, text))]
    known = set(generated_stems(workspace))
    folders = (workspace.evidence_dir, workspace.evidence_dir / CPU_FOLDER)
    for path in (path for folder in folders for path in sorted(folder.glob("*.json"))):
        if path.stem not in known:
            problems.append(f"{path.relative_to(workspace.root)} is a record of no generated module; delete it")
    return problems


def check_evidence(workspace: Workspace) -> str | None:
    """Return why EVIDENCE.md is out of date; None where it is not, or there is none."""
    path = evidence_page(workspace)
    return _outdated(workspace, path, render_markdown(workspace)) if path.is_file() else None


def _outdated(workspace: Workspace, path: Path, text: str) -> str | None:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return None
    return f"{workspace.shown(path)} is not what specs, modules and records say; run `{REFRESH}`"


def stale(workspace: Workspace) -> list[str]:
    """Return what no page can renew, since it was measured with files that have changed, each with its command."""
    stems = generated_stems(workspace)
    on_gpu = [stem for stem in stems if status(workspace, stem)[0] is Status.STALE]
    on_cpu = [stem for stem in stems if cpu_status(workspace, stem)[0] is CpuStatus.STALE]
    runs = (
        ("on a GPU", on_gpu, "on a Hopper GPU: fa3gen verify --evidence"),
        ("on the CPU model", on_cpu, "fa3gen verify --on cpu --evidence"),
    )
    found = []
    for where, changed, command in runs:
        if changed:
            modules = counted(len(changed), "module")
            found.append(
                f"{modules} changed since verified {where}; {' '.join([command, *_named(workspace, changed)])}"
            )
    table = table_path(workspace)
    return found + (rows_without_their_module(workspace) if table.is_file() else [])


def _named(workspace: Workspace, changed: Sequence[str]) -> list[str]:
    """The shortest list of names for some modules: none for all of them, a spec for all of its own."""
    names: list[str] = []
    complete = True
    for spec_file in workspace.load_all():
        stems = [variant.stem for variant in spec_file.variants]
        whole = set(stems) <= set(changed)
        names += [spec_file.stem] if whole else [stem for stem in stems if stem in changed]
        complete = complete and whole
    return [] if complete else names
