"""How long a TMA load takes, and how many bytes a cycle reach an SM: the two figures of loads in the simulator.

    python tests/gpu/load_probe.py          on a machine with a Hopper GPU, from the root of a checkout; seconds

prints a line for each size, depth of the ring and number of CTAs: cycles from one landing to the next. With one stage
that is a whole load, request to landing; with several, on all SMs, it is the share of the bandwidth. The tiles lie in
L2 (a few, read over and over) or in HBM (each is read once). `source(variant)` is this file with another VARIANT: the
compiler wants a file for each module.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

THREADS = 32
COLUMNS = 64  # of 16 bits: one swizzle span of 128 bytes
LOADS = 256  # of each CTA
SMEM_ALIGN = 1024  # bytes; a 128-byte swizzle repeats every 8 rows of 128
HOT_TILES = 32  # tiles that every CTA reads over and over: up to 0.5 MB, in L2 after the first time


@dataclass(frozen=True)
class Variant:
    """Rows of a tile, and tiles in flight."""

    rows: int
    stages: int

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return self.rows * COLUMNS * 2


VARIANTS = tuple(Variant(rows, stages) for rows in (8, 64, 128) for stages in (1, 4))

VARIANT = VARIANTS[0]  # source() puts another here


def source(variant: Variant) -> str:
    """The text of this file with `variant` as its VARIANT."""
    text = Path(__file__).read_text(encoding="utf-8")
    return re.sub(r"^VARIANT = .*$", f"VARIANT = {variant!r}", text, count=1, flags=re.MULTILINE)


@cute.jit
def launch(x: cute.Tensor, landed: cute.Tensor, ctas: cutlass.Int32, tiles: cutlass.Int32):
    """x (rows, COLUMNS): tiles below one another; landed (CTAs, LOADS + 1): clocks, the first before any load."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, cutlass.BFloat16)
    layout = cute.tile_to_shape(atom, (VARIANT.rows, COLUMNS, VARIANT.stages), (0, 1, 2))
    tma, mX = cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(), x, cute.select(layout, mode=[0, 1]), (VARIANT.rows, COLUMNS)
    )
    time_loads(tma, mX, landed, layout, tiles).launch(grid=(ctas, 1, 1), block=(THREADS, 1, 1))


@cute.kernel
def time_loads(
    tma: cute.CopyAtom, mX: cute.Tensor, landed: cute.Tensor, layout: cute.ComposedLayout, tiles: cutlass.Int32
):
    """One warp: keep all stages in flight, and note when each tile has landed. Nobody reads the tiles."""
    tidx, _, _ = cute.arch.thread_idx()
    cta, _, _ = cute.arch.block_idx()
    smem = SmemAllocator()
    data = smem.allocate(VARIANT.tile_bytes * VARIANT.stages, byte_alignment=SMEM_ALIGN)
    barriers = smem.allocate_array(cutlass.Int64, VARIANT.stages)
    sX = cute.make_tensor(cute.recast_ptr(data, layout.inner, dtype=cutlass.BFloat16), layout.outer)
    gX = cute.local_tile(mX, (VARIANT.rows, COLUMNS), (None, 0))  # (rows, COLUMNS, tiles)
    shared, boxes = cute.group_modes(sX, 0, 2), cute.group_modes(gX, 0, 2)
    tXsX, tXgX = cpasync.tma_partition(tma, 0, cute.make_layout(1), shared, boxes)  # (TMA, stages), (TMA, tiles)
    if tidx == 0:
        for stage in cutlass.range_constexpr(VARIANT.stages):
            cute.arch.mbarrier_init(barriers + stage, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    first = cta * LOADS
    landed[cta, 0] = cute.arch.clock64()
    for stage in cutlass.range_constexpr(VARIANT.stages):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + stage, VARIANT.tile_bytes)
        cute.copy(tma, tXgX[None, (first + stage) % tiles], tXsX[None, stage], tma_bar_ptr=barriers + stage)
    for load in cutlass.range(LOADS, unroll=1):
        stage = load % VARIANT.stages
        cute.arch.mbarrier_wait(barriers + stage, load // VARIANT.stages % 2)
        landed[cta, load + 1] = cute.arch.clock64()
        following = load + VARIANT.stages
        if following < LOADS:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + stage, VARIANT.tile_bytes)
            cute.copy(tma, tXgX[None, (first + following) % tiles], tXsX[None, stage], tma_bar_ptr=barriers + stage)


def compile_for_sm90a(options: str = "--enable-tvm-ffi") -> Any:
    """Compile VARIANT; the result takes (x, landed, CTAs, tiles), see `launch`; x is bfloat16, landed int64."""
    rows, ctas = cute.sym_int(), cute.sym_int()
    x = cute.runtime.make_fake_compact_tensor(cutlass.BFloat16, (rows, COLUMNS), stride_order=(1, 0), assumed_align=16)
    landed = cute.runtime.make_fake_compact_tensor(
        cutlass.Int64, (ctas, LOADS + 1), stride_order=(1, 0), assumed_align=8
    )
    return cute.compile(launch, x, landed, cutlass.Int32(1), cutlass.Int32(1), options=f"--gpu-arch sm_90a {options}")


def measure(variant: Variant, folder: Path) -> list[dict[str, Any]]:
    """Cycles between landings, for one CTA and for one on each SM, from L2 and from HBM."""
    import torch

    from fa3gen.compile.loading import load_file

    path = folder / f"load_probe_{variant.rows}_{variant.stages}.py"
    path.write_text(source(variant), encoding="utf-8")
    kernel = load_file(path).compile_for_sm90a()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    found = []
    for ctas in (1, sms):
        for place, tiles in (("L2", HOT_TILES), ("HBM", ctas * LOADS)):
            x = torch.zeros(tiles * variant.rows, COLUMNS, dtype=torch.bfloat16, device="cuda")
            landed = torch.zeros(ctas, LOADS + 1, dtype=torch.int64, device="cuda")
            flushed = torch.empty(2**28, dtype=torch.int8, device="cuda")
            for _ in range(3):
                if place == "HBM":
                    flushed.zero_()  # more than L2 holds
                kernel(x, landed, ctas, tiles)
            torch.cuda.synchronize()
            steady = landed.diff(dim=1)[:, LOADS // 4 :].double()
            cycles = float(steady.mean() if variant.stages > 1 else steady.median())
            rate = variant.tile_bytes / cycles
            found.append({**asdict(variant), "from": place, "ctas": ctas, "cycles": cycles, "bytes_per_cycle": rate})
    return found


def main() -> None:
    """Measure all variants and print a line of JSON for each result."""
    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(root))
    with tempfile.TemporaryDirectory() as folder:
        for variant in VARIANTS:
            for row in measure(variant, Path(folder)):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
