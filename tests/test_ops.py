"""`fa3gen.attention` without a GPU: which module it calls, torch.compile, fake tensors, what it explains and refuses.

The modules are stood in for by functions that compute the reference; that generated modules do is tested elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from rendering import CHECKOUT, ROOT
from stand_ins import division, generated_module, pass_for_cuda, standing_in
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3gen
from fa3gen.design.family import Family
from fa3gen.design.masks import options_for, reach
from fa3gen.run import calls, dispatch, gpu, ops
from fa3gen.run.dispatch import ArgumentError, Choice, NoKernel, Size, Stretch
from fa3gen.spec.model import WindowMask
from fa3gen.verify import reference

STEM = "k6_d64_causal"
BOUND = 6  # keys; longer ones are served by another module
FEW = 8  # tiles; more of them, too


class Modules:
    """Stands in for the dispatch table, with three rows, and for their modules; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Family, int, bool]] = []
        self.sizes: list[Size] = []
        self.calls: list[str] = []
        self.divided: list[int | None] = []

    def choose(self, family: Family, size: Size, *, lse: bool, workspace: Any) -> Choice:
        self.asked.append((family, size.keys, lse))
        self.sizes.append(size)
        around = Stretch(most_keys=BOUND) if size.keys <= BOUND else Stretch(least_keys=BOUND + 1)
        stem = "short" if size.keys <= BOUND else "long"
        if size.tiles > FEW:
            stem, around = "large", Stretch(least_tiles=FEW + 1)
        else:
            around = around._replace(most_tiles=FEW)
        [variant] = CHECKOUT.resolve(STEM)
        return Choice(stem, Path(f"{stem}.py"), variant.spec, variant.source, None, "made up", size=size, around=around)

    def module_at(self, path: Path) -> Any:
        def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
            self.calls.append(path.stem)
            self.divided.append(division(globals(), k.shape[1]))
            return expected(q, k, v, **options)

        return generated_module(attention, packed=False)


def expected(q: Any, k: Any, v: Any, *, out: Any = None, return_lse: bool = False, **options: Any) -> Any:
    found = reference.attention(
        q, k, v, reach=reach(dispatch.mask_of(True, None)), **options, compute_dtype=torch.float32
    )
    rounded = found.out.to(q.dtype)
    out = rounded if out is None else out.copy_(rounded)
    return (out, found.lse) if return_lse else out


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    with standing_in(Modules(), monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture
def eager(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> Modules:
    pass_for_cuda(monkeypatch)
    return modules


def tensors(seq_q: int = 5, seq_k: int = 7, device: Any = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seq_q)
    shapes = ((2, seq_q, 4, 64), (2, seq_k, 2, 64), (2, seq_k, 2, 64))
    q, k, v = (torch.randn(shape, generator=generator).to(torch.bfloat16).to(device) for shape in shapes)
    return q, k, v


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    return fa3gen.attention(q, k, v, causal=True, **options)


# Which module


@pytest.mark.parametrize("way", ["eager", "modules"])
def test_the_choice_is_made_once_for_a_stretch_of_lengths(way: str, request: pytest.FixtureRequest) -> None:
    modules: Modules = request.getfixturevalue(way)
    lengths = [7, 3, 8, 6, 1, 7, 2**10]
    for seq_k in lengths:
        torch.testing.assert_close(call(*tensors(seq_k=seq_k)), expected(*tensors(seq_k=seq_k)), rtol=0, atol=0)
    assert modules.calls == ["short" if seq_k <= BOUND else "long" for seq_k in lengths]
    assert [seq_k for _, seq_k, _ in modules.asked] == [7, 3]


@pytest.mark.parametrize("way", ["eager", "modules"])
def test_the_number_of_tiles_decides_too(way: str, request: pytest.FixtureRequest) -> None:
    """2 sequences of 4 heads: 8 tiles up to 128 queries, 16 from 129 on; with whatever number of keys."""
    modules: Modules = request.getfixturevalue(way)
    for seq_q, seq_k in ((129, 130), (50, 7), (128, 130), (200, 3), (50, 3)):
        call(*tensors(seq_q=seq_q, seq_k=seq_k))
    assert modules.calls == ["large", "long", "long", "large", "short"]
    assert [(size.tiles, size.keys) for size in modules.sizes] == [(16, 130), (8, 7), (8, 3)]


@pytest.mark.parametrize("way", ["eager", "modules"])
def test_few_queries_are_looked_up_by_their_number(way: str, request: pytest.FixtureRequest) -> None:
    """Rows for decoding end at a number of queries: up to 16 each number is asked for once, all others together."""
    modules: Modules = request.getfixturevalue(way)
    for seq_q in (1, 2, 1, 16, 17, 60, 2):
        call(*tensors(seq_q=seq_q, seq_k=130))
    assert [size.queries for size in modules.sizes] == [1, 2, 16, 17]


def test_sms_are_asked_of_each_gpu_once(eager: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two GPUs in one process, the second has fewer SMs; what was found for one does not serve the other."""
    asked: list[int] = []

    def properties(device: int) -> Any:
        asked.append(device)
        return SimpleNamespace(multi_processor_count=(132, 114)[device])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    gpu.sm_count.cache_clear()
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor, device=device: device)
        for seq_k in (3, 7):
            call(*tensors(seq_k=seq_k))
    gpu.sm_count.cache_clear()
    assert asked == [0, 1] and [(size.keys, size.sms) for size in eager.sizes] == [
        *((3, 132), (7, 132)),
        *((3, 114), (7, 114)),
    ]


def test_what_decides_is_asked_for(eager: Modules) -> None:
    q, k, v = tensors()
    wider = torch.zeros(2, 7, 2, 32, dtype=torch.bfloat16)
    asked: list[dict[str, Any]] = [{}, {"causal": True}, {"window": (3, 0)}, {"window": [3, 0]}, {"return_lse": True}]
    for options in asked:
        fa3gen.attention(q, k, v, **options)
    fa3gen.attention(q.half(), k.half(), v.half())
    with pytest.raises(RuntimeError):  # the reference has no d_v, but this is what it was asked
        fa3gen.attention(q, k, wider, out=torch.zeros(1, dtype=torch.bfloat16))
    fa3gen.attention(q, k, v, out=torch.empty_like(q, dtype=torch.float32))
    masks = [dispatch.mask_of(bool(o.get("causal")), o.get("window")) for o in asked]
    families = [Family("bf16", 64, 64, mask) for mask in masks]
    families = [*families, Family("fp16", 64, 64, masks[0]), Family("bf16", 64, 32, masks[0])]
    families.append(Family("bf16", 64, 64, masks[0], "fp32"))
    assert [family for family, _, _ in eager.asked] == [*families[:3], *families[4:]]
    assert [lse for _, _, lse in eager.asked] == [False] * 3 + [True] + [False] * 3


def test_a_window_of_the_call_reaches_the_module(eager: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    choose, seen = dispatch.choose, []

    def attention(q: Any, k: Any, v: Any, *, window: tuple[int, int] | None = None, **options: Any) -> Any:
        seen.append(window)
        return expected(q, k, v, **options)

    def with_options(family: Family, *args: Any, **keywords: Any) -> Any:
        return replace(choose(family, *args, **keywords), options=options_for(WindowMask(), family.mask))

    monkeypatch.setattr(calls, "module_at", lambda file: SimpleNamespace(attention=attention))
    monkeypatch.setattr(dispatch, "choose", with_options)
    for window in ((3, 0), (4, -1), (3, 0)):
        fa3gen.attention(q, k, v, window=window)
    torch.ops.fa3gen.attention_forward(q, k, v, window=[5, 6])
    assert seen == [(3, 0), (4, 2**30), (3, 0), (5, 6)]


def test_dependent_launch_is_asked_of_modules_that_know_it(eager: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    assert fa3gen.attention(q, k, v, enable_pdl=True).equal(
        expected(q, k, v)
    )  # ignored: this module has no such argument
    asked, usual = [], "as the module has it"

    def attention(q: Any, k: Any, v: Any, *, enable_pdl: Any = usual, **options: Any) -> Any:
        asked.append(enable_pdl)
        return expected(q, k, v, **options)

    def served(**names: Any) -> list[Any]:
        """What a module of these names is told where calls say nothing, no and yes."""
        serving = FunctionType(attention.__code__, {**globals(), **names}, closure=attention.__closure__)
        serving.__kwdefaults__ = attention.__kwdefaults__
        monkeypatch.setattr(ops, "_serving", lambda *call: serving)
        asked.clear()
        for options in ({}, {"enable_pdl": False}, {"enable_pdl": True}):
            assert fa3gen.attention(q, k, v, **options).equal(expected(q, k, v))
        return list(asked)

    assert served() == [usual, usual, True]
    # With parts of the keys to add up it is so unless asked otherwise, but not where CTAs share an SM.
    assert served(combine_kernel=None) == served(combine_kernel=None, CTAS_PER_SM=1) == [True, usual, True]
    assert served(combine_kernel=None, CTAS_PER_SM=2) == [usual, usual, True]


@pytest.mark.parametrize("way", ["eager", "modules"])
def test_the_same_bits_in_any_batch_take_a_module_of_their_own(way: str, request: pytest.FixtureRequest) -> None:
    modules: Modules = request.getfixturevalue(way)
    q, k, v = tensors()
    for asked in (False, True, True, False):
        assert fa3gen.attention(q, k, v, deterministic_batch=asked).equal(expected(q, k, v))
    found = [family.part_keys for family, *_ in modules.asked]
    assert found[0] is None and 512 in found
    if way == "eager":  # each is looked up once
        assert found == [None, 512]
    out = torch.empty_like(q)
    torch.ops.fa3gen.attention_forward_out(q, k, v, out, deterministic_batch=True)
    assert out.equal(expected(q, k, v)) and modules.asked[-1][0].part_keys == 512


@pytest.mark.parametrize("way", ["eager", "modules"])
def test_keys_of_a_part_are_asked_for(way: str, request: pytest.FixtureRequest) -> None:
    """Each size in a look-up of its own; deterministic_batch may stand beside it, and says nothing more."""
    modules: Modules = request.getfixturevalue(way)
    q, k, v = tensors()
    options: list[dict[str, Any]] = [{}, {"split_keys": 64}, {"split_keys": 128, "deterministic_batch": True}]
    for given in [*options, *options]:
        assert fa3gen.attention(q, k, v, **given).equal(expected(q, k, v))
    found = [family.part_keys for family, *_ in modules.asked]
    assert list(dict.fromkeys(found)) == [None, 64, 128] and (way == "modules" or len(found) == 3)
    assert {size.parts for size in modules.sizes} == {0}
    out = torch.empty_like(q)
    torch.ops.fa3gen.attention_forward_out(q, k, v, out, split_keys=192)
    assert out.equal(expected(q, k, v)) and modules.asked[-1][0].part_keys == 192
    for wrong in (0, -64, "64", 96.0, True):
        with pytest.raises(ArgumentError, match="split_keys is .*; it needs to be a number of keys"):
            fa3gen.attention(q, k, v, split_keys=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["eager", "modules"])
def test_parts_are_asked_for(way: str, request: pytest.FixtureRequest) -> None:
    """The module divides 7 keys, 4 tiles of 2, by each number; a look-up each, and other calls are not divided."""
    modules: Modules = request.getfixturevalue(way)
    q, k, v = tensors()
    for asked in (0, 2, 3, 50, 2, 0, 1):
        assert fa3gen.attention(q, k, v, num_splits=asked).equal(expected(q, k, v))
    assert modules.divided == [None, 2, 2, 4, 2, None, None]
    found = [size.parts for size in modules.sizes]
    assert list(dict.fromkeys(found)) == [0, 2, 3, 50, 1] and (way == "modules" or len(found) == 5)
    torch.ops.fa3gen.attention_forward_out(q, k, v, torch.empty_like(q), num_splits=50)
    assert modules.divided[-1] == 4


@pytest.mark.parametrize("way", ["eager", "modules"])
def test_keys_that_must_not_be_split_take_another_module(way: str, request: pytest.FixtureRequest) -> None:
    modules: Modules = request.getfixturevalue(way)
    q, k, v = tensors()
    for asked in (0, 1, 1, 0):
        assert fa3gen.attention(q, k, v, num_splits=asked).equal(expected(q, k, v))
    found = [size.whole for size in modules.sizes]
    assert found[0] is False and True in found
    if way == "eager":  # each is looked up once
        assert found == [False, True]
    torch.ops.fa3gen.attention_forward_out(q, k, v, torch.empty_like(q), num_splits=1)
    assert modules.sizes[-1].whole


@pytest.mark.parametrize("way", ["eager", "modules"])
def test_numbers_of_parts_that_cannot_be_had(way: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(way)
    q, k, v = tensors()
    for wrong in (-1, "1", 2.0, None):
        with pytest.raises(ArgumentError, match=f"num_splits is {wrong!r}; it needs to be 0, .* 1, .* or a number of "):
            fa3gen.attention(q, k, v, num_splits=wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="num_splits is 1 beside deterministic_batch.* leave one of them out"):
        fa3gen.attention(q, k, v, num_splits=1, deterministic_batch=True)
    with pytest.raises(ArgumentError, match="num_splits is 3 beside deterministic_batch.* leave one of them out"):
        fa3gen.attention(q, k, v, num_splits=3, deterministic_batch=True)
    for asked in (1, 3):
        with pytest.raises(ArgumentError, match=f"num_splits is {asked} beside split_keys, .* parts of 64: leave one"):
            fa3gen.attention(q, k, v, num_splits=asked, split_keys=64)


SCORES: list[dict[str, Any]] = [
    {"sinks": torch.tensor([0.5, -1.0, 2.0, -math.inf])},
    {"softcap": 2.0},
    {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]).bfloat16(), "softcap": 2.0},
]


@pytest.mark.parametrize("options", SCORES, ids=["sinks", "softcap", "both"])
@pytest.mark.parametrize("way", ["eager", "modules"])
def test_sinks_and_softcap_have_modules_of_their_own(
    way: str, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    modules: Modules = request.getfixturevalue(way)
    q, k, v = tensors()
    wanted, wanted_lse = expected(q, k, v, **options, return_lse=True)
    assert not wanted.equal(expected(q, k, v))
    for _ in range(2):
        out, lse = call(q, k, v, **options, return_lse=True)
        assert out.equal(wanted) and lse.equal(wanted_lse)
        assert call(q, k, v, **options, out=torch.empty_like(q)).equal(wanted)
        assert call(q, k, v).equal(expected(q, k, v))
    families = [family for family, _, _ in modules.asked]
    assert [family.keywords for family in families] == [tuple(options), tuple(options), ()]


@pytest.mark.parametrize("options", SCORES, ids=["sinks", "softcap", "both"])
def test_sinks_and_softcap_compiled_in_one_graph(modules: Modules, options: dict[str, Any]) -> None:
    q, k, v = tensors()
    compiled = torch.compile(lambda: call(q, k, v, **options, return_lse=True), fullgraph=True, backend="aot_eager")
    out, lse = compiled()
    wanted, wanted_lse = expected(q, k, v, **options, return_lse=True)
    assert out.equal(wanted) and lse.equal(wanted_lse)
    torch.library.opcheck(torch.ops.fa3gen.attention_forward.default, (q, k, v), {"causal": True, **options})


@pytest.mark.parametrize("way", ["eager", "modules"])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sinks": [0.5] * 4}, TypeError, "sinks is a list; it needs to be a torch.Tensor"),
        (
            {"softcap": 0.0},
            ValueError,
            "softcap is 0.0; it needs to be a finite and positive number, or None for no cap",
        ),
        ({"softcap": "50"}, ValueError, "softcap is '50'; it needs to be"),
        ({"softcap": math.inf}, ValueError, "softcap is inf; it needs to be"),
    ],
)
def test_sinks_and_caps_without_sense(
    way: str, options: dict[str, Any], error: type[Exception], message: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(way)
    with pytest.raises(error, match=message):
        call(*tensors(), **options)


def test_sinks_that_do_not_fit_show_when_a_model_is_traced(modules: Modules) -> None:
    for sinks in (torch.zeros(3, device="meta"), torch.zeros(4, dtype=torch.float16, device="meta")):
        with pytest.raises(ArgumentError, match=r"sinks is .*; it needs to be \(4,\), bfloat16 or float32"):
            call(*tensors(device="meta"), sinks=sinks)
    with pytest.raises(ValueError, match="sinks requires grad; this kernel is forward only"):
        call(*tensors(), sinks=torch.zeros(4, requires_grad=True))


@pytest.mark.parametrize("way", ["eager", "modules"])
def test_out_scale_and_lse(way: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(way)
    q, k, v = tensors()
    out = torch.empty_like(q)
    returned, lse = call(q, k, v, scale=0.5, out=out, return_lse=True)
    wanted, wanted_lse = expected(q, k, v, scale=0.5, return_lse=True)
    assert returned is out and out.equal(wanted) and lse.equal(wanted_lse)
    assert call(q, k, v, out=out) is out and out.equal(expected(q, k, v))
    assert call(q, k, v, return_lse=True)[1].equal(expected(q, k, v, return_lse=True)[1])


def test_the_calls_shown_in_the_readme(modules: Modules, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [code] = [part.partition("```")[0] for part in text.split("```python\n")[1:] if "attention.explain" in part]
    q, k, v = tensors()
    names: dict[str, Any] = {"q": q, "k": k, "v": v}
    exec(code, names)
    assert names["out"].shape == q.shape and names["lse"].shape == (2, 4, 5)
    assert [family.mask.kind for family, _, _ in modules.asked] == ["causal", "window", "causal"]
    assert "made up" in capsys.readouterr().out


# Whoever looks at calls instead of making them


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph(modules: Modules, dynamic: bool) -> None:
    def model(q: Any, k: Any, v: Any) -> Any:
        out, lse = call(q * 2, k, v, return_lse=True)
        return out + 1, lse, call(q, k, v)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for seq_k in (7, 9):
        q, k, v = tensors(seq_k=seq_k)
        out, lse, other = compiled(q, k, v)
        wanted, wanted_lse = expected(q * 2, k, v, return_lse=True)
        assert out.equal(wanted + 1) and lse.equal(wanted_lse) and other.equal(expected(q, k, v))


@pytest.mark.parametrize(("options", "parts", "part_keys"), [({"num_splits": 3}, 3, None), ({"split_keys": 64}, 0, 64)])
def test_parts_are_compiled(modules: Modules, options: dict[str, Any], parts: int, part_keys: int | None) -> None:
    compiled = torch.compile(lambda q, k, v: call(q * 2, k, v, **options) + 1, fullgraph=True, backend="aot_eager")
    q, k, v = tensors()
    assert compiled(q, k, v).equal(expected(q * 2, k, v) + 1)
    assert [
        (size.parts, family.part_keys) for size, (family, *_) in zip(modules.sizes, modules.asked, strict=True)
    ] == [(parts, part_keys)]
    assert modules.divided == [2 if parts else None]  # 7 keys in tiles of 2


def test_compiled_with_out(modules: Modules) -> None:
    def model(q: Any, k: Any, v: Any, out: Any) -> Any:
        before = out + 1
        call(q, k, v, out=out)
        return before, out + 1

    q, k, v = tensors()
    out = torch.ones_like(q)
    before, after = torch.compile(model, fullgraph=True, backend="aot_eager")(q, k, v, out)
    assert out.equal(expected(q, k, v)) and after.equal(out + 1) and before.eq(2).all()


@pytest.mark.parametrize("name", ["attention_forward", "attention_forward_out"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_operators_are_sound(modules: Modules, name: str, return_lse: bool) -> None:
    """torch's own checks: the schema tells the truth, the fake has the shapes and strides of the real one."""
    q, k, v = tensors()
    arguments = (q, k, v) if name == "attention_forward" else (q, k, v, torch.empty_like(q))
    options = {"causal": True, "return_lse": return_lse}
    torch.library.opcheck(getattr(torch.ops.fa3gen, name).default, arguments, options)


def test_fake_tensors_have_the_real_shapes_and_strides(modules: Modules) -> None:
    def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
        return torch.empty(shape).stride()

    with FakeTensorMode():
        q = torch.empty(2, 4, 5, 64, dtype=torch.float16, device="cuda").transpose(1, 2)
        k = torch.empty(2, 7, 2, 64, dtype=torch.float16, device="cuda")
        v = torch.empty(2, 7, 2, 32, dtype=torch.float16, device="cuda")
        out, lse = call(q, k, v, return_lse=True)
        assert call(q, k, v).shape == out.shape == (2, 5, 4, 32) and out.stride() == strides((2, 5, 4, 32))
        assert (out.dtype, out.device.type) == (torch.float16, "cuda")
        assert lse.shape == (2, 4, 5) and lse.stride() == strides((2, 4, 5)) and lse.dtype == torch.float32
        into = torch.empty(2, 5, 4, 32, dtype=torch.float16, device="cuda")
        assert call(q, k, v, out=into) is into
        with pytest.raises(ArgumentError, match=r"out has shape \(2, 5, 4, 64\); it needs to be \(2, 5, 4, 32\)"):
            call(q, k, v, out=torch.empty_like(q))
        with pytest.raises(ArgumentError, match="they need the same batch and head dim"):
            call(q, torch.empty(3, 7, 2, 64, dtype=torch.float16, device="cuda"), v)
        with pytest.raises(ArgumentError, match="they may only differ in the head dim"):
            call(q, k, torch.empty(2, 6, 2, 32, dtype=torch.float16, device="cuda"))
    assert modules.calls == []


def test_meta_tensors(modules: Modules) -> None:
    assert call(*tensors(device="meta")).shape == (2, 5, 4, 64) and modules.calls == []


def test_tensors_that_are_watched_do_not_go_the_short_way(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even on a GPU: modes, subclasses and functorch see an operator."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    def operator(q: Any, k: Any, v: Any, *options: Any) -> Any:
        seen.append(type(k))
        return by_operator(q, k, v, *options)

    seen: list[type] = []
    by_operator = ops._by_operator
    monkeypatch.setattr(ops, "_by_operator", operator)
    q, k, v = tensors()
    call(q, k, v)
    assert seen == [torch.Tensor]  # on the CPU
    pass_for_cuda(monkeypatch)
    assert call(q, k, v).equal(expected(q, k, v)) and len(seen) == 1
    with Watching():
        assert call(q, k, v).equal(expected(q, k, v)) and len(seen) == 2
    assert call(q, k.as_subclass(Subclass), v).equal(expected(q, k, v)) and seen[2:] == [Subclass]
    assert torch.vmap(call)(q[None], k[None], v[None])[0].equal(expected(q, k, v)) and len(seen) == 4
    with pytest.raises(TypeError, match="v is a str; it needs to be a torch.Tensor"):
        call(q, k, "v")  # type: ignore[arg-type]


# Errors


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, "q is a list; it needs to be a torch.Tensor"),
        (
            {"v": torch.zeros(2, 64)},
            ValueError,
            r"v has shape \(2, 64\); it needs to be \(batch, seq, heads, head dim\)",
        ),
        (
            {"q": torch.zeros(2, 5, 4, 64)},
            TypeError,
            "q has dtype torch.float32; fa3gen.attention takes torch.bfloat16 or",
        ),
        ({"window": 512}, ValueError, r"window is 512; it needs to be None or \(left, right\)"),
    ],
)
def test_arguments_without_sense(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    q, k, v = tensors()
    arguments = {"q": q, "k": k, "v": v, **changes}
    for function in (fa3gen.attention, fa3gen.attention.explain):
        with pytest.raises(error, match=message):
            function(**arguments)


def apart(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, two places apart."""
    return torch.stack([x, x], dim=-1)[..., 0]


def badly_aligned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with one more in each row."""
    return torch.nn.functional.pad(x, (0, 1))[..., :-1]


META = dict(zip("qkv", tensors(device="meta"), strict=True))  # 4 heads of q, 2 of k and v
NARROWER = torch.empty(2, 7, 2, 32, dtype=torch.bfloat16, device="meta")
# What a module refuses of tensors that have no memory, and anything else that shows without running it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype of k and v": (
        {"k": META["k"].half(), "v": META["v"].half()},
        "q has dtype torch.bfloat16, k torch.float16 and v torch.float16; dense tensors need the same",
    ),
    "dtype of v": ({"v": META["v"].half()}, "q has dtype torch.bfloat16, k torch.bfloat16 and v torch.float16"),
    "3 heads of k": (
        {"k": META["q"][:, :, :3], "v": META["q"][:, :, :3]},
        "q has 4 heads and k has 3; heads of q must be a multiple of those of k",
    ),
    "8 heads of k": ({name: torch.cat([META["q"]] * 2, dim=2) for name in "kv"}, "q has 4 heads and k has 8; heads"),
    "no heads of k": ({name: META["k"][:, :, :0] for name in "kv"}, "q has 4 heads and k has 0; heads"),
    "batch of k": ({name: META["k"][:1] for name in "kv"}, "they need the same batch and head dim"),
    "head dim of k": ({"k": NARROWER}, "they need the same batch and head dim"),
    "length of v": ({"v": META["v"][:, :6]}, "they may only differ in the head dim"),
    **{
        f"rows of {name}": ({name: apart(META[name])}, rf"{name} has strides .*: pass {name}.contiguous\(\)")
        for name in "qkv"
    },
    **{
        f"places of {name}": ({name: badly_aligned(META[name])}, f"{name} has strides .* multiples of 8")
        for name in "qk"
    },
    "sinks": ({"sinks": torch.empty(8, device="meta")}, r"sinks is \(8,\), torch.float32; it needs to be \(4,\), bf"),
    "places of sinks": ({"sinks": torch.empty(8, device="meta")[::2]}, "sinks has strides .*: pass sinks.contiguous"),
    "scale": ({"scale": "x"}, "scale is 'x'; it needs to be a finite and positive number"),
    "scale below 0": ({"scale": -0.5}, "scale is -0.5; it needs to be a finite and positive number"),
    "shape of out": ({"out": META["q"][:1]}, r"out has shape \(1, 5, 4, 64\); it needs to be \(2, 5, 4, 64\)"),
    "dtype of out": (
        {"out": META["q"].half()},
        "out has dtype torch.float16; it needs to be torch.bfloat16 or torch.fl",
    ),
    "rows of out": ({"out": apart(META["q"])}, "out has strides .*: pass out.contiguous"),
    "places of out": (
        {"out": META["q"][:1].expand(2, -1, -1, -1)},
        "out has strides .*several elements share one addr",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_module_would_refuse_is_told_without_one(name: str, modules: Modules) -> None:
    """By what explains a call, by the call, and by the operators, which torch.compile traces."""
    changes, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        fa3gen.attention.explain(**{**META, **changes})
    with pytest.raises(ArgumentError, match=message):
        fa3gen.attention(**{**META, **changes})
    if changes.get("scale") != "x":  # which no operator takes
        operator = torch.ops.fa3gen.attention_forward_out if "out" in changes else torch.ops.fa3gen.attention_forward
        with pytest.raises(ArgumentError, match=message):
            operator(**{**META, **changes})
    assert modules.asked == []


def test_what_would_be_refused_shows_while_a_model_is_traced(modules: Modules) -> None:
    q, k, v = tensors()
    for changes, message in (({"k": k.half(), "v": v.half()}, "dense tensors"), ({"q": q[:, :, :3]}, "q has .* heads")):
        for dynamic in (False, True):
            torch._dynamo.reset()
            compiled = torch.compile(fa3gen.attention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
            with pytest.raises(Exception, match=message):
                compiled(**{"q": q, "k": k, "v": v, **changes})
    assert modules.asked == []


def by_sequence_of_15() -> torch.Tensor:
    return torch.empty(2, 2, 64, 15, device="meta").to(torch.float8_e4m3fn).permute(0, 3, 1, 2)


def test_head_dims_of_other_than_16_bytes_are_those_without_a_module() -> None:
    q = torch.empty(2, 5, 4, 36, dtype=torch.bfloat16, device="meta")
    with pytest.raises(NoKernel, match="head dim 36"):
        fa3gen.attention.explain(q, q, q)


def test_what_lies_otherwise_and_is_none_is_explained(modules: Modules) -> None:
    """Rows of q, k and v side by side, sequences behind heads, keys of V side by side in 8 bits, and none."""
    packed = torch.empty(2, 7, 8, 64, dtype=torch.bfloat16, device="meta")
    q, k, v = packed.split([4, 2, 2], dim=2)
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    narrow = [torch.empty(2, 16, 2, 64, device="meta").to(torch.float8_e4m3fn) for _ in range(2)]
    of_8 = narrow[0], narrow[0], torch.empty(2, 2, 64, 16, device="meta").to(torch.float8_e4m3fn).permute(0, 3, 1, 2)
    legal = [(q, k, v), by_head, of_8, (q[:0], k[:0], v[:0]), (q, k[:, :0], v[:, :0]), (q[:, :0], k, v)]
    for given in legal:
        assert fa3gen.attention.explain(*given).stem
        assert fa3gen.attention(*given).shape == given[0].shape
    with pytest.raises(
        ArgumentError, match="v has strides .*multiples of 16, 16 bytes: pad its sequence to a multiple"
    ):
        fa3gen.attention.explain(narrow[0], narrow[0][:, :15], by_sequence_of_15())
    scores: dict[str, Any] = {"sinks": torch.empty(4, device="meta"), "scale": 1, "out": torch.empty_like(q)}
    assert fa3gen.attention.explain(q, k, v, **scores).stem


def test_what_explains_a_call_refuses_gradients_too(modules: Modules) -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match="requires grad; this kernel is forward only: call it under torch.no_grad"):
        fa3gen.attention.explain(q.requires_grad_(), k, v)
    with torch.no_grad():
        assert fa3gen.attention.explain(q, k, v).stem


def test_what_explains_a_call_is_named_as_people_call_it() -> None:
    with pytest.raises(TypeError, match=r"^attention\.explain\(\) got an unexpected keyword argument 'is_causal'"):
        fa3gen.attention.explain(*tensors(), is_causal=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^attention_packed\.explain\(\) got an unexpected keyword argument"):
        fa3gen.attention_packed.explain(is_causal=True)  # type: ignore[call-arg]


def test_too_few_dimensions_on_a_gpu(eager: Modules) -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"q has shape \(64,\); it needs to be"):
        fa3gen.attention(q[0, 0, 0], k, v)


def test_tensors_that_require_grad(modules: Modules) -> None:
    q, k, v = tensors()
    q.requires_grad_()
    message = "requires grad; this kernel is forward only: call it under torch.no_grad"
    with pytest.raises(ValueError, match=message):
        call(q, k, v)
    with pytest.raises(Exception, match="fullgraph|[Oo]bserved exception"):
        torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    with torch.no_grad():
        assert call(q, k, v).equal(expected(q, k, v))


def test_tensors_on_the_cpu_are_refused_by_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    q, k, v = (tensor.half() for tensor in tensors())
    with pytest.raises(ValueError, match="q is not on a GPU; it needs to be on a Hopper GPU"):
        fa3gen.attention(q, k, v)  # by the only module in float16


# Explaining


def test_wrong_windows_are_refused_behind_right_ones(eager: Modules) -> None:
    """Also where what they would leave is looked up already."""
    q, k, v = tensors()
    for _ in range(2):
        assert fa3gen.attention(q, k, v, window=(6, 0)).equal(call(q, k, v))
    assert [family.mask.kind for family, _, _ in eager.asked] == ["window", "causal"]
    for wrong in ((6.5, 0), (2**31, 0), (6,), (6, -2)):
        with pytest.raises(ValueError, match="window is"):
            fa3gen.attention(q, k, v, window=wrong)


def test_explain_needs_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    q, k, v = (tensor.half() for tensor in tensors(device="meta"))
    why = fa3gen.attention.explain(q, k, v, causal=True, return_lse=True)
    assert why.file == CHECKOUT.module_path(why.stem) and why.file.is_file()
    assert Family.of(why.spec) == Family("fp16", 64, 64, dispatch.mask_of(True, None))
    assert str(why).splitlines()[0] == str(why.file)
    with FakeTensorMode():
        fake = torch.empty(2, 7, 4, 64, dtype=torch.float16, device="cuda")
        other = fa3gen.attention.explain(fake, fake, fake, causal=True)
        assert (other.stem, other.row) == (why.stem, why.row)
    assert "  for   5 queries, 7 keys, 8 tiles of 128 query rows on 132 SMs, as on an H200" in str(why)
    with pytest.raises(NoKernel, match="no generated module computes fp16, head dim 64, window"):
        fa3gen.attention.explain(q, k, v, window=(5, 0))
    assert fa3gen.attention.explain(q, k, v, window=(6, 0)).stem == fa3gen.attention.explain(q, k, v, causal=True).stem
    for wrong in ((6.5, 0), (2**31, 0), (6,), (6, -2)):
        with pytest.raises(ValueError, match="window is"):
            fa3gen.attention.explain(q, k, v, window=wrong)
    with pytest.raises(
        NoKernel,
        match=r"(?s)computes fp16, head dim 64, no mask, sinks, softcap; .*\nsoftmax: \{sink: true, softcap: true\}",
    ):
        fa3gen.attention.explain(q, k, v, sinks=torch.zeros(4), softcap=50.0)
    brain = [tensor.bfloat16() for tensor in (q, k, v)]
    brain[0] = torch.cat([brain[0]] * 4, dim=1)  # more than few queries
    assert fa3gen.attention.explain(*brain, causal=True, sinks=torch.zeros(4)).stem == "fwd_d64_sink_causal"


def test_the_package_has_no_other_late_names() -> None:
    with pytest.raises(AttributeError, match="module 'fa3gen' has no attribute 'attend'"):
        fa3gen.attend  # noqa: B018
