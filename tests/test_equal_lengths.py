"""Dense tensors taken as packed sequences of one length, and where such sequences begin; without a GPU.

The modules are stood in for by functions that compute the reference; small calls run generated ones on the CPU model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cuda.bindings
import pytest
import torch
from packed_modules import PackedModules
from pretended_cuda import GOOD, PretendedCuda
from rendering import CHECKOUT, ROOT, source, variants
from stand_ins import pass_for_cuda, standing_in
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3gen
from fa3gen import flash_attn_interface as fa3
from fa3gen.design.family import Family
from fa3gen.design.masks import reach
from fa3gen.run import calls, dispatch, equal_lengths
from fa3gen.run.dispatch import NO_LIMIT, ArgumentError, Choice, NoKernel, NotPossible, NotRendered, Size
from fa3gen.verify import reference

HEADS, HEADS_KV, DIM = 6, 2, 64
SINKS = torch.tensor([0.5, -1.0, 2.0, -torch.inf, 0.0, 30.0])
SCORES: dict[str, dict[str, Any]] = {
    "window": {"window": (3, 1)},
    "sinks": {"sinks": SINKS, "causal": True},
    "cap": {"softcap": 2.0},
    "all": {"window": (4, 0), "sinks": SINKS, "softcap": 2.0, "causal": True, "scale": 0.3},
}
EVERY_SCORE = pytest.mark.parametrize("options", SCORES.values(), ids=SCORES)
BOTH_WAYS = pytest.mark.parametrize("way", ["eager", "modules"])


class Modules(PackedModules):
    """A dense module and a packed one, which is chosen wherever it may be."""

    def choose(self, family: Family, size: Size, *, lse: bool, workspace: Any) -> Choice:
        packed = size.in_rows and dispatch.may_be_packed(family, size.queries, size.parts)
        found = super().choose(family._replace(layout="packed") if packed else family, size, lse=lse, workspace=None)
        return replace(found, file=Path("packed.py" if packed else "dense.py"), as_packed=packed)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    with standing_in(Modules(bound=2**40), monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture
def eager(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> Modules:
    pass_for_cuda(monkeypatch)
    return modules


def tensors(seq_q: int = 5, seq_k: int = 9, batch: int = 3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seq_q)
    shapes = (batch, seq_q, HEADS, DIM), *[(batch, seq_k, HEADS_KV, DIM)] * 2
    return tuple(torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes)


def expected(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = dispatch.mask_of(causal, window)
    found = reference.attention(q, k, v, reach=reach(mask), compute_dtype=torch.float32, **options)
    return found.out.to(q.dtype), found.lse


def agree(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Up to rounding: the reference takes a whole batch, what stands in for a module sequence after sequence."""
    torch.testing.assert_close(found, wanted)
    return True


# What is returned


@BOTH_WAYS
@EVERY_SCORE
def test_calls_with_scores_of_their_own_may_be_packed(
    way: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    modules: Modules = request.getfixturevalue(way)
    for seq_q in (1, 5, 16, 17, 5):
        q, k, v = tensors(seq_q, 20)
        wanted, wanted_lse = expected(q, k, v, **options)
        out, lse = fa3gen.attention(q, k, v, **options, return_lse=True)
        assert agree(out, wanted) and out.is_contiguous()
        assert agree(lse, wanted_lse) and lse.shape == (3, HEADS, seq_q)
        assert agree(fa3gen.attention(q, k, v, **options), wanted)
        into = torch.empty_like(out)
        assert fa3gen.attention(q, k, v, **options, out=into) is into and agree(into, wanted)
    assert modules.calls == ["packed"] * 15
    for causal in (False, True):
        fa3gen.attention(*tensors(5, 20), causal=causal)
    assert modules.calls[15:] == ["dense"] * 2


@EVERY_SCORE
def test_only_few_queries_are_copied(eager: Modules, options: dict[str, Any]) -> None:
    _, k, v = tensors(5, 20)
    for queries, module in ((16, "packed"), (17, "dense")):
        by_head = torch.randn(3, HEADS, queries, DIM).bfloat16().transpose(1, 2)
        assert agree(fa3gen.attention(by_head, k, v, **options), expected(by_head, k, v, **options)[0])
        fa3gen.attention(by_head.contiguous(), k, v, **options)
        assert eager.calls[-2:] == [module, "packed"]


@EVERY_SCORE
def test_tensors_may_lie_anywhere(eager: Modules, options: dict[str, Any]) -> None:
    """Parts of one tensor of q, k and v are rows equally far apart; q may be no rows at all."""
    whole = torch.randn(3, 7, HEADS + 2 * HEADS_KV, DIM).bfloat16()
    q, k, v = whole.split([HEADS, HEADS_KV, HEADS_KV], dim=2)
    by_head = torch.randn(3, HEADS, 4, DIM).bfloat16().transpose(1, 2)
    for queries in (q, q[:, -1:], q[:, ::3], by_head):
        into = torch.empty(3, queries.shape[1], 2 * HEADS, DIM, dtype=torch.bfloat16)[:, :, ::2]
        fa3gen.attention(queries, k, v, **options, out=into)
        assert agree(into, expected(queries, k, v, **options)[0])
    assert set(eager.calls) == {"packed"}


def test_what_is_no_rows_of_one_tensor_is_read_as_it_is(eager: Modules) -> None:
    q, k, v = tensors(4, 8)
    by_head, longer = k.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([v, v], dim=1)[:, :8]
    across = torch.empty(3, HEADS, 4, DIM, dtype=torch.bfloat16).transpose(1, 2)
    given: list[tuple[Any, Any, dict[str, Any], str]] = [
        (k, v, {}, "packed"),
        (by_head, v, {}, "dense"),
        (k, longer, {}, "dense"),
        (k, v, {"out": across}, "dense"),
        (k, v, {"deterministic_batch": True}, "dense"),
        (k, v, {}, "packed"),
    ]
    for keys, values, options, module in given:
        out = fa3gen.attention(q, keys, values, window=(3, 0), **options)
        assert agree(out, expected(q, keys, values, window=(3, 0))[0]) and eager.calls[-1] == module
    assert fa3gen.attention(q[:1], by_head[:1], longer[:1], window=(3, 0)).shape == (1, 4, HEADS, DIM)
    assert eager.calls[-1] == "packed"  # of one sequence the rows are, however far apart another's would be
    fa3gen.attention(q, k, v)
    fa3gen.attention(q, k, v, causal=True)
    fa3gen.attention(q, k, v, window=(-1, -1))
    assert eager.calls[-3:] == ["dense"] * 3  # such keys are split by modules for dense tensors


def test_more_tiles_of_keys_than_modules_count(eager: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(4, 8)
    # 3 sequences of 4 positions and one that may begin, 2 heads, 1 tile of keys.
    for most, module in ((2**30, "packed"), (29, "dense"), (30, "packed")):
        monkeypatch.setattr(equal_lengths, "MOST_STEPS", most)
        fa3gen.attention(q, k, v, window=(3, 0))
        assert eager.calls[-1] == module


def test_modules_count_as_far_as_is_said() -> None:
    for stem, variant in variants().items():
        spec = variant.spec
        # Dense tensors have k and v of q's dtype, and no parts of so many keys in modules of packed sequences.
        split = getattr(spec, "split", None)
        if split and split.keys is None and spec.problem.layout == "packed" and spec.kv.dtype is None:
            assert f"MOST_STEPS = 2**{equal_lengths.MOST_STEPS.bit_length() - 1}  #" in source(stem)
            assert spec.tile.kv >= equal_lengths.LEAST_KEYS
            assert spec.tile.q // spec.tile.pack_heads >= equal_lengths.LEAST_POSITIONS


@BOTH_WAYS
def test_shapes_that_do_not_go_together(way: str, request: pytest.FixtureRequest) -> None:
    """Once packed they would."""
    request.getfixturevalue(way)
    q, k, v = tensors(4, 8)
    wrong: list[tuple[Any, Any, Any, str]] = [
        (k[:2], v, None, r"k has shape \(2, 8, 2, 64\), q \(3, 4, 6, 64\); they need the same batch"),
        (k, v[:, :4].contiguous(), None, r"v has shape \(3, 4, 2, 64\), k .*; they may only differ in the head dim"),
        (k, v, torch.empty(4, 3, HEADS, DIM).bfloat16(), r"out has shape \(4, 3, .*; it needs to be \(3, 4, 6, 64\)"),
        (k, v, torch.empty(12, HEADS, DIM).bfloat16(), r"out has shape \(12, 6, 64\); it needs to be"),
    ]
    for keys, values, out, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            fa3gen.attention(q, keys, values, window=(3, 0), out=out)


def test_nothing_to_compute(eager: Modules) -> None:
    for batch, seq_q in ((0, 3), (2, 0)):
        q, k, v = tensors(seq_q, 8, batch)
        out, lse = fa3gen.attention(q, k, v, window=(3, 0), return_lse=True)
        assert out.shape == (batch, seq_q, HEADS, DIM) and lse.shape == (batch, HEADS, seq_q)


def test_each_choice_is_made_once(eager: Modules) -> None:
    for _ in range(2):
        for seq_k in (9, 12):
            fa3gen.attention(*tensors(5, seq_k), window=(3, 0))
    assert len(eager.asked) == 1


# Operators


@EVERY_SCORE
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("return_lse", [False, True])
def test_operators_are_sound(modules: Modules, batch: int, return_lse: bool, options: dict[str, Any]) -> None:
    q, k, v = tensors(2, 9, batch)
    options = {**options, "window": list(options.get("window", (5, 0))), "return_lse": return_lse}
    torch.library.opcheck(torch.ops.fa3gen.attention_forward.default, (q, k, v), options)
    torch.library.opcheck(torch.ops.fa3gen.attention_forward_out.default, (q, k, v, torch.empty_like(q)), options)
    assert set(modules.calls) == {"packed"}


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(modules: Modules, dynamic: bool) -> None:
    def model(q: Any, k: Any, v: Any, into: Any) -> Any:
        out, lse = fa3gen.attention(q * 2, k, v, **SCORES["all"], return_lse=True)
        fa3gen.attention(q, k, v, window=(3, 0), out=into)
        return out + 1, lse, into + 1, fa3.flash_attn_func(q, k, v, window_size=(3, 0))

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seq_k in (7, 9):
        q, k, v = tensors(4, seq_k)
        out, lse, written, of_window = compiled(q, k, v, torch.empty_like(q))
        wanted, wanted_lse = expected(q * 2, k, v, **SCORES["all"])
        assert agree(out, wanted + 1) and agree(lse, wanted_lse) and lse.is_contiguous()
        narrow = expected(q, k, v, window=(3, 0))[0]
        assert agree(written, narrow + 1) and agree(of_window, narrow)
    assert set(modules.calls) == {"packed"}


def test_the_interface_of_flash_attention(eager: Modules) -> None:
    q, k, v = tensors(3, 9)
    wanted, wanted_lse = expected(q, k, v, window=(4, 0), sinks=SINKS, softcap=2.0)
    options: dict[str, Any] = {"window_size": (4, 0), "softcap": 2.0, "s_aux": SINKS}
    for function, lse in (
        (fa3.flash_attn_func, "return_attn_probs"),
        (fa3.flash_attn_with_kvcache, "return_softmax_lse"),
    ):
        out, found, *_ = function(q, k, v, **options, **{lse: True})
        assert agree(out, wanted) and agree(found, wanted_lse)
    assert eager.calls == ["packed"] * 2


# Which module


# Of calls: the modules for few queries, for many, and for tensors that are no rows of one.
MODELS: list[tuple[tuple[int, int], int, dict[str, Any], str, str, str]] = [
    ((64, 8), 64, {"sinks": 64, "causal": True}, "decode_sink_causal", "fwd_d64_sink_causal", ""),
    (
        *((64, 8), 64, {"sinks": 64, "window": (127, 0)}, "decode_sink_any_window"),
        *("fwd_packed_pack8_sink_any_window", "fwd_d64_pack8_sink_window"),
    ),
    ((16, 8), 256, {"softcap": 50.0, "causal": True}, "decode_softcap_causal", "fwd_d256_softcap_causal", ""),
    (
        *((16, 8), 256, {"softcap": 50.0, "window": (4095, 0)}, "decode_softcap_any_window"),
        *("fwd_packed_softcap_d256_any_window", "none"),
    ),
    (
        *((32, 8), 128, {"window": (1023, 0)}, "decode_any_window_d128"),
        *("fwd_packed_pack4_any_window_d128", "fwd_d128_any_window"),
    ),
    ((32, 8), 128, {"window": (4095, 0)}, "decode_any_window_d128", "fwd_d128_any_window", ""),
    ((28, 4), 128, {"window": (511, 0)}, "decode_any_window_d128", "fwd_d128_any_window", ""),
    (
        *((32, 8), 128, {"window": (512, 0)}, "decode_any_window_d128"),
        *("fwd_packed_pack4_any_window_d128", "fwd_d128_window"),
    ),
]


@pytest.mark.parametrize(("heads", "dim", "options", "few", "many", "by_heads"), MODELS)
def test_dense_calls_that_modules_of_packed_sequences_serve(
    heads: tuple[int, int],
    dim: int,
    options: dict[str, Any],
    few: str,
    many: str,
    by_heads: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Few queries where these split keys; many where they hold several heads of a group, or nothing else serves."""
    monkeypatch.chdir(ROOT)
    if "sinks" in options:
        options = {**options, "sinks": torch.empty(options["sinks"], device="meta")}

    def explain(seq_q: int, made: Any = torch.empty, **more: Any) -> Choice:
        q = torch.empty(8, seq_q, heads[0], dim, dtype=torch.bfloat16, device="meta")
        k = made(8, 8192, heads[1], dim, dtype=torch.bfloat16, device="meta")
        return fa3gen.attention.explain(q, k, k, **options, **more)

    def by_head(batch: int, rows: int, heads: int, dim: int, **facts: Any) -> torch.Tensor:
        return torch.empty(batch, heads, rows, dim, **facts).transpose(1, 2)

    for queries in (1, 16):
        why = explain(queries, return_lse=True)
        assert why.stem == f"fwd_packed_{few}" and why.as_packed and why.row is not None
        assert "  as    packed sequences of one length" in str(why) and "8192 keys" in str(why)
        assert why.options == {name: options[name] for name in ("window",) if name in options}
    for whole in (explain(17), explain(4096)):
        assert (whole.stem, whole.as_packed) == (many, "packed" in many) and whole.spec.split is None
    apart = by_heads or many
    if apart == "none":
        with pytest.raises(NoKernel, match="no generated module computes"):
            explain(1, made=by_head)
    else:
        assert (explain(1, made=by_head).stem, explain(1, made=by_head).as_packed) == (apart, False)
    whole = explain(1, num_splits=1)
    assert whole.spec.split is None and whole.stem == many


def chosen(mask: Any, seq_k: int, *, queries: int = 1, heads: int = 32, group: int = 4, in_rows: bool = True) -> Choice:
    family = Family("bf16", 128, 128, mask)
    size = Size(seq_k, heads, 132, group, queries, in_rows=in_rows)
    return dispatch.choose(family, size, lse=False, workspace=CHECKOUT)


def in_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packed sequences as many rows: up to 128 keys of a module that does not split them, then the table's."""
    found = dispatch._measured

    def measured(family: Family, size: Size, lse: bool, workspace: Any) -> tuple[Choice | None, dispatch.Stretch]:
        by_row, around = found(family, size, lse, workspace)
        if family.layout != "packed":
            return by_row, around
        few = size.keys <= 128
        return (None, dispatch.Stretch(0, 128)) if few else (by_row, dispatch.Stretch(129, NO_LIMIT))

    monkeypatch.setattr(dispatch, "_measured", measured)


def test_a_stretch_is_one_of_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of packed sequences count the keys that a window shows: beyond these, more of them change nothing."""
    in_two_rows(monkeypatch)
    narrow, wide = dispatch.mask_of(False, (99, 0)), dispatch.mask_of(False, (1023, 0))
    assert chosen(narrow, 2**20).stem == chosen(wide, 128).stem == "fwd_d128_any_window"
    assert chosen(narrow, 2**20).around.most_keys == NO_LIMIT and chosen(wide, 128).around.most_keys == 128
    many = chosen(wide, 129)
    assert many.as_packed and (many.around.least_keys, many.around.most_keys) == (129, NO_LIMIT)
    assert chosen(wide, 2**20).around == many.around


def test_modules_for_dense_tensors_stay_where_no_other_splits_keys_or_holds_heads() -> None:
    window = dispatch.mask_of(False, (1023, 0))
    assert chosen(window, 4096).stem == "fwd_packed_decode_any_window_d128"
    assert chosen(window, 4096, in_rows=False).stem == "fwd_d128_any_window"
    assert chosen(window, 4096, queries=17).stem == "fwd_packed_pack4_any_window_d128"
    assert chosen(window, 4096, queries=17, group=6).stem == "fwd_d128_any_window"
    assert chosen(dispatch.mask_of(False, (4095, 0)), 4096, queries=17).stem == "fwd_d128_any_window"
    for causal in (False, True):
        mask = dispatch.mask_of(causal, None)
        assert chosen(mask, 4096) == replace(chosen(mask, 4096, in_rows=False), size=chosen(mask, 4096).size)


def asked_for_parts(dtype: Any, *, in_rows: bool = True) -> Choice:
    family = Family(dtype, 128, 128, dispatch.mask_of(False, (300, 20)))
    size = Size(1024, 192, 132, 1, 512, parts=3, in_rows=in_rows)
    return dispatch.choose(family, size, lse=True, workspace=CHECKOUT)


def test_many_queries_are_packed_where_a_call_asks_for_parts() -> None:
    """No module for dense tensors with a window splits keys, and upstream's tests ask for three parts of any call."""
    found = asked_for_parts("bf16")
    assert found.as_packed and found.spec.split is not None and found.stem == "fwd_packed_decode_any_window_d128"
    assert found.options == {"window": (300, 20)}
    with pytest.raises(NotPossible, match="windows are rendered with split for scheduler even"):
        asked_for_parts("bf16", in_rows=False)


def test_a_spec_for_packed_sequences_is_proposed_where_none_for_dense_tensors_is_legal() -> None:
    with pytest.raises(NotRendered) as error:
        asked_for_parts("fp16")
    proposal = error.value.proposal
    assert proposal is not None and proposal.spec.problem.layout == "packed" and proposal.spec.split is not None
    with pytest.raises(NotImplementedError, match="no generated module computes fp16.*keys in 3 parts"):
        asked_for_parts("fp16", in_rows=False)


def test_rows_for_few_queries_of_dense_tensors_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    window, measured = dispatch.mask_of(False, (1023, 0)), dispatch._measured
    row = next(row for row in dispatch.read_table(dispatch.table_path(CHECKOUT)).rows if row.seq_q and not row.layout)
    dense = chosen(window, 4096, in_rows=False)

    def with_one_more(family: Family, *size: Any) -> Any:
        return (replace(dense, row=row), dispatch.Stretch()) if family.layout == "dense" else measured(family, *size)

    monkeypatch.setattr(dispatch, "_measured", with_one_more)
    assert chosen(window, 4096).stem == "fwd_d128_any_window" and not chosen(window, 4096).as_packed
    row = row.model_copy(update={"seq_q": None})  # of many queries it says nothing about few
    assert chosen(window, 4096).stem == "fwd_packed_decode_any_window_d128"


def test_a_packed_module_that_changed_is_left_to_packed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    of_row = dispatch.of_row

    def changed(home: Any, row: Any, place: str) -> Choice:
        if row.layout == "packed":
            raise NoKernel("measured with another one")
        return of_row(home, row, place)

    monkeypatch.setattr(dispatch, "of_row", changed)
    assert chosen(dispatch.mask_of(False, (1023, 0)), 4096).stem == "fwd_d128_any_window"


# On the CPU model


ON_THE_MODEL: list[tuple[str, tuple[int, int], int, dict[str, Any]]] = [
    ("fwd_packed_decode_any_window_d128", (8, 2), 128, {"window": (135, 0)}),
    ("fwd_packed_decode_sink_any_window", (16, 2), 64, {"window": (130, 2), "sinks": torch.linspace(-3, 3, 16)}),
    ("fwd_packed_decode_softcap_causal", (6, 2), 256, {"softcap": 5.0, "causal": True}),
]


@pytest.mark.parametrize(("stem", "heads", "dim", "options"), ON_THE_MODEL)
def test_the_cpu_model_agrees(
    stem: str, heads: tuple[int, int], dim: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generated modules, as they are chosen: 3 sequences, q with strides of its own, one query and several."""
    monkeypatch.chdir(ROOT)
    calls.stretches.clear()
    monkeypatch.setattr(calls, "module_at", lambda path: fa3gen.load(path.stem, on="cpu"))
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(3, 150, heads[1], dim, generator=generator).bfloat16() for _ in range(2))
    for seq_q in (1, 16):
        q = torch.randn(3, heads[0], seq_q, dim, generator=generator).bfloat16().transpose(1, 2)
        assert fa3gen.attention.explain(q, k, v, **options, return_lse=True).stem == stem
        with torch.no_grad():
            out, lse = fa3gen.attention(q, k, v, **options, return_lse=True)
        shape = {name: options[name] for name in ("sinks", "softcap") if name in options}
        mask = dispatch.mask_of(options.get("causal", False), options.get("window"))
        wanted = reference.attention(q, k, v, reach=reach(mask), **shape)
        torch.testing.assert_close(out.double(), wanted.out, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse.double(), wanted.lse, rtol=1e-3, atol=1e-3)
    calls.stretches.clear()


# Offsets


class Gpu(PretendedCuda):
    """Copies, too."""

    copies: int = 0

    def cuMemcpyHtoDAsync(self, memory: Any, address: int, size: int, stream: int) -> tuple[Any]:
        assert stream in self.streams, "somebody else's stream, which may be captured"
        into = self.memory[int(memory)]
        assert size == 4 * into.numel()
        ctypes.memmove(into.data_ptr(), address, size)
        self.unfinished.add(stream)
        self.copies += 1
        return (GOOD,)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """CPU tensors pass for such of GPU 0, whose driver is made up."""
    pretended, stand_in = Gpu(), ModuleType("stand_in")
    vars(stand_in).update(cuda=None, current_stream=None)
    pretended.install(stand_in, monkeypatch)
    driver = {**vars(vars(stand_in)["cuda"]), "cuMemcpyHtoDAsync": pretended.cuMemcpyHtoDAsync}
    monkeypatch.setattr(cuda.bindings, "driver", SimpleNamespace(**driver))
    pass_for_cuda(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
    kept = equal_lengths._kept_offsets, equal_lengths._made
    for cache in kept:
        cache.cache_clear()
    yield pretended
    for cache in kept:
        cache.cache_clear()


def test_offsets_are_made_once(gpu: Gpu) -> None:
    """For all streams and graphs, past torch's allocator, and complete before anybody has them."""
    q = torch.empty(1)
    first = equal_lengths.even_offsets(2, 5, q)
    assert first.tolist() == [0, 5, 10] and first.dtype == torch.int32 and first.is_contiguous() and gpu.gave(first)
    assert equal_lengths.even_offsets(2, 5, q) is first and gpu.copies == 1
    with gpu.capture(7, 1):
        assert equal_lengths.even_offsets(2, 5, q) is first
        inside = equal_lengths.even_offsets(3, 70, q)  # for the first time
    assert inside.tolist() == [0, 70, 140, 210] and gpu.gave(inside) and gpu.copies == 2
    assert gpu.unfinished == set() and gpu.streams == []


def test_offsets_of_lengths_that_grow_are_made_many_at_once(gpu: Gpu) -> None:
    q = torch.empty(1)
    for rows in range(300):
        assert equal_lengths.even_offsets(4, rows, q).tolist() == [i * rows for i in range(5)]
    assert gpu.copies == -(-300 // equal_lengths.LENGTHS)
    for rows in (0, 1, 2):  # of so many sequences each on its own
        assert equal_lengths.even_offsets(equal_lengths.NUMBERS, rows, q)[-1] == equal_lengths.NUMBERS * rows
    assert gpu.copies == -(-300 // equal_lengths.LENGTHS) + 3


def test_offsets_that_are_forgotten_lie_where_they_lay(gpu: Gpu) -> None:
    """A captured graph reads them still."""
    q = torch.empty(1)
    before = equal_lengths.even_offsets(2, 5, q)
    equal_lengths._kept_offsets.cache_clear()
    after = equal_lengths.even_offsets(2, 5, q)
    assert after is not before and after.data_ptr() == before.data_ptr() and gpu.copies == 1


def test_offsets_that_are_traced_or_watched_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equal_lengths, "_kept_offsets", lambda *shape: pytest.fail("kept"))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: 0)
    with FakeTensorMode():
        assert equal_lengths.even_offsets(2, 6, torch.empty(1)).shape == (3,)
    compiled = torch.compile(lambda q: equal_lengths.even_offsets(2, 6, q) + 1, fullgraph=True, backend="aot_eager")
    assert compiled(torch.empty(1)).tolist() == [1, 7, 13]


def test_offsets_that_cannot_be_made(gpu: Gpu) -> None:
    gpu.out_of_memory = True
    with pytest.raises(RuntimeError, match="the CUDA driver returned .*OUT_OF_MEMORY"):
        equal_lengths.even_offsets(2, 5, torch.empty(1))
    gpu.out_of_memory = False
    assert equal_lengths.even_offsets(2, 5, torch.empty(1)).tolist() == [0, 5, 10]


def test_an_eager_call_makes_nothing_but_views(gpu: Gpu, eager: Modules) -> None:
    """Once its offsets are there."""
    q, k, v = tensors()
    fa3gen.attention(q, k, v, window=(3, 0))
    made = gpu.copies
    assert made == 1  # 5 and 9 rows
    fa3gen.attention(q, k, v, window=(3, 0))
    assert gpu.copies == made and len(eager.asked) == 1
