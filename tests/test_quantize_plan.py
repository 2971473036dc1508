"""The plan of a quantisation: numbers by hand, what its code has to show, and the schedule against the code."""

from __future__ import annotations

import ast

import pytest
from rendering import constants, plans, quantize_stems, tree, variants

from fa3gen.design import quantizing
from fa3gen.design.operation import operation_of
from fa3gen.design.schedule import schedule_of
from fa3gen.generate.quantizing import QuantizePlan
from fa3gen.spec.model import Quantize

STEMS = quantize_stems()


def plan(stem: str) -> QuantizePlan:
    found = plans()[stem]
    assert isinstance(found, QuantizePlan)
    return found


def spec_of(stem: str) -> Quantize:
    spec = variants()[stem].spec
    assert isinstance(spec, Quantize)
    return spec


def test_numbers_by_hand() -> None:
    """A thread of 256 has 2 of 64 rows, and of each 2 vectors of 8 elements: 32 values, 4 stores of 8 bytes.

    Of 128 x 128 elements to be transposed it has 64, 16 words of 4 rows, and the maxima of 8 warps beside the tile.
    """
    rows = plan("quantize_d128")
    assert (rows.expectation.kernels, rows.expectation.smem_bytes, rows.expectation.max_registers) == (2, 32, 64)
    assert rows.expectation.sass.global_stores == {"STG.64": 4, "STG.32": 2}
    assert rows.expectation.sass.shared_stores == {"STS.32": 1}
    assert (rows.expectation.sass.min_maxima, rows.cta.registers) == (32, 32 + 32)
    assert rows.expectation.sass.max_comparisons == 1
    columns = plan("quantize_v_d128").expectation
    assert (columns.kernels, columns.smem_bytes, columns.max_registers) == (2, 128 * 128 + 32, 128)
    assert columns.sass.global_stores == {"STG.128": 1, "STG.8": 16, "STG.32": 2}
    assert columns.sass.shared_stores == {"STS.32": 17} and columns.sass.min_maxima == 64
    permuted = plan("quantize_v_permuted_d128").expectation
    assert permuted.sass.global_stores == {"STG.128": 1, "STG.32": 2}  # of whole units only
    token = plan("quantize_rotate_token_d128")
    assert (token.expectation.kernels, token.expectation.smem_bytes) == (1, 0) and not token.storage
    assert token.expectation.sass.global_stores == {"STG.64": 8, "STG.32": 2}
    assert token.cta.registers == 64 + 16 + 16


@pytest.mark.parametrize("stem", STEMS)
def test_constants_are_those_of_the_plan(stem: str) -> None:
    values, spec = constants(tree(stem)), spec_of(stem)
    assert (values["LANES"], values["VECTOR"]) == (quantizing.lanes(spec), quantizing.VECTOR)
    assert values["VECTORS"] == quantizing.vectors(spec)
    assert values["ROWS_OF_THREAD"] == quantizing.rows_of_thread(spec)
    assert (values["HEAD_DIM"], values["ROWS"]) == (spec.problem.head_dim, spec.tile.rows)
    assert values["OF_THREAD"] * values["ROWS_OF_THREAD"] == quantizing.values_of_thread(spec)
    if spec.problem.scale == "head":
        assert (values["CTAS_PER_SM"], values["MOST_PARTS"]) == (spec.tile.per_sm, quantizing.MOST_PARTS)
    if spec.problem.transpose:
        assert (values["WORD"], values["UNIT"]) == (quantizing.WORD, quantizing.UNIT)
    if spec.problem.rotate:
        assert values["LANES"] * values["OF_THREAD"] == spec.problem.head_dim
        assert values["LANES"] * values["BLOCK"] == values["MMA_SHAPE"][2]
        assert values["ROWS_OF_THREAD"] % quantizing.ROWS_OF_MMA == 0


@pytest.mark.parametrize("stem", STEMS)
def test_arguments_are_those_of_the_operation(stem: str) -> None:
    launch = next(node for node in tree(stem).body if isinstance(node, ast.FunctionDef) and node.name == "launch")
    names = [argument.arg for argument in launch.args.args]
    operation, spec = operation_of(spec_of(stem)), spec_of(stem)
    assert names == [*(argument.name for argument in operation.arguments), "stream"]
    assert operation.output.name == "out" and operation.kernels == 1 + (spec.problem.scale == "head")
    seq = 33
    strides = operation.output.strides((2, seq, 3, spec.problem.head_dim))
    assert strides[1] == (1 if spec.problem.transpose else 3 * spec.problem.head_dim)
    assert not spec.problem.transpose or strides[3] == 48  # the next multiple of 16


@pytest.mark.parametrize("stem", STEMS)
def test_steps_stand_in_the_code_in_their_order(stem: str) -> None:
    functions = {node.name: node for node in tree(stem).body if isinstance(node, ast.FunctionDef)}

    def found(name: str, words: dict[str, str]) -> list[str]:
        lines = ast.unparse(functions[name]).splitlines()[1:]
        return [kind for line in lines for word, kind in words.items() if word in line]

    spec, schedule = spec_of(stem), schedule_of(spec_of(stem))
    steps = [each.kind for each in schedule.of("warps", "tile")]
    words = {"= load_rows(": "load", "= rotate(rX": "rotate", "scale_of(": "find_scale", "find_scale(": "find_scale"}
    words |= {"scale_rows(": "find_scale", "store_": "store"}
    inside = {"store_columns": {".to(OUT_DTYPE)": "round", "sTile[unit, ": "gather", "sync_threads": "sync"}}
    inside |= {"store_rows": {".to(OUT_DTYPE)": "round"}}
    last = f"store_{'columns' if spec.problem.transpose else 'rows'}"
    code = found("quantize_kernel", words)
    assert [*code[:-1], *found(last, inside[last]), code[-1]] == steps
    assert schedule.rings == () and schedule.role("warps").warps == spec.tile.threads // 32
