"""YAML as a tree that remembers where each value was written, and the merging of two such trees.

pydantic sees plain Python values; its complaints are brought back to a file and a line through this tree.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.resolver import VersionedResolver

from fa3gen.base.errors import Problem

Scalar = str | int | float | bool | None

_CORE_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")

# YAML 1.2.2, section 10.3.2 (core schema). ruamel's own resolver also knows timestamps, 1_000 and, after a `%YAML 1.1`
# directive, `no` as a boolean: none of these belongs into a spec.
_NULL = re.compile(r"(?:null|Null|NULL|~|)\Z")
_TRUE = re.compile(r"(?:true|True|TRUE)\Z")
_FALSE = re.compile(r"(?:false|False|FALSE)\Z")
_INT = re.compile(r"[-+]?[0-9]{1,18}\Z")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?\Z")


@dataclass(frozen=True, eq=False)
class Node:
    """A YAML value and the place of its key (or, without a key, its own place); `line` counts from 1.

    Trees share their nodes, so that nobody changes a `value`: `merge` and `override` make new ones.
    """

    value: Scalar | dict[str, "Node"] | list["Node"]
    path: Path
    line: int

    @property
    def mapping(self) -> dict[str, "Node"]:
        """The entries of a mapping; no entries for anything else."""
        return self.value if isinstance(self.value, dict) else {}

    def plain(self) -> Any:
        """The value as dicts, lists and scalars, without places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def leaves(self, field: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], "Node"]]:
        """The key path and node of every value that is no mapping."""
        if not isinstance(self.value, dict):
            return [(field, self)]
        found = []
        for key, child in self.value.items():
            found += child.leaves((*field, key)) if isinstance(child.value, dict) else [((*field, key), child)]
        return found

    def find(self, field: Sequence[str]) -> tuple["Node", bool]:
        """The node at the key path `field` and True, or the nearest enclosing mapping that exists and False."""
        node = self
        for key in field:
            if key not in node.mapping:
                return node, False
            node = node.mapping[key]
        return node, True


class _NoImplicitTypes(VersionedResolver):
    """Leaves plain scalars alone, so that a tag is one that somebody wrote; `_scalar` gives the types."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        return super().resolve(kind, value, (False, False) if kind is ScalarNode else implicit)


def read(path: Path, shown: Path, problems: list[Problem]) -> Node | None:
    """Read the one YAML document in `path`, naming the file `shown` in every problem.

    Problems are appended to `problems`. Returns None when there is no tree to go on with; duplicate keys, tags and
    keys that are not strings leave a tree in which the first value of a key stands.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        problems.append(Problem(shown, None, "", f"cannot be read: {error.strerror or error}"))
        return None
    except UnicodeDecodeError as error:
        problems.append(Problem(shown, None, "", f"is not UTF-8 text ({error.reason} at byte {error.start})"))
        return None
    tree, found = _tree(text, shown)
    problems.extend(found)
    return tree


def content(path: Path) -> bytes | None:
    """What stands in a file; None where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return None


@functools.lru_cache(maxsize=512)
def _tree(text: str, shown: Path) -> tuple[Node | None, tuple[Problem, ...]]:
    """The tree of a text and what is wrong with it, parsed once: a spec is read again for each that extends it."""
    problems: list[Problem] = []
    tree = None
    try:
        document = _parser().compose(text)
    except MarkedYAMLError as error:
        problems.append(_syntax_problem(shown, error))
    except YAMLError as error:
        problems.append(Problem(shown, None, "", f"is not valid YAML: {str(error).splitlines()[0]}"))
    except RecursionError:
        problems.append(Problem(shown, None, "", "is nested too deeply to be a spec"))
    else:
        if document is None:
            problems.append(Problem(shown, 1, "", "is empty; a spec is a mapping with at least a summary"))
        else:
            tree = _Converter(shown, problems).convert(document, document.start_mark.line + 1, "", ())
    return tree, tuple(problems)


def _parser() -> YAML:
    parser = YAML(typ="base", pure=True)
    parser.Resolver = _NoImplicitTypes
    return parser


def _syntax_problem(shown: Path, error: MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    message = ", ".join(part for part in (error.context, error.problem) if part)
    return Problem(shown, mark.line + 1 if mark else None, "", f"is not valid YAML: {message}")


class _Converter:
    """Turns ruamel's node graph into `Node`s, collecting what a spec does not allow."""

    def __init__(self, shown: Path, problems: list[Problem]) -> None:
        self.shown = shown
        self.problems = problems

    def convert(self, node: Any, line: int, field: str, ancestors: tuple[int, ...]) -> Node:
        if id(node) in ancestors:
            self._report(line, field, "an alias that contains itself; write the value out")
            return Node(None, self.shown, line)
        if node.tag not in _CORE_TAGS:
            self._report(line, field, f"the tag {node.tag} is not supported; write the plain value")
        ancestors = (*ancestors, id(node))
        if isinstance(node, MappingNode):
            return Node(self._entries(node, field, ancestors), self.shown, line)
        if isinstance(node, SequenceNode):
            items = [
                self.convert(item, item.start_mark.line + 1, f"{field}[{index}]", ancestors)
                for index, item in enumerate(node.value)
            ]
            return Node(items, self.shown, line)
        return Node(_scalar(node), self.shown, line)

    def _entries(self, node: MappingNode, field: str, ancestors: tuple[int, ...]) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, ScalarNode) or not isinstance(_scalar(key), str):
                self._report(line, field, "keys must be strings; quote it if a string is meant")
                continue
            name = str(key.value)
            inner = f"{field}.{name}" if field else name
            if name in entries:
                self._report(line, inner, f"duplicate key '{name}'; it was first given in line {entries[name].line}")
                continue
            entries[name] = self.convert(value, line, inner, ancestors)
        return entries

    def _report(self, line: int, field: str, message: str) -> None:
        self.problems.append(Problem(self.shown, line, field, message))


def _scalar(node: ScalarNode) -> Scalar:
    """A scalar by the core schema of YAML 1.2; quoted and block scalars are strings."""
    text = str(node.value)
    if node.style:
        return text
    if _NULL.match(text):
        return None
    if _TRUE.match(text) or _FALSE.match(text):
        return bool(_TRUE.match(text))
    if _INT.match(text):
        return int(text)
    return float(text) if _FLOAT.match(text) else text


def dumps(value: Any, *, flow: bool | None) -> str:
    """YAML text; `flow` None puts the innermost mappings and lists on one line each."""
    yaml = YAML()
    yaml.default_flow_style = flow
    yaml.width = 110
    stream = io.StringIO()
    yaml.dump(value, stream)
    return stream.getvalue()


def merge(base: Node, over: Node, unions: Mapping[str, str], field: str = "") -> Node:
    """`over` laid on `base`: mappings merge key by key, anything else is replaced.

    `unions` names the tag key of each tagged union by dotted field path. Where the tags differ, `over` replaces the
    whole mapping, because what is left of the base's arm has no meaning in the other one.
    """
    if not isinstance(base.value, dict) or not isinstance(over.value, dict):
        return over
    tag = unions.get(field, "")
    if tag in base.value and tag in over.value and base.value[tag].value != over.value[tag].value:
        return over
    entries = dict(base.value)
    for key, node in over.value.items():
        inner = f"{field}.{key}" if field else key
        entries[key] = merge(entries[key], node, unions, inner) if key in entries else node
    return Node(entries, over.path, over.line)


def override(root: Node, field: Sequence[str], value: Node, unions: Mapping[str, str]) -> Node:
    """`root` with `value` merged in at the key path `field`; the mappings around it keep their own places."""
    return merge(root, _wrap(root, field, value), unions)


def _wrap(base: Node | None, field: Sequence[str], value: Node) -> Node:
    """`value` inside one mapping per key of `field`, each at the place where `base` has that mapping."""
    if not field:
        return value
    inner = _wrap(base.mapping.get(field[0]) if base else None, field[1:], value)
    place = base or value
    return Node({field[0]: inner}, place.path, place.line)
