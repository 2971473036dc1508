"""What translated blocks compute with: PTX operations on the lanes of a group of warps.

A value is a NumPy vector with one element per lane, or a NumPy scalar where all lanes agree. No function changes its
arguments, none returns an array without dimensions, and vectors are contiguous, so that `.view` reads their bits in
another type. Values of 16-bit floating-point types are held as their bits (U16, or U32 for a pair of them).

Operations that NumPy's operators perform as PTX does are written as operators in the translated blocks and have no
function here: additions, products and bitwise logic wrap around, and shifts by the width or more give zero or copies
of the sign. The caller switches NumPy's floating-point warnings off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from fa3gen.cpu.truth import count_nonzero, every, some
from fa3gen.cpu.types import F32, F64, S64, U8, U16, U32, U64, UNSIGNED, Type

# A NumPy vector or scalar. NumPy's own types for the two have no useful common ancestor with operators.
Value = Any

# Generic addresses of shared and local memory lie in windows of this size (PTX ISA, "cvta"). Addresses of global and
# parameter memory are generic addresses already. Host pointers lie far below the windows.
WINDOW_BYTES: Final = 1 << 40
SHARED_WINDOW: Final = 1 << 56
LOCAL_WINDOW: Final = SHARED_WINDOW + WINDOW_BYTES


class _Nobody:
    """The mask of an instruction that no lane executes."""

    def __repr__(self) -> str:
        return "NOBODY"


NOBODY: Final = _Nobody()


# ---------------------------------------------------------------------- lanes


def choose(mask: Value | None, new: Value, old: Value | None, lane_count: int) -> Value:
    """What a register holds after the lanes of `mask` wrote `new` over `old`.

    No mask stands for all lanes; without an old value nothing can be kept. `lane_count` is the length of the result
    where lanes may differ.
    """
    if mask is None or old is None or new is old:
        return new
    if not mask.ndim:
        return new if mask else old
    assert len(mask) == lane_count
    return np.where(mask, new, old)


def select(predicate: Value, a: Value, b: Value) -> Value:
    """`a` where the predicate holds, else `b` (PTX ISA, "selp")."""
    if predicate.ndim:
        return np.where(predicate, a, b)
    return a if predicate else b


def spread(x: Value, lane_count: int) -> Value:
    """The value as a vector of `lane_count` lanes."""
    return x if x.ndim else np.full(lane_count, x)


def pack(items: tuple[Value, ...], type_: Any) -> Value:
    """One value of unsigned type `type_` from narrower unsigned ones, the lowest bits first (PTX ISA, "mov")."""
    bits = type_(items[0].dtype.itemsize * 8)
    result = items[-1].astype(type_)
    for item in items[-2::-1]:
        result = (result << bits) | item.astype(type_)
    return result


def unpack(x: Value, type_: Type) -> tuple[Value, ...]:
    """The pieces of a value as values of a narrower unsigned type, the lowest bits first (PTX ISA, "mov")."""
    if type_ is U16 and x.itemsize == 4:  # halves are by far the most
        return x.astype(U16), (x >> _SIXTEEN).astype(U16)
    whole, piece = x.dtype.itemsize * 8, np.dtype(type_).itemsize * 8
    return x.astype(type_), *((x >> x.dtype.type(shift)).astype(type_) for shift in range(piece, whole, piece))


# ---------------------------------------------------------------------- integers


def divide(a: Value, b: Value) -> Value:
    """Quotient of integers, cut towards zero (PTX ISA, "div"). Division by zero gives all bits set, as on sm_90."""
    if a.dtype.kind == "u":
        return select(b == 0, ~(b & b.dtype.type(0)), a // b)
    unsigned = UNSIGNED[a.dtype.itemsize * 8]
    magnitude = (abs(a).view(unsigned) // abs(b).view(unsigned)).view(a.dtype)
    quotient = select((a < 0) ^ (b < 0), -magnitude, magnitude)
    return select(b == 0, b.dtype.type(-1), quotient)


def remainder(a: Value, b: Value) -> Value:
    """Remainder of integers with the sign of the dividend (PTX ISA, "rem"); of division by zero the dividend."""
    if a.dtype.kind == "u":
        return a - (a // b) * b  # NumPy's quotient is 0 where b is 0
    unsigned = UNSIGNED[a.dtype.itemsize * 8]
    dividend, divisor = abs(a).view(unsigned), abs(b).view(unsigned)
    magnitude = (dividend - (dividend // divisor) * divisor).view(a.dtype)
    return select(a < 0, -magnitude, magnitude)


def multiply_high(a: Value, b: Value) -> Value:
    """The upper half of the product (PTX ISA, "mul.hi")."""
    bits = a.dtype.itemsize * 8
    signed = a.dtype.kind == "i"
    if bits < 64:
        wide = S64 if signed else U64
        return ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(a.dtype)
    x, y = a.view(U64), b.view(U64)
    low, shift = U64(0xFFFFFFFF), U64(32)
    cross = (x >> shift) * (y & low) + (((x & low) * (y & low)) >> shift)
    middle = (x & low) * (y >> shift) + (cross & low)
    high = (x >> shift) * (y >> shift) + (cross >> shift) + (middle >> shift)
    if signed:
        high = high - select(a < 0, y, U64(0)) - select(b < 0, x, U64(0))
    return high.view(a.dtype)


def saturate_integer(x: Value, type_: Type) -> Value:
    """An integer of a wider or other type, cut to the range of `type_` (PTX ISA, ".sat" of "cvt" and "add")."""
    to, of = _limits(type_), _limits(x.dtype)
    low, high = max(to.min, of.min), min(to.max, of.max)
    return np.minimum(np.maximum(x, x.dtype.type(low)), x.dtype.type(high)).astype(type_)


def _limits(type_: Any) -> np.iinfo[Any]:
    """The range of an integer type."""
    return np.iinfo(type_)


# ---------------------------------------------------------------------- bits


def population_count(x: Value) -> Value:
    """Number of bits set, as u32 (PTX ISA, "popc")."""
    return np.bitwise_count(x).astype(U32)


def bit_length(x: Value) -> Value:
    """One more than the position of the highest bit set, 0 for 0, as u32. `x` is unsigned."""
    for distance in (1, 2, 4, 8, 16, 32)[: (x.dtype.itemsize * 8).bit_length() - 1]:
        x = x | (x >> x.dtype.type(distance))
    return np.bitwise_count(x).astype(U32)


def leading_zeros(x: Value) -> Value:
    """Number of zeros before the highest bit set, as u32 (PTX ISA, "clz")."""
    return U32(x.dtype.itemsize * 8) - bit_length(x)


def find_highest(x: Value, *, shift_amount: bool) -> Value:
    """Position of the highest bit that is not a sign bit, all bits set if there is none (PTX ISA, "bfind").

    With `shift_amount` the shift that brings this bit to the top.
    """
    bits = x.dtype.itemsize * 8
    if x.dtype.kind == "i":
        x = (x ^ (x >> x.dtype.type(bits - 1))).view(UNSIGNED[bits])
    position = bit_length(x) - U32(1)
    if shift_amount:
        return select(x == 0, position, U32(bits - 1) - position)
    return position


_REVERSED_BYTES = np.array([int(f"{byte:08b}"[::-1], 2) for byte in range(256)], U8)


def reverse_bits(x: Value) -> Value:
    """The bits in the opposite order (PTX ISA, "brev")."""
    if not x.ndim:
        return reverse_bits(x.reshape(1))[0]
    return _REVERSED_BYTES[x.view(U8)].view(x.dtype).byteswap()


def extract_bits(a: Value, position: Value, length: Value) -> Value:
    """`length` bits of `a` from `position` up, with zeros or copies of the field's sign above (PTX ISA, "bfe").

    `position` and `length` are u32, of which the low 8 bits count.
    """
    type_, bits = a.dtype.type, a.dtype.itemsize * 8
    position, length = (position & U32(255)).astype(type_), (length & U32(255)).astype(type_)
    field = a >> position
    if a.dtype.kind == "u":
        return field & _low_bits(length, type_)
    # Shift the field's top bit to the top and back. Beyond the top of `a` its sign continues, as the field's does.
    unused = type_(bits) - np.minimum(length, type_(bits))
    return select(length == 0, type_(0), (field << unused) >> unused)


def insert_bits(a: Value, b: Value, position: Value, length: Value) -> Value:
    """`b` with its `length` bits from `position` up replaced by the low bits of `a` (PTX ISA, "bfi")."""
    type_ = a.dtype.type
    position, length = (position & U32(255)).astype(type_), (length & U32(255)).astype(type_)
    field = _low_bits(length, type_) << position
    return ((a << position) & field) | (b & ~field)


def _low_bits(count: Value, type_: Any) -> Value:
    """A mask of the lowest `count` bits; NumPy shifts by the width or more to 0, so that `count` may exceed it."""
    return ~(~type_(0) << count)


def logic3(a: Value, b: Value, c: Value, table: int) -> Value:
    """Any function of three bits, taken bit by bit; bit 4a + 2b + c of `table` is the result (PTX ISA, "lop3")."""
    result = a & a.dtype.type(0)
    for row in range(8):
        if table >> row & 1:
            result = result | ((a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c))
    return result


def funnel_shift_left(a: Value, b: Value, amount: Value) -> Value:
    """The upper 32 bits of `b:a` shifted left by up to 32 (PTX ISA, "shf.l")."""
    return ((_join(a, b) << amount.astype(U64)) >> U64(32)).astype(U32)


def funnel_shift_right(a: Value, b: Value, amount: Value) -> Value:
    """The lower 32 bits of `b:a` shifted right by up to 32 (PTX ISA, "shf.r")."""
    return (_join(a, b) >> amount.astype(U64)).astype(U32)


def _join(low: Value, high: Value) -> Value:
    return (high.astype(U64) << U64(32)) | low.astype(U64)


def dot_product(a: Value, b: Value, count: int, first: int) -> Value:
    """Sum of `count` products of parts of `a`, which divide it, and of bytes of `b` from `first` on, modulo 2^32.

    The parts of a u32 or s32 have its sign (PTX ISA, "dp4a" and "dp2a").
    """
    total, bits = U32(0), 32 // count
    for i in range(count):
        of_a, of_b = extract_bits(a, U32(bits * i), U32(bits)), extract_bits(b, U32(8 * (first + i)), U32(8))
        total = total + of_a.astype(U32) * of_b.astype(U32)
    return total


_PERMUTE_BYTES: dict[str, Callable[[int, Value], Value]] = {
    "f4e": lambda i, c: c + U32(i),
    "b4e": lambda i, c: (c - U32(i)) & U32(7),
    "rc8": lambda i, c: c,
    "ecl": lambda i, c: np.maximum(c, U32(i)),
    "ecr": lambda i, c: np.minimum(c, U32(i)),
    "rc16": lambda i, c: (c & U32(1)) * U32(2) + U32(i & 1),
}


def permute_bytes(a: Value, b: Value, c: Value, mode: str | None = None) -> Value:
    """Four of the eight bytes `b:a`, chosen by `c` as `mode` says (PTX ISA, "prmt").

    Without a mode each nibble of `c` chooses one byte, or with its highest bit set, copies of that byte's sign.
    """
    if mode is None and not c.ndim and not int(c) & 0x8888:
        return _gather_bytes(a, b, int(c))
    source = _join(a, b)
    result = U32(0)
    for i in range(4):
        nibble = c >> U32(4 * i)
        chosen = nibble & U32(7) if mode is None else _PERMUTE_BYTES[mode](i, c & U32(3))
        byte = ((source >> (chosen.astype(U64) * U64(8))) & U64(255)).astype(U32)
        if mode is None:
            byte = select((nibble & U32(8)) != 0, (byte >> U32(7)) * U32(255), byte)
        result = result | (byte << U32(8 * i))
    return result


def _gather_bytes(a: Value, b: Value, chosen: int) -> Value:
    """`permute_bytes` without a mode or signs, where all lanes choose the same bytes, in a few steps."""
    both = np.empty((max(a.size, b.size), 2), U32)
    both[:, 0], both[:, 1] = a, b
    places = [chosen >> 4 * i & 7 for i in range(4)]
    result = both.view(U8).take(places, axis=1).view(U32)[:, 0]
    return result if a.ndim or b.ndim else result[0]


# ---------------------------------------------------------------------- f32 and f64

_SMALLEST_NORMAL = F32(2.0**-126)


def flush(x: Value) -> Value:
    """f32 with subnormal numbers replaced by zeros of the same sign (PTX ISA, ".ftz")."""
    return x * (abs(x) >= _SMALLEST_NORMAL)


def saturate(x: Value) -> Value:
    """Cut to [0, 1]; NaN becomes 0 (PTX ISA, ".sat" of floating-point instructions)."""
    type_ = x.dtype.type
    return np.fmin(np.fmax(x, type_(0)), type_(1)) + type_(0)


def fma(a: Value, b: Value, c: Value) -> Value:
    """a * b + c of f32 (PTX ISA, "fma.rn.f32").

    The product is exact in f64 and the sum is rounded to f64, then to f32. The two roundings differ from the single
    one of the hardware only where the sum lies within 2^-29 of an f32 ulp beside the middle of two f32 numbers, and
    then by that f32 ulp: for random operands about once in 2^30 times. A test in every call would double its cost.
    """
    total = a.astype(F64)  # a copy, which may be changed
    total *= b
    total += c
    return total.astype(F32)


def add_to_odd(a: Value, b: Value) -> Value:
    """a + b of f64, where inexact rounded to the neighbour whose last bit is set.

    Rounding this to a type with at least two bits fewer is then the same as rounding the exact sum once.
    """
    total = a + b
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)
    even = (total.view(S64) & S64(1)) == 0
    inexact = (error != 0) & np.isfinite(error)
    return select(even & inexact, np.nextafter(total, np.copysign(F64(np.inf), error)), total)


def maximum(a: Value, b: Value) -> Value:
    """The greater one of f32 or f64; the number if one is NaN; +0 is greater than -0 (PTX ISA, "max")."""
    greater = np.fmax(a, b)
    # Rows of zeros are common. Of a zero and a zero fmax returns one: +0 is the greater one, or there is no other. So
    # only NaN and -0 are open. The latter is a zero with a bit set.
    bits = greater.view(UNSIGNED[greater.dtype.itemsize * 8])
    sure = every(greater == greater) and count_nonzero(greater) == count_nonzero(bits)
    return greater if sure else _extreme(greater, a, b, np.bitwise_and)


def minimum(a: Value, b: Value) -> Value:
    """The smaller one of f32 or f64; the number if one is NaN; -0 is smaller than +0 (PTX ISA, "min")."""
    smaller = np.fmin(a, b)
    return smaller if _unequivocal(smaller) else _extreme(smaller, a, b, np.bitwise_or)


def maximum_nan(a: Value, b: Value) -> Value:
    """As `maximum`, but NaN if one is NaN (PTX ISA, "max.NaN")."""
    return select((a != a) | (b != b), a.dtype.type(np.nan), maximum(a, b))


def minimum_nan(a: Value, b: Value) -> Value:
    """As `minimum`, but NaN if one is NaN (PTX ISA, "min.NaN")."""
    return select((a != a) | (b != b), a.dtype.type(np.nan), minimum(a, b))


def _unequivocal(extreme: Value) -> bool:
    """Whether there is no zero and no NaN among the results of fmax or fmin, the two cases that these leave open."""
    return every(extreme) and every(extreme == extreme)


def _extreme(extreme: Value, a: Value, b: Value, join: Callable[[Value, Value], Value]) -> Value:
    """The result of fmax or fmin where zeros or NaN are among the operands.

    Of two zeros the bits are joined. A signalling NaN, which fmax and fmin may return, gives way to a number.
    """
    zeros = (a == 0) & (b == 0)
    if some(zeros):
        bits = UNSIGNED[a.dtype.itemsize * 8]
        extreme = select(zeros, join(a.view(bits), b.view(bits)).view(a.dtype), extreme)
    if every(extreme == extreme):
        return extreme
    return select(a != a, b, select(b != b, a, extreme))


# The approximations of the hardware are computed in f64 and rounded once, so they are more accurate than its own.


def exp2(x: Value) -> Value:
    """2^x of f32 (PTX ISA, "ex2.approx.f32")."""
    return np.exp2(x.astype(F64)).astype(F32)


def exp2_ftz(x: Value) -> Value:
    """2^x of f32; subnormal results become 0 (PTX ISA, "ex2.approx.ftz.f32")."""
    power = np.exp2(x, dtype=F64).astype(F32)
    return power * (power >= _SMALLEST_NORMAL)


def log2(x: Value) -> Value:
    """Logarithm to base 2 of f32 (PTX ISA, "lg2.approx.f32")."""
    return np.log2(x.astype(F64)).astype(F32)


def reciprocal(x: Value) -> Value:
    """1 / x of f32 or f64 (PTX ISA, "rcp")."""
    return x.dtype.type(1) / x


def reciprocal_root(x: Value) -> Value:
    """1 / sqrt(x) of f32 (PTX ISA, "rsqrt.approx.f32")."""
    return (F64(1) / np.sqrt(x.astype(F64))).astype(F32)


def sine(x: Value) -> Value:
    """Sine of f32 in radians (PTX ISA, "sin.approx.f32")."""
    return np.sin(x.astype(F64)).astype(F32)


def cosine(x: Value) -> Value:
    """Cosine of f32 in radians (PTX ISA, "cos.approx.f32")."""
    return np.cos(x.astype(F64)).astype(F32)


def hyperbolic_tangent(x: Value) -> Value:
    """Hyperbolic tangent of f32 (PTX ISA, "tanh.approx.f32")."""
    return np.tanh(x.astype(F64)).astype(F32)


def is_normal(x: Value) -> Value:
    """Whether a floating-point number is neither zero, subnormal, infinite nor NaN (PTX ISA, "testp.normal")."""
    return np.isfinite(x) & (abs(x) >= np.finfo(x.dtype).smallest_normal)


def is_subnormal(x: Value) -> Value:
    """Whether a floating-point number is subnormal (PTX ISA, "testp.subnormal")."""
    return (x != 0) & (abs(x) < np.finfo(x.dtype).smallest_normal)


# ---------------------------------------------------------------------- conversions

_TO_INTEGRAL: dict[str, Callable[[Value], Value]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def round_to_integral(x: Value, rounding: str) -> Value:
    """A floating-point number rounded to an integral one of the same type; `rounding` is rni, rzi, rmi or rpi."""
    return _TO_INTEGRAL[rounding](x)


def float_to_integer(x: Value, type_: Type, rounding: str) -> Value:
    """An integer from f32 or f64, cut to the range of `type_` (PTX ISA, "cvt").

    NaN becomes 0, or the highest bit alone where one of the types has 64 bits.
    """
    whole = _TO_INTEGRAL[rounding](x.astype(F64))
    limits = _limits(type_)
    above = whole >= F64(2.0 ** (limits.bits - (limits.kind == "i")))
    below = whole < F64(limits.min)
    nan = whole != whole
    inside = select(above | below | nan, F64(0), whole).astype(type_)
    result = select(above, type_(limits.max), select(below, type_(limits.min), inside))
    if limits.bits == 64 or x.dtype == F64:
        highest = np.array([1 << (limits.bits - 1)], UNSIGNED[limits.bits]).view(type_)[0]
        return select(nan, highest, result)
    return result


_HALF, _LOWER_HALF, _HIGH_HALF, _SIXTEEN, _ONE = U32(0x7FFF), U32(0xFFFF), U32(0xFFFF0000), U32(16), U32(1)
_CANONICAL_NAN = U16(0x7FFF)


def bf16_to_f32(x: Value) -> Value:
    """f32 from the bits of bf16; exact (PTX ISA, "cvt.f32.bf16")."""
    bits = x.astype(U32)  # a copy, which may be changed
    bits <<= _SIXTEEN
    return bits.view(F32)


def f16_to_f32(x: Value) -> Value:
    """f32 from the bits of f16; exact (PTX ISA, "cvt.f32.f16")."""
    return x.view(np.float16).astype(F32)


def f32_to_bf16(x: Value) -> Value:
    """Bits of bf16, rounded to nearest, ties to even; NaN becomes 0x7fff (PTX ISA, "cvt.rn.bf16.f32")."""
    bits = x.view(U32)
    rounded = ((bits + _HALF + ((bits >> _SIXTEEN) & _ONE)) >> _SIXTEEN).astype(U16)
    return select(x != x, _CANONICAL_NAN, rounded)


def f32_to_bf16_rz(x: Value) -> Value:
    """Bits of bf16, rounded towards zero; NaN becomes 0x7fff (PTX ISA, "cvt.rz.bf16.f32")."""
    return select(x != x, _CANONICAL_NAN, (x.view(U32) >> _SIXTEEN).astype(U16))


def f32_to_f16(x: Value) -> Value:
    """Bits of f16, rounded to nearest, ties to even; NaN becomes 0x7fff (PTX ISA, "cvt.rn.f16.f32")."""
    return select(x != x, _CANONICAL_NAN, x.astype(np.float16).view(U16))


def f32_to_tf32(x: Value) -> Value:
    """f32 with 10 bits of fraction, rounded to nearest, ties away from zero (PTX ISA, "cvt.rna.tf32.f32")."""
    rounded = (x.view(U32) + U32(0x1000)) & U32(0xFFFFE000)
    return select(np.isfinite(x), rounded, select(x != x, U32(0x7FFFFFFF), x.view(U32)))


def relu(x: Value) -> Value:
    """f32 with negative numbers replaced by 0; NaN stays (PTX ISA, ".relu" of "cvt")."""
    return select((x < 0) | (x == 0), F32(0), x)


def pair(high: Value, low: Value) -> Value:
    """Two u16 as one u32, or two u8 as one u16."""
    wide = UNSIGNED[low.dtype.itemsize * 16]
    return (high.astype(wide) << wide(low.dtype.itemsize * 8)) | low.astype(wide)


def f32_to_bf16x2(high: Value, low: Value) -> Value:
    """Two f32 as a pair of bf16, the first in the upper half (PTX ISA, "cvt.rn.bf16x2.f32")."""
    both = _interleave(high, low)
    if both is None:
        return pair(f32_to_bf16(high), f32_to_bf16(low))
    bits = both.view(U32)
    rounded = bits >> _SIXTEEN
    rounded &= _ONE
    rounded += _HALF
    rounded += bits
    rounded >>= _SIXTEEN
    return rounded.astype(U16).view(U32)


def f32_to_f16x2(high: Value, low: Value) -> Value:
    """Two f32 as a pair of f16, the first in the upper half (PTX ISA, "cvt.rn.f16x2.f32")."""
    both = _interleave(high, low)
    if both is None:
        return pair(f32_to_f16(high), f32_to_f16(low))
    return both.astype(np.float16).view(U32)


def _interleave(high: Value, low: Value) -> Value | None:
    """One vector of the elements of both in turn, the lower ones first; None for scalars and where one is NaN."""
    if not high.ndim and not low.ndim:
        return None
    both = np.empty((max(high.size, low.size), 2), F32)
    both[:, 0], both[:, 1] = low, high
    flat = both.reshape(-1)
    squares = flat @ flat  # NaN only if an element is: no two terms cancel
    return flat if squares == squares else None


def _fp8_values(exponent_bits: int, fraction_bits: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The value of each of the 256 encodings of e4m3 or e5m2 (PTX ISA, "Alternate Floating-Point Data Formats")."""
    bias = (1 << (exponent_bits - 1)) - 1
    codes = np.arange(256)
    exponent = codes >> fraction_bits & ((1 << exponent_bits) - 1)
    fraction = (codes & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    magnitude = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    if exponent_bits == 5:  # infinities and NaN as in IEEE 754
        magnitude = np.where(exponent == 31, np.where(fraction == 0, np.inf, np.nan), magnitude)
    else:  # e4m3: no infinity, one NaN
        magnitude = np.where(codes & 127 == 127, np.nan, magnitude)
    return np.where(codes >> 7, -magnitude, magnitude).astype(F32)


FP8_VALUES = {"e4m3": _fp8_values(4, 3), "e5m2": _fp8_values(5, 2)}
_FP8_FRACTION = {"e4m3": 3, "e5m2": 2}
_FP8_SMALLEST_EXPONENT = {"e4m3": -6, "e5m2": -14}
_FP8_GREATEST_CODE = {"e4m3": 0x7E, "e5m2": 0x7B}


def f32_to_fp8(x: Value, format_: str) -> Value:
    """Bits of e4m3 or e5m2 as u8: nearest, ties to even, cut to the greatest finite number (PTX ISA, "cvt").

    NaN becomes 0x7f. `format_` is the name of the type. What is rounded away is looked up by: the upper half of the
    bits, of which the last one says as well whether any of the lower half is set. It stands behind the bit that a tie
    is decided by.
    """
    bits = x.view(U32)
    return _fp8_table(format_)[(bits >> _SIXTEEN) | ((bits & _LOWER_HALF) != 0)]


@functools.cache
def _fp8_table(format_: str) -> Value:
    """`rounded_to_fp8` of the 65,536 numbers whose lower half is zero."""
    with np.errstate(all="ignore"):
        return rounded_to_fp8((np.arange(1 << 16, dtype=U32) << _SIXTEEN).view(F32), format_)


def rounded_to_fp8(x: Value, format_: str) -> Value:
    """`f32_to_fp8`, computed."""
    fraction = _FP8_FRACTION[format_]
    smallest = _FP8_SMALLEST_EXPONENT[format_]
    magnitude = abs(x).astype(F64)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, smallest)
    steps = np.rint(np.ldexp(magnitude, fraction - exponent))  # in units of the last place
    # The implicit bit counts into the exponent field, and a fraction that rounds up carries into it.
    code = select(steps == 0, steps, steps + (exponent - smallest) * F64(1 << fraction))
    greatest = F64(_FP8_GREATEST_CODE[format_])
    code = select(code < greatest, code, greatest)
    return select(x != x, U8(0x7F), code.astype(U8) | (np.signbit(x).astype(U8) << U8(7)))


def fp8_to_f16x2(x: Value, format_: str) -> Value:
    """A pair of f16 from a pair of e4m3 or e5m2; exact (PTX ISA, "cvt.rn.f16x2.e4m3x2"). There are 65,536 pairs."""
    return _fp8_pairs(format_)[x]


@functools.cache
def _fp8_pairs(format_: str) -> Value:
    """The pair of f16 for each pair of bytes."""
    with np.errstate(all="ignore"):
        halves = f32_to_f16(FP8_VALUES[format_])
    bytes_ = np.arange(1 << 16)
    return pair(halves[bytes_ >> 8], halves[bytes_ & 255])


# ---------------------------------------------------------------------- 16-bit floating point

_WIDEN: dict[str, Callable[[Value], Value]] = {"f16": f16_to_f32, "bf16": bf16_to_f32}
_NARROW: dict[str, Callable[[Value], Value]] = {"f16": f32_to_f16, "bf16": f32_to_bf16}


def _in_halves(function: Callable[..., Value], values: tuple[Value, ...]) -> Value:
    """`function` on the lower and on the upper halves of pairs."""
    low = [value.astype(U16) for value in values]
    high = [(value >> _SIXTEEN).astype(U16) for value in values]
    return pair(function(*high), function(*low))


def half_operation(name: str, format_: str, *values: Value) -> Value:
    """An operation on the bits of f16 or bf16 numbers, or on pairs of them, rounded once (PTX ISA, "Half Precision").

    `name` is add, sub, mul, min, max, fma, neg or abs; `format_` is f16, bf16, f16x2 or bf16x2. Sums and products of
    such short numbers come out the same when they are rounded to f32 first.
    """
    if format_.endswith("x2"):
        return _in_halves(lambda *halves: half_operation(name, format_[:-2], *halves), values)
    if name == "neg":
        return values[0] ^ U16(0x8000)
    if name == "abs":
        return values[0] & U16(0x7FFF)
    widen, narrow = _WIDEN[format_], _NARROW[format_]
    return narrow(_HALF_OPERATIONS[name](*map(widen, values)))


def _fma_to_odd(a: Value, b: Value, c: Value) -> Value:
    """a * b + c so rounded to f32 that rounding it further to 16 bits is right."""
    exact = add_to_odd(a.astype(F64) * b, c.astype(F64))
    short = exact.astype(F32)
    # Cutting f64 to f32 must keep the property: towards zero, with the last bit set where something was lost.
    short = select(abs(short.astype(F64)) > abs(exact), np.nextafter(short, F32(0)), short)
    lost = (short != exact) & np.isfinite(exact)
    return select(lost, (short.view(U32) | _ONE).view(F32), short)


_HALF_OPERATIONS: dict[str, Callable[..., Value]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": _fma_to_odd},
    **{"min": minimum, "max": maximum},
}
