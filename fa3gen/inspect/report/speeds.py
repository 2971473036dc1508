"""Measured speeds of a module beside its peers and the other modules of its family, from the records alone.

Two kinds of record hold speeds: `generated/evidence/<stem>.json`, a module at two lengths, and the tuning records, all
modules and peers of one run of interleaved rounds. Only figures of the present file are shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fa3gen.base import files
from fa3gen.design.family import Family
from fa3gen.design.ladder import ladder_order
from fa3gen.records import evidence, packed_records, tuning_records
from fa3gen.records.packed_records import PackedProblem, PackedRecord, PackedResult
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import attention_among

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fa3gen.design.workspace import Workspace
    from fa3gen.records.tuning_records import TunedProblem, TuningRecord
    from fa3gen.spec.specfile import Variant


@dataclass(frozen=True)
class Speed:
    """One competitor at one shape, in TFLOP/s: from CUDA graphs, with slowest and fastest round, and in eager calls."""

    name: str
    kind: str  # "this", "module" or "peer"
    tflops: float
    slowest: float
    fastest: float
    eager: float | None = None


@dataclass(frozen=True)
class Measured:
    """One shape: who ran, on which GPU and when, and who was to run and did not."""

    problem: TunedProblem | PackedProblem
    origin: str
    speeds: tuple[Speed, ...]
    absent: tuple[tuple[str, str], ...]

    @property
    def own(self) -> Speed:
        """The module's own speed."""
        return next(speed for speed in self.speeds if speed.kind == "this")

    @property
    def best_peer(self) -> Speed | None:
        """The fastest peer, of packed sequences the fastest other module; None where none ran."""
        kind = "module" if isinstance(self.problem, PackedProblem) else "peer"
        others = [speed for speed in self.speeds if speed.kind == kind]
        return max(others, key=lambda speed: speed.tflops, default=None)

    @property
    def ratio(self) -> float | None:
        """The module's speed over that of the fastest peer; None where none ran."""
        return None if self.best_peer is None else self.own.tflops / self.best_peer.tflops

    @property
    def eager_ratio(self) -> float | None:
        """The same of eager calls, with the peer that is fastest there; None where they were not measured."""
        peers = [speed.eager for speed in self.speeds if speed.kind == "peer" and speed.eager]
        return self.own.eager / max(peers) if self.own.eager and peers else None


@dataclass(frozen=True)
class Panel:
    """Shapes that differ in their length alone, in order of it."""

    title: str
    shapes: tuple[Measured, ...]

    @property
    def has_peers(self) -> bool:
        """Whether peers were to run: records of packed sequences have modules only."""
        return not any(isinstance(shape.problem, PackedProblem) for shape in self.shapes)

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """(name, kind) of all who ran, this module first, then peers, then other modules."""
        order = {"this": 0, "peer": 1, "module": 2}
        found = {(speed.name, speed.kind) for shape in self.shapes for speed in shape.speeds}
        return tuple(sorted(found, key=lambda entry: (order[entry[1]], entry[0])))


@dataclass(frozen=True)
class Ladder:
    """Speeds of the ladder's table: modules of the same head dim and mask, at two lengths, this one among them."""

    origin: str
    rows: tuple[tuple[str, bool, tuple[float | None, ...]], ...]
    seq_lens: tuple[int, ...] = evidence.SEQ_LENS


def origin(record: evidence.Record | TuningRecord | PackedRecord) -> str:
    """Where, when and with what a record was made, in words."""
    return f"{record.gpu}, {record.date}, DSL {record.dsl}, torch {record.torch}"


def panels(workspace: Workspace, variant: Variant[Forward]) -> tuple[Panel, ...]:
    """What the tuning records of the module's family, or those of packed sequences, say of it: maybe nothing.

    Raises UserError for a file of records that cannot be read.
    """
    records: Sequence[TuningRecord | PackedRecord]
    path = tuning_records.directory(workspace) / f"{Family.of(variant.spec).label}.json"
    if variant.spec.problem.layout == "dense":
        records = tuning_records.load(path) if path.is_file() else []
    else:
        records = packed_records.load_all(workspace)
    measured = [_measured(workspace, variant.stem, record) for record in records]
    groups: dict[str, list[Measured]] = {}
    for entry in measured:
        if entry is not None:
            groups.setdefault(_group(entry.problem), []).append(entry)
    return tuple(
        Panel(title, tuple(sorted(entries, key=lambda entry: (entry.problem.seq_k, entry.problem.seq_q))))
        for title, entries in groups.items()
    )


def _group(problem: TunedProblem | PackedProblem) -> str:
    heads = f"{problem.heads_q} heads" if problem.heads_q == problem.heads_kv else "grouped heads"
    if problem.heads_q != problem.heads_kv:
        heads = f"{problem.heads_q} query heads on {problem.heads_kv} KV heads"
    if isinstance(problem, PackedProblem):
        return heads if problem.page is None else f"{heads}, pages of {problem.page}"
    tokens = problem.batch * problem.seq_k
    if problem.seq_q != problem.seq_k:
        return f"{heads}, {problem.seq_q:,} queries each, batch {problem.batch}"
    return f"{heads}, {tokens:,} tokens in all" if tokens == evidence.TOKENS else f"{heads}, batch {problem.batch}"


def _measured(workspace: Workspace, stem: str, record: TuningRecord | PackedRecord) -> Measured | None:
    """None where the module did not run, or another file of that name did."""
    present = {result.stem for result in record.results if _present(workspace, result)}
    if stem not in present:
        return None
    kinds = {name: "this" if name == stem else "module" for name in present}
    if isinstance(record, PackedRecord):  # which has no rounds, and no peers
        alone = [
            Speed(each.stem, kinds[each.stem], *[each.tflops] * 3) for each in record.results if each.stem in present
        ]
        return Measured(record.problem, origin(record), tuple(alone), ())
    speeds = [_speed(record, each.stem, kinds[each.stem], each) for each in record.results if each.stem in present]
    speeds += [_speed(record, peer.name, "peer", peer) for peer in record.peers]
    return Measured(record.problem, origin(record), tuple(speeds), tuple(record.absent.items()))


def _present(workspace: Workspace, result: tuning_records.Result | PackedResult) -> bool:
    path = workspace.rendered_path(result.stem)
    return path.is_file() and files.sha256(path) == result.sha256


def _speed(
    record: TuningRecord, name: str, kind: str, timed: tuning_records.Result | tuning_records.PeerResult
) -> Speed:
    tflops = [record.problem.tflops(milliseconds) for milliseconds in timed.rounds]
    eager = None if timed.eager is None else record.problem.tflops(timed.eager)
    return Speed(name, kind, timed.tflops, min(tflops), max(tflops), eager)


def ladder(workspace: Workspace, variant: Variant[Forward]) -> Ladder | None:
    """The speeds in the records of verified modules of the same problem; None without one of this module.

    Only records of the same GPU are beside each other.
    """
    own = evidence.verified(workspace, variant.stem)
    if own is None or not own.tflops:
        return None
    family = Family.of(variant.spec)
    rows = []
    for other in _relatives(workspace, family):
        record = evidence.verified(workspace, other)
        if record is None or record.gpu != own.gpu or not record.tflops:
            continue
        speeds = tuple(record.tflops.get(str(length)) for length in evidence.SEQ_LENS)
        rows.append((other, other == variant.stem, speeds))
    return Ladder(origin(own), tuple(rows))


def _relatives(workspace: Workspace, family: Family) -> list[str]:
    """Stems of the family, in the order of the ladder."""
    return [
        variant.stem
        for spec_file in sorted(workspace.survey()[0], key=lambda file: ladder_order(file.stem))
        for variant in attention_among(spec_file.variants)
        if Family.of(variant.spec) == family
    ]
