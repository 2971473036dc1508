"""FlashAttention-3's functions: their signatures, what they return, and what they refuse; without a GPU.

Modules are stood in for by functions that compute the reference; small calls run generated ones on the CPU model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from packed_modules import PackedModules, offsets, packed_attention, packed_tensors
from rendering import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3gen
from fa3gen import flash_attn_interface as fa3
from fa3gen.run import calls, dispatch
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
OURS = {"out": None, "s_aux": None}
SINKS = torch.tensor([0.5, -1.0, 2.0, -torch.inf])  # of the heads of `dense_tensors`


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackedModules]:
    """On tensors that pass for CUDA tensors, as in eager mode on a GPU."""
    stand_in = PackedModules(bound=2**40)
    monkeypatch.setattr(dispatch, "choose", stand_in.choose)
    monkeypatch.setattr(calls, "module_at", stand_in.module_at)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 0}))
    fa3._kept_offsets.cache_clear()
    calls.stretches.clear()
    yield stand_in
    calls.stretches.clear()
    torch._dynamo.reset()


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
    returned = fa3.flash_attn_func(q, k, v, pack_gqa=True, deterministic=True, sm_margin=8, num_splits=0, out=into)
    assert returned is into and into.equal(dense(q, k, v, None, None)[0])
    assert [family.layout for family, _, _ in modules.asked] == ["dense"] * 2


@pytest.mark.parametrize("given", [{"softcap": 1.5}, {"s_aux": SINKS}, {"softcap": 1.5, "s_aux": SINKS}])
def test_dense_sinks_and_caps(given: dict[str, Any], modules: PackedModules) -> None:
    """Of `flash_attn_func`, and of a cache that is used whole."""
    q, k, v = dense_tensors()
    named = {"sinks" if name == "s_aux" else name: value for name, value in given.items()}
    wanted, wanted_lse = dense(q, k, v, None, 0, **named)
    assert not wanted_lse.equal(dense(q, k, v, None, 0)[1])
    out, lse = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, **given)
    assert out.equal(wanted) and lse.equal(wanted_lse)
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, k, v, causal=True, return_softmax_lse=True, **given)
    assert out.equal(wanted) and lse.equal(wanted_lse)
    assert {family.keywords for family, _, _ in modules.asked} == {tuple(named)[::-1]}


@pytest.mark.parametrize(("given", "named"), [({"softcap": 1.5}, "softcap"), ({"s_aux": SINKS}, "sinks")])
def test_where_no_module_has_sinks_or_a_cap(given: dict[str, Any], named: str) -> None:
    with pytest.raises(dispatch.NoKernel, match=f"computes bf16, head dim 64, no mask, {named};.* extends"):
        fa3.flash_attn_func(*dense_tensors(), **given)


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
    assert [(family.layout, size.keys) for family, size, _ in modules.asked] == [("packed", 4)]


def test_varlen_is_compiled_in_one_graph(modules: PackedModules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "choose", modules.choose)
    monkeypatch.setattr(calls, "module_at", modules.module_at)

    def model(q: Any, *rest: Any) -> Any:
        out, lse = fa3.flash_attn_varlen_func(q + 1, *rest, 5, 9, causal=True, return_attn_probs=True)
        return out * 2, lse

    q, *rest = packed_tensors([3, 5], [4, 9])
    out, lse = torch.compile(model, fullgraph=True, backend="aot_eager")(q, *rest)
    wanted, wanted_lse = packed_attention(q + 1, *rest, mask=CausalMask())
    assert out.equal(wanted.to(torch.bfloat16) * 2) and lse.equal(wanted_lse)


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
    assert fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=causal, out=into, **options) is into
    assert into.equal(wanted)
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
    yield cache.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :9]  # by row, then sequence: not one row apart
    yield torch.cat([cache, cache], dim=2)[:, :, :9]  # the first rows of sequences of 18
    yield torch.cat([*cache], dim=-1).unflatten(-1, (2, -1)).movedim(-2, 0)  # K and V of a row side by side
    yield cache.transpose(2, 3).contiguous().transpose(2, 3)  # by head, then row


def test_caches_with_other_strides_are_not_copied(modules: PackedModules, monkeypatch: pytest.MonkeyPatch) -> None:
    q, cache, lengths, expected = cache_with_its_reference(True)
    used = torch.tensor(lengths, dtype=torch.int32)
    first, *others = layouts(cache)
    addresses = []
    serve = fa3.attention_packed

    def watched(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
        addresses.append((k.data_ptr(), v.data_ptr()))
        return serve(q, k, v, *rest, **options)

    monkeypatch.setattr(fa3, "attention_packed", watched)
    for k, v in others:
        assert fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, causal=True).equal(expected()[0])
        assert addresses[-1] == (k.data_ptr(), v.data_ptr())
    k, v = first
    with pytest.raises(NotImplementedError, match=r"k_cache has strides .* pass k_cache.contiguous\(\)"):
        fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used)
    with pytest.raises(NotImplementedError, match="they need the same sequences, equally many rows apart"):
        fa3.flash_attn_with_kvcache(q, cache[0], others[0][1], cache_seqlens=used)
    with pytest.raises(ValueError, match="need a contiguous last dimension"):
        fa3.flash_attn_with_kvcache(q, *(x.transpose(1, 3) for x in cache), cache_seqlens=used)


def test_offsets_are_made_once_for_a_stream_and_not_kept_of_a_capture(
    modules: PackedModules, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = dense_tensors()[0]
    first = fa3._even_offsets(2, 5, q)
    assert fa3._even_offsets(2, 5, q) is first
    assert fa3._even_offsets(3, 0, q).tolist() == [0] * 4
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": 7}))
    other = fa3._even_offsets(2, 5, q)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = fa3._even_offsets(2, 5, q)
    assert len({id(x) for x in (first, other, captured)}) == 3 and other.tolist() == captured.tolist() == [0, 5, 10]
    kept = fa3._kept_offsets.cache_info().currsize
    with FakeTensorMode():
        fa3._even_offsets(2, 6, torch.empty(1))
    assert fa3._kept_offsets.cache_info().currsize == kept


# Metadata and merging


def test_metadata_is_a_zero_of_the_caller_s() -> None:
    used = torch.tensor([3, 4], dtype=torch.int32)
    one, two = (fa3.get_scheduler_metadata(2, 1, 9, 4, 2, 64, used, causal=True) for _ in range(2))
    assert one.tolist() == [0] and one.dtype == torch.int32 and one is not two


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
EVERYWHERE |= {"attention_chunk": 64, "num_splits": 2}
OF_PACKED = {"softcap": 30.0, "s_aux": TENSOR}
OF_A_CACHE = dict.fromkeys(("k", "v", "rotary_cos", "rotary_sin", "rotary_seqlens"), TENSOR)
OF_A_CACHE |= {"cache_batch_idx": TENSOR, "page_table": TENSOR}


@pytest.mark.parametrize(("name", "value"), [*EVERYWHERE.items(), *OF_PACKED.items(), *OF_A_CACHE.items()])
def test_what_is_not_served_names_the_argument_and_the_way_out(name: str, value: Any, modules: PackedModules) -> None:
    q, k, v = dense_tensors()
    used = torch.tensor([9, 9], dtype=torch.int32)
    functions: list[Callable[..., Any]] = [
        lambda **given: fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=used, **given)
    ]
    if name in EVERYWHERE:
        functions.append(lambda **given: fa3.flash_attn_func(q, k, v, **given))
    if name in EVERYWHERE or name in OF_PACKED:
        functions.append(lambda **given: fa3.flash_attn_varlen_func(q[0], k[0], v[0], used, used, 9, 9, **given))
    said = r"a tensor of shape \(2,\)" if value is TENSOR else value
    for function in functions:
        with pytest.raises(NotImplementedError, match=rf"^{name} is {said}, which fa3gen does not serve; \w+ \w+"):
            function(**{name: value})
    assert modules.calls == []


def test_every_refusal_is_tested() -> None:
    assert {*EVERYWHERE, *OF_PACKED, *OF_A_CACHE} == set(fa3._INSTEAD)


def test_gradients_are_refused_with_the_way_out() -> None:
    q, k, v = (x.requires_grad_() for x in dense_tensors())
    used = offsets([5, 5])
    for function in (
        lambda: fa3.flash_attn_func(q, k, v),
        lambda: fa3.flash_attn_varlen_func(q[0], k[0], v[0], used, used, 5, 5),
        lambda: fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=3),
    ):
        with pytest.raises(ValueError, match="requires grad; this kernel is forward only: call it under torch.no_grad"):
            function()


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
    assert f"`{'rotary_*' if name.startswith('rotary') else name}`" in text.partition("### Limits")[0]


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
