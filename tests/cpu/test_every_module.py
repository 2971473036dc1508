"""Every generated module, executed on the CPU model of sm_90a: its numbers, and no hazard under ten schedules."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from rendering import CHECKOUT, STEMS, variants

from fa3gen.cpu.module import load_on_cpu
from fa3gen.cpu.verify import verify_on_cpu
from fa3gen.inputs import Case
from fa3gen.spec import Spec, SyncLoad

torch.set_num_threads(1)  # the workers of xdist share the cores
SCHEDULES = 10


@cache
def module(stem: str) -> Any:
    """The committed module, on the CPU."""
    return load_on_cpu(CHECKOUT.module_path(stem))


def test_there_is_a_spec_for_every_committed_module_and_a_module_for_every_spec() -> None:
    assert sorted(variants()) == STEMS


@pytest.mark.parametrize("stem", STEMS)
def test_module_on_the_cpu_model(stem: str) -> None:
    report = verify_on_cpu(module(stem), variants()[stem].spec, stem=stem, count=1)
    assert report.failures == (), f"seed {report.seed}"
    assert len(report.cases) >= 11 and report.passed


def one_cta(spec: Spec) -> Case:
    """Few rows, and keys for one step more than the ring has stages: the first stage is used again."""
    stages = 1 if isinstance(spec.load, SyncLoad) else spec.load.kv_stages
    return Case("one_cta", "", 1, 3, stages * spec.tile.kv + 5, 1, 1)


@pytest.mark.parametrize("stem", STEMS)
def test_schedules(stem: str) -> None:
    spec = variants()[stem].spec
    report = verify_on_cpu(module(stem), spec, stem=stem, cases=[one_cta(spec)], count=SCHEDULES)
    assert report.failures == (), f"seed {report.seed}"
    assert len(set(report.schedules)) == SCHEDULES
