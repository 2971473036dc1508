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
from fa3gen.cpu.ptx import Instruction, Operand, PtxError, Vector, registers_in
from fa3gen.cpu.tensor_core import add_products
from fa3gen.cpu.types import F32, U32
from fa3gen.cpu.wgmma import Matrix, accumulator_matrix, accumulator_vectors, decode

_M, _N, _K = 16, 8, 16
_REGISTERS = {"D": 4, "A": 4, "B": 2, "C": 4}  # of a lane
_PARTS = slice(4), slice(4, 6), slice(6, None)  # A, B and C of those that a product reads


@emits(
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(?P<types>bf16\.bf16|f16\.f16)\.f32",
    only="mma.sync.aligned.m16n8k16.row.col.f32 with A and B of bf16 or both of f16, C of f32",
)
def warp_product(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """`d, a, b, c`: D = A B + C of each warp. Those that follow and need none of its results are computed with it."""
    emitter.together = _independent(emitter, instruction)
    fragments = [_read(emitter, one) for one in emitter.together]
    emitter.instruction = instruction
    element, sums = form["types"].partition(".")[0], emitter.temporary()
    emitter.emit(f"{sums} = {emitter.keep(multiply)}(g, {element!r}, [{', '.join(fragments)}])")
    for number, one in enumerate(emitter.together):
        emitter.instruction = one
        for item, register in enumerate(_operands(one)[0]):
            emitter.write(register, f"{sums}[{number}, {item}]", F32)


def _read(emitter: Emitter, instruction: Instruction) -> str:
    """The name of what `vectors` gives for a product, asked for in its own name: reports say where a value is none."""
    emitter.instruction = instruction
    _, a, b, c = _operands(instruction)
    values = [emitter.read(item, type_) for items, type_ in ((a, U32), (b, U32), (c, F32)) for item in items]
    name = emitter.temporary()
    emitter.emit(f"{name} = {emitter.keep(vectors)}(g, ({', '.join(values)}), {emitter.mask()})")
    return name


def _independent(emitter: Emitter, first: Instruction) -> list[Instruction]:
    """The product and those right behind it in the block that neither read nor write what one before has written."""
    found, written = [first], set(registers_in(first.operands[0]))
    for instruction in emitter.alike(first):
        used = {name for operand in instruction.operands for name in registers_in(operand)}
        if used & written:
            break
        found.append(instruction)
        written.update(registers_in(instruction.operands[0]))
    return found


def _operands(instruction: Instruction) -> list[tuple[Operand, ...]]:
    """The registers of D, A, B and C, which have to be as many as "Matrix Fragments for mma.m16n8k16" says."""
    count = len(instruction.operands)
    if count != len(_REGISTERS):
        raise PtxError(f"PTX line {instruction.line}: an m16n8k16 product has {len(_REGISTERS)} operands, not {count}")
    named = zip(instruction.operands, _REGISTERS, strict=True)
    return [_items(instruction, operand, name) for operand, name in named]


def _items(instruction: Instruction, operand: Operand, name: str) -> tuple[Operand, ...]:
    """The registers of an operand, which has to have as many as "Matrix Fragments for mma.m16n8k16" says."""
    count = len(operand.items) if isinstance(operand, Vector) else 1
    if not isinstance(operand, Vector) or count != _REGISTERS[name]:
        raise PtxError(
            f"PTX line {instruction.line}: {name} of an m16n8k16 product has {count} registers, not {_REGISTERS[name]}"
        )
    return operand.items


def vectors(group: Any, registers: tuple[Any, ...], mask: Any) -> list[NDArray[Any]]:
    """The registers of A, B and C of one product, which all lanes of the warps have to execute."""
    group.whole_warps(mask, "mma.sync")
    return [spread(value, group.lanes) for value in registers]


def multiply(group: Any, element: str, products: Sequence[list[NDArray[Any]]]) -> NDArray[np.float32]:
    """`mma.sync`, several of them: the registers of D, (products, 4, lanes).

    A, C and D lie in registers as those of a wgmma of one warp and 8 columns do. Products are summed as wgmma sums them
    (`Settings.sums`). That the tensor core adds both in the same way is assumed: no GPU's mma.sync has been compared.
    """
    count = len(products)
    a, b, c = (np.concatenate([one for of in products for one in of[part]]) for part in _PARTS)
    # A: (product, k block, row half, warp, lane / 4, lane % 4) -> (product, warp, row half, lane / 4, k block, ...)
    left = _decoded(a.reshape(count, 2, 2, -1, 8, 4).transpose(0, 3, 2, 4, 1, 5), element, _M)
    # B: register j of lane l has rows (k) 8 j + 2 (l % 4) and the next of column l / 4.
    right = _decoded(b.reshape(count, 2, -1, _N, 4).transpose(0, 2, 3, 1, 4), element, _N)
    sums = c.reshape(count, 4, -1)
    if group.cta.launch.sums == "tensor_core":
        return np.stack([_as_tensor_core(*one, element) for one in zip(left, right, sums, strict=True)])
    product = left.astype(np.float64) @ right.swapaxes(2, 3).astype(np.float64)
    # (product, warp, row half, lane / 4, lane % 4, pair) -> registers of lanes, as `accumulator_vectors` has them
    parts = product.reshape(count, -1, 2, 8, 4, 2).transpose(0, 2, 5, 1, 3, 4)
    return sums + parts.astype(np.float32, order="C").reshape(sums.shape)


def _decoded(registers: NDArray[Any], element: str, rows: int) -> Matrix:
    """Registers in the order of a matrix's rows as (products, warps, rows, K) float32."""
    data = np.ascontiguousarray(registers).reshape(-1, _K // 2).view(np.uint8)
    return decode(data, element).reshape(len(registers), -1, rows, _K)


def _as_tensor_core(left: Matrix, right: Matrix, sums: NDArray[np.float32], element: str) -> NDArray[np.float32]:
    """The registers of D of one product, added up as the tensor core does."""
    total = accumulator_matrix(list(sums), "f32").reshape(-1, _M, _N)
    of_warps = zip(left, right, total, strict=True)
    found = [add_products(*of_warp, types=(element, element), accumulator="f32") for of_warp in of_warps]
    return np.stack(accumulator_vectors(np.concatenate(found), "f32"))
