"""Stands in for `fa3gen.measure.tuning.worker`: speaks its protocol, makes numbers up, and misbehaves as told.

$FAKE_TUNING names a JSON file: `speed` (milliseconds by stem or peer, or by
`<stem> at <keys>` or `<stem> at <queries>x<keys>`), `eager` (milliseconds by name, else twice the speed),
`uncaptured` (names), `hang`, `crash`, `lose`, `wrong`, `raise` (lists
of stems), `slow` (seconds per heat), `log` (a file that gets a line for each request).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import zlib
from pathlib import Path
from typing import Any


def main() -> None:
    told: dict[str, Any] = json.loads(Path(os.environ["FAKE_TUNING"]).read_text())

    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)

    send({"at": "start", "who": ""})
    for line in sys.stdin:
        request = json.loads(line)
        stems = [module["stem"] for module in request.get("modules", ())]
        note = {"do": request["do"], "stems": stems, "gpu": os.environ["CUDA_VISIBLE_DEVICES"], "pid": os.getpid()}
        with Path(told["log"]).open("a") as log:
            heat = {"seq": request.get("problem", {}).get("seq_k"), "burst": request.get("burst")}
            groups = sorted({problem["heads_q"] // problem["heads_kv"] for problem in request.get("problems", ())})
            log.write(json.dumps({**note, **heat, "eager": request.get("eager_rounds"), "groups": groups}) + "\n")
        if request["do"] == "hello":
            send({"done": {"gpu": "A made-up GPU", "sms": 99, "driver": "1", "torch": "2", "dsl": "4.8.1"}})
            continue
        wrong = {stem: "computes something wrong: made up" for stem in stems if stem in told.get("wrong", ())}
        if request["do"] == "load":
            send({"done": {"wrong": wrong}})
            continue
        time.sleep(told.get("slow", 0))
        for stem in stems:
            send({"at": "check", "who": stem})
            misbehave(stem, told, send)
        peers = [name for name in told.get("peers", ()) if request["peers"] and name not in request["without"]]
        for name in peers:
            send({"at": "check", "who": name})
            misbehave(name, told, send)
        names = [name for name in [*stems, *peers] if name not in wrong and name not in told.get("raise", ())]
        failed = {name: "raised RuntimeError: made up" for name in told.get("raise", ()) if name in [*stems, *peers]}
        times = {name: rounds(name, told, request) for name in names}
        measured = {
            "eager": {name: told.get("eager", {}).get(name, 2 * told["speed"].get(name, 1.0)) for name in names},
            "errors": {name: told.get("error", {}).get(name, 0.002) for name in names},
            "uncaptured": [name for name in names if name in told.get("uncaptured", ())],
        }
        send({"done": {"times": times, **measured, "failed": failed, "wrong": wrong, "ptxas": "12.9.83"}})


def misbehave(stem: str, told: dict[str, Any], send: Any) -> None:
    if stem in told.get("hang", ()):
        time.sleep(60)
    if stem in told.get("crash", ()):
        print("a made-up crash", file=sys.stderr, flush=True)
        os.abort()
    if stem in told.get("lose", ()):
        send({"lost": stem, "reason": "left the GPU unusable: made up"})
        sys.exit(3)


def rounds(name: str, told: dict[str, Any], request: dict[str, Any]) -> list[float]:
    """Milliseconds with 0.1 % of noise of its own, and 3 % of drift that all competitors share."""
    drift = random.Random(request["problem"]["seq_k"])
    own = random.Random(zlib.crc32(name.encode()) + request["problem"]["seq_k"])
    queries, keys = request["problem"]["seq_q"], request["problem"]["seq_k"]
    found = (told["speed"].get(place) for place in (f"{name} at {queries}x{keys}", f"{name} at {keys}", name))
    speed = next((speed for speed in found if speed is not None), 1.0)
    return [speed * (1 + 0.03 * drift.random()) * (1 + 0.001 * own.random()) for _ in range(request["rounds"])]


if __name__ == "__main__":
    main()
