"""Prompts woven into decoding steps, on the CPU model: who multiplies what, and mistakes in who takes which tile."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hosting import cases_of, compiled, mistaken, module, reported, small, with_fields
from rendering import plans, spec_of, variants

from fa3gen.cpu.kernel import CpuKernel
from fa3gen.cpu.schedule import FAST
from fa3gen.cpu.trace import Trace
from fa3gen.design import footprint, tile_order, work
from fa3gen.design.family import PackedShape
from fa3gen.inspect import tracing
from fa3gen.verify import packed_inputs

torch.set_num_threads(1)  # the workers of xdist share the cores
STEM, PACK1 = "fwd_packed_woven_d128_causal", "fwd_packed_woven_pack1_d128_causal"
ANY = "fwd_packed_woven_any_group_d128_causal"
OF_ANY_GROUP = 3, 5, 8, 12  # heads of a kv head: less than a tile's 8, as many, and a tile and half another


@pytest.mark.parametrize(("stem", "group"), [(STEM, 4), (PACK1, 1), *[(ANY, group) for group in OF_ANY_GROUP]])
def test_warpgroups_without_rows_multiply_the_first_and_the_last_keys_alone(stem: str, group: int) -> None:
    """Each warpgroup has half of a tile's positions: where a sequence has no more of them the second one has no rows.

    Rows that a group leaves empty, beside rows that it has, are multiplied.
    """
    variant, plan = variants()[stem], plans()[stem]
    m = tile_order.positions(variant.spec)
    some, few, more, all_, two = (1, 400), (3 * m // 8, 300), (m // 2 + 1, 200), (m, 129), (5 * m // 4, 300)
    lengths = {some: (4, 1), few: (3, 1), more: (2, 2), all_: (2, 2), two: (6, 4)}
    shape = PackedShape(*map(tuple, zip(*lengths, strict=True)), group, 1)
    recorded = Trace()
    fault = tracing.run_kernel(CpuKernel(compiled(stem)), variant, tracing.Problem(shape, sms=2), None, FAST, recorded)
    assert fault is None
    products = [event.details for cta in recorded.ctas for event in cta.events if event.kind == "product"]
    # S = Q K^T and O += P V have the same instruction, as many in a step.
    steps = plan.qk.steps + plan.pv.steps
    found = Counter(each["warpgroup"] for each in products)
    packs = -(-group // variant.spec.tile.pack_heads)
    wanted = [packs * sum(counts) for counts in zip(*lengths.values(), strict=True)]
    assert [found[warpgroup] / steps for warpgroup in (0, 1)] == wanted
    told = work.Problem(variant.spec, shape)
    assert sum(found.values()) == (told.visited - told.unseen) * 2 * steps


@pytest.mark.parametrize("group", OF_ANY_GROUP)
def test_groups_of_any_size_have_their_numbers(group: int) -> None:
    """Of two kv heads: prompts of two tiles, and of one that both warpgroups share, between steps."""
    m = tile_order.positions(spec_of(ANY))
    lengths = (1, m + 1, 2, m // 2 + 1, 0, 1), (200, m + 150, 2, 140, 7, 3)
    case = packed_inputs.sequences(f"of {group}", "", *lengths, heads=(2 * group, 2), first=1, behind=2)
    assert reported(module(ANY), spec_of(ANY), [case]) == ()


Mistake = tuple[str, str, str, tuple[str, ...]]  # what is right, what is wrong, the case that fails, and what is said
MISTAKES: dict[str, Mistake] = {
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
OF_PACKS: dict[str, Mistake] = {
    "prompts' tiles counted as if one held a group": (
        "num_several * heads_kv * packs",
        "num_several * heads_kv",
        "groups",
        ("O has NaN",),
    ),
    "all tiles counted as if one held a group: the counter begins again": (
        "return num_single * heads_kv * packs, num_several * heads_kv * packs",
        "return num_single * heads_kv, num_several * heads_kv",
        "groups",
        ("stored to since its last one",),
    ),
    "tiles found as if one held a group": (
        "tiles = tiles * heads_kv * packs if own_kind == kind else 0",
        "tiles = tiles * heads_kv if own_kind == kind else 0",
        "groups",
        ("O has NaN",),
    ),
    "a step of two packs taken for a prompt where it is looked for": (
        "own_kind = 1 if tiles > 1 else 0",
        "own_kind = 1 if tiles * cute.ceil_div(heads, PACK_HEADS) > 1 else 0",
        "groups",
        ("O has NaN",),
    ),
    "packs dealt to the kv heads in turn": (
        "head_kv = head // packs",
        "head_kv = head % packs",
        "groups",
        ("a store of global memory",),
    ),
    "a pack begins where those of the kv head before are padded to": (
        "first_head = head_kv * heads + head % packs * PACK_HEADS",
        "first_head = head * PACK_HEADS",
        "groups",
        ("O has NaN",),
    ),
    "rows of the second warpgroup taken for absent": (
        "m_start + consumer * (WGMMA_M // PACK_HEADS) < work.seq_q",
        "m_start + consumer * WGMMA_M < work.seq_q",
        "groups",
        ("O is off by",),
    ),
}
OF_STEM = {STEM: MISTAKES, ANY: OF_PACKS}


@pytest.mark.parametrize(("stem", "name"), [(stem, name) for stem, mistakes in OF_STEM.items() for name in mistakes])
def test_mistakes_are_reported(stem: str, name: str, tmp_path: Path) -> None:
    right, wrong, case, reports = OF_STEM[stem][name]
    text, spec = small(stem)
    assert text.count(right) == 1
    failures = reported(mistaken(tmp_path, stem, text.replace(right, wrong)), spec, cases_of(spec, case))
    assert any(report in failure for failure in failures for report in reports), failures


@pytest.mark.parametrize(("stem", "count"), [(STEM, 4), (ANY, 1)])
def test_without_a_mistake_nothing_is_reported(stem: str, count: int, tmp_path: Path) -> None:
    text, spec = small(stem)
    cases = cases_of(spec, *{case for *_, case, _ in OF_STEM[stem].values()})
    assert len(cases) == count and reported(mistaken(tmp_path, stem, text), spec, cases) == ()


def test_the_first_scores_of_the_next_tile_may_be_under_way(tmp_path: Path) -> None:
    """With two places for Q a tile begins beside the end of the one before, also where a warpgroup lets keys go."""
    text, spec = with_fields(STEM, problem={"head_dim": 64}, tile={"kv": 32}, load={"q_stages": 2})
    assert footprint.flattened(spec) and not footprint.flattened(small(STEM)[1])
    cases = cases_of(spec, "ragged", "wrap", "tile_edge", "many")
    assert len(cases) == 4 and reported(mistaken(tmp_path, STEM, text), spec, cases) == ()
