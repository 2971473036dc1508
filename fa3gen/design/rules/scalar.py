"""Rules about scalar products: who computes what, and in which pieces."""

from __future__ import annotations

import math

from fa3gen.design.footprint import SCALAR_LANES, SCALAR_VECTOR
from fa3gen.design.rules.registry import GENERATOR, Violation, rule
from fa3gen.design.rules.wording import around, remainder
from fa3gen.hardware import hopper


@rule(kind=GENERATOR, topic="tile")
def scalar_grid(field: str, extent: int, threads: int) -> Violation | None:
    """Scalar products spread (threads / 16) x 16 threads evenly over the rows and columns of a tile.

    `tile.q` is the rows; every other field is a number of columns.
    """
    rows = field == "tile.q"
    share = threads // SCALAR_LANES if rows else SCALAR_LANES
    if extent % share == 0:
        return None
    return Violation(
        field,
        f"{threads} threads form {threads // SCALAR_LANES} rows x {SCALAR_LANES} columns, and "
        f"{field} is {remainder(extent, share)}; use {around(extent, share)}",
    )


@rule(kind=GENERATOR, topic="O = P V")
def scalar_vector(head_dim: int) -> Violation | None:
    """A thread reads its adjacent columns of V as part of one 16-byte vector.

    A swizzle moves vectors of 16 bytes as wholes, so what straddles two of them is not contiguous in shared memory.
    """
    columns, vector = head_dim // SCALAR_LANES, SCALAR_VECTOR
    if columns == 0 or vector % columns == 0:
        return None
    return Violation(
        "problem.head_dim",
        f"a thread owns {head_dim} / {SCALAR_LANES} = {columns} adjacent columns of V, and {columns} elements do not "
        f"divide a 16-byte vector of {vector}; use 16, 32, 64 or 128, or wgmma for pv",
    )


@rule(kind=GENERATOR, topic="loads")
def copy_rows(field: str, rows: int, head_dim: int, threads: int) -> Violation | None:
    """All threads of the CTA copy whole rows of a tile together, 16 bytes each, pass after pass."""
    vectors = max(1, head_dim // SCALAR_VECTOR)
    if threads % vectors:
        return Violation(
            "tile.threads",
            f"a row is {head_dim} / {SCALAR_VECTOR} = {vectors} vectors of 16 bytes, and {threads} threads copy no "
            f"whole number of rows at a time; use {around(threads, math.lcm(vectors, hopper.WARP))}",
        )
    share = threads // vectors
    if rows % share == 0:
        return None
    return Violation(
        field,
        f"{threads} threads copy {threads} / ({head_dim} / {SCALAR_VECTOR}) = {share} rows at a time, and "
        f"{field} is {remainder(rows, share)}; use {around(rows, share)}",
    )


@rule(kind=GENERATOR, topic="tile")
def naive_scores(q: int, kv: int, threads: int) -> Violation | None:
    """Without tiles in shared memory one thread computes one score."""
    if q * kv == threads:
        return None
    return Violation(
        "tile.threads", f"one thread computes one score of the tile: {q} x {kv} = {q * kv} threads, not {threads}"
    )


@rule(kind=GENERATOR, topic="tile")
def naive_rows(head_dim: int, threads: int) -> Violation | None:
    """Without tiles in shared memory one thread computes one element of O, and a CTA whole rows."""
    if threads % head_dim == 0:
        return None
    return Violation(
        "tile.threads",
        f"one thread computes one element of O, in whole rows, and {threads} is "
        f"{threads // head_dim} x {head_dim} + {threads % head_dim}; use {around(threads, head_dim)}",
    )


@rule(kind=GENERATOR, topic="P")
def scattered_scores(warpgroups: int) -> Violation | None:
    """The scalar PV product after WGMMA QK divides the rows among the four warps of one warpgroup."""
    if warpgroups == 1:
        return None
    return Violation(
        "tile.warpgroups",
        f"scores scattered to shared memory are shared by 1 warpgroup, not {warpgroups}; "
        "use warpgroups 1 with tile.q 64, or wgmma for pv",
    )
