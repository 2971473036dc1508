"""Whether some, or all, elements of an array are true.

NumPy's own methods go through Python, and take four times as long for as few elements as a warp has lanes. So does its
public `count_nonzero`, which first asks whether the array is one of another library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy._core import multiarray

count_nonzero: Callable[[Any], int] = multiarray.count_nonzero


def some(values: Any) -> bool:
    """Whether any element is true."""
    return count_nonzero(values) > 0


def every(values: Any) -> bool:
    """Whether all elements are true."""
    return count_nonzero(values) == values.size  # type: ignore[no-any-return]
