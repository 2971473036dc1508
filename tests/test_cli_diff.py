"""`fa3gen diff`: what it prints, how it exits, and what it makes of git."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from rendering import small_checkout, source

from fa3gen.cli import main
from fa3gen.inspect.difference.side_by_side import NARROWEST

Output = pytest.CaptureFixture[str]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the checkout with three of its specs, as working directory; no git."""
    small_checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def commit(root: Path) -> None:
    git(root, "add", "--all", ".")
    git(root, "commit", "-m", "a change")


@pytest.fixture
def repository(root: Path) -> Path:
    """The same, everything committed on the branch `main`."""
    git(root, "init", "--initial-branch=main")
    commit(root)
    return root


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# Two specs


def test_two_modules(root: Path, capsys: Output) -> None:
    assert main(["diff", "k4_smem_d128", "specs/k4_2.yaml"]) == 1
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and lines[0] == "k4_smem_d128 -> k4_2_d128"
    assert "  handoff.swizzle  128B -> (none)" in lines
    assert "total 115712 bytes -> 99328 bytes" in [" ".join(line.split()) for line in lines]
    assert (
        "  - per step, all warps: store P, barrier of the warpgroup (16 bits, by stmatrix; fence.proxy.async)" in lines
    )
    assert "--- generated/k4_smem_d128.py" in lines
    assert max(map(len, lines)) > 100  # nothing is folded, although COLUMNS may say 80


def test_pairs_that_differ_alike_are_told_once(root: Path, capsys: Output) -> None:
    assert main(["diff", "k4_smem", "k4_2", "--no-source"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["k4_smem_d64 -> k4_2_d64", "k4_smem_d64_causal -> k4_2_d64_causal"]
    assert lines.count("spec") == 2 and "source" not in lines


def test_nothing_differs(root: Path, capsys: Output) -> None:
    assert main(["diff", "k4_2", "specs/k4_2.yaml"]) == 0
    assert capsys.readouterr().out.count("same spec, same plan\n") == 1


def test_a_file_that_drifted_is_mentioned(root: Path, capsys: Output) -> None:
    (root / "generated" / "k4_2_d64.py").write_text("# mine\n")
    assert main(["diff", "k4_2_d64", "generated/k4_2_d64.py"]) == 0
    assert (
        "note: generated/k4_2_d64.py is not what specs/k4_2.yaml renders to; compared is the rendering "
        "(`fa3gen render specs/k4_2.yaml` writes it)\n"
    ) in capsys.readouterr().out


def test_a_spec_that_was_never_rendered(root: Path, capsys: Output) -> None:
    (root / "specs" / "mine.yaml").write_text("extends: k4_2\nsummary: mine\nload: {kv_stages: 3}\n")
    assert main(["diff", "k4_2_d64", "mine_d64"]) == 1
    out = capsys.readouterr().out
    assert "load.kv_stages  2 -> 3" in out and "-KV_STAGES = 2 " in out and "+KV_STAGES = 3 " in out


def test_json(root: Path, capsys: Output) -> None:
    assert main(["diff", "k4_smem_d64", "k4_2_d64", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    [pair] = document["pairs"]
    assert document["differ"] and pair["differ"] and document["only_old"] == []
    assert (pair["old"]["stem"], pair["new"]["spec"]) == ("k4_smem_d64", "specs/k4_2.yaml")
    assert {"field": "handoff.swizzle", "old": "128B", "new": None, "base": None} in pair["fields"]
    assert {"topic": "expected of the compiled code", "what": "mbarrier init", "old": "5", "new": "9"} in pair["plan"]
    assert pair["source"]["diff"].startswith("--- generated/k4_smem_d64.py\n+++ generated/k4_2_d64.py\n@@ -1,")


def test_side_by_side(root: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(NARROWEST))
    assert main(["diff", "k4_smem_d64", "k4_2_d64", "--side-by-side"]) == 1
    lines = capsys.readouterr().out.splitlines()
    [heading] = [line for line in lines if "generated/k4_smem_d64.py" in line]
    assert heading.index("generated/k4_2_d64.py") > NARROWEST // 2 and "--- generated/k4_smem_d64.py" not in lines
    assert max(map(len, lines)) <= NARROWEST
    [line] = [line for line in lines if "kv_barriers: cute.struct.MemRange" in line]
    assert " | " in line and "k_barriers: cute.struct.MemRange" in line.partition(" | ")[2]


def test_colours_are_for_terminals(root: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["diff", "k4_smem_d64", "k4_2_d64", "--no-source"]
    for variables, coloured in (({}, False), ({"FORCE_COLOR": "1"}, True), ({"NO_COLOR": "1"}, False)):
        for name, value in {"TERM": "xterm-256color", **variables}.items():
            monkeypatch.setenv(name, value)
        assert main(arguments) == 1
        assert ("\x1b[31m" in capsys.readouterr().out) == coloured, variables


# Requests that cannot be served


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["k4_3", "k4_2"], "there is no spec or module 'k4_3'; did you mean "),
        (["k4_2", "specs/k4_smm.yaml"], "there is no spec file specs/k4_smm.yaml; did you mean 'k4_smem'"),
        (["k4_2"], "name a second spec to compare k4_2 with, or a revision: `fa3gen diff k4_2 --rev HEAD`"),
        (["k1", "k4_2", "k4_smem"], "two specs can be compared, not 3: k1, k4_2, k4_smem"),
        (["k1", "k4_2", "--rev", "HEAD"], "--rev compares one spec with itself; name one, not k1, k4_2"),
        (["k1", "--rev", "a..b", "--rev", "c"], "--rev a..b --rev c: give one revision, two, or OLD..NEW"),
        (["k1", "--rev", "a...b"], "--rev a...b: give one revision, two, or OLD..NEW"),
        (["k1", "--rev", "HEAD"], "git cannot read "),
    ],
)
def test_refusals(root: Path, capsys: Output, arguments: list[str], words: str) -> None:
    assert main(["diff", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(words)


def test_without_git(root: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(root))
    assert main(["diff", "k1", "--rev", "HEAD"]) == 2
    assert capsys.readouterr().err == "--rev needs git, which is not installed (or not in PATH)\n"


# Revisions


def test_a_revision_and_the_working_tree(repository: Path, capsys: Output) -> None:
    """What was rendered is not looked at: the change is seen before `fa3gen render`."""
    assert main(["diff", "k4_2", "--rev", "HEAD"]) == 0
    assert "same spec, same plan\nsame source: k4_2_d64\n" in capsys.readouterr().out
    edit(repository / "specs" / "k4_2.yaml", "kv_stages: 2", "kv_stages: 3")
    assert main(["diff", "k4_2_d64", "--rev", "HEAD"]) == 1
    out = capsys.readouterr().out
    assert "k4_2_d64 at HEAD -> k4_2_d64\n" in out and "load.kv_stages  2 -> 3" in out
    assert "-KV_STAGES = 2 " in out and "+KV_STAGES = 3 " in out
    assert "note: generated/k4_2_d64.py is not what specs/k4_2.yaml renders to" in out


def test_what_a_spec_extends_is_of_the_same_revision(repository: Path, capsys: Output) -> None:
    edit(repository / "specs" / "k4_smem.yaml", "kv: 64", "kv: 80")
    commit(repository)
    assert main(["diff", "k4_2_d64", "--rev", "HEAD~1", "--no-source"]) == 1
    assert "tile.kv  64 -> 80" in capsys.readouterr().out
    for revisions in (["HEAD~1..HEAD"], ["HEAD~1..main"], ["HEAD~1", "main"]):
        arguments = [word for revision in revisions for word in ("--rev", revision)]
        assert main(["diff", "specs/k4_2.yaml", "--no-source", *arguments]) == 1
        assert "tile.kv  64 -> 80" in capsys.readouterr().out


def test_what_one_field_moves_in_other_specs(repository: Path, capsys: Output) -> None:
    """k4_2 extends k4_smem, which gives both their tile; each diff says so, from its own side."""
    edit(repository / "specs" / "k4_smem.yaml", "q: 128, kv: 64, warpgroups: 2", "q: 64, kv: 64, warpgroups: 1")
    assert main(["diff", "k4_smem", "--rev", "HEAD", "--no-source"]) == 1
    out = capsys.readouterr().out
    assert "note: also changes: 4 modules of k4_2 (extends k4_smem)\n" in out
    assert "  tile.q           128 -> 64\n" in out
    assert main(["diff", "k4_2", "--rev", "HEAD", "--no-source"]) == 1
    out = capsys.readouterr().out
    assert "also changes" not in out and "  tile.q           128 -> 64, from specs/k4_smem.yaml\n" in out
    commit(repository)
    assert main(["diff", "k4_smem", "--rev", "HEAD~1..HEAD", "--no-source", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["notes"][-1] == "also changes: 4 modules of k4_2 (extends k4_smem)"
    assert {"field": "tile.q", "old": 128, "new": 64, "base": None} in found["pairs"][0]["fields"]


def test_modules_of_a_revision_are_the_files_that_were_committed(repository: Path, capsys: Output) -> None:
    edit(repository / "generated" / "k4_2_d64.py", "KV_STAGES = 2", "KV_STAGES = 9")
    (repository / "generated" / "k4_2_d128.py").unlink()
    commit(repository)
    assert main(["diff", "k4_2", "--rev", "HEAD~1..HEAD"]) == 1
    out = capsys.readouterr().out
    assert "-KV_STAGES = 2 " in out and "+KV_STAGES = 9 " in out and "same spec, same plan" in out
    assert "note: generated/k4_2_d128.py is not in HEAD\n" in out and "same source: k4_2_d64_causal" in out


def test_a_spec_that_is_refused_today(repository: Path, capsys: Output) -> None:
    """Its text and its modules still are compared."""
    good = (repository / "specs" / "k4_2.yaml").read_text()
    edit(repository / "specs" / "k4_2.yaml", "kv_stages: 2", "depth: 2")
    edit(repository / "generated" / "k4_2_d64.py", "KV_STAGES = 2", "DEPTH = 2")
    commit(repository)
    (repository / "specs" / "k4_2.yaml").write_text(good)
    assert main(["diff", "k4_2", "--rev", "HEAD"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "note: at HEAD this fa3gen refuses the spec, so only texts are compared:" in lines
    assert any(line.startswith("specs/k4_2.yaml:3: load.depth: unknown key") for line in lines)
    assert "-load: {engine: tma, depth: 2, barrier: separate}" in lines
    assert "+load: {engine: tma, kv_stages: 2, barrier: separate}" in lines
    assert "-DEPTH = 2  # tiles of K and of V in flight or in use" in lines
    assert "same source: k4_2_d128" in lines and "same spec, same plan" not in lines


def test_modules_that_came_or_went(repository: Path, capsys: Output) -> None:
    edit(repository / "specs" / "k1.yaml", "[64, 128]", "[64, 256]")
    assert main(["diff", "k1", "--rev", "HEAD", "--no-source"]) == 1
    out = capsys.readouterr().out
    assert "only on the first side: k1_d128, k1_d128_causal\n" in out
    assert "only on the second side: k1_d256, k1_d256_causal\n" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["k1", "--rev", "maain"], "there is no revision 'maain' in "),
        (["k1", "--rev", "-x"], "there is no revision '-x' in "),
        (["k4_2_d65", "--rev", "HEAD"], "at HEAD, there is no spec or module 'k4_2_d65'; did you mean "),
        (["k5", "--rev", "HEAD"], "at HEAD, k5 is a spec of the package, not of this checkout; name one of its own"),
        (["specs/k5.yaml", "--rev", "HEAD"], "specs/k5.yaml is not in HEAD; `git log --oneline -- specs/k5.yaml` "),
        (["../k5.yaml", "--rev", "HEAD"], "../k5.yaml lies outside "),
    ],
)
def test_refused_revisions(repository: Path, capsys: Output, arguments: list[str], words: str) -> None:
    assert main(["diff", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(words)
    if "maain" in words:
        assert "did you mean 'main'?" in err and "`git log --oneline`" in err


def test_from_a_folder_inside(repository: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository / "specs")
    for name in ("k4_2.yaml", "specs/k4_2.yaml", "../generated/k4_2_d64.py"):
        assert main(["diff", name, "--rev", "HEAD"]) == 0
    assert "same source" in capsys.readouterr().out


def test_the_module_of_a_revision_is_read_as_it_is(repository: Path) -> None:
    from fa3gen.design.workspace import Workspace
    from fa3gen.inspect.difference.revisions import difference

    [pair] = difference("k4_2_d64", "HEAD", None, Workspace.find(repository)).pairs
    assert pair.old.module == source("k4_2_d64") == pair.new.module
