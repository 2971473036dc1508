"""The plan: every number, name and section that a template prints, derived once from a checked spec.

Templates decide nothing that stands here. A plan is frozen and complete: rendering is a function of the plan alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import PurePath

from fa3gen.design import footprint, tile_order
from fa3gen.design.footprint import Region
from fa3gen.design.operation import Argument, Scratch, operation_of
from fa3gen.generate import header, predicted_sass
from fa3gen.generate.expected import Expectation
from fa3gen.hardware import hopper
from fa3gen.spec.model import (
    CausalMask,
    CpAsyncLoad,
    PingPongSchedule,
    SmemHandoff,
    Spec,
    Swizzle,
    TmaLoad,
    WgmmaProduct,
    WindowMask,
)
from fa3gen.spec.specfile import Variant


@dataclass(frozen=True)
class ProblemPlan:
    """Head dims, what v's is called in the module, the dtype as each library names it, elements that are aligned."""

    head_dim: int
    v_dim: int
    v_dim_name: str
    asymmetric: bool
    dtype: str
    cutlass_dtype: str
    torch_dtype: str
    vector: int


@dataclass(frozen=True)
class TilePlan:
    """Rows of Q (m) and of K and V (n) per step; threads per CTA; warpgroups that compute; query heads per tile.

    `rows` and `positions` are the module's names for the rows of Q as TMA moves them and for the positions they hold.
    """

    m: int
    n: int
    threads: int
    warpgroups: int
    pack_heads: int
    packed: bool
    rows: str
    positions: str


@dataclass(frozen=True)
class MaskPlan:
    """Which keys a row sees; left and right are the window's reach in keys, 0 for other masks."""

    kind: str
    left: int
    right: int


@dataclass(frozen=True)
class WalkPlan:
    """What the roles of a specialised kernel are told of the tiles of keys to visit, and what comes back: names.

    `row_results` says in words what a consumer returns of each row. All are empty without roles. In a persistent kernel
    the roles walk by themselves: there are `consume_arguments`, all of them, and `turn_argument`, which follows others;
    `extent_argument` says how much work there is.
    """

    producer_argument: str = ""
    consumer_arguments: tuple[str, ...] = ()
    consumer_results: tuple[str, ...] = ()
    row_results: str = ""
    launch_arguments: tuple[str, ...] = ()
    kernel_arguments: tuple[str, ...] = ()
    consume_arguments: tuple[str, ...] = ()
    extent_argument: str = ""
    extent_parameter: str = ""
    turn_argument: str = ""
    last_product: str = ""


@dataclass(frozen=True)
class LoadPlan:
    """How tiles come from global to shared memory."""

    engine: str
    q_stages: int
    kv_stages: int
    barrier: str


@dataclass(frozen=True)
class SmemPlan:
    """Shared memory of one CTA, and the CuTe names of the operands' layout atoms (major order and swizzle)."""

    regions: tuple[Region, ...]
    barrier_bytes: int
    total_bytes: int
    q_layout: str
    k_layout: str
    v_layout: str
    p_layout: str


@dataclass(frozen=True)
class ProductPlan:
    """One of the two products; m, n, k of its WGMMA instruction and how many of them one step issues."""

    engine: str
    a_source: str
    instruction: tuple[int, int, int]
    steps: int


@dataclass(frozen=True)
class HandoffPlan:
    """How P gets from the first product to the second."""

    through: str


@dataclass(frozen=True)
class TilesPlan:
    """How tiles of queries are given to CTAs.

    `split`: the last wave of tiles is dealt out by tiles of keys, in at most `parts` parts of a tile of queries, where
    that saves at least `steps_saved` of them.
    """

    persistent: bool
    dynamic: bool
    split: bool = False
    parts: int = tile_order.PARTS
    steps_saved: int = tile_order.STEPS_SAVED


@dataclass(frozen=True)
class SoftmaxPlan:
    """Whether O is rescaled only now and then: when a maximum has grown by more than 2^rescale_above.

    `exp_before_wait`: exponentials of a thread that stay before the wait for P V, 0 for as many as ptxas likes.
    """

    lazy: bool
    rescale_above: int
    exp_before_wait: int = 0


@dataclass(frozen=True)
class OutputPlan:
    """Whether O has a buffer of its own in shared memory, and whether a dtype of its own.

    The names are those of its dtype in the module, for CuTe and for torch; `needed_name` is that of the dtype which a
    check asks of any tensor of a call.
    """

    buffered: bool
    layout_phrase: str
    own_dtype: bool
    cutlass_name: str
    torch_name: str
    needed_name: str


@dataclass(frozen=True)
class SchedulePlan:
    """Who loads and who computes; registers are per thread after setmaxnreg, 0 without it.

    `flattened`: the loop over tiles of keys runs on from one tile of queries to the next.
    """

    specialized: bool
    overlap: bool
    flattened: bool
    ping_pong: bool
    producer_registers: int
    consumer_registers: int


@dataclass(frozen=True)
class ImportsPlan:
    """Which optional imports the module needs."""

    pipeline: bool
    nvgpu: str
    smem_allocator: bool


@dataclass(frozen=True)
class EntryPlan:
    """Words and arguments of the Python entry points.

    `stand_ins` are what follows q, k, v and out in a launch, as the module is compiled for it. `given` are the names of
    what `attention` has at hand when it launches: all but the scratch that outlives a call, and the scale.
    """

    stand_ins: tuple[Argument, ...]
    given: tuple[str, ...]
    mask_phrase: str
    output_phrase: str
    heads_phrase: str


@dataclass(frozen=True)
class SectionsPlan:
    """Which template file fills each section of the spine."""

    spine: str
    kernel: str
    range: str
    loads: str
    consumer: str
    work: str
    qk: str
    mask: str
    softmax: str
    pv: str
    epilogue: str
    host: str


@dataclass(frozen=True)
class Plan:
    """Everything that the templates print for one module."""

    stem: str
    spec: Spec
    problem: ProblemPlan
    tile: TilePlan
    mask: MaskPlan
    walk: WalkPlan
    load: LoadPlan
    smem: SmemPlan
    qk: ProductPlan
    pv: ProductPlan
    p: HandoffPlan
    schedule: SchedulePlan
    tiles: TilesPlan
    softmax: SoftmaxPlan
    output: OutputPlan
    lse: bool
    imports: ImportsPlan
    entry: EntryPlan
    sections: SectionsPlan
    header: header.Header
    expectation: Expectation


def make_plan(variant: Variant) -> Plan:
    """Derive the plan of one variant; its spec has passed `fa3gen.design.rules.check`."""
    spec = variant.spec
    return Plan(
        stem=variant.stem,
        spec=spec,
        problem=_problem(spec),
        tile=_tile(spec),
        mask=_mask(spec),
        walk=_walk(spec),
        load=_load(spec),
        smem=_smem(spec),
        qk=_product(spec.qk, spec.tile.kv, spec.problem.head_dim),
        pv=_product(spec.pv, spec.problem.v_dim, spec.tile.kv),
        p=HandoffPlan(spec.handoff.through),
        schedule=_schedule(spec),
        tiles=_tiles(spec),
        softmax=_softmax(spec),
        output=_output(spec),
        lse=spec.outputs.lse,
        imports=_imports(spec),
        entry=_entry(spec),
        sections=_sections(spec),
        header=header.make_header(spec, summary=variant.summary, source=PurePath(variant.source)),
        expectation=expectation(spec),
    )


def _problem(spec: Spec) -> ProblemPlan:
    dtype = spec.element
    d, v_dim = spec.problem.head_dim, spec.problem.v_dim
    return ProblemPlan(
        head_dim=d,
        v_dim=v_dim,
        v_dim_name="HEAD_DIM" if v_dim == d else "HEAD_DIM_V",
        asymmetric=v_dim != d,
        dtype=spec.problem.dtype,
        cutlass_dtype=dtype.cutlass_name,
        torch_dtype=dtype.torch_name,
        vector=operation_of(spec).tensor("q").vector,
    )


def _tile(spec: Spec) -> TilePlan:
    packed = spec.tile.pack_heads > 1
    return TilePlan(
        m=spec.tile.q,
        n=spec.tile.kv,
        threads=footprint.threads(spec),
        warpgroups=spec.tile.warpgroups or 0,
        pack_heads=spec.tile.pack_heads,
        packed=packed,
        rows="PACKED_M" if packed else "TILE_M",
        positions="POSITIONS" if packed else "TILE_M",
    )


def _mask(spec: Spec) -> MaskPlan:
    if isinstance(spec.mask, WindowMask):
        return MaskPlan("window", spec.mask.left, spec.mask.right)
    return MaskPlan(spec.mask.kind, 0, 0)


def _walk(spec: Spec) -> WalkPlan:
    if not footprint.specialized(spec):
        return WalkPlan()
    if footprint.persistent(spec):
        return _persistent_walk(spec)
    producer = "n_block_end"
    consumer: tuple[str, ...] = ("n_block_end", "n_full_end", "seq_k")
    if isinstance(spec.mask, WindowMask):
        producer, consumer = "kv_tiles", ("kv_tiles", "m_start", "seq_q", "seq_k")
    elif isinstance(spec.mask, CausalMask):
        consumer = ("n_block_end", "n_full_end", "m_start", "seq_q", "seq_k")
    elif footprint.overlapped(spec):  # the first tile visited, the only one to be masked, stands before the loop
        consumer = ("n_block_end", "seq_k")
    if spec.outputs.lse:
        return WalkPlan(producer, consumer, ("acc_O", "row_max", "row_sum"), "maximum and sum")
    return WalkPlan(producer, consumer, ("acc_O", "row_sum"), "the sum")


def _persistent_walk(spec: Spec) -> WalkPlan:
    buffered, dynamic = spec.outputs.o == "own_buffer", spec.scheduler == "dynamic"
    parts = ["flags", "parts"] * footprint.splits_tail(spec)
    extent = "tail" if footprint.splits_tail(spec) else "num_tiles"
    return WalkPlan(
        launch_arguments=("q", "k", "v", "out", "lse", "num_sms: cutlass.Int32", *["counter"] * dynamic, *parts),
        kernel_arguments=(
            *("mQ", "mK", "mVt", "mO", "mLSE", *["counter"] * dynamic, *parts),
            *("tma_Q", "tma_K", "tma_V", *["tma_O"] * buffered),
        ),
        consume_arguments=(
            *(*["tma_O"] * buffered, "mQ", "mK", "mO", "mLSE", *parts, "sQ", "sK", "sVt", *["sO"] * buffered),
            *("q_ring", "k_ring", "v_ring", *["tile_ring", "tiles"] * dynamic, "scale_log2", extent),
        ),
        extent_argument=extent,
        extent_parameter=extent if footprint.splits_tail(spec) else f"{extent}: cutlass.Int32",
        turn_argument=", consumer" if isinstance(spec.schedule, PingPongSchedule) else "",
        last_product=(
            " runs beside the first S of the next tile of queries"
            if footprint.flattened(spec)
            else " has no S beside it"
        ),
    )


def _tiles(spec: Spec) -> TilesPlan:
    return TilesPlan(
        persistent=footprint.persistent(spec),
        dynamic=spec.scheduler == "dynamic",
        split=footprint.splits_tail(spec),
    )


def _softmax(spec: Spec) -> SoftmaxPlan:
    above = spec.softmax.rescale_above
    return SoftmaxPlan(above is not None, above or 0, spec.softmax.exp_before_wait or 0)


def _output(spec: Spec) -> OutputPlan:
    buffered, dtype = spec.outputs.o == "own_buffer", spec.o_element
    layout_phrase = " and O" if buffered else ""
    if spec.o_dtype == spec.problem.dtype:
        return OutputPlan(buffered, layout_phrase, False, "DTYPE", "TORCH_DTYPE", "TORCH_DTYPE")
    return OutputPlan(buffered, layout_phrase, True, f"cutlass.{dtype.cutlass_name}", dtype.torch_name, "dtype")


def _load(spec: Spec) -> LoadPlan:
    barrier = spec.load.barrier if isinstance(spec.load, TmaLoad) else "none"
    q_stages = spec.load.q_stages if isinstance(spec.load, TmaLoad) else 1
    return LoadPlan(spec.load.engine, q_stages, footprint.kv_stages(spec), barrier)


def _smem(spec: Spec) -> SmemPlan:
    regions, barriers = tuple(footprint.shared_memory_map(spec)), footprint.barrier_bytes(spec)
    smem, p = spec.smem, spec.handoff
    return SmemPlan(
        regions=regions,
        barrier_bytes=barriers,
        total_bytes=footprint.total_bytes(regions, barriers),
        q_layout=_layout_atom("K", smem.q) if smem else "",
        k_layout=_layout_atom("K", smem.k) if smem else "",
        # The scalar product walks V along keys and head dim alike; WGMMA wants it MN-major. The bytes are the same.
        v_layout=_layout_atom("MN" if isinstance(spec.pv, WgmmaProduct) else "K", smem.v) if smem else "",
        p_layout=_layout_atom("K", p.swizzle) if isinstance(p, SmemHandoff) else "",
    )


def _layout_atom(major: str, swizzle: Swizzle) -> str:
    """CuTe's name of a canonical layout: K_SW128, MN_SW64, K_INTER."""
    return f"{major}_INTER" if swizzle == "none" else f"{major}_SW{swizzle.removesuffix('B')}"


def _product(product: object, n: int, k: int) -> ProductPlan:
    if not isinstance(product, WgmmaProduct):
        return ProductPlan("scalar", "", (0, 0, 0), 0)
    source = {"smem": "SMEM", "registers": "RMEM"}[product.a.source]
    instruction = (hopper.WGMMA_M, n, hopper.WGMMA_K_16BIT)
    return ProductPlan("wgmma", source, instruction, k // hopper.WGMMA_K_16BIT)


def _schedule(spec: Spec) -> SchedulePlan:
    if not footprint.specialized(spec):
        return SchedulePlan(False, False, False, False, 0, 0)
    producer, consumer = footprint.REGISTER_BUDGETS[spec.tile.warpgroups or 0]
    ping_pong = isinstance(spec.schedule, PingPongSchedule)
    overlap, flattened = footprint.overlapped(spec), footprint.flattened(spec)
    return SchedulePlan(True, overlap, flattened, ping_pong, producer, consumer)


def _imports(spec: Spec) -> ImportsPlan:
    tma, wgmma = isinstance(spec.load, TmaLoad), isinstance(spec.qk, WgmmaProduct)
    stmatrix = operation_of(spec).tensor("out").moved == "tma"  # which gathers O in shared memory before
    names = {
        "OperandMajorMode": wgmma,
        "cpasync": spec.load.engine != "sync",
        "warp": stmatrix,
        "warpgroup": spec.smem is not None,
    }
    return ImportsPlan(
        pipeline=tma,
        nvgpu=", ".join(name for name, needed in names.items() if needed),
        smem_allocator=spec.smem is not None,
    )


def _entry(spec: Spec) -> EntryPlan:
    phrase = {"none": "no mask", "causal": "causal", "window": "sliding window"}[spec.mask.kind]
    like = "like q"
    if spec.problem.v_dim != spec.problem.head_dim:
        like = f"(batch, seq_q, heads_q, {spec.problem.v_dim})"
    if spec.o_dtype != spec.problem.dtype:
        like += f" but in {spec.o_element.torch_name}"
    pack = spec.tile.pack_heads
    heads = f"a multiple of {pack} x heads_kv" if pack > 1 else "a multiple of heads_kv (GQA, MQA)"
    arguments = operation_of(spec).arguments
    kept = [argument.name for argument in arguments if isinstance(argument, Scratch) and argument.kept]
    return EntryPlan(
        stand_ins=tuple(argument for argument in arguments if argument.name not in ("q", "k", "v", "out")),
        given=tuple(argument.name for argument in arguments if argument.name not in (*kept, "scale")),
        mask_phrase=phrase,
        output_phrase=like,
        heads_phrase=heads,
    )


def _sections(spec: Spec) -> SectionsPlan:
    if spec.handoff.through == "global_f32":
        return SectionsPlan("naive.py.jinja", *[""] * 11)
    both_wgmma = isinstance(spec.pv, WgmmaProduct)
    family = "wgmma" if both_wgmma else "scalar"
    space = "fragment" if both_wgmma else "smem"
    pv = {"registers": "pv_wgmma_registers", "smem_16bit": "pv_wgmma_smem", "smem_f32": "pv_scalar"}
    sections = SectionsPlan(
        spine="fused.py.jinja",
        host=_section(f"host_{family}"),
        kernel=_section("kernel_wgmma" if both_wgmma else f"kernel_scalar_{spec.load.engine}"),
        range=_section(f"range_{spec.mask.kind}"),
        loads=_section(f"loads_{spec.load.engine}"),
        consumer="",
        work=_section("work_fragment" if both_wgmma else "work_scalar"),
        qk=_section(f"qk_{spec.qk.engine}"),
        mask=_section(f"mask_{space}_{spec.mask.kind}"),
        softmax=_section(f"softmax_{space}"),
        pv=_section(pv[spec.handoff.through]),
        epilogue=_section(f"epilogue_{family}"),
    )
    if not footprint.specialized(spec):
        return sections
    if footprint.persistent(spec):
        return replace(
            sections,
            spine="persistent.py.jinja",
            host=_section("host_persistent"),
            kernel=_section("kernel_persistent"),
            loads=_section("loads_persistent"),
            consumer=_section("consumer_persistent"),
            softmax=_section("softmax_persistent"),
            pv=_section("pv_wgmma_fragment"),
            epilogue=_section(_persistent_epilogue(spec)),
        )
    overlap = footprint.overlapped(spec)
    return replace(
        sections,
        spine="specialized.py.jinja",
        kernel=_section("kernel_specialized"),
        consumer=_section("consumer_overlapped" if overlap else "consumer_sequential"),
        softmax=_section("softmax_overlapped" if overlap else "softmax_fragment"),
        pv=_section("pv_wgmma_fragment"),
    )


def _persistent_epilogue(spec: Spec) -> str:
    if spec.outputs.o == "own_buffer":
        return "epilogue_buffered"
    return "epilogue_direct" if spec.o_dtype == spec.problem.dtype else "epilogue_direct_f32"


def _section(name: str) -> str:
    return f"sections/{name}.py.jinja"


def expectation(spec: Spec) -> Expectation:
    """What the compiled code must show, as static instruction counts; `fa3gen compile` holds PTX and SASS against them.

    Each loop is written once and not unrolled over tiles: a load stands once in the prefetch and once in the steady
    state, a product once. A specialised kernel has no prefetch, its producer just runs ahead. With overlap the first
    tile's Q K^T and the last one's P V stand beside the loop, each with a wait of its own. A persistent kernel has a
    loop for tiles with an edge of a causal mask and one for the others.
    """
    d, q, kv, threads = spec.problem.head_dim, spec.tile.q, spec.tile.kv, footprint.threads(spec)
    v_dim = spec.problem.v_dim
    copies = 1 if footprint.specialized(spec) else 2  # of the code that loads K and V
    qk_copies, pv_copies = _product_copies(spec)
    products = [product for product in (_product(spec.qk, kv, d), _product(spec.pv, v_dim, kv)) if product.steps]
    wgmma: dict[tuple[int, int, int, str], int | None] = {}
    for product, times in zip(products, (qk_copies, pv_copies), strict=False):  # a product on scalars is the second
        kind = (*product.instruction, {"SMEM": "smem", "RMEM": "registers"}[product.a_source])
        wgmma[kind] = (wgmma.get(kind) or 0) + times * product.steps
    groups = qk_copies + pv_copies if len(products) == 2 else len(products)
    tma_loads = tma_stores = mbarrier_inits = expect_tx = cp_async = stmatrix = 0
    if isinstance(spec.load, TmaLoad) and spec.smem is not None:
        row, v_row = d * hopper.BYTES_16BIT, v_dim * hopper.BYTES_16BIT
        rings = 1 if spec.load.barrier == "shared" else 2
        tma_loads = footprint.tma_boxes(row, spec.smem.q) + copies * (
            footprint.tma_boxes(row, spec.smem.k) + footprint.tma_boxes(v_row, spec.smem.v)
        )
        mbarrier_inits = footprint.barrier_bytes(spec) // hopper.MBARRIER_BYTES
        expect_tx = 1 + copies * rings
    if isinstance(spec.load, CpAsyncLoad):
        vectors = d // footprint.SCALAR_VECTOR
        cp_async = (q + (2 * spec.load.kv_stages + 2) * kv) * vectors // threads
    if isinstance(spec.pv, WgmmaProduct) and spec.smem is not None:
        through_smem = spec.outputs.o != "direct"
        tma_stores = footprint.tma_boxes(v_dim * hopper.BYTES_16BIT, spec.smem.q) if through_smem else 0
        stmatrix = (v_dim * through_smem + (kv if isinstance(spec.handoff, SmemHandoff) else 0)) // 16
    setmaxnreg, max_registers = {}, min(hopper.REGISTERS_PER_THREAD, hopper.REGISTERS_PER_SM // threads)
    if footprint.specialized(spec):
        # ptxas reports what the launch hands out, not what setmaxnreg makes of it.
        schedule, max_registers = _schedule(spec), footprint.launch_registers(spec)
        setmaxnreg = {f"dec {schedule.producer_registers}": 1, f"inc {schedule.consumer_registers}": 1}
    regions, barriers = footprint.shared_memory_map(spec), footprint.barrier_bytes(spec)
    return Expectation(
        kernels=operation_of(spec).kernels,
        wgmma=wgmma,
        wgmma_commits=groups,
        wgmma_waits=groups,
        tma_loads=tma_loads,
        tma_stores=tma_stores,
        cp_async=cp_async,
        mbarrier_inits=mbarrier_inits,
        mbarrier_expect_tx=expect_tx,
        ldmatrix=0,
        stmatrix=stmatrix,
        setmaxnreg=setmaxnreg,
        smem_bytes=footprint.total_bytes(regions, barriers),
        max_registers=max_registers,
        # Where P V stands, there stands a softmax: both once for each loop and once beside it.
        sass=predicted_sass.expectation(spec, waits=groups, softmaxes=pv_copies, o_boxes=tma_stores, matrices=stmatrix),
    )


def _product_copies(spec: Spec) -> tuple[int, int]:
    """How many times Q K^T and P V stand in the code; each is one group with one wait."""
    if not footprint.overlapped(spec):
        return 1, 1
    loops = 2 if footprint.persistent(spec) and isinstance(spec.mask, CausalMask) else 1
    return loops + 1 + footprint.flattened(spec), loops + 1
