"""What quantisations are verified on, and what is found wrong: with made-up modules, and limits by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rendering import quantize_stems, variants

from fa3gen.cpu.kernel import Settings
from fa3gen.measure import beside_torch
from fa3gen.measure.beside_torch import torchs_call
from fa3gen.spec.model import Quantize
from fa3gen.verify import quantize_inputs, reference
from fa3gen.verify.inputs import permuted_keys
from fa3gen.verify.quantize_inputs import QuantizeCase, QuantizeInputs
from fa3gen.verify.quantize_on_cpu import CpuQuantizeRunner
from fa3gen.verify.quantize_on_gpu import Quantized, QuantizeRunner, _largest, compare, expected, of_elements

CPU = torch.device("cpu")
CASE = QuantizeCase("some", "", 2, 37, 4, 2)
BY_CALL = QuantizeCase("given", "", 2, 37, 4, 2, given=True)


def spec_of(stem: str) -> Quantize:
    spec = variants()[stem].spec
    assert isinstance(spec, Quantize)
    return spec


def right(spec: Quantize, x: torch.Tensor, *signs: torch.Tensor, out: torch.Tensor, **named: Any) -> Any:
    """In float64, but for descale, which is rounded to float32 before it is used."""
    y = reference.rotate(x, *signs) if signs else x.double()
    descale = named.get("descale")
    if descale is None:
        descale = (_largest(spec, y.abs(), named.get("heads_kv", x.shape[2])) / 448).clamp(min=2**-100).float()
    rounded = reference.round_e4m3(y / of_elements(spec, descale, x.shape)).to(out.dtype)
    return out.copy_(permuted_keys(rounded, fill=0.0) if spec.problem.permute_keys else rounded), descale


def run(quantize: Any, stem: str, case: QuantizeCase = CASE) -> tuple[str, ...]:
    """What is found wrong with a module whose entry point is this function; the same by both runners."""
    spec = spec_of(stem)
    if spec.problem.scale != "head":
        case = QuantizeCase(case.name, case.why, case.batch, case.seq, case.heads)
    module = SimpleNamespace(
        quantize=lambda *given, **named: quantize(spec, *given, **named), cpu=SimpleNamespace(settings=Settings())
    )
    found = tuple(QuantizeRunner(module, spec, CPU, seed=3).run_case(case).failures)
    on_cpu = CpuQuantizeRunner(module, spec, 3, 2).run_case(case).failures
    assert bool(found) == bool(on_cpu)
    return found


@pytest.mark.parametrize("stem", quantize_stems())
def test_the_float64_quantization_passes(stem: str) -> None:
    for case in quantize_inputs.cpu_cases(spec_of(stem)):
        spec = spec_of(stem)
        module = SimpleNamespace(quantize=lambda *given, spec=spec, **named: right(spec, *given, **named))
        assert QuantizeRunner(module, spec, CPU, seed=3).run_case(case).failures == (), case.name


def test_what_is_wrong_is_found() -> None:
    def truncated(spec: Quantize, x: torch.Tensor, *signs: torch.Tensor, out: torch.Tensor, **named: Any) -> Any:
        _, descale = right(spec, x, *signs, out=out, **named)
        y = (x.double() if not signs else reference.rotate(x, *signs)) / of_elements(spec, descale, x.shape)
        return out.copy_(reference.round_e4m3(y * (1 - 2**-5)).to(out.dtype)), descale

    def unrotated(spec: Quantize, x: torch.Tensor, *signs: torch.Tensor, out: torch.Tensor, **named: Any) -> Any:
        return right(spec, x, out=out, **named)

    def without_signs(spec: Quantize, x: torch.Tensor, *signs: torch.Tensor, out: torch.Tensor, **named: Any) -> Any:
        return right(spec, x, *(sign.abs() for sign in signs), out=out, **named)

    def of_each_head(spec: Quantize, x: torch.Tensor, *signs: torch.Tensor, out: torch.Tensor, **named: Any) -> Any:
        return right(spec, x, *signs, out=out)

    def largest_of_positive(
        spec: Quantize, x: torch.Tensor, *signs: torch.Tensor, out: torch.Tensor, **named: Any
    ) -> Any:
        _, descale = right(spec, x.clamp(min=0), *signs, out=out, **named)
        return right(spec, x, *signs, out=out, descale=descale)

    def to_240(spec: Quantize, x: torch.Tensor, *signs: torch.Tensor, out: torch.Tensor, **named: Any) -> Any:
        right(spec, x, *signs, out=out, **named)
        return out.copy_(out.float().clamp(-240, 240)), named.get("descale", right(spec, x, *signs, out=out)[1])

    def nothing_written(spec: Quantize, x: torch.Tensor, *signs: torch.Tensor, out: torch.Tensor, **named: Any) -> Any:
        return out, right(spec, x, *signs, out=out.clone(), **named)[1]

    def outside(spec: Quantize, x: torch.Tensor, *signs: torch.Tensor, out: torch.Tensor, **named: Any) -> Any:
        step = out.shape[1] if spec.problem.transpose else out.shape[3]
        out.as_strided((1,), (1,), out.storage_offset() + step).fill_(0)
        return right(spec, x, *signs, out=out, **named)

    def changes_input(spec: Quantize, x: torch.Tensor, *signs: torch.Tensor, out: torch.Tensor, **named: Any) -> Any:
        found = right(spec, x, *signs, out=out, **named)
        x[0] += 1
        return found

    def another(spec: Quantize, x: torch.Tensor, *signs: torch.Tensor, out: torch.Tensor, **named: Any) -> Any:
        return right(spec, x, *signs, out=out.clone(), **named)

    def in_order(spec: Quantize, x: torch.Tensor, *signs: torch.Tensor, out: torch.Tensor, **named: Any) -> Any:
        right(spec, x, *signs, out=out, **named)
        rows, behind = quantize_inputs.rows_in_order(spec, out.float(), x.shape[1])
        return (
            out.copy_(torch.cat([rows, behind], 1).to(out.dtype)),
            right(spec, x, *signs, out=out.clone(), **named)[1],
        )

    def filled_up(spec: Quantize, x: torch.Tensor, *signs: torch.Tensor, out: torch.Tensor, **named: Any) -> Any:
        _, descale = right(spec, x, *signs, out=out, **named)
        out[:, -1] = out[:, 0]  # the last position of a unit is that of its last key, and there are 37
        return out, descale

    for wrong, stem, case, said in (
        (in_order, "quantize_v_permuted_d64", CASE, "out is wrong in"),
        (filled_up, "quantize_v_permuted_d64", CASE, "out has numbers other than 0 behind the last row, such as"),
        (truncated, "quantize_d128", CASE, "out is wrong in"),
        (unrotated, "quantize_rotate_d64", CASE, "descale is off by up to"),
        (unrotated, "quantize_rotate_d64", BY_CALL, "out is wrong in"),
        (without_signs, "quantize_rotate_token_d128", CASE, "out is wrong in"),
        (of_each_head, "quantize_v_d64", CASE, "descale is (2, 4), and has to be (2, 2)"),
        (largest_of_positive, "quantize_d64", CASE, "descale is off by up to"),
        (to_240, "quantize_d64", BY_CALL, "out is wrong in"),
        (nothing_written, "quantize_v_d128", CASE, "out is wrong in 37888 of 37888 elements"),
        (outside, "quantize_d128", CASE, "wrote outside `out`"),
        (outside, "quantize_v_d128", CASE, "wrote outside `out`"),
        (changes_input, "quantize_d128", CASE, "changed its input x"),
        (another, "quantize_d128", CASE, "the tensor returned is not the `out` that was given"),
    ):
        found = run(wrong, stem, case)
        assert found and said in "; ".join(found), (wrong.__name__, found)


def made_of(x: torch.Tensor, **named: Any) -> QuantizeInputs:
    given = {"x": x, "signs": torch.ones(x.shape[-1])}
    return QuantizeInputs(given, named, x, x)


def test_limits_by_hand() -> None:
    """64 ones: their rotation is 8 and zeros, each off by (6 + 2) 64 / 8 = 64 u; descale by (64 + 16) u / 448."""
    spec, u = spec_of("quantize_rotate_d64"), 2.0**-24
    wanted = expected(spec, made_of(torch.ones(1, 1, 1, 64)))
    assert wanted.y.flatten().tolist() == [8.0] + [0.0] * 63 and wanted.e.unique().tolist() == [64 * u]
    assert wanted.descale.item() == 8 / 448 and wanted.descale_limit.item() == pytest.approx(80 * u / 448, rel=1e-12)
    given = expected(spec, made_of(torch.ones(1, 1, 1, 64), descale=torch.tensor([[0.5]])))
    assert given.descale.item() == 0.5 and given.descale_limit.item() == 0


def test_ties_are_held_to_even_where_nothing_is_rounded_before() -> None:
    """17 and 19 lie between 16, 18 and 20, of which 16 and 20 are even. By a third, a tie may go either way."""
    spec = spec_of("quantize_d64")
    x = torch.tensor([17.0, 19.0] * 32).view(1, 1, 1, 64)

    def wrong(values: list[float], factor: float) -> tuple[str, ...]:
        descale = torch.tensor([[factor]])
        found = Quantized(torch.tensor(values * 32).view(x.shape).to(torch.float8_e4m3fn), descale)
        return compare(spec, found, expected(spec, made_of(x * factor, descale=descale))).wrong

    assert wrong([16.0, 20.0], 0.25) == () and wrong([18.0, 20.0], 0.25) and wrong([16.0, 18.0], 0.25)
    assert wrong([16.0, 20.0], 1 / 3) == wrong([18.0, 18.0], 1 / 3) == ()


def test_how_much_of_a_rounding_is_used() -> None:
    """16.5 rounded to 16 is off by a half of what may be; 1000 becomes 448, as it has to; NaN says nothing."""
    spec, descale = spec_of("quantize_d64"), torch.ones(1, 1)

    def used(value: float, given: float) -> float | None:
        x = torch.full((1, 1, 1, 64), value)
        found = Quantized(torch.full(x.shape, given).to(torch.float8_e4m3fn), descale)
        return compare(spec, found, expected(spec, made_of(x, descale=descale))).used

    assert used(16.5, 16.0) == 0.5 and used(17.0, 16.0) == 1.0 and used(1000.0, 448.0) == 0.0
    assert used(16.5, 18.0) == 1.5 and used(16.5, math.nan) is None


def test_the_references_e4m3_is_torchs() -> None:
    """On every number of bfloat16 up to 448, beyond which torch gives NaN: cut off there, as the hardware does."""
    numbers = torch.arange(2**16).to(torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()]
    torchs = numbers.float().clamp(-448, 448).to(torch.float8_e4m3fn).double()
    assert reference.round_e4m3(numbers).equal(torchs)


def test_the_references_rotation() -> None:
    """H H^T = size, H is symmetric; a rotation keeps norms and products."""
    for size in (2, 64, 256):
        h = reference.hadamard(size)
        assert (h @ h.t()).equal(size * torch.eye(size, dtype=torch.float64)) and h.equal(h.t())
    assert reference.hadamard(4).tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    x, signs = torch.randn(2, 3, 128), torch.randint(0, 2, (128,)) * 2.0 - 1
    y = reference.rotate(x, signs)
    torch.testing.assert_close(y[0] @ y[1].t(), x[0].double() @ x[1].double().t(), rtol=1e-12, atol=1e-12)
    assert not y.allclose(x.double(), atol=0.1)


@pytest.mark.parametrize(
    "stem",
    ["quantize_d64", "quantize_rotate_d128", "quantize_v_d64", "quantize_v_permuted_d64", "quantize_rotate_block_d128"],
)
def test_what_it_is_timed_beside_quantizes(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes are those of x and of the output, each once; torch's operators give the same but for their roundings."""
    monkeypatch.setattr(beside_torch, "QUANTIZED", ((2, 256, 2),))
    spec = spec_of(stem)
    (make,) = beside_torch.problems(spec, CPU)
    problem, d = make(), spec.problem.head_dim
    assert problem.name == f"2 x 256 x 2 x {d}"
    assert problem.amount * 1e9 == pytest.approx(2 * 256 * 2 * d * 3)
    name, call = torchs_call(spec, problem)
    descale = call()
    assert name == "abs, amax, div, copy_"
    x, *signs = problem.given
    y = reference.rotate(x, *signs) if signs else x.double()
    assert problem.out.stride() == ((d * 512, 1, d * 256, 256) if spec.problem.transpose else x.stride())
    again = problem.out.double() * descale.double()
    assert (again - y).norm() < 0.05 * y.norm()
    assert math.isclose(problem.out.double().abs().amax().item(), 448)
