"""What the compiler made of each line of a generated module: its PTX and SASS instructions, and registers live there.

PTX names its lines by `.loc`, as `fa3gen.cpu.ptx` reads it. SASS lines are those of ptxas's own line table. That table
counts lines within inline assembly on from the line of the assembly, and gives code that ptxas moved or inserted the
line of a neighbour; `_home` puts back what can be put back, by what the lines' own PTX holds, and leaves those without
a line whose line has no PTX. The rest stays as ptxas says it: a scheduled instruction has no better line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fa3gen.compile import toolchain
from fa3gen.compile.census import kernel_label
from fa3gen.compile.census.sass import Instruction, Loop, find_loops, is_gmma, parse_sass
from fa3gen.compile.compiler import Compiled
from fa3gen.cpu import ptx
from fa3gen.inspect.report.liveness import live_registers

_SECTION = re.compile(r"^\.text\.([\w$]+):\s*$")
_MARK = re.compile(r'^\s*//## File "(.*)", line (\d+)')
_FUNCTION = re.compile(r"^\$[\w$.]+:\s*$")  # a function of the compiler's own, such as a slow division: nobody's line
_CODE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;?\s*\}?$")
_LOCATION = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")

# What some SASS instructions are made of: a line whose PTX holds none of it did not ask for them.
_ORIGINS = {
    "UTMALDG": ("cp.async.bulk.tensor",),
    "UTMASTG": ("cp.async.bulk.tensor",),
    "NANOSLEEP": ("mbarrier.try_wait",),
    "SYNCS": ("mbarrier.",),
    "STSM": ("stmatrix",),
    "FSEL": ("selp.f32",),
}


@dataclass(frozen=True)
class PtxLine:
    """One PTX instruction: line of the PTX text, the instruction, and the line of the module, if any."""

    number: int
    text: str
    line: int | None


@dataclass(frozen=True)
class SassLine:
    """One SASS instruction: byte address, text, line of the module if any, and registers live there."""

    address: int
    text: str
    opcode: str
    line: int | None
    live: int


@dataclass(frozen=True)
class KernelListing:
    """One kernel. `registers` are those of a thread at launch, `most` what setmaxnreg raises them to, if it does."""

    label: str
    registers: int
    most: int
    ptx: tuple[PtxLine, ...]
    sass: tuple[SassLine, ...]
    loops: tuple[Loop, ...]

    @property
    def live(self) -> int:
        """Registers live where most are."""
        return max((line.live for line in self.sass), default=0)


@dataclass(frozen=True)
class LineFacts:
    """What one line of the module became, in all kernels."""

    ptx: tuple[PtxLine, ...]
    sass: tuple[SassLine, ...]

    @property
    def live(self) -> int:
        """Registers live where most are, among the line's instructions; 0 without any."""
        return max((line.live for line in self.sass), default=0)


@dataclass(frozen=True)
class Listing:
    """A module as compiled."""

    source: tuple[str, ...]
    kernels: tuple[KernelListing, ...]

    def by_line(self) -> dict[int, LineFacts]:
        """Line of the module -> what it became; lines that became nothing are left out."""
        ptx_of: dict[int, list[PtxLine]] = {}
        sass_of: dict[int, list[SassLine]] = {}
        for kernel in self.kernels:
            for entry in kernel.ptx:
                if entry.line is not None:
                    ptx_of.setdefault(entry.line, []).append(entry)
            for instruction in kernel.sass:
                if instruction.line is not None:
                    sass_of.setdefault(instruction.line, []).append(instruction)
        return {
            line: LineFacts(tuple(ptx_of.get(line, ())), tuple(sass_of.get(line, ())))
            for line in sorted(ptx_of.keys() | sass_of.keys())
        }


def make_listing(path: Path, compiled: Compiled) -> Listing:
    """Take apart a module that was compiled with line information.

    Raises UserError when cuobjdump or nvdisasm is missing, PtxError for PTX that is not understood.
    """
    source = path.read_text(encoding="utf-8").splitlines()
    file = str(compiled.path)
    text = toolchain.disassemble(compiled.cubin, line_info=True)
    resources = toolchain.resource_usage(compiled.cubin)
    reported = _reported_lines(text, file)
    kernels = ptx.parse(compiled.ptx)
    ptx_lines = compiled.ptx.splitlines()
    listings = []
    for kernel in parse_sass(text):
        of_ptx = _ptx_of(kernels[kernel.name], ptx_lines, file)
        inner = _inner_lines(ptx_lines, kernel.name)
        lines = [
            _home(instruction, line, of_ptx, inner)
            for instruction, line in zip(kernel.instructions, reported[kernel.name], strict=True)
        ]
        live = live_registers(kernel)
        sass = tuple(
            SassLine(instruction.address, _text(instruction), instruction.base, line, count)
            for instruction, line, count in zip(kernel.instructions, lines, live, strict=True)
        )
        budget = [int(i.operands.split(",")[-1], 0) for i in kernel.instructions if i.base == "USETMAXREG"]
        registers = resources[kernel.name].registers
        listings.append(
            KernelListing(
                label=kernel_label(kernel.name),
                registers=registers,
                most=max([registers, *budget]),
                ptx=of_ptx,
                sass=sass,
                loops=tuple(loop for loop in find_loops(kernel) if not loop.waits),
            )
        )
    return Listing(tuple(source), tuple(listings))


def _text(instruction: Instruction) -> str:
    return f"{instruction.opcode} {instruction.operands}".strip()


def _reported_lines(text: str, file: str) -> dict[str, list[int | None]]:
    """Kernel -> the line that nvdisasm names for each instruction, None where it is of another file or of none."""
    found: dict[str, list[int | None]] = {}
    lines: list[int | None] = []
    current: int | None = None
    for row in text.splitlines():
        if section := _SECTION.match(row):
            lines = found.setdefault(section.group(1), [])
            current = None
        elif mark := _MARK.match(row):
            current = int(mark.group(2)) if mark.group(1) == file else None
        elif _FUNCTION.match(row):
            current = None
        elif _CODE.match(row):
            lines.append(current)
    return found


def _ptx_of(kernel: ptx.Kernel, text: Sequence[str], file: str) -> tuple[PtxLine, ...]:
    return tuple(
        PtxLine(
            instruction.line,
            " ".join(text[instruction.line - 1].split()),
            instruction.source[1] if instruction.source is not None and instruction.source[0] == file else None,
        )
        for instruction in kernel.instructions
    )


def _inner_lines(text: Iterable[str], kernel: str) -> dict[int, set[int]]:
    """Line that a `.loc` within inline assembly of a kernel names -> lines of the module that the assembly is of."""
    found: dict[int, set[int]] = {}
    depth, current, inside = 0, None, False
    for row in text:
        if ".entry" in row:
            inside = kernel in row
        stripped = row.split("//")[0]
        location = _LOCATION.match(stripped)
        if location and inside:
            line = int(location.group(2))
            if depth <= 1:
                current = line if int(location.group(3)) > 0 else current
            elif current is not None and line != current:
                found.setdefault(line, set()).add(current)
        depth += stripped.count("{") - stripped.count("}")
    return found


def _home(
    instruction: Instruction, reported: int | None, of_ptx: Sequence[PtxLine], inner: Mapping[int, set[int]]
) -> int | None:
    """The line that a SASS instruction belongs to, given the one that ptxas reports."""
    if reported is None:
        return None
    wanted = _origin(instruction)
    if wanted is not None:
        holding = {entry.line for entry in of_ptx if entry.line is not None and _holds(entry.text, wanted, instruction)}
        if reported in holding:
            return reported
        near = holding & inner.get(reported, set())
        if len(near) == 1 or len(holding) == 1:
            return next(iter(near or holding))
    if reported in {entry.line for entry in of_ptx}:
        return reported
    # A line of assembly that stands on one line of the module alone. Otherwise it is nobody's: a wait that spins out
    # of line, or the line of a function's decorator.
    around = inner.get(reported, set())
    return next(iter(around)) if len(around) == 1 else None


def _origin(instruction: Instruction) -> tuple[str, ...] | None:
    if is_gmma(instruction):
        return ("wgmma.mma_async",)
    return _ORIGINS.get(instruction.base)


def _holds(text: str, wanted: Sequence[str], instruction: Instruction) -> bool:
    if not any(name in text for name in wanted):
        return False
    if not is_gmma(instruction):
        return True
    # Which of the two products: A in registers is a second list in braces.
    in_registers = text.count("{") > 1
    operands = instruction.operands.split(",")
    return in_registers == (len(operands) > 1 and "gdesc" not in operands[1])
