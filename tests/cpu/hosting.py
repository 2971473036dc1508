"""What the tests of the host side share: compiled modules, and launches with the bytes of their parameters."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rendering import CHECKOUT, changed, named, variants

from fa3gen.compile.cache import cached_compile
from fa3gen.compile.compiler import Compiled
from fa3gen.cpu.host import HostProgram, Launch
from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.module import load_on_cpu
from fa3gen.design import rules
from fa3gen.generate.render import render_variant
from fa3gen.spec.model import Forward, Spec
from fa3gen.verify import inputs, packed_inputs, paged_inputs
from fa3gen.verify.on_cpu import verify_on_cpu

# Bytes of a kernel parameter by the type of its `.param` line.
SCALAR_BYTES = {"b8": 1, "u8": 1, "b16": 2, "b32": 4, "u32": 4, "f32": 4, "b64": 8, "u64": 8, "f64": 8}


@cache
def compiled(stem: str) -> Compiled:
    """A committed module, compiled as the executor compiles it: without line information, which a report asks for."""
    return cached_compile(CHECKOUT.module_path(stem))


@cache
def program(stem: str) -> "RecordedProgram":
    """The host code of a committed module; the tests of a process share it."""
    return RecordedProgram(compiled(stem))


@cache
def module(stem: str) -> Any:
    """A committed module that runs on the CPU model; the tests of a process share it."""
    return load_on_cpu(CHECKOUT.module_path(stem))


@cache
def small(stem: str, head_dim: int = 64) -> tuple[str, Forward]:
    """A module with short rows and 32 keys in a tile, and its spec: for mistakes, each of which is compiled.

    What it takes grows with what is unrolled. All else is as committed: what waits for what, and who has which row.
    """
    spec = named(stem).spec
    assert isinstance(spec, Forward)
    smem = dict.fromkeys("qkv", "128B" if head_dim > 64 or spec.problem.dtype in ("bf16", "fp16") else "64B")
    parts: dict[str, Any] = {
        "problem": {"head_dim": head_dim},
        "tile": {"kv": 32},
        "smem": smem if spec.smem.vt is None else {**smem, "vt": "32B"},
        "softmax": {"exp_before_wait": None},
    }
    if spec.accumulate is not None and spec.accumulate.columns is not None:
        parts["accumulate"] = {"columns": 32}
    return with_fields(stem, **parts)


def with_fields(stem: str, **parts: Any) -> tuple[str, Forward]:
    """A module as `rendering.changed` has its spec, which breaks no rule, and that spec."""
    variant = changed(stem, **parts)
    assert isinstance(variant.spec, Forward) and rules.check(variant.spec) == []
    return render_variant(variant, CHECKOUT), variant.spec


def cases_of(spec: Forward, *names: str) -> list[Any]:
    """Those of these names, as far as there are any, of the cases that a module of its layout is verified on."""
    of_layout: dict[str, Any] = {"dense": inputs, "packed": packed_inputs, "paged": paged_inputs}
    return [case for case in of_layout[spec.problem.layout].cpu_cases(spec) if case.name in names]


def mistaken(folder: Path, name: str, source: str) -> Any:
    """A module with a mistake, which runs on the CPU model.

    Its hazards name no line of the source: to find it, the module would be compiled once more, and nobody asks.
    """
    found = load_on_cpu(path_of(folder, name, source))
    found.cpu.locate = lambda kernel, instruction: None
    return found


def reported(found: Any, spec: Spec, cases: Sequence[Any], *, schedules: int = 1) -> tuple[str, ...]:
    """What is said of the first case that fails, under one schedule or else under several; none behind it is tried."""
    for count in dict.fromkeys((1, schedules)):
        for case in cases:
            report = verify_on_cpu(found, spec, stem="wrong", cases=[case], seed=1, count=count, calls=False)
            if report.cases[0].failures:
                return report.cases[0].failures
    return ()


def outputs(stem: str, settings: Settings, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of q, k, v under these settings; what the kernel does not write of O is NaN."""
    q, _, v = given
    into = torch.full((*q.shape[:3], v.shape[3]), math.nan, dtype=variants()[stem].spec.o_element.in_torch())
    module(stem).cpu.settings = settings
    try:
        out, lse = module(stem).attention(*given, out=into, return_lse=True)
        return out, lse
    finally:
        module(stem).cpu.settings = Settings()


def parameter_sizes(ptx: str) -> list[int]:
    """Bytes of each parameter of the only kernel in a PTX text."""
    declarations = re.findall(r"\.param (?:\.align \d+ )?\.(\w+) \w+_param_(\d+)(?:\[(\d+)\])?", ptx)
    assert [int(index) for _, index, _ in declarations] == list(range(len(declarations)))
    return [int(count or 1) * SCALAR_BYTES[kind] for kind, _, count in declarations]


@dataclass
class RecordedProgram:
    """A host program whose launches are kept, each with the bytes of its parameters."""

    module: Compiled
    launches: list[tuple[Launch, list[bytes]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sizes = parameter_sizes(self.module.ptx)
        self.host = HostProgram(self.module.host_module, self._record)

    def _record(self, launch: Launch) -> None:
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(launch.arguments)
        parameters = [ctypes.string_at(at, size) for at, size in zip(pointers, self.sizes, strict=True) if at]
        self.launches.append((launch, parameters))

    def launch(self, *arguments: torch.Tensor | float) -> tuple[Launch, list[bytes]]:
        """The one launch of a call."""
        before = len(self.launches)
        self.host(*arguments)
        assert len(self.launches) == before + 1
        return self.launches[-1]


def path_of(folder: Path, name: str, source: str) -> Path:
    """A module written for one test."""
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    return path
