"""Tuning runs with measuring processes that make their numbers up: journal, resuming, hangs, several GPUs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering import ROOT, variants

from fa3gen.base.errors import UserError
from fa3gen.design.family import Family, Shape
from fa3gen.measure.tuning import heats, report
from fa3gen.measure.tuning.client import LIMITS_S, Gone, Worker
from fa3gen.measure.tuning.journal import Journal
from fa3gen.measure.tuning.session import COMMAND, Cell, Module, Tuner, distribute
from fa3gen.records.tuning_records import TunedProblem
from fa3gen.run import gpu

FAKE = (sys.executable, "-P", str(ROOT / "tests/fake_tuning_worker.py"))
LIMITS = {**dict.fromkeys(LIMITS_S, 20.0), "check": 2.0}


def module(stem: str, of: str = "k6_d128_causal") -> Module:
    return Module(stem, Path(f"{stem}.py"), f"{len(stem):x}" * 64, variants()[of].spec)


def cell(stems: list[str], seq: int = 4096, of: str = "k6_d128_causal", rounds: int = 25) -> Cell:
    problem = TunedProblem.of(Family.of(variants()[of].spec), Shape(4, seq, seq, 16, 16))
    return Cell(problem, tuple(module(stem, of) for stem in stems), tuple(heats.plan(len(stems) - 1, rounds)))


class Setting:
    """A directory with the orders for the fake processes, and what they were asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.orders = folder, folder / "orders.json"
        self.log, self.said = folder / "asked.jsonl", []  # type: ignore[var-annotated]
        monkeypatch.setenv("FAKE_TUNING", str(self.orders))

    def tuner(self, cells: list[Cell], gpus: tuple[str, ...] = ("0",), **facts: Any) -> Tuner:
        journal = Journal(self.folder / "journal.jsonl")
        given = {"peers": True, "jobs": 2, "command": FAKE, "limits": LIMITS, "say": self.said.append, **facts}
        return Tuner(cells=cells, journal=journal, gpus=gpus, logs=self.folder / "logs", **given)

    def order(self, **orders: Any) -> None:
        self.orders.write_text(json.dumps({"speed": {}, "log": str(self.log), **orders}))

    def asked(self, what: str = "heat") -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [entry for entry in map(json.loads, lines) if entry["do"] == what]


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    return Setting(tmp_path, monkeypatch)


# -- the journal


def test_a_journal_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    first = Journal(path)
    first.append("heat", cell="a", stage=0, times={"x": [1.0]})
    first.append("heat", cell="a", stage=1, times={})
    first.close()
    again = Journal(path)
    assert again.find("heat", cell="a", stage=0) == {"kind": "heat", "cell": "a", "stage": 0, "times": {"x": [1.0]}}
    assert again.find("heat", cell="b") is None and again.find("out", cell="a") is None
    assert len(again.all("heat")) == 2
    assert Journal(path, fresh=True).all("heat") == []


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 200))
def test_a_line_cut_short_was_never_written(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    journal = Journal(path)
    for stage in range(4):
        journal.append("heat", cell="a", stage=stage)
    whole = path.read_bytes()
    path.write_bytes(whole[: min(cut, len(whole))])
    kept = path.read_bytes().count(b"\n")
    spoilt = Journal(path)
    assert [entry["stage"] for entry in spoilt.all("heat")] == list(range(kept))
    spoilt.append("heat", cell="a", stage=9)
    assert [entry["stage"] for entry in Journal(path).all("heat")] == [*range(kept), 9]


def test_a_journal_that_cannot_be_written_says_where_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="name another directory with --work"):
        Journal(tmp_path / "file" / "journal.jsonl")


# -- runs


def test_the_faster_candidate_wins_and_all_is_recorded(setting: Setting) -> None:
    stems = ["k6_d128_causal", *(f"c{index}" for index in range(8))]
    errors = {"c5": 0.0024, "cuDNN": 0.0022}
    setting.order(speed={"c5": 0.9, "cuDNN": 1.1}, peers=["cuDNN", "fa4"], error=errors, **{"raise": ["fa4"]})
    (outcome,) = setting.tuner([cell(stems)]).run()
    assert outcome.winner == "c5"
    assert list(outcome.times)[0] == "k6_d128_causal" and len(outcome.times) == 4  # three finalists beside it
    record = outcome.record("2026-11-21")
    assert record is not None
    assert (record.gpu, record.ptxas, record.winner) == ("A made-up GPU", "12.9.83", "c5")
    assert [(peer.name, peer.error) for peer in record.peers] == [("cuDNN", 0.0022)]
    assert {result.stem: result.error for result in record.results}["c5"] == 0.0024
    assert record.absent == {"fa4": "raised RuntimeError: made up"}
    assert report.ratio_to_peer(record) == pytest.approx(1.1 / 0.9, rel=0.01)
    second = report.runner_up(record)
    assert second is not None and second.stem != "c5"
    assert [len(entry["stems"]) for entry in setting.asked()] == [9, 4]
    assert len(setting.asked("load")) == 1 and len(setting.asked("hello")) == 1


def test_eager_times_and_the_sms_are_recorded(setting: Setting) -> None:
    """Of the last heat only: nobody is out of a race for a slow host."""
    stems = ["incumbent", *(f"c{index}" for index in range(8))]
    setting.order(speed={"c5": 0.9}, eager={"c5": 0.95, "cuDNN": 3.0}, peers=["cuDNN"], uncaptured=["cuDNN"])
    (outcome,) = setting.tuner([cell(stems)]).run()
    assert [(entry["stems"][0], entry["eager"]) for entry in setting.asked()] == [("incumbent", 0), ("incumbent", 3)]
    record = outcome.record("2026-11-21")
    assert record is not None and record.sms == 99
    eager = {result.stem: result.eager for result in record.results}
    assert (eager["c5"], eager["incumbent"]) == (0.95, 2.0)
    assert [(peer.eager, peer.captured) for peer in record.peers] == [(3.0, False)]
    assert all(result.captured for result in record.results)
    assert "cuDNN: launched one by one, since it could not be captured in a CUDA graph" in report.notes([outcome])


def test_every_group_of_heads_is_known_before_anything_is_timed(setting: Setting) -> None:
    """Peers compile for each; what the journal has needs nothing."""
    setting.order()
    problem, modules = cell(["a", "b"]).problem, cell(["a", "b"]).modules
    groups = [problem.model_copy(update={"heads_kv": heads}) for heads in (16, 4, 2, 4)]
    cells = [Cell(group.model_copy(update={"seq_q": 64 + n}), modules, tuple(heats.plan(1))) for n, group in
             enumerate(groups)]  # fmt: skip
    setting.tuner(cells[:1]).run()
    setting.tuner(cells).run()
    assert [entry["groups"] for entry in setting.asked("load")] == [[1], [4, 8]]


def test_bursts_of_another_length_are_measured_anew(setting: Setting) -> None:
    setting.order()
    for burst in (7.0, 0.5, 0.5):
        setting.tuner([cell(["incumbent", "a"])], burst_ms=burst).run()
    assert [entry["burst"] for entry in setting.asked()] == [7.0, 0.5]


def test_equals_keep_the_incumbent(setting: Setting) -> None:
    setting.order()
    (outcome,) = setting.tuner([cell(["incumbent", "a", "b", "c"])]).run()
    assert outcome.winner == "incumbent"


def test_nothing_that_was_finished_is_measured_again(setting: Setting) -> None:
    cells = [cell(["incumbent", "a"], seq) for seq in (512, 1024, 2048)]
    setting.order(speed={"a": 0.9})
    setting.tuner(cells[:2]).run()
    assert [entry["seq"] for entry in setting.asked()] == [512, 1024]
    outcomes = setting.tuner(cells).run()
    assert [entry["seq"] for entry in setting.asked()] == [512, 1024, 2048]
    assert [outcome.winner for outcome in outcomes] == ["a"] * 3
    assert setting.tuner(cells).run() == outcomes
    assert len(setting.asked("hello")) == 2  # nothing to do: no process


def test_other_files_rounds_or_peers_are_measured_anew(setting: Setting) -> None:
    setting.order()
    setting.tuner([cell(["incumbent", "a"])]).run()
    setting.tuner([cell(["incumbent", "b"])]).run()
    setting.tuner([cell(["incumbent", "a"], rounds=11)]).run()
    setting.tuner([cell(["incumbent", "a"])], peers=False).run()
    assert len(setting.asked()) == 4


SCRIPT = """
import signal
import sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the tests in the background
sys.path.insert(0, {tests!r})
from test_tuning_session import LIMITS, FAKE, cell
from fa3gen.measure.tuning.journal import Journal
from fa3gen.measure.tuning.session import Tuner
folder = Path({folder!r})
cells = [cell(["incumbent", "a"], seq) for seq in (512, 1024, 2048, 4096)]
Tuner(cells, Journal(folder / "journal.jsonl"), ["0"], folder / "logs", command=FAKE, limits=LIMITS).run()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_killed_goes_on_where_it_was(setting: Setting, how: signal.Signals) -> None:
    setting.order(slow=0.3)
    code = SCRIPT.format(tests=str(ROOT / "tests"), folder=str(setting.folder))
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    waited = time.monotonic() + 30
    while len(setting.asked()) < 3 and time.monotonic() < waited:
        time.sleep(0.02)
    process.send_signal(how)
    assert process.wait(timeout=20) != 0
    done = len(Journal(setting.folder / "journal.jsonl").all("heat"))
    begun = [entry["seq"] for entry in setting.asked()]
    assert 2 <= done < 4 and begun[:3] == [512, 1024, 2048]
    assert_ends(setting.asked("hello")[0]["pid"])
    setting.order()
    outcomes = setting.tuner([cell(["incumbent", "a"], seq) for seq in (512, 1024, 2048, 4096)]).run()
    assert [entry["seq"] for entry in setting.asked()][len(begun) :] == [512, 1024, 2048, 4096][done:]
    assert all(outcome.winner == "incumbent" for outcome in outcomes)


def assert_ends(pid: int) -> None:
    """The measuring process does not outlive the run; a fake one ends when its input does."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} is still there")


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("hang", "hung: no answer in 2 s (check); its process was ended"),
        ("crash", "its process died of SIGABRT (check)\n  a made-up crash"),
        ("lose", "left the GPU unusable: made up"),
        ("wrong", "computes something wrong: made up"),
    ],
)
def test_who_misbehaves_is_out_and_the_others_go_on(setting: Setting, order: str, reason: str) -> None:
    """The bad one would be the fastest. It is out of every cell, also when the run is taken up again."""
    cells = [cell(["incumbent", "bad", "good"], seq) for seq in (512, 1024)]
    setting.order(speed={"bad": 0.1, "good": 0.8}, **{order: ["bad"]})
    outcomes = setting.tuner(cells).run()
    assert [outcome.winner for outcome in outcomes] == ["good", "good"]
    assert all(outcome.absent["bad"].endswith(reason) for outcome in outcomes)
    assert f"out: bad: {reason}" in setting.said
    before = len(setting.asked()), len(setting.asked("load"))
    again = setting.tuner([*cells, cell(["incumbent", "bad", "good"], 2048)])
    assert [outcome.winner for outcome in again.run()] == ["good"] * 3
    asked = setting.asked()[before[0] :] + setting.asked("load")[before[1] :]
    assert [entry["stems"] for entry in asked] == [["incumbent", "good"]] * 2


def test_a_peer_that_hangs_is_left_out(setting: Setting) -> None:
    setting.order(hang=["fa4"], peers=["cuDNN", "fa4"], speed={"a": 0.9})
    (outcome,) = setting.tuner([cell(["incumbent", "a"])]).run()
    assert outcome.winner == "a" and list(outcome.peers) == ["cuDNN"]
    assert outcome.absent["fa4"].startswith("hung: ")
    again = setting.tuner([cell(["incumbent", "a"], 512)]).run()[0]
    assert list(again.peers) == ["cuDNN"] and len(setting.asked()) == 3


def test_a_new_file_of_the_same_name_gets_its_chance(setting: Setting) -> None:
    setting.order(wrong=["bad"], speed={"bad": 0.5})
    setting.tuner([cell(["incumbent", "bad"])]).run()
    setting.order(speed={"bad": 0.5})
    first, bad = cell(["incumbent", "bad"]).modules
    mended = Cell(cell(["x"]).problem, (first, Module("bad", bad.path, "f" * 64, bad.spec)), tuple(heats.plan(1)))
    assert setting.tuner([mended]).run()[0].winner == "bad"


def test_an_incumbent_that_is_wrong_leaves_the_title_to_the_next(setting: Setting) -> None:
    setting.order(wrong=["incumbent"])
    (outcome,) = setting.tuner([cell(["incumbent", "a", "b"])]).run()
    assert outcome.winner == "a" and "incumbent" in outcome.absent


def test_when_all_are_out_there_is_no_winner(setting: Setting) -> None:
    setting.order(**{"raise": ["incumbent", "a"]})
    (outcome,) = setting.tuner([cell(["incumbent", "a"])]).run()
    assert outcome.winner is None and outcome.record() is None
    assert outcome.absent == dict.fromkeys(["incumbent", "a"], "raised RuntimeError: made up")


def test_the_budget_ends_a_run_between_heats(setting: Setting) -> None:
    setting.order(slow=0.2)
    cells = [cell(["incumbent", "a"], seq) for seq in (512, 1024, 2048)]
    outcomes = setting.tuner(cells, budget_s=0.15).run()
    finished = [outcome.winner is not None for outcome in outcomes]
    assert finished in ([True, False, False], [False, False, False])
    assert all(outcome.winner for outcome in setting.tuner(cells, budget_s=60).run())


def test_a_process_that_cannot_start_is_an_error(setting: Setting) -> None:
    setting.order()
    with pytest.raises(UserError, match="a measuring process on GPU 0 cannot go on: its process ended with status 7"):
        setting.tuner([cell(["a", "b"])], command=[sys.executable, "-c", "import sys; sys.exit(7)"]).run()
    with pytest.raises(UserError, match="wrote 'hello.* where an answer is due"):
        setting.tuner([cell(["a", "b"])], command=[sys.executable, "-c", "print('hello')"]).run()


def test_a_worker_tells_who_was_at_work(setting: Setting) -> None:
    setting.order(crash=["bad"])
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}
    worker = Worker(FAKE, environ=environ, log=setting.folder / "log", limits=LIMITS)
    assert worker.ask({"do": "hello"})["gpu"] == "A made-up GPU"
    with pytest.raises(Gone) as gone:
        worker.ask({"do": "heat", "modules": [module("good").as_request(), module("bad").as_request()]})
    assert gone.value.who == "bad"


def test_nobody_is_blamed_for_what_happens_between_requests(setting: Setting) -> None:
    setting.order()
    worker = Worker(
        FAKE, environ={**os.environ, "CUDA_VISIBLE_DEVICES": "0"}, log=setting.folder / "log", limits=LIMITS
    )
    problem = cell(["good"]).problem.model_dump()
    worker.ask(
        {"do": "heat", "modules": [module("good").as_request()], "peers": False, "rounds": 1, "problem": problem}
    )
    os.kill(setting.asked()[0]["pid"], signal.SIGKILL)
    with pytest.raises(Gone, match="the measuring process: its process died of SIGKILL") as gone:
        worker.ask({"do": "hello"})
    assert gone.value.who == ""


def test_a_process_that_dies_over_nobody_new_ends_the_run(setting: Setting) -> None:
    """Or it would be started again for ever."""
    setting.order()
    Journal(setting.folder / "journal.jsonl").append("out", name="peer", sha256=None, reason="made up")
    script = 'import sys; print(\'{"at": "warm", "who": "peer"}\', flush=True); sys.exit(5)'
    with pytest.raises(UserError, match="cannot go on: its process ended with status 5"):
        setting.tuner([cell(["a", "b"])], command=[sys.executable, "-c", script]).run()


def test_the_real_process_says_what_it_needs(setting: Setting) -> None:
    if gpu.hopper_device() is not None:
        pytest.skip("there is a Hopper GPU here")
    setting.order()
    with pytest.raises(UserError, match=r"cannot go on: its process ended with status 4 \(start\)\n  no Hopper GPU: "):
        setting.tuner([cell(["a", "b"])], command=COMMAND).run()


# -- several GPUs


def test_cells_are_spread_and_each_is_compared_on_one_gpu(setting: Setting) -> None:
    setting.order(speed={"a": 0.9})
    lengths = (512, 1024, 2048, 4096)
    cells = [cell(["incumbent", *(f"c{n}" for n in range(6)), "a"], seq) for seq in lengths]
    outcomes = setting.tuner(cells, ("4", "7")).run()
    assert [outcome.winner for outcome in outcomes] == ["a"] * 4
    where = {(entry["seq"], entry["gpu"]) for entry in setting.asked()}
    assert len(where) == 4 and Counter(gpu for _, gpu in where) == {"4": 2, "7": 2}
    processes = {(entry["gpu"], entry["pid"]) for entry in setting.asked()}
    assert len(processes) == 2


def test_families_have_processes_of_their_own(setting: Setting) -> None:
    setting.order()
    cells = [cell(["a", "b"], 512), cell(["c", "d"], 512, of="k6_d64"), cell(["a", "b"], 1024)]
    setting.tuner(cells).run()
    stems = {entry["pid"]: tuple(entry["stems"]) for entry in setting.asked()}
    assert sorted(stems.values()) == [("a", "b"), ("c", "d")]
    order = [entry["do"] for entry in map(json.loads, setting.log.read_text().splitlines()) if entry["do"] != "hello"]
    assert order == ["load", "load", "heat", "heat", "heat"]  # nothing is compiled while something is measured


@given(
    st.lists(st.tuples(st.sampled_from(["k6_d128_causal", "k6_d64"]), st.integers(1, 9)), max_size=12),
    st.integers(1, 4),
)
def test_cells_are_distributed_evenly(drawn: list[tuple[str, int]], count: int) -> None:
    cells = [cell([f"m{n}" for n in range(size)], 512 * (index + 1), of) for index, (of, size) in enumerate(drawn)]
    shares = distribute(cells, [str(gpu) for gpu in range(count)])
    assert sorted(entry.problem.seq_k for share in shares.values() for entry in share) == [
        entry.problem.seq_k for entry in cells
    ]

    def work(share: list[Cell]) -> int:
        return sum(len(entry.modules) * sum(heat.rounds for heat in entry.heats) for entry in share)

    loads = [work(share) for share in shares.values()]
    assert max(loads) - min(loads) <= max((work([entry]) for entry in cells), default=0)
    for share in shares.values():
        families = [entry.problem.family for entry in share]
        assert families == sorted(families, key=lambda family: family.label)
