"""Who stays in the race and who wins it: successive halving over heats, and a test against noise at the end.

A heat is a number of interleaved rounds: in each round every competitor is timed once. Candidates are compared within
a heat only. Successive halving after Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and
Hyperparameter Optimization" (2016), with a third kept from heat to heat.

The rule of the last heat: the incumbent (or the first in the order of enumeration) holds the title. The others
challenge in order; one takes the title when it was faster in so many rounds that a one-sided sign test over the paired
rounds gives p <= 5 % divided by the number of challengers (Bonferroni), and when the median of its paired ratios is at
least half a per cent. Equal competitors therefore leave the title where it is: with the incumbent, with the simpler.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fa3gen.base.errors import UserError

FINALISTS = 3  # beside the incumbent
FIRST_ROUNDS = 3
FINAL_ROUNDS = 25
MEASURE_ROUNDS = 11  # where nothing is searched
LEAST_ROUNDS = 7
BURST_MS = 7.0  # of one timing
EAGER_ROUNDS = 3  # of the last heat, beside its rounds from CUDA graphs
SIGNIFICANCE = 0.05
LEAST_GAIN = 0.005  # a smaller gain is not worth another module, however sure it is

Times = Mapping[str, Sequence[float]]  # milliseconds by competitor, one per round


@dataclass(frozen=True)
class Heat:
    """`rounds` interleaved rounds, after which the `keep` fastest challengers go on; the last heat keeps all."""

    rounds: int
    keep: int
    last: bool


def plan(challengers: int, final_rounds: int = FINAL_ROUNDS) -> list[Heat]:
    """Heats for so many challengers of an incumbent; each keeps a third and has twice the rounds of the one before."""
    heats = []
    rounds = FIRST_ROUNDS
    while challengers > FINALISTS:
        challengers = max(FINALISTS, math.ceil(challengers / 3))
        heats.append(Heat(rounds, challengers, last=False))
        rounds = min(2 * rounds, final_rounds)
    return [*heats, Heat(final_rounds, challengers, last=True)]


def single(competitors: int, rounds: int = MEASURE_ROUNDS) -> list[Heat]:
    """One heat for all; UserError for fewer rounds than could tell so many competitors apart."""
    challengers = competitors - 1
    # The strongest outcome of a sign test over n rounds has p = 2^-n.
    least = max(LEAST_ROUNDS, math.ceil(math.log2(max(1, challengers) / SIGNIFICANCE)))
    if challengers and rounds < least:
        raise UserError(f"{rounds} rounds cannot tell {competitors} modules apart; use --rounds {least} or more")
    return [Heat(rounds, challengers, last=True)]


def fastest(times: Times, count: int) -> list[str]:
    """The `count` competitors with the smallest medians, in the order in which they stand in `times`."""
    best = sorted(times, key=lambda name: statistics.median(times[name]))[:count]
    return [name for name in times if name in best]


def ratios(challenger: Sequence[float], holder: Sequence[float]) -> list[float]:
    """How many times faster the challenger was, round by round."""
    return [theirs / ours for ours, theirs in zip(challenger, holder, strict=True)]


def sign_test(paired: Sequence[float]) -> float:
    """One-sided p: how likely so many ratios above 1 are when both are equally fast. Ties are left out."""
    wins, losses = sum(ratio > 1 for ratio in paired), sum(ratio < 1 for ratio in paired)
    total = wins + losses
    outcomes = sum(math.comb(total, count) for count in range(wins, total + 1))
    return outcomes / float(2**total)


def beats(challenger: Sequence[float], holder: Sequence[float], challengers: int = 1) -> bool:
    """Whether the challenger takes the title, see this module's docstring."""
    paired = ratios(challenger, holder)
    sure = sign_test(paired) <= SIGNIFICANCE / max(1, challengers)
    return sure and statistics.median(paired) >= 1 + LEAST_GAIN


def winner(times: Times) -> str:
    """The holder of the title after all have challenged; the first one in `times` holds it at the beginning."""
    names = list(times)
    holder = names[0]
    for name in names[1:]:
        if beats(times[name], times[holder], len(names) - 1):
            holder = name
    return holder
