"""The smallest kernel that shows whether the DSL compiles here: y[i] = x[i]. `fa3gen doctor` compiles it."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute

ELEMENTS = 128


@cute.kernel
def copy_kernel(x: cute.Tensor, y: cute.Tensor) -> None:
    """One thread for each element."""
    thread, _, _ = cute.arch.thread_idx()
    y[thread] = x[thread]


@cute.jit
def copy(x: cute.Tensor, y: cute.Tensor) -> None:
    """Launch one CTA on two vectors of `ELEMENTS` floats."""
    copy_kernel(x, y).launch(grid=(1, 1, 1), block=(ELEMENTS, 1, 1))


def compile_for_sm90a() -> Any:
    """Compile with stand-ins for the tensors; needs no GPU."""
    vector = cute.runtime.make_fake_compact_tensor(cutlass.Float32, (ELEMENTS,))
    return cute.compile(copy, vector, vector)
