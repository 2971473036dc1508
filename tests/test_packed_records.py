"""Records of packed cells, and the rows of the dispatch table that they give; the speeds here are made up."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rendering import CHECKOUT
from typer.testing import CliRunner

from fa3gen.base.errors import UserError
from fa3gen.cli import app
from fa3gen.design.family import Family, PackedShape
from fa3gen.design.footprint import page_rows
from fa3gen.design.workspace import Workspace
from fa3gen.measure import packed_cells
from fa3gen.records import dispatch_table, packed_records
from fa3gen.records.packed_records import PackedProblem, PackedRecord
from fa3gen.run import dispatch
from fa3gen.run.dispatch import UNEVEN, AtMost, Size
from fa3gen.spec.model import CausalMask, WindowMask
from fa3gen.spec.specfile import attention_only

D128, PACK4 = "fwd_packed_d128_causal", "fwd_packed_pack4_d128_causal"
LATE = "fwd_packed_late_d128_causal"
D64, SHORT = "fwd_packed_d64_causal", "fwd_packed_short_d64_causal"
PAGES, PAGES_OF_64 = "fwd_paged_d128_causal", "fwd_paged_64rows_d128_causal"
SINGLE_ROWS = "fwd_paged_rows_d128_causal"
EVEN = "fwd_packed_decode_d128_causal"
CHUNKS, WIDE = "fwd_packed_chunks_d128_causal", "fwd_packed_chunks_wide_d128_causal"
SMALL = "fwd_packed_chunks_small_d128_causal"
MIXED, MIXED_64ROWS = "fwd_packed_mixed_d128_causal", "fwd_paged_64rows_mixed_d128_causal"
ANY, ANY_WOVEN = "fwd_packed_mixed_any_group_d128_causal", "fwd_packed_woven_any_group_d128_causal"
WOVEN, PACK1_WOVEN = "fwd_packed_woven_d128_causal", "fwd_packed_woven_pack1_d128_causal"
OF_WINDOWS = (*packed_cells.PROMPTS_OF_WINDOWS, *packed_cells.STEPS_OF_WINDOWS)
GPU = "NVIDIA H200"


def record(
    lengths: list[int],
    speeds: dict[str, float],
    *,
    heads: tuple[int, int] = (32, 8),
    page: int | None = None,
    queries: list[int] | None = None,
) -> PackedRecord:
    """Of committed modules, whose family is that of the first, for pages of any size that it serves.

    Sequences have as many queries as keys, or as `queries` says.
    """
    variants = attention_only([CHECKOUT.resolve(stem)[0] for stem in speeds], "the test")
    shape = PackedShape(tuple(queries or lengths), tuple(lengths), *heads)
    return PackedRecord(
        gpu=GPU,
        date="2026-11-23",
        torch="2.13.0",
        dsl="4.8.1",
        problem=PackedProblem.of(Family.of(variants[0].spec)._replace(page_rows=page), f"list{len(lengths)}", shape),
        results=packed_records.results_of(CHECKOUT, zip(variants, speeds.values(), strict=True)),
    )


def rows(*records: PackedRecord) -> list[tuple[int | None, int | None, str]]:
    """Multiples of heads, keys up to which a row serves, and its module."""
    return [
        (row.group and row.group.multiple_of, row.seq_k and row.seq_k.up_to, row.module)
        for row in dispatch_table.rows_from_records(records)
    ]


def test_a_record_comes_back_from_its_file(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, tmp_path)
    one = record([300, 100, 201], {D128: 500.0, PACK4: 612.345})
    [path] = packed_records.save(workspace, [one])
    assert path == tmp_path / "generated/evidence/packed/bf16_d128_causal_packed_list3_h32_8.json"
    assert packed_records.load_all(workspace) == [one] and one.winner == PACK4
    assert (one.problem.seq_k, one.problem.group) == (201, 4)  # 601 / 3, rounded up
    assert one.problem.label == "bf16 d128 causal packed list3, heads 32/8"
    assert one.tiles_per_sm == 151 / 132  # 601 x 32 / 128, rounded up
    assert '"tflops": 612.3' in path.read_text() and path.read_text().count("\n") < 30
    packed_records.save(workspace, [one])
    path.rename(path.with_name("other.json"))
    with pytest.raises(UserError, match="packed list3, heads 32/8; rename it bf16_d128_causal_packed_list3_h32_8.json"):
        packed_records.load_all(workspace)
    path.write_text("{}")
    with pytest.raises(
        UserError, match=r"is not a record of a packed cell \(gpu: Field required\); make it again with"
    ):
        packed_records.load_all(workspace)


def test_a_record_holds_modules_that_can_serve_its_problem() -> None:
    for stem, heads, message in ((D64, (32, 8), "another problem"), (PACK4, (6, 1), "holds 4 heads in a tile")):
        spoilt = record([9], {D128: 2.0}, heads=heads).model_dump()
        spoilt["results"] += [result.model_dump() for result in record([9], {stem: 1.0}).results]
        with pytest.raises(ValueError, match=message):
            PackedRecord.model_validate(spoilt)


def test_the_cells_that_are_measured() -> None:
    """Each with all committed modules that can serve it; a record of these is sound."""
    cells = {problem.label: {variant.stem for variant in able} for problem, able in packed_cells.cells(CHECKOUT)}
    assert cells["bf16 d128 causal packed chat16k, heads 32/8"] >= {D128, PACK4}
    assert PACK4 not in cells["bf16 d128 causal packed chat16k, heads 16"]
    assert cells["bf16 d64 causal packed documents64k, heads 16"] >= {D64, SHORT}
    assert cells["bf16 d128 causal pages 64 chat16k, heads 32/8"] >= {PAGES_OF_64, PAGES, SINGLE_ROWS}
    assert not cells["bf16 d128 causal pages 16 chat16k, heads 32/8"] & {
        PAGES_OF_64,
        "fwd_paged_64rows_pack4_d128_causal",
    }
    assert cells["bf16 d128 causal pages 1 prefill1k_on_8k, heads 16"] == {SINGLE_ROWS}
    # Of sinks and caps decoding steps, in pages and in those that copy several keys of one at once.
    assert cells["bf16 d64 window127 0 sink pages 16 decode64_on_4k, heads 64/8"] == {
        "fwd_paged_decode_sink_any_window",
        "fwd_paged_decode_rows_sink_any_window",
        "fwd_paged_pack8_sink_any_window",
        "fwd_paged_own_bits_sink_any_window",
    }
    scored = {stem for stem in set().union(*cells.values()) if {"sink", "softcap"} & set(stem.split("_"))}
    # Of windows prompts as well, where there are several modules; those for several heads are not for decoding steps.
    several = {stem for stem in set().union(*cells.values()) if re.search("_(pack[0-9]|mixed)_any_window", stem)}
    windowed = {label: able for label, able in cells.items() if " window" in label}
    prompts = {label for label in windowed if any(f" {name}, " in label for name in OF_WINDOWS)}
    steps = {label for label, able in cells.items() if able & scored} - prompts
    assert steps and all(" decode" in label or " draft" in label for label in steps)
    assert set() < {label for label in prompts if " sink " in label} < prompts < set(windowed)
    for label, able in windowed.items():
        # Neither 16/16 heads nor pages of a row nor sinks have one for several heads beside one for a single head; in
        # pages there is one for any group, and packed sequences have none for groups of 2 and 7.
        single = " pages 1 " in label or " sink " in label
        single = single or (" packed " in label and " d128 " in label and label.endswith(("heads 16", "16/8", "28/4")))
        assert bool(able & several) == (label in prompts and not single), label
        assert (label in prompts) != any("decode" in stem for stem in able), label
        assert label not in prompts or len(able) > 1, label
    committed = {
        path.stem
        for kind in ("packed", "paged")
        for path in CHECKOUT.generated_dir.glob(f"fwd_*{kind}*.py")
        if "d192" not in path.stem
    }
    # No other serves calls with a cap at these head dims.
    alone = {stem for stem in committed if "softcap_d64" in stem or "softcap_d128" in stem}
    # Nor have those rows that add up parts of so many keys: what a call asks for chooses them.
    alone |= {stem for stem in committed if "fixed" in stem}
    assert committed - alone == set().union(*cells.values())
    sizes = {name: (len(lengths), sum(lengths), max(lengths)) for name, lengths in packed_cells.LENGTHS.items()}
    chats = {"chat16k": (58, 16384, 1358), "chat64k": (51, 65536, 6349)}
    assert sizes == chats | {
        "documents64k": (7, 65536, 30308),
        "equal512": (32, 16384, 512),
        "equal1k": (16, 16384, 1024),
    }


def test_decoding_is_measured_where_modules_split_keys() -> None:
    cells = {problem.label: {variant.stem for variant in able} for problem, able in packed_cells.cells(CHECKOUT)}
    assert cells["bf16 d128 causal packed decode64_on_4k, heads 32/8"] == {D128, LATE, PACK4, EVEN}
    assert EVEN not in cells["bf16 d128 causal packed chat16k, heads 32/8"]
    dims = {problem.family.head_dim for problem, _ in packed_cells.cells(CHECKOUT) if "decode" in problem.lengths}
    assert dims == {64, 128, 256}


def masked(cells: dict[str, set[str]]) -> dict[str, set[str]]:
    """Those with a mask: chunks and drafts have one."""
    return {label: able for label, able in cells.items() if " full " not in label}


def test_chunks_beside_steps_are_measured_where_modules_have_an_order_for_them() -> None:
    cells = {problem.label: {variant.stem for variant in able} for problem, able in packed_cells.cells(CHECKOUT)}
    few_keys = {name for name, (_, keys) in packed_cells.DRAWN_LENGTHS.items() if max(keys) <= packed_cells.FEW_KEYS}
    lists = (*packed_cells.MIXED_LENGTHS, *packed_cells.MIXED_CHUNK_LENGTHS, *packed_cells.SHORT_LENGTHS, *few_keys)
    lists = (*lists, *packed_cells.DRAWN_STEP_LENGTHS)
    mixed = {label: able for label, able in masked(cells).items() if any(f" {name}, " in label for name in lists)}
    for_chunks = {CHUNKS, WIDE, SMALL}
    of_any_group = {D128, LATE, ANY, ANY_WOVEN} | for_chunks
    of_4 = {PACK4, MIXED, WOVEN}
    assert mixed["bf16 d128 causal packed chunk_and_63_steps, heads 32/8"] == of_any_group | of_4
    # Of a group that several tiles hold each would read a step's keys.
    assert mixed["bf16 d128 causal packed chunk_and_63_steps, heads 64/8"] == of_any_group | of_4 - {WOVEN}
    assert mixed["bf16 d128 causal packed chunk_and_63_steps, heads 16"] == of_any_group | {PACK1_WOVEN}
    assert mixed["bf16 d128 causal packed 4_chunks_and_140_steps, heads 40/8"] == of_any_group
    assert MIXED_64ROWS in mixed["bf16 d128 causal pages 64 63_steps_and_chunk, heads 32/8"]
    stems = {variant.stem for variant in packed_cells.packed_modules(CHECKOUT) if variant.spec.order != "by_sequence"}
    assert set().union(*mixed.values()) >= stems >= {ANY, MIXED, MIXED_64ROWS, WOVEN, ANY_WOVEN, PACK1_WOVEN}
    # Of pages of a row, and without a window of packed keys of 8 bits and of those beside queries of 16, there is none.
    without = "e4m3 .* packed |bf16 kv e4m3 .* causal |.* pages 1 "
    nowhere = {label for label in mixed if re.match(without, label)}
    assert nowhere and all(bool(able & stems) == (label not in nowhere) for label, able in mixed.items())
    assert all(
        " window" in label and any(f" {name}, " in label for name in OF_WINDOWS)
        for label, able in cells.items()
        if able & stems
        and label not in mixed
        and not any(f" {name}, " in label for name in packed_cells.PROMPT_LENGTHS)
    )
    found = {
        tuple(label.split(", heads ")[-1] for label in mixed if f" d{dim} " in label and " window" not in label)
        for dim in (64, 128, 256)
    }
    wanted = {
        64: ("16", "64/8", "8/1", "20/5"),
        128: ("16", "32/8", "40/8", "64/8", "96/8", "8/1", "10/2", "12/1", "28/4"),
        256: ("8", "16/4", "16/8", "8/1", "4/2"),
    }
    assert {frozenset(heads) for heads in found} == set(map(frozenset, wanted.values()))


def test_prompts_alone_are_measured_with_few_heads() -> None:
    """With a mask, each list with every third entry of heads, of 8 bits with every sixth; those on few keys with every
    module."""
    cells = {problem.label: {variant.stem for variant in able} for problem, able in packed_cells.cells(CHECKOUT)}
    names = packed_cells.PROMPT_LENGTHS
    alone = {label: able for label, able in cells.items() if any(f" {name}, " in label for name in names)}
    whole = {D128, LATE, CHUNKS, WIDE, SMALL}
    assert alone["bf16 d128 causal packed prompt8k, heads 8/1"] == whole | {PACK4}
    assert alone["bf16 d128 causal packed prompt12k, heads 7/1"] == whole
    assert alone["bf16 d128 causal packed prompt2k, heads 7/1"] == whole | {ANY, ANY_WOVEN}
    of_heads = {dim: len(heads) for dim, heads in packed_cells.PROMPT_HEADS.items()}
    sixteen = {label for label in alone if "e4m3" not in label}
    assert len(sixteen) == 3 * len(names) * sum(of_heads.values()) // packed_cells.DRAWN_TURNS
    assert {label.split(", ")[0] for label in sixteen} == {
        f"bf16 d{dim} causal {where} {name}" for dim in of_heads for where in ("packed", "pages 16", "pages 64")
        for name in names
    }  # fmt: skip
    turns: dict[tuple[str, str], set[int]] = {}  # by dtypes, head dim, pages and heads
    for label in alone.keys() - sixteen:
        (which, name), heads = label.split(", ")[0].rsplit(" ", 1), label.split(", ")[1]
        turns.setdefault((which, heads), set()).add(list(names).index(name))
    assert len(turns) == (3 + 2) * sum(of_heads.values())  # keys of 8 bits beside queries of 16 only in pages
    for found in turns.values():
        assert found == {*range(min(found), len(names), packed_cells.EIGHT_BIT_TURNS)}


def test_drafts_and_chunks_are_measured_with_the_modules_made_for_them() -> None:
    cells = {problem.label: {variant.stem for variant in able} for problem, able in packed_cells.cells(CHECKOUT)}
    every = {D128, LATE, PACK4, CHUNKS, WIDE, SMALL}
    assert cells["bf16 d128 causal packed 8_drafts_of_16_on_4k, heads 32/8"] == every | {EVEN}
    assert cells["bf16 d128 causal packed chunk512_on_8k, heads 8/1"] == every
    assert cells["bf16 d128 causal packed chunk128_and_15_steps_on_8k, heads 8/1"] > {D128, ANY, CHUNKS}
    lists = [*packed_cells.DRAFT_LENGTHS, *packed_cells.CHUNK_LENGTHS]
    lists += [*packed_cells.MIXED_LENGTHS, *packed_cells.MIXED_CHUNK_LENGTHS, *packed_cells.SHORT_LENGTHS]
    lists += [*packed_cells.DRAWN_LENGTHS, *packed_cells.PROMPT_LENGTHS]
    made_for_them = {label for label, able in cells.items() if any("chunks" in stem for stem in able)}
    causal = {label for label in masked(cells) if " window" not in label}
    # And with decoding steps where no others split keys.
    alone = {label for label in causal if re.match("bf16 kv e4m3 d(64|256) causal pages 1 ", label)}
    steps = {label for label in alone if any(f" {name}, " in label for name in packed_cells.DECODING_LENGTHS)}
    assert len(steps) == 2 * 2 * len(packed_cells.DECODING_LENGTHS)
    assert made_for_them == steps | {label for label in causal if any(f" {name}, " in label for name in lists)}
    assert not any(" sink" in label for label in made_for_them)


def test_prompts_without_a_mask_are_measured_with_modules_that_split_no_keys() -> None:
    """Where there are several; in pages of a prompt without a mask nobody has asked for them."""
    cells = {problem.label: {variant.stem for variant in able} for problem, able in packed_cells.cells(CHECKOUT)}
    unmasked = {label: able for label, able in cells.items() if " full " in label and " drawn_" in label}
    every = {f"fwd_packed_{part}d256" for part in ("", "own_bits_", "pack4_", "shared_")}
    assert cells["bf16 d256 full packed drawn_prompts_401, heads 16/4"] == every
    assert cells["bf16 d256 full packed drawn_prompts_401, heads 4/2"] == every - {"fwd_packed_pack4_d256"}
    assert all(" packed " in label and len(able) > 1 for label, able in unmasked.items())
    assert not any("decode" in stem or "chunks" in stem for stem in set().union(*unmasked.values()))
    assert {label.split()[1] for label in unmasked} == {"d64", "d128", "d256"}


def test_with_enough_records_of_prompts_rows_are_by_the_means_of_those_around() -> None:
    """Fewer are those of single calls, each of which decides for the calls around it."""
    unmasked = [
        record
        for record in packed_records.load_all(CHECKOUT)
        if record.problem.label.startswith("bf16 d256 full packed") and record.problem.seq_q > dispatch.FEW_QUERIES
    ]
    few = dispatch_table.rows_from_records(unmasked[: dispatch_table.ENOUGH - 1])
    enough = dispatch_table.rows_from_records(unmasked)
    assert few and not any(row.longest_q for row in few)
    assert {row.longest_q.up_to for row in enough if row.longest_q} == {UNEVEN[0]}
    assert {str(row.group) for row in enough} == {"groups of a multiple of 4 heads", str(AtMost(at_most=1)), "None"}
    listed = [record for record in unmasked if not record.problem.lengths.startswith("drawn_")]
    speeds = [share.share for share in dispatch_table.shares(listed, enough)]
    assert len(speeds) == len(listed) and all(speed is not None and speed > 0.97 for speed in speeds)


def test_drawn_lists_are_those_that_were_measured() -> None:
    """Whatever Python draws them: records hold the lengths."""
    of_pages = packed_cells.DRAWN_CHUNK_LENGTHS | packed_cells.DRAWN_SHORT_LENGTHS | packed_cells.DRAWN_STEP_LENGTHS
    prompts = packed_cells.DRAWN_PROMPT_LENGTHS
    for family, drawn in (
        ("causal_pages_64", of_pages),
        ("causal_packed", prompts),
        ("full_packed", prompts | packed_cells.DRAWN_UNMASKED_LENGTHS),
    ):
        paths = packed_records.directory(CHECKOUT).glob(f"bf16_d128_{family}_drawn_*.json")
        problems = [PackedProblem.model_validate(json.loads(path.read_text())["problem"]) for path in paths]
        assert {problem.lengths for problem in problems} == drawn.keys()
        for problem in problems:
            assert (tuple(problem.lengths_q), tuple(problem.lengths_k)) == drawn[problem.lengths]


def test_short_lists_are_measured_with_every_module_that_serves_them() -> None:
    cells = {problem.label: {variant.stem for variant in able} for problem, able in packed_cells.cells(CHECKOUT)}
    every = {D128, LATE, PACK4, EVEN, CHUNKS, WIDE, SMALL, MIXED, ANY, ANY_WOVEN}
    assert cells["bf16 d128 causal packed chunk128_on_700, heads 32/8"] == every | {WOVEN}
    assert cells["bf16 d128 causal packed draft_of_8_on_1k, heads 10/2"] == every - {PACK4, MIXED}  # of 4 heads, or 8
    for name, (lengths_q, lengths_k) in packed_cells.SHORT_LENGTHS.items():
        assert max(lengths_k) <= packed_cells.FEW_KEYS, name
        assert all(q <= k for q, k in zip(lengths_q, lengths_k, strict=True)), name


def served_by(found: list[dispatch.Row], size: Size) -> dispatch.Row:
    family = Family("bf16", 128, 128, CausalMask(), layout="packed")
    return next(row for row in found if row.serves(family, size))


CHUNK, STEPS = [512], [512, *[1] * 63]  # queries: as many of each, and one among decoding steps


def test_many_queries_are_served_by_what_was_measured_around_them() -> None:
    """By keys and by tiles, and by how uneven lengths are."""
    speeds = {2048: (100.0, 50.0), 16384: (50.0, 100.0)}
    even = [record([keys], {D128: whole, CHUNKS: split}, queries=CHUNK) for keys, (whole, split) in speeds.items()]
    uneven = record([8192] * 64, {D128: 60.0, CHUNKS: 80.0, ANY: 100.0}, queries=STEPS)
    found = dispatch_table.rows_from_records([*even, uneven])
    chosen = {
        (keys, mean): served_by(found, Size(keys, tiles, 132, 4, 512, mean_queries=mean)).module
        for keys in (1500, 20000)
        for tiles, mean in ((128, 512), (512, 9))
    }
    assert chosen == {(1500, 512): D128, (20000, 512): CHUNKS, (1500, 9): ANY, (20000, 9): ANY}
    row = served_by(found, Size(1500, 128, 132, 4, 512, mean_queries=512))
    assert row.longest_q == dispatch.Times(up_to=2) and row.seq_k is not None
    assert row.region.startswith("the longest of up to 2 times the queries in the mean, 4 heads of q for each of k, ")
    (line,) = row.measured
    assert isinstance(line, dispatch.Shapes)
    assert (line.shapes, line.runner_up, line.gpu) == (2, CHUNKS, GPU)
    assert line.runner_up_ratio is not None and 1.8 < line.runner_up_ratio < 2.0  # by the uneven list, too, a little
    # Keys and tiles up to which the same module serves.
    assert row.tiles_per_sm is not None and row.tiles_per_sm.up_to >= 1
    around = row.narrowed(dispatch.Stretch(), Size(1500, 128, 132, 4, 512, mean_queries=512))
    ends = row.seq_k.up_to, round(132 * row.tiles_per_sm.up_to)
    assert around == dispatch.Stretch(most_keys=ends[0], most_tiles=ends[1])


def test_each_group_that_was_measured_has_rows_and_all_others_have_some() -> None:
    """Of up to as many heads as tiles have room for; for more, modules that take any, or multiples of theirs."""
    four = record([8192], {D128: 60.0, PACK4: 100.0, CHUNKS: 90.0}, queries=CHUNK)
    five = record([8192], {D128: 60.0, CHUNKS: 90.0}, heads=(10, 2), queries=CHUNK)
    found = dispatch_table.rows_from_records([four, five])
    groups = list(dict.fromkeys(str(row.group) for row in found))
    assert groups == [
        *("4 heads of q for each of k", "5 heads of q for each of k", "up to 16 heads of q for each of k"),
        *("groups of a multiple of 4 heads", "up to 1 head of q for each of k", "None"),
    ]
    chosen = {
        group: served_by(found, Size(8192, 128, 132, group, 512, mean_queries=512)).module
        for group in (1, 4, 5, 6, 12, 16, 17, 20)
    }
    assert chosen == dict.fromkeys((1, 5, 6, 12, 16), CHUNKS) | {4: PACK4, 17: D128, 20: PACK4}


def test_calls_that_split_no_keys_have_rows_of_modules_that_do_not() -> None:
    """Also of records in which modules were timed that do; those of nothing else say nothing."""
    chunk = record([8192], {D128: 100.0, PACK4: 150.0, CHUNKS: 300.0}, queries=CHUNK)
    found = dispatch_table.rows_from_records([chunk])
    whole = [row for row in found if row.module != CHUNKS]
    size = Size(8192, 128, 132, 4, 512, mean_queries=512)
    assert served_by(found, size).module == CHUNKS and served_by(whole, size).module == PACK4
    assert served_by(whole, replace(size, group=5)).module == D128
    only_split = record([8192], {CHUNKS: 300.0}, queries=CHUNK)
    assert {row.module for row in dispatch_table.rows_from_records([only_split])} == {CHUNKS}


def test_families_without_modules_that_split_keys_are_served_by_keys_alone() -> None:
    prompts = [record([keys] * 20, {D128: 100.0, PACK4: 120.0}) for keys in (1000, 4000)]
    assert rows(*prompts) == [(4, None, PACK4), (None, None, D128)]


def test_lengths_are_told_apart_by_how_uneven_they_are() -> None:
    """Where nobody says how many queries the longest has, few in the mean may be a chunk among steps."""
    told = {
        (512, 64): 8.0,
        (128, 128): 1.0,
        (dispatch.NO_LIMIT, 16): math.inf,
        (dispatch.NO_LIMIT, 17): 1.0,
        (5, 0): 5.0,
    }
    assert {lengths: dispatch.unevenness(*lengths) for lengths in told} == told
    keys = [
        dispatch.queries_in_key(*lengths)
        for lengths in ((0, 0), (1, 1), (16, 1), (20, 10), (20, 9), (500, 80), (999, 9))
    ]
    assert keys == [1, 1, 16, 0, -1, -2, -3]
    packed = Size(4096, 64, 132, 4, 512, mean_queries=9)
    assert packed.unevenness == 512 / 9 and Size(4096, 64, 132, 4, 512).unevenness == 1
    assert str(packed).startswith("9 queries of a sequence in the mean, 4096 keys, 64 tiles of 128 query rows ")
    row = dispatch_table.rows_from_records([record([8192], {D128: 1.0, CHUNKS: 2.0}, queries=CHUNK)])[0]
    assert row.longest_q == dispatch.Times(up_to=2)
    assert row.serves_rows(Size(1, 1, group=4, queries=18, mean_queries=9))
    assert not row.serves_rows(Size(1, 1, group=4, queries=19, mean_queries=9))
    assert not row.serves_rows(Size(1, 1, group=4, queries=16, mean_queries=16))  # whose mean no key of a call tells


def test_the_committed_table_tells_apart_what_calls_are_kept_by() -> None:
    """A module is kept for calls that agree in `queries_in_key`, and rows may not ask for more."""
    found = dispatch.read_table(dispatch.table_path(CHECKOUT)).rows
    assert {row.longest_q.up_to for row in found if row.longest_q} == set(dispatch.UNEVEN)


def test_tiles_of_packed_sequences_hold_rows_of_all_heads_that_share_one() -> None:
    assert dispatch.tiles_of_packed(600, 3, (32, 8), 400) == 150
    assert dispatch.tiles_of_packed(601, 3, (32, 8), 400) == 151
    assert dispatch.tiles_of_packed(40, 21, (32, 8), 20) == 21 * 8  # one at least of each sequence and head of k
    assert dispatch.tiles_of_packed(40, 21, (32, 8), 16) == 21 * 32  # of few queries, of each head of q


def test_few_packed_queries_wait_for_no_longest_sequence() -> None:
    """Modules that split keys serve them where others are a little faster, but for many tiles of longer drafts.

    Rows for more queries than were measured name modules whose tiles hold 16 of them. What others took is told.
    """
    prefill = record([300] * 400, {D128: 400.0, PACK4: 450.0})
    speeds = {D128: 50.0, PACK4: 95.0, EVEN: 90.0, CHUNKS: 80.0}
    even, chunks, pack4 = (EVEN, CHUNKS), (CHUNKS, EVEN), (PACK4, EVEN)
    told = {
        (1, 8): {16: even},
        (1, 64): {16: even},
        (8, 8): {8: even, 16: chunks},
        (16, 8): {16: even},
        (8, 64): {8: pack4, 16: pack4},
        (16, 64): {16: pack4},
    }
    for (queries, sequences), served in told.items():
        measured = record([4096] * sequences, speeds, queries=[queries] * sequences)
        few = [(row.seq_q.up_to, row) for row in dispatch_table.rows_from_records([prefill, measured]) if row.seq_q]
        ends = [up_to for up_to, _ in few]
        assert ends == sorted(ends) and set(ends) == set(served), (queries, sequences)
        for up_to, serves in served.items():
            row = few[ends.index(up_to)][1]  # the first that fits
            (line,) = row.measured
            assert (row.module, line.runner_up) == serves, (queries, sequences, up_to)


def test_longer_drafts_have_rows_of_their_own() -> None:
    """Made of records of half a group, too; without any, those of short ones serve all few queries."""
    step = record([4096] * 8, {D128: 10.0, EVEN: 90.0}, queries=[1] * 8)
    drafts = [record([4096] * 8, {D128: 50.0, EVEN: speed, CHUNKS: 90.0}, heads=heads, queries=[16] * 8)
              for heads, speed in (((32, 8), 60.0), ((64, 8), 89.0))]  # fmt: skip
    prefill = record([300] * 400, {D128: 400.0})
    of_short = {row.seq_q.up_to for row in dispatch_table.rows_from_records([prefill, step]) if row.seq_q}
    assert of_short == {16}
    found = [row for row in dispatch_table.rows_from_records([prefill, step, *drafts]) if row.seq_q]
    assert {(row.seq_q.up_to, row.module) for row in found if row.seq_q} == {(4, EVEN), (16, CHUNKS)}
    assert [row.group for row in found if row.seq_q == dispatch.Region(up_to=16)] == [
        dispatch.AtMost(at_most=most) for most in (4, 8, 16)
    ]


def test_rows_for_more_queries_than_were_measured_name_modules_of_large_tiles() -> None:
    """Twice as many queries are two of the small tiles, each of which reads all keys."""
    step = record([4096] * 8, {D128: 10.0, EVEN: 90.0}, queries=[1] * 8)
    draft = record([4096] * 8, {D128: 50.0, CHUNKS: 90.0, SMALL: 100.0}, queries=[8] * 8)
    found = dispatch_table.rows_from_records([record([300] * 400, {D128: 400.0}), step, draft])
    few = {(row.seq_q.up_to, row.module) for row in found if row.seq_q}
    assert few == {(4, EVEN), (8, SMALL), (16, CHUNKS)}


def test_longer_drafts_have_rows_for_the_very_groups_that_were_measured() -> None:
    """Where a module serves best whose tiles hold some heads of a group: it takes no smaller one."""
    step = record([4096] * 8, {D128: 10.0, PACK4: 20.0, EVEN: 90.0}, queries=[1] * 8)
    speeds = {
        (16, 16): {D128: 50.0, EVEN: 90.0, CHUNKS: 80.0},
        (32, 8): {D128: 50.0, PACK4: 85.0, EVEN: 90.0, CHUNKS: 80.0},
        (64, 8): {D128: 50.0, PACK4: 180.0, EVEN: 90.0, CHUNKS: 80.0},
    }
    drafts = [record([2048] * 64, found, heads=heads, queries=[16] * 64) for heads, found in speeds.items()]
    prefill = record([300] * 400, {D128: 400.0, PACK4: 390.0})
    found = dispatch_table.rows_from_records([prefill, step, *drafts])
    very = [row for row in found if row.seq_q and row.seq_q.up_to == 16 and row.module == PACK4]
    assert [row.group for row in very] == [dispatch.AtMost(at_most=8, at_least=8)]
    family = Family("bf16", 128, 128, CausalMask(), layout="packed")
    served = {
        group: next(row.module for row in found if row.serves(family, Size(2048, 8192, 132, group, 16)))
        for group in (1, 4, 7, 8, 12)
    }
    assert served == {1: EVEN, 4: EVEN, 7: EVEN, 8: PACK4, 12: EVEN}
    [row] = very  # 31 tiles for each SM, which is the last band, and nothing of longer sequences is known
    assert row.tiles_per_sm is None and row.seq_k == dispatch.Region(up_to=4096)
    few = record([8192] * 4, {D128: 50.0, PACK4: 60.0, EVEN: 40.0}, heads=(64, 8), queries=[16] * 4)
    assert PACK4 not in [row.module for row in dispatch_table.rows_from_records([prefill, step, few])]


def test_with_pages_a_call_tells_the_keys_of_the_longest() -> None:
    """The table of pages is as wide; rows are made of what calls tell."""
    few, many = [1000, 2000], [1000, 9000]
    speeds = ({PAGES: 100.0, SINGLE_ROWS: 50.0}, {PAGES: 50.0, SINGLE_ROWS: 100.0})
    records = [record(keys, speed, page=64) for keys, speed in zip((few, many), speeds, strict=True)]
    assert rows(*records) == [(None, 2000, PAGES), (None, None, SINGLE_ROWS)]


def test_more_keys_than_were_measured_are_served_as_the_most_are() -> None:
    """A module that is as good as the best at the most keys, and better at fewer, ends before these."""
    speeds = {2000: {PAGES: 100.0, SINGLE_ROWS: 97.0}, 9000: {PAGES: 99.6, SINGLE_ROWS: 100.0}}
    records = [record([keys] * many, speeds[keys], page=64) for keys in speeds for many in (90, 100)]
    assert rows(*records) == [(None, 2000, PAGES), (None, None, SINGLE_ROWS)]


def test_many_short_sequences_tell_little_of_a_few() -> None:
    """Few tiles have rows of their own where those for many would serve fewer keys than were measured with few."""
    many = [
        record([2000] * 100, {PAGES: 100.0, SINGLE_ROWS: 50.0}, page=64),
        record([9000] * 100, {PAGES: 50.0, SINGLE_ROWS: 100.0}, page=64),
    ]
    served = {}
    for slower in (20.0, 99.5):
        few = record([9000], {PAGES: slower, SINGLE_ROWS: 100.0}, heads=(4, 1), page=64)
        found = dispatch_table.rows_from_records([*many, few])
        for tiles in (48, 4800):
            size = Size(1500, tiles, 132, 4, 1500)
            row = next(row for row in found if row.serves(few.problem.family, size))
            served[slower, tiles] = row.module
    assert served == {(20.0, 48): SINGLE_ROWS, (20.0, 4800): PAGES, (99.5, 48): PAGES, (99.5, 4800): PAGES}


def test_what_rows_make_of_records() -> None:
    """The share of the fastest module that they choose, at the size that the host knows."""
    prefill = record([300] * 400, {D128: 400.0, PACK4: 390.0})
    chunk = record([8192], {D128: 100.0, CHUNKS: 300.0}, heads=(8, 1), queries=[512])
    short = record([1000], {D128: 100.0, CHUNKS: 80.0, PACK4: 125.0}, heads=(8, 1), queries=[512])
    found = dispatch_table.rows_from_records([prefill, chunk])
    made = dispatch_table.shares([prefill, chunk, short], found)
    assert [(each.row.module, each.share) for each in made] == [(D128, 1.0), (CHUNKS, 1.0), (CHUNKS, 0.64)]
    untimed = record([1000], {PACK4: 125.0}, heads=(8, 1), queries=[512])
    assert [each.share for each in dispatch_table.shares([untimed], found)] == [None]
    assert dispatch_table.shares([record([9], {D64: 1.0}, heads=(1, 1))], found) == []


def test_queries_of_8_bits_have_rows_that_serve_their_calls() -> None:
    """With the dtype that O has; decoding steps beside prompts, as for 16 bits."""
    few, many = "fwd_fp8_packed_decode_d128_causal", "fwd_fp8_packed_d128_causal"
    prompts = record([700, 900], {many: 800.0})
    assert prompts.problem.file_name == "e4m3_d128_causal_o_bf16_packed_list2_h32_8.json"
    steps = record([4096] * 8, {many: 1.0, few: 9.0}, queries=[1] * 8)
    found = dispatch_table.rows_from_records([prompts, steps])
    family = Family("e4m3", 128, 128, CausalMask(), "bf16", layout="packed")
    sizes = {few: Size(4096, 256, 132, 4, 1, mean_queries=1), many: Size(800, 448, 132, 4, 900)}
    for stem, size in sizes.items():
        assert next(row.module for row in found if row.serves(family, size)) == stem
    assert {row.out_dtype for row in found} == {"bf16"}
    cells = {problem.label: {variant.stem for variant in able} for problem, able in packed_cells.cells(CHECKOUT)}
    assert cells["e4m3 d128 causal o bf16 packed decode64_on_4k, heads 32/8"] == {few, many}
    assert cells["e4m3 d128 causal o bf16 packed chat64k, heads 16"] == {many}


def test_few_queries_have_rows_for_groups_up_to_those_measured() -> None:
    """In modules whose tiles hold all heads of a group; a prefill of the family has rows as before."""
    prefill = record([300] * 400, {D128: 500.0, PACK4: 450.0})
    step = record([4096] * 64, {D128: 10.0, PACK4: 40.0, EVEN: 90.0}, queries=[1] * 64)
    few, room, rest = dispatch_table.rows_from_records([prefill, step])
    assert (few.module, few.group, few.seq_q) == (EVEN, dispatch.AtMost(at_most=4), dispatch.Region(up_to=16))
    assert (room.module, room.group) == (EVEN, dispatch.AtMost(at_most=16))
    assert (rest.module, rest.group, rest.seq_q) == (D128, None, None)


def test_rows_by_mean_length() -> None:
    short = record([100, 101] * 40, {D64: 400.0, SHORT: 500.0}, heads=(16, 16))
    long = record([2000] * 40, {D64: 600.0, SHORT: 500.0}, heads=(16, 16))
    assert rows(long, short) == [(None, 101, SHORT), (None, None, D64)]
    [first, _] = dispatch_table.rows_from_records([short, long])
    assert first.family == Family("bf16", 64, 64, CausalMask(), layout="packed")


def test_groups_have_rows_of_their_own_where_packed_heads_win() -> None:
    """As measured with groups of 4 heads, and never for other groups, for which the other module stands alone."""
    large = [5000] * 40
    wins = record([300] * 400, {D128: 500.0, PACK4: 600.0})
    loses = record(large, {D128: 600.0, PACK4: 500.0})
    assert rows(wins, loses) == [(4, 300, PACK4), (4, None, D128), (None, None, D128)]
    assert rows(loses) == [(None, None, D128)]
    of_six = record(large, {D128: 500.0}, heads=(48, 8))
    assert rows(wins, of_six) == [(4, None, PACK4), (None, None, D128)]


def test_pages_have_rows_by_what_their_size_is_a_multiple_of(tmp_path: Path) -> None:
    """A record of pages says so in its file; the rows for the largest pages come first."""
    measured = [
        record([300] * 400, {SINGLE_ROWS: 200.0}, page=1),
        record([300] * 400, {PAGES: 500.0, SINGLE_ROWS: 300.0}, page=16),
        record([300] * 400, {PAGES_OF_64: 600.0, PAGES: 500.0, SINGLE_ROWS: 300.0}, page=64),
    ]
    workspace = Workspace(tmp_path, tmp_path)
    saved = packed_records.save(workspace, measured)
    assert saved[1].name == "bf16_d128_causal_pages_16_list400_h32_8.json" and '"page": 16' in saved[1].read_text()
    assert sorted(packed_records.load_all(workspace), key=lambda one: one.problem.page or 0) == measured
    with pytest.raises(ValueError, match=f"{PAGES_OF_64} is compiled for another problem"):
        record([300], {PAGES: 500.0, PAGES_OF_64: 600.0}, page=16)
    rows = dispatch_table.rows_from_records(measured)
    assert [(row.page_rows, row.module) for row in rows] == [(64, PAGES_OF_64), (16, PAGES), (1, SINGLE_ROWS)]
    family = Family("bf16", 128, 128, CausalMask(), layout="paged")
    size = Size(300, 9000, group=4)
    served = {
        page: next(row.module for row in rows if row.serves(family._replace(page_rows=page), size))
        for page in (1, 16, 24, 48, 64, 256, 1000)
    }
    assert served == {1: SINGLE_ROWS, 16: PAGES, 24: SINGLE_ROWS, 48: PAGES, 64: PAGES_OF_64} | {
        256: PAGES_OF_64,
        1000: SINGLE_ROWS,
    }


def test_pages_that_the_same_modules_serve_have_the_same_rows() -> None:
    """Those of the most keys that a module copies at once; records of all of them tell which is best."""
    of_16 = record([300] * 400, {PAGES: 500.0, SINGLE_ROWS: 490.0}, page=16)
    of_64 = record([300] * 400, {PAGES: 400.0, SINGLE_ROWS: 490.0}, page=64)
    assert [(row.page_rows, row.module) for row in dispatch_table.rows_from_records([of_16, of_64])] == [
        (16, SINGLE_ROWS)
    ]
    (row,) = dispatch_table.rows_from_records([of_16])
    assert (row.page_rows, row.module) == (16, PAGES)
    boxes: dict[tuple[Any, ...], set[int]] = {}
    for variant in packed_cells.packed_modules(CHECKOUT):
        boxes.setdefault(kind_of(Family.of(variant.spec)), set()).add(page_rows(variant.spec) or 1)
    found = [row for row in dispatch.read_table(dispatch.table_path(CHECKOUT)).rows if row.layout == "paged"]
    assert found and all(row.page_rows in boxes[kind_of(row.family)] for row in found)


def kind_of(family: Family) -> tuple[Any, ...]:
    """What calls in pages of different sizes agree in."""
    return family.dtype, family.kv_dtype, family.head_dim, family.mask.kind, family.keywords


def test_a_chunk_beside_steps_in_windows_has_a_module_that_reads_keys_once_for_a_group() -> None:
    """By groups that were measured, and by how uneven lengths are."""
    family = Family("bf16", 128, 128, WindowMask(left=1023, right=0), layout="paged", page_rows=16)
    served = {
        (group, mean): dispatch.choose(
            family, Size(2048, 64 * 4, 132, group, 512, mean_queries=mean), lse=True, workspace=CHECKOUT
        ).stem
        for group in (1, 7, 8)
        for mean in (9, 512)
    }
    one, any_group = "fwd_paged_any_window_d128", "fwd_paged_mixed_any_window_d128"
    assert served == {(group, mean): any_group if mean == 9 and group > 1 else one for group, mean in served}


def test_the_table_that_the_command_writes_is_the_one_that_calls_go_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tuning records beside; a packed row has its layout and group, and dense rows say nothing of either."""
    (tmp_path / "specs").symlink_to(CHECKOUT.specs_dir)
    (tmp_path / "generated").mkdir()
    workspace = Workspace(tmp_path, tmp_path / "package")
    for stem in (D128, PACK4):
        workspace.module_path(stem).write_bytes(CHECKOUT.module_path(stem).read_bytes())
    packed_records.save(workspace, [record([300] * 400, {D128: 500.0, PACK4: 600.0})])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Workspace, "find", classmethod(lambda cls, start=None: workspace))
    result = CliRunner().invoke(app, ["tune", "--write-table"])
    assert result.exit_code == 0, result.output
    text = dispatch.table_path(workspace).read_text()
    assert "  layout: packed\n  group: {multiple_of: 4}\n  module: fwd_packed_pack4_d128_causal\n" in text
    assert dispatch_table.check_table(workspace, dispatch_table.records_of(workspace)) == []
    family = Family("bf16", 128, 128, CausalMask(), layout="packed")
    chosen: dict[int, Any] = {
        group: dispatch.choose(family, Size(9, 9, group=group), lse=True, workspace=workspace).stem
        for group in (1, 4, 6, 8)
    }
    assert chosen == {1: D128, 4: PACK4, 6: D128, 8: PACK4}


def test_a_result_follows_its_file_to_a_later_one_with_the_same_instructions() -> None:
    (measured,) = record([2048], {D128: 400.0}).results
    first, second, third = (measured.sha256, "1" * 64, "2" * 64)
    assert measured.carried({"0" * 64: second}) == measured
    later = measured.carried({first: second})
    assert (later.sha256, later.ran, later.tflops) == (second, first, 400.0)
    latest = later.carried({second: third})
    assert (latest.sha256, latest.ran) == (third, first)  # that file, and no other, was run
    assert "ran" in latest.model_dump() and "ran" not in measured.model_dump()
