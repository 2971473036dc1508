"""What merges are verified on, and what is found wrong: with made-up modules, and limits by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rendering import combine_stems, variants

from fa3gen.cpu.kernel import Settings
from fa3gen.measure import beside_torch
from fa3gen.measure.beside_torch import torchs_call
from fa3gen.spec.model import Combine
from fa3gen.verify import combine_inputs, reference
from fa3gen.verify.combine_inputs import CombineCase, CombineInputs
from fa3gen.verify.combine_on_cpu import CpuCombineRunner
from fa3gen.verify.combine_on_gpu import CombineRunner, expected

CPU = torch.device("cpu")
CASE = CombineCase("some", "", 5, 2, 3, 4, 64, without=3, rows_without=7)


def spec_of(stem: str = "combine_fp32") -> Combine:
    spec = variants()[stem].spec
    assert isinstance(spec, Combine)
    return spec


def right(values: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor) -> Any:
    found = reference.combine(values.double(), lses.double())
    return out.copy_(found.out), found.lse.float()


def run(combine: Any, stem: str = "combine_fp32", case: CombineCase = CASE) -> tuple[str, ...]:
    """What is found wrong with a module whose entry point is this function; the same by both runners."""
    module = SimpleNamespace(combine=combine, cpu=SimpleNamespace(settings=Settings()))
    found = tuple(CombineRunner(module, spec_of(stem), CPU, seed=3).run_case(case).failures)
    on_cpu = CpuCombineRunner(module, spec_of(stem), 3, 2).run_case(case).failures
    assert bool(found) == bool(on_cpu)
    return found


@pytest.mark.parametrize("stem", combine_stems())
def test_the_float64_merge_passes(stem: str) -> None:
    for case in combine_inputs.cpu_cases(spec_of(stem)):
        assert run(right, stem, case) == ()


def in_float32(values: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = reference.combine(values, lses)
    return found.out, found.lse


def test_what_is_wrong_is_found() -> None:
    def missing_part(values: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor) -> Any:
        return right(values[:-1], lses[:-1], out=out)

    def unweighted(values: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor) -> Any:
        _, lse = right(values, lses, out=out)
        return out.copy_(values.nan_to_num(0).mean(0)), lse

    def of_other_base(values: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor) -> Any:
        right(values, lses * math.log(2), out=out)
        return out, right(values, lses, out=torch.empty_like(out))[1]

    def no_guard(values: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor) -> Any:
        lse = torch.logsumexp(lses, 0)
        return out.copy_((torch.exp(lses - lse)[..., None] * values.nan_to_num(0)).sum(0)), lse

    def anything_of_no_key(values: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor) -> Any:
        found = torch.exp(lses - torch.logsumexp(lses, 0).nan_to_num(neginf=0.0))[..., None] * values
        return out.copy_(found.sum(0)), right(values, lses, out=torch.empty_like(out))[1]

    def lse_off(values: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor) -> Any:
        return out, right(values, lses, out=out)[1] * (1 + 1e-4)

    def lse_of_nothing(values: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor) -> Any:
        return out, right(values, lses, out=out)[1].nan_to_num(neginf=-1e30)

    def outside(values: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor) -> Any:
        out.as_strided((1,), (1,), out.storage_offset() + out.shape[-1]).fill_(0)
        return right(values, lses, out=out)

    def changes_input(values: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor) -> Any:
        found = right(values, lses, out=out)
        lses[0] += 1
        return found

    def another(values: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor) -> Any:
        return right(values, lses, out=out.clone())

    for wrong, said in (
        (missing_part, "O is off by"),
        (unweighted, "O is off by"),
        (of_other_base, "O is off by"),
        (no_guard, "O has NaN or infinity in"),
        (anything_of_no_key, "O has NaN or infinity in"),
        (lse_off, "LSE is off by up to"),
        (lse_of_nothing, "LSE is -inf in 0 rows, and has to be in 4"),
        (outside, "wrote outside `out`"),
        (changes_input, "changed its input lse_partial"),
        (another, "the tensor returned is not the `out` that was given"),
    ):
        found = run(wrong)
        assert found and said in "; ".join(found), (wrong.__name__, found)


def test_limits_by_hand() -> None:
    """Two parts of 3 and 1 with LSE 0: O = 2, of which 2 steps and 2 parts: (10 + 2 + 8) (2 + 2) 2^-24, no B, no C."""
    values = torch.tensor([3.0, 1.0]).view(2, 1, 1, 1, 1)
    made = CombineInputs({"out_partial": values, "lse_partial": torch.zeros(2, 1, 1, 1)}, values[0], values[0])
    wanted = expected(spec_of(), made)
    assert wanted.out.item() == 2.0 and wanted.lse.item() == pytest.approx(math.log(2), rel=1e-15)
    assert wanted.out_limit.item() == pytest.approx(80 * 2.0**-24, rel=1e-12)
    assert wanted.lse_limit.item() == pytest.approx((10 + 2 + 16 + 2 * math.log(2)) * 2.0**-24, rel=1e-12)
    # Half a unit of bfloat16 in [2, 4) is 2^-7.
    assert expected(spec_of("combine_bf16"), made).out_limit.item() == pytest.approx(2.0**-7 + 80 * 2.0**-24)


def test_pytorchs_own_merge_keeps_the_limits() -> None:
    def torchs(values: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor) -> Any:
        merged, lse = in_float32(values, lses)
        return out.copy_(merged), lse

    for case in combine_inputs.cpu_cases(spec_of()):
        assert run(torchs, case=case) == ()


def test_what_it_is_timed_beside_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """O of torch's operators; bytes are those of parts, O and both LSE."""
    monkeypatch.setattr(beside_torch, "MERGED", ((2, 3, 4, 8),))
    spec = spec_of("combine_bf16")
    for make, parts in zip(beside_torch.problems(spec, CPU), beside_torch.PARTS, strict=True):
        problem = make()
        assert problem.name == f"{parts} parts of 2 x 3 x 4 x 8"
        assert problem.amount * 1e9 == pytest.approx(parts * 24 * (8 * 4 + 4) + 24 * (8 * 2 + 4))
        name, call = torchs_call(spec, problem)
        lse = call()
        wanted = reference.combine(*(x.double() for x in problem.given))
        assert name == "logsumexp, exp, mul, sum"
        torch.testing.assert_close(problem.out.double(), wanted.out, rtol=2**-8, atol=1e-5)
        torch.testing.assert_close(lse.double(), wanted.lse, rtol=1e-6, atol=1e-6)
