"""The cache of compiled modules: what it keeps, what makes an entry another one, and everything that can be spoilt."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from rendering import ROOT

from fa3gen import cli
from fa3gen.base.errors import Caution, UserError
from fa3gen.compile import cache as compile_cache
from fa3gen.compile import compiler, toolchain
from fa3gen.compile.cache import CACHE_DIR_VARIABLE, cached_compile
from fa3gen.compile.cache_contents import contents, prune
from fa3gen.compile.compiler import Compiled, CompileError
from fa3gen.spec import schema

DATA = Path(__file__).parent / "data"


class FakeCompiler:
    """Stands in for `compiler.compile_module`: results that name the source, and a list of what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Path, bool]] = []

    def __call__(self, path: Path, timeout_s: float = 0, line_info: bool = False) -> Compiled:
        self.asked.append((path, line_info))
        text = path.read_text()
        if text == "broken":
            raise CompileError(path, "does not compile")
        return Compiled(
            path=path,
            ptx=f"// \u03bb {text}\r\n",
            cubin=b"\x7fELF\0" + text.encode(),
            host_module="module {}\n",
            ptxas_log="",
            seconds=2.5,
            compile_seconds=1.25,
            peak_bytes=None,
            dsl="4.8.1",
        )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCompiler:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    stand_in = FakeCompiler()
    monkeypatch.setattr(compiler, "compile_module", stand_in)
    return stand_in


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "module.py"
    path.write_text("source")
    return path


def entry_of(tmp_path: Path) -> Path:
    (manifest,) = (tmp_path / "cache").rglob("manifest.json")
    return manifest.parent


def test_second_time_comes_from_the_cache(fake: FakeCompiler, module: Path) -> None:
    first, second = cached_compile(module), cached_compile(module)
    assert first == second and len(fake.asked) == 1
    assert second.path == module.resolve()


def test_all_that_was_compiled_comes_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A real kernel: every field of the entry is that of the compilation."""
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    plain = cached_compile(DATA / "rs_gemm.py")
    monkeypatch.setattr(compiler, "_run_worker", lambda *arguments: pytest.fail("compiled again"))
    again = cached_compile(DATA / "rs_gemm.py")
    for field in dataclasses.fields(Compiled):
        assert getattr(again, field.name) == getattr(plain, field.name), field.name
    assert again.cubin.startswith(b"\x7fELF") and ".target sm_90a" in again.ptx and "llvm.func" in again.host_module


def test_same_source_elsewhere_is_the_same_module(fake: FakeCompiler, module: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text("source")
    cached_compile(module)
    assert cached_compile(other).path == other.resolve()
    assert len(fake.asked) == 1


def test_line_info_names_the_file_and_is_kept_apart(fake: FakeCompiler, module: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text("source")
    for path in (module, other):
        for line_info in (False, True, True):
            cached_compile(path, line_info=line_info)
    assert [line_info for _, line_info in fake.asked] == [False, True, True]


def test_changed_source_is_compiled(fake: FakeCompiler, module: Path) -> None:
    cached_compile(module)
    module.write_text("source ")
    assert "source " in cached_compile(module).ptx and len(fake.asked) == 2


@pytest.mark.parametrize("package", ["nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu12", "apache-tvm-ffi"])
def test_another_version_is_another_entry(
    fake: FakeCompiler, module: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    cached_compile(module)
    installed = toolchain.installed_version
    monkeypatch.setattr(toolchain, "installed_version", lambda name: "4.8.2" if name == package else installed(name))
    cached_compile(module)
    assert len(fake.asked) == 2


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (compile_cache, "_FORMAT", compile_cache._FORMAT + 1),
        (platform, "python_version", lambda: "3.99.0"),
        (platform, "machine", lambda: "riscv64"),
        (compiler, "ARCH", "sm_90b"),
    ],
    ids=["format", "python", "machine", "architecture"],
)
def test_other_surroundings_are_another_entry(
    fake: FakeCompiler, module: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, value: object
) -> None:
    cached_compile(module)
    monkeypatch.setattr(owner, name, value)
    cached_compile(module)
    assert len(fake.asked) == 2


def test_all_packages_of_the_dsl_are_in_the_key() -> None:
    """The DSL is a handful of distributions; one with another name would not be noticed."""
    from importlib import metadata

    installed = {found.metadata["Name"].lower().replace("_", "-") for found in metadata.distributions()}
    assert {name for name in installed if name.startswith("nvidia-cutlass-dsl")} <= set(compile_cache._PACKAGES)


def test_errors_are_not_kept(fake: FakeCompiler, module: Path) -> None:
    module.write_text("broken")
    for _ in range(2):
        with pytest.raises(CompileError):
            cached_compile(module)
    assert len(fake.asked) == 2


def test_missing_module(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; write it with: fa3gen render k4_2_d64"):
        cached_compile(tmp_path / "k4_2_d64.py")


# Spoilt entries


@pytest.mark.parametrize("name", ["kernel.ptx", "kernel.cubin", "host.mlir", "ptxas.log", "manifest.json"])
@pytest.mark.parametrize("how", ["removed", "cut", "extended", "a directory"])
def test_spoilt_file_is_a_miss_and_is_mended(
    fake: FakeCompiler, module: Path, tmp_path: Path, name: str, how: str
) -> None:
    good = cached_compile(module)
    file = entry_of(tmp_path) / name
    data = file.read_bytes()
    file.unlink()
    if how == "cut":
        file.write_bytes(data[:-1] if data else b"x")
    elif how == "extended":
        file.write_bytes(data + b"}")
    elif how == "a directory":
        file.mkdir()
    assert cached_compile(module) == good and len(fake.asked) == 2
    assert cached_compile(module) == good and len(fake.asked) == 2
    left_over = [path.name for path in entry_of(tmp_path).parent.iterdir() if path.name.startswith(".writing")]
    assert left_over == []


@pytest.mark.parametrize("content", ["[]", "{}", '{"digests": {}}', '{"digests": 5}', "\ud83d"])
def test_manifest_with_other_content_is_a_miss(fake: FakeCompiler, module: Path, tmp_path: Path, content: str) -> None:
    cached_compile(module)
    (entry_of(tmp_path) / "manifest.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    cached_compile(module)
    assert len(fake.asked) == 2


def test_source_that_changes_while_it_is_compiled_is_not_kept(
    fake: FakeCompiler, module: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compile_changed(path: Path, line_info: bool = False) -> Compiled:
        path.write_text("changed")
        return fake(path, line_info=line_info)

    monkeypatch.setattr(compiler, "compile_module", compile_changed)
    cached_compile(module)
    assert list((tmp_path / "cache").rglob("manifest.json")) == []


# Places


@pytest.mark.parametrize("place", ["a file", "below a file", "read-only"])
def test_cache_that_cannot_be_written_is_none(
    fake: FakeCompiler, module: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    blocked = tmp_path / "blocked"
    if place == "read-only":
        blocked.mkdir()
        # Permissions do not stop root, so the writing itself is made to fail.
        monkeypatch.setattr(tempfile, "mkdtemp", deny)
        monkeypatch.setattr(os, "open", deny)
    else:
        blocked.write_text("")
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(blocked / "inner" if place == "below a file" else blocked))
    for _ in range(2):
        with pytest.warns(Caution, match=r"the compile cache .*blocked.* cannot be written \(.+\): nothing is kept"):
            assert "source" in cached_compile(module).ptx
    assert len(fake.asked) == 2


def test_the_command_line_says_so_in_one_line(
    fake: FakeCompiler, module: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, however many modules are compiled."""
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "/dev/null")

    def compiles(**_: object) -> None:
        for _ in range(3):
            cached_compile(module)

    monkeypatch.setattr(schema, "file_schema", compiles)
    assert cli.main(["schema"]) == 0
    assert capsys.readouterr().err == (
        "warning: the compile cache /dev/null cannot be written (Not a directory): nothing is kept, and every process "
        "compiles anew; set $FA3GEN_CACHE_DIR to a directory that can be written\n"
    )


# Contents


def aged(entry: Path, days: float) -> None:
    then = time.time() - days * 24 * 3600
    os.utime(entry / "manifest.json", (then, then))


def test_listing_and_pruning(
    fake: FakeCompiler, module: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "old.py"
    old.write_text("old source")
    cached_compile(old)
    aged(entry_of(tmp_path), 10)
    cached_compile(module)
    capsys.readouterr()
    assert cli.main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{tmp_path}/cache: 2 entries, \d+\.\d MB; can be written", lines[0])
    assert [line.split()[:2] for line in lines[2:]] == [["module.py", "1"], ["old.py", "1"]]
    assert cli.main(["cache", "--prune", "9d"]) == 0
    assert capsys.readouterr().out.startswith("removed 1 entry, ")
    assert [entry.module for entry in contents(tmp_path / "cache").entries] == ["module.py"]
    cached_compile(module)
    assert len(fake.asked) == 2
    assert cli.main(["cache", "--prune", "0d", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "directory": str(tmp_path / "cache"),
        "size": 0,
        "writable": True,
        "entries": [],
    }


def test_what_was_used_lately_is_kept(fake: FakeCompiler, module: Path, tmp_path: Path) -> None:
    cached_compile(module)
    aged(entry_of(tmp_path), 10)
    cached_compile(module)  # a hit
    assert prune(contents(tmp_path / "cache"), time.time() - 3600) == []


def test_what_broken_off_writing_left_is_pruned(tmp_path: Path) -> None:
    left = tmp_path / "ab" / ".writing-1"
    left.mkdir(parents=True)
    (left / "kernel.ptx").write_text("half")
    (tmp_path / "ab" / "cd.lock").write_text("")
    (tmp_path / "tuning" / "keep").mkdir(parents=True)  # journals of `fa3gen tune` lie beside the entries
    prune(contents(tmp_path), time.time() + 1)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["ab", "keep", "tuning"]


def test_an_entry_that_is_spoilt_can_be_pruned(fake: FakeCompiler, module: Path, tmp_path: Path) -> None:
    cached_compile(module)
    (entry_of(tmp_path) / "manifest.json").write_text("{")
    (entry,) = contents(tmp_path / "cache").entries
    assert entry.module == "(spoilt)" and prune(contents(tmp_path / "cache"), time.time() + 1) == [entry]


@pytest.mark.parametrize("age", ["", "9", "-1d", "1w", "d"])
def test_an_age_that_is_none(age: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["cache", f"--prune={age}"]) == 2
    assert capsys.readouterr().err == f"--prune {age}: write days or hours, such as 30d or 12h\n"


def test_why_a_cache_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert contents(tmp_path / "a" / "b").unwritable == ""
    assert contents(Path("/dev/null")).unwritable == "/dev/null is not a directory"
    assert contents(Path("/dev/null/below")).unwritable == "/dev/null is not a directory"
    assert list(tmp_path.iterdir()) == []  # it was tried
    # Root may write everywhere, by its permissions; /proc takes no files.
    assert contents(Path("/proc/nocache")).unwritable.startswith("/proc cannot be written (")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert contents(tmp_path).unwritable == f"{tmp_path} cannot be written (No space left on device)"
    assert list(tmp_path.iterdir()) == []


def deny(*arguments: object, **options: object) -> None:
    raise PermissionError("read-only file system")


def test_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    assert compile_cache.cache_directory() == tmp_path
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "")
    assert compile_cache.cache_directory().parts[-2:] == ("fa3gen", "compiled")


# Processes

WORKER = """
import sys, time
from pathlib import Path
from fa3gen.compile import compiler
from fa3gen.compile import cache as compile_cache

def compile_module(path, line_info=False, with_object=False):
    with open(sys.argv[2], "a") as log:
        log.write("compiled\\n")
    time.sleep(1.0)
    if sys.argv[3] == "dies":
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    made = b"object" if with_object else b""
    return compiler.Compiled(path, "ptx", b"cubin", "host", "", 1.0, 1.0, 5, "4.8.1", object_file=made)

compiler.compile_module = compile_module
print(getattr(compile_cache, sys.argv[4])(Path(sys.argv[1])).ptx)
"""


def start(module: Path, log: Path, fate: str = "lives", function: str = "cached_compile") -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", WORKER, str(module), str(log), fate, function]
    environment = {**os.environ, CACHE_DIR_VARIABLE: str(log.parent / "cache")}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize("function", ["cached_compile", "cached_compile_for_launch"])
def test_processes_at_the_same_time_compile_once(module: Path, tmp_path: Path, function: str) -> None:
    log = tmp_path / "log"
    processes = [start(module, log, function=function) for _ in range(4)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["ptx\n"] * 4
    assert log.read_text() == "compiled\n"


def test_process_that_dies_does_not_hold_up_the_others(module: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    dying = start(module, log, "dies")
    while not log.exists() and dying.poll() is None:
        pass
    other = start(module, log)
    assert other.communicate(timeout=60)[0] == "ptx\n"
    dying.communicate(timeout=60)
    assert dying.returncode < 0 and log.read_text() == "compiled\n" * 2


def test_manifest_says_which_module_it_is(fake: FakeCompiler, module: Path, tmp_path: Path) -> None:
    cached_compile(module)
    assert json.loads((entry_of(tmp_path) / "manifest.json").read_text())["module"] == "module.py"
