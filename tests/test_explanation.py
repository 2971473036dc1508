"""`fa3gen explain` and the data behind it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import time
from collections import Counter
from functools import cache
from typing import Any

import jsonschema
import pytest
from rendering import ROOT, attention_stems, named, plans, variants
from rich.console import Console

from fa3gen import cli
from fa3gen.design import rules, work
from fa3gen.design.family import Shape
from fa3gen.design.rules import Kind
from fa3gen.hardware import chips
from fa3gen.inspect.explanation import Explanation, explain, legality, text
from fa3gen.inspect.explanation.document import SCHEMA, document

SHAPES = (512, 4096)
STEMS = sorted(variants())


@cache
def explained(stem: str) -> Explanation:
    variant = named(stem)
    if stem in variants() and stem not in attention_stems():
        return explain(variant, [], chips.select(None))
    heads_q, heads_kv = work.default_heads(variant.spec)
    shapes = [Shape(16384 // length, length, length, heads_q, heads_kv) for length in SHAPES]
    return explain(variant, shapes, chips.select(None))


def printed(stem: str, width: int = 120, **options: Any) -> str:
    console = Console(width=width, force_terminal=False, highlight=False)
    with console.capture() as captured:
        text.show(explained(stem), console, **options)
    return captured.get()


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["explain", *arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")


# -- legality


def test_rules_are_about_decisions_of_the_header() -> None:
    decisions = {name for stem in STEMS for name, _ in explained(stem).description.decisions}
    topics = {rule.topic for rule in rules.RULES.values()}
    assert topics - decisions == {"product", "structure", "registers", "shared memory"}


def test_what_the_rules_were_asked() -> None:
    asked = explained("k6_d128").asked
    rows = next(question for question in asked if question.rule.name == "wgmma_rows")
    assert rows.facts == (("tile_q", "128"), ("warpgroups", "2"))
    assert rows.rule.statement == "M: 64 rows per product"
    assert "PTX ISA" in rows.rule.text and rows.rule.kind is Kind.HARDWARE and rows.violation is None
    columns = [question for question in asked if question.rule.name == "wgmma_columns"]
    assert [question.about for question in columns] == ["S = Q K^T", "O = P V"]


def test_what_the_rules_said() -> None:
    """The answers tell the violations of `check`, and a question stands there once however often it was asked."""
    spec = variants()["k6_d128"].spec
    broken = spec.model_copy(update={"tile": spec.tile.model_copy(update={"q": 100})})
    asked = legality.questions(broken)
    assert [answer.violation for answer in asked if answer.violation] == rules.check(broken)
    assert [answer.rule.name for answer in asked if answer.refuses] == ["wgmma_rows"]
    assert not any(answer.violation for answer in legality.questions(spec))
    strides = [answer for answer in legality.questions(spec) if answer.rule.name == "tma_stride"]
    assert len({answer.facts for answer in strides}) == len(strides)


@pytest.mark.parametrize("stem", STEMS)
def test_limits_are_where_the_rules_begin_to_refuse(stem: str) -> None:
    spec = variants()[stem].spec
    for limit in legality.limits(spec):
        part, field = limit.field.split(".")
        changes = {"q": limit.refused * 64} if field == "warpgroups" else {}
        changed = getattr(spec, part).model_copy(update={field: limit.refused, **changes})
        answers = rules.answers(spec.model_copy(update={part: changed}))
        messages = [(found.rule.kind, found.violation.message) for found in answers if found.violation is not None]
        assert limit.value <= limit.largest < limit.refused
        assert (limit.kind, limit.message) in messages and limit.kind is not Kind.TASTE


def test_stages_that_fit() -> None:
    limit = next(limit for limit in explained("k6_d128").limits if limit.field == "load.kv_stages")
    # 32768 of Q and 65536 a stage: 3 are 229376, 4 are more than 232448.
    assert (limit.value, limit.largest, limit.refused) == (2, 3, 4)
    assert "> 232448 bytes" in limit.message


# -- every module


@pytest.mark.parametrize("stem", STEMS)
def test_every_module_explains(stem: str) -> None:
    explanation = explained(stem)
    assert explanation.smem_total == plans()[stem].cta.smem_bytes
    assert explanation.smem_left >= 0
    ends = [offset + region.bytes for offset, region in explanation.smem]
    starts = [offset for offset, _ in explanation.smem]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    if ends:
        assert ends[-1] <= explanation.smem_total
    barriers = sum(region.bytes for _, region in explanation.smem if region.name == "barriers")
    assert barriers == plans()[stem].cta.barrier_bytes
    assert explanation.occupancy.ctas >= 1
    assert (explanation.work is None) == (stem not in attention_stems())
    if explanation.work is None:
        return
    operand_bytes = explanation.work.spec.element.bytes
    for cell in itertools.chain.from_iterable(explanation.work.problems):
        assert 0 < cell.tflops <= cell.chip.tensor_tflops(operand_bytes)
        assert 0 < cell.balance <= 1


@pytest.mark.parametrize(
    "stem", ["k1_d64", "k2_d64", "k4_2_window_d64_window200_70", "fwd_d64_pack8_window", "fwd_d256"]
)
@pytest.mark.parametrize("width", [80, 120])
def test_the_screen_keeps_its_width(stem: str, width: int) -> None:
    screen = printed(stem, width)
    assert max(map(len, screen.splitlines())) <= width
    assert "…" not in screen
    assert all(line == line.rstrip() for line in screen.splitlines())


def test_the_screen_is_one() -> None:
    lengths = {stem: len(printed(stem).splitlines()) for stem in ("k2_d64", "k4_2_d128", "k6_d128", "fwd_d128_causal")}
    assert max(lengths.values()) < 90, lengths


def test_what_the_screen_says() -> None:
    screen = printed("ping_pong_d128")
    for said in (
        "M: 64 rows per product (tile q 128, warpgroups 2)",
        "up to 3, not 4 (hardware): shared memory",
        "setmaxnreg moves them: 24 + 2 x 240 = 504 of 3 x 168 = 504",
        "164,864  total     of 232,448 per CTA, 67,584 left",
        "k     2       TMA, from warp 8 -> 8 warps  32768 bytes  8 arrivals",
        "16 m64n128k16, 8 per warpgroup",
        "What bounds it: tensor cores",
        "H200 SXM 989 TFLOP/s of 989",
        "CTAs per SM: 1",
    ):
        assert said in screen
    assert "Steps, one tile of keys" in screen and "store LSE" not in screen
    for said in ("warp 9     wait v_empty, load V", "wait v_full, O += P V", "S is complete, P V runs on"):
        assert said in screen


def test_which_file_gives_a_field() -> None:
    """k4_2 writes its own load and P's way; what it does not, its base gives. A part of one file is named whole."""
    found = explained("k4_2_d64").fields_from
    assert next(iter(found)) == "specs/k4_2.yaml" and set(found) == {"specs/k4_2.yaml", "specs/k4_smem.yaml"}
    assert {"load", "handoff", "pv.a.source"} <= set(found["specs/k4_2.yaml"])
    assert {"tile", "smem", "qk", "pv.b.major", "mask"} <= set(found["specs/k4_smem.yaml"])
    assert "Fields are given by: " in printed("k4_2_d64")
    assert "Fields are given by: " not in printed("ping_pong_d64")  # it extends nothing


def test_who_says_what() -> None:
    shown = printed("k6_d128", 200, rules=True)
    counts = Counter(answer.rule.kind for answer in explained("k6_d128").asked)
    who = f"hardware {counts[Kind.HARDWARE]}, generator {counts[Kind.GENERATOR]}, taste {counts[Kind.TASTE]}"
    assert f"The rules answered {counts.total()} questions ({who}); none refuses" in shown
    for about, kind, name in (
        ("tile", "hardware", "wgmma_rows"),
        ("tile", "generator", "rows_per_warpgroup"),
        ("q order", "taste", "drawn_without_mask"),
    ):
        assert re.search(rf"^ *{about} +{kind} +{name} ", shown, re.MULTILINE)
    assert "not advisable" not in shown


def test_taste_is_a_warning() -> None:
    variant = variants()["fwd_d128"]
    drawn = dataclasses.replace(variant, spec=variant.spec.model_copy(update={"scheduler": "dynamic"}))
    explanation = explain(drawn, [work.Shape(1, 512, 512, 16, 16)], chips.select(None))
    [warning] = rules.warnings(drawn.spec)
    console = Console(width=200, force_terminal=False, highlight=False)
    with console.capture() as captured:
        text.show(explanation, console)
    assert f"Legal, but not advisable (taste)\n  scheduler  {warning.message}" in captured.get()
    written = document([explanation])
    jsonschema.validate(json.loads(json.dumps(written)), SCHEMA)
    [warned] = [entry for entry in written["modules"][0]["rules"] if entry["warning"]]
    assert (warned["kind"], warned["field"], warned["warning"]) == ("taste", *warning)


def test_no_module_of_ours_is_against_our_taste() -> None:
    assert {stem: rules.warnings(variant.spec) for stem, variant in variants().items()} == dict.fromkeys(STEMS, [])


def test_all_rules_with_their_sources() -> None:
    assert "Asynchronous Warpgroup" not in printed("k6_d128")
    shown = re.sub(r"\s+", " ", printed("k6_d128", 200, rules=True))
    assert 'PTX ISA, "Asynchronous Warpgroup Level Matrix Shape" (m64nNk16). (tile q 128, warpgroups 2)' in shown


# -- JSON


def test_the_document_is_as_described() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    written = json.loads(json.dumps(document([explained(stem) for stem in STEMS]), allow_nan=False))
    jsonschema.validate(written, SCHEMA)
    assert [module["stem"] for module in written["modules"]] == STEMS


def test_the_schema_refuses_what_is_not_described() -> None:
    written = document([explained("k6_d128")])
    written["modules"][0]["surprise"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(written, SCHEMA)


# -- the command


def test_the_command_explains_each_variant(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "k6")
    assert code == 0
    assert re.findall(r"^(k6_\w+): K6", out, re.MULTILINE) == ["k6_d64", "k6_d64_causal", "k6_d128", "k6_d128_causal"]
    assert "\x1b" not in out


def test_registers_are_those_of_the_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "k4_2_d128", "--json")
    occupancy = json.loads(out)["modules"][0]["occupancy"]
    assert occupancy["registers_known"] and occupancy["registers"] <= 128
    assert occupancy["ctas"] == 2


def test_shapes_and_chips_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capsys, "specs/k6.yaml", "--seq", "1x4096", "--batch", "3", "--heads", "8", "--chip", "h200", "--json"
    )
    problem = json.loads(out)["modules"][0]["work"]["problems"]
    assert [row["shape"] for row in problem] == [{"batch": 3, "seq_q": 1, "seq_k": 4096, "heads_q": 8, "heads_kv": 8}]
    assert [cell["chip"] for cell in problem[0]["chips"]] == ["H200 SXM"]


def test_a_window_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """Where calls give it. (127, 0) shows 1 to 128 keys to the first 128 of 256 queries, 128 to each of the others."""
    common = ["k4_2_any_window", "--seq", "256", "--batch", "1", "--heads", "1"]
    found = []
    for window in (["--window", "127,0"], ["--window", "-1,-1"], []):
        _, out, _ = run(capsys, *common, *window, "--json")
        [problem] = json.loads(out)["modules"][0]["work"]["problems"]
        found.append((problem["shape"]["window"], problem["flops"]))
    pairs = 128 * 129 // 2 + 128 * 128, 256 * 256, 256 * 257 // 2
    windows = [127, 0], [-1, -1], [512, 0]
    assert found == [(window, 4 * 64 * count) for window, count in zip(windows, pairs, strict=True)]
    assert "window (127, 0) of each call" in run(capsys, *common, "--window", "127,0")[1]
    assert run(capsys, "k4_2_d64", *common, "--window", "127,0")[0] == 0  # one of them takes it


def test_parts_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    """How many and why, in the text and in the document; the CTAs of 7 parts of each of 8 tiles of queries."""
    common = ["fwd_decode_d128", "--seq", "1x8192", "--batch", "1", "--heads", "32", "--heads-kv", "8"]
    for given, parts in (([], 16), (["--num-splits", "7"], 7)):
        text = run(capsys, *common, *given)[1]
        assert f"on 132 SMs: {parts}" in " ".join(text.split()) and f"{parts} of each tile of queries" in text
        [problem] = json.loads(run(capsys, *common, *given, "--json")[1])["modules"][0]["work"]["problems"]
        for chip in problem["chips"]:
            assert chip["parts"].startswith(f"{parts} of each tile of queries: ")
            assert chip["waves"] == pytest.approx(8 * parts / 132)


def test_heads_of_a_packed_module(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--heads", "8"], ["--heads-kv", "2"]):
        _, out, _ = run(capsys, "fwd_d128_pack4_causal", *arguments, "--json")
        shape = json.loads(out)["modules"][0]["work"]["problems"][0]["shape"]
        assert (shape["heads_q"], shape["heads_kv"]) == (8, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["k6_d12"], "did you mean 'k6_d128'"),
        (["k6", "--chip", "b200"], "there are figures for h100 and h200"),
        (["k6", "--heads", "3", "--heads-kv", "2"], "no multiple of 2 kv heads"),
        (["k6", "--seq", "4k"], "is no length"),
        (["k6", "--num-splits", "3"], "3 parts are asked for, and this module does not split keys"),
        (["k4_2_window_d64_window512_0", "--window", "5,5"], "k4_2_window_d64_window512_0 takes none from calls"),
        (["k4_2_d64", "k6_d64", "--window", "5,5"], "k4_2_d64, k6_d64 take none from calls; leave it out"),
        (["k4_2_any_window", "--window", "3"], "--window is 3; it needs to be LEFT,RIGHT"),
        (["k4_2_any_window", "--window", "3,-2"], "or -1 for all"),
        (["fwd_d128_pack4_causal", "--heads", "6"], "holds 4 query heads"),
    ],
)
def test_what_cannot_be_explained(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert said in err and "Traceback" not in err


def test_it_answers_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Under 2 seconds with starting Python; here without, and on a machine that does other things."""
    start = time.process_time()
    assert run(capsys, "fwd_d128_causal")[0] == 0
    assert time.process_time() - start < 2
