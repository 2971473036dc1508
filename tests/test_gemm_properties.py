"""Any spec of a GEMM: accepted ones fit the chip and render to modules that hold together, others get a reason."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rendering import CHECKOUT, gemm_stems, variants

from fa3gen.design import gemm, rules
from fa3gen.design.cta import cta_of
from fa3gen.design.schedule import schedule_of
from fa3gen.generate.render import render_variant
from fa3gen.hardware import hopper
from fa3gen.spec.model import Gemm
from fa3gen.spec.specfile import Variant

BOUNDED = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
SWIZZLES = st.sampled_from(["none", "32B", "64B", "128B"])
EXTENTS = st.sampled_from([8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 512, 100, 1])
MAJORS = st.sampled_from(["k", "mn"])
REPLACEMENTS: dict[str, st.SearchStrategy[Any]] = {
    "problem.dtype": st.sampled_from(["bf16", "fp16", "e4m3"]),
    "accumulation": st.sampled_from(["one_level", "two_levels"]),
    "tile.m": EXTENTS,
    "tile.n": EXTENTS,
    "tile.k": EXTENTS,
    "tile.warpgroups": st.sampled_from([None, 1, 2, 3, 4]),
    "tile.threads": st.sampled_from([None, 32, 64, 128, 256, 100]),
    "tile.band": st.integers(1, 40),
    "load.stages": st.integers(1, 9),
    "load": st.sampled_from([{"engine": "tma", "stages": 2}, {"engine": "cp_async", "stages": 2}]),
    "smem": st.none() | st.fixed_dictionaries({"a": SWIZZLES, "b": SWIZZLES, "d": SWIZZLES}),
    "product": st.just({"engine": "scalar"})
    | st.fixed_dictionaries(
        {
            "engine": st.just("wgmma"),
            "a": st.fixed_dictionaries({"source": st.sampled_from(["smem", "registers"]), "major": MAJORS}),
            "b": st.fixed_dictionaries({"major": MAJORS}, optional={"source": st.sampled_from(["smem", "registers"])}),
        }
    ),
    "schedule": st.sampled_from(
        [{"kind": "cooperative"}, *({"kind": "warp_specialized", "overlap": each} for each in (True, False))]
    ),
    "d": st.fixed_dictionaries(
        {}, optional={"dtype": st.sampled_from(["bf16", "fp16", "fp32"]), "add_c": st.booleans()}
    ),
}


@st.composite
def neighbours(draw: st.DrawFn) -> dict[str, Any]:
    """A committed spec with some of its fields replaced: often legal."""
    fields = variants()[draw(st.sampled_from(gemm_stems()))].spec.model_dump()
    for path in draw(st.lists(st.sampled_from(sorted(REPLACEMENTS)), max_size=4, unique=True)):
        part, _, name = path.partition(".")
        value = draw(REPLACEMENTS[path])
        if name:
            fields[part] = {**fields[part], name: value}
        else:
            fields[part] = value
    return fields


def variant(spec: Gemm) -> Variant:
    return Variant("any", spec, Path("specs/any.yaml"), "Any kernel")


def legal(fields: dict[str, Any]) -> Gemm:
    """The spec, where it is one and nothing refuses it; what is no spec is a ValidationError and nothing else."""
    try:
        spec = Gemm.model_validate(fields)
    except ValidationError:
        assume(False)
        raise
    found = rules.check(spec)
    assert all(violation.field and violation.message for violation in found)
    assume(not found)
    return spec


@settings(BOUNDED, max_examples=150)
@given(fields=neighbours())
def test_accepted_specs_fit_the_chip_and_have_both_ends_of_every_barrier(fields: dict[str, Any]) -> None:
    spec = legal(fields)
    cta, schedule = cta_of(spec), schedule_of(spec)
    assert cta.smem_bytes <= hopper.SMEM_PER_CTA and cta.threads <= hopper.THREADS_PER_CTA
    held = sum(count for _, count in cta.held)
    budget = gemm.register_budget(spec)[1] if gemm.specialized(spec) else hopper.REGISTERS_PER_THREAD
    assert held <= budget and held * gemm.computing_threads(spec) <= hopper.REGISTERS_PER_SM
    for ring in schedule.rings:
        kinds = {(step.who, step.kind) for step in schedule.steps if step.on == ring.name}
        assert (ring.producer, "load") in kinds
        if ring.full_bytes:
            assert {(ring.producer, "wait_empty"), *((who, "wait_full") for who in ring.consumers)} <= kinds
            assert {(who, "release") for who in ring.consumers} <= kinds
    assert sum(ring.mbarriers for ring in schedule.rings) * hopper.MBARRIER_BYTES == cta.barrier_bytes


@settings(BOUNDED, max_examples=40)
@given(fields=neighbours())
def test_accepted_specs_render_to_modules_that_hold_together(fields: dict[str, Any]) -> None:
    text = render_variant(variant(legal(fields)), CHECKOUT)
    module = ast.parse(text)
    assert max(map(len, text.splitlines())) <= 120
    constants = {name.id for node in module.body if isinstance(node, ast.Assign) for name in _names(node.targets)}
    read = {node.id for node in ast.walk(module) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assert constants <= read


def _names(targets: list[ast.expr]) -> list[ast.Name]:
    return [node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
