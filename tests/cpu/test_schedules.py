"""Schedules: which there are, that they do what they say, and that none of them changes a result."""

from __future__ import annotations

import numpy as np
import pytest
from machine import Machine, clean, tensor_map, wait
from test_barriers import zeros

from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.schedule import FAST, Ctas, Schedule, schedules

LOAD_BOX = "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
FORWARD: Ctas = "first to last"
BACKWARD: Ctas = "last to first"
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
    assert {schedule.ctas for schedule in found} == {schedule.ctas for schedule in found[:4]} == {FORWARD, BACKWARD}


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (FAST, "by warpgroup, in turn, late completion"),
        (Schedule("warp", "first", "early", favourite=3), "by warp, warp 3 first, early completion"),
        (Schedule("warp", "last", "late", favourite=1), "by warp, warp 1 last, late completion"),
        (Schedule("warp", "random", "late", seed=9), "by warp, random, late completion, seed 9"),
        (Schedule("warpgroup", "in turn", "random", seed=2), "by warpgroup, in turn, random completion, seed 2"),
        (
            Schedule("warp", "random", ctas="last to first"),
            "by warp, random, late completion, CTAs from the last to the first, seed 0",
        ),
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


# Each CTA notes its number when it begins, and again when the one before it has ended.
CTAS = """
    mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %t, 0;
    @!%p1 bra done;
    atom.global.add.u32 %r2, [%count], 1;
    mad.wide.u32 %rd1, %r2, 4, %out; st.global.b32 [%rd1], %r1;
spin:
    ld.acquire.gpu.global.b32 %r3, [%count+4];
    setp.ne.u32 %p2, %r3, %r1;
    @%p2 bra spin;
    atom.global.add.u32 %r2, [%count], 1;
    mad.wide.u32 %rd1, %r2, 4, %out; st.global.b32 [%rd1], %r1;
    add.u32 %r3, %r3, 1;
    st.release.gpu.global.b32 [%count+4], %r3;
done:
"""


@pytest.mark.parametrize(("ctas", "wanted"), [(FORWARD, [0, 0, 1, 1, 2, 2]), (BACKWARD, [2, 1, 0, 0, 1, 2])])
def test_who_waits_is_set_aside(ctas: Ctas, wanted: list[int]) -> None:
    """Each CTA waits for the one before it to end; the last one begins first, or last."""
    machine = Machine(CTAS, grid=(3, 1, 1), buffers={"out": zeros(6)["out"], "count": zeros(2)["out"]})
    assert machine.run(Schedule(ctas=ctas))["out"].tolist() == wanted


def test_ctas_that_wait_for_each_other_wait_for_ever() -> None:
    never = CTAS.replace("setp.ne.u32 %p2, %r3, %r1;", "setp.eq.u32 %p2, %r3, 0;")
    machine = Machine(never, grid=(3, 1, 1), buffers={"out": zeros(6)["out"], "count": zeros(2)["out"]})
    for schedule in (FAST, Schedule(ctas="last to first"), *schedules(10, 1)):
        with pytest.raises(Hazard, match="no other CTA will store what the warp waits for") as report:
            machine.run(schedule)
        assert report.value.kind is Kind.DEADLOCK
        assert machine.line("ld.acquire") <= (report.value.place.ptx_line or 0) <= machine.line("@%p2 bra spin")


def test_loads_land_beside_a_warp_that_looks_again_and_again() -> None:
    """Warp 0 waits for a word that warp 1 stores when its load has landed; nobody else is there to wait for that."""
    source = np.arange(64, dtype=np.uint32)
    body = f"""
    setp.eq.u32 %p1, %t, 0; setp.eq.u32 %p2, %t, 32; mov.u32 %r6, 0; mov.u32 %r5, 1;
    @%p1 mbarrier.init.shared.b64 [%s+512], 1;
    fence.mbarrier_init.release.cluster; bar.sync 0;
    setp.eq.u32 %p3, %warp, 0;
    @!%p3 bra load;
spin:
    ld.acquire.gpu.global.b32 %r2, [%word];
    setp.eq.u32 %p4, %r2, 0;
    @%p4 bra spin;
    bra done;
load:
    @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%s+512], 256;
    @%p2 {LOAD_BOX} [%s], [%map, {{%r6}}], [%s+512];
    {wait("%s+512", 0, "landed")}
    @%p2 st.release.gpu.global.b32 [%word], %r5;
done:
    """
    buffers, maps = {"word": zeros(1)["out"], "source": source}, {"map": tensor_map(source, "u32", (64,))}
    assert clean(body, threads=64, buffers=buffers, maps=maps)["word"] == 1
