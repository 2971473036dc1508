"""An explanation of one module as frozen data, gathered from the places where its facts are derived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from fa3gen.design import ceiling, work
from fa3gen.design.ceiling import Ceiling, Occupancy, ProblemCeiling
from fa3gen.design.cta import Cta, cta_of
from fa3gen.design.family import PackedShape, Shape
from fa3gen.design.footprint import Region
from fa3gen.design.rules import Answer
from fa3gen.design.work import Problem, QueryTile, Step
from fa3gen.generate.header import Description
from fa3gen.generate.plan import describe
from fa3gen.hardware import hopper
from fa3gen.hardware.chips import Chip
from fa3gen.inspect.explanation import legality
from fa3gen.inspect.explanation.legality import Limit
from fa3gen.spec.model import Forward, Spec
from fa3gen.spec.specfile import Variant


@dataclass(frozen=True)
class AttentionWork:
    """What a module of attention does in a step and for a tile of queries, and what bounds it.

    `ceilings` has one entry per chip, `problems` one row per shape with one entry per chip.
    """

    spec: Forward
    step: Step
    query_tile: QueryTile
    ceilings: tuple[Ceiling, ...]
    problems: tuple[tuple[ProblemCeiling, ...], ...]


@dataclass(frozen=True)
class Explanation:
    """Everything that `fa3gen explain` says of one module.

    `smem` is (offset, region) for each array and the barriers, `smem_total` what a CTA asks for. `fields_from` maps
    each spec file, this one and those that it extends, to the fields that come from it. `work` is there for attention.
    """

    stem: str
    source: PurePath
    spec: Spec
    description: Description
    asked: tuple[Answer, ...]
    limits: tuple[Limit, ...]
    smem: tuple[tuple[int, Region], ...]
    smem_total: int
    cta: Cta
    occupancy: Occupancy
    fields_from: Mapping[str, tuple[str, ...]]
    work: AttentionWork | None

    @property
    def smem_left(self) -> int:
        """Bytes of shared memory that one CTA could still ask for."""
        return hopper.SMEM_PER_CTA - self.smem_total


def explain(
    variant: Variant,
    shapes: Sequence[Shape | PackedShape],
    chips: Sequence[Chip],
    registers: int | None = None,
    num_splits: int = 0,
) -> Explanation:
    """Explain one module for some shapes and chips.

    `registers` per thread are those of the compiled kernel, None where it is not known. `num_splits` is what calls ask
    for. Raises UserError for a shape, or a number of parts, that the module refuses.
    """
    spec = variant.spec
    occupancy = ceiling.occupancy(spec, registers)
    cta = cta_of(spec)
    return Explanation(
        stem=variant.stem,
        source=PurePath(variant.source),
        spec=spec,
        description=describe(spec, variant.summary),
        asked=legality.questions(spec),
        limits=legality.limits(spec),
        smem=tuple(cta.placed()),
        smem_total=cta.smem_bytes,
        cta=cta,
        occupancy=occupancy,
        fields_from=_fields_from(variant),
        work=(
            _work(spec, [Problem(spec, shape, num_splits) for shape in shapes], chips, occupancy)
            if isinstance(spec, Forward)
            else None
        ),
    )


def _work(spec: Forward, problems: Sequence[Problem], chips: Sequence[Chip], occupancy: Occupancy) -> AttentionWork:
    return AttentionWork(
        spec=spec,
        step=work.step(spec),
        query_tile=work.query_tile(spec),
        ceilings=tuple(ceiling.steady(spec, chip) for chip in chips),
        problems=tuple(tuple(ceiling.of_problem(problem, chip, occupancy) for chip in chips) for problem in problems),
    )


def _fields_from(variant: Variant) -> dict[str, tuple[str, ...]]:
    """Fields by the file that gives them, the module's own first; a part that comes from one file is named whole."""
    parts: dict[str, set[Path]] = {}
    for field, path in variant.origins.items():
        parts.setdefault(field.partition(".")[0], set()).add(path)
    files: dict[str, list[str]] = {variant.source.as_posix(): []}
    for field, path in variant.origins.items():
        part = field.partition(".")[0]
        fields = files.setdefault(path.as_posix(), [])
        name = part if len(parts[part]) == 1 else field
        fields += [name] if name not in fields else []
    return {file: tuple(fields) for file, fields in files.items() if fields}
