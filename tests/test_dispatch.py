"""The table that says which module `fa3gen.attention` calls: from records, as text, and how a row is chosen."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rendering import CHECKOUT

from fa3gen.base.errors import UserError
from fa3gen.base.files import sha256
from fa3gen.design.family import Family
from fa3gen.design.masks import reach
from fa3gen.design.workspace import Workspace
from fa3gen.records import dispatch_table
from fa3gen.records.tuning_records import MaskShape
from fa3gen.run import dispatch
from fa3gen.run.dispatch import (
    Choice,
    Load,
    Measurement,
    Multiples,
    NoKernel,
    Region,
    Row,
    Shapes,
    Size,
    Stretch,
    Table,
)
from fa3gen.spec import yamltree
from fa3gen.spec.model import WINDOW_MAX, CausalMask, Mask, NoMask, WindowMask
from fa3gen.verify import reference

CAUSAL = Family("bf16", 128, 128, CausalMask())
GPU = "NVIDIA H200"


def mask(kind: Any, left: int | None = None, right: int | None = None) -> MaskShape:
    return MaskShape(kind=kind, left=left, right=right)


@dataclass(frozen=True)
class Problem:
    seq_q: int
    seq_k: int
    mask: MaskShape = MaskShape(kind="causal")
    dtype: Any = "bf16"
    head_dim: int = 128
    head_dim_v: int = 128
    out_dtype: Any = None
    sink: bool = False
    softcap: bool = False
    by_sequence: tuple[str, ...] = ()
    v_permuted: bool = False
    group: int = 1
    batch: int = 1
    heads_kv: int = 8

    @property
    def family(self) -> Family:
        return Family(
            *(self.dtype, self.head_dim, self.head_dim_v, self.mask.spec_mask(), self.out_dtype),
            by_sequence=self.by_sequence,
            sink=self.sink,
            softcap=self.softcap,
            v_permuted=self.v_permuted,
        )

    @property
    def label(self) -> str:
        return f"{self.seq_q}x{self.seq_k}"


@dataclass(frozen=True)
class Result:
    stem: str
    tflops: float
    sha256: str
    spec: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    problem: Problem
    results: list[Result]
    winner: str
    gpu: str = GPU
    tiles_per_sm: float = 7.75

    def result(self, stem: str) -> Result:
        return {result.stem: result for result in self.results}[stem]


def record(seq: int, speeds: dict[str, float], *, winner: str = "", no_lse: str = "", **changes: Any) -> Record:
    """A record of one length, of a large problem unless `tiles` says how many there are per SM; the fastest wins
    unless another is named."""
    packed, split = changes.pop("packed", ""), changes.pop("split", "")
    results = [
        Result(
            stem,
            tflops,
            f"{len(stem):02d}" * 32,
            {
                "outputs": {"lse": stem != no_lse},
                "tile": {"pack_heads": 4 if stem == packed else 1},
            }
            | ({"split": {"count": "auto"}, "tile": {"pack_heads": 16, "group": "at_most"}} if stem == split else {}),
        )
        for stem, tflops in speeds.items()
    ]
    gpu, won = changes.pop("gpu", GPU), winner or max(speeds, key=lambda stem: speeds[stem])
    tiles = changes.pop("tiles", 7.75)
    return Record(Problem(seq, changes.pop("seq_k", seq), **changes), results, won, gpu, tiles)


def shape_of(rows: list[Row]) -> list[tuple[int | None, str, list[int]]]:
    return [
        (
            row.seq_k.up_to if row.seq_k else None,
            row.module,
            [measured.seq for measured in row.measured if isinstance(measured, Measurement)],
        )
        for row in rows
    ]


def conditions(rows: list[Row]) -> list[tuple[float | None, int | None, str]]:
    """Tiles per SM and keys up to which a row serves, and its module."""
    return [
        (row.tiles_per_sm and row.tiles_per_sm.up_to, row.seq_k and row.seq_k.up_to, row.module)  # type: ignore[misc]
        for row in rows
    ]


# From records to rows


def test_neighbours_with_the_same_winner_make_one_row() -> None:
    winners = {512: "a", 1024: "a", 2048: "b", 4096: "a", 8192: "c", 16384: "c"}
    records = [record(seq, {"a": 1.0, "b": 1.0, "c": 1.0} | {stem: 2.0}) for seq, stem in winners.items()]
    rows = dispatch_table.rows_from_records(reversed(records))
    expected = [(1024, "a", [512, 1024]), (2048, "b", [2048]), (4096, "a", [4096]), (None, "c", [8192, 16384])]
    assert shape_of(rows) == expected


def test_the_winner_is_the_record_s_and_the_runner_up_the_best_of_the_others() -> None:
    [row] = dispatch_table.rows_from_records([record(512, {"k6": 401.0, "fwd": 400.0, "k5": 300.0}, winner="fwd")])
    assert row.module == "fwd"
    second = {"runner_up": "k6", "runner_up_tflops": 401.0, "runner_up_sha256": "02" * 8}
    assert row.measured == [Measurement(seq=512, tflops=400.0, **second, gpu=GPU)]


@pytest.mark.parametrize(
    ("speed", "queries", "keys", "gpu", "taken"),
    [
        (96.0, 1, 16384, "NVIDIA H100 80GB HBM3", "decode"),
        (95.0, 1, 16384, "NVIDIA H100 80GB HBM3", "small"),
        (96.0, 1, 8192, "NVIDIA H100 80GB HBM3", "small"),  # 32 MiB, which L2 holds
        (96.0, 1, 16384, "NVIDIA H200", "small"),
        (96.0, 64, 16384, "NVIDIA H100 80GB HBM3", "small"),
    ],
)
def test_where_memory_hides_the_difference_keys_are_divided(
    speed: float, queries: int, keys: int, gpu: str, taken: str
) -> None:
    """The speeds in the row stay what was measured; one for any group has none of a module with room for some heads."""
    one = record(queries, {"small": 100.0, "decode": speed}, split="decode", seq_k=keys, gpu=gpu)
    row, *_ = dispatch_table.rows_from_records([one])  # the first is for groups as measured
    [measured] = row.measured
    assert row.module == taken and isinstance(measured, Measurement)
    assert {measured.tflops, measured.runner_up_tflops} == {100.0, speed if queries == 1 else None}


def test_a_module_without_lse_is_passed_over() -> None:
    records = [
        record(512, {"o_only": 9.0, "k5": 7.0, "k6": 8.0}, no_lse="o_only"),
        record(1024, {"x": 1.0}, no_lse="x"),
    ]
    assert shape_of(dispatch_table.rows_from_records(records)) == [(None, "k6", [512])]


def test_families_stand_apart_in_a_fixed_order() -> None:
    masks = [mask("window", 512, 0), mask("window", 64, 0), mask("causal"), mask("none")]
    records = [record(512, {"a": 1.0}, mask=one, head_dim=dim) for dim in (128, 64) for one in masks]
    records += [record(512, {"a": 1.0}, dtype="fp16", head_dim=64), record(512, {"a": 1.0}, head_dim_v=64)]
    families = [f"{row.family}" for row in dispatch_table.rows_from_records(records)]
    reaches = ["no mask", "causal", "window (64, 0)", "window (512, 0)"]
    dims = ["64/128", "128/64", "128"]
    expected = [f"bf16, head dim {d}, {m}" for d in dims for m in (reaches if d != "128/64" else ["causal"])]
    assert families == [*expected, "fp16, head dim 64/128, causal"]


def test_modules_of_float32_o_have_rows_of_their_own() -> None:
    records = [record(512, {"wide": 1.0}, out_dtype="fp32"), record(512, {"narrow": 1.0})]
    narrow, wide = dispatch_table.rows_from_records(records)
    assert (narrow.module, narrow.out_dtype, wide.module, wide.out_dtype) == ("narrow", None, "wide", "fp32")
    assert not narrow.serves(wide.family, Size(512, 1)) and not wide.serves(narrow.family, Size(512, 1))


def test_modules_of_8_bits_have_rows_by_how_v_lies(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [{}, {"dtype": "e4m3", "out_dtype": "bf16"}]
    kinds.append({**kinds[1], "by_sequence": ("v",)})
    kinds.append({**kinds[2], "v_permuted": True})
    rows = dispatch_table.rows_from_records(
        [record(512, {f"m{number}": 1.0}, **kind) for number, kind in enumerate(kinds)]
    )
    assert [(row.module, row.dtype, row.out_dtype, row.by_sequence, row.v_permuted) for row in rows] == [
        *[("m0", "bf16", None, None, None), ("m1", "e4m3", "bf16", None, None)],
        *[("m2", "e4m3", "bf16", "v", None), ("m3", "e4m3", "bf16", "v", True)],
    ]
    for row in rows:
        assert [other.module for other in rows if other.serves(row.family, Size(512, 1))] == [row.module]
    path = tmp_path / "dispatch.yaml"
    path.write_text(dispatch_table.table_text(dispatch.Table(rows=rows)))
    assert dispatch.read_table(path).rows == rows and path.read_text().count("by_sequence: v") == 2


def test_modules_with_sinks_or_a_cap_have_rows_of_their_own(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [{}, {"sink": True}, {"softcap": True}]
    records = [record(512, {f"m{number}": 1.0}, **kind) for number, kind in enumerate(kinds)]
    rows = dispatch_table.rows_from_records(records)
    assert [(row.module, row.sink, row.softcap) for row in rows] == [
        *[("m0", None, None), ("m1", True, None), ("m2", None, True)]
    ]
    for row in rows:
        assert [other.module for other in rows if other.serves(row.family, Size(512, 1))] == [row.module]
    text = dispatch_table.table_text(dispatch.Table(rows=rows))
    assert text.count("  sink: true\n") == text.count("  softcap: true\n") == 1
    path = tmp_path / "dispatch.yaml"
    path.write_text(text)
    assert dispatch.read_table(path).rows == rows


def test_heads_that_are_packed_serve_some_groups_only() -> None:
    records = [record(512, {"pack4": 9.0, "k6": 8.0}, packed="pack4")]
    assert shape_of(dispatch_table.rows_from_records(records)) == [(None, "k6", [512])]


def test_bands_of_tiles_per_sm_have_rows_of_their_own() -> None:
    """The edges belong to the smaller band; a band in which nothing was measured goes with the next larger one."""
    small, large = {"few": 2.0, "many": 1.0}, {"few": 1.0, "many": 2.0}
    records = [record(4096, large), record(512, large, tiles=4.01), record(512, small, tiles=1.0, seq_k=4096)]
    records += [record(512, small, tiles=0.75), record(128, {"few": 1.0, "tiny": 2.0}, tiles=0.25)]
    rows = dispatch_table.rows_from_records(records)
    assert conditions(rows) == [(0.25, None, "tiny"), (1.0, None, "few"), (None, None, "many")]
    assert [len(row.measured) for row in rows] == [1, 1, 2]


def test_the_smallest_problems_alone_serve_all_sizes() -> None:
    records = [record(512, {"a": 2.0}, tiles=0.25), record(512, {"b": 2.0}, tiles=2.0)]
    assert conditions(dispatch_table.rows_from_records(records)) == [(0.25, None, "a"), (None, None, "b")]


def test_of_many_records_of_a_length_the_geometric_mean_decides() -> None:
    """`b` is faster on average and `c` fastest of all, but not measured everywhere."""
    records = [
        record(512, {"a": 3.0, "b": 2.0}, tiles=1.0),
        record(512, {"a": 1.0, "b": 2.0, "c": 9.0}, tiles=0.6),
        record(512, {"a": 2.0, "b": 2.0, "c": 9.0}, tiles=0.7),
    ]
    [row] = dispatch_table.rows_from_records(records)
    assert row.module == "b"
    ratio = round((2 * 2 * 2 / (3 * 1 * 2)) ** (1 / 3), 3)
    assert row.measured == [Shapes(shapes=3, runner_up="a", runner_up_ratio=ratio, runner_up_sha256="01" * 8, gpu=GPU)]


def test_who_won_every_record_of_a_length_needs_no_mean() -> None:
    """The holder of a title keeps it against one that is hardly faster."""
    records = [record(512, {"b": 2.001, "a": 2.0}, winner="a", tiles=tiles) for tiles in (0.6, 0.7)]
    records.append(record(1024, {"a": 2.0, "b": 1.0}, tiles=0.7))
    assert conditions(dispatch_table.rows_from_records(records)) == [(None, None, "a")]


def test_a_module_stays_where_another_is_hardly_faster() -> None:
    """As few rows as there can be: `b` may serve all lengths but the last, `a` only the first."""
    speeds = {128: (2.01, 2.0), 256: (2.0, 2.01), 512: (2.0, 2.01), 1024: (1.0, 2.0), 2048: (2.0, 1.9)}
    records = [record(seq, {"a": a, "b": b}, tiles=0.7) for seq, (a, b) in speeds.items()]
    assert conditions(dispatch_table.rows_from_records(records)) == [(None, 1024, "b"), (None, None, "a")]


def test_a_record_alone_in_the_last_band_stands_for_itself() -> None:
    records = [record(512, {"a": 2.01, "b": 2.0}), record(1024, {"a": 2.0, "b": 2.01})]
    assert conditions(dispatch_table.rows_from_records(records)) == [(None, 512, "a"), (None, None, "b")]


def test_a_band_that_the_next_larger_one_serves_has_no_rows() -> None:
    """With other lengths, too; what was measured in it is counted where it is served."""
    large = [record(512, {"a": 2.0, "b": 1.0}), record(4096, {"a": 1.0, "b": 2.0})]
    near = [record(777, {"b": 2.0, "a": 2.01}, tiles=3.0), record(256, {"a": 2.0, "b": 1.0}, tiles=3.0)]
    rows = dispatch_table.rows_from_records([*large, *near])
    assert conditions(rows) == [(None, 512, "a"), (None, None, "b")]
    assert [type(line).__name__ for line in rows[1].measured] == ["Measurement", "Shapes"]
    far = record(256, {"a": 1.9, "b": 2.0}, tiles=3.0)
    own = conditions(dispatch_table.rows_from_records([*large, near[0], far]))
    assert own[:2] == [(4.0, 256, "b"), (4.0, None, "a")]


def test_decoding_steps_do_not_share_their_rows_with_drafts() -> None:
    """Of dense tensors, too: up to four queries, up to eight, and up to 16, each by their own records."""
    step = record(1, {"small": 10.0, "decode": 40.0}, split="decode", seq_k=4096)
    draft = record(8, {"small": 90.0, "decode": 70.0}, split="decode", seq_k=4096)
    longer = record(16, {"small": 90.0, "decode": 120.0}, split="decode", seq_k=4096)
    for records, wanted in (
        ([step, draft], [(4, "decode"), (16, "small")]),
        ([step], [(16, "decode")]),
        ([draft], [(16, "small")]),
        ([draft, longer], [(8, "small"), (16, "decode")]),
        ([step, longer], [(4, "decode"), (16, "decode")]),
    ):
        rows = dispatch_table.rows_from_records([record(4096, {"small": 500.0}), *records])
        one = dispatch.AtMost(at_most=1)
        assert [(row.seq_q.up_to, row.module) for row in rows if row.seq_q and row.group == one] == wanted


def test_dense_drafts_between_measured_bands_go_with_more_tiles() -> None:
    """Steps go with fewer, where it pays to split keys."""
    speeds = {0.1: {"small": 10.0, "decode": 40.0}, 1.5: {"small": 90.0, "decode": 70.0}}
    for queries, edges in ((1, [(1.0, "decode"), (None, "small")]), (8, [(0.25, "decode"), (None, "small")])):
        few = [record(queries, found, split="decode", seq_k=4096, tiles=tiles) for tiles, found in speeds.items()]
        steps = [record(1, {"small": 10.0, "decode": 40.0}, split="decode", seq_k=4096, tiles=0.1)] * (queries > 1)
        rows = dispatch_table.rows_from_records([record(4096, {"small": 500.0}), *few, *steps])
        own = [
            row for row in rows if row.seq_q == dispatch.Region(up_to=16) and row.group == dispatch.AtMost(at_most=1)
        ]
        assert [(row.tiles_per_sm and row.tiles_per_sm.up_to, row.module) for row in own] == edges


def test_records_without_a_module_in_common_are_refused() -> None:
    twice = [record(512, {"a": 1.0}), record(512, {"bb": 1.0}, gpu="NVIDIA H100")]
    with pytest.raises(UserError, match="no module was measured in all tuning records of 512x512; 512x512, and"):
        dispatch_table.rows_from_records(twice)
    assert len(dispatch_table.rows_from_records([twice[0], twice[0]])) == 1


# The file


def each_line_once(text: str) -> str:
    """A table with each line of another one in it, at least once, and with no more rows than that takes.

    Entries are read one by one, so what a table says is what its lines say; of some 160,000 one in 15 is not the same
    as another. A row has the next line of each entry that has one left, in the order of a row's entries.
    """
    head, begin, rows = text.partition("rows:\n")
    lines: dict[str, dict[str, None]] = {name: {} for name in Row.model_fields}
    for line in rows.splitlines():
        name = "measured" if line.startswith("  - ") else line[2:].partition(":")[0]
        lines[name][line[2:]] = None  # whether it is the first of a row or not
    title, *measured = lines.pop("measured")
    made = []
    for entries in itertools.zip_longest(*lines.values()):
        first, *others = [line for line in entries if line is not None]
        made += [f"- {first}", *(f"  {line}" for line in others), f"  {title}", f"  {measured.pop()}"]
    return head + begin + "\n".join([*made, *(f"  {line}" for line in measured)]) + "\n"


def test_the_packages_table_is_read_without_a_parser_of_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes a minute for all of it, and gives the same for each of its lines."""
    path, shorter = dispatch.table_path(CHECKOUT), tmp_path / "dispatch.yaml"
    text = path.read_text(encoding="utf-8")
    lines = each_line_once(text)
    assert {line[2:] for line in lines.splitlines()} == {line[2:] for line in text.splitlines()}
    shorter.write_text(lines, encoding="utf-8")
    tree = yamltree.read(shorter, shorter, [])
    assert tree is not None and dispatch.rows_as_written(lines) == tree.plain()["rows"]
    monkeypatch.setattr(dispatch, "read", None)
    found = dispatch.read_table(path)  # which may have been used, and then remembers which rows are of a family
    assert set(Table.model_fields) == {"rows"} and len(found.rows) == text.count("\n- ")


def test_a_table_is_parsed_once_for_as_long_as_it_says_the_same(
    place: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of a new size looks for its row, and does not wait for all of them to be read again."""
    path, parsed, rows_as_written = dispatch.table_path(place), [], dispatch.rows_as_written

    def counted(text: str) -> list[dict[str, Any]]:
        parsed.append(text)
        return rows_as_written(text)

    monkeypatch.setattr(dispatch, "rows_as_written", counted)
    rows_for(place, (1024, "k6_d128_causal"), (None, "k6_d128_causal"))
    path.write_text("# Nobody has read this one.\n" + path.read_text())
    dispatch.choose(CAUSAL, Size(512, 9), lse=True, workspace=place)
    assert parsed
    parsed.clear()
    for keys in (512, 1024, 2048):
        dispatch.choose(CAUSAL, Size(keys, 9), lse=True, workspace=place)
    assert not parsed
    first = dispatch.read_table(path)
    rows_for(place, (None, "k6_d128_causal"))
    assert len(first.rows) == 2 and len(dispatch.read_table(path).rows) == 1


def test_a_table_is_read_once_unless_it_may_have_been_written(
    place: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of a new size waits for a look at the file's times; those of a file that was just written say nothing."""
    path, read, texts = dispatch.table_path(place), Path.read_text, []

    def counted(self: Path, *args: Any, **options: Any) -> str:
        texts.extend([self] * (self == path))
        return read(self, *args, **options)

    def ends(keys: int) -> int:
        """Where the row that serves so many keys ends."""
        row = dispatch.choose(CAUSAL, Size(keys, 9), lse=True, workspace=place).row
        assert row is not None
        return row.most_keys

    monkeypatch.setattr(Path, "read_text", counted)
    for age, times in ((3600, 1), (-60, 3)):  # seconds; less than none, so that no wait makes it old
        rows_for(place, (1024, "k6_d128_causal"), (None, "k6_d128_causal"))
        other = read(path).replace("up_to: 1024", "up_to: 4096")
        then = time.time_ns() - age * 10**9
        os.utime(path, ns=(then, then))
        texts.clear()
        assert [ends(keys) for keys in (512, 1024, 2048)] == [1024, 1024, dispatch.NO_LIMIT]
        assert len(texts) == times
        path.write_text(other)
        if age < 0:  # as if it had been written at the same time
            os.utime(path, ns=(then, then))
        assert ends(2048) == 4096


def test_rows_of_a_family_are_those_of_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """No others are read, and none are missed: of calls with a mask that a module for any window computes, too."""
    path, made = dispatch.table_path(CHECKOUT), dispatch.Table.model_validate
    table, rows = dispatch.read_table(path), list[Any]()

    def counted(tree: dict[str, list[Any]]) -> Table:
        rows.extend(tree["rows"])
        return made(tree)

    dispatch._entries.cache_clear()
    monkeypatch.setattr(Table, "model_validate", counted)
    families = {row.family for row in table.rows}
    first = dispatch.rows_for(path, CAUSAL)
    assert first == table.of_family(CAUSAL) and len(first) <= len(rows) < len(first) + len(families) + 1
    some = Family("bf16", 64, 64, WindowMask(left=300, right=5), layout="paged", page_rows=48)
    for family in (*families, some):
        assert dispatch.rows_for(path, family) == table.of_family(family) != []


@pytest.mark.parametrize("line", ["softcap: true", "head_dim: 64"])
def test_rows_that_say_their_family_last_are_found(line: str, tmp_path: Path) -> None:
    """A table of another hand, in which the same lines begin rows of two families."""
    path, capped = tmp_path / "dispatch.yaml", f'  sha256: "0123456789012345"\n  {line}\n'
    text = dispatch_table.table_text(Table(rows=[ROW, ROW, ROW]))
    first, begin, rest = text.partition('  sha256: "0123456789012345"\n')
    path.write_text(first.replace("  head_dim: 128\n", "") + capped + rest if "dim" in line else first + capped + rest)
    other = dispatch.read_table(path).rows[0].family
    assert other != CAUSAL and [number for number, _ in dispatch.rows_for(path, other)] == [1]
    assert [number for number, _ in dispatch.rows_for(path, CAUSAL)] == [2, 3]


@pytest.mark.parametrize(
    "line",
    [
        "  head_dim: 64",  # for the second time
        "  group: {at_most: 4, at_most: 8}",
        "  seq_q: {up_to: 16}  # few",
        "  seq_q:\n    up_to: 16",
        "  softcap: null",
        "other: 3",
        "- 3",
    ],
)
def test_what_is_not_written_like_a_table_is_left_to_the_parser(line: str) -> None:
    text = dispatch_table.table_text(Table(rows=[ROW]))
    assert Table.model_validate({"rows": dispatch.rows_as_written(text)}) == Table(rows=[ROW])
    with pytest.raises(ValueError):
        changed = text.replace("  head_dim: 128", f"  head_dim: 128\n{line.replace('64', '128')}")
        Table.model_validate({"rows": dispatch.rows_as_written(changed)})


ROW = Row(
    dtype="bf16",
    head_dim=128,
    head_dim_v=128,
    mask=CausalMask(),
    seq_k=Region(up_to=1024),
    module="k6_d128_causal",
    sha256="0123456789012345",
    measured=[
        Measurement(
            seq=1024,
            tflops=455.1,
            runner_up="k5_d128_causal",
            runner_up_tflops=420.0,
            runner_up_sha256=hashlib.sha256(b"as measured").hexdigest()[:16],
            gpu=GPU,
        )
    ],
)


SMALL = ROW.model_copy(
    update={
        "tiles_per_sm": Load(up_to=0.25),
        "measured": [
            Shapes(shapes=12, runner_up="k5_d128_causal", runner_up_ratio=1.08, runner_up_sha256="0" * 16, gpu=GPU)
        ],
    }
)


def test_text_reads_back(tmp_path: Path) -> None:
    odd = Measurement(seq=4096, tflops=12.34, gpu='NVIDIA "H200": NVL')
    rows = [SMALL, SMALL.model_copy(update={"tiles_per_sm": Load(up_to=1)}), ROW]
    rows.append(ROW.model_copy(update={"mask": WindowMask(left=512, right=0), "seq_k": None, "measured": [odd]}))
    for table in (Table(rows=rows), Table(rows=[])):
        path = tmp_path / "dispatch.yaml"
        path.write_text(dispatch_table.table_text(table))
        assert dispatch.read_table(path) == table


def test_small_problems_as_a_person_reads_them() -> None:
    text = dispatch_table.table_text(Table(rows=[SMALL]))
    assert "\n  tiles_per_sm: {up_to: 0.25}\n  seq_k: {up_to: 1024}\n" in text
    line = '{shapes: 12, runner_up: k5_d128_causal, runner_up_ratio: 1.08, runner_up_sha256: "0000000000000000", gpu: '
    assert f"  measured:\n  - {line}NVIDIA H200}}\n" in text


def test_text_is_what_a_person_reads() -> None:
    assert dispatch_table.table_text(Table(rows=[ROW])).partition("rows:\n")[2] == """\
- dtype: bf16
  head_dim: 128
  head_dim_v: 128
  mask: causal
  seq_k: {up_to: 1024}
  module: k6_d128_causal
  sha256: "0123456789012345"
  measured:
  - {seq: 1024, tflops: 455.1, runner_up: k5_d128_causal, runner_up_tflops: 420, runner_up_sha256: "04559f221d57a0ab", \
gpu: NVIDIA H200}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("rows: [", "dispatch.yaml:1"),
        ("rows: [{dtype: bf16}]", r"rows\.0\.head_dim: Field required"),
        ("row: []", "rows: Field required"),
    ],
)
def test_spoilt_table_names_the_command_that_mends_it(tmp_path: Path, text: str, message: str) -> None:
    (path := tmp_path / "dispatch.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"no dispatch table \(.*{message}.*write it anew: fa3gen tune --write-table"):
        dispatch.read_table(path)


def test_committed_table_is_sound() -> None:
    """Rows that name their modules. That the rows are what the records give is checked where records are read."""
    problems = [text for text in dispatch_table.check_table(CHECKOUT, []) if "is not what the records give" not in text]
    assert problems == []


# The choice


@pytest.fixture
def place(tmp_path: Path) -> Workspace:
    """A workspace with the specs of k6 and k4_2_window, and some of their modules."""
    for folder in ("specs", "generated"):
        (tmp_path / folder).mkdir()
    for name in ("k6", "k4_2_window"):
        (tmp_path / "specs" / f"{name}.yaml").write_text((CHECKOUT.specs_dir / f"{name}.yaml").read_text())
    workspace = Workspace(tmp_path, tmp_path / "package")
    for stem in ("k6_d128", "k6_d128_causal", "k4_2_window_d64_window512_0"):
        workspace.module_path(stem).write_text(f"# {stem}")
    for base in CHECKOUT.spec_files():  # what k6 extends
        if not (tmp_path / "specs" / base.name).exists():
            (tmp_path / "specs" / base.name).write_text(base.read_text())
    (tmp_path / "package" / "specs").mkdir(parents=True)
    return workspace


@pytest.fixture(autouse=True)
def no_package_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The package of these tests has no rows; its table is one of theirs."""
    (empty := tmp_path / "empty.yaml").write_text("rows: []")
    of = dispatch.table_path

    def table_path(workspace: Workspace) -> Path:
        return empty if workspace.root == tmp_path / "package" else of(workspace)

    monkeypatch.setattr(dispatch, "table_path", table_path)


def rows_for(workspace: Workspace, *rows: tuple[int | None, str] | tuple[int | None, str, float | None]) -> None:
    """Write the workspace's table: for CAUSAL, up to so many keys, this module; and up to so many tiles per SM."""
    digests = {
        row[1]: sha256(workspace.module_path(row[1]))[:16] for row in rows if workspace.module_path(row[1]).exists()
    }
    table = [
        ROW.model_copy(
            update={
                "tiles_per_sm": Load(up_to=row[2]) if len(row) > 2 and row[2] else None,
                "seq_k": row[0] and Region(up_to=row[0]),
                "module": row[1],
                "sha256": digests.get(row[1], "0" * 16),
            }
        )
        for row in rows
    ]
    dispatch.table_path(workspace).write_text(dispatch_table.table_text(Table(rows=table)))


def test_first_row_that_fits_wins(place: Workspace) -> None:
    place.module_path("k5_d128_causal").write_text("")
    rows_for(place, (1024, "k5_d128_causal"), (1024, "k6_d128_causal"), (None, "k6_d128_causal"))
    choices = [dispatch.choose(CAUSAL, Size(keys, 9), lse=True, workspace=place) for keys in (0, 1, 1024, 1025, 2**33)]
    assert [choice.stem for choice in choices] == ["k5_d128_causal"] * 3 + ["k6_d128_causal"] * 2
    assert choices[2].around == Stretch(most_keys=1024) and choices[3].around == Stretch(least_keys=1025)


def test_few_tiles_have_their_rows(place: Workspace) -> None:
    """Counted per SM of the GPU that runs the call: 66 tiles are half as many as an H200 has SMs, more on a smaller."""
    place.module_path("k5_d128_causal").write_text("")
    rows_for(place, (1024, "k5_d128_causal", 0.5), (None, "k6_d128_causal"))
    found = [
        dispatch.choose(CAUSAL, size, lse=True, workspace=place).stem
        for size in (Size(1024, 66), Size(1024, 67), Size(1025, 66), Size(1024, 66, 114), Size(1024, 57, 114))
    ]
    assert found == [f"{rung}_d128_causal" for rung in ("k5", "k6", "k6", "k6", "k5")]


def test_a_stretch_is_what_has_the_same_choice(place: Workspace) -> None:
    """Rows in an order that no record gives, one of them passed over since its module writes no LSE."""
    for stem in ("k5_d128_causal", "k4_2_d128_causal", "k4_2_o_only_d128_causal"):
        place.module_path(stem).write_text("")
    rows_for(
        place,
        (8, "k5_d128_causal", 0.05),
        (20, "k4_2_o_only_d128_causal", 0.1),
        (25, "k4_2_d128_causal"),
        (30, "k5_d128_causal", 0.2),
        (None, "k6_d128_causal", 0.2),
        (None, "k4_2_d128_causal"),
    )
    sizes = [Size(keys, tiles) for keys in (0, 8, 9, 20, 21, 25, 26, 30, 31) for tiles in (0, 6, 7, 13, 14, 26, 27)]
    choices = [dispatch.choose(CAUSAL, size, lse=True, workspace=place) for size in sizes]
    assert [len({choice.reason for choice in choices}), len({choice.around for choice in choices})] == [5, 13]
    for choice in choices:
        least_keys, most_keys, least_tiles, most_tiles = choice.around
        inside = {
            other.reason
            for size, other in zip(sizes, choices, strict=True)
            if least_keys <= size.keys <= most_keys and least_tiles <= size.tiles <= most_tiles
        }
        assert inside == {choice.reason}


def test_a_choice_says_why(place: Workspace) -> None:
    (place.specs_dir / "mine.yaml").write_text(
        "summary: mine\nextends: k6\nproblem: {head_dim: 128}\nmask: causal\nmatrix: {}\n"
        "tile: {q: 128, kv: 96, warpgroups: 2}\nschedule: {kind: ping_pong, overlap: true}\n"
    )
    place.module_path("mine").write_text("")
    rows_for(place, (None, "mine"))
    place.module_path("k5_d128_causal").write_text("as measured")
    assert str(dispatch.choose(CAUSAL, Size(7, 3), lse=True, workspace=place)).splitlines() == [
        f"{place.module_path('mine')}",
        "  spec  specs/mine.yaml: bf16, head dim 128, causal; tile 128 x 96, loads tma, schedule ping_pong",
        "  for   7 keys, 3 tiles of 128 query rows on 132 SMs, as on an H200, since the tensors are on no GPU",
        "  why   dispatch.yaml, row 1 (bf16, head dim 128, causal, any number of keys)",
        "        at 1024 keys 455.1 TFLOP/s; k5_d128_causal 420 (NVIDIA H200)",
    ]


def test_a_choice_says_for_which_gpu_and_how_many_tiles(place: Workspace) -> None:
    rows_for(place, (None, "k6_d128_causal", 0.5), (None, "k6_d128_causal"))
    said = str(dispatch.choose(CAUSAL, Size(1, 57, 114), lse=True, workspace=place))
    assert "  for   1 key, 57 tiles of 128 query rows on 114 SMs\n" in said
    assert "row 1 (bf16, head dim 128, causal, up to 0.5 tiles per SM, any number of keys)" in said


def test_many_shapes_are_told_in_one_line(place: Workspace) -> None:
    [shapes] = SMALL.measured
    assert shapes.told(place) == (
        "over 12 shapes; second was k5_d128_causal, of another file than the present one (NVIDIA H200)"
    )
    place.module_path("k5_d128_causal").write_text("as measured")
    digest = hashlib.sha256(b"as measured").hexdigest()[:16]
    told = shapes.model_copy(update={"runner_up_sha256": digest}).told(place)
    assert told == "over 12 shapes; k5_d128_causal takes 1.08 times as long (NVIDIA H200)"
    assert "over 1 shape; no other module that serves this row was measured at all of them" in Shapes(
        shapes=1, gpu=GPU
    ).told(place)


@pytest.mark.parametrize("present", [None, "another"])
def test_a_runner_up_that_changed_has_no_figure(place: Workspace, present: str | None) -> None:
    rows_for(place, (None, "k6_d128_causal"))
    if present:
        place.module_path("k5_d128_causal").write_text(present)
    *_, said = str(dispatch.choose(CAUSAL, Size(7, 1), lse=True, workspace=place)).splitlines()
    assert said.strip() == (
        "at 1024 keys 455.1 TFLOP/s; second was k5_d128_causal, of another file than the present one (NVIDIA H200)"
    )


def test_a_table_that_does_not_say_which_file_was_second_gives_no_figure(place: Workspace) -> None:
    place.module_path("k5_d128_causal").write_text("as measured")
    unsigned = ROW.measured[0].model_copy(update={"runner_up_sha256": None})
    assert "second was k5_d128_causal, of another file" in unsigned.told(place)
    assert "k5_d128_causal 420 (NVIDIA H200)" in ROW.measured[0].told(place)


def test_row_whose_module_is_missing(place: Workspace) -> None:
    rows_for(place, (None, "k6_d64_causal"))
    with pytest.raises(NoKernel, match="k6_d64_causal.py does not exist; run: fa3gen render k6_d64_causal"):
        dispatch.choose(CAUSAL, Size(7, 1), lse=True, workspace=place)


def test_row_whose_module_changed(place: Workspace) -> None:
    rows_for(place, (None, "k6_d128_causal"))
    place.module_path("k6_d128_causal").write_text("# another")
    command = "fa3gen tune --measure k6_d128_causal --write --write-table"
    with pytest.raises(NoKernel, match=f"row 1.* was measured with another k6_d128_causal.*{command}"):
        dispatch.choose(CAUSAL, Size(7, 1), lse=True, workspace=place)


def test_only_module_that_fits_needs_no_measurement(place: Workspace) -> None:
    choice = dispatch.choose(CAUSAL, Size(7, 1), lse=True, workspace=place)
    assert (choice.stem, choice.row) == ("k6_d128_causal", None)
    assert "no measurement, but this is the only module that fits" in str(choice)


def test_one_production_module_comes_before_the_rungs(place: Workspace) -> None:
    for name in ("fwd_a", "fwd_b"):
        (place.specs_dir / f"{name}.yaml").write_text(f"summary: {name}\nextends: k6\n")
    place.module_path("fwd_a_d128_causal").write_text("")
    choice = dispatch.choose(CAUSAL, Size(7, 1), lse=True, workspace=place)
    assert choice.stem == "fwd_a_d128_causal" and "this is the only production module that fits" in choice.reason
    place.module_path("fwd_b_d128_causal").write_text("")
    with pytest.raises(NoKernel, match=r"says which is best: fwd_a_d128_causal, fwd_b_d128_causal; call"):
        dispatch.choose(CAUSAL, Size(7, 1), lse=True, workspace=place)


def test_several_modules_without_a_measurement_are_no_choice(place: Workspace) -> None:
    place.module_path("k5_d128_causal").write_text("")
    with pytest.raises(NoKernel, match="several modules compute bf16, head dim 128, causal.*: k5_d128_causal, k6_d128"):
        dispatch.choose(CAUSAL, Size(7, 1), lse=True, workspace=place)


def test_broken_spec_of_the_workspace_does_not_stand_in_the_way(place: Workspace) -> None:
    (place.specs_dir / "broken.yaml").write_text("tile: [")
    assert dispatch.choose(CAUSAL, Size(7, 1), lse=True, workspace=place).stem == "k6_d128_causal"


def test_lse_needs_a_module_that_writes_it(place: Workspace) -> None:
    place.module_path("k6_d128_causal").rename(place.module_path("k4_2_o_only_d128_causal"))
    assert dispatch.choose(CAUSAL, Size(7, 1), lse=False, workspace=place).stem == "k4_2_o_only_d128_causal"
    with pytest.raises(
        NoKernel, match="computes bf16, head dim 128, causal, with LSE; head dims served: bf16, no mask"
    ):
        dispatch.choose(CAUSAL, Size(7, 1), lse=True, workspace=place)


def test_another_window_says_how_to_make_it(place: Workspace) -> None:
    family = Family("bf16", 64, 64, WindowMask(left=300, right=0))
    message = (
        "no generated module computes bf16, head dim 64, window (300, 0), with LSE; head dims served: bf16, causal: "
        "128; bf16, no mask: 128; bf16, window (512, 0): 64. This spec of one extends fwd_d64_any_window, and was "
        f"never measured. Save it as {place.specs_dir / 'made_bf16_d64_any_window.yaml'}, run `fa3gen render "
        "made_bf16_d64_any_window` and `fa3gen verify made_bf16_d64_any_window`; or have fa3gen.attention(..., "
        "render=True) render and compile it, once in each process:\n\nsummary: Proposed by "
        "fa3gen, never measured\nextends: fwd_d64_any_window\nmatrix: {}\n"
    )
    with pytest.raises(NoKernel, match=re.escape(message)):
        dispatch.choose(family, Size(7, 1), lse=True, workspace=place)
    served = family._replace(mask=WindowMask(left=512, right=0))
    assert dispatch.choose(served, Size(7, 1), lse=True, workspace=place).stem == "k4_2_window_d64_window512_0"


@pytest.mark.parametrize(
    ("window", "stem", "options"),
    [
        ((512, 0), "fwd_d128_window", {}),  # compiled in
        ((511, 0), "fwd_d128_any_window", {"window": (511, 0)}),
        ((-1, 3), "fwd_d128_any_window", {"window": (2**30, 3)}),
    ],
)
def test_a_window_that_is_not_compiled_in_is_given_with_the_call(
    window: tuple[int, int], stem: str, options: dict[str, Any]
) -> None:
    family = Family("bf16", 128, 128, dispatch.mask_of(False, window))
    choice = dispatch.choose(family, Size(4096, 512), lse=True, workspace=CHECKOUT)
    assert (choice.stem, choice.options) == (stem, options)


def test_a_production_module_for_any_window_comes_before_a_rung_of_the_ladder() -> None:
    family = Family("bf16", 64, 64, WindowMask(left=512, right=0))
    choice = dispatch.choose(family, Size(4096, 512), lse=True, workspace=CHECKOUT)
    assert (choice.stem, choice.options) == ("fwd_d64_any_window", {"window": (512, 0)})
    assert "the only production module that fits" in choice.reason


def test_other_masks_are_not_served_by_windows() -> None:
    """They have modules of their own, which are faster."""
    assert not Family("bf16", 64, 64, WindowMask()).serves(Family("bf16", 64, 64, CausalMask()))
    assert not Family("bf16", 64, 64, WindowMask()).serves(Family("fp16", 64, 64, WindowMask(left=1, right=1)))


PACKED = CAUSAL._replace(layout="packed")


def test_packed_and_dense_calls_have_modules_of_their_own(place: Workspace) -> None:
    """Also where the only module there is, or the only production module, is for the other layout."""
    place.module_path("fwd_packed_d128_causal").write_text("")
    rows_for(place, (None, "k6_d128_causal"))
    dense, packed = (dispatch.choose(one, Size(7, 1), lse=True, workspace=place) for one in (CAUSAL, PACKED))
    assert (dense.stem, packed.stem, packed.row) == ("k6_d128_causal", "fwd_packed_d128_causal", None)
    assert "spec  specs/fwd_packed.yaml: bf16, head dim 128, causal, packed sequences; tile" in str(packed)
    place.module_path("k6_d128_causal").unlink()
    dispatch.table_path(place).unlink()
    for family, served in ((CAUSAL, "bf16, no mask: 128"), (PACKED._replace(mask=NoMask()), "bf16, causal: 128")):
        with pytest.raises(NoKernel) as refused:
            dispatch.choose(family, Size(7, 1), lse=False, workspace=place)
        assert f"no generated module computes {family}" in str(refused.value)
        assert f"head dims served: {served}" in str(refused.value)
        base, function = ("fwd_d128_causal", "") if family == CAUSAL else ("fwd_packed", "_packed")
        assert f"have fa3gen.attention{function}(..., render=True)" in str(refused.value)
        assert f"extends: {base}\n" in str(refused.value)


def test_a_row_for_packed_sequences_serves_no_dense_call_and_no_other_group(place: Workspace) -> None:
    for stem in ("fwd_packed_d128_causal", "fwd_packed_pack4_d128_causal"):
        place.module_path(stem).write_text("")
    digest = sha256(place.module_path("fwd_packed_d128_causal"))[:16]
    plain = {"layout": "packed", "seq_k": None, "module": "fwd_packed_d128_causal", "sha256": digest}
    four = plain | {"module": "fwd_packed_pack4_d128_causal", "group": Multiples(multiple_of=4)}
    rows = [ROW.model_copy(update=fields) for fields in (four | {"seq_k": Region(up_to=512)}, plain)]
    dispatch.table_path(place).write_text(dispatch_table.table_text(Table(rows=rows)))
    assert dispatch_table.rows_without_their_module(place) == []

    def chosen(family: Family, keys: int, group: int) -> Choice:
        return dispatch.choose(family, Size(keys, 9, group=group), lse=True, workspace=place)

    found = {(keys, group): chosen(PACKED, keys, group) for keys in (512, 513) for group in (1, 4, 6, 8)}
    packs = {size for size, choice in found.items() if choice.stem == "fwd_packed_pack4_d128_causal"}
    assert packs == {(512, 4), (512, 8)}
    assert found[512, 6].around == Stretch() and found[513, 4].around == Stretch(least_keys=513)
    assert chosen(CAUSAL, 512, 4).stem == "k6_d128_causal"
    assert (
        "row 1 (bf16, head dim 128, causal, packed sequences, groups of a multiple of 4 heads, up to 512 keys)"
        in str(found[512, 4])
    )
    assert "132 SMs, as on an H200, since the tensors are on no GPU, 4 query heads for each of k" in str(found[512, 4])
    spoilt = dispatch_table.table_text(Table(rows=[rows[0].model_copy(update={"group": None})]))
    dispatch.table_path(place).write_text(spoilt)
    with pytest.raises(
        NoKernel, match="is served by fwd_packed_pack4_d128_causal, whose tiles hold 4 heads of a group"
    ):
        chosen(PACKED, 512, 4)


def test_tiles_of_several_heads_are_for_groups_of_as_many(place: Workspace) -> None:
    """Without a row, a module that packs four heads is no candidate for groups that are no multiple of four."""
    for stem in ("fwd_packed_d128_causal", "fwd_packed_pack4_d128_causal"):
        place.module_path(stem).write_text("")
    for group in (1, 6):
        choice = dispatch.choose(PACKED, Size(7, 1, group=group), lse=True, workspace=place)
        assert choice.stem == "fwd_packed_d128_causal"
    with pytest.raises(
        NoKernel,
        match=r"several modules.*measure them on your GPU: fa3gen tune --measure fwd_packed_d128_causal fwd_",
    ):
        dispatch.choose(PACKED, Size(7, 1, group=8), lse=True, workspace=place)
    place.module_path("fwd_packed_d128_causal").unlink()
    message = "served: bf16, causal, 4 heads in a tile: 128. This spec of one extends fwd_packed, and"
    with pytest.raises(NoKernel, match=message):
        dispatch.choose(PACKED, Size(7, 1, group=6), lse=True, workspace=place)


def test_o_in_float32_has_modules_of_its_own() -> None:
    """Committed, unmeasured, and never taken for a call that asks for 16 bits."""
    for mask, stem in ((NoMask(), "fwd_d128_fp32_out"), (CausalMask(), "fwd_d128_causal_fp32_out")):
        choice = dispatch.choose(Family("bf16", 128, 128, mask, "fp32"), Size(777, 1), lse=True, workspace=CHECKOUT)
        assert (choice.stem, choice.row) == (stem, None)
        assert dispatch.choose(Family("bf16", 128, 128, mask), Size(777, 1), lse=True, workspace=CHECKOUT).stem != stem
    with pytest.raises(NoKernel, match=r"(?s)computes fp16, O in fp32, head dim 64.*\no: \{dtype: fp32\}"):
        dispatch.choose(Family("fp16", 64, 64, NoMask(), "fp32"), Size(777, 1), lse=True, workspace=CHECKOUT)


def test_own_module_comes_before_the_package_s_of_the_same_name(place: Workspace) -> None:
    package = Workspace(place.bundled, place.bundled)
    for path in place.spec_files():
        (package.specs_dir / path.name).write_text(path.read_text())
    package.generated_dir.mkdir()
    package.module_path("k6_d128_causal").write_text("# of the package")
    assert dispatch.choose(CAUSAL, Size(7, 1), lse=True, workspace=place).file == place.module_path("k6_d128_causal")
    place.module_path("k6_d128_causal").unlink()
    assert dispatch.choose(CAUSAL, Size(7, 1), lse=True, workspace=place).file == package.module_path("k6_d128_causal")


def test_row_that_names_a_spec(place: Workspace) -> None:
    place.module_path("k6").write_text("")
    rows_for(place, (None, "k6"))
    with pytest.raises(
        NoKernel, match="names k6, which is a spec with several modules; run: fa3gen tune --write-table"
    ):
        dispatch.choose(CAUSAL, Size(7, 1), lse=True, workspace=place)


def test_nothing_rendered_at_all(tmp_path: Path) -> None:
    (tmp_path / "package" / "specs").mkdir(parents=True)
    with pytest.raises(NoKernel, match="head dims served: none"):
        dispatch.choose(CAUSAL, Size(7, 1), lse=True, workspace=Workspace(tmp_path, tmp_path / "package"))


# Checks of a table


def test_check_finds_what_is_wrong(place: Workspace) -> None:
    rows_for(place, (1024, "k6_d128_causal"), (2048, "k6_d128"), (None, "k6_d64"))
    assert dispatch_table.check_table(place, []) == [
        "dispatch.yaml is not what the records give; run: fa3gen tune --write-table",
        "dispatch.yaml, row 2 (bf16, head dim 128, causal, up to 2048 keys) is served by k6_d128, and that "
        "computes bf16, head dim 128, no mask; run: fa3gen tune --write-table",
        f"dispatch.yaml, row 3 (bf16, head dim 128, causal, any number of keys) names k6_d64, and "
        f"{place.module_path('k6_d64')} does not exist; run: fa3gen render k6_d64",
    ]


def test_check_passes_what_the_records_give(place: Workspace) -> None:
    digest = sha256(place.module_path("k6_d128_causal"))
    records = [Record(Problem(512, 512), [Result("k6_d128_causal", 2.0, digest)], "k6_d128_causal")]
    dispatch.table_path(place).write_text(dispatch_table.table_from_records(records))
    assert dispatch_table.check_table(place, records) == []


# Masks


@pytest.mark.parametrize(
    ("causal", "window", "mask"),
    [
        (False, None, NoMask()),
        (True, None, CausalMask()),
        (False, (512, 7), WindowMask(left=512, right=7)),
        (True, [512, 7], WindowMask(left=512, right=0)),
        (False, (-1, -1), NoMask()),
        (False, (-1, 0), CausalMask()),
        (True, (-1, -1), CausalMask()),
        (False, (0, 0), WindowMask(left=0, right=0)),
        (False, (-1, 7), WindowMask(left=2**30, right=7)),
        (False, (7, -1), WindowMask(left=7, right=2**30)),
    ],
)
def test_masks(causal: bool, window: Any, mask: Any) -> None:
    assert dispatch.mask_of(causal, window) == mask


@pytest.mark.parametrize("window", [5, (1,), (1, -2), (1, 2.0), (True, 1), "12", (1, 2**31)])
def test_windows_that_are_none(window: Any) -> None:
    with pytest.raises(dispatch.ArgumentError, match="it needs to be None or"):
        dispatch.mask_of(False, window)


# The committed table


def test_the_committed_table_is_what_the_committed_records_give() -> None:
    """And each of its rows has the module that was measured, byte for byte."""
    records = dispatch_table.records_of(CHECKOUT)
    assert records and dispatch_table.check_table(CHECKOUT, records) == []


def test_the_committed_table_chooses_what_was_fastest() -> None:
    """In every record a row serves the call with a module that was timed there; rows are few, and a call does not tell
    how long each of its sequences is, so it is not always the fastest."""
    records = dispatch_table.records_of(CHECKOUT)
    made = dispatch_table.shares(records, dispatch.read_table(dispatch.table_path(CHECKOUT)).rows)
    found = [each.share for each in made if each.share is not None]
    assert len(found) == len(made) == len(records)
    assert statistics.geometric_mean(found) > 0.985 and min(found) > 0.5


def test_few_queries_have_rows_of_their_own() -> None:
    """A decoding step reads K and V once for all heads of a group, in parts; a prefill of the same family does not."""

    def chosen(queries: int, keys: int, batch: int, heads: tuple[int, int], causal: bool = True) -> str:
        family = Family("bf16", 128, 128, dispatch.mask_of(causal, None))
        tiles = batch * heads[0] * -(-queries // 128)
        size = Size(keys, tiles, 132, heads[0] // heads[1], queries)
        return dispatch.choose(family, size, lse=True, workspace=CHECKOUT).stem

    assert chosen(1, 4096, 1, (32, 8), causal=False).startswith("fwd_decode")
    for queries in (1, 16):
        for heads in ((32, 8), (8, 1), (16, 1), (12, 4)):  # a group of three has no record: the next larger one serves
            assert chosen(queries, 8192, 4, heads).startswith("fwd_decode"), (queries, heads)
    for queries, heads in ((17, (32, 8)), (1, (32, 1)), (4096, (32, 8))):  # 32 heads are more than a tile has room for
        assert not chosen(queries, 8192, 4, heads).startswith("fwd_decode"), (queries, heads)
    assert not chosen(1, 128, 1, (16, 16)).startswith("fwd_decode")  # as measured: a CTA each is faster
    # Drafts have the tiles that hold all their queries of a group, where there are such.
    drafts = ((16, (32, 8), "pack4"), (8, (64, 8), "pack8"), (8, (128, 8), "wide"), (4, (32, 8), "d128_causal"))
    for queries, heads, tile in drafts:
        assert chosen(queries, 4096, 16, heads).startswith(f"fwd_decode_{tile}"), (queries, heads)


def test_the_same_bits_in_any_batch_come_from_one_module() -> None:
    """Whatever the sizes: two modules with other tiles would add up in another order."""
    for head_dim in (64, 128, 256):
        for causal, stem in ((False, f"fwd_decode_fixed_d{head_dim}"), (True, f"fwd_decode_fixed_d{head_dim}_causal")):
            family = Family("bf16", head_dim, head_dim, dispatch.mask_of(causal, None), part_keys=512)
            for size in (Size(1, 1), Size(131072, 4096, 132, 8, 1), Size(4096, 64, 132, 16, 4096)):
                choice = dispatch.choose(family, size, lse=True, workspace=CHECKOUT)
                assert (choice.stem, choice.row, choice.around) == (stem, None, Stretch())
            with pytest.raises(NoKernel, match="the same bits in any batch"):
                dispatch.choose(family, Size(4096, 64, 132, 17), lse=True, workspace=CHECKOUT)
    for missing in (
        Family("bf16", 80, 80, NoMask(), part_keys=512),
        Family("fp16", 128, 128, NoMask(), part_keys=512),
    ):
        with pytest.raises(NoKernel, match="the same bits in any batch"):
            dispatch.choose(missing, Size(4096, 64), lse=True, workspace=CHECKOUT)


def test_a_stretch_ends_where_few_queries_do() -> None:
    family = Family("bf16", 128, 128, dispatch.mask_of(True, None))
    few, many = (
        dispatch.choose(family, Size(8192, 32, 132, 8, queries), lse=True, workspace=CHECKOUT) for queries in (4, 64)
    )
    assert few.stem != many.stem and few.row is not None and few.row.seq_q is not None
    assert "up to 4 queries, up to 8 heads of q for each of k" in few.reason
    assert few.around.most_keys >= 8192 and "4 queries, 8192 keys" in str(few)


@pytest.mark.parametrize("missing", ["fwd_decode_d128_causal", "fwd_decode_pairs_d128_causal"])
def test_a_row_for_more_heads_than_a_tile_has_room_for_is_wrong(missing: str) -> None:
    path = dispatch.table_path(CHECKOUT)
    row = next(row for row in dispatch.read_table(path).rows if row.module == missing)
    assert isinstance(row.group, dispatch.AtMost)
    wide = row.model_copy(update={"group": dispatch.AtMost(at_most=17)})
    with pytest.raises(NoKernel, match="whose tiles hold 16 heads of a group"):
        dispatch.of_row(CHECKOUT, wide, "row 1")


def shown(mask: Mask, seq_q: int, seq_k: int) -> torch.Tensor:
    """Which keys each query sees, as the reference says."""
    found = reference.visible_keys(reach(mask), seq_q=seq_q, seq_k=seq_k, rows=torch.arange(seq_q))
    return torch.ones(seq_q, seq_k, dtype=torch.bool) if found is None else found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", list(itertools.product((-1, 0, 3, 7, 8, 9), (-1, 0, 4))), ids=str)
def test_a_window_that_hides_what_a_causal_mask_hides(window: tuple[int, int], causal: bool) -> None:
    """Of the longest sequences and of all shorter ones, as the reference says."""
    mask = dispatch.mask_of(causal, window)
    most_k, seqs_q = 9, range(8)
    alike = all(
        torch.equal(shown(mask, *lengths), shown(CausalMask(), *lengths))
        for lengths in itertools.product(seqs_q, range(most_k + 1))
    )
    # A window without a bound on the left is a causal mask already.
    assert (dispatch.is_causal(causal, window, most_k) or mask == CausalMask()) == alike
    assert not dispatch.is_causal(causal, window, None) and not dispatch.is_causal(causal, window, torch.tensor(1))


def test_modules_of_causal_masks_serve_such_windows() -> None:
    wide = dispatch.mask_of(False, (4095, 0))
    family, size = Family("bf16", 128, 128, wide), Size(4096, 512, 132, 1, 4096, is_causal=True)

    def chosen(family: Family, size: Size) -> str:
        return dispatch.choose(family, size, lse=True, workspace=CHECKOUT).stem

    assert chosen(family, size) == chosen(family._replace(mask=CausalMask()), size) == "fwd_d128_causal"
    assert chosen(family, replace(size, is_causal=False)) == "fwd_d128_any_window"
    told = "  as    a causal mask: no sequence has more keys than the window reaches back over"
    for like_causal in (True, False):
        found = dispatch.choose(family, replace(size, is_causal=like_causal), lse=True, workspace=CHECKOUT)
        assert (told in str(found).splitlines()) == like_causal
    packed = family._replace(layout="packed")
    assert "window" in chosen(packed, replace(size, own_bits=True)) and "window" not in chosen(packed, size)


def test_a_window_has_its_own_module_where_no_causal_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = dispatch._measured

    def without(family: Family, *asked: Any) -> Any:
        if isinstance(family.mask, CausalMask):
            raise NoKernel("none")
        return measured(family, *asked)

    monkeypatch.setattr(dispatch, "_measured", without)
    family = Family("bf16", 128, 128, dispatch.mask_of(False, (4095, 0)))
    found = dispatch.choose(family, Size(4096, 512, is_causal=True), lse=True, workspace=CHECKOUT)
    assert found.stem == "fwd_d128_any_window"


def test_one_query_sees_all_keys_under_a_causal_mask() -> None:
    for seq_k in range(9):
        assert torch.equal(shown(CausalMask(), 1, seq_k), shown(NoMask(), 1, seq_k))
    assert not torch.equal(shown(CausalMask(), 2, 9), shown(NoMask(), 2, 9))


FP8_PAGES = Family("e4m3", 128, 128, NoMask(), "bf16", layout="paged", page_rows=16)


@pytest.mark.parametrize(
    ("family", "module"),
    [
        (FP8_PAGES, "fwd_fp8_paged_decode_d128_causal"),
        (FP8_PAGES._replace(page_rows=1), "fwd_fp8_paged_decode_rows_d128_causal"),
        # There is a module without a mask, but none for few queries.
        (FP8_PAGES._replace(layout="packed", page_rows=None), "fwd_fp8_packed_decode_d128_causal"),
        (FP8_PAGES._replace(layout="dense", page_rows=None), "fwd_fp8_packed_decode_d128_causal"),
    ],
)
def test_one_query_without_a_mask_may_have_a_causal_module(family: Family, module: str) -> None:
    size = Size(4096, 64, 132, 4, 1, mean_queries=1, in_rows=family.layout == "dense")
    found = dispatch.choose(family, size, lse=True, workspace=CHECKOUT)
    assert found.stem == module
    assert "  as    a causal mask: no sequence has more than one query" in str(found).splitlines()
    more = dispatch.choose(
        family._replace(page_rows=family.page_rows and 16), replace(size, queries=2), lse=True, workspace=CHECKOUT
    )
    assert more.spec.mask.kind != "causal"


def test_one_query_without_a_mask_has_its_own_module_where_one_was_measured_with_few() -> None:
    family, size = Family("bf16", 128, 128, NoMask(), layout="paged", page_rows=16), Size(4096, 64, 132, 4, 1)
    found = dispatch.choose(family, size, lse=True, workspace=CHECKOUT)
    assert found.spec.mask == NoMask() and found.row is not None and found.row.seq_q is not None and not found.as_mask
    # And where its bits are its own: a prompt beside it would have another module.
    with pytest.raises(NoKernel):
        dispatch.choose(FP8_PAGES, replace(size, own_bits=True), lse=True, workspace=CHECKOUT)


@pytest.mark.parametrize(
    ("family", "right"),
    [(FP8_PAGES, WINDOW_MAX), (FP8_PAGES._replace(mask=CausalMask(), head_dim=64, head_dim_v=64, sink=True), 0)],
)
def test_a_module_for_any_window_serves_a_mask_that_has_none(family: Family, right: int) -> None:
    """As a window that reaches over all keys; not where a row's bits are its own."""
    size = Size(4096, 512, 132, 4, 700, mean_queries=700)
    found = dispatch.choose(family, size, lse=True, workspace=CHECKOUT)
    assert "any_window" in found.stem and found.options == {"window": (WINDOW_MAX, right)}
    told = "  as    a window that reaches over all keys: there is no module for the mask itself"
    assert told in str(found).splitlines()
    for seq_q, seq_k in itertools.product(range(4), range(9)):
        window = WindowMask(left=WINDOW_MAX, right=right)
        assert torch.equal(shown(window, seq_q, seq_k), shown(family.mask, seq_q, seq_k))
    with pytest.raises(NoKernel):
        dispatch.choose(family, replace(size, own_bits=True), lse=True, workspace=CHECKOUT)
