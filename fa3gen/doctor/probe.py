"""Looks at the CUDA driver and at packages that may be missing, broken or slow, in a process of its own.

Usage: probe.py PROBE... `fa3gen.doctor.doctor` runs it, by file name. Prints one JSON line {"probe": name} before it
looks at something, and one with "facts" or "error" after: if the process dies, the last line names the culprit.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any


def cuda_driver() -> dict[str, Any]:
    """Driver and GPUs as the CUDA driver library reports them, without torch."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"driver": None, "gpus": []}
    status = cuda.cuInit(0)
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"  # 13000 stands for 13.0
    if status != 0:
        return {"driver": version, "gpus": [], "status": status}
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return {"driver": version, "gpus": [_gpu(cuda, index) for index in range(count.value)]}


def _gpu(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(256)
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of the CUDA Driver API
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    return {"name": name.value.decode(errors="replace"), "capability": [major.value, minor.value]}


def torch_build() -> dict[str, Any]:
    """What torch was built for, and whether it can use a GPU here."""
    import torch

    usable = torch.cuda.is_available()
    cudnn: Any = torch.backends.cudnn
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "usable": usable,
        "cudnn": cudnn.version() if torch.version.cuda else None,
    }


def importable(name: str) -> dict[str, Any]:
    """Whether a module is there; an exception means that it is there and broken."""
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it is missing
        found = False
    if found:
        importlib.import_module(name)
    return {"installed": found}


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "driver": cuda_driver,
    "torch": torch_build,
    "tvm_ffi": lambda: importable("tvm_ffi"),
    "flash_attn.cute": lambda: importable("flash_attn.cute"),
    "flash_attn_interface": lambda: importable("flash_attn_interface"),
}


def main() -> None:
    """Run the probes named on the command line; one that fails does not keep the others from running."""
    names = sys.argv[1:]
    sys.argv = sys.argv[:1]  # the DSL parses sys.argv when a peer imports it
    out = sys.stdout
    sys.stdout = sys.stderr  # whatever packages print on import must not mix with the report
    for name in names:
        print(json.dumps({"probe": name}), file=out, flush=True)
        try:
            answer: dict[str, Any] = {"probe": name, "facts": PROBES[name]()}
        except (Exception, SystemExit) as error:
            answer = {"probe": name, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
