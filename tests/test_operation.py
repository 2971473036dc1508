"""What modules work on: dtypes, tensors, scratch and bytes, by hand."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from rendering import changed, variants

from fa3gen.design.family import Family, Shape
from fa3gen.design.operation import Scratch, Tensor, operation_of
from fa3gen.hardware import hopper
from fa3gen.hardware.dtypes import DTYPES, INT32
from fa3gen.spec.gemm import GemmDType
from fa3gen.spec.model import DType, OutputDType, StoredDType

SHAPE = Shape(batch=2, seq_q=300, seq_k=500, heads_q=8, heads_kv=4)


# Dtypes


@pytest.mark.parametrize(("name", "bits"), [("bf16", 16), ("fp16", 16), ("fp32", 32), ("e4m3", 8), ("e5m2", 8)])
def test_a_dtype_is_the_one_that_torch_has_by_that_name(name: str, bits: int) -> None:
    dtype = DTYPES[name]
    found = dtype.in_torch()
    assert str(found) == dtype.torch_name
    assert found.itemsize == dtype.bytes == bits // 8 and dtype.bits == bits


def test_what_a_spec_may_name_is_in_the_table() -> None:
    assert {*get_args(OutputDType), *get_args(GemmDType), *get_args(StoredDType)} == set(DTYPES)
    assert set(get_args(DType)) < set(get_args(GemmDType))


def test_counters_have_a_dtype_that_no_spec_names() -> None:
    assert INT32.in_torch() == torch.int32 and INT32.name not in DTYPES


def test_a_wgmma_takes_32_bytes_of_depth() -> None:
    assert DTYPES["bf16"].wgmma_k == DTYPES["fp16"].wgmma_k == hopper.WGMMA_K_16BIT == 16
    assert DTYPES["e4m3"].wgmma_k == 32


# Tensors


def test_a_shape_of_equal_sequences_is_a_shape_of_packed_ones() -> None:
    """The same bytes as of dense tensors, and two arrays of offsets and two of lengths."""
    packed = changed("fwd_d128_causal", problem={"layout": "packed"}).spec
    sizes = {tensor.name: tensor.sizes(SHAPE) for tensor in operation_of(packed).tensors}
    assert sizes["q"] == sizes["out"] == (600, 8, 128) and sizes["k"] == sizes["v"] == (1000, 4, 128)
    assert sizes["lse"] == (8, 600) and sizes["cu_seqlens_q"] == (3,) and sizes["seqused_k"] == (2,)
    dense = operation_of(changed("fwd_d128_causal").spec).bytes(SHAPE)
    assert operation_of(packed).bytes(SHAPE) == dense + 4 * (2 * 3 + 2 * 2)


def names(stem: str) -> list[str]:
    return [argument.name for argument in operation_of(variants()[stem].spec).arguments]


def test_the_arguments_of_a_launch_in_order() -> None:
    assert names("k4_2_d128") == ["q", "k", "v", "out", "lse", "scale"]
    assert names("k1_d128") == ["q", "k", "v", "out", "lse", "scores", "scale"]
    assert names("k4_2_o_only_d128_causal") == ["q", "k", "v", "out", "scale"]
    assert names("fwd_d128_causal") == ["q", "k", "v", "out", "lse", "num_sms", "counter", "scale"]
    assert names("fwd_d128") == ["q", "k", "v", "out", "lse", "num_sms", "flags", "parts", "scale"]


def test_sinks_and_the_cap_stand_before_what_is_scheduled() -> None:
    assert names("fwd_d64_sink_causal") == ["q", "k", "v", "out", "lse", "sinks", "num_sms", "counter", "scale"]
    both = "k4_scores_d64_window200_70"
    assert names(both) == ["q", "k", "v", "out", "lse", "sinks", "softcap", "scale"]
    operation = operation_of(variants()[both].spec)
    assert [str(tensor) for tensor in operation.inputs] == ["q", "k", "v"]
    assert [str(tensor) for tensor in operation.given] == ["q", "k", "v", "out"]
    assert operation.tensor("sinks").sizes(SHAPE) == (8,)


def test_a_family_tells_modules_with_sinks_or_a_cap_apart() -> None:
    plain, sunk, capped = (
        Family.of(variants()[stem].spec)
        for stem in ("fwd_d64_causal", "fwd_d64_sink_causal", "fwd_d256_softcap_causal")
    )
    assert sunk == plain._replace(sink=True) and sunk.keywords == ("sinks",) and plain.keywords == ()
    assert (sunk.label, capped.label) == ("bf16_d64_causal_sink", "bf16_d256_causal_softcap")
    assert str(sunk) == "bf16, head dim 64, causal, sinks" and str(capped).endswith("causal, softcap")
    any_cap = Family.of(changed("fwd_d256_softcap_causal", softmax={"row_max": "online"}).spec)
    assert any_cap.label == "bf16_d256_causal_softcap_any" and str(any_cap).endswith("causal, softcap of any size")


def test_shapes_and_dtypes_of_tensors() -> None:
    operation = operation_of(variants()["fwd_d192_128"].spec)
    assert {tensor.name: (tensor.sizes(SHAPE), tensor.dtype.name) for tensor in operation.tensors} == {
        "q": ((2, 300, 8, 192), "bf16"),
        "k": ((2, 500, 4, 192), "bf16"),
        "v": ((2, 500, 4, 128), "bf16"),
        "out": ((2, 300, 8, 128), "bf16"),
        "lse": ((2, 8, 300), "fp32"),
    }
    assert [str(extent) for extent in operation.tensor("v").dims] == ["batch", "seq_k", "heads_kv", "HEAD_DIM_V"]
    assert operation.tensor("q").row == 192
    assert [operation.tensor(name).vector for name in ("q", "out", "lse")] == [8, 8, 1]  # in 16, 16 and 4 bytes
    assert operation_of(variants()["fwd_d128_fp32_out"].spec).tensor("out").vector == 4
    with pytest.raises(ValueError, match="lse has as many elements"):
        assert operation.tensor("lse").row
    with pytest.raises(KeyError):
        operation.tensor("bias")


def test_scratch_and_what_stands_in_it() -> None:
    operation = operation_of(variants()["fwd_d128"].spec)
    assert {each.name: (each.sizes(SHAPE, 132), each.initial, each.kept) for each in operation.scratch} == {
        "flags": ((132, 8), "zero", True),
        "parts": ((132, 17, 256, 4), "anything", True),  # 16 vectors of O, one of maxima and sums
    }
    (scores,) = operation_of(variants()["k1_d128"].spec).scratch
    assert (scores.sizes(SHAPE, 132), scores.initial, scores.kept) == ((2, 8, 300, 500), "anything", False)


@pytest.mark.parametrize("stem", ["k2_d64", "k3_2_d64", "k4_2_d64", "fwd_d128", "fwd_d256", "fwd_d128_fp32_out"])
def test_how_tensors_are_moved(stem: str) -> None:
    """O goes by TMA where the plan expects such stores."""
    spec = variants()[stem].spec
    operation = operation_of(spec)
    assert {tensor.moved for tensor in operation.inputs} == {"threads" if stem == "k2_d64" else "tma"}
    assert operation.tensor("out").moved == ("tma" if stem in ("k4_2_d64", "fwd_d128") else "threads")


def test_kernels_of_a_launch() -> None:
    assert {operation_of(variants()[stem].spec).kernels for stem in ("k1_d64", "k1_d128_causal")} == {3}
    assert operation_of(variants()["fwd_d128"].spec).kernels == 1


# Bytes and families


def test_bytes_by_hand() -> None:
    q_rows, kv_rows = 2 * 300 * 8, 2 * 500 * 4
    tensors = (q_rows + kv_rows) * 2 * 128 * 2 + q_rows * 4
    assert operation_of(variants()["fwd_d128"].spec).bytes(SHAPE) == tensors
    assert operation_of(variants()["k1_d128"].spec).bytes(SHAPE) == tensors + 5 * q_rows * 500 * 4
    # O in float32: two bytes more for each element.
    assert operation_of(variants()["fwd_d128_fp32_out"].spec).bytes(SHAPE) == tensors + q_rows * 128 * 2


def test_o_in_float32_is_the_only_difference() -> None:
    narrow, wide = (operation_of(variants()[stem].spec) for stem in ("fwd_d128", "fwd_d128_fp32_out"))
    differing = [
        (a.name, b.dtype.name)
        for a, b in zip(narrow.arguments, wide.arguments, strict=True)
        if isinstance(a, Tensor | Scratch) and isinstance(b, Tensor | Scratch) and a.dtype != b.dtype
    ]
    assert differing == [("out", "fp32")]


def test_a_family_tells_modules_of_float32_o_apart() -> None:
    narrow, wide = (Family.of(variants()[stem].spec) for stem in ("fwd_d128_causal", "fwd_d128_causal_fp32_out"))
    assert wide == narrow._replace(out_dtype="fp32")
    assert (narrow.label, wide.label) == ("bf16_d128_causal", "bf16_d128_causal_o_fp32")
    assert str(wide) == "bf16, O in fp32, head dim 128, causal"
    assert wide.flops(SHAPE) == narrow.flops(SHAPE)
    assert Family.of(changed("fwd_d128_causal", o={"dtype": "bf16"}).spec) == narrow
