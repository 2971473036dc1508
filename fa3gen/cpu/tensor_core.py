"""How a tensor core of sm_90a adds: a product and its accumulator as fixed-point numbers, cut off, not rounded.

One WGMMA adds K products of a row of A and a column of B to an element of D: all of them are lined up with the
largest exponent among them, as many bits as `Adder.kept` below its binary point are kept of each, and what is left is
dropped towards zero. The sum, exact from there on, is cut off again to the fraction that `Adder.fraction` says. 16-bit
operands lose nothing that float32 would show but its last bit; of 8-bit operands every sum is left with 13 bits, which
is why FP8 attention adds up in two levels.

The PTX ISA leaves this open. It is what an H200 does: every element of 53 products of all types, operands from shared
memory and registers, among them subnormal numbers, has the very bits (tests/data/tensor_core_sums.json holds some of
them). That hardware of this generation adds this way was described in arXiv 2511.10909.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
Exact = NDArray[np.float64]

SMALLEST_NORMAL = {"bf16": -126, "f16": -14, "e4m3": -6, "e5m2": -14, "f32": -126}  # exponents
NOTHING = -8000  # the exponent of zero: below any other, and twice that is an int16


@dataclass(frozen=True)
class Adder:
    """Bits below the binary point of the largest addend that are kept, and of a sum's fraction; products at a time."""

    kept: int
    fraction: int
    depth: int


WIDE = Adder(kept=25, fraction=23, depth=16)  # of 16-bit operands
NARROW = Adder(kept=13, fraction=13, depth=32)  # of 8-bit ones


def add_products(a: Matrix, b: Matrix, c: Matrix, *, types: tuple[str, str], accumulator: str) -> Matrix:
    """D = A B^T + C as the tensor core adds: a (M, K), b (N, K), c (M, N); K of any number of instructions.

    `types` are those of A and B, `accumulator` that of C and D, by their PTX names; an f16 accumulator is rounded to
    the nearest after each instruction. Elements may be infinite or NaN.
    """
    adder = NARROW if types[0] in ("e4m3", "e5m2") else WIDE
    total = c.astype(np.float64)
    # By k first, since NumPy adds rows that lie apart faster than numbers side by side.
    by_k = [np.ascontiguousarray(each.T, np.float64) for each in (a, b)]
    exponents = [_exponents(each, type_) for each, type_ in zip(by_k, types, strict=True)]
    products = np.empty((adder.depth, *c.shape))  # one array for all steps: fresh memory costs more than the products
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, a.shape[1], adder.depth):
            at = slice(first, first + adder.depth)
            np.multiply(by_k[0][at, :, None], by_k[1][at, None, :], out=products)  # exact: at most 22 bits
            largest = (exponents[0][at, :, None] + exponents[1][at, None, :]).max(axis=0)
            total = _sum(products, largest, total, adder, accumulator)
        return total.astype(np.float32)


def _sum(products: Exact, exponents: NDArray[np.int16], total: Exact, adder: Adder, accumulator: str) -> Exact:
    """One instruction: (depth, M, N) products, which are overwritten, their largest exponents, and (M, N) so far."""
    largest = np.maximum(exponents, _exponents(total, "f32"))
    unit, per_unit = _power(largest - adder.kept), _power(adder.kept - largest)
    products *= per_unit
    found: Exact = (np.trunc(products, out=products).sum(axis=0) + np.trunc(total * per_unit)) * unit
    if accumulator == "f16":
        return found.astype(np.float16).astype(np.float64)
    last = _power(_exponents(found, "f32") - adder.fraction)
    return np.asarray(np.trunc(found / last) * last)


def _exponents(values: Exact, type_: str) -> NDArray[np.int16]:
    """Exponents of a leading bit, for subnormal numbers those of the smallest normal one; NOTHING for zero."""
    found = np.maximum(np.frexp(values)[1] - 1, SMALLEST_NORMAL[type_])
    return np.where(values == 0, NOTHING, found).astype(np.int16)


def _power(exponents: NDArray[np.int16]) -> Exact:
    """Powers of two; where all addends are zero, any: there is nothing to keep."""
    return np.ldexp(1.0, np.clip(exponents, -1000, 1000))
