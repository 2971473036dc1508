"""Blocks, the places where sides of a branch meet, and live registers, against definitions applied by brute force."""

from __future__ import annotations

import random
from functools import cache

import pytest

from fa3gen.cpu import isa  # noqa: F401 - registers the forms of instructions
from fa3gen.cpu.flow import EXIT, Block, bits, blocks_of, definitions_and_uses
from fa3gen.cpu.ptx import Kernel, PtxError, parse

DECLARATIONS = ".reg .b32 %r<10>; .reg .b64 %rd<4>; .reg .pred %p<4>; .reg .f32 %f<4>;"


def kernel(body: str) -> Kernel:
    return parse(f".entry k()\n{{\n{DECLARATIONS}\n{body}\n}}\n")["k"]


def blocks(body: str, preemptive: bool = False) -> list[Block]:
    return blocks_of(kernel(body), preemptive=preemptive)


def spans(body: str, preemptive: bool = False) -> list[tuple[int, int]]:
    return [(block.first, block.end) for block in blocks(body, preemptive)]


# ---------------------------------------------------------------------- where blocks begin and end


def test_branches_and_labels_end_blocks() -> None:
    body = "mov.b32 %r1, 1;\nagain: add.u32 %r1, %r1, 1;\n@%p1 bra again;\n"
    body += "mov.b32 %r2, 2;\n@%p2 ret;\nbra again;\nend: ret;"
    assert spans(body) == [(0, 1), (1, 3), (3, 5), (5, 6), (6, 7)]
    assert [block.successors for block in blocks(body)] == [(1,), (1, 2), (EXIT, 3), (1,), (EXIT,)]


def test_blocking_instructions_stand_alone() -> None:
    body = "mov.b32 %r1, 1;\nbar.sync 0;\nmov.b32 %r1, 2;\nmov.b32 %r1, 3;\n"
    body += "wgmma.wait_group.sync.aligned 0;\nbar.sync 1;\nret;"
    assert spans(body) == [(0, 1), (1, 2), (2, 4), (4, 5), (5, 6), (6, 7)]


def test_preemptive_blocks_end_after_what_others_can_see() -> None:
    body = "mov.b32 %r1, 1;\nst.shared.b32 [%r1], %r1;\nmov.b32 %r2, 2;\nmov.b32 %r3, 3;\n"
    body += "mbarrier.arrive.shared.b64 _, [%r1];\nld.shared.b32 %r4, [%r1];\nadd.u32 %r4, %r4, 1;\nret;"
    assert spans(body) == [(0, 8)]
    assert [block.yields for block in blocks(body)] == [False]
    cut = blocks(body, preemptive=True)
    assert [(block.first, block.end, block.yields) for block in cut][:2] == [(0, 2, True), (2, 5, True)]
    assert not cut[-1].yields


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("mov.b32 %r1, 1;", "does not end with ret"),
        ("", "does not end with ret"),
        ("mov.b32 %r1, 1;\nbra nowhere;", "PTX line 5: branch to an unknown label"),
        ("bra %r1;\nret;", "PTX line 4: branch to an unknown label"),
    ],
)
def test_kernels_without_an_end(body: str, words: str) -> None:
    with pytest.raises(PtxError, match=words):
        blocks(body)


def test_bits() -> None:
    assert list(bits(0)) == [] and list(bits(1 << 70 | 5)) == [0, 2, 70]


# ---------------------------------------------------------------------- definitions and uses


@pytest.mark.parametrize(
    ("text", "written", "read"),
    [
        ("add.u32 %r1, %r2, %r3;", {"%r1"}, {"%r2", "%r3"}),
        ("add.u32 %r1, %r1, 3;", {"%r1"}, {"%r1"}),
        ("@%p1 mov.b32 %r1, %r2;", {"%r1"}, {"%r1", "%r2", "%p1"}),
        ("@!%p1 bra end;", set(), {"%p1"}),
        ("ld.shared.v2.b32 {%r1, %r2}, [%r3+4];", {"%r1", "%r2"}, {"%r3"}),
        ("st.shared.v2.b32 [%r3], {%r1, %r2};", set(), {"%r1", "%r2", "%r3"}),
        ("shfl.sync.bfly.b32 %r1|%p1, %r2, 1, 31, -1;", {"%r1", "%p1"}, {"%r2"}),
        ("setp.lt.and.u32 %p1, %r1, %r2, !%p2;", {"%p1"}, {"%r1", "%r2", "%p2"}),
        ("mbarrier.arrive.shared.b64 %rd1, [%r1];", {"%rd1"}, {"%r1"}),
        ("mbarrier.arrive.shared.b64 _, [%r1], %r2;", set(), {"%r1", "%r2"}),
        ("mbarrier.arrive.shared.b64 [%r1], %r2;", set(), {"%r1", "%r2"}),
        ("mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2;", {"%p1"}, {"%r1", "%r2"}),
        (
            "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];",
            set(),
            {"%rd1", "%r1", "%r2", "%r3"},
        ),
        ("red.shared.add.u32 [%r1], %r2;", set(), {"%r1", "%r2"}),
        ("atom.shared.add.u32 %r3, [%r1], %r2;", {"%r3"}, {"%r1", "%r2"}),
        (
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, %rd1, %rd2, %p1, 1, 1, 0, 0;",
            {"%f0", "%f1", "%f2", "%f3"},
            {"%f0", "%f1", "%f2", "%f3", "%rd1", "%rd2", "%p1"},
        ),
    ],
)
def test_definitions_and_uses(text: str, written: set[str], read: set[str]) -> None:
    found = kernel(f"{text}\nend: ret;")
    definitions, uses = definitions_and_uses(found, found.instructions[0])
    assert (set(definitions), set(uses)) == (written, read)


# ---------------------------------------------------------------------- random control flow


@cache
def random_kernel(seed: int) -> Kernel:
    """Blocks with random branches; each one reads and writes a few of eight registers."""
    generator = random.Random(seed)
    count = generator.randint(3, 12)
    lines = []
    for number in range(count):
        lines.append(f"b{number}:")
        for _ in range(generator.randint(1, 3)):
            d, a, b = (f"%r{generator.randrange(8)}" for _ in range(3))
            predicate = "@%p1 " if generator.random() < 0.3 else ""
            lines.append(f"{predicate}add.u32 {d}, {a}, {b};")
        target = f"b{generator.randrange(count)}"
        lines.append(
            generator.choice([f"@%p2 bra {target};", f"@!%p3 bra {target};", f"bra {target};", "@%p1 ret;", "ret;", ""])
        )
    return kernel("\n".join([*lines, "ret;"]))


def reachable(graph: list[Block], start: int, without: int | None = None) -> set[int]:
    """Blocks, and EXIT, that a thread at `start` may come to without passing `without`."""
    found: set[int] = set()
    todo = [start]
    while todo:
        block = todo.pop()
        if block in found or block == without:
            continue
        found.add(block)
        if block != EXIT:
            todo += graph[block].successors
    return found


@pytest.mark.parametrize("seed", range(60))
def test_sides_meet_at_the_nearest_block_that_all_ways_pass(seed: int) -> None:
    graph = blocks_of(random_kernel(seed), preemptive=False)
    for number, block in enumerate(graph):
        if EXIT not in reachable(graph, number):
            continue  # a loop without an end
        passed = [
            other for other in range(len(graph)) if other != number and EXIT not in reachable(graph, number, other)
        ]
        nearest = [one for one in passed if all(other == one or other in after(graph, one, passed) for other in passed)]
        assert block.reconverge == (nearest[0] if nearest else EXIT), number


def after(graph: list[Block], block: int, blocks_passed: list[int]) -> set[int]:
    """Those of some blocks that every way from `block` to the exit passes."""
    return {other for other in blocks_passed if EXIT not in reachable(graph, block, other)}


@pytest.mark.parametrize("seed", range(60))
def test_live_registers(seed: int) -> None:
    """A register is live where some way leads to a use of it without a definition before."""
    found = random_kernel(seed)
    graph = blocks_of(found, preemptive=False)
    for name, number in found.numbers.items():
        for index, block in enumerate(graph):
            assert bool(block.live_in >> number & 1) == used_from(found, graph, index, name, set()), (name, index)
            out = any(used_from(found, graph, each, name, set()) for each in block.successors if each != EXIT)
            assert bool(block.live_out >> number & 1) == out, (name, index)


def used_from(found: Kernel, graph: list[Block], block: int, name: str, seen: set[int]) -> bool:
    if block == EXIT or block in seen:
        return False
    seen.add(block)
    for each in found.instructions[graph[block].first : graph[block].end]:
        written, read = definitions_and_uses(found, each)
        if name in read:
            return True
        if name in written:
            return False
    return any(used_from(found, graph, successor, name, seen) for successor in graph[block].successors)
