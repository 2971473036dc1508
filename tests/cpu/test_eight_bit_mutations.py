"""Mutated sums in two levels fail `fa3gen verify --on cpu`, in the case that is there for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosting import mistaken
from mutations_eight_bit import EIGHT_BIT, EVERY_FOURTH, MIXED, STRIPED, TWO_LEVELS
from mutations_packed import PackedMutation

from fa3gen.verify import inputs
from fa3gen.verify.attention_on_cpu import CpuRunner


@pytest.mark.parametrize("mutation", EIGHT_BIT, ids=lambda mutation: f"{mutation.stem}: {mutation.name}")
def test_mutation_is_reported(mutation: PackedMutation, tmp_path: Path) -> None:
    _, spec = mutation.base
    (case,) = (case for case in inputs.cpu_cases(spec) if case.name == mutation.case)
    module = mistaken(tmp_path, mutation.stem, mutation.apply())
    failures = CpuRunner(module, spec, seed=1, count=1).run_case(case).failures
    assert any(report in failure for failure in failures for report in mutation.reports), failures


def test_there_are_mutations_of_every_module() -> None:
    """A promotion forgotten, its factor, its columns, and when it is made."""
    assert {mutation.stem for mutation in EIGHT_BIT} == {STRIPED, TWO_LEVELS, EVERY_FOURTH, MIXED}
    assert len({(mutation.stem, mutation.name) for mutation in EIGHT_BIT}) == len(EIGHT_BIT) >= 10
