"""What a mask comes to in numbers: how far each query sees, and how many pairs that leaves.

A query's diagonal is the key j with j - i - (seq_k - seq_q) = 0, so that the last query sees the last key. A window
that calls give (`mask: {kind: window}`) comes to numbers with one call: `of_call` makes it that call's mask first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fa3gen.spec.model import WINDOW_MAX, CausalMask, Mask, WindowMask

# Keys left and right of the diagonal, as calls give them; -1: all there are.
Window = tuple[int, int]
# Of calls that say nothing of a window, where the module asks for one: what speeds and pictures are shown for.
USUAL_WINDOW: Window = (512, 0)


class Reach(NamedTuple):
    """How many keys a query sees left and right of its diagonal, the diagonal not counted; None: all there are."""

    left: int | None
    right: int | None


def given_with_calls(mask: Mask) -> bool:
    """Whether each call of a module says how far queries see."""
    return isinstance(mask, WindowMask) and mask.given


def of_call(mask: Mask, window: Window | None = None) -> Mask:
    """The mask of one call: of a window that calls give, this one, by default USUAL_WINDOW; others as they are."""
    if not given_with_calls(mask):
        return mask
    left, right = (WINDOW_MAX if keys < 0 else min(keys, WINDOW_MAX) for keys in window or USUAL_WINDOW)
    return WindowMask(left=left, right=right)


def computes(compiled: Mask, mask: Mask) -> bool:
    """Whether a module compiled for one mask has calls that compute another."""
    return compiled == mask or (given_with_calls(compiled) and isinstance(mask, WindowMask))


def options_of_call(mask: Mask, window: Window | None = None) -> dict[str, Any]:
    """What a call of a module has to say for `of_call` to be true: keywords of its entry point."""
    return {"window": window or USUAL_WINDOW} if given_with_calls(mask) else {}


def options_for(compiled: Mask, mask: Mask) -> dict[str, Any]:
    """What a call of a module says to compute a mask, which it can: see `computes`."""
    left, right = reach(mask)
    return {} if left is None or right is None else options_of_call(compiled, (left, right))


def reach(mask: Mask) -> Reach:
    """The mask in plain numbers. ValueError for a window that calls give: `of_call` first."""
    if given_with_calls(mask):
        raise ValueError("how far a query sees is an argument of each call; ask masks.of_call first")
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
