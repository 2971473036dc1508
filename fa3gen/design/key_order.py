"""The order in which attention wants the keys of a v of 8 bits, so that P stays in the registers in which S was.

Of 16 keys of a row of S, four threads of a warp have 2t, 2t + 1, 8 + 2t and 9 + 2t each, t = 0 to 3 (PTX ISA, "wgmma":
register fragment of D); as A operand of 8 bits they have 4t to 4t + 3 (register fragment of A, m64k32). P V is a sum
over keys, in which order they come is free: so position 4t + j of each 16 holds key 2t + j % 2 + 8 (j // 2) of them.
"""

from __future__ import annotations

UNIT = 16  # keys that are permuted among themselves; sequences are filled up to whole units
ORDER = tuple(position // 4 * 2 + position % 2 + position % 4 // 2 * 8 for position in range(UNIT))


def whole_units(keys: int) -> int:
    """So many keys, filled up to whole units."""
    return -(-keys // UNIT) * UNIT
