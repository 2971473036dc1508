"""`fa3gen bench --host`: which calls are timed, how, and what is said about them, with made-up times."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rendering import CHECKOUT
from rich.console import Console

from fa3gen import cli
from fa3gen.measure import host_calls, launch_times, peers
from fa3gen.measure.host_calls import MEASUREMENTS, WAYS, Callee, HostBench, HostTimes, Problem
from fa3gen.measure.launch_times import CALLS, ROUNDS
from fa3gen.measure.peers import Peer, Unavailable
from fa3gen.run import dispatch, gpu, launch, ops
from fa3gen.run.dispatch import NoKernel
from fa3gen.spec.model import CausalMask, Mask, NoMask, Spec, WindowMask

CPU = torch.device("cpu")
NOWHERE = gpu.Environment("A made-up GPU", None, None, None, None, None, "3.12")


class Clock:
    """Time that only calls take: as many microseconds as each of them says."""

    def __init__(self) -> None:
        self.now, self.made = 0.0, []  # type: ignore[var-annotated]

    def perf_counter(self) -> float:
        return self.now

    def takes(self, name: str, microseconds: float) -> None:
        self.now += microseconds / 1e6
        self.made.append(name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made_up = Clock()
    monkeypatch.setattr(launch_times, "time", made_up)
    return made_up


def spec_of(stem: str) -> Spec:
    [variant] = CHECKOUT.resolve(stem)
    return variant.spec


def module(clock: Clock, name: str) -> Any:
    """Stands in for a generated module: O takes 5 us, an LSE 2 more, a tensor of one's own 1 less."""

    def attention(q: Any, k: Any, v: Any, *, scale: Any = None, out: Any = None, return_lse: bool = False) -> Any:
        assert not torch.is_grad_enabled()
        assert out is None or (out.shape, out.dtype) == ((*q.shape[:3], v.shape[3]), q.dtype)
        clock.takes(name, 5 + 2 * return_lse - (out is not None))

    return SimpleNamespace(attention=attention)


def unnoticed() -> None:
    """The GPU is never behind."""


def table_rows(text: str) -> list[list[str]]:
    """The cells of printed tables, row by row."""
    return [[cell.strip() for cell in line[1:-1].split("│")] for line in text.splitlines() if line.startswith("│")]


# What is timed


def test_a_module_is_called_in_every_way_that_it_has(clock: Clock) -> None:
    with_lse, o_only = spec_of("fwd_d192_128"), spec_of("fwd_d64_window_o_only")
    callees = [
        host_calls.module_callee(spec.mask.kind, spec, lambda: module(clock, "m")) for spec in (with_lse, o_only)
    ]
    full, window = (
        host_calls.measure([callee], Problem.of(spec).tensors(CPU), unnoticed)[0]
        for callee, spec in zip(callees, (with_lse, o_only), strict=True)
    )
    assert full.microseconds == {"O": pytest.approx(5), "O and LSE": pytest.approx(7), "out=": pytest.approx(4)}
    assert list(window.microseconds) == ["O", "out="]
    assert full.generated and full.reason is None


def test_calls_with_sinks_or_a_cap_have_them(clock: Clock) -> None:
    for stem, names in (("fwd_d64_sink_causal", {"sinks"}), ("fwd_d128_softcap_causal", {"softcap"})):
        asked: list[set[str]] = []

        def attention(q: Any, k: Any, v: Any, **options: Any) -> None:
            asked.append(set(options) - {"out", "return_lse"})  # noqa: B023
            clock.takes("own", 5.0)

        spec = spec_of(stem)
        own = host_calls.module_callee(stem, spec, lambda: SimpleNamespace(attention=attention))
        found = host_calls.callees(Problem.of(spec), [own])
        assert [callee.name for callee in found] == [stem, "fa3gen.attention"]  # peers have no such arguments
        (row,) = host_calls.measure([own], Problem.of(spec).tensors(CPU), unnoticed)
        assert row.microseconds and all(each == names for each in asked)


@pytest.mark.parametrize("stem", ["k7_two_levels_d128", "k7_v_k_two_levels_d128", "fwd_fp8_v_permuted_d128"])
def test_calls_of_8_bits_write_bfloat16(stem: str, clock: Clock) -> None:
    """The module's, and those of `fa3gen.attention`, which says why it takes no module where it takes none."""
    seen: list[Any] = []

    def attention(q: Any, k: Any, v: Any, out: Any = None, return_lse: bool = False) -> None:
        seen.append((q.dtype, v.stride(1) == 1, None if out is None else out.dtype))
        clock.takes("own", 5.0)

    spec = spec_of(stem)
    own = host_calls.module_callee(stem, spec, lambda: SimpleNamespace(attention=attention))
    (row,) = host_calls.measure([own], Problem.of(spec).tensors(CPU), unnoticed)
    assert set(row.microseconds) == set(WAYS)
    lies = "_v_" in stem
    assert set(seen) == {(torch.float8_e4m3fn, lies, None), (torch.float8_e4m3fn, lies, torch.bfloat16)}
    dispatched = host_calls.callees(Problem.of(spec), [own])[1]
    ways = dispatched.ways(Problem.of(spec).tensors(CPU))
    assert set(ways) == set(WAYS)
    with pytest.raises(ValueError, match="q is not on a GPU"):  # by a module for these, which out fits
        ways["out="]()


def test_heads_that_are_packed_come_in_groups() -> None:
    problem = Problem.of(spec_of("fwd_d128_pack4_causal"))
    q, k, v = problem.tensors(CPU)
    assert q.shape == (1, 128, 8, 128) and k.shape == v.shape == (1, 128, 2, 128)
    assert str(problem) == "bf16, head dim 128, causal, 4 heads of q for each of k and v"


@pytest.mark.parametrize(
    ("mask", "options"),
    [(NoMask(), {}), (CausalMask(), {"causal": True}), (WindowMask(left=512, right=0), {"window": (512, 0)})],
)
def test_the_call_that_finds_the_module_gets_the_mask(
    mask: Mask, options: dict[str, Any], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def attention(q: Any, k: Any, v: Any, **given: Any) -> None:
        seen.append({name: value for name, value in given.items() if name not in ("out", "return_lse")})
        clock.takes("dispatched", 9 if "out" in given else 10)

    attention.explain = lambda *tensors, **given: None  # type: ignore[attr-defined]
    monkeypatch.setattr(ops, "attention", attention)
    problem = Problem(dispatch.Family("bf16", 64, 64, mask))
    [row] = host_calls.measure([host_calls.dispatched_callee(mask)], problem.tensors(CPU), unnoticed)
    assert set(row.microseconds) == set(WAYS) and row.microseconds["out="] == pytest.approx(9)
    assert all(given == options for given in seen)


def test_what_no_module_serves_has_a_reason_and_no_lse_has_no_time(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(q: Any, k: Any, v: Any, **given: Any) -> None:
        clock.takes("dispatched", 10)

    def explain(*tensors: Any, return_lse: bool = False, **given: Any) -> None:
        if return_lse or missing:
            raise NoKernel("no module computes this")

    attention.explain = explain  # type: ignore[attr-defined]
    monkeypatch.setattr(ops, "attention", attention)
    tensors = Problem(dispatch.Family("bf16", 64, 64, NoMask())).tensors(CPU)
    missing = False
    [row] = host_calls.measure([host_calls.dispatched_callee(NoMask())], tensors, unnoticed)
    assert list(row.microseconds) == ["O", "out="]
    missing = True
    [row] = host_calls.measure([host_calls.dispatched_callee(NoMask())], tensors, unnoticed)
    assert row == HostTimes("fa3gen.attention", True, {}, "no module computes this")


def test_a_setting_is_entered_around_a_measurement_and_not_around_each_call(clock: Clock) -> None:
    entered = 0

    @contextlib.contextmanager
    def setting() -> Iterator[None]:
        nonlocal entered
        entered += 1
        clock.now += 1.0  # which the calls do not pay
        yield

    peer = Peer("cuDNN", lambda mask: lambda q, k, v: clock.takes("cuDNN", 20.0), setting)
    tensors = Problem(dispatch.Family("bf16", 64, 64, NoMask())).tensors(CPU)
    [row] = host_calls.measure([host_calls.peer_callee(peer, NoMask())], tensors, unnoticed)
    assert row == HostTimes("cuDNN", False, {"O": pytest.approx(20.0)})  # type: ignore[dict-item]
    assert entered == MEASUREMENTS
    peer.prepare(NoMask())(*tensors)  # elsewhere a peer is called without further ado
    assert entered == MEASUREMENTS + 1


@pytest.mark.parametrize("name", ["cuDNN (torch SDPA)", "flash (torch SDPA)"])
def test_torchs_backends_are_chosen_by_their_setting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.backends import cuda

    allowed = []

    def attention(q: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        allowed.append((cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()))
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    [peer] = [peer for peer in peers.PEERS if peer.name == name]
    tensors = Problem(dispatch.Family("bf16", 64, 64, NoMask())).tensors(CPU)
    peer.prepare(CausalMask())(*tensors)
    assert allowed == [(name.startswith("cuDNN"), name.startswith("flash"), False)]


# How it is timed


def test_calls_take_turns_and_the_fastest_measurement_counts(clock: Clock) -> None:
    """A host that is busy for a while makes all calls slow, and some measurements of every call fall outside of it."""
    per_measurement = (ROUNDS + 1) * CALLS
    busy = range(3 * per_measurement, 2 * (MEASUREMENTS - 2) * per_measurement)

    def callee(name: str, microseconds: float) -> Callee:
        def call() -> None:
            clock.takes(name, 300.0 if len(clock.made) in busy else microseconds)

        return Callee(name, True, lambda tensors: {"O": call})

    rows = host_calls.measure([callee("a", 5.0), callee("b", 8.0)], (), unnoticed)  # type: ignore[arg-type]
    assert [row.microseconds["O"] for row in rows] == [pytest.approx(5.0), pytest.approx(8.0)]
    turns = clock.made[::per_measurement]
    assert turns == ["a", "b"] * MEASUREMENTS


def test_who_raises_is_left_out_with_a_reason(clock: Clock) -> None:
    def missing(tensors: Any) -> Any:
        raise Unavailable("not installed")

    def broken() -> None:
        clock.takes("broken", 1.0)
        raise RuntimeError("broken\nbadly")

    callees = [
        Callee("fa4", False, missing),
        Callee("own", True, lambda tensors: {"O": broken}),
        Callee("right", True, lambda tensors: {"O": lambda: clock.takes("right", 6.0)}),
    ]
    fa4, own, right = host_calls.measure(callees, (), unnoticed)  # type: ignore[arg-type]
    assert (fa4.reason, own.reason) == ("not installed", "raised RuntimeError: broken badly")
    assert not fa4.microseconds and not own.microseconds and clock.made.count("broken") == 1
    assert right.microseconds == {"O": pytest.approx(6.0)}
    bench = HostBench(NOWHERE, ((Problem(dispatch.Family("bf16", 64, 64, NoMask())), (fa4, own, right)),))
    assert bench.failures(None) == ["own: raised RuntimeError: broken badly (bf16, head dim 64, no mask)"]
    assert bench.failures(5.5)[1:] == ["right, O: 6.0 us, more than 5.5 (bf16, head dim 64, no mask)"]
    assert bench.reasons()[0] == "fa4: not installed (bf16, head dim 64, no mask)"


def test_the_table_leaves_out_what_was_not_measured() -> None:
    problem = Problem(dispatch.Family("bf16", 64, 64, NoMask()))
    rows = (HostTimes("k6", True, {"O": 7.128, "out=": 6.04}), HostTimes("cuDNN", False, {}, "none"))
    Console(file=(text := io.StringIO()), width=120).print(host_calls.table(problem, rows))
    found = table_rows(text.getvalue())
    assert ["k6", "7.1", "", "6.0"] in found and ["cuDNN", "", "", ""] in found


# As a command


@pytest.fixture
def made_up_gpu(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which everything can be called, and on which a call takes the time that the stand-in says."""
    monkeypatch.chdir(CHECKOUT.root)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("fa3gen.measure.bench.require_hopper", lambda: CPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(gpu, "environment", lambda: NOWHERE)
    monkeypatch.setattr(launch, "load_for_launch", lambda path: module(clock, path.stem))
    attention = module(clock, "dispatched").attention
    called = lambda q, k, v, causal=False, window=None, **given: attention(q, k, v, **given)  # noqa: E731
    called.explain = lambda *tensors, **given: None
    monkeypatch.setattr(ops, "attention", called)
    peer = Peer("a peer", lambda mask: lambda q, k, v: clock.takes("a peer", 30.0))
    monkeypatch.setattr(peers, "PEERS", (peer,))


@pytest.mark.usefixtures("made_up_gpu")
def test_the_command_shows_modules_dispatch_and_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "host.json"
    arguments = ["bench", "--host", "fwd_d128_causal", "k6_d128_causal", "fwd_d64", "--json", str(written)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    rows = table_rows(printed)
    assert "Host time of a call in microseconds, bf16, head dim 128, causal" in printed
    assert ["fwd_d128_causal", "5.0", "7.0", "4.0"] in rows and ["k6", "5.0", "7.0", "4.0"] in rows
    assert rows.count(["fa3gen.attention", "5.0", "7.0", "4.0"]) == rows.count(["a peer", "30.0", "", ""]) == 2
    document = json.loads(written.read_text())
    assert document["environment"]["gpu"] == "A made-up GPU"
    found = [
        (problem["head_dim"], problem["mask"], [row["name"] for row in problem["calls"]])
        for problem in document["problems"]
    ]
    assert found == [
        (128, {"kind": "causal"}, ["fwd_d128_causal", "k6", "fa3gen.attention", "a peer"]),
        (64, {"kind": "none"}, ["fwd_d64", "fa3gen.attention", "a peer"]),
    ]


@pytest.mark.usefixtures("made_up_gpu")
def test_a_limit_is_held_against_our_calls_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--host", "fwd_d64", "--host-limit", "8"]) == 0
    assert cli.main(["bench", "--host", "fwd_d64", "--host-limit", "6"]) == 1
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "fwd_d64, O and LSE: 7.0 us, more than 6 (bf16, head dim 64, no mask)",
        "fa3gen.attention, O and LSE: 7.0 us, more than 6 (bf16, head dim 64, no mask)",
    ]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--host", "--plot", "x.png", "--quick"], "leave out --plot, --quick"),
        (["--host-limit", "9"], "--host-limit is for --host"),
    ],
)
def test_options_that_do_not_go_together(extra: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "fwd_d64", *extra]) == 2
    assert message in capsys.readouterr().err
