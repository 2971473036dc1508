"""Operand tiles: which dimension is contiguous in each form, and what follows for tensors, boxes and families."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rendering import changed, variants

from fa3gen.base.errors import UserError
from fa3gen.base.wording import listed
from fa3gen.design.family import Family, Shape
from fa3gen.design.operation import operation_of
from fa3gen.design.tiles import operand_tiles, sequence_contiguous
from fa3gen.hardware.dtypes import BF16
from fa3gen.records.tuning_records import TunedProblem
from fa3gen.spec.model import Spec
from fa3gen.verify.inputs import laid_out


def spec_of(stem: str) -> Spec:
    return variants()[stem].spec


@pytest.mark.parametrize(
    ("stem", "names"),
    [
        ("k4_2_d64", ()),
        ("k4_q_mn_d64", ("q",)),
        ("k4_k_mn_d64", ("k",)),
        ("k4_v_k_d64", ("v",)),
        ("k4_p_mn_d64", ()),  # P is no input
        ("k4_transposed_d64", ("q", "k", "v")),
        ("k4_1_d64", ()),
        ("k2_d64", ()),
        ("k1_d64", ()),
    ],
)
def test_which_inputs_have_a_contiguous_sequence(stem: str, names: tuple[str, ...]) -> None:
    assert sequence_contiguous(spec_of(stem)) == names
    operation = operation_of(spec_of(stem))
    assert [tensor.name for tensor in operation.tensors if tensor.contiguous != len(tensor.dims) - 1] == list(names)


def test_tiles_lie_as_their_tensors_do() -> None:
    tiles = operand_tiles(spec_of("k4_transposed_d64"))
    assert {letter: (tile.along, tile.inner, tile.across, tile.outer) for letter, tile in tiles.items()} == {
        "Q": ("queries", 128, "head dim", 64),
        "K": ("keys", 64, "head dim", 64),
        "V": ("keys", 64, "head dim", 64),
        "O": ("head dim", 64, "queries", 128),
    }
    p = operand_tiles(spec_of("k4_p_mn_d64"))["P"]
    assert (p.along, p.inner, p.across, p.outer, p.atom) == ("queries", 128, "keys", 64, "MN_SW128")
    assert operand_tiles(spec_of("k1_d64")) == {} and "O" not in operand_tiles(spec_of("k4_1_d64"))


@pytest.mark.parametrize(
    ("head_dim", "swizzle", "boxes"),
    [(128, "128B", 2), (64, "128B", 1), (64, "64B", 2), (64, "32B", 4), (32, "none", 4)],
)
def test_boxes_are_a_span_wide(head_dim: int, swizzle: Any, boxes: int) -> None:
    smem = {"q": swizzle, "k": swizzle, "v": swizzle}
    spec = changed("k4_2_d64", problem={"head_dim": head_dim}, smem=smem).spec
    assert {tile.boxes for tile in operand_tiles(spec).values()} == {boxes}


def test_plain_tiles_have_one_box() -> None:
    none = {"q": "none", "k": "none", "v": "none"}
    tiles = operand_tiles(changed("k3_2_d128", smem=none).spec)
    assert {tile.letter: (tile.plain, tile.boxes, tile.atom) for tile in tiles.values()} == {
        letter: (True, 1, "") for letter in "QKV"
    }
    tiles = operand_tiles(changed("k4_1_d128", smem=none).spec)  # S on WGMMA, O on scalars
    assert {tile.letter: (tile.plain, tile.boxes, tile.atom) for tile in tiles.values()} == {
        "Q": (False, 16, "K_INTER"),
        "K": (False, 16, "K_INTER"),
        "V": (True, 1, ""),
    }


def test_strides_are_padded_where_the_sequence_is_contiguous() -> None:
    """300 queries stand 304 apart, so that all other strides are multiples of 8; rows of 64 stand as ever."""
    shape = Shape(batch=2, seq_q=300, seq_k=500, heads_q=8, heads_kv=4)
    q = operation_of(spec_of("k4_q_mn_d64")).tensor("q")
    assert q.strides(q.sizes(shape)) == (8 * 64 * 304, 1, 64 * 304, 304)
    q = operation_of(spec_of("k4_2_d64")).tensor("q")
    assert q.strides(q.sizes(shape)) == (300 * 8 * 64, 8 * 64, 64, 1)


def test_tensors_are_laid_out_for_a_module() -> None:
    q = torch.randn(2, 13, 3, 64).to(BF16.in_torch())
    for stem, strides in (("k4_2_d64", q.stride()), ("k4_q_mn_d64", (3 * 64 * 16, 1, 64 * 16, 16))):
        found = laid_out(operation_of(spec_of(stem)).tensor("q"), q)
        assert torch.equal(found, q) and found.stride() == strides


def test_modules_of_transposed_inputs_take_nobodys_place() -> None:
    usual, turned = (Family.of(spec_of(stem)) for stem in ("k4_2_d64", "k4_transposed_d64"))
    assert usual != turned and usual == turned._replace(by_sequence=())
    assert str(turned) == "bf16, head dim 64, no mask, contiguous sequence in q, k and v"
    assert (usual.label, turned.label) == ("bf16_d64_full", "bf16_d64_full_sequence_qkv")
    with pytest.raises(UserError, match="tuned for tensors with contiguous rows, and these are for bf16, head dim 64"):
        TunedProblem.of(turned, Shape(1, 128, 128, 1, 1))


def test_listed() -> None:
    assert [listed("qkv"[:count]) for count in range(4)] == ["", "q", "q and k", "q, k and v"]
