"""`fa3gen trace` as a user meets it: files, summary, exit codes."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from fa3gen import cli
from fa3gen.cpu.trace_files import SCHEMA
from fa3gen.design.family import PagedShape, Shape
from fa3gen.design.workspace import Workspace
from fa3gen.inspect import tracing
from fa3gen.inspect.tracing import busiest

ROOT = Path(__file__).resolve().parents[1]
STEM, PACKED, PAGED = "k4_2_d64", "fwd_packed_d64_causal", "fwd_paged_d64_causal"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace of the user's own with one module, generated from a spec of the package; compiled once for all."""
    root = tmp_path_factory.mktemp("workspace")
    (root / "specs").mkdir()
    (root / "generated").mkdir()
    (root / "cache").mkdir()
    return root


@pytest.fixture
def workspace(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That workspace as the working directory, with the module as it is committed and nothing written yet."""
    shutil.copy(ROOT / "generated" / f"{STEM}.py", directory / "generated")
    for file in directory.glob("*.json"):
        file.unlink()
    monkeypatch.setenv("FA3GEN_CACHE_DIR", str(directory / "cache"))
    monkeypatch.chdir(directory)
    monkeypatch.setenv("COLUMNS", "160")
    return directory


def test_one_cta_of_a_module(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", STEM, "-o", "traces"]) == 0
    files = {path.name: path for path in (workspace / "traces").iterdir()}
    assert files.keys() == {f"{STEM}.trace.json", f"{STEM}.perfetto.json"}
    trace = json.loads(files[f"{STEM}.trace.json"].read_text(encoding="utf-8"))
    jsonschema.validate(trace, SCHEMA)
    assert (trace["executed_on"], trace["file"]) == ("CPU model of sm_90a (not a GPU)", f"generated/{STEM}.py")
    assert trace["problem"] == {
        **{"batch": 1, "seq_q": 128, "seq_k": 320, "heads_q": 1, "heads_kv": 1, "head_dim": 64, "seed": 0}
    }  # 2 stages twice round and one more, of 64
    (cta,) = trace["ctas"]
    lines = (workspace / "generated" / f"{STEM}.py").read_text(encoding="utf-8").splitlines()
    for wait in (event for event in cta["events"] if event["label"].startswith(("k_full", "v_full"))):
        if wait["kind"] == "wait":
            assert f"{wait['label'][0]}_ring.consumer_wait(drain)" in lines[wait["line"] - 1]
    chrome = json.loads(files[f"{STEM}.perfetto.json"].read_text(encoding="utf-8"))
    assert {"name": "warp 3 (warpgroup 0)"} in [event.get("args") for event in chrome["traceEvents"]]
    assert str(workspace) not in json.dumps([trace, chrome])
    out = capsys.readouterr().out
    assert "executed on the CPU model of sm_90a (not a GPU)" in out
    assert "CTA (0, 0, 0) of (1, 1, 1): 11 TMA loads, 80 wgmma, 1 TMA stores" in out
    assert "not speed" in out
    assert [line.split()[0] for line in out.splitlines() if "; " in line and "line" in line] == ["1", "4"]


def keys_of_cta(workspace: Path, stem: str) -> int:
    """Tiles of K that the CTA of a trace loads."""
    trace = json.loads((workspace / f"{stem}.trace.json").read_text(encoding="utf-8"))
    jsonschema.validate(trace, SCHEMA)
    first, second = trace["ctas"]
    assert [each["kernel"] for each in (first, second)] == ["attention_kernel", "combine_kernel"]
    return sum(event["kind"] == "load" and event["label"].startswith("K") for event in first["events"])


def test_a_kernel_whose_keys_come_in_parts(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One CTA is traced: it has its part, of as many as so many SMs have room for."""
    stem = "fwd_decode_d64"
    assert cli.main(["trace", stem]) == 0
    said = capsys.readouterr().out
    assert "batch 1, 4 x 2688, 16/1 heads; keys in parts: 6 of each tile of queries" in said
    assert "CTA (0, 0, 0) of (1, 6, 1)" in said and "combine_kernel, CTA (0, 0, 0) of (4, 16, 1)" in said
    assert keys_of_cta(workspace, stem) == 7  # of 42
    trace = json.loads((workspace / f"{stem}.trace.json").read_text(encoding="utf-8"))
    assert trace["problem"]["sms"] == 3
    assert cli.main(["trace", stem, "--sms", "1", "--seq-k", "2560"]) == 0
    assert keys_of_cta(workspace, stem) == 20  # two CTAs share an SM
    assert cli.main(["trace", stem, "--seq-k", "192"]) == 0
    assert "CTA (0, 0, 0) of (1, 1, 1)" in capsys.readouterr().out
    assert (workspace / f"{stem}.perfetto.json").is_file()


def test_a_kernel_that_is_dealt_whole_parts(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 2,730 keys six parts for each of two tiles, and of 64 one: 13, of which the first of three CTAs has five."""
    stem = "fwd_packed_decode_fixed_d64"
    assert cli.main(["trace", stem]) == 0
    assert "keys in parts: 13 of 512 keys, 5 parts for each of 3 SMs" in capsys.readouterr().out
    assert keys_of_cta(workspace, stem) == 5 * 4


def test_heads_of_a_tile_that_takes_any_group(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten heads of one kv head are a tile of eight and one of two; a tile of four takes no group of ten.

    Of two sequences these are four tiles, one of which the other one of two CTAs has.
    """
    stem = "fwd_packed_mixed_any_group_d64_causal"
    assert cli.main(["trace", stem, "--heads", "10", "--heads-kv", "1", "--lengths", "3x70,1x9"]) == 0
    trace = json.loads((workspace / f"{stem}.trace.json").read_text(encoding="utf-8"))
    events = trace["ctas"][0]["events"]
    assert sum(event["kind"] == "load" and event["label"].startswith("Q") for event in events) == 3
    assert cli.main(["trace", "fwd_packed_pack4_d128_causal", "--heads", "10", "--heads-kv", "1"]) == 2
    assert "holds 4 query heads of one kv head; use --heads 4" in capsys.readouterr().err


def test_a_kernel_with_even_shares(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three CTAs share 45 steps: 22 tiles of keys of each of two tiles of queries, and another sequence's one."""
    stem = "fwd_packed_decode_d64_causal"
    assert cli.main(["trace", stem]) == 0
    assert "CTA (0, 0, 0) of (1, 3, 1)" in capsys.readouterr().out
    assert keys_of_cta(workspace, stem) == 15
    assert cli.main(["trace", stem, "--cta", "2"]) == 0
    assert "CTA (0, 2, 0) of (1, 3, 1)" in capsys.readouterr().out
    assert keys_of_cta(workspace, stem) == 15
    assert cli.main(["trace", stem, "--sms", "1"]) == 0
    assert keys_of_cta(workspace, stem) == 45


def test_the_same_command_writes_the_same_bytes(workspace: Path) -> None:
    """In another process, too, and with the compiled module at hand in less than ten seconds of processor time."""
    command = ["trace", STEM, "--seq-k", "100", "--seed", "3", "--schedule", "4"]
    assert cli.main([*command, "-o", "first"]) == 0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "fa3gen", *command, "-o", "second"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    names = {path.name for path in (workspace / "first").iterdir()}
    assert names == {path.name for path in (workspace / "second").iterdir()} and len(names) == 2
    for name in names:
        assert (workspace / "first" / name).read_bytes() == (workspace / "second" / name).read_bytes()


def test_a_chosen_cta_and_schedule(workspace: Path) -> None:
    command = ["trace", STEM, "--seq-q", "200", "--seq-k", "70", "--heads", "2", "--heads-kv", "1", "--batch", "2"]
    assert cli.main([*command, "--cta", "5", "--schedule", "0"]) == 0
    trace = json.loads((workspace / f"{STEM}.trace.json").read_text(encoding="utf-8"))
    assert trace["schedule"] == "by warpgroup, in turn, late completion"
    (cta,) = trace["ctas"]
    assert (cta["index"], cta["grid"]) == ([5, 0, 0], [8, 1, 1])
    # Tile 1 of two, head 0 of two, the second batch entry; (column, row, head, batch).
    loads = {event["label"]: event["details"]["coordinates"] for event in cta["events"] if event["kind"] == "load"}
    assert loads["Q"] == [0, 128, 0, 1]
    assert loads["K stage 0"] == [0, 64, 0, 1]
    assert cli.main([*command, "--cta", "all"]) == 0
    trace = json.loads((workspace / f"{STEM}.trace.json").read_text(encoding="utf-8"))
    assert [cta["index"][0] for cta in trace["ctas"]] == list(range(8))


def test_a_kernel_that_deadlocks_leaves_its_trace(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = workspace / "generated" / f"{STEM}.py"
    source = path.read_text(encoding="utf-8")
    release = "        v_ring.consumer_release(drain)  # this warp has read V\n"
    assert source.count(release) == 1
    path.write_text(source.replace(release, ""), encoding="utf-8")
    assert cli.main(["trace", STEM]) == 1
    out = capsys.readouterr().out
    assert "deadlock: no warp can go on" in out
    assert "v_empty[0] phase 0" in out and ": for ever" in out
    trace = json.loads((workspace / f"{STEM}.trace.json").read_text(encoding="utf-8"))
    jsonschema.validate(trace, SCHEMA)
    assert trace["report"].startswith("deadlock")
    assert f", generated/{STEM}.py:" in trace["report"] and str(workspace) not in trace["report"]
    (cta,) = trace["ctas"]
    stuck = {(event["label"], *event["warps"]) for event in cta["events"] if event["end"] is None}
    assert ("v_empty[0] phase 0", 0) in stuck
    assert not any(warp["ended"] for warp in cta["warps"])


def test_lengths_of_packed_sequences(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is executed: what is asked for is in the files and in the summary."""
    asked: list[tracing.Problem] = []
    monkeypatch.setattr(tracing, "run", lambda path, variant, problem, *rest: asked.append(problem))
    assert cli.main(["trace", PAGED, "--lengths", "100,0,1x300", "--page", "32", "--heads", "4"]) == 0
    assert asked == [tracing.Problem(PagedShape((100, 0, 1), (100, 0, 300), 4, 4, page=32))]
    trace = json.loads((workspace / f"{PAGED}.trace.json").read_text(encoding="utf-8"))
    jsonschema.validate(trace, SCHEMA)
    sizes = {"heads_q": 4, "heads_kv": 4, "page": 32, "head_dim": 64, "seed": 0}
    assert trace["problem"] == {"lengths_q": [100, 0, 1], "lengths_k": [100, 0, 300], **sizes}
    assert "3 sequences, 101 x 400, 4 heads, pages of 32: 100 x 100, 0 x 0, 1 x 300;" in capsys.readouterr().out
    assert cli.main(["trace", PAGED]) == 0
    # 192 rows in a tile of queries, 128 in one of keys, 3 stages.
    assert asked[1] == tracing.Problem(PagedShape((240, 0, 64), (554, 0, 64), 1, 1, page=16))


def written_by_hand(workspace: Path) -> list[Path]:
    """All files but those of the compile cache."""
    return sorted(path for path in workspace.rglob("*") if "cache" not in path.parts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["k9"], "there is no spec or module 'k9'"),
        ([STEM, "--cta", "1,2"], "--cta 1,2: a number N, an index X,Y,Z, or all"),
        ([STEM, "--cta", "-1"], "--cta -1: a number N, an index X,Y,Z, or all"),
        ([STEM, "--cta", "7"], "there is no CTA 7 in a grid of (1, 1, 1); choose one inside"),
        ([STEM, "--heads", "3", "--heads-kv", "2"], "--heads 3 is no multiple of --heads-kv 2; choose one that is"),
        ([STEM, "--lengths", "3,4"], "takes dense tensors, of which --lengths says nothing; give --batch, --seq-q and"),
        ([PACKED, "--seq-k", "9"], f"{PACKED} takes packed sequences, of which --seq-k says nothing; give --lengths"),
        ([PACKED, "--page", "16"], "--page 16 does not fit this module (packed): it has no pages, leave --page out"),
        ([PAGED, "--page", "24"], "--page 24 does not fit this module (paged): give a multiple of 16 rows"),
        ([PACKED, "--lengths", "3,x4"], "--lengths 3,x4: 'x4' is no length; write 300,0,1x900"),
        ([PACKED, "--lengths", "0x4,0"], "--lengths 0x4,0: there are no rows of queries, or of keys"),
        ([STEM, "--seq-k", "1", "-o", f"generated/{STEM}.py"], "choose another --output"),
    ],
)
def test_requests_that_cannot_be_served(
    workspace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    before = written_by_hand(workspace)
    assert cli.main(["trace", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert written_by_hand(workspace) == before


@pytest.mark.parametrize(
    ("stem", "seq_q", "seq_k", "cta"),
    [
        ("k4_2_d64", 500, 500, 0),  # all see the same
        ("k4_2_d64_causal", 500, 500, 0),  # the last rows, which see the most keys, come first
        ("k4_2_d64_causal", 500, 128, 0),  # those before see none
        ("k4_2_window_d64_window200_70", 900, 900, 2),  # from row 256 on the whole window lies inside
        ("k1_d64_causal", 64, 64, 0),
        ("fwd_d128_pack4_causal", 100, 1026, 0),  # 32 positions in a tile: rows 96 to 99 see keys of a tile more
    ],
)
def test_the_default_cta_has_the_most_tiles(stem: str, seq_q: int, seq_k: int, cta: int) -> None:
    (variant,) = Workspace.find(ROOT).resolve(stem)
    assert busiest(variant.spec, Shape(1, seq_q, seq_k, variant.spec.tile.pack_heads, 1)) == cta
