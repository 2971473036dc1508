"""Stand-ins for the CUDA runtime, driver and TVM FFI functions that compiled host code calls.

They answer as the libraries do on an H100 with one device, refuse what those refuse, and hand every launch to a
callback instead of a GPU. Signatures are those that the host module declares; the structures are `cudaLaunchConfig_t`
and `cudaLaunchAttribute` of the CUDA Runtime API. This module imports neither cutlass nor torch.
"""

from __future__ import annotations

import builtins
import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fa3gen.base.errors import UserError
from fa3gen.hardware.hopper import SMEM_PER_CTA, THREADS_PER_CTA

DEFAULT_SHARED_BYTES = 49152  # without cudaFuncAttributeMaxDynamicSharedMemorySize
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)

_DEVICE = 0
_STREAM = None  # the default stream
_LIBRARY = 1
_CUDA_SUCCESS = 0
_CUDA_ERROR_UNKNOWN = 999
_FFI_ERROR = -1

# Numbers of the CUDA Runtime API: cudaDeviceAttr, cudaFuncAttribute, cudaLaunchAttributeID; CUfunction_attribute.
_DEVICE_MAX_SHARED_BYTES_OPTIN = 97
_KERNEL_STATIC_SHARED_BYTES = 1
_KERNEL_MAX_DYNAMIC_SHARED_BYTES = 8
_KERNEL_NON_PORTABLE_CLUSTER = 14
_LAUNCH_CLUSTER = 4
_LAUNCH_ALLOWED_WHEN_ZERO = {2: "cooperative"}
_LAUNCH_BESIDE_PREVIOUS = 6  # programmatic stream serialization

_pointer, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class LaunchRefused(UserError):
    """A CUDA call that a real driver refuses, or that the CPU model does not cover."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch as the host code asked for it.

    `kernel` is the name of the PTX entry; `grid` counts CTAs, `block` threads and `cluster` CTAs, each (x, y, z).
    `arguments` is the address of a `void *[]`, one pointer for each `.param` of the entry; it is valid only while the
    host function runs, that is inside `on_launch`. `beside_previous`: it may begin before the one before has ended.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int
    stream: int
    arguments: int
    beside_previous: bool = False


class _LaunchConfig(ctypes.Structure):
    """cudaLaunchConfig_t."""

    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_shared_bytes", ctypes.c_uint64),
        ("stream", _pointer),
        ("attributes", _pointer),
        ("attribute_count", ctypes.c_uint32),
    ]


class _LaunchAttribute(ctypes.Structure):
    """cudaLaunchAttribute: the host code writes only the words of `value` that the attribute has."""

    _fields_ = [("id", ctypes.c_int32), ("padding", ctypes.c_uint8 * 4), ("value", ctypes.c_uint32 * 16)]


class CudaRuntime:
    """What the host code takes for the CUDA runtime on a machine with one Hopper GPU.

    No entry point ever raises into the compiled code that called it: the exception is kept, the call returns an
    error status, and `raise_pending` raises it once the host code has returned.
    """

    def __init__(self, on_launch: Callable[[Launch], None]) -> None:
        """`on_launch` is called for every launch that passes the checks, while the host code is on the stack."""
        self._on_launch = on_launch
        self._kernels: dict[int, str] = {}
        self._max_dynamic_shared: dict[int, int] = {}
        self._library = ctypes.c_void_p()
        self._loaded = False
        self._pending: BaseException | None = None
        self._error_name = ctypes.create_string_buffer(b"cudaErrorUnknown")

    def raise_pending(self) -> None:
        """Raise the first exception that an entry point kept, and forget it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            raise pending

    def entry_points(self) -> Iterator[tuple[str, Any]]:
        """(symbol, ctypes function) of everything that the host code may call. The caller keeps them alive."""
        for name, entry in ENTRY_POINTS.items():
            function = self._guarded(getattr(self, entry.method), entry.failed)
            yield name, ctypes.CFUNCTYPE(entry.result, *entry.arguments)(function)
        yield _UNLOAD, _DO_NOTHING

    def _guarded(self, function: Callable[..., Any], failed: int | None) -> Callable[..., Any]:
        """`function`, returning `failed` where it raises: an exception must not unwind through compiled code."""

        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except BaseException as error:  # also KeyboardInterrupt: it is raised again after the host code returned
                self._keep(error)
                return failed

        return call

    def _keep(self, error: BaseException) -> None:
        """Keep the first error: those after it are its consequences."""
        if self._pending is None:
            self._pending = error

    # Devices and libraries

    def get_device(self, device: int) -> int:
        """cudaGetDevice."""
        _int32.from_address(device).value = _DEVICE
        return _CUDA_SUCCESS

    def set_device(self, device: int) -> int:
        """cudaSetDevice: there is one device."""
        if device != _DEVICE:
            raise LaunchRefused(f"cudaSetDevice({device}): the CPU executor models one device, number {_DEVICE}")
        return _CUDA_SUCCESS

    def device_attribute(self, value: int, attribute: int, device: int) -> int:
        """cudaDeviceGetAttribute."""
        if attribute != _DEVICE_MAX_SHARED_BYTES_OPTIN:
            raise LaunchRefused(
                f"outside the model: the host code asks for device attribute {attribute}; the CPU executor knows only "
                f"{_DEVICE_MAX_SHARED_BYTES_OPTIN}, cudaDevAttrMaxSharedMemoryPerBlockOptin"
            )
        _int32.from_address(value).value = SMEM_PER_CTA
        return _CUDA_SUCCESS

    def init_library_once(self, state: int, initialize: int, load: int, set_error: int) -> int:
        """Load the module's kernels when its host code runs for the first time.

        `initialize` (int (void **library)) loads the binary, `load` (int (void **library, int device)) fetches the
        kernels and sets their attributes; both are functions of the host code that call back into this object.
        """
        if self._loaded:
            return _CUDA_SUCCESS
        library = ctypes.addressof(self._library)
        status = ctypes.CFUNCTYPE(_int32, _pointer)(initialize)(library)
        if status == _CUDA_SUCCESS:
            status = ctypes.CFUNCTYPE(_int32, _pointer, _int32)(load)(library, _DEVICE)
        if status != _CUDA_SUCCESS:
            raise RuntimeError(f"the host code could not load its kernels: status {status}")
        self._loaded = True
        return _CUDA_SUCCESS

    def load_library(self, library: int, code: int, *options: Any) -> int:
        """cudaLibraryLoadData. The binary is not looked at: the executor runs the PTX."""
        ctypes.c_void_p.from_address(library).value = _LIBRARY
        return _CUDA_SUCCESS

    def get_kernel(self, kernel: int, library: int, name: int) -> int:
        """cudaLibraryGetKernel: a handle for the kernel `name`."""
        handle = len(self._kernels) + 1
        self._kernels[handle] = ctypes.string_at(name).decode()
        ctypes.c_void_p.from_address(kernel).value = handle
        return _CUDA_SUCCESS

    # Kernels

    def kernel_attribute(self, value: int, attribute: int, kernel: int, device: int) -> int:
        """cuKernelGetAttribute. Static shared memory is 0: generated kernels allocate all of theirs dynamically."""
        if attribute != _KERNEL_STATIC_SHARED_BYTES:
            raise LaunchRefused(f"outside the model: the host code asks for kernel attribute {attribute}")
        _int32.from_address(value).value = 0
        return _CUDA_SUCCESS

    def set_kernel_attribute(self, kernel: int, attribute: int, value: int, device: int = _DEVICE) -> int:
        """cudaKernelSetAttributeForDevice and cudaFuncSetAttribute."""
        if attribute == _KERNEL_MAX_DYNAMIC_SHARED_BYTES:
            if not 0 <= value <= SMEM_PER_CTA:
                raise LaunchRefused(
                    f"{self._kernels[kernel]}: cudaFuncAttributeMaxDynamicSharedMemorySize {value} is refused: a CTA "
                    f"of sm_90 may have up to {SMEM_PER_CTA} bytes"
                )
            self._max_dynamic_shared[kernel] = value
        elif attribute != _KERNEL_NON_PORTABLE_CLUSTER:
            raise LaunchRefused(f"outside the model: the host code sets function attribute {attribute}")
        return _CUDA_SUCCESS

    def launch_kernel_ex(self, config: int, kernel: int, arguments: int) -> int:
        """cudaLaunchKernelExC, with the refusals of the CUDA Runtime API; the kernel has run when it returns."""
        asked = _LaunchConfig.from_address(config)
        name = self._kernels.get(kernel or 0)
        if name is None:
            raise LaunchRefused(f"launch of kernel handle {kernel}, which no library of this module has")
        attributes: Any = ()
        if asked.attribute_count:
            attributes = (_LaunchAttribute * asked.attribute_count).from_address(asked.attributes)
        cluster, beside_previous = (1, 1, 1), False
        for attribute in attributes:
            if attribute.id == _LAUNCH_CLUSTER:
                cluster = (attribute.value[0], attribute.value[1], attribute.value[2])
            elif attribute.id == _LAUNCH_BESIDE_PREVIOUS:
                beside_previous = attribute.value[0] != 0
            else:
                _check_launch_attribute(name, attribute.id, attribute.value[0])
        launch = Launch(
            kernel=name,
            grid=(asked.grid[0], asked.grid[1], asked.grid[2]),
            block=(asked.block[0], asked.block[1], asked.block[2]),
            cluster=cluster,
            dynamic_shared_bytes=asked.dynamic_shared_bytes,
            stream=asked.stream or 0,
            arguments=arguments,
            beside_previous=beside_previous,
        )
        check_launch(launch, self._max_dynamic_shared.get(kernel))
        self._on_launch(launch)
        return _CUDA_SUCCESS

    def launch_kernel(self, *arguments: Any) -> int:
        """cudaLaunchKernel, which no host code of the supported DSL was seen to call."""
        raise LaunchRefused("outside the model: the host code launches through cudaLaunchKernel")

    def max_active_blocks(self, *arguments: Any) -> int:
        """cudaOccupancyMaxActiveBlocksPerMultiprocessor, which depends on what ptxas did."""
        raise LaunchRefused("outside the model: the host code asks for the occupancy of a kernel")

    # TVM FFI

    def get_stream(self, device_type: int, device: int) -> None:
        """TVMFFIEnvGetStream: the default stream."""
        return _STREAM

    def set_error(self, kind: int, message: int) -> None:
        """TVMFFIErrorSetRaisedFromCStr(kind, message)."""
        self._keep(_exception(_text(kind), _text(message)))

    def set_error_from_parts(self, kind: int, parts: int, count: int) -> None:
        """TVMFFIErrorSetRaisedFromCStrParts(kind, parts, count)."""
        pieces = (ctypes.c_void_p * count).from_address(parts)
        self._keep(_exception(_text(kind), "".join(_text(piece) for piece in pieces if piece)))

    def set_cuda_error(self, set_error_from_parts: int, status: int) -> None:
        """The host code's own report of a CUDA call that failed; the call has kept the reason already."""
        self._keep(RuntimeError(f"the host code stopped at CUDA error {status}"))

    def error_name(self, status: int) -> int:
        """Name of a CUDA error, as a C string."""
        return ctypes.addressof(self._error_name)


@dataclass(frozen=True)
class EntryPoint:
    """A C function that the host code calls: who answers, its signature, and what it returns when that raises."""

    method: str
    arguments: tuple[Any, ...]
    result: Any = _int32
    failed: int | None = _CUDA_ERROR_UNKNOWN


ENTRY_POINTS = {
    "_cudaGetDevice": EntryPoint("get_device", (_pointer,)),
    "_cudaSetDevice": EntryPoint("set_device", (_int32,)),
    "_cudaDeviceGetAttribute": EntryPoint("device_attribute", (_pointer, _int32, _int32)),
    "_cudaLibraryLoadData": EntryPoint(
        "load_library", (_pointer, _pointer, _pointer, _pointer, _int32, _pointer, _pointer, _int32)
    ),
    "_cudaLibraryGetKernel": EntryPoint("get_kernel", (_pointer, _pointer, _pointer)),
    "_cuKernelGetAttribute": EntryPoint("kernel_attribute", (_pointer, _int32, _pointer, _int32)),
    "_cudaKernelSetAttributeForDevice": EntryPoint("set_kernel_attribute", (_pointer, _int32, _int32, _int32)),
    "_cudaFuncSetAttribute": EntryPoint("set_kernel_attribute", (_pointer, _int32, _int32)),
    "_cudaLaunchKernelEx": EntryPoint("launch_kernel_ex", (_pointer, _pointer, _pointer)),
    "_cudaLaunchKernel": EntryPoint(
        "launch_kernel", (_pointer, *(_int32,) * 6, _pointer, _int64, _pointer)  # never seen in use
    ),
    "_cudaOccupancyMaxActiveBlocksPerMultiprocessor": EntryPoint(
        "max_active_blocks", (_pointer, _pointer, _int32, _int64)
    ),
    "cuda_dialect_init_library_once": EntryPoint("init_library_once", (_pointer,) * 4, failed=_FFI_ERROR),
    "cuda_dialect_get_error_name": EntryPoint("error_name", (_int32,), _pointer, None),
    "CuteDSLRT_TVMFFISetRaisedCudaError": EntryPoint("set_cuda_error", (_pointer, _int32), None, None),
    "TVMFFIEnvGetStream": EntryPoint("get_stream", (_int32, _int32), _pointer, None),
    "TVMFFIErrorSetRaisedFromCStr": EntryPoint("set_error", (_pointer, _pointer), None, None),
    "TVMFFIErrorSetRaisedFromCStrParts": EntryPoint("set_error_from_parts", (_pointer, _pointer, _int32), None, None),
}

# The engine calls this one when it is destroyed, perhaps while the interpreter exits or collects the callbacks: no
# Python code can stand in for it. It has nothing to do, and a C function that does nothing to the process is enough.
_UNLOAD = "cuda_dialect_unload_library_once"
_DO_NOTHING = ctypes.pythonapi.Py_IsInitialized

PROVIDED_SYMBOLS = frozenset({*ENTRY_POINTS, _UNLOAD})


def check_launch(launch: Launch, max_dynamic_shared: int | None) -> None:
    """Raise LaunchRefused for a launch that a driver refuses, or that has clusters.

    `max_dynamic_shared` is the kernel's cudaFuncAttributeMaxDynamicSharedMemorySize in bytes, None when it was not
    set. Limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 9.0.
    """
    reasons = []
    for name, values, limits in (("grid", launch.grid, MAX_GRID), ("block", launch.block, MAX_BLOCK)):
        for axis, value, limit in zip("xyz", values, limits, strict=True):
            if not 1 <= value <= limit:
                reasons.append(f"{name}.{axis} is {value}; it needs to be 1 to {limit}")
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    if threads > THREADS_PER_CTA:
        shape = " x ".join(str(extent) for extent in launch.block)
        reasons.append(f"a block of {shape} = {threads} threads; a CTA has at most {THREADS_PER_CTA}")
    allowed = DEFAULT_SHARED_BYTES if max_dynamic_shared is None else max_dynamic_shared
    if launch.dynamic_shared_bytes > SMEM_PER_CTA:
        reasons.append(f"{launch.dynamic_shared_bytes} bytes of shared memory; a CTA has at most {SMEM_PER_CTA}")
    elif launch.dynamic_shared_bytes > allowed:
        reasons.append(
            f"{launch.dynamic_shared_bytes} bytes of dynamic shared memory; "
            f"cudaFuncAttributeMaxDynamicSharedMemorySize allows {allowed}"
        )
    if launch.cluster != (1, 1, 1):
        shape = " x ".join(str(extent) for extent in launch.cluster)
        reasons.append(f"outside the model: clusters ({shape} CTAs)")
    if reasons:
        raise LaunchRefused(f"launch of {launch.kernel} refused: " + "; ".join(reasons))


def _check_launch_attribute(kernel: str, attribute: int, value: int) -> None:
    """Raise LaunchRefused for an attribute that would change how the kernel runs."""
    if attribute not in _LAUNCH_ALLOWED_WHEN_ZERO:
        raise LaunchRefused(f"launch of {kernel} refused: outside the model: launch attribute {attribute}")
    if value != 0:
        meaning = _LAUNCH_ALLOWED_WHEN_ZERO[attribute]
        raise LaunchRefused(f"launch of {kernel} refused: outside the model: {meaning} (launch attribute {attribute})")


def _text(address: int) -> str:
    return ctypes.string_at(address).decode(errors="replace")


def _exception(kind: str, message: str) -> Exception:
    """The Python exception for an error kind of the TVM FFI, which names Python's own where it can."""
    found = getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception):
        return found(message)
    return RuntimeError(f"{kind}: {message}")
