"""Rows made 8 bits by the modules of specs/quantize*.yaml: calls, operators, what is refused; on the CPU model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from rendering import CHECKOUT, quantize_stems, variants
from stand_ins import pass_for_cuda
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3gen
from fa3gen.base.errors import SpecError
from fa3gen.design import rules
from fa3gen.design.workspace import Workspace
from fa3gen.run import quantize_ops
from fa3gen.run.dispatch import ArgumentError, NoKernel
from fa3gen.run.quantize_ops import SCALES, proposed, quantize, stem_of
from fa3gen.spec.model import Quantize
from fa3gen.spec.quantizing import BLOCK_ROWS, QuantizeProblem
from fa3gen.verify import reference
from fa3gen.verify.inputs import permuted_keys

E4M3 = torch.float8_e4m3fn


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_ops, "module_at", functools.cache(lambda path: fa3gen.load(path.stem, on="cpu")))


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    shape = shape or (2, 5, 4, 64)
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])).to(dtype)


def signs(size: int) -> torch.Tensor:
    return 2.0 * torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(size)) - 1.0


def test_modules_have_the_names_that_are_asked_for() -> None:
    for stem in quantize_stems():
        spec = variants()[stem].spec
        assert isinstance(spec, Quantize)
        problem = spec.problem
        facts = problem.dtype, problem.rotate, problem.transpose, problem.scale, problem.permute_keys
        assert stem == f"{stem_of(*facts)}_d{problem.head_dim}"
        assert CHECKOUT.module_path(stem).is_file()
        assert problem.scale != "block" or spec.tile.rows == BLOCK_ROWS
    assert stem_of("fp16", True, True, "token") == "quantize_rotate_v_token_fp16"
    assert stem_of("fp16", False, True, "block", True) == "quantize_v_permuted_block_fp16"


@pytest.mark.usefixtures("on_cpu")
def test_scales_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the operators, as tensors on a CPU go, and the short way of those on a GPU."""
    x = rows()
    largest = x.double().abs().amax((1, 3))
    for short in (False, True):
        if short:
            pass_for_cuda(monkeypatch)
        out, descale = quantize(x)
        assert out.dtype == E4M3 and out.is_contiguous() and descale.shape == (2, 4)
        torch.testing.assert_close(descale.double(), largest / 448, rtol=1e-6, atol=0)
        again = x.double() / descale.double()[:, None, :, None]
        # A number of e4m3 is off by 2^-4 of itself, where it is normal.
        torch.testing.assert_close(out.double(), again, rtol=2**-4, atol=2**-10)
        into = torch.empty_like(out)
        returned, scales = quantize(x, out=into)
        assert returned is into and into.view(torch.uint8).equal(out.view(torch.uint8)) and scales.equal(descale)
        of_groups = quantize(x, heads_kv=2)[1]
        assert of_groups.equal(descale.unflatten(1, (2, 2)).amax(2))


@pytest.mark.usefixtures("on_cpu")
def test_scales_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    x, given = rows(), torch.tensor([[0.25, 0.001], [2.0, 1.0]])
    wanted = reference.round_e4m3(x.double() / given.double().repeat_interleave(2, 1)[:, None, :, None])
    assert wanted.abs().max() == 448  # and x is larger than 0.448 somewhere
    for short in (False, True):
        if short:
            pass_for_cuda(monkeypatch)
        out, descale = quantize(x, descale=given)
        into = torch.empty_like(out)
        returned, same = quantize(x, descale=given, out=into)
        assert descale is given and same is given and returned is into
        assert out.view(torch.uint8).equal(into.view(torch.uint8))
        # 1 / 0.001 is rounded, so that a tie may go elsewhere; others are powers of two.
        assert out[1].double().equal(wanted[1]) and out[0, :, :2].double().equal(wanted[0, :, :2])


@pytest.mark.usefixtures("on_cpu")
def test_transposed() -> None:
    x = rows(1, 21, 2, 64)
    out, descale = quantize(x, transpose=True)
    plain, same = quantize(x)
    assert out.stride() == (2 * 64 * 32, 1, 64 * 32, 32) and descale.equal(same)
    assert out.double().equal(plain.double())


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("length", [1, 16, 133])
def test_permuted_keys(length: int) -> None:
    """What is written in order, in another; zeros behind the last key, also in an output that is given."""
    x = rows(2, length, 2, 64)
    plain, descale = quantize(x, transpose=True)
    out, same = quantize(x, transpose=True, permute_keys=True)
    wanted = permuted_keys(plain, fill=0.0)
    assert out.shape == (2, -(-length // 16) * 16, 2, 64) and out.stride() == wanted.stride() and descale.equal(same)
    assert out.float().equal(wanted.float())
    into = torch.full_like(wanted.float(), 3.0).to(E4M3).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    again, _ = quantize(x, descale=descale, transpose=True, permute_keys=True, out=into)
    assert again is into and into.float().equal(wanted.float())
    with pytest.raises(ValueError, match=rf"it needs to be \(2, {out.shape[1]}, 2, 64\)"):
        quantize(x, transpose=True, permute_keys=True, out=into[:, :3])
    with pytest.raises(ValueError, match="permute_keys is True without transpose: .*; pass transpose=True, too"):
        quantize(x, permute_keys=True)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("scale", ["block", "token"])
def test_finer_scales(scale: Any) -> None:
    x, turn = rows(1, BLOCK_ROWS + 3, 2, 128), signs(128)
    out, descale = quantize(x, rotate=turn, scale=scale)
    y = reference.rotate(x, turn)
    largest = y.abs().amax(-1).transpose(1, 2)
    if scale == "block":
        largest = torch.stack([largest[..., :BLOCK_ROWS].amax(-1), largest[..., BLOCK_ROWS:].amax(-1)], -1)
    torch.testing.assert_close(descale.double(), largest / 448, rtol=1e-5, atol=0)
    assert out.shape == x.shape and out.double().abs().amax() == 448


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return (torch.softmax(scores, -1) @ v.transpose(1, 2)).transpose(1, 2), torch.logsumexp(scores, -1)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("given", ["k7_d64", "k7_v_k_d64", "fwd_fp8_v_permuted_d64"])
def test_attention_of_8_bits_takes_it(given: str) -> None:
    """Q and K with a channel that outweighs all others, and its rounding all other errors: rotated, LSE is nearer."""
    q, k, v = (rows(1, length, 1, 64) for length in (70, 90, 90))
    q, k = q * 0.25, k * 0.25
    q[..., 7] *= 40
    k[..., 7] *= 40
    wanted, wanted_lse = attend(*(x.double() for x in (q, k, v)))
    module, turn = fa3gen.load(given, on="cpu"), signs(64)
    off = []
    for rotate in (None, turn):
        (q8, q_scale), (k8, k_scale) = (quantize(x, rotate=rotate) for x in (q, k))
        v8, v_scale = quantize(v, transpose=given != "k7_d64", permute_keys="permuted" in given)
        scales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
        out, lse = module.attention(q8, k8, v8, **scales, return_lse=True)
        off.append([(a.double() - b).norm() / b.norm() for a, b in ((out, wanted), (lse, wanted_lse))])
    (plain, plain_lse), (rotated, rotated_lse) = off
    # P and V are off by up to 2^-4 of themselves.
    assert rotated < 2**-4 < plain and rotated_lse < plain_lse / 3, off


@pytest.mark.usefixtures("on_cpu")
def test_torch_compile_sees_operators() -> None:
    """In one graph, for other sizes too, and with what the operators say of their outputs."""

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def eight_bits(x: torch.Tensor, given: torch.Tensor, out: torch.Tensor) -> Any:
        first, descale = quantize(x, rotate=signs64, heads_kv=2)
        quantize(x, descale=given, out=out)
        of_keys, _ = quantize(x, descale=given, transpose=True, permute_keys=True)
        return first.float(), descale, quantize(x, descale=given, transpose=True)[0].float(), of_keys.float()

    signs64 = signs(64)
    for length in (3, 6):
        x, given = rows(2, length, 4, 64), torch.full((2, 4), 0.02)
        into = torch.empty(x.shape, dtype=E4M3)
        first, descale, turned, permuted = eight_bits(x, given, into)
        assert permuted.equal(permuted_keys(into, fill=0.0).float())
        wanted, wanted_scale = quantize(x, rotate=signs64, heads_kv=2)
        assert first.equal(wanted.float()) and descale.equal(wanted_scale)
        assert into.float().equal(quantize(x, descale=given)[0].float()) and turned.equal(into.float())
    torch._dynamo.reset()
    tests = {"test_utils": "test_faketensor"}  # torch compares no tensors of 8 bits on a CPU, as test_schema would
    options = {"transpose": False, "scale": "head", "heads_kv": None}
    torch.library.opcheck(torch.ops.fa3gen.quantize, (x, signs64), options, **tests)
    torch.library.opcheck(torch.ops.fa3gen.quantize_out, (x, None, into), options, **tests)
    torch.library.opcheck(torch.ops.fa3gen.quantize_by, (x, None, given), {"transpose": True}, **tests)
    torch.library.opcheck(torch.ops.fa3gen.quantize_by_out, (x, None, given, into), {"transpose": False}, **tests)
    columns, whole = {"transpose": True, "permute_keys": True}, permuted_keys(into, fill=0.0)
    torch.library.opcheck(torch.ops.fa3gen.quantize, (x, None), {**options, **columns}, **tests)
    torch.library.opcheck(torch.ops.fa3gen.quantize_out, (x, None, whole), {**options, **columns}, **tests)
    torch.library.opcheck(torch.ops.fa3gen.quantize_by, (x, None, given), columns, **tests)
    torch.library.opcheck(torch.ops.fa3gen.quantize_by_out, (x, None, given, whole), columns, **tests)


def test_fake_tensors_need_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_ops, "module_at", None)
    with FakeTensorMode():
        x, turn = torch.empty(2, 5, 4, 192, dtype=torch.float16), torch.empty(192)
        out, descale = quantize(x, transpose=True)
        assert out.shape == x.shape and out.stride() == (4 * 192 * 16, 1, 192 * 16, 16) and out.dtype == E4M3
        assert descale.shape == (2, 4) and descale.dtype == torch.float32
        out, _ = quantize(x, transpose=True, permute_keys=True)
        assert out.shape == (2, 16, 4, 192) and out.stride() == (4 * 192 * 16, 1, 192 * 16, 16)
        with pytest.raises(
            ArgumentError, match=r"out is \(2, 5, 4, 192\), torch.float8_e4m3fn; it needs to be \(2, 16, "
        ):
            quantize(x, transpose=True, permute_keys=True, out=out[:, :5])
        assert quantize(x, scale="token")[1].shape == (2, 4, 5)
        assert quantize(x, scale="block")[1].shape == (2, 4, 1) and quantize(x, heads_kv=2)[1].shape == (2, 2)
        with pytest.raises(ArgumentError, match="heads_kv is 3; it needs to divide the 4 heads of x"):
            quantize(x, heads_kv=3)
        with pytest.raises(ArgumentError, match=r"out is \(2, 5, 4, 192\), torch.float16; it needs to be \(2, 5, 4, 1"):
            quantize(x, out=x)
        with pytest.raises(ArgumentError, match=r"descale has shape \(2, 0\); it needs to be \(2, heads_kv\) of 4 he"):
            quantize(x, descale=x.new_empty(2, 0, dtype=torch.float32))
        with pytest.raises(ArgumentError, match=r"descale has shape \(2, 3\); it needs to be \(2, heads_kv\) of 4 he"):
            quantize(x, descale=torch.empty(2, 3))
        with pytest.raises(ValueError, match="rotate is given, and d is 192; only rows of a power of two"):
            quantize(x, rotate=turn)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"x": [1.0]}, "x is a list; it needs to be a torch.Tensor"),
    ({"x": rows().float()}, "x has dtype torch.float32; quantize takes torch.bfloat16 or torch.float16"),
    ({"x": rows()[0]}, r"x has shape \(5, 4, 64\); it needs to be \(batch, seq, heads, d\), d a multiple of 64"),
    ({"x": rows(2, 3, 4, 80)}, r"x has shape \(2, 3, 4, 80\); it needs to be \(batch, seq, heads, d\), d a multiple"),
    ({"x": rows().requires_grad_()}, "x requires grad; this kernel is forward only"),
    ({"rotate": True}, "rotate is a bool; it needs to be a torch.Tensor"),
    ({"rotate": signs(128)}, r"rotate is \(128,\), torch.float32; it needs to be \(64,\), torch.float32, with 1 and"),
    ({"scale": "row"}, "scale is 'row'; it needs to be one of 'head', 'block', 'token'"),
    ({"scale": "token", "heads_kv": 2}, "heads_kv is given beside scale='token', and is for scale='head'; leave one"),
    ({"scale": "token", "transpose": True}, "transpose is given beside scale='token': transposed is V, of whose"),
    ({"heads_kv": 0}, "heads_kv is 0; it needs to divide the 4 heads of x"),
    (
        {"heads_kv": 2, "descale": torch.ones(2, 4)},
        r"heads_kv is 2, and descale has shape \(2, 4\); leave one of them out",
    ),
    ({"descale": 1.0}, "descale is a float; it needs to be a torch.Tensor"),
    ({"out": 1}, "out is a int; it needs to be a torch.Tensor"),
    ({}, "x is not on a GPU; .*; for CPU tensors there is fa3gen.load."),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    """Tensors on a CPU as well: there is no other way than the module."""
    arguments = {"x": rows()} | changes
    with pytest.raises((TypeError, ValueError), match=message):
        quantize(arguments.pop("x"), **arguments)


def test_a_module_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what there is: no spec, one of other head dims, or one that was not rendered."""
    (tmp_path / "package" / "specs").mkdir(parents=True)
    home = Workspace(tmp_path, tmp_path / "package")
    home.specs_dir.mkdir()
    monkeypatch.setattr(quantize_ops.Workspace, "find", lambda: home)

    def refusal() -> str:
        quantize_ops._file.cache_clear()
        with pytest.raises(NoKernel, match=r"quantize_rotate_fp16_d64.py does not exist. ") as refused:
            quantize(rows(dtype=torch.float16), rotate=signs(64))
        quantize_ops._file.cache_clear()
        return str(refused.value)

    text, file = proposed("fp16", 64, rotate=True, transpose=False, scale="head"), "quantize_rotate_fp16.yaml"
    run = "run `fa3gen render quantize_rotate_fp16`"
    assert refusal().endswith(f"No spec makes it: save this one as {home.specs_dir / file}, and {run}:\n\n{text}")
    (home.specs_dir / file).write_text(text)
    assert refusal().endswith(f"Its spec is {home.specs_dir / file}: {run}")
    other = proposed("fp16", 128, rotate=True, transpose=False, scale="head")
    (home.specs_dir / file).write_text(other)
    assert refusal().endswith(
        f"{home.specs_dir / file} makes other head dims: add 64 to problem.head_dim in its matrix, and {run}"
    )
    (home.specs_dir / file).rename(home.bundled_specs_dir / file)  # which nobody can change there
    assert refusal().endswith(f"No spec makes it: save this one as {home.specs_dir / file}, and {run}:\n\n{text}")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_proposed_specs_are_legal(scale: Any, head_dim: int, tmp_path: Path) -> None:
    cases: list[tuple[Any, bool, bool]] = [("bf16", True, False), ("fp16", False, True), ("bf16", True, True)]
    for dtype, rotate, transpose in cases:
        if transpose and scale == "token":
            continue
        file = tmp_path / f"{stem_of(dtype, rotate, transpose, scale)}.yaml"
        file.write_text(proposed(dtype, head_dim, rotate, transpose, scale))
        if rotate and transpose and head_dim == 256:  # four rows of 64 elements, and a thread has no room for them
            with pytest.raises(SpecError, match="registers: values 256 "):
                CHECKOUT.load(file)
            continue
        (variant,) = CHECKOUT.load(file).variants
        problem = QuantizeProblem(head_dim=head_dim, dtype=dtype, rotate=rotate, transpose=transpose, scale=scale)
        assert isinstance(variant.spec, Quantize) and variant.spec.problem == problem
        assert variant.stem == f"{file.stem}_d{head_dim}" and rules.check(variant.spec) == []
