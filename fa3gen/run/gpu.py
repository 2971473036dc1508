"""Small questions about the GPU and the software around it. Imports torch only when asked."""

from __future__ import annotations

import functools
import platform
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa3gen.compile.toolchain import DSL_PACKAGE, installed_version

if TYPE_CHECKING:
    import torch

HOPPER = (9, 0)


def why_no_hopper() -> str | None:
    """Return None when the current CUDA device is a Hopper GPU, otherwise one sentence saying what is missing."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device (no NVIDIA GPU or no working driver)"
    capability = torch.cuda.get_device_capability()
    if capability != HOPPER:
        name, version = torch.cuda.get_device_name(), "{}.{}".format(*capability)
        return f"the GPU here is {name} (compute capability {version}); sm_90a code runs on Hopper (9.0) only"
    return None


def hopper_device() -> torch.device | None:
    """Return the current CUDA device when it is a Hopper GPU, otherwise None."""
    if why_no_hopper() is not None:
        return None
    import torch

    return torch.device("cuda", torch.cuda.current_device())


@functools.cache
def sm_count(index: int) -> int | None:
    """The number of SMs of a CUDA device; None for the index that tensors elsewhere have, -1, and without a driver."""
    import torch

    if index < 0 or not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _query(fields: str) -> list[str] | None:
    """Ask nvidia-smi about the first GPU; None when it is absent or refuses."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return [field.strip() for field in answer.splitlines()[0].split(",")] if answer.strip() else None


@dataclass(frozen=True)
class Environment:
    """What a GPU result depends on beside the source: device and versions. None where it could not be read."""

    gpu: str | None
    driver: str | None
    cuda_driver: str | None
    torch: str | None
    dsl: str | None
    ptxas: str | None
    python: str


def environment(ptxas: str | None = None) -> Environment:
    """Read device and versions; `ptxas` comes from the compile facts, since only a compile tells which ran."""
    gpu = driver = cuda_driver = None
    if (device := hopper_device()) is not None:
        import torch
        from cuda.bindings import driver as cuda

        gpu = torch.cuda.get_device_name(device)
        _, number = cuda.cuDriverGetVersion()  # 13000 is 13.0
        cuda_driver = f"{number // 1000}.{number % 1000 // 10}"
        answer = _query("driver_version")
        driver = answer[0] if answer else None
    return Environment(
        gpu=gpu,
        driver=driver,
        cuda_driver=cuda_driver,
        torch=installed_version("torch"),
        dsl=installed_version(DSL_PACKAGE),
        ptxas=ptxas,
        python=platform.python_version(),
    )


@dataclass(frozen=True)
class Sample:
    """One reading of the GPU while it works: MHz, W, degrees Celsius. None where it could not be read."""

    sm_mhz: float | None
    power_w: float | None
    temperature_c: float | None


def sample() -> Sample:
    """Read SM clock, board power and temperature, through NVML where torch can, else through nvidia-smi."""
    import torch

    try:
        milliwatts = torch.cuda.power_draw()
        return Sample(float(torch.cuda.clock_rate()), milliwatts / 1000, float(torch.cuda.temperature()))
    except (RuntimeError, ImportError, ModuleNotFoundError, AttributeError):
        answer = _query("clocks.sm,power.draw,temperature.gpu") or ["", "", ""]
    values = [float(field) if field.replace(".", "", 1).isdigit() else None for field in answer]
    return Sample(values[0], values[1], values[2])
