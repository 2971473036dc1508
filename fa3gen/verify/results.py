"""What runs of a module find out, on a GPU and on the CPU model: errors, cases, checks. Records keep them as they are.

Imports neither torch nor cutlass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict

# For whoever reads them back from JSON: a key that is not known is refused.
CLOSED = ConfigDict(extra="forbid")


@dataclass(frozen=True)
class Errors:
    """Distance from the reference: maximum, Frobenius norm over the reference's; None where it is not a number."""

    __pydantic_config__ = CLOSED

    max_abs: float | None
    relative: float | None


@dataclass(frozen=True)
class CaseResult:
    """One case: the module's errors beside PyTorch's, the limits, and what failed (empty when it passed).

    `o_block_ratio` is the worst block's error over that block's limit. `lse_error.relative` is the largest
    |LSE - ref| / max(1, |ref|). Fields are None when the module raised before there was anything to measure.
    """

    __pydantic_config__ = CLOSED

    name: str
    shape: str
    o_error: Errors | None
    o_yardstick: Errors | None
    o_max_abs_limit: float | None
    o_block_ratio: float | None
    lse_error: Errors | None
    lse_yardstick: Errors | None
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


@dataclass(frozen=True)
class CpuCaseResult:
    """One case: errors, the share of the limits that they use, and what failed (empty when it passed).

    `o_used` is the largest |O - ref| over its limit, `o_spread` the mean of (O - ref)^2 over its variance,
    `lse_error.relative` the largest |LSE - ref| / max(1, |ref|). None when there was nothing to measure.
    """

    __pydantic_config__ = CLOSED

    name: str
    shape: str
    o_error: Errors | None
    o_used: float | None
    o_spread: float | None
    lse_error: Errors | None
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not self.failures


@dataclass(frozen=True)
class Check:
    """A property that is not a matter of error: `passed` None means it could not be tried, `detail` says why."""

    __pydantic_config__ = CLOSED

    name: str
    passed: bool | None
    detail: str = ""


class Outcome:
    """What a report amounts to, whatever ran: cases and checks, each with what failed."""

    cases: tuple[Any, ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every case and every check that could be tried passed."""
        return all(case.passed for case in self.cases) and all(check.passed is not False for check in self.checks)

    @property
    def failures(self) -> tuple[str, ...]:
        """Every failure in words, with the case or check it belongs to."""
        cases = [f"{case.name}: {failure}" for case in self.cases for failure in case.failures]
        return (*cases, *(f"{check.name}: {check.detail}" for check in self.checks if check.passed is False))
