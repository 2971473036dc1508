"""The CPU model on tests/gpu's probes: WGMMA products and TMA boxes against NumPy, without any attention around them.

A few variants of each; `tests/gpu/compare_cpu_model.py` runs all of them, on a GPU too.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))

import compare_cpu_model as runner

from fa3gen.cpu.findings import Hazard, Kind

PRODUCTS = (
    "bf16_f32_n64k128_mn_sw64_k_sw32",
    "f16_f16_n64k128_registers_mn_sw128",
    "e4m3_f32_n8k128_k_sw128_k_sw128",
    "e5m2_e4m3_f16_n64k256_registers_k_sw128",
)
RAGGED = ("rank2_bf16_swizzle128_ragged", "rank3_bf16_swizzle0_ragged", "rank2_f32_swizzle32_ragged")
COPIES = ("rank2_bf16_swizzle64", "rank5_bf16_swizzle32", *RAGGED)


def _variant(kind: str, name: str) -> Any:
    return next(variant for variant in runner.probe(kind).VARIANTS if variant.name == name)


@pytest.mark.parametrize("kind", runner.PROBES)
def test_variants_have_names_of_their_own(kind: str) -> None:
    names = [variant.name for variant in runner.probe(kind).VARIANTS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", runner.PROBES)
def test_source_changes_the_variant_and_nothing_else(kind: str) -> None:
    probe = runner.probe(kind)
    variant = probe.VARIANTS[-1]
    own = Path(probe.__file__).read_text(encoding="utf-8").splitlines()
    changed = [line for old, line in zip(own, probe.source(variant).splitlines(), strict=True) if old != line]
    assert changed == [f"VARIANT = {variant!r}"]


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name: str) -> None:
    """Within the bound of any order of additions in the accumulator's precision: terms x half an ulp x sum |a b|.

    Of 8-bit operands each instruction cuts its 32 products and the sum so far, and what comes out, to 13 bits.
    """
    variant = _variant("wgmma", name)
    result = runner.perform(runner.Task("wgmma", name), "cpu")
    assert result.error is None, result.error
    a, b = (operand.double().numpy() for operand in runner.product_operands(variant)["normal"])
    magnitude = np.abs(a) @ np.abs(b).T
    rounding = variant.k * 2.0**-24
    if not variant.wide:
        rounding += variant.k / 32 * (32 + 2) * 2.0**-13
    if variant.accumulator == "f16":
        rounding += variant.k / (16 if variant.wide else 32) * 2.0**-11  # once for each instruction
    error = np.abs(result.arrays["normal/d"] - a @ b.T)
    assert (error <= rounding * magnitude).all(), (error / magnitude).max()


@pytest.mark.parametrize("name", PRODUCTS[:1] + PRODUCTS[-1:])
def test_product_of_special_values(name: str) -> None:
    variant = _variant("wgmma", name)
    result = runner.perform(runner.Task("wgmma", name), "cpu")
    assert result.error is None, result.error
    d = result.arrays["special/d"]
    a, b = (operand.double().numpy() for operand in runner.product_operands(variant)["special"])
    with np.errstate(invalid="ignore"):
        exact = (a[:, None, :] * b[None, :, :]).sum(-1)
    assert np.isnan(d[2]).all()
    if variant.accumulator == "f32":  # f16 overflows where float64 does not
        np.testing.assert_array_equal(np.isnan(d), np.isnan(exact))
        np.testing.assert_array_equal(np.isposinf(d), np.isposinf(exact))
        np.testing.assert_allclose(d[3], exact[3], rtol=1e-5, atol=0)  # subnormal operands count


@pytest.mark.parametrize("name", COPIES)
def test_copy(name: str) -> None:
    variant = _variant("tma", name)
    result = runner.perform(runner.Task("tma", name), "cpu")
    assert result.error is None, result.error
    source, target = runner.copy_tensors(variant)
    for number, (load_at, store_at) in enumerate(runner.copy_places(variant)):
        box, stored = _copied(variant, source, target, load_at, store_at)
        address = np.arange(variant.box_bytes)
        chunks = max(variant.swizzle, 16) // 16
        swizzle = (address >> 7) % chunks << 4  # 16-byte chunks XOR the number of the 128-byte line
        image = result.arrays[f"{number}/shared"]
        np.testing.assert_array_equal(image[address ^ swizzle], box.ravel())
        np.testing.assert_array_equal(result.arrays[f"{number}/stored"].ravel(), stored.ravel())
        assert (stored != target).any()
        assert number == 0 or not box.all(axis=-1).all(), "no part of the box lies outside"


def test_a_store_before_the_tensor_is_reported(tmp_path: Path) -> None:
    variant = _variant("tma", COPIES[0])
    function, _ = runner.compiled_probe("tma", variant, "cpu", tmp_path)
    x, y = (runner.copy_argument(variant, runner.copy_memory(variant, data)) for data in runner.copy_tensors(variant))
    before = [0, -1]
    image = torch.zeros(variant.box_bytes, dtype=torch.uint8)
    function(x, y, image, torch.tensor([before, [0, 0]], dtype=torch.int32))
    with pytest.raises(Hazard) as raised:
        function(x, y, image, torch.tensor([[0, 0], before], dtype=torch.int32))
    assert raised.value.kind is Kind.OUT_OF_BOUNDS


@pytest.mark.parametrize("name", RAGGED)
def test_a_row_that_ends_within_16_bytes_is_stored_to_their_end(name: str) -> None:
    """Elements beyond the end of a row, up to whole 16 bytes, are overwritten; none after those are."""
    variant = _variant("tma", name)
    result = runner.perform(runner.Task("tma", name), "cpu")
    _, target = runner.copy_tensors(variant)
    changed = (result.arrays["1/stored"].reshape(target.shape) != target).any(axis=tuple(range(variant.rank - 1)))
    end = variant.extents[0]
    whole = -(-end * target.shape[-1] // 16) * 16 // target.shape[-1]
    assert end < whole and changed[end:whole].any() and not changed[whole:].any()


def _copied(variant: Any, source: Any, target: Any, load_at: Any, store_at: Any) -> tuple[Any, Any]:
    """(the box, zero outside the tensor; the target after the store), element by element."""
    width, extents, box = source.shape[-1], tuple(reversed(variant.extents)), variant.box
    loaded = np.zeros((*reversed(box), width), np.uint8)
    stored = target.copy()
    stored_to = (*extents[:-1], -(-extents[-1] * width // 16) * 16 // width)  # whole units of 16 bytes

    def place(index: tuple[int, ...], start: Any, ends: tuple[int, ...]) -> tuple[int, ...] | None:
        found = tuple(i + first for i, first in zip(index, reversed(start), strict=True))
        return found if all(0 <= i < end for i, end in zip(found, ends, strict=True)) else None

    for index in itertools.product(*(range(extent) for extent in reversed(box))):
        if (origin := place(index, load_at, extents)) is not None:
            loaded[index] = source[origin]
        if (goal := place(index, store_at, stored_to)) is not None:
            stored[goal] = loaded[index]
    return loaded, stored


def test_a_failing_task_is_a_result() -> None:
    result = runner.perform(runner.Task("wgmma", "no such variant"), "cpu")
    assert result.error is not None and "StopIteration" in result.error


def test_operands_of_a_variant_are_the_same_every_time() -> None:
    variant = _variant("wgmma", PRODUCTS[0])
    first, second = runner.product_operands(variant), runner.product_operands(variant)
    for operands in first:
        for one, other in zip(first[operands], second[operands], strict=True):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16))
