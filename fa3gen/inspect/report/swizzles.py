"""Where the 16-byte chunks of an operand tile lie in shared memory, and which of them get in each other's way.

Shared memory has 32 banks of 4 bytes (CUDA C++ Programming Guide, "Shared Memory" of compute capability 5.x and later):
a 16-byte chunk takes a group of four, of which there are eight, so that 128 bytes lie side by side and the next 128
below them. A transaction serves each group once, and accesses of 16 bytes a lane are served for a quarter of a warp at
a time (the same guide, "128-Bit Accesses" of compute capability 2.x). The layouts are those of PTX ISA, "Shared Memory
Matrix Layout" of wgmma; the swizzles are CuTe's Swizzle<B, 4, 3> on bytes, B = 1, 2, 3 for 32, 64 and 128 bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fa3gen.design import footprint
from fa3gen.design.tiles import Letter, OperandTile, operand_tiles
from fa3gen.hardware import hopper
from fa3gen.spec.model import Copy, Forward, Swizzle, SyncLoad, WgmmaProduct

CHUNK = 16  # bytes that one row of a core matrix, one lane of ldmatrix and one 128-bit access take
LINE = 128  # bytes of all banks side by side
GROUPS = LINE // CHUNK
ROWS = 8  # of a core matrix; a swizzle pattern repeats after as many
_SINGULAR = {"queries": "query", "keys": "key"}


@dataclass(frozen=True)
class Operand:
    """One operand tile: `rows` of `width` bytes each, of which `swizzle` holds the layout.

    `row` and `column` say in words what a row and an element along it are; `users` who touches the tile; `along`
    whether lanes read a row of it side by side; `plain` whether rows lie one below the other, without core matrices.
    """

    name: str
    what: str
    rows: int
    width: int
    row: str
    column: str
    swizzle: Swizzle
    layout: str
    users: tuple[str, ...]
    along: bool = False
    plain: bool = False

    @property
    def span(self) -> int:
        """Bytes of a row that lie next to each other."""
        return self.width if self.plain else min(self.width, hopper.SWIZZLE_SPAN[self.swizzle])


@dataclass(frozen=True)
class Chunk:
    """16 bytes of a tile: row and chunk along it, and the byte of the tile's memory at which it begins."""

    row: int
    chunk: int
    address: int

    @property
    def group(self) -> int:
        """The group of four banks that holds it."""
        return self.address % LINE // CHUNK

    @property
    def line(self) -> int:
        """Which 128 bytes of the tile's memory hold it."""
        return self.address // LINE


@dataclass(frozen=True)
class Access:
    """What is touched at once, and how many transactions that takes with the swizzle and without."""

    name: str
    swizzled: int
    plain: int


def swizzled(address: int, swizzle: Swizzle) -> int:
    """The byte at which a swizzle puts `address`: bits 4 to 4 + B - 1 are XORed with bits 7 to 7 + B - 1."""
    mask = (1 << hopper.SWIZZLE_BITS[swizzle]) - 1
    return address ^ ((address >> 7 & mask) << 4)


def address(operand: Operand, row: int, chunk: int, *, plain: bool = False) -> int:
    """Byte of the tile's memory at which 16 bytes of a row begin; `plain` leaves out the XOR.

    The tile is cut into columns of `span` bytes, one after the other; within one, row lies below row. Without a swizzle
    a column is 16 bytes wide: its core matrices are contiguous.
    """
    per_span = operand.span // CHUNK
    flat = chunk // per_span * operand.rows * operand.span + row * operand.span + chunk % per_span * CHUNK
    return flat if plain else swizzled(flat, operand.swizzle)


def pattern(operand: Operand, *, plain: bool = False) -> tuple[Chunk, ...]:
    """The chunks of eight rows, one span wide: what the layout repeats."""
    return tuple(
        Chunk(row, chunk, address(operand, row, chunk, plain=plain))
        for row in range(ROWS)
        for chunk in range(operand.span // CHUNK)
    )


def transactions(chunks: Iterable[Chunk]) -> int:
    """How often the busiest bank group is needed: chunks of it that are different bytes."""
    return max(Counter(group for group, _ in {(chunk.group, chunk.line) for chunk in chunks}).values(), default=0)


def accesses(operand: Operand) -> tuple[Access, ...]:
    """The accesses that matter, each of what is touched at once: down eight rows, and along one where lanes read so.

    Lanes that read 16 bytes each are served eight at a time, those that read 8 bytes sixteen at a time: 128 bytes of a
    row either way, which are several columns of spans below the 128-byte swizzle.
    """
    chunks = range(operand.width // CHUNK)
    found = [
        _access(f"{ROWS} rows x {CHUNK} bytes", operand, [[(row, chunk) for row in range(ROWS)] for chunk in chunks])
    ]
    if operand.along:
        wide = min(len(chunks), GROUPS)
        rows = [[(row, first + i) for i in range(wide)] for row in range(ROWS) for first in chunks[::wide]]
        found.append(_access(f"1 row x {wide * CHUNK} bytes", operand, rows))
    return tuple(found)


def _access(name: str, operand: Operand, cases: Sequence[Sequence[tuple[int, int]]]) -> Access:
    """The worst of several accesses, each given as (row, chunk along it) of all that is touched at once."""
    swizzled, plain = (
        max(
            transactions(Chunk(row, chunk, address(operand, row, chunk, plain=plain)) for row, chunk in case)
            for case in cases
        )
        for plain in (False, True)
    )
    return Access(name, swizzled, plain)


def operands(spec: Forward) -> tuple[Operand, ...]:
    """The operand tiles that a module keeps in shared memory, one stage of each; none where all is in global memory."""
    if spec.smem is None:
        return ()
    tiles = operand_tiles(spec)
    core = f"wgmma reads core matrices, {ROWS} rows x {CHUNK} bytes"
    # As the scalar products read them: half a warp shares a row of S, its lanes have keys, then columns of O.
    one_row, many_rows = "half a warp reads the same 16 bytes", "half a warp reads 16 bytes each of 16 rows"
    beside = "half a warp reads a row side by side"
    qk, pv = isinstance(spec.qk, WgmmaProduct), isinstance(spec.pv, WgmmaProduct)
    q_reader = "ldmatrix reads it to registers, once" if footprint.q_in_registers(spec) else core if qk else one_row
    if footprint.by_warps(spec):
        return _of_warps(spec, tiles)
    q_users = [*_clipped(spec), q_reader]
    if pv and spec.outputs.o == "over_q":
        layout = f", as {tiles['O'].atom}" if tiles["O"].atom != tiles["Q"].atom else ""
        q_users.append(f"stmatrix writes O over it{layout}")
    found = [_operand("sQ", "Q", tiles["Q"], q_users)]
    if isinstance(spec.load, SyncLoad):
        found.append(_operand("sKV", "K, then V", tiles["K"], [many_rows, beside], along=True))
    else:
        filled = _out_of_pages(spec) if footprint.paged(spec) else _clipped(spec)
        if footprint.converts(spec):
            for letter in ("K", "V"):
                found.append(_stored(spec, letter, tiles[letter], filled))
            filled = ["converters write it, side by side"]
        found.append(_operand("sK", "K", tiles["K"], [*filled, core if qk else many_rows]))
        v_reader = core if pv else beside
        if "Vt" in tiles:
            v_reader = f"ldmatrix reads it, {ROWS} rows x {CHUNK} bytes at a time"
        found.append(_operand("sV", "V", tiles["V"], [*filled, v_reader], along=not pv))
    if "Vt" in tiles:
        writer = f"stmatrix writes it, {ROWS} rows x {CHUNK} bytes at a time"
        found.append(_operand("sVt", "V transposed", tiles["Vt"], [writer, core]))
    if "P" in tiles:
        found.append(_operand("sP", "P", tiles["P"], ["stmatrix writes P", core]))
    if spec.outputs.o == "own_buffer":
        rows = hopper.WGMMA_M // 4  # each warp gathers and stores its own
        users = ["stmatrix writes O, a slice for each warp"]
        found.append(_operand("sO", "O of one warp", replace(tiles["O"], rows=rows), users))
    return tuple(found)


def _of_warps(spec: Forward, tiles: Mapping[Letter, OperandTile]) -> tuple[Operand, ...]:
    """Those of warps with keys of their own; what they add up of one another, in float32, is no operand."""
    filled = _out_of_pages(spec) if footprint.paged(spec) else _clipped(spec)
    own = f"a warp reads {CHUNK} bytes of each of its rows at a time"
    return (
        _operand("sQ", "Q", tiles["Q"], [*_clipped(spec), "each warp reads it to registers, once"]),
        _operand("sK", "K", tiles["K"], [*filled, own]),
        _operand("sV", "V", tiles["V"], [*filled, f"ldmatrix reads {ROWS} rows x {CHUNK} bytes of a warp's at a time"]),
    )


def _stored(spec: Forward, letter: Letter, tile: OperandTile, filled: Sequence[str]) -> Operand:
    """Keys or values of 8 bits as they lie in memory, row below row, before a warp converts them."""
    stored = replace(tile, element=spec.kv_element, swizzle="none", plain=True, by_sequence=False)
    return _operand(f"s{letter}8", f"{letter} in 8 bits", stored, [*filled, "a warp reads its rows, side by side"])


def _clipped(spec: Forward) -> list[str]:
    """What fills a tile whose rows are those of a packed sequence."""
    return ["TMA writes it, with zeros behind the end of the sequence"] if footprint.packed_sequences(spec) else []


def _out_of_pages(spec: Forward) -> list[str]:
    """What fills a tile whose rows lie in pages."""
    if footprint.gathered(spec):
        return [f"lanes write it by cp.async, {CHUNK} bytes of a row each, wherever its page lies"]
    return [f"TMA writes it in boxes of {footprint.page_rows(spec)} rows, each of one page, with zeros behind the last"]


def of_copy(spec: Copy) -> Operand:
    """A box of a copy, as TMA writes it."""
    rows, width = math.prod(spec.box.extents[:-1]), spec.box.extents[-1] * spec.element.bytes
    swizzle, layout = spec.box.swizzle, f"boxes with a swizzle of {spec.box.swizzle}"
    return Operand("sX", "a box of x", rows, width, "row", "element", swizzle, layout, (), plain=swizzle == "none")


def _operand(name: str, what: str, tile: OperandTile, users: Sequence[str], along: bool = False) -> Operand:
    row, column = (_SINGULAR.get(words, words) for words in (tile.across, tile.along))
    width = tile.inner * tile.element.bytes
    layout = tile.atom or "row-major"
    return Operand(name, what, tile.outer, width, row, column, tile.swizzle, layout, tuple(users), along, tile.plain)
