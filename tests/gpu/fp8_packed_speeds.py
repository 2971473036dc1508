"""FP8 of packed sequences and pages beside 16 bits: the packed cells of e4m3, each with that of bfloat16, in TFLOP/s.

    python tests/gpu/fp8_packed_speeds.py     on a machine with a Hopper GPU, from the root of a checkout

measures as packed_cells.py does, cell after cell, both dtypes in turn. It writes no record: it prints a Markdown table
with the fastest module of either dtype.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from packed_cells import measure  # noqa: E402

from fa3gen.compile.cache import cached_compile_for_launch  # noqa: E402
from fa3gen.design.workspace import Workspace  # noqa: E402
from fa3gen.measure.bench import require_hopper  # noqa: E402
from fa3gen.measure.packed_cells import cells  # noqa: E402


def main() -> None:
    """Measure, and print a line for each cell."""
    workspace, device = Workspace.find(ROOT), require_hopper()
    found = [(problem, variants) for problem, variants in cells(workspace) if problem.kv_dtype is None]
    able = {problem.model_dump_json(): variants for problem, variants in found}
    pairs = [(problem, problem.model_copy(update={"dtype": "bf16"})) for problem, _ in found if problem.dtype == "e4m3"]
    pairs = [pair for pair in pairs if pair[1].model_dump_json() in able]
    stems = {variant.stem for pair in pairs for each in pair for variant in able[each.model_dump_json()]}
    with ThreadPoolExecutor() as pool:
        list(pool.map(cached_compile_for_launch, (workspace.module_path(stem) for stem in sorted(stems))))
    print("| cell | e4m3 | TFLOP/s | bf16 | TFLOP/s | times as fast |\n|---|---|---|---|---|---|")
    for pair in pairs:
        best = []
        for problem in pair:
            variants = able[problem.model_dump_json()]
            speeds = measure(problem, variants, workspace, device)
            best.append(max(zip(speeds, (variant.stem for variant in variants), strict=True)))
        (narrow, stem), (wide, other) = best
        row = f"| {pair[0].label} | `{stem}` | {narrow:.1f} | `{other}` | {wide:.1f} | {narrow / wide:.2f} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
