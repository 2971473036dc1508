"""What a command says beside its work: warnings of the rules of taste, and which spec files it left out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fa3gen.base.errors import Problem
from fa3gen.design import rules
from fa3gen.spec.specfile import Variant


def warn(variants: Sequence[Variant]) -> None:
    """Print each warning once on standard error, with the modules that it is about unless it is about all of them."""
    found: dict[Problem, list[str]] = {}
    for variant in variants:
        for field, message in rules.warnings(variant.spec):
            found.setdefault(Problem(variant.source, None, field, message), []).append(variant.stem)
    for problem, stems in found.items():
        where = f" (in {', '.join(stems)})" if len(stems) < len(variants) else ""
        print(f"warning: {problem}{where}", file=sys.stderr)


def note(problems: Sequence[Problem]) -> None:
    """Say on standard error which spec files are left out because of their own problems: the first one of each."""
    found: dict[Path, list[Problem]] = {}
    for problem in problems:
        found.setdefault(problem.path, []).append(problem)
    for first, *others in found.values():
        more = f" (and {len(others)} more)" if others else ""
        print(f"note: left out: {first}{more}", file=sys.stderr)
