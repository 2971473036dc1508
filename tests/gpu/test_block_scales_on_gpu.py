"""On a machine with a Hopper GPU: `fa3gen.attention` with factors of blocks of q and k, captured and compiled too.

By whatever modules dispatch chooses, held against attention in float64 of the numbers that the 8 bits stand for, times
their factors. Factors of neighbouring blocks differ by 6 and more, so that no other one would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fa3gen
from fa3gen.design.family import blocks_of
from fa3gen.design.workspace import Workspace
from fa3gen.spec.quantizing import BLOCK_ROWS
from fa3gen.verify import reference

WORKSPACE = Workspace.find(Path(__file__).parent)
E4M3 = torch.float8_e4m3fn
TOLERANCE, LSE_TOLERANCE = 0.04, 1e-3  # as in test_fp8_on_gpu.py: of O, relative, and of LSE
# More queries than keys, more keys, no multiple of any tile; more tiles than SMs; grouped heads in all.
SHAPES = {
    "few": (2, 333, 190, 4, 2),
    "ragged": (2, 190, 777, 6, 1),
    "many": (3, 1500, 900, 16, 4),
    "one": (2, 1, 1031, 8, 2),
}
EVERY = pytest.mark.parametrize(("dim", "causal"), [(64, False), (64, True), (128, False), (128, True)], ids=str)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch, hopper: Any) -> Iterator[None]:
    monkeypatch.chdir(WORKSPACE.root)
    with torch.no_grad():
        yield


def tensors(device: Any, shape: str, dim: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    batch, seq_q, seq_k, heads_q, heads_kv = SHAPES[shape]
    generator = torch.Generator(device).manual_seed(dim + seed)
    each = ((seq_q, heads_q), (seq_k, heads_kv), (seq_k, heads_kv))
    return tuple(
        torch.randn(batch, seq, heads, dim, generator=generator, device=device).to(E4M3) for seq, heads in each
    )


def factors_of(q: torch.Tensor, k: torch.Tensor, seed: int = 1, v_blocks: bool = True) -> dict[str, torch.Tensor]:
    """Of strides that are not those of a contiguous tensor; those of v of blocks, too, or of heads."""
    generator = torch.Generator(q.device).manual_seed(seed)

    def of(x: torch.Tensor) -> torch.Tensor:
        batch, rows, heads, _ = x.shape
        blocks = blocks_of(rows)
        random = torch.rand(blocks, batch, heads, generator=generator, device=x.device) * 0.2 + 1.0
        turns = torch.tensor([0.25, 2.0], device=x.device)[torch.arange(blocks, device=x.device) % 2]
        return (random * turns[:, None, None]).permute(1, 2, 0)

    of_v = of(k) * 3
    if not v_blocks:
        of_v = torch.rand(k.shape[0], k.shape[2], generator=generator, device=q.device) + 0.3
    return {"q_descale": of(q), "k_descale": of(k), "v_descale": of_v}


def of_blocks(factors: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Factors of heads as those of their blocks."""
    return factors if factors.dim() == 3 else factors[..., None].expand(-1, -1, blocks_of(x.shape[1]))


def expected(q: Any, k: Any, v: Any, causal: bool, factors: dict[str, torch.Tensor]) -> Any:
    """O and LSE in float64."""
    wide = [
        x.double() * each.double().repeat_interleave(BLOCK_ROWS, 2)[..., : x.shape[1]].transpose(1, 2)[..., None]
        for x, each in ((q, factors["q_descale"]), (k, factors["k_descale"]), (v, of_blocks(factors["v_descale"], k)))
    ]
    return reference.attention(*wide, reach=(None, 0 if causal else None))


def close(out: torch.Tensor, lse: torch.Tensor | None, wanted: Any) -> None:
    assert out.dtype == torch.bfloat16
    error = ((out.double() - wanted.out).norm() / wanted.out.norm()).item()
    assert error < TOLERANCE, error
    if lse is not None:
        torch.testing.assert_close(lse, wanted.lse.float(), rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)


@EVERY
@pytest.mark.parametrize("v_blocks", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(dim: int, causal: bool, shape: str, v_blocks: bool, hopper: Any) -> None:
    """And with `out=` and without LSE the same bits, twice; with contiguous factors, too."""
    q, k, v = tensors(hopper, shape, dim)
    factors = factors_of(q, k, v_blocks=v_blocks)
    out, lse = fa3gen.attention(q, k, v, causal=causal, **factors, return_lse=True)
    close(out, lse, expected(q, k, v, causal, factors))
    into = torch.full_like(out, torch.nan)
    for each in (factors, {name: factor.contiguous() for name, factor in factors.items()}):
        assert fa3gen.attention(q, k, v, causal=causal, **each, out=into) is into and into.equal(out)


@EVERY
def test_v_whose_blocks_differ(dim: int, causal: bool, hopper: Any) -> None:
    """As `fa3gen.quantize` makes them; one of zeros, and the first so small that a factor of the head leaves nothing.

    Its keys are those that queries look for.
    """
    batch, seq_k, heads = 2, 700, 4
    generator = torch.Generator(hopper).manual_seed(dim)
    q, k, v = (
        torch.randn(batch, rows, heads, dim, generator=generator, device=hopper) for rows in (seq_k, seq_k, seq_k)
    )
    q[..., 0], k[..., 0] = 10.0, -10.0
    k[:, :BLOCK_ROWS, :, 0] = 10.0
    v[:, :BLOCK_ROWS] *= 2.0**-20
    v[:, BLOCK_ROWS : 2 * BLOCK_ROWS] = 0
    q, k, v = (x.bfloat16() for x in (q, k, v))
    (q8, of_q), (k8, of_k), (v8, of_v) = (fa3gen.quantize(x, scale="block") for x in (q, k, v))
    factors = {"q_descale": of_q, "k_descale": of_k, "v_descale": of_v}
    out, lse = fa3gen.attention(q8, k8, v8, causal=causal, **factors, return_lse=True)
    close(out, lse, expected(q8, k8, v8, causal, factors))
    wanted = reference.attention(q, k, v, reach=(None, 0 if causal else None)).out
    v8, of_heads = fa3gen.quantize(v)
    other = fa3gen.attention(q8, k8, v8, causal=causal, q_descale=of_q, k_descale=of_k, v_descale=of_heads)
    errors = [((found.double() - wanted).norm() / wanted.norm()).item() for found in (out, other)]
    assert errors[0] < 0.1 and errors[1] > 0.5, errors


@EVERY
def test_a_graph_reads_factors_when_it_is_replayed(dim: int, causal: bool, hopper: Any) -> None:
    q, k, v = tensors(hopper, "ragged", dim)
    factors = factors_of(q, k)
    fa3gen.attention(q, k, v, causal=causal, **factors, return_lse=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa3gen.attention(q, k, v, causal=causal, **factors, return_lse=True)
    for seed in (5, 6):
        for x, other in zip((q, k, v), tensors(hopper, "ragged", dim, seed), strict=True):
            x.copy_(other)
        for name, factor in factors_of(q, k, seed).items():
            factors[name].copy_(factor)
        out.fill_(torch.nan)
        graph.replay()
        close(out, lse, expected(q, k, v, causal, factors))


@EVERY
def test_compiled(dim: int, causal: bool, hopper: Any) -> None:
    """In one graph, with what quantises around it."""
    q, k, v = tensors(hopper, "ragged", dim)
    factors = factors_of(q, k)

    def model(q: Any, k: Any, v: Any, factors: Any) -> Any:
        halved = {name: factor / 2 for name, factor in factors.items()}
        out, lse = fa3gen.attention((q.float() * 2).to(E4M3), k, v, causal=causal, **halved, return_lse=True)
        return out * 2, lse

    torch._dynamo.reset()
    out, lse = torch.compile(model, fullgraph=True)(q, k, v, factors)
    halved = {name: factor / 2 for name, factor in factors.items()}
    close(out / 2, lse, expected((q.float() * 2).to(E4M3), k, v, causal, halved))


@EVERY
def test_what_quantize_makes(dim: int, causal: bool, hopper: Any) -> None:
    """Rotated, of 16-bit tensors whose blocks differ, some of them zeros: as near to these as 8 bits let it be."""
    generator = torch.Generator(hopper).manual_seed(4)
    signs = torch.where(torch.rand(dim, generator=generator, device=hopper) < 0.5, -1.0, 1.0)
    q, k, v = (torch.randn(2, 700, 4, dim, generator=generator, device=hopper) for _ in range(3))
    k[:, :BLOCK_ROWS] *= 2.0**-9
    k[:, BLOCK_ROWS : 2 * BLOCK_ROWS] = 0
    q[:, 2 * BLOCK_ROWS : 3 * BLOCK_ROWS] = 0
    q, k, v = (x.bfloat16() for x in (q, k, v))
    (q8, of_q), (k8, of_k) = (fa3gen.quantize(x, rotate=signs, scale="block") for x in (q, k))
    v8, of_v = fa3gen.quantize(v)
    factors = {"q_descale": of_q, "k_descale": of_k, "v_descale": of_v}
    out, lse = fa3gen.attention(q8, k8, v8, causal=causal, **factors, return_lse=True)
    close(out, lse, expected(q8, k8, v8, causal, factors))
    right = reference.attention(q, k, v, reach=(None, 0 if causal else None)).out
    assert ((out.double() - right).norm() / right.norm()).item() < 0.08


def test_another_module_than_for_factors_of_heads(hopper: Any) -> None:
    """Both in turn, since a repeated call is looked up by what its factors are of."""
    q, k, v = tensors(hopper, "many", 128)
    factors = factors_of(q, k, v_blocks=False)
    of_q, of_k = factors["q_descale"][:, :4, 0], factors["k_descale"][..., 0]
    heads = {"q_descale": of_q, "k_descale": of_k, "v_descale": factors["v_descale"]}
    blocks = {
        "q_descale": of_q.repeat_interleave(4, 1)[..., None].expand(-1, -1, blocks_of(q.shape[1])),
        "k_descale": of_k[..., None].expand(-1, -1, blocks_of(k.shape[1])),
        "v_descale": factors["v_descale"],
    }
    for _ in range(2):
        close(fa3gen.attention(q, k, v, **factors), None, expected(q, k, v, False, factors))
        close(fa3gen.attention(q, k, v, **heads), None, expected(q, k, v, False, blocks))
