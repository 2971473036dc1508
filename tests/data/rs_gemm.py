"""One CTA, one warpgroup: D = 8 (A B^T), 64 x 64 x 64, A from registers. A compile test, never run.

With TOUCH_A the registers of A change between the products of one group, for which ptxas serialises them.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as hopper
from cutlass import cute
from cutlass.cute.nvgpu import warpgroup

TOUCH_A = False
SIZE = 64
THREADS = 128
ROUNDS = 8


@cute.kernel
def rs_gemm(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, sB_layout: cute.ComposedLayout, mma: cute.TiledMma):
    thread, _, _ = cute.arch.thread_idx()
    smem = cutlass.utils.SmemAllocator()
    sB = smem.allocate_tensor(cutlass.BFloat16, sB_layout.outer, byte_alignment=1024, swizzle=sB_layout.inner)
    for i in cutlass.range(SIZE * SIZE // THREADS, unroll=1):
        element = i * THREADS + thread
        sB[element // SIZE, element % SIZE] = mB[element // SIZE, element % SIZE]
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_threads()
    thread_mma = mma.get_slice(thread)
    tDgD = thread_mma.partition_C(mD)
    acc = mma.make_fragment_C(tDgD.shape[:3])
    tDrB = mma.make_fragment_B(mma.get_slice(0).partition_B(sB))
    tDrA = mma.make_fragment_A(thread_mma.partition_A(mA))
    cute.autovec_copy(thread_mma.partition_A(mA), tDrA)
    acc.fill(0.0)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    for _ in cutlass.range(ROUNDS, unroll=1):
        warpgroup.fence()
        for k in cutlass.range_constexpr(SIZE // 16):
            cute.gemm(mma, acc, tDrA[None, None, k], tDrB[None, None, k], acc)
            if cutlass.const_expr(TOUCH_A):
                for i in cutlass.range_constexpr(cute.size(tDrA)):
                    tDrA[i] = (tDrA[i].to(cutlass.Float32) * 1.5).to(cutlass.BFloat16)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
    warpgroup.wait_group(0)
    cute.autovec_copy(acc, tDgD)


@cute.jit
def launch(mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor):
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, cutlass.BFloat16)
    sB_layout = cute.tile_to_shape(atom, (SIZE, SIZE), (0, 1))
    mma = hopper.make_trivial_tiled_mma(
        cutlass.BFloat16,
        cutlass.BFloat16,
        warpgroup.OperandMajorMode.K,
        warpgroup.OperandMajorMode.K,
        cutlass.Float32,
        (1, 1, 1),
        (64, SIZE),
        warpgroup.OperandSource.RMEM,
    )
    rs_gemm(mA, mB, mD, sB_layout, mma).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


def compile_for_sm90a() -> Any:
    def matrix(dtype: Any) -> Any:
        return cute.runtime.make_fake_compact_tensor(dtype, (SIZE, SIZE), stride_order=(1, 0))

    return cute.compile(launch, matrix(cutlass.BFloat16), matrix(cutlass.BFloat16), matrix(cutlass.Float32))
