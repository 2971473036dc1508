"""What a refused spec is told to change leads to a legal one, in one step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rendering
from pydantic import ValidationError

from fa3gen import cli
from fa3gen.design import nearest
from fa3gen.design.nearest import described, nearest_legal
from fa3gen.design.rules import check
from fa3gen.spec.model import Forward, Spec

Fields = dict[str, Any]

# One of each kind of kernel, and what a person may come to write into it.
STEMS = (
    *("k1_d64", "k2_d128", "k2_cp_async_d64", "k3_2_d128", "k4_1_d64", "k4_smem_d128", "k4_2_d128_causal"),
    *("k4_2_window_d64_window200_70", "k5_d64", "k6_d128", "fwd_d64", "fwd_d128_causal", "fwd_d256", "fwd_d192_128"),
    "fwd_d128_pack4_causal",
)
EDITS: dict[str, tuple[Any, ...]] = {
    "problem.head_dim": (8, 48, 72, 100, 192, 256, 320),
    "problem.head_dim_v": (24, 64, 192, 264),
    "mask": ({"kind": "none"}, {"kind": "causal"}, {"kind": "window", "left": 10, "right": 3}),
    "tile.q": (48, 64, 100, 128, 192, 256, 384),
    "tile.kv": (24, 100, 160, 256, 320),
    "tile.threads": (48, 100, 512, 1056),
    "tile.warpgroups": (1, 3, 5, 9),
    "tile.pack_heads": (3, 8),
    "load": (
        {"engine": "sync"},
        {"engine": "cp_async", "kv_stages": 2},
        {"engine": "tma", "kv_stages": 2, "barrier": "shared"},
    ),
    "load.kv_stages": (0, 5, 20),
    "load.q_stages": (1, 2, 3),
    "smem": (None,),
    "smem.q": ("none", "128B"),
    "qk": ({"engine": "scalar"},),
    "pv": ({"engine": "scalar"},),
    "pv.a.source": ("smem", "registers"),
    "pv.b.major": ("k", "mn"),
    "handoff": (
        {"through": "global_f32"},
        {"through": "smem_f32"},
        {"through": "registers"},
        {"through": "smem_16bit", "swizzle": "128B"},
    ),
    "schedule": (
        {"kind": "cooperative"},
        {"kind": "ping_pong", "overlap": True},
        {"kind": "warp_specialized", "overlap": False},
    ),
    "scheduler": ("single_tile", "static", "stream_k", "dynamic"),
    "softmax.rescale_above": (8,),
    "softmax.exp_before_wait": (4, 100),
    "softmax.mask_end": ("when_cut",),
    "outputs.lse": (False,),
    "outputs.o": ("over_q", "own_buffer", "direct"),
}


def edited(fields: Fields, path: str, value: Any) -> Fields:
    """The fields with one of them as a person writes it; null takes it out."""
    result = copy.deepcopy(fields)
    *parents, name = path.split(".")
    place = result
    for parent in parents:
        place = place.setdefault(parent, {})
    if value is None:
        place.pop(name, None)
    else:
        place[name] = copy.deepcopy(value)
    return result


def refused(stem: str) -> Iterator[tuple[str, Any, Spec]]:
    """The edits of a spec that some rule refuses."""
    fields = rendering.variants()[stem].spec.model_dump(exclude_none=True)
    for path, values in EDITS.items():
        for value in values:
            try:
                spec = Forward.model_validate(edited(fields, path, value))
            except ValidationError:  # no such field beside the others: the schema says so, not a rule
                continue
            if check(spec):
                yield path, value, spec


@pytest.mark.parametrize("stem", STEMS)
def test_one_step_leads_to_a_legal_spec(stem: str) -> None:
    cases = list(refused(stem))
    assert len(cases) > 15
    for path, value, spec in cases:
        changes = nearest_legal(spec)
        assert changes, f"{path}: {value}"
        fields = spec.model_dump(exclude_none=True)
        for changed, new in changes:
            fields = edited(fields, changed, new)
        assert check(Forward.model_validate(fields)) == [], f"{path}: {value}: {described(changes)}"


def test_how_changes_before_what() -> None:
    """A window that no persistent kernel has: the scheduler goes, with what belongs to it, and the window stays."""
    fields = rendering.variants()["fwd_d128"].spec.model_dump(exclude_none=True)
    spec = Forward.model_validate(edited(fields, "mask", {"kind": "window", "left": 512, "right": 0}))
    changes = nearest_legal(spec)
    assert changes is not None
    assert {path for path, _ in changes}.isdisjoint({"mask", "problem.head_dim"}), described(changes)


def test_changes_are_written_as_yaml() -> None:
    changes = (("load", {"engine": "tma", "kv_stages": 2}), ("outputs.lse", True), ("smem", None), ("tile.kv", 64))
    assert described(changes) == "load: {engine: tma, kv_stages: 2}, outputs.lse: true, smem: null, tile.kv: 64"


def test_a_search_that_finds_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest, "MOST_SPECS", 10)
    fields = rendering.variants()["k6_d128"].spec.model_dump(exclude_none=True)
    assert nearest_legal(Forward.model_validate(edited(fields, "problem.head_dim", 512))) is None


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in ("specs", "generated"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "specs/mine.yaml"


def render(spec: Path, text: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    spec.write_text(text)
    return cli.main(["render", "mine"]), capsys.readouterr().err


def test_what_a_person_reads_can_be_written_into_the_file(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line of a refusal, field by field in the spec file, is accepted."""
    text = "summary: Mine\nextends: fwd_d128\nmask: {kind: window, left: 512, right: 0}\n"
    code, said = render(mine, text, capsys)
    told = said.splitlines()[-1].partition("what makes it legal in one step: ")[2].removesuffix(" (in mine)")
    assert code == 2 and told
    sections: dict[str, list[str]] = {}
    for change in told.split(", "):
        path, _, value = change.partition(": ")
        section, _, field = path.partition(".")
        sections.setdefault(section, []).append(f"{field}: {value}" if field else value)
    lines = [
        f"{name}: " + ("{" + ", ".join(parts) + "}" if ":" in parts[0] else parts[0])
        for name, parts in sections.items()
    ]
    assert render(mine, text + "\n".join(lines) + "\n", capsys)[0] == 0


def test_a_rule_that_says_it_all_is_left_alone(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = render(
        mine, "summary: Mine\nextends: k4_2\nload: {kv_stages: 8}\nmatrix:\n  problem.head_dim: [128]\n", capsys
    )
    assert code == 2 and "use at most 6 stages" in said and "in one step" not in said
