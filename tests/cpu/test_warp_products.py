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
from fa3gen.generate.render import render_variant
from fa3gen.verify import packed_inputs
from fa3gen.verify.on_cpu import verify_on_cpu

torch.set_num_threads(1)  # the workers of xdist share the cores
NARROW, WIDE = "fwd_packed_kv8_decode_warps_kv128_causal", "fwd_packed_decode_warps_kv128_causal"
NARROW_128 = "fwd_packed_kv8_decode_warps_d128_kv128_causal"
CASES = ("shares", "decode", "wrap", "tile_edge", "ragged")


def call(attention: Any, kv_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of three sequences whose keys and values are numbers that 8 bits hold."""
    generator = torch.Generator().manual_seed(7)
    lengths_q, lengths_k = (3, 1, 2), (700, 9, 333)
    q = torch.randn(sum(lengths_q), 4, 64, generator=generator).bfloat16()
    k, v = (torch.randn(sum(lengths_k), 2, 64, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    given = q, k.to(kv_dtype), v.to(kv_dtype), offsets(lengths_q), offsets(lengths_k)
    return attention(*given, return_lse=True)  # type: ignore[no-any-return]


def test_the_bits_are_those_of_the_same_arrangement_with_16_bits(tmp_path: Path) -> None:
    """The same tiles and the same order of sums, K and V in bfloat16: threads have other columns of O, and no other."""
    twin = changed(NARROW, kv={"dtype": None}, smem={"k": "128B", "v": "128B"}, load={"kv_stages": 2})
    wide, narrow = load_on_cpu(path_of(tmp_path, "wide", render_variant(twin, CHECKOUT))), module(NARROW)
    for sms in (3, 1):  # keys are cut elsewhere
        wide.cpu.settings = narrow.cpu.settings = Settings(sms=sms)
        expected, found = call(wide.attention, torch.bfloat16), call(narrow.attention, torch.float8_e4m3fn)
        assert found[0].equal(expected[0]) and found[1].equal(expected[1])
    narrow.cpu.settings = Settings()


@pytest.mark.parametrize("kv", [64, 128])
def test_the_bits_of_128_elements_are_those_of_64(kv: int, tmp_path: Path) -> None:
    """Of rows with 64 zeros: of a thread's 32 elements the first 16, or the others; and columns of O for themselves."""
    twin = changed(NARROW, tile={"kv": kv})
    half = load_on_cpu(path_of(tmp_path, "half", render_variant(twin, CHECKOUT)))
    found = module(NARROW_128.replace("kv128", f"kv{kv}"))
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
    found.cpu.settings = Settings()


@pytest.mark.parametrize("stem", [NARROW, NARROW_128, WIDE])
def test_windows_of_calls_and_sinks(stem: str, tmp_path: Path) -> None:
    """No module has these: a model that does gets one rendered when it runs."""
    variant = changed(stem, mask={"kind": "window"}, tile={"kv_from": "window"}, softmax={"sink": True})
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
    found = mistaken(tmp_path, "wrong", source(stem).replace(right, wrong))
    assert reported(found, spec, cases, schedules=4)
