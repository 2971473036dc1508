"""Attention in chunks, `attention_chunk` of FlashAttention-3: packed sequences are cut where a chunk of keys ends.

The query at position p, where a sequence's last query is at the position of its last key, sees no keys but those of its
own chunk: `chunk` of them, from the multiple of `chunk` on that is p or the next one below (chunked attention of Llama
4). So the queries of a chunk and the keys of that chunk are a sequence of their own. Its last query is at the position
of its last key again, so that causal masks and windows mean in it what they meant before, and modules for packed
sequences serve it as any other.

All of it is plain torch: lengths stay on the device, the host waits for none of them, and a call that was captured in a
CUDA graph can be replayed with others. Of a sequence the host knows no more than that it has at most `max_seqlen_q`
queries; it is cut into as many sequences as these can touch chunks, of which some may have no query.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fa3gen.run.eight_bits import FACTORS
from fa3gen.run.kv_cache import KvCache


def attention_in_chunks(
    attention: Callable[..., Any],
    chunk: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    **options: Any,
) -> Any:
    """Call `attention`, which is `fa3gen.attention_packed` or takes the same, with the sequences cut into chunks.

    Returns what it returns: queries stay where they are, and so do O and LSE. Unlike there `max_seqlen_q` decides what
    is written: queries behind it can be in no chunk. Without it each sequence is cut as if it had all queries.

    Where pages are no parts of chunks, they are seen as smaller ones, of as many rows as divide both. Raises
    NotImplementedError where their strides do not allow that.
    """
    max_seqlen_q = max_seqlen_q if type(max_seqlen_q) is int else q.shape[0]
    page = None
    if page_table is not None:
        cache = KvCache(k, v, page_table).in_pages_of(_common(chunk, k.shape[1]))
        k, v, page_table, page = cache.k, cache.v, cache.table, cache.k.shape[1]
    arguments = in_chunks(
        *(chunk, cu_seqlens_q, cu_seqlens_k, max_seqlen_q),
        page_table=page_table,
        page=page,
        max_seqlen_k=max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
    )
    for name in FACTORS:
        factor = options.get(name)
        if factor is not None and factor.dim() > 1:  # of each sequence, which all of its chunks have
            options[name] = factor.repeat_interleave(chunks_touched(max_seqlen_q, chunk), dim=0)
    return attention(q, k, v, **arguments, **options)


def in_chunks(
    chunk: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    *,
    page_table: Tensor | None = None,
    page: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> dict[str, Any]:
    """Arguments of `fa3gen.attention_packed`, by name, that have it attend to sequences in chunks.

    It takes some 30 small kernels. Who calls it once for many layers passes what it returns to each of them; factors of
    sequences (`k_descale` and the like) then have to be those of the cut ones, `chunks_touched` for each there was.

    Args:
        chunk: Keys of a chunk, more than 0; where there are pages, a multiple of `page`.
        cu_seqlens_q, cu_seqlens_k, page_table, max_seqlen_k, seqused_q, seqused_k: As for `fa3gen.attention_packed`.
        max_seqlen_q: Most queries of a sequence.
        page: Keys of a page, where there is a page_table.
    """
    most = chunks_touched(max_seqlen_q, chunk)
    used_q = cu_seqlens_q.diff() if seqused_q is None else seqused_q
    if seqused_k is None:
        assert cu_seqlens_k is not None, "with pages lengths are given"
        seqused_k = cu_seqlens_k.diff()
    found = cut(cu_seqlens_q[:-1], cu_seqlens_q[-1:], used_q, seqused_k, chunk, most)
    arguments: dict[str, Any] = {"cu_seqlens_q": found.cu_seqlens_q}
    if page_table is None:
        assert cu_seqlens_k is not None
        begins = cu_seqlens_k[:-1].repeat_interleave(most) + found.begin_k
        arguments["cu_seqlens_k"] = torch.cat([begins, cu_seqlens_k[-1:]])
    else:
        assert page is not None
        arguments["page_table"] = _pages_of_chunks(page_table, found.number, chunk // page, most)
    return arguments | {
        "seqused_q": found.seqused_q,
        "seqused_k": found.seqused_k,
        "max_seqlen_q": min(max_seqlen_q, chunk),
        "max_seqlen_k": min(max_seqlen_k, chunk) if type(max_seqlen_k) is int else chunk,
    }


class Cut(NamedTuple):
    """Sequences that were cut, `most` for each one there was; (sequences,) but for `cu_seqlens_q`."""

    cu_seqlens_q: Tensor  # (sequences + 1,) int32, in the q of before
    seqused_q: Tensor  # int32
    number: Tensor  # int64, of the chunk in its sequence; below 0 where there are more queries than keys
    begin_k: Tensor  # int32, of the chunk's first key in its sequence
    seqused_k: Tensor  # int32; 0 where there is no query


def chunks_touched(queries: int, chunk: int) -> int:
    """How many chunks as many queries, one behind the other, touch at most: at least one, for the modules' sake."""
    return max(1, (queries + chunk - 2) // chunk + 1)


def cut(first_q: Tensor, end_q: Tensor, used_q: Tensor, used_k: Tensor, chunk: int, most: int) -> Cut:
    """Cut sequences at the multiples of `chunk` keys, each into `most` sequences.

    Args:
        first_q: (sequences,) int32, the first query of each sequence.
        end_q: (1,) int32, where the queries of the last one end.
        used_q, used_k: (sequences,) int32, queries and keys of each.
    """
    first = used_k.long() - used_q  # the position of the first query
    numbers = first.div(chunk, rounding_mode="floor")[:, None] + torch.arange(most + 1, device=first.device)
    edges = numbers * chunk  # the positions where chunks begin, and where the last one ends
    rows = torch.minimum((edges - first[:, None]).clamp(min=0), used_q[:, None])
    keys = torch.minimum(edges.clamp(min=0), used_k[:, None])
    used = rows.diff()
    begins = (first_q[:, None] + rows[:, :-1]).flatten().int()
    return Cut(
        cu_seqlens_q=torch.cat([begins, end_q]),
        seqused_q=used.flatten().int(),
        number=numbers[:, :-1].flatten(),
        begin_k=keys[:, :-1].flatten().int(),
        seqused_k=torch.where(used > 0, keys.diff(), 0).flatten().int(),
    )


def _pages_of_chunks(table: Tensor, number: Tensor, of_chunk: int, most: int) -> Tensor:
    """The pages of the chunks with these numbers, (sequences, pages of a chunk) int32, `most` of each sequence."""
    pages = table.shape[1]
    place = (number * of_chunk)[:, None] + torch.arange(min(of_chunk, pages), device=number.device)
    return table.repeat_interleave(most, dim=0).gather(1, place.clamp(0, max(0, pages - 1)))


def _common(a: int, b: int) -> int:
    """The largest number that divides both: math.gcd, which torch.compile does not follow with sizes that may vary."""
    while b:
        a, b = b, a % b
    return a
