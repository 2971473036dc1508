"""The facts of a compiled module, and how they compare with what its plan predicts.

A census puts together what the PTX asks for (`ptx` beside this file), what ptxas made of it (`sass`), the resources in
the cubin, ptxas's own remarks and the shared memory of each launch (`host`). All of it is parsed from text: importing
this module needs nothing but the standard library.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from fa3gen.compile.census.host import dynamic_smem_by_kernel
from fa3gen.compile.census.ptx import PtxFacts, PtxKernel, Wgmma, parse_ptx
from fa3gen.compile.census.sass import Loop, SassFacts, parse_sass
from fa3gen.compile.toolchain import ANSI_COLOR, Resources
from fa3gen.generate.expected import Expectation, SassExpectation
from fa3gen.hardware.hopper import SMEM_PER_CTA

__all__ = [
    "Census",
    "KernelCensus",
    "Loop",
    "Mismatch",
    "PtxFacts",
    "PtxasNote",
    "Row",
    "SassFacts",
    "Wgmma",
    "compare",
    "parse_ptxas_log",
    "rows",
    "take_census",
]

SMEM_FACT = "shared memory per CTA (bytes)"
RESERVED_SMEM = 1024  # Hopper keeps 1 KB of each CTA's shared memory for the system; cuobjdump counts it as static

_PTXAS_LINE = re.compile(r"ptxas\s+(?:(?:info|warning)\s*:|\.)")
_NOTE = re.compile(r"^ptxas\s+(?:info\s*:\s*\((C\d+)\)|warning\s*:\s*(?:\((C\d+)\))?)\s*(.*)$")
_IN_FUNCTION = re.compile(r"\s+(?:in|for)\s+(?:the\s+)?function\s+'([^']+)'\.?$")
_PROPERTIES = re.compile(r"^ptxas\s+info\s*:\s*Function properties for (\S+)")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class PtxasNote:
    """One remark or warning of ptxas, such as C7513; `kernel` is None when ptxas does not name one."""

    code: str
    text: str
    kernel: str | None

    @property
    def serializes(self) -> bool:
        """Whether it says that ptxas put a wait after every wgmma of the kernel (C7510, C7513 and their like)."""
        return "wgmma" in self.text and "serialized" in self.text

    @property
    def injects_wait(self) -> bool:
        """Whether ptxas added a wait because registers of a product in flight are touched (C7517)."""
        return "warpgroup.wait is injected" in self.text

    @property
    def performance_loss(self) -> bool:
        """Whether ptxas calls it a loss of performance, serialisation left out: setmaxnreg ignored (C7508), say."""
        return "Performance Loss" in self.text and not self.serializes


@dataclass(frozen=True)
class PtxasLog:
    """What ptxas said: notes in its order, and (bytes stored, bytes loaded) for spills by kernel."""

    notes: tuple[PtxasNote, ...]
    spills: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class KernelCensus:
    """Facts of one kernel. Bytes unless said; None where the compiler's output does not tell.

    `smem` is what one CTA takes: dynamic plus static, without the 1024 bytes that the system reserves. `serialized` is
    the evidence that ptxas serialised the kernel's WGMMA, one sentence each; empty when it did not.
    """

    name: str
    label: str
    threads: int | None
    registers: int
    stack: int
    static_smem: int
    dynamic_smem: int | None
    spill_stores: int | None
    spill_loads: int | None
    ptx: PtxFacts
    sass: SassFacts
    notes: tuple[PtxasNote, ...]
    serialized: tuple[str, ...]

    @property
    def smem(self) -> int | None:
        """Shared memory of one CTA in bytes; None when the launch does not fix it."""
        return None if self.dynamic_smem is None else self.dynamic_smem + self.static_smem


@dataclass(frozen=True)
class Census:
    """Facts of a compiled module, by kernel and in sum."""

    kernels: tuple[KernelCensus, ...]

    @property
    def ptx(self) -> PtxFacts:
        """PTX counts of all kernels added up."""
        return _add(PtxFacts, [kernel.ptx for kernel in self.kernels])

    @property
    def sass(self) -> SassFacts:
        """SASS counts of all kernels added up; loops in kernel order."""
        return _add(SassFacts, [kernel.sass for kernel in self.kernels])

    @property
    def registers(self) -> int:
        """Registers per thread of the hungriest kernel."""
        return max((kernel.registers for kernel in self.kernels), default=0)

    @property
    def stack(self) -> int:
        """Bytes of stack per thread of the kernel with most of it."""
        return max((kernel.stack for kernel in self.kernels), default=0)

    @property
    def smem(self) -> int | None:
        """Bytes of shared memory per CTA of the hungriest kernel; None when one of them is not known."""
        sizes = [kernel.smem for kernel in self.kernels]
        return None if None in sizes else max((size for size in sizes if size is not None), default=0)

    @property
    def spills(self) -> int:
        """Instructions that touch local memory (LDL and STL): spills, or arrays indexed at run time."""
        return self.sass.local_loads + self.sass.local_stores

    @property
    def notes(self) -> tuple[PtxasNote, ...]:
        """Everything ptxas remarked, each note once."""
        return tuple(dict.fromkeys(note for kernel in self.kernels for note in kernel.notes))

    @property
    def serialized_wgmma(self) -> bool:
        """Whether ptxas serialised the WGMMA of any kernel."""
        return any(kernel.serialized for kernel in self.kernels)

    def as_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        total = {
            "registers": self.registers,
            "stack": self.stack,
            "smem": self.smem,
            "spills": self.spills,
            "serialized_wgmma": self.serialized_wgmma,
            "ptx": _facts_as_dict(self.ptx),
            "sass": {key: value for key, value in _facts_as_dict(self.sass).items() if key != "loops"},
        }
        return {"total": total, "kernels": [_kernel_as_dict(kernel) for kernel in self.kernels]}


@dataclass(frozen=True)
class Mismatch:
    """One fact that is not as the plan predicts."""

    fact: str
    expected: str
    found: str

    def __str__(self) -> str:
        """The mismatch in words."""
        return f"{self.fact}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True)
class Row:
    """One line of the comparison; `expected` and `ok` are None for a fact without a prediction."""

    fact: str
    expected: str | None
    found: str
    ok: bool | None


def compare(census: Census, expectation: Expectation) -> list[Mismatch]:
    """Every fact that is not as predicted."""
    return [
        Mismatch(row.fact, row.expected, row.found)
        for row in rows(census, expectation)
        if row.ok is False and row.expected is not None
    ]


# Counts of the PTX that an Expectation may predict under the same name, in the words of the report.
_COUNTS = {
    "wgmma_commits": "wgmma commit_group",
    "wgmma_waits": "wgmma wait_group",
    "mma": "mma.sync",
    "tma_loads": "TMA loads",
    "tma_stores": "TMA stores",
    "cp_async": "cp.async copies",
    "mbarrier_inits": "mbarrier init",
    "mbarrier_expect_tx": "mbarrier expect_tx",
    "ldmatrix": "ldmatrix",
    "stmatrix": "stmatrix",
    "tanh": "tanh.approx",
}


def rows(census: Census, expectation: Expectation) -> list[Row]:
    """The comparison, fact by fact; kinds of instructions that are neither predicted nor there are left out."""
    ptx, notes = census.ptx, census.notes
    table = [_row("kernels", expectation.kernels, len(census.kernels))]
    table += _wgmma_rows(ptx, expectation.wgmma)
    for name, words in _COUNTS.items():
        found = getattr(ptx, name)
        count = sum(found.values()) if isinstance(found, Mapping) else found
        predicted = getattr(expectation, name)
        if count or predicted:
            table.append(_row(words, predicted, count))
    if ptx.setmaxnreg or expectation.setmaxnreg:
        expected = None if expectation.setmaxnreg is None else _listed(expectation.setmaxnreg)
        table.append(_row("setmaxnreg", expected, _listed(ptx.setmaxnreg)))
    table.append(_smem_row(census.smem, expectation.smem_bytes))
    table.append(_at_most("registers per thread", expectation.max_registers, census.registers))
    table.append(_row("stack (bytes)", expectation.stack_bytes, census.stack))
    table.append(_row("local memory accesses (LDL, STL)", expectation.spills, census.spills))
    table += _sass_rows(census.sass, expectation.sass)
    table += _ptxas_rows(census, expectation, notes)
    return table


def _sass_rows(sass: SassFacts, expected: SassExpectation) -> list[Row]:
    table = []
    if sass.warpgroup_waits or expected.waits:
        table.append(_row("SASS: warpgroup waits (WARPGROUP.DEPBAR)", expected.waits, sass.warpgroup_waits))
    if sass.fmnmx or expected.min_maxima:
        least = expected.min_maxima
        enough = None if least is None else sass.fmnmx >= least
        table.append(
            Row("SASS: maxima (FMNMX)", None if least is None else f"at least {least}", str(sass.fmnmx), enough)
        )
    if sass.fsetp or expected.max_comparisons is not None:
        table.append(_at_most("SASS: comparisons of numbers (FSETP)", expected.max_comparisons, sass.fsetp))
    if sass.opcodes.get("LDSM"):
        table.append(_row("SASS: registers of A overwritten in the loop that reads them", 0, sass.lost_operands))
    for space, found, wanted in (
        ("global", sass.global_stores, expected.global_stores),
        ("shared", sass.shared_stores, expected.shared_stores),
    ):
        if found or wanted:
            table.append(
                _row(f"SASS: stores to {space} memory", None if wanted is None else _listed(wanted), _listed(found))
            )
    return table


def _at_most(fact: str, bound: int | None, found: int) -> Row:
    if bound is None:
        return Row(fact, None, str(found), None)
    return Row(fact, f"at most {bound}", str(found), found <= bound)


def _smem_row(found: int | None, predicted: int | None) -> Row:
    # The compiler takes any size; the launch would fail on the GPU. So the limit holds even without a prediction.
    if found is not None and found > SMEM_PER_CTA:
        wanted = "" if predicted is None else f"{predicted}, "
        return Row(SMEM_FACT, f"{wanted}at most {SMEM_PER_CTA}", str(found), False)
    return _row(SMEM_FACT, predicted, found)


def _ptxas_rows(census: Census, expectation: Expectation, notes: Sequence[PtxasNote]) -> list[Row]:
    table = []
    if census.sass.gmma or expectation.serialized_wgmma:
        evidence = [sentence for kernel in census.kernels for sentence in kernel.serialized]
        found = "yes: " + "; ".join(evidence) if evidence else "no"
        predicted = expectation.serialized_wgmma
        expected = None if predicted is None else ("yes" if predicted else "no")
        ok = None if predicted is None else predicted == census.serialized_wgmma
        table.append(Row("WGMMA serialised by ptxas", expected, found, ok))
        injected = [note for note in notes if note.injects_wait]
        table.append(_row("WGMMA waits added by ptxas", expectation.injected_waits, len(injected), _quote(injected)))
    losses = [note for note in notes if note.performance_loss]
    if losses or expectation.performance_notes:
        table.append(_row("performance notes of ptxas", expectation.performance_notes, len(losses), _quote(losses)))
    return table


def _quote(notes: Iterable[PtxasNote]) -> str:
    return "; ".join(f"{note.code} {note.text}".strip() for note in notes)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} x {count}" for name, count in sorted(counts.items()) if count) or "none"


def _row(fact: str, expected: int | str | None, found: int | str | None, detail: str = "") -> Row:
    ok = None if expected is None else expected == found
    said = "unknown" if found is None else str(found)
    return Row(fact, None if expected is None else str(expected), f"{said} ({detail})" if detail else said, ok)


def _wgmma_rows(ptx: PtxFacts, expected: Mapping[tuple[int, int, int, str], int | None] | None) -> list[Row]:
    found: Counter[tuple[int, int, int, str]] = Counter()
    for kind, count in ptx.wgmma.items():
        found[kind.m, kind.n, kind.k, kind.a_source] += count
    table = []
    for shape in sorted({*found, *(expected or {})}):
        m, n, k, source = shape
        fact = f"wgmma m{m}n{n}k{k}, A from {source}"
        if expected is None:
            table.append(Row(fact, None, str(found[shape]), None))
        elif shape in expected and expected[shape] is None:
            table.append(Row(fact, "at least 1", str(found[shape]), found[shape] > 0))
        else:
            table.append(_row(fact, expected.get(shape, 0), found[shape]))
    return table


def take_census(
    ptx: str, sass: str, resources: Mapping[str, Resources], ptxas_log: str = "", host_module: str = ""
) -> Census:
    """The census of one compiled module.

    `ptx` is the module's PTX, `sass` the output of `nvdisasm -c` on its cubin, `resources` that of `cuobjdump
    -res-usage`, `ptxas_log` what ptxas wrote with -v (colours and line wraps do no harm), `host_module` the lowered
    LLVM-dialect text of the host code. Raises ValueError when PTX, SASS and cubin do not hold the same kernels.
    """
    log = parse_ptxas_log(ptxas_log)
    dynamic_smem = dynamic_smem_by_kernel(host_module)
    code = {kernel.name: kernel for kernel in parse_sass(sass)}
    asked = parse_ptx(ptx)
    names = {kernel.name for kernel in asked}
    if not names or not names <= code.keys() or not names <= resources.keys():
        raise ValueError(
            f"PTX has kernels {sorted(names)}, SASS {sorted(code)}, the cubin {sorted(resources)}: not the same module"
        )
    return Census(
        kernels=tuple(
            _kernel_census(kernel, code[kernel.name].facts(), resources[kernel.name], log, dynamic_smem)
            for kernel in asked
        )
    )


def _kernel_census(
    kernel: PtxKernel, sass: SassFacts, usage: Resources, log: PtxasLog, dynamic_smem: Mapping[str, int]
) -> KernelCensus:
    notes = tuple(note for note in log.notes if note.kernel in (None, kernel.name))
    spill_stores, spill_loads = log.spills.get(kernel.name, (None, None))
    return KernelCensus(
        name=kernel.name,
        label=kernel_label(kernel.name),
        threads=kernel.threads,
        registers=usage.registers,
        stack=usage.stack,
        static_smem=max(0, usage.shared - RESERVED_SMEM),
        dynamic_smem=dynamic_smem.get(kernel.name),
        spill_stores=spill_stores,
        spill_loads=spill_loads,
        ptx=kernel.facts,
        sass=sass,
        notes=notes,
        serialized=_serialization(kernel.facts, sass, notes),
    )


def _serialization(ptx: PtxFacts, sass: SassFacts, notes: Iterable[PtxasNote]) -> tuple[str, ...]:
    """Evidence that ptxas serialised the WGMMA of a kernel: its own word, and the shape of the code.

    Serialised code waits after every product: each HGMMA ends a group of its own (it carries the scoreboard), with a
    WARPGROUP.DEPBAR for each, although the source commits several products as one group. A kernel whose groups hold one
    product each looks the same and is not serialised, hence the comparison with the commits written; ptxas may have
    copied code (an unrolled loop), which copies products and commits alike.
    """
    evidence = [f"ptxas {note.code}: {note.text}" for note in notes if note.serializes]
    written = sum(ptx.wgmma.values())
    copies = max(1.0, sass.gmma / written) if written else 1.0
    every_product_ends_a_group = sass.gmma_group_ends == sass.gmma > ptx.wgmma_commits * copies
    if every_product_ends_a_group and sass.warpgroup_waits >= sass.gmma:
        evidence.append(
            f"SASS waits {sass.warpgroup_waits} times for {sass.gmma} products, where the source commits "
            f"{ptx.wgmma_commits} groups and waits {ptx.wgmma_waits} times"
        )
    return tuple(evidence)


def parse_ptxas_log(text: str) -> PtxasLog:
    """Notes and spills out of what the DSL prints for `remarks{ptx}`: ptxas's lines, maybe wrapped and indented."""
    notes: dict[PtxasNote, None] = {}
    spills: dict[str, tuple[int, int]] = {}
    kernel = ""
    for line in _ptxas_lines(text):
        properties, spill, note = _PROPERTIES.match(line), _SPILL.search(line), _NOTE.match(line)
        if properties:
            kernel = properties.group(1)
        elif spill and kernel:
            spills[kernel] = (int(spill.group(2)), int(spill.group(3)))
        elif note:
            body = note.group(3)
            where = _IN_FUNCTION.search(body)
            found = PtxasNote(
                code=note.group(1) or note.group(2) or "",
                text=body[: where.start()] if where else body,
                kernel=where.group(1) if where else None,
            )
            notes[found] = None
    return PtxasLog(notes=tuple(notes), spills=spills)


def _ptxas_lines(text: str) -> list[str]:
    """ptxas's lines, each on one line again: a line that does not begin with `ptxas` goes on from the one before."""
    lines: list[str] = []
    open_line = False
    for raw in ANSI_COLOR.sub("", text).splitlines():
        line = raw.strip()
        start = _PTXAS_LINE.search(line)
        if start:
            lines.append(line[start.start() :])
            open_line = True
        elif line and open_line:
            lines[-1] += " " + line
        else:
            open_line = False
    return lines


def kernel_label(name: str) -> str:
    """A short name for people: the DSL's prefix and the mangled argument types are taken off."""
    plain = re.sub(r"^kernel_(?:cutlass_)?", "", name)
    return re.split(r"_(?:object_at_|tensor|FakeTensor|CopyAtom|TiledMMA|TiledCopy|\d+$)", plain)[0][:48] or name[:48]


_Facts = TypeVar("_Facts", PtxFacts, SassFacts)


def _add(kind: type[_Facts], parts: Sequence[_Facts]) -> _Facts:
    """Facts of several kernels added up: counts and mappings by sum, tuples end to end."""
    total: dict[str, Any] = {}
    for each in fields(kind):
        values = [getattr(part, each.name) for part in parts]
        if values and isinstance(values[0], Mapping):
            total[each.name] = dict(sum((Counter(value) for value in values), Counter[Any]()))
        elif values and isinstance(values[0], tuple):
            total[each.name] = tuple(item for value in values for item in value)
        else:
            total[each.name] = sum(values)
    return kind(**total) if parts else kind()


def _facts_as_dict(facts: PtxFacts | SassFacts) -> dict[str, Any]:
    """Counts as JSON has them: products as a list, keys of mappings as strings."""
    result: dict[str, Any] = {}
    for each in fields(facts):
        value = getattr(facts, each.name)
        if each.name == "wgmma":
            result[each.name] = [{**asdict(kind), "count": count} for kind, count in sorted(value.items())]
        elif each.name == "loops":
            result[each.name] = [asdict(loop) for loop in value]
        elif isinstance(value, Mapping):
            result[each.name] = {str(key): count for key, count in sorted(value.items())}
        else:
            result[each.name] = value
    return result


def _kernel_as_dict(kernel: KernelCensus) -> dict[str, Any]:
    plain = {each.name: getattr(kernel, each.name) for each in fields(kernel)}
    return {
        **plain,
        "smem": kernel.smem,
        "ptx": _facts_as_dict(kernel.ptx),
        "sass": _facts_as_dict(kernel.sass),
        "notes": [asdict(note) for note in kernel.notes],
        "serialized": list(kernel.serialized),
    }
