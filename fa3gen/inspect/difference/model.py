"""The differences as frozen data, and as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fa3gen.generate.module_plan import ModulePlan
from fa3gen.spec.model import Spec


@dataclass(frozen=True)
class Side:
    """One module of a comparison.

    `source` is its spec file as people write it. `spec` and `plan` are None where the spec, of an older revision, is
    none that this fa3gen can read. `module` is the text of the generated file, called `module_name`; None where there
    is no such file. `notes` is what a reader has to know of all this. `revision` is empty for the working tree.
    `origins` says of each field that is written in which spec file.
    """

    stem: str
    source: str
    summary: str
    spec: Spec | None
    plan: ModulePlan | None
    module: str | None
    module_name: str
    revision: str = ""
    notes: tuple[str, ...] = ()
    origins: Mapping[str, Path] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The stem, and the revision where it is one."""
        return f"{self.stem} at {self.revision}" if self.revision else self.stem


@dataclass(frozen=True)
class FieldChange:
    """A field of the spec by its dotted path; None where a side does not have it.

    `base` is the spec file that the new value comes from where that is one that the new side extends.
    """

    field: str
    old: Any
    new: Any
    base: str | None = None


@dataclass(frozen=True)
class PlanChange:
    """One fact of the plan in words; None where a side does not have it."""

    topic: str
    what: str
    old: str | None
    new: str | None


@dataclass(frozen=True)
class Step:
    """One step of the timeline: on both sides, or on one of them only."""

    change: Literal["same", "removed", "added"]
    text: str


@dataclass(frozen=True)
class SourceChange:
    """The two texts of a module, called `old_name` and `new_name`."""

    old_name: str
    new_name: str
    old: str
    new: str


@dataclass(frozen=True)
class PairDifference:
    """What differs between two modules. `steps` is empty where the steps are the same, `source` None where the text is.

    `source` is also None where it was not asked for or a side has no module.
    """

    old: Side
    new: Side
    fields: tuple[FieldChange, ...]
    plan: tuple[PlanChange, ...]
    steps: tuple[Step, ...]
    source: SourceChange | None

    @property
    def differs(self) -> bool:
        """Whether anything that was compared differs, or is there on one side only."""
        one_sided = (self.old.module is None) != (self.new.module is None) or (self.old.spec is None) != (
            self.new.spec is None
        )
        return bool(self.fields or self.plan or self.steps or self.source) or one_sided

    @property
    def decided(self) -> tuple[object, ...]:
        """What differs in spec and plan, by value: equal for pairs that differ in the same way."""
        return self.fields, self.plan, tuple(step for step in self.steps if step.change != "same")


@dataclass(frozen=True)
class Difference:
    """All pairs, and the modules of each side that have no partner. `spec_texts` are YAML files that cannot be read."""

    pairs: tuple[PairDifference, ...]
    only_old: tuple[str, ...] = ()
    only_new: tuple[str, ...] = ()
    spec_texts: tuple[SourceChange, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether there is any difference."""
        return bool(self.only_old or self.only_new or self.spec_texts or any(pair.differs for pair in self.pairs))
