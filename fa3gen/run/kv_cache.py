"""A cache of keys and values, contiguous or in pages: as rows that a module can read, and with new ones written to it.

All of it is plain torch. Lengths, offsets and tables lie on the device, and the host waits for none of them, so that
every call can be captured in a CUDA graph and be replayed with others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fa3gen.run import calls, checks
from fa3gen.run.dispatch import ArgumentError
from fa3gen.run.equal_lengths import even_offsets

Pair = tuple[Tensor, Tensor]  # of k and v


@dataclass(frozen=True)
class KvCache:
    """Keys and values of sequences: (sequences, rows, heads, head dim), or pages of them where there is a table.

    `table` is (batch, max_pages) int32. Without one, sequence i of a batch is sequence i of the cache.
    """

    k: Tensor
    v: Tensor
    table: Tensor | None = None

    @classmethod
    def of(cls, k: Tensor, v: Tensor, page_table: Tensor | None, batch_idx: Tensor | None) -> KvCache:
        """A cache whose sequences may be named by `batch_idx`, (batch,) int32: rows of the table, or of the cache.

        A sequence of a contiguous cache is then a page; so it is where sequences are no rows of one tensor. Raises
        ArgumentError where they do not go together.
        """
        calls.check_tensors({"k_cache": k, "v_cache": v}, "(sequences or pages, rows, heads, head dim)")
        if page_table is not None:
            calls.check_tensors({"page_table": page_table}, "(batch, max_pages)")
        if batch_idx is not None:
            calls.check_tensors({"cache_batch_idx": batch_idx}, "(batch)")
        if k.stride(-1) != 1 or v.stride(-1) != 1:
            raise ArgumentError(
                f"k_cache has strides {k.stride()}, v_cache {v.stride()}; both need a contiguous last dimension, "
                "since a copy would not be the cache: allocate them with the head dim last"
            )
        if k.shape[:3] != v.shape[:3]:
            raise ArgumentError(
                f"k_cache has shape {tuple(k.shape)}, v_cache {tuple(v.shape)}; they may only differ in the head dim"
            )
        if batch_idx is None:
            if page_table is None and _rows_apart(k, v) is None:
                page_table = torch.arange(k.shape[0], dtype=torch.int32, device=k.device)[:, None]
            return cls(k, v, page_table)
        if _are_checked():
            sequences, what = (k, "sequences in k_cache") if page_table is None else (page_table, "rows of page_table")
            checks.check_numbers("cache_batch_idx", batch_idx, sequences.shape[0], what)
        if page_table is None:
            if batch_idx.dtype != torch.int32:
                raise ArgumentError(f"cache_batch_idx has dtype {batch_idx.dtype}; it needs to be {torch.int32}")
            return cls(k, v, batch_idx[:, None])
        inside = batch_idx.clamp(0, page_table.shape[0] - 1)  # a number that lies would stop the GPU
        return cls(k, v, page_table.index_select(0, inside))

    @property
    def room(self) -> int:
        """How many keys a sequence can have."""
        return int(self.k.shape[1] * (1 if self.table is None else self.table.shape[1]))

    # Writing

    def append(self, k: Tensor, v: Tensor, lengths: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Write new keys and values behind those that there are; return how many there are then, (batch,) int32.

        What falls outside of the cache is not written and not counted. Where two of them have the same place, either
        is what is found there.

        Args:
            k, v: (batch, new, heads, head dim), or (total_new, heads, head dim) with offsets.
            lengths: (batch,) int32, how many keys there are, counted from a sequence's first row.
            offsets: (batch + 1,) int32, where the sequences' new rows begin, and where those of the last one end.
        """
        self._check_new(k, v, lengths, offsets)
        if offsets is None:
            offsets = even_offsets(k.shape[0], k.shape[1], k)
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        if _are_checked():
            checks.check_new(k, offsets, lengths, self.room)
        if k.shape[0] and lengths.shape[0] and self.k.shape[0] and self.room:
            page, row, source, any_valid = self._places(k.shape[0], lengths, offsets)
            for cache, new in ((self.k, k), (self.v, v)):
                cache[page, row] = torch.where(any_valid, new[source], cache[page, row])
        return (lengths.clamp(max=self.room) + offsets.diff()).clamp(0, self.room)

    def _check_new(self, k: Tensor, v: Tensor, lengths: Tensor, offsets: Tensor | None) -> None:
        """Raise ArgumentError, TypeError for new keys and values that do not fit the cache."""
        batch = lengths.shape[0]
        dimensions = "(batch, new, heads, head dim)" if offsets is None else "(total_new, heads, head dim)"
        calls.check_tensors({"k": k, "v": v}, dimensions)
        rows = (batch, k.shape[1]) if offsets is None else (k.shape[0],)
        for name, new, cache in (("k", k, self.k), ("v", v, self.v)):
            if new.dtype != cache.dtype:
                raise TypeError(f"{name} has dtype {new.dtype}, and {name}_cache {cache.dtype}; they need the same")
            needed = (*rows, *cache.shape[2:])
            if new.shape != needed:
                raise ArgumentError(f"{name} has shape {tuple(new.shape)}; it needs to be {needed}, {dimensions}")
        if offsets is not None and offsets.shape != (batch + 1,):
            raise ArgumentError(f"cu_seqlens_k_new has shape {tuple(offsets.shape)}; it needs to be {(batch + 1,)}")
        sequences = self.k.shape[0] if self.table is None else self.table.shape[0]
        if sequences != batch:
            raise ArgumentError(
                f"cache_seqlens has {batch} lengths, and there are {sequences} sequences in the cache; they need to be "
                "as many"
            )

    def _places(self, rows: int, lengths: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Where new rows go: page, row in it, and which new row is written there; and whether any is valid.

        There is no writing to some places only without counting them, for which the host would have to wait. So a row
        that is not to be written stands in for one that is: it writes the same to the same place. Where none is, all
        write what a place holds already.
        """
        new = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
        # The last sequence that begins there or before: those without new rows begin where the next one does.
        found = torch.searchsorted(offsets, new, right=True) - 1
        sequence = found.clamp(0, lengths.shape[0] - 1)
        begin, end = offsets[sequence], offsets[sequence + 1]
        place = lengths[sequence] + (new - begin)  # negative where it is beyond 31 bits
        page, row = self._find(sequence, place)
        valid = (begin <= new) & (new < end) & (place >= 0) & (place < self.room)
        valid &= (page >= 0) & (page < self.k.shape[0])
        source = torch.where(valid, new, valid.int().argmax())
        return page[source].clamp(0, self.k.shape[0] - 1), row[source], source, valid.any()

    def _find(self, sequence: Tensor, place: Tensor) -> Pair:
        """The page that keys at these places of sequences lie in, whatever the table says, and the rows in it."""
        page, rows = place // self.k.shape[1], place % self.k.shape[1]
        if self.table is None:
            return sequence, rows
        return self.table[sequence, page.clamp(0, self.table.shape[1] - 1)].long(), rows

    # Reading

    def as_packed(self, lengths: Tensor, leftpad: Tensor | None) -> tuple[Pair, Tensor, Tensor]:
        """A cache without a table as packed k and v, where its sequences begin, and how many keys of each there are.

        `leftpad`, (batch,) int32: keys begin so many rows behind the first one.
        """
        rows, apart = self._as_rows()
        begins = even_offsets(self.k.shape[0], apart, self.k)
        if leftpad is None:
            return rows, begins, lengths
        return rows, begins + torch.nn.functional.pad(leftpad, (0, 1)), lengths - leftpad

    def as_pages(self, lengths: Tensor, leftpad: Tensor | None) -> tuple[Pair, Tensor, Tensor]:
        """Of a cache with a table: pages of k and v, a table of these, and how many keys of each sequence there are.

        Where keys begin within a page, by `leftpad`, each row is a page of its own.
        """
        assert self.table is not None
        if leftpad is None:
            return (self.k, self.v), self.table, lengths
        if _are_checked():  # a module sees rows, and none that is outside
            checks.check_pages(self.k, self.table, lengths)
        (k, v), apart = self._as_rows()
        sequence = torch.arange(self.table.shape[0], device=leftpad.device)[:, None]
        place = leftpad.long()[:, None] + torch.arange(self.room, device=leftpad.device)
        page, row = self._find(sequence, place)
        rows = page.clamp(0, max(0, self.k.shape[0] - 1)) * apart + row
        return (k.unsqueeze(1), v.unsqueeze(1)), rows.int(), lengths - leftpad

    def in_pages_of(self, rows: int) -> KvCache:
        """The same cache with a table, in pages of so many rows, which divide those that it has."""
        assert self.table is not None
        if rows == self.k.shape[1]:
            return self
        (k, v), apart = self._as_rows()
        if apart % rows:
            raise NotImplementedError(
                f"pages of {self.k.shape[1]} keys are {apart} rows apart and are to be seen as pages of {rows}, of "
                f"which that is no multiple; pass pages that are a multiple of {rows} rows apart"
            )
        smaller = torch.arange(self.k.shape[1] // rows, dtype=torch.int32, device=self.table.device)
        table = self.table[..., None] * (apart // rows) + smaller
        k, v = (x.view(-1, rows, *x.shape[1:]) for x in (k, v))
        return KvCache(k, v, table.flatten(1))

    def _as_rows(self) -> tuple[Pair, int]:
        """All rows of k and of v one behind the other, and how many of them the first ones of sequences are apart."""
        apart = _rows_apart(self.k, self.v)
        if apart is None:
            raise NotImplementedError(
                f"k_cache has strides {self.k.stride()} and v_cache {self.v.stride()}, by which their sequences or "
                "pages are no rows of one tensor, equally many apart; pass k_cache.contiguous() and "
                "v_cache.contiguous(), or pass no cache_leftpad"
            )
        total = max(0, (self.k.shape[0] - 1) * apart + self.k.shape[1])
        k, v = (x.as_strided((total, *x.shape[2:]), x.stride()[1:]) for x in (self.k, self.v))
        return (k, v), apart


def _are_checked() -> bool:
    """Whether lengths and tables are looked at; those of a model that is being traced have no values yet."""
    return checks.CHECKING and not is_dynamo_compiling() and not calls.dispatch_modes()


def _rows_apart(k: Tensor, v: Tensor) -> int | None:
    """How many rows behind a sequence's first one the next one's is, if that is a number, and the same of both."""
    sequences, rows = k.shape[:2]
    if sequences < 2:
        return int(rows)
    # Not by divmod, which torch.compile does not follow with sizes that may vary.
    found = [(x.stride(0) // x.stride(1), x.stride(0) % x.stride(1)) if x.stride(1) else (0, 0) for x in (k, v)]
    apart = found[0][0]
    return apart if found == [(apart, 0)] * 2 and apart >= rows else None
