"""Dynamic shared memory of each launch, read from the host code that the DSL compiles beside the kernels.

The DSL fills a launch configuration {grid[3], block[3], i64 shared memory, stream, attributes, count} on the stack and
hands it to `_cudaLaunchKernelEx`. This follows those few instructions back from the call, in the lowered LLVM-dialect
text of the host module. Whatever it cannot follow is left out, never guessed.
"""

from __future__ import annotations

import re

_DEFINITION = re.compile(r"^\s*(%[\w#]+) = (.*)$")
_STORE = re.compile(r"^\s*llvm\.store (%[\w#]+), (%[\w#]+) :")
_LAUNCH = re.compile(r"llvm\.call @_cudaLaunchKernelEx\((%[\w#]+), (%[\w#]+), %[\w#]+\)")
_CONSTANT = re.compile(r"llvm\.mlir\.constant\((-?\d+) : i64\)")
_LOAD = re.compile(r"llvm\.load (%[\w#]+) :")
_ADDRESS = re.compile(r"llvm\.getelementptr (%[\w#]+)\[([\d, ]+)\] :")
_KERNEL_HANDLE = re.compile(r"llvm\.mlir\.addressof @kernels_([\w$]+) :")
_FUNCTION_START = re.compile(r"^\s*llvm\.func ", re.MULTILINE)
_SHARED_MEMORY_FIELD = "0, 2"


def dynamic_smem_by_kernel(host_module: str) -> dict[str, int]:
    """Bytes of dynamic shared memory by kernel name, for the launches whose size is a constant in the host module."""
    sizes: dict[str, int] = {}
    for function in _FUNCTION_START.split(host_module):
        if "_cudaLaunchKernelEx(%" in function:
            sizes.update(_launches(function))
    return sizes


def _launches(function: str) -> dict[str, int]:
    values: dict[str, str] = {}
    stores: list[tuple[str, str]] = []
    calls: list[tuple[str, str]] = []
    for line in function.splitlines():
        definition = _DEFINITION.match(line)
        store = _STORE.match(line)
        if definition:
            values[definition.group(1)] = definition.group(2)
        if store:
            stores.append((store.group(1), store.group(2)))
        call = _LAUNCH.search(line)
        if call:
            calls.append((call.group(1), call.group(2)))
    sizes = {}
    for configuration, kernel in calls:
        handle = _KERNEL_HANDLE.match(values.get(_loaded_from(values, kernel), ""))
        size = _stored_constant(values, stores, _resolve(values, stores, configuration))
        if handle and size is not None:
            sizes[handle.group(1)] = size
    return sizes


def _loaded_from(values: dict[str, str], name: str) -> str:
    """The pointer that `name` was loaded through; empty when it was not loaded."""
    load = _LOAD.match(values.get(name, ""))
    return load.group(1) if load else ""


def _resolve(values: dict[str, str], stores: list[tuple[str, str]], loaded: str) -> str:
    """The one value ever stored where `loaded` is loaded from: a stack slot that holds the launch configuration."""
    place = _place(values, _loaded_from(values, loaded))
    stored = {value for value, pointer in stores if _place(values, pointer) == place}
    return stored.pop() if len(stored) == 1 else ""


def _place(values: dict[str, str], pointer: str) -> tuple[str, str]:
    """A pointer as (allocation, index path)."""
    address = _ADDRESS.match(values.get(pointer, ""))
    return (address.group(1), address.group(2)) if address else (pointer, "")


def _stored_constant(values: dict[str, str], stores: list[tuple[str, str]], configuration: str) -> int | None:
    stored = [value for value, pointer in stores if _place(values, pointer) == (configuration, _SHARED_MEMORY_FIELD)]
    constant = _CONSTANT.match(values.get(stored[0], "")) if len(stored) == 1 else None
    return int(constant.group(1)) if constant else None
