"""What a tuning run has done, so that the next one does not do it again: one JSON object per line, only ever appended.

A line that a kill cut short, and every line that is not what this module writes, counts as never written.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fa3gen.base.errors import UserError


class Journal:
    """The journal at `path`: what it holds already, and appending to it. Threads may share one."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        """Read what is there, or with `fresh` begin anew. Raises UserError when the file cannot be written."""
        self.path = path
        self._lock = threading.Lock()
        self._entries: list[dict[str, Any]] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if fresh:
                path.unlink(missing_ok=True)
            text = path.read_bytes() if path.exists() else b""
            whole = text[: text.rfind(b"\n") + 1]
            if whole != text:  # or the first line written now would go down with the broken one
                path.write_bytes(whole)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; name another directory with --work") from error
        for line in whole.decode("utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and isinstance(entry.get("kind"), str):
                self._entries.append(entry)

    def append(self, kind: str, **facts: Any) -> dict[str, Any]:
        """Write one entry and wait until the disk has it."""
        entry = {"kind": kind, **facts}
        with self._lock:
            self._file.write(json.dumps(entry, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._entries.append(entry)
        return entry

    def find(self, kind: str, **facts: Any) -> dict[str, Any] | None:
        """The newest entry of this kind that has all these facts."""
        plain = json.loads(json.dumps(facts))
        with self._lock:
            matching = (entry for entry in reversed(self._entries) if entry["kind"] == kind and _has(entry, plain))
            return next(matching, None)

    def all(self, kind: str) -> list[dict[str, Any]]:
        """Every entry of this kind, oldest first."""
        with self._lock:
            return [entry for entry in self._entries if entry["kind"] == kind]

    def close(self) -> None:
        """Close the file; what was appended is on disk already."""
        self._file.close()


def _has(entry: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    return all(entry.get(key) == value for key, value in facts.items())
