"""Products of one warp (PTX ISA, "Warp Level Matrix Instructions", 9.7.14), complete when the next instruction runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3gen.cpu.emitter import Emitter
from fa3gen.cpu.forms import emits
from fa3gen.cpu.lanes import spread
from fa3gen.cpu.ptx import Instruction, Operand, PtxError, Vector
from fa3gen.cpu.tensor_core import add_products
from fa3gen.cpu.types import F32, U32
from fa3gen.cpu.wgmma import Matrix, accumulator_matrix, accumulator_vectors, decode, fragment_matrix

_M, _N, _K = 16, 8, 16
_REGISTERS = {"D": 4, "A": 4, "B": 2, "C": 4}  # of a lane


@emits(
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(?P<types>bf16\.bf16|f16\.f16)\.f32",
    only="mma.sync.aligned.m16n8k16.row.col.f32 with A and B of bf16 or both of f16, C of f32",
)
def warp_product(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """`d, a, b, c`: D = A B + C of each warp."""
    count = len(instruction.operands)
    if count != len(_REGISTERS):
        raise PtxError(f"PTX line {instruction.line}: an m16n8k16 product has {len(_REGISTERS)} operands, not {count}")
    named = zip(instruction.operands, _REGISTERS, strict=True)
    d, a, b, c = (_items(instruction, operand, name) for operand, name in named)
    fragments = (
        "(" + "".join(f"{emitter.read(item, type_)}, " for item in items) + ")"
        for items, type_ in ((a, U32), (b, U32), (c, F32))
    )
    element = form["types"].partition(".")[0]
    sums = emitter.temporary()
    emitter.emit(f"{sums} = {emitter.keep(multiply)}(g, {element!r}, {', '.join(fragments)}, {emitter.mask()})")
    for item, register in enumerate(d):
        emitter.write(register, f"{sums}[{item}]", F32)


def _items(instruction: Instruction, operand: Operand, name: str) -> tuple[Operand, ...]:
    """The registers of an operand, which has to have as many as "Matrix Fragments for mma.m16n8k16" says."""
    count = len(operand.items) if isinstance(operand, Vector) else 1
    if not isinstance(operand, Vector) or count != _REGISTERS[name]:
        raise PtxError(
            f"PTX line {instruction.line}: {name} of an m16n8k16 product has {count} registers, not {_REGISTERS[name]}"
        )
    return operand.items


def multiply(
    group: Any, element: str, a: tuple[Any, ...], b: tuple[Any, ...], c: tuple[Any, ...], mask: Any
) -> list[NDArray[np.float32]]:
    """`mma.sync`: the four registers of D.

    A, C and D lie in registers as those of a wgmma of one warp and 8 columns do. Products are summed as wgmma sums them
    (`Settings.sums`). That the tensor core adds both in the same way is assumed: no GPU's mma.sync has been compared.
    """
    group.whole_warps(mask, "mma.sync")
    rows, columns, sums = ([spread(value, group.lanes) for value in values] for values in (a, b, c))
    left = fragment_matrix(rows, element).reshape(-1, _M, _K)
    right = _columns(columns, element)
    total = accumulator_matrix(sums, "f32").reshape(-1, _M, _N)
    if group.cta.launch.sums == "tensor_core":
        types = element, element
        warps = zip(left, right, total, strict=True)
        found = np.stack([add_products(*of_warp, types=types, accumulator="f32") for of_warp in warps])
    else:
        product = left.astype(np.float64) @ right.swapaxes(1, 2).astype(np.float64)
        found = total + product.astype(np.float32)
    return accumulator_vectors(found.reshape(-1, _N), "f32")


def _columns(vectors: Sequence[NDArray[Any]], element: str) -> Matrix:
    """The two registers of B as (warps, N, K) float32. PTX ISA, "Matrix Fragments for mma.m16n8k16", B.

    Register j of lane l: rows (k) 8 j + 2 (l % 4) and the next of column l / 4.
    """
    # (k block, warp, lane / 4, lane % 4) -> (warp, lane / 4, k block, lane % 4)
    parts = np.stack(vectors).reshape(2, -1, _N, 4).transpose(1, 2, 0, 3)
    return decode(np.ascontiguousarray(parts).reshape(-1, 8).view(np.uint8), element).reshape(-1, _N, _K)
