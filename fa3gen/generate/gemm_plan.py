"""The plan of a GEMM module: every number, name and section that its templates print, and what its code must show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal

from fa3gen.design import gemm
from fa3gen.design.cta import cta_of
from fa3gen.design.operation import Argument, Scalar, Tensor, operation_of
from fa3gen.design.schedule import schedule_of
from fa3gen.design.tiles import layout_atom
from fa3gen.generate import gemm_header, header
from fa3gen.generate.expected import Expectation, SassExpectation
from fa3gen.generate.module_plan import ImportsPlan, ModulePlan, Named, Parameter
from fa3gen.hardware import hopper
from fa3gen.hardware.dtypes import VECTOR_BYTES
from fa3gen.spec.model import Gemm, WgmmaProduct


@dataclass(frozen=True)
class ProblemPlan:
    """The dtype of A and B as each library names it, its bytes, and elements in 16 bytes."""

    cutlass_dtype: str
    torch_dtype: str
    bytes: int
    vector: int


@dataclass(frozen=True)
class TilePlan:
    """Rows, columns and depth of a step; warpgroups that compute; tiles of a band."""

    m: int
    n: int
    k: int
    warpgroups: int
    band: int


@dataclass(frozen=True)
class OperandPlan:
    """A or B: where a product reads it, its major order, its layout atom, and its contiguous dimension in a call."""

    source: str
    registers: bool
    major: str
    layout: str
    contiguous: str


@dataclass(frozen=True)
class ProductPlan:
    """Whether the tensor core multiplies, and the depth of its instruction; threads down the tile otherwise.

    `rows_phrase` says which rows a warpgroup owns.
    """

    wgmma: bool
    eight_bit: bool = False
    two_levels: bool = False
    depth: int = 0
    lanes_m: int = 0
    rows_phrase: str = ""


@dataclass(frozen=True)
class OutputPlan:
    """C and D: dtype, in the module's names where it is one of its own, and how a warp stores D; `rounded` to 16 bits.

    `chunk`: columns at a time; `stored`: what one TMA copy stores, as the module names it.
    """

    own_dtype: bool
    rounded: bool
    adds_c: bool
    dtype_name: str
    torch_name: str
    cutlass_dtype: str
    torch_dtype: str
    bytes: int
    vector: int
    layout: str
    chunk: int
    buffers: int
    stored: str
    epilogue_phrase: str


@dataclass(frozen=True)
class SchedulePlan:
    """Who loads and who computes; registers are per thread after setmaxnreg, 0 without it."""

    specialized: bool
    producer_registers: int
    consumer_registers: int


@dataclass(frozen=True)
class LoadPlan:
    """Depth of the ring."""

    engine: str
    stages: int


@dataclass(frozen=True)
class SchedulerPlan:
    """Whether a CTA takes tile after tile."""

    kind: str
    persistent: bool


@dataclass(frozen=True)
class ArgumentsPlan:
    """Names of what functions take.

    `launch`: the launch; `tensors`: the kernel, without its TMA atoms, which the launch has as `launched`; `outputs`: a
    consumer, for what it writes.
    """

    launch: tuple[Parameter, ...]
    launched: tuple[str, ...]
    tensors: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Fake:
    """A tensor of unknown sizes that a module is compiled for; with its dtype, where that is not that of the others.

    One with any strides has a stand-in of its own, which has its name.
    """

    tensor: Tensor
    dtype: str = ""

    def __str__(self) -> str:
        """`fake(m, k, 1)`: sizes and the contiguous dimension."""
        contiguous = self.tensor.layout.contiguous
        if contiguous is None:
            return self.tensor.name
        return f"fake({', '.join([*map(str, self.tensor.dims), str(contiguous), *[self.dtype] * bool(self.dtype)])})"


@dataclass(frozen=True)
class Matched:
    """A tensor of a call beside the sizes and the dtype that it needs."""

    tensor: Tensor
    dtype: str

    def __str__(self) -> str:
        """`("a", a, ((m, k), TORCH_DTYPE))`."""
        return f'("{self.tensor}", {self.tensor}, (({", ".join(map(str, self.tensor.dims))}), {self.dtype}))'


@dataclass(frozen=True)
class NeedsGrad:
    """Whether a tensor of a call needs a gradient, as the module asks it."""

    tensor: Tensor

    def __str__(self) -> str:
        """`a.requires_grad`."""
        return f"{self.tensor}.requires_grad"


@dataclass(frozen=True)
class EntryPlan:
    """Arguments of the Python entry points; `stand_ins` are all of the launch's when the module is compiled."""

    stand_ins: tuple[Fake | Argument, ...]
    named: tuple[Named, ...]
    matched: tuple[Matched, ...]
    needs_grad: tuple[NeedsGrad, ...]
    given: tuple[str, ...]
    keeps_scratch: bool = False
    ctas_phrase: str = ", each of which gets one CTA"


@dataclass(frozen=True)
class SectionsPlan:
    """Which template file fills each section of the spine."""

    host: str
    kernel: str
    work: str
    loads: str
    product: str
    epilogue: str


@dataclass(frozen=True)
class GemmPlan(ModulePlan):
    """Everything that the templates print for one module."""

    spec: Gemm
    problem: ProblemPlan
    tile: TilePlan
    load: LoadPlan
    a: OperandPlan
    b: OperandPlan
    product: ProductPlan
    output: OutputPlan
    schedule: SchedulePlan
    scheduler: SchedulerPlan
    arguments: ArgumentsPlan
    imports: ImportsPlan
    entry: EntryPlan
    sections: SectionsPlan
    lse: bool = False

    @property
    def spine(self) -> str:
        """The template of all GEMM kernels."""
        return "gemm.py.jinja"

    @property
    def templates(self) -> dict[str, str]:
        """The section files that the plan chose, by what they are for."""
        return {**super().templates, **vars(self.sections)}


def make_plan(stem: str, spec: Gemm, *, summary: str, source: PurePath) -> GemmPlan:
    """Derive the plan of a checked spec."""
    specialized, element, tile = gemm.specialized(spec), spec.element, spec.tile
    budget = gemm.register_budget(spec) if specialized else (0, 0)
    described, cta = gemm_header.describe(spec, summary), cta_of(spec)
    return GemmPlan(
        stem=stem,
        spec=spec,
        problem=ProblemPlan(element.cutlass_name, element.torch_name, element.bytes, gemm.vector(spec)),
        tile=TilePlan(tile.m, tile.n, tile.k, tile.warpgroups or 0, tile.band),
        load=LoadPlan(spec.load.engine, spec.load.stages),
        a=_operand(spec, "a"),
        b=_operand(spec, "b"),
        product=_product(spec),
        output=_output(spec),
        schedule=SchedulePlan(specialized, *budget),
        scheduler=SchedulerPlan("static" if specialized else "single_tile", specialized),
        arguments=_arguments(spec),
        imports=_imports(spec),
        entry=_entry(spec),
        sections=_sections(spec),
        cta=cta,
        described=described,
        header=header.make_header(described, cta, source=source, stem=stem),
        expectation=expectation(spec),
        operation=operation_of(spec),
    )


def _operand(spec: Gemm, name: Literal["a", "b"]) -> OperandPlan:
    tensor, which = operation_of(spec).tensor(name), "ab".index(name)
    major = gemm.majors(spec)[which]
    swizzle = "none" if spec.smem is None else (spec.smem.a, spec.smem.b)[which]
    registers = name == "a" and gemm.a_in_registers(spec)
    assert tensor.layout.contiguous is not None
    return OperandPlan(
        source="RMEM" if registers else "SMEM",
        registers=registers,
        major=major.upper(),
        layout=layout_atom(major, swizzle),
        contiguous=str(tensor.dims[tensor.layout.contiguous]),
    )


def _product(spec: Gemm) -> ProductPlan:
    if not isinstance(spec.product, WgmmaProduct):
        across = spec.tile.n // gemm.vector(spec)
        return ProductPlan(False, lanes_m=gemm.computing_threads(spec) // across)
    rows = spec.tile.m // (spec.tile.warpgroups or 1)
    times = rows // hopper.WGMMA_M
    phrase = f"{rows} rows of D" + f", {hopper.WGMMA_M} in each of {times} products" * (times > 1)
    eight_bit = spec.element.bytes < hopper.BYTES_16BIT
    return ProductPlan(True, eight_bit, gemm.two_levels(spec), depth=spec.element.wgmma_k, rows_phrase=phrase)


def _output(spec: Gemm) -> OutputPlan:
    element, own = spec.d_element, spec.d_dtype != spec.problem.dtype
    specialized = gemm.specialized(spec)
    rounded = "Round D to 16 bits; each" if element.bytes == hopper.BYTES_16BIT else "Each"
    phrase = f"{rounded} warp gathers its rows, CHUNK_N columns at a time, and has TMA write those that exist."
    if spec.d.add_c:
        phrase = "Add C; each warp gathers its rows, CHUNK_N columns at a time, and has TMA write those that exist."
    return OutputPlan(
        own_dtype=own,
        rounded=element.bytes == hopper.BYTES_16BIT,
        adds_c=spec.d.add_c,
        dtype_name="OUT_DTYPE" if own else "DTYPE",
        torch_name="TORCH_OUT_DTYPE" if own else "TORCH_DTYPE",
        cutlass_dtype=element.cutlass_name,
        torch_dtype=element.torch_name,
        bytes=element.bytes,
        vector=operation_of(spec).output.vector,
        layout=layout_atom("k", "none" if spec.smem is None else spec.smem.d),
        chunk=gemm.chunk_columns(spec),
        buffers=gemm.CHUNK_BUFFERS,
        stored="(WARP_ROWS, CHUNK_N)" if specialized else "(TILE_M, TILE_N)",
        epilogue_phrase=phrase,
    )


def _arguments(spec: Gemm) -> ArgumentsPlan:
    launch = (
        Parameter(each.name, each.dtype if isinstance(each, Scalar) else None) for each in operation_of(spec).arguments
    )
    c = ["mC"] * spec.d.add_c
    return ArgumentsPlan(
        tuple(launch), ("mA", "mB", *["c"] * spec.d.add_c, "mD"), ("mA", "mB", *c, "mD"), (*c, "tma_D", "mD")
    )


def _imports(spec: Gemm) -> ImportsPlan:
    wgmma, specialized = isinstance(spec.product, WgmmaProduct), gemm.specialized(spec)
    rounded = spec.d_element.bytes == hopper.BYTES_16BIT
    names = {
        "OperandMajorMode": wgmma,
        "cpasync": wgmma,
        "warp": wgmma and (rounded or gemm.a_in_registers(spec)),
        "warpgroup": wgmma,
    }
    return ImportsPlan(
        dataclasses="dataclass" if specialized else "",
        pipeline=wgmma,
        nvgpu=", ".join(name for name, needed in names.items() if needed),
        smem_allocator=True,
        math=False,
    )


def _entry(spec: Gemm) -> EntryPlan:
    operation, own = operation_of(spec), spec.d_dtype != spec.problem.dtype
    stored = operation.output.moved == "tma"  # which writes whole 16 bytes, not always to what the caller gave
    tensors = operation.tensors
    return EntryPlan(
        stand_ins=tuple(
            Fake(each, "OUT_DTYPE" * (own and each.dtype == spec.d_element)) if isinstance(each, Tensor) else each
            for each in operation.arguments
        ),
        named=tuple(Named(each) for each in tensors),
        matched=tuple(
            Matched(each, "TORCH_OUT_DTYPE" if own and each.dtype == spec.d_element else "TORCH_DTYPE")
            for each in tensors
        ),
        needs_grad=tuple(map(NeedsGrad, operation.inputs)),
        given=tuple("stored" if stored and each == operation.output else each.name for each in operation.arguments),
    )


def _sections(spec: Gemm) -> SectionsPlan:
    if not isinstance(spec.product, WgmmaProduct):
        names = ("host_scalar", "kernel_cp_async", "tiles", "loads_cp_async", "product_scalar", "epilogue_scalar")
    elif not gemm.specialized(spec):
        names = ("host_tma", "kernel_cooperative", "tiles", "loads_cooperative", "product", "epilogue_cooperative")
    else:
        names = ("host_tma", "kernel_specialized", "work", "loads_specialized", "product", "epilogue_chunks")
    return SectionsPlan(*(f"sections/gemm_{name}.py.jinja" for name in names))


def expectation(spec: Gemm) -> Expectation:
    """What the compiled code must show, as static instruction counts; the schedule says which steps there are."""
    schedule, cta = schedule_of(spec), cta_of(spec)
    products, waits = schedule.count("product", "D"), schedule.count("wait_products")
    bytes_of = dict(zip("AB", gemm.stage_bytes(spec), strict=True))
    copied = sum(schedule.count("load", what) * size for what, size in bytes_of.items())
    base = Expectation(
        kernels=operation_of(spec).kernels,
        wgmma={},
        wgmma_commits=0,
        wgmma_waits=waits,
        tma_loads=0,
        tma_stores=0,
        cp_async=copied // VECTOR_BYTES // cta.threads,
        mbarrier_inits=sum(ring.mbarriers for ring in schedule.rings),
        mbarrier_expect_tx=0,
        ldmatrix=0,
        stmatrix=0,
        setmaxnreg={},
        smem_bytes=cta.smem_bytes,
        max_registers=min(hopper.REGISTERS_PER_THREAD, hopper.REGISTERS_PER_SM // cta.threads),
    )
    if not isinstance(spec.product, WgmmaProduct):
        # A thread stores a whole vector of each of its rows, or element by element at the end of the columns.
        rows, vector = spec.tile.m * spec.tile.n // (cta.threads * gemm.vector(spec)), gemm.vector(spec)
        stores = {f"STG.{8 * VECTOR_BYTES}": rows, f"STG.{spec.d_element.bits}": rows * vector}
        return replace(
            base,
            sass=SassExpectation(waits=waits, min_maxima=0, max_comparisons=0, global_stores=stores, shared_stores={}),
        )
    return replace(base, cp_async=0, wgmma_commits=products, **_wgmma_expectation(spec, spec.product, products))


def _wgmma_expectation(spec: Gemm, product: WgmmaProduct, products: int) -> dict[str, Any]:
    """The fields that WGMMA and TMA fill."""
    schedule, tile, depth = schedule_of(spec), spec.tile, spec.element.wgmma_k
    assert spec.smem is not None
    times = tile.m // ((tile.warpgroups or 1) * hopper.WGMMA_M)  # products of 64 rows of a warpgroup in each step
    boxes = {
        "A": gemm.operand_boxes(tile.m, tile.k, product.a.major, spec.element.bytes, spec.smem.a),
        "B": gemm.operand_boxes(tile.n, tile.k, product.b.major, spec.element.bytes, spec.smem.b),
    }
    columns, pieces = (gemm.chunk_columns(spec), gemm.chunks(spec)) if gemm.specialized(spec) else (tile.n, 1)
    tma_stores = pieces * gemm.operand_boxes(0, columns, "k", spec.d_element.bytes, spec.smem.d)
    stored = pieces * columns * (1 if gemm.specialized(spec) else times)  # columns of 16 rows of a warp
    rounded = spec.d_element.bytes == hopper.BYTES_16BIT
    stmatrix = stored // gemm.STMATRIX_COLUMNS if rounded else 0
    # Of float32 a thread has two adjacent columns of two rows in every 8 columns of 16 rows.
    shared_stores = {"STSM.4": stmatrix} if rounded else {"STS.64": stored // 4}
    found = {
        "wgmma": {(hopper.WGMMA_M, tile.n, depth, product.a.source): products * times * (tile.k // depth)},
        "tma_loads": sum(schedule.count("load", what) * count for what, count in boxes.items()),
        "tma_stores": tma_stores,
        "mbarrier_expect_tx": schedule.count("wait_empty"),
        "ldmatrix": schedule.count("read", "A") * times * tile.k // gemm.STMATRIX_COLUMNS,
        "stmatrix": stmatrix,
        "sass": SassExpectation(
            waits=schedule.count("wait_products"),
            min_maxima=0,
            max_comparisons=0,
            global_stores={"UTMASTG": tma_stores},
            shared_stores=shared_stores,
        ),
    }
    if gemm.specialized(spec):
        producer, consumer = gemm.register_budget(spec)
        # ptxas reports what the launch hands out, not what setmaxnreg makes of it.
        found["setmaxnreg"] = {f"dec {producer}": 1, f"inc {consumer}": 1}
        found["max_registers"] = cta_of(spec).registers
    return found
