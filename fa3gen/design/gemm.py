"""What a GEMM costs on the chip: shared memory region by region, mbarriers, registers per thread."""

from __future__ import annotations

from dataclasses import dataclass

from fa3gen.design.footprint import (
    OPERAND_ALIGN,
    OTHER_REGISTERS,
    REGISTER_BUDGETS,
    SCORE_ALIGN,
    Region,
    tma_boxes,
)
from fa3gen.hardware import hopper
from fa3gen.hardware.dtypes import VECTOR_BYTES
from fa3gen.spec.gemm import Gemm, GemmTmaLoad
from fa3gen.spec.model import Major, Swizzle, WarpSpecializedSchedule, WgmmaProduct

CHUNK_BYTES = 128  # of a row of D that a warp stores at a time: the widest swizzle span
CHUNK_BUFFERS = 2  # of a warp: TMA reads one while the warp fills the next
REGISTER_BYTES = 4
STMATRIX_COLUMNS = 16  # of a warp's 16 rows: what one stmatrix, or ldmatrix, of four 8 x 8 matrices moves


@dataclass(frozen=True)
class GemmShape:
    """Extents of one call: a (m, k), b (k, n), c and out (m, n)."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """A multiplication and an addition for each element of a row of A and a column of B."""
        return 2.0 * self.m * self.n * self.k

    def __str__(self) -> str:
        """`4096 x 4096 x 1024`: m, n and k."""
        return f"{self.m} x {self.n} x {self.k}"


def tile_coordinates(spec: Gemm, tile: int, m_blocks: int, n_blocks: int) -> tuple[int, int]:
    """Where the tile of D with this number lies, as the modules compute it: bands of `tile.band` rows of tiles."""
    band, place = divmod(tile, spec.tile.band * n_blocks)
    height = min(m_blocks - band * spec.tile.band, spec.tile.band)
    return band * spec.tile.band + place % height, place // height


def specialized(spec: Gemm) -> bool:
    """Whether a warpgroup of its own loads, in CTAs that take tile after tile."""
    return isinstance(spec.schedule, WarpSpecializedSchedule)


def overlapped(spec: Gemm) -> bool:
    """Whether the products of a step are issued before those of the step before have ended."""
    return isinstance(spec.schedule, WarpSpecializedSchedule) and spec.schedule.overlap


def two_levels(spec: Gemm) -> bool:
    """Whether the tensor core sums one step only, and threads add the steps."""
    return spec.accumulation == "two_levels"


def a_in_registers(spec: Gemm) -> bool:
    """Whether each warp reads its rows of A into registers before it multiplies."""
    return isinstance(spec.product, WgmmaProduct) and spec.product.a.source == "registers"


def computing_threads(spec: Gemm) -> int:
    """Threads that share the accumulators."""
    return spec.tile.threads or (spec.tile.warpgroups or 0) * hopper.WARPGROUP


def threads(spec: Gemm) -> int:
    """Threads per CTA, those of the producer warpgroup among them."""
    return computing_threads(spec) + hopper.WARPGROUP * specialized(spec)


def register_budget(spec: Gemm) -> tuple[int, int]:
    """What setmaxnreg leaves to a thread of the producer and gives to one of the consumers."""
    return REGISTER_BUDGETS[spec.tile.warpgroups or 0]


def vector(spec: Gemm) -> int:
    """Elements of A and B in 16 bytes."""
    return VECTOR_BYTES // spec.element.bytes


def majors(spec: Gemm) -> tuple[Major, Major]:
    """Of A and B; threads read A along k and B along n."""
    return (spec.product.a.major, spec.product.b.major) if isinstance(spec.product, WgmmaProduct) else ("k", "mn")


def stage_bytes(spec: Gemm) -> tuple[int, int]:
    """Of A and of B, of one step."""
    depth = spec.tile.k * spec.element.bytes
    return spec.tile.m * depth, spec.tile.n * depth


def chunk_columns(spec: Gemm) -> int:
    """Columns of D that a warp of a specialised kernel stores at a time."""
    return CHUNK_BYTES // spec.d_element.bytes


def chunks(spec: Gemm) -> int:
    """How many chunks of 16 rows a warp has of each tile."""
    rows = (spec.tile.warpgroups or 1) * hopper.WGMMA_M
    return spec.tile.m // rows * (spec.tile.n // chunk_columns(spec))


def shared_memory_map(spec: Gemm) -> list[Region]:
    """Arrays in shared memory in the order they are laid out, barriers not included."""
    tile, stages, size = spec.tile, spec.load.stages, spec.element.bytes
    wgmma = isinstance(spec.product, WgmmaProduct)
    align = OPERAND_ALIGN if wgmma else SCORE_ALIGN
    over = wgmma and not specialized(spec)
    a, b = (stages * each for each in stage_bytes(spec))
    regions = [
        Region("sA", a, f"{stages} stages x {tile.m} x {tile.k} x {size}", align, "A, then D" if over else "A"),
        Region("sB", b, f"{stages} stages x {tile.n} x {tile.k} x {size}", align, "B"),
    ]
    if specialized(spec):
        warps, rows, columns = computing_threads(spec) // hopper.WARP, hopper.WGMMA_M // 4, chunk_columns(spec)
        formula = f"{warps} warps x {CHUNK_BUFFERS} x {rows} x {columns} x {spec.d_element.bytes}"
        regions.append(Region("sD", warps * CHUNK_BUFFERS * rows * CHUNK_BYTES, formula, align, "parts of D"))
    return regions


def barrier_bytes(spec: Gemm) -> int:
    """Bytes of mbarriers: a full and an empty one for each stage."""
    return 2 * hopper.MBARRIER_BYTES * spec.load.stages if isinstance(spec.load, GemmTmaLoad) else 0


def registers_per_thread(spec: Gemm) -> list[tuple[str, int]]:
    """32-bit registers that one computing thread holds at the widest point, by what (an estimate)."""
    tile, count = spec.tile, computing_threads(spec)
    held = [("D", tile.m * tile.n // count)]
    if two_levels(spec):
        held.append(("D of one step", tile.m * tile.n // count))
    if not isinstance(spec.product, WgmmaProduct):
        width = vector(spec)
        return [*held, (f"{width} rows of B", width * width), ("a row of A", width), ("other", OTHER_REGISTERS)]
    if a_in_registers(spec):
        held.append(("A", tile.m * tile.k * spec.element.bytes // REGISTER_BYTES // count))
    if specialized(spec):
        held.append(("a part of D, rounded", hopper.WGMMA_M * CHUNK_BYTES // REGISTER_BYTES // hopper.WARPGROUP))
    return [*held, ("other", OTHER_REGISTERS)]


def operand_boxes(rows: int, depth: int, major: Major, size: int, swizzle: Swizzle) -> int:
    """TMA copies of one operand of a step: a box is at most one swizzle span wide along the contiguous dimension."""
    return tma_boxes((depth if major == "k" else rows) * size, swizzle)
