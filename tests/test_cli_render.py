"""`fa3gen render`: what it writes, what it refuses to overwrite, what it checks, and how it exits."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rendering import FEW_MODULES, ROOT, small_checkout, source
from rich.console import Console

from fa3gen.base.files import sha256
from fa3gen.cli import main, verify
from fa3gen.design.workspace import Workspace
from fa3gen.generate import writing
from fa3gen.generate.writing import MEMORY

Output = pytest.CaptureFixture[str]
MODULE = "generated/k1_d64.py"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the checkout with three of its specs, up to date, as working directory; no git."""
    small_checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def repository(root: Path) -> Path:
    """The same, everything committed."""
    git(root, "init")
    git(root, "add", ".")
    git(root, "commit", "-m", "all")
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in (root / "generated").rglob("*.py")}


def change_spec(root: Path, old: str = "q: 16, kv: 16, threads: 256", new: str = "q: 32, kv: 16, threads: 512") -> None:
    """Turn a knob of k1, in all of its four modules."""
    path = root / "specs" / "k1.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# Writing


def test_all_unchanged(root: Path, capsys: Output) -> None:
    before = contents(root)
    stamps = {path: path.stat().st_mtime_ns for path in (root / "generated").iterdir()}
    assert main(["render"]) == 0
    assert capsys.readouterr() == ("unchanged 12 of 12 modules\n", "")
    assert contents(root) == before
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_new_and_changed(root: Path, capsys: Output) -> None:
    (root / "generated" / "k4_2_d64.py").unlink()
    change_spec(root)
    assert main(["render"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[:2]) for line in lines] == [
        "changed generated/k1_d64.py",
        "changed generated/k1_d64_causal.py",
        "changed generated/k1_d128.py",
        "changed generated/k1_d128_causal.py",
        "new generated/k4_2_d64.py",
        "unchanged 7",
    ]
    assert lines[-2].endswith(f"({len(source('k4_2_d64').splitlines())} lines)")
    assert (root / "generated" / "k4_2_d64.py").read_text() == source("k4_2_d64")
    assert "TILE_M = 32  # scores: query rows per CTA" in (root / MODULE).read_text()


@pytest.mark.parametrize("name", ["specs/k1.yaml", "k1"])
def test_one_spec(root: Path, name: str, capsys: Output) -> None:
    (root / MODULE).unlink()
    (root / "generated" / "k4_2_d64.py").unlink()
    assert main(["render", name]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "unchanged 3 of 4 modules"
    assert (root / MODULE).read_text() == source("k1_d64")
    assert not (root / "generated" / "k4_2_d64.py").exists()


def test_one_module(root: Path, capsys: Output) -> None:
    for path in (root / "generated").glob("*.py"):
        path.unlink()
    assert main(["render", "k1_d64"]) == 0
    assert list(contents(root)) == [MODULE]


def test_a_name_twice_is_rendered_once(root: Path, capsys: Output) -> None:
    assert main(["render", "k1", "specs/k1.yaml", "k1_d64"]) == 0
    assert capsys.readouterr().out == "unchanged 4 of 4 modules\n"


def test_from_a_subdirectory(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    (root / MODULE).unlink()
    monkeypatch.chdir(root / "specs")
    assert main(["render", "k1"]) == 0
    assert (root / MODULE).read_text() == source("k1_d64")


def test_written_files_are_whole_and_readable(root: Path, capsys: Output) -> None:
    """Atomically: no temporary file is left, and the mode does not depend on how temporary files are made."""
    change_spec(root)
    (root / MODULE).chmod(0o600)
    assert main(["render"]) == 0
    written = sorted(path.name for path in (root / "generated").iterdir())
    assert written == sorted((f".{MEMORY}", *(f"{stem}.py" for stem in FEW_MODULES)))
    assert {(root / "generated" / f"k1_{d}.py").stat().st_mode & 0o777 for d in ("d64", "d128")} == {0o644}


def test_without_a_generated_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """A directory of the user's own: the package's specs and templates serve, the module lands here."""
    monkeypatch.chdir(tmp_path)
    assert main(["render", "k1_d64"]) == 0
    assert (tmp_path / MODULE).read_text().splitlines()[8:] == source("k1_d64").splitlines()[8:]


def test_orphans_are_named(root: Path, capsys: Output) -> None:
    shutil.copy(root / MODULE, root / "generated" / "k9_d64.py")
    assert main(["render"]) == 0
    assert capsys.readouterr().err == (
        "orphan    generated/k9_d64.py: no spec renders to it; remove it or give it a spec\n"
    )
    assert (root / "generated" / "k9_d64.py").exists()


def test_a_file_that_is_not_ours_and_has_no_spec_is_named(root: Path, capsys: Output) -> None:
    """It is nobody's error: the check passes."""
    (root / "generated" / "stray.py").write_text("x = 1\n")
    (root / "generated" / "__init__.py").write_text("")
    said = "stray     generated/stray.py: not written by fa3gen, and no spec renders to it; move it elsewhere\n"
    for command in (["render"], ["render", "--check"]):
        assert main(command) == 0
        assert capsys.readouterr().err == said
    assert main(["render", "k1"]) == 0
    assert capsys.readouterr().err == ""


def test_one_module_is_one(root: Path, capsys: Output) -> None:
    assert main(["render", "k1_d64"]) == 0
    assert main(["render", "--check", "k1_d64"]) == 0
    assert capsys.readouterr().out == "unchanged 1 of 1 module\n1 module is what its spec renders to\n"


# Hand edits


def edit(root: Path, name: str = MODULE) -> str:
    path = root / name
    path.write_text(path.read_text().replace("Online", "0nline").replace("def attention(", "def attention( "))
    return path.read_text()


def test_hand_edits_are_refused(repository: Path, capsys: Output) -> None:
    edit(repository)
    edit(repository, "generated/k4_2_d64.py")
    change_spec(repository)
    before = contents(repository)
    assert main(["render"]) == 2
    assert capsys.readouterr() == (
        "",
        "generated/k1_d64.py: has uncommitted edits\n"
        "generated/k4_2_d64.py: has uncommitted edits\n"
        "nothing was written; commit or `git checkout` them, move the edits into the templates, or overwrite them with "
        "--force\n",
    )
    assert contents(repository) == before


def test_staged_hand_edits_are_refused(repository: Path, capsys: Output) -> None:
    edited = edit(repository)
    git(repository, "add", ".")
    assert main(["render", "k1_d64"]) == 2
    assert "generated/k1_d64.py: has uncommitted edits" in capsys.readouterr().err
    assert (repository / MODULE).read_text() == edited


def test_force_overwrites_hand_edits(repository: Path, capsys: Output) -> None:
    edit(repository)
    assert main(["render", "--force"]) == 0
    assert (repository / MODULE).read_text() == source("k1_d64")


def test_committed_edits_are_overwritten(repository: Path, capsys: Output) -> None:
    """They are safe in the history; the difference shows in the next diff."""
    edit(repository)
    git(repository, "commit", "-am", "edit")
    assert main(["render"]) == 0
    assert (repository / MODULE).read_text() == source("k1_d64")


def test_rendering_twice_is_no_hand_edit(repository: Path, capsys: Output) -> None:
    """What render itself wrote is not committed yet, and may be written again after the next change of the spec."""
    change_spec(repository)
    assert main(["render"]) == 0
    capsys.readouterr()
    change_spec(repository, "q: 32, kv: 16, threads: 512", "q: 16, kv: 16, threads: 256")
    assert main(["render"]) == 0, capsys.readouterr().err
    assert (repository / MODULE).read_text() == source("k1_d64")


def test_hand_edits_of_a_module_that_was_never_committed_are_refused(repository: Path, capsys: Output) -> None:
    (repository / "specs" / "k1.yaml").rename(repository / "specs" / "mine.yaml")
    assert main(["render", "mine"]) == 0
    edited = edit(repository, "generated/mine_d64.py")
    assert main(["render", "mine"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("generated/mine_d64.py: was edited after it was rendered\nnothing was written; keep a copy")
    assert "git checkout" not in said  # which knows nothing of it
    assert (repository / "generated" / "mine_d64.py").read_text() == edited
    assert main(["render", "mine", "--force"]) == 0


def test_a_file_that_is_not_ours_is_refused(repository: Path, capsys: Output) -> None:
    (repository / MODULE).unlink()
    (repository / MODULE).write_text("mine = 1\n")
    assert main(["render", "k1_d64"]) == 2
    assert (repository / MODULE).read_text() == "mine = 1\n"
    assert main(["render", "k1_d64", "--force"]) == 0


def test_an_untracked_file_that_is_not_ours_is_refused(root: Path, capsys: Output) -> None:
    (root / MODULE).write_text("mine = 1\n")
    assert main(["render"]) == 2
    assert capsys.readouterr().err.startswith("generated/k1_d64.py: was not written by fa3gen\n")
    assert (root / MODULE).read_text() == "mine = 1\n"


def test_a_file_that_is_no_text_is_refused(root: Path, capsys: Output) -> None:
    (root / MODULE).write_bytes(b"\xff\xfe")
    assert main(["render"]) == 2
    assert (root / MODULE).read_bytes() == b"\xff\xfe"
    assert main(["render", "--force"]) == 0


def test_without_git_what_was_rendered_is_overwritten(root: Path, capsys: Output) -> None:
    for old, new in (("q: 16", "q: 32"), ("q: 32", "q: 16")):
        change_spec(
            root, f"{old}, kv: 16, threads: {int(old[3:]) * 16}", f"{new}, kv: 16, threads: {int(new[3:]) * 16}"
        )
        assert main(["render", "k1_d64"]) == 0
        assert f"TILE_M = {new[3:]}" in (root / MODULE).read_text()


def test_without_git_hand_edits_are_refused(root: Path, capsys: Output) -> None:
    edited = edit(root)
    assert main(["render", "k1"]) == 2
    assert capsys.readouterr().err == (
        "generated/k1_d64.py: was edited after it was rendered\n"
        "nothing was written; keep a copy under another name, move the edits into the templates, or overwrite them "
        "with --force\n"
    )
    assert (root / MODULE).read_text() == edited
    assert main(["render", "k1", "--force"]) == 0
    change_spec(root)
    assert main(["render", "k1"]) == 0


def test_in_a_workspace_of_ones_own_hand_edits_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["render", "k1_d64"]) == 0
    edited = edit(tmp_path)
    assert main(["render", "k1_d64"]) == 2
    assert "was edited after it was rendered" in capsys.readouterr().err
    assert (tmp_path / MODULE).read_text() == edited


def test_a_copy_of_which_nothing_is_known_is_not_overwritten(root: Path, capsys: Output) -> None:
    """Neither git nor a memory came along: the file may have been edited, or its spec."""
    (root / "generated" / f".{MEMORY}").unlink()
    edited = edit(root)
    assert main(["render", "k1"]) == 2
    assert "nothing says whether it was edited by hand\n" in capsys.readouterr().err
    assert (root / MODULE).read_text() == edited


def test_a_file_that_evidence_was_recorded_of_is_no_edit(root: Path, capsys: Output) -> None:
    (root / "generated" / f".{MEMORY}").unlink()
    shutil.copytree(ROOT / "generated" / "evidence", root / "generated" / "evidence")
    known = Workspace.find().module_path("k1_d64")
    record = root / "generated" / "evidence" / "k1_d64.json"
    fields = {**json.loads(record.read_text()), "source_sha256": sha256(known)}
    record.write_text(json.dumps(fields))
    change_spec(root)
    assert main(["render", "k1_d64"]) == 0
    assert main(["render", "k1_d64"]) == 0
    edit(root)
    assert main(["render", "k1_d64"]) == 2


def test_a_spec_outside_has_a_memory_of_its_own(root: Path, capsys: Output) -> None:
    (root / "drafts").mkdir()
    (root / "drafts" / "k1_d64.yaml").write_text("summary: x\nextends: k1\nproblem: {head_dim: 64}\nmatrix: {}\n")
    assert main(["render", "drafts/k1_d64.yaml", "k1_d128"]) == 0
    edit(root, "drafts/k1_d64.py")
    assert main(["render", "k1_d64"]) == 0
    assert main(["render", "drafts/k1_d64.yaml"]) == 2
    assert capsys.readouterr().err.startswith("drafts/k1_d64.py: was edited")


def test_what_is_tracked_and_what_is_not_get_advice_of_their_own(repository: Path, capsys: Output) -> None:
    edit(repository)
    (repository / "generated" / "k4_2_d64.py").write_text("mine = 1\n")
    git(repository, "rm", "--cached", "generated/k4_2_d64.py")
    git(repository, "commit", "-m", "not mine")
    assert main(["render"]) == 2
    assert capsys.readouterr().err == (
        "generated/k1_d64.py: has uncommitted edits\n"
        "generated/k4_2_d64.py: was not written by fa3gen\n"
        "nothing was written; commit or `git checkout` generated/k1_d64.py, keep a copy under another name, move the "
        "edits into the templates, or overwrite them with --force\n"
    )


# Several processes


def test_two_renders_at_once(repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """The second one begins when the first one has read the files, and not yet asked git about them."""
    change_spec(repository)
    command = [sys.executable, "-P", "-m", "fa3gen", "render", "k1"]
    others = []
    real = writing.hand_edited

    def hand_edited(*arguments: Any) -> list[writing.Edited]:
        others.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        waits_or_has_ended(others[-1])
        return real(*arguments)

    monkeypatch.setattr(writing, "hand_edited", hand_edited)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert main(["render", "k1"]) == 0
    (other,) = others
    output, _ = other.communicate(timeout=60)
    assert (other.returncode, output) == (0, "unchanged 4 of 4 modules\n")


def waits_or_has_ended(process: subprocess.Popen[str]) -> None:
    """Return when the process waits for a lock, or is over."""
    while process.poll() is None:
        waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
        if any(str(process.pid) in words for words in waiting):
            return
        time.sleep(0.02)


def test_verify_renders_what_another_process_has_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What appeared while it waited for the lock is not written again."""
    (root / MODULE).unlink()
    workspace = Workspace.find()
    (variant,) = workspace.select(["k1_d64"])

    @contextlib.contextmanager
    def waits(*_: object) -> Iterator[None]:
        (root / MODULE).write_text("by another process\n")
        yield

    monkeypatch.setattr(writing, "alone", waits)
    verify._render_missing(workspace, [variant], Console(stderr=True))
    assert (root / MODULE).read_text() == "by another process\n"


def test_a_checkout_that_cannot_be_written_is_no_failure(repository: Path, capsys: Output) -> None:
    """Nothing has to be written where all is up to date; root may write anywhere, so git's directory is in the way."""
    (repository / ".git" / MEMORY).mkdir()
    assert main(["render"]) == 0
    assert capsys.readouterr() == ("unchanged 12 of 12 modules\n", "")


# Checking


def test_check_of_what_is_up_to_date(root: Path, capsys: Output) -> None:
    assert main(["render", "--check"]) == 0
    assert capsys.readouterr() == ("12 modules are what their specs render to\n", "")


def drift(root: Path) -> None:
    path = root / MODULE
    path.write_text(path.read_text().replace("VECTOR = 8 ", "VECTOR = 4 "))


def change_line_ends(root: Path) -> None:
    path = root / MODULE
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))


def lose(root: Path) -> None:
    (root / "generated" / "k4_2_d64.py").unlink()


def orphan(root: Path) -> None:
    shutil.copy(root / MODULE, root / "generated" / "k9_d64.py")


@pytest.mark.parametrize(
    ("harm", "printed", "error"),
    [
        (
            drift,
            ["--- generated/k1_d64.py (on disk)", "+++ generated/k1_d64.py (rendered)", "-VECTOR = 4 ", "+VECTOR = 8 "],
            "1 drifted, 0 missing of 12 modules; run `fa3gen render specs/k1.yaml --force`\n",
        ),
        (
            change_line_ends,
            ["--- generated/k1_d64.py (on disk)", "+++ generated/k1_d64.py (rendered)", "+VECTOR = 8 "],
            "1 drifted, 0 missing of 12 modules; run `fa3gen render specs/k1.yaml --force`\n",
        ),
        (
            lose,
            ["--- /dev/null", "+++ generated/k4_2_d64.py (rendered)", "+HEAD_DIM = 64"],
            "0 drifted, 1 missing of 12 modules; run `fa3gen render specs/k4_2.yaml`\n",
        ),
        (
            orphan,
            [],
            "generated/k9_d64.py: no spec renders to it; run `rm generated/k9_d64.py` or give it a spec\n",
        ),
    ],
)
def test_check_finds(root: Path, harm: Callable[[Path], None], printed: list[str], error: str, capsys: Output) -> None:
    harm(root)
    before = contents(root)
    assert main(["render", "--check"]) == 1
    out, err = capsys.readouterr()
    assert err == error
    lines = out.splitlines()
    assert [wanted for wanted in printed if not any(line.startswith(wanted) for line in lines)] == []
    assert bool(out) == bool(printed)
    assert contents(root) == before


def test_the_mending_command_mends(root: Path, capsys: Output) -> None:
    drift(root)
    lose(root)
    assert main(["render", "--check"]) == 1
    command = capsys.readouterr().err.split("`")[1].split()
    assert command == ["fa3gen", "render", "specs/k1.yaml", "specs/k4_2.yaml", "--force"]
    assert main(command[1:]) == 0
    assert main(["render", "--check"]) == 0


def test_the_diff_is_a_patch(repository: Path, capsys: Output) -> None:
    """What --check prints can be applied."""
    drift(repository)
    assert main(["render", "--check"]) == 1
    patch = capsys.readouterr().out.replace(" (on disk)", "").replace(" (rendered)", "")
    subprocess.run(["git", "apply", "-p0", "-"], input=patch, text=True, cwd=repository, check=True)
    assert (repository / MODULE).read_text() == source("k1_d64")


def test_check_of_one_spec_looks_at_that_one(root: Path, capsys: Output) -> None:
    drift(root)
    orphan(root)
    assert main(["render", "--check", "k4_2"]) == 0
    assert capsys.readouterr().out == "4 modules are what their specs render to\n"
    assert main(["render", "--check", "k1_d64"]) == 1


def test_check_sees_an_edited_template(root: Path, capsys: Output) -> None:
    shutil.copytree(ROOT / "templates", root / "templates")
    path = root / "templates" / "sections" / "naive_constants.py.jinja"
    path.write_text(path.read_text().replace("VECTOR = 8", "VECTOR = 16"))
    assert main(["render", "--check"]) == 1
    assert "4 drifted, 0 missing of 12 modules" in capsys.readouterr().err


# Requests that cannot be served


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("threads: 256", "threads: 100", "specs/k1.yaml:3: tile.threads: "),
        ("kv: 16", "kv: sixteen", "specs/k1.yaml:3: tile.kv: "),
        ("engine: sync", "engine: tma", "specs/k1.yaml:4: load"),
        ("problem: {dtype: bf16}", "problem: {dtype: bf16", "specs/k1.yaml:"),
        ("qk: {engine: scalar}", "qk: {engine: scalar}\nqk: {engine: scalar}", "specs/k1.yaml:6: "),
    ],
)
def test_a_bad_spec(root: Path, old: str, new: str, error: str, capsys: Output) -> None:
    """Nothing is written, not even for the other specs; no traceback."""
    (root / "generated" / "k4_2_d64.py").unlink()
    change_spec(root, old, new)
    before = contents(root)
    for arguments in (["render"], ["render", "k1"], ["render", "k1_d64"], ["render", "--check"]):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert error in err and "Traceback" not in err
    assert contents(root) == before


def test_another_spec_that_is_broken_is_noted(root: Path, capsys: Output) -> None:
    """Only the named specs and those that they extend are needed."""
    change_spec(root, "threads: 256", "threads: 100")
    (root / "generated" / "k4_2_d64.py").unlink()
    assert main(["render", "k4_2"]) == 0
    noted = capsys.readouterr().err
    assert noted.startswith("note: left out: specs/k1.yaml:3: tile.threads: ") and len(noted.splitlines()) == 1
    assert (root / "generated" / "k4_2_d64.py").read_text() == source("k4_2_d64")
    assert main(["render", "--check", "k4_2"]) == 0


def test_a_base_that_is_broken_is_no_other_spec(root: Path, capsys: Output) -> None:
    path = root / "specs" / "k4_smem.yaml"
    path.write_text(path.read_text() + "lood: 3\n")
    assert main(["render", "k4_2"]) == 2
    assert "specs/k4_smem.yaml:" in capsys.readouterr().err


def test_a_name_that_another_spec_claims_is_refused(root: Path, capsys: Output) -> None:
    (root / "specs" / "k4_2_d64.yaml").write_text("summary: x\nextends: k4_2\nproblem: {head_dim: 64}\nmatrix: {}\n")
    for name in ("k4_2", "specs/k4_2_d64.yaml"):
        assert main(["render", name]) == 2
        said = "specs/k4_2_d64.yaml: the name 'k4_2_d64' is also claimed by specs/k4_2.yaml; rename one of the files\n"
        assert capsys.readouterr().err == said
    assert main(["render", "k1"]) == 0
    assert capsys.readouterr().err == f"note: left out: {said}"


def test_an_unknown_name(root: Path, capsys: Output) -> None:
    assert main(["render", "k4_2_d65"]) == 2
    assert "there is no spec or module 'k4_2_d65'" in capsys.readouterr().err


def test_a_broken_template_writes_nothing(root: Path, capsys: Output) -> None:
    shutil.copytree(ROOT / "templates", root / "templates")
    path = root / "templates" / "sections" / "storage.py.jinja"
    path.write_text("#% if plan.nothing\n#% endif\n" + path.read_text())
    change_spec(root)
    before = contents(root)
    assert main(["render"]) == 2
    assert "has no attribute 'nothing'" in capsys.readouterr().err
    assert contents(root) == before


def test_the_mending_command_of_an_edited_file_mends(repository: Path, capsys: Output) -> None:
    with (repository / MODULE).open("a") as file:
        file.write("# edited\n")
    assert main(["render", "--check"]) == 1
    command = capsys.readouterr().err.rpartition("run `fa3gen ")[2].rstrip("`\n").split()
    assert command == ["render", "specs/k1.yaml", "--force"]
    assert main(command) == 0
    assert main(["render", "--check"]) == 0


# What else a change moves


def test_modules_of_specs_that_extend_the_changed_one_are_named(root: Path, capsys: Output) -> None:
    """k4_2 extends k4_smem: its modules are not what they should be any more, and nothing else says so."""
    path = root / "specs" / "k4_smem.yaml"
    path.write_text(path.read_text().replace("q: 128, kv: 64, warpgroups: 2", "q: 64, kv: 64, warpgroups: 1"))
    told = "also changes: 4 modules of k4_2 (extends k4_smem); `fa3gen render k4_2` writes them\n"
    assert main(["render", "--check", "k4_smem"]) == 1
    assert told in capsys.readouterr().out
    assert main(["render", "k4_smem"]) == 0
    out = capsys.readouterr().out
    assert "changed   generated/k4_smem_d64.py" in out and told in out
    assert main(["render", "k4_2"]) == 0
    assert "also changes" not in capsys.readouterr().out
    assert main(["render", "--check"]) == 0


def test_a_spec_beside_the_workspace_moves_no_other(root: Path, capsys: Output) -> None:
    """k4_2 extends the k4_smem of specs/, not one of the same name elsewhere; no page is about that one's modules."""
    (root / "generated" / "EVIDENCE.md").write_text("old\n")
    inside, outside = root / "specs" / "k4_smem.yaml", root / "elsewhere" / "k4_smem.yaml"
    outside.parent.mkdir()
    outside.write_text(inside.read_text())
    assert main(["render", str(outside)]) == 0
    for path in (inside, outside):
        path.write_text(path.read_text().replace("q: 128, kv: 64, warpgroups: 2", "q: 64, kv: 64, warpgroups: 1"))
    capsys.readouterr()
    assert main(["render", str(outside)]) == 0
    out = capsys.readouterr().out
    assert "changed   elsewhere/k4_smem_d64.py" in out and "also changes" not in out and "then " not in out


def test_nothing_else_changes_where_a_spec_that_extends_it_sets_the_field(root: Path, capsys: Output) -> None:
    path = root / "specs" / "k4_smem.yaml"
    path.write_text(path.read_text().replace("barrier: shared", "barrier: separate"))
    assert main(["render", "k4_smem"]) == 0
    out = capsys.readouterr().out
    assert "changed " in out and "also changes" not in out
