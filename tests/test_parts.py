"""Parts that calls ask for, without a GPU: which module divides keys like that, what is explained and rendered."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from rendering import CHECKOUT, ROOT, variants
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3gen
from fa3gen.base.errors import UserError
from fa3gen.compile.cache import CACHE_DIR_VARIABLE
from fa3gen.design import ceiling
from fa3gen.design.family import Family, PackedShape, Shape
from fa3gen.design.proposed import Proposal, propose
from fa3gen.design.rules import check
from fa3gen.design.splits import KEYS_OF_OWN_PARTS, num_parts, num_shares, share_of, told
from fa3gen.design.tile_order import takes_group
from fa3gen.design.work import Problem
from fa3gen.run import dispatch
from fa3gen.run.dispatch import Choice, NotRendered, Size
from fa3gen.run.parts import with_names
from fa3gen.spec.model import CausalMask, NoMask, Split, WindowMask

FULL, CAUSAL, WINDOW = NoMask(), CausalMask(), WindowMask(left=127, right=0)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(dispatch, "rendered_here", [])


def chosen(family: Family, size: Size) -> Choice:
    return dispatch.choose(family, size, lse=True, workspace=CHECKOUT)


def size(parts: int, *, group: int = 4, queries: int = 1, keys: int = 8192, tiles: int = 32, **facts: Any) -> Size:
    return Size(keys, tiles, 132, group, queries, parts, mean_queries=queries, **facts)


def splits_any(choice: Choice) -> bool:
    return choice.spec.split == Split(count="auto")


# Which module


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=lambda mask: mask.kind)
@pytest.mark.parametrize("layout", ["dense", "packed", "paged"])
def test_parts_are_made_by_a_module_that_splits_keys(layout: Any, mask: Any, dim: int) -> None:
    """Of calls of any size, also those for which the table has none that does, or no row at all."""
    family = Family("bf16", dim, dim, mask, layout=layout, page_rows=64 if layout == "paged" else None)
    for group in (1, 12):
        for queries, keys, tiles in ((1, 8192, 32), (16, 64, 4096), (4096, 4096, 1024)):
            asked = size(3, group=group, queries=queries, keys=keys, tiles=tiles)
            choice = chosen(family, asked)
            assert splits_any(choice) and takes_group(choice.spec, group), (group, queries)
            assert ", keys in 3 parts" in str(choice) and choice.size == asked
            whole = chosen(family, size(1, group=group, queries=queries, keys=keys, tiles=tiles))
            assert whole.spec.split is None and ", keys not split" in str(whole)


def test_a_measured_row_comes_first() -> None:
    """Of the rows for the size the first whose module splits keys; where there is none, the smallest tiles of keys.

    Of several such, the one that leaves the least room for heads that the call has not.
    """
    family = Family("bf16", 128, 128, FULL)
    many, few = size(2, group=1, tiles=4096), size(2, keys=4096)
    assert (chosen(family, many).stem, chosen(family, few).stem) == ("fwd_decode_pairs_d128", "fwd_decode_d128")
    assert chosen(family, many).row is not None
    prompt = chosen(family, size(2, queries=512))
    assert prompt.row is None and "smallest tiles of keys, 64" in prompt.reason
    assert prompt.stem == "fwd_decode_pack4_d128"


def test_dense_tensors_with_a_window_are_divided_as_packed_ones() -> None:
    family = Family("bf16", 128, 128, WINDOW)
    assert chosen(family, size(3, in_rows=True)).as_packed and splits_any(chosen(family, size(3, in_rows=True)))
    with pytest.raises(NotRendered, match="keys in 3 parts.*; num_splits=0 takes fwd_d128_any_window. Nor can one"):
        chosen(family, size(3))


def test_what_no_module_splits_has_another_way() -> None:
    """The error names the module that serves the call if nothing is asked for."""
    family = Family("fp16", 128, 128, CAUSAL)
    with pytest.raises(NotRendered, match="keys in 3 parts; .*; num_splits=0 takes fwd_fp16_d128_causal. This spec"):
        chosen(family, size(3))
    of_any_cap = Family("bf16", 256, 256, CAUSAL, layout="packed", softcap=True, any_cap=True)
    assert splits_any(chosen(of_any_cap, size(0))) and splits_any(chosen(of_any_cap, size(2)))
    with pytest.raises(NotRendered, match="keys not split.*; num_splits=0 takes fwd_packed_decode_softcap_causal"):
        chosen(of_any_cap, size(1))


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=lambda mask: mask.kind)
def test_parts_of_so_many_keys_have_a_module_of_their_own(mask: Any) -> None:
    for dim in (64, 128, 256):
        family = Family("bf16", dim, dim, mask, part_keys=KEYS_OF_OWN_PARTS)
        assert chosen(family, size(0)).stem == f"fwd_decode_fixed_d{dim}" + "_causal" * (mask is CAUSAL)
        with pytest.raises(NotRendered, match="keys in parts of 256: the same bits in any batch"):
            chosen(family._replace(part_keys=256), size(0))


# What is proposed, and rendered while a program runs

PROPOSED: list[tuple[Family, dict[str, Any], str]] = [
    (Family("bf16", 128, 128, CAUSAL, part_keys=256), {}, "parts_of_256"),
    (Family("bf16", 128, 128, FULL, part_keys=64), {}, "parts_of_64"),  # with smaller tiles of keys
    (Family("fp16", 256, 256, FULL, part_keys=512), {"group": 17}, "parts_of_512_pack32"),
    (Family("fp16", 128, 128, FULL), {"parts": True}, "split"),
    (Family("bf16", 96, 96, CAUSAL), {"parts": True, "group": 24}, "split_pack32"),
    (Family("bf16", 192, 128, CAUSAL, layout="packed"), {"parts": True}, "packed_split"),
    (Family("fp16", 64, 64, FULL, layout="paged", page_rows=64), {"parts": True}, "pages_16_split"),
]


@pytest.mark.parametrize(("family", "asked", "end"), PROPOSED, ids=lambda value: getattr(value, "label", ""))
def test_a_spec_that_would_divide_keys_like_that(family: Family, asked: dict[str, Any], end: str) -> None:
    found = propose(family, CHECKOUT, **asked)
    assert isinstance(found, Proposal) and check(found.spec) == [] and found.stem.endswith(f"_{end}")
    assert Family.of(found.spec).serves(family) and takes_group(found.spec, asked.get("group", 1))
    wanted = Split(keys=family.part_keys) if family.part_keys else Split(count="auto")
    assert found.spec.split == wanted and found.spec.tile.group == "at_most"


def test_parts_that_no_tile_of_keys_makes() -> None:
    found = propose(Family("bf16", 128, 128, FULL, part_keys=100), CHECKOUT)
    assert not isinstance(found, Proposal) and [one.field for one in found] == ["split.keys"]


def meta(
    dtype: torch.dtype = torch.bfloat16, *, dim: int = 64, seq_q: int = 1, seq_k: int = 8192
) -> list[torch.Tensor]:
    shapes = (1, seq_q, 8, dim), (1, seq_k, 2, dim), (1, seq_k, 2, dim)
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


def test_a_rendered_module_has_parts_of_that_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each size is rendered once, and serves no call that asks for another one."""
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="fa3gen"):
        for keys in (256, 128, 256):
            choice = fa3gen.attention.explain(*meta(), split_keys=keys, render=True)
            assert choice.spec.split == Split(keys=keys) and f"parts {8192 // keys} of each tile" in str(choice)
            assert f"KEYS_OF_PART = {keys}" in choice.file.read_text()
    assert len(caplog.records) == len(dispatch.rendered_here) == 2
    assert fa3gen.attention.explain(*meta(), deterministic_batch=True).stem == "fwd_decode_fixed_d64"
    assert fa3gen.attention.explain(*meta()).stem == "fwd_decode_d64"


def test_a_module_rendered_for_parts_serves_others_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one rendered for calls that ask for none, in either order, and also for few queries."""
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path))
    tensors = meta(torch.float16, dim=160)
    first = fa3gen.attention.explain(*tensors, render=True)
    divided = fa3gen.attention.explain(*tensors, num_splits=2, render=True)
    assert splits_any(divided) and not splits_any(first)
    for asked, stem in ((0, first.stem), (1, first.stem), (2, divided.stem), (5, divided.stem)):
        assert fa3gen.attention.explain(*tensors, num_splits=asked).stem == stem


# What is explained


def test_how_many_parts_and_why() -> None:
    tensors = meta(dim=128)

    def explained(**options: Any) -> str:
        return fa3gen.attention.explain(*tensors, **options).parts or ""

    spec = fa3gen.attention.explain(*tensors).spec
    steps, ctas, parts = (
        8192 // spec.tile.kv,
        132 * spec.tile.ctas_per_sm,
        num_parts(spec, Shape(1, 1, 8192, 8, 2), 132),
    )
    room = f"as many as 132 SMs have room for ({ctas} CTAs at once, 2 "
    assert parts > 1 and explained().startswith(f"{parts} of each tile of queries: {room}")
    seven = f"7 of each tile of queries: num_splits=7 of {steps} tiles of {spec.tile.kv} keys"
    assert explained(num_splits=7).startswith(seven) and explained(num_splits=7) in str(
        fa3gen.attention.explain(*tensors, num_splits=7)
    )
    assert explained(num_splits=1).startswith("1: no second kernel")
    assert explained(num_splits=200).startswith(f"{steps} of each tile of queries: num_splits=200 of {steps} tiles")
    assert explained(split_keys=512) == "16 of each tile of queries: 8192 keys in parts of 512"
    assert explained(window=(1000, 0), num_splits=3).startswith("6 equal shares of all keys of all sequences, num_spl")
    q, k, v = (x.flatten(0, 1) for x in tensors)
    begins = torch.empty(5, dtype=torch.int32, device="meta")
    for asked, count in ((0, "132 equal shares of all keys of all sequences, one for each SM"), (3, "24 equal shares")):
        choice = fa3gen.attention_packed.explain(q, k, v, begins, begins, max_seqlen_q=1, num_splits=asked)
        assert (choice.parts or "").startswith(count) and f"  parts {count}" in str(choice)
    assert told(variants()["fwd_d128"].spec, Shape(1, 1, 9, 1, 1), 132).endswith("shared by several CTAs")


def test_a_problem_is_divided_as_asked() -> None:
    """CTAs and steps of the busiest SM, by which explain has waves and ceilings."""
    dense, even = variants()["fwd_decode_d128"].spec, variants()["fwd_packed_decode_d128"].spec
    shape = Shape(2, 1, 8192, 32, 8)
    for asked, parts in ((0, 8), (3, 3), (16, 16), (500, 128)):
        assert num_parts(dense, shape, 132, asked) == parts
        assert ceiling.ctas_of(Problem(dense, shape, asked), 132) == 16 * parts
    assert ceiling.busiest_sm(dense, Problem(dense, shape, 16), 132) == 2 * 8  # 256 CTAs of 8 tiles of keys
    packed = PackedShape((1, 1), (4096, 12288), 32, 8)
    assert [num_shares(even, packed, 132, asked) for asked in (0, 1, 3)] == [132, 16, 48]
    assert [share_of(even, packed, 132, asked) for asked in (0, 1, 3)] == [16, 128, 43]
    two = variants()["fwd_packed_decode_shared_d64_causal"].spec  # CTAs share an SM
    assert [num_shares(two, packed, 132, asked) for asked in (0, 1, 3)] == [264, 16, 48]
    assert num_shares(two, PackedShape((1,), (4096,), 8, 8), 132, 3) == 24 and "2 for each SM" in told(two, packed, 132)
    assert num_shares(two, PackedShape((1,), (4096,), 1, 1), 132, 3) == 4  # in whole SMs
    shared = Problem(even, packed, 16)
    assert ceiling.ctas_of(shared, 132) == len(ceiling.parts(shared, 132)) == 256
    assert ceiling.busiest_sm(even, shared, 132) == 2 * 8
    for stem in ("fwd_d128", "fwd_decode_fixed_d128"):
        with pytest.raises(UserError, match=r"3 parts are asked for, and this module .*; take one with count: auto"):
            Problem(variants()[stem].spec, shape, 3)


# Who looks at calls instead of making them


@pytest.mark.parametrize("options", [{"num_splits": 3}, {"split_keys": 512}])
def test_fake_tensors_have_parts(options: dict[str, Any]) -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(1, rows, heads, 64, dtype=torch.bfloat16) for rows, heads in ((1, 8), (99, 2), (99, 2)))
        out, lse = fa3gen.attention(q, k, v, return_lse=True, **options)
        assert out.shape == q.shape and lse.shape == (1, 8, 1)
        with pytest.raises(dispatch.ArgumentError, match="beside split_keys"):
            fa3gen.attention(q, k, v, split_keys=64, num_splits=2)


def test_a_copy_of_a_function_has_names_of_its_own() -> None:
    assert with_names(named, CHECKOUT="other")(1, b=2) == ("other", 1, 2) and named(1) == (CHECKOUT, 1, 5)
    assert with_names(named, CHECKOUT=0)(3) == (0, 3, 5)


def named(a: int, *, b: int = 5) -> tuple[Any, int, int]:
    return CHECKOUT, a, b
