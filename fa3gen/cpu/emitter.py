"""Writes the Python of one basic block; the families in `fa3gen.cpu.isa` add the lines of each instruction.

A register of a group of warps is a NumPy vector with one element per lane, or a NumPy scalar where all lanes are
known to agree; vectors are never changed in place, so that a move is free and an asynchronous operation can keep what
it was given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from fa3gen.cpu import forms
from fa3gen.cpu.flow import EXIT, Block, definitions_and_uses
from fa3gen.cpu.ptx import (
    Address,
    FloatBits,
    Immediate,
    Instruction,
    Negated,
    Operand,
    PtxError,
    Register,
    Symbol,
    Vector,
)
from fa3gen.cpu.types import F32, F64, NAMES, PRED, S64, U32, UNSIGNED, Type, width

if TYPE_CHECKING:
    from fa3gen.cpu.translate import Program

SPECIAL_REGISTERS = {
    **{f"%{name}.{axis}": f"g.{name}_{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"},
    **{"%laneid": "g.lane", "%warpid": "g.warp_of_lane.astype(U32)", "%clusterid.x": "g.ctaid_x"},
}


class Emitter:
    """Writes the Python of one block. The functions in `isa` call `read`, `write`, `emit` and so on."""

    def __init__(self, program: Program, block: Block, masked: bool) -> None:
        """Start an empty function."""
        self.program = program
        self.kernel = program.kernel
        self.block = block
        self.masked = masked
        self.constants: dict[str, Any] = {}
        self.instruction = self.kernel.instructions[block.first]
        self._constant_names: dict[tuple[Type, Any], str] = {}
        self._body: list[tuple[str, int]] = []  # line, instruction index
        self._loaded: list[int] = []
        self._known: set[int] = set()
        self._written: set[int] = set()
        self._touched = 0  # watched registers that ordinary instructions used, not yet told
        self._copies: list[tuple[int, int]] = []  # (to, from) of copies to watched registers, not yet told
        self._guarded = False  # inside `if` of a predicated instruction
        self._temporaries = 0
        self.together: list[Instruction] = []  # what a form has written the lines of, where that is several

    # ------------------------------------------------------------------ what forms use

    def emit(self, line: str) -> None:
        """Add a line of Python."""
        self._body.append((("  " if self._guarded else " ") + line, self.instruction.index))

    def temporary(self) -> str:
        """A name that no other line uses."""
        self._temporaries += 1
        return f"t{self._temporaries}"

    def constant(self, value: int | float, type_: Type) -> str:
        """The name of a constant of a type; integers are cut to its width."""
        if type_ is PRED:
            return "TRUE" if value else "FALSE"
        if type_ in (F32, F64):
            return self._named_constant(type_(value))
        unsigned = UNSIGNED[width(type_)](int(value) & ((1 << width(type_)) - 1))
        return self._named_constant(unsigned.view(type_))

    def _named_constant(self, scalar: np.generic) -> str:
        key = (type(scalar), scalar.tobytes())
        if key not in self._constant_names:
            name = self._constant_names[key] = f"c{len(self.constants)}"
            self.constants[name] = scalar
        return self._constant_names[key]

    def keep(self, value: Any) -> str:
        """The name of any Python object that the block's function needs."""
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def alike(self, first: Instruction) -> Iterator[Instruction]:
        """Instructions of one mnemonic right behind `first` in the block; none of them has a predicate."""
        for instruction in self.kernel.instructions[first.index + 1 : self.block.end]:
            if (instruction.mnemonic, instruction.predicate, first.predicate) != (first.mnemonic, None, None):
                return
            yield instruction

    def read(self, operand: Operand, type_: Type) -> str:
        """An expression for an operand's value as `type_`: a vector, or a scalar where all lanes agree."""
        match operand:
            case Register(name):
                return self._read_register(name, type_)
            case Immediate(value):
                return self.constant(value, type_)
            case FloatBits(bits, bit_width):
                scalar = UNSIGNED[bit_width](bits).view(F32 if bit_width == 32 else F64)
                return self._named_constant(scalar if type_ in (F32, F64) else scalar.view(type_))
            case Symbol(name) if name in SPECIAL_REGISTERS:
                return (
                    f"{SPECIAL_REGISTERS[name]}"
                    if type_ is U32
                    else f"{SPECIAL_REGISTERS[name]}.astype({NAMES[type_]})"
                )
            case Symbol(name):
                return f"g.cta.symbol({name!r}, {NAMES[type_]})"
            case Negated(inner):
                return f"~{self.read(inner, PRED)}"
        raise PtxError(f"PTX line {self.instruction.line}: operand {operand} has no value")

    def unwritten(self, operand: Operand) -> bool:
        """Whether it is a register that no instruction of the kernel writes."""
        return isinstance(operand, Register) and operand.name not in self.program.written

    def _read_register(self, name: str, type_: Type) -> str:
        number = self._load(name)
        self._touch(number)
        held = self.program.types[number]
        if held is type_:
            return f"v{number}"
        if width(held) != width(type_):
            raise PtxError(f"PTX line {self.instruction.line}: {name} does not have the {width(type_)} bits of its use")
        return f"v{number}.view({NAMES[type_]})"

    def write(self, operand: Operand, expression: str, type_: Type) -> None:
        """Assign to a register, only in the lanes that execute the instruction."""
        if operand == Symbol("_"):
            return
        if not isinstance(operand, Register):
            raise PtxError(f"PTX line {self.instruction.line}: {operand} cannot be written")
        number = self.kernel.numbers[operand.name]
        self.before_write(operand.name)
        held = self.program.types[number]
        if held is not type_:
            if width(held) != width(type_):
                raise PtxError(
                    f"PTX line {self.instruction.line}: {operand.name} does not have the {width(type_)} bits written"
                )
            expression = f"({expression}).view({NAMES[held]})"
        if self._partial(number):
            self._load(operand.name)
            expression = f"choose({self.mask()}, {expression}, v{number}, g.lanes)"
        self.emit(f"v{number} = {expression}")
        self._known.add(number)
        self._written.add(number)

    def copy(self, destination: Register, source: Register, type_: Type) -> None:
        """Assign one register to another, which counts as no access of a product's registers.

        LLVM leaves such copies in front of a wgmma; ptxas gives both the same register. What was true of the source,
        that it has been used since the last wgmma.fence, is then true of the destination.
        """
        numbers = self.kernel.numbers[destination.name], self.kernel.numbers[source.name]
        if numbers[0] not in self.program.watched:
            self.write(destination, self.read(source, type_), type_)
            return
        self._flush(copies=False)
        copies, self._copies = self._copies, []
        self.write(destination, self.read(source, type_), type_)
        self._touched = 0
        self._copies = [*copies, numbers]

    def before_write(self, name: str) -> None:
        """Emit the checks that writing a register needs: an unfinished wgmma may still use it."""
        number = self.kernel.numbers[name]
        self._touch(number)
        if number in self.program.accumulators:
            self.emit(f"if g.in_flight: g.accumulator_overwritten({number}, {name!r})")
        if number in self.program.fragments:
            self.emit(f"if g.fragments_in_flight: g.fragment_overwritten({number}, {name!r})")

    def assign_registers(self, names: list[str], expression: str) -> None:
        """Assign one value to several registers without any check: what a wgmma does with its accumulators."""
        numbers = [self.kernel.numbers[name] for name in names]
        self.emit(f"{' = '.join(f'v{number}' for number in numbers)} = {expression}")
        self._known.update(numbers)
        self._written.update(numbers)

    def raw_registers(self, names: list[str]) -> str:
        """A tuple expression of register values as they are held, in flight or not."""
        return "(" + "".join(f"v{self._load(name)}, " for name in names) + ")"

    def mask(self) -> str:
        """The lanes that execute the instruction: a vector of bool, or None for all of them."""
        return "k" if self._guarded else "m" if self.masked else "None"

    def address(self, operand: Operand, type_: Type = S64) -> str:
        """An expression for a byte address: a vector or scalar of 64-bit integers."""
        if not isinstance(operand, Address):
            raise PtxError(f"PTX line {self.instruction.line}: {operand} is not an address")
        offset = operand.offset
        if isinstance(operand.base, Immediate):
            return self.constant(operand.base.value + offset, type_)
        if isinstance(operand.base, Symbol):
            return f"g.cta.symbol({operand.base.name!r}, {NAMES[type_]}) + {self.constant(offset, type_)}"
        assert isinstance(operand.base, Register)
        held = self.program.types[self.kernel.numbers[operand.base.name]]
        base = f"{self._read_register(operand.base.name, UNSIGNED[width(held)])}.astype({NAMES[type_]})"
        return f"{base} + {self.constant(offset, type_)}" if offset else base

    def forget_touched(self) -> None:
        """Leave out the accesses since the last flush: they were the product's own."""
        self._touched = 0

    def flush_touched(self) -> None:
        """Tell the group which accumulator and fragment registers ordinary instructions have used so far."""
        self._flush()

    def _flush(self, *, copies: bool = True) -> None:
        if copies and self._copies:
            self.emit(f"g.copy_unfenced({self.keep(tuple(self._copies))})")
            self._copies = []
        if self._touched:
            self.emit(f"g.unfenced |= {self.keep(self._touched)}")
            self._touched = 0

    # ------------------------------------------------------------------ the function

    def translate(self) -> tuple[str, dict[str, Any], dict[int, int]]:
        """(source, constants, line -> instruction index)."""
        last = self.kernel.instructions[self.block.end - 1]
        for instruction in self.kernel.instructions[self.block.first : self.block.end]:
            if instruction.opcode not in ("bra", "ret", "exit") and instruction not in self.together:
                self.instruction = instruction
                self._one(instruction)
        self.instruction = last
        tail = self._ending(last)
        self.flush_touched()
        for number in sorted(self._written):
            if self.block.live_out >> number & 1:
                self.emit(f"R[{number}] = v{number}")
        self.emit(tail)
        head = ["def block(g):", " R = g.registers"]
        if self.masked:
            head.append(" m = g.mask")
        head += [f" v{number} = R[{number}]" for number in self._loaded]
        lines = {len(head) + offset + 1: index for offset, (_, index) in enumerate(self._body)}
        return "\n".join([*head, *(line for line, _ in self._body)]) + "\n", self.constants, lines

    def _one(self, instruction: Instruction) -> None:
        form, match = forms.find(instruction, self.kernel.name)
        if instruction.predicate is None:
            form.emit(self, instruction, match)
            return
        # Everything that the guarded lines may leave alone has to exist before them.
        for name in definitions_and_uses(self.kernel, instruction)[0]:
            self._load(name)
        predicate = self._read_register(instruction.predicate, PRED)
        if form.blocking:  # it is alone in its block, which each part can run by itself
            self.emit(f"if g.part({predicate}): return WAIT")
        self.emit(f"k = g.active({'~' if instruction.negated else ''}{predicate}, {'m' if self.masked else 'None'})")
        self.emit("if k is not NOBODY:")
        self._guarded = True
        before = len(self._body)
        form.emit(self, instruction, match)
        if len(self._body) == before:
            self.emit("pass")
        self._guarded = False

    def _ending(self, last: Instruction) -> str:
        successors = self.block.successors
        if last.opcode not in ("bra", "ret", "exit") or last.predicate is None:
            return f"return {successors[0]}"
        predicate = ("~" if last.negated else "") + self._read_register(last.predicate, PRED)
        taken = successors[0] if last.opcode == "bra" else EXIT
        return f"return g.branch({predicate}, {taken}, {successors[1]}, {self.block.reconverge})"

    def _load(self, name: str) -> int:
        number = self.kernel.numbers[name]
        if number not in self._known:
            self._known.add(number)
            self._loaded.append(number)
        return number

    def _partial(self, number: int) -> bool:
        """Whether a write must keep the value of lanes that do not execute it."""
        if self._guarded:
            return True
        return self.masked and (number in self._known or bool((self.block.live_in | self.block.live_out) >> number & 1))

    def _touch(self, number: int) -> None:
        if number in self.program.watched:
            if self._copies:
                self._flush()
            self._touched |= 1 << number


def vector_items(operand: Operand) -> tuple[Operand, ...]:
    """The registers of a vector operand, or the one operand itself."""
    return operand.items if isinstance(operand, Vector) else (operand,)
