"""On a machine with a Hopper GPU: products sum as the CPU model says, and FP8 loses what it says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from rendering import gemm_stems, variants

sys.path.insert(0, str(Path(__file__).parent))


@pytest.mark.parametrize("stem", [stem for stem in gemm_stems() if variants()[stem].spec.product.engine == "wgmma"])
def test_the_bits_are_those_of_the_model(stem: str, hopper: Any) -> None:
    """Of a sum that goes round the ring, and ends within a step."""
    import gemm_sums

    assert gemm_sums.compare(stem, 1000, hopper).same


def test_only_two_levels_keep_the_error_of_long_sums_small(hopper: Any) -> None:
    import gemm_sums

    one, two = (gemm_sums.compare(stem, 4096, hopper).gpu_bias for stem in ("g3_fp8", "g3_fp8_two_levels"))
    assert one < -0.01 and abs(two) < 2.0**-9
