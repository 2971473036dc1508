"""Mutations of kernels with K and V in pages: which page, which rows, and what is not there. See `mutations.py`."""

from __future__ import annotations

from functools import partial

from mutations_packed import PackedMutation

BOXES, ROWS = "fwd_paged_d64_causal", "fwd_paged_rows_d64_causal"
_of_boxes, _of_rows = partial(PackedMutation, stem=BOXES), partial(PackedMutation, stem=ROWS)

PAGED = [
    _of_boxes(
        "boxes not clipped where a sequence ends",
        "what stands in its last page behind the last key is taken for keys and values",
        "rows = cutlass.min(cutlass.max(work.seq_k - key, 0), BOX_ROWS)",
        "rows = BOX_ROWS if work.seq_k > key else 0",
        "ragged",
        ("O has NaN",),
    ),
    _of_boxes(
        "every box from the first row of its page",
        "a page that holds more than one gives the first one again",
        "(row + rows) * row_step",
        "rows * row_step",
        "wrap",
        ("O ",),
    ),
    _of_boxes(
        "the table of the first sequence for all",
        "other sequences see its keys",
        "page_table[work.sequence, number]",
        "page_table[0, number]",
        "ragged",
        ("O ",),
    ),
    _of_boxes(
        "boxes of more tiles than lanes find at once",
        "the tile after these has keys of one of them again",
        "if lane == TILES_FOUND * BOXES and",
        "if lane == 2 * TILES_FOUND * BOXES and",
        "wrap",
        ("O ",),
        head_dim=None,  # a small tile has so few boxes that lanes find those of all
    ),
    _of_boxes(
        "a head's keys for all heads",
        "heads of k see the first one's",
        "work.head_kv * head_step + ",
        "",
        "decode",
        ("O ",),
    ),
    _of_boxes(
        "lengths not held against the table",
        "a length that lies makes the kernel read the table of the next sequence, or behind all",
        "seq_k = cutlass.min(cutlass.max(seqused_k[sequence], 0), most_keys)",
        "seq_k = cutlass.min(cutlass.max(seqused_k[sequence], 0), 2 * most_keys)",
        "lying",
        ("O is off by",),
    ),
    _of_rows(
        "rows copied that are not there",
        "pages that no table names are read",
        "exists[0, 0] = place >= 0",
        "exists[0, 0] = place >= -1",
        "ragged",
        ("out of bounds",),
    ),
    _of_rows(
        "pages behind the last one",
        "a table that lies leads out of the tensor",
        "place if 0 <= page and page < num_pages else cutlass.Int64(-1)",
        "place if 0 <= page else cutlass.Int64(-1)",
        "lying",
        ("out of bounds",),
    ),
    _of_rows(
        "no swizzle",
        "a product reads the units of a row where the swizzle has them",
        "units[None, unit ^ row_of_lane,",
        "units[None, unit,",
        "ragged",
        ("O ",),
    ),
    _of_rows(
        "no fence between cp.async and wgmma",
        "the async proxy need not see what the generic one has written",
        'cute.arch.fence_proxy("async.shared", space="cta")  # cp.async wrote',
        "cute.arch.sync_warp()  # cp.async wrote",
        "ragged",
        ("proxy",),
    ),
    _of_rows(
        "a stage said to be full before it is",
        "products read what has not landed",
        "cp_async_wait_group(0)",
        "cp_async_wait_group(1)",
        "ragged",
        ("used before its load was awaited",),
    ),
]
