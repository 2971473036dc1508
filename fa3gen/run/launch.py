"""Generated modules that launch without compiling: the compiled host code is loaded from the compile cache.

A generated module by itself compiles its kernel in the process that first calls it. Here its `compile_for_sm90a` is
replaced, in the module object and not in the file, by one that loads the object file of the very same compilation that
`fa3gen compile` and `fa3gen verify` examine. A miss compiles once, in a process of its own, and fills the cache for all
processes that come after; with $FA3GEN_NO_JIT set it is an error that names the command which fills it.
"""

from __future__ import annotations

import functools
import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fa3gen.base.errors import UserError
from fa3gen.base.switches import turned_on
from fa3gen.compile import compiler
from fa3gen.compile.cache import CACHE_DIR_VARIABLE, cache_directory, cached_object
from fa3gen.compile.loading import clean_argv, load_file

NO_JIT_VARIABLE = "FA3GEN_NO_JIT"

# What generated modules call what looks at the GPU, once for each.
GPU_CHECKS = {"unasked_lse", "launch_constants", "packed_constants", "sm_count", "check_gpu"}

DEFAULT_OPTIONS = "--enable-tvm-ffi"  # of every generated module's compile_for_sm90a


class NotCompiled(UserError, RuntimeError):
    """A kernel that is not in the compile cache, where compiling is forbidden."""


def compiling_forbidden() -> bool:
    """Whether $FA3GEN_NO_JIT asks for an error instead of a compilation."""
    return turned_on(NO_JIT_VARIABLE)


@functools.cache
def module_at(path: Path) -> ModuleType:
    """The module of a generated file, imported once in this process; see `load_for_launch`."""
    return load_for_launch(path)


def load_for_launch(path: Path) -> ModuleType:
    """Import a generated file, every time anew, as a module whose kernel comes from the compile cache.

    Nothing is loaded or compiled before `compile_for_sm90a` is called, which `attention` does.
    """
    module: Any = load_file(path)
    compile_here: Callable[[str], Any] = module.compile_for_sm90a

    @functools.cache
    def compile_for_sm90a(options: str = DEFAULT_OPTIONS) -> Any:
        """The compiled kernel: from the cache with the default options, else compiled in this process."""
        return executable(path) if options == DEFAULT_OPTIONS else compile_here(options)

    module.compile_for_sm90a = compile_for_sm90a
    for name in GPU_CHECKS & vars(module).keys():
        setattr(module, name, _with_hint(getattr(module, name), path.stem))
    return module  # type: ignore[no-any-return]


def _with_hint(check: Callable[[int], Any], stem: str) -> Callable[[int], Any]:
    """A module's look at the GPU of its tensors, with a hint for those on the CPU; cached, as the look itself is."""

    @functools.cache
    def checked(gpu: int) -> Any:
        try:
            return check(gpu)
        except ValueError as error:
            if gpu >= 0:
                raise
            raise ValueError(f'{error}; for CPU tensors there is fa3gen.load("{stem}", on="cpu")') from None

    return checked


def executable(path: Path) -> Callable[..., None]:
    """The kernel of a generated module, to be called with torch tensors on a Hopper GPU, like what it compiles to.

    Needs neither GPU nor driver before it is called. Raises CompileError when the module does not compile, NotCompiled
    when it would have to be compiled and $FA3GEN_NO_JIT forbids that, UserError when the object cannot be loaded.
    """
    code = cached_object(path, may_compile=not compiling_forbidden())
    if code is None:
        raise NotCompiled(
            f"{path.stem} is not in the compile cache ({cache_directory()}) for this file, CPU and software, and "
            f"${NO_JIT_VARIABLE} is set; fill the cache with: fa3gen compile {path.stem}"
        )
    if not code:
        raise UserError(f"{path} compiles to no TVM FFI function; its compile_for_sm90a needs {DEFAULT_OPTIONS}")
    return load_object(code, path.stem)


def load_object(code: bytes, name: str) -> Callable[..., None]:
    """Link an object file into this process; `name` stands for it in the message of the UserError when that fails."""
    with clean_argv():
        load_module = importlib.import_module("cutlass.cute").runtime.load_module
    with tempfile.TemporaryDirectory(prefix="fa3gen-load-") as scratch:
        file = Path(scratch) / "kernel.o"
        file.write_bytes(code)
        try:
            # The loader reads the file, and what it returns keeps the linked code alive.
            function: Callable[..., None] = load_module(str(file), enable_tvm_ffi=True)[compiler.OBJECT_FUNCTION]
        except Exception as error:  # whatever the DSL's linker raises
            raise UserError(
                f"the compiled host code of {name} cannot be loaded: {error}; delete {cache_directory()} "
                f"(or point ${CACHE_DIR_VARIABLE} elsewhere) and run: fa3gen compile {name}"
            ) from None
    return function
