"""The spec of a GEMM: D = A B (+ C)."""

from __future__ import annotations

from typing import Annotated, Literal, Union

from pydantic import Field

from fa3gen.hardware.dtypes import DTYPES, Dtype
from fa3gen.spec.common import (
    CooperativeSchedule,
    OutputDType,
    Product,
    SpecModel,
    Swizzle,
    WarpSpecializedSchedule,
)

GemmDType = Literal["bf16", "fp16", "e4m3"]


class GemmProblem(SpecModel):
    """What is computed: D = A B (+ C) for A (m, k), B (k, n), C and D (m, n); sums are float32."""

    dtype: GemmDType = Field(
        default="bf16", description="Element type of A, B and, unless `d` gives another, of C and D."
    )


class GemmTile(SpecModel):
    """What one CTA computes at a time, and who works on it."""

    m: int = Field(gt=0, description="Rows of D.")
    n: int = Field(gt=0, description="Columns of D.")
    k: int = Field(gt=0, description="Depth of one step: columns of A, rows of B.")
    threads: int | None = Field(default=None, gt=0, description="Threads per CTA, for kernels without WGMMA.")
    warpgroups: int | None = Field(
        default=None, gt=0, description="Warpgroups of 128 threads that compute, for kernels with WGMMA."
    )
    band: int = Field(
        default=16,
        gt=0,
        description="Tiles of D that are computed one below the other before the next column of tiles: those that run "
        "at the same time share rows of A and columns of B in L2.",
    )


class GemmCpAsyncLoad(SpecModel):
    """cp.async with commit and wait groups; a ring of `stages` buffers for A and B."""

    engine: Literal["cp_async"]
    stages: int = Field(gt=0, description="Depth of the ring; one stage holds A and B of one step.")


class GemmTmaLoad(SpecModel):
    """The tensor memory accelerator, completing on mbarriers; one counts the bytes of A and B of a stage."""

    engine: Literal["tma"]
    stages: int = Field(gt=0, description="Depth of the ring; one stage holds A and B of one step.")


GemmLoad = Annotated[Union[GemmCpAsyncLoad, GemmTmaLoad], Field(discriminator="engine")]


class GemmSmem(SpecModel):
    """Swizzle of each tile in shared memory."""

    a: Swizzle
    b: Swizzle
    d: Swizzle


class GemmOutput(SpecModel):
    """What is D's own among the properties of tensors."""

    dtype: OutputDType | None = Field(default=None, description="Element type of C and D; null: that of the problem.")
    add_c: bool = Field(default=False, description="D = A B + C, where C is a tensor of its own.")


GemmSchedule = Annotated[Union[CooperativeSchedule, WarpSpecializedSchedule], Field(discriminator="kind")]


class Gemm(SpecModel):
    """One matrix product kernel."""

    operation: Literal["gemm"]
    problem: GemmProblem = GemmProblem()
    tile: GemmTile
    load: GemmLoad
    smem: GemmSmem | None = Field(
        default=None, description="Shared-memory layouts for WGMMA; scalar products read plain rows."
    )
    product: Product
    schedule: GemmSchedule = CooperativeSchedule()
    accumulation: Literal["one_level", "two_levels"] = Field(
        default="one_level",
        description="`two_levels`: the tensor core sums one step, threads add the steps in float32. Of products of 8 "
        "bits the tensor core keeps 13 bits below the largest addend, so that its error grows with k.",
    )
    d: GemmOutput = GemmOutput()

    @property
    def d_dtype(self) -> OutputDType | GemmDType:
        """Element type of C and D."""
        return self.d.dtype or self.problem.dtype

    @property
    def element(self) -> Dtype:
        """What is known of the element type of A and B."""
        return DTYPES[self.problem.dtype]

    @property
    def d_element(self) -> Dtype:
        """What is known of the element type of C and D."""
        return DTYPES[self.d_dtype]
