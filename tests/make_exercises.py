"""Write what the CPU model says of the exercises in docs/ladder.md: `python tests/make_exercises.py`.

An exercise is a diff, and below it a block between `<!-- exercise trace k1_d64 -->` and `<!-- end -->`: the answer of
that command to the module with the diff applied. Each compiles a module and runs it. All other blocks, `fa3gen refresh`
writes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

from rendering import CHECKOUT

from fa3gen.base.files import write_text
from fa3gen.cli import main as fa3gen
from fa3gen.compile import compiler
from fa3gen.compile.cache import CACHE_DIR_VARIABLE
from fa3gen.inspect.ladder_page import BLOCK, CUT, DOCUMENT, EXERCISE, fenced, naming

COMMAND = "python tests/make_exercises.py"
EDIT = re.compile(r"^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def filled(document: str) -> str:
    """The document with every exercise's answer written anew. Raises LadderError for one that cannot be."""

    def written(found: re.Match[str]) -> str:
        _, kind, command, text, _ = found.groups()
        return found[1] + (exercise(command, document[: found.start()]) if kind == EXERCISE else text) + found[5]

    with compiler.preloaded():  # each exercise compiles a module
        return BLOCK.sub(written, document)


def exercise(command: str, before: str) -> str:
    """`trace STEM OPTION ...` or `verify STEM OPTION ...`, run on the module with the last diff of `before` applied.

    `before` is the document up to the block.
    """
    with naming(EXERCISE, command):
        name, stem, *_ = words = command.split()
        edits = EDIT.findall(before)
        if not edits:
            raise ValueError("there is no diff above it")
        edited = apply_edit(edits[-1], CHECKOUT.module_path(stem).read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as made, patch.dict(os.environ, {CACHE_DIR_VARIABLE: f"{made}/cache"}):
            folder = Path(made)
            for part in ("specs", "generated"):
                (folder / part).mkdir()
            (folder / "generated" / f"{stem}.py").write_text(edited, encoding="utf-8")
            said = {"trace": traced, "verify": verified}[name](words, folder)
        if not said:
            raise ValueError("the model has nothing to report; an exercise needs an edit that it reports")
        return fenced("text", "\n".join([f"$ fa3gen {command}", CUT, *said, CUT]))


def apply_edit(hunk: str, text: str) -> str:
    """The text with the lines of a diff replaced; without file names and line numbers, they have to occur once."""
    lines = hunk.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in ("- ", "+ "))
    if text.count(old) != 1:
        raise ValueError(f"the module has {text.count(old)} places like {old.strip()!r}; an edit needs one")
    return text.replace(old, new)


def traced(command: list[str], folder: Path) -> list[str]:
    """The fault that `fa3gen trace` reports: of warps that do the same only the first, and no address of this run."""
    output_of(command, folder)
    report = json.loads((folder / f"{command[1]}.trace.json").read_text(encoding="utf-8"))["report"] or ""
    lines = re.sub(r"\b0x[0-9a-f]+", "0x...", report).splitlines()
    first: dict[str, str] = {}
    for line in lines:
        first.setdefault(re.sub(r"\bwarp \d+", "warp", line), line)
    return list(first.values())


def verified(command: list[str], folder: Path) -> list[str]:
    """The cases in which the result is wrong; of those with one fault that the model reports, the first."""
    [module] = json.loads(output_of([*command, "--json"], folder))["modules"]
    failed = [(case["name"], failure) for case in module["report"]["cases"] for failure in case["failures"]]
    first: dict[str, str] = {}
    for name, failure in failed:
        fault, at, _ = failure.partition(" at CTA ")
        first.setdefault(fault if at else name, f"{name}: {failure}")
    return list(first.values())


def output_of(command: list[str], folder: Path) -> str:
    """What a command of fa3gen prints in a folder; it may find faults, but has to run."""
    captured = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(captured):
        code = fa3gen(command)
    if code not in (0, 1):
        raise ValueError(f"`fa3gen {' '.join(command)}` exits with {code}")
    return captured.getvalue()


def main(document: Path = CHECKOUT.root / DOCUMENT) -> int:
    """Write the answers."""
    write_text(document, filled(document.read_text(encoding="utf-8")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
