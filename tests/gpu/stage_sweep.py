"""The stage sweep: how fast kernels are by stages, threads, and CTAs that share an SM.

    python tests/gpu/stage_sweep.py         on a machine with a Hopper GPU, from the root of a checkout; two minutes

renders specs/sweep into a folder of its own and compiles all modules. Of each it makes copies with shared memory that
nobody uses, so that one or two CTAs fit on an SM where there were more. All of a head dim are checked against PyTorch
and then timed in rounds of shuffled order, replayed from CUDA graphs. It writes generated/evidence/sweep/stages.json;
`fa3gen refresh` shows that in docs/ladder.md.

    python tests/gpu/stage_sweep.py --compiled      without a GPU; minutes

compiles the same modules and notes in the record that is there what stands in their code, where their registers are
those of the record.
"""

from __future__ import annotations

import datetime
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fa3gen.base.errors import UserError  # noqa: E402
from fa3gen.compile import compiler  # noqa: E402
from fa3gen.compile.cache import cached_compile_for_launch  # noqa: E402
from fa3gen.compile.one_bank import OneBank, one_bank_of  # noqa: E402
from fa3gen.design import ceiling, footprint  # noqa: E402
from fa3gen.design.family import Family  # noqa: E402
from fa3gen.design.workspace import Workspace  # noqa: E402
from fa3gen.generate.render import render_variant  # noqa: E402
from fa3gen.inspect.simulation.run import measured_shape  # noqa: E402
from fa3gen.measure.bench import CHECK_TOLERANCE, require_hopper  # noqa: E402
from fa3gen.measure.tuning.measuring import CudaTimer  # noqa: E402
from fa3gen.records import stage_sweep  # noqa: E402
from fa3gen.run import gpu  # noqa: E402
from fa3gen.run.launch import load_for_launch  # noqa: E402
from fa3gen.spec.model import WgmmaProduct  # noqa: E402
from fa3gen.spec.specfile import Variant  # noqa: E402

LENGTHS = (4096, 16384)
HELD_LENGTHS = LENGTHS[:1]  # of the copies
HELD = (1, 2)  # CTAs on an SM of the copies
BURST_MS, ROUNDS, SEED = 12.0, 5, 0
TIMED = "from CUDA graphs, in rounds of shuffled order"
STORAGE = "class SharedStorage:\n"


@dataclass
class Kernel:
    """A module of the sweep or a copy of it: its file, registers, CTAs on an SM; milliseconds and MHz by length."""

    variant: Variant
    path: Path
    held: int | None
    registers: int = 0
    times: dict[int, list[float]] = field(default_factory=dict)
    clocks: dict[int, list[float]] = field(default_factory=dict)
    one_bank: OneBank | None = None

    @property
    def fit(self) -> int:
        """CTAs of the module as it is that share an SM."""
        return ceiling.occupancy(self.variant.spec, self.registers).ctas


def unused_bytes(variant: Variant, ctas: int) -> int:
    """Bytes to add to a CTA's shared memory so that exactly `ctas` fit on an SM; 0 or less where no more do anyway."""
    regions, barriers = footprint.shared_memory_map(variant.spec), footprint.barrier_bytes(variant.spec)
    least = ceiling.SMEM_PER_SM // (ctas + 1) - ceiling.SMEM_RESERVED + 1  # of a CTA of which one more does not fit
    return -(-(least - footprint.total_bytes(regions, barriers)) // 1024) * 1024


def held_down(source: str, unused: int) -> str:
    """A module with so many more bytes in its shared memory, before all else there."""
    if source.count(STORAGE) != 1:
        raise UserError(f"the module has no single line {STORAGE!r} to put unused shared memory behind")
    region = f"    unused: cute.struct.Align[cute.struct.MemRange[cutlass.Int8, {unused}], 1024]\n"
    return source.replace(STORAGE, STORAGE + region)


def kernels(workspace: Workspace, folder: Path) -> Iterator[Kernel]:
    """Write every module and its copies into the folder."""
    for variant in stage_sweep.variants(workspace):
        source = render_variant(variant, workspace)
        for ctas in (None, *HELD):
            unused = 0 if ctas is None else unused_bytes(variant, ctas)
            if ctas is None or unused > 0:
                path = folder / f"{variant.stem}{f'_held{ctas}' if ctas else ''}.py"
                path.write_text(held_down(source, unused) if ctas else source, encoding="utf-8")
                yield Kernel(variant, path, ctas)


def on_scalars(variant: Variant) -> bool:
    """Whether a product is one of multiply-adds."""
    return not isinstance(variant.spec.pv, WgmmaProduct)


def compiled(found: Sequence[Kernel]) -> list[Kernel]:
    """Compile side by side and note what stands in the code; without copies that hold nothing down, since registers do.

    Raises UserError for a module that spills.
    """

    def note(kernel: Kernel) -> None:
        census = compiler.analyse(cached_compile_for_launch(kernel.path)).census
        spec = kernel.variant.spec
        if census.spills:
            raise UserError(f"{kernel.path.stem} spills; take it out of the sweep")
        kernel.registers = census.registers
        kernel.one_bank = one_bank_of(spec, census) if on_scalars(kernel.variant) else None

    with ThreadPoolExecutor() as pool:
        list(pool.map(note, found))
    return [kernel for kernel in found if kernel.held is None or kernel.held < kernel.fit]


def measure(found: Sequence[Kernel], length: int, device: torch.device) -> None:
    """Check all kernels, which are of one head dim, at a length, and time them in turns."""
    shape, spec = measured_shape(found[0].variant.spec, length), found[0].variant.spec
    torch.manual_seed(SEED)
    size = (shape.batch, length, shape.heads_q, spec.problem.head_dim)
    q, k, v = (torch.randn(size, dtype=torch.bfloat16, device=device) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(*(x[:1].transpose(1, 2) for x in (q, k, v)))
    timer, runs, kept = CudaTimer(device), {}, []
    for kernel in found:
        module = load_for_launch(kernel.path)
        out = torch.empty_like(q)
        kept.append(out)  # a graph writes to it, and the next capture would give its memory back

        def launch(attention: Callable[..., torch.Tensor] = module.attention, out: torch.Tensor = out) -> torch.Tensor:
            return attention(q, k, v, out=out)

        error = ((launch()[:1].transpose(1, 2) - expected).float().norm() / expected.float().norm()).item()
        if not error < CHECK_TOLERANCE:
            raise UserError(f"{kernel.path.stem} computes something wrong: relative error {error:.2g}")
        runs[kernel.path], captured = timer.burst(launch, max(1, math.ceil(BURST_MS / timer.once(launch))))
        if not captured:
            raise UserError(f"{kernel.path.stem} could not be captured in a CUDA graph")
    shuffle = random.Random(SEED)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(ROUNDS):
            for kernel in shuffle.sample(list(found), len(found)):
                clock = pool.submit(gpu.sample)  # while the launches run
                kernel.times.setdefault(length, []).append(runs[kernel.path]())
                if (mhz := clock.result().sm_mhz) is not None:
                    kernel.clocks.setdefault(length, []).append(mhz)


def record_of(kernel: Kernel) -> stage_sweep.Measured:
    """What the record says of a kernel: medians."""
    family, spec = Family.of(kernel.variant.spec), kernel.variant.spec
    medians = {length: statistics.median(times) for length, times in kernel.times.items()}
    return stage_sweep.Measured(
        stem=kernel.variant.stem,
        held=kernel.held is not None,
        registers=kernel.registers,
        ctas=kernel.held or kernel.fit,
        one_bank=kernel.one_bank,
        tflops={str(length): family.flops(measured_shape(spec, length)) / ms / 1e9 for length, ms in medians.items()},
        sm_mhz={str(length): statistics.median(clocks) for length, clocks in kernel.clocks.items()},
    )


def with_facts(sweep: stage_sweep.StageSweep, found: Sequence[Kernel]) -> stage_sweep.StageSweep:
    """The record with what stands in the code of these kernels, which has to be the code that was measured."""
    rows, by_name = [], {(kernel.variant.stem, kernel.held): kernel for kernel in found}
    for row in sweep.measured:
        if kernel := by_name.get((row.stem, row.held_to)):
            if kernel.registers != row.registers:
                raise UserError(
                    f"{kernel.path.stem} is compiled to {kernel.registers} registers, and measured with "
                    f"{row.registers}: other code; measure the sweep anew"
                )
            row = row.model_copy(update={"one_bank": kernel.one_bank})
        rows.append(row)
    return sweep.model_copy(update={"measured": rows})


def note_facts(workspace: Workspace) -> None:
    """Compile what has products on scalars, and write the record that there is with what stands in the code."""
    sweep = stage_sweep.read(workspace)
    if sweep is None:
        raise UserError(f"there is no {stage_sweep.record_path(workspace)}; measure it on a GPU, without --compiled")
    with tempfile.TemporaryDirectory() as folder:
        found = [kernel for kernel in kernels(workspace, Path(folder)) if on_scalars(kernel.variant)]
        stage_sweep.write(workspace, with_facts(sweep, compiled(found)))


def main() -> None:
    """Render, compile, measure, and write the record."""
    workspace = Workspace.find(ROOT)
    if "--compiled" in sys.argv[1:]:
        return note_facts(workspace)
    device = require_hopper()
    with tempfile.TemporaryDirectory() as folder:
        found = compiled(list(kernels(workspace, Path(folder))))
        for head_dim in sorted({kernel.variant.spec.problem.head_dim for kernel in found}):
            of_this = [kernel for kernel in found if kernel.variant.spec.problem.head_dim == head_dim]
            for length in LENGTHS:
                taking_part = [kernel for kernel in of_this if kernel.held is None or length in HELD_LENGTHS]
                print(f"head dim {head_dim}, {length} tokens: {len(taking_part)} kernels", flush=True)
                measure(taking_part, length, device)
    around = gpu.environment()
    sweep = stage_sweep.StageSweep(
        gpu=str(around.gpu),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        timed=TIMED,
        torch=around.torch,
        dsl=around.dsl,
        measured=[record_of(kernel) for kernel in found],
    )
    print(f"wrote {stage_sweep.write(workspace, sweep)}; show it with: fa3gen refresh")


if __name__ == "__main__":
    main()
