"""attention_chunk of FlashAttention-3's functions: sequences cut where chunks end, against its definition, row by row.

Modules are stood in for by functions that compute the reference; small calls run generated ones on the CPU model.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from packed_modules import PackedModules, offsets, packed_tensors
from stand_ins import pass_for_cuda, standing_in

import fa3gen
from fa3gen import flash_attn_interface as fa3
from fa3gen.run import calls, chunks
from fa3gen.run.dispatch import ArgumentError
from fa3gen.verify import reference

Tensors = tuple[torch.Tensor, ...]
QUERIES, KEYS = (5, 1, 0, 4, 7, 3), (9, 6, 4, 4, 5, 0)  # causal rows without a key, and none at all
CHUNKS = (1, 2, 3, 4, 7, 100)
REACHES = {"full": (None, None), "causal": (None, 0), "window": (2, 1), "left": (1, None), "causal window": (2, 0)}
EVERY_CHUNK = pytest.mark.parametrize("chunk", CHUNKS)
EVERY_REACH = pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackedModules]:
    """For calls that torch.compile sees."""
    with standing_in(PackedModules(bound=2**40), monkeypatch) as stand_in:
        yield stand_in


@pytest.fixture
def modules(compiled: PackedModules, monkeypatch: pytest.MonkeyPatch) -> PackedModules:
    """On tensors that pass for CUDA tensors, as in eager mode on a GPU."""
    pass_for_cuda(monkeypatch)
    return compiled


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: int, reach: tuple[int | None, int | None], **scores: Any
) -> Tensors:
    """O and LSE of one sequence, (rows, heads, head dim), each row with the keys that it sees."""
    left, right = reach
    outs, lses = [], []
    for row in range(len(q)):
        place = row + len(k) - len(q)
        begin = place // chunk * chunk
        first = begin if left is None else max(begin, place - left)
        last = begin + chunk if right is None else min(begin + chunk, place + right + 1)
        seen = slice(max(first, 0), max(last, 0))
        one = q[None, row : row + 1], k[None, seen], v[None, seen]
        found = reference.attention(*one, reach=(None, None), compute_dtype=torch.float32, **scores)
        outs.append(found.out[0])
        lses.append(found.lse[0])
    if not outs:
        return q.new_empty(0, *q.shape[1:], dtype=torch.float32), q.new_empty(q.shape[1], 0, dtype=torch.float32)
    return torch.cat(outs), torch.cat(lses, dim=1)


def close(found: Any, wanted: Any) -> None:
    """O as rounded to 16 bits, and LSE."""
    torch.testing.assert_close(found[0].float(), wanted[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-5)


def options_of(reach: tuple[int | None, int | None]) -> dict[str, Any]:
    left, right = reach
    return {"causal": right == 0, "window_size": tuple(-1 if side is None else side for side in (left, right))}


# Cutting


@pytest.mark.parametrize("queries", range(6))
def test_as_many_chunks_as_queries_can_touch(queries: int) -> None:
    for chunk in range(1, 6):
        touched = [{(first + i) // chunk for i in range(queries)} for first in range(chunk)]
        assert chunks.chunks_touched(queries, chunk) == max(1, *(len(each) for each in touched))


@EVERY_CHUNK
def test_cut(chunk: int) -> None:
    """Each sequence's queries are those of its parts, in order; each part's keys end where its last query stands."""
    begins, most = offsets(QUERIES), chunks.chunks_touched(max(QUERIES), chunk)
    found = chunks.cut(begins[:-1], begins[-1:], *(torch.tensor(x).int() for x in (QUERIES, KEYS)), chunk, most)
    assert {x.dtype for x in found} == {torch.int32, torch.int64} and found.number.dtype == torch.int64
    assert found.cu_seqlens_q.tolist() == sorted(found.cu_seqlens_q.tolist())
    assert found.cu_seqlens_q.diff().equal(found.seqused_q)
    parts = zip(*(x.tolist() for x in found[1:]), strict=True)
    for queries, keys in zip(QUERIES, KEYS, strict=True):
        place = keys - queries
        for _ in range(most):
            rows, number, begin, used = next(parts)
            if not rows:
                assert used == 0
                continue
            assert place // chunk == (place + rows - 1) // chunk == number
            assert begin == min(max(number * chunk, 0), keys) and begin + used == min(
                max((number + 1) * chunk, 0), keys
            )
            place += rows
            assert used == 0 or place == begin + used
        assert place == keys
    assert next(parts, None) is None


# Calls


@EVERY_REACH
@EVERY_CHUNK
def test_packed(chunk: int, reach: tuple[int | None, int | None], modules: PackedModules) -> None:
    q, k, v, begins_q, begins_k = tensors = packed_tensors(QUERIES, KEYS)
    options = {**options_of(reach), "attention_chunk": chunk, "return_attn_probs": True, "softmax_scale": 0.3}
    into = torch.empty_like(q)
    out, lse = fa3.flash_attn_varlen_func(*tensors, max(QUERIES), max(KEYS), out=into, **options)
    assert out is into and len(modules.calls) == 1
    for a, b, c, d in zip(begins_q[:-1], begins_q[1:], begins_k[:-1], begins_k[1:], strict=True):
        close((out[a:b], lse[:, a:b]), by_definition(q[a:b], k[c:d], v[c:d], chunk, reach, scale=0.3))


def test_lengths_in_use(modules: PackedModules) -> None:
    """Rows behind them are not written, and keys behind them not seen; what the host knows is of chunks."""
    q, k, v, begins_q, begins_k = packed_tensors(QUERIES, KEYS)
    used_q, used_k = [4, 1, 0, 2, 5, 3], [8, 3, 4, 4, 5, 0]
    given = {"seqused_q": torch.tensor(used_q).int(), "seqused_k": torch.tensor(used_k).int()}
    for i, (begin, end) in enumerate(zip(begins_k[:-1].tolist(), begins_k[1:].tolist(), strict=True)):
        k[begin + used_k[i] : end] = v[begin + used_k[i] : end] = torch.nan
    untouched = torch.full_like(q, 3.0)
    out = fa3.flash_attn_varlen_func(
        *(q, k, v, begins_q, begins_k, 7, 9), **given, causal=True, attention_chunk=3, out=untouched
    )
    for a, c, queries, keys_used in zip(begins_q[:-1].tolist(), begins_k[:-1].tolist(), used_q, used_k, strict=True):
        rows, keys = slice(a, a + queries), slice(c, c + keys_used)
        wanted, _ = by_definition(q[rows], k[keys], v[keys], 3, (None, 0))
        torch.testing.assert_close(out[rows].float(), wanted, rtol=1e-2, atol=1e-2)
    assert modules.asked[0][1].keys <= 3 and modules.asked[0][1].queries <= 3


def test_packed_without_the_longest(modules: PackedModules) -> None:
    """A tensor may lie on the GPU, where nobody looks: cut as if a sequence had all queries."""
    tensors = packed_tensors(QUERIES, KEYS)
    longest = torch.tensor(max(QUERIES)), torch.tensor(max(KEYS))
    found = fa3.flash_attn_varlen_func(*tensors, *longest, causal=True, attention_chunk=3)  # type: ignore[arg-type]
    assert found.equal(fa3.flash_attn_varlen_func(*tensors, max(QUERIES), max(KEYS), causal=True, attention_chunk=3))
    assert found.isfinite().all()


@EVERY_REACH
@pytest.mark.parametrize("chunk", [2, 3, 8])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(5, 9), (1, 6), (7, 4), (0, 4)])
def test_dense(
    seq_q: int, seq_k: int, chunk: int, reach: tuple[int | None, int | None], modules: PackedModules
) -> None:
    q, k, v = (x.unflatten(0, (2, -1)) for x in packed_tensors([seq_q] * 2, [seq_k] * 2)[:3])
    k = k.transpose(1, 2).contiguous().transpose(1, 2)  # whose batch and sequence are no rows of one tensor
    out, lse = fa3.flash_attn_func(
        q, k, v, **options_of(reach), attention_chunk=chunk, return_attn_probs=True, s_aux=None
    )
    assert out.shape == q.shape and lse.shape == (2, 4, seq_q)
    for i in range(2):
        close((out[i], lse[i]), by_definition(q[i], k[i], v[i], chunk, reach))


def test_a_chunk_that_holds_all_keys_is_none(modules: PackedModules) -> None:
    """But for queries in front of the first key, which see none."""
    q, k, v = (x.unflatten(0, (2, -1)) for x in packed_tensors([5, 5], [9, 9])[:3])
    for options in ({"causal": True}, {}):
        plain = fa3.flash_attn_func(q, k, v, **options)
        assert fa3.flash_attn_func(q, k, v, **options, attention_chunk=9).equal(plain)
    assert {family.layout for family, _, _ in modules.asked} == {"dense"}
    assert fa3.flash_attn_func(k[:, :, :1], q[:, :, :1], q[:, :, :1], attention_chunk=9)[:, :4].eq(0).all()
    assert modules.asked[-1][0].layout == "packed"


def test_a_window_that_is_wider_than_a_chunk_is_none(modules: PackedModules) -> None:
    tensors = packed_tensors(QUERIES, KEYS)
    fa3.flash_attn_varlen_func(*tensors, 7, 9, window_size=(3, 0), attention_chunk=4)
    assert modules.asked[-1][0].mask.kind == "causal"
    fa3.flash_attn_varlen_func(*tensors, 7, 9, window_size=(2, 0), attention_chunk=4)
    assert modules.asked[-1][0].mask.kind == "window"


@pytest.mark.parametrize("chunk", [-1, 2.0, True, None, torch.tensor(3)])
def test_what_is_no_number_of_keys(chunk: Any, modules: PackedModules) -> None:
    q, k, v = (x[None] for x in packed_tensors([5], [9])[:3])
    tensors = packed_tensors(QUERIES, KEYS)
    for call in (
        functools.partial(fa3.flash_attn_func, q, k, v),
        functools.partial(fa3.flash_attn_varlen_func, *tensors, 7, 9),
        functools.partial(fa3.flash_attn_with_kvcache, q, k, v),
    ):
        with pytest.raises(ArgumentError, match="attention_chunk is .*; it needs to be a number of keys, or 0 for no"):
            call(attention_chunk=chunk)
    assert modules.calls == []


@pytest.mark.parametrize("page", [None, 2])
def test_sequences_are_cut_once_for_many_layers(page: int | None, modules: PackedModules) -> None:
    q, (k, v), table = cache_of(page)[0][0], *cache_of(page)[1:]
    used, begins = torch.tensor([12, 3, 7]).int(), offsets([4, 4, 4])
    options: dict[str, Any] = {"cache_seqlens": used, "page_table": table, "cu_seqlens_q": begins, "max_seqlen_q": 4}
    wanted = fa3.flash_attn_with_kvcache(q.flatten(0, 1), k, v, **options, causal=True, attention_chunk=6)
    of_k = None if page else offsets([12, 12, 12])
    cut = chunks.in_chunks(6, begins, of_k, 4, page_table=table, page=page, max_seqlen_k=12, seqused_k=used)
    rows = (k, v) if page else (k.flatten(0, 1), v.flatten(0, 1))
    assert fa3gen.attention_packed(q.flatten(0, 1), *rows, **cut, causal=True).equal(wanted)


@pytest.mark.parametrize("chunk", [0, 4])
def test_tensors_of_other_dimensions_are_named(chunk: int, modules: PackedModules) -> None:
    q, k, v = (x[None] for x in packed_tensors([5], [9])[:3])
    with pytest.raises(ArgumentError, match="k has shape .*; it needs to be "):
        fa3.flash_attn_func(q, k.flatten(), v, attention_chunk=chunk)


def test_it_is_compiled_in_one_graph(compiled: PackedModules) -> None:
    def model(q: Any, *rest: Any) -> Any:
        out, lse = fa3.flash_attn_varlen_func(
            q + 1, *rest, 7, 9, causal=True, attention_chunk=3, return_attn_probs=True
        )
        return out * 2, lse

    tensors = packed_tensors(QUERIES, KEYS)
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(*tensors)
    assert all(x.equal(y) for x, y in zip(found, model(*tensors), strict=True))


def test_a_cache_is_compiled_in_one_graph_whatever_its_pages(compiled: PackedModules) -> None:
    """From the second on with sizes that may vary."""

    def model(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return fa3.flash_attn_with_kvcache(q + 1, k, v, causal=True, attention_chunk=4, **options)[:2]

    compiled_model = torch.compile(model, fullgraph=True, backend="aot_eager")
    for page in (None, 6, 4, 2):
        tensors, cache, table = cache_of(page)
        options: dict[str, Any] = {"cache_seqlens": torch.tensor([12, 3, 7]).int(), "page_table": table}
        options |= {"return_softmax_lse": True}
        found, wanted = (call(tensors[0], *cache, **options) for call in (compiled_model, model))
        assert all(x.equal(y) for x, y in zip(found, wanted, strict=True))


def test_factors_of_sequences_are_those_of_their_chunks(modules: PackedModules) -> None:
    """Beside k and v of 8 bits; one number stays one."""
    q, k, v, *begins = packed_tensors(QUERIES, KEYS)
    narrow = [x.to(torch.float8_e4m3fn) for x in (k, v)]
    factors = {"k_descale": torch.rand(len(KEYS), 2), "v_descale": torch.rand(1, 1).expand(len(KEYS), 2)}
    options: dict[str, Any] = {"causal": True, "attention_chunk": 3}
    fa3.flash_attn_varlen_func(q, *narrow, *begins, 7, 9, **factors, **options)
    most = chunks.chunks_touched(7, 3)
    for name, factor in factors.items():
        given = modules.options[-1][name]
        assert given.shape == (len(KEYS) * most, 2) and given[::most].equal(factor)
        assert given.unflatten(0, (-1, most)).eq(factor[:, None]).all()
    one = {f"{name}_descale": torch.full((1,), 0.5) for name in "qkv"}
    fa3.flash_attn_varlen_func(q.to(torch.float8_e4m3fn), *narrow, *begins, 7, 9, **one, **options)
    for name in one:
        assert modules.options[-1][name].eq(0.5).all()


# With a cache


def cache_of(page: int | None, *, between: int = 0, seed: int = 0) -> tuple[Tensors, Tensors, torch.Tensor | None]:
    """q (3, 4, ..), k and v (3, 12, ..), and these as a cache: pages so many rows apart, and their table."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(3, rows, heads, 64, generator=generator).bfloat16() for rows, heads in ((4, 4), *[(12, 2)] * 2)
    )
    if page is None:
        return (q, k, v), (k, v), None
    table = torch.randperm(3 * 12 // page + 1, generator=generator)[1:].view(3, -1).int()
    stored = torch.full((2, 3 * 12 // page + 1, page + between, 2, 64), torch.nan).bfloat16()[:, :, :page]
    for x, pages in zip((k, v), stored, strict=True):
        pages[table.long().flatten()] = x.unflatten(1, (-1, page)).flatten(0, 1)
    return (q, k, v), (stored[0], stored[1]), table


def check_cache(found: Any, tensors: Tensors, begins: Any, ends: Any, chunk: int, right: int | None) -> None:
    q, k, v = tensors
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        wanted = by_definition(q[i], k[i, begin:end], v[i, begin:end], chunk, (None, right))
        close((found[0][i], found[1][i]), wanted)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 5, 6, 8, 12])
@pytest.mark.parametrize("page", [None, 1, 2, 4, 6, 12])
def test_cache(page: int | None, chunk: int, causal: bool, modules: PackedModules) -> None:
    """Pages that are no parts of a chunk are seen as smaller ones; keys may begin within them."""
    tensors, cache, table = cache_of(page, between=0 if page is None else page)
    lengths, right = (12, 3, 7), 0 if causal else None
    options: dict[str, Any] = {"cache_seqlens": torch.tensor(lengths).int(), "page_table": table, "causal": causal}
    options |= {"attention_chunk": chunk, "return_softmax_lse": True}
    found = fa3.flash_attn_with_kvcache(tensors[0], *cache, **options)
    check_cache(found, tensors, (0, 0, 0), lengths, chunk, right)
    if page is not None and chunk % page:
        asked = [family.page_rows for family, _, _ in modules.asked]
        assert asked and all(rows is not None and chunk % rows == 0 for rows in asked)
    begins = (2, 0, 5)
    found = fa3.flash_attn_with_kvcache(tensors[0], *cache, cache_leftpad=torch.tensor(begins).int(), **options)
    check_cache(found, tensors, begins, lengths, chunk, right)


def test_all_of_a_cache_and_queries_that_are_packed(modules: PackedModules) -> None:
    tensors, (k, v), _ = cache_of(None)
    q = tensors[0]
    options: dict[str, Any] = {"causal": True, "attention_chunk": 5, "return_softmax_lse": True}
    found = fa3.flash_attn_with_kvcache(q, k, v, **options)
    check_cache(found, tensors, (0, 0, 0), (12, 12, 12), 5, 0)
    begins = {"cu_seqlens_q": offsets([4, 4, 4]), "max_seqlen_q": 4}
    packed = fa3.flash_attn_with_kvcache(q.flatten(0, 1), k, v, **begins, **options)
    assert packed[0].view_as(q).equal(found[0]) and packed[1].equal(found[1].transpose(0, 1).flatten(1))
    chosen = torch.tensor([2, 0, 2]).int()
    found = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=9, cache_batch_idx=chosen, **options)
    check_cache(found, (q, k[chosen], v[chosen]), (0, 0, 0), (9, 9, 9), 5, 0)


def test_new_keys_are_appended_first(modules: PackedModules) -> None:
    tensors, cache, table = cache_of(4)
    q, k, v = (x.clone() for x in tensors)
    used = torch.tensor([8, 1, 5]).int()
    new = [x[:, :2].clone() for x in (v, k)]
    found = fa3.flash_attn_with_kvcache(
        *(q, *cache, *new),
        **{
            "cache_seqlens": used,
            "page_table": table,
            "causal": True,
            "attention_chunk": 3,
            "return_softmax_lse": True,
        },
    )
    for i, length in enumerate(used.tolist()):
        k[i, length : length + 2], v[i, length : length + 2] = new[0][i], new[1][i]
    check_cache(found, (q, k, v), (0, 0, 0), (10, 3, 7), 3, 0)


def test_pages_that_cannot_be_seen_as_smaller_ones(modules: PackedModules) -> None:
    tensors, cache, table = cache_of(6, between=1)
    with pytest.raises(
        NotImplementedError, match="pages of 6 keys are 7 rows apart and are to be seen as pages of 2, of"
    ):
        fa3.flash_attn_with_kvcache(
            tensors[0], *cache, page_table=table, cache_seqlens=9, causal=True, attention_chunk=4
        )
    assert modules.calls == []


# On the CPU model


@pytest.mark.parametrize("page", [None, 4, 16])
@pytest.mark.parametrize("seq_q", [1, 70])
def test_generated_modules_serve_chunks(seq_q: int, page: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the committed table: decoding steps, and a prompt of several chunks, of which one is cut short."""
    calls.stretches.clear()
    monkeypatch.setattr(calls, "module_at", lambda path: fa3gen.load(path.stem, on="cpu"))
    generator = torch.Generator().manual_seed(seq_q)
    q, k, v = (
        torch.randn(2, rows, heads, 128, generator=generator).bfloat16()
        for rows, heads in ((seq_q, 2), *[(160, 1)] * 2)
    )
    lengths, chunk = (90, 141), 48
    options: dict[str, Any] = {"cache_seqlens": torch.tensor(lengths).int(), "causal": True}
    cache: Any = (k, v)
    if page is not None:
        options["page_table"] = torch.randperm(2 * 160 // page, generator=generator).view(2, -1).int()
        order = options["page_table"].long().flatten().argsort()
        cache = [x.view(-1, page, *x.shape[2:])[order] for x in (k, v)]
    found = fa3.flash_attn_with_kvcache(q, *cache, attention_chunk=chunk, return_softmax_lse=True, **options)
    calls.stretches.clear()
    for i, length in enumerate(lengths):
        out, lse = by_definition(q[i], k[i, :length], v[i, :length], chunk, (None, 0))
        torch.testing.assert_close(found[0][i].float(), out, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(found[1][i], lse, rtol=1e-4, atol=1e-4)
