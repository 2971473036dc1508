"""On a GPU: deterministic_batch=True gives a row of packed sequences, or pages, the same bits whatever is beside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from packed_modules import offsets

import fa3gen

LENGTHS = [(300, 2000), (1, 700), (129, 129), (16, 4000)]  # queries and keys
Request = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Found = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def on_a_gpu(hopper: Any) -> Any:
    return hopper


CALLS = [
    *product([(64, (8, 1)), (64, (3, 1)), (128, (8, 2)), (128, (2, 2))], [None, (700, 0)], [None, 1, 16, 64]),
    *product([(256, (4, 1))], [None], [None, 16]),
]


@pytest.mark.parametrize(("dims", "window", "page"), CALLS, ids=str)
def test_alone_in_a_batch_and_in_chunks(
    dims: tuple[int, tuple[int, int]], window: tuple[int, int] | None, page: int | None
) -> None:
    head_dim, heads = dims
    generator = torch.Generator("cuda").manual_seed(head_dim)

    def drawn(rows: int, count: int, factor: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, count, head_dim, device="cuda", generator=generator) * factor).bfloat16()

    requests = [(drawn(n, heads[0], 3.0), drawn(m, heads[1]), drawn(m, heads[1])) for n, m in LENGTHS]
    together = call(requests, window, page)
    for i, one in enumerate(requests):
        assert same(call([one], window, page)[0], together[i])
        assert same(call([requests[i - 1], *[one] * 40], window, page)[-1], together[i])
    q, k, v = requests[0]
    for ends in ((1, 2, 3, 150, 300), (77, 299, 300), range(25, 301, 25)):
        for begin, end in zip((0, *ends), ends, strict=False):
            seen = len(k) - len(q) + end
            *_, chunk = call([requests[1], (q[begin:end], k[:seen], v[:seen])], window, page)
            assert same(chunk, (together[0][0][begin:end], together[0][1][:, begin:end]))


def call(requests: Sequence[Request], window: tuple[int, int] | None, page: int | None) -> list[Found]:
    """O and LSE of each request of one call, causal."""
    q, k, v = (list(x) for x in zip(*requests, strict=True))
    lengths_q, lengths_k = [len(x) for x in q], [len(x) for x in k]
    options: dict[str, Any] = {"causal": True, "window": window, "return_lse": True, "deterministic_batch": True}
    keys: tuple[torch.Tensor, ...] = torch.cat(k), torch.cat(v)
    if page is None:
        options["cu_seqlens_k"] = offsets(lengths_k, "cuda")
    else:
        keys, options["page_table"] = in_pages([k, v], page)
        options["seqused_k"] = torch.tensor(lengths_k, dtype=torch.int32, device="cuda")
    out, lse = fa3gen.attention_packed(torch.cat(q), *keys, offsets(lengths_q, "cuda"), **options)
    return list(zip(out.split(lengths_q), lse.split(lengths_q, dim=1), strict=True))


def in_pages(tensors: Sequence[Sequence[torch.Tensor]], page: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """K and V in pages, of which each sequence has as many as it needs, the first ones last; and the table."""
    counts = [-(-len(rows) // page) for rows in tensors[0]]
    numbers = torch.arange(sum(counts), device="cuda", dtype=torch.int32).flip(0)
    table = torch.nn.utils.rnn.pad_sequence(list(numbers.split(counts)), batch_first=True, padding_value=-1)
    pages = []
    for sequences in tensors:
        padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -len(x) % page)) for x in sequences]
        pages.append(torch.cat(padded).unflatten(0, (-1, page)).flip(0).contiguous())
    return tuple(pages), table


def same(first: Found, second: Found) -> bool:
    """The same bits of O and LSE."""
    return all(one.equal(other) for one, other in zip(first, second, strict=True))
