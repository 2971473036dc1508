"""Parts of a fixed number of keys on the CPU model: a row's bits are the same whatever else a call has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hosting import mistaken, module, outputs
from rendering import source, variants

from fa3gen.cpu.kernel import Settings
from fa3gen.design.family import Shape
from fa3gen.design.splits import num_parts
from fa3gen.verify.inputs import Case
from fa3gen.verify.on_cpu import verify_on_cpu

torch.set_num_threads(1)  # the workers of xdist share the cores
STEM, CAUSAL = "fwd_decode_fixed_d64", "fwd_decode_fixed_d64_causal"
QUERIES, KEYS, HEADS, HEADS_KV = 6, 1100, 5, 1  # two parts and a third cut short; a group with padding

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module")
def given() -> Tensors:
    generator = torch.Generator().manual_seed(7)
    shapes = (2, QUERIES, HEADS, 64), (2, KEYS, HEADS_KV, 64), (2, KEYS, HEADS_KV, 64)
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    return q, k, v


def same(first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """The same bits of O and LSE, which are (batch, seq, ...) and (batch, heads, seq)."""
    return all(one.equal(other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("stem", ["fwd_decode_fixed_d64", "fwd_decode_fixed_d128", "fwd_decode_fixed_d256"])
def test_the_number_of_parts_follows_from_keys_alone(stem: str) -> None:
    spec, entry = variants()[stem].spec, module(stem)
    assert spec.split is not None and spec.split.keys == entry.KEYS_OF_PART == 512
    for keys, parts in ((1, 1), (512, 1), (513, 2), (1100, 3), (131072, 256)):
        counted = {
            num_parts(spec, Shape(batch, queries, keys, heads, 1), sms)
            for batch in (1, 64)
            for queries in (1, 16)
            for heads in (1, 16)
            for sms in (1, 132)
        }
        assert counted == {parts}


def test_alone_in_any_place_and_on_any_gpu(given: Tensors) -> None:
    together = outputs(STEM, Settings(sms=3), given)
    for place in (0, 1):
        alone = outputs(STEM, Settings(sms=1 + place), tuple(x[place : place + 1] for x in given))
        assert same(alone, (together[0][place : place + 1], together[1][place : place + 1]))
    swapped = outputs(STEM, Settings(sms=5), tuple(x.flip(0) for x in given))
    assert same(swapped, (together[0].flip(0), together[1].flip(0)))


def test_with_fewer_heads_beside(given: Tensors) -> None:
    q, k, v = (x[:1] for x in given)
    together = outputs(STEM, Settings(sms=3), (q, k, v))
    fewer = outputs(STEM, Settings(sms=3), (q[:, :, 2:4], k, v))
    assert same(fewer, (together[0][:, :, 2:4], together[1][:, 2:4]))


def test_causal_queries_at_once_or_in_chunks(given: Tensors) -> None:
    """A chunk has the keys up to its last query: fewer parts, and rows elsewhere in a tile."""
    q, k, v = (x[:1] for x in given)
    whole = outputs(CAUSAL, Settings(sms=3), (q, k, v))
    for ends in ((1, 2, 3, 4, 5, 6), (2, 6), (5, 6)):
        for begin, end in zip((0, *ends), ends, strict=False):
            keys = KEYS - QUERIES + end
            chunk = outputs(CAUSAL, Settings(sms=3), (q[:, begin:end], k[:, :keys], v[:, :keys]))
            assert same(chunk, (whole[0][:, begin:end], whole[1][:, :, begin:end]))


@pytest.mark.parametrize("last", [511, 512, 513])
def test_chunks_where_a_part_ends(given: Tensors, last: int) -> None:
    """The first query sees keys of one part, the last may see some of another: then the first, too, is added up."""
    q, k, v = (x[:1] for x in given)
    keys = last + 2
    whole = outputs(CAUSAL, Settings(sms=2), (q[:, :3], k[:, :keys], v[:, :keys]))
    first = outputs(CAUSAL, Settings(sms=2), (q[:, :1], k[:, :last], v[:, :last]))
    assert same(first, (whole[0][:, :1], whole[1][:, :, :1]))


def test_free_parts_have_other_bits(given: Tensors) -> None:
    """What the mode is for: with as many parts as fill the GPU, an SM more or less changes O or LSE."""
    one, many = (outputs("fwd_decode_d64", Settings(sms=sms), given) for sms in (1, 12))
    assert not same(one, many)


def test_keys_left_to_nobody_are_reported(tmp_path: Path) -> None:
    """A mistake: parts that are shorter than their number was counted for."""
    text, old = source(STEM), "steps_of_part = cutlass.Int32(KEYS_OF_PART // TILE_N)"
    assert text.count(old) == 1
    wrong = text.replace(old, "steps_of_part = cutlass.Int32(KEYS_OF_PART // TILE_N - 1)")
    found = mistaken(tmp_path, "wrong", wrong)
    case = Case("parts", "three whole parts", 1, 1, 3 * 512, HEADS, 1)
    assert verify_on_cpu(found, variants()[STEM].spec, stem="wrong", cases=[case], seed=1, calls=False).failures
