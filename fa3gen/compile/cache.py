"""Compiled modules, kept between runs: compiling takes seconds, and the same source always gives the same code.

An entry is a directory named by the hash of everything that decides the code: the module's source, the versions of
the DSL (which brings its ptxas) and its libraries, Python's version and the options. There are two kinds: what a
compilation is examined by (PTX, cubin, the text of the host code), and the object file that a process loads to launch
the kernel, which also depends on the CPU. Beside them lie modules that were rendered while a program ran, each with its
spec, in an entry named by the module's bytes. The cache lies in the user's cache directory or in $FA3GEN_CACHE_DIR;
deleting it is always safe. `fa3gen.compile.cache_contents` lists and prunes it. Nothing here imports cutlass or torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import platformdirs

from fa3gen.base.errors import Caution, UserError
from fa3gen.base.files import locked
from fa3gen.compile import compiler, toolchain
from fa3gen.compile.compiler import Compiled

CACHE_DIR_VARIABLE = "FA3GEN_CACHE_DIR"

_FORMAT = 1  # raise it when the files of an entry, or what the compiler process does, change
_PACKAGES = (
    toolchain.DSL_PACKAGE,
    *(f"{toolchain.DSL_PACKAGE}-libs-{part}" for part in ("base", "core", "cu12", "cu13")),
    "apache-tvm-ffi",
)
MANIFEST = "manifest.json"
_PTX, _CUBIN, _HOST, _LOG = "kernel.ptx", "kernel.cubin", "host.mlir", "ptxas.log"
_OBJECT = "kernel.o"


def cached_compile(path: Path, *, line_info: bool = False) -> Compiled:
    """Like `compiler.compile_module`, but from the cache where the same module has been compiled before.

    `seconds`, `compile_seconds` and `peak_bytes` are those of the compilation that filled the cache. Processes that
    ask for one module at the same time compile it once; the others wait. A cache that cannot be read or written is as
    good as none; where it cannot be written, a Caution says so. Errors are not cached. Raises what `compile_module`
    raises.
    """
    path = path.resolve()
    root = cache_directory()
    key = _key(path, line_info)
    if key is None:
        return compiler.compile_module(path, line_info=line_info)
    entry = root / key[:2] / key
    found = _read(entry, path)
    if found is not None:
        return found
    with _lock(entry.with_suffix(".lock")):
        found = _read(entry, path)  # another process may have compiled it while this one waited
        if found is not None:
            return found
        compiled = compiler.compile_module(path, line_info=line_info)
        if _key(path, line_info) == key:  # the file may have changed between hashing and compiling
            _write(entry, compiled)
        return compiled


def cached_object(path: Path, *, may_compile: bool = True) -> bytes | None:
    """The object file of a module: host code for this CPU with the cubin inside, for `fa3gen.run.launch`.

    From the cache, or compiled in a process of its own and kept, as by `cached_compile`. With `may_compile` False, a
    miss gives None. Empty for a module compiled without TVM FFI. Raises what `compile_module` raises.
    """
    found = _object_or_compiled(path, may_compile)
    return found.object_file if isinstance(found, Compiled) else found


def cached_compile_for_launch(path: Path) -> Compiled:
    """Like `cached_compile`, and with the object file in the cache as well, so that launching compiles nothing."""
    found = _object_or_compiled(path, may_compile=True)
    return found if isinstance(found, Compiled) else cached_compile(path)


def _object_or_compiled(path: Path, may_compile: bool) -> bytes | Compiled | None:
    """The object file from the cache; on a miss the compilation that has just filled it, or None; see `cached_object`.

    Processes that miss at the same time compile once.
    """
    path = path.resolve()
    key = _key(path, line_info=False, for_cpu=_host_cpu())
    entry = cache_directory() / key[:2] / key if key is not None else None
    found = _read_files(entry, (_OBJECT,)) if entry is not None else None
    if found is not None:
        return found[1][_OBJECT]
    if not may_compile:
        return None
    if entry is None:
        return compile_and_keep(path)  # there is no such file: this says so
    with _lock(entry.with_suffix(".lock")):
        found = _read_files(entry, (_OBJECT,))
        return found[1][_OBJECT] if found is not None else compile_and_keep(path)


def compile_and_keep(path: Path) -> Compiled:
    """Compile a module anew, with its object file, and keep both kinds of entry; raises as `compile_module`."""
    path = path.resolve()
    cpu = _host_cpu()
    keys = [_key(path, line_info=False), _key(path, line_info=False, for_cpu=cpu)]
    compiled = compiler.compile_module(path, with_object=True)
    if keys == [_key(path, line_info=False), _key(path, line_info=False, for_cpu=cpu)]:
        plain, launched = (cache_directory() / key[:2] / key for key in keys if key is not None)
        _write(plain, replace(compiled, object_file=b""))
        if compiled.object_file:
            _write_files(launched, {_OBJECT: compiled.object_file}, {"module": path.name, "dsl": compiled.dsl})
    return compiled


def kept_rendering(stem: str, *, spec: str, module: str) -> Path | None:
    """The file of a module that was rendered while a program runs, `stem`.py, beside its spec, in an entry of its own.

    It is named by the module's bytes. None where the cache cannot be written, after a Caution that says so.
    """
    files = {f"{stem}.yaml": spec.encode(), f"{stem}.py": module.encode()}
    key = hashlib.sha256(files[f"{stem}.py"]).hexdigest()
    entry = cache_directory() / key[:2] / key
    with _lock(entry.with_suffix(".lock")):
        there = _read_files(entry, list(files)) is not None
        kept = there or _write_files(entry, files, {"module": f"{stem}.py", "dsl": "any"})
    return entry / f"{stem}.py" if kept else None


def cached_compile_many(
    paths: Sequence[Path],
    on_done: Callable[[Path, Compiled | UserError], None] | None = None,
    *,
    for_launch: bool = False,
) -> dict[Path, Compiled | UserError]:
    """Like `compiler.compile_many`, but from the cache where a module has been compiled before.

    `for_launch`: as by `cached_compile_for_launch`.
    """
    return compiler.side_by_side(cached_compile_for_launch if for_launch else cached_compile, paths, None, on_done)


def cache_directory() -> Path:
    """Where entries lie: $FA3GEN_CACHE_DIR, else `compiled` in the user's cache directory."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    return Path(chosen) if chosen else platformdirs.user_cache_path("fa3gen") / "compiled"


def _key(path: Path, line_info: bool, for_cpu: str | None = None) -> str | None:
    """Hash of all that decides the code, None when the module cannot be read; `for_cpu` is that of an object file."""
    try:
        source = path.read_bytes()
    except OSError:
        return None
    facts = {
        "format": _FORMAT,
        "source": hashlib.sha256(source).hexdigest(),
        "packages": {name: toolchain.installed_version(name) for name in _PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "architecture": compiler.ARCH,
        "options": compiler.LINE_INFO_OPTIONS if line_info else None,
        "path": str(path) if line_info else None,  # the PTX names it
    }
    if for_cpu is not None:
        facts |= {"object": compiler.OBJECT_FUNCTION, "cpu": for_cpu}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@functools.cache
def _host_cpu() -> str:
    """What the host code is compiled for: the model and the instruction sets of this machine's CPU."""
    wanted = ("model name", "flags", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    facts = (line.partition(":") for line in lines)
    told = {name.strip(): " ".join(sorted(value.split())) for name, _, value in facts if name.strip() in wanted}
    return json.dumps(told or platform.processor(), sort_keys=True)


def _read_files(entry: Path, names: Sequence[str]) -> tuple[dict[str, Any], dict[str, bytes]] | None:
    """Manifest and files of an entry, None when there is none or a file of it is missing or not what was written."""
    try:
        manifest: dict[str, Any] = json.loads((entry / MANIFEST).read_bytes())
        files = {name: (entry / name).read_bytes() for name in names}
        if any(hashlib.sha256(data).hexdigest() != manifest["digests"][name] for name, data in files.items()):
            return None
        with contextlib.suppress(OSError):
            os.utime(entry / MANIFEST)  # when it was last used, for `fa3gen cache --prune`
        return manifest, files
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(entry: Path, path: Path) -> Compiled | None:
    """The entry of a compilation, None when there is none or it is spoilt."""
    found = _read_files(entry, (_PTX, _CUBIN, _HOST, _LOG))
    if found is None:
        return None
    manifest, files = found
    try:
        return Compiled(
            path=path,
            ptx=files[_PTX].decode(),
            cubin=files[_CUBIN],
            host_module=files[_HOST].decode(),
            ptxas_log=files[_LOG].decode(),
            seconds=manifest["seconds"],
            compile_seconds=manifest["compile_seconds"],
            peak_bytes=manifest["peak_bytes"],
            dsl=manifest["dsl"],
        )
    except (ValueError, KeyError):
        return None


def _write(entry: Path, compiled: Compiled) -> None:
    """Keep what a compilation gave."""
    files = {
        _PTX: compiled.ptx.encode(),
        _CUBIN: compiled.cubin,
        _HOST: compiled.host_module.encode(),
        _LOG: compiled.ptxas_log.encode(),
    }
    facts = {
        "module": compiled.path.name,  # for people who look into the cache
        "seconds": compiled.seconds,
        "compile_seconds": compiled.compile_seconds,
        "peak_bytes": compiled.peak_bytes,
        "dsl": compiled.dsl,
    }
    _write_files(entry, files, facts)


def _write_files(entry: Path, files: Mapping[str, bytes], facts: Mapping[str, Any]) -> bool:
    """Put an entry in place as a whole; or leave the cache as it was, and warn, where it cannot be written: False."""
    manifest = {**facts, "digests": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}}
    scratch, kept = None, False
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=entry.parent, prefix=".writing-"))
        fresh = scratch / "entry"
        fresh.mkdir()
        for name, data in files.items():
            (fresh / name).write_bytes(data)
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):
            entry.rename(scratch / "spoilt")  # a directory cannot be renamed onto one that has files
        fresh.rename(entry)
        kept = True
    except OSError as error:
        text = (
            f"the compile cache {entry.parents[1]} cannot be written ({error.strerror or error}): nothing is kept, and "
        )
        text += f"every process compiles anew; set ${CACHE_DIR_VARIABLE} to a directory that can be written"
        warnings.warn(text, Caution, stacklevel=1)  # of this line, so that it is said once
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
    return kept


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes while an entry is made; none where the cache cannot be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path):
        yield
