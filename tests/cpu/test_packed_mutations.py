"""Mutated kernels for packed sequences and pages fail `fa3gen verify --on cpu`, in the case that is there for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hosting import cases_of, mistaken, reported
from mutations import Moved
from mutations_packed import PACKED, STEM, PackedMutation
from mutations_paged import BOXES, PAGED, ROWS


@pytest.mark.parametrize("mutation", [*PACKED, *PAGED], ids=lambda mutation: mutation.name)
def test_mutation_is_reported(mutation: PackedMutation, tmp_path: Path) -> None:
    _, spec = mutation.base
    (case,) = cases_of(spec, mutation.case)
    failures = reported(mistaken(tmp_path, mutation.stem, mutation.apply()), spec, [case])
    assert any(report in failure for failure in failures for report in mutation.reports), failures


@pytest.mark.parametrize("stem", sorted({mutation.stem for mutation in (*PACKED, *PAGED)}))
def test_without_a_mutation_nothing_is_reported(stem: str, tmp_path: Path) -> None:
    """Of small modules; committed ones are verified elsewhere."""
    own = [mutation for mutation in (*PACKED, *PAGED) if mutation.stem == stem and mutation.head_dim is not None]
    text, spec = own[0].base
    names = {mutation.case for mutation in own}
    cases = cases_of(spec, *names)
    assert len(cases) == len(names) and reported(mistaken(tmp_path, stem, text), spec, cases) == ()


def test_there_are_mutations_of_every_kind() -> None:
    """Ends of O, V and LSE; groups, lengths and begins of sequences; the mask; the counter; sinks and the cap."""
    assert len(PACKED) >= 8 and len({mutation.name for mutation in PACKED}) == len(PACKED)
    assert {mutation.case for mutation in PACKED} >= {"ragged", "few_keys", "many", "used"}
    assert {mutation.stem for mutation in PAGED} == {BOXES, ROWS} and len({each.name for each in PAGED}) == len(PAGED)


def test_a_mutation_of_a_module_that_has_changed_says_so() -> None:
    with pytest.raises(Moved, match=f"`no such line` occurs 0 times in {STEM}.py"):
        replace(PACKED[0], old="no such line").apply()
