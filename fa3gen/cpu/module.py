"""A generated module whose `attention` takes CPU tensors: its own Python and host code, its own PTX, a modelled sm_90a.

The file stays as it is. Some of its functions are replaced in a module object of its own: `compile_for_sm90a`, whose
result launches on a Hopper GPU, and those that ask for one, which have the names and results of methods of CpuModel.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fa3gen.base.errors import UserError
from fa3gen.compile.cache import cached_compile
from fa3gen.compile.loading import load_file
from fa3gen.cpu import ptx
from fa3gen.cpu.dsl import require_supported_dsl
from fa3gen.cpu.host import NotOnCpu
from fa3gen.cpu.kernel import CpuKernel, Settings, Source
from fa3gen.design.workspace import Workspace


class CpuModel:
    """What a module loaded with on="cpu" runs on; the module has it as `cpu`.

    `settings` (schedule, trace, some CTAs only) may be changed or replaced between calls of `attention`.
    """

    def __init__(self, path: Path, names: Sequence[str] = ()) -> None:
        """Nothing is compiled yet; `names` are the arguments of the module's `launch`, for messages."""
        self.path, self.names = path, names
        self.settings = Settings()
        self.counter: torch.Tensor | None = None
        self.flags: torch.Tensor | None = None
        self.parts: torch.Tensor | None = None

    def check_gpu(self, gpu: int) -> None:
        """The model reads and writes the memory of this process; raises NotOnCpu for tensors of a GPU."""
        if gpu >= 0:
            raise NotOnCpu(
                f"q is on GPU {gpu}, and this module was loaded with on='cpu'; pass q.cpu(), or load the module "
                "without `on` to run it on a GPU"
            )

    def unasked_lse(self, gpu: int) -> torch.Tensor:
        """An LSE of no rows. Raises as `check_gpu`."""
        self.check_gpu(gpu)
        return torch.empty((1, 1, 0), dtype=torch.float32)

    def sm_count(self, gpu: int) -> int:
        """The SMs of the settings. Raises as `check_gpu`."""
        self.check_gpu(gpu)
        return self.settings.sms

    def launch_constants(self, gpu: int) -> tuple[int, torch.Tensor]:
        """The SMs of the settings and an LSE of no rows. Raises as `check_gpu`."""
        return self.settings.sms, self.unasked_lse(gpu)

    def unit_factor(self, gpu: int) -> torch.Tensor:
        """The factor of calls without one."""
        return torch.ones((1, 1))

    def packed_constants(self, gpu: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """The SMs of the settings, no lengths, and an LSE of no rows. Raises as `check_gpu`."""
        self.check_gpu(gpu)
        return self.settings.sms, torch.empty(0, dtype=torch.int32), torch.empty((1, 0), dtype=torch.float32)

    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, gpu: int) -> torch.Tensor:
        """A tensor of `nothing`."""
        return torch.empty_strided(shape, strides, dtype=dtype).fill_(nothing(dtype))

    def tile_counter(self, gpu: int) -> torch.Tensor:
        """A zero for each launch; kept as `counter`, so that a test can see what the launch leaves in it."""
        self.counter = torch.zeros(1, dtype=torch.int32)
        return self.counter

    def flags_and_parts(self, module: Any, gpu: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Flags at zero, and parts that are NaN where nobody gives one; both kept for tests."""
        self.flags = torch.zeros((self.settings.sms, module.CONSUMER_WARPS), dtype=torch.int32)
        self.parts = torch.full((self.settings.sms, *module.PART_SHAPE), torch.nan)
        return self.flags, self.parts

    def counter_flags_and_parts(self, module: Any, gpu: int) -> tuple[torch.Tensor, ...]:
        """A zero for the counter, and what `flags_and_parts` returns."""
        return self.tile_counter(gpu), *self.flags_and_parts(module, gpu)

    @cached_property
    def kernel(self) -> CpuKernel:
        """The compiled module, made when it is first needed: from the compile cache, or in seconds.

        Raises CompileError where the module does not compile, OutsideModel for an instruction that the model lacks.
        """
        return CpuKernel(cached_compile(self.path), locate=self.locate, names=self.names)

    def locate(self, kernel: str, instruction: int) -> Source | None:
        """File and line of the instruction of this index, for reports; the file as people write it.

        The module is compiled once more for it, with line information: the PTX has the same instructions.
        """
        instructions = self._with_lines[kernel].instructions
        if instruction >= len(instructions) or (source := instructions[instruction].source) is None:
            return None
        file, line = Path(source[0]), source[1]
        root = Workspace.find(self.path.parent).root
        return str(file.relative_to(root)) if file.is_relative_to(root) else file.name, line

    @cached_property
    def _with_lines(self) -> dict[str, ptx.Kernel]:
        return ptx.parse(cached_compile(self.path, line_info=True).ptx)


def nothing(dtype: torch.dtype) -> float:
    """What stands where a kernel has not written yet, so that it shows: NaN, or the largest integer."""
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def _parameters(launch: Any) -> list[str]:
    """Names of what a function of the DSL takes."""
    return list(inspect.signature(inspect.unwrap(launch)).parameters)


def load_on_cpu(path: Path) -> ModuleType:
    """Import a generated file, every time anew, as a module that runs on the CPU; its `cpu` is a CpuModel.

    Raises UserError when nvidia-cutlass-dsl is missing or of a version that the model does not support.
    """
    require_supported_dsl()
    module: Any = load_file(path, variety="cpu")
    model = CpuModel(path.resolve(), _parameters(module.launch))

    def compile_for_sm90a(options: str = "--enable-tvm-ffi") -> CpuKernel:
        """The kernel, run by the model."""
        if options != "--enable-tvm-ffi":
            raise UserError(f"options {options!r} have no meaning on the CPU model of sm_90a; leave them out")
        model.kernel.settings = model.settings
        return model.kernel

    module.compile_for_sm90a, module.cpu = compile_for_sm90a, model
    on_gpu = (
        *("check_gpu", "unasked_lse", "sm_count", "launch_constants", "packed_constants"),
        *("unit_factor", "empty", "tile_counter"),
    )
    for name in on_gpu:
        if hasattr(module, name):
            setattr(module, name, getattr(model, name))
    for name in ("flags_and_parts", "counter_flags_and_parts"):
        if hasattr(module, name):
            setattr(module, name, partial(getattr(model, name), module))
    return module  # type: ignore[no-any-return]
