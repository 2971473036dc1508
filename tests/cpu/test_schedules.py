"""Schedules: which there are, that they do what they say, and that none of them changes a result."""

from __future__ import annotations

import pytest
from machine import Machine, clean
from test_barriers import zeros

from fa3gen.cpu.schedule import FAST, Schedule, schedules

# Each warp, once for each of its four turns, notes the order in which it came.
ORDER = """
    setp.eq.u32 %p1, %lane, 0; mov.b32 %r2, 0;
again:
    @%p1 atom.global.add.u32 %r1, [%count], 1;
    mad.wide.u32 %rd1, %r1, 4, %out;
    @%p1 st.global.b32 [%rd1], %warp;
    add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 4;
    @%p2 bra again;
"""


def order(schedule: Schedule, warps: int = 4) -> list[int]:
    """Warps in the order of their turns."""
    buffers = {"out": zeros(4 * warps)["out"], "count": zeros(1)["out"]}
    return list(Machine(ORDER, threads=32 * warps, buffers=buffers).run(schedule)["out"].tolist())


@pytest.mark.parametrize("count", [1, 4, 10, 25])
def test_schedules_differ(count: int) -> None:
    found = schedules(count, 8)
    assert len(found) == len(set(found)) == count and found[0] == FAST
    assert len({str(schedule) for schedule in found}) == count
    assert schedules(count, 8, seed=100)[0] == FAST
    if count > 1:
        assert schedules(count, 8, seed=100) != found


def test_ten_schedules_cover_the_kinds() -> None:
    """Every granularity, order and moment of completion, and every end of the warps as a favourite."""
    found = schedules(10, 12)
    assert {schedule.granularity for schedule in found} == {"warpgroup", "warp"}
    assert {schedule.order for schedule in found} == {"in turn", "random", "first", "last"}
    assert {schedule.completion for schedule in found} == {"late", "early", "random"}
    assert {schedule.favourite for schedule in found} == {0, 11}


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (FAST, "by warpgroup, in turn, late completion"),
        (Schedule("warp", "first", "early", favourite=3), "by warp, warp 3 first, early completion"),
        (Schedule("warp", "last", "late", favourite=1), "by warp, warp 1 last, late completion"),
        (Schedule("warp", "random", "late", seed=9), "by warp, random, late completion, seed 9"),
        (Schedule("warpgroup", "in turn", "random", seed=2), "by warpgroup, in turn, random completion, seed 2"),
    ],
)
def test_schedules_in_words(schedule: Schedule, words: str) -> None:
    assert str(schedule) == words


def test_first_and_last() -> None:
    """A favourite runs whenever it can, or only when nobody else can."""
    assert order(Schedule("warp", "first", favourite=2))[:4] == [2, 2, 2, 2]
    assert order(Schedule("warp", "last", favourite=1))[-4:] == [1, 1, 1, 1]


def test_in_turn() -> None:
    found = order(Schedule("warp", "in turn"))
    assert found[:4] == [0, 1, 2, 3] and sorted(found) == sorted([0, 1, 2, 3] * 4)


def test_seeds() -> None:
    """The same seed gives the same order, other seeds another."""
    orders = [order(Schedule("warp", "random", seed=seed)) for seed in range(6)]
    assert orders == [order(Schedule("warp", "random", seed=seed)) for seed in range(6)]
    assert len({tuple(each) for each in orders}) == 6
    assert all(sorted(each) == sorted([0, 1, 2, 3] * 4) for each in orders)


def test_warps_are_preempted() -> None:
    """By warp, others run between two accesses of a warp that others can see."""
    found = order(Schedule("warp", "random", seed=1))
    assert any(a != b for a, b in zip(found, found[1:], strict=False))
    runs = 1 + sum(a != b for a, b in zip(found, found[1:], strict=False))
    assert runs > 4


def test_no_schedule_changes_a_result() -> None:
    """A sum over all threads through shared memory, in rounds with barriers."""
    body = """
        shl.b32 %r1, %t, 2; add.u32 %r1, %r1, %s; st.shared.b32 [%r1], %t; mov.b32 %r2, 64;
    again:
        bar.sync 0;
        setp.lt.u32 %p1, %t, %r2;
        @!%p1 bra skip;
        shl.b32 %r3, %r2, 2; add.u32 %r3, %r3, %r1; ld.shared.b32 %r4, [%r3]; ld.shared.b32 %r5, [%r1];
        add.u32 %r5, %r5, %r4; st.shared.b32 [%r1], %r5;
    skip:
        shr.u32 %r2, %r2, 1; setp.ne.u32 %p2, %r2, 0;
        @%p2 bra again;
        setp.eq.u32 %p1, %t, 0; @%p1 st.global.b32 [%out], %r5;
    """
    assert clean(body, count=20, threads=128, buffers=zeros(1))["out"].tolist() == [sum(range(128))]
