"""Parts of the keys merged by the modules of specs/combine.yaml: calls, operators, refusals; on the CPU model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from rendering import CHECKOUT, variants
from stand_ins import pass_for_cuda
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3gen
from fa3gen.run import combine_ops
from fa3gen.run.combine_ops import STEMS, combine
from fa3gen.run.dispatch import ArgumentError, NoKernel
from fa3gen.spec.model import Combine
from fa3gen.verify import reference

HINT = 'out_partial is not on a GPU; .*; for CPU tensors there is fa3gen.load."combine_fp32", on="cpu".'


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combine_ops, "module_at", functools.cache(lambda path: fa3gen.load(path.stem, on="cpu")))


def parts(count: int = 3, *rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator, rows = torch.Generator().manual_seed(count), rows or (2, 3, 4)
    return torch.randn(count, *rows, 64, generator=generator), torch.randn(count, *rows, generator=generator)


def test_a_module_for_each_dtype_of_o() -> None:
    for dtype, stem in STEMS.items():
        spec = variants()[stem].spec
        assert isinstance(spec, Combine) and spec.element.in_torch() == dtype
        assert CHECKOUT.module_path(stem).is_file()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", list(STEMS))
def test_o_in_each_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the operators, as tensors on a CPU go, and the short way of those on a GPU."""
    values, lses = parts()
    wanted = reference.combine(values.double(), lses.double())
    tolerances = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
    for short in (False, True):
        if short:
            pass_for_cuda(monkeypatch)
        out, lse = combine(values, lses, out_dtype=dtype)
        assert out.dtype == dtype and out.is_contiguous() and lse.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(out.double(), wanted.out, **tolerances)
        torch.testing.assert_close(lse.double(), wanted.lse, rtol=1e-6, atol=1e-6)
        into = torch.empty_like(out)
        returned, again = combine(values, lses, out=into)
        assert returned is into and into.equal(out) and again.equal(lse)


@pytest.mark.usefixtures("on_cpu")
def test_packed_sequences() -> None:
    values, lses = parts(3, 7, 4)
    out, lse = combine(values, lses)
    one = combine(values[:, None], lses[:, None])
    assert out.equal(one[0][0]) and lse.equal(one[1][0]) and lse.stride() == (1, 7) and out.dtype == torch.float32
    into = torch.empty_like(out)
    assert combine(values, lses, out=into)[0] is into and into.equal(out)


@pytest.mark.usefixtures("on_cpu")
def test_torch_compile_sees_operators() -> None:
    """In one graph, for other sizes too, and with what the operators say of their outputs."""
    values, lses = parts()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def merged(values: torch.Tensor, lses: torch.Tensor, out: torch.Tensor) -> Any:
        first, lse = combine(values, lses, out_dtype=torch.bfloat16)
        combine(values, lses, out=out)
        return first + 1, lse

    for count in (3, 5):
        values, lses = parts(count)
        into = torch.empty(values.shape[1:])
        found, lse = merged(values, lses, into)
        wanted, wanted_lse = combine(values, lses)
        assert into.equal(wanted) and lse.equal(wanted_lse)
        assert found.equal(combine(values, lses, out_dtype=torch.bfloat16)[0] + 1)
    torch._dynamo.reset()
    options = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(torch.ops.fa3gen.combine, (values, lses), {"out_dtype": torch.float16}, **options)
    torch.library.opcheck(torch.ops.fa3gen.combine_out, (values, lses, into), {}, **options)


def test_fake_tensors_need_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combine_ops, "module_at", None)
    with FakeTensorMode():
        out, lse = combine(torch.empty(3, 2, 5, 4, 64), torch.empty(3, 2, 5, 4), out_dtype=torch.float16)
    assert out.shape == (2, 5, 4, 64) and out.dtype == torch.float16
    assert lse.shape == (2, 5, 4) and lse.stride() == (20, 1, 5)
    with FakeTensorMode(), pytest.raises(ArgumentError, match=r"out has shape \(2, 4, 4, 64\); it needs to be \(2, 5"):
        combine(torch.empty(3, 2, 5, 4, 64), torch.empty(3, 2, 5, 4), out=torch.empty(2, 4, 4, 64))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"out_partial": parts()[0].half()}, "out_partial has dtype torch.float16; it needs to be torch.float32"),
    ({"lse_partial": parts()[1].double()}, "lse_partial has dtype torch.float64; it needs to be torch.float32"),
    ({"lse_partial": [0.0]}, "lse_partial is a list; it needs to be a torch.Tensor"),
    ({"lse_partial": parts()[1].mT}, r"lse_partial has shape \(3, 2, 4, 3\); it needs to be \(3, 2, 3, 4\)"),
    ({"out_partial": parts()[0][0, 0]}, r"out_partial has shape \(3, 4, 64\); it needs to be \(parts, batch, seq, he"),
    ({"out": torch.empty(1), "out_dtype": torch.half}, "out has dtype torch.float32, and out_dtype is torch.float16"),
    ({"out": 1}, "out is a int; it needs to be a torch.Tensor"),
    ({"out": torch.empty(1, dtype=torch.double)}, "out is torch.float64; O is one of torch.bfloat16, torch.float16"),
    ({"out_dtype": torch.int32}, "out_dtype is torch.int32; O is one of torch.bfloat16, torch.float16, torch.float32"),
    ({"out_partial": parts()[0].requires_grad_()}, "requires grad; this kernel is forward only"),
    ({}, HINT),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    """Tensors on a CPU as well: there is no other way than the module."""
    arguments = dict(zip(("out_partial", "lse_partial"), parts(), strict=True)) | changes
    with pytest.raises((TypeError, ValueError), match=message):
        combine(**arguments)


def test_a_module_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        @staticmethod
        def rendered_path(stem: str) -> Path:
            return tmp_path / f"{stem}.py"

    monkeypatch.setattr(combine_ops.Workspace, "find", lambda: Elsewhere)
    combine_ops._file.cache_clear()
    with pytest.raises(NoKernel, match="combine_fp32.py does not exist; run `fa3gen render combine`"):
        combine(*parts())
    combine_ops._file.cache_clear()
