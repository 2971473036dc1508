"""Sums as the tensor core adds them: what an H200 computed, bit for bit, and cases by hand.

`tests/gpu/compare_cpu_model.py sums` writes the data from a run on a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hosting import module
from numpy.typing import NDArray

from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.tensor_core import add_products
from fa3gen.cpu.wgmma import decode

PRODUCTS: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "tensor_core_sums.json").read_text(encoding="utf-8")
)["products"]


def matrix(rows: list[str], type_: str) -> NDArray[np.float32]:
    return decode(np.stack([np.frombuffer(bytes.fromhex(row), np.uint8) for row in rows]), type_)


def same(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> bool:
    """Bit for bit, any NaN like any other."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype == np.float32
    return bool(((found.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(found) & np.isnan(wanted))).all())


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: "-".join([*product["types"], product["operands"]]))
def test_the_bits_of_a_gpu(product: dict[str, Any]) -> None:
    a_type, b_type, accumulator = product["types"]
    a, b = matrix(product["a"], a_type), matrix(product["b"], b_type)
    wanted = np.stack([np.frombuffer(bytes.fromhex(row), np.float32) for row in product["d"]])
    zero = np.zeros(wanted.shape, np.float32)
    assert same(add_products(a, b, zero, types=(a_type, b_type), accumulator=accumulator), wanted)
    if product["operands"] == "normal":  # else the test would not tell these sums from others
        with np.errstate(all="ignore"):
            assert not same(a @ b.T, wanted)


def test_types_of_all_kinds_are_among_them() -> None:
    assert {tuple(product["types"]) for product in PRODUCTS} >= {
        ("bf16", "bf16", "f32"),
        ("f16", "f16", "f32"),
        ("f16", "f16", "f16"),
        ("e4m3", "e4m3", "f32"),
        ("e4m3", "e5m2", "f16"),
    }


def one(a: list[float], b: list[float], c: float = 0.0, type_: str = "e4m3") -> float:
    """A single element of D."""
    depth = {"e4m3": 32, "bf16": 16}[type_]
    rows = [np.array([[*values, *[0.0] * (depth - len(values))]], np.float32) for values in (a, b)]
    found = add_products(*rows, np.array([[c]], np.float32), types=(type_, type_), accumulator="f32")
    return float(found[0, 0])


def test_what_is_left_of_small_addends() -> None:
    """Beside 1, addends of FP8 are kept down to 2^-13; each is cut off by itself, towards zero, before the sum."""
    assert one([1, 2**-7], [1, 2**-6]) == 1 + 2**-13
    assert one([1, 2**-7], [1, 2**-7]) == 1
    assert one([1, 2**-7, 2**-7], [1, 2**-7, 2**-7]) == 1  # together they would be 2^-13
    assert one([1, -(2**-7)], [1, 2**-7]) == 1
    assert one([1, 2**-7], [1, 1.75 * 2**-6]) == 1 + 2**-13  # not rounded up
    assert one([2**-7], [2**-7], c=1.0) == 1  # the accumulator is an addend like any other


def test_the_exponents_of_products_are_those_of_their_factors() -> None:
    """1.75 x 1.75 is lined up as 2^0 although it is 3.06."""
    assert one([1.75, 2**-7, -1.75], [1.75, 2**-6, 1]) == 1.75 * 1.75 - 1.75 + 2**-13
    assert one([3, 2**-7, -1.75], [1, 2**-6, 1]) == 3 - 1.75
    assert one([1.75, 2**-7], [1.75, 2**-6]) == 1.75 * 1.75  # the sum is 2^1 or more, and has 13 bits of fraction left


def test_16_bit_operands_lose_the_last_bit_of_float32_only() -> None:
    assert one([1, 2**-12], [1, 2**-11], type_="bf16") == 1 + 2**-23
    assert one([1, 2**-12, 2**-12], [1, 2**-12, 2**-12], type_="bf16") == 1 + 2**-23  # two halves of the last bit
    assert one([1, 1.5 * 2**-12], [1, 2**-11], type_="bf16") == 1 + 2**-23  # cut off
    assert one([-1, -1.5 * 2**-12], [1, 2**-11], type_="bf16") == -1 - 2**-23


def test_nothing_is_zero_and_not_a_number_stays_one() -> None:
    assert one([0], [1]) == 0 and one([0], [0], c=-2.5) == -2.5
    assert np.isnan(one([float("nan")], [1])) and one([float("inf")], [2], type_="bf16") == float("inf")
    assert np.isnan(one([float("inf"), float("-inf")], [2, 2], type_="bf16"))


def test_a_kernel_adds_as_it_is_told() -> None:
    """Attention in both ways: LSE has other bits, and no more than the last ones."""
    import torch

    attention = module("k4_2_d64")
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, 70, 2, 64, generator=generator).bfloat16() for _ in range(3))
    found = {}
    try:
        for sums in ("float32", "tensor_core"):
            attention.cpu.settings = Settings(sums=sums)
            _, found[sums] = attention.attention(q, k, v, return_lse=True)
    finally:
        attention.cpu.settings = Settings()
    apart = (found["float32"] - found["tensor_core"]).abs().max().item()
    assert 0 < apart < 2e-6
