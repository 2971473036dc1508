"""Which modules serve calls of many queries, by records around them; the speeds here are made up."""

from __future__ import annotations

import itertools
import math

from fa3gen.records import nearby
from fa3gen.records.nearby import Module, Place, Timed

A, B, C = (("a", "1"), ("b", "2"), ("c", "3"))


def timed(
    speeds: dict[Module, float], *, tiles: float = 1.0, keys: int = 4096, group: int = 4, uneven: float = 1.0
) -> Timed:
    return Timed(Place.of(tiles, keys, group, uneven), speeds)


def found(records: list[Timed], able: tuple[Module, ...] = (A, B, C), **where: float) -> list[nearby.Choice]:
    return list(nearby.choices(records, able, where.get("group", 4), where.get("uneven", 1.0)))


def test_one_record_speaks_for_the_whole_grid() -> None:
    [only] = found([timed({A: 100.0, B: 80.0, C: 90.0})])
    assert (only.tiles, only.keys, only.module, only.records) == (None, None, A, (0,))
    assert only.second is not None and only.second[0] == C and math.isclose(only.second[1], 100 / 90, rel_tol=1e-5)


def test_keys_are_cut_in_the_middle_between_records() -> None:
    """By octaves, to half of one."""
    few, many = found([timed({A: 100.0, B: 50.0}, keys=1024), timed({A: 50.0, B: 100.0}, keys=16384)])
    assert (few.module, many.module, many.keys) == (A, B, None)
    assert few.keys is not None and 4096 / 2**0.5 <= few.keys <= 4096 * 2**0.5


def test_tiles_are_cut_at_an_edge_between_records() -> None:
    few, many = found([timed({A: 100.0, B: 50.0}, tiles=0.3), timed({A: 50.0, B: 100.0}, tiles=12.0)])
    assert (few.module, many.module, many.tiles) == (A, B, None)
    assert few.tiles in nearby.TILES and 1 <= few.tiles <= 4
    least = nearby.TILES[0]
    [one] = found([timed({A: 100.0, B: 50.0}, tiles=least / 8), timed({A: 100.0, B: 50.0}, tiles=least)])
    assert one.records == (0, 1)  # fewer tiles take as long


def test_a_group_hardly_tells_of_another_and_even_lengths_little_of_uneven_ones() -> None:
    groups = [timed({A: 100.0, B: 90.0}, group=4), timed({A: 50.0, B: 100.0}, group=8)]
    assert [choice.module for choice in found(groups, group=4)] == [A]
    assert [choice.module for choice in found(groups, group=8)] == [B]
    lengths = [timed({A: 100.0, B: 50.0}), timed({A: 50.0, B: 100.0}, uneven=30.0)]
    assert [choice.module for choice in found(lengths, uneven=1.3)] == [A]
    assert [choice.module for choice in found(lengths, uneven=40.0)] == [B]


def test_most_of_many_records_decide() -> None:
    """Not the one that lies nearest."""
    others = [timed({A: 100.0, B: 95.0}, keys=keys) for keys in (3900, 4000, 4200, 4300)]
    assert {choice.module for choice in found([timed({A: 95.0, B: 100.0}), *others])} == {A}


def test_a_module_that_few_records_timed_is_not_taken() -> None:
    records = [timed({A: 100.0, B: 90.0}, keys=keys) for keys in (3900, 4000, 4200, 4300)]
    assert {choice.module for choice in found([*records, timed({A: 50.0, B: 60.0, C: 100.0})])} == {A}
    # One that was not timed in one of many, and is much faster in these, is.
    records = [timed({A: 100.0, C: 150.0}, keys=keys) for keys in (3900, 4000, 4200, 4300)]
    assert {choice.module for choice in found([*records, timed({A: 100.0})])} == {C}


def test_a_record_is_served_by_a_module_that_was_timed_in_it() -> None:
    """In its cell of the grid, by tiles and by keys; where there is none that was in all of them, by the best."""
    fast = [timed({A: 100.0, C: 150.0}, keys=keys) for keys in (3900, 4000, 4200, 4300)]
    records = [*fast, timed({A: 100.0, B: 50.0}, keys=3000)]

    def chosen(served: list[int], records: list[Timed] = records) -> list[Module]:
        choices = list(nearby.choices(records, (A, B, C), 4, 1.0, served=served))
        band = next(choice.tiles for choice in choices if choice.tiles is None or choice.tiles >= 1.0)
        parts = [choice for choice in choices if choice.tiles == band]
        return [next(part.module for part in parts if keys <= (part.keys or keys)) for keys in (3000, 4096)]

    assert chosen([]) == [C, C]
    assert chosen([0, 1, 2, 3, 4]) == [A, C]
    assert chosen([0, 4], [*fast, timed({B: 100.0}, keys=4096)]) == [C, C]


def test_a_module_stays_where_another_is_hardly_faster() -> None:
    records = [timed({A: 100.0, B: 99.5}, keys=1024), timed({A: 80.0, B: 100.0}, keys=16384)]
    assert [choice.module for choice in found(records)] == [B]
    [first, *_] = found([timed({A: 100.0, B: 95.0}, keys=1024), records[1]])
    assert first.module == A


def test_only_modules_that_are_able_serve() -> None:
    records = [timed({A: 100.0, B: 80.0, C: 90.0})]
    [only] = found(records, (B,))
    assert (only.module, only.second) == (B, None)
    assert found(records, ()) == found([], (A,)) == []


def test_parts_cover_the_grid_in_order() -> None:
    """Bands of tiles from the fewest on, in each parts of keys from the fewest on, the last ones without an end."""
    cells = itertools.product((0.2, 1.0, 9.0), (512, 4096, 30000))
    speeds = itertools.cycle(({A: 100.0, B: 60.0, C: 70.0}, {A: 60.0, B: 100.0, C: 70.0}))
    records = [timed(next(speeds), tiles=tiles, keys=keys) for tiles, keys in cells]
    choices = found(records)
    bands = [edge for edge, _ in itertools.groupby(choice.tiles for choice in choices)]
    assert len(bands) >= 3 and bands[-1] is None and bands[:-1] == sorted(set(bands[:-1]) - {None})
    for band in bands:
        ends = [choice.keys for choice in choices if choice.tiles == band]
        assert ends[-1] is None and ends[:-1] == sorted(ends[:-1]) and len(ends) >= 2
    turned = found(records[::-1])
    assert [(each.tiles, each.keys, each.module) for each in turned] == [
        (each.tiles, each.keys, each.module) for each in choices
    ]
