"""The far end: a process that loads modules and times them on the one GPU that it sees.

`python -m fa3gen.measure.tuning.worker`, started by `fa3gen.measure.tuning.session`. Requests and answers are those of
`fa3gen.measure.tuning.client`: {"do": "hello"}, {"do": "load", ...} and {"do": "heat", ...}.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

Announce = Callable[[str, str], None]


def _answers() -> IO[str]:
    """The pipe to the asking process; what libraries print on standard output goes to standard error instead."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return pipe


def _end_with_parent() -> None:
    """A kernel that never ends would keep this process alive after the one that could have ended it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Answer requests until there are no more; exit status 3 when the GPU is lost to this process, 4 without one."""
    pipe = _answers()
    _end_with_parent()

    def send(message: dict[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    def announce(at: str, who: str) -> None:
        send({"at": at, "who": who})

    announce("start", "")
    from fa3gen.run import gpu

    device = gpu.hopper_device()
    if device is None:
        print(f"no Hopper GPU: {gpu.why_no_hopper()}", file=sys.stderr)
        return 4
    from fa3gen.measure.tuning.measuring import Bench, CudaTimer
    from fa3gen.verify.runner import DeviceLost

    bench = Bench(device, CudaTimer(device), announce)
    try:
        for line in sys.stdin:
            send({"done": bench.answer(json.loads(line))})
    except DeviceLost as lost:
        send({"lost": bench.who, "reason": f"left the GPU unusable: {lost}"})
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
