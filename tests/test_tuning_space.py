"""The search space: what its file may say, what is enumerated, what is pruned and why; writing a winner back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering import CHECKOUT, attention_stems, spec_files, variants

from fa3gen.base.errors import SpecError, UserError
from fa3gen.base.files import sha256
from fa3gen.design import rules
from fa3gen.design.workspace import Workspace
from fa3gen.generate.render import render_variant
from fa3gen.measure.tuning import candidates, writeback
from fa3gen.measure.tuning.session import Module
from fa3gen.measure.tuning.space import Enumeration, enumerate_space, load_space
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import Variant, attention_among

K6 = "k6_d128_causal"


def enumerated(tmp_path: Path, axes: str, start: str = K6) -> Enumeration:
    path = tmp_path / "space.yaml"
    path.write_text("space:\n" + "".join(f"  {line}\n" for line in axes.strip().splitlines()))
    return enumerate_space(load_space(path), variants()[start].spec.model_dump(), "x")


def test_what_the_rules_refuse_is_counted_by_reason(tmp_path: Path) -> None:
    """By hand: 100 is no multiple of 8 (QK) nor of 16 (PV); 4 stages of 128 are 64 KB of K and 64 KB of V too many."""
    found = enumerated(tmp_path, "tile.kv: [64, 100, 128]\nload.kv_stages: [2, 4]")
    assert [candidate.stem for candidate in found.candidates] == [
        "x_kv64_kv_stages2",
        "x_kv64_kv_stages4",
        "x_kv128_kv_stages2",
    ]
    assert (found.total, found.refused, found.repeated) == (6, 3, 0)
    reasons = {(reason.field, reason.example.split(" (")[0].split(" is ")[0]): reason.count for reason in found.pruned}
    assert reasons == {
        ("tile.kv", "N of the QK product"): 2,
        ("tile.kv", "K of the PV product"): 2,
        ("load.kv_stages", "shared memory: sQ"): 2,  # of 100 keys and of 128
    }


def test_what_taste_warns_of_is_tried_and_counted(tmp_path: Path) -> None:
    """Unmasked, 2 of 6 draw tiles of equal length, 3 rescale 128 columns of O rarely, one of them does both."""
    found = enumerated(tmp_path, "scheduler: [static, stream_k, dynamic]\nsoftmax.rescale_above: [null, 8]", "fwd_d128")
    assert len(found.candidates) == 6 and (found.refused, found.pruned) == (0, ())
    assert [(reason.field, reason.count) for reason in found.warned] == [
        ("softmax.rescale_above", 3),
        ("scheduler", 2),
    ]
    # What is refused is not warned of: with O over Q there is no persistent kernel at all.
    found = enumerated(tmp_path, "outputs.o: [over_q]\nscheduler: [dynamic]", "fwd_d128")
    assert (found.refused, found.warned) == (1, ())


def test_what_the_models_refuse_is_counted_as_well(tmp_path: Path) -> None:
    found = enumerated(tmp_path, "tile.kvv: [64]\nload.kv_stages: [1, 2]")
    assert found.candidates == () and found.refused == 2
    assert [(reason.field, reason.example, reason.count) for reason in found.pruned] == [
        ("tile.kvv", "unknown key 'kvv'; did you mean 'kv'?", 2)
    ]


def test_another_arm_of_a_union_keeps_what_both_have(tmp_path: Path) -> None:
    found = enumerated(
        tmp_path,
        "schedule.kind: [warp_specialized, ping_pong, cooperative]\nschedule.overlap: [false]\n"
        "softmax.exp_before_wait: [null]",
    )
    schedules = [candidate.spec.schedule.model_dump() for candidate in found.candidates]
    assert schedules == [
        {"kind": "warp_specialized", "overlap": False},
        {"kind": "ping_pong", "overlap": False},
    ]
    assert [reason.field for reason in found.pruned] == ["schedule.overlap"]  # of no use to the cooperative one
    found = enumerated(tmp_path, "schedule.kind: [warp_specialized, ping_pong]")
    assert {candidate.spec.schedule.model_dump()["overlap"] for candidate in found.candidates} == {True}


def test_a_value_brings_company(tmp_path: Path) -> None:
    found = enumerated(tmp_path, "tile.kv:\n  - 64\n  - {value: 128, with: {load: {kv_stages: 1}}}")
    assert [(c.spec.tile.kv, c.spec.load.model_dump()["kv_stages"]) for c in found.candidates] == [(64, 2), (128, 1)]


def test_one_spec_is_one_candidate(tmp_path: Path) -> None:
    found = enumerated(tmp_path, "tile.kv: [64, 64]\nschedule: [{kind: cooperative}]\nsoftmax.exp_before_wait: [null]")
    assert len(found.candidates) == 1 and found.repeated == 1


def test_stems_can_name_modules_and_differ(tmp_path: Path) -> None:
    found = enumerated(
        tmp_path, "smem:\n  - {q: 128B, k: 128B, v: 128B}\n  - {q: 64B, k: 128B, v: 128B}\ntile.kv: [64, 96]"
    )
    stems = [candidate.stem for candidate in found.candidates]
    assert len(stems) == len(set(stems)) == 4 and all(stem.isidentifier() for stem in stems)


@settings(max_examples=25, deadline=None)
@given(
    kv=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    stages=st.lists(st.integers(-1, 6), min_size=1, max_size=3),
    kinds=st.lists(st.sampled_from(["cooperative", "warp_specialized", "ping_pong", "other"]), min_size=1, max_size=3),
)
def test_every_combination_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, kv: list[int], stages: list[int], kinds: list[str]
) -> None:
    """Never a traceback; what is kept is legal."""
    axes = f"tile.kv: {kv}\nload.kv_stages: {stages}\nschedule.kind: [{', '.join(kinds)}]"
    found = enumerated(tmp_path_factory.mktemp("space"), axes)
    assert found.total == len(kv) * len(stages) * len(kinds)
    assert all(rules.check(candidate.spec) == [] for candidate in found.candidates)
    assert bool(found.refused) == bool(found.pruned)
    assert all(reason.count <= found.refused for reason in found.pruned)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[1]", "a mapping is needed, got a list"),
        ("base: k6", "space.yaml:1: space: a mapping of field paths"),
        ("space: {tile.kv: 3}", "space.tile.kv: a list of values is needed, got the integer 3"),
        ("space: {tile.kv: []}", "space.tile.kv: a list of values is needed"),
        ("space: {tyle.kv: [3]}", "space.tyle.kv: this is no dotted path of a field.*did you mean 'tile'"),
        ("space: {mask: [none]}", "space.mask: candidates solve one problem"),
        ("space: {tile.kv: [64]}\nbass: k6", "space.yaml:2: bass: unknown key 'bass'; did you mean 'base'"),
        ("space: {tile.kv: [64]}\nbase: [k6]", "base: the stem of a spec is needed, got a list"),
        ("space: {tile.kv: [64]}\nproblem: {head: 3}", "problem.head: unknown key 'head'; did you mean 'head_dim'"),
        ("space: {tile.kv: [64]}\nproblem: 64", "problem: a mapping such as"),
        ("space: {tile.kv: [{value: 64, wth: 3}]}", "is written {value: 64, with:"),
        (f"space: {{tile.kv: {[1] * 200}, tile.q: {[1] * 200}}}", "40000 combinations are more than 20000"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        load_space(path)


def test_committed_spaces_offer_something_at_every_problem() -> None:
    paths = sorted((CHECKOUT.specs_dir / candidates.FOLDER).glob("*.yaml"))
    assert paths
    for path in paths:
        space = load_space(path)
        for start in candidates.find_starts(CHECKOUT, path.stem, space):
            found = enumerate_space(space, start.fields, path.stem)
            others = [candidate for candidate in found.candidates if candidate.spec != start.incumbent.spec]
            assert len(others) > 1, f"{path}: {start.family.label}"


# -- where a search starts


def space_file(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "s.yaml"
    path.write_text(text + "\nspace: {tile.kv: [64]}\n")
    return load_space(path)


def test_a_spec_is_tuned_for_each_of_its_problems(tmp_path: Path) -> None:
    starts = candidates.find_starts(CHECKOUT, "k6", space_file(tmp_path, ""))
    assert [start.incumbent.stem for start in starts] == ["k6_d64", "k6_d64_causal", "k6_d128", "k6_d128_causal"]
    assert starts[0].fields["tile"]["q"] == 192  # what the matrix of k6 gives to head dim 64
    narrowed = candidates.find_starts(CHECKOUT, "k6", space_file(tmp_path, "problem: {head_dim: 64, mask: causal}"))
    assert [start.incumbent.stem for start in narrowed] == ["k6_d64_causal"]


def test_a_new_name_starts_at_its_base(tmp_path: Path) -> None:
    space = space_file(tmp_path, "base: k6\nproblem: {head_dim: 64, mask: causal}")
    (start,) = candidates.find_starts(CHECKOUT, "fast", space)
    assert (start.incumbent.stem, start.base.stem) == ("k6_d64_causal", "k6")


def test_a_base_without_the_problem_brings_what_its_modules_share(tmp_path: Path) -> None:
    space = space_file(tmp_path, "base: k6_sequential")
    starts = {start.incumbent.stem: start for start in candidates.find_starts(CHECKOUT, "k5", space)}
    assert starts["k5_d128"].fields["schedule"]["kind"] == "ping_pong"
    fields = starts["k5_d64_causal"].fields
    assert fields["problem"]["head_dim"] == 64 and fields["mask"]["kind"] == "causal"
    assert fields["schedule"] == {"kind": "ping_pong", "overlap": False}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("fast", "", "'fast' is no spec or module yet; let .* name a `base`"),
        ("k6", "problem: {head_dim: 96}", "no module of k6 fits; it has bf16_d64_full, .*bf16_d128_causal"),
        ("fast", "base: k6\nproblem: {dtype: fp16}", "no module of k6 fits"),
        ("fast", "base: k66", "there is no spec or module 'k66'; did you mean"),
        ("a-b", "base: k6", "'a-b' cannot name a spec"),
    ],
)
def test_a_search_without_a_start_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        candidates.find_starts(CHECKOUT, name, space_file(tmp_path, text))


TUNED = [
    variant.stem
    for variant in attention_among(variants().values())
    if variant.stem.startswith("fwd_") and variant.spec.problem.layout == "dense"  # others are refused
]


@pytest.mark.parametrize("stem", TUNED)
def test_every_production_module_has_a_space_with_something_to_try(stem: str) -> None:
    space = candidates.find_space(CHECKOUT, stem, None)
    (start,) = candidates.find_starts(CHECKOUT, stem, space)
    assert start.incumbent.stem == stem and len(candidates.prune(space, start).enumeration.candidates) > 20


def test_spaces_are_found_by_name(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, CHECKOUT.root)
    (tmp_path / "specs" / "tuning").mkdir(parents=True)
    with pytest.raises(
        UserError, match=r"no search space for 'nothing' \(there are spaces for .*write specs/tuning/noth"
    ):
        candidates.find_space(workspace, "nothing", None)
    (tmp_path / "specs/tuning/k5.yaml").write_text("space: {tile.kv: [64]}")
    assert candidates.find_space(workspace, "k5_d64", None).path == Path("specs/tuning/k5.yaml")
    # Of the specs that it extends, the nearest one that has a space.
    assert candidates.find_space(workspace, "k6_sequential_d128", None).path.name == "k6.yaml"
    assert candidates.find_space(workspace, "fwd_d128_window", None).path.name == "fwd_d128.yaml"
    assert candidates.find_space(workspace, "fwd_fp16_d192_causal", None).path.name == "fwd_d128.yaml"
    (tmp_path / "specs/tuning/fwd_d256.yaml").write_text("space: {tile.kv: [64]}")
    assert candidates.find_space(workspace, "fwd_fp16_d192_causal", None).path == Path("specs/tuning/fwd_d256.yaml")
    with pytest.raises(UserError, match="there is no such file"):
        candidates.find_space(workspace, "k5", tmp_path / "other.yaml")


# -- writing back


def file_of(stem: str) -> Any:
    return next(file for file in spec_files() if file.stem == stem)


@pytest.mark.parametrize("base", ["k1", "k4_2_window", "k6"])
def test_every_spec_can_be_written_on_every_base(tmp_path: Path, base: str) -> None:
    """What is written is read back as the very spec."""
    workspace = Workspace(tmp_path, CHECKOUT.root)
    workspace.specs_dir.mkdir()
    for stem, variant in ((stem, variants()[stem]) for stem in attention_stems()):
        text = writeback.spec_text(file_of(base), variant.spec, "a winner")
        target = workspace.specs_dir / "winner.yaml"
        target.write_text(text)
        (written,) = workspace.load(target).variants
        assert written.spec == variant.spec, f"{stem} on {base}:\n{text}"
        assert written.stem == "winner"


def test_only_what_differs_is_written() -> None:
    spec = Forward.model_validate(
        {**variants()[K6].spec.model_dump(), "schedule": {"kind": "ping_pong", "overlap": False}}
    )
    assert writeback.spec_text(file_of("k6"), spec, "a winner") == (
        "summary: a winner\nextends: k6\nproblem: {head_dim: 128}\nmask: causal\n"
        "schedule: {overlap: false}\nmatrix: {}\n"
    )


def measured_in(folder: Path, **changes: Any) -> Module:
    """A candidate as a search renders it."""
    spec = Forward.model_validate({**variants()[K6].spec.model_dump(), **changes})
    path = folder / "candidate.py"
    path.write_text(render_variant(Variant("candidate", spec, Path("specs/candidate.yaml"), "a candidate"), CHECKOUT))
    return Module("candidate", path, sha256(path), spec)


def test_a_winner_becomes_the_module_that_was_measured(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work", CHECKOUT.root)
    workspace.specs_dir.mkdir(parents=True)
    measured = measured_in(tmp_path, schedule={"kind": "warp_specialized", "overlap": False}, softmax={})
    module = writeback.write_winner(workspace, "fast", file_of("k6"), measured, "tuned")
    text = module.path.read_text()
    assert (module.stem, module.spec, module.sha256) == ("fast", measured.spec, sha256(module.path))
    assert text != measured.path.read_text()  # the header names specs/fast.yaml
    assert writeback.code_of(text) == writeback.code_of(measured.path.read_text())
    assert '"""tuned (head dim 128' in text and "specs/fast.yaml" in text


def test_code_that_was_not_measured_is_not_written(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "work", CHECKOUT.root)
    workspace.specs_dir.mkdir(parents=True)
    measured = measured_in(tmp_path)
    measured.path.write_text(measured.path.read_text().replace("* 2", "* 3", 1) + "\nX = 1\n")
    with pytest.raises(
        UserError, match="fast is not the code that was measured as candidate .*run `fa3gen tune` again"
    ):
        writeback.write_winner(workspace, "fast", file_of("k6"), measured, "tuned")
    assert list(workspace.specs_dir.iterdir()) == [] and not workspace.generated_dir.exists()


def test_names_that_are_taken_are_refused(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, CHECKOUT.root)
    workspace.specs_dir.mkdir()
    with pytest.raises(UserError, match="the name 'k6_d64' is taken by specs/k6.yaml"):
        writeback.check_name(workspace, "k6_d64", force=True)
    with pytest.raises(UserError, match="'a b' cannot name"):
        writeback.check_name(workspace, "a b", force=True)
    (workspace.specs_dir / "mine.yaml").write_text("summary: x\nextends: k6\n")
    with pytest.raises(UserError, match="mine.yaml exists already"):
        writeback.check_name(workspace, "mine", force=False)
    writeback.check_name(workspace, "mine", force=True)
