"""What the plan of every module has, whatever it computes."""

from __future__ import annotations

from dataclasses import dataclass

from fa3gen.design.cta import Cta
from fa3gen.design.operation import Operation, Tensor
from fa3gen.generate.expected import Expectation
from fa3gen.generate.header import Description, Header
from fa3gen.hardware.dtypes import Dtype
from fa3gen.spec.model import Spec


@dataclass(frozen=True)
class ModulePlan:
    """Base of plans: what rendering, compiling and comparing need of a module, and `spine`, its template.

    `described` is what the header says, before it is text.
    """

    stem: str
    spec: Spec
    operation: Operation
    cta: Cta
    described: Description
    header: Header
    expectation: Expectation

    @property
    def spine(self) -> str:
        """The template that the module is rendered from."""
        raise NotImplementedError

    @property
    def templates(self) -> dict[str, str]:
        """The section files that the plan chose, by what they are for."""
        return {"spine": self.spine}

    @property
    def converts(self) -> bool:
        """Whether a warpgroup makes tiles of 16 bits of what was loaded."""
        return False


@dataclass(frozen=True)
class Parameter:
    """What a function of the module takes; a number has a dtype, which its annotation names."""

    name: str
    dtype: Dtype | None = None

    def __str__(self) -> str:
        """As the function's signature has it."""
        return self.name if self.dtype is None else f"{self.name}: cutlass.{self.dtype.cutlass_name}"


@dataclass(frozen=True)
class Named:
    """A tensor with its name, as a loop over the arguments of a call has it."""

    tensor: Tensor

    def __str__(self) -> str:
        """`("q", q)`."""
        return f'("{self.tensor}", {self.tensor})'


@dataclass(frozen=True)
class ImportsPlan:
    """Which optional imports the module needs."""

    dataclasses: str
    pipeline: bool
    nvgpu: str
    smem_allocator: bool
    math: bool = True
