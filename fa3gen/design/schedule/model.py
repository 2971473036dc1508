"""What a schedule consists of.

A tile is one of queries, a step one tile of keys. Tiles of keys are told apart by how far ahead of the step they are:
0 is the step's own, -1 the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Where a step stands, in order: once per CTA; once for each stage of the rings, before the first step; once per tile,
# before its steps; once per step; after the last step of a tile; after the last tile. Each kernel of k1 is a place.
Place = Literal["cta", "ahead", "tile", "step", "end", "exit", "kernel"]
PLACES: tuple[Place, ...] = ("cta", "ahead", "tile", "step", "end", "exit", "kernel")

Kind = Literal[
    "announce",  # tell a barrier how many bytes will land
    "wait_empty",  # wait until a stage of a ring is free; for TMA, announce the bytes, too
    "wait_read",  # wait until what was loaded last has been read, without taking its stage
    "load",  # start or make the copy of a tile to shared memory
    "fill",  # a stage that a thread has written is full
    "wait_full",  # wait until a stage of a ring is full
    "release",  # this warp has read a stage
    "commit",  # end a group of cp.async copies
    "wait_copies",  # wait until all groups of cp.async but the youngest have landed
    "sync",  # a barrier of several warps
    "wait_turn",
    "pass_turn",
    "drop",  # give stages of a ring back unread, whose keys none of this warpgroup's rows sees
    "skip_turns",  # pass on the turns of these tiles of keys
    "product",  # issue S = Q K^T, O += P V or D += A B, one group; on scalars, compute it
    "wait_products",  # wait until no more than so many groups are in flight
    "transpose",  # a tile, from one ring to another, by threads
    "promote",  # bring O to the new maxima and add P V of the step before
    "convert",  # a tile of 8 bits to one of 16, by threads
    "cap",  # S becomes tanh(scale S / softcap)
    "mask",
    "softmax",
    "rescale",  # bring O to the new maxima
    "round",  # P to 16 bits
    "read",  # a tile, or A, from shared memory to the registers
    "read_scale",  # of the next step's keys, from global memory
    "read_sink",  # of this tile's rows, from global memory
    "add_c",
    "add_step",  # sums of one step to those of all
    "gather",  # write O, or D, to shared memory
    "store",
    "rotate",  # each row, by a Hadamard matrix
    "find_scale",  # of what is rounded to 8 bits
    "wait_stores",  # wait until TMA has read what it stores
    "draw",  # take a number from the counter that all CTAs share
    "next",  # find out which tile comes next
    "give_part",
    "add_part",
    "kernel",  # all that a kernel of k1 does
]


@dataclass(frozen=True)
class Step:
    """One thing that a role does, in one place of its program.

    `what` is a tensor (of a product its result, of a barrier what it gives free), `on` a ring or the name of a barrier,
    `ahead` the tile of keys, or of queries for Q, counted from the current one. `only` narrows the role down to its
    first or last warpgroup, or to its first warp. After a wait for products `in_flight` groups go on. `stripe` is that
    of O, where P V is a product for each. `note` explains the step in the header; one without is explained with the
    step that follows it.
    """

    who: str
    place: Place
    kind: Kind
    what: str = ""
    on: str = ""
    ahead: int = 0
    only: Literal["", "first", "last", "first_warp"] = ""
    in_flight: int = 0
    stripe: int = 0
    note: str = ""


@dataclass(frozen=True)
class Role:
    """Warps that run the same program: `label` says which, `duty` what for.

    `loops` are the loops over tiles of keys that its code has, one after the other: whether each may mask. `peeled`
    tiles of keys come before them, with steps of their own. `code` is the module's function that walks through tiles.
    """

    name: str
    label: str
    warps: int
    duty: str
    code: str
    loops: tuple[bool, ...] = (True,)
    peeled: int = 0


@dataclass(frozen=True)
class Ring:
    """Stages in shared memory that one role fills and others empty, with an mbarrier each way.

    A stage holds a tile of each of `holds`. It is full with so many bytes, or arrivals of threads, and empty with so
    many arrivals, one of each warp that reads it; 0 of either: that is not said by an mbarrier. `prefetched` stages are
    filled before the first step by a kernel without a producer; None: all.
    """

    name: str
    holds: tuple[str, ...]
    stages: int
    filled_by: Literal["TMA", "cp.async", "threads"]
    producer: str
    consumers: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    full_arrivals: int = 0
    empty_arrivals: int = 0
    prefetched: int | None = None

    @property
    def full_bytes(self) -> int:
        """Bytes that a phase of its full barriers completes with."""
        return sum(self.sizes)

    @property
    def mbarriers(self) -> int:
        """Mbarriers of all stages."""
        return self.stages * (bool(self.full_bytes or self.full_arrivals) + bool(self.empty_arrivals))


@dataclass(frozen=True)
class NamedBarrier:
    """`count` hardware barriers from number `first` on, each of so many threads."""

    name: str
    first: int
    count: int
    threads: int
    note: str


@dataclass(frozen=True)
class Schedule:
    """Who does what in which order; `steps` of one role and one place stand in the order in which they happen."""

    roles: tuple[Role, ...]
    rings: tuple[Ring, ...]
    named_barriers: tuple[NamedBarrier, ...]
    steps: tuple[Step, ...]

    def of(self, role: str, place: Place) -> tuple[Step, ...]:
        """What a role does in one place."""
        return tuple(step for step in self.steps if (step.who, step.place) == (role, place))

    def role(self, name: str) -> Role:
        """The role of that name; StopIteration if there is none."""
        return next(role for role in self.roles if role.name == name)

    def ring(self, name: str) -> Ring | None:
        """The ring of that name, if there is one."""
        return next((ring for ring in self.rings if ring.name == name), None)

    def stated(self, step: Step) -> int:
        """How many times the compiled code has a step: once for each loop; a prefetch with cp.async is unrolled."""
        if step.place == "step":
            return len(self.role(step.who).loops)
        if step.place == "ahead":
            ring = next((ring for ring in self.rings if step.what in ring.holds), None)
            if ring is None or ring.filled_by != "cp.async":
                return 1
            return ring.stages if ring.prefetched is None else ring.prefetched
        return 1

    def count(self, kind: Kind, what: str | None = None, on: str | None = None) -> int:
        """How many times the compiled code has steps of a kind, of all things or of one, on all rings or on one."""
        found = (
            step for step in self.steps if step.kind == kind and what in (None, step.what) and on in (None, step.on)
        )
        return sum(self.stated(step) for step in found)
