"""wgmma: operands placed element by element as the PTX ISA's layouts say, results exact, waits and groups.

Values are small multiples of one half, so that every sum is exact in float32 and float16 whatever its order.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import scalar_model
from machine import Buffers, Machine, aligned, clean, refused

from fa3gen.cpu.findings import Kind, OutsideModel
from fa3gen.cpu.ptx import PtxError

COVERED = {
    "wgmma_fence": "test_layouts",
    "wgmma_commit": "test_groups",
    "wgmma_wait": "test_groups",
    "wgmma": "test_layouts",
}

M = 64
THREADS = 128
SWIZZLE_CODES = {0: 0, 128: 1, 64: 2, 32: 3}  # PTX ISA, "Matrix Descriptor Format", bits 62 to 63
VALUES = [half / 2 for half in range(-4, 5)]


# ---------------------------------------------------------------------- layouts


@dataclass(frozen=True)
class Operand:
    """Where the elements of an operand of `rows` (M or N) by K lie in shared memory."""

    rows: int
    element: int  # bytes
    mn_major: bool = False
    swizzle: int = 128
    step: int = 0  # which 32 bytes of a swizzled K-major row

    @property
    def k(self) -> int:
        """Elements along K: 32 bytes."""
        return 32 // self.element

    @property
    def groups(self) -> int:
        """Rows come in groups of eight."""
        return self.rows // 8

    @property
    def stride(self) -> int:
        """Stride byte offset, larger than it needs to be."""
        if self.swizzle and not self.mn_major:
            return 16 * self.swizzle
        return 8 * self.swizzle if self.swizzle else 144

    @property
    def leading(self) -> int:
        """Leading byte offset, larger than it needs to be."""
        if self.mn_major:
            return 24 * self.swizzle if self.swizzle else self.groups * self.stride + 16
        return 0x3000 if self.swizzle else self.groups * self.stride + 16  # K-major swizzled: not used

    def logical(self, row: int, k: int) -> int:
        """Byte of an element before swizzling (PTX ISA, "Strides", of the canonical layouts)."""
        group, low, span = row // 8, row % 8, self.swizzle
        per_chunk = 16 // self.element
        if not self.mn_major:
            if span:
                return low * span + group * self.stride + self.element * k + 32 * self.step
            return low * 16 + group * self.stride + k // per_chunk * self.leading + self.element * (k % per_chunk)
        inside = self.element * low
        if span:
            chunks = span // 16
            return inside + group % chunks * 16 + group // chunks * self.leading + k % 8 * span + k // 8 * self.stride
        return inside + group * self.stride + k % 8 * 16 + k // 8 * self.leading

    def byte(self, row: int, k: int) -> int:
        """Byte of an element in a region that begins at a multiple of 1024."""
        at = self.logical(row, k)
        lines = {0: 1, 32: 2, 64: 4, 128: 8}[self.swizzle]
        return at ^ (at // 128 % lines * 16)

    @property
    def size(self) -> int:
        """Bytes of the region, a multiple of 1024."""
        top = max(self.logical(row, k) for row in range(self.rows) for k in range(self.k))
        return -(-(top + 128) // 1024) * 1024

    @property
    def descriptor(self) -> int:
        """The descriptor less the region's address (PTX ISA, "Matrix Descriptor Format")."""
        fields = self.leading >> 4 << 16 | self.stride >> 4 << 32 | SWIZZLE_CODES[self.swizzle] << 62
        return fields + (32 * self.step >> 4)

    def image(self, matrix: np.ndarray) -> np.ndarray:
        """The region's bytes with `matrix` (rows, K) of bit patterns in it; all other bytes are set, a NaN."""
        places = [self.byte(row, k) for row, k in itertools.product(range(self.rows), range(self.k))]
        assert len(set(places)) == len(places) and not any(at % self.element for at in places)
        data = np.full(self.size, 0xFF, np.uint8)
        for at, bits in zip(places, matrix.ravel().tolist(), strict=True):
            for byte in range(self.element):
                data[at + byte] = bits >> 8 * byte & 0xFF
        return data


def element_bytes(type_: str) -> int:
    return scalar_model.width(type_) // 8


encode = cache(scalar_model.encode)


def encoded(matrix: np.ndarray, type_: str) -> np.ndarray:
    """The bit patterns of a matrix of numbers."""
    return np.array([encode(value, type_) for value in matrix.ravel().tolist()], np.int64).reshape(matrix.shape)


# ---------------------------------------------------------------------- fragments


def accumulator_place(type_: str, register: int, half: int, thread: int) -> tuple[int, int]:
    """(row, column) of D in a register (PTX ISA, "Register Fragments and Shared Memory Matrix Layouts")."""
    warp, lane = thread // 32, thread % 32
    if type_ == "f32":
        return 16 * warp + lane // 4 + 8 * (register // 2 % 2), 8 * (register // 4) + 2 * (lane % 4) + register % 2
    return 16 * warp + lane // 4 + 8 * (register % 2), 8 * (register // 2) + 2 * (lane % 4) + half


def accumulator_registers(matrix: np.ndarray, type_: str) -> np.ndarray:
    """(registers, threads) u32 of a (64, N) matrix."""
    count, halves = (matrix.shape[1] // 2, 1) if type_ == "f32" else (matrix.shape[1] // 4, 2)
    bits = encoded(matrix, type_).tolist()
    registers = [[0] * THREADS for _ in range(count)]
    for register, thread, half in itertools.product(range(count), range(THREADS), range(halves)):
        row, column = accumulator_place(type_, register, half, thread)
        registers[register][thread] |= bits[row][column] << 16 * half
    return np.array(registers, np.uint32)


def fragment_registers(matrix: np.ndarray, element: int) -> np.ndarray:
    """(4, threads) u32 of a (64, K) matrix A of bit patterns."""
    registers = np.zeros((4, THREADS), np.uint32)
    per_register = 4 // element
    for register, thread, part in itertools.product(range(4), range(THREADS), range(per_register)):
        row = 16 * (thread // 32) + thread % 32 // 4 + 8 * (register % 2)
        k = per_register * (thread % 4) + part + 4 * per_register * (register // 2)
        registers[register, thread] |= int(matrix[row, k]) << 8 * element * part
    return registers


# ---------------------------------------------------------------------- kernels

FIRST = 100  # number of the first accumulator register


@dataclass(frozen=True)
class Product:
    """One instruction and its operands."""

    a: Operand | None  # None: A in registers
    b: Operand
    a_type: str = "bf16"
    b_type: str = "bf16"
    accumulator: str = "f32"
    accumulate: bool = True
    negate_a: bool = False
    negate_b: bool = False

    @property
    def registers(self) -> int:
        """Number of accumulator registers."""
        return self.b.rows // (2 if self.accumulator == "f32" else 4)

    def instruction(self, first: int = FIRST, a: str = "%rd1", b: str = "%rd2") -> str:
        """Accumulates in %r100 on; A comes from %r90 to %r93 where it is not in shared memory."""
        d = ", ".join(f"%r{first + register}" for register in range(self.registers))
        shape = f"m64n{self.b.rows}k{self.b.k}"
        source = a if self.a else "{%r90, %r91, %r92, %r93}"
        immediates = [-1 if self.negate_a else 1, -1 if self.negate_b else 1]
        if self.b.element == 2:
            immediates += [int(operand.mn_major) for operand in (self.a, self.b) if operand]
        types = f"{self.accumulator}.{self.a_type}.{self.b_type}"
        values = ", ".join(map(str, immediates))
        return f"wgmma.mma_async.sync.aligned.{shape}.{types} {{{d}}}, {source}, {b}, %p1, {values};"


def copy_in(size: int, threads: int = THREADS) -> str:
    """Copy the buffer `image` to shared memory and make it visible to the async proxy."""
    return f"""
        shl.b32 %r1, %t, 4;
    copy_in:
        setp.ge.u32 %p2, %r1, {size};
        @%p2 bra copied;
        cvt.u64.u32 %rd3, %r1; add.u64 %rd3, %rd3, %image; add.u32 %r2, %r1, %s;
        ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%rd3]; st.shared.v4.b32 [%r2], {{%r4, %r5, %r6, %r7}};
        add.u32 %r1, %r1, {16 * threads};
        bra.uni copy_in;
    copied:
        fence.proxy.async.shared::cta;
        bar.sync 0;
    """


def descriptor(register: str, operand: Operand, at: int) -> str:
    """PTX that puts the descriptor of an operand whose region begins at shared byte `at` into a register."""
    return f"""
        cvt.u64.u32 %rd4, %s; add.u64 %rd4, %rd4, {at}; and.b64 %rd4, %rd4, 262143; shr.u64 %rd4, %rd4, 4;
        add.u64 {register}, %rd4, {operand.descriptor};
    """


def move(count: int, first: int, buffer: str, action: str) -> str:
    """Load or store registers, one row of 128 threads after the other."""
    lines = [f"mad.wide.u32 %rd5, %t, 4, %{buffer};"]
    for register in range(count):
        place, name = f"[%rd5+{4 * THREADS * register}]", f"%r{first + register}"
        lines.append(f"ld.global.b32 {name}, {place};" if action == "load" else f"st.global.b32 {place}, {name};")
    return "\n".join(lines)


def kernel(product: Product, b_at: int, size: int) -> str:
    """One product on the accumulators of the buffer `c`, results to `d`."""
    parts = [copy_in(size), descriptor("%rd2", product.b, b_at)]
    if product.a:
        parts.append(descriptor("%rd1", product.a, 0))
    else:
        parts.append(move(4, 90, "fragments", "load"))
    if product.accumulate:
        parts.append(move(product.registers, FIRST, "c", "load"))
    parts.append(f"mov.b32 %r3, {int(product.accumulate)}; setp.ne.b32 %p1, %r3, 0;")
    parts += ["wgmma.fence.sync.aligned;", product.instruction(), "wgmma.commit_group.sync.aligned;"]
    parts += ["wgmma.wait_group.sync.aligned 0;", move(product.registers, FIRST, "d", "store")]
    return "\n".join(parts)


def machine(product: Product, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Machine:
    """A product of bit patterns a (64, K) and b (N, K) on numbers c (64, N)."""
    b_at = product.a.size if product.a else 0
    images = [product.a.image(a)] if product.a else []
    image = np.concatenate([*images, product.b.image(b)])
    buffers: Buffers = {"image": aligned(image.shape, np.uint8), "d": np.zeros((product.registers, THREADS), np.uint32)}
    buffers["image"][:] = image
    buffers["c"] = accumulator_registers(c, product.accumulator)
    if not product.a:
        buffers["fragments"] = fragment_registers(a, product.b.element)
    return Machine(kernel(product, b_at, len(image)), threads=THREADS, shared=len(image), buffers=buffers)


def matrices(product: Product, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random A (64, K), B (N, K) and C (64, N) of small numbers."""
    generator = random.Random(seed)
    n, k = product.b.rows, product.b.k
    a, b, c = (np.array(generator.choices(VALUES, k=count)) for count in (M * k, n * k, M * n))
    return a.reshape(M, k), b.reshape(n, k), c.reshape(M, n)


def exact(product: Product, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    sign = -1.0 if product.negate_a != product.negate_b else 1.0
    return sign * (a @ b.T) + (c if product.accumulate else 0)


def check(product: Product, seed: int, schedules: int = 1) -> None:
    """Run one product; every bit of D has to be right."""
    a, b, c = matrices(product, seed)
    made = machine(product, encoded(a, product.a_type), encoded(b, product.b_type), c)
    expected = accumulator_registers(exact(product, a, b, c) + 0.0, product.accumulator)
    for schedule in made.everywhere(schedules):
        assert (made.run(schedule)["d"] == expected).all(), (product, schedule)


# ---------------------------------------------------------------------- tests of the numbers

SIDES = [(mn_major, swizzle) for mn_major in (False, True) for swizzle in (0, 32, 64, 128)]


@pytest.mark.parametrize("b_side", SIDES, ids=lambda side: f"b-{'mn' if side[0] else 'k'}-{side[1]}")
def test_layouts(b_side: tuple[bool, int]) -> None:
    """Each layout of B with each of A and with A in registers; N, signs and the step along K vary with them."""
    for number, a_side in enumerate([None, *SIDES]):
        mn_major, swizzle = b_side
        step = number % (swizzle // 32) if swizzle and not mn_major else 0
        rows = max(swizzle // 2, 8) if mn_major else 8
        b = Operand(rows * (1 + number % 2), 2, mn_major, swizzle, step)
        a = None
        if a_side:
            steps = a_side[1] // 32 if a_side[1] and not a_side[0] else 1
            a = Operand(M, 2, *a_side, (number + 1) % steps)
        negate = bool(number & 1), bool(number & 2)
        check(Product(a, b, negate_a=negate[0], negate_b=negate[1], accumulate=number % 4 != 3), seed=number)


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_widths(n: int) -> None:
    """Every N; layouts, types and accumulators in turn."""
    type_, accumulator = [("bf16", "f32"), ("f16", "f16"), ("e4m3", "f32"), ("e5m2", "f16")][n // 8 % 4]
    element = element_bytes(type_)
    swizzle = [128, 64, 32, 0][n // 32 % 4]
    a = Operand(M, element, swizzle=swizzle) if n % 16 else None
    check(Product(a, Operand(n, element, swizzle=swizzle), type_, type_, accumulator, accumulate=n % 24 != 0), seed=n)


TYPES = [(type_, type_, accumulator) for type_ in ("f16", "e4m3", "e5m2") for accumulator in ("f32", "f16")]
TYPES += [
    ("bf16", "bf16", "f32"),
    *((*pair, d) for pair in (("e4m3", "e5m2"), ("e5m2", "e4m3")) for d in ("f32", "f16")),
]


@pytest.mark.parametrize(("a_type", "b_type", "accumulator"), TYPES)
def test_types(a_type: str, b_type: str, accumulator: str) -> None:
    """Every combination of types, A in shared memory and in registers, all signs, with and without C."""
    element = element_bytes(a_type)
    for number, (in_shared, negate_a) in enumerate(itertools.product((True, False), repeat=2)):
        a = Operand(M, element, swizzle=[128, 0, 64, 32][number % 4]) if in_shared else None
        b = Operand(16, element, swizzle=[32, 128, 0, 64][number % 4])
        check(Product(a, b, a_type, b_type, accumulator, number != 1, negate_a, number % 3 == 0), seed=number)


@pytest.mark.parametrize("type_", ["bf16", "f16", "e4m3", "e5m2"])
def test_every_number(type_: str) -> None:
    """Each bit pattern of an 8-bit type, and the edges of the others, times one: infinities, NaN, subnormals."""
    width = scalar_model.width(type_)
    codes = list(range(1 << width))
    if width == 16:
        codes = [
            high << 8 | low for high in (0, 1, 0x3C, 0x7B, 0x7C, 0x7F, 0x80, 0xFF) for low in (0, 1, 0x7F, 0x80, 0xFF)
        ]
        codes = [*codes, *codes][:64]
    b = Operand(8, width // 8)
    ones = np.zeros((8, b.k))
    ones[:, 0] = 1
    for start in range(0, len(codes), M):
        a = np.zeros((M, b.k), np.int64)
        a[:, 0] = codes[start : start + M]
        product = Product(Operand(M, width // 8), b, type_, type_, accumulate=False)
        found = machine(product, a, encoded(ones, type_), np.zeros((M, 8))).run()["d"].view(np.float32)
        for register, thread in itertools.product(range(4), range(THREADS)):
            row, _ = accumulator_place("f32", register, 0, thread)
            value = scalar_model.decode(int(a[row, 0]), type_)
            assert found[register, thread] == value or (value != value and np.isnan(found[register, thread])), value


def test_sums_are_rounded_to_f32() -> None:
    """Numbers of many bits: the sum is within the roundings of f32 additions in any order."""
    generator = np.random.default_rng(1)
    product = Product(Operand(M, 2), Operand(32, 2))
    a, b = (encoded(generator.standard_normal((rows, 16)), "bf16") for rows in (M, 32))
    c = generator.standard_normal((M, 32)).astype(np.float32)
    numbers = [np.vectorize(lambda code: scalar_model.decode(int(code), "bf16"))(matrix) for matrix in (a, b)]
    expected = numbers[0] @ numbers[1].T + c
    bound = 17 * 2.0**-24 * (abs(numbers[0]) @ abs(numbers[1]).T + abs(c))
    found = machine(product, a, b, c).run()["d"].view(np.float32)
    for register, thread in itertools.product(range(16), range(THREADS)):
        place = accumulator_place("f32", register, 0, thread)
        assert abs(found[register, thread] - expected[place]) <= bound[place]


def test_f16_accumulators_are_rounded() -> None:
    """1025 + 1025 has no f16 of its own; ties go to even."""
    product = Product(Operand(M, 2), Operand(8, 2), "f16", "f16", "f16")
    a, b = np.zeros((M, 16)), np.zeros((8, 16))
    a[:, 0], b[:, 0] = 1025, 1
    c = np.full((M, 8), 1026.0)
    found = machine(product, encoded(a, "f16"), encoded(b, "f16"), c).run()["d"]
    # 2051 lies between 2050 and 2052; 2052 is the even one in units of 2.
    assert (found == encode(2052.0, "f16") * 0x10001).all()


@pytest.mark.parametrize("in_shared", [True, False])
def test_every_schedule(in_shared: bool) -> None:
    check(Product(Operand(M, 2) if in_shared else None, Operand(24, 2)), seed=3, schedules=12)


def test_warpgroups_have_their_own_products() -> None:
    """Two warpgroups on one B: each has its A, its accumulators and its own queue."""
    product = Product(Operand(M, 2), Operand(16, 2))
    one, two = matrices(product, 1), matrices(product, 2)
    assert product.a is not None
    operands = [product.a.image(encoded(one[0], "bf16")), product.a.image(encoded(two[0], "bf16"))]
    image = np.concatenate([*operands, product.b.image(encoded(one[1], "bf16"))])
    own = product.registers * THREADS * 4
    body = f"""
        {copy_in(len(image), 256)}
        {descriptor("%rd2", product.b, 2 * product.a.size)} {descriptor("%rd1", product.a, 0)}
        shr.u32 %r8, %t, 7; mad.wide.u32 %rd1, %r8, {product.a.size >> 4}, %rd1;
        mad.wide.u32 %c, %r8, {own - 512}, %c; mad.wide.u32 %d, %r8, {own - 512}, %d;
        {move(product.registers, FIRST, "c", "load")}
        setp.eq.u32 %p1, %t, %t;
        wgmma.fence.sync.aligned;
        {product.instruction()}
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        {move(product.registers, FIRST, "d", "store")}
    """
    buffers: Buffers = {
        "image": aligned(image.shape, np.uint8),
        "d": np.zeros((2 * product.registers, THREADS), np.uint32),
    }
    buffers["image"][:] = image
    buffers["c"] = np.concatenate([accumulator_registers(c, "f32") for _, _, c in (one, two)])
    expected = [accumulator_registers(exact(product, a, one[1], c) + 0.0, "f32") for a, _, c in (one, two)]
    found = clean(body, threads=256, shared=len(image), buffers=buffers)["d"]
    assert (found == np.concatenate(expected)).all()


# ---------------------------------------------------------------------- groups


def two_products(after_first: str, product: Product, accumulators: tuple[int, int] = (FIRST, FIRST + 40)) -> str:
    """Two products in groups of their own, the second on other accumulators; `after_first` follows their commits."""
    assert product.a is not None
    b_at = product.a.size
    first, second = accumulators
    return f"""
        {copy_in(b_at + product.b.size)} {descriptor("%rd1", product.a, 0)} {descriptor("%rd2", product.b, b_at)}
        {move(product.registers, FIRST, "c", "load")} {move(product.registers, FIRST + 40, "c", "load")}
        setp.eq.u32 %p1, %t, %t;
        wgmma.fence.sync.aligned;
        {product.instruction(first)}
        wgmma.commit_group.sync.aligned;
        {product.instruction(second)}
        {product.instruction(second)}
        wgmma.commit_group.sync.aligned;
        {after_first}
    """


def group_settings(product: Product) -> tuple[dict[str, object], list[np.ndarray]]:
    """(settings of the machine, expected registers after one and after two products)."""
    a, b, c = matrices(product, 5)
    made = machine(product, encoded(a, "bf16"), encoded(b, "bf16"), c)
    once = exact(product, a, b, c)
    expected = [accumulator_registers(matrix + 0.0, "f32") for matrix in (once, once + (once - c))]
    return {"threads": THREADS, "shared": made.shared, "buffers": made.buffers}, expected


def test_groups() -> None:
    """A wait delivers the accumulators of all but the latest groups; an empty group counts as one."""
    product = Product(Operand(M, 2), Operand(16, 2))
    settings, (once, twice) = group_settings(product)
    rest = "\nwgmma.wait_group.sync.aligned 0;"
    for wait, first, second in (("1", True, False), ("0", True, True), ("2", False, False)):
        for accumulator, allowed, expected in ((FIRST, first, once), (FIRST + 40, second, twice)):
            store = move(product.registers, accumulator, "d", "store")
            body = two_products(f"wgmma.wait_group.sync.aligned {wait};\n{store}{rest}", product)
            if allowed:
                assert (clean(body, count=5, **settings)["d"] == expected).all()
            else:
                refused(body, Kind.REGISTER_IN_FLIGHT, f"%r{accumulator} is an accumulator", count=5, **settings)
    empty = "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;\n"
    body = two_products(empty + move(product.registers, FIRST + 40, "d", "store"), product)
    assert (clean(body, count=5, **settings)["d"] == twice).all()


def test_products_on_the_same_accumulators() -> None:
    """Products chain without a wait between them, also over several groups."""
    product = Product(Operand(M, 2), Operand(16, 2))
    settings, (once, twice) = group_settings(product)
    end = "wgmma.wait_group.sync.aligned 0;\n" + move(product.registers, FIRST, "d", "store")
    found = clean(two_products(end, product, (FIRST, FIRST)), count=5, **settings)["d"].view(np.float32)
    step = twice.view(np.float32) - once.view(np.float32)
    assert (found == twice.view(np.float32) + step).all()
    restart = two_products(end, product, (FIRST, FIRST)).replace(
        "wgmma.commit_group", "setp.ne.u32 %p1, %t, %t;\nwgmma.commit_group", 1
    )
    # Without scale-d the second and third product each forget what was before.
    assert (clean(restart, count=5, **settings)["d"].view(np.float32) == step).all()


def test_the_sources_may_change_after_the_wait() -> None:
    """Shared memory and A registers are read before the wait returns, not after."""
    for in_shared in (True, False):
        product = Product(Operand(M, 2) if in_shared else None, Operand(16, 2))
        a, b, c = matrices(product, 6)
        made = machine(product, encoded(a, "bf16"), encoded(b, "bf16"), c)
        change = "wgmma.wait_group.sync.aligned 0;\nbar.sync 0;\nshl.b32 %r1, %t, 4; add.u32 %r1, %r1, %s;\n"
        change += "st.shared.v4.b32 [%r1], {%r3, %r3, %r3, %r3};\n" + "".join(
            f"mov.b32 %r{90 + j}, 0;" for j in range(4)
        )
        body = made.body.replace("wgmma.wait_group.sync.aligned 0;", change)
        found = clean(body, threads=THREADS, shared=made.shared, buffers=made.buffers)["d"]
        assert (found == accumulator_registers(exact(product, a, b, c) + 0.0, "f32")).all()


# ---------------------------------------------------------------------- what does not exist

GOOD = Product(Operand(M, 2), Operand(16, 2))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("m64n16k16", "m64n12k16"), "wgmma has no shape n12"),
        (("m64n16k16", "m64n264k16"), "wgmma has no shape n264"),
        (("m64n16k16", "m64n24k16"), "with 8 accumulator registers"),
        (("m64n16k16", "m64n16k32"), "does not exist"),
        (("bf16.bf16", "bf16.f16"), "does not exist"),
        (("f32.bf16", "f16.bf16"), "does not exist"),
        (("%p1, 1, 1, 0, 0", "%p1, 1, 2, 0, 0"), "immediates not understood"),
        (("%p1, 1, 1, 0, 0", "%p1, 1, 1"), "immediates not understood"),
    ],
)
def test_instructions_that_do_not_exist(change: tuple[str, str], words: str) -> None:
    instruction = GOOD.instruction()
    assert change[0] in instruction
    bad = Machine(instruction.replace(*change), threads=THREADS)
    with pytest.raises(PtxError, match=f"^PTX line {bad.line('wgmma')}: .*{words}"):
        bad.run()


@pytest.mark.parametrize("mnemonic", ["m64n8k256.s32.b1.b1.and.popc", "m64n16k8.f32.tf32.tf32", "m64n16k32.s32.s8.s8"])
def test_types_outside_the_model(mnemonic: str) -> None:
    with pytest.raises(OutsideModel, match=f"wgmma.mma_async.sync.aligned.{mnemonic} is not an instruction"):
        Machine(f"wgmma.mma_async.sync.aligned.{mnemonic} {{%r1}}, %rd1, %rd2, %p1, 1, 1;", threads=THREADS).run()


def test_base_offset_is_refused() -> None:
    a, b, c = matrices(GOOD, 1)
    made = machine(GOOD, encoded(a, "bf16"), encoded(b, "bf16"), c)
    body = made.body.replace("wgmma.fence.sync.aligned;", f"or.b64 %rd2, %rd2, {1 << 49};\nwgmma.fence.sync.aligned;")
    with pytest.raises(OutsideModel, match="base offset"):
        replace(made, body=body).run()
