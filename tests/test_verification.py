"""`fa3gen verify` around the numerics: drift, missing files, lost devices, launches that never end, its last line."""

from __future__ import annotations

import dataclasses
import json
import os
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rendering import STEMS
from rich.console import Console

from fa3gen.base.errors import UserError
from fa3gen.cli import verify as command
from fa3gen.cpu.findings import OutsideModel
from fa3gen.design.workspace import Workspace
from fa3gen.records import evidence
from fa3gen.run import gpu
from fa3gen.spec.model import Forward, Spec
from fa3gen.spec.specfile import Variant
from fa3gen.verify import on_gpu
from fa3gen.verify.grouping import grouped
from fa3gen.verify.on_cpu import CpuReport
from fa3gen.verify.on_gpu import Report
from fa3gen.verify.pipeline import Stage, Verification, check_compile, check_render
from fa3gen.verify.results import CaseResult, Check, CpuCaseResult, Errors
from fa3gen.verify.runner import DeviceLost

SPEC = Forward.model_validate(
    {
        "problem": {"head_dim": 64},
        "tile": {"q": 64, "kv": 64, "threads": 128},
        "load": {"engine": "sync"},
        "qk": {"engine": "scalar"},
        "pv": {"engine": "scalar"},
        "handoff": {"through": "global_f32"},
    }
)
VARIANTS = [Variant(stem=stem, spec=SPEC, source=Path("specs/k.yaml"), summary="k") for stem in ("a", "b", "c")]
ERRORS = Errors(0.0, 0.0)
CASE = CaseResult("random", "b1 1x1 h1/1", ERRORS, ERRORS, 1e-3, 0.0, ERRORS, ERRORS, ())
REPORT = Report("a", "A made-up GPU", 1, (CASE,), ())


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "specs").mkdir()
    (tmp_path / "generated").mkdir()
    for variant in VARIANTS:
        text = f"NAME = '{variant.stem}'\n\n\ndef compile_for_sm90a(options):\n    raise AssertionError\n"
        (tmp_path / "generated" / f"{variant.stem}.py").write_text(text)
    return Workspace.find(tmp_path)


def unrun() -> list[Verification]:
    return [Verification(variant, Stage(True), Stage(True), Stage(None)) for variant in VARIANTS]


def session(workspace: Workspace, *, evidence: bool = False, timeout: float = 60.0) -> Any:
    return command._Session(workspace, Console(stderr=True), torch.device("cpu"), evidence, 1, timeout)


def test_a_committed_file_is_compared_with_its_rendering(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    text = workspace.module_path("a").read_text()
    monkeypatch.setattr("fa3gen.generate.render.render_variant", lambda variant, workspace, **_: text)
    assert check_render(VARIANTS[0], workspace) == Stage(True)
    workspace.module_path("a").write_text("NAME = 'by hand'\n")
    assert check_render(VARIANTS[0], workspace).detail == (
        "generated/a.py is not what specs/k.yaml renders to; `fa3gen render --check` shows the difference"
    )
    workspace.module_path("a").write_text(text, newline="\r\n")  # render --check calls this drift as well
    assert check_render(VARIANTS[0], workspace).passed is False
    workspace.module_path("a").unlink()
    missing = check_render(VARIANTS[0], workspace)
    assert missing.passed is False and missing.detail == "generated/a.py does not exist; run `fa3gen render a`"


def test_a_compile_error_fails_and_a_missing_file_is_not_compiled() -> None:
    assert check_compile(VARIANTS[0], UserError("no such layout"))[0] == Stage(False, "no such layout")
    assert check_compile(VARIANTS[0], None)[0].passed is None


def test_a_lost_device_ends_the_session_and_says_what_was_not_run(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(module: Any, spec: Spec, device: Any, *, stem: str, seed: Any, on_case: Any) -> Report:
        assert stem == module.NAME
        on_case("ragged")
        if stem == "b":
            raise DeviceLost("illegal memory access")
        return REPORT

    monkeypatch.setattr(on_gpu, "verify_module", run)
    a, b, c = session(workspace).run_all(unrun())
    assert (a.run.passed, b.run.passed, c.run.passed) == (True, False, None)
    assert b.run.detail == "ragged: the launch left the GPU unusable: illegal memory access"
    assert "b left the GPU unusable" in c.run.detail and not c.failed
    assert command._verdict([a, b, c], on_gpu=True) == "1 of 3 modules verified on A made-up GPU, 1 failed, 1 NOT run."


def test_without_room_on_the_gpu_a_module_is_not_run_and_the_others_are(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it keep the memory that it had by then from those that need it."""
    tensors: list[weakref.ref[torch.Tensor]] = []
    left: list[bool] = []

    def run(module: Any, spec: Spec, device: Any, *, stem: str, seed: Any, on_case: Any) -> Report:
        on_case("ragged")
        if stem == "b":
            tensor = torch.zeros(1)
            tensors.append(weakref.ref(tensor))
            raise torch.OutOfMemoryError("tried to allocate 4 GiB")
        return REPORT

    monkeypatch.setattr(on_gpu, "verify_module", run)
    monkeypatch.setattr("fa3gen.measure.record_speeds.speeds", no_speeds)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append(tensors[0]() is not None))
    a, b, c = session(workspace, evidence=True).run_all(unrun())
    assert (a.run.passed, b.run.passed, c.run.passed) == (True, None, True)
    assert b.run.detail == (
        "ragged: no room on the GPU; run it again when less else is on it: OutOfMemoryError: tried to allocate 4 GiB"
    )
    assert evidence.status(workspace, "b")[0] is evidence.Status.NONE
    assert left == [False]


def test_without_room_for_large_problems_speeds_are_missing(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(modules: Any, device: Any) -> dict[str, dict[int, float]]:
        raise torch.OutOfMemoryError("tried to allocate 4 GiB")

    monkeypatch.setattr(on_gpu, "verify_module", lambda *args, **keywords: REPORT)
    monkeypatch.setattr("fa3gen.measure.record_speeds.speeds", no_room)
    found = session(workspace, evidence=True).run_all(unrun())
    assert {each.run.passed for each in found} == {None}
    assert all("timing large problems: no room on the GPU" in each.run.detail for each in found)


def test_a_lost_device_is_recorded_as_a_failure(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, on_case: Any, **keywords: Any) -> Report:
        on_case("ragged")
        raise DeviceLost("illegal memory access")

    monkeypatch.setattr(on_gpu, "verify_module", run)
    session(workspace, evidence=True).run_all(unrun()[:1])
    state, record = evidence.status(workspace, "a")
    assert state is evidence.Status.FAILED and record is not None
    assert record.failures == ["ragged: the launch left the GPU unusable: illegal memory access"]


def no_speeds(modules: Any, device: Any) -> dict[str, dict[int, float]]:
    return {stem: {} for stem in modules}


def test_a_launch_that_never_ends_is_recorded_and_ends_the_process(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []

    def run(*args: Any, on_case: Any, **keywords: Any) -> Report:
        on_case("wrap")
        patience = time.monotonic() + 20
        while not codes and time.monotonic() < patience:
            time.sleep(0.01)
        return REPORT

    monkeypatch.setattr(on_gpu, "verify_module", run)
    monkeypatch.setattr(os, "_exit", codes.append)
    watched = session(workspace, evidence=True, timeout=0.05)
    monkeypatch.setattr(evidence, "write", _only_first(evidence.write))
    monkeypatch.setattr("fa3gen.measure.record_speeds.speeds", no_speeds)
    watched.run_all(unrun()[:1])
    assert codes == [1]
    _, record = evidence.status(workspace, "a")
    assert record is not None and record.failures == ["wrap: did not end in 0.05 s (a pipeline that waits for ever?)"]
    assert "a: wrap: did not end in 0.05 s" in capfd.readouterr().err


def test_a_launch_that_never_ends_ends_the_process_though_it_cannot_be_recorded(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []

    def run(*args: Any, on_case: Any, **keywords: Any) -> Report:
        patience = time.monotonic() + 20
        while not codes and time.monotonic() < patience:
            time.sleep(0.01)
        return REPORT

    def full(workspace: Workspace, record: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(on_gpu, "verify_module", run)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(evidence, "write", full)
    monkeypatch.setattr("fa3gen.measure.record_speeds.speeds", no_speeds)
    with pytest.raises(OSError, match="no space left"):
        session(workspace, evidence=True, timeout=0.05).run_all(unrun()[:1])
    assert codes == [1]
    said = capfd.readouterr().err
    assert "did not end in 0.05 s" in said and "a: no record was written: no space left on device" in said


def test_speeds_of_one_problem_are_measured_together(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """When all have been checked, and only those that passed: records are of one run, and can be compared."""
    asked = []

    def speeds(modules: Any, device: Any) -> dict[str, dict[int, float]]:
        asked.append([module.NAME for _, module in modules.values()])
        return {stem: {4096: 100.0 + len(stem), 512: 1.0} for stem in modules}

    def run(module: Any, *args: Any, **keywords: Any) -> Report:
        failed = Check("made up", False, "no") if module.NAME == "b" else None
        return dataclasses.replace(REPORT, checks=(failed,) if failed else ())

    monkeypatch.setattr("fa3gen.measure.record_speeds.speeds", speeds)
    monkeypatch.setattr(on_gpu, "verify_module", run)
    around = gpu.environment()
    monkeypatch.setattr(gpu, "environment", lambda ptxas=None: dataclasses.replace(around, gpu="A made-up GPU"))
    session(workspace, evidence=True).run_all(unrun())
    assert asked == [["a", "c"]]
    records = {stem: evidence.status(workspace, stem)[1] for stem in "abc"}
    found = {stem: record.tflops for stem, record in records.items() if record is not None}
    assert found == {"a": {"4096": 101.0}, "b": {}, "c": {"4096": 101.0}}


def test_a_device_lost_while_timing_fails_all_that_were_timed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speeds(modules: Any, device: Any) -> dict[str, dict[int, float]]:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr("fa3gen.measure.record_speeds.speeds", speeds)
    failed = Check("made up", False, "no")
    reports = {"a": REPORT, "b": dataclasses.replace(REPORT, checks=(failed,)), "c": REPORT}
    monkeypatch.setattr(on_gpu, "verify_module", lambda *args, stem, **keywords: reports[stem])
    a, b, c = session(workspace, evidence=True).run_all(unrun())
    said = "timing large problems: a launch of a or c left the GPU unusable: illegal memory access"
    assert (a.run, c.run) == (Stage(False, said), Stage(False, said)) and b.run.detail != said
    for stem in ("a", "c"):
        state, record = evidence.status(workspace, stem)
        assert state is evidence.Status.FAILED and record is not None and record.failures == [said]


def test_a_module_that_cannot_be_imported_fails_and_the_others_run(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.module_path("b").write_text("def broken(:\n")
    monkeypatch.setattr(on_gpu, "verify_module", lambda *args, **keywords: REPORT)
    monkeypatch.setattr("fa3gen.measure.record_speeds.speeds", no_speeds)
    a, b, c = session(workspace, evidence=True).run_all(unrun())
    assert (a.run.passed, b.run.passed, c.run.passed) == (True, False, True)
    assert b.run.detail.startswith("cannot be imported: SyntaxError: ")
    assert evidence.status(workspace, "b")[0] is evidence.Status.FAILED


def _only_first(write: Any) -> Any:
    """The process would have ended after the first record; here it goes on, so the second must not be written."""
    written: list[Any] = []

    def once(workspace: Workspace, record: Any) -> Any:
        if not written:
            written.append(write(workspace, record))
        return written[0]

    return once


def test_a_module_that_runs_but_fails_to_compile_as_planned_is_not_verified() -> None:
    entry = Verification(VARIANTS[0], Stage(True), Stage(False, "spills: 4"), Stage(True), report=REPORT)
    assert entry.failed
    assert command._verdict([entry], on_gpu=True) == "0 of 1 module verified on A made-up GPU, 1 failed."


def test_the_case_table_shows_errors_beside_the_yardstick() -> None:
    errors = Errors(1e-3, 2e-3)
    result = CaseResult("ragged", "b1 7x9 h1/1", errors, errors, 4e-3, 0.5, errors, errors, ("O is off",))
    checks = (Check("empty batch", True), Check("runs on the current stream", None))
    report = Report("a", "A made-up GPU", 77, (result,), checks)
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed with the process
    console.print(command._case_table(Verification(VARIANTS[0], Stage(True), Stage(True), Stage(False), report=report)))
    text = console.export_text()
    assert "a on A made-up GPU, seed 77" in text and "FAILED" in text and "50%" in text
    assert "1.00e-03" in text and "4.00e-03" in text and "NOT run" in text


def test_alike_failures_are_said_once() -> None:
    """Hazards of one kind at one instruction, and what differs by numbers only; each with its cases, in order."""
    fence = "by warp{}: missing fence.proxy.async: shared byte {} at CTA ({}, 0, 0), warp {}, PTX line {}: x, a.py:9"
    cases = [
        dataclasses.replace(CPU_CASE, name="one", failures=(fence.format("", 0, 0, 0, 7), "O is off by 3 at row 1")),
        dataclasses.replace(CPU_CASE, name="two", failures=(fence.format("group", 64, 1, 3, 7),)),
        dataclasses.replace(
            CPU_CASE, name="three", failures=(fence.format("", 0, 0, 0, 8), "O is off by 4.5e-3 at row 2")
        ),
    ]
    checks = (
        Check("empty batch", False, "raised: " + fence.format("", 0, 0, 0, 7)),
        Check("x", None, "y"),
    )
    found = grouped(dataclasses.replace(CPU_REPORT, cases=tuple(cases), checks=checks))
    assert [(group.text, group.names) for group in found] == [
        (fence.format("", 0, 0, 0, 7), ("one", "two", "empty batch")),
        ("O is off by 3 at row 1", ("one", "three")),
        (fence.format("", 0, 0, 0, 8), ("three",)),
    ]


def test_a_failing_run_says_each_hazard_once(on_the_model: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    cases = tuple(dataclasses.replace(BAD_CASE, name=f"case{i}") for i in range(13))
    on_the_model["a"] = dataclasses.replace(BAD_REPORT, cases=cases)
    assert run_command() == 1
    lines = capsys.readouterr().out.splitlines()
    first = lines.index("a: run FAILED: 1 failure")
    names = ", ".join(case.name for case in cases)
    assert lines[first + 1 : first + 3] == ["  1. by warp: deadlock: no warp can go on", f"     in {names}"]
    assert sum("deadlock" in line for line in lines) == 1


def test_names_are_whole_in_a_narrow_terminal() -> None:
    """Of modules, cases and checks; the longest that there are. And no number is cut."""
    stem = max(STEMS, key=len)
    cases = (dataclasses.replace(CPU_CASE, name="masked_rows", shape="b1 1024x1024 h16/4", failures=("x",)),)
    check = "allocates O when not given one"
    report = dataclasses.replace(CPU_REPORT, stem=stem, cases=cases, checks=(Check(check, False, "x"),))
    variant = dataclasses.replace(VARIANTS[0], stem=stem)
    entry = Verification(variant, Stage(True), Stage(False), Stage(False), report=report)
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed with the process
    console.print(command._case_table(entry))
    console.print(command._summary_table([entry], on_gpu=False))
    text = console.export_text()
    assert "\u2026" not in text
    assert all(name in text for name in (stem, "masked_rows", check, "FAILED"))


# -- on the CPU model

CPU_CASE = CpuCaseResult("ragged", "b1 7x9 h1/1", ERRORS, 0.7, 0.8, ERRORS, ())
CPU_CHECKS = (
    Check("empty batch", True),
    Check("runs on the current stream", None, "needs a CUDA device"),
)
CPU_REPORT = CpuReport("a", 5, ("by warpgroup", "by warp"), 0.8, (CPU_CASE,), CPU_CHECKS)
BAD_CASE = dataclasses.replace(CPU_CASE, failures=("by warp: deadlock: no warp can go on",))
BAD_REPORT = dataclasses.replace(CPU_REPORT, cases=(BAD_CASE,))


@pytest.fixture
def on_the_model(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The command in `workspace`, without a GPU; the model answers CPU_REPORT, or what is put here for a stem."""
    answers: dict[str, Any] = {}

    def run(module: Any, spec: Spec, *, stem: str, seed: Any, count: int) -> CpuReport:
        assert module == stem and count == 3
        answer = answers.get(stem, CPU_REPORT)
        if isinstance(answer, Exception):
            raise answer
        return dataclasses.replace(answer, stem=stem)

    monkeypatch.chdir(workspace.root)
    monkeypatch.setattr(Workspace, "select", lambda self, names: VARIANTS)
    monkeypatch.setattr(command, "_check_all", lambda *args, for_launch: unrun())
    monkeypatch.setattr("fa3gen.run.gpu.why_no_hopper", lambda: "none here")
    monkeypatch.setattr("fa3gen.cpu.module.load_on_cpu", lambda path: path.stem)
    monkeypatch.setattr("fa3gen.verify.on_cpu.verify_on_cpu", run)
    return answers


def run_command(**options: Any) -> int:
    """`fa3gen verify` with these options; its exit code."""
    given = {"json_output": False, "evidence": False, "seed": None, "schedules": 3}
    try:
        command.verify(["k"], **{**given, **options})
    except typer.Exit as left:
        return int(left.exit_code)
    return 0


def test_without_a_gpu_the_model_runs_and_every_line_says_so(
    on_the_model: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command() == 0
    said = capsys.readouterr()
    assert "no Hopper GPU: none here; executed on the CPU model of sm_90a (not a GPU result)" in said.err
    assert said.out.splitlines()[-1] == (
        "3 of 3 modules passed, 0 failed: executed on the CPU model of sm_90a (not a GPU result)."
    )
    assert "a on CPU model of sm_90a (not a GPU result), seed 5" in said.out
    assert "on CPU model" in said.out and "run on GPU" not in said.out and "verified" not in said.out


@pytest.mark.parametrize("on", [None, command.On.CPU])
def test_json_says_where_it_ran(
    on_the_model: dict[str, Any], capsys: pytest.CaptureFixture[str], on: command.On | None
) -> None:
    assert run_command(json_output=True, on=on) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["on"], document["run_on_gpu"], document["passed"]) == ("cpu", False, True)
    assert document["executed_on"] == "the CPU model of sm_90a (not a GPU result)"
    assert {module["report"]["executed_on"] for module in document["modules"]} == {"CPU model of sm_90a"}


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error(on_the_model: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="^--on gpu: no Hopper GPU: none here; use --on cpu$"):
        run_command(on=command.On.GPU)


def test_hazards_and_what_is_outside_the_model_fail_the_command(
    on_the_model: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    on_the_model.update(a=BAD_REPORT, b=OutsideModel("PTX line 3: mma.sync is outside the model"))
    assert run_command() == 1
    lines = capsys.readouterr().out.splitlines()
    failed = lines.index("a: run FAILED: 1 failure")
    assert lines[failed + 1 : failed + 3] == ["  1. by warp: deadlock: no warp can go on", "     in ragged"]
    assert "b: run NOT run: PTX line 3: mma.sync is outside the model" in lines
    assert lines[-1] == (
        "1 of 3 modules passed, 1 failed, 1 NOT run: executed on the CPU model of sm_90a (not a GPU result)."
    )


def test_json_says_neither_passed_nor_failed_of_what_is_outside_the_model(
    on_the_model: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    on_the_model["b"] = OutsideModel("mma.sync is outside the model")
    assert run_command(json_output=True) == 1
    assert json.loads(capsys.readouterr().out)["passed"] is None


def test_evidence_of_the_model_is_kept_apart(workspace: Workspace, on_the_model: dict[str, Any]) -> None:
    on_the_model["b"] = BAD_REPORT
    (workspace.root / "specs" / "none.yaml").touch()
    entries = command._CpuSession(workspace, Console(stderr=True), True, 5, 3).run_all(unrun())
    assert [entry.run.passed for entry in entries] == [True, False, True]
    assert {path.name for path in workspace.evidence_dir.iterdir()} == {"cpu_model"}
    assert evidence.cpu_status(workspace, "a")[0] is evidence.CpuStatus.PASSED
    assert evidence.cpu_status(workspace, "b")[0] is evidence.CpuStatus.FAILED
    assert evidence.status(workspace, "a") == (evidence.Status.NONE, None)


def test_a_module_that_cannot_be_imported_fails_on_the_model_as_well(
    workspace: Workspace, on_the_model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: Path) -> Any:
        raise SyntaxError("broken")

    monkeypatch.setattr("fa3gen.cpu.module.load_on_cpu", load)
    (entry,) = command._CpuSession(workspace, Console(stderr=True), True, 5, 3).run_all(unrun()[:1])
    assert entry.run == Stage(False, "cannot be imported: SyntaxError: broken")
    _, record = evidence.cpu_status(workspace, "a")
    assert record is not None and record.failures == ["cannot be imported: SyntaxError: broken"]
