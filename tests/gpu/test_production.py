"""On a machine with a Hopper GPU: what the production modules have to stand beside `fa3gen verify`.

The same bits from a hundred launches, from launches that run at the same time on streams and in CUDA graphs (dynamic
kernels draw their tiles from a counter), and from tensors that lie far apart; 131,072 keys; tensors of more than 2^31
elements; more than 65,535 heads; no access outside the tensors (compute-sanitizer memcheck).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import production
import pytest
import torch
from production import LARGE, MANY_HEADS, MANY_KEYS, SMALL, Problem

import fa3gen
from fa3gen.compile.cache import cached_object
from fa3gen.design.workspace import Workspace
from fa3gen.run.launch import NO_JIT_VARIABLE
from fa3gen.spec.model import Spec
from fa3gen.verify.attention_on_gpu import Runner
from fa3gen.verify.inputs import Case
from fa3gen.verify.runner import DeviceLost

WORKSPACE = Workspace.find(Path(__file__).parent)
VARIANTS = {variant.stem: variant for spec_file in WORKSPACE.load_all() for variant in spec_file.variants}
# Those for packed sequences: test_packed.py.
STEMS = [stem for stem, each in VARIANTS.items() if stem.startswith("fwd_") and each.spec.problem.layout == "dense"]
EVERY = pytest.mark.parametrize("stem", STEMS)
LAUNCHES = 100
FAR = 2**31  # elements; offsets beyond it do not fit into 32 bits
MEMCHECK = Path(__file__).parent / "memcheck.py"
SANITIZER = "compute-sanitizer"
FOUND_ERRORS = 77  # exit status, unless the program itself fails


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch, hopper: Any) -> Any:
    """And with the memory of the test before given back: some of these take half of it."""
    monkeypatch.chdir(WORKSPACE.root)
    torch.cuda.empty_cache()
    return hopper


def check(stem: str, attempt: Callable[[Any, Spec], Iterable[str]]) -> None:
    """Fail with everything that `attempt` finds wrong."""
    try:
        found = list(attempt(fa3gen.load(stem), VARIANTS[stem].spec))
    except DeviceLost as lost:
        pytest.exit(f"{stem} left the GPU unusable, the tests after it were not run: {lost}", returncode=1)
    assert not found, "\n".join(found)


@EVERY
def test_repeated_launches_give_the_same_bits(stem: str, hopper: Any) -> None:
    check(stem, lambda m, s: production.repeated_launches(Problem(m, s, hopper, LARGE, seed=1), LAUNCHES))


@EVERY
@pytest.mark.parametrize(
    "how",
    [production.streams_at_once, production.graphs_at_once, production.graphs_beside_streams],
    ids=["streams", "graphs", "both"],
)
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_launches_at_the_same_time_do_not_disturb_each_other(stem: str, how: Any, shape: Any, hopper: Any) -> None:
    """Four calls of one module with inputs of their own, one of them of the other size."""
    shapes = [shape, shape, SMALL if shape is LARGE else LARGE, shape]

    def attempt(module: Any, spec: Spec) -> Iterable[str]:
        problems = [Problem(module, spec, hopper, each, seed) for seed, each in enumerate(shapes)]
        return production.undisturbed(problems, how(hopper, times=3, launches=8))

    check(stem, attempt)


@EVERY
@pytest.mark.parametrize("case", [MANY_KEYS, MANY_HEADS], ids=lambda case: case.name)
def test_sizes(stem: str, case: Case, hopper: Any) -> None:
    check(stem, lambda module, spec: Runner(module, spec, hopper, seed=3).run_case(case).failures)


@EVERY
def test_strides_beyond_32_bits(stem: str, hopper: Any) -> None:
    shape = production.Shape(2, 300, 333, 2, 2)
    check(stem, lambda m, s: production.large_strides(Problem(m, s, hopper, shape, seed=4), FAR))


@EVERY
def test_tensors_of_more_than_2_to_the_31_elements(stem: str, hopper: Any) -> None:
    check(stem, lambda m, s: production.many_elements(m, s, hopper, FAR, seq=256, heads=8))


def memcheck(stems: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run the modules under compute-sanitizer, in one process; skip where the tool is missing."""
    tool = shutil.which(SANITIZER)
    if tool is None:
        pytest.skip(f"no {SANITIZER} on PATH; it comes with the CUDA toolkit")
    for stem in stems:  # compiled here, since the DSL under the sanitizer takes minutes
        cached_object(WORKSPACE.module_path(stem))
    # Of accesses only: torch asks the driver for functions that it does not have, and that would be an error, too.
    watch = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", str(FOUND_ERRORS)]
    # Without torch's own allocator each tensor is an allocation of its own, so that what lies past its end is nobody's.
    environment = {**os.environ, NO_JIT_VARIABLE: "1", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [*watch, sys.executable, str(MEMCHECK), *options, *stems]
    return subprocess.run(command, env=environment, cwd=WORKSPACE.root, capture_output=True, text=True, timeout=600)


def test_no_access_outside_the_tensors() -> None:
    done = memcheck(STEMS)
    others = [line for line in done.stdout.splitlines() if not line.startswith("ran ")]
    assert done.returncode == 0, "\n".join(others)[:4000] + done.stderr[-4000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("ran ")] == STEMS


def test_an_access_outside_a_tensor_is_seen() -> None:
    """The control: O of half its size."""
    done = memcheck(["fwd_d192_128"], "--short-output")
    assert done.returncode != 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "Invalid __global__ write" in done.stdout
