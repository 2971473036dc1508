"""On a machine with a Hopper GPU: `fa3gen.attention` of q, k and v in 8 bits, with factors, captured and compiled too.

By whatever modules dispatch chooses. What is expected is attention in float64 to the numbers that the 8 bits stand for,
times their factors, so that what is off is P, which has 4 bits, and sums.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fa3gen
from fa3gen.compile.cache import CACHE_DIR_VARIABLE
from fa3gen.design.family import MOST_DIM_OF_TWO_LEVELS, Family
from fa3gen.design.workspace import Workspace
from fa3gen.flash_attn_interface import flash_attn_func
from fa3gen.measure.launch_times import host_microseconds
from fa3gen.run import dispatch
from fa3gen.run.dispatch import ArgumentError, NoKernel, Size
from fa3gen.run.eight_bits import FACTORS
from fa3gen.run.launch import module_at
from fa3gen.spec.model import CausalMask, Mask, NoMask
from fa3gen.verify import inputs, reference

WORKSPACE = Workspace.find(Path(__file__).parent)
E4M3 = torch.float8_e4m3fn
TOLERANCE = 0.04  # relative Frobenius error of O: P is off by a 16th at most, 0.025 in the mean square
LSE_TOLERANCE = 1e-3  # sums are of P before it is rounded
# What an eager call with out= may take of the host beyond one of 16 bits in the same process, and three factors more.
HOST_MICROSECONDS_MORE, HOST_MICROSECONDS_OF_FACTORS = 3.0, 10.0
# More queries than keys, more keys, no multiple of any tile; more tiles than SMs; grouped heads in all.
SHAPES = {
    "few": (2, 333, 190, 4, 2),
    "ragged": (2, 190, 777, 6, 1),
    "many": (3, 1500, 900, 16, 4),
    "one": (2, 1, 1031, 8, 2),
}


def served() -> Iterator[tuple[int, bool]]:
    """Head dims and masks that dispatch has a module for."""
    for dim in (64, 96, 128, 192, 256):
        masks: tuple[Mask, ...] = NoMask(), CausalMask()
        for mask in masks:
            try:
                dispatch.choose(Family("e4m3", dim, dim, mask, "bf16"), Size(4096, 512), lse=True, workspace=WORKSPACE)
            except NoKernel:
                continue
            yield dim, isinstance(mask, CausalMask)


SERVED = list(served())
EVERY = pytest.mark.parametrize(("dim", "causal"), SERVED, ids=str)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch, hopper: Any) -> Iterator[None]:
    monkeypatch.chdir(WORKSPACE.root)
    with torch.no_grad():
        yield


def test_there_are_modules() -> None:
    assert {(dim, causal) for dim in (64, 128) for causal in (False, True)} <= set(SERVED)


def tensors(device: Any, shape: str, dim: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    batch, seq_q, seq_k, heads_q, heads_kv = SHAPES[shape]
    generator = torch.Generator(device).manual_seed(dim + seed)
    each = ((seq_q, heads_q), (seq_k, heads_kv), (seq_k, heads_kv))
    return tuple(
        torch.randn(batch, seq, heads, dim, generator=generator, device=device).to(E4M3) for seq, heads in each
    )


def factors_of(kind: str, k: torch.Tensor, seed: int = 1) -> dict[str, torch.Tensor]:
    """Factors by name: for each sequence and head, of a stride of 0, transposed; one number; none."""
    batch, _, heads_kv, _ = k.shape
    generator = torch.Generator(k.device).manual_seed(seed)

    def random(*sizes: int) -> torch.Tensor:
        return torch.rand(sizes, generator=generator, device=k.device) + 0.3

    match kind:
        case "of heads":
            return {name: random(batch, heads_kv) for name in FACTORS}
        case "stride 0":
            of_sequences, of_heads = random(batch, 1).expand(-1, heads_kv), random(heads_kv).expand(batch, -1)
            return {"q_descale": of_sequences, "k_descale": of_heads, "v_descale": random(1, 1).expand(batch, heads_kv)}
        case "transposed":
            return {name: random(heads_kv, 2 * batch)[:, ::2].t() for name in FACTORS}
        case "numbers":
            return {"q_descale": random(), "k_descale": random(1), "v_descale": random(1, 1, 1, 1)}
        case _:
            return {}


def expected(q: Any, k: Any, v: Any, causal: bool, factors: dict[str, torch.Tensor], **options: Any) -> Any:
    """O and LSE in float64."""
    batch, _, heads_kv, _ = k.shape
    wide = []
    for name, x in zip(FACTORS, (q, k, v), strict=True):
        factor = factors.get(name, torch.ones((), device=q.device)).double()
        each = (factor.reshape(1, 1) if factor.numel() == 1 else factor).expand(batch, heads_kv)
        wide.append(x.double() * each.repeat_interleave(x.shape[2] // heads_kv, 1)[:, None, :, None])
    return reference.attention(*wide, reach=(None, 0 if causal else None), **options)


def close(out: torch.Tensor, lse: torch.Tensor | None, wanted: Any) -> None:
    assert out.dtype == torch.bfloat16
    error = ((out.double() - wanted.out).norm() / wanted.out.norm()).item()
    assert error < TOLERANCE, error
    if lse is not None:
        torch.testing.assert_close(lse, wanted.lse.float(), rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)


@EVERY
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["none", "of heads", "stride 0", "transposed", "numbers"])
def test_against_float64(dim: int, causal: bool, shape: str, kind: str, hopper: Any) -> None:
    """And with `out=` and without LSE the same bits, twice."""
    q, k, v = tensors(hopper, shape, dim)
    factors = factors_of(kind, k)
    out, lse = fa3gen.attention(q, k, v, causal=causal, **factors, return_lse=True)
    close(out, lse, expected(q, k, v, causal, factors))
    into = torch.full_like(out, torch.nan)
    for _ in range(2):
        assert fa3gen.attention(q, k, v, causal=causal, **factors, out=into) is into and into.equal(out)
    close(
        fa3gen.attention(q, k, v, causal=causal, **factors, scale=0.05),
        None,
        expected(q, k, v, causal, factors, scale=0.05),
    )


@pytest.mark.parametrize(("dim", "causal"), [each for each in SERVED if each[0] <= MOST_DIM_OF_TWO_LEVELS], ids=str)
def test_errors_do_not_grow_with_the_keys(dim: int, causal: bool, hopper: Any) -> None:
    """Of 64k keys, whose values have a mean, so that sums grow: they are in float32."""
    generator = torch.Generator(hopper).manual_seed(dim)
    q, k, v = (torch.randn(1, seq, 2, dim, generator=generator, device=hopper) for seq in (200, 65536, 65536))
    q, k, v = q.to(E4M3), k.to(E4M3), (v + 1).to(E4M3)
    out, lse = fa3gen.attention(q, k, v, causal=causal, return_lse=True)
    close(out, lse, expected(q, k, v, causal, {}))


@pytest.mark.parametrize(
    ("stem", "dim", "causal", "most"),
    [
        ("fwd_fp8_d256_two_levels", 256, False, 2**-8),
        ("fwd_fp8_d256_two_levels_causal", 256, True, 2**-8),
        ("k7_promote_4_d128", 128, False, 2**-6),
    ],
)
def test_errors_of_modules_that_promote_do_not_grow_either(
    stem: str, dim: int, causal: bool, most: float, hopper: Any
) -> None:
    """Stripes of O at head dim 256, and every four tiles of keys: no row of the table has them."""
    generator = torch.Generator(hopper).manual_seed(dim)
    q, k, v = (torch.randn(1, seq, 2, dim, generator=generator, device=hopper) for seq in (200, 65536, 65536))
    q, k, v = q.to(E4M3), k.to(E4M3), (v + 1).to(E4M3)
    attention = module_at(WORKSPACE.module_path(stem)).attention
    out, lse = attention(q, k, v, return_lse=True)
    wanted = expected(q, k, v, causal, {})
    close(out, lse, wanted)
    # Values have a mean of 1, so that what sums in the tensor core lose is there in all of O: on the CPU model 2^-10 of
    # 64 keys, 2^-7.5 of 512 (tests/cpu/test_eight_bit_sums.py).
    assert ((out.double() - wanted.out).mean() / wanted.out.mean()).abs() < most


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["none", "of heads"])
def test_keys_and_values_in_e5m2(causal: bool, shape: str, kind: str, hopper: Any) -> None:
    """Of numbers that e4m3 does not reach, too: its largest is 448, and 2^-9 its smallest."""
    q, k, v = tensors(hopper, shape, 128)
    sizes = torch.exp2(torch.arange(128, device=hopper).remainder(23) - 13.0)  # of columns of v: 2^-13 to 2^9
    k, v = k.to(torch.float8_e5m2), (v.float() * sizes).to(torch.float8_e5m2)
    factors = factors_of(kind, k)
    out, lse = fa3gen.attention(q, k, v, causal=causal, **factors, return_lse=True)
    wanted = expected(q, k, v, causal, factors)
    close((out / sizes).bfloat16(), lse, wanted._replace(out=wanted.out / sizes))  # powers of two: exact


@EVERY
def test_a_graph_reads_factors_when_it_is_replayed(dim: int, causal: bool, hopper: Any) -> None:
    q, k, v = tensors(hopper, "ragged", dim)
    factors = factors_of("of heads", k) | {"v_descale": torch.full((), 0.5, device=hopper)}
    fa3gen.attention(q, k, v, causal=causal, **factors, return_lse=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa3gen.attention(q, k, v, causal=causal, **factors, return_lse=True)
    for seed in (5, 6):
        for x, other in zip((q, k, v), tensors(hopper, "ragged", dim, seed), strict=True):
            x.copy_(other)
        for name, factor in factors_of("of heads", k, seed).items():
            factors[name].copy_(factor if factors[name].dim() else factor[0, 0])
        out.fill_(torch.nan)
        graph.replay()
        close(out, lse, expected(q, k, v, causal, factors))


@EVERY
def test_the_host_waits_for_nothing(dim: int, causal: bool, hopper: Any) -> None:
    """From the second call on."""
    q, k, v = tensors(hopper, "ragged", dim)
    for kind in ("none", "of heads", "numbers"):
        factors = factors_of(kind, k)
        first = fa3gen.attention(q, k, v, causal=causal, **factors)
        torch.cuda.set_sync_debug_mode("error")
        try:
            again = fa3gen.attention(q, k, v, causal=causal, **factors)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert again.equal(first)


def test_host_time_of_a_call(hopper: Any) -> None:
    wide = [torch.randn(1, 128, 2, 128, device=hopper).bfloat16() for _ in range(3)]
    (q, k, v), into = (x.to(E4M3) for x in wide), torch.empty_like(wide[0])
    took = {"16 bits": host_microseconds(functools.partial(fa3gen.attention, *wide, out=into), torch.cuda.synchronize)}
    for kind in ("none", "of heads", "numbers"):
        call = functools.partial(fa3gen.attention, q, k, v, out=into, **factors_of(kind, k))
        took[kind] = host_microseconds(call, torch.cuda.synchronize)
    assert took["none"] < took["16 bits"] + HOST_MICROSECONDS_MORE, took
    assert max(took.values()) < took["16 bits"] + HOST_MICROSECONDS_MORE + HOST_MICROSECONDS_OF_FACTORS, took


@EVERY
@pytest.mark.parametrize("kind", ["none", "stride 0", "numbers"])
def test_compiled(dim: int, causal: bool, kind: str, hopper: Any) -> None:
    """In one graph, with what quantises around it."""
    q, k, v = tensors(hopper, "ragged", dim)
    factors = factors_of(kind, k)

    def model(q: Any, k: Any, v: Any, factors: Any) -> Any:
        halved = {name: factor / 2 for name, factor in factors.items()}
        out, lse = fa3gen.attention((q.float() * 2).to(E4M3), k, v, causal=causal, **halved, return_lse=True)
        return out * 2, lse

    torch._dynamo.reset()
    out, lse = torch.compile(model, fullgraph=True)(q, k, v, factors)
    halved = {name: factor / 2 for name, factor in factors.items()}
    wanted = expected((q.float() * 2).to(E4M3), k, v, causal, halved)
    close(out / 2, lse, wanted)


@pytest.mark.parametrize(("dim", "causal"), [(128, False), (128, True), (64, True)])
def test_a_v_whose_sequence_is_contiguous(
    dim: int, causal: bool, hopper: Any, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
) -> None:
    """By a module that reads it so: one that there is, or one that is rendered; the same but for the order of sums."""
    if CACHE_DIR_VARIABLE not in os.environ:
        monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path_factory.mktemp("cache")))
    q, k, v = tensors(hopper, "many", dim)
    factors, placed = factors_of("of heads", k), inputs.by_sequence(v)
    assert placed.stride(1) == 1 and placed.stride(3) > 1 and placed.float().equal(v.float())
    out, lse = fa3gen.attention(q, k, placed, causal=causal, **factors, return_lse=True, render=True)
    close(out, lse, expected(q, k, v, causal, factors))
    assert Family.of(fa3gen.attention.explain(q, k, placed, causal=causal).spec).by_sequence == ("v",)


@pytest.mark.parametrize("keys", [2000, 2048, 33])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_permuted_keys(dim: int, causal: bool, keys: int, hopper: Any) -> None:
    """What `quantize` writes so is what `attention` reads: eager, compiled, in a graph; near as with keys in order."""
    q, k, v = (
        torch.randn(2, seq, heads, dim, device=hopper).bfloat16() for seq, heads in ((300, 8), (keys, 2), (keys, 2))
    )
    (q8, q_scale), (k8, k_scale) = fa3gen.quantize(q, heads_kv=2), fa3gen.quantize(k)
    v8, v_scale = fa3gen.quantize(v, transpose=True, permute_keys=True)
    of_rows, same = fa3gen.quantize(v)
    assert v_scale.equal(same) and v8.shape[1] == -(-keys // 16) * 16
    assert v8.view(torch.uint8).equal(inputs.permuted_keys(of_rows, fill=0.0).view(torch.uint8))
    named: dict[str, Any] = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale, "causal": causal}
    out, lse = fa3gen.attention(q8, k8, v8, v_permuted=True, **named, return_lse=True)
    factors = {name: named[name] for name in FACTORS}
    close(out, lse, expected(q8, k8, of_rows, causal, factors))
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: fa3gen.attention(*x, v_permuted=True, **named), fullgraph=True)
    assert compiled(q8, k8, v8).equal(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fa3gen.attention(q8, k8, v8, v_permuted=True, **named)
    captured.fill_(torch.nan)
    graph.replay()
    assert captured.equal(out)
    with pytest.raises(ValueError, match="it needs to be .*16"):
        fa3gen.attention(q8, k8, v8[:, :-16], v_permuted=True, **named)


@EVERY
def test_the_function_of_flash_attention(dim: int, causal: bool, hopper: Any) -> None:
    q, k, v = tensors(hopper, "many", dim)
    factors = factors_of("of heads", k)
    out, lse = flash_attn_func(q, k, v, causal=causal, **factors, return_attn_probs=True)
    assert out.equal(fa3gen.attention(q, k, v, causal=causal, **factors))
    close(out, lse, expected(q, k, v, causal, factors))


def test_every_row_of_the_table(hopper: Any) -> None:
    """Its module is what calls of its sizes get, and is right there."""
    rows = [row for row in dispatch.read_table(dispatch.table_path(WORKSPACE)).rows if row.dtype == "e4m3"]
    for row in rows:
        keys = row.seq_k.up_to if row.seq_k else 2048
        batch = 1 if row.tiles_per_sm is None or row.tiles_per_sm.up_to > 1 else 2
        q, k, v = (torch.randn(batch, keys, 4, row.head_dim, device=hopper).to(E4M3) for _ in range(3))
        given, causal = inputs.by_sequence(v) if row.by_sequence else v, row.mask.kind == "causal"
        named = {"v_permuted": True} if row.v_permuted else {}
        given = inputs.permuted_keys(v, fill=0.0) if named else given
        close(fa3gen.attention(q, k, given, causal=causal, **named), None, expected(q, k, v, causal, {}))


def test_a_factor_on_the_host_is_refused_and_not_read(hopper: Any) -> None:
    q, k, v = tensors(hopper, "few", 128)
    fa3gen.attention(q, k, v, q_descale=torch.ones(1, device=hopper))
    for wrong in (torch.ones(1), torch.ones(2, 2)):
        with pytest.raises(ArgumentError, match="q_descale is .* on cpu; it needs to be one number or"):
            fa3gen.attention(q, k, v, q_descale=wrong)
