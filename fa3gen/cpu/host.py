"""Runs the host code of a compiled module on CPU tensors: it computes the launch, its parameters and tensor maps.

The host code is entered through its TVM FFI function, the one that a call from Python reaches on a GPU, so arguments
are checked as they are there. Structures: `TVMFFIAny` of tvm/ffi/c_api.h and `DLTensor` of dlpack.h, whose tensors
are described here field by field: torch's own DLPack export rewrites the strides of dimensions of extent 1.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fa3gen.base.errors import UserError
from fa3gen.cpu.driver import CudaRuntime, Launch
from fa3gen.cpu.dsl import HostEngine, exported_functions

__all__ = ["HostProgram", "Launch"]

# TVMFFITypeIndex
_NONE, _INT, _BOOL, _FLOAT, _TENSOR = 0, 1, 2, 3, 7
# DLDeviceType. The host code refuses anything but CUDA, so tensors say that they lie on GPU 0. Nothing dereferences
# their address but the executor, which knows better.
_DL_CUDA = 2

_DL_TYPES = {  # DLDataType: code and bits
    torch.float64: (2, 64),
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e5m2: (12, 8),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.int16: (0, 16),
    torch.int8: (0, 8),
    torch.uint8: (1, 8),
    torch.bool: (6, 8),
}


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _AnyValue(ctypes.Union):
    _fields_ = [("integer", ctypes.c_int64), ("float", ctypes.c_double), ("pointer", ctypes.c_void_p)]


class _Any(ctypes.Structure):
    """TVMFFIAny."""

    _fields_ = [("type_index", ctypes.c_int32), ("zero_padding", ctypes.c_uint32), ("value", _AnyValue)]


class HostProgram:
    """The host code of one compiled module, callable like the compiled module itself.

    Calls from several threads take turns.
    """

    def __init__(self, host_module: str, on_launch: Callable[[Launch], None], names: Sequence[str] = ()) -> None:
        """Compile the lowered host module (`Compiled.host_module`) for this CPU; `names` are its arguments', if known.

        `on_launch` gets every launch while the host code is on the stack, so the launch's arguments can be read
        there; what it raises comes out of the call. Raises UserError when the DSL is missing, is not supported, or
        when the module was not compiled with --enable-tvm-ffi.
        """
        entries = exported_functions(host_module)
        if len(entries) != 1:
            found = ", ".join(entries) if entries else "none"
            raise UserError(
                f"the host code has {len(entries)} entry points of the TVM FFI ({found}), the CPU executor needs one; "
                "compile the module with compile_for_sm90a(), whose options contain --enable-tvm-ffi"
            )
        self._names = dict(enumerate(names))
        self._runtime = CudaRuntime(on_launch)
        self._engine = HostEngine(host_module)
        for name, function in self._runtime.entry_points():
            self._engine.register(name, function)
        self._entry = self._engine.lookup(entries[0])
        self._turn = threading.RLock()

    def __call__(self, *arguments: torch.Tensor | float | int | None) -> None:
        """Run the host code, and through `on_launch` its kernels.

        Tensors lie on the CPU; shapes, dtypes and strides are those that the module was compiled for. Raises
        UserError for a tensor elsewhere, TypeError or ValueError with the host code's message for one that does not
        fit, LaunchRefused for a launch that a driver refuses, and whatever `on_launch` raised.
        """
        packed = (_Any * len(arguments))()
        called = [self._names.get(position, f"argument {position}") for position in range(len(arguments))]
        alive = [_pack(slot, name, value) for slot, name, value in zip(packed, called, arguments, strict=True)]
        handle = ctypes.c_void_p()
        args = ctypes.c_void_p(ctypes.addressof(packed))
        count = ctypes.c_int32(len(arguments))
        returned = _Any()
        result = ctypes.c_void_p(ctypes.addressof(returned))
        status = ctypes.c_int32(-1)
        with self._turn:
            self._entry(*(ctypes.addressof(value) for value in (handle, args, count, result, status)))
            self._runtime.raise_pending()
        del alive  # the descriptions of the tensors have to outlive the call
        if status.value != 0:
            raise RuntimeError(f"the host code ended with status {status.value} and gave no reason")


def _pack(slot: _Any, name: str, value: Any) -> Any:
    """Write one argument as a TVMFFIAny; returns what must stay alive as long as it is used."""
    if isinstance(value, torch.Tensor):
        description, alive = _describe(name, value)
        slot.type_index = _TENSOR
        slot.value.pointer = ctypes.addressof(description)
        return description, alive
    if value is None:
        slot.type_index = _NONE
    elif isinstance(value, bool):
        slot.type_index = _BOOL
        slot.value.integer = value
    elif isinstance(value, int):
        slot.type_index = _INT
        slot.value.integer = value
    elif isinstance(value, float):
        slot.type_index = _FLOAT
        slot.value.float = value
    else:
        raise TypeError(f"{name} is a {type(value).__name__}; it needs to be a tensor or a number")
    return None


class NotOnCpu(UserError, ValueError):
    """A tensor that lies elsewhere was given to the CPU model; a ValueError as on the GPU."""


def _describe(name: str, tensor: torch.Tensor) -> tuple[_DLTensor, Any]:
    """A DLTensor with the tensor's own strides, and the arrays that it points to."""
    if tensor.device.type != "cpu":
        raise NotOnCpu(
            f"{name} is on {tensor.device}; the CPU executor takes tensors on the CPU: pass {name}.cpu(), or run the "
            "generated module itself on the GPU"
        )
    if tensor.layout != torch.strided:
        raise UserError(f"{name} is {tensor.layout}; it needs to be strided: pass {name}.to_dense()")
    if tensor.dtype not in _DL_TYPES:
        raise TypeError(f"{name} has dtype {tensor.dtype}, which no generated kernel takes")
    code, bits = _DL_TYPES[tensor.dtype]
    shape = (ctypes.c_int64 * tensor.ndim)(*tensor.shape)
    strides = (ctypes.c_int64 * tensor.ndim)(*tensor.stride())
    description = _DLTensor(
        data=tensor.data_ptr(),
        device_type=_DL_CUDA,
        device_id=0,
        ndim=tensor.ndim,
        code=code,
        bits=bits,
        lanes=1,
        shape=ctypes.addressof(shape),
        strides=ctypes.addressof(strides),
        byte_offset=0,
    )
    return description, (shape, strides)
