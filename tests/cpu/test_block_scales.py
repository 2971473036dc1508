"""Scales of blocks of rows of Q and K, on the CPU model: strides, zeros, what quantize makes, and mistakes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hosting import cases_of, mistaken, module, path_of, reported, with_fields
from rendering import CHECKOUT, changed, source

import fa3gen
from fa3gen.cpu.module import load_on_cpu
from fa3gen.design import rules
from fa3gen.generate.render import render_variant
from fa3gen.run import quantize_ops
from fa3gen.run.quantize_ops import quantize
from fa3gen.spec.model import Forward
from fa3gen.spec.quantizing import BLOCK_ROWS
from fa3gen.verify import inputs, reference
from fa3gen.verify.on_cpu import verify_on_cpu

torch.set_num_threads(1)  # the workers of xdist share the cores
STEM, CAUSAL, PRODUCTION = "k8_d64", "k8_d64_causal", "fwd_fp8_block_d128_causal"
E4M3 = torch.float8_e4m3fn
SMALLEST = 2.0**-100  # what quantize makes the scale of zeros


def tensors(seq_q: int, seq_k: int, heads: tuple[int, int] = (2, 1), dim: int = 64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seq_q)
    sizes = ((seq_q, heads[0]), (seq_k, heads[1]), (seq_k, heads[1]))
    return tuple(torch.randn(1, rows, count, dim, generator=generator).to(E4M3) for rows, count in sizes)


def calls_of_v(factor: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """Factors of heads of v, as a call may give them: of heads, and of each of their blocks."""
    return [factor, factor[..., None].expand(*factor.shape, -(-rows // BLOCK_ROWS))]


def wide(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """x in float64, each row times the factor of its block, (batch, heads, blocks)."""
    return x.double() * factors.double().repeat_interleave(BLOCK_ROWS, 2)[..., : x.shape[1]].transpose(1, 2)[..., None]


def close(found: tuple[torch.Tensor, torch.Tensor], wanted: reference.Attention) -> None:
    """P has 4 bits; LSE is summed before P is rounded."""
    assert ((found[0].double() - wanted.out).norm() / wanted.out.norm()).item() < 0.04
    torch.testing.assert_close(found[1].double(), wanted.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_factor_is_of_a_head_and_a_block(causal: bool) -> None:
    """Of any size, and any strides."""
    q, k, v = tensors(300, 400)
    of_q = torch.tensor([[0.5, 2.0, 0.125], [4.0, 0.25, 1.0]]).t().contiguous().t()[None]
    of_k = torch.tensor([0.25, 3.0, 0.5, 2.0]).repeat_interleave(3)[::3][None, None]
    assert of_q.stride(2) == 2 and of_k.stride(2) == 3
    given = {"q_descale": of_q, "k_descale": of_k, "v_descale": torch.full((1, 1), 0.5)}
    found = module(CAUSAL if causal else STEM).attention(q, k, v, **given, return_lse=True)
    close(found, reference.attention(wide(q, of_q), wide(k, of_k), v.double() / 2, reach=(None, 0 if causal else None)))


def test_one_factor_for_all_blocks_is_one_of_the_head() -> None:
    """With strides of 0: the bits of the module whose factors are of heads, where all are powers of two."""
    q, k, v = tensors(140, 270, heads=(1, 1))
    half = torch.full((1, 1), 0.5)
    blocks = {"q_descale": half[..., None].expand(1, 1, 2), "k_descale": half[..., None].expand(1, 1, 3)}
    found = module(STEM).attention(q, k, v, **blocks, v_descale=half, return_lse=True)
    heads = {"q_descale": half, "k_descale": half, "v_descale": half}
    close(found, reference.attention(q.double() / 2, k.double() / 2, v.double() / 2, reach=(None, None)))
    other = module("k7_two_levels_d64").attention(q, k, v, **heads, return_lse=True)
    torch.testing.assert_close(found[1], other[1], rtol=1e-6, atol=1e-6)
    assert ((found[0].double() - other[0].double()).norm() / other[0].double().norm()).item() < 4e-3


@pytest.mark.parametrize("stem", [STEM, CAUSAL, PRODUCTION])
def test_factors_of_heads_of_v_are_those_of_all_their_blocks(stem: str) -> None:
    """The same bits, also where a factor is beyond the units that O may be in, and where it is 0."""
    q, k, v = tensors(140, 270, heads=(2, 2), dim=128 if stem == PRODUCTION else 64)
    for sizes in ((0.75, 3.0), (2.0**-60, 2.0**50), (0.0, 1.0)):
        of_v = torch.tensor([sizes])
        outs = [module(stem).attention(q, k, v, v_descale=each) for each in calls_of_v(of_v, 270)]
        assert outs[0].equal(outs[1])
        wanted = reference.attention(q.double(), k.double(), v.double(), reach=(None, None if stem == STEM else 0)).out
        wanted *= of_v[:, None, :, None].double()
        for head in range(2):
            found, right = outs[0][:, :, head].double(), wanted[:, :, head]
            assert (found - right).norm() <= 0.04 * right.norm()


OF_V = {
    "ratios of all sizes": (1.0, 2.0**-8, 2.0**5, 3e-3),
    "of zeros, as quantize has it": (SMALLEST, 0.5, SMALLEST, 2.0),
    "zero first and last": (0.0, 1.0, 0.25, 0.0),
    "far out": (2.0**40, 2.0**36, 2.0**-50, 2.0**38),
    "all small": (2.0**-70, 2.0**-72, 2.0**-69, 2.0**-71),
}


@pytest.mark.parametrize("stem", [STEM, CAUSAL, PRODUCTION])
@pytest.mark.parametrize("kind", OF_V)
def test_blocks_of_v(kind: str, stem: str) -> None:
    """Each block counts with its own factor, those of zeros included, whose 8 bits are zeros; strides are any."""
    q, k, v = tensors(140, 400, dim=128 if stem == PRODUCTION else 64)
    of_v = torch.tensor(OF_V[kind]).repeat_interleave(3)[::3][None, None]
    assert of_v.stride(2) == 3
    found = module(stem).attention(q, k, v, v_descale=of_v, return_lse=True)
    close(found, reference.attention(q.double(), k.double(), wide(v, of_v), reach=(None, None if stem == STEM else 0)))


def test_what_is_wrong_with_factors_of_v_is_said() -> None:
    q, k, v = tensors(140, 400)
    for shape in ((1, 1, 3), (1, 1, 5)):
        with pytest.raises(
            ValueError, match=r"v_descale is \(1, 1, .\); it needs to be \(1, 1, 4\), a factor for 128 "
        ):
            module(STEM).attention(q, k, v, v_descale=torch.ones(shape))
    for factor in (torch.ones(1, 2), torch.ones(1, 1).double(), torch.ones(1, 1, 4).half(), 1.0):
        with pytest.raises((TypeError, ValueError), match="v_descale"):
            module(STEM).attention(q, k, v, v_descale=factor)


@pytest.mark.parametrize("stem", [STEM, CAUSAL])
def test_blocks_of_zeros(stem: str) -> None:
    """Their factor is 2^-100, with another one too little for float32; hidden keys stay hidden, and nothing is NaN."""
    q, k, v = tensors(140, 300, heads=(1, 1))
    of_q, of_k = torch.tensor([[[SMALLEST, 0.5]]]), torch.tensor([[[1.0, SMALLEST, SMALLEST]]])
    zeros = [x.float() for x in (q, k)]
    zeros[0][:, :BLOCK_ROWS], zeros[1][:, BLOCK_ROWS:] = 0, 0
    q, k = (x.to(E4M3) for x in zeros)
    found = module(stem).attention(q, k, v, q_descale=of_q, k_descale=of_k, return_lse=True)
    close(
        found,
        reference.attention(wide(q, of_q), wide(k, of_k), v.double(), reach=(None, 0 if stem == CAUSAL else None)),
    )


@pytest.mark.parametrize("dim", [64, 128])
def test_it_takes_what_quantize_makes(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotated, with a block of K that is far smaller than others: what its 8 bits stand for, near to what it was."""
    monkeypatch.setattr(quantize_ops, "module_at", functools.cache(lambda path: fa3gen.load(path.stem, on="cpu")))
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, rows, 1, dim, generator=generator) for rows in (70, 300, 300))
    k[:, :BLOCK_ROWS] *= 2.0**-9  # which a scale of the whole head would make subnormal
    k[:, BLOCK_ROWS:] -= 0.3 * q.mean(1, keepdim=True)  # so that they count
    q, k, v = (x.bfloat16() for x in (q, k, v))
    signs = 2.0 * torch.randint(0, 2, (dim,), generator=generator) - 1.0
    (q8, of_q), (k8, of_k) = (quantize(x, rotate=signs, scale="block") for x in (q, k))
    v[:, BLOCK_ROWS : 2 * BLOCK_ROWS] = 0
    (v8, of_v), (v8_of_heads, _) = quantize(v, scale="block"), quantize(v)
    assert of_q.shape == (1, 1, 1) and of_k.shape == of_v.shape == (1, 1, 3) and of_v[0, 0, 1] == SMALLEST
    assert not v8.view(torch.uint8).equal(v8_of_heads.view(torch.uint8))
    found = module(f"k8_d{dim}").attention(q8, k8, v8, q_descale=of_q, k_descale=of_k, v_descale=of_v, return_lse=True)
    stands_for = wide(q8, of_q), wide(k8, of_k), wide(v8, of_v)
    close(found, reference.attention(*stands_for, reach=(None, None)))
    wanted = reference.attention(q, k, v, reach=(None, None))
    assert ((found[0].double() - wanted.out).norm() / wanted.out.norm()).item() < 0.08


ARRANGEMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "two steps of a block": (CAUSAL, {"tile": {"kv": 64}, "smem": {"vt": "64B"}}),
    "two tiles of queries of a block": (
        CAUSAL,
        {
            "tile": {"q": 64, "warpgroups": 1, "transposers": 2},
            "schedule": {"kind": "warp_specialized", "overlap": True},
        },
    ),
    "V given transposed": ("k7_v_k_two_levels_d128", {"problem": {"scales": "block"}}),
}


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_other_arrangements(name: str, tmp_path: Path) -> None:
    stem, parts = ARRANGEMENTS[name]
    twin = changed(stem, **parts)
    assert isinstance(twin.spec, Forward) and rules.check(twin.spec) == []
    found = load_on_cpu(path_of(tmp_path, "twin", render_variant(twin, CHECKOUT)))
    cases = [each for each in inputs.cpu_cases(twin.spec) if each.name in ("ragged", "masked_rows", "wrap", "mqa")]
    assert verify_on_cpu(found, twin.spec, stem="twin", cases=cases, count=1).failures == ()


MISTAKES: dict[str, tuple[str, str, str]] = {
    "the factor of the step before": (
        "k_scale = read_scale(k_scales, n_block - 1)",
        "k_scale = read_scale(k_scales, n_block)",
        "wrap",
    ),
    "the factor of the first step for all": (
        "            scale_log2 = scale_of_step(q_scale, k_scale)\n",
        "",
        "wrap",
    ),
    "the factor of another block of queries": ("work.m_block // (SCALE_ROWS // TILE_M)]", "0]", "ragged"),
    "the factor of a head of k for one of q": (
        "q_descale[work.batch, work.head,",
        "q_descale[work.batch, work.head_kv,",
        "gqa",
    ),
    "the factor of another sequence": (
        "k_descale[work.batch, work.head_kv, None]",
        "k_descale[0, work.head_kv, None]",
        "ramp",
    ),
    "the factor of V of the step after": (
        "v_unit, v_scale = unit_of(v_scale), read_scale(v_scales, n_block)",
        "v_unit, v_scale = unit_of(v_scale), read_scale(v_scales, n_block - 1)",
        "wrap",
    ),
    "O left in the unit before": ("return rescale[0] * ratio, rescale[1] * ratio", "return rescale", "wrap"),
    "O of the unit before": ("        v_factor = unit_of(v_scale)\n", "        v_factor = v_unit\n", "wrap"),
    "the factor of V of another sequence": (
        "v_descale[work.batch, work.head_kv, None]",
        "v_descale[0, work.head_kv, None]",
        "ramp",
    ),
    "maxima that are not scaled": (
        "quad_max(cute.arch.fmax(largest, other)) * scale_log2)",
        "quad_max(cute.arch.fmax(largest, other)))",
        "ragged",
    ),
    "O brought to other maxima, scaled once more": (
        "cute.math.exp2(row_max[r] - new_max[r],",
        "cute.math.exp2((row_max[r] - new_max[r]) * scale_log2,",
        "ragged",
    ),
    "LSE of maxima that are scaled once more": (
        "gLSE[row] = (row_max[r] +",
        "gLSE[row] = (row_max[r] * 0.18 +",
        "ragged",
    ),
}


@functools.cache
def narrow(stem: str) -> tuple[str, Forward]:
    """The module with rows of 64 elements, and its spec: every mistake is compiled, and this is faster."""
    return with_fields(stem, problem={"head_dim": 64}, smem={"q": "64B", "k": "64B", "v": "64B"})


@pytest.mark.parametrize("stem", [STEM, PRODUCTION])
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported(name: str, stem: str, tmp_path: Path) -> None:
    (text, spec), (right, wrong, case) = narrow(stem), MISTAKES[name]
    assert right in text
    found = mistaken(tmp_path, "wrong", text.replace(right, wrong))
    assert reported(found, spec, cases_of(spec, case))


@pytest.mark.parametrize("stem", [STEM, PRODUCTION])
def test_without_a_mistake_nothing_is_reported(stem: str, tmp_path: Path) -> None:
    (text, spec), shown_by = narrow(stem), {case for *_, case in MISTAKES.values()}
    cases = cases_of(spec, *shown_by)
    assert len(cases) == len(shown_by)
    assert reported(mistaken(tmp_path, "right", text), spec, cases) == ()


def test_a_product_of_tiny_factors_that_is_0_would_show(tmp_path: Path) -> None:
    """Without a smallest scale hidden keys are NaN where a block of zeros meets another one."""
    right = "cute.arch.fmax(q_scale * k_scale, SMALLEST_SCALE)"
    assert right in source(STEM)
    found = mistaken(tmp_path, "wrong", source(STEM).replace(right, "q_scale * k_scale"))
    q, k, v = (torch.zeros(1, rows, 1, 64).to(E4M3) for rows in (3, 5, 5))
    tiny = torch.full((1, 1, 1), SMALLEST)
    for each, is_right in ((found, False), (module(STEM), True)):
        out: Any = each.attention(q, k, v, q_descale=tiny, k_descale=tiny)
        assert bool(torch.isfinite(out).all()) == is_right
