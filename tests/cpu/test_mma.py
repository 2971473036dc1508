"""mma.sync: fragments element by element as the PTX ISA places them, sums in both modes, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from machine import Buffers, Machine, clean, refused
from test_wgmma import FIRST, M, Operand, Product, encoded, group_settings, two_products

from fa3gen.cpu import forms
from fa3gen.cpu.findings import Kind, OutsideModel
from fa3gen.cpu.isa import matrix
from fa3gen.cpu.ptx import PtxError
from fa3gen.cpu.tensor_core import add_products

COVERED = {"warp_product": "test_every_place"}

ROWS, COLUMNS, DEPTH = 16, 8, 16
WARPS = 5  # a warpgroup, and one warp of the next
THREADS = 32 * WARPS
A = "{%r10, %r11, %r12, %r13}"
B = "{%r20, %r21}"
C = "{%r30, %r31, %r32, %r33}"
D = "{%r40, %r41, %r42, %r43}"
OTHER = "{%r50, %r51, %r52, %r53}"


def test_every_form_is_tested() -> None:
    names = {form.emit.__name__ for form in forms.forms() if form.emit.__module__ == matrix.__name__}
    assert names == set(COVERED), "give each form of fa3gen/cpu/isa/matrix.py a test"
    assert all(test in globals() for test in COVERED.values())


# ---------------------------------------------------------------------- fragments

# (row, column) of element i of a lane's fragment, in the words of the PTX ISA, "Matrix Fragments for mma.m16n8k16 with
# floating point type": groupID is lane / 4, threadID_in_group is lane % 4.


def place_of_a(lane: int, i: int) -> tuple[int, int]:
    row = lane // 4 if 0 <= i < 2 or 4 <= i < 6 else lane // 4 + 8
    return row, lane % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)


def place_of_b(lane: int, i: int) -> tuple[int, int]:
    return lane % 4 * 2 + (i & 1) + (8 if i >= 2 else 0), lane // 4


def place_of_c(lane: int, i: int) -> tuple[int, int]:
    return lane // 4 + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)


def buffers(a: np.ndarray, b: np.ndarray, c: np.ndarray, type_: str) -> Buffers:
    """Registers, (4 or 2, threads), of A (warps, 16, 16), B (warps, 16, 8) and C (warps, 16, 8)."""
    found = {"a": np.zeros((4, THREADS), np.uint32), "b": np.zeros((2, THREADS), np.uint32)}
    for name, matrices, place in (("a", a, place_of_a), ("b", b, place_of_b)):
        bits = encoded(matrices, type_)
        for (register, thread), _ in np.ndenumerate(found[name]):
            low, high = (int(bits[thread // 32][place(thread % 32, 2 * register + half)]) for half in (0, 1))
            found[name][register, thread] = high << 16 | low
    return {**found, "c": accumulators(c), "d": np.zeros((4, THREADS), np.float32)}


def accumulators(c: np.ndarray) -> np.ndarray:
    """Registers, (4, threads), of C or D."""
    places = [[place_of_c(lane, register) for lane in range(32)] for register in range(4)]
    return np.array([[one[place] for one in c for place in row] for row in places], np.float32)


# ---------------------------------------------------------------------- kernels


def product(type_: str, d: str = D, c: str = C) -> str:
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{type_}.{type_}.f32 {d}, {A}, {B}, {c};"


def move(registers: str, buffer: str, action: str) -> str:
    """Load or store registers, one row of the buffer each."""
    lines = [f"mad.wide.u32 %rd5, %t, 4, %{buffer};"]
    for row, name in enumerate(registers.strip("{}").split(", ")):
        place = f"[%rd5+{4 * THREADS * row}]"
        lines.append(f"ld.global.b32 {name}, {place};" if action == "load" else f"st.global.b32 {place}, {name};")
    return "\n".join(lines)


LOADS = "\n".join(move(registers, buffer, "load") for registers, buffer in ((A, "a"), (B, "b"), (C, "c")))


def kernel(type_: str) -> str:
    return "\n".join([LOADS, product(type_), move(D, "d", "store")])


def normal(type_: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A and B of numbers that their type has, and C."""
    generator = np.random.default_rng(seed)
    shapes = (ROWS, DEPTH), (DEPTH, COLUMNS), (ROWS, COLUMNS)
    a, b, c = (generator.standard_normal((WARPS, *shape)).astype(np.float32) for shape in shapes)
    if type_ == "f16":
        return a.astype(np.float16).astype(np.float32), b.astype(np.float16).astype(np.float32), c
    return *((x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for x in (a, b)), c


# ---------------------------------------------------------------------- tests of the numbers


@pytest.mark.parametrize("type_", ["bf16", "f16"])
def test_every_place(type_: str) -> None:
    """One column of A and one row of B at a time: an element of D tells its row, column and warp, and the rest is 0."""
    a, b, c = (np.zeros((WARPS, *shape)) for shape in ((ROWS, DEPTH), (DEPTH, COLUMNS), (ROWS, COLUMNS)))
    machine = Machine(kernel(type_), threads=THREADS, buffers=buffers(a, b, c, type_))
    for k in range(DEPTH):
        a[:], b[:] = 0, 0
        a[:, :, k] = np.arange(WARPS * ROWS).reshape(WARPS, ROWS) + 1
        b[:, k] = np.arange(COLUMNS) + 1
        c[:] = np.arange(c.size).reshape(c.shape) + 1000 * k
        machine.buffers = buffers(a, b, c, type_)
        assert (machine.run()["d"] == accumulators(a @ b + c)).all(), k


@pytest.mark.parametrize("sums", ["float32", "tensor_core"])
@pytest.mark.parametrize("type_", ["bf16", "f16"])
def test_sums(type_: str, sums: str) -> None:
    """As wgmma adds them; both close to float64."""
    a, b, c = normal(type_, seed=3)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    if sums == "float32":
        wanted = c + exact.astype(np.float32)
    else:
        types = type_, type_
        wanted = np.stack(
            [add_products(x, y.T, z, types=types, accumulator="f32") for x, y, z in zip(a, b, c, strict=True)]
        )
        assert (wanted != c + exact.astype(np.float32)).any(), "or the test would not tell the two modes apart"
    found = clean(kernel(type_), count=4, threads=THREADS, buffers=buffers(a, b, c, type_), sums=sums)["d"]
    assert found.tobytes() == accumulators(wanted).tobytes()
    assert np.abs(found - accumulators(c + exact)).max() < 4e-6


def test_accumulators_are_passed_on() -> None:
    """In place, and to other registers; the instruction reads all before it writes."""
    a, b, c = (np.round(2 * x) / 2 for x in normal("bf16", seed=4))  # exact in float32, whatever the order
    body = "\n".join([LOADS, product("bf16", C, C), product("bf16", D, C), product("bf16", D, D)])
    body += move(D, "d", "store")
    given = buffers(a, b, c, "bf16")
    assert (clean(body, count=4, threads=THREADS, buffers=given)["d"] == accumulators(3 * (a @ b) + c)).all()


@pytest.mark.parametrize("type_", ["bf16", "f16"])
@pytest.mark.parametrize("sums", ["float32", "tensor_core"])
def test_products_in_a_row(type_: str, sums: str) -> None:
    """Those that need no result of one before are computed together; each has the bits that it has alone."""
    a, b, c = normal(type_, seed=7)
    settings = {"count": 2, "threads": THREADS, "buffers": buffers(a, b, c, type_), "sums": sums}

    def found(lines: list[str], registers: str) -> bytes:
        body = "\n".join([LOADS, *lines, move(registers, "d", "store")])
        return clean(body, **settings)["d"].tobytes()

    turned = product(type_, OTHER).replace(A, "{%r11, %r10, %r13, %r12}")  # two halves of the rows of A changed places
    row, between = [product(type_), turned, product(type_, D, D), product(type_, A)], "mov.b32 %r60, 0;"
    apart = [line for one in row for line in (one, between)]
    assert found(row, OTHER) == found([turned], OTHER) != found([product(type_, OTHER)], OTHER)
    assert found(row, D) == found(apart, D) != found([product(type_)], D)
    assert found(row, A) == found(apart, A) == found([product(type_)], D)


def test_registers_that_all_lanes_agree_on() -> None:
    """They are held as scalars: 16 products of 1 and 2, and 3."""
    ones, twos = 0x3F803F80, 0x40004000
    moves = [f"mov.b32 %r{10 + i}, {ones};" for i in range(4)] + [f"mov.b32 %r{20 + i}, {twos};" for i in range(2)]
    moves += [f"mov.b32 %r{30 + i}, 0f40400000;" for i in range(4)]
    body = "\n".join([*moves, product("bf16"), move(D, "d", "store")])
    after = clean(body, count=2, threads=THREADS, buffers={"d": np.zeros((4, THREADS), np.float32)})["d"]
    assert (after == 35).all()


# ---------------------------------------------------------------------- what is reported and refused


@pytest.mark.parametrize("guard", ["@%p1 ", "@%p1 bra end;\n"])
def test_all_lanes_have_to_come(guard: str) -> None:
    a, b, c = normal("bf16", seed=5)
    body = f"{LOADS}\nsetp.lt.u32 %p1, %lane, 31;\n{guard}{product('bf16')}\nend:"
    words = "mma.sync is executed by some lanes of a warp only"
    settings = {"threads": THREADS, "buffers": buffers(a, b, c, "bf16")}
    refused(body, Kind.WARP_DIVERGENCE, words, at="mma.sync", count=3, **settings)
    clean(body.replace("%lane, 31", "%lane, 0" if "bra" in guard else "%lane, 32"), count=3, **settings)


@pytest.mark.parametrize("before", ["", product("bf16", OTHER).replace("%r21", "%r20") + "\n"])
def test_a_register_without_a_value(before: str) -> None:
    """The report names the product, also where one before it is computed with it."""
    a, b, c = normal("bf16", seed=6)
    body = f"{LOADS}\n{before}{product('bf16')}".replace("ld.global.b32 %r21,", "ld.global.b32 %r22,")
    words = "%r21 is read before it was written"
    given = buffers(a, b, c, "bf16")
    refused(body, Kind.UNINITIALISED_REGISTER, words, at=product("bf16"), count=3, threads=THREADS, buffers=given)


@pytest.mark.parametrize("place", ["D", "A", "B", "C"])
def test_registers_of_a_wgmma_in_flight(place: str) -> None:
    """As for any other instruction: its accumulators are neither read nor written before the wait."""
    accumulator, other = f"%r{FIRST}", "%r5"
    counts = {"D": 4, "A": 4, "B": 2, "C": 4}
    vectors = {name: [accumulator if name == place else other] + [other] * (n - 1) for name, n in counts.items()}
    operands = ", ".join(f"{{{', '.join(names)}}}" for names in vectors.values())
    mma = f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {operands};"
    settings, _ = group_settings(Product(Operand(M, 2), Operand(16, 2)))
    body = two_products(f"{mma}\nwgmma.wait_group.sync.aligned 0;", Product(Operand(M, 2), Operand(16, 2)))
    refused(body, Kind.REGISTER_IN_FLIGHT, f"{accumulator} is an accumulator", at="mma.sync", count=3, **settings)
    before = "wgmma.fence.sync.aligned;"
    unfenced = body.replace(mma, "").replace(before, f"{before}\n{mma}")
    refused(unfenced, Kind.MISSING_WGMMA_FENCE, "accessed since the last wgmma.fence", count=3, **settings)
    clean(body.replace(mma, "").replace(before, f"{mma}\n{before}"), count=3, **settings)


@pytest.mark.parametrize(
    "mnemonic",
    ["m16n8k8.row.col.f32.bf16.bf16.f32", "m16n8k16.row.col.f16.f16.f16.f16", "m16n8k32.row.col.f32.e4m3.e4m3.f32"]
    + ["m16n8k16.row.col.f32.bf16.f16.f32", "m16n8k8.row.col.f32.tf32.tf32.f32", "m16n8k16.row.row.f32.bf16.bf16.f32"],
)
def test_shapes_and_types_outside_the_model(mnemonic: str) -> None:
    """Refused by name before anything runs; the message says which products there are."""
    with pytest.raises(OutsideModel) as refusal:
        Machine(f"mma.sync.aligned.{mnemonic} {D}, {A}, {B}, {C};").run()
    assert f"mma.sync.aligned.{mnemonic} is not an instruction of the CPU model" in str(refusal.value)
    assert "it has only mma.sync.aligned.m16n8k16.row.col.f32 with A and B of bf16 or both of f16" in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ((A, B), "A of an m16n8k16 product has 2 registers, not 4"),
        ((B, A), "B of an m16n8k16 product has 4 registers, not 2"),
        ((B, "%r20"), "B of an m16n8k16 product has 1 registers, not 2"),
        ((f", {C}", ""), "an m16n8k16 product has 4 operands, not 3"),
    ],
)
def test_operands_that_do_not_exist(change: tuple[str, str], words: str) -> None:
    bad = Machine(product("bf16").replace(*change))
    with pytest.raises(PtxError, match=f"^PTX line {bad.line('mma.sync')}: .*{words}"):
        bad.run()
