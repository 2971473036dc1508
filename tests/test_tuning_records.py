"""Tuning records: what they say, that they say it without contradiction, and where they lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rendering import CHECKOUT, variants

from fa3gen.base.errors import UserError
from fa3gen.design.family import Family, Shape, mask_label
from fa3gen.design.workspace import Workspace
from fa3gen.measure.tuning import report
from fa3gen.records import tuning_records
from fa3gen.records.tuning_records import MaskShape, TunedProblem, TuningRecord, timed
from fa3gen.spec.specfile import attention_among

SHA = "0123456789abcdef" * 4


def problem(seq: int = 4096, **changes: Any) -> TunedProblem:
    facts = {"dtype": "bf16", "head_dim": 128, "head_dim_v": 128, "mask": {"kind": "causal"}, "batch": 4}
    return TunedProblem.model_validate({**facts, "heads_q": 16, "heads_kv": 16, "seq_q": seq, "seq_k": seq, **changes})


def record(
    seq: int = 4096,
    *,
    shape: TunedProblem | None = None,
    times: dict[str, dict[str, Any]] | None = None,
    **changes: Any,
) -> TuningRecord:
    """Speeds that nobody measured."""
    shape = shape or problem(seq)
    usual = {"k6_d128_causal": [1.0, 0.9, 1.1], "k5_d128_causal": [1.2, 1.3, 1.1]}
    results = [
        {"stem": stem, "sha256": SHA, "spec": variants()[stem].spec.model_dump(), **facts}
        for stem, facts in (times or {stem: timed(shape, rounds) for stem, rounds in usual.items()}).items()
    ]
    facts: dict[str, Any] = {"gpu": "A made-up GPU", "driver": None, "torch": "2.11.0", "dsl": "4.8.1"}
    facts |= {"date": "2026-11-21", "problem": shape.model_dump(), "results": results, "winner": "k6_d128_causal"}
    facts |= {"peers": [{"name": "cuDNN", **timed(shape, [2.0, 2.0, 2.0])}], "absent": {"fa3": "is not installed"}}
    return TuningRecord.model_validate({**facts, **changes})


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path, tmp_path)


def test_flops_by_hand() -> None:
    assert problem().flops == 2 * 4 * 16 * (4096 * 4096 / 2) * 256
    assert problem(mask={"kind": "none"}).flops == 2 * problem().flops
    # One query under a causal mask sees every key: nothing to halve.
    assert problem(seq_q=1).flops == 2 * 4 * 16 * 4096 * 256
    assert problem(512, mask={"kind": "window", "left": 2, "right": 0}).flops == 2 * 4 * 16 * (512 * 3 - 3) * 256
    assert problem(head_dim=192).flops == 2 * 4 * 16 * (4096 * 4096 / 2) * (192 + 128)
    assert problem().tflops(2.0) == problem().flops / 2e9


def test_tiles_are_counted_in_128_rows_of_one_head() -> None:
    assert Shape(2, 129, 4096, 8, 1).tiles == 2 * 8 * 2 and Shape(1, 1, 1, 1, 1).tiles == 1


def test_tiles_per_sm_are_those_of_the_gpu(workspace: Workspace) -> None:
    """Of an H200 where nobody wrote down how many SMs there were."""
    old, new = record(), record(512, sms=114)
    assert old.tiles_per_sm == 4 * 16 * 32 / 132 and new.tiles_per_sm == 4 * 16 * 4 / 114
    tuning_records.save(workspace, [old, new])
    assert [entry.sms for entry in tuning_records.load_all(workspace)] == [114, None]
    assert (tuning_records.directory(workspace) / "bf16_d128_causal.json").read_text().count('"sms"') == 1


def test_families_have_names() -> None:
    found = {Family.of(variant.spec).label for variant in attention_among(variants().values())}
    assert {"bf16_d64_full", "bf16_d128_causal", "fp16_d128_causal", "bf16_d64_window512_0"} <= found
    assert problem(head_dim=192).family.label == "bf16_d192_128_causal"
    assert problem(heads_kv=4, seq_q=1).label == "bf16 d128 causal 1x4k, batch 4, heads 16/4"


def test_a_table_of_ratios_to_the_peers() -> None:
    """Twice as fast as its peer at 4k, and alone at 1k: that record is not shown, nor one of grouped heads, nor one of
    other tokens in all."""
    alone = {"peers": []}
    records = [record(), record(1024, **alone), record(shape=problem(heads_kv=4)), record(shape=problem(batch=64))]
    speed = round(problem().tflops(1.0))
    one_cell = "from CUDA graphs, geometric mean of the ratios to the best peer over 1 cell: 2.000; worst 2.000"
    assert report.peers(records).split("\n\n") == [
        f"| from CUDA graphs | 4k |\n|---|---|\n| bf16 d128 causal | {speed} (2.00) |",
        f"Of head dims 64, 128, 256: {one_cell} (bf16 d128 causal 4k, batch 4, heads 16).",
        f"Of all: {one_cell} (bf16 d128 causal 4k, batch 4, heads 16).",
        "Measured: A made-up GPU, driver None, DSL 4.8.1, 2026-11-21.\n",
    ]
    slow = {"name": "cuDNN", **timed(problem(), [2.0] * 3, captured=False)}
    large, *_, star, _ = report.peers([record(peers=[slow])]).split("\n\n")
    assert large.endswith("(2.00) * |") and star.startswith("*: one of the two could not be captured")


def small(seq_q: int, seq_k: int, k6: float, k5: float, *, batch: int = 1, captured: bool = True) -> TuningRecord:
    """A small problem whose peer takes 2 ms, 3 when it is called eagerly; k6 and k5 take twice their time then."""
    shape = problem(seq_k, seq_q=seq_q, batch=batch, heads_q=8, heads_kv=1)
    times = {"k6_d128_causal": k6, "k5_d128_causal": k5}
    peer = {"name": "cuDNN", **timed(shape, [2.0] * 3, eager=3.0, captured=captured)}
    return record(
        shape=shape,
        times={stem: timed(shape, [t] * 3, eager=2 * t) for stem, t in times.items()},
        peers=[peer],
        winner=min(times, key=lambda stem: times[stem]),
    )


def test_small_problems_have_a_table_of_their_own() -> None:
    """By kind; of the module that a call takes, which is k6 up to 512 keys in this band, though it does not win all."""
    records = [record(), small(128, 128, 1.0, 1.5), small(200, 200, 1.0, 1.5, batch=2), small(300, 300, 1.0, 1.1)]
    records += [small(257, 512, 1.0, 0.995), small(128, 4096, 4.0, 1.6, captured=False)]
    large, _, _, intro, table, mean, star, _ = report.peers(records).split("\n\n")
    assert "(2.00)" in large and "batch" not in large
    assert intro.startswith("Small problems, at most 4 tiles of 128 query rows per SM: ratios of the modules that")
    head = "| problem | shapes | cells | from CUDA graphs, mean | least | eager, mean | least |"
    assert table.splitlines()[0] == head and table.splitlines()[2:] == [
        "| bf16 d128 causal | up to 256 tokens | 2 | 2.00 | 2.00 (128, batch 1, heads 8/1) | 1.50 | 1.50 |",
        "| bf16 d128 causal | 257 to 512 tokens | 1 | 2.00 | 2.00 (300, batch 1, heads 8/1) | 1.50 | 1.50 |",
        "| bf16 d128 causal | fewer queries than keys | 2 | 1.58 | 1.25 (128x4k, batch 1, heads 8/1) | 1.19 | 0.94 |",
    ]
    assert mean.startswith("Of small problems: from CUDA graphs, geometric mean of the ratios to the best peer over 5 ")
    assert "worst 1.250 (bf16 d128 causal 128x4k, batch 1, heads 8/1). Eager, over 5 cells: 1.3" in mean
    assert star.startswith("*: one of the two could not be captured")


def test_a_table_for_the_terminal_says_which_way_it_measured() -> None:
    table = report.table([record(), small(128, 128, 1.0, 1.5, captured=False)])
    cells = {str(column.header): list(column.cells) for column in table.columns}
    assert "from CUDA graphs" in str(table.title)
    assert cells["ratio"] == ["2.000", "2.000"] and cells["best peer"] == ["cuDNN", "cuDNN *"]
    eager = small(128, 128, 1.0, 1.5).problem.tflops(2.0)
    assert cells["eager"] == ["", f"{eager:.2g}"] and cells["eager ratio"] == ["", "1.500"]
    assert report.summary([record()]) == (
        "from CUDA graphs, geometric mean of the ratios to the best peer over 1 cell: 2.000; worst 2.000 (bf16 d128 "
        "causal 4k, batch 4, heads 16)"
    )


def test_errors_stand_beside_speeds() -> None:
    """In thousandths; a record of old has none."""
    old, new = record(), record(1024)
    results = [result.model_copy(update={"error": 0.0024 + number / 1e4}) for number, result in enumerate(new.results)]
    peers = [peer.model_copy(update={"error": 0.00221}) for peer in new.peers]
    table = report.table([old, new.model_copy(update={"results": results, "peers": peers})])
    errors = [list(column.cells) for column in table.columns if column.header == "error"]
    assert errors == [["", "2.40"], ["", "2.50"], ["", "2.21"]]
    assert timed(problem(), [1.0], 0.00123456789)["error"] == 0.001235  # as many digits as all that was measured


def test_a_family_is_that_of_its_problems() -> None:
    for variant in attention_among(variants().values()):
        family = Family.of(variant.spec)
        shape = Shape(2, 512, 1024, 8, 4)
        transposed = bool(family.by_sequence) and not family.eight_bits
        mixed = family.kv_dtype is not None
        if transposed or mixed or family.layout != "dense" or family.part_keys is not None:
            # No problem of a record.
            with pytest.raises(UserError, match="and (these are|one alone is) for "):
                TunedProblem.of(family, shape)
            continue
        found = TunedProblem.of(family, shape)
        assert found.family == family.of_call()._replace(any_cap=False) and family.serves(found.family)
        assert TunedProblem.model_validate_json(found.model_dump_json()) == found
        assert found.flops == family.flops(shape)


def test_problems_of_8_bits_say_how_v_lies(workspace: Workspace) -> None:
    """O in bfloat16 is a dtype of its own, and records of older problems say nothing of either."""
    stems = {"k7_two_levels_d128": None, "k7_v_k_two_levels_d128": "v", "fwd_fp8_v_permuted_d128": "v"}
    problems = {stem: TunedProblem.of(Family.of(variants()[stem].spec), Shape(4, 4096, 4096, 16, 16)) for stem in stems}
    assert [(p.dtype, p.out_dtype, p.by_sequence) for p in problems.values()] == [
        ("e4m3", "bf16", lies) for lies in stems.values()
    ]
    assert (
        "by_sequence" not in problems["k7_two_levels_d128"].model_dump() and "by_sequence" not in problem().model_dump()
    )
    records = [
        record(shape=shape, times={stem: timed(shape, [1.0] * 3)}, winner=stem) for stem, shape in problems.items()
    ]
    files = tuning_records.save(workspace, records)
    names = "", "_sequence_v", "_sequence_v_permuted"
    assert [path.name for path in files] == [f"e4m3_d128_full_o_bf16{name}.json" for name in names]
    assert "v_permuted" not in problems["k7_v_k_two_levels_d128"].model_dump()
    assert tuning_records.load_all(workspace) == records
    page = report.peers([*records, record()])
    assert "| e4m3 d128 full o bf16 |" in page and "Of 8 bits: from CUDA graphs, geometric mean" in page
    assert (
        "Of head dims 64, 128, 256: from CUDA graphs, geometric mean of the ratios to the best peer over 1 cell" in page
    )


def test_records_come_back_as_they_were_saved(workspace: Workspace) -> None:
    records = [record(4096), record(512)]
    (path,) = tuning_records.save(workspace, records)
    assert path == workspace.root / "generated/evidence/tuning/bf16_d128_causal.json"
    assert tuning_records.load_all(workspace) == [records[1], records[0]]
    assert '"rounds": [1.0, 0.9, 1.1]' in path.read_text()
    text = path.read_text()
    tuning_records.save(workspace, [])
    tuning_records.save(workspace, [record(512)])
    assert path.read_text() == text


def test_what_records_share_is_written_once(workspace: Workspace) -> None:
    """A module's spec and SHA-256, whatever the number of records; a line for each result."""
    (path,) = tuning_records.save(workspace, [record(seq) for seq in (512, 1024, 2048)])
    text = path.read_text()
    assert text.count('"handoff"') == 2 and text.count(SHA) == 2 and text.count("\n") < 70
    assert text.count('"module": "k6_d128_causal 0123456789ab"') == 3
    document = json.loads(text)
    del document["modules"]["k6_d128_causal 0123456789ab"]
    path.write_text(json.dumps(document))
    with pytest.raises(UserError, match="tuning records .there is no 'k6_d128_causal 0123456789ab'.; delete it"):
        tuning_records.load_all(workspace)


def test_older_files_of_whole_records_can_be_read(workspace: Workspace) -> None:
    """As they are committed, without eager times and SMs; the next save writes them as all others."""
    old = json.loads(record().model_dump_json())
    for entry in (old, *old["results"], *old["peers"]):
        for name in ("sms", "eager", "captured"):
            entry.pop(name, None)
    path = tuning_records.directory(workspace) / "bf16_d128_causal.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps([old]))
    assert tuning_records.load_all(workspace) == [record()]
    tuning_records.save(workspace, [record(512)])
    assert json.loads(path.read_text())["version"] == 2
    assert tuning_records.load_all(workspace) == [record(512), record()]


def test_eager_times_and_who_was_not_captured_are_kept(workspace: Workspace) -> None:
    peer = {"name": "slow", **timed(problem(), [2.0] * 3, eager=2.34567, captured=False)}
    (path,) = tuning_records.save(workspace, [record(peers=[peer])])
    [found] = tuning_records.load(path)
    assert (found.peers[0].eager, found.peers[0].captured) == (2.346, False)
    assert found.results[0].eager is None and found.results[0].captured
    assert path.read_text().count("captured") == path.read_text().count("eager") == 1


def test_a_new_record_replaces_the_one_of_its_shape(workspace: Workspace) -> None:
    tuning_records.save(workspace, [record(512), record(4096)])
    tuning_records.save(workspace, [record(512, winner="k5_d128_causal")])
    assert [entry.winner for entry in tuning_records.load_all(workspace)] == ["k5_d128_causal", "k6_d128_causal"]


def test_best_peer_and_results() -> None:
    found = record()
    assert found.best_peer is not None and found.best_peer.name == "cuDNN"
    assert found.result("k5_d128_causal").milliseconds == 1.2
    assert record(peers=[]).best_peer is None
    with pytest.raises(KeyError):
        found.result("k4")


def spoilt(change: str) -> dict[str, Any]:
    document = json.loads(record().model_dump_json())
    match change:
        case "winner":
            document["winner"] = "k4"
        case "twice":
            document["results"][1]["stem"] = "k6_d128_causal"
        case "median":
            document["results"][0]["milliseconds"] = 1.01
        case "speed":
            document["results"][0]["tflops"] *= 1.01
        case "rounds":
            document["results"][0]["rounds"] = [1.0]
        case "family":
            document["results"][0]["spec"]["problem"]["head_dim"] = 64
        case "unknown":
            document["note"] = "fast"
        case "sha256":
            document["results"][0]["sha256"] = "0"
        case "window":
            document["problem"]["mask"] = {"kind": "window", "left": 3, "right": None}
        case "reach":
            document["problem"]["mask"] = {"kind": "causal", "left": 0, "right": 0}
        case "heads":
            document["problem"]["heads_kv"] = 3
    return document


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("winner", "the winner k4 is none of the results"),
        ("twice", "two results have the same stem"),
        ("median", "milliseconds is 1.01, the median is 1.0"),
        ("speed", "do not follow from 1.0 ms"),
        ("rounds", "as many rounds each"),
        ("family", "k6_d128_causal is compiled for another problem"),
        ("unknown", "note: Extra inputs"),
        ("sha256", "sha256: String should match"),
        ("window", "a window has left and right"),
        ("reach", "no other mask has either"),
        ("heads", "heads_q 16 is no multiple of heads_kv 3"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(workspace: Workspace, change: str, message: str) -> None:
    path = tuning_records.directory(workspace) / "bf16_d128_causal.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps([spoilt(change)]))
    with pytest.raises(UserError, match=f"bf16_d128_causal.json is no list of tuning records .*{message}.*; delete it"):
        tuning_records.load_all(workspace)


def test_files_hold_what_their_names_say(workspace: Workspace) -> None:
    folder = tuning_records.directory(workspace)
    folder.mkdir(parents=True)
    (folder / "bf16_d64_full.json").write_text(tuning_records.dumps([record()]))
    with pytest.raises(UserError, match="bf16_d64_full.json holds records of bf16_d128_causal; move them"):
        tuning_records.load_all(workspace)
    (folder / "bf16_d64_full.json").rename(folder / "bf16_d128_causal.json")
    (folder / "bf16_d128_causal.json").write_text(tuning_records.dumps([record(), record()]))
    with pytest.raises(UserError, match="two records of one shape"):
        tuning_records.load_all(workspace)
    (folder / "bf16_d128_causal.json").write_text("[")
    with pytest.raises(UserError, match="is no list of tuning records"):
        tuning_records.load_all(workspace)


def test_committed_records_can_be_read() -> None:
    for found in tuning_records.load_all(CHECKOUT):
        assert found.winner in {result.stem for result in found.results}


def test_masks_round_trip() -> None:
    window = MaskShape(kind="window", left=512, right=0)
    assert MaskShape.of(window.spec_mask()) == window
    masks = [MaskShape(kind="none"), MaskShape(kind="causal"), window]
    assert tuple(mask_label(mask.spec_mask()) for mask in masks) == (
        "full",
        "causal",
        "window512_0",
    )
