"""Windows, sinks and caps beside factors of 8 bits, on the CPU model of sm_90a: specs that have no module yet.

K and V of 8 bits beside q of 16, and all three of 8; mistakes that are found, and limits that have exact answers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hosting import mistaken, path_of
from packed_modules import offsets
from rendering import CHECKOUT, changed

from fa3gen.compile.cache import cached_compile
from fa3gen.compile.census import compare
from fa3gen.compile.compiler import analyse
from fa3gen.cpu.module import load_on_cpu
from fa3gen.design import rules
from fa3gen.design.masks import given_with_calls
from fa3gen.generate.plan import make_plan
from fa3gen.generate.render import render_variant
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import Variant
from fa3gen.verify import inputs, packed_inputs, paged_inputs
from fa3gen.verify.inputs import Case
from fa3gen.verify.on_cpu import verify_on_cpu
from fa3gen.verify.packed_on_gpu import PackedRunner

torch.set_num_threads(1)  # the workers of xdist share the cores
WINDOW: dict[str, Any] = {"mask": {"kind": "window"}}
PARTS_OF_WINDOW: dict[str, Any] = {**WINDOW, "tile": {"kv_from": "window"}}
BOTH = {"sink": True, "softcap": True}
# A packed head dim of 64: eight query heads of GPT-OSS in a tile.
EIGHT_HEADS: dict[str, Any] = {"problem": {"head_dim": 64}, "tile": {"kv": 128, "pack_heads": 8}}
FEW, FEW_OF_8, FEW_STRIPED = (
    "fwd_packed_kv8_decode_d64_causal",
    "fwd_fp8_packed_decode_d64_causal",
    "fwd_fp8_paged_decode_d256_causal",
)

# What a model asks for: of which committed spec, with which fields.
ARRANGEMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows, prompts": ("fwd_packed_kv8_d128_causal", {**WINDOW, "tile": {"kv": 80}}),
    "all, few queries": (FEW, {**PARTS_OF_WINDOW, "softmax": BOTH}),
    "no mask, relative to a first maximum, prompts in pages": (
        "fwd_paged_kv8_d128_causal",
        {"mask": {"kind": "none"}, "softmax": {"softcap": True, "row_max": "first"}},
    ),
    "no mask, few queries": ("fwd_packed_kv8_decode_d128_causal", {"mask": {"kind": "none"}}),
    "GPT-OSS, prompts in pages": ("fwd_paged_kv8_d128_causal", {**EIGHT_HEADS, **WINDOW, "softmax": {"sink": True}}),
    "GPT-OSS, prompts in single rows": ("fwd_paged_kv8_rows_d64_causal", {**WINDOW, "softmax": {"sink": True}}),
    "GPT-OSS, few queries in pages": (
        "fwd_paged_kv8_decode_d64_causal",
        {**PARTS_OF_WINDOW, "softmax": {"sink": True}},
    ),
    "Gemma, prompts": ("fwd_packed_kv8_d256_causal", {**PARTS_OF_WINDOW, "softmax": BOTH}),
    "Gemma, few queries": ("fwd_packed_kv8_decode_d256_causal", {**PARTS_OF_WINDOW, "softmax": {"softcap": True}}),
    "q of 8 bits, prompts": ("fwd_fp8_packed_any_window_d128", {"softmax": {**BOTH, "exp_before_wait": None}}),
    "q of 8 bits, few queries": (FEW_OF_8, {"softmax": BOTH}),
    "q of 8 bits, stripes, in pages": (FEW_STRIPED, {**PARTS_OF_WINDOW, "softmax": BOTH}),
    "q of 8 bits, dense": ("fwd_fp8_d64_any_window", {"softmax": BOTH}),
}
# Of mistakes, of which each is compiled: small tiles, and two stripes.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "all, few queries, small": (FEW, {**WINDOW, "tile": {"kv_from": "window", "kv": 32}, "softmax": BOTH}),
    "q of 8 bits, few queries, small": (
        FEW_OF_8,
        {"tile": {"kv": 32}, "smem": {"vt": "32B"}, "softmax": {**BOTH, "exp_before_wait": None}},
    ),
    "q of 8 bits, stripes, in pages, small": (
        FEW_STRIPED,
        {
            **WINDOW,
            "problem": {"head_dim": 64},
            "tile": {"kv_from": "window", "kv": 32},
            "smem": {"q": "64B", "k": "64B", "v": "64B", "vt": "32B"},
            "accumulate": {"columns": 32},
            "softmax": BOTH,
        },
    ),
}
LENGTHS_Q, LENGTHS_K = (3, 1, 17), (300, 9, 130)
SHOWING = ("few_keys", "wrap", "shares", "sinks", "capped", "wide_window", "narrow_window")


@cache
def variant(name: str) -> Variant:
    stem, parts = {**ARRANGEMENTS, **SMALL}[name]
    found = changed(stem, **parts)
    assert isinstance(found.spec, Forward) and rules.check(found.spec) == []
    return found


@cache
def text(name: str) -> str:
    return render_variant(variant(name), CHECKOUT)


def cases_of(spec: Forward) -> list[Case]:
    """Cases that a module would be verified on; and sequences and heads of which each has factors of its own.

    Their sinks are of all sizes, and their scores beyond a cap.
    """
    if spec.problem.layout == "dense":
        several: list[Any] = [Case("heads", "factors of heads, sinks, a cap", 2, 70, 200, 4, 2, scale=0.5, softcap=5.0)]
        cases: list[Any] = [case for case in inputs.cpu_cases(spec) if case.name in SHOWING]
    else:
        rows = 70 if spec.tile.pack_heads == 1 else 17  # two tiles of each head, or more
        lengths = (3, 1, 0, rows, 2), (300, 9, 7, 130, 0)
        heads = (2 * spec.tile.pack_heads if spec.tile.group == "multiple" else 4, 2)
        facts: dict[str, Any] = {"heads": heads, "first": 2, "scale": 0.5, "softcap": 5.0}
        packed = packed_inputs.sequences("heads", "factors of sequences and heads, sinks, a cap", *lengths, **facts)
        paged = spec.problem.layout == "paged"
        several = [*paged_inputs.in_pages([packed], spec)] if paged else [packed]
        of_layout: Any = paged_inputs if paged else packed_inputs
        cases = [case for case in of_layout.cpu_cases(spec) if case.name in SHOWING]
    if given_with_calls(spec.mask):
        several = [replace(case, window=(100, 5)) for case in several]
    return [*cases, *several]


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_what_models_ask_for(name: str, tmp_path: Path) -> None:
    """Right in every case, and compiled as planned: without spills, and with as many tanh as scores."""
    spec, path = variant(name).spec, path_of(tmp_path, "asked", text(name))
    assert isinstance(spec, Forward)
    report = verify_on_cpu(load_on_cpu(path), spec, stem="asked", cases=cases_of(spec), count=1)
    assert report.failures == (), f"seed {report.seed}"
    assert compare(analyse(cached_compile(path)).census, make_plan(variant(name)).expectation) == []


def test_criteria_of_a_gpu_know_sinks_and_caps(tmp_path: Path) -> None:
    """Of all three of 8 bits: beside the error of P in 8 bits what tanh.approx and sums of 13 bits may move."""
    spec = variant("q of 8 bits, few queries").spec
    assert isinstance(spec, Forward)
    found = load_on_cpu(path_of(tmp_path, "asked", text("q of 8 bits, few queries")))
    runner = PackedRunner(found, spec, torch.device("cpu"), seed=1)
    for case in cases_of(spec):
        if case.name in ("heads", "sinks", "capped"):
            assert runner.run_case(case).failures == ()


def call(attention: Any, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE of queries of three sequences, with a window, sinks and a cap."""
    generator = torch.Generator().manual_seed(8)
    q = 2 * torch.randn(sum(LENGTHS_Q), 4, 64, generator=generator).bfloat16()
    sinks = torch.tensor([-0.7, 2.5, -math.inf, 0.3])
    options |= {"window": (100, 5), "sinks": sinks, "softcap": 3.0, "return_lse": True}
    found = attention(q, k, v, offsets(LENGTHS_Q), offsets(LENGTHS_K), **options)
    return found  # type: ignore[no-any-return]


def test_the_bits_are_those_of_16_bits_times_their_factors(tmp_path: Path) -> None:
    """The spec without its 8 bits, given K and V times powers of two: neither these nor 8 bits round anything."""
    stem, parts = ARRANGEMENTS["all, few queries"]
    twin = changed(stem, **parts, kv={"dtype": None, "stages": 1, "warpgroups": 1})
    wide = load_on_cpu(path_of(tmp_path, "wide", render_variant(twin, CHECKOUT)))
    narrow = load_on_cpu(path_of(tmp_path, "narrow", text("all, few queries")))
    generator = torch.Generator().manual_seed(6)
    k, v = (torch.randn(sum(LENGTHS_K), 2, 64, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    of_k = torch.tensor([[0.5, 2.0], [4.0, 0.25], [1.0, 0.5]])
    of_v = torch.tensor([[8.0, 0.5], [0.125, 2.0], [4.0, 1.0]])
    rows = torch.tensor(LENGTHS_K)
    of_rows = [factor.repeat_interleave(rows, 0)[..., None] for factor in (of_k, of_v)]
    scaled = [(x.float() * factor).bfloat16() for x, factor in zip((k, v), of_rows, strict=True)]
    expected = call(wide.attention, *scaled)
    found = call(narrow.attention, k, v, k_descale=of_k, v_descale=of_v)
    assert found[0].equal(expected[0]) and found[1].equal(expected[1])
    assert not call(narrow.attention, k, v, k_descale=of_k)[0].equal(expected[0])


# Mistakes: in which arrangement, what stands there, and what somebody may have written

SHARED, OF_8, STRIPES = SMALL
MISTAKES: dict[str, tuple[str, str, str]] = {
    "no factor of K before the cap": (
        SHARED,
        "cap_scale = call_cap_scale * k_descale[work.sequence, work.head_kv]",
        "cap_scale = call_cap_scale",
    ),
    "a factor of K of another sequence": (SHARED, "k_descale[work.sequence, work.head_kv]", "k_descale[0, 0]"),
    "the factor of K times what is capped": (
        SHARED,
        "        cap_scale = call_cap_scale *",
        "        scale_log2 *= k_descale[work.sequence, work.head_kv]\n        cap_scale = call_cap_scale *",
    ),
    "no factor of V": (SHARED, "v_factor * shrink *", "shrink *"),
    "the factor of V times the sink": (
        SHARED,
        "with_sink = total * shrink + cute.math.exp2(",
        "with_sink = total * shrink + v_factor * cute.math.exp2(",
    ),
    "the factor of V times the sum of exponentials": (
        SHARED,
        "with_sink = total * shrink +",
        "with_sink = v_factor * total * shrink +",
    ),
    "sums that are 2^8 times as large beside a sink": (
        OF_8,
        "(row_max[r] * scale_log2 - P_EXPONENT) * LN_2",
        "row_max[r] * scale_log2 * LN_2",
    ),
    "no factor of q before the cap": (
        OF_8,
        "factor = q_descale[work.sequence, work.head_kv] * k_descale",
        "factor = k_descale",
    ),
    "no cap between stripes": (STRIPES, "has read K\n    cap_scores(acc_S, cap_scale)\n", "has read K\n"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported(mistake: str, tmp_path: Path) -> None:
    name, right, wrong = MISTAKES[mistake]
    assert text(name).count(right) == 1
    spec = variant(name).spec
    assert isinstance(spec, Forward)
    wrongs = said_of(text(name).replace(right, wrong), spec, tmp_path)
    assert any(failure.startswith(("O is off", "LSE is")) for failure in wrongs), wrongs


def said_of(source: str, spec: Forward, folder: Path) -> list[str]:
    """What goes wrong with factors of sequences and heads."""
    cases = [case for case in cases_of(spec) if case.name == "heads"]
    found = mistaken(folder, "wrong", source)
    report = verify_on_cpu(found, spec, stem="wrong", cases=cases, seed=1, count=1, calls=False)
    return [failure for case in report.cases for failure in case.failures]


@pytest.mark.parametrize("name", SMALL)
def test_without_a_mistake_nothing_is_reported(name: str, tmp_path: Path) -> None:
    spec = variant(name).spec
    assert isinstance(spec, Forward) and said_of(text(name), spec, tmp_path) == []
