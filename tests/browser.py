"""Headless Chromium through its DevTools protocol, over the two pipes of --remote-debugging-pipe: no further package.

Protocol: https://chromedevtools.github.io/devtools-protocol/; messages are JSON, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)
TIMEOUT_S = 30.0
NO_BROWSER = "no Chromium here"


def executable() -> str | None:
    """The browser, None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of one browser process. `problems` are console errors, exceptions and failed or foreign requests."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._from, self._buffer = to, answers, b""
        self._number, self._session = 0, ""
        self.problems: list[str] = []
        self._loaded = False
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def show(self, file: Path, width: int, scheme: Literal["light", "dark"]) -> None:
        """Open a file anew, `width` pixels wide."""
        self._send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        self._send(
            "Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in features.items()]
        )
        self._loaded = False
        self._send("Page.navigate", url=file.resolve().as_uri())
        end = time.monotonic() + TIMEOUT_S
        while not self._loaded:
            self._receive(end)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, awaited if it is a promise."""
        answer = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key, named as in KeyboardEvent.key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self._send("Input.dispatchKeyEvent", type=kind, key=key, code=key, **text)

    def move(self, x: float, y: float) -> None:
        """Move the pointer to a place in the window."""
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, file: Path, whole: bool = True) -> None:
        """Write a PNG of the page, or of the window."""
        data = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._receive(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser did not answer")
            received = os.read(self._from, 1 << 16)
            if not received:
                raise AssertionError("the browser has ended")
            self._buffer += received
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {said['exceptionDetails'].get('text')}: {said['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console.{said['type']}: {said['args']}")
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{said['entry']['source']}: {said['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            url = said["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.problems.append(f"asked for {url}")
        elif method == "Network.loadingFailed":
            self.problems.append(f"failed: {said.get('errorText')}")


@contextlib.contextmanager
def browser(path: str) -> Iterator[Browser]:
    """Start the browser at `path` and end it, with a profile that is thrown away."""
    (to_browser, ours), (answers, theirs) = os.pipe(), os.pipe()

    def place() -> None:  # the protocol's pipes are descriptors 3 and 4 of the process
        for source, target in ((to_browser, 63), (theirs, 64)):
            os.dup2(source, target)
        os.dup2(63, 3)
        os.dup2(64, 4)

    with tempfile.TemporaryDirectory(prefix="fa3gen-browser-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=place,
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(theirs)
        try:
            yield Browser(ours, answers)
        finally:
            for descriptor in (ours, answers):  # without its pipe the browser ends
                os.close(descriptor)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
