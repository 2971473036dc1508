"""The event model: processes that wait for signals, and the units of one SM that they share.

A group's products run in the order in which it issues them, and a second one is issued when the first is complete. The
tensor cores serve the groups that have products in flight evenly, or the oldest product first: how the hardware
chooses is not documented. Loads are transferred one after the other, those of several producers or CTAs in turn, and
land a latency later. What warps compute shares issue slots and exponentials: when the pieces under way need more than
there is, all that need the scarce unit slow down alike.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from fa3gen.inspect.simulation.results import Span, SpanKind
from fa3gen.inspect.simulation.times import Piece

Arbitration = Literal["even", "oldest"]

EPSILON = 1e-9  # cycles, relative to which a piece of computing is done


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


@dataclass
class _Running:
    """A piece that is being computed: what is left of it, in cycles that it would take alone."""

    actor: Actor
    process: Process
    compute: Compute
    start: float
    left: float
    issue: float  # shares of the issue slots and of the exponential units that it takes when nothing slows it down
    exp: float


@dataclass
class _Product:
    """A product in flight: what is left of it, in cycles of the tensor cores."""

    actor: Actor
    what: str
    tile: int
    done: Hashable
    issued: Hashable
    cycles: float
    left: float
    order: int
    start: float | None = None


@dataclass(frozen=True)
class _Load:
    """A load that was requested at cycle `requested`."""

    actor: Actor
    what: str
    size: int
    stage: int | None
    tile: int | None
    full: Hashable
    requested: float


class Engine:
    """One SM. Start processes, then `run`; afterwards `spans` and `busy` say what happened."""

    def __init__(self, load_latency: float, load_rate: float, arbitration: Arbitration = "oldest") -> None:
        """Nothing is under way; cycles, and bytes a cycle."""
        self.now = 0.0
        self.spans: list[Span] = []
        self.busy: dict[str, float] = {"tensor cores": 0.0, "exponentials": 0.0, "issue": 0.0, "loads": 0.0}
        self._latency, self._rate, self._arbitration = load_latency, load_rate, arbitration
        self._fired: dict[Hashable, float] = {}
        self._arrived: dict[Hashable, int] = defaultdict(int)
        self._waiting: dict[Hashable, list[tuple[Actor, Process, Wait, float]]] = defaultdict(list)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._running: list[_Running] = []
        self._products: dict[Actor, deque[_Product]] = {}
        self._requests: dict[Actor, deque[_Load]] = {}
        self._transferring = False

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

    def product(self, actor: Actor, what: str, cycles: float, tile: int, issued: Hashable, done: Hashable) -> None:
        """Hand a product to the tensor cores: `issued` fires when the group's products before it are complete, and
        `done` when it is itself."""
        queue = self._products.setdefault(actor, deque())
        queue.append(_Product(actor, what, tile, done, issued, cycles, cycles, next(self._order)))
        if len(queue) == 1:
            self._begin(queue[0])

    def _begin(self, product: _Product) -> None:
        product.order = next(self._order)
        self._at(self.now, lambda: self.fire(product.issued))

    def _served(self) -> list[_Product]:
        """The products that the tensor cores work on now, with an equal share each."""
        heads = [queue[0] for queue in self._products.values()]
        return [min(heads, key=lambda product: product.order)] if heads and self._arbitration == "oldest" else heads

    def load(self, actor: Actor, what: str, size: int, stage: int | None, tile: int | None, full: Hashable) -> None:
        """Request a load of `size` bytes; `full` fires when it has landed."""
        self._requests.setdefault(actor, deque()).append(_Load(actor, what, size, stage, tile, full, self.now))
        if not self._transferring:
            self._transferring = True
            self._at(self.now, self._transfer)

    def _transfer(self) -> None:
        """Begin the transfer of the next request; those who have any take turns."""
        if not self._requests:
            self._transferring = False
            return
        actor = next(iter(self._requests))
        queue = self._requests.pop(actor)
        load = queue.popleft()
        if queue:
            self._requests[actor] = queue  # behind the others
        cycles = load.size / self._rate
        self.busy["loads"] += cycles
        landed = self.now + cycles + self._latency
        self.record(actor, "load", load.what, load.requested, landed, load.stage, load.tile)
        self._at(landed, lambda: self.fire(load.full))
        self._at(self.now + cycles, self._transfer)

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
        while self._events or self._running or self._products:
            speeds, served = self._speeds(), self._served()
            computed = self._next_done(speeds, served)
            if self._events and self._events[0][0] <= computed:
                time, _, happen = heapq.heappop(self._events)
                self._pass(time, speeds, served)
                happen()
            else:
                self._pass(computed, speeds, served)
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
            piece, alone = request.piece, request.piece.alone
            if alone > 0:
                shares = piece.issue / alone, piece.exp / alone
                self._running.append(_Running(actor, process, request, self.now, alone, *shares))
                return

    def _speeds(self) -> list[float]:
        """How fast each running piece goes, 1 when nothing slows it down."""
        issue = max(1.0, sum(running.issue for running in self._running))
        exp = max(1.0, sum(running.exp for running in self._running))
        return [1.0 / max(issue if running.issue else 1.0, exp if running.exp else 1.0) for running in self._running]

    def _next_done(self, speeds: Sequence[float], served: Sequence[_Product]) -> float:
        """When the next product or piece would be complete if nothing else began."""
        times = [self.now + running.left / speed for running, speed in zip(self._running, speeds, strict=True)]
        times += [self.now + product.left * len(served) for product in served]
        return min(times, default=float("inf"))

    def _pass(self, time: float, speeds: Sequence[float], served: Sequence[_Product]) -> None:
        elapsed = time - self.now
        if elapsed > 0:
            for running, speed in zip(self._running, speeds, strict=True):
                running.left -= elapsed * speed
                self.busy["issue"] += elapsed * speed * running.issue
                self.busy["exponentials"] += elapsed * speed * running.exp
            for product in served:
                product.start = self.now if product.start is None else product.start
                product.left -= elapsed / len(served)
            self.busy["tensor cores"] += elapsed * bool(served)
        self.now = time

    def _finish_products(self) -> None:
        done = [queue[0] for queue in self._products.values() if queue[0].left <= EPSILON * queue[0].cycles]
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
            self.fire(product.done)

    def _finish_computed(self) -> None:
        done = [running for running in self._running if running.left <= EPSILON * running.compute.piece.alone]
        self._running = [running for running in self._running if running not in done]
        for running in done:
            compute = running.compute
            self.record(running.actor, "compute", compute.piece.name, running.start, self.now, None, compute.tile)
        for running in done:
            self._advance(running.actor, running.process)
