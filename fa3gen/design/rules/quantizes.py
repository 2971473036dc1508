"""Rules about quantisation: head dims, threads and rows of a tile, rotation, transposition, registers."""

from __future__ import annotations

from collections.abc import Sequence

from fa3gen.design.quantizing import LANES, QUAD, ROWS_OF_MMA, UNIT, WIDTH, WORD
from fa3gen.design.rules.registry import GENERATOR, HARDWARE, Violation, rule
from fa3gen.design.rules.wording import around, too_many_registers
from fa3gen.hardware import hopper
from fa3gen.spec.quantizing import ScaledPer


@rule(kind=GENERATOR, topic="tile")
def quantize_head_dim(head_dim: int) -> Violation | None:
    """Each of the 8 threads of a row has whole vectors of 8 elements."""
    if head_dim % WIDTH == 0:
        return None
    return Violation(
        "problem.head_dim",
        f"{LANES} threads of a row have vectors of {WIDTH // LANES} elements: a multiple of {WIDTH}, not {head_dim}; "
        f"use {around(head_dim, WIDTH)}",
    )


@rule(kind=GENERATOR, topic="tile")
def quantize_hadamard(head_dim: int) -> Violation | None:
    """Sylvester's Hadamard matrices, which butterflies multiply by, have powers of two as size."""
    if head_dim & (head_dim - 1) == 0:
        return None
    return Violation(
        "problem.rotate",
        f"the Hadamard matrices that butterflies multiply by have 2, 4, 8 rows and so on, not {head_dim}; use rotate: "
        "false, or a head_dim that is a power of two",
    )


@rule(kind=HARDWARE, topic="tile")
def quantize_threads(threads: int) -> Violation | None:
    """At most 1024 threads. CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""
    if threads <= hopper.THREADS_PER_CTA:
        return None
    return Violation("tile.threads", f"a CTA has at most {hopper.THREADS_PER_CTA} threads, not {threads}; use fewer")


@rule(kind=GENERATOR, topic="tile")
def quantize_warps(threads: int) -> Violation | None:
    """Rows are exchanged within warps, which have to be whole."""
    if threads % hopper.WARP == 0:
        return None
    above = -(-threads // hopper.WARP) * hopper.WARP
    return Violation("tile.threads", f"a CTA has whole warps of {hopper.WARP} threads, not {threads}; use {above}")


@rule(kind=GENERATOR, topic="tile")
def quantize_rows(rows: int, threads: int, *, rotate: bool) -> Violation | None:
    """All threads have the same number of rows; of an mma, which rotates, two."""
    lanes = QUAD if rotate else LANES
    at_once = threads // lanes * (ROWS_OF_MMA if rotate else 1)
    if rows % at_once == 0:
        return None
    above = -(-rows // at_once) * at_once
    return Violation(
        "tile.rows",
        f"{threads} threads, {lanes} for {'two rows of an mma' if rotate else 'a row'}, have {at_once} rows at once: a "
        f"multiple of it, not {rows}; use {above}",
    )


@rule(kind=GENERATOR, topic="tile")
def quantize_transposed(rows: int, threads: int, lanes: int = LANES) -> Violation | None:
    """Four rows of a column are a word of shared memory, 16 a vector; of a column's vectors 8 are exchanged."""
    of_thread, units = rows * lanes // threads, LANES * UNIT
    if rows % units:
        above = -(-rows // units) * units
        return Violation(
            "tile.rows",
            f"transposed, a column of a tile has a multiple of {LANES} vectors of {UNIT} rows, which are exchanged "
            f"against bank conflicts: {units} rows, not {rows}; use {above}",
        )
    if of_thread % WORD == 0:
        return None
    return Violation(
        "tile.threads",
        f"transposed, a thread packs {WORD} rows of a column into a word, and {threads} threads have {of_thread} of "
        f"{rows} rows each; use {rows * lanes // WORD}",
    )


@rule(kind=GENERATOR, topic="output")
def quantize_columns_of_tokens(scale: ScaledPer) -> Violation | None:
    """What has its sequence contiguous is V, of whose rows P V takes the sum: no factor of a row comes out of that."""
    if scale != "token":
        return None
    return Violation(
        "problem.scale",
        "transposed is V, of whose rows P V is a sum, out of which no factor of a row can be taken; use scale: head",
    )


@rule(kind=GENERATOR, topic="output")
def quantize_permuted(permute_keys: bool, transpose: bool) -> Violation | None:
    """The order of keys is what V is given in whose sequence is contiguous."""
    if transpose or not permute_keys:
        return None
    return Violation(
        "problem.permute_keys",
        "keys are permuted of V whose sequence is contiguous; leave permute_keys out, or use transpose: true",
    )


@rule(kind=HARDWARE, topic="registers")
def quantize_registers(threads: int, ctas: int, held: Sequence[tuple[str, int]]) -> Violation | None:
    """All threads of the CTAs that an SM has room for within its 65,536 registers, handed out in units of 8 per thread.

    CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    """
    wrong = too_many_registers(threads, ctas, held, "rows")
    if wrong is None:
        return None
    fewer_ctas, message = wrong
    return Violation("tile.per_sm" if fewer_ctas else "tile.rows", message)


@rule(kind=HARDWARE, topic="shared memory")
def quantize_smem(ctas: int, smem: int) -> Violation | None:
    """The CTAs that an SM has room for share its shared memory, of which each takes 1 KB more.

    CUDA C++ Programming Guide, "Shared Memory" of compute capability 9.0.
    """
    total = ctas * (smem + hopper.SMEM_RESERVED)
    if total <= hopper.SMEM_PER_SM:
        return None
    most = hopper.SMEM_PER_SM // (smem + hopper.SMEM_RESERVED)
    if not most:
        return Violation("tile.rows", f"a CTA takes {smem} bytes of shared memory; use fewer rows")
    return Violation(
        "tile.per_sm",
        f"{ctas} CTAs of {smem} + {hopper.SMEM_RESERVED} bytes of shared memory are {total} > "
        f"{hopper.SMEM_PER_SM}; use at most {most}",
    )
