"""What the warps of the generated kernels do, as processes: the steps of the schedule, one after the other.

Tiles of keys are numbered over all tiles of queries of a CTA, so that each phase of each barrier has a signal of its
own. A group is four warps: a warpgroup, or 128 threads of a scalar kernel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from fa3gen.design import footprint
from fa3gen.design.schedule import PLACES, Place, Ring, Role, Schedule, Step, schedule_of
from fa3gen.design.schedule.cooperative import CTA_BARRIER
from fa3gen.design.schedule.specialized import CONSUMERS, K_CONVERTERS
from fa3gen.inspect.simulation.engine import Actor, Compute, Engine, Process, Wait
from fa3gen.inspect.simulation.times import Times, groups
from fa3gen.spec.model import Forward

LAST_STEP = "step"  # signal of a group's step, by its number


@dataclass(frozen=True)
class Cta:
    """One place of the SM and what its CTAs do there: tiles of queries with so many tiles of keys each, one by one.

    The first one starts at cycle `begin`.

    A kernel that is not persistent starts a new CTA for each tile of queries; its rings begin empty again, which tiles
    numbered on and on amount to, as every stage has been given back by then.
    """

    engine: Engine
    spec: Forward
    times: Times
    number: int
    tiles: tuple[int, ...]
    begin: float = 0.0

    @property
    def groups(self) -> int:
        """Groups that compute."""
        return groups(self.spec)

    @property
    def total(self) -> int:
        """Tiles of keys over all tiles of queries."""
        return sum(self.tiles)

    @cached_property
    def first(self) -> tuple[int, ...]:
        """Number of the first tile of keys of each tile of queries, and at last how many there are."""
        return tuple(accumulate(self.tiles, initial=0))

    @cached_property
    def schedule(self) -> Schedule:
        """Who does what in which order."""
        return schedule_of(self.spec)

    def key(self, *parts: Hashable) -> Hashable:
        """A signal of this CTA."""
        return (self.number, *parts)

    def actor(self, name: str) -> Actor:
        """Somebody of this CTA."""
        return Actor(name, self.number)

    def start(self) -> None:
        """Begin all processes of this place."""
        for name, process in self._processes():
            self.engine.start(self.actor(name), process, self.begin)

    def _processes(self) -> Iterator[tuple[str, Process]]:
        for role in self.schedule.roles:
            if footprint.specialized(self.spec) and role.name != CONSUMERS:
                yield role.name, _Program(self, role, None).run()
                continue
            for group in range(self.groups):
                yield f"warpgroup {group}", _Program(self, role, group).run()

    # Rings

    def ring(self, tensor: str) -> Ring:
        """Where a tile of Q, K or V stands, or which one comes next."""
        return next(ring for ring in self.schedule.rings if tensor in ring.holds)

    def load(self, actor: Actor, tensor: str, number: int) -> None:
        """Request a tile; its stage is held from landing until all groups have given it back."""
        size = {"Q": self.times.q_bytes, "K": self.times.k_bytes, "V": self.times.v_bytes}[tensor]
        full, tile = self.key(tensor, "full", number), None if tensor == "Q" else number
        stage, flight = number % self.ring(tensor).stages, self.times.flight(size)
        self.engine.load(actor, tensor, self.times.transfer(size), stage, tile, flight=flight, full=full)

    def wait_full(self, tensor: str, number: int) -> Wait:
        """Wait until a tile has landed, or until it is known which one comes next."""
        stage, tile = number % self.ring(tensor).stages, number if tensor not in ("Q", "the next tile") else None
        made = {"Vt": "V to be transposed", "K16": "K to be converted", "V16": "V to be converted"}
        what = made.get(tensor, f"{tensor} to land" if tensor in ("Q", "K", "V") else tensor)
        return Wait(self.key(tensor, "full", number), what, stage, tile)

    def wait_free(self, tensor: str, number: int) -> Wait | None:
        """Wait until the stage for a tile has been given back; None where it never was in use."""
        stages = self.ring(tensor).stages
        if number < stages:
            return None
        what, tile = f"a stage of {tensor} to be free", number if tensor in ("K", "V") else None
        return Wait(self.key(tensor, "empty", number - stages), what, number % stages, tile)

    def release(self, tensor: str, number: int) -> None:
        """A group, or a role of one warp, has read a tile."""
        signal, ring = self.key(tensor, "empty", number), self.ring(tensor)
        # Roles other than the groups that compute are one process each.
        alone = [name for name in ring.consumers if footprint.specialized(self.spec) and name != CONSUMERS]
        grouped = self.groups if len(alone) < len(ring.consumers) else 0
        self.engine.arrive(signal, grouped + len(alone))
        if self.engine.fired(signal) and tensor in ("Q", "K", "V"):
            landed, tile = self.engine.when(self.key(tensor, "full", number)), None if tensor == "Q" else number
            stage = number % ring.stages
            self.engine.record(self.actor("ring"), "held", tensor, landed, self.engine.now, stage, tile)

    # Products

    def issue(self, group: int, what: str, number: int, stripe: int) -> tuple[Wait, Wait]:
        """Issue a product of a group to the tensor cores; returns the waits for having issued it and for its end."""
        piece = self.times.qk if what == "S" else self.times.pv.scaled(1.0 / footprint.stripes(self.spec))
        issued, done = self.key(what, "issued", group, number, stripe), self.key(what, group, number, stripe)
        self.engine.product(self.actor(f"warpgroup {group}"), piece, number, issued=issued, done=done)
        return Wait(issued, f"to issue {piece.name}", None, number), Wait(done, f"its {piece.name}", None, number)

    def finish_step(self, group: int, number: int) -> None:
        """Note that a group is through with a tile of keys."""
        self.engine.fire(self.key(LAST_STEP, group, number))

    def together(self, name: Hashable, number: int) -> Wait:
        """A barrier of all groups of the CTA."""
        signal = self.key("together", name, number)
        self.engine.arrive(signal, self.groups)
        return Wait(signal, "the other warpgroups", None, None)


class _Program:
    """The steps of one role: of one of its groups, or, without a number, of a role of one warp."""

    def __init__(self, cta: Cta, role: Role, group: int | None) -> None:
        self.cta, self.role, self.group = cta, role, group
        self.actor = cta.actor(role.name if group is None else f"warpgroup {group}")
        self.steps = {place: cta.schedule.of(role.name, place) for place in PLACES}
        # The groups of products in flight, the oldest first; None for one that is not simulated.
        self.in_flight: deque[tuple[Step, int, Wait] | None] = deque()
        self.turns_taken = self.turns_given = 0
        # The step at which the epilogue is computed.
        self.epilogue = "gather" if cta.schedule.count("gather") else "store"

    def run(self) -> Process:
        """All CTAs of this place, one after the other; a persistent kernel has one with all tiles of queries."""
        cta, persistent, every = self.cta, footprint.persistent(self.cta.spec), range(len(self.cta.tiles))
        for queries in [every] if persistent else [range(query, query + 1) for query in every]:
            if queries[0] and self.group is None:
                yield Wait(cta.key("together", "end", queries[0] - 1), "the CTA before to end")
            yield from self._one_cta(queries)
            if self.group is not None and not persistent:
                yield cta.together("end", queries[0])

    def _one_cta(self, queries: range) -> Process:
        stages = footprint.kv_stages(self.cta.spec)
        yield from self._place("cta", queries, queries[0], self.cta.first[queries[0]])
        for query in queries:
            first, end = self.cta.first[query : query + 2]
            for number in range(first, min(first + stages, end)):
                yield from self._place("ahead", queries, query, number)
            yield from self._place("tile", queries, query, first)
            for number in range(first + self.role.peeled, end):
                yield from self._place("step", queries, query, number)
            yield from self._place("end", queries, query, end - 1)
            # Nobody gives its place back where CTAs have one tile.
            if not self.cta.ring("Q").empty_arrivals and not footprint.keys_free_q(self.cta.spec):
                self.cta.release("Q", query)
        yield from self._place("exit", queries, queries[-1], self.cta.first[queries.stop] - 1)

    def _place(self, place: Place, queries: range, query: int, number: int) -> Process:
        """The steps of one place that are this group's; those for tiles that the CTA does not have are left out."""
        groups = {"": True, "first": self.group == 0, "first_warp": self.group == 0}
        groups["last"] = self.group == self.cta.groups - 1
        for step in self.steps[place]:
            if not groups[step.only]:
                continue
            of_queries = step.on in ("q", "tile")
            tile, end = (query, queries.stop) if of_queries else (number, self.cta.first[queries.stop])
            if step.kind in ("wait_copies", "fill") and step.ahead < 0 and number == self.cta.first[query]:
                continue  # of these keys there was no tile before
            if tile + step.ahead < end:
                yield from self._step(step, tile + step.ahead, query)
            elif step.kind == "product":
                self.in_flight.append(None)

    def _step(self, step: Step, number: int, query: int) -> Process:
        cta, times = self.cta, self.cta.times
        match step.kind:
            case "wait_empty" | "fill" | "wait_full" | "release":
                yield from self._ring(step, number)
            case "wait_read":
                ring = cta.schedule.ring(step.on)
                assert ring is not None
                for tensor in ring.holds:
                    if free := cta.wait_free(tensor, number + ring.stages):
                        yield free
            case "load":
                yield from self._load(step.what, number)
            case "wait_copies" if step.what:  # of a warp that loads for others
                yield cta.wait_full(step.what, number)
            case "wait_copies":
                yield cta.wait_full("Q", query)
                yield cta.wait_full("K", number)
                yield cta.wait_full("V", number)
            # Warps of a group go on together anyway, and around the store of O groups wait at the end of the CTA.
            case "sync" if step.on == CTA_BARRIER and step.place == "step":
                for tensor in {"K", "V"}.intersection(step.what.split(", ")):
                    cta.release(tensor, number)
                yield cta.together(step, number)
            case "wait_turn" | "pass_turn":
                yield from self._turn(step)
            case "product":
                yield from self._product(step, number)
            case "wait_products":
                yield from self._finish_products(step.in_flight)
            case "softmax":
                # Where it is not split up, O is rescaled and P rounded in the softmax.
                for piece in times.softmax if self.role.peeled else (*times.softmax, times.rescale):
                    yield Compute(piece, number)
            case "read" if (read := times.read(step.what)) is not None:
                yield Compute(read, number if step.place == "step" else None)
            case "transpose" if times.transpose is not None:
                yield Compute(times.transpose, number)
            case "convert" if times.convert_k is not None and times.convert_v is not None:
                yield Compute(times.convert_k if self.role.name == K_CONVERTERS else times.convert_v, number)
            case "promote" if footprint.stripes(cta.spec) > 1:  # between products, and P is rounded with the last one
                yield Compute(times.rescale.scaled(1.0 / footprint.stripes(cta.spec)), number)
            case "round" if self.role.peeled and footprint.stripes(cta.spec) == 1:
                yield Compute(times.rescale, number)
            case self.epilogue if step.what == "O":
                yield Compute(times.epilogue)

    def _ring(self, step: Step, number: int) -> Process:
        ring = self.cta.schedule.ring(step.on)
        assert ring is not None
        for tensor in ring.holds:
            if step.kind == "wait_full":
                yield self.cta.wait_full(tensor, number)
            elif step.kind == "release":
                self.cta.release(tensor, number)
                last = number + 1 in self.cta.first
                if tensor == "K" and last and footprint.keys_free_q(self.cta.spec):
                    self.cta.release("Q", self.cta.first.index(number + 1) - 1)
            elif step.kind == "fill" and ring.filled_by == "threads":  # what is copied has landed before
                self.cta.engine.fire(self.cta.key(tensor, "full", number))
            elif free := self.cta.wait_free(tensor, number):
                yield free

    def _load(self, tensor: str, number: int) -> Process:
        """By TMA, or by the warps: the first group stands for all of them."""
        cta, times = self.cta, self.cta.times
        piece = {"Q": times.copy_q, "K": times.copy_k, "V": times.copy_v}[tensor]
        if piece is not None:
            yield Compute(piece, None if tensor == "Q" else number)
        if not self.group:
            cta.load(self.actor, tensor, number)
        if cta.spec.load.engine == "sync":
            yield cta.wait_full(tensor, number)

    def _turn(self, step: Step) -> Process:
        """Turns at the tensor cores go round the groups."""
        cta, group = self.cta, self.group
        assert group is not None
        if step.kind == "wait_turn":
            yield Wait(cta.key("turn", group, self.turns_taken), "its turn")
            self.turns_taken += 1
        else:
            cta.engine.fire(cta.key("turn", (group + 1) % cta.groups, self.turns_given))
            self.turns_given += 1

    def _product(self, step: Step, number: int) -> Process:
        """Issue it to the tensor cores, or compute it."""
        cta, group = self.cta, self.group
        assert group is not None
        piece = cta.times.qk if step.what == "S" else cta.times.pv
        if piece.tensor:
            issued, done = cta.issue(group, step.what, number, step.stripe)
            yield issued
            self.in_flight.append((step, number, done))
            return
        yield Compute(piece, number)
        if step.what == "O":
            cta.finish_step(group, number)

    def _finish_products(self, in_flight: int) -> Process:
        """Wait until so many products are left."""
        last = footprint.stripes(self.cta.spec) - 1
        while len(self.in_flight) > in_flight:
            product = self.in_flight.popleft()
            if product is None:
                continue
            step, number, done = product
            yield done
            if step.what == "O" and step.stripe == last and self.group is not None:
                self.cta.finish_step(self.group, number)
