"""The spec of a merge: what parts of the keys gave, each with its own O and LSE, added up."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fa3gen.hardware.dtypes import DTYPES, Dtype
from fa3gen.spec.common import OutputDType, SpecModel


class CombineProblem(SpecModel):
    """What is computed: LSE = log(sum(exp(LSE_i))) and O = sum(exp(LSE_i - LSE) O_i), of parts in float32."""

    dtype: OutputDType = Field(default="bf16", description="Element type of O; parts and both LSE are float32.")


class CombineCta(SpecModel):
    """Threads, each of which has a few columns of a row of O."""

    threads: int = Field(gt=0, description="Threads per CTA.")
    per_sm: int = Field(
        gt=0,
        description="CTAs that an SM should have: where rows of O are too few for as many, the parts of a row are "
        "shared out among threads.",
    )


class CombineParts(SpecModel):
    """How the parts of a row are read, whose number each call says."""

    at_once: int = Field(gt=0, description="Parts that a thread has on their way from memory before it uses one.")
    shares: int = Field(gt=0, description="Shares of a row's parts at most, each added up by threads of its own.")


class Combine(SpecModel):
    """One merge of any number of parts of the keys, for any head dim."""

    operation: Literal["combine"]
    problem: CombineProblem = CombineProblem()
    cta: CombineCta
    parts: CombineParts

    @property
    def element(self) -> Dtype:
        """What is known of the element type of O."""
        return DTYPES[self.problem.dtype]
