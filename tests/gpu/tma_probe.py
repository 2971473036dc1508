"""One TMA load of a box and one TMA store of it, at any coordinates; one variant per copy of this file.

The box's bytes in shared memory are written out as well, as they lie there, so that the swizzle is seen and not only
undone. `source(variant)` is this file with another VARIANT: the compiler wants a file for each module.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

THREADS = 32
SMEM_ALIGN = 1024  # bytes; a 128-byte swizzle repeats every 8 rows of 128
TYPES = {"u8": cutlass.Uint8, "bf16": cutlass.BFloat16, "f32": cutlass.Float32}
BYTES = {"u8": 1, "bf16": 2, "f32": 4}


@dataclass(frozen=True)
class Variant:
    """A tensor and a box in it, elements along each dimension, the contiguous one first, as in a tensor map.

    `row`: elements from one row to the next, a multiple of 16 bytes; 0 for as many as there are in one.
    """

    element: str
    swizzle: int  # bytes; 0 for none
    extents: tuple[int, ...]
    box: tuple[int, ...]
    row: int = 0

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.extents)

    @property
    def name(self) -> str:
        """A name for files and tables."""
        return f"rank{self.rank}_{self.element}_swizzle{self.swizzle}" + "_ragged" * bool(self.row)

    @property
    def memory(self) -> tuple[int, ...]:
        """The extents with what lies between rows, the contiguous dimension first."""
        return (self.row or self.extents[0], *self.extents[1:])

    @property
    def box_bytes(self) -> int:
        """Bytes of the box."""
        return math.prod(self.box) * BYTES[self.element]


VARIANTS = (
    Variant("f32", 0, (100,), (64,)),
    Variant("u8", 0, (272,), (128,)),
    *(Variant("bf16", span, (span // 2 + 24, 37), (span // 2, 16)) for span in (128, 64, 32)),
    Variant("bf16", 0, (40, 37), (32, 16)),
    Variant("f32", 128, (44, 21), (32, 24)),
    Variant("u8", 64, (112, 50), (64, 8)),
    *(Variant("bf16", span, (72, 20, 5), (max(span, 16) // 2, 8, 3)) for span in (128, 0)),
    Variant("f32", 64, (24, 20, 5, 4), (16, 8, 2, 3)),
    Variant("bf16", 128, (80, 12, 3, 4, 3), (64, 8, 2, 3, 2)),
    Variant("bf16", 32, (24, 12, 3, 4, 3), (16, 8, 2, 3, 2)),
    Variant("u8", 0, (48, 6, 3, 4, 3), (32, 4, 2, 3, 2)),
    # Rows that end within 16 bytes, where a load is cut by elements and a store is not.
    Variant("bf16", 128, (101, 20), (64, 16), row=112),
    Variant("u8", 64, (109, 20), (64, 8), row=128),
    Variant("f32", 32, (21, 13), (8, 8), row=24),
    Variant("bf16", 0, (45, 7, 3), (32, 4, 2), row=48),
)

VARIANT = VARIANTS[0]  # source() puts another here


def source(variant: Variant) -> str:
    """The text of this file with `variant` as its VARIANT."""
    text = Path(__file__).read_text(encoding="utf-8")
    return re.sub(r"^VARIANT = .*$", f"VARIANT = {variant!r}", text, count=1, flags=re.MULTILINE)


def dsl_order(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Dimensions as the DSL's canonical layouts have them: the contiguous one second. Its own inverse."""
    return values if len(values) == 1 else (values[1], values[0], *values[2:])


def _box_layout() -> Any:
    box = dsl_order(VARIANT.box)
    if VARIANT.swizzle == 0:  # compact, the contiguous dimension fastest
        return cute.make_ordered_layout(box, order=dsl_order(tuple(range(VARIANT.rank))))
    kind = warpgroup.SmemLayoutAtomKind[f"K_SW{VARIANT.swizzle}"]
    atom = warpgroup.make_smem_layout_atom(kind, TYPES[VARIANT.element])
    return cute.tile_to_shape(atom, box, tuple(range(VARIANT.rank)))


def _in_shared_memory(data: Any, layout: Any) -> Any:
    """The box at pointer `data` (bytes) as a tensor."""
    if VARIANT.swizzle == 0:
        return cute.make_tensor(cute.recast_ptr(data, dtype=TYPES[VARIANT.element]), layout)
    return cute.make_tensor(cute.recast_ptr(data, layout.inner, dtype=TYPES[VARIANT.element]), layout.outer)


@cute.jit
def launch(x: cute.Tensor, y: cute.Tensor, image: cute.Tensor, starts: cute.Tensor):
    """x, y: tensors with the dimensions of `dsl_order`; image: the box's bytes; starts (2, rank): of load and store."""
    layout = _box_layout()
    box = dsl_order(VARIANT.box)
    load, mX = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), x, layout, box)
    store, mY = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), y, layout, box)
    copy_box(load, mX, store, mY, image, starts).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def copy_box(
    load: cute.CopyAtom,
    mX: cute.Tensor,
    store: cute.CopyAtom,
    mY: cute.Tensor,
    image: cute.Tensor,
    starts: cute.Tensor,
):
    """One warp: load the box, write out its bytes, store it."""
    tidx, _, _ = cute.arch.thread_idx()
    smem = SmemAllocator()
    data = smem.allocate(VARIANT.box_bytes, byte_alignment=SMEM_ALIGN)
    barrier = smem.allocate_array(cutlass.Int64, 1)
    sX = _in_shared_memory(data, _box_layout())
    if tidx == 0:
        cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, VARIANT.box_bytes)
    tXsX, tXgX = partition_tma(load, sX, box_at(mX, starts, 0))
    cute.copy(load, tXgX, tXsX, tma_bar_ptr=barrier)
    cute.arch.mbarrier_wait(barrier, 0)  # the box has landed
    shared_bytes = cute.make_tensor(cute.recast_ptr(data, dtype=cutlass.Uint8), cute.make_layout(VARIANT.box_bytes))
    for i in cutlass.range(VARIANT.box_bytes // THREADS, unroll=1):
        image[i * THREADS + tidx] = shared_bytes[i * THREADS + tidx]
    tYsY, tYgY = partition_tma(store, sX, box_at(mY, starts, 1))
    cute.copy(store, tYsY, tYgY)
    cute.arch.cp_async_bulk_commit_group()
    cute.arch.cp_async_bulk_wait_group(0, read=False)


@cute.jit
def box_at(tensor: cute.Tensor, starts: cute.Tensor, row: cutlass.Constexpr) -> cute.Tensor:
    """The box that begins at the coordinates of one row of `starts`, which may lie outside the tensor."""
    start = tuple(starts[row, dimension] for dimension in range(VARIANT.rank))
    moved = cute.domain_offset(dsl_order(start), tensor)
    return cute.local_tile(moved, dsl_order(VARIANT.box), (0,) * VARIANT.rank)


@cute.jit
def partition_tma(tma: cute.CopyAtom, sX: cute.Tensor, gX: cute.Tensor):
    """Group all modes of the box into the one that a TMA copy moves."""
    shared, box = cute.group_modes(sX, 0, VARIANT.rank), cute.group_modes(gX, 0, VARIANT.rank)
    return cpasync.tma_partition(tma, 0, cute.make_layout(1), shared, box)


def compile_for_sm90a(options: str = "--enable-tvm-ffi") -> Any:
    """Compile VARIANT; the result takes (x, y, image, starts), see `launch`; image is uint8, starts int32."""

    def tensor() -> Any:
        shape, element = dsl_order(VARIANT.extents), TYPES[VARIANT.element]
        strides = dsl_order(tuple(math.prod(VARIANT.memory[:dimension]) for dimension in range(VARIANT.rank)))
        return cute.runtime.make_fake_tensor(element, shape, strides, assumed_align=16)

    return cute.compile(
        launch,
        tensor(),
        tensor(),
        cute.runtime.make_fake_compact_tensor(cutlass.Uint8, (VARIANT.box_bytes,), assumed_align=16),
        cute.runtime.make_fake_compact_tensor(cutlass.Int32, (2, VARIANT.rank), stride_order=(1, 0), assumed_align=4),
        options=f"--gpu-arch sm_90a {options}",
    )
