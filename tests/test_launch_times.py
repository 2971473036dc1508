"""Host time of launches: the arithmetic, the processes of first calls, and the table, on made-up launches."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rendering import CHECKOUT
from rich.console import Console

from fa3gen.base.errors import UserError
from fa3gen.cli import bench as command
from fa3gen.compile.cache import CACHE_DIR_VARIABLE
from fa3gen.design.family import Family
from fa3gen.measure import bench_report, launch_times
from fa3gen.measure.bench import Bench, Cell, Competitor, Runner
from fa3gen.measure.launch_times import CALLS, ROUNDS, LaunchTimes, first_calls, host_microseconds, small_problem
from fa3gen.measure.peers import Unavailable
from fa3gen.run import gpu
from fa3gen.run.launch import NO_JIT_VARIABLE
from fa3gen.spec.model import NoMask

STEM = "k4_2_d64"
NOWHERE = gpu.Environment("A made-up GPU", None, None, None, None, None, "3.12")


class Clock:
    """Time that only launches and waiting take: a launch some microseconds, waiting for the GPU a second."""

    def __init__(self, microseconds: Callable[[int], float]) -> None:
        self.microseconds, self.now, self.launches, self.waits = microseconds, 0.0, 0, 0

    def perf_counter(self) -> float:
        return self.now

    def launch(self, *arguments: Any) -> None:
        self.now += self.microseconds(self.launches) / 1e6
        self.launches += 1

    def synchronize(self) -> None:
        self.now += 1.0
        self.waits += 1


def clock(monkeypatch: pytest.MonkeyPatch, microseconds: Callable[[int], float]) -> Clock:
    made_up = Clock(microseconds)
    monkeypatch.setattr(launch_times, "time", made_up)
    return made_up


def test_host_time_is_the_median_of_rounds_and_leaves_waiting_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round warms up; one round that something disturbed does not count either."""
    disturbed = range(2 * CALLS, 3 * CALLS)
    made_up = clock(monkeypatch, lambda number: 900.0 if number < CALLS or number in disturbed else 7.0)
    assert host_microseconds(made_up.launch, made_up.synchronize) == pytest.approx(7.0)
    assert made_up.launches == (ROUNDS + 1) * CALLS and made_up.waits == ROUNDS + 1


def test_a_round_fits_into_the_queue_of_a_stream() -> None:
    assert CALLS < 1024


# First calls


class Processes:
    """Stands in for `subprocess.run`; keeps the environments and answers in turn."""

    def __init__(self, *answers: tuple[int, str, str]) -> None:
        self.answers, self.seen = list(answers), []  # type: ignore[var-annotated]

    def __call__(self, command: list[str], env: dict[str, str], **options: Any) -> Any:
        self.seen.append((command[1:], env))
        return subprocess.CompletedProcess(command, *self.answers.pop(0))


def test_first_calls_share_a_cache_that_only_the_first_may_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes((0, "noise\n6.5\n", ""), (0, "0.25\n", ""))
    monkeypatch.setattr(subprocess, "run", processes)
    monkeypatch.setenv(NO_JIT_VARIABLE, "1")
    monkeypatch.setenv(CACHE_DIR_VARIABLE, "/of/the/user")
    assert first_calls(Path("/x/k.py"), Family("bf16", 192, 128, NoMask(), by_sequence=("q", "v"))) == (6.5, 0.25)
    (command, cold), (again, warm) = processes.seen
    assert command == again == ["-m", "fa3gen.measure.first_call", "/x/k.py", "bf16", "192", "128", "q", "v"]
    assert NO_JIT_VARIABLE not in cold and warm[NO_JIT_VARIABLE] == "1"
    assert cold[CACHE_DIR_VARIABLE] == warm[CACHE_DIR_VARIABLE] != "/of/the/user"
    assert not Path(cold[CACHE_DIR_VARIABLE]).exists()


def test_first_call_that_fails_says_what_it_said_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", Processes((1, "", "Traceback\nRuntimeError: no GPU")))
    with pytest.raises(
        UserError, match=r"the first call failed \(RuntimeError: no GPU\); try it: .*first_call /x/k.py"
    ):
        first_calls(Path("/x/k.py"), Family("bf16", 64, 64, NoMask()))


def test_small_problems_are_laid_out_as_a_module_takes_them() -> None:
    for names in ((), ("q", "v")):
        tensors = small_problem("bf16", 192, 128, torch.device("cpu"), names)
        assert [tuple(x.shape) for x in tensors] == [(1, 128, 2, 192), (1, 128, 2, 192), (1, 128, 2, 128)]
        strides = {name: x.stride()[1::2] for name, x in zip("qkv", tensors, strict=True)}
        usual = {"q": (2 * 192, 1), "k": (2 * 192, 1), "v": (2 * 128, 1)}
        assert strides == {**usual, **dict.fromkeys(names, (1, 128))}


# In the benchmark


def competitor(name: str, prepare: Callable[[Cell], Any], generated: bool = True) -> Competitor:
    return Competitor(name, generated, lambda cell: True, prepare)


def test_the_benchmark_measures_modules_and_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    made_up = clock(monkeypatch, lambda number: 3.0)

    def unavailable(cell: Cell) -> Any:
        raise Unavailable("not installed")

    def broken(cell: Cell) -> Any:
        raise RuntimeError("broken\nbadly")

    own = competitor("k4_2", lambda cell: made_up.launch)
    peers = [competitor("fa4", unavailable, False), competitor("fa3", broken, False)]
    runner = Runner([own, *peers], made_up, torch.device("cpu"), 1.0, 1.0)  # type: ignore[arg-type]
    monkeypatch.setattr(launch_times, "first_calls", lambda *facts: (float(len(facts)), 0.5))
    variants, said = CHECKOUT.resolve(STEM), []  # type: ignore[var-annotated]
    found = list(command._launches(runner, variants, {STEM: own}, CHECKOUT, said.append))
    assert found == [
        LaunchTimes("k4_2", pytest.approx(3.0), 2.0, 0.5),  # type: ignore[arg-type]
        LaunchTimes("fa4", None, reason="not installed"),
        LaunchTimes("fa3", None, reason="raised RuntimeError: broken badly"),
    ]
    assert said == ["k4_2_d64: first call", "fa4: host time", "fa3: host time"]

    def failing(*facts: Any) -> Any:
        raise UserError("the first call failed")

    monkeypatch.setattr(launch_times, "first_calls", failing)
    [first, *_] = command._launches(runner, variants, {STEM: own}, CHECKOUT, said.append)
    assert first == LaunchTimes("k4_2", None, reason="the first call failed")


def test_launch_times_are_shown_and_written(tmp_path: Path) -> None:
    launches = (
        LaunchTimes("k6", 7.128, 6.51, 0.3),
        LaunchTimes("cuDNN", 31.0),
        LaunchTimes("fa4", None, reason="none"),
    )
    bench = Bench(NOWHERE, (), launches)
    Console(file=(text := io.StringIO()), width=120).print(bench_report.launch_table(bench))
    rows = [line.strip("│ ").replace("│", " ").split() for line in text.getvalue().splitlines()]
    assert ["k6", "6.51", "0.3", "7.13"] in rows and ["cuDNN", "31"] in rows and ["fa4"] in rows
    assert bench_report.reasons(bench) == ["fa4: none (launch times)"]
    bench_report.write_json(bench, tmp_path / "bench.json")
    written = json.loads((tmp_path / "bench.json").read_text())["launches"]
    assert written[0] == {"competitor": "k6", "host_us": 7.128, "compiled_s": 6.51, "cached_s": 0.3, "reason": None}
