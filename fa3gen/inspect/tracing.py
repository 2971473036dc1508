"""Runs a generated module's kernel on the CPU model without importing the module: for traces and for reports.

Shapes as everywhere: q (batch, seq_q, heads_q, d), k (batch, seq_k, heads_kv, d), v (batch, seq_k, heads_kv, d_v).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from fa3gen.compile.cache import cached_compile
from fa3gen.cpu.findings import Hazard
from fa3gen.cpu.kernel import CpuKernel, Settings
from fa3gen.cpu.launch import Index
from fa3gen.cpu.schedule import Schedule
from fa3gen.cpu.trace import Trace
from fa3gen.design import footprint
from fa3gen.design.family import Family, Shape
from fa3gen.design.masks import USUAL_WINDOW
from fa3gen.design.operation import Scratch, Tensor, operation_of
from fa3gen.design.tile_order import taken
from fa3gen.design.work import key_tiles
from fa3gen.spec.model import Forward, GlobalHandoff
from fa3gen.spec.specfile import Variant
from fa3gen.verify.inputs import laid_out, usual_keywords
from fa3gen.verify.reference import Attention

LAPS = 2  # times that the default number of keys goes round the ring, and one tile more


@dataclass(frozen=True)
class Problem:
    """Extents of one call of `attention`; `seed` is that of the inputs."""

    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    seed: int


def default_problem(spec: Forward) -> Problem:
    """One tile of queries, of a persistent kernel two, and enough keys to go round every ring."""
    pack, tiles = spec.tile.pack_heads, 2 if footprint.persistent(spec) else 1
    return Problem(
        batch=1,
        seq_q=tiles * spec.tile.q // pack,
        seq_k=(LAPS * footprint.kv_stages(spec) + 1) * spec.tile.kv,
        heads_q=pack,
        heads_kv=1,
        head_dim=spec.problem.head_dim,
        seed=0,
    )


def busiest(spec: Forward, problem: Problem) -> int:
    """The first CTA whose tile of queries visits the most tiles of keys."""
    if isinstance(spec.handoff, GlobalHandoff) or footprint.persistent(spec):
        return 0
    shape = Shape(1, problem.seq_q, problem.seq_k, 1, 1)
    order = taken(spec, problem.seq_q, problem.seq_k, heads=1, batch=1)
    return max(order, key=lambda entry: key_tiles(spec, shape, entry.m_block).visited).number


def run(
    path: Path,
    variant: Variant[Forward],
    problem: Problem,
    ctas: list[Index] | None,
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
    ctas: list[Index] | None,
    schedule: Schedule,
    recorded: Trace,
) -> Hazard | None:
    """The same with a kernel at hand, whose settings are as before afterwards. A persistent kernel has one SM."""
    random = torch.Generator().manual_seed(problem.seed)
    shape = Shape(problem.batch, problem.seq_q, problem.seq_k, problem.heads_q, problem.heads_kv)
    q, k, v = (
        laid_out(tensor, torch.randn(tensor.sizes(shape), generator=random).to(tensor.dtype.in_torch()))
        for tensor in operation_of(variant.spec).inputs
    )
    before, kernel.settings = kernel.settings, Settings(schedule, recorded, ctas, sms=1)
    try:
        attention(kernel, variant, q, k, v)
    except Hazard as hazard:
        return hazard
    finally:
        kernel.settings = before
    return None


def attention(
    kernel: CpuKernel, variant: Variant[Forward], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Attention:
    """O and LSE of a module's kernel; the LSE of a module without one is all NaN, and so is what nobody wrote.

    Raises Hazard for the first fault, OutsideModel for what the model lacks.
    """
    operation = operation_of(variant.spec)
    given = {"q": q, "k": k, "v": v}
    shape = Shape(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    named = usual_keywords(Family.of(variant.spec).keywords, q.shape[2], q.device)
    if "sinks" in named:
        named["sinks"] = named["sinks"].view(torch.int16)  # the launch takes their words
    left, right = USUAL_WINDOW
    numbers = {"num_sms": kernel.settings.sms, "scale": q.shape[3] ** -0.5, **named}
    numbers |= {"window_left": left, "window_right": right}
    made: dict[str, torch.Tensor] = {}
    for argument in operation.arguments:
        if isinstance(argument, Scratch):
            sizes, zero = argument.sizes(shape, kernel.settings.sms), argument.initial == "zero"
        elif isinstance(argument, Tensor) and argument.role.endswith("output"):
            sizes, zero = argument.sizes(shape), False
        else:
            continue
        made[argument.name] = torch.full(sizes, 0 if zero else math.nan, dtype=argument.dtype.in_torch())
    kernel(*({**given, **made, **numbers}[argument.name] for argument in operation.arguments))
    lse = made["lse"] if "lse" in made else torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
    return Attention(made["out"], lse)
