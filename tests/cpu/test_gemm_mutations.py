"""Mutated GEMM kernels are reported by the model, by a right name; unmodified and harmless ones are not."""

from __future__ import annotations

import functools

import hosting
import pytest
from mutations import Mutation, Report, assert_reported, first_report
from mutations_gemm import GEMM
from rendering import variants

from fa3gen.spec.model import Gemm
from fa3gen.verify import gemm_inputs
from fa3gen.verify.gemm_inputs import GemmCase
from fa3gen.verify.gemm_on_gpu import compare, expected
from fa3gen.verify.on_model import CPU

STEMS = sorted({mutation.stem for mutation in GEMM})


def spec_of(stem: str) -> Gemm:
    spec = variants()[stem].spec
    assert isinstance(spec, Gemm)
    return spec


def judge(stem: str, ptx: str) -> tuple[Report | None, str]:
    """The first report under any of the schedules, for two tiles of more steps than the ring has stages, on one SM."""
    spec = spec_of(stem)
    tile = spec.tile
    case = GemmCase("mutations", "", tile.m + 5, 9, (spec.load.stages + 2) * tile.k + 3)
    made = gemm_inputs.make(spec, case, device=CPU, seed=1)
    arguments = [*made.given.values(), made.out, *[1] * (spec.schedule.kind == "warp_specialized")]
    refill = functools.partial(made.out_storage.fill_, float("nan"))
    wanted = expected(spec, made)
    return first_report(stem, ptx, arguments, refill=refill, wrong=lambda: compare(made.out, wanted)[1], seed=8)


@pytest.mark.parametrize("stem", STEMS)
def test_unmodified_kernel_is_not_reported(stem: str) -> None:
    assert judge(stem, hosting.compiled(stem).ptx) == (None, "")


@pytest.mark.parametrize("mutation", GEMM, ids=lambda mutation: f"{mutation.stem}: {mutation.name}")
def test_mutation_is_reported(mutation: Mutation) -> None:
    assert_reported(mutation, judge)


def test_there_are_mutations_of_every_kind() -> None:
    """Byte counts, phases, a stage released early, a fence dropped: of each kernel what it has."""
    assert STEMS == ["g1", "g2", "g3", "g3_fp8", "g3_fp8_two_levels", "g3_registers"]
    assert len(GEMM) >= 38 and len({(mutation.stem, mutation.name) for mutation in GEMM}) == len(GEMM)
