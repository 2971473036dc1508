"""Every generated module, executed on the CPU model of sm_90a: its numbers, and no hazard under several schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rendering import CHECKOUT, STEMS, variants

from fa3gen.cpu.module import load_on_cpu
from fa3gen.cpu.schedule import TELLING
from fa3gen.spec.model import Combine, Copy, Forward, Gemm, Quantize, Spec, SyncLoad
from fa3gen.verify import combine_inputs, copies, packed_inputs, paged_inputs, quantize_inputs
from fa3gen.verify.combine_inputs import CombineCase
from fa3gen.verify.copies import CopyCase
from fa3gen.verify.gemm_inputs import GemmCase
from fa3gen.verify.inputs import Case
from fa3gen.verify.on_cpu import verify_on_cpu
from fa3gen.verify.quantize_inputs import QuantizeCase

torch.set_num_threads(1)  # the workers of xdist share the cores


@pytest.fixture(scope="module", params=STEMS)
def stem(request: pytest.FixtureRequest) -> str:
    """One module after the other: pytest runs both tests of one before those of the next, on one translation of it."""
    return str(request.param)


@pytest.fixture(scope="module")
def module(stem: str) -> Any:
    """The committed module, on the CPU."""
    return load_on_cpu(CHECKOUT.module_path(stem))


def test_there_is_a_spec_for_every_committed_module_and_a_module_for_every_spec() -> None:
    assert sorted(variants()) == STEMS


def test_module_on_the_cpu_model(stem: str, module: Any) -> None:
    report = verify_on_cpu(module, variants()[stem].spec, stem=stem, count=1)
    assert report.failures == (), f"seed {report.seed}"
    spec = variants()[stem].spec
    kind = "packed" if isinstance(spec, Forward) and spec.problem.layout != "dense" else spec.operation
    cases = {"forward": 11, "packed": 10, "gemm": 7, "copy": 4, "combine": 10, "quantize": 7}
    assert len(report.cases) >= cases[kind] and report.passed


def one_cta(spec: Spec) -> Case | GemmCase | CopyCase | CombineCase | QuantizeCase:
    """Few rows, and keys, or a sum, for one step more than the ring has stages: the first stage is used again."""
    if isinstance(spec, Copy):
        return next(case for case in copies.cpu_cases(spec) if case.name == "wrap")
    if isinstance(spec, Combine):
        return next(case for case in combine_inputs.cpu_cases(spec) if case.name == "no_keys")
    if isinstance(spec, Quantize):
        return next(case for case in quantize_inputs.cpu_cases(spec) if case.name == "short")
    if isinstance(spec, Gemm):
        return GemmCase("one_cta", "", 3, 5, spec.load.stages * spec.tile.k + 5)
    stages = 1 if isinstance(spec.load, SyncLoad) else spec.load.kv_stages
    if spec.problem.layout != "dense":  # and a second sequence, whose tile is drawn or another CTA's
        case = packed_inputs.sequences("one_cta", "", (3, 1), (stages * spec.tile.kv + 5, 7))
        return case if spec.problem.layout == "packed" else next(paged_inputs.in_pages([case], spec))
    return Case("one_cta", "", 1, 3, stages * spec.tile.kv + 5, 1, 1)


def test_schedules(stem: str, module: Any) -> None:
    spec = variants()[stem].spec
    # Calls beside the cases are made under the first schedule, by test_module_on_the_cpu_model. It also judges the mean
    # squared error of all cases together: over the few rows here that wanders (by 0.12, one standard deviation, at head
    # dim 256, where the limit is 0.25 away).
    report = verify_on_cpu(module, spec, stem=stem, cases=[one_cta(spec)], count=TELLING, calls=False)
    assert [case.failures for case in report.cases] == [()], f"seed {report.seed}"
    assert len(set(report.schedules)) == TELLING
