"""Compiled modules, kept between runs: compiling takes seconds, and the same source always gives the same code.

An entry is a directory named by the hash of everything that decides the code: the module's source, the versions of
the DSL and its libraries, Python's version and the options. The cache lies in the user's cache directory or in
$FA3GEN_CACHE_DIR; deleting it is always safe. Nothing here imports cutlass or torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import platformdirs

from fa3gen import compiler, toolchain
from fa3gen.compiler import Compiled
from fa3gen.errors import UserError

try:
    import fcntl
except ImportError:  # no such locks on this system: two processes may then compile the same module
    fcntl = None  # type: ignore[assignment]

CACHE_DIR_VARIABLE = "FA3GEN_CACHE_DIR"

_FORMAT = 1  # raise it when the files of an entry, or what the compiler process does, change
_PACKAGES = (
    toolchain.DSL_PACKAGE,
    *(f"{toolchain.DSL_PACKAGE}-libs-{part}" for part in ("base", "core", "cu12", "cu13")),
    "apache-tvm-ffi",
)
_MANIFEST = "manifest.json"
_PTX, _CUBIN, _HOST, _LOG = "kernel.ptx", "kernel.cubin", "host.mlir", "ptxas.log"


def cached_compile(path: Path, *, line_info: bool = False) -> Compiled:
    """Like `compiler.compile_module`, but from the cache where the same module has been compiled before.

    `seconds`, `compile_seconds` and `peak_bytes` are those of the compilation that filled the cache. Processes that
    ask for one module at the same time compile it once; the others wait. A cache that cannot be read or written is as
    good as none. Errors are not cached. Raises what `compile_module` raises.
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


def cached_compile_many(
    paths: Sequence[Path], on_done: Callable[[Path, Compiled | UserError], None] | None = None
) -> dict[Path, Compiled | UserError]:
    """Like `compiler.compile_many`, but from the cache where a module has been compiled before."""
    return compiler.side_by_side(cached_compile, paths, None, on_done)


def cache_directory() -> Path:
    """Where entries lie: $FA3GEN_CACHE_DIR, else `compiled` in the user's cache directory."""
    chosen = os.environ.get(CACHE_DIR_VARIABLE)
    return Path(chosen) if chosen else platformdirs.user_cache_path("fa3gen") / "compiled"


def _key(path: Path, line_info: bool) -> str | None:
    """Hash of all that decides the code, None when the module cannot be read."""
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
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _read(entry: Path, path: Path) -> Compiled | None:
    """The entry, None when there is none or a file of it is missing or not what was written."""
    try:
        manifest: dict[str, Any] = json.loads((entry / _MANIFEST).read_bytes())
        files = {name: (entry / name).read_bytes() for name in (_PTX, _CUBIN, _HOST, _LOG)}
        if any(hashlib.sha256(data).hexdigest() != manifest["digests"][name] for name, data in files.items()):
            return None
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
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(entry: Path, compiled: Compiled) -> None:
    """Put an entry in place as a whole, or leave the cache as it was."""
    files = {
        _PTX: compiled.ptx.encode(),
        _CUBIN: compiled.cubin,
        _HOST: compiled.host_module.encode(),
        _LOG: compiled.ptxas_log.encode(),
    }
    manifest = {
        "module": compiled.path.name,  # for people who look into the cache
        "digests": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
        "seconds": compiled.seconds,
        "compile_seconds": compiled.compile_seconds,
        "peak_bytes": compiled.peak_bytes,
        "dsl": compiled.dsl,
    }
    scratch = None
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=entry.parent, prefix=".writing-"))
        fresh = scratch / "entry"
        fresh.mkdir()
        for name, data in files.items():
            (fresh / name).write_bytes(data)
        (fresh / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        with contextlib.suppress(FileNotFoundError):
            entry.rename(scratch / "spoilt")  # a directory cannot be renamed onto one that has files
        fresh.rename(entry)
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock between processes, or none where the system or the file system has no locks."""
    descriptor = None
    if fcntl is not None:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)  # which gives the lock back
