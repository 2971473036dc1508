"""On a machine with a Hopper GPU: dense tensors that modules for packed sequences serve, captured and not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fa3gen
from fa3gen.design.masks import reach
from fa3gen.design.workspace import Workspace
from fa3gen.run import dispatch, equal_lengths
from fa3gen.verify import reference

WORKSPACE = Workspace.find(Path(__file__).parent)
TOLERANCE, LSE_TOLERANCE = 0.01, 1e-3  # as in test_attention
BATCH, HEADS, HEADS_KV = 3, 16, 2
CALLS: list[tuple[int, dict[str, Any]]] = [
    (128, {"window": (700, 0)}),
    (64, {"window": (127, 0), "sinks": HEADS}),
    (64, {"causal": True, "sinks": HEADS}),
    (256, {"window": (700, 0), "softcap": 20.0}),
]
EVERY = pytest.mark.parametrize(("dim", "options"), CALLS, ids=["window", "sinks, window", "sinks", "cap, window"])


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(WORKSPACE.root)
    with torch.no_grad():
        yield


def tensors(device: Any, dim: int, *, seq_q: int = 5, seq_k: int = 1500, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seed)
    shapes = (BATCH, seq_q, HEADS, dim), *[(BATCH, seq_k, HEADS_KV, dim)] * 2
    return tuple(torch.randn(x, generator=generator, device=device).to(torch.bfloat16) for x in shapes)


def given(options: dict[str, Any], device: Any) -> dict[str, Any]:
    """The options with sinks for so many heads."""
    sinks = {"sinks": torch.linspace(-2, 2, options["sinks"], device=device)} if "sinks" in options else {}
    return {**options, **sinks}


def check(
    tensors: tuple[torch.Tensor, ...], options: dict[str, Any], out: torch.Tensor, lse: torch.Tensor | None = None
) -> None:
    scores = {name: options[name] for name in ("sinks", "softcap") if name in options}
    mask = dispatch.mask_of(options.get("causal", False), options.get("window"))
    wanted = reference.attention(*tensors, reach=reach(mask), compute_dtype=torch.float32, **scores)
    assert ((out.float() - wanted.out).norm() / wanted.out.norm()).item() <= TOLERANCE
    if lse is not None:
        torch.testing.assert_close(lse, wanted.lse.float(), rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)


@EVERY
@pytest.mark.parametrize("seq_q", [1, 16])
def test_numbers(seq_q: int, dim: int, options: dict[str, Any], hopper: Any) -> None:
    q, k, v = tensors(hopper, dim, seq_q=seq_q)
    options = given(options, hopper)
    by_head = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert fa3gen.attention.explain(by_head, k, v, **options).as_packed
    out, lse = fa3gen.attention(by_head, k, v, **options, return_lse=True)
    check((q, k, v), options, out, lse)
    into = torch.full_like(out, torch.nan)
    assert fa3gen.attention(q, k, v, **options, out=into) is into and into.equal(out)


MANY: list[tuple[int, dict[str, Any], str]] = [
    (64, {"window": (127, 0)}, "fwd_packed_pack4_any_window_d64"),
    (128, {"window": (127, 0)}, "fwd_packed_pack4_any_window_d128"),
    (256, {"window": (300, 20)}, "fwd_packed_pack4_any_window_d256"),
    (64, {"window": (127, 0), "sinks": HEADS}, "fwd_packed_pack8_sink_any_window"),
    (256, {"window": (300, 0), "softcap": 20.0}, "fwd_packed_softcap_d256_any_window"),
]


@pytest.mark.parametrize(("dim", "options", "stem"), MANY, ids=[stem for *_, stem in MANY])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(17, 1500), (300, 1500), (1283, 1283)])
def test_many_queries(seq_q: int, seq_k: int, dim: int, options: dict[str, Any], stem: str, hopper: Any) -> None:
    """Of modules whose tiles hold several heads of a group, or which alone serve such calls; and captured."""
    static = tensors(hopper, dim, seq_q=seq_q, seq_k=seq_k)
    options = given(options, hopper)
    why = fa3gen.attention.explain(*static, **options)
    assert why.as_packed and why.stem == stem
    out, lse = fa3gen.attention(*static, **options, return_lse=True)
    check(static, options, out, lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fa3gen.attention(*static, **options)
    fresh = tensors(hopper, dim, seq_q=seq_q, seq_k=seq_k, seed=1)
    for tensor, values in zip(static, fresh, strict=True):
        tensor.copy_(values)
    graph.replay()
    check(fresh, options, captured)


@EVERY
def test_a_first_call_within_a_capture(dim: int, options: dict[str, Any], hopper: Any) -> None:
    """Its offsets are none of the graph's: eager calls and other streams have them, when the graph is gone, too."""
    options = given(options, hopper)
    fa3gen.attention(*tensors(hopper, dim), **options)  # which loads the kernel
    for kept in (equal_lengths._kept_offsets, equal_lengths._made):
        kept.cache_clear()
    static, graph = tensors(hopper, dim), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fa3gen.attention(*static, **options)
    assert equal_lengths._made.cache_info().currsize == 2  # 5 queries, 1500 keys
    stream = torch.cuda.Stream()
    for seed in (1, 2):
        fresh = tensors(hopper, dim, seed=seed)
        for tensor, values in zip(static, fresh, strict=True):
            tensor.copy_(values)
        graph.replay()
        check(fresh, options, out)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            assert fa3gen.attention(*fresh, **options).equal(out)
        stream.synchronize()
    wanted = out.clone()
    del graph, out
    torch.cuda.empty_cache()
    assert fa3gen.attention(*static, **options).equal(wanted)
    assert equal_lengths._made.cache_info().currsize == 2


def test_keys_that_grow(hopper: Any) -> None:
    q, k, v = tensors(hopper, 128)
    options = {"window": (700, 0)}
    for rows in (1000, 1001, 1100):
        part = q[:1], k[:1, :rows], v[:1, :rows]  # of one sequence, so that the rows are those of one tensor
        assert fa3gen.attention.explain(*part, **options).as_packed
        check(part, options, fa3gen.attention(*part, **options))


@EVERY
def test_the_host_never_waits(dim: int, options: dict[str, Any], hopper: Any) -> None:
    q, k, v = tensors(hopper, dim)
    options = given(options, hopper)
    fa3gen.attention(q, k, v, **options, return_lse=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = fa3gen.attention(q, k, v, **options, return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check((q, k, v), options, out, lse)


@pytest.mark.parametrize("backend", ["aot_eager", "cudagraphs"])
def test_compiled(backend: str, hopper: Any) -> None:
    """Graph trees take memory back that torch's allocator gives meanwhile: offsets must be none of it."""
    q, k, v = tensors(hopper, 128)
    options = {"window": (700, 0)}

    def model(q: Any, k: Any, v: Any) -> Any:
        out, lse = fa3gen.attention(q * 2, k, v, **options, return_lse=True)
        return out + 0, lse

    for kept in (equal_lengths._kept_offsets, equal_lengths._made):
        kept.cache_clear()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for _ in range(4):
        out, lse = (x.clone() for x in compiled(q, k, v))
        check((q * 2, k, v), options, out, lse)
    check((q, k, v), options, fa3gen.attention(q, k, v, **options))
