"""Launching without compiling: object files in the compile cache, processes that load them, and what spoils them."""

from __future__ import annotations

import functools
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rendering import CHECKOUT, ROOT, STEMS
from rendering import source as text_of

from fa3gen import cli
from fa3gen.base.errors import UserError
from fa3gen.compile import cache as compile_cache
from fa3gen.compile import compiler
from fa3gen.compile.cache import CACHE_DIR_VARIABLE, cached_object
from fa3gen.compile.compiler import Compiled
from fa3gen.run import launch
from fa3gen.run.launch import NO_JIT_VARIABLE

STEM = "k4_2_d64"
HINT = 'q is not on a GPU; it needs to be on a Hopper GPU; for CPU tensors there is fa3gen.load("{stem}", on="cpu")'
MODULE = CHECKOUT.module_path(STEM)

# A process that loads a kernel and calls it; the DSL's compiler, in whatever process, would be an error.
START = f"""
import subprocess, sys
import fa3gen, torch, cutlass.cute

def forbidden(*arguments, **options):
    raise SystemExit("the DSL was asked to compile")

cutlass.cute.compile = subprocess.Popen = forbidden
kernel = fa3gen.load("{STEM}").compile_for_sm90a()
q = torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16)
try:
    kernel(q, q, q, q, torch.zeros(1, 1, 2), 1.0)
except ValueError as error:
    print(error)
"""


class FakeCompiler:
    """Stands in for `compiler.compile_module`: objects that name the source, and a count."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, path: Path, line_info: bool = False, with_object: bool = False) -> Compiled:
        self.times += 1
        code = b"object of " + path.read_bytes() if with_object else b""
        return Compiled(path, "ptx", b"cubin", "module {}", "", 2.0, 1.0, None, "4.8.1", code)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCompiler:
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    stand_in = FakeCompiler()
    monkeypatch.setattr(compiler, "compile_module", stand_in)
    return stand_in


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "module.py"
    path.write_text("source")
    return path


def object_of(folder: Path) -> Path:
    (found,) = (folder / "cache").rglob("kernel.o")
    return found


# Keeping


def test_one_compilation_fills_both_kinds_of_entry(fake: FakeCompiler, source: Path) -> None:
    assert cached_object(source) == cached_object(source) == b"object of source"
    plain = compile_cache.cached_compile(source)
    assert fake.times == 1 and plain.ptx == "ptx" and plain.object_file == b""


def test_an_examined_module_is_not_yet_one_to_launch(fake: FakeCompiler, source: Path) -> None:
    compile_cache.cached_compile(source)
    assert cached_object(source, may_compile=False) is None
    assert cached_object(source) == b"object of source" and fake.times == 2


def test_a_module_compiled_for_launching_is_examined_and_launched(fake: FakeCompiler, source: Path) -> None:
    for _ in range(2):
        assert compile_cache.cached_compile_for_launch(source).ptx == "ptx"
    assert cached_object(source, may_compile=False) == b"object of source" and fake.times == 1


def test_what_was_only_examined_is_compiled_for_launching(fake: FakeCompiler, source: Path) -> None:
    compile_cache.cached_compile(source)
    compile_cache.cached_compile_for_launch(source)
    assert cached_object(source, may_compile=False) == b"object of source" and fake.times == 2


@pytest.mark.parametrize("for_launch", [False, True])
def test_many_are_compiled_for_launching_if_asked(fake: FakeCompiler, source: Path, for_launch: bool) -> None:
    (found,) = compile_cache.cached_compile_many([source], for_launch=for_launch).values()
    assert isinstance(found, compiler.Compiled) and found.ptx == "ptx"
    assert (cached_object(source, may_compile=False) is not None) == for_launch and fake.times == 1


@pytest.mark.parametrize("how", ["removed", "cut", "extended"])
def test_spoilt_object_is_a_miss_and_is_mended(fake: FakeCompiler, source: Path, tmp_path: Path, how: str) -> None:
    cached_object(source)
    file = object_of(tmp_path)
    data = file.read_bytes()
    file.unlink()
    if how != "removed":
        file.write_bytes(data[:-1] if how == "cut" else data + b"x")
    assert cached_object(source, may_compile=False) is None
    assert cached_object(source) == data and fake.times == 2
    assert cached_object(source, may_compile=False) == data


def test_another_cpu_is_another_entry(fake: FakeCompiler, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached_object(source)
    monkeypatch.setattr(compile_cache, "_host_cpu", lambda: "one without AVX")
    assert cached_object(source, may_compile=False) is None
    compile_cache.cached_compile(source)
    assert fake.times == 1  # PTX and cubin are the same on every CPU


def test_the_cpu_is_told_by_its_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    def cpu(text: str) -> str:
        compile_cache._host_cpu.cache_clear()
        monkeypatch.setattr(Path, "read_text", lambda path: text)
        return compile_cache._host_cpu()

    first = "processor : 0\nmodel name : X\ncpu MHz : {}\nflags : {}\n\nprocessor : 1\nflags : none\n"
    try:
        assert cpu(first.format(1000, "sse avx")) == cpu(first.format(2000, "avx sse"))
        assert cpu(first.format(1000, "sse avx")) != cpu(first.format(1000, "sse"))
        monkeypatch.setattr(platform, "processor", lambda: "unknown")
        assert cpu("") == '"unknown"'
    finally:
        compile_cache._host_cpu.cache_clear()


def test_cache_that_cannot_be_written_still_launches(
    fake: FakeCompiler, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "file"))
    assert cached_object(source) == b"object of source"
    assert compile_cache.cached_compile_for_launch(source).ptx == "ptx" and fake.times == 2  # once for each request


def test_missing_module(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist; write it with: fa3gen render k4_2_d64"):
        cached_object(tmp_path / "k4_2_d64.py")


# Loading


@pytest.mark.parametrize(("value", "forbidden"), [("", False), ("0", False), ("1", True), ("yes", True)])
def test_no_jit(fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch, value: str, forbidden: bool) -> None:
    monkeypatch.setenv(NO_JIT_VARIABLE, value)
    monkeypatch.setattr(launch, "load_object", lambda code, name: code)
    if forbidden:
        with pytest.raises(launch.NotCompiled, match=f"fill the cache with: fa3gen compile {STEM}"):
            launch.executable(MODULE)
    else:
        launch.executable(MODULE)
    assert fake.times == (0 if forbidden else 1)
    compile_cache.compile_and_keep(MODULE)
    assert launch.executable(MODULE) == b"object of " + MODULE.read_bytes()


def test_the_command_that_is_named_fills_the_cache(
    fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where there is no workspace, with the package's module; that it cannot be examined does not matter."""

    def analyse(compiled: Compiled) -> None:
        raise UserError("not examined")

    monkeypatch.setattr(compiler, "analyse", analyse)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["compile", STEM]) == 2
    assert cached_object(MODULE, may_compile=False) == b"object of " + MODULE.read_bytes() and fake.times == 1


def test_other_options_are_compiled_here(fake: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def file_as_loaded(path: Path) -> ModuleType:
        module: Any = ModuleType(path.stem)
        module.compile_for_sm90a = lambda options: asked.append(options) or "compiled here"
        return module  # type: ignore[no-any-return]

    monkeypatch.setattr(launch, "load_file", file_as_loaded)
    monkeypatch.setattr(launch, "load_object", lambda code, name: "from the cache")
    module = launch.load_for_launch(MODULE)
    assert module.compile_for_sm90a() == "from the cache" and fake.times == 1 and asked == []
    assert module.compile_for_sm90a("--opt-level 0") == "compiled here" and fake.times == 1
    assert asked == ["--opt-level 0"]


def test_module_without_tvm_ffi_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cached_object", lambda path, may_compile: b"")
    with pytest.raises(UserError, match="compiles to no TVM FFI function; its compile_for_sm90a needs --enable-tvm"):
        launch.executable(MODULE)


def test_what_is_no_object_file_is_said() -> None:
    with pytest.raises(UserError, match="compiled host code of k9 cannot be loaded: .*run: fa3gen compile k9"):
        launch.load_object(b"not an object file", "k9")


def test_a_second_process_starts_without_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real kernel: the object holds the cubin that is examined; another process links it and its checks run."""
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    compiled = compile_cache.compile_and_keep(MODULE)
    assert compiled.cubin in compiled.object_file and object_of(tmp_path).read_bytes() == compiled.object_file
    monkeypatch.setenv(NO_JIT_VARIABLE, "1")
    process = subprocess.run([sys.executable, "-c", START], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "Mismatched Tensor on argument #0" in process.stdout and "expected device_type=cuda" in process.stdout


# Tensors on the CPU


# One for each function that looks at the GPU.
@pytest.mark.parametrize("stem", ["k4_2_d64", "k4_2_o_only_d128_causal", "fwd_d64", "fwd_d64_window_o_only"])
def test_tensors_on_the_cpu_get_a_hint(stem: str) -> None:
    module = launch.load_for_launch(CHECKOUT.module_path(stem))
    q = torch.ones(1, 8, 8, module.HEAD_DIM, dtype=torch.bfloat16)
    with pytest.raises(ValueError) as caught:
        module.attention(q, q, q)
    assert str(caught.value) == HINT.format(stem=stem)


def test_every_module_looks_at_the_gpu_where_the_hint_is_given() -> None:
    """In functions that keep what they saw, so that the hint costs a launch nothing."""
    looks = re.compile(r"@functools\.cache\ndef (\w+)\(gpu\):\n(?:    .*\n|\n)*?    if gpu < 0:")
    assert [
        stem
        for stem in STEMS
        if set(looks.findall(text_of(stem))) - launch.GPU_CHECKS or not looks.search(text_of(stem))
    ] == []


def test_the_hint_costs_a_launch_nothing() -> None:
    asked = []

    @functools.cache
    def look(gpu: int) -> str:
        asked.append(gpu)
        return "facts"

    hinted = launch._with_hint(look, "k4_2_d64")
    assert [hinted(0), hinted(0), hinted(1)] == ["facts"] * 3 and asked == [0, 1]
    assert type(hinted) is type(look)  # found in the cache without running any Python
