"""What the README shows is what the repository holds and the tool prints."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import fa3gen
from fa3gen import cli
from fa3gen.cli import COMMANDS
from fa3gen.compile.cache import cache_directory
from fa3gen.spec.model import Forward, SpecModel

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_spec_shown_is_the_committed_one() -> None:
    assert blocks("yaml") == [(ROOT / "specs/k4_2.yaml").read_text(encoding="utf-8")]


def test_the_kernel_shown_is_the_generated_one() -> None:
    excerpt = blocks("python")[0]
    assert excerpt in (ROOT / "generated/k4_2_d128_causal.py").read_text(encoding="utf-8")


def test_every_command_shown_exists() -> None:
    in_blocks = {
        line.split()[1] for block in blocks("bash") for line in block.splitlines() if line.startswith("fa3gen ")
    }
    inline = set(re.findall(r"(?:`|&& )fa3gen (\w+)", README))
    assert {"new", "render", "compile", "verify", "bench"} <= in_blocks
    assert inline | in_blocks <= set(COMMANDS)


def test_the_refusal_shown_is_what_the_tool_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("specs", "generated"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "mine", "--from", "k4_2"]) == 0
    spec = tmp_path / "specs/mine.yaml"
    spec.write_text(re.sub(r"^# load:.*$", "load: {kv_stages: 8}", spec.read_text(), flags=re.MULTILINE))
    capsys.readouterr()
    assert cli.main(["render", "mine"]) == 2
    assert capsys.readouterr().err in blocks("text")
    assert list((tmp_path / "generated").iterdir()) == []


def test_the_python_functions_shown_do_what_is_said() -> None:
    """All of it, with or without a GPU."""
    code = next(block for block in blocks("python") if "compile_module" in block)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["source"] == (ROOT / "generated/k4_2_d128.py").read_text(encoding="utf-8")
    assert names["census"].registers > 0
    assert names["report"].passed
    where = "CPU model of sm_90a (not a GPU result)" if names["device"] is None else "H"
    assert where in names["report"].device


def test_the_cache_lies_where_the_readme_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FA3GEN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    said = re.search(r"The cache lies in `~/([\w./]+)`", README)
    assert said is not None and cache_directory() == tmp_path / said.group(1)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    marked = re.search(r"<!-- test command -->\n```bash\n(.*?)```", README, flags=re.DOTALL)
    assert marked is not None
    words = shlex.split(marked.group(1))
    assert "pytest" in words and ".[test]" in words
    assert "<!-- test command -->" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_the_cpu_model_runs_the_module_as_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code = next(block for block in blocks("python") if 'on="cpu"' in block)
    names: dict[str, Any] = {"fa3gen": fa3gen}
    names.update(
        {name: torch.ones(1, rows, 1, 128, dtype=torch.bfloat16) for name, rows in (("q", 2), ("k", 3), ("v", 3))}
    )
    exec(code, names)
    assert torch.equal(names["out"], torch.ones_like(names["q"]))  # the mean of ones
    assert names["lse"].shape == (1, 1, 2)


def test_every_module_is_executed_where_the_readme_says() -> None:
    name = re.search(r"every committed module this way on every run \(`([\w/.]+)`", README)
    assert name is not None
    assert '@pytest.fixture(scope="module", params=STEMS)\ndef stem(' in (ROOT / name.group(1)).read_text(
        encoding="utf-8"
    )


# CONTRIBUTING.md

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_contributors_are_told_what_ci_runs() -> None:
    """The commands after the README's test command; CI starts one of them first and waits for it last."""
    ran = (ROOT / ".ci/run").read_text(encoding="utf-8").partition("set -x\n")[2].split("\n")
    told = [block for block in re.findall(r"```bash\n(.*?)```", CONTRIBUTING, flags=re.DOTALL) if "mypy" in block]
    assert all(line.count(" &") == (following == "types=$!") for line, following in pairwise(ran))
    waited_for = ("types=$!", 'wait "$types"')
    commands = {line.removesuffix(" &") for line in ran if line and line not in waited_for}
    assert ran[-2:] == [waited_for[1], ""]
    assert [{line.partition("#")[0].strip() for line in block.splitlines()} for block in told] == [commands]


def test_what_contributors_are_told_to_run_exists() -> None:
    assert set(re.findall(r"(?:`|^)fa3gen (\w+)", CONTRIBUTING, flags=re.MULTILINE)) <= set(COMMANDS)
    paths = re.findall(r"\b(?:tests|docs|fa3gen|specs|generated|templates)/[\w/.*]*[\w*/]", CONTRIBUTING)
    made = {"specs/mine.yaml", "generated/mine_*.py"}
    assert [path for path in paths if path not in made and not list(ROOT.glob(path))] == []
    assert "[CONTRIBUTING.md](CONTRIBUTING.md)" in README


def test_the_table_of_fields_names_all_that_attention_has() -> None:
    """Each field of the model in its own row, whatever it is nested in; and which ones a spec cannot leave out."""
    rows = dict(re.findall(r"^\| (`[^|]*`) \| (.*) \|$", README, flags=re.MULTILINE))
    told = {name: text for names, text in rows.items() for name in re.findall(r"`(\w+)`", names)}
    for name, field in Forward.model_fields.items():
        assert name in told, f"README's table of fields lacks {name}"
        for part in sorted(_fields_within(field.annotation) - {"kind"}):
            assert part in re.findall(r"\w+", told[name]), f"README's row of {name} lacks {part}"
    needed = re.search(r"without `extends` needs (.*?):\n", README, flags=re.DOTALL)
    required = [name for name, field in Forward.model_fields.items() if field.is_required()]
    assert needed is not None and re.findall(r"`(\w+)`", needed[1]) == required


def _fields_within(annotation: Any) -> set[str]:
    """Names of the fields of a model, or of each one that a union has."""
    if isinstance(annotation, type) and issubclass(annotation, SpecModel):
        return set(annotation.model_fields)
    return {name for part in get_args(annotation) for name in _fields_within(part)}
