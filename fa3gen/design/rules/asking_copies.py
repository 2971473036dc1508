"""From the spec of a copy to facts: every rule that can be asked about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fa3gen.design import boxes
from fa3gen.design.cta import cta_of
from fa3gen.design.rules import copies, memory
from fa3gen.design.rules.registry import Answer
from fa3gen.spec.copying import Copy, CopyRing


def answers(spec: Copy) -> list[Answer]:
    """All of them; those about shared memory need a box that is one."""
    found = [*_box(spec), *_rows(spec)]
    if spec.ring is not None:
        found.append(copies.ring_reading.ask(spec.ring.stages, spec.ring.reading))
    if not any(answer.refuses for answer in found):
        found += _shared_memory(spec)
    return found


def _box(spec: Copy) -> Iterable[Answer]:
    extents, size = spec.box.extents, spec.element.bytes
    yield copies.box_extents.ask(extents)
    yield copies.box_row.ask(extents[-1], size)
    yield copies.box_span.ask(extents[-1], size, spec.box.swizzle)
    yield copies.box_fills_span.ask(extents[-1], size, spec.box.swizzle)
    yield copies.box_start.ask(extents, size)
    yield copies.map_rank.ask(len(extents), boxes.folded(spec), boxes.packed(spec))


def _rows(spec: Copy) -> Iterable[Answer]:
    yield copies.row_strides.ask(spec.problem.row, spec.element.bytes)
    yield copies.packed_dimensions.ask(spec.problem.layout, len(spec.box.extents))
    if boxes.folded(spec):
        yield copies.folded_parts.ask(spec.problem.row, spec.box.extents[-1])
        yield copies.folded_row.ask(spec.problem.row, spec.box.extents[-1])


def _shared_memory(spec: Copy) -> Iterable[Answer]:
    """Whether the tiles of a CTA fit, with the most stages that would as a way out; then those of all CTAs of an SM."""
    answer, ring = _tiles(spec), spec.ring
    if ring is None:
        yield answer
        return
    if answer.refuses:
        most = _most_stages(spec, ring)
        way_out = f"at most {most} stage{'s' * (most > 1)}" if most > ring.reading else "a smaller box"
        yield _tiles(spec, field="ring.stages", ways_out=[way_out])
        return
    yield answer
    total = cta_of(spec).smem_bytes
    yield memory.shared_sm.ask(ring.ctas_per_sm, total, field="ring.ctas_per_sm", smaller="ring or box")


def _tiles(spec: Copy, *, field: str = "box.extents", ways_out: Sequence[str] = ("a smaller box",)) -> Answer:
    return memory.shared_memory.ask(*memory.smem_facts(cta_of(spec)), field=field, ways_out=ways_out)


def _most_stages(spec: Copy, ring: CopyRing) -> int:
    """The most stages that fit; 0 where not even one does."""
    rings = (ring.model_copy(update={"stages": count}) for count in range(ring.stages - 1, 0, -1))
    return next((ring.stages for ring in rings if not _tiles(spec.model_copy(update={"ring": ring})).refuses), 0)
