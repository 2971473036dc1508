"""A scalar model of arithmetic instructions, one lane at a time, written from the PTX ISA on Python integers.

Operands and results are bit patterns as Python integers, predicates 0 or 1. Floating-point results are computed
exactly as fractions and rounded once; Python's own float serves only to hold a number and for the functions that the
hardware approximates. Nothing here uses NumPy or the code under test.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from fractions import Fraction
from math import inf, isinf, isnan, nan

# ---------------------------------------------------------------------- types

# Exponent and fraction bits of the floating-point types (PTX ISA, "Fundamental Types" and "Alternate ... Formats").
FLOATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52), "e4m3": (4, 3), "e5m2": (5, 2)}
CANONICAL_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": (1 << 63) - 1, "e4m3": 0x7F, "e5m2": 0x7F}
GREATEST_FINITE = {"e4m3": 0x7E, "e5m2": 0x7B}


def width(type_: str) -> int:
    """Bits of a type."""
    if type_ == "pred":
        return 1
    if type_ in FLOATS:
        return 1 + sum(FLOATS[type_])
    if type_.endswith("x2"):
        return 2 * width(type_[:-2])
    return int(type_[1:])


def number(bits: int, type_: str) -> int:
    """The integer that a bit pattern stands for."""
    return bits - (1 << width(type_)) if type_[0] == "s" and bits >> (width(type_) - 1) else bits


def pattern(value: int, type_: str) -> int:
    """The bit pattern of an integer, cut to the width."""
    return value & ((1 << width(type_)) - 1)


def decode(bits: int, type_: str) -> float:
    """The number that a floating-point bit pattern stands for; f64 holds all of them exactly."""
    exponent_bits, fraction_bits = FLOATS[type_]
    sign = -1.0 if bits >> (exponent_bits + fraction_bits) else 1.0
    exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1)
    fraction = bits & ((1 << fraction_bits) - 1)
    if type_ == "e4m3" and exponent == 15 and fraction == 7:
        return nan
    if type_ != "e4m3" and exponent == (1 << exponent_bits) - 1:
        return nan if fraction else sign * inf
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - bias - fraction_bits)
    return sign * math.ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits)


def _infinity(type_: str) -> int:
    exponent_bits, fraction_bits = FLOATS[type_]
    return ((1 << exponent_bits) - 1) << fraction_bits


def encode(value: Fraction | float, type_: str, *, negative: bool | None = None, rounding: str = "rn") -> int:
    """The bit pattern of a number, rounded once; `negative` is the sign of a zero, where `value` cannot say it.

    `rounding` is rn (nearest even), rna (nearest, ties away from zero) or rz. The 8-bit types saturate.
    """
    exponent_bits, fraction_bits = FLOATS[type_]
    if isinstance(value, float):
        if isnan(value):
            return CANONICAL_NAN[type_]
        negative = math.copysign(1.0, value) < 0
        if isinf(value):
            magnitude = GREATEST_FINITE.get(type_, _infinity(type_))
            return negative << (exponent_bits + fraction_bits) | magnitude
        value = Fraction(value)
    if value:
        negative = value < 0
    sign = int(bool(negative)) << (exponent_bits + fraction_bits)
    steps, exponent = _steps(abs(value), type_, rounding)
    bias = (1 << (exponent_bits - 1)) - 1
    # The implicit bit counts into the exponent field, and a fraction rounded up carries into it.
    magnitude = steps + ((exponent + bias - 1) << fraction_bits)
    greatest = GREATEST_FINITE.get(type_, _infinity(type_))
    return sign | min(magnitude, greatest)


def _steps(magnitude: Fraction, type_: str, rounding: str = "rn") -> tuple[int, int]:
    """(whole number of units in the last place, exponent of the binade) of a rounded magnitude."""
    exponent_bits, fraction_bits = FLOATS[type_]
    exponent = 2 - (1 << (exponent_bits - 1))
    above, below = magnitude.numerator, magnitude.denominator
    if above:
        floor = above.bit_length() - below.bit_length()
        too_great = above < below << floor if floor > 0 else above << -floor < below
        exponent = max(floor - too_great, exponent)
    unit = exponent - fraction_bits
    below, above = (below << unit, above) if unit > 0 else (below, above << -unit)
    steps, rest = divmod(above, below)
    if rounding == "rn":
        steps += 2 * rest > below or (2 * rest == below and steps % 2 == 1)
    elif rounding == "rna":
        steps += 2 * rest >= below
    return steps, exponent


def flush(bits: int) -> int:
    """f32 with a subnormal number replaced by a zero of its sign."""
    return bits & 0x80000000 if bits & 0x7F800000 == 0 else bits


def same(a: int, b: int, type_: str) -> bool:
    """Whether two results agree; a NaN agrees with any other NaN, as PTX leaves its bits open."""
    if type_.endswith("x2"):
        half = width(type_) // 2
        low = (1 << half) - 1
        return same(a & low, b & low, type_[:-2]) and same(a >> half, b >> half, type_[:-2])
    if type_ in FLOATS and isnan(decode(a, type_)) and isnan(decode(b, type_)):
        return True
    return a == b


def ulps_apart(a: int, b: int, type_: str) -> float:
    """How many floating-point numbers two results are apart; 0 for two NaN, infinite for one."""
    if same(a, b, type_):
        return 0
    if isnan(decode(a, type_)) or isnan(decode(b, type_)):
        return inf
    order = [bits if bits < 1 << (width(type_) - 1) else (1 << (width(type_) - 1)) - bits for bits in (a, b)]
    return abs(order[0] - order[1])


# ---------------------------------------------------------------------- integers


def _quotient(a: int, b: int, type_: str) -> int:
    if b == 0:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a: int, b: int, type_: str) -> int:
    return a if b == 0 else a - b * _quotient(a, b, type_)


def _saturated(value: int, type_: str) -> int:
    bits = width(type_)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)
    return min(max(value, low), high)


def integer(operation: str, type_: str, *operands: int) -> int:
    """Integer instructions of one type: add sub mul.lo mul.hi mad.lo mad.hi div rem min max abs neg."""
    a, b, c = ([number(bits, type_) for bits in operands] + [0, 0, 0])[:3]
    results: dict[str, Callable[[], int]] = {
        "add": lambda: a + b,
        "sub": lambda: a - b,
        "mul.lo": lambda: a * b,
        "mul.hi": lambda: a * b >> width(type_),
        "mad.lo": lambda: a * b + c,
        "mad.hi": lambda: (a * b >> width(type_)) + c,
        "div": lambda: _quotient(a, b, type_),
        "rem": lambda: _remainder(a, b, type_),
        "min": lambda: min(a, b),
        "max": lambda: max(a, b),
        "min.relu": lambda: max(min(a, b), 0),
        "max.relu": lambda: max(a, b, 0),
        "abs": lambda: abs(a),
        "neg": lambda: -a,
        "add.sat": lambda: _saturated(a + b, type_),
        "sub.sat": lambda: _saturated(a - b, type_),
    }
    return pattern(results[operation](), type_)


def multiply_wide(type_: str, a: int, b: int, c: int = 0) -> int:
    """mul.wide and mad.wide."""
    return (number(a, type_) * number(b, type_) + c) & ((1 << (2 * width(type_))) - 1)


def dot_product(operation: str, a_type: str, b_type: str, a: int, b: int, c: int) -> int:
    """dp4a, dp2a.lo and dp2a.hi."""

    def parts(bits: int, size: int, type_: str) -> list[int]:
        data = bits.to_bytes(4, "little")
        return [int.from_bytes(data[i : i + size], "little", signed=type_ == "s32") for i in range(0, 4, size)]

    of_a, of_b = parts(a, 1 if operation == "dp4a" else 2, a_type), parts(b, 1, b_type)
    of_b = of_b[2:] if operation == "dp2a.hi" else of_b
    return (c + sum(x * y for x, y in zip(of_a, of_b, strict=False))) & 0xFFFFFFFF


# ---------------------------------------------------------------------- floating point


def _zero_sign(a: float, b: float) -> bool:
    """Sign of an exact sum that is zero: negative only if both are -0 (round to nearest)."""
    return math.copysign(1, a) < 0 and math.copysign(1, b) < 0


def _negative_product(a: float, b: float) -> bool:
    return math.copysign(1, a) * math.copysign(1, b) < 0


def _finite(*values: float) -> bool:
    return not any(isnan(value) or isinf(value) for value in values)


def _sum(a: float, b: float, type_: str) -> int:
    if not _finite(a, b):
        return encode(a + b, type_)
    return encode(Fraction(a) + Fraction(b), type_, negative=_zero_sign(a, b))


def _product(a: float, b: float, type_: str) -> int:
    if not _finite(a, b):
        return encode(a * b, type_)
    return encode(Fraction(a) * Fraction(b), type_, negative=_negative_product(a, b))


def _fused(a: float, b: float, c: float, type_: str) -> int:
    exact = exact_fma(a, b, c)
    if isinstance(exact, float):
        return encode(exact, type_)
    zero_product = math.copysign(0.0, -1.0 if _negative_product(a, b) else 1.0)
    return encode(exact, type_, negative=_zero_sign(zero_product, c))


def exact_fma(a: float, b: float, c: float) -> Fraction | float:
    """a * b + c without rounding; a float where it is infinite or NaN."""
    if not _finite(a, b):
        return a * b + c  # the product is infinite or NaN, so that this does not round
    if not _finite(c):
        return c
    return Fraction(a) * Fraction(b) + Fraction(c)


def _ratio(a: float, b: float, type_: str) -> int:
    negative = _negative_product(a, b)
    if isnan(a) or isnan(b) or (isinf(a) and isinf(b)) or (a == 0 and b == 0):
        return encode(nan, type_)
    if isinf(a) or b == 0:
        return encode(-inf if negative else inf, type_)
    if isinf(b):
        return encode(-0.0 if negative else 0.0, type_)
    return encode(Fraction(a) / Fraction(b), type_, negative=negative)


def _square_root(a: float, type_: str) -> int:
    if isnan(a) or a < 0:
        return encode(nan, type_)
    if isinf(a) or a == 0:
        return encode(a, type_)
    scale = 1200  # bits far below the last place of any type
    radicand = Fraction(a) * (1 << (2 * scale))
    root = math.isqrt(radicand.numerator // radicand.denominator)
    exact = root * root == radicand
    return encode(Fraction(2 * root + (not exact), 2 << scale), type_)


def _extreme(a: float, b: float, greatest: bool) -> float:
    """Minimum or maximum: the number if one is NaN; -0 is below +0."""
    if isnan(a) or isnan(b):
        return b if isnan(a) else a
    key = (a, math.copysign(1, a)), (b, math.copysign(1, b))
    return (max if greatest else min)(zip(key, (a, b), strict=True))[1]


def floating(operation: str, type_: str, *operands: int) -> int:
    """Correctly rounded instructions of one floating-point type."""
    values = [decode(bits, type_) for bits in operands]
    sign = 1 << (width(type_) - 1)
    results: dict[str, Callable[[], int]] = {
        "add": lambda: _sum(values[0], values[1], type_),
        "sub": lambda: _sum(values[0], -values[1], type_),
        "mul": lambda: _product(values[0], values[1], type_),
        "fma": lambda: _fused(values[0], values[1], values[2], type_),
        "mad": lambda: _fused(values[0], values[1], values[2], type_),
        "div": lambda: _ratio(values[0], values[1], type_),
        "rcp": lambda: _ratio(1.0, values[0], type_),
        "sqrt": lambda: _square_root(values[0], type_),
        "min": lambda: encode(_extreme(values[0], values[1], greatest=False), type_),
        "max": lambda: encode(_extreme(values[0], values[1], greatest=True), type_),
        "min.NaN": lambda: encode(nan if any(map(isnan, values)) else _extreme(*values, greatest=False), type_),
        "max.NaN": lambda: encode(nan if any(map(isnan, values)) else _extreme(*values, greatest=True), type_),
        "abs": lambda: operands[0] & ~sign,
        "neg": lambda: operands[0] ^ sign,
        "copysign": lambda: operands[1] & ~sign | operands[0] & sign,
    }
    return results[operation]()


def f32(operation: str, *operands: int, ftz: bool = False, sat: bool = False) -> int:
    """`floating` with .ftz and .sat."""
    result = floating(operation, "f32", *(flush(bits) if ftz else bits for bits in operands))
    if ftz:
        result = flush(result)
    return saturate(result) if sat else result


def saturate(bits: int) -> int:
    """f32 cut to [0, 1]; NaN becomes 0."""
    value = decode(bits, "f32")
    return bits if 0 < value < 1 else encode(1.0 if value >= 1 else 0.0, "f32")


def pairwise(function: Callable[..., int], *operands: int) -> int:
    """An operation on both halves of 32-bit pairs."""
    low = function(*(bits & 0xFFFF for bits in operands))
    high = function(*(bits >> 16 for bits in operands))
    return high << 16 | low


_APPROXIMATE: dict[str, Callable[[float], float]] = {
    "ex2": lambda x: 2.0**x if x < 1000 else inf,
    "lg2": lambda x: -inf if x == 0 else nan if x < 0 else math.log2(x),
    "rsqrt": lambda x: math.copysign(inf, x) if x == 0 else nan if x < 0 else 1 / math.sqrt(x),
    "sin": lambda x: nan if isinf(x) else math.sin(x),
    "cos": lambda x: nan if isinf(x) else math.cos(x),
    "tanh": math.tanh,
}


def approximate(operation: str, bits: int, *, ftz: bool = False) -> int:
    """Functions of f32 that the hardware approximates, nearly correctly rounded (through f64)."""
    x = decode(flush(bits) if ftz else bits, "f32")
    result = encode(nan if isnan(x) else _APPROXIMATE[operation](x), "f32")
    return flush(result) if ftz else result


def has_property(name: str, type_: str, bits: int) -> int:
    """testp."""
    exponent_bits, fraction_bits = FLOATS[type_]
    exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1)
    fraction = bits & ((1 << fraction_bits) - 1)
    top = (1 << exponent_bits) - 1
    return {
        "finite": exponent != top,
        "infinite": exponent == top and fraction == 0,
        "number": exponent != top or fraction == 0,
        "notanumber": exponent == top and fraction != 0,
        "normal": 0 < exponent < top,
        "subnormal": exponent == 0 and fraction != 0,
    }[name]


# ---------------------------------------------------------------------- comparison, selection, logic

_ORDER = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt}
_ORDER |= {"ge": operator.ge, "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
_BITWISE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def compare(comparison: str, type_: str, a: int, b: int, *, ftz: bool = False) -> int:
    """The comparison of setp and set; with NaN the ordered ones are false, the unordered ones true."""
    if type_ not in FLOATS:
        return int(_ORDER[comparison](number(a, type_), number(b, type_)))
    x, y = (decode(flush(bits) if ftz else bits, type_) for bits in (a, b))
    unordered = isnan(x) or isnan(y)
    if comparison in ("num", "nan"):
        return int(unordered == (comparison == "nan"))
    if comparison.endswith("u"):
        return int(unordered or _ORDER[comparison[:-1]](x, y))
    return int(not unordered and _ORDER[comparison](x, y))


def bitwise(operation: str, a: int, b: int) -> int:
    """and, or, xor."""
    return int(_BITWISE[operation](a, b))


def logic3(table: int, a: int, b: int, c: int) -> int:
    """lop3.b32."""
    return sum((table >> ((a >> n & 1) * 4 + (b >> n & 1) * 2 + (c >> n & 1)) & 1) << n for n in range(32))


def shift_left(type_: str, a: int, amount: int) -> int:
    """shl: amounts above the width count as the width."""
    return pattern(a << min(amount, width(type_)), type_)


def shift_right(type_: str, a: int, amount: int) -> int:
    """shr: amounts above the width count as the width; signed types are filled with the sign."""
    return pattern(number(a, type_) >> min(amount, width(type_)), type_)


def funnel_shift(direction: str, mode: str, a: int, b: int, c: int) -> int:
    """shf: `b:a` shifted, of which the upper or the lower half comes out."""
    amount = min(c, 32) if mode == "clamp" else c & 31
    joined = b << 32 | a
    return (joined << amount) >> 32 & 0xFFFFFFFF if direction == "l" else joined >> amount & 0xFFFFFFFF


# prmt: the bytes chosen for c & 3, the most significant first, copied from the table of the PTX ISA.
_PERMUTATIONS = {
    "f4e": ((3, 2, 1, 0), (4, 3, 2, 1), (5, 4, 3, 2), (6, 5, 4, 3)),
    "b4e": ((5, 6, 7, 0), (6, 7, 0, 1), (7, 0, 1, 2), (0, 1, 2, 3)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((3, 2, 1, 0), (3, 2, 1, 1), (3, 2, 2, 2), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (1, 1, 1, 0), (2, 2, 1, 0), (3, 2, 1, 0)),
    "rc16": ((1, 0, 1, 0), (3, 2, 3, 2), (1, 0, 1, 0), (3, 2, 3, 2)),
}


def permute(mode: str | None, a: int, b: int, c: int) -> int:
    """prmt.b32."""
    source = struct.pack("<II", a, b)
    if mode is not None:
        return int.from_bytes(bytes(source[n] for n in _PERMUTATIONS[mode][c & 3]), "big")
    result = 0
    for n in range(4):
        nibble = c >> (4 * n) & 15
        byte = source[nibble & 7]
        result |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << (8 * n)
    return result


def extract_field(type_: str, a: int, b: int, c: int) -> int:
    """bfe, bit by bit as in the PTX ISA."""
    position, length, top = b & 255, c & 255, width(type_) - 1
    sign = 0 if type_[0] == "u" or length == 0 else a >> min(position + length - 1, top) & 1
    bits = [a >> (position + n) & 1 if n < length and position + n <= top else sign for n in range(top + 1)]
    return sum(bit << n for n, bit in enumerate(bits))


def insert_field(type_: str, a: int, b: int, c: int, d: int) -> int:
    """bfi, bit by bit as in the PTX ISA."""
    position, length, top = c & 255, d & 255, width(type_) - 1
    result = b
    for n in range(length):
        if position + n <= top:
            result = result & ~(1 << (position + n)) | (a >> n & 1) << (position + n)
    return result


def leading_zeros(type_: str, a: int) -> int:
    """clz."""
    return width(type_) - a.bit_length()


def reverse(type_: str, a: int) -> int:
    """brev."""
    return int(format(a, f"0{width(type_)}b")[::-1], 2)


def find_highest(type_: str, a: int, *, shift_amount: bool) -> int:
    """bfind."""
    value = number(a, type_)
    position = (~value if value < 0 else value).bit_length() - 1
    if position < 0:
        return 0xFFFFFFFF
    return width(type_) - 1 - position if shift_amount else position


# ---------------------------------------------------------------------- conversions

_INTEGRAL: dict[str, Callable[[Fraction], int]] = {
    **{"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
}


def convert_integer(to: str, of: str, bits: int, *, sat: bool = False) -> int:
    """cvt between integers."""
    value = number(bits, of)
    return pattern(_saturated(value, to) if sat else value, to)


def float_to_integer(rounding: str, to: str, of: str, bits: int, *, ftz: bool = False) -> int:
    """cvt of a floating-point number to an integer, cut to the range."""
    value = decode(flush(bits) if ftz else bits, of)
    if isnan(value):
        return 1 << (width(to) - 1) if of == "f64" or width(to) == 64 else 0
    if isinf(value):
        return pattern(_saturated(1 << 100 if value > 0 else -1 << 100, to), to)
    return pattern(_saturated(_INTEGRAL[rounding](Fraction(value)), to), to)


def round_to_integral(rounding: str, type_: str, bits: int) -> int:
    """cvt to an integral number of the same floating-point type; a zero keeps the sign."""
    value = decode(bits, type_)
    if isnan(value) or isinf(value):
        return encode(value, type_)
    return encode(Fraction(_INTEGRAL[rounding](Fraction(value))), type_, negative=math.copysign(1, value) < 0)


def convert_float(to: str, of: str, bits: int, *, rounding: str = "rn", relu: bool = False) -> int:
    """cvt between floating-point types; .relu makes negative numbers 0."""
    value = decode(bits, of)
    if relu and value <= 0:
        value = 0.0
    return encode(value, to, rounding=rounding)


def to_tf32(bits: int) -> int:
    """cvt.rna.tf32.f32: f32 whose fraction has 10 bits."""
    value = decode(bits, "f32")
    if isnan(value) or isinf(value):
        return encode(value, "f32")
    unit = 1 << 13
    magnitude = bits & 0x7FFFFFFF  # in units of the last place, so that rounding may carry into the exponent
    return bits & 0x80000000 | (magnitude + unit // 2) // unit * unit


# ---------------------------------------------------------------------- warps


def shuffle(mode: str, values: list[int], b: list[int], c: list[int]) -> list[tuple[int, int]]:
    """shfl.sync of 32 lanes that all execute it: (value, predicate) of each, as in the PTX ISA's pseudocode."""
    results = []
    for lane in range(32):
        bval, cval, mask = b[lane] & 31, c[lane] & 31, c[lane] >> 8 & 31
        max_lane = (lane & mask) | (cval & ~mask)
        min_lane = lane & mask
        j, valid = {
            "up": (lane - bval, lane - bval >= max_lane),
            "down": (lane + bval, lane + bval <= max_lane),
            "bfly": (lane ^ bval, lane ^ bval <= max_lane),
            "idx": (min_lane | (bval & ~mask), (min_lane | (bval & ~mask)) <= max_lane),
        }[mode]
        results.append((values[j] if valid else values[lane], int(valid)))
    return results


def vote(mode: str, predicates: list[int]) -> int:
    """vote.sync over the lanes that take part."""
    return int({"all": all(predicates), "any": any(predicates), "uni": len(set(predicates)) == 1}[mode])


def ballot(predicates: dict[int, int]) -> int:
    """vote.sync.ballot of predicates by lane."""
    return sum(predicate << lane for lane, predicate in predicates.items())


def reduce(operation: str, type_: str, values: list[int]) -> int:
    """redux.sync over the lanes that take part."""
    result = values[0]
    for value in values[1:]:
        result = bitwise(operation, result, value) if type_ == "b32" else integer(operation, type_, result, value)
    return result
