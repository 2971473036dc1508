"""The report of a copy: what it decides, and where 16-byte units of a tile lie in shared memory.

That is not computed but seen: the CPU model runs the module on a tensor whose 16-byte units are numbered, and its
shared memory is read when the first tile has landed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
import numpy as np
import torch
from markupsafe import Markup

from fa3gen.compile.cache import cached_compile
from fa3gen.cpu.kernel import CpuKernel, Settings
from fa3gen.cpu.trace import Trace
from fa3gen.design import boxes
from fa3gen.design.workspace import Workspace
from fa3gen.inspect import explanation
from fa3gen.inspect.report import highlighting, pictures, swizzles
from fa3gen.inspect.report.drawing import packaged
from fa3gen.inspect.report.swizzles import CHUNK, GROUPS, LINE, ROWS, Chunk
from fa3gen.records import evidence
from fa3gen.spec.model import Copy
from fa3gen.spec.specfile import Variant


@dataclass(frozen=True)
class Cost:
    """How often the busiest group of banks is needed for units that are touched at once."""

    name: str
    transactions: int


class _Landing(Trace):
    """Keeps the shared memory of the first CTA as it is when the last box of its first tile has landed."""

    def __init__(self, spec: Copy) -> None:
        super().__init__()
        self.size, self.boxes_left = boxes.tile_bytes(spec), boxes.copies(spec)
        self.first: int | None = None
        self.bytes = b""

    def advance(self, cta: Any, group: Any, first: int, end: int) -> None:
        """Nobody asks for times."""

    def record(self, cta: Any, name: str, group: Any | None, details: dict[str, Any]) -> None:
        """Look at shared memory when a load has landed."""
        if name == "load landed" and self.boxes_left:
            self.boxes_left -= 1
            start = int(details["load"].chunks.min()) * CHUNK
            self.first = start if self.first is None else min(start, self.first)
            self.bytes = cta.shared.chunks.view(np.uint8)[self.first : self.first + self.size].tobytes()

    def finish(self, cta: Any) -> None:
        """Nothing is open."""


def landed(spec: Copy, kernel: CpuKernel) -> tuple[Chunk, ...]:
    """Where the model has the 16-byte units of a tile: row of the tile, unit along it, byte of the tile's memory."""
    sizes, per_row = spec.box.extents[:-1], spec.problem.row * spec.element.bytes // CHUNK
    rows = math.prod(sizes)
    numbers = torch.zeros((rows * per_row, CHUNK // 4), dtype=torch.int32)
    numbers[:, 0] = torch.arange(1, rows * per_row + 1)
    x = numbers.view(spec.element.in_torch()).view(*sizes, spec.problem.row)
    offsets = [torch.tensor([0, rows], dtype=torch.int32)] if boxes.packed(spec) else []
    landing = _Landing(spec)
    kernel.settings = Settings(trace=landing, ctas=[(0, 0, 0)])
    kernel(x, *offsets, torch.empty_like(x), *[1] * (spec.ring is not None))
    found = np.frombuffer(landing.bytes, np.int32)[:: CHUNK // 4]
    places = {int(number) - 1: place * CHUNK for place, number in enumerate(found) if number > 0}
    return tuple(Chunk(number // per_row, number % per_row, places[number]) for number in sorted(places))


def repeated(spec: Copy, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """Of the first eight rows the units in one row of the box, or its first 128 bytes: what the layout repeats."""
    width = min(spec.box.extents[-1] * spec.element.bytes, LINE) // CHUNK
    return tuple(chunk for chunk in chunks if chunk.row < ROWS and chunk.chunk < width)


def costs(chunks: Sequence[Chunk]) -> tuple[Cost, ...]:
    """Eight rows at one place, as a product reads them; and a row side by side, as threads copy it."""
    columns = sorted({chunk.chunk for chunk in chunks})
    down = max(swizzles.transactions(c for c in chunks if c.chunk == column and c.row < ROWS) for column in columns)
    rows = sorted({chunk.row for chunk in chunks})
    along = max(
        swizzles.transactions(c for c in chunks if c.row == row and first <= c.chunk < first + GROUPS)
        for row in rows
        for first in columns[::GROUPS]
    )
    wide = min(GROUPS, len(columns))
    return Cost(f"{ROWS} rows x {CHUNK} bytes", down), Cost(f"1 row x {wide * CHUNK} bytes", along)


def page(workspace: Workspace, variant: Variant, spec: Copy) -> str:
    """The page of one copy, whose spec is `spec`. UserError and CompileError as `gathering.gather`."""
    from fa3gen.compile import compiler

    place = workspace.place_of(variant)
    path = place.module_path(variant.stem)
    if not path.is_file():
        raise workspace.not_rendered([variant])
    compiled = cached_compile(path)
    census = compiler.analyse(compiled).census
    chunks = landed(spec, CpuKernel(compiled))
    shown = repeated(spec, chunks)
    state, record = evidence.status(place, variant.stem)
    text = _template().render(
        stem=variant.stem,
        explanation=explanation.explain(variant, [], [], census.registers),
        style=Markup(packaged("pictures.css") + packaged("page.css")),
        status=state.value,
        record=record,
        registers=census.registers,
        banks=pictures.bank_picture(shown, f"Bank groups of a tile of {variant.stem}", "row of the tile").markup(),
        swizzle=spec.box.swizzle,
        costs=costs(chunks),
        units=len(chunks),
        lines=highlighting.lines(path.read_text(encoding="utf-8")),
    )
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(packaged), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.get_template("copied.html.jinja")
