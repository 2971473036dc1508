"""What tuning found, for the terminal: a row per cell, and one figure for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fa3gen.evidence import speed
from fa3gen.tuning_records import Result, TuningRecord

if TYPE_CHECKING:
    from rich.table import Table

    from fa3gen.tuning.session import Outcome


def table(records: Sequence[TuningRecord]) -> Table:
    """Winner, runner-up and best peer of each cell in TFLOP/s, and the winner's ratio to that peer."""
    from rich.table import Table

    columns = Table(title="TFLOP/s: medians of interleaved rounds", title_justify="left")
    for heading in ("problem", "winner", "", "runner-up", "", "best peer", "", "ratio"):
        columns.add_column(heading, justify="left" if heading and heading != "ratio" else "right")
    for record in records:
        winner, second, peer = record.result(record.winner), runner_up(record), record.best_peer
        ratio = ratio_to_peer(record)
        columns.add_row(
            record.problem.label,
            winner.stem,
            speed(winner.tflops),
            *((second.stem, speed(second.tflops)) if second else ("", "")),
            *((peer.name, speed(peer.tflops)) if peer else ("", "")),
            f"{ratio:.3f}" if ratio else "",
        )
    return columns


def runner_up(record: TuningRecord) -> Result | None:
    """The fastest result beside the winner; None where there is no other."""
    others = [result for result in record.results if result.stem != record.winner]
    return min(others, key=lambda result: result.milliseconds, default=None)


def ratio_to_peer(record: TuningRecord) -> float | None:
    """How many times faster the winner is than the best peer, None where no peer ran."""
    peer = record.best_peer
    return peer.milliseconds / record.result(record.winner).milliseconds if peer else None


def summary(records: Sequence[TuningRecord]) -> str | None:
    """The geometric mean of the ratios to the best peers, and the worst; None where no peer ran."""
    ratios = {record.problem.label: ratio for record in records if (ratio := ratio_to_peer(record)) is not None}
    if not ratios:
        return None
    mean = math.exp(sum(math.log(ratio) for ratio in ratios.values()) / len(ratios))
    worst = min(ratios, key=lambda label: ratios[label])
    cells = "cell" if len(ratios) == 1 else "cells"
    return (
        f"geometric mean of the ratios to the best peer over {len(ratios)} {cells}: {mean:.3f}; "
        f"worst {ratios[worst]:.3f} ({worst})"
    )


def notes(outcomes: Sequence[Outcome]) -> list[str]:
    """Why somebody has no number, and who was not timed from a CUDA graph; each once, with how often it applies."""
    reasons: dict[str, int] = {}
    for outcome in outcomes:
        for name, reason in outcome.absent.items():
            reasons[f"{name}: {reason}"] = reasons.get(f"{name}: {reason}", 0) + 1
        for name in outcome.eager:
            text = f"{name}: launched one by one, since it could not be captured in a CUDA graph"
            reasons[text] = reasons.get(text, 0) + 1
    return [
        text if count == len(outcomes) else f"{text} ({count} of {len(outcomes)} cells)"
        for text, count in reasons.items()
    ]
