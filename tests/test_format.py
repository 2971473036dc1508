"""The committed modules are formatted as black does it, whole files."""

from __future__ import annotations

import subprocess
import sys

from rendering import ROOT

# What black parsed stays in memory, and Python's collector of garbage looks through it again and again: with it black
# takes twice as long. Processes that black forks have none either.
BLACK = "import gc; gc.disable(); import black; black.patched_main()"


def test_format_is_that_of_black() -> None:
    """`format_module` formats block by block; black on whole files has nothing left to change.

    What it finds in order it keeps in its own cache, by the contents of a file: `black --check` of `.ci/run` does not
    format these files once more.
    """
    asked = [sys.executable, "-c", BLACK, "--check", "--workers", "1", "generated"]
    found = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
