"""Compiler processes for many modules: each has torch and the DSL imported and forks once for every module.

Importing the two takes longer than ptxas does. The DSL reads its settings when it is imported, so that a server only
compiles for those it was started with: what a fork compiles is what a fresh process compiles. This module imports
neither cutlass nor torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

SERVE = "--serve"
DSL_PREFIX = "CUTE_DSL_"  # of the environment variables that are settings of the DSL

_Settings = frozenset[tuple[str, str]]


class Interrupted(Exception):
    """Nothing more is to be compiled."""


class Servers:
    """As many servers for each settings as were ever asked for at one time; safe to use from several threads."""

    def __init__(self, worker: Path) -> None:
        """Nothing is started yet; `worker` is the script that compiles."""
        self._worker = worker
        self._lock = threading.Lock()
        self._idle: dict[_Settings, list[subprocess.Popen[str]]] = {}
        self._all: list[subprocess.Popen[str]] = []
        self._interrupted = False

    def run(self, arguments: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
        """Exit status (negative: a signal) and standard error of the worker with these arguments.

        Raises subprocess.TimeoutExpired when it takes longer than `timeout_s` seconds; it is killed then. Raises
        Interrupted after `interrupt`.
        """
        settings = frozenset(item for item in environment.items() if item[0].startswith(DSL_PREFIX))
        server = self._take(settings, environment)
        with tempfile.NamedTemporaryFile("r", errors="replace", prefix="fa3gen-compile-", suffix=".log") as log:
            request = {"arguments": list(arguments), "environment": dict(environment), "stderr": log.name}
            try:
                status = _ask(server, json.dumps(request), timeout_s)
            except subprocess.TimeoutExpired:
                self._give_back(settings, server)
                raise
            except (OSError, ValueError):  # the server is gone: what it said is nothing, or half a line
                return server.wait() or -signal.SIGTERM, log.read()
            self._give_back(settings, server)
            return status, log.read()

    def close(self) -> None:
        """End all servers; none may be at work."""
        for server in self._all:
            assert server.stdin is not None and server.stdout is not None
            with contextlib.suppress(OSError):
                server.stdin.close()  # which ends its loop
            server.wait()
            server.stdout.close()

    def interrupt(self) -> None:
        """Kill all servers with whatever they are compiling, and start no others."""
        with self._lock:
            self._interrupted = True
            for server in self._all:
                if server.poll() is None:
                    os.killpg(server.pid, signal.SIGKILL)

    def _take(self, settings: _Settings, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        with self._lock:
            if self._interrupted:
                raise Interrupted
            if self._idle.get(settings):
                return self._idle[settings].pop()
            # A process group of its own: an interrupt from the terminal does not reach it but `interrupt` does, so
            # that no thread finds its server gone and goes on with the next module before the main thread knows.
            server = subprocess.Popen(
                [sys.executable, "-P", str(self._worker), SERVE],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                process_group=0,
            )
            self._all.append(server)
            return server

    def _give_back(self, settings: _Settings, server: subprocess.Popen[str]) -> None:
        with self._lock:
            self._idle.setdefault(settings, []).append(server)


def _ask(server: subprocess.Popen[str], request: str, timeout_s: float) -> int:
    """The exit status of one fork. Raises OSError or ValueError when the server is gone, TimeoutExpired."""
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(request + "\n")
    server.stdin.flush()
    process = int(server.stdout.readline())
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

    timer = threading.Timer(timeout_s, end)
    timer.start()
    try:
        status = int(server.stdout.readline())
    finally:
        timer.cancel()
    if late.is_set():  # the server has seen the fork end
        raise subprocess.TimeoutExpired(request, timeout_s)
    return status


_current: Servers | None = None


def current() -> Servers | None:
    """The servers of the `preloaded` that this is in."""
    return _current


@contextlib.contextmanager
def preloaded(worker: Path) -> Iterator[None]:
    """Have the compilations within, of any thread, done by servers that import torch and the DSL once."""
    global _current
    if _current is not None or not hasattr(os, "fork"):
        yield
        return
    _current = servers = Servers(worker)
    try:
        yield
    finally:
        _current = None
        servers.close()
