"""Write what docs/ladder.md shows of specs, modules and records: `python tests/make_ladder.py`; with --check only look.

The text of the document is written by hand. Everything between two comments, `<!-- diff k1_d128 k2_d128: spec -->` and
`<!-- end -->`, is written by this script, and so are the pictures in docs/ladder/. The blocks:

    diff A B: TITLE, ...       the output of `fa3gen diff A B --no-source`, of which these parts
    source STEM: NAME          a function of a generated module; `loop of NAME`: the last loop over tiles of keys in it
    measured RUNG RUNG         TFLOP/s of two rungs beside each other, from the evidence records
    compiled STEM STEM         what the compiler made of two modules, from the evidence records
    picture STEM: OPTION ...   the pipeline simulator's picture of a module, with options of the command if need be
    stages STEM                what it predicts for 1 to 6 stages
    ladder                     all rungs, as in the README

Single numbers in the text stand between `<!-- = ratio k3_2 k3_3 128 full 16384 -->` and `<!-- = -->`.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fa3gen.base import markdown
from fa3gen.base.files import write_text
from fa3gen.cli import main as fa3gen
from fa3gen.design.workspace import Workspace
from fa3gen.inspect import pages
from fa3gen.records import evidence
from fa3gen.records.evidence import Record

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "ladder.md"
PICTURES = ROOT / "docs" / "ladder"
COMMAND = "python tests/make_ladder.py"
BLOCK = re.compile(r"(<!-- (\w+)(?: ([^>]*?))? -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)
CUT = "[...]"
TILES = "6"  # of keys in a picture
NUMBER = re.compile(r"(<!-- = ([^>]+?) -->)(.*?)(<!-- = -->)")
COLUMNS = tuple((d, mask) for d in (64, 128) for mask in ("full", "causal"))

WORKSPACE = Workspace.find(ROOT)


class LadderError(Exception):
    """A block that cannot be written; the message names it."""


def filled(document: str) -> str:
    """The document with every block written anew."""
    blocks = BLOCK.sub(lambda found: found[1] + block(found[2], found[3] or "") + found[5], document)
    return NUMBER.sub(lambda found: found[1] + number(found[2]) + found[4], blocks)


def block(kind: str, arguments: str) -> str:
    """The text of one block, line end included."""
    writers = {
        "diff": diff,
        "source": source,
        "measured": measured,
        "compiled": compiled,
        "picture": picture,
        "stages": stages,
        "ladder": lambda _: pages.ladder_table(WORKSPACE),
    }
    try:
        return writers[kind](arguments)
    except (LookupError, ValueError) as error:
        raise LadderError(f"<!-- {kind} {arguments} -->: {type(error).__name__}: {error}") from error


# Blocks


def diff(arguments: str) -> str:
    """`A B: title, title`."""
    names, _, titles = arguments.partition(":")
    command = ["diff", *names.split(), "--no-source"]
    parts = sections(output_of(command))
    wanted = [title.strip() for title in titles.split(",")]
    missing = set(wanted) - parts.keys()
    if missing:
        raise ValueError(f"no part {', '.join(sorted(missing))}; there are {', '.join(parts)}")
    lines = [f"$ fa3gen {' '.join(command)}", *parts[""]]
    cut = False
    for title, part in parts.items():
        if title in wanted:
            lines += ["", title, *part]
        elif title and not cut:
            lines += ["", CUT]
        cut = bool(title) and title not in wanted
    return fenced("text", "\n".join(lines))


def output_of(command: list[str]) -> str:
    """What a command of fa3gen prints into a pipe, in the checkout."""
    captured = io.StringIO()
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    saved = dict(os.environ)
    try:
        os.environ.clear()
        os.environ.update(kept)
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(captured):
            code = fa3gen(command)
    finally:
        os.environ.clear()
        os.environ.update(saved)
    if code not in (0, 1):
        raise ValueError(f"`fa3gen {' '.join(command)}` exits with {code}")
    return captured.getvalue()


def sections(text: str) -> dict[str, list[str]]:
    """The parts of a diff by title; what stands before the first one has none."""
    parts: dict[str, list[str]] = {"": []}
    title = ""
    for line in text.rstrip("\n").splitlines():
        if not line:
            continue
        if line.startswith(" ") or " -> " in line:
            parts[title].append(line)
        else:
            title = line
            parts[title] = []
    return parts


def source(arguments: str) -> str:
    """`STEM: NAME` or `STEM: loop of NAME`, with a link to the lines."""
    stem, _, what = (part.strip() for part in arguments.partition(":"))
    path = WORKSPACE.module_path(stem)
    text = path.read_text(encoding="utf-8")
    first, last = lines_of(ast.parse(text), what)
    excerpt = textwrap.dedent("\n".join(text.splitlines()[first - 1 : last]))
    name = f"generated/{path.name}"
    return f"[{name}, lines {first} to {last}](../{name}#L{first}-L{last}):\n\n" + fenced("python", excerpt)


def lines_of(module: ast.Module, what: str) -> tuple[int, int]:
    """First and last line of a function, or of the last loop over tiles of keys in it."""
    name = what.removeprefix("loop of ")
    function = next((node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name), None)
    if function is None:
        raise ValueError(f"there is no function {name}")
    node: ast.stmt = function
    if what != name:
        body = [line for part in function.body for line in (part.body if isinstance(part, ast.While) else [part])]
        node = [statement for statement in body if isinstance(statement, ast.For)][-1]  # maybe in the loop over work
    return node.lineno, node.end_lineno or node.lineno


@cache
def verified(stem: str) -> Record | None:
    """The record of a module, if it is of the present file."""
    return evidence.verified(WORKSPACE, stem)


def module_of(rung: str, head_dim: int | str, mask: str) -> str:
    """The stem of a rung's module; `mask` is full or causal."""
    return f"{rung}_d{head_dim}" + ("_causal" if mask == "causal" else "")


def measured(arguments: str) -> str:
    """`BEFORE RUNG`, or one rung alone; a row each, and the ratio of the two."""
    rungs = arguments.split()
    records = {rung: [verified(module_of(rung, d, mask)) for d, mask in COLUMNS] for rung in rungs}
    speeds = {rung: [speed for record in found for speed in speeds_of(record)] for rung, found in records.items()}
    rows = [[f"`{rung}`", *(markdown.speed(value) or "–" for value in values)] for rung, values in speeds.items()]
    if len(rungs) == 2:
        pairs = zip(*speeds.values(), strict=True)
        rows.append(["ratio", *(f"{new / old:.2f}" if old and new else "–" for old, new in pairs)])
    names = [f"d{d} {mask} {length // 1024}k" for d, mask in COLUMNS for length in evidence.SEQ_LENS]
    machines = sorted({f"{record.gpu}, {record.date}" for found in records.values() for record in found if record})
    return table(["TFLOP/s", *names], rows) + f"\nMeasured: {'; '.join(machines) or 'nothing yet'}.\n"


def speeds_of(record: Record | None) -> list[float | None]:
    """TFLOP/s at the lengths that records have."""
    return [record.tflops.get(str(length)) if record else None for length in evidence.SEQ_LENS]


def compiled(arguments: str) -> str:
    """`STEM STEM`: registers, spills, shared memory and WGMMA."""
    rows = []
    for stem in arguments.split():
        record = verified(stem)
        facts = record.compile if record else None
        cells = ["–"] * 4
        if facts is not None:
            wgmma = ", ".join(f"{count} {shape}" for shape, count in sorted(facts.wgmma.items()))
            cells = [str(facts.registers), str(facts.spills), str(facts.smem_bytes), wgmma or "none"]
        rows.append([f"`{stem}`", *cells])
    return table(["as compiled", "registers per thread", "spills", "bytes of shared memory", "WGMMA"], rows)


def picture(arguments: str) -> str:
    """`STEM` or `STEM: OPTION ...`; the picture itself is written by `files`."""
    stem, command = drawn(arguments)
    if not WORKSPACE.module_path(stem).is_file():
        raise ValueError(f"there is no module {stem}")
    return (
        f"![Loads, products and softmax of {stem} over time](ladder/{stem}.svg)\n\n"
        f"`fa3gen {' '.join(command)} --svg {stem}.svg`\n"
    )


def drawn(arguments: str) -> tuple[str, list[str]]:
    """The module of a picture, and the command that draws it."""
    stem, _, options = arguments.partition(":")
    return stem, ["simulate", stem, "--tiles", TILES, *options.split()]


def stages(arguments: str) -> str:
    """`STEM`: a row for each number of stages; the spec's own is in bold type."""
    [stem] = arguments.split()
    command = ["simulate", stem, "--stages", "1..6"]
    [module] = json.loads(output_of([*command, "--json"]))["modules"]
    rows = []
    for row in module["stages"]:
        own = "**" if row["stages"] == module["settings"]["stages"] else ""
        shares = [f"{row[share]:.0%}" for share in ("tensor", "issue", "waiting")] if row["legal"] else ["–"] * 3
        cycles = f"{row['step_cycles']:,.0f}" if row["legal"] else "–"
        rows.append(
            [f"{own}{row['stages']}{own}", str(row["ctas"]) if row["legal"] else "does not fit", cycles, *shares]
        )
    columns = ["stages", "CTAs per SM", "cycles of the SM per tile of keys", "tensor cores busy", "issue slots busy"]
    said = f"`fa3gen {' '.join(command)}`, on {module['chip']}:\n\n"
    return said + table([*columns, "waiting for K or V"], rows)


def number(arguments: str) -> str:
    """`ratio BEFORE RUNG HEAD_DIM MASK LENGTH`."""
    kind, before, rung, d, mask, length = arguments.split()
    if kind != "ratio":
        raise LadderError(f"<!-- = {arguments} -->: there is no number {kind}")
    old, new = (verified(module_of(name, d, mask)) for name in (before, rung))
    if old is None or new is None:
        return "–"
    return f"{new.tflops[length] / old.tflops[length]:.2f}"


def fenced(language: str, text: str) -> str:
    """A block of code."""
    return f"```{language}\n{text}\n```\n"


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


# Files


def files() -> Iterator[tuple[Path, str]]:
    """Every file that this script writes, with its text."""
    document = DOCUMENT.read_text(encoding="utf-8")
    yield DOCUMENT, filled(document)
    with tempfile.TemporaryDirectory() as folder:
        for arguments in (found[3] for found in BLOCK.finditer(document) if found[2] == "picture"):
            stem, command = drawn(arguments)
            file = Path(folder) / f"{stem}.svg"
            output_of([*command, "--svg", str(file)])
            yield PICTURES / file.name, file.read_text(encoding="utf-8")


def problems() -> list[str]:
    """The files that are not as this script writes them."""
    stale = [path for path, text in files() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    return [f"{path.relative_to(ROOT)} is out of date; run `{COMMAND}`" for path in stale]


def main(arguments: list[str]) -> int:
    """Write the files, or say what is out of date."""
    if arguments == ["--check"]:
        found = problems()
        print("\n".join(found) or f"{DOCUMENT.relative_to(ROOT)} is up to date")
        return 1 if found else 0
    if arguments:
        print(f"usage: {COMMAND} [--check]", file=sys.stderr)
        return 2
    for path, text in files():
        write_text(path, text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
