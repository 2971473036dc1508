"""Counts of what a kernel's PTX asks for: static instructions, each counted once however often it runs.

PTX ISA 8.8, chapters "Asynchronous Warpgroup Level Matrix Instructions", "Warp Level Matrix Instructions", "Data
Movement and Conversion Instructions: Asynchronous copy" and "Parallel Synchronization and Communication Instructions".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DEBUG_LINE = re.compile(r"^\s*\.(loc|file)\b[^\n]*$", re.MULTILINE)  # the only directives without ; or {}
_LEAD = re.compile(r"^(?:[\s{}]|[\w$]+:(?!:))+")  # scopes and labels before an instruction
_PREDICATE = re.compile(r"^@!?%?\w+\s+")
_REQNTID = re.compile(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")
_WGMMA = re.compile(r"^wgmma\.mma_async\..*?\bm(\d+)n(\d+)k(\d+)\.(\w+)\.(\w+)\.(\w+)")
_TENSOR_COPY = re.compile(r"^cp\.(reduce\.)?async\.bulk\.(prefetch\.)?tensor\.(\d)d\.(.*)$")


@dataclass(frozen=True, order=True)
class Wgmma:
    """One kind of warpgroup product: m x n x k per instruction, where A comes from, and the types of D, A and B."""

    m: int
    n: int
    k: int
    a_source: Literal["registers", "smem"]
    d_type: str
    a_type: str
    b_type: str

    def __str__(self) -> str:
        """The kind in words, as PTX spells shape and types."""
        types = ".".join((self.d_type, self.a_type, self.b_type))
        return f"m{self.m}n{self.n}k{self.k} {types}, A from {self.a_source}"


@dataclass(frozen=True)
class PtxFacts:
    """Static instruction counts of one kernel's PTX, or of several kernels added up.

    `tma_loads` and `tma_stores` are by tensor rank, `cp_async` by bytes per copy, `setmaxnreg` by direction and count
    ("dec 24"). `mbarrier_arrives` leaves out the arrivals that announce bytes, which `mbarrier_expect_tx` counts;
    `mbarrier_waits` counts try_wait and test_wait, of which the DSL writes two for one wait.
    """

    instructions: int = 0
    wgmma: Mapping[Wgmma, int] = field(default_factory=dict)
    wgmma_fences: int = 0
    wgmma_commits: int = 0
    wgmma_waits: int = 0
    mma: int = 0
    tma_loads: Mapping[int, int] = field(default_factory=dict)
    tma_stores: Mapping[int, int] = field(default_factory=dict)
    tma_prefetches: int = 0
    bulk_commits: int = 0
    bulk_waits: int = 0
    cp_async: Mapping[int, int] = field(default_factory=dict)
    cp_async_commits: int = 0
    cp_async_waits: int = 0
    mbarrier_inits: int = 0
    mbarrier_arrives: int = 0
    mbarrier_expect_tx: int = 0
    mbarrier_waits: int = 0
    bar_syncs: int = 0
    bar_arrives: int = 0
    warp_syncs: int = 0
    ldmatrix: int = 0
    stmatrix: int = 0
    setmaxnreg: Mapping[str, int] = field(default_factory=dict)
    proxy_fences: int = 0
    ex2: int = 0
    tanh: int = 0


# Opcode prefixes, each counted in the field it stands for; the first match counts.
_PREFIX_FIELDS = (
    ("wgmma.fence", "wgmma_fences"),
    ("wgmma.commit_group", "wgmma_commits"),
    ("wgmma.wait_group", "wgmma_waits"),
    ("mma.sync", "mma"),
    ("cp.async.bulk.commit_group", "bulk_commits"),
    ("cp.async.bulk.wait_group", "bulk_waits"),
    ("cp.async.commit_group", "cp_async_commits"),
    ("cp.async.wait_group", "cp_async_waits"),
    ("cp.async.wait_all", "cp_async_waits"),
    ("mbarrier.init", "mbarrier_inits"),
    ("mbarrier.arrive.expect_tx", "mbarrier_expect_tx"),
    ("mbarrier.arrive", "mbarrier_arrives"),
    ("mbarrier.try_wait", "mbarrier_waits"),
    ("mbarrier.test_wait", "mbarrier_waits"),
    ("bar.warp.sync", "warp_syncs"),
    ("bar.sync", "bar_syncs"),
    ("bar.arrive", "bar_arrives"),
    ("bar.cta.sync", "bar_syncs"),
    ("bar.cta.arrive", "bar_arrives"),
    ("barrier.sync", "bar_syncs"),
    ("barrier.arrive", "bar_arrives"),
    ("barrier.cta.sync", "bar_syncs"),
    ("barrier.cta.arrive", "bar_arrives"),
    ("ldmatrix", "ldmatrix"),
    ("stmatrix", "stmatrix"),
    ("fence.proxy.async", "proxy_fences"),
    ("ex2.approx", "ex2"),
    ("tanh.approx", "tanh"),
)


@dataclass(frozen=True)
class PtxKernel:
    """One `.entry` of a PTX module: its name, threads per CTA where `.reqntid` fixes them, and its facts."""

    name: str
    threads: int | None
    facts: PtxFacts


def parse_ptx(text: str) -> tuple[PtxKernel, ...]:
    """Every kernel of a PTX module, in its order."""
    text = _DEBUG_LINE.sub("", _COMMENT.sub("", text))
    starts = list(_ENTRY.finditer(text))
    ends = [*(start.start() for start in starts[1:]), len(text)]
    return tuple(_kernel(start.group(1), text[start.end() : end]) for start, end in zip(starts, ends, strict=False))


def _kernel(name: str, text: str) -> PtxKernel:
    header, _, body = text.partition("{")
    dims = _REQNTID.search(header)
    threads = None
    if dims:
        x, y, z = (int(dim) if dim else 1 for dim in dims.groups())
        threads = x * y * z
    return PtxKernel(name=name, threads=threads, facts=count_instructions(body))


def _instructions(body: str) -> Iterator[tuple[str, str]]:
    """(opcode, operands) of every instruction; directives, labels, scopes and predicates are taken off."""
    for statement in body.split(";"):
        statement = _PREDICATE.sub("", _LEAD.sub("", statement)).strip()
        if statement and not statement.startswith("."):
            opcode, *operands = statement.split(None, 1)
            yield opcode, operands[0] if operands else ""


def count_instructions(body: str) -> PtxFacts:
    """Facts of one kernel's body: instructions separated by semicolons, comments already removed."""
    total = 0
    counts: Counter[str] = Counter()
    wgmma: Counter[Wgmma] = Counter()
    keyed: dict[str, Counter[int]] = {"tma_loads": Counter(), "tma_stores": Counter(), "cp_async": Counter()}
    setmaxnreg: Counter[str] = Counter()
    for opcode, operands in _instructions(body):
        total += 1
        product = _WGMMA.match(opcode)
        copy = _TENSOR_COPY.match(opcode)
        if product:
            wgmma[_wgmma(product, operands)] += 1
        elif copy:
            where = _tensor_copy_field(copy)
            if where == "tma_prefetches":
                counts[where] += 1
            else:
                keyed[where][int(copy.group(3))] += 1
        elif opcode.startswith(("cp.async.ca.", "cp.async.cg.")):
            keyed["cp_async"][_copy_bytes(operands)] += 1
        elif opcode.startswith("setmaxnreg."):
            setmaxnreg[f"{opcode.split('.')[1]} {operands}"] += 1
        else:
            name = next((name for prefix, name in _PREFIX_FIELDS if opcode.startswith(prefix)), None)
            if name:
                counts[name] += 1
    return PtxFacts(
        instructions=total,
        wgmma=dict(wgmma),
        tma_loads=dict(keyed["tma_loads"]),
        tma_stores=dict(keyed["tma_stores"]),
        cp_async=dict(keyed["cp_async"]),
        setmaxnreg=dict(setmaxnreg),
        **counts,
    )


def _wgmma(match: re.Match[str], operands: str) -> Wgmma:
    # The operands are D in braces, then A: either its registers in braces or one 64-bit descriptor.
    after_d = operands[operands.index("}") + 1 :].lstrip(" ,\t\n")
    return Wgmma(
        m=int(match.group(1)),
        n=int(match.group(2)),
        k=int(match.group(3)),
        a_source="registers" if after_d.startswith("{") else "smem",
        d_type=match.group(4),
        a_type=match.group(5),
        b_type=match.group(6),
    )


def _tensor_copy_field(match: re.Match[str]) -> str:
    reduce, prefetch, _, spaces = match.groups()
    if prefetch:
        return "tma_prefetches"
    # The destination's state space comes first; a reduction only ever writes to global memory.
    return "tma_stores" if reduce or spaces.startswith("global") else "tma_loads"


def _copy_bytes(operands: str) -> int:
    """Third operand of cp.async: [destination], [source], bytes."""
    after_addresses = operands.rpartition("]")[2]
    return int(re.findall(r"\d+", after_addresses)[0])
