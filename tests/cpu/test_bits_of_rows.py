"""Packed sequences and pages on the CPU model: in modules for deterministic_batch a row's bits are its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hosting import module, path_of
from packed_modules import offsets
from rendering import source, variants

from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.module import load_on_cpu
from fa3gen.design.own_bits import own_bits
from fa3gen.verify.on_cpu import verify_on_cpu
from fa3gen.verify.packed_inputs import sequences

torch.set_num_threads(1)  # the workers of xdist share the cores

# A request: its queries, and all keys and values that there are for it.
Request = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Found = tuple[torch.Tensor, torch.Tensor]
PAGE = 48  # a multiple of the boxes of 16, and of single rows
NO_PAGE = -1
WINDOW = (150, 0)

# Module, heads of q and of k, and what its calls have to say.
CAUSAL: list[tuple[str, tuple[int, int], dict[str, Any]]] = [
    ("fwd_packed_d64_causal", (2, 1), {}),
    ("fwd_packed_d128_causal", (2, 1), {}),
    ("fwd_packed_pack4_d128_causal", (4, 1), {}),
    ("fwd_packed_pack8_d64_causal", (8, 1), {}),
    ("fwd_packed_any_window_d64", (1, 1), {"window": WINDOW}),
    ("fwd_packed_own_bits_sink_any_window", (8, 1), {"window": WINDOW, "sinks": torch.linspace(-2, 3, 8)}),
    ("fwd_fp16_packed_d128_causal", (1, 1), {}),
    ("fwd_packed_d192_128_causal", (1, 1), {}),
    ("fwd_packed_own_bits_d256_causal", (2, 1), {}),
    ("fwd_paged_d64_causal", (2, 1), {}),
    ("fwd_paged_pack4_d128_causal", (4, 1), {}),
    ("fwd_paged_rows_d64_causal", (1, 1), {}),
    ("fwd_paged_own_bits_window_d128", (1, 1), {"window": WINDOW}),
]
UNMASKED: list[tuple[str, tuple[int, int], dict[str, Any]]] = [
    ("fwd_packed_d128", (2, 1), {}),
    ("fwd_packed_pack8_d64", (8, 1), {}),
    ("fwd_paged_own_bits_d256", (1, 1), {}),
]


def request(stem: str, heads: tuple[int, int], queries: int, keys: int, seed: int) -> Request:
    """One of so many queries, the last of them at the last key."""
    problem = variants()[stem].spec.problem
    generator, dtype = torch.Generator().manual_seed(seed), {"bf16": torch.bfloat16, "fp16": torch.half}[problem.dtype]
    shapes = (queries, heads[0], problem.head_dim), (keys, heads[1], problem.head_dim), (keys, heads[1], problem.v_dim)
    # Scores of some size, so that maxima move from tile to tile.
    q, k, v = (
        torch.randn(shape, generator=generator) * factor for shape, factor in zip(shapes, (3, 1, 1), strict=True)
    )
    return q.to(dtype), k.to(dtype), v.to(dtype)


def chunk(whole: Request, begin: int, end: int) -> Request:
    """Some of a request's queries, with the keys up to the last of them."""
    q, k, v = whole
    keys = len(k) - len(q) + end
    return q[begin:end], k[:keys], v[:keys]


def in_pages(k: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages, the last ones first, which have NaN behind the last key, and the table."""
    counts = [-(-len(rows) // PAGE) for rows in k]
    pages = torch.full((sum(counts) * PAGE, *k[0].shape[1:]), torch.nan, dtype=k[0].dtype)
    table = torch.full((len(k), max(counts)), NO_PAGE, dtype=torch.int32)
    pages, number = pages.unflatten(0, (-1, PAGE)), sum(counts)
    for sequence, rows in enumerate(k):
        for column, part in enumerate(rows.split(PAGE)):
            number -= 1
            pages[number, : len(part)], table[sequence, column] = part, number
    return pages, table


def call(stem: str, requests: Sequence[Request], sms: int = 3, loaded: Any = None, **options: Any) -> list[Found]:
    """O and LSE of each request of one call."""
    entry, spec = loaded or module(stem), variants()[stem].spec
    q, k, v = zip(*requests, strict=True)
    lengths_q, lengths_k = [len(x) for x in q], [len(x) for x in k]
    if spec.problem.layout == "paged":
        (pages_k, table), (pages_v, _) = in_pages(k), in_pages(v)
        used = torch.tensor(lengths_k, dtype=torch.int32)
        given: tuple[torch.Tensor, ...] = (torch.cat(q), pages_k, pages_v, offsets(lengths_q), table, used)
    else:
        given = torch.cat(q), torch.cat(k), torch.cat(v), offsets(lengths_q), offsets(lengths_k)
    entry.cpu.settings = Settings(sms=sms)
    try:
        out, lse = entry.attention(*given, return_lse=True, **options)
    finally:
        entry.cpu.settings = Settings()
    return list(zip(out.split(lengths_q), lse.split(lengths_q, dim=1), strict=True))


def same(first: Found, second: Found) -> bool:
    """The same bits of O, (queries, heads, v_dim), and of LSE, (heads, queries)."""
    return all(one.equal(other) for one, other in zip(first, second, strict=True))


def rows(found: Found, begin: int, end: int) -> Found:
    return found[0][begin:end], found[1][:, begin:end]


def chunked(stem: str, heads: tuple[int, int], ends: Iterable[int], loaded: Any = None, **options: Any) -> bool:
    """Whether a request of 200 queries and 437 keys has the same bits at once, and in chunks in other company."""
    whole, beside = request(stem, heads, 200, 437, seed=1), request(stem, heads, 5, 300, seed=2)
    [at_once] = call(stem, [whole], loaded=loaded, **options)
    found, begin = [], 0
    for number, end in enumerate(ends):
        company = [beside] * (number % 3)
        *_, part = call(stem, [*company, chunk(whole, begin, end)], 1 + number % 4, loaded, **options)
        found.append(same(part, rows(at_once, begin, end)))
        begin = end
    assert begin == 200
    return all(found)


@pytest.mark.parametrize(("stem", "heads", "options"), [*CAUSAL, *UNMASKED], ids=lambda value: str(value)[:40])
def test_alone_in_any_place_beside_any_others_and_on_any_gpu(
    stem: str, heads: tuple[int, int], options: dict[str, Any]
) -> None:
    assert own_bits(variants()[stem].spec)
    requests = [request(stem, heads, *lengths, seed=i) for i, lengths in enumerate([(1, 300), (70, 130), (3, 515)])]
    together = call(stem, requests, **options)
    for i, one in enumerate(requests):
        assert same(call(stem, [one], 1 + i, **options)[0], together[i])
    for order in ((2, 0, 1), (1, 2), (2, 2, 1)):
        for i, found in zip(order, call(stem, [requests[i] for i in order], 5, **options), strict=True):
            assert same(found, together[i])


@pytest.mark.parametrize("ends", [(1, 2, 129, 200), (77, 199, 200)], ids=str)
@pytest.mark.parametrize(("stem", "heads", "options"), CAUSAL, ids=lambda value: str(value)[:40])
def test_in_chunks_of_any_ends(
    stem: str, heads: tuple[int, int], options: dict[str, Any], ends: tuple[int, ...]
) -> None:
    """A row lies elsewhere in its tile, which visits other tiles of keys, with edges of the mask in others of them."""
    assert chunked(stem, heads, ends, **options)


@pytest.mark.parametrize(("stem", "heads", "options"), UNMASKED, ids=lambda value: str(value)[:40])
def test_queries_that_see_all_keys_at_once_or_by_themselves(
    stem: str, heads: tuple[int, int], options: dict[str, Any]
) -> None:
    q, k, v = request(stem, heads, 150, 400, seed=3)
    [at_once] = call(stem, [(q, k, v)], **options)
    for begin, end in ((0, 1), (1, 130), (130, 150)):
        [part] = call(stem, [(q[begin:end], k, v)], **options)
        assert same(part, rows(at_once, begin, end))


@pytest.mark.parametrize("last", [127, 128, 129, 256])
def test_decoding_steps_are_the_rows_of_a_prompt(last: int) -> None:
    """One by one, around the ends of tiles of keys."""
    stem, heads = "fwd_paged_d64_causal", (2, 1)
    whole = request(stem, heads, last + 2, last + 2, seed=4)
    [prompt] = call(stem, [whole])
    for i in range(last - 2, last + 2):
        _, step = call(stem, [chunk(whole, 0, 20), chunk(whole, i, i + 1)])
        assert same(step, rows(prompt, i, i + 1))


def test_other_modules_do_not_keep_them() -> None:
    """What the mode is for: neither where a warp rescales when one of its rows needs it, nor where SMs share keys."""
    assert not own_bits(variants()["fwd_packed_d256_causal"].spec)
    assert not chunked("fwd_packed_d256_causal", (1, 1), (2, 129, 200))
    stem, heads = "fwd_packed_decode_d64_causal", (4, 1)
    assert not own_bits(variants()[stem].spec)
    one = request(stem, heads, 1, 900, seed=5)
    assert not same(*(call(stem, [one], sms)[0] for sms in (1, 5)))


def test_rows_that_share_a_maximum_are_noticed(tmp_path: Path) -> None:
    """A mistake that leaves results right: the maximum of all rows of a warp, and not of each."""
    stem, old = "fwd_packed_d64_causal", "    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))\n"
    text = source(stem)
    assert text.count(old) == 1
    shared = old.replace("return", "x =") + old.replace("offset=2", "offset=4")
    wrong = load_on_cpu(path_of(tmp_path, "wrong", text.replace(old, shared)))
    case = sequences("shared", "a sequence", (200,), (437,), heads=(2, 1))
    assert not verify_on_cpu(wrong, variants()[stem].spec, stem="wrong", cases=[case], count=1).failures
    assert not chunked(stem, (2, 1), (2, 129, 200), wrong)
