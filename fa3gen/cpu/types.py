"""PTX fundamental types as NumPy types (PTX ISA, "Fundamental Types"). 16-bit floats are kept as their bits."""

from __future__ import annotations

import numpy as np

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
S8, S16, S32, S64 = np.int8, np.int16, np.int32, np.int64
F32, F64 = np.float32, np.float64
PRED = np.bool_

Type = type[np.generic]

TYPES: dict[str, Type] = {
    **{"b8": U8, "u8": U8, "s8": S8, "b16": U16, "u16": U16, "s16": S16},
    **{"b32": U32, "u32": U32, "s32": S32, "b64": U64, "u64": U64, "s64": S64},
    **{"f16": U16, "bf16": U16, "f16x2": U32, "bf16x2": U32, "f32": F32, "f64": F64, "pred": PRED},
}

UNSIGNED: dict[int, Type] = {8: U8, 16: U16, 32: U32, 64: U64}

# What the types are called in translated blocks.
NAMES: dict[Type, str] = {
    **{U8: "U8", U16: "U16", U32: "U32", U64: "U64", S8: "S8", S16: "S16", S32: "S32", S64: "S64"},
    **{F32: "F32", F64: "F64", PRED: "PRED"},
}


def width(type_: Type) -> int:
    """Bits of a type; 1 for a predicate."""
    return 1 if type_ is PRED else np.dtype(type_).itemsize * 8
