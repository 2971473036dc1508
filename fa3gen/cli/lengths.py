"""`--lengths`: those of packed sequences, as numbers or by the name of a list that speeds were measured for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fa3gen.design.family import PackedShape
    from fa3gen.spec.model import Forward

HELP = "Of packed sequences: 300,0,1x900, where 1x900 is one query with 900 keys"


def parse_sequences(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`300,0,1x900` as queries (300, 0, 1) and keys (300, 0, 900), `chat16k` as the list of that name.

    Raises UserError for anything else, and where there are no rows of queries, or of keys.
    """
    from fa3gen.base.errors import UserError
    from fa3gen.measure.packed_cells import ALL_LENGTHS

    if text in ALL_LENGTHS:
        return ALL_LENGTHS[text]
    lengths = []
    for word in text.split(","):
        queries, times, keys = word.strip().partition("x")
        if not queries.isdecimal() or not (keys.isdecimal() if times else True):
            names = ", ".join(ALL_LENGTHS)
            raise UserError(
                f"--lengths {text}: '{word}' is no length; write 300,0,1x900 (1x900: one query, 900 keys), or one of "
                f"the lists {names}"
            )
        lengths.append((int(queries), int(keys if times else queries)))
    lengths_q, lengths_k = (tuple(side) for side in zip(*lengths, strict=True))
    if not (any(lengths_q) and any(lengths_k)):
        raise UserError(f"--lengths {text}: there are no rows of queries, or of keys; give one of the sequences some")
    return lengths_q, lengths_k


def call_of(
    spec: Forward, lengths: str | None, page: int | None, *, heads: tuple[int, int], usual: PackedShape
) -> PackedShape:
    """The call that the options `--lengths` and `--page` ask for; `usual` is what an option says that is not given.

    Raises UserError for lengths as `parse_sequences` does, and for pages that the module does not take.
    """
    from fa3gen.base.errors import UserError
    from fa3gen.design import footprint
    from fa3gen.design.family import call_of_lengths

    least = footprint.page_rows(spec)
    if page is not None and (least is None or page % least):
        fits = "it has no pages, leave --page out" if least is None else f"give a multiple of {least} rows"
        raise UserError(f"--page {page} does not fit this module ({spec.problem.layout}): {fits}")
    sides = (usual.lengths_q, usual.lengths_k) if lengths is None else parse_sequences(lengths)
    return call_of_lengths(spec, *sides, heads=heads, page=page)
