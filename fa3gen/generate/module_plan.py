"""What the plan of every module has, whatever it computes."""

from __future__ import annotations

from dataclasses import dataclass

from fa3gen.design.cta import Cta
from fa3gen.design.operation import Operation
from fa3gen.generate.expected import Expectation
from fa3gen.generate.header import Description, Header
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
