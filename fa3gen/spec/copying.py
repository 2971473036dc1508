"""The spec of a copy: a tensor through shared memory, by TMA both ways."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fa3gen.hardware.dtypes import DTYPES, Dtype
from fa3gen.spec.common import DType, SpecModel, Swizzle

Extent = Annotated[int, Field(gt=0, strict=True)]


class CopyProblem(SpecModel):
    """What is copied: a tensor whose last dimension, its row, is contiguous."""

    row: int = Field(gt=0, description="Elements of the last dimension, which is contiguous.")
    dtype: DType = Field(default="bf16", description="Element type.")
    layout: Literal["dense", "packed"] = Field(
        default="dense",
        description="`dense`: any order and strides of the other dimensions; `packed`: (total, row), sequences one "
        "behind the other with their offsets, each copied in tiles of its own.",
    )


class Box(SpecModel):
    """What one TMA copy moves. As many boxes side by side as a row needs are a tile."""

    extents: Annotated[tuple[Extent, ...], Field(strict=False, min_length=2, max_length=5)] = Field(
        description="Elements along each dimension of the tensor, those along the row last."
    )
    swizzle: Swizzle = Field(description="How 16-byte units of the box lie in shared memory.")
    wide: Literal["copies", "folded"] = Field(
        default="copies",
        description="Rows wider than the box. `copies`: a copy for each of the boxes side by side; `folded`: one copy "
        "of them all, by a tensor map in which rows are split in two dimensions.",
    )


class CopyRing(SpecModel):
    """Tiles in shared memory, on their way in or on their way out."""

    stages: int = Field(gt=0, description="Places for a tile.")
    reading: int = Field(
        default=1, ge=0, description="Stores that may still be reading their stage when the next load is issued."
    )
    ctas_per_sm: int = Field(default=1, gt=0, description="CTAs that are to share an SM, each with a ring.")


class Copy(SpecModel):
    """One tensor copied to another, global to shared memory by TMA and out again by TMA."""

    operation: Literal["copy"]
    problem: CopyProblem
    box: Box
    ring: CopyRing | None = Field(
        default=None, description="Places for several tiles and CTAs that take tile after tile; null: a CTA for each."
    )

    @property
    def element(self) -> Dtype:
        """What is known of the element type."""
        return DTYPES[self.problem.dtype]
