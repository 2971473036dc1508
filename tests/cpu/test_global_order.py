"""What one CTA stores and another uses: who has to release, who to acquire, and what is reported where one does not."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from machine import LEADER, Machine, aligned, clean, put, tensor_map, wait

from fa3gen.cpu.findings import Hazard, Kind

THREADS = 64
PART = [thread + 7 for thread in range(THREADS)]


def buffers(**more: Any) -> dict[str, Any]:
    names = {"data": 3 * THREADS, "out": THREADS, "word": 4}
    return {name: aligned((count,), np.uint32) for name, count in names.items()} | more


def refused(body: str, at: str, *, grid: int = 2, **settings: Any) -> None:
    """A race under every schedule, reported at the line that has `at`, of whichever CTA comes second."""
    machine = Machine(body, **{"grid": (grid, 1, 1), "threads": THREADS, "buffers": buffers()} | settings)
    for schedule in machine.everywhere():
        with pytest.raises(Hazard) as report:
            machine.run(schedule)
        assert report.value.kind is Kind.GLOBAL_RACE, f"{schedule}: {report.value}"
        assert report.value.place.ptx_line == machine.line(at), f"{schedule}: {report.value}"
        assert re.search(r"warp \d+ of CTA \(\d, 0, 0\)", report.value.detail)


# ---------------------------------------------------------------------- a message

# CTA 0 stores a word for each thread, and thread 0 tells CTA 1, where all threads wait and load.
MESSAGE = f"""
mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; mad.wide.u32 %rd1, %t, 4, %data; mov.u32 %r5, 1;
@%p1 bra spin;
add.u32 %r2, %t, 7; st.global.b32 [%rd1], %r2;
SYNC
setp.eq.u32 %p2, %t, 0;
@!%p2 bra done;
TELL
bra done;
spin:
HEAR
setp.eq.u32 %p3, %r3, 0;
@%p3 bra spin;
BEHIND
ld.global.b32 %r4, [%rd1];
{put("%r4")}
done:
"""
SYNC = "bar.sync 0;"
RELEASE, ACQUIRE = "st.release.gpu.global.b32 [%word], %r5;", "ld.acquire.gpu.global.b32 %r3, [%word];"


def message(*, sync: str = SYNC, tell: str = RELEASE, hear: str = ACQUIRE, behind: str = "") -> str:
    parts = {"SYNC": sync, "TELL": tell, "HEAR": hear, "BEHIND": behind}
    return re.sub("SYNC|TELL|HEAR|BEHIND", lambda found: parts[found[0]], MESSAGE)


TELLING = [
    RELEASE,
    "st.release.sys.global.b32 [%word], %r5;",
    "fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [%word], %r5;",
    "membar.gl; st.relaxed.sys.global.b32 [%word], %r5;",
    "fence.sc.gpu; st.volatile.global.b32 [%word], %r5;",
    "red.release.gpu.global.add.u32 [%word], %r5;",
    "atom.acq_rel.gpu.global.exch.b32 %r6, [%word], %r5;",
    "fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%word], %r5;",
    # What was released to a word before an atomic operation stays, whoever makes that.
    "st.release.gpu.global.b32 [%word], %r5; red.relaxed.gpu.global.add.u32 [%word], %r5;",
]
HEARING = [
    (ACQUIRE, ""),
    ("ld.acquire.sys.global.b32 %r3, [%word];", ""),
    ("ld.relaxed.gpu.global.b32 %r3, [%word];", "fence.acq_rel.gpu;"),
    ("ld.volatile.global.b32 %r3, [%word];", "membar.gl;"),
    ("atom.acquire.gpu.global.add.u32 %r3, [%word], 0;", ""),
    ("atom.global.add.u32 %r3, [%word], 0;", "fence.sc.sys;"),
]


@pytest.mark.parametrize("tell", TELLING)
def test_what_is_released_may_be_used(tell: str) -> None:
    got = clean(message(tell=tell), threads=THREADS, grid=(2, 1, 1), buffers=buffers())
    assert got["out"].tolist() == PART


@pytest.mark.parametrize(("hear", "behind"), HEARING)
def test_by_who_acquires_it(hear: str, behind: str) -> None:
    got = clean(message(hear=hear, behind=behind), threads=THREADS, grid=(2, 1, 1), buffers=buffers())
    assert got["out"].tolist() == PART


@pytest.mark.parametrize(
    "tell",
    [
        "st.relaxed.gpu.global.b32 [%word], %r5;",
        "st.release.cta.global.b32 [%word], %r5;",
        "st.release.cluster.global.b32 [%word], %r5;",
        "fence.acq_rel.cta; st.relaxed.gpu.global.b32 [%word], %r5;",
        "membar.cta; st.relaxed.gpu.global.b32 [%word], %r5;",
        "st.relaxed.gpu.global.b32 [%word], %r5; fence.acq_rel.gpu;",  # too late
        "red.relaxed.gpu.global.add.u32 [%word], %r5;",
        "atom.acquire.gpu.global.exch.b32 %r6, [%word], %r5;",
        # A store that is not released behind one that is: who acquires that word may read either.
        "st.release.gpu.global.b32 [%word], %r5; st.relaxed.gpu.global.b32 [%word], %r5;",
    ],
)
def test_what_is_not_released_may_not(tell: str) -> None:
    refused(message(tell=tell), "ld.global.b32 %r4")


@pytest.mark.parametrize(
    ("hear", "behind"),
    [
        ("ld.relaxed.gpu.global.b32 %r3, [%word];", ""),
        ("ld.acquire.cta.global.b32 %r3, [%word];", ""),
        ("ld.relaxed.gpu.global.b32 %r3, [%word];", "fence.acq_rel.cta;"),
        ("ld.volatile.global.b32 %r3, [%word];", ""),
        ("atom.release.gpu.global.add.u32 %r3, [%word], 0;", ""),
        ("fence.acq_rel.gpu; ld.relaxed.gpu.global.b32 %r3, [%word]; add.u32 %r3, %r3, 1;", ""),  # too early
    ],
)
def test_nor_by_who_does_not_acquire_it(hear: str, behind: str) -> None:
    machine = Machine(
        message(hear=hear, behind=behind), threads=THREADS, grid=(2, 1, 1), buffers=buffers(), shared=1024
    )
    with pytest.raises(Hazard) as report:
        machine.run()
    assert report.value.kind is Kind.GLOBAL_RACE and report.value.place.cta == (1, 0, 0)


def test_a_word_that_is_stored_as_any_other_races() -> None:
    refused(message(tell="st.global.b32 [%word], %r5;"), "ld.acquire.gpu")


@pytest.mark.parametrize("sync", ["", "bar.warp.sync 0xffffffff;"])
def test_threads_have_to_meet_before_one_of_them_tells(sync: str) -> None:
    """Without a barrier those of the other warp may not have stored; and without any not even those of its own."""
    refused(message(sync=sync), "ld.global.b32 %r4")
    alone = {"threads": 32, "buffers": buffers()}
    if sync:
        clean(message(sync=sync), grid=(2, 1, 1), **alone)
    else:
        refused(message(sync=sync), "ld.global.b32 %r4", **alone)


ELECTED = "setp.eq.u32 %p2, %lane, 0;\n@!%p2 bra met;\nSPIN\nmet:"
ONE_HEARS = f"wait_here:\n{ACQUIRE}\nsetp.eq.u32 %p3, %r3, 0;\n@%p3 bra wait_here;"


@pytest.mark.parametrize("meet", ["", "bar.warp.sync 0xffffffff;", SYNC])
def test_and_behind_one_that_has_heard(meet: str) -> None:
    """Lane 0 of each warp acquires: the others know of it when they have met."""
    hear = f"{ELECTED.replace('SPIN', ONE_HEARS)} {meet} mov.u32 %r3, 1;"
    if meet:
        got = clean(message(hear=hear), threads=THREADS, grid=(2, 1, 1), buffers=buffers())
        assert got["out"].tolist() == PART
    else:
        refused(message(hear=hear), "ld.global.b32 %r4")


def test_one_look_is_not_enough() -> None:
    """Where CTA 1 runs first, as some schedules have it, nothing is there yet; values show it, and no race."""
    machine = Machine(
        message().replace("@%p3 bra spin;", ""), threads=THREADS, grid=(2, 1, 1), buffers=buffers(), shared=1024
    )
    got = {str(machine.run(schedule)["out"].tolist()) for schedule in machine.everywhere()}
    assert got == {str(PART), str([0] * THREADS)}


# ---------------------------------------------------------------------- the last to arrive

# Each CTA leaves a part; who counts to the last adds them up, and puts the counter back.
LAST = f"""
mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %r1, {THREADS}, %t; mad.wide.u32 %rd1, %r2, 4, %data;
add.u32 %r3, %r2, 1; st.global.b32 [%rd1], %r3;
MEET
{LEADER}
@!%p30 bra counted;
BEFORE
atom.ORDER.global.add.u32 %r4, [%word], 1;
BEHIND
st.shared.b32 [%s], %r4;
counted:
bar.sync 0;
ld.shared.b32 %r4, [%s]; setp.ne.u32 %p1, %r4, 2;
@%p1 bra done;
mad.wide.u32 %rd2, %t, 4, %data;
ld.global.b32 %r5, [%rd2]; ld.global.b32 %r6, [%rd2+{4 * THREADS}]; ld.global.b32 %r7, [%rd2+{8 * THREADS}];
add.u32 %r5, %r5, %r6; add.u32 %r5, %r5, %r7;
{put("%r5")}
mov.u32 %r8, 0;
@%p30 st.global.b32 [%word], %r8;
done:
"""


def last(order: str, *, meet: str = SYNC, before: str = "", behind: str = "") -> str:
    parts = {"MEET": meet, "ORDER": order, "BEFORE": before, "BEHIND": behind}
    return re.sub("MEET|ORDER|BEFORE|BEHIND", lambda found: parts[found[0]], LAST)


@pytest.mark.parametrize(
    "body", [last("acq_rel.gpu"), last("relaxed.gpu", before="fence.acq_rel.gpu;", behind="fence.acq_rel.gpu;")]
)
def test_the_last_to_arrive_adds_up(body: str) -> None:
    got = clean(body, threads=THREADS, grid=(3, 1, 1), buffers=buffers())
    assert got["out"].tolist() == [3 * (thread + 1) + 3 * THREADS for thread in range(THREADS)]
    assert not got["word"].any()


@pytest.mark.parametrize(
    "body",
    [
        last("relaxed.gpu"),
        last("release.gpu"),
        last("acquire.gpu"),
        last("acq_rel.cta"),
        last("relaxed.gpu", before="fence.acq_rel.gpu;"),
        last("relaxed.gpu", behind="fence.acq_rel.gpu;"),
        last("acq_rel.gpu", meet=""),
        last("acq_rel.gpu", meet="bar.warp.sync 0xffffffff;"),
    ],
)
def test_and_is_reported_where_something_is_missing(body: str) -> None:
    refused(body, "ld.global.b32 %r5", grid=3)


def test_a_counter_that_is_put_back_too_early_is_reported() -> None:
    """By the first that comes; what the others then count is wrong on a GPU, too."""
    early = (
        last("acq_rel.gpu")
        .replace("BEHIND", "")
        .replace("st.shared.b32 [%s], %r4;", "st.shared.b32 [%s], %r4; mov.u32 %r8, 0; st.global.b32 [%word], %r8;")
    )
    refused(early, "atom.acq_rel", grid=3)


# Thread 0 of each CTA counts until four are counted; whoever counts the last one puts the counter back.
COUNTING = """
setp.ne.u32 %p1, %t, 0;
@%p1 bra done;
count:
atom.relaxed.gpu.global.add.u32 %r1, [%word], 1;
setp.eq.u32 %p2, %r1, LAST;
mov.u32 %r2, 0;
@%p2 st.global.b32 [%word], %r2;
setp.lt.u32 %p3, %r1, 3;
@%p3 bra count;
done:
"""


def test_a_counter_that_is_put_back_by_who_goes_on_counting_is_reported() -> None:
    """It would count for ever, and no other CTA come to see that."""
    got = clean(COUNTING.replace("LAST", "4"), threads=THREADS, grid=(2, 1, 1), buffers=buffers())
    assert not got["word"].any()
    machine = Machine(COUNTING.replace("LAST", "2"), grid=(2, 1, 1), threads=THREADS, buffers=buffers())
    for schedule in machine.everywhere():
        with pytest.raises(Hazard, match="stored to since its last one") as report:
            machine.run(schedule)
        assert report.value.kind is Kind.NOT_FINISHED
        assert report.value.place.ptx_line == machine.line("atom.relaxed")


# ---------------------------------------------------------------------- stores beside stores, copies


def test_two_ctas_may_not_store_to_one_place() -> None:
    body = put("%t")
    refused(body, "st.global.b32")
    clean(body, threads=THREADS, buffers=buffers())  # one may
    strong = put("%t").replace("st.global", "st.relaxed.gpu.global")
    assert clean(strong, threads=THREADS, grid=(2, 1, 1), buffers=buffers())["out"].tolist() == list(range(THREADS))


def test_nor_beside_one_another_without_a_gap_but_they_may() -> None:
    """Elements of two bytes that share a word: who stores what is known for each of them."""
    body = """mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %t, 2, %r1; mad.wide.u32 %rd1, %r2, 2, %out;
    cvt.u16.u32 %rs1, %r2; st.global.b16 [%rd1], %rs1;"""
    got = clean(body, threads=THREADS, grid=(2, 1, 1), buffers={"out": aligned((2 * THREADS,), np.uint16)})
    assert got["out"].tolist() == list(range(2 * THREADS))


STORE_BOX = f"""
{LEADER}
mad.lo.u32 %r10, %t, 16, %s; st.shared.v4.b32 [%r10], {{%t, %t, %t, %t}}; fence.proxy.async.shared::cta;
mov.u32 %r1, %ctaid.x; mov.u32 %r2, 0; mul.lo.u32 %r3, %r1, ROWS; bar.sync 0;
@%p30 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%map, {{%r2, %r3}}], [%s];
@%p30 cp.async.bulk.commit_group;
@%p30 cp.async.bulk.wait_group 0;
"""


@pytest.mark.parametrize(("rows", "apart"), [(4, True), (3, False)])
def test_boxes_of_two_ctas_may_not_overlap(rows: int, apart: bool) -> None:
    box = aligned((8, 64), np.uint32)
    maps = {"map": tensor_map(box, "u32", (64, 4))}
    body = STORE_BOX.replace("ROWS", str(rows))
    machine = Machine(body, threads=THREADS, grid=(2, 1, 1), buffers={"box": box}, maps=maps)
    for schedule in machine.everywhere():
        if apart:
            machine.run(schedule)
            continue
        with pytest.raises(Hazard) as report:
            machine.run(schedule)
        assert report.value.kind is Kind.GLOBAL_RACE and "a bulk store of warp 0" in report.value.detail


@pytest.mark.parametrize("order", ["acquire", "relaxed"])
def test_cp_async_copies_what_is_known_only(order: str) -> None:
    body = message(hear=ACQUIRE.replace("acquire", order)).replace(
        "ld.global.b32 %r4, [%rd1];",
        "mad.lo.u32 %r7, %t, 4, %s; cp.async.ca.shared.global [%r7], [%rd1], 4;\ncp.async.wait_all; "
        "ld.shared.b32 %r4, [%r7];",
    )
    if order == "acquire":
        assert clean(body, threads=THREADS, grid=(2, 1, 1), buffers=buffers())["out"].tolist() == PART
    else:
        refused(body, "cp.async.ca")


LOAD_BOX = "cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"


@pytest.mark.parametrize("order", ["acquire", "relaxed"])
def test_tma_loads_what_is_known_only(order: str) -> None:
    load = f"""
    {LEADER}
    @%p30 mbarrier.init.shared.b64 [%s+512], 1;
    fence.mbarrier_init.release.cluster; bar.sync 0;
    mov.u32 %r6, 0;
    @%p30 mbarrier.arrive.expect_tx.shared.b64 _, [%s+512], 256;
    @%p30 {LOAD_BOX} [%s], [%map, {{%r6}}], [%s+512];
    {wait("%s+512", 0, "landed")}
    mad.lo.u32 %r7, %t, 4, %s; ld.shared.b32 %r4, [%r7];
    """
    body = message(hear=ACQUIRE.replace("acquire", order)).replace("ld.global.b32 %r4, [%rd1];", load)
    named = buffers()
    maps = {"map": tensor_map(named["data"], "u32", (64,))}
    machine = Machine(body, threads=THREADS, grid=(2, 1, 1), buffers=named, maps=maps)
    for schedule in machine.everywhere():
        if order == "acquire":
            assert machine.run(schedule)["out"].tolist() == PART
            continue
        with pytest.raises(Hazard) as report:
            machine.run(schedule)
        assert report.value.kind is Kind.GLOBAL_RACE
