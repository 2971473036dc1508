"""Divergence: lanes and warps that part and meet again, against an interpreter that runs one thread after the other."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest
from machine import LEADER, Machine, clean, put, refused

from fa3gen.cpu.findings import Kind
from fa3gen.cpu.schedule import Schedule

MASK = 0xFFFFFFFF
VARIABLES = 4  # %r0 to %r3 of a random program


# ---------------------------------------------------------------------- random programs


@dataclass(frozen=True)
class Condition:
    """`variable & mask < bound`: true in some lanes, in whole warps, or everywhere."""

    variable: int
    mask: int
    bound: int

    def holds(self, values: list[int]) -> bool:
        return values[self.variable] & self.mask < self.bound

    def emit(self, ptx: Ptx) -> str:
        predicate = ptx.predicate()
        ptx.lines.append(f"and.b32 %r9, %r{self.variable}, {self.mask}; setp.lt.u32 {predicate}, %r9, {self.bound};")
        return predicate


@dataclass
class Ptx:
    """The PTX of a random program as it grows."""

    lines: list[str] = field(default_factory=list)
    names: int = 0
    ends: list[tuple[str, str]] = field(default_factory=list)  # (continue, break) labels of the loops around

    def label(self) -> str:
        self.names += 1
        return f"l{self.names}"

    def predicate(self) -> str:
        self.names += 1
        return f"%p{self.names % 28}"


class Return(Exception):
    """The thread has ended."""


class Break(Exception):
    """The innermost loop ends."""


class Continue(Exception):
    """The innermost loop goes on with its next round."""


@dataclass(frozen=True)
class Change:
    """`variable = variable * factor + other ^ constant`."""

    variable: int
    other: int
    factor: int
    constant: int

    def run(self, values: list[int]) -> None:
        values[self.variable] = (values[self.variable] * self.factor + values[self.other] & MASK) ^ self.constant

    def emit(self, ptx: Ptx) -> None:
        d = f"%r{self.variable}"
        ptx.lines.append(f"mad.lo.u32 {d}, {d}, {self.factor}, %r{self.other}; xor.b32 {d}, {d}, {self.constant};")


@dataclass(frozen=True)
class If:
    """Both sides may be empty."""

    condition: Condition
    then: tuple[object, ...]
    otherwise: tuple[object, ...]

    def run(self, values: list[int]) -> None:
        run_all(self.then if self.condition.holds(values) else self.otherwise, values)

    def emit(self, ptx: Ptx) -> None:
        otherwise, end = ptx.label(), ptx.label()
        ptx.lines.append(f"@!{self.condition.emit(ptx)} bra {otherwise};")
        emit_all(self.then, ptx)
        if self.otherwise:
            ptx.lines.append(f"bra.uni {end};")
        ptx.lines.append(f"{otherwise}:")
        emit_all(self.otherwise, ptx)
        ptx.lines.append(f"{end}:")


@dataclass(frozen=True)
class Loop:
    """One round, and one more for each unit of the variable's lowest two bits."""

    variable: int
    body: tuple[object, ...]
    counter: int

    def run(self, values: list[int]) -> None:
        rounds = (values[self.variable] & 3) + 1
        with suppress(Break):
            for _ in range(rounds):
                with suppress(Continue):
                    run_all(self.body, values)

    def emit(self, ptx: Ptx) -> None:
        again, following, end = ptx.label(), ptx.label(), ptx.label()
        counter, predicate = f"%r{self.counter}", ptx.predicate()
        ptx.lines.append(f"and.b32 {counter}, %r{self.variable}, 3;\n{again}:")
        ptx.ends.append((following, end))
        emit_all(self.body, ptx)
        ptx.ends.pop()
        ptx.lines.append(f"{following}:\nadd.u32 {counter}, {counter}, -1; setp.ne.u32 {predicate}, {counter}, -1;")
        ptx.lines.append(f"@{predicate} bra {again};\n{end}:")


@dataclass(frozen=True)
class Leave:
    """Return, break or continue where a condition holds."""

    condition: Condition
    kind: type[Exception]

    def run(self, values: list[int]) -> None:
        if self.condition.holds(values):
            raise self.kind

    def emit(self, ptx: Ptx) -> None:
        predicate = self.condition.emit(ptx)
        if self.kind is Return:
            ptx.lines.append(f"@{predicate} ret;")
        else:
            following, end = ptx.ends[-1]
            ptx.lines.append(f"@{predicate} bra {end if self.kind is Break else following};")


def run_all(statements: tuple[object, ...], values: list[int]) -> None:
    for statement in statements:
        statement.run(values)  # type: ignore[attr-defined]


def emit_all(statements: tuple[object, ...], ptx: Ptx) -> None:
    for statement in statements:
        statement.emit(ptx)  # type: ignore[attr-defined]


class Generator:
    """Random programs; variable 0 starts as the thread, 1 as its lane, 2 as its warp, 3 as the same for all."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.counters = 20

    def condition(self) -> Condition:
        mask = self.random.choice([1, 3, 7, 31, 32, 64, 96])
        return Condition(self.random.randrange(VARIABLES), mask, self.random.randint(1, mask))

    def statements(self, depth: int, in_loop: bool) -> tuple[object, ...]:
        return tuple(self.statement(depth, in_loop) for _ in range(self.random.randint(1, 3)))

    def statement(self, depth: int, in_loop: bool) -> object:
        kind = self.random.random()
        if depth == 0 or kind < 0.35:
            pick = self.random.randrange
            return Change(pick(VARIABLES), pick(VARIABLES), 2 * pick(8) + 1, pick(256))
        if kind < 0.65:
            otherwise = self.statements(depth - 1, in_loop) if self.random.random() < 0.6 else ()
            return If(self.condition(), self.statements(depth - 1, in_loop), otherwise)
        if kind < 0.85:
            self.counters += 1
            counter = self.counters
            return Loop(self.random.randrange(VARIABLES), self.statements(depth - 1, True), counter)
        kinds = [Break, Continue, Break, Return] if in_loop else [Return]
        return Leave(self.condition(), self.random.choice(kinds))


@pytest.mark.parametrize("seed", range(30))
def test_random_programs(seed: int) -> None:
    """Every thread gets what it would get alone, under schedules by warpgroup and by warp."""
    generator = Generator(seed)
    program = tuple(statement for _ in range(3) for statement in generator.statements(4, False))
    ptx = Ptx()
    emit_all(program, ptx)
    threads = [96, 128, 160][seed % 3]
    start = "mov.b32 %r0, %t; mov.b32 %r1, %lane; mov.b32 %r2, %warp; mov.b32 %r3, 77;\n"
    stores = "\n".join(put(f"%r{variable}", f"out{variable}") for variable in range(VARIABLES))
    buffers = {f"out{variable}": np.zeros(threads, np.uint32) for variable in range(VARIABLES)}
    machine = Machine(start + "\n".join(ptx.lines) + "\n" + stores, threads=threads, buffers=buffers)
    expected = []
    for thread in range(threads):
        values = [thread, thread % 32, thread // 32, 77]
        try:
            run_all(program, values)
        except Return:
            values = [0] * VARIABLES
        expected.append(values)
    for schedule in (machine.everywhere(12)[number] for number in (0, 1, 8)):
        after = machine.run(schedule)
        found = np.stack([after[f"out{variable}"] for variable in range(VARIABLES)], axis=1)
        assert found.tolist() == expected, schedule


# ---------------------------------------------------------------------- kernels written for one thing each


def test_warps_meet_again() -> None:
    """After a branch on which warps differ, all of them take part in one barrier and in shuffles."""
    body = f"""
        mov.b32 %r1, 5; setp.eq.u32 %p1, %warp, 2; setp.lt.u32 %p2, %lane, 10;
        @!%p1 bra others;
        mov.b32 %r1, 6;
        @!%p2 bra others;
        mov.b32 %r1, 7;
    others:
        bar.sync 0;
        shfl.sync.bfly.b32 %r2, %r1, 16, 31, -1;
        {put("%r2")}
    """
    expected = [5] * 64 + [(7 if lane ^ 16 < 10 else 6) for lane in range(32)] + [5] * 32
    assert clean(body, threads=128, buffers={"out": np.zeros(128, np.uint32)})["out"].tolist() == expected


def test_warps_of_a_warpgroup_wait_for_each_other() -> None:
    """One warp hands a value to the next through mbarriers, inside a branch that they take one by one."""
    body = f"""
        {LEADER}
        setp.lt.u32 %p1, %t, 4; shl.b32 %r1, %t, 3; add.u32 %r1, %r1, %s;
        @%p1 mbarrier.init.shared.b64 [%r1], 32;
        bar.sync 0;
        shl.b32 %r2, %warp, 3; add.u32 %r2, %r2, %s; setp.eq.u32 %p2, %warp, 0; mov.b32 %r3, 1;
        @%p2 bra mine;
    spin:
        mbarrier.test_wait.parity.shared.b64 %p3, [%r2+-8], 0;
        @%p3 bra get;
        bra.uni spin;
    get:
        shl.b32 %r4, %t, 2; add.u32 %r4, %r4, %s; ld.shared.b32 %r3, [%r4+384]; mul.lo.u32 %r3, %r3, 3;
    mine:
        shl.b32 %r4, %t, 2; add.u32 %r4, %r4, %s; st.shared.b32 [%r4+512], %r3;
        mbarrier.arrive.shared.b64 _, [%r2];
        {put("%r3")}
    """
    expected = [3 ** (thread // 32) for thread in range(128)]
    assert clean(body, threads=128, shared=2048, buffers={"out": np.zeros(128, np.uint32)})["out"].tolist() == expected


def test_early_exits_of_lanes_and_warps() -> None:
    """A loop that lanes leave in different rounds, and that one warp never enters."""
    body = f"""
        mov.b32 %r1, 0; setp.eq.u32 %p1, %warp, 1;
        @%p1 exit;
    again:
        add.u32 %r1, %r1, 1; setp.gt.u32 %p2, %r1, %lane;
        @%p2 bra done;
        setp.eq.u32 %p3, %r1, 20;
        @%p3 ret;
        bra.uni again;
    done:
        {put("%r1")}
    """
    expected = [0 if thread // 32 == 1 or thread % 32 >= 20 else thread % 32 + 1 for thread in range(96)]
    assert clean(body, threads=96, buffers={"out": np.zeros(96, np.uint32)})["out"].tolist() == expected


def test_predicates_with_a_side_effect() -> None:
    """A predicated instruction keeps the old value in the lanes that do not execute it, also when it is negated."""
    body = f"""
        mov.b32 %r1, %t; setp.lt.u32 %p1, %lane, 7; setp.eq.u32 %p2, %warp, 1;
        @%p1 add.u32 %r1, %r1, 1000;
        @!%p1 mov.b32 %r1, 5;
        @%p2 mul.lo.u32 %r1, %r1, 2;
        {put("%r1")}
    """
    expected = [(thread + 1000 if thread % 32 < 7 else 5) * (1 + (thread // 32 == 1)) for thread in range(64)]
    assert clean(body, threads=64, buffers={"out": np.zeros(64, np.uint32)})["out"].tolist() == expected


def test_groups_of_an_incomplete_warpgroup() -> None:
    """Five warps: a warpgroup of four and a rest of one; special registers are those of the threads."""
    body = "mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mad.lo.u32 %r3, %r2, 1000, %r1; mov.u32 %r5, %ntid.x;\n"
    body += "mad.lo.u32 %r4, %r2, %r5, %r1; mad.wide.u32 %rd1, %r4, 4, %out; st.global.b32 [%rd1], %r3;"
    machine = Machine(body, threads=160, grid=(3, 1, 1), buffers={"out": np.zeros(480, np.uint32)})
    expected = [1000 * block + thread for block in range(3) for thread in range(160)]
    for schedule in machine.everywhere(5):
        assert machine.run(schedule)["out"].tolist() == expected


def test_a_barrier_that_half_of_the_warps_reach() -> None:
    """Warps that wait in a branch are not merged with those that wait after it."""
    body = f"""
        setp.lt.u32 %p1, %warp, 2; mov.b32 %r1, 1;
        @!%p1 bra second;
        bar.sync 1, 64; bar.sync 0;
        bra.uni end;
    second:
        bar.sync 0; bar.sync 2, 64;
    end:
        {put("%r1")}
    """
    assert clean(body, threads=128, buffers={"out": np.zeros(128, np.uint32)})["out"].tolist() == [1] * 128
    refused(
        body.replace("bar.sync 2, 64", "bar.sync 2, 96"),
        Kind.DEADLOCK,
        "64 of 96",
        threads=128,
        buffers={"out": np.zeros(128, np.uint32)},
    )


def test_instructions_are_counted_per_warp() -> None:
    """The same under every schedule, where the same instructions run."""
    body = "setp.eq.u32 %p1, %warp, 1;\n@%p1 bra end;\nadd.u32 %r1, %t, 1;\nend:\nadd.u32 %r2, %t, 1;"
    counts = []
    machine = Machine(body, threads=128)
    for schedule in (Schedule(), Schedule("warp", "random", seed=5)):
        machine.run(schedule)
        counts.append(machine.instructions)
    assert counts[0] == counts[1] == 4 * (4 + 2 + 2) + 3
