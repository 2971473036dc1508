"""Why a spec is legal: the rules that it was held against, with their facts, and the nearest specs that they refuse.

Nothing is decided here. `fa3gen.design.rules` keeps what each rule was asked and what it said; limits are found by
asking about other specs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fa3gen.design import gemm, rules
from fa3gen.design.rules import Answer, Kind
from fa3gen.hardware import hopper
from fa3gen.spec.model import (
    Combine,
    Copy,
    CpAsyncLoad,
    Forward,
    Gemm,
    GlobalHandoff,
    Quantize,
    Spec,
    TmaLoad,
    WgmmaProduct,
)

MOST_STAGES = 16  # of K and V that are asked about


@dataclass(frozen=True)
class Limit:
    """How far one field could go: its value, the largest legal one tried, and the next one, who refuses it and why."""

    field: str
    value: int
    largest: int
    refused: int
    kind: Kind
    message: str


def questions(spec: Spec) -> tuple[Answer, ...]:
    """Everything that the rules were asked about this spec and what they said, in their order, each question once."""
    return tuple({(answer.rule.name, answer.facts): answer for answer in rules.answers(spec)}.values())


# -- limits


def limits(spec: Spec) -> tuple[Limit, ...]:
    """How far stages, keys per step, query rows, columns of D, parts or CTAs could go, and which rule says so."""
    match spec:
        case Forward():
            found = [_limit(*candidate) for candidate in _candidates(spec)]
        case Gemm():
            found = [_limit(*candidate) for candidate in _gemm_candidates(spec)]
        case Combine():
            found = [_limit(*candidate) for candidate in _combine_candidates(spec)]
        case Quantize():
            found = [_limit(*candidate) for candidate in _quantize_candidates(spec)]
        case Copy():
            found = []
    return tuple(limit for limit in found if limit is not None)


def _candidates(spec: Forward) -> Iterator[tuple[str, int, list[int], Callable[[int], Forward]]]:
    """Field, value, larger values to try, and the spec with such a value."""
    if isinstance(spec.handoff, GlobalHandoff):
        return
    if isinstance(spec.load, CpAsyncLoad | TmaLoad):
        stages = spec.load.kv_stages
        tried = list(range(stages + 1, MOST_STAGES + 1))
        yield "load.kv_stages", stages, tried, lambda count: _with(spec, "load", kv_stages=count)
    wgmma = isinstance(spec.pv, WgmmaProduct)
    step = spec.element.wgmma_k if wgmma else spec.tile.kv
    wider = list(range(spec.tile.kv + step, 2 * hopper.WGMMA_N_MAX + 1, step))
    yield "tile.kv", spec.tile.kv, wider, lambda kv: _with(spec, "tile", kv=kv)
    if wgmma:
        groups = spec.tile.warpgroups or 1
        more = list(range(groups + 1, hopper.THREADS_PER_CTA // hopper.WARPGROUP + 1))
        yield (
            "tile.warpgroups",
            groups,
            more,
            lambda count: _with(spec, "tile", warpgroups=count, q=count * hopper.WGMMA_M),
        )


def _gemm_candidates(spec: Gemm) -> Iterator[tuple[str, int, list[int], Callable[[int], Gemm]]]:
    """The same of a GEMM: stages, and columns of D."""

    def changed(part: str, **values: int) -> Gemm:
        return spec.model_copy(update={part: getattr(spec, part).model_copy(update=values)})

    stages, columns = spec.load.stages, spec.tile.n
    yield "load.stages", stages, list(range(stages + 1, MOST_STAGES + 1)), lambda count: changed("load", stages=count)
    if isinstance(spec.product, WgmmaProduct):
        step = gemm.chunk_columns(spec)
        wider = list(range(columns + step, 2 * hopper.WGMMA_N_MAX + 1, step))
        yield "tile.n", columns, wider, lambda n: changed("tile", n=n)


def _combine_candidates(spec: Combine) -> Iterator[tuple[str, int, list[int], Callable[[int], Combine]]]:
    """The same of a merge: parts at once, and CTAs of an SM."""
    at_once, per_sm = spec.parts.at_once, spec.cta.per_sm

    def with_parts(count: int) -> Combine:
        return spec.model_copy(update={"parts": spec.parts.model_copy(update={"at_once": count})})

    def with_ctas(count: int) -> Combine:
        return spec.model_copy(update={"cta": spec.cta.model_copy(update={"per_sm": count})})

    yield "parts.at_once", at_once, list(range(at_once + 1, MOST_STAGES + 1)), with_parts
    yield "cta.per_sm", per_sm, list(range(per_sm + 1, MOST_STAGES + 1)), with_ctas


def _quantize_candidates(spec: Quantize) -> Iterator[tuple[str, int, list[int], Callable[[int], Quantize]]]:
    """The same of a quantisation: rows, and CTAs of an SM."""
    tile = spec.tile

    def with_tile(**changes: int) -> Quantize:
        return spec.model_copy(update={"tile": tile.model_copy(update=changes)})

    yield "tile.rows", tile.rows, [tile.rows << i for i in range(1, 5)], lambda rows: with_tile(rows=rows)
    more = list(range(tile.per_sm + 1, MOST_STAGES + 1))
    yield "tile.per_sm", tile.per_sm, more, lambda ctas: with_tile(per_sm=ctas)


def _limit(field: str, value: int, tried: list[int], changed: Callable[[int], Spec]) -> Limit | None:
    largest = value
    for candidate in tried:
        refusal = next((answer for answer in rules.answers(changed(candidate)) if answer.refuses), None)
        if refusal is not None and refusal.violation is not None:
            return Limit(field, value, largest, candidate, refusal.rule.kind, refusal.violation.message)
        largest = candidate
    return None


def _with(spec: Forward, part: str, **changes: int) -> Forward:
    return spec.model_copy(update={part: getattr(spec, part).model_copy(update=changes)})
