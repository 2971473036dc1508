"""The plan of a quantisation: every number and name that its templates print, its header, what its code must show."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from fa3gen.design import quantizing
from fa3gen.design.cta import Cta, cta_of
from fa3gen.design.operation import operation_of
from fa3gen.design.schedule import schedule_of
from fa3gen.generate import header
from fa3gen.generate.expected import Expectation, SassExpectation
from fa3gen.generate.header import Description
from fa3gen.generate.module_plan import ImportsPlan, ModulePlan
from fa3gen.hardware import hopper
from fa3gen.hardware.dtypes import VECTOR_BYTES
from fa3gen.spec.model import Quantize
from fa3gen.spec.specfile import Variant


@dataclass(frozen=True)
class ProblemPlan:
    """Dtypes as each library names them, elements of a row, and what is done to rows.

    `scaled_per` is what shares a scale: "head", "block" or "token". `permute`: whether 16 rows of the output, which has
    whole ones, have the order of `fa3gen.design.key_order`.
    """

    head_dim: int
    cutlass_dtype: str
    torch_dtype: str
    cutlass_out: str
    torch_out: str
    rotate: bool
    transpose: bool
    permute: bool
    scaled_per: str


@dataclass(frozen=True)
class TilePlan:
    """Rows of a tile, and CTAs of an SM; threads of a row, and the bits of their number."""

    rows: int
    ctas_per_sm: int
    lanes: int
    lane_bits: int


@dataclass(frozen=True)
class ArgumentsPlan:
    """What `launch` takes, and the two kernels: all of it, or what the first one reads and writes."""

    launch: tuple[str, ...]
    amax: tuple[str, ...]


@dataclass(frozen=True)
class WordsPlan:
    """Expressions and phrases: what makes float32 of the rows that a thread loads, and of those that it has loaded.

    Which rows these are, the row of the thread's number i, and what a tile that is stored by columns goes to. What the
    CTAs of an SM are counted for, if anything; and the threads of a launch, with the bound of their registers, if any.
    """

    values_of_rows: str
    values: str
    rows: str
    row: str
    columns: str
    ctas: str
    block: str


@dataclass(frozen=True)
class EntryPlan:
    """Parameters of the entry point behind the inputs; what sections that all operations have ask of it."""

    keywords: str
    given: str
    keeps_scratch: bool = False
    ctas_phrase: str = ""


@dataclass(frozen=True)
class SchedulerPlan:
    """Whether the GPU has to be asked for its SMs, by whose number a head's maxima are shared out."""

    persistent: bool


@dataclass(frozen=True)
class SectionsPlan:
    """Section files that hold how scales are found and how tiles are stored."""

    scale: str
    store: str


@dataclass(frozen=True)
class QuantizePlan(ModulePlan):
    """Everything that the templates print for one quantisation."""

    spec: Quantize
    problem: ProblemPlan
    tile: TilePlan
    arguments: ArgumentsPlan
    words: WordsPlan
    imports: ImportsPlan
    entry: EntryPlan
    scheduler: SchedulerPlan
    sections: SectionsPlan
    lse: bool = False

    @property
    def spine(self) -> str:
        """The template of quantisations."""
        return "quantize.py.jinja"

    @property
    def templates(self) -> dict[str, str]:
        """The spine and the sections that the plan chose."""
        return {"spine": self.spine, "scale": self.sections.scale, "store": self.sections.store}

    @property
    def storage(self) -> bool:
        """Whether a CTA has shared memory."""
        return bool(self.cta.regions)

    @property
    def keeps_storage(self) -> bool:
        """Whether the kernel that writes has shared memory: a head's maximum is the other one's."""
        return self.problem.transpose or self.problem.scaled_per == "block"


def make_plan(variant: Variant, spec: Quantize) -> QuantizePlan:
    """Derive the plan of one variant."""
    described, cta, operation = describe(spec, variant.summary), cta_of(spec), operation_of(spec)
    problem, names = spec.problem, tuple(argument.name for argument in operation.arguments)
    lanes = quantizing.lanes(spec)
    return QuantizePlan(
        stem=variant.stem,
        spec=spec,
        operation=operation,
        cta=cta,
        described=described,
        header=header.make_header(described, cta, source=PurePath(variant.source), stem=variant.stem),
        expectation=expectation(spec, cta),
        problem=ProblemPlan(
            head_dim=problem.head_dim,
            cutlass_dtype=spec.element.cutlass_name,
            torch_dtype=spec.element.torch_name,
            cutlass_out=spec.out_element.cutlass_name,
            torch_out=spec.out_element.torch_name,
            rotate=problem.rotate,
            transpose=problem.transpose,
            permute=problem.permute_keys,
            scaled_per=problem.scale,
        ),
        tile=TilePlan(spec.tile.rows, spec.tile.per_sm, lanes, lanes.bit_length() - 1),
        arguments=ArgumentsPlan(
            launch=names,
            amax=tuple(name for name in names if name not in ("out", "descale")),
        ),
        words=_words(spec),
        imports=ImportsPlan(dataclasses="", pipeline=False, nvgpu="", smem_allocator=bool(cta.regions), math=False),
        entry=_entry(spec),
        scheduler=SchedulerPlan(persistent=problem.scale == "head"),
        sections=SectionsPlan(
            scale=f"sections/quantize_scale_{problem.scale}.py.jinja",
            store=f"sections/quantize_store_{'columns' if problem.transpose else 'rows'}.py.jinja",
        ),
    )


def _words(spec: Quantize) -> WordsPlan:
    bounded = quantizing.bounded(spec)
    widened = "rotate({}, rSigns)" if spec.problem.rotate else "in_float32({})"
    whole = "(seq_out, HEAD_DIM), whole units of rows; the tile begins with the one at position"
    return WordsPlan(
        values_of_rows=widened.format("load_rows(gX, first, thread % LANES)"),
        values=widened.format("rX"),
        rows="the rows at positions" if spec.problem.permute_keys else "its rows",
        row="row" if spec.problem.permute_keys else "first + i",
        columns=whole if spec.problem.permute_keys else "(seq, HEAD_DIM); the tile begins with row",
        ctas="by which registers are bounded" if bounded else "that look for maxima" * (spec.problem.scale == "head"),
        # -1: shared memory as the driver would have it by itself; else the DSL would ask a GPU how much there is.
        block="(THREADS, 1, 1)" + ", min_blocks_per_mp=CTAS_PER_SM, preferred_smem_carveout=-1" * bounded,
    )


def _entry(spec: Quantize) -> EntryPlan:
    """What a call may say by keyword, and which of its arguments are tensors."""
    optional = ["descale", "out"] if spec.problem.scale == "head" else ["out"]
    keywords = ["heads_kv"] * (len(optional) > 1) + optional
    inputs = ", ".join(f'"{tensor}": {tensor}' for tensor in operation_of(spec).inputs)
    others = " | ".join(f'({{}} if {name} is None else {{"{name}": {name}}})' for name in optional)
    return EntryPlan(", ".join(f"{name}=None" for name in keywords), f"{{{inputs}}} | {others}")


# The header


def describe(spec: Quantize, summary: str) -> Description:
    """Describe one quantisation in words; `summary` is that of its spec."""
    problem, cta, schedule = spec.problem, cta_of(spec), schedule_of(spec)
    held = ", ".join(f"{what} {count}" for what, count in cta.held)
    x, shared = "H D x / sqrt(head_dim)" if problem.rotate else "x", _shared(spec)
    return Description(
        title=f"{summary.rstrip('.')} (head dim {problem.head_dim}, {spec.element.long_name}).",
        formula=f"descale = max(|{x}|) / 448    out = {x} / descale",
        sentence=(
            f"The maximum is that of {shared}; zeros have descale 2^-100. Rounded to nearest, ties to even; NaN stay."
        ),
        decisions=tuple(_decisions(spec)),
        threads=(
            f"{cta.threads} threads, {cta.threads // hopper.WARP} warps: {quantizing.lanes(spec)} for a row, of which "
            f"each has {quantizing.vectors(spec)} x {quantizing.VECTOR} elements of "
            f"{quantizing.rows_of_thread(spec)} rows",
            f"about {sum(count for _, count in cta.held)} registers each: {held}",
        ),
        barriers=(),
        named_barriers=(),
        steps_title=f"Timeline: a CTA has {spec.tile.rows} rows of a head",
        steps=tuple(header.step_rows(schedule)),
    )


def _shared(spec: Quantize) -> str:
    """What shares a scale."""
    shared = {"head": "all heads of a group", "block": f"{spec.tile.rows} rows of a head", "token": "a row"}
    return shared[spec.problem.scale]


def _decisions(spec: Quantize) -> list[tuple[str, str]]:
    problem, rows = spec.problem, spec.tile.rows
    lanes = quantizing.lanes(spec)
    size, run = quantizing.VECTOR * spec.out_element.bytes, lanes * VECTOR_BYTES
    found = [
        ("tensors", "x: (batch, seq, heads, head_dim), any strides; out alike, " + _stored(spec)),
        ("loads", f"16 bytes of x at a time, {lanes} threads side by side: {run} bytes"),
    ]
    if problem.permute_keys:
        found.append(
            ("keys", "position 4t + j of each 16 has row 2t + j % 2 + 8 (j // 2), by which rows a thread loads")
        )
    if problem.rotate:
        found.append(("rotation", "D: random signs, as given; H: Sylvester's Hadamard matrix; sums in float32"))
    scales = {
        "head": "of a group of heads, by a kernel of its own, which reads x once more; or given, and saturating",
        "block": f"of {rows} rows, which a CTA keeps in registers: x is read once",
        "token": f"of a row, which {lanes} threads of a warp have: x is read once",
    }
    stores = f"{rows} x {problem.head_dim} turned in shared memory; 16 bytes of a column at a time"
    found += [
        ("scales", scales[problem.scale]),
        ("order", _order(spec)),
        ("output", stores if problem.transpose else f"from registers, {size} bytes of a row at a time"),
    ]
    return found


def _order(spec: Quantize) -> str:
    order = "heads of the same rows one behind the other, as they lie in x"
    return f"{order}; backwards, after the first kernel" if spec.problem.scale == "head" else order


def _stored(spec: Quantize) -> str:
    if spec.problem.permute_keys:
        return "its sequence contiguous, in whole units of 16"
    return "its sequence contiguous" if spec.problem.transpose else "its rows contiguous"


# What the compiled code must show


def expectation(spec: Quantize, cta: Cta) -> Expectation:
    """Static instruction counts; registers are those with which as many CTAs fit an SM as the spec says."""
    problem = spec.problem
    unit = hopper.REGISTER_UNIT_PER_THREAD
    share = hopper.REGISTERS_PER_SM // (cta.threads * spec.tile.per_sm) // unit * unit
    return Expectation(
        kernels=1 + (problem.scale == "head"),
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
        mma=_products(spec),
        setmaxnreg={},
        smem_bytes=cta.smem_bytes,
        max_registers=min(hopper.REGISTERS_PER_THREAD, share),
        sass=SassExpectation(
            waits=0,
            min_maxima=quantizing.values_of_thread(spec),  # of each value, where a scale is looked for
            max_comparisons=1,  # of the reciprocal, rounded to nearest, where numbers are not normal
            global_stores=_global_stores(spec),
            shared_stores=_shared_stores(spec),
        ),
    )


def _products(spec: Quantize) -> int:
    """Of 16 elements of 16 rows two mma, of which a thread has four sums each; in each kernel that rotates."""
    return quantizing.values_of_thread(spec) // 4 * (1 + (spec.problem.scale == "head")) * spec.problem.rotate


def _global_stores(spec: Quantize) -> dict[str, int]:
    """Of the output whole vectors, and at a column's end bytes; of scales, and of the maxima of parts, words."""
    rows = quantizing.rows_of_thread(spec)
    words = {"head": 2, "block": 1, "token": rows}[spec.problem.scale]
    if not spec.problem.transpose:
        return {"STG.64": rows * quantizing.vectors(spec), "STG.32": words}
    return {"STG.128": 1, **({} if spec.problem.permute_keys else {"STG.8": quantizing.UNIT}), "STG.32": words}


def _shared_stores(spec: Quantize) -> dict[str, int]:
    """Maxima of warps; words of four rows."""
    words = quantizing.values_of_thread(spec) // quantizing.WORD * spec.problem.transpose
    words += spec.problem.scale != "token"
    return {"STS.32": words} if words else {}
