"""What tuning found: a row per cell and one figure for all of them for the terminal, a page's table in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fa3gen.base.markdown import speed
from fa3gen.base.markdown import table as table_lines
from fa3gen.records.tuning_records import Result, TuningRecord, length_label

SYMMETRIC_DIMS = (64, 128, 256)  # that all peers are measured at

if TYPE_CHECKING:
    from rich.table import Table

    from fa3gen.measure.tuning.session import Outcome


def table(records: Sequence[TuningRecord]) -> Table:
    """Winner, runner-up and best peer of each cell in TFLOP/s and with its error, and the winner's ratio to that peer.

    Errors are relative ones of O, in thousandths: about 2 for 16-bit kernels.
    """
    from rich.table import Table

    headings = ["problem"]
    columns = Table(title="TFLOP/s: medians of interleaved rounds; error of O in thousandths", title_justify="left")
    for name in ("winner", "runner-up", "best peer"):
        headings += [name, "", "error"]
    for heading in (*headings, "ratio"):
        columns.add_column(heading, justify="right" if heading in ("", "error", "ratio") else "left")
    for record in records:
        winner, second, peer = record.result(record.winner), runner_up(record), record.best_peer
        ratio = ratio_to_peer(record)
        columns.add_row(
            record.problem.label,
            *(winner.stem, speed(winner.tflops), _thousandths(winner.error)),
            *((second.stem, speed(second.tflops), _thousandths(second.error)) if second else ("", "", "")),
            *((peer.name, speed(peer.tflops), _thousandths(peer.error)) if peer else ("", "", "")),
            f"{ratio:.3f}" if ratio else "",
        )
    return columns


def _thousandths(error: float | None) -> str:
    """An error as the table has it; nothing where it was not written down."""
    return "" if error is None else f"{1000 * error:.2f}"


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


def peers(records: Sequence[TuningRecord]) -> str:
    """Markdown of the records with a peer: speeds by family and length, and a line for each dtype and set of head dims.

    Only records with as many queries as keys are shown. A cell holds the winner's TFLOP/s and its ratio to the best
    peer.
    """
    shown = [record for record in records if record.best_peer and record.problem.seq_q == record.problem.seq_k]
    lengths = sorted({record.problem.seq_k for record in shown})
    cells = {(record.problem.family, record.problem.seq_k): record for record in shown}
    families = sorted({family for family, _ in cells}, key=lambda family: (family[:3], family.label))
    lines = table_lines(
        ["problem", *map(length_label, lengths)],
        [[family.label.replace("_", " "), *(_cell(cells.get((family, n))) for n in lengths)] for family in families],
    )
    square = [record for record in shown if record.problem.head_dim in SYMMETRIC_DIMS]
    square = [record for record in square if record.problem.head_dim == record.problem.head_dim_v]
    for name, some in ((f"head dims {', '.join(map(str, SYMMETRIC_DIMS))}", square), ("all", shown)):
        if text := summary(some):
            lines += ["", f"Of {name}: {text}."]
    versions = sorted({_made_with(record) for record in shown})
    return "\n".join([*lines, "", f"Measured: {'; '.join(versions)}."]) + "\n"


def _made_with(record: TuningRecord) -> str:
    ptxas = f", ptxas {record.ptxas}" if record.ptxas else ""
    return f"{record.gpu}, driver {record.driver}, DSL {record.dsl}{ptxas}, {record.date}"


def _cell(record: TuningRecord | None) -> str:
    """The winner's speed and its ratio to the best peer; a dash for a length that was not measured."""
    ratio = ratio_to_peer(record) if record else None
    return f"{speed(record.result(record.winner).tflops)} ({ratio:.2f})" if record and ratio else "–"


def notes(outcomes: Sequence[Outcome]) -> list[str]:
    """Why somebody has no number, and who was not timed from a CUDA graph; each once, with how often it applies."""
    reasons: dict[str, int] = {}
    for outcome in outcomes:
        for name, reason in outcome.absent.items():
            reasons[f"{name}: {reason}"] = reasons.get(f"{name}: {reason}", 0) + 1
        for name in outcome.uncaptured:
            text = f"{name}: launched one by one, since it could not be captured in a CUDA graph"
            reasons[text] = reasons.get(text, 0) + 1
    return [
        text if count == len(outcomes) else f"{text} ({count} of {len(outcomes)} cells)"
        for text, count in reasons.items()
    ]
