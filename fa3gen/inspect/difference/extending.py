"""What a change of one spec changes besides: modules of the specs that extend it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fa3gen.base.wording import counted
from fa3gen.spec.specfile import Variant


def also_changes(changed: Sequence[Variant], bases: Collection[str]) -> str:
    """`also changes: 3 modules of k6_sequential (extends k6)`."""
    specs = list(dict.fromkeys(variant.source.stem for variant in changed))
    verb = "extends" if len(specs) == 1 else "extend"
    return f"also changes: {counted(len(changed), 'module')} of {', '.join(specs)} ({verb} {', '.join(bases)})"
