"""Runs a generated module's kernel on the CPU model without importing the module: for traces and for reports.

Tensors are those that `fa3gen verify` makes: dense, packed, or with K and V in pages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fa3gen.compile.cache import cached_compile
from fa3gen.cpu.findings import Hazard
from fa3gen.cpu.kernel import CpuKernel, Settings
from fa3gen.cpu.launch import Index
from fa3gen.cpu.module import nothing
from fa3gen.cpu.schedule import Schedule
from fa3gen.cpu.trace import Trace
from fa3gen.design import footprint, splits, work
from fa3gen.design.family import PackedShape, PagedShape, Shape, call_of_lengths
from fa3gen.design.masks import given_with_calls, reach
from fa3gen.design.operation import Scratch, Tensor, operation_of
from fa3gen.design.tile_order import positions
from fa3gen.spec.model import Forward, GlobalHandoff
from fa3gen.spec.specfile import Variant
from fa3gen.verify import inputs, packed_inputs, paged_inputs
from fa3gen.verify.inputs import Case, Inputs
from fa3gen.verify.packed_inputs import PackedCase
from fa3gen.verify.paged_inputs import PagedCase
from fa3gen.verify.reference import Attention

SMS_OF_PARTS = 3  # that a kernel which splits keys is told of where nobody says how many
LAPS = 2  # times that the default number of keys goes round the ring, and one tile more


@dataclass(frozen=True)
class Problem:
    """One call of `attention`; `seed` is that of the inputs, `sms` how many the kernel is told that there are.

    Where that is None it is one, so that the CTA of a persistent kernel takes all tiles of queries; of a kernel that
    splits keys SMS_OF_PARTS, since one CTA would have all of them.
    """

    shape: Shape | PackedShape
    seed: int = 0
    sms: int | None = None

    def sms_of(self, spec: Forward) -> int:
        """The number of SMs."""
        return self.sms or (1 if spec.split is None else SMS_OF_PARTS)

    def facts(self, spec: Forward) -> dict[str, int | list[int]]:
        """Its extents as a trace document has them; with parts of keys also how many SMs share them."""
        extents = {name: value for name, value in asdict(self.shape).items() if value is not None}
        facts = {name: list(value) if isinstance(value, tuple) else value for name, value in extents.items()}
        sms = {} if spec.split is None and self.sms is None else {"sms": self.sms_of(spec)}
        return {**facts, "head_dim": spec.problem.head_dim, "seed": self.seed, **sms}


def default_shape(spec: Forward) -> Shape | PackedShape:
    """One tile of queries, of a persistent kernel two, and enough keys to go round every ring.

    Of packed sequences one that ends inside of its second tile of queries and of a tile of keys, one without rows, and
    one of less than a tile. Pages are as small as the module takes them, or of ODD_PAGE rows where any number will do.
    Where keys are split there are as many more as CTAs share them.
    """
    ctas = 1 if spec.split is None else SMS_OF_PARTS * spec.tile.ctas_per_sm
    m, n, pack, stages = positions(spec), spec.tile.kv, spec.tile.pack_heads, footprint.kv_stages(spec)
    if not footprint.packed_sequences(spec):
        tiles = 2 if footprint.persistent(spec) else 1
        return Shape(1, tiles * m, ctas * (LAPS * stages + 1) * n, heads_q=pack, heads_kv=1)
    lengths = (m + m // 4, 0, m // 3), (ctas * (stages + 1) * n + n // 3, 0, n // 2)
    return call_of_lengths(spec, *lengths, heads=(pack, 1))


def busiest(spec: Forward, shape: Shape | PackedShape) -> int:
    """The first CTA whose tile of queries visits the most tiles of keys."""
    if isinstance(spec.handoff, GlobalHandoff) or footprint.persistent(spec):
        return 0
    steps = work.Problem(spec, shape).steps_in_order
    return steps.index(max(steps))


def drawn(spec: Forward, problem: Problem) -> Inputs:
    """Random inputs for a call."""
    shape = problem.shape
    heads = shape.heads_q, shape.heads_kv
    facts: dict[str, Any] = {"layout": "contiguous", "window": shape.window}
    if isinstance(shape, Shape):
        return made(spec, Case("traced", "", shape.batch, shape.seq_q, shape.seq_k, *heads, **facts), problem.seed)
    case = packed_inputs.sequences("traced", "", shape.lengths_q, shape.lengths_k, heads=heads, **facts)
    if isinstance(shape, PagedShape):
        case = PagedCase(**vars(case), page=shape.page)
    return made(spec, case, problem.seed)


def made(spec: Forward, case: Case, seed: int) -> Inputs:
    """The inputs of a case, on the CPU: dense, packed, or in pages as the case is."""
    match case:
        case PagedCase():
            return paged_inputs.make(spec, case, device=torch.device("cpu"), seed=seed)
        case PackedCase():
            return packed_inputs.make(spec, case, device=torch.device("cpu"), seed=seed)
        case _:
            return inputs.make_for(spec, case, device=torch.device("cpu"), seed=seed)


def run(
    path: Path,
    variant: Variant[Forward],
    problem: Problem,
    ctas: Sequence[Index | int] | None,
    schedule: Schedule,
    recorded: Trace,
) -> Hazard | None:
    """Run a module's CTAs on random inputs and record them; returns the fault that the model found.

    Raises CompileError, OutsideModel, and UserError for a CTA outside the grid.
    """
    # With line information, the instructions name their lines in the generated file; they are the same without.
    kernel = CpuKernel(cached_compile(path, line_info=True))
    return run_kernel(kernel, variant, problem, ctas, schedule, recorded)


def run_kernel(
    kernel: CpuKernel,
    variant: Variant[Forward],
    problem: Problem,
    ctas: Sequence[Index | int] | None,
    schedule: Schedule,
    recorded: Trace,
) -> Hazard | None:
    """The same with a kernel at hand, whose settings are as before afterwards."""
    before, kernel.settings = kernel.settings, Settings(schedule, recorded, ctas, sms=problem.sms_of(variant.spec))
    try:
        kept = splits.kept_parts(variant.spec, problem.shape, problem.sms_of(variant.spec))
        attention(kernel, variant.spec, drawn(variant.spec, problem), kept)
    except Hazard as hazard:
        return hazard
    finally:
        kernel.settings = before
    return None


def attention(kernel: CpuKernel, spec: Forward, made: Inputs, kept: int = 0) -> Attention:
    """O and LSE of a module's kernel; the LSE of a module without one is all NaN, and so is what nobody wrote.

    They are as the call of the module returns them, with memory for so many parts of the keys. Raises Hazard for the
    first fault, OutsideModel for what the model lacks.
    """
    given: dict[str, Any] = {**made.given, **made.keywords, "out": made.out, "num_sms": kernel.settings.sms}
    given |= {"enable_pdl": 0, "scale": made.q.shape[-1] ** -0.5}
    if made.sinks is not None:
        given["sinks"] = made.sinks.view(torch.int16)  # the launch takes their words
    if given_with_calls(spec.mask):
        given["window_left"], given["window_right"] = reach(made.mask)
    sms = kernel.settings.sms
    extents = {"num_sms": sms, "num_ctas": sms * spec.tile.ctas_per_sm, "num_parts": kept}
    operation = operation_of(spec)
    for tensor in operation.inputs:
        extents |= {extent.name: size for extent, size in zip(tensor.dims, given[tensor.name].shape, strict=True)}
    for argument in operation.arguments:
        if argument.name in given or not isinstance(argument, Scratch | Tensor):
            continue
        # Lengths that are not given have no elements.
        optional = isinstance(argument, Tensor) and argument.role == "optional input"
        sizes = (0,) if optional else [extent.size or extents[extent.name] for extent in argument.dims]
        zero = isinstance(argument, Scratch) and argument.initial == "zero"
        dtype = argument.dtype.in_torch()
        given[argument.name] = torch.full(sizes, 0 if zero or optional else nothing(dtype), dtype=dtype)
    kernel(*(given[argument.name] for argument in operation.arguments))
    rows = made.out.shape[:-1]
    lse = given["lse"] if "lse" in given else torch.full((*rows[:-2], rows[-1], rows[-2]), math.nan)
    return Attention(made.out, lse)
