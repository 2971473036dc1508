"""One variant from its spec to a verdict: is the committed file what the spec renders to, does it compile with the
facts its plan predicts, and does it compute attention. `fa3gen.verify` does the last of the three on a GPU,
`fa3gen.cpu.verify` on the CPU model of sm_90a.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fa3gen import evidence, gpu, toolchain
from fa3gen.errors import UserError
from fa3gen.evidence import CompileFacts, CpuRecord, Record
from fa3gen.specfile import Variant
from fa3gen.workspace import Workspace

if TYPE_CHECKING:
    import torch

    from fa3gen.compiler import Compiled
    from fa3gen.cpu.verify import CpuReport
    from fa3gen.verify import Report


@dataclass(frozen=True)
class Stage:
    """How one step ended: `passed` None means that it was not done, and `detail` says why."""

    passed: bool | None
    detail: str = ""

    @property
    def word(self) -> str:
        """Return `passed`, `FAILED` or `NOT run`."""
        return {True: "passed", False: "FAILED", None: "NOT run"}[self.passed]


@dataclass(frozen=True)
class Verification:
    """All that is known about one variant after `fa3gen verify`.

    `source_sha256` is of the file as the first step found it; a record names that file and no later one.
    """

    variant: Variant
    render: Stage
    compile: Stage
    run: Stage
    facts: CompileFacts | None = None
    ptxas: str | None = None
    report: Report | CpuReport | None = None
    source_sha256: str | None = None

    @property
    def failed(self) -> bool:
        """Whether any step failed. A step that was not done has not failed."""
        return False in (self.render.passed, self.compile.passed, self.run.passed)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        stages = {"render": self.render, "compile": self.compile, "run": self.run}
        return {
            "stem": self.variant.stem,
            **{name: {"status": stage.word, "detail": stage.detail} for name, stage in stages.items()},
            "compile_facts": self.facts.model_dump() if self.facts else None,
            "report": self.report.as_dict() if self.report else None,
            "failed": self.failed,
        }


def check_render(variant: Variant, workspace: Workspace) -> Stage:
    """Render in memory and compare with the file in generated/."""
    from fa3gen.render import render_all

    (rendered,) = render_all([variant], workspace)
    name = f"generated/{rendered.path.name}"
    if rendered.change == "new":
        return Stage(False, f"{name} does not exist; run `fa3gen render {variant.stem}`")
    if rendered.change == "changed":
        text = f"{name} is not what {variant.source} renders to"
        return Stage(False, f"{text}; `fa3gen render --check` shows the difference")
    return Stage(True)


def compile_all(
    variants: Sequence[Variant], workspace: Workspace, on_done: Callable[[str], None], *, for_launch: bool = False
) -> dict[str, Compiled | UserError]:
    """Compile every variant whose file exists, several at a time, or take it from the cache; by stem.

    `for_launch`: so that `fa3gen.launch` finds each in the cache.
    """
    from fa3gen.compile_cache import cached_compile_many

    paths = {workspace.module_path(variant.stem): variant.stem for variant in variants}
    present = [path for path in paths if path.exists()]
    done = cached_compile_many(present, on_done=lambda path, outcome: on_done(path.stem), for_launch=for_launch)
    return {paths[path]: outcome for path, outcome in done.items()}


def check_compile(
    variant: Variant, outcome: Compiled | UserError | None
) -> tuple[Stage, CompileFacts | None, str | None]:
    """Return the verdict on a compile, the facts for the record, and the version of ptxas."""
    from fa3gen.census import compare
    from fa3gen.compiler import CompileError, analyse
    from fa3gen.plan import make_plan

    if outcome is None:
        return Stage(None, "not compiled: there is no file"), None, None
    if isinstance(outcome, UserError):
        return Stage(False, str(outcome)), None, None
    try:
        census = analyse(outcome).census
    except CompileError as error:  # PTX, SASS and cubin that do not fit together
        return Stage(False, str(error)), None, outcome.ptxas
    except UserError as missing:  # a disassembler that is not installed says nothing about the module
        return Stage(None, f"compiled, but its facts were not read: {missing}"), None, outcome.ptxas
    wgmma: Counter[str] = Counter()
    for kind, count in census.ptx.wgmma.items():
        wgmma[f"m{kind.m}n{kind.n}k{kind.k}{'_rs' if kind.a_source == 'registers' else ''}"] += count
    facts = CompileFacts(
        registers=census.registers,
        stack_bytes=census.stack,
        spills=census.spills,
        smem_bytes=census.smem,
        wgmma=dict(wgmma),
        serialized_wgmma=census.serialized_wgmma,
    )
    mismatches = compare(census, make_plan(variant).expectation)
    return Stage(not mismatches, "; ".join(str(mismatch) for mismatch in mismatches)), facts, outcome.ptxas


def speeds(modules: Mapping[str, tuple[Variant, Any]], device: torch.device) -> dict[str, dict[int, float]]:
    """Measure (variant, module) by stem at the lengths that a record holds; TFLOP/s by stem and length.

    Modules of one problem and mask take turns, so that their records can be compared with each other. What could not
    be run is left out.
    """
    import torch

    from fa3gen.bench import Competitor, CudaTimer, Runner, module_competitor, plan_cells

    def competitor(stem: str) -> Competitor:
        variant, module = modules[stem]
        return module_competitor(stem, variant.spec, lambda: module)

    cells = plan_cells([variant.spec for variant, _ in modules.values()], seq_lens=evidence.SEQ_LENS)
    runner = Runner([*map(competitor, modules)], CudaTimer(device), device, spend_ms=300, limit_ms=30_000)
    found: dict[str, dict[int, float]] = {stem: {} for stem in modules}
    for entry in runner.run(cells, on_progress=lambda text: None):
        for result in entry.results:
            if result.tflops is not None:
                found[result.competitor][entry.cell.seq_len] = result.tflops
    torch.cuda.empty_cache()  # k1 took gigabytes for its scores; also the first to notice a lost device
    torch.cuda.synchronize(device)
    return found


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
    from fa3gen.verify import FACTOR, LSE_TOLERANCE, Report

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
    from fa3gen.cpu.verify import EXECUTED_ON, SPREAD_LIMIT, CpuReport
    from fa3gen.verify import LSE_TOLERANCE

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
        "source_sha256": verification.source_sha256 or evidence.sha256(workspace.module_path(stem)),
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
