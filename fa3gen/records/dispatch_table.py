"""The table that calls of `fa3gen.attention` choose by, written from records of speeds and held against them."""

from __future__ import annotations

import bisect
import json
import math
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fa3gen.base.errors import UserError
from fa3gen.base.parts import rounded
from fa3gen.design.family import Family
from fa3gen.design.workspace import Workspace
from fa3gen.hardware.chips import H100
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.records import nearby, packed_records, tuning_records
from fa3gen.records.nearby import WORTH_A_ROW, longest_runs
from fa3gen.records.packed_records import PackedProblem, PackedRecord, PackedResult
from fa3gen.records.tuning_records import Result, TuningRecord
from fa3gen.run.dispatch import (
    DIGEST_LENGTH,
    FEW_QUERIES,
    NO_LIMIT,
    UNEVEN,
    WRITE_TABLE,
    AtMost,
    Load,
    Measurement,
    Multiples,
    Region,
    Row,
    Shapes,
    Size,
    Table,
    Times,
    of_row,
    place_of_row,
    read_table,
    seen,
    table_path,
)
from fa3gen.spec.model import WindowMask

_HEADER = f"""\
# Which module fa3gen.attention and fa3gen.attention_packed call: the first row that fits. Speeds in TFLOP/s; runner_up
# is the best other module of the same run. Written from generated/evidence/tuning and generated/evidence/packed by
# `{WRITE_TABLE}`; do not edit.
"""


def table_text(table: Table) -> str:
    """The YAML text of a table, the same for the same rows; `read_table` reads it back."""
    if not table.rows:
        return f"{_HEADER}rows: []\n"
    lines = [_HEADER + "rows:"]
    for row in table.rows:
        facts: dict[str, Any] = row.model_dump(exclude_none=True)
        measured = facts.pop("measured")
        facts["mask"] = facts["mask"] if isinstance(row.mask, WindowMask) else row.mask.kind
        entries = [f"{name}: {_flow(value)}" for name, value in facts.items()]
        lines += [f"- {entries[0]}", *(f"  {entry}" for entry in entries[1:]), "  measured:"]
        lines += [f"  - {_flow(measurement)}" for measurement in measured]
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """A value on one line; strings that YAML would read as something else are quoted."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z][\w .()/-]*(?<! )", value) and value != "null" else json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# From records to the table

# Edges of the bands of tiles per SM: within a band the number of keys decides. Below 1 some SMs have nothing to do; up
# to 4 the last wave is a large share of all, and a persistent CTA has few tiles to earn its prologue with. What is
# beyond is the last band.
BANDS = (0.25, 0.5, 1.0, 2.0, 4.0)
# Between the edges of UNEVEN, and beyond the last of them, what stands for lengths that are so uneven; and the heads of
# a group that stands for all that were not measured.
UNEVEN_MIDDLES, ANY_GROUP = (1.3, 3.5, 11.0, 40.0), 5
_UnevenBands = tuple[tuple[float | None, float], ...]  # edges and middles
ALL_BANDS: _UnevenBands = tuple(zip((*UNEVEN, None), UNEVEN_MIDDLES, strict=True))
EVEN_BANDS = 2  # of these for prompts, up to EVEN; the others for prompts beside decoding steps
EVEN = UNEVEN[EVEN_BANDS - 1]
FEWER_BANDS: _UnevenBands = ((UNEVEN[1], UNEVEN[0]), (None, UNEVEN_MIDDLES[-1]))  # for calls that are rare
PROMPT_BANDS: _UnevenBands = ((UNEVEN[0], UNEVEN_MIDDLES[0]), (None, UNEVEN_MIDDLES[1]))  # and for prompts alone
# Records of packed sequences that tell of calls between them; fewer are those of single calls.
ENOUGH = 50
MOST_GROUP = 16  # query heads of a kv head, as models have them
# Drafts of more than SHORT_DRAFT queries have rows of their own, for up to DRAFT and for more: those of a group may not
# have room in a small tile, and then it matters in how many they have.
SHORT_DRAFT, DRAFT = 4, 8
# Few queries wait for memory, and an H100's, of 0.70 of an H200's bandwidth, hides much of what tells modules apart
# where keys come from there. So in a record of such a GPU, of more keys than its L2 holds, a module that divides them
# counts for so much more. Of 96 packed cells of that kind that both GPUs have measured, what an H100 would choose has
# 0.961 of the best on the H200, and so 0.985, for 0.5 % on the H100; where L2 holds the keys it would gain nothing.
DIVIDED, LESS_BANDWIDTH = 1.05, "H100"

Record = TuningRecord | PackedRecord
_File = nearby.Module


def _file(result: Result | PackedResult) -> _File:
    """The file that a result is of."""
    return result.stem, result.sha256[:DIGEST_LENGTH]


@dataclass(frozen=True)
class _Cell:
    """A record, for rows of groups of heads that are multiples of `group`, or of up to `at_most` where that is said.
    `padded`: chosen are only modules whose tiles hold all heads of a group; `queries`: of rows for few queries the most
    that they are for, see `_where_nobody_waits`, and 0 of others."""

    record: Record
    group: int = 1
    at_most: int = 0
    padded: bool = False
    queries: int = 0

    @cached_property
    def able(self) -> dict[_File, float]:
        """The speeds of its modules that can serve every call of such rows, with LSE."""
        return {
            _file(result): result.tflops
            for result in self.record.results
            if result.spec.get("outputs", {}).get("lse", True) and self._serves_groups(result.spec)
        }

    @cached_property
    def speeds(self) -> dict[_File, float]:
        """Those of `able` that may be chosen."""
        results = _where_nobody_waits(self.record, self.queries) if self.queries else self.record.results
        chosen = {_file(result) for result in results if _most_heads(result.spec) or not self.padded}
        return {file: speed for file, speed in self.able.items() if file in chosen}

    def _serves_groups(self, spec: Mapping[str, Any]) -> bool:
        most = _most_heads(spec)
        return most >= self.at_most > 0 if most else self.group % _heads_in_a_tile(spec) == 0

    @property
    def keys(self) -> int:
        """Keys of a sequence, as far as a call tells."""
        return _known_keys(self.record)

    @property
    def worth(self) -> dict[_File, float]:
        """What the speeds count for where modules are chosen; see DIVIDED."""
        divided = _worth_more(self.record)
        return {file: speed * (DIVIDED if file[0] in divided else 1.0) for file, speed in self.speeds.items()}

    @property
    def winner(self) -> _File | None:
        """The module that won the record, where it is one of these, or is worth more."""
        won, worth = next((file for file in self.speeds if file[0] == self.record.winner), None), self.worth
        return won if won is None or worth == self.speeds else max(worth, key=lambda file: worth[file])


def _worth_more(record: Record) -> set[str]:
    """Stems of the modules that DIVIDED is about."""
    if LESS_BANDWIDTH not in record.gpu or not _is_decoding(record) or _key_bytes(record) <= H100.l2_bytes:
        return set()
    return {result.stem for result in record.results if result.spec.get("split")}


def _key_bytes(record: Record) -> int:
    """Of K and V, without keys that no window shows."""
    problem = record.problem
    sequences = len(problem.lengths_k) if isinstance(problem, PackedProblem) else problem.batch
    element = DTYPES[problem.family.kv_dtype or problem.dtype].bytes
    return sequences * problem.seq_k * problem.heads_kv * (problem.head_dim + problem.head_dim_v) * element


def _heads_in_a_tile(spec: Mapping[str, Any]) -> int:
    """Query heads of which groups are multiples in the calls of a module; 1 where tiles take any group."""
    tile = spec.get("tile", {})
    return 1 if tile.get("group") == "any" else int(tile.get("pack_heads", 1))


def _most_heads(spec: Mapping[str, Any]) -> int:
    """Query heads of a kv head that a tile has room for; 0 where a tile holds a number of its own."""
    tile = spec.get("tile", {})
    return int(tile.get("pack_heads", 1)) if tile.get("group") in ("at_most", "fitted") else 0


@dataclass(frozen=True)
class _Part:
    """What of a band goes to one module: up to so many keys (None: any number), and the records of these lengths."""

    up_to: int | None
    file: _File
    cells: tuple[_Cell, ...]


def records_of(workspace: Workspace) -> list[Record]:
    """All records that a workspace's table is made of; raises UserError as `load_all` of both kinds."""
    return [*tuning_records.load_all(workspace), *packed_records.load_all(workspace)]


def table_from_records(records: Iterable[Record]) -> str:
    """The text of the table that tuning records give, for `table_path`; raises as `rows_from_records`."""
    return table_text(Table(rows=rows_from_records(records)))


def rows_from_records(records: Iterable[Record]) -> list[Row]:
    """The rows that records give: for each layout, dtype, head dims and mask by tiles per SM, then by number of keys.

    Pages of sizes that the same modules serve have the same rows, see `_in_boxes`.

    Of a record only modules count that can serve every call: that write LSE, and pack no heads. Records fall into the
    bands of BANDS. In a band, among the records of one number of keys, the best module is the one that won all of them,
    else the one with the highest geometric mean of speeds of those that were measured in all. The lengths are taken in
    order, and rows are as few as there can be with modules that are within WORTH_A_ROW of the best at each of their
    lengths; a record that is alone with its length in the last band stands for itself. A row ends at the last of its
    lengths, the last one of a band has no end, and the best module of the most keys. A band has no rows of its own
    where those of the next larger band are within WORTH_A_ROW of the best at each of its lengths, which is so where
    nothing was measured. Raises UserError where no module was measured in all records of one length in one band.

    Calls with few queries (FEW_QUERIES, of the longest sequence) have rows of their own, before all others, where
    modules that split keys, and whose tiles have room for all heads of a kv head, serve best; of packed sequences such
    modules alone count, see `_where_nobody_waits`. Where drafts of more than SHORT_DRAFT were measured, rows are for up
    to as many and above: there, of packed ones, for the very groups that were measured first.

    Calls with more queries of packed sequences have rows of their own where modules that split keys were measured with
    them: by what all records around say, see `_of_many_queries`. So have those with windows where modules for prompts
    beside decoding steps were. Others have rows for groups of heads: where modules
    whose tiles hold several heads serve best the groups that are multiples of as many, as measured with such groups,
    these rows come first.
    """
    families: dict[Family, list[Record]] = {}
    for record in records:
        families.setdefault(record.problem.family, []).append(record)
    alike: dict[Family, list[Record]] = {}
    for family, own in families.items():
        alike.setdefault(_in_boxes(family, families), []).extend(own)
    return [row for family in sorted(alike, key=_order) for row in _of_family(family, alike[family])]


def _in_boxes(family: Family, families: Mapping[Family, Sequence[Record]]) -> Family:
    """What calls on pages have rows as: pages of the most keys that a module copies at once, and that divide their own.

    The same modules serve both.
    """
    if family.page_rows is None:
        return family
    every_size = (own for each, own in families.items() if each._replace(page_rows=family.page_rows) == family)
    specs = (result.spec for own in every_size for record in own for result in record.results)
    boxes = {spec["load"].get("page_rows") or 1 for spec in specs}
    return family._replace(page_rows=max(rows for rows in boxes if family.page_rows % rows == 0))


def _order(family: Family) -> tuple[Any, ...]:
    mask = family.mask
    reach = (0, 0)
    if isinstance(mask, WindowMask):  # those for any come last
        reach = (NO_LIMIT, 0) if mask.left is None or mask.right is None else (mask.left, mask.right)
    kinds = ("none", "causal", "window")
    own = (
        family.out_dtype or "",
        family.kv_dtype or "",
        family.block_scales,
        family.keywords,
        family.by_sequence,
        family.v_permuted,
        -(family.page_rows or 0),
    )  # of pages the largest first
    return family.layout, family.dtype, family.head_dim, family.head_dim_v, kinds.index(mask.kind), reach, *own


def _of_family(family: Family, records: Sequence[Record]) -> Iterator[Row]:
    """Rows of one family: for few queries, and for many."""
    yield from _of_few_queries(family, [record for record in records if _is_decoding(record)])
    many = [record for record in records if not _is_decoding(record)]
    packed = [record for record in many if isinstance(record, PackedRecord)]
    if any(map(_of_split_keys, many)):
        yield from _of_many_queries(family, packed)
    elif len(packed) >= ENOUGH:
        groups = _groups_of_tiles(packed, MOST_GROUP)
        if not any(map(_of_mixed, packed)):
            yield from _around(family, packed, groups, PROMPT_BANDS, nearby.MORE_TILES)
            return
        groups = [*_measured_groups(packed), *groups]
        even = [record for record in packed if size_of(record).unevenness <= EVEN]  # steps tell nothing of prompts
        yield from _around(family, even, groups, ALL_BANDS[:EVEN_BANDS], nearby.MORE_TILES)
        yield from _around(family, packed, groups, ALL_BANDS[EVEN_BANDS:], nearby.MORE_TILES, EVEN)
    else:
        yield from _of_groups(family, many)
        yield from _rows(family, [_Cell(record) for record in many])


def _of_many_queries(family: Family, records: Sequence[PackedRecord]) -> Iterator[Row]:
    """Rows for groups of heads by how uneven lengths are, by tiles per SM and by keys; see `nearby`.

    For each group that was measured, and for all others of up to as many heads as tiles have room for. Behind these
    come rows of modules that split no keys, for calls that ask for that and for more heads: for multiples of what a
    tile may hold, for one head of its own, and for any group.
    """
    room = max(_most_heads(result.spec) for record in records for result in record.results)
    groups = [*_measured_groups(records), (AtMost(at_most=room), range(1, room + 1), ANY_GROUP)]
    yield from _around(family, records, groups, ALL_BANDS)
    left = _without_split_keys(records)
    yield from _around(family, left, _groups_of_tiles(records, room), FEWER_BANDS)


# Groups of heads that rows are for: their condition, groups that modules have to serve, and one that stands for all.
_Groups = tuple[AtMost | Multiples | None, Collection[int], int]


def _measured_groups(records: Iterable[PackedRecord]) -> list[_Groups]:
    """Each group that was measured, from the smallest on."""
    measured = sorted({record.problem.group for record in records})
    return [(AtMost(at_most=group, at_least=group if group > 1 else None), (group,), group) for group in measured]


def _groups_of_tiles(records: Iterable[PackedRecord], room: int) -> list[_Groups]:
    """Multiples of what a tile of a module may hold, the most first; then one head of its own, and any group.

    Of multiples, and of any group, a module has to serve all of less than twice as many heads as there is `room` for.
    """
    specs = [result.spec for record in records for result in record.results]
    several = {_heads_in_a_tile(spec) for spec in specs if not _most_heads(spec)} - {1}
    found: list[_Groups] = [
        (Multiples(multiple_of=heads), range(heads, 2 * room * heads, heads), heads)
        for heads in sorted(several, reverse=True)
    ]
    return [*found, (AtMost(at_most=1), (1,), 1), (None, range(1, 2 * room), ANY_GROUP)]


def _around(
    family: Family,
    records: Sequence[PackedRecord],
    groups: Iterable[_Groups],
    bands: Sequence[tuple[float | None, float]],
    tiles: Sequence[float] = nearby.TILES,
    even: float = 0.0,
) -> Iterator[Row]:
    """Rows for groups of heads, and for bands of how uneven lengths are, each by its edge and its middle.

    Lengths up to `even` have other rows. Of one group its own records are what these rows serve.
    """
    sizes = [size_of(record) for record in records]
    timed = [nearby.Timed(_place_of(size), _speeds_of(record)) for size, record in zip(sizes, records, strict=True)]
    specs = {_file(result): result.spec for record in records for result in record.results}
    for condition, served, around in groups:
        able = {file for file, spec in specs.items() if _serves_all(spec, served)}
        of_group = [number for number, size in enumerate(sizes) if list(served) == [size.group]]
        above = even
        for edge, middle in bands:
            longest = Times(up_to=edge) if edge else None
            own = [number for number in of_group if above < sizes[number].unevenness <= (edge or math.inf)]
            for choice in nearby.choices(timed, able, around, middle, tiles, own):
                row = _row_of(family, choice.module, choice.tiles, choice.keys, [_told(choice, records)])
                yield row.model_copy(update={"group": condition, "longest_q": longest})
            above = edge or math.inf


def _place_of(size: Size) -> nearby.Place:
    return nearby.Place.of(size.tiles / size.sms, size.keys, size.group, size.unevenness)


def _speeds_of(record: PackedRecord) -> dict[_File, float]:
    """Of modules that write LSE."""
    return {_file(each): each.tflops for each in record.results if each.spec.get("outputs", {}).get("lse", True)}


def _serves_all(spec: Mapping[str, Any], groups: Iterable[int]) -> bool:
    """Whether the tiles of a module take all of these groups of heads."""
    most = _most_heads(spec)
    return all(group <= most if most else group % _heads_in_a_tile(spec) == 0 for group in groups)


def _told(choice: nearby.Choice, records: Sequence[PackedRecord]) -> Shapes:
    """What the records around say of a module."""
    (second, digest), ratio = choice.second if choice.second else ((None, None), None)
    return Shapes(
        shapes=len(choice.records),
        runner_up=second,
        runner_up_ratio=rounded(ratio) if ratio else None,
        runner_up_sha256=digest,
        gpu=", ".join(sorted({records[number].gpu for number in choice.records})),
    )


def _of_mixed(record: PackedRecord) -> bool:
    """Whether modules were measured that are for prompts beside decoding steps."""
    return any(each.spec.get("order", "by_sequence") != "by_sequence" for each in record.results)


def _of_split_keys(record: Record) -> set[_File]:
    """The modules of a record of packed sequences that split keys, whose tiles have room for all heads of a group."""
    if not isinstance(record, PackedRecord):
        return set()
    return {_file(each) for each in record.results if _most_heads(each.spec)}


def _without_split_keys(records: Iterable[PackedRecord]) -> list[PackedRecord]:
    """The records without the modules that split keys."""
    found: list[PackedRecord] = []
    for record in records:
        split = {stem for stem, _ in _of_split_keys(record)}
        left = [result for result in record.results if result.stem not in split]
        if left:
            found.append(record.model_copy(update={"results": left}))
    return found


def _of_groups(family: Family, records: Sequence[Record]) -> Iterator[Row]:
    """Rows for groups of heads, the largest ones first, where modules whose tiles hold several serve best."""
    packed = [record for record in records if isinstance(record, PackedRecord)]
    sizes = {_heads_in_a_tile(result.spec) for record in packed for result in record.results}
    for group in sorted(sizes - {1}, reverse=True):
        rows = list(_rows(family, [_Cell(record, group) for record in packed if record.problem.group % group == 0]))
        of_one_head = {file[0] for record in packed for file in _Cell(record).speeds}
        if any(row.module not in of_one_head for row in rows):
            yield from (row.model_copy(update={"group": Multiples(multiple_of=group)}) for row in rows)


def _is_decoding(record: Record) -> bool:
    return _most_queries(record) <= FEW_QUERIES


def _of_few_queries(family: Family, records: Sequence[Record]) -> Iterator[Row]:
    """Rows of one family for a decoding step: for groups of heads up to each one that was measured.

    Beyond these, up to as many heads as tiles have room for, modules serve that hold all heads of a group in a tile:
    others read K and V once for each head.
    """
    short, long = ([record for record in records if _is_long(record) == wanted] for wanted in (False, True))
    yield from _of_few(family, short, SHORT_DRAFT if long else FEW_QUERIES)
    drafts = [record for record in long if _most_queries(record) <= DRAFT]
    if family.layout != "dense":
        for measured, queries in ((drafts, DRAFT), (long, FEW_QUERIES)):
            yield from _of_long_drafts(family, measured, queries)
            yield from _of_few(family, measured, queries, long=True)
    else:  # the smallest band reaches down to a single tile, which tells little of one between the bands measured
        longer = [record for record in long if _most_queries(record) > DRAFT]
        yield from _of_few(family, drafts if longer else (), DRAFT, fill_up=False)
        yield from _of_few(family, longer or drafts, FEW_QUERIES, fill_up=False)


def _where_nobody_waits(record: Record, queries: int) -> Sequence[Result | PackedResult]:
    """Of a record of packed sequences the results without modules in which one CTA goes through all keys of a tile.

    There all wait for the longest sequence, and how much longer it is a call does not say. Where all are equally long,
    as in most lists, such a module may be some per cent faster. Many tiles of longer drafts even out, and keep them; of
    few such tiles, where rows are for more `queries` than were measured, modules count that hold the heads of 16, in
    tiles of the most rows, since small ones read the keys of more queries once more.
    """
    long = _is_long(record)
    if not isinstance(record, PackedRecord) or (long and record.tiles_per_sm > BANDS[-1]):
        return record.results
    split = [result for result in record.results if result.spec.get("split")]
    large = long and _most_queries(record) < queries
    fitted = [result for result in split if result.spec["tile"]["group"] == "fitted"] if large else []
    most = max((result.spec["tile"]["q"] for result in fitted), default=0)
    return [result for result in fitted if result.spec["tile"]["q"] == most] or split or record.results


def _is_long(record: Record) -> bool:
    """Whether drafts have more queries than SHORT_DRAFT."""
    return _most_queries(record) > SHORT_DRAFT


def _most_queries(record: Record) -> int:
    """Of a sequence."""
    problem = record.problem
    return max(problem.lengths_q) if isinstance(problem, PackedProblem) else problem.seq_q


def _of_long_drafts(family: Family, records: Sequence[Record], queries: int) -> Iterator[Row]:
    """Rows for up to so many queries, and the very groups that longer drafts were measured with.

    They are where modules serve best that cannot serve every smaller group: of tiles that hold some heads of one, and
    have few rows to spare for such drafts.

    They end where measuring did: at the last band, and at twice as many keys as in each. Beyond, a module that holds a
    whole group reads keys once, and what it takes to add up parts is little.
    """
    for group in sorted({record.problem.group for record in records}):
        own = [record for record in records if record.problem.group == group]
        rows = list(_rows(family, [_Cell(each, group, at_most=group, queries=queries) for each in own], fill_up=True))
        of_smaller = {file[0] for record in own for file in _Cell(record, at_most=group, queries=queries).speeds}
        if all(row.module in of_smaller for row in rows):
            continue
        exactly = AtMost(at_most=group, at_least=group if group > 1 else None)
        for row in rows:
            ends = {"seq_q": Region(up_to=queries), "group": exactly, **_ends(row, own)}
            yield row.model_copy(update=ends)


def _ends(row: Row, records: Sequence[Record]) -> dict[str, Region | Load | None]:
    """Where a row ends that has no end of its own: by the last band, and the most keys, of the records around it."""
    last = max(map(band_of, records))
    load = row.tiles_per_sm or (Load(up_to=BANDS[last]) if last < len(BANDS) else None)
    within = [record for record in records if load is None or record.tiles_per_sm <= load.up_to]
    number = max(map(band_of, within))
    longest = max(_known_keys(record) for record in within if band_of(record) == number)
    return {"tiles_per_sm": load, "seq_k": row.seq_k or Region(up_to=2 * longest)}


def _of_few(
    family: Family, records: Sequence[Record], queries: int, *, long: bool = False, fill_up: bool = True
) -> Iterator[Row]:
    """The rows of these records, for up to so many queries; `long`: of longer drafts; `fill_up`: see `_rows`."""
    room = max((_most_heads(result.spec) for record in records for result in record.results), default=0)
    groups = sorted({record.problem.group for record in records if record.problem.group <= room})
    for at_most in (*groups, *[room] * bool(groups)):
        last = min(at_most, groups[-1])
        # Of longer drafts records of half a group count, too: what fills a tile, and how often, differs little.
        fewest = max(last // 2, 1) if long else last
        able = [each for each in records if fewest <= each.problem.group <= last]
        cells = [_Cell(each, at_most=at_most, padded=at_most > last, queries=queries) for each in able]
        own = {"seq_q": Region(up_to=queries), "group": AtMost(at_most=at_most)}
        for row in _rows(family, cells, fill_up=fill_up):
            yield row.model_copy(update=own)


def band_of(record: Record) -> int:
    """The number of a record's band: that of the first edge in BANDS which its tiles per SM do not exceed."""
    return bisect.bisect_left(BANDS, record.tiles_per_sm)


def _rows(family: Family, cells: Iterable[_Cell], *, fill_up: bool = False) -> Iterator[Row]:
    """Rows of one family and group: its bands from the largest to the smallest, and turned round.

    `fill_up`: bands in which nothing was measured go with the next smaller one that has rows, and not with the next
    larger one: where keys are split, few tiles are what matters.
    """
    able = [cell for cell in cells if cell.speeds]
    bands: list[tuple[float | None, list[_Part]]] = []
    above = len(BANDS)  # the smallest band so far
    for number in reversed(range(len(BANDS) + 1)):
        lengths = _by_length([cell for cell in able if band_of(cell.record) == number])
        if not lengths:
            continue
        if bands and (served := _served_by(bands[-1][1], lengths)):
            bands[-1] = bands[-1][0], served
        else:
            edge = BANDS[above - 1 if fill_up else number] if bands else None
            bands.append((edge, _parts(lengths, last=number == len(BANDS))))
        above = number
    for edge, parts in reversed(bands):
        for part in parts:
            yield _row(family, edge, part)


def _by_length(cells: Sequence[_Cell]) -> dict[int, list[_Cell]]:
    """Records by their number of keys, the fewest first."""
    lengths: dict[int, list[_Cell]] = {}
    for cell in sorted(cells, key=lambda cell: cell.keys):
        lengths.setdefault(cell.keys, []).append(cell)
    return lengths


def _means(speeds: Sequence[Mapping[_File, float]]) -> dict[_File, float]:
    """Geometric means of the speeds, or worths, of modules that were measured in all records, the fastest first."""
    everywhere = [file for file in speeds[0] if all(file in others for others in speeds)]
    means = {file: statistics.geometric_mean([found[file] for found in speeds]) for file in everywhere}
    return dict(sorted(means.items(), key=lambda item: -item[1]))


def _admissible(cells: Sequence[_Cell], *, only_best: bool = False) -> dict[_File, float]:
    """Modules that may serve the records of one length, and how fast they are beside the best; see `rows_from_records`.

    `only_best`: no other may. Raises UserError where no module was measured in all.
    """
    speeds = _means([cell.worth for cell in cells])
    if not speeds:
        problems = "; ".join(cell.record.problem.label for cell in cells)
        raise UserError(
            f"no module was measured in all tuning records of {problems}, and the table has one row for them; measure "
            "the same modules at these shapes (`fa3gen tune --measure`), or delete records in generated/evidence/tuning"
        )
    winners = {cell.winner for cell in cells}
    best = winners.pop() if len(winners) == 1 else None
    if best not in speeds:
        best = next(iter(speeds))
    if only_best:
        return {best: 1.0}
    shares = {file: speed / speeds[best] for file, speed in speeds.items()}
    return {file: share for file, share in shares.items() if file == best or share >= 1 - WORTH_A_ROW}


def _parts(lengths: Mapping[int, Sequence[_Cell]], *, last: bool) -> list[_Part]:
    """The fewest parts of a band: from each beginning the module that may stay longest, and of those the fastest.

    What has more keys than all that were measured is served as the longest of these, by the best module there.
    """
    left = []
    for keys, cells in lengths.items():
        stands_for_itself = last and len(cells) == 1
        left.append((keys, cells, _admissible(cells, only_best=stands_for_itself or keys == max(lengths))))
    parts = []
    for places, common in longest_runs([shares for _, _, shares in left]):
        run = left[places.start : places.stop]
        file = max(sorted(common), key=lambda file: math.prod(shares[file] for _, _, shares in run))
        cells = tuple(cell for _, found, _ in run for cell in found)
        parts.append(_Part(run[-1][0] if places.stop < len(left) else None, file, cells))
    return parts


def _served_by(parts: Sequence[_Part], lengths: Mapping[int, Sequence[_Cell]]) -> list[_Part] | None:
    """The parts of the next larger band with these records among their own; None where they are not good enough.

    Of parts without a length of these, that is said by the nearest one: many short sequences tell little of a few.
    """
    served: list[_Part] = []
    below = -math.inf
    for part in parts:
        up_to = math.inf if part.up_to is None else part.up_to
        own = [keys for keys in lengths if below < keys <= up_to]
        nearest = next((keys for keys in lengths if keys > up_to), max(lengths))
        if any(part.file not in _admissible(lengths[keys]) for keys in own or [nearest]):
            return None
        served.append(replace(part, cells=(*part.cells, *(cell for keys in own for cell in lengths[keys]))))
        below = up_to
    return served


def _row(family: Family, edge: float | None, part: _Part) -> Row:
    return _row_of(family, part.file, edge, part.up_to, _measured(part))


def _row_of(
    family: Family, file: _File, tiles: float | None, keys: int | None, measured: Sequence[Measurement | Shapes]
) -> Row:
    stem, digest = file
    return Row(
        dtype=family.dtype,
        head_dim=family.head_dim,
        head_dim_v=family.head_dim_v,
        mask=family.mask,
        out_dtype=family.out_dtype,
        kv_dtype=family.kv_dtype,
        block_scales=family.block_scales or None,
        sink=family.sink or None,
        softcap=family.softcap or None,
        by_sequence="v" if family.by_sequence else None,
        v_permuted=family.v_permuted or None,
        layout=None if family.layout == "dense" else family.layout,
        page_rows=family.page_rows,
        tiles_per_sm=None if tiles is None else Load(up_to=tiles),
        seq_k=None if keys is None else Region(up_to=keys),
        module=stem,
        sha256=digest,
        measured=list(measured),
    )


def _measured(part: _Part) -> list[Measurement | Shapes]:
    """A line for each record that is alone with its length in the last band, and one for all others."""
    last = _by_length([cell for cell in part.cells if band_of(cell.record) == len(BANDS)])
    alone = [cells[0] for cells in last.values() if len(cells) == 1]
    many = [cell for cell in part.cells if cell not in alone]
    return [*(_measurement(part.file, cell) for cell in alone), *([_shapes(part.file, many)] if many else [])]


def _measurement(file: _File, cell: _Cell) -> Measurement:
    """The speed of a row's module in one record, beside the best of all others there that serve its calls."""
    others = [other for other in cell.able if other[0] != file[0]]
    second = max(others, key=lambda other: cell.able[other], default=None)
    return Measurement(
        seq=cell.keys,
        tflops=cell.speeds[file],
        runner_up=second[0] if second else None,
        runner_up_tflops=cell.able[second] if second else None,
        runner_up_sha256=second[1] if second else None,
        gpu=cell.record.gpu,
    )


def _shapes(file: _File, cells: Sequence[_Cell]) -> Shapes:
    """How much faster a row's module was over many records than the best other one that serves all."""
    speeds = _means([cell.able for cell in cells])
    second = next((other for other in speeds if other[0] != file[0]), None)
    return Shapes(
        shapes=len(cells),
        runner_up=second[0] if second else None,
        runner_up_ratio=rounded(speeds[file] / speeds[second]) if second else None,
        runner_up_sha256=second[1] if second else None,
        gpu=", ".join(sorted({cell.record.gpu for cell in cells})),
    )


@dataclass(frozen=True)
class Share:
    """What rows make of a record: the row that serves its call, and the speed of that row's module over that of the
    fastest one of the record; None for a module that was not timed there."""

    record: Record
    row: Row
    share: float | None


def shares(records: Iterable[Record], rows: Sequence[Row]) -> list[Share]:
    """What rows make of each record that one of them serves."""
    table = Table(rows=list(rows))
    found = []
    for record in records:
        family, size = record.problem.family, size_of(record)
        row = next((row for _, row in table.of_family(family) if row.serves_size(size)), None)
        if row is not None:
            speeds = {result.stem: result.tflops for result in record.results}
            speed = speeds.get(row.module)
            found.append(Share(record, row, None if speed is None else speed / max(speeds.values())))
    return found


def _known_keys(record: Record) -> int:
    """Keys of a sequence, of the longest one where sequences are packed, of those that a window shows."""
    problem = record.problem
    if isinstance(problem, PackedProblem):
        return seen(max(problem.lengths_k), problem.window)
    return problem.seq_k


def size_of(record: Record) -> Size:
    """That of the call that was timed, as the host knows it."""
    problem, keys = record.problem, _known_keys(record)
    if not isinstance(problem, PackedProblem):
        return Size(keys, problem.shape.tiles, record.sms, problem.group, problem.seq_q)
    longest = _most_queries(record)
    return Size(keys, problem.tiles, record.sms, problem.group, longest, mean_queries=problem.seq_q)


def check_table(workspace: Workspace, records: Iterable[Record]) -> list[str]:
    """What is wrong with the workspace's table: other rows than the records give, and rows without their module.

    Each with the command that mends it; nothing when all is well. Raises UserError as `read_table` and
    `rows_from_records`.
    """
    path = table_path(workspace)
    wrong = []
    if path.read_text(encoding="utf-8") != table_from_records(records):
        wrong.append(f"{workspace.shown(path)} is not what the records give; run: {WRITE_TABLE}")
    return wrong + rows_without_their_module(workspace)


def rows_without_their_module(workspace: Workspace) -> list[str]:
    """What is wrong with the rows of the workspace's table: modules that are missing or not the files measured."""
    path = table_path(workspace)
    wrong = []
    sound = set()  # what is looked at, of rows that differ in sizes and measurements only
    for number, row in enumerate(read_table(path).rows, 1):
        looked_at = row.module, row.sha256, row.family, row.group
        if looked_at in sound:
            continue
        try:
            of_row(workspace, row, place_of_row(workspace, path, number, row))
        except UserError as error:
            wrong.append(str(error))
        else:
            sound.add(looked_at)
    return wrong
