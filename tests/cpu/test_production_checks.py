"""The checks of tests/gpu/test_production.py, on the CPU model at tiny sizes and on modules wrong on purpose."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import production
import pytest
import torch
from production import Call, Problem, Shape
from rendering import CHECKOUT, variants

from fa3gen.cpu.module import load_on_cpu
from fa3gen.design.masks import reach
from fa3gen.verify import reference
from fa3gen.verify.reference import Attention

STEM = "fwd_d64"
SPEC = variants()[STEM].spec
CPU = torch.device("cpu")
TINY = Shape(2, 40, 50, 2, 2)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, return_lse: bool) -> Attention:
    """What a module does, by the reference."""
    found = reference.attention(q, k, v, reach=reach(SPEC.mask))
    return Attention(out.copy_(found.out.to(q.dtype)), found.lse.float())


class Forgetful:
    """Wrong from its third call on, as a kernel whose counter was not set back."""

    calls = 0

    def attention(self, *tensors: torch.Tensor, **options: Any) -> Attention:
        self.calls += 1
        result = exact(*tensors, **options)
        if self.calls > 2:
            result.out[:, 0] = 0
        return result


def nearby(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, return_lse: bool) -> Attention:
    """A module whose offsets wrap at 1000 elements, as 32 bits do at 2^31."""
    wrapped = [x.clone() for x in (q, k, v)]
    for x, lies in zip(wrapped, (q, k, v), strict=True):
        for batch in range(x.shape[0]):
            for head in range(x.shape[2]):
                if batch * lies.stride(0) + head * lies.stride(2) >= 1000:
                    x[batch, :, head] = 0
    return exact(*wrapped, out=out, return_lse=return_lse)


def one_after_the_other(launches: int) -> Callable[[Sequence[Call]], Iterator[Any]]:
    """In the place of streams and graphs."""

    def run(calls: Sequence[Call]) -> Iterator[list[list[Attention]]]:
        for _ in range(2):
            yield [[call() for _ in range(launches)] for call in calls]

    return run


def problem(attention: Callable[..., Any], shape: Shape = TINY, seed: int = 1) -> Problem:
    return Problem(SimpleNamespace(attention=attention), SPEC, CPU, shape, seed)


def found(what: Iterable[str]) -> str:
    return "\n".join(what)


@pytest.mark.parametrize("stem", [STEM, "k7_two_levels_d64"])
def test_a_real_module_passes(stem: str) -> None:
    """On the model, where strides of 5,000 elements and 10,000 in all stand for 2^31; of 16 and of 8 bits."""
    module, spec = load_on_cpu(CHECKOUT.module_path(stem)), variants()[stem].spec
    tiny = Problem(module, spec, CPU, Shape(2, 9, 20, 2, 2), seed=1)
    assert found(production.repeated_launches(tiny, 2)) == ""
    assert found(production.undisturbed([tiny], one_after_the_other(1))) == ""
    assert found(production.large_strides(tiny, 5000)) == ""
    assert found(production.many_elements(module, spec, CPU, 10_000, seq=9, heads=2)) == ""


def test_launches_that_differ_are_found() -> None:
    assert found(production.repeated_launches(problem(exact), 5)) == ""
    assert found(production.repeated_launches(problem(Forgetful().attention), 5)) == (
        "3 of 5 launches differ from the first: [3, 4, 5]"
    )


def test_launches_that_disturb_each_other_are_found() -> None:
    module = Forgetful()
    problems = [problem(module.attention, seed=seed) for seed in (1, 2)]
    assert found(production.undisturbed(problems, one_after_the_other(2))).splitlines() == [
        f"time {time}: 2 of 2 results of call {call} are not what it gives alone" for time in (1, 2) for call in (1, 2)
    ]
    assert "0 of 0 results of call 1" in found(production.undisturbed([problem(exact)], one_after_the_other(0)))


def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything on a stream or in a graph happens at once."""

    def capture(call: Call) -> tuple[Any, Attention]:
        result = call()

        def replay() -> None:
            for place, value in zip(result, call(), strict=True):
                place.copy_(value)

        return SimpleNamespace(replay=replay), result

    monkeypatch.setattr(production, "capture", capture)
    monkeypatch.setattr(production, "hold", lambda streams: None)
    for name in ("Stream", "default_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())


def test_calls_that_a_graph_disturbs_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    without_streams(monkeypatch)
    at_once = production.graphs_beside_streams(CPU, times=1, launches=2)
    assert found(production.undisturbed([problem(exact, seed=seed) for seed in range(3)], at_once)) == ""
    module = Forgetful()
    problems = [problem(module.attention), problem(module.attention), problem(exact)]  # a graph, a stream, the default
    assert found(production.undisturbed(problems, at_once)).splitlines() == [
        f"time 1: {wrong} of {wrong} results of call {call} are not what it gives alone"
        for call, wrong in ((1, 1), (2, 2))
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_soak_finds_what_is_disturbed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    without_streams(monkeypatch)
    assert found(production.soak([problem(exact) for _ in range(4)], CPU, random.Random(seed))) == ""
    forgetful, right = problem(Forgetful().attention), problem(exact)
    forgetful.module.__name__ = "forgetful"
    wrong = found(production.soak([right, forgetful, right, forgetful], CPU, random.Random(seed)))
    assert wrong.count("forgetful, q and k ((2, 40, 2, 64), (2, 50, 2, 64)): ") == len(wrong.splitlines()) == 2
    assert all(line.endswith(("from a graph differ", "on a stream differ")) for line in wrong.splitlines())


def test_wrong_numbers_are_found() -> None:
    def half(*tensors: torch.Tensor, out: torch.Tensor, **options: Any) -> Attention:
        result = exact(*tensors, out=out, **options)
        out *= 0.5
        return result

    def poison(*tensors: torch.Tensor, out: torch.Tensor, **options: Any) -> Attention:
        return Attention(out, exact(*tensors, out=torch.empty_like(out), **options).lse)

    def other_base(*tensors: torch.Tensor, **options: Any) -> Attention:
        result = exact(*tensors, **options)
        return Attention(result.out, result.lse / math.log(2))

    assert found(production.repeated_launches(problem(half), 2)).startswith("O is off by 0.5")
    assert found(production.repeated_launches(problem(poison), 2)) == "O is off by nan"
    assert found(production.repeated_launches(problem(other_base), 2)) == "LSE is off"


def test_offsets_that_wrap_are_found() -> None:
    few = problem(nearby, Shape(2, 2, 3, 2, 2))  # dense, q has 512 elements
    assert found(production.large_strides(few, 4000)).splitlines() == [
        f"O or LSE changes when strides of the {mode} reach over 4000 elements" for mode in ("batch", "head")
    ]
    module = SimpleNamespace(attention=nearby)
    # 128 elements a batch: from the ninth one on, which has number 8, the second head lies beyond 1000.
    assert found(production.many_elements(module, SPEC, CPU, 1200, seq=1, heads=2)).splitlines() == [
        f"batch {number} of 12: O is off by 1" for number in (9, 10, 11)
    ]


@pytest.mark.parametrize("order", production.PLACES.values())
def test_a_spread_tensor_is_the_same_further_apart(order: str) -> None:
    x = torch.randn(2, 7, 4, 16).bfloat16()
    far = production.spread(x, order, 5000)
    assert far.equal(x)
    slowest = "bshd".index(order[0])
    assert far.stride(slowest) * (x.shape[slowest] - 1) >= 5000
    assert far.stride(3) == 1 and all(stride % 8 == 0 for stride in far.stride()[:3])
