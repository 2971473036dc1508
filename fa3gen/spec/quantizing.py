"""The spec of a quantisation: 16-bit elements to 8 bits with their scales, rotated and transposed where it says so."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fa3gen.hardware.dtypes import DTYPES, E4M3, Dtype
from fa3gen.spec.common import DType, SpecModel

ScaledPer = Literal["head", "block", "token"]
BLOCK_ROWS = 128  # of a head, that share a scale where attention takes scales of blocks


class QuantizeProblem(SpecModel):
    """What is computed: e4m3 elements x / scale, scale = the largest |x| of what shares it / 448."""

    head_dim: int = Field(gt=0, description="Elements of a row, which is contiguous in x.")
    dtype: DType = Field(default="bf16", description="Element type of x.")
    rotate: bool = Field(
        default=False,
        description="Whether each row is multiplied by random signs and a Hadamard matrix over the square root of "
        "`head_dim`. Q and K rotated alike have the same Q K^T.",
    )
    transpose: bool = Field(
        default=False, description="Whether the sequence is contiguous in the output, as attention wants V of 8 bits."
    )
    permute_keys: bool = Field(
        default=False,
        description="With `transpose`, whether each 16 rows have the order in which attention has P as accumulator, "
        "as `v_keys: permuted` wants V. The output has whole 16 rows, zeros behind the last one.",
    )
    scale: ScaledPer = Field(
        default="head",
        description="What shares a scale. `head`: all that one head of k serves, found by a kernel of its own, or "
        "given by a call; `block`: `tile.rows` rows of a head; `token`: a row.",
    )


class QuantizeTile(SpecModel):
    """Rows of one head that a CTA reads at once, keeps in registers and writes."""

    rows: int = Field(gt=0, description="Rows of one head.")
    threads: int = Field(gt=0, description="Threads per CTA.")
    per_sm: int = Field(gt=0, description="CTAs that an SM has room for, by their registers.")


class Quantize(SpecModel):
    """One quantisation of rows of one head dim, for any number of sequences, rows and heads."""

    operation: Literal["quantize"]
    problem: QuantizeProblem
    tile: QuantizeTile

    @property
    def element(self) -> Dtype:
        """What is known of the element type of x."""
        return DTYPES[self.problem.dtype]

    @property
    def out_element(self) -> Dtype:
        """What is known of that of the output."""
        return E4M3
