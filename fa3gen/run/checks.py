"""Offsets, lengths and tables that lie, which the host sees only by waiting: read where $FA3GEN_CHECK asks for it.

They lie on the GPU, where the modules clamp them to the tensors and tell nobody. With FA3GEN_CHECK=1, set before fa3gen
is imported, each call of packed sequences, pages or caches reads them first, which makes the host wait, and raises an
ArgumentError that names sequence, value and limit. In the capture of a CUDA graph nothing can be read: such calls are
not checked, and a Caution says so. Of calls that torch.compile made, the operators check when they run; where new keys
of a cache go is not checked then. The CPU model (`fa3gen.load(stem, on="cpu")`) checks without being asked.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from itertools import chain, islice, pairwise
from typing import Any

import torch
from torch import Tensor

from fa3gen.base.errors import Caution
from fa3gen.base.switches import turned_on
from fa3gen.run.dispatch import ArgumentError

CHECK_VARIABLE = "FA3GEN_CHECK"
# A module constant, so that calls that are not checked lose no time.
CHECKING = turned_on(CHECK_VARIABLE)

SHOWN = 8  # faults of one call that a message names


def check_sequences(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor,
    *,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    longest: tuple[Any, Any] = (None, None),
) -> None:
    """Raise ArgumentError where sequences of `fa3gen.attention_packed` do not lie in the tensors, one behind the other.

    With a page table k is (pages, page, heads, d). `longest` are max_seqlen_q and max_seqlen_k, which are looked at
    where they are numbers. What has a wrong shape or is no tensor is left to the module to refuse.
    """
    longest_q, longest_k = longest
    of_q = _faults_of_sequences("q", q, cu_seqlens_q, seqused_q, longest_q)
    if page_table is None:
        of_k = _faults_of_sequences("k", k, cu_seqlens_k, seqused_k, longest_k)
    else:
        of_k = _faults_of_pages(k, page_table, seqused_k, longest_k)
    _raise_first(chain(of_q, of_k))


def check_pages(k_pages: Tensor, page_table: Tensor, seqused_k: Tensor) -> None:
    """The same of keys in pages alone: k_pages (pages, page, heads, d), page_table (batch, max_pages)."""
    _raise_first(_faults_of_pages(k_pages, page_table, seqused_k, None))


def check_new(k: Tensor, cu_seqlens_k_new: Tensor, cache_seqlens: Tensor, room: int) -> None:
    """Raise ArgumentError where new keys, k (total_new, heads, d), do not fit into a cache of so much room behind
    `cache_seqlens`."""
    faults = list(_faults_of_sequences("k_new", k, cu_seqlens_k_new, None, None))
    begins = _read(cu_seqlens_k_new)
    for number, (length, (begin, end)) in enumerate(zip(_read(cache_seqlens), pairwise(begins), strict=False)):
        if not 0 <= length <= room - max(0, end - begin):
            faults.append(
                f"cache_seqlens[{number}] = {length}, with {end - begin} new keys behind; the cache has room for {room}"
            )
    _raise_first(faults)


def check_numbers(name: str, numbers: Tensor, limit: int, what: str) -> None:
    """Raise ArgumentError where numbers of things, of which there are so many, name none."""
    _raise_first(
        f"{name}[{i}] = {number}, and there are {limit} {what}"
        for i, number in enumerate(_read(numbers))
        if not 0 <= number < limit
    )


def _faults_of_sequences(side: str, x: Tensor, offsets: Any, used: Any, longest: Any) -> Iterator[str]:
    """What is wrong with the sequences of packed rows; `side` is q or k, as arguments are called."""
    lengths = None if used is None else _read(used)
    for number, (begin, end) in enumerate(pairwise(_read(offsets))):
        rows = max(0, end - begin)
        if end < begin:
            yield f"cu_seqlens_{side}[{number + 1}] = {end} is less than cu_seqlens_{side}[{number}] = {begin}"
        if lengths is not None and number < len(lengths):
            if not 0 <= lengths[number] <= rows:
                yield f"seqused_{side}[{number}] = {lengths[number]}, and sequence {number} has {rows} rows of {side}"
            rows = max(0, lengths[number])
        if rows and not 0 <= begin <= x.shape[0] - rows:
            yield f"sequence {number} has rows {begin} to {begin + rows - 1} of {side}, which has {x.shape[0]}"
        if type(longest) is int and rows > longest:
            yield f"sequence {number} has {rows} rows of {side}, and max_seqlen_{side} is {longest}"


def _faults_of_pages(k_pages: Tensor, table: Tensor, used: Any, longest: Any) -> Iterator[str]:
    """What is wrong with lengths of keys in pages, and with the entries of the table that they reach."""
    pages, page = k_pages.shape[:2]
    for number, (length, entries) in enumerate(zip(_read(used), _read(table), strict=False)):
        room = len(entries) * page
        if not 0 <= length <= room:
            yield f"seqused_k[{number}] = {length}; page_table has {len(entries)} pages of {page}, room for {room} keys"
        if type(longest) is int and length > longest:
            yield f"sequence {number} has {length} keys, and max_seqlen_k is {longest}"
        reached = -(-min(max(length, 0), room) // (page or 1))
        for i, entry in enumerate(entries[:reached]):
            if not 0 <= entry < pages:
                yield (
                    f"page_table[{number}, {i}] = {entry}, and there are {pages} pages; sequence {number} with its "
                    f"{length} keys uses {reached}"
                )


def _read(x: Any) -> list[Any]:
    """The values of a tensor, for which the host waits; nothing of what is none, nor of one under capture."""
    if not isinstance(x, Tensor) or x.ndim not in (1, 2):
        return []
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        text = f"${CHECK_VARIABLE} is set, but nothing can be read while a CUDA graph is captured: this is not checked"
        warnings.warn(text, Caution, stacklevel=1)  # of this line, so that it is said once
        return []
    values: list[Any] = x.tolist()
    return values


def _raise_first(faults: Iterable[str]) -> None:
    """Raise ArgumentError with the first of the faults, if there are any."""
    faults = iter(faults)
    shown = list(islice(faults, SHOWN))
    if shown:
        more = sum(1 for _ in faults)
        lines = [*shown, *([f"and {more} more"] if more else [])]
        raise ArgumentError(
            "offsets, lengths or tables lie; a module would clamp them to its tensors, and compute what is of no use:"
            + "".join(f"\n  {line}" for line in lines)
        )
