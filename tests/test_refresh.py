"""`fa3gen refresh`: what is made from specs, modules and records is renewed, and what a run has to renew is named."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from rendering import CHECKOUT, ROOT

from fa3gen.base.files import sha256
from fa3gen.cli import main
from fa3gen.design.workspace import Workspace
from fa3gen.inspect import pages
from fa3gen.records import packed_records
from fa3gen.run.dispatch import read_table, table_path

# Modules that an H200 has verified as they are committed, and that the pages have figures of: one of a spec with a
# picture in docs/ladder.md, and one that a row of the dispatch table names.
RUNG = "k6_d128"
CHOSEN = read_table(table_path(CHECKOUT)).rows[0].module


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A checkout of one's own, its pages up to date but for packed cells, which it has none of.

    Most of the time would go into copying their 11,000 files, and into simulating their calls.
    """
    for folder in ("specs", "generated", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns(packed_records.FOLDER))
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "fa3gen").mkdir()
    monkeypatch.chdir(tmp_path)
    return Workspace(tmp_path, ROOT)


def edit(workspace: Workspace, stem: str) -> None:
    with workspace.module_path(stem).open("a") as file:
        file.write("# changed\n")


def forget_stale(workspace: Workspace) -> None:
    """Take records away that are of older files than the committed ones: a notice is to be of what a test edits."""
    for path in (workspace.generated_dir / "evidence").glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["source_sha256"] != sha256(workspace.module_path(path.stem)):
            path.unlink()


def rows_of(page: Path, stem: str) -> list[str]:
    return [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{stem}` |")]


def test_pages_follow_a_module_that_changed(copy: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    """One command: afterwards no page has a figure of the old file, and each says so."""
    forget_stale(copy)
    docs, evidence = copy.root / "docs", copy.generated_dir / "EVIDENCE.md"
    assert "| verified |" in rows_of(evidence, RUNG)[0]
    assert "–" not in rows_of(docs / "simulator.md", RUNG)[0]
    edit(copy, RUNG)
    assert main(["refresh", "--check"]) == 1
    said = capsys.readouterr()
    # docs/cpu_model.md has figures of it as long as the comparison with the CPU model is of the same file.
    assert {line.partition(" ")[0] for line in said.err.splitlines()} - {"docs/cpu_model.md"} == {
        *("generated/EVIDENCE.md", "README.md", "docs/matrix.md", "docs/simulator.md", "docs/ladder.md"),
    }
    assert "run `fa3gen refresh`" in said.err
    assert (
        f"stale: 1 module changed since verified on a GPU; on a Hopper GPU: fa3gen verify --evidence {RUNG}" in said.out
    )
    assert main(["refresh"]) == 0
    assert "wrote docs/simulator.md" in capsys.readouterr().out
    assert pages.check(copy) == []
    assert "not verified on a GPU (record is of an older file)" in rows_of(evidence, RUNG)[0]
    assert "stale: the file changed after " in rows_of(docs / "matrix.md", RUNG)[0]
    [row] = rows_of(docs / "simulator.md", RUNG)[:1]
    even, oldest, *nothing = [cell.strip() for cell in row.strip("|").split("|")][2:6]
    assert float(even) > 0 and float(oldest) > 0 and nothing == ["–", "–"]
    page = (docs / "simulator.md").read_text(encoding="utf-8")
    assert f"- `{RUNG}` is stale: the file changed after its record of " in page


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Workspace:
    """A checkout with the modules of one spec and of all that it extends, and no pages but the one about evidence."""
    for folder in ("specs", "generated"):
        (tmp_path / folder).mkdir()
    name: str | None = "k6_sequential"
    while name is not None:
        text = (ROOT / "specs" / f"{name}.yaml").read_text(encoding="utf-8")
        (tmp_path / "specs" / f"{name}.yaml").write_text(text, encoding="utf-8")
        for variant in CHECKOUT.resolve(name):
            shutil.copy(CHECKOUT.module_path(variant.stem), tmp_path / "generated")
        base = re.search(r"^extends: (\w+)$", text, re.MULTILINE)
        name = base and base[1]
    shutil.copytree(ROOT / "generated" / "evidence", tmp_path / "generated" / "evidence")
    monkeypatch.chdir(tmp_path)
    assert main(["refresh"]) == 0 and main(["render", "--check"]) == 0
    capsys.readouterr()
    return Workspace(tmp_path, ROOT)


def test_render_names_it_and_its_check_sees_evidence_of_other_files(
    few: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = few.specs_dir / "k6_sequential.yaml"
    spec.write_text(spec.read_text().replace('summary: "K6', 'summary: "k6'))
    assert main(["render", "k6_sequential"]) == 0
    assert "`fa3gen refresh` renews the pages about these modules" in capsys.readouterr().out
    assert main(["render", "--check"]) == 1
    said = capsys.readouterr().err
    assert said == "generated/EVIDENCE.md is not what specs, modules and records say; run `fa3gen refresh`\n"


def test_a_workspace_without_pages_has_its_evidence_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("specs", "generated"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["refresh"]) == 0
    assert capsys.readouterr().out == "wrote generated/EVIDENCE.md\n"


@pytest.mark.parametrize("options", [[], ["--check"]])
def test_outside_a_workspace_there_is_nothing_to_renew(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["refresh", *options]) == 2
    assert capsys.readouterr().err.startswith(f"there is nothing to renew: {tmp_path} lies in no checkout or workspace")
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_the_table_chooses_is_named(copy: Workspace) -> None:
    """A copy of the package's own data: its table names the module that has changed, and how it is measured again."""
    package = Workspace(copy.root, copy.root)
    assert not any(CHOSEN in notice and "measured with another" in notice for notice in pages.stale(CHECKOUT))
    shutil.copy(table_path(CHECKOUT), copy.root / "dispatch.yaml")
    edit(copy, CHOSEN)
    assert package.module_path(CHOSEN).is_file()
    [notice, *_] = [notice for notice in pages.stale(copy) if "measured with another" in notice]
    assert f"measured with another {CHOSEN}" in notice and f"fa3gen tune --measure {CHOSEN}" in notice


def test_all_modules_of_a_spec_are_named_by_it(copy: Workspace) -> None:
    forget_stale(copy)
    for variant in copy.resolve("k6"):
        edit(copy, variant.stem)
    edit(copy, "k5_d64")
    [notice] = [notice for notice in pages.stale(copy) if "verified on a GPU" in notice]
    assert notice == "5 modules changed since verified on a GPU; on a Hopper GPU: fa3gen verify --evidence k5_d64 k6"
