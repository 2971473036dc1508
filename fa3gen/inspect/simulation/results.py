"""What a simulation found, as data: spans of time, stalls, utilisation."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from fa3gen.inspect.simulation.times import Unit

SpanKind = Literal["load", "held", "product", "compute", "wait"]


@dataclass(frozen=True)
class Span:
    """Something that went on from cycle `start` to `end`.

    `actor` is "producer", "warpgroup 0" and so on. A `load` is in flight, from its request until it has landed; `held`
    is a stage from then until it is given back; a `product` occupies the tensor cores; `compute` is a piece of softmax
    or a scalar product; a `wait` ends when `what` has happened. `stage` is that of a ring, `tile` counts tiles of keys
    of the CTA, over its tiles of queries.
    """

    actor: str
    kind: SpanKind
    what: str
    start: float
    end: float
    stage: int | None
    tile: int | None
    cta: int

    @property
    def cycles(self) -> float:
        """How long it went on."""
        return self.end - self.start


@dataclass(frozen=True)
class Stall:
    """What one actor of all CTAs waited for, in sum, and the share of the time that it was there."""

    actor: str
    what: str
    cycles: float
    share: float


@dataclass(frozen=True)
class Simulation:
    """One SM's work. All times are cycles.

    `step_cycles` is how long a step of one CTA takes the SM in the steady state, the middle half of the steps; where
    several CTAs share the SM, their steps are counted together. `busy` is how long each unit would have needed alone.
    """

    spans: tuple[Span, ...]
    end: float
    ctas: int
    groups: int
    steps: int
    step_cycles: float
    busy: tuple[tuple[Unit, float], ...]
    step_demand: tuple[tuple[Unit, float], ...]

    def utilisation(self, unit: Unit) -> float:
        """Share of all the time in which a unit was busy, at its full rate."""
        return dict(self.busy)[unit] / self.end if self.end else 0.0

    def steady(self, unit: Unit) -> float:
        """The same in the steady state."""
        return dict(self.step_demand)[unit] / self.step_cycles if self.step_cycles else 0.0

    def stalls(self) -> tuple[Stall, ...]:
        """Who waited for what, the longest first."""
        waited: dict[tuple[str, str], float] = defaultdict(float)
        for span in self.spans:
            if span.kind == "wait":
                waited[span.actor, span.what] += span.cycles
        rows = [Stall(actor, what, cycles, cycles / self.end / self.ctas) for (actor, what), cycles in waited.items()]
        return tuple(sorted(rows, key=lambda stall: (-stall.cycles, stall.actor, stall.what)))
