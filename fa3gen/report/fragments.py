"""Which thread holds which element of a warpgroup's accumulator and of its A operand in registers.

By formula, from PTX ISA, "Register Fragments" of wgmma (its figures for D and for A of m64k16): lane l of warp w holds
rows 16 w + l / 4 and eight further down, and pairs of neighbouring columns, in blocks of eight columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from fa3gen import hopper
from fa3gen.spec import Spec, WgmmaProduct

BLOCK = 8  # columns after which threads repeat


@dataclass(frozen=True)
class Place:
    """One element: the thread of the warpgroup that holds it, the register, and for 16-bit types which half of it."""

    thread: int
    register: int
    half: int | None = None

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
    """A 64 x `columns` matrix spread over a warpgroup: what it is, and registers of one thread."""

    name: str
    what: str
    columns: int
    registers: int
    packed: bool  # two 16-bit elements in a register

    def place(self, row: int, column: int) -> Place:
        """Who holds an element, of 64 rows and `columns` columns."""
        return operand_a(row, column) if self.packed else accumulator(row, column)


def accumulator(row: int, column: int) -> Place:
    """Owner of an element of D, 64 x N in float32."""
    return Place(_thread(row, column), 4 * (column // BLOCK) + 2 * (row % 16 // 8) + column % 2)


def operand_a(row: int, column: int) -> Place:
    """Owner of an element of A, 64 x 16 k in 16 bits; registers are counted on from one k-step of 16 to the next."""
    return Place(_thread(row, column), 2 * (column // BLOCK) + row % 16 // 8, column % 2)


def _thread(row: int, column: int) -> int:
    return hopper.WARP * (row // 16) + 4 * (row % 8) + column % BLOCK // 2


def fragments(spec: Spec) -> tuple[Fragment, ...]:
    """The fragments of one warpgroup: accumulators of S and O, and P as the A operand where it is in registers."""
    found = []
    if isinstance(spec.qk, WgmmaProduct):
        n = spec.tile.kv
        found.append(Fragment("S", "accumulator of S = Q K^T, float32", n, n // 2, False))
    if isinstance(spec.pv, WgmmaProduct):
        if spec.pv.a.source == "registers":
            n = spec.tile.kv
            found.append(Fragment("P", "A operand of O = P V, 16 bits, two in a register", n, n // 4, True))
        n = spec.problem.v_dim
        found.append(Fragment("O", "accumulator of O = P V, float32", n, n // 2, False))
    return tuple(found)
