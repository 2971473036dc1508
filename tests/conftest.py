"""Shared by all tests: one compile cache for each run; the summary says what ran where, and what did not."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import NO_BROWSER

from fa3gen.compile import compiler
from fa3gen.compile.cache import CACHE_DIR_VARIABLE

NO_HOPPER = "no Hopper GPU here"
# Most of the time goes into these: they compile modules and execute them on the CPU model; one formats all files.
LONG = ("test_facts", "test_every_module", "test_mutations", "test_format")
# Objects made before Python looks for garbage among the youngest, 700 by itself. It finds little: what a CTA of the CPU
# model was made of is none (fa3gen.cpu.cta).
YOUNG_OBJECTS = 50_000


def pytest_configure(config: Any) -> None:
    """Compile every module once for each run of the tests: the workers of xdist inherit the directory.

    They share the cores, so the commands that tests run in processes of their own compute with one thread, as the
    workers do themselves: threads that wait for each other in a loop take the time of the other workers.
    """
    if hasattr(config, "workerinput"):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not hasattr(config, "workerinput") and CACHE_DIR_VARIABLE not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="fa3gen-tests-")
        os.environ[CACHE_DIR_VARIABLE] = folder.name
        config.add_cleanup(lambda: os.environ.pop(CACHE_DIR_VARIABLE, None))
        config.add_cleanup(folder.cleanup)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What collecting the tests makes lives to the end: looking for garbage in it takes seconds each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS)
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, in equal shares for the workers, and what needs one compiled module one after the other.

    `--dist worksteal` deals the tests out as equal parts of the list; whoever has done his takes over from the end of
    another part. So no worker waits for another one's compilation, and the short tests are left to fill the end.
    """
    units: dict[str, list[pytest.Item]] = {}
    short = []
    for item in items:
        if Path(item.path).stem in LONG:
            stem = getattr(item, "callspec", None) and item.callspec.params.get("stem")
            units.setdefault(stem or item.nodeid, []).append(item)
        else:
            short.append(item)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ordered = sorted(units.values(), key=len)  # mutations first: each of these tests is as long as those of ten modules
    size, rest = len(items) // workers, iter(short)
    shares = [[item for unit in ordered[worker::workers] for item in unit] for worker in range(workers)]
    for share in shares:
        share += [item for _, item in zip(range(size - len(share)), rest, strict=False)]
    items[:] = [item for share in shares for item in share] + list(rest)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """What tests have kept until now is no garbage; pytest would look through all of it twice before it ends."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def preloaded_compiler() -> Iterator[None]:
    """Compile in processes that have done all imports; nothing is started before the first module is compiled."""
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
