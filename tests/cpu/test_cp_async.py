"""cp.async: what is copied and zero-filled, and which groups a wait waits for."""

from __future__ import annotations

import random

import numpy as np
import pytest
from machine import Machine, aligned, clean, hazards, put, refused

from fa3gen.cpu.findings import Kind
from fa3gen.cpu.ptx import PtxError

COVERED = {
    "copy": "test_copy",
    "copy_commit": "test_groups",
    "copy_wait": "test_groups",
    "copy_wait_all": "test_wait_all",
}

LANES = 32


def source(count: int) -> np.ndarray:
    """Bytes that are all different from their neighbours, none of them zero."""
    data = aligned((count,), np.uint8)
    data[:] = np.frombuffer(bytes(random.Random(count).randrange(1, 256) for _ in range(count)), np.uint8)
    return data


@pytest.mark.parametrize(
    ("mnemonic", "width"),
    [("cp.async.ca.shared.global", width) for width in (4, 8, 16)]
    + [("cp.async.cg.shared.global", 16), ("cp.async.ca.shared::cta.global.L2::64B", 8)]
    + [("cp.async.cg.shared::cta.global.L2::128B", 16), ("cp.async.ca.shared.global.L2::256B", 4)],
)
@pytest.mark.parametrize("sizes", ["whole", "by lane", "one"])
def test_copy(mnemonic: str, width: int, sizes: str) -> None:
    """`width` bytes of each lane, the last of them zero where a size says so; a lane under a false predicate none."""
    size = {"whole": "", "by lane": ", %r3", "one": f", {width // 2}"}[sizes]
    body = f"""
        mad.lo.u32 %r1, %t, 5, 3; and.b32 %r1, %r1, {LANES - 1}; mad.wide.u32 %rd1, %r1, {width}, %data;
        mad.lo.u32 %r2, %t, {width}, %s; rem.u32 %r3, %t, {width + 1}; setp.ne.u32 %p1, %t, 9;
        @%p1 {mnemonic} [%r2], [%rd1], {width}{size};
        cp.async.commit_group;
        cp.async.wait_group 0;
        mad.wide.u32 %rd2, %t, {width}, %out;
        mov.b32 %r5, 0;
    next:
        add.u32 %r6, %r2, %r5; cvt.u64.u32 %rd4, %r5; add.u64 %rd4, %rd4, %rd2;
        @%p1 ld.shared.b32 %r7, [%r6]; @%p1 st.global.b32 [%rd4], %r7;
        add.u32 %r5, %r5, 4; setp.lt.u32 %p2, %r5, {width};
        @%p2 bra next;
    """
    data = source(LANES * width)
    found = clean(body, count=3, threads=LANES, buffers={"data": data, "out": aligned((LANES, width), np.uint8)})["out"]
    for lane in range(LANES):
        start = (5 * lane + 3) % LANES * width
        copied = {"whole": width, "by lane": lane % (width + 1), "one": width // 2}[sizes] if lane != 9 else 0
        assert found[lane].tolist() == data[start : start + copied].tolist() + [0] * (width - copied), lane


COPIES = """
    shl.b32 %r1, %t, 2; add.u32 %r1, %r1, %s; mad.wide.u32 %rd1, %t, 4, %data;
    cp.async.ca.shared.global [%r1], [%rd1], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r1+256], [%rd1+256], 4;
    cp.async.ca.shared.global [%r1+512], [%rd1+512], 4;
    cp.async.commit_group;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r1+768], [%rd1+768], 4;
    cp.async.commit_group;
"""


@pytest.mark.parametrize(
    ("pending", "landed"), [(0, 4), (1, 3), (2, 3), (3, 1), (4, 0), (9, 0)], ids=lambda value: str(value)
)
def test_groups(pending: int, landed: int) -> None:
    """A wait covers all but the latest groups, in the order of their commits; an empty group counts as one."""
    buffers = {"data": source(1024), "out": aligned((64,), np.uint32)}
    for part in range(4):
        body = f"{COPIES}\ncp.async.wait_group {pending};\nld.shared.b32 %r2, [%r1+{256 * part}];\n{put('%r2')}"
        body += "\ncp.async.wait_group 0;"
        if part < landed:
            after = clean(body, count=5, threads=64, buffers=buffers)["out"]
            assert after.tobytes() == buffers["data"][256 * part : 256 * part + 256].tobytes()
        else:
            words = "before it has waited for a cp.async of warp"
            refused(body, Kind.UNAWAITED_LOAD, words, at="ld.shared", count=5, threads=64, buffers=buffers)


def test_wait_all() -> None:
    """Covers copies that no commit covers."""
    copies = COPIES.rsplit("cp.async.commit_group", 1)[0]
    body = f"{copies}\ncp.async.wait_all;\nld.shared.b32 %r2, [%r1+768];\n{put('%r2')}"
    buffers = {"data": source(1024), "out": aligned((64,), np.uint32)}
    after = clean(body, count=5, threads=64, buffers=buffers)["out"]
    assert after.tobytes() == buffers["data"][768:].tobytes()
    uncommitted = body.replace("wait_all", "wait_group 0")
    refused(uncommitted, Kind.UNAWAITED_LOAD, at="ld.shared", count=5, threads=64, buffers=buffers)


def test_other_threads_need_a_barrier() -> None:
    """A wait is for the thread's own copies; other warps learn of them through a barrier after it."""
    body = f"{COPIES}\ncp.async.wait_group 0;\nbar.sync 0;\n"
    body += f"xor.b32 %r2, %r1, 128;\nld.shared.b32 %r3, [%r2];\n{put('%r3')}"
    buffers = {"data": source(1024), "out": aligned((64,), np.uint32)}
    after = clean(body, threads=64, buffers=buffers)["out"]
    words = buffers["data"].view(np.uint32)[:64]
    assert after.tolist() == [*words[32:], *words[:32]]
    early = body.replace("cp.async.wait_group 0;\nbar.sync 0;", "bar.sync 0;\ncp.async.wait_group 0;")
    refused(early, Kind.UNAWAITED_LOAD, at="ld.shared", threads=64, buffers=buffers)


def test_generic_proxy() -> None:
    """cp.async writes through the generic proxy: no fence between a store and it, but an order."""
    body = """
        shl.b32 %r1, %t, 2; add.u32 %r1, %r1, %s; mad.wide.u32 %rd1, %t, 4, %data; xor.b32 %r2, %r1, 128;
        st.shared.b32 [%r2], %t;
        bar.sync 0;
        cp.async.ca.shared.global [%r1], [%rd1], 4;
        cp.async.wait_all;
    """
    buffers = {"data": source(256)}
    clean(body, threads=64, buffers=buffers)
    for schedule_count in (1, 12):
        unordered = body.replace("bar.sync 0;", "")
        found = kinds_of_all(unordered, count=schedule_count, buffers=buffers)
        assert found <= {Kind.RACE, Kind.UNAWAITED_LOAD}


def test_what_others_read_is_not_overwritten() -> None:
    """Until a barrier says that they have."""
    body = """
        shl.b32 %r1, %t, 2; add.u32 %r1, %r1, %s; mad.wide.u32 %rd1, %t, 4, %data; xor.b32 %r2, %r1, 128;
        st.shared.b32 [%r1], %t;
        bar.sync 0;
        ld.shared.b32 %r3, [%r2];
        bar.sync 1;
        cp.async.ca.shared.global [%r1], [%rd1], 4;
        cp.async.wait_all;
    """
    buffers = {"data": source(256)}
    clean(body, count=3, threads=64, buffers=buffers)
    unordered = body.replace("bar.sync 1;", "")
    refused(unordered, {Kind.OVERWRITE, Kind.UNAWAITED_LOAD}, count=3, threads=64, buffers=buffers)
    refused(unordered, Kind.OVERWRITE, "has read it", at="cp.async.ca", count=1, threads=64, buffers=buffers)


def kinds_of_all(body: str, *, count: int, buffers: dict[str, np.ndarray]) -> set[Kind]:
    """The kinds of report; every schedule has to give one."""
    found = hazards(body, count=count, threads=64, buffers=buffers)
    assert all(hazard is not None for hazard in found)
    return {hazard.kind for hazard in found if hazard is not None}


@pytest.mark.parametrize(
    ("copy", "kind", "words"),
    [
        ("cp.async.ca.shared.global [%s+2], [%data], 4;", Kind.MISALIGNED, "4 bytes"),
        ("cp.async.cg.shared.global [%s], [%data+8], 16;", Kind.MISALIGNED, "16 bytes"),
        ("cp.async.cg.shared.global [%s+1024], [%data], 16;", Kind.OUT_OF_BOUNDS, "1024 to 1040 of 1024"),
        ("cp.async.ca.shared.global [%s], [%data], 4, 5;", Kind.OUT_OF_BOUNDS, "reads 5 bytes for a copy of 4"),
    ],
)
def test_bad_copies(copy: str, kind: Kind, words: str) -> None:
    body = f"setp.eq.u32 %p1, %t, 3;\n@%p1 {copy}\ncp.async.wait_all;"
    refused(body, kind, words, at=copy, buffers={"data": source(256)})


@pytest.mark.parametrize(
    ("second", "kind", "words"),
    [
        ("[%r1], [%rd1+256], 4;", Kind.UNAWAITED_LOAD, "before it has waited for a cp.async of warp"),
        ("[%r1+1024], [%rd1], 4;", Kind.OUT_OF_BOUNDS, "of 1024 are accessed"),
        ("[%r1+258], [%rd1], 4;", Kind.MISALIGNED, "4 bytes"),
        ("[%r1+256], [%rd1], 4, 5;", Kind.OUT_OF_BOUNDS, "reads 5 bytes for a copy of 4"),
        ("[%r1+256], [%rd1], 4, %r9;", Kind.UNINITIALISED_REGISTER, "%r9 is read before it was written"),
    ],
)
def test_copies_in_a_row(second: str, kind: Kind, words: str) -> None:
    """They are issued together where nothing is wrong with any; else the report names the one that is bad."""
    where = "shl.b32 %r1, %t, 2; add.u32 %r1, %r1, %s; mad.wide.u32 %rd1, %t, 4, %data; @%p1 mov.b32 %r9, 4;"
    body = f"setp.ne.u32 %p1, 0, 0;\n{where}\ncp.async.ca.shared.global [%r1], [%rd1], 4;\n"
    body += f"cp.async.ca.shared.global {second}\ncp.async.wait_all;"
    buffers = {"data": source(512)}
    refused(body, kind, words, at=second, count=3, threads=64, buffers=buffers)
    clean(body.replace(second, "[%r1+256], [%rd1+256], 4;"), count=3, threads=64, buffers=buffers)


def test_copies_of_two_warps_to_one_place() -> None:
    body = "and.b32 %r1, %t, 31; shl.b32 %r1, %r1, 2; add.u32 %r1, %r1, %s; mad.wide.u32 %rd1, %t, 4, %data;\n"
    body += "cp.async.ca.shared.global [%r1], [%rd1], 4;\ncp.async.wait_all;"
    buffers = {"data": source(512)}
    refused(body, Kind.UNAWAITED_LOAD, "a cp.async of warp", at="ca.shared", count=3, threads=64, buffers=buffers)
    clean(body.replace("%t, 31", "%t, 63"), count=3, threads=64, buffers=buffers)


def test_bad_sources() -> None:
    """A source outside the tensors is found, unless its size is zero."""
    body = "setp.eq.u32 %p1, %t, 3;\n@%p1 cp.async.cg.shared.global [%s], [%data+256], 16, %r1;\ncp.async.wait_all;"
    refused("mov.b32 %r1, 8;" + body, Kind.OUT_OF_BOUNDS, "in no tensor", buffers={"data": source(256)})
    clean("mov.b32 %r1, 0;" + body, buffers={"data": source(256)})


@pytest.mark.parametrize("copy", ["cg.shared.global [%s], [%data], 8", "ca.shared.global [%s], [%data], 2"])
def test_widths_that_do_not_exist(copy: str) -> None:
    machine = Machine(f"cp.async.{copy};\ncp.async.wait_all;", buffers={"data": source(16)})
    with pytest.raises(PtxError, match=f"^PTX line {machine.line(copy)}: cp.async.{copy[:2]} copies .* bytes only"):
        machine.run()
