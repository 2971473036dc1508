"""Sinks and capped scores on the CPU model: limits that have exact answers, and mistakes that have to be reported."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hosting import mistaken, module, path_of
from mutations import SourceMutation
from rendering import CHECKOUT, changed, source, variants

from fa3gen.cpu.module import load_on_cpu
from fa3gen.design.rules import check
from fa3gen.generate.render import render_variant
from fa3gen.verify.inputs import SINKS, Case, make_for, windowed
from fa3gen.verify.on_cpu import verify_on_cpu

torch.set_num_threads(1)  # the workers of xdist share the cores
BOTH, PACKED = "k4_scores_d64_window200_70", "fwd_d64_pack8_sink_window"
CASES = [
    Case("sinks", "all kinds of sinks, rows without a key", 1, 9, 7, 5, 1),
    Case(
        "capped", "scores beyond a cap of 15, the end of the keys in a tile", 1, 9, 69, 1, 1, scale=2.25, softcap=15.0
    ),
    Case("capped_low", "a cap so low that a hidden key would count", 1, 9, 69, 1, 1, softcap=1.5),
]


def call(stem: str, sinks: torch.Tensor, seq_q: int = 90, seq_k: int = 7, **options: Any) -> Any:
    """O and LSE; by default of rows most of which see no key, since those left of the window's right edge see none."""
    generator = torch.Generator().manual_seed(3)
    heads = len(sinks)
    q, k, v = (
        torch.randn(1, length, count, 64, generator=generator).bfloat16()
        for length, count in ((seq_q, heads), (seq_k, 1), (seq_k, 1))
    )
    return module(stem).attention(q, k, v, sinks=sinks, return_lse=True, **options)


@pytest.mark.parametrize(("stem", "options"), [(BOTH, {"softcap": 50.0}), (PACKED, {})])
def test_a_row_without_a_key_has_its_sink(stem: str, options: dict[str, Any]) -> None:
    sinks = torch.tensor([-0.7, *SINKS, 1.5, 0.0, -1e-30])
    out, lse = call(stem, sinks, **options)
    none = slice(0, 90 - 7 - 70 if stem == BOTH else 90 - 7)  # rows whose window ends before the first key
    assert (out[:, none] == 0).all() and not out.isnan().any() and not lse.isnan().any()
    assert (lse[0, :, none] == sinks[:, None]).all()  # to the bit
    assert (out[:, none.stop :, 0] != 0).all() and (out[:, :, 2] == 0).all()  # of 3e38 nothing is left


def test_sinks_of_both_dtypes_are_the_same_numbers() -> None:
    """One compiled kernel takes both; float32 has a lower half, which counts."""
    sinks = torch.tensor([0.5, -2.0, 6.0, -math.inf])
    found = [call(BOTH, each, softcap=50.0, seq_k=90) for each in (sinks, sinks.bfloat16(), sinks * (1 + 2**-10))]
    assert found[0][0].equal(found[1][0]) and found[0][1].equal(found[1][1])
    assert not found[0][1].equal(found[2][1])


def test_no_sink_is_as_without_one() -> None:
    """-inf: the bits of O are those of the module without sinks."""
    case = Case("plain", "", 1, 60, 90, 2, 1)
    made = make_for(variants()["fwd_d64_causal"].spec, case, device=torch.device("cpu"), seed=1)
    given, no_sinks = made.given.values(), torch.full((2,), -math.inf)
    out, lse = module("fwd_d64_causal").attention(*given, return_lse=True)
    sunk, sunk_lse = module("fwd_d64_sink_causal").attention(*given, sinks=no_sinks, return_lse=True)
    assert sunk.equal(out)
    torch.testing.assert_close(sunk_lse, lse, rtol=1e-6, atol=1e-6)


def test_a_tile_that_several_ctas_share_is_capped_once(tmp_path: Path) -> None:
    """Stream-K deals out the last wave by tiles of keys; parts of a row's sum meet in one CTA. Sinks are refused."""
    assert [found.field for found in check(changed("fwd_d128", softmax={"sink": True}).spec)] == ["scheduler"]
    variant = changed("fwd_d128", softmax={"softcap": True})
    found = load_on_cpu(path_of(tmp_path, "shared", render_variant(variant, CHECKOUT)))
    case = Case("shared", "one tile of queries, keys for many CTAs", 1, 20, 20 * 128 + 9, 1, 1)
    report = verify_on_cpu(found, variant.spec, stem="shared", cases=[case, *CASES])
    assert report.failures == (), f"seed {report.seed}"


def test_a_row_with_one_key_has_its_value(tmp_path: Path) -> None:
    """With a first maximum, too, P of a row's only key is 1, wherever the tiles with the edges of its window lie."""
    variant = changed("fwd_d64_any_window", softmax={"softcap": True, "row_max": "first"})
    found = load_on_cpu(path_of(tmp_path, "first", render_variant(variant, CHECKOUT)))
    generator = torch.Generator().manual_seed(4)
    for seq_q, seq_k in ((300, 300), (200, 263)):  # with these the last key of a whole tile is some row's only one
        q, k, v = (torch.randn(1, rows, 1, 64, generator=generator).bfloat16() for rows in (seq_q, seq_k, seq_k))
        out, lse = found.attention(q, k, v, window=(0, 0), softcap=50.0, return_lse=True)
        assert out.equal(v[:, seq_k - seq_q :])
        scores = 50 * torch.tanh((q.float() * k[:, seq_k - seq_q :].float()).sum(-1) / 8 / 50)
        torch.testing.assert_close(lse, scores.transpose(1, 2), rtol=1e-3, atol=1e-3)
    cases = [*windowed(CASES[1:]), Case("capped_64", "", 1, 9, 269, 1, 1, scale=16.0, softcap=64.0, window=(140, 3))]
    report = verify_on_cpu(found, variant.spec, stem="first", cases=cases)
    assert report.failures == (), f"seed {report.seed}"


# Mistakes

MISTAKES = {
    "sink forgotten in LSE": ("x + cute.math.log2(with_sink,", "x + cute.math.log2(total * shrink,"),
    "sink added by each thread of a quad": (
        "with_sink = total * shrink + cute.math.exp2((sink - x) * LOG2_E, fastmath=True)",
        "with_sink = total * shrink + quad_sum(cute.math.exp2((sink - x) * LOG2_E, fastmath=True))",
    ),
    "sums not brought to a larger sink": (
        "row_inverse[r] = 0.0 if total == 0.0 else shrink *",
        "row_inverse[r] =",
    ),
    "a sink's halves the other way round": (
        "low_and_high[0, r], low_and_high[1, r] = sink[0]",
        "low_and_high[1, r], low_and_high[0, r] = sink[0]",
    ),
    "cap after the mask": (
        "        cap_scores(acc_S, cap_scale)\n"
        "        if n_block < n_full_start or n_block >= n_full_end:\n"
        "            mask_scores(acc_S, qk_mma, m_start, n_block * TILE_N, seq_q, seq_k)\n",
        "        if n_block < n_full_start or n_block >= n_full_end:\n"
        "            mask_scores(acc_S, qk_mma, m_start, n_block * TILE_N, seq_q, seq_k)\n"
        "        cap_scores(acc_S, cap_scale)\n",
    ),
    "no cap": ("        softcap * LOG2_E,\n        scale / softcap,\n", "        scale * LOG2_E,\n        1e-4,\n"),
}


def test_the_module_itself_is_right() -> None:
    report = verify_on_cpu(module(BOTH), variants()[BOTH].spec, cases=CASES, count=1)
    assert report.failures == ()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported(mistake: str, tmp_path: Path) -> None:
    old, new = MISTAKES[mistake]
    mutated = SourceMutation(mistake, BOTH, "scores", old, new, "", frozenset()).apply(source(BOTH))
    found = mistaken(tmp_path, BOTH, mutated)
    report = verify_on_cpu(found, variants()[BOTH].spec, cases=CASES, count=1, calls=False)
    wrong = [failure for case in report.cases for failure in case.failures]
    assert any(failure.startswith(("O is off", "LSE is")) for failure in wrong), wrong
