"""The last wave of packed sequences in shares, on the CPU model: who gives parts to whom, and what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hosting import module
from rendering import attention_stems, plans, variants

from fa3gen.cpu.kernel import Settings
from fa3gen.design import tile_order
from fa3gen.spec.model import Forward
from fa3gen.verify import packed_inputs
from fa3gen.verify.packed_inputs import PackedCase, sequences
from fa3gen.verify.packed_on_cpu import CpuPackedRunner

torch.set_num_threads(1)  # the workers of xdist share the cores
STEMS = sorted(stem for stem in attention_stems() if plans()[stem].scheduler.packed_shares)
STEM = "fwd_packed_shared_d64"


@dataclass(frozen=True)
class Wave:
    """Sequences as (tiles of queries of each head, tiles of keys), heads, SMs; and the shares that give a part away.

    Neither the last tile of queries nor that of keys is full; no tiles of queries are no rows.
    """

    sequences: Sequence[tuple[int, int]]
    sms: int
    givers: set[int]
    heads: tuple[int, int] = (1, 1)
    used: bool = False

    def case(self, stem: str) -> PackedCase:
        m, n = plans()[stem].tile.m, plans()[stem].tile.n
        lengths_q = [tiles * m - 9 if tiles else 0 for tiles, _ in self.sequences]
        lengths_k = [steps * n - 7 if steps else 0 for _, steps in self.sequences]
        if not self.used:
            return sequences("wave", "", lengths_q, lengths_k, heads=self.heads, first=2, behind=5)
        doubled = ([2 * rows for rows in lengths] for lengths in (lengths_q, lengths_k))
        in_use = {"used_q": tuple(lengths_q), "used_k": tuple(lengths_k)}
        return sequences("wave", "", *doubled, heads=self.heads, first=2, **in_use)


EMPTY = [(0, 0)]
WAVES = {
    # 40 steps for 5 CTAs, 8 each: a chain.
    "one tile": Wave([(1, 40)], 5, {0, 1, 2, 3}),
    # At most 8 parts, of 5 steps.
    "more SMs than parts": Wave([(1, 40)], 132, {0, 1, 2, 3, 4, 5, 6}),
    # Steps 0 to 7, 8 to 15, 16 to 23: the second share ends one tile and begins the other.
    "two tiles": Wave([(2, 12)], 3, {0, 1}),
    # The same of two sequences; and of two heads.
    "two sequences": Wave([(1, 12), (1, 12)], 3, {0, 1}),
    "two heads": Wave([(1, 12)], 3, {0, 1}, heads=(2, 1)),
    # Three whole tiles; 12 steps for 3 CTAs, 4 each.
    "after whole tiles": Wave([(2, 12), (2, 12)], 3, {0, 1}),
    # 120 steps, 20 each: all but the first and the last share end one tile and begin another.
    "five tiles": Wave([(5, 24)], 6, {0, 1, 2, 3, 4}),
    # 36 steps, 9 each: 3 are saved.
    "hardly shorter": Wave([(3, 12)], 4, set()),
    # 3 steps are not worth it.
    "short": Wave([(1, 3)], 2, set()),
    # And where every SM has a tile there is nothing to share.
    "full": Wave([(3, 12)], 3, set()),
    # The longest, 15, is one and a half times the mean, 10, and cut twice; in the next wave it is longer.
    "about equally long": Wave([(1, 5), (1, 15)], 4, {1, 2}),
    "of different lengths": Wave([(1, 4), (1, 15)], 4, set()),
    # Of the long tile before nothing is in the last wave.
    "long ones before": Wave([(3, 40), (1, 12), (1, 12)], 3, {0, 1}),
    # Those without queries have no tiles; one without keys has a step, and tiles are not alike.
    "empty ones between": Wave([(0, 0), (1, 12), (0, 9), (1, 12), (0, 0)], 3, {0, 1}),
    "one without keys": Wave([(1, 12), (1, 0)], 3, set()),
    # The third group of 32 has all of the last wave; or the second has some of it, and nothing is shared.
    "the third group": Wave([*[(1, 1)] * 3, *EMPTY * 67, (2, 12)], 3, {0, 1}),
    "in two groups": Wave([*EMPTY * 31, (1, 12), (1, 12)], 3, set()),
    # Two tiles of the whole wave are in the group before the last.
    "a whole wave in two groups": Wave([(2, 12), *EMPTY * 31, (3, 12)], 4, {0, 1, 2}),
    # Of twice as many rows half are in use, and so are the steps.
    "in use": Wave([(1, 12), (1, 12)], 3, {0, 1}, used=True),
}


def check(stem: str, wave: Wave, count: int = 1) -> None:
    """O and LSE are right, zeros are left, bits are the same under `count` schedules; and who gives parts."""
    spec, found = variants()[stem].spec, module(stem)
    assert isinstance(spec, Forward)
    found.cpu.settings = Settings(sms=wave.sms)
    try:
        assert CpuPackedRunner(found, spec, seed=3, count=count).run_case(wave.case(stem)).failures == ()
    finally:
        found.cpu.settings = Settings()
    # Parts are NaN before the launch.
    assert {share for share, part in enumerate(found.cpu.parts) if not part.isnan().any()} == wave.givers
    assert {share for share, part in enumerate(found.cpu.parts) if not part.isnan().all()} == wave.givers


@pytest.mark.parametrize("wave", WAVES.values(), ids=WAVES)
def test_who_gives_a_part(wave: Wave) -> None:
    check(STEM, wave)


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem != STEM])
@pytest.mark.parametrize("name", ["two tiles", "after whole tiles", "about equally long"])
def test_every_module_adds_up_its_parts(stem: str, name: str) -> None:
    check(stem, WAVES[name])


@pytest.mark.parametrize("name", ["two tiles", "after whole tiles"])
def test_the_order_of_warps_changes_nothing(name: str) -> None:
    check(STEM, WAVES[name], count=4)


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize(("cases", "sms"), [(packed_inputs.cpu_cases, Settings().sms), (packed_inputs.gpu_cases, 132)])
def test_some_case_of_verify_shares_its_last_wave(stem: str, cases: Any, sms: int) -> None:
    """On the model, and on a GPU; counted as the module does, in a case with no more than 32 sequences."""
    spec = variants()[stem].spec
    assert isinstance(spec, Forward)
    m, n = spec.tile.q, spec.tile.kv
    shared = set()
    for case in cases(spec):
        tiles = [
            max(-(-(k[1] - k[0]) // n), 1) for q, k in case.spans for _ in range(-(-(q[1] - q[0]) // m) * case.heads_q)
        ]
        if tail := tiles[len(tiles) // sms * sms :]:
            size = max(-(-sum(tail) // sms), -(-max(tail) // tile_order.PARTS))
            alike = 2 * len(tail) * max(tail) <= tile_order.LONGEST_HALVES * sum(tail)
            if alike and size + tile_order.STEPS_SAVED <= max(tail) and len(case.spans) <= 32:
                shared.add(case.name)
    assert ("last_wave" if sms < 132 else "alike") in shared
