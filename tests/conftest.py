"""Shared by all tests: one compile cache for each run; the summary says what ran where, and what did not."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from browser import NO_BROWSER

from fa3gen.compile import compiler
from fa3gen.compile.cache import CACHE_DIR_VARIABLE

NO_HOPPER = "no Hopper GPU here"


def pytest_configure(config: Any) -> None:
    """Compile every module once for each run of the tests: the workers of xdist inherit the directory."""
    if not hasattr(config, "workerinput") and CACHE_DIR_VARIABLE not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="fa3gen-tests-")
        os.environ[CACHE_DIR_VARIABLE] = folder.name
        config.add_cleanup(lambda: os.environ.pop(CACHE_DIR_VARIABLE, None))
        config.add_cleanup(folder.cleanup)


@pytest.fixture(scope="session", autouse=True)
def preloaded_compiler() -> Iterator[None]:
    """Compile in processes that import torch once; nothing is started before the first module is compiled."""
    with compiler.preloaded():
        yield


@pytest.fixture(scope="session")
def hopper() -> Any:
    """The Hopper GPU, or a skip that says why there is none."""
    from fa3gen.run import gpu

    device = gpu.hopper_device()
    if device is None:
        pytest.skip(f"{NO_HOPPER}: {gpu.why_no_hopper()}")
    return device


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count from the reports, which the workers of xdist send to the process that prints the summary."""

    def say(count: int, text: str, **markup: bool) -> None:
        if count:
            verb = "module was" if count == 1 else "modules were"
            terminalreporter.write_sep("=", f"{count} generated {verb} {text}", **markup)

    passed = terminalreporter.stats.get("passed", [])
    skipped = terminalreporter.stats.get("skipped", [])
    executed = sum("test_module_on_the_cpu_model[" in report.nodeid for report in passed)
    not_run = sum("test_generated_module[" in report.nodeid and NO_HOPPER in str(report.longrepr) for report in skipped)
    say(executed, "executed on the CPU model of sm_90a (not a GPU result)", green=True)
    say(not_run, f"not run on a GPU ({NO_HOPPER})", yellow=True, bold=True)
    unseen = sum(NO_BROWSER in str(report.longrepr) for report in skipped)
    say(unseen, f"not looked at in a browser: its report's page ({NO_BROWSER})", yellow=True, bold=True)
