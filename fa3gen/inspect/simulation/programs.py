"""What the warps of the generated kernels do, as processes: in the order of the header's steps, and of the templates.

Tiles of keys are numbered over all tiles of queries of a CTA, so that each phase of each barrier has a signal of its
own. A group is four warps: a warpgroup, or 128 threads of a scalar kernel.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from fa3gen.design import footprint
from fa3gen.inspect.simulation.engine import Actor, Compute, Engine, Process, Wait
from fa3gen.inspect.simulation.times import Times, groups
from fa3gen.spec.model import PingPongSchedule, Spec, TmaLoad

LAST_STEP = "step"  # signal of a group's step, by its number


@dataclass(frozen=True)
class Cta:
    """One place of the SM and what its CTAs do there: `queries` tiles of queries of `tiles` tiles of keys each.

    The first one starts at cycle `begin`.

    A kernel that is not persistent starts a new CTA for each tile of queries; its rings begin empty again, which tiles
    numbered on and on amount to, as every stage has been given back by then.
    """

    engine: Engine
    spec: Spec
    times: Times
    number: int
    stages: int
    tiles: int
    queries: int
    begin: float = 0.0

    @property
    def groups(self) -> int:
        """Groups that compute."""
        return groups(self.spec)

    @property
    def total(self) -> int:
        """Tiles of keys over all tiles of queries."""
        return self.tiles * self.queries

    @property
    def separate(self) -> bool:
        """Whether K and V have barriers of their own."""
        return isinstance(self.spec.load, TmaLoad) and self.spec.load.barrier == "separate"

    @property
    def q_stages(self) -> int:
        """Buffers of Q."""
        return self.spec.load.q_stages if isinstance(self.spec.load, TmaLoad) else 1

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
        if not footprint.specialized(self.spec):
            for group in range(self.groups):
                yield f"warpgroup {group}", _one_after_another(self, group)
            return
        if footprint.persistent(self.spec):
            yield "producer of Q, K", _produce_q_and_k(self)
            yield "producer of V", _produce_v(self)
        else:
            yield "producer", _produce(self)
        for group in range(self.groups):
            yield f"warpgroup {group}", _consume(self, group)

    # Rings

    def ring(self, tensor: str) -> int:
        """Stages of the ring of Q, K or V."""
        return self.q_stages if tensor == "Q" else self.stages

    def load(self, actor: Actor, tensor: str, number: int) -> None:
        """Request a tile; its stage is held from landing until all groups have given it back."""
        size = {"Q": self.times.q_bytes, "K": self.times.k_bytes, "V": self.times.v_bytes}[tensor]
        full, tile = self.key(tensor, "full", number), None if tensor == "Q" else number
        self.engine.load(actor, tensor, size, number % self.ring(tensor), tile, full)

    def wait_full(self, tensor: str, number: int) -> Wait:
        """Wait until a tile has landed."""
        stage, tile = number % self.ring(tensor), None if tensor == "Q" else number
        return Wait(self.key(tensor, "full", number), f"{tensor} to land", stage, tile)

    def wait_free(self, tensor: str, number: int) -> Wait | None:
        """Wait until the stage for a tile has been given back; None where it never was in use."""
        before = number - self.ring(tensor)
        if before < 0:
            return None
        what, stage = f"a stage of {tensor} to be free", number % self.ring(tensor)
        return Wait(self.key(tensor, "empty", before), what, stage, None if tensor == "Q" else number)

    def release(self, tensor: str, number: int) -> None:
        """One group has read a tile."""
        signal = self.key(tensor, "empty", number)
        self.engine.arrive(signal, self.groups)
        if self.engine.fired(signal):
            landed, tile = self.engine.when(self.key(tensor, "full", number)), None if tensor == "Q" else number
            stage = number % self.ring(tensor)
            self.engine.record(self.actor("ring"), "held", tensor, landed, self.engine.now, stage, tile)

    # Products

    def issue(self, group: int, what: str, number: int) -> tuple[Wait, Wait]:
        """Issue a product of a group to the tensor cores; returns the waits for having issued it and for its end."""
        times = self.times
        cycles, name = (times.qk_tensor, "S = Q K^T") if what == "S" else (times.pv_tensor, "O += P V")
        issued, done = self.key(what, "issued", group, number), self.key(what, group, number)
        self.engine.product(self.actor(f"warpgroup {group}"), name, cycles, number, issued, done)
        return Wait(issued, f"to issue {name}", None, number), Wait(done, f"its {name}", None, number)

    def finish_step(self, group: int, number: int) -> None:
        """Note that a group is through with a tile of keys."""
        self.engine.fire(self.key(LAST_STEP, group, number))

    def together(self, name: str, group: int, number: int) -> Wait:
        """A barrier of all groups of the CTA."""
        signal = self.key(name, number)
        self.engine.arrive(signal, self.groups)
        return Wait(signal, "the other warpgroups", None, None)


def _softmax(cta: Cta, number: int) -> Process:
    for piece in cta.times.softmax:
        yield Compute(piece, number)


def _qk(cta: Cta, group: int, number: int) -> Process:
    """S = Q K^T, to its end."""
    if cta.times.qk is not None:
        yield Compute(cta.times.qk, number)
    else:
        yield from cta.issue(group, "S", number)


def _pv(cta: Cta, group: int, number: int) -> Process:
    """O += P V, to its end."""
    if cta.times.pv is not None:
        yield Compute(cta.times.pv, number)
    else:
        yield from cta.issue(group, "O", number)


# -- cooperative kernels


def _one_after_another(cta: Cta, group: int) -> Process:
    """A CTA for each tile of queries; the next one starts when all groups of the one before have ended."""
    program = {"sync": _sync, "cp_async": _cp_async, "tma": _cooperative_tma}[cta.spec.load.engine]
    for query in range(cta.queries):
        yield from program(cta, group, query)
        yield Compute(cta.times.epilogue)
        yield cta.together("end", group, query)


def _copied(cta: Cta, group: int, tensor: str, number: int) -> Process:
    """A tile that the warps copy through registers: request, wait, and a barrier of the CTA."""
    piece = {"Q": cta.times.copy_q, "K": cta.times.copy_k, "V": cta.times.copy_v}[tensor]
    assert piece is not None
    yield Compute(piece, number)
    if group == 0:
        cta.load(cta.actor("warpgroup 0"), tensor, number)
    yield cta.wait_full(tensor, number)
    yield cta.together(f"{tensor} copied", group, number)


def _sync(cta: Cta, group: int, query: int) -> Process:
    """k2: K and V take turns in one buffer."""
    yield from _copied(cta, group, "Q", query)
    for number in range(query * cta.tiles, (query + 1) * cta.tiles):
        yield from _copied(cta, group, "K", number)
        yield from _qk(cta, group, number)
        cta.release("K", number)
        yield cta.together("K read", group, number)
        yield from _copied(cta, group, "V", number)
        yield from _softmax(cta, number)
        yield Compute(cta.times.rescale, number)
        yield from _pv(cta, group, number)
        cta.release("V", number)
        cta.finish_step(group, number)
        yield cta.together("V read", group, number)
    cta.release("Q", query)


def _cp_async(cta: Cta, group: int, query: int) -> Process:
    """k2_cp_async: all groups copy, `stages` tiles ahead; barriers of the CTA before and after each tile."""
    first, end = query * cta.tiles, (query + 1) * cta.tiles
    times = cta.times
    assert times.copy_q is not None and times.copy_k is not None and times.copy_v is not None
    actor = cta.actor("warpgroup 0")
    yield Compute(times.copy_q)
    if group == 0:
        cta.load(actor, "Q", query)
    for number in range(first, min(first + cta.stages, end)):
        yield Compute(times.copy_k, number)
        yield Compute(times.copy_v, number)
        if group == 0:
            cta.load(actor, "K", number)
            cta.load(actor, "V", number)
    yield cta.wait_full("Q", query)
    for number in range(first, end):
        yield cta.wait_full("K", number)
        yield cta.wait_full("V", number)
        yield cta.together("landed", group, number)
        yield from _qk(cta, group, number)
        yield from _softmax(cta, number)
        yield Compute(times.rescale, number)
        yield from _pv(cta, group, number)
        cta.release("K", number)
        cta.release("V", number)
        cta.finish_step(group, number)
        yield cta.together("read", group, number)
        if number + cta.stages < end:
            yield Compute(times.copy_k, number)
            yield Compute(times.copy_v, number)
            if group == 0:
                cta.load(actor, "K", number + cta.stages)
                cta.load(actor, "V", number + cta.stages)
    cta.release("Q", query)


def _cooperative_tma(cta: Cta, group: int, query: int) -> Process:
    """k3 and k4: a warp of the first group refills the stage that all have read."""
    first, end = query * cta.tiles, (query + 1) * cta.tiles
    actor = cta.actor("warpgroup 0")
    if group == 0:
        cta.load(actor, "Q", query)
        for number in range(first, min(first + cta.stages, end)):
            cta.load(actor, "K", number)
            cta.load(actor, "V", number)
    yield cta.wait_full("Q", query)
    for number in range(first, end):
        yield cta.wait_full("K", number)
        if not cta.separate:
            yield cta.wait_full("V", number)
        yield from _qk(cta, group, number)
        if cta.separate:
            cta.release("K", number)
        yield from _softmax(cta, number)
        yield Compute(cta.times.rescale, number)
        if cta.separate:
            yield cta.wait_full("V", number)
        yield from _pv(cta, group, number)
        if not cta.separate:
            cta.release("K", number)
        cta.release("V", number)
        cta.finish_step(group, number)
        following = number + cta.stages
        if group == 0 and following < end:
            for tensor in ("K", "V"):
                free = cta.wait_free(tensor, following)
                if free is not None:
                    yield free
                cta.load(actor, tensor, following)
    cta.release("Q", query)


# -- producers


def _fill(cta: Cta, actor: Actor, tensor: str, number: int) -> Process:
    free = cta.wait_free(tensor, number)
    if free is not None:
        yield free
    cta.load(actor, tensor, number)


def _produce(cta: Cta) -> Process:
    """k5 and k6: one warp loads Q, then K and V of each tile; of the next CTA when this one has ended."""
    actor = cta.actor("producer")
    for query in range(cta.queries):
        if query:
            yield Wait(cta.key("end", query - 1), "the CTA before to end")
        cta.load(actor, "Q", query)
        for number in range(query * cta.tiles, (query + 1) * cta.tiles):
            yield from _fill(cta, actor, "K", number)
            yield from _fill(cta, actor, "V", number)


def _produce_q_and_k(cta: Cta) -> Process:
    actor = cta.actor("producer of Q, K")
    for query in range(cta.queries):
        yield from _fill(cta, actor, "Q", query)
        for number in range(query * cta.tiles, (query + 1) * cta.tiles):
            yield from _fill(cta, actor, "K", number)


def _produce_v(cta: Cta) -> Process:
    actor = cta.actor("producer of V")
    for number in range(cta.total):
        yield from _fill(cta, actor, "V", number)


# -- consumers


class _Turns:
    """The turns of one consumer at the tensor cores; without ping-pong it is always its turn."""

    def __init__(self, cta: Cta, group: int) -> None:
        self.cta, self.group = cta, group
        self.taken = self.passed = 0
        self.used = isinstance(cta.spec.schedule, PingPongSchedule)
        if self.used and group == cta.groups - 1:
            self.give()  # the first turn is consumer 0's

    def take(self) -> Process:
        """Wait for the turn."""
        if self.used:
            yield Wait(self.cta.key("turn", self.group, self.taken), "its turn")
            self.taken += 1

    def give(self) -> None:
        """It is the next consumer's turn."""
        if self.used:
            following = (self.group + 1) % self.cta.groups
            self.cta.engine.fire(self.cta.key("turn", following, self.passed))
            self.passed += 1


def _consume(cta: Cta, group: int) -> Process:
    turns = _Turns(cta, group)
    overlapped = footprint.overlapped(cta.spec)
    if overlapped and footprint.flattened(cta.spec):
        yield from _consume_flattened(cta, group, turns)
        return
    for query in range(cta.queries):
        yield cta.wait_full("Q", query)
        if overlapped:
            yield from _consume_overlapped(cta, group, turns, query)
        else:
            yield from _consume_sequential(cta, group, turns, query)
        cta.release("Q", query)
        yield Compute(cta.times.epilogue)
        if not footprint.persistent(cta.spec):
            yield cta.together("end", group, query)


def _consume_sequential(cta: Cta, group: int, turns: _Turns, query: int) -> Process:
    """No product beside the softmax of the same group."""
    for number in range(query * cta.tiles, (query + 1) * cta.tiles):
        yield cta.wait_full("K", number)
        yield from turns.take()
        yield from cta.issue(group, "S", number)
        cta.release("K", number)
        turns.give()
        yield from _softmax(cta, number)
        yield Compute(cta.times.rescale, number)
        yield cta.wait_full("V", number)
        yield from cta.issue(group, "O", number)
        cta.release("V", number)
        cta.finish_step(group, number)


def _alone(cta: Cta, group: int, turns: _Turns, tensor: str, product: str, number: int) -> Process:
    """A product with nothing beside it: the S visited first, the P V visited last."""
    yield cta.wait_full(tensor, number)
    yield from turns.take()
    issued, finished = cta.issue(group, product, number)
    yield issued
    turns.give()
    yield finished
    cta.release(tensor, number)


def _later_steps(cta: Cta, group: int, turns: _Turns, first: int, end: int) -> Process:
    """From a finished S of tile `first`: softmax after softmax, with P V of the tile before beside each but one."""
    yield from _softmax(cta, first)
    yield Compute(cta.times.rescale, first)
    for number in range(first + 1, end):
        yield cta.wait_full("K", number)
        yield from turns.take()
        issued, scores = cta.issue(group, "S", number)
        yield issued
        yield cta.wait_full("V", number - 1)
        issued, output = cta.issue(group, "O", number - 1)
        yield issued
        yield scores
        turns.give()
        cta.release("K", number)
        yield from _softmax(cta, number)
        yield output
        cta.release("V", number - 1)
        cta.finish_step(group, number - 1)
        yield Compute(cta.times.rescale, number)


def _consume_overlapped(cta: Cta, group: int, turns: _Turns, query: int) -> Process:
    first, end = query * cta.tiles, (query + 1) * cta.tiles
    yield from _alone(cta, group, turns, "K", "S", first)
    yield from _later_steps(cta, group, turns, first, end)
    yield from _alone(cta, group, turns, "V", "O", end - 1)
    cta.finish_step(group, end - 1)


def _consume_flattened(cta: Cta, group: int, turns: _Turns) -> Process:
    """Persistent with two buffers of Q: the first S of a tile of queries beside the last P V of the one before."""
    yield cta.wait_full("Q", 0)
    yield from _alone(cta, group, turns, "K", "S", 0)
    for query in range(cta.queries):
        first, end = query * cta.tiles, (query + 1) * cta.tiles
        yield from _later_steps(cta, group, turns, first, end)
        cta.release("Q", query)
        more = query + 1 < cta.queries
        yield cta.wait_full("V", end - 1)
        if more:
            yield cta.wait_full("Q", query + 1)
            yield cta.wait_full("K", end)
        yield from turns.take()
        issued, output = cta.issue(group, "O", end - 1)
        yield issued
        scores = None
        if more:
            issued, scores = cta.issue(group, "S", end)
            yield issued
        turns.give()
        yield output
        cta.release("V", end - 1)
        cta.finish_step(group, end - 1)
        yield Compute(cta.times.epilogue)
        if scores is not None:
            yield scores
            cta.release("K", end)
