"""`fa3gen matrix`: cells come from records of the present files and from nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rendering import CHECKOUT, ROOT, STEMS, variants

from fa3gen.base import files
from fa3gen.cli import main
from fa3gen.design.workspace import Workspace
from fa3gen.inspect import matrix, pages
from fa3gen.inspect.matrix import Proof, Row, State
from fa3gen.records import evidence

Output = pytest.CaptureFixture[str]
STEM = "k4_2_d64"
GPU_RECORD = f"generated/evidence/{STEM}.json"
COMPARISON = "generated/evidence/comparison/cpu_model_vs_gpu.json"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """One spec and its modules with records of a GPU and of the CPU model, whatever is true of the checkout today."""
    (tmp_path / "generated" / "evidence" / "comparison").mkdir(parents=True)
    (tmp_path / "specs").mkdir()
    for name in ("k4_2", "k4_smem"):
        shutil.copy(ROOT / "specs" / f"{name}.yaml", tmp_path / "specs")
    for stem in ("k4_2_d64", "k4_2_d64_causal", "k4_2_d128"):
        shutil.copy(ROOT / "generated" / f"{stem}.py", tmp_path / "generated")
    digest = files.sha256(tmp_path / "generated" / f"{STEM}.py")
    put(tmp_path / GPU_RECORD, gpu_record(digest))
    module = {"stem": STEM, "source_sha256": digest, "cases": [{"gpu_wrong": 0, "cpu_wrong": 0}]}
    put(tmp_path / COMPARISON, {"date": "2026-11-20", "cpu": {"dsl": "4.8.1"}, "modules": [module]})
    monkeypatch.chdir(tmp_path)
    return Workspace(tmp_path, tmp_path)


def put(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def gpu_record(digest: str) -> dict[str, Any]:
    """A record that was committed, of another file."""
    record = json.loads((ROOT / GPU_RECORD).read_text())
    made = {"gpu": "NVIDIA H200", "date": "2026-11-19", "dsl": "4.8.1", "tflops": {"4096": 466.0, "16384": 444.4}}
    return {**record, **made, "source_sha256": digest, "passed": True, "failures": []}


def cpu_record(digest: str, **changed: Any) -> dict[str, Any]:
    shared = ("version", "stem", "torch", "ptxas", "python", "seed", "lse_tolerance", "checks")
    record = {key: value for key, value in gpu_record(digest).items() if key in shared}
    errors = {"max_abs": 0.0, "relative": 0.0}
    case = {"name": "one", "shape": "b1", "o_error": errors, "o_used": 0.1, "o_spread": 0.5, "lse_error": errors}
    return {
        **record,
        **{"source_sha256": digest, "date": "2026-11-21", "dsl": "4.8.1", "passed": True, "failures": []},
        **{"executed_on": "CPU model of sm_90a", "numpy": "2.0", "schedules": ["fast"], "o_spread": 0.5},
        **{"o_spread_limit": 1.0, "cases": [{**case, "failures": []}]},
        **changed,
    }


def row_of(workspace: Workspace, stem: str = STEM) -> Row:
    [row] = matrix.rows(workspace, [stem])
    return row


# Proof


def test_proof_of_the_present_file(workspace: Workspace) -> None:
    row = row_of(workspace)
    assert row.gpu == Proof(State.PROVEN, "verified on H200, 2026-11-19, DSL 4.8.1")
    assert row.cpu == Proof(State.PROVEN, "executed on the CPU model, 2026-11-20, DSL 4.8.1")
    assert matrix.cells(row)[-2:] == ["466", "444"]


def test_one_changed_byte_makes_every_record_stale(workspace: Workspace) -> None:
    with workspace.module_path(STEM).open("a") as file:
        file.write("\n")
    row = row_of(workspace)
    assert row.gpu == Proof(State.STALE, "stale: the file changed after 2026-11-19")
    assert row.cpu == Proof(State.STALE, "stale: the file changed after 2026-11-20")
    assert matrix.cells(row)[-2:] == ["", ""]


def test_without_records_and_without_a_file(workspace: Workspace) -> None:
    row = row_of(workspace, "k4_2_d64_causal")
    assert (row.gpu, row.cpu) == (Proof(State.NONE, "unverified"), Proof(State.NONE, "no record"))
    missing = Proof(State.NONE, "not rendered")
    row = row_of(workspace, "k4_2_d128_causal")
    assert (row.gpu, row.cpu, row.tflops) == (missing, missing, {})


def test_failures(workspace: Workspace) -> None:
    digest = files.sha256(workspace.module_path(STEM))
    put(workspace.root / GPU_RECORD, {**gpu_record(digest), "passed": False, "failures": ["random: O is off"]})
    comparison = json.loads((workspace.root / COMPARISON).read_text())
    comparison["modules"][0]["cases"][0]["cpu_wrong"] = 3
    put(workspace.root / COMPARISON, comparison)
    row = row_of(workspace)
    assert row.gpu == Proof(State.FAILED, "FAILED on H200, 2026-11-19, DSL 4.8.1") and row.tflops == {}
    assert row.cpu == Proof(State.FAILED, "WRONG on the CPU model, 2026-11-20, DSL 4.8.1")


def test_a_record_of_the_cpu_model_comes_before_the_comparison(workspace: Workspace) -> None:
    path = evidence.cpu_record_path(workspace, STEM)
    digest = files.sha256(workspace.module_path(STEM))
    put(path, cpu_record(digest))
    assert row_of(workspace).cpu == Proof(State.PROVEN, "executed on the CPU model, 2026-11-21, DSL 4.8.1")
    put(path, cpu_record(digest, passed=False, failures=["deadlock"]))
    assert row_of(workspace).cpu == Proof(State.FAILED, "FAILED on the CPU model, 2026-11-21, DSL 4.8.1")
    put(path, cpu_record("0" * 64))
    assert row_of(workspace).cpu == Proof(State.PROVEN, "executed on the CPU model, 2026-11-20, DSL 4.8.1")
    (workspace.root / COMPARISON).unlink()
    assert row_of(workspace).cpu == Proof(State.STALE, "stale: the file changed after 2026-11-21")


def test_a_broken_comparison(workspace: Workspace, capsys: Output) -> None:
    (workspace.root / COMPARISON).write_text("{}")
    assert main(["matrix", STEM]) == 2
    assert (
        "is no comparison of the CPU model with a GPU (Field required); restore it with git" in capsys.readouterr().err
    )


def test_modules_of_the_package_have_their_own_records(workspace: Workspace, tmp_path: Path) -> None:
    elsewhere = Workspace(tmp_path / "elsewhere", workspace.root)
    assert row_of(elsewhere).gpu.state is State.PROVEN
    assert {row.stem for row in matrix.rows(elsewhere)} == {row.stem for row in matrix.rows(workspace)}


# Features


def test_features() -> None:
    assert matrix.features(variants()["fwd_d192_128_causal"].spec)["head dim"] == "192/128"
    packed = matrix.features(variants()["fwd_d128_pack4_causal"].spec)
    assert packed["GQA packing"] == "4 heads" and packed["mask"] == "causal"
    window = matrix.features(variants()["k4_2_window_d64_window200_70"].spec)
    assert window["mask"] == "window 200, 70" and window["schedule"] == "cooperative" and window["load"] == "tma x 2"
    assert matrix.features(variants()["k5_d128"].spec)["schedule"] == "warp specialized, overlap"
    assert matrix.features(variants()["k1_d64"].spec)["load"] == "plain"
    assert matrix.features(variants()["k4_2_o_only_d128_causal"].spec)["LSE"] == "no"


# The command


def test_the_committed_document_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["matrix", "--check"]) == 0, capsys.readouterr().err
    assert main(["matrix", "--markdown"]) == 0
    text = (ROOT / matrix.DOCUMENT).read_text(encoding="utf-8")
    assert text in capsys.readouterr().out
    assert [stem for stem in STEMS if f"\n| `{stem}` |" not in text] == []


def test_a_document_that_is_out_of_date(workspace: Workspace, capsys: Output) -> None:
    assert main(["matrix", "--check"]) == 1
    assert capsys.readouterr().err == f"docs/matrix.md does not exist; run `{matrix.MAKE}`\n"
    (workspace.root / "docs").mkdir()
    (workspace.root / matrix.DOCUMENT).write_text(matrix.markdown(workspace))
    assert main(["matrix", "--check"]) == 0
    workspace.module_path(STEM).write_text("")
    capsys.readouterr()
    assert main(["matrix", "--check"]) == 1
    assert "docs/matrix.md is not what specs and records say; run `" in capsys.readouterr().err
    assert workspace.root / matrix.DOCUMENT in pages.refresh(workspace)
    assert matrix.check(workspace) is None


def test_printed(workspace: Workspace, capsys: Output) -> None:
    """What the modules of a spec have in common stands above their table; nothing is folded in a pipe."""
    assert main(["matrix", "k4_2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "specs/k4_2.yaml"
    assert lines[1].startswith("dtype: bf16; tile: 128 x 64; load: tma x 2; S = Q K^T: wgmma; ")
    [line] = [line for line in lines if line.split()[:1] == [STEM]]
    proof = "verified on H200, 2026-11-19, DSL 4.8.1 executed on the CPU model, 2026-11-20, DSL 4.8.1"
    assert " ".join(line.split()) == f"{STEM} 64 none {proof} 466 444"
    assert lines[-1] == "4 modules; GPU: 1 verified, 3 without a record; CPU model: 1 executed, 3 without a record"


def test_proof_that_all_modules_share_is_printed_once(workspace: Workspace, capsys: Output) -> None:
    assert main(["matrix", STEM]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == [
        "GPU: verified on H200, 2026-11-19, DSL 4.8.1",
        "CPU model: executed on the CPU model, 2026-11-20, DSL 4.8.1",
    ]
    assert [line.split() for line in lines if line.split()[:1] == [STEM]] == [[STEM, "466", "444"]]


def test_json(workspace: Workspace, capsys: Output) -> None:
    assert main(["matrix", STEM, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["module"], row["spec"], row["head dim"]) == (STEM, "specs/k4_2.yaml", "64")
    assert row["gpu"] == {"state": "proven", "text": "verified on H200, 2026-11-19, DSL 4.8.1"}
    assert row["tflops"] == {"4096": 466.0, "16384": 444.4}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["k4_3"], "there is no spec or module 'k4_3'; did you mean "),
        (["k4_2", "--check"], "docs/matrix.md is about all modules; leave out k4_2"),
    ],
)
def test_refusals(workspace: Workspace, capsys: Output, arguments: list[str], words: str) -> None:
    assert main(["matrix", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(words)


def test_every_module_of_the_checkout_has_a_row() -> None:
    assert sorted(row.stem for row in matrix.rows(CHECKOUT)) == STEMS
