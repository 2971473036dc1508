"""Arithmetic on integers and floating-point numbers.

PTX ISA, "Integer Arithmetic Instructions", "Floating Point Instructions" and "Half Precision Floating Point
Instructions". Where PTX has one correctly rounded result, this is it, but for the remark at `lanes.fma`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fa3gen.cpu.forms import emits
from fa3gen.cpu.ptx import Instruction
from fa3gen.cpu.types import F32, F64, NAMES, S32, TYPES, U32, Type

if TYPE_CHECKING:
    from fa3gen.cpu.emitter import Emitter

Match = re.Match[str]

_INTEGER = r"(?P<type>[us](?:16|32|64))"
_SIGNED = r"(?P<type>s(?:16|32|64))"
_HALF = r"(?P<type>f16|bf16|f16x2|bf16x2)"
_FTZ = r"(?P<ftz>\.ftz)?"
_SAT = r"(?P<sat>\.sat)?"

_WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}
_OPERATORS = {"add": "+", "sub": "-", "mul": "*"}
_ROOTS = {"rcp": "reciprocal", "sqrt": "np.sqrt"}


# ---------------------------------------------------------------------- integers


@emits(rf"(?P<op>add|sub)\.{_INTEGER}")
def add_integers(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Sum or difference, which wraps around."""
    d, a, b = instruction.operands
    type_ = TYPES[form["type"]]
    emitter.write(d, f"{emitter.read(a, type_)} {_OPERATORS[form['op']]} {emitter.read(b, type_)}", type_)


@emits(r"(?P<op>add|sub)\.sat\.s32")
def add_saturating(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Sum or difference cut to the range of s32."""
    d, a, b = (
        instruction.operands[0],
        *(f"{emitter.read(operand, S32)}.astype(S64)" for operand in instruction.operands[1:]),
    )
    emitter.write(d, f"saturate_integer({a} {_OPERATORS[form['op']]} {b}, S32)", S32)


@emits(rf"(?P<op>mul|mad)\.(?P<part>lo|hi)\.{_INTEGER}")
def multiply_integers(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Lower or upper half of the product, plus a third operand."""
    type_ = TYPES[form["type"]]
    a, b = emitter.read(instruction.operands[1], type_), emitter.read(instruction.operands[2], type_)
    product = f"{a} * {b}" if form["part"] == "lo" else f"multiply_high({a}, {b})"
    addend = f" + {emitter.read(instruction.operands[3], type_)}" if form["op"] == "mad" else ""
    emitter.write(instruction.operands[0], product + addend, type_)


@emits(r"(?P<op>mul|mad)\.wide\.(?P<type>u16|s16|u32|s32)")
def multiply_wide(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """The whole product in a type of twice the width, plus a third operand of that width."""
    narrow, wide = TYPES[form["type"]], TYPES[_WIDE[form["type"]]]
    a, b = (f"{emitter.read(operand, narrow)}.astype({NAMES[wide]})" for operand in instruction.operands[1:3])
    addend = f" + {emitter.read(instruction.operands[3], wide)}" if form["op"] == "mad" else ""
    emitter.write(instruction.operands[0], f"{a} * {b}{addend}", wide)


@emits(r"dp4a\.(?P<a>u32|s32)\.(?P<b>u32|s32)")
def dot_product_of_bytes(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Products of four bytes each, and a third operand, added up."""
    _dot_product(emitter, instruction, form, count=4, first=0)


@emits(r"dp2a\.(?P<half>lo|hi)\.(?P<a>u32|s32)\.(?P<b>u32|s32)")
def dot_product_of_halves(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Products of two halves and two bytes, the lower or the upper ones, and a third operand, added up."""
    _dot_product(emitter, instruction, form, count=2, first={"lo": 0, "hi": 2}[form["half"]])


def _dot_product(emitter: Emitter, instruction: Instruction, form: Match, *, count: int, first: int) -> None:
    """The sum wraps around, so that only the parts of `a` and `b` have signs."""
    d, a, b, c = instruction.operands
    parts = emitter.read(a, TYPES[form["a"]]), emitter.read(b, TYPES[form["b"]])
    emitter.write(d, f"dot_product({', '.join(parts)}, {count}, {first}) + {emitter.read(c, U32)}", U32)


@emits(rf"(?P<op>div|rem)\.{_INTEGER}")
def divide_integers(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Quotient or remainder."""
    d, a, b = instruction.operands
    type_ = TYPES[form["type"]]
    function = {"div": "divide", "rem": "remainder"}[form["op"]]
    emitter.write(d, f"{function}({emitter.read(a, type_)}, {emitter.read(b, type_)})", type_)


@emits(rf"(?P<op>min|max)\.{_INTEGER}")
def order_integers(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """The smaller or the greater one."""
    d, a, b = instruction.operands
    type_ = TYPES[form["type"]]
    emitter.write(d, f"np.{form['op']}imum({emitter.read(a, type_)}, {emitter.read(b, type_)})", type_)


@emits(r"(?P<op>min|max)\.relu\.s32")
def order_integers_relu(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """The smaller or the greater one, or 0 where that is negative."""
    d, a, b = instruction.operands
    emitter.write(
        d,
        f"np.maximum(np.{form['op']}imum({emitter.read(a, S32)}, {emitter.read(b, S32)}), {emitter.constant(0, S32)})",
        S32,
    )


@emits(rf"(?P<op>abs|neg)\.{_SIGNED}")
def sign_of_integer(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Absolute value or negative; the least number stays what it is."""
    d, a = instruction.operands
    type_ = TYPES[form["type"]]
    emitter.write(d, f"{'-' if form['op'] == 'neg' else 'abs'}({emitter.read(a, type_)})", type_)


# ---------------------------------------------------------------------- f32 and f64


@emits(rf"(?P<op>add|sub|mul)(?:\.rn)?{_FTZ}{_SAT}\.f32")
def add_f32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Sum, difference or product, rounded to nearest even."""
    a, b = _f32_operands(emitter, instruction, form)
    _write_f32(emitter, instruction, form, f"{a} {_OPERATORS[form['op']]} {b}")


@emits(rf"(?P<op>fma|mad)\.rn{_FTZ}{_SAT}\.f32")
def fma_f32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Product and sum, rounded to nearest even."""
    _write_f32(emitter, instruction, form, f"fma({', '.join(_f32_operands(emitter, instruction, form))})")


@emits(rf"div\.(?:rn|full|approx){_FTZ}\.f32")
def divide_f32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Quotient. The approximate forms are correctly rounded too, also for divisors of 2^126 and more."""
    a, b = _f32_operands(emitter, instruction, form)
    _write_f32(emitter, instruction, form, f"{a} / {b}")


@emits(rf"(?P<op>rcp|sqrt)\.(?:rn|approx){_FTZ}\.f32")
def root_f32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Reciprocal or square root. The approximate forms are correctly rounded too."""
    (a,) = _f32_operands(emitter, instruction, form)
    _write_f32(emitter, instruction, form, f"{_ROOTS[form['op']]}({a})")


_APPROXIMATIONS = {"lg2": "log2", "rsqrt": "reciprocal_root", "sin": "sine", "cos": "cosine"}


@emits(rf"(?P<op>lg2|rsqrt|sin|cos)\.approx{_FTZ}\.f32")
def approximate_f32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Functions that the hardware approximates."""
    (a,) = _f32_operands(emitter, instruction, form)
    _write_f32(emitter, instruction, form, f"{_APPROXIMATIONS[form['op']]}({a})")


@emits(r"tanh\.approx\.f32")
def tanh_f32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Hyperbolic tangent, which has no .ftz."""
    emitter.write(instruction.operands[0], f"hyperbolic_tangent({emitter.read(instruction.operands[1], F32)})", F32)


@emits(r"ex2\.approx(?P<ftz>\.ftz)?\.f32")
def exp2_f32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Power of 2. A subnormal argument gives 1 whether it is flushed or not, so only the result is."""
    emitter.write(
        instruction.operands[0],
        f"{'exp2_ftz' if form['ftz'] else 'exp2'}({emitter.read(instruction.operands[1], F32)})",
        F32,
    )


@emits(rf"(?P<op>min|max){_FTZ}(?P<nan>\.NaN)?\.f32")
def order_f32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """The smaller or the greater one; a flushed operand stays flushed."""
    a, b = _f32_operands(emitter, instruction, form)
    emitter.write(instruction.operands[0], f"{form['op']}imum{'_nan' if form['nan'] else ''}({a}, {b})", F32)


@emits(rf"(?P<op>abs|neg){_FTZ}\.f32")
def sign_of_f32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Absolute value or negative, also of NaN."""
    (a,) = _f32_operands(emitter, instruction, form)
    emitter.write(instruction.operands[0], f"{'-' if form['op'] == 'neg' else 'abs'}({a})", F32)


@emits(r"(?P<op>add|sub|mul)(?:\.rn)?\.f64")
def add_f64(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Sum, difference or product, rounded to nearest even."""
    d, a, b = instruction.operands
    emitter.write(d, f"{emitter.read(a, F64)} {_OPERATORS[form['op']]} {emitter.read(b, F64)}", F64)


@emits(r"div\.rn\.f64")
def divide_f64(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Quotient, rounded to nearest even."""
    d, a, b = instruction.operands
    emitter.write(d, f"{emitter.read(a, F64)} / {emitter.read(b, F64)}", F64)


@emits(r"(?P<op>rcp|sqrt)\.rn\.f64")
def root_f64(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Reciprocal or square root, rounded to nearest even."""
    d, a = instruction.operands
    emitter.write(d, f"{_ROOTS[form['op']]}({emitter.read(a, F64)})", F64)


@emits(r"(?P<op>min|max)\.f64")
def order_f64(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """The smaller or the greater one."""
    d, a, b = instruction.operands
    emitter.write(d, f"{form['op']}imum({emitter.read(a, F64)}, {emitter.read(b, F64)})", F64)


@emits(r"(?P<op>abs|neg)\.f64")
def sign_of_f64(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Absolute value or negative, also of NaN."""
    d, a = instruction.operands
    emitter.write(d, f"{'-' if form['op'] == 'neg' else 'abs'}({emitter.read(a, F64)})", F64)


@emits(r"copysign\.(?P<type>f32|f64)")
def copy_sign(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """The second operand with the sign of the first."""
    d, a, b = instruction.operands
    type_ = TYPES[form["type"]]
    emitter.write(d, f"np.copysign({emitter.read(b, type_)}, {emitter.read(a, type_)})", type_)


_PROPERTIES = {
    "finite": "np.isfinite({a})",
    "infinite": "np.isinf({a})",
    "number": "{a} == {a}",
    "notanumber": "{a} != {a}",
    "normal": "is_normal({a})",
    "subnormal": "is_subnormal({a})",
}


@emits(r"testp\.(?P<property>finite|infinite|number|notanumber|normal|subnormal)\.(?P<type>f32|f64)")
def test_property(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """A predicate about the kind of a number."""
    p, a = instruction.operands
    emitter.write(p, _PROPERTIES[form["property"]].format(a=emitter.read(a, TYPES[form["type"]])), TYPES["pred"])


# ---------------------------------------------------------------------- f16 and bf16


@emits(rf"(?P<op>add|sub|mul)(?:\.rn)?\.{_HALF}")
def add_half(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Sum, difference or product of numbers or pairs, rounded to nearest even."""
    _half_operation(emitter, instruction, form)


@emits(rf"fma\.rn\.{_HALF}")
def fma_half(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Product and sum of numbers or pairs with one rounding to nearest even."""
    _half_operation(emitter, instruction, form, "fma")


@emits(rf"(?P<op>min|max|abs|neg)\.{_HALF}")
def order_half(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """The smaller, the greater, the absolute value or the negative, of numbers or pairs."""
    _half_operation(emitter, instruction, form)


def _half_operation(emitter: Emitter, instruction: Instruction, form: Match, name: str = "") -> None:
    type_: Type = TYPES[form["type"]]
    values = ", ".join(emitter.read(operand, type_) for operand in instruction.operands[1:])
    emitter.write(instruction.operands[0], f"half_operation({name or form['op']!r}, {form['type']!r}, {values})", type_)


def _f32_operands(emitter: Emitter, instruction: Instruction, form: Match) -> tuple[str, ...]:
    """The sources as expressions, flushed if the instruction says so."""
    values = (emitter.read(operand, F32) for operand in instruction.operands[1:])
    return tuple(f"flush({value})" if form["ftz"] else value for value in values)


def _write_f32(emitter: Emitter, instruction: Instruction, form: Match, expression: str) -> None:
    """Write a result, flushed and saturated if the instruction says so."""
    if form["ftz"]:
        expression = f"flush({expression})"
    if form.groupdict().get("sat"):
        expression = f"saturate({expression})"
    emitter.write(instruction.operands[0], expression, F32)
