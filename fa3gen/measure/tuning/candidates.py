"""From a name on the command line to modules that are ready to be measured.

A search begins at a committed module, the incumbent. Candidates are rendered into the work directory, never into
`generated/`, and compiled side by side; one that does not compile as planned (spills, serialized products) is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fa3gen.base.errors import SpecError, UserError
from fa3gen.base.files import sha256, write_text
from fa3gen.design.family import Family
from fa3gen.design.workspace import Workspace
from fa3gen.measure.tuning.journal import Journal
from fa3gen.measure.tuning.session import Module
from fa3gen.measure.tuning.space import Enumeration, Space, enumerate_space, load_space, tree_of
from fa3gen.spec.complaints import UNIONS
from fa3gen.spec.model import Forward, WindowMask
from fa3gen.spec.specfile import SpecFile, Variant, attention_only, is_stem
from fa3gen.spec.yamltree import dumps, merge

FOLDER = "tuning"  # of search spaces, below specs


@dataclass(frozen=True)
class Start:
    """Where a search begins: the incumbent, the fields that values are laid on, and the spec file they come from."""

    family: Family
    incumbent: Variant[Forward]
    fields: dict[str, Any]
    base: SpecFile


@dataclass(frozen=True)
class Search:
    """One family to search: its start, the legal combinations, and their modules with the incumbent first."""

    start: Start
    enumeration: Enumeration
    modules: tuple[Module, ...] = ()  # empty before they are rendered


def find_space(workspace: Workspace, name: str, given: Path | None) -> Space:
    """The search space for `name`: the file `given`, else specs/tuning/<name>.yaml, else that of name's spec, or of the
    nearest spec that this one extends.

    Raises UserError that shows how to write one where there is none, SpecError for one that cannot be read.
    """
    folders = dict.fromkeys((workspace.specs_dir / FOLDER, workspace.bundled_specs_dir / FOLDER))
    if given is not None:
        if not given.is_file():
            raise UserError(f"--space {given}: there is no such file")
        return load_space(given, workspace.shown(given))
    stems, tuned = [Path(name).stem], known(workspace, name)
    for variant in tuned[:1]:  # all of a name come from one file
        file = workspace.file_of(variant)
        stems += [file.stem, *file.bases]
    for path in (folder / f"{stem}.yaml" for stem in dict.fromkeys(stems) for folder in folders):
        if path.is_file():
            return load_space(path, workspace.shown(path))
    have = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    others = f" (there are spaces for {', '.join(have)})" if have else ""
    target = workspace.shown(workspace.specs_dir / FOLDER / f"{stems[0]}.yaml")
    example = _example(workspace, tuned or known(workspace, "k6_d128_causal"))
    raise UserError(
        f"there is no search space for '{name}'{others}; write {target}, or name one with --space:\n{example}"
    )


def _example(workspace: Workspace, tuned: Sequence[Variant[Forward]]) -> str:
    """The text of a search space for the last of these modules: tiles of keys around its own."""
    variant = tuned[-1]
    spec, home = variant.spec, workspace.home_of(variant)
    mask = spec.mask.model_dump() if isinstance(spec.mask, WindowMask) else spec.mask.kind
    problem = {"head_dim": spec.problem.head_dim, "mask": mask}
    base = {} if home.loose else {"base": variant.source.stem}
    space = {"tile.kv": [spec.tile.kv - 16, spec.tile.kv, spec.tile.kv + 16]}
    return dumps({**base, "problem": problem, "space": space}, flow=None)


def known(workspace: Workspace, name: str) -> list[Variant[Forward]]:
    """The variants of a name that need not exist. Raises UserError for other operations than attention."""
    try:
        found = workspace.resolve(name)
    except SpecError:  # it exists, and is broken
        raise
    except UserError:
        return []
    return attention_only(found, "fa3gen tune")


def find_starts(workspace: Workspace, name: str, space: Space) -> list[Start]:
    """One start for each problem that `name` stands for, or that the base of the space offers where it is new.

    Raises UserError where neither has a module of the problem that the space names.
    """
    if not is_stem(Path(name).stem):
        raise UserError(f"'{name}' cannot name a spec; use letters, digits and underscores")
    committed = known(workspace, name)
    if not committed and space.base is None:
        raise UserError(f"'{name}' is no spec or module yet; let {space.path} name a `base`, or tune one that exists")
    base = attention_only(workspace.resolve(space.base), "fa3gen tune") if space.base is not None else committed
    incumbents = [variant for variant in committed or base if _fits(variant.spec, space)]
    if not incumbents:
        offered = ", ".join(Family.of(variant.spec).label for variant in committed or base)
        raise UserError(
            f"{space.path}: problem: no module of {name if committed else space.base} fits; it has {offered}"
        )
    base_file = workspace.file_of(base[0])
    return [_start(incumbent, base, base_file) for incumbent in incumbents]


def _start(incumbent: Variant[Forward], base: Sequence[Variant[Forward]], base_file: SpecFile) -> Start:
    """A base with a module of this problem brings what it chose for it; another one what all its modules share."""
    family = Family.of(incumbent.spec)
    twin = next((variant for variant in base if Family.of(variant.spec) == family), None)
    problem = incumbent.spec.model_dump(include={"problem", "mask"})
    fields = twin.spec.model_dump() if twin else {**base_file.fields, **problem}
    return Start(family.of_call(), incumbent, fields, base_file)


def _fits(spec: Forward, space: Space) -> bool:
    """Whether the problem of a spec is the one that the space names."""
    fields = tree_of(spec.model_dump(), space.path)
    return bool(merge(fields, space.problem, UNIONS).plain() == fields.plain())


def committed_module(workspace: Workspace, variant: Variant[Forward]) -> Module:
    """The committed file of a variant; UserError when it is missing or not what its spec renders to."""
    from fa3gen.verify.pipeline import check_render

    stage = check_render(variant, workspace)
    if not stage.passed:
        raise UserError(stage.detail)
    path = workspace.path_of(variant)
    return Module(variant.stem, path, sha256(path), variant.spec)


def prune(space: Space, start: Start) -> Search:
    """Enumerate what is legal. Raises UserError where that is nothing but the incumbent."""
    enumeration = enumerate_space(space, start.fields, start.incumbent.stem)
    if all(candidate.spec == start.incumbent.spec for candidate in enumeration.candidates):
        raise UserError(f"{space.path}: no legal combination differs from {start.incumbent.stem}; add values")
    return Search(start, enumeration)


def render_search(workspace: Workspace, search: Search, folder: Path) -> Search:
    """The search with its modules: the incumbent's committed file, and one file in `folder` for each candidate."""
    from fa3gen.generate.render import render_variant

    start = search.start
    modules = [committed_module(workspace, start.incumbent)]
    for candidate in search.enumeration.candidates:
        if candidate.spec == start.incumbent.spec:
            continue
        # A space of one axis whose label is empty gives a candidate the incumbent's stem.
        stem = candidate.stem if candidate.stem != start.incumbent.stem else f"{candidate.stem}_candidate"
        variant = Variant(stem, candidate.spec, Path(f"specs/{stem}.yaml"), start.incumbent.summary)
        path = folder / f"{stem}.py"
        text = render_variant(variant, workspace)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
        modules.append(Module(stem, path, sha256(path), candidate.spec))
    return Search(start, search.enumeration, tuple(modules))


def compile_all(
    modules: Sequence[Module], journal: Journal, jobs: int | None, on_done: Callable[[str, str], None]
) -> Mapping[str, str]:
    """Compile modules through the cache and hold their facts against their plans; stem -> why it is dropped.

    What the journal has is not examined again. `on_done` hears of each stem, with the reason or ''. Object files are
    made here too, several at a time: a measuring process would compile those that it misses one after the other.
    """
    from fa3gen.compile.cache import cached_compile_for_launch
    from fa3gen.compile.compiler import side_by_side
    from fa3gen.verify.pipeline import Stage, check_compile

    dropped: dict[str, str] = {}
    missing: dict[Path, Module] = {}
    for module in modules:
        entry = journal.find("facts", stem=module.stem, sha256=module.sha256)
        if entry is None:
            missing[module.path] = module
        elif entry["reason"]:
            dropped[module.stem] = entry["reason"]

    def examine(path: Path) -> Stage:
        module = missing[path]
        variant = Variant(module.stem, module.spec, Path(f"specs/{module.stem}.yaml"), "")
        return check_compile(variant, cached_compile_for_launch(path))[0]

    def note(path: Path, result: Stage | UserError) -> None:
        reason = str(result) if isinstance(result, UserError) else "" if result.passed is not False else result.detail
        journal.append("facts", stem=missing[path].stem, sha256=missing[path].sha256, reason=reason)
        if reason:
            dropped[missing[path].stem] = reason
        on_done(missing[path].stem, reason)

    side_by_side(examine, list(missing), jobs, note)
    return dropped
