"""The schedule of a GEMM: its roles, its ring, and what each role does in which order.

A tile is one of D, a step takes `tile.k` of the sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fa3gen.design import gemm
from fa3gen.design.schedule.model import Ring, Role, Schedule, Step
from fa3gen.hardware import hopper
from fa3gen.spec.gemm import Gemm
from fa3gen.spec.model import WgmmaProduct

WARPS, PRODUCER, CONSUMERS = "warps", "producer", "consumers"
CTA_BARRIER = "CTA barrier"
KERNEL = "matmul_kernel"


def schedule_of(spec: Gemm) -> Schedule:
    """Derive the schedule of a checked spec."""
    warps = gemm.computing_threads(spec) // hopper.WARP
    stages = spec.load.stages
    if gemm.specialized(spec):
        roles: tuple[Role, ...] = (
            Role(PRODUCER, f"warp {warps}", 1, "copies A and B", "load"),
            Role(CONSUMERS, "consumers", warps, "multiply", "consume", peeled=int(not gemm.two_levels(spec))),
        )
        steps = (*_produce(), *_consume(spec))
        readers = CONSUMERS
    else:
        roles = (Role(WARPS, "all warps", warps, "load and multiply", KERNEL),)
        steps = tuple(_tma(stages) if isinstance(spec.product, WgmmaProduct) else _cp_async(stages))
        readers = WARPS
    ring = partial(Ring, "ab", ("A", "B"), stages)
    if spec.load.engine == "cp_async":
        return Schedule(roles, (ring("cp.async", WARPS, (WARPS,), prefetched=stages - 1),), (), steps)
    sizes = gemm.stage_bytes(spec)
    tma = ring("TMA", roles[0].name, (readers,), sizes, empty_arrivals=warps)
    return Schedule(roles, (tma,), (), steps)


def _cp_async(stages: int) -> Iterator[Step]:
    step = partial(Step, WARPS)
    yield step("ahead", "load", "A", "ab")
    yield step("ahead", "load", "B", "ab")
    yield step("ahead", "commit", note=f"by cp.async; {stages - 1} steps ahead")
    yield step("step", "wait_copies", in_flight=stages - 2)
    yield step("step", "sync", "A, B", CTA_BARRIER, note="A and B have landed, and all have read the step before")
    yield step("step", "load", "A", "ab", ahead=stages - 1)
    yield step("step", "load", "B", "ab", ahead=stages - 1)
    yield step("step", "commit", note=f"the step {stages - 1} further on, in the stage of the step before")
    yield step("step", "product", "D", note="by multiply-adds")
    yield step("end", "store", "D", note="from registers")


def _fill(who: str, place: str, ahead: int, note: str, only: str = "") -> Iterator[Step]:
    """Fill a stage of the ring by TMA."""
    yield Step(who, place, "wait_empty", on="ab", ahead=ahead, only=only)  # type: ignore[arg-type]
    yield Step(who, place, "load", "A", "ab", ahead=ahead, only=only)  # type: ignore[arg-type]
    yield Step(who, place, "load", "B", "ab", ahead=ahead, only=only, note=note)  # type: ignore[arg-type]


def _tma(stages: int) -> Iterator[Step]:
    step = partial(Step, WARPS)
    yield from _fill(WARPS, "ahead", 0, "by TMA", "first_warp")
    yield step("step", "wait_full", on="ab")
    yield step("step", "product", "D")
    yield step("step", "wait_products", note="by wgmma; no group stays in flight")
    yield step("step", "release", on="ab", note="A and B have been read")
    yield from _fill(WARPS, "step", stages, f"the step {stages} further on, when the stage is free", "first_warp")
    yield step("end", "sync", "A", CTA_BARRIER)
    yield step("end", "gather", "D")
    yield step("end", "sync", on=CTA_BARRIER, note="by stmatrix, in A's place, when all have read A")
    yield step("end", "store", "D", only="first_warp")
    yield step("end", "wait_stores", only="first_warp", note="by TMA; shared memory must outlive its reads")


def _produce() -> Iterator[Step]:
    yield from _fill(PRODUCER, "step", 0, "by TMA, when a stage is free")
    yield Step(PRODUCER, "end", "next", note="dealt out in turn")


def _consume(spec: Gemm) -> Iterator[Step]:
    if gemm.two_levels(spec):
        yield from _two_levels()
    else:
        yield from _one_level(spec)
    yield from _store(spec)


def _two_levels() -> Iterator[Step]:
    step = partial(Step, CONSUMERS, "step")
    yield step("wait_full", on="ab")
    yield step("product", "D", note="by wgmma, of this step alone")
    yield step("wait_products")
    yield step("release", on="ab", note="the step is complete, its stage has been read")
    yield step("add_step", note="to D, in float32")


def _one_level(spec: Gemm) -> Iterator[Step]:
    overlap, registers = gemm.overlapped(spec), gemm.a_in_registers(spec)
    read = ["read"] * registers
    for place, which in (("tile", "the first step"), ("step", "a step other than the first")):
        of = partial(Step, CONSUMERS, place)  # type: ignore[arg-type]
        later = place == "step"
        yield of("wait_full", on="ab")
        if later and not overlap:
            yield of("wait_products")
            yield of("release", on="ab", ahead=-1, note="the step before is complete, its stage has been read")
        for kind in read:
            yield of(kind, "A")  # type: ignore[arg-type]
        yield of("product", "D", note=f"by wgmma, of {which}")
        if later and overlap:
            yield of("wait_products", in_flight=1)
            yield of("release", on="ab", ahead=-1, note="the step before is complete, its stage has been read")
    yield Step(CONSUMERS, "end", "wait_products")
    yield Step(CONSUMERS, "end", "release", on="ab", note="D is complete")


def _store(spec: Gemm) -> Iterator[Step]:
    end = partial(Step, CONSUMERS, "end")
    if spec.d.add_c:
        yield end("add_c", note="part by part, from global memory")
    yield end("wait_stores")
    yield end("gather", "D")
    how = "stmatrix and " * (spec.d_element.bytes == hopper.BYTES_16BIT)
    note = f"by {how}TMA, {gemm.chunk_columns(spec)} columns at a time"
    yield end("store", "D", note=note)
    yield end("next", note="dealt out in turn")
    yield Step(CONSUMERS, "exit", "wait_stores", note="shared memory must outlive the stores' reads")
