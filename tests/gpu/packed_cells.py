"""Packed cells: how fast modules for packed sequences, and pages, are, at lists of lengths as chats and documents have.

    python tests/gpu/packed_cells.py [STEM...]     on a machine with a Hopper GPU, from the root of a checkout

compiles all modules for packed sequences, or those that are named, checks each in every cell against PyTorch, and times
them in rounds of shuffled order, replayed from CUDA graphs. It writes generated/evidence/packed, a record for each cell
in which all that can serve it were measured; `fa3gen tune --write-table` makes rows of the dispatch table of these.
"""

from __future__ import annotations

import datetime
import math
import random
import statistics
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fa3gen.base.errors import UserError  # noqa: E402
from fa3gen.compile.cache import cached_compile_for_launch  # noqa: E402
from fa3gen.design import masks  # noqa: E402
from fa3gen.design.workspace import Workspace  # noqa: E402
from fa3gen.hardware.dtypes import DTYPES  # noqa: E402
from fa3gen.measure import packed_cells  # noqa: E402
from fa3gen.measure.bench import check_tolerance, require_hopper  # noqa: E402
from fa3gen.measure.tuning.measuring import CudaTimer  # noqa: E402
from fa3gen.records import packed_records  # noqa: E402
from fa3gen.records.packed_records import PackedProblem, PackedRecord  # noqa: E402
from fa3gen.run import gpu  # noqa: E402
from fa3gen.run.launch import load_for_launch  # noqa: E402
from fa3gen.spec.model import Forward, usual_output  # noqa: E402
from fa3gen.spec.specfile import Variant  # noqa: E402
from fa3gen.verify import reference  # noqa: E402
from fa3gen.verify.inputs import usual_keywords  # noqa: E402

BURST_MS, ROUNDS, SEED = 8.0, 7, 0
CHECKED_ROWS = 4000  # of queries: every list of lengths has a shorter sequence


def tensors(problem: PackedProblem, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Random q, k, v, one row behind the other, and the offsets of queries and of keys; what has 8 bits in 16."""
    torch.manual_seed(SEED)
    facts: dict[str, Any] = {"dtype": wide(problem), "device": device}
    sizes = ((problem.lengths_q, problem.heads_q), *[(problem.lengths_k, problem.heads_kv)] * 2)
    q, k, v = (torch.randn((sum(lengths), heads, problem.head_dim), **facts) for lengths, heads in sizes)
    # Of 8 bits they are numbers that these hold; `measure` makes these of them.
    q, k, v = (x.to(dtype).to(x.dtype) for x, dtype in zip((q, k, v), dtypes(problem), strict=True))
    begins = [torch.tensor([0, *x], device=device).cumsum(0).int() for x in (problem.lengths_q, problem.lengths_k)]
    return q, k, v, *begins


def wide(problem: PackedProblem) -> torch.dtype:
    """q's dtype, or that of O where q has 8 bits."""
    return DTYPES[usual_output(problem.dtype)].in_torch()


def dtypes(problem: PackedProblem) -> tuple[torch.dtype, ...]:
    """Those of q, k and v."""
    return tuple(DTYPES[name].in_torch() for name in (problem.dtype, *[problem.kv_dtype or problem.dtype] * 2))


def in_pages(problem: PackedProblem, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same call with keys in pages, which lie in any order: q, k, v, offsets of queries, table, lengths of keys."""
    (q, k, v, begins, _), page, device = inputs, problem.page, inputs[0].device
    assert page is not None
    counts = [math.ceil(length / page) for length in problem.lengths_k]
    order = torch.randperm(sum(counts), device=device).int()
    table = torch.zeros((len(counts), max(counts)), dtype=torch.int32, device=device)
    pages = [x.new_zeros((sum(counts), page, *x.shape[1:])) for x in (k, v)]
    first = row = 0
    for number, (count, length) in enumerate(zip(counts, problem.lengths_k, strict=True)):
        table[number, :count] = at = order[first : first + count]
        for x, into in zip((k, v), pages, strict=True):
            padded = torch.nn.functional.pad(x[row : row + length], (0, 0, 0, 0, 0, count * page - length))
            into[at.long()] = padded.view(count, page, *x.shape[1:])
        first, row = first + count, row + length
    return q, *pages, begins, table, torch.tensor(problem.lengths_k, dtype=torch.int32, device=device)


def error(problem: PackedProblem, inputs: Sequence[torch.Tensor], out: torch.Tensor) -> float:
    """The largest relative error of a sequence, of those that have CHECKED_ROWS in all, the last first."""
    (q, k, v, *begins), reach = inputs, masks.reach(problem.mask.spec_mask())
    named, worst, checked = usual_keywords(problem.family.keywords, problem.heads_q, q.device), 0.0, 0
    bounds = [list(zip(x[:-1], x[1:], strict=True)) for x in (begins[0].tolist(), begins[1].tolist())]
    for rows, keys in reversed(list(zip(*bounds, strict=True))):
        if checked + rows[1] - rows[0] > CHECKED_ROWS:
            continue
        one = (x[None, slice(*of)] for x, of in ((q, rows), (k, keys), (v, keys)))
        wanted = reference.attention(*one, reach=reach, compute_dtype=torch.float32, **named).out[0]
        worst = max(worst, ((out[slice(*rows)] - wanted).norm() / wanted.norm()).item())
        checked += rows[1] - rows[0]
    if not checked:
        raise UserError(f"no sequence of {problem.label} is short enough to be checked")
    return worst


def measure(
    problem: PackedProblem, variants: Sequence[Variant[Forward]], workspace: Workspace, device: torch.device
) -> list[float]:
    """Check the modules in a cell and time them in turns; TFLOP/s."""
    inputs, timer, runs, kept = tensors(problem, device), CudaTimer(device), [], []
    given = inputs if problem.page is None else in_pages(problem, inputs)
    given = *(x.to(dtype) for x, dtype in zip(given[:3], dtypes(problem), strict=True)), *given[3:]
    named = usual_keywords(problem.family.keywords, problem.heads_q, device)
    for variant in variants:
        module = load_for_launch(workspace.module_path(variant.stem))
        out = torch.full_like(inputs[0], math.nan)
        kept.append(out)  # a graph writes to it, and the next capture would give its memory back

        def launch(
            attention: Callable[..., torch.Tensor] = module.attention,
            out: torch.Tensor = out,
            window: Mapping[str, Any] = masks.options_of_call(variant.spec.mask, problem.window),
        ) -> torch.Tensor:
            return attention(*given, out=out, **named, **window)

        if not (found := error(problem, inputs, launch())) < check_tolerance(problem.dtype):
            raise UserError(f"{variant.stem} computes something wrong: relative error {found:.2g}, {problem.label}")
        run, captured = timer.burst(launch, max(1, math.ceil(BURST_MS / timer.once(launch))))
        if not captured:
            raise UserError(f"{variant.stem} could not be captured in a CUDA graph")
        runs.append((run, list[float]()))
    shuffle = random.Random(SEED)
    for _ in range(ROUNDS):
        for run, times in shuffle.sample(runs, len(runs)):
            times.append(run())
    flops = problem.family.flops(problem.shape)
    return [flops / statistics.median(times) / 1e9 for _, times in runs]


def main(stems: Collection[str]) -> None:
    """Compile, measure, and write the records."""
    workspace, device = Workspace.find(ROOT), require_hopper()
    wanted = [
        (problem, variants)
        for problem, variants in packed_cells.cells(workspace)
        if not stems or any(variant.stem in stems for variant in variants)
    ]
    files = {workspace.module_path(variant.stem) for _, variants in wanted for variant in variants}
    with ThreadPoolExecutor() as pool:
        list(pool.map(cached_compile_for_launch, sorted(files)))
    around, records = gpu.environment(), []
    for problem, variants in wanted:
        speeds = measure(problem, variants, workspace, device)
        told = ", ".join(f"{variant.stem} {tflops:.0f}" for variant, tflops in zip(variants, speeds, strict=True))
        print(f"{problem.label}: {told}", flush=True)
        records.append(
            PackedRecord(
                gpu=str(around.gpu),
                sms=torch.cuda.get_device_properties(device).multi_processor_count,
                date=datetime.datetime.now(datetime.UTC).date().isoformat(),
                torch=around.torch,
                dsl=around.dsl,
                problem=problem,
                results=packed_records.results_of(workspace, zip(variants, speeds, strict=True)),
            )
        )
    written = packed_records.save(workspace, records)
    print(f"wrote {len(written)} records to {packed_records.directory(workspace)}; now: fa3gen tune --write-table")


if __name__ == "__main__":
    main(sys.argv[1:])
