"""Named barriers, mbarriers, fences, branches and the register pool: what they order, count and let pass."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from machine import LEADER, clean, put, refused, run, wait

from fa3gen.cpu import forms
from fa3gen.cpu.findings import Kind
from fa3gen.cpu.isa import control

COVERED = {
    "branch": "test_branch",
    "finish": "test_finish",
    "trap": "test_trap",
    "named_barrier": "test_every_thread_arrives",
    "warp_barrier": "test_warp_barrier",
    "mbarrier_init": "test_phases",
    "mbarrier_inval": "test_invalidate",
    "mbarrier_arrive": "test_phases",
    "mbarrier_expect": "test_expected_bytes",
    "mbarrier_wait": "test_phases",
    "proxy_fence": "test_fences_change_no_value",
    "mbarrier_init_fence": "test_fences_change_no_value",
    "fence": "test_fences_change_no_value",
    "membar": "test_fences_change_no_value",
    "set_registers": "test_registers_move_between_warpgroups",
    "sleep": "test_fences_change_no_value",
    "dependent_launch": "test_fences_change_no_value",
}


def test_every_form_is_tested() -> None:
    names = {form.emit.__name__ for form in forms.forms() if form.emit.__module__ == control.__name__}
    assert names == set(COVERED), "give each form of fa3gen/cpu/isa/control.py a test"
    assert all(test in globals() for test in COVERED.values())


def zeros(count: int) -> dict[str, np.ndarray]:
    return {"out": np.zeros(count, np.uint32)}


# ---------------------------------------------------------------------- branches and ends


@pytest.mark.parametrize("mnemonic", ["bra", "bra.uni"])
def test_branch(mnemonic: str) -> None:
    body = f"""
        mov.b32 %r1, 0; setp.lt.u32 %p1, %warp, 2;
        @%p1 {mnemonic} skip;
        mov.b32 %r1, 7;
    skip:
        {mnemonic} end;
        mov.b32 %r1, 9;
    end:
        {put("%r1")}
    """
    assert clean(body, threads=128, buffers=zeros(128))["out"].tolist() == [0] * 64 + [7] * 64


@pytest.mark.parametrize("mnemonic", ["ret", "exit", "ret.uni"])
def test_finish(mnemonic: str) -> None:
    """Lanes that have ended do nothing more, the others go on."""
    body = f"and.b32 %r1, %t, 3; setp.eq.u32 %p1, %r1, 1; mov.b32 %r2, 5;\n@%p1 {mnemonic};\n{put('%r2')}"
    assert clean(body, threads=64, buffers=zeros(64))["out"].tolist() == [0 if t % 4 == 1 else 5 for t in range(64)]


def test_trap() -> None:
    body = "setp.eq.u32 %p1, %t, 40;\n@%p1 bra bad;\nret;\nbad:\ntrap;"
    hazard = refused(body, Kind.TRAP, at="trap;", threads=64)
    assert hazard.place.warps == (1,)
    clean(body, threads=32)


# ---------------------------------------------------------------------- named barriers

EXCHANGE = "shl.b32 %r1, %t, 2; add.u32 %r1, %r1, %s; st.shared.b32 [%r1], %t;"
READ_OTHER = "xor.b32 %r2, %t, 32; shl.b32 %r2, %r2, 2; add.u32 %r2, %r2, %s; ld.shared.b32 %r3, [%r2];" + put("%r3")


@pytest.mark.parametrize(
    "mnemonic",
    [
        "bar.sync",
        "bar.cta.sync",
        "barrier.sync",
        "barrier.cta.sync",
        "barrier.sync.aligned",
        "barrier.cta.sync.aligned",
    ],
)
@pytest.mark.parametrize("operands", ["0", "15", "%r9", "3, 128", "%r9, %r8"])
def test_every_thread_arrives(mnemonic: str, operands: str) -> None:
    """What was written before the barrier is read after it, by all warps."""
    body = f"mov.b32 %r9, 5; mov.b32 %r8, 128; {EXCHANGE} {mnemonic} {operands}; {READ_OTHER}"
    expected = [thread ^ 32 for thread in range(128)]
    assert clean(body, count=3, threads=128, buffers=zeros(128))["out"].tolist() == expected


def test_pairs_of_warps() -> None:
    """Each pair has its own barrier; several generations of it follow one another."""
    body = f"""
        shr.u32 %r4, %warp, 1; add.u32 %r4, %r4, 1; mov.b32 %r5, 0; mov.b32 %r6, 0;
    again:
        add.u32 %r7, %t, %r5; shl.b32 %r1, %t, 2; add.u32 %r1, %r1, %s; st.shared.b32 [%r1], %r7;
        bar.sync %r4, 64;
        xor.b32 %r2, %t, 32; shl.b32 %r2, %r2, 2; add.u32 %r2, %r2, %s; ld.shared.b32 %r3, [%r2];
        add.u32 %r6, %r6, %r3;
        bar.sync %r4, 64;
        add.u32 %r5, %r5, 1; setp.lt.u32 %p1, %r5, 5;
        @%p1 bra again;
        {put("%r6")}
    """
    expected = [5 * (thread ^ 32) + 10 for thread in range(128)]
    assert clean(body, threads=128, buffers=zeros(128))["out"].tolist() == expected


@pytest.mark.parametrize("mnemonic", ["bar.arrive", "barrier.arrive", "bar.cta.arrive", "barrier.arrive.aligned"])
def test_arriving_without_waiting(mnemonic: str) -> None:
    """A producer arrives and goes on, a consumer waits; both directions of a one-place buffer, five times."""
    body = f"""
        setp.eq.u32 %p1, %warp, 0; mov.b32 %r5, 0; mov.b32 %r6, 0; shl.b32 %r1, %lane, 2; add.u32 %r1, %r1, %s;
        @%p1 bra producer;
    consumer:
        bar.sync 1, 64;
        ld.shared.b32 %r3, [%r1]; add.u32 %r6, %r6, %r3;
        {mnemonic} 2, 64;
        add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 5;
        @%p2 bra consumer;
        {put("%r6")}
        ret;
    producer:
        setp.eq.u32 %p3, %r5, 0;
        @%p3 bra fill;
        bar.sync 2, 64;
    fill:
        mad.lo.u32 %r3, %r5, 100, %lane; st.shared.b32 [%r1], %r3;
        {mnemonic} 1, 64;
        add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 5;
        @%p2 bra producer;
        bar.sync 2, 64;
    """
    expected = [0] * 32 + [1000 + 5 * lane for lane in range(32)]
    assert clean(body, threads=64, buffers=zeros(64))["out"].tolist() == expected


def test_ended_threads_are_not_waited_for() -> None:
    """A barrier without a count expects the threads that have not ended."""
    body = f"setp.eq.u32 %p1, %warp, 1;\n@%p1 ret;\n{EXCHANGE} bar.sync 0; xor.b32 %r2, %t, 64; shl.b32 %r2, %r2, 2;"
    body += "add.u32 %r2, %r2, %s; setp.eq.u32 %p2, %warp, 3; @!%p2 ld.shared.b32 %r3, [%r2]; @%p2 mov.b32 %r3, 1;"
    body += put("%r3")
    expected = [*range(64, 96), *[0] * 32, *range(32), *[1] * 32]
    assert clean(body, threads=128, buffers=zeros(128))["out"].tolist() == expected


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        ("bar.sync 16;", "barrier 16 does not exist"),
        ("bar.sync 1, 40;", "40 threads, not a multiple of 32"),
        ("bar.sync 1, 32;\nbar.sync 1, 32;", None),
        ("bar.sync 2, 32;", None),
    ],
)
def test_barrier_operands(instruction: str, words: str | None) -> None:
    if words is None:
        clean(instruction)
    else:
        refused(instruction, Kind.ARRIVAL_COUNT, words, at=instruction)


def test_warp_barrier() -> None:
    """Lanes see each other's writes after it, also under a mask."""
    store = "shl.b32 %r1, %t, 2; add.u32 %r1, %r1, %s; st.shared.b32 [%r1], %t;"
    load = "xor.b32 %r2, %r1, 4; ld.shared.b32 %r3, [%r2];"
    whole = f"{store} bar.warp.sync 0xffffffff; {load} {put('%r3')}"
    assert clean(whole, threads=64, buffers=zeros(64))["out"].tolist() == [thread ^ 1 for thread in range(64)]
    body = f"""
        setp.lt.u32 %p1, %lane, 16; mov.b32 %r3, 9;
        @!%p1 bra end;
        bar.warp.sync 65535;
    end:
        {put("%r3")}
    """
    assert clean(body, buffers=zeros(32))["out"].tolist() == [9] * 32
    refused(body.replace("65535", "-1"), Kind.WARP_DIVERGENCE, "other lanes than it names", buffers=zeros(32))


# ---------------------------------------------------------------------- mbarriers


@dataclass
class PhaseModel:
    """An mbarrier of the PTX ISA, "Phase of the mbarrier object", without transactions."""

    count: int
    pending: int = 0
    phase: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int) -> None:
        self.pending -= count
        if self.pending == 0:
            self.pending, self.phase = self.count, self.phase + 1

    def completed(self, parity: int) -> bool:
        """Whether the phase of that parity, the current or the one before it, has completed."""
        return self.phase % 2 != parity


ARRIVALS = ["mbarrier.arrive.shared.b64 _, [%s]{}", "mbarrier.arrive.release.cta.shared::cta.b64 %rd1, [%s]{}"]
ARRIVALS += ["mbarrier.arrive.shared.b64 %rd2, [%s]{}"]
TESTS = ["try_wait.parity.shared", "test_wait.parity.shared", "try_wait.parity.acquire.cta.shared::cta"]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_phases(count: int) -> None:
    """A random sequence of arrivals and tests of one thread, against the model."""
    model, generator = PhaseModel(count), random.Random(count)
    body = [LEADER, "@!%p30 bra end;", f"mbarrier.init.shared.b64 [%s], {count}; mov.b32 %r2, {count};"]
    expected: list[int] = []
    for step in range(60):
        if step % 2:
            parity = generator.randrange(2)
            time_limit = ", 100000" if "try" in TESTS[step % 3] and step % 5 == 0 else ""
            body += [f"mbarrier.{TESTS[step % 3]}.b64 %p1, [%s], {parity}{time_limit}; selp.u32 %r1, 1, 0, %p1;"]
            body += [f"st.global.b32 [%out+{4 * len(expected)}], %r1;"]
            expected.append(int(model.completed(parity)))
        else:
            arrivals = generator.randint(1, model.pending)
            operand = "" if arrivals == 1 else ", %r2" if arrivals == count else f", {arrivals}"
            body += [ARRIVALS[step // 2 % 3].format(operand) + ";"]
            model.arrive(arrivals)
    after = clean("\n".join([*body, "end:"]), count=5, threads=64, buffers=zeros(len(expected)))["out"]
    assert after.tolist() == expected and 0 < sum(expected) < len(expected)


def test_lanes_and_warps_arrive_one_by_one() -> None:
    """An arrival counts once for each lane that executes it."""
    body = f"""
        {LEADER}@%p30 mbarrier.init.shared.b64 [%s+8], 70;
        shl.b32 %r1, %t, 2; add.u32 %r1, %r1, %s; bar.sync 0;
        st.shared.b32 [%r1+16], %t;
        setp.lt.u32 %p1, %lane, 3;
        setp.lt.u32 %p2, %t, 64;
        @%p2 mbarrier.arrive.shared.b64 _, [%s+8];
        setp.ge.u32 %p2, %t, 64; and.pred %p1, %p1, %p2;
        @%p1 mbarrier.arrive.shared.b64 _, [%s+8];
        {wait("%s+8", 0, "spin")}
        sub.u32 %r2, 63, %t; and.b32 %r2, %r2, 63; shl.b32 %r2, %r2, 2; add.u32 %r2, %r2, %s;
        ld.shared.b32 %r3, [%r2+16];
        {put("%r3")}
    """
    after = clean(body, threads=128, buffers=zeros(128))["out"]
    assert after.tolist() == [(63 - thread) % 64 for thread in range(128)]


def test_lanes_name_different_mbarriers() -> None:
    """One instruction may initialise, signal and test several mbarriers."""
    body = f"""
        setp.lt.u32 %p1, %t, 8; shl.b32 %r1, %t, 3; add.u32 %r1, %r1, %s; add.u32 %r2, %lane, 1;
        mov.b32 %r2, 4;
        @%p1 mbarrier.init.shared.b64 [%r1], %r2;
        bar.sync 0;
        and.b32 %r3, %t, 7; shl.b32 %r3, %r3, 3; add.u32 %r3, %r3, %s;
        setp.lt.u32 %p2, %t, 29;
        @%p2 mbarrier.arrive.shared.b64 _, [%r3];
        mbarrier.test_wait.parity.shared.b64 %p3, [%r3], 0;
        selp.u32 %r4, 1, 0, %p3;
        {put("%r4")}
    """
    # Lanes 0 to 28 arrive: mbarriers 0 to 4 get four arrivals, 5 to 7 three.
    assert clean(body, buffers=zeros(32))["out"].tolist() == [int(thread % 8 < 5) for thread in range(32)]


def test_ring_of_stages() -> None:
    """Two stages, full and empty mbarriers, six rounds of plain stores and loads: every round's data arrives."""
    body = f"""
        {LEADER}
        @!%p30 bra ready;
        mbarrier.init.shared.b64 [%s], 32; mbarrier.init.shared.b64 [%s+8], 32;
        mbarrier.init.shared.b64 [%s+16], 64; mbarrier.init.shared.b64 [%s+24], 64;
    ready:
        bar.sync 0;
        mov.b32 %r5, 0; mov.b32 %r6, 0; setp.eq.u32 %p1, %warp, 0;
    round:
        and.b32 %r7, %r5, 1; shr.u32 %r8, %r5, 1; and.b32 %r8, %r8, 1; xor.b32 %r9, %r8, 1;
        shl.b32 %r10, %r7, 3; add.u32 %r10, %r10, %s;
        shl.b32 %r11, %r7, 7; add.u32 %r11, %r11, %s; shl.b32 %r12, %lane, 2; add.u32 %r11, %r11, %r12;
        @!%p1 bra consume;
        {wait("%r10+16", "%r9", "empty")}
        mad.lo.u32 %r13, %r5, 100, %lane; st.shared.b32 [%r11+32], %r13;
        mbarrier.arrive.shared.b64 _, [%r10];
        bra.uni next;
    consume:
        {wait("%r10", "%r8", "full")}
        ld.shared.b32 %r13, [%r11+32]; mad.lo.u32 %r6, %r6, 3, %r13;
        mbarrier.arrive.shared.b64 _, [%r10+16];
    next:
        add.u32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 6;
        @%p2 bra round;
        {put("%r6")}
    """
    total = 0
    for number in range(6):
        total = 3 * total + 100 * number
    expected = [0] * 32 + [total + lane * (3**6 - 1) // 2 for lane in range(32)] * 2
    assert clean(body, threads=96, buffers=zeros(96))["out"].tolist() == expected


@pytest.mark.parametrize("mnemonic", ["mbarrier.inval.shared.b64", "mbarrier.inval.shared::cta.b64"])
def test_invalidate(mnemonic: str) -> None:
    """Its place may hold another mbarrier afterwards, and none before that."""
    body = f"{LEADER}@!%p30 bra end;\nmbarrier.init.shared.b64 [%s], 1;\n{mnemonic} [%s];\n"
    body += "mbarrier.init.shared.b64 [%s], 2;\nend:"
    clean(body)
    refused(body.replace(mnemonic + " [%s];", ""), Kind.BARRIER_NOT_INITIALISED, "initialised again while it is valid")
    use = body.replace("mbarrier.init.shared.b64 [%s], 2", "mbarrier.arrive.shared.b64 _, [%s]")
    refused(use, Kind.BARRIER_NOT_INITIALISED, "no mbarrier was initialised", at="arrive")


@pytest.mark.parametrize(
    "mnemonic", ["mbarrier.expect_tx.shared.b64", "mbarrier.expect_tx.relaxed.cta.shared::cta.b64"]
)
def test_expected_bytes(mnemonic: str) -> None:
    """A phase with all arrivals is open as long as bytes are expected."""
    body = f"""
        {LEADER}@!%p30 bra end;
        mbarrier.init.shared.b64 [%s], 1;
        {mnemonic} [%s], %r1;
        mbarrier.arrive.shared.b64 _, [%s];
        mbarrier.test_wait.parity.shared.b64 %p1, [%s], 0;
        selp.u32 %r2, 1, 0, %p1; st.global.b32 [%out], %r2;
        end:
    """
    assert clean("mov.b32 %r1, 0;" + body, buffers=zeros(1))["out"].tolist() == [1]
    refused("mov.b32 %r1, 64;" + body, Kind.TRANSACTION_COUNT, "0 of 1 arrivals pending, 64 bytes", buffers=zeros(1))


# ---------------------------------------------------------------------- the rest


@pytest.mark.parametrize(
    "instruction",
    ["fence.proxy.async", "fence.proxy.async.shared::cta", "fence.proxy.async.global"]
    + ["fence.mbarrier_init.release.cluster", "fence.cta", "fence.sc.gpu", "fence.acq_rel.cluster", "fence.sys"]
    + ["membar.cta", "membar.gl", "membar.sys", "nanosleep.u32 100", "nanosleep.u32 %r3"]
    + ["griddepcontrol.wait", "griddepcontrol.launch_dependents"],
)
def test_fences_change_no_value(instruction: str) -> None:
    """What they order is in test_hazards; here that they run, in some lanes too, and order no two warps."""
    body = f"{EXCHANGE} mov.b32 %r3, 4;\n@%p1 {instruction};\n{instruction};\nbar.sync 0;\n{READ_OTHER}"
    body = "setp.lt.u32 %p1, %lane, 7;\n" + body
    expected = [thread ^ 32 for thread in range(64)]
    assert clean(body, count=3, threads=64, buffers=zeros(64))["out"].tolist() == expected
    refused(body.replace("bar.sync 0;", ""), Kind.RACE, threads=64, buffers=zeros(64), count=1)


def test_registers_move_between_warpgroups() -> None:
    """A warpgroup that takes registers waits until another has given some back."""
    body = f"""
        setp.lt.u32 %p1, %t, 128; mov.b32 %r1, 1;
        @%p1 bra give;
        setmaxnreg.inc.sync.aligned.u32 240;
        bra.uni end;
    give:
        setmaxnreg.dec.sync.aligned.u32 96;
    end:
        {put("%r1")}
    """
    assert clean(body, threads=256, registers=168, buffers=zeros(256))["out"].tolist() == [1] * 256
    refused(
        body.replace("96", "104"), Kind.DEADLOCK, "setmaxnreg.inc 240", threads=256, registers=168, buffers=zeros(256)
    )


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        ("setmaxnreg.dec.sync.aligned.u32 16;", "multiple of 8 from 24 to 256"),
        ("setmaxnreg.dec.sync.aligned.u32 100;", "multiple of 8 from 24 to 256"),
        ("setmaxnreg.inc.sync.aligned.u32 264;", "multiple of 8 from 24 to 256"),
        ("setmaxnreg.dec.sync.aligned.u32 232;", "goes the other way"),
        ("setmaxnreg.inc.sync.aligned.u32 24;", "goes the other way"),
    ],
)
def test_register_counts(instruction: str, words: str) -> None:
    refused(instruction, Kind.REGISTER_POOL, words, at=instruction, threads=128, registers=128)


def test_launch_decides_the_pool() -> None:
    """Without a register count a CTA has what ptxas gives a kernel that fills the SM."""
    clean("setmaxnreg.inc.sync.aligned.u32 168;", threads=384)
    refused("setmaxnreg.inc.sync.aligned.u32 176;", Kind.DEADLOCK, "hold .* of 64512", threads=384)
    assert run(f"mov.b32 %r1, 3; {put('%r1')}", threads=384, buffers=zeros(384))["out"].tolist() == [3] * 384
