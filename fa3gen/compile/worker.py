"""Compiles one generated module in a process of its own. `fa3gen.compile.compiler` runs it, by file name.

Usage: worker.py MODULE.py OUT_DIR [--object NAME] [OPTIONS]. Works in OUT_DIR, where the environment lets the
DSL leave files of its own, and writes there `kernel.ptx`, `kernel.cubin`, `host.mlir` and `result.json`: {"error": null
or {"type", "message", "missing"}, "compile_seconds", "peak_bytes", "dsl"}. With `--object`, also `kernel.o`: host code
and cubin for this CPU, of which NAME is the TVM FFI function; not for a module that is compiled without TVM FFI.
OPTIONS, one argument, go to the module's compile_for_sm90a, which has its own default. The environment must already
hold the DSL's settings; ptxas's remarks go to standard error.

worker.py --serve does so again and again, as `fa3gen.compile.servers` asks for it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

_LINES_SWITCH = "_set_enable_frame_filtering"  # how the DSL turns the look-up of source lines on and off
_DSL_CLASS = "cutlass.cutlass_dsl.cutlass", "CutlassBaseDSL"
_ENGINE_SWITCH = "_runtime_can_run_compiled"  # how the DSL asks whether this machine could launch what it compiles
_ARGUMENTS = "_pyir_auto_load_arg"  # what each argument of an operation goes through
_ENTERING = "_enter_gpu_module"  # how the DSL begins to write a kernel
# What the DSL imports with the first module that is compiled with TVM FFI.
_IMPORTED_LATE = ("tvm_ffi", "cutlass.cute._tvm_ffi_args_spec_converter", "cutlass.cutlass_dsl.tvm_ffi_provider")


def peak_bytes() -> int | None:
    """Peak resident memory of this process. None where the system does not tell.

    Not getrusage: a child inherits its parent's ru_maxrss over fork and exec, so it would report the caller's size.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    line = next((line for line in status.splitlines() if line.startswith("VmHWM:")), None)
    return int(line.split()[1]) * 1024 if line else None


def import_module(path: Path) -> Any:
    """Import a module from its file; the DSL reads the source again, so it has to be a real file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def replaced(module: str, owner: str | None, name: str, other: Callable[[Any], Any]) -> Iterator[None]:
    """Within, `name` of a module of the DSL, or of its class `owner`, is `other` of what it is, if it is there.

    What a version of the DSL lacks it goes without: that only takes longer.
    """
    holder = sys.modules.get(module)
    if owner is not None:
        holder = getattr(holder, owner, None)
    was = getattr(holder, name, None)
    if was is None:
        yield
        return
    setattr(holder, name, other(was))
    try:
        yield
    finally:
        setattr(holder, name, was)


def no_source_lines() -> contextlib.AbstractContextManager[None]:
    """Let the DSL not look up the source line of every operation, which takes a quarter of the time of a large kernel.

    It does so as soon as it is asked for ptxas's notes, but the lines only appear in its messages about errors.
    """
    return replaced("cutlass.base_dsl.dsl", None, _LINES_SWITCH, lambda switch: lambda on: switch(False))


def no_engine() -> contextlib.AbstractContextManager[None]:
    """Let the DSL not turn the host code into machine code of this process, where nobody calls it.

    It does so with every module, for a tenth of the time of a large one, but not where it compiles for another machine
    than the one that it is on: code, host module and object file are the same then.
    """
    return replaced(*_DSL_CLASS, _ENGINE_SWITCH, lambda _: lambda *_: False)


@contextlib.contextmanager
def no_idle_work() -> Iterator[None]:
    """Let the DSL leave out what it does in vain: together a twentieth of the time that tracing a kernel takes.

    It looks at each argument of each operation for a reference of its other representation of programs, PyIR, which is
    off. And it writes out the module as a whole for its log, which is off, too.
    """
    module = sys.modules.get("cutlass._mlir.ir")

    def enter(dsl: Any) -> Any:
        return module.InsertionPoint(dsl.gpu_module.bodyRegion.blocks[0])  # type: ignore[union-attr]

    with (
        replaced("cutlass._mlir_helpers.op", None, _ARGUMENTS, lambda _: lambda argument: argument),
        replaced(*_DSL_CLASS, _ENTERING, lambda _: enter),
    ):
        yield


def compile_to(module_path: Path, out: Path, options: str | None = None, object_name: str | None = None) -> float:
    """Compile the module's kernels into `out`; returns the seconds it took after the imports.

    With `object_name` the host code is written as an object file as well, which these seconds leave out.
    """
    module = import_module(module_path)
    started = time.perf_counter()
    with no_engine(), no_idle_work():
        if options is not None:
            compiled = module.compile_for_sm90a(options=options)
        else:
            try:
                with no_source_lines():
                    compiled = module.compile_for_sm90a()
            except Exception:
                compiled = module.compile_for_sm90a()  # fails again, and now the DSL's message names the line
    seconds = time.perf_counter() - started
    if not getattr(compiled, "__ptx__", None) or not getattr(compiled, "__cubin__", None):
        raise RuntimeError(
            f"compile_for_sm90a() returned {type(compiled).__name__} without PTX and cubin; "
            "it must return what cute.compile returns"
        )
    (out / "kernel.ptx").write_text(compiled.__ptx__)
    (out / "kernel.cubin").write_bytes(compiled.__cubin__)
    host = getattr(compiled, "ir_module", None)
    (out / "host.mlir").write_text(str(host) if host is not None else "")
    if object_name is not None and "function_name" in inspect.signature(compiled.export_to_c).parameters:
        # The other symbols stay inside: a process may load the objects of several modules.
        compiled.export_to_c(str(out / "kernel.o"), function_name=object_name, export_only_tvm_ffi_symbols=True)
    return seconds


def describe(error: BaseException, module_path: Path) -> dict[str, str]:
    """The error's own message, with the line of the generated module where the DSL's message has none.

    "missing" is the package that could not be imported, if that is what is wrong.
    """
    message = str(error).strip() or type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(module_path)]
    if frames and str(module_path) not in message:
        message += f"\n  at {module_path}:{frames[-1].lineno}: {frames[-1].line}"
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return {"type": type(error).__name__, "message": message, "missing": missing}


def serve() -> int:
    """Import torch and the DSL, then fork for each request: a line of JSON on standard input, see `become_worker`.

    Answers each with two lines, the process of the fork and then its exit status (negative: a signal). Ends with the
    input. The DSL reads its settings when it is imported: those of this process are the ones of all its forks.
    """
    del sys.argv[1:]  # which it parses as well
    for package in ("torch", "cutlass.cute", *_IMPORTED_LATE):
        with contextlib.suppress(ImportError):  # a module that imports it says what is missing
            importlib.import_module(package)
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            become_worker(**json.loads(line))
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    return 0


def become_worker(arguments: list[str], environment: dict[str, str], stderr: str) -> NoReturn:
    """In a fork: compile as a process of its own, with these arguments, that environment and that log.

    Its settings of the DSL have to be those under which the DSL was imported.
    """
    status = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        nothing, log = os.open(os.devnull, os.O_RDWR), os.open(stderr, os.O_WRONLY | os.O_TRUNC)
        for old, new in ((nothing, 0), (nothing, 1), (log, 2)):
            os.dup2(old, new)
        sys.argv[1:] = arguments
        status = main()
        sys.stderr.flush()
    finally:
        os._exit(status)


def main() -> int:
    """Compile sys.argv[1] into sys.argv[2]; exit status 1 when that failed, with the reason in result.json."""
    module_path, out, rest = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    os.chdir(out)
    object_name = None
    if rest and rest[0] == "--object":
        object_name, rest = rest[1], rest[2:]
    options = rest[0] if rest else None
    sys.argv = sys.argv[:1]  # the DSL parses sys.argv when it is imported
    gc.disable()  # tracing makes millions of objects that all live to the end: collecting costs time and frees nothing
    result: dict[str, Any] = {"error": None, "compile_seconds": None}
    try:
        result["compile_seconds"] = compile_to(module_path, out, options, object_name)
        result["dsl"] = importlib.metadata.version("nvidia-cutlass-dsl")
    except (Exception, SystemExit) as error:
        result["error"] = describe(error, module_path)
    result["peak_bytes"] = peak_bytes()
    (out / "result.json").write_text(json.dumps(result))
    return 1 if result["error"] else 0


if __name__ == "__main__":
    sys.exit(serve() if sys.argv[1:] == ["--serve"] else main())
