"""Rendering: the committed modules are what their specs render to, to the byte; and what one field changes."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import black
import pytest
from black.mode import TargetVersion
from rendering import CHECKOUT, ROOT, STEMS, changed, source, spec_files, variants

from fa3gen.base.errors import UserError
from fa3gen.design import rules
from fa3gen.design.workspace import Workspace
from fa3gen.generate import render
from fa3gen.generate.formatting import format_module
from fa3gen.generate.render import Rendered, is_generated, orphans, render_all, render_variant, write
from fa3gen.spec.specfile import Variant

# As pyproject.toml has it for the whole repository.
BLACK = black.Mode(line_length=120, target_versions={TargetVersion.PY311})

# Drift


@pytest.fixture(scope="session")
def rendered() -> list[Rendered]:
    """All modules: tests/test_format.py has black look at the committed ones."""
    return render_all(list(variants().values()), CHECKOUT, on_disk_is_formatted=True)


def test_no_drift(rendered: list[Rendered]) -> None:
    drift = [item.diff(ROOT) for item in rendered if item.change != "unchanged"]
    assert not drift, f"run `fa3gen render`\n{''.join(drift)}"


def test_bijection() -> None:
    assert sorted(variants()) == STEMS
    assert orphans(spec_files(), CHECKOUT) == []
    assert [stem for stem in STEMS if not is_generated(CHECKOUT.module_path(stem))] == []


def test_the_ladder_is_complete() -> None:
    rungs = ["k1", "k2", "k2_cp_async", "k3_1", "k3_2", "k3_3", "k4_1", "k4_smem", "k4_2", "k5", "k6"]
    needed = {f"{rung}_{dim}{mask}" for rung in rungs for dim in ("d64", "d128") for mask in ("", "_causal")}
    assert needed - set(STEMS) == set()


# Determinism

RENDER_SOME = """
import gc, hashlib, json, sys
from pathlib import Path
from fa3gen.generate.render import render_variant
from fa3gen.design.workspace import Workspace

gc.disable()  # what black leaves in memory is looked through again and again
workspace = Workspace.find(Path(sys.argv[1]))
chosen = [spec_file.variants[-1] for spec_file in workspace.load_all()][int(sys.argv[2]) :: 4]
committed = {v.stem: workspace.module_path(v.stem).read_text(encoding="utf-8") for v in chosen}
texts = {v.stem: render_variant(v, workspace, formatted=[committed[v.stem]]) for v in chosen}
print(json.dumps({stem: hashlib.sha256(text.encode()).hexdigest() for stem, text in texts.items()}))
"""


@pytest.mark.parametrize(
    ("first", "surroundings"),
    [
        (0, {"PYTHONHASHSEED": "0", "TZ": "Pacific/Kiritimati", "LC_ALL": "C", "PYTHONUTF8": "0"}),
        (1, {"PYTHONHASHSEED": "4242", "TZ": "America/Los_Angeles", "LC_ALL": "tr_TR.UTF-8", "COLUMNS": "40"}),
    ],
)
def test_rendering_does_not_depend_on_the_process(first: int, surroundings: dict[str, str], tmp_path: Path) -> None:
    """Neither hash seed nor working directory, locale or time zone; one module of every fourth spec in each process.

    What black does depends on none of these, and takes most of the time: it is given what the templates have not made
    ready.
    """
    process = subprocess.run(
        [sys.executable, "-c", RENDER_SOME, str(ROOT), str(first)],
        cwd=[ROOT, tmp_path][first],
        env={**os.environ, **surroundings, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    digests = json.loads(process.stdout)
    assert len(digests) == len(spec_files()[first::4])
    assert digests == {stem: hashlib.sha256(source(stem).encode()).hexdigest() for stem in digests}


def test_rendering_again_gives_the_same(rendered: list[Rendered]) -> None:
    for item in rendered[::7]:
        assert render_variant(item.variant, CHECKOUT, formatted=[source(item.variant.stem)]) == item.text


# Format


@pytest.mark.parametrize(
    "text",
    [
        "x=1\n",
        '"""Title."""\nimport  math\n\n\n\n\ndef f( x ):\n  return math.pi*x\n',
        "x=1\n\n\n\n# ---\n# A\n# ---\n\n\n\n@f\ndef g(): return 1\n",
        "if x:\n    y=1\n\n\n\n    z=2\n",
        # Functions, whose statements are formatted by themselves where none matters to another.
        "@f\ndef g(a,b): # c\n    'text'\n    # above\n    x=1; \n\n    # above\n\n\n    return(x)\n",
        "@f\n\ndef g(a,\n  b):\n    if a: x=1\n    else:\n        x=2\n        # below\n    # above\n    return x\n",
        "def g():\n    if a:\n        x=1\n\n        # below\n\n    return x\n    # last\n",
        "def g():\n\n    # first\n    x = {'a':1,}\n    y = '''\n\n    z=1\n'''\n    z=1\n",
        "def g():\n    # colon:\n    x=1\n    return x\n",
        "def g():\n    x=1\n    'no docstring  '\n    return x\n",
        "def g():\n    import math\n    x=1\n    def h(): return x\n    return h\n",
        "def g():\n    x=1\n    class H: pass\n    return H\n",
        "def g():\n    x=1 # fmt: skip\n    y=1\n",
        "def g():\n  x=1\n  return (yield)\n\n\ndef h(): ...\n\n\ndef i():\n    ...\n\n\ndef j(): return 1\n",
        "async def g():\n    x=1\n    await(x)\n\n\ndef h():\n    'text'\nx=1\n",
    ],
)
def test_format_module_equals_black_on_rough_text(text: str) -> None:
    assert format_module(text) == black.format_str(text, mode=BLACK)


# One knob at a time

KNOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "mask_none_to_causal": ("k4_2_d128", {"mask": {"kind": "causal"}}),
    "mask_causal_to_window": ("k4_2_d128_causal", {"mask": {"kind": "window", "left": 512, "right": 0}}),
    "mask_none_to_causal_scalar": ("k2_d64", {"mask": {"kind": "causal"}}),
    "mask_none_to_causal_naive": ("k1_d64", {"mask": {"kind": "causal"}}),
    "dtype_bf16_to_fp16": ("k4_2_d128", {"problem": {"dtype": "fp16"}}),
    "head_dim_128_to_64": ("k4_2_d128", {"problem": {"head_dim": 64}}),
    "kv_stages_2_to_3": ("k3_2_d64", {"load": {"kv_stages": 3}}),
    "barrier_shared_to_separate": ("k4_smem_d128", {"load": {"barrier": "separate"}}),
    "handoff_smem_to_registers": (
        "k4_smem_d128",
        {"pv": {"a": {"source": "registers", "major": "k"}}, "handoff": {"through": "registers"}},
    ),
    "pack_heads_1_to_4": ("k5_d128_causal", {"tile": {"pack_heads": 4}}),
    "head_dim_v_128_to_64": ("k6_d128", {"problem": {"head_dim_v": 64}}),
    "mask_causal_to_window_overlapped": ("k5_d128_causal", {"mask": {"kind": "window", "left": 512, "right": 0}}),
    "window_compiled_in_to_given": ("fwd_d128_window", {"mask": {"kind": "window", "left": None, "right": None}}),
    "lse_true_to_false_specialized": ("k5_d64", {"outputs": {"lse": False}}),
    "swizzle_k_128B_to_64B": ("k4_2_d128", {"smem": {"k": "64B"}}),
    "swizzle_v_128B_to_none": ("k4_2_d128", {"smem": {"v": "none"}}),
    "lse_true_to_false": ("k4_2_d128_causal", {"outputs": {"lse": False}}),
    "load_sync_to_cp_async": ("k2_d64", {"load": {"engine": "cp_async", "kv_stages": 2}}),
    "load_cp_async_to_tma": ("k2_cp_async_d64", {"load": {"engine": "tma", "kv_stages": 2, "barrier": "shared"}}),
    "tile_kv_128_to_64": ("k4_2_d128", {"tile": {"kv": 64}}),
    "threads_128_to_256": ("k2_cp_async_d64", {"tile": {"threads": 256}}),
    "schedule_cooperative_to_warp_specialized": (
        "k4_2_d128",
        {"schedule": {"kind": "warp_specialized", "overlap": False}},
    ),
    "schedule_overlap_false_to_true": ("k5_d64", {"schedule": {"kind": "warp_specialized", "overlap": True}}),
    "schedule_warp_specialized_to_ping_pong": ("k5_d128", {"schedule": {"kind": "ping_pong", "overlap": True}}),
    "consumers_3_to_2": ("k6_d64", {"tile": {"q": 128, "warpgroups": 2}}),
    "warpgroups_2_to_1": ("k4_2_d128", {"tile": {"q": 64, "warpgroups": 1}}),
    # What goes with a mask, and with more than one tile for a CTA, changes with it.
    "scheduler_single_tile_to_static": ("k6_d128", {"scheduler": "static", "outputs": {"o": "own_buffer"}}),
    "scheduler_static_to_dynamic": ("fwd_d128_static", {"scheduler": "dynamic", "mask": {"kind": "causal"}}),
    "order_by_sequence_to_by_head": ("fwd_packed_pack4_d128_causal", {"order": "by_head"}),
    "order_woven_to_by_sequence": ("fwd_packed_woven_d128_causal", {"order": "by_sequence"}),
    "group_multiple_to_any": ("fwd_packed_mixed_d128_causal", {"tile": {"group": "any"}, "outputs": {"o": "direct"}}),
    "scheduler_static_to_stream_k": ("fwd_d128_static", {"scheduler": "stream_k"}),
    "exp_before_wait_null_to_16_single_tile": ("k5_d128", {"softmax": {"exp_before_wait": 16}}),
    "mask_end_always_to_when_cut": ("k6_d128", {"softmax": {"mask_end": "when_cut"}}),
    "exp_before_wait_null_to_12": ("fwd_d128_short", {"softmax": {"exp_before_wait": 12}}),
    "q_stages_2_to_1": ("fwd_d128_causal", {"load": {"q_stages": 1}}),
    "o_own_buffer_to_direct": ("fwd_d128", {"outputs": {"o": "direct"}}),
    "o_dtype_bf16_to_fp32": ("fwd_d256", {"o": {"dtype": "fp32"}}),
    "rescale_above_null_to_8": ("fwd_d128", {"softmax": {"rescale_above": 8}}),
    "scales_head_to_block": ("k7_two_levels_d64_causal", {"problem": {"scales": "block"}}),
    "v_keys_in_order_to_permuted": ("k7_v_k_d64", {"problem": {"v_keys": "permuted"}}),
    "sink_false_to_true": ("fwd_d64_causal", {"softmax": {"sink": True}}),
    "softcap_false_to_true": ("fwd_d256_causal", {"softmax": {"softcap": True}}),
    "head_dim_v_192_to_128_persistent": ("fwd_d192", {"problem": {"head_dim_v": 128}}),
    "schedule_ping_pong_to_warp_specialized_persistent": (
        "fwd_d64",
        {"schedule": {"kind": "warp_specialized", "overlap": True}},
    ),
}
UPDATE = "FA3GEN_UPDATE_GOLDEN"
MENDING_COMMAND = f"{UPDATE}=1 python -m pytest tests/test_render.py -k golden"


@cache
def knob_diff(knob: str) -> str:
    """What a knob changes in the source: a unified diff without context, file names and line numbers."""
    stem, parts = KNOBS[knob]
    variant = changed(stem, **parts)
    assert rules.check(variant.spec) == []
    before, after = (render_variant(each, CHECKOUT).splitlines() for each in (variants()[stem], variant))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    return "\n".join("@@" if line.startswith("@@ ") else line for line in lines) + "\n"


@pytest.mark.parametrize("knob", KNOBS)
def test_golden_diff(knob: str) -> None:
    """One field of a spec changes these lines of the module and no others.

    After an intended change: `FA3GEN_UPDATE_GOLDEN=1 python -m pytest tests/test_render.py -k golden`, then read the
    diff of tests/golden/ like any other code.
    """
    path = ROOT / "tests" / "golden" / f"{knob}.diff"
    if os.environ.get(UPDATE):
        path.write_text(knob_diff(knob), encoding="utf-8")
    golden = path.read_text(encoding="utf-8") if path.is_file() else ""
    change = "\n".join(difflib.ndiff(golden.splitlines(), knob_diff(knob).splitlines()))
    assert knob_diff(knob) == golden, f"{path.name}: {change}\nwhen this is intended: {MENDING_COMMAND}"


def test_golden_files_have_knobs() -> None:
    assert sorted(path.stem for path in (ROOT / "tests" / "golden").iterdir()) == sorted(KNOBS)


@pytest.mark.parametrize(
    ("stem", "parts", "other"),
    [
        ("k4_2_d128", {"mask": {"kind": "causal"}}, "k4_2_d128_causal"),
        ("k4_2_d128", {"problem": {"head_dim": 64}}, "k4_2_d64"),
        ("k3_1_d64", {"load": {"kv_stages": 5}}, "k3_3_d64"),
        (
            "k5_d64",
            {"schedule": {"kind": "ping_pong", "overlap": True}, "softmax": {"exp_before_wait": 14}},
            "k6_d64",
        ),
        (
            "fwd_d64_causal",
            {"tile": {"q": 128, "warpgroups": 2}, "softmax": {"exp_before_wait": None}},
            "fwd_d64_causal_short",
        ),
        (
            "fwd_d96",
            {
                "scheduler": "dynamic",
                "mask": {"kind": "causal"},
                "softmax": {"exp_before_wait": 12, "mask_end": "always"},
            },
            "fwd_d96_causal",
        ),
        ("fwd_d64_causal", {"softmax": {"sink": True}}, "fwd_d64_sink_causal"),
        (
            "fwd_d128_causal",
            {"schedule": {"kind": "ping_pong", "overlap": True}, "softmax": {"softcap": True, "row_max": "first"}},
            "fwd_d128_softcap_causal",
        ),
    ],
)
def test_a_knob_gives_the_neighbour(stem: str, parts: dict[str, Any], other: str) -> None:
    """A turned knob renders the module that the ladder has there; only what the spec file says of itself differs."""
    neighbour, variant = variants()[other], changed(stem, **parts)
    assert variant.spec == neighbour.spec
    assert render_variant(Variant(other, variant.spec, neighbour.source, neighbour.summary), CHECKOUT) == source(other)


# Templates that go wrong


@pytest.fixture
def broken(tmp_path: Path) -> Workspace:
    """A workspace with templates of its own to break."""
    shutil.copytree(ROOT / "templates", tmp_path / "templates")
    return Workspace(tmp_path, ROOT)


def break_template(workspace: Workspace, name: str, line: int, text: str) -> Path:
    path = workspace.templates_dir / name
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[line - 1 : line - 1] = [text]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_unknown_plan_field_is_an_error(broken: Workspace) -> None:
    break_template(broken, "sections/imports.py.jinja", 3, "x = {{ plan.nothing }}")
    with pytest.raises(UserError, match=r"^k1_d64: .*has no attribute 'nothing'"):
        render_variant(variants()["k1_d64"], broken)


def test_template_syntax_error_names_template_and_line(broken: Workspace) -> None:
    path = break_template(broken, "sections/imports.py.jinja", 3, "#% iff plan.lse")
    with pytest.raises(UserError) as caught:
        render_variant(variants()["k1_d64"], broken)
    assert str(caught.value).startswith(f"k1_d64: {path}:3: ")


def test_missing_section_is_an_error(broken: Workspace) -> None:
    (broken.templates_dir / "sections" / "imports.py.jinja").unlink()
    with pytest.raises(UserError, match=r"^k1_d64: .*imports\.py\.jinja"):
        render_variant(variants()["k1_d64"], broken)


def test_templates_that_make_no_python_are_an_error(broken: Workspace) -> None:
    break_template(broken, "sections/imports.py.jinja", 3, "import (")
    with pytest.raises(UserError, match="^k1_d64: the templates do not make valid Python: "):
        render_variant(variants()["k1_d64"], broken)


def test_line_statements_keep_blank_lines_and_line_numbers() -> None:
    before = "a\n#% if plan.lse\n\nb\n  #%endif  \n\nc % d #% e\n"
    after = render.LineStatements(render._environment(ROOT / "templates")).preprocess(before, None)
    assert after == "a\n{% if plan.lse %}\n\nb\n{% endif %}\n\nc % d #% e\n"


# Files


def test_change_and_diff(tmp_path: Path) -> None:
    path = tmp_path / "generated" / "x.py"
    variant = variants()["k1_d64"]
    assert Rendered(variant, path, "a\n", None).change == "new"
    assert Rendered(variant, path, "a\n", "a\n").change == "unchanged"
    assert Rendered(variant, path, "a\n", "a\n").diff(tmp_path) == ""
    drifted = Rendered(variant, path, "a\nc\n", "a\nb\n")
    assert drifted.change == "changed"
    assert drifted.diff(tmp_path) == (
        "--- generated/x.py (on disk)\n+++ generated/x.py (rendered)\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n"
    )
    assert (
        Rendered(variant, path, "a\n", None).diff(tmp_path).startswith("--- /dev/null\n+++ generated/x.py (rendered)")
    )


def test_write_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "generated" / "x.py"
    item = Rendered(variants()["k1_d64"], path, "new = 'ä'\n", None)
    write(item)
    assert path.read_bytes() == "new = 'ä'\n".encode()
    assert path.stat().st_mode & 0o777 == 0o644

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write(Rendered(item.variant, path, "newer\n", item.text))
    assert path.read_text(encoding="utf-8") == item.text
    assert [entry.name for entry in path.parent.iterdir()] == ["x.py"]


def test_orphans_are_marked_files_only(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, ROOT)
    assert orphans([], workspace) == []  # there is no generated/ yet
    workspace.generated_dir.mkdir()
    (workspace.generated_dir / "mine.py").write_text("x = 1\n")
    left_over = workspace.generated_dir / "k9_d64.py"
    left_over.write_text(source("k1_d64"))
    assert orphans(spec_files(), workspace) == [left_over]
