"""Modules in which a row's bits are its own: which these are, which serves a call, and what is proposed without one."""

from __future__ import annotations

from math import prod

import pytest
from rendering import CHECKOUT, variants

from fa3gen.design.family import Family
from fa3gen.design.nearest import with_changes
from fa3gen.design.own_bits import own_bits, shared
from fa3gen.design.proposed import Proposal, propose
from fa3gen.design.rules import check
from fa3gen.design.splits import KEYS_OF_PAGED_PARTS, whole_parts
from fa3gen.measure import packed_cells
from fa3gen.records import packed_records
from fa3gen.run import dispatch
from fa3gen.run.dispatch import NO_LIMIT, Choice, NotRendered, Size, Stretch
from fa3gen.spec.model import CausalMask, Forward, Mask, NoMask, WindowMask

WINDOW = WindowMask(left=127, right=0)
MASKS: list[Mask] = [NoMask(), CausalMask(), WINDOW]
PACKED = Family("bf16", 128, 128, CausalMask(), layout="packed")


def spec_of(stem: str) -> Forward:
    spec = variants()[stem].spec
    assert isinstance(spec, Forward)
    return spec


def chosen(family: Family, size: Size) -> Choice:
    return dispatch.choose(family, size, lse=True, workspace=CHECKOUT)


@pytest.mark.parametrize(
    ("stem", "fields"),
    [
        ("fwd_packed_d128_causal", []),
        ("fwd_packed_own_bits_sink_any_window", []),
        ("fwd_packed_pack8_sink_any_window", ["tile.kv_from"]),
        ("k7_two_levels_d128", []),
        ("k7_promote_4_d128", ["accumulate.promote_every"]),
        ("fwd_decode_fixed_d128", []),
        ("fwd_packed_d256", ["softmax.rescale_above"]),
        ("fwd_packed_any_window_d256", ["softmax.rescale_above", "tile.kv_from"]),
        ("fwd_packed_softcap_d128_causal", ["softmax.row_max"]),
        ("fwd_packed_decode_d64", ["scheduler", "split"]),
        ("fwd_packed_decode_fixed_d128", []),
        ("fwd_paged_fixed_d64_causal", []),
        ("fwd_decode_d64", ["split"]),
        ("fwd_d128", ["scheduler"]),
    ],
)
def test_what_others_decide_with(stem: str, fields: list[str]) -> None:
    """And what is proposed instead, leaves none of it."""
    spec = spec_of(stem)
    found = shared(spec)
    assert [one.field for one in found] == fields and own_bits(spec) == (not fields)
    assert own_bits(with_changes(spec, tuple((one.field, one.instead) for one in found)))


SIZES = [
    Size(200, 4, 132, queries=1, own_bits=True),
    Size(131072, 4096, 78, queries=NO_LIMIT, own_bits=True),
]


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: mask.kind)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page", [None, 24, 48, 256])
@pytest.mark.parametrize("group", [3, 8])
def test_one_module_serves_calls_of_every_size(mask: Mask, head_dim: int, page: int | None, group: int) -> None:
    """Rows of the table go by sizes; with this they are not asked."""
    layout = "packed" if page is None else "paged"
    family = Family("bf16", head_dim, head_dim, mask, layout=layout, page_rows=page)
    choices = [chosen(family, Size(**{**vars(size), "group": group})) for size in SIZES]
    assert len({choice.stem for choice in choices}) == 1
    assert all(choice.row is None and choice.around == Stretch() and own_bits(choice.spec) for choice in choices)
    heads = choices[0].spec.tile.pack_heads
    largest = 1 if mask is WINDOW else {64: 8, 128: 4}[head_dim]
    assert heads == (largest if group % largest == 0 and (page is None or page % 16 == 0) else 1)
    assert "the same bits in any batch" in str(choices[0])


@pytest.mark.parametrize("mask", MASKS[:2], ids=lambda mask: mask.kind)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("page", [None, 16, 256])
def test_few_queries_have_parts_with_the_same_bits(mask: Mask, head_dim: int, page: int | None) -> None:
    """Of as many keys, in as large tiles: size decides on the module, and on nothing that a row's bits follow from."""
    whole = Family("bf16", head_dim, head_dim, mask, layout="packed" if page is None else "paged", page_rows=page)
    family = whole._replace(part_keys=KEYS_OF_PAGED_PARTS[head_dim])
    for group in (1, 3, 16):
        many, few = (chosen(family, Size(4096, 64, 132, group, 1, own_bits=True, in_parts=parts)) for parts in (0, 1))
        assert whole_parts(few.spec) and own_bits(few.spec) and own_bits(many.spec)
        assert few.spec.split is not None and few.spec.split.keys == many.spec.softmax.restart_every
        assert few.spec.tile.kv == many.spec.tile.kv and few.spec.load.page_rows == many.spec.load.page_rows
        assert chosen(family, Size(4096, 64, 132, group, 1, parts=1, own_bits=True, in_parts=True)).stem == many.stem
    # A tile has no room for as many heads.
    assert chosen(family, Size(4096, 64, 132, 17, 1, own_bits=True, in_parts=True)).spec.softmax.restart_every
    # If nobody says how many keys a part has, those of pages have as many; of packed keys none begins.
    for parts in (False, True):
        own = chosen(whole, size := Size(4096, 64, 132, 1, 1, own_bits=True, in_parts=parts))
        assert own.reason.startswith("deterministic_batch")
        if page is None:
            assert own.spec.split is own.spec.softmax.restart_every is None
        else:
            assert own.stem == chosen(family, size).stem
    with pytest.raises(NotRendered, match="the same bits in any batch"):
        chosen(family._replace(dtype="fp16"), Size(4096, 64, 132, 1, 1, own_bits=True, in_parts=True))


@pytest.mark.parametrize("mask", MASKS[:2], ids=lambda mask: mask.kind)
@pytest.mark.parametrize("page", [None, 16, 64])
def test_head_dim_256_has_modules_for_it(mask: Mask, page: int | None) -> None:
    """The others rescale O rarely, and serve calls without the wish."""
    layout = "packed" if page is None else "paged"
    family = Family("bf16", 256, 256, mask, layout=layout, page_rows=page)
    end = "_causal" * (mask.kind == "causal")
    for group in (1, 4):
        assert chosen(family, Size(4096, 64, 132, group, own_bits=True)).stem == f"fwd_{layout}_own_bits_d256{end}"
        assert not own_bits(chosen(family, Size(4096, 64, 132, group)).spec)


def test_without_it_calls_are_served_as_before() -> None:
    assert chosen(PACKED, Size(8192, 64, 132, 4)).row is not None
    assert chosen(PACKED, Size(8192, 64, 132, 4, queries=1)).spec.split is not None


MISSING = [
    PACKED._replace(head_dim=256, head_dim_v=256, layout="paged", page_rows=24),
    PACKED._replace(head_dim=256, head_dim_v=256, mask=WINDOW),
    PACKED._replace(softcap=True),
    PACKED._replace(head_dim=80, head_dim_v=80, dtype="fp16"),
]


@pytest.mark.parametrize("family", MISSING, ids=lambda family: family.label)
def test_what_is_not_served_has_a_way_out(family: Family) -> None:
    """A spec whose module would serve it, and which is legal; without the wish there is another one, or none needed."""
    with pytest.raises(NotRendered, match="the same bits in any batch") as caught:
        chosen(family, Size(4096, 64, own_bits=True))
    proposal = caught.value.proposal
    assert proposal is not None and own_bits(proposal.spec) and check(proposal.spec) == []
    assert Family.of(proposal.spec).serves(family) and proposal.stem.endswith("_own_bits")
    free = propose(family, CHECKOUT)
    assert isinstance(free, Proposal) and free.stem != proposal.stem


def test_what_it_costs_prompts_by_the_records() -> None:
    """The packed cells of float16, which one module serves: beside the fastest one of each, as measured."""
    heads = {128: (32, 8), 64: (16, 16)}
    found = []
    for record in packed_records.load_all(CHECKOUT):
        problem, family = record.problem, record.problem.family
        if problem.lengths not in packed_cells.PACKED_LENGTHS or family.layout != "packed" or family.dtype != "fp16":
            continue
        if family.kv_dtype is not None:
            continue
        if heads.get(problem.head_dim) == (problem.heads_q, problem.heads_kv):
            speeds = {result.stem: result.tflops for result in record.results}
            stem = chosen(family, Size(1, 1, group=problem.group, own_bits=True)).stem
            found.append(speeds[stem] / max(speeds.values()))
    assert len(found) == 20
    assert prod(found) ** (1 / len(found)) >= 0.9 and min(found) > 0.8
