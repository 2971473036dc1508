"""What lies in the compile cache, whether it can be written, and removing what was not used for long."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fa3gen.base.wording import counted
from fa3gen.compile.cache import MANIFEST

_ENTRIES = "[0-9a-f][0-9a-f]/*"


@dataclass(frozen=True)
class Entry:
    """One compilation that is kept: of which module, with which DSL, its bytes, and when it was last used (s, UTC)."""

    path: Path
    module: str
    dsl: str
    size: int
    used: float


@dataclass(frozen=True)
class Contents:
    """A cache directory; `unwritable` says why nothing can be kept in it, and is empty where all is well."""

    directory: Path
    entries: tuple[Entry, ...]
    unwritable: str

    @property
    def size(self) -> int:
        """Bytes of all entries."""
        return sum(entry.size for entry in self.entries)

    def __str__(self) -> str:
        """`/home/me/.cache/fa3gen/compiled: 12 entries, 3.4 MB`."""
        return f"{self.directory}: {counted(len(self.entries), 'entry', 'entries')}, {megabytes(self.size)}"


def megabytes(size: int) -> str:
    """`3.4 MB`."""
    return f"{size / 1e6:.1f} MB"


def contents(directory: Path) -> Contents:
    """Look into a cache directory, which need not exist; leaves nothing there that was not there."""
    return Contents(directory, tuple(_entries(directory)), _why_unwritable(directory))


def _entries(directory: Path) -> Iterator[Entry]:
    for manifest in sorted(directory.glob(f"{_ENTRIES}/{MANIFEST}")):
        with contextlib.suppress(OSError):  # removed by another process
            size = sum(file.stat().st_size for file in manifest.parent.iterdir())
            facts = _facts(manifest)
            yield Entry(manifest.parent, facts["module"], facts["dsl"], size, manifest.stat().st_mtime)


def _facts(manifest: Path) -> dict[str, str]:
    """What an entry says of itself; one that is spoilt is still an entry, with bytes that may be pruned."""
    try:
        found = json.loads(manifest.read_bytes())
        return {"module": str(found["module"]), "dsl": str(found["dsl"])}
    except (ValueError, KeyError, TypeError):
        return {"module": "(spoilt)", "dsl": "?"}


def _why_unwritable(directory: Path) -> str:
    """Found by writing: what permissions say does not hold for root, read-only file systems and the like.

    Where the directory is to be made, the trial is beside it: another process may be making it at this moment.
    """
    nearest = directory
    try:
        nearest = next((path for path in (directory, *directory.absolute().parents) if path.exists()), Path("/"))
        if not nearest.is_dir():
            return f"{nearest} is not a directory"
        with tempfile.TemporaryDirectory(prefix=".fa3gen-trial-", dir=nearest) as folder:
            Path(folder, "trial").write_bytes(b"1")
    except OSError as error:
        return f"{nearest} cannot be written ({error.strerror or error})"
    return ""


def prune(found: Contents, before: float) -> list[Entry]:
    """Remove the entries that were last used before this time (s, UTC), and what broken-off writing left behind.

    A process that is reading an entry compiles anew. Raises OSError where something cannot be removed.
    """
    old = [entry for entry in found.entries if entry.used < before]
    for entry in old:
        shutil.rmtree(entry.path)
    for path in found.directory.glob(f"{_ENTRIES[:-1]}.writing-*"):
        if path.stat().st_mtime < before:
            shutil.rmtree(path)
    for lock in found.directory.glob(f"{_ENTRIES}.lock"):
        if not lock.with_suffix("").exists() and lock.stat().st_mtime < before:
            lock.unlink()
    return old
