"""One spec file: `extends`, `matrix`, and the variants that come of them.

A spec file holds the fields of `fa3gen.spec.model.Spec` and three keys of its own:

- `summary`: one line that says what the kernel is; required, never inherited;
- `extends`: the stem (or the relative path) of a base spec, on which this file's fields are laid;
- `matrix`: field path -> list of values; one module is generated for each combination. A value may bring other fields
  along, `{value: 64, with: {tile: {q: 192}}}`: they hold in the modules of that value only.

Everything that is wrong with a file is raised at once, as a `SpecError`.
"""

from __future__ import annotations

import keyword
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeGuard

from pydantic import ValidationError
from typing_extensions import TypeVar

from fa3gen.base.errors import Problem, SpecError, UserError
from fa3gen.spec.complaints import FIELDS, FILE_KEYS, UNIONS, described, explain, nearest
from fa3gen.spec.model import DEFAULT_OPERATION, OPERATIONS, Forward, Other, Spec
from fa3gen.spec.yamltree import Node, content, merge, override, read

MAX_VARIANTS = 256
# The first line of a module has 120 characters: quotes, the summary, and up to 42 for head dim, dtype and mask.
SUMMARY_MAX = 75

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_FIELD_PATH = re.compile(r"[a-z_]+(?:\.[a-z_]+)*\Z")


# What is wrong with a complete spec: dotted fields ('': all of it), each with a message; nothing for a legal one.
Judge = Callable[[Spec], Iterable[tuple[str, str]]]

SpecT_co = TypeVar("SpecT_co", bound=Spec, default=Spec, covariant=True)


@dataclass(frozen=True)
class Variant(Generic[SpecT_co]):
    """One module to generate: its stem, its complete spec, and the spec file it comes from.

    `origins` says for each field that is written, by its dotted path, in which file: `source`, or one that it extends.
    """

    stem: str
    spec: SpecT_co
    source: Path
    summary: str
    origins: Mapping[str, Path] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class SpecFile:
    """A spec file that passed every check.

    `path` is relative to the workspace where possible. `fields` is the merged spec as written, before the matrix, and
    `matrix` the axes in force (inherited ones included), both as plain values. `bases` are the stems of the specs that
    it extends, the nearest first.
    """

    path: Path
    stem: str
    summary: str
    variants: tuple[Variant, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    matrix: dict[str, list[Any]] = field(default_factory=dict)
    bases: tuple[str, ...] = ()


def load(path: Path, *, judge: Judge, roots: Sequence[Path] = (), search: Sequence[Path] = ()) -> SpecFile:
    """Read, merge, expand and check the spec file `path`.

    Paths in the result and in problems are relative to the first of `roots` that they lie in. A stem in `extends` is
    looked for beside the file that names it, then in the directories `search`. `judge` says what is
    wrong with a spec that can be written (`fa3gen.design.load` brings the rules). Raises SpecError with every problem.

    A file without problems is checked once in a process, for as long as it and its bases stay as they are.
    """
    asked = (_seen_from(path, *roots, *search), path, judge, tuple(roots), tuple(search))
    kept = _FILES.find(asked)
    if kept is not None:
        return kept.made
    loader = _Loader(judge, roots, search)
    spec_file = loader.load(path)
    if loader.problems or spec_file is None:
        raise SpecError(sorted_problems(loader.problems, loader.shown(path)))
    _FILES.keep(asked, loader.looked, spec_file)
    return spec_file


_Looked = Sequence[tuple[Path, bytes | None]]
MadeT = TypeVar("MadeT")


@dataclass(frozen=True)
class _Kept(Generic[MadeT]):
    """What was made of files, and all that were looked at or for, each with what stood in it (None: no such file)."""

    looked: _Looked
    made: MadeT


class _Memory(Generic[MadeT]):
    """What was made of files, for as long as they say the same; of no more than MOST."""

    MOST = 1024

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], _Kept[MadeT]] = {}

    def find(self, asked: tuple[Any, ...]) -> _Kept[MadeT] | None:
        kept = self._kept.get(asked)
        same = kept is not None and all(content(place) == found for place, found in kept.looked)
        return kept if same else None

    def keep(self, asked: tuple[Any, ...], looked: _Looked, made: MadeT) -> None:
        self._kept.pop(asked, None)
        self._kept[asked] = _Kept(tuple(looked), made)
        if len(self._kept) > self.MOST:
            del self._kept[next(iter(self._kept))]  # the oldest


_FILES: _Memory[SpecFile] = _Memory()


def _seen_from(*places: Path) -> str:
    """The working directory, where paths depend on it."""
    return "" if all(place.is_absolute() for place in places) else os.getcwd()


def attention_only(variants: Iterable[Variant], what: str) -> list[Variant[Forward]]:
    """The variants, all of them attention; raises UserError, which says that `what` knows nothing else, for others."""
    variants = list(variants)
    known = attention_among(variants)
    if len(known) < len(variants):
        others = ", ".join(variant.stem for variant in variants if not _is_attention(variant))
        raise UserError(f"{what} knows attention (operation: forward) only, and not {others}; leave them out")
    return known


def dense_only(variants: Iterable[Variant], what: str) -> list[Variant[Forward]]:
    """The variants, all of them attention on dense tensors; raises UserError as `attention_only` does for others."""
    variants = attention_only(variants, what)
    if packed := [variant.stem for variant in variants if variant.spec.problem.layout != "dense"]:
        raise UserError(
            f"{what} knows dense tensors only, and not packed sequences ({', '.join(packed)}); leave them out, or name "
            "the module of layout dense that has the same tile; other commands know both"
        )
    return variants


def attention_among(variants: Iterable[Variant]) -> list[Variant[Forward]]:
    """Those variants that are attention."""
    return [variant for variant in variants if _is_attention(variant)]


def others_among(variants: Iterable[Variant]) -> list[Variant[Other]]:
    """Those variants that are no attention."""
    return [variant for variant in variants if _is_other(variant)]


def _is_other(variant: Variant) -> TypeGuard[Variant[Other]]:
    return not isinstance(variant.spec, Forward)


def _is_attention(variant: Variant) -> TypeGuard[Variant[Forward]]:
    return isinstance(variant.spec, Forward)


def is_stem(name: str) -> bool:
    """Whether `name` can name a generated module: an ASCII identifier that is no Python keyword."""
    return bool(_IDENTIFIER.match(name)) and not keyword.iskeyword(name)


def sorted_problems(problems: Iterable[Problem], first: Path | None = None) -> list[Problem]:
    """Without repetitions, by file (the file `first` first) and line; what is about a whole file comes last there."""
    return sorted(dict.fromkeys(problems), key=lambda p: (p.path != first, str(p.path), p.line is None, p.line or 0))


def label(field_path: str, value: Any) -> str:
    """What an axis adds to the stem for one value: `d128`, `causal`, `window512_0`, `kv_stages2`; '' for defaults."""
    match field_path, value:
        case "problem.head_dim", _:
            text = f"d{value}"
        case "problem.head_dim_v", None:
            text = ""
        case "problem.head_dim_v", _:
            text = f"v{value}"
        case "problem.dtype", _:
            text = str(value)
        case "mask", {"kind": "none"}:
            text = ""
        case "mask", {"kind": "window", "left": int(left), "right": int(right)}:
            text = f"window{left}_{right}"
        case "mask", {"kind": "window"}:
            text = "any_window"
        case "mask", {"kind": kind}:
            text = str(kind)
        case "outputs.lse", bool():
            text = "" if value else "no_lse"
        case _:
            text = field_path.rpartition(".")[2] + _value_text(value)
    return re.sub(r"[^A-Za-z0-9_]", "", text)


def _value_text(value: Any) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case dict():
            return "_".join(_value_text(item) for item in value.values())
        case list():
            return "_".join(_value_text(item) for item in value)
        case _:
            return str(value)


@dataclass(frozen=True)
class _Document:
    """A file (`place` is its own top-level mapping) with its bases merged in.

    `stems` are those of this file and its bases, `matrix_files` the files from this one down to the one that gives the
    matrix.
    """

    stems: tuple[str, ...]
    place: Node
    fields: Node
    matrix: Node | None
    matrix_files: frozenset[Path]


_BASES: _Memory[_Document] = _Memory()


@dataclass(frozen=True)
class _Value:
    """One value of an axis, and the fields of the spec that hold where it does (None: no others)."""

    value: Node
    company: Node | None


@dataclass(frozen=True)
class _Axis:
    field: str
    values: list[_Value]
    written: list[Any]


class _Loader:
    """Loads one spec file, collecting problems as it goes."""

    def __init__(self, judge: Judge, roots: Sequence[Path], search: Sequence[Path]) -> None:
        self.judge = judge
        self.roots = [root.resolve() for root in roots]
        self.search = search
        self.problems: list[Problem] = []
        self.looked: list[tuple[Path, bytes | None]] = []
        # Bases are looked at once more for each spec below them.
        self._resolved: Callable[[Path], Path] = cache(Path.resolve)

    def load(self, path: Path) -> SpecFile | None:
        shown = self.shown(path)
        stem = path.stem
        if not is_stem(stem):
            self._report(shown, None, "", f"'{stem}' cannot name a Python module; use letters, digits and underscores")
        document = self._document(path, ())
        if document is None:
            return None
        summary = self._summary(document)
        axes = self._axes(document.matrix)
        expanded = self._expand(stem, document.fields, axes, document.matrix or document.place)
        self._report_overridden(document, axes, expanded.values())
        specs = self._checked(expanded, document)
        if self.problems:
            return None
        variants = tuple(
            Variant(name, spec, shown, summary, {".".join(keys): node.path for keys, node in expanded[name].leaves()})
            for name, spec in specs.items()
        )
        matrix = {axis.field: axis.written for axis in axes}
        return SpecFile(shown, stem, summary, variants, document.fields.plain(), matrix, document.stems[1:])

    def shown(self, path: Path) -> Path:
        """`path` as people write it: relative to the workspace, or to the package's data, where it lies inside."""
        absolute = self._resolved(path)
        for root in self.roots:
            if absolute.is_relative_to(root):
                return absolute.relative_to(root)
        return path

    def _report(self, path: Path, line: int | None, field_path: str, message: str) -> None:
        self.problems.append(Problem(path, line, field_path, message))

    def _at(self, node: Node, field_path: str, message: str) -> None:
        self._report(node.path, node.line, field_path, message)

    # extends

    def _document(self, path: Path, chain: tuple[Path, ...]) -> _Document | None:
        """`path` with its bases merged in, or None when what is missing would drown everything else in noise."""
        self.looked.append((path, content(path)))
        root = read(path, self.shown(path), self.problems)
        if root is None:
            return None
        if not isinstance(root.value, dict):
            self._at(root, "", f"a spec is a mapping of fields, got {described(root.plain())}")
            return None
        own = {key: node for key, node in root.value.items() if key not in FILE_KEYS}
        fields = _long_mask(Node(own, root.path, root.line))
        matrix_files = frozenset({root.path})
        extends, matrix = root.value.get("extends"), root.value.get("matrix")
        stems: tuple[str, ...] = (path.stem,)
        if extends is not None:
            base = self._base(extends, path, (*chain, path))
            if base is None:
                return None
            stems += base.stems
            fields = merge(base.fields, fields, UNIONS)
            if matrix is None:
                matrix, matrix_files = base.matrix, matrix_files | base.matrix_files
        return _Document(stems, root, fields, matrix, matrix_files)

    def _base(self, extends: Node, path: Path, chain: tuple[Path, ...]) -> _Document | None:
        name = extends.value
        if not isinstance(name, str) or not name:
            self._at(extends, "extends", f"the stem or the path of a spec is needed, got {described(extends.plain())}")
            return None
        candidates = self._candidates(name, path.parent)
        found = next((candidate for candidate in candidates if candidate.is_file()), None)
        if found is None:
            looked = ", ".join(str(self.shown(candidate)) for candidate in candidates)
            stems = {file.stem for candidate in candidates for file in candidate.parent.glob("*.yaml")}
            self._at(extends, "extends", f"there is no spec '{name}' (looked for {looked}){nearest(name, stems)}")
            return None
        self.looked.extend((candidate, None) for candidate in candidates[: candidates.index(found)])
        if self._resolved(found) in map(self._resolved, chain):
            links = " -> ".join(str(self.shown(link)) for link in (*chain, found))
            self._at(extends, "extends", f"cycle: {links}; take one `extends` out")
            return None
        return self._document_of_base(found, chain)

    def _document_of_base(self, path: Path, chain: tuple[Path, ...]) -> _Document | None:
        """As `_document`; most specs share their bases, so that one without problems is merged once."""
        asked = (_seen_from(path, *self.search), path, tuple(self.roots), tuple(self.search))
        kept = _BASES.find(asked)
        if kept is not None:
            self.looked.extend(kept.looked)
            return kept.made
        looked, problems = len(self.looked), len(self.problems)
        document = self._document(path, chain)
        if document is not None and len(self.problems) == problems:
            _BASES.keep(asked, self.looked[looked:], document)
        return document

    def _candidates(self, name: str, beside: Path) -> list[Path]:
        if "/" in name or name.endswith((".yaml", ".yml")):
            return [beside / name]
        return list(dict.fromkeys(folder / f"{name}.yaml" for folder in (beside, *self.search)))

    # summary

    def _summary(self, document: _Document) -> str:
        node = document.place.mapping.get("summary")
        if node is None:
            self._at(
                document.place, "summary", "missing required key 'summary' (one line that says what the kernel is)"
            )
            return ""
        if not isinstance(node.value, str) or len(node.value.strip().splitlines()) != 1:
            self._at(node, "summary", f"one line of text is needed, got {_line_of_text(node.value)}")
            return ""
        summary = node.value.strip()
        if len(summary) > SUMMARY_MAX:
            message = f"{len(summary)} characters > {SUMMARY_MAX}, the room in the first line of a module; shorten it"
            self._at(node, "summary", message)
        # It is printed inside the module's docstring: nothing there may end the docstring or be an escape.
        if '"""' in summary or "\\" in summary or not summary.isprintable():
            self._at(node, "summary", "triple quotes, backslashes and control characters cannot stand in a docstring")
        return summary

    # matrix

    def _axes(self, matrix: Node | None) -> list[_Axis]:
        """The axes of a matrix, leaving out those that make no sense (and reporting them)."""
        if matrix is None:
            return []
        if not isinstance(matrix.value, dict):
            self._at(matrix, "matrix", f"a mapping of field paths to lists is needed, got {described(matrix.plain())}")
            return []
        axes = [self._axis(name, node) for name, node in matrix.value.items() if self._is_axis(name, node)]
        self._report_contested(axes)
        return axes

    def _axis(self, name: str, node: Node) -> _Axis:
        items = node.value if isinstance(node.value, list) else []
        if name == "mask":
            items = [_long_mask_value(item) for item in items]
        values = [value for item in items if (value := self._value(name, item)) is not None]
        return _Axis(name, values, [item.plain() for item in items])

    def _value(self, name: str, item: Node) -> _Value | None:
        """An entry of an axis: a plain value, or one with company, `{value: 64, with: {tile: {q: 192}}}`."""
        if not {"value", "with"} & item.mapping.keys():
            return _Value(item, None)
        if item.mapping.keys() != {"value", "with"}:
            got = ", ".join(item.mapping)
            self._at(item, f"matrix.{name}", f"a value that brings fields along has the keys value and with, not {got}")
            return None
        value, company = item.mapping["value"], item.mapping["with"]
        if not company.mapping or company.mapping.keys() & FILE_KEYS:
            got = ", ".join(company.mapping) or described(company.plain())
            self._at(
                company, f"matrix.{name}", f"`with` holds fields of the spec, such as {{tile: {{q: 192}}}}, not {got}"
            )
            return None
        return _Value(_long_mask_value(value) if name == "mask" else value, _long_mask(company))

    def _report_contested(self, axes: Sequence[_Axis]) -> None:
        """Fields that a value brings along, but an axis sets: which of the two holds would depend on the order."""
        names = [axis.field for axis in axes]
        for axis in axes:
            for keys, node in (leaf for value in axis.values if value.company for leaf in value.company.leaves()):
                path = ".".join(keys)
                for name in names:
                    if f"{path}.".startswith(f"{name}.") or f"{name}.".startswith(f"{path}."):
                        message = f"`with` cannot give {path}, which the matrix sets by {name}; take it out"
                        self._at(node, f"matrix.{axis.field}", message)

    def _is_axis(self, name: str, node: Node) -> bool:
        where = f"matrix.{name}"
        if not _FIELD_PATH.match(name) or name.partition(".")[0] not in FIELDS:
            self._at(
                node, where, f"an axis is the dotted path of a field, such as problem.head_dim{nearest_field(name)}"
            )
        elif not isinstance(node.value, list):
            self._at(node, where, f"a list of values is needed, got {described(node.plain())}")
        elif not node.value:
            self._at(node, where, "the list of values is empty; give at least one or take the axis out")
        else:
            return True
        return False

    def _expand(self, stem: str, fields: Node, axes: list[_Axis], place: Node) -> dict[str, Node]:
        """Stem -> merged fields, for each combination of values; the first axis varies slowest."""
        count = math.prod(len(axis.values) for axis in axes)
        if count > MAX_VARIANTS:
            self._at(place, "matrix", f"{count} combinations are more than {MAX_VARIANTS}; split the spec")
            return {stem: fields}
        variants = [(stem, fields)]
        for axis in axes:
            variants = [labelled for variant in variants for labelled in self._along(axis, *variant)]
        stems = [name for name, _ in variants]
        for name in sorted({name for name in stems if stems.count(name) > 1}):
            self._at(place, "matrix", f"two combinations make the stem '{name}'; change the order of the axes")
        if len(variants) > 1 and stem in stems:
            self._at(
                place,
                "matrix",
                f"'{stem}' would name both the whole spec and one of its {len(variants)} modules; "
                "add an axis whose label is never empty, such as problem.head_dim",
            )
        return dict(variants)

    def _along(self, axis: _Axis, stem: str, fields: Node) -> list[tuple[str, Node]]:
        labels: dict[str, int] = {}
        variants = []
        keys = axis.field.split(".")
        for value, company in ((item.value, item.company) for item in axis.values):
            varied = override(fields, keys, value, UNIONS)
            if company is not None:
                varied = merge(varied, company, UNIONS)
            text = label(axis.field, varied.find(keys)[0].plain())
            if text in labels:
                self._at(
                    value,
                    f"matrix.{axis.field}",
                    f"two values have the same label '{text}' (the other one is in line {labels[text]}); take one out",
                )
            labels[text] = value.line
            variants.append((f"{stem}_{text}" if text else stem, varied))
        return variants

    def _report_overridden(self, document: _Document, axes: Sequence[_Axis], variants: Iterable[Node]) -> None:
        """A field that every combination replaces would be ignored in silence.

        A base below the file with the matrix may give such a field: there the matrix is what overrides it.
        """
        surviving = {id(node) for variant in variants for _, node in variant.leaves()}
        for keys, node in document.fields.leaves():
            if id(node) in surviving or node.path not in document.matrix_files:
                continue
            field_path = ".".join(keys)
            # The axis of the field itself, or the one that changes the arm of the union around it.
            axis = next((axis.field for axis in axes if axis.field.partition(".")[0] == keys[0]), field_path)
            whose, way_out = "", "or change the matrix"
            if document.matrix is not None and document.matrix.path != document.place.path:
                whose = f" of {document.matrix.path}:{document.matrix.line}"
                way_out = f"or write a matrix in {document.place.path} (`matrix: {{}}`: none, a single module)"
            message = f"has no effect, because the matrix{whose} sets {axis} in every module; take it out {way_out}"
            self._at(node, field_path, message)

    # fields

    def _checked(self, variants: dict[str, Node], document: _Document) -> dict[str, Spec]:
        """The specs of the variants without problems; a problem of several variants is reported once.

        The message names the variants when it is not about all of them, or stands in another file, a base.
        """
        own = document.place.path
        specs: dict[str, Spec] = {}
        found: dict[Problem, list[str]] = {}
        for stem, fields in variants.items():
            spec, problems = _check(fields, self.judge, document)
            if spec is not None:
                specs[stem] = spec
            for problem in problems:
                found.setdefault(problem, []).append(stem)
        for problem, stems in found.items():
            where = f" (in {_some(stems)})" if len(stems) < len(variants) or problem.path != own else ""
            self.problems.append(replace(problem, message=problem.message + where))
        return specs


def _check(fields: Node, judge: Judge, document: _Document) -> tuple[Spec | None, list[Problem]]:
    asked = fields.mapping.get("operation")
    name = DEFAULT_OPERATION if asked is None else asked.value
    if asked is not None and (not isinstance(name, str) or name not in OPERATIONS):
        # Nothing else that is wrong matters before it is known what the fields are to be.
        there = f"there is {' and '.join(OPERATIONS)} so far"
        return None, [_placed(fields, ("operation",), f"{described(asked.plain())} is no operation; {there}")]
    model = OPERATIONS[str(name)]
    try:
        spec = model.model_validate(fields.plain())
    except ValidationError as error:
        return None, [_placed(fields, *explain(entry, model)) for entry in error.errors(include_url=False)]
    return spec, [_at_home(fields, tuple(field.split(".")), message, document) for field, message in judge(spec)]


def _placed(fields: Node, field_path: Sequence[str], message: str) -> Problem:
    node, _ = fields.find(field_path)
    return Problem(node.path, node.line, ".".join(field_path), message)


def _at_home(fields: Node, field_path: Sequence[str], message: str, document: _Document) -> Problem:
    """As `_placed`, but in the file that was asked for: a base is legal by itself, and is not where to mend it."""
    own = document.place
    if not any(field_path):
        return Problem(own.path, None, "", message)
    problem = _placed(fields, field_path, message)
    if problem.path == own.path:
        return problem
    where = f"{problem.path}:{problem.line}"
    if fields.find(field_path)[0] is document.fields.find(field_path)[0]:
        hint = f"inherited from {where}; write it in {own.path}"
    else:
        hint = f"from the matrix of {where}; write a matrix in {own.path}"
    line = own.mapping["extends"].line
    return replace(problem, path=own.path, line=line, message=f"{message} ({hint})")


def nearest_field(name: str) -> str:
    """The hint of `nearest` for the first part of a dotted path."""
    return nearest(name.partition(".")[0], FIELDS)


def _long_mask(fields: Node) -> Node:
    """`mask: causal` written out as `mask: {kind: causal}`, so that merging meets one form only."""
    if "mask" not in fields.mapping:
        return fields
    entries = {**fields.mapping, "mask": _long_mask_value(fields.mapping["mask"])}
    return Node(entries, fields.path, fields.line)


def _long_mask_value(node: Node) -> Node:
    return Node({"kind": node}, node.path, node.line) if isinstance(node.value, str) else node


def _line_of_text(value: Any) -> str:
    if not isinstance(value, str):
        return described(value)
    lines = len(value.strip().splitlines())
    return f"{lines} lines" if lines else "an empty one"


def _some(stems: list[str]) -> str:
    shown = ", ".join(stems[:4])
    return shown if len(stems) <= 4 else f"{shown} and {len(stems) - 4} more"
