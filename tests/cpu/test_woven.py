"""Prompts woven into decoding steps, on the CPU model: who multiplies what, and mistakes in who takes which tile."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hosting import cases_of, compiled, mistaken, reported, small, with_fields
from rendering import plans, variants

from fa3gen.cpu.kernel import CpuKernel
from fa3gen.cpu.schedule import FAST
from fa3gen.cpu.trace import Trace
from fa3gen.design import footprint, work
from fa3gen.design.family import PackedShape
from fa3gen.inspect import tracing

torch.set_num_threads(1)  # the workers of xdist share the cores
STEM = "fwd_packed_woven_d128_causal"


def test_warpgroups_without_rows_multiply_the_first_and_the_last_keys_alone() -> None:
    """A tile has 32 positions of 4 heads, 16 of each warpgroup: of 1 and of 12 queries the second one has no rows."""
    lengths = {(1, 400): (4, 1), (12, 300): (3, 1), (17, 200): (2, 2), (32, 129): (2, 2), (40, 300): (6, 4)}
    shape = PackedShape(*map(tuple, zip(*lengths, strict=True)), 4, 1)
    recorded = Trace()
    fault = tracing.run_kernel(
        CpuKernel(compiled(STEM)), variants()[STEM], tracing.Problem(shape, sms=2), None, FAST, recorded
    )
    assert fault is None
    products = [event.details for cta in recorded.ctas for event in cta.events if event.kind == "product"]
    # S = Q K^T and O += P V have the same instruction, as many in a step.
    steps = plans()[STEM].qk.steps + plans()[STEM].pv.steps
    found = Counter(each["warpgroup"] for each in products)
    assert [found[group] / steps for group in (0, 1)] == [sum(counts) for counts in zip(*lengths.values(), strict=True)]
    told = work.Problem(variants()[STEM].spec, shape)
    assert sum(found.values()) == (told.visited - told.unseen) * 2 * steps


MISTAKES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "rows of the second warpgroup taken for absent": (
        "m_start + consumer * (WGMMA_M // PACK_HEADS) < work.seq_q",
        "m_start + consumer * WGMMA_M < work.seq_q",
        "ragged",
        ("O is off by",),
    ),
    "absent rows keep their stages": ("work.n_end - 1)\n", "cutlass.Int32(0))\n", "wrap", ("deadlock",)),
    "sequences of two tiles not counted": (
        "num_several += tiles if tiles > 1 else 0",
        "num_several += tiles if tiles > 2 else 0",
        "tile_edge",
        ("O has NaN",),
    ),
    "only prompts' tiles counted": (
        "draw == num_single + num_several - 1",
        "draw == num_several - 1",
        "many",
        ("the launch left 1 words of the counter that are not 0", "a load", "a store"),
    ),
    "every other group of 32 sequences skipped": (
        "first + WARP, before + tiles_of_all, kind, sequences",
        "first + 2 * WARP, before + tiles_of_all, kind, sequences",
        "many",
        ("O has NaN",),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported(name: str, tmp_path: Path) -> None:
    right, wrong, case, reports = MISTAKES[name]
    text, spec = small(STEM)
    assert text.count(right) == 1
    failures = reported(mistaken(tmp_path, STEM, text.replace(right, wrong)), spec, cases_of(spec, case))
    assert any(report in failure for failure in failures for report in reports), failures


def test_without_a_mistake_nothing_is_reported(tmp_path: Path) -> None:
    text, spec = small(STEM)
    cases = cases_of(spec, *{case for *_, case, _ in MISTAKES.values()})
    assert len(cases) == 4 and reported(mistaken(tmp_path, STEM, text), spec, cases) == ()


def test_the_first_scores_of_the_next_tile_may_be_under_way(tmp_path: Path) -> None:
    """With two places for Q a tile begins beside the end of the one before, also where a warpgroup lets keys go."""
    text, spec = with_fields(STEM, problem={"head_dim": 64}, tile={"kv": 32}, load={"q_stages": 2})
    assert footprint.flattened(spec) and not footprint.flattened(small(STEM)[1])
    cases = cases_of(spec, "ragged", "wrap", "tile_edge", "many")
    assert len(cases) == 4 and reported(mistaken(tmp_path, STEM, text), spec, cases) == ()
