"""Tensor maps: those that host code writes against the tensors they describe, and what a driver refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hosting import RecordedProgram, path_of, program
from rendering import CHECKOUT, changed

from fa3gen.compile.cache import cached_compile
from fa3gen.cpu.tensor_map import TENSOR_MAP_BYTES, TensorMap, TensorMapError, decode
from fa3gen.design import rules
from fa3gen.generate.render import render_variant
from fa3gen.verify import inputs

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

BASE = TensorMap(
    address=0x7F0000001000,
    element_type="bf16",
    element_bytes=2,
    dims=(128, 100, 4, 2),
    strides=(2, 1024, 256, 102400),
    box=(64, 128, 1, 1),
    element_strides=(1, 1, 1, 1),
    swizzle=128,
    l2_promotion=128,
)


def described(tensor: torch.Tensor, box: tuple[int, ...], swizzle: int) -> TensorMap:
    """The map of a (batch, seq, heads, d) tensor, whose modes the kernels order as (d, seq, heads, batch)."""
    order = (3, 1, 2, 0)
    size = tensor.element_size()
    return TensorMap(
        address=tensor.data_ptr(),
        element_type={torch.bfloat16: "bf16", torch.float16: "f16"}[tensor.dtype],
        element_bytes=size,
        dims=tuple(tensor.shape[mode] for mode in order),
        strides=tuple(tensor.stride(mode) * size for mode in order),
        box=(*box, 1, 1),
        element_strides=(1, 1, 1, 1),
        swizzle=swizzle,
        l2_promotion=128,
    )


def maps_of(recorded: RecordedProgram, tensors: Tensors) -> list[TensorMap]:
    """The tensor maps of one launch, in the order of the kernel's parameters."""
    q, _, _, _ = tensors
    _, parameters = recorded.launch(*tensors, torch.empty(q.shape[0], q.shape[2], q.shape[1]), 1.0)
    return [decode(parameter) for parameter in parameters if len(parameter) == TENSOR_MAP_BYTES]


def zeros(batch: int, seq_q: int, seq_k: int, heads: int, dim: int, dtype: torch.dtype) -> Tensors:
    q, o = (torch.zeros(batch, seq_q, heads, dim, dtype=dtype) for _ in range(2))
    k, v = (torch.zeros(batch, seq_k, heads, dim, dtype=dtype) for _ in range(2))
    return q, k, v, o


# Maps that host code writes


@pytest.mark.parametrize(
    "case", [case for case in inputs.CASES if "odd" not in case.layout], ids=lambda case: case.name
)
def test_every_layout_of_the_inputs(case: inputs.Case) -> None:
    drawn = inputs.make(case, head_dim=128, dtype=torch.bfloat16, device=torch.device("cpu"), seed=1)
    tensors = (drawn.q, drawn.k, drawn.v, drawn.out)
    maps = maps_of(program("k4_2_d128"), tensors)
    boxes = ((64, 128), (64, 64), (64, 64), (64, 128))  # tile rows of Q, K, V and O; 64 columns span 128 bytes
    assert maps == [described(tensor, box, 128) for tensor, box in zip(tensors, boxes, strict=True)]
    assert [found.violations() for found in maps] == [()] * 4


@pytest.mark.parametrize("name", ["one", "odd_strides"])
def test_odd_strides_of_single_dimensions_are_dropped(name: str) -> None:
    """A driver would refuse their 6 bytes. The encoder drops the low 4 bits, and no coordinate but 0 uses the rest."""
    case = next(case for case in inputs.CASES if case.name == name)
    drawn = inputs.make(case, head_dim=128, dtype=torch.bfloat16, device=torch.device("cpu"), seed=1)
    found, *_ = maps_of(program("k4_2_d128"), (drawn.q, drawn.k, drawn.v, drawn.out))
    given = described(drawn.q, (64, 128), 128)
    single = [extent == 1 for extent in given.dims]
    assert 6 in given.strides and any("past a multiple of 16" in sentence for sentence in given.violations())
    assert found == replace(
        given, strides=tuple(0 if one else stride for one, stride in zip(single, given.strides, strict=True))
    )
    assert found.violations() == ()


SPAN = {"none": 0, "32B": 32, "64B": 64, "128B": 128}


@pytest.mark.parametrize(
    ("stem", "dtype", "swizzles"),
    [
        ("k4_2_d128", "bf16", {"k": "64B", "v": "32B"}),
        ("k4_2_d64", "bf16", {"k": "none", "v": "64B"}),
        ("k4_2_d64", "fp16", {"q": "64B", "k": "32B"}),
    ],
)
def test_every_swizzle_and_type(tmp_path: Path, stem: str, dtype: str, swizzles: dict[str, str]) -> None:
    variant = changed(stem, problem={"dtype": dtype}, smem=swizzles)
    assert rules.check(variant.spec) == []
    recorded = RecordedProgram(cached_compile(path_of(tmp_path, "variant", render_variant(variant, CHECKOUT))))
    tensors = zeros(
        2, 130, 70, 2, variant.spec.problem.head_dim, getattr(torch, {"bf16": "bfloat16"}.get(dtype, "float16"))
    )
    maps = maps_of(recorded, tensors)
    for name, tensor, found in zip("qkvo", tensors, maps, strict=True):
        span = SPAN[swizzles.get(name, "128B")] if name != "o" else found.swizzle
        # Without a swizzle the canonical layout has rows of 16 bytes, so that is the box.
        assert found == described(tensor, (max(span, 16) // 2, found.box[1]), span), name
        assert found.violations() == ()
    assert [found.box[1] for found in maps] == [128, 64, 64, 128]


def test_strides_of_64_gib(tmp_path: Path) -> None:
    """Their upper bits are kept apart from the lower 36."""
    stride = 2**36 + 48  # bytes
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(stride + 2**20)
    storage: Any = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=stride + 2**20)
    far = torch.empty(0, dtype=torch.bfloat16).set_(storage, 0, (2, 100, 2, 128), (stride // 2, 256, 128, 1))
    maps = maps_of(program("k4_2_d128"), (far, far, far, far))
    assert maps[0] == described(far, (64, 128), 128)
    assert maps[0].strides == (2, 512, 256, stride)
    assert maps[0].violations() == ()


@pytest.mark.parametrize(("rows", "large"), [(511, False), (512, True), (513, True)])
def test_span_is_recorded(rows: int, large: bool) -> None:
    """Bit 21 of word 1: whether the tensor spans 128 KiB. It must agree with what else the map says."""
    q, k, v, o = zeros(1, rows, 64, 1, 128, torch.bfloat16)
    recorded = program("k4_2_d128")
    _, parameters = recorded.launch(q, k, v, o, torch.empty(1, 1, rows), 1.0)
    data = next(parameter for parameter in parameters if len(parameter) == TENSOR_MAP_BYTES)
    assert bool(data[10] & 0x20) is large
    decode(data)
    with pytest.raises(TensorMapError, match=f"span of {rows * 256} bytes"):
        decode(flipped(data, 85))


# Bytes that are no such map


def flipped(data: bytes, bit: int) -> bytes:
    changed_data = bytearray(data)
    changed_data[bit // 8] ^= 1 << bit % 8
    return bytes(changed_data)


@pytest.fixture(scope="module")
def encoded() -> bytes:
    """A map of four dimensions, as host code wrote it."""
    q, k, v, o = zeros(2, 100, 90, 4, 128, torch.bfloat16)
    _, parameters = program("k4_2_d128").launch(q, k, v, o, torch.empty(2, 4, 100), 1.0)
    return next(parameter for parameter in parameters if len(parameter) == TENSOR_MAP_BYTES)


def test_every_bit_counts(encoded: bytes) -> None:
    """No bit of the first half is ignored: changing one gives another map or an error."""
    refused = 0
    for bit in range(512):
        try:
            assert decode(flipped(encoded, bit)) != decode(encoded), bit
        except TensorMapError as error:
            assert "outside the model" in str(error), bit
            refused += 1
    assert 100 < refused < 300


def test_second_half_is_not_read(encoded: bytes) -> None:
    """The host code leaves there what was on its stack."""
    assert decode(encoded[:64] + bytes(64)) == decode(encoded[:64] + b"\xff" * 64)


@pytest.mark.parametrize(
    ("bit", "message"),
    [
        (64 + 15, "word 1 .* bits 0x8000 whose meaning is not known"),  # NaN fill
        (64 + 16, "word 1 .* bits 0x10000 whose meaning is not known"),  # TF32
        (64 + 1, "tiled False"),
        (64 + 17, "L2 promotion 3"),
        (64 + 9, "element type 14"),
        (6 * 64 + 35, "word 6 .* bits 0x800000000 whose meaning is not known"),  # element strides
        (6 * 64, "rank 4 with values in further dimensions"),
    ],
)
def test_unknown_bits_are_named(encoded: bytes, bit: int, message: str) -> None:
    with pytest.raises(TensorMapError, match=f"outside the model: .*{message}"):
        decode(flipped(encoded, bit))


def test_wrong_length(encoded: bytes) -> None:
    with pytest.raises(TensorMapError, match="has 128 bytes; these are 127"):
        decode(encoded[1:])


# What a driver refuses. The verdicts are those of cuTensorMapEncodeTiled on an H200 (driver of CUDA 13.0).


def box0(extent: int, swizzle: int) -> dict[str, Any]:
    return {"box": (extent, 16, 1, 1), "swizzle": swizzle}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"address": 0x7F0000001008}, "address 0x7f0000001008 is 8 past a multiple of 16"),
    ({"address": 2**57}, "address 0x200000000000000 is beyond the 57 bits of addresses"),
    ({"dims": (128, 0, 4, 2)}, "dimension 1 has 0 elements; it needs 1 to 2^32"),
    ({"dims": (0, 100, 4, 2)}, "dimension 0 has 0 elements; it needs 1 to 2^32"),
    ({"dims": (128, 2**32 + 1, 4, 2)}, "dimension 1 has 4294967297 elements; it needs 1 to 2^32"),
    ({"strides": (2, 1024, 256, 24)}, "stride of dimension 3 is 24 bytes, 8 past a multiple of 16"),
    (
        {"dims": (128, 100, 4, 1), "strides": (2, 1024, 256, 6)},
        "stride of dimension 3 is 6 bytes, 6 past a multiple of 16",
    ),
    (
        {"strides": (2, 1024, 256, 2**40)},
        "stride of dimension 3 is 1099511627776 bytes; it needs to be below 2^40",
    ),
    ({"box": (64, 0, 1, 1)}, "box has 0 elements along dimension 1; it needs 1 to 256"),
    ({"box": (64, 257, 1, 1)}, "box has 257 elements along dimension 1; it needs 1 to 256"),
    ({"element_strides": (1, 0, 1, 1)}, "element stride 0 along dimension 1; it needs to be 1 to 8"),
    ({"element_strides": (1, 9, 1, 1)}, "element stride 9 along dimension 1; it needs to be 1 to 8"),
    (box0(12, 0), "rows of the box are 12 elements x 2 bytes = 24 bytes, 8 past a multiple of 16"),
    (box0(24, 32), "rows of the box are 24 elements x 2 bytes = 48 bytes; a swizzle of 32 bytes allows 32"),
    (box0(40, 64), "rows of the box are 40 elements x 2 bytes = 80 bytes; a swizzle of 64 bytes allows 64"),
    (box0(72, 128), "rows of the box are 72 elements x 2 bytes = 144 bytes; a swizzle of 128 bytes allows 128"),
    (
        {"box": (64, 128, 8, 4)},
        "a box is 64 x 128 x 8 x 4 x 2 = 524288 bytes; a CTA has 232448 of shared memory",
    ),
    (
        {"element_type": "u8", "element_bytes": 1, "oob_fill": "nan"},
        "out-of-bounds fill nan with element type u8; it needs a floating-point type",
    ),
]

ACCEPTED: list[dict[str, Any]] = [
    {},
    {"address": 0},
    {"address": 2**56 + 0x100},
    {"dims": (128, 2**32, 4, 2)},
    {"dims": (61, 100, 4, 2)},
    {"strides": (2, 0, 256, 0)},  # expanded dimensions
    {"strides": (2, 1040, 272, 102416)},  # none a multiple of another
    {"strides": (2, 16, 256, 102400)},  # rows that overlap
    {"strides": (2, 1024, 256, 2**40 - 16)},
    {"box": (64, 256, 7, 1)},
    {"element_strides": (1, 8, 1, 1)},
    {"oob_fill": "nan"},
    {"l2_promotion": 0},
    {"l2_promotion": 256},
    box0(256, 0),
    box0(16, 32),
    box0(24, 64),
    box0(64, 128),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=[sentence for _, sentence in REFUSED])
def test_refused_by_a_driver(changes: dict[str, Any], sentence: str) -> None:
    assert replace(BASE, **changes).violations() == (sentence,)


@pytest.mark.parametrize("changes", ACCEPTED, ids=str)
def test_accepted_by_a_driver(changes: dict[str, Any]) -> None:
    assert replace(BASE, **changes).violations() == ()


def test_rank_is_bounded() -> None:
    six = replace(BASE, dims=(64,) * 6, strides=(2, *(128,) * 5), box=(8,) * 6, element_strides=(1,) * 6)
    assert six.violations() == ("rank 6; a tensor map has 1 to 5 dimensions",)
    five = replace(BASE, dims=(64,) * 5, strides=(2, *(128,) * 4), box=(8,) * 5, element_strides=(1,) * 5)
    assert five.violations() == ()
    assert replace(BASE, box=(64, 128)).violations() == ("4 dimensions, but 4 strides, 2 box extents, 4 steps",)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"swizzle": 256}, "swizzle 256; it needs to be 0, 32, 64 or 128 bytes"),
        ({"interleave": 8}, "interleave 8; it needs to be 0, 16 or 32 bytes"),
        ({"interleave": 32}, "interleave 32 with swizzle 128; it needs a swizzle of 32 bytes"),
        ({"l2_promotion": 32}, "L2 promotion 32; it needs to be 0, 64, 128 or 256 bytes"),
        ({"oob_fill": "ones"}, "out-of-bounds fill 'ones'; it needs to be zeros or nan"),
    ],
)
def test_documented_rules_of_modes(changes: dict[str, Any], sentence: str) -> None:
    """From the CUDA Driver API; the driver itself lets interleave 32 pass with any swizzle."""
    assert replace(BASE, **changes).violations() == (sentence,)


def test_several_violations_are_all_named() -> None:
    spoilt = replace(BASE, address=4, dims=(128, 0, 4, 2), box=(72, 257, 1, 1))
    assert len(spoilt.violations()) == 4


def test_bytes_of_a_box() -> None:
    assert BASE.box_bytes == 64 * 128 * 2
    assert BASE.rank == 4
