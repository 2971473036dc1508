"""On a machine with a Hopper GPU: modules are timed beside peers, and who is wrong or hangs is left out."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from fa3gen import cli
from fa3gen.base.files import sha256
from fa3gen.design.family import Family, Shape
from fa3gen.design.workspace import Workspace
from fa3gen.measure.tuning import heats
from fa3gen.measure.tuning.client import LIMITS_S
from fa3gen.measure.tuning.journal import Journal
from fa3gen.measure.tuning.session import Cell, Module, Tuner
from fa3gen.records import tuning_records
from fa3gen.records.tuning_records import TunedProblem

WORKSPACE = Workspace.find(Path(__file__).parent)
SCALE = "scale or 64**-0.5"
STEMS = ("k4_2_d64", "k6_d64")


def committed(stem: str) -> Module:
    (variant,) = WORKSPACE.resolve(stem)
    path = WORKSPACE.module_path(stem)
    return Module(stem, path, sha256(path), variant.spec)


def edited(folder: Path, stem: str, old: str, new: str) -> Module:
    """k6_d64 with another text in its entry point."""
    text = WORKSPACE.module_path("k6_d64").read_text()
    assert text.count(old) >= 1
    path = folder / f"{stem}.py"
    path.write_text(text.replace(old, new))
    return Module(stem, path, sha256(path), committed("k6_d64").spec)


def tuner(tmp_path: Path, modules: tuple[Module, ...], **limits: float) -> Tuner:
    problem = TunedProblem.of(Family.of(modules[0].spec), Shape(4, 4096, 4096, 32, 32))
    cells = [Cell(problem, modules, tuple(heats.plan(len(modules) - 1, 9)))]
    journal = Journal(tmp_path / "journal.jsonl")
    return Tuner(cells, journal, ["0"], tmp_path / "logs", limits={**LIMITS_S, **limits}, jobs=4)


@pytest.mark.usefixtures("hopper")
def test_modules_and_peers_are_timed(tmp_path: Path) -> None:
    (outcome,) = tuner(tmp_path, tuple(map(committed, STEMS))).run()
    assert list(outcome.times) == list(STEMS) and not outcome.uncaptured
    assert all(milliseconds > 0 for milliseconds in outcome.eager.values())
    assert set(outcome.eager) == {*outcome.times, *outcome.peers}
    assert "cuDNN (torch SDPA)" in outcome.peers, outcome.absent
    record = outcome.record()
    assert record is not None and "H" in record.gpu and record.driver
    # Rounds of one module agree: what is between them is noise and not something else.
    for rounds in outcome.times.values():
        assert max(rounds) < 1.5 * statistics.median(rounds)
    assert all(100 < result.tflops < 990 for result in record.results)  # 989: the dense bf16 peak of an H100 or H200
    assert record.winner == "k6_d64"  # faster by a fifth in every run so far


@pytest.mark.usefixtures("hopper")
def test_who_is_wrong_or_hangs_is_out(tmp_path: Path) -> None:
    wrong = edited(tmp_path, "wrong", SCALE, f"0.5 * ({SCALE})")
    hangs = edited(tmp_path, "hangs", "gpu = q.get_device()\n", "gpu = q.get_device()\n    torch.cuda._sleep(10**15)\n")
    (outcome,) = tuner(tmp_path, (committed("k6_d64"), wrong, hangs), check=8.0).run()
    assert outcome.winner == "k6_d64" and list(outcome.times) == ["k6_d64"]
    assert outcome.absent["wrong"].startswith("computes something wrong: ")
    assert outcome.absent["hangs"].startswith("hung: no answer in 8 s")


@pytest.mark.usefixtures("hopper")
def test_the_command_measures_and_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WORKSPACE.root)
    common = ["--seq", "1024", "--rounds", "9", "--no-peers"]
    measured, found = tmp_path / "measured.json", tmp_path / "found.json"
    assert cli.main(["tune", "--measure", *STEMS, *common, "--work", str(tmp_path / "a"), "--json", str(measured)]) == 0
    (record,) = tuning_records.load(measured)
    assert [result.stem for result in record.results] == list(STEMS) and not record.peers
    (tmp_path / "space.yaml").write_text("space: {load.kv_stages: [1], tile.kv: [64, 128]}")
    space = ["--space", str(tmp_path / "space.yaml"), "--work", str(tmp_path / "b"), "--json", str(found)]
    assert cli.main(["tune", "k6_d64", *common, *space]) == 0
    (record,) = tuning_records.load(found)
    assert len(record.results) == 3 and record.results[0].stem == "k6_d64"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("stem", "other", "lengths"),
    [
        ("fwd_packed_d128_causal", "fwd_packed_pack4_d128_causal", "chat16k"),
        ("fwd_paged_d128_causal", "fwd_paged_decode_d128_causal", "prefill1k_on_8k"),
        ("fwd_fp8_packed_decode_d128_causal", "fwd_fp8_packed_d128_causal", "decode64_on_4k"),
    ],
)
def test_packed_sequences_are_timed_at_their_lists_of_lengths(
    stem: str, other: str, lengths: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right, captured, and no faster than the tensor core, in every cell of a list; peers have a speed or a reason."""
    monkeypatch.chdir(WORKSPACE.root)
    path = tmp_path / "speeds.json"
    assert cli.main(["bench", stem, other, "--lengths", lengths, "--quick", "--json", str(path)]) == 0
    cells = json.loads(path.read_text())["cells"]
    results = [one for cell in cells for one in cell["results"]]
    assert {cell["problem"]["lengths"] for cell in cells} == {lengths}
    assert stem in {one["name"] for one in results if one["tflops"]}
    for one in results:
        assert one["tflops"] is None or 0 < one["tflops"] < 1979  # the dense peak of 8 bits
        assert not one["generated"] or one["captured"]
        assert (one["tflops"] is None) == (one["reason"] is not None)
