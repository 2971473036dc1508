"""The search space: a small YAML file, its combinations, and which of them are legal.

```yaml
base: k6                                # what is not varied comes from this spec
problem: {head_dim: 128, mask: causal}  # optional: which of its modules; dtype and other fields of `problem` as well
space:                                  # field path -> values, as in the matrix of a spec
  tile.kv: [112, 128, 144, {value: 176, with: {load: {kv_stages: 1}}}]
  schedule.kind: [warp_specialized, ping_pong]
```

Values are laid on the base in the order of the fields, as a matrix does it. One thing is different: where a value
changes the arm of a union, the fields that the new arm has as well keep their values, so that an axis over
`schedule.kind` need not repeat `overlap`.

A combination that the models or the rules of specs refuse is pruned and counted by its reasons; it is no error. One
that the rules of taste only warn of is tried: measuring is how a taste is tested.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fa3gen.base.errors import Problem, SpecError
from fa3gen.design import rules
from fa3gen.spec.complaints import UNIONS, described, explain, models_of, nearest, union_tags
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import label, nearest_field
from fa3gen.spec.yamltree import Node, merge, override, read

MAX_COMBINATIONS = 20_000  # a second for every thousand or two of them
KEYS = ("base", "problem", "space")

_FIELD_PATH = re.compile(r"[a-z_]+(?:\.[a-z_]+)*\Z")


@dataclass(frozen=True)
class Axis:
    """One field and the values to try; a value may bring other fields along (`company`)."""

    field: str
    values: tuple[tuple[Node, Node | None], ...]


@dataclass(frozen=True)
class Space:
    """A search space file. `problem` holds the fields that every candidate has, as a tree of spec fields."""

    path: Path
    base: str | None
    problem: Node
    axes: tuple[Axis, ...]

    @property
    def combinations(self) -> int:
        """How many there are, legal or not."""
        return math.prod(len(axis.values) for axis in self.axes)


@dataclass(frozen=True)
class Candidate:
    """A legal combination: a stem made of its values, and its spec."""

    stem: str
    spec: Forward


@dataclass(frozen=True)
class Reason:
    """What is said against some combinations: the field, the words with the numbers of the first one, how many."""

    field: str
    example: str
    count: int


@dataclass(frozen=True)
class Enumeration:
    """All combinations of a space: the legal ones, each spec once, and why the others are not.

    `pruned` counts a refused combination once for every reason, `warned` a legal one once for every warning; `refused`
    counts combinations.
    """

    candidates: tuple[Candidate, ...]
    refused: int
    repeated: int
    pruned: tuple[Reason, ...]
    warned: tuple[Reason, ...]

    @property
    def total(self) -> int:
        """How many combinations were looked at."""
        return len(self.candidates) + self.refused + self.repeated


def load_space(path: Path, shown: Path | None = None) -> Space:
    """Read a search space, naming the file `shown` in problems; raises SpecError with all of them."""
    shown = shown or path
    problems: list[Problem] = []
    root = read(path, shown, problems)
    if root is None:
        raise SpecError(problems)
    if not isinstance(root.value, dict):
        raise SpecError([*problems, Problem(shown, root.line, "", f"a mapping is needed, got {_got(root)}")])
    reader = _Reader(problems)
    for key, node in root.mapping.items():
        if key not in KEYS:
            reader.report(node, key, f"unknown key '{key}'{nearest(key, KEYS) or '; known here: ' + ', '.join(KEYS)}")
    base = reader.base(root.mapping.get("base"))
    problem = reader.problem(root.mapping.get("problem"), root)
    axes = reader.axes(root.mapping.get("space"), root)
    space = Space(shown, base, problem, axes)
    if space.combinations > MAX_COMBINATIONS:
        text = f"{space.combinations} combinations are more than {MAX_COMBINATIONS}; take values out"
        reader.report(root.mapping["space"], "space", text)
    if problems:
        raise SpecError(problems)
    return space


def _got(node: Node) -> str:
    return described(node.plain())


class _Reader:
    """Takes a file's tree apart, collecting problems."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems

    def report(self, node: Node, field: str, message: str) -> None:
        self.problems.append(Problem(node.path, node.line, field, message))

    def base(self, node: Node | None) -> str | None:
        if node is None:
            return None
        if not isinstance(node.value, str) or not node.value:
            self.report(node, "base", f"the stem of a spec is needed, got {_got(node)}")
            return None
        return node.value

    def problem(self, node: Node | None, root: Node) -> Node:
        """`{head_dim: 128, mask: causal}` as fields of a spec: the mask stands beside the problem there."""
        if node is None:
            return Node({}, root.path, root.line)
        if not isinstance(node.value, dict):
            self.report(
                node, "problem", f"a mapping such as {{head_dim: 128, mask: causal}} is needed, got {_got(node)}"
            )
            return Node({}, root.path, root.line)
        (part,) = models_of(Forward.model_fields["problem"])
        known = [*part.model_fields, "mask"]
        for key, child in node.mapping.items():
            if key not in known:
                hint = nearest(key, known) or f"; known here: {', '.join(known)}"
                self.report(child, f"problem.{key}", f"unknown key '{key}'{hint}")
        inner = {key: child for key, child in node.mapping.items() if key != "mask"}
        fields = {"problem": Node(inner, node.path, node.line)} if inner else {}
        if "mask" in node.mapping:
            fields["mask"] = _long_mask(node.mapping["mask"])
        return Node(fields, node.path, node.line)

    def axes(self, node: Node | None, root: Node) -> tuple[Axis, ...]:
        if node is None or not node.mapping:
            where = node or root
            self.report(where, "space", "a mapping of field paths to lists of values is needed, such as tile.kv: [96]")
            return ()
        return tuple(axis for name, child in node.mapping.items() if (axis := self._axis(name, child)) is not None)

    def _axis(self, name: str, node: Node) -> Axis | None:
        where = f"space.{name}"
        if not _FIELD_PATH.match(name) or name.partition(".")[0] not in Forward.model_fields:
            self.report(node, where, f"this is no dotted path of a field, such as tile.kv{nearest_field(name)}")
        elif name.partition(".")[0] in ("problem", "mask"):
            self.report(node, where, "candidates solve one problem; name it under `problem`, or tune once for each")
        elif not isinstance(node.value, list) or not node.value:
            self.report(node, where, f"a list of values is needed, got {_got(node)}")
        else:
            return Axis(name, tuple(self._value(where, item) for item in node.value))
        return None

    def _value(self, where: str, item: Node) -> tuple[Node, Node | None]:
        if not {"value", "with"} & item.mapping.keys():
            return item, None
        if item.mapping.keys() != {"value", "with"} or not item.mapping["with"].mapping:
            self.report(item, where, "a value that brings fields along is written {value: 64, with: {tile: {q: 192}}}")
            return item, None
        return item.mapping["value"], item.mapping["with"]


def _long_mask(node: Node) -> Node:
    return Node({"kind": node}, node.path, node.line) if isinstance(node.value, str) else node


def tree_of(fields: Any, path: Path) -> Node:
    """Plain values as a tree, all in line 1 of `path`."""
    if isinstance(fields, Mapping):
        return Node({key: tree_of(value, path) for key, value in fields.items()}, path, 1)
    if isinstance(fields, list | tuple):
        return Node([tree_of(value, path) for value in fields], path, 1)
    return Node(fields, path, 1)


def enumerate_space(space: Space, start: Mapping[str, Any], prefix: str) -> Enumeration:
    """Every combination of `space` laid on the spec fields `start`; stems begin with `prefix`."""
    root = merge(tree_of(start, space.path), space.problem, UNIONS)
    found: dict[Forward, str] = {}
    refused = repeated = 0
    against: list[tuple[str, str]] = []
    advice: list[tuple[str, str]] = []
    for values in itertools.product(*(axis.values for axis in space.axes)):
        fields, labels = _laid(root, space.axes, values)
        spec, said = _checked(fields)
        if spec is None:
            refused += 1
            against += said
        elif spec in found:
            repeated += 1
        else:
            found[spec] = _stem(prefix, labels, found.values())
            advice += said
    candidates = tuple(Candidate(stem, spec) for spec, stem in found.items())
    return Enumeration(candidates, refused, repeated, _reasons(against), _reasons(advice))


def _reasons(said: Sequence[tuple[str, str]]) -> tuple[Reason, ...]:
    """Fields and messages, counted by what is the same in them; the most frequent first."""
    found: dict[tuple[str, str], list[str]] = {}
    for field, message in said:
        found.setdefault((field, _without_numbers(message)), []).append(message)
    ordered = sorted(found.items(), key=lambda entry: -len(entry[1]))
    return tuple(Reason(field, messages[0], len(messages)) for (field, _), messages in ordered)


def _laid(root: Node, axes: Sequence[Axis], values: Sequence[tuple[Node, Node | None]]) -> tuple[Node, list[str]]:
    """One combination laid on `root`, and what its values add to the stem."""
    labels = []
    for axis, (value, company) in zip(axes, values, strict=True):
        keys = axis.field.split(".")
        root = _with_kept_fields(root, override(root, keys, value, UNIONS), keys[0])
        if company is not None:
            root = merge(root, company, UNIONS)
        labels.append(label(axis.field, root.find(keys)[0].plain()))
    return root, [text for text in labels if text]


def _with_kept_fields(before: Node, after: Node, union: str) -> Node:
    """`after`, with the fields of the old arm of `union` that the new arm has as well and was not given."""
    old, new, tag = before.mapping.get(union), after.mapping.get(union), UNIONS.get(union, "")
    if old is None or new is None or tag not in old.mapping or tag not in new.mapping:
        return after
    if old.mapping[tag].value == new.mapping[tag].value:
        return after
    arms = dict(zip(union_tags(union, Forward), models_of(Forward.model_fields[union]), strict=True))
    arm = arms.get(str(new.mapping[tag].value))
    kept = {key: node for key, node in old.mapping.items() if arm is not None and key in arm.model_fields}
    entries = {**after.mapping, union: Node({**kept, **new.mapping}, new.path, new.line)}
    return Node(entries, after.path, after.line)


def _checked(fields: Node) -> tuple[Forward | None, list[tuple[str, str]]]:
    """The spec when it is legal, else None; and what is said against it, each (field, message) once."""
    try:
        spec = Forward.model_validate(fields.plain())
    except ValidationError as error:
        complaints = [explain(entry, Forward) for entry in error.errors(include_url=False)]
        return None, list(dict.fromkeys((".".join(complaint.field), complaint.message) for complaint in complaints))
    violations = rules.check(spec)
    return (None, list(violations)) if violations else (spec, list(rules.warnings(spec)))


def _without_numbers(message: str) -> str:
    """What the messages of one rule have in common: the ways out behind the semicolon and the numbers differ."""
    return re.sub(r"\d+", "#", message.rpartition(";")[0] or message)


def _stem(prefix: str, labels: Sequence[str], taken: Iterator[str] | Any) -> str:
    stem = "_".join([prefix, *labels])
    names = set(taken)
    return stem if stem not in names else next(f"{stem}_{n}" for n in itertools.count(2) if f"{stem}_{n}" not in names)
