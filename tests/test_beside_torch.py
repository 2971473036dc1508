"""Modules of other operations than attention beside torch: turns, ratios of one round, and what a record keeps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fa3gen.design.workspace import Workspace
from fa3gen.measure import beside_torch
from fa3gen.measure.beside_torch import ROUNDS, speeds
from fa3gen.records.evidence import Speed

VARIANTS = {variant.stem: variant for file in Workspace.find().load_all() for variant in file.variants}
CPU = torch.device("cpu")


class Clock:
    """Says how long a call takes, by the number of who was made ready to be timed."""

    def __init__(self, milliseconds: Callable[[int], float]) -> None:
        self.milliseconds, self.ready = milliseconds, 0

    def once(self, launch: Callable[[], Any]) -> float:
        return 1.0

    def burst(self, launch: Callable[[], Any], count: int) -> tuple[Callable[[], float], bool]:
        assert count == beside_torch.BURST_MS
        number, self.ready = self.ready, self.ready + 1

        def run() -> float:
            launch()
            return self.milliseconds(number)

        return run, True


def module(calls: list[tuple[torch.Tensor, ...]], entry: str = "matmul") -> Any:
    def called(*tensors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        calls.append((*tensors, out))
        return out

    return SimpleNamespace(**{entry: called})


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_torch, "CUBES", (16, 24))


def test_a_speed_is_work_over_time_and_its_share_of_torch_that_of_one_round() -> None:
    """Two modules and torch, which is twice as fast as the first and half as fast as the second."""
    calls: list[tuple[torch.Tensor, ...]] = []
    found = speeds(
        {stem: (VARIANTS["g3"].spec, module(calls)) for stem in ("one", "other")},
        CPU,
        Clock(lambda number: (2.0, 0.5, 1.0)[number % 3]),
    )
    assert found["one"]["16 x 16 x 16"] == Speed(rate=2 * 16**3 / 1e12 / 2e-3, unit="TFLOP/s", of_torch=0.5)
    assert found["other"]["24 x 24 x 24"] == Speed(rate=2 * 24**3 / 1e12 / 0.5e-3, unit="TFLOP/s", of_torch=2.0)
    assert len(calls) == 2 * 2 * (1 + ROUNDS)  # modules, problems, and once before the rounds


def test_what_torch_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*tensors: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(torch, "mm", refuse)
    found = speeds({"g3": (VARIANTS["g3"].spec, module([]))}, CPU, Clock(lambda number: 1.0))
    assert [speed.of_torch for speed in found["g3"].values()] == [None, None]


def test_of_8_bits_torch_sums_in_as_many_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both modules and both calls of torch take turns; a share is that of the call with as many levels."""
    given: list[tuple[bool, torch.dtype]] = []

    def scaled(a: Any, b: Any, *scales: torch.Tensor, out_dtype: torch.dtype, use_fast_accum: bool) -> None:
        assert [scale.item() for scale in scales] == [1, 1] and a.dtype == b.dtype == torch.float8_e4m3fn
        given.append((use_fast_accum, out_dtype))

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    stems = ("g3_fp8", "g3_fp8_two_levels")
    # Of the modules, then of torch's calls, in the same order.
    clock = Clock(lambda number: (3.0, 5.0, 6.0, 20.0)[number % 4])
    found = speeds({stem: (VARIANTS[stem].spec, module([])) for stem in stems}, CPU, clock)
    assert [found[stem]["16 x 16 x 16"].of_torch for stem in stems] == [2.0, 4.0]
    assert set(given) == {(True, torch.bfloat16), (False, torch.bfloat16)} and clock.ready == 2 * 4


@pytest.mark.parametrize("stem", [stem for stem, variant in VARIANTS.items() if variant.spec.operation == "gemm"])
def test_tensors_lie_as_the_module_wants_them(stem: str) -> None:
    calls: list[tuple[torch.Tensor, ...]] = []
    spec = VARIANTS[stem].spec
    speeds({stem: (spec, module(calls))}, CPU, Clock(lambda number: 1.0))
    *given, out = calls[0]
    assert out.dtype == spec.d_element.in_torch() and len(given) == 2 + spec.d.add_c
    majors = [tensor.stride(1) == 1 for tensor in given[:2]]  # rows are contiguous
    a_major, b_major = ("k", "mn") if spec.product.engine == "scalar" else (spec.product.a.major, spec.product.b.major)
    assert majors == [a_major == "k", b_major == "mn"]
