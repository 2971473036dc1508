"""`fa3gen.attention` and FA3's function of q, k and v in 8 bits, without a GPU: modules, factors, operators, refusals.

The modules are stood in for by functions that compute the reference, but where the CPU model of sm_90a executes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rendering import CHECKOUT, ROOT
from stand_ins import generated_module, pass_for_cuda, standing_in
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3gen
from fa3gen import flash_attn_interface as fa3
from fa3gen.base.files import sha256
from fa3gen.cpu.module import load_on_cpu
from fa3gen.design.family import Family, Shape
from fa3gen.design.masks import reach
from fa3gen.records import dispatch_table
from fa3gen.run import calls, dispatch, eight_bits
from fa3gen.run.dispatch import (
    ArgumentError,
    Choice,
    Measurement,
    NoKernel,
    NotPossible,
    NotRendered,
    Row,
    Size,
    Stretch,
    Table,
)
from fa3gen.spec.model import CausalMask, Mask, NoMask, WindowMask
from fa3gen.verify import reference
from fa3gen.verify.inputs import permuted_keys

E4M3 = torch.float8_e4m3fn
FACTORS = eight_bits.FACTORS
BY_ROWS, BY_SEQUENCE = "k7_two_levels_d128", "k7_v_k_two_levels_d128"
PERMUTED = "fwd_fp8_v_permuted_d128"


class Modules:
    """Stands in for the dispatch table and for one module; keeps what it was asked, and factors."""

    def __init__(self) -> None:
        self.asked: list[Family] = []
        self.factors: list[dict[str, torch.Tensor]] = []

    def choose(self, family: Family, size: Size, *, lse: bool, workspace: Any) -> Choice:
        self.asked.append(family)
        [variant] = CHECKOUT.resolve(BY_ROWS)
        around = Stretch(least_keys=size.keys, most_keys=size.keys)
        return Choice("one", Path("one.py"), variant.spec, variant.source, None, "made up", size=size, around=around)

    def module_at(self, path: Path) -> Any:
        causal = isinstance(self.asked[-1].mask, CausalMask)

        def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
            self.factors.append({name: options[name] for name in FACTORS if name in options})
            v = in_order(v, k.shape[1]) if self.asked[-1].v_permuted else v
            return expected(q, k, v, causal=causal, **options)

        return generated_module(attention, packed=False)


def expected(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    out: Any = None,
    return_lse: bool = False,
    scale: Any = None,
    **of: Any,
) -> Any:
    """O in bfloat16, and LSE, of tensors times their factors, (batch, heads_kv), or one for all."""
    batch, heads_kv, group = k.shape[0], k.shape[2], q.shape[2] // k.shape[2]
    wide = []
    for name, x in zip(FACTORS, (q, k, v), strict=True):
        factor = torch.ones(()) if of.get(name) is None else of[name]
        each = (factor if factor.dim() == 2 and factor.numel() > 1 else factor.reshape(1, 1)).expand(batch, heads_kv)
        wide.append(x.float() * each.repeat_interleave(x.shape[2] // heads_kv, 1)[:, None, :, None])
    assert group * heads_kv == q.shape[2]
    mask: Mask = CausalMask() if causal else NoMask()
    scores = {name: of.get(name) for name in ("sinks", "softcap")}
    found = reference.attention(*wide, reach=reach(mask), scale=scale, compute_dtype=torch.float32, **scores)
    rounded = found.out.bfloat16()
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


WAYS = pytest.mark.parametrize("way", ["eager", "modules"])


def tensors(seq_q: int = 5, seq_k: int = 7, *, dim: int = 128, device: Any = None) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seq_q)
    shapes = ((2, seq_q, 4, dim), (2, seq_k, 2, dim), (2, seq_k, 2, dim))
    return tuple(torch.randn(shape, generator=generator).to(E4M3).to(device) for shape in shapes)


def by_sequence(v: torch.Tensor) -> torch.Tensor:
    """The same numbers, with the sequence contiguous and rows of it 16-byte aligned."""
    batch, seq, heads, dim = v.shape
    storage = torch.zeros(batch, heads, dim, -(-seq // 16) * 16, dtype=torch.uint8, device=v.device)
    placed = storage[..., :seq].permute(0, 3, 1, 2)
    return placed.copy_(v.view(torch.uint8)).view(E4M3)


def in_order(v: torch.Tensor, seq: int) -> torch.Tensor:
    """The keys of a v whose keys are permuted, as documented: position 4t + j has key 2t + j % 2 + 8 (j // 2)."""
    keys = torch.zeros_like(v.float())
    for position in range(v.shape[1]):
        unit, (t, j) = position // 16, divmod(position % 16, 4)
        keys[:, 16 * unit + 2 * t + j % 2 + 8 * (j // 2)] = v[:, position].float()
    return keys[:, :seq].to(v.dtype)


def factors_of(kind: str) -> dict[str, Any]:
    """Factors of q, k and v for 2 sequences with 2 heads of k."""
    number = torch.tensor(0.75)
    match kind:
        case "numbers":
            return {"q_descale": number, "k_descale": number.view(1), "v_descale": number.view(1, 1, 1)}
        case "of heads":
            each = torch.tensor([[0.5, 1.5], [2.0, 0.75]])
            return {"q_descale": each, "k_descale": each.t().contiguous().t(), "v_descale": 2 * each}
        case "stride 0":
            heads = torch.tensor([0.5, 1.5])
            return {
                "q_descale": heads.expand(2, 2),
                "k_descale": heads[:, None].expand(2, 2),
                "v_descale": number.expand(2, 2),
            }
        case _:
            return {"v_descale": number}


KINDS = pytest.mark.parametrize("kind", ["numbers", "of heads", "stride 0", "one of them"])


# Calls


@WAYS
@KINDS
def test_factors_reach_the_module_as_it_takes_them(way: str, kind: str, request: pytest.FixtureRequest) -> None:
    """For each sequence and head of k, in place of one number too; none is copied, and none is made up."""
    modules: Modules = request.getfixturevalue(way)
    (q, k, v), factors = tensors(), factors_of(kind)
    wanted, wanted_lse = expected(q, k, v, causal=True, **factors, return_lse=True)
    out, lse = fa3gen.attention(q, k, v, causal=True, **factors, return_lse=True)
    assert out.dtype == torch.bfloat16 and out.equal(wanted) and lse.equal(wanted_lse)
    assert not wanted.equal(expected(q, k, v, causal=True))
    into = torch.empty_like(q, dtype=torch.bfloat16)
    assert fa3gen.attention(q, k, v, causal=True, **factors, out=into) is into and into.equal(wanted)
    for given in modules.factors:
        assert list(given) == list(factors)
        for name, factor in given.items():
            assert factor.shape == (2, 2) and factor.data_ptr() == factors[name].data_ptr()
            assert factors[name].numel() > 1 or factor.stride() == (0, 0)
    out = fa3gen.attention(q, k, v, causal=True)
    assert out.equal(expected(q, k, v, causal=True)) and modules.factors[-1] == {}


@WAYS
def test_sinks_and_caps_reach_it_beside_factors(way: str, request: pytest.FixtureRequest) -> None:
    """Also where a call without them was served before, and by the names of FA3's function."""
    modules: Modules = request.getfixturevalue(way)
    (q, k, v), factors = tensors(), factors_of("of heads")
    scores: dict[str, Any] = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "softcap": 1.5}
    fa3gen.attention(q, k, v, causal=True, **factors)
    wanted, wanted_lse = expected(q, k, v, causal=True, **factors, **scores, return_lse=True)
    out, lse = fa3gen.attention(q, k, v, causal=True, **factors, **scores, return_lse=True)
    assert out.equal(wanted) and lse.equal(wanted_lse)
    assert not wanted.equal(expected(q, k, v, causal=True, **factors))
    assert (modules.asked[-1].sink, modules.asked[-1].softcap) == (True, True)
    given = {**factors, "s_aux": scores["sinks"], "softcap": 1.5}
    assert fa3.flash_attn_func(q, k, v, causal=True, **given).equal(wanted)


def test_a_repeated_call_is_looked_up_once_whatever_its_factors(eager: Modules) -> None:
    """Where v lies by its sequence is part of what it is looked up by, as is the mask."""
    q, k, v = tensors()
    for given in (v, by_sequence(v)):
        for causal in (True, False):
            for factors in ({}, factors_of("numbers"), factors_of("of heads"), {}):
                out = fa3gen.attention(q, k, given, causal=causal, **factors)
                assert out.equal(expected(q, k, v, causal=causal, **factors))
    family = Family("e4m3", 128, 128, CausalMask(), "bf16")
    unmasked = family._replace(mask=NoMask())
    placed = [each._replace(by_sequence=("v",)) for each in (family, unmasked)]
    assert eager.asked == [family, unmasked, *placed]


def test_o_of_another_dtype_is_another_family(eager: Modules) -> None:
    q, k, v = tensors()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        fa3gen.attention(q, k, v, out=torch.empty_like(q, dtype=dtype))
    assert [family.out_dtype for family in eager.asked] == ["bf16", "fp16", "fp32"]


@KINDS
def test_compiled_in_one_graph(modules: Modules, kind: str) -> None:
    q, k, v = tensors()
    factors = factors_of(kind)

    def model(q: Any, k: Any, v: Any, factors: Any) -> Any:
        out, lse = fa3gen.attention(q, k, v, causal=True, **factors, return_lse=True)
        halves = {name: factor / 2 for name, factor in factors.items()}
        return out + 1, lse, fa3gen.attention(q, k, v, **halves)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out, lse, other = compiled(q, k, v, factors)
    wanted, wanted_lse = expected(q, k, v, causal=True, **factors, return_lse=True)
    assert out.equal(wanted + 1) and lse.equal(wanted_lse)
    assert other.equal(expected(q, k, v, **{name: factor / 2 for name, factor in factors.items()}))


def test_compiled_with_a_contiguous_sequence(modules: Modules) -> None:
    """The operator sees v as it lies."""
    q, k, v = tensors()
    compiled = torch.compile(lambda *x: fa3gen.attention(*x), fullgraph=True, backend="aot_eager")
    assert compiled(q, k, by_sequence(v)).equal(expected(q, k, v))
    assert {family.by_sequence for family in modules.asked} == {("v",)}


@WAYS
def test_keys_of_v_may_be_permuted(way: str, request: pytest.FixtureRequest) -> None:
    """A family of its own, also for a repeated call and where k has whole units of keys."""
    modules: Modules = request.getfixturevalue(way)
    for seq_k in (7, 16, 49):
        q, k, v = tensors(5, seq_k)
        given, factors = permuted_keys(v, fill=0.0), factors_of("of heads")
        for _ in range(2):
            out = fa3gen.attention(q, k, given, v_permuted=True, **factors)
            assert out.equal(expected(q, k, v, **factors))
        assert fa3gen.attention(q, k, by_sequence(v)).equal(expected(q, k, v))
    permuted, others = modules.asked[0], {family for family in modules.asked if not family.v_permuted}
    assert permuted == Family("e4m3", 128, 128, NoMask(), "bf16", by_sequence=("v",), v_permuted=True)
    assert others == {permuted._replace(v_permuted=False)}


def test_compiled_with_permuted_keys(modules: Modules) -> None:
    """And with sizes that are not known yet."""
    compiled = torch.compile(
        lambda q, k, v, out: (
            fa3gen.attention(q, k, v, v_permuted=True),
            fa3gen.attention(q, k, v, v_permuted=True, out=out),
        ),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for seq_k in (7, 40):
        q, k, v = tensors(5, seq_k)
        into = torch.empty_like(q, dtype=torch.bfloat16)
        both = compiled(q, k, permuted_keys(v, fill=0.0), into)
        assert all(out.equal(expected(q, k, v)) for out in both) and into.equal(both[0])
    assert {family.v_permuted for family in modules.asked} == {True}
    with pytest.raises(
        Exception, match=r"beside k \(2, 40, 2, 128\) it needs to be \(2, 48, 2, 128\), keys in whole units"
    ):
        torch.compile(lambda *x: fa3gen.attention(*x, v_permuted=True), fullgraph=True, backend="aot_eager")(
            q, k, by_sequence(v)
        )


@pytest.mark.parametrize("name", ["attention_forward", "attention_forward_out"])
@KINDS
def test_operators_are_sound(modules: Modules, name: str, kind: str) -> None:
    q, k, v = tensors()
    into = torch.empty_like(q, dtype=torch.bfloat16)
    arguments = (q, k, v) if name == "attention_forward" else (q, k, v, into)
    options = {"causal": True, "return_lse": True, **factors_of(kind)}
    # Not `test_schema`, which multiplies its inputs: torch has no such operation on 8 bits. test_ops.py has it.
    utils = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    torch.library.opcheck(getattr(torch.ops.fa3gen, name).default, arguments, options, test_utils=utils)


def test_fake_tensors_have_the_real_dtype_shape_and_strides(modules: Modules) -> None:
    with FakeTensorMode():
        q, k, v = (
            torch.empty(2, rows, heads, 128, dtype=E4M3, device="cuda") for rows, heads in ((5, 4), (7, 2), (7, 2))
        )
        one = torch.empty(1, device="cuda")
        out, lse = fa3gen.attention(q, k, v, q_descale=one, return_lse=True)
        assert (out.dtype, out.shape, out.stride()) == (torch.bfloat16, q.shape, q.stride())
        assert (lse.dtype, lse.shape) == (torch.float32, (2, 4, 5))
        with pytest.raises(
            ArgumentError, match=r"v_descale is \(2, 4\), torch.float32 on cuda:0; it needs to be one num"
        ):
            torch.ops.fa3gen.attention_forward(q, k, v, v_descale=torch.empty(2, 4, device="cuda"))
    assert fa3gen.attention(*tensors(device="meta")).dtype == torch.bfloat16 and modules.factors == []


def test_the_call_shown_in_the_readme(modules: Modules) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    [code] = [part for part in shown if "q_descale=q_descale" in part and "fa3gen.quantize" not in part]
    names: dict[str, Any] = {"fa3gen": fa3gen, "torch": torch, **factors_of("numbers")}
    names |= {name: x.float() for name, x in zip("qkv", tensors(), strict=True)}
    exec(code, names)
    wanted = reference.attention(*(names[name] for name in "qkv"), reach=(None, 0), compute_dtype=torch.float32).out
    assert ((names["out"].float() - wanted).norm() / wanted.norm()).item() < 0.06  # what rounding to 8 bits costs


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("queries", [1, 300, 16384])
def test_production_modules_are_chosen(dim: int, queries: int) -> None:
    """By the committed table or, with a window, where there is one module; few as packed ones."""
    masks = {"": NoMask(), "_causal": CausalMask(), "_any_window": WindowMask(left=128, right=0)}
    # One query sees all keys under a causal mask, too.
    of_few = {"": "_d{}_causal", "_causal": "_d{}_causal", "_any_window": "_any_window_d{}"}
    for name, mask in masks.items():
        family = Family("e4m3", dim, dim, mask, "bf16")
        size = Size(16384, Shape(1, queries, 16384, 16, 4).tiles, 132, 4, queries)
        choice = dispatch.choose(family, replace(size, in_rows=True), lse=True, workspace=CHECKOUT)
        wanted = f"packed_decode{of_few[name].format(dim)}" if queries == 1 else f"d{dim}{name}"
        assert choice.stem.removesuffix("_short").removesuffix("_long") == f"fwd_fp8_{wanted}"
        assert choice.as_packed == (queries == 1)
        assert not dispatch.choose(family, size, lse=True, workspace=CHECKOUT).as_packed


@pytest.mark.parametrize("lying", ["in rows", "by sequence", "apart", "of blocks", "permuted"])
def test_keys_in_parts_are_those_of_packed_sequences(lying: str) -> None:
    """As without 8 bits where there is a window, sinks or a cap; v by its sequence, or factors of blocks, have none."""
    family = Family("e4m3", 128, 128, CausalMask(), "bf16")
    changes: dict[str, Any] = {"by sequence": {"by_sequence": ("v",)}, "of blocks": {"block_scales": True}}
    changes["permuted"] = {"v_permuted": True, "by_sequence": ("v",)}
    family = family._replace(**changes.get(lying, {}))
    size = Size(16384, Shape(1, 300, 16384, 16, 4).tiles, 132, 4, 300, parts=3, in_rows=lying != "apart")
    if lying == "in rows":
        choice = dispatch.choose(family, size, lse=True, workspace=CHECKOUT)
        assert choice.stem == "fwd_fp8_packed_chunks_small_d128_causal" and choice.as_packed
    else:
        with pytest.raises(NotPossible, match="keys in 3 parts; .*Nor can one be rendered"):
            dispatch.choose(family, size, lse=True, workspace=CHECKOUT)


@pytest.mark.parametrize("kind", ["of heads", "of all"])
@pytest.mark.parametrize("asked", [{}, {"num_splits": 3}])
def test_few_queries_on_the_cpu_model(asked: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the committed table: dense tensors as packed sequences, with their factors."""
    calls.stretches.clear()
    taken = []

    def module_at(path: Path) -> Any:
        taken.append(path.stem)
        return fa3gen.load(path.stem, on="cpu")

    monkeypatch.setattr(calls, "module_at", module_at)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, rows, h, 128, generator=generator).to(E4M3) for rows, h in ((3, 4), (300, 2), (300, 2)))
    shape = (2, 2) if kind == "of heads" else (1,)
    factors = {name: 0.5 + torch.rand(shape, generator=generator) for name in FACTORS}
    out, lse = fa3gen.attention(q, k, v, causal=True, **factors, return_lse=True, **asked)
    calls.stretches.clear()
    assert taken == ["fwd_fp8_packed_decode_d128_causal"] and out.shape == q.shape and lse.shape == (2, 4, 3)
    wanted, wanted_lse = expected(q, k, v, causal=True, **factors, return_lse=True)
    assert (out.double() - wanted.double()).norm() <= 0.04 * wanted.double().norm()
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)


# FA3's function


@KINDS
def test_the_function_of_flash_attention(modules: Modules, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pass_for_cuda(monkeypatch)
    (q, k, v), factors = tensors(), factors_of(kind)
    out, lse = fa3.flash_attn_func(q, k, v, 0.1, True, **factors, return_attn_probs=True)
    wanted, wanted_lse = expected(q, k, v, causal=True, scale=0.1, **factors, return_lse=True)
    assert out.equal(wanted) and lse.equal(wanted_lse)
    # A window that hides nothing is none, another one arrives; a v that lies by its sequence is copied.
    assert fa3.flash_attn_func(q, k, by_sequence(v), window_size=(6, 4), **factors).equal(expected(q, k, v, **factors))
    fa3.flash_attn_func(q, k, v, window_size=(3, 0), **factors)
    assert modules.asked[-1].mask == WindowMask(left=3, right=0)
    assert {family.by_sequence for family in modules.asked} == {()}


def test_the_function_of_flash_attention_compiled(modules: Modules) -> None:
    (q, k, v), factors = tensors(), factors_of("of heads")
    compiled = torch.compile(
        lambda q, k, v: fa3.flash_attn_func(q, k, v, causal=True, **factors) + 1, fullgraph=True, backend="aot_eager"
    )
    assert compiled(q, k, v).equal(expected(q, k, v, causal=True, **factors) + 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"deterministic_batch": True}, "deterministic_batch is True"),
    ],
)
def test_what_flash_attention_s_function_does_not_serve(options: dict[str, Any], said: str, eager: Modules) -> None:
    message = f"^{said}, and q has dtype {E4M3}, beside which it is not served; pass q, k and v in bfloat16"
    with pytest.raises(NotImplementedError, match=message):
        fa3.flash_attn_func(*tensors(), **options)
    assert eager.asked == []


# What makes no sense

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"q_descale": 0.5},
        TypeError,
        r"q_descale is a float; it needs to be a torch.Tensor on q's device: each call wou",
    ),
    (
        {"k_descale": torch.ones(4)},
        ArgumentError,
        r"k_descale is \(4,\), .*; it needs to be one number or \(2, 2\), for",
    ),
    ({"v_descale": torch.ones(2, 4)}, ArgumentError, r"v_descale is \(2, 4\), torch.float32"),
    ({"q_descale": torch.ones(2, 2).half()}, ArgumentError, r"q_descale is \(2, 2\), torch.float16"),
    (
        {"q_descale": torch.ones(1, requires_grad=True)},
        ValueError,
        "q_descale requires grad; this kernel is forward on",
    ),
    ({"sinks": [0.0] * 4}, TypeError, "sinks is a list; it needs to be a torch.Tensor"),
    ({"softcap": -30.0}, ArgumentError, "softcap is -30.0; it needs to be"),
    ({"deterministic_batch": True}, ArgumentError, "deterministic_batch is True, and .* or leave it out"),
    ({"split_keys": 512}, ArgumentError, "split_keys is 512, and"),
    ({"num_splits": -2}, ArgumentError, "num_splits is -2; it needs to be 0"),
]


@WAYS
@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_arguments_without_sense(
    way: str, options: dict[str, Any], error: type[Exception], message: str, request: pytest.FixtureRequest
) -> None:
    """Also where a call without them was served before."""
    request.getfixturevalue(way)
    q, k, v = tensors()
    fa3gen.attention(q, k, v)
    for function in (fa3gen.attention, fa3gen.attention.explain):
        with pytest.raises(error, match=message):
            function(q, k, v, **options)


@WAYS
def test_factors_of_tensors_of_16_bits_are_refused(way: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(way)
    q, k, v = (x.bfloat16() for x in tensors())
    fa3gen.attention(q, k, v)
    for name in FACTORS:
        for function in (fa3gen.attention, fa3gen.attention.explain):
            with pytest.raises(ArgumentError, match=f"{name} is given, and q has dtype torch.bfloat16; factors are of"):
                function(q, k, v, **{name: torch.ones(2, 2)})


@WAYS
def test_mixed_dtypes_are_refused(way: str, request: pytest.FixtureRequest) -> None:
    """Whatever was served before; with the way out for a cache of 8 bits."""
    request.getfixturevalue(way)
    q, k, v = tensors()
    fa3gen.attention(q, k, v)
    for mixed in ((q, k.bfloat16(), v), (q, k, v.half()), (q.bfloat16(), k, v), (q, k.to(torch.float8_e5m2), v)):
        with pytest.raises(
            ArgumentError, match=r"q has dtype .*; dense tensors need the same. Beside q of 16 bits, k an"
        ):
            fa3gen.attention(*mixed)


@WAYS
def test_keys_and_values_of_other_8_bits_are_taken(way: str, request: pytest.FixtureRequest) -> None:
    """Whatever was served before; and what is not of them, or not beside such q, is refused."""
    request.getfixturevalue(way)
    q, k, v = tensors()
    others = k.to(torch.float8_e5m2), v.to(torch.float8_e5m2)
    fa3gen.attention(q, k, v)
    fa3gen.attention(q, *others)
    for mixed in ((q, others[0], v), (q, k, others[1])):
        with pytest.raises(ArgumentError, match=r"; beside q of torch.float8_e4m3fn both may be torch.float8_e5m2"):
            fa3gen.attention(*mixed)
    with pytest.raises(TypeError, match="q has dtype torch.float8_e5m2; fa3gen.attention takes"):
        fa3gen.attention(q.to(torch.float8_e5m2), *others)


def test_a_factor_on_another_device_is_refused(modules: Modules) -> None:
    message = r"k_descale is \(1,\), torch.float32 on cpu; .* torch.float32 on cuda:0"
    with FakeTensorMode(), pytest.raises(ArgumentError, match=message):
        q, k, v = (torch.empty(2, 7, 2, 128, dtype=E4M3, device="cuda") for _ in range(3))
        fa3gen.attention(q, k, v, k_descale=torch.ones(1, device="cpu"))


def test_queries_of_other_8_bits_are_refused() -> None:
    with pytest.raises(
        TypeError, match="q has dtype torch.float8_e5m2; fa3gen.attention takes torch.bfloat16 or torch"
    ):
        fa3gen.attention(*(x.to(torch.float8_e5m2) for x in tensors()))


# Which module


def row(stem: str, **changes: Any) -> Row:
    """A row for all sizes of what a module computes."""
    [variant] = CHECKOUT.resolve(stem)
    family = Family.of(variant.spec)
    assert family.eight_bits
    return Row(
        dtype=family.dtype,
        head_dim=family.head_dim,
        head_dim_v=family.head_dim_v,
        mask=family.mask,
        out_dtype=family.out_dtype,
        by_sequence="v" if family.by_sequence else None,
        v_permuted=family.v_permuted or None,
        module=stem,
        sha256=sha256(CHECKOUT.module_path(stem))[:16],
        measured=[Measurement(seq=4096, tflops=1000.0, gpu="NVIDIA H200")],
        **changes,
    )


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """In this checkout, a function that writes another table."""
    path = tmp_path / "dispatch.yaml"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(dispatch, "table_path", lambda workspace: path)

    def write(*stems: str) -> None:
        path.write_text(dispatch_table.table_text(Table(rows=[row(stem) for stem in stems])))
        calls.stretches.clear()

    write()
    yield write
    calls.stretches.clear()


def test_rows_of_the_table_are_chosen_by_dtype_and_by_how_v_lies(rows: Any) -> None:
    rows("k7_d128", BY_SEQUENCE, "k7_d128_causal")
    q, k, v = tensors(600, 700)
    for given, causal, stem in (
        (v, False, "k7_d128"),
        (by_sequence(v), False, BY_SEQUENCE),
        (v, True, "k7_d128_causal"),
    ):
        found = fa3gen.attention.explain(q, k, given, causal=causal, return_lse=True, **factors_of("numbers"))
        assert (
            found.stem == stem and found.row is not None and found.reason.startswith(str(dispatch.table_path(CHECKOUT)))
        )
        assert ("e4m3, O in bf16, head dim 128" in str(found)) and (
            stem != BY_SEQUENCE or "sequence in v" in str(found)
        )


@pytest.mark.parametrize(("causal", "stem"), [(False, "k7_e5m2_d128"), (True, "k7_e5m2_d128_causal")])
def test_keys_and_values_of_other_8_bits_have_modules(causal: bool, stem: str, rows: Any) -> None:
    rows("fwd_fp8_d128", "fwd_fp8_d128_causal")  # which are of keys in e4m3
    q, k, v = tensors(600, 700)
    found = fa3gen.attention.explain(q, *(x.to(torch.float8_e5m2) for x in (k, v)), causal=causal)
    assert found.stem == stem and found.row is None and "e4m3, K and V in e5m2, O in bf16" in found.reason
    assert fa3gen.attention.explain(q, k, v, causal=causal).stem != stem


def test_without_a_row_sums_are_in_float32(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ladder, where the rung with sums in one level fits as well, and is passed over."""
    all_of = dispatch._modules
    monkeypatch.setattr(
        dispatch, "_modules", lambda workspace: (each for each in all_of(workspace) if each[0].stem.startswith("k"))
    )
    for dim, mask in ((64, NoMask()), (128, CausalMask())):
        q, k, v = tensors(600, 700, dim=dim)
        found = fa3gen.attention.explain(q, k, v, causal=isinstance(mask, CausalMask))
        assert Family.of(found.spec) == Family("e4m3", dim, dim, mask, "bf16") and found.row is None
        assert found.spec.accumulate is not None and "no row of the table is for e4m3, O in bf16" in found.reason
        assert found.stem.startswith("k7_two_levels") and found.reason.endswith(
            "fits and adds up tiles of keys in float32"
        )


def test_without_a_row_the_production_set_comes_first(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its sums are like: somebody has decided on them."""
    rung, other = (CHECKOUT.resolve(stem)[0] for stem in ("k7_d128", BY_ROWS))
    modules = [(replace(rung, stem="fwd_fp8_d128"), Path("fwd_fp8_d128.py")), (other, Path(f"{BY_ROWS}.py"))]
    monkeypatch.setattr(dispatch, "_modules", lambda workspace: iter(modules))
    found = fa3gen.attention.explain(*tensors(600, 700))
    assert found.stem == "fwd_fp8_d128" and found.reason.endswith("this is the only production module that fits")


def test_where_no_module_reads_v_by_its_sequence_the_way_out_is_a_copy(rows: Any) -> None:
    q, k, v = tensors(600, 700)
    with pytest.raises(
        NotRendered, match=r"contiguous sequence in v; .*; pass v.contiguous\(\), whose rows are contig"
    ) as e:
        fa3gen.attention.explain(q, k, by_sequence(v), causal=True)
    assert e.value.proposal is not None and Family.of(e.value.proposal.spec).by_sequence == ("v",)
    assert e.value.proposal.spec.accumulate is not None
    fa3gen.attention.explain(q, k, by_sequence(v).contiguous(), causal=True)


@pytest.mark.parametrize("dim", [96, 192, 256])
def test_where_no_module_fits_the_error_has_a_spec(rows: Any, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums in two levels, as long as registers allow that."""
    monkeypatch.setattr(dispatch, "_modules", lambda workspace: iter(()))
    with pytest.raises(NotRendered, match=f"computes e4m3, O in bf16, head dim {dim}, causal") as error:
        fa3gen.attention.explain(*tensors(dim=dim), causal=True)
    spec = error.value.proposal.spec  # type: ignore[union-attr]
    assert Family.of(spec) == Family("e4m3", dim, dim, CausalMask(), "bf16")
    assert (spec.accumulate is not None) == (dim <= 128) and spec.smem is not None and spec.smem.vt is not None


def test_a_head_dim_that_no_spec_serves_is_rendered_on_demand(
    rows: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As for tensors of 16 bits, and found again."""
    from fa3gen.compile.cache import CACHE_DIR_VARIABLE

    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(dispatch, "rendered_here", [])
    monkeypatch.setattr(calls, "module_at", lambda file: SimpleNamespace(attention=expected))
    q, k, v = tensors(dim=160)
    with pytest.raises(NotRendered):
        fa3gen.attention(q, k, v)
    for options in ({"render": True}, {}):
        assert fa3gen.attention(q, k, v, **factors_of("numbers"), **options).equal(
            expected(q, k, v, **factors_of("numbers"))
        )
    assert fa3gen.attention.explain(q, k, v).stem == "made_e4m3_d160_full_o_bf16"


def test_modules_of_8_bits_serve_no_other_calls() -> None:
    for stem in (BY_ROWS, BY_SEQUENCE):
        [variant] = CHECKOUT.resolve(stem)
        for family in (Family("bf16", 128, 128, NoMask()), Family("e4m3", 128, 128, NoMask(), "fp32")):
            assert not Family.of(variant.spec).serves(family)
    with pytest.raises(NoKernel, match="no generated module computes e4m3, O in fp32"):
        q, k, v = tensors()
        fa3gen.attention.explain(q, k, v, out=torch.empty_like(q, dtype=torch.float32))


def test_permuted_keys_have_modules_and_rows_of_their_own(rows: Any) -> None:
    """With a row or without, which nobody has measured yet; and nothing else has them."""
    q, k, v = tensors(600, 700)
    given = permuted_keys(v, fill=0.0)
    for stems in ((), (BY_SEQUENCE, PERMUTED)):
        rows(*stems)
        for causal in (False, True):
            found = fa3gen.attention.explain(q, k, given, v_permuted=True, causal=causal, return_lse=True)
            assert found.stem == PERMUTED + "_causal" * causal and Family.of(found.spec).v_permuted
            assert (found.row is not None) == (bool(stems) and not causal)
        assert fa3gen.attention.explain(q, k, by_sequence(v)).stem == BY_SEQUENCE
    with pytest.raises(NotRendered, match="leave v_permuted out and pass v with its keys in order") as error:
        fa3gen.attention.explain(q, k, given, v_permuted=True, window=(5, 3))
    assert error.value.proposal is not None and Family.of(error.value.proposal.spec).v_permuted


def test_what_permuted_keys_are_refused_with(rows: Any) -> None:
    q, k, v = tensors(5, 7)
    given = permuted_keys(v, fill=0.0)
    for bad, message in (
        ((q.bfloat16(), k.bfloat16(), given.bfloat16()), "q has dtype torch.bfloat16; it is for torch.float8_e4m3fn"),
        (
            (q, k, by_sequence(v)),
            r"beside k \(2, 7, 2, 128\) it needs to be \(2, 16, 2, 128\), keys in whole units of 16",
        ),
        (
            (q, k, given.contiguous()),
            r"that of its keys needs to be 1: pass what fa3gen.quantize\(v, transpose=True, perm",
        ),
    ):
        for call in (fa3gen.attention, fa3gen.attention.explain):
            with pytest.raises(ArgumentError, match=message):
                call(*bad, v_permuted=True)


# On the CPU model


@pytest.mark.parametrize(
    ("stem", "kind"),
    [(BY_ROWS, "numbers"), (BY_ROWS, "of heads"), (BY_SEQUENCE, "stride 0"), (PERMUTED, "of heads")],
)
def test_calls_executed_on_the_cpu_model(stem: str, kind: str, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the row, by the operator, with LSE; P is rounded to 4 bits, and O nearly is by that."""
    rows(stem)
    monkeypatch.setattr(calls, "module_at", load_on_cpu)
    q, k, v = tensors(70, 150)
    given, factors, named = v, factors_of(kind), {}
    if stem == BY_SEQUENCE:
        given = by_sequence(v)
    if stem == PERMUTED:
        given, named = permuted_keys(v, fill=0.0), {"v_permuted": True}
    out, lse = fa3gen.attention(q, k, given, **factors, **named, return_lse=True)
    wanted, wanted_lse = expected(q, k, v, **factors, return_lse=True)
    assert ((out.float() - wanted.float()).norm() / wanted.float().norm()).item() < 0.04
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-3, atol=1e-3)
