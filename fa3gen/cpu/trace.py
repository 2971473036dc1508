"""Records what each warp did when: the events behind `fa3gen trace`.

Time is logical: a warp's clock advances by one tick for each PTX instruction it issues, and a wait ends no earlier
than what it waited for. It shows order and overlap, not speed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Event:
    """One thing that happened. `warps` is empty where no warp did it, such as a load that lands."""

    time: int
    cta: tuple[int, int, int]
    warps: tuple[int, ...]
    name: str
    instruction: int | None
    details: dict[str, Any]


@dataclass
class Trace:
    """Events of the traced CTAs in the order in which the model met them."""

    events: list[Event] = field(default_factory=list)
    _clocks: dict[tuple[tuple[int, int, int], int], int] = field(default_factory=dict)

    def advance(self, cta: Any, group: Any, instructions: int) -> None:
        """A group has issued instructions."""
        now = self._now(cta, group) + instructions
        for warp in group.warps.tolist():
            self._clocks[cta.index, warp] = now

    def record(self, cta: Any, name: str, group: Any | None, details: dict[str, Any]) -> None:
        """Something happened, to a group or by itself."""
        time = self._latest(cta) if group is None else self._now(cta, group)
        warps = () if group is None else tuple(group.warps.tolist())
        instruction = None if group is None else cta.program.blocks[group.block].first
        self.events.append(Event(time, cta.index, warps, name, instruction, details))

    def _now(self, cta: Any, group: Any) -> int:
        return max(self._clocks.get((cta.index, warp), 0) for warp in group.warps.tolist())

    def _latest(self, cta: Any) -> int:
        return max((time for (index, _), time in self._clocks.items() if index == cta.index), default=0)
