"""Why sums of P V have two levels: with the tensor core's own sums the error of one level grows with the keys."""

from __future__ import annotations

import functools

import pytest
import torch
from rendering import CHECKOUT, variants

from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.module import load_on_cpu
from fa3gen.spec.model import Forward
from fa3gen.verify import reference

KEYS = 2048


@functools.cache
def bias(stem: str) -> float:
    """Mean of O over that of attention, less 1: of values that are positive, so that what is cut off adds up."""
    module, spec = load_on_cpu(CHECKOUT.module_path(stem)), variants()[stem].spec
    assert isinstance(spec, Forward)
    module.cpu.settings = Settings(sums="tensor_core")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, seq, 1, spec.problem.head_dim, generator=generator) for seq in (8, KEYS, KEYS))
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (q / 4, k, v.abs() + 1))
    wanted = reference.attention(q.double(), k.double(), v.double(), reach=(None, None)).out
    return ((module.attention(q, k, v).double() - wanted).mean() / wanted.mean()).item()


@pytest.mark.parametrize(
    ("one", "several"),
    [("fwd_fp8_d256", ["fwd_fp8_d256_two_levels"]), ("k7_d128", ["k7_promote_4_d128", "k7_two_levels_d128"])],
)
def test_what_is_cut_off_is_less_the_fewer_tiles_the_tensor_core_sums(one: str, several: list[str]) -> None:
    biases = [abs(bias(stem)) for stem in (one, *several)]
    assert biases == sorted(biases, reverse=True) and biases[-1] < biases[0] / 4, biases
