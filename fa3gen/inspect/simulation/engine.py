"""The event model: processes that wait for signals, and the units of one SM that they share.

A group's products run in the order in which it issues them, and a second one is issued when the first is complete. The
tensor cores serve the groups that have products in flight evenly, or the oldest product first: how the hardware
chooses is not documented. Loads are transferred one after the other, those of several producers or CTAs in turn, and
land a while after they began. What is under way shares the units of the SM, issue slots, exponentials and shared memory
among them: when more is needed of one than there is, all that need the scarce unit slow down alike. Issue slots are
scarce before that: a scheduler issues when any of its warps can, and warps wait for their own reasons.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fa3gen.inspect.simulation.results import Span, SpanKind
from fa3gen.inspect.simulation.times import UNITS, Needs, Piece, Unit

Arbitration = Literal["even", "oldest"]

_KINDS = itertools.count()
EPSILON = 1e-9  # what is left of something that is done, as a share of it


@dataclass(frozen=True)
class Wait:
    """Sleep until the signal has fired; `what` is the reason that the stall is counted under."""

    signal: Hashable
    what: str
    stage: int | None = None
    tile: int | None = None


@dataclass(frozen=True)
class Compute:
    """Compute a piece."""

    piece: Piece
    tile: int | None = None


Process = Generator[Wait | Compute, None, None]


@dataclass(frozen=True)
class Actor:
    """Who does something: a name and a CTA of the SM."""

    name: str
    cta: int


@functools.lru_cache(maxsize=4096)
def _shares(alone: float, needs: tuple[tuple[Unit, float], ...]) -> tuple[Needs, int]:
    """The share of each unit that something takes which alone takes so long, and a number for it."""
    return {unit: cycles / alone for unit, cycles in needs if cycles}, next(_KINDS)


@dataclass(kw_only=True, eq=False)
class _Activity:
    """Something that takes time on units of the SM: how long it would take alone, and what is left of that."""

    actor: Actor
    needs: Needs
    alone: float = 0.0
    left: float = field(init=False)
    shares: Needs = field(init=False)  # of each unit, that it takes when nothing slows it down
    kind: Hashable = field(init=False)  # the same where the shares are the same

    def __post_init__(self) -> None:
        """Alone it takes as long as on the unit that it needs most of, or longer."""
        self.alone = self.left = max(self.alone, *self.needs.values())
        self.shares, self.kind = _shares(self.alone, tuple(self.needs.items()))

    @property
    def done(self) -> bool:
        """Whether nothing is left, but for rounding."""
        return self.left <= EPSILON * self.alone


@dataclass(kw_only=True, eq=False)
class _Running(_Activity):
    """A piece that warps compute."""

    process: Process
    compute: Compute
    start: float


@dataclass(kw_only=True, eq=False)
class _Product(_Activity):
    """A product in flight."""

    what: str
    tile: int
    complete: Hashable
    issued: Hashable
    order: int
    start: float | None = None


@dataclass(kw_only=True, eq=False)
class _Load(_Activity):
    """The transfer of a load that was requested at cycle `requested` and lands `flight` after it began, or later."""

    what: str
    stage: int | None
    tile: int | None
    full: Hashable
    requested: float
    flight: float
    begun: float = 0.0


class Engine:
    """One SM. Start processes, then `run`; afterwards `spans` and `busy` say what happened."""

    def __init__(self, arbitration: Arbitration = "oldest") -> None:
        """Nothing is under way."""
        self.now = 0.0
        self.spans: list[Span] = []
        self.busy: dict[Unit, float] = dict.fromkeys(UNITS, 0.0)
        self._arbitration = arbitration
        self._fired: dict[Hashable, float] = {}
        self._arrived: dict[Hashable, int] = defaultdict(int)
        self._waiting: dict[Hashable, list[tuple[Actor, Process, Wait, float]]] = defaultdict(list)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._running: list[_Running] = []
        self._products: dict[Actor, deque[_Product]] = {}
        self._requests: dict[Actor, deque[_Load]] = {}
        self._transfer: _Load | None = None
        self._transferring = False
        self._found: dict[tuple[Hashable, ...], list[float]] = {}  # speeds of what was under way together

    # What processes ask for

    def start(self, actor: Actor, process: Process, at: float = 0.0) -> None:
        """Begin a process at a cycle."""
        self._at(at, lambda: self._advance(actor, process))

    def fire(self, signal: Hashable) -> None:
        """Wake everybody who waits for the signal, and let nobody wait for it any more."""
        self._fired.setdefault(signal, self.now)
        for actor, process, wait, since in self._waiting.pop(signal, []):
            self.record(actor, "wait", wait.what, since, self.now, wait.stage, wait.tile)
            self._advance(actor, process)

    def arrive(self, signal: Hashable, of: int) -> None:
        """Count an arrival; the last of so many fires the signal."""
        self._arrived[signal] += 1
        if self._arrived[signal] == of:
            self.fire(signal)

    def product(self, actor: Actor, piece: Piece, tile: int, *, issued: Hashable, done: Hashable) -> None:
        """Hand a product to the tensor cores: `issued` fires when the group's products before it are complete, and
        `done` when it is itself."""
        queue = self._products.setdefault(actor, deque())
        queue.append(
            _Product(
                actor=actor,
                needs=piece.needs,
                what=piece.name,
                tile=tile,
                complete=done,
                issued=issued,
                order=next(self._order),
            )
        )
        if len(queue) == 1:
            self._begin(queue[0])

    def _begin(self, product: _Product) -> None:
        product.order = next(self._order)
        self._at(self.now, lambda: self.fire(product.issued))

    def _served(self) -> list[_Product]:
        """The products that the tensor cores work on now, with an equal share each."""
        heads = [queue[0] for queue in self._products.values()]
        return [min(heads, key=lambda product: product.order)] if heads and self._arbitration == "oldest" else heads

    def load(
        self,
        actor: Actor,
        what: str,
        needs: Needs,
        stage: int | None,
        tile: int | None,
        *,
        flight: float,
        full: Hashable,
    ) -> None:
        """Request a load whose transfer needs so much. `full` fires when it has landed: `flight` after the transfer
        began, and not before it is through."""
        load = _Load(
            actor=actor,
            needs=needs,
            what=what,
            stage=stage,
            tile=tile,
            full=full,
            requested=self.now,
            flight=flight,
        )
        self._requests.setdefault(actor, deque()).append(load)
        if not self._transferring:
            self._transferring = True
            self._at(self.now, self._begin_transfer)

    def _begin_transfer(self) -> None:
        """Begin the transfer of the next request; those who have any take turns."""
        if not self._requests:
            self._transferring = False
            return
        actor = next(iter(self._requests))
        queue = self._requests.pop(actor)
        self._transfer = queue.popleft()
        self._transfer.begun = self.now
        if queue:
            self._requests[actor] = queue  # behind the others

    def fired(self, signal: Hashable) -> bool:
        """Whether a signal has fired."""
        return signal in self._fired

    def when(self, signal: Hashable) -> float:
        """The cycle at which a signal fired; KeyError if it did not."""
        return self._fired[signal]

    def record(
        self, actor: Actor, kind: SpanKind, what: str, start: float, end: float, stage: int | None, tile: int | None
    ) -> None:
        """Note a span that took any time."""
        if end > start:
            self.spans.append(Span(actor.name, kind, what, start, end, stage, tile, actor.cta))

    # Time

    def run(self) -> float:
        """Let everything happen; returns the cycle at which the last process ended.

        Raises RuntimeError when processes wait for what never happens.
        """
        while self._events or self._running or self._products or self._transfer:
            speeds = self._speeds()
            # When the next one would be through if nothing else began.
            through = min((self.now + one.left / speed for one, speed in speeds), default=float("inf"))
            if self._events and self._events[0][0] <= through:
                time, _, happen = heapq.heappop(self._events)
                self._pass(time, speeds)
                happen()
            else:
                self._pass(through, speeds)
                self._finish_transfer()
                self._finish_products()
                self._finish_computed()
        if self._waiting:
            raise RuntimeError(f"the simulated kernel hangs: nobody fires {sorted(map(str, self._waiting))}")
        return self.now

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))

    def _advance(self, actor: Actor, process: Process) -> None:
        """Let a process go on until it has to sleep or compute."""
        for request in process:
            if isinstance(request, Wait):
                if request.signal in self._fired:
                    continue
                self._waiting[request.signal].append((actor, process, request, self.now))
                return
            if request.piece.alone > 0:
                piece = request.piece
                running = _Running(
                    actor=actor, needs=piece.needs, alone=piece.chain, process=process, compute=request, start=self.now
                )
                self._running.append(running)
                return

    def _speeds(self) -> list[tuple[_Activity, float]]:
        """What is under way and how fast it goes, 1 when nothing slows it down."""
        served = self._served()
        activities: list[_Activity] = [*served, *self._running, *([self._transfer] if self._transfer else [])]
        # Pieces are few, and the same ones are under way together again and again.
        together = len(served), *(activity.kind for activity in activities)
        speeds = self._found.get(together)
        if speeds is None:
            speeds = self._found[together] = _speeds_of([activity.shares for activity in activities], len(served))
        return list(zip(activities, speeds, strict=True))

    def _pass(self, time: float, speeds: Sequence[tuple[_Activity, float]]) -> None:
        elapsed = time - self.now
        if elapsed > 0:
            for activity, speed in speeds:
                if isinstance(activity, _Product) and activity.start is None:
                    activity.start = self.now
                activity.left -= elapsed * speed
                for unit, share in activity.shares.items():
                    self.busy[unit] += elapsed * speed * share
        self.now = time

    def _finish_transfer(self) -> None:
        load = self._transfer
        if load is None or not load.done:
            return
        self._transfer = None
        landed = max(self.now, load.begun + load.flight)
        self.record(load.actor, "load", load.what, load.requested, landed, load.stage, load.tile)
        self._at(landed, lambda: self.fire(load.full))
        self._begin_transfer()

    def _finish_products(self) -> None:
        done = [queue[0] for queue in self._products.values() if queue[0].done]
        for product in done:
            queue = self._products[product.actor]
            queue.popleft()
            if queue:
                self._begin(queue[0])
            else:
                del self._products[product.actor]
            start = self.now if product.start is None else product.start
            self.record(product.actor, "product", product.what, start, self.now, None, product.tile)
        for product in done:
            self.fire(product.complete)

    def _finish_computed(self) -> None:
        done = [running for running in self._running if running.done]
        self._running = [running for running in self._running if not running.done]
        for running in done:
            compute = running.compute
            self.record(running.actor, "compute", compute.piece.name, running.start, self.now, None, compute.tile)
        for running in done:
            self._advance(running.actor, running.process)


def _speeds_of(shares: Sequence[Needs], served: int) -> list[float]:
    """How fast activities go that take these shares of units; the first `served` have the tensor cores by turns."""
    weights = [1.0 / served if number < served else 1.0 for number in range(len(shares))]
    asked: dict[Unit, list[float]] = defaultdict(list)
    for needs, weight in zip(shares, weights, strict=True):
        for unit, share in needs.items():
            asked[unit].append(weight * share)
    by = {unit: _slowdown(unit, taken) for unit, taken in asked.items()}
    # Something of no size needs no unit and is slowed down by none.
    return [weight / max([1.0, *(by[unit] for unit in needs)]) for needs, weight in zip(shares, weights, strict=True)]


def _slowdown(unit: Unit, shares: Sequence[float]) -> float:
    """How much slower all go on that need these shares of a unit at once.

    A scheduler issues nothing in a cycle in which each of its warps waits. Who waits when is taken to be independent,
    so that it issues in 1 - (1 - a)(1 - b)... of the cycles where its warps would alone in a, b, ... of them.
    """
    if unit != "issue":
        return sum(shares)
    issuing = 1.0 - math.prod(1.0 - min(share, 1.0) for share in shares)
    return sum(shares) / issuing if issuing else 1.0
