"""Control flow of a kernel: basic blocks, where diverged lanes meet again, which registers live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fa3gen.cpu import forms
from fa3gen.cpu.ptx import Instruction, Kernel, PtxError, Symbol, registers_in

EXIT = -1  # block number of "the thread has ended"
_ENDS = ("bra", "ret", "exit", "trap")


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions [first, end) that run together. `reconverge` is the block where both sides of a branch meet.

    `live_in` and `live_out` are sets of register numbers, as bits. `yields` tells a preemptive schedule to consider
    another warp when the block is done.
    """

    first: int
    end: int
    successors: tuple[int, ...]
    reconverge: int
    live_in: int
    live_out: int
    yields: bool


def bits(number: int) -> Iterator[int]:
    """Positions of the bits that are set."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


def blocks_of(kernel: Kernel, *, preemptive: bool) -> list[Block]:
    """Cut a kernel into blocks. A blocking instruction stands alone, so that it can be tried again.

    With `preemptive`, a block also ends after every instruction that another warp can observe.
    """
    instructions = kernel.instructions
    if not instructions or instructions[-1].opcode not in _ENDS:
        raise PtxError(f"{kernel.name} does not end with ret")
    starts = _starts(kernel, preemptive)
    spans = list(zip(starts, [*starts[1:], len(instructions)], strict=True))
    number = {first: block for block, (first, _) in enumerate(spans)}
    successors = [_successors(kernel, block, end, number) for block, (_, end) in enumerate(spans)]
    reconverge = _immediate_postdominators(successors)
    live = _liveness(kernel, spans, successors)
    return [
        Block(
            first,
            end,
            successors[block],
            reconverge[block],
            live[block][0],
            live[block][1],
            yields=preemptive and forms.find(instructions[end - 1], kernel.name)[0].observable,
        )
        for block, (first, end) in enumerate(spans)
    ]


def definitions_and_uses(kernel: Kernel, instruction: Instruction) -> tuple[list[str], list[str]]:
    """Names of the registers an instruction writes and of those it reads.

    A predicated instruction leaves its destinations alone where the predicate is false, so it reads them too.
    """
    form, _ = forms.find(instruction, kernel.name)
    count = form.destinations(instruction)
    written = [name for operand in instruction.operands[:count] for name in registers_in(operand)]
    read = [name for operand in instruction.operands[count:] for name in registers_in(operand)]
    if form.accumulates:
        read += written
    if instruction.predicate is not None:
        read += [instruction.predicate, *written]
    return written, read


def _starts(kernel: Kernel, preemptive: bool) -> list[int]:
    starts = {0, *kernel.labels.values()}
    for instruction in kernel.instructions:
        form, _ = forms.find(instruction, kernel.name)
        if instruction.opcode in _ENDS or form.blocking or (preemptive and form.observable):
            starts.add(instruction.index + 1)
        if form.blocking:
            starts.add(instruction.index)
    return sorted(start for start in starts if start < len(kernel.instructions))


def _successors(kernel: Kernel, block: int, end: int, number: dict[int, int]) -> tuple[int, ...]:
    """Where a block may go: the taken side of a branch first."""
    last = kernel.instructions[end - 1]
    following = block + 1 if end < len(kernel.instructions) else EXIT
    if last.opcode == "bra":
        target = last.operands[0]
        if not isinstance(target, Symbol) or target.name not in kernel.labels:
            raise PtxError(f"PTX line {last.line}: branch to an unknown label")
        taken = number.get(kernel.labels[target.name], EXIT)
        return (taken,) if last.predicate is None else (taken, following)
    if last.opcode in _ENDS:
        return (EXIT,) if last.predicate is None else (EXIT, following)
    return (following,)


def _immediate_postdominators(successors: list[tuple[int, ...]]) -> list[int]:
    """For each block the nearest one that every way to the exit passes; EXIT where only the exit is.

    Sets as bits, with the exit as bit `count`; iterated to the fixed point.
    """
    count = len(successors)
    everything = (1 << (count + 1)) - 1
    sets = [everything] * count + [1 << count]
    changed = True
    while changed:
        changed = False
        for block in range(count - 1, -1, -1):
            common = everything
            for successor in successors[block]:
                common &= sets[count if successor == EXIT else successor]
            common |= 1 << block
            if common != sets[block]:
                sets[block] = common
                changed = True
    nearest = []
    for block in range(count):
        # Of the strict post-dominators, the nearest has all the others behind it.
        strict = list(bits(sets[block] & ~(1 << block)))
        best = max(strict, key=lambda other: sets[other].bit_count(), default=count)
        nearest.append(EXIT if best == count else best)
    return nearest


def _liveness(kernel: Kernel, spans: list[tuple[int, int]], successors: list[tuple[int, ...]]) -> list[tuple[int, int]]:
    """(live in, live out) of each block, as bits of register numbers."""
    numbers = kernel.numbers
    used, defined = [], []
    for first, end in spans:
        block_used = block_defined = 0
        for instruction in kernel.instructions[first:end]:
            written, read = definitions_and_uses(kernel, instruction)
            block_used |= _mask(numbers, read) & ~block_defined
            block_defined |= _mask(numbers, written)
        used.append(block_used)
        defined.append(block_defined)
    live = [(0, 0)] * len(spans)
    changed = True
    while changed:
        changed = False
        for block in range(len(spans) - 1, -1, -1):
            out = 0
            for successor in successors[block]:
                if successor != EXIT:
                    out |= live[successor][0]
            state = (used[block] | (out & ~defined[block]), out)
            if state != live[block]:
                live[block] = state
                changed = True
    return live


def _mask(numbers: dict[str, int], names: Iterable[str]) -> int:
    mask = 0
    for name in names:
        mask |= 1 << numbers[name]
    return mask
