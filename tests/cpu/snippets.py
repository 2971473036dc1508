"""Runs a few PTX instructions on chosen register values: translated blocks on a stand-in for a group of warps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fa3gen.cpu.flow import EXIT
from fa3gen.cpu.lanes import NOBODY, spread
from fa3gen.cpu.ptx import parse
from fa3gen.cpu.translate import Program

WARP = 32


@dataclass
class StandIn:
    """What the translated form of arithmetic uses of a group of warps, and nothing else."""

    registers: list[Any]
    lanes: int
    mask: Any = None
    unfenced: int = 0

    def __post_init__(self) -> None:
        self.lane = np.arange(self.lanes, dtype=np.uint32) % np.uint32(WARP)
        self.tid_x = np.arange(self.lanes, dtype=np.uint32)
        self.ctaid_x = np.uint32(7)

    def active(self, predicate: Any, mask: Any) -> Any:
        if predicate.ndim == 0:
            return mask if predicate else NOBODY
        active = predicate if mask is None else predicate & mask
        if active.all():
            return None
        return active if active.any() else NOBODY


class Snippet:
    """Straight-line PTX: declarations and instructions, without `ret`."""

    def __init__(self, body: str) -> None:
        self.kernel = parse(f".entry snippet()\n{{\n{body}\nret;\n}}\n")["snippet"]
        self.program = Program(self.kernel)
        self.program.written = frozenset(self.kernel.registers)  # those that are given, too
        every = (1 << len(self.kernel.registers)) - 1
        self.program.blocks = [replace(block, live_in=every, live_out=every) for block in self.program.blocks]

    def run(self, inputs: dict[str, Any], *, lanes: int = WARP, mask: Any = None) -> dict[str, Any]:
        """The registers afterwards, as they are held; those without a value are left out.

        `inputs` are vectors of `lanes` elements, or scalars for all lanes, in any type of the register's width.
        """
        program, numbers = self.program, self.kernel.numbers
        registers: list[Any] = [None] * len(numbers)
        for name, value in inputs.items():
            registers[numbers[name]] = value.view(program.types[numbers[name]])
        before = [None if value is None else value.copy() for value in registers]
        inputs_held = list(registers)
        group = StandIn(registers, lanes, mask)
        block: int | None = 0
        with np.errstate(all="ignore"):
            while block != EXIT:
                block = program.function(block, mask is not None)(group)
        for held, copy in zip(inputs_held, before, strict=True):
            assert held is None or held.tobytes() == copy.tobytes(), "an instruction changed a vector in place"
        return {
            name: self._checked(name, registers[number])
            for name, number in numbers.items()
            if registers[number] is not None
        }

    def _checked(self, name: str, value: Any) -> Any:
        held = self.program.types[self.kernel.numbers[name]]
        assert value.dtype == held, f"{name} is held as {value.dtype}, not {held.__name__}"
        assert isinstance(value, np.generic) or (value.ndim == 1 and value.flags.c_contiguous), f"{name}: {value!r}"
        return value


def run(body: str, inputs: dict[str, Any], *, lanes: int = WARP, mask: Any = None) -> dict[str, Any]:
    """The registers after some PTX, each as a vector of `lanes` elements."""
    values = Snippet(body).run(inputs, lanes=lanes, mask=mask)
    return {name: spread(value, lanes) for name, value in values.items()}
