"""The near end of a measuring process: starts it, asks it, and ends it when it no longer answers.

A process is asked by one JSON object per line on its standard input. Before everything that may hang it says on its
standard output what it is about to do, `{"at": what, "who": competitor}`; its answer is `{"done": {...}}`. One that
stays silent for longer than what it is at may take is killed, and so the one who hung is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fa3gen.base.errors import UserError

# Seconds of silence that are allowed after a process has said what it is at.
LIMITS_S: dict[str, float] = {
    "start": 180,  # torch and the DSL are imported, from a cold disk
    "load": 300,  # may compile
    "check": 60,
    "warm": 120,  # a peer may compile here
    "time": 30,
}
_LOG_LINES = 12


class Gone(Exception):
    """A measuring process is no more. `who` was being worked on, '' for nobody in particular; `reason` says how."""

    def __init__(self, who: str, reason: str) -> None:
        """Keep both."""
        self.who, self.reason = who, reason
        super().__init__(f"{who or 'the measuring process'}: {reason}")


class Worker:
    """One measuring process. Not to be shared between threads, except for `kill`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        log: Path,
        limits: Mapping[str, float] = LIMITS_S,
        on_event: Callable[[str, str], None] = lambda at, who: None,
    ) -> None:
        """Start `command`; its standard error goes to `log`. `on_event` hears what it is at."""
        self._limits, self._log, self._on_event = limits, log, on_event
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._at, self._who = "start", ""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            # A session of its own: Ctrl-C reaches this process alone, which then ends its workers in order.
            self._process = subprocess.Popen(
                list(command),
                env=dict(environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # the pipe is closed under the reader when it is killed
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer; raises Gone when the process hangs, dies or gives up."""
        assert self._process.stdin is not None
        self._at, self._who = "start", ""
        with contextlib.suppress(OSError):  # of a dead process; the reader below finds its end
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        while True:
            message = self._next()
            if "done" in message:
                done: dict[str, Any] = message["done"]
                return done
            if "lost" in message:
                self.kill()
                raise Gone(str(message["lost"]), str(message["reason"]))
            self._at, self._who = str(message["at"]), str(message["who"])
            self._on_event(self._at, self._who)

    def _next(self) -> dict[str, Any]:
        limit = self._limits[self._at]
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            self.kill()
            raise Gone(self._who, f"hung: no answer in {limit:g} s ({self._at}); its process was ended") from None
        if line is None:
            status = self._process.wait()
            raise Gone(self._who, f"its process {_how_it_ended(status)} ({self._at}){self._tail()}")
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:
            raise UserError(f"{self._log}: a measuring process wrote {line[:80]!r} where an answer is due") from None
        return message

    def _tail(self) -> str:
        """The last lines that the process wrote on standard error."""
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        lines = text.strip().splitlines()[-_LOG_LINES:]
        return "".join(f"\n  {line}" for line in lines)

    def kill(self) -> None:
        """End the process and what it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"died of {signal.Signals(-status).name}"
    except ValueError:
        return f"died of signal {-status}"
