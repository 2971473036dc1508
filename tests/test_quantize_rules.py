"""Rules about quantisation: the exact message on hand-derived numbers, and silence right beside the limit."""

from __future__ import annotations

from typing import Any

import pytest

from fa3gen.design import rules
from fa3gen.design.rules import Violation, quantizes
from fa3gen.spec.model import Quantize

BASE: dict[str, Any] = {
    "operation": "quantize",
    "problem": {
        "head_dim": 128,
        "dtype": "bf16",
        "rotate": False,
        "transpose": False,
        "permute_keys": False,
        "scale": "head",
    },
    "tile": {"rows": 128, "threads": 256, "per_sm": 2},
}
HELD = [("values", 64), ("signs", 16), ("addresses and counters", 32)]


def spec(**changes: Any) -> Quantize:
    """The base, with fields of `problem` and `tile` by their own names."""
    parts = {
        name: {**BASE[name], **{k: v for k, v in changes.items() if k in BASE[name]}} for name in ("problem", "tile")
    }
    return Quantize.model_validate({**BASE, **parts})


def violations(**changes: Any) -> dict[str, str]:
    """Field -> message of what `check` finds."""
    found = rules.check(spec(**changes))
    assert len({violation.field for violation in found}) == len(found), found
    return {violation.field: violation.message for violation in found}


def test_the_usual_specs_are_legal() -> None:
    for changes in (
        {},
        {"head_dim": 192, "per_sm": 1},
        {"rotate": True, "scale": "token"},
        {"transpose": True, "scale": "block"},
        {"rows": 4, "threads": 32, "per_sm": 16},
    ):
        assert violations(**changes) == {}
        assert rules.warnings(spec(**changes)) == []


@pytest.mark.parametrize(("head_dim", "way_out"), [(80, "64 or 128"), (32, "64"), (288, "256 or 320")])
def test_quantize_head_dim(head_dim: int, way_out: str) -> None:
    """8 threads x 8 elements."""
    assert quantizes.quantize_head_dim(64) is quantizes.quantize_head_dim(192) is None
    assert quantizes.quantize_head_dim(head_dim) == Violation(
        "problem.head_dim",
        f"8 threads of a row have vectors of 8 elements: a multiple of 64, not {head_dim}; use {way_out}",
    )
    assert list(violations(head_dim=head_dim)) == ["problem.head_dim"]


def test_quantize_hadamard() -> None:
    assert quantizes.quantize_hadamard(256) is None
    assert quantizes.quantize_hadamard(192) == Violation(
        "problem.rotate",
        "the Hadamard matrices that butterflies multiply by have 2, 4, 8 rows and so on, not 192; use rotate: false, "
        "or a head_dim that is a power of two",
    )
    assert list(violations(head_dim=192, rotate=True)) == ["problem.rotate"]


def test_quantize_threads() -> None:
    assert quantizes.quantize_threads(1024) is None
    assert quantizes.quantize_threads(1056) == Violation(
        "tile.threads", "a CTA has at most 1024 threads, not 1056; use fewer"
    )
    assert list(violations(threads=1056)) == ["tile.threads"]


def test_quantize_warps() -> None:
    assert quantizes.quantize_warps(96) is None
    assert quantizes.quantize_warps(100) == Violation(
        "tile.threads", "a CTA has whole warps of 32 threads, not 100; use 128"
    )
    assert list(violations(threads=100)) == ["tile.threads"]


def test_quantize_rows() -> None:
    """256 threads have 32 rows at once, and 128 that are rotated."""
    assert quantizes.quantize_rows(96, 256, rotate=False) is quantizes.quantize_rows(256, 256, rotate=True) is None
    assert quantizes.quantize_rows(80, 256, rotate=False) == Violation(
        "tile.rows", "256 threads, 8 for a row, have 32 rows at once: a multiple of it, not 80; use 96"
    )
    assert quantizes.quantize_rows(96, 256, rotate=True) == Violation(
        "tile.rows", "256 threads, 4 for two rows of an mma, have 128 rows at once: a multiple of it, not 96; use 128"
    )
    assert list(violations(rows=80)) == list(violations(rows=96, rotate=True)) == ["tile.rows"]


def test_quantize_transposed() -> None:
    """128 rows of 256 threads: 4 of a thread, a word. 512 threads have two each."""
    assert quantizes.quantize_transposed(128, 256) is quantizes.quantize_transposed(256, 256) is None
    assert quantizes.quantize_transposed(192, 128) == Violation(
        "tile.rows",
        "transposed, a column of a tile has a multiple of 8 vectors of 16 rows, which are exchanged against bank "
        "conflicts: 128 rows, not 192; use 256",
    )
    assert quantizes.quantize_transposed(128, 512) == Violation(
        "tile.threads",
        "transposed, a thread packs 4 rows of a column into a word, and 512 threads have 2 of 128 rows each; use 256",
    )
    assert list(violations(rows=64, transpose=True)) == ["tile.rows"]
    assert list(violations(threads=512, per_sm=1, transpose=True)) == ["tile.threads"]


def test_quantize_columns_of_tokens() -> None:
    assert quantizes.quantize_columns_of_tokens("head") is quantizes.quantize_columns_of_tokens("block") is None
    assert quantizes.quantize_columns_of_tokens("token") == Violation(
        "problem.scale",
        "transposed is V, of whose rows P V is a sum, out of which no factor of a row can be taken; use scale: head",
    )
    assert list(violations(scale="token", transpose=True)) == ["problem.scale"]


def test_quantize_permuted() -> None:
    for legal in ((False, False), (False, True), (True, True)):
        assert quantizes.quantize_permuted(*legal) is None
    assert quantizes.quantize_permuted(True, False) == Violation(
        "problem.permute_keys",
        "keys are permuted of V whose sequence is contiguous; leave permute_keys out, or use transpose: true",
    )
    assert list(violations(permute_keys=True)) == ["problem.permute_keys"]
    assert not violations(permute_keys=True, transpose=True, scale="block")


def test_quantize_registers() -> None:
    """64 + 16 + 32 are 112 a thread; x 256 x 2 = 57,344 of 65,536. Four times as many values are 304."""
    assert quantizes.quantize_registers(256, 2, HELD) is None
    assert quantizes.quantize_registers(256, 3, HELD) == Violation(
        "tile.per_sm",
        "registers per SM: values 64 + signs 16 + addresses and counters 32 = 112, rounded up to 112; x 256 threads "
        "x 3 CTAs = 86016 > 65536; use at most 2",
    )
    assert quantizes.quantize_registers(256, 1, [("values", 256), *HELD[1:]]) == Violation(
        "tile.rows",
        "registers: values 256 + signs 16 + addresses and counters 32 = 304 for each of 256 threads, of 255 for a "
        "thread and 65536 for an SM; use fewer rows",
    )
    assert list(violations(rotate=True, per_sm=3)) == ["tile.per_sm"]
    assert list(violations(rotate=True, rows=512)) == ["tile.rows"]


@pytest.mark.parametrize(
    "head_dim, tile, most", [(64, (128, 256), 5), (128, (128, 256), 3), (128, (64, 128), 5)], ids=["64", "128", "token"]
)
def test_a_rotation_has_registers_enough_where_a_launch_bounds_them(
    head_dim: int, tile: tuple[int, int], most: int
) -> None:
    """As compiled: 48, 80 and 96 a thread without spills; for one CTA more ptxas spills 8, 144 and 120 bytes."""
    rows, threads = tile
    facts = {"head_dim": head_dim, "rows": rows, "threads": threads, "rotate": True}
    facts["scale"] = "block" if rows == 128 else "token"
    assert violations(**facts, per_sm=most) == {}
    told = violations(**facts, per_sm=most + 1)["tile.per_sm"]
    assert told.endswith(f"use at most {most}") and (" + scales of rows 16 = 96" in told) == (rows == 64)


def test_quantize_smem() -> None:
    """233,472 bytes of an SM, of which 1,024 go with each CTA: 13 of 16,416 + 1,024."""
    assert quantizes.quantize_smem(13, 16416) is None
    assert quantizes.quantize_smem(14, 16416) == Violation(
        "tile.per_sm", "14 CTAs of 16416 + 1024 bytes of shared memory are 244160 > 233472; use at most 13"
    )
    assert quantizes.quantize_smem(1, 240000) == Violation(
        "tile.rows", "a CTA takes 240000 bytes of shared memory; use fewer rows"
    )
