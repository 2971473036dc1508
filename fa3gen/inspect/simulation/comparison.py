"""Predicted beside measured: the tables of docs/simulator.md, made from the evidence; `fa3gen refresh` writes them."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fa3gen.base import files, markdown
from fa3gen.base.wording import counted
from fa3gen.design.family import PackedShape, PagedShape, Shape, heads_text
from fa3gen.design.work import Problem
from fa3gen.design.workspace import Workspace
from fa3gen.hardware import chips
from fa3gen.inspect import simulation
from fa3gen.inspect.simulation.run import measured_shape
from fa3gen.records import evidence, packed_records, tuning_records
from fa3gen.spec.model import Forward, NoMask
from fa3gen.spec.specfile import Variant, attention_only

DOCUMENT = "docs/simulator.md"
# Specs of the tables: the ladder without k1, which has no pipeline, and others that the evidence has speeds of.
LADDER = (
    *("k2", "k2_cp_async", "k3_1", "k3_2", "k3_3", "k4_1", "k4_smem", "k4_2", "k5", "k6_sequential", "k6"),
    *("fwd_d64", "fwd_d96", "fwd_d128", "fwd_d192", "fwd_d256"),
)
PACKED = (
    *("fwd_packed_d64_causal", "fwd_packed_short_d64_causal", "fwd_packed_d128_causal", "fwd_packed_pack4_d128_causal"),
    *("fwd_paged_d128_causal", "fwd_paged_rows_d128_causal"),
)
DECODING = (
    *("fwd_decode_d64", "fwd_decode_d128_causal", "fwd_decode_d256"),
    *("fwd_packed_decode_d64_causal", "fwd_packed_decode_d128_causal", "fwd_packed_decode_d256_causal"),
    *("fwd_paged_decode_d64_causal", "fwd_paged_decode_d128_causal", "fwd_paged_decode_rows_d128_causal"),
)
SIZES = (10, 50, 200)  # MB of K and V, by which calls of these are told apart
STAGED = ("k3_1_d128", "k4_2_d128", "k5_d64", "k5_d128", "k6_d64", "k6_d128")
STAGES = range(1, 7)
SHOWN_PAGE = 16  # others are measured about as fast


@dataclass(frozen=True)
class Cell:
    """One module at one problem: TFLOP/s with products served evenly and oldest first, and as measured.

    `name` is that of the lengths: `4k`, or `chat16k`; `heads` as in `heads_text`. `page` is None where there are none.
    `measured` is None where no record is about the present file, or it holds no speed. `kv_bytes`: those of K and V.
    """

    stem: str
    name: str
    heads: str
    page: int | None
    ctas: int
    even: float
    oldest: float
    measured: float | None
    kv_bytes: int = 0

    @property
    def problem(self) -> str:
        """`4k`; `chat16k, 32/8 heads`; `chat16k, 16 heads, pages of 16`."""
        return ", ".join([self.name, f"{self.heads} heads", *([f"pages of {self.page}"] if self.page else [])])


@dataclass(frozen=True)
class _Call:
    """What a cell is of: the name of its lengths, its sizes, and its speed."""

    name: str
    shape: Shape | PackedShape
    measured: float | None

    @property
    def page(self) -> int | None:
        """Rows of a page; None where there are none."""
        return self.shape.page if isinstance(self.shape, PagedShape) else None


class _Records:
    """The records of tuning and of packed cells of a workspace, read once for all modules that a page is about."""

    def __init__(self) -> None:
        self.tuned = functools.cache(tuning_records.load_all)
        self.packed = functools.cache(packed_records.load_all)


def _calls(workspace: Workspace, variant: Variant[Forward], records: _Records) -> Iterator[_Call]:
    """Dense modules at each length of the records; those that split keys at the shapes that they were tuned at, others
    in the packed cells that they were measured in. `workspace` is where the module lies, with its records."""
    present = files.sha256(workspace.module_path(variant.stem))
    if variant.spec.split is not None and variant.spec.problem.layout == "dense":
        for tuned in records.tuned(workspace):
            for timed in tuned.results:
                if timed.stem == variant.stem:
                    name = f"{tuned.problem.batch} of {tuned.problem.lengths}"
                    yield _Call(name, tuned.problem.shape, timed.tflops if timed.sha256 == present else None)
        return
    if variant.spec.problem.layout == "dense":
        record = evidence.verified(workspace, variant.stem)
        for length in evidence.SEQ_LENS:
            verified = record.tflops.get(str(length)) if record else None
            yield _Call(f"{length // 1024}k", measured_shape(variant.spec, length), verified)
        return
    for packed in records.packed(workspace):
        for result in packed.results:
            if result.stem == variant.stem:
                speed = result.tflops if result.sha256 == present else None
                yield _Call(packed.problem.lengths, packed.problem.shape, speed)


def cells(workspace: Workspace, variants: Iterable[Variant[Forward]]) -> Iterator[Cell]:
    """What was measured of these modules, with its predictions. Raises UserError for modules that are not rendered."""
    records = _Records()
    for variant in variants:
        place = workspace.place_of(variant)
        if not place.module_path(variant.stem).is_file():
            raise workspace.not_rendered([variant])
        yield from _predicted(place, variant, _calls(place, variant, records), even=True)


def _predicted(
    workspace: Workspace, variant: Variant[Forward], calls: Iterable[_Call], *, even: bool
) -> Iterator[Cell]:
    """Without `even` both predictions are those of the oldest product first; `workspace` as for `_calls`."""
    spec, chip = variant.spec, chips.H200
    registers, times = evidence.compiled_registers(workspace, variant.stem), simulation.times_of(spec, chip)
    ctas = simulation.settings_of(spec, registers=registers).ctas
    for call in calls:
        problem = Problem(spec, call.shape)
        oldest = simulation.predict(problem, times, chip, registers, warm=True)
        # Without products on the tensor cores there is nothing to arbitrate.
        arbitrated = even and times.qk.tensor
        evenly = simulation.predict(problem, times, chip, registers, "even", warm=True) if arbitrated else oldest
        heads = heads_text(call.shape.heads_q, call.shape.heads_kv)
        row = (spec.problem.head_dim + spec.problem.v_dim) * spec.kv_element.bytes
        size = sum(seq_k for _, seq_k in call.shape.sequences) * call.shape.heads_kv * row
        yield Cell(variant.stem, call.name, heads, call.page, ctas, evenly, oldest, call.measured, size)


def ladder_cells(workspace: Workspace) -> list[Cell]:
    """Every unmasked module of LADDER, at each length of the records."""
    variants = attention_only((found for name in LADDER for found in workspace.resolve(name)), "the simulator")
    return list(cells(workspace, [each for each in variants if isinstance(each.spec.mask, NoMask)]))


def packed_cells(workspace: Workspace, records: _Records) -> Iterator[Cell]:
    """The modules of PACKED with products served oldest first, at each list of lengths, in pages of SHOWN_PAGE, with
    the fewest heads of those that more than half as many lists as any were measured with."""
    for variant in attention_only((found for name in PACKED for found in workspace.resolve(name)), "the simulator"):
        calls = [call for call in _calls(workspace, variant, records) if call.page in (None, SHOWN_PAGE)]
        times = Counter(call.shape.heads_q for call in calls)
        fewest = min((heads for heads, count in times.items() if count > max(times.values()) / 2), default=0)
        shown = [call for call in calls if call.shape.heads_q == fewest]
        yield from _predicted(workspace, variant, shown, even=False)


def decoding_cells(workspace: Workspace, records: _Records) -> Iterator[Cell]:
    """The modules of DECODING with products served oldest first, at all that was measured of few queries, and in pages
    of SHOWN_PAGE."""
    for variant in attention_only((found for name in DECODING for found in workspace.resolve(name)), "the simulator"):
        calls = [call for call in _calls(workspace, variant, records) if call.page in (None, SHOWN_PAGE)]
        yield from _predicted(workspace, variant, calls, even=False)


def decoding_table(found: Sequence[Cell]) -> str:
    """Markdown: how far measured speeds are from predicted ones, by module and by bytes of K and V of a call."""
    edges, rows = [0.0, *SIZES, math.inf], []
    names = [f"up to {SIZES[0]} MB", *(f"{low} to {high} MB" for low, high in pairwise(SIZES)), f"over {SIZES[-1]} MB"]
    for stem in dict.fromkeys(cell.stem for cell in found):
        for name, (low, high) in zip(names, pairwise(edges), strict=True):
            ratios = [
                cell.measured / cell.oldest
                for cell in found
                if cell.stem == stem and cell.measured and low * 1e6 < cell.kv_bytes <= high * 1e6
            ]
            if ratios:
                shown = [f"{ratio:.2f}" for ratio in (min(ratios), statistics.median(ratios), max(ratios))]
                rows.append([f"`{stem}`", name, str(len(ratios)), *shown])
    return _markdown(["module", "K and V of a call", "cells", "least", "median", "most"], rows)


def comparison_table(found: Sequence[Cell]) -> str:
    """Markdown: a row for each module, with both lengths."""
    head = ["module", "CTAs"]
    for name in dict.fromkeys(cell.name for cell in found):
        head += [f"{name} even", f"{name} oldest", f"{name} measured", "measured / predicted"]
    rows = []
    for stem in dict.fromkeys(cell.stem for cell in found):
        own = [cell for cell in found if cell.stem == stem]
        rows.append([f"`{stem}`", str(own[0].ctas), *(text for cell in own for text in speeds(cell))])
    return _markdown(head, rows)


def packed_table(found: Sequence[Cell]) -> str:
    """Markdown: a row for each cell of packed sequences."""
    head = ["module", "lengths", "predicted", "measured", "measured / predicted"]
    return _markdown(head, [[f"`{cell.stem}`", cell.problem, *speeds(cell)[1:]] for cell in found])


def spread(found: Sequence[Cell]) -> str:
    """How far measured speeds are from predicted ones, by list of lengths, in one sentence each."""
    lines = []
    for name in dict.fromkeys(cell.name for cell in found):
        ratios = [cell.measured / cell.oldest for cell in found if cell.name == name and cell.measured is not None]
        if ratios:
            lines.append(
                f"- {name}: {counted(len(ratios), 'cell')}, measured over predicted from {min(ratios):.2f} to "
                f"{max(ratios):.2f}, {statistics.median(ratios):.2f} in the median.\n"
            )
    return "".join(lines)


def unmeasured(workspace: Workspace, found: Sequence[Cell]) -> str:
    """Markdown: which rows have no measured speed and why; nothing where all have one."""
    lines = []
    for stem in dict.fromkeys(cell.stem for cell in found if cell.measured is None):
        state, record = evidence.status(workspace, stem)
        why = "has not been verified on a GPU"
        if state is evidence.Status.STALE and record is not None:
            why = f"is stale: the file changed after its record of {record.date}"
        elif record is not None:
            why = "failed on a GPU" if state is evidence.Status.FAILED else "has a record without speeds"
        lines.append(f"- `{stem}` {why}; measure it with `fa3gen verify --evidence {stem}`.\n")
    return "".join(lines)


def speeds(cell: Cell) -> list[str]:
    """Predicted evenly and oldest first, measured, and measured over predicted, in words."""
    predicted = [f"{speed:.0f}" if speed >= 10 else markdown.speed(speed) for speed in (cell.even, cell.oldest)]
    if cell.measured is None:
        return [*predicted, "–", "–"]
    ratios = sorted((cell.measured / cell.oldest, cell.measured / cell.even))
    low, high = (f"{ratio:.2f}" for ratio in ratios)
    shown = low if low == high else f"{low} to {high}"
    return [*predicted, markdown.speed(cell.measured), shown]


def summary(found: Sequence[Cell]) -> str:
    """How far the predictions are from the measurements, in one sentence for each kind of kernel that was measured."""
    measured = [(cell, cell.measured) for cell in found if cell.measured is not None]
    tensor = [pair for pair in measured if pair[0].stem.startswith(("k4_smem", "k4_2", "k5", "k6", "fwd"))]
    scalar = [pair for pair in measured if pair not in tensor]
    lines = [*([_on_tensor_cores(tensor)] if tensor else []), *([_on_scalars(scalar)] if scalar else [])]
    return "".join(f"- {line}\n" for line in lines)


def _on_tensor_cores(tensor: Sequence[tuple[Cell, float]]) -> str:
    below = sum(measured < min(cell.even, cell.oldest) for cell, measured in tensor)
    above = sum(measured > max(cell.even, cell.oldest) for cell, measured in tensor)
    between = len(tensor) - below - above
    return (
        f"Both products on WGMMA: of {len(tensor)} cells {between} lie between the two predictions, {below} below "
        f"both, {above} above both; the median of measured over predicted is "
        f"{statistics.median(measured / cell.even for cell, measured in tensor):.2f} (even) and "
        f"{statistics.median(measured / cell.oldest for cell, measured in tensor):.2f} (oldest first)."
    )


def _on_scalars(scalar: Sequence[tuple[Cell, float]]) -> str:
    ratios = [measured / cell.oldest for cell, measured in scalar]
    low, high = min(ratios), max(ratios)
    return f"Products on scalars: {len(scalar)} cells, measured over predicted from {low:.2f} to {high:.2f}."


def stages_table(workspace: Workspace) -> str:
    """Markdown: tensor cores (or issue slots) busy in the steady state for each number of stages."""
    rows = []
    for stem in STAGED:
        [variant] = attention_only(workspace.resolve(stem), "the simulator")
        rows.append([f"`{stem}`", *_staged(workspace, variant)])
    return _markdown(["module", "busy", *map(str, STAGES)], rows)


def _staged(workspace: Workspace, variant: Variant[Forward]) -> list[str]:
    registers = evidence.compiled_registers(workspace, variant.stem)
    times = simulation.times_of(variant.spec, chips.H200)
    found = simulation.sweep(variant.spec, times, STAGES, registers=registers)
    tensor = bool(variant.spec.tile.warpgroups)
    shares = [f"{row.tensor if tensor else row.issue:.0%}{'' if row.legal else ' (refused)'}" for row in found]
    return ["tensor cores" if tensor else "issue slots", *shares]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(markdown.table(head, rows)) + "\n"


def blocks(workspace: Workspace) -> dict[str, str]:
    """Name -> text of each part of the document that this module makes."""
    found, records = ladder_cells(workspace), _Records()
    packed = list(packed_cells(workspace, records))
    table = comparison_table(found) + (f"\n{missing}" if (missing := unmeasured(workspace, found)) else "")
    return {
        **{"comparison": table, "summary": summary(found), "stages": stages_table(workspace)},
        **{"packed": packed_table(packed), "spread": spread(packed)},
        "decoding": decoding_table(list(decoding_cells(workspace, records))),
    }


def with_blocks(text: str, made: dict[str, str]) -> str:
    """The document with the parts between `<!-- NAME:begin -->` and `<!-- NAME:end -->` replaced."""
    for name, block in made.items():
        text = markdown.between(text, DOCUMENT, f"<!-- {name}:begin -->", block, f"<!-- {name}:end -->")
    return text
