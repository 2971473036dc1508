"""Warps that multiply keys of their own, on the CPU model: the bits of a 16-bit cache, windows and sinks, mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hosting import mistaken, module, path_of, reported
from packed_modules import offsets
from rendering import CHECKOUT, changed, source, variants

from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.module import load_on_cpu
from fa3gen.design import tile_order
from fa3gen.design.family import PackedShape
from fa3gen.generate.render import render_variant
from fa3gen.spec.model import Forward
from fa3gen.verify import packed_inputs, paged_inputs
from fa3gen.verify.on_cpu import verify_on_cpu
from fa3gen.verify.packed_on_cpu import CpuPackedRunner, CpuPagedRunner

torch.set_num_threads(1)  # the workers of xdist share the cores
NARROW, WIDE = "fwd_packed_kv8_decode_warps_kv128_causal", "fwd_packed_decode_warps_kv128_causal"
NARROW_128 = "fwd_packed_kv8_decode_warps_d128_kv128_causal"
FITTED, PAGED = (f"fwd_{layout}_kv8_decode_warps_drafts_causal" for layout in ("packed", "paged"))
CASES = ("shares", "decode", "wrap", "tile_edge", "ragged")


DECODE, DRAFTS = (1, 1, 0, 1), (4, 1, 0, 16, 9)  # queries of sequences


def call(
    attention: Any, kv_dtype: torch.dtype, group: int = 2, lengths_q: tuple[int, ...] = (3, 1, 2)
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of sequences whose keys and values are numbers that 8 bits hold; some have no queries, or no keys."""
    generator = torch.Generator().manual_seed(7)
    lengths_k = (700, 9, 333, 129, 0)[: len(lengths_q)]
    q = torch.randn(sum(lengths_q), 2 * group, 64, generator=generator).bfloat16()
    k, v = (torch.randn(sum(lengths_k), 2, 64, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    given = q, k.to(kv_dtype), v.to(kv_dtype), offsets(lengths_q), offsets(lengths_k)
    return attention(*given, return_lse=True)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The spec of NARROW without its 8 bits."""
    twin = changed(NARROW, kv={"dtype": None}, smem={"k": "128B", "v": "128B"}, load={"kv_stages": 2})
    return load_on_cpu(path_of(tmp_path_factory.mktemp("twins"), "wide", render_variant(twin, CHECKOUT)))


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The spec of FITTED with room for all heads in each tile."""
    twin = changed(FITTED, tile={"group": "at_most"})
    return load_on_cpu(path_of(tmp_path_factory.mktemp("twins"), "padded", render_variant(twin, CHECKOUT)))


@pytest.mark.parametrize(
    ("group", "lengths_q", "sms"),  # keys are cut elsewhere on another number of SMs
    [(2, (3, 1, 2), 3), *((group, DRAFTS, (1, 3)[i % 2]) for i, group in enumerate((1, 4, 5, 8, 12, 16)))],
)
def test_the_bits_are_those_of_the_same_arrangement_with_16_bits(
    group: int, lengths_q: tuple[int, ...], sms: int, wide: Any
) -> None:
    """The same tiles and the same order of sums, K and V in bfloat16: threads have other columns of O, and no other."""
    narrow = module(NARROW)
    wide.cpu.settings = narrow.cpu.settings = Settings(sms=sms)
    expected, found = (
        call(x.attention, dtype, group, lengths_q)
        for x, dtype in ((wide, torch.bfloat16), (narrow, torch.float8_e4m3fn))
    )
    assert found[0].equal(expected[0]) and found[1].equal(expected[1])
    narrow.cpu.settings = Settings()


@pytest.mark.parametrize("group", [1, 4, 5, 12, 16])
def test_the_bits_of_one_query_are_those_of_tiles_with_room_for_all_heads(group: int, padded: Any) -> None:
    """Whose rows lie elsewhere in a tile: where each sequence has one tile, its keys are cut at the same places."""
    expected, fitted = (call(x.attention, torch.float8_e4m3fn, group, DECODE) for x in (padded, module(FITTED)))
    assert fitted[0].equal(expected[0]) and fitted[1].equal(expected[1])


def test_tiles_hold_as_many_queries_as_there_is_room_for() -> None:
    """Keys are read once for each tile: of few queries all heads are in one, of more as many as take the fewest."""

    def tiles(group: int, queries: int) -> int:
        spec, shape = variants()[FITTED].spec, PackedShape((queries,), (1000,), group, 1)
        assert isinstance(spec, Forward)
        own = tile_order.fitted(spec, shape, queries)
        return tile_order.head_tiles(own, shape) * -(-queries // tile_order.positions(own))

    expected = {(4, 1): 1, (4, 4): 1, (4, 5): 2, (5, 2): 1, (5, 4): 2, (12, 1): 1, (12, 4): 4, (12, 8): 6, (16, 8): 8}
    assert {call: tiles(*call) for call in expected} == expected
    assert [tiles(group, 1) for group in range(1, 17)] == [1] * 16


def drafts(group: int) -> packed_inputs.PackedCase:
    """Of two kv heads: drafts on keys that many CTAs share, without keys, without queries, and more queries than keys.

    Of 12 heads 4 at a time have tiles of their own, see `pack_log2_of`.
    """
    lengths = (15, 2, 0, 7, 13), (1100, 0, 300, 129, 4)
    return packed_inputs.sequences(f"of {group}", "", *lengths, heads=(2 * group, 2), first=1, behind=2)


@pytest.mark.parametrize("group", [1, 4, 5, 8, 12, 16])
def test_drafts_on_pages(group: int) -> None:
    spec, found = variants()[PAGED].spec, module(PAGED)
    assert isinstance(spec, Forward)
    [case] = paged_inputs.in_pages([drafts(group)], spec)
    assert CpuPagedRunner(found, spec, seed=3, count=1).run_case(case).failures == ()


@pytest.mark.parametrize(
    ("stem", "group", "sms"),
    [  # the modules take turns, and so do numbers of SMs
        (stem, group, (1, 3, 20)[(i + j) % 3])
        for i, stem in enumerate([FITTED, NARROW_128, WIDE])
        for j, group in enumerate([1, 4, 5, 8, 12, 16])
        if (i + j) % 2 == 0
    ],
)
def test_drafts(stem: str, group: int, sms: int) -> None:
    spec, found = variants()[stem].spec, module(stem)
    assert isinstance(spec, Forward)
    found.cpu.settings = Settings(sms=sms)
    assert CpuPackedRunner(found, spec, seed=3, count=1).run_case(drafts(group)).failures == ()
    found.cpu.settings = Settings()


@pytest.mark.parametrize(
    ("group", "right", "wrong"),
    [
        (4, "log2 += cutlass.Int32(heads > room)", "log2 += cutlass.Int32(heads > 2 * room)"),
        (5, "if 1 << work.pack_log2 == pack:", "if 2 << work.pack_log2 == pack:"),
        (4, "row & ((cutlass.Int32(1) << pack_log2) - 1), row >> pack_log2", "row % PACK_HEADS, row // PACK_HEADS"),
        (4, "(cutlass.Int32(tScS_rows[r, 0][0]) >> pack_log2)", "tScS_rows[r, 0][0] // PACK_HEADS"),
        (4, "diagonal + (TILE_M >> pack_log2)", "diagonal + POSITIONS"),
        (4, "m_start = work.m_block * (TILE_M >> work.pack_log2)", "m_start = work.m_block * POSITIONS"),
        (4, "seq_q - positions, q_begin", "seq_q - m_block * POSITIONS, q_begin"),
        (4, "q_begin + positions", "q_begin + m_block * POSITIONS"),
        (4, "cutlass.min(rows, TILE_M >> pack_log2)", "cutlass.min(rows, POSITIONS)"),
        (12, "head < 1 << pack_log2", "head < 16"),
        (12, "row = (position << pack_log2) + head", "row = (position << 4) + head"),
        (12, "        head = pack // packs\n", "        head = pack % packs\n"),
        (12, "((head - head_kv * group, begin),", "((0, begin),"),
        (12, "pack_log2 = cute.arch.shuffle_sync(lane_log2, owner)", "pack_log2 = lane_log2"),
    ],
    ids=[
        "too few heads",
        "the box of more heads",
        "rows of O",
        "the diagonal of a row",
        "the last key",
        "the diagonal of a tile",
        "how many rows are added up",
        "which rows are added up",
        "one row added up of several",
        "heads that the tile has not",
        "rows of a part",
        "k of a pack",
        "O of a pack",
        "heads of another sequence",
    ],
)
def test_mistakes_with_heads_are_reported(group: int, right: str, wrong: str, tmp_path: Path) -> None:
    variant = changed(NARROW, tile={"group": "fitted"})  # of 128 keys: small tiles show which key is the last
    text, spec = render_variant(variant, CHECKOUT), variant.spec
    assert text.count(right) == 1 and isinstance(spec, Forward)
    broken = mistaken(tmp_path, "wrong", text.replace(right, wrong))

    def reported(sms: int) -> bool:
        """Which tiles are cut follows from how many CTAs there are."""
        broken.cpu.settings = Settings(sms=sms)
        return CpuPackedRunner(broken, spec, seed=3, count=1).run_case(drafts(group)).failures != ()

    assert any(map(reported, (Settings().sms, 20)))


def test_the_bits_of_128_elements_are_those_of_64(tmp_path: Path) -> None:
    """Of rows with 64 zeros: of a thread's 32 elements the first 16, or the others; and columns of O for themselves."""
    twin = changed(NARROW, tile={"group": "fitted"})
    half, found = load_on_cpu(path_of(tmp_path, "half", render_variant(twin, CHECKOUT))), module(NARROW_128)
    generator = torch.Generator().manual_seed(8)
    lengths_q, lengths_k = (3, 1, 2), (700, 9, 333)
    bounds = offsets(lengths_q), offsets(lengths_k)
    q = torch.randn(sum(lengths_q), 4, 64, generator=generator).bfloat16()
    k, *v = (torch.randn(sum(lengths_k), 2, 64, generator=generator).to(torch.float8_e4m3fn) for _ in range(3))
    half.cpu.settings = found.cpu.settings = Settings(sms=3)
    expected = [half.attention(q, k, each, *bounds, scale=0.1, return_lse=True) for each in v]
    for place in (0, 1):
        rows_q, rows_k = (
            torch.stack([torch.zeros_like(x), x] if place else [x, torch.zeros_like(x)], dim=3).flatten(2)
            for x in (x.view(*x.shape[:2], 4, 16) for x in (q, k.bfloat16()))
        )
        keys = rows_k.to(torch.float8_e4m3fn)
        out, lse = found.attention(rows_q, keys, torch.cat(v, dim=2), *bounds, scale=0.1, return_lse=True)
        assert out.equal(torch.cat([each for each, _ in expected], dim=2)) and lse.equal(expected[0][1])
    half.cpu.settings = found.cpu.settings = Settings()


@pytest.mark.parametrize("stem", [NARROW, NARROW_128, WIDE])
def test_windows_of_calls_and_sinks(stem: str, tmp_path: Path) -> None:
    """No module has these: a model that does gets one rendered when it runs."""
    tile = {"kv_from": "window", "group": "at_most"}
    variant = changed(stem, mask={"kind": "window"}, tile=tile, softmax={"sink": True})
    found = load_on_cpu(path_of(tmp_path, "scores", render_variant(variant, CHECKOUT)))
    cases = [case for case in packed_inputs.cpu_cases(variant.spec) if case.name in (*CASES, "sinks", "narrow_window")]
    assert verify_on_cpu(found, variant.spec, stem=variant.stem, cases=cases, count=2, calls=False).failures == ()


# In both modules, or in that of 16 bits, or of 8.
MISTAKES = {
    "K read before it has landed": (WIDE, "            k_ring.consumer_wait(kv_drain)  # K has landed\n", ""),
    "V read before it has landed": (
        NARROW,
        "            v_ring.consumer_wait(kv_drain)  # V has landed",
        "            #",
    ),
    "a stage given back before it has been read": (
        WIDE,
        "            tOrV = read_v(sV_bytes[None, kv_drain.index], first_v)\n            finish_reads()\n"
        "            k_ring.consumer_release(kv_drain)\n            v_ring.consumer_release(kv_drain)\n",
        "            k_ring.consumer_release(kv_drain)\n            v_ring.consumer_release(kv_drain)\n"
        "            tOrV = read_v(sV_bytes[None, kv_drain.index], first_v)\n",
    ),
    "Q given back before it has been read": (
        WIDE,
        "        read_operand_q(sQ[None, None, q_drain.index], tSrQ)\n        finish_reads()\n"
        "        q_ring.consumer_release(q_drain)  # this warp has read Q\n",
        "        q_ring.consumer_release(q_drain)\n        read_operand_q(sQ[None, None, q_drain.index], tSrQ)\n",
    ),
    "sums read before all warps have left theirs": (
        WIDE,
        "    cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=CONSUMER_WARPS * WARP)  # all warps have",
        "    # all warps have",
    ),
    "sums left where those of the tile before are read": (
        WIDE,
        "    cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=CONSUMER_WARPS * WARP)  # what was",
        "    # what was",
    ),
    "a warp's weight from another maximum": (WIDE, "(sMax[number, row] - largest)", "(sMax[0, row] - largest)"),
    "sums without their weights": (NARROW, "total += weight * sSum[number, row]", "total += sSum[number, row]"),
    "elements of Q in another order than K's": (
        NARROW,
        "sQ[row + r * MMA_M // 2, HEAD_DIM // QUAD * quad_lane + i]",
        "sQ[row + r * MMA_M // 2, 4 * quad_lane + i % 4 + i // 4 * 16]",
    ),
    "keys of another warp": (
        NARROW,
        "first_k = cute.crd2idx((first_row +",
        "first_k = cute.crd2idx(((first_row ^ MMA_N) +",
    ),
    "the second half of a row where the first is": (WIDE, "(first ^ (behind * VECTOR))", "(first ^ (behind * 0))"),
    "of V the first 64 columns in the place of others": (NARROW_128, "place=(group, 4 * i)", "place=(group, 0 * i)"),
    "even columns where odd ones are": (NARROW, "stride=(4, 1, 8)", "stride=(1, 4, 8)"),
    "halves of the keys exchanged": (WIDE, "+ group % 2 * 2", "+ (1 - group % 2) * 2"),
    "no factor of V": (NARROW, "v_factor * (1.0 / total)", "1.0 / total"),
    "a mask that is left out": (WIDE, "if n_block >= work.n_full_end:", "if n_block > work.n_full_end:"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported(name: str, tmp_path: Path) -> None:
    stem, right, wrong = MISTAKES[name]
    assert source(stem).count(right) == 1
    spec = variants()[stem].spec
    cases = [case for case in packed_inputs.cpu_cases(spec) if case.name in CASES]
    # Tiles of one step, so many for each CTA that Q of one comes where that of another was.
    cases.append(packed_inputs.sequences("turns", "", (5, 4, 5, 5), (9, 12, 9, 9), heads=(32, 2)))
    found = mistaken(tmp_path, "wrong", source(stem).replace(right, wrong))
    assert reported(found, spec, cases, schedules=4)
