"""The table that `fa3gen.attention` chooses by, written from tuning records and held against them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fa3gen.base.errors import UserError
from fa3gen.design.family import Family
from fa3gen.design.workspace import Workspace
from fa3gen.records.tuning_records import TuningRecord
from fa3gen.run.dispatch import (
    DIGEST_LENGTH,
    WRITE_TABLE,
    Measurement,
    Region,
    Row,
    Table,
    of_row,
    place_of_row,
    read_table,
    table_path,
)
from fa3gen.spec.model import WindowMask

_HEADER = f"""\
# Which module fa3gen.attention calls: the first row that fits. Speeds in TFLOP/s; runner_up is the best other module of
# the same run. Written from generated/evidence/tuning by `{WRITE_TABLE}`; do not edit.
"""


def table_text(table: Table) -> str:
    """The YAML text of a table, the same for the same rows; `read_table` reads it back."""
    if not table.rows:
        return f"{_HEADER}rows: []\n"
    lines = [_HEADER + "rows:"]
    for row in table.rows:
        facts: dict[str, Any] = row.model_dump(exclude_none=True)
        measured = facts.pop("measured")
        facts["mask"] = facts["mask"] if isinstance(row.mask, WindowMask) else row.mask.kind
        entries = [f"{name}: {_flow(value)}" for name, value in facts.items()]
        lines += [f"- {entries[0]}", *(f"  {entry}" for entry in entries[1:]), "  measured:"]
        lines += [f"  - {_flow(measurement)}" for measurement in measured]
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """A value on one line; strings that YAML would read as something else are quoted."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, str):
        return value if re.fullmatch(r"[A-Za-z][\w .()/-]*(?<! )", value) and value != "null" else json.dumps(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# From records to the table


@dataclass(frozen=True)
class _Won:
    """One measured length: which file won, and its measurement."""

    stem: str
    digest: str
    measurement: Measurement


def table_from_records(records: Iterable[TuningRecord]) -> str:
    """The text of the table that tuning records give, for `table_path`; raises as `rows_from_records`."""
    return table_text(Table(rows=rows_from_records(records)))


def rows_from_records(records: Iterable[TuningRecord]) -> list[Row]:
    """The rows that tuning records give.

    Only records with as many queries as keys count, and of them only modules that can write LSE, since every row has to
    serve `return_lse=True`: where the winner cannot, the fastest that can stands in. For each dtype, head dims and mask
    the measured lengths are taken in order, and neighbours with the same winner make one row, which ends at the last
    of these lengths. The last row has no end; the first begins at one key. Raises UserError where two records of one
    length have different winners.
    """
    won: dict[Family, dict[int, _Won]] = {}
    for record in records:
        if record.problem.seq_q == record.problem.seq_k and (winner := _winner(record)) is not None:
            by_length = won.setdefault(record.problem.family, {})
            known = by_length.setdefault(record.problem.seq_k, winner)
            if (known.stem, known.digest) != (winner.stem, winner.digest):
                raise UserError(
                    f"two tuning records of {record.problem.family}, {record.problem.seq_k} keys have different "
                    f"winners, {known.stem} ({known.measurement.gpu}) and {winner.stem} ({winner.measurement.gpu}), "
                    "and the table has one row for both; delete one of them in generated/evidence/tuning"
                )
    return [row for family in sorted(won, key=_order) for row in _rows(family, won[family])]


def _order(family: Family) -> tuple[Any, ...]:
    mask = family.mask
    reach = (mask.left, mask.right) if isinstance(mask, WindowMask) else (0, 0)
    kinds = ("none", "causal", "window")
    return family.dtype, family.head_dim, family.head_dim_v, kinds.index(mask.kind), reach, family.out_dtype or ""


def _winner(record: TuningRecord) -> _Won | None:
    """Who won among the modules that can write LSE; None when there is no such module."""
    able = [result for result in record.results if result.spec.get("outputs", {}).get("lse", True)]
    ranked = sorted(able, key=lambda result: (result.stem != record.winner, -result.tflops))
    if not ranked:
        return None
    best, others = ranked[0], [result for result in record.results if result.stem != ranked[0].stem]
    second = max(others, key=lambda result: result.tflops, default=None)
    measurement = Measurement(
        seq=record.problem.seq_k,
        tflops=best.tflops,
        runner_up=second.stem if second else None,
        runner_up_tflops=second.tflops if second else None,
        runner_up_sha256=second.sha256[:DIGEST_LENGTH] if second else None,
        gpu=record.gpu,
    )
    return _Won(best.stem, best.sha256[:DIGEST_LENGTH], measurement)


def _rows(family: Family, won: Mapping[int, _Won]) -> Iterator[Row]:
    """Rows of one family, by length."""
    merged: list[list[_Won]] = []
    for _, winner in sorted(won.items()):
        if merged and (merged[-1][0].stem, merged[-1][0].digest) == (winner.stem, winner.digest):
            merged[-1].append(winner)
        else:
            merged.append([winner])
    for number, run in enumerate(merged, 1):
        yield Row(
            dtype=family.dtype,
            head_dim=family.head_dim,
            head_dim_v=family.head_dim_v,
            mask=family.mask,
            out_dtype=family.out_dtype,
            seq_k=None if number == len(merged) else Region(up_to=run[-1].measurement.seq),
            module=run[0].stem,
            sha256=run[0].digest,
            measured=[winner.measurement for winner in run],
        )


def check_table(workspace: Workspace, records: Iterable[TuningRecord]) -> list[str]:
    """What is wrong with the workspace's table: other rows than the records give, and rows without their module.

    Each with the command that mends it; nothing when all is well. Raises UserError as `read_table` and
    `rows_from_records`.
    """
    path = table_path(workspace)
    wrong = []
    if path.read_text(encoding="utf-8") != table_from_records(records):
        wrong.append(f"{workspace.shown(path)} is not what the tuning records give; run: {WRITE_TABLE}")
    return wrong + rows_without_their_module(workspace)


def rows_without_their_module(workspace: Workspace) -> list[str]:
    """What is wrong with the rows of the workspace's table: modules that are missing or not the files measured."""
    path = table_path(workspace)
    wrong = []
    for number, row in enumerate(read_table(path).rows, 1):
        try:
            of_row(workspace, row, place_of_row(workspace, path, number, row))
        except UserError as error:
            wrong.append(str(error))
    return wrong
