"""The schedule of a quantisation: all warps, one tile of rows of a head; there is no ring and no loop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fa3gen.design.schedule.model import Role, Schedule, Step
from fa3gen.hardware import hopper
from fa3gen.spec.quantizing import Quantize

WARPS = "warps"


def schedule_of(spec: Quantize) -> Schedule:
    """The one role, and its steps; those of the kernel that looks for a head's scale are among them."""
    role = Role(WARPS, "all warps", spec.tile.threads // hopper.WARP, "quantise", "quantize_kernel")
    return Schedule((role,), (), (), tuple(_steps(spec)))


def _steps(spec: Quantize) -> Iterator[Step]:
    problem, step = spec.problem, partial(Step, WARPS, "tile")
    notes = {
        "head": "from the first kernel's maxima, while x is on its way; or as given",
        "block": "from the largest |x| of each warp, which they leave in shared memory",
        "token": "from the largest |x| of a row, by shuffles",
    }
    scale = step("find_scale", "descale", note=notes[problem.scale])
    yield step("load", "x", note="all rows of a thread, before one is used; 0 behind the last one")
    yield from [scale] * (problem.scale == "head")
    if problem.rotate:
        yield step(
            "rotate", "x", note="four bits of an element's number by mma, the others by butterflies in registers"
        )
    yield from [scale] * (problem.scale != "head")
    if problem.transpose:
        yield step("round", "x / descale", note="to 8 bits, four rows of a column to a word")
        yield step("gather", "the tile", note="in shared memory, by columns, without bank conflicts")
        yield step("sync", on="sync_threads")
        yield step("store", "columns", note="16 rows at a time")
    else:
        yield step("round", "x / descale", note="to 8 bits, and no further than 448")
        yield step("store", "rows", note="8 bytes at a time")
