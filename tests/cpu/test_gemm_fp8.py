"""Why FP8 sums have two levels: with the tensor core's own sums the error of one level grows with k."""

from __future__ import annotations

import pytest
import torch
from rendering import CHECKOUT

from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.module import load_on_cpu

ROUNDING = 2.0**-9  # of D to bfloat16, half an ulp relative to the number at most


def bias(stem: str, k: int) -> float:
    """Mean of D over the mean of the exact product, less 1: positive numbers, so that what is cut off adds up."""
    module = load_on_cpu(CHECKOUT.module_path(stem))
    module.cpu.settings = Settings(sums="tensor_core")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(48, k, generator=generator).abs().to(torch.float8_e4m3fn) for _ in range(2))
    exact = a.double() @ b.t().double()
    return ((module.matmul(a, b.t()).double() - exact).mean() / exact.mean()).item()


@pytest.mark.parametrize(("stem", "grows"), [("g3_fp8", True), ("g3_fp8_two_levels", False)])
def test_the_error_of_one_level_grows_with_k(stem: str, grows: bool) -> None:
    short, long = bias(stem, 128), bias(stem, 1024)
    assert abs(short) < ROUNDING
    assert (long < -4 * ROUNDING) == grows and (abs(long) < ROUNDING) != grows
