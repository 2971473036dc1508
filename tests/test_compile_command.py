"""`fa3gen compile` as a user meets it: tables, JSON, kept files, exit codes."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fa3gen import cli
from fa3gen.compile.census import Loop
from fa3gen.generate.expected import Expectation

DATA = Path(__file__).parent / "data"
RS_GEMM = Expectation(kernels=1, wgmma={(64, 64, 16, "registers"): 4}, wgmma_waits=2, smem_bytes=8192)


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace of the user's own, with the specs of the package and one small kernel in place of k2_d64."""
    (tmp_path / "specs").mkdir()
    (tmp_path / "generated").mkdir()
    shutil.copy(DATA / "rs_gemm.py", tmp_path / "generated" / "k2_d64.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path


def predict(monkeypatch: pytest.MonkeyPatch, expectation: Expectation) -> None:
    monkeypatch.setattr("fa3gen.generate.plan.make_plan", lambda variant: SimpleNamespace(expectation=expectation))


def test_module_as_predicted(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    predict(monkeypatch, RS_GEMM)
    assert cli.main(["compile", "k2_d64", "--keep", "kept"]) == 0
    printed = capsys.readouterr()
    lines = [" ".join(line.split()) for line in printed.out.splitlines()]
    assert "wgmma m64n64k16, A from registers 4 4" in lines
    assert "shared memory per CTA (bytes) 8192 8192" in lines
    assert "WGMMA serialised by ptxas no no" in lines
    assert "as predicted" in lines
    assert "SASS instructions, 4 GMMA, 0 EX2" in printed.out
    assert printed.err == ""
    assert {path.name for path in (workspace / "kept").iterdir()} == {"k2_d64.ptx", "k2_d64.cubin", "k2_d64.sass"}
    assert "wgmma.mma_async" in (workspace / "kept" / "k2_d64.ptx").read_text()
    assert "HGMMA.64x64x16" in (workspace / "kept" / "k2_d64.sass").read_text()
    assert (workspace / "kept" / "k2_d64.cubin").read_bytes().startswith(b"\x7fELF")


def test_loops_say_which_multiply_adds_lose_a_cycle() -> None:
    from fa3gen.cli.compile import loop_lines

    def line(**counts: int) -> str:
        loop = Loop(0x10, depth=1, innermost=True, waits=False, instructions=99, ex2=0, **{"gmma": 0, **counts})
        census = SimpleNamespace(kernels=[SimpleNamespace(label="k", sass=SimpleNamespace(loops=[loop]))])
        [only] = loop_lines(SimpleNamespace(census=census))  # type: ignore[arg-type]
        return only.partition("EX2")[2]

    assert line(ffma=64, one_bank=3) == ", 64 FFMA, 3 in one bank"
    assert line(ffma=64) == ", 64 FFMA"
    assert line() == line(gmma=4, ffma=64, one_bank=3) == ""


def test_module_that_is_not_what_its_real_plan_predicts(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of k2 predicts a kernel without WGMMA; what lies there under its name has some."""
    assert cli.main(["compile", "k2_d64"]) == 1
    printed = capsys.readouterr().out
    assert "MISMATCH" in printed
    assert "as predicted" not in printed


def test_json_of_a_mismatch(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    predict(monkeypatch, Expectation(tma_loads=2))
    assert cli.main(["compile", "k2_d64", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    (module,) = document["modules"]
    assert (module["stem"], module["error"]) == ("k2_d64", None)
    assert module["mismatches"] == [{"fact": "TMA loads", "expected": "2", "found": "0"}]
    assert module["facts"]["total"]["ptx"]["wgmma"][0]["count"] == 4
    assert module["facts"]["kernels"][0]["label"] == "rs_gemm"
    assert module["ptxas"].startswith("1") and 0 < module["peak_bytes"] < 2 * 2**30


def test_one_module_of_several_that_does_not_compile(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    predict(monkeypatch, RS_GEMM)
    generated = workspace / "generated"
    for stem in ("k2_d64_causal", "k2_d128"):
        shutil.copy(generated / "k2_d64.py", generated / f"{stem}.py")
    (generated / "k2_d128_causal.py").write_text("raise ValueError('no kernel here')\n")
    assert cli.main(["compile", "k2", "--json", "--jobs", "2"]) == 2
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    outcomes = {module["stem"]: module["error"] for module in document["modules"]}
    assert document["ok"] is False
    assert sorted(outcomes) == ["k2_d128", "k2_d128_causal", "k2_d64", "k2_d64_causal"]
    assert [stem for stem, error in outcomes.items() if error] == ["k2_d128_causal"]
    assert "k2_d128_causal.py does not compile:\n  ValueError: no kernel here" in printed.err
    assert "Traceback" not in printed.err


def test_missing_modules_name_the_command_that_renders_them(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DATA.parent.parent / "specs", workspace / "specs", dirs_exist_ok=True)
    assert cli.main(["compile", "k2"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "k2_d128.py" in printed.err and "k2_d64.py" not in printed.err
    assert printed.err.endswith("write them with: fa3gen render specs/k2.yaml\n")


def test_unknown_spec(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", "k9"]) == 2
    assert "k9" in capsys.readouterr().err


def test_missing_tools_are_noticed_before_compiling(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fa3gen.compile import compiler, toolchain

    def not_installed(name: str) -> None:
        raise toolchain.metadata.PackageNotFoundError(name)

    def not_reached(*arguments: object) -> None:
        raise AssertionError("compiled without the tools to examine the result")

    monkeypatch.setattr(toolchain.metadata, "files", not_installed)
    monkeypatch.setattr(compiler, "compile_module", not_reached)
    monkeypatch.setenv("PATH", str(workspace))
    assert cli.main(["compile", "k2_d64"]) == 2
    assert capsys.readouterr().err == "cuobjdump not found; install it with: pip install nvidia-cuda-cuobjdump\n"


def test_keep_where_nothing_can_be_written(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    predict(monkeypatch, RS_GEMM)
    (workspace / "kept").write_text("a file, not a directory")
    assert cli.main(["compile", "k2_d64", "--keep", "kept"]) == 2
    assert "cannot write to kept" in capsys.readouterr().err


# Many modules at once

# The command as a terminal starts it: a shell's background jobs ignore SIGINT, and Python inherits that.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from fa3gen import cli
sys.exit(cli.main(sys.argv[1:]))
"""
K2 = ("k2_d64", "k2_d64_causal", "k2_d128", "k2_d128_causal")


def meeting(marks: Path, number: int, late: float = 0.0) -> str:
    """Source of a module that waits, a minute at most, until `number` are compiled at the same time, and then fails."""
    return (
        "import os, pathlib, time\n"
        f"marks = pathlib.Path({str(marks)!r})\n"
        "(marks / str(os.getpid())).touch()\n"
        "end = time.monotonic() + 60\n"
        f"while len(list(marks.iterdir())) < {number} and time.monotonic() < end:\n"
        "    time.sleep(0.01)\n"
        f"time.sleep({late})\n"
        "raise ValueError('no kernel here')\n"
    )


@pytest.fixture
def marks(tmp_path: Path) -> Path:
    (tmp_path / "marks").mkdir()
    return tmp_path / "marks"


def test_as_many_modules_compile_at_once_as_there_are_cpus(
    workspace: Path, marks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of them meet, on a machine of three CPUs; what is printed has the order of the specs, not of the ends."""
    from fa3gen.compile import compiler

    monkeypatch.setattr(compiler, "usable_cpus", lambda: 3)
    for number, stem in enumerate(K2[1:]):
        (workspace / "generated" / f"{stem}.py").write_text(meeting(marks, 3, late=0.4 - 0.2 * number))
    assert cli.main(["compile", *K2[1:], "--json"]) == 2
    printed = capsys.readouterr()
    assert [module["stem"] for module in json.loads(printed.out)["modules"]] == list(K2[1:])
    failed = [line for line in printed.err.splitlines() if "does not compile" in line]
    assert [Path(line.split()[0]).stem for line in failed] == list(K2[1:])


def test_an_interrupt_ends_all_at_once(workspace: Path, marks: Path, tmp_path: Path) -> None:
    """Nothing is left behind, no process, no file, no word, and nothing is waited for."""
    for stem in K2:
        (workspace / "generated" / f"{stem}.py").write_text(meeting(marks, 99))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "compile", *K2, "--jobs", "2"],
        cwd=workspace,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    started = time.monotonic()
    while len(list(marks.iterdir())) < 2:
        assert process.poll() is None and time.monotonic() - started < 60
        time.sleep(0.02)
    os.kill(
        process.pid, signal.SIGINT
    )  # from a terminal the whole group gets it, but servers are in groups of their own
    printed, _ = process.communicate(timeout=20)
    assert (process.returncode, printed) == (130, "")
    assert len(list(marks.iterdir())) == 2  # the other two were never begun
    # The DSL makes a directory named after the user wherever it is imported, and leaves it.
    assert [path for path in scratch.iterdir() if path.name != getpass.getuser() or list(path.rglob("*.py"))] == []
    while any(runs(int(mark.name)) for mark in marks.iterdir()):
        assert time.monotonic() - started < 60
        time.sleep(0.02)


def runs(process: int) -> bool:
    """Whether there is such a process, beside a dead one that nobody has asked about."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
