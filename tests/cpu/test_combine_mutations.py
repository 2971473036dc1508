"""Mutated merges are reported by the model, by a right name; unmodified and harmless ones are not."""

from __future__ import annotations

import hosting
import pytest
import torch
from mutations import Mutation, Report, assert_reported, first_report
from mutations_combine import COMBINE
from rendering import variants

from fa3gen.spec.model import Combine
from fa3gen.verify import combine_inputs
from fa3gen.verify.combine_inputs import CombineCase
from fa3gen.verify.combine_on_gpu import compare, expected, wrote_outside
from fa3gen.verify.inputs import poison
from fa3gen.verify.on_model import CPU
from fa3gen.verify.reference import Attention

# 11 parts in 4 shares: two steps of 2 for each; 18 rows of 8 places, of which a CTA has 64.
CASE, SHARES = CombineCase("mutations", "", 11, 2, 3, 3, 64, without=5, rows_without=5), 4


def judge(stem: str, ptx: str) -> tuple[Report | None, str]:
    """The first report under any of the schedules."""
    spec = variants()[stem].spec
    assert isinstance(spec, Combine)
    made = combine_inputs.make(spec, CASE, device=CPU, seed=1)
    lse = torch.empty(made.out.shape[:-1])
    wanted = expected(spec, made)

    def refill() -> None:
        poison(made.out_storage)
        poison(lse)

    def wrong() -> tuple[str, ...]:
        return *compare(Attention(made.out, lse), wanted)[1], *wrote_outside(made)

    return first_report(stem, ptx, [*made.given.values(), made.out, lse, SHARES], refill=refill, wrong=wrong, seed=1)


def test_unmodified_kernel_is_not_reported() -> None:
    assert judge("combine_fp32", hosting.compiled("combine_fp32").ptx) == (None, "")


@pytest.mark.parametrize("mutation", COMBINE, ids=lambda mutation: mutation.name)
def test_mutation_is_reported(mutation: Mutation) -> None:
    assert_reported(mutation, judge)


def test_there_are_mutations_of_every_kind() -> None:
    """Guards, weights, parts and shares left out, the barrier, ends."""
    assert len(COMBINE) >= 14 and len({mutation.name for mutation in COMBINE}) == len(COMBINE)
