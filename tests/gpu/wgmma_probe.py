"""One warpgroup product D = A B^T, its accumulators written as they are; one variant per copy of this file.

A and B are copied element by element into the shared-memory layouts that the DSL chooses for WGMMA, so that a variant
shows what descriptors, swizzles and register fragments mean. `source(variant)` is this file with another VARIANT: the
compiler wants a file for each module. D is float32 (64, n) also where the accumulators are float16.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator

M = 64  # rows of one warpgroup product
THREADS = 128
SMEM_ALIGN = 1024  # bytes; a 128-byte swizzle repeats every 8 rows of 128
REGISTERS = "registers"  # as the layout of A

TYPES = {
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "f32": cutlass.Float32,
    "e4m3": cutlass.Float8E4M3FN,
    "e5m2": cutlass.Float8E5M2,
}


@dataclass(frozen=True)
class Variant:
    """A product 64 x n x k: types by their PTX names; layouts as in SmemLayoutAtomKind, or `registers` for A."""

    a_type: str = "bf16"
    b_type: str = "bf16"
    accumulator: str = "f32"
    n: int = 64
    k: int = 128
    a_layout: str = "K_SW128"
    b_layout: str = "K_SW128"

    @property
    def name(self) -> str:
        """A name for files and tables."""
        types = self.a_type if self.a_type == self.b_type else f"{self.a_type}_{self.b_type}"
        return f"{types}_{self.accumulator}_n{self.n}k{self.k}_{self.a_layout}_{self.b_layout}".lower()

    @property
    def wide(self) -> bool:
        """Whether the operands have 16 bits; FP8 otherwise."""
        return self.a_type in ("bf16", "f16")


_KINDS = [f"{major}_{swizzle}" for major in ("K", "MN") for swizzle in ("SW128", "SW64", "SW32", "INTER")]
_FP8 = [("e4m3", "e4m3"), ("e5m2", "e5m2"), ("e4m3", "e5m2"), ("e5m2", "e4m3")]
VARIANTS = (
    *(Variant(a_layout=kind, b_layout=kind) for kind in _KINDS),
    *(
        Variant(a_layout=a, b_layout=b)
        for a, b in (("K_SW128", "MN_SW128"), ("MN_SW64", "K_SW32"), ("K_INTER", "MN_INTER"))
    ),
    *(Variant(a_layout=REGISTERS, b_layout=kind) for kind in _KINDS),
    *(Variant(n=8, b_layout=kind) for kind in ("K_SW128", "K_INTER", "MN_INTER")),
    *(Variant(n=24, k=64, b_layout=kind) for kind in ("K_SW64", "MN_INTER")),
    *(Variant(n=256, k=64, b_layout=kind) for kind in ("K_SW128", "MN_SW128")),
    *(
        Variant("f16", "f16", accumulator, a_layout=a, b_layout=b)
        for accumulator in ("f32", "f16")
        for a, b in (("K_SW128", "K_SW128"), (REGISTERS, "MN_SW128"), ("MN_SW128", "MN_SW64"))
    ),
    *(
        Variant(a, b, accumulator, k=256, a_layout=layout)
        for a, b in _FP8
        for accumulator in ("f32", "f16")
        for layout in ("K_SW128", REGISTERS)
    ),
    *(Variant("e4m3", "e4m3", k=128, a_layout=kind, b_layout=kind) for kind in ("K_SW64", "K_SW32", "K_INTER")),
    Variant("e4m3", "e4m3", n=8),
    Variant("e5m2", "e5m2", n=256, k=64, b_layout="K_SW64"),
)

VARIANT = Variant()  # source() puts another here


def source(variant: Variant) -> str:
    """The text of this file with `variant` as its VARIANT."""
    text = Path(__file__).read_text(encoding="utf-8")
    return re.sub(r"^VARIANT = .*$", f"VARIANT = {variant!r}", text, count=1, flags=re.MULTILINE)


def _major(layout: str) -> OperandMajorMode:
    return OperandMajorMode.MN if layout.startswith("MN") else OperandMajorMode.K


def _shared_layout(name: str, element: Any, rows: int) -> cute.ComposedLayout:
    kind = warpgroup.SmemLayoutAtomKind["K_INTER" if name == REGISTERS else name]
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, element), (rows, VARIANT.k), (0, 1))


def _operation() -> warpgroup.WarpGroupMmaOp:
    registers = VARIANT.a_layout == REGISTERS
    origin = warpgroup.OperandSource.RMEM if registers else warpgroup.OperandSource.SMEM
    majors = OperandMajorMode.K if registers else _major(VARIANT.a_layout), _major(VARIANT.b_layout)
    a_type, b_type, accumulator = TYPES[VARIANT.a_type], TYPES[VARIANT.b_type], TYPES[VARIANT.accumulator]
    if VARIANT.wide:
        return warpgroup.MmaF16BF16Op(a_type, accumulator, (M, VARIANT.n, 16), origin, *majors)
    return warpgroup.MmaF8Op(a_type, b_type, accumulator, (M, VARIANT.n, 32), origin, *majors)


@cute.jit
def launch(a_data: cute.Tensor, b_data: cute.Tensor, d: cute.Tensor):
    """a_data (64, k) and b_data (n, k): bits of the operands as Int16 or Uint8, row-major; d (64, n) float32."""
    a_type, b_type = TYPES[VARIANT.a_type], TYPES[VARIANT.b_type]
    a = cute.make_tensor(cute.recast_ptr(a_data.iterator, dtype=a_type), a_data.layout)
    b = cute.make_tensor(cute.recast_ptr(b_data.iterator, dtype=b_type), b_data.layout)
    product(
        a,
        b,
        d,
        _shared_layout(VARIANT.a_layout, a_type, M),
        _shared_layout(VARIANT.b_layout, b_type, VARIANT.n),
        cute.make_tiled_mma(_operation()),
    ).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def product(
    a: cute.Tensor,
    b: cute.Tensor,
    d: cute.Tensor,
    sA_layout: cute.ComposedLayout,
    sB_layout: cute.ComposedLayout,
    mma: cute.TiledMma,
):
    """One CTA of one warpgroup: copy, multiply, write the accumulators."""
    tidx, _, _ = cute.arch.thread_idx()
    smem = SmemAllocator()
    sA = smem.allocate_tensor(a.element_type, sA_layout.outer, byte_alignment=SMEM_ALIGN, swizzle=sA_layout.inner)
    sB = smem.allocate_tensor(b.element_type, sB_layout.outer, byte_alignment=SMEM_ALIGN, swizzle=sB_layout.inner)
    copy_in(a, sA, tidx)
    copy_in(b, sB, tidx)
    cute.arch.fence_proxy("async.shared", space="cta")  # plain stores above, WGMMA reads through the async proxy
    cute.arch.sync_threads()
    slice_mma = mma.get_slice(tidx)
    tDgD = slice_mma.partition_C(d)  # (MMA, MMA_M, MMA_N)
    acc = cute.make_rmem_tensor(tDgD.shape, TYPES[VARIANT.accumulator])
    tDrB = mma.make_fragment_B(mma.get_slice(0).partition_B(sB))  # (MMA, MMA_N, MMA_K)
    if cutlass.const_expr(VARIANT.a_layout == REGISTERS):
        tDgA = slice_mma.partition_A(a)
        tDrA = cute.make_rmem_tensor(tDgA.shape, a.element_type)  # (MMA, MMA_M, MMA_K)
        tDrA.store(tDgA.load())
    else:
        tDrA = mma.make_fragment_A(mma.get_slice(0).partition_A(sA))  # (MMA, MMA_M, MMA_K)
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(tDrB, mode=[2])):
        cute.gemm(atom, acc, tDrA[None, None, k], tDrB[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
    tDgD.store(acc.load().to(cutlass.Float32))


@cute.jit
def copy_in(source: cute.Tensor, target: cute.Tensor, tidx: cutlass.Int32):
    """Copy a row-major matrix into shared memory, element by element, whatever the target's layout."""
    rows, columns = source.shape
    for i in cutlass.range(cute.ceil_div(rows * columns, THREADS), unroll=1):
        j = i * THREADS + tidx
        target[j // columns, j % columns] = source[j // columns, j % columns]


def compile_for_sm90a(options: str = "--enable-tvm-ffi") -> Any:
    """Compile VARIANT; the result takes (a_data, b_data, d), see `launch`."""
    bits = cutlass.Int16 if VARIANT.wide else cutlass.Uint8

    def matrix(element: Any, rows: int, columns: int) -> Any:
        shape = (rows, columns)
        return cute.runtime.make_fake_compact_tensor(element, shape, stride_order=(1, 0), assumed_align=16)

    return cute.compile(
        launch,
        matrix(bits, M, VARIANT.k),
        matrix(bits, VARIANT.n, VARIANT.k),
        matrix(cutlass.Float32, M, VARIANT.n),
        options=f"--gpu-arch sm_90a {options}",
    )
