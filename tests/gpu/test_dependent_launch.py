"""On a machine with a Hopper GPU: programmatic dependent launch, asked for by `enable_pdl` or always there.

Each launch reads what the one before has written, and each allows the next one to begin early: a kernel that did not
wait for the end of the one before would read old values.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fa3gen
from fa3gen.design.workspace import Workspace
from fa3gen.hardware.dtypes import BF16
from fa3gen.spec.specfile import attention_among

WORKSPACE = Workspace.find(Path(__file__).parent)
SPECS = {variant.stem: variant.spec for file in WORKSPACE.load_all() for variant in attention_among(file.variants)}
STEMS = [stem for stem, spec in SPECS.items() if spec.scheduler == "grid"]
LINKS, TIMES = 12, 60


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch, hopper: Any) -> Any:
    monkeypatch.chdir(WORKSPACE.root)
    return hopper


def chain(module: Any, q: torch.Tensor, kv: torch.Tensor, outs: list[torch.Tensor], *, enable_pdl: bool) -> None:
    """Each launch has the output of the one before as its queries and keys."""
    for out in outs:
        module.attention(q, q, kv, out=out, enable_pdl=enable_pdl)
        q = out


def problem(stem: str, seq: int, hopper: Any) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(seq)
    d = SPECS[stem].problem.head_dim
    q, kv = (torch.randn(2, seq, 8, d, device=hopper, dtype=torch.bfloat16) for _ in range(2))
    return q, kv, [torch.empty_like(q) for _ in range(LINKS)]


@pytest.mark.parametrize("stem", STEMS)
@pytest.mark.parametrize("seq", [100, 500])
def test_a_chain_of_launches_reads_what_was_written(stem: str, seq: int, hopper: Any) -> None:
    module = fa3gen.load(stem)
    q, kv, outs = problem(stem, seq, hopper)
    chain(module, q, kv, outs, enable_pdl=False)
    torch.cuda.synchronize()
    expected = [out.clone() for out in outs]
    for _ in range(TIMES):
        for out in outs:
            out.fill_(float("nan"))  # what a launch that came too early would read
        chain(module, q, kv, outs, enable_pdl=True)
    assert all(torch.equal(out, wanted) for out, wanted in zip(outs, expected, strict=True))


@pytest.mark.parametrize("stem", STEMS)
def test_a_captured_chain_does_so_too(stem: str, hopper: Any) -> None:
    module = fa3gen.load(stem)
    q, kv, outs = problem(stem, 300, hopper)
    chain(module, q, kv, outs, enable_pdl=False)
    torch.cuda.synchronize()
    expected = [out.clone() for out in outs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(module, q, kv, outs, enable_pdl=True)
    for _ in range(TIMES):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
    assert all(torch.equal(out, wanted) for out, wanted in zip(outs, expected, strict=True))


# Packed sequences in even shares: every launch may begin early, and so may the kernel that adds parts up

# O of 8-bit queries is of another dtype, so that calls make no chain.
EVEN = [
    stem
    for stem, spec in SPECS.items()
    if spec.scheduler == "even" and spec.problem.layout == "packed" and spec.element is spec.kv_element is BF16
]


@pytest.mark.parametrize("stem", EVEN)
@pytest.mark.parametrize("lengths", [(300,), (1, 70, 0, 4, 129)])
def test_a_chain_of_packed_calls_reads_what_was_written(stem: str, lengths: tuple[int, ...], hopper: Any) -> None:
    """Also the lengths: every launch finds them written anew by a kernel that ends just before."""
    torch.manual_seed(len(lengths))
    spec = SPECS[stem]
    shape = sum(lengths), 2, spec.problem.head_dim
    q, kv = (torch.randn(shape, device=hopper, dtype=torch.bfloat16) for _ in range(2))
    begins = torch.tensor([0, *lengths], device=hopper).cumsum(0).int()
    offsets, outs = torch.empty_like(begins), [torch.empty_like(q) for _ in range(LINKS)]
    options: dict[str, Any] = {"sinks": torch.zeros(2, device=hopper)} if spec.softmax.sink else {}
    options |= {"softcap": 30.0} if spec.softmax.softcap else {}
    attention = fa3gen.load(stem).attention

    def calls(*, alone: bool) -> None:
        rows = q
        for out in outs:
            offsets.fill_(0)
            offsets.copy_(begins)
            attention(rows, rows, kv, offsets, offsets, out=out, **options)
            if alone:
                torch.cuda.synchronize()
            rows = out

    calls(alone=True)
    expected = [out.clone() for out in outs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls(alone=False)
    for run in [lambda: calls(alone=False), graph.replay]:
        for _ in range(TIMES // 4):
            for out in outs:
                out.fill_(float("nan"))
            run()
            assert all(torch.equal(out, wanted) for out, wanted in zip(outs, expected, strict=True))
