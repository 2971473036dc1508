"""The rows of a timeline, the same for text and picture: who or what, and spans from left to right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fa3gen.inspect.simulation.results import Simulation, Span


@dataclass(frozen=True)
class Lane:
    """One row: a stage of a ring, a producer, or the products or the computing of a warpgroup."""

    label: str
    cta: int
    spans: tuple[Span, ...]


def lanes(simulation: Simulation) -> tuple[Lane, ...]:
    """The rows of a simulation, CTA by CTA: stages of Q, K and V, producers, warpgroups."""
    return tuple(lane for cta in range(simulation.ctas) for lane in _of_cta(simulation, cta))


def _of_cta(simulation: Simulation, cta: int) -> Iterable[Lane]:
    spans = [span for span in simulation.spans if span.cta == cta]
    in_stages = [span for span in spans if span.kind in ("load", "held")]
    for tensor in ("Q", "K", "V"):
        stages = sorted({span.stage for span in in_stages if span.what == tensor and span.stage is not None})
        for stage in stages:
            found = tuple(span for span in in_stages if span.what == tensor and span.stage == stage)
            yield Lane(f"{tensor} stage {stage}" if len(stages) > 1 else tensor, cta, found)
    for name in sorted({span.actor for span in spans if span.actor.startswith("producer")}):
        yield Lane(name, cta, tuple(span for span in spans if span.actor == name and span.kind == "wait"))
    for group in range(simulation.groups):
        name = f"warpgroup {group}"
        own = [span for span in spans if span.actor == name]
        products = tuple(span for span in own if span.kind == "product")
        if products:
            yield Lane(f"{name} products", cta, products)
        yield Lane(f"{name} warps", cta, tuple(span for span in own if span.kind in ("compute", "wait")))
