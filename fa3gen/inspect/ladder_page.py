"""What docs/ladder.md shows of specs, modules and records; `fa3gen refresh` writes it.

The text of the document is written by hand. Everything between two comments, `<!-- diff k1_d128 k2_d128: spec -->` and
`<!-- end -->`, is written here, and so are the pictures in docs/ladder/. The blocks:

    diff A B: TITLE, ...       the output of `fa3gen diff A B --no-source`, of which these parts
    source STEM: NAME          a function of a generated module; `loop of NAME`: the last loop over tiles of keys in it
    measured RUNG RUNG         TFLOP/s of two rungs beside each other, from the evidence records
    beside_torch STEM STEM     speeds of other operations than attention beside torch's, from the evidence records
    order STEM SIZE            picture: which tiles of a GEMM of SIZE x SIZE run at the same time
    compiled STEM STEM         what the compiler made of two modules, from the evidence records
    picture STEM: even         the pipeline simulator's picture of a module; `even`: products served evenly
    stages STEM                what it predicts for 1 to 6 stages
    sweep HEAD_DIM LENGTH      the stage sweep, measured beside simulated, from its record
    held HEAD_DIM SPEC         of it, what fewer CTAs on an SM do to the kernels of a spec
    swizzle STEM: TILE         the report's pictures of eight rows of a tile, without a swizzle and as they are laid out
    fragment STEM: KEY         the report's picture of who holds what of a fragment (`accumulator`, `operand`)
    ladder                     all rungs, as in the README
    exercise COMMAND           what the CPU model says of a module with the edit that the diff above the block shows

An exercise compiles a module and runs it, so `fa3gen refresh` leaves its block as it is: tests/make_exercises.py writes
it. Single numbers in the text stand between `<!-- = ratio k3_2 k3_3 128 full 16384 -->` and `<!-- = -->`.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fa3gen.base import markdown
from fa3gen.base.errors import UserError
from fa3gen.design.ladder import RUNGS
from fa3gen.design.workspace import Workspace
from fa3gen.hardware import chips
from fa3gen.inspect import simulation, stage_sweep
from fa3gen.inspect.difference import text as difference_text
from fa3gen.inspect.difference.sides import difference
from fa3gen.inspect.report import fragments, pictures, swizzles
from fa3gen.inspect.simulation.engine import Arbitration
from fa3gen.records import evidence
from fa3gen.records.evidence import Record
from fa3gen.spec.model import CausalMask, Copy, Forward, Gemm, NoMask
from fa3gen.spec.specfile import Variant, attention_among, attention_only

DOCUMENT = Path("docs/ladder.md")
PICTURES = Path("docs/ladder")
BLOCK = re.compile(r"(<!-- (\w+)(?: ([^>]*?))? -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)
CUT = "[...]"
EXERCISE = "exercise"
TILES = 6  # of keys in a picture
CHIP = chips.H200
NUMBER = re.compile(r"(<!-- = ([^>]+?) -->)(.*?)(<!-- = -->)")
COLUMNS = tuple((d, mask) for d in (64, 128) for mask in ("full", "causal"))


class LadderError(UserError):
    """A block that cannot be written; the message names it."""


@contextmanager
def naming(kind: str, arguments: str) -> Iterator[None]:
    """Raise LadderError, which names a block, for what goes wrong while it is written."""
    try:
        yield
    except (LookupError, ValueError, OSError, UserError) as error:
        raise LadderError(f"<!-- {kind} {arguments} -->: {type(error).__name__}: {error}") from error


def filled(document: str, workspace: Workspace) -> str:
    """The document with every block but the exercises written anew. Raises LadderError for one that cannot be."""

    def written(found: re.Match[str]) -> str:
        _, kind, arguments, text, _ = found.groups()
        return found[1] + (text if kind == EXERCISE else block(workspace, kind, arguments or "")) + found[5]

    return NUMBER.sub(lambda found: found[1] + number(workspace, found[2]) + found[4], BLOCK.sub(written, document))


def block(workspace: Workspace, kind: str, arguments: str) -> str:
    """The text of one block, line end included."""
    writers: dict[str, Callable[[Workspace, str], str]] = {
        "diff": diff,
        "source": source,
        "measured": measured,
        "beside_torch": beside_torch,
        "order": order,
        "compiled": compiled,
        "picture": picture,
        "stages": stages,
        "sweep": stage_sweep.sweep_table,
        "held": stage_sweep.held_table,
        "swizzle": swizzle,
        "fragment": fragment,
        "ladder": lambda workspace, _: ladder_table(workspace),
    }
    with naming(kind, arguments):
        return writers[kind](workspace, arguments)


# Blocks


def diff(workspace: Workspace, arguments: str) -> str:
    """`A B: title, title`."""
    names, _, titles = arguments.partition(":")
    old, new = names.split()
    parts = sections(difference_text.printed(difference(old, new, workspace, with_source=False), with_source=False))
    wanted = [title.strip() for title in titles.split(",")]
    missing = set(wanted) - parts.keys()
    if missing:
        raise ValueError(f"no part {', '.join(sorted(missing))}; there are {', '.join(parts)}")
    lines = [f"$ fa3gen diff {old} {new} --no-source", *parts[""]]
    cut = False
    for title, part in parts.items():
        if title in wanted:
            lines += ["", title, *part]
        elif title and not cut:
            lines += ["", CUT]
        cut = bool(title) and title not in wanted
    return fenced("text", "\n".join(lines))


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


def parts_of(arguments: str) -> tuple[str, str]:
    """`STEM: WHAT`, or the stem alone."""
    stem, _, what = arguments.partition(":")
    return stem.strip(), what.strip()


def spec_of(workspace: Workspace, stem: str) -> Forward:
    """What a module is generated from."""
    [variant] = attention_only(workspace.resolve(stem), "a picture of the ladder")
    return variant.spec


def source(workspace: Workspace, arguments: str) -> str:
    """`STEM: NAME` or `STEM: loop of NAME`, with a link to the lines."""
    stem, what = parts_of(arguments)
    path = workspace.module_path(stem)
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


def module_of(rung: str, head_dim: int | str, mask: str) -> str:
    """The stem of a rung's module; `mask` is full or causal."""
    return f"{rung}_d{head_dim}" + ("_causal" if mask == "causal" else "")


def measured(workspace: Workspace, arguments: str) -> str:
    """`BEFORE RUNG`, or one rung alone; a row each, and the ratio of the two."""
    rungs = arguments.split()
    records = {rung: [evidence.verified(workspace, module_of(rung, d, mask)) for d, mask in COLUMNS] for rung in rungs}
    speeds = {rung: [speed for record in found for speed in speeds_of(record)] for rung, found in records.items()}
    rows = [[f"`{rung}`", *(markdown.speed(value) or "–" for value in values)] for rung, values in speeds.items()]
    if len(rungs) == 2:
        pairs = zip(*speeds.values(), strict=True)
        rows.append(["ratio", *(f"{new / old:.2f}" if old and new else "–" for old, new in pairs)])
    names = [f"d{d} {mask} {length // 1024}k" for d, mask in COLUMNS for length in evidence.SEQ_LENS]
    machines = sorted({f"{record.gpu}, {record.date}" for found in records.values() for record in found if record})
    return table(["TFLOP/s", *names], rows) + f"\nMeasured {evidence.TIMED}: {'; '.join(machines) or 'nothing yet'}.\n"


def speeds_of(record: Record | None) -> list[float | None]:
    """TFLOP/s at the lengths that records have."""
    return [record.tflops.get(str(length)) if record else None for length in evidence.SEQ_LENS]


def beside_torch(workspace: Workspace, arguments: str) -> str:
    """`STEM STEM`: a row each, with what each reaches and its share of torch's speed in the same rounds."""
    records = {stem: evidence.verified(workspace, stem) for stem in arguments.split()}
    problems = list(dict.fromkeys(name for record in records.values() if record for name in record.beside_torch))
    rows = []
    for stem, record in records.items():
        speeds = [record.beside_torch.get(name) if record else None for name in problems]
        rows.append([f"`{stem}`", *(_beside(speed) if speed else "–" for speed in speeds)])
    machines = sorted({f"{record.gpu}, {record.date}" for record in records.values() if record})
    said = "In brackets: the share of torch's own call, in turns with it, from CUDA graphs"
    return table(["", *problems], rows) + f"\n{said}: {'; '.join(machines) or 'not measured yet'}.\n"


def _beside(speed: evidence.Speed) -> str:
    share = "" if speed.of_torch is None else f" ({speed.of_torch:.2f})"
    return f"{speed.rate:,.0f} {speed.unit}{share}"


def order(workspace: Workspace, arguments: str) -> str:
    """`STEM SIZE`; the picture itself is written by `files`."""
    stem, size = arguments.split()
    [name] = picture_of_order(workspace, arguments)
    return f"![Tiles of D of {stem} at {size} x {size}: those of a colour run at the same time](ladder/{name})\n"


def picture_of_order(workspace: Workspace, arguments: str) -> dict[str, str]:
    """The tiles of D, coloured by when they run, by file name."""
    stem, size = arguments.split()
    [variant] = workspace.resolve(stem)
    if not isinstance(variant.spec, Gemm):
        raise ValueError(f"{stem} is no GEMM, whose tiles have an order")
    return {f"{stem}_order.svg": pictures.tile_order_of_gemm(variant.spec, int(size), CHIP.sms).file()}


def compiled(workspace: Workspace, arguments: str) -> str:
    """`STEM STEM`: registers, spills, shared memory and WGMMA."""
    rows = []
    for stem in arguments.split():
        record = evidence.verified(workspace, stem)
        facts = record.compile if record else None
        cells = ["–"] * 4
        if facts is not None:
            wgmma = ", ".join(f"{count} {shape}" for shape, count in sorted(facts.wgmma.items()))
            cells = [str(facts.registers), str(facts.spills), str(facts.smem_bytes), wgmma or "none"]
        rows.append([f"`{stem}`", *cells])
    return table(["as compiled", "registers per thread", "spills", "bytes of shared memory", "WGMMA"], rows)


def picture(workspace: Workspace, arguments: str) -> str:
    """`STEM` or `STEM: even`; the picture itself is written by `files`."""
    stem, arbitration = drawn(arguments)
    if not workspace.module_path(stem).is_file():
        raise ValueError(f"there is no module {stem}")
    served = "" if arbitration == "oldest" else f" --arbitration {arbitration}"
    return (
        f"![Loads, products and softmax of {stem} over time](ladder/{stem}.svg)\n\n"
        f"`fa3gen simulate {stem} --tiles {TILES}{served} --svg {stem}.svg`\n"
    )


def drawn(arguments: str) -> tuple[str, Arbitration]:
    """The module of a picture, and how the tensor cores serve its products."""
    stem, served = parts_of(arguments)
    if served not in ("", "even"):
        raise ValueError(f"a picture is of products served oldest first, or `even`, not {served!r}")
    return stem, "even" if served else "oldest"


def timeline(workspace: Workspace, arguments: str) -> dict[str, str]:
    """The picture of a module, as the command that stands below it draws it, by file name."""
    stem, arbitration = drawn(arguments)
    spec = spec_of(workspace, stem)
    registers = evidence.compiled_registers(workspace, stem)
    settings = simulation.settings_of(spec, tiles=TILES, registers=registers, arbitration=arbitration)
    found = simulation.simulate(spec, simulation.times_of(spec, CHIP), settings)
    return {f"{stem}.svg": simulation.svg(found, f"{stem}: one SM, simulated")}


def stages(workspace: Workspace, arguments: str) -> str:
    """`STEM`: a row for each number of stages; the spec's own is in bold type."""
    [stem] = arguments.split()
    spec = spec_of(workspace, stem)
    registers = evidence.compiled_registers(workspace, stem)
    present = simulation.settings_of(spec, registers=registers).stages
    rows = []
    for row in simulation.sweep(spec, simulation.times_of(spec, CHIP), range(1, 7), registers=registers):
        own = "**" if row.stages == present else ""
        shares = [f"{share:.0%}" for share in (row.tensor, row.issue, row.waiting)] if row.legal else ["–"] * 3
        cycles = f"{row.step_cycles:,.0f}" if row.legal else "–"
        rows.append([f"{own}{row.stages}{own}", str(row.ctas) if row.legal else "does not fit", cycles, *shares])
    columns = ["stages", "CTAs per SM", "cycles of the SM per tile of keys", "tensor cores busy", "issue slots busy"]
    said = f"`fa3gen simulate {stem} --stages 1..6`, on {CHIP.name}, the registers as with {present} for all:\n\n"
    return said + table([*columns, "waiting for K or V"], rows)


def swizzle(workspace: Workspace, arguments: str) -> str:
    """`STEM: TILE`; the pictures themselves are written by `files`."""
    stem, tile = parts_of(arguments)
    plain, laid_out = (f"ladder/{name}" for name in pictures_of_swizzle(workspace, arguments))
    return (
        f"![Eight rows of {tile} of {stem} in the banks, without a swizzle]({plain})\n"
        f"![The same rows as they are laid out]({laid_out})\n"
    )


def pictures_of_swizzle(workspace: Workspace, arguments: str) -> dict[str, str]:
    """The two pictures of a tile, by file name."""
    stem, tile = parts_of(arguments)
    [variant] = workspace.resolve(stem)
    spec = variant.spec
    tiles = [swizzles.of_copy(spec)] if isinstance(spec, Copy) else swizzles.operands(spec_of(workspace, stem))
    operands = {operand.name: operand for operand in tiles}
    if tile not in operands:
        raise ValueError(f"no tile {tile}; there are {', '.join(operands)}")
    return {
        f"{stem}_{tile}_plain.svg": pictures.banks(operands[tile], plain=True).file(),
        f"{stem}_{tile}.svg": pictures.banks(operands[tile], plain=False).file(),
    }


def fragment(workspace: Workspace, arguments: str) -> str:
    """`STEM: KEY`; the picture itself is written by `files`."""
    stem, _ = parts_of(arguments)
    what = fragment_of(workspace, arguments).what
    [name] = picture_of_fragment(workspace, arguments)
    return f"![Which thread of a warpgroup holds what: {what}, {stem}](ladder/{name})\n"


def picture_of_fragment(workspace: Workspace, arguments: str) -> dict[str, str]:
    """The picture of a fragment, by file name."""
    stem, key = parts_of(arguments)
    return {f"{stem}_{key}.svg": pictures.owners(fragment_of(workspace, arguments)).file()}


def fragment_of(workspace: Workspace, arguments: str) -> fragments.Fragment:
    """The fragment that a block names."""
    stem, key = parts_of(arguments)
    found = {fragment.key: fragment for fragment in fragments.fragments(spec_of(workspace, stem))}
    if key not in found:
        raise ValueError(f"no fragment {key}; there are {', '.join(found) or 'none'}")
    return found[key]


def ladder_table(workspace: Workspace) -> str:
    """The README's table: each rung's TFLOP/s at both lengths, head dims and masks; empty without evidence."""
    columns = [(d, mask, seq_len) for d in (64, 128) for mask in ("full", "causal") for seq_len in evidence.SEQ_LENS]
    names = [f"d{d} {mask} {seq_len // 1024}k" for d, mask, seq_len in columns]
    files = {file.stem: file for file in workspace.load_all()}
    rows, machines = [], set()
    for rung in (rung for rung in RUNGS if rung in files):
        cells = []
        for d, mask, seq_len in columns:
            record = _verified_of(workspace, attention_among(files[rung].variants), head_dim=d, mask=mask)
            cells.append(markdown.speed(record.tflops.get(str(seq_len))) if record else "")
            if record:
                machines.add(f"{record.gpu}, {record.date}")
        rows.append([f"`{rung}`", *(cell or "–" for cell in cells)])
    measured = "; ".join(sorted(machines)) or "nothing yet"
    note = "TFLOP/s, bf16 forward, 16,384 tokens in all, heads x head dim = 2048. "
    note += f"Measured {evidence.TIMED}: {measured}."
    return "\n".join([*markdown.table(["rung", *names], rows), "", f"{note} –: not verified on a GPU."]) + "\n"


def _verified_of(
    workspace: Workspace, variants: Sequence[Variant[Forward]], *, head_dim: int, mask: str
) -> Record | None:
    """Return the record of the bf16 variant with this head dim and mask, if it is verified as it stands."""
    kind = NoMask if mask == "full" else CausalMask
    for variant in variants:
        spec = variant.spec
        if spec.problem.head_dim == head_dim and spec.problem.dtype == "bf16" and isinstance(spec.mask, kind):
            return evidence.verified(workspace, variant.stem)
    return None


def number(workspace: Workspace, arguments: str) -> str:
    """`ratio BEFORE RUNG HEAD_DIM MASK LENGTH`."""
    kind, before, rung, d, mask, length = arguments.split()
    if kind != "ratio":
        raise LadderError(f"<!-- = {arguments} -->: there is no number {kind}")
    old, new = (evidence.verified(workspace, module_of(name, d, mask)) for name in (before, rung))
    if old is None or new is None:
        return "–"
    return f"{new.tflops[length] / old.tflops[length]:.2f}"


def fenced(language: str, text: str) -> str:
    """A block of code."""
    return f"```{language}\n{text}\n```\n"


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(markdown.table(columns, rows)) + "\n"


# Files


# Pictures of a block, by file name.
DRAWN: dict[str, Callable[[Workspace, str], dict[str, str]]] = {
    "order": picture_of_order,
    "picture": timeline,
    "swizzle": pictures_of_swizzle,
    "fragment": picture_of_fragment,
}


def files(workspace: Workspace) -> Iterator[tuple[Path, str]]:
    """The document and its pictures, with their texts; nothing where there is no such document."""
    path = workspace.root / DOCUMENT
    if not path.is_file():
        return
    document = path.read_text(encoding="utf-8")
    yield path, filled(document, workspace)
    for found in BLOCK.finditer(document):
        if found[2] in DRAWN:
            for name, text in DRAWN[found[2]](workspace, found[3]).items():
                yield workspace.root / PICTURES / name, text
