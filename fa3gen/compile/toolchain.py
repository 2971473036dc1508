"""The tools around a compiled kernel: who assembled it, and what NVIDIA's binary utilities say about it.

cuobjdump and nvdisasm come from the PyPI packages `nvidia-cuda-cuobjdump` and `nvidia-cuda-nvdisasm`; a CUDA toolkit on
PATH serves as well. Nothing here imports cutlass or torch.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from fa3gen.base.errors import UserError

DSL_PACKAGE = "nvidia-cutlass-dsl"
SUPPORTED_DSL = (4, 8)  # major, minor: register budgets and the SASS of one source drift between minor versions

ANSI_COLOR = re.compile(r"\x1b\[[0-9;]*m")  # the DSL colours its messages and what it passes on of ptxas

_TOOL_PACKAGES = {"cuobjdump": "nvidia-cuda-cuobjdump", "nvdisasm": "nvidia-cuda-nvdisasm"}
_TOOL_TIMEOUT_S = 120
_ELF = b"\x7fELF"
_ELF_MACHINE_OFFSET, _CUDA = 18, 190  # e_machine and its EM_CUDA (ELF, "Machine"; LLVM's ELF.h)
_ELF_VERSION_OFFSET = 20  # e_version; up to CUDA 12.x a cubin keeps 10 * release there, from 13.0 it is plain 1
_RELEASE = re.compile(rb"Cuda compilation tools, release (\d+\.\d+), V([\d.]+)")
_FUNCTION = re.compile(r"^\s*Function (\S+):\n\s*(REG:.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """What one kernel of a cubin needs: registers per thread, the rest in bytes.

    `shared` is static shared memory as cuobjdump counts it, with the 1024 bytes that Hopper reserves per CTA.
    """

    registers: int
    stack: int
    shared: int
    local: int


def installed_version(package: str) -> str | None:
    """Version of an installed distribution; None when there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def dsl_supported(version: str) -> bool:
    """Whether a DSL version lies in the window that the templates are written and tested for."""
    numbers = re.findall(r"\d+", version)
    return tuple(int(number) for number in numbers[:2]) == SUPPORTED_DSL


def find_tool(name: str) -> Path:
    """The executable `cuobjdump` or `nvdisasm`: from its PyPI package, else from PATH.

    Raises UserError with the pip command when there is neither.
    """
    package = _TOOL_PACKAGES[name]
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if file.name == name and file.parent.name == "bin" and os.access(path, os.X_OK):
            return path
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    raise UserError(f"{name} not found; install it with: pip install {package}")


def _run_on_cubin(name: str, options: list[str], cubin: bytes) -> str:
    tool = find_tool(name)
    with tempfile.TemporaryDirectory(prefix="fa3gen-") as scratch:
        image = Path(scratch) / "kernel.cubin"
        image.write_bytes(cubin)
        try:
            done = subprocess.run(
                [str(tool), *options, str(image)], capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(
                f"{tool} could not run: {error}; reinstall it with: "
                f"pip install --force-reinstall {_TOOL_PACKAGES[name]}"
            ) from None
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no message"]
        raise UserError(
            f"{name} could not read the cubin: {last[0]}; a newer one may: pip install --upgrade {_TOOL_PACKAGES[name]}"
        )
    return done.stdout


def disassemble(cubin: bytes, *, line_info: bool = False) -> str:
    """SASS of every kernel in a cubin, as `nvdisasm -c` prints it (labels for branch targets, no encodings).

    With `line_info`, comments name the source lines of the instructions below them, where the cubin knows them.
    """
    # -ndf leaves out an analysis that only finds targets of indirect branches, which takes a quarter of the time.
    return _run_on_cubin("nvdisasm", ["-c", "-ndf", *["-g"] * line_info], cubin)


def resource_usage(cubin: bytes) -> dict[str, Resources]:
    """Registers, stack, shared and local memory by kernel name, as `cuobjdump -res-usage` prints them."""
    return parse_resource_usage(_run_on_cubin("cuobjdump", ["-res-usage"], cubin))


def parse_resource_usage(text: str) -> dict[str, Resources]:
    """The table that `cuobjdump -res-usage` prints, by kernel name."""
    usage = {}
    for name, line in _FUNCTION.findall(text):
        numbers = {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", line)}
        usage[name] = Resources(
            registers=numbers["REG"], stack=numbers["STACK"], shared=numbers["SHARED"], local=numbers["LOCAL"]
        )
    return usage


def ptxas_version(cubin: bytes) -> str | None:
    """Version of the ptxas that assembled a cubin, such as "12.9.83"; None when the cubin does not say.

    From CUDA 13.0 on the cubin names it in a note. Older ones hold only the release (12.9) in their ELF header; its
    last number is then read from the DSL's compiler library, which has ptxas built in, when exactly one version there
    is of that release. The release alone is returned otherwise.
    """
    noted = _RELEASE.search(cubin)
    if noted:
        return noted.group(2).decode()
    if len(cubin) < _ELF_VERSION_OFFSET + 4 or cubin[: len(_ELF)] != _ELF:
        return None
    (stamp,) = struct.unpack_from("<I", cubin, _ELF_VERSION_OFFSET)
    if stamp < 100:  # the plain ELF version of a new-style cubin that lacks its note
        return None
    release = f"{stamp // 10}.{stamp % 10}"
    full = [version for version_release, version in _versions_in_compiler() if version_release == release]
    return full[0] if len(full) == 1 else release


def ptxas_version_of_object(code: bytes) -> str | None:
    """The same of an object file of the DSL, which holds host code and the cubin; None when there is no cubin in it."""
    start = 0
    while (start := code.find(_ELF, start)) >= 0:
        header = code[start : start + _ELF_VERSION_OFFSET + 4]
        if len(header) == _ELF_VERSION_OFFSET + 4 and struct.unpack_from("<H", header, _ELF_MACHINE_OFFSET)[0] == _CUDA:
            return ptxas_version(code[start:])
        start += len(_ELF)
    return None


@lru_cache(maxsize=1)
def _versions_in_compiler() -> tuple[tuple[str, str], ...]:
    """(release, version) of every CUDA compiler built into the DSL's compiler library: ptxas and the NVVM front end."""
    found: set[tuple[str, str]] = set()
    for library in _compiler_libraries():
        with library.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as image:
            found.update((match.group(1).decode(), match.group(2).decode()) for match in _RELEASE.finditer(image))
    return tuple(sorted(found))


def _compiler_libraries() -> list[Path]:
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    return [library for root in roots for library in sorted(root.rglob("_mlir_libs/_cutlass_ir*.so"))]
