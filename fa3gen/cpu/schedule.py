"""Schedules: which CTAs and warps run when, and when asynchronous operations complete. All are legal on hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Granularity = Literal["warpgroup", "warp"]
Order = Literal["in turn", "random", "first", "last"]
Completion = Literal["late", "early", "random"]
Ctas = Literal["first to last", "last to first"]


@dataclass(frozen=True)
class Schedule:
    """One way to run the CTAs of a launch.

    `granularity`: a warpgroup's warps move together, or each warp by itself and may be preempted wherever another
    warp could notice. `order`: warps in turn, at random, or `favourite` first or last whenever there is a choice.
    `completion` of loads and products: only when somebody waits and nobody can run, at once, or at random times.
    `ctas`: in which order they begin. One that waits for another is set aside until all others have begun.
    """

    granularity: Granularity = "warpgroup"
    order: Order = "in turn"
    completion: Completion = "late"
    favourite: int = 0
    seed: int = 0
    ctas: Ctas = "first to last"

    def __str__(self) -> str:
        """In words, for reports."""
        order = f"warp {self.favourite} {self.order}" if self.order in ("first", "last") else self.order
        seed = f", seed {self.seed}" if "random" in (self.order, self.completion) else ""
        ctas = ", CTAs from the last to the first" if self.ctas == "last to first" else ""
        return f"by {self.granularity}, {order}, {self.completion} completion{ctas}{seed}"


FAST = Schedule()

# Every committed module runs under so many of `schedules`, and mutated ones are judged under them. Of 114 harmful
# mutations of attention kernels these four report the 111 that ten do, the fast one alone 108; in the fourth CTAs begin
# last to first.
TELLING = 4


def schedules(count: int, warps: int, seed: int = 0) -> list[Schedule]:
    """`count` different schedules for CTAs of `warps` warps, the fast one first, the `TELLING` ones early."""
    fixed = [
        FAST,
        Schedule("warp", "random", "late", seed=seed),
        Schedule("warp", "random", "random", seed=seed + 1),
        Schedule("warpgroup", "random", "random", seed=seed + 2, ctas="last to first"),
        Schedule("warp", "first", "late", favourite=0),
        Schedule("warp", "last", "early", favourite=0, ctas="last to first"),
        Schedule("warp", "in turn", "late", ctas="last to first"),
        Schedule("warp", "first", "late", favourite=warps - 1),
        Schedule("warp", "last", "late", favourite=warps - 1),
        Schedule("warp", "random", "early", seed=seed + 3),
    ]
    fixed = list(dict.fromkeys(fixed))  # of a single warp the first and the last are one
    more = [Schedule("warp", "random", "late", seed=seed + 4 + number) for number in range(count - len(fixed))]
    return (fixed + more)[:count]
