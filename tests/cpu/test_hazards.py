"""Every kind of report: kernels without a fault, and each of them with one fact changed.

Under every schedule the kernels run clean and give the right numbers, and every fault is reported.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from machine import LEADER, Machine, aligned, clean, put, refused, tensor_map, wait

from fa3gen.cpu import cta
from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.isa.logic import ANY_BYTES
from fa3gen.cpu.schedule import Schedule

SCHEDULES = 5  # for each fault; the kernels themselves run under twelve


# ---------------------------------------------------------------------- a kernel with everything

# Shared bytes: 0 full mbarriers, 16 empty mbarriers, 1024 A (2 KiB), 3072 two stages of B (256 bytes each), 4096 O.
TILES = 5
PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r100, %r101, %r102, %r103}, %rd1, %rd2, %p5, 1, 1, 0, 0;"
)
STAGE = """
        and.b32 %r11, %r10, 1; shr.u32 %r12, %r10, 1; and.b32 %r12, %r12, 1;
        shl.b32 %r13, %r11, 3; add.u32 %r13, %r13, %s; shl.b32 %r14, %r11, 8;
"""
PIPELINE = f"""
        {LEADER}
        @!%p30 bra ready;
        mbarrier.init.shared.b64 [%s], 1;
        mbarrier.init.shared.b64 [%s+8], 1;
        mbarrier.init.shared.b64 [%s+16], 4;
        mbarrier.init.shared.b64 [%s+24], 4;
        fence.mbarrier_init.release.cluster;
    ready:
        bar.sync 0;
        setp.ge.u32 %p1, %t, 128; setp.eq.u32 %p4, %lane, 0; setp.eq.u32 %p5, %t, %t; mov.b32 %r10, 0;
        mov.b32 %r11, 0; mov.b32 %r12, 0;
        @%p1 bra producer;
        mov.b32 %r3, 0x3F803F80;
        shl.b32 %r1, %t, 4; add.u32 %r1, %r1, %s;
        st.shared.v4.b32 [%r1+1024], {{%r3, %r3, %r3, %r3}};
        fence.proxy.async.shared::cta;
        bar.sync 1, 128;
        add.u32 %r2, %s, 1024; shr.u32 %r2, %r2, 4; cvt.u64.u32 %rd1, %r2;
        add.u64 %rd1, %rd1, {1024 >> 4 << 16 | 128 >> 4 << 32};
        mov.b32 %r100, 0; mov.b32 %r101, 0; mov.b32 %r102, 0; mov.b32 %r103, 0;
    consume:
        {STAGE}
        {wait("%r13", "%r12", "full")}
        add.u32 %r2, %s, %r14; add.u32 %r2, %r2, 3072; shr.u32 %r2, %r2, 4; cvt.u64.u32 %rd2, %r2;
        add.u64 %rd2, %rd2, {128 >> 4 << 16 | 256 >> 4 << 32};
        wgmma.fence.sync.aligned;
        {PRODUCT}
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        @%p4 mbarrier.arrive.shared.b64 _, [%r13+16];
        add.u32 %r10, %r10, 1; setp.lt.u32 %p2, %r10, {TILES};
        @%p2 bra consume;
        st.shared.v4.b32 [%r1+4096], {{%r100, %r101, %r102, %r103}};
        fence.proxy.async;
        bar.sync 2, 128;
        @!%p30 bra end;
        cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%box_out, {{0, 0}}], [%s+4096];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
        bra.uni end;
    producer:
        @!%p4 bra end;
    produce:
        {STAGE}
        xor.b32 %r12, %r12, 1;
        {wait("%r13+16", "%r12", "empty")}
        shl.b32 %r15, %r10, 8; add.u32 %r16, %s, %r14;
        mbarrier.arrive.expect_tx.shared.b64 _, [%r13], 256;
        cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [%r16+3072], [%box, {{%r15}}], [%r13];
        add.u32 %r10, %r10, 1; setp.lt.u32 %p2, %r10, {TILES};
        @%p2 bra produce;
    end:
"""


def pipeline_settings() -> dict[str, Any]:
    b = aligned((TILES * 256,), np.uint8)
    numbers = np.random.default_rng(1).integers(-3, 4, TILES * 128).astype(np.float32)
    b.view(np.uint16)[:] = numbers.view(np.uint32) >> 16
    out = aligned((8, 256), np.uint8)
    maps = {"box": tensor_map(b, "u8", (256,)), "box_out": tensor_map(out, "u8", (256, 8))}
    return {"threads": 160, "shared": 6144, "buffers": {"b": b, "out": out}, "maps": maps}


def test_pipeline_is_clean() -> None:
    settings = pipeline_settings()
    out = clean(PIPELINE, **settings)["out"].reshape(128, 16).view(np.float32)
    b = (settings["buffers"]["b"].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    # A is all ones: every row of O has the sums over k of the columns; B's bytes: tile, k / 8, n, k % 8.
    sums = b.reshape(TILES, 2, 8, 8).sum(axis=(0, 1, 3))
    for thread in range(128):
        column = 2 * (thread % 4)
        assert out[thread].tolist() == [sums[column], sums[column + 1]] * 2


@dataclass(frozen=True)
class Fault:
    """A change of the pipeline, `old` to `new`, and the report it causes: kind, words and the instruction it is at."""

    name: str
    old: str
    new: str
    kind: Kind | set[Kind]
    words: str = ""
    at: str | None = None


# Before its data has landed for the first time, a place that is read too early has not been written at all.
EARLY = {Kind.UNAWAITED_LOAD, Kind.UNINITIALISED_READ}
UNORDERED = {Kind.RACE, Kind.UNINITIALISED_READ}

TMA_LOAD = "cp.async.bulk.tensor.1d"
TMA_STORE = "cp.async.bulk.tensor.2d"
ARRIVE_EMPTY = "@%p4 mbarrier.arrive.shared.b64 _, [%r13+16];"
EXPECT = "mbarrier.arrive.expect_tx.shared.b64 _, [%r13], 256;"
WAIT_GROUP = "wgmma.wait_group.sync.aligned 0;"
FULL = wait("%r13", "%r12", "full")
EMPTY = wait("%r13+16", "%r12", "empty")

FAULTS = [
    # deadlocks, and counts of mbarriers
    Fault(
        "stage never released", ARRIVE_EMPTY, "", Kind.DEADLOCK, r"mbarrier at shared byte 16: phase 0, 4 of 4 arrivals"
    ),
    Fault(
        "one warp too few releases",
        ", 4;\n        mbarrier.init.shared.b64 [%s+24]",
        ", 5;\n        mbarrier.init.shared.b64 [%s+24]",
        Kind.DEADLOCK,
        r"shared byte 16: phase 0, 1 of 5 arrivals",
    ),
    Fault(
        "all lanes release",
        "@%p4 mbarrier.arrive",
        "mbarrier.arrive",
        Kind.ARRIVAL_COUNT,
        "32 arrivals|128 arrivals",
        ARRIVE_EMPTY[5:],
    ),
    Fault("nobody arrives for the load", EXPECT, "", Kind.DEADLOCK, r"1 of 1 arrivals pending, -256 bytes pending"),
    Fault(
        "too many bytes expected",
        "[%r13], 256;",
        "[%r13], 272;",
        Kind.TRANSACTION_COUNT,
        "0 of 1 arrivals pending, 16 bytes pending",
    ),
    Fault(
        "too few bytes expected",
        "[%r13], 256;",
        "[%r13], 240;",
        Kind.TRANSACTION_COUNT,
        "more bytes landed|fewer bytes were expected",
    ),
    Fault("no bytes expected", "arrive.expect_tx.shared.b64 _, [%r13], 256", "arrive.shared.b64 _, [%r13]", EARLY),
    Fault("no load", "[%r16+3072], [%box, {%r15}], [%r13];", "", Kind.TRANSACTION_COUNT, "256 bytes pending"),
    Fault("load signals the other stage", "{%r15}], [%r13];", "{%r15}], [%s];", Kind.TRANSACTION_COUNT),
    Fault(
        "consumer barrier expects another warp",
        "bar.sync 2, 128",
        "bar.sync 2, 160",
        Kind.DEADLOCK,
        "barrier 2: 128 of 160 threads",
    ),
    # mbarriers that are not there
    Fault(
        "mbarrier never initialised",
        "mbarrier.init.shared.b64 [%s+24], 4;",
        "",
        Kind.BARRIER_NOT_INITIALISED,
        "no mbarrier was initialised at shared byte 24",
        None,
    ),
    Fault(
        "initialisation not ordered",
        "ready:\n        bar.sync 0;",
        "ready:",
        Kind.BARRIER_NOT_INITIALISED,
        "nothing orders the initialisation|no mbarrier was initialised",
    ),
    Fault(
        "no fence after the initialisation",
        "fence.mbarrier_init.release.cluster;",
        "",
        Kind.BARRIER_NOT_INITIALISED,
        "fence.mbarrier_init is missing",
        TMA_LOAD,
    ),
    # loads and their waits
    Fault("full barrier not waited for", FULL, "", EARLY, "operand B of a wgmma"),
    Fault(
        "wrong parity",
        FULL,
        FULL.replace("%r12", "%r12x").replace("full:", "xor.b32 %r12x, %r12, 1;\nfull:"),
        EARLY | {Kind.DEADLOCK},
    ),
    Fault(
        "wrong stage",
        "add.u32 %r16, %s, %r14;",
        "add.u32 %r16, %s, 0;",
        {Kind.OVERWRITE, Kind.UNAWAITED_LOAD},
        "a TMA load",
        TMA_LOAD,
    ),
    Fault(
        "empty barrier not waited for",
        EMPTY,
        "",
        {Kind.OVERWRITE, Kind.ARRIVAL_COUNT, Kind.UNAWAITED_LOAD},
        "a TMA load|arrivals at once are too many",
    ),
    Fault(
        "stage released before the product is done",
        f"{WAIT_GROUP}\n        {ARRIVE_EMPTY}",
        f"{ARRIVE_EMPTY}\n        {WAIT_GROUP}",
        Kind.OVERWRITE,
        "a TMA load overwrites shared byte .* a wgmma of warpgroup 0 has read it",
        TMA_LOAD,
    ),
    # registers
    Fault("no wait for the product", WAIT_GROUP, "", Kind.OVERWRITE),
    Fault("no commit", "wgmma.commit_group.sync.aligned;", "", Kind.OVERWRITE),
    Fault(
        "accumulators not initialised",
        "mov.b32 %r102, 0;",
        "",
        Kind.UNINITIALISED_REGISTER,
        "never written",
        "wgmma.mma_async",
    ),
    Fault("no wgmma.fence", "wgmma.fence.sync.aligned;", "", Kind.MISSING_WGMMA_FENCE, "", "wgmma.mma_async"),
    Fault(
        "wgmma.fence before the last change",
        "wgmma.fence.sync.aligned;",
        "wgmma.fence.sync.aligned; mov.b32 %r101, 0;",
        Kind.MISSING_WGMMA_FENCE,
        "",
        "wgmma.mma_async",
    ),
    Fault(
        "accumulator read",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.commit_group.sync.aligned; add.u32 %r5, %r103, 1;",
        Kind.REGISTER_IN_FLIGHT,
        "%r103",
        "%r5, %r103",
    ),
    Fault(
        "accumulator moved away",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.commit_group.sync.aligned; mov.b32 %r5, %r103;\nwgmma.wait_group.sync.aligned 0; add.u32 %r5, %r5, 1;",
        Kind.REGISTER_IN_FLIGHT,
        "%r5",
        "%r5, %r5",
    ),
    Fault(
        "accumulator selected",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.commit_group.sync.aligned; mov.b32 %r5, 0; @%p4 mov.b32 %r5, %r103;\nadd.u32 %r5, %r5, 1;",
        Kind.REGISTER_IN_FLIGHT,
    ),
    Fault(
        "accumulator compared",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.commit_group.sync.aligned; setp.ne.b32 %p7, %r103, 7; selp.b32 %r5, 1, 0, %p7;",
        Kind.REGISTER_IN_FLIGHT,
        "%r103",
    ),
    Fault(
        "all accumulators written",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.commit_group.sync.aligned; mov.b32 %r100, 0; mov.b32 %r101, 0; mov.b32 %r102, 0; mov.b32 %r103, 0;",
        Kind.REGISTER_IN_FLIGHT,
        "%r100",
        "aligned; mov.b32 %r100",
    ),
    Fault(
        "accumulator written",
        "wgmma.commit_group.sync.aligned;",
        "wgmma.commit_group.sync.aligned; mov.b32 %r100, 0;",
        Kind.REGISTER_IN_FLIGHT,
        "%r100",
        "aligned; mov.b32 %r100",
    ),
    # proxies
    Fault(
        "no fence between stores and product",
        "fence.proxy.async.shared::cta;",
        "",
        Kind.MISSING_PROXY_FENCE,
        "operand A of a wgmma accesses shared byte 1024, written by warp 0",
        "wgmma.mma_async",
    ),
    Fault(
        "fence before the stores",
        "st.shared.v4.b32 [%r1+1024], {%r3, %r3, %r3, %r3};\n        fence.proxy.async.shared::cta;",
        "fence.proxy.async.shared::cta;\n        st.shared.v4.b32 [%r1+1024], {%r3, %r3, %r3, %r3};",
        Kind.MISSING_PROXY_FENCE,
        "operand A",
    ),
    Fault(
        "no fence between stores and TMA store",
        "fence.proxy.async;",
        "",
        Kind.MISSING_PROXY_FENCE,
        "a TMA store accesses shared byte 4096",
        TMA_STORE,
    ),
    Fault("no barrier between stores and TMA store", "bar.sync 2, 128;", "", UNORDERED, "a TMA store"),
    Fault("no barrier between stores and product", "bar.sync 1, 128;", "", UNORDERED, "operand A"),
    # bounds and alignment
    Fault("TMA box misaligned", "[%r16+3072]", "[%r16+3056]", Kind.MISALIGNED, "needs a multiple of 128", TMA_LOAD),
    Fault("TMA box out of bounds", "[%s+4096];", "[%s+4224];", Kind.OUT_OF_BOUNDS, "4224 to 6272 of 6144", TMA_STORE),
    Fault("operand out of bounds", "%r2, %s, 1024;", "%r2, %s, 5120;", Kind.OUT_OF_BOUNDS, "operand A of a wgmma"),
    Fault("store out of bounds", "[%r1+4096], {", "[%r1+4112], {", Kind.OUT_OF_BOUNDS, "", "[%r1+4112]"),
    Fault(
        "mbarrier misaligned",
        "mbarrier.init.shared.b64 [%s+24]",
        "mbarrier.init.shared.b64 [%s+28]",
        Kind.MISALIGNED,
        "multiple of 8",
        "[%s+28]",
    ),
    Fault(
        "mbarrier out of bounds",
        "mbarrier.init.shared.b64 [%s+24]",
        "mbarrier.init.shared.b64 [%s+6144]",
        Kind.OUT_OF_BOUNDS,
        "",
        "[%s+6144]",
    ),
    # memory that nobody wrote
    Fault(
        "operand not written",
        "st.shared.v4.b32 [%r1+1024]",
        "@%p30 st.shared.v4.b32 [%r1+1024]",
        Kind.UNINITIALISED_READ,
        "operand A of a wgmma reads shared byte",
        "wgmma.mma_async",
    ),
    Fault(
        "stored box not written",
        "st.shared.v4.b32 [%r1+4096]",
        "@%p30 st.shared.v4.b32 [%r1+4096]",
        Kind.UNINITIALISED_READ,
        "a TMA store reads shared byte",
        TMA_STORE,
    ),
    # ends
    Fault(
        "store not waited for", "cp.async.bulk.wait_group.read 0;", "", Kind.UNFINISHED, "warp 0 ends with TMA stores"
    ),
    Fault("store not committed", "cp.async.bulk.commit_group;", "", Kind.UNFINISHED, "warp 0 ends with TMA stores"),
    # one warp of the warpgroup does something else
    Fault(
        "one warp has another descriptor",
        "wgmma.fence.sync.aligned;",
        "setp.eq.u32 %p6, %warp, 2; @%p6 add.u64 %rd2, %rd2, 16; wgmma.fence.sync.aligned;",
        Kind.WARPGROUP_DIVERGENCE,
        "",
    ),
    Fault(
        "one warp does not accumulate",
        "setp.eq.u32 %p5, %t, %t;",
        "setp.lt.u32 %p5, %t, 96;",
        Kind.WARPGROUP_DIVERGENCE,
    ),
    Fault(
        "one lane has another descriptor",
        "wgmma.fence.sync.aligned;",
        "setp.eq.u32 %p6, %t, 5; @%p6 add.u64 %rd2, %rd2, 16; wgmma.fence.sync.aligned;",
        Kind.WARPGROUP_DIVERGENCE,
        "",
    ),
    Fault(
        "one warp waits for no load",
        FULL,
        "setp.eq.u32 %p6, %warp, 3;\n@%p6 bra past;\n" + FULL + "past:\n",
        EARLY,
        "operand B",
    ),
    Fault(
        "one warp issues no product",
        PRODUCT,
        f"setp.eq.u32 %p6, %warp, 1;\n@%p6 bra past;\n{PRODUCT}\npast:\n",
        Kind.DEADLOCK,
        "wgmma.wait_group",
    ),
    Fault(
        "product in half of a warp",
        PRODUCT,
        f"setp.lt.u32 %p6, %lane, 16;\n@%p6 {PRODUCT}",
        Kind.WARP_DIVERGENCE,
        "wgmma.mma_async is executed by some lanes",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_in_the_pipeline(fault: Fault) -> None:
    assert PIPELINE.count(fault.old) == 1, f"{fault.old} is {PIPELINE.count(fault.old)} times in the kernel"
    body = PIPELINE.replace(fault.old, fault.new)
    if fault.old.startswith("[%r16+3072], ["):
        body = body.replace("cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes ", "")
    body = body.replace("%r12x", "%r17")
    refused(body, fault.kind, fault.words, at=fault.at, count=SCHEDULES, **pipeline_settings())


# ---------------------------------------------------------------------- A in registers

RS_PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r100, %r101, %r102, %r103}, {%r90, %r91, %r92, %r93}, "
    "%rd2, %p5, 1, 1, 0;"
)
FROM_REGISTERS = f"""
        shl.b32 %r1, %t, 4; add.u32 %r1, %r1, %s; setp.lt.u32 %p1, %t, 16; mov.b32 %r3, 0x3F803F80;
        @%p1 st.shared.v4.b32 [%r1], {{%r3, %r3, %r3, %r3}};
        fence.proxy.async.shared::cta;
        bar.sync 0;
        shr.u32 %r2, %s, 4; cvt.u64.u32 %rd2, %r2; add.u64 %rd2, %rd2, {128 >> 4 << 16 | 256 >> 4 << 32};
        setp.lt.u32 %p7, %lane, 3;
        mov.b32 %r100, 0; mov.b32 %r101, 0; mov.b32 %r102, 0; mov.b32 %r103, 0;
        mov.b32 %r90, %r3; mov.b32 %r91, %r3; mov.b32 %r92, %r3; mov.b32 %r93, %r3; setp.eq.u32 %p5, %t, %t;
        wgmma.fence.sync.aligned;
        {RS_PRODUCT}
        wgmma.commit_group.sync.aligned;
        mov.b32 %r6, %r91;
        wgmma.wait_group.sync.aligned 0;
        mov.b32 %r91, 0;
        {put("%r103")}
        {put("%r6", "copy")}
"""
AFTER_COMMIT = "mov.b32 %r6, %r91;"
FENCE = "wgmma.fence.sync.aligned;"

REGISTER_FAULTS = [
    Fault(
        "A written",
        AFTER_COMMIT,
        "add.u32 %r91, %r91, 1;",
        Kind.REGISTER_IN_FLIGHT,
        "%r91 holds A of a wgmma",
        "add.u32 %r91",
    ),
    Fault(
        "A written by some lanes",
        AFTER_COMMIT,
        AFTER_COMMIT + " @%p7 mov.b32 %r93, 0;",
        Kind.REGISTER_IN_FLIGHT,
        "%r93 holds A",
        "@%p7 mov.b32 %r93",
    ),
    Fault("A loaded", AFTER_COMMIT, "ld.shared.b32 %r92, [%s];", Kind.REGISTER_IN_FLIGHT, "%r92 holds A", "%r92, [%s]"),
    Fault(
        "A written after the fence", FENCE, FENCE + " mov.b32 %r90, 0;", Kind.MISSING_WGMMA_FENCE, "", "wgmma.mma_async"
    ),
    Fault(
        "A not written", "mov.b32 %r93, %r3;", "", Kind.UNINITIALISED_REGISTER, "A from registers", "wgmma.mma_async"
    ),
    Fault("no fence at all", FENCE, "", Kind.MISSING_WGMMA_FENCE, "the first wgmma", "wgmma.mma_async"),
    Fault(
        "other registers of a product in flight",
        AFTER_COMMIT,
        RS_PRODUCT.replace("%r100, %r101", "%r104, %r101").replace("%r91", "%r90") + "\nmov.b32 %r104, 0;",
        {Kind.REGISTER_IN_FLIGHT, Kind.UNINITIALISED_REGISTER},
    ),
    Fault(
        "no wait",
        "wgmma.wait_group.sync.aligned 0;\n        mov.b32 %r91, 0;\n        " + put("%r103"),
        "",
        Kind.UNFINISHED,
        "wgmma.mma_async operations of it are in flight",
    ),
    Fault(
        "wait for all but one",
        "wait_group.sync.aligned 0",
        "wait_group.sync.aligned 1",
        Kind.REGISTER_IN_FLIGHT,
        "",
        "mov.b32 %r91, 0;",
    ),
]


def register_settings() -> dict[str, Any]:
    return {"threads": 128, "buffers": {"out": np.zeros(128, np.uint32), "copy": np.zeros(128, np.uint32)}}


def test_a_in_registers_is_clean() -> None:
    """A register of A may be read while the product is in flight, and written after the wait."""
    after = clean(FROM_REGISTERS, **register_settings())
    assert after["out"].view(np.float32).tolist() == [16.0] * 128 and after["copy"].tolist() == [0x3F803F80] * 128


@pytest.mark.parametrize("fault", REGISTER_FAULTS, ids=lambda fault: fault.name)
def test_fault_in_registers(fault: Fault) -> None:
    assert FROM_REGISTERS.count(fault.old) == 1
    body = FROM_REGISTERS.replace(fault.old, fault.new)
    refused(body, fault.kind, fault.words, at=fault.at, count=SCHEDULES, **register_settings())


def test_a_of_the_first_of_two_products() -> None:
    """A wait for all but one group frees the registers of the first product, not those of the second."""
    second = RS_PRODUCT.replace("%r90, %r91, %r92, %r93", "%r94, %r95, %r96, %r97")
    moves = "".join(f"mov.b32 %r{register}, %r3; " for register in range(94, 98))
    body = FROM_REGISTERS.replace(FENCE, f"{moves}\n{FENCE}").replace(
        AFTER_COMMIT,
        f"{second}\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;\n"
        f"mov.b32 %r93, 0; {AFTER_COMMIT}",
    )
    assert clean(body, **register_settings())["out"].view(np.float32).tolist() == [32.0] * 128
    late = body.replace("mov.b32 %r93, 0; mov", "mov.b32 %r97, 0; mov")
    refused(late, Kind.REGISTER_IN_FLIGHT, "%r97 holds A", count=SCHEDULES, **register_settings())


def test_a_warp_that_has_not_waited_after_one_that_has() -> None:
    """Each warp of a product has to have waited: here the loads have landed, and the first warp issues first."""
    skip = f"setp.ne.u32 %p6, %warp, 0; @%p6 bra unawaited;\n{FULL}\nunawaited:"
    assert PIPELINE.count(FULL) == 1
    machine = Machine(PIPELINE.replace(FULL, skip), **pipeline_settings())
    with pytest.raises(Hazard, match="operand B of a wgmma accesses shared byte 3072 before it has waited") as report:
        machine.run(Schedule("warp", "first", "early", favourite=4))
    assert report.value.kind is Kind.UNAWAITED_LOAD and report.value.place.warps == (1,)


# ---------------------------------------------------------------------- races


@dataclass(frozen=True)
class Pair:
    """A kernel of two warps, and what has to be taken out of it to make it race."""

    name: str
    body: str
    taken: str
    words: str = ""
    put_in: str = ""
    kinds: set[Kind] = field(default_factory=lambda: {Kind.RACE})


OWN = "shl.b32 %r1, %t, 2; add.u32 %r1, %r1, %s; xor.b32 %r2, %r1, 128; xor.b32 %r4, %r1, 4;"
FIRST = "setp.eq.u32 %p1, %warp, 0; setp.eq.u32 %p2, %warp, 1; setp.eq.u32 %p3, %warp, 2; mov.b32 %r9, 6;\n" + OWN
BY_MBARRIER = f"""{FIRST}{LEADER}
    @%p30 mbarrier.init.shared.b64 [%s+512], 32;
    bar.sync 0;
    @!%p1 bra reader;
    st.shared.b32 [%r1], %t;
    mbarrier.arrive.shared.b64 _, [%s+512];
    bra.uni end;
reader:
    {wait("%s+512", 0, "spin")}
    @%p2 ld.shared.b32 %r3, [%r2];
end:
"""

ROWS = OWN + """
    shl.b32 %r5, %t, 4; add.u32 %r5, %r5, %s; xor.b32 %r10, %r5, 512;
    st.shared.v4.b32 [%r5], {%r1, %r1, %r1, %r1};
"""

PAIRS = [
    Pair(
        "read of another warp's write",
        f"{OWN} st.shared.b32 [%r1], %t;\nbar.sync 0;\nld.shared.b32 %r3, [%r2];",
        "bar.sync 0;",
        "nothing synchronises the two|nothing has written",
        kinds=UNORDERED,
    ),
    Pair(
        "the same value written by two warps",
        FIRST + """
        setp.eq.u32 %p4, %lane, 0; and.pred %p1, %p1, %p4; and.pred %p2, %p2, %p4;
        @%p1 st.shared.b32 [%s], %r9;
        bar.sync 0;
        @%p2 st.shared.b32 [%s], %r9;
        """,
        "bar.sync 0;",
        "nothing synchronises the two",
    ),
    Pair(
        "write of what another warp reads",
        FIRST + """
        st.shared.b32 [%r1], %r9;
        bar.sync 0;
        @%p1 ld.shared.b32 %r3, [%r2];
        bar.sync 1;
        @%p2 st.shared.b32 [%r1], %r9;
        """,
        "bar.sync 1;",
        "nothing synchronises|nothing says that warp 0 has read it",
    ),
    Pair(
        "a barrier that not both take part in",
        f"{FIRST} @%p1 st.shared.b32 [%r1], %t;\nbar.sync 0;\n@%p2 ld.shared.b32 %r3, [%r2];",
        "bar.sync 0;",
        put_in="@%p1 bar.sync 1, 32;",
        kinds=UNORDERED,
    ),
    Pair(
        "neighbouring lanes: write, read",
        f"{OWN} st.shared.b32 [%r1], %t;\nbar.warp.sync -1;\nld.shared.b32 %r3, [%r4];",
        "bar.warp.sync -1;",
        "one lane of warp . and was written by another.*bar.warp.sync",
    ),
    Pair(
        "neighbouring lanes: read, write",
        OWN + """
        st.shared.b32 [%r1], %t;
        bar.warp.sync -1;
        ld.shared.b32 %r3, [%r4];
        bar.warp.sync 0xffffffff;
        st.shared.b32 [%r1], %r3;
        """,
        "bar.warp.sync 0xffffffff;",
        "bar.warp.sync",
    ),
    Pair(
        "neighbouring lanes: write, write",
        f"{OWN} st.shared.b32 [%r1], %r1;\nbar.warp.sync -1;\nst.shared.b32 [%r4], %r1;",
        "bar.warp.sync -1;",
        "bar.warp.sync",
    ),
    Pair(
        "all lanes write one place",
        f"{OWN}\nst.shared.b32 [%r1], %r1;",
        "[%r1]",
        "two lanes write shared byte 0 in one instruction",
        put_in="[%s]",
    ),
    Pair(
        "one lane writes, all lanes read",
        OWN + LEADER + """
        @%p30 st.shared.b32 [%s], %t;
        bar.warp.sync -1;
        setp.lt.u32 %p1, %t, 32;
        @%p1 ld.shared.b32 %r3, [%s];
        """,
        "bar.warp.sync -1;",
        "bar.warp.sync",
    ),
    Pair("read without a wait for the mbarrier", BY_MBARRIER, wait("%s+512", 0, "spin"), kinds=UNORDERED),
    Pair(
        "arrival before the write",
        BY_MBARRIER,
        "st.shared.b32 [%r1], %t;\n    mbarrier.arrive.shared.b64 _, [%s+512];",
        put_in="mbarrier.arrive.shared.b64 _, [%s+512];\nst.shared.b32 [%r1], %t;",
        kinds=UNORDERED,
    ),
    Pair(
        "wait for the wrong parity",
        BY_MBARRIER,
        "[%s+512], 0;",
        put_in="[%s+512], 1;",
        kinds=UNORDERED | {Kind.DEADLOCK},
    ),
    Pair(
        "order through a third warp",
        FIRST + """
        @%p1 st.shared.b32 [%r1], %t;
        @%p1 bar.arrive 1, 64;
        @%p3 bar.sync 1, 64;
        @%p3 bar.arrive 2, 64;
        @%p2 bar.sync 2, 64;
        @%p2 ld.shared.b32 %r3, [%r2];
        """,
        "@%p3 bar.sync 1, 64;",
        put_in="@%p3 bar.arrive 1, 64;",
        kinds=UNORDERED,
    ),
    Pair(
        "an arrival tells the one who arrives nothing",
        FIRST + """
        st.shared.b32 [%r1], %t;
        bar.sync 0;
        @%p2 ld.shared.b32 %r3, [%r2];
        @%p2 bar.sync 1, 64;
        @%p1 bar.sync 1, 64;
        @%p1 st.shared.b32 [%r1], %r9;
        """,
        "@%p1 bar.sync 1, 64;",
        "has read it|nothing synchronises",
        put_in="@%p1 bar.arrive 1, 64;",
    ),
    Pair(
        "ldmatrix of another warp's rows",
        ROWS + "bar.sync 0;\nldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6, %r7, %r8, %r9}, [%r10];",
        "bar.sync 0;",
        kinds=UNORDERED,
    ),
    Pair(
        "stmatrix over what another warp reads",
        ROWS + """
        bar.sync 0;
        ld.shared.b32 %r7, [%r10];
        bar.sync 1;
        stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r5], {%r1, %r1, %r1, %r1};
        """,
        "bar.sync 1;",
        "has read it|nothing synchronises",
    ),
    Pair(
        "lanes and ldmatrix",
        ROWS + "bar.warp.sync -1;\nldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r6, %r7, %r8, %r9}, [%r5];",
        "bar.warp.sync -1;",
        "bar.warp.sync",
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_races(pair: Pair) -> None:
    """Found from the order of events, whatever the numbers are; a run without the fault is clean."""
    threads = 96 if "%p3 " in pair.body.replace(FIRST, "") else 64
    clean(pair.body, threads=threads, shared=2048)
    assert pair.body.count(pair.taken) == 1
    body = pair.body.replace(pair.taken, pair.put_in)
    refused(body, pair.kinds, pair.words, count=SCHEDULES, threads=threads, shared=2048)


# ---------------------------------------------------------------------- single instructions

IN_LANE_3 = "setp.eq.u32 %p1, %t, 35; mov.b32 %r1, 0; cvta.to.local.u64 %rd9, %rd9;"
SINGLE = [
    (
        "ld.shared.b32 %r2, [%s];",
        "ld.shared.b32 %r2, [%s+64];",
        Kind.UNINITIALISED_READ,
        "shared byte 64, which nothing has written",
    ),
    (
        "ld.shared.b32 %r2, [%s+4];",
        "ld.shared.b32 %r2, [%s+2];",
        Kind.MISALIGNED,
        "shared byte 2 is accessed as 4 bytes",
    ),
    (
        "ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%s];",
        "ld.shared.v4.b32 {%r2, %r3, %r4, %r5}, [%s+4];",
        Kind.MISALIGNED,
        "16 bytes",
    ),
    ("st.shared.b32 [%s+1020], %r1;", "st.shared.b32 [%s+1024], %r1;", Kind.OUT_OF_BOUNDS, "1024 to 1028 of 1024"),
    ("st.shared.b32 [%s], %r1;", "st.shared.b32 [%s+-4], %r1;", Kind.OUT_OF_BOUNDS, "-4 to 0"),
    ("ld.shared.b32 %r2, [%s];", "ld.shared.b32 %r2, [0];", Kind.OUT_OF_BOUNDS, "-1024"),
    ("ld.global.b32 %r2, [%data+60];", "ld.global.b32 %r2, [%data+64];", Kind.OUT_OF_BOUNDS, "in no tensor"),
    ("ld.global.b64 %rd2, [%data+56];", "ld.global.b64 %rd2, [%data+60];", Kind.MISALIGNED, "8 bytes"),
    (
        "ld.global.v2.b32 {%r2, %r3}, [%half+24];",
        "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%half+16];",
        Kind.OUT_OF_BOUNDS,
        "bytes 16 to 32 of half, which has 24",
    ),
    ("st.global.b32 [%data], %r1;", "st.global.b32 [%data-4], %r1;", Kind.OUT_OF_BOUNDS, "in no tensor"),
    ("st.global.b32 [%data], %r1;", "st.global.b32 [%data+2], %r1;", Kind.MISALIGNED, "4 bytes"),
    ("st.local.b32 [%rd3+12], %r1;", "st.local.b32 [%rd3+16], %r1;", Kind.OUT_OF_BOUNDS, "local byte 16 of 16"),
    ("ld.local.b32 %r2, [%rd3+4];", "ld.local.b32 %r2, [%rd3+6];", Kind.MISALIGNED, "local"),
    ("atom.shared.add.u32 %r2, [%s], 1;", "atom.shared.add.u32 %r2, [%s+2], 1;", Kind.MISALIGNED, "4 bytes"),
    ("red.global.add.u32 [%data], 1;", "red.global.add.u32 [%data+64], 1;", Kind.OUT_OF_BOUNDS, "in no tensor"),
    ("atom.shared.add.u32 %r2, [%s], 1;", "atom.shared.add.u32 %r2, [%s+1024], 1;", Kind.OUT_OF_BOUNDS, "1024 to 1028"),
    ("add.u32 %r2, %r1, 1;", "add.u32 %r2, %r8, 1;", Kind.UNINITIALISED_REGISTER, "%r8 is read before it was written"),
]


@pytest.mark.parametrize(("good", "bad", "kind", "words"), SINGLE, ids=lambda value: str(value)[:40])
def test_single_accesses(good: str, bad: str, kind: Kind, words: str) -> None:
    """One lane of the second warp."""
    if "half" in good:
        good, bad = good.replace("+24", "+16"), bad
    body = f"""
        .local .align 16 .b8 frame[16];
        setp.eq.u32 %p1, %t, 35; mov.b32 %r1, 0; mov.b64 %rd3, frame;
        @%p1 st.shared.v4.b32 [%s], {{%r1, %r1, %r1, %r1}};
        @%p1 {good}
    """
    buffers = {"data": aligned((64,), np.uint8), "half": aligned((24,), np.uint8)}
    clean(body, count=3, threads=64, buffers=buffers)
    hazard = refused(body.replace(good, bad), kind, words, at=bad, count=3, threads=64, buffers=buffers)
    assert 1 in hazard.place.warps


def test_bytes_that_nobody_needs_may_be_of_a_register_that_nothing_writes() -> None:
    """LLVM packs bytes so; of what it needs they are not, or the result would show it."""
    packed = "prmt.b32 %r1, %t, %r8, 0x{order}; " + put("%r1")
    buffers = {"out": aligned((32,), np.uint32)}
    known = clean(packed.format(order="1010"), count=2, buffers=buffers)["out"]
    assert known.tolist() == [lane << 16 | lane for lane in range(32)]
    assert clean(packed.format(order="4040"), count=2, buffers=buffers)["out"][0] & 0xFF00 == ANY_BYTES % 256 << 8


FOUR = "{%r1, %r1, %r1, %r1}"


@pytest.mark.parametrize(
    "instruction",
    ["bar.sync 0;", "bar.arrive 1, 64;", "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r2}, [%s];"]
    + ["stmatrix.sync.aligned.m8n8.x1.shared.b16 [%s], {%r1};", "setmaxnreg.dec.sync.aligned.u32 24;"]
    + ["wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"]
    + [f"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {FOUR}, {FOUR}, {{%r1, %r1}}, {FOUR};"],
)
def test_half_a_warp(instruction: str) -> None:
    body = f"setp.lt.u32 %p1, %lane, 16; mov.b32 %r1, 0;\n@%p1 {instruction}"
    refused(body, Kind.WARP_DIVERGENCE, "executed by some lanes of a warp only", at=instruction, count=3, threads=128)


def test_registers_of_a_whole_warpgroup() -> None:
    """setmaxnreg is for all warps of a warpgroup."""
    body = "setp.lt.u32 %p1, %warp, 4;\n@%p1 setmaxnreg.dec.sync.aligned.u32 24;"
    clean(body, threads=256)
    words = r"warp 0 has executed setmaxnreg \['dec 24'\] and warp 3 of its warpgroup \[\]"
    refused(body.replace("%warp, 4", "%warp, 3"), Kind.WARPGROUP_DIVERGENCE, words, threads=256)


@pytest.mark.parametrize(
    "access", ["st.shared.b32 [%s+12], %t;", "ld.shared.b32 %r1, [%s+8];", "st.shared.v4.b32 [%s], {%t, %t, %t, %t};"]
)
def test_an_mbarrier_is_no_memory(access: str) -> None:
    """Ordinary accesses miss it; afterwards its bytes are memory that nobody has written."""
    body = f"{LEADER}@!%p30 bra end;\nmbarrier.init.shared.b64 [%s+8], 1;\n{access}\nend:"
    refused(body, Kind.OUT_OF_BOUNDS, "which holds an mbarrier", at=access)
    ended = body.replace(access, "mbarrier.inval.shared.b64 [%s+8];\n" + access)
    if "ld" in access:
        refused(ended, Kind.UNINITIALISED_READ, "shared byte 8", at=access)
    else:
        clean(ended)


@pytest.mark.parametrize(
    "access", ["st.shared.b16 [%s+6000], %rs1;", "ld.shared.u8 %r20, [%s+6000];", "st.shared.b64 [%s+6000], %rd1;"]
)
def test_narrow_accesses(access: str) -> None:
    """A kernel with narrower accesses, of which more is remembered, is as clean and as faulty as without."""
    settings = pipeline_settings()
    body = PIPELINE.replace("bar.sync 2, 128;", f"bar.sync 2, 128;\nsetp.gt.u32 %p9, %t, 999;\n@%p9 {access}")
    clean(body, count=5, **settings)
    for old, kind in (
        ("fence.proxy.async;", Kind.MISSING_PROXY_FENCE),
        (EMPTY, Kind.OVERWRITE),
        (FULL, Kind.UNAWAITED_LOAD),
    ):
        kinds = {kind} | EARLY | {Kind.ARRIVAL_COUNT}
        refused(body.replace(old, ""), kinds - (EARLY if "fence" in old else set()), count=5, **settings)


def test_cp_async_of_neighbouring_bytes() -> None:
    """Two warps copy four bytes each in turn; a thread then reads sixteen."""
    body = """
        shl.b32 %r1, %lane, 1; add.u32 %r1, %r1, %warp; shl.b32 %r1, %r1, 2;
        add.u32 %r2, %r1, %s; cvt.u64.u32 %rd1, %r1; add.u64 %rd1, %rd1, %data;
        cp.async.ca.shared.global [%r2], [%rd1], 4;
        cp.async.wait_all;
        bar.sync 0;
        and.b32 %r1, %t, 15; shl.b32 %r1, %r1, 4; add.u32 %r2, %s, %r1; ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2];
        mad.wide.u32 %rd2, %t, 16, %out; st.global.v4.b32 [%rd2], {%r4, %r5, %r6, %r7};
    """
    buffers = {"data": aligned((64,), np.uint32), "out": aligned((64, 4), np.uint32)}
    buffers["data"][:] = np.arange(64)
    assert clean(body, threads=64, buffers=buffers)["out"].tolist() == np.arange(64).reshape(16, 4).tolist() * 4
    refused(body.replace("bar.sync 0;", ""), EARLY, threads=64, buffers=buffers)


def test_cp_async_into_an_operand() -> None:
    """cp.async writes through the generic proxy: a product needs the fence after the wait."""
    copied = FROM_REGISTERS.replace(
        "@%p1 st.shared.v4.b32 [%r1], {%r3, %r3, %r3, %r3};",
        "@%p1 cp.async.cg.shared.global [%r1], [%data], 16;\ncp.async.wait_all;",
    )
    settings = register_settings()
    settings["buffers"]["data"] = np.full(8, 0x3F80, np.uint16)
    assert clean(copied, **settings)["out"].view(np.float32).tolist() == [16.0] * 128
    fence = "fence.proxy.async.shared::cta;"
    words = "written by a cp.async of warp 0 through the generic proxy"
    without = copied.replace(fence, "")
    refused(without, Kind.MISSING_PROXY_FENCE, words, at="wgmma.mma_async", count=SCHEDULES, **settings)
    early = without.replace("cp.async.wait_all;", f"{fence} cp.async.wait_all;")
    refused(early, Kind.MISSING_PROXY_FENCE, words, count=SCHEDULES, **settings)
    refused(copied.replace("cp.async.wait_all;", ""), Kind.UNAWAITED_LOAD, count=SCHEDULES, **settings)


def test_lanes_differ_in_an_operand() -> None:
    refused(
        "and.b32 %r1, %t, 1;\nbar.sync %r1;", Kind.WARP_DIVERGENCE, "barrier number: 0 and 1", at="bar.sync", count=3
    )


def test_warps_issue_different_products() -> None:
    """Two instructions that look alike are two products."""
    body = FROM_REGISTERS.replace(
        RS_PRODUCT,
        f"setp.eq.u32 %p6, %warp, 2;\n@%p6 bra other;\n{RS_PRODUCT}\nbra.uni join;\nother:\n{RS_PRODUCT}\njoin:",
    )
    refused(body, Kind.WARPGROUP_DIVERGENCE, "another warp of its warpgroup", count=SCHEDULES, **register_settings())


def test_no_end_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cta, "MAX_BLOCKS", 1000)
    refused("again:\nadd.u32 %r1, %t, 1;\nbra again;\n", Kind.NOT_FINISHED, "1000 blocks")


def test_tensor_map_that_the_driver_refuses() -> None:
    settings = pipeline_settings()
    data = bytearray(settings["maps"]["box"])
    data[0] |= 8  # the address of a map is a multiple of 16
    settings["maps"]["box"] = bytes(data)
    refused(PIPELINE, Kind.TENSOR_MAP, "8 past a multiple of 16", at=TMA_LOAD, count=2, **settings)


# ---------------------------------------------------------------------- what reports say


def test_a_deadlock_names_everybody() -> None:
    """Warps that wait at named barriers and mbarriers, for arrivals and for bytes, each with its place."""
    body = f"""
        {LEADER}
        @%p30 mbarrier.init.shared.b64 [%s], 3;
        @%p30 mbarrier.init.shared.b64 [%s+8], 1;
        bar.sync 0;
        @%p30 mbarrier.arrive.shared.b64 _, [%s];
        @%p30 mbarrier.expect_tx.shared.b64 [%s+8], 48;
        setp.eq.u32 %p1, %warp, 0; setp.eq.u32 %p2, %warp, 1; setp.eq.u32 %p3, %warp, 2;
        @%p1 bra at_barrier;
        @%p2 bra at_first;
        @%p3 bra at_second;
        ret;
    at_barrier:
        bar.sync 7, 96;
        ret;
    at_first:
        {wait("%s", 0, "first")}
        ret;
    at_second:
        {wait("%s+8", 0, "second")}
    """
    text = str(refused(body, Kind.DEADLOCK, count=SCHEDULES, threads=128))
    for pattern in (
        r"warp 0, PTX line \d+: bar.sync waits for barrier 7: 32 of 96 threads have arrived",
        r"warp 1, PTX line \d+: mbarrier.try_wait.* shared byte 0: phase 0, 2 of 3 arrivals pending, 0 bytes pending",
        r"warp 2, PTX line \d+: mbarrier.try_wait.* shared byte 8: phase 0, 1 of 1 arrivals pending, 48 bytes pending",
    ):
        assert re.search(pattern, text), text
    assert "warp 3" not in text


def test_no_warp_is_blamed_for_a_load_that_lands() -> None:
    """Where more bytes land than were expected, the report names the mbarrier and no warp."""
    body = PIPELINE.replace("[%r13], 256;", "[%r13], 240;")
    machine = Machine(body, **pipeline_settings())
    for schedule in machine.everywhere(3):
        with pytest.raises(Hazard, match="mbarrier at shared byte 0: phase 0, 0 of 1 arrivals pending, -16") as report:
            machine.run(schedule)
        assert report.value.place.warps == () and report.value.place.cta == (0, 0, 0)


def test_an_ended_warp_is_missed() -> None:
    """A barrier with a count waits for threads that have ended."""
    body = "setp.eq.u32 %p1, %warp, 1;\n@%p1 ret;\nbar.sync 1, 64;"
    refused(body, Kind.DEADLOCK, "barrier 1: 32 of 64 threads", threads=64)
    clean(body.replace("64", "32"), threads=64)


def test_the_place_of_a_report() -> None:
    """CTA, warps, PTX line, instruction and the line of the generated module."""
    body = ".loc 1 33 8\nmov.b32 %r1, 0; setp.eq.u32 %p1, %warp, 1;\n.loc 1 34 8\n@%p1 st.shared.b32 [%r1], %r1;\n"
    machine = Machine(body, threads=64)
    with pytest.raises(Hazard) as report:
        machine.run(machine.everywhere(2)[1])
    hazard, line = report.value, machine.line("st.shared")
    assert (hazard.kind, hazard.place.warps, hazard.place.ptx_line) == (Kind.OUT_OF_BOUNDS, (1,), line)
    assert hazard.place.source == ("generated/tested.py", 34) and hazard.place.text == "st.shared.b32"
    assert str(hazard) == (
        "access out of bounds: shared bytes -1024 to -1020 of 1024 are accessed\n"
        f"  at CTA (0, 0, 0), warp 1, PTX line {line}: st.shared.b32, generated/tested.py:34"
    )
