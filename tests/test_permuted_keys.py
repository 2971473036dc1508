"""A v of 8 bits whose keys are permuted: their order, what a spec makes of them, what modules are given and refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from rendering import CHECKOUT, spec_of, spec_with

from fa3gen.cpu.module import load_on_cpu
from fa3gen.cpu.wgmma import FP8_VALUES, accumulator_vectors, fragment_matrix
from fa3gen.design import work
from fa3gen.design.family import Family, Shape
from fa3gen.design.key_order import ORDER, UNIT, whole_units
from fa3gen.design.operation import operation_of
from fa3gen.verify import comparison, inputs, reference
from fa3gen.verify.attention_on_cpu import CpuRunner
from fa3gen.verify.inputs import Case, permuted_keys

MODULES = [f"fwd_fp8_v_permuted_d{dim}{mask}" for dim in (64, 128) for mask in ("", "_causal")]
CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn


# The order


def test_the_order_is_that_of_both_fragments() -> None:
    """A register of P that a thread packs of what it has of S is what WGMMA reads as the keys at four positions."""
    scores = np.tile(np.arange(32, dtype=np.float32), (64, 1))  # of a row the numbers of its keys
    held = accumulator_vectors(scores, "f32")  # (2 of 8 keys, 2 rows, 4 eights) values of each thread
    registers = []
    for row_and_half in range(4):  # of the A operand: first row, second row, and the same of the other 16 keys
        row, half = row_and_half % 2, row_and_half // 2
        values = [held[2 * row + pair + 4 * (2 * half + eight)] for eight in (0, 1) for pair in (0, 1)]
        registers.append(sum(v.astype(np.uint32) << np.uint32(8 * byte) for byte, v in enumerate(values)))
    read = fragment_matrix([np.asarray(register, np.uint32) for register in registers], "e4m3")
    wanted = FP8_VALUES["e4m3"][[*ORDER, *(16 + key for key in ORDER)]]  # of each number another value
    assert read.shape == (64, 32) and len(set(wanted)) == 32 and (read == wanted).all()


def test_keys_are_permuted_within_whole_units() -> None:
    assert sorted(ORDER) == list(range(UNIT)) and ORDER[:8] == (0, 1, 8, 9, 2, 3, 10, 11)
    assert [whole_units(keys) for keys in (0, 1, 16, 17)] == [0, 16, 16, 32]
    v = torch.arange(2 * 21 * 3 * 16).remainder(97).view(2, 21, 3, 16).float().to(E4M3)
    made = permuted_keys(v, fill=3.0)
    assert made.shape == (2, 32, 3, 16) and made.stride() == (3 * 16 * 32, 1, 16 * 32, 32)
    for position in range(32):
        key = position // UNIT * UNIT + ORDER[position % UNIT]
        wanted = v[:, key].float() if key < 21 else torch.full((2, 3, 16), 3.0)
        assert made[:, position].float().equal(wanted)


# The spec


@pytest.mark.parametrize("stem", MODULES)
def test_what_follows_from_the_spec(stem: str) -> None:
    """A family of its own, v of whole units of keys, no exchange, and all else as with keys in order."""
    spec = spec_of(stem)
    family, other = Family.of(spec), spec_with(stem, problem={"v_keys": "in_order"})
    assert family.v_permuted and family == Family.of(other)._replace(v_permuted=True)
    assert not family.serves(Family.of(other)) and not Family.of(other).serves(family)
    assert family.label.endswith("_sequence_v_permuted") and "sequence in v, its keys permuted" in str(family)
    shape = Shape(2, 5, 33, 4, 2)
    assert operation_of(spec).tensor("v").sizes(shape) == (2, 48, 2, family.head_dim)
    assert operation_of(other).tensor("v").sizes(shape) == operation_of(spec).tensor("k").sizes(shape)
    *alike, rounded = work.score_phases(spec)
    *others, with_exchange = work.score_phases(other)
    assert alike == others and with_exchange - rounded == work.EXCHANGE_8BIT * spec.tile.kv // UNIT
    text = CHECKOUT.module_path(stem).read_text(encoding="utf-8")
    assert "v is given with its keys in the order in which a thread has them" in text and "GIVERS" not in text


# What modules are given


@pytest.mark.parametrize("layout", ["padded", "contiguous", "transposed", "packed", "expanded", "odd_strides"])
def test_inputs_have_v_both_ways(layout: Any) -> None:
    """The reference is given v in order, the module the same numbers permuted, finite ones behind the last key."""
    case = Case("both", "", 2, 21, 21, 2, 2, layout=layout)
    made = inputs.make_for(spec_of(MODULES[0]), case, device=CPU, seed=1)
    usual = inputs.make_for(spec_of("k7_v_k_d64"), case, device=CPU, seed=1)
    assert made.v_in_order is not None and made.v.shape == (2, 32, 2, 64) and made.v.stride(1) == 1
    assert made.v_in_order.float().equal(usual.v.float()) and made.q.float().equal(usual.q.float())
    wanted = permuted_keys(usual.v, fill=inputs.BEHIND_LAST_KEY)
    assert made.v.float().equal(wanted.float()) and usual.v_in_order is None
    for ours, others in zip(made.parts[0], usual.parts[0], strict=True):
        assert ours.double().equal(others.double())
    if layout == "padded":  # what lies around it would show
        assert torch.as_strided(made.v, (1,), (1,), made.v.storage_offset() + 32).isnan().all()


def test_the_comparison_with_a_gpu_has_v_both_ways() -> None:
    case = comparison.CASES[2]
    made, usual = (comparison.make_for(spec_of(stem), case) for stem in (MODULES[0], "k7_v_k_d64"))
    assert made.v.shape[1] == whole_units(case.seq_k) and made.values.float().equal(usual.v.float())
    assert made.v.float().equal(permuted_keys(usual.v, fill=0.0).float())


def test_another_order_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU model's cases fail for keys in order, and for two keys that trade places."""
    stem = "fwd_fp8_v_permuted_d64_causal"
    case = Case("wrong", "", 1, 40, 70, 1, 1)
    runner = CpuRunner(load_on_cpu(CHECKOUT.module_path(stem)), spec_of(stem), 1, 1)
    assert runner.run_case(case).failures == ()
    swapped = list(ORDER)
    swapped[2], swapped[3] = swapped[3], swapped[2]
    for order in (range(UNIT), swapped):
        monkeypatch.setattr(inputs, "ORDER", tuple(order))
        [failure] = runner.run_case(case).failures
        assert failure.startswith("O is off by")


def test_a_module_says_which_shape_it_needs() -> None:
    """Also where there is nothing to compute."""
    module = load_on_cpu(CHECKOUT.module_path("fwd_fp8_v_permuted_d64_causal"))
    for keys in (21, 0):
        q, k = torch.zeros(1, 3, 2, 64).to(E4M3), torch.zeros(1, keys, 1, 64).to(E4M3)
        v = torch.zeros(1, 21, 1, 64).to(E4M3)
        needed = (
            rf"v has shape \(1, 21, 1, 64\); with its keys permuted it needs to be \(1, {whole_units(keys)}, 1, 64\)"
        )
        with pytest.raises(ValueError, match=needed + f", {keys} keys in whole units of 16"):
            module.attention(q, k, v)
        out = module.attention(q, k, permuted_keys(torch.ones(1, keys, 1, 64).to(E4M3), fill=0.0))
        exact = reference.attention(q, k, torch.ones(1, keys, 1, 64), reach=(None, 0)).out
        assert (out.double() - exact).abs().max() < 1e-2
