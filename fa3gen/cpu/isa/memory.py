"""Loads, stores, matrix loads and stores, atomics (PTX ISA, "Data Movement and Conversion", "atom", "red")."""

from __future__ import annotations

import re

from fa3gen.cpu.emitter import Emitter, vector_items
from fa3gen.cpu.forms import emits
from fa3gen.cpu.ptx import Address, Instruction, Operand, PtxError, Register, Symbol
from fa3gen.cpu.types import NAMES, S64, TYPES, U32, UNSIGNED, Type, width

_TYPE = r"(?P<type>[bus](?:8|16|32|64)|f(?:32|64))"
_VECTOR = r"(?:\.v(?P<vector>2|4))?"
_HINTS = (
    r"(?:\.L1::(?:evict_normal|evict_unchanged|evict_first|evict_last|no_allocate))?"
    r"(?:\.L2::(?:64B|128B|256B|evict_first|evict_last|evict_normal))?"
)
_SPACE = r"(?P<space>global|shared|shared::cta|local)"
_WEAK = r"(?:\.weak|\.volatile(?!\.global))?"
_SYNTAX_LOAD = rf"ld{_WEAK}\.{_SPACE}(?:\.(?:ca|cg|cs|lu|cv))?(?:\.nc)?{_HINTS}{_VECTOR}\.{_TYPE}"
_SYNTAX_STORE = rf"st{_WEAK}\.{_SPACE}(?:\.(?:wb|cg|cs|wt))?{_HINTS}{_VECTOR}\.{_TYPE}"
# Volatile is relaxed in the scope of the system (PTX ISA, "ld", "st").
_ORDERED = r"(?:(?P<order>{})\.(?P<scope>cta|cluster|gpu|sys)|volatile)\.(?P<space>global)"
_UNIT = {"global": "memory", "shared": "shared", "shared::cta": "shared", "local": "local_memory"}


@emits(rf"ld\.param{_VECTOR}\.{_TYPE}")
def load_parameter(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """A kernel parameter: the same for all lanes."""
    destination, source = instruction.operands
    if not isinstance(source, Address) or not isinstance(source.base, Symbol):
        raise PtxError(f"PTX line {instruction.line}: a parameter is read through something else than its name")
    type_ = TYPES[form["type"]]
    for item, register in enumerate(vector_items(destination)):
        offset = source.offset + item * width(type_) // 8
        value = f"g.cta.launch.parameter({source.base.name!r}, {offset}, {NAMES[type_]})"
        _write_widened(emitter, register, value, type_)


@emits(_SYNTAX_LOAD)
def load(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """One to four consecutive elements of each lane; a register may be wider than the element."""
    destination, source = instruction.operands
    registers = vector_items(destination)
    type_ = TYPES[form["type"]]
    loaded, count, strong = emitter.temporary(), len(registers), _strong(instruction, form)
    emitter.emit(
        f"{loaded} = g.cta.{_UNIT[form['space']]}.load"
        f"(g, {emitter.address(source)}, {NAMES[type_]}, {count}, {emitter.mask()}{strong})"
    )
    for item, register in enumerate(registers):
        _write_widened(emitter, register, f"{loaded}[{item}]", type_)


@emits(rf"ld\.{_ORDERED.format('acquire|relaxed')}{_VECTOR}\.{_TYPE}", observable=True)
def load_ordered(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """What another CTA stores, perhaps not yet."""
    load(emitter, instruction, form)
    if _reaches_others(form):
        address, acquires = emitter.address(instruction.operands[1]), form["order"] == "acquire"
        emitter.emit(f"g.cta.order.load(g, {address}, {emitter.mask()}, acquires={acquires})")
    emitter.emit("g.cta.polled(g)")


@emits(rf"st\.{_ORDERED.format('release|relaxed')}{_VECTOR}\.{_TYPE}", destinations=0, observable=True)
def store_ordered(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """A store that other warps and CTAs may be waiting for."""
    store(emitter, instruction, form)
    if _reaches_others(form):
        address, releases = emitter.address(instruction.operands[0]), form["order"] == "release"
        emitter.emit(f"g.cta.order.store(g, {address}, {emitter.mask()}, releases={releases})")
    emitter.emit("g.cta.progress += 1")


@emits(_SYNTAX_STORE, destinations=0, observable=True)
def store(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """One to four consecutive elements of each lane."""
    destination, source = instruction.operands
    type_ = TYPES[form["type"]]
    values = "".join(f"{_narrowed(emitter, item, type_)}, " for item in vector_items(source))
    emitter.emit(
        f"g.cta.{_UNIT[form['space']]}.store"
        f"(g, {emitter.address(destination)}, ({values}), {NAMES[type_]}, {emitter.mask()}{_strong(instruction, form)})"
    )


def _strong(instruction: Instruction, form: re.Match[str]) -> str:
    """An argument more for what races with no strong access: PTX ISA, "Strong operations"."""
    qualifiers = instruction.mnemonic.split(".")
    strong = {"relaxed", "acquire", "release", "volatile"} & set(qualifiers)
    return ", strong=True" if strong and form["space"] == "global" else ""


def _reaches_others(form: re.Match[str]) -> bool:
    """Whether the scope of an operation on global memory takes in other CTAs."""
    return form["scope"] in (None, "gpu", "sys")


def _write_widened(emitter: Emitter, register: Operand, value: str, type_: Type) -> None:
    """Write an element to a register that may be wider: zero- or sign-extended."""
    if isinstance(register, Register):
        bits = width(TYPES[emitter.kernel.registers[register.name]])
        if bits > width(type_):
            emitter.write(register, f"{value}.astype({NAMES[UNSIGNED[bits]]})", UNSIGNED[bits])
            return
    emitter.write(register, value, type_)


def _narrowed(emitter: Emitter, operand: Operand, type_: Type) -> str:
    """The low bits of an operand that may be wider than the element."""
    if isinstance(operand, Register):
        bits = width(TYPES[emitter.kernel.registers[operand.name]])
        if bits > width(type_):
            return f"{emitter.read(operand, UNSIGNED[bits])}.astype({NAMES[type_]})"
    return emitter.read(operand, type_)


@emits(r"ldmatrix\.sync\.aligned\.m8n8\.x(?P<count>1|2|4)(?P<trans>\.trans)?\.shared(?:::cta)?\.b16")
def load_matrices(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """8 x 8 matrices of 16-bit elements; lane 8 j + i gives the address of row i of matrix j."""
    destination, source = instruction.operands
    loaded = emitter.temporary()
    emitter.emit(
        f"{loaded} = load_matrices"
        f"(g, {emitter.address(source)}, {form['count']}, {form['trans'] is not None}, {emitter.mask()})"
    )
    for item, register in enumerate(vector_items(destination)):
        emitter.write(register, f"{loaded}[{item}]", U32)


@emits(
    r"stmatrix\.sync\.aligned\.m8n8\.x(?P<count>1|2|4)(?P<trans>\.trans)?\.shared(?:::cta)?\.b16",
    destinations=0,
    observable=True,
)
def store_matrices(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """The inverse of ldmatrix."""
    destination, source = instruction.operands
    values = "".join(f"{emitter.read(item, U32)}, " for item in vector_items(source))
    emitter.emit(
        f"store_matrices(g, {emitter.address(destination)}, ({values}), {form['trans'] is not None}, {emitter.mask()})"
    )


_ATOMIC_SPACE = (
    r"(?:\.(?P<order>relaxed|acquire|release|acq_rel))?(?:\.(?P<scope>cta|cluster|gpu|sys))?"
    r"\.(?P<space>global|shared|shared::cta)"
)
_ATOMIC_OPERATION = r"\.(?P<operation>add|min|max|and|or|xor|exch|inc|dec)\.(?P<type>[bus](?:32|64)|f32)"


@emits(rf"atom{_ATOMIC_SPACE}{_ATOMIC_OPERATION}", observable=True)
def atomic(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Read, change and write one element for each lane, one lane after the other; gives the old value."""
    type_ = TYPES[form["type"]]
    value = emitter.read(instruction.operands[2], type_)
    emitter.write(instruction.operands[0], _atomic(emitter, instruction.operands[1], form, type_, value), type_)


@emits(rf"atom{_ATOMIC_SPACE}\.cas\.(?P<type>b32|b64)", observable=True)
def compare_and_swap(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Exchange where the old value is the one compared with."""
    type_ = TYPES[form["type"]]
    destination, place, compare, value = instruction.operands
    call = (
        f"compare_and_swap(g, {_UNIT[form['space']]!r}, {emitter.address(place)}, {NAMES[type_]}, "
        f"{emitter.read(compare, type_)}, {emitter.read(value, type_)}, {emitter.mask()})"
    )
    _order_atomic(emitter, place, form)
    emitter.write(destination, call, type_)


@emits(rf"red{_ATOMIC_SPACE}{_ATOMIC_OPERATION}", destinations=0, observable=True)
def reduction(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """An atomic operation whose old value nobody wants."""
    type_ = TYPES[form["type"]]
    emitter.emit(_atomic(emitter, instruction.operands[0], form, type_, emitter.read(instruction.operands[1], type_)))


def _atomic(emitter: Emitter, place: Operand, form: re.Match[str], type_: Type, value: str) -> str:
    _order_atomic(emitter, place, form)
    return (
        f"atomic(g, {_UNIT[form['space']]!r}, {form['operation']!r}, {emitter.address(place, S64)}, {NAMES[type_]}, "
        f"{value}, {emitter.mask()})"
    )


def _order_atomic(emitter: Emitter, place: Operand, form: re.Match[str]) -> None:
    """Without a scope it is that of the GPU (PTX ISA, "atom")."""
    if form["space"] == "global" and _reaches_others(form):
        order = form["order"] or "relaxed"
        acquires, releases = order in ("acquire", "acq_rel"), order in ("release", "acq_rel")
        emitter.emit(
            f"g.cta.order.update(g, {emitter.address(place, S64)}, {emitter.mask()}, "
            f"acquires={acquires}, releases={releases})"
        )
