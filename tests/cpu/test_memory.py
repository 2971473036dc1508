"""Loads, stores, matrix loads and stores, and atomics against a scalar model on Python integers and bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from machine import Buffers, Machine, aligned, clean, refused, run

from fa3gen.cpu import forms
from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.isa import memory

COVERED = {
    "load_parameter": "test_parameters",
    "load": "test_load",
    "store": "test_store",
    "load_matrices": "test_load_matrices",
    "store_matrices": "test_store_matrices",
    "atomic": "test_atomic",
    "compare_and_swap": "test_compare_and_swap",
    "reduction": "test_reduction",
    "load_ordered": "test_ctas_hear_of_those_before_them",
    "store_ordered": "test_ctas_hear_of_those_before_them",
}

LANES = 32
TYPES = [f"{kind}{bits}" for kind in "bus" for bits in (8, 16, 32, 64)] + ["f32", "f64"]
# Families of registers in tests/cpu/machine.py by width.
REGISTERS = {16: "%rs", 32: "%r", 64: "%rd"}
SPACES = ("global", "shared", "local")
# Cache operators and hints, which change no value; each space is tried with those that it may have.
LOAD_HINTS = ["", ".ca", ".cg", ".cs", ".lu", ".cv"]
STORE_HINTS = ["", ".wb", ".cg", ".cs", ".wt"]


def test_every_form_is_tested() -> None:
    names = {form.emit.__name__ for form in forms.forms() if form.emit.__module__ == memory.__name__}
    assert names == set(COVERED), "give each form of fa3gen/cpu/isa/memory.py a test"
    assert all(test in globals() for test in COVERED.values())


def bits(type_: str) -> int:
    return int(type_[1:])


def random_bytes(count: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(count)


def filled(data: bytes) -> Any:
    """An aligned buffer that holds `data`."""
    buffer = aligned((len(data),), np.uint8)
    buffer[:] = np.frombuffer(data, np.uint8)
    return buffer


def extended(data: bytes, type_: str, register_bits: int) -> int:
    """What a register holds after a load of `data` (PTX ISA, "Operand Size Exceeding Instruction-Type Size")."""
    return int.from_bytes(data, "little", signed=type_[0] == "s") & ((1 << register_bits) - 1)


# ---------------------------------------------------------------------- where the elements are

AREA = 512  # bytes that the lanes share, or that a lane has in local memory
COPY_IN = {
    "global": "mov.b64 %rd1, %data;",
    "shared": f"""
        mov.b32 %r1, 0;
    copy_in:
        shl.b32 %r2, %t, 4; add.u32 %r2, %r2, %r1; cvt.u64.u32 %rd2, %r2; add.u64 %rd2, %rd2, %data;
        ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd2];
        add.u32 %r2, %r2, %s;
        st.shared.v4.b32 [%r2], {{%r4, %r5, %r6, %r7}};
        add.u32 %r1, %r1, 512; setp.lt.u32 %p1, %r1, {AREA};
        @%p1 bra copy_in;
        bar.sync 0;
        cvt.u64.u32 %rd1, %s;
    """,
    "local": f"""
        .local .align 16 .b8 frame[{AREA}];
        mov.b64 %rd1, frame; mov.b32 %r1, 0;
    copy_in:
        cvt.u64.u32 %rd2, %r1; add.u64 %rd3, %rd2, %data; add.u64 %rd4, %rd2, %rd1;
        ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd3];
        st.local.v4.b32 [%rd4], {{%r4, %r5, %r6, %r7}};
        add.u32 %r1, %r1, 16; setp.lt.u32 %p1, %r1, {AREA};
        @%p1 bra copy_in;
    """,
}


def place(lane: int, size: int, step: int = 5) -> int:
    """The byte that a lane accesses: another one for each, in no simple order."""
    return (lane * step + 3) % LANES * size


def spelled(space: str, number: int) -> str:
    """Both names of the shared window in turn."""
    return "shared::cta" if space == "shared" and number % 3 == 0 else space


def vector(registers: list[str]) -> str:
    return registers[0] if len(registers) == 1 else "{" + ", ".join(registers) + "}"


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_load(space: str, count: int) -> None:
    """All types and wider registers; addresses by lane, one for all lanes, and under a predicate."""
    data = random_bytes(AREA, seed=count)
    body = [COPY_IN[space], "and.b32 %r1, %t, 1; setp.eq.u32 %p2, %r1, 1;"]
    suffix = "" if count == 1 else f".v{count}"
    expected: list[list[int]] = [[] for _ in range(LANES)]
    number = 0
    for type_ in TYPES:
        size = bits(type_) // 8 * count
        if size > 16:
            continue  # such accesses came with sm_100
        for width, family in REGISTERS.items():
            if width < bits(type_) or (type_[0] == "f" and width != bits(type_)):
                continue
            hint = LOAD_HINTS[number % len(LOAD_HINTS)] if space == "global" else ""
            registers = [f"{family}{40 + item}" for item in range(count)]
            keep = 0x5A5A
            load = f"ld.{spelled(space, number)}{hint}{suffix}.{type_} {vector(registers)}"
            for mode in ("lanes", "one", "predicate"):
                address = "%rd3" if mode != "one" else "%rd1"
                body += [f"mov.b{width} {register}, {keep};" for register in registers]
                body += [f"mul.lo.u32 %r1, %t, 5; add.u32 %r1, %r1, 3; and.b32 %r1, %r1, {LANES - 1};"]
                body += [f"mad.wide.u32 %rd3, %r1, {size}, %rd1;"]
                body += [f"{'@%p2 ' if mode == 'predicate' else ''}{load}, [{address}];"]
                for item, register in enumerate(registers):
                    body += [
                        f"mad.wide.u32 %rd4, %t, 8, %out; st.global.b{width} [%rd4+{number * 8 * LANES}], {register};"
                    ]
                    for lane in range(LANES):
                        at = (0 if mode == "one" else place(lane, size)) + item * bits(type_) // 8
                        value = extended(data[at : at + bits(type_) // 8], type_, width)
                        expected[lane].append(keep if mode == "predicate" and lane % 2 == 0 else value)
                    number += 1
    out = run("\n".join(body), buffers={"data": filled(data), "out": aligned((number, LANES), np.uint64)}, shared=AREA)
    assert out["out"].T.tolist() == expected


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_store(space: str, count: int) -> None:
    """The low bits of registers reach the bytes of each lane, and no others."""
    data = random_bytes(AREA, seed=10 + count)
    suffix = "" if count == 1 else f".v{count}"
    number = 0
    for type_ in TYPES:
        size = bits(type_) // 8 * count
        for width, family in REGISTERS.items():
            if size > 16 or width < bits(type_) or (type_[0] == "f" and width != bits(type_)):
                continue
            hint = STORE_HINTS[number % len(STORE_HINTS)] if space == "global" else ""
            number += 1
            predicate = "@%p2 " if number % 2 else ""
            registers = [f"{family}{40 + item}" for item in range(count)]
            body = [COPY_IN[space], "and.b32 %r1, %t, 1; setp.eq.u32 %p2, %r1, 1;"]
            body += [f"mad.wide.u32 %rd2, %t, {8 * count}, %values;"]
            body += [f"ld.global.b{width} {register}, [%rd2+{8 * item}];" for item, register in enumerate(registers)]
            body += [f"mul.lo.u32 %r1, %t, 5; add.u32 %r1, %r1, 3; and.b32 %r1, %r1, {LANES - 1};"]
            body += [f"mad.wide.u32 %rd3, %r1, {size}, %rd1;"]
            body += [f"{predicate}st.{spelled(space, number)}{hint}{suffix}.{type_} [%rd3], {vector(registers)};"]
            generator = random.Random(number)
            values = [generator.getrandbits(64) for _ in range(LANES * count)]
            area = bytearray(data)
            for lane in range(LANES):
                if predicate and lane % 2 == 0:
                    continue
                for item in range(count):
                    at = place(lane, size) + item * bits(type_) // 8
                    low = values[lane * count + item] & ((1 << bits(type_)) - 1)
                    area[at : at + bits(type_) // 8] = low.to_bytes(bits(type_) // 8, "little")
            after = _area_after("\n".join(body), space, data, np.array(values, np.uint64))
            if space == "local":  # each lane has changed its own bytes only
                for lane in range(LANES):
                    own, at = bytearray(data), place(lane, size)
                    own[at : at + size] = area[at : at + size]
                    assert after[lane * AREA : (lane + 1) * AREA] == bytes(own), (type_, width, lane)
            else:
                assert after == bytes(area), (type_, width)


def _area_after(body: str, space: str, data: bytes, values: Any) -> bytes:
    """The bytes that the lanes share after some stores; for local memory those of each lane."""
    buffers: Buffers = {"data": filled(data), "values": values}
    if space == "global":
        return run(body, buffers=buffers)["data"].tobytes()
    buffers["out"] = aligned((AREA * (LANES if space == "local" else 1),), np.uint8)
    own = f"mul.wide.u32 %rd5, %t, {AREA if space == 'local' else 16}; add.u64 %rd5, %rd5, %out;"
    first = "mov.b32 %r3, 0;" if space == "local" else "shl.b32 %r3, %t, 4;"
    step = 16 if space == "local" else 512
    copy_out = f"""
        bar.sync 0;
        {own} {first}
    copy_out:
        cvt.u64.u32 %rd6, %r3; add.u64 %rd6, %rd6, %rd1;
        ld.{space}.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd6];
        st.global.v4.b32 [%rd5], {{%r4, %r5, %r6, %r7}};
        add.u32 %r3, %r3, {step}; add.u64 %rd5, %rd5, {step}; setp.lt.u32 %p1, %r3, {AREA};
        @%p1 bra copy_out;
    """
    return run(body + copy_out, buffers=buffers, shared=AREA)["out"].tobytes()


@pytest.mark.parametrize(
    "mnemonic",
    ["ld.weak.global.nc.b32", "ld.volatile.shared.b32", "ld.global.nc.L1::no_allocate.b32", "ld.global.L2::128B.b32"]
    + ["ld.global.L1::evict_last.b32", "ld.global.L1::evict_first.L2::256B.b32", "ld.weak.shared::cta.b32"],
)
def test_hints_change_no_value(mnemonic: str) -> None:
    space = "shared" if "shared" in mnemonic else "global"
    data = random_bytes(AREA, seed=3)
    body = f"{COPY_IN[space]}\n mad.wide.u32 %rd3, %t, 4, %rd1; {mnemonic} %r9, [%rd3];"
    body += " mad.wide.u32 %rd4, %t, 4, %out; st.weak.global.L1::no_allocate.b32 [%rd4], %r9;"
    buffers = {"data": filled(data), "out": aligned((LANES,), np.uint32)}
    assert run(body, buffers=buffers, shared=AREA)["out"].tobytes() == data[: 4 * LANES]


def test_parameters() -> None:
    """Scalars and vectors from within a parameter of bytes, widened as the register asks."""
    data = random_bytes(128, seed=4)
    loads = [("b32", "%r1", 32, 8), ("s16", "%r2", 32, 10), ("u8", "%rs3", 16, 13), ("s8", "%rd4", 64, 13)]
    loads += [("b64", "%rd5", 64, 16), ("f32", "%f6", 32, 24), ("f64", "%rd7", 64, 32)]
    body, expected = [], []
    for number, (type_, register, width, offset) in enumerate(loads):
        body += [
            f"ld.param.{type_} {register}, [box_map+{offset}]; st.global.b{width} [%out+{8 * number}], {register};"
        ]
        expected.append(extended(data[offset : offset + bits(type_) // 8], type_, width))
    body += [
        "ld.param.v4.b32 {%r8, %r9, %r10, %r11}, [box_map+48]; st.global.v4.b32 [%out+64], {%r8, %r9, %r10, %r11};"
    ]
    body += ["ld.param.v2.b64 {%rd8, %rd9}, [box_map+64]; st.global.v2.b64 [%out+80], {%rd8, %rd9};"]
    out = aligned((12,), np.uint64)
    data = struct.pack("<Q", out.ctypes.data) + data[8:]
    after = run("\n".join(body), buffers={"out": out}, maps={"box": data})["out"]
    assert after[: len(loads)].tolist() == expected
    assert after[8:].tobytes() == data[48:80]
    refused("ld.param.b64 %rd1, [out_address+4];", Kind.OUT_OF_BOUNDS, "bytes 4 to 12 of 8", buffers={"out": out})


# ---------------------------------------------------------------------- ldmatrix, stmatrix


def fragment(matrix: list[list[int]], lane: int, transpose: bool) -> int:
    """The register of a lane: two neighbours of row lane / 4 of an 8 x 8 matrix (PTX ISA, "ldmatrix")."""
    row, column = lane // 4, 2 * (lane % 4)
    pair = [matrix[column + i][row] if transpose else matrix[row][column + i] for i in range(2)]
    return pair[1] << 16 | pair[0]


def matrix_rows(seed: int) -> tuple[bytes, list[int]]:
    """4096 random bytes, and for each lane the place of its row there: 16 bytes, no two the same."""
    places = random.Random(seed).sample(range(256), LANES)
    return random_bytes(4096, seed), [16 * place for place in places]


def row_elements(data: bytes, at: int) -> list[int]:
    return list(struct.unpack_from("<8H", data, at))


FILL_SHARED = """
    mov.b32 %r1, 0;
fill:
    shl.b32 %r2, %t, 4; add.u32 %r2, %r2, %r1; cvt.u64.u32 %rd2, %r2; add.u64 %rd2, %rd2, %data;
    ld.global.v4.b32 {%r4, %r5, %r6, %r7}, [%rd2];
    add.u32 %r2, %r2, %s;
    st.shared.v4.b32 [%r2], {%r4, %r5, %r6, %r7};
    add.u32 %r1, %r1, 512; setp.lt.u32 %p1, %r1, 4096;
    @%p1 bra fill;
    bar.sync 0;
    mad.wide.u32 %rd3, %t, 4, %rows; ld.global.b32 %r8, [%rd3]; add.u32 %r8, %r8, %s;
"""


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_load_matrices(count: int, transpose: bool) -> None:
    data, rows = matrix_rows(seed=count)
    space = spelled("shared", count - 1)
    registers = [f"%r{40 + item}" for item in range(count)]
    body = FILL_SHARED + f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * transpose}.{space}.b16 "
    body += f"{{{', '.join(registers)}}}, [%r8];\n"
    for item, register in enumerate(registers):
        body += f"mad.wide.u32 %rd4, %t, 4, %out; st.global.b32 [%rd4+{128 * item}], {register};\n"
    buffers = {"data": filled(data), "rows": np.array(rows, np.uint32), "out": aligned((count, LANES), np.uint32)}
    after = run(body, buffers=buffers, shared=4096)["out"]
    for item in range(count):
        matrix = [row_elements(data, rows[8 * item + row]) for row in range(8)]
        assert after[item].tolist() == [fragment(matrix, lane, transpose) for lane in range(LANES)]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_store_matrices(count: int, transpose: bool) -> None:
    data, rows = matrix_rows(seed=10 + count)
    space = spelled("shared", count - 1)
    generator = random.Random(count)
    matrices = [[[generator.randrange(1 << 16) for _ in range(8)] for _ in range(8)] for _ in range(count)]
    values = [[fragment(matrix, lane, transpose) for lane in range(LANES)] for matrix in matrices]
    registers = [f"%r{40 + item}" for item in range(count)]
    body = FILL_SHARED
    for item, register in enumerate(registers):
        body += f"mad.wide.u32 %rd4, %t, 4, %values; ld.global.b32 {register}, [%rd4+{128 * item}];\n"
    body += (
        f"stmatrix.sync.aligned.m8n8.x{count}{'.trans' * transpose}.{space}.b16 [%r8], {{{', '.join(registers)}}};\n"
    )
    body += """
        bar.sync 0; mov.b32 %r1, 0;
    empty:
        shl.b32 %r2, %t, 4; add.u32 %r2, %r2, %r1; cvt.u64.u32 %rd2, %r2; add.u64 %rd2, %rd2, %data;
        add.u32 %r2, %r2, %s;
        ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2];
        st.global.v4.b32 [%rd2], {%r4, %r5, %r6, %r7};
        add.u32 %r1, %r1, 512; setp.lt.u32 %p1, %r1, 4096;
        @%p1 bra empty;
    """
    buffers = {"data": filled(data), "rows": np.array(rows, np.uint32), "values": np.array(values, np.uint32)}
    expected = bytearray(data)
    for item, matrix in enumerate(matrices):
        for row in range(8):
            at = rows[8 * item + row]
            expected[at : at + 16] = struct.pack("<8H", *matrix[row])
    assert run(body, buffers=buffers, shared=4096)["data"].tobytes() == bytes(expected)


# ---------------------------------------------------------------------- atomics

Operation = Callable[[int, int], int]
OPERATIONS: dict[str, Operation] = {
    "add": lambda old, value: old + value,
    "min": min,
    "max": max,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "inc": lambda old, value: 0 if old >= value else old + 1,
    "dec": lambda old, value: value if old == 0 or old > value else old - 1,
}
# The types of each operation (PTX ISA, "atom").
ATOMICS = [(operation, type_) for operation in ("and", "or", "xor", "exch") for type_ in ("b32", "b64")]
ATOMICS += [(operation, type_) for operation in ("min", "max") for type_ in ("u32", "s32", "u64", "s64")]
ATOMICS += [("add", type_) for type_ in ("u32", "s32", "u64", "f32")] + [("inc", "u32"), ("dec", "u32")]
PLACES = 8  # elements, each of which four lanes change


def changed(operation: str, type_: str, old: int, value: int) -> int:
    """The bits of an element after an atomic operation."""
    if type_ == "f32":
        first, second = (struct.unpack("<f", struct.pack("<I", x))[0] for x in (old, value))
        found: int = struct.unpack("<I", np.float32(first + second).tobytes())[0]
        return found
    width = bits(type_)
    if type_[0] == "s":
        old, value = (x - (1 << width) if x >> (width - 1) else x for x in (old, value))
    return OPERATIONS[operation](old, value) & ((1 << width) - 1)


def atomic_values(operation: str, type_: str, seed: int) -> tuple[list[int], list[int]]:
    """Elements before, and the operand of each lane."""
    generator = random.Random(seed)
    if type_ == "f32":
        numbers = [generator.uniform(-4, 4) for _ in range(PLACES + LANES)]
        drawn = [struct.unpack("<I", struct.pack("<f", number))[0] for number in numbers]
    elif operation in ("inc", "dec"):
        drawn = [generator.randrange(4) for _ in range(PLACES + LANES)]
    else:
        drawn = [generator.randrange(1 << bits(type_)) for _ in range(PLACES + LANES)]
    return drawn[:PLACES], drawn[PLACES:]


def run_atomic(
    instruction: str, type_: str, before: list[int], operands: list[list[int]]
) -> tuple[list[int], list[int]]:
    """(old values, elements afterwards) of an instruction on element t % 8, [%rd9]; lanes 5 and 6 do not execute it.

    In shared memory for an instruction that says so. The operands are in %x0 and %x1, the old value in %old.
    """
    width = bits(type_)
    dtype = np.uint32 if width == 32 else np.uint64
    shared = ".shared" in instruction
    element = f"mad.wide.u32 %rd1, %t, {width // 8}, %memory; cvt.u64.u32 %rd2, %s; "
    element += f"mad.wide.u32 %rd2, %t, {width // 8}, %rd2;"
    body = [f".reg .b{width} %old, %x0, %x1; mov.b{width} %old, 0; {element} setp.lt.u32 %p1, %t, {PLACES};"]
    if shared:
        body += [f"@%p1 ld.global.b{width} %x0, [%rd1]; @%p1 st.shared.b{width} [%rd2], %x0; bar.sync 0;"]
    for number in range(len(operands)):
        body += [f"mad.wide.u32 %rd3, %t, {width // 8}, %operand{number}; ld.global.b{width} %x{number}, [%rd3];"]
    body += [f"and.b32 %r1, %t, {PLACES - 1};"]
    base = "cvt.u64.u32 %rd8, %s;" if shared else "mov.b64 %rd8, %memory;"
    body += [f"{base} mad.wide.u32 %rd9, %r1, {width // 8}, %rd8;"]
    body += ["add.u32 %r2, %t, -5; setp.gt.u32 %p2, %r2, 1;"]
    body += [f"@%p2 {instruction}"]
    body += [f"bar.sync 0; mad.wide.u32 %rd4, %t, {width // 8}, %out; st.global.b{width} [%rd4], %old;"]
    if shared:
        body += [f"@%p1 ld.shared.b{width} %x0, [%rd2]; @%p1 st.global.b{width} [%rd1], %x0;"]
    buffers: Buffers = {"memory": np.array(before, dtype), "out": np.zeros(LANES, dtype)}
    buffers |= {f"operand{number}": np.array(values, dtype) for number, values in enumerate(operands)}
    after = run("\n".join(body), buffers=buffers)
    return after["out"].tolist(), after["memory"].tolist()


def expected_atomic(before: list[int], change: Callable[[int, int], int]) -> tuple[list[int], list[int]]:
    """As `run_atomic`, one lane after the other; `change(lane, old)` is the new value."""
    elements, olds = list(before), []
    for lane in range(LANES):
        if lane in (5, 6):
            olds.append(0)
            continue
        olds.append(elements[lane % PLACES])
        elements[lane % PLACES] = change(lane, olds[-1])
    return olds, elements


# Semantics and scopes change nothing in one CTA; they are tried in turn.
ATOMIC_SPACES = {
    "global": ["global", "gpu.global", "relaxed.sys.global", "relaxed.global"],
    "shared": ["shared", "cta.shared", "relaxed.gpu.shared::cta"],
}


def atomic_space(space: str, number: int) -> str:
    return ATOMIC_SPACES[space][number % len(ATOMIC_SPACES[space])]


@pytest.mark.parametrize("space", ATOMIC_SPACES)
def test_atomic(space: str) -> None:
    for number, (operation, type_) in enumerate(ATOMICS):
        before, values = atomic_values(operation, type_, seed=number)
        found = run_atomic(
            f"atom.{atomic_space(space, number)}.{operation}.{type_} %old, [%rd9], %x0;", type_, before, [values]
        )
        assert found == expected_atomic(
            before, lambda lane, old, op=operation, of=type_, by=values: changed(op, of, old, by[lane])
        ), (operation, type_)


@pytest.mark.parametrize("space", ATOMIC_SPACES)
def test_reduction(space: str) -> None:
    for number, (operation, type_) in enumerate(ATOMICS):
        if operation == "exch":
            continue  # red has no exch
        before, values = atomic_values(operation, type_, seed=100 + number)
        found = run_atomic(
            f"red.{atomic_space(space, number)}.{operation}.{type_} [%rd9], %x0;", type_, before, [values]
        )
        _, elements = expected_atomic(
            before, lambda lane, old, op=operation, of=type_, by=values: changed(op, of, old, by[lane])
        )
        assert found == ([0] * LANES, elements), (operation, type_)


@pytest.mark.parametrize("space", ATOMIC_SPACES)
@pytest.mark.parametrize("type_", ["b32", "b64"])
def test_compare_and_swap(space: str, type_: str) -> None:
    generator = random.Random(5)
    before = [generator.randrange(3) for _ in range(PLACES)]
    compare, values = ([generator.randrange(3) for _ in range(LANES)] for _ in range(2))
    expected = expected_atomic(before, lambda lane, old: values[lane] if old == compare[lane] else old)
    for spelling in ATOMIC_SPACES[space]:
        instruction = f"atom.{spelling}.cas.{type_} %old, [%rd9], %x0, %x1;"
        assert run_atomic(instruction, type_, before, [compare, values]) == expected


def test_atomics_of_several_warps_add_up() -> None:
    """No order of the warps loses an addition."""
    body = """
        setp.eq.u32 %p1, %t, 0; mov.b32 %r1, 0;
        @%p1 st.shared.b32 [%s], %r1;
        bar.sync 0;
        atom.shared.add.u32 %r2, [%s], %t;
        red.global.add.u32 [%out], %t;
        bar.sync 0;
        ld.shared.b32 %r3, [%s];
        @%p1 st.global.b32 [%out+4], %r3;
    """
    after = clean(body, threads=128, buffers={"out": np.zeros(2, np.uint32)})["out"]
    assert after.tolist() == [sum(range(128))] * 2


# ---------------------------------------------------------------------- what threads see of each other


def test_a_lane_reads_its_own_write() -> None:
    """A store is seen by the loads of its lane at once, whatever their width."""
    body = """
        mad.wide.u32 %rd1, %t, 8, %out; shl.b32 %r1, %t, 3; add.u32 %r1, %r1, %s;
        st.shared.b32 [%r1], %t; st.shared.b32 [%r1+4], %lane;
        ld.shared.b64 %rd2, [%r1]; st.global.b64 [%rd1], %rd2;
    """
    after = clean(body, threads=64, buffers={"out": aligned((64, 2), np.uint32)})["out"]
    assert after.tolist() == [[thread, thread % 32] for thread in range(64)]


def test_local_memory_belongs_to_a_thread() -> None:
    body = """
        .local .align 8 .b8 frame[16];
        mov.b64 %rd1, frame; st.local.b32 [%rd1+8], %t; bar.sync 0;
        ld.local.b32 %r1, [%rd1+8]; mad.wide.u32 %rd2, %t, 4, %out; st.global.b32 [%rd2], %r1;
    """
    assert clean(body, threads=96, buffers={"out": aligned((96,), np.uint32)})["out"].tolist() == list(range(96))


def test_each_cta_has_its_own_shared_memory() -> None:
    """What one CTA wrote is not initialised in the next."""
    body = "setp.eq.u32 %p1, %t, 0; mov.u32 %r2, %ctaid.x; setp.eq.u32 %p2, %r2, 0; and.pred %p1, %p1, %p2;"
    body += "\n@%p1 st.shared.b32 [%s], %t;\nbar.sync 0;\nld.shared.b32 %r1, [%s];"
    machine = Machine(body)
    machine.run()
    machine.grid = (2, 1, 1)
    with pytest.raises(Hazard) as report:
        machine.run()
    assert report.value.kind is Kind.UNINITIALISED_READ and report.value.place.cta == (1, 0, 0)


# ---------------------------------------------------------------------- acquire and release

# Each CTA waits until the word before its own is set, and sets its own to one more; CTA 0 finds a 1.
CHAIN = """mov.u32 %r1, %ctaid.x; mad.wide.u32 %rd1, %r1, 4, %words;
spin:
ld.ACQUIRE.global.b32 %r2, [%rd1+FROM];
setp.eq.u32 %p1, %r2, 0;
@%p1 bra spin;
add.u32 %r2, %r2, 1;
st.RELEASE.global.b32 [%rd1+4], %r2;
"""


@pytest.mark.parametrize(("load", "store"), [("acquire.gpu", "release.gpu"), ("relaxed.sys", "relaxed.sys")])
def test_ctas_hear_of_those_before_them(load: str, store: str) -> None:
    body = CHAIN.replace("ACQUIRE", load).replace("RELEASE", store).replace("FROM", "0")
    words = np.array([1, 0, 0, 0], np.uint32)
    assert clean(body, grid=(3, 1, 1), buffers={"words": words})["words"].tolist() == [1, 2, 3, 4]


def test_a_cta_that_waits_for_a_later_one_waits_for_ever() -> None:
    body = CHAIN.replace("ACQUIRE", "acquire.gpu").replace("RELEASE", "release.gpu").replace("FROM", "8")
    words = np.array([1, 0, 0, 0, 0], np.uint32)
    refused(body, Kind.DEADLOCK, "lower numbers only", grid=(3, 1, 1), buffers={"words": words}, count=3)


def test_who_waits_for_a_warp_of_its_own_cta_waits_as_long_as_it_takes() -> None:
    """Warp 0 looks many times while warp 1 is still at work; what it does is no progress, until it stores."""
    body = """
    setp.eq.u32 %p2, %warp, 0;
    @!%p2 bra work;
    spin:
    ld.acquire.gpu.global.b32 %r2, [%words];
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra spin;
    bra end;
    work:
    mov.u32 %r3, 50;
    again:
    sub.u32 %r3, %r3, 1;
    setp.ne.u32 %p3, %r3, 0;
    @%p3 bra again;
    st.release.gpu.global.b32 [%words], 7;
    end:
    """
    assert clean(body, threads=64, buffers={"words": np.zeros(1, np.uint32)})["words"].tolist() == [7]
