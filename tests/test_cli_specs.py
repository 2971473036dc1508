"""`fa3gen list`, `new`, `schema`, and how the command line treats errors, help and closed pipes."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from rendering import ROOT

from fa3gen.cli import COMMANDS, main
from fa3gen.design import workspace
from fa3gen.design.workspace import Workspace

SPEC = """\
summary: both products on WGMMA [fast]
problem: {dtype: bf16}
tile: {q: 128, kv: 64, warpgroups: 2}
load: {engine: tma, kv_stages: 2, barrier: separate}
smem: {q: 128B, k: 128B, v: 128B}
qk:
  engine: wgmma
  a: {source: smem, major: k}
  b: {major: k}
pv: {engine: wgmma, a: {source: registers, major: k}, b: {major: mn}}
handoff: {through: registers}
matrix: {problem.head_dim: [64, 128], mask: [none, {kind: window, left: 512, right: 0}]}
"""

Output = pytest.CaptureFixture[str]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty workspace as working directory, and a package with one spec."""
    (tmp_path / "data" / "specs").mkdir(parents=True)
    monkeypatch.setattr(workspace, "bundled_data", lambda: tmp_path / "data")
    (tmp_path / "data" / "specs" / "k4_2.yaml").write_text(SPEC)
    here = tmp_path / "here"
    (here / "specs").mkdir(parents=True)
    (here / "generated").mkdir()
    monkeypatch.chdir(here)
    return here


def fa3gen(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fa3gen", *arguments], capture_output=True, text=True, cwd=cwd)


# list


def test_list(root: Path, capsys: Output) -> None:
    (root / "specs" / "mine.yaml").write_text("extends: k4_2\nsummary: mine\nload: {kv_stages: 1}\n")
    assert main(["list"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "mine: mine"
    assert "k4_2: both products on WGMMA [fast]" in lines
    assert lines[1:5] == [
        "dtype bf16; tile 128x64 2 wg; load tma x1; QK/PV wgmma/wgmma; P through registers; layout dense",
        "module d mask",
        "mine_d64 64 none",
        "mine_d64_window512_0 64 window 512, 0",
    ]
    assert "k4_2_d128_window512_0 128 window 512, 0" in lines


def test_a_list_of_one_module_has_no_columns(root: Path, capsys: Output) -> None:
    (root / "specs" / "one.yaml").write_text("extends: k4_2\nsummary: x\nproblem: {head_dim: 64}\nmatrix: {}\n")
    assert main(["list", "one"]) == 0
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "one: x",
        "d 64; dtype bf16; mask none; tile 128x64 2 wg; load tma x2; QK/PV wgmma/wgmma; P through registers; "
        "layout dense",
        "one",
        "",
    ]


@pytest.mark.parametrize(
    ("options", "stems"),
    [
        (["k4_2_d64"], ["k4_2_d64"]),
        (["k4_2", "--head-dim", "64"], ["k4_2_d64", "k4_2_d64_window512_0"]),
        (["--mask", "window512_0"], ["k4_2_d64_window512_0", "k4_2_d128_window512_0"]),
        (["--mask", "window 512, 0"], ["k4_2_d64_window512_0", "k4_2_d128_window512_0"]),  # as the list shows it
        (["--mask", "full", "--head-dim", "128", "--dtype", "bf16"], ["k4_2_d128"]),
        (["--mask", "none"], ["k4_2_d64", "k4_2_d128"]),
        (["--head-dim", "64", "--head-dim", "128", "--mask", "full"], ["k4_2_d64", "k4_2_d128"]),
    ],
)
def test_list_filters(root: Path, options: list[str], stems: list[str], capsys: Output) -> None:
    assert main(["list", *options, "--json"]) == 0
    assert [row["stem"] for row in json.loads(capsys.readouterr().out)] == stems
    assert main(["list", *options]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  k4_2_")] == stems


@pytest.mark.parametrize(
    ("options", "offered"),
    [
        (["--dtype", "bfloat16"], "--dtype bf16"),
        (["--mask", "causal", "--head-dim", "64"], "--head-dim 64, 128 and --mask full, window512_0"),
        (["k4_2_d64", "--mask", "any window"], "--mask full"),
    ],
)
def test_a_list_of_nothing_says_what_there_is(root: Path, options: list[str], offered: str, capsys: Output) -> None:
    assert main(["list", *options]) == 2
    assert capsys.readouterr().err == f"no module is like that; there is {offered}\n"


def test_list_takes_specs_by_path(root: Path, capsys: Output) -> None:
    """Also such as lie outside `specs/`, one with the name of a module there."""
    drafts = root / "drafts"
    drafts.mkdir()
    for stem in ("mine", "k4_2_d64"):
        (drafts / f"{stem}.yaml").write_text("extends: k4_2\nsummary: x\nproblem: {head_dim: 64}\nmatrix: {}\n")
    for names, sources in (
        (["drafts/mine.yaml"], ["drafts/mine.yaml"]),
        (["drafts/mine.yaml", "k4_2_d128"], ["specs/k4_2.yaml", "drafts/mine.yaml"]),
        (["drafts/k4_2_d64.yaml"], ["drafts/k4_2_d64.yaml"]),
    ):
        assert main(["list", *names, "--mask", "none", "--json"]) == 0
        assert [row["source"] for row in json.loads(capsys.readouterr().out)] == sources


def test_masks_have_the_words_that_the_list_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them names what its modules are called by, in `list` and in `bench`."""
    from fa3gen.cli import masks, specs
    from fa3gen.design.family import mask_label
    from fa3gen.spec.specfile import attention_among

    monkeypatch.chdir(ROOT)
    found = attention_among(variant for file in Workspace.find().load_all() for variant in file.variants)
    shown = {specs._mask_text(variant.spec): mask_label(variant.spec.mask) for variant in found}
    assert {"none", "causal", "any window", "window 512, 0"} <= shown.keys()
    assert {word: masks.name(word) for word in shown} == shown
    assert {label: masks.name(label) for label in shown.values()} == {label: label for label in shown.values()}


def test_the_list_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    """Of all specs there are, with no cell folded or cut."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    assert main(["list"]) == 0
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in capsys.readouterr().out.splitlines()]
    stems = {variant.stem for file in Workspace.find().load_all() for variant in file.variants}
    assert max(map(len, lines)) <= 80 and not any("\u2026" in line for line in lines)
    assert stems <= {line.split()[0] for line in lines if line.startswith("  ")}


# completion


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["render", "k4_sm"], {"k4_smem", "k4_smem_d64", "k4_smem_d128_causal"}),
        (["explain", "--chip", "h2"], {"h200"}),
        (["new", "x", "--from", "k6_s"], {"k6_sequential"}),
        (["diff", "specs/k6"], {"specs/k6.yaml", "specs/k6_sequential.yaml"}),
        (["trace", "./spec"], {"./specs/"}),
    ],
)
def test_completion(words: list[str], offered: set[str]) -> None:
    """As a shell asks for it."""
    line = " ".join(["fa3gen", *words])
    environment = {
        **os.environ,
        "_FA3GEN_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words)),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-P", "-m", "fa3gen"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    found = set(done.stdout.split())
    assert offered <= found and all(word.startswith(words[-1]) for word in found), done


def test_list_json(root: Path, capsys: Output) -> None:
    assert main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["stem"] for row in rows] == ["k4_2_d64", "k4_2_d64_window512_0", "k4_2_d128", "k4_2_d128_window512_0"]
    assert rows[3] == {
        "spec": "k4_2",
        "stem": "k4_2_d128_window512_0",
        "summary": "both products on WGMMA [fast]",
        "source": "specs/k4_2.yaml",
        "head_dim": 128,
        "head_dim_v": 128,
        "dtype": "bf16",
        "mask": "window 512, 0",
        "layout": "dense",
        "tile": "128x64 2 wg",
        "load": "tma x2",
        "products": "wgmma/wgmma",
        "handoff": "registers",
        "lse": True,
    }


def test_list_without_specs(root: Path, capsys: Output) -> None:
    (root.parent / "data" / "specs" / "k4_2.yaml").unlink()
    assert main(["list"]) == 0
    assert capsys.readouterr().out == f"There is no spec in {root / 'specs'}.\n"


def test_errors_of_specs_come_one_per_line_without_traceback(root: Path, capsys: Output) -> None:
    (root / "specs" / "bad.yaml").write_text("summary: x\nextends: k4_2\ntile: {kv: 1.5}\nlood: 3\n")
    assert main(["render", "bad"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "specs/bad.yaml:3: tile.kv: an integer is needed, got the number 1.5",
        "specs/bad.yaml:4: lood: unknown key 'lood'; did you mean 'load'?",
    ]


@pytest.mark.parametrize("command", [["list"], ["matrix"], ["new", "mine", "--from", "k4_2"]])
def test_a_broken_spec_does_not_block_the_others(root: Path, command: list[str], capsys: Output) -> None:
    (root / "specs" / "bad.yaml").write_text("summary: x\nextends: k4_2\ntile: {kv: 1.5}\nlood: 3\n")
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "k4_2_d64" in captured.out or (root / "specs" / "mine.yaml").exists()
    if command[0] != "new":  # it reads the others for their names only
        assert captured.err == (
            "note: left out: specs/bad.yaml:3: tile.kv: an integer is needed, got the number 1.5 (and 1 more)\n"
        )


# new


def test_new(root: Path, capsys: Output) -> None:
    assert main(["new", "mine", "--from", "k4_2"]) == 0
    assert capsys.readouterr().out == ("wrote specs/mine.yaml\nnext: edit it, then run `fa3gen render mine`\n")
    text = (root / "specs" / "mine.yaml").read_text()
    assert text.startswith("summary: As k4_2; say here in one line what is different\nextends: k4_2\n\n# ")
    assert "\n# load: {engine: tma, kv_stages: 2, barrier: separate}\n" in text
    assert "\n#   problem.head_dim: [64, 128]\n" in text
    variants = Workspace.find().resolve("mine")
    assert [v.stem for v in variants] == ["mine_d64", "mine_d64_window512_0", "mine_d128", "mine_d128_window512_0"]
    assert [v.spec for v in variants] == [v.spec for v in Workspace.find().resolve("k4_2")]


def test_the_hints_of_a_new_spec_are_its_fields(root: Path) -> None:
    """Uncommenting all of them changes nothing."""
    main(["new", "mine", "--from", "k4_2"])
    path = root / "specs" / "mine.yaml"
    text = path.read_text()
    prose, hints = text.split("# problem:", 1)
    path.write_text(prose + "problem:" + re.sub(r"^# ", "", hints, flags=re.MULTILINE))
    assert "\ntile: " in path.read_text()
    variants = Workspace.find().resolve("mine")
    assert [v.spec for v in variants] == [v.spec for v in Workspace.find().resolve("k4_2")]


def test_new_from_a_path_and_from_a_new_spec(root: Path) -> None:
    stray = root / "stray.yaml"
    stray.write_text(SPEC)
    assert main(["new", "one", "--from", "stray.yaml"]) == 0
    assert "\nextends: ../stray.yaml\n" in (root / "specs" / "one.yaml").read_text()
    assert main(["new", "two", "--from", "specs/one.yaml"]) == 0
    assert "\nextends: one\n" in (root / "specs" / "two.yaml").read_text()
    assert len(Workspace.find().load_all()) == 2


def test_new_makes_the_specs_directory(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["new", "mine", "--from", "k4_2"]) == 0
    assert len(Workspace.find().resolve("mine")) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("k-5", "--from", "k4_2"), "'k-5' cannot name a Python module; use letters, digits and underscores"),
        (("../k5", "--from", "k4_2"), "'../k5' cannot name a Python module; use letters, digits and underscores"),
        (("k4_2", "--from", "k4_2"), "the name 'k4_2' is taken by "),
        (("k4_2_d64", "--from", "k4_2"), "the name 'k4_2_d64' is taken by "),
        (("k5", "--from", "k4_2_d64"), "'k4_2_d64' is one module of the spec k4_2; use --from k4_2"),
        (("k5", "--from", "k4_3"), "there is no spec or module 'k4_3'; did you mean 'k4_2'"),
        (("k5", "--from", "no/such.yaml"), "there is no spec file no/such.yaml"),
    ],
)
def test_new_refuses(root: Path, capsys: Output, arguments: tuple[str, ...], message: str) -> None:
    assert main(["new", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)
    assert list(root.rglob("*.yaml")) == []


def test_new_does_not_overwrite(root: Path, capsys: Output) -> None:
    (root / "specs" / "mine.yaml").write_text("precious")
    assert main(["new", "mine", "--from", "k4_2"]) == 2
    assert capsys.readouterr().err == "specs/mine.yaml exists already; choose another name or edit that file\n"
    assert (root / "specs" / "mine.yaml").read_text() == "precious"


# schema


def test_schema(capsys: Output) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "fa3gen spec file"


# The command line itself


def test_help_names_every_command_and_is_quick() -> None:
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = fa3gen("--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert done.returncode == 0
    for command in COMMANDS:
        assert re.search(rf"^\W*{command}\b", done.stdout, flags=re.MULTILINE), command
    assert min(times) < 0.75  # seconds of processor time, which other tests beside this one do not stretch


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from fa3gen.cli import main; main(['--help']); "
        "print([m for m in ('torch', 'cutlass', 'pydantic', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_specs_need_neither_torch_nor_cutlass() -> None:
    code = (
        "import sys; import fa3gen.spec.model, fa3gen.spec.specfile, fa3gen.spec.schema; "
        "import fa3gen.design.rules, fa3gen.design.workspace; "
        "print([m for m in ('torch', 'cutlass') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_version(capsys: Output) -> None:
    assert main(["--version"]) == 0
    assert re.match(r"fa3gen (\d+\.\d+|\(run from)", capsys.readouterr().out)


def test_mistyped_command(capsys: Output) -> None:
    assert main(["lst"]) == 2
    assert "Did you mean 'list'?" in " ".join(capsys.readouterr().err.split())


def test_unknown_option() -> None:
    done = fa3gen("list", "--jsn")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_ctrl_c_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Workspace, "find", interrupted)
    assert main(["list"]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("command", ["schema", "list --json", "list"])
def test_a_closed_pipe_is_quiet(root: Path, command: str) -> None:
    (root / "specs" / "mine.yaml").write_text(SPEC)
    line = f"{sys.executable} -m fa3gen {command} | true"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=root)
    assert done.stderr == ""


def test_a_bug_is_not_taken_for_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Workspace, "find", broken)
    with pytest.raises(ZeroDivisionError):
        main(["list"])
