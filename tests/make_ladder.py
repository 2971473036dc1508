"""Write what docs/ladder.md shows of specs, modules and records: `python tests/make_ladder.py`; with --check only look.

The text of the document is written by hand. Everything between two comments, `<!-- diff k1_d128 k2_d128: spec -->` and
`<!-- end -->`, is written by this script, and so are the pictures in docs/ladder/. The blocks:

    diff A B: TITLE, ...       the output of `fa3gen diff A B --no-source`, of which these parts
    source STEM: NAME          a function of a generated module; `loop of NAME`: the last loop over tiles of keys in it
    measured RUNG RUNG         TFLOP/s of two rungs beside each other, from the evidence records
    compiled STEM STEM         what the compiler made of two modules, from the evidence records
    picture STEM: OPTION ...   the pipeline simulator's picture of a module, with options of the command if need be
    stages STEM                what it predicts for 1 to 6 stages
    swizzle STEM: TILE         the report's pictures of eight rows of a tile, without a swizzle and as they are laid out
    fragment STEM: KEY         the report's picture of who holds what of a fragment (`accumulator`, `operand`)
    exercise COMMAND           what the CPU model says of a module with the edit that the diff above the block shows
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
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from fa3gen.base import markdown
from fa3gen.base.files import write_text
from fa3gen.cli import main as fa3gen
from fa3gen.compile import compiler
from fa3gen.compile.cache import CACHE_DIR_VARIABLE
from fa3gen.design.workspace import Workspace
from fa3gen.inspect import pages
from fa3gen.inspect.report import fragments, pictures, swizzles
from fa3gen.records import evidence
from fa3gen.records.evidence import Record
from fa3gen.spec.model import Spec

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "ladder.md"
PICTURES = ROOT / "docs" / "ladder"
COMMAND = "python tests/make_ladder.py"
BLOCK = re.compile(r"(<!-- (\w+)(?: ([^>]*?))? -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)
CUT = "[...]"
TILES = "6"  # of keys in a picture
EDIT = re.compile(r"^```diff\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(<!-- = ([^>]+?) -->)(.*?)(<!-- = -->)")
COLUMNS = tuple((d, mask) for d in (64, 128) for mask in ("full", "causal"))

WORKSPACE = Workspace.find(ROOT)


class LadderError(Exception):
    """A block that cannot be written; the message names it."""


def filled(document: str) -> str:
    """The document with every block written anew."""
    with compiler.preloaded():  # for the exercises, each of which compiles a module
        blocks = BLOCK.sub(
            lambda found: found[1] + block(found[2], found[3] or "", document[: found.start()]) + found[5], document
        )
    return NUMBER.sub(lambda found: found[1] + number(found[2]) + found[4], blocks)


def block(kind: str, arguments: str, before: str) -> str:
    """The text of one block, line end included; `before` is the document up to it."""
    writers: dict[str, Callable[[str], str]] = {
        "diff": diff,
        "source": source,
        "measured": measured,
        "compiled": compiled,
        "picture": picture,
        "stages": stages,
        "swizzle": swizzle,
        "fragment": fragment,
        "exercise": lambda command: exercise(command, before),
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


def output_of(command: list[str], folder: Path = ROOT) -> str:
    """What a command of fa3gen prints into a pipe, in the checkout or in another folder."""
    captured = io.StringIO()
    piped = environment({"COLUMNS": None, "FORCE_COLOR": None})
    with piped, contextlib.chdir(folder), contextlib.redirect_stdout(captured):
        code = fa3gen(command)
    if code not in (0, 1):
        raise ValueError(f"`fa3gen {' '.join(command)}` exits with {code}")
    return captured.getvalue()


@contextlib.contextmanager
def environment(changes: dict[str, str | None]) -> Iterator[None]:
    """Set variables of the environment, or take out those that are None, and put back what was there."""
    saved = dict(os.environ)
    wanted = {**saved, **changes}
    try:
        os.environ.clear()
        os.environ.update({name: value for name, value in wanted.items() if value is not None})
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


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


def timeline(arguments: str) -> dict[str, str]:
    """The simulator's picture, by file name."""
    stem, command = drawn(arguments)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{stem}.svg"
        output_of([*command, "--svg", str(file)])
        return {file.name: file.read_text(encoding="utf-8")}


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


def swizzle(arguments: str) -> str:
    """`STEM: TILE`; the pictures themselves are written by `files`."""
    stem, tile = (part.strip() for part in arguments.split(":"))
    plain, laid_out = (f"ladder/{name}" for name in pictures_of_swizzle(arguments))
    return (
        f"![Eight rows of {tile} of {stem} in the banks, without a swizzle]({plain})\n"
        f"![The same rows as they are laid out]({laid_out})\n"
    )


def pictures_of_swizzle(arguments: str) -> dict[str, str]:
    """The two pictures of a tile, by file name."""
    stem, tile = (part.strip() for part in arguments.split(":"))
    [operand] = [operand for operand in swizzles.operands(spec_of(stem)) if operand.name == tile]
    return {
        f"{stem}_{tile}_plain.svg": pictures.banks(operand, plain=True).file(),
        f"{stem}_{tile}.svg": pictures.banks(operand, plain=False).file(),
    }


def fragment(arguments: str) -> str:
    """`STEM: KEY`; the picture itself is written by `files`."""
    stem = arguments.partition(":")[0]
    [name] = picture_of_fragment(arguments)
    return f"![Which thread of a warpgroup holds what: {fragment_of(arguments).what}, {stem}](ladder/{name})\n"


def picture_of_fragment(arguments: str) -> dict[str, str]:
    """The picture of a fragment, by file name."""
    stem, key = (part.strip() for part in arguments.split(":"))
    return {f"{stem}_{key}.svg": pictures.owners(fragment_of(arguments)).file()}


def fragment_of(arguments: str) -> fragments.Fragment:
    """The fragment that a block names."""
    stem, key = (part.strip() for part in arguments.split(":"))
    [found] = [found for found in fragments.fragments(spec_of(stem)) if found.key == key]
    return found


def spec_of(stem: str) -> Spec:
    """What a module is generated from."""
    [variant] = WORKSPACE.resolve(stem)
    return variant.spec


def exercise(command: str, before: str) -> str:
    """`trace STEM OPTION ...` or `verify STEM OPTION ...`, run on the module with the last diff of `before` applied."""
    name, stem, *_ = words = command.split()
    with tempfile.TemporaryDirectory() as made, environment({CACHE_DIR_VARIABLE: f"{made}/cache"}):
        folder = Path(made)
        for part in ("specs", "generated"):
            (folder / part).mkdir()
        edited = apply_edit(EDIT.findall(before)[-1], WORKSPACE.module_path(stem).read_text(encoding="utf-8"))
        (folder / "generated" / f"{stem}.py").write_text(edited, encoding="utf-8")
        said = {"trace": traced, "verify": verified_anew}[name](words, folder)
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


def verified_anew(command: list[str], folder: Path) -> list[str]:
    """The cases in which O is wrong."""
    [module] = json.loads(output_of([*command, "--json"], folder))["modules"]
    return [f"{case['name']}: {failure}" for case in module["report"]["cases"] for failure in case["failures"]]


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
    for found in BLOCK.finditer(document):
        if found[2] in DRAWN:
            yield from ((PICTURES / name, text) for name, text in DRAWN[found[2]](found[3]).items())


# Pictures of a block, by file name.
DRAWN = {"picture": timeline, "swizzle": pictures_of_swizzle, "fragment": picture_of_fragment}


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
