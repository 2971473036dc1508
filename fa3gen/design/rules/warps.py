"""Rules about attention whose warps multiply keys of their own, by mma.sync."""

from __future__ import annotations

from collections.abc import Sequence

from fa3gen.design.rules.registry import GENERATOR, Violation, rule
from fa3gen.design.rules.wording import yaml
from fa3gen.hardware import hopper


@rule(kind=GENERATOR, topic="structure")
def warp_kernel(field: str, value: object, rendered: Sequence[object]) -> Violation | None:
    """Products of warps are rendered for few queries, of head dim 64, or with 8 bits 128 as well, in even shares.

    There the 64 rows of a WGMMA take a softmax of 64 rows, of which 16 and fewer are queries.
    """
    if value in rendered:
        return None
    ways_out = " or ".join(yaml(each) for each in rendered)
    return Violation(
        field,
        f"with engine mma {yaml(value)} is not rendered; use {ways_out}, or engine wgmma: extend fwd_packed_kv8_decode",
    )


@rule(kind=GENERATOR, topic="tile")
def keys_of_warps(kv: int, warps: int) -> Violation | None:
    """A warp has equally many of the keys of a tile, in whole pairs of 8: P of 16 keys is an A operand.

    PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
    """
    unit = warps * hopper.MMA_K
    if not unit or kv % unit == 0:  # a tile of no warps is refused elsewhere
        return None
    return Violation(
        "tile.kv",
        f"{warps} warps take {hopper.MMA_K} keys at a time each, and {kv} keys are no whole number of {unit}; use a "
        f"multiple of {unit}",
    )
