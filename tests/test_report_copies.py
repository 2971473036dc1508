"""The report of copies: places of the units of a tile, read from the CPU model, are those of the swizzles' formulas."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import rendering

from fa3gen.cli import report
from fa3gen.compile.cache import cached_compile
from fa3gen.cpu.kernel import CpuKernel
from fa3gen.inspect.report import copied
from fa3gen.inspect.report.swizzles import CHUNK, Chunk
from fa3gen.spec.model import Copy

_BITS = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
# Eight rows at one place, and a row (128 bytes of it at most) side by side.
_COSTS = {
    "c1": (1, 1),
    "c1_64b": (1, 1),
    "c1_32b": (1, 1),
    "c1_none": (8, 1),
    "c2": (1, 1),
    "c1_packed": (1, 1),
    "c1_folded": (1, 1),
}


@cache
def _landed(stem: str) -> tuple[Copy, tuple[Chunk, ...]]:
    spec = rendering.named(stem).spec
    assert isinstance(spec, Copy)
    compiled = cached_compile(rendering.ROOT / f"generated/{stem}.py")
    return spec, copied.landed(spec, CpuKernel(compiled))


def _formula(spec: Copy, row: int, unit: int) -> int:
    """Boxes of the tile's rows one behind the other, in each of them rows, and CuTe's Swizzle<bits, 4, 3> of that."""
    width, rows = spec.box.extents[-1] * spec.element.bytes, math.prod(spec.box.extents[:-1])
    box, inside = divmod(unit * CHUNK, width)
    flat = box * rows * width + row * width + inside
    mask = (1 << _BITS[spec.box.swizzle]) - 1
    return flat ^ ((flat >> 7 & mask) << 4)


@pytest.mark.parametrize("stem", _COSTS)
def test_units_lie_where_the_formula_puts_them(stem: str) -> None:
    """Every unit of a tile is found, at the place that CuTe's swizzle gives it."""
    spec, chunks = _landed(stem)
    assert len(chunks) == math.prod(spec.box.extents[:-1]) * spec.problem.row * spec.element.bytes // CHUNK
    wrong = [chunk for chunk in chunks if chunk.address != _formula(spec, chunk.row, chunk.chunk)]
    assert not wrong, wrong[:4]


@pytest.mark.parametrize(("stem", "expected"), _COSTS.items())
def test_costs(stem: str, expected: tuple[int, int]) -> None:
    """A swizzle as wide as the rows of a box lets eight of them be touched at one place at once; none does not."""
    spec, chunks = _landed(stem)
    assert tuple(cost.transactions for cost in copied.costs(copied.repeated(spec, chunks))) == expected


def test_page(tmp_path: Path) -> None:
    """One file for each copy, with its name, its picture and its source."""
    report.report(["c1", "c1_none"], tmp_path)
    for stem, swizzle in (("c1", "Swizzle 128B"), ("c1_none", "No swizzle")):
        text = (tmp_path / f"{stem}.html").read_text(encoding="utf-8")
        assert f"<h1>{stem}</h1>" in text and swizzle in text and "Bank groups of a tile" in text
        assert "http://" not in text.replace("http://www.w3.org", "") and "<script" not in text
