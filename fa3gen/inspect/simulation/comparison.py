"""Predicted beside measured: the tables of docs/simulator.md, made from the evidence.

`python -m fa3gen.inspect.simulation.comparison` writes them anew.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fa3gen.base import markdown
from fa3gen.base.files import write_text
from fa3gen.design.work import Problem
from fa3gen.design.workspace import Workspace
from fa3gen.hardware import chips
from fa3gen.inspect import simulation
from fa3gen.inspect.simulation.run import measured_shape
from fa3gen.records import evidence
from fa3gen.spec.model import NoMask
from fa3gen.spec.specfile import Variant

DOCUMENT = "docs/simulator.md"
COMMAND = "python -m fa3gen.inspect.simulation.comparison"
# Specs of the tables: the ladder without k1, which has no pipeline, and others that the evidence has speeds of.
LADDER = (
    *("k2", "k2_cp_async", "k3_1", "k3_2", "k3_3", "k4_1", "k4_smem", "k4_2", "k5", "k6_sequential", "k6"),
    *("fwd_d64", "fwd_d96", "fwd_d128", "fwd_d192", "fwd_d256"),
)
STAGED = ("k3_1_d128", "k4_2_d128", "k5_d64", "k5_d128", "k6_d64", "k6_d128")
STAGES = range(1, 7)


@dataclass(frozen=True)
class Cell:
    """One module at one length: TFLOP/s with products served evenly and oldest first, and as measured."""

    stem: str
    length: int
    ctas: int
    even: float
    oldest: float
    measured: float


def cells(workspace: Workspace) -> Iterator[Cell]:
    """Every unmasked module of LADDER that is verified as it stands and has speeds."""
    chip = chips.H200
    for variant in (variant for name in LADDER for variant in workspace.resolve(name)):
        spec = variant.spec
        record = evidence.verified(workspace, variant.stem)
        if record is None or record.compile is None or not isinstance(spec.mask, NoMask):
            continue
        registers, times = record.compile.registers, simulation.times_of(spec, chip)
        for length in evidence.SEQ_LENS:
            measured = record.tflops.get(str(length))
            if measured is None:
                continue
            problem = Problem(spec, measured_shape(spec, length))
            oldest = simulation.predict(problem, times, chip, registers)
            # Without products on the tensor cores there is nothing to arbitrate.
            even = simulation.predict(problem, times, chip, registers, "even") if times.qk.tensor else oldest
            ctas = simulation.settings_of(spec, registers=registers).ctas
            yield Cell(variant.stem, length, ctas, even, oldest, measured)


def comparison_table(found: Sequence[Cell]) -> str:
    """Markdown: a row for each module, with both lengths."""
    lengths = sorted({cell.length for cell in found})
    head = ["module", "CTAs"]
    for length in lengths:
        name = f"{length // 1024}k"
        head += [f"{name} even", f"{name} oldest", f"{name} measured", "measured / predicted"]
    rows = []
    for stem in dict.fromkeys(cell.stem for cell in found):
        own = {cell.length: cell for cell in found if cell.stem == stem}
        row = [f"`{stem}`", str(next(iter(own.values())).ctas)]
        for length in lengths:
            cell = own.get(length)
            row += ["–"] * 4 if cell is None else _speeds(cell)
        rows.append(row)
    return _markdown(head, rows)


def _speeds(cell: Cell) -> list[str]:
    ratios = sorted((cell.measured / cell.oldest, cell.measured / cell.even))
    low, high = (f"{ratio:.2f}" for ratio in ratios)
    shown = low if low == high else f"{low} to {high}"
    return [f"{cell.even:.0f}", f"{cell.oldest:.0f}", markdown.speed(cell.measured), shown]


def summary(found: Sequence[Cell]) -> str:
    """How far the predictions are from the measurements, in one sentence for each kind of kernel."""
    tensor = [cell for cell in found if cell.stem.startswith(("k4_smem", "k4_2", "k5", "k6", "fwd"))]
    scalar = [cell for cell in found if cell not in tensor]
    below = sum(cell.measured < min(cell.even, cell.oldest) for cell in tensor)
    above = sum(cell.measured > max(cell.even, cell.oldest) for cell in tensor)
    between = len(tensor) - below - above
    lines = [
        f"Both products on WGMMA: of {len(tensor)} cells {between} lie between the two predictions, {below} below "
        f"both, {above} above both; the median of measured over predicted is "
        f"{statistics.median(cell.measured / cell.even for cell in tensor):.2f} (even) and "
        f"{statistics.median(cell.measured / cell.oldest for cell in tensor):.2f} (oldest first).",
        f"Products on scalars: {len(scalar)} cells, measured over predicted from "
        f"{min(cell.measured / cell.oldest for cell in scalar):.2f} to "
        f"{max(cell.measured / cell.oldest for cell in scalar):.2f}.",
    ]
    return "\n".join(f"- {line}" for line in lines) + "\n"


def stages_table(workspace: Workspace) -> str:
    """Markdown: tensor cores (or issue slots) busy in the steady state for each number of stages."""
    rows = []
    for stem in STAGED:
        [variant] = workspace.resolve(stem)
        rows.append([f"`{stem}`", *_staged(workspace, variant)])
    return _markdown(["module", "busy", *map(str, STAGES)], rows)


def _staged(workspace: Workspace, variant: Variant) -> list[str]:
    registers = evidence.compiled_registers(workspace, variant.stem)
    times = simulation.times_of(variant.spec, chips.H200)
    found = simulation.sweep(variant.spec, times, STAGES, registers=registers)
    tensor = bool(variant.spec.tile.warpgroups)
    shares = [f"{row.tensor if tensor else row.issue:.0%}{'' if row.legal else ' (refused)'}" for row in found]
    return ["tensor cores" if tensor else "issue slots", *shares]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(markdown.table(head, rows)) + "\n"


def blocks(workspace: Workspace) -> dict[str, str]:
    """Name -> text of each part of the document that this module makes."""
    found = list(cells(workspace))
    return {"comparison": comparison_table(found), "summary": summary(found), "stages": stages_table(workspace)}


def with_blocks(text: str, made: dict[str, str]) -> str:
    """The document with the parts between `<!-- NAME:begin -->` and `<!-- NAME:end -->` replaced."""
    for name, block in made.items():
        text = markdown.between(text, DOCUMENT, f"<!-- {name}:begin -->", block, f"<!-- {name}:end -->")
    return text


def main() -> None:
    """Write the document of the checkout anew."""
    workspace = Workspace.find()
    path = Path(workspace.root) / DOCUMENT
    write_text(path, with_blocks(path.read_text(encoding="utf-8"), blocks(workspace)))


if __name__ == "__main__":
    main()
