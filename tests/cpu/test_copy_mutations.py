"""Mutated copies are reported by the model, by a right name; unmodified and harmless ones are not."""

from __future__ import annotations

import functools

import hosting
import pytest
from mutations import Mutation, Report, assert_reported, first_report
from mutations_copies import COPIES
from rendering import variants

from fa3gen.design import boxes
from fa3gen.spec.model import Copy
from fa3gen.verify import copies
from fa3gen.verify.copies import CANARY, CopyCase
from fa3gen.verify.copies_on_gpu import difference
from fa3gen.verify.on_model import CPU

STEMS = sorted({mutation.stem for mutation in COPIES})


def spec_of(stem: str) -> Copy:
    spec = variants()[stem].spec
    assert isinstance(spec, Copy)
    return spec


def case_of(spec: Copy) -> CopyCase:
    """Several tiles, the last one cut; with a ring, so many that each CTA of one SM uses its stages again."""
    rows = spec.box.extents[0]
    if boxes.packed(spec):
        return copies.sequences("mutations", "", (2 * rows + 3, rows - 1, 1), first=3, unused=rows)
    tiles = 3 if spec.ring is None else (spec.ring.stages + 3) * spec.ring.ctas_per_sm
    return CopyCase("mutations", "", (tiles * rows + 1,))


def judge(stem: str, ptx: str) -> tuple[Report | None, str]:
    """The first report under any of the schedules, on one SM."""
    spec = spec_of(stem)
    made = copies.make(spec, case_of(spec), device=CPU, seed=1)
    arguments = [*made.given.values(), made.out, *[1] * (spec.ring is not None)]
    refill, wrong = functools.partial(made.out_storage.fill_, CANARY), functools.partial(difference, made)
    return first_report(stem, ptx, arguments, refill=refill, wrong=wrong, seed=1)


@pytest.mark.parametrize("stem", STEMS)
def test_unmodified_kernel_is_not_reported(stem: str) -> None:
    assert judge(stem, hosting.compiled(stem).ptx) == (None, "")


@pytest.mark.parametrize("mutation", COPIES, ids=lambda mutation: f"{mutation.stem}: {mutation.name}")
def test_mutation_is_reported(mutation: Mutation) -> None:
    assert_reported(mutation, judge)


def test_there_are_mutations_of_every_kind() -> None:
    """Byte counts, phases, a stage released early, a fence dropped, a tile that is not cut."""
    assert STEMS == ["c1_folded", "c1_packed", "c2"]
    assert len(COPIES) >= 20 and len({(mutation.stem, mutation.name) for mutation in COPIES}) == len(COPIES)
