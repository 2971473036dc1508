"""From the spec of a GEMM to facts: every rule that can be asked about it is asked here."""

from __future__ import annotations

from collections.abc import Iterable

from fa3gen.design import gemm
from fa3gen.design.cta import cta_of
from fa3gen.design.rules import gemms, memory, products, threads
from fa3gen.design.rules.registry import Answer
from fa3gen.hardware import hopper
from fa3gen.spec.common import Major
from fa3gen.spec.model import Gemm, WgmmaProduct


def answers(spec: Gemm) -> list[Answer]:
    """Every question about a GEMM; those of footprint need a spec whose parts go together."""
    found = list(_structure(spec))
    sound = not any(answer.refuses for answer in found)
    if sound:
        shapes = list(_wgmma(spec, spec.product) if isinstance(spec.product, WgmmaProduct) else _scalar(spec))
        found += shapes
        if not any(answer.refuses for answer in shapes):
            found += _footprint(spec)
    return found


def _structure(spec: Gemm) -> Iterable[Answer]:
    engine, kind = spec.product.engine, spec.schedule.kind
    yield threads.thread_unit.ask(engine == "wgmma", spec.tile.threads, spec.tile.warpgroups)
    yield gemms.gemm_load.ask(engine, spec.load.engine)
    yield gemms.gemm_layouts.ask(engine, spec.smem is not None)
    yield gemms.gemm_schedule.ask(engine, kind)
    yield gemms.gemm_stages.ask(spec.load.engine, kind, spec.load.stages)
    yield gemms.gemm_output_dtype.ask(spec.problem.dtype, spec.d_dtype)
    yield gemms.gemm_output.ask(kind, spec.d_dtype, spec.d.add_c)
    source = spec.product.a.source if isinstance(spec.product, WgmmaProduct) else ""
    yield gemms.gemm_eight_bit.ask(spec.problem.dtype, kind, source)
    yield gemms.gemm_two_levels.ask(gemm.two_levels(spec), kind, source)
    if isinstance(spec.product, WgmmaProduct):
        a, b = spec.product.a, spec.product.b
        yield products.a_from_registers.ask("product", a.source, a.major)
        yield products.b_from_smem.ask("product", b.source)
        for name, operand in (("a", a), ("b", b)):
            yield gemms.gemm_eight_bit_major.ask(f"product.{name}.major", spec.problem.dtype, operand.major)
        yield gemms.gemm_a_registers.ask(kind, a.source)
        if gemm.specialized(spec):
            yield gemms.gemm_overlap.ask(a.source, gemm.overlapped(spec), gemm.two_levels(spec))
            if spec.tile.warpgroups is not None:
                yield threads.consumer_warpgroups.ask(spec.tile.warpgroups)


def _wgmma(spec: Gemm, product: WgmmaProduct) -> Iterable[Answer]:
    tile, warpgroups = spec.tile, spec.tile.warpgroups or 1
    yield threads.wgmma_threads.ask(warpgroups)
    yield gemms.gemm_rows.ask(tile.m, warpgroups)
    yield products.wgmma_columns.ask("tile.n", "D", tile.n)
    yield products.wgmma_depth.ask("tile.k", "D", tile.k, spec.element.wgmma_k)
    yield memory.tma_box.ask("tile.m", tile.m)
    yield memory.tma_box.ask("tile.n", tile.n)
    yield memory.tma_box.ask("tile.k", tile.k)
    assert spec.smem is not None
    size = spec.element.bytes
    yield memory.swizzle_span.ask(
        "smem.a", "A", _row(tile.m, tile.k, product.a.major), spec.smem.a, tma=True, each=size
    )
    yield memory.swizzle_span.ask(
        "smem.b", "B", _row(tile.n, tile.k, product.b.major), spec.smem.b, tma=True, each=size
    )
    if gemm.specialized(spec):
        yield gemms.gemm_chunk_columns.ask(tile.n, gemm.chunk_columns(spec))
        return
    yield gemms.gemm_output_columns.ask(tile.n)
    yield memory.swizzle_span.ask("smem.d", "D", tile.n, spec.smem.d, tma=True)
    a_bytes = spec.load.stages * gemm.stage_bytes(spec)[0]
    yield gemms.gemm_output_over_a.ask(tile.m, tile.n, spec.d_element.bytes, a_bytes)


def _row(extent: int, depth: int, major: Major) -> int:
    """Elements side by side in a tile."""
    return depth if major == "k" else extent


def _scalar(spec: Gemm) -> Iterable[Answer]:
    tile, count = spec.tile, spec.tile.threads or 0
    whole = threads.whole_warps.ask(count)
    yield threads.scalar_threads.ask(count)
    yield whole
    if whole.refuses:
        return
    yield gemms.gemm_grid.ask(tile.m, tile.n, count, gemm.vector(spec))
    yield gemms.gemm_copies.ask("A", tile.m, tile.k, count, gemm.vector(spec))
    yield gemms.gemm_copies.ask("B", tile.k, tile.n, count, gemm.vector(spec))


def _footprint(spec: Gemm) -> Iterable[Answer]:
    cta, tile = cta_of(spec), spec.tile
    yield _shared_memory(spec)
    if gemm.specialized(spec):
        _, budget = gemm.register_budget(spec)
        consumers = tile.warpgroups or 0
        yield threads.consumer_registers.ask(cta.held, consumers, False, budget, field="tile.n")
        return
    yield threads.registers_per_thread.ask(cta.held, field="tile.n", smaller="tile.m or tile.n")
    field = "tile.threads" if tile.threads is not None else "tile.warpgroups"
    yield threads.registers_per_sm.ask(field, cta.threads, cta.held, smaller="tile.m or tile.n")


def _shared_memory(spec: Gemm) -> Answer:
    """The rule `shared_memory`, with the most stages that would fit as way out."""
    answer = memory.shared_memory.ask(*memory.smem_facts(cta_of(spec)), field="load.stages")
    if not answer.refuses:
        return answer
    for stages in range(spec.load.stages - 1, 1, -1):
        fewer = spec.model_copy(update={"load": spec.load.model_copy(update={"stages": stages})})
        if cta_of(fewer).smem_bytes <= hopper.SMEM_PER_CTA:
            ways_out = [f"at most {stages} stages"]
            break
    else:
        ways_out = ["a smaller tile.m, tile.n or tile.k"]
    return memory.shared_memory.ask(*memory.smem_facts(cta_of(spec)), field="load.stages", ways_out=ways_out)
