"""Which thread holds which element of a warpgroup's accumulator and of its A operand in registers.

By formula, from PTX ISA, "Register Fragments" of wgmma (its figures for D and for A of m64k16 and m64k32): lane l of
warp w holds rows 16 w + l / 4 and eight further down, and pairs of neighbouring columns, in blocks of eight columns; as
A operand of 8 bits four neighbouring columns, in blocks of 16.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa3gen.design import footprint
from fa3gen.hardware import hopper
from fa3gen.spec.model import Forward, WgmmaProduct

BLOCK = 8  # columns after which threads repeat, twice as many of an A operand of 8 bits
BYTES = 4  # of a register


@dataclass(frozen=True)
class Place:
    """One element: the thread of the warpgroup that holds it, the register, and which part of it, a half or a byte."""

    thread: int
    register: int
    part: int | None = None

    @property
    def warp(self) -> int:
        """Warp of the warpgroup."""
        return self.thread // hopper.WARP

    @property
    def lane(self) -> int:
        """Lane of the warp."""
        return self.thread % hopper.WARP


@dataclass(frozen=True)
class Fragment:
    """A 64 x `columns` matrix spread over a warpgroup; `key` is a word for it, `registers` are those of one thread.

    `each` elements share a register.
    """

    key: str
    what: str
    columns: int
    registers: int
    each: int

    @property
    def block(self) -> int:
        """Columns after which threads repeat."""
        return 2 * BLOCK if self.each == BYTES else BLOCK

    @property
    def run(self) -> int:
        """Columns side by side of one thread."""
        return self.block // footprint.QUAD

    def place(self, row: int, column: int) -> Place:
        """Who holds an element, of 64 rows and `columns` columns."""
        if self.each == BYTES:
            return operand_a_8bit(row, column)
        return accumulator(row, column) if self.each == 1 else operand_a(row, column)


def accumulator(row: int, column: int) -> Place:
    """Owner of an element of D, 64 x N in float32."""
    return Place(_thread(row, column), 4 * (column // BLOCK) + 2 * (row % 16 // 8) + column % 2)


def operand_a(row: int, column: int) -> Place:
    """Owner of an element of A, 64 x 16 k in 16 bits; registers are counted on from one k-step of 16 to the next."""
    return Place(_thread(row, column), 2 * (column // BLOCK) + row % 16 // 8, column % 2)


def operand_a_8bit(row: int, column: int) -> Place:
    """The same of A, 64 x 32 k in 8 bits."""
    thread = hopper.WARP * (row // 16) + 4 * (row % 8) + column % (2 * BLOCK) // BYTES
    return Place(thread, 2 * (column // (2 * BLOCK)) + row % 16 // 8, column % BYTES)


def _thread(row: int, column: int) -> int:
    return hopper.WARP * (row // 16) + 4 * (row % 8) + column % BLOCK // 2


def fragments(spec: Forward) -> tuple[Fragment, ...]:
    """The fragments of one warpgroup: the accumulators, which are alike, and the A operands that are in registers.

    Of an A operand, one k-step of 16 or 32 keys, or elements of the head dim, as one instruction takes it; Q's is like
    P's.
    """
    sizes = {}
    if isinstance(spec.qk, WgmmaProduct):
        sizes["S"] = spec.tile.kv
    if isinstance(spec.pv, WgmmaProduct):
        sizes["O"] = spec.problem.v_dim
    if not sizes:
        return ()
    names = " and ".join(f"{name} (64 x {n}, {n // 2} registers)" for name, n in sizes.items())
    widest = max(sizes.values())
    found = [Fragment("accumulator", f"Accumulator, float32: {names}", widest, widest // 2, 1)]
    k, depths = spec.element.wgmma_k, {}
    if footprint.q_in_registers(spec):
        depths["Q"] = spec.problem.head_dim
    if isinstance(spec.pv, WgmmaProduct) and spec.pv.a.source == "registers":
        depths["P"] = spec.tile.kv
    if depths:
        steps = " or ".join(f"one of {depth // k} k-steps of {name}" for name, depth in depths.items())
        each = BYTES // spec.element.bytes
        registers = k // 2 // each
        what = f"A operand in {spec.element.bits} bits: {steps} (64 x {k}, {registers} registers)"
        found.append(Fragment("operand", what, k, registers, each))
    return tuple(found)
