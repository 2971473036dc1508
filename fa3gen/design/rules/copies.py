"""Rules about copies by TMA: the box and its swizzle, tiles wider than a span, packed rows, the ring of stages."""

from __future__ import annotations

from collections.abc import Sequence

from fa3gen.design.rules.registry import GENERATOR, HARDWARE, Violation, rule
from fa3gen.design.rules.wording import around, remainder
from fa3gen.hardware import hopper


@rule(kind=HARDWARE, topic="box")
def box_extents(extents: Sequence[int]) -> Violation | None:
    """A box has at most 256 elements along each dimension. CUDA Driver API, cuTensorMapEncodeTiled, boxDim."""
    wide = [extent for extent in extents if extent > hopper.TMA_BOX]
    if not wide:
        return None
    shown = " x ".join(map(str, extents))
    return Violation(
        "box.extents",
        f"a box of {shown} has {wide[0]} > {hopper.TMA_BOX} elements along a dimension; use at most {hopper.TMA_BOX}",
    )


@rule(kind=HARDWARE, topic="box")
def box_row(elements: int, size: int) -> Violation | None:
    """A row of a box is whole 16-byte units. CUDA Driver API, cuTensorMapEncodeTiled: boxDim[0] * elementSize."""
    row, unit = elements * size, hopper.TMA_STRIDE_ALIGN
    if row % unit == 0:
        return None
    return Violation(
        "box.extents",
        f"a row of the box is {elements} x {size} = {remainder(row, unit)}; "
        f"use {around(elements, unit // size)} elements",
    )


@rule(kind=HARDWARE, topic="box")
def box_span(elements: int, size: int, swizzle: str) -> Violation | None:
    """A row of a swizzled box is at most one span. CUDA Driver API, cuTensorMapEncodeTiled, "swizzle"."""
    span, row = hopper.SWIZZLE_SPAN[swizzle], elements * size
    if swizzle == "none" or row <= span:
        return None
    return Violation(
        "box.extents",
        f"a row of the box is {elements} x {size} = {row} bytes > {span}, the span of swizzle {swizzle}; use "
        f"{span // size} elements, and as many boxes as a row needs, or swizzle none",
    )


@rule(kind=GENERATOR, topic="box")
def box_fills_span(elements: int, size: int, swizzle: str) -> Violation | None:
    """A row of a swizzled box is a whole span: with a narrower one part of shared memory would stay unused."""
    span, row = hopper.SWIZZLE_SPAN[swizzle], elements * size
    if swizzle == "none" or row >= span:
        return None
    fitting = [name for name, other in hopper.SWIZZLE_SPAN.items() if name != "none" and other == row]
    return Violation(
        "box.extents",
        f"a row of the box is {elements} x {size} = {row} bytes, less than the {span} of a span of swizzle {swizzle}; "
        f"use {span // size} elements or swizzle {(fitting or ['none'])[0]}",
    )


@rule(kind=HARDWARE, topic="box")
def box_start(extents: Sequence[int], size: int) -> Violation | None:
    """A box begins at a multiple of 128 bytes of shared memory. PTX ISA, cp.async.bulk.tensor, dstMem."""
    bytes_ = size
    for extent in extents:
        bytes_ *= extent
    if bytes_ % hopper.TMA_SMEM_ALIGN == 0:
        return None
    shown = " x ".join(map(str, (*extents, size)))
    return Violation(
        "box.extents",
        f"boxes lie one behind the other at multiples of {hopper.TMA_SMEM_ALIGN} bytes, and one is {shown} = "
        f"{remainder(bytes_, hopper.TMA_SMEM_ALIGN)}; use more rows",
    )


@rule(kind=HARDWARE, topic="box")
def map_rank(dimensions: int, folded: bool, packed: bool) -> Violation | None:
    """A tensor map has at most five dimensions. CUDA Driver API, cuTensorMapEncodeTiled, tensorRank.

    Folding splits the rows in two; packed rows take two dimensions more for the end of a sequence.
    """
    rank = dimensions + folded + 2 * packed
    if rank <= hopper.TMA_RANK:
        return None
    parts = [f"{dimensions} dimensions", *["1 of folded rows"] * folded, *["2 of packed rows"] * packed]
    way_out = (
        "use wide: copies"
        if dimensions + 2 * packed <= hopper.TMA_RANK
        else f"use at most {hopper.TMA_RANK - 2 * packed}"
    )
    field = "box.wide" if "copies" in way_out else "box.extents"
    return Violation(field, f"a tensor map would have {' + '.join(parts)} = {rank} > {hopper.TMA_RANK}; {way_out}")


@rule(kind=HARDWARE, topic="box")
def row_strides(row: int, size: int) -> Violation | None:
    """Rows one behind the other begin at multiples of 16 bytes. CUDA Driver API, cuTensorMapEncodeTiled, globalStrides.

    A tensor whose rows are further apart could have any row; `out` is made without gaps where a call gives none.
    """
    stride, align = row * size, hopper.TMA_STRIDE_ALIGN
    if stride % align == 0:
        return None
    return Violation(
        "problem.row",
        f"TMA needs strides of whole {align} bytes, and a row is {row} x {size} = {remainder(stride, align)}; "
        f"use {around(row, align // size)}",
    )


@rule(kind=HARDWARE, topic="box")
def folded_row(row: int, elements: int) -> Violation | None:
    """A folded row is a whole number of the box's rows: a tensor map has one extent along each of its dimensions.

    The last part of a row would need another one. CUDA Driver API, cuTensorMapEncodeTiled, globalDim and boxDim.
    """
    parts = row // elements
    if row % elements:
        return Violation(
            "box.wide",
            f"a row of {remainder(row, elements)}, cannot be folded into rows of the box; use wide: copies, or a "
            f"row of {around(row, elements)}",
        )
    if parts > hopper.TMA_BOX:
        return Violation(
            "box.wide",
            f"a folded row has {row} / {elements} = {parts} parts > {hopper.TMA_BOX} of a box; use wide: copies",
        )
    return None


@rule(kind=GENERATOR, topic="box")
def folded_parts(row: int, elements: int) -> Violation | None:
    """Folding is for rows wider than the box."""
    if row > elements:
        return None
    return Violation(
        "box.wide", f"a row of {row} fits in a row of the box, {elements}, and needs no folding; use copies"
    )


@rule(kind=GENERATOR, topic="structure")
def packed_dimensions(layout: str, dimensions: int) -> Violation | None:
    """Packed rows are rendered for (total, row)."""
    if layout != "packed" or dimensions == 2:
        return None
    return Violation(
        "problem.layout", f"packed rows have two dimensions, (total, row), and the box has {dimensions}; use dense"
    )


@rule(kind=GENERATOR, topic="order")
def ring_reading(stages: int, reading: int) -> Violation | None:
    """A load waits until all stores but the last few have read their stages; one stage has to be free then."""
    if reading < stages:
        return None
    return Violation(
        "ring.reading",
        f"with {reading} of {stages} stages still being read no load would have a place; use at most {stages - 1}",
    )
