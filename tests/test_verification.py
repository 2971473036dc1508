"""`fa3gen verify` around the numerics: drift, missing files, lost devices, launches that never end, its last line."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fa3gen import evidence, verify
from fa3gen.cli import verify as command
from fa3gen.errors import UserError
from fa3gen.spec import Spec
from fa3gen.specfile import Variant
from fa3gen.verification import Stage, Verification, check_compile, check_render
from fa3gen.workspace import Workspace

SPEC = Spec.model_validate(
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
ERRORS = verify.Errors(0.0, 0.0)
CASE = verify.CaseResult("random", "b1 1x1 h1/1", ERRORS, ERRORS, 1e-3, 0.0, ERRORS, ERRORS, ())
REPORT = verify.Report("a", "A made-up GPU", 1, (CASE,), ())


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "specs").mkdir()
    (tmp_path / "generated").mkdir()
    for variant in VARIANTS:
        (tmp_path / "generated" / f"{variant.stem}.py").write_text(f"NAME = '{variant.stem}'\n")
    return Workspace.find(tmp_path)


def unrun() -> list[Verification]:
    return [Verification(variant, Stage(True), Stage(True), Stage(None)) for variant in VARIANTS]


def session(workspace: Workspace, *, evidence: bool = False, timeout: float = 60.0) -> Any:
    return command._Session(workspace, Console(stderr=True), torch.device("cpu"), evidence, 1, timeout)


def test_a_committed_file_is_compared_with_its_rendering(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fa3gen.render.render_variant", lambda variant, workspace: f"NAME = '{variant.stem}'\n")
    assert check_render(VARIANTS[0], workspace) == Stage(True)
    workspace.module_path("a").write_text("NAME = 'by hand'\n")
    assert check_render(VARIANTS[0], workspace).detail == (
        "generated/a.py is not what specs/k.yaml renders to; `fa3gen render --check` shows the difference"
    )
    workspace.module_path("a").write_bytes(b"NAME = 'a'\r\n")  # render --check calls this drift as well
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
    def run(module: Any, spec: Spec, device: Any, *, stem: str, seed: Any, on_case: Any) -> verify.Report:
        assert stem == module.NAME
        on_case("ragged")
        if stem == "b":
            raise verify.DeviceLost("illegal memory access")
        return REPORT

    monkeypatch.setattr(verify, "verify_module", run)
    a, b, c = session(workspace).run_all(unrun())
    assert (a.run.passed, b.run.passed, c.run.passed) == (True, False, None)
    assert b.run.detail == "ragged: the launch left the GPU unusable: illegal memory access"
    assert "b left the GPU unusable" in c.run.detail and not c.failed
    assert command._verdict([a, b, c]) == "1 of 3 modules verified on A made-up GPU, 1 failed, 1 NOT run."


def test_a_lost_device_is_recorded_as_a_failure(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, on_case: Any, **keywords: Any) -> verify.Report:
        on_case("ragged")
        raise verify.DeviceLost("illegal memory access")

    monkeypatch.setattr(verify, "verify_module", run)
    session(workspace, evidence=True).run_all(unrun()[:1])
    state, record = evidence.status(workspace, "a")
    assert state is evidence.Status.FAILED and record is not None
    assert record.failures == ["ragged: the launch left the GPU unusable: illegal memory access"]


def test_a_launch_that_never_ends_is_recorded_and_ends_the_process(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []

    def run(*args: Any, on_case: Any, **keywords: Any) -> verify.Report:
        on_case("wrap")
        patience = time.monotonic() + 20
        while not codes and time.monotonic() < patience:
            time.sleep(0.01)
        return REPORT

    monkeypatch.setattr(verify, "verify_module", run)
    monkeypatch.setattr(os, "_exit", codes.append)
    watched = session(workspace, evidence=True, timeout=0.05)
    monkeypatch.setattr(evidence, "write", _only_first(evidence.write))
    monkeypatch.setattr("fa3gen.verification.speeds", lambda *args: {})
    watched.run_all(unrun()[:1])
    assert codes == [1]
    _, record = evidence.status(workspace, "a")
    assert record is not None and record.failures == ["wrap: did not end in 0.05 s (a pipeline that waits for ever?)"]
    assert "a: wrap: did not end in 0.05 s" in capfd.readouterr().err


def test_a_launch_that_never_ends_ends_the_process_though_it_cannot_be_recorded(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []

    def run(*args: Any, on_case: Any, **keywords: Any) -> verify.Report:
        patience = time.monotonic() + 20
        while not codes and time.monotonic() < patience:
            time.sleep(0.01)
        return REPORT

    def full(workspace: Workspace, record: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(verify, "verify_module", run)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(evidence, "write", full)
    monkeypatch.setattr("fa3gen.verification.speeds", lambda *args: {})
    with pytest.raises(OSError, match="no space left"):
        session(workspace, evidence=True, timeout=0.05).run_all(unrun()[:1])
    assert codes == [1]
    said = capfd.readouterr().err
    assert "did not end in 0.05 s" in said and "a: no record was written: no space left on device" in said


def test_a_module_that_cannot_be_imported_fails_and_the_others_run(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.module_path("b").write_text("def broken(:\n")
    monkeypatch.setattr(verify, "verify_module", lambda *args, **keywords: REPORT)
    monkeypatch.setattr("fa3gen.verification.speeds", lambda *args: {})
    a, b, c = session(workspace, evidence=True).run_all(unrun())
    assert (a.run.passed, b.run.passed, c.run.passed) == (True, False, True)
    assert b.run.detail.startswith("cannot be imported: SyntaxError: ")
    assert evidence.status(workspace, "b")[0] is evidence.Status.FAILED


def test_json_without_a_gpu_says_neither_passed_nor_failed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workspace.root)
    monkeypatch.setattr(Workspace, "select", lambda self, names: VARIANTS)
    monkeypatch.setattr(command, "_check_all", lambda *args: unrun())
    monkeypatch.setattr("fa3gen.gpu.why_no_hopper", lambda: "none here")
    command.verify(["a"], json_output=True, evidence=False, refresh_evidence=False, seed=None)
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is None and document["run_on_gpu"] is False


def _only_first(write: Any) -> Any:
    """The process would have ended after the first record; here it goes on, so the second must not be written."""
    written: list[Any] = []

    def once(workspace: Workspace, record: Any) -> Any:
        if not written:
            written.append(write(workspace, record))
        return written[0]

    return once


def test_the_last_line_without_a_gpu_cannot_be_taken_for_a_verification() -> None:
    entries = [Verification(v, Stage(True), Stage(True), Stage(None, "no Hopper GPU: none here")) for v in VARIANTS]
    assert command._verdict(entries) == (
        "NOT run on a GPU (no Hopper GPU: none here). 3 of 3 modules compiled for sm_90a as planned, 0 failed; "
        "whether their results are right was NOT checked."
    )


def test_a_module_that_runs_but_fails_to_compile_as_planned_is_not_verified() -> None:
    entry = Verification(VARIANTS[0], Stage(True), Stage(False, "spills: 4"), Stage(True), report=REPORT)
    assert entry.failed
    assert command._verdict([entry]) == "0 of 1 module verified on A made-up GPU, 1 failed."


def test_the_case_table_shows_errors_beside_the_yardstick() -> None:
    errors = verify.Errors(1e-3, 2e-3)
    result = verify.CaseResult("ragged", "b1 7x9 h1/1", errors, errors, 4e-3, 0.5, errors, errors, ("O is off",))
    checks = (verify.Check("empty batch", True), verify.Check("runs on the current stream", None))
    report = verify.Report("a", "A made-up GPU", 77, (result,), checks)
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: SIM115 - closed with the process
    console.print(command._case_table(Verification(VARIANTS[0], Stage(True), Stage(True), Stage(False), report=report)))
    text = console.export_text()
    assert "a on A made-up GPU, seed 77" in text and "FAILED" in text and "50%" in text
    assert "1.00e-03" in text and "4.00e-03" in text and "NOT run" in text
