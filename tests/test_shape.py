"""The shape of every committed module: no dead name, no word of another variant, one reading order, no magic number."""

from __future__ import annotations

import ast
import builtins
import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from rendering import (
    CHECKOUT,
    ROOT,
    STEMS,
    assert_none_in_modules,
    attention_stems,
    combine_stems,
    copy_stems,
    gemm_stems,
    plans,
    quantize_stems,
    source,
    tree,
    variants,
    walked,
)

from fa3gen.generate.plan import Plan

ATTENTION, GEMM, COPIES, MERGES = attention_stems(), gemm_stems(), copy_stems(), combine_stems()
QUANTIZE = quantize_stems()
Function = ast.FunctionDef
FIRST_LINES = '# Copyright the fa3gen authors\n# SPDX-License-Identifier: Apache-2.0\n"""'
ENTRY_POINTS = {"attention", "combine", "copy", "matmul", "quantize", "compile_for_sm90a"}
BANNERS = [
    "Shared storage",
    "Host side",
    "Packed sequences",
    "Kernel",
    "Work",
    "Loads",
    "Pages",
    "V transposed",
    "Consumers",
    "Division of work",
    "S = Q K^T",
    "Mask",
    "Softmax",
    "O = P V",
    "Epilogue",
    "Parts of the keys, added up",
    "Python entry points",
]
GEMM_BANNERS = [
    *("Shared storage", "Host side", "Kernel", "Work", "Loads", "Consumers", "D = A B", "Epilogue"),
    "Python entry points",
]
COPY_BANNERS = ["Shared storage", "Host side", "Kernel", "Tiles", "Python entry points"]
MERGE_BANNERS = ["Shared storage", "Host side", "Kernel", "Parts of the keys, added up", "Python entry points"]
QUANTIZE_BANNERS = ["Shared storage", "Host side", "Kernel", "Rows of a thread", "Scales", "Output"]
QUANTIZE_BANNERS += ["Python entry points"]


def test_there_are_modules() -> None:
    assert len(STEMS) >= 44  # eleven rungs at two head dims, unmasked and causal


def functions(module: ast.Module) -> Iterator[Function]:
    return (node for node in walked(module) if isinstance(node, Function))


def loads(node: ast.AST) -> Counter[str]:
    """How often each name is read below `node`."""
    return Counter(n.id for n in walked(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))


# Text


def test_size() -> None:
    """300 to 700 lines, to read in one sitting; 330 more for roles, work, timeline, slots of a specialised kernel.

    Sinks take 60 of their own, since they are read, checked and added, a cap 30, a first maximum 40, and a window that
    calls give 60: both edges, its arguments and their checks. Packed sequences take 230 more: tensor maps that clip at
    each, a warp that finds tiles, offsets and lengths; with several heads in a tile 40 on top, and 105 where their keys
    are shared out evenly, in lines, with a kernel that adds parts up, 65 more of a window, and 50 of sinks or a cap.
    Keys in pages take 120 more. Keys of 8 bits take 220: who converts them, rings, factors and their checks; 117 where
    each warp widens its own. Products of 8 bits take 190 where CTAs have several tiles: who transposes V, with the
    reasons, factors, tiles that are told or shared; of packed sequences 60 more, for checks of factors, and parts of O
    in the order of V's columns; and 20 where rows of pages are gathered, for rings that threads empty.
    A last wave of packed sequences takes 90, with the parts of its tiles. Keys of each consumer's own take 50.
    Parts that a CTA adds up itself take 60, with the place of their sums. Tiles that hold as many heads as suit a
    sequence's queries take 180: 50 with a box of Q for each number, 40 for steps that rows see, and 90 for rows that
    are dealt out to be added up. Factors take 14 more, of blocks of rows 85 on top, K and V of another
    dtype 10. O in stripes, one after the other, takes 20.
    A GEMM has fewer than 500, a copy 200 to 320, a merge 300 to 350.
    """
    lines = {stem: len(source(stem).splitlines()) for stem in STEMS}
    most = {stem: 1030 if plans()[stem].schedule.specialized else 700 for stem in ATTENTION}
    most = {stem: lines + 60 * plans()[stem].softmax.sink for stem, lines in most.items()}
    most |= {stem: lines + 30 for stem, lines in most.items() if plans()[stem].softmax.softcap}
    most |= {stem: lines + 40 for stem, lines in most.items() if stem in ATTENTION and plans()[stem].softmax.most_cap}
    most |= {stem: lines + 60 for stem, lines in most.items() if plans()[stem].mask.given}
    most |= {stem: lines + 230 for stem, lines in most.items() if plans()[stem].problem.packed_sequences}
    most |= {stem: lines + 120 for stem, lines in most.items() if plans()[stem].problem.paged}
    several = {stem for stem, plan in plans().items() if stem in most and plan.problem.packed_sequences}
    most |= {stem: most[stem] + 40 for stem in several if plans()[stem].tile.packed}
    most |= {stem: most[stem] + 105 for stem in several if plans()[stem].scheduler.split}
    shared = {stem for stem in several if plans()[stem].scheduler.split}
    most |= {stem: most[stem] + 65 for stem in shared if plans()[stem].mask.given}
    most |= {stem: most[stem] + 50 for stem in shared if plans()[stem].softmax.sink or plans()[stem].softmax.softcap}
    most |= {stem: most[stem] + 220 for stem in several if plans()[stem].converts}
    eight_bits = {stem for stem in ATTENTION if plans()[stem].eight_bit and plans()[stem].scheduler.persistent}
    most |= {stem: most[stem] + 190 for stem in eight_bits}
    most |= {stem: most[stem] + 14 for stem in ATTENTION if plans()[stem].eight_bit or plans()[stem].stored}
    most |= {stem: most[stem] + 117 for stem in ATTENTION if plans()[stem].by_warps and plans()[stem].stored}
    most |= {stem: most[stem] + 85 for stem in ATTENTION if (bits := plans()[stem].eight_bit) and bits.block_rows}
    most |= {stem: most[stem] + 10 for stem in ATTENTION if (plan := plans()[stem]).eight_bit and plan.eight_bit.mixed}
    most |= {stem: most[stem] + 60 for stem in eight_bits & several}
    most |= {stem: most[stem] + 20 for stem in eight_bits if plans()[stem].load.pages == "cp_async"}
    most |= {stem: most[stem] + 180 for stem in several if plans()[stem].tile.fitted}
    most |= {stem: most[stem] + 60 for stem in several if plans()[stem].softmax.restarts}
    most |= {stem: most[stem] + 20 for stem in ATTENTION if (bits := plans()[stem].eight_bit) and bits.striped}
    most |= {stem: most[stem] + 90 for stem in several if plans()[stem].scheduler.packed_shares}
    most |= {stem: most[stem] + 50 for stem in ATTENTION if plans()[stem].mask.by_consumer}
    assert {stem: lines[stem] for stem in ATTENTION if not 300 <= lines[stem] <= most[stem]} == {}
    assert {stem: lines[stem] for stem in GEMM if not 300 <= lines[stem] < 500} == {}
    assert {stem: lines[stem] for stem in COPIES if not 200 <= lines[stem] <= 320} == {}
    assert {stem: lines[stem] for stem in MERGES if not 300 <= lines[stem] <= 350} == {}
    assert {stem: lines[stem] for stem in QUANTIZE if not 290 <= lines[stem] <= 430} == {}


def test_lines() -> None:
    """120 columns."""

    def check(stem: str) -> list[str]:
        lines = source(stem).splitlines()
        return [line for line in lines if len(line) > 120 or line != line.rstrip() or "\t" in line]

    assert_none_in_modules(check)
    assert [stem for stem in STEMS if not source(stem).isascii()] == []
    assert [stem for stem in STEMS if "\r" in source(stem) or not source(stem).endswith("\n")] == []


def test_licence_and_summary_come_first() -> None:
    assert [stem for stem in STEMS if not source(stem).startswith(FIRST_LINES)] == []


def test_nothing_that_changes_by_itself() -> None:
    """No date, time, hash, version or path of a machine: they bury real differences."""
    pattern = re.compile(
        r"\b20\d\d-\d\d|\b\d\d:\d\d\b|\b[0-9a-f]{12,}\b|/home/|/tmp/|/root/|\bsha\d|version \d", re.IGNORECASE
    )
    assert_none_in_modules(lambda stem: pattern.findall(source(stem)))


def banners(text: str) -> list[str]:
    rule = "# " + "=" * 118
    return re.findall(rf"^{rule}\n# (.+)\n{rule}\n", text, flags=re.MULTILINE)


def test_banners_stand_in_one_order() -> None:
    def check(stem: str) -> list[str]:
        found = banners(source(stem))
        order = GEMM_BANNERS if stem in GEMM else COPY_BANNERS if stem in COPIES else BANNERS
        order = QUANTIZE_BANNERS if stem in QUANTIZE else order
        return [] if found == [name for name in order if name in found] else found

    assert_none_in_modules(check)
    assert [stem for stem in STEMS if source(stem).count("# ===") != 2 * len(banners(source(stem)))] == []
    specialized = {stem: plans()[stem].schedule.specialized for stem in GEMM}
    assert [stem for stem in GEMM if ("Consumers" in banners(source(stem))) != specialized[stem]] == []
    assert [stem for stem in COPIES if banners(source(stem)) != COPY_BANNERS] == []
    assert [stem for stem in MERGES if banners(source(stem)) != MERGE_BANNERS] == []
    fused = [stem for stem in ATTENTION if not stem.startswith("k1_")]
    # Only where warps are specialised is there a role of consumers, and a scheduler that gives work to all roles.
    missing = {stem: set() if plans()[stem].schedule.specialized else {"Work", "Consumers"} for stem in fused}
    missing = {
        stem: names if plans()[stem].problem.packed_sequences else {*names, "Packed sequences"}
        for stem, names in missing.items()
    }
    missing = {stem: names if plans()[stem].problem.paged else {*names, "Pages"} for stem, names in missing.items()}
    split = {stem for stem in fused if plans()[stem].schedule.specialized and plans()[stem].scheduler.split}
    split |= {stem for stem in fused if plans()[stem].softmax.restarts}
    missing = {
        stem: names if stem in split else {*names, "Parts of the keys, added up"} for stem, names in missing.items()
    }
    transposing = {stem for stem in fused if (eight_bit := plans()[stem].eight_bit) and eight_bit.transposes}
    missing = {stem: names if stem in transposing else {*names, "V transposed"} for stem, names in missing.items()}
    assert [stem for stem in fused if set(BANNERS) - set(banners(source(stem))) != missing[stem]] == []


# What a specialised module may have or lack, and why. It has all other functions, and all are in one order.
BY_SPEC: dict[str, Callable[[Plan], bool]] = {
    **dict.fromkeys(
        ["add_up_piece", "count_pieces", "find_tile_of", "write_row"], lambda plan: plan.scheduler.deals_rows
    ),
    **dict.fromkeys(["load_q", "packings_of", "room_log2", "pack_log2_of", "tiles_of"], lambda plan: plan.tile.fitted),
    "seen_before": lambda plan: plan.scheduler.counts_seen,
    "pack_heads": lambda plan: plan.tile.packed and (plan.tile.padded or not plan.problem.packed_sequences),
    **dict.fromkeys(
        ["clipped", "slice_rows", "find_tiles", "tell", "read_tile", "release_tile", "slot_of"]
        + ["look_at", "bounds_of", "sum_up_to_lane"],
        lambda plan: plan.problem.packed_sequences,
    ),
    **dict.fromkeys(["find_work", "piece_of_share"], lambda plan: plan.scheduler.packed_shares),
    "place_in_sequence": lambda plan: plan.problem.packed_sequences
    and not (plan.scheduler.by_head or plan.scheduler.woven),
    "find_tile": lambda plan: plan.problem.packed_sequences and plan.scheduler.kind == "dynamic",
    **dict.fromkeys(["find_step", "steps_of_all", "steps_of"], lambda plan: plan.scheduler.kind == "even"),
    **dict.fromkeys(
        ["resized", "add_up_row"], lambda plan: plan.scheduler.kind == "even" and not plan.scheduler.whole_parts
    ),
    "tiles_of_keys": lambda plan: plan.scheduler.kind == "even" and plan.tile.from_window,
    "read_sink": lambda plan: plan.scheduler.kind == "even" and plan.softmax.sink,
    "read_pages": lambda plan: plan.load.pages == "cp_async" and plan.load.reads_entries,
    "rows_of": lambda plan: plan.problem.packed_sequences and not (plan.problem.paged and plan.tile.packed),
    "columns_of": lambda plan: plan.problem.packed_sequences and not plan.problem.paged,
    "make_ring": lambda plan: plan.load.q_ring or plan.load.pages != "cp_async",
    **dict.fromkeys(["in_pages", "find_boxes", "load_boxes"], lambda plan: plan.load.pages == "tma"),
    "find_box": lambda plan: plan.load.boxes_alike,
    "next_boxes": lambda plan: plan.load.many_boxes,
    **dict.fromkeys(
        ["make_gathered_ring", "find_rows", "load_rows", "tell_landed", "in_units", "shuffle_64", "as_copied"],
        lambda plan: plan.load.pages == "cp_async",
    ),
    "place_of": lambda plan: plan.tile.padded,
    "heads_first": lambda plan: plan.tile.packed and plan.problem.packed_sequences,
    "packed_rows_of": lambda plan: plan.tile.packed and plan.problem.packed_sequences,
    "dealt_work": lambda plan: plan.scheduler.kind == "static",
    "piece_of_work": lambda plan: plan.scheduler.kind == "stream_k" and not plan.scheduler.packed_shares,
    "draw_work": lambda plan: plan.scheduler.kind == "dynamic" and not plan.problem.packed_sequences,
    "load_first": lambda plan: plan.scheduler.kind == "grid",
    "load_k": lambda plan: plan.scheduler.kind == "grid",
    "load_q_and_k": lambda plan: plan.scheduler.kind != "grid" and not plan.load.together,
    "load_v": lambda plan: not plan.load.together,
    "load_q_k_and_v": lambda plan: plan.load.together,
    "tile_coordinates": lambda plan: plan.scheduler.kind != "grid" and not plan.problem.packed_sequences,
    "slot_after": lambda plan: plan.scheduler.kind == "dynamic" and not plan.problem.packed_sequences,
    "work_on": lambda plan: plan.scheduler.kind != "stream_k" or plan.scheduler.packed_shares,
    "kv_range": lambda plan: plan.mask.kind != "none",
    "multiply_first": lambda plan: plan.schedule.overlap,
    "multiply": lambda plan: plan.schedule.overlap,
    "finish_step": lambda plan: plan.schedule.overlap,
    "rescale_output": lambda plan: plan.schedule.overlap
    and not plan.softmax.most_cap
    and not (plan.eight_bit and plan.eight_bit.two_levels),
    "hold_back_wait": lambda plan: bool(plan.softmax.exp_before_wait),
    "wait_turn": lambda plan: plan.schedule.ping_pong,
    "pass_turn": lambda plan: plan.schedule.ping_pong,
    "mask_left_edge": lambda plan: plan.mask.full_tiles == "between" and plan.schedule.overlap,
    **dict.fromkeys(
        [
            *("stored_layouts", "make_converted_ring", "convert_k", "convert_v"),
            *("partition_units", "convert_tile", "convert_units"),
        ],
        lambda plan: plan.converts,
    ),
    **dict.fromkeys(
        [
            "transposing_layouts",
            "make_transposed_ring",
            "release_by_warp",
            "transpose_v",
            "transpose_tile",
            "matrices_at",
        ],
        lambda plan: plan.eight_bit is not None and plan.eight_bit.transposes,
    ),
    **dict.fromkeys(
        ["read_scale", "scale_of_step", "unit_of", "to_unit_of"],
        lambda plan: plan.eight_bit is not None and plan.eight_bit.block_rows > 0,
    ),
    "promote": lambda plan: plan.eight_bit is not None and plan.eight_bit.two_levels,
    "rescale_held": lambda plan: plan.eight_bit is not None and plan.eight_bit.holds,
    "multiply_stripes": lambda plan: plan.eight_bit is not None and plan.eight_bit.striped,
    "cap_scores": lambda plan: plan.softmax.softcap,
    "read_sinks": lambda plan: plan.softmax.sink and not plan.by_warps,
    "sink_of": lambda plan: plan.softmax.sink,
    "add_sink": lambda plan: plan.softmax.sink and not plan.by_warps,
    "with_sink": lambda plan: plan.softmax.sink and plan.by_warps,
    "find_shift": lambda plan: bool(plan.softmax.most_cap),
    "settle_shift": lambda plan: bool(plan.softmax.most_cap),
    "store_lse": lambda plan: plan.lse and not plan.scheduler.whole_parts and not plan.by_warps,
    **dict.fromkeys(
        ["transpose_in_quad", "trade"],
        lambda plan: plan.output.place == "direct"
        and not plan.scheduler.whole_parts
        and not plan.by_warps
        and (plan.eight_bit is not None or not plan.output.own_dtype),
    ),
    "in_order_of_columns": lambda plan: plan.eight_bit is not None and plan.output.place == "direct",
    **dict.fromkeys(["Keys", "own_keys", "drop", "skip_turns"], lambda plan: plan.mask.by_consumer),
    "let_go": lambda plan: plan.mask.skips_absent,
    **dict.fromkeys(["search", "several_before", "count_tiles"], lambda plan: plan.scheduler.woven),
    "lines_of": lambda plan: plan.scheduler.kind == "even",
    "store_f32": lambda plan: plan.scheduler.split and not plan.by_warps,
    "combine_kernel": lambda plan: plan.scheduler.split,
    **dict.fromkeys(
        ["CombineStorage", "add_up_share"], lambda plan: plan.scheduler.split and not plan.scheduler.whole_parts
    ),
    "weight_of": lambda plan: plan.scheduler.split or plan.softmax.restarts,
    **dict.fromkeys(
        ["parts_of", "store_sums", "add_up_parts", "max_up_to_lane"], lambda plan: plan.scheduler.whole_parts
    ),
    **dict.fromkeys(["inverse_of", "lse_of"], lambda plan: plan.scheduler.whole_parts or plan.softmax.restarts),
    "by_vectors": lambda plan: plan.softmax.sums_in_smem,
    "fold_part": lambda plan: plan.softmax.restarts,
    **dict.fromkeys(
        ["normalize_rows", "store_output"], lambda plan: not plan.scheduler.whole_parts and not plan.by_warps
    ),
    **dict.fromkeys(["as_operand_a", "partition_operands"], lambda plan: not plan.by_warps),
    **dict.fromkeys(
        [
            *("finish_reads", "make_fragments", "first_places", "vector_of", "read_operand_q", "read_k", "read_v"),
            *("as_operand_b", "make_operand_v", "half_of_keys", "leave_sums", "merge_warps"),
            *("store_lse_of_row", "store_row"),
        ],
        lambda plan: plan.by_warps,
    ),
    **dict.fromkeys(["widen_k", "widen_v"], lambda plan: plan.by_warps and plan.stored is not None),
    "part_of_thread": lambda plan: plan.scheduler.kind == "stream_k",
    "give_part": lambda plan: plan.scheduler.kind == "stream_k",
    "add_part": lambda plan: plan.scheduler.kind == "stream_k",
}


def defined(stem: str) -> list[str]:
    """Names of functions and classes at the top of a module, in their order; but not the Python entry points."""
    names = [node.name for node in tree(stem).body if isinstance(node, Function | ast.ClassDef)]
    return names[: names.index("compile_for_sm90a")]


def test_specialised_modules_have_the_same_parts() -> None:
    """Who has read K6 knows the way in all of them."""
    stems = [stem for stem in ATTENTION if plans()[stem].schedule.specialized]
    longest = [name for name in dict.fromkeys(name for stem in stems for name in defined(stem))]
    wrong = []
    for stem in stems:
        expected = {name for name in longest if name not in BY_SPEC or BY_SPEC[name](plans()[stem])}
        wrong += [f"{stem}: {name}" for name in sorted(expected ^ set(defined(stem)))]
    assert wrong == []
    assert set(BY_SPEC) <= set(longest)


def test_parts_of_specialised_modules_stand_in_one_order() -> None:
    """No two modules have two functions the other way round."""
    before: dict[tuple[str, str], str] = {}
    for stem in ATTENTION:
        if plans()[stem].schedule.specialized:
            assert len(set(defined(stem))) == len(defined(stem))
            before |= {pair: stem for pair in itertools.combinations(defined(stem), 2)}
    assert len(before) > 500
    turned = {(a, b): (before[a, b], before[b, a]) for a, b in before if (b, a) in before}
    assert turned == {}


def test_each_field_of_work_is_read() -> None:
    """A piece of work says what this module reads, and no more."""

    def check(stem: str) -> list[str]:
        work = [node for node in tree(stem).body if isinstance(node, ast.ClassDef) and node.name == "Work"]
        if stem in ATTENTION:
            assert len(work) == plans()[stem].schedule.specialized
        fields = [ast.unparse(field.target) for node in work for field in node.body if isinstance(field, ast.AnnAssign)]
        read = {ast.unparse(node) for node in walked(tree(stem)) if isinstance(node, ast.Attribute)}
        return [field for field in fields if f"work.{field}" not in read and f"upcoming.{field}" not in read]

    assert_none_in_modules(check)


MOST_ARGUMENTS = 10


def test_few_positional_arguments() -> None:
    """Tensors of one role travel together. `launch` and kernels take what a call has, one by one."""

    def check(stem: str) -> list[str]:
        return [
            f"{f.name} takes {len(f.args.posonlyargs) + len(f.args.args)}"
            for f in functions(tree(stem))
            if f.name not in KERNELS and len(f.args.posonlyargs) + len(f.args.args) > MOST_ARGUMENTS
        ]

    assert_none_in_modules(check)
    defined_kernels = {
        f.name
        for stem in STEMS
        for f in functions(tree(stem))
        if any(ast.unparse(decorator) == "cute.kernel" for decorator in f.decorator_list)
    }
    assert defined_kernels | {"launch"} == KERNELS


KERNELS = {"launch", "attention_kernel", "scores_kernel", "softmax_kernel", "output_kernel", "matmul_kernel"}
KERNELS |= {"copy_kernel", "combine_kernel", "amax_kernel", "quantize_kernel"}


# Code


def test_imports_are_few() -> None:
    """Self-contained: one file can be vendored."""
    allowed = {"functools", "math", "concurrent.futures", "dataclasses", "types"}
    allowed |= {"cuda.bindings.driver", "torch", "cutlass"}  # the DSL needs the first of these, too

    def check(stem: str) -> list[str]:
        names: list[str] = []
        for node in walked(tree(stem)):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names.append("." * node.level + (node.module or ""))
        return [name for name in names if name not in allowed and not name.startswith("cutlass.")]

    assert_none_in_modules(check)
    at_top = {stem: [n for n in walked(tree(stem)) if isinstance(n, ast.Import | ast.ImportFrom)] for stem in STEMS}
    assert [stem for stem in STEMS if any(node not in tree(stem).body for node in at_top[stem])] == []


def unused(module: ast.Module) -> list[str]:
    """Imports, constants, functions, classes, parameters and locals that nothing reads."""
    read = loads(module)
    found = [f"{name} (top level)" for name in top_level(module) if not read[name] and name not in ENTRY_POINTS]
    for function in functions(module):
        inside = loads(function)
        for name in [*parameters(function), *assigned(function)]:
            if not inside[name] and name != "_":
                found.append(f"{name} ({function.name})")
    return found


def top_level(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, Function | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from stored(node)


def stored(node: ast.AST) -> Iterator[str]:
    return (n.id for n in walked(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def parameters(function: Function) -> list[str]:
    arguments = function.args
    return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def assigned(function: Function) -> list[str]:
    return list(dict.fromkeys(stored(function)))


def test_nothing_is_unused() -> None:
    assert_none_in_modules(lambda stem: sorted(unused(tree(stem))))


def test_unused_names_are_seen() -> None:
    text = """
import a, b
from c import d as e, f
X, Y = 1, 2
Z = X
class C: pass
def g(p, q):
    r, _ = p
    for i in f: s = i
    return b.h(q)
def attention(): return 0
"""
    assert sorted(unused(ast.parse(text))) == [
        "C (top level)",
        "Y (top level)",
        "Z (top level)",
        "a (top level)",
        "e (top level)",
        "g (top level)",
        "r (g)",
        "s (g)",
    ]


def test_no_name_hides_a_builtin() -> None:
    def check(stem: str) -> list[str]:
        names = [n for f in functions(tree(stem)) for n in [*parameters(f), *assigned(f)]]
        return [name for name in [*names, *top_level(tree(stem))] if hasattr(builtins, name)]

    assert_none_in_modules(check)


def test_ruff_finds_nothing() -> None:
    """Pyflakes' rules and a few more, for what the checker above misses; `test_lines` looks at the length of lines."""
    rules = ["--select", "F,E,W,PLE,PLR1711,B006,B008", "--ignore", "E501", "--output-format", "concise"]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", *rules, str(CHECKOUT.generated_dir)]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stdout + process.stderr


def test_functions_have_docstrings_and_are_short() -> None:
    def check(stem: str) -> list[str]:
        found = [
            f"{f.name} has no docstring" for f in functions(tree(stem)) if not ast.get_docstring(f) and f.name != "fake"
        ]
        lengths = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions(tree(stem))}
        return found + [f"{name} has {n} lines" for name, n in lengths.items() if n >= LONGEST.get(name, 100)]

    assert_none_in_modules(check)


# The kernel's prologue and loop are one function, because views and pipeline states cannot leave it.
# Signature and docstring of the entry point for packed sequences take half of its lines, those of pages, windows, sinks
# and factors of 8 bits 13 more, and in the launch each of them is a line or two.
LONGEST = {"attention_kernel": 150, "attention": 127, "launch": 105}


def test_many_arguments_have_names() -> None:
    """Past four arguments a call names them, except for the operands of a kernel, a copy, a product or `compile`.

    Or where each has the name of its parameter, as what the roles of a specialised kernel are given.
    """
    positional = {
        "attention_kernel",
        "matmul_kernel",
        "cute.compile",
        "launch",
        "cute.gemm",
        "mask_scores",
        "mask_left_edge",
        "load_kv",
    }
    positional |= {"softmax_step", "store_lse", "combine_kernel", "packed_rows_of"}
    positional |= {"load_q", "count_pieces", "add_up_share"}
    positional |= {"find_tile", "let_go"}  # whose arguments have the names of their parameters, but for the number
    positional |= {
        "cpasync.tma_partition",
        "store_output",
        "warpgroup.MmaF16BF16Op",
        "warpgroup.MmaF8Op",
        "compile_for_sm90a()",
    }

    def check(stem: str) -> list[str]:
        calls = [node for node in walked(tree(stem)) if isinstance(node, ast.Call) and len(node.args) > 4]
        alike = {f.name: parameters(f) for f in functions(tree(stem))}
        return sorted(
            name
            for call in calls
            if (name := ast.unparse(call.func)) not in positional
            and alike.get(name) != [ast.unparse(argument) for argument in call.args]
        )

    assert_none_in_modules(check)


# Not a question of configuration: one place in an unrolled loop.
UNROLLED_PLACE = "cutlass.const_expr((r, c) == (0, EXP_BEFORE_WAIT - 1))"


def test_no_configuration_branch_is_left() -> None:
    assert_none_in_modules(
        lambda stem: re.findall(r"const_expr|dynamic_expr", source(stem).replace(UNROLLED_PLACE, ""))
    )


def branches_on_constants(module: ast.Module) -> list[str]:
    """Conditions made of the module's own constants: decided when it was generated, so that one arm is dead."""
    fixed = {name for name in top_level(module) if name.isupper()}
    tests = [node.test for node in walked(module) if isinstance(node, ast.If | ast.IfExp | ast.While)]
    return [ast.unparse(test) for test in tests if not set(loads(test)) - fixed]


def test_no_branch_on_a_constant() -> None:
    assert_none_in_modules(lambda stem: branches_on_constants(tree(stem)))
    assert branches_on_constants(ast.parse("A = 1\nif A > 1: pass\nx = 1 if True else 2\nif x > A: pass")) == [
        "A > 1",
        "True",
    ]


# Integers that stand in functions without a name, and why they may.
ANYWHERE = {0, 1, 2}  # first, next, a pair; "number of bytes of 16 bits"
NUMBERS: dict[str, dict[int, str]] = {
    "launch": {3: "mode", 4: "dimension of a box", 32: "threads of a warp", 128: "num_bits_per_copy"},
    "as_boxed": {3: "mode", 4: "mode"},
    "partition_tile": {3: "modes", 4: "modes", 5: "modes", 6: "modes"},
    "copy": {4: "dimensions", 5: "dimensions"},
    "combine": {4: "dimensions", 5: "dimensions"},
    "make_barriers": {32: "threads of a warp"},
    "make_fragments": {4: "strides of fragments", 8: "stride of the A fragment"},
    "read_operand_q": {4: "stride of the A fragment", 8: "the same"},
    "as_operand_b": {4: "stride of the B fragment"},
    "read_v": {4: "ldmatrix x4", 8: "pairs of 8 rows", 32: "columns of four matrices"},
    "make_operand_v": {4: "stride of the B fragment"},
    "half_of_keys": {4: "stride of the B fragment"},
    "widen_v": {4: "stride of what ldmatrix gives", 16: "columns"},
    "leave_sums": {4: "columns of a thread", 8: "stride of the accumulator", 16: "columns"},
    "thread_rows": {32: "threads of a warp"},
    "softmax_kernel": {32: "threads of a warp"},
    "warp_max": {5: "log2 of the 32 threads"},
    "warp_sum": {5: "log2 of the 32 threads"},
    "lanes_max": {4: "log2 of the 16 lanes"},
    "lanes_sum": {4: "log2 of the 16 lanes"},
    "output_kernel": {8: "unroll"},
    "round_p": {3: "lane of a quad", 4: "bits of a digit", 8: "elements of the A fragment", 16: "the same; keys"},
    "as_operand_a": {4: "stride of the A fragment", 8: "stride of the A fragment", 16: "stride of the A fragment"},
    "pv_product": {4: "stride of the A fragment", 8: "stride of the A fragment"},
    "store_p": {4: "stmatrix x4"},
    "store_lse": {4: "lanes of a quad, warps of a warpgroup", 8: "rows of half a warp's", 32: "threads of a warp"},
    "read_sinks": {4: "lanes of a quad, warps of a warpgroup", 8: "rows of half a warp's", 32: "threads of a warp"},
    "store_output": {
        4: "stmatrix x4; lanes of a quad",
        8: "elements in 16 bytes, rows of half a warp's",
        16: "columns that trade places",
        32: "threads of a warp; columns that a quad writes at once",
    },
    "transpose_in_quad": {3: "word"},
    "SharedStorage": {4: "coordinates of a tile", 16: "alignment of them", 128: "alignment of the scores"},
    "attention_kernel": {4: "coordinates of a tile"},
    "next_work": {4: "coordinates of a tile"},
    "load_q_and_k": {3: "tiles of keys from the end: two are on their way"},
    "draw_work": {3: "place of a coordinate"},
    "several_before": {8: "eighths"},
    "count_tiles": {4: "lengths that each lane has on their way"},
    "consume": {3: "maximum, sum and factor of a row", 4: "ldmatrix x4", 5: "these, of a part and of all"},
    "store_sums": {4: "lanes of a quad", 8: "rows of half a warp's", 32: "threads of a warp"},
    "smem_layouts": {3: "mode"},
    "store_tile": {3: "mode", 4: "stmatrix x4", 64: "bits of two columns"},
    "compile_for_sm90a": {3: "stride_order", 4: "alignment", 5: "symbols", 8: "divisibility", 16: "alignment"},
    "check_strides": {4: "dimensions", 8: "elements in 16 bytes", 16: "the same, of 8 bits"},
    "read_q": {4: "ldmatrix x4"},
    "row_major": {3: "shift of a swizzle", 4: "base of a swizzle"},
    "check_gpu": {9: "compute capability"},
    "unasked_lse": {9: "compute capability"},
    "transpose_tile": {4: "pairs of rows", 8: "rows of a matrix"},
    "launch_constants": {9: "compute capability"},
    "sm_count": {9: "compute capability"},
    "packed_constants": {9: "compute capability"},
    "heads_first": {3: "mode", 4: "mode"},
    "combine_kernel": {32: "threads of a warp"},
    "find_scale": {5: "log2 of the 32 threads", 32: "threads of a warp"},
    "largest_of_cta": {5: "log2 of the 32 threads"},
    "scale_rows": {2: "log2 of the 4 threads of a row"},
    "quantize": {4: "dimensions"},
    "in_order_of_columns": {4: "registers apart", 8: "registers of 16 columns", 16: "columns"},
    "add_up_row": {32: "threads of a warp"},
    "store_f32": {4: "threads of a quad", 8: "columns of a quad; rows", 32: "threads of a warp"},
    "shuffle_64": {32: "bits"},
    "sink_of": {16: "bits of a bfloat16", 0xFFFF: "the lower half of a float32"},
}


def integers(node: ast.AST) -> set[int]:
    return {n.value for n in walked(node) if isinstance(n, ast.Constant) and type(n.value) is int}


def test_no_magic_numbers() -> None:
    """Every other integer has a name at the top; the default scale, HEAD_DIM**-0.5, shows the number itself."""

    def check(stem: str) -> list[str]:
        scale: dict[str, dict[int, str]] = {}
        if stem in ATTENTION:
            scale = {"attention": {plans()[stem].problem.head_dim: "scale", 4: "dimensions"}}
        found = []
        for node in tree(stem).body:
            if isinstance(node, Function | ast.ClassDef):
                allowed = {**NUMBERS, **scale}.get(node.name, {})
                found += [f"{n} in {node.name}" for n in integers(node) - ANYWHERE - set(allowed)]
        return found

    assert_none_in_modules(check)


def test_allowed_numbers_are_needed() -> None:
    used = {
        (n.name, i) for s in STEMS for n in tree(s).body if isinstance(n, Function | ast.ClassDef) for i in integers(n)
    }
    assert [
        (name, number) for name, numbers in NUMBERS.items() for number in numbers if (name, number) not in used
    ] == []


# Words of other variants

SPECIALIZED = (
    r"(?<!_)CONSUMER|PRODUCER|setmaxreg|min_blocks_per_mp|OUTPUT_BARRIER|(?<!> )\bconsumer\b"
    r"|Q_STAGES|[qQ]_ring|\bWork\b|\bwork\.|schedule\)"
)
COOPERATIVE = r"\bWARPGROUPS\b|sync_threads.*(Q|complete)"
PING_PONG = r"TURN_|_turn\b|multiply in turn"
OVERLAP = r"wait_group\(1\)|rescale_output|\bk_drain|\bv_drain|multiply\(|upcoming"
SEQUENTIAL = r"kv_drain"
SINGLE_TILE = r"unasked_lse|replace\("
OF_SMS = r"num_sms|launch_constants"
PERSISTENT = rf"{OF_SMS}|num_ctas|work\.number"
TOLD = r"TILE_SLOTS|tile_ring"
DYNAMIC = r"\bcounter\b|draw|slot_after|KEYS_IN_L2|atomic"
EVEN = r"STEPS_OF_SHARE|SHARE_WORDS|MOST_STEPS|find_step|steps_of_all|cut_head|evenly|equal shares of all"
WOVEN = r"several_before|count_tiles|SPREAD_EIGHTHS|let_go"
STATIC = r"dealt_work"
STREAM_K_ALONE = r"STEPS_SAVED|num_whole|piece_of_work|[sS]tream-K|\bflags"
STREAM_K = r"(?<!one )\b[pP]arts?\b|PART|" + STREAM_K_ALONE
SPLIT = r"combine|COMBINE|num_parts|STEPS_OF_PART|store_f32"
PADDED = r"place_of"
WHOLE = r"\bwork_on\b"
PAGES = r"[pP]ages?\b|page_table|BOX_ROWS|\bUNIT\b"
SEQUENCES = r"\btotal_[qk]\b|cu_seqlens|seqused|MOST_ROWS|AROUND|TILE_WARP|TILE_WORDS|q_begin|k_begin"
FLATTENED = r"upcoming\.valid|q_stage\b|k_stage\b|during the epilogue"
OVER_Q = r"OUTPUT_BARRIER|where Q was|over Q\b"
OWN_BUFFER = r"sO_tile\b|storage\.sO\b|stores' reads"
BUFFERED = r"\bsO\b|sO_layout|tma_O|tma_store|stmatrix|StMatrix|bulk_wait_group"
DIRECT = r"transpose_in_quad|\btrade\b|quad_lane"
LAZY = r"RESCALE_ABOVE|vote_any_sync\(outgrown|\bmoved\b(?! right)|outgrown"
SINK = r"\b[sS]inks?\b|add_sink|mSinks|row_sink|row_inverse|row_lse"
SOFTCAP = r"[sS]oftcap|\bcap\b|cap_scale|cap_scores|tanh"
HELD_BACK = r"EXP_BEFORE_WAIT|vote_any_sync\(total"
REGISTERS = r"\bsP\b|sP_layout|P_LAYOUT|store_p\b|\bsS\b|S_PITCH|scatter"
P_IN_SMEM = r"RMEM|\bsS\b|S_PITCH|scatter|stays in registers|tOrP = cute.make_tensor"
SCALAR_PV = r"pv_mma|stmatrix|acc_O_rows|sVt|by_rows|tOrV|tma_O|P_LAYOUT"
SCALAR_QK = r"[wW][gG][mM][mM][aA]|tiled_mma|MmaF16|qk_mma|scatter|OperandMajorMode|acc_S_rows"
WGMMA_PV = r"\bLANES\b|\bROWS\b|S_COLS|O_COLS|thread_rows|load_f32|lanes_"
NO_TMA = r"\bTMA|tma_|mbarrier|[Pp]ipeline|_ring\b|_BYTES"
NO_CP_ASYNC = r"cp_async_wait_group|CopyG2SOp|load_tile|TiledCopy|wait_group\(KV_STAGES"
NO_STAGES = r"KV_STAGES|\bstages?\b|cp_async|cpasync"
IN_REGISTERS = r"[lL]d[mM]atrix|read_q\b"
TRANSPOSING = r"TRANSPOSER|VT_LAYOUT|vt_ring|transpose_v\b|sVt_made"
BY_SEQUENCE = r"check_strides|contiguous=|the sequence is contiguous|sO_layout"
TURNED = r"transpose=True|transposed on the way"
PLAIN = r"row_major"
NAIVE = r"SmemAllocator|SharedStorage|warpgroup|smem|kv_range|n_block_end|TiledMma"


PACKED = r"offsets|TILE_M|FAR|AROUND|sequence"
RING = r"STAGES|READING|AHEAD|CTAS_PER_SM|num_sms|[pP]ipeline|num_ctas|upcoming|load_tile"
FOLDED = r"spans|stride_d|ROW // BOX"
SIDE_BY_SIDE = r"BOXES"


def foreign_words(stem: str) -> str:
    """A pattern of words that only other variants than this module's may use."""
    plan = plans()[stem]
    if stem in GEMM:
        return foreign_to_a_gemm(stem)
    if stem in COPIES:
        return foreign_to_a_copy(stem)
    if stem in MERGES:
        return foreign_to_a_merge(stem)
    if stem in QUANTIZE:
        return foreign_to_a_quantization(stem)
    if plan.p.through == "global_f32":
        return f"{NAIVE}|{NO_TMA}|{NO_CP_ASYNC}|{NO_STAGES}|{SCALAR_QK}|{SCALAR_PV}|{mask_and_outputs(stem)}"
    words = [mask_and_outputs(stem), r"\bscores\b.*global"]
    words.append({"registers": REGISTERS, "smem_16bit": P_IN_SMEM, "smem_f32": SCALAR_PV}[plan.p.through])
    in_vectors = plan.scheduler.kind == "stream_k" or plan.softmax.sums_in_smem  # what is kept of parts
    words += [SCALAR_QK] if plan.qk.engine == "scalar" else [r"VECTOR"] * (not in_vectors and not plan.by_warps)
    words += (
        [r"[wW][gG][mM][mM][aA]|wait_group|OperandMajorMode"]
        if plan.by_warps
        else [r"\bMMA_M, MMA_N, MMA_K = |mma\.sync"]
    )
    words += [WGMMA_PV] * (plan.pv.engine == "wgmma")
    words.append(COOPERATIVE if plan.schedule.specialized else SPECIALIZED)
    words += [PING_PONG] * (not plan.schedule.ping_pong)
    overlap = OVERLAP.removesuffix("|upcoming") if plan.problem.packed_sequences else OVERLAP  # tiles that are told
    words.append(SEQUENTIAL if plan.schedule.overlap else overlap)
    words.append(SINGLE_TILE if plan.scheduler.persistent else PERSISTENT)
    if plan.scheduler.split and not plan.scheduler.persistent:  # how many parts there are depends on the SMs
        words[-1] = PERSISTENT.removeprefix(f"{OF_SMS}|")
    schedulers = {"static": STATIC, "stream_k": STREAM_K, "dynamic": DYNAMIC, "even": EVEN}
    words += [TOLD] * (not plan.scheduler.tile_ring)
    if plan.scheduler.split or plan.softmax.restarts:
        schedulers["stream_k"] = STREAM_K_ALONE  # parts of the keys are another thing
    if plan.scheduler.woven:
        schedulers["even"] = EVEN.replace("evenly|", "")  # some tiles come evenly between others
    else:
        words += [WOVEN]
    kinds = {plan.scheduler.kind, *["dynamic"] * plan.scheduler.packed_shares}  # its tiles are drawn
    words += [pattern for kind, pattern in schedulers.items() if kind not in kinds]
    words += [SPLIT] * (not plan.scheduler.split and not plan.softmax.restarts)
    words += [PADDED] * (not plan.tile.padded)
    words += [WHOLE] * (plan.scheduler.kind == "stream_k" and not plan.scheduler.packed_shares)
    if not plan.problem.packed_sequences:
        words.append(SEQUENCES.removesuffix("|k_begin") if plan.tile.from_window else SEQUENCES)
    places = {"over_q": [OWN_BUFFER, DIRECT], "own_buffer": [OVER_Q, DIRECT], "direct": [OVER_Q, OWN_BUFFER, BUFFERED]}
    if plan.by_warps:  # O of each warp passes through shared memory
        places["direct"] = [
            OVER_Q,
            r"sO_tile\b|stores' reads",
            "sO_layout|tma_O|tma_store|stmatrix|StMatrix|bulk_wait_group",
        ]
    if plan.eight_bit and plan.eight_bit.transposes:
        places["direct"][-1] = BUFFERED.replace("|stmatrix|StMatrix", "")  # by which V is transposed
    words += places[plan.output.place]
    words += [FLATTENED] * (not plan.schedule.flattened) + [LAZY] * (not plan.softmax.lazy)
    words += [HELD_BACK] * (not plan.softmax.exp_before_wait)
    of_engine = {"tma": NO_CP_ASYNC, "cp_async": NO_TMA, "sync": f"{NO_TMA}|{NO_STAGES}"}
    words += [of_engine[plan.load.engine]] * (plan.load.pages != "cp_async")
    words += [PAGES] * (not plan.problem.paged)
    words.append(
        {"shared": r"\b[kv]_(ring|full|empty|barriers)", "separate": r"\bkv_(ring|full|empty|barriers)"}.get(
            plan.load.barrier, NO_TMA
        )
    )
    words += [PLAIN] * (not plan.smem.plain)
    transposes = plan.eight_bit is not None and plan.eight_bit.transposes  # which ldmatrix begins
    words += [IN_REGISTERS] * (plan.qk.a_source != "RMEM" and not transposes and not plan.by_warps)
    words += [TRANSPOSING] * (not transposes)
    if not plan.schedule.specialized:
        words += [BY_SEQUENCE] * (not plan.entry.by_sequence) + [TURNED] * (plan.pv.a_major != "MN")
    return "|".join(words)


def foreign_to_a_copy(stem: str) -> str:
    """The same of a copy, in which nothing of attention may stand either."""
    box, ring = plans()[stem].box, plans()[stem].ring
    words = [r"softmax|\bheads?\b|\bLSE\b|_head_dim|\bHEAD_DIM\b|wgmma"]
    words += [PACKED] * (not box.packed) + [RING] * (not ring.many)
    words += [SIDE_BY_SIDE if box.folded else FOLDED]
    return "|".join(words)


def foreign_to_a_merge(stem: str) -> str:
    """The same of a merge, which knows nothing of scores."""
    words = [r"HEAD_DIM|\bscale\b|\bseq_[qk]\b|heads_(q|kv)|\bmask|wgmma|TMA|tma_|mbarrier|COMBINE_WARPS|warp_idx"]
    words += [r"[bB][fF]loat16"] * (variants()[stem].spec.problem.dtype != "bf16")
    words += [r"(?<![bB])[fF]loat16"] * (variants()[stem].spec.problem.dtype != "fp16")
    return "|".join(words)


def foreign_to_a_quantization(stem: str) -> str:
    """The same of a quantisation, which knows nothing of attention but what shares a head of k."""
    problem = plans()[stem].problem
    words = [r"softmax|\bseq_[qk]\b|heads_q|\bmask|\bLSE\b|wgmma|TMA|tma_|mbarrier"]
    words += [r"rotat|[sS]igns|Hadamard|MMA_SHAPE"] * (not problem.rotate)
    words += [r"[cC]olumn|turned|UNIT|WORD|store_columns" if not problem.transpose else r"store_rows"]
    words += [r"heads_kv|partial|amax_kernel|MOST_PARTS|given, and"] * (problem.scaled_per != "head")
    words += [r"scale_rows"] * (problem.scaled_per != "token")
    words += [r"storage|[sS]hared_?[sS]torage|sync_threads"] * (problem.scaled_per == "token")
    return "|".join(words)


def mask_and_outputs(stem: str) -> str:
    plan = plans()[stem]
    words = [
        {
            "none": r"[cC]ausal|diagonal|[wW]indow|WINDOW",
            "causal": r"[wW]indow|WINDOW|no mask",
            "window": r"no mask" if plan.mask.given else r"[cC]ausal|no mask",
        }[plan.mask.kind],
        r"WINDOW_(LEFT|RIGHT)" if plan.mask.given else r"window_(left|right)|WINDOW_MAX",
        {
            "bf16": r"(?<![bB])[fF]loat16|fp16",
            "fp16": r"[bB][fF]loat16",
            "e4m3": f"16-bit{'(?! word)' * plan.softmax.sink}|16 bits of P",  # sinks come as words of 16 bits
        }[plan.problem.dtype],
    ]
    words += [SINK] * (not plan.softmax.sink) + [SOFTCAP] * (not plan.softmax.softcap)
    words += [r"LN_2|cute.math.log2|store_lse|\blse\b(?!:)|LSE\b(?! output)"] * (not plan.lse)
    return "|".join(words)


GEMM_WGMMA = r"[wW][gG][mM][mM][aA]|OperandMajorMode|stmatrix|StMatrix|\bTMA|tma_|mbarrier|[Pp]ipeline|CONSUMERS"
GEMM_SCALAR = r"LANES_|\bROWS\b|load_f32|load_tile|cp_async_wait_group|inline_ptx"
GEMM_SPECIALIZED = r"\bWork\b|num_sms|setmaxregister|PRODUCER|CHUNK|next_work"
GEMM_REGISTERS = r"RMEM|LdMatrix|load_a\b|from registers, by"
GEMM_C = r"\bmC\b|add_c|\bgC\b|A B \+ C"


def foreign_to_a_gemm(stem: str) -> str:
    """The same of a GEMM, in which nothing of attention may stand either."""
    plan = plans()[stem]
    words = [r"softmax|\bheads?\b|\bLSE\b|HEAD_DIM|\bacc_O\b"]
    words.append(GEMM_SCALAR if plan.product.wgmma else GEMM_WGMMA)
    words += [GEMM_SPECIALIZED] * (not plan.schedule.specialized)
    words += [GEMM_REGISTERS] * (not plan.a.registers)
    words += [GEMM_C] * (not plan.output.adds_c)
    words += [r"CopyUniversalOp|OUT_DTYPE"] * (not plan.output.own_dtype)
    return "|".join(words)


@cache
def without(words: str) -> set[str]:
    """Lines in which these words were looked for, and are not: most lines stand in many modules."""
    return set()


@pytest.mark.parametrize("stem", STEMS)
def test_no_word_of_another_variant(stem: str) -> None:
    # The title quotes the summary of the spec, which may name what the kernel goes without.
    lines = {*source(stem).split("\n", 3)[3].splitlines()}
    found = []
    for words in re.split(r"\|(?![^(]*\))", foreign_words(stem)):  # what is not in brackets stands for itself
        pattern, new = re.compile(words), lines - without(words)
        bitten = {line for line in new if pattern.search(line)}
        without(words).update(new - bitten)
        found += [f"{words}: {line}" for line in sorted(bitten)]
    assert found == []


def test_words_of_a_variant_are_found_in_it() -> None:
    """Each pattern bites: the words that one variant must not use stand in another."""
    samples = {
        "k4_smem_d64": [r"\bsP\b", "P_LAYOUT", r"store_p\b", "stmatrix", "tOrV", r"\bkv_ring"],
        "k4_2_d64": [
            r"\bWARPGROUPS\b",
            "sync_threads.*Q",
            "sync_threads.*complete",
            "RMEM",
            "stays in registers",
            r"\bk_ring",
            "pv_mma",
            "tma_O",
            "by_rows",
        ],
        "k4_1_d64": ["scatter", r"\bsS\b", "S_PITCH", "LANES", "qk_mma"],
        "k2_cp_async_d64": ["cp_async_wait_group", "CopyG2SOp", "load_tile", "VECTOR", "KV_STAGES"],
        "k3_1_d64": ["TMA", "mbarrier", "pipeline", "_BYTES"],
        "k4_2_window_d64_window512_0": ["[wW]indow", "WINDOW"],
        "k5_d64": ["CONSUMER", "PRODUCER", "setmaxreg", "min_blocks_per_mp", "OUTPUT_BARRIER"]
        + ["Q_STAGES", "q_ring", r"\bWork\b", r"\bwork\.", r"schedule\)"],
        "k5_d128_causal": [r"wait_group\(1\)", "rescale_output", "k_drain", "v_drain"],
        "k6_d64": ["TURN_", r"_turn\b", "multiply in turn", r"\bconsumer\b"],
        "k3_plain_d64": PLAIN.split("|"),
        "k4_q_registers_d64": IN_REGISTERS.split("|"),
        "k7_d64": TRANSPOSING.split("|"),
        "k4_transposed_d64": BY_SEQUENCE.split("|"),
        "k4_p_mn_d64": TURNED.split("|"),
        "k1_d64_causal": ["diagonal", "[cC]ausal", "LN_2"],
        "k6_sequential_d128": [*SEQUENTIAL.split("|"), *OVER_Q.split("|"), *SINGLE_TILE.split("|")],
        "fwd_d128": [*PERSISTENT.split("|"), *FLATTENED.split("|"), *OWN_BUFFER.split("|")],
        "fwd_d96": [*STREAM_K.split("|"), *HELD_BACK.split("|")],
        "fwd_decode_d64": SPLIT.split("|"),
        "fwd_d128_static": [*STATIC.split("|"), *WHOLE.split("|")],
        "fwd_d128_causal": [*DYNAMIC.split("|"), *BUFFERED.split("|")],
        "fwd_d64_sink_causal": SINK.split("|"),
        "fwd_d256_softcap_causal": SOFTCAP.split("|"),
        "fwd_d256": [*DIRECT.split("|"), *LAZY.split("|")],
        "g1": GEMM_SCALAR.split("|"),
        "g3": [*GEMM_WGMMA.split("|"), *GEMM_SPECIALIZED.split("|")],
        "g3_registers": GEMM_REGISTERS.split("|"),
        "g3_fp32_add": GEMM_C.split("|"),
        "c2_packed": [*PACKED.split("|"), *RING.split("|"), "spans", "ROW // BOX"],
        "c1_4d_folded": ["stride_d", "spans"],
        "c1": ["BOXES"],
        "fwd_decode_d128": ["HEAD_DIM", r"\bscale\b", "COMBINE_WARPS", "warp_idx"],
        "fwd_packed_woven_d128_causal": WOVEN.split("|"),
    }
    assert {
        stem: lost for stem, words in samples.items() if (lost := [w for w in words if not re.search(w, source(stem))])
    } == {}
