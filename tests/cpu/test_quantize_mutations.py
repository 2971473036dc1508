"""Mutated quantisations are reported by the model, by a right name; unmodified and harmless ones are not."""

from __future__ import annotations

import hosting
import pytest
import torch
from mutations import Mutation, Report, assert_reported, first_report
from mutations_quantize import QUANTIZE
from rendering import variants

from fa3gen.spec.model import Quantize
from fa3gen.verify import quantize_inputs
from fa3gen.verify.inputs import poison
from fa3gen.verify.on_model import CPU
from fa3gen.verify.quantize_inputs import QuantizeCase
from fa3gen.verify.quantize_on_gpu import Quantized, compare, expected, wrote_outside

# Of 133 rows a second tile has 5. Two heads share a scale, which two CTAs look for in two tiles each.
CASE, PARTS = QuantizeCase("mutations", "", 2, 133, 4, 2, layout="contiguous"), 2
# The largest elements: of the first sequence in the last tile, of the second one in the upper half of the fifth warp.
LARGEST = {(0, 130, 1, 3): -600.0, (1, 74, 0, 44): 600.0}


def judge(stem: str, ptx: str) -> tuple[Report | None, str]:
    """The first report under any of the schedules."""
    spec = variants()[stem].spec
    assert isinstance(spec, Quantize)
    made = quantize_inputs.make(spec, CASE, device=CPU, seed=1)
    if spec.problem.scale != "head":
        made.named.clear()
    x = made.given["x"]
    x[:, :, 2:] = 0
    for place, value in LARGEST.items():
        x[place] = value
    wanted = expected(spec, made)
    descale = torch.empty(wanted.descale.shape)
    partial = [torch.empty((*wanted.descale.shape, PARTS))] * (spec.problem.scale == "head")

    def refill() -> None:
        poison(made.out_storage)
        for tensor in (descale, *partial):
            poison(tensor)

    def wrong() -> tuple[str, ...]:
        return *compare(spec, Quantized(made.out, descale), wanted).wrong, *wrote_outside(made)

    return first_report(
        stem, ptx, [*made.given.values(), made.out, descale, *partial], refill=refill, wrong=wrong, seed=1
    )


@pytest.mark.parametrize("stem", sorted({mutation.stem for mutation in QUANTIZE}))
def test_unmodified_kernel_is_not_reported(stem: str) -> None:
    assert judge(stem, hosting.compiled(stem).ptx) == (None, "")


@pytest.mark.parametrize("mutation", QUANTIZE, ids=lambda mutation: f"{mutation.fact}: {mutation.name}")
def test_mutation_is_reported(mutation: Mutation) -> None:
    assert_reported(mutation, judge)


def test_there_are_mutations_of_every_kind() -> None:
    """Maxima, scales, edges, barriers, butterflies, places in shared memory."""
    assert len(QUANTIZE) >= 22
    assert len({(mutation.stem, mutation.name) for mutation in QUANTIZE}) == len(QUANTIZE)
