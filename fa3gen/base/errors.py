"""Errors that are the caller's to mend. The command line prints them without a traceback and exits with 2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class UserError(Exception):
    """A request that cannot be served as it stands; the message says what to do next."""


class Caution(UserWarning):
    """What a user should know although it stops nothing. The command line prints its text alone, on standard error."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a spec: where it stands (`line` counts from 1) and what would mend it."""

    path: Path
    line: int | None
    field: str
    message: str

    def __str__(self) -> str:
        """`specs/x.yaml:7: tile.kv: message`."""
        place = f"{self.path}:{self.line}" if self.line else str(self.path)
        return f"{place}: {self.field}: {self.message}" if self.field else f"{place}: {self.message}"


class SpecError(UserError):
    """Everything that is wrong with one spec file, reported at once."""

    def __init__(self, problems: list[Problem] | tuple[Problem, ...]) -> None:
        """Keep the problems; the message is all of them, one a line."""
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
