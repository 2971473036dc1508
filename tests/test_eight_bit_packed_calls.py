"""`fa3gen.attention_packed` and FA3's functions of packed sequences and caches: q, k and v in 8 bits, without a GPU.

The modules are stood in for by functions that compute the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_modules import offsets, out_of_pages, packed_attention
from rendering import CHECKOUT
from stand_ins import generated_module, pass_for_cuda, standing_in
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3gen
from fa3gen import flash_attn_interface as fa3
from fa3gen.design.family import Family
from fa3gen.design.proposed import Proposal, propose
from fa3gen.run import dispatch
from fa3gen.run.dispatch import ArgumentError, Choice, NoKernel, Size, Stretch
from fa3gen.run.eight_bits import FACTORS
from fa3gen.spec.model import CausalMask, NoMask, TmaLoad, WindowMask

E4M3 = torch.float8_e4m3fn
LENGTHS_Q, LENGTHS_K, HEADS, DIM = (3, 0, 5, 2), (7, 4, 0, 9), (4, 2), 128
BEGINS = offsets(LENGTHS_Q), offsets(LENGTHS_K)
COUNT, CAUSAL = len(LENGTHS_Q), CausalMask()


class Modules:
    """Stands in for the dispatch table and for its modules; keeps what it was asked, and factors."""

    def __init__(self) -> None:
        self.asked: list[Family] = []
        self.sizes: list[Size] = []
        self.factors: list[dict[str, torch.Tensor]] = []

    def choose(self, family: Family, size: Size, *, lse: bool, workspace: Any) -> Choice:
        self.asked.append(family)
        self.sizes.append(size)
        [variant] = CHECKOUT.resolve("fwd_fp8_packed_d128")
        around = Stretch(least_keys=size.keys, most_keys=size.keys)
        return Choice("one", Path("one.py"), variant.spec, variant.source, None, "made up", size=size, around=around)

    def module_at(self, path: Path) -> Any:
        family = self.asked[-1]

        def attention(q: Any, k: Any, v: Any, begins: Any, *keys: Any, **options: Any) -> Any:
            if family.layout == "paged":
                table, used = keys
                k, v = (out_of_pages(x.float(), table, used.tolist()) for x in (k, v))
                keys = (offsets(used.tolist()),)
            factors = {name: options.pop(name) for name in FACTORS if name in options}
            self.factors.append(factors)
            return expected(q, k, v, begins, *keys, mask=family.mask, **factors, **options)

        return generated_module(attention, packed=True)


def expected(
    q: Any, k: Any, v: Any, *begins: Any, mask: Any, out: Any = None, return_lse: bool = False, **options: Any
) -> Any:
    """O in bfloat16, and LSE, of tensors times their factors, (sequences, heads_kv), or one for all."""
    wide, heads_kv, count = [], k.shape[1], len(begins[0]) - 1
    used = options.get("seqused_k")
    ends = begins[1][1:] if used is None else begins[1][:-1] + used
    for name, x, (first, behind) in zip(
        FACTORS, (q, k, v), ((begins[0][:-1], begins[0][1:]), *[(begins[1][:-1], ends)] * 2), strict=True
    ):
        factor = options.pop(name, None)
        scaled = x.float()
        for i in range(count if factor is not None else 0):
            each = (factor.reshape(1, 1) if factor.numel() == 1 else factor).expand(count, heads_kv)[i]
            scaled[first[i] : behind[i]] *= each.repeat_interleave(x.shape[1] // heads_kv)[:, None]
        wide.append(scaled)
    found, lse = packed_attention(*wide, *begins, mask=mask, **options)
    rounded = found.bfloat16()
    out = rounded if out is None else out.copy_(rounded)
    return (out, lse) if return_lse else out


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Modules]:
    with standing_in(Modules(), monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture
def eager(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> Modules:
    pass_for_cuda(monkeypatch)
    return modules


WAYS = pytest.mark.parametrize("way", ["eager", "modules"])


def tensors(lengths_q: Sequence[int] = LENGTHS_Q, lengths_k: Sequence[int] = LENGTHS_K) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(len(lengths_q))
    rows_q, rows_k = sum(lengths_q), sum(lengths_k)
    shapes = (rows_q, HEADS[0], DIM), (rows_k, HEADS[1], DIM), (rows_k, HEADS[1], DIM)
    return tuple(torch.randn(shape, generator=generator).to(E4M3) for shape in shapes)


def factors_of(kind: str, count: int = COUNT) -> dict[str, Any]:
    """Factors of q, k and v for so many sequences with 2 heads of k."""
    number, each = torch.tensor(0.75), torch.rand(count, 2, generator=torch.Generator().manual_seed(2)) + 0.5
    match kind:
        case "numbers":
            return {"q_descale": number, "k_descale": number.view(1), "v_descale": number.view(1, 1, 1)}
        case "of heads":
            return {"q_descale": each, "k_descale": each.t().contiguous().t(), "v_descale": 2 * each}
        case "stride 0":
            return {
                "q_descale": each[:1].expand(count, 2),
                "k_descale": each[:, :1].expand(count, 2),
                "v_descale": number.expand(count, 2),
            }
        case _:
            return {"q_descale": each}


KINDS = pytest.mark.parametrize("kind", ["numbers", "of heads", "stride 0", "one of them"])


# Calls


@WAYS
@KINDS
def test_factors_reach_the_module_as_it_takes_them(way: str, kind: str, request: pytest.FixtureRequest) -> None:
    """For each sequence and head of k, in place of one number too; none is copied, and none is made up."""
    modules: Modules = request.getfixturevalue(way)
    (q, k, v), factors = tensors(), factors_of(kind)
    wanted, wanted_lse = expected(q, k, v, *BEGINS, mask=CausalMask(), **factors, return_lse=True)
    for _ in range(2):  # the second one is looked up
        out, lse = fa3gen.attention_packed(q, k, v, *BEGINS, causal=True, **factors, return_lse=True)
        assert out.dtype == torch.bfloat16 and out.equal(wanted) and lse.equal(wanted_lse)
    assert not wanted.equal(expected(q, k, v, *BEGINS, mask=CausalMask()))
    into = torch.empty_like(q, dtype=torch.bfloat16)
    assert fa3gen.attention_packed(q, k, v, *BEGINS, causal=True, **factors, out=into) is into and into.equal(wanted)
    for given in modules.factors:
        assert list(given) == list(factors)
        for name, factor in given.items():
            assert factor.shape == (COUNT, 2) and factor.data_ptr() == factors[name].data_ptr()
            assert factors[name].numel() > 1 or factor.stride() == (0, 0)
    fa3gen.attention_packed(q, k, v, *BEGINS, causal=True)
    assert modules.factors[-1] == {}


@WAYS
def test_sinks_and_caps_reach_it_beside_factors(way: str, request: pytest.FixtureRequest) -> None:
    """Also where a call without them was served before; keys of 8 bits beside q of 16 are the same."""
    modules: Modules = request.getfixturevalue(way)
    (q, k, v), factors = tensors(), factors_of("of heads")
    scores = {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]), "softcap": 1.5}
    fa3gen.attention_packed(q, k, v, *BEGINS, causal=True, **factors)
    wanted, wanted_lse = expected(q, k, v, *BEGINS, mask=CausalMask(), **factors, **scores, return_lse=True)
    out, lse = fa3gen.attention_packed(q, k, v, *BEGINS, causal=True, **factors, **scores, return_lse=True)
    assert out.equal(wanted) and lse.equal(wanted_lse)
    assert not wanted.equal(expected(q, k, v, *BEGINS, mask=CausalMask(), **factors))
    of_8 = Family("e4m3", DIM, DIM, CausalMask(), "bf16", layout="packed", sink=True, softcap=True)
    assert modules.asked[-1] == of_8
    wide, of_k_and_v = q.bfloat16(), {name: factors[name] for name in FACTORS[1:]}
    out = fa3gen.attention_packed(wide, k, v, *BEGINS, window=(3, 1), softcap=99.0, **of_k_and_v)
    window = WindowMask(left=3, right=1)
    assert out.equal(expected(wide, k, v, *BEGINS, mask=window, softcap=99.0, **of_k_and_v))
    keys = {"kv_dtype": "e4m3", "softcap": True, "any_cap": True}
    assert modules.asked[-1] == Family("bf16", DIM, DIM, window, layout="packed", **keys)


def test_what_is_looked_for(eager: Modules) -> None:
    """A family of 8 bits in all of q, k and v; beside q of 16 bits, one with such keys."""
    q, k, v = tensors()
    table, used = torch.zeros(COUNT, 1, dtype=torch.int32), torch.tensor([3, 0, 5, 2], dtype=torch.int32)
    pages = [x[:16].view(1, 16, *x.shape[1:]) for x in (k, v)]
    fa3gen.attention_packed(q, k, v, *BEGINS)
    fa3gen.attention_packed(q, k, v, *BEGINS, window=(3, 1))
    fa3gen.attention_packed(q, *pages, BEGINS[0], page_table=table, seqused_k=used, causal=True)
    family = Family("e4m3", DIM, DIM, NoMask(), "bf16", layout="packed")
    paged = family._replace(layout="paged", page_rows=16, mask=CausalMask())
    assert eager.asked == [family, family._replace(mask=WindowMask(left=3, right=1)), paged]
    fa3gen.attention_packed.explain(q.bfloat16(), k, v, *BEGINS)
    assert eager.asked[-1] == Family("bf16", DIM, DIM, NoMask(), layout="packed", kv_dtype="e4m3")


@KINDS
def test_compiled_in_one_graph(modules: Modules, kind: str) -> None:
    (q, k, v), factors = tensors(), factors_of(kind)

    def model(q: Any, k: Any, v: Any, factors: Any) -> Any:
        out, lse = fa3gen.attention_packed(q, k, v, *BEGINS, causal=True, **factors, return_lse=True)
        return out + 1, lse, fa3gen.attention_packed(q, k, v, *BEGINS)

    out, lse, other = torch.compile(model, fullgraph=True, backend="aot_eager")(q, k, v, factors)
    wanted, wanted_lse = expected(q, k, v, *BEGINS, mask=CausalMask(), **factors, return_lse=True)
    assert out.equal(wanted + 1) and lse.equal(wanted_lse)
    assert other.equal(expected(q, k, v, *BEGINS, mask=NoMask()))


@pytest.mark.parametrize("name", ["attention_packed", "attention_packed_out"])
@KINDS
def test_operators_are_sound(modules: Modules, name: str, kind: str) -> None:
    q, k, v = tensors()
    into = [torch.empty_like(q, dtype=torch.bfloat16)] * name.endswith("out")
    options = {"causal": True, "return_lse": True, **factors_of(kind)}
    # Not `test_schema`, which multiplies its inputs: torch has no such operation on 8 bits. test_packed_ops.py has it.
    utils = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    operator = getattr(torch.ops.fa3gen, name).default
    torch.library.opcheck(operator, (q, k, v, *BEGINS, *into), options, test_utils=utils)


def test_fake_tensors_have_the_real_dtype_and_shape(modules: Modules) -> None:
    with FakeTensorMode():
        q, k, v = (torch.empty(9, heads, DIM, dtype=E4M3, device="cuda") for heads in (4, 2, 2))
        begins = [torch.empty(5, dtype=torch.int32, device="cuda") for _ in range(2)]
        one = torch.empty(1, device="cuda")
        out, lse = fa3gen.attention_packed(q, k, v, *begins, q_descale=one, return_lse=True)
        assert (out.dtype, out.shape, lse.dtype, lse.shape) == (torch.bfloat16, q.shape, torch.float32, (4, 9))
        with pytest.raises(ArgumentError, match=r"v_descale is \(5, 2\), torch.float32 on cuda:0; it needs to be one"):
            torch.ops.fa3gen.attention_packed(q, k, v, *begins, v_descale=torch.empty(5, 2, device="cuda"))
    assert modules.factors == []


# Which module


def chosen(seq_q: int, mask: Any = CAUSAL, *, dim: int = DIM, page: int | None = None, parts: int = 0) -> str:
    """The stem that dispatch takes of the committed modules for 4 sequences with 1024 keys, 32 heads on 8."""
    layout: Any = "packed" if page is None else "paged"
    family = Family("e4m3", dim, dim, mask, "bf16", layout=layout, page_rows=page)
    size = Size(1024, 4 * 32 * -(-seq_q // 128), 132, 4, seq_q, parts, mean_queries=seq_q)
    return dispatch.choose(family, size, lse=True, workspace=CHECKOUT).stem


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_production_modules_are_chosen(dim: int) -> None:
    assert chosen(700, dim=dim) == f"fwd_fp8_packed_d{dim}_causal"
    assert chosen(700, NoMask(), dim=dim) == f"fwd_fp8_packed_d{dim}"
    # With some six tiles for each SM, in pages.
    assert {chosen(700, dim=dim, page=page) for page in (16, 48, 64)} == {f"fwd_fp8_paged_late_d{dim}_causal"}


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("page", [None, 16])
def test_parts_have_modules(page: int | None, dim: int) -> None:
    layout = "packed" if page is None else "paged"
    assert chosen(1, dim=dim, page=page, parts=3) == f"fwd_fp8_{layout}_decode_d{dim}_causal"
    # In pages there is one that reads K and V once for all heads of a group and splits no keys, either.
    once = "mixed_any_group_" if page is not None and dim != 128 else ""
    assert chosen(1, dim=dim, page=page, parts=1) == f"fwd_fp8_{layout}_{once}d{dim}_causal"


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_windows_have_modules(dim: int) -> None:
    window = WindowMask(left=128, right=0)
    for page, layout in ((None, "packed"), (16, "paged"), (48, "paged")):
        assert chosen(700, window, dim=dim, page=page) == f"fwd_fp8_{layout}_any_window_d{dim}"
        assert chosen(1, window, dim=dim, page=page) == f"fwd_fp8_{layout}_decode_any_window_d{dim}"
    for page in (16, 48):  # without a mask there is none for pages, and that for any window shows all keys
        assert chosen(700, NoMask(), dim=dim, page=page) == f"fwd_fp8_paged_any_window_d{dim}"


def test_what_has_no_module_is_said() -> None:
    with pytest.raises(
        NoKernel, match="no generated module computes e4m3, O in bf16, head dim 128, no mask, pages of 8"
    ):
        chosen(700, NoMask(), page=8)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_pages_of_other_sizes_have_modules(dim: int) -> None:
    """For prompts, few queries and parts; others are proposed with single rows, as many stages, and no boxes."""
    for page in (1, 3, 8, 24):
        assert chosen(700, dim=dim, page=page) == f"fwd_fp8_paged_rows_d{dim}_causal"
        assert chosen(1, dim=dim, page=page) == f"fwd_fp8_paged_decode_rows_d{dim}_causal"
        assert chosen(1, dim=dim, page=page, parts=3) == f"fwd_fp8_paged_decode_rows_d{dim}_causal"
    base = CHECKOUT.load(CHECKOUT.root / "specs/fwd_fp8_paged_rows.yaml").variants
    stages = {variant.spec.problem.head_dim: variant.spec.load.kv_stages for variant in base}
    for mask in (NoMask(), WindowMask(left=300, right=5)):
        for more in ({}, {"sink": True}, {"softcap": True}):
            family = Family("e4m3", dim, dim, mask, "bf16", layout="paged", page_rows=3, **more)
            proposal = propose(family, CHECKOUT)
            assert isinstance(proposal, Proposal) and isinstance(proposal.spec.load, TmaLoad)
            assert (proposal.spec.load.page_rows, proposal.spec.load.kv_stages) == (1, stages[dim])


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("page", [None, 16])
def test_few_queries_go_to_what_splits_keys(page: int | None, dim: int) -> None:
    """Measured or not: the other one reads K and V once for each query head."""
    layout = "packed" if page is None else "paged"
    assert {chosen(seq_q, dim=dim, page=page) for seq_q in (1, 4)} == {f"fwd_fp8_{layout}_decode_d{dim}_causal"}


# FA3's functions


def cache() -> tuple[torch.Tensor, ...]:
    """q of 3 sequences, two queries each, a cache of 16 rows, and how many of these are in use."""
    q, k, v = tensors((2,) * 3, (16,) * 3)
    return q.view(3, 2, *q.shape[1:]), *(x.view(3, 16, *x.shape[1:]) for x in (k, v)), torch.tensor([9, 2, 16]).int()


@KINDS
def test_varlen(eager: Modules, kind: str) -> None:
    (q, k, v), factors = tensors(), factors_of(kind)
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, *BEGINS, 5, 9, softmax_scale=0.1, causal=True, **factors, return_attn_probs=True
    )
    wanted = expected(q, k, v, *BEGINS, mask=CausalMask(), scale=0.1, **factors, return_lse=True)
    assert out.equal(wanted[0]) and lse.equal(wanted[1])
    fa3.flash_attn_varlen_func(q, k, v, *BEGINS, 5, 9, num_splits=3)
    assert eager.sizes[-1].parts == 3


@KINDS
@pytest.mark.parametrize("where", ["contiguous", "whole", "paged"])
def test_a_cache(eager: Modules, kind: str, where: str) -> None:
    """Contiguous, with lengths or all of it in use, and in pages; factors are of sequences in any of them."""
    (q, k, v, used), factors = cache(), factors_of(kind, 3)
    given: dict[str, Any] = {} if where == "whole" else {"cache_seqlens": used}
    used = torch.full((3,), 16).int() if where == "whole" else used
    if where == "paged":
        given["page_table"] = torch.arange(3, dtype=torch.int32)[:, None]
    out = fa3.flash_attn_with_kvcache(q, k, v, causal=True, **given, **factors)
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    begins = offsets([2] * 3), offsets([16] * 3)
    wanted = expected(*rows, *begins, mask=CausalMask(), seqused_k=used, **factors)
    assert out.dtype == torch.bfloat16 and out.equal(wanted.view(out.shape))
    assert eager.asked[-1].dtype == "e4m3" and eager.asked[-1].layout == ("paged" if where == "paged" else "packed")


def test_sinks_and_caps_of_flash_attention(eager: Modules) -> None:
    """By FA3's names, in both functions, beside keys of 8 bits, with q of 8 bits and of 16."""
    (q, k, v, used), factors, sinks = cache(), factors_of("of heads", 3), torch.tensor([0.5, -1.0, 2.0, 0.0])
    rows, begins = [x.flatten(0, 1) for x in (q, k, v)], (offsets([2] * 3), offsets([16] * 3))
    scores: dict[str, Any] = {"sinks": sinks, "softcap": 1.5}
    for dtype in (E4M3, torch.bfloat16):
        of = {name: factor for name, factor in factors.items() if dtype == E4M3 or name != "q_descale"}
        given: dict[str, Any] = {**of, "causal": True, "softcap": 1.5, "s_aux": sinks}
        out = fa3.flash_attn_with_kvcache(q.to(dtype), k, v, cache_seqlens=used, **given)
        wide = rows[0].to(dtype), *rows[1:]
        wanted = expected(*wide, *begins, mask=CausalMask(), seqused_k=used, **of, **scores)
        assert out.equal(wanted.view(out.shape))
        packed = fa3.flash_attn_varlen_func(*wide, *begins, 2, 16, seqused_k=used, **given)
        assert packed.equal(wanted)
        family = eager.asked[-1]
        assert (family.sink, family.softcap, family.dtype) == (True, True, "e4m3" if dtype == E4M3 else "bf16")


def test_new_keys_of_8_bits_are_appended(eager: Modules) -> None:
    q, k, v, used = cache()
    new = [x[:, :2].clone() for x in (v, k)]
    fa3.flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=torch.tensor([9, 2, 5]).int(), causal=True)
    assert k[1, 2:4].view(torch.uint8).equal(new[0][1].view(torch.uint8))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"deterministic_batch": True}, "deterministic_batch is True"),
    ],
)
def test_what_flash_attention_s_functions_do_not_serve(options: Any, said: str, eager: Modules) -> None:
    message = f"^{said}, and q has dtype {E4M3}, beside which it is not served; pass q, k and v in bfloat16"
    q, k, v, used = cache()
    for function, given in (
        (fa3.flash_attn_varlen_func, (*tensors(), *BEGINS, 5, 9)),
        (fa3.flash_attn_with_kvcache, (q, k, v)),
    ):
        with pytest.raises(NotImplementedError, match=message):
            function(*given, **options)
    assert eager.asked == []


# What makes no sense

REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"q_descale": 0.5},
        TypeError,
        r"q_descale is a float; it needs to be a torch.Tensor on q's device: each call wou",
    ),
    ({"k_descale": torch.ones(4)}, ArgumentError, r"k_descale is \(4,\), .*; it needs to be one number or \(4, 2\), f"),
    ({"v_descale": torch.ones(4, 4)}, ArgumentError, r"v_descale is \(4, 4\), torch.float32"),
    ({"q_descale": torch.ones(4, 2).half()}, ArgumentError, r"q_descale is \(4, 2\), torch.float16"),
    ({"q_descale": torch.ones(1, requires_grad=True)}, ValueError, "q_descale requires grad; this kernel is forward"),
    ({"sinks": [0.0] * 4}, TypeError, "sinks is a list; it needs to be a torch.Tensor"),
    ({"softcap": -30.0}, ArgumentError, "softcap is -30.0; it needs to be"),
    ({"deterministic_batch": True}, ArgumentError, "deterministic_batch is True, and .* or leave it out"),
    ({"num_splits": -1}, ArgumentError, "num_splits is -1; it needs to be 0"),
]


@WAYS
@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_arguments_without_sense(
    way: str, options: dict[str, Any], error: type[Exception], message: str, request: pytest.FixtureRequest
) -> None:
    """Also where a call without them was served before."""
    request.getfixturevalue(way)
    q, k, v = tensors()
    fa3gen.attention_packed(q, k, v, *BEGINS)
    for function in (fa3gen.attention_packed, fa3gen.attention_packed.explain):
        with pytest.raises(error, match=message):
            function(q, k, v, *BEGINS, **options)


@WAYS
def test_a_factor_of_queries_of_16_bits_is_refused(way: str, request: pytest.FixtureRequest) -> None:
    """Whether keys have 8 bits or 16, and whatever was served before."""
    request.getfixturevalue(way)
    q, k, v = tensors()
    for keys in ((k, v), (k.bfloat16(), v.bfloat16())):
        fa3gen.attention_packed(q.bfloat16(), *keys, *BEGINS)
        for function in (fa3gen.attention_packed, fa3gen.attention_packed.explain):
            with pytest.raises(
                ArgumentError, match="q_descale is given, and q has dtype torch.bfloat16; it is the fac"
            ):
                function(q.bfloat16(), *keys, *BEGINS, q_descale=torch.ones(COUNT, 2))


@WAYS
def test_mixed_dtypes_are_refused(way: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(way)
    q, k, v = tensors()
    for mixed in ((k.bfloat16(), v.bfloat16()), (k, v.half()), (k.to(torch.float8_e5m2), v)):
        with pytest.raises(ArgumentError, match="q has dtype .*; beside q of 8 bits they need the same, or both"):
            fa3gen.attention_packed(q, *mixed, *BEGINS)
    with pytest.raises(
        TypeError, match="q has dtype torch.float8_e5m2; fa3gen.attention_packed takes .*float8_e4m3fn$"
    ):
        fa3gen.attention_packed(*(x.to(torch.float8_e5m2) for x in (q, k, v)), *BEGINS)


def test_keys_in_e5m2_are_offered_a_spec() -> None:
    """There is no module for them, and one can be rendered."""
    q, k, v = tensors()
    spec = r"extends: fwd_fp8_packed\nload: \{tile_slots: 1\}\nsoftmax: \{exp_before_wait: 3\}\nkv: \{dtype: e5m2\}"
    offered = rf"(?s)e4m3, K and V in e5m2, O in bf16.*{spec}"
    with pytest.raises(NoKernel, match=offered):
        fa3gen.attention_packed.explain(q, k.to(torch.float8_e5m2), v.to(torch.float8_e5m2), *BEGINS)
