"""Who stays and who wins, on made-up times."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fa3gen.base.errors import UserError
from fa3gen.measure.tuning import heats
from fa3gen.measure.tuning.heats import Heat


def noisy(median: float, rounds: int, seed: int, noise: float = 0.01) -> list[float]:
    """Rounds with a drift of 5 % that depends on the round alone, so that all competitors share it."""
    own, shared = random.Random(seed), random.Random(0)
    return [median * (1 + 0.05 * shared.random()) * (1 + noise * own.gauss(0, 1)) for _ in range(rounds)]


# -- the plan


def test_the_plan_by_hand() -> None:
    assert heats.plan(40) == [Heat(3, 14, False), Heat(6, 5, False), Heat(12, 3, False), Heat(25, 3, True)]
    assert heats.plan(3) == [Heat(25, 3, True)]
    assert heats.plan(0) == [Heat(25, 0, True)]


@given(st.integers(0, 20_000), st.integers(7, 60))
def test_every_plan_narrows_to_one_last_heat(challengers: int, rounds: int) -> None:
    plan = heats.plan(challengers, rounds)
    kept = [challengers, *(heat.keep for heat in plan)]
    assert [heat.last for heat in plan] == [False] * (len(plan) - 1) + [True]
    assert plan[-1].rounds == rounds and plan[-1].keep <= heats.FINALISTS
    assert all(after < before for before, after in zip(kept[:-2], kept[1:-1], strict=True))
    assert all(heat.rounds <= rounds for heat in plan)


def test_rounds_that_could_decide_nothing_are_refused() -> None:
    assert heats.single(6) == [Heat(11, 5, True)]
    with pytest.raises(UserError, match="6 rounds cannot tell 3 modules apart; use --rounds 7 or more"):
        heats.single(3, 6)
    # 2^-8 > 5 % / 19 > 2^-9
    with pytest.raises(UserError, match="8 rounds cannot tell 20 modules apart; use --rounds 9 or more"):
        heats.single(20, 8)


@given(st.integers(2, 200))
def test_the_fewest_rounds_allowed_can_decide(competitors: int) -> None:
    rounds = 7
    while True:
        try:
            heats.single(competitors, rounds)
            break
        except UserError:
            rounds += 1
    assert heats.beats([1.0] * rounds, [2.0] * rounds, competitors - 1)


def test_the_fastest_go_on_in_their_order() -> None:
    times = {"a": [3.0, 3.0, 9.0], "b": [2.0, 2.0, 2.0], "c": [1.0, 8.0, 1.0], "d": [4.0, 4.0, 4.0]}
    assert heats.fastest(times, 2) == ["b", "c"]
    assert heats.fastest(times, 9) == ["a", "b", "c", "d"]


# -- the test


def test_the_sign_test_by_hand() -> None:
    assert heats.sign_test([2.0] * 7) == 1 / 128
    assert heats.sign_test([2.0] * 6 + [0.5]) == 8 / 128
    assert heats.sign_test([2.0] * 6 + [1.0]) == 1 / 64  # a tie says nothing
    assert heats.sign_test([1.0] * 5) == 1.0
    assert heats.sign_test([0.5] * 3) == 1.0


def test_a_small_but_certain_gain_is_not_enough() -> None:
    holder = noisy(1.0, 25, 1, noise=0.0)
    assert not heats.beats([ms / 1.004 for ms in holder], holder)
    assert heats.beats([ms / 1.006 for ms in holder], holder)


def test_many_challengers_need_more_certainty() -> None:
    holder = [1.0] * 11
    challenger = [0.9] * 9 + [1.1] * 2  # p = 67 / 2048 = 3.3 %
    assert heats.beats(challenger, holder, challengers=1)
    assert not heats.beats(challenger, holder, challengers=2)


def test_rounds_that_are_not_paired_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="longer than argument 1"):
        heats.beats([1.0], [1.0, 1.0])


def test_the_faster_one_wins_from_any_place() -> None:
    times = {name: noisy(1.0, 25, seed) for seed, name in enumerate("abcd")}
    for name in "abcd":
        assert heats.winner({**times, name: noisy(0.97, 25, 99)}) == name


def test_equals_seldom_take_the_title() -> None:
    """At most 5 % of the races of one holder and three equals may end with another winner."""
    races = [
        heats.winner({name: noisy(1.0, 25, 1000 * race + seed) for seed, name in enumerate("abcd")})
        for race in range(400)
    ]
    assert sum(name != "a" for name in races) <= 0.05 * 400


positive = st.floats(0.1, 10.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(positive, st.floats(1.0, 3.0)), min_size=1, max_size=30))
def test_a_slower_one_never_wins(rounds: list[tuple[float, float]]) -> None:
    """Slower or equal in every round, whatever the drift between rounds."""
    holder = [ms for ms, _ in rounds]
    challenger = [ms * factor for ms, factor in rounds]
    assert heats.winner({"holder": holder, "challenger": challenger}) == "holder"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(positive, st.floats(1.01, 3.0)), min_size=7, max_size=30), st.integers(0, 4))
def test_a_truly_faster_one_wins(rounds: list[tuple[float, float]], place: int) -> None:
    """At least 1 % faster than all others in every round, whatever the drift and the place in the list."""
    slow = [ms for ms, _ in rounds]
    fast = [ms / factor for ms, factor in rounds]
    names = ["a", "b"]
    names.insert(min(place, 2), "fast")
    assert heats.winner({name: fast if name == "fast" else slow for name in names}) == "fast"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(positive, positive, positive), min_size=7, max_size=15), st.randoms(use_true_random=False))
def test_the_order_and_the_scale_of_rounds_do_not_matter(
    rounds: list[tuple[float, ...]], chance: random.Random
) -> None:
    def race(table: list[tuple[float, ...]]) -> str:
        return heats.winner(dict(zip("abc", map(list, zip(*table, strict=True)), strict=True)))

    shuffled = chance.sample(rounds, len(rounds))
    assert race([tuple(2.0 * ms for ms in row) for row in shuffled]) == race(rounds)
