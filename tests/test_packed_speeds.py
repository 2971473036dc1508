"""Timing packed sequences and pages, without a GPU: inputs, what is found wrong, who is timed, and what is recorded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rendering import ROOT

from fa3gen import cli
from fa3gen.cli import packed_speeds as shown
from fa3gen.design.family import Family, PackedShape
from fa3gen.measure import packed_speeds
from fa3gen.measure.packed_speeds import Inputs, PackedCompetitor, Speed, Wanted, measure, peer_competitors
from fa3gen.measure.peers import PEERS, PackedCall
from fa3gen.records import packed_records
from fa3gen.records.packed_records import PackedProblem
from fa3gen.run import gpu
from fa3gen.spec.model import CausalMask, Mask, NoMask, WindowMask
from fa3gen.verify import reference

CPU = torch.device("cpu")
LENGTHS_Q, LENGTHS_K = (3, 5, 1), (7, 5, 9)
STEM = "fwd_packed_d128_causal"


def problem(mask: Mask | None = None, **facts: Any) -> PackedProblem:
    window = (2, 0) if isinstance(mask, WindowMask) else None
    family = Family("bf16", 64, 64, mask or CausalMask(), **{"layout": "packed", **facts})
    return PackedProblem.of(family, "short", PackedShape(LENGTHS_Q, LENGTHS_K, 4, 2, window=window))


def right(asked: PackedProblem, wide: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """O, sequence by sequence, by the reference."""
    q, k, v, *_ = wide
    reach = (None, 0) if asked.family.mask == CausalMask() else (2, 0) if asked.window else (None, None)
    found, rows, keys = [], 0, 0
    for of_q, of_k in zip(LENGTHS_Q, LENGTHS_K, strict=True):
        one = q[None, rows : rows + of_q], k[None, keys : keys + of_k], v[None, keys : keys + of_k]
        found.append(reference.attention(*one, reach=reach, compute_dtype=torch.float32).out[0])
        rows, keys = rows + of_q, keys + of_k
    return torch.cat(found)


class FakeTimer:
    """A launch takes as many milliseconds as its `speed` says; nothing is captured that is called `eager`."""

    def __init__(self) -> None:
        self.bursts: list[int] = []

    def once(self, launch: Any) -> float:
        launch()
        return float(launch.milliseconds)

    def eager(self, launch: Any, count: int) -> Callable[[], float]:
        return lambda: float(launch.milliseconds)

    def burst(self, launch: Any, count: int) -> tuple[Callable[[], float], bool]:
        self.bursts.append(count)
        return self.eager(launch, count), launch.captured


def competitor(
    name: str, milliseconds: float = 1.0, *, generated: bool = True, captured: bool = True, off: float = 0.0
) -> PackedCompetitor:
    def prepare(asked: PackedProblem, call: PackedCall) -> Any:
        def launch() -> torch.Tensor:
            return right(asked, Inputs.of(asked, CPU).wide) + off

        launch.milliseconds, launch.captured = milliseconds, captured  # type: ignore[attr-defined]
        return launch

    return PackedCompetitor(name, generated, prepare)


# Inputs


def test_pages_hold_the_rows_that_packed_sequences_have() -> None:
    made = Inputs.of(problem(layout="paged", page_rows=4), CPU)
    call, (_, k, v, _, begins) = made.call, made.wide
    assert call.page_table is not None and call.seqused_k is not None and call.cu_seqlens_k is None
    assert call.seqused_k.tolist() == list(LENGTHS_K)
    for pages, rows in ((call.k, k), (call.v, v)):
        for number, length in enumerate(LENGTHS_K):
            found = pages[call.page_table[number].long()].flatten(0, 1)[:length]
            assert torch.equal(found, rows[begins[number] : begins[number] + length])


@pytest.mark.parametrize(
    ("facts", "dtypes"),
    [
        ({}, (torch.bfloat16, torch.bfloat16)),
        ({"kv_dtype": "e4m3"}, (torch.bfloat16, torch.float8_e4m3fn)),
    ],
)
def test_a_call_has_the_dtypes_of_its_problem_and_the_numbers_of_its_reference(facts: Any, dtypes: Any) -> None:
    made = Inputs.of(problem(**facts), CPU)
    assert (made.call.q.dtype, made.call.k.dtype) == dtypes
    for asked, wide in zip((made.call.q, made.call.k, made.call.v), made.wide, strict=False):
        assert torch.equal(asked.to(wide.dtype), wide)
    assert (made.call.max_seqlen_q, made.call.max_seqlen_k) == (max(LENGTHS_Q), max(LENGTHS_K))


# What is found wrong


@pytest.mark.parametrize("mask", [NoMask(), CausalMask(), WindowMask()], ids=lambda mask: mask.kind)
def test_errors_are_those_of_the_mask(mask: Mask) -> None:
    asked = problem(mask)
    wide = Inputs.of(asked, CPU).wide
    wanted, out = Wanted.of(asked, wide), right(asked, wide)
    assert wanted.error_of(out) < 1e-5
    out[4] += 1.0
    assert wanted.error_of(out) > 0.1
    out[4] = torch.nan
    assert not wanted.error_of(out) < 1e9


@pytest.mark.parametrize("mask", [NoMask(), CausalMask(), WindowMask()], ids=lambda mask: mask.kind)
def test_of_long_sequences_the_last_rows_of_the_longest_are_checked(
    mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_speeds, "CHECKED_ROWS", 0)
    monkeypatch.setattr(packed_speeds, "LAST_ROWS", 2)
    asked = problem(mask)
    wide = Inputs.of(asked, CPU).wide
    wanted, out = Wanted.of(asked, wide), right(asked, wide)
    assert wanted.rows == (slice(6, 8),) and wanted.error_of(out) < 1e-5
    out[5] += 1.0
    assert wanted.error_of(out) < 1e-5
    out[7] += 1.0
    assert wanted.error_of(out) > 0.1


def test_what_is_wrong_is_not_timed_and_says_why() -> None:
    timer = FakeTimer()
    wrong, fine = measure(problem(), [competitor("wrong", off=0.5), competitor("fine", 2.0)], CPU, timer)
    assert wrong.failed and wrong.tflops is None and "wrong result: relative error" in str(wrong.reason)
    flops = problem().family.flops(problem().shape)
    assert fine == Speed("fine", True, tflops=pytest.approx(flops / 2.0 / 1e9), captured=True)
    assert timer.bursts == [4]  # of 2 ms in 8 ms


def test_who_cannot_be_captured_is_timed_eagerly_unless_it_is_ours() -> None:
    them = competitor("theirs", generated=False, captured=False)
    ours, theirs = measure(problem(), [competitor("ours", captured=False), them], CPU, FakeTimer())
    assert ours.failed and ours.reason == "could not be captured in a CUDA graph"
    assert theirs.tflops is not None and not theirs.captured and not theirs.failed
    ((title, table),) = shown.tables([(problem(), [ours, theirs])])
    assert title == "TFLOP/s, bf16 d64 causal packed, heads 4/2; replayed from a CUDA graph"
    assert list(table.columns[1].cells) == ["", "[bold]0 (eager)[/]"]


# Peers

INTERFACE = """
def flash_attn_varlen_func(q, k, v, **named):
    return "varlen", named

def flash_attn_with_kvcache(q, k_cache, v_cache, **named):
    return "cache", named
"""


@pytest.fixture
def flash_attention_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn_interface.py").write_text(INTERFACE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)


@pytest.mark.usefixtures("flash_attention_3")
@pytest.mark.parametrize(
    ("facts", "function", "names"),
    [
        ({}, "varlen", {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "causal"}),
        (
            {"layout": "paged", "page_rows": 4},
            "cache",
            {"cu_seqlens_q", "max_seqlen_q", "cache_seqlens", "page_table", "causal"},
        ),
    ],
)
def test_flash_attention_3_takes_packed_sequences_and_a_cache_of_pages(
    facts: Any, function: str, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fa3gen.measure import peers

    monkeypatch.setattr(peers, "_first", lambda returned: returned)
    (peer,) = (peer for peer in PEERS if peer.name == "flash-attn-3")
    (one,) = peer_competitors([peer])
    call = Inputs.of(problem(**facts), CPU).call
    called, named = one.prepare(problem(**facts), call)()  # type: ignore[misc]
    assert called == function and set(named) == names and named["causal"] is True


def test_peers_that_know_no_packed_sequences_say_so() -> None:
    speeds = measure(problem(), peer_competitors(PEERS[:2]), CPU, FakeTimer())
    assert [one.reason for one in speeds] == [f"{peer.name} takes no packed sequences" for peer in PEERS[:2]]
    assert not any(one.failed for one in speeds)
    (one,) = measure(problem(kv_dtype="e4m3"), peer_competitors(PEERS[3:]), CPU, FakeTimer())
    assert one.reason == "flash-attn-3 takes no k and v of another dtype than q"


# The commands


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A GPU that is not there; everybody has a speed by name, 100, or is wrong. Returns the labels of the cells."""
    from fa3gen.compile import cache
    from fa3gen.measure import bench

    asked: list[str] = []

    def measured(cell: PackedProblem, competitors: Any, *rest: Any, **how: Any) -> list[Speed]:
        asked.append(cell.label)
        return [Speed(one.name, one.generated, 100.0, captured=True) for one in competitors]

    monkeypatch.setattr(packed_speeds, "measure", measured)
    monkeypatch.setattr(cache, "cached_compile_for_launch", lambda path: path)
    monkeypatch.setattr(bench, "require_hopper", lambda command="": torch.device("cuda", 0))
    around = gpu.Environment(**{**vars(gpu.environment()), "gpu": "NVIDIA H200"})
    monkeypatch.setattr(gpu, "environment", lambda: around)
    monkeypatch.setattr(gpu, "sm_count", lambda index: 132)
    monkeypatch.setattr(packed_records, "directory", lambda workspace: tmp_path / "packed")
    return asked


def test_bench_shows_a_module_at_its_lists_of_lengths(pretended: list[str], capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "speeds.json"
    assert cli.main(["bench", STEM, "--lengths", "chat16k", "--no-peers", "--json", str(path)]) == 0
    assert pretended == ["bf16 d128 causal packed chat16k, heads 16", "bf16 d128 causal packed chat16k, heads 32/8"]
    assert "TFLOP/s, bf16 d128 causal packed, heads 32/8" in capsys.readouterr().out
    cells = json.loads(path.read_text())["cells"]
    assert [[one["name"] for one in cell["results"]] for cell in cells] == [[STEM]] * 2
    everything = ["bench", "fwd_packed_d128", "--mask", "none", "--lengths", "chat16k", "--no-peers"]
    assert cli.main(everything) == 0 and "bf16 d128 full packed" in capsys.readouterr().out  # as `list` calls it
    assert cli.main(["bench", STEM, "--lengths", "nowhere"]) == 2
    said = capsys.readouterr().err
    assert "the lists of lengths of these modules are" in said and "chat16k, chat64k, documents64k" in said


def test_modules_of_the_package_and_beside_their_spec_are_timed_where_they_lie(
    pretended: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """In a folder without `generated/`; no record is made of them there."""
    asked: list[Path] = []
    competitors = packed_speeds.module_competitor
    monkeypatch.setattr(
        packed_speeds, "module_competitor", lambda variant, path: asked.append(path) or competitors(variant, path)
    )
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "drafts" / "mine.yaml"
    mine.parent.mkdir()
    mine.write_text("summary: x\nextends: fwd_packed\nproblem: {head_dim: 128}\nmask: causal\nmatrix: {}\n")
    assert cli.main(["render", "drafts/mine.yaml"]) == 0
    for name, path in ((STEM, ROOT / "generated" / f"{STEM}.py"), ("drafts/mine.yaml", mine.with_suffix(".py"))):
        asked.clear()
        assert cli.main(["bench", name, "--lengths", "chat16k", "--no-peers"]) == 0
        assert set(asked) == {path}
        assert "TFLOP/s, bf16 d128 causal packed, heads 32/8" in capsys.readouterr().out
        assert cli.main(["tune", "--measure", name]) == 2
        assert "records are kept of modules in" in capsys.readouterr().err


def test_tune_measures_whole_cells_and_records_them(pretended: list[str], capsys: Any, tmp_path: Path) -> None:
    """All that serve a cell are timed with the module that is named, since a row of the table compares them."""
    assert cli.main(["tune", "--measure", STEM, "--write"]) == 0
    written = sorted((tmp_path / "packed").glob("*.json"))
    assert len(written) == len(pretended) > 3
    record = packed_records.PackedRecord.model_validate_json(written[0].read_text())
    assert STEM in {result.stem for result in record.results} and len(record.results) > 1
    assert record.problem.file_name == written[0].name and (record.gpu, record.sms) == ("NVIDIA H200", 132)
    assert f"wrote {len(written)} records" in capsys.readouterr().err


def test_cells_before_and_after_a_wrong_one_are_recorded(
    pretended: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    right, reason = packed_speeds.measure, "wrong result: relative error 0.7"

    def measured(cell: PackedProblem, *rest: Any, **how: Any) -> list[Speed]:
        found = right(cell, *rest, **how)
        return [Speed(STEM, True, reason=reason)] if "chat64k, heads 16" in cell.label else found

    monkeypatch.setattr(packed_speeds, "measure", measured)
    assert cli.main(["tune", "--measure", STEM, "--write"]) == 2
    assert f"{STEM}: {reason}, bf16 d128 causal packed chat64k, heads 16" in capsys.readouterr().err
    assert len(list((tmp_path / "packed").glob("*.json"))) == len(pretended) - 1 > 3


def test_a_wrong_module_records_nothing(
    pretended: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    wrong = [Speed(STEM, True, reason="wrong result: relative error 0.7")]
    monkeypatch.setattr(packed_speeds, "measure", lambda *cell, **how: wrong)
    assert cli.main(["tune", "--measure", STEM, "--write"]) == 2
    assert f"{STEM}: wrong result: relative error 0.7, bf16 d128" in capsys.readouterr().err
    assert not (tmp_path / "packed").exists()
    assert cli.main(["bench", STEM, "--quick"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tune", "--measure", STEM, "k6_d128"], "name them in two commands"),
        (["tune", "--measure", STEM, "--seq", "512"], "have no --seq; leave that out"),
        (["tune", "--measure", STEM, "--heads", "16"], "have no --heads; leave that out"),
        (["bench", STEM, "--seq-len", "512"], "have no --seq-len; leave that out"),
        (["bench", STEM, "--host", "--evidence"], "leave out --evidence"),
        (["bench", "k6_d128", "--lengths", "chat16k"], "--lengths is for packed sequences"),
    ],
)
def test_options_that_say_nothing_are_refused(arguments: list[str], message: str, capsys: Any) -> None:
    assert cli.main(arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_modules_without_a_list_of_lengths_are_named(capsys: Any) -> None:
    stem = "fwd_fp16_packed_d192_128_causal"  # v is not as wide as k
    assert cli.main(["bench", stem]) == 2
    assert f"no list of lengths is for {stem}" in capsys.readouterr().err
