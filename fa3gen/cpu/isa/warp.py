"""Instructions in which the lanes of a warp exchange values (PTX ISA, "Parallel Synchronization ..." and "shfl.sync").

They work on groups of whole warps: lane i of a vector is lane i % 32 of warp i / 32. Where the group is one warp and
the result is one for all its lanes, it comes out as a scalar, which makes what follows cheap.

All lanes named by the member mask have to execute the instruction together; the hardware would wait for them to come.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.forms import emits
from fa3gen.cpu.lanes import Value, spread
from fa3gen.cpu.ptx import Immediate, Instruction, Operand, Pair
from fa3gen.cpu.types import PRED, TYPES, U32, Type

if TYPE_CHECKING:
    from fa3gen.cpu.emitter import Emitter

Match = re.Match[str]
Mask = NDArray[np.bool_]

_WARP = 32
_EVERY_LANE = U32(0xFFFFFFFF)


# ---------------------------------------------------------------------- shfl.sync


@emits(r"shfl\.sync\.(?P<mode>up|down|bfly|idx)\.b32")
def shuffle(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Each lane takes the value of another one; the predicate says whether that lane was in range."""
    destination, a, b, c, members = instruction.operands
    value = emitter.read(a, U32) if not _is_f32(emitter, a) else emitter.read(a, TYPES["f32"])
    type_ = TYPES["f32"] if _is_f32(emitter, a) else U32
    where = f"{emitter.mask()}, g.lanes, {_members(emitter, members)}"
    if isinstance(b, Immediate) and isinstance(c, Immediate):
        source = f"{emitter.keep(constant_sources)}({form['mode']!r}, {b.value}, {c.value}, g.lanes)"
    else:
        source = f"{emitter.keep(sources)}({form['mode']!r}, {emitter.read(b, U32)}, {emitter.read(c, U32)}, g.lanes)"
    function = emitter.keep(exchange)
    if isinstance(destination, Pair):
        lanes = emitter.temporary()
        emitter.emit(f"{lanes} = {source}")
        # The first write could change the registers that the second depends on.
        emitter.write(destination.first, f"{function}({value}, {lanes}[0], {where})", type_)
        emitter.write(destination.second, f"{lanes}[1]", PRED)
    else:
        emitter.write(destination, f"{function}({value}, {source}[0], {where})", type_)


def _is_f32(emitter: Emitter, operand: Operand) -> bool:
    """Whether the value is held as f32, so that it can be moved without views."""
    name = getattr(operand, "name", None)
    return name in emitter.kernel.numbers and emitter.program.types[emitter.kernel.numbers[name]] is TYPES["f32"]


def sources(mode: str, b: Value, c: Value, lane_count: int) -> tuple[NDArray[np.intp], Mask]:
    """The lane that each lane reads from, and whether it was in range (PTX ISA, "shfl.sync").

    `b` and `c` are u32: the lane or distance, and the clamp in bits 0 to 4 with the segment mask in bits 8 to 12.
    """
    lane = np.arange(lane_count) % _WARP
    distance = b.astype(np.intp) & 31
    clamp, segment = c.astype(np.intp) & 31, (c.astype(np.intp) >> 8) & 31
    greatest = (lane & segment) | (clamp & ~segment)
    least = lane & segment
    if mode == "up":
        source = lane - distance
        in_range = source >= greatest
    else:
        source = {"down": lane + distance, "bfly": lane ^ distance, "idx": least | (distance & ~segment)}[mode]
        in_range = source <= greatest
    first_of_warp = np.arange(lane_count) - lane
    return first_of_warp + np.where(in_range, source, lane), in_range


@cache
def constant_sources(mode: str, b: int, c: int, lane_count: int) -> tuple[Any, Mask]:
    """As `sources` for constants; an int for the first where a single warp reads one lane."""
    lanes, in_range = sources(mode, U32(b & 0xFFFFFFFF), U32(c & 0xFFFFFFFF), lane_count)
    if lane_count == _WARP and (lanes == lanes[0]).all():
        return int(lanes[0]), in_range
    return lanes, in_range


def exchange(value: Value, lanes: Any, mask: Mask | None, lane_count: int, members: Value) -> Value:
    """The value of lane `lanes[i]` for lane i. Raises a Hazard where that lane does not execute the instruction."""
    if mask is not None or members is not _EVERY_LANE:
        executing = participants(mask, lane_count, members)
        read = np.broadcast_to(lanes, (lane_count,))
        silent = executing & ~executing[read]
        if silent.any():
            lane = int(silent.argmax())
            raise Hazard(
                Kind.WARP_DIVERGENCE,
                f"lane {lane % _WARP} reads through shfl.sync from lane {int(read[lane]) % _WARP}, "
                "which does not execute it; its value is undefined",
            )
    return value[lanes] if value.ndim else value


# ---------------------------------------------------------------------- vote, elect, redux, activemask


@emits(r"vote\.sync\.(?P<mode>all|any|uni)\.pred")
def vote(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Whether a predicate holds in all lanes, in one, or is the same in all."""
    d, p, members = instruction.operands
    arguments = f"{emitter.read(p, PRED)}, {emitter.mask()}, g.lanes, {_members(emitter, members)}"
    emitter.write(d, f"{emitter.keep(voted)}({form['mode']!r}, {arguments})", PRED)


def voted(mode: str, predicate: Value, mask: Mask | None, lane_count: int, members: Value) -> Value:
    """The vote of each warp (PTX ISA, "vote.sync")."""
    executing = participants(mask, lane_count, members).reshape(-1, _WARP)
    votes = spread(predicate, lane_count).reshape(-1, _WARP)
    every = (votes | ~executing).all(axis=1)
    some = (votes & executing).any(axis=1)
    return _of_each_warp({"all": every, "any": some, "uni": every | ~some}[mode])


@emits(r"vote\.sync\.ballot\.b32")
def ballot(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """The predicate of each lane as one bit."""
    d, p, members = instruction.operands
    arguments = f"{emitter.read(p, PRED)}, {emitter.mask()}, g.lanes, {_members(emitter, members)}"
    emitter.write(d, f"{emitter.keep(balloted)}({arguments})", U32)


def balloted(predicate: Value, mask: Mask | None, lane_count: int, members: Value) -> Value:
    """The bits of each warp; lanes that do not take part give 0 (PTX ISA, "vote.sync.ballot")."""
    return _of_each_warp(_bits(spread(predicate, lane_count) & participants(mask, lane_count, members)))


@emits(r"activemask\.b32")
def active_mask(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """The lanes that execute the instruction, as bits."""
    emitter.write(instruction.operands[0], f"{emitter.keep(active_lanes)}({emitter.mask()}, g.lanes)", U32)


def active_lanes(mask: Mask | None, lane_count: int) -> Value:
    """The bits of each warp (PTX ISA, "activemask")."""
    return _EVERY_LANE if mask is None else _of_each_warp(_bits(mask))


@emits(r"elect\.sync")
def elect(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """One lane of each warp, the lowest that takes part, and its number."""
    destination, members = instruction.operands
    leader = emitter.temporary()
    emitter.emit(f"{leader} = {emitter.keep(elected)}({emitter.mask()}, g.lanes, {_members(emitter, members)})")
    assert isinstance(destination, Pair)
    emitter.write(destination.first, f"{leader}[0]", U32)
    emitter.write(destination.second, f"{leader}[1]", PRED)


def elected(mask: Mask | None, lane_count: int, members: Value) -> tuple[Value, Mask]:
    """The number of the leader in its warp, and a predicate that holds in it alone (PTX ISA, "elect.sync")."""
    if mask is None and members is _EVERY_LANE:
        return U32(0), _first_lanes(lane_count)
    leaders = participants(mask, lane_count, members).reshape(-1, _WARP).argmax(axis=1).astype(U32)
    return _of_each_warp(leaders), np.arange(lane_count, dtype=U32) % U32(_WARP) == leaders.repeat(_WARP)


@cache
def _first_lanes(lane_count: int) -> Mask:
    first: Mask = np.arange(lane_count) % _WARP == 0
    return first


_REDUCTIONS: dict[str, Any] = {
    **{"add": np.add, "min": np.minimum, "max": np.maximum},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
}


@emits(r"redux\.sync\.(?P<reduction>add|min|max)\.(?P<type>u32|s32)")
def reduce_integers(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Sum or extreme over the lanes of a warp."""
    _reduce(emitter, instruction, form, TYPES[form["type"]])


@emits(r"redux\.sync\.(?P<reduction>and|or|xor)\.b32")
def reduce_bits(emitter: Emitter, instruction: Instruction, form: Match) -> None:
    """Bitwise logic over the lanes of a warp."""
    _reduce(emitter, instruction, form, U32)


def _reduce(emitter: Emitter, instruction: Instruction, form: Match, type_: Type) -> None:
    d, a, members = instruction.operands
    arguments = f"{emitter.read(a, type_)}, {emitter.mask()}, g.lanes, {_members(emitter, members)}"
    emitter.write(d, f"{emitter.keep(reduced)}({form['reduction']!r}, {arguments})", type_)


def reduced(reduction: str, value: Value, mask: Mask | None, lane_count: int, members: Value) -> Value:
    """The reduction over the lanes of each warp that take part (PTX ISA, "redux.sync")."""
    type_ = value.dtype.type
    limits = np.iinfo(type_)
    neutral = {"min": limits.max, "max": limits.min, "and": limits.max}.get(reduction, 0)
    values = np.where(participants(mask, lane_count, members), spread(value, lane_count), type_(neutral))
    return _of_each_warp(_REDUCTIONS[reduction].reduce(values.reshape(-1, _WARP), axis=1, dtype=type_))


# ---------------------------------------------------------------------- what they share


def _members(emitter: Emitter, operand: Operand) -> str:
    """The member mask; the usual one of all lanes is always the same object, so that it is told apart at once."""
    if isinstance(operand, Immediate) and operand.value & 0xFFFFFFFF == 0xFFFFFFFF:
        return emitter.keep(_EVERY_LANE)
    return emitter.read(operand, U32)


def participants(mask: Mask | None, lane_count: int, members: Value) -> Mask:
    """The lanes that execute the instruction, which must be those that the member mask names.

    Raises a Hazard if a named lane does not execute it, or a lane that executes it is not named.
    """
    executing = np.ones(lane_count, PRED) if mask is None else mask
    lane = np.arange(lane_count, dtype=U32) % U32(_WARP)
    named = ((members >> lane) & U32(1)).astype(PRED)
    # A warp of the group none of whose lanes is active is not there at all.
    present = executing.reshape(-1, _WARP).any(axis=1).repeat(_WARP)
    different = (named != executing) & present
    if different.any():
        first = int(different.argmax())
        told = spread(members, lane_count)[first]
        state = "is named but does not execute it" if named[first] else "executes it but is not named"
        raise Hazard(
            Kind.WARP_DIVERGENCE,
            f"member mask {int(told):#010x}: lane {first % _WARP} {state}; "
            "the lanes of a member mask have to execute the instruction together",
        )
    return executing


def _of_each_warp(values: NDArray[Any]) -> Value:
    """One value for each warp as a vector over the lanes, or the scalar where there is one warp."""
    return values[0] if len(values) == 1 else values.repeat(_WARP)


def _bits(lanes: Mask) -> NDArray[np.uint32]:
    return np.packbits(lanes.reshape(-1, _WARP), axis=1, bitorder="little").view("<u4").reshape(-1)
