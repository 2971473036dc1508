"""Rules about K and V that lie in pages."""

from __future__ import annotations

from fa3gen.design.rules.registry import GENERATOR, HARDWARE, Violation, rule
from fa3gen.hardware import hopper
from fa3gen.spec.model import Swizzle

GATHERED = 64  # elements of a row that 8 lanes copy side by side, 16 bytes each


@rule(kind=GENERATOR, topic="structure")
def page_layout(layout: str, page_rows: int | None) -> Violation | None:
    """How much is copied of a page at once is said where K and V lie in pages."""
    if (layout == "paged") == (page_rows is not None):
        return None
    if page_rows is not None:
        return Violation(
            "load.page_rows", f"with layout {layout} there are no pages; leave it out, or use layout paged"
        )
    return Violation(
        "load.page_rows",
        "layout paged needs to know how many keys of a page are copied at once; use 16 for page sizes that are "
        "multiples of 16, or 1 for any",
    )


@rule(kind=HARDWARE, topic="layouts")
def page_boxes(page_rows: int, kv: int) -> Violation | None:
    """A box of a page is whole swizzles, which repeat every 8 rows, and a tile of keys whole boxes.

    PTX ISA, "Swizzling modes"; "Strides" of wgmma: 8 rows are a core matrix.
    """
    if page_rows % hopper.SWIZZLE_ROWS == 0 and kv % page_rows == 0:
        return None
    fitting = [str(rows) for rows in range(hopper.SWIZZLE_ROWS, kv + 1, hopper.SWIZZLE_ROWS) if kv % rows == 0]
    return Violation(
        "load.page_rows",
        f"a tile of {kv} keys is to be whole boxes, of whole swizzles of {hopper.SWIZZLE_ROWS} rows, and {page_rows} "
        f"is no such number; use {', '.join(fitting)}, or 1 for single rows",
    )


@rule(kind=GENERATOR, topic="loads")
def gathered_rows(field: str, head_dim: int) -> Violation | None:
    """Single rows are copied by eight lanes each, whole 128 bytes at a time."""
    if head_dim % GATHERED == 0:
        return None
    return Violation(
        field,
        f"rows of {head_dim} elements are not whole 128 bytes, by which single rows are copied; use a multiple of "
        f"{GATHERED}, or load.page_rows {hopper.SWIZZLE_ROWS} or more",
    )


@rule(kind=GENERATOR, topic="loads")
def gathered_swizzle(field: str, swizzle: Swizzle, row_bytes: int) -> Violation | None:
    """Pieces of single rows are put where the widest swizzle has them: of 128 bytes, or of 64, what four lanes copy."""
    wanted: Swizzle = "128B" if row_bytes % hopper.SWIZZLE_SPAN["128B"] == 0 else "64B"
    if swizzle == wanted:
        return None
    return Violation(
        field,
        f"single rows of {row_bytes} bytes are copied to where swizzle {wanted} has them, not {swizzle}; use {wanted}, "
        f"or load.page_rows {hopper.SWIZZLE_ROWS} or more",
    )
