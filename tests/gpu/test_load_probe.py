"""On a machine with a Hopper GPU: the load times that the simulator assumes are near what a probe measures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fa3gen.hardware.chips import H200
from fa3gen.inspect.simulation.times import LOAD_LATENCY

sys.path.insert(0, str(Path(__file__).parent))


@pytest.mark.usefixtures("hopper")
def test_the_assumed_load_times_are_of_the_right_size(tmp_path: Path) -> None:
    """Latency within a factor of two; the share of L2 that all SMs get at once is at most the one assumed."""
    import load_probe

    single = load_probe.measure(load_probe.Variant(64, 1), tmp_path)
    alone = next(row for row in single if row["from"] == "L2" and row["ctas"] == 1)
    assert LOAD_LATENCY / 2 < alone["cycles"] < LOAD_LATENCY * 2, alone
    deep = load_probe.measure(load_probe.Variant(128, 4), tmp_path)
    together = next(row for row in deep if row["from"] == "L2" and row["ctas"] > 1)
    assert 10 < together["bytes_per_cycle"] < 1.2 * H200.l2.value / H200.sms, together
