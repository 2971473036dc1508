"""Queries, keys and values of 8 bits in packed sequences and pages, on the CPU model of sm_90a.

Bits of dense tensors, neighbours that are NaN, factors of any strides, and mistakes that are found.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hosting import cases_of, mistaken, module, reported, small
from packed_modules import offsets
from rendering import variants

from fa3gen.run.eight_bits import FACTORS
from fa3gen.spec.model import CausalMask
from fa3gen.verify import packed_inputs, reference

torch.set_num_threads(1)  # the workers of xdist share the cores
E4M3 = torch.float8_e4m3fn
PACKED, PAGED, WHOLE = "fwd_fp8_packed_d128_causal", "fwd_fp8_paged_d128_causal", "fwd_fp8_packed_d256"
NARROW, NARROW_PAGED, WIDE_PAGED = "fwd_fp8_packed_d64_causal", "fwd_fp8_paged_d64_causal", "fwd_fp8_paged_d256_causal"
FEW, FEW_PAGED = "fwd_fp8_packed_decode_d128_causal", "fwd_fp8_paged_decode_d128_causal"
FEWS = [f"fwd_fp8_{layout}_decode_d{dim}_causal" for dim in (64, 256) for layout in ("packed", "paged")]
WINDOWS = "fwd_fp8_paged_any_window_d128"
CHUNKS, SMALL_CHUNKS = "fwd_fp8_packed_chunks_d128_causal", "fwd_fp8_paged_chunks_small_d64_causal"
MIXED = "fwd_fp8_paged_mixed_any_group_d128_causal"
ROWS = {dim: f"fwd_fp8_paged_rows_d{dim}_causal" for dim in (64, 128, 256)}
FEW_ROWS = {dim: f"fwd_fp8_paged_decode_rows_d{dim}_causal" for dim in ROWS}
# More keys than queries, the other way round, without queries, without keys, without both.
LENGTHS_Q, LENGTHS_K, HEADS = (3, 0, 150, 5, 0, 20), (300, 7, 130, 0, 0, 9), (4, 2)
FEW_Q = (3, 0, 9, 5, 0, 6)  # of modules for few queries, whose tiles have 4
FITTED_Q = (3, 0, 35, 5, 0, 17)  # where they have as many as heads leave room for, 32
PAGE = 48


def bounds_of(lengths: tuple[int, ...]) -> list[slice]:
    begins = offsets(lengths).tolist()
    return [slice(*pair) for pair in zip(begins, begins[1:], strict=False)]


def lengths_of(stem: str) -> tuple[int, ...]:
    """How many queries each sequence has: several tiles of them, by any module."""
    tile = variants()[stem].spec.tile
    if tile.pack_heads == 1:
        return LENGTHS_Q
    return FEW_Q if tile.group == "at_most" else FITTED_Q


def tensors(stem: str) -> tuple[torch.Tensor, ...]:
    """q, k and v of all sequences one behind the other."""
    dim, generator = variants()[stem].spec.problem.head_dim, torch.Generator().manual_seed(7)
    (heads_q, heads_kv), rows = HEADS, (sum(lengths_of(stem)), sum(LENGTHS_K))
    shapes = (rows[0], heads_q, dim), (rows[1], heads_kv, dim), (rows[1], heads_kv, dim)
    return tuple(torch.randn(shape, generator=generator).to(E4M3) for shape in shapes)


def in_pages(k: torch.Tensor, v: torch.Tensor, page: int) -> dict[str, torch.Tensor]:
    """The keys of all sequences in pages of any order, by the names of the entry point; what is left of them is NaN.

    Those of V have the heads before the rows of a page.
    """
    counts = [-(-length // page) for length in LENGTHS_K]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(1))
    table = torch.full((len(counts), max(counts)), 2**20, dtype=torch.int32)  # no such page
    pages = [torch.full((len(order), page, *x.shape[1:]), 0x7F, dtype=torch.uint8) for x in (k, v)]
    taken = 0
    for number, (count, rows) in enumerate(zip(counts, bounds_of(LENGTHS_K), strict=True)):
        table[number, :count] = at = order[taken : taken + count]
        for x, into in zip((k, v), pages, strict=True):
            filled = into[at].flatten(0, 1)
            filled[: rows.stop - rows.start] = x[rows].view(torch.uint8)
            into[at] = filled.view(count, page, *x.shape[1:])
        taken += count
    k_pages, v_pages = (x.view(E4M3) for x in pages)
    v_pages = v_pages.transpose(1, 2).contiguous().transpose(1, 2)
    used = torch.tensor(LENGTHS_K, dtype=torch.int32)
    return {"k": k_pages, "v": v_pages, "page_table": table, "seqused_k": used}


def call(attention: Any, stem: str, page: int = PAGE, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of all sequences by a module for packed ones, or for pages."""
    q, k, v = tensors(stem)
    keys = {"k": k, "v": v, "cu_seqlens_k": offsets(LENGTHS_K)}
    if variants()[stem].spec.problem.layout == "paged":
        keys = in_pages(k, v, page)
    found = attention(q, **keys, cu_seqlens_q=offsets(lengths_of(stem)), return_lse=True, **options)
    return found  # type: ignore[no-any-return]


def factors_of(kind: str) -> dict[str, torch.Tensor]:
    """Factors of each sequence and kv head, by name."""
    count, heads_kv = len(LENGTHS_Q), HEADS[1]
    each = torch.rand(3, count, heads_kv, generator=torch.Generator().manual_seed(3)) + 0.3
    match kind:
        case "of heads":
            return dict(zip(FACTORS, each, strict=True))
        case "stride 0":
            of_sequences, of_heads, of_all = each[0, :, :1], each[1, :1], each[2, :1, :1]
            return {
                name: x.expand(count, heads_kv)
                for name, x in zip(FACTORS, (of_sequences, of_heads, of_all), strict=True)
            }
        case "in larger tensors":
            wide = torch.full((heads_kv, 2 * count, 2), math.nan)
            wide[:, ::2, 0] = each[0].t()
            return {"q_descale": wide[:, ::2, 0].t(), "v_descale": each[2].t().contiguous().t()}
        case _:
            return {"k_descale": each[1]}


def expected(stem: str, factors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE in float64 of what the bytes stand for, times their factors."""
    outs, lses, group = [], [], HEADS[0] // HEADS[1]
    ones = torch.ones(len(LENGTHS_Q), HEADS[1])
    reach = (None, 0) if isinstance(variants()[stem].spec.mask, CausalMask) else (None, None)
    for i, (rows, keys) in enumerate(zip(bounds_of(lengths_of(stem)), bounds_of(LENGTHS_K), strict=True)):
        if rows.start == rows.stop:
            continue
        of_q, of_k, of_v = (factors.get(name, ones)[i, :, None].double() for name in FACTORS)
        q, k, v = (x[None, part].double() for x, part in zip(tensors(stem), (rows, keys, keys), strict=True))
        found = reference.attention(q * of_q.repeat_interleave(group, 0), k * of_k, v * of_v, reach=reach)
        outs.append(found.out[0])
        lses.append(found.lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


@pytest.mark.parametrize(
    ("stem", "dense", "window"),
    [
        (PACKED, "fwd_fp8_d128_causal", {}),
        (PAGED, "fwd_fp8_d128_causal", {}),
        (WHOLE, "fwd_fp8_d256", {}),
        (NARROW_PAGED, "fwd_fp8_d64_causal_short", {}),
        (WIDE_PAGED, "fwd_fp8_d256_causal", {}),
        # Where tiles of keys begin depends on the window: with a wide one where the dense module's do.
        (WINDOWS, "fwd_fp8_d128_any_window", {"window": (300, 20)}),
    ],
)
def test_bits_are_those_of_dense_tensors(stem: str, dense: str, window: dict[str, Any]) -> None:
    """The tiles and the order of sums are the same, and what is behind the keys is zeros there, too."""
    factors = factors_of("of heads")
    out, lse = call(module(stem).attention, stem, **factors, **window)
    for i, (rows, keys) in enumerate(zip(bounds_of(lengths_of(stem)), bounds_of(LENGTHS_K), strict=True)):
        q, k, v = (x[None, part] for x, part in zip(tensors(stem), (rows, keys, keys), strict=True))
        of = {name: x[i : i + 1] for name, x in factors.items()}
        wanted, wanted_lse = module(dense).attention(q, k, v, return_lse=True, **of, **window)
        assert out[rows].equal(wanted[0]) and lse[:, rows].equal(wanted_lse[0])


@pytest.mark.parametrize(
    ("stem", "boxes", "page"),
    [
        *((FEW_ROWS[dim], f"fwd_fp8_paged_decode_d{dim}_causal", 1 if dim == 128 else 7) for dim in FEW_ROWS),
        *((ROWS[dim], WIDE_PAGED if dim == 256 else None, 7 if dim == 128 else 1) for dim in ROWS),
    ],
)
def test_single_rows_give_the_same_bits_in_pages_of_any_size(stem: str, boxes: str | None, page: int) -> None:
    """Those of boxes, too, where tiles are the same; pages of one key, and of as many as no swizzle has."""
    wanted, wanted_lse = call(module(boxes or stem).attention, boxes or stem)
    out, lse = call(module(stem).attention, stem, page)
    assert out.equal(wanted) and lse.equal(wanted_lse)


@pytest.mark.parametrize("stem", [PACKED, NARROW, WHOLE, FEW, *FEWS[::2], CHUNKS])
def test_neighbours_that_are_nan_change_no_bit(stem: str) -> None:
    """Both NaNs of 8 bits before, between and behind the rows in use: their P is 0, and 0 times NaN is NaN."""
    q, k, v = tensors(stem)
    wanted = call(module(stem).attention, stem)
    used = torch.tensor(LENGTHS_K, dtype=torch.int32)
    apart = tuple(length + 3 for length in LENGTHS_K)
    begins = offsets(apart) + 2
    for nan in packed_inputs.NANS_OF_8_BITS:
        spoilt = [torch.full((sum(apart) + 9, *x.shape[1:]), nan, dtype=torch.uint8) for x in (k, v)]
        for x, into in zip((k, v), spoilt, strict=True):
            for rows, begin in zip(bounds_of(LENGTHS_K), begins.tolist(), strict=False):
                into[begin : begin + rows.stop - rows.start] = x[rows].view(torch.uint8)
        keys = [x.view(E4M3) for x in spoilt]
        found = module(stem).attention(q, *keys, offsets(lengths_of(stem)), begins, seqused_k=used, return_lse=True)
        assert found[0].equal(wanted[0]) and found[1].equal(wanted[1])


@pytest.mark.parametrize(
    ("stem", "kind"),
    [
        *((PACKED, kind) for kind in ("stride 0", "in larger tensors", "one of them")),
        *((stem, "of heads") for stem in (PAGED, NARROW, WHOLE, FEW, FEW_PAGED, *FEWS, ROWS[64], ROWS[128])),
        *((stem, "of heads") for stem in (CHUNKS, SMALL_CHUNKS, MIXED)),
    ],
)
def test_factors_are_of_a_sequence_and_a_head(stem: str, kind: str) -> None:
    """O and LSE of q, k and v that are so much larger; rows that see no key have 0 and -inf."""
    factors = factors_of(kind)
    (out, lse), (wanted, wanted_lse) = call(module(stem).attention, stem, **factors), expected(stem, factors)
    assert out.dtype == torch.bfloat16 and ((out.double() - wanted).norm() / wanted.norm()).item() < 0.04
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-4, atol=1e-4)
    assert wanted_lse.isinf().any()


@pytest.mark.parametrize("stem", [PACKED, FEW_PAGED])
def test_what_is_wrong_with_factors_is_said(stem: str) -> None:
    attention, one = module(stem).attention, torch.ones(len(LENGTHS_Q), HEADS[1])
    for name in FACTORS:
        with pytest.raises(ValueError, match=rf"{name} has shape \(6, 1\); it needs to be \(6, 2\).*expand\(\)"):
            call(attention, stem, **{name: one[:, :1]})
        with pytest.raises((TypeError, ValueError), match=name):
            call(attention, stem, **{name: one.double()})
    with pytest.raises((TypeError, ValueError), match="k"):
        attention(*(x.bfloat16() if i else x for i, x in enumerate(tensors(PACKED))), *[offsets(LENGTHS_Q)] * 2)


MISTAKES = {
    "a factor of q of another sequence": (PACKED, "q_descale[work.sequence, work.head_kv]", "q_descale[0, 0]"),
    "a factor of K of another head": (PACKED, "k_descale[work.sequence, work.head_kv]", "k_descale[work.sequence, 0]"),
    "a factor of V of another sequence": (PACKED, "v_descale[work.sequence, work.head_kv]", "v_descale[0, 0]"),
    "V of a tile is not waited for": (PACKED, "            v_ring.consumer_wait(v_drain)  # V has landed\n", ""),
    "a stage of V is filled in use": (PACKED, "            v_ring.producer_acquire(kv_fill)\n", ""),
    "V is not clipped where its sequence ends": (
        PACKED,
        "columns_of(mVt, work.head_kv, work.k_begin, work.seq_k)",
        "columns_of(mVt, work.head_kv, work.k_begin, work.seq_k + 1)",
    ),
    "no fence between stmatrix and wgmma": (
        PACKED,
        'cute.arch.fence_proxy("async.shared", space="cta")  # stmatrix wrote; wgmma',
        "# wgmma",
    ),
    "the next tile's boxes": (
        PAGED,
        "(row, page, of_k, of_v), upcoming = upcoming,",
        "row, page, of_k, of_v =",
    ),
    "rows told before they have landed": (
        FEW_ROWS[128],
        "cp_async_wait_group(on_their_way)",
        "cp_async_wait_group(on_their_way + 1)",
    ),
    "the same where one tile is on its way": (ROWS[256], "cp_async_wait_group(0)", "cp_async_wait_group(1)"),
    "no fence between cp.async and wgmma": (
        FEW_ROWS[64],
        'cute.arch.fence_proxy("async.shared", space="cta")  # cp.async wrote; wgmma',
        "# wgmma",
    ),
    "a stage of K is filled in use": (ROWS[128], "            k_ring.producer_acquire(kv_fill)\n", ""),
    "a stage of V that rows fill in use": (FEW_ROWS[64], "            v_ring.producer_acquire(kv_fill)\n", ""),
    "a stage of V is free when one warp has read it": (
        ROWS[64],
        "make_gathered_ring(storage.v_barriers, TRANSPOSER_WARPS)",
        "make_gathered_ring(storage.v_barriers, 1)",
    ),
    "rows of another tile": (
        FEW_ROWS[128],
        "read_pages(entries, work, n_block - 2, pages)",
        "read_pages(entries, work, n_block - 1, pages)",
    ),
    "rows of V where those of K are": (ROWS[128], "(mV, sV, places[1])", "(mK, sV, places[1])"),
    "rows that are not there": (FEW_ROWS[64], "exists[0, 0] = place >= 0", "exists[0, 0] = place >= -1"),
    "the swizzle of 128 bytes for one of 64": (ROWS[64], "unit ^ row_of_lane // 2,", "unit ^ row_of_lane % 4,"),
    "columns of parts in the order of V transposed": (FEW, "    acc_O = in_order_of_columns(acc_O)\n", ""),
    "columns of whole tiles in that order": (MIXED, "in_order_of_columns(acc_O), work", "acc_O, work"),
    "Q by the box of another number of heads": (
        CHUNKS,
        "if 1 << work.pack_log2 == pack:",
        "if 2 << work.pack_log2 == pack:",
    ),
    "a factor of K of a tile's first head": (
        MIXED,
        "k_descale[work.sequence, work.head_kv]",
        "k_descale[work.sequence, work.head_kv // 2]",
    ),
    "LSE of P times 256": (FEW, "fastmath=True) - P_EXPONENT\n", "fastmath=True)\n"),
}


SHOWING = "ragged", "decode", "wrap", "shares"  # cases


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported(name: str, tmp_path: Path) -> None:
    stem, right, wrong = MISTAKES[name]
    text, spec = small(stem)
    assert text.count(right) == 1
    found = mistaken(tmp_path, "wrong", text.replace(right, wrong))
    assert reported(found, spec, cases_of(spec, *SHOWING), schedules=4)


@pytest.mark.parametrize("stem", sorted({stem for stem, *_ in MISTAKES.values()}))
def test_without_a_mistake_nothing_is_reported(stem: str, tmp_path: Path) -> None:
    """The small modules are no committed ones, which are verified elsewhere."""
    text, spec = small(stem)
    assert reported(mistaken(tmp_path, "right", text), spec, cases_of(spec, *SHOWING)) == ()
