"""Where no module computes what a call asks for, the error gives a spec: saved and rendered, it is one that does."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering import CHECKOUT, constants

from fa3gen import cli
from fa3gen.design.family import Family
from fa3gen.design.proposed import Proposal, propose
from fa3gen.design.rules import check
from fa3gen.design.workspace import Workspace
from fa3gen.run import dispatch
from fa3gen.run.dispatch import NotRendered, Size
from fa3gen.spec.model import CausalMask, Forward, Mask, NoMask, SequenceLayout, WindowMask

ONE_SIZE = Size(4096, 512)
WINDOW = WindowMask(left=300, right=5)
FAMILIES = [
    Family("bf16", 80, 80, CausalMask()),
    Family("fp16", 96, 96, WINDOW),
    Family("bf16", 160, 160, NoMask(), sink=True),
    Family("bf16", 192, 128, WINDOW),  # the nearest spec has its window compiled in, and this one takes any
    Family("fp16", 64, 64, WINDOW),  # the nearest spec takes it with each call
    Family("bf16", 64, 64, WindowMask(left=100, right=70), softcap=True),
    Family("bf16", 256, 256, WINDOW, sink=True, softcap=True),
    Family("bf16", 64, 64, CausalMask(), "fp32"),
    Family("fp16", 128, 64, NoMask(), "fp32"),
    Family("bf16", 240, 240, CausalMask()),  # what O takes leaves room for smaller tiles of keys only
    Family("bf16", 128, 128, CausalMask(), by_sequence=("v",)),
    Family("fp16", 64, 64, NoMask(), by_sequence=("q", "k", "v")),
    Family("bf16", 80, 80, NoMask(), layout="packed"),
    Family("fp16", 256, 256, WINDOW, layout="packed"),
    Family("bf16", 192, 128, NoMask(), layout="packed"),
    Family("bf16", 96, 96, CausalMask(), layout="paged", page_rows=48),
    Family("fp16", 64, 64, WINDOW, layout="paged", page_rows=3),
    Family("bf16", 128, 128, WINDOW, layout="packed", kv_dtype="e4m3"),  # Mistral with a cache of 8 bits
    Family("bf16", 64, 64, WINDOW, layout="packed", kv_dtype="e4m3", sink=True),  # GPT-OSS without pages
    Family("bf16", 256, 256, WINDOW, layout="paged", page_rows=16, kv_dtype="e4m3", softcap=True),  # Gemma
    Family("e4m3", 256, 256, CausalMask(), "bf16", layout="packed", sink=True, softcap=True, any_cap=True),
    Family("e4m3", 64, 64, WINDOW, "bf16", sink=True),
    Family("e4m3", 96, 96, CausalMask(), "bf16"),  # sums in two levels
    Family("e4m3", 160, 160, NoMask(), "bf16"),  # for which two accumulators leave no registers
    Family("e4m3", 160, 160, CausalMask(), "bf16", by_sequence=("v",)),
    Family("e4m3", 64, 64, NoMask(), "fp16"),
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace without anything of its own, where somebody works."""
    for folder in ("specs", "generated"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    return Workspace.find()


def refused(family: Family, workspace: Workspace, *, lse: bool = True) -> NotRendered:
    with pytest.raises(NotRendered) as error:
        dispatch.choose(family, ONE_SIZE, lse=lse, workspace=workspace)
    return error.value


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.label)
def test_the_text_of_the_error_is_a_spec_of_the_family(family: Family, place: Workspace) -> None:
    """Saved and rendered as the error says; then it is what such calls take, whatever their heads, LSE or not."""
    message, _, text = str(refused(family, place)).partition("\n\n")
    path = Path(message.partition("Save it as ")[2].partition(", run `fa3gen render")[0])
    assert path.parent == place.specs_dir and f"run `fa3gen render {path.stem}`" in message
    path.write_text(text)
    assert cli.main(["render", path.stem]) == 0
    (variant,) = place.load(path).variants
    assert isinstance(variant.spec, Forward) and Family.of(variant.spec).serves(family)
    tree = ast.parse(place.module_path(path.stem).read_text())
    dims = constants(tree)
    assert (dims["HEAD_DIM"], dims.get("HEAD_DIM_V", dims["HEAD_DIM"])) == (family.head_dim, family.head_dim_v)
    for group, lse in ((1, False), (6, True)):
        choice = dispatch.choose(family, Size(4096, 512, group=group), lse=lse, workspace=place)
        assert choice.file == place.module_path(path.stem)


MASKS: list[Mask] = [NoMask(), CausalMask(), WINDOW]
DIMS = st.integers(1, 16).map(lambda units: 16 * units)


@settings(max_examples=25, deadline=None)
@given(
    dtype=st.sampled_from(["bf16", "fp16"]),
    dims=st.one_of(DIMS.map(lambda dim: (dim, dim)), st.tuples(DIMS, DIMS)),
    mask=st.sampled_from(MASKS),
    rest=st.one_of(
        st.fixed_dictionaries(
            {"sink": st.booleans(), "softcap": st.booleans(), "out_dtype": st.sampled_from([None, "fp32"])}
        ),
        st.just({"layout": "packed"}),
    ),
)
def test_what_is_proposed_is_legal_and_of_the_family(dtype: str, dims: tuple[int, int], mask: Mask, rest: dict) -> None:
    family = Family(dtype, *dims, mask)._replace(**rest)
    found = propose(family, CHECKOUT)
    assert isinstance(found, Proposal), found
    assert check(found.spec) == [] and Family.of(found.spec).serves(family)
    assert found.spec.outputs.lse and found.spec.tile.pack_heads == 1 and found.spec.load.kv_stages > 1


@pytest.mark.parametrize(
    ("family", "base", "fields"),
    [
        (FAMILIES[0], "fwd_d96_causal", ["problem: {head_dim: 80}", "smem: {q: 32B, k: 32B, v: 32B}"]),
        (FAMILIES[3], "fwd_d192_128_window", ["mask: {left: null, right: null}"]),
        (FAMILIES[4], "fwd_d64_any_window", ["problem: {dtype: fp16}"]),
        (FAMILIES[7], "fwd_d64_causal", ["outputs: {o: direct}", "o: {dtype: fp32}"]),
        (FAMILIES[-2], "k7_v_k", ["problem: {head_dim: 160}", "mask: {kind: causal}", "smem: {q: 32B, k: 32B}"]),
        (
            Family("bf16", 96, 96, CausalMask(), layout="paged", page_rows=48),
            "fwd_paged",
            ["problem: {head_dim: 96}", "mask: {kind: causal}", "smem: {q: 64B, k: 64B, v: 64B}"],
        ),
    ],
    ids=lambda value: getattr(value, "label", None),
)
def test_the_nearest_tuned_spec_is_extended_by_what_differs(family: Family, base: str, fields: list[str]) -> None:
    found = propose(family, CHECKOUT)
    assert isinstance(found, Proposal)
    assert found.text.splitlines()[1:] == [f"extends: {base}", *fields, "matrix: {}"]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (Family("bf16", 72, 72, CausalMask()), "problem.head_dim: K of the QK product is 72, no multiple of 16"),
        (Family("bf16", 576, 512, CausalMask()), "problem.head_dim_v: N of the PV product is 512 > 256"),
        (Family("bf16", 64, 64, NoMask(), "fp16"), "o.dtype: O in fp16 beside q, k and v in bf16 is not rendered"),
        (Family("e4m3", 80, 80, NoMask(), "bf16"), "problem.head_dim: K of the QK product is 80, no multiple of 32"),
        (Family("e4m3", 64, 64, NoMask(), "fp32"), "outputs.o: a tile of O in fp32 would take"),
        (
            Family("e4m3", 128, 128, CausalMask(), "bf16", block_scales=True, sink=True),
            "softmax.sink: with scales: block true is not rendered",
        ),
    ],
)
def test_where_no_spec_is_legal_the_error_says_why(family: Family, reason: str) -> None:
    error = refused(family, CHECKOUT)
    assert error.proposal is None and f"Nor can one be rendered:\n{reason}" in str(error)
    assert isinstance(error, NotImplementedError)  # as FlashAttention's functions say that something is not served


@pytest.mark.parametrize("layout", ["packed", "paged"])
def test_parts_of_a_window_begin_with_the_window(layout: SequenceLayout) -> None:
    """The nearest spec of 8 bits that splits keys is for causal masks: its tiles of keys begin with the first key."""
    family = Family("e4m3", 128, 128, WINDOW, "bf16", layout=layout, page_rows=16 if layout == "paged" else None)
    found = propose(family, CHECKOUT, parts=True, group=3)
    assert isinstance(found, Proposal) and check(found.spec) == []
    assert found.spec.mask == WindowMask() and found.spec.tile.kv_from == "window" and found.spec.split is not None


def test_a_cap_beside_products_of_8_bits_holds_no_exponentials_back() -> None:
    """For which ptxas would have no registers."""
    family = Family("e4m3", 128, 128, WINDOW, "bf16", layout="packed")
    plain, capped = (propose(each, CHECKOUT) for each in (family, family._replace(softcap=True, any_cap=True)))
    assert isinstance(plain, Proposal) and plain.spec.softmax.exp_before_wait is not None
    assert isinstance(capped, Proposal) and capped.spec.softmax.exp_before_wait is None


@pytest.mark.parametrize("scores", [{}, {"sink": True}, {"softcap": True, "any_cap": True}])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("layout", ["packed", "paged"])
def test_parts_of_keys_of_8_bits_extend_what_converts_them(
    layout: SequenceLayout, dim: int, scores: dict[str, Any]
) -> None:
    """Stages of tiles of 8 bits, and who converts them, as they were tuned, whatever a call asks of its scores."""
    page_rows = 16 if layout == "paged" else None
    family = Family("bf16", dim, dim, WINDOW, layout=layout, page_rows=page_rows, kv_dtype="e4m3", **scores)
    found = propose(family, CHECKOUT, parts=True, group=8)
    assert isinstance(found, Proposal) and check(found.spec) == [] and Family.of(found.spec).serves(family)
    windowed = "_any_window" * (layout == "paged")  # there is one for windows in pages
    assert found.base == f"fwd_{layout}_kv8_decode{windowed}" and found.spec.kv.stages > 1


def test_without_a_spec_there_is_nothing_to_extend(tmp_path: Path) -> None:
    error = refused(FAMILIES[0], Workspace(tmp_path, tmp_path / "package"))
    assert error.proposal is None and str(error).endswith("there is no spec to begin with")


def test_lse_alone_is_no_reason_to_compute_another_family(place: Workspace) -> None:
    """The only module of this family writes no LSE; one that does is proposed, for the window of each call."""
    family = Family("fp16", 64, 64, WindowMask(left=100, right=70))
    assert dispatch.choose(family, ONE_SIZE, lse=False, workspace=place).stem == "fwd_d64_window_o_only"
    error = refused(family, place)
    assert "with LSE" in str(error) and error.proposal is not None and error.proposal.spec.outputs.lse
