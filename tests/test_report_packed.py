"""What `fa3gen report` says of modules for packed sequences and pages: which lengths, what they were measured at."""

from __future__ import annotations

import html
import re
import statistics
from typing import Any

import pytest
from rendering import CHECKOUT

from fa3gen.compile.cache import cached_compile
from fa3gen.cpu.kernel import CpuKernel
from fa3gen.inspect.report import gathering, numerics, speeds
from fa3gen.inspect.report.listing import Listing
from fa3gen.inspect.report.page import render
from fa3gen.measure.packed_cells import (
    CHUNK_LENGTHS,
    DECODING_LENGTHS,
    DRAFT_LENGTHS,
    DRAWN_LENGTHS,
    MIXED_CHUNK_LENGTHS,
    MIXED_LENGTHS,
    PAGED_LENGTHS,
    PROMPT_LENGTHS,
    SHORT_LENGTHS,
    cells,
)
from fa3gen.records import packed_records
from fa3gen.records.evidence import Status
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import Variant, attention_only


def variant_of(stem: str) -> Variant[Forward]:
    [found] = attention_only(CHECKOUT.resolve(stem), "the test")
    return found


def test_the_page_names_lengths_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but what the CPU model and the line table say, which is as for every module."""
    stem = "fwd_paged_d128_causal"
    nothing = gathering.Run(None, problem="left out"), numerics.Card("the model", False, (), "left out")
    monkeypatch.setattr(gathering, "_on_cpu_model", lambda *rest: nothing)
    monkeypatch.setattr(gathering, "make_listing", lambda *rest: Listing((), ()))
    compiled = cached_compile(CHECKOUT.module_path(stem))  # as other tests do: without line numbers
    monkeypatch.setattr("fa3gen.compile.cache.cached_compile", lambda *rest, line_info: compiled)
    page = render(gathering.gather(CHECKOUT, variant_of(stem)))
    said = html.unescape(re.sub(r"<[^>]*>", "", page))
    assert "chat16k has 58 sequences, 16384 x 16384, 16 heads, pages of 16; prefill1k_on_8k has 8 sequences" in said
    assert "TMA writes it in boxes of 16 rows, each of one page, with zeros behind the last" in said
    assert "TMA writes it, with zeros behind the end of the sequence" in said
    assert "4 sequences, 1620 x 2198, 6 heads: 554 x 982, 0 x 128, 1024 x 1024, 42 x 64. Each CTA begins" in said
    assert "sequence 2: 896–1,023" in said and "sequence 1:" not in said  # which has no queries
    assert "Packed sequences: 32 query heads on 8 KV heads, pages of 64" in said and "Beside peers" not in said
    assert "Made by fa3gen report fwd_paged_d128_causal" in said


@pytest.mark.parametrize("stem", ["fwd_packed_sink_d64_causal", "fwd_paged_rows_d64"])
def test_errors_on_the_cpu_model(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With sinks, and beside rows of NaN, it is no further off than PyTorch in the same precision."""
    usual = numerics.sweep
    monkeypatch.setattr(numerics, "sweep", lambda spec: usual(spec)[:1])
    card = numerics.on_cpu_model(variant_of(stem), CpuKernel(cached_compile(CHECKOUT.module_path(stem))))
    [point] = card.points
    assert (point.seq_k, point.kind) == (64, "normal") and card.problem == ""
    assert 0 < point.kernel < point.yardstick < 1e-2 and point.lse is not None and point.lse < 1e-5


def test_cells_of_a_module_are_those_of_the_records() -> None:
    """One panel for heads and page size, lists of lengths by their mean keys; other modules of the same run beside."""
    stem = "fwd_paged_d64_causal"
    panels = speeds.panels(CHECKOUT, variant_of(stem))
    heads = ("16 heads", "64 query heads on 8 KV heads", "8 query heads on 1 KV heads", "20 query heads on 5 KV heads")
    few = "4 query heads on 1 KV heads", "16 query heads on 2 KV heads"  # of prompts alone
    assert {panel.title for panel in panels} == {f"{of}, pages of {page}" for of in heads + few for page in (16, 64)}
    records = {record.problem.label: record for record in packed_records.load_all(CHECKOUT)}
    shown: set[str] = set()
    some = {*DRAWN_LENGTHS, *PROMPT_LENGTHS}  # with some of the heads each
    for panel in panels:
        assert not panel.has_peers
        lists = {*DRAFT_LENGTHS, *CHUNK_LENGTHS, *MIXED_CHUNK_LENGTHS, *SHORT_LENGTHS}
        if not panel.title.startswith(("8 ", "20 ")):
            lists |= {*PAGED_LENGTHS, *DECODING_LENGTHS, *MIXED_LENGTHS}
        names = {shape.problem.lengths for shape in panel.shapes}
        drawn = names & some
        assert names - drawn == (set() if panel.title.startswith(few) else lists)
        shown |= {shape.problem.label for shape in panel.shapes if shape.problem.lengths in drawn}
        means = [statistics.mean(records[shape.problem.label].problem.lengths_k) for shape in panel.shapes]
        assert means == sorted(means)
        for shape in panel.shapes:
            found = {speed.name: speed.tflops for speed in shape.speeds}
            assert found == {each.stem: each.tflops for each in records[shape.problem.label].results}
            assert shape.own.tflops == found.pop(stem)
            assert shape.ratio is not None and shape.ratio == shape.own.tflops / max(found.values())
    able = [problem for problem, found in cells(CHECKOUT) if stem in {variant.stem for variant in found}]
    assert shown == {problem.label for problem in able if problem.lengths in some}


def test_points_of_packed_records_stand_at_their_mean_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    stem = "fwd_packed_d64_causal"
    record = numerics.evidence.read(CHECKOUT, stem)
    monkeypatch.setattr(numerics.evidence, "status", lambda *rest: (Status.VERIFIED, record))
    points: dict[str, Any] = {point.name: point for point in numerics.from_evidence(CHECKOUT, variant_of(stem)).points}
    assert points["total_64k"].seq_k == -(-65536 // 5) and points["total_64k"].shape.startswith("5 sequences")
    assert {points[name].kind for name in ("wrap", "decode")} == {"ramp", "outlier"}
