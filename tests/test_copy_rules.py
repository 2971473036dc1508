"""Rules about copies: the exact message on hand-derived numbers, and silence right beside the limit."""

from __future__ import annotations

from typing import Any

import pytest

from fa3gen.design import rules
from fa3gen.design.rules import Violation, copies
from fa3gen.spec.model import Copy

BASE: dict[str, Any] = {
    "operation": "copy",
    "problem": {"row": 256},
    "box": {"extents": [8, 64], "swizzle": "128B"},
}


def violations(box: dict[str, Any] | None = None, problem: dict[str, Any] | None = None, **ring: int) -> dict[str, str]:
    """Field -> message of what `check` finds."""
    fields = {**BASE, "box": {**BASE["box"], **(box or {})}, "problem": {**BASE["problem"], **(problem or {})}}
    found = rules.check(Copy.model_validate({**fields, **({"ring": ring} if ring else {})}))
    assert len({violation.field for violation in found}) == len(found), found
    return {violation.field: violation.message for violation in found}


def test_the_usual_specs_are_legal() -> None:
    assert violations() == violations(stages=4, reading=1, ctas_per_sm=3) == {}
    assert violations({"wide": "folded"}) == violations(problem={"layout": "packed"}) == {}


def test_box_extents() -> None:
    assert copies.box_extents((256, 64)) is None
    assert copies.box_extents((257, 64)) == Violation(
        "box.extents", "a box of 257 x 64 has 257 > 256 elements along a dimension; use at most 256"
    )
    assert list(violations({"extents": [300, 64]})) == ["box.extents"]


def test_box_row() -> None:
    assert copies.box_row(8, 2) is None
    assert copies.box_row(12, 2) == Violation(
        "box.extents",
        "a row of the box is 12 x 2 = 24, no multiple of 16 (24 = 1 x 16 + 8); use 8 or 16 elements",
    )
    assert list(violations({"extents": [32, 12], "swizzle": "none"})) == ["box.extents"]


def test_box_span() -> None:
    assert copies.box_span(64, 2, "128B") is None and copies.box_span(256, 2, "none") is None
    assert copies.box_span(40, 2, "64B") == Violation(
        "box.extents",
        "a row of the box is 40 x 2 = 80 bytes > 64, the span of swizzle 64B; use 32 elements, and as many boxes as a "
        "row needs, or swizzle none",
    )
    assert list(violations({"extents": [8, 128]})) == ["box.extents"]


def test_box_fills_span() -> None:
    assert copies.box_fills_span(32, 2, "64B") is None and copies.box_fills_span(8, 2, "none") is None
    assert copies.box_fills_span(32, 2, "128B") == Violation(
        "box.extents",
        "a row of the box is 32 x 2 = 64 bytes, less than the 128 of a span of swizzle 128B; use 64 elements or "
        "swizzle 64B",
    )
    found = copies.box_fills_span(24, 2, "64B")
    assert found is not None and found.message.endswith("use 32 elements or swizzle none")
    assert list(violations({"extents": [8, 32]})) == ["box.extents"]


def test_box_start() -> None:
    assert copies.box_start((4, 16), 2) is None
    assert copies.box_start((3, 8), 2) == Violation(
        "box.extents",
        "boxes lie one behind the other at multiples of 128 bytes, and one is 3 x 8 x 2 = 48, no multiple of 128 "
        "(48 = 0 x 128 + 48); use more rows",
    )
    assert list(violations({"extents": [3, 8], "swizzle": "none"})) == ["box.extents"]


def test_map_rank() -> None:
    assert copies.map_rank(5, False, False) is None and copies.map_rank(2, True, True) is None
    assert copies.map_rank(5, True, False) == Violation(
        "box.wide", "a tensor map would have 5 dimensions + 1 of folded rows = 6 > 5; use wide: copies"
    )
    assert copies.map_rank(4, True, True) == Violation(
        "box.extents",
        "a tensor map would have 4 dimensions + 1 of folded rows + 2 of packed rows = 7 > 5; use at most 3",
    )
    assert list(violations({"extents": [1, 2, 2, 2, 64], "wide": "folded"})) == ["box.wide"]


def test_row_strides() -> None:
    assert copies.row_strides(104, 2) is None
    assert copies.row_strides(100, 2) == Violation(
        "problem.row",
        "TMA needs strides of whole 16 bytes, and a row is 100 x 2 = 200, no multiple of 16 (200 = 12 x 16 + 8); use "
        "96 or 104",
    )
    assert list(violations(problem={"row": 100})) == ["problem.row"]


def test_folded_row() -> None:
    assert copies.folded_row(256, 64) is None and copies.folded_row(256 * 64, 64) is None
    assert copies.folded_row(200, 64) == Violation(
        "box.wide",
        "a row of 200, no multiple of 64 (200 = 3 x 64 + 8), cannot be folded into rows of the box; use wide: copies, "
        "or a row of 192 or 256",
    )
    assert copies.folded_row(257 * 64, 64) == Violation(
        "box.wide", "a folded row has 16448 / 64 = 257 parts > 256 of a box; use wide: copies"
    )
    assert list(violations({"wide": "folded"}, {"row": 200})) == ["box.wide"]


def test_folded_parts() -> None:
    assert copies.folded_parts(128, 64) is None
    assert copies.folded_parts(64, 64) == Violation(
        "box.wide", "a row of 64 fits in a row of the box, 64, and needs no folding; use copies"
    )
    assert list(violations({"wide": "folded"}, {"row": 64})) == ["box.wide"]


def test_packed_dimensions() -> None:
    assert copies.packed_dimensions("packed", 2) is None and copies.packed_dimensions("dense", 5) is None
    assert copies.packed_dimensions("packed", 3) == Violation(
        "problem.layout", "packed rows have two dimensions, (total, row), and the box has 3; use dense"
    )
    assert list(violations({"extents": [2, 4, 64]}, {"layout": "packed"})) == ["problem.layout"]


def test_ring_reading() -> None:
    assert copies.ring_reading(2, 1) is None
    assert copies.ring_reading(2, 2) == Violation(
        "ring.reading", "with 2 of 2 stages still being read no load would have a place; use at most 1"
    )
    assert list(violations(stages=2, reading=2)) == ["ring.reading"]


def test_tiles_fit_in_shared_memory() -> None:
    """64 rows of 256 elements are 32 KB: 7 stages fit, or with two CTAs on an SM 3 each."""
    wide = {"extents": [64, 64]}
    assert violations(wide, stages=7) == violations(wide, stages=3, ctas_per_sm=2) == {}
    assert violations(wide, stages=8) == {
        "ring.stages": "shared memory: sX (8 stages x 4 x 64 x 64 x 2) 262144 = 262144, + 64 of barriers + 960 of "
        "alignment = 263168 > 232448 bytes; use at most 7 stages"
    }
    assert violations(wide, stages=4, ctas_per_sm=2) == {
        "ring.ctas_per_sm": "shared memory of 2 CTAs: 2 x (132096 + 1024) = 266240 > 233472 bytes of an SM; use fewer "
        "CTAs or a smaller ring or box"
    }
    assert list(violations({"extents": [256, 64]}, {"row": 512})) == ["box.extents"]
    [message] = violations({"extents": [256, 64]}, {"row": 512}, stages=2).values()
    assert message.endswith("use a smaller box")


@pytest.mark.parametrize(
    ("box", "problem"),
    [({"extents": [7, 24], "swizzle": "64B"}, {"row": 100}), ({"extents": [300, 128], "wide": "folded"}, {"row": 200})],
)
def test_all_violations_are_reported_at_once(box: dict[str, Any], problem: dict[str, Any]) -> None:
    fields = {**BASE, "box": {**BASE["box"], **box}, "problem": problem}
    assert len({violation.field for violation in rules.check(Copy.model_validate(fields))}) >= 2
