"""What a launch costs the host: the first call of a process, and every call after it.

A first call imports the module and gets its kernel: compiled, in an empty compile cache, or loaded from the cache that
this has filled. Each is timed in a fresh process. Later calls are timed in this one, on a problem so small that the GPU
is never behind by more launches than its queue holds, so that the host never waits for it.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fa3gen.base.errors import UserError
from fa3gen.compile.cache import CACHE_DIR_VARIABLE
from fa3gen.design.family import Family
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.run.launch import NO_JIT_VARIABLE
from fa3gen.verify.inputs import normal

BATCH, SEQ_LEN, HEADS = 1, 128, 2
SEED = 0
CALLS, ROUNDS = 100, 9  # launches in a round; the queue of a stream holds 1024
_TIMEOUT_S = 600


@dataclass(frozen=True)
class LaunchTimes:
    """One competitor: seconds of the first call in a process, microseconds of host time of each later one.

    The first calls are None for what is no generated module, and `host_us` with a reason where it cannot be measured.
    """

    competitor: str
    host_us: float | None
    compiled_s: float | None = None
    cached_s: float | None = None
    reason: str | None = None


def small_problem(
    dtype: str, head_dim: int, head_dim_v: int, device: torch.device, by_sequence: Sequence[str] = ()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k, v of the problem that launches are timed on; those in `by_sequence` have a contiguous sequence.

    Keys are whole units and random: in order they are as good as permuted.
    """
    generator = torch.Generator(device).manual_seed(SEED)

    def drawn(name: str, dim: int) -> torch.Tensor:
        if name in by_sequence:
            return normal((BATCH, HEADS, dim, SEQ_LEN), DTYPES[dtype], device, generator).permute(0, 3, 1, 2)
        return normal((BATCH, SEQ_LEN, HEADS, dim), DTYPES[dtype], device, generator)

    return drawn("q", head_dim), drawn("k", head_dim), drawn("v", head_dim_v)


def host_microseconds(launch: Callable[[], Any], synchronize: Callable[[], Any]) -> float:
    """Host time of one call: the median over rounds of CALLS calls in a row, with an idle GPU before each round."""
    for _ in range(CALLS):
        launch()
    rounds = []
    for _ in range(ROUNDS):
        synchronize()
        started = time.perf_counter()
        for _ in range(CALLS):
            launch()
        rounds.append((time.perf_counter() - started) / CALLS)
    synchronize()
    return statistics.median(rounds) * 1e6


def first_calls(path: Path, family: Family) -> tuple[float, float]:
    """Seconds of a first call that compiles, and of one that finds the kernel in the compile cache.

    `family` is what the module is compiled for. Two fresh processes on the current GPU share a cache of their own; the
    second may not compile. Raises UserError with what a process said last when it fails.
    """
    command = [
        sys.executable,
        "-m",
        "fa3gen.measure.first_call",
        str(path.resolve()),
        family.dtype,
        str(family.head_dim),
        str(family.head_dim_v),
        *family.by_sequence,
        *family.keywords,
    ]
    with tempfile.TemporaryDirectory(prefix="fa3gen-first-call-") as cache:
        environment = {**os.environ, CACHE_DIR_VARIABLE: cache}
        environment.pop(NO_JIT_VARIABLE, None)
        compiled = _seconds(command, environment)
        return compiled, _seconds(command, {**environment, NO_JIT_VARIABLE: "1"})


def _seconds(command: list[str], environment: dict[str, str]) -> float:
    """What the process printed."""
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"the first call did not end within {_TIMEOUT_S} s; try it: {' '.join(command)}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise UserError(f"the first call failed ({last}); try it: {' '.join(command)}")
    return float(done.stdout.split()[-1])
