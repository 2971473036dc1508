"""Reading a spec file and judging it: what comes back is legal on Hopper and can be rendered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from fa3gen.design import rules
from fa3gen.spec import specfile
from fa3gen.spec.model import Spec
from fa3gen.spec.specfile import SpecFile


def load(path: Path, *, roots: Sequence[Path] = (), search: Sequence[Path] = ()) -> SpecFile:
    """As `fa3gen.spec.specfile.load`, and every variant is held against the rules.

    Raises SpecError with everything that is wrong with the file.
    """
    return specfile.load(path, judge=_judge, roots=roots, search=search)


def _judge(spec: Spec) -> Iterable[tuple[str, str]]:
    return [(violation.field, violation.message) for violation in rules.check(spec)]
