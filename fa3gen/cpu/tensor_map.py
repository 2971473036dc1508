"""Tensor maps: the 128 bytes that a TMA instruction is given, taken apart and checked.

The DSL writes tensor maps with inlined host code that performs none of the checks of `cuTensorMapEncodeTiled` and
drops the low 4 bits of the address and of every stride; `TensorMap.violations` restores what can still be seen. The
layout of the bytes is not documented: it was read from the host code that the DSL prints, and `decode` refuses every
bit that this host code does not set, so a map that uses more than was understood is an error and not a guess.

Layout, by 64-bit little-endian word; the second half of the 128 bytes is not written and not read:

    word  bits       meaning
    0     0..63      address, a multiple of 16
    1     1          always set
          4..6       rank - 1
          7..10      element type
          13..14     swizzle: none, 32, 64, 128 bytes
          17..18     L2 promotion
          21         set when the tensor spans 128 KiB or more
          32..63     stride of dimension 1, bits 4..35
    2     0..31      stride of dimension 2, bits 4..35
          32..63     stride of dimension 3, bits 4..35
    3     0..31      stride of dimension 4, bits 4..35
          32..47     bits 36..39 of the strides of dimensions 1, 2, 3 and 4
    4     0..63      extents of dimensions 0 and 1, less 1
    5     0..63      extents of dimensions 2 and 3, less 1
    6     0..31      extent of dimension 4, less 1
          56..63     box extent of dimension 0, less 1
    7     0..31      box extents of dimensions 1, 2, 3 and 4, less 1

This module imports neither cutlass nor torch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from fa3gen.base.errors import UserError
from fa3gen.hardware.hopper import SMEM_PER_CTA

TENSOR_MAP_BYTES = 128
MAX_RANK = 5
MAX_BOX = 256  # elements along one dimension
MAX_DIM = 2**32
STRIDE_LIMIT = 2**40  # bytes
ADDRESS_LIMIT = 2**57
ALIGNMENT = 16  # bytes, of the address, of strides and of a box's rows
MAX_ELEMENT_STRIDE = 8

_WORDS = struct.Struct("<8Q")
_LOW32 = 2**32 - 1
_ELEMENT_TYPES = {
    0: ("u8", 1),  # fp8 and signed bytes as well
    1: ("u16", 2),
    2: ("u32", 4),
    4: ("u64", 8),
    6: ("f16", 2),
    7: ("f32", 4),
    9: ("f64", 8),
    10: ("bf16", 2),
}
_FLOATING = ("f16", "bf16", "f32", "f64")
_SWIZZLES = (0, 32, 64, 128)
_L2_PROMOTIONS = {2: 128}  # bytes; the only value that the host code writes
_TILED = 1 << 1
_LARGE, _LARGE_BYTES = 1 << 21, 2**17
# Bits of a word that `decode` understands; all others have to be clear.
_KNOWN_BITS = (
    2**64 - 1,
    _LOW32 << 32 | _LARGE | 3 << 17 | 3 << 13 | 15 << 7 | 7 << 4 | _TILED,
    2**64 - 1,
    2**48 - 1,
    2**64 - 1,
    2**64 - 1,
    255 << 56 | _LOW32,
    _LOW32,
)


class TensorMapError(UserError):
    """Bytes that are no tensor map of the kind that the CPU model knows."""


@dataclass(frozen=True)
class TensorMap:
    """What `cuTensorMapEncodeTiled` is told; innermost dimension first.

    `address`, `strides` (one for each dimension, the first being `element_bytes`), `swizzle` (0 for none),
    `interleave` (0 for none) and `l2_promotion` (0 for none) are in bytes, `dims` and `box` in elements. `oob_fill` is
    what elements outside the tensor read as: "zeros" or "nan". `element_type` is named as in PTX.
    """

    address: int
    element_type: str
    element_bytes: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int
    interleave: int = 0
    l2_promotion: int = 0
    oob_fill: str = "zeros"

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @property
    def box_bytes(self) -> int:
        """Bytes of shared memory that one box fills, which is also what a load adds to a transaction count."""
        size = self.element_bytes
        for extent in self.box:
            size *= extent
        return size

    def violations(self) -> tuple[str, ...]:
        """What `cuTensorMapEncodeTiled` refuses about this map; empty when it accepts it.

        Rules of the CUDA Driver API, "Tensor Map Object Management", and two that it enforces without documenting
        them: a box has to fit into shared memory, and an address has 57 bits. It accepts strides of 0 and strides
        that do not grow with the dimensions. A decoded map cannot show misaligned strides or a misaligned address:
        the encoder has dropped those bits.
        """
        if not 1 <= self.rank <= MAX_RANK:
            return (f"rank {self.rank}; a tensor map has 1 to {MAX_RANK} dimensions",)
        lengths = (len(self.strides), len(self.box), len(self.element_strides))
        if lengths != (self.rank,) * 3:
            return (f"{self.rank} dimensions, but {lengths[0]} strides, {lengths[1]} box extents, {lengths[2]} steps",)
        return (
            *self._tensor_violations(),
            *self._box_violations(),
            *self._mode_violations(),
        )

    def _tensor_violations(self) -> list[str]:
        """Address, extents and strides."""
        alignment = 2 * ALIGNMENT if self.interleave == 32 else ALIGNMENT
        found = []
        if self.address % alignment:
            found.append(f"address {self.address:#x} is {self.address % alignment} past a multiple of {alignment}")
        if not 0 <= self.address < ADDRESS_LIMIT:
            found.append(f"address {self.address:#x} is beyond the {ADDRESS_LIMIT.bit_length() - 1} bits of addresses")
        for dimension, extent in enumerate(self.dims):
            if not 1 <= extent <= MAX_DIM:
                found.append(f"dimension {dimension} has {extent} elements; it needs 1 to 2^32")
        for dimension, stride in enumerate(self.strides[1:], start=1):
            if stride % alignment:
                found.append(
                    f"stride of dimension {dimension} is {stride} bytes, {stride % alignment} past a multiple of "
                    f"{alignment}"
                )
            if not 0 <= stride < STRIDE_LIMIT:
                found.append(f"stride of dimension {dimension} is {stride} bytes; it needs to be below 2^40")
        return found

    def _box_violations(self) -> list[str]:
        """Extents of the box and the steps through it."""
        found = []
        for dimension, extent in enumerate(self.box):
            if not 1 <= extent <= MAX_BOX:
                found.append(f"box has {extent} elements along dimension {dimension}; it needs 1 to {MAX_BOX}")
        for dimension, step in enumerate(self.element_strides):
            if not 1 <= step <= MAX_ELEMENT_STRIDE:
                found.append(
                    f"element stride {step} along dimension {dimension}; it needs to be 1 to {MAX_ELEMENT_STRIDE}"
                )
        row = self.box[0] * self.element_bytes
        product = f"{self.box[0]} elements x {self.element_bytes} bytes = {row} bytes"
        if self.interleave == 0 and row % ALIGNMENT:
            found.append(f"rows of the box are {product}, {row % ALIGNMENT} past a multiple of {ALIGNMENT}")
        if self.interleave == 0 and self.swizzle and row > self.swizzle:
            found.append(f"rows of the box are {product}; a swizzle of {self.swizzle} bytes allows {self.swizzle}")
        if self.box_bytes > SMEM_PER_CTA:
            extents = " x ".join(str(extent) for extent in (*self.box, self.element_bytes))
            found.append(f"a box is {extents} = {self.box_bytes} bytes; a CTA has {SMEM_PER_CTA} of shared memory")
        return found

    def _mode_violations(self) -> list[str]:
        """Swizzle, interleave, L2 promotion and fill."""
        found = []
        if self.swizzle not in _SWIZZLES:
            found.append(f"swizzle {self.swizzle}; it needs to be 0, 32, 64 or 128 bytes")
        if self.interleave not in (0, 16, 32):
            found.append(f"interleave {self.interleave}; it needs to be 0, 16 or 32 bytes")
        if self.interleave and self.rank < 3:
            found.append(f"interleave {self.interleave} with rank {self.rank}; it needs at least 3 dimensions")
        if self.interleave == 32 and self.swizzle != 32:
            found.append(f"interleave 32 with swizzle {self.swizzle}; it needs a swizzle of 32 bytes")
        if self.l2_promotion not in (0, 64, 128, 256):
            found.append(f"L2 promotion {self.l2_promotion}; it needs to be 0, 64, 128 or 256 bytes")
        if self.oob_fill not in ("zeros", "nan"):
            found.append(f"out-of-bounds fill {self.oob_fill!r}; it needs to be zeros or nan")
        if self.oob_fill == "nan" and self.element_type not in _FLOATING:
            found.append(
                f"out-of-bounds fill nan with element type {self.element_type}; it needs a floating-point type"
            )
        return found


def decode(data: bytes) -> TensorMap:
    """The tensor map in 128 bytes, as a kernel parameter holds it. The result may still have violations.

    Raises TensorMapError for anything but a tiled map without interleave, with element strides of 1, 128-byte L2
    promotion and zeros outside the tensor, and when the span that the map records is not the one that it describes.
    """
    if len(data) != TENSOR_MAP_BYTES:
        raise TensorMapError(f"a tensor map has {TENSOR_MAP_BYTES} bytes; these are {len(data)}")
    words = _WORDS.unpack_from(data)
    for index, (word, known) in enumerate(zip(words, _KNOWN_BITS, strict=True)):
        if word & ~known:
            raise TensorMapError(
                f"outside the model: word {index} of the tensor map is {word:#018x}, with bits {word & ~known:#x} "
                "whose meaning is not known"
            )
    type_code = words[1] >> 7 & 15
    l2_code = words[1] >> 17 & 3
    if not words[1] & _TILED or type_code not in _ELEMENT_TYPES or l2_code not in _L2_PROMOTIONS:
        raise TensorMapError(
            f"outside the model: word 1 of the tensor map is {words[1]:#018x}: tiled {bool(words[1] & _TILED)}, "
            f"element type {type_code}, L2 promotion {l2_code}"
        )
    rank = (words[1] >> 4 & 7) + 1
    element_type, element_bytes = _ELEMENT_TYPES[type_code]
    low = (words[1] >> 32, words[2] & _LOW32, words[2] >> 32, words[3] & _LOW32)
    high = tuple(words[3] >> 32 + 4 * index & 15 for index in range(4))
    strides = [(upper << 32 | lower) << 4 for lower, upper in zip(low, high, strict=True)]
    dims = [words[4] & _LOW32, words[4] >> 32, words[5] & _LOW32, words[5] >> 32, words[6] & _LOW32]
    box = [words[6] >> 56, *(words[7] >> 8 * index & 255 for index in range(4))]
    if rank > MAX_RANK or any(strides[rank - 1 :]) or any(dims[rank:]) or any(box[rank:]):
        raise TensorMapError(f"outside the model: a tensor map of rank {rank} with values in further dimensions")
    extents = tuple(extent + 1 for extent in dims[:rank])
    tensor_strides = (element_bytes, *strides[: rank - 1])
    span = element_bytes + sum((extent - 1) * stride for extent, stride in zip(extents, tensor_strides, strict=True))
    if bool(words[1] & _LARGE) != (span % 2**64 >= _LARGE_BYTES):
        raise TensorMapError(
            f"outside the model: the tensor map describes a span of {span} bytes, and its word 1, {words[1]:#018x}, "
            f"says {'at least' if words[1] & _LARGE else 'less than'} {_LARGE_BYTES}"
        )
    return TensorMap(
        address=words[0],
        element_type=element_type,
        element_bytes=element_bytes,
        dims=extents,
        strides=tensor_strides,
        box=tuple(extent + 1 for extent in box[:rank]),
        element_strides=(1,) * rank,
        swizzle=_SWIZZLES[words[1] >> 13 & 3],
        l2_promotion=_L2_PROMOTIONS[l2_code],
    )
