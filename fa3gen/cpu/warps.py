"""A group of warps at one program counter: registers, active lanes, and how groups part and meet again.

All warps of a group run an instruction together, as one vector operation. A branch on which whole warps differ splits
the group; the parts wait for each other where the branch's sides meet. A branch on which lanes of one warp differ runs
both sides one after the other under a mask, as the hardware does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.flow import EXIT
from fa3gen.cpu.lanes import NOBODY
from fa3gen.cpu.translate import SPLIT
from fa3gen.cpu.truth import count_nonzero, every, some
from fa3gen.cpu.wgmma import InFlight

Mask = NDArray[np.bool_]


@dataclass
class Divergence:
    """Lanes that take another side: when block `reconverge` is reached, `pending` runs first, then all of `mask`."""

    reconverge: int
    mask: Mask | None
    pending: tuple[int, Mask] | None


@dataclass
class Rendezvous:
    """Warps that parted: those that reach block `reconverge` wait there for the others."""

    reconverge: int
    expected: set[int]
    arrived: list[Group] = field(default_factory=list)


class Group:
    """Warps of one CTA that move together. Lanes count through all of them: lane i is lane i % 32 of warp i / 32."""

    def __init__(self, cta: Any, warps: list[int]) -> None:
        """Warps at the first block, all lanes active, no register written."""
        self.cta = cta
        self.block = 0
        self.mask: Mask | None = None
        self.registers: list[Any] = [None] * cta.program.register_count
        self.frames: list[Divergence | Rendezvous] = []
        self.parked = False
        self.waits_for: Any = None
        self.answer_now = False  # a wait may answer "not yet"
        self.polled_at = -1  # what the CTA's progress was when the group last polled global memory
        self.ticket: tuple[int, int] | None = None  # named barrier and generation that the group waits at
        self.unfenced = 0  # registers of products that ordinary instructions used since the last wgmma.fence
        self.fenced = False
        self.in_flight: list[tuple[InFlight, Any]] = []
        self.fragments_in_flight: list[tuple[int, tuple[int, ...]]] = []
        self._place(warps)

    def _place(self, warps: list[int]) -> None:
        """Everything that follows from which warps these are."""
        cta = self.cta
        self.warps = np.array(warps, np.intp)
        self.numbers = frozenset(warps)
        self.lanes = 32 * len(warps)
        self.all_lanes = np.arange(self.lanes)
        self.lane_number = self.all_lanes % 32
        self.lane = self.lane_number.astype(np.uint32)
        self.warp_of_lane = np.repeat(self.warps, 32)
        width, height, depth = cta.block
        self.ntid_x, self.ntid_y, self.ntid_z = np.uint32(width), np.uint32(height), np.uint32(depth)
        self.ctaid_x, self.ctaid_y, self.ctaid_z = (np.uint32(index) for index in cta.index)
        self.nctaid_x, self.nctaid_y, self.nctaid_z = (np.uint32(extent) for extent in cta.grid)

    # ------------------------------------------------------------------ what translated blocks use

    # Threads are asked for in a kernel's prologue; most groups that parts and meetings make never are.

    @cached_property
    def thread(self) -> NDArray[np.intp]:
        """The thread of each lane, counted through the CTA."""
        return self.warp_of_lane * 32 + self.lane_number

    @cached_property
    def tid_x(self) -> Any:
        """`%tid.x` of each lane."""
        return (self.thread % self.cta.block[0]).astype(np.uint32)

    @cached_property
    def tid_y(self) -> Any:
        """`%tid.y` of each lane."""
        return (self.thread // self.cta.block[0] % self.cta.block[1]).astype(np.uint32)

    @cached_property
    def tid_z(self) -> Any:
        """`%tid.z` of each lane."""
        return (self.thread // (self.cta.block[0] * self.cta.block[1])).astype(np.uint32)

    def active(self, predicate: Any, mask: Any) -> Any:
        """Lanes that execute a predicated instruction: None for all, NOBODY for none."""
        if predicate.ndim == 0:
            return mask if predicate else NOBODY
        active = predicate if mask is None else predicate & mask
        count = count_nonzero(active)
        if count == active.size:
            return None
        return active if count else NOBODY

    def accumulator_overwritten(self, number: int, name: str) -> None:
        """A register is written that a product in flight may accumulate in; it may hold no value that anybody reads."""
        if any(number in shape.accumulators for _, shape in self.in_flight):
            raise Hazard(
                Kind.REGISTER_IN_FLIGHT, f"{name} is an accumulator of a wgmma that no wgmma.wait_group has waited for"
            )

    def copy_unfenced(self, copies: tuple[tuple[int, int], ...]) -> None:
        """Registers were copied, (to, from): each is as unfenced as the one that it is a copy of."""
        unfenced = self.unfenced
        for destination, source in copies:
            if unfenced >> source & 1:
                unfenced |= 1 << destination
            else:
                unfenced &= ~(1 << destination)
        self.unfenced = unfenced

    def fragment_overwritten(self, number: int, name: str) -> None:
        """A register is written that a product in flight may still read as A."""
        if any(number in registers for _, registers in self.fragments_in_flight):
            raise Hazard(Kind.REGISTER_IN_FLIGHT, f"{name} holds A of a wgmma that no wgmma.wait_group has waited for")

    def whole_warps(self, mask: Mask | None, what: str) -> None:
        """Raise a Hazard unless all lanes of the group's warps execute a collective instruction."""
        if mask is not None and not every(mask):
            raise Hazard(Kind.WARP_DIVERGENCE, f"{what} is executed by some lanes of a warp only")

    def one(self, value: Any, mask: Mask | None, what: str, kind: Kind = Kind.WARP_DIVERGENCE) -> int:
        """The value that all active lanes agree on. Raises a Hazard of `kind` when they do not."""
        if getattr(value, "ndim", 0) == 0:
            return int(value)
        active = value if mask is None else value[mask]
        if some(active != active[0]):
            raise Hazard(
                kind, f"lanes differ in the {what}: {int(active[0])} and {int(active[active != active[0]][0])}"
            )
        return int(active[0])

    def sync_lanes(self, members: Any, mask: Mask | None) -> None:
        """`bar.warp.sync`: the lanes that execute it have to be the ones it names."""
        named = self.one(members, mask, "member mask") & 0xFFFFFFFF
        active = np.ones(self.lanes, bool) if mask is None else mask
        wanted = np.array([named >> lane & 1 for lane in range(32)], bool)
        if (active.reshape(-1, 32) != wanted).any():
            raise Hazard(Kind.WARP_DIVERGENCE, f"bar.warp.sync {named:#x} is executed by other lanes than it names")
        if mask is None:
            self.cta.clocks.end_epoch(self.warps)

    def warps_of(self, lanes: NDArray[np.intp], mask: Mask | None) -> NDArray[np.intp]:
        """The warps of some lanes."""
        return self.warps if mask is None or len(self.warps) == 1 else np.unique(self.warp_of_lane[lanes])

    def active_lanes(self, warps: NDArray[np.intp], lanes: NDArray[np.intp]) -> Mask:
        """(warps, 32): which lanes of some warps of the group are among `lanes`."""
        active = np.zeros(self.lanes, bool)
        active[lanes] = True
        rows: Mask = active.reshape(-1, 32)[np.searchsorted(self.warps, warps)]
        return rows

    def branch(self, predicate: Any, taken: int, fall: int, reconverge: int) -> int:
        """The block to go to; splits the group or masks lanes where they disagree."""
        if predicate.ndim == 0:
            return taken if predicate else fall
        mask = self.mask
        goes = predicate if mask is None else predicate & mask
        stays = ~predicate if mask is None else ~predicate & mask
        if not some(stays):
            return taken
        if not some(goes):
            return fall
        if len(self.warps) > 1:
            warp_goes, warp_stays = goes.reshape(-1, 32).any(axis=1), stays.reshape(-1, 32).any(axis=1)
            mixed = warp_goes & warp_stays
            if not mixed.all():
                parts = [(warp_goes & ~mixed, taken), (warp_stays & ~mixed, fall), (mixed, None)]
                return self._split(parts, (taken, fall), reconverge, goes, stays)
        return self._diverge(goes, stays, taken, fall, reconverge)

    def _diverge(self, goes: Mask, stays: Mask, taken: int, fall: int, reconverge: int) -> int:
        """Run the taken side first, under a mask."""
        self.frames.append(Divergence(reconverge, self.mask, None if fall == reconverge else (fall, stays)))
        if taken == reconverge:
            return taken  # arriving there switches to the other side
        self.mask = goes
        return taken

    def _split(
        self,
        parts: Sequence[tuple[Mask, int | None]],
        sides: tuple[int, int],
        reconverge: int,
        goes: Mask | None = None,
        stays: Mask | None = None,
    ) -> int:
        """Replace this group by one for each set of warps; the one without a block diverges inside."""
        rendezvous = Rendezvous(reconverge, set(self.warps.tolist())) if reconverge != EXIT else None
        live = self.cta.live_registers([*sides, *(self.cta.frame_blocks(self))])
        groups = []
        for warps, block in parts:
            if not warps.any():
                continue
            group = self._slice(warps, live)
            if rendezvous is not None:
                group.frames.append(rendezvous)
            if block is None:
                assert goes is not None and stays is not None
                chosen = np.repeat(warps, 32)
                block = group._diverge(goes[chosen], stays[chosen], *sides, reconverge)
            group.block = block
            groups.append(group)
        self.cta.replace([self], groups)
        return SPLIT

    def part(self, value: Any) -> bool:
        """Split the group where whole warps differ in an operand or predicate of the blocking instruction it is at.

        The parts run that instruction again, each for itself, and meet after it.
        """
        if getattr(value, "ndim", 0) == 0:
            return False
        rows = value.reshape(-1, 32)
        first = rows[:, 0]
        if some(rows != first[:, None]) or every(first == first[0]):
            return False
        block = self.block
        parts = [(first == one, block) for one in np.unique(first)]
        self._split(parts, (block, block), self.cta.program.blocks[block].reconverge)
        self.cta.progress += 1
        return True

    def _slice(self, warps: Mask, live: tuple[int, ...]) -> Group:
        """A group of some of these warps, in the same state."""
        group = Group(self.cta, self.warps[warps].tolist())
        first, end = 32 * int(warps.argmax()), 32 * (len(warps) - int(warps[::-1].argmax()))
        # Of neighbours a slice, which copies nothing: no instruction changes the vector of a register in place.
        lanes = slice(first, end) if end - first == group.lanes else np.repeat(warps, 32)
        for number in live:
            group.registers[number] = _part(self.registers[number], lanes)
        group.mask = _narrow(self.mask, lanes)
        for frame in self.frames:
            if isinstance(frame, Divergence):
                pending = None if frame.pending is None else (frame.pending[0], frame.pending[1][lanes])
                frame = Divergence(frame.reconverge, _narrow(frame.mask, lanes), pending)
            group.frames.append(frame)
        group.unfenced, group.fenced = self.unfenced, self.fenced
        group.in_flight = list(self.in_flight)
        group.fragments_in_flight = list(self.fragments_in_flight)
        return group

    # ------------------------------------------------------------------ meeting again

    def arrive(self, block: int) -> int | None:
        """The block to run after reaching one where frames end; None when the group waits there for other warps."""
        while self.frames and self.frames[-1].reconverge == block:
            frame = self.frames[-1]
            if isinstance(frame, Rendezvous):
                self.block = block
                self._meet(frame)
                return None
            if frame.pending is not None:
                (block, self.mask), frame.pending = frame.pending, None
            else:
                self.frames.pop()
                self.mask = frame.mask
        return block

    def _meet(self, rendezvous: Rendezvous) -> None:
        """Wait for the other warps; the last to come makes one group of all."""
        self.frames.pop()
        self.parked = True
        rendezvous.arrived.append(self)
        present = {warp for group in rendezvous.arrived for warp in group.warps.tolist()}
        if present == rendezvous.expected:
            groups = list(rendezvous.arrived)
            self.cta.replace(groups, [merge(groups)] if mergeable(groups) else [_unpark(group) for group in groups])

    def leave(self) -> None:
        """Go on without those that do not come, because nothing else can move."""
        for rendezvous in self.cta.rendezvous_of(self):
            rendezvous.arrived.remove(self)
            rendezvous.expected -= set(self.warps.tolist())
        self.parked = False


def _unpark(group: Group) -> Group:
    group.parked = False
    return group


def _part(value: Any, lanes: Mask | slice) -> Any:
    return value[lanes] if isinstance(value, np.ndarray) else value


def _narrow(mask: Mask | None, lanes: Mask | slice) -> Mask | None:
    if mask is None:
        return None
    part: Mask = mask[lanes]
    return None if part.all() else part


def mergeable(groups: list[Group]) -> bool:
    """Whether groups at one block are in states that one group can have."""
    first = groups[0]
    return all(
        len(group.frames) == len(first.frames)
        and [id(token) for token, _ in group.in_flight] == [id(token) for token, _ in first.in_flight]
        and all(
            a is b if isinstance(a, Rendezvous) else isinstance(b, Divergence) and _same_side(a, b)
            for a, b in zip(group.frames, first.frames, strict=True)
        )
        for group in groups
    )


def _same_side(a: Divergence | Rendezvous, b: Divergence) -> bool:
    assert isinstance(a, Divergence)
    return a.reconverge == b.reconverge and (a.pending is None) == (b.pending is None)


def merge(groups: list[Group]) -> Group:
    """One group of all the warps of several that stand at the same block."""
    first = groups[0]
    cta = first.cta
    order = np.argsort(np.concatenate([group.warps for group in groups]), kind="stable")
    in_order = (order == np.arange(len(order))).all()
    lanes = None if in_order else (order[:, None] * 32 + np.arange(32)).ravel()
    whole = Group(cta, np.concatenate([group.warps for group in groups])[order].tolist())
    whole.block = first.block
    live = cta.live_registers([first.block, *cta.frame_blocks(first)])
    vectors: dict[np.dtype[Any], list[int]] = {}  # by far the most: those of one type are joined at once
    registers, others = first.registers, [group.registers for group in groups[1:]]
    for number in live:
        value = registers[number]
        if value.__class__ is np.ndarray and all(_alike(value, other[number]) for other in others):
            vectors.setdefault(value.dtype, []).append(number)
        else:
            values = [(group.registers[number], group.lanes) for group in groups]
            whole.registers[number] = _join(values, lanes)
    for numbers in vectors.values():
        pieces = [group.registers[number] for number in numbers for group in groups]
        rows = np.concatenate(pieces).reshape(len(numbers), whole.lanes)
        for number, row in zip(numbers, rows if lanes is None else rows.take(lanes, axis=1), strict=True):
            whole.registers[number] = row
    whole.mask = _join_masks([(group.mask, group.lanes) for group in groups], lanes)
    for level, frame in enumerate(first.frames):
        if isinstance(frame, Divergence):
            frames = [group.frames[level] for group in groups]
            masks = _join_masks([(same.mask, group.lanes) for same, group in zip(frames, groups, strict=True)], lanes)  # type: ignore[union-attr]
            pending = None
            if frame.pending is not None:
                pieces = [same.pending[1] for same in frames]  # type: ignore[union-attr,index]
                pending = (frame.pending[0], _ordered(np.concatenate(pieces), lanes))
            frame = Divergence(frame.reconverge, masks, pending)
        whole.frames.append(frame)
    for group in groups:
        whole.unfenced |= group.unfenced
    whole.fenced = all(group.fenced for group in groups)
    whole.in_flight = list(first.in_flight)
    whole.fragments_in_flight = sorted({entry for group in groups for entry in group.fragments_in_flight})
    return whole


def _alike(first: NDArray[Any], second: Any) -> bool:
    """Whether the second is a vector, too, of the same type."""
    return second.__class__ is np.ndarray and second.dtype is first.dtype


def _ordered(vector: Any, lanes: NDArray[np.intp] | None) -> Any:
    """Lanes of groups set side by side, in the order of their warps; None where they stand in it."""
    return vector if lanes is None else vector[lanes]


def _join(values: list[tuple[Any, int]], lanes: NDArray[np.intp] | None) -> Any:
    """One register of several groups, (value, lanes of the group), as one."""
    first = values[0][0]
    if all(value is first for value, _ in values):
        if not isinstance(first, np.ndarray):
            return first
    elif any(value.__class__ is InFlight for value, _ in values):
        return None  # some warps have it in flight, others not: no value that an instruction may use
    known = [value for value, _ in values if value is not None]
    if not known:
        return None
    scalars = [value.tobytes() for value in known if not isinstance(value, np.ndarray)]
    if len(scalars) == len(values) and len(set(scalars)) == 1:
        return known[0]
    filler = known[0].dtype.type(0)
    parts = [
        value if isinstance(value, np.ndarray) else np.full(count, filler if value is None else value)
        for value, count in values
    ]
    return _ordered(np.concatenate(parts), lanes)


def _join_masks(masks: list[tuple[Mask | None, int]], lanes: NDArray[np.intp] | None) -> Mask | None:
    if all(mask is None for mask, _ in masks):
        return None
    whole = _ordered(np.concatenate([np.ones(count, bool) if mask is None else mask for mask, count in masks]), lanes)
    return None if whole.all() else whole
