"""What differs between two modules, as data: fields, plan, steps, source, and which modules belong together."""

from __future__ import annotations

import pytest
from rendering import CHECKOUT, STEMS, changed, plans, samples, source, variants

from fa3gen.base.errors import UserError
from fa3gen.generate.header import StepRow
from fa3gen.generate.plan import make_plan
from fa3gen.inspect.difference.comparing import compare, facts, plan_changes, step_changes, unified
from fa3gen.inspect.difference.model import Difference, FieldChange, PairDifference, Side, SourceChange
from fa3gen.inspect.difference.pairing import pair
from fa3gen.inspect.difference.side_by_side import Line, hunks
from fa3gen.inspect.difference.sides import difference, named, stems
from fa3gen.inspect.difference.text import printed
from fa3gen.spec.specfile import Variant


def side(variant: Variant) -> Side:
    return Side(variant.stem, str(variant.source), variant.summary, variant.spec, make_plan(variant), None, "")


def compared(old: Variant, new: Variant) -> PairDifference:
    return compare(side(old), side(new))


def said(found: PairDifference, topic: str) -> dict[str, tuple[str | None, str | None]]:
    return {change.what: (change.old, change.new) for change in found.plan if change.topic == topic}


# Fields


def test_fields_that_differ() -> None:
    found = compared(variants()["k4_smem_d128"], variants()["k4_2_d128"])
    assert found.fields == (
        FieldChange("summary", variants()["k4_smem_d128"].summary, variants()["k4_2_d128"].summary),
        FieldChange("load.barrier", "shared", "separate"),
        FieldChange("pv.a.source", "smem", "registers"),
        FieldChange("handoff.through", "smem_16bit", "registers"),
        FieldChange("handoff.swizzle", "128B", None),
    )


def test_a_field_that_is_null_is_not_there() -> None:
    base = variants()["fwd_d128"]
    found = compared(base, changed("fwd_d128", softmax={"rescale_above": 8}))
    assert found.fields == (FieldChange("softmax.rescale_above", None, 8),)
    assert compared(base, changed("fwd_d128", problem={"head_dim_v": None})).fields == ()


def test_a_module_does_not_differ_from_itself() -> None:
    assert [stem for stem in STEMS if compared(variants()[stem], variants()[stem]).differs] == []


# Plan


def test_what_one_more_stage_changes() -> None:
    """A stage of k4_2_d128 is 64 keys of 128 elements of 2 bytes, for K and for V; each ring gets two more barriers."""
    found = compared(variants()["k4_2_d128"], changed("k4_2_d128", load={"kv_stages": 3}))
    tile = 64 * 128 * 2
    old, new = 128 * 128 * 2 + 4 * tile, 128 * 128 * 2 + 6 * tile
    assert said(found, "shared memory") == {
        "sK": (
            f"at 32768: {2 * tile} bytes, 2 stages x 64 x 128 x 2: K",
            f"at 32768: {3 * tile} bytes, 3 stages x 64 x 128 x 2: K",
        ),
        "sV": (
            f"at {32768 + 2 * tile}: {2 * tile} bytes, 2 stages x 64 x 128 x 2: V",
            f"at {32768 + 3 * tile}: {3 * tile} bytes, 3 stages x 64 x 128 x 2: V",
        ),
        "barriers": (f"at {old}: 72 bytes, 9 mbarriers", f"at {new}: 104 bytes, 13 mbarriers"),
        "total": (f"{old + 1024} bytes", f"{new + 1024} bytes"),
        "left for a CTA": (f"{232448 - old - 1024} bytes", f"{232448 - new - 1024} bytes"),
        "CTAs per SM that it allows": ("2", "1"),  # 228 KB, of which each CTA takes another KB
    }
    assert said(found, "expected of the compiled code") == {"mbarrier init": ("9", "13")}
    assert said(found, "barriers")["k_full"] == (
        f"2 stages; TMA -> 8 warps; {tile} bytes",
        f"3 stages; TMA -> 8 warps; {tile} bytes",
    )
    assert said(found, "threads and registers") == said(found, "work of a CTA in one step") == {}


def test_what_specialisation_changes() -> None:
    found = compared(variants()["k4_2_d128"], variants()["k5_d128"])
    threads = said(found, "threads and registers")
    assert threads["threads per CTA"] == ("256", "384") and "threads that compute" not in threads
    assert threads["registers of a consumer"] == (None, "240, by setmaxnreg")
    assert said(found, "barriers")["OUTPUT_BARRIER"][0] is None
    counts = said(found, "expected of the compiled code")
    assert counts["wgmma m64n128k16, A from smem"] == (None, "16")
    assert counts["setmaxnreg"] == (None, "dec 24 x 1, inc 240 x 1")
    scores = said(found, "work of a CTA in one step")["tensor cores"]
    assert scores == (f"{2 * 2 * 128 * 64 * 128:,} FLOP", f"{2 * 2 * 128 * 128 * 128:,} FLOP")


def test_another_tile_is_told_for_the_same_work() -> None:
    """112 keys instead of 128 take less shared memory and fewer FLOP for each step, which saves nothing: for each key
    there is more to do, and 4096 keys are 37 steps of 112, 48 keys too many."""
    found = compared(samples()["ping_pong_d128"], changed("ping_pong_d128", tile={"kv": 112}))
    each = said(found, "work for each key of a tile of queries")
    # 2 x 128 rows x 256 / 4096 FLOP a cycle, whatever the tile.
    assert each["tensor cores"] == ("65,536 FLOP, 16 cycles",) * 2
    # A factor for each of 128 rows in 4 threads beside 128 x kv scores: 128 + 512 / kv.
    assert each["exponentials"] == ("132 ex2, 8.25 cycles", "132.6 ex2, 8.286 cycles")
    # Q K^T reads its 128 rows of Q for each tile: 1024 bytes of K and V, arriving and read twice, and 64 KB / kv.
    assert each["shared memory"] == ("1,792 bytes, 14 cycles", "1,829 bytes, 14.29 cycles")
    whole = said(found, "work over 4,096 keys")
    assert whole["a tile of queries"] == (
        "128 rows, 32 steps, 65,536 cycles of tensor cores",
        "128 rows, 37 steps, 66,304 cycles of tensor cores",
    )
    assert whole["keys computed"] == ("4,096", "4,144")
    assert whole["ceiling"] == ("989 TFLOP/s, bound by tensor cores (H200 SXM)",) * 2
    text = printed(Difference((found,)), with_source=False)
    assert "tensor cores       65,536 FLOP, 16 cycles, on both sides" in text
    topics = list(dict.fromkeys(change.topic for change in found.plan))
    place = topics.index("work of a CTA in one step")
    assert topics[place + 1 : place + 3] == ["work for each key of a tile of queries", "work over 4,096 keys"]


def test_tiles_of_more_queries_are_compared_by_row_and_key() -> None:
    found = compared(samples()["ping_pong_d128"], changed("ping_pong_d128", tile={"q": 192, "warpgroups": 3}))
    each = said(found, "work for each key and query row")
    # 512 bytes of a key's K and V for 128 rows, for 192.
    assert [text.partition(" bytes")[0] for text in each["L2"] if text] == ["4", "2.667"]
    same = compared(samples()["ping_pong_d128"], changed("ping_pong_d128", load={"kv_stages": 1}))
    assert not [change for change in same.plan if change.topic.startswith("work ")]


def test_rings_and_turns_of_a_persistent_kernel() -> None:
    barriers = facts(plans()["fwd_d64"])["barriers"]
    q = 192 * 64 * 2
    assert barriers["q"] == f"2 stages; TMA, from warp 12 -> 12 warps; full with {q} bytes; empty with 12 arrivals"
    turns = "named barriers 2 to 4; 256 threads; each consumer -> the next one: it may issue its products"
    assert barriers["TURN_BARRIER"] == turns


def test_everything_that_headers_say_is_compared() -> None:
    """Modules next to each other by name: wherever their headers differ, so does what was found, and the reverse."""
    silent = []
    for one, other in zip(STEMS, STEMS[1:], strict=False):
        old, new = plans()[one], plans()[other]
        for name, topic in (("decisions", "decisions"), ("smem", "shared memory"), ("sentence", "decisions")):
            differ = getattr(old.header, name) != getattr(new.header, name)
            found = [change for change in plan_changes(facts(old), facts(new)) if change.topic == topic]
            if differ and not found:
                silent.append((one, other, name))
        barriers = (old.header.barriers, old.header.named_barriers) != (new.header.barriers, new.header.named_barriers)
        if barriers != any(change.topic == "barriers" for change in plan_changes(facts(old), facts(new))):
            silent.append((one, other, "barriers"))
    assert silent == []


def test_names_stand_where_they_belong() -> None:
    changes = compared(variants()["k3_2_d128"], variants()["k4_smem_d128"]).plan
    assert len({(change.topic, change.what) for change in changes}) == len(changes)
    names = [change.what for change in changes if change.topic == "shared memory"]
    assert names.index("sK") < names.index("sS") < names.index("sP") < names.index("total")


def test_steps() -> None:
    wait, load = StepRow("per tile", "warp 0", "wait", "it is there"), StepRow("per step", "warp 0", "load", "TMA")
    store, other = StepRow("", "output", "store", ""), wait._replace(who="consumers")
    found = step_changes([wait, store, load], [other, load])
    assert [(step.change, step.text) for step in found] == [
        ("same", "per tile, consumers: wait (it is there)"),
        ("removed", "output: store"),
        ("same", "per step, warp 0: load (TMA)"),
    ]
    assert step_changes([wait, load], [other, load]) == []
    assert step_changes([wait], [wait._replace(place="per CTA")]) != []


# Pairs


def pairs_of(old: str, new: str) -> list[tuple[str, str]]:
    return [(left.stem, right.stem) for left, right in pair(named(old, CHECKOUT), named(new, CHECKOUT)).pairs]


def test_specs_are_paired_by_what_they_vary() -> None:
    assert pairs_of("k5", "k6") == [
        ("k5_d64", "k6_d64"),
        ("k5_d64_causal", "k6_d64_causal"),
        ("k5_d128", "k6_d128"),
        ("k5_d128_causal", "k6_d128_causal"),
    ]


def test_one_module_and_a_spec() -> None:
    """The one that it corresponds to; of the others nothing is said."""
    assert pairs_of("k4_2", "k4_2_o_only") == [("k4_2_d128_causal", "k4_2_o_only_d128_causal")]
    assert pairs_of("fwd_d64_causal", "k6") == [("fwd_d64_causal", "k6_d64_causal")]
    assert pairs_of("k1_d64", "k6_d128_causal") == [("k1_d64", "k6_d128_causal")]
    assert pair(named("k1_d64", CHECKOUT), named("k2", CHECKOUT)).only_new == ()


def test_modules_without_a_partner() -> None:
    found = pair(named("k6", CHECKOUT), named("k6_sequential", CHECKOUT))
    assert len(found.pairs) == 2
    assert stems(found.only_old) == ("k6_d64", "k6_d64_causal")
    assert stems(found.only_new) == ("k6_sequential_d128_window200_70",)


def test_specs_that_cannot_be_paired() -> None:
    with pytest.raises(UserError) as caught:
        pairs_of("k4_2", "k4_2_window")
    assert str(caught.value) == (
        "the modules of k4_2 and k4_2_window cannot be paired by problem.head_dim, mask; name one of each\n"
        "    k4_2: k4_2_d64, k4_2_d64_causal, k4_2_d128, k4_2_d128_causal\n"
        "    k4_2_window: k4_2_window_d64_window512_0, k4_2_window_d64_window200_70, "
        "k4_2_window_d128_window512_0, k4_2_window_d128_window200_70"
    )


# Source


def test_what_is_compared_is_what_is_committed() -> None:
    [found] = difference("k3_1_d64", "generated/k3_2_d64.py", CHECKOUT).pairs
    assert found.source is not None and found.old.notes == found.new.notes == ()
    assert (found.source.old, found.source.new) == (source("k3_1_d64"), source("k3_2_d64"))
    assert unified(found.source)[:2] == ["--- generated/k3_1_d64.py", "+++ generated/k3_2_d64.py"]


def test_hunks_show_every_changed_line_and_only_a_few_others() -> None:
    old = "".join(f"line {number}\n" for number in range(1, 41))
    new = old.replace("line 9\n", "nine\nand a half\n").replace("line 30\n", "")
    first, second = hunks(old, new)
    assert [row for row in first if not row.same] == [
        Line(9, "line 9", 9, "nine"),
        Line(None, None, 10, "and a half"),
    ]
    assert [row for row in second if not row.same] == [Line(30, "line 30", None, None)]
    assert (first[0], first[-1]) == (Line(6, "line 6", 6, "line 6"), Line(12, "line 12", 13, "line 12"))
    assert second[-1] == Line(33, "line 33", 33, "line 33")


@pytest.mark.parametrize("stem", ["k5_d64", "fwd_d128_causal"])
def test_hunks_and_unified_diff_agree(stem: str) -> None:
    change = SourceChange("old", "new", source(stem), source("k6_d64"))
    rows = [row for hunk in hunks(change.old, change.new) for row in hunk]
    lines = [line for line in unified(change)[2:] if not line.startswith("@@")]
    assert [row.old for row in rows if row.old is not None] == [line[1:] for line in lines if line[0] in "- "]
    assert [row.new for row in rows if row.new is not None] == [line[1:] for line in lines if line[0] in "+ "]
