"""Branches, barriers, mbarriers, fences and registers (PTX ISA, "Control Flow", "Parallel Synchronization")."""

from __future__ import annotations

import re

from fa3gen.cpu.emitter import Emitter
from fa3gen.cpu.forms import emits
from fa3gen.cpu.ptx import Address, Immediate, Instruction, PtxError, Symbol
from fa3gen.cpu.types import PRED, U32, U64

_SHARED = r"(?:\.shared(?:::cta)?)"


@emits(r"bra(?:\.uni)?", destinations=0)
def branch(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """The translator ends a block with it."""


@emits(r"(?P<op>ret|exit)(?:\.uni)?", destinations=0)
def finish(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """The translator ends a block with it."""


@emits(r"trap", destinations=0)
def trap(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """The kernel gives up."""
    emitter.emit("raise Hazard(Kind.TRAP, 'the kernel executes trap')")


@emits(
    r"(?P<op>bar|barrier)(?:\.cta)?\.(?P<action>sync|arrive)(?:\.aligned)?",
    destinations=0,
    blocking=True,
    observable=True,
)
def named_barrier(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """`bar.sync a{, b}`, `bar.arrive a, b`: b threads, or all of the CTA."""
    number = emitter.read(instruction.operands[0], U32)
    threads = emitter.read(instruction.operands[1], U32) if len(instruction.operands) > 1 else "None"
    wait = form["action"] == "sync"
    if not wait and threads == "None":
        raise PtxError(f"PTX line {instruction.line}: bar.arrive needs a thread count")
    emitter.emit(
        f"if not g.cta.named_barriers.arrive(g, {number}, {threads}, {emitter.mask()}, wait={wait}): return WAIT"
    )


@emits(r"bar\.warp\.sync", destinations=0, observable=True)
def warp_barrier(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Orders the accesses of the warp's lanes."""
    emitter.emit(f"g.sync_lanes({emitter.read(instruction.operands[0], U32)}, {emitter.mask()})")


@emits(rf"mbarrier\.init{_SHARED}\.b64", destinations=0, observable=True)
def mbarrier_init(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """`[address], count`."""
    place, count = instruction.operands
    emitter.emit(
        f"g.cta.mbarriers.initialise(g, {emitter.address(place)}, {emitter.read(count, U32)}, {emitter.mask()})"
    )


@emits(rf"mbarrier\.inval{_SHARED}\.b64", destinations=0, observable=True)
def mbarrier_inval(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """`[address]`."""
    emitter.emit(f"g.cta.mbarriers.invalidate(g, {emitter.address(instruction.operands[0])}, {emitter.mask()})")


def _state_operands(instruction: Instruction) -> int:
    """An arrive may name a register for the phase's state, or not."""
    return 0 if isinstance(instruction.operands[0], Address) else 1


@emits(
    rf"mbarrier\.arrive(?P<expect>\.expect_tx)?(?:\.release\.cta)?{_SHARED}\.b64",
    destinations=_state_operands,
    observable=True,
)
def mbarrier_arrive(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """`{state,} [address]{, count}` or, with expect_tx, `{state,} [address], bytes`. The state is not modelled."""
    states = _state_operands(instruction)
    place, *rest = instruction.operands[states:]
    method = "arrive_expect" if form["expect"] else "arrive"
    amount = emitter.read(rest[0], U32) if rest else emitter.constant(1, U32)
    emitter.emit(f"g.cta.mbarriers.{method}(g, {emitter.address(place)}, {amount}, {emitter.mask()})")
    if states and instruction.operands[0] != Symbol("_"):
        emitter.write(instruction.operands[0], emitter.constant(0, U64), U64)


@emits(rf"mbarrier\.expect_tx(?:\.relaxed\.cta)?{_SHARED}\.b64", destinations=0, observable=True)
def mbarrier_expect(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """`[address], bytes`."""
    place, size = instruction.operands
    emitter.emit(f"g.cta.mbarriers.expect(g, {emitter.address(place)}, {emitter.read(size, U32)}, {emitter.mask()})")


@emits(
    rf"mbarrier\.(?:try|test)_wait\.parity(?:\.acquire\.cta)?{_SHARED}\.b64",
    blocking=True,
)
def mbarrier_wait(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """`done, [address], parity{, time limit}`. Testing counts as trying: the thread was merely slow to test."""
    done, place, parity, *_ = instruction.operands
    answer = emitter.temporary()
    emitter.emit(
        f"{answer} = g.cta.mbarriers.wait(g, {emitter.address(place)}, {emitter.read(parity, U32)}, {emitter.mask()})"
    )
    emitter.emit(f"if {answer} is None: return WAIT")
    emitter.write(done, answer, PRED)


@emits(r"fence\.proxy\.async(?P<space>|\.shared::cta|\.global)", destinations=0, observable=True)
def proxy_fence(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Makes this warp's generic accesses, and those it knows of, visible to the async proxy."""
    if form["space"] != ".global":  # global memory is not watched
        emitter.emit("g.cta.clocks.fence(g.warps, PROXY)")


@emits(r"fence\.mbarrier_init\.release\.cluster", destinations=0, observable=True)
def mbarrier_init_fence(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Makes initialised mbarriers visible to the async proxy."""
    emitter.emit("g.cta.clocks.fence(g.warps, INIT)")


@emits(r"fence(?:\.sc|\.acq_rel)?\.(?P<scope>cta|cluster|gpu|sys)", destinations=0, observable=True)
def fence(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Memory is sequentially consistent here; a fence orders CTAs, with strong operations beside it, and no warps."""
    if form["scope"] in ("gpu", "sys"):
        emitter.emit(f"g.cta.order.fence(g, {emitter.mask()})")


@emits(r"membar\.(?P<scope>cta|gl|sys)", destinations=0, observable=True)
def membar(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """As fence."""
    if form["scope"] != "cta":
        emitter.emit(f"g.cta.order.fence(g, {emitter.mask()})")


@emits(r"setmaxnreg\.(?P<action>inc|dec)\.sync\.aligned\.u32", destinations=0, blocking=True, observable=True)
def set_registers(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Takes registers from the CTA's pool or gives them back."""
    count = instruction.operands[0]
    if not isinstance(count, Immediate):
        raise PtxError(f"PTX line {instruction.line}: setmaxnreg needs a constant")
    emitter.emit(f"if not g.cta.registers.change(g, {form['action']!r}, {count.value}, {emitter.mask()}): return WAIT")


@emits(r"nanosleep\.u32", destinations=0, observable=True)
def sleep(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """The model has no time."""


@emits(r"griddepcontrol\.(?:wait|launch_dependents)", destinations=0)
def dependent_launch(emitter: Emitter, instruction: Instruction, form: re.Match[str]) -> None:
    """Launches follow one another."""
