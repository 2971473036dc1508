"""Rules about GEMM kernels: which parts go together, tiles, majors, stages, and D on its way out."""

from __future__ import annotations

from fa3gen.design import gemm
from fa3gen.design.rules.registry import GENERATOR, HARDWARE, Violation, rule
from fa3gen.design.rules.wording import around, remainder
from fa3gen.hardware import hopper


@rule(kind=GENERATOR, topic="loads")
def gemm_load(product: str, load: str) -> Violation | None:
    """Tiles that WGMMA reads are written by TMA; threads read tiles that cp.async wrote.

    PTX ISA, "Async Proxy": what threads write needs a fence.proxy.async before WGMMA may read it.
    """
    needed = {"wgmma": "tma", "scalar": "cp_async"}[product]
    if load == needed:
        return None
    return Violation("load.engine", f"{load} loads are not rendered with a {product} product; use {needed}")


@rule(kind=GENERATOR, topic="layouts")
def gemm_layouts(product: str, given: bool) -> Violation | None:
    """WGMMA reads canonical layouts, which have a swizzle; threads read plain rows."""
    if product == "wgmma" and not given:
        return Violation("smem", "WGMMA reads swizzled tiles; give their swizzles, {a: 128B, b: 128B, d: 128B}")
    if product == "scalar" and given:
        return Violation(
            "smem", "scalar products read plain rows, which have no swizzle; take smem out (smem: null, over a base)"
        )
    return None


@rule(kind=GENERATOR, topic="structure")
def gemm_schedule(product: str, schedule: str) -> Violation | None:
    """A warpgroup that only loads is rendered for products on WGMMA."""
    if schedule == "cooperative" or product == "wgmma":
        return None
    return Violation(
        "schedule.kind", f"{schedule} is rendered for wgmma products only; use cooperative, or product engine wgmma"
    )


@rule(kind=GENERATOR, topic="schedule")
def gemm_overlap(source: str, overlap: bool, two_levels: bool = False) -> Violation | None:
    """The next step's products are issued before this one's end, unless they need the same registers.

    PTX ISA, "wgmma.mma_async": registers of a product must not be written before wgmma.wait_group.
    """
    if overlap and source == "registers":
        return Violation(
            "schedule.overlap",
            "A of the next step takes the registers of this one's, which its products still read; use overlap: false",
        )
    if overlap and two_levels:
        return Violation(
            "schedule.overlap",
            "sums of the next step take the registers of this one's, which threads still add; use overlap: false",
        )
    if not overlap and source == "smem" and not two_levels:
        return Violation(
            "schedule.overlap",
            "with A in shared memory nothing keeps the next step's products from being issued; use overlap: true",
        )
    return None


@rule(kind=GENERATOR, topic="structure")
def gemm_a_registers(schedule: str, source: str) -> Violation | None:
    """A in registers is rendered where a warpgroup only loads."""
    if source == "smem" or schedule != "cooperative":
        return None
    return Violation(
        "product.a.source",
        "A from registers is rendered with schedule warp_specialized only, not cooperative; use source: smem",
    )


@rule(kind=GENERATOR, topic="loads")
def gemm_stages(engine: str, schedule: str, stages: int) -> Violation | None:
    """A step is loaded while another is multiplied: a stage each."""
    if stages > 1 or (engine == "tma" and schedule == "cooperative"):
        return None
    held = "is given back after the next step has landed in another" if engine == "tma" else "is filled one step ahead"
    return Violation("load.stages", f"a stage {held}, and there is {stages}; use at least 2")


@rule(kind=HARDWARE, topic="tile")
def gemm_rows(rows: int, warpgroups: int) -> Violation | None:
    """M: 64 rows per product of a warpgroup. PTX ISA, "Asynchronous Warpgroup Level Matrix Shape" (m64nNk16)."""
    share = warpgroups * hopper.WGMMA_M
    if rows % share == 0:
        return None
    return Violation(
        "tile.m",
        f"{warpgroups} warpgroup{'s' * (warpgroups > 1)} x {hopper.WGMMA_M} rows of a WGMMA = {share}, and "
        f"tile.m is {remainder(rows, share)}; use {around(rows, share)}",
    )


@rule(kind=GENERATOR, topic="output")
def gemm_output_dtype(dtype: str, d_dtype: str) -> Violation | None:
    """D is rounded to the dtype of A and B, or not at all."""
    if dtype == "e4m3" and d_dtype == "e4m3":
        return Violation("d.dtype", "D in e4m3 would keep 4 bits of its sums; use bf16, fp16 or fp32")
    if d_dtype in (dtype, "fp32") or dtype == "e4m3":
        return None
    return Violation("d.dtype", f"D in {d_dtype} beside A and B in {dtype} is not rendered; use {dtype} or fp32")


@rule(kind=GENERATOR, topic="output")
def gemm_output(schedule: str, d_dtype: str, add_c: bool) -> Violation | None:
    """C and float32 D are rendered where each warp stores its own rows."""
    if schedule != "cooperative" or not (add_c or d_dtype == "fp32"):
        return None
    field, what = ("d.add_c", "adding C") if add_c else ("d.dtype", "D in fp32")
    return Violation(
        field, f"{what} is rendered with schedule warp_specialized only, not cooperative; leave it out, or extend g3"
    )


@rule(kind=GENERATOR, topic="output")
def gemm_chunk_columns(columns: int, chunk: int) -> Violation | None:
    """A warp of a specialised kernel stores its rows of D a swizzle span, 128 bytes, at a time."""
    if columns % chunk == 0:
        return None
    return Violation(
        "tile.n",
        f"each warp stores {gemm.CHUNK_BYTES} bytes = {chunk} columns of D at a time, and tile.n is "
        f"{remainder(columns, chunk)}; use {around(columns, chunk)}",
    )


@rule(kind=GENERATOR, topic="output")
def gemm_output_columns(columns: int) -> Violation | None:
    """D is gathered 16 columns at a time, by stmatrix.x4. PTX ISA, "stmatrix"."""
    if columns % gemm.STMATRIX_COLUMNS == 0:
        return None
    return Violation(
        "tile.n",
        f"stmatrix gathers {gemm.STMATRIX_COLUMNS} columns of D at a time, and tile.n is "
        f"{remainder(columns, gemm.STMATRIX_COLUMNS)}; use {around(columns, gemm.STMATRIX_COLUMNS)}",
    )


@rule(kind=GENERATOR, topic="shared memory")
def gemm_output_over_a(rows: int, columns: int, size: int, a_bytes: int) -> Violation | None:
    """Where all warps load and multiply, D is gathered in the place of all stages of A."""
    needed = rows * columns * size
    if needed <= a_bytes:
        return None
    return Violation(
        "load.stages",
        f"D takes the place of A, and {rows} x {columns} x {size} = {needed} bytes > {a_bytes} of all stages of A; "
        "use more stages, a smaller tile.n or schedule warp_specialized",
    )


@rule(kind=GENERATOR, topic="tile")
def gemm_grid(rows: int, columns: int, threads: int, vector: int) -> Violation | None:
    """Scalar products: threads form a grid on the tile, each with 16 bytes' worth of adjacent columns."""
    if columns % vector:
        return Violation(
            "tile.n",
            f"a thread owns {vector} adjacent columns of D, 16 bytes of B, and tile.n is {remainder(columns, vector)}; "
            f"use {around(columns, vector)}",
        )
    across = columns // vector
    if threads % across:
        return Violation(
            "tile.threads",
            f"{columns} / {vector} = {across} threads side by side, and tile.threads is "
            f"{remainder(threads, across)}; use {around(threads, across)}",
        )
    down = threads // across
    if rows % down == 0:
        return None
    return Violation(
        "tile.m",
        f"{threads} / ({columns} / {vector}) = {down} threads one below the other, and tile.m is "
        f"{remainder(rows, down)}; use {around(rows, down)}",
    )


@rule(kind=GENERATOR, topic="loads")
def gemm_copies(tensor: str, rows: int, columns: int, threads: int, vector: int) -> Violation | None:
    """All threads copy a tile together, 16 bytes of a row each, pass after pass."""
    if columns % vector:
        return Violation(
            "tile.k",
            f"rows of {tensor} are copied 16 bytes = {vector} elements at a time, and a row of its tile is "
            f"{remainder(columns, vector)}; use {around(columns, vector)}",
        )
    pieces = rows * columns // vector
    if pieces % threads == 0:
        return None
    return Violation(
        "tile.k",
        f"a tile of {tensor} is {rows} x {columns} / {vector} = {pieces} times 16 bytes, which {threads} threads copy "
        f"in no whole number of passes ({remainder(pieces, threads)}); use a larger tile.k or fewer threads",
    )


@rule(kind=HARDWARE, topic="D = A B")
def gemm_eight_bit_major(field: str, dtype: str, major: str) -> Violation | None:
    """Operands of 8 bits are K-major. PTX ISA, "wgmma.mma_async": imm-trans-a and imm-trans-b are for 16 bits only."""
    if dtype != "e4m3" or major == "k":
        return None
    return Violation(
        field,
        "WGMMA transposes operands of 16 bits only: along k it reads 16 bytes, 16 elements of 8 bits that have to lie "
        "side by side; use major k and give the tensor contiguous along k, or dtype bf16 or fp16",
    )


@rule(kind=GENERATOR, topic="D = A B")
def gemm_eight_bit(dtype: str, schedule: str, source: str) -> Violation | None:
    """Operands of 8 bits are rendered where a warpgroup only loads, and A is read from shared memory."""
    if dtype != "e4m3" or (schedule != "cooperative" and source == "smem"):
        return None
    return Violation(
        "problem.dtype",
        "e4m3 is rendered with schedule warp_specialized and wgmma with A from smem only; use bf16, or extend g3_fp8",
    )


@rule(kind=GENERATOR, topic="D = A B")
def gemm_two_levels(two_levels: bool, schedule: str, source: str) -> Violation | None:
    """Two levels are rendered where a warpgroup only loads, and A is read from shared memory."""
    if not two_levels or (schedule != "cooperative" and source == "smem"):
        return None
    return Violation(
        "accumulation",
        "two_levels is rendered with schedule warp_specialized and wgmma with A from smem only; use one_level",
    )
