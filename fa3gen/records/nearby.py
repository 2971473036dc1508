"""Which module serves calls of many queries best, by the records around them, whatever their tiles, keys and heads.

A call tells the host little: heads, queries of all sequences and of the longest, its keys. Records of very different
lists of lengths agree in these, and their modules' speeds do not; so what counts is how fast a module was, beside the
fastest, in the mean over all records around such a call. That is kernel regression (Nadaraya, 1964; Watson, 1964) with
a normal distribution over the octaves between a record and a call; `choices` does it for the places of a grid.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Standard deviations, in octaves. Narrower ones are closer to what was measured and, as most wider ones, further from
# lists that were left out. Of groups hardly any tells of another: other modules suit it.
TILE_OCTAVES, KEY_OCTAVES, GROUP_OCTAVES, UNEVEN_OCTAVES = 0.7, 0.5, 0.2, 1.0
# The edges of bands of tiles per SM, of which the last has no end, and the keys at which modules are compared. Fewer
# tiles than the fewest take as long.
TILES = tuple(2.0**step for step in range(-3, 6))
MORE_TILES = *TILES, 64.0, 128.0  # for prompts alone, of which long documents have so many
KEYS = tuple(2 ** (step / 2) for step in range(16, 32))
# By how much a module has to be faster to be worth a row of its own: what one run differs from the next by. Modules
# within so much of the best are as good, and those are taken that need the fewest rows.
WORTH_A_ROW = 0.01
# What a module's mean is made of has to be worth so much of all records; those that are worth so much of the one that
# is worth most are told.
LEAST_TIMED, LEAST_TOLD = 0.5, 0.1
UNTIMED = 0.81  # of the fastest: what a module counts for in a record that did not time it

Module = tuple[str, str]  # stem and first digits of the SHA-256


class Place(NamedTuple):
    """Where a record or a call lies, each as a logarithm to base 2."""

    tiles: float  # of 128 rows, of queries of all heads that share one of k, per SM
    keys: float  # of the longest sequence
    group: float  # heads that share one of k
    uneven: float  # queries of the longest sequence, over those in the mean

    @classmethod
    def of(cls, tiles: float, keys: float, group: float, uneven: float) -> Place:
        """Of the numbers themselves."""
        return cls(*map(math.log2, (max(tiles, TILES[0]), keys, group, uneven)))


@dataclass(frozen=True)
class Timed:
    """A record: where it lies, and how fast its modules were."""

    place: Place
    speeds: Mapping[Module, float]


@dataclass(frozen=True)
class Choice:
    """The best module for up to so many tiles per SM, and up to so many keys; None for more than all others of these.

    `second`: the best other one there, and how much longer it takes; None where there is none. `records`: the numbers
    of those that tell so.
    """

    tiles: float | None
    keys: int | None
    module: Module
    second: tuple[Module, float] | None
    records: tuple[int, ...]


def choices(
    records: Sequence[Timed],
    able: Collection[Module],
    group: float,
    uneven: float,
    edges: Sequence[float] = TILES,
    served: Collection[int] = (),
) -> Iterator[Choice]:
    """Of the modules `able` the best ones for a group of heads, and lengths that are so uneven: from the fewest tiles
    to the most, and in each band of these, between `edges`, from the fewest keys to the most.

    `served`: numbers of the records whose calls are served so; of their modules only those that were timed in it serve
    a record's place, if there is one that was in all. Bands which the same modules serve are one. Nothing without a
    record of one of the modules.
    """
    modules = sorted({module for record in records for module in record.speeds} & set(able))
    if not modules:
        return
    middles = (edges[0], *(edge / math.sqrt(2) for edge in edges[1:]), edges[-1] * math.sqrt(2))
    means, tell = _means(records, modules, [Place.of(tiles, keys, group, uneven) for tiles in middles for keys in KEYS])
    for number in served:
        band, key = _cell_of(records[number].place, edges)
        here = band * len(KEYS) + key
        timed = {module: mean for module, mean in means[here].items() if module in records[number].speeds}
        means[here] = timed or means[here]
    for bands, parts in _bands([means[begin : begin + len(KEYS)] for begin in range(0, len(means), len(KEYS))]):
        edge = edges[bands[-1]] if bands[-1] < len(edges) else None
        for keys, module in parts:
            numbers = [band * len(KEYS) + key for band in bands for key in keys]
            there, told = [means[number] for number in numbers], set().union(*(tell[number] for number in numbers))
            end = None if keys[-1] == len(KEYS) - 1 else _KEY_ENDS[keys[-1]]
            yield Choice(edge, end, module, _second(there, module), tuple(sorted(told)))


_KEY_ENDS = tuple(round(keys * 2**0.25) for keys in KEYS[:-1])  # up to which each of KEYS stands for a call's


def _cell_of(place: Place, edges: Sequence[float]) -> tuple[int, int]:
    """The number of its band of tiles, between `edges`, and of its keys among KEYS."""
    return bisect.bisect_left(edges, 2**place.tiles), bisect.bisect_left(_KEY_ENDS, round(2**place.keys))


_Means = Mapping[Module, float]  # logarithms of speeds beside the fastest
_Part = tuple[Sequence[int], Module]  # which of KEYS, and what serves there


def _means(
    records: Sequence[Timed], modules: Sequence[Module], places: Sequence[Place]
) -> tuple[list[_Means], list[set[int]]]:
    """The means of all modules at places, of those that were timed enough; and the records that tell of each place."""
    import torch  # it is heavy, and needed where a table is written only

    octaves = torch.tensor([TILE_OCTAVES, KEY_OCTAVES, GROUP_OCTAVES, UNEVEN_OCTAVES], dtype=torch.float64)
    of_records, of_places = (
        torch.tensor([tuple(place) for place in found], dtype=torch.float64) / octaves
        for found in ([record.place for record in records], places)
    )
    exponents = -torch.cdist(of_places, of_records, compute_mode="donot_use_mm_for_euclid_dist") ** 2 / 2
    weights = (exponents - exponents.amax(dim=1, keepdim=True)).exp()
    behind = torch.tensor([_behind(record, modules) for record in records], dtype=torch.float64)
    timed = behind.isfinite().double()
    all_worth = weights.sum(dim=1, keepdim=True)
    means = (weights @ behind.nan_to_num(neginf=math.log(UNTIMED)) / all_worth).tolist()
    enough = (weights @ timed >= LEAST_TIMED * all_worth).tolist()
    # Rounded, so that no order of adding up decides between modules that are equal.
    named: list[_Means] = [
        {module: round(mean, 6) for module, mean, told in zip(modules, *row, strict=True) if told}
        for row in zip(means, enough, strict=True)
    ]
    return named, [set(row.nonzero().flatten().tolist()) for row in weights >= LEAST_TOLD]


def _behind(record: Timed, modules: Iterable[Module]) -> list[float]:
    """Logarithms of the speeds of modules beside the fastest of them, -inf for those that were not timed."""
    speeds = [record.speeds.get(module, 0.0) for module in modules]
    return [math.log(speed / max(speeds)) if speed else -math.inf for speed in speeds]


def _bands(bands: Sequence[Sequence[_Means]]) -> Iterator[tuple[list[int], list[_Part]]]:
    """Numbers of bands, and the parts that serve all of them well enough: of the first of these bands."""
    numbers: list[int] = []
    parts: list[_Part] = []
    for number, means in enumerate(bands):
        if numbers and all(module in _as_good(means[key]) for keys, module in parts for key in keys):
            numbers.append(number)
            continue
        if numbers:
            yield numbers, parts
        numbers, parts = [number], _parts(means)
    yield numbers, parts


def _parts(means: Sequence[_Means]) -> list[_Part]:
    """The fewest parts of a band: from each beginning the modules that may stay longest, and of those the fastest."""
    return [
        (keys, max(sorted(common), key=lambda module: sum(means[key][module] for key in keys)))
        for keys, common in longest_runs([_as_good(here) for here in means])
    ]


def longest_runs(able: Sequence[Collection[Module]]) -> list[tuple[range, set[Module]]]:
    """The fewest runs of places, each with the modules that are able to serve all of it: from each beginning those that
    may stay longest."""
    runs: list[tuple[range, set[Module]]] = []
    start = 0
    while start < len(able):
        common, end = set(able[start]), start + 1
        while end < len(able) and (longer := common & set(able[end])):
            common, end = longer, end + 1
        runs.append((range(start, end), common))
        start = end
    return runs


def _as_good(means: _Means) -> set[Module]:
    """The best module, and those that are nearly as fast."""
    best = max(means.values())
    return {module for module, mean in means.items() if mean >= best - WORTH_A_ROW}


def _second(there: Sequence[_Means], module: Module) -> tuple[Module, float] | None:
    """The best other module of those that were timed at all of these places, and how much longer it takes."""
    everywhere = set.intersection(*map(set, there)) - {module}
    if not everywhere:
        return None
    totals = {other: sum(means[other] for means in there) for other in sorted(everywhere)}
    second = max(totals, key=lambda other: totals[other])
    return second, math.exp((sum(means[module] for means in there) - totals[second]) / len(there))
