"""Caches of keys and values as modules read them, and new rows written to them, against loops in Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from packed_modules import offsets
from torch._subclasses.fake_tensor import FakeTensorMode

from fa3gen.run import checks
from fa3gen.run.kv_cache import KvCache

HEADS, DIM, DIM_V = 2, 8, 4


def lengths_of(*lengths: int) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32)


def made(*rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v, whose head dims differ."""
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn((*rows, HEADS, d), generator=generator).bfloat16() for d in (DIM, DIM_V))
    return k, v


@dataclass
class Appending:
    """A cache, and new rows to append: of so many for each sequence."""

    cache: tuple[torch.Tensor, torch.Tensor]
    lengths: Sequence[int]
    new: Sequence[int]
    page_table: torch.Tensor | None = None
    batch_idx: torch.Tensor | None = None
    packed: bool = True

    def __post_init__(self) -> None:
        rows = (sum(self.new),) if self.packed else (len(self.new), self.new[0])
        self.k, self.v = made(*rows, seed=1)

    def run(self) -> torch.Tensor:
        cache = KvCache.of(*self.cache, self.page_table, self.batch_idx)
        return cache.append(self.k, self.v, lengths_of(*self.lengths), offsets(self.new) if self.packed else None)

    def expected(self) -> tuple[list[torch.Tensor], list[int]]:
        """The cache afterwards and the lengths, row by row."""
        caches = [x.clone() for x in self.cache]
        pages, size = caches[0].shape[:2]
        named = torch.arange(len(self.lengths)) if self.batch_idx is None else self.batch_idx
        table = torch.arange(pages)[:, None] if self.page_table is None else self.page_table
        table = table[named.long()]
        new = [x if self.packed else x.flatten(0, 1) for x in (self.k, self.v)]
        token, counted = 0, []
        for sequence, (length, rows) in enumerate(zip(self.lengths, self.new, strict=True)):
            for place in range(length, length + rows):
                if 0 <= place < table.shape[1] * size and 0 <= (page := int(table[sequence, place // size])) < pages:
                    for cache, rows_of_it in zip(caches, new, strict=True):
                        cache[page, place % size] = rows_of_it[token]
                token += 1
            counted.append(min(max(length + rows, 0), table.shape[1] * size))
        return caches, counted

    def check(self) -> None:
        wanted, counted = self.expected()
        assert self.run().tolist() == counted
        for name, found, cache in zip("kv", self.cache, wanted, strict=True):
            torch.testing.assert_close(found, cache, rtol=0, atol=0, equal_nan=True, msg=f"{name}_cache")


TABLE = torch.tensor([[4, 1, 0], [2, 7, 5], [3, 8, 6]], dtype=torch.int32)


def cases() -> Iterator[tuple[str, Appending]]:
    yield "contiguous", Appending(made(3, 9), [0, 4, 7], [2, 2, 2], packed=False)
    yield "packed", Appending(made(3, 9), [0, 4, 7], [3, 1, 2])
    yield "none of some", Appending(made(4, 9), [1, 4, 7, 0], [0, 3, 0, 2])
    yield "none of the last", Appending(made(3, 9), [1, 4, 7], [2, 0, 0])
    yield "none", Appending(made(2, 9), [1, 4], [0, 0])
    yield "no sequence", Appending(made(0, 9), [], [])
    yield "full", Appending(made(3, 9), [8, 9, 3], [3, 2, 1])
    yield "all full", Appending(made(2, 9), [9, 30], [3, 2])
    yield "negative", Appending(made(2, 9), [-2, -9], [4, 2])
    yield "largest", Appending(made(2, 9), [2**31 - 3, 0], [4, 2])
    yield "pages", Appending(made(9, 4), [0, 3, 11], [6, 9, 1], TABLE)
    yield "pages, equally many", Appending(made(9, 4), [1, 3, 7], [5, 5, 5], TABLE, packed=False)
    yield "pages of one", Appending(made(9, 1), [0, 1, 2], [3, 2, 1], TABLE)
    yield "pages, full", Appending(made(9, 4), [10, 12, 11], [6, 1, 2], TABLE)
    wild = TABLE.clone()
    wild[0, 1], wild[1, 2], wild[2, 0] = -1, 9, 2**31 - 1
    yield "pages that are none", Appending(made(9, 4), [3, 3, 5], [6, 9, 1], wild)
    yield "nothing but pages that are none", Appending(made(9, 4), [0, 0, 0], [2, 1, 1], TABLE + 9)
    chosen = lengths_of(4, 0, 3)
    yield "chosen", Appending(made(6, 9), [1, 4, 8], [2, 3, 4], batch_idx=chosen)
    yield "pages, chosen", Appending(made(9, 4), [5, 0], [6, 3], TABLE, batch_idx=lengths_of(2, 0))
    side_by_side = torch.cat(made(3, 9), dim=-1).split((DIM, DIM_V), dim=-1)
    yield "side by side", Appending(side_by_side, [0, 4, 7], [3, 1, 2])  # type: ignore[arg-type]
    k, v = (x.transpose(0, 1) for x in made(9, 3))
    yield "by row, then sequence", Appending((k, v), [0, 4, 7], [3, 1, 2])
    nan = tuple(torch.full_like(x, torch.nan) for x in made(3, 9))
    yield "NaN in the cache", Appending(nan, [9, 4, 9], [3, 1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [case for _, case in cases()], ids=[name for name, _ in cases()])
def test_new_rows_are_appended(case: Appending) -> None:
    case.check()


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_written_is_bit_for_bit_the_new_row(packed: bool) -> None:
    """NaN and infinity too, which any product with a mask would spread."""
    case = Appending(made(2, 9), [3, 8], [2, 2], packed=packed)
    case.k[..., 0, 0], case.v[..., 1] = torch.nan, -torch.inf
    case.check()
    assert case.cache[0].isnan().sum() == 3 and case.cache[1].isinf().sum() == 3 * HEADS  # of 4 rows, 3 have a place


@pytest.mark.parametrize("begins", [[0, 3, 2, 5], [5, 2, 0, 4], [-3, 1, 2, 3], [2, 3, 4, 9], [9, 9, 9, 9]])
def test_offsets_that_lie_write_nothing_outside_their_places(begins: list[int]) -> None:
    """Rows are written where some sequence has them, and behind its keys only."""
    cache, (k, v) = made(3, 9), made(5, seed=1)
    before = [x.clone() for x in cache]
    used = [4, 2, 6]
    KvCache.of(*cache, None, None).append(k, v, lengths_of(*used), lengths_of(*begins))
    for x, old in zip(cache, before, strict=True):
        for sequence, length in enumerate(used):
            assert x[sequence, :length].equal(old[sequence, :length])


def test_rows_before_the_first_and_behind_the_last_sequence_are_not_written() -> None:
    (k_cache, v_cache), (k, v) = made(2, 9), made(6, seed=1)
    wanted = k_cache.clone()
    wanted[0, 4:6], wanted[1, 2] = k[1:3], k[3]
    used = KvCache.of(k_cache, v_cache, None, None).append(k, v, lengths_of(4, 2), lengths_of(1, 3, 4))
    assert k_cache.equal(wanted) and used.tolist() == [6, 3]


def test_rows_that_share_a_place_leave_one_of_them() -> None:
    cache = made(4, 9)
    chosen = Appending(cache, [3, 3], [1, 1], batch_idx=lengths_of(2, 2))
    assert chosen.run().tolist() == [4, 4]
    assert any(cache[0][2, 3].equal(row) for row in chosen.k)
    assert cache[0][1].equal(made(4, 9)[0][1])


@pytest.mark.parametrize("checking", [False, True])
def test_the_host_waits_for_nothing(checking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: whatever asks for one raises, and checks do not ask for those."""
    monkeypatch.setattr(checks, "CHECKING", checking)
    with FakeTensorMode():
        table, idx = torch.empty(6, 3, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
        for offset in (None, torch.empty(4, dtype=torch.int32)):
            new = made(3, 2) if offset is None else made(7)
            cache = KvCache.of(*made(9, 4), table, idx)
            lengths = cache.append(*new, idx, offset)
            assert lengths.shape == (3,) and lengths.dtype == torch.int32
            pages, rows, used = cache.as_pages(lengths, idx)
            assert rows.shape == (3, 12) and pages[1].shape == (36, 1, HEADS, DIM_V) and used.dtype == torch.int32


@pytest.mark.parametrize("checking", [False, True])
def test_it_is_compiled_in_one_graph(checking: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where $FA3GEN_CHECK asks for checks: numbers cannot be looked at before there are any."""
    monkeypatch.setattr(checks, "CHECKING", checking)

    def model(k_cache: torch.Tensor, v_cache: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *table, k, v, lengths, begins = rest
        return KvCache.of(k_cache, v_cache, *(table or (None,)), None).append(k, v, lengths, begins)

    for case in (Appending(made(3, 9), [0, 4, 8], [3, 1, 2]), Appending(made(9, 4), [0, 3, 11], [6, 9, 1], TABLE)):
        wanted, counted = case.expected()
        table = () if case.page_table is None else (case.page_table,)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        found = compiled(*case.cache, *table, case.k, case.v, lengths_of(*case.lengths), offsets(case.new))
        assert found.tolist() == counted
        assert all(x.equal(y) for x, y in zip(case.cache, wanted, strict=True))
    torch._dynamo.reset()


def test_what_does_not_fit_is_refused() -> None:
    cache, (k, v), used = KvCache.of(*made(3, 9), None, None), made(3, 2), lengths_of(1, 2, 3)
    arguments = {"k": k, "v": v, "lengths": used, "offsets": None}
    for changes, message in (
        ({"k": k.half()}, "k has dtype torch.float16, and k_cache torch.bfloat16; they need the same"),
        ({"v": v[:, :1]}, r"v has shape \(3, 1, 2, 4\); it needs to be \(3, 2, 2, 4\), \(batch, new, heads, head dim"),
        ({"k": k[0]}, r"k has shape \(2, 2, 8\); it needs to be \(batch, new, heads, head dim\)"),
        ({"offsets": used}, r"k has shape \(3, 2, 2, 8\); it needs to be \(total_new, heads, head dim\)"),
        ({"k": k[0], "v": v[0], "offsets": used}, r"cu_seqlens_k_new has shape \(3,\); it needs to be \(4,\)"),
        ({"lengths": used[:2], "k": k[:2], "v": v[:2]}, "has 2 lengths, and there are 3 sequences in the cache"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            cache.append(**{**arguments, **changes})  # type: ignore[arg-type]
    k, v = made(3, 9)
    for arguments_of, message in (
        ((k, v[:, :8], None, None), r"k_cache has shape \(3, 9, 2, 8\), v_cache \(3, 8, 2, 4\); they may only differ"),
        ((k[0], v[0], None, None), r"k_cache has shape \(9, 2, 8\); it needs to be \(sequences or pages, rows, heads"),
        ((k, v, used, None), r"page_table has shape \(3,\); it needs to be \(batch, max_pages\)"),
        ((k, v, None, used[:, None]), r"cache_batch_idx has shape \(3, 1\); it needs to be \(batch\)"),
        (
            (k.transpose(1, 3), v.transpose(1, 3), None, None),
            "need a contiguous last dimension, .*: allocate them with the head dim last",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            KvCache.of(*arguments_of)  # type: ignore[arg-type]


# As modules read them


def gathered(pages: torch.Tensor, table: torch.Tensor, sequence: int, rows: slice) -> torch.Tensor:
    return pages[table[sequence].long()].flatten(0, 1)[rows]


@pytest.mark.parametrize("wide", [False, True], ids=["dense", "with rows between pages"])
def test_keys_that_begin_within_a_page_have_a_page_for_each_row(wide: bool) -> None:
    k, v = (x[:, :4] for x in made(9, 7 if wide else 4))
    wild = TABLE.clone()
    wild[0, 2], wild[1, 2] = -5, 2**31 - 1  # which no length reaches
    used, pad = lengths_of(7, 8, 12), lengths_of(3, 0, 6)
    cache = KvCache.of(k, v, wild, None)
    assert cache.as_pages(used, None) == ((k, v), wild, used)
    (k_rows, v_rows), table, left = cache.as_pages(used, pad)
    assert left.tolist() == [4, 8, 6] and table.dtype == torch.int32 and k_rows.shape[1] == 1
    assert k_rows.data_ptr() == k.data_ptr() and v_rows.data_ptr() == v.data_ptr()
    for i in range(3):
        rows = slice(int(pad[i]), int(used[i]))
        for pages, own in ((k, k_rows), (v, v_rows)):
            assert gathered(own, table, i, slice(int(left[i]))).equal(gathered(pages, TABLE, i, rows))
    assert table.min() >= 0 and table.max() < len(k_rows)


def test_caches_whose_sequences_are_no_rows_of_one_tensor_are_pages() -> None:
    for k, v in (
        [x.transpose(0, 1) for x in made(9, 3)],  # by row, then sequence
        [made(3, 9)[0], made(3, 18)[1][:, :9]],  # not equally far apart
    ):
        cache = KvCache.of(k, v, None, None)
        assert cache.table is not None and cache.table.tolist() == [[0], [1], [2]] and cache.room == 9
        with pytest.raises(NotImplementedError, match=r"are no rows of one tensor.*pass no cache_leftpad"):
            cache.as_pages(lengths_of(1, 2, 3), lengths_of(0, 1, 2))
    assert KvCache.of(*made(3, 9), None, None).table is None
