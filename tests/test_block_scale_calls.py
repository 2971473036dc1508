"""`fa3gen.attention` with factors of blocks of q and k, without a GPU: modules, shapes, operators, refusals.

The module is stood in for by a function that computes the reference; which one is chosen is asked of the checkout.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rendering import CHECKOUT, ROOT
from stand_ins import generated_module, pass_for_cuda, standing_in
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3gen
from fa3gen import flash_attn_interface as fa3
from fa3gen.design.family import Family, Shape, blocks_of
from fa3gen.records import dispatch_table
from fa3gen.records.tuning_records import TunedProblem
from fa3gen.run import calls, dispatch, eight_bits
from fa3gen.run.dispatch import ArgumentError, Choice, NotRendered, Row, Size, Stretch
from fa3gen.spec.model import CausalMask, NoMask
from fa3gen.spec.quantizing import BLOCK_ROWS
from fa3gen.verify import reference

E4M3 = torch.float8_e4m3fn
FACTORS = eight_bits.FACTORS
OF_BLOCKS = Family("e4m3", 128, 128, NoMask(), "bf16", block_scales=True)


class Modules:
    """Stands in for the dispatch table and for one module; keeps what it was asked, and factors."""

    def __init__(self) -> None:
        self.asked: list[Family] = []
        self.factors: list[dict[str, torch.Tensor]] = []

    def choose(self, family: Family, size: Size, *, lse: bool, workspace: Any) -> Choice:
        self.asked.append(family)
        [variant] = CHECKOUT.resolve("k8_d128")
        around = Stretch(least_keys=size.keys, most_keys=size.keys)
        return Choice("one", Path("one.py"), variant.spec, variant.source, None, "made up", size=size, around=around)

    def module_at(self, path: Path) -> Any:
        causal = isinstance(self.asked[-1].mask, CausalMask)

        def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
            self.factors.append({name: options[name] for name in FACTORS if name in options})
            return expected(q, k, v, causal=causal, **options)

        return generated_module(attention, packed=False)


def wide(x: Any, factor: Any) -> Any:
    """x times one number, factors (batch, heads_kv), or (batch, heads, blocks); in float32."""
    if factor is None or factor.numel() == 1:
        return x.float() * (1.0 if factor is None else factor.reshape(()))
    if factor.dim() == 2:
        return x.float() * factor.repeat_interleave(x.shape[2] // factor.shape[1], 1)[:, None, :, None]
    rows = factor.repeat_interleave(BLOCK_ROWS, 2)[..., : x.shape[1]]
    return x.float() * rows.transpose(1, 2)[..., None]


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
    """O in bfloat16, and LSE, of tensors times their factors."""
    tensors = (wide(x, of.get(name)) for name, x in zip(FACTORS, (q, k, v), strict=True))
    reach = None, 0 if causal else None
    found = reference.attention(*tensors, reach=reach, scale=scale, compute_dtype=torch.float32)
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


def tensors(seq_q: int = 130, seq_k: int = 260, device: Any = None) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seq_q)
    shapes = ((2, seq_q, 4, 128), (2, seq_k, 2, 128), (2, seq_k, 2, 128))
    return tuple(torch.randn(shape, generator=generator).to(E4M3).to(device) for shape in shapes)


def factors_of(kind: str) -> dict[str, Any]:
    """Factors of 2 sequences with 4 heads of q, 2 of k, and 2 and 3 blocks."""
    generator = torch.Generator().manual_seed(1)
    of_q, of_k = (torch.rand(shape, generator=generator) + 0.3 for shape in ((2, 4, 2), (2, 2, 3)))
    match kind:
        case "of blocks":
            return {"q_descale": of_q, "k_descale": of_k, "v_descale": torch.rand(2, 2, generator=generator)}
        case "strides":
            heads = torch.tensor([0.5, 1.5])
            return {
                "q_descale": of_q.transpose(0, 1).contiguous().transpose(0, 1),
                "k_descale": heads[:, None].expand(2, 2, 3),
            }
        case "q alone":
            return {"q_descale": of_q}
        case "v alone":
            return {"v_descale": of_k.transpose(0, 1)}
        case "all of blocks":
            return {"q_descale": of_q, "k_descale": of_k, "v_descale": 2 * of_k}
        case _:
            return {"q_descale": torch.tensor(0.5), "k_descale": of_k, "v_descale": torch.tensor(2.0)}


KINDS = pytest.mark.parametrize(
    "kind", ["of blocks", "strides", "q alone", "numbers and blocks", "v alone", "all of blocks"]
)


@WAYS
@KINDS
def test_factors_reach_the_module_as_it_takes_them(way: str, kind: str, request: pytest.FixtureRequest) -> None:
    """Of blocks, in place of one number too; none is copied, and none is made up."""
    modules: Modules = request.getfixturevalue(way)
    (q, k, v), factors = tensors(), factors_of(kind)
    wanted, wanted_lse = expected(q, k, v, causal=True, **factors, return_lse=True)
    out, lse = fa3gen.attention(q, k, v, causal=True, **factors, return_lse=True)
    assert out.equal(wanted) and lse.equal(wanted_lse) and not wanted.equal(expected(q, k, v, causal=True))
    into = torch.empty_like(q, dtype=torch.bfloat16)
    assert fa3gen.attention(q, k, v, causal=True, **factors, out=into) is into and into.equal(wanted)
    of_v = (2, 2, 3) if factors.get("v_descale", torch.ones(1)).dim() == 3 else (2, 2)
    shapes = {"q_descale": (2, 4, 2), "k_descale": (2, 2, 3), "v_descale": of_v}
    for given in modules.factors:
        assert {name: factor.shape for name, factor in given.items()} == {name: shapes[name] for name in factors}
        assert all(factor.data_ptr() == factors[name].data_ptr() for name, factor in given.items())
    assert {family.block_scales for family in modules.asked} == {True}


def test_a_repeated_call_is_looked_up_once_for_each_kind_of_factors(eager: Modules) -> None:
    q, k, v = tensors()
    of_heads = {"q_descale": torch.ones(2, 2), "k_descale": torch.ones(2, 2)}
    for factors in (factors_of("of blocks"), of_heads, factors_of("q alone"), {}, {"k_descale": torch.ones(1, 1, 1)}):
        assert fa3gen.attention(q, k, v, **factors).equal(expected(q, k, v, **factors))
    assert eager.asked == [OF_BLOCKS, OF_BLOCKS._replace(block_scales=False)]


@KINDS
def test_compiled_in_one_graph(modules: Modules, kind: str) -> None:
    (q, k, v), factors = tensors(), factors_of(kind)

    def model(q: Any, k: Any, v: Any, factors: Any) -> Any:
        halves = {name: factor / 2 for name, factor in factors.items()}
        return fa3gen.attention(q, k, v, **halves, return_lse=True)

    out, lse = torch.compile(model, fullgraph=True, backend="aot_eager")(q, k, v, factors)
    halves = {name: factor / 2 for name, factor in factors.items()}
    wanted, wanted_lse = expected(q, k, v, **halves, return_lse=True)
    assert out.equal(wanted) and lse.equal(wanted_lse) and modules.asked[-1] == OF_BLOCKS


@pytest.mark.parametrize("name", ["attention_forward", "attention_forward_out"])
def test_operators_are_sound(modules: Modules, name: str) -> None:
    q, k, v = tensors()
    into = torch.empty_like(q, dtype=torch.bfloat16)
    arguments = (q, k, v) if name == "attention_forward" else (q, k, v, into)
    utils = "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    options = {"causal": True, "return_lse": True, **factors_of("of blocks")}
    torch.library.opcheck(getattr(torch.ops.fa3gen, name).default, arguments, options, test_utils=utils)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"q_descale": torch.ones(2, 4, 3)},
        r"q_descale is \(2, 4, 3\), .* or \(2, 4, 2\), .* head of q and block of 128 rows, t",
    ),
    ({"k_descale": torch.ones(2, 4, 3)}, r"k_descale is \(2, 4, 3\), .* or \(2, 2, 3\), .* head of k and block of 128"),
    (
        {"q_descale": torch.ones(2, 4, 2), "k_descale": torch.ones(2, 2)},
        r"k_descale is \(2, 2\), .* block of 128 rows, as another factor is of blocks, torch.float32",
    ),
    (
        {"q_descale": torch.ones(2, 4, 2), "v_descale": torch.ones(2, 2, 4)},
        r"v_descale is .* or \(2, 2, 3\), for each sequence, head of v and block of 128 rows, torch.float32",
    ),
    (
        {"q_descale": torch.ones(2, 2), "v_descale": torch.ones(2, 2, 3)},
        r"q_descale is \(2, 2\), .* or \(2, 4, 2\), .* as another factor is of blocks",
    ),
    ({"k_descale": torch.ones(2, 2, 3).half()}, r"k_descale is \(2, 2, 3\), torch.float16"),
]


@WAYS
@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_arguments_without_sense(
    way: str, options: dict[str, Any], message: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(way)
    for function in (fa3gen.attention, fa3gen.attention.explain):
        with pytest.raises(ArgumentError, match=message):
            function(*tensors(), **options)


def test_fake_tensors_are_checked(modules: Modules) -> None:
    with FakeTensorMode():
        q, k, v = (
            torch.empty(2, rows, heads, 128, dtype=E4M3, device="cuda")
            for rows, heads in ((130, 4), (260, 2), (260, 2))
        )
        good, bad = (torch.empty(2, 4, blocks, device="cuda") for blocks in (2, 1))
        assert fa3gen.attention(q, k, v, q_descale=good).shape == q.shape
        with pytest.raises(ArgumentError, match=r"q_descale is \(2, 4, 1\), .*needs to be one number or \(2, 4, 2\)"):
            torch.ops.fa3gen.attention_forward(q, k, v, q_descale=bad)


def test_the_function_of_flash_attention_takes_factors_of_heads(eager: Modules) -> None:
    with pytest.raises(NotImplementedError, match="is of blocks of rows, .* pass them to fa3gen.attention"):
        fa3.flash_attn_func(*tensors(), k_descale=torch.ones(2, 2, 3))
    assert eager.asked == []


# Which module


@pytest.fixture
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(ROOT)
    calls.stretches.clear()
    yield
    calls.stretches.clear()


@pytest.mark.usefixtures("in_the_checkout")
@pytest.mark.parametrize(
    ("dim", "causal", "stem"),
    [
        (128, False, "fwd_fp8_block_d128"),
        (128, True, "fwd_fp8_block_d128_causal"),
        (64, False, "k8_d64"),
        (64, True, "k8_d64_causal"),
    ],
)
def test_the_module_that_is_chosen(dim: int, causal: bool, stem: str) -> None:
    """And for factors of heads another one, whatever its sizes."""
    q, k, v = (torch.empty(1, 700, 2, dim, dtype=E4M3, device="meta") for _ in range(3))
    of_blocks, of_heads = (torch.empty(1, 2, *more, device="meta") for more in ((6,), ()))
    found = fa3gen.attention.explain(q, k, v, causal=causal, q_descale=of_blocks, k_descale=of_blocks, return_lse=True)
    assert found.stem == stem and "e4m3, scales of blocks, O in bf16" in str(found)
    other = fa3gen.attention.explain(q, k, v, causal=causal, q_descale=of_heads, return_lse=True)
    assert not Family.of(other.spec).block_scales


@pytest.mark.usefixtures("in_the_checkout")
def test_what_is_not_there_is_proposed() -> None:
    q, k, v = (torch.empty(1, 700, 2, 96, dtype=E4M3, device="meta") for _ in range(3))
    scales = torch.empty(1, 2, 6, device="meta")
    with pytest.raises(
        NotRendered, match="no generated module computes e4m3, scales of blocks, O in bf16, head dim 96"
    ) as e:
        fa3gen.attention.explain(q, k, v, k_descale=scales)
    assert e.value.proposal is not None
    spec = e.value.proposal.spec
    assert spec.problem.scales == "block" and BLOCK_ROWS % spec.tile.q == 0 and spec.accumulate is not None
    with pytest.raises(NotRendered, match="mask: with scales: block window is not rendered"):
        fa3gen.attention.explain(q, k, v, k_descale=scales, window=(3, 4))


def test_records_and_rows_say_so() -> None:
    """And those of factors of heads have nothing new."""
    shape = Shape(1, 4096, 4096, 16, 16)
    problem = TunedProblem.of(OF_BLOCKS, shape)
    assert problem.family == OF_BLOCKS and problem.model_dump()["block_scales"] is True
    assert "block_scales" not in TunedProblem.of(OF_BLOCKS._replace(block_scales=False), shape).model_dump()
    row = Row(
        dtype="e4m3",
        head_dim=128,
        head_dim_v=128,
        mask=NoMask(),
        out_dtype="bf16",
        block_scales=True,
        module="k8_d128",
        sha256="0" * 16,
        measured=[{"seq": 4096, "tflops": 1000.0, "gpu": "NVIDIA H200"}],
    )
    assert row.family == OF_BLOCKS and "block_scales: true" in dispatch_table.table_text(dispatch.Table(rows=[row]))
    assert OF_BLOCKS.label == "e4m3_d128_full_block_o_bf16"
    assert not OF_BLOCKS.serves(OF_BLOCKS._replace(block_scales=False))


def test_blocks_of_rows() -> None:
    assert [blocks_of(rows) for rows in (0, 1, 128, 129, 1000)] == [0, 1, 1, 2, 8]
