"""Comparison, selection, bitwise logic, shifts and bit fields.

PTX ISA, "Comparison and Selection Instructions", "Logic and Shift Instructions", and of "Integer Arithmetic
Instructions" those on bits.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fa3gen.cpu.forms import emits
from fa3gen.cpu.ptx import Immediate, Instruction, Operand, Pair, PtxError
from fa3gen.cpu.types import F32, NAMES, PRED, S32, TYPES, U32, Type, width

if TYPE_CHECKING:
    from fa3gen.cpu.emitter import Emitter

Match = re.Match[str]

ANY_BYTES = 0xA5C3_96E1  # what a register holds that nothing writes, as far as that is allowed

_JOIN = r"(?:\.(?P<join>and|or|xor))?"
_JOINS = {"and": "&", "or": "|", "xor": "^"}
_FTZ = r"(?P<ftz>\.ftz)?"
_ORDERED = r"eq|ne|lt|le|gt|ge"
_UNORDERED = r"equ|neu|ltu|leu|gtu|geu|num|nan"

_INTEGER_COMPARISONS = {
    **{"eq": "{a} == {b}", "ne": "{a} != {b}", "lt": "{a} < {b}", "le": "{a} <= {b}", "gt": "{a} > {b}"},
    **{"ge": "{a} >= {b}", "lo": "{a} < {b}", "ls": "{a} <= {b}", "hi": "{a} > {b}", "hs": "{a} >= {b}"},
}
# With NaN the first six are false, NumPy's != is not; the others are true.
_FLOAT_COMPARISONS = {
    **{"eq": "{a} == {b}", "ne": "({a} < {b}) | ({a} > {b})", "lt": "{a} < {b}", "le": "{a} <= {b}"},
    **{"gt": "{a} > {b}", "ge": "{a} >= {b}", "equ": "~(({a} < {b}) | ({a} > {b}))", "neu": "{a} != {b}"},
    **{"ltu": "~({a} >= {b})", "leu": "~({a} > {b})", "gtu": "~({a} <= {b})", "geu": "~({a} < {b})"},
    **{"num": "({a} == {a}) & ({b} == {b})", "nan": "({a} != {a}) | ({b} != {b})"},
}


# ---------------------------------------------------------------------- comparison


@emits(rf"setp\.(?P<compare>eq|ne){_JOIN}\.(?P<type>b16|b32|b64)")
def compare_bits(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Whether two bit patterns are equal or not."""
    _set_predicates(emitter, instruction, form, _comparison(emitter, instruction, form))


@emits(rf"setp\.(?P<compare>{_ORDERED}){_JOIN}\.(?P<type>s16|s32|s64)")
def compare_signed(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Comparison of signed integers."""
    _set_predicates(emitter, instruction, form, _comparison(emitter, instruction, form))


@emits(rf"setp\.(?P<compare>{_ORDERED}|lo|ls|hi|hs){_JOIN}\.(?P<type>u16|u32|u64)")
def compare_unsigned(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Comparison of unsigned integers."""
    _set_predicates(emitter, instruction, form, _comparison(emitter, instruction, form))


@emits(rf"setp\.(?P<compare>{_ORDERED}|{_UNORDERED}){_JOIN}{_FTZ}\.(?P<type>f32)")
def compare_f32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Comparison of f32."""
    _set_predicates(emitter, instruction, form, _comparison(emitter, instruction, form))


@emits(rf"setp\.(?P<compare>{_ORDERED}|{_UNORDERED}){_JOIN}\.(?P<type>f64|f16|bf16)")
def compare_floats(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Comparison of other floating-point numbers."""
    _set_predicates(emitter, instruction, form, _comparison(emitter, instruction, form))


@emits(r"set\.(?P<compare>eq|ne)\.(?P<to>u32|s32|f32)\.(?P<type>b32)")
def set_by_bits(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Comparison with a number as result: all bits set, or 1.0, where it holds."""
    _set_number(emitter, instruction, form)


@emits(rf"set\.(?P<compare>{_ORDERED})\.(?P<to>u32|s32|f32)\.(?P<type>s32)")
def set_by_signed(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Comparison with a number as result: all bits set, or 1.0, where it holds."""
    _set_number(emitter, instruction, form)


@emits(rf"set\.(?P<compare>{_ORDERED}|lo|ls|hi|hs)\.(?P<to>u32|s32|f32)\.(?P<type>u32)")
def set_by_unsigned(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Comparison with a number as result: all bits set, or 1.0, where it holds."""
    _set_number(emitter, instruction, form)


@emits(rf"set\.(?P<compare>{_ORDERED}|{_UNORDERED}){_FTZ}\.(?P<to>u32|s32|f32)\.(?P<type>f32)")
def set_by_f32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Comparison with a number as result: all bits set, or 1.0, where it holds."""
    _set_number(emitter, instruction, form)


def _comparison(emitter: Emitter, instruction: Instruction, form: Match) -> str:
    """The comparison of the second and third operand, as an expression in which `{...}` are filled in."""
    type_ = TYPES[form["type"]]
    values = [emitter.read(operand, type_) for operand in instruction.operands[1:3]]
    if form["type"] in ("f16", "bf16"):
        values = [f"{form['type']}_to_f32({value})" for value in values]
    if form.groupdict().get("ftz"):
        values = [f"flush({value})" for value in values]
    table = _FLOAT_COMPARISONS if "f" in form["type"] else _INTEGER_COMPARISONS
    return table[form["compare"]].format(a=values[0], b=values[1])


def _set_predicates(emitter: Emitter, instruction: Instruction, form: Match, comparison: str) -> None:
    """Write `p`, or `p|q` where q has the negated comparison; `c` is joined to both."""
    destination = instruction.operands[0]
    join = f" {_JOINS[form['join']]} {emitter.read(instruction.operands[3], PRED)}" if form["join"] else ""
    if isinstance(destination, Pair):
        # The first write could change an operand of the second.
        first, second = emitter.temporary(), emitter.temporary()
        emitter.emit(f"{first} = {comparison}")
        emitter.emit(f"{second} = ~{first}{join}")
        emitter.write(destination.first, f"{first}{join}", PRED)
        emitter.write(destination.second, second, PRED)
    else:
        emitter.write(destination, f"({comparison}){join}" if join else comparison, PRED)


def _set_number(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    type_ = TYPES[form["to"]]
    holds = emitter.constant(1.0 if type_ is F32 else -1, type_)
    emitter.write(
        instruction.operands[0],
        f"select({_comparison(emitter, instruction, form)}, {holds}, {emitter.constant(0, type_)})",
        type_,
    )


# ---------------------------------------------------------------------- selection


@emits(r"selp\.(?P<type>[bus](?:16|32|64)|f32|f64)")
def select_by_predicate(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """One of two values by a predicate."""
    d, a, b, p = instruction.operands
    type_ = TYPES[form["type"]]
    emitter.write(d, f"select({emitter.read(p, PRED)}, {emitter.read(a, type_)}, {emitter.read(b, type_)})", type_)


@emits(r"slct\.(?P<type>[bus](?:16|32|64)|f32|f64)\.s32")
def select_by_sign(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """The first value where the third operand is not negative, else the second."""
    d, a, b, c = instruction.operands
    type_ = TYPES[form["type"]]
    predicate = f"{emitter.read(c, S32)} >= {emitter.constant(0, S32)}"
    emitter.write(d, f"select({predicate}, {emitter.read(a, type_)}, {emitter.read(b, type_)})", type_)


# ---------------------------------------------------------------------- logic


@emits(r"(?P<op>and|or|xor)\.(?P<type>pred|b16|b32|b64)")
def logic(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Bitwise and, or, exclusive or."""
    d, a, b = instruction.operands
    type_ = TYPES[form["type"]]
    emitter.write(d, f"{emitter.read(a, type_)} {_JOINS[form['op']]} {emitter.read(b, type_)}", type_)


@emits(r"not\.(?P<type>pred|b16|b32|b64)")
def complement(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """All bits the other way round."""
    d, a = instruction.operands
    type_ = TYPES[form["type"]]
    emitter.write(d, f"~{emitter.read(a, type_)}", type_)


@emits(r"cnot\.(?P<type>b16|b32|b64)")
def logical_complement(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """1 for 0, else 0."""
    d, a = instruction.operands
    type_ = TYPES[form["type"]]
    emitter.write(d, f"({emitter.read(a, type_)} == {emitter.constant(0, type_)}).astype({NAMES[type_]})", type_)


@emits(r"lop3\.b32")
def logic_of_three(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Any function of three bits."""
    d, a, b, c, table = instruction.operands
    values = ", ".join(emitter.read(operand, U32) for operand in (a, b, c))
    emitter.write(d, f"logic3({values}, {_number(instruction, table) & 255})", U32)


# ---------------------------------------------------------------------- shifts


@emits(r"(?P<op>shl)\.(?P<type>b16|b32|b64)")
def shift_left(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Shift to the left; amounts of the width and more give 0, as with NumPy."""
    d, a, amount = instruction.operands
    type_ = TYPES[form["type"]]
    emitter.write(d, f"{emitter.read(a, type_)} << {_shift_amount(emitter, amount, type_)}", type_)


@emits(r"(?P<op>shr)\.(?P<type>[bus](?:16|32|64))")
def shift_right(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Shift to the right; amounts of the width and more give 0 or the sign, as with NumPy."""
    d, a, amount = instruction.operands
    type_ = TYPES[form["type"]]
    emitter.write(d, f"{emitter.read(a, type_)} >> {_shift_amount(emitter, amount, type_)}", type_)


def _shift_amount(emitter: Emitter, operand: Operand, type_: Type) -> str:
    """A u32 amount in the type of the shifted value, without an amount of the width or more becoming less."""
    bits = width(type_)
    if isinstance(operand, Immediate):
        return emitter.constant(min(operand.value & 0xFFFFFFFF, bits), type_)
    if bits == 32:
        return emitter.read(operand, type_)  # NumPy takes a negative amount for a great one
    if bits == 64:
        return f"{emitter.read(operand, U32)}.astype({NAMES[type_]})"
    return f"np.minimum({emitter.read(operand, U32)}, {emitter.constant(bits, U32)}).astype({NAMES[type_]})"


@emits(r"shf\.(?P<direction>l|r)\.(?P<mode>clamp|wrap)\.b32")
def funnel_shift(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Shift of 64 bits in two registers, of which one comes out; amounts are cut to 32 or taken modulo 32."""
    d, a, b, amount = instruction.operands
    value = emitter.read(amount, U32)
    limited = (
        f"np.minimum({value}, {emitter.constant(32, U32)})"
        if form["mode"] == "clamp"
        else f"{value} & {emitter.constant(31, U32)}"
    )
    name = {"l": "funnel_shift_left", "r": "funnel_shift_right"}[form["direction"]]
    emitter.write(d, f"{name}({emitter.read(a, U32)}, {emitter.read(b, U32)}, {limited})", U32)


# ---------------------------------------------------------------------- bits and bytes


@emits(r"prmt\.b32(?:\.(?P<mode>f4e|b4e|rc8|ecl|ecr|rc16))?")
def permute_bytes(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Four bytes out of eight.

    Where LLVM needs fewer, the others may be of a register that nothing writes: any bytes will do.
    """
    d, *operands = instruction.operands
    values = [emitter.constant(ANY_BYTES, U32) if emitter.unwritten(x) else emitter.read(x, U32) for x in operands]
    emitter.write(d, f"permute_bytes({', '.join(values)}, {form['mode']!r})", U32)


@emits(r"bfe\.(?P<type>[us](?:32|64))")
def extract_bit_field(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """A field of bits, moved to the bottom."""
    d, a, position, length = instruction.operands
    type_ = TYPES[form["type"]]
    emitter.write(
        d, f"extract_bits({emitter.read(a, type_)}, {emitter.read(position, U32)}, {emitter.read(length, U32)})", type_
    )


@emits(r"bfi\.(?P<type>b32|b64)")
def insert_bit_field(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """A field of bits, replaced."""
    d, a, b, position, length = instruction.operands
    type_ = TYPES[form["type"]]
    values = [*(emitter.read(bits, type_) for bits in (a, b)), *(emitter.read(n, U32) for n in (position, length))]
    emitter.write(d, f"insert_bits({', '.join(values)})", type_)


@emits(r"(?P<op>popc|clz)\.(?P<type>b32|b64)")
def count_bits(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Number of bits set, or of zeros at the top."""
    d, a = instruction.operands
    function = {"popc": "population_count", "clz": "leading_zeros"}[form["op"]]
    emitter.write(d, f"{function}({emitter.read(a, TYPES[form['type']])})", U32)


@emits(r"brev\.(?P<type>b32|b64)")
def reverse_bits(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """The bits in the opposite order."""
    d, a = instruction.operands
    type_ = TYPES[form["type"]]
    emitter.write(d, f"reverse_bits({emitter.read(a, type_)})", type_)


@emits(r"bfind(?P<shift>\.shiftamt)?\.(?P<type>[us](?:32|64))")
def find_highest_bit(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Position of the highest bit that is no sign bit."""
    d, a = instruction.operands
    emitter.write(d, f"find_highest({emitter.read(a, TYPES[form['type']])}, shift_amount={bool(form['shift'])})", U32)


def _number(instruction: Instruction, operand: Operand) -> int:
    """The value of an operand that has to be a constant."""
    if not isinstance(operand, Immediate):
        raise PtxError(f"PTX line {instruction.line}: {instruction.mnemonic} needs a constant, not {operand}")
    return operand.value
