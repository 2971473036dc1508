"""Copies: tensor maps and counts by hand, the schedule against the code, and what verify makes of wrong modules."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rendering import constants, copy_stems, plans, source, tree, variants

from fa3gen.design import boxes
from fa3gen.design.operation import operation_of
from fa3gen.design.schedule import schedule_of
from fa3gen.generate.copying import CopyPlan
from fa3gen.spec.model import Copy
from fa3gen.verify import copies
from fa3gen.verify.copies_on_gpu import CopyRunner

STEMS = copy_stems()


def spec_of(stem: str) -> Copy:
    spec = variants()[stem].spec
    assert isinstance(spec, Copy)
    return spec


def plan(stem: str) -> CopyPlan:
    found = plans()[stem]
    assert isinstance(found, CopyPlan)
    return found


@pytest.mark.parametrize(
    ("stem", "box", "expected"),
    [
        # 256 / 64 = 4 boxes of 8 x 128 bytes: 4096 bytes, a barrier, up to a multiple of 1024.
        ("c1", (64, 8), {"tma_loads": 4, "tma_stores": 4, "mbarrier_inits": 1, "smem_bytes": 5120}),
        ("c1_none", (256, 8), {"tma_loads": 1, "tma_stores": 1, "smem_bytes": 5120}),
        ("c1_32b", (16, 8), {"tma_loads": 16, "tma_stores": 16}),
        ("c1_64b", (32, 8), {"tma_loads": 8, "tma_stores": 8}),
        ("c1_folded", (64, 8, 4), {"tma_loads": 1, "tma_stores": 1, "smem_bytes": 5120}),
        ("c1_4d_folded", (64, 2, 2, 2, 4), {"tma_loads": 1}),
        # Rows of 200 are rows of the box: 8 x 400 = 3200 bytes, a barrier, up to a multiple of 1024.
        ("c1_5d", (200, 2, 2, 2, 1), {"tma_loads": 1, "smem_bytes": 4096}),
        ("c1_packed", (64, 8, 1, 1), {"tma_loads": 4, "tma_stores": 4}),
        # 4 stages of 4 x 32 x 128 = 16384 bytes; loads before the loop and in it.
        ("c2", (64, 32), {"tma_loads": 8, "tma_stores": 4, "mbarrier_inits": 4, "smem_bytes": 66560}),
        ("c2_packed", (64, 32, 4, 1, 1), {"tma_loads": 2, "tma_stores": 1, "mbarrier_expect_tx": 2}),
    ],
)
def test_boxes_and_counts(stem: str, box: tuple[int, ...], expected: dict[str, int]) -> None:
    found = vars(plan(stem).expectation)
    assert boxes.tma_box(spec_of(stem)) == box
    assert {name: found[name] for name in expected} == expected


def test_every_copy_is_held_against_numbers() -> None:
    assert sorted(STEMS) == sorted(test_boxes_and_counts.pytestmark[0].args[1][i][0] for i in range(len(STEMS)))


@pytest.mark.parametrize("stem", STEMS)
def test_constants_are_those_of_the_plan(stem: str) -> None:
    values, spec = constants(tree(stem)), spec_of(stem)
    assert values["ROW"] == spec.problem.row and values["BOX"] == boxes.tma_box(spec)
    assert values["TILE_BYTES"] == boxes.tile_bytes(spec) == plan(stem).cta.regions[0].bytes // boxes.stages(spec)
    assert f"{values['TILE_BYTES']} bytes" in "\n".join(plan(stem).header.barriers)
    if spec.ring is not None:
        stages, reading = spec.ring.stages, spec.ring.reading
        assert (values["STAGES"], values["READING"], values["AHEAD"]) == (stages, reading, stages - reading)
        assert values["CTAS_PER_SM"] == spec.ring.ctas_per_sm
    if boxes.packed(spec):
        # A tile's last row may be FAR rows further on than its sequence: the stride of the last dimension takes them
        # back, FAR times 2^34 bytes being all there are.
        assert values["FAR"] * values["AROUND"] * spec.element.bytes == 2**64
        assert values["TILE_M"] == spec.box.extents[0]


NAMES = {
    "mbarrier_arrive_and_expect_tx": "announce",
    "mbarrier_wait": "wait_full",
    "cp_async_bulk_wait_group": "wait_stores",
}


def events(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> list[tuple[str, str]]:
    """What a function does, by kind of step; whether in its loop over tiles."""
    found = []

    def visit(node: ast.AST, where: str) -> None:
        inside = where
        if isinstance(node, ast.For):
            inside = "step" if isinstance(node.target, ast.Name) and node.target.id == "tile" else where
        for child in ast.iter_child_nodes(node):
            visit(child, inside)
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in NAMES:
                found.append((inside, NAMES[name], node.lineno))
            elif ast.unparse(node.func) == "cute.copy":
                found.append(
                    (inside, {"tma_load": "load", "tma_store": "store"}[ast.unparse(node.args[0])], node.lineno)
                )
            elif name in functions and name == "load_tile":
                found.extend((inside, kind, node.lineno) for kind in ("announce", "load"))

    visit(function, "cta")
    return [(where, kind) for where, kind, _ in sorted(found, key=lambda event: event[2])]


def differences(stem: str, text: str) -> bool:
    """Whether the code of a module does something else than its schedule says."""
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    steps = [step for step in schedule_of(spec_of(stem)).steps]
    told = [("step" if step.place == "step" else "cta", step.kind) for step in steps]
    return events(functions["copy_kernel"], functions) != told


@pytest.mark.parametrize("stem", STEMS)
def test_the_code_does_what_the_schedule_says(stem: str) -> None:
    assert not differences(stem, source(stem))


@pytest.mark.parametrize("stem", ["c1", "c2_packed"])
def test_a_step_left_out_or_moved_is_found(stem: str) -> None:
    lines = source(stem).splitlines()
    done = [
        i
        for i, line in enumerate(lines)
        if any(name in line for name in (*NAMES, "cute.copy(tma_store", " load_tile("))
    ]
    inside = lines.index("def load_tile(tma_load, tXsX, tXgX, x_full, fill):") if stem == "c2_packed" else len(lines)
    done = [i for i in done if i < inside]
    assert len(done) >= 4
    for i in done:
        indent = lines[i][: len(lines[i]) - len(lines[i].lstrip())]
        assert differences(stem, "\n".join([*lines[:i], f"{indent}pass", *lines[i + 1 :]])), lines[i]


def test_bytes_are_those_of_both_tensors() -> None:
    operation = operation_of(spec_of("c1_packed"))
    assert [str(tensor) for tensor in operation.inputs] == ["x", "offsets"] and str(operation.first) == "x"
    assert operation_of(spec_of("c1")).output.row == 256


# What verify makes of modules that are wrong


def entry(wrong: str) -> Any:
    """A module whose `copy` is torch's, but for what is wrong."""

    def copy(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        if wrong == "last row":
            out[:-1] = x[:-1]
        elif wrong == "quiet NaN":
            out.copy_(x.float().to(x.dtype))  # a signalling NaN becomes a quiet one
        else:
            out.copy_(x)
        if wrong == "behind":
            out.as_strided((8,), (1,), out.storage_offset() + out.stride(0) * out.shape[0]).fill_(1)
        if wrong == "input":
            x[..., 0] = 0
        return torch.empty_like(out) if wrong == "another tensor" else out

    return SimpleNamespace(copy=copy)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("", None),
        ("last row", "256 elements of out are wrong"),
        ("quiet NaN", "elements of out are wrong"),
        ("behind", "8 elements around out were written"),
        ("input", "changed its input x"),
        ("another tensor", "is not the `out` that was given"),
    ],
)
def test_wrong_copies_are_found(wrong: str, said: str | None) -> None:
    spec = spec_of("c1")
    runner = CopyRunner(entry(wrong), spec, torch.device("cpu"), seed=3)
    case = next(case for case in copies.cpu_cases(spec) if case.name == "ragged")
    failures = runner.run_case(case).failures
    assert (failures == ()) if said is None else (len(failures) == 1 and said in failures[0]), failures


def test_cases_cover_what_they_say() -> None:
    """Cut tiles, strides in any order, repeated x; sequences without rows, cut everywhere, that begin anywhere."""
    for stem in STEMS:
        spec = spec_of(stem)
        for case in (*copies.cpu_cases(spec), *copies.gpu_cases(spec)):
            if case.name in ("many", "tall", "long"):
                continue
            made = copies.make(spec, case, device=torch.device("cpu"), seed=1)
            assert tuple(made.x.shape) == (*case.sizes, spec.problem.row) and made.x.stride(-1) == 1
            assert made.out.shape == made.x.shape
            if made.offsets is not None:
                assert made.offsets.tolist() == case.offsets and case.offsets[-1] + case.unused == case.sizes[0]
    [expanded] = [case for case in copies.cpu_cases(spec_of("c1")) if case.layout == "expanded"]
    assert copies.make(spec_of("c1"), expanded, device=torch.device("cpu"), seed=1).x.stride(0) == 0
    [permuted] = [case for case in copies.cpu_cases(spec_of("c1_5d")) if case.layout == "permuted"]
    strides = copies.make(spec_of("c1_5d"), permuted, device=torch.device("cpu"), seed=1).x.stride()
    assert list(strides[:-1]) == sorted(strides[:-1])  # the first dimension is the innermost but the row
