"""The schedule of a copy: one warp, which loads tiles and stores them; a step is a tile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fa3gen.design import boxes
from fa3gen.design.schedule.model import Ring, Role, Schedule, Step
from fa3gen.spec.copying import Copy, CopyRing

WARP = "warp"


def schedule_of(spec: Copy) -> Schedule:
    """The one role, the places of its tiles, and its steps."""
    role = Role(WARP, "warp 0", 1, "copies", "copy_kernel")
    ring = Ring("x", ("x",), boxes.stages(spec), "TMA", WARP, (WARP,), (boxes.tile_bytes(spec),))
    steps = _one_tile() if spec.ring is None else _tiles(spec.ring)
    return Schedule((role,), (ring,), (), tuple(steps))


def _one_tile() -> Iterator[Step]:
    cta = partial(Step, WARP, "cta")
    yield cta("announce", "x", "x")
    yield cta("load", "x", "x", note="by TMA")
    yield cta("wait_full", on="x", note="the tile has landed")
    yield cta("store", "out", note="by TMA")
    yield Step(WARP, "exit", "wait_stores", note="shared memory must outlive the store's reads")


def _tiles(ring: CopyRing) -> Iterator[Step]:
    step, first = partial(Step, WARP), ring.stages - ring.reading
    tiles = "the first tile" if first == 1 else f"the first {first} tiles"
    further = "the next tile" if first == 1 else f"the tile {first} further on"
    left = f" but the last{f' {ring.reading}' * (ring.reading > 1)}" if ring.reading else ""
    yield step("cta", "announce", "x", "x")
    yield step("cta", "load", "x", "x", note=f"by TMA, {tiles}")
    yield step("step", "wait_full", on="x", note="the tile has landed")
    yield step("step", "store", "out", note="by TMA")
    yield step("step", "wait_stores", in_flight=ring.reading, note=f"all stores{left} have read their stages")
    yield step("step", "announce", "x", "x", ahead=first)
    yield step("step", "load", "x", "x", ahead=first, note=f"by TMA, {further}, in the stage that is free")
    yield step("exit", "wait_stores", note="shared memory must outlive the stores' reads")
