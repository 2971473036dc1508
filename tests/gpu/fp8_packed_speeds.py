"""FP8 of packed sequences and pages beside 16 bits: the packed cells of e4m3, each with that of bfloat16, in TFLOP/s.

    python tests/gpu/fp8_packed_speeds.py     on a machine with a Hopper GPU, from the root of a checkout

measures as `fa3gen tune --measure` does, cell after cell, both dtypes in turn. It writes no record: it prints a
Markdown table with the fastest module of either dtype.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fa3gen.base.errors import UserError  # noqa: E402
from fa3gen.compile.cache import cached_compile_for_launch  # noqa: E402
from fa3gen.design.workspace import Workspace  # noqa: E402
from fa3gen.measure.bench import require_hopper  # noqa: E402
from fa3gen.measure.packed_cells import cells  # noqa: E402
from fa3gen.measure.packed_speeds import measure, module_competitor  # noqa: E402
from fa3gen.measure.tuning.measuring import CudaTimer  # noqa: E402


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
            own = [module_competitor(variant, workspace.module_path(variant.stem)) for variant in variants]
            speeds = measure(problem, own, device, CudaTimer(device))
            if failed := next((one for one in speeds if one.tflops is None), None):
                raise UserError(f"{failed.name}: {failed.reason}, {problem.label}")
            best.append(max((one.tflops or 0.0, one.name) for one in speeds))
        (narrow, stem), (wide, other) = best
        row = f"| {pair[0].label} | `{stem}` | {narrow:.1f} | `{other}` | {wide:.1f} | {narrow / wide:.2f} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
