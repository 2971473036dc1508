"""What the rules of taste have against specs, for commands that work on them: a warning, never an error."""

from __future__ import annotations

import sys
from collections.abc import Sequence

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
