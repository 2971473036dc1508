"""The last wave of tiles in equal shares, on the CPU model: who gives parts to whom, and what comes of them."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hosting import module, outputs
from rendering import attention_stems, plans

from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.schedule import FAST, Schedule, schedules
from fa3gen.design.masks import reach
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.spec.model import NoMask
from fa3gen.verify import inputs, reference

STEMS = sorted(
    stem
    for stem in attention_stems()
    if plans()[stem].scheduler.kind == "stream_k" and not plans()[stem].scheduler.packed_shares
)
STEM = "fwd_d64"  # the smallest


class Wave(NamedTuple):
    """Tiles of queries, steps of each, SMs; and the CTAs that leave a part to the next one."""

    tiles: int
    steps: int
    sms: int
    givers: set[int]


WAVES = {
    # 40 steps for 5 CTAs, 8 each: a chain.
    "one tile": Wave(1, 40, 5, {0, 1, 2, 3}),
    # At most 8 parts, of 5 steps.
    "more SMs than parts": Wave(1, 40, 132, {0, 1, 2, 3, 4, 5, 6}),
    # Steps 0 to 7, 8 to 15, 16 to 23: the second CTA ends one tile and begins the other.
    "two tiles": Wave(2, 12, 3, {0, 1}),
    # Three whole tiles; 12 steps for 3 CTAs, 4 each.
    "after whole tiles": Wave(4, 12, 3, {0, 1}),
    # 120 steps, 20 each: all but the first and the last CTA end one tile and begin another.
    "five tiles": Wave(5, 24, 6, {0, 1, 2, 3, 4}),
    # 3 steps are not worth it.
    "short": Wave(1, 3, 2, set()),
    # And where every SM has a tile there is nothing to share.
    "full": Wave(3, 12, 3, set()),
}


def tensors(stem: str, wave: Wave) -> tuple[torch.Tensor, ...]:
    """A head for each tile, whose last tile of keys is not full."""
    problem, tile = plans()[stem].problem, plans()[stem].tile
    generator = torch.Generator().manual_seed(5)
    seq_q, seq_k = tile.m - 9, wave.steps * tile.n - 7
    shapes = [(1, seq_q, wave.tiles, problem.head_dim), (1, seq_k, wave.tiles, problem.head_dim)]
    shapes.append((1, seq_k, wave.tiles, problem.v_dim))
    return tuple(torch.randn(shape, generator=generator).to(DTYPES[problem.dtype].in_torch()) for shape in shapes)


def check(stem: str, wave: Wave, schedule: Schedule = FAST) -> tuple[torch.Tensor, torch.Tensor]:
    given = q, k, v = tensors(stem, wave)
    if (bits := plans()[stem].eight_bit) and bits.permuted:
        v = inputs.permuted_keys(v, fill=0.0)
    out, lse = outputs(stem, Settings(sms=wave.sms, schedule=schedule), (q, k, v))
    expected = reference.attention(*given, reach=reach(NoMask()))
    # What rounding P costs: 16 bits are off by 2^-8 of it at most, 8 bits by 2^-4, in the mean square by half of that.
    limit = 0.004 if plans()[stem].eight_bit is None else 0.03
    assert (out.double() - expected.out).norm() / expected.out.norm() < limit
    assert (lse - expected.lse).abs().max() < 1e-5
    model = module(stem).cpu
    assert not model.flags.any()  # as the next launch wants them
    # Parts are NaN before the launch.
    given_parts = {cta for cta in range(wave.sms) if not model.parts[cta].isnan().any()}
    assert given_parts == wave.givers
    assert {cta for cta in range(wave.sms) if not model.parts[cta].isnan().all()} == wave.givers
    return out, lse


@pytest.mark.parametrize("wave", WAVES.values(), ids=WAVES)
def test_who_gives_a_part(wave: Wave) -> None:
    check(STEM, wave)


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem != STEM])
def test_every_module_adds_up_its_parts(stem: str) -> None:
    check(stem, WAVES["two tiles"], Schedule(ctas="last to first"))


def test_the_order_of_warps_and_ctas_changes_nothing() -> None:
    wave = WAVES["two tiles"]
    first = check(STEM, wave)
    for schedule in schedules(4, plans()[STEM].tile.threads // 32)[1::2]:
        again = outputs(STEM, Settings(sms=wave.sms, schedule=schedule), tensors(STEM, wave))
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
