"""Rules about shared memory: layouts of tiles, TMA's copies, stages, and the bytes of it all."""

from __future__ import annotations

from collections.abc import Sequence

from fa3gen.design.cta import Cta
from fa3gen.design.rules.registry import GENERATOR, HARDWARE, Violation, rule
from fa3gen.design.rules.wording import around, remainder, terms
from fa3gen.hardware import hopper


@rule(kind=HARDWARE, topic="layouts")
def swizzle_span(
    field: str,
    tensor: str,
    elements: int,
    swizzle: str,
    *,
    tma: bool,
    line: str = "row",
    each: int = hopper.BYTES_16BIT,
) -> Violation | None:
    """A contiguous line of a tile is a whole number of swizzle spans, each one an inner TMA box.

    `line` is "row" or "column", `elements` the extent of it, of `each` as many bytes. PTX ISA, "Matrix Descriptor
    Format" of wgmma and "Swizzling modes"; CUDA Driver API, cuTensorMapEncodeTiled: boxDim[0] * elementSize at most the
    swizzle span, so that a wider line is split into several boxes.
    """
    size = elements * each
    span = hopper.SWIZZLE_SPAN[swizzle]
    if size % span == 0:
        return None
    name = "16-byte rows of a core matrix" if swizzle == "none" else f"{span}-byte swizzle spans"
    boxes = f", and TMA cannot split it into boxes of {span // each} elements" if tma else ""
    fitting = [name for name, other in hopper.SWIZZLE_SPAN.items() if size % other == 0]
    way_out = f"use swizzle {fitting[-1]}" if fitting else f"use a {line} that is a multiple of {16 // each} elements"
    return Violation(
        field,
        f"a {line} of {tensor} is {elements} x {each} = {size} bytes, "
        f"no whole number of {name} ({size} = {size // span} x {span} + {size % span}){boxes}; {way_out}",
    )


@rule(kind=HARDWARE, topic="loads")
def tma_box(field: str, rows: int) -> Violation | None:
    """A TMA box has at most 256 elements along each dimension. CUDA Driver API, cuTensorMapEncodeTiled, boxDim."""
    if rows <= hopper.TMA_BOX:
        return None
    return Violation(field, f"one TMA box would have {rows} rows > {hopper.TMA_BOX}; use at most {hopper.TMA_BOX}")


@rule(kind=HARDWARE, topic="loads")
def tma_stride(head_dim: int, field: str = "problem.head_dim", *, each: int = hopper.BYTES_16BIT) -> Violation | None:
    """Strides of a tensor map are multiples of 16 bytes. CUDA Driver API, cuTensorMapEncodeTiled, globalStrides."""
    stride, align = head_dim * each, hopper.TMA_STRIDE_ALIGN
    if stride % align == 0:
        return None
    return Violation(
        field,
        f"TMA needs strides of whole 16 bytes, and a head of {head_dim} x {each} = "
        f"{remainder(stride, align)}; use {around(head_dim, align // each)}",
    )


@rule(kind=GENERATOR, topic="loads")
def q_stages(stages: int, kind: str) -> Violation | None:
    """Several buffers of Q are rendered where a warp loads for CTAs that take many tiles."""
    if stages == 1 or kind != "cooperative":
        return None
    return Violation(
        "load.q_stages", f"with schedule cooperative a CTA loads one Q tile into one buffer, not {stages}; use 1"
    )


@rule(kind=GENERATOR, topic="loads")
def late_draws(slots: int | None, drawn: bool) -> Violation | None:
    """How many drawn tiles there is room for is said where sequences are packed and tiles drawn."""
    if slots is None or drawn:
        return None
    return Violation("load.tile_slots", "it is for packed sequences whose tiles are drawn; leave it out")


def smem_facts(cta: Cta) -> tuple[list[tuple[str, int]], int, int]:
    """Regions with their arithmetic, barrier bytes, and the bytes that aligning them all costs."""
    data = sum(region.bytes for region in cta.regions)
    slack = cta.smem_bytes - data - cta.barrier_bytes
    return [(f"{region.name} ({region.formula})", region.bytes) for region in cta.regions], cta.barrier_bytes, slack


@rule(kind=HARDWARE, topic="shared memory")
def shared_memory(
    regions: Sequence[tuple[str, int]],
    barrier_bytes: int,
    alignment_slack: int,
    *,
    field: str = "tile.kv",
    ways_out: Sequence[str] = (),
) -> Violation | None:
    """All regions, the barriers and the padding for alignment within 232,448 bytes per CTA.

    CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 227 KB per thread block.
    """
    data = sum(size for _, size in regions)
    total = data + barrier_bytes + alignment_slack
    if total <= hopper.SMEM_PER_CTA:
        return None
    return Violation(
        field,
        f"shared memory: {terms(regions)} = {data}, + {barrier_bytes} of barriers + {alignment_slack} of alignment = "
        f"{total} > {hopper.SMEM_PER_CTA} bytes; use {' or '.join(ways_out) or 'a smaller tile.q or tile.kv'}",
    )


@rule(kind=HARDWARE, topic="shared memory")
def shared_sm(ctas: int, total: int, *, field: str = "tile.ctas_per_sm", smaller: str = "tile.kv") -> Violation | None:
    """The shared memory of all CTAs that share an SM within its 228 KB, of which the system takes 1 KB for each CTA.

    CUDA C++ Programming Guide, "Compute Capability 9.0", Shared Memory.
    """
    each = total + hopper.SMEM_RESERVED
    if ctas * each <= hopper.SMEM_PER_SM:
        return None
    return Violation(
        field,
        f"shared memory of {ctas} CTAs: {ctas} x ({total} + {hopper.SMEM_RESERVED}) = {ctas * each} > "
        f"{hopper.SMEM_PER_SM} bytes of an SM; use fewer CTAs or a smaller {smaller}",
    )
