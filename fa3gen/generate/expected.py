"""What the compiled code of a module has to show: filled in from a plan, held against a census of the code.

Importing this module needs nothing but the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SassExpectation:
    """What a plan predicts of the code that ptxas makes, all kernels added up. None means: no prediction, not checked.

    `waits` counts WARPGROUP.DEPBAR. A running maximum takes one FMNMX an element, of which there are at least
    `min_maxima`; with a maximum that propagates NaN ptxas instead writes FSETP and FSEL, two of each an element, so the
    comparisons of numbers (FSETP) are at most `max_comparisons`. Stores are counted by `census.sass.store_kind`; a kind
    that is not listed must not occur.
    """

    waits: int | None = None
    min_maxima: int | None = None
    max_comparisons: int | None = None
    global_stores: Mapping[str, int] | None = None
    shared_stores: Mapping[str, int] | None = None


@dataclass(frozen=True)
class Expectation:
    """What a plan predicts of the compiled module, all kernels added up. None means: no prediction, not checked.

    Counts are static instructions in the PTX. `wgmma` maps (m, n, k, source of A: "smem" or "registers") to a count, or
    to None for "at least one"; a kind it does not list must not occur. `mma` counts products of single warps.
    `setmaxnreg` maps "dec 24" and the like to counts. `smem_bytes` is the shared memory of one CTA and `max_registers`
    a bound on registers per thread, both of the hungriest kernel. `spills` counts LDL and STL in the SASS.
    `injected_waits` counts waits that ptxas added because a product's registers are touched while it runs,
    `performance_notes` its other warnings of lost speed. `sass` is about the code that ptxas makes of it all.
    """

    kernels: int | None = None
    wgmma: Mapping[tuple[int, int, int, str], int | None] | None = None
    wgmma_commits: int | None = None
    wgmma_waits: int | None = None
    tma_loads: int | None = None
    tma_stores: int | None = None
    cp_async: int | None = None
    mbarrier_inits: int | None = None
    mbarrier_expect_tx: int | None = None
    ldmatrix: int | None = None
    stmatrix: int | None = None
    tanh: int | None = 0
    mma: int | None = 0
    setmaxnreg: Mapping[str, int] | None = None
    smem_bytes: int | None = None
    max_registers: int | None = None
    stack_bytes: int | None = 0
    spills: int | None = 0
    serialized_wgmma: bool | None = False
    injected_waits: int | None = 0
    performance_notes: int | None = 0
    sass: SassExpectation = SassExpectation()
