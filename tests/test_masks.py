"""Masks in numbers, and windows that calls give."""

from __future__ import annotations

import pytest

from fa3gen.design.family import Family, Shape, mask_label, mask_text
from fa3gen.design.masks import computes, of_call, options_for, options_of_call, reach, visible_pairs
from fa3gen.spec.model import CausalMask, NoMask, WindowMask

ANY, FAR = WindowMask(), 2**30


@pytest.mark.parametrize(
    ("window", "left", "right"),
    [((3, 4), 3, 4), ((0, 0), 0, 0), ((-1, 0), FAR, 0), ((2, -1), 2, FAR), ((2**31, 1), FAR, 1), (None, 512, 0)],
)
def test_the_mask_of_a_call(window: tuple[int, int] | None, left: int, right: int) -> None:
    assert reach(of_call(ANY, window)) == (left, right)


def test_other_masks_are_those_of_every_call() -> None:
    for mask in (NoMask(), CausalMask(), WindowMask(left=1, right=2)):
        assert of_call(mask, (7, 7)) == mask and options_of_call(mask, (7, 7)) == {}


def test_a_window_that_is_not_known_has_no_reach() -> None:
    with pytest.raises(ValueError, match="ask masks.of_call first"):
        reach(ANY)


def test_what_a_call_says() -> None:
    assert options_of_call(ANY, (0, 0)) == {"window": (0, 0)} and options_of_call(ANY) == {"window": (512, 0)}
    assert computes(ANY, WindowMask(left=3, right=4)) and not computes(ANY, CausalMask())
    assert options_for(ANY, WindowMask(left=3, right=4)) == {"window": (3, 4)}
    assert options_for(CausalMask(), CausalMask()) == {}


def test_pairs_of_a_call() -> None:
    """Of 4 queries on 6 keys, (1, 0) shows two keys to each: diagonals are keys 2 to 5."""
    assert visible_pairs(of_call(ANY, (1, 0)), seq_q=4, seq_k=6) == 8
    family = Family("bf16", 64, 64, ANY)
    assert family.flops(Shape(1, 4, 6, 2, 2, window=(1, 0))) == 2 * 2 * 8 * 128
    assert family.of_call((1, 0)).flops(Shape(1, 4, 6, 2, 2)) == 2 * 2 * 8 * 128


def test_names() -> None:
    assert (mask_text(ANY), mask_label(ANY)) == ("any window", "any_window")
    assert mask_text(WindowMask(left=FAR, right=5)) == "window (all, 5)"
