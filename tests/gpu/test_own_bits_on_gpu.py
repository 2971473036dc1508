"""On a GPU: deterministic_batch=True gives a row of packed sequences, or pages, the same bits whatever is beside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from packed_modules import offsets

import fa3gen
from fa3gen.design.splits import KEYS_OF_PAGED_PARTS

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


PARTS = [*product([64, 128], [(8, 2), (4, 4), (16, 1)], [None, 16, 64], [True, False])]


@pytest.mark.parametrize(("head_dim", "heads", "page", "causal"), PARTS, ids=str)
def test_parts_have_the_same_bits_whoever_adds_them_up(
    head_dim: int, heads: tuple[int, int], page: int | None, causal: bool
) -> None:
    """Calls that are told that queries are few have a CTA for each part; those that are not have one for all keys."""
    generator = torch.Generator("cuda").manual_seed(head_dim)

    def drawn(rows: int, count: int, factor: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, count, head_dim, device="cuda", generator=generator) * factor).bfloat16()

    lengths = [(1, 1), (1, 383), (1, 384), (2, 385), (16, 511), (3, 512), (1, 513), (7, 5000), (1, 20_000), (9, 4)]
    requests = [(drawn(n, heads[0], 2.0), drawn(m, heads[1]), drawn(m, heads[1])) for n, m in lengths]
    options: dict[str, Any] = {"causal": causal, "split_keys": KEYS_OF_PAGED_PARTS[head_dim]}
    many = call(requests, None, page, **options)
    for told in ({"max_seqlen_q": 16}, {"max_seqlen_q": 16, "max_seqlen_k": 20_000}):
        few = call(requests, None, page, **options, **told)
        assert all(same(one, other) for one, other in zip(few, many, strict=True))
    for i, one in enumerate(requests):
        alone = call([one], None, page, **options, max_seqlen_q=len(one[0]), max_seqlen_k=len(one[1]))
        assert same(alone[0], many[i])
    q, k, v = requests[8]  # beside a prompt
    prompt = drawn(700, heads[0]), drawn(700, heads[1]), drawn(700, heads[1])
    assert same(call([prompt, (q, k, v)], None, page, **options)[1], many[8])
    if causal:  # each row of a prompt as a step of decoding
        [at_once] = call([prompt], None, page, **options)
        for i in (0, 95, 96, 383, 384, 511, 512, 699):
            step = prompt[0][i : i + 1], prompt[1][: i + 1], prompt[2][: i + 1]
            assert same(
                call([step, requests[6]], None, page, **options)[0], (at_once[0][i : i + 1], at_once[1][:, i : i + 1])
            )


@pytest.mark.parametrize("page", [None, 64])
def test_one_graph_serves_all_lengths(page: int | None) -> None:
    """Captured with the longest sequences that there may be, and replayed with others."""
    heads, most, count = (8, 2), 3000, 6
    generator = torch.Generator("cuda").manual_seed(1)
    q = torch.randn(count, heads[0], 128, device="cuda", generator=generator).bfloat16()
    k, v = (torch.randn(count * most, heads[1], 128, device="cuda", generator=generator).bfloat16() for _ in range(2))
    used = torch.full((count,), most, dtype=torch.int32, device="cuda")
    options: dict[str, Any] = {"causal": True, "split_keys": 384, "return_lse": True, "seqused_k": used}
    options |= {"max_seqlen_q": 1, "max_seqlen_k": most}
    keys: tuple[torch.Tensor, ...] = k, v
    if page is None:
        options["cu_seqlens_k"] = offsets([most] * count, "cuda")
    else:
        keys, options["page_table"] = in_pages([k.split(most), v.split(most)], page)
    rows = offsets([1] * count, "cuda")
    fa3gen.attention_packed(q, *keys, rows, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fa3gen.attention_packed(q, *keys, rows, **options)
    for lengths in ([1, 384, 385, 0, 2999, 3000], [3000] * 6, [7, 0, 0, 0, 0, 1]):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        replayed = tuple(x.clone() for x in found)
        assert same(replayed, fa3gen.attention_packed(q, *keys, rows, **options))
        for i, length in enumerate(lengths):
            one = q[i : i + 1], k[i * most : i * most + length], v[i * most : i * most + length]
            if length:
                alone = call([one], None, page, split_keys=384)[0]
                assert same(alone, (replayed[0][i : i + 1], replayed[1][:, i : i + 1]))
            else:
                assert not replayed[0][i].any() and replayed[1][:, i].isneginf().all()


def test_which_modules_serve() -> None:
    q, k = torch.empty(4, 8, 128, device="cuda", dtype=torch.bfloat16), torch.empty(4096, 2, 128, device="cuda")
    k, rows = k.bfloat16(), offsets([1] * 4, "cuda")
    explain = fa3gen.attention_packed.explain  # type: ignore[attr-defined]
    options: dict[str, Any] = {"causal": True, "split_keys": 384}
    asked = q, k, k, rows, offsets([1024] * 4, "cuda")
    assert explain(*asked, **options).stem == "fwd_packed_decode_fixed_d128_causal"
    assert explain(*asked, **options, max_seqlen_q=17).stem == "fwd_packed_fixed_pack_d128_causal"
    assert explain(*asked, **options, num_splits=1).stem == "fwd_packed_fixed_pack_d128_causal"


def call(
    requests: Sequence[Request], window: tuple[int, int] | None, page: int | None, causal: bool = True, **told: int
) -> list[Found]:
    """O and LSE of each request of one call, which is `told` the longest sequences or nothing."""
    q, k, v = (list(x) for x in zip(*requests, strict=True))
    lengths_q, lengths_k = [len(x) for x in q], [len(x) for x in k]
    options: dict[str, Any] = {"causal": causal, "window": window, "return_lse": True, "deterministic_batch": True}
    options |= told
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
