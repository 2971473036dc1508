"""What one CTA of a kernel takes of an SM, whatever the kernel computes: threads, shared memory, registers."""

from __future__ import annotations

from dataclasses import dataclass

from fa3gen.design import boxes, combining, footprint, gemm, quantizing
from fa3gen.design.footprint import Region
from fa3gen.hardware import hopper
from fa3gen.spec.model import Combine, Copy, Forward, Gemm, Quantize, Spec


@dataclass(frozen=True)
class Cta:
    """Arrays in shared memory in their order, and mbarriers behind them, in bytes; registers per thread.

    `held` is an estimate of what a computing thread holds at the widest point, by what. `launch_registers`: what each
    thread is launched with where setmaxnreg moves registers later, else None. `launched_per_sm`: of a persistent
    kernel, whose CTAs take tile after tile, how many are started for each SM; None of others.
    """

    threads: int
    regions: tuple[Region, ...]
    barrier_bytes: int
    held: tuple[tuple[str, int], ...]
    launch_registers: int | None = None
    launched_per_sm: int | None = None

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory that the CTA asks for."""
        return footprint.total_bytes(self.regions, self.barrier_bytes)

    @property
    def registers(self) -> int:
        """Registers per thread that ptxas is expected to report."""
        if self.launch_registers is not None:
            return self.launch_registers
        return min(hopper.REGISTERS_PER_THREAD, sum(count for _, count in self.held))

    def placed(self) -> list[tuple[int, Region]]:
        """Offset and region of each array in shared memory, and of the mbarriers behind them."""
        placed, offset = [], 0
        for region in self.regions:
            offset = -(-offset // region.align) * region.align
            placed.append((offset, region))
            offset += region.bytes
        if self.barrier_bytes:
            count = self.barrier_bytes // hopper.MBARRIER_BYTES
            formula = f"{count} mbarrier{'s' * (count > 1)}"
            placed.append((offset, Region("barriers", self.barrier_bytes, formula, hopper.MBARRIER_BYTES, "")))
        return placed


def cta_of(spec: Spec) -> Cta:
    """What a CTA of a checked spec takes."""
    match spec:
        case Forward():
            return Cta(
                threads=footprint.threads(spec),
                regions=tuple(footprint.shared_memory_map(spec)),
                barrier_bytes=footprint.barrier_bytes(spec),
                held=tuple(footprint.registers_per_thread(spec)),
                launch_registers=footprint.launch_registers(spec) if footprint.specialized(spec) else None,
                launched_per_sm=spec.tile.ctas_per_sm if footprint.persistent(spec) else None,
            )
        case Gemm():
            return Cta(
                threads=gemm.threads(spec),
                regions=tuple(gemm.shared_memory_map(spec)),
                barrier_bytes=gemm.barrier_bytes(spec),
                held=tuple(gemm.registers_per_thread(spec)),
                launch_registers=hopper.registers_at_launch(gemm.threads(spec)) if gemm.specialized(spec) else None,
                launched_per_sm=1 if gemm.specialized(spec) else None,
            )
        case Copy():
            return Cta(
                threads=hopper.WARP,
                regions=tuple(boxes.shared_memory_map(spec)),
                barrier_bytes=boxes.barrier_bytes(spec),
                held=(("addresses and counters", boxes.OTHER_REGISTERS),),
            )
        case Combine():
            return Cta(
                threads=spec.cta.threads,
                regions=tuple(combining.shared_memory_map(spec)),
                barrier_bytes=0,
                held=tuple(combining.registers_per_thread(spec)),
            )
        case Quantize():
            return Cta(
                threads=spec.tile.threads,
                regions=tuple(quantizing.shared_memory_map(spec)),
                barrier_bytes=0,
                held=tuple(quantizing.registers_per_thread(spec)),
            )
