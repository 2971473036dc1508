"""One CTA: each thread writes a row of 16-bit exponentials, largest one 1. A compile test, never run.

With CARELESS the maximum propagates NaN, for which ptxas compares and selects, and the row goes out backwards, two
elements at a time.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

CARELESS = False
COLUMNS = 16
THREADS = 128


@cute.kernel
def row_max(mX: cute.Tensor, mY: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    rX = cute.make_rmem_tensor(COLUMNS, cutlass.Float32)
    cute.autovec_copy(mX[thread, None], rX)
    largest = rX[0]
    for i in cutlass.range_constexpr(1, COLUMNS):
        largest = (cutlass.max if CARELESS else cute.arch.fmax)(largest, rX[i])
    rY = cute.make_rmem_tensor(COLUMNS, cutlass.BFloat16)
    for i in cutlass.range_constexpr(COLUMNS):
        rY[i] = cute.math.exp2(rX[i] - largest, fastmath=True).to(cutlass.BFloat16)
    if cutlass.const_expr(CARELESS):
        for i in cutlass.range_constexpr(COLUMNS // 2):
            pair = cute.local_tile(mY[thread, None], (2,), (COLUMNS // 2 - 1 - i,))
            cute.autovec_copy(cute.local_tile(rY, (2,), (i,)), pair)
    else:
        cute.autovec_copy(rY, mY[thread, None])


@cute.jit
def launch(mX: cute.Tensor, mY: cute.Tensor):
    row_max(mX, mY).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))


def compile_for_sm90a() -> Any:
    def matrix(dtype: Any) -> Any:
        return cute.runtime.make_fake_compact_tensor(dtype, (THREADS, COLUMNS), stride_order=(1, 0), assumed_align=16)

    return cute.compile(launch, matrix(cutlass.Float32), matrix(cutlass.BFloat16))
