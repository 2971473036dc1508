"""FlashAttention-3's functions: their signatures, what they return, and what they refuse; without a GPU.

Modules are stood in for by functions that compute the reference; small calls run generated ones on the CPU model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from packed_modules import PackedModules, offsets, packed_attention, packed_tensors
from rendering import ROOT
from stand_ins import pass_for_cuda, standing_in

import fa3gen
from fa3gen import flash_attn_interface as fa3
from fa3gen.run import calls, combine_ops, dispatch
from fa3gen.run.dispatch import ArgumentError
from fa3gen.spec.model import WINDOW_MAX, CausalMask, Mask, NoMask, WindowMask
from fa3gen.verify import reference

NO_WINDOW = (-1, -1)
REQUIRED = inspect.Parameter.empty

# Names, order and defaults of hopper/flash_attn_interface.py of FlashAttention, as of November 2026.
SCALES = {"q_descale": None, "k_descale": None, "v_descale": None}
LOCAL = {"window_size": NO_WINDOW, "attention_chunk": 0, "softcap": 0.0}
LAST = {"num_splits": 1, "pack_gqa": None, "deterministic": False, "sm_margin": 0, "return_attn_probs": False}
UPSTREAM: dict[str, dict[str, Any]] = {
    "flash_attn_func": {
        **dict.fromkeys(("q", "k", "v"), REQUIRED),
        **{"softmax_scale": None, "causal": False, "qv": None},
        **SCALES,
        **LOCAL,
        **LAST,
    },
    "flash_attn_varlen_func": {
        **dict.fromkeys(("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), REQUIRED),
        **{"seqused_q": None, "seqused_k": None, "softmax_scale": None, "causal": False, "qv": None},
        **SCALES,
        **LOCAL,
        **LAST,
    },
    "flash_attn_with_kvcache": {
        **dict.fromkeys(("q", "k_cache", "v_cache"), REQUIRED),
        **dict.fromkeys(("k", "v", "qv", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx")),
        **dict.fromkeys(("cache_leftpad", "page_table", "cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q")),
        "rotary_seqlens": None,
        **SCALES,
        **{"softmax_scale": None, "causal": False},
        **LOCAL,
        **{"rotary_interleaved": True, "scheduler_metadata": None, "num_splits": 0, "pack_gqa": None, "sm_margin": 0},
        "return_softmax_lse": False,
    },
    "get_scheduler_metadata": {
        **dict.fromkeys(("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv"), REQUIRED),
        **{"headdim": REQUIRED, "cache_seqlens": REQUIRED, "qkv_dtype": torch.bfloat16, "headdim_v": None},
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k_new", "cache_leftpad", "page_size")),
        **{"max_seqlen_k_new": 0, "causal": False, "window_size": NO_WINDOW, "attention_chunk": 0},
        **{"has_softcap": False, "num_splits": 0, "pack_gqa": None, "sm_margin": 0},
    },
    "flash_attn_combine": {"out_partial": REQUIRED, "lse_partial": REQUIRED, "out": None, "out_dtype": None},
}
OURS = {"out": None, "s_aux": None, "deterministic_batch": False}
SINKS = torch.tensor([0.5, -1.0, 2.0, -torch.inf])  # of the heads of `dense_tensors`


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackedModules]:
    """For calls that torch.compile sees."""
    with standing_in(PackedModules(bound=2**40), monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture
def modules(compiled: PackedModules, monkeypatch: pytest.MonkeyPatch) -> PackedModules:
    """On tensors that pass for CUDA tensors, as in eager mode on a GPU."""
    pass_for_cuda(monkeypatch)
    return compiled


def dense_tensors(seq_q: int = 5, seq_k: int = 9, *, head_dim: int = 64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seq_q)
    shapes = ((2, seq_q, 4, head_dim), (2, seq_k, 2, head_dim), (2, seq_k, 2, head_dim))
    return tuple(torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes)


def dense(q: Any, k: Any, v: Any, left: int | None, right: int | None, **options: Any) -> Any:
    found = reference.attention(q, k, v, reach=(left, right), compute_dtype=torch.float32, **options)
    return found.out.to(q.dtype), found.lse


def cache_with_its_reference(causal: bool) -> tuple[torch.Tensor, torch.Tensor, list[int], Callable[..., Any]]:
    """A cache with room for 9 keys, of which the sequences use 7 and 3, and what attention to it is."""
    q, k, v = dense_tensors(3, 9)
    lengths, right = [7, 3], 0 if causal else None

    def expected(begins: tuple[int, int] = (0, 0)) -> Any:
        rows = [slice(begin, end) for begin, end in zip(begins, lengths, strict=True)]
        parts = [
            dense(q[i : i + 1], k[i : i + 1, some], v[i : i + 1, some], None, right) for i, some in enumerate(rows)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    return q, torch.stack([k, v]), lengths, expected


# Signatures


@pytest.mark.parametrize("name", list(UPSTREAM))
def test_names_order_and_defaults_are_those_of_upstream(name: str) -> None:
    """What is ours comes behind, by keyword only."""
    parameters = inspect.signature(getattr(fa3, name)).parameters.values()
    theirs = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD}
    ours = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    assert list(theirs.items()) == list(UPSTREAM[name].items())
    assert ours == (OURS if name.startswith("flash_attn") and name != "flash_attn_combine" else {})


def test_everything_is_exported() -> None:
    assert sorted(fa3.__all__) == sorted(UPSTREAM)


# Dense


def test_dense(modules: PackedModules) -> None:
    q, k, v = dense_tensors()
    out, lse = fa3.flash_attn_func(q, k, v, 0.5, True, return_attn_probs=True)
    wanted, wanted_lse = dense(q, k, v, None, 0, scale=0.5)
    assert out.equal(wanted) and lse.equal(wanted_lse) and lse.shape == (2, 4, 5)
    into = torch.empty_like(q)
    returned = fa3.flash_attn_func(q, k, v, pack_gqa=True, deterministic=True, sm_margin=8, num_splits=3, out=into)
    assert returned is into and into.equal(dense(q, k, v, None, None)[0])
    assert modules.divided == [None, 3] and [size.parts for _, size, _ in modules.asked] == [0, 3]
    assert [family.layout for family, _, _ in modules.asked] == ["dense"] * 2


SCORES: list[dict[str, Any]] = [{"softcap": 1.5}, {"s_aux": SINKS}, {"softcap": 1.5, "s_aux": SINKS}]


def named_scores(given: dict[str, Any]) -> dict[str, Any]:
    """As fa3gen calls them."""
    return {"sinks" if name == "s_aux" else name: value for name, value in given.items()}


@pytest.mark.parametrize("given", SCORES)
def test_dense_sinks_and_caps(given: dict[str, Any], modules: PackedModules) -> None:
    """Of `flash_attn_func`, and of a cache that is used whole."""
    q, k, v = dense_tensors()
    named = named_scores(given)
    wanted, wanted_lse = dense(q, k, v, None, 0, **named)
    assert not wanted_lse.equal(dense(q, k, v, None, 0)[1])
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **given)
    assert out.equal(wanted) and lse.equal(wanted_lse)
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, k, v, causal=True, return_softmax_lse=True, **given)
    assert out.equal(wanted) and lse.equal(wanted_lse)
    assert {family.keywords for family, _, _ in modules.asked} == {tuple(named)[::-1]}


@pytest.mark.parametrize(("given", "named"), [({"softcap": 1.5}, "softcap"), ({"s_aux": SINKS}, "sinks")])
def test_where_no_module_has_sinks_or_a_cap(given: dict[str, Any], named: str) -> None:
    with pytest.raises(dispatch.NoKernel, match=f"computes fp16, head dim 64, no mask, {named};.* extends"):
        fa3.flash_attn_func(*(x.half() for x in dense_tensors()), **given)


def test_rows_that_are_not_contiguous_are_copied_as_upstream_does(modules: PackedModules) -> None:
    q, k, v = (x.transpose(1, 3).contiguous().transpose(1, 3) for x in dense_tensors())
    assert q.stride(-1) != 1 and fa3.flash_attn_func(q, k, v).equal(dense(q, k, v, None, None)[0])


WINDOWS: list[tuple[bool, Any, Mask]] = [
    (False, (-1, -1), NoMask()),
    (False, [-1, -1], NoMask()),
    (True, (-1, -1), CausalMask()),
    (False, (-1, 0), CausalMask()),
    (False, (3, 0), WindowMask(left=3, right=0)),
    (True, (3, 3), WindowMask(left=3, right=0)),
    (True, [3, -1], WindowMask(left=3, right=0)),
    (False, torch.tensor([3, 2]), WindowMask(left=3, right=2)),
    (False, (3, 2), WindowMask(left=3, right=2)),
    (False, (3, -1), WindowMask(left=3, right=WINDOW_MAX)),
    (False, (-1, 2), WindowMask(left=WINDOW_MAX, right=2)),
    # What reaches beyond 5 queries and 9 keys hides nothing.
    (False, (8, 4), NoMask()),
    (True, (8, 0), CausalMask()),
    (False, (7, 4), WindowMask(left=7, right=WINDOW_MAX)),
    (False, (8, 3), WindowMask(left=WINDOW_MAX, right=3)),
]


@pytest.mark.parametrize(("causal", "window_size", "mask"), WINDOWS)
def test_windows(causal: bool, window_size: Any, mask: Mask, modules: PackedModules) -> None:
    """-1 has no bound, and the diagonal ends at the last query and key; dense, packed, and with a cache."""
    q, k, v = dense_tensors()
    left, right = (None if side < 0 else side for side in window_size)
    wanted = dense(q, k, v, left, 0 if causal else right)[0]
    assert fa3.flash_attn_func(q, k, v, causal=causal, window_size=window_size).equal(wanted)
    rows, begins = [x.flatten(0, 1) for x in (q, k, v)], (offsets([5, 5]), offsets([9, 9]))
    out = fa3.flash_attn_varlen_func(*rows, *begins, 5, 9, causal=causal, window_size=window_size)
    assert out.view_as(q).equal(wanted)
    used = torch.tensor([9, 9], dtype=torch.int32)
    out = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=causal, window_size=window_size)
    assert out.equal(wanted)
    assert [family.mask for family, _, _ in modules.asked] == [mask, mask] and len(modules.calls) == 3


def test_the_same_bits_in_any_batch(modules: PackedModules) -> None:
    """A window that reaches beyond the longest sequence of a batch stays one: another batch has a longer one."""
    q, k, v = dense_tensors()
    rows, begins = [x.flatten(0, 1) for x in (q, k, v)], (offsets([5, 5]), offsets([9, 9]))
    used, window = torch.tensor([9, 9], dtype=torch.int32), {"window_size": (8, 4), "deterministic_batch": True}
    wanted = dense(q, k, v, None, None)[0]
    assert fa3.flash_attn_varlen_func(*rows, *begins, 5, 9, **window).view_as(q).equal(wanted)
    assert fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, **window).equal(wanted)
    found = [(family.mask, size.own_bits) for family, size, _ in modules.asked]
    assert set(found) == {(WindowMask(left=8, right=4), True)}
    assert {size.parts for _, size, _ in modules.asked} <= {0, 1}  # neither is another module
    fa3.flash_attn_func(q, k, v, deterministic_batch=True)
    assert modules.asked[-1][0].part_keys == 512 and not modules.asked[-1][1].parts
    for call in (fa3.flash_attn_func, fa3.flash_attn_with_kvcache):
        with pytest.raises(ArgumentError, match="num_splits is 2 beside deterministic_batch"):
            call(q, k, v, deterministic_batch=True, num_splits=2)
    with pytest.raises(ArgumentError, match="num_splits is 2 beside deterministic_batch"):
        fa3.flash_attn_varlen_func(*rows, *begins, 5, 9, deterministic_batch=True, num_splits=2)


# Packed


@pytest.mark.parametrize("causal", [False, True])
def test_varlen(causal: bool, modules: PackedModules) -> None:
    tensors = packed_tensors([3, 0, 5, 1], [4, 2, 9, 1])
    used = {
        "seqused_q": torch.tensor([2, 0, 5, 1], dtype=torch.int32),
        "seqused_k": torch.tensor([4, 1, 8, 0], dtype=torch.int32),
    }
    into = torch.empty_like(tensors[0])
    returned = fa3.flash_attn_varlen_func(
        *tensors, 5, 9, **used, softmax_scale=0.5, causal=causal, return_attn_probs=True, out=into
    )
    mask = CausalMask() if causal else NoMask()
    wanted, wanted_lse = packed_attention(*tensors, mask=mask, **used, scale=0.5)
    assert returned[0] is into and into.equal(wanted.to(torch.bfloat16)) and returned[1].equal(wanted_lse)
    assert returned[1].shape == (4, 9)
    assert [(family.layout, size.keys) for family, size, _ in modules.asked] == [("packed", 9)]


def test_offsets_and_lengths_need_not_be_contiguous(modules: PackedModules) -> None:
    """As with upstream, they are copied; what modules take is one word behind the other."""
    tensors = packed_tensors([3, 5], [4, 9])
    used = torch.tensor([3, 8], dtype=torch.int32)
    apart = [x.repeat_interleave(2)[::2] for x in (*tensors[3:], used)]
    assert all(x.stride() == (2,) for x in apart)
    out = fa3.flash_attn_varlen_func(*tensors[:3], *apart[:2], 5, 9, seqused_k=apart[2])
    wanted, _ = packed_attention(*tensors, mask=NoMask(), seqused_k=used)
    assert out.equal(wanted.to(torch.bfloat16)) and modules.options[0]["seqused_k"].is_contiguous()


def test_varlen_is_compiled_in_one_graph(compiled: PackedModules) -> None:
    def model(q: Any, *rest: Any) -> Any:
        out, lse = fa3.flash_attn_varlen_func(q + 1, *rest, 5, 9, causal=True, return_attn_probs=True)
        return out * 2, lse

    q, *rest = packed_tensors([3, 5], [4, 9])
    out, lse = torch.compile(model, fullgraph=True, backend="aot_eager")(q, *rest)
    wanted, wanted_lse = packed_attention(q + 1, *rest, mask=CausalMask())
    assert out.equal(wanted.to(torch.bfloat16) * 2) and lse.equal(wanted_lse)


@pytest.mark.parametrize("given", SCORES)
def test_sinks_and_caps_of_sequences(given: dict[str, Any], modules: PackedModules) -> None:
    """Packed ones, and those of a cache with lengths, whose queries are packed or not."""
    named = named_scores(given)
    tensors = packed_tensors([3, 0, 5, 1], [4, 2, 9, 0])
    out, lse = fa3.flash_attn_varlen_func(*tensors, 5, 9, causal=True, return_attn_probs=True, **given)
    wanted, wanted_lse = packed_attention(*tensors, mask=CausalMask(), **named)
    assert out.equal(wanted.to(torch.bfloat16)) and lse.equal(wanted_lse)
    assert not lse.equal(packed_attention(*tensors, mask=CausalMask())[1])
    q, (k, v), lengths, _ = cache_with_its_reference(True)
    used = torch.tensor(lengths, dtype=torch.int32)
    of_cache: dict[str, Any] = {"cache_seqlens": used, "causal": True, "return_softmax_lse": True, **given}
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, k, v, **of_cache)
    packed, packed_lse, *_ = fa3.flash_attn_with_kvcache(
        q.flatten(0, 1), k, v, cu_seqlens_q=offsets([3, 3]), max_seqlen_q=3, **of_cache
    )
    for i, length in enumerate(lengths):
        wanted, wanted_lse = dense(q[i : i + 1], k[i : i + 1, :length], v[i : i + 1, :length], None, 0, **named)
        assert out[i].equal(wanted[0]) and lse[i].equal(wanted_lse[0])
    assert packed.view_as(q).equal(out) and packed_lse.equal(lse.transpose(0, 1).flatten(1))
    assert {(family.layout, family.keywords) for family, _, _ in modules.asked} == {("packed", tuple(named)[::-1])}


def test_a_cache_is_compiled_in_one_graph(compiled: PackedModules) -> None:
    """With new keys, which are written to it."""

    def model(q: Any, *rest: Any, **options: Any) -> Any:
        return fa3.flash_attn_with_kvcache(q + 1, *rest, causal=True, return_softmax_lse=True, **options)[:2]

    q, (k, v), lengths, _ = cache_with_its_reference(True)
    options = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32) - 2}
    found, caches = [], []
    for call in (torch.compile(model, fullgraph=True, backend="aot_eager"), model):
        caches.append((k.clone(), v.clone()))
        found.append((*call(q, *caches[-1], k[:, :2], v[:, :2], **options), *caches[-1]))
    assert all(x.equal(y) for x, y in zip(*found, strict=True)) and not caches[0][0].equal(k)


PADDED = {"cache_leftpad": torch.tensor([2, 1], dtype=torch.int32)}
CHOSEN = {"cache_batch_idx": torch.tensor([1, 0], dtype=torch.int32)}


@pytest.mark.parametrize("page", [None, 3])
@pytest.mark.parametrize("given", [{}, PADDED, CHOSEN], ids=["plain", "padded", "chosen"])
def test_a_cache_is_compiled_with_sizes_that_may_vary(
    given: dict[str, Any], page: int | None, compiled: PackedModules
) -> None:
    """All of them do, with dynamic=True."""
    q, cache, lengths, _ = cache_with_its_reference(True)
    options: dict[str, Any] = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32), **given}
    k, v = cache
    if page is not None:
        options["page_table"] = torch.tensor([[3, 0, 5], [4, 1, 2]], dtype=torch.int32)
        k, v = (as_pages(x, page, options["page_table"]) for x in cache)

    def model(q: Any, k: Any, v: Any) -> Any:
        return fa3.flash_attn_with_kvcache(q + 1, k, v, causal=True, **options)

    found = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)(q, k, v)
    assert found.equal(model(q, k, v)) and found.isfinite().all()


# With a cache


@pytest.mark.parametrize("causal", [False, True])
def test_cache(causal: bool, modules: PackedModules) -> None:
    q, (k, v), lengths, expected = cache_with_its_reference(causal)
    used = torch.tensor(lengths, dtype=torch.int32)
    wanted, wanted_lse = expected()
    out, lse, *rest = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=causal, return_softmax_lse=True)
    assert out.equal(wanted) and lse.equal(wanted_lse) and lse.shape == (2, 4, 3)
    assert [x.shape for x in rest] == [(0,), (0,)]  # as upstream without splits
    into = torch.empty_like(q)
    options: dict[str, Any] = {"scheduler_metadata": torch.zeros(1), "num_splits": 1, "cu_seqlens_k_new": used}
    options |= {"rotary_seqlens": used, "rotary_interleaved": False}  # of no meaning without cos and sin
    assert fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=causal, out=into, **options) is into
    assert into.equal(wanted)
    assert [size.whole for _, size, _ in modules.asked] == [False, True]  # the others are ignored
    fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=causal, out=into, num_splits=3)
    assert into.equal(wanted) and modules.divided == [None, None, 12]  # of a tile for each of 2 x 2 kv heads
    fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=causal, num_splits=-1)
    assert modules.asked[-1][1].parts == 0  # as upstream
    fa3.flash_attn_with_kvcache(q, k, v, causal=causal, num_splits=1)
    assert modules.asked[-1][1].whole and modules.asked[-1][0].layout == "dense"
    fa3.flash_attn_with_kvcache(q, k, v, causal=causal, deterministic_batch=True)
    assert modules.asked[-1][0].part_keys == 512
    packed = fa3.flash_attn_with_kvcache(
        *(q.flatten(0, 1), k, v),
        cache_seqlens=used,
        cu_seqlens_q=offsets([3, 3]),
        max_seqlen_q=3,
        causal=causal,
        return_softmax_lse=True,
    )
    assert packed[0].view_as(q).equal(wanted) and packed[1].shape == (4, 6)
    padded = torch.tensor([2, 1], dtype=torch.int32)
    out = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, cache_leftpad=padded, causal=causal)
    assert out.equal(expected((2, 1))[0])


def test_cache_of_one_length_or_all_of_it(modules: PackedModules) -> None:
    q, (k, v), _, _ = cache_with_its_reference(True)
    for length in (4, 9, None):
        out = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=length, causal=True)
        assert out.equal(dense(q, k[:, :length], v[:, :length], None, 0)[0])
    assert [family.layout for family, _, _ in modules.asked] == ["packed", "dense"]


def layouts(cache: torch.Tensor) -> Iterator[torch.Tensor]:
    """K and V of a cache (2, batch, rows, heads, head dim) with other strides."""
    yield torch.cat([cache, cache], dim=2)[:, :, :9]  # the first rows of sequences of 18
    yield torch.cat([*cache], dim=-1).unflatten(-1, (2, -1)).movedim(-2, 0)  # K and V of a row side by side
    yield cache.transpose(2, 3).contiguous().transpose(2, 3)  # by head, then row


def test_caches_with_other_strides_are_not_copied(modules: PackedModules, monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache, lengths, expected = cache_with_its_reference(True)
    used = torch.tensor(lengths, dtype=torch.int32)
    addresses = []
    serve = fa3.attention_packed

    def watched(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
        addresses.append((k.data_ptr(), v.data_ptr()))
        return serve(q, k, v, *rest, **options)

    monkeypatch.setattr(fa3, "attention_packed", watched)
    for k, v in layouts(cache):
        assert fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True).equal(expected()[0])
        assert addresses[-1] == (k.data_ptr(), v.data_ptr())
    with pytest.raises(ValueError, match="need a contiguous last dimension"):
        fa3.flash_attn_with_kvcache(q, *(x.transpose(1, 3) for x in cache), cache_seqlens=used)


# Pages


@pytest.fixture
def paged(modules: PackedModules, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `fa3gen.attention_packed` is asked with a table; modules are stood in for as ever."""
    asked: list[dict[str, Any]] = []
    serve = fa3.attention_packed

    def watched(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
        if "page_table" in options:
            table, used = options["page_table"], options["seqused_k"]
            assert table.dtype == used.dtype == torch.int32 and table.stride(1) == 1
            asked.append({"page": k.shape[1], "k": k, **options})
        return serve(q, k, v, *rest, **options)

    monkeypatch.setattr(fa3, "attention_packed", watched)
    return asked


def as_pages(x: torch.Tensor, page: int, table: torch.Tensor) -> torch.Tensor:
    """A cache (batch, rows, ..) in pages by a table, NaN in all that is not."""
    pages = torch.full((int(table.max()) + 2, page, *x.shape[2:]), torch.nan, dtype=x.dtype)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, table.shape[1] * page - x.shape[1]), value=torch.nan)
    pages[table.long().flatten()] = padded.unflatten(1, (-1, page)).flatten(0, 1)
    return pages


@pytest.mark.parametrize("causal", [False, True])
def test_pages(causal: bool, paged: list[dict[str, Any]], modules: PackedModules) -> None:
    q, (k, v), lengths, expected = cache_with_its_reference(causal)
    wanted, wanted_lse = expected()
    table = torch.tensor([[3, 0, 5], [4, 1, 2]], dtype=torch.int32)
    k_pages, v_pages = (as_pages(x, 4, table) for x in (k, v))
    table[1, 1:] = -1  # which no length reaches
    options: dict[str, Any] = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32), "causal": causal}
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, k_pages, v_pages, page_table=table, return_softmax_lse=True, num_splits=3, **options
    )
    assert out.equal(wanted) and lse.equal(wanted_lse) and modules.divided == [12]
    wide = torch.cat([table, table], dim=1)[:, ::2]  # whose entries are not one behind the other
    assert wide[0].tolist() == [3, 5, 0]
    table = torch.tensor([[3, 9, 5, 9, 0, 9], [4, 9, 2, 9, 1, 9]], dtype=torch.int32)[:, ::2]
    into = torch.empty_like(q)
    pages = [as_pages(x, 4, table) for x in (k, v)]
    packed = {"cu_seqlens_q": offsets([3, 3]), "max_seqlen_q": 3, "out": into.flatten(0, 1)}
    fa3.flash_attn_with_kvcache(q.flatten(0, 1), *pages, page_table=table, **packed, **options)
    assert into.equal(wanted)
    assert [(asked["page"], asked["max_seqlen_k"], asked["max_seqlen_q"]) for asked in paged] == [(4, 12, 3)] * 2
    assert paged[0]["k"] is k_pages and len(modules.calls) == 2
    assert {(family.layout, family.page_rows) for family, _, _ in modules.asked} == {("paged", 4)}


@pytest.mark.parametrize("page", [None, 4])
def test_sequences_of_a_cache_may_be_chosen(page: int | None, paged: list[dict[str, Any]]) -> None:
    """Of a contiguous one, and rows of a table; with keys that begin behind the first row, each row is a page."""
    q, (k, v), lengths, expected = cache_with_its_reference(True)
    chosen, used = torch.tensor([2, 0], dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    cache = [torch.stack([x[1], torch.full_like(x[0], torch.nan), x[0]]) for x in (k, v)]
    given: dict[str, Any] = {"cache_batch_idx": chosen, "cache_seqlens": used, "causal": True}
    if page is not None:
        given["page_table"] = torch.tensor([[3, 0, 5], [6, 7, 8], [4, 1, 2]], dtype=torch.int32)
        cache = [as_pages(x, page, given["page_table"]) for x in cache]
    assert fa3.flash_attn_with_kvcache(q, *cache, **given).equal(expected()[0])
    padded = torch.tensor([2, 1], dtype=torch.int32)
    assert fa3.flash_attn_with_kvcache(q, *cache, cache_leftpad=padded, **given).equal(expected((2, 1))[0])
    assert [asked["page"] for asked in paged] == [page or 9, 1]
    assert {asked["max_seqlen_k"] for asked in paged} == {12 if page else 9}


def test_a_window_of_pages_reaches_as_far_as_the_table(paged: list[dict[str, Any]]) -> None:
    q, (k, v), lengths, _ = cache_with_its_reference(True)
    table = torch.tensor([[3, 0, 5], [4, 1, 2]], dtype=torch.int32)
    pages, used = [as_pages(x, 4, table) for x in (k, v)], torch.tensor(lengths, dtype=torch.int32)
    for left, window in ((10, (10, 0)), (11, None)):
        fa3.flash_attn_with_kvcache(
            q, *pages, page_table=table, cache_seqlens=used, causal=True, window_size=torch.tensor([left, 5])
        )
        assert paged[-1]["window"] == window and paged[-1]["causal"] == (window is None)


def test_a_cache_whose_sequences_are_no_rows_of_one_tensor_is_pages(paged: list[dict[str, Any]]) -> None:
    q, cache, lengths, expected = cache_with_its_reference(True)
    used = torch.tensor(lengths, dtype=torch.int32)
    k, v = cache.transpose(1, 2).contiguous().transpose(1, 2)
    assert fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True).equal(expected()[0])
    assert [(asked["page"], asked["k"].data_ptr()) for asked in paged] == [(9, k.data_ptr())]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["contiguous", "chosen", "pages"])
def test_new_keys_are_appended_and_attended_to(kind: str, packed: bool, paged: list[dict[str, Any]]) -> None:
    """As if they had been there, at the end of those of 7 and 3 keys that are not new."""
    q, (k, v), lengths, expected = cache_with_its_reference(True)
    new, table = [2, 1] if packed else [2, 2], torch.tensor([[3, 0, 5], [4, 1, 2]], dtype=torch.int32)
    old = torch.tensor(lengths, dtype=torch.int32) - torch.tensor(new, dtype=torch.int32)
    rows = [[x[i, length - n : length] for i, (length, n) in enumerate(zip(lengths, new, strict=True))] for x in (k, v)]
    given: dict[str, Any] = dict(zip("kv", (torch.cat(x) if packed else torch.stack(x) for x in rows), strict=True))
    given |= {"cu_seqlens_k_new": offsets(new)} if packed else {}
    cache = [x.clone() for x in (k, v)]
    for x in cache:
        for i, length in enumerate(old.tolist()):
            x[i, length:] = torch.nan
    if kind == "pages":
        cache, given["page_table"] = [as_pages(x, 4, table) for x in cache], table
    elif kind == "chosen":
        cache, given["cache_batch_idx"] = [x.flip(0) for x in cache], torch.tensor([1, 0], dtype=torch.int32)
    out = fa3.flash_attn_with_kvcache(q, *cache, **given, cache_seqlens=old, causal=True)
    assert out.equal(expected()[0]) and len(paged) == (kind != "contiguous")


def test_what_appending_needs(modules: PackedModules) -> None:
    """And that nothing is written where gradients would be lost."""
    q, (k, v), _, _ = cache_with_its_reference(True)
    used, new = torch.tensor([1, 2], dtype=torch.int32), k[:, :2].clone()
    for given, missing in (
        ({"k": new, "cache_seqlens": used}, "v"),
        ({"v": new, "cache_seqlens": used}, "k"),
        ({"k": new, "v": new}, "cache_seqlens"),
    ):
        with pytest.raises(ValueError, match=f"^{missing} is None; to append to the cache, pass k, v, and"):
            fa3.flash_attn_with_kvcache(q, k, v, **given)
    before = k.clone()
    for tensors in ((q, new.clone().requires_grad_()), (q.clone().requires_grad_(), new)):
        with pytest.raises(ValueError, match="requires grad; this kernel is forward only"):
            fa3.flash_attn_with_kvcache(tensors[0], k, v, tensors[1], new, cache_seqlens=used)
    assert k.equal(before)
    out = fa3.flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=7)
    assert k[:, 7:9].equal(new) and out.equal(dense(q, k, v, None, None)[0])


# Metadata and merging


def test_metadata_is_a_zero_of_the_caller_s() -> None:
    used = torch.tensor([3, 4], dtype=torch.int32)
    one, two = (fa3.get_scheduler_metadata(2, 1, 9, 4, 2, 64, used, causal=True) for _ in range(2))
    assert one.tolist() == [0] and one.dtype == torch.int32 and one is not two


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have generated modules run on the CPU model."""
    monkeypatch.setattr(combine_ops, "module_at", functools.cache(lambda path: fa3gen.load(path.stem, on="cpu")))


@pytest.mark.usefixtures("on_cpu")
def test_combine_merges_parts_of_the_keys() -> None:
    """Three parts of 9 keys, one of them without a key for the second sequence, whose O there is NaN."""
    q, k, v = (x.float() for x in dense_tensors())
    bounds = [(slice(0, 4), slice(0, 4)), (slice(4, 9), slice(4, 6)), (slice(9, 9), slice(9, 9))]
    outs, lses = torch.full((3, 2, 5, 4, 64), torch.nan), torch.full((3, 2, 5, 4), -torch.inf)
    for part, slices in enumerate(bounds[:2]):
        for i, keys in enumerate(slices):
            out, lse = dense(q[i : i + 1], k[i : i + 1, keys], v[i : i + 1, keys], None, None)
            outs[part, i], lses[part, i] = out[0], lse[0].T
    out, lse = fa3.flash_attn_combine(outs, lses)
    for i, keys in enumerate((slice(0, 9), slice(0, 6))):
        wanted, wanted_lse = dense(q[i : i + 1], k[i : i + 1, keys], v[i : i + 1, keys], None, None)
        torch.testing.assert_close(out[i], wanted[0])
        torch.testing.assert_close(lse[i], wanted_lse[0].T)
    assert lse.stride(1) == 1 and out.dtype == torch.float32
    half = fa3.flash_attn_combine(outs, lses, out_dtype=torch.float16)[0]
    assert half.dtype == torch.float16 and half.equal(out.half())
    into = torch.empty(2, 5, 4, 64, dtype=torch.bfloat16)
    assert fa3.flash_attn_combine(outs, lses, into)[0] is into and into.equal(out.bfloat16())
    nothing, none = fa3.flash_attn_combine(outs[2:], lses[2:])
    assert nothing.eq(0).all() and none.eq(-torch.inf).all()
    for changes, message in (
        ({"out_partial": outs.half()}, "out_partial has dtype torch.float16; it needs to be torch.float32"),
        ({"lse_partial": lses.mT}, r"lse_partial has shape \(3, 2, 4, 5\); it needs to be \(3, 2, 5, 4\)"),
        ({"out": into, "out_dtype": torch.float16}, "out has dtype torch.bfloat16, and out_dtype is torch.float16"),
    ):
        arguments: dict[str, Any] = {"out_partial": outs, "lse_partial": lses, **changes}
        with pytest.raises((TypeError, ValueError), match=message):
            fa3.flash_attn_combine(**arguments)


# What is not served

TENSOR = torch.zeros(2)
EVERYWHERE = {"qv": TENSOR, "q_descale": TENSOR, "k_descale": TENSOR, "v_descale": TENSOR}
OF_A_CACHE = dict.fromkeys(("rotary_cos", "rotary_sin"), TENSOR)


def each_function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[Callable[..., Any]]:
    """FA3's functions on (batch, seq, heads, head dim), of which the packed one takes one sequence; a cache's last."""
    begins = offsets([q.shape[1]]), offsets([k.shape[1]])
    packed = q[0], k[0], v[0], *begins, q.shape[1], k.shape[1]
    return [
        functools.partial(fa3.flash_attn_func, q, k, v),
        functools.partial(fa3.flash_attn_varlen_func, *packed),
        functools.partial(fa3.flash_attn_with_kvcache, q, k, v, cache_seqlens=3),
    ]


@pytest.mark.parametrize(("name", "value"), [*EVERYWHERE.items(), *OF_A_CACHE.items()])
def test_what_is_not_served_names_the_argument_and_the_way_out(name: str, value: Any, modules: PackedModules) -> None:
    q, k, v = dense_tensors()
    said = r"a tensor of shape \(2,\)" if value is TENSOR else value
    for function in each_function(q, k, v)[0 if name in EVERYWHERE else 2 :]:
        with pytest.raises(NotImplementedError, match=rf"^{name} is {said}, which fa3gen does not serve; \w+ \w+"):
            function(**{name: value})
    assert modules.calls == []


def test_a_cache_of_8_bits(modules: PackedModules) -> None:
    """Its factors go with it, contiguous or packed, all of it in use or not; dense tensors of 8 bits are no cache."""
    q, k, v = dense_tensors()
    narrow, one = [x.to(torch.float8_e4m3fn) for x in (k, v)], torch.ones(len(k), k.shape[2])
    used = torch.full((len(k),), k.shape[1], dtype=torch.int32)
    factors = {"k_descale": one, "v_descale": one / 2}
    for options in ({"cache_seqlens": used}, {}):
        out = fa3.flash_attn_with_kvcache(q, *narrow, **options, **factors)
        assert out.shape == q.shape and modules.asked[-1][0].kv_dtype == "e4m3"
        assert {name: modules.options[-1][name] for name in factors} == factors
    assert {family.mask for family, _, _ in modules.asked} == {NoMask()}
    fa3.flash_attn_with_kvcache(q[:, :1], *narrow, cache_seqlens=used, **factors)
    assert modules.asked[-1][0].mask == CausalMask()  # which hides nothing of one query
    fa3.flash_attn_with_kvcache(q[:, :1], *narrow, cache_seqlens=used, deterministic_batch=True, **factors)
    assert modules.asked[-1][0].mask == NoMask()  # as for several
    packed = [x.flatten(0, 1) for x in (q, *narrow)]
    begins = offsets([q.shape[1]] * len(q)), offsets([k.shape[1]] * len(k))
    fa3.flash_attn_varlen_func(*packed, *begins, q.shape[1], k.shape[1], **factors)
    assert {name: modules.options[-1][name] for name in factors} == factors
    with pytest.raises(
        NotImplementedError, match="and q torch.bfloat16; pass q, k and v all in torch.float8_e4m3fn, or"
    ):
        fa3.flash_attn_func(q, *narrow)


def test_queries_of_other_8_bits_are_refused(modules: PackedModules) -> None:
    """Those that are served: test_eight_bit_calls and test_eight_bit_packed_calls."""
    for function in each_function(*(x.to(torch.float8_e5m2) for x in dense_tensors())):
        with pytest.raises(
            NotImplementedError, match="^q has dtype torch.float8_e5m2; pass q, k and v all in float8_e4m3fn, or"
        ):
            function()
    assert modules.calls == []


def test_every_refusal_is_tested() -> None:
    assert {*EVERYWHERE, *OF_A_CACHE} == set(fa3._INSTEAD)


def test_gradients_are_refused_with_the_way_out() -> None:
    q, k, v = (x.requires_grad_() for x in dense_tensors())
    for function in each_function(q, k, v):
        with pytest.raises(ValueError, match="requires grad; this kernel is forward only: call it under torch.no_grad"):
            function()


def test_numbers_that_make_no_sense_are_told_by_their_names_here(modules: PackedModules) -> None:
    for function in each_function(*dense_tensors()):
        for wrong in (-1.0, float("inf"), "50"):
            with pytest.raises(ArgumentError, match=f"^softcap is {wrong!r}; it needs to be .*, or 0.0 for no cap$"):
                function(softcap=wrong)
        for window in ((5, 0, 1), (5,), 5):
            with pytest.raises(
                ArgumentError, match=r"^window_size is .*; it needs to be \(left, right\), how many keys"
            ):
                function(window_size=window)
        assert function(softcap=0).shape == function(softcap=0.0).shape
    assert not any(family.softcap for family, _, _ in modules.asked)


def test_longest_sequences_below_none_are_refused(modules: PackedModules) -> None:
    """Before anything is written to a cache."""
    q, k, v, begins_q, begins_k = packed_tensors([3, 5], [4, 9])
    for longest, name in (((-5, 9), "max_seqlen_q"), ((5, -9), "max_seqlen_k")):
        for options in ({}, {"window_size": (3, 0)}, {"attention_chunk": 2}):
            with pytest.raises(ArgumentError, match=f"^{name} is -"):
                fa3.flash_attn_varlen_func(q, k, v, begins_q, begins_k, *longest, **options)
    q, (k, v), _, _ = cache_with_its_reference(True)
    new, before = k[:, :2] + 1, k.clone()
    packed: dict[str, Any] = {"cu_seqlens_q": offsets([3, 3]), "max_seqlen_q": -3, "cache_seqlens": 2}
    for appended in ({}, {"k": new, "v": new}):
        with pytest.raises(ArgumentError, match="^max_seqlen_q is -3"):
            fa3.flash_attn_with_kvcache(q.flatten(0, 1), k, v, **appended, **packed)
    assert k.equal(before)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cache_of_another_batch_is_told_by_the_names_of_the_call(device: str, modules: PackedModules) -> None:
    """And what says how many keys each sequence has, where they begin, and which sequence of the cache it is."""
    q, (k, v), lengths, _ = cache_with_its_reference(True)
    q, k, v, used = (x.to(device) for x in (q, k, v, torch.tensor(lengths, dtype=torch.int32)))
    three = [torch.cat([x, x[:1]]) for x in (k, v)]
    packed = {"q": q.flatten(0, 1), "cu_seqlens_q": offsets([3, 3]).to(device), "max_seqlen_q": 3}
    more = torch.cat([used, used])
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            dict(zip(("k_cache", "v_cache"), three, strict=True)),
            "k_cache has batch 3, q 2; they need the same, or cache_",
        ),
        (
            {**dict(zip(("k_cache", "v_cache"), three, strict=True)), **packed},
            "k_cache has batch 3, cu_seqlens_q 2; they need the same, or cache_batch_idx has to say",
        ),
        ({"cache_batch_idx": more}, "cache_batch_idx has batch 4, q 2; they need the same$"),
        ({"cache_batch_idx": used.long()}, "cache_batch_idx has dtype torch.int64; it needs to be torch.int32"),
        ({"cache_seqlens": more}, r"cache_seqlens is \(4,\), torch.int32; it needs to be \(2,\), torch.int32"),
        ({"cache_seqlens": used.long()}, r"cache_seqlens is \(2,\), torch.int64; it needs to be \(2,\), torch.int32"),
        ({"cache_leftpad": used.long()}, r"cache_leftpad is \(2,\), torch.int64; it needs to be \(2,\), torch.int32"),
    ]
    for changes, message in wrong:
        with pytest.raises(ArgumentError, match=f"^{message}"):
            fa3.flash_attn_with_kvcache(**{"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": used, **changes})
    with pytest.raises(ArgumentError, match="^k_cache has batch 3, q 2"):
        fa3.flash_attn_with_kvcache(q, *three)
    chosen = torch.tensor([2, 0], dtype=torch.int32, device=device)
    if device == "cpu":
        assert fa3.flash_attn_with_kvcache(q, *three, cache_seqlens=used, cache_batch_idx=chosen).shape == q.shape


def test_tables_and_lengths_of_other_dtypes_show_without_a_gpu(compiled: PackedModules) -> None:
    q, (k, v), lengths, _ = cache_with_its_reference(True)
    table, used = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)

    def call(*tensors: torch.Tensor, table: torch.Tensor, used: torch.Tensor) -> Any:
        return fa3.flash_attn_with_kvcache(*tensors, page_table=table, cache_seqlens=used)

    traced = torch.compile(call, fullgraph=True, backend="aot_eager")
    wrong: list[tuple[torch.Tensor, torch.Tensor, str]] = [
        (table.long(), used, "page_table has dtype torch.int64; it needs to be torch.int32"),
        (table, used.long(), "cache_seqlens is .*torch.int64; it needs to be"),
    ]
    for table, used, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            call(*(x.to("meta") for x in (q, k, v)), table=table.to("meta"), used=used.to("meta"))
        with pytest.raises(Exception, match=f"{message}|[Oo]bserved exception"):
            traced(q, k, v, table=table, used=used)
    assert compiled.calls == []


# The README


def test_the_calls_shown_in_the_readme(modules: PackedModules, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    q, k, v, cu_seqlens_q, cu_seqlens_k = packed_tensors([3, 5], [4, 9])
    names: dict[str, Any] = {"fa3gen": fa3gen, "q": q, "k": k, "v": v, "lengths_k": cu_seqlens_k.diff()}
    names |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": 5, "max_seqlen_k": 9}
    codes = [code for code in shown if "attention_packed.explain" in code or "flash_attn_interface" in code]
    for code in codes:
        exec(code, names)
    assert len(codes) == 2 and "made up" in capsys.readouterr().out
    assert names["out"].shape == q.shape and names["lse"].shape == (4, 8) and len(modules.calls) == 3


@pytest.mark.parametrize("name", [*UPSTREAM, *fa3._INSTEAD])
def test_the_readme_names_every_function_and_what_is_not_served(name: str) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("### A drop-in for FA3's functions")[2]
    assert f"`{name}`" in text.partition("### Limits")[0]


# On the CPU model


def test_generated_modules_serve_these_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the committed table, lengths in use and a cache whose rows are two heads apart."""
    calls.stretches.clear()
    monkeypatch.setattr(calls, "module_at", lambda path: fa3gen.load(path.stem, on="cpu"))
    q, k, v = dense_tensors(3, 40, head_dim=256)
    used = torch.tensor([17, 33], dtype=torch.int32)
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True, return_softmax_lse=True)
    calls.stretches.clear()
    for i, length in enumerate(used.tolist()):
        wanted, wanted_lse = dense(q[i : i + 1], k[i : i + 1, :length], v[i : i + 1, :length], None, 0)
        torch.testing.assert_close(out[i], wanted[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[i], wanted_lse[0], rtol=1e-4, atol=1e-4)


# Modules that are missing


def test_what_is_missing_is_rendered_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's functions have no argument for it."""
    asked: list[Any] = []

    def attention(q: torch.Tensor, *rest: Any, render: bool, **options: Any) -> Any:
        asked.append(render)
        return q

    for name in ("attention", "attention_packed"):
        monkeypatch.setattr(fa3, name, attention)
    q, k, v = dense_tensors()
    begins, used = offsets([9]), torch.tensor([9, 9], dtype=torch.int32)
    for render in (False, True):
        monkeypatch.setattr(fa3, "RENDER", render)
        fa3.flash_attn_func(q, k, v)
        fa3.flash_attn_varlen_func(q[0], k[0], v[0], begins, begins, 9, 9)
        fa3.flash_attn_with_kvcache(q, k, v)
        fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used)
    assert asked == [False] * 4 + [True] * 4
