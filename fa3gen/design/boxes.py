"""What follows from the box of a copy: its tensor map, tiles, and shared memory.

A tile is whole rows of the tensor: as many boxes side by side as a row needs. It is loaded into one stage of a ring,
and stored out of it.
"""

from __future__ import annotations

import math

from fa3gen.design.footprint import OPERAND_ALIGN, Region
from fa3gen.hardware import hopper
from fa3gen.spec.model import Copy

# Of a tensor map, beside those of the tensor: where a sequence ends, and what brings the address back.
PACKED_DIMENSIONS = 2
OTHER_REGISTERS = 40  # of a thread: addresses, coordinates, counters and predicates


def packed(spec: Copy) -> bool:
    """Whether rows belong to sequences, whose offsets a call is given."""
    return spec.problem.layout == "packed"


def folded(spec: Copy) -> bool:
    """Whether rows are split in two dimensions of the tensor map, so that one box is a tile."""
    return spec.box.wide == "folded"


def boxes(spec: Copy) -> int:
    """Boxes of the spec's extents that lie side by side in a tile: a row, the last of them cut short where it ends."""
    return -(-spec.problem.row // spec.box.extents[-1])


def tma_box(spec: Copy) -> tuple[int, ...]:
    """Extents of the box that one TMA copy moves, as its tensor map has them: along the row first.

    Folded rows take one more dimension, packed rows PACKED_DIMENSIONS of extent 1.
    """
    parts = (boxes(spec),) if folded(spec) else ()
    return (*reversed(spec.box.extents), *parts, *(1,) * (PACKED_DIMENSIONS * packed(spec)))


def copies(spec: Copy) -> int:
    """TMA copies that move a tile, each way."""
    return 1 if folded(spec) else boxes(spec)


def box_bytes(spec: Copy) -> int:
    """Bytes of one box of the spec's extents."""
    return math.prod(spec.box.extents) * spec.element.bytes


def tile_bytes(spec: Copy) -> int:
    """Bytes of a tile in shared memory; what reaches past the end of a row takes its place there, too."""
    return boxes(spec) * box_bytes(spec)


def stages(spec: Copy) -> int:
    """Places for a tile in shared memory."""
    return 1 if spec.ring is None else spec.ring.stages


def shared_memory_map(spec: Copy) -> list[Region]:
    """One tile, or a ring of them; barriers come behind it."""
    count, extents = stages(spec), " x ".join(map(str, (*spec.box.extents, spec.element.bytes)))
    side_by_side = f"{boxes(spec)} x " if boxes(spec) > 1 else ""
    formula = f"{side_by_side}{extents}"
    if spec.ring is not None:
        formula = f"{count} stage{'s' * (count > 1)} x {formula}"
    return [Region("sX", count * tile_bytes(spec), formula, OPERAND_ALIGN, "x")]


def barrier_bytes(spec: Copy) -> int:
    """Bytes of mbarriers: a full one for each stage. A stage is empty when its store has read it, which a wait says."""
    return hopper.MBARRIER_BYTES * stages(spec)
