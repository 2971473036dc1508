"""What failed, said once: one mistake in a kernel usually fails in many cases, at the same instruction."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fa3gen.cpu.findings import Kind
from fa3gen.verify.results import Outcome

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_INSTRUCTION = re.compile(r"PTX line \d+")


@dataclass(frozen=True)
class Group:
    """One thing that failed, in the words of the first case that met it, and the cases and checks that did."""

    text: str
    names: tuple[str, ...]


def grouped(outcome: Outcome) -> list[Group]:
    """The failures of a report, alike ones together, in the order in which they were met first.

    Hazards are alike when they are of one kind and at one instruction; other failures when only numbers differ.
    """
    texts: dict[tuple[str, str], str] = {}
    names: dict[tuple[str, str], list[str]] = {}
    for name, failure in _failures(outcome):
        kind = next((kind.value for kind in Kind if f"{kind.value}: " in failure), None)
        if kind is None:
            key = "", _NUMBER.sub("#", failure)
        else:
            instruction = _INSTRUCTION.search(failure)
            key = kind, instruction.group() if instruction else ""
        texts.setdefault(key, failure)
        met = names.setdefault(key, [])
        if name not in met:
            met.append(name)
    return [Group(text, tuple(names[key])) for key, text in texts.items()]


def _failures(outcome: Outcome) -> Iterator[tuple[str, str]]:
    for case in outcome.cases:
        yield from ((case.name, failure) for failure in case.failures)
    yield from ((check.name, check.detail) for check in outcome.checks if check.passed is False)
