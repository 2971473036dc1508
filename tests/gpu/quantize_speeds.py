"""How fast quantisation is, by rows of a tile and threads, beside a copy of as many bytes.

    python tests/gpu/quantize_speeds.py                      on a machine with a Hopper GPU, from the root of a checkout
    python tests/gpu/quantize_speeds.py --tiles              tiles of other sizes, too, which it renders and compiles
    python tests/gpu/quantize_speeds.py --tiles STEM ...     of these modules only
    python tests/gpu/quantize_speeds.py --tiles --list       without a GPU: what would be timed, and its registers

prints a line for each module: GB/s of x read once and the output written once, from CUDA graphs, the median of rounds
in shuffled order, with scales that are found and, of scales for heads, with given ones, which take no second kernel. A
copy of as many bytes by torch, read and written, is the bound. Outputs are those of the committed module, but for a few
rotated values that lie between two numbers: which products and sums ptxas fuses may differ.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fa3gen.compile.cache import cached_compile  # noqa: E402
from fa3gen.compile.toolchain import resource_usage  # noqa: E402
from fa3gen.design import rules  # noqa: E402
from fa3gen.design.operation import operation_of  # noqa: E402
from fa3gen.design.workspace import Workspace  # noqa: E402
from fa3gen.generate.render import render_variant  # noqa: E402
from fa3gen.measure.bench import require_hopper  # noqa: E402
from fa3gen.measure.tuning.measuring import CudaTimer  # noqa: E402
from fa3gen.run.launch import load_for_launch  # noqa: E402
from fa3gen.spec.model import Quantize  # noqa: E402
from fa3gen.spec.specfile import Variant  # noqa: E402

SHAPE = (4, 16384, 16)  # batch, seq, heads: of head dim 128 in 16 bits 268 MB, far more than the L2 holds
ROWS, THREADS = (32, 64, 128, 256), (128, 256, 512)
BURST_MS, ROUNDS, SEED = 15.0, 12, 0
FEW = 1e-4  # of the values


@dataclass(frozen=True)
class Timed:
    """A module in a file, and the committed one whose output it has to give."""

    stem: str
    path: Path
    spec: Quantize
    like: Path


def modules(workspace: Workspace, stems: list[str], folder: Path, *, tiles: bool) -> Iterator[Timed]:
    """The committed modules, or those named, and with `tiles` their like with other tiles, rendered into `folder`."""
    for file in workspace.load_all():
        for variant in file.variants:
            if isinstance(variant.spec, Quantize) and (not stems or variant.stem in stems):
                path = workspace.module_path(variant.stem)
                yield Timed(variant.stem, path, variant.spec, path)
                for other in _tiles(variant, variant.spec) if tiles else ():
                    rendered = folder / f"{other.stem}.py"
                    rendered.write_text(render_variant(other, workspace), encoding="utf-8")
                    assert isinstance(other.spec, Quantize)
                    yield Timed(other.stem, rendered, other.spec, path)


def _tiles(variant: Variant, spec: Quantize) -> Iterator[Variant]:
    """The same with other rows and threads, and as many CTAs as an SM has room for; blocks keep their rows."""
    for rows in ROWS if spec.problem.scale != "block" else (spec.tile.rows,):
        for threads in THREADS:
            tiles = (
                spec.tile.model_copy(update={"rows": rows, "threads": threads, "per_sm": ctas})
                for ctas in (8, 6, 4, 3, 2, 1)
            )
            legal = [tile for tile in tiles if not rules.check(spec.model_copy(update={"tile": tile}))]
            if legal and (rows, threads) != (spec.tile.rows, spec.tile.threads):
                stem = f"{variant.stem}_{rows}_rows_{threads}_threads"
                yield replace(variant, stem=stem, spec=spec.model_copy(update={"tile": legal[0]}))


def calls_of(timed: list[Timed], device: torch.device) -> dict[str, tuple[Callable[[], Any], float]]:
    """A call of each, all of one head dim and dtype, and the GB that it moves; the copy comes first.

    SystemExit for output that is not that of the committed module.
    """
    generator, spec = torch.Generator(device).manual_seed(SEED), timed[0].spec
    sizes = *SHAPE, spec.problem.head_dim
    x = torch.randn(sizes, generator=generator, device=device).to(spec.element.in_torch())
    signs = torch.arange(spec.problem.head_dim, device=device) % 3 % 2 * 2.0 - 1.0
    given = (x, signs) if spec.problem.rotate else (x,)
    moved = (x.numel() * x.element_size() + x.numel()) / 1e9
    source, copied = (torch.empty(int(moved * 1e9) // 2, dtype=torch.uint8, device=device) for _ in range(2))
    found: dict[str, tuple[Callable[[], Any], float]] = {"copy_": (functools.partial(copied.copy_, source), moved)}
    strides = operation_of(spec).output.strides(sizes)
    out, wanted = (torch.empty_strided(sizes, strides, dtype=torch.float8_e4m3fn, device=device) for _ in range(2))
    load_for_launch(timed[0].like).quantize(*given, out=wanted)
    for each in timed:
        entry = load_for_launch(each.path).quantize
        _, descale = entry(*given, out=out)
        others = int((out.view(torch.uint8) != wanted.view(torch.uint8)).sum())
        if others > spec.problem.rotate * FEW * out.numel():
            raise SystemExit(f"{each.stem} gives {others} of {out.numel()} other values than {each.like.stem}")
        found[each.stem] = functools.partial(entry, *given, out=out), moved
        if spec.problem.scale == "head":
            call = functools.partial(entry, *given, descale=descale.clone(), out=out)
            found[f"{each.stem}, given scales"] = call, moved
    return found


def measure(calls: dict[str, tuple[Callable[[], Any], float]], device: torch.device) -> dict[str, float]:
    """GB/s of each, the median of rounds in which all take turns."""
    timer, runs = CudaTimer(device), {}
    for name, (call, _) in calls.items():
        call()
        graph, count = torch.cuda.CUDAGraph(), max(1, round(BURST_MS / timer.once(call)))
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
        runs[name] = graph, count
    milliseconds: dict[str, list[float]] = {name: [] for name in runs}
    order, chance = list(runs), random.Random(SEED)
    for _ in range(ROUNDS):
        chance.shuffle(order)
        for name in order:
            graph, count = runs[name]
            milliseconds[name].append(timer.once(graph.replay) / count)
    return {name: calls[name][1] / statistics.median(times) * 1e3 for name, times in milliseconds.items()}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stems", nargs="*", help="modules, by default all")
    parser.add_argument("--tiles", action="store_true", help="other rows and threads, too")
    parser.add_argument("--list", action="store_true", help="what would be timed; needs no GPU")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fa3gen-quantize-") as folder, torch.no_grad():
        timed = list(modules(Workspace.find(ROOT), options.stems, Path(folder), tiles=options.tiles))
        if options.list:
            for each in timed:
                kernels, tile = resource_usage(cached_compile(each.path).cubin), each.spec.tile
                registers = "/".join(str(kernel.registers) for kernel in kernels.values())
                sizes = f"{tile.rows:4} rows {tile.threads:4} threads {tile.per_sm} CTAs"
                print(f"{each.stem:48} {sizes} {registers:>8} registers")
            return
        device = require_hopper()
        # One after the other by what is read, so that no more than a few tensors are held at once.
        for like in dict.fromkeys(each.like for each in timed):
            speeds = measure(calls_of([each for each in timed if each.like == like], device), device)
            bound = next(iter(speeds.values()))
            for name, speed in speeds.items():
                print(f"{name:60} {speed:6.0f} GB/s  {speed / bound:5.2f} of the copy", flush=True)


if __name__ == "__main__":
    main()
