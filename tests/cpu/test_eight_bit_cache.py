"""Keys of 8 bits beside queries of 16, on the CPU model: the bits of a 16-bit cache, factors, and mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hosting import cases_of, mistaken, module, path_of, reported, small
from packed_modules import into_pages, offsets
from rendering import CHECKOUT, changed, variants

from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.module import load_on_cpu
from fa3gen.generate.render import render_variant
from fa3gen.verify import reference

torch.set_num_threads(1)  # the workers of xdist share the cores
FEW, MANY = "fwd_packed_kv8_decode_d64_causal", "fwd_packed_kv8_d128_causal"
FEW_ROWS, MANY_ROWS = "fwd_paged_kv8_decode_rows_d128_causal", "fwd_paged_kv8_rows_d128_causal"
PAGE = 7  # keys: no size for boxes
LENGTHS_Q, LENGTHS_K, HEADS = (3, 1, 70), (300, 9, 130), (4, 2)


def call(
    attention: Any,
    kv_dtype: torch.dtype,
    dim: int,
    page: int | None = None,
    lengths_q: tuple[int, ...] = LENGTHS_Q,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of three sequences, packed or in pages, whose keys and values are numbers that 8 bits hold."""
    generator = torch.Generator().manual_seed(5)
    (heads_q, heads_kv), rows = HEADS, (sum(lengths_q), sum(LENGTHS_K))
    q = torch.randn(rows[0], heads_q, dim, generator=generator).bfloat16()
    k, v = (torch.randn(rows[1], heads_kv, dim, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    k, v = k.to(kv_dtype), v.to(kv_dtype)
    given: tuple[torch.Tensor, ...] = q, k, v, offsets(lengths_q), offsets(LENGTHS_K)
    if page is not None:
        (k, table), (v, _) = (into_pages(x, LENGTHS_K, page) for x in (k, v))
        given = q, k, v, offsets(lengths_q), table, torch.tensor(LENGTHS_K, dtype=torch.int32)
    return attention(*given, return_lse=True, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("stem", [FEW, MANY, FEW_ROWS, MANY_ROWS])
def test_the_bits_are_those_of_the_same_arrangement_with_16_bits(stem: str, tmp_path: Path) -> None:
    """The spec without its 8 bits: the same tiles and the same order of sums, K and V in bfloat16."""
    twin = changed(stem, kv={"dtype": None, "stages": 1, "warpgroups": 1})
    wide = load_on_cpu(path_of(tmp_path, "wide", render_variant(twin, CHECKOUT)))
    narrow, dim = module(stem), twin.spec.problem.head_dim
    page = PAGE if twin.spec.problem.layout == "paged" else None
    lengths_q = LENGTHS_Q if twin.spec.tile.pack_heads == 1 else (3, 1, 17)  # several tiles, by any module
    for sms in (3, 1) if twin.spec.split else (3,):  # keys of few queries are cut elsewhere
        wide.cpu.settings = narrow.cpu.settings = Settings(sms=sms)
        expected = call(wide.attention, torch.bfloat16, dim, page, lengths_q)
        found = call(narrow.attention, torch.float8_e4m3fn, dim, page, lengths_q)
        assert found[0].equal(expected[0]) and found[1].equal(expected[1])
    narrow.cpu.settings = Settings()


@pytest.mark.parametrize("stem", [FEW, MANY])
def test_factors_are_of_a_sequence_and_a_head(stem: str) -> None:
    """Of any size, and any stride: O and LSE of keys and values that are so much larger."""
    dim, (_, heads_kv) = variants()[stem].spec.problem.head_dim, HEADS
    of_k, of_v = torch.rand(heads_kv, 3).t() + 0.3, torch.rand(1, heads_kv).expand(3, -1) + 0.3
    found = call(module(stem).attention, torch.float8_e4m3fn, dim, k_descale=of_k, v_descale=of_v)

    def in_float64(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bounds: torch.Tensor, **_: Any) -> Any:
        parts = []
        for i in range(3):
            rows, keys = (slice(*b[i : i + 2].tolist()) for b in bounds)
            factors = (factor[i, :, None].double() for factor in (of_k, of_v))
            scaled = [x[None, keys].double() * factor for x, factor in zip((k, v), factors, strict=True)]
            parts.append(reference.attention(q[None, rows], *scaled, reach=(None, 0)))
        return torch.cat([part.out[0] for part in parts]), torch.cat([part.lse[0] for part in parts], dim=1)

    out, lse = call(in_float64, torch.float8_e4m3fn, dim)
    assert ((found[0] - out).norm() / out.norm()).item() < 4e-3
    torch.testing.assert_close(found[1].double(), lse, rtol=1e-5, atol=1e-5)


MISTAKES = {
    "a factor of another head": ("* k_descale[work.sequence, work.head_kv]", "* k_descale[work.sequence, 0]"),
    "a factor of another sequence": ("v_descale[work.sequence, work.head_kv]", "v_descale[0, work.head_kv]"),
    "no factor of V": ("v_factor * (1.0 / row_sum[r])", "1.0 / row_sum[r]"),
    "no fence between threads and wgmma": (
        'cute.arch.fence_proxy("async.shared", space="cta")  # threads wrote; wgmma',
        "# wgmma",
    ),
    "a stage is filled before it is empty": ("    ring.producer_acquire(fill)  # the stage is empty\n", ""),
    "a tile is read before it has landed": ("    stored_ring.consumer_wait(drain)  # the tile has landed\n", ""),
    "some units are left out": ("min(first + UNITS_AT_ONCE, units)", "min(first + UNITS_AT_ONCE, units - 1)"),
    "only one warp says that it has converted": (
        "make_converted_ring(barriers):",
        "make_converted_ring(barriers, CONVERTER_WARPS=1):",
    ),
}


SHOWING = "shares", "decode", "wrap"  # cases; of single rows one more


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported(name: str, tmp_path: Path) -> None:
    (text, spec), (right, wrong) = small(FEW), MISTAKES[name]
    assert right in text
    found = mistaken(tmp_path, "wrong", text.replace(right, wrong))
    assert reported(found, spec, cases_of(spec, *SHOWING), schedules=4)


# Of rows that are gathered one by one: module, what stands there, what should not.
ROW_MISTAKES = {
    "converters told of a tile before it has landed": (
        FEW_ROWS,
        "cp_async_wait_group(on_their_way)",
        "cp_async_wait_group(on_their_way + 1)",
    ),
    "the same where one tile is on its way": (MANY_ROWS, "cp_async_wait_group(0)", "cp_async_wait_group(1)"),
    "a stored stage filled before it is empty": (FEW_ROWS, "            v8_ring.producer_acquire(v_fill)\n", ""),
    "a stored stage empty when one lane of each warp has read it": (
        FEW_ROWS,
        "CooperativeGroup(pipeline.Agent.Thread, CONVERTER_WARPS * WARP)",
        "CooperativeGroup(pipeline.Agent.Thread, CONVERTER_WARPS)",
    ),
    "halves of odd rows copied to the place of the other": (
        MANY_ROWS,
        "as_copied(units[place + unit, None])",
        "as_copied(units[place + number + unit_of_lane, None])",
    ),
    "rows copied that are not there": (FEW_ROWS, "exists[0, 0] = place >= 0", "exists[0, 0] = place >= -1"),
}


@pytest.mark.parametrize("name", ROW_MISTAKES)
def test_mistakes_with_single_rows_are_reported(name: str, tmp_path: Path) -> None:
    stem, right, wrong = ROW_MISTAKES[name]
    text, spec = small(stem, row_of(stem))
    assert text.count(right) == 1
    found = mistaken(tmp_path, "wrong", text.replace(right, wrong))
    assert reported(found, spec, cases_of(spec, *SHOWING, "ragged"), schedules=4)


def row_of(stem: str) -> int:
    """Elements of a row of the small module: only longer rows have halves of 64."""
    return 128 if stem == MANY_ROWS else 64


@pytest.mark.parametrize("stem", [FEW, *sorted({stem for stem, *_ in ROW_MISTAKES.values()})])
def test_without_a_mistake_nothing_is_reported(stem: str, tmp_path: Path) -> None:
    text, spec = small(stem, row_of(stem))
    assert reported(mistaken(tmp_path, "right", text), spec, cases_of(spec, *SHOWING, "ragged")) == ()
