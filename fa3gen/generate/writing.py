"""Writing what was rendered: one process at a time, and never over what somebody may have edited by hand.

What fa3gen wrote last is remembered by its digest: in the git directory, and so never committed, or without git in a
hidden file beside the modules.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fa3gen.base.files import locked, write_text
from fa3gen.design.workspace import Workspace
from fa3gen.generate.render import Rendered, is_generated, write
from fa3gen.spec.specfile import Variant

MEMORY = "fa3gen-rendered.json"  # in the git directory; else beside the modules, with a dot before it


@contextlib.contextmanager
def alone(variants: Sequence[Variant], workspace: Workspace) -> Iterator[None]:
    """Hold off other processes that write the modules of these variants, from reading the files to remembering them."""
    roots = sorted({workspace.home_of(variant).root for variant in variants})
    with contextlib.ExitStack() as stack:
        for root in roots:
            stack.enter_context(locked(root))
        yield


def write_all(rendered: Sequence[Rendered]) -> None:
    """Write the modules that changed, each atomically, and remember what all of them are."""
    for item in rendered:
        if item.change != "unchanged":
            write(item)
    for folder in {item.path.parent: None for item in rendered if item.path.parent.is_dir()}:
        here = {item.path.name: _digest(item.text) for item in rendered if item.path.parent == folder}
        _Memory.of(folder).remember(here)


@dataclass(frozen=True)
class Edited:
    """A file that somebody may have edited: `why` we think so, and whether git has an older state of it."""

    path: Path
    why: str
    tracked: bool


def hand_edited(
    rendered: Sequence[Rendered], recorded: Callable[[Variant], Collection[str]] = lambda variant: ()
) -> list[Edited]:
    """Files that would be overwritten although somebody may have edited them by hand.

    A file may be overwritten when it is what fa3gen wrote last, as committed, or one of those that the records speak of
    (`recorded`: their SHA-256). Of any other one, nothing says that fa3gen could write it again.
    """
    found = []
    for item in (item for item in rendered if item.change == "changed"):
        status, digest = _status(item.path), _digest(item.committed or "")
        tracked = status is not None and status[:2] not in ("", "??", "!!")
        last = _Memory.of(item.path.parent).digests.get(item.path.name)
        if not is_generated(item.path):
            found.append(Edited(item.path, "was not written by fa3gen", tracked))
        elif status == "" or digest == last or digest in recorded(item.variant):
            continue
        elif tracked:
            found.append(Edited(item.path, "has uncommitted edits", tracked))
        elif last is not None:
            found.append(Edited(item.path, "was edited after it was rendered", tracked))
        else:
            why = "is not what its spec renders to, and nothing says whether it was edited by hand"
            found.append(Edited(item.path, why, tracked))
    return found


@dataclass(frozen=True)
class _Memory:
    """What was written last into one folder: digests by file name, and where they are kept."""

    path: Path
    prefix: str  # of the keys: the git directory has the digests of several folders
    digests: dict[str, str]

    @classmethod
    def of(cls, folder: Path) -> _Memory:
        """Read it; what was remembered before there was git counts as well."""
        beside = folder / f".{MEMORY}"
        known = _read(beside)
        answer = _git(folder, "rev-parse", "--git-path", MEMORY, "--show-prefix")
        if answer is None:
            return cls(beside, "", known)
        name, _, prefix = answer.rstrip("\n").partition("\n")
        inside = {
            key.removeprefix(prefix): value for key, value in _read(folder / name).items() if key.startswith(prefix)
        }
        return cls(folder / name, prefix, {**known, **inside})

    def remember(self, digests: dict[str, str]) -> None:
        """Add digests. Where that cannot be written, later renderings ask about files that nobody edited; no more."""
        if all(self.digests.get(name) == digest for name, digest in digests.items()):
            return
        kept = {**_read(self.path), **{f"{self.prefix}{name}": digest for name, digest in digests.items()}}
        with contextlib.suppress(OSError):
            write_text(self.path, json.dumps(kept, indent=1, sort_keys=True))


def _read(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (OSError, ValueError):  # not ours any more: nothing is known
        return {}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="replace")).hexdigest()


def _status(path: Path) -> str | None:
    """What git says of a file: nothing when as committed, "?? ..." when untracked, "!! ..." when ignored; or None."""
    return _git(path.parent, "status", "--porcelain", "--untracked-files=all", "--ignored", "--", path.name)


def _git(folder: Path, *arguments: str) -> str | None:
    """What a git command prints; None where it fails: no git, or no checkout."""
    try:
        process = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return process.stdout if process.returncode == 0 else None
