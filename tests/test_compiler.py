"""Compiling in a process of its own: real kernels, and every way it can fail, with what the user is told."""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
from pathlib import Path

import pytest

from fa3gen.base.errors import UserError
from fa3gen.compile import compiler, toolchain
from fa3gen.compile import servers as compile_servers
from fa3gen.compile.census import compare, parse_ptxas_log
from fa3gen.compile.compiler import (
    Analysis,
    CompileError,
    analyse_many,
    compile_many,
    compile_module,
    worker_environment,
)
from fa3gen.compile.toolchain import Resources
from fa3gen.generate.expected import Expectation

DATA = Path(__file__).parent / "data"


def with_constant(name: str, old: str, new: str, target: Path) -> Path:
    """A copy of a kernel under tests/data with one of its constants changed."""
    source = (DATA / name).read_text()
    assert source.count(f"\n{old}\n") == 1
    target.write_text(source.replace(f"\n{old}\n", f"\n{new}\n"))
    return target


@pytest.fixture(params=["alone", "served"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile in a process of its own, or in a fork of one that the whole run of the tests shares."""
    if request.param == "alone":
        monkeypatch.setattr(compile_servers, "_current", None)
    else:
        assert compile_servers.current() is not None


EITHER_WAY = pytest.mark.usefixtures("way")


@pytest.fixture(scope="session")
def analyses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Analysis]:
    """Real compilations of the kernels under tests/data, two of them spoilt on purpose."""
    folder = tmp_path_factory.mktemp("kernels")
    paths = [
        DATA / "rs_gemm.py",
        with_constant("rs_gemm.py", "TOUCH_A = False", "TOUCH_A = True", folder / "touched.py"),
        DATA / "tma_gemm.py",
        with_constant("tma_gemm.py", "MIN_BLOCKS = 1", "MIN_BLOCKS = 0", folder / "unbounded.py"),
    ]
    heard: list[Path] = []
    with pytest.MonkeyPatch.context() as alone:
        alone.setattr(compile_servers, "_current", None)
        results = analyse_many(paths, jobs=2, on_done=lambda path, result: heard.append(path))
    assert list(results) == paths and sorted(heard) == sorted(paths)
    for result in results.values():
        assert isinstance(result, Analysis), result
    return {path.stem: result for path, result in results.items() if isinstance(result, Analysis)}


def test_compiles_for_sm90a_without_a_gpu(analyses: dict[str, Analysis]) -> None:
    compiled = analyses["rs_gemm"].compiled
    assert ".target sm_90a" in compiled.ptx
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.dsl == toolchain.installed_version(toolchain.DSL_PACKAGE)
    assert 0 < compiled.compile_seconds < compiled.seconds
    assert compiled.peak_bytes is not None and 50 * 2**20 < compiled.peak_bytes < 2 * 2**30


def test_ptxas_version_is_that_of_the_cubin(analyses: dict[str, Analysis]) -> None:
    compiled = analyses["rs_gemm"].compiled
    assert re.fullmatch(r"1[2-9]\.\d+\.\d+", compiled.ptxas or "")
    stamp = struct.unpack_from("<I", compiled.cubin, 20)[0]
    assert stamp < 100 or (compiled.ptxas or "").startswith(f"{stamp // 10}.{stamp % 10}.")


def test_clean_gemm_is_as_predicted(analyses: dict[str, Analysis]) -> None:
    expectation = Expectation(
        kernels=1, wgmma={(64, 64, 16, "registers"): 4}, wgmma_commits=1, wgmma_waits=2, tma_loads=0, smem_bytes=8192
    )
    assert compare(analyses["rs_gemm"].census, expectation) == []


def test_serialized_gemm_is_caught_by_ptxas_word_and_by_its_code(analyses: dict[str, Analysis]) -> None:
    (kernel,) = analyses["touched"].census.kernels
    said, shape = kernel.serialized
    assert said.startswith("ptxas C75") and "serialized" in said
    assert shape.startswith("SASS waits 4 times for 4 products")
    (mismatch,) = compare(analyses["touched"].census, Expectation())
    assert mismatch.fact == "WGMMA serialised by ptxas"


def test_tma_pipeline_is_as_predicted(analyses: dict[str, Analysis]) -> None:
    expectation = Expectation(
        wgmma={(64, 64, 16, "smem"): 8},
        wgmma_waits=2,
        tma_loads=2,
        tma_stores=1,
        mbarrier_inits=4,
        mbarrier_expect_tx=1,
        stmatrix=4,
        setmaxnreg={"dec 40": 1, "inc 232": 1},
        smem_bytes=1024 + 5 * 8192,  # barriers, aligned; two stages of A and B, and C
        max_registers=232,
    )
    analysis = analyses["tma_gemm"]
    assert compare(analysis.census, expectation) == []
    assert analysis.census.sass.register_reallocations == 2
    (consumer,) = (loop for loop in analysis.census.sass.loops if loop.gmma)
    assert consumer.innermost and (consumer.gmma, consumer.ex2) == (8, 32)


def test_ignored_setmaxnreg_is_caught(analyses: dict[str, Analysis]) -> None:
    census = analyses["unbounded"].census
    (mismatch,) = compare(census, Expectation())
    assert mismatch.fact == "performance notes of ptxas"
    assert "'setmaxnreg' ignored" in mismatch.found
    assert census.sass.register_reallocations == 0


# Failures


def fails(tmp_path: Path, source: str) -> str:
    path = tmp_path / "broken.py"
    path.write_text(source)
    with pytest.raises(CompileError) as caught:
        compile_module(path)
    assert caught.value.path == path
    message = str(caught.value)
    assert "Traceback" not in message and "\x1b" not in message
    assert len(message.splitlines()) < 40
    return message


def test_missing_module_names_the_command_that_writes_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"k4_2_d64\.py does not exist; write it with: fa3gen render k4_2_d64"):
        compile_module(tmp_path / "k4_2_d64.py")


@EITHER_WAY
def test_dsl_error_is_quoted_with_its_place(tmp_path: Path) -> None:
    message = fails(
        tmp_path,
        """
import cutlass
from cutlass import cute

@cute.kernel
def kernel(x: cute.Tensor):
    x[0] = undefined_name

@cute.jit
def launch(x: cute.Tensor):
    kernel(x).launch(grid=(1, 1, 1), block=(32, 1, 1))

def compile_for_sm90a():
    return cute.compile(launch, cute.runtime.make_fake_compact_tensor(cutlass.Float32, (32,)))
""",
    )
    assert "does not compile:" in message.splitlines()[0]
    assert "'undefined_name' is not defined" in message
    assert "broken.py:7" in message


@EITHER_WAY
def test_source_lines_are_looked_up_only_after_an_error(tmp_path: Path) -> None:
    source = """
from cutlass._mlir_helpers import op
from cutlass.base_dsl import dsl

seen = []

def compile_for_sm90a():
    dsl._set_enable_frame_filtering(True)  # as the DSL does itself when it is asked for ptxas's notes
    seen.append(op._ENABLE_FRAME_FILTERING)
    raise ValueError(f"lines are looked up: {seen}")
"""
    assert "lines are looked up: [False, True]" in fails(tmp_path, source)


@EITHER_WAY
def test_no_engine_is_made_without_which_the_code_is_the_same(tmp_path: Path) -> None:
    """Machine code for calls from the compiling process; the second module has the DSL make it all the same."""
    source = (DATA.parent.parent / "generated" / "c1.py").read_text()
    ends = ["    assert compiled.engine is None\n    return compiled\n"]
    ends += ["    assert compiled.engine is not None\n    return compiled\n"]
    begins = ["", "    CutlassBaseDSL._runtime_can_run_compiled = lambda *_: True\n"]
    found = []
    for name, begin, end in zip(("without", "made"), begins, ends, strict=True):
        path = tmp_path / f"{name}.py"
        path.write_text(
            f"{source}\nfrom cutlass.cutlass_dsl.cutlass import CutlassBaseDSL\n_compile = compile_for_sm90a\n"
            f"def compile_for_sm90a():\n{begin}    compiled = _compile()\n{end}"
        )
        found.append(compile_module(path, with_object=True))
    without, made = ((each.ptx, each.cubin, each.host_module, each.object_file) for each in found)
    assert without == made and all(without)


@EITHER_WAY
def test_what_the_dsl_would_do_in_vain_changes_no_code(tmp_path: Path) -> None:
    """Arguments looked at for PyIR, and a module written out for its log; the second module has the DSL do both."""
    source = (DATA.parent.parent / "generated" / "c1.py").read_text()
    done = """
    seen = []
    op._pyir_auto_load_arg = lambda argument: seen.append(argument) or pyir_corewalk._pyir_auto_load_arg(argument)
    enter = CutlassBaseDSL._enter_gpu_module
    CutlassBaseDSL._enter_gpu_module = lambda dsl: enter(dsl) if str(dsl.gpu_module) else None
    compiled = _compile()
    assert len(seen) > 100
"""
    left_out = """
    assert op._pyir_auto_load_arg is not pyir_corewalk._pyir_auto_load_arg
    assert CutlassBaseDSL._enter_gpu_module.__module__ != CutlassBaseDSL.__module__
    compiled = _compile()
"""
    found = []
    for name, body in (("left_out", left_out), ("done", done)):
        path = tmp_path / f"{name}.py"
        path.write_text(
            f"{source}\nfrom cutlass._mlir_helpers import op\nfrom cutlass.base_dsl import pyir_corewalk\n"
            "from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL\n_compile = compile_for_sm90a\n"
            f"def compile_for_sm90a():{body}    return compiled\n"
        )
        found.append(compile_module(path))
    left, made = ((each.ptx, each.cubin, each.host_module) for each in found)
    assert left == made and all(left)


@EITHER_WAY
def test_python_error_is_given_with_its_line(tmp_path: Path) -> None:
    message = fails(tmp_path, "def compile_for_sm90a():\n    return len(5)\n")
    path = tmp_path / "broken.py"
    assert message == (
        f"{path} does not compile:\n"
        "  TypeError: object of type 'int' has no len()\n"
        f"    at {path}:2: return len(5)"
    )


def test_syntax_error(tmp_path: Path) -> None:
    message = fails(tmp_path, "def compile_for_sm90a(:\n")
    assert "SyntaxError" in message and "broken.py, line 1" in message


@EITHER_WAY
def test_missing_entry_point(tmp_path: Path) -> None:
    assert "no attribute 'compile_for_sm90a'" in fails(tmp_path, "x = 1\n")


def test_entry_point_that_returns_no_code(tmp_path: Path) -> None:
    message = fails(tmp_path, "def compile_for_sm90a():\n    return 5\n")
    assert "compile_for_sm90a() returned int without PTX and cubin" in message


@EITHER_WAY
@pytest.mark.parametrize(
    ("module", "command"),
    [("cutlass", "pip install 'nvidia-cutlass-dsl>=4.8,<4.9'"), ("torch", "pip install torch")],
)
def test_missing_package_is_answered_with_the_pip_command(tmp_path: Path, module: str, command: str) -> None:
    # None in sys.modules is how Python itself marks a module that must not be found.
    message = fails(tmp_path, f"import sys\nsys.modules['{module}'] = None\nimport {module}\n")
    assert message.endswith(f"compiling needs {module}; install it with: {command}")


@EITHER_WAY
def test_module_that_leaves_the_interpreter(tmp_path: Path) -> None:
    assert "SystemExit: 3" in fails(tmp_path, "raise SystemExit(3)\n")


@EITHER_WAY
def test_process_that_dies(tmp_path: Path) -> None:
    message = fails(
        tmp_path,
        "import os, signal, sys\nprint('last words', file=sys.stderr, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    assert message.endswith("the compiler process died of SIGKILL (out of memory?):\n  last words")


@EITHER_WAY
def test_process_that_ends_early(tmp_path: Path) -> None:
    assert fails(tmp_path, "import os\nos._exit(7)\n").endswith("the compiler process ended with status 7")


@EITHER_WAY
def test_timeout(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(CompileError, match="did not compile within 0.5 s"):
        compile_module(path, timeout_s=0.5)


def test_long_messages_are_cut_in_the_middle(tmp_path: Path) -> None:
    message = fails(tmp_path, "raise ValueError('\\n'.join(f'line {i}' for i in range(200)))\n")
    assert "ValueError: line 0" in message and "line 199" in message and "lines left out" in message
    assert "line 100\n" not in message


def test_one_failure_does_not_keep_the_others_from_compiling(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise ValueError('no')\n")
    missing = tmp_path / "missing.py"
    results = compile_many([broken, missing, DATA / "rs_gemm.py"], jobs=2)
    assert isinstance(results[broken], CompileError)
    assert isinstance(results[missing], UserError)
    assert isinstance(results[DATA / "rs_gemm.py"], compiler.Compiled)


@EITHER_WAY
def test_worker_ignores_our_arguments_and_package(tmp_path: Path) -> None:
    # fa3gen/spec/model.py must not become a top-level module `spec`, and the DSL must not see our command line.
    source = "import sys, importlib.util\nassert len(sys.argv) == 1, sys.argv\n"
    source += "assert importlib.util.find_spec('census_ptx') is None\nraise ValueError('as it should be')\n"
    assert "ValueError: as it should be" in fails(tmp_path, source)


# Servers


@pytest.mark.parametrize("name", ["rs_gemm", "tma_gemm"])
def test_a_fork_compiles_what_a_fresh_process_compiles(analyses: dict[str, Analysis], name: str) -> None:
    alone, served = analyses[name].compiled, compile_module(DATA / f"{name}.py")
    assert (served.ptx, served.cubin, served.host_module) == (alone.ptx, alone.cubin, alone.host_module)
    assert parse_ptxas_log(served.ptxas_log) == parse_ptxas_log(alone.ptxas_log)
    assert served.peak_bytes is not None and served.peak_bytes < 2 * 2**30


def test_a_fork_starts_with_all_imports_done_in_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = "'torch' in sys.modules, 'cutlass' in sys.modules, os.environ['MINE']"
    said = f"import os, sys\nraise ValueError(({facts}))\n"
    for value in ("1", "2"):
        monkeypatch.setenv("MINE", value)
        assert f"ValueError: (True, True, '{value}')" in fails(tmp_path, said)


def test_servers_are_used_again_and_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_servers, "_current", None)
    path = tmp_path / "parent.py"
    source = "import os\nraise ValueError(f'child of {os.getppid()}')\n"
    path.write_text(source)

    def parent() -> int:
        with pytest.raises(CompileError) as caught:
            compile_module(path)
        return int(str(caught.value).split("child of ")[1].split()[0])

    with compiler.preloaded():
        first = parent()
        assert first != os.getpid() and parent() == first
        with compiler.preloaded():  # within another: the same
            assert parent() == first
        os.kill(first, signal.SIGKILL)
        with pytest.raises(CompileError, match="the compiler process died of SIGKILL"):
            compile_module(path)
        second = parent()  # and the next one finds another server
        assert second not in (first, os.getpid())
        path.write_text(f"{source}# setmaxregister\n")  # compiled under other settings of the DSL
        assert parent() not in (second, os.getpid())
        path.write_text(source)
        assert parent() == second
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    assert parent() == os.getpid()


def test_worker_environment_drops_settings_that_could_change_the_code() -> None:
    mine = {"PATH": "/bin", "CUTE_DSL_COMPILER_OPT": "iket", "CUTE_DSL_LINEINFO": "1", "CUTE_DSL_LIBS": "/lib/x.so"}
    assert worker_environment(mine) == {
        "PATH": "/bin",
        "CUTE_DSL_LIBS": "/lib/x.so",
        "CUTE_DSL_ARCH": "sm_90a",
        "CUTE_DSL_KEEP": "ptx,cubin",
        "CUTE_DSL_DUMP_DIR": ".",
        "CUTE_DSL_COMPILER_OPT": "remarks{ptx}",
    }


# Tools


def test_tools_come_from_their_packages_whatever_path_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    impostor = tmp_path / "nvdisasm"
    impostor.write_text("#!/bin/sh\nexit 1\n")
    impostor.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = toolchain.find_tool("nvdisasm")
    assert found != impostor and os.access(found, os.X_OK)


def test_tool_on_path_serves_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def not_installed(name: str) -> None:
        raise toolchain.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(toolchain.metadata, "files", not_installed)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="nvdisasm not found; install it with: pip install nvidia-cuda-nvdisasm"):
        toolchain.find_tool("nvdisasm")
    shutil.copy("/bin/true", tmp_path / "nvdisasm")
    assert toolchain.find_tool("nvdisasm") == tmp_path / "nvdisasm"


def test_cubin_that_is_none() -> None:
    with pytest.raises(UserError, match="nvdisasm could not read the cubin: .*pip install --upgrade"):
        toolchain.disassemble(b"not a cubin")


def test_ptxas_version_by_kind_of_cubin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_versions_in_compiler", lambda: (("12.9", "12.9.83"), ("13.4", "13.4.59")))
    head = b"\x7fELF" + bytes(16)
    old = head + struct.pack("<I", 129) + bytes(40)
    assert toolchain.ptxas_version(old) == "12.9.83"
    noted = head + struct.pack("<I", 1) + b"ptxas\0Cuda compilation tools, release 13.0, V13.0.88\0"
    assert toolchain.ptxas_version(noted) == "13.0.88"
    assert toolchain.ptxas_version(head + struct.pack("<I", 1) + bytes(40)) is None
    assert toolchain.ptxas_version(b"not a cubin") is None
    # In an object file the cubin, for machine 190, comes after host code, for machine 62 (x86-64).
    host, cubin = (b"\x7fELF" + bytes(14) + struct.pack("<HI", machine, 129) + bytes(40) for machine in (62, 190))
    assert toolchain.ptxas_version_of_object(host + cubin) == "12.9.83"
    assert toolchain.ptxas_version_of_object(host) is None and toolchain.ptxas_version_of_object(b"\x7fELF") is None
    # Two compilers of one release in the library: which one it was is not known.
    monkeypatch.setattr(toolchain, "_versions_in_compiler", lambda: (("12.9", "12.9.83"), ("12.9", "12.9.90")))
    assert toolchain.ptxas_version(old) == "12.9"


def test_resource_usage_of_two_kernels() -> None:
    text = """
Resource usage:
 Common:
  GLOBAL:0
 Function scale:
  REG:8 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:536 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function spiller:
  REG:64 STACK:792 SHARED:5120 LOCAL:16 CONSTANT[0]:536 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
    assert toolchain.parse_resource_usage(text) == {
        "scale": Resources(registers=8, stack=0, shared=0, local=0),
        "spiller": Resources(registers=64, stack=792, shared=5120, local=16),
    }


@pytest.mark.parametrize(
    ("version", "supported"),
    [("4.8.1", True), ("4.8.0.dev0", True), ("4.9.0", False), ("4.7.2", False), ("5.8.0", False)],
)
def test_supported_dsl_window(version: str, supported: bool) -> None:
    assert toolchain.dsl_supported(version) is supported
