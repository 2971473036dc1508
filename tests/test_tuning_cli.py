"""`fa3gen tune` as a user meets it, with measuring processes that make their numbers up."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from rendering import CHECKOUT, ROOT, source, variants

from fa3gen import cli
from fa3gen.cli import tune
from fa3gen.compile import cache as compile_cache
from fa3gen.compile.cache import CACHE_DIR_VARIABLE
from fa3gen.design import work
from fa3gen.design.family import Family
from fa3gen.design.workspace import Workspace
from fa3gen.measure.tuning import session
from fa3gen.records import tuning_records
from fa3gen.run.dispatch import read_table
from fa3gen.spec.model import Forward
from fa3gen.verify import pipeline as verification

SPACE = "base: k6\nproblem: {head_dim: 128, mask: causal}\nspace:\n  tile.kv: [96, 100, 112]\n"


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace with the ladder's last rungs, two made-up GPUs, and no compiler."""
    root = tmp_path / "work"
    (root / "generated").mkdir(parents=True)
    (root / "specs" / "tuning").mkdir(parents=True)
    for stem in ("k4_smem", "k4_2", "k5", "k6"):
        shutil.copy(ROOT / "specs" / f"{stem}.yaml", root / "specs")
    for stem in ("k6_d128_causal", "k5_d128_causal", "k5_d64"):
        shutil.copy(CHECKOUT.module_path(stem), root / "generated")
    (root / "specs/tuning/fast.yaml").write_text(SPACE)
    monkeypatch.chdir(root)
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("FAKE_TUNING", str(tmp_path / "orders.json"))
    monkeypatch.setattr(tune, "find_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(session, "COMMAND", (sys.executable, "-P", str(ROOT / "tests/fake_tuning_worker.py")))
    monkeypatch.setattr(compile_cache, "cached_compile_for_launch", lambda path: path)
    monkeypatch.setattr(verification, "check_compile", lambda variant, compiled: (verification.Stage(True), None, None))
    order(tmp_path)
    return Workspace.find(root)


def order(tmp_path: Path, **orders: Any) -> None:
    (tmp_path / "orders.json").write_text(json.dumps({"speed": {}, "log": str(tmp_path / "asked.jsonl"), **orders}))


def heats(tmp_path: Path) -> int:
    return (tmp_path / "asked.jsonl").read_text().count('"do": "heat"')


@pytest.mark.usefixtures("workspace")
def test_a_dry_run_shows_what_is_pruned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["tune", "fast", "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "bf16_d128_causal: 3 combinations, 2 legal" in said
    assert re.search(r"1 refused: tile.kv: N of the QK product is 100, no multiple of 8", said)
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("workspace")
def test_a_dry_run_shows_what_is_tried_against_advice(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(SPACE.replace("tile.kv: [96, 100, 112]", "outputs.o: [over_q, own_buffer]"))
    assert cli.main(["tune", "fast", "--space", str(tmp_path / "space.yaml"), "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "bf16_d128_causal: 2 combinations, 2 legal" in said
    assert re.search(r"1 tried, but not advisable: outputs.o: with scheduler single_tile no next Q is loaded", said)


def test_a_search_writes_its_winner_and_its_records(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order(tmp_path, speed={"k6_d128_causal_kv112": 0.9, "cuDNN": 1.2}, peers=["cuDNN"])
    assert cli.main(["tune", "fast", "--seq", "1024,4096", "--write"]) == 0
    printed = capsys.readouterr()
    assert (workspace.specs_dir / "fast.yaml").read_text() == (
        "summary: Tuned from k6_d128_causal for 1k, 4k on A made-up GPU\n"
        "extends: k6\nproblem: {head_dim: 128}\nmask: causal\ntile: {kv: 112}\nmatrix: {}\n"
    )
    assert "tile       128 query rows x 112 keys" in (workspace.generated_dir / "fast.py").read_text()
    records = tuning_records.load_all(workspace)
    assert [(record.problem.seq_k, record.winner) for record in records] == [(1024, "fast"), (4096, "fast")]
    assert {result.stem for result in records[0].results} == {"k6_d128_causal", "k6_d128_causal_kv96", "fast"}
    assert (
        records[0].result("fast").sha256
        == tuning_records.Result.model_validate(records[1].result("fast").model_dump()).sha256
    )
    words = " ".join(printed.out.split())  # however wide the terminal is
    assert "geometric mean of the ratios to the best peer over 2 cells: 1.3" in words
    assert "next: fa3gen verify fast --evidence" in printed.err
    assert list(workspace.generated_dir.glob("*kv112*")) == []  # candidates never come here
    # From now on `fast` is the incumbent, and what it is compared with leaves it where it is.
    written = (workspace.specs_dir / "fast.yaml").read_text()
    assert cli.main(["tune", "specs/fast.yaml", "--seq", "4096", "--write"]) == 0
    assert (workspace.specs_dir / "fast.yaml").read_text() == written
    assert sorted(path.name for path in workspace.generated_dir.glob("fast*")) == ["fast.py"]


def test_each_region_has_its_winner(workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order(tmp_path, speed={"k6_d128_causal_kv96": 0.9, "k6_d128_causal_kv112 at 512": 0.8})
    taken = workspace.specs_dir / "fast_k512.yaml"
    taken.write_text("summary: somebody's\nextends: k6\n")
    command = ["tune", "fast", "--seq", "512,1024,4096", "--write"]
    assert cli.main(command) == 2
    assert "specs/fast_k512.yaml exists already" in capsys.readouterr().err
    assert not (workspace.specs_dir / "fast.yaml").exists()
    taken.unlink()
    assert cli.main(command) == 0
    assert [record.winner for record in tuning_records.load_all(workspace)] == ["fast_k512", "fast", "fast"]
    assert "tile: {kv: 96}" in (workspace.specs_dir / "fast.yaml").read_text()
    assert "summary: Tuned from k6_d128_causal for 512 on A made-up GPU" in taken.read_text()
    assert all(workspace.module_path(stem).is_file() for stem in ("fast", "fast_k512"))


def test_winners_of_one_length_have_names_of_their_own(workspace: Workspace, tmp_path: Path) -> None:
    """Three modules win, two of them with 512 keys at least; a summary names a length once."""
    (workspace.specs_dir / "tuning/fast.yaml").write_text(SPACE.replace("112]", "112, 64]"))
    speed = {"k6_d128_causal_kv96": 0.9, "k6_d128_causal_kv112 at 64x512": 0.5, "k6_d128_causal_kv64 at 8x512": 0.4}
    order(tmp_path, speed=speed)
    command = ["tune", "fast", "--seq", "512,8x512,64x512,4096", "--batch", "1,2", "--heads", "16", "--write"]
    assert cli.main(command) == 0
    summaries = {path.stem: path.read_text().splitlines()[0] for path in workspace.specs_dir.glob("fast*.yaml")}
    assert sorted(summaries) == ["fast", "fast_k512", "fast_k512_2"]
    assert summaries["fast"] == "summary: Tuned from k6_d128_causal for 512, 4k on A made-up GPU"
    assert {record.winner for record in tuning_records.load_all(workspace)} == set(summaries)


def test_the_same_command_goes_on_and_fresh_begins_anew(workspace: Workspace, tmp_path: Path) -> None:
    command = ["tune", "fast", "--seq", "1024,4096", "--json", str(tmp_path / "records.json")]
    assert cli.main(command) == 0 and heats(tmp_path) == 2
    assert cli.main(command) == 0 and heats(tmp_path) == 2
    assert cli.main([*command, "--fresh"]) == 0 and heats(tmp_path) == 4
    records = tuning_records.load(tmp_path / "records.json")
    assert [record.winner for record in records] == ["k6_d128_causal"] * 2  # equal: the incumbent stays
    assert not (workspace.evidence_dir / "tuning").exists()  # without --write


def test_what_does_not_compile_as_planned_is_dropped(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def spills(variant: Any, compiled: Any) -> Any:
        bad = variant.spec.tile.kv == 112
        return verification.Stage(not bad, "local memory accesses (LDL, STL): 0 expected, 8 found"), None, None

    monkeypatch.setattr(verification, "check_compile", spills)
    monkeypatch.delenv("COLUMNS", raising=False)  # a narrow table, as in the workers of xdist, cuts names
    order(tmp_path, speed={"k6_d128_causal_kv112": 0.5})
    assert cli.main(["tune", "fast", "--seq", "4096"]) == 0
    said = capsys.readouterr()
    assert "compiled k6_d128_causal_kv112: dropped: local memory accesses" in said.err
    assert "k6_d128_causal" in said.out and "kv112" not in said.out


def test_committed_modules_are_compared_problem_by_problem(
    workspace: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order(tmp_path, speed={"k5_d128_causal": 0.9})
    names = ["k6_d128_causal", "k5_d128_causal", "k5_d64"]
    assert cli.main(["tune", "--measure", *names, "--seq", "512,1024", "--write"]) == 0
    records = tuning_records.load_all(workspace)
    assert [(record.problem.family.label, record.problem.seq_k, record.winner) for record in records] == [
        ("bf16_d128_causal", 512, "k5_d128_causal"),
        ("bf16_d128_causal", 1024, "k5_d128_causal"),
        ("bf16_d64_full", 512, "k5_d64"),
        ("bf16_d64_full", 1024, "k5_d64"),
    ]
    assert (records[0].problem.batch, records[0].problem.heads_q) == (32, 16)
    assert records[0].result("k6_d128_causal").rounds and len(records[0].results[0].rounds) == 11
    assert "4 cells, 3 modules, 2 GPUs" in capsys.readouterr().err


def test_shapes_are_every_combination(workspace: Workspace, tmp_path: Path) -> None:
    """Of lengths, batches and heads; each once. Bursts and rounds are as asked."""
    shapes = ["--seq", "128,777,64x4096", "--batch", "1,2,1", "--heads", "32/8,16,8/1"]
    command = ["tune", "--measure", "k6_d128_causal", "k5_d128_causal", *shapes]
    assert cli.main([*command, "--burst", "0.5", "--rounds", "7", "--write"]) == 0
    records = tuning_records.load_all(workspace)
    found = {
        (r.problem.batch, f"{r.problem.heads_q}/{r.problem.heads_kv}", r.problem.seq_q, r.problem.seq_k)
        for r in records
    }
    heads, lengths = ("32/8", "16/16", "8/1"), ((128, 128), (777, 777), (64, 4096))
    assert found == {(batch, name, *length) for batch in (1, 2) for name in heads for length in lengths}
    assert len(records) == 18 and {len(result.rounds) for r in records for result in r.results} == {7}
    assert {record.sms for record in records} == {99} and records[0].results[0].eager == 2.0
    asked = [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]
    assert {entry["burst"] for entry in asked if entry["do"] == "heat"} == {0.5}
    with_default = ["--seq", "512", "--batch", "1", "--json", str(tmp_path / "default.json")]
    assert cli.main(["tune", "--measure", "k6_d128_causal", *with_default]) == 0
    [record] = tuning_records.load(tmp_path / "default.json")
    assert (record.problem.heads_q, record.problem.heads_kv) == (16, 16)


def test_a_module_that_is_not_as_its_spec_renders_is_not_measured(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace.module_path("k5_d64").write_text(source("k5_d64") + "\n# edited\n")
    assert cli.main(["tune", "--measure", "k5_d64"]) == 2
    assert "generated/k5_d64.py is not what specs/k5.yaml renders to" in capsys.readouterr().err
    assert cli.main(["tune", "--measure", "k6_d64"]) == 2
    assert "run `fa3gen render k6_d64`" in capsys.readouterr().err


def test_the_example_of_a_search_space_is_one_of_what_is_tuned(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    (workspace.specs_dir / "w80.yaml").write_text(
        "summary: x\nextends: k5\nproblem: {head_dim: 80}\nsmem: {q: 32B, k: 32B, v: 32B}\nmatrix: {mask: [causal]}\n"
    )
    assert cli.main(["tune", "w80", "--dry-run"]) == 2
    said, _, example = capsys.readouterr().err.partition("--space:\n")
    assert "write specs/tuning/w80.yaml" in said
    assert example.startswith("base: w80\nproblem: {head_dim: 80, mask: causal}\nspace:\n")
    (workspace.specs_dir / "tuning" / "w80.yaml").write_text(example)
    assert cli.main(["tune", "w80", "--heads", "16", "--dry-run"]) == 0


def test_heads_are_rounded_down_as_in_explain(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = tune.Shapes(((512, 512),), 16384, 2048, (), ())
    for stem, heads in (("fwd_d96", 21), ("fwd_d192", 10), ("fwd_d128", 16)):
        spec = variants()[stem].spec
        assert isinstance(spec, Forward)
        assert work.default_heads(spec) == (heads, heads)
        [problem] = shapes.problems(Family.of(spec))
        assert (problem.heads_q, problem.heads_kv) == (heads, heads)
    assert cli.main(["tune", "fwd_d96", "--dry-run"]) == 0
    assert "bf16_d96_full: " in capsys.readouterr().err


def test_a_packed_spec_without_a_space_is_refused_for_its_layout(
    workspace: Workspace, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = workspace.root / "drafts"
    folder.mkdir()
    (folder / "p96.yaml").write_text(
        "summary: x\nextends: fwd_packed\nproblem: {head_dim: 96}\nsmem: {q: 64B, k: 64B, v: 64B}\nmatrix: {}\n"
    )
    assert cli.main(["tune", "drafts/p96.yaml", "--dry-run"]) == 2
    assert capsys.readouterr().err == (
        "modules are tuned for dense tensors, and these are for bf16, head dim 96, no mask, packed sequences; measure "
        "them with fa3gen tune --measure\n"
    )


def test_cells_without_a_winner_are_no_success(workspace: Workspace, tmp_path: Path) -> None:
    order(tmp_path, **{"raise": ["k5_d64"]})
    assert cli.main(["tune", "--measure", "k5_d64", "--seq", "512"]) == 1


@pytest.mark.usefixtures("workspace")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a spec or module to tune"),
        (["k6", "k5"], "one name is tuned at a time, not 2; to compare modules, add --measure"),
        (
            ["k5"],
            "there is no search space for 'k5' (there are spaces for fast, fwd_d128, fwd_decode, "
            "fwd_fp8_d256_two_levels, fwd_fp8_v_permuted_d128, fwd_fp8_v_permuted_d64, fwd_small, k6, k7, k7_v_k); "
            "write specs/tuning/k5.yaml",
        ),
        (["fast", "--seq", "1k"], "'1k' is no length"),
        (["fast", "--seq", "1x2x3"], "is no length"),
        (["fast", "--seq", "1000"], "--seq 1000 does not divide --tokens 16384; give --batch"),
        (["fast", "--hidden", "100"], "--hidden 100 holds no head of dim 128; give --heads"),
        (["fwd_packed", "--hidden", "1"], "measure them with fa3gen tune --measure"),
        (["g3"], "fa3gen tune knows attention (operation: forward) only, and not g3"),
        (["specs/g3.yaml", "--dry-run"], "fa3gen tune knows attention (operation: forward) only, and not g3"),
        (["fast", "--heads", "16,6/4"], "--heads 16,6/4: 6 query heads are no multiple of 4 of k and v"),
        (["fast", "--heads", "16/8/4"], "'16/8/4' is no number of heads; write 16, or 32/8 for 8 of k and v"),
        (["fast", "--batch", "1,two"], "--batch 1,two: 'two' is no number of sequences; write 1,2"),
        (["fast", "--seq", "777"], "--seq 777 does not divide --tokens 16384; give --batch"),
        (["fast", "--budget", "soon"], "--budget soon: write seconds or minutes"),
        (["fast", "--budget", "-3s"], "--budget -3s: write"),
        (["fast", "--rounds", "4"], "4 rounds cannot tell 4 modules apart"),
        (["fast", "--space", "none.yaml"], "--space none.yaml: there is no such file"),
        (["fast", "--write", "--name", "k6"], "k6.yaml exists already"),
        (["--measure", "k5_d64", "--name", "x", "--dry-run"], "--name and --dry-run is for a search"),
        (["broken"], "specs/broken.yaml:1: summary: missing required key"),
        (["--measure", "k66"], "there is no spec or module 'k66'"),
        (["--measure", "k6_d128_causal", "k5_d128_causal", "--rounds", "3"], "3 rounds cannot tell 2 modules apart"),
    ],
)
def test_what_cannot_be_done_is_said_in_words(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "broken" in arguments:
        Path("specs/broken.yaml").write_text("extends: k6\n")
    assert cli.main(["tune", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


def test_the_table_is_made_of_all_records(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = workspace.root / "fa3gen/dispatch.yaml"
    monkeypatch.setattr("fa3gen.run.dispatch.table_path", lambda workspace: path)
    assert cli.main(["tune", "--write-table"]) == 2
    assert "there are no records in generated/evidence/tuning; make some with" in capsys.readouterr().err
    assert cli.main(["tune", "--measure", "k5_d64", "--seq", "512,1024", "--write", "--write-table"]) == 0
    assert [row.module for row in read_table(path).rows] == ["k5_d64"]
    said = " ".join(capsys.readouterr().err.split())
    made = (
        "wrote fa3gen/dispatch.yaml: 1 row; in 2 records they choose 1.000 of the fastest, geometric mean; least 1.00"
    )
    assert made in said
    monkeypatch.setattr("fa3gen.records.dispatch_table.rows_from_records", lambda records: [])  # as without any LSE
    assert cli.main(["tune", "--write-table"]) == 0
    assert " ".join(capsys.readouterr().err.split()).endswith("wrote fa3gen/dispatch.yaml: 0 rows")


def test_modules_of_8_bits_are_measured_and_have_their_rows(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the command line to the choice of a call: by rows of v and by its sequence, in this workspace's table."""
    import torch

    import fa3gen

    for spec_file in (ROOT / "specs").glob("k*.yaml"):
        shutil.copy(spec_file, workspace.specs_dir)
    stems = ["k7_d128", "k7_two_levels_d128", "k7_v_k_d128", "k7_v_k_two_levels_d128"]
    for stem in stems:
        shutil.copy(CHECKOUT.module_path(stem), workspace.generated_dir)
    order(tmp_path, speed={"k7_two_levels_d128": 0.5, "k7_v_k_d128 at 4096": 0.4, "k7_v_k_two_levels_d128 at 512": 0.3})
    command = ["tune", "--measure", *stems, "--seq", "512,4096", "--write", "--write-table"]
    assert cli.main(command) == 0
    table = (workspace.root / "dispatch.yaml").read_text()
    assert table.count("dtype: e4m3\n") == table.count("out_dtype: bf16\n") == 3
    q = torch.empty(4, 4096, 16, 128, dtype=torch.float8_e4m3fn, device="meta")
    placed = torch.empty(4, 16, 128, 4096, dtype=torch.float8_e4m3fn, device="meta").permute(0, 3, 1, 2)
    for v, stem in ((q, "k7_two_levels_d128"), (placed, "k7_v_k_d128")):
        found = fa3gen.attention.explain(q, q, v)
        assert found.stem == stem and found.row is not None and found.measured
    found = fa3gen.attention.explain(q, q[:, :512], placed[:, :512])
    assert found.stem == "k7_v_k_two_levels_d128" and found.row is not None and found.row.seq_k is not None


def test_without_a_gpu_it_says_what_can_be_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fa3gen.run import gpu

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(gpu, "why_no_hopper", lambda: "no driver")
    assert cli.main(["tune", "--measure", "k5_d64"]) == 2
    assert "needs a Hopper GPU (H100, H200, GH200): no driver. Without one, `--dry-run`" in capsys.readouterr().err


def test_lengths_and_durations() -> None:
    assert tune.parse_heads("16, 32/8,16/16") == ((16, 16), (32, 8)) and tune.parse_heads(None) == ()
    assert tune.parse_batches("2, 1,2") == (2, 1) and tune.parse_batches(None) == ()
    assert tune.parse_lengths("512, 1x4096,512") == ((512, 512), (1, 4096))
    assert [tune.parse_duration(text) for text in ("300", "300s", "5m", "1.5h")] == [300, 300, 300, 5400]
