"""docs/ladder.md: what it shows is what specs, modules and records say today."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import make_exercises
import pytest
from rendering import CHECKOUT, ROOT, plans, source, tree, variants

from fa3gen import cli
from fa3gen.cli import COMMANDS
from fa3gen.compile import compiler
from fa3gen.compile.cache import cached_compile
from fa3gen.cpu.kernel import CpuKernel
from fa3gen.design import ceiling
from fa3gen.design.ladder import FIRST_RUNGS, RUNGS
from fa3gen.design.workspace import Workspace
from fa3gen.hardware.chips import H200
from fa3gen.inspect import ladder_page
from fa3gen.inspect.difference.comparing import leaves
from fa3gen.inspect.ladder_page import BLOCK, EXERCISE, NUMBER, LadderError, lines_of
from fa3gen.inspect.report import copied, swizzles
from fa3gen.records import stage_sweep
from fa3gen.records.evidence import verified

DOCUMENT = ROOT / ladder_page.DOCUMENT
TEXT = DOCUMENT.read_text(encoding="utf-8")
BLOCKS = list(BLOCK.finditer(TEXT))
PROSE = " ".join(BLOCK.sub("", TEXT).split())


@pytest.fixture(scope="module", autouse=True)
def compiler_at_hand() -> Iterator[None]:
    """Exercises compile a module each."""
    with compiler.preloaded():
        yield


# Specs, modules and records behind the other blocks: test_evidence.py compares every page that `fa3gen refresh` writes.
@pytest.mark.parametrize("found", [pytest.param(found, id=found[3]) for found in BLOCKS if found[2] == EXERCISE])
def test_the_model_answers_an_exercise_as_shown(found: re.Match[str]) -> None:
    """The edited kernel runs, and what the model says of it is compared."""
    shown = found[4]
    assert make_exercises.exercise(found[3], TEXT[: found.start()]) == shown, f"run `{make_exercises.COMMAND}`"


def test_every_picture_is_shown() -> None:
    """One that no block draws any more would stay for ever."""
    drawn = {path.name for path in (ROOT / ladder_page.PICTURES).iterdir()}
    assert drawn == set(re.findall(r"\]\(ladder/([^)]+)\)", TEXT))


def test_every_mark_is_one_that_the_script_knows() -> None:
    """One that is misspelt would leave old text in place for ever."""
    assert "<!--" not in NUMBER.sub("", BLOCK.sub("", TEXT))


def test_every_rung_is_there_in_order() -> None:
    steps = [found[3].split() for found in BLOCKS if found[2] == "measured"]
    assert [words[-1] for words in steps] == list(RUNGS)
    assert [words[0] for words in steps[1:] if words[0] not in RUNGS[: RUNGS.index(words[-1])]] == []
    compared = [found[3].partition(":")[0].split() for found in BLOCKS if found[2] == "diff"]
    beside = (
        "k7_d128",
        "k8_d128",
        "fwd_packed_d128_causal",
        "fwd_paged_d128_causal",
        "fwd_decode_d128",
    )  # behind all rungs
    assert ["c2", "g2", "g3", *(f"{rung}_d128" for rung in RUNGS[1:]), *beside] == [new for _, new in compared]
    first = [found[3].split()[-1] for found in BLOCKS if found[2] == "beside_torch"]
    assert list(dict.fromkeys(stem.partition("_")[0] for stem in first)) == list(FIRST_RUNGS)


def test_every_rung_has_an_exercise_and_is_to_be_looked_at() -> None:
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    rungs = [section for section in sections if "<!-- measured " in section]
    assert len(rungs) == len(RUNGS)
    for rung, section in zip(RUNGS, rungs, strict=True):
        assert {f"`fa3gen {command} {rung}_d128`" for command in ("report", "trace")} <= set(
            re.findall(r"`[^`\n]+`", section)
        )
        exercises = [found[3].split()[1] for found in BLOCK.finditer(section) if found[2] == "exercise"]
        assert exercises and set(exercises) == {f"{rung}_d64"}
        assert section.count("```diff\n") == len(exercises)


def test_the_exercises_begin_where_the_text_says(tmp_path: Path) -> None:
    """The shell lines leave copies of all modules that the exercises are about, in a workspace."""
    [script] = re.findall(r"^```bash\n(mkdir .*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    subprocess.run(["bash", "-euc", f"{script}pwd"], cwd=ROOT, env={**os.environ, "HOME": str(tmp_path)}, check=True)
    assert Workspace.find(tmp_path / "try" / "generated").root == tmp_path / "try"
    for stem in {found[3].split()[1] for found in BLOCKS if found[2] == "exercise"}:
        assert (tmp_path / "try" / "generated" / f"{stem}.py").is_file()


def test_links_and_commands() -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", TEXT):
        assert (DOCUMENT.parent / target).is_file(), target
    assert set(re.findall(r"fa3gen (\w+) \w", TEXT)) <= set(COMMANDS)
    for name in re.findall(r"`(k\d\w*)`", PROSE):
        assert name in RUNGS or f"{name}_d128" in variants(), name


# What the text says


def ratios(old: str, new: str) -> list[float]:
    """Of the speeds of those bf16 modules of two rungs that are verified today."""
    found = []
    for variant in ("d64", "d64_causal", "d128", "d128_causal"):
        before, after = (verified(CHECKOUT, f"{rung}_{variant}") for rung in (old, new))
        if before and after:
            found += [after.tflops[length] / before.tflops[length] for length in before.tflops]
    return found


def loop(stem: str) -> str:
    first, last = lines_of(tree(stem), "loop of attention_kernel")
    return "\n".join(source(stem).splitlines()[first - 1 : last])


def code(stem: str) -> list[str]:
    """The module's code, without comments and its docstring."""
    return ast.unparse(ast.Module(tree(stem).body[1:], [])).splitlines()


def smem_ctas(stem: str) -> int:
    return dict(ceiling.occupancy(variants()[stem].spec).allowed)["shared memory"]


def predicted(stem: str) -> dict[int, list[str]]:
    """The table of stages: cells after the number of stages."""
    [text] = [found[4] for found in BLOCKS if (found[2], found[3]) == ("stages", stem)]
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {int(row[0]): row[1:] for row in rows if row[0].isdigit()}


SCALAR = ("k2", "k2_cp_async", "k3_1", "k3_2", "k3_3")


def bound(stem: str) -> tuple[str, float]:
    """The unit that bounds a scalar module, and which part of its instructions are multiply-adds, 32 to a warp."""
    steady = ceiling.steady(variants()[stem].spec, H200)
    amounts = {bound.unit: bound.amount for bound in steady.bounds}
    return steady.binding.unit, amounts["FP32 multiply-adds"] / 32 / amounts["instruction issue"]


# What a rung changes: compared with which, the fields that its row in the table is about, and those of its last cell.
WGMMA_FIELDS = {"engine", "a.source", "a.major", "b.source", "b.major"}
QK, PV = ({f"{product}.{field}" for field in WGMMA_FIELDS} for product in ("qk", "pv"))
UNIT = {"tile.threads", "tile.warpgroups"}
CHANGES: dict[str, tuple[str, set[str], dict[str, set[str]]]] = {
    "k2": (
        "k1",
        {"handoff.through", "tile.threads"},
        dict.fromkeys(("d64", "d128"), {"tile.q", "tile.kv", "smem.q", "smem.k", "smem.v"}),
    ),
    "k2_cp_async": ("k2", {"load.engine"}, dict.fromkeys(("d64", "d128"), {"load.kv_stages"})),
    "k3_1": (
        "k2_cp_async",
        {"load.engine", "load.q_stages", "load.barrier"},
        dict.fromkeys(("d64", "d128"), {"load.kv_stages"}),
    ),
    "k3_2": ("k3_1", {"load.kv_stages"}, dict.fromkeys(("d64", "d128"), set())),
    "k3_3": ("k3_2", {"load.kv_stages"}, dict.fromkeys(("d64", "d128"), set())),
    "k4_1": ("k3_2", QK | UNIT, dict.fromkeys(("d64", "d128"), {"load.barrier"})),
    "k4_smem": (
        "k4_1",
        PV | {"handoff.through", "handoff.swizzle"},
        dict.fromkeys(("d64", "d128"), {"tile.q", "tile.warpgroups", "load.barrier"}),
    ),
    "k4_2": (
        "k4_smem",
        {"pv.a.source", "handoff.through", "handoff.swizzle"},
        dict.fromkeys(("d64", "d128"), {"load.barrier"}),
    ),
    "k5": (
        "k4_2",
        {"schedule.kind"},
        {"d64": {"schedule.overlap", "tile.q", "tile.kv", "tile.warpgroups"}, "d128": {"schedule.overlap", "tile.kv"}},
    ),
    "k6": (
        "k5",
        {"schedule.kind"},
        {"d64": {"schedule.overlap", "softmax.exp_before_wait"}, "d128": {"softmax.exp_before_wait"}},
    ),
}


@pytest.mark.parametrize("rung", RUNGS[1:])
def test_what_each_rung_changes(rung: str) -> None:
    """A rung that comes to change something else needs another row."""
    before, subject, beside = CHANGES[rung]
    [row] = re.findall(rf"^\| `{rung}` \| `(\w+)` \| .+ \| (.+) \|$", TEXT, flags=re.MULTILINE)
    assert row[0] == before and (row[1] == "nothing") == (not any(beside.values()))
    for d in ("d64", "d128"):
        old, new = (leaves(variants()[f"{name}_{d}"].spec) for name in (before, rung))
        changed = {path for path in {**old, **new} if old.get(path) != new.get(path)}
        assert changed == subject | beside[d], d


def facts() -> dict[str, bool]:
    """What the text says in words of its own, each with whether it is so."""
    plan = plans()
    k2, k3_1, k5, k6 = (plan[f"{rung}_d128"] for rung in ("k2", "k3_1", "k5", "k6"))
    schedules = {rung: plan[f"{rung}_d64"].schedule for rung in ("k5", "k6")}
    constant = [(old, new) for old, new in zip(code("k3_1_d128"), code("k3_2_d128"), strict=True) if old != new]
    spec_of_k5, spec_of_k6 = leaves(k5.spec), leaves(k6.spec)
    ring, short = predicted("k3_3_d128"), predicted("k4_2_d128")
    waits = {stages: int(cells[-1].rstrip("%")) for stages, cells in short.items()}
    return {
        "1 GiB where both are 16,384": 16384**2 * 4 == 2**30,
        "keeps 64 query rows, computes their scores with 64 keys": (k2.tile.m, k2.tile.n) == (64, 64),
        "a step needs four barriers of the whole CTA": loop("k2_d128").count("sync_threads()") == 4,
        "With two stages, the next tile": plan["k2_cp_async_d128"].load.kv_stages == 2,
        "The gain is small": all(ratio < 1.3 for ratio in ratios("k2", "k2_cp_async")),
        "about loads before K4 changes that": all(ratio < 1.3 for ratio in ratios("k2", "k3_2")),
        "No barrier of the whole CTA is left in the loop": "sync_threads" not in loop("k3_1_d128"),
        "Ten TMA loads": k3_1.expectation.tma_loads == 10,
        "a row of 256 bytes takes two": 2 * k3_1.problem.head_dim == 256 == 2 * 128,
        "the same but for one constant": constant == [("KV_STAGES = 1", "KV_STAGES = 2")],
        "at head dim 128 a second CTA no longer fits": (smem_ctas("k3_2_d128"), smem_ctas("k3_3_d128")) == (2, 1),
        "bound by instruction issue": {bound(f"{rung}_{d}")[0] for rung in SCALAR for d in ("d64", "d128")}
        == {"instruction issue"},
        "three fifths of the instructions": all(0.57 < bound(f"{rung}_d128")[1] < 0.63 for rung in SCALAR),
        "one CTA fills little more than half of the issue slots": 50 < int(ring[5][3].rstrip("%")) < 60,
        "two more than three quarters": ring[2][0] == "2" and int(ring[2][3].rstrip("%")) > 75,
        "One CTA of this kernel is four warps": plan["k3_3_d128"].tile.threads == 4 * 32,
        "One stage leaves the warps waiting for K and V a seventh of the time": 13 <= waits[1] <= 16,
        "two hide the loads": waits[2] < 5,
        "From three on there is no room for the second CTA": [short[n][0] for n in (1, 2, 3, 4)]
        == ["2", "2", "1", "1"],
        "still allows two CTAs, where it allowed three": (smem_ctas("k3_3_d64"), smem_ctas("k3_2_d64")) == (2, 3),
        "about a factor of two": all(1.7 < ratio < 2.4 for ratio in ratios("k3_2", "k4_1")),
        "a barrier of 128 threads": "number_of_threads=WARPGROUP_THREADS" in source("k4_smem_d128"),
        "Two warpgroups share each tile of K and V": plan["k4_smem_d128"].tile.warpgroups == 2,
        "what is new at head dim 128: the *overlap*": k5.schedule.overlap and not schedules["k5"].overlap,
        "Two warps of an extra warpgroup": "two warps load" in "\n".join(k5.header.decisions),
        "`while work.valid:`": all(
            source(stem).count("    while work.valid:\n") == 3 for stem in ("k5_d128", "k6_d128", "fwd_d128")
        ),
        "of one stage here": (k5.load.q_stages, k6.load.q_stages) == (1, 1),
        "At head dim 64 three consumers of 64 rows": plan["k5_d64"].tile.warpgroups == 3,
        "Two fields of the spec differ": [path for path in spec_of_k6 if spec_of_k5.get(path) != spec_of_k6[path]]
        == ["schedule.kind", "softmax.exp_before_wait"],
        "after twelve of the exponentials of a thread's first row": k6.softmax.exp_before_wait == 12,
        "At head dim 64 K6 overlaps as well": schedules["k6"].overlap,
        "takes turns without the overlap": not plan["k6_sequential_d128"].schedule.overlap,
    }


def swept() -> dict[str, bool]:
    """What the text says of the stage sweep."""
    sweep = stage_sweep.read(CHECKOUT)
    assert sweep is not None
    rows = {(row.stem, row.ctas): row for row in sweep.measured}
    own = {row.stem: row for row in sweep.measured if not row.held}

    def speed(stem: str, stages: int, ctas: int | None = None) -> float:
        name = f"{stem}_kv_stages{stages}"
        return (own[name] if ctas is None else rows[name, ctas]).tflops["4096"]

    def ctas(stem: str, *stages: int) -> list[int]:
        return [own[f"{stem}_kv_stages{count}"].ctas for count in stages]

    k3, small = "k3_stages_d64_threads128", "k4_2_small_d64"
    kernels = {name.rpartition("_kv_stages")[0] for name in own}
    gains = [round(100 * (speed(k3, 2, count) / speed(k3, 1, count) - 1)) for count in (1, 2, 3)]
    two, three, five = (speed(small, count) for count in (2, 3, 5))
    one_stage, two_stages = (own[f"k4_2_stages_d128_kv_stages{count}"].registers for count in (1, 2))
    return {
        "No kernel is more than 2 % faster with three or five": all(
            speed(kernel, stages) < 1.02 * speed(kernel, 2) for kernel in kernels for stages in (3, 5)
        ),
        "loses a fifth from two stages to three": 0.77
        < speed("k4_2_stages_d128", 3) / speed("k4_2_stages_d128", 2)
        < 0.83,
        "an eighth and then a sixth as five CTAs become three and two": ctas(small, 2, 3, 5) == [5, 3, 2]
        and (0.85 < three / two < 0.89, 0.81 < five / three < 0.86) == (True, True),
        "K4.1 is fastest with one stage": all(
            speed(f"k4_1_small_d{d}", 1) > max(speed(f"k4_1_small_d{d}", n) for n in (2, 3, 5)) for d in (64, 128)
        ),
        "138 instead of 126, and only one CTA fits": (one_stage, two_stages) == (138, 126)
        and ctas("k4_2_stages_d128", 1, 2) == [1, 2],
        "It has half the speed": 0.48 < speed("k4_2_stages_d128", 1) / speed("k4_2_stages_d128", 2) < 0.56,
        "is faster than K4.2 with two of twice the size": two > 1.02 * speed("k4_2_stages_d64", 2)
        and ctas("k4_2_stages_d64", 2) == [2],
        "At head dim 128 two fit, and it is not": ctas("k4_2_small_d128", 2) == [2]
        and speed("k4_2_small_d128", 2) < speed("k4_2_stages_d128", 2),
        "reaches two thirds of the speed of three": 0.64 < speed(k3, 2, 1) / speed(k3, 2, 3) < 0.7,
        "gains 10 % with one CTA on an SM, 9 % with two and 8 % with three": gains == [10, 9, 8],
    }


def test_what_the_text_says_is_so() -> None:
    said = facts() | swept()
    assert [words for words in said if words not in PROSE] == []
    assert [words for words, so in said.items() if not so] == []


# How it is written


def filled(document: str) -> str:
    return ladder_page.filled(document, CHECKOUT)


def test_old_text_is_written_anew() -> None:
    old = "Text\n\n<!-- source k2_d128: load_tile -->\nold\n<!-- end -->\n"
    lines = filled(old).splitlines()
    assert lines[:3] == ["Text", "", "<!-- source k2_d128: load_tile -->"] and lines[-1] == "<!-- end -->"
    assert re.fullmatch(r"\[generated/k2_d128.py, lines (\d+) to \d+\]\(../generated/k2_d128.py#L\1-L\d+\):", lines[3])
    assert lines[5:7] == [
        "```python",
        "def load_tile(copy: cute.TiledCopy, gX: cute.Tensor, sX: cute.Tensor, rows: cutlass.Int32):",
    ]


def test_parts_of_a_diff() -> None:
    lines = filled("<!-- diff k3_1_d64 k3_2_d64: spec -->\n<!-- end -->\n").splitlines()
    assert lines[2:5] == ["$ fa3gen diff k3_1_d64 k3_2_d64 --no-source", "k3_1_d64 -> k3_2_d64", ""]
    assert (
        lines[5] == "spec"
        and "  load.kv_stages  1 -> 2" in lines
        and lines[-4:] == ["", "[...]", "```", "<!-- end -->"]
    )


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ("source k2_d128: load_tiles", "there is no function load_tiles"),
        ("diff k3_1_d64 k3_2_d64: specs", "no part specs; there are "),
        ("diff k3_1_d64 k9: spec", "there is no spec or module 'k9'"),
        ("picture k9", "there is no module k9"),
        ("picture k5_d128: evenly", "oldest first, or `even`, not 'evenly'"),
        ("swizzle k2_d128: sX", "no tile sX; there are "),
        ("fragment k2_d128: operand", "no fragment operand; there are "),
        ("pictures k2_d128", "KeyError: 'pictures'"),
    ],
)
def test_marks_that_make_no_sense(mark: str, words: str) -> None:
    with pytest.raises(LadderError) as caught:
        filled(f"<!-- {mark} -->\n<!-- end -->\n")
    assert f"<!-- {mark} -->: " in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^\$ fa3gen (diff .+)$", TEXT, flags=re.MULTILINE))))
def test_a_diff_shown_is_what_the_command_prints(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert cli.main(command.split()) == 1
    printed = set(capsys.readouterr().out.splitlines())
    [block] = re.findall(rf"^\$ fa3gen {re.escape(command)}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert set(block.splitlines()) - printed <= {"", ladder_page.CUT}


@pytest.mark.parametrize("command", re.findall(r"^`fa3gen (simulate .+ --svg .+)`$", TEXT, flags=re.MULTILINE))
def test_a_picture_shown_is_what_the_command_draws(command: str, tmp_path: Path) -> None:
    *words, name = command.split()
    assert cli.main([*words, str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_text() == (ROOT / ladder_page.PICTURES / name).read_text()


# Exercises


EDIT = "```diff\n-    if row < seq_q and column < seq_k:\n+    if row < seq_q:\n```\n\n"
ASKED = "<!-- exercise trace k1_d64 --seq-k 70 --cta all -->\n"


def test_the_script_writes_answers_and_nothing_else(tmp_path: Path) -> None:
    """As `fa3gen refresh` writes everything else."""
    document = tmp_path / "ladder.md"
    other = "<!-- source k2_d128: load_tile -->\nold\n<!-- end -->\n"
    document.write_text(f"{other}{EDIT}{ASKED}old\n<!-- end -->\n")
    assert make_exercises.main(document) == 0
    text = document.read_text()
    answer = text.removeprefix(f"{other}{EDIT}{ASKED}```text\n$ fa3gen trace k1_d64 --seq-k 70 --cta all\n[...]\n")
    assert answer.startswith("access out of bounds: ") and answer.endswith("\n[...]\n```\n<!-- end -->\n")
    refreshed = filled(text)
    assert text.partition(EDIT)[2] == refreshed.partition(EDIT)[2] and "old" not in refreshed


def test_an_exercise_edits_one_place() -> None:
    text = "first\nwait\nadvance\nlast\n"
    assert make_exercises.apply_edit("-wait\n", text) == "first\nadvance\nlast\n"
    assert make_exercises.apply_edit("-wait\n advance\n+wait\n", text) == "first\nadvance\nwait\nlast\n"
    for hunk, module in (("-weit\n", text), ("-wait\n", text + text)):
        with pytest.raises(ValueError, match="an edit needs one"):
            make_exercises.apply_edit(hunk, module)


def test_an_exercise_that_shows_nothing_is_refused() -> None:
    edit = "```diff\n-        mS[row, column, head, batch] = score * scale\n"
    edit += "+        mS[row, column, head, batch] = scale * score\n```\n\n"
    for before, words in ((edit, "the model has nothing to report"), ("", "there is no diff above it")):
        with pytest.raises(LadderError) as caught:
            make_exercises.filled(f"{before}<!-- exercise trace k1_d64 -->\n<!-- end -->\n")
        assert "<!-- exercise trace k1_d64 -->: " in str(caught.value) and words in str(caught.value)


def test_the_picture_of_a_copy_is_what_the_model_has() -> None:
    """Units of a box, by the layout's arithmetic and as they land on the CPU model."""
    for stem in ("c1", "c1_64b", "c1_none"):
        spec = variants()[stem].spec
        chunks = copied.repeated(spec, copied.landed(spec, CpuKernel(cached_compile(CHECKOUT.module_path(stem)))))
        width = max(chunk.chunk for chunk in chunks) + 1
        computed = [chunk for chunk in swizzles.pattern(swizzles.of_copy(spec)) if chunk.chunk < width]
        assert sorted(map(str, computed)) == sorted(map(str, chunks)), stem
