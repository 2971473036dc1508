"""Where things lie, and what a name stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from fa3gen.base.errors import SpecError, UserError
from fa3gen.design import workspace
from fa3gen.design.workspace import Workspace, bundled_data

SPEC = """\
summary: both products on WGMMA
tile: {q: 128, kv: 64, warpgroups: 2}
load: {engine: tma, kv_stages: 2, barrier: separate}
smem: {q: 128B, k: 128B, v: 128B}
qk: {engine: wgmma, a: {source: smem, major: k}, b: {major: k}}
pv: {engine: wgmma, a: {source: registers, major: k}, b: {major: mn}}
handoff: {through: registers}
matrix: {problem.head_dim: [64, 128], mask: [none, causal]}
"""


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package's data, with one spec."""
    data = tmp_path / "site" / "data"
    for name in ("specs", "templates", "generated"):
        (data / name).mkdir(parents=True)
    (data / "specs" / "k4_2.yaml").write_text(SPEC)
    monkeypatch.setattr(workspace, "bundled_data", lambda: data)
    return data


@pytest.fixture
def checkout(tmp_path: Path, bundle: Path) -> Workspace:
    """A workspace with specs and generated, and one spec of its own."""
    root = tmp_path / "checkout"
    (root / "specs").mkdir(parents=True)
    (root / "generated").mkdir()
    (root / "specs" / "mine.yaml").write_text("extends: k4_2\nsummary: mine\n")
    return Workspace.find(root)


def test_the_nearest_parent_with_specs_and_generated(checkout: Workspace) -> None:
    deep = checkout.root / "generated" / "evidence"
    deep.mkdir()
    found = Workspace.find(deep)
    assert found == checkout
    assert found.specs_dir == checkout.root / "specs"
    assert found.generated_dir == checkout.root / "generated"
    assert found.evidence_dir == checkout.root / "generated" / "evidence"
    assert found.module_path("k1_d64") == checkout.root / "generated" / "k1_d64.py"


def test_the_working_directory_is_the_default(checkout: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout.specs_dir)
    assert Workspace.find() == checkout


def test_outside_a_checkout_the_package_provides(tmp_path: Path, bundle: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    found = Workspace.find(empty)
    assert found.root == empty
    assert found.templates_dir == bundle / "templates"
    assert found.spec_files() == []
    assert found.load_all() == []
    assert [spec.stem for spec in found.load_bundled()] == ["k4_2"]
    assert len(found.resolve("k4_2")) == 4
    assert found.module_path("k4_2_d64") == empty / "generated" / "k4_2_d64.py"


def test_own_templates_come_first(checkout: Workspace, bundle: Path) -> None:
    assert checkout.templates_dir == bundle / "templates"
    (checkout.root / "templates").mkdir()
    assert checkout.templates_dir == checkout.root / "templates"


def test_this_package_brings_specs_and_templates() -> None:
    assert (bundled_data() / "specs").is_dir()
    assert (bundled_data() / "templates").is_dir()


def test_resolve_a_spec_stem(checkout: Workspace) -> None:
    found = checkout.resolve("mine")
    assert [variant.stem for variant in found] == ["mine_d64", "mine_d64_causal", "mine_d128", "mine_d128_causal"]
    assert {variant.source for variant in found} == {Path("specs/mine.yaml")}


def test_resolve_one_module(checkout: Workspace) -> None:
    (found,) = checkout.resolve("mine_d128_causal")
    assert (found.stem, found.spec.problem.head_dim, found.spec.mask.kind) == ("mine_d128_causal", 128, "causal")


def test_resolve_a_generated_file(checkout: Workspace, tmp_path: Path) -> None:
    """Whether or not it is there; of a spec beside it, or else by its stem."""
    for path in ("generated/mine_d64.py", str(checkout.generated_dir / "mine_d64.py"), "mine_d64.py"):
        assert [(v.stem, v.source) for v in checkout.resolve(path)] == [("mine_d64", Path("specs/mine.yaml"))]
    (tmp_path / "mine.yaml").write_text("extends: k4_2\nsummary: another\n")
    assert [v.summary for v in checkout.resolve(str(tmp_path / "mine_d64.py"))] == ["another"]
    with pytest.raises(UserError, match="there is no spec or module 'mine_d65'; did you mean 'mine_d64'"):
        checkout.resolve("generated/mine_d65.py")


def test_resolve_a_path(checkout: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(checkout.resolve("checkout/specs/mine.yaml")) == 4  # from the working directory
    assert len(checkout.resolve("specs/mine.yaml")) == 4  # from the root
    assert len(checkout.resolve(str(checkout.specs_dir / "mine.yaml"))) == 4


def test_own_specs_come_before_those_of_the_package(checkout: Workspace) -> None:
    (checkout.specs_dir / "k4_2.yaml").write_text(SPEC.replace("both products", "my own"))
    assert checkout.resolve("k4_2")[0].summary == "my own on WGMMA"
    assert checkout.bundled_spec_files() == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine_d128_casual", "there is no spec or module 'mine_d128_casual'; did you mean 'mine_d128_causal'?"),
        ("k4-2", "there is no spec or module 'k4-2'; did you mean 'k4_2'?"),
        ("zzz", "there is no spec or module 'zzz' (`fa3gen list` shows all)"),
        ("specs/min.yaml", "there is no spec file specs/min.yaml; did you mean 'mine'?"),
    ],
)
def test_unknown_names(checkout: Workspace, name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        checkout.resolve(name)
    assert str(caught.value).startswith(message)


def test_where_a_module_lies(checkout: Workspace) -> None:
    """In the workspace; in the package only when no spec of the workspace generates it."""
    own, packaged = checkout.module_path, checkout.bundled / "generated"
    (packaged / "k4_2_d64.py").write_text("")
    (packaged / "mine_d64.py").write_text("")
    assert checkout.rendered_path("k4_2_d64") == packaged / "k4_2_d64.py"
    assert checkout.rendered_path("k4_2_d128") == own("k4_2_d128")
    assert checkout.rendered_path("mine_d64") == own("mine_d64")
    own("k4_2_d64").write_text("")
    assert checkout.rendered_path("k4_2_d64") == own("k4_2_d64")


def test_an_unknown_name_among_broken_specs(checkout: Workspace) -> None:
    (checkout.specs_dir / "broken.yaml").write_text("summary: [\n")
    with pytest.raises(UserError, match="did you mean 'mine_d64'"):
        checkout.resolve("mine_64")


def test_no_specs_at_all(tmp_path: Path, bundle: Path) -> None:
    (bundle / "specs" / "k4_2.yaml").unlink()
    with pytest.raises(UserError, match="there is no spec 'k1': neither .* nor the package holds any"):
        Workspace.find(tmp_path).resolve("k1")


def test_load_all_reports_the_problems_of_all_files(checkout: Workspace) -> None:
    (checkout.specs_dir / "a.yaml").write_text("summary: [\n")
    (checkout.specs_dir / "b.yaml").write_text("extends: mine\n")
    with pytest.raises(SpecError) as caught:
        checkout.load_all()
    assert [str(problem.path) for problem in caught.value.problems] == ["specs/a.yaml", "specs/b.yaml"]


def test_a_module_is_found_beside_a_broken_spec_of_a_similar_name(checkout: Workspace) -> None:
    (checkout.specs_dir / "k4.yaml").write_text("summary: [\n")
    assert [variant.stem for variant in checkout.resolve("k4_2_d64")] == ["k4_2_d64"]
    assert not checkout.owns("k4_2_d64")
    with pytest.raises(SpecError, match="specs/k4.yaml"):
        checkout.resolve("k4_d64")


def test_stems_are_unique_over_all_files(checkout: Workspace) -> None:
    (checkout.specs_dir / "mine_d64.yaml").write_text(
        "extends: mine\nsummary: clash\nmatrix: {problem.head_dim: [64]}\n"
    )
    (checkout.specs_dir / "mine_d64_causal.yaml").write_text(
        "extends: mine\nsummary: clash\nproblem: {head_dim: 64}\nmatrix: {}\n"
    )
    with pytest.raises(SpecError) as caught:
        checkout.load_all()
    assert [str(problem) for problem in caught.value.problems] == [
        "specs/mine_d64.yaml: the name 'mine_d64' is also claimed by specs/mine.yaml; rename one of the files",
        "specs/mine_d64_causal.yaml: the name 'mine_d64_causal' is also claimed by specs/mine.yaml; "
        "rename one of the files",
    ]


def test_a_module_of_two_specs_is_ambiguous(checkout: Workspace) -> None:
    (checkout.specs_dir / "mine_d64.yaml").write_text(
        "extends: k4_2\nsummary: x\nproblem: {head_dim: 64}\nmatrix: {mask: [causal]}\n"
    )
    with pytest.raises(UserError) as caught:
        checkout.resolve("mine_d64_causal")
    assert str(caught.value) == (
        "'mine_d64_causal' is generated by specs/mine.yaml and specs/mine_d64.yaml; rename one of them"
    )


def test_a_spec_may_have_the_name_of_its_only_module(checkout: Workspace) -> None:
    (checkout.specs_dir / "one.yaml").write_text("extends: k4_2\nsummary: x\nproblem: {head_dim: 64}\nmatrix: {}\n")
    assert [spec.stem for spec in checkout.load_all()] == ["mine", "one"]
    assert [variant.stem for variant in checkout.resolve("one")] == ["one"]
