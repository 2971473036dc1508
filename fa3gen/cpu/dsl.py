"""Every private interface of the CuTe DSL that the CPU executor relies on, and nothing else.

What is relied on, each item checked on its own by tests/cpu/test_dsl.py:

* `compiled.ir_module`, written by `fa3gen.compile.worker`, is the host code in MLIR's LLVM dialect, and its text can
  be parsed again in another process.
* `cutlass._mlir.execution_engine.ExecutionEngine` compiles it for this CPU without any shared library, as long as
  every symbol that the text declares is given an address before the first lookup.
* A module compiled with `--enable-tvm-ffi` defines one function `__tvm_ffi_<name>` with the C signature
  `int (void *handle, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result)` of the TVM FFI.

The module imports neither cutlass nor torch before an engine is made.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable
from typing import Any

from fa3gen.base.errors import UserError
from fa3gen.compile import toolchain
from fa3gen.compile.loading import clean_argv

ENTRY_PREFIX = "__tvm_ffi_"
C_LIBRARY_SYMBOLS = frozenset({"printf"})  # declared by the host code, found in the process itself

_INSTALL = f"pip install '{toolchain.DSL_PACKAGE}>=4.8,<4.9'"
_OPTIMIZATION_LEVEL = 1  # levels 0 to 2 take equally long to compile, and calls cost 0.1 ms with each
_FUNCTION = re.compile(r'^  llvm\.func (?P<internal>internal |private )?@"?(?P<name>[^\s"(]+)"?\((?P<rest>.*)$', re.M)


def require_supported_dsl() -> None:
    """Raise UserError when the installed DSL is not one that this module was written and tested for."""
    wanted = ".".join(str(number) for number in toolchain.SUPPORTED_DSL)
    installed = toolchain.installed_version(toolchain.DSL_PACKAGE)
    if installed is None:
        raise UserError(f"the CPU executor needs {toolchain.DSL_PACKAGE} {wanted}.x; install it with: {_INSTALL}")
    if not toolchain.dsl_supported(installed):
        raise UserError(
            f"{toolchain.DSL_PACKAGE} {installed} is installed; the CPU executor supports {wanted}.x, because it uses "
            f"private interfaces of the DSL; install a supported one with: {_INSTALL}"
        )


def declared_symbols(host_module: str) -> frozenset[str]:
    """Functions that the host code calls but does not define: somebody has to provide them."""
    return frozenset(
        match["name"] for match in _FUNCTION.finditer(host_module) if not match["rest"].rstrip().endswith("{")
    )


def exported_functions(host_module: str) -> tuple[str, ...]:
    """Entry points in the text of a host module, `__tvm_ffi_...`, in the order in which they stand there."""
    return tuple(
        match["name"]
        for match in _FUNCTION.finditer(host_module)
        if match["name"].startswith(ENTRY_PREFIX) and not match["internal"] and match["rest"].rstrip().endswith("{")
    )


class HostEngine:
    """Host code of a compiled module, compiled for the CPU of this process.

    Register every declared symbol first, then look functions up: the first lookup resolves all symbols at once.
    """

    def __init__(self, host_module: str) -> None:
        """Parse and compile the text of a lowered host module.

        Raises UserError when the DSL is missing or not supported, or when it cannot read the text.
        """
        require_supported_dsl()
        with clean_argv():
            ir = importlib.import_module("cutlass._mlir.ir")
            engine = importlib.import_module("cutlass._mlir.execution_engine").ExecutionEngine
        try:
            # The engine takes what it needs out of the module, so the context need not outlive this block.
            with ir.Context(), ir.Location.unknown():
                module = ir.Module.parse(host_module)
                self._engine = engine(module, opt_level=_OPTIMIZATION_LEVEL, shared_libs=[])
        except ir.MLIRError as error:
            raise UserError(
                f"the host code cannot be read by the installed DSL: {error}; compile the module again with this DSL"
            ) from None
        self._callbacks: list[Any] = []
        self._looked_up = False

    def register(self, name: str, callback: Any) -> None:
        """Let the host code call the ctypes function `callback` under `name`. The engine keeps it alive."""
        if self._looked_up:
            raise RuntimeError(f"{name} registered after the first lookup: symbols are resolved already")
        self._callbacks.append(callback)
        self._engine.raw_register_runtime(name, ctypes.cast(callback, ctypes.c_void_p))

    def lookup(self, name: str) -> Callable[..., None]:
        """The function `name` of the host code, in MLIR's packed form.

        It takes the address of each argument, then the address that receives the result, as integers. Raises
        KeyError when the host code has no such function or calls one that was not registered.
        """
        self._looked_up = True
        try:
            address = self._engine.raw_lookup(name)
        except Exception as error:  # nanobind raises whatever the engine's error became
            raise KeyError(f"{name}: {error}") from None
        if not address:
            raise KeyError(name)
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

        def call(*addresses: int) -> None:
            function((ctypes.c_void_p * len(addresses))(*addresses))

        return call
