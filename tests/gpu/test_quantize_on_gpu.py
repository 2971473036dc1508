"""On a machine with a Hopper GPU: rows made 8 bits, eager, captured and compiled, and attention of what comes out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fa3gen
from fa3gen.design.workspace import Workspace
from fa3gen.verify import reference
from fa3gen.verify.inputs import permuted_keys

WORKSPACE = Workspace.find(Path(__file__).parent)
E4M3 = torch.float8_e4m3fn
BLOCK = 128  # rows of a scale of scale="block"


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(WORKSPACE.root)
    with torch.no_grad():
        yield


def rows(device: Any, *shape: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).bfloat16()


def signs(device: Any, size: int) -> torch.Tensor:
    return torch.randint(0, 2, (size,), generator=torch.Generator(device).manual_seed(size), device=device) * 2.0 - 1.0


def off(x8: torch.Tensor, descale: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error of 8-bit numbers times their scales, (batch, seq, heads, 1)."""
    return ((x8.double() * descale - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 4099, 16), (3, 777, 5), (64, 33, 8)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rotated_rows(shape: tuple[int, ...], dim: int, hopper: torch.device) -> None:
    x, turn = rows(hopper, *shape, dim), signs(hopper, dim)
    out, descale = fa3gen.quantize(x, rotate=turn)
    wanted = reference.rotate(x, turn)
    torch.testing.assert_close(descale.double(), wanted.abs().amax((1, 3)) / 448, rtol=1e-5, atol=0)
    assert off(out, descale.double()[:, None, :, None], wanted) < 0.04


@pytest.mark.parametrize("dim", [64, 128])
def test_v_transposed_is_v(dim: int, hopper: torch.device) -> None:
    """Bit by bit, of lengths with every rest of 16; nothing is written behind a column's end."""
    for length in (1, 15, 16, 127, 128, 129, 4001):
        x = rows(hopper, 2, length, 3, dim)
        room = torch.full((2, 3, dim, length // 16 * 16 + 32), 0x5A, dtype=torch.uint8, device=hopper).view(E4M3)
        into = room[..., :length].permute(0, 3, 1, 2)
        out, descale = fa3gen.quantize(x, transpose=True, out=into)
        plain, same = fa3gen.quantize(x)
        assert out is into and descale.equal(same)
        assert out.contiguous().view(torch.uint8).equal(plain.view(torch.uint8))
        assert room.view(torch.uint8)[..., length:].eq(0x5A).all()


@pytest.mark.parametrize("dim", [64, 128])
def test_permuted_keys_are_those_of_v(dim: int, hopper: torch.device) -> None:
    """Bit by bit, zeros behind the last key, and nothing behind whole units of keys."""
    for length in (1, 15, 16, 127, 128, 129, 4001):
        x, whole = rows(hopper, 2, length, 3, dim), -(-length // 16) * 16
        room = torch.full((2, 3, dim, whole + 32), 0x5A, dtype=torch.uint8, device=hopper).view(E4M3)
        into = room[..., :whole].permute(0, 3, 1, 2)
        out, descale = fa3gen.quantize(x, transpose=True, permute_keys=True, out=into)
        plain, same = fa3gen.quantize(x)
        assert out is into and descale.equal(same)
        wanted = permuted_keys(plain, fill=0.0).contiguous()
        assert out.contiguous().view(torch.uint8).equal(wanted.view(torch.uint8))
        assert room.view(torch.uint8)[..., whole:].eq(0x5A).all()


@pytest.mark.parametrize("scale", ["block", "token"])
def test_finer_scales(scale: Any, hopper: torch.device) -> None:
    x, turn = rows(hopper, 2, 1000, 4, 128), signs(hopper, 128)
    out, descale = fa3gen.quantize(x, rotate=turn, scale=scale)
    wanted = reference.rotate(x, turn)
    of_rows = descale if scale == "token" else descale.repeat_interleave(BLOCK, 2)[..., :1000]
    assert off(out, of_rows.double().transpose(1, 2)[..., None], wanted) < 0.04


def test_captured(hopper: torch.device) -> None:
    """Both kernels are in the graph: replayed with other rows, it finds their scales."""
    x, turn = rows(hopper, 2, 2000, 8, 128), signs(hopper, 128)
    fa3gen.quantize(x, rotate=turn, heads_kv=2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, descale = fa3gen.quantize(x, rotate=turn, heads_kv=2)
    for factor in (1.0, 3.0, 0.01):
        x.copy_(rows(hopper, 2, 2000, 8, 128) * factor)
        graph.replay()
        wanted, scales = fa3gen.quantize(x, rotate=turn, heads_kv=2)
        assert out.view(torch.uint8).equal(wanted.view(torch.uint8)) and descale.equal(scales)


def test_compiled(hopper: torch.device) -> None:
    @torch.compile(fullgraph=True)
    def eight_bits(x: torch.Tensor, turn: torch.Tensor) -> Any:
        out, descale = fa3gen.quantize(x, rotate=turn)
        return out, descale * 2

    x, turn = rows(hopper, 2, 300, 4, 64), signs(hopper, 64)
    out, twice = eight_bits(x, turn)
    wanted, descale = fa3gen.quantize(x, rotate=turn)
    assert out.view(torch.uint8).equal(wanted.view(torch.uint8)) and twice.equal(descale * 2)


def test_as_many_parts_as_find_room(hopper: torch.device) -> None:
    """A maximum is found wherever it stands, of one head and of many."""
    for heads, length in ((1, 70_001), (128, 700)):
        x = rows(hopper, 1, length, heads, 64)
        for row in (0, length // 2, length - 1):
            x[0, row, heads - 1, 63] = -500
            _, descale = fa3gen.quantize(x)
            assert descale[0, heads - 1].item() == pytest.approx(500 / 448, rel=1e-6)
            x[0, row, heads - 1, 63] = 1


STEMS = "k7_d64", "k7_d128_causal", "k7_v_k_d64_causal", "k7_v_k_d128", "fwd_fp8_v_permuted_d64_causal"


@pytest.mark.parametrize("stem", STEMS)
def test_attention_of_8_bits(stem: str, hopper: torch.device) -> None:
    """With grouped heads, and a thousandth of Q and K ten times as large: rotated, O is nearer to that of 16 bits."""
    dim, transpose, permuted = int(stem.split("_d")[1].split("_")[0]), "_v_" in stem, "permuted" in stem
    q, k, v = (rows(hopper, 2, 2000, heads, dim) for heads in (8, 2, 2))
    for x in (q, k):
        x *= torch.where(torch.rand(x.shape, device=hopper) < 1e-3, 10, 1)
    reach = (None, 0) if "causal" in stem else (None, None)
    wanted = reference.attention(*(x.double() for x in (q, k, v)), reach=reach).out
    module, errors = fa3gen.load(stem), []
    v8, v_scale = fa3gen.quantize(v, transpose=transpose, permute_keys=permuted)
    for rotate in (None, signs(hopper, dim)):
        q8, q_scale = fa3gen.quantize(q, rotate=rotate, heads_kv=2)
        k8, k_scale = fa3gen.quantize(k, rotate=rotate)
        out = module.attention(q8, k8, v8, q_descale=q_scale, k_descale=k_scale, v_descale=v_scale)
        errors.append(((out.double() - wanted).norm() / wanted.norm()).item())
    plain, rotated = errors
    assert rotated < plain and rotated < 0.09, errors
