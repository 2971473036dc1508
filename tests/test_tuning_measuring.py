"""What a measuring process does with modules and peers, on the CPU and with a timer that makes its numbers up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rendering import variants
from torch_modules import Module

from fa3gen.compile.loading import load_file
from fa3gen.design.family import Family, Shape
from fa3gen.design.key_order import ORDER
from fa3gen.design.masks import reach
from fa3gen.measure import bench
from fa3gen.measure.peers import PEERS, Peer, Unavailable
from fa3gen.measure.tuning import measuring
from fa3gen.measure.tuning.measuring import Bench
from fa3gen.records.tuning_records import TunedProblem
from fa3gen.spec.model import Mask
from fa3gen.verify import reference

CPU = torch.device("cpu")
SPEC = variants()["k6_d64_causal"].spec


class MadeUpTimer:
    """Every launch takes `pace`, and `host` more where no graph keeps the host out; `captures`: there are graphs."""

    def __init__(self, pace: float = 2.0, host: float = 0.0, captures: bool = True) -> None:
        self.pace, self.host, self.captures = pace, host, captures
        self.counts: list[int] = []
        self.eager_counts: list[int] = []

    def once(self, launch: Callable[[], Any]) -> float:
        launch()
        return self.pace + self.host

    def eager(self, launch: Callable[[], Any], count: int) -> Callable[[], float]:
        self.eager_counts.append(count)
        return lambda: self.pace + self.host

    def burst(self, launch: Callable[[], Any], count: int) -> tuple[Callable[[], float], bool]:
        self.counts.append(count)
        return lambda: self.pace + (0.0 if self.captures else self.host), self.captures


class Loadable(Module):
    """A module in plain PyTorch that can be compiled as generated ones can; `fails` says how it cannot."""

    fails: Exception | None = None

    def compile_for_sm90a(self) -> None:
        if self.fails is not None:
            raise self.fails


def loadable(**facts: Any) -> Loadable:
    return Loadable(SPEC.mask, **facts)


def peer(name: str, error: Exception | None = None, factor: float = 1.0) -> Peer:
    def prepare(mask: Mask) -> Any:
        if isinstance(error, Unavailable):
            raise error

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if error is not None:
                raise error
            return (factor * reference.attention(q, k, v, reach=reach(mask), compute_dtype=torch.float32).out).to(
                q.dtype
            )

        return attend

    return Peer(name, prepare)


class Setting:
    """A bench with modules by stem."""

    def __init__(self, modules: dict[str, Any], peers: Sequence[Peer] = (), timer: MadeUpTimer | None = None) -> None:
        self.events: list[tuple[str, str]] = []
        self.timer = timer or MadeUpTimer()
        self.bench = Bench(
            CPU,
            self.timer,
            lambda at, who: self.events.append((at, who)),
            peers=peers,
            load=lambda path: modules[path.stem],
        )
        self.stems = list(modules)

    def ask(self, do: str = "heat", **facts: Any) -> dict[str, Any]:
        problem = TunedProblem.of(Family.of(SPEC), Shape(1, 80, 80, 2, 1)).model_dump()
        described = [{"stem": stem, "path": f"{stem}.py", "spec": SPEC.model_dump()} for stem in self.stems]
        given = {"problem": problem, "modules": described, "peers": True, "without": [], "rounds": 7}
        given |= {"problems": [problem], "burst": 7.0, "eager_rounds": 3}
        return self.bench.answer({"do": do, **given, **facts})


def test_modules_and_peers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = {Path("b.py"): b"an object"}  # a compiled by itself; what is in the cache tells which ptxas there is
    monkeypatch.setattr(measuring, "cached_object", lambda path, may_compile: objects.get(path))
    monkeypatch.setattr(measuring.toolchain, "ptxas_version_of_object", lambda code: f"that of {code.decode()}")
    setting = Setting({"a": loadable(), "b": loadable()}, [peer("cuDNN")])
    answer = setting.ask()
    assert set(answer.pop("errors")) == {"a", "b", "cuDNN"}
    assert answer == {
        "times": {"a": [2.0] * 7, "b": [2.0] * 7, "cuDNN": [2.0] * 7},
        "eager": {"a": 2.0, "b": 2.0, "cuDNN": 2.0},
        "failed": {},
        "wrong": {},
        "uncaptured": [],
        "ptxas": "that of an object",
    }
    turns = [who for at, who in setting.events if at == "time"]
    rounds = [turns[start : start + 3] for start in range(0, len(turns), 3)]
    assert len(rounds) == 7 + 3  # from graphs, and then eager
    assert all(sorted(turn) == ["a", "b", "cuDNN"] for turn in rounds)
    assert len({tuple(turn) for turn in rounds}) > 1  # nobody always follows the same one
    assert setting.timer.counts == [4, 4, 4]  # 7 ms are filled by four launches of 2


def test_calls_with_sinks_and_a_cap_are_timed_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And checked against attention with them; peers, which have no such arguments, stay out."""
    family = Family.of(SPEC)._replace(sink=True, softcap=True)
    problem = TunedProblem.of(family, Shape(1, 80, 80, 2, 1))
    assert problem.family == family and TunedProblem.model_validate(problem.model_dump()) == problem
    assert {"sink", "softcap"} & TunedProblem.of(Family.of(SPEC), Shape(1, 80, 80, 2, 1)).model_dump().keys() == set()

    def attention(q: Any, k: Any, v: Any, **named: Any) -> torch.Tensor:
        found = reference.attention(q, k, v, reach=reach(SPEC.mask), compute_dtype=torch.float32, **named)
        return found.out.to(q.dtype)

    def forgets(q: Any, k: Any, v: Any, *, sinks: Any, softcap: float) -> torch.Tensor:
        return attention(q, k, v, softcap=softcap)

    setting = Setting({"a": SimpleNamespace(attention=attention), "b": SimpleNamespace(attention=forgets)}, [peer("p")])
    monkeypatch.setattr(Bench, "_right", lambda bench, module: bench.load(Path(module["path"])))
    answer = setting.ask(problem=problem.model_dump())
    assert set(answer["times"]) == {"a"} and answer["failed"]["b"].startswith("wrong result: relative error")


@pytest.mark.parametrize("stem", ["k7_two_levels_d128", "k7_v_k_two_levels_d128", "fwd_fp8_v_permuted_d128"])
def test_tensors_of_8_bits_are_rounded_and_lie_as_modules_read_them(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """O is off by a twentieth where P has 4 bits, which would be wrong of 16; peers say what they do not take.

    Where modules are given v with its keys permuted, what is expected has them in order.
    """
    spec = variants()[stem].spec
    problem, seen = TunedProblem.of(Family.of(spec), Shape(1, 80, 80, 2, 1)), []

    def attention(q: Any, k: Any, v: Any, factor: float) -> torch.Tensor:
        seen.append((q.dtype, k.dtype, v.dtype, v.stride()))
        if problem.v_permuted:
            v = v.float().reshape(1, 5, 16, 1, 128)[:, :, torch.tensor(ORDER).argsort()].reshape(1, 80, 1, 128)
        found = reference.attention(q, k, v, reach=reach(spec.mask), compute_dtype=torch.float32)
        return (factor * found.out).bfloat16()

    modules = {
        name: SimpleNamespace(attention=lambda q, k, v, by=by: attention(q, k, v, by))
        for name, by in (("exact", 1.0), ("coarse", 1.05), ("wrong", 1.2))
    }
    setting = Setting(modules, PEERS[:1])
    monkeypatch.setattr(Bench, "_right", lambda bench, module: bench.load(Path(module["path"])))
    described = [{"stem": stem, "path": f"{stem}.py", "spec": spec.model_dump()} for stem in modules]
    answer = setting.ask(problem=problem.model_dump(), problems=[problem.model_dump()], modules=described)
    assert set(answer["times"]) == {"exact", "coarse"} and answer["errors"]["exact"] < 0.01
    assert answer["failed"]["wrong"].startswith("wrong result: relative error 0.2")
    assert answer["failed"]["cuDNN (torch SDPA)"] == "torch SDPA takes no tensors of 8 bits"
    strides = (80 * 128, 1, 80 * 128, 80) if problem.by_sequence else (80 * 128, 128, 128, 1)
    assert set(seen) == {(*[torch.float8_e4m3fn] * 3, strides)}


def test_a_module_is_loaded_and_checked_once() -> None:
    setting = Setting({"a": loadable()})
    assert setting.ask("load") == {"wrong": {}}
    setting.ask()
    setting.ask()
    assert [at for at, _ in setting.events if at in ("load", "check")] == ["load", "check"]


def test_what_may_hang_is_announced_before() -> None:
    setting = Setting({"a": loadable()}, [peer("cuDNN")])
    setting.ask()
    assert setting.events[:4] == [("load", "a"), ("check", "a"), ("warm", "a"), ("warm", "cuDNN")]
    assert setting.bench.who in ("a", "cuDNN")


def test_a_wrong_module_is_never_timed() -> None:
    """Right where it is measured (80 keys), wrong on a ragged shape."""

    def forgets(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
        out, lse = reference.attention(q, k, v, scale=scale, reach=reach(mask), compute_dtype=torch.float32)
        return (out, lse) if k.shape[1] == 80 else (out * 1.1, lse)

    setting = Setting({"bad": loadable(compute=forgets), "good": loadable()})
    answer = setting.ask()
    assert list(answer["times"]) == ["good"]
    assert answer["wrong"]["bad"].startswith("computes something wrong: ragged: O is off by")


def test_a_wrong_result_at_the_shape_itself_is_a_failure_there() -> None:
    def forgets(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
        out, lse = reference.attention(q, k, v, scale=scale, reach=reach(mask), compute_dtype=torch.float32)
        return (out * 1.1, lse) if k.shape[1] == 80 else (out, lse)

    answer = Setting({"bad": loadable(compute=forgets)}, [peer("off", factor=1.5)]).ask()
    assert answer["times"] == {} and answer["wrong"] == {}
    assert answer["failed"]["bad"].startswith("wrong result: relative error 0.1")
    assert answer["failed"]["off"].startswith("wrong result: relative error 0.5")


def test_the_error_of_each_candidate_comes_with_its_times() -> None:
    """Of two that are right by the limits of the check, one is off by a hundredth in all of O."""

    def coarse(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
        out, lse = reference.attention(q, k, v, scale=scale, reach=reach(mask), compute_dtype=torch.float32)
        return (out * 1.01, lse) if k.shape[1] == 80 else (out, lse)

    errors = Setting({"fine": loadable(), "coarse": loadable(compute=coarse)}, [peer("cuDNN", factor=1.015)]).ask()[
        "errors"
    ]
    assert errors["fine"] < 0.003  # what rounding to bfloat16 costs
    assert 0.009 < errors["coarse"] < 0.012 and 0.014 < errors["cuDNN"] < 0.017


def test_a_module_that_cannot_be_loaded_is_out() -> None:
    broken = loadable()
    broken.fails = ValueError("no such\n layout")
    setting = Setting({"broken": broken, "good": loadable()})
    assert setting.ask("load") == {"wrong": {"broken": "cannot be loaded: ValueError: no such layout"}}
    answer = setting.ask()
    assert list(answer["times"]) == ["good"] and "broken" in answer["wrong"]


def test_peers_that_are_missing_or_raise_are_told() -> None:
    peers = [peer("fa3", Unavailable("fa3 is not installed")), peer("fa4", RuntimeError("bad shape")), peer("cuDNN")]
    answer = Setting({"a": loadable()}, peers).ask()
    assert answer["failed"] == {"fa3": "fa3 is not installed", "fa4": "raised RuntimeError: bad shape"}
    assert list(answer["times"]) == ["a", "cuDNN"]
    assert list(Setting({"a": loadable()}, peers).ask(without=["fa3", "cuDNN"])["failed"]) == ["fa4"]
    assert Setting({"a": loadable()}, peers).ask(peers=False)["failed"] == {}


def test_peers_compile_while_modules_are_loaded() -> None:
    peers = [peer("fa3", Unavailable("fa3 is not installed")), peer("fa4", RuntimeError("bad shape")), peer("cuDNN")]
    setting = Setting({"a": loadable()}, peers)
    assert setting.ask("load", without=["fa4"]) == {"wrong": {}}
    assert setting.events == [("load", "a"), ("warm", "fa3"), ("warm", "cuDNN")]


def test_a_peer_that_cannot_run_is_not_asked_at_every_shape() -> None:
    """It may have compiled for seconds. With another group of heads it gets another chance."""
    asked: list[int] = []

    def prepare(mask: Mask) -> Any:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            asked.append(q.shape[2] // k.shape[2])
            if asked[-1] == 2:
                raise RuntimeError("no\nsuch group")
            return reference.attention(q, k, v, reach=reach(mask), compute_dtype=torch.float32).out.to(q.dtype)

        return attend

    problems = [TunedProblem.of(Family.of(SPEC), Shape(1, 80, seq, *heads)).model_dump() for seq, heads in
                ((80, (2, 1)), (96, (2, 1)), (80, (2, 2)))]  # fmt: skip
    setting = Setting({"a": loadable()}, [Peer("picky", prepare)])
    assert setting.ask("load", problems=problems) == {"wrong": {}} and asked == [2, 1]
    answers = [setting.ask(problem=problem) for problem in problems]
    assert [answer["failed"] for answer in answers] == [{"picky": "raised RuntimeError: no such group"}] * 2 + [{}]
    assert 2 not in asked[2:]


def test_the_assembler_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It means reading an object file from the cache."""
    read: list[Path] = []
    monkeypatch.setattr(measuring, "cached_object", lambda path, may_compile: read.append(path) or b"an object")
    monkeypatch.setattr(measuring.toolchain, "ptxas_version_of_object", lambda code: "13")
    setting = Setting({"a": loadable()})
    assert [setting.ask()["ptxas"] for _ in range(3)] == ["13"] * 3 and len(read) == 1


def test_the_reference_is_computed_once_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Any] = []
    monkeypatch.setattr(measuring, "last_rows", lambda *given: counted.append(given) or bench.last_rows(*given))
    setting = Setting({"a": loadable(), "b": loadable()}, [peer("cuDNN")])
    assert len(setting.ask()["times"]) == 3 and len(counted) == 1


def test_who_is_not_timed_from_a_graph_is_told() -> None:
    answer = Setting({"a": loadable()}, timer=MadeUpTimer(host=1.0, captures=False)).ask()
    assert answer["uncaptured"] == ["a"] and answer["times"] == {"a": [3.0] * 7} and answer["eager"] == {"a": 3.0}


def test_eager_calls_are_timed_beside_the_graphs() -> None:
    timer = MadeUpTimer(2.0, host=1.0)
    answer = Setting({"a": loadable()}, [peer("cuDNN")], timer).ask()
    assert answer["times"] == {"a": [2.0] * 7, "cuDNN": [2.0] * 7} and answer["eager"] == {"a": 3.0, "cuDNN": 3.0}
    assert Setting({"a": loadable()}).ask(eager_rounds=0)["eager"] == {}


def test_a_graph_of_small_kernels_holds_more_launches_than_the_host_would_make() -> None:
    """0.02 ms of host and 0.005 ms of kernel: 1 ms is filled by 40 calls, or by 200 launches in a graph."""
    timer = MadeUpTimer(0.005, host=0.02)
    Setting({"a": loadable()}, timer=timer).ask(burst=1.0)
    assert (timer.counts, timer.eager_counts) == ([40, 200], [40])
    slow = MadeUpTimer(0.1, host=0.02)
    Setting({"a": loadable()}, timer=slow).ask(burst=1.0)
    assert slow.counts == [9]  # 0.9 ms are near enough


@pytest.mark.parametrize(("pace", "count"), [(100.0, 1), (7.0, 1), (3.4, 3), (0.001, 200)])
def test_a_timing_fills_some_milliseconds(pace: float, count: int) -> None:
    setting = Setting({"a": loadable()}, timer=MadeUpTimer(pace))
    setting.ask()
    assert setting.timer.counts == [count]


def test_a_generated_module_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its file, as the measuring process does it; the compilation itself is replaced."""
    compiled: list[str] = []

    def load(path: Path) -> Any:
        module = load_file(path)
        monkeypatch.setattr(module, "compile_for_sm90a", lambda: compiled.append(path.stem))
        return module

    from rendering import CHECKOUT

    measuring_process = Bench(CPU, MadeUpTimer(), lambda at, who: None, load=load)
    path = CHECKOUT.module_path("k6_d64_causal")
    described = [{"stem": "k6_d64_causal", "path": str(path), "spec": SPEC.model_dump()}]
    problem = TunedProblem.of(Family.of(SPEC), Shape(1, 80, 80, 2, 1))
    request = {"do": "load", "modules": described, "problems": [problem.model_dump()], "peers": False, "without": []}
    assert measuring_process.answer(request) == {"wrong": {}} and compiled == ["k6_d64_causal"]
