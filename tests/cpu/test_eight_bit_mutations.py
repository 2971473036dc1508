"""Mutated sums in two levels fail `fa3gen verify --on cpu`, in the case that is there for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosting import cases_of, mistaken, reported
from mutations_eight_bit import EIGHT_BIT, EVERY_FOURTH, MIXED, STRIPED, TWO_LEVELS
from mutations_packed import PackedMutation


@pytest.mark.parametrize("mutation", EIGHT_BIT, ids=lambda mutation: f"{mutation.stem}: {mutation.name}")
def test_mutation_is_reported(mutation: PackedMutation, tmp_path: Path) -> None:
    _, spec = mutation.base
    (case,) = cases_of(spec, mutation.case)
    failures = reported(mistaken(tmp_path, mutation.stem, mutation.apply()), spec, [case])
    assert any(report in failure for failure in failures for report in mutation.reports), failures


@pytest.mark.parametrize("stem", sorted({mutation.stem for mutation in EIGHT_BIT}))
def test_without_a_mutation_nothing_is_reported(stem: str, tmp_path: Path) -> None:
    """The small modules are no committed ones, which are verified elsewhere."""
    own = [mutation for mutation in EIGHT_BIT if mutation.stem == stem]
    text, spec = own[0].base
    names = {mutation.case for mutation in own}
    cases = cases_of(spec, *names)
    assert len(cases) == len(names) and reported(mistaken(tmp_path, stem, text), spec, cases) == ()


def test_there_are_mutations_of_every_module() -> None:
    """A promotion forgotten, its factor, its columns, and when it is made."""
    assert {mutation.stem for mutation in EIGHT_BIT} == {STRIPED, TWO_LEVELS, EVERY_FOURTH, MIXED}
    assert len({(mutation.stem, mutation.name) for mutation in EIGHT_BIT}) == len(EIGHT_BIT) >= 10
