"""What a mask comes to in numbers: how far each query sees, and how many pairs that leaves.

A query's diagonal is the key j with j - i - (seq_k - seq_q) = 0, so that the last query sees the last key.
"""

from __future__ import annotations

from typing import NamedTuple

from fa3gen.spec.model import CausalMask, Mask, WindowMask


class Reach(NamedTuple):
    """How many keys a query sees left and right of its diagonal, the diagonal not counted; None: all there are."""

    left: int | None
    right: int | None


def reach(mask: Mask) -> Reach:
    """The mask in plain numbers."""
    if isinstance(mask, WindowMask):
        return Reach(mask.left, mask.right)
    return Reach(None, 0 if isinstance(mask, CausalMask) else None)


def visible_pairs(mask: Mask, *, seq_q: int, seq_k: int) -> int:
    """Count the (query, key) pairs that the mask lets through, for one head."""
    left, right = reach(mask)
    if left is None and right is None:
        return seq_q * seq_k
    pairs = 0
    for row in range(seq_q):
        diagonal = row + seq_k - seq_q
        first = 0 if left is None else max(0, diagonal - left)
        last = seq_k - 1 if right is None else min(seq_k - 1, diagonal + right)
        pairs += max(0, last - first + 1)
    return pairs


def counted_pairs(mask: Mask, *, seq_q: int, seq_k: int) -> float:
    """Pairs of one head as `fa3gen bench` counts them: half of the square for a causal one, else the visible ones."""
    if isinstance(mask, CausalMask) and seq_q == seq_k:
        return seq_q**2 / 2
    return visible_pairs(mask, seq_q=seq_q, seq_k=seq_k)
