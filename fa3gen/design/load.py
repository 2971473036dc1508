"""Reading a spec file and judging it: what comes back is legal on Hopper and can be rendered."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fa3gen.design import rules
from fa3gen.design.nearest import described, nearest_legal, yaml_text
from fa3gen.spec import specfile
from fa3gen.spec.model import Spec
from fa3gen.spec.specfile import SpecFile


def load(path: Path, *, roots: Sequence[Path] = (), search: Sequence[Path] = ()) -> SpecFile:
    """As `fa3gen.spec.specfile.load`, and every variant is held against the rules.

    Raises SpecError with everything that is wrong with the file.
    """
    return specfile.load(path, judge=_judge, roots=roots, search=search)


@functools.lru_cache(maxsize=1024)  # a workspace has specs of the package beside its own
def _judge(spec: Spec) -> tuple[tuple[str, str], ...]:
    """Every violation; and what makes the spec legal in one step, where the messages do not say so themselves."""
    violations = rules.check(spec)
    found = [(violation.field, violation.message) for violation in violations]
    changes = nearest_legal(spec) if violations else None
    if changes is not None and not all(_said(change, violations) for change in changes):
        found.append(("", f"what makes it legal in one step: {described(changes)}"))
    return tuple(found)


def _said(change: tuple[str, Any], violations: Sequence[rules.Violation]) -> bool:
    """Whether the rule that objects to this field names this value as a way out."""
    path, value = change
    ways_out = (violation.message.rpartition(";")[2] for violation in violations if violation.field == path)
    return any(re.search(rf"\b{re.escape(yaml_text(value))}\b", way_out) for way_out in ways_out)
