"""Every arithmetic form of the CPU executor, with every modifier it allows, against the scalar model.

A form without a row here fails `test_every_form_is_tested`. For each mnemonic that a form's pattern allows, values with
the edges of its types go through translated code: as vectors, as scalars, under a mask with a predicate.
"""

from __future__ import annotations

import itertools
import random
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
import scalar_model as model
import test_barriers
import test_bulk_copy
import test_cp_async
import test_memory
import test_mma
import test_wgmma
from snippets import Snippet, run

from fa3gen.cpu import forms, lanes
from fa3gen.cpu.findings import Hazard, Kind, OutsideModel
from fa3gen.cpu.isa import arithmetic, conversion, logic, warp

Groups = dict[str, str]
Model = Callable[..., int]


@dataclass(frozen=True)
class Row:
    """What a form computes. Types are PTX types or names of groups in the form's pattern.

    `type?group` is an operand that is there if the group matched, `type?group=text` if it matched that text. Results
    may be `ulps` units in the last place off the model's, or equal to `also`. `constants` are last operands to try.
    """

    result: str
    operands: str
    model: Model
    ulps: int = 0
    also: Model | None = None
    constants: tuple[int, ...] = ()


def on_integers(f: Groups, *x: int) -> int:
    part = f".{f['part']}" if "part" in f else ""
    return model.integer(f["op"] + part, f["type"], *x)


def on_f32(f: Groups, *x: int) -> int:
    nan = ".NaN" if f.get("nan") else ""
    return model.f32(f["op"] + nan, *x, ftz=bool(f["ftz"]), sat=bool(f.get("sat")))


def on_halves(f: Groups, *x: int) -> int:
    operation, type_ = f.get("op", "fma"), f["type"]
    if type_.endswith("x2"):
        return model.pairwise(lambda *halves: model.floating(operation, type_[:-2], *halves), *x)
    return model.floating(operation, type_, *x)


def fused_with_two_roundings(f: Groups, *x: int) -> int:
    """As lanes.fma documents: rounded to f64, then to f32."""
    flushed = [model.flush(bits) if f["ftz"] else bits for bits in x]
    exact = model.exact_fma(*(model.decode(bits, "f32") for bits in flushed))
    if isinstance(exact, float) or exact == 0:
        return on_f32(f, *x)
    once = model.encode(model.decode(model.encode(exact, "f64"), "f64"), "f32")
    return model.saturate(once) if f["sat"] else model.flush(once) if f["ftz"] else once


def compared(f: Groups, a: int, b: int, c: int = 0) -> int:
    result = model.compare(f["compare"], f["type"], a, b, ftz=bool(f.get("ftz")))
    return model.bitwise(f["join"], result, c) if f.get("join") else result


def set_number(f: Groups, a: int, b: int) -> int:
    holds = model.compare(f["compare"], f["type"].replace("b", "u"), a, b, ftz=bool(f.get("ftz")))
    return holds * (0x3F800000 if f["to"] == "f32" else 0xFFFFFFFF)


def pair_of(function: Callable[[int], int], high: int, low: int, bits: int = 16) -> int:
    return function(high) << bits | function(low)


def to_short(f: Groups, to: str, rounding: str = "rn", of: str = "f32") -> Callable[[int], int]:
    return lambda x: model.convert_float(to, of, x, rounding=rounding, relu=bool(f["relu"]))


def flushed(f: Groups, x: int) -> int:
    return model.flush(x) if f["ftz"] else x


def f32_to_f32(f: Groups, x: int) -> int:
    x = flushed(f, x)
    if f["rounding"]:
        x = model.round_to_integral(f["rounding"], "f32", x)
    return model.saturate(x) if f["sat"] else x


def f64_to_f32(f: Groups, x: int) -> int:
    return flushed(f, model.convert_float("f32", "f64", x))


def to_integer(f: Groups, x: int) -> int:
    return model.float_to_integer(f["rounding"], f["to"], f.get("from", "f32"), x, ftz=bool(f.get("ftz")))


def approximated(operation: str) -> Model:
    return lambda f, x: model.approximate(operation, x, ftz=bool(f["ftz"]))


EVERY_TABLE = (0x00, 0xFF, 0x96, 0xE8, 0xCA, 0x1D, 0x80, 0x01, 0xEA, 0x3C)

OPCODES: dict[str, Row] = {
    # form                      result   operands               model
    # integers
    "add_integers": Row("type", "type type", on_integers),
    "add_saturating": Row("s32", "s32 s32", lambda f, a, b: model.integer(f"{f['op']}.sat", "s32", a, b)),
    "multiply_integers": Row("type", "type type type?op=mad", on_integers),
    "multiply_wide": Row("wide", "type type wide?op=mad", lambda f, *x: model.multiply_wide(f["type"], *x)),
    "dot_product_of_bytes": Row("b32", "b32 b32 b32", lambda f, *x: model.dot_product("dp4a", f["a"], f["b"], *x)),
    "dot_product_of_halves": Row(
        "b32", "b32 b32 b32", lambda f, *x: model.dot_product(f"dp2a.{f['half']}", f["a"], f["b"], *x)
    ),
    "divide_integers": Row("type", "type type", on_integers),
    "order_integers": Row("type", "type type", on_integers),
    "order_integers_relu": Row("s32", "s32 s32", lambda f, a, b: model.integer(f"{f['op']}.relu", "s32", a, b)),
    "sign_of_integer": Row("type", "type", on_integers),
    # f32 and f64
    "add_f32": Row("f32", "f32 f32", on_f32),
    "fma_f32": Row("f32", "f32 f32 f32", on_f32, also=fused_with_two_roundings),
    "divide_f32": Row("f32", "f32 f32", lambda f, a, b: on_f32({**f, "op": "div"}, a, b)),
    "root_f32": Row("f32", "f32", on_f32),
    "approximate_f32": Row("f32", "f32", lambda f, x: approximated(f["op"])(f, x), ulps=1),
    "tanh_f32": Row("f32", "f32", lambda f, x: model.approximate("tanh", x), ulps=1),
    "exp2_f32": Row("f32", "f32", approximated("ex2"), ulps=1),
    "order_f32": Row("f32", "f32 f32", on_f32),
    "sign_of_f32": Row("f32", "f32", on_f32),
    "add_f64": Row("f64", "f64 f64", lambda f, a, b: model.floating(f["op"], "f64", a, b)),
    "divide_f64": Row("f64", "f64 f64", lambda f, a, b: model.floating("div", "f64", a, b)),
    "root_f64": Row("f64", "f64", lambda f, x: model.floating(f["op"], "f64", x)),
    "order_f64": Row("f64", "f64 f64", lambda f, a, b: model.floating(f["op"], "f64", a, b)),
    "sign_of_f64": Row("f64", "f64", lambda f, x: model.floating(f["op"], "f64", x)),
    "copy_sign": Row("type", "type type", lambda f, a, b: model.floating("copysign", f["type"], a, b)),
    "test_property": Row("pred", "type", lambda f, x: model.has_property(f["property"], f["type"], x)),
    # f16 and bf16
    "add_half": Row("type", "type type", on_halves),
    "fma_half": Row("type", "type type type", on_halves),
    "order_half": Row("type", "type type?op=min type?op=max", on_halves),
    # comparison and selection
    "compare_bits": Row("pred", "type type pred?join", compared),
    "compare_signed": Row("pred", "type type pred?join", compared),
    "compare_unsigned": Row("pred", "type type pred?join", compared),
    "compare_f32": Row("pred", "type type pred?join", compared),
    "compare_floats": Row("pred", "type type pred?join", compared),
    "set_by_bits": Row("to", "type type", set_number),
    "set_by_signed": Row("to", "type type", set_number),
    "set_by_unsigned": Row("to", "type type", set_number),
    "set_by_f32": Row("to", "type type", set_number),
    "select_by_predicate": Row("type", "type type pred", lambda f, a, b, p: a if p else b),
    "select_by_sign": Row("type", "type type s32", lambda f, a, b, c: b if c >> 31 else a),
    # logic and shifts
    "logic": Row("type", "type type", lambda f, a, b: model.bitwise(f["op"], a, b)),
    "complement": Row("type", "type", lambda f, a: (1 << model.width(f["type"])) - 1 - a),
    "logical_complement": Row("type", "type", lambda f, a: int(a == 0)),
    "logic_of_three": Row("b32", "b32 b32 b32", lambda f, a, b, c, t: model.logic3(t, a, b, c), constants=EVERY_TABLE),
    "shift_left": Row("type", "type amount", lambda f, a, n: model.shift_left(f["type"], a, n)),
    "shift_right": Row("type", "type amount", lambda f, a, n: model.shift_right(f["type"], a, n)),
    "funnel_shift": Row(
        "b32", "b32 b32 amount", lambda f, a, b, n: model.funnel_shift(f["direction"], f["mode"], a, b, n)
    ),
    # bits and bytes
    "permute_bytes": Row("b32", "b32 b32 b32", lambda f, a, b, c: model.permute(f["mode"], a, b, c)),
    "extract_bit_field": Row("type", "type amount amount", lambda f, a, b, c: model.extract_field(f["type"], a, b, c)),
    "insert_bit_field": Row("type", "type type amount amount", lambda f, *x: model.insert_field(f["type"], *x)),
    "count_bits": Row(
        "u32", "type", lambda f, a: a.bit_count() if f["op"] == "popc" else model.leading_zeros(f["type"], a)
    ),
    "reverse_bits": Row("type", "type", lambda f, a: model.reverse(f["type"], a)),
    "find_highest_bit": Row(
        "u32", "type", lambda f, a: model.find_highest(f["type"], a, shift_amount=bool(f["shift"]))
    ),
    # moves and addresses
    "move": Row("type", "type", lambda f, x: x),
    "convert_address": Row("u64", "u64", lambda f, x: x),
    # conversions
    "convert_integers": Row(
        "to", "from", lambda f, x: model.convert_integer(f["to"], f["from"], x, sat=bool(f["sat"]))
    ),
    "convert_integer_to_float": Row(
        "to", "from", lambda f, x: model.encode(Fraction(model.number(x, f["from"])), f["to"])
    ),
    "convert_integer_to_f16": Row(
        "b16", "from", lambda f, x: model.encode(Fraction(model.number(x, f["from"])), "f16")
    ),
    "convert_f32_to_integer": Row("to", "f32", to_integer),
    "convert_float_to_integer": Row("to", "from", to_integer),
    "convert_f32": Row("f32", "f32", f32_to_f32),
    "convert_f64": Row("f64", "f64", lambda f, x: model.round_to_integral(f["rounding"], "f64", x)),
    "convert_f32_to_f64": Row("f64", "f32", lambda f, x: model.convert_float("f64", "f32", flushed(f, x))),
    "convert_f64_to_f32": Row("f32", "f64", f64_to_f32),
    "convert_half_to_f32": Row("f32", "from", lambda f, x: model.convert_float("f32", f["from"], x)),
    "convert_f32_to_half": Row("b16", "f32", lambda f, x: to_short(f, f["to"])(x)),
    "convert_f32_to_bf16_rz": Row("b16", "f32", lambda f, x: to_short(f, "bf16", "rz")(x)),
    "convert_f32_to_half_pair": Row("b32", "f32 f32", lambda f, a, b: pair_of(to_short(f, f["to"][:-2]), a, b)),
    "convert_f32_to_bf16_pair_rz": Row("b32", "f32 f32", lambda f, a, b: pair_of(to_short(f, "bf16", "rz"), a, b)),
    "convert_f32_to_fp8_pair": Row("b16", "f32 f32", lambda f, a, b: pair_of(to_short(f, f["to"]), a, b, 8)),
    "convert_f16_pair_to_fp8_pair": Row(
        "b16", "f16x2", lambda f, x: pair_of(to_short(f, f["to"], of="f16"), x >> 16, x & 0xFFFF, 8)
    ),
    "convert_fp8_pair_to_f16_pair": Row(
        "b32", "b16", lambda f, x: pair_of(lambda y: model.convert_float("f16", f["from"], y), x >> 8, x & 0xFF)
    ),
    "convert_f32_to_tf32": Row("b32", "f32", lambda f, x: model.to_tf32(x)),
}

# Forms with tests of their own below.
TESTED_BELOW = {
    "convert_window_address": "test_windows",
    "shuffle": "test_shuffle",
    "vote": "test_vote",
    "ballot": "test_ballot",
    "active_mask": "test_active_mask",
    "elect": "test_elect",
    "reduce_integers": "test_reduce",
    "reduce_bits": "test_reduce",
}

FORMS = {
    form.emit.__name__: form
    for form in forms.forms()
    if form.emit.__module__ in (arithmetic.__name__, logic.__name__, conversion.__name__, warp.__name__)
}


# ---------------------------------------------------------------------- mnemonics of a form


def expand(pattern: str) -> list[str]:
    """Every text that a pattern without repetition matches."""
    texts, rest = _alternatives(pattern)
    assert not rest, f"{pattern}: {rest!r} not understood"
    return texts


def _alternatives(pattern: str) -> tuple[list[str], str]:
    texts: list[str] = []
    sequence = [""]
    while pattern and pattern[0] != ")":
        if pattern[0] == "|":
            texts += sequence
            sequence, pattern = [""], pattern[1:]
            continue
        choices, pattern = _item(pattern)
        if pattern[:1] == "?":
            choices, pattern = ["", *choices], pattern[1:]
        sequence = [before + choice for before in sequence for choice in choices]
    return texts + sequence, pattern


def _item(pattern: str) -> tuple[list[str], str]:
    if pattern[0] == "(":
        opening = re.match(r"\((\?P<\w+>|\?:)", pattern)
        assert opening, pattern
        choices, rest = _alternatives(pattern[opening.end() :])
        return choices, rest[1:]
    if pattern[0] == "[":
        end = pattern.index("]")
        return list(pattern[1:end]), pattern[end + 1 :]
    if pattern[0] == "\\":
        return [pattern[1]], pattern[2:]
    assert pattern[0].isalnum() or pattern[0] in ":_", f"{pattern}: a pattern names its modifiers one by one"
    return [pattern[0]], pattern[1:]


def mnemonics(name: str) -> Iterator[tuple[str, Groups]]:
    """Each mnemonic of a form with the groups of its pattern."""
    for mnemonic in expand(FORMS[name].name):
        match = FORMS[name].pattern.fullmatch(mnemonic)
        assert match, mnemonic
        yield mnemonic, match.groupdict()


# ---------------------------------------------------------------------- values

INTEGER_EDGES = [0, 1, 2, 3, 7, 8, 31, 32, 33, 63, 64, 127, 128, 255, 256, 1000, 32767, 32768, 65535, 65536, 1 << 24]
INTEGER_EDGES += [(1 << 24) + 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63]
AMOUNTS = [0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 65536, 65537, 1 << 31, (1 << 32) - 1]
NUMBERS = [0.0, 1.0, 0.5, 1.5, 2.5, 3.0, 1 / 3, 0.9999999, 2.0**-126, 2.0**-127, 2.0**-149, 2.0**-140 * 1.25]
NUMBERS += [2.0**-133, 2.0**-134, 2.0**-24, 2.0**-25, 2.0**-14, 2.0**-15 * 1.5, 2.0**-6, 2.0**-9, 2.0**-10, 2.0**-17]
NUMBERS += [448.0, 464.0, 480.0, 57344.0, 61440.0, 65504.0, 65519.0, 65520.0, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8]
NUMBERS += [1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, 1.0 + 2.0**-23, 127.5, 128.0, 255.5, 32767.5, 65535.5, 2.0**23 + 0.5]
NUMBERS += [2.0**24, 2.0**31 - 128, 2.0**31, 2.0**32, 2.0**63, 2.0**64, 3.0e38, 2.0**127, 2.0**128 - 2.0**104]
NUMBERS += [float("inf"), float("nan"), 100.0, 126.5, 127.99, 149.5, 7.75, 2.0**-1074, 1e300]


@cache
def edges_of(type_: str) -> list[int]:
    """Bit patterns that a type's operations may get wrong."""
    if type_ not in model.FLOATS:
        return [model.pattern(sign * edge, type_) for edge in INTEGER_EDGES for sign in (1, -1)]
    top = 1 << (model.width(type_) - 1)
    edges = [model.encode(sign * value, type_) for value in NUMBERS for sign in (1.0, -1.0)]
    edges += [1, top | 1, model.CANONICAL_NAN[type_] | top]
    if type_ != "e4m3":
        signalling = model.encode(float("inf"), type_) + 1
        edges += [signalling, signalling | top] * 4
    return edges


@cache
def ordinary_of(type_: str) -> list[int]:
    """Random numbers of everyday size."""
    rng = random.Random(type_)
    return [model.encode(rng.uniform(-2, 2) * 2.0 ** rng.randint(-12, 12), type_) for _ in range(2000)]


def samples(type_: str, count: int, rng: random.Random) -> list[int]:
    """Bit patterns of a type: about half edges, the rest random."""
    if type_.endswith("x2"):
        half = model.width(type_) // 2
        low, high = (samples(type_[:-2], count, rng) for _ in range(2))
        return [a << half | b for a, b in zip(high, low, strict=True)]
    if type_ == "pred":
        return [rng.getrandbits(1) for _ in range(count)]
    if type_ == "amount":
        return rng.choices(AMOUNTS + list(range(70)), k=count)
    bits = model.width(type_)
    edges = edges_of(type_)
    if type_ not in model.FLOATS:
        return [
            rng.choice(edges) if rng.random() < 0.6 else rng.getrandbits(rng.randint(1, bits)) for _ in range(count)
        ]
    sources = (lambda: rng.choice(edges), lambda: rng.getrandbits(bits), lambda: rng.choice(ordinary_of(type_)))
    return [source() for source in rng.choices(sources, (5, 2, 3), k=count)]


def register_width(type_: str) -> int:
    """8-bit numbers live in 16-bit registers."""
    return 32 if type_ == "amount" else max(16, model.width(type_)) if type_ != "pred" else 1


def declared(type_: str) -> str:
    return "pred" if type_ == "pred" else f"b{register_width(type_)}"


def vector(values: list[int], type_: str) -> Any:
    """Bit patterns as a register's value."""
    bits = register_width(type_)
    return np.array(values, np.bool_ if bits == 1 else f"u{bits // 8}")


def bits_of(value: Any) -> list[int]:
    """A register's value as bit patterns."""
    if value.dtype == np.bool_:
        return [int(bit) for bit in value]
    return [int(bits) for bits in value.view(f"u{value.dtype.itemsize}")]


# ---------------------------------------------------------------------- the comparison


@dataclass
class Case:
    """One mnemonic with the types of its result and operands."""

    mnemonic: str
    groups: Groups
    row: Row
    constant: int | None

    def __post_init__(self) -> None:
        known = {**{name: text for name, text in self.groups.items() if text}, "wide": self._wide()}
        self.result = known.get(self.row.result, self.row.result)
        self.operands = []
        for token in self.row.operands.split():
            type_, _, condition = token.partition("?")
            group, _, text = condition.partition("=")
            if not condition or (self.groups[group] == text if text else self.groups[group]):
                self.operands.append(known.get(type_, type_))

    def _wide(self) -> str:
        type_ = self.groups.get("type") or "u32"
        return f"{type_[0]}{2 * model.width(type_)}" if type_[0] in "us" else ""

    def body(self, guard: str = "") -> str:
        names = [f"x{n}" for n in range(len(self.operands))]
        declarations = [f".reg .{declared(type_)} {name};" for name, type_ in zip(names, self.operands, strict=True)]
        declarations += [f".reg .{declared(self.result)} d;", ".reg .pred guard;"]
        tail = [] if self.constant is None else [str(self.constant)]
        return "\n".join([*declarations, f"{guard}{self.mnemonic} d, {', '.join(names + tail)};"])

    def expected(self, model_: Model, operands: tuple[int, ...]) -> int:
        tail = () if self.constant is None else (self.constant,)
        result = int(model_(self.groups, *operands, *tail))
        return model.pattern(model.number(result, self.result), "b16") if self.result in ("s8", "u8") else result

    def check(self, got: int, operands: tuple[int, ...], where: str) -> None:
        want = self.expected(self.row.model, operands)
        if model.same(got, want, self.result):
            return
        if self.row.ulps and model.ulps_apart(got, want, self.result) <= self.row.ulps:
            return
        if self.row.also and model.same(got, self.expected(self.row.also, operands), self.result):
            return
        shown = ", ".join(f"{bits:#x} ({type_})" for bits, type_ in zip(operands, self.operands, strict=True))
        pytest.fail(f"{self.mnemonic} of {shown}, {where}: {got:#x}, but the model says {want:#x}")

    def draw(self, count: int, rng: random.Random, *, plain: bool = False) -> tuple[list[list[int]], dict[str, Any]]:
        """Operands, and the registers that hold them; bits of a register above its operand are arbitrary."""
        drawn = [samples(type_, count, rng) for type_ in self.operands]
        if plain:
            for type_, values in zip(self.operands, drawn, strict=True):
                if type_ in model.FLOATS:
                    values[:] = [bits if abs(model.decode(bits, type_)) > 0 else edges_of(type_)[4] for bits in values]
        held = {}
        for n, (type_, values) in enumerate(zip(self.operands, drawn, strict=True)):
            above = 1 << (8 if type_ in ("s8", "u8") else register_width(type_))
            noise = register_width(type_) > 8 and type_ in ("s8", "u8")
            held[f"x{n}"] = vector([bits + above * rng.getrandbits(8) * noise for bits in values], type_)
        return drawn, held


def cases(name: str) -> Iterator[Case]:
    row = OPCODES[name]
    for mnemonic, groups in mnemonics(name):
        for constant in row.constants or (None,):
            yield Case(mnemonic, groups, row, constant)


@pytest.mark.parametrize("name", OPCODES)
def test_form(name: str) -> None:
    rng = random.Random(name)
    for case in cases(name):
        snippet = Snippet(case.body())
        _vectors(case, snippet, rng)
        _scalars(case, snippet, rng)
        _masked(case, rng)


def _vectors(case: Case, snippet: Snippet, rng: random.Random) -> None:
    """Values of all kinds; then no zero and no NaN, for which some operations have a shorter way."""
    floats = any(type_ in model.FLOATS for type_ in case.operands)
    for count, plain in ((96, False), (32, True))[: 1 + floats]:
        drawn, held = case.draw(count, rng, plain=plain)
        result = bits_of(snippet.run(held, lanes=count)["d"])
        assert len(result) == count
        for got, operands in zip(result, zip(*drawn, strict=True), strict=True):
            case.check(got, operands, "as vectors")


def _scalars(case: Case, snippet: Snippet, rng: random.Random) -> None:
    """Every choice of operands that are scalars; then all are, and so is the result."""
    for uniform in itertools.product((False, True), repeat=len(case.operands)):
        if not any(uniform):
            continue
        drawn, held = case.draw(4, rng)
        for n, one in enumerate(uniform):
            if one:
                drawn[n] = drawn[n][:1] * 4
                held[f"x{n}"] = held[f"x{n}"][0]
        value = snippet.run(held, lanes=4)["d"]
        assert value.ndim == 0 or not all(uniform), f"{case.mnemonic}: a vector from scalars"
        result = bits_of(lanes.spread(value, 4))
        for got, operands in zip(result, zip(*drawn, strict=True), strict=True):
            case.check(got, operands, "with scalars")


def _masked(case: Case, rng: random.Random) -> None:
    """Lanes outside the mask, or whose predicate is false, keep what they had."""
    drawn, held = case.draw(32, rng)
    old = samples(case.result if case.result not in ("s8", "u8") else "b16", 32, rng)
    mask, guard = (np.array([rng.random() < 0.6 for _ in range(32)]) for _ in range(2))
    mask[0] = guard[0] = mask[1] = True
    guard[1] = False
    guarded, guarded_otherwise = Snippet(case.body("@guard ")), Snippet(case.body("@!guard "))
    for snippet, runs in ((guarded, mask & guard), (guarded_otherwise, mask & ~guard)):
        registers = {**held, "d": vector(old, case.result), "guard": guard}
        result = bits_of(snippet.run(registers, mask=mask)["d"])
        for lane, operands in enumerate(zip(*drawn, strict=True)):
            if runs[lane]:
                case.check(result[lane], operands, f"lane {lane} under a mask")
            else:
                assert result[lane] == old[lane], f"{case.mnemonic}: lane {lane} does not execute it"
    for guard_of_all in (np.False_, np.True_):
        registers = {**held, "d": vector(old, case.result), "guard": guard_of_all}
        result = bits_of(guarded.run(registers)["d"])
        for lane, operands in enumerate(zip(*drawn, strict=True)):
            if guard_of_all:
                case.check(result[lane], operands, "guarded by a uniform predicate")
            else:
                assert result[lane] == old[lane], f"{case.mnemonic}: no lane executes it"


@pytest.mark.parametrize(
    "name", ["shift_left", "shift_right", "add_integers", "logic", "order_integers", "compare_signed", "compare_bits"]
)
def test_constant_operands(name: str) -> None:
    """The last operand written into the instruction, also negative and greater than the width."""
    rng = random.Random(name)
    for case in cases(name):
        if case.groups.get("join") or case.groups["type"] == "pred":
            continue
        type_ = case.operands.pop()
        for constant in (0, 1, 15, 16, 31, 32, 40, 63, 64, 255, -1, -2):
            bits = constant & 0xFFFFFFFF if type_ == "amount" else model.pattern(constant, type_)
            case.constant = constant
            snippet = Snippet(case.body())
            case.constant = bits
            drawn, held = case.draw(8, rng)
            for got, operands in zip(bits_of(snippet.run(held, lanes=8)["d"]), zip(*drawn, strict=True), strict=True):
                case.check(got, operands, f"with the constant {constant}")


def test_every_form_is_tested() -> None:
    rows = set(OPCODES) | set(TESTED_BELOW)
    assert set(FORMS) == rows, "give each form of fa3gen/cpu/isa a row in OPCODES"
    assert all(test in globals() for test in TESTED_BELOW.values())


def test_every_form_of_all_families_is_tested() -> None:
    """Memory, control flow and asynchronous instructions have their tables in test files of their own."""
    files = (test_barriers, test_bulk_copy, test_cp_async, test_memory, test_mma, test_wgmma)
    elsewhere = {name: (file, test) for file in files for name, test in file.COVERED.items()}
    names = [form.emit.__name__ for form in forms.forms()]
    assert len(names) == len(set(names))
    assert set(names) == set(OPCODES) | set(TESTED_BELOW) | set(elsewhere)
    assert all(hasattr(file, test) for file, test in elsewhere.values())


def test_mnemonics_belong_to_one_form() -> None:
    """Each mnemonic finds its own form, whatever the order of registration."""
    for name, form in FORMS.items():
        for mnemonic, _ in mnemonics(name):
            others = [
                other.emit.__name__
                for other in forms.forms()
                if other is not form and other.pattern.fullmatch(mnemonic)
            ]
            assert not others, mnemonic


# ---------------------------------------------------------------------- what the table does not say


@pytest.mark.parametrize(
    "mnemonic",
    ["add.rz.f32", "fma.rn.relu.f32", "min.xorsign.abs.f32", "mul24.lo.u32", "cvt.rz.f32.f64", "cvt.rn.sat.s32.f32"]
    + ["setp.lo.s32", "shl.u32", "ex2.approx.ftz.bf16", "shfl.bfly.b32", "cvt.satfinite.e4m3x2.f32", "add.f32.sat"],
)
def test_unknown_modifiers_are_refused(mnemonic: str) -> None:
    with pytest.raises(OutsideModel) as refusal:
        run(f".reg .b32 d, a, b;\n{mnemonic} d, a, b;", {})
    # The snippet's first line is the third of the text.
    assert str(refusal.value).startswith(f"PTX line 4 of snippet: {mnemonic} is not an instruction of the CPU model")


def test_fma_rounds_twice_only_beside_a_tie() -> None:
    """The documented deviation exists where it is said to be, and not among random operands."""
    # 24929 * 673 = 2^24 + 1 lies between two f32 numbers; c decides, but f64 has no place for it beside the product.
    a, b, c = 24929.0, 673.0, 2.0**-40
    assert model.decode(model.encode(model.exact_fma(a, b, c), "f32"), "f32") == 2**24 + 2
    assert lanes.fma(np.float32(a), np.float32(b), np.float32(c)) == 2**24
    assert lanes.fma(np.float32(a), np.float32(b), np.float32(2.0**-20)) == 2**24 + 2, "f64 holds this sum"
    rng = np.random.default_rng(5)
    operands = [rng.standard_normal(20000).astype(np.float32) for _ in range(3)]
    for *values, got in zip(*(x.tolist() for x in operands), bits_of(lanes.fma(*operands)), strict=True):
        assert got == model.encode(model.exact_fma(*values), "f32")


def test_the_model_encodes_as_ieee_754() -> None:
    """The scalar model against Python's own conversions."""
    rng = random.Random(7)
    for bits in samples("f64", 4000, rng):
        value = struct.unpack("<d", struct.pack("<Q", bits))[0]
        assert model.same(model.encode(model.decode(bits, "f64"), "f64"), bits, "f64")
        assert value != value or model.decode(bits, "f64") == value
        for type_, code, bits_code in (("f32", "<f", "<I"), ("f16", "<e", "<H")):
            try:
                want = struct.unpack(bits_code, struct.pack(code, value))[0]
            except OverflowError:  # where IEEE 754 rounds to infinity
                want = model.encode(float("inf") if value > 0 else float("-inf"), type_)
            assert model.same(model.encode(value, type_), want, type_), value


@pytest.mark.parametrize(
    ("type_", "number", "bits"),
    # PTX ISA, "Alternate Floating-Point Data Formats", and OCP 8-bit Floating Point Specification, table 1.
    [("e4m3", 448.0, 0x7E), ("e4m3", 2.0**-6, 0x08), ("e4m3", 0.875 * 2.0**-6, 0x07), ("e4m3", 2.0**-9, 0x01)]
    + [("e5m2", 57344.0, 0x7B), ("e5m2", 2.0**-14, 0x04), ("e5m2", 0.75 * 2.0**-14, 0x03), ("e5m2", 2.0**-16, 0x01)]
    + [("bf16", 1.0, 0x3F80), ("bf16", -2.0, 0xC000), ("bf16", 2.0**-133, 0x0001)],
)
def test_the_model_encodes_short_floats(type_: str, number: float, bits: int) -> None:
    assert model.encode(number, type_) == bits and model.decode(bits, type_) == number


def test_predicate_pairs() -> None:
    """`p|q`: q takes the negated comparison, joined with the same c."""
    rng = random.Random(1)
    a, b, c = samples("s32", 32, rng), samples("s32", 32, rng), samples("pred", 32, rng)
    b[:16] = a[:16]
    inputs = {"a": vector(a, "s32"), "b": vector(b, "s32"), "p": vector(c, "pred")}
    for join, negation in itertools.product(("", ".and", ".or", ".xor"), ("", "!")):
        third = f", {negation}p" if join else ""
        body = f".reg .b32 a, b;\n.reg .pred p, q;\nsetp.le{join}.s32 p|q, a, b{third};"
        result = run(body, inputs)
        for lane in range(32):
            holds = model.compare("le", "s32", a[lane], b[lane])
            other = c[lane] ^ (negation == "!")
            want = [model.bitwise(join[1:], x, other) if join else x for x in (holds, 1 - holds)]
            assert [int(result["p"][lane]), int(result["q"][lane])] == want, (join, negation)


@pytest.mark.parametrize(("whole", "piece"), [("b32", "b16"), ("b64", "b32"), ("b64", "b16")])
@pytest.mark.parametrize("uniform", ["vectors", "mixed", "scalars"])
def test_vector_moves(whole: str, piece: str, uniform: str) -> None:
    """Packing puts the first operand lowest, taking apart is its inverse, and `_` takes nothing."""
    rng = random.Random(2)
    count = model.width(whole) // model.width(piece)
    pieces = [samples(piece, 32, rng) for _ in range(count)]
    names = [f"x{n}" for n in range(count)]
    outs = [f"y{n}" for n in range(count)]
    inputs: dict[str, Any] = {name: vector(values, piece) for name, values in zip(names, pieces, strict=True)}
    for n, name in enumerate(names):
        if uniform == "scalars" or (uniform == "mixed" and n % 2):
            inputs[name], pieces[n] = inputs[name][0], pieces[n][:1] * 32
    body = f".reg .{piece} {', '.join(names + outs)};\n.reg .{whole} d;\n"
    body += f"mov.{whole} d, {{{', '.join(names)}}};\nmov.{whole} {{{', '.join(['_', *outs[1:]])}}}, d;"
    result = run(body, inputs)
    for lane in range(32):
        want = sum(values[lane] << (n * model.width(piece)) for n, values in enumerate(pieces))
        assert bits_of(result["d"])[lane] == want
        assert [bits_of(result[name])[lane] for name in outs[1:]] == [values[lane] for values in pieces[1:]]
    assert "y0" not in result


def test_moves_of_constants_and_special_registers() -> None:
    body = """.reg .b32 a, b, f, t, c; .reg .b64 w; .reg .b16 h; .reg .f64 x; .reg .pred p;
    mov.b32 a, -1; mov.b32 b, 0f3FC00000; add.f32 f, b, b; mov.u32 t, %tid.x; mov.u32 c, %ctaid.x;
    mov.b64 w, -2; mov.b16 h, 0x8000; mov.f64 x, 0d3FF8000000000000; mov.pred p, 1;"""
    result = run(body, {})
    assert bits_of(result["a"])[0] == 0xFFFFFFFF
    assert bits_of(result["b"])[0] == 0x3FC00000 and bits_of(result["f"])[0] == 0x40400000
    assert bits_of(result["t"]) == list(range(32)) and bits_of(result["c"])[5] == 7
    assert bits_of(result["w"])[0] == (1 << 64) - 2 and bits_of(result["h"])[0] == 0x8000
    assert result["x"][0] == 1.5 and result["p"].all()


def test_windows() -> None:
    """Generic addresses of shared and local memory: there and back, far apart."""
    windows = set()
    for mnemonic, groups in mnemonics("convert_window_address"):
        if groups["to"]:
            continue
        back = mnemonic.replace("cvta.", "cvta.to.")
        body = f".reg .b64 a, g, b;\n{mnemonic} g, a;\n{back} b, g;"
        offsets = np.array([0, 4, 232448] + [16] * 29, np.uint64)
        result = run(body, {"a": offsets})
        assert (result["b"].view(np.uint64) == offsets).all()
        window = bits_of(result["g"])[0]
        assert [x - window for x in bits_of(result["g"])] == [int(x) for x in offsets]
        assert window > 1 << 47, "no host pointer lies there"
        windows.add((groups["space"].partition(":")[0], window))
    assert len(windows) == 2 and abs(lanes.SHARED_WINDOW - lanes.LOCAL_WINDOW) >= lanes.WINDOW_BYTES


# ---------------------------------------------------------------------- warps

SHUFFLES = [("up", 0), ("down", 31), ("bfly", 31), ("idx", 31), ("up", 24 << 8), ("down", 24 << 8 | 7)]
SHUFFLES += [("bfly", 28 << 8 | 3), ("idx", 24 << 8 | 7), ("idx", 16 << 8 | 31), ("bfly", 12), ("idx", 3)]


@pytest.mark.parametrize("warps", [1, 2, 4])
@pytest.mark.parametrize(("mode", "clamp"), SHUFFLES)
@pytest.mark.parametrize("form", ["constant", "register", "vector"])
def test_shuffle(mode: str, clamp: int, warps: int, form: str) -> None:
    rng = random.Random(3)
    for lane_or_distance in (0, 1, 2, 16, 31, 37):
        values = samples("b32", 32 * warps, rng)
        b = [lane_or_distance] * (32 * warps)
        inputs: dict[str, Any] = {"a": vector(values, "b32")}
        operands = f"{lane_or_distance}, {clamp}"
        if form != "constant":
            if form == "vector":
                b = [rng.randrange(64) for _ in b]
            inputs |= {"b": vector(b, "b32") if form == "vector" else np.uint32(b[0]), "c": np.uint32(clamp)}
            operands = "b, c"
        body = ".reg .b32 d, e, a, b, c;\n.reg .pred p;\n"
        body += f"shfl.sync.{mode}.b32 d|p, a, {operands}, -1;\nshfl.sync.{mode}.b32 e, a, {operands}, 0xffffffff;"
        result = run(body, inputs, lanes=32 * warps)
        assert (result["d"] == result["e"]).all()
        for first in range(0, 32 * warps, 32):
            want = model.shuffle(mode, values[first : first + 32], b[first : first + 32], [clamp] * 32)
            got = zip(bits_of(result["d"])[first : first + 32], bits_of(result["p"])[first : first + 32], strict=True)
            assert list(got) == want, (mode, lane_or_distance, clamp, first)


def test_shuffle_of_scalars_and_single_lanes_is_scalar() -> None:
    snippet = Snippet(".reg .f32 d, a, e, b;\nshfl.sync.idx.b32 d, a, 5, 31, -1;\nshfl.sync.bfly.b32 e, b, 1, 31, -1;")
    values = np.arange(32, dtype=np.float32)
    result = snippet.run({"a": values, "b": np.float32(2)})
    assert result["d"].ndim == 0 and result["d"] == 5
    assert result["e"].ndim == 0 and result["e"] == 2
    two_warps = snippet.run({"a": np.arange(64, dtype=np.float32), "b": np.float32(2)}, lanes=64)
    assert two_warps["d"].tolist() == [5.0] * 32 + [37.0] * 32


EVENS = np.arange(32) % 2 == 0
EVEN_BITS = 0x55555555


def test_shuffle_reads_only_from_executing_lanes() -> None:
    body = ".reg .b32 d, a;\nshfl.sync.bfly.b32 d, a, {distance}, 31, {members};"
    inputs = {"a": np.arange(32, dtype=np.uint32), "d": np.full(32, 99, np.uint32)}
    result = run(body.format(distance=2, members=EVEN_BITS), inputs, mask=EVENS)
    assert bits_of(result["d"]) == [lane ^ 2 if lane % 2 == 0 else 99 for lane in range(32)]
    with pytest.raises(Hazard, match="lane 0 reads through shfl.sync from lane 1, which does not execute it") as hazard:
        run(body.format(distance=1, members=EVEN_BITS), inputs, mask=EVENS)
    assert hazard.value.kind is Kind.WARP_DIVERGENCE


@pytest.mark.parametrize(
    "instruction",
    ["shfl.sync.bfly.b32 d, a, 2, 31, {members};", "vote.sync.any.pred p, q, {members};"]
    + ["vote.sync.ballot.b32 d, q, {members};", "elect.sync d|p, {members};", "redux.sync.add.u32 d, a, {members};"],
)
def test_member_mask_is_who_executes(instruction: str) -> None:
    body = ".reg .b32 d, a;\n.reg .pred p, q;\n" + instruction
    inputs = {"a": np.arange(32, dtype=np.uint32), "q": EVENS}
    run(body.format(members=EVEN_BITS), inputs, mask=EVENS)
    with pytest.raises(Hazard, match="member mask 0xffffffff: lane 1 is named but does not execute it"):
        run(body.format(members=-1), inputs, mask=EVENS)
    with pytest.raises(Hazard, match="member mask 0x55555555: lane 1 executes it but is not named"):
        run(body.format(members=EVEN_BITS), inputs)


def test_vote() -> None:
    for mnemonic, groups in mnemonics("vote"):
        for seed, warps in itertools.product(range(6), (1, 2)):
            rng = random.Random(seed)
            predicates = [rng.random() < (0.0, 0.03, 0.5, 0.97, 1.0, 1.0)[seed] for _ in range(32 * warps)]
            body = f".reg .pred p, q, n;\n{mnemonic} p, q, -1;\n{mnemonic} n, !q, -1;"
            result = run(body, {"q": np.array(predicates)}, lanes=32 * warps)
            for first in range(0, 32 * warps, 32):
                of_warp = [int(p) for p in predicates[first : first + 32]]
                assert set(bits_of(result["p"])[first : first + 32]) == {model.vote(groups["mode"], of_warp)}
                inverted = [1 - p for p in of_warp]
                assert set(bits_of(result["n"])[first : first + 32]) == {model.vote(groups["mode"], inverted)}
        odd_lanes = {"q": ~EVENS}
        some = run(f".reg .pred p, q;\n{mnemonic} p, q, {EVEN_BITS};", odd_lanes, mask=EVENS)
        assert bits_of(some["p"])[0] == model.vote(groups["mode"], [0] * 16), "lanes that do not execute do not count"


def test_ballot() -> None:
    rng = random.Random(4)
    predicates = np.array([rng.random() < 0.5 for _ in range(64)])
    body = ".reg .b32 d, e;\n.reg .pred q, u;\n"
    body += "vote.sync.ballot.b32 d, q, {members};\nvote.sync.ballot.b32 e, u, {members};"
    whole = run(body.format(members=-1), {"q": predicates, "u": np.True_}, lanes=64)
    for first in (0, 32):
        of_warp = {lane: int(predicates[first + lane]) for lane in range(32)}
        assert set(bits_of(whole["d"])[first : first + 32]) == {model.ballot(of_warp)}
    assert set(bits_of(whole["e"])) == {0xFFFFFFFF}
    some = run(body.format(members=EVEN_BITS), {"q": predicates[:32], "u": np.True_}, mask=EVENS)
    assert bits_of(some["d"])[0] == model.ballot({lane: int(predicates[lane]) for lane in range(0, 32, 2)})
    assert bits_of(some["e"])[0] == EVEN_BITS


def test_active_mask() -> None:
    body = ".reg .b32 d;\nactivemask.b32 d;"
    assert set(bits_of(run(body, {}, lanes=64)["d"])) == {0xFFFFFFFF}
    assert bits_of(run(body, {}, mask=EVENS)["d"])[0] == EVEN_BITS
    guarded = run(".reg .b32 d;\n.reg .pred p;\n@p activemask.b32 d;", {"p": np.arange(32) < 4})
    assert bits_of(guarded["d"])[0] == 0xF


@pytest.mark.parametrize("warps", [1, 2])
def test_elect(warps: int) -> None:
    lane = np.arange(32 * warps) % 32
    body = ".reg .b32 d;\n.reg .pred p;\nelect.sync d|p, {members};"
    whole = run(body.format(members=-1), {}, lanes=32 * warps)
    assert set(bits_of(whole["d"])) == {0} and (whole["p"] == (lane == 0)).all()
    some = run(body.format(members=0xFFFFFFE8), {}, lanes=32 * warps, mask=(lane > 4) | (lane == 3))
    executing = (lane > 4) | (lane == 3)
    assert set(some["d"][executing].tolist()) == {3} and (some["p"] == (lane == 3))[executing].all()


@pytest.mark.parametrize("name", ["reduce_integers", "reduce_bits"])
def test_reduce(name: str) -> None:
    rng = random.Random(6)
    for mnemonic, groups in mnemonics(name):
        type_ = groups.get("type", "b32")
        values = samples(type_, 64, rng)
        body = f".reg .b32 d, e, a, u;\n{mnemonic} d, a, {{members}};\n{mnemonic} e, u, {{members}};"
        inputs = {"a": vector(values, type_), "u": vector(values, type_)[7]}
        whole = run(body.format(members=-1), inputs, lanes=64)
        for first in (0, 32):
            want = model.reduce(groups["reduction"], type_, values[first : first + 32])
            assert set(bits_of(whole["d"])[first : first + 32]) == {want}, mnemonic
        assert bits_of(whole["e"])[9] == model.reduce(groups["reduction"], type_, [values[7]] * 32), mnemonic
        some = run(body.format(members=EVEN_BITS), {**inputs, "a": vector(values[:32], type_)}, mask=EVENS)
        assert bits_of(some["d"])[2] == model.reduce(groups["reduction"], type_, values[:32:2]), mnemonic


@pytest.mark.parametrize("type_", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 32])
def test_greater_and_smaller_zeros(type_: type, count: int) -> None:
    """Rows that tiles have too many are zeros: +0 is greater than -0, also where no lane has another number."""
    for a, b in itertools.product((0.0, -0.0), repeat=2):
        operands = np.full(count, a, type_), np.full(count, b, type_)
        assert (np.signbit(lanes.maximum(*operands)) == (np.signbit(a) and np.signbit(b))).all()
        assert (np.signbit(lanes.minimum(*operands)) == (np.signbit(a) or np.signbit(b))).all()


@pytest.mark.parametrize("format_", ["e4m3", "e5m2"])
def test_rounding_to_8_bits_by_a_table_is_rounding(format_: str) -> None:
    """Numbers at, just below and just above every tie, and any others: of all kinds, and the scalars among them."""
    codes = np.sort(lanes.FP8_VALUES[format_][:127][np.isfinite(lanes.FP8_VALUES[format_][:127])]).astype(np.float32)
    ties = (codes[:-1] + codes[1:]) / 2
    near = [codes, ties, *(np.nextafter(x, np.float32(to)) for x in (codes, ties) for to in (-np.inf, np.inf))]
    any_bits = np.random.default_rng(5).integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    least = np.array([1, 0x7F800001, 0xFF800001, 0x7F800000], np.uint32).view(np.float32)  # NaN by the last bit alone
    every = np.concatenate([*near, *(-x for x in near), any_bits, least])
    with np.errstate(all="ignore"):
        wanted = lanes.rounded_to_fp8(every, format_)
        assert (lanes.f32_to_fp8(every, format_) == wanted).all()
        for number, bits in zip(every[::5000], wanted[::5000], strict=True):
            assert lanes.f32_to_fp8(number, format_) == bits


@pytest.mark.parametrize("uniform", [(False, False), (False, True), (True, True)], ids=str)
def test_bytes_that_all_lanes_choose_alike(uniform: tuple[bool, bool]) -> None:
    """The short way to them; in `test_form` lanes choose differently."""
    rng = random.Random(8)
    values = [samples("b32", 32, rng) for _ in uniform]
    a, b = (np.uint32(x[0]) if one else np.array(x, np.uint32) for x, one in zip(values, uniform, strict=True))
    for chosen in (0x5410, 0x7632, 0x3340, 0x0123, 0x7777, 0xF410, *(rng.randrange(1 << 16) for _ in range(40))):
        found = lanes.permute_bytes(a, b, np.uint32(chosen))
        assert found.dtype == np.uint32 and bool(found.ndim) == (not all(uniform))
        for lane in range(32 if found.ndim else 1):
            x, y = (int(v[0] if one else v[lane]) for v, one in zip(values, uniform, strict=True))
            assert int(found[lane] if found.ndim else found) == model.permute(None, x, y, chosen)
