"""What tuning found: a row per cell and one figure for all of them for the terminal, a page's tables in Markdown.

Every table says which way its figures were measured: from CUDA graphs, or in eager calls.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fa3gen.base.markdown import speed
from fa3gen.base.markdown import table as table_lines
from fa3gen.base.wording import counted
from fa3gen.design.family import TILE_ROWS, Family
from fa3gen.records.dispatch_table import BANDS, band_of, rows_from_records, size_of
from fa3gen.records.evidence import TOKENS
from fa3gen.records.tuning_records import PeerResult, Result, TunedProblem, TuningRecord, length_label
from fa3gen.run.dispatch import Row

SYMMETRIC_DIMS = (64, 128, 256)  # that all peers are measured at
LEAST_EDGE = 256  # small problems of so many tokens a sequence stand together, longer ones by powers of two
NOT_CAPTURED = "*: one of the two could not be captured in a CUDA graph, and was launched one by one."

if TYPE_CHECKING:
    from rich.table import Table

    from fa3gen.measure.tuning.session import Outcome


def table(records: Sequence[TuningRecord]) -> Table:
    """Winner, runner-up and best peer of each cell in TFLOP/s and with its error, and the winner's ratio to that peer.

    All of it from CUDA graphs; the last two columns are the winner's speed in eager calls, and its ratio to the peer
    that is best there. Errors are relative ones of O, in thousandths: about 2 for 16-bit kernels.
    """
    from rich.table import Table

    headings = ["problem"]
    title = "TFLOP/s from CUDA graphs: medians of interleaved rounds; beside, of eager calls; error of O in thousandths"
    columns = Table(title=title, title_justify="left")
    for name in ("winner", "runner-up", "best peer"):
        headings += [name, "", "error"]
    named = ("problem", "winner", "runner-up", "best peer")
    for heading in (*headings, "ratio", "eager", "eager ratio"):
        columns.add_column(heading, justify="left" if heading in named else "right")
    for record in records:
        winner, second, peer = record.result(record.winner), runner_up(record), record.best_peer
        columns.add_row(
            record.problem.label,
            *(_marked(winner.stem, winner), speed(winner.tflops), _thousandths(winner.error)),
            *((_marked(second.stem, second), speed(second.tflops), _thousandths(second.error)) if second else [""] * 3),
            *((_marked(peer.name, peer), speed(peer.tflops), _thousandths(peer.error)) if peer else [""] * 3),
            _ratio(ratio_to_peer(record)),
            speed(record.problem.tflops(winner.eager)) if winner.eager else "",
            _ratio(eager_ratio_to_peer(record)),
        )
    return columns


def _marked(name: str, timed: Result | PeerResult) -> str:
    """A name, with a star where its figure is not of a CUDA graph; `NOT_CAPTURED` says what that means."""
    return name if timed.captured else f"{name} *"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.3f}"


def _thousandths(error: float | None) -> str:
    """An error as the table has it; nothing where it was not written down."""
    return "" if error is None else f"{1000 * error:.2f}"


def runner_up(record: TuningRecord) -> Result | None:
    """The fastest result beside the winner; None where there is no other."""
    others = [result for result in record.results if result.stem != record.winner]
    return min(others, key=lambda result: result.milliseconds, default=None)


def ratio_to_peer(record: TuningRecord) -> float | None:
    """How many times faster the winner is than the best peer, from CUDA graphs; None where no peer ran."""
    peer = record.best_peer
    return peer.milliseconds / record.result(record.winner).milliseconds if peer else None


def eager_ratio_to_peer(record: TuningRecord) -> float | None:
    """The same of eager calls, with the peer that is best there; None where none was measured."""
    ours, theirs = record.result(record.winner).eager, [peer.eager for peer in record.peers if peer.eager]
    return min(theirs) / ours if ours and theirs else None


@dataclass(frozen=True)
class _Ratios:
    """Ratios to the best peer of some records that have one."""

    by_record: Mapping[int, float]
    records: Sequence[TuningRecord]

    @classmethod
    def of(cls, records: Sequence[TuningRecord], ratio: Callable[[TuningRecord], float | None]) -> _Ratios | None:
        """None where no record has a ratio."""
        found = {number: value for number, record in enumerate(records) if (value := ratio(record)) is not None}
        return cls(found, records) if found else None

    @property
    def mean(self) -> float:
        return statistics.geometric_mean(self.by_record.values())

    @property
    def least(self) -> float:
        return min(self.by_record.values())

    @property
    def least_at(self) -> TunedProblem:
        return self.records[min(self.by_record, key=lambda number: self.by_record[number])].problem

    def told(self) -> str:
        """`over 2 cells: 1.052; worst 0.986 (bf16 d256 causal 16k, batch 1, heads 8)`."""
        cells = counted(len(self.by_record), "cell")
        return f"over {cells}: {self.mean:.3f}; worst {self.least:.3f} ({self.least_at.label})"


def summary(records: Sequence[TuningRecord]) -> str | None:
    """The geometric mean of the ratios to the best peers, and the worst; None where no peer ran.

    From CUDA graphs, and of eager calls where these were measured.
    """
    graphs, eager = _Ratios.of(records, ratio_to_peer), _Ratios.of(records, eager_ratio_to_peer)
    if graphs is None:
        return None
    text = f"from CUDA graphs, geometric mean of the ratios to the best peer {graphs.told()}"
    return text + (f". Eager, {eager.told()}" if eager is not None else "")


def peers(records: Sequence[TuningRecord]) -> str:
    """Markdown of the records with a peer, from CUDA graphs.

    The large problems, TOKENS in all: speeds by family and length, a cell holding the winner's TFLOP/s and its ratio to
    the best peer, and a line for each set of head dims. The small ones, of all bands of the dispatch table but the
    last: ratios by family and kind of the modules that the table names, eager ones beside.
    """
    rows = rows_from_records(records)
    compared = [record for record in records if record.best_peer]
    large = [record for record in compared if _is_large(record.problem)]
    small = [_as_called(record, rows) for record in compared if band_of(record) < len(BANDS)]
    lengths = sorted({record.problem.seq_k for record in large})
    cells = {(record.problem.family, record.problem.seq_k): record for record in large}
    families = sorted({family for family, _ in cells}, key=_family_order)
    lines = table_lines(
        ["from CUDA graphs", *map(length_label, lengths)],
        [[family.label.replace("_", " "), *(_cell(cells.get((family, n))) for n in lengths)] for family in families],
    )
    square = [record for record in large if record.problem.head_dim in SYMMETRIC_DIMS]
    square = [record for record in square if record.problem.head_dim == record.problem.head_dim_v]
    narrow = [record for record in large if record.problem.family.eight_bits]
    square = [record for record in square if record not in narrow]
    means = {f"head dims {', '.join(map(str, SYMMETRIC_DIMS))}": square, "8 bits": narrow, "all": large}
    for name, some in means.items():
        if text := summary(some):
            lines += ["", f"Of {name}: {text}."]
    lines += _small(small) if small else []
    shown = [*large, *small]
    if not all(
        timed.captured for record in shown for timed in (record.result(record.winner), record.best_peer) if timed
    ):
        lines += ["", NOT_CAPTURED]
    versions = sorted({_made_with(record) for record in shown})
    return "\n".join([*lines, "", f"Measured: {'; '.join(versions)}."]) + "\n"


def _is_large(problem: TunedProblem) -> bool:
    """Whether it is one of the problems that all modules are compared at."""
    plain = problem.heads_q == problem.heads_kv and problem.seq_q == problem.seq_k
    return plain and problem.batch * problem.seq_k == TOKENS


def _as_called(record: TuningRecord, rows: Sequence[Row]) -> TuningRecord:
    """The record with the module that a call of its shape takes, by these rows, in the place of the winner."""
    size = size_of(record)
    row = next((row for row in rows if row.serves(record.problem.family, size)), None)
    measured = {result.stem for result in record.results}
    return record.model_copy(update={"winner": row.module}) if row and row.module in measured else record


def _family_order(family: Family) -> tuple[Any, ...]:
    return family[:3], family.label


def _small(records: Sequence[TuningRecord]) -> list[str]:
    """The lines of the small problems: a row for each family and kind of shape."""
    kinds: dict[tuple[Any, ...], list[TuningRecord]] = {}
    for record in records:
        problem = record.problem
        kinds.setdefault((*_family_order(problem.family), *_kind(problem)), []).append(record)
    rows = []
    for (_, label, _, kind), some in sorted(kinds.items(), key=lambda item: item[0]):
        graphs, eager = _Ratios.of(some, ratio_to_peer), _Ratios.of(some, eager_ratio_to_peer)
        assert graphs is not None  # each of them has a peer
        at = graphs.least_at.label.partition(f"{graphs.least_at.family.label.replace('_', ' ')} ")[2]
        figures = [f"{graphs.mean:.2f}", f"{graphs.least:.2f} ({at})"]
        figures += [f"{eager.mean:.2f}", f"{eager.least:.2f}"] if eager else ["–", "–"]
        rows.append([label.replace("_", " "), kind, str(len(some)), *figures])
    intro = f"Small problems, at most {BANDS[-1]:g} tiles of {TILE_ROWS} query rows per SM: ratios of the modules that"
    intro += " `fa3gen.attention` takes to the best peer."
    head = ["problem", "shapes", "cells", "from CUDA graphs, mean", "least", "eager, mean", "least"]
    text = summary(records)
    return ["", intro, "", *table_lines(head, rows), "", f"Of small problems: {text}."]


def _kind(problem: TunedProblem) -> tuple[int, str]:
    """Which row of the small problems a shape belongs to, and where that row stands."""
    if problem.seq_q != problem.seq_k:
        fewer = problem.seq_q < problem.seq_k
        return sys.maxsize - fewer, f"{'fewer' if fewer else 'more'} queries than keys"
    edge = max(LEAST_EDGE, 1 << (problem.seq_k - 1).bit_length())
    return edge, f"up to {edge} tokens" if edge == LEAST_EDGE else f"{edge // 2 + 1} to {edge} tokens"


def _made_with(record: TuningRecord) -> str:
    ptxas = f", ptxas {record.ptxas}" if record.ptxas else ""
    return f"{record.gpu}, driver {record.driver}, DSL {record.dsl}{ptxas}, {record.date}"


def _cell(record: TuningRecord | None) -> str:
    """The winner's speed and its ratio to the best peer; a dash for a length that was not measured."""
    if record is None or record.best_peer is None:
        return "–"
    winner = record.result(record.winner)
    star = "" if winner.captured and record.best_peer.captured else " *"
    return f"{speed(winner.tflops)} ({ratio_to_peer(record):.2f}){star}"


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
