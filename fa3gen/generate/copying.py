"""The plan of a copy: every number, name and section that its templates print, its header, and what its code must show.

Extents are written as the module writes them: `d0` is a variable of a call, `ROW` a constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from fa3gen.design import boxes
from fa3gen.design.cta import Cta, cta_of
from fa3gen.design.operation import Argument, Scalar, operation_of
from fa3gen.design.schedule import schedule_of
from fa3gen.generate import header
from fa3gen.generate.expected import Expectation, SassExpectation
from fa3gen.generate.header import Description
from fa3gen.generate.module_plan import ImportsPlan, ModulePlan, Parameter
from fa3gen.hardware import hopper
from fa3gen.hardware.dtypes import INT32
from fa3gen.spec.model import Copy
from fa3gen.spec.specfile import Variant


@dataclass(frozen=True)
class ProblemPlan:
    """Elements of a row, the dtype as each library names it, its bytes, elements that are aligned.

    `dims` are the names of all dimensions but the row, `strides` those of their strides, `compact` what these are in a
    tensor without gaps, and `empty` is true of a tensor without elements.
    """

    row: int
    cutlass_dtype: str
    torch_dtype: str
    bytes: int
    vector: int
    outer: int
    dims: tuple[str, ...]
    strides: tuple[str, ...]
    compact: tuple[str, ...]
    empty: str


@dataclass(frozen=True)
class BoxPlan:
    """The box of one TMA copy, `count` of which lie side by side in a tile, and how tensors are seen through it.

    `extents` are those of the tensor map's dimensions, of which there are `rank`. `view` are the dimensions that it
    sees, `view_shape` and `view_strides` their extents and strides, `modes` the tensor's in their order. `whole` picks
    all boxes along a dimension of the view (None) or the first one (0), `rest` are the dimensions of boxes that remain.
    """

    extents: tuple[int, ...]
    factors: tuple[int, ...]
    count: int
    rows: int
    rank: int
    packed: bool
    folded: bool
    swizzle_bits: int
    swizzle_note: str
    tiles: tuple[str, ...]
    view: tuple[str, ...]
    view_shape: tuple[str, ...]
    view_strides: tuple[str, ...]
    modes: tuple[int, ...]
    whole: tuple[str, ...]
    rest: str
    many: bool
    first_tile_mode: int
    last_tile_mode: int
    offset: tuple[str, ...]
    shared_shape: str
    shared_modes: str
    partition_shapes: str
    every: str


@dataclass(frozen=True)
class RingPlan:
    """Stages, how many of them stores may still be reading when a load is issued, and CTAs that share an SM.

    Without `many` a CTA has one tile, and nothing else holds.
    """

    many: bool
    stages: int
    reading: int
    ctas_per_sm: int


@dataclass(frozen=True)
class ArgumentsPlan:
    """What functions take.

    Of a ring: where tiles lie that are loaded ahead, that is stored, and that takes the place of one that was.
    """

    launch: tuple[Parameter, ...]
    kernel: tuple[str, ...]
    ahead: str
    stored: str
    upcoming: str


@dataclass(frozen=True)
class EntryPlan:
    """Arguments and words of the Python entry points: stand-ins to compile for, and what a launch is given.

    `ranked` are the tensors that a caller may give, with their names and numbers of dimensions.
    """

    ranked: tuple[str, ...]
    stand_ins: tuple[str, ...]
    given: tuple[str, ...]
    keeps_scratch: bool = False
    ctas_phrase: str = ""


@dataclass(frozen=True)
class SchedulerPlan:
    """Whether tiles are dealt out to as many CTAs as fill the GPU, which then has to be asked for its SMs."""

    persistent: bool


@dataclass(frozen=True)
class SectionsPlan:
    """Which template file fills each section of the spine."""

    spine: str
    kernel: str
    tiles: str


@dataclass(frozen=True)
class CopyPlan(ModulePlan):
    """Everything that the templates print for one copy."""

    spec: Copy
    problem: ProblemPlan
    box: BoxPlan
    ring: RingPlan
    arguments: ArgumentsPlan
    imports: ImportsPlan
    entry: EntryPlan
    sections: SectionsPlan
    scheduler: SchedulerPlan
    lse: bool = False

    @property
    def spine(self) -> str:
        """The template of copies."""
        return self.sections.spine

    @property
    def templates(self) -> dict[str, str]:
        """The section files that the plan chose, by what they are for."""
        return vars(self.sections)


def make_plan(variant: Variant, spec: Copy) -> CopyPlan:
    """Derive the plan of one variant."""
    described, cta, operation = describe(spec, variant.summary), cta_of(spec), operation_of(spec)
    layout = "packed" if boxes.packed(spec) else "dense"
    return CopyPlan(
        stem=variant.stem,
        spec=spec,
        operation=operation,
        cta=cta,
        described=described,
        header=header.make_header(described, cta, source=PurePath(variant.source), stem=variant.stem),
        expectation=expectation(spec, cta),
        problem=_problem(spec),
        box=_box(spec),
        ring=_ring(spec),
        arguments=_arguments(spec, operation.arguments),
        imports=ImportsPlan(
            dataclasses="", pipeline=spec.ring is not None, nvgpu="cpasync", smem_allocator=True, math=False
        ),
        entry=EntryPlan(
            ranked=tuple(f'("{tensor}", {tensor}, {len(tensor.dims)})' for tensor in operation.given),
            stand_ins=tuple(_stand_in(argument) for argument in operation.arguments),
            given=tuple(argument.name for argument in operation.arguments),
        ),
        sections=SectionsPlan(
            "copy.py.jinja",
            f"sections/copy_kernel_{'tile' if spec.ring is None else 'ring'}.py.jinja",
            f"sections/copy_tiles_{layout}.py.jinja",
        ),
        scheduler=SchedulerPlan(persistent=spec.ring is not None),
    )


def _ring(spec: Copy) -> RingPlan:
    if spec.ring is None:
        return RingPlan(many=False, stages=1, reading=0, ctas_per_sm=0)
    return RingPlan(many=True, stages=spec.ring.stages, reading=spec.ring.reading, ctas_per_sm=spec.ring.ctas_per_sm)


def _names(spec: Copy) -> tuple[str, ...]:
    """All dimensions but the row."""
    return tuple(str(extent) for extent in operation_of(spec).tensor("x").dims[:-1])


def _problem(spec: Copy) -> ProblemPlan:
    dims, dtype = _names(spec), spec.element
    return ProblemPlan(
        row=spec.problem.row,
        cutlass_dtype=dtype.cutlass_name,
        torch_dtype=dtype.torch_name,
        bytes=dtype.bytes,
        vector=operation_of(spec).tensor("x").vector,
        outer=len(dims),
        dims=dims,
        strides=tuple(f"stride_{name}" for name in dims),
        compact=tuple(" * ".join([*dims[place + 1 :], "ROW"]) for place in range(len(dims))) + ("1",),
        empty=_empty(spec, dims),
    )


def _empty(spec: Copy, dims: tuple[str, ...]) -> str:
    if boxes.packed(spec):
        return "not total or ends < 2"
    return f"not {dims[0]}" if len(dims) == 1 else f"not ({' and '.join(dims)})"


def _box(spec: Copy) -> BoxPlan:
    folded, packed, dims = boxes.folded(spec), boxes.packed(spec), _names(spec)
    extents, count = boxes.tma_box(spec), boxes.boxes(spec)
    inward = dims[::-1]
    outer = ("FAR",) if packed else inward
    far = ("total + 1", "FAR + 1") if packed else ()
    strides = tuple(f"stride_{name}" for name in inward)
    view = ("span" if folded else "ROW", *outer, *["spans"] * folded, *far)
    first_tile_mode = 2 - folded
    tile = tuple("0" if packed else "None" for _ in outer)
    rest = ", ".join([*["BOXES"] * (not folded), *[f"tiles of {name}" for name in inward] * (not packed)])
    moved = ("TMA", *["BOXES"] * (not folded))
    stages = ["STAGES"] * (spec.ring is not None)
    return BoxPlan(
        extents=extents,
        factors=extents[: len(extents) - len(far)],
        count=count,
        rows=spec.box.extents[0],
        rank=len(extents),
        packed=packed,
        folded=folded,
        swizzle_bits=hopper.SWIZZLE_BITS[spec.box.swizzle],
        swizzle_note=_swizzle_note(spec),
        tiles=tuple(
            f"cute.ceil_div(cute.size(x, mode=[{place}]), BOX[{len(dims) - place}])" for place in range(len(dims))
        ),
        view=view,
        view_shape=("BOX[0]" if folded else "ROW", *outer, *["ROW // BOX[0]"] * folded, *far),
        view_strides=("1", *strides, *["BOX[0]"] * folded, *(*strides, "back") * packed),
        modes=tuple(range(len(dims), -1, -1)),
        whole=("0" if folded else "None", *tile, *["0"] * folded, *["0" for _ in far]),
        rest=rest,
        many=len(dims) > 1,
        first_tile_mode=first_tile_mode,
        last_tile_mode=first_tile_mode + len(dims),
        offset=("0", "FAR - rows", *["0"] * folded, "first + rows", "FAR"),
        shared_shape=f"({', '.join(['*BOX', *moved[1:], *stages])})",
        shared_modes=f"({', '.join(['*BOX', *moved[1:], *stages])})" if moved[1:] or stages else "BOX",
        partition_shapes=f"({', '.join([*moved, *stages])}), ({', '.join(moved)})",
        every=", ".join(["None"] * len(moved)),
    )


def _swizzle_note(spec: Copy) -> str:
    bits = hopper.SWIZZLE_BITS[spec.box.swizzle]
    if not bits:
        return "none: units lie as they are numbered"
    return f"{spec.box.swizzle}: {bits} bit{'s' * (bits > 1)} of a unit's place, XORed with those of its 128-byte line"


def _arguments(spec: Copy, arguments: tuple[Argument, ...]) -> ArgumentsPlan:
    numbers = ("offsets",) if boxes.packed(spec) else ()
    counted = () if spec.ring is None or boxes.packed(spec) else ("num_tiles",)
    return ArgumentsPlan(
        launch=tuple(_parameter(argument) for argument in arguments),
        kernel=("mX", "mO", *numbers, *counted, "tma_load", "tma_store"),
        ahead=_place("first + i * num_ctas", spec),
        stored=_place("tile", spec),
        upcoming=_place("upcoming", spec),
    )


def _place(number: str, spec: Copy) -> str:
    """Where the tile with a number lies: of packed sequences that is looked for."""
    return f"tile_rows(offsets, {number})" if boxes.packed(spec) else number


def _parameter(argument: Argument) -> Parameter:
    return Parameter(argument.name, argument.dtype if isinstance(argument, Scalar) else None)


def _stand_in(argument: Argument) -> str:
    """What a module is compiled for: a tensor of any size, or any number."""
    if isinstance(argument, Scalar):
        return str(argument)
    return argument.name if argument.dtype == INT32 else "fake()"


# The header


def describe(spec: Copy, summary: str) -> Description:
    """Describe one copy in words; `summary` is that of its spec."""
    schedule, cta = schedule_of(spec), cta_of(spec)
    held = ", ".join(f"{what} {count}" for what, count in cta.held)
    packed = ", packed" if boxes.packed(spec) else ""
    return Description(
        title=f"{summary.rstrip('.')} (rows of {spec.problem.row}, {spec.element.long_name}{packed}).",
        formula="out = x, bit for bit",
        sentence=_sentence(spec),
        decisions=tuple(_decisions(spec)),
        threads=(
            f"{cta.threads} threads, 1 warp: an elected lane announces bytes and issues copies",
            f"about {sum(count for _, count in cta.held)} registers each: {held}",
        ),
        barriers=tuple(header.barriers(schedule)),
        named_barriers=(),
        steps_title="Timeline" if spec.ring is None else "Timeline: a step takes one tile",
        steps=tuple(header.step_rows(schedule)),
    )


def _sentence(spec: Copy) -> str:
    if boxes.packed(spec):
        return "Sequence i are the rows of x from offsets[i] to offsets[i + 1] - 1; its tiles touch no others."
    return "Dimensions in any order, with any strides of 16-byte multiples; only rows are contiguous."


def _decisions(spec: Copy) -> list[tuple[str, str]]:
    size, extents = spec.element.bytes, spec.box.extents
    shape = " x ".join(map(str, extents))
    x = operation_of(spec).tensor("x")
    count = boxes.boxes(spec)
    beside = f"{count} boxes side by side, " if count > 1 else "one box, "
    tma = " x ".join(map(str, boxes.tma_box(spec)))
    moved = f"one copy each way, by a box of {tma}" if boxes.folded(spec) else f"{boxes.copies(spec)} each way"
    ends = "of a sequence" if boxes.packed(spec) else "of a dimension"
    return [
        ("tensors", f"x and out: ({', '.join([*_names(spec), str(x.row)])})"),
        ("tile", f"whole rows: {beside}{boxes.tile_bytes(spec)} bytes"),
        (
            "box",
            f"{shape} elements, {extents[-1]} x {size} = {extents[-1] * size} bytes a row; swizzle {spec.box.swizzle}",
        ),
        ("copies", f"TMA; {moved}"),
        ("ends", f"TMA cuts boxes at the end {ends}: it loads zeros and stores nothing there"),
        ("order", _order_sentence(spec)),
    ]


def _order_sentence(spec: Copy) -> str:
    ring = spec.ring
    if ring is None:
        return "a CTA for each tile, as many on an SM as their tiles fit"
    who = "a CTA" if ring.ctas_per_sm == 1 else f"{ring.ctas_per_sm} CTAs"
    ahead = ring.stages - ring.reading
    tiles = "1 tile" if ahead == 1 else f"{ahead} tiles"
    return (
        f"{who} on each SM, dealt tiles in turn; a ring of {header.stages(ring.stages)}, loads {tiles} ahead of stores"
    )


# What the compiled code must show


def expectation(spec: Copy, cta: Cta) -> Expectation:
    """Static instruction counts: with a ring a tile is loaded at two places, and stored at one."""
    schedule, copies = schedule_of(spec), boxes.copies(spec)
    return Expectation(
        kernels=1,
        wgmma={},
        wgmma_commits=0,
        wgmma_waits=0,
        tma_loads=schedule.count("load", "x") * copies,
        tma_stores=schedule.count("store", "out") * copies,
        cp_async=0,
        mbarrier_inits=sum(ring.mbarriers for ring in schedule.rings),
        mbarrier_expect_tx=schedule.count("announce"),
        ldmatrix=0,
        stmatrix=0,
        setmaxnreg={},
        smem_bytes=cta.smem_bytes,
        max_registers=hopper.REGISTERS_PER_THREAD,
        sass=SassExpectation(
            waits=0, min_maxima=0, max_comparisons=0, global_stores={"UTMASTG": copies}, shared_stores={}
        ),
    )
