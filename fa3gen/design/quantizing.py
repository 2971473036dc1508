"""What follows from the spec of a quantisation: who has which elements, shared memory, registers."""

from __future__ import annotations

from fa3gen.design.footprint import Region
from fa3gen.hardware import hopper
from fa3gen.hardware.dtypes import E4M3, FP32, INT32, VECTOR_BYTES
from fa3gen.spec.quantizing import Quantize

LANES = 8  # threads of a row: of 16-bit elements they read 8 x 16 = 128 bytes side by side, a line
QUAD = 4  # threads of a row that is rotated: of an mma's operand A, of which each has two rows
ROWS_OF_MMA = 2
VECTOR = VECTOR_BYTES // hopper.BYTES_16BIT  # adjacent elements of x that a thread loads at once
WIDTH = LANES * VECTOR  # elements of a row in which each of its threads has a vector; head dims are multiples of it
WORD = INT32.bytes // E4M3.bytes  # rows of a column that a thread writes at once where it transposes
UNIT = VECTOR_BYTES // E4M3.bytes  # and that it stores at once
MOST_PARTS = 256  # of what shares a scale, whose maxima each warp reads: 8 for a lane
OTHER_REGISTERS = 32  # as compiled: strides in 64 bits, addresses, counters
OTHER_REGISTERS_BOUNDED = 16  # the same where a launch bounds a thread's registers, without spills
ROW_SCALE_REGISTERS = 16  # and beside these, of scales of rows


def lanes(spec: Quantize) -> int:
    """Threads of a row."""
    return QUAD if spec.problem.rotate else LANES


def vectors(spec: Quantize) -> int:
    """Vectors of a row that a thread has."""
    return spec.problem.head_dim // (lanes(spec) * VECTOR)


def rows_of_thread(spec: Quantize) -> int:
    """Rows of a tile that a thread has a part of."""
    return spec.tile.rows * lanes(spec) // spec.tile.threads


def values_of_thread(spec: Quantize) -> int:
    """Elements of a tile that a thread has."""
    return rows_of_thread(spec) * vectors(spec) * VECTOR


def shared_memory_map(spec: Quantize) -> list[Region]:
    """Maxima of the warps, where several have what shares a scale; a tile to be stored by columns."""
    warps, rows, head_dim = spec.tile.threads // hopper.WARP, spec.tile.rows, spec.problem.head_dim
    maxima = Region("largest", warps * FP32.bytes, f"{warps} x {FP32.bytes}", FP32.bytes, "of each warp")
    tile = Region("tile", head_dim * rows, f"{head_dim} x {rows}", VECTOR_BYTES, "of the output, by columns")
    return [tile] * spec.problem.transpose + [maxima] * (spec.problem.scale != "token")  # never a tile alone: a rule


def bounded(spec: Quantize) -> bool:
    """Whether a launch bounds a thread's registers: of one kernel that rotates ptxas takes so many that fewer CTAs fit.

    Where it looks for maxima in a kernel before, that takes more than the other, and the bound gains nothing.
    """
    return spec.problem.rotate and spec.problem.scale != "head"


def registers_per_thread(spec: Quantize) -> list[tuple[str, int]]:
    """An estimate of what a thread holds at the widest point, by what; ptxas spills where a launch allows less."""
    values = "values", values_of_thread(spec)
    if bounded(spec):  # signs are used up before there are values
        held = [values, ("addresses and counters", OTHER_REGISTERS_BOUNDED)]
        return [*held, ("scales of rows", ROW_SCALE_REGISTERS)] if spec.problem.scale == "token" else held
    held = [values, ("addresses and counters", OTHER_REGISTERS)]
    if spec.problem.rotate:  # maxima are looked for in tile after tile, with the same signs
        held.insert(1, ("signs", vectors(spec) * VECTOR * spec.element.bytes // FP32.bytes))
    return held
