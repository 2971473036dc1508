"""A kernel ready to run: each basic block of PTX as a Python function over lane vectors.

A block's function takes the Group of warps that runs it, runs all its instructions for all lanes at once, and returns
the number of the next block, or WAIT when its one blocking instruction cannot proceed yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from fa3gen.cpu import isa, lane_memory, lanes  # noqa: F401 - importing isa registers the forms
from fa3gen.cpu.clocks import INIT, PROXY
from fa3gen.cpu.emitter import Emitter
from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.flow import EXIT, bits, blocks_of, definitions_and_uses
from fa3gen.cpu.ptx import Immediate, Kernel, Register, Vector, registers_in
from fa3gen.cpu.types import NAMES, TYPES, UNSIGNED, Type, width
from fa3gen.cpu.wgmma import InFlight

WAIT = None  # what a block returns when it has to be tried again
SPLIT = -2  # what a block returns when its group no longer exists

BlockFunction = Callable[[Any], int | None]


class Program:
    """A kernel ready to run: its blocks, and functions for them made when they are first needed.

    `preemptive` cuts blocks so finely that a schedule may switch warps wherever another warp could notice.
    """

    def __init__(self, kernel: Kernel, *, preemptive: bool = False, other: Program | None = None) -> None:
        """Cut the kernel into blocks; `other` is the same kernel, cut otherwise, if there is one.

        Raises OutsideModel for an instruction that the model lacks.
        """
        self.kernel = kernel
        self.blocks = blocks_of(kernel, preemptive=preemptive)
        if other is None:
            self.types = _register_types(kernel)
            self.accumulators, self.fragments = _wgmma_registers(kernel)
            self.watched = _with_sources(kernel, self.accumulators | self.fragments)
            self.granule, self.global_granule = _granule(kernel), _granule(kernel, shared=False)
        else:
            self.types, self.watched = other.types, other.watched
            self.granule, self.global_granule = other.granule, other.global_granule
            self.accumulators, self.fragments = other.accumulators, other.fragments
        self.lines: list[dict[int, int]] = []  # per function: line of its source -> instruction index
        self._functions: dict[tuple[int, bool], BlockFunction] = {}
        self._live: dict[frozenset[int], tuple[int, ...]] = {}

    @cached_property
    def written(self) -> frozenset[str]:
        """Names of the registers that any instruction writes."""
        found = (definitions_and_uses(self.kernel, instruction)[0] for instruction in self.kernel.instructions)
        return frozenset(name for names in found for name in names)

    @property
    def register_count(self) -> int:
        """Number of virtual registers."""
        return len(self.kernel.registers)

    def function(self, block: int, masked: bool) -> BlockFunction:
        """The function of a block; `masked` where only some lanes of the group are active."""
        function = self._functions.get((block, masked))
        if function is None:
            function = self._functions[block, masked] = self._translate(block, masked)
        return function

    def live_registers(self, blocks: frozenset[int]) -> tuple[int, ...]:
        """Numbers of the registers that are read from any of these blocks on: groups part and meet at few places."""
        found = self._live.get(blocks)
        if found is None:
            live = 0
            for block in blocks - {EXIT}:
                live |= self.blocks[block].live_in
            found = self._live[blocks] = tuple(bits(live))
        return found

    def _translate(self, block: int, masked: bool) -> BlockFunction:
        source, constants, lines = Emitter(self, self.blocks[block], masked).translate()
        names = {**_GLOBALS, **constants}
        number = len(self.lines)
        self.lines.append(lines)
        exec(compile(source, f"<ptx block {number}>", "exec"), names)
        function: BlockFunction = names["block"]
        return function


def _register_types(kernel: Kernel) -> list[Type]:
    """The type in which each register is held: the one that its instructions name most often.

    Any type of the right width would do; a frequent one saves views.
    """
    votes: dict[str, Counter[Type]] = {name: Counter() for name in kernel.registers}
    for instruction in kernel.instructions:
        named = TYPES.get(instruction.mnemonic.rpartition(".")[2])
        if named is None or instruction.opcode in ("cvt", "wgmma", "mma"):
            continue
        for operand in instruction.operands:
            for name in registers_in(operand):
                if width(named) == width(TYPES[kernel.registers[name]]):
                    votes[name][named] += 1
    types = []
    for name, declared in kernel.registers.items():
        typed = [(count, NAMES[type_], type_) for type_, count in votes[name].items() if type_ not in UNSIGNED.values()]
        types.append(max(typed)[2] if typed else TYPES[declared])
    return types


def _wgmma_registers(kernel: Kernel) -> tuple[frozenset[int], frozenset[int]]:
    """Numbers of the registers that are accumulators, and of those that hold A fragments, of any wgmma."""
    accumulators: set[int] = set()
    fragments: set[int] = set()
    for instruction in kernel.instructions:
        if instruction.mnemonic.startswith("wgmma.mma_async"):
            accumulators.update(kernel.numbers[name] for name in registers_in(instruction.operands[0]))
            if isinstance(instruction.operands[1], Vector):
                fragments.update(kernel.numbers[name] for name in registers_in(instruction.operands[1]))
    return frozenset(accumulators), frozenset(fragments)


def _with_sources(kernel: Kernel, registers: frozenset[int]) -> frozenset[int]:
    """The registers, and all that reach them through copies alone."""
    copies = [
        (kernel.numbers[instruction.operands[0].name], kernel.numbers[instruction.operands[1].name])
        for instruction in kernel.instructions
        if instruction.opcode == "mov"
        and isinstance(instruction.operands[0], Register)
        and isinstance(instruction.operands[1], Register)
    ]
    found = set(registers)
    while more := {source for destination, source in copies if destination in found} - found:
        found |= more
    return frozenset(found)


def _granule(kernel: Kernel, *, shared: bool = True) -> int:
    """Bytes of shared or global memory whose state is kept together: the narrowest access; no two share one."""
    narrowest = 16
    for instruction in kernel.instructions:
        if instruction.mnemonic.startswith(("cp.async.ca", "cp.async.cg")) and len(instruction.operands) > 2:
            width_operand = instruction.operands[2]
            if isinstance(width_operand, Immediate) and width_operand.value in (4, 8):
                narrowest = min(narrowest, width_operand.value)
        if instruction.opcode in ("ld", "st", "atom", "red") and ".param" not in instruction.mnemonic:
            if (".global" in instruction.mnemonic) == shared or ".local" in instruction.mnemonic:
                continue
            vector = {".v2": 2, ".v4": 4, ".v8": 8}
            count = next((n for text, n in vector.items() if text in instruction.mnemonic), 1)
            element = TYPES[instruction.mnemonic.rpartition(".")[2]]
            narrowest = min(narrowest, count * width(element) // 8)
    return narrowest


_GLOBALS: dict[str, Any] = {
    **{name: type_ for type_, name in NAMES.items()},
    **{name: value for name, value in vars(lanes).items() if not name.startswith("_")},
    **{name: getattr(lane_memory, name) for name in ("load_matrices", "store_matrices", "atomic", "compare_and_swap")},
    **{"np": np, "InFlight": InFlight, "TRUE": np.True_, "FALSE": np.False_, "WAIT": WAIT},
    **{"Hazard": Hazard, "Kind": Kind, "PROXY": PROXY, "INIT": INIT},
}
