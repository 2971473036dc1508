"""What the specs of all operations are made of."""

from __future__ import annotations

from typing import Annotated, Literal, Union

from pydantic import BaseModel, ConfigDict, Field

DType = Literal["bf16", "fp16"]
AttentionDType = Literal["bf16", "fp16", "e4m3"]
OutputDType = Literal["bf16", "fp16", "fp32"]
StoredDType = Literal["e4m3", "e5m2"]
Swizzle = Literal["none", "32B", "64B", "128B"]
Major = Literal["k", "mn"]
Source = Literal["smem", "registers"]


class SpecModel(BaseModel):
    """Base of all parts of a spec: frozen, strict about types, closed against unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ScalarProduct(SpecModel):
    """FP32 multiply-adds on the CUDA cores, operands read from shared (k1: global) memory."""

    engine: Literal["scalar"]


class OperandA(SpecModel):
    """The M x K operand of a warpgroup product."""

    source: Source
    major: Major


class OperandB(SpecModel):
    """The N x K operand of a warpgroup product."""

    source: Source = "smem"
    major: Major


class WgmmaProduct(SpecModel):
    """Warpgroup matrix multiply-accumulate, 16-bit or 8-bit operands, f32 accumulator."""

    engine: Literal["wgmma"]
    a: OperandA
    b: OperandB


class MmaProduct(SpecModel):
    """Matrix multiply-accumulate of single warps (mma.sync), both operands of 16 bits in registers, f32 accumulator.

    Each warp multiplies keys of its own with all query rows of a tile, 16 at most.
    """

    engine: Literal["mma"]


Product = Annotated[Union[ScalarProduct, WgmmaProduct, MmaProduct], Field(discriminator="engine")]


class CooperativeSchedule(SpecModel):
    """All warps run one loop, in which they load, multiply and take the softmax in turn."""

    kind: Literal["cooperative"] = "cooperative"


class WarpSpecializedSchedule(SpecModel):
    """One more warpgroup, of which two warps load; `tile.warpgroups` consumer warpgroups compute."""

    kind: Literal["warp_specialized"]
    overlap: bool = Field(
        description="Whether a warpgroup runs Q K^T of the next tile and P V of this one beside its softmax."
    )
