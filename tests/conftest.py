"""Shared by all tests; says in the summary how many generated modules were not run on a GPU."""

from __future__ import annotations

from typing import Any

import pytest

NO_HOPPER = "no Hopper GPU here"


@pytest.fixture(scope="session")
def hopper() -> Any:
    """The Hopper GPU, or a skip that says why there is none."""
    from fa3gen import gpu

    device = gpu.hopper_device()
    if device is None:
        pytest.skip(f"{NO_HOPPER}: {gpu.why_no_hopper()}")
    return device


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count from the reports, which the workers of xdist send to the process that prints the summary."""
    skipped = [
        report
        for report in terminalreporter.stats.get("skipped", [])
        if "test_generated_module[" in report.nodeid and NO_HOPPER in str(report.longrepr)
    ]
    if skipped:
        verb = "module was" if len(skipped) == 1 else "modules were"
        text = f"{len(skipped)} generated {verb} not run on a GPU ({NO_HOPPER})"
        terminalreporter.write_sep("=", text, yellow=True, bold=True)
