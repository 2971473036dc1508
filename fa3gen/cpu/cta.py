"""One CTA: its state, and the loop that runs its warps under a schedule."""

from __future__ import annotations

import random
import re
import types
from collections.abc import Iterable
from typing import Any

import numpy as np

from fa3gen.cpu.barriers import Mbarrier, Mbarriers, NamedBarriers, RegisterPool
from fa3gen.cpu.bulk_copy import BulkCopyUnit
from fa3gen.cpu.clocks import Clocks
from fa3gen.cpu.cp_async import CpAsyncUnit
from fa3gen.cpu.findings import Hazard, Kind, Place
from fa3gen.cpu.flow import EXIT, definitions_and_uses
from fa3gen.cpu.global_order import CtaOrder
from fa3gen.cpu.lane_memory import LocalMemory
from fa3gen.cpu.shared_memory import SharedMemory
from fa3gen.cpu.tensor_map import TensorMap
from fa3gen.cpu.translate import SPLIT, WAIT
from fa3gen.cpu.warps import Group, Rendezvous
from fa3gen.cpu.wgmma import InFlight, WgmmaUnit
from fa3gen.hardware.hopper import registers_at_launch

PATIENCE = 6  # times that nothing but "not yet" may be answered before the CTA counts as deadlocked
MAX_IDLE_ROUNDS = 100  # in which warps do nothing but load what others store, before the CTA is set aside
MAX_BLOCKS = 50_000_000  # executed by one CTA; a kernel that takes longer does not end


class Cta:
    """State of one CTA. `launch` is what all CTAs of a launch share (fa3gen.cpu.launch.Execution)."""

    def __init__(self, launch: Any, index: tuple[int, int, int]) -> None:
        """All warps at the start of the kernel."""
        self.launch = launch
        self.program = launch.program
        self.index, self.grid, self.block = index, launch.grid, launch.block
        self.memory = launch.memory
        self.schedule = launch.schedule
        self.random = random.Random(f"{self.schedule.seed} {index}")
        self.by_chance = "random" in (self.schedule.order, self.schedule.completion)
        self.progress = 0  # counts events that may let somebody go on
        self.threads = self.block[0] * self.block[1] * self.block[2]
        warps = -(-self.threads // 32)
        self.clocks = Clocks(warps)
        self.order = CtaOrder(launch.order, self)
        self.shared = SharedMemory(launch.shared_bytes, self.program.granule, self.clocks)
        self.local_memory = LocalMemory(warps * 32, self.program.kernel.local_bytes)
        self.named_barriers = NamedBarriers(self.clocks, warps * 32)
        self.mbarriers = Mbarriers(self.clocks, self.shared)
        sharing = self.threads * self.program.kernel.ctas_per_sm
        self.registers = RegisterPool(warps, launch.registers_per_thread or registers_at_launch(sharing))
        self.wgmma = WgmmaUnit(self)
        self.bulk = BulkCopyUnit(self)
        self.cp_async = CpAsyncUnit(self)
        step = 1 if self.schedule.granularity == "warp" else 4
        self.groups = [Group(self, list(range(first, min(first + step, warps)))) for first in range(0, warps, step)]
        self._group: Group | None = None
        self._blocks = 0
        self._seen_progress = -1
        self._patience = PATIENCE
        self._polled_at, self._idle_rounds = -1, 0
        self.has_moved = True  # since the last time that it was set aside

    # ------------------------------------------------------------------ what blocks and units use

    def symbol(self, name: str, type_: Any) -> Any:
        """The address of a parameter or variable."""
        return type_(self.launch.symbols[name])

    def tensor_map(self, address: int) -> TensorMap:
        """The tensor map at a parameter address."""
        found: TensorMap = self.launch.tensor_map(address)
        return found

    def note(self, event: str, group: Group | None, **details: Any) -> None:
        """Record an event, where somebody wants a trace."""
        if self.launch.trace is not None:
            self.launch.trace.record(self, event, group, details)

    def time_limit_passes(self) -> bool:
        """Whether a wait that may give up does so now: sometimes, where the schedule leaves something to chance.

        Not beside warps that only look at global memory: they and it would look in turns for ever, and nothing land.
        """
        return self.by_chance and not self._idle_rounds and self.random.random() < 0.2

    def polled(self, group: Group) -> None:
        """A group has looked at global memory for what somebody else stores; until more happens, others go first."""
        self._polled_at = group.polled_at = self.progress

    def waits_in_vain(self) -> Hazard:
        """The deadlock of a CTA that waits for what no other one will store."""
        return Hazard(
            Kind.DEADLOCK,
            "a word of global memory is read again and again, but no other CTA will store what the warp waits for; a "
            "CTA may wait for those with lower numbers only",
        ).at(self._place(next((group for group in self.groups if group.polled_at == self.progress), None)))

    def live_registers(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Numbers of the registers that are read from any of these blocks on."""
        found: tuple[int, ...] = self.program.live_registers(frozenset(blocks))
        return found

    @staticmethod
    def frame_blocks(group: Group) -> list[int]:
        """Blocks at which a group will go on later."""
        blocks = [frame.reconverge for frame in group.frames]
        blocks += [frame.pending[0] for frame in group.frames if not isinstance(frame, Rendezvous) and frame.pending]
        return blocks

    def replace(self, old: list[Group], new: list[Group]) -> None:
        """Put groups in the place of others."""
        position = self.groups.index(old[0])
        self.groups[position : position + 1] = new
        for group in old[1:]:
            self.groups.remove(group)
        for group in new:
            if group not in self.groups:
                self.groups.append(group)

    def rendezvous_of(self, group: Group) -> list[Rendezvous]:
        """Where a parked group waits."""
        found = {
            id(frame): frame
            for other in self.groups
            for frame in other.frames
            if isinstance(frame, Rendezvous) and group in frame.arrived
        }
        return list(found.values())

    # ------------------------------------------------------------------ running

    def run(self) -> bool:
        """Run to the end, or until nothing happens but loads of what another CTA may store: False, to go on later.

        Raises a Hazard for the first fault.
        """
        before, set_aside = self.progress, False
        try:
            with np.errstate(all="ignore"):
                while self.groups:
                    if not self._round():
                        self._unblock()
                    if self._idle_rounds > MAX_IDLE_ROUNDS:
                        self._idle_rounds = 0
                        if not self._complete_something(only_wanted=True):
                            self.has_moved, set_aside = self.progress > before, True
                            return False
                self._group = None
                self.bulk.check_loads_end()
                self.mbarriers.check_end()
                self.registers.check_end()
        except Hazard as hazard:
            raise hazard.at(self._place(self._group)) from None
        finally:
            if not set_aside:
                self._end_of_cta()
        return True

    def _end_of_cta(self) -> None:
        if self.launch.trace is not None:
            self.launch.trace.finish(self)
        # These know the CTA. Without them its memory is free at once, for the next one; else only Python's collector of
        # garbage finds it, dozens of CTAs later.
        del self.wgmma, self.bulk, self.cp_async, self.groups

    def _round(self) -> bool:
        """Give warps a turn; False when none could do anything."""
        order = [group for group in self.groups if not group.parked]
        kind = self.schedule.order
        if kind == "random":
            self.random.shuffle(order)
        elif kind != "in turn":
            order.sort(key=lambda group: (self.schedule.favourite in group.numbers) == (kind == "last"))
        if self.schedule.completion == "random" and self.random.random() < 0.1:
            self._complete_something(only_wanted=False)
        if self._polled_at == self.progress:
            order.sort(key=lambda group: group.polled_at == self.progress)
        moved = busy = False
        for group in order:
            if group.parked or group not in self.groups:
                continue
            if self._step(group):
                moved = True
                busy |= group.polled_at != self.progress
                if kind != "in turn":
                    break
        self._idle_rounds = self._idle_rounds + 1 if moved and not busy else 0
        return moved

    def _unblock(self) -> None:
        """Nobody can run: complete an operation that is waited for, let a parked group go on, or give up."""
        if self._complete_something(only_wanted=True):
            return
        parked = next((group for group in self.groups if group.parked), None)
        if parked is not None:
            parked.leave()
            return
        # Waits may answer "not yet" at any time; spinning on that without an effect is a deadlock.
        if self._seen_progress != self.progress:
            self._seen_progress = self.progress
            self._patience = PATIENCE
        self._patience -= 1
        if self._patience < 0:
            raise self._deadlock()
        for group in self.groups:
            if isinstance(group.waits_for, Mbarrier):
                group.answer_now = True

    def _complete_something(self, *, only_wanted: bool) -> bool:
        """Let one load land or one queue of products finish; whether there was any.

        Only what somebody waits for, so that a missing wait is seen: every other load stays in flight.
        """
        loads = list(self.bulk.loads)
        if only_wanted:
            awaited = {id(group.waits_for) for group in self.groups if isinstance(group.waits_for, Mbarrier)}
            loads = [load for load in loads if id(load.barrier) in awaited]
        queues = self.wgmma.waiting()
        if not loads and not queues:
            return False
        choice = self.random.randrange(len(loads) + len(queues)) if self.by_chance else 0
        self._group = None  # no warp does it, so that a report names none
        if choice < len(loads):
            self.bulk.land(loads[choice])
        else:
            self.wgmma.perform(queues[choice - len(loads)])
        return True

    def _step(self, group: Group) -> bool:
        """Run a group until it waits, parks, splits, ends or yields; whether it did anything."""
        program, blocks = self.program, self.program.blocks
        self._group = group
        moved = False
        block = group.block
        if group.frames and group.frames[-1].reconverge == block:  # a part of a split may begin where sides meet
            arrived = group.arrive(block)
            if arrived is None:
                return True
            block = group.block = arrived
        if block == EXIT:  # the part of a split that ends at once
            self._end(group)
            return True
        while True:
            try:
                following = program.function(block, group.mask is not None)(group)
            except Hazard as hazard:
                raise hazard.at(self._place(group, block, hazard.__traceback__)) from None
            except (TypeError, AttributeError) as error:
                raise self._explain(error, group, block) from error
            if following is WAIT:
                group.block = block
                return moved
            moved = True
            self._count(block, group)
            if following == SPLIT:
                return True
            if group.frames and group.frames[-1].reconverge == following:
                following = group.arrive(following)
                if following is None:
                    return True
            if following == EXIT:
                self._end(group)
                return True
            yields = blocks[block].yields
            block = group.block = following
            if yields or group.polled_at == self.progress:
                return True

    def _count(self, block: int, group: Group) -> None:
        self._blocks += 1
        span = self.program.blocks[block]
        self.launch.instructions += (span.end - span.first) * len(group.warps)
        if self.launch.trace is not None:
            self.launch.trace.advance(self, group, span.first, span.end)
        if self._blocks > MAX_BLOCKS:
            raise Hazard(Kind.NOT_FINISHED, f"the CTA has run {MAX_BLOCKS} blocks")

    def _end(self, group: Group) -> None:
        """The group's warps have returned."""
        self.wgmma.check_end(group)
        warps = group.warps.tolist()
        self.note("warps ended", group)
        self.bulk.check_stores_end(warps)
        self.cp_async.check_end(warps)
        for frame in group.frames:
            if isinstance(frame, Rendezvous):
                frame.expected -= set(warps)
        self.groups.remove(group)
        self.named_barriers.thread_ended(group.lanes)
        self.progress += 1

    # ------------------------------------------------------------------ reports

    def _deadlock(self) -> Hazard:
        """What everybody waits for."""
        self._group = None
        lines = []
        kind = Kind.DEADLOCK
        for group in self.groups:
            what = group.waits_for
            if isinstance(what, Mbarrier):
                if what.pending == 0 and what.transactions:
                    kind = Kind.TRANSACTION_COUNT
            elif group.ticket is not None:
                what = self.named_barriers.describe(group.ticket[0])
            lines.append(f"  {self._place(group)} waits for {what}")
        return Hazard(kind, "no warp can go on:\n" + "\n".join(lines))

    def _place(
        self, group: Group | None, block: int | None = None, traceback: types.TracebackType | None = None
    ) -> Place:
        if group is None:
            return Place(cta=self.index)
        number = self._instruction_of(traceback)
        if number is None:
            number = self.program.blocks[group.block if block is None else block].first
        instruction = self.program.kernel.instructions[number]
        return Place(
            cta=self.index,
            warps=tuple(group.warps.tolist()),
            instruction=number,
            ptx_line=instruction.line,
            text=instruction.mnemonic,
            source=instruction.source or self.launch.locate(number),
        )

    def _instruction_of(self, traceback: types.TracebackType | None) -> int | None:
        """The instruction that a translated block was executing."""
        while traceback is not None:
            name = re.fullmatch(r"<ptx block (\d+)>", traceback.tb_frame.f_code.co_filename)
            if name:
                index: int | None = self.program.lines[int(name.group(1))].get(traceback.tb_lineno)
                return index
            traceback = traceback.tb_next
        return None

    def _explain(self, error: Exception, group: Group, block: int) -> Exception:
        """An instruction met something in a register that is no value: say what; other errors are this model's own."""
        traceback = error.__traceback__
        while traceback is not None and not traceback.tb_frame.f_code.co_filename.startswith("<ptx block"):
            traceback = traceback.tb_next
        number = self._instruction_of(traceback)
        if traceback is None or number is None:
            return error
        values = traceback.tb_frame.f_locals
        kernel = self.program.kernel
        for name in definitions_and_uses(kernel, kernel.instructions[number])[1]:
            value = values.get(f"v{kernel.numbers[name]}", group)
            if value is None:
                hazard = Hazard(Kind.UNINITIALISED_REGISTER, f"{name} is read before it was written")
            elif value.__class__ is InFlight or getattr(value, "dtype", None) == np.dtype(object):  # all lanes or some
                hazard = Hazard(
                    Kind.REGISTER_IN_FLIGHT,
                    f"{name} is an accumulator of a wgmma that no wgmma.wait_group has waited for",
                )
            else:
                continue
            return hazard.at(self._place(group, block, traceback))
        return error
