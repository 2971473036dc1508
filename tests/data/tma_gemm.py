"""One CTA, a producer and a consumer warpgroup: a TMA ring of two stages, two products in flight. A compile test.

C = bf16(sum B_k A_k^T) goes out by stmatrix and a TMA store, D = exp2 of the other product by plain stores. Only the
instructions matter, not what is computed; the kernel is never run. Without MIN_BLOCKS ptxas ignores setmaxnreg.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.utils.hopper_helpers as hopper
from cutlass import cute, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup

MIN_BLOCKS = 1
TILE = 64
STAGES = 2
TILES = 4
THREADS = 256
BF16 = cutlass.BFloat16


@cute.kernel
def tma_gemm(
    tma_A: cute.CopyAtom,
    mA: cute.Tensor,
    tma_B: cute.CopyAtom,
    mB: cute.Tensor,
    tma_C: cute.CopyAtom,
    mC: cute.Tensor,
    mD: cute.Tensor,
    sA_layout: cute.ComposedLayout,
    sB_layout: cute.ComposedLayout,
    sC_layout: cute.ComposedLayout,
    mma: cute.TiledMma,
):
    thread, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(thread // 32)
    smem = cutlass.utils.SmemAllocator()
    barriers = smem.allocate_array(cutlass.Int64, 2 * STAGES)
    sA = smem.allocate_tensor(BF16, sA_layout.outer, byte_alignment=1024, swizzle=sA_layout.inner)
    sB = smem.allocate_tensor(BF16, sB_layout.outer, byte_alignment=1024, swizzle=sB_layout.inner)
    sC = smem.allocate_tensor(BF16, sC_layout.outer, byte_alignment=1024, swizzle=sC_layout.inner)
    ring = pipeline.PipelineTmaAsync.create(
        barrier_storage=barriers,
        num_stages=STAGES,
        producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
        consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4),
        tx_count=2 * TILE * TILE * 2,
        cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
    )
    cute.arch.sync_threads()
    if warp < 4:
        cute.arch.setmaxregister_decrease(40)
        if warp == 0:
            gA = cute.group_modes(cute.zipped_divide(mA, (TILE, TILE)), 0, 1)
            gB = cute.group_modes(cute.zipped_divide(mB, (TILE, TILE)), 0, 1)
            tAsA, tAgA = cpasync.tma_partition(tma_A, 0, cute.make_layout(1), cute.group_modes(sA, 0, 2), gA)
            tBsB, tBgB = cpasync.tma_partition(tma_B, 0, cute.make_layout(1), cute.group_modes(sB, 0, 2), gB)
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
            for tile in cutlass.range(TILES, unroll=1):
                ring.producer_acquire(state)
                full = ring.producer_get_barrier(state)
                cute.copy(tma_A, tAgA[None, (0, tile)], tAsA[None, state.index], tma_bar_ptr=full)
                cute.copy(tma_B, tBgB[None, (0, tile)], tBsB[None, state.index], tma_bar_ptr=full)
                ring.producer_commit(state)
                state.advance()
            ring.producer_tail(state)
    else:
        cute.arch.setmaxregister_increase(232)
        thread_mma = mma.get_slice(thread - 128)
        tDgD = thread_mma.partition_C(mD)
        acc_D = mma.make_fragment_C(tDgD.shape[:3])
        acc_C = mma.make_fragment_C(tDgD.shape[:3])
        tCrA = mma.make_fragment_A(mma.get_slice(0).partition_A(sA))
        tCrB = mma.make_fragment_B(mma.get_slice(0).partition_B(sB))
        acc_D.fill(0.0)
        acc_C.fill(0.0)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
        for _ in cutlass.range(TILES, unroll=1):
            ring.consumer_wait(state)
            warpgroup.fence()
            for k in cutlass.range_constexpr(TILE // 16):
                cute.gemm(mma, acc_D, tCrA[None, None, k, state.index], tCrB[None, None, k, state.index], acc_D)
            warpgroup.commit_group()
            for k in cutlass.range_constexpr(TILE // 16):
                cute.gemm(mma, acc_C, tCrB[None, None, k, state.index], tCrA[None, None, k, state.index], acc_C)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            for i in cutlass.range_constexpr(cute.size(acc_D)):
                acc_D[i] = cute.math.exp2(acc_D[i], fastmath=True)
            warpgroup.wait_group(0)
            ring.consumer_release(state)
            state.advance()
        cute.autovec_copy(acc_D, tDgD)
        store = hopper.sm90_get_smem_store_op(cutlass.utils.LayoutEnum.ROW_MAJOR, BF16, cutlass.Float32)
        thread_store = cute.make_tiled_copy_C(store, mma).get_slice(thread - 128)
        rC = cute.make_rmem_tensor_like(acc_C, BF16)
        rC.store(acc_C.load().to(BF16))
        cute.copy(cute.make_tiled_copy_C(store, mma), thread_store.retile(rC), thread_store.partition_D(sC))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=1, number_of_threads=128)
        if warp == 4:
            tCsC, tCgC = cpasync.tma_partition(
                tma_C, 0, cute.make_layout(1), cute.group_modes(sC, 0, 2), cute.group_modes(mC, 0, 2)
            )
            cute.copy(tma_C, tCsC, tCgC)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def launch(mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mD: cute.Tensor):
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BF16)
    ring_layout = cute.tile_to_shape(atom, (TILE, TILE, STAGES), (0, 1, 2))
    sC_layout = cute.tile_to_shape(atom, (TILE, TILE), (0, 1))
    load, stage = cpasync.CopyBulkTensorTileG2SOp(), cute.slice_(ring_layout, (None, None, 0))
    tma_A, tma_mA = cpasync.make_tiled_tma_atom(load, mA, stage, (TILE, TILE))
    tma_B, tma_mB = cpasync.make_tiled_tma_atom(load, mB, stage, (TILE, TILE))
    tma_C, tma_mC = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mC, sC_layout, (TILE, TILE))
    mma = hopper.make_trivial_tiled_mma(
        BF16,
        BF16,
        warpgroup.OperandMajorMode.K,
        warpgroup.OperandMajorMode.K,
        cutlass.Float32,
        (1, 1, 1),
        (64, TILE),
        warpgroup.OperandSource.SMEM,
    )
    tma_gemm(tma_A, tma_mA, tma_B, tma_mB, tma_C, tma_mC, mD, ring_layout, ring_layout, sC_layout, mma).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=MIN_BLOCKS
    )


def compile_for_sm90a() -> Any:
    def matrix(dtype: Any, columns: int) -> Any:
        return cute.runtime.make_fake_compact_tensor(dtype, (TILE, columns), stride_order=(1, 0), assumed_align=16)

    inputs = [matrix(BF16, TILES * TILE) for _ in range(2)]
    return cute.compile(launch, *inputs, matrix(BF16, TILE), matrix(cutlass.Float32, TILE))
