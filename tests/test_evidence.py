"""Evidence records: what is written is what is read, an older file's record does not count, tables are renderings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from fa3gen.base import files
from fa3gen.base.errors import UserError
from fa3gen.design.workspace import Workspace
from fa3gen.inspect import ladder_page, pages
from fa3gen.inspect.pages import LADDER_BEGIN, LADDER_END
from fa3gen.records import evidence
from fa3gen.records.evidence import CpuRecord, CpuStatus, Record, Status
from fa3gen.records.recording import cpu_record_of
from fa3gen.run.gpu import Environment, environment
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import SpecFile, Variant
from fa3gen.verify.on_cpu import CpuReport
from fa3gen.verify.pipeline import Stage, Verification
from fa3gen.verify.results import Check, CpuCaseResult, Errors

REPOSITORY = Path(__file__).parent.parent


def variant_of(stem: str, head_dim: int, mask: str) -> Variant:
    spec = {
        "problem": {"head_dim": head_dim},
        "mask": mask,
        "tile": {"q": 64, "kv": 64, "threads": 128},
        "load": {"engine": "sync"},
        "qk": {"engine": "scalar"},
        "pv": {"engine": "scalar"},
        "handoff": {"through": "global_f32"},
    }
    rung = "k4_2" if stem.startswith("k4_2") else stem.partition("_")[0]
    return Variant(
        stem=stem, spec=Forward.model_validate(spec), source=Path(f"specs/{rung}.yaml"), summary=f"the rung {rung}"
    )


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Two rungs; three generated files, and a README with a place for the table."""
    stems = [("k1_d64", 64, "none"), ("k4_2_d64", 64, "none"), ("k4_2_d64_causal", 64, "causal")]
    variants = [variant_of(*facts) for facts in stems]
    files = [
        SpecFile(path=Path("specs/k4_2.yaml"), stem="k4_2", summary="", variants=tuple(variants[1:])),
        SpecFile(path=Path("specs/k1.yaml"), stem="k1", summary="", variants=tuple(variants[:1])),
    ]
    monkeypatch.setattr(Workspace, "load_all", lambda self: files)
    (tmp_path / "specs").mkdir()
    (tmp_path / "generated" / "evidence").mkdir(parents=True)
    for variant in variants:
        (tmp_path / "generated" / f"{variant.stem}.py").write_text(f"# {variant.stem}\n")
    (tmp_path / "README.md").write_text(f"# Title\n\n{LADDER_BEGIN}\n{LADDER_END}\n\nThe end.\n")
    return Workspace.find(tmp_path)


def record_of(workspace: Workspace, stem: str, **changes: Any) -> Record:
    case = {
        "name": "random",
        "shape": "b2 512x512 h4/4",
        "o_error": {"max_abs": 0.002, "relative": 0.00212345678},
        "o_yardstick": {"max_abs": 0.003, "relative": 0.0031},
        "o_max_abs_limit": 0.008,
        "o_block_ratio": 0.5,
        "lse_error": {"max_abs": 1e-6, "relative": 3e-7},
        "lse_yardstick": {"max_abs": 0.01, "relative": 0.001},
        "failures": [],
    }
    fields = {
        "stem": stem,
        "source_sha256": files.sha256(workspace.module_path(stem)),
        "date": "2000-01-02",
        "passed": True,
        "failures": [],
        "gpu": "A made-up GPU",
        "driver": "1.2.3",
        "cuda_driver": "13.0",
        "torch": "2.0",
        "dsl": "4.8.1",
        "ptxas": "13.3",
        "python": "3.12.3",
        "seed": 5,
        "o_factor": 2.0,
        "lse_tolerance": 1e-5,
        "cases": [case],
        "checks": [{"name": "empty batch", "passed": True, "detail": ""}],
        "tflops": {"4096": 123.4, "16384": 7.891},
        "compile": {
            "registers": 168,
            "stack_bytes": 0,
            "spills": 0,
            "smem_bytes": 4096,
            "wgmma": {"m64n128k16": 8},
            "serialized_wgmma": False,
        },
    }
    return Record.model_validate({**fields, **changes})


def test_a_record_is_read_as_it_was_written(workspace: Workspace) -> None:
    path = evidence.write(workspace, record_of(workspace, "k1_d64"))
    assert path == workspace.root / "generated" / "evidence" / "k1_d64.json"
    record = evidence.read(workspace, "k1_d64")
    assert record is not None
    assert evidence.dumps(record) == path.read_text()
    assert record.cases[0].o_error is not None and record.cases[0].o_error.relative == 0.002123  # four digits
    keys = list(json.loads(path.read_text()))
    assert keys == sorted(keys)


def test_a_module_is_verified_only_by_a_record_of_the_present_file(workspace: Workspace) -> None:
    assert evidence.status(workspace, "k1_d64") == (Status.NONE, None)
    evidence.write(workspace, record_of(workspace, "k1_d64"))
    assert evidence.status(workspace, "k1_d64")[0] is Status.VERIFIED
    workspace.module_path("k1_d64").write_text("# changed\n")
    assert evidence.status(workspace, "k1_d64")[0] is Status.STALE
    workspace.module_path("k1_d64").unlink()
    assert evidence.status(workspace, "k1_d64")[0] is Status.STALE


def test_a_failing_run_is_recorded_and_shown_as_failing(workspace: Workspace) -> None:
    record = record_of(workspace, "k1_d64", passed=False, failures=["ragged: O has NaN"])
    evidence.write(workspace, record)
    text = pages.render_markdown(workspace)
    assert evidence.status(workspace, "k1_d64")[0] is Status.FAILED
    assert "| `k1_d64` | FAILED |" in text
    assert "### Failures\n\n- `k1_d64`: ragged: O has NaN\n" in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not an evidence record"),
        ('{"stem": "k1_d64"}', "source_sha256: Field required"),
    ],
)
def test_a_broken_record_is_the_users_to_mend(workspace: Workspace, text: str, said: str) -> None:
    evidence.record_path(workspace, "k1_d64").write_text(text)
    with pytest.raises(UserError, match="run `fa3gen verify k1_d64 --evidence`") as raised:
        evidence.read(workspace, "k1_d64")
    assert said in str(raised.value)


def test_unknown_keys_and_foreign_records_are_refused(workspace: Workspace) -> None:
    fields = record_of(workspace, "k1_d64").model_dump()
    path = evidence.record_path(workspace, "k1_d64")
    path.write_text(json.dumps({**fields, "host": "somewhere"}))
    with pytest.raises(UserError, match="host: Extra inputs"):
        evidence.read(workspace, "k1_d64")
    path.write_text(json.dumps({**fields, "stem": "k4_2_d64"}))
    with pytest.raises(UserError, match="is a record of k4_2_d64"):
        evidence.read(workspace, "k1_d64")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"failures": ["ragged: O has NaN"]}, "passed is true, but"),
        ({"cases": []}, "passed is true, but"),
        ({"checks": [{"name": "empty batch", "passed": False, "detail": "raised"}]}, "passed is true, but"),
        ({"passed": False}, "passed is false, but"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(workspace: Workspace, changes: dict[str, Any], said: str) -> None:
    fields = {**record_of(workspace, "k1_d64").model_dump(), **changes}
    evidence.record_path(workspace, "k1_d64").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=said):
        evidence.read(workspace, "k1_d64")


def test_the_table_has_a_row_for_every_module_in_the_order_of_the_ladder(workspace: Workspace) -> None:
    evidence.write(workspace, record_of(workspace, "k4_2_d64"))
    evidence.write(workspace, record_of(workspace, "k4_2_d64_causal", source_sha256="0" * 64))
    rows = [line for line in pages.render_markdown(workspace).splitlines() if line.startswith("| `")]
    assert rows[0].startswith("| `k1_d64` | not verified on a GPU |")
    assert rows[1] == (
        "| `k4_2_d64` | verified | 2.1e-03 | 3.1e-03 | 50% | 3.0e-07 | 123 | 7.9 | 168 | 0 | 4096 | 8 m64n128k16 | no "
        "| A made-up GPU, driver 1.2.3 (CUDA 13.0) | DSL 4.8.1, ptxas 13.3, torch 2.0 | 2000-01-02 |"
    )
    assert rows[2].startswith("| `k4_2_d64_causal` | not verified on a GPU (record is of an older file) |")
    assert "1 of 3 modules are verified on a GPU." in pages.render_markdown(workspace)
    assert len({row.count("|") for row in rows}) == 1


def test_the_ladder_shows_verified_speeds_only(workspace: Workspace) -> None:
    evidence.write(workspace, record_of(workspace, "k4_2_d64"))
    evidence.write(workspace, record_of(workspace, "k4_2_d64_causal", passed=False, failures=["x"]))
    lines = ladder_page.ladder_table(workspace).splitlines()
    assert lines[0].startswith("| rung | d64 full 4k | d64 full 16k | d64 causal 4k |")
    assert lines[2] == "| `k1` | – | – | – | – | – | – | – | – |"
    assert lines[3] == "| `k4_2` | 123 | 7.9 | – | – | – | – | – | – |"
    assert (
        "Measured one launch at a time, without a CUDA graph, L2 overwritten before: A made-up GPU, 2000-01-02."
        in lines[-1]
    )


def test_refresh_writes_the_renderings_and_check_proves_them(workspace: Workspace) -> None:
    assert len(pages.check(workspace)) == 2  # neither is there yet
    evidence.write(workspace, record_of(workspace, "k4_2_d64"))
    assert {path.name for path in pages.refresh(workspace)} == {"EVIDENCE.md", "README.md"}
    assert pages.check(workspace) == [] and pages.refresh(workspace) == []
    readme = (workspace.root / "README.md").read_text()
    assert readme.startswith("# Title\n") and readme.endswith("\nThe end.\n") and "| `k4_2` | 123 |" in readme


def test_check_sees_edits_and_records_of_nothing(workspace: Workspace) -> None:
    pages.refresh(workspace)
    markdown = workspace.root / "generated" / "EVIDENCE.md"
    markdown.write_text(markdown.read_text().replace("0 of 3", "3 of 3"))
    (problem,) = pages.check(workspace)
    assert (
        problem.startswith("generated/EVIDENCE.md is not what specs, modules and records say")
        and "`fa3gen refresh`" in problem
    )
    pages.refresh(workspace)
    evidence.record_path(workspace, "k9").write_text("{}")
    assert pages.check(workspace) == ["generated/evidence/k9.json is a record of no generated module; delete it"]


def test_a_new_record_makes_the_renderings_drift(workspace: Workspace) -> None:
    pages.refresh(workspace)
    evidence.write(workspace, record_of(workspace, "k4_2_d64"))
    assert len(pages.check(workspace)) == 2


def test_half_a_pair_of_markers_is_an_error(workspace: Workspace) -> None:
    (workspace.root / "README.md").write_text(f"{LADDER_END} {LADDER_BEGIN}")
    with pytest.raises(UserError, match="put both where the table should stand"):
        pages.refresh(workspace)


HERE = Environment("A made-up GPU", "1.2.3", "13.0", "2.0", "4.8.1", None, "3.12.3")


def test_speeds_go_into_a_present_record_only(workspace: Workspace) -> None:
    assert not evidence.set_tflops(workspace, "k1_d64", {4096: 1.0}, HERE)
    evidence.write(workspace, record_of(workspace, "k1_d64"))
    assert evidence.set_tflops(workspace, "k1_d64", {4096: 200.0, 8192: 5.0}, HERE)
    record = evidence.read(workspace, "k1_d64")
    assert record is not None and record.tflops == {"4096": 200.0, "16384": 7.891}
    workspace.module_path("k1_d64").write_text("# changed\n")
    assert not evidence.set_tflops(workspace, "k1_d64", {4096: 300.0}, HERE)


@pytest.mark.parametrize("other", [{"gpu": "Another GPU"}, {"dsl": "4.8.2"}, {"torch": "2.1"}, {"gpu": None}])
def test_speeds_of_another_machine_do_not_go_into_a_record(workspace: Workspace, other: dict[str, Any]) -> None:
    path = evidence.write(workspace, record_of(workspace, "k1_d64"))
    before = path.read_text()
    assert not evidence.set_tflops(workspace, "k1_d64", {4096: 200.0}, dataclasses.replace(HERE, **other))
    assert path.read_text() == before


def test_what_a_run_found_becomes_a_record_without_paths(workspace: Workspace) -> None:
    from fa3gen.records.recording import record_of
    from fa3gen.verify.on_gpu import Report
    from fa3gen.verify.pipeline import Stage, Verification
    from fa3gen.verify.results import CaseResult

    case = CaseResult(
        name="ragged",
        shape="b1",
        o_error=Errors(None, None),
        o_yardstick=Errors(0.1, 0.1),
        o_max_abs_limit=0.2,
        o_block_ratio=None,
        lse_error=None,
        lse_yardstick=None,
        failures=(f"raised OSError: {workspace.root}/generated/k1_d64.py is broken",),
    )
    report = Report("k1_d64", "A made-up GPU", 3, (case,), (Check("empty batch", True),))
    entry = Verification(variant_of("k1_d64", 64, "none"), Stage(True), Stage(True), Stage(False), report=report)
    evidence.write(workspace, record_of(entry, workspace))
    assert evidence.set_tflops(
        workspace, "k1_d64", {4096: 2.5}, dataclasses.replace(environment(), gpu="A made-up GPU")
    )
    record = evidence.read(workspace, "k1_d64")
    assert record is not None and not record.passed and record.seed == 3 and record.tflops == {"4096": 2.5}
    assert record.failures == ["ragged: raised OSError: generated/k1_d64.py is broken"]
    assert str(workspace.root) not in evidence.record_path(workspace, "k1_d64").read_text()
    assert evidence.status(workspace, "k1_d64")[0] is Status.FAILED


def test_a_run_on_the_cpu_makes_no_record(workspace: Workspace) -> None:
    from fa3gen.records.recording import record_of
    from fa3gen.verify.on_gpu import Report

    for report in (Report("k1_d64", "cpu", 3, (), ()), CPU_REPORT):
        with pytest.raises(UserError, match="on the CPU.*run `fa3gen verify k1_d64 --evidence` on a Hopper GPU"):
            record_of(entry_with(report), workspace)


# -- the CPU model

CPU_CASE = CpuCaseResult("ragged", "b1 7x9 h1/1", Errors(0.002, 0.001), 0.71, 0.8, Errors(1e-7, 2e-7), ())
CPU_REPORT = CpuReport("k1_d64", 5, ("by warpgroup", "by warp"), 0.812, (CPU_CASE,), (Check("empty batch", True),))


def entry_with(report: Any) -> Verification:
    return Verification(variant_of("k1_d64", 64, "none"), Stage(True), Stage(True), Stage(True), report=report)


def cpu_record(workspace: Workspace, **changes: Any) -> CpuRecord:
    return cpu_record_of(entry_with(CPU_REPORT), workspace).model_copy(update=changes)


def test_a_record_of_the_model_is_of_another_kind_in_another_place(workspace: Workspace) -> None:
    path = evidence.write_cpu(workspace, cpu_record(workspace))
    assert path == workspace.root / "generated" / "evidence" / "cpu_model" / "k1_d64.json"
    document = json.loads(path.read_text())
    assert document["executed_on"] == "CPU model of sm_90a" and "gpu" not in document and "tflops" not in document
    assert evidence.cpu_status(workspace, "k1_d64")[0] is CpuStatus.PASSED
    assert evidence.status(workspace, "k1_d64") == (Status.NONE, None)
    workspace.module_path("k1_d64").write_text("# changed\n")
    assert evidence.cpu_status(workspace, "k1_d64")[0] is CpuStatus.STALE


def test_a_record_of_the_model_is_not_taken_for_one_of_a_gpu(workspace: Workspace) -> None:
    record = cpu_record(workspace)
    with pytest.raises(TypeError, match="CpuRecord is no record of a GPU"):
        evidence.write(workspace, record)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Record is no record of the CPU model"):
        evidence.write_cpu(workspace, record_of(workspace, "k1_d64"))  # type: ignore[arg-type]
    evidence.record_path(workspace, "k1_d64").write_text(evidence.dumps(record))  # by hand, in the other's place
    with pytest.raises(UserError, match="is not an evidence record"):
        evidence.status(workspace, "k1_d64")


@pytest.mark.parametrize("name", ["CPU model of sm_90a", "cpu", "CPU model of sm_90a (not a GPU result)"])
def test_a_gpu_record_cannot_name_the_model(workspace: Workspace, name: str) -> None:
    with pytest.raises(ValidationError, match="is no GPU"):
        record_of(workspace, "k1_d64", gpu=name)


def test_a_gpus_report_is_no_run_of_the_model(workspace: Workspace) -> None:
    from fa3gen.verify.on_gpu import Report

    with pytest.raises(UserError, match="k1_d64 was run on A made-up GPU, not on the CPU model of sm_90a"):
        cpu_record_of(entry_with(Report("k1_d64", "A made-up GPU", 3, (), ())), workspace)


@pytest.mark.parametrize("changes", [{"failures": ["x"]}, {"cases": []}, {"executed_on": "NVIDIA H200"}])
def test_a_record_of_the_model_that_contradicts_itself_is_refused(
    workspace: Workspace, changes: dict[str, Any]
) -> None:
    path = evidence.write_cpu(workspace, cpu_record(workspace))
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UserError, match="is not a record of the CPU model.*run `fa3gen verify k1_d64 --on cpu --ev"):
        evidence.read_cpu(workspace, "k1_d64")


def test_the_sections_are_apart_and_the_ladder_shows_nothing_of_the_model(workspace: Workspace) -> None:
    assert "CPU" not in pages.render_markdown(workspace)
    evidence.write(workspace, record_of(workspace, "k4_2_d64"))
    ladder = ladder_page.ladder_table(workspace)
    evidence.write_cpu(workspace, cpu_record(workspace))
    digest = files.sha256(workspace.module_path("k4_2_d64"))
    failed = {"stem": "k4_2_d64", "source_sha256": digest, "passed": False, "failures": ["ragged: deadlock"]}
    evidence.write_cpu(workspace, cpu_record(workspace, **failed))
    on_gpu, on_cpu = pages.render_markdown(workspace).split("## On the CPU model of sm_90a")
    assert "| `k1_d64` | not verified on a GPU |" in on_gpu and "1 of 3 modules are verified on a GPU." in on_gpu
    assert "CPU" not in on_gpu and "NVIDIA" not in on_cpu and "No GPU took part" in on_cpu
    assert "| `k1_d64` | passed on the CPU model | 1 | 2 | 71% | 0.81 | 2.0e-07 | DSL " in on_cpu
    assert "| `k4_2_d64_causal` | not run |" in on_cpu and "- `k4_2_d64`: ragged: deadlock" in on_cpu
    assert "verified" not in on_cpu
    assert ladder_page.ladder_table(workspace) == ladder


def test_check_sees_records_of_the_model_of_nothing(workspace: Workspace) -> None:
    pages.refresh(workspace)
    evidence.cpu_record_path(workspace, "k9").parent.mkdir()
    evidence.cpu_record_path(workspace, "k9").write_text("{}")
    assert pages.check(workspace) == [
        "generated/evidence/cpu_model/k9.json is a record of no generated module; delete it"
    ]


def test_a_file_that_changes_during_the_run_leaves_a_stale_record(workspace: Workspace) -> None:
    from fa3gen.records.recording import record_of
    from fa3gen.verify.pipeline import Stage, Verification

    digest = files.sha256(workspace.module_path("k1_d64"))
    variant = variant_of("k1_d64", 64, "none")
    entry = Verification(variant, Stage(True), Stage(False, "spills: 3"), Stage(None), source_sha256=digest)
    workspace.module_path("k1_d64").write_text("# changed\n")
    evidence.write(workspace, record_of(entry, workspace))
    assert evidence.status(workspace, "k1_d64")[0] is Status.STALE


def test_a_failed_compile_or_a_lost_device_makes_a_failing_record(workspace: Workspace) -> None:
    from fa3gen.records.recording import record_of
    from fa3gen.verify.pipeline import Stage, Verification

    entry = Verification(variant_of("k1_d64", 64, "none"), Stage(True), Stage(False, "spills: 3"), Stage(None))
    record = record_of(entry, workspace, failures=["long: did not end in 120 s"])
    assert not record.passed and record.failures == ["long: did not end in 120 s", "compile: spills: 3"]


def test_the_committed_pages_are_what_specs_modules_and_records_say() -> None:
    assert pages.check(Workspace.find(REPOSITORY)) == []


def test_the_readme_has_a_place_for_the_ladder() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert LADDER_BEGIN in text and LADDER_END in text
