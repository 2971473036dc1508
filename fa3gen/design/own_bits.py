"""Whether a row's bits are its own: the same alone, in any batch, in any place, all queries at once or in chunks.

O and LSE of a row are sums of floating-point numbers, whose bits follow from the order in which they are added up. In a
module whose tiles of keys begin at the first key of a sequence, and whose rows visit them one by one, that order is the
same for all rows, and a tile of which a row sees nothing leaves it as it is: its exponentials are zeros, and the factor
that brings it to its new maximum is 1. What its tile of queries visits for the sake of other rows does not matter then,
nor does which CTA that is. So any module will do where nobody else decides in what order a row's sums are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fa3gen.design import footprint, splits
from fa3gen.spec.model import Forward


@dataclass(frozen=True)
class Shared:
    """A field by which rows beside it, or the GPU, decide on a row's bits; what it needs to be instead, and why."""

    field: str
    instead: Any
    why: str


def shared(spec: Forward) -> tuple[Shared, ...]:
    """What keeps a row's bits from being its own."""
    found = []
    if spec.softmax.rescale_above is not None:
        found.append(Shared("softmax.rescale_above", None, "O of a warp is rescaled when one of its rows needs it"))
    if spec.softmax.row_max != "online":
        found.append(Shared("softmax.row_max", "online", "a first maximum is looked for where a tile has an edge"))
    if spec.tile.kv_from != "first_key":
        found.append(Shared("tile.kv_from", "first_key", "tiles of keys begin where the first row of a tile sees one"))
    if footprint.promote_every(spec) > 1:
        found.append(
            Shared("accumulate.promote_every", 1, "tiles of keys are counted from the last that a tile visits")
        )
    if spec.scheduler == "stream_k" or (spec.scheduler == "even" and not splits.whole_parts(spec)):
        found.append(Shared("scheduler", "dynamic", "keys are shared out by what all of a call have, and by SMs"))
    if spec.split is not None and spec.split.keys is None:
        found.append(Shared("split", None, "how many parts keys come in follows from the call and from SMs"))
    return tuple(found)


def own_bits(spec: Forward) -> bool:
    """Whether a row's bits follow from its own query and keys, whatever else a call has."""
    return not shared(spec)
