"""Compiles generated modules for sm_90a without a GPU, each in a process of its own.

A fresh process keeps the DSL's argument parsing away from ours, makes the result independent of what was compiled
before, and allows a timeout and an honest figure for memory. This module imports neither cutlass nor torch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fa3gen.base.errors import UserError
from fa3gen.compile import servers as compile_servers
from fa3gen.compile import toolchain
from fa3gen.compile.census import Census, take_census

ARCH = "sm_90a"
TIMEOUT_S = 300.0
LINE_INFO_OPTIONS = "--enable-tvm-ffi --generate-line-info"
OBJECT_FUNCTION = "fa3gen_kernel"  # the TVM FFI function of an object file

_WORKER = Path(__file__).with_name("worker.py")
_KEPT_DSL_SETTINGS = ("CUTE_DSL_LIBS",)  # where the runtime library lies; every other setting could change the code
_MESSAGE_LINES = 25
_INSTALL = {
    "cutlass": f"pip install '{toolchain.DSL_PACKAGE}>=4.8,<4.9'",
    "nvidia_cutlass_dsl": f"pip install '{toolchain.DSL_PACKAGE}>=4.8,<4.9'",
    "torch": "pip install torch",
    "tvm_ffi": "pip install 'apache-tvm-ffi>=0.1.12,<0.2'",
}


class CompileError(UserError):
    """A module that does not compile; the message holds what the compiler said."""

    def __init__(self, path: Path, message: str) -> None:
        """Keep the module's path beside the message."""
        self.path = path
        super().__init__(message)


@dataclass(frozen=True)
class Compiled:
    """What compiling one module gave.

    `seconds` is wall time of the whole process, imports included (except where they were done before, see
    `preloaded`); `compile_seconds` leaves the imports out.
    `peak_bytes` is the process's peak resident memory (None where the system does not tell), `ptxas_log` what ptxas
    printed with -v, as the DSL lays it out, `host_module` the lowered LLVM-dialect text of the host code, `dsl` the
    DSL's version. `object_file` is the host code for this CPU with the cubin inside, as `fa3gen.run.launch` loads it:
    empty unless it was asked for, and for a module compiled without TVM FFI.
    """

    path: Path
    ptx: str
    cubin: bytes
    host_module: str
    ptxas_log: str
    seconds: float
    compile_seconds: float
    peak_bytes: int | None
    dsl: str
    object_file: bytes = b""

    @property
    def ptxas(self) -> str | None:
        """Version of the ptxas that assembled the cubin."""
        return toolchain.ptxas_version(self.cubin)


@dataclass(frozen=True)
class Analysis:
    """A compiled module taken apart: its disassembly and its facts."""

    compiled: Compiled
    sass: str
    census: Census


def analyse(compiled: Compiled) -> Analysis:
    """Disassemble a compiled module and take its census.

    Raises UserError when cuobjdump or nvdisasm is missing, CompileError when the compiler's files do not fit together.
    """
    with ThreadPoolExecutor() as pool:  # two external programs, side by side
        disassembly = pool.submit(toolchain.disassemble, compiled.cubin)
        resources = toolchain.resource_usage(compiled.cubin)
        sass = disassembly.result()
    try:
        census = take_census(compiled.ptx, sass, resources, compiled.ptxas_log, compiled.host_module)
    except ValueError as error:
        hint = f"this DSL ({compiled.dsl}) may write its output in a new way"
        raise CompileError(compiled.path, f"{compiled.path}: cannot be examined: {error}; {hint}") from None
    return Analysis(compiled=compiled, sass=sass, census=census)


def compile_module(
    path: Path, timeout_s: float = TIMEOUT_S, line_info: bool = False, with_object: bool = False
) -> Compiled:
    """Compile the generated module at `path` for sm_90a; needs no GPU and no driver.

    With `line_info` the PTX names the module's source lines (`.file` and `.loc`); it is the same otherwise. With
    `with_object` the result has the host code as an object file. Raises UserError when the file is not there,
    CompileError when it does not compile within `timeout_s` seconds.
    """
    path = path.resolve()
    if not path.is_file():
        raise UserError(f"{path} does not exist; write it with: fa3gen render {path.stem}")
    with tempfile.TemporaryDirectory(prefix="fa3gen-compile-") as scratch:
        out = Path(scratch)
        started = time.perf_counter()
        extra = [*(["--object", OBJECT_FUNCTION] if with_object else []), *([LINE_INFO_OPTIONS] if line_info else [])]
        status, stderr = _run_worker(path, out, timeout_s, extra)
        seconds = time.perf_counter() - started
        result = _read_result(path, out, status, stderr)
        return Compiled(
            path=path,
            ptx=(out / "kernel.ptx").read_text(),
            cubin=(out / "kernel.cubin").read_bytes(),
            host_module=(out / "host.mlir").read_text(),
            ptxas_log=stderr,
            seconds=seconds,
            compile_seconds=result["compile_seconds"],
            peak_bytes=result["peak_bytes"],
            dsl=result["dsl"],
            object_file=(out / "kernel.o").read_bytes() if (out / "kernel.o").is_file() else b"",
        )


def preloaded() -> AbstractContextManager[None]:
    """For many modules: the compilations within start from processes with all imports done, see `compile_servers`."""
    return compile_servers.preloaded(_WORKER)


def compile_many(
    paths: Sequence[Path],
    jobs: int | None = None,
    on_done: Callable[[Path, Compiled | UserError], None] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[Path, Compiled | UserError]:
    """Compile several modules, `jobs` at a time (default: one for each CPU this process may use).

    Returns a Compiled or the error for every path, in the order of `paths`; `on_done` hears of each as it finishes.
    """
    return side_by_side(lambda path: compile_module(path, timeout_s), paths, jobs, on_done)


def analyse_many(
    paths: Sequence[Path],
    jobs: int | None = None,
    on_done: Callable[[Path, Analysis | UserError], None] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[Path, Analysis | UserError]:
    """Like `compile_many`, with each module taken apart as well: disassembly takes its time too."""
    return side_by_side(lambda path: analyse(compile_module(path, timeout_s)), paths, jobs, on_done)


_Result = TypeVar("_Result")


def side_by_side(
    work: Callable[[Path], _Result],
    paths: Sequence[Path],
    jobs: int | None,
    on_done: Callable[[Path, _Result | UserError], None] | None,
) -> dict[Path, _Result | UserError]:
    """Run `work` on every path, in threads: each of them only waits for a process of its own.

    An interrupt ends the compilations that servers are at, see `preloaded`.
    """
    done: dict[Path, _Result | UserError] = {}
    pool = ThreadPoolExecutor(max_workers=max(1, jobs or usable_cpus()))
    try:
        futures = {pool.submit(work, path): path for path in dict.fromkeys(paths)}
        for future in as_completed(futures):
            path = futures[future]
            try:
                done[path] = future.result()
            except UserError as error:
                done[path] = error
            if on_done is not None:
                on_done(path, done[path])
    except BaseException:  # an interrupt: start nothing more, and wait for nothing that is under way
        pool.shutdown(wait=False, cancel_futures=True)
        if (servers := compile_servers.current()) is not None:
            servers.interrupt()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return {path: done[path] for path in dict.fromkeys(paths)}


def usable_cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_environment(environ: Mapping[str, str], *, ptxas_log: bool = True) -> dict[str, str]:
    """The caller's environment without its own DSL settings, plus those that a compilation for sm_90a needs.

    With `ptxas_log` the DSL prints what `ptxas -v` says on standard error; the code is the same with and without.
    Nothing else differs between modules, for the sake of `compile_servers`: the DSL leaves its files where it works.
    """
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith(compile_servers.DSL_PREFIX) or name in _KEPT_DSL_SETTINGS
    }
    settings = {"CUTE_DSL_ARCH": ARCH, "CUTE_DSL_KEEP": "ptx,cubin", "CUTE_DSL_DUMP_DIR": "."}
    if ptxas_log:
        settings["CUTE_DSL_COMPILER_OPT"] = "remarks{ptx}"
    return {**kept, **settings}


def wants_ptxas_log(source: str) -> bool:
    """Whether ptxas may have something to say that the SASS does not show as well.

    Its notes are about warpgroup products and setmaxnreg. Asking for them makes the DSL run ptxas twice, which takes
    the larger scalar kernels over a second.
    """
    return "warpgroup.commit_group" in source or "setmaxregister" in source


def _run_worker(path: Path, out: Path, timeout_s: float, extra: Sequence[str]) -> tuple[int, str]:
    """Exit status and standard error of the worker; `extra` are its arguments beside the module and the directory."""
    arguments = [str(path), str(out), *extra]
    ptxas_log = wants_ptxas_log(path.read_text(encoding="utf-8", errors="replace"))
    environment = worker_environment(os.environ, ptxas_log=ptxas_log)
    servers = compile_servers.current()
    try:
        if servers is not None:
            return servers.run(arguments, environment, timeout_s)
        # -P keeps the worker's own directory, this room, off sys.path: fa3gen/compile/cache.py is no top-level module.
        done = subprocess.run(
            [sys.executable, "-P", str(_WORKER), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise CompileError(
            path, f"{path}: did not compile within {timeout_s:g} s; a smaller tile or fewer stages compile faster"
        ) from None
    return done.returncode, done.stderr


def _read_result(path: Path, out: Path, status: int, stderr: str) -> dict[str, Any]:
    """What the worker reported. Raises CompileError when it failed or died."""
    report = out / "result.json"
    if not report.is_file():
        raise CompileError(path, f"{path}: the compiler process {_how_it_ended(status)}{_tail(stderr)}")
    result: dict[str, Any] = json.loads(report.read_text())
    if result["error"]:
        raise CompileError(path, _explain(path, **result["error"]))
    return result


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"died of {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


def _tail(text: str) -> str:
    """The last lines of a text, indented, on lines of their own."""
    lines = [line.rstrip() for line in toolchain.ANSI_COLOR.sub("", text).strip().splitlines()][-_MESSAGE_LINES:]
    return ":\n" + "\n".join(f"  {line}" for line in lines) if lines else ""


def _explain(path: Path, type: str, message: str, missing: str) -> str:
    """The compiler's message, cut to what a person reads; a missing package is answered with the pip command."""
    if missing in _INSTALL:
        return f"{path}: compiling needs {missing}; install it with: {_INSTALL[missing]}"
    lines = toolchain.ANSI_COLOR.sub("", message).strip().splitlines()
    if len(lines) > _MESSAGE_LINES:
        lines = [*lines[:2], f"  ... {len(lines) - _MESSAGE_LINES} lines left out ...", *lines[2 - _MESSAGE_LINES :]]
    if not lines[0].startswith("error:"):
        lines[0] = f"{type}: {lines[0]}"
    return "\n".join([f"{path} does not compile:", *(f"  {line}".rstrip() for line in lines)])
