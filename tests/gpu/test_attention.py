"""On a machine with a Hopper GPU: `fa3gen.attention` for every row of its table, called, compiled, captured."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fa3gen
from fa3gen.compile.loading import load_file
from fa3gen.design.family import Family, Shape
from fa3gen.design.masks import options_for, reach
from fa3gen.design.workspace import Workspace
from fa3gen.hardware.chips import H200
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.run import dispatch
from fa3gen.run.launch import NO_JIT_VARIABLE, load_for_launch
from fa3gen.spec.model import CausalMask, Mask, NoMask, WindowMask
from fa3gen.verify import inputs, reference

WORKSPACE = Workspace.find(Path(__file__).parent)
# Relative Frobenius error of O; 16-bit kernels read about 0.002, those of 8 bits 0.025. It finds the wrong module.
TOLERANCE, TOLERANCE_8BIT = 0.01, 0.04
LSE_TOLERANCE = 1e-3

# Without a row of their own: the only module that fits.
UNMEASURED = (
    Family("bf16", 192, 128, NoMask()),
    Family("fp16", 64, 64, CausalMask()),
    Family("bf16", 64, 64, WindowMask(left=512, right=0)),
)


HEADS, QUERIES = 4, 200


class Call(NamedTuple):
    """A family, and numbers of keys and of sequences in one row of the table."""

    family: Family
    seq_k: int
    batch: int = 2

    @property
    def options(self) -> dict[str, Any]:
        mask = self.family.mask
        return {
            "causal": isinstance(mask, CausalMask),
            "window": (mask.left, mask.right) if isinstance(mask, WindowMask) else None,
            **({"v_permuted": True} if self.family.v_permuted else {}),
        }

    def given(self, stem: str) -> dict[str, Any]:
        """What a module itself takes of these: a window, where it is one for all windows."""
        (variant,) = WORKSPACE.resolve(stem)
        return options_for(variant.spec.mask, self.family.mask)

    def tensors(self, device: Any, *, seq_q: int = QUERIES, seed: int = 0) -> tuple[torch.Tensor, ...]:
        generator = torch.Generator(device).manual_seed(seed)
        family = self.family
        shapes = [
            (self.batch, seq_q, HEADS, family.head_dim),
            (self.batch, self.seq_k, 2, family.head_dim),
            (self.batch, self.seq_k, 2, family.head_dim_v),
        ]
        q, k, v = (inputs.normal(shape, DTYPES[family.dtype], device, generator) for shape in shapes)
        if family.v_permuted:
            return q, k, inputs.permuted_keys(v, fill=0.0)
        return q, k, inputs.by_sequence(v) if family.by_sequence else v


ANY_SIZE = dispatch.Size(keys=1, tiles=1, sms_here=H200.sms, group=HEADS // 2, queries=QUERIES)


def calls() -> Iterator[Call]:
    """One call for each row that is not for few queries, or other groups of heads: test_few_queries.py has those.

    With a number of keys that is no multiple of a tile; rows as on an H200.
    """
    table = dispatch.read_table(dispatch.table_path(WORKSPACE))
    rows = [row for row in table.rows if row.layout is None and row.serves_rows(ANY_SIZE)]
    sequence = Shape(1, QUERIES, 1, HEADS, 2).tiles
    for row, before in zip(rows, [None, *rows[:-1]], strict=True):
        above = before if before is not None and before.family == row.family else None
        most = row.most_tiles(ANY_SIZE)
        if most == dispatch.NO_LIMIT:  # more than any row before has
            most = max((r.most_tiles(ANY_SIZE) for r in rows if r.family == row.family and r.tiles_per_sm), default=0)
            batch = max(2, most // sequence + 1)
        else:
            batch = max(1, most // sequence)
        same_band = above is not None and above.tiles_per_sm == row.tiles_per_sm
        least = above.most_keys if above is not None and same_band else 328
        yield Call(row.family, row.seq_k.up_to - 3 if row.seq_k else least + 5, batch)
    yield from (Call(family, 333) for family in UNMEASURED)


CALLS = list(calls())
EVERY = pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.family}, {call.batch} x {call.seq_k} keys")
# A first row, and those without a row: v with a head dim of its own, a causal mask, a window.
SOME = pytest.mark.parametrize("call", [CALLS[0], *CALLS[-3:]], ids=["first", "d_v", "causal", "window"])


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(WORKSPACE.root)


def check(call: Call, tensors: tuple[torch.Tensor, ...], out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    q, k, v = tensors
    if call.family.v_permuted:
        v = inputs.keys_in_order(v.float(), k.shape[1])[0]
    expected = reference.attention(q, k, v, reach=reach(call.family.mask), compute_dtype=torch.float32)
    error = (out.float() - expected.out).norm() / expected.out.norm()
    assert error.item() <= (TOLERANCE_8BIT if call.family.eight_bits else TOLERANCE)
    if lse is not None:
        torch.testing.assert_close(lse, expected.lse.float(), rtol=LSE_TOLERANCE, atol=LSE_TOLERANCE)


@EVERY
def test_numbers(call: Call, hopper: Any) -> None:
    """The module that is explained is the one that runs, and what it computes is what was asked for."""
    tensors = call.tensors(hopper)
    out, lse = fa3gen.attention(*tensors, **call.options, return_lse=True)
    check(call, tensors, out, lse)
    choice = fa3gen.attention.explain(*tensors, **call.options)
    module = load_for_launch(choice.file)
    assert out.equal(module.attention(*tensors, **call.given(choice.stem)))
    assert out.equal(fa3gen.attention(*tensors, **call.options))
    into = torch.full_like(out, torch.nan)
    assert fa3gen.attention(*tensors, **call.options, out=into) is into and into.equal(out)
    again = fa3gen.attention(*tensors, **call.options, scale=2.0)
    assert not again.equal(out)


@pytest.mark.parametrize("mask", [NoMask(), CausalMask()], ids=str)
def test_a_float32_out_takes_the_module_that_writes_float32(mask: Mask, hopper: Any) -> None:
    call = Call(Family("bf16", 128, 128, mask), 333)
    tensors = call.tensors(hopper)
    narrow = fa3gen.attention(*tensors, **call.options)
    into = torch.full_like(narrow, torch.nan, dtype=torch.float32)
    assert fa3gen.attention(*tensors, **call.options, out=into) is into
    check(call, tensors, into)
    assert not into.equal(into.to(narrow.dtype).float())


@SOME
def test_what_is_loaded_is_what_the_module_compiles(call: Call, hopper: Any) -> None:
    """Bit for bit: the object of the compile cache, and the file by itself, which compiles in this process."""
    tensors = call.tensors(hopper)
    choice = fa3gen.attention.explain(*tensors, **call.options)
    alone = load_file(choice.file, variety="alone")
    assert fa3gen.attention(*tensors, **call.options).equal(alone.attention(*tensors, **call.given(choice.stem)))


@SOME
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile(call: Call, mode: str, hopper: Any) -> None:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = fa3gen.attention(q * 2, k, v, **call.options, return_lse=True)
        return out + 1, lse

    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for seed in range(4):  # reduce-overhead records a graph at its second call and replays it from then on
        tensors = call.tensors(hopper, seed=seed)
        for found, wanted in zip(compiled(*tensors), model(*tensors), strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    torch._dynamo.reset()


@SOME
def test_torch_compile_with_out(call: Call, hopper: Any) -> None:
    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        fa3gen.attention(q, k, v, **call.options, out=out)
        return out + 1

    tensors = call.tensors(hopper)
    wanted = fa3gen.attention(*tensors, **call.options)
    out = torch.full_like(wanted, torch.nan)
    found = torch.compile(model, fullgraph=True)(*tensors, out)
    assert out.equal(wanted) and found.equal(wanted + 1)
    torch._dynamo.reset()


@SOME
def test_cuda_graph(call: Call, hopper: Any) -> None:
    static = call.tensors(hopper)
    fa3gen.attention(*static, **call.options, return_lse=True)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fa3gen.attention(*static, **call.options, return_lse=True)
    for seed in (1, 2):
        fresh = call.tensors(hopper, seed=seed)
        for tensor, values in zip(static, fresh, strict=True):
            tensor.copy_(values)
        graph.replay()
        wanted, wanted_lse = fa3gen.attention(*fresh, **call.options, return_lse=True)
        assert out.equal(wanted) and lse.equal(wanted_lse)


def test_the_default_stream_cannot_be_captured(hopper: Any) -> None:
    """So its launches may share memory: no graph can be among them."""
    with torch.cuda.device(hopper):
        assert torch.cuda.default_stream().cuda_stream == 0
        with pytest.raises(RuntimeError, match="non-default stream"):
            torch.cuda.CUDAGraph().capture_begin()
        assert not torch.cuda.is_current_stream_capturing()


@EVERY
def test_the_host_never_waits(call: Call, hopper: Any) -> None:
    tensors = call.tensors(hopper)
    fa3gen.attention(*tensors, **call.options, return_lse=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, lse = fa3gen.attention(*tensors, **call.options, return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    check(call, tensors, out, lse)


@SOME
def test_current_stream(call: Call, hopper: Any) -> None:
    """The kernel waits for what its stream does before it: a long sleep, then the inputs."""
    tensors = call.tensors(hopper)
    wanted = fa3gen.attention(*tensors, **call.options)
    later = tuple(torch.zeros_like(tensor) for tensor in tensors)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for tensor, values in zip(later, tensors, strict=True):
            tensor.copy_(values)
        out = fa3gen.attention(*later, **call.options)
    stream.synchronize()
    assert out.equal(wanted)


# A process in which the DSL's compiler would be an error; it saves what the kernel computed.
START = """
import sys
import torch, cutlass.cute
import fa3gen

def forbidden(*arguments, **options):
    raise SystemExit("the DSL was asked to compile")

cutlass.cute.compile = forbidden
tensors, options = torch.load(sys.argv[1])
torch.save(fa3gen.attention(*tensors, **options), sys.argv[2])
"""


@SOME
def test_a_second_process_starts_without_compiling(call: Call, hopper: Any, tmp_path: Path) -> None:
    tensors = call.tensors(hopper)
    wanted = fa3gen.attention(*tensors, **call.options)  # which fills the cache
    torch.save((tensors, call.options), tmp_path / "in")
    command = [sys.executable, "-c", START, str(tmp_path / "in"), str(tmp_path / "out")]
    environment = {**os.environ, NO_JIT_VARIABLE: "1"}
    process = subprocess.run(command, env=environment, cwd=WORKSPACE.root, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert torch.load(tmp_path / "out").equal(wanted)


@pytest.mark.parametrize(
    "spoil", [lambda x: x[..., :-8], lambda x: x.float(), lambda x: x.cpu()], ids=["d", "dtype", "cpu"]
)
def test_what_the_kernel_refuses(spoil: Callable[[torch.Tensor], torch.Tensor], hopper: Any) -> None:
    q, k, v = CALLS[-2].tensors(hopper)
    with pytest.raises((TypeError, ValueError), match=r"argument #1 .*expected"):
        fa3gen.attention(q, spoil(k), v, causal=True)


def test_without_a_mask_is_not_causal(hopper: Any) -> None:
    """The two calls go to modules of their own."""
    call = Call(Family("fp16", 64, 64, NoMask()), 333)
    tensors = call.tensors(hopper)
    check(call, tensors, fa3gen.attention(*tensors))
    assert not fa3gen.attention(*tensors).equal(fa3gen.attention(*tensors, causal=True))
