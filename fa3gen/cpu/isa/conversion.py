"""Moves and conversions: mov, cvta and cvt (PTX ISA, "Data Movement and Conversion Instructions")."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fa3gen.cpu import lanes
from fa3gen.cpu.forms import emits
from fa3gen.cpu.ptx import FloatBits, Immediate, Instruction, Operand, Register, Vector
from fa3gen.cpu.types import F32, F64, NAMES, S8, S16, S32, S64, TYPES, U16, U32, U64, UNSIGNED, Type, width

if TYPE_CHECKING:
    from fa3gen.cpu.emitter import Emitter

Match = re.Match[str]

_INTEGERS = r"[us](?:8|16|32|64)"
_FTZ = r"(?P<ftz>\.ftz)?"
_SAT = r"(?P<sat>\.sat)?"
_RELU = r"(?P<relu>\.relu)?"
_SIGNED: dict[int, Type] = {8: S8, 16: S16, 32: S32, 64: S64}


# ---------------------------------------------------------------------- mov


@emits(r"mov\.(?P<type>[bus](?:16|32|64)|f32|f64|pred)")
def move(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """A register, constant, special register or address; `{a, b}` on one side packs or takes apart."""
    destination, source = instruction.operands
    type_ = TYPES[form["type"]]
    if isinstance(destination, Vector):
        piece = UNSIGNED[width(type_) // len(destination.items)]
        names = [emitter.temporary() for _ in destination.items]
        emitter.emit(f"{', '.join(names)} = unpack({emitter.read(source, UNSIGNED[width(type_)])}, {NAMES[piece]})")
        for item, name in zip(destination.items, names, strict=True):
            emitter.write(item, name, piece)
    elif isinstance(source, Vector):
        piece = UNSIGNED[width(type_) // len(source.items)]
        items = "".join(f"{emitter.read(item, piece)}, " for item in source.items)
        emitter.write(destination, f"pack(({items}), {NAMES[UNSIGNED[width(type_)]]})", UNSIGNED[width(type_)])
    else:
        # Bits are moved in the type in which a register holds them already, which saves a view.
        held = source if isinstance(source, Register) else destination
        if isinstance(held, Register) and isinstance(source, Register | Immediate | FloatBits):
            other = emitter.program.types[emitter.kernel.numbers[held.name]]
            if width(other) == width(type_) and not (isinstance(source, Immediate) and other in (F32, F64)):
                type_ = other
        if isinstance(destination, Register) and isinstance(source, Register):
            emitter.copy(destination, source, type_)
        else:
            emitter.write(destination, emitter.read(source, type_), type_)


# ---------------------------------------------------------------------- cvta


@emits(r"cvta\.(?:to\.)?(?P<space>global|param|const)\.u64")
def convert_address(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Addresses of global and parameter memory are generic addresses."""
    d, a = instruction.operands
    emitter.write(d, emitter.read(a, U64), U64)


_WINDOWS = {"shared": lanes.SHARED_WINDOW, "shared::cta": lanes.SHARED_WINDOW, "local": lanes.LOCAL_WINDOW}


@emits(r"cvta\.(?P<to>to\.)?(?P<space>shared|shared::cta|local)\.u64")
def convert_window_address(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Addresses of shared and local memory lie in windows of the generic addresses."""
    d, a = instruction.operands
    window = emitter.constant(_WINDOWS[form["space"]], U64)
    emitter.write(d, f"{emitter.read(a, U64)} {'-' if form['to'] else '+'} {window}", U64)


# ---------------------------------------------------------------------- cvt of integers


@emits(rf"cvt{_SAT}\.(?P<to>{_INTEGERS})\.(?P<from>{_INTEGERS})")
def convert_integers(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Cut to fewer bits, or extended as the source's sign says; with .sat cut to the range."""
    to, of = TYPES[form["to"]], TYPES[form["from"]]
    source = _source(emitter, instruction.operands[1], of)
    if form["sat"]:
        _write(emitter, instruction.operands[0], f"saturate_integer({source}, {NAMES[to]})", to)
    else:
        _write(emitter, instruction.operands[0], source if to is of else f"{source}.astype({NAMES[to]})", to)


@emits(rf"cvt\.rn\.(?P<to>f32|f64)\.(?P<from>{_INTEGERS})")
def convert_integer_to_float(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Integer to f32 or f64, rounded to nearest even."""
    to = TYPES[form["to"]]
    emitter.write(
        instruction.operands[0],
        f"{_source(emitter, instruction.operands[1], TYPES[form['from']])}.astype({NAMES[to]})",
        to,
    )


@emits(r"cvt\.rn\.f16\.(?P<from>[us](?:8|16|32))")
def convert_integer_to_f16(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Integer to f16, rounded to nearest even; exact in f64 on the way."""
    source = _source(emitter, instruction.operands[1], TYPES[form["from"]])
    emitter.write(instruction.operands[0], f"{source}.astype(F64).astype(np.float16).view(U16)", U16)


@emits(rf"cvt\.(?P<rounding>rni|rzi|rmi|rpi){_FTZ}(?:\.sat)?\.(?P<to>{_INTEGERS})\.f32")
def convert_f32_to_integer(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """f32 to an integer, always cut to the range."""
    _float_to_integer(emitter, instruction, form, _flushed(emitter, instruction.operands[1], form))


@emits(rf"cvt\.(?P<rounding>rni|rzi|rmi|rpi)(?:\.sat)?\.(?P<to>{_INTEGERS})\.(?P<from>f64|f16|bf16)")
def convert_float_to_integer(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Other floating-point numbers to an integer, always cut to the range."""
    source = emitter.read(instruction.operands[1], TYPES[form["from"]])
    _float_to_integer(
        emitter, instruction, form, source if form["from"] == "f64" else f"{form['from']}_to_f32({source})"
    )


def _float_to_integer(emitter: Emitter, instruction: Instruction, form: Match, source: str) -> None:
    to = TYPES[form["to"]]
    _write(emitter, instruction.operands[0], f"float_to_integer({source}, {NAMES[to]}, {form['rounding']!r})", to)


# ---------------------------------------------------------------------- cvt of f32 and f64


@emits(rf"cvt(?:\.(?P<rounding>rni|rzi|rmi|rpi))?{_FTZ}{_SAT}\.f32\.f32")
def convert_f32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """f32 to an integral f32, flushed, or cut to [0, 1]."""
    source = _flushed(emitter, instruction.operands[1], form)
    if form["rounding"]:
        source = f"round_to_integral({source}, {form['rounding']!r})"
    emitter.write(instruction.operands[0], f"saturate({source})" if form["sat"] else source, F32)


@emits(r"cvt\.(?P<rounding>rni|rzi|rmi|rpi)\.f64\.f64")
def convert_f64(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """f64 to an integral f64."""
    emitter.write(
        instruction.operands[0],
        f"round_to_integral({emitter.read(instruction.operands[1], F64)}, {form['rounding']!r})",
        F64,
    )


@emits(rf"cvt{_FTZ}\.f64\.f32")
def convert_f32_to_f64(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """f32 to f64; exact."""
    emitter.write(instruction.operands[0], f"{_flushed(emitter, instruction.operands[1], form)}.astype(F64)", F64)


@emits(rf"cvt\.rn{_FTZ}\.f32\.f64")
def convert_f64_to_f32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """f64 to f32, rounded to nearest even."""
    result = f"{emitter.read(instruction.operands[1], F64)}.astype(F32)"
    emitter.write(instruction.operands[0], f"flush({result})" if form["ftz"] else result, F32)


# ---------------------------------------------------------------------- cvt of short floating-point types


@emits(r"cvt\.f32\.(?P<from>f16|bf16)")
def convert_half_to_f32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """f16 or bf16 to f32; exact."""
    emitter.write(instruction.operands[0], f"{form['from']}_to_f32({emitter.read(instruction.operands[1], U16)})", F32)


@emits(rf"cvt\.(?P<rounding>rn){_RELU}\.(?P<to>f16|bf16)\.f32")
def convert_f32_to_half(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """f32 to f16 or bf16, rounded to nearest even."""
    emitter.write(
        instruction.operands[0], f"f32_to_{form['to']}({_rectified(emitter, instruction.operands[1], form)})", U16
    )


@emits(rf"cvt\.rz{_RELU}\.bf16\.f32")
def convert_f32_to_bf16_rz(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """f32 to bf16, rounded towards zero."""
    emitter.write(instruction.operands[0], f"f32_to_bf16_rz({_rectified(emitter, instruction.operands[1], form)})", U16)


@emits(rf"cvt\.rn{_RELU}\.(?P<to>f16x2|bf16x2)\.f32")
def convert_f32_to_half_pair(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Two f32 to a pair of f16 or bf16, rounded to nearest even; the first operand comes into the upper half."""
    d, a, b = instruction.operands
    emitter.write(d, f"f32_to_{form['to']}({_rectified(emitter, a, form)}, {_rectified(emitter, b, form)})", U32)


@emits(rf"cvt\.rz{_RELU}\.bf16x2\.f32")
def convert_f32_to_bf16_pair_rz(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Two f32 to a pair of bf16, rounded towards zero."""
    d, a, b = instruction.operands
    emitter.write(
        d, f"pair(f32_to_bf16_rz({_rectified(emitter, a, form)}), f32_to_bf16_rz({_rectified(emitter, b, form)}))", U32
    )


@emits(rf"cvt\.rn\.satfinite{_RELU}\.(?P<to>e4m3|e5m2)x2\.f32")
def convert_f32_to_fp8_pair(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Two f32 to a pair of e4m3 or e5m2, rounded to nearest even and cut to the finite numbers."""
    d, a, b = instruction.operands
    high, low = (f"f32_to_fp8({_rectified(emitter, operand, form)}, {form['to']!r})" for operand in (a, b))
    emitter.write(d, f"pair({high}, {low})", U16)


@emits(rf"cvt\.rn\.satfinite{_RELU}\.(?P<to>e4m3|e5m2)x2\.f16x2")
def convert_f16_pair_to_fp8_pair(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """A pair of f16 to a pair of e4m3 or e5m2, rounded to nearest even and cut to the finite numbers."""
    low, high = emitter.temporary(), emitter.temporary()
    emitter.emit(f"{low}, {high} = unpack({emitter.read(instruction.operands[1], U32)}, U16)")
    values = (f"relu(f16_to_f32({half}))" if form["relu"] else f"f16_to_f32({half})" for half in (high, low))
    upper, lower = (f"f32_to_fp8({value}, {form['to']!r})" for value in values)
    emitter.write(instruction.operands[0], f"pair({upper}, {lower})", U16)


@emits(r"cvt\.rn\.f16x2\.(?P<from>e4m3|e5m2)x2")
def convert_fp8_pair_to_f16_pair(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """A pair of e4m3 or e5m2 to a pair of f16; exact."""
    emitter.write(
        instruction.operands[0], f"fp8_to_f16x2({emitter.read(instruction.operands[1], U16)}, {form['from']!r})", U32
    )


@emits(r"cvt\.rna\.tf32\.f32")
def convert_f32_to_tf32(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """f32 to tf32, rounded to nearest, ties away from zero."""
    emitter.write(instruction.operands[0], f"f32_to_tf32({emitter.read(instruction.operands[1], F32)})", U32)


def _flushed(emitter: Emitter, operand: Operand, form: Match) -> str:
    value = emitter.read(operand, F32)
    return f"flush({value})" if form["ftz"] else value


def _rectified(emitter: Emitter, operand: Operand, form: Match) -> str:
    value = emitter.read(operand, F32)
    return f"relu({value})" if form["relu"] else value


def _source(emitter: Emitter, operand: Operand, type_: Type) -> str:
    """An integer source; its register may be wider, of which the low bits count (PTX ISA, "Operand Size ...")."""
    if isinstance(operand, Register):
        declared = width(TYPES[emitter.kernel.registers[operand.name]])
        if declared > width(type_):
            return f"{emitter.read(operand, UNSIGNED[declared])}.astype({NAMES[type_]})"
    return emitter.read(operand, type_)


def _write(emitter: Emitter, operand: Operand, expression: str, type_: Type) -> None:
    """Write an integer; a wider register gets it extended as its sign says."""
    if isinstance(operand, Register):
        declared = width(TYPES[emitter.kernel.registers[operand.name]])
        if declared > width(type_):
            wide = (_SIGNED if type_ in _SIGNED.values() else UNSIGNED)[declared]
            expression, type_ = f"({expression}).astype({NAMES[wide]})", wide
    emitter.write(operand, expression, type_)
