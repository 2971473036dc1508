"""Spec files: merging, the matrix, stems, and what is said of every mistake, with file and line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rendering import CHECKOUT
from ruamel.yaml import YAML

from fa3gen.base.errors import SpecError, UserError
from fa3gen.design import load
from fa3gen.spec import specfile
from fa3gen.spec.complaints import BASES
from fa3gen.spec.model import OPERATIONS
from fa3gen.spec.specfile import SpecFile
from fa3gen.verify import comparison

BASE = """\
summary: both products on WGMMA
problem: {head_dim: 128}
tile: {q: 128, kv: 128, warpgroups: 2}
load: {engine: tma, kv_stages: 2, barrier: separate}
smem: {q: 128B, k: 128B, v: 128B}
qk:
  engine: wgmma
  a: {source: smem, major: k}
  b: {major: k}
pv:
  engine: wgmma
  a: {source: registers, major: k}
  b: {major: mn}
handoff: {through: registers}
"""


class Specs:
    """A directory of spec files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, text: str) -> Path:
        path = self.root / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
        return path

    def load(self, name: str, text: str, **options: Any) -> SpecFile:
        return load.load(self.write(name, text), roots=[self.root], **options)

    def problems(self, name: str, text: str, **options: Any) -> list[str]:
        with pytest.raises(SpecError) as caught:
            self.load(name, text, **options)
        return [str(problem) for problem in caught.value.problems]


@pytest.fixture
def specs(tmp_path: Path) -> Specs:
    directory = Specs(tmp_path)
    directory.write("base", BASE)
    return directory


def stems(spec_file: SpecFile) -> list[str]:
    return [variant.stem for variant in spec_file.variants]


# One file


def test_a_file_without_matrix_is_one_variant(specs: Specs) -> None:
    loaded = specs.load("k", BASE)
    assert (loaded.path, loaded.stem, loaded.summary) == (Path("k.yaml"), "k", "both products on WGMMA")
    (variant,) = loaded.variants
    assert (variant.stem, variant.source, variant.summary) == ("k", Path("k.yaml"), "both products on WGMMA")
    assert variant.spec.problem.head_dim == 128
    assert variant.spec.mask.kind == "none"


def test_mask_shorthand(specs: Specs) -> None:
    assert specs.load("k", BASE + "mask: causal\n").variants[0].spec.mask.kind == "causal"


def test_paths_outside_the_root_stay_as_given(tmp_path: Path, specs: Specs) -> None:
    loaded = load.load(tmp_path / "base.yaml", roots=[tmp_path / "elsewhere"])
    assert loaded.path == tmp_path / "base.yaml"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("summary: both", "sumary: both", "k.yaml:1: sumary: unknown key 'sumary'; did you mean 'summary'?"),
        (
            "kv_stages: 2",
            "stages: 2",
            "k.yaml:4: load.stages: unknown key 'stages'; did you mean 'kv_stages' or 'q_stages'?",
        ),
        (
            "kv_stages: 2, barrier: separate",
            "kv_stages: 2, barrier: shard",
            "k.yaml:4: load.barrier: the string 'shard' is none of shared, separate; did you mean 'shared'?",
        ),
        (
            "handoff: {through: registers}",
            "handoff: {through: registers}\noperation: {kind: forward}",
            "k.yaml:15: operation: a mapping is no operation; there is forward and gemm and copy and combine and "
            "quantize so far",
        ),
        (
            "handoff: {through: registers}",
            "handoff: {through: registers}\no: {dtype: fp8}",
            "k.yaml:15: o.dtype: the string 'fp8' is none of bf16, fp16, fp32; did you mean ",
        ),
        (
            "engine: tma",
            "engine: bulk",
            "k.yaml:4: load.engine: the string 'bulk' is none of sync, cp_async, tma",
        ),
        (
            "load: {engine: tma, kv_stages: 2, barrier: separate}",
            "load: {kv_stages: 2}",
            "k.yaml:4: load: missing key 'engine'; it must be one of sync, cp_async, tma",
        ),
        (
            "load: {engine: tma, kv_stages: 2, barrier: separate}",
            "load: tma",
            "k.yaml:4: load: a mapping such as {engine: sync, ...} is needed, got the string 'tma'",
        ),
        (
            "handoff: {through: registers}",
            "handoff: {through: registers, swizzle: 128B}",
            "k.yaml:14: handoff.swizzle: unknown key 'swizzle' for through: registers; "
            "it belongs to through: smem_16bit",
        ),
        (
            "head_dim: 128",
            "head_dim: '128'",
            "k.yaml:2: problem.head_dim: an integer is needed, got the string '128'",
        ),
        ("head_dim: 128", "head_dim: 1.5", "k.yaml:2: problem.head_dim: an integer is needed, got the number 1.5"),
        ("head_dim: 128", "head_dim: true", "k.yaml:2: problem.head_dim: an integer is needed, got the boolean true"),
        ("head_dim: 128", "head_dim: [64]", "k.yaml:2: problem.head_dim: an integer is needed, got a list"),
        ("head_dim: 128", "head_dim: null", "k.yaml:2: problem.head_dim: an integer is needed, got nothing (null)"),
        ("head_dim: 128", "head_dim: 0", "k.yaml:2: problem.head_dim: 0 is too small; it must be more than 0"),
        ("kv_stages: 2", "kv_stages: 0", "k.yaml:4: load.kv_stages: 0 is too small; it must be more than 0"),
        (
            "handoff: {through: registers}",
            "handoff: {through: registers}\nsoftmax: {rescale_above: 9}",
            "k.yaml:15: softmax.rescale_above: 9 is too large; it must be at most 8",
        ),
        (
            "{head_dim: 128}",
            "{dtype: bf16}",
            "k.yaml:2: problem.head_dim: missing required key 'head_dim' (Elements per head of q, k, v and O)",
        ),
        (
            "barrier: separate",
            "q_stages: 1",
            "k.yaml:4: load.barrier: missing required key 'barrier' (one of shared, separate)",
        ),
        (
            "tile: {q: 128, kv: 128, warpgroups: 2}",
            "tile: {q: 128, kv: 128}",
            "k.yaml:3: tile: give either threads (scalar kernels) or warpgroups (WGMMA kernels), not both or neither "
            "(null takes out the one that a base gives)",
        ),
        ("  b: {major: mn}", "  b: 3", "k.yaml:13: pv.b: a mapping is needed, got the integer 3"),
        (
            "tile: {q: 128, kv: 128, warpgroups: 2}",
            "tile: 128",
            "k.yaml:3: tile: a mapping with the keys q, kv, threads, warpgroups, pack_heads, group, ctas_per_sm, "
            "transposers, kv_from is needed, got the integer 128",
        ),
        (
            "handoff: {through: registers}",
            "handoff: {through: registers}\noutputs: {lse: no}",
            "k.yaml:15: outputs.lse: true or false is needed, got the string 'no' "
            "(YAML 1.2 has no other booleans, and no quoted ones)",
        ),
        (
            "handoff: {through: registers}",
            "handoff: {through: registers}\nmask: diagonal",
            "k.yaml:15: mask.kind: the string 'diagonal' is none of none, causal, window",
        ),
        (
            "handoff: {through: registers}",
            "handoff: {through: registers}\nmask: {kind: window, left: -1, right: 0}",
            "k.yaml:15: mask.left: -1 is too small; it must be at least 0",
        ),
        (
            "tile: {q: 128, ",
            "tile: {q: 64, q: 128, ",
            "k.yaml:3: tile.q: duplicate key 'q'; it was first given in line 3",
        ),
        ("head_dim: 128", "head_dim: !!int '128'", "k.yaml:2: problem.head_dim: the tag"),
        ("{head_dim: 128}", "{head_dim: 128, 1: 2}", "k.yaml:2: problem: keys must be strings; quote it"),
        (
            "summary: both products on WGMMA",
            "summary: ''",
            "k.yaml:1: summary: one line of text is needed, got an empty",
        ),
        (
            "summary: both products on WGMMA",
            "summary: 3",
            "k.yaml:1: summary: one line of text is needed, got the integ",
        ),
        (
            "summary: both products on WGMMA",
            "summary: |\n  one\n  two",
            "k.yaml:1: summary: one line of text is needed, got 2 lines",
        ),
        ("problem: {", "problem: [", "k.yaml:2: is not valid YAML: "),
    ],
)
def test_one_mistake(specs: Specs, old: str, new: str, problem: str) -> None:
    assert old in BASE
    found = specs.problems("k", BASE.replace(old, new, 1))
    assert any(text.startswith(problem) for text in found), found
    if problem.startswith("k.yaml:4: load"):
        assert {text.split(": ")[1].split(".")[0] for text in found} == {"load"}


def test_of_an_unknown_operation_nothing_else_is_said(specs: Specs) -> None:
    """What its fields are to be is not known."""
    assert specs.problems("k", f"{BASE}operation: decode\ntiles: 7\n") == [
        "k.yaml:15: operation: the string 'decode' is no operation; there is forward and gemm and copy and combine and "
        "quantize so far"
    ]
    (variant,) = specs.load("k", f"{BASE}operation: forward\n").variants
    assert variant.spec.operation == "forward"


def test_a_missing_summary_is_reported_at_the_top(specs: Specs) -> None:
    found = specs.problems("k", BASE.replace("summary: both products on WGMMA\n", ""))
    assert found == ["k.yaml:1: summary: missing required key 'summary' (one line that says what the kernel is)"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_to_extend_is_said_and_has_all_that_is_missing(specs: Specs, operation: str) -> None:
    base = BASES[operation]
    found = specs.problems("k", f"summary: x\noperation: {operation}\n")
    assert found and all(problem.endswith(f"; write it, or begin with `extends: {base}`") for problem in found)
    variants = CHECKOUT.resolve(base)
    assert {variant.spec.operation for variant in variants} == {operation}


def test_everything_wrong_is_reported_at_once(specs: Specs) -> None:
    found = specs.problems(
        "k",
        """\
        summary: ''
        problem: {head_dim: 1.5, dtype: fp8}
        tile: {q: 128, kv: 128, warpgroups: 2}
        load: {engine: tma, stages: 2, barrier: separate, barrier: shared}
        qk: {engine: wgmma, a: {source: smem, major: k}, b: {major: k}}
        matrix: {mask: []}
        """,
    )
    assert found == [
        "k.yaml:1: summary: one line of text is needed, got an empty one",
        "k.yaml:1: pv: missing required key 'pv', a mapping such as {engine: scalar, ...}; write it, or begin with "
        "`extends: k4_2`",
        "k.yaml:1: handoff: missing required key 'handoff', a mapping such as {through: global_f32, ...}; write it, or "
        "begin with `extends: k4_2`",
        "k.yaml:2: problem.head_dim: an integer is needed, got the number 1.5",
        "k.yaml:2: problem.dtype: the string 'fp8' is none of bf16, fp16, e4m3; did you mean 'fp16'?",
        "k.yaml:4: load.barrier: duplicate key 'barrier'; it was first given in line 4",
        "k.yaml:4: load.kv_stages: missing required key 'kv_stages' "
        "(Depth of the ring; one stage holds a tile of K and a tile of V)",
        "k.yaml:4: load.stages: unknown key 'stages'; did you mean 'kv_stages' or 'q_stages'?",
        "k.yaml:6: matrix.mask: the list of values is empty; give at least one or take the axis out",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "k.yaml:1: is empty; a spec is a mapping with at least a summary"),
        ("# only a comment\n", "k.yaml:1: is empty; a spec is a mapping with at least a summary"),
        ("- summary\n", "k.yaml:1: a spec is a mapping of fields, got a list"),
        ("a: 1\n---\nb: 2\n", "k.yaml:2: is not valid YAML: expected a single document in the stream, but found"),
        ("a: *nowhere\n", "k.yaml:1: is not valid YAML: found undefined alias 'nowhere'"),
        ("a: \x01\n", "k.yaml: is not valid YAML: unacceptable character #x0001"),
        ("a: " + 500 * "[", "k.yaml: is nested too deeply to be a spec"),
    ],
)
def test_files_that_are_no_specs(specs: Specs, text: str, problem: str) -> None:
    (found,) = specs.problems("k", text)
    assert found.startswith(problem)


def test_a_file_that_is_not_text(specs: Specs) -> None:
    path = specs.root / "k.yaml"
    path.write_bytes(b"summary: \xff\n")
    with pytest.raises(SpecError, match=r"k\.yaml: is not UTF-8 text \(invalid start byte at byte 9\)"):
        load.load(path, roots=[specs.root])


def test_a_file_that_is_not_there(specs: Specs) -> None:
    with pytest.raises(SpecError, match=r"gone\.yaml: cannot be read: No such file or directory"):
        load.load(specs.root / "gone.yaml", roots=[specs.root])


def test_an_alias_to_itself(specs: Specs) -> None:
    found = specs.problems("k", "summary: x\nproblem: &p {head_dim: 64, more: *p}\n")
    assert "k.yaml:2: problem.more: an alias that contains itself; write the value out" in found


def test_yaml_1_1_is_not_brought_in_by_a_directive(specs: Specs) -> None:
    found = specs.problems("k", f"%YAML 1.1\n---\n{BASE}outputs: {{lse: no}}\n")
    assert [text.split(": ")[1] for text in found] == ["outputs.lse"]


def test_a_file_name_that_is_no_module_name(specs: Specs) -> None:
    for name in ("k-4", "4k", "class"):
        assert specs.problems(name, BASE) == [
            f"{name}.yaml: '{name}' cannot name a Python module; use letters, digits and underscores"
        ]


# extends


def test_mappings_merge_and_scalars_replace(specs: Specs) -> None:
    child = specs.load("child", "extends: base\nsummary: deeper\ntile: {kv: 64}\nload: {kv_stages: 3}\n")
    spec = child.variants[0].spec
    assert (spec.tile.q, spec.tile.kv) == (128, 64)
    assert (spec.load.kv_stages, spec.load.barrier) == (3, "separate")
    assert child.summary == "deeper"


def test_another_arm_of_a_union_replaces_the_base(specs: Specs) -> None:
    child = specs.load(
        "child",
        """\
        extends: base
        summary: scalar
        tile: {q: 64, kv: 64, threads: 256, warpgroups: null}
        load: {engine: cp_async, kv_stages: 2}
        qk: {engine: scalar}
        pv: {engine: scalar}
        handoff: {through: smem_f32}
        """,
    )
    spec = child.variants[0].spec
    assert spec.load.model_dump() == {"engine": "cp_async", "kv_stages": 2}
    assert spec.qk.model_dump() == {"engine": "scalar"}


def test_the_same_arm_merges(specs: Specs) -> None:
    specs.write("window", BASE + "mask: {kind: window, left: 512, right: 0}\n")
    child = specs.load("child", "extends: window\nsummary: x\nmask: {kind: window, left: 128}\n")
    assert child.variants[0].spec.mask.model_dump() == {"kind": "window", "left": 128, "right": 0}
    child = specs.load("child", "extends: window\nsummary: x\nmask: causal\n")
    assert child.variants[0].spec.mask.kind == "causal"


def test_a_summary_fits_the_first_line_of_a_module(specs: Specs) -> None:
    assert (
        specs.load("fits", BASE.replace("summary: both products on WGMMA", f"summary: {75 * 'x'}")).summary == 75 * "x"
    )
    found = specs.problems("long", BASE.replace("summary: both products on WGMMA", f"summary: {76 * 'x'}"))
    assert found == [
        "long.yaml:1: summary: 76 characters > 75, the room in the first line of a module; shorten it",
    ]


@pytest.mark.parametrize("summary", ["""'x\"\"\"; import os'""", "'a \\N{x}'", '"bell \\a"'])
def test_a_summary_cannot_leave_the_docstring(specs: Specs, summary: str) -> None:
    found = specs.problems("k", BASE.replace("summary: both products on WGMMA", f"summary: {summary}"))
    assert found == [
        "k.yaml:1: summary: triple quotes, backslashes and control characters cannot stand in a docstring",
    ]


def test_a_window_stays_within_the_kernels_32_bits(specs: Specs) -> None:
    text = BASE + "mask: {kind: window, left: 1073741824, right: 2147483647}\n"
    found = specs.problems("k", text)
    assert [line.partition(": ")[2] for line in found] == [
        "mask.right: 2147483647 is too large; it must be at most 1073741824"
    ]


def test_null_takes_a_section_out(specs: Specs) -> None:
    child = specs.load(
        "child",
        """\
        extends: base
        summary: naive
        tile: {q: 16, kv: 16, threads: 256, warpgroups: null}
        load: {engine: sync}
        smem: null
        qk: {engine: scalar}
        pv: {engine: scalar}
        handoff: {through: global_f32}
        """,
    )
    assert child.variants[0].spec.smem is None


def test_extends_takes_paths_and_search_directories(specs: Specs) -> None:
    assert stems(specs.load("deep/child", "extends: ../base.yaml\nsummary: x\n")) == ["child"]
    assert stems(specs.load("deep/child", "extends: base\nsummary: x\n", search=(specs.root,))) == ["child"]


def test_a_file_is_checked_once_until_it_or_a_base_changes(specs: Specs, tmp_path: Path) -> None:
    """Also where a base appears in a directory that comes before the one it was found in."""
    judged: list[Any] = []

    def loaded() -> SpecFile:
        search = [tmp_path / "first", tmp_path / "second"]
        return specfile.load(path, judge=judge, roots=[tmp_path], search=search)

    def judge(spec: Any) -> list[tuple[str, str]]:
        judged.append(spec)
        return []

    specs.write("second/far", BASE)
    path = specs.write("k", "summary: one\nextends: far\n")
    assert loaded() is loaded() and len(judged) == 1
    specs.write("k", "summary: two\nextends: far\n")
    assert (loaded().summary, len(judged)) == ("two", 2)
    specs.write("second/far", BASE.replace("head_dim: 128", "head_dim: 64"))
    assert (loaded().variants[0].spec.problem.head_dim, len(judged)) == (64, 3)
    specs.write("first/far", BASE)
    assert (loaded().variants[0].spec.problem.head_dim, len(judged)) == (128, 4)
    specs.write("k", "summary: two\nextends: nowhere\n")
    with pytest.raises(SpecError):
        loaded()


def test_a_problem_in_a_base_is_reported_there(specs: Specs) -> None:
    specs.write("wrong", BASE.replace("kv: 128", "kv: many"))
    found = specs.problems("child", "extends: wrong\nsummary: x\nproblem: {dtype: fp8}\n")
    assert found == [
        "child.yaml:3: problem.dtype: the string 'fp8' is none of bf16, fp16, e4m3; did you mean 'fp16'?",
        "wrong.yaml:3: tile.kv: an integer is needed, got the string 'many' (in child)",
    ]


def test_a_rule_on_an_inherited_field_is_reported_where_it_can_be_mended(specs: Specs) -> None:
    found = specs.problems("child", "summary: x\nextends: base\nproblem:\n  head_dim: 96\n")
    assert [text.split(": a row of")[0] for text in found] == [f"child.yaml:2: smem.{name}" for name in "qkv"]
    assert all(text.endswith("use swizzle 64B (inherited from base.yaml:5; write it in child.yaml)") for text in found)
    # What is written there is where the next problem is reported.
    found = specs.problems("child", "extends: base\nsummary: x\nproblem:\n  head_dim: 96\nsmem: {q: 128B}\n")
    assert [text.split(": ")[0] for text in found] == ["child.yaml:1", "child.yaml:1", "child.yaml:5"]


def test_a_rule_on_a_value_of_an_inherited_matrix_is_reported_where_it_can_be_mended(specs: Specs) -> None:
    specs.write("stages", BASE + "matrix: {load.kv_stages: [1, 2]}\n")
    problems = specs.problems("child", "summary: x\nextends: stages\nproblem: {head_dim: 256}\n")
    (found,) = (text for text in problems if text.startswith("child.yaml:2: load.kv_stages: shared memory:"))
    assert "(from the matrix of stages.yaml:" in found and "; write a matrix in child.yaml)" in found


def test_cycles(specs: Specs) -> None:
    specs.write("a", "extends: b\nsummary: a\n")
    specs.write("b", "summary: b\nextends: c\n")
    assert specs.problems("c", "extends: a\nsummary: c\n") == [
        "b.yaml:2: extends: cycle: c.yaml -> a.yaml -> b.yaml -> c.yaml; take one `extends` out"
    ]
    assert specs.problems("d", "extends: d\nsummary: d\n") == [
        "d.yaml:1: extends: cycle: d.yaml -> d.yaml; take one `extends` out"
    ]


def test_a_missing_base(specs: Specs) -> None:
    specs.write("other/more", BASE)
    assert specs.problems("c", "summary: c\nextends: bse\n", search=(specs.root / "other",)) == [
        "c.yaml:2: extends: there is no spec 'bse' (looked for bse.yaml, other/bse.yaml); did you mean 'base'?"
    ]
    assert specs.problems("c", "summary: c\nextends: [base]\n") == [
        "c.yaml:2: extends: the stem or the path of a spec is needed, got a list"
    ]


# matrix


def test_the_first_axis_varies_slowest(specs: Specs) -> None:
    matrix = "matrix: {problem.head_dim: [64, 128], mask: [none, causal, {kind: window, left: 512, right: 0}]}\n"
    loaded = specs.load("k4_2", BASE.replace("problem: {head_dim: 128}\n", "") + matrix)
    assert stems(loaded) == [
        "k4_2_d64",
        "k4_2_d64_causal",
        "k4_2_d64_window512_0",
        "k4_2_d128",
        "k4_2_d128_causal",
        "k4_2_d128_window512_0",
    ]
    assert [v.spec.problem.head_dim for v in loaded.variants] == [64, 64, 64, 128, 128, 128]
    assert [v.spec.mask.kind for v in loaded.variants] == ["none", "causal", "window"] * 2
    assert loaded.matrix["problem.head_dim"] == [64, 128]


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("problem.head_dim", 64, "d64"),
        ("problem.dtype", "fp16", "fp16"),
        ("mask", {"kind": "none"}, ""),
        ("mask", {"kind": "causal"}, "causal"),
        ("mask", {"kind": "window", "left": 512, "right": 0}, "window512_0"),
        ("mask.left", 512, "left512"),
        ("outputs.lse", True, ""),
        ("outputs.lse", False, "no_lse"),
        ("load.kv_stages", 2, "kv_stages2"),
        ("problem.head_dim_v", 128, "v128"),
        ("problem.head_dim_v", None, ""),
        ("smem.k", "64B", "k64B"),
        ("load.barrier", "shared", "barriershared"),
        ("handoff", {"through": "smem_16bit", "swizzle": "128B"}, "handoffsmem_16bit_128B"),
        ("load.kv_stages", "a-b c", "kv_stagesabc"),
        ("smem", None, "smemnone"),
    ],
)
def test_labels(field: str, value: Any, text: str) -> None:
    assert specfile.label(field, value) == text


def test_an_axis_obeys_the_rule_of_unions(specs: Specs) -> None:
    specs.write("window", BASE + "mask: {kind: window, left: 512, right: 0}\n")
    loaded = specs.load("w", "extends: window\nsummary: x\nmatrix: {mask: [causal, {left: 128}]}\n")
    assert stems(loaded) == ["w_causal", "w_window128_0"]
    loaded = specs.load("w", "extends: window\nsummary: x\nmatrix: {mask.left: [1, 2]}\n")
    assert [v.spec.mask.model_dump() for v in loaded.variants] == [
        {"kind": "window", "left": 1, "right": 0},
        {"kind": "window", "left": 2, "right": 0},
    ]


def test_a_matrix_is_inherited_or_replaced_as_a_whole(specs: Specs) -> None:
    specs.write("many", BASE.replace("problem: {head_dim: 128}\n", "") + "matrix: {problem.head_dim: [64, 128]}\n")
    assert stems(specs.load("c", "extends: many\nsummary: x\n")) == ["c_d64", "c_d128"]
    matrix = "problem: {head_dim: 64}\nmatrix: {load.kv_stages: [1, 2]}\n"
    assert stems(specs.load("c", f"extends: many\nsummary: x\n{matrix}")) == ["c_kv_stages1", "c_kv_stages2"]
    assert stems(specs.load("c", "extends: many\nsummary: x\nproblem: {head_dim: 64}\nmatrix: {}\n")) == ["c"]


def test_a_field_that_the_matrix_overrides_is_not_ignored_in_silence(specs: Specs) -> None:
    specs.write("masks", BASE + "matrix: {mask: [none, causal]}\n")
    found = specs.problems(
        "c", "extends: masks\nsummary: x\nmatrix: {problem.head_dim: [64]}\nproblem: {head_dim: 64}\n"
    )
    assert found == [
        "c.yaml:4: problem.head_dim: has no effect, because the matrix sets problem.head_dim in every module; "
        "take it out or change the matrix"
    ]
    specs.write("dims", BASE.replace("problem: {head_dim: 128}\n", "") + "matrix: {problem.head_dim: [64]}\n")
    found = specs.problems("c", "extends: dims\nsummary: x\nproblem: {head_dim: 128}\n")
    assert found == [
        "c.yaml:3: problem.head_dim: has no effect, because the matrix of dims.yaml:14 sets problem.head_dim in every "
        "module; take it out or write a matrix in c.yaml (`matrix: {}`: none, a single module)"
    ]
    found = specs.problems("c", "extends: base\nsummary: x\nload: {kv_stages: 3}\nmatrix: {load.engine: [sync]}\n")
    assert found[0].startswith("c.yaml:3: load.kv_stages: has no effect, because the matrix sets load.engine in every")
    # A base below the matrix is free to give the field, and a field that survives in one module has an effect.
    assert stems(specs.load("c", "extends: base\nsummary: x\nmatrix: {problem.head_dim: [64]}\n")) == ["c_d64"]


@pytest.mark.parametrize(
    ("matrix", "problem"),
    [
        ("[1]", "k.yaml:15: matrix: a mapping of field paths to lists is needed, got a list"),
        ("{load.kv_stages: 2}", "k.yaml:15: matrix.load.kv_stages: a list of values is needed, got the integer 2"),
        (
            "{lod.kv_stages: [2]}",
            "k.yaml:15: matrix.lod.kv_stages: an axis is the dotted path of a field, such as problem.head_dim; "
            "did you mean 'load'?",
        ),
        ("{summary: [x, y]}", "k.yaml:15: matrix.summary: an axis is the dotted path of a field, such as"),
        ("{load..x: [2]}", "k.yaml:15: matrix.load..x: an axis is the dotted path of a field, such as"),
        ("{load.stages: [2]}", "k.yaml:15: load.stages: unknown key 'stages'; did you mean 'kv_stages' or 'q_stages'?"),
        (
            "{tile.kv: [128, 64, 128]}",
            "k.yaml:15: matrix.tile.kv: two values have the same label 'kv128' (the other one is in line 15); "
            "take one out",
        ),
        (
            "{mask: [none, causal]}",
            "k.yaml:15: matrix: 'k' would name both the whole spec and one of its 2 modules; "
            "add an axis whose label is never empty, such as problem.head_dim",
        ),
        (
            "{tile.kv: [64, many]}",
            "k.yaml:15: tile.kv: an integer is needed, got the string 'many' (in k_kvmany)",
        ),
        (
            "{tile.kv: [16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240, 256, 272], "
            "load.kv_stages: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]}",
            "k.yaml:15: matrix: 272 combinations are more than 256; split the spec",
        ),
    ],
)
def test_mistakes_in_a_matrix(specs: Specs, matrix: str, problem: str) -> None:
    text = BASE
    for field_path, entry in (("tile.kv", "kv: 128, "), ("load.kv_stages", "kv_stages: 2, ")):
        text = text.replace(entry, "") if f"{field_path}: [" in matrix else text
    found = specs.problems("k", f"{text}matrix: {matrix}\n")
    assert any(line.startswith(problem) for line in found), found


WITH_COMPANY = BASE.replace("problem: {head_dim: 128}\n", "") + """\
matrix:
  problem.head_dim:
    - 128
    - value: 64
      with: {tile: {q: 192, warpgroups: 3}, mask: causal}
  load.kv_stages: [1, 2]
"""


def test_a_value_brings_fields_along(specs: Specs) -> None:
    """Only where the value holds; what is written is kept as written."""
    loaded = specs.load("c", WITH_COMPANY.replace("kv_stages: 2, ", ""))
    assert stems(loaded) == ["c_d128_kv_stages1", "c_d128_kv_stages2", "c_d64_kv_stages1", "c_d64_kv_stages2"]
    wide, _, narrow, _ = (variant.spec for variant in loaded.variants)
    assert (wide.tile.q, wide.tile.warpgroups, wide.tile.kv, wide.mask.kind) == (128, 2, 128, "none")
    assert (narrow.tile.q, narrow.tile.warpgroups, narrow.tile.kv, narrow.mask.kind) == (192, 3, 128, "causal")
    assert loaded.matrix["problem.head_dim"] == [
        128,
        {"value": 64, "with": {"tile": {"q": 192, "warpgroups": 3}, "mask": "causal"}},
    ]


def test_what_a_value_brings_along_is_inherited_and_obeys_the_rule_of_unions(specs: Specs) -> None:
    specs.write(
        "many", WITH_COMPANY.replace("kv_stages: 2, ", "").replace("mask: causal", "schedule: {overlap: false}")
    )
    child = "extends: many\nsummary: x\nschedule: {kind: ping_pong, overlap: true}\n"
    schedules = [variant.spec.schedule.model_dump() for variant in specs.load("c", child).variants]
    assert schedules == [{"kind": "ping_pong", "overlap": True}] * 2 + [{"kind": "ping_pong", "overlap": False}] * 2
    specs.write(
        "other", WITH_COMPANY.replace("kv_stages: 2, ", "").replace("mask: causal", "schedule: {kind: cooperative}")
    )
    schedules = [v.spec.schedule.model_dump() for v in specs.load("c", child.replace("many", "other")).variants]
    assert schedules == [{"kind": "ping_pong", "overlap": True}] * 2 + [{"kind": "cooperative"}] * 2


def test_a_mask_brings_fields_along(specs: Specs) -> None:
    matrix = "matrix: {problem.dtype: [bf16], mask: [none, {value: causal, with: {tile: {kv: 64}}}]}\n"
    loaded = specs.load("c", BASE + matrix)
    assert [(v.stem, v.spec.tile.kv) for v in loaded.variants] == [("c_bf16", 128), ("c_bf16_causal", 64)]


def test_a_field_that_every_value_brings_along_is_not_ignored_in_silence(specs: Specs) -> None:
    values = "[{value: 64, with: {tile: {kv: 64}}}, {value: 128, with: {tile: {kv: 96}}}]"
    base = BASE.replace("problem: {head_dim: 128}\n", "")
    found = specs.problems("c", f"{base}matrix: {{problem.head_dim: {values}}}\n")
    assert found == [
        "c.yaml:2: tile.kv: has no effect, because the matrix sets tile.kv in every module; "
        "take it out or change the matrix"
    ]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            "[{value: 64}]",
            "c.yaml:14: matrix.problem.head_dim: a value that brings fields along has the keys value and with, "
            "not value",
        ),
        (
            "[{value: 64, with: {tile: {q: 64}}, also: 1}]",
            "c.yaml:14: matrix.problem.head_dim: a value that brings fields along has the keys value and with, "
            "not value, with, also",
        ),
        (
            "[{value: 64, with: 3}]",
            "c.yaml:14: matrix.problem.head_dim: `with` holds fields of the spec, such as {tile: {q: 192}}, "
            "not the integer 3",
        ),
        (
            "[{value: 64, with: {matrix: {}}}]",
            "c.yaml:14: matrix.problem.head_dim: `with` holds fields of the spec, such as {tile: {q: 192}}, not matrix",
        ),
        ("[{value: 64, with: {tille: {q: 64}}}]", "c.yaml:14: tille: unknown key 'tille'; did you mean 'tile'?"),
        (
            "[{value: 64, with: {problem: {head_dim: 128}}}]",
            "c.yaml:14: matrix.problem.head_dim: `with` cannot give problem.head_dim, which the matrix sets by "
            "problem.head_dim; take it out",
        ),
        (
            "[{value: 64, with: {tile: {q: 192, warpgroups: 2}}}]",
            "c.yaml:14: tile.q: a warpgroup's WGMMA has M = 64",
        ),
    ],
)
def test_mistakes_in_what_a_value_brings_along(specs: Specs, values: str, problem: str) -> None:
    base = BASE.replace("problem: {head_dim: 128}\n", "")
    found = specs.problems("c", f"{base}matrix: {{problem.head_dim: {values}}}\n")
    assert any(line.startswith(problem) for line in found), found


def test_combinations_with_the_same_stem(specs: Specs) -> None:
    found = specs.problems("k", BASE + "matrix: {problem.dtype: [a, a_b], mask: [b_c, c]}\n")
    assert "k.yaml:15: matrix: two combinations make the stem 'k_a_b_c'; change the order of the axes" in found


def test_a_problem_of_some_variants_names_them(specs: Specs) -> None:
    found = specs.problems(
        "k", BASE.replace("problem: {head_dim: 128}\n", "") + "matrix: {problem.head_dim: [64, 96]}\n"
    )
    assert len(found) == 3
    assert all(line.endswith("use swizzle 64B (in k_d96)") for line in found)


def test_a_problem_of_all_variants_is_reported_once(specs: Specs) -> None:
    found = specs.problems("k", BASE.replace("q: 128,", "q: 64,") + "mask: causal\nmatrix: {outputs.lse: [false]}\n")
    assert found == [
        "k.yaml:3: tile.q: a warpgroup's WGMMA has M = 64 and each warpgroup owns one: 2 x 64 = 128 rows, not 64; "
        "use tile.q 128 or tile.warpgroups 1"
    ]


# Anything at all


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 300),
    st.floats(allow_nan=False),
    st.sampled_from(["tma", "sync", "wgmma", "scalar", "causal", "window", "registers", "smem_f32", "128B", "k", "no"]),
)
SPEC_KEYS = """
    summary extends matrix problem head_dim dtype mask kind left right tile q kv threads warpgroups load engine
    kv_stages q_stages barrier smem k v qk pv a b source major handoff through swizzle outputs lse tile.kv
"""
KEYS = st.sampled_from(SPEC_KEYS.split())
TREES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=5))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(KEYS, TREES, max_size=4))
def test_whatever_is_written_it_loads_or_is_a_spec_error(tmp_path: Path, changes: dict[str, Any]) -> None:
    yaml = YAML(typ="safe")
    document = {**yaml.load(BASE), **changes}
    path = tmp_path / "k.yaml"
    with path.open("w", encoding="utf-8") as stream:
        yaml.dump(document, stream)
    try:
        loaded = load.load(path, roots=[tmp_path])
    except SpecError as error:
        assert error.problems
        assert all(problem.path == Path("k.yaml") and problem.message for problem in error.problems)
    else:
        assert loaded.variants


@given(st.integers(1, 4), st.sampled_from(["bf16", "fp16"]), st.sampled_from(["none", "causal"]), st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_yaml_round_trip(tmp_path: Path, stages: int, dtype: str, mask: str, lse: bool) -> None:
    yaml = YAML(typ="safe")
    document = yaml.load(BASE)
    document["problem"] = {"head_dim": 64, "dtype": dtype}
    document["load"]["kv_stages"] = stages
    document |= {"mask": mask, "outputs": {"lse": lse}}
    path = tmp_path / "k.yaml"
    with path.open("w", encoding="utf-8") as stream:
        yaml.dump(document, stream)
    spec = load.load(path).variants[0].spec
    with path.open("w", encoding="utf-8") as stream:
        yaml.dump({"summary": "again", **spec.model_dump()}, stream)
    assert load.load(path).variants[0].spec == spec


def test_what_knows_attention_only_says_so_of_other_operations(specs: Specs) -> None:
    [attention] = specs.load("a", BASE).variants
    other: Any = replace(attention, stem="other", spec=SimpleNamespace(operation="other"))
    assert specfile.attention_only([attention], "the simulator") == specfile.attention_among([attention, other])
    with pytest.raises(UserError, match="the simulator knows attention .* only, and not other; leave them out"):
        specfile.attention_only([attention, other], "the simulator")


def test_what_knows_dense_tensors_only_says_so_of_packed_ones(specs: Specs) -> None:
    [dense] = specs.load("a", BASE).variants
    problem = dense.spec.problem.model_copy(update={"layout": "packed"})
    packed = replace(dense, stem="packed", spec=dense.spec.model_copy(update={"problem": problem}))
    assert specfile.dense_only([dense], "fa3gen trace") == [dense]
    said = r"fa3gen trace knows dense tensors only, and not packed sequences \(packed\); leave them out"
    with pytest.raises(UserError, match=said):
        specfile.dense_only([dense, packed], "fa3gen trace")
    with pytest.raises(UserError, match="leave its modules out, fa3gen verify runs them on both"):
        comparison.make_for(packed.spec, comparison.CASES[0])
