"""Pages of any size on the CPU model: the host makes numbers of a page's size by which the device divides."""

from __future__ import annotations

import pytest
import torch
from hosting import module
from packed_modules import into_pages, offsets, packed_attention
from rendering import spec_of

from fa3gen.design import tile_order

torch.set_num_threads(1)  # the workers of xdist share the cores
LENGTHS_K, HEADS = (300, 130), (2, 1)

# One row, powers of two, others, and more rows than a sequence has keys.
BOXES, ROWS = (16, 32, 48, 112, 512), (1, 2, 3, 7, 64, 100, 301)
STEMS = {
    "fwd_paged_d64_causal": BOXES,
    "fwd_paged_decode_d64_causal": BOXES,
    "fwd_paged_rows_d64_causal": ROWS,
    "fwd_paged_decode_rows_d64_causal": ROWS,
}


@pytest.mark.parametrize("stem", STEMS)
def test_all_sizes_of_pages_give_the_same_bits(stem: str) -> None:
    generator, (heads_q, heads_kv), spec = torch.Generator().manual_seed(7), HEADS, spec_of(stem)
    # Two tiles of queries of the first sequence, the second one cut short; of the other one, or two of few queries.
    lengths_q = tile_order.positions(spec) + 2, 5
    q = torch.randn(sum(lengths_q), heads_q, spec.problem.head_dim, generator=generator).bfloat16()
    k, v = (torch.randn(sum(LENGTHS_K), heads_kv, q.shape[2], generator=generator).bfloat16() for _ in range(2))
    expected, expected_lse = packed_attention(q, k, v, offsets(lengths_q), offsets(LENGTHS_K), mask=spec.mask)
    found = []
    for page in STEMS[stem]:
        (k_pages, table), (v_pages, _) = (into_pages(x, LENGTHS_K, page) for x in (k, v))
        lengths = torch.tensor(LENGTHS_K, dtype=torch.int32)
        found.append(module(stem).attention(q, k_pages, v_pages, offsets(lengths_q), table, lengths, return_lse=True))
    out, lse = found[0]
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.01)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert all(o.equal(out) and l_.equal(lse) for o, l_ in found)
