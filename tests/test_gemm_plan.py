"""The plan of GEMM modules: what the compiled code must show, by hand; the schedule against the code; the tensors."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
from rendering import constants, plans, source, tree, variants

from fa3gen.design.gemm import GemmShape
from fa3gen.design.operation import operation_of
from fa3gen.design.schedule import schedule_of
from fa3gen.generate.gemm_plan import GemmPlan
from fa3gen.spec.model import Gemm

STEMS = sorted(stem for stem, variant in variants().items() if isinstance(variant.spec, Gemm))


def plan(stem: str) -> GemmPlan:
    found = plans()[stem]
    assert isinstance(found, GemmPlan)
    return found


@pytest.mark.parametrize(
    ("stem", "expected"),
    [
        # (128 x 32 + 32 x 64) / 8 vectors for 128 threads are 6; 2 steps ahead and one in the loop.
        ("g1", {"cp_async": 18, "tma_loads": 0, "wgmma": {}, "mbarrier_inits": 0, "smem_bytes": 36864}),
        # A: 64 elements are one span; B: 128 / 64 = 2 boxes; ahead and in the loop. D: 128 / 64 = 2 boxes.
        ("g2", {"tma_loads": 6, "tma_stores": 2, "wgmma": {(64, 128, 16, "smem"): 4}, "stmatrix": 8}),
        # B: 256 / 64 = 4 boxes, once. The first step apart: 2 x 4 products. 256 / 64 = 4 parts of D, 4 stmatrix each.
        (
            "g3",
            {
                "tma_loads": 5,
                "tma_stores": 4,
                "wgmma": {(64, 256, 16, "smem"): 8},
                "wgmma_commits": 2,
                "wgmma_waits": 2,
                "mbarrier_inits": 8,
                "stmatrix": 16,
                "setmaxnreg": {"dec 24": 1, "inc 240": 1},
                "smem_bytes": 230400,
            },
        ),
        # Two products of 64 rows for each warpgroup: 2 x 2 x 4; B: 128 / 64 = 2 boxes.
        ("g3_256x128", {"tma_loads": 3, "wgmma": {(64, 128, 16, "smem"): 16}, "tma_stores": 4, "stmatrix": 16}),
        # A MN-major: 128 / 64 = 2 boxes; B K-major: one.
        ("g3_transposed", {"tma_loads": 3}),
        # Four ldmatrix of 16 columns in a step of 64, for the first step and for the others.
        ("g3_registers", {"ldmatrix": 8, "wgmma": {(64, 256, 16, "registers"): 8}}),
        # 8 bits: 32 deep, 128 / 32 products a step; D in 16 bits.
        ("g3_fp8", {"tma_loads": 2, "wgmma": {(64, 256, 32, "smem"): 8}, "stmatrix": 16, "smem_bytes": 230400}),
        # No step apart: one loop, each step summed by itself.
        ("g3_fp8_two_levels", {"wgmma": {(64, 128, 32, "smem"): 4}, "wgmma_commits": 1, "wgmma_waits": 1}),
        # 256 / 32 = 8 parts of D, 128 bytes wide, which no stmatrix writes.
        ("g3_fp32_add", {"tma_stores": 8, "stmatrix": 0}),
    ],
)
def test_expectation(stem: str, expected: dict[str, Any]) -> None:
    found = vars(plan(stem).expectation)
    assert {name: found[name] for name in expected} == expected


def test_expectation_of_the_stores() -> None:
    stores = {stem: plan(stem).expectation.sass for stem in STEMS}
    # 8 rows of a thread, whole vectors of 8 elements or, at the end of the columns, one by one.
    assert stores["g1"].global_stores == {"STG.128": 8, "STG.16": 64}
    assert stores["g3"].shared_stores == {"STSM.4": 16}
    # Of 64 x 256 float32 a thread stores 256 / 2 pairs... of two rows: 8 parts x 32 columns / 4.
    assert stores["g3_fp32_add"].shared_stores == {"STS.64": 64}


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem != "g1"])
def test_the_ring_in_the_header_is_that_of_the_code(stem: str) -> None:
    """Stages, bytes that a phase completes with, and arrivals: from the constants of the module."""
    values = constants(tree(stem))
    text = "\n".join(plan(stem).header.barriers)
    size = variants()[stem].spec.element.bytes
    assert values["STAGE_BYTES"] == (values["TILE_M"] + values["TILE_N"]) * values["TILE_K"] * size
    assert f"{values['STAGE_BYTES']} bytes" in text and f"{values['CONSUMER_WARPS']} arrivals" in text
    (ring,) = schedule_of(plan(stem).spec).rings
    assert (ring.stages, ring.full_bytes, ring.empty_arrivals) == (
        values["STAGES"],
        values["STAGE_BYTES"],
        values["CONSUMER_WARPS"],
    )


@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem.startswith("g3")])
def test_steps_of_a_consumer_stand_in_the_code_in_their_order(stem: str) -> None:
    """Waits, products and releases of a tile, as the schedule has them, against the calls of `consume`."""
    schedule = schedule_of(plan(stem).spec)
    steps = [step for place in ("tile", "step", "end") for step in schedule.of("consumers", place)]
    names = {
        "wait_full": "consumer_wait",
        "product": "multiply",
        "wait_products": "wait_group",
        "release": "consumer_release",
        "read": "load_a",
        "next": "next_work",
    }
    wanted = [(names[step.kind], step.in_flight) for step in steps if step.kind in names]
    (consume,) = [node for node in tree(stem).body if isinstance(node, ast.FunctionDef) and node.name == "consume"]
    (loop,) = [node for node in consume.body if isinstance(node, ast.While)]
    calls = sorted((node for node in ast.walk(loop) if isinstance(node, ast.Call)), key=lambda node: node.lineno)
    found = []
    for call in calls:
        name = ast.unparse(call.func).rpartition(".")[2]
        if name in names.values():
            flying = int(ast.unparse(call.args[0])) if name == "wait_group" else 0
            found.append((name, flying))
    assert found == wanted


@pytest.mark.parametrize("stem", STEMS)
def test_majors_are_those_of_the_tensors(stem: str) -> None:
    """What a call has to be contiguous along is what the kernel takes for contiguous."""
    spec = variants()[stem].spec
    assert isinstance(spec, Gemm)
    a, b, *_ = operation_of(spec).inputs
    text = source(stem)
    along = {name: re.search(rf"{name}: \(.*?contiguous along (\w)", text) for name in ("a", "b")}
    for tensor in (a, b):
        contiguous = tensor.layout.contiguous
        assert contiguous is not None
        found = along[tensor.name]
        assert found is not None and found[1] == str(tensor.dims[contiguous])
        assert f"fake({', '.join(map(str, tensor.dims))}, {contiguous})" in text


def test_work() -> None:
    shape = GemmShape(4096, 2048, 1024)
    assert shape.flops == 2 * 4096 * 2048 * 1024 and str(shape) == "4096 x 2048 x 1024"
    spec = variants()["g3_fp32_add"].spec
    # A 4096 x 1024 and B 1024 x 2048 of two bytes, C and D 4096 x 2048 of four.
    assert operation_of(spec).bytes(shape) == 8_388_608 + 4_194_304 + 2 * 33_554_432
    assert operation_of(spec).bytes_made(shape) == 0
