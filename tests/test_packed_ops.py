"""`fa3gen.attention_packed` without a GPU: which module it calls, torch.compile, fake tensors, what it refuses.

The modules are stood in for by functions that compute the reference; one small call runs on the CPU model.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from packed_modules import PackedModules, offsets, packed_attention, packed_tensors
from rendering import CHECKOUT, ROOT
from stand_ins import pass_for_cuda, standing_in
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3gen
from fa3gen.design.family import Family
from fa3gen.run import calls, packed_ops
from fa3gen.run.dispatch import NO_LIMIT, ArgumentError, NoKernel, NotRendered
from fa3gen.spec.model import CausalMask, NoMask, WindowMask

LENGTHS = ([3, 0, 5, 1], [4, 2, 9, 1])


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackedModules]:
    with standing_in(PackedModules(), monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture
def eager(modules: PackedModules, monkeypatch: pytest.MonkeyPatch) -> PackedModules:
    pass_for_cuda(monkeypatch)
    return modules


BOTH_WAYS = pytest.mark.parametrize("way", ["eager", "modules"])


def expected(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = packed_attention(*tensors, mask=CausalMask(), **options)
    return out.to(torch.bfloat16), lse


@BOTH_WAYS
def test_the_choice_is_made_once_for_a_stretch_of_mean_lengths(way: str, request: pytest.FixtureRequest) -> None:
    """The mean is rounded up: 24 keys of 4 sequences are 6 each, 25 are 7."""
    modules: PackedModules = request.getfixturevalue(way)
    for keys in (25, 24, 40, 3, 24):
        tensors = packed_tensors([2, 2, 2, 2], [keys - 3, 1, 1, 1])
        assert fa3gen.attention_packed(*tensors, causal=True).equal(expected(*tensors)[0])
    assert modules.calls == ["long", "short", "long", "short", "short"]
    assert [size.keys for _, size, _ in modules.asked] == [7, 6]
    assert [family for family, _, _ in modules.asked] == [Family("bf16", 64, 64, CausalMask(), layout="packed")] * 2


@BOTH_WAYS
def test_tiles_groups_and_the_longest_length_are_asked_for(way: str, request: pytest.FixtureRequest) -> None:
    """260 queries of 4 heads are nine tiles, however long the longest is; of few ones a sequence has one."""
    modules: PackedModules = request.getfixturevalue(way)
    tensors = packed_tensors([259, 1], [20, 6])
    for options in ({}, {"max_seqlen_q": 128}, {"max_seqlen_k": 7, "max_seqlen_q": 259}, {"max_seqlen_k": 5}):
        calls.stretches.clear()
        fa3gen.attention_packed(*tensors, **options)
    fa3gen.attention_packed(*packed_tensors([2], [9], heads=(8, 1)))
    found = [(size.tiles, size.keys, size.group) for _, size, _ in modules.asked]
    assert found == [(9, 13, 2), (9, 13, 2), (9, 7, 2), (9, 5, 2), (1, 9, 8)]


@BOTH_WAYS
def test_few_queries_are_those_of_the_longest_sequence(way: str, request: pytest.FixtureRequest) -> None:
    """If a call says how long that is, or has no more queries than sequences: a chunk of a prompt among decoding steps
    is few queries in the mean, too, and calls are told apart by how uneven they are."""
    modules: PackedModules = request.getfixturevalue(way)
    tensors = packed_tensors([29, 1, 1, 1], [40, 9, 9, 9])
    for longest in (None, 29, None, 29):
        fa3gen.attention_packed(*tensors, max_seqlen_q=longest)
    for queries, longest in ((1, None), (16, 16), (16, None), (17, 17), (1, 1)):
        fa3gen.attention_packed(*packed_tensors([queries] * 2, [30, 30]), max_seqlen_q=longest)
    assert [(size.queries, size.unevenness) for _, size, _ in modules.asked] == [
        *((NO_LIMIT, math.inf), (29, 29 / 8)),
        *((1, 1), (16, 1)),  # 16 where nobody says the longest are as a chunk and steps
        (17, 1),
    ]
    fa3gen.attention_packed(*packed_tensors([29] * 2, [30, 30]), max_seqlen_q=29)
    assert len(modules.asked) == 5  # 29 are as many as 17


@pytest.mark.parametrize("way", ["eager", "modules"])
def test_keys_that_must_not_be_split_take_another_module(way: str, request: pytest.FixtureRequest) -> None:
    modules: PackedModules = request.getfixturevalue(way)
    tensors = packed_tensors(*LENGTHS)
    for asked in (0, 1, 1, 0):
        fa3gen.attention_packed(*tensors, num_splits=asked)
    found = [size.whole for _, size, _ in modules.asked]
    assert found[0] is False and True in found
    if way == "eager":  # each is looked up once
        assert found == [False, True]
    for wrong in (-1, "1", 2.0, None):
        with pytest.raises(ArgumentError, match=f"num_splits is {wrong!r}; it needs to be 0, .* 1, .* or a number of "):
            fa3gen.attention_packed(*tensors, num_splits=wrong)
    with pytest.raises(ArgumentError, match="num_splits is 2 beside deterministic_batch.* leave one of them out"):
        fa3gen.attention_packed(*tensors, num_splits=2, deterministic_batch=True)


@BOTH_WAYS
def test_parts_are_asked_for(way: str, request: pytest.FixtureRequest) -> None:
    """As many CTAs as tiles of queries in the mean, times that: of 3 sequences, 2 kv heads, and tiles of 4 queries."""
    modules: PackedModules = request.getfixturevalue(way)
    few, more = packed_tensors([3, 0, 1], [9, 5, 7]), packed_tensors([9, 0, 5], [9, 5, 7])
    for tensors, asked in ((few, 2), (few, 7), (few, 2), (more, 2), (few, 0), (few, 1)):
        out = fa3gen.attention_packed(*tensors, causal=True, num_splits=asked)
        assert out.equal(expected(*tensors)[0])
    assert modules.divided == [12, 42, 12, 24, None, None]
    found = [size.parts for _, size, _ in modules.asked]
    assert list(dict.fromkeys(found)) == [2, 7, 0, 1] and (way == "modules" or len(found) == 4)
    torch.ops.fa3gen.attention_packed_out(*few, torch.empty_like(few[0]), num_splits=3)
    assert modules.divided[-1] == 18


@BOTH_WAYS
def test_the_same_bits_in_any_batch_are_asked_for(way: str, request: pytest.FixtureRequest) -> None:
    """Of packed sequences, with num_splits=1 or without, in a look-up of their own."""
    modules: PackedModules = request.getfixturevalue(way)
    tensors = packed_tensors(*LENGTHS)
    for asked in (False, True, True, False):
        out = fa3gen.attention_packed(*tensors, causal=True, deterministic_batch=asked)
        assert out.equal(expected(*tensors)[0])
    found = [size.own_bits for _, size, _ in modules.asked]
    assert found[0] is False and True in found
    if way == "eager":  # each is looked up once
        assert found == [False, True]
    fa3gen.attention_packed(*tensors, deterministic_batch=True, num_splits=1)
    assert modules.asked[-1][1].own_bits and modules.asked[-1][1].whole
    torch.ops.fa3gen.attention_packed_out(*tensors, torch.empty_like(tensors[0]), deterministic_batch=True)
    assert modules.asked[-1][1].own_bits and not modules.asked[-1][1].whole


@BOTH_WAYS
def test_parts_of_so_many_keys_are_asked_for(way: str, request: pytest.FixtureRequest) -> None:
    """Each number in a look-up of its own; deterministic_batch may stand beside it, and says nothing more."""
    modules: PackedModules = request.getfixturevalue(way)
    tensors = packed_tensors(*LENGTHS)
    options: list[dict[str, Any]] = [{}, {"split_keys": 384}, {"split_keys": 512, "deterministic_batch": True}]
    for asked in (*options, *options):
        assert fa3gen.attention_packed(*tensors, causal=True, **asked).equal(expected(*tensors)[0])
    found = [(family.part_keys, size.own_bits) for family, size, _ in modules.asked]
    assert list(dict.fromkeys(found)) == [(None, False), (384, True), (512, True)]
    torch.ops.fa3gen.attention_packed_out(*tensors, torch.empty_like(tensors[0]), split_keys=384, num_splits=1)
    family, size, _ = modules.asked[-1]
    assert family.part_keys == 384 and size.whole and not size.in_parts
    for wrong in (0, -1, "384", 2.0, True):
        with pytest.raises(ArgumentError, match="split_keys is .*; it needs to be a number of keys"):
            fa3gen.attention_packed(*tensors, split_keys=wrong, max_seqlen_q=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="num_splits is 2 beside split_keys, .* parts of 384: leave one"):
        fa3gen.attention_packed(*tensors, split_keys=384, num_splits=2)


@pytest.mark.parametrize(("split_keys", "head_dim"), [(384, 128), (512, 64)])
def test_parts_have_ctas_of_their_own_while_there_is_room(split_keys: int, head_dim: int) -> None:
    """A GiB: for rows of 8 heads in so many parts of as many keys each."""
    keys = 2**30 // (4 * 8 * head_dim) * split_keys
    q = torch.empty(1, 8, head_dim, dtype=torch.bfloat16, device="meta")
    pages = torch.empty(9, 16, 2, head_dim, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    for longest, fits in ((keys, True), (keys + 1, False)):
        table = torch.empty(1, longest // 16 + 1, dtype=torch.int32, device="meta")
        found = fa3gen.attention_packed.explain(
            *(q, pages, pages, offsets),
            **{"page_table": table, "seqused_k": offsets[1:], "max_seqlen_k": longest},
            causal=True,
            split_keys=split_keys,
        )
        assert ("decode" in found.stem) == fits


@pytest.mark.parametrize("page", [None, 64])
def test_parts_of_so_many_keys_have_modules(page: int | None) -> None:
    explain = fa3gen.attention_packed.explain
    q, k = (torch.empty(4, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (8, 2))
    rows = torch.empty(5, dtype=torch.int32, device="meta")
    keys: dict[str, Any] = {"cu_seqlens_k": rows}
    if page is not None:
        k = torch.empty(9, page, 2, 128, dtype=torch.bfloat16, device="meta")
        table = torch.empty(4, 2, dtype=torch.int32, device="meta")
        keys = {"page_table": table, "seqused_k": rows[1:]}
    kind = "packed" if page is None else "paged"
    hows: list[dict[str, Any]] = [{"split_keys": 384}, *[{"deterministic_batch": True}] * (page is not None)]
    for how in hows:
        asked: dict[str, Any] = {**keys, "causal": True, **how}
        assert explain(q, k, k, rows, **asked).stem == f"fwd_{kind}_decode_fixed_d128_causal"
        assert explain(q, k, k, rows, **asked, max_seqlen_q=17).stem == f"fwd_{kind}_fixed_pack_d128_causal"
        assert explain(q, k, k, rows, **asked, num_splits=1).stem == f"fwd_{kind}_fixed_pack_d128_causal"
    with pytest.raises(NotRendered, match="parts of 400"):
        explain(q, k, k, rows, **keys, causal=True, split_keys=400)


def test_a_longest_length_on_the_gpu_is_not_looked_at(eager: PackedModules) -> None:
    """It would make the host wait."""
    tensors = packed_tensors([2], [9])
    longest: Any = torch.tensor(3)
    assert fa3gen.attention_packed(*tensors, max_seqlen_k=longest).shape == (2, 4, 64)
    assert eager.asked[0][1].keys == 9


def test_what_decides_is_asked_for(eager: PackedModules) -> None:
    tensors = packed_tensors(*LENGTHS)
    q, k, v, *rest = tensors
    options: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (3, 0)}, {"window": [3, 0]}, {"return_lse": True}]
    for some in options:
        fa3gen.attention_packed(*tensors, **some)
    fa3gen.attention_packed(q.half(), k.half(), v.half(), *rest)
    fa3gen.attention_packed(*tensors, out=torch.empty_like(q, dtype=torch.float32))
    masks: list[Any] = [NoMask(), CausalMask(), WindowMask(left=3, right=0), NoMask()]
    families = [Family("bf16", 64, 64, mask, layout="packed") for mask in masks]
    families += [families[0]._replace(dtype="fp16"), families[0]._replace(out_dtype="fp32")]
    assert [family for family, _, _ in eager.asked] == families
    assert [lse for _, _, lse in eager.asked] == [False, False, False, True, False, False]


SINKS = torch.tensor([0.5, -2.0, 3e38, -torch.inf])
SCORES = pytest.mark.parametrize("scores", [{"sinks": SINKS}, {"softcap": 1.5}, {"sinks": SINKS, "softcap": 1.5}])


@BOTH_WAYS
@SCORES
def test_sinks_and_a_cap(scores: dict[str, Any], way: str, request: pytest.FixtureRequest) -> None:
    """Calls with them have modules of their own, which are found again; other modules do not get the arguments."""
    modules: PackedModules = request.getfixturevalue(way)
    tensors = packed_tensors(*LENGTHS)
    for _ in range(2):
        out, lse = fa3gen.attention_packed(*tensors, **scores, causal=True, return_lse=True)
        wanted, wanted_lse = expected(*tensors, **scores)
        assert out.equal(wanted) and lse.equal(wanted_lse)
        into = torch.empty_like(out)
        assert fa3gen.attention_packed(*tensors, **scores, causal=True, out=into) is into and into.equal(wanted)
    plain, plain_lse = fa3gen.attention_packed(*tensors, causal=True, return_lse=True)
    assert plain.equal(expected(*tensors)[0]) and not plain_lse.equal(wanted_lse)
    assert {frozenset(options) & {"sinks", "softcap"} for options in modules.options[:4]} == {frozenset(scores)}
    assert not {"sinks", "softcap"} & set(modules.options[4])
    kinds = [(family.sink, family.softcap) for family, _, _ in modules.asked]
    assert set(kinds) == {("sinks" in scores, "softcap" in scores), (False, False)}
    assert modules.asked[-1][0].layout == "packed"
    before = len(modules.asked)
    fa3gen.attention_packed(*tensors, **scores, causal=True, return_lse=True)
    assert len(modules.asked) == before


@BOTH_WAYS
def test_caps_above_64_ask_for_other_modules(way: str, request: pytest.FixtureRequest) -> None:
    """Modules whose exponents are relative to a first maximum take caps up to 64, and are not found for others."""
    modules: PackedModules = request.getfixturevalue(way)
    tensors = packed_tensors(*LENGTHS)
    for softcap in (50.0, 64.0, 64.5, 1e4, 50.0):
        assert fa3gen.attention_packed(*tensors, softcap=softcap, causal=True).equal(
            expected(*tensors, softcap=softcap)[0]
        )
    assert {(family.softcap, family.any_cap) for family, _, _ in modules.asked} == {(True, False), (True, True)}


@BOTH_WAYS
def test_out_scale_lse_and_lengths_in_use(way: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(way)
    tensors = packed_tensors(*LENGTHS)
    options: dict[str, Any] = {
        "seqused_q": torch.tensor([1, 0, 5, 1], dtype=torch.int32),
        "seqused_k": torch.tensor([2, 2, 7, 0], dtype=torch.int32),
        "scale": 0.5,
    }
    out = torch.empty_like(tensors[0])
    returned, lse = fa3gen.attention_packed(*tensors, **options, causal=True, out=out, return_lse=True)
    wanted, wanted_lse = expected(*tensors, **options)
    assert returned is out and out.equal(wanted) and lse.equal(wanted_lse)
    assert fa3gen.attention_packed(*tensors, causal=True, out=out) is out and out.equal(expected(*tensors)[0])
    assert fa3gen.attention_packed(*tensors, causal=True, return_lse=True)[1].equal(expected(*tensors)[1])


def test_nothing_but_what_a_module_takes_reaches_it(eager: PackedModules) -> None:
    tensors = packed_tensors(*LENGTHS)
    fa3gen.attention_packed(*tensors, max_seqlen_q=5, max_seqlen_k=9, causal=True)
    assert eager.options == [dict.fromkeys(("seqused_q", "seqused_k", "scale", "out")) | {"return_lse": False}]


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(modules: PackedModules, dynamic: bool) -> None:
    def model(q: Any, *rest: Any, longest: int) -> Any:
        options: dict[str, Any] = {"causal": True, "max_seqlen_q": longest, "max_seqlen_k": longest}
        out, lse = fa3gen.attention_packed(q * 2, *rest, **options, return_lse=True)
        return out + 1, lse, fa3gen.attention_packed(q, *rest, **options, sinks=SINKS, softcap=3.0)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in (LENGTHS, ([7, 2, 3, 1], [7, 2, 3, 1])):
        q, *rest = packed_tensors(*lengths)
        out, lse, other = compiled(q, *rest, longest=max(lengths[1]))
        wanted, wanted_lse = expected(q * 2, *rest)
        assert (
            out.equal(wanted + 1)
            and lse.equal(wanted_lse)
            and other.equal(expected(q, *rest, sinks=SINKS, softcap=3.0)[0])
        )


def test_parts_are_compiled(modules: PackedModules) -> None:
    def model(q: Any, *rest: Any) -> Any:
        return fa3gen.attention_packed(q * 2, *rest, causal=True, num_splits=3) + 1

    tensors = packed_tensors([3, 0, 1], [9, 5, 7])
    out = torch.compile(model, fullgraph=True, backend="aot_eager")(*tensors)
    assert out.equal(expected(tensors[0] * 2, *tensors[1:])[0] + 1)
    assert modules.divided == [18] and [size.parts for _, size, _ in modules.asked] == [3]  # of 3 x 2 tiles of queries


def test_compiled_with_out(modules: PackedModules) -> None:
    def model(out: Any, *tensors: Any) -> Any:
        before = out + 1
        fa3gen.attention_packed(*tensors, causal=True, out=out)
        return before, out + 1

    tensors = packed_tensors(*LENGTHS)
    out = torch.ones_like(tensors[0])
    before, after = torch.compile(model, fullgraph=True, backend="aot_eager")(out, *tensors)
    assert out.equal(expected(*tensors)[0]) and after.equal(out + 1) and before.eq(2).all()


@pytest.mark.parametrize("name", ["attention_packed", "attention_packed_out"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_operators_are_sound(modules: PackedModules, name: str, return_lse: bool) -> None:
    """torch's own checks: the schema tells the truth, the fake has the shapes and strides of the real one."""
    tensors = packed_tensors(*LENGTHS)
    arguments = tensors if name == "attention_packed" else (*tensors, torch.empty_like(tensors[0]))
    options = {"causal": True, "return_lse": return_lse, "max_seqlen_q": 9, "seqused_k": tensors[4].diff()}
    options |= {"sinks": torch.tensor([0.5, -2.0, 1.0, 0.0]), "softcap": 2.5} if return_lse else {}
    torch.library.opcheck(getattr(torch.ops.fa3gen, name).default, arguments, options)


def test_fake_tensors_have_the_real_shapes_and_what_is_wrong_shows(modules: PackedModules) -> None:
    def fake(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float16, device="cuda")

    with FakeTensorMode():
        q, k, v = fake(5, 4, 64), fake(7, 2, 64), fake(7, 2, 32)
        cu, fewer = (torch.empty(size, dtype=torch.int32, device="cuda") for size in (3, 2))
        out, lse = fa3gen.attention_packed(q, k, v, cu, cu, return_lse=True)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((5, 4, 32), torch.float16, (4, 5), torch.float32)
        into = fake(5, 4, 32)
        assert fa3gen.attention_packed(q, k, v, cu, cu, out=into) is into
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"out": q}, r"out has shape \(5, 4, 64\); it needs to be \(5, 4, 32\)"),
            ({"k": fake(7, 2, 32)}, "they need the same head dim"),
            ({"v": fake(6, 2, 32)}, "they may only differ in the head dim"),
            ({"cu_seqlens_k": fewer}, r"cu_seqlens_k has shape \(2,\); it needs to be \(3,\)"),
            ({"sinks": fake(4)}, r"sinks is \(4,\), torch.float16; it needs to be \(4,\), bfloat16 or float32"),
            ({"sinks": fake(2).float()}, r"sinks is \(2,\), torch.float32; it needs to be \(4,\)"),
        ]
        for changes, message in wrong:
            arguments: dict[str, Any] = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu, **changes}
            with pytest.raises(ArgumentError, match=message):
                fa3gen.attention_packed(**arguments)
    assert modules.calls == []


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, "q is a list; it needs to be a torch.Tensor"),
        ({"v": torch.zeros(2, 5, 2, 64)}, ValueError, r"it needs to be \(total, heads, head dim\)"),
        ({"cu_seqlens_q": None}, TypeError, "cu_seqlens_q is a NoneType; it needs to be a torch.Tensor"),
        ({"cu_seqlens_q": torch.zeros(1, 2)}, ValueError, r"cu_seqlens_q has shape \(1, 2\); it needs to be"),
        ({"q": torch.zeros(9, 4, 64)}, TypeError, "torch.float32; fa3gen.attention_packed takes torch.bfloat16 or"),
        ({"sinks": [1.0] * 4}, TypeError, "sinks is a list; it needs to be a torch.Tensor"),
        (
            {"softcap": 0.0},
            ValueError,
            "softcap is 0.0; it needs to be a finite and positive number, or None for no cap",
        ),
        ({"softcap": "50"}, ValueError, "softcap is '50'; it needs to be"),
        ({"window": 512}, ValueError, r"window is 512; it needs to be None or \(left, right\)"),
    ],
)
@BOTH_WAYS
def test_arguments_without_sense(
    changes: dict[str, Any], error: type[Exception], message: str, way: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(way)
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    arguments: dict[str, Any] = {**dict(zip(names, packed_tensors(*LENGTHS), strict=True)), **changes}
    for function in (fa3gen.attention_packed, fa3gen.attention_packed.explain):
        with pytest.raises(error, match=message):
            function(**arguments)


def test_tensors_that_require_grad(modules: PackedModules) -> None:
    q, *rest = packed_tensors(*LENGTHS)
    with pytest.raises(ValueError, match="sinks requires grad; this kernel is forward only"):
        fa3gen.attention_packed(q, *rest, sinks=SINKS.clone().requires_grad_())
    with pytest.raises(ValueError, match="this kernel is forward only: call it under torch.no_grad"):
        fa3gen.attention_packed(q.requires_grad_(), *rest)


def meta_arguments(page: int | None) -> dict[str, Any]:
    """Of 4 sequences, 4 heads of q and 2 of k, packed or in 3 pages each."""
    q, k, v, begins_q, begins_k = (x.to("meta") for x in packed_tensors([3, 0, 5, 1], [16, 16, 16, 16]))
    if page is None:
        return {"q": q, "k": k, "v": v, "cu_seqlens_q": begins_q, "cu_seqlens_k": begins_k}
    table = torch.empty(4, 3, dtype=torch.int32, device="meta")
    pages = {"k": k.view(-1, page, 2, 64), "v": v.view(-1, page, 2, 64)}
    return {"q": q, **pages, "cu_seqlens_q": begins_q, "page_table": table, "seqused_k": begins_k[1:]}


def words(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


PACKED, PAGED = meta_arguments(None), meta_arguments(16)
# What a module refuses of tensors that have no memory, and anything else that shows without running it.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *[
        (arguments, changes, message)
        for arguments in (PACKED, PAGED)
        for changes, message in (
            (
                {"q": arguments["q"].half()},
                "q has dtype torch.float16, k torch.bfloat16 and v torch.bfloat16; they nee",
            ),
            (
                {"v": arguments["v"].half()},
                "q has dtype torch.bfloat16, k torch.bfloat16 and v torch.float16; they nee",
            ),
            ({"q": arguments["q"][:, :3]}, "q has 3 heads and k has 2; heads of q must be a multiple of those of k"),
            ({name: arguments[name][..., :0, :] for name in "kv"}, "q has 4 heads and k has 0; heads of q must be"),
            ({"k": arguments["k"][..., :32]}, "they need the same head dim"),
            ({"v": arguments["v"][:2]}, "they may only differ in the head dim"),
            ({"v": arguments["v"].mT.contiguous().mT}, r"v has strides .* needs to be 1: pass v.contiguous\(\)"),
            ({"q": torch.empty(9, 4, 65, device="meta").bfloat16()[..., :64]}, "q has strides .* multiples of 8"),
            ({"sinks": torch.empty(8, device="meta")}, r"sinks is \(8,\), torch.float32; it needs to be \(4,\)"),
            ({"scale": "x"}, "scale is 'x'; it needs to be a finite and positive number"),
            ({"max_seqlen_q": "x"}, "max_seqlen_q is 'x'; it needs to be the rows of the longest sequence"),
            ({"max_seqlen_q": -1}, "max_seqlen_q is -1; it needs to be the rows of the longest sequence, 0 or more"),
            (
                {"max_seqlen_k": -200},
                "max_seqlen_k is -200; it needs to be the rows of the longest sequence, 0 or more",
            ),
            ({"cu_seqlens_q": words(5, dtype=torch.int64)}, "cu_seqlens_q has dtype torch.int64; .* torch.int32: pass"),
            ({"cu_seqlens_q": words(10)[::2]}, r"cu_seqlens_q has strides \(2,\); .*: pass cu_seqlens_q.contiguous"),
            ({"cu_seqlens_q": words(0)}, r"cu_seqlens_q has no elements; it needs \(sequences \+ 1,\)"),
            ({"seqused_q": words(3)}, r"seqused_q has shape \(3,\); it needs to be \(4,\)"),
            ({"seqused_q": words(4, dtype=torch.int64)}, "seqused_q has dtype torch.int64; it needs to be torch.int32"),
            ({"seqused_k": words(4, dtype=torch.int64)}, "seqused_k has dtype torch.int64; it needs to be torch.int32"),
            ({"seqused_k": words(5)}, r"seqused_k has shape \(5,\); it needs to be \(4,\)"),
            ({"out": arguments["q"][:5]}, r"out has shape \(5, 4, 64\); it needs to be \(9, 4, 64\)"),
            (
                {"out": arguments["q"].half()},
                "out has dtype torch.float16; it needs to be torch.bfloat16 or torch.float",
            ),
        )
    ],
    (PACKED, {"cu_seqlens_k": words(4)}, r"cu_seqlens_k has shape \(4,\); it needs to be \(5,\)"),
    (PACKED, {"cu_seqlens_k": words(5, dtype=torch.int64)}, "cu_seqlens_k has dtype torch.int64; it needs to be"),
    (PAGED, {"page_table": words(3, 3)}, r"page_table has shape \(3, 3\); it needs to be \(4, 3\)"),
    (PAGED, {"page_table": words(4, 3, dtype=torch.int64)}, "page_table has dtype torch.int64; it needs to be torch.i"),
    (PAGED, {"page_table": words(4, 6)[:, ::2]}, r"page_table has strides \(6, 2\); that of its last dim.*: pass page"),
]


@pytest.mark.parametrize(("arguments", "changes", "message"), REFUSED)
def test_what_a_module_would_refuse_is_told_without_one(
    arguments: dict[str, Any], changes: dict[str, Any], message: str, modules: PackedModules
) -> None:
    """By what explains a call, by the call, and by the operators, which torch.compile traces."""
    asked = {**arguments, **changes}
    for function in (fa3gen.attention_packed.explain, fa3gen.attention_packed):
        with pytest.raises(ArgumentError, match=message):
            function(**asked)
    if "x" not in changes.values():  # which no operator takes
        name = "attention_packed_out" if "out" in changes else "attention_packed"
        with pytest.raises(ArgumentError, match=message):
            getattr(torch.ops.fa3gen, name)(**{"cu_seqlens_k": None, **asked})
    assert modules.asked == []


def test_what_lies_otherwise_and_is_none_is_explained(modules: PackedModules) -> None:
    """Rows of q, k and v side by side, none, no sequences, keys of 8 bits, longest sequences of 0 or in a tensor."""
    side_by_side = dict(
        zip("qkv", torch.empty(9, 8, 64, device="meta").bfloat16().split([4, 2, 2], dim=1), strict=True)
    )
    narrow = {name: PACKED[name].to(torch.float8_e4m3fn) for name in "kv"}
    none: dict[str, Any] = {name: PACKED[name][:0] for name in "qkv"}
    legal: list[tuple[dict[str, Any], dict[str, Any]]] = [
        *((arguments, {"max_seqlen_q": 0, "max_seqlen_k": 0}) for arguments in (PACKED, PAGED)),
        *((arguments, {"max_seqlen_q": torch.tensor(3)}) for arguments in (PACKED, PAGED)),
        (PACKED, side_by_side),
        (PACKED, narrow),
        (PACKED, none),
        (PACKED, none | {"cu_seqlens_q": words(1), "cu_seqlens_k": words(1)}),
        (PAGED, {"k": PAGED["k"][:0], "v": PAGED["v"][:0]}),
        (PAGED, {"page_table": words(4, 1)}),
    ]
    for arguments, changes in legal:
        assert fa3gen.attention_packed.explain(**{**arguments, **changes}).stem
        if "max_seqlen_q" not in changes:
            assert fa3gen.attention_packed(**{**arguments, **changes}).dim() == 3


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("wrong", [-1, -127, -(2**40)])
def test_longest_sequences_below_none_are_refused_on_a_gpu(name: str, wrong: int, eager: PackedModules) -> None:
    """Also where calls of the same size were served before."""
    tensors = packed_tensors(*LENGTHS)
    fewest = {"max_seqlen_q": 1, "max_seqlen_k": 1}
    for options in ({}, {name: 0}, fewest, {"window": (3, 0)}, {"window": (3, 0), **fewest}):
        fa3gen.attention_packed(*tensors, **options)
        for _ in range(2):
            with pytest.raises(ArgumentError, match=f"{name} is {wrong}; it needs to be the rows of the longest"):
                fa3gen.attention_packed(*tensors, **{**options, name: wrong})


def test_what_explains_a_call_refuses_gradients_too(modules: PackedModules) -> None:
    q, *rest = packed_tensors(*LENGTHS)
    with pytest.raises(ValueError, match="this kernel is forward only: call it under torch.no_grad"):
        fa3gen.attention_packed.explain(q.requires_grad_(), *rest)


def test_explain_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    tensors = [tensor.to("meta") for tensor in packed_tensors(*LENGTHS, head_dim=256)]
    why = fa3gen.attention_packed.explain(*tensors, causal=True, return_lse=True)
    stem = "fwd_packed_mixed_any_group_d256_causal"  # there may be steps beside chunks
    assert (why.stem, why.file) == (stem, CHECKOUT.module_path(stem))
    assert "  for   3 queries of a sequence in the mean, 4 keys, 8 tiles of 128 query rows on 132 SMs, as" in str(why)
    few = fa3gen.attention_packed.explain(*tensors, causal=True, max_seqlen_q=5)
    assert few.stem == "fwd_packed_decode_d256_causal"  # the fastest for drafts of 8 on few keys
    assert "  for   5 queries, 4 keys, 16 tiles of 128 query rows on 132 SMs, as on an H200" in str(few)
    longer = fa3gen.attention_packed.explain(*tensors, causal=True, max_seqlen_q=12)
    assert longer.stem == "fwd_packed_chunks_d256_causal"  # which is for drafts, too
    narrow = [x[..., :40] if x.ndim == 3 else x for x in tensors]
    with pytest.raises(NoKernel, match=r"no generated module computes bf16, head dim 40, causal, packed sequences; "):
        fa3gen.attention_packed.explain(*narrow, causal=True)


def test_the_cpu_model_agrees(modules: PackedModules, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generated module takes what it is given here, and what stands in for it in these tests computes the same."""
    tensors = packed_tensors([5, 0, 130], [7, 3, 9], head_dim=256)
    used = torch.tensor([7, 3, 4], dtype=torch.int32)
    module = fa3gen.load("fwd_packed_d256_causal", on="cpu")
    monkeypatch.setattr(calls, "module_at", lambda path: module)
    with torch.no_grad():
        out, lse = fa3gen.attention_packed(*tensors, causal=True, seqused_k=used, return_lse=True)
    wanted, wanted_lse = expected(*tensors, seqused_k=used)
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)


# Calls as models make them: query heads and heads of k, head dim, what else, and the committed module that serves them.
CAPPED: dict[str, Any] = {"softcap": 50.0}
MODELS: list[tuple[tuple[int, int], int, dict[str, Any], str]] = [
    ((64, 8), 64, {"sinks": 64, "causal": True}, "fwd_packed_sink_d64_causal"),  # GPT-OSS
    ((64, 8), 64, {"sinks": 64, "window": (127, 0)}, "fwd_packed_pack8_sink_any_window"),
    ((16, 16), 64, {**CAPPED, "causal": True}, "fwd_packed_softcap_d64_causal"),
    ((32, 16), 128, {**CAPPED, "causal": True}, "fwd_packed_softcap_d128_causal"),  # Gemma 2
    ((16, 8), 256, {**CAPPED, "causal": True}, "fwd_packed_softcap_d256_causal"),
    ((16, 8), 256, {**CAPPED, "window": (4095, 0)}, "fwd_packed_softcap_d256_any_window"),
]


@pytest.mark.parametrize("page", [None, 16])
def test_a_window_that_hides_what_a_causal_mask_hides_is_one(page: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    counts = torch.empty(5, dtype=torch.int32, device="meta")
    q, k = (torch.empty(16384, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8))
    where: dict[str, Any] = {"cu_seqlens_k": counts}
    if page is not None:
        k = k.view(-1, page, 8, 128)
        where = {"page_table": torch.empty(4, 256, dtype=torch.int32, device="meta"), "seqused_k": counts[1:]}

    def chosen(window: tuple[int, int], longest: int | None = 4096, **options: Any) -> str:
        longest_q = 4096 if longest is not None else None
        given = {**where, **options, "max_seqlen_q": longest_q, "max_seqlen_k": longest}
        return fa3gen.attention_packed.explain(q, k, k, counts, window=window, **given).stem

    longest = {"max_seqlen_q": 4096, "max_seqlen_k": 4096}
    of_mask = fa3gen.attention_packed.explain(q, k, k, counts, **where, **longest, causal=True)
    assert chosen((4095, 0)) == chosen((4095, 7), causal=True) == of_mask.stem
    windowed = [chosen((4094, 0)), chosen((4095, 0), None), chosen((4095, 7))]
    windowed.append(chosen((4095, 0), deterministic_batch=True))
    assert all("window" in stem for stem in windowed)


@pytest.mark.parametrize(("heads", "dim", "options", "stem"), MODELS)
def test_calls_of_models_have_modules(heads: tuple[int, int], dim: int, options: dict[str, Any], stem: str) -> None:
    q, k, v, *begins = (x.to("meta") for x in packed_tensors([300, 5], [400, 5], heads=heads, head_dim=dim))
    if "sinks" in options:
        options = {**options, "sinks": torch.empty(options["sinks"], device="meta")}
    choice = fa3gen.attention_packed.explain(q, k, v, *begins, **options)
    assert choice.stem == stem and choice.options == {name: options[name] for name in ("window",) if name in options}
    if stem.startswith("fwd_packed_pack8"):
        # Groups that are no multiple of 8 heads have a module that is made for few queries; those of more than 16 none.
        of_four = fa3gen.attention_packed.explain(
            q[:, :12], k[:, :3], v[:, :3], *begins, **{**options, "sinks": q[0, :12, 0].contiguous()}
        )
        assert of_four.stem == "fwd_packed_decode_sink_any_window"
        with pytest.raises(
            NoKernel, match="computes bf16, head dim 64, window .*, sinks, packed sequences; .* extends"
        ):
            fa3gen.attention_packed.explain(
                q[:, :40], k[:, :2], v[:, :2], *begins, **{**options, "sinks": q[0, :40, 0].contiguous()}
            )


@pytest.mark.parametrize("page", [None, 16])
def test_few_queries_of_models_have_modules(page: int | None) -> None:
    """With sinks, windows and caps, too: keys in even shares, by as many of them as a window shows."""
    where = "packed" if page is None else "paged"
    served: list[tuple[tuple[int, int], int, dict[str, Any], str]] = [
        ((64, 8), 64, {"sinks": 64, "causal": True}, "decode_sink_causal"),
        ((64, 8), 64, {"sinks": 64, "window": (127, 0)}, "decode_sink_any_window"),
        ((16, 4), 256, {"softcap": 50.0, "causal": True}, "decode_softcap_causal"),
        ((16, 4), 256, {"softcap": 50.0, "window": (4095, 0)}, "decode_softcap_any_window"),
        ((32, 8), 128, {"window": (4095, 0)}, f"decode{'_rows' * bool(page)}_any_window_d128"),
    ]
    for heads, dim, options, stem in served:
        q, k, v, begins, _ = (x.to("meta") for x in packed_tensors([1, 1], [4096, 9000], heads=heads, head_dim=dim))
        named: dict[str, Any] = {"max_seqlen_q": 1, **options}
        if "sinks" in options:
            named["sinks"] = torch.empty(options["sinks"], device="meta")
        if page is not None:
            k, v = (x[: len(x) // page * page].unflatten(0, (-1, page)) for x in (k, v))
            named |= {"page_table": begins.new_empty(2, 600), "seqused_k": begins.new_empty(2)}
        why = fa3gen.attention_packed.explain(q, k, v, begins, *[begins] * (page is None), **named)
        assert why.stem == f"fwd_{where}_{stem}" and why.row is not None
        keys = sum(options["window"]) + 1 if "window" in options else 6548 if page is None else 9600
        assert f"1 query, {keys} keys" in str(why)
        whole = fa3gen.attention_packed.explain(q, k, v, begins, *[begins] * (page is None), num_splits=1, **named)
        assert whole.spec.split is None and "not split" in str(whole)


@pytest.mark.parametrize(
    ("dims", "causal"), [*product([(64, 64), (128, 128), (256, 256)], [False, True]), ((192, 128), True)]
)
def test_float16_is_served_as_bfloat16_is(dims: tuple[int, int], causal: bool) -> None:
    dim, v_dim = dims
    q, k, v, *begins = (x.to("meta") for x in packed_tensors([300, 5], [400, 5], heads=(8, 8), head_dim=dim))
    q, k, v = q.half(), k.half(), v.half()[..., :v_dim]
    choice = fa3gen.attention_packed.explain(q, k, v, *begins, causal=causal)
    name = "_".join(f"d{size}" if size == dim else str(size) for size in dict.fromkeys(dims))
    assert choice.stem == f"fwd_fp16_packed_{name}" + "_causal" * causal


def test_operators_take_what_the_function_takes() -> None:
    """A new option of one is one of the other."""
    schema = torch.ops.fa3gen.attention_packed_out.default._schema
    function = set(inspect.signature(packed_ops.attention_packed).parameters)
    assert {argument.name for argument in schema.arguments} == function


def test_offsets_of_the_tests() -> None:
    assert offsets([3, 0, 5]).tolist() == [0, 3, 3, 8]


# Pages

TABLE = [[3, 0, 5], [4, 1, 2]]  # of pages of 4 keys


def in_pages(lengths_q: list[int], lengths_k: list[int]) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """q, k, v, offsets of queries; what says where keys lie; and the same call on packed keys."""
    q, k, v, begins, of_k = packed_tensors(lengths_q, lengths_k)
    pages = []
    for x in (k, v):
        cache = x.new_full((6, 4, *x.shape[1:]), torch.nan)
        for table, first, end in zip(TABLE, of_k.tolist(), of_k.tolist()[1:], strict=False):
            for number, row in enumerate(range(first, end)):
                cache[table[number // 4], number % 4] = x[row]
        pages.append(cache)
    keys = {"page_table": torch.tensor(TABLE, dtype=torch.int32), "seqused_k": of_k.diff().to(torch.int32)}
    return (q, *pages, begins), keys, (q, k, v, begins, of_k)


@BOTH_WAYS
def test_keys_in_pages(way: str, request: pytest.FixtureRequest) -> None:
    """They are as many as the table has room for, or as the longest sequence has, as far as the host knows."""
    modules: PackedModules = request.getfixturevalue(way)
    tensors, keys, packed = in_pages([3, 2], [9, 6])
    for longest in ({}, {"max_seqlen_k": 9}, {"max_seqlen_k": 5}):
        out, lse = fa3gen.attention_packed(*tensors, **keys, **longest, causal=True, return_lse=True)
        assert out.equal(expected(*packed)[0]) and lse.equal(expected(*packed)[1])
    into = torch.empty_like(tensors[0])
    keys["seqused_q"] = torch.tensor([1, 2], dtype=torch.int32)
    assert fa3gen.attention_packed(*tensors, **keys, causal=True, scale=0.5, out=into) is into
    wanted, _ = expected(*packed, seqused_q=keys["seqused_q"], scale=0.5)
    assert into.equal(wanted)
    family = Family("bf16", 64, 64, CausalMask(), layout="paged", page_rows=4)
    assert {asked for asked, _, _ in modules.asked} == {family}
    assert [size.keys for _, size, _ in modules.asked[:2]] == [12, 5]  # 9 is served as 12 is


def test_pages_are_compiled_in_one_graph(modules: PackedModules) -> None:
    def model(q: Any, *rest: Any, **options: Any) -> Any:
        return fa3gen.attention_packed(q + 1, *rest, causal=True, **options) * 2

    tensors, keys, (q, *packed) = in_pages([3, 2], [9, 6])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert compiled(*tensors, **keys).equal(expected(q + 1, *packed)[0] * 2)


def test_what_is_wrong_with_pages_is_said(eager: PackedModules) -> None:
    (q, k, v, begins), keys, (_, packed_k, packed_v, _, of_k) = in_pages([3, 2], [9, 6])
    table, used = keys["page_table"], keys["seqused_k"]
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((q, k, v, begins, of_k), keys, "cu_seqlens_k is given beside page_table"),
        ((q, packed_k, packed_v, begins), keys, r"k has shape \(15, 2, 64\); it needs to be \(pages, page, heads"),
        ((q, k, v, begins), {"page_table": table[0], "seqused_k": used}, r"page_table has shape \(3,\)"),
        ((q, k, v, begins), {"page_table": table}, "seqused_k is a NoneType"),
        ((q, packed_k, packed_v, begins), {}, "cu_seqlens_k is a NoneType"),
    ]
    for tensors, options, message in wrong:
        with pytest.raises((TypeError, ValueError), match=message):
            fa3gen.attention_packed(*tensors, **options)
    assert eager.calls == []
    fa3gen.attention_packed(q, k, v, begins, **keys)
    with pytest.raises(ValueError, match="cu_seqlens_k is given beside page_table"):  # such calls have a module now
        fa3gen.attention_packed(q, k, v, begins, of_k, **keys)
    assert len(eager.calls) == 1


def test_fake_pages_have_the_real_shapes_and_what_is_wrong_shows(modules: PackedModules) -> None:
    with FakeTensorMode():
        shapes = (5, 4, 64), (6, 4, 2, 64), (6, 4, 2, 32)
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
        begins, table, used = (torch.empty(shape, dtype=torch.int32) for shape in (3, (2, 3), 2))
        keys = {"page_table": table, "seqused_k": used}
        assert fa3gen.attention_packed(q, k, v, begins, **keys).shape == (5, 4, 32)
        for name in keys:
            with pytest.raises(ArgumentError, match=f"{name} has shape .*it needs to be"):
                fa3gen.attention_packed(q, k, v, begins, **{**keys, name: keys[name][:1]})
        with pytest.raises(ArgumentError, match="they may only differ in the head dim"):
            fa3gen.attention_packed(q, k, v[:, :3], begins, **keys)


def test_explain_takes_the_module_that_copies_most_of_a_page_at_once() -> None:
    """Without a measurement; any page size is served."""
    q, begins = torch.empty((32, 4, 64), dtype=torch.bfloat16, device="meta"), torch.empty(3, dtype=torch.int32)
    keys = {"page_table": torch.empty((2, 3), dtype=torch.int32), "seqused_k": torch.empty(2, dtype=torch.int32)}
    served = {}
    for page in (1, 24, 48):
        k = torch.empty((6, page, 2, 64), dtype=torch.bfloat16, device="meta")
        served[page] = fa3gen.attention_packed.explain(q, k, k, begins, **keys, window=(9, 0)).stem
    of_rows = "fwd_paged_rows_any_window_d64"
    assert served == {1: of_rows, 24: of_rows, 48: "fwd_paged_any_window_d64"}


# Keys of 8 bits


@pytest.mark.parametrize("page", [None, 16, 64])
def test_keys_of_8_bits_have_modules_of_their_own(page: int | None) -> None:
    """By k's dtype, whoever asks; beside factors or without them."""
    for heads, dim in (((64, 8), 64), ((32, 8), 128), ((16, 4), 256)):
        q, k, v, begins_q, begins_k = packed_tensors([1] * 4, [160] * 4, heads=heads, head_dim=dim)
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
        where: dict[str, Any] = {"cu_seqlens_k": begins_k}
        if page is not None:
            k, v = (x[: 9 * page].view(-1, page, heads[1], dim) for x in (k, v))
            table = torch.zeros((4, 10), dtype=torch.int32)
            where = {"page_table": table, "seqused_k": torch.full((4,), 5, dtype=torch.int32)}
        factors = {"k_descale": torch.ones(4, heads[1]), "v_descale": torch.ones(4, heads[1])}
        for given in ({}, factors):
            found = fa3gen.attention_packed.explain(q, k, v, begins_q, **where, causal=True, **given)
            assert found.stem.startswith(f"fwd_{'packed' if page is None else 'paged'}_kv8_decode_")
            assert found.spec.kv.dtype == "e4m3"


@pytest.mark.parametrize("page", [1, 24])
def test_keys_of_8_bits_in_pages_of_other_sizes_are_gathered(page: int) -> None:
    """Few queries, and prompts."""
    for queries, kind in ((1, "decode_rows"), (700, "rows")):
        q, k, v, begins, _ = packed_tensors([queries] * 4, [240] * 4, heads=(32, 8), head_dim=128)
        k, v = (x.to(torch.float8_e4m3fn).view(-1, page, 8, 128) for x in (k, v))
        where = {"page_table": torch.zeros((4, 900), dtype=torch.int32), "seqused_k": torch.full((4,), 800).int()}
        found = fa3gen.attention_packed.explain(q, k, v, begins, **where, causal=True)
        assert found.stem == f"fwd_paged_kv8_{kind}_d128_causal"


def test_prompts_on_keys_of_8_bits() -> None:
    q, k, v, *begins = packed_tensors([700, 900], [700, 900], heads=(8, 2), head_dim=128)
    found = fa3gen.attention_packed.explain(q, *(x.to(torch.float8_e4m3fn) for x in (k, v)), *begins, causal=True)
    assert found.stem == "fwd_packed_kv8_d128_causal"


def test_what_is_wrong_with_keys_of_8_bits_is_said(eager: PackedModules) -> None:
    q, k, v, *begins = packed_tensors(*LENGTHS)
    narrow = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    one = torch.ones(4, 2)
    with pytest.raises(ArgumentError, match="k_descale is given, and k has dtype torch.bfloat16; .* leave it out"):
        fa3gen.attention_packed(q, k, v, *begins, k_descale=one)
    with pytest.raises(ArgumentError, match="k has dtype torch.float8_e4m3fn and v torch.bfloat16; they need the same"):
        fa3gen.attention_packed(q, narrow[0], v, *begins)
    with pytest.raises(TypeError, match="v_descale is a float; it needs to be a torch.Tensor"):
        fa3gen.attention_packed(q, *narrow, *begins, v_descale=0.5)


def test_a_spec_for_other_keys_of_8_bits_is_proposed() -> None:
    q, k, v, *begins = packed_tensors(*LENGTHS)
    with pytest.raises(NoKernel, match=r"K and V in e5m2(.|\n)*kv:\n? *.*dtype: e5m2"):
        fa3gen.attention_packed.explain(q, *(x.to(torch.float8_e5m2) for x in (k, v)), *begins, causal=True)


def test_factors_reach_the_module(eager: PackedModules) -> None:
    """By name, and only those that are given."""
    q, k, v, *begins = packed_tensors(*LENGTHS)
    narrow, one = (k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)), torch.full((4, 2), 0.5)
    for factors in ({}, {"v_descale": one}, {"k_descale": one, "v_descale": one}):
        fa3gen.attention_packed(q, *narrow, *begins, causal=True, **factors)
        assert {name for name in eager.options[-1] if name.endswith("_descale")} == set(factors)


def test_fake_factors_have_to_fit(modules: PackedModules) -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(9, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2, 2))
        narrow = [x.to(torch.float8_e4m3fn) for x in (k, v)]
        begins = [torch.empty(5, dtype=torch.int32, device="cuda") for _ in range(2)]
        right, wrong = (torch.empty(rows, 2, device="cuda") for rows in (4, 5))
        assert fa3gen.attention_packed(q, *narrow, *begins, k_descale=right).shape == q.shape
        with pytest.raises(ArgumentError, match=r"k_descale has shape \(5, 2\); it needs to be \(4, 2\)"):
            fa3gen.attention_packed(q, *narrow, *begins, k_descale=wrong)
