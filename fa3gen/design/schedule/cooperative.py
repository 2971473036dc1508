"""The steps of kernels whose warps all do the same, k2 to k4: one tile of queries for each CTA."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fa3gen.design import footprint
from fa3gen.design.schedule.model import Step
from fa3gen.spec.model import CpAsyncLoad, Forward, NoMask, SmemHandoff, TmaLoad, WgmmaProduct

WARPS = "warps"
CTA_BARRIER = "CTA barrier"
P_BARRIER = "barrier of the warpgroup"

_step = partial(Step, WARPS)
_warp_0 = partial(Step, WARPS, only="first_warp")


def steps(spec: Forward) -> tuple[Step, ...]:
    """The steps of all warps, and those that only warp 0 takes."""
    loads = {"sync": _sync, "cp_async": _cp_async, "tma": _tma}[spec.load.engine]
    return (*loads(spec), *_end(spec))


def _sync(spec: Forward) -> Iterator[Step]:
    yield _step("cta", "load", "Q", "q", note="through registers")
    yield _step("step", "load", "K", "kv")
    yield _step("step", "sync", on=CTA_BARRIER, note="K is complete; in the first step Q is, too")
    yield from _scores(spec)
    yield _step("step", "sync", "K", CTA_BARRIER, note="every warp has read K")
    yield _step("step", "load", "V", "kv", note="in K's place")
    yield from _softmax(spec)
    yield _step("step", "sync", on=CTA_BARRIER, note="V is complete")
    yield from _output(spec)
    yield _step("step", "sync", "V", CTA_BARRIER, note="every warp has read V: the next K may take its place")


def _cp_async(spec: Forward) -> Iterator[Step]:
    assert isinstance(spec.load, CpAsyncLoad)
    stages = spec.load.kv_stages
    yield _step("cta", "load", "Q", "q", note="by cp.async, in one group with the first K and V")
    yield _step("ahead", "load", "K", "kv")
    yield _step("ahead", "load", "V", "kv")
    yield _step("ahead", "commit", note="by cp.async, the last tile of keys first")
    yield _step("step", "wait_copies", in_flight=stages - 1)
    yield _step(
        "step", "sync", on=CTA_BARRIER, note=f"K and V have landed; {stages - 1} of {stages} groups stay in flight"
    )
    yield from _scores(spec)
    yield from _softmax(spec)
    yield from _output(spec)
    yield _step("step", "sync", "K, V", CTA_BARRIER, note="every warp has read K and V")
    yield _step("step", "load", "K", "kv", ahead=stages)
    yield _step("step", "load", "V", "kv", ahead=stages)
    yield _step("step", "commit", note=f"the tile {_ahead(stages)}, in the stage just read")
    if not isinstance(spec.mask, NoMask):
        yield _step("end", "wait_copies", note="where no key is visible, nobody has waited for Q")


def _tma(spec: Forward) -> Iterator[Step]:
    assert isinstance(spec.load, TmaLoad)
    stages, shared = spec.load.kv_stages, spec.load.barrier == "shared"
    k, v = ("kv", "kv") if shared else ("k", "v")
    yield _warp_0("cta", "announce", "Q", "q")
    yield _warp_0("cta", "load", "Q", "q", note="by TMA")
    yield from _filled(spec, k, v)
    yield _step("tile", "wait_full", on="q", note="Q has landed")
    if footprint.q_in_registers(spec):
        yield _step("tile", "read", "Q", note="by ldmatrix, to stay in registers")
    yield _step("step", "wait_full", on=k)
    yield from _scores(spec)
    if not shared:
        yield _step("step", "release", on=k, note="K has been read")
    if spec.softmax.softcap:
        yield _step("step", "cap", note="tanh(scale S / softcap)")
    yield from _softmax(spec)
    if not shared:
        yield _step("step", "wait_full", on=v)
    yield from _output(spec)
    yield _step("step", "release", on=v, note="K and V have been read" if shared else "V has been read")
    yield from _filled(spec, k, v, ahead=stages)


def _filled(spec: Forward, k: str, v: str, ahead: int = 0) -> Iterator[Step]:
    """Fill a stage of the rings: before the first step, and in each step for a later one."""
    place = partial(_warp_0, "step" if ahead else "ahead")
    note = f"the tile {_ahead(ahead)}, when the stage is free" if ahead else "by TMA, the last tile of keys first"
    yield place("wait_empty", on=k, ahead=ahead)
    yield place("load", "K", k, ahead=ahead)
    if k != v:
        yield place("wait_empty", on=v, ahead=ahead)
    yield place("load", "V", v, ahead=ahead, note=note)


def _scores(spec: Forward) -> Iterator[Step]:
    yield from _product("S", isinstance(spec.qk, WgmmaProduct))
    if spec.handoff.through == "smem_f32" and isinstance(spec.qk, WgmmaProduct):
        yield _step("step", "store", "S", note="f32, from the accumulator to shared memory")


def _product(what: str, wgmma: bool) -> Iterator[Step]:
    if wgmma:
        yield _step("step", "product", what)
        yield _step("step", "wait_products", note="by wgmma; no group stays in flight")
    else:
        yield _step("step", "product", what, note="by multiply-adds")


def _softmax(spec: Forward) -> Iterator[Step]:
    yield _step("step", "mask", note="boundary tiles only")
    yield _step("step", "softmax", note="P = 2^(S - max); O and sums rescaled")
    if isinstance(spec.handoff, SmemHandoff):
        yield _step("step", "store", "P")
        yield _step("step", "sync", on=P_BARRIER, note="16 bits, by stmatrix; fence.proxy.async")


def _output(spec: Forward) -> Iterator[Step]:
    yield from _product("O", isinstance(spec.pv, WgmmaProduct))


def _end(spec: Forward) -> Iterator[Step]:
    if spec.softmax.sink:
        yield _step("end", "read_sink", note="from global memory")
    if spec.outputs.lse:
        yield _step("end", "store", "LSE", note="from registers, if asked for")
    if not isinstance(spec.pv, WgmmaProduct):
        yield _step("end", "store", "O", note="from registers")
        return
    if spec.outputs.o == "direct":
        yield _step("end", "store", "O", note="from registers, 16 bytes at a time")
        return
    yield _step("end", "sync", "Q", CTA_BARRIER)
    yield _step("end", "gather", "O")
    yield _step("end", "sync", on=CTA_BARRIER, note="by stmatrix, in Q's place, when all have read Q")
    yield _warp_0("end", "store", "O")
    yield _warp_0("end", "wait_stores", note="by TMA; shared memory must outlive its reads")


def _ahead(stages: int) -> str:
    return "next in line" if stages == 1 else f"{stages} further on"
