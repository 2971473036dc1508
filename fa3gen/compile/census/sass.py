"""Counts of what ptxas made of a kernel: SASS instructions, and the loops with what stands in them.

Reads the text of `nvdisasm -c`. Loops are the natural loops of the control-flow graph, so that a wait that spins out of
line at the end of the kernel does not pass for a loop around everything between it and its return.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

_SECTION = re.compile(r"^\.text\.([\w$]+):\s*$", re.MULTILINE)
_LABEL = re.compile(r"^([.\w$]+):$")
_INSTRUCTION = re.compile(r"^/\*([0-9a-f]+)\*/\s+\{?\s*(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;?\s*\}?$")
_TARGET = re.compile(r"`\(([.\w$]+)\)")
_BARRIER_REGISTER = re.compile(r"\bB\d+\b")
_REGISTER = re.compile(r"R(\d+)\b")
_SOURCE = re.compile(r"^[-|~]*R(\d+)(\.reuse)?\|?$")  # a register that is read
_NO_RESULT = frozenset({"HGMMA", "QGMMA", "IGMMA", "BGMMA", "BAR", "NANOSLEEP"})  # or another one than a register of A
_GLOBAL_STORES = frozenset({"STG", "ST", "UTMASTG", "UTMAREDG"})  # ST: the compiler did not see which memory it is
_SHARED_STORES = frozenset({"STS", "STSM"})
_STORE_BITS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}  # of a thread, by modifier; else 32
_ENDS = ("EXIT", "RET", "BPT", "KILL", "BRX", "JMX")


@dataclass(frozen=True)
class Loop:
    """One natural loop: address and count of its instructions, those of wait loops inside it left out.

    `depth` is 1 for an outermost loop. `innermost` says that no other loop but waits is nested in it, `waits` that it
    does nothing but spin until an mbarrier completes or registers are free. `ffma` counts multiply-adds of threads, and
    `one_bank` those that function finds.
    """

    address: int
    depth: int
    innermost: bool
    waits: bool
    instructions: int
    gmma: int
    ex2: int
    ffma: int = 0
    one_bank: int = 0


@dataclass(frozen=True)
class SassFacts:
    """Static SASS counts of one kernel, or of several kernels added up; `instructions` leaves out NOP padding.

    `gmma` counts warpgroup products of any type (HGMMA, QGMMA, IGMMA), `gmma_group_ends` those that end a group, that
    is carry the scoreboard on which WARPGROUP.DEPBAR waits. `lost_operands` counts what that function finds.
    `mma` counts products of single warps (HMMA), `global_stores` and `shared_stores` count by `store_kind`.
    `opcodes` has every opcode without its modifiers.
    """

    instructions: int = 0
    gmma: int = 0
    gmma_group_ends: int = 0
    mma: int = 0
    warpgroup_arrives: int = 0
    warpgroup_waits: int = 0
    register_reallocations: int = 0
    tma_loads: int = 0
    tma_stores: int = 0
    mbarrier_ops: int = 0
    local_loads: int = 0
    local_stores: int = 0
    ex2: int = 0
    fsel: int = 0
    fsetp: int = 0
    fmnmx: int = 0
    lost_operands: int = 0
    global_stores: Mapping[str, int] = field(default_factory=dict)
    shared_stores: Mapping[str, int] = field(default_factory=dict)
    opcodes: Mapping[str, int] = field(default_factory=dict)
    loops: tuple[Loop, ...] = ()


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction: byte address in its kernel, opcode with modifiers, operands, whether it is predicated."""

    address: int
    opcode: str
    operands: str
    predicated: bool

    @property
    def base(self) -> str:
        """Opcode without modifiers."""
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class SassKernel:
    """One kernel's code: instructions in address order, and where each label stands (an index into them)."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]

    def facts(self) -> SassFacts:
        """Counts of this kernel."""
        code = [instruction for instruction in self.instructions if instruction.base != "NOP"]
        bases = Counter(instruction.base for instruction in code)
        gmma = [instruction for instruction in code if is_gmma(instruction)]
        return SassFacts(
            instructions=len(code),
            gmma=len(gmma),
            gmma_group_ends=sum("gsb" in instruction.operands for instruction in gmma),
            mma=bases["HMMA"],
            warpgroup_arrives=sum(instruction.opcode == "WARPGROUP.ARRIVE" for instruction in code),
            warpgroup_waits=sum(instruction.opcode.startswith("WARPGROUP.DEPBAR") for instruction in code),
            register_reallocations=bases["USETMAXREG"],
            tma_loads=bases["UTMALDG"],
            tma_stores=bases["UTMASTG"] + bases["UTMAREDG"],
            mbarrier_ops=bases["SYNCS"],
            local_loads=bases["LDL"],
            local_stores=bases["STL"],
            ex2=sum(is_ex2(instruction) for instruction in code),
            fsel=bases["FSEL"],
            fsetp=bases["FSETP"],
            fmnmx=bases["FMNMX"],
            lost_operands=len(lost_operands(self)),
            global_stores=_store_kinds(code, _GLOBAL_STORES),
            shared_stores=_store_kinds(code, _SHARED_STORES),
            opcodes=dict(sorted(bases.items())),
            loops=find_loops(self),
        )


def is_gmma(instruction: Instruction) -> bool:
    """Whether this is a warpgroup product."""
    return instruction.base in ("HGMMA", "QGMMA", "IGMMA", "BGMMA")


def is_ex2(instruction: Instruction) -> bool:
    """Whether this is an exponential (base 2) on the multi-function unit."""
    return instruction.opcode.startswith("MUFU.EX2")


def is_ffma(instruction: Instruction) -> bool:
    """Whether this is a multiply-add of threads, in float32."""
    return instruction.base == "FFMA"


def one_bank(kernel: SassKernel) -> set[int]:
    """Addresses of multiply-adds that read three registers of one bank.

    Registers lie in two banks, even and odd, of which each gives two operands a cycle: a third one takes another cycle
    (arXiv 1804.06826, on a V100; ptxas avoids it for sm_90a, too). An operand is not read that the instruction before
    left in the reuse cache at the same place.
    """
    found, kept = set(), dict[int, str]()
    for instruction in kernel.instructions:
        sources = [_SOURCE.match(operand) for operand in instruction.operands.split(", ")[1:]]
        registers = {place: source for place, source in enumerate(sources) if source}
        read = {int(source[1]) for place, source in registers.items() if kept.get(place) != source[1]}
        if is_ffma(instruction) and len(read) == 3 and len({register % 2 for register in read}) == 1:
            found.add(instruction.address)
        kept = {place: source[1] for place, source in registers.items() if source[2]}
    return found


def store_kind(instruction: Instruction) -> str:
    """A store by what one thread, or the TMA unit, writes: STG.128 (bits), STSM.4 (8 x 8 matrices), UTMASTG."""
    modifiers = instruction.opcode.split(".")[1:]
    if instruction.base.startswith("UTMA"):
        return instruction.base
    if instruction.base == "STSM":
        return f"STSM.{modifiers[-1] if modifiers[-1].isdigit() else 1}"
    bits = next((_STORE_BITS[modifier] for modifier in modifiers if modifier in _STORE_BITS), 32)
    return f"{instruction.base}.{bits}"


def _store_kinds(code: Sequence[Instruction], bases: Collection[str]) -> dict[str, int]:
    kinds = Counter(store_kind(instruction) for instruction in code if instruction.base in bases)
    return dict(sorted(kinds.items()))


def parse_sass(text: str) -> tuple[SassKernel, ...]:
    """Every kernel in the output of `nvdisasm -c`, in its order."""
    starts = list(_SECTION.finditer(text))
    ends = [*(start.start() for start in starts[1:]), len(text)]
    return tuple(_kernel(start.group(1), text[start.end() : end]) for start, end in zip(starts, ends, strict=False))


def _kernel(name: str, body: str) -> SassKernel:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in body.splitlines():
        line = line.strip()
        label = _LABEL.match(line)
        if label:
            labels[label.group(1)] = len(instructions)
            continue
        found = _INSTRUCTION.match(line)
        if found:
            address, predicate, opcode, operands = found.groups()
            # @!PT never holds and @PT always does; only a real predicate leaves both ways open.
            predicated = predicate is not None and predicate.strip() not in ("@PT", "@UPT")
            instructions.append(Instruction(int(address, 16), opcode, operands, predicated))
    return SassKernel(name=name, instructions=tuple(instructions), labels=labels)


def successors(kernel: SassKernel) -> list[list[int]]:
    """Which instructions may follow each one. Calls return, and a BSYNC goes on where its BSSY said."""
    code, labels = kernel.instructions, kernel.labels
    joins: dict[str, int] = {}  # barrier register -> where the latest BSSY reconverges
    follow: list[list[int]] = []
    for index, instruction in enumerate(code):
        after = [index + 1] if index + 1 < len(code) else []
        targets = [labels[name] for name in _TARGET.findall(instruction.operands) if name in labels]
        register = _BARRIER_REGISTER.search(instruction.operands)
        if instruction.base == "BSSY" and register and targets:
            joins[register.group()] = targets[0]
            follow.append(after)
        elif instruction.base == "BSYNC" and register and register.group() in joins:
            follow.append([joins[register.group()]])
        elif instruction.base in ("BRA", "JMP"):
            conditional = instruction.predicated or _has_condition(instruction)
            follow.append(targets + after if conditional else targets)
        elif instruction.base in _ENDS:
            follow.append(after if instruction.predicated else [])
        else:
            follow.append(after)
    return [[target for target in targets if target < len(code)] for targets in follow]


def _has_condition(branch: Instruction) -> bool:
    """Whether a branch without a guard decides: on an operand (`BRA.U !UP0, target`), or on divergence (BRA.DIV)."""
    return bool(branch.operands.split("`")[0].strip()) or ".DIV" in branch.opcode or ".CONV" in branch.opcode


def _blocks(kernel: SassKernel) -> tuple[list[range], list[list[int]]]:
    """Basic blocks, as ranges of instruction indices in address order, and the edges between them."""
    follow = successors(kernel)
    leaders = {0, *kernel.labels.values()}
    for index, targets in enumerate(follow):
        if targets != [index + 1]:
            leaders.update(targets)
            leaders.add(index + 1)
    bounds = sorted(leader for leader in leaders if leader < len(follow))
    blocks = [range(start, end) for start, end in zip(bounds, [*bounds[1:], len(follow)], strict=True)]
    at = {block.start: number for number, block in enumerate(blocks)}
    return blocks, [[at[target] for target in follow[block[-1]]] for block in blocks]


def _dominators(edges: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Blocks that every path from the entry to a block passes, for the blocks that can be reached."""
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(edges[0]))]
    while stack:
        block, targets = stack[-1]
        target = next((target for target in targets if target not in seen), None)
        if target is None:
            order.append(block)
            stack.pop()
        else:
            seen.add(target)
            stack.append((target, iter(edges[target])))
    order.reverse()
    before: dict[int, list[int]] = {block: [] for block in order}
    for block in order:
        for target in edges[block]:
            before[target].append(block)
    dominators = {block: set(order) for block in order}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            found = set.intersection(*(dominators[source] for source in before[block])) | {block}
            if found != dominators[block]:
                dominators[block], changed = found, True
    return dominators


def find_loops(kernel: SassKernel) -> tuple[Loop, ...]:
    """Natural loops that can be reached from the entry, in address order."""
    if not kernel.instructions:
        return ()
    blocks, edges = _blocks(kernel)
    bodies = _loop_bodies(edges)
    waits = {head for head, body in bodies.items() if _only_waits(kernel, [blocks[block] for block in body])}
    loops, conflicts = [], one_bank(kernel)
    for head, body in bodies.items():
        inner = [other for other, blocks_of in bodies.items() if blocks_of < body]
        waiting = set[int]().union(*(bodies[other] for other in inner if other in waits))
        waiting |= _detours(kernel, blocks, edges, waiting)
        code = [kernel.instructions[index] for block in body - waiting for index in blocks[block]]
        code = [instruction for instruction in code if instruction.base != "NOP"]
        loops.append(
            Loop(
                address=kernel.instructions[blocks[head].start].address,
                depth=1 + sum(body < other for other in bodies.values()),
                innermost=all(other in waits for other in inner),
                waits=head in waits,
                instructions=len(code),
                gmma=sum(is_gmma(instruction) for instruction in code),
                ex2=sum(is_ex2(instruction) for instruction in code),
                ffma=sum(is_ffma(instruction) for instruction in code),
                one_bank=sum(instruction.address in conflicts for instruction in code),
            )
        )
    return tuple(sorted(loops, key=lambda loop: loop.address))


def _loop_bodies(edges: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Blocks of each natural loop by its head: what reaches a back edge without passing the head."""
    dominators = _dominators(edges)
    before: dict[int, list[int]] = {block: [] for block in dominators}
    for block in dominators:
        for target in edges[block]:
            before[target].append(block)
    bodies: dict[int, set[int]] = {}
    for tail in dominators:
        for head in edges[tail]:
            if head not in dominators[tail]:
                continue
            body = bodies.setdefault(head, {head})
            stack = [tail]
            while stack:
                block = stack.pop()
                if block not in body:
                    body.add(block)
                    stack.extend(before[block])
    return bodies


def lost_operands(kernel: SassKernel) -> set[int]:
    """Registers that ldmatrix fills before a loop, as A of a product in it, and that something else in it overwrites.

    From the second turn on the product multiplies something else: ptxas 12.9.83 makes such code of two A operands in
    registers that take equally many of them, one kept through the loop and one made in it.
    """
    if not any(instruction.base == "LDSM" for instruction in kernel.instructions):
        return set()
    blocks, edges = _blocks(kernel)
    lost = set()
    for body in _loop_bodies(edges).values():
        inside = {index for block in body for index in blocks[block]}
        code = [kernel.instructions[index] for index in inside]
        filled: dict[bool, set[int]] = {True: set(), False: set()}  # in the loop, and elsewhere
        for index, found in enumerate(kernel.instructions):
            if found.base == "LDSM":
                filled[index in inside].update(_registers(found, 0, 4))
        kept = filled[False] - filled[True]
        read = {register for found in code if is_gmma(found) for register in _registers(found, 1, 4)}
        written = {register for found in code if found.base not in _NO_RESULT for register in _registers(found, 0, 1)}
        lost |= kept & read & written
    return lost


def _registers(instruction: Instruction, operand: int, count: int) -> range:
    """Numbers of the registers of an operand that is so many of them; none where it is something else."""
    operands = instruction.operands.split(", ")
    found = _REGISTER.match(operands[operand]) if operand < len(operands) else None
    return range(int(found.group(1)), int(found.group(1)) + count) if found else range(0)


def _detours(
    kernel: SassKernel, blocks: Sequence[range], edges: Sequence[Sequence[int]], waiting: set[int]
) -> set[int]:
    """Blocks that only lead into a wait placed out of line, or back from it; a wait that succeeds never runs them."""
    before: dict[int, set[int]] = {block: set() for block in range(len(blocks))}
    for block, targets in enumerate(edges):
        for target in targets:
            before[target].add(block)
    detours = set()
    for block in range(len(blocks)):
        out_of_line = block > 0 and block not in edges[block - 1]
        jumps = block + 1 not in edges[block]
        leads_in = out_of_line and edges[block] and waiting.issuperset(edges[block])
        leads_back = jumps and before[block] and waiting.issuperset(before[block])
        code = [kernel.instructions[index] for index in blocks[block]]
        if (leads_in or leads_back) and all(instruction.base in _WAIT_OPCODES for instruction in code):
            detours.add(block)
    return detours


# What a wait on an mbarrier is made of: the try, a sleep, a branch, and register moves for its address and phase. The
# last wait of a producer leaves the kernel. setmaxnreg.inc spins as well, until the registers are free.
_SPIN_OPCODES = frozenset({"SYNCS", "NANOSLEEP", "USETMAXREG"})
_WAIT_OPCODES = _SPIN_OPCODES | {
    "BRA",
    "MOV",
    "IMAD",
    "UMOV",
    "NOP",
    "WARPSYNC",
    "YIELD",
    "R2UR",
    "CS2R",
    "PLOP3",
    "EXIT",
}


def _only_waits(kernel: SassKernel, body: Sequence[range]) -> bool:
    code = [kernel.instructions[index] for block in body for index in block]
    bases = {instruction.base for instruction in code}
    return bases <= _WAIT_OPCODES and bool(bases & _SPIN_OPCODES)
