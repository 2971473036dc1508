"""Files: written so that a reader sees the old one or the new one, never half of it; and named by their bytes."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file at once or not at all, with the line ends of `text`; makes its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
