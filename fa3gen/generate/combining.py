"""The plan of a merge: every number and name that its templates print, its header, and what its code must show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from fa3gen.design import combining
from fa3gen.design.cta import Cta, cta_of
from fa3gen.design.operation import Scalar, operation_of
from fa3gen.design.schedule import schedule_of
from fa3gen.generate import header
from fa3gen.generate.expected import Expectation, SassExpectation
from fa3gen.generate.header import Description
from fa3gen.generate.module_plan import ImportsPlan, ModulePlan, Parameter
from fa3gen.hardware import hopper
from fa3gen.spec.model import Combine
from fa3gen.spec.specfile import Variant


@dataclass(frozen=True)
class ProblemPlan:
    """The dtype of O as each library names it, and bytes of a vector of O."""

    cutlass_dtype: str
    torch_dtype: str
    vector_bytes: int


@dataclass(frozen=True)
class PartsPlan:
    """Parts on their way at a time, shares of them, CTAs that an SM should have.

    `side_by_side` are the threads of a share in a CTA where there are most shares.
    """

    at_once: int
    shares: int
    ctas_per_sm: int
    side_by_side: int


@dataclass(frozen=True)
class ArgumentsPlan:
    """What `launch` takes."""

    launch: tuple[Parameter, ...]


@dataclass(frozen=True)
class EntryPlan:
    """What sections that all operations have ask of the entry points."""

    keeps_scratch: bool = False
    ctas_phrase: str = ""


@dataclass(frozen=True)
class SchedulerPlan:
    """Whether the GPU has to be asked for its SMs."""

    persistent: bool = True


@dataclass(frozen=True)
class CombinePlan(ModulePlan):
    """Everything that the templates print for one merge."""

    spec: Combine
    problem: ProblemPlan
    parts: PartsPlan
    arguments: ArgumentsPlan
    imports: ImportsPlan
    entry: EntryPlan
    scheduler: SchedulerPlan
    lse: bool = False  # of a launch that nobody asks for one

    @property
    def spine(self) -> str:
        """The template of merges."""
        return "combine.py.jinja"


def make_plan(variant: Variant, spec: Combine) -> CombinePlan:
    """Derive the plan of one variant."""
    described, cta, operation = describe(spec, variant.summary), cta_of(spec), operation_of(spec)
    threads, parts, element = spec.cta.threads, spec.parts, spec.element
    launch = (Parameter(each.name, each.dtype if isinstance(each, Scalar) else None) for each in operation.arguments)
    return CombinePlan(
        stem=variant.stem,
        spec=spec,
        operation=operation,
        cta=cta,
        described=described,
        header=header.make_header(described, cta, source=PurePath(variant.source), stem=variant.stem),
        expectation=expectation(spec, cta),
        problem=ProblemPlan(element.cutlass_name, element.torch_name, combining.VECTOR * element.bytes),
        parts=PartsPlan(parts.at_once, parts.shares, spec.cta.per_sm, threads // parts.shares),
        arguments=ArgumentsPlan(tuple(launch)),
        imports=ImportsPlan(dataclasses="", pipeline=False, nvgpu="", smem_allocator=True),
        entry=EntryPlan(),
        scheduler=SchedulerPlan(),
    )


# The header


def describe(spec: Combine, summary: str) -> Description:
    """Describe one merge in words; `summary` is that of its spec."""
    schedule, cta = schedule_of(spec), cta_of(spec)
    held = ", ".join(f"{what} {count}" for what, count in cta.held)
    warps = cta.threads // hopper.WARP
    return Description(
        title=f"{summary.rstrip('.')} (O in {spec.element.long_name}).",
        formula="LSE = log(sum(exp(LSE_i)))    O = sum(exp(LSE_i - LSE) O_i)",
        sentence="A part without a key has LSE_i = -inf; a row that no part has a key for has O = 0 and LSE = -inf.",
        decisions=tuple(_decisions(spec)),
        threads=(
            f"{cta.threads} threads, {warps} warps: each has {combining.HALVES} x {combining.VECTOR} columns of a row",
            f"about {sum(count for _, count in cta.held)} registers each: {held}",
        ),
        barriers=(),
        named_barriers=(),
        steps_title=f"Timeline: a step takes {_parts(spec.parts.at_once)} of a row",
        steps=tuple(header.step_rows(schedule)),
    )


def _parts(count: int) -> str:
    return f"{count} part{'s' * (count > 1)}"


def _decisions(spec: Combine) -> list[tuple[str, str]]:
    threads, parts, size = spec.cta.threads, spec.parts, spec.element.bytes
    row, vector = ", ".join(str(extent) for extent in operation_of(spec).output.dims), combining.VECTOR
    share = threads // parts.shares
    return [
        ("tensors", f"O: ({row}), of parts (num_parts, {row}) in float32; LSE without dim"),
        ("loads", f"16 bytes of a part at a time, {parts.at_once} x {combining.HALVES} before one is used"),
        ("softmax", "online, in float32: one pass over the parts, which come once from memory"),
        (
            "order",
            f"rows one behind the other; parts are shared out where rows fill less than {spec.cta.per_sm} CTAs an SM",
        ),
        (
            "shares",
            f"2 to {parts.shares}, each of {share} threads side by side or more ({share} x 16 = {share * 16} bytes); "
            "the first adds up",
        ),
        (
            "output",
            f"O from registers, {vector} x {size} = {vector * size} bytes at a time; LSE by a row's first thread",
        ),
    ]


# What the compiled code must show


def expectation(spec: Combine, cta: Cta) -> Expectation:
    """Static instruction counts; registers are those with which as many CTAs fit an SM as the spec says."""
    halves = combining.HALVES
    return Expectation(
        kernels=1,
        wgmma={},
        wgmma_commits=0,
        wgmma_waits=0,
        tma_loads=0,
        tma_stores=0,
        cp_async=0,
        mbarrier_inits=0,
        mbarrier_expect_tx=0,
        ldmatrix=0,
        stmatrix=0,
        setmaxnreg={},
        smem_bytes=cta.smem_bytes,
        max_registers=min(hopper.REGISTERS_PER_THREAD, hopper.REGISTERS_PER_SM // (cta.threads * spec.cta.per_sm)),
        sass=SassExpectation(
            waits=0,
            min_maxima=spec.parts.at_once + 1,  # of each part's LSE, and of each share's
            max_comparisons=spec.parts.at_once
            + 3,  # with -inf: each part, the largest of a step, of shares; a sum with 0
            global_stores={f"STG.{combining.VECTOR * spec.element.bits}": halves, "STG.32": 1},
            shared_stores={"STS.128": halves, "STS.32": 2},
        ),
    )
