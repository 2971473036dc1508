"""How many registers are live at each SASS instruction: whose value is still read on some way to the end.

nvdisasm prints live ranges only where its own data-flow analysis runs, which it does not on the files of this compiler.
So this is an analysis of our own: backward data flow over the control-flow graph of `fa3gen.compile.census.sass`. It
counts general registers (R0 to R254), not uniform ones or predicates. Which registers an instruction reads and writes
follows from its operands and from the widths that its opcode and modifiers say; NVIDIA documents no SASS encoding, so
the widths are those that the opcodes show (CUDA Binary Utilities, "Hopper Instruction Set" lists the opcodes). A
register of a product in flight counts for as long as its result is read later; the A operand only until the product is
issued.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fa3gen.compile.census.sass import Instruction, SassKernel, is_gmma, successors

_REGISTER = re.compile(r"\bR(\d+)\b(\.64)?")
_PREDICATE = re.compile(r"!?U?P(\d|T|R)$")
_SHAPE = re.compile(r"\.64x(\d+)x\d+\.(F32|F16)")
_LOADS = frozenset({"LD", "LDG", "LDS", "LDL", "LDC", "ATOM", "ATOMG", "ATOMS"})
_STORES = frozenset({"ST", "STG", "STS", "STL", "STSM", "RED", "REDG"})
# Opcodes whose operands are all read, or that write predicates only.
_NO_DESTINATION = _STORES | {
    *("BAR", "BRA", "BRX", "BSSY", "BSYNC", "BPT", "CALL", "CCTL", "DEPBAR", "ELECT", "ERRBAR", "EXIT", "FCHK"),
    *("FENCE", "JMP", "KILL", "LDGSTS", "MEMBAR", "NANOSLEEP", "NOP", "PLOP3", "R2P", "R2UR", "RET", "USETMAXREG"),
    *("WARPSYNC", "WARPGROUP", "YIELD"),
}


def live_registers(kernel: SassKernel) -> tuple[int, ...]:
    """Registers live at each instruction: live before it, or written by it.

    A value that is read although nothing has written it on any way there, such as the half of a register that a byte
    permutation fills in for another to shift out, takes no register.
    """
    before, writes = _flow(kernel)
    return tuple((live | written).bit_count() for live, written in zip(before, writes, strict=True))


def _flow(kernel: SassKernel) -> tuple[list[int], list[int]]:
    """Sets of registers, as bits, for each instruction: live before it, written by it."""
    code = kernel.instructions
    reads, writes, kept = [], [], []
    for instruction in code:
        read, written = registers(instruction)
        reads.append(_bits(read))
        writes.append(_bits(written))
        # Where the predicate does not hold, the old value stays.
        kept.append(0 if instruction.predicated else writes[-1])
    follow = _with_calls(kernel)
    before = [0] * len(code)
    leads_to: list[list[int]] = [[] for _ in code]
    for index, targets in enumerate(follow):
        for target in targets:
            leads_to[target].append(index)
    pending = list(range(len(code)))
    while pending:
        index = pending.pop()
        after = 0
        for target in follow[index]:
            after |= before[target]
        live = reads[index] | after & ~kept[index]
        if live != before[index]:
            before[index] = live
            pending.extend(leads_to[index])
    return [live & there for live, there in zip(before, _written(follow, writes), strict=True)], writes


def _written(follow: Sequence[Sequence[int]], writes: Sequence[int]) -> list[int]:
    """Sets of registers that may have been written before each instruction."""
    there = [0] * len(writes)
    pending = list(range(len(writes)))[::-1]
    while pending:
        index = pending.pop()
        after = there[index] | writes[index]
        for target in follow[index]:
            if after & ~there[target]:
                there[target] |= after
                pending.append(target)
    return there


def _with_calls(kernel: SassKernel) -> list[list[int]]:
    """Successors with calls that enter the function they name, whose returns go on behind every call of it."""
    follow = [list(targets) for targets in successors(kernel)]
    returns: dict[int, list[int]] = {}  # entry of a function -> where its calls go on
    for index, instruction in enumerate(kernel.instructions):
        name = re.search(r"`\(([.\w$]+)\)", instruction.operands)
        if instruction.base == "CALL" and name and name.group(1) in kernel.labels:
            entry = kernel.labels[name.group(1)]
            returns.setdefault(entry, []).extend(follow[index])
            follow[index] = [entry]
    for index, instruction in enumerate(kernel.instructions):
        if instruction.base == "RET":
            entries = [entry for entry in returns if entry <= index]
            if entries:
                follow[index] = [*follow[index], *returns[max(entries)]]
    return follow


def _bits(numbers: set[int]) -> int:
    return sum(1 << number for number in numbers)


def registers(instruction: Instruction) -> tuple[set[int], set[int]]:
    """General registers that an instruction reads, and those that it writes."""
    if instruction.base.startswith("U") or not instruction.operands:
        return set(), set()
    operands = _split(instruction.operands)
    while operands and _PREDICATE.match(operands[0]):
        operands = operands[1:]
    has_destination = (
        instruction.base not in _NO_DESTINATION
        and not instruction.base.endswith(("SETP", "SETP2"))
        and bool(operands)
        and "[" not in operands[0]
        and (instruction.base != "SYNCS" or len(operands) == len(_split(instruction.operands)))
    )
    written = _span(operands[0], _destination_width(instruction)) if has_destination else set()
    read: set[int] = set()
    sources = operands[1:] if has_destination else operands
    for position, operand in enumerate(sources):
        read |= _span(operand, _source_width(instruction, operand, position, sources))
    return read, written


def _split(operands: str) -> list[str]:
    """At commas outside brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", operands)]


def _span(operand: str, width: int) -> set[int]:
    """Registers that an operand names; inside brackets `.64` says that an address takes two."""
    found: set[int] = set()
    for match in _REGISTER.finditer(operand):
        first = int(match.group(1))
        found |= set(range(first, first + (2 if match.group(2) else width)))
    return found


def _bytes_width(instruction: Instruction) -> int:
    modifiers = instruction.opcode.split(".")
    return 4 if "128" in modifiers else 2 if "64" in modifiers else 1


def _destination_width(instruction: Instruction) -> int:
    base, modifiers = instruction.base, instruction.opcode.split(".")
    if is_gmma(instruction):
        return _accumulator_width(instruction)
    if base == "LDSM":
        return int(modifiers[-1]) if modifiers[-1].isdigit() else 1
    if base == "CS2R":
        return 1 if "32" in modifiers else 2
    if base in _LOADS:
        return _bytes_width(instruction)
    wide = "WIDE" in modifiers or base in ("DADD", "DMUL", "DFMA", "LEPC") or modifiers[1:2] == ["F64"]
    return 2 if wide else 1


def _accumulator_width(instruction: Instruction) -> int:
    shape = _SHAPE.search(instruction.opcode)
    if shape is None:
        return 1
    return int(shape.group(1)) // (2 if shape.group(2) == "F32" else 4)


def _source_width(instruction: Instruction, operand: str, position: int, sources: Sequence[str]) -> int:
    base, modifiers = instruction.base, instruction.opcode.split(".")
    if "[" in operand:
        return 1
    if is_gmma(instruction):
        # A, where it is in registers: 64 rows x 32 bytes over 128 threads. Then the descriptor, then the accumulator.
        return 4 if position == 0 and "gdesc" not in operand else _accumulator_width(instruction)
    if base == "STSM":
        return int(modifiers[-1]) if modifiers[-1].isdigit() else 1
    if base in _STORES | _LOADS:
        return _bytes_width(instruction)
    if base == "RET" or base in ("DADD", "DMUL", "DFMA"):
        return 2
    return 2 if "WIDE" in modifiers and position == 2 else 1
