"""Mutated sums in two levels fail `fa3gen verify --on cpu`, in the case that is there for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosting import mistaken
from mutations_eight_bit import EIGHT_BIT, EVERY_FOURTH, MIXED, STRIPED, TWO_LEVELS
from mutations_packed import PackedMutation

from fa3gen.spec.model import Forward
from fa3gen.verify import inputs
from fa3gen.verify.attention_on_cpu import CpuRunner


@pytest.mark.parametrize("mutation", EIGHT_BIT, ids=lambda mutation: f"{mutation.stem}: {mutation.name}")
def test_mutation_is_reported(mutation: PackedMutation, tmp_path: Path) -> None:
    _, spec = mutation.base
    failures = said_of(mutation.apply(), spec, mutation.case, tmp_path)
    assert any(report in failure for failure in failures for report in mutation.reports), failures


def said_of(source: str, spec: Forward, name: str, folder: Path) -> tuple[str, ...]:
    """What goes wrong in the case of this name."""
    (case,) = (case for case in inputs.cpu_cases(spec) if case.name == name)
    return CpuRunner(mistaken(folder, "mutated", source), spec, seed=1, count=1).run_case(case).failures


@pytest.mark.parametrize("stem", sorted({mutation.stem for mutation in EIGHT_BIT}))
def test_without_a_mutation_nothing_is_reported(stem: str, tmp_path: Path) -> None:
    """The small modules are no committed ones, which are verified elsewhere."""
    own = [mutation for mutation in EIGHT_BIT if mutation.stem == stem]
    assert own
    for name in dict.fromkeys(mutation.case for mutation in own):
        assert said_of(*own[0].base, name, tmp_path) == ()


def test_there_are_mutations_of_every_module() -> None:
    """A promotion forgotten, its factor, its columns, and when it is made."""
    assert {mutation.stem for mutation in EIGHT_BIT} == {STRIPED, TWO_LEVELS, EVERY_FOURTH, MIXED}
    assert len({(mutation.stem, mutation.name) for mutation in EIGHT_BIT}) == len(EIGHT_BIT) >= 10
