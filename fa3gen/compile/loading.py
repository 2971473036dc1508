"""Importing generated modules from their files."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType


@contextlib.contextmanager
def clean_argv() -> Iterator[None]:
    """Hide this program's options while the DSL is imported: it parses sys.argv itself and may exit on ours."""
    saved = sys.argv
    sys.argv = saved[:1]
    try:
        yield
    finally:
        sys.argv = saved


def load_file(path: Path, *, variety: str = "generated") -> ModuleType:
    """Import one generated file from `path`, every time anew, under a name of its own for each variety."""
    name = f"fa3gen_{variety}_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # the DSL looks up the modules of its functions by name
    try:
        with clean_argv():
            found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
