"""What the docstring of a GEMM module says."""

from __future__ import annotations

from fa3gen.design import gemm
from fa3gen.design.cta import cta_of
from fa3gen.design.schedule import Schedule, schedule_of
from fa3gen.generate import header
from fa3gen.hardware import hopper
from fa3gen.spec.model import Gemm, WgmmaProduct


def describe(spec: Gemm, summary: str) -> header.Description:
    """Describe one module in words; `summary` is that of its spec."""
    schedule, specialized = schedule_of(spec), gemm.specialized(spec)
    a, b = (major.upper() for major in gemm.majors(spec))
    return header.Description(
        title=f"{summary.rstrip('.')} ({spec.element.long_name}, A {a}-major, B {b}-major).",
        formula=_formula(spec),
        sentence=_sentence(spec),
        decisions=tuple(_decisions(spec)),
        threads=tuple(_threads(spec, schedule)),
        barriers=tuple(header.rings(schedule) if specialized else header.barriers(schedule)),
        named_barriers=(),
        steps_title=f"Timeline: a tile is one of D, a step takes {spec.tile.k} of k",
        steps=tuple(header.step_rows(schedule)),
    )


def _formula(spec: Gemm) -> str:
    if spec.d.add_c:
        return "D = A B + C    A: (m, k)    B: (k, n)    C, D: (m, n)"
    return "D = A B    A: (m, k)    B: (k, n)    D: (m, n)"


def _sentence(spec: Gemm) -> str:
    if gemm.two_levels(spec):
        return f"The tensor core sums {spec.tile.k} of k, threads add these sums in float32."
    if spec.element.bytes < hopper.BYTES_16BIT:
        return "Sums have 13 bits below their largest addend, as the tensor core keeps them: their error grows with k."
    return "Sums are float32."


def _decisions(spec: Gemm) -> list[tuple[str, str]]:
    tile = spec.tile
    rows = [("tile", f"{tile.m} x {tile.n} of D, {tile.k} of k per step"), ("loads", _loads(spec))]
    if gemm.specialized(spec):
        beside = ", one step issued while the last one runs" if gemm.overlapped(spec) else ""
        rows.append(("schedule", f"one warp loads, {tile.warpgroups} warpgroups multiply{beside}"))
    if spec.smem is None:
        rows.append(("layouts", "plain rows: threads read whole 16 bytes, those of a quarter of a warp side by side"))
    else:
        rows.append(("layouts", f"swizzle A {spec.smem.a}, B {spec.smem.b}, D {spec.smem.d}"))
    rows += [("D = A B", _product(spec)), ("output", _output(spec)), ("order", _order(spec))]
    return rows


def _loads(spec: Gemm) -> str:
    ring = f"A and B in one ring of {header.stages(spec.load.stages)}"
    if spec.load.engine == "cp_async":
        return f"cp.async, 16 bytes each, zeros beyond the ends; {ring}"
    return f"TMA; {ring}, a full barrier for both"


def _product(spec: Gemm) -> str:
    if not isinstance(spec.product, WgmmaProduct):
        lanes = spec.tile.n // gemm.vector(spec)
        rows = spec.tile.m * lanes // gemm.computing_threads(spec)
        return f"scalar f32 multiply-adds, {rows} x {gemm.vector(spec)} sums a thread"
    depth = spec.element.wgmma_k
    count = spec.tile.k // depth * (spec.tile.m // ((spec.tile.warpgroups or 1) * hopper.WGMMA_M))
    source = "registers, by ldmatrix" if gemm.a_in_registers(spec) else "shared memory"
    a, b = (major.upper() for major in gemm.majors(spec))
    return f"{count} wgmma m64n{spec.tile.n}k{depth} per warpgroup; A from {source}, {a}-major; B {b}-major"


def _output(spec: Gemm) -> str:
    if not isinstance(spec.product, WgmmaProduct):
        return "D goes from registers to global memory, 16 bytes at a time"
    if not gemm.specialized(spec):
        return "D is gathered in shared memory, over A, and written by TMA, whole 16 bytes"
    c, part = "C is added; " if spec.d.add_c else "", f"16 x {gemm.chunk_columns(spec)} of D"
    return f"{c}each warp gathers {part} in shared memory for TMA, which writes whole 16 bytes"


def _order(spec: Gemm) -> str:
    who = "a CTA per SM; tiles are dealt out in turn" if gemm.specialized(spec) else "a CTA per tile"
    return f"{who}, {spec.tile.band} one below the other, then the next column: they share L2"


def _threads(spec: Gemm, schedule: Schedule) -> list[str]:
    count = gemm.threads(spec)
    held = gemm.registers_per_thread(spec)
    registers = f"about {sum(n for _, n in held)} registers each: {', '.join(f'{what} {n}' for what, n in held)}"
    consumers = spec.tile.warpgroups or 0
    if not isinstance(spec.product, WgmmaProduct):
        across = spec.tile.n // gemm.vector(spec)
        down = count // across
        who = f"{down} x {across} threads, each with {spec.tile.m // down} rows, {down} apart, and 8 adjacent columns"
        return [f"{count} threads, {count // hopper.WARP} warps: {who}", registers]
    rows = spec.tile.m // consumers
    if not gemm.specialized(spec):
        who = f"{consumers} warpgroups own {rows} rows of D each"
        return [f"{count} threads, {count // hopper.WARP} warps: {who}", "warp 0 issues the TMA copies, too", registers]
    return header.roles(schedule, cta_of(spec), gemm.register_budget(spec), [f"{rows} rows of D each"])
