"""What is legal but not advisable: `render`, `compile` and `verify` say so on standard error, and go on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from rendering import ROOT

from fa3gen.base.errors import UserError
from fa3gen.cli import main, verify

Output = pytest.CaptureFixture[str]
SPEC = "extends: k6\nsummary: O in a buffer of its own\noutputs: {o: own_buffer}\n"
SAID = "specs/mine.yaml: outputs.o: with scheduler single_tile no next Q is loaded, and a buffer for O takes"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with one spec that the rules of taste warn of, on the ladder."""
    for folder in ("specs", "generated"):
        (tmp_path / folder).mkdir()
    for stem in ("k4_smem", "k4_2", "k5", "k6"):
        shutil.copy(ROOT / "specs" / f"{stem}.yaml", tmp_path / "specs")
    (tmp_path / "specs" / "mine.yaml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_render_warns_and_renders(root: Path, capsys: Output) -> None:
    assert main(["render", "mine_d128"]) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"warning: {SAID} 128 x 128 x 2 = 32768 bytes of shared memory for nothing; use over_q"
    ]
    assert (root / "generated" / "mine_d128.py").is_file() and "warning" not in said.out


def test_a_warning_names_its_modules_where_it_is_not_about_all(root: Path, capsys: Output) -> None:
    assert main(["compile", "mine", "k6"]) == 2  # nothing is rendered yet
    warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning")]
    assert warned == [
        f"warning: {SAID} 192 x 64 x 2 = 24576 bytes of shared memory for nothing; use over_q "
        "(in mine_d64, mine_d64_causal)",
        f"warning: {SAID} 128 x 128 x 2 = 32768 bytes of shared memory for nothing; use over_q "
        "(in mine_d128, mine_d128_causal)",
    ]


def test_verify_warns_before_it_begins(root: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_: object) -> None:
        raise UserError("enough")

    monkeypatch.setattr(verify, "_render_missing", ends)
    assert main(["verify", "mine_d64", "--on", "cpu"]) == 2
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"warning: {SAID}") and last == "enough"


def test_nothing_is_said_of_what_is_advisable(root: Path, capsys: Output) -> None:
    assert main(["render", "k6_d128"]) == 0
    assert capsys.readouterr().err == ""
