"""Calls with render=True that no module serves: what is rendered, where it lies, who finds it, and when it is refused.

Compiling is stood in for, but in the last test; modules are stood in for by the reference.
"""

from __future__ import annotations

import dis
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_modules import offsets
from rendering import CHECKOUT, ROOT
from stand_ins import pass_for_cuda
from torch._subclasses.fake_tensor import FakeTensorMode

import fa3gen
from fa3gen import cli
from fa3gen.base.errors import Caution, UserError
from fa3gen.base.files import sha256
from fa3gen.compile import compiler
from fa3gen.compile.cache import CACHE_DIR_VARIABLE
from fa3gen.compile.cache_contents import contents, prune
from fa3gen.compile.compiler import Compiled, CompileError
from fa3gen.cpu.module import load_on_cpu
from fa3gen.design.family import Family
from fa3gen.run import calls, dispatch, ops, packed_ops
from fa3gen.run.dispatch import NotRendered
from fa3gen.run.launch import NO_JIT_VARIABLE, NotCompiled
from fa3gen.verify import reference

STEM = "made_bf16_d80_causal"
PACKED_STEM = f"{STEM}_packed"


class Machine:
    """A cache of its own, a compiler that is none, modules that compute zeros, and what was asked of them."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.compiled: list[Path] = []
        self.called: list[tuple[str, dict[str, Any]]] = []

    def compile_module(self, path: Path, **options: Any) -> Compiled:
        self.compiled.append(path)
        return Compiled(path, "ptx", b"cubin", "module {}", "", 2.0, 1.0, None, "4.8.1", b"object")

    def module_at(self, path: Path) -> Any:
        def attention(q: Any, k: Any, v: Any, *offsets: Any, out: Any = None, return_lse: bool, **options: Any) -> Any:
            self.called.append((path.stem, options))
            out = q.new_empty((*q.shape[:-1], v.shape[-1])) if out is None else out
            out.zero_()
            lse = (q.shape[1], q.shape[0]) if offsets else (q.shape[0], q.shape[2], q.shape[1])
            return (out, q.new_zeros(lse, dtype=torch.float32)) if return_lse else out

        return SimpleNamespace(attention=attention)

    @property
    def rendered(self) -> list[Path]:
        return sorted(self.cache.rglob("*.py"))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    stand_in = Machine(tmp_path)
    monkeypatch.setenv(CACHE_DIR_VARIABLE, str(stand_in.cache))
    monkeypatch.setattr(compiler, "compile_module", stand_in.compile_module)
    monkeypatch.setattr(calls, "module_at", stand_in.module_at)
    monkeypatch.chdir(ROOT)
    calls.stretches.clear()
    monkeypatch.setattr(dispatch, "rendered_here", [])
    yield stand_in
    calls.stretches.clear()
    torch._dynamo.reset()


@pytest.fixture
def eager(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    pass_for_cuda(monkeypatch)
    return machine


def dense(seq: int = 5, *, dims: tuple[int, int] = (80, 80), dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(2, seq, heads, dim, dtype=dtype) for heads, dim in ((4, dims[0]), (2, dims[0]), (2, dims[1]))]


def packed(seq: int = 5) -> list[torch.Tensor]:
    return [*(x.flatten(0, 1) for x in dense(seq)), offsets([seq, seq]), offsets([seq, seq])]


FUNCTIONS = {STEM: (fa3gen.attention, dense), PACKED_STEM: (fa3gen.attention_packed, packed)}


@pytest.mark.parametrize("stem", FUNCTIONS)
@pytest.mark.parametrize("way", ["eager", "machine"])
def test_one_call_renders_and_compiles_and_later_ones_find_it(
    way: str, stem: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """Eager, and by the operators; later calls of other sizes, with LSE, with out=, and without render=True."""
    machine: Machine = request.getfixturevalue(way)
    function, tensors = FUNCTIONS[stem]
    with pytest.raises(NotRendered, match=r"render=True\) render and compile it.*:\n\nsummary"):
        function(*tensors(), causal=True)
    assert (machine.rendered, caplog.records) == ([], [])
    assert function(*tensors(), causal=True, render=True).shape == tensors()[0].shape
    [file] = machine.rendered
    assert machine.compiled == [file] * (way == "eager")  # a tensor on the CPU is refused by the module anyway
    [line] = caplog.records
    assert line.levelno == logging.WARNING and line.name == "fa3gen"
    assert f" {file} in " in line.getMessage()
    assert f" s from {stem}.yaml beside it, which extends fwd_" in line.getMessage()
    function(*tensors(), causal=True, render=True)
    function(*tensors(300), causal=True, return_lse=True)
    function(*tensors(4000), causal=True, out=torch.empty_like(tensors(4000)[0]))
    assert {name for name, _ in machine.called} == {stem} and len(machine.called) == 4
    assert machine.rendered == [file] and len(caplog.records) == 1 and len(machine.compiled) <= 1


def test_what_lies_in_the_cache_is_what_fa3gen_render_writes(eager: Machine) -> None:
    fa3gen.attention(*dense(), causal=True, render=True)
    [file] = eager.rendered
    assert (file.name, file.parent.name) == (f"{STEM}.py", sha256(file))
    spec = file.with_suffix(".yaml")
    assert cli.main(["render", "--check", str(spec)]) == 0
    (variant,) = CHECKOUT.load(spec).variants
    assert Family.of(variant.spec) == Family("bf16", 80, 80, dispatch.mask_of(True, None))
    assert variant.summary == "Proposed by fa3gen, never measured"


def test_the_cache_lists_and_prunes_it_like_all_else(eager: Machine) -> None:
    fa3gen.attention(*dense(), causal=True, render=True)
    found = contents(eager.cache)
    assert [entry.module for entry in found.entries] == [f"{STEM}.py"] * 3  # rendered, compiled, and the object
    prune(found, time.time() + 10)
    assert eager.rendered == []


@pytest.mark.parametrize("stem", FUNCTIONS)
def test_refused_where_nothing_may_be_compiled(stem: str, eager: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    function, tensors = FUNCTIONS[stem]
    monkeypatch.setenv(NO_JIT_VARIABLE, "1")
    for call in (function, function.explain):
        with pytest.raises(NotCompiled) as refused:
            call(*tensors(), causal=True, render=True)
        assert isinstance(refused.value, UserError) and "\nextends: fwd_" in str(refused.value)
        assert f"save the spec, run `fa3gen render {stem}` and `fa3gen compile {stem}`" in str(refused.value)
    assert eager.rendered == eager.compiled == dispatch.rendered_here == []
    monkeypatch.setenv(NO_JIT_VARIABLE, "0")
    function(*tensors(), causal=True, render=True)
    monkeypatch.setenv(NO_JIT_VARIABLE, "1")
    function(*tensors(300), causal=True, render=True)  # it is there


def test_explaining_renders_without_compiling(machine: Machine) -> None:
    tensors = [x.to("meta") for x in dense()]
    with pytest.raises(NotRendered):
        fa3gen.attention.explain(*tensors, causal=True)
    why = fa3gen.attention.explain(*tensors, causal=True, render=True)
    assert [why.file] == machine.rendered and why.source == why.file.with_suffix(".yaml") and machine.compiled == []
    assert "bf16, head dim 80, causal; tile 192 x 112" in str(why) and "no measurement" in why.reason
    assert fa3gen.attention.explain(*tensors, causal=True).file == why.file


def test_threads_that_ask_at_once_render_it_once(eager: Machine, caplog: pytest.LogCaptureFixture) -> None:
    ready, failed = threading.Barrier(6), []

    def call() -> None:
        ready.wait()
        try:
            fa3gen.attention(*dense(), causal=True, render=True)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == [] and len(eager.compiled) == len(caplog.records) == len(dispatch.rendered_here) == 1


IN_A_PROCESS = """
import sys
from fa3gen.compile import cache, compiler
from fa3gen.compile.compiler import Compiled
from fa3gen.design.family import Family
from fa3gen.design.workspace import Workspace
from fa3gen.run import dispatch, rendering
from fa3gen.spec.model import CausalMask

def compile_module(path, **options):
    print("compiles", flush=True)
    sys.stdin.readline()
    return Compiled(path, "ptx", b"cubin", "module {}", "", 2.0, 1.0, None, "4.8.1", b"object")

def compile_for_launch(path, compile_it=rendering.cached_compile_for_launch, locked=cache.locked):
    def seen(lock):
        print("waits", flush=True)
        return locked(lock)

    cache.locked = seen
    return compile_it(path)

compiler.compile_module, rendering.cached_compile_for_launch = compile_module, compile_for_launch
try:
    family = Family("bf16", 80, 80, CausalMask())
    dispatch.choose(family, dispatch.Size(3, 2), lse=False, workspace=Workspace.find())
except dispatch.NotRendered as missing:
    rendering.render(missing, compiled=True)
    print(dispatch.rendered_here[0][1])
"""


def test_processes_that_ask_at_once_compile_it_once(machine: Machine) -> None:
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes: list[Any] = [subprocess.Popen([sys.executable, "-c", IN_A_PROCESS], **pipes) for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == ["waits\n"] * 2
    for process in processes:
        process.stdin.close()  # which lets it go on
    said = [process.stdout.read().splitlines() for process in processes]
    assert [process.wait() for process in processes] == [0, 0]
    assert sorted(map(len, said)) == [1, 2]
    assert sum("compiles" in lines for lines in said) == 1
    assert {lines[-1] for lines in said} == {str(file) for file in machine.rendered} and len(machine.rendered) == 1


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("stem", FUNCTIONS)
def test_compiled_in_one_graph(stem: str, with_out: bool, machine: Machine) -> None:
    function, tensors = FUNCTIONS[stem]
    out = {"out": torch.ones_like(tensors()[0])} if with_out else {}

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(*inputs: torch.Tensor) -> Any:
        return function(*inputs, causal=True, render=True, **out) + 1

    with torch.no_grad():
        assert attend(*tensors()).eq(1).all()
    assert [name for name, _ in machine.called] == [stem] and len(machine.rendered) == 1


def test_fake_tensors_render_nothing(machine: Machine) -> None:
    """A model is traced before anything is computed."""
    with FakeTensorMode():
        q, k, v = (torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in dense())
        assert fa3gen.attention(q, k, v, causal=True, render=True).shape == q.shape
    assert (machine.rendered, machine.compiled) == ([], [])


@pytest.mark.parametrize(
    ("dims", "dtype", "name"),
    [
        ((192, 128), torch.bfloat16, "bf16_d192_128"),  # the nearest spec has its window compiled in
        ((64, 64), torch.float16, "fp16_d64"),
    ],
)
def test_another_window_is_given_with_the_call(
    dims: tuple[int, int], dtype: torch.dtype, name: str, eager: Machine
) -> None:
    """One module is rendered for all; never is one window computed in place of another."""
    tensors = dense(600, dims=dims, dtype=dtype)
    fa3gen.attention(*tensors, window=(300, 5), render=True)
    fa3gen.attention(*tensors, window=(7, -1))
    assert [options.get("window") for _, options in eager.called] == [(300, 5), (7, 2**30)]
    assert [stem for stem, _ in eager.called] == [f"made_{name}_any_window"] * 2
    assert len(eager.rendered) == 1


def test_what_cannot_be_rendered_is_refused_as_ever(eager: Machine) -> None:
    with pytest.raises(NotRendered, match="Nor can one be rendered:\nproblem.head_dim: K of the QK product is 72"):
        fa3gen.attention(*dense(dims=(72, 72)), causal=True, render=True)
    assert eager.rendered == []


def test_what_does_not_compile_is_not_offered(eager: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, **options: Any) -> Compiled:
        raise CompileError(path, "does not compile")

    monkeypatch.setattr(compiler, "compile_module", broken)
    with pytest.raises(CompileError):
        fa3gen.attention(*dense(), causal=True, render=True)
    with pytest.raises(NotRendered):
        fa3gen.attention(*dense(), causal=True)


def test_a_cache_that_cannot_be_written_stops_nothing(eager: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    eager.cache.write_text("a file")
    with pytest.warns(Caution, match="the compile cache .* cannot be written"):
        fa3gen.attention(*dense(), causal=True, render=True)
    [(variant, file)] = dispatch.rendered_here
    assert file.is_file() and variant.source.read_text().startswith("summary: Proposed by fa3gen")


@pytest.mark.parametrize("stem", FUNCTIONS)
def test_a_call_that_finds_its_module_does_not_look_at_it(stem: str, eager: Machine) -> None:
    """Whoever leaves render=True in a loop pays nothing: the same instructions are executed, none that reads it."""
    function, tensors = FUNCTIONS[stem]
    inputs = tensors()
    function(*inputs, causal=True, render=True)
    code = (ops.attention if function is fa3gen.attention else packed_ops.attention_packed).__code__
    assert "render" in code.co_varnames
    executed: list[list[int]] = []

    def traced(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            executed[-1].append(frame.f_lasti)
        return traced

    for render in (False, True):
        executed.append([])
        sys.settrace(traced)
        try:
            function(*inputs, causal=True, render=render)
        finally:
            sys.settrace(None)
    assert executed[0] == executed[1] != []
    reads = {at.offset for at in dis.get_instructions(code) if at.argval == "render"}
    assert reads and reads.isdisjoint(executed[0])


def test_executed_on_the_cpu_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is rendered for a call computes it. The module is found by its stem as well."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(dispatch, "rendered_here", [])
    monkeypatch.setattr(calls, "module_at", load_on_cpu)
    calls.stretches.clear()
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(x.shape, generator=generator).to(torch.bfloat16) for x in dense(70))
    try:
        out, lse = fa3gen.attention(q, k, v, causal=True, return_lse=True, render=True)
    finally:
        calls.stretches.clear()
    wanted = reference.attention(q, k, v, reach=(None, 0), compute_dtype=torch.float32)
    torch.testing.assert_close(out.float(), wanted.out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, wanted.lse, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match=rf'there is fa3gen.load\("{STEM}", on="cpu"\)'):
        fa3gen.load(STEM).attention(q, k, v)
    assert fa3gen.load(STEM, on="cpu").attention(q, k, v).equal(out)
