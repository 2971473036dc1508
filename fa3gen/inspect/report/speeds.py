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
from fa3gen.records import evidence, tuning_records
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import attention_among

if TYPE_CHECKING:
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

    problem: TunedProblem
    origin: str
    speeds: tuple[Speed, ...]
    absent: tuple[tuple[str, str], ...]

    @property
    def own(self) -> Speed:
        """The module's own speed."""
        return next(speed for speed in self.speeds if speed.kind == "this")

    @property
    def best_peer(self) -> Speed | None:
        """The fastest peer; None where none ran."""
        peers = [speed for speed in self.speeds if speed.kind == "peer"]
        return max(peers, key=lambda speed: speed.tflops, default=None)

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


def origin(record: evidence.Record | TuningRecord) -> str:
    """Where, when and with what a record was made, in words."""
    return f"{record.gpu}, {record.date}, DSL {record.dsl}, torch {record.torch}"


def panels(workspace: Workspace, variant: Variant[Forward]) -> tuple[Panel, ...]:
    """What the tuning records of the module's family say of it: empty where it was not among the competitors.

    Raises UserError for a file of records that cannot be read.
    """
    label = Family.of(variant.spec).label
    path = tuning_records.directory(workspace) / f"{label}.json"
    if not path.is_file():
        return ()
    measured = [_measured(workspace, variant.stem, record) for record in tuning_records.load(path)]
    groups: dict[str, list[Measured]] = {}
    for entry in measured:
        if entry is not None:
            groups.setdefault(_group(entry.problem), []).append(entry)
    return tuple(
        Panel(title, tuple(sorted(entries, key=lambda entry: (entry.problem.seq_k, entry.problem.seq_q))))
        for title, entries in groups.items()
    )


def _group(problem: TunedProblem) -> str:
    heads = f"{problem.heads_q} heads" if problem.heads_q == problem.heads_kv else "grouped heads"
    if problem.heads_q != problem.heads_kv:
        heads = f"{problem.heads_q} query heads on {problem.heads_kv} KV heads"
    tokens = problem.batch * problem.seq_k
    if problem.seq_q != problem.seq_k:
        return f"{heads}, {problem.seq_q:,} queries each, batch {problem.batch}"
    return f"{heads}, {tokens:,} tokens in all" if tokens == evidence.TOKENS else f"{heads}, batch {problem.batch}"


def _measured(workspace: Workspace, stem: str, record: TuningRecord) -> Measured | None:
    """None where the module did not run, or another file of that name did."""
    if not any(result.stem == stem and _present(workspace, result) for result in record.results):
        return None
    speeds = [
        _speed(record, result.stem, "this" if result.stem == stem else "module", result)
        for result in record.results
        if _present(workspace, result)
    ]
    speeds += [_speed(record, peer.name, "peer", peer) for peer in record.peers]
    return Measured(record.problem, origin(record), tuple(speeds), tuple(record.absent.items()))


def _present(workspace: Workspace, result: tuning_records.Result) -> bool:
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
