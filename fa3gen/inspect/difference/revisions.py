"""One spec at two revisions: specs and generated modules as git has them, against each other or the working tree.

The modules of a revision are the files that were committed, not renderings: the templates of then may be others. Plans
are made by this fa3gen from both specs. A spec that it cannot read any more still has its text and its modules.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fa3gen.base.errors import SpecError, UserError
from fa3gen.design.workspace import Workspace
from fa3gen.generate.plan import make_plan
from fa3gen.generate.render import GENERATED_MARK
from fa3gen.inspect.difference.comparing import compare
from fa3gen.inspect.difference.extending import also_changes
from fa3gen.inspect.difference.model import Difference, Side, SourceChange
from fa3gen.inspect.difference.sides import side_of
from fa3gen.spec.complaints import nearest
from fa3gen.spec.specfile import Variant

WORKING_TREE = "the working tree"
_EXTENDS = re.compile(r"^extends:\s*['\"]?([\w./-]+)", re.MULTILINE)


@dataclass(frozen=True)
class Snapshot:
    """The spec files and generated modules of one revision: path relative to the workspace -> text.

    `workspace` holds the spec files again, for the loader of specs; its directory is temporary.
    """

    revision: str
    files: Mapping[str, str]
    workspace: Workspace


@dataclass(frozen=True)
class State:
    """What one spec was at one revision. Without `variants`, this fa3gen refuses it, and `complaint` says why."""

    revision: str
    path: str
    texts: Mapping[str, str]
    sides: Mapping[str, Side]
    complaint: str = ""


def revisions_of(texts: Sequence[str]) -> tuple[str, str | None]:
    """What `--rev` asks for: the older and the newer revision, None for the working tree.

    One revision, two, or `A..B`, where a missing side is HEAD as in git. Raises UserError for anything else.
    """
    if len(texts) == 1 and ".." in texts[0] and "..." not in texts[0]:
        old, _, new = texts[0].partition("..")
        return old or "HEAD", new or "HEAD"
    if not 1 <= len(texts) <= 2 or any(".." in text for text in texts):
        raise UserError(f"--rev {' --rev '.join(texts)}: give one revision, two, or OLD..NEW")
    return texts[0], texts[1] if len(texts) == 2 else None


def difference(name: str, old: str, new: str | None, workspace: Workspace, *, with_source: bool = True) -> Difference:
    """What differs between the spec or module `name` at revision `old` and at `new` (None: in the working tree).

    Modules are paired by their stems. Raises UserError without git, for unknown revisions, and where a revision does
    not have the spec.
    """
    asked = _asked(name, workspace)
    with _at(old, asked, workspace) as snapshot:
        before = _committed_state(snapshot, asked, with_source=with_source)
        extended = _extending(snapshot.workspace, before.path)
    if new is None:
        after = _present_state(asked, workspace, with_source=with_source)
        extending = _extending(workspace, after.path)
    else:
        with _at(new, asked, workspace) as snapshot:
            after = _committed_state(snapshot, asked, with_source=with_source)
            extending = _extending(snapshot.workspace, after.path)
    shared = [stem for stem in before.sides if stem in after.sides]
    complaints = tuple(state.complaint for state in (before, after) if state.complaint)
    notes = ["plans are made by this fa3gen from both specs; modules of a revision are the files committed there"]
    moved = [one for stem, one in extending.items() if stem in extended and one.spec != extended[stem].spec]
    if moved:
        notes.append(also_changes(moved, [Path(after.path).stem]))
    return Difference(
        tuple(compare(before.sides[stem], after.sides[stem]) for stem in shared),
        only_old=tuple(stem for stem in before.sides if stem not in after.sides),
        only_new=tuple(stem for stem in after.sides if stem not in before.sides),
        spec_texts=_spec_texts(before, after) if complaints else (),
        notes=(*complaints, *notes),
    )


def _extending(workspace: Workspace, path: str) -> dict[str, Variant]:
    """The modules of specs that extend the one at `path`, by stem."""
    return {variant.stem: variant for file in workspace.extending([Path(path).stem]) for variant in file.variants}


def _asked(name: str, workspace: Workspace) -> str:
    """A stem, or the path of a spec file from the root, which the working directory or the root may have."""
    if name.endswith(".py"):
        return Path(name).stem
    if not _is_path(name):
        return name
    places = [Path(os.path.abspath(name)), Path(os.path.abspath(workspace.root / name))]
    path = next((place for place in places if place.is_file()), places[-1])
    if not path.is_relative_to(workspace.root):
        raise UserError(f"{name} lies outside {workspace.root}; --rev compares files of that checkout only")
    return path.relative_to(workspace.root).as_posix()


def _is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def _present_state(name: str, workspace: Workspace, *, with_source: bool) -> State:
    variants = workspace.resolve(str(workspace.root / name) if _is_path(name) else name)
    texts = {
        file.relative_to(workspace.root).as_posix(): file.read_bytes().decode("utf-8", errors="replace")
        for file in workspace.spec_files()
    }
    sides = {variant.stem: side_of(variant, workspace, with_source=with_source) for variant in variants}
    return State(WORKING_TREE, variants[0].source.as_posix(), texts, sides)


# A revision's specs and modules


def _committed_state(snapshot: Snapshot, name: str, *, with_source: bool) -> State:
    revision = snapshot.revision
    if _is_path(name) and name not in snapshot.files:
        raise UserError(f"{name} is not in {revision}; `git log --oneline -- {name}` lists the revisions that touch it")
    texts = {path: text for path, text in snapshot.files.items() if not path.endswith(".py")}
    try:
        variants = snapshot.workspace.resolve(str(snapshot.workspace.root / name) if _is_path(name) else name)
    except SpecError as error:
        path = _owner(name, snapshot)
        sides = _unread_sides(name, path, snapshot, with_source=with_source)
        complaint = f"at {revision} this fa3gen refuses the spec, so only texts are compared:\n{error}"
        return State(revision, path, texts, sides, complaint)
    except UserError as error:
        raise UserError(f"at {revision}, {error}; `git log --oneline -- specs` lists other revisions") from error
    path = variants[0].source.as_posix()
    if path not in snapshot.files:
        raise UserError(f"at {revision}, {name} is a spec of the package, not of this checkout; name one of its own")
    sides = {variant.stem: _committed_side(variant, snapshot, with_source=with_source) for variant in variants}
    return State(revision, path, texts, sides)


def _committed_side(variant: Variant, snapshot: Snapshot, *, with_source: bool) -> Side:
    side = Side(
        stem=variant.stem,
        source=variant.source.as_posix(),
        summary=variant.summary,
        spec=variant.spec,
        plan=make_plan(variant),
        module=None,
        module_name=f"generated/{variant.stem}.py",
        revision=snapshot.revision,
        origins=variant.origins,
    )
    return _with_module(side, snapshot) if with_source else side


def _with_module(side: Side, snapshot: Snapshot) -> Side:
    module = snapshot.files.get(side.module_name)
    notes = side.notes if module is not None else (*side.notes, f"{side.module_name} is not in {snapshot.revision}")
    return replace(side, module=module, notes=notes)


def _owner(name: str, snapshot: Snapshot) -> str:
    """The spec file that a name stands for, where it cannot be read: the one whose stem begins the name furthest."""
    stem = Path(name).stem
    found = [path for path in snapshot.files if path.endswith(".yaml") and f"{stem}_".startswith(f"{Path(path).stem}_")]
    return max(found, key=len)


def _unread_sides(name: str, path: str, snapshot: Snapshot, *, with_source: bool) -> dict[str, Side]:
    """The committed modules that say that they come from the spec file `path`: all, or the one that was named."""
    wanted = Path(name).stem
    everything = wanted == Path(path).stem
    sides = {}
    for module, text in snapshot.files.items():
        stem = Path(module).stem
        if f"{GENERATED_MARK}{path};" in text[:2000] and (everything or stem == wanted):
            side = Side(stem, path, "", None, None, None, module, snapshot.revision)
            sides[stem] = _with_module(side, snapshot) if with_source else side
    return sides


def _spec_texts(old: State, new: State) -> tuple[SourceChange, ...]:
    """The spec files, and those that they extend, as texts."""
    paths = dict.fromkeys((*_chain(old.path, old.texts), *_chain(new.path, new.texts)))
    changes = [
        SourceChange(f"{path} at {old.revision}", f"{path} at {new.revision}", before, after)
        for path in paths
        if (before := old.texts.get(path, "")) != (after := new.texts.get(path, ""))
    ]
    return tuple(changes)


def _chain(path: str, texts: Mapping[str, str]) -> Iterator[str]:
    """A spec file and what it extends, as far as that can be seen in texts that may be no YAML."""
    seen: list[str] = []
    while path in texts and path not in seen:
        seen.append(path)
        yield path
        base = _EXTENDS.search(texts[path])
        if base is None:
            return
        folder = Path(path).parent
        named = base[1] if base[1].endswith((".yaml", ".yml")) else f"{base[1]}.yaml"
        path = Path(os.path.normpath(folder / named)).as_posix()


# git


@contextmanager
def _at(revision: str, name: str, workspace: Workspace) -> Iterator[Snapshot]:
    """The spec files and modules of a revision; the specs lie in a directory that is gone afterwards."""
    root = workspace.root
    commit = _commit(revision, root)
    folders = ["specs", "generated"]
    if _is_path(name):
        folders.append(Path(name).parent.as_posix())
    files = _read_all(root, commit, folders)
    if not any(path.endswith((".yaml", ".yml")) for path in files):
        raise UserError(f"{revision} of {root} has no spec files; go to the checkout that has them")
    with tempfile.TemporaryDirectory(prefix="fa3gen-diff-") as folder:
        there = Path(folder).resolve()
        for path, text in files.items():
            if path.endswith((".yaml", ".yml")):
                (there / path).parent.mkdir(parents=True, exist_ok=True)
                (there / path).write_bytes(text.encode("utf-8"))
        # Where the package is the checkout itself, its specs of now are not those of then.
        bundled = there if workspace.bundled == root else workspace.bundled
        yield Snapshot(revision, files, Workspace(there, bundled))


def _commit(revision: str, root: Path) -> str:
    """The commit that a revision names."""
    if _git(root, "rev-parse", "--is-inside-work-tree").strip() != b"true":
        raise UserError(f"{root} is no working tree of git; --rev compares with what is committed there")
    found = _try_git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if revision.startswith("-") or found.returncode != 0:
        names = _git(root, "for-each-ref", "--format=%(refname:short)", "refs/heads", "refs/tags").decode().split()
        raise UserError(
            f"there is no revision '{revision}' in {root}{nearest(revision, names)}{_shallow(root)} "
            "(`git log --oneline` lists commits)"
        )
    return found.stdout.decode().strip()


def _shallow(root: Path) -> str:
    shallow = _git(root, "rev-parse", "--is-shallow-repository").strip() == b"true"
    return "; the clone is shallow, `git fetch --unshallow` gets the rest" if shallow else ""


def _read_all(root: Path, commit: str, folders: Sequence[str]) -> dict[str, str]:
    """The spec files and Python files right in these folders at a commit, relative to `root`."""
    listed = _git(root, "ls-tree", "-z", commit, "--", *(f"{folder}/" for folder in dict.fromkeys(folders)))
    blobs: dict[str, str] = {}
    for entry in listed.decode("utf-8", errors="replace").split("\0"):
        head, _, path = entry.partition("\t")
        if head.startswith("100") and path.endswith((".yaml", ".yml", ".py")):
            blobs[path] = head.split()[2]
    answer = _git(root, "cat-file", "--batch", stdin="".join(f"{blob}\n" for blob in blobs.values()).encode())
    texts, at = {}, 0
    for path in blobs:  # for each "<id> blob <bytes>\n<content>\n"
        start = answer.index(b"\n", at) + 1
        end = start + int(answer[at:start].split()[2])
        texts[path] = answer[start:end].decode("utf-8", errors="replace")
        at = end + 1
    return texts


def _git(root: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    """What a git command prints. UserError where it fails, with git's own words."""
    process = _try_git(root, *arguments, stdin=stdin)
    if process.returncode != 0:
        words = process.stderr.decode("utf-8", errors="replace").strip().splitlines()
        raise UserError(
            f"git cannot read {root}: {words[0] if words else f'exit code {process.returncode}'}; "
            "--rev needs a git checkout"
        )
    return process.stdout


def _try_git(root: Path, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", "-C", str(root), *arguments], input=stdin, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise UserError("--rev needs git, which is not installed (or not in PATH)") from error
