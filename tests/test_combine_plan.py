"""The plan of a merge: numbers by hand, what its code has to show, and the schedule against the code."""

from __future__ import annotations

import ast

import pytest
from rendering import combine_stems, constants, plans, tree, variants

from fa3gen.design import combining
from fa3gen.design.operation import operation_of
from fa3gen.design.schedule import schedule_of
from fa3gen.generate.combining import CombinePlan
from fa3gen.spec.model import Combine

STEMS = combine_stems()


def plan(stem: str) -> CombinePlan:
    found = plans()[stem]
    assert isinstance(found, CombinePlan)
    return found


def spec_of(stem: str) -> Combine:
    spec = variants()[stem].spec
    assert isinstance(spec, Combine)
    return spec


def test_modules() -> None:
    assert STEMS == ("combine_bf16", "combine_fp16", "combine_fp32")


def test_numbers_by_hand() -> None:
    """256 threads: 256 x 8 x 4 bytes of sums, 2 x 256 x 4 beside them, up to a multiple of 1024.

    Two parts at once have 2 LSE, and one maximum more is taken of shares. 65,536 registers / (4 x 256) are 64.
    """
    for stem, store in {"combine_fp32": "STG.128", "combine_bf16": "STG.64", "combine_fp16": "STG.64"}.items():
        expected = plan(stem).expectation
        assert (expected.smem_bytes, expected.max_registers, expected.kernels) == (10240, 64, 1)
        assert expected.sass.global_stores == {store: 2, "STG.32": 1}
        assert expected.sass.shared_stores == {"STS.128": 2, "STS.32": 2}
        assert (expected.sass.min_maxima, expected.sass.max_comparisons) == (3, 5)
        assert plan(stem).parts.side_by_side == 8 and plan(stem).cta.registers == 64


@pytest.mark.parametrize("stem", STEMS)
def test_constants_are_those_of_the_plan(stem: str) -> None:
    values, spec = constants(tree(stem)), spec_of(stem)
    assert (values["VECTOR"], values["HALVES"], values["COLUMNS"]) == (combining.VECTOR, combining.HALVES, 8)
    assert (values["THREADS"], values["CTAS_PER_SM"]) == (spec.cta.threads, spec.cta.per_sm)
    assert (values["PARTS_AT_ONCE"], values["MOST_SHARES"]) == (spec.parts.at_once, spec.parts.shares)
    sums, *_ = plan(stem).cta.regions
    assert sums.bytes == values["THREADS"] * values["COLUMNS"] * 4


@pytest.mark.parametrize("stem", STEMS)
def test_arguments_are_those_of_the_operation(stem: str) -> None:
    launch = next(node for node in tree(stem).body if isinstance(node, ast.FunctionDef) and node.name == "launch")
    names = [argument.arg for argument in launch.args.args]
    assert names == [*(argument.name for argument in operation_of(spec_of(stem)).arguments), "stream"]
    out = operation_of(spec_of(stem)).output
    assert out.name == "out" and out.vector == combining.VECTOR


@pytest.mark.parametrize("stem", STEMS)
def test_steps_stand_in_the_code_in_their_order(stem: str) -> None:
    functions = {node.name: node for node in tree(stem).body if isinstance(node, ast.FunctionDef)}

    def found(name: str, words: dict[str, str]) -> list[str]:
        lines = ast.unparse(functions[name]).splitlines()[1:]
        return [kind for line in lines for word, kind in words.items() if word in line]

    schedule, who = schedule_of(spec_of(stem)), "warps"
    step = [each.kind for each in schedule.of(who, "step")]
    words = {"autovec_copy(gVector": "load", "total *= rescale": "rescale", "total += weight": "add_part"}
    assert found("add_up_share", words) == step == ["load", "rescale", "add_part"]
    last = [each.kind for each in schedule.of(who, "exit")]
    words = {"autovec_copy(sum_O": "gather", "sync_threads": "sync", "= add_up_shares(": "add_part"}
    assert found("combine_kernel", words | {"autovec_copy(rO": "store"}) == last
    assert schedule.rings == () and schedule.role(who).warps == spec_of(stem).cta.threads // 32
