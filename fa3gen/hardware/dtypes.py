"""The element types of tensors, under each of their names: the only table of them.

Imports neither torch nor cutlass; whoever needs torch's own object asks for `Dtype.in_torch()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VECTOR_BYTES = 16  # of the widest access of a thread; TMA wants tensors and their strides aligned to as many
WGMMA_DEPTH_BYTES = 32  # PTX ISA, "Asynchronous Warpgroup Level Matrix Shape": K of any dense product, in bytes


@dataclass(frozen=True)
class Dtype:
    """One element type: `name` in specs, `long_name` in prose and in torch, `cutlass_name` in the CuTe DSL."""

    name: str
    long_name: str
    cutlass_name: str
    bytes: int

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return 8 * self.bytes

    @property
    def torch_name(self) -> str:
        """`torch.bfloat16`."""
        return f"torch.{self.long_name}"

    @property
    def wgmma_k(self) -> int:
        """K of one WGMMA instruction whose operands have this type."""
        return WGMMA_DEPTH_BYTES // self.bytes

    def in_torch(self) -> torch.dtype:
        """The type as torch knows it; imports torch."""
        import torch

        found: torch.dtype = getattr(torch, self.long_name)
        return found


def _table(*dtypes: Dtype) -> Mapping[str, Dtype]:
    return MappingProxyType({dtype.name: dtype for dtype in dtypes})


# What a spec may name.
DTYPES = _table(
    Dtype("bf16", "bfloat16", "BFloat16", 2),
    Dtype("fp16", "float16", "Float16", 2),
    Dtype("fp32", "float32", "Float32", 4),
    Dtype("e4m3", "float8_e4m3fn", "Float8E4M3FN", 1),
    Dtype("e5m2", "float8_e5m2", "Float8E5M2", 1),
)
BF16, FP16, FP32, E4M3, E5M2 = DTYPES.values()
INT32 = Dtype("int32", "int32", "Int32", 4)  # of counters and flags, which no spec names
