"""The numerics card: errors of O by length of the sequence and kind of input, beside PyTorch in the same precision.

Two sources, which are never mixed: the record of a run on a GPU (`fa3gen verify --evidence`), and a small sweep that
the CPU model of sm_90a executes while the report is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa3gen.design.masks import reach
from fa3gen.inspect.report.speeds import origin
from fa3gen.records import evidence
from fa3gen.spec.model import Forward, GlobalHandoff, ScalarProduct
from fa3gen.verify.results import CaseResult

if TYPE_CHECKING:
    from fa3gen.cpu.kernel import CpuKernel
    from fa3gen.design.workspace import Workspace
    from fa3gen.spec.specfile import Variant
    from fa3gen.verify.inputs import Case

SEED = 1  # of the sweep's inputs
LONGEST, LONGEST_SCALAR = 1024, 512  # keys of the sweep: seconds on the CPU model
# `b2 77x333 h2/2` or `6 sequences 211x340 h1/1`, whose rows are those of all sequences; windows and page sizes follow.
_SHAPE = re.compile(r"(?:b\d+|(?P<sequences>\d+) sequences?) \d+x(?P<keys>\d+) h\d+/\d+(?: .*)?")


@dataclass(frozen=True)
class Point:
    """Relative Frobenius errors of O on one case, of the kernel and of PyTorch; `seq_k`: mean keys of a sequence."""

    name: str
    kind: str
    shape: str
    seq_k: int
    kernel: float
    yardstick: float
    kernel_max: float
    yardstick_max: float
    lse: float | None


@dataclass(frozen=True)
class Card:
    """Points of one origin, said in words; `problem` says why there are none."""

    origin: str
    on_gpu: bool
    points: tuple[Point, ...]
    problem: str = ""


def from_evidence(workspace: Workspace, variant: Variant[Forward]) -> Card:
    """The card of the GPU record. Only of the present file: a record of an older one is named and not shown."""
    state, record = evidence.status(workspace, variant.stem)
    if record is None:
        return Card("", True, (), "no run on a GPU is recorded")
    made = origin(record)
    if state is evidence.Status.STALE:
        return Card(made, True, (), f"the record ({made}) is of an older file and is not shown")
    return Card(made, True, tuple(_recorded(variant.spec, record.cases)))


def _recorded(spec: Forward, cases: Sequence[CaseResult]) -> Iterator[Point]:
    from fa3gen.verify import inputs, packed_inputs, paged_inputs

    usual = {"dense": inputs, "packed": packed_inputs, "paged": paged_inputs}[spec.problem.layout].gpu_cases(spec)
    kinds = {case.name: case.distribution for case in usual}
    for case in cases:
        shape = _SHAPE.fullmatch(case.shape)
        o, yardstick, lse = case.o_error, case.o_yardstick, case.lse_error
        if shape is None or o is None or yardstick is None or o.relative is None or yardstick.relative is None:
            continue
        yield Point(
            name=case.name,
            kind=kinds.get(case.name, "normal"),
            shape=case.shape,
            seq_k=-(-int(shape["keys"]) // int(shape["sequences"] or 1)),
            kernel=o.relative,
            yardstick=yardstick.relative,
            kernel_max=o.max_abs or 0.0,
            yardstick_max=yardstick.max_abs or 0.0,
            lse=None if lse is None else lse.relative,
        )


def sweep(spec: Forward) -> tuple[Case, ...]:
    """Cases for the CPU model: every kind of input at lengths of keys that double, a few queries each.

    Of packed sequences one, between rows of NaN and infinity, and its keys in pages of several sizes.
    """
    from fa3gen.verify import inputs, packed_inputs, paged_inputs

    m, n = spec.tile.q // spec.tile.pack_heads, spec.tile.kv
    if isinstance(spec.handoff, GlobalHandoff):
        m, n = 16, 64
    # As many queries as leave each of them a key under any mask; few, since the model is slow.
    queries = min(m, 32)
    longest = LONGEST_SCALAR if isinstance(spec.pv, ScalarProduct) else LONGEST
    lengths = [n // 2 << doubling for doubling in range(12) if n // 2 << doubling <= longest]
    kinds: tuple[inputs.Distribution, ...] = ("normal", "outlier", "ramp")
    sizes = [(f"{kind} {length}", min(queries, length), length, kind) for kind in kinds for length in lengths]
    if spec.problem.layout == "dense":
        return tuple(
            inputs.served(inputs.Case(name, "", 1, seq_q, seq_k, 1, 1, kind), spec)
            for name, seq_q, seq_k, kind in sizes
        )
    cases = [
        inputs.served(packed_inputs.sequences(name, "", (seq_q,), (seq_k,), first=1, behind=1, distribution=kind), spec)
        for name, seq_q, seq_k, kind in sizes
    ]
    return tuple(cases if spec.problem.layout == "packed" else paged_inputs.in_pages(cases, spec))


def on_cpu_model(variant: Variant[Forward], kernel: CpuKernel) -> Card:
    """Run the sweep on the CPU model of sm_90a, and PyTorch on the same inputs on this machine's CPU.

    Raises OutsideModel for a kernel that the model does not cover.
    """
    import torch

    from fa3gen.cpu.findings import Hazard
    from fa3gen.inspect import tracing
    from fa3gen.verify import attention_on_gpu as verify
    from fa3gen.verify import reference
    from fa3gen.verify.on_cpu import EXECUTED_ON
    from fa3gen.verify.runner import errors

    spec = variant.spec
    origin = f"{EXECUTED_ON}, not a GPU; PyTorch {torch.__version__.partition('+')[0]} on the CPU"
    points = []
    for case in sweep(spec):
        made = tracing.made(spec, case, SEED)
        facts = {"reach": reach(made.mask), **made.keywords}
        expected = reference.joined([reference.attention(*part, **facts) for part in made.parts])
        facts["out_dtype"] = made.out.dtype
        yardstick = reference.joined([reference.same_precision(*part, **facts) for part in made.parts])
        try:
            found = tracing.attention(kernel, spec, made)
        except Hazard as hazard:
            return Card(origin, False, (), f"{case.name}: {hazard}")
        o, plain = errors(made.rows_of(found.out), expected.out), errors(yardstick.out, expected.out)
        if o.relative is None or plain.relative is None:
            return Card(origin, False, (), f"{case.name}: O is not finite")
        lse = verify.lse_errors(made.rows_of_lse(found.lse), expected.lse).relative if spec.outputs.lse else None
        points.append(
            Point(
                name=case.name,
                kind=case.distribution,
                shape=case.shape,
                seq_k=max(keys.shape[1] for _, keys, _ in made.parts),
                kernel=o.relative,
                yardstick=plain.relative,
                kernel_max=o.max_abs or 0.0,
                yardstick_max=plain.max_abs or 0.0,
                lse=lse,
            )
        )
    return Card(origin, False, tuple(points))
