"""Operand tiles in shared memory: which dimension is contiguous there, in which spans, and in how many TMA boxes.

A tile lies in shared memory as its tensor does in global memory, since TMA transposes nothing: the majors that a spec
gives a WGMMA say which dimension of q, k and v is contiguous. Only P, which threads store, can lie either way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from fa3gen.design.footprint import by_warps, converts, page_rows, tma_boxes
from fa3gen.hardware.dtypes import Dtype
from fa3gen.hardware.hopper import BYTES_16BIT, SWIZZLE_SPAN
from fa3gen.spec.model import Forward, Major, SmemHandoff, Swizzle, WgmmaProduct

Letter = Literal["Q", "K", "V", "Vt", "P", "O"]


@dataclass(frozen=True)
class OperandTile:
    """`rows` queries or keys of `columns` elements each; `major` is how the product that reads it sees it.

    `by_sequence`: elements of one column lie side by side, those of queries or keys that follow one another. `plain`:
    rows lie one below the other as in an ordinary array, which is what no swizzle means to scalar products; a WGMMA
    wants core matrices. `pieces`: in how many groups of rows it arrives, which may come from different pages.
    """

    letter: Letter
    rows: int
    columns: int
    element: Dtype
    swizzle: Swizzle
    major: Major
    by_sequence: bool = False
    plain: bool = False
    pieces: int = 1

    @property
    def along(self) -> str:
        """What elements that lie side by side are counted by: `head dim`, `queries` or `keys`."""
        return self._dimensions[0 if self.by_sequence else 1]

    @property
    def across(self) -> str:
        """What the lines of such elements are counted by."""
        return self._dimensions[1 if self.by_sequence else 0]

    @property
    def _dimensions(self) -> tuple[str, str]:
        """What its rows and its columns are counted by."""
        return "keys" if self.letter in ("K", "V", "Vt") else "queries", "keys" if self.letter == "P" else "head dim"

    @property
    def inner(self) -> int:
        """Elements that lie side by side."""
        return self.rows if self.by_sequence else self.columns

    @property
    def outer(self) -> int:
        """How many such lines there are."""
        return self.columns if self.by_sequence else self.rows

    @property
    def boxes(self) -> int:
        """TMA copies that it takes."""
        return self.pieces if self.plain else self.pieces * tma_boxes(self.inner * self.element.bytes, self.swizzle)

    @property
    def atom(self) -> str:
        """CuTe's name of its canonical layout, as `layout_atom`; nothing for one that is plain."""
        return "" if self.plain else layout_atom(self.major, self.swizzle)


def layout_atom(major: Major, swizzle: Swizzle) -> str:
    """CuTe's name of a canonical layout: K_SW128, MN_SW64, K_INTER."""
    return f"{major.upper()}_INTER" if swizzle == "none" else f"{major.upper()}_SW{swizzle.removesuffix('B')}"


def operand_tiles(spec: Forward) -> dict[Letter, OperandTile]:
    """The tiles that a kernel keeps in shared memory, by letter; none where all is in global memory.

    P only where it passes through shared memory in 16 bits, O as it is gathered before TMA stores it.
    """
    if spec.smem is None:
        return {}
    q, kv, d, v_dim = spec.tile.q, spec.tile.kv, spec.problem.head_dim, spec.problem.v_dim
    qk, pv = (product if isinstance(product, WgmmaProduct) else None for product in (spec.qk, spec.pv))
    # (rows, columns, swizzle, major), and the major in which rows are not contiguous: the head dim is K of S = Q K^T
    # and N of O = P V, keys are K of it. Scalar products read row by row.
    vt = spec.smem.vt  # what the product reads, where V is transposed
    parts: dict[Letter, tuple[int, int, Swizzle, Major, Major]] = {
        "Q": (q, d, spec.smem.q, qk.a.major if qk and qk.a.source == "smem" else "k", "mn"),
        "K": (kv, d, spec.smem.k, qk.b.major if qk else "k", "mn"),
        "V": (kv, v_dim, spec.smem.v, pv.b.major if pv and vt is None else "mn" if pv else "k", "k" if pv else "mn"),
    }
    warps = by_warps(spec)
    if warps:
        parts["V"] = (kv, v_dim, spec.smem.v, "mn", "k")
    if pv and vt is not None:
        parts["Vt"] = (kv, v_dim, vt, pv.b.major, "k")
    if pv and isinstance(spec.handoff, SmemHandoff):
        parts["P"] = (q, kv, spec.handoff.swizzle, pv.a.major, "mn")
    if pv and spec.outputs.o != "direct":
        parts["O"] = (q, v_dim, _output_swizzle(spec, spec.smem.q), "k", "mn")
    piece = page_rows(spec)
    scalars: set[Letter] = {*(() if qk or warps else ("Q", "K")), *(() if pv or warps else ("V",))}
    elements = {"O": spec.o_element} | {letter: spec.kv_element for letter in "KV" if warps}
    return {
        letter: OperandTile(
            *(letter, rows, columns, elements.get(letter, spec.element), swizzle, major),
            by_sequence=major == across,
            plain=letter in scalars and swizzle == "none",
            pieces=kv // piece if piece and letter in ("K", "V") else 1,
        )
        for letter, (rows, columns, swizzle, major, across) in parts.items()
    }


def _output_swizzle(spec: Forward, q_swizzle: Swizzle) -> Swizzle:
    """Q's, in whose place or like which O is gathered; of 8 bits Q's rows are half as long, and O has the widest."""
    if spec.element.bytes == spec.o_element.bytes or spec.o_element.bytes > BYTES_16BIT:
        return q_swizzle
    row = spec.problem.v_dim * spec.o_element.bytes
    widest: Swizzle = "none"
    for swizzle in get_args(Swizzle):
        widest = swizzle if row % SWIZZLE_SPAN[swizzle] == 0 else widest
    return widest


def tiles_in_memory(spec: Forward) -> dict[Letter, OperandTile]:
    """The same as they are copied: tiles of K and V in 8 bits lie row below row, and in as many pieces."""
    tiles = operand_tiles(spec)
    if converts(spec):
        facts: dict[str, Any] = {"element": spec.kv_element, "swizzle": "none", "plain": True}
        tiles |= {letter: replace(tiles[letter], **facts) for letter in ("K", "V")}
    return tiles


def sequence_contiguous(spec: Forward) -> tuple[str, ...]:
    """Names of the inputs whose sequence is contiguous, and not the head dim."""
    tiles = operand_tiles(spec).values()
    return tuple(tile.letter.lower() for tile in tiles if tile.letter in ("Q", "K", "V") and tile.by_sequence)
