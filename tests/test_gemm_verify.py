"""What GEMM modules are verified on, and what is found wrong: with a made-up module, and limits by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rendering import CHECKOUT, gemm_stems, variants

from fa3gen.compile.loading import load_file
from fa3gen.spec.model import Gemm
from fa3gen.verify import gemm_inputs
from fa3gen.verify.gemm_inputs import GemmCase
from fa3gen.verify.gemm_on_gpu import GemmRunner, compare, cut_off, expected, wrote_outside

CPU = torch.device("cpu")
SMS_OF_H200 = 132


def spec_of(stem: str) -> Gemm:
    spec = variants()[stem].spec
    assert isinstance(spec, Gemm)
    return spec


def run(stem: str, case: GemmCase, matmul: Any) -> tuple[str, ...]:
    """What is found wrong with a module whose entry point is this function."""
    runner = GemmRunner(SimpleNamespace(matmul=matmul), spec_of(stem), CPU, seed=3)
    return tuple(runner.run_case(case).failures)


def right(a: torch.Tensor, b: torch.Tensor, *c: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    product = a.double() @ b.double() + (c[0].double() if c else 0)
    return out.copy_(product)


CASE = GemmCase("some", "", 40, 30, 20)


@pytest.mark.parametrize("stem", gemm_stems())
def test_the_float64_product_passes(stem: str) -> None:
    for case in (CASE, GemmCase("one", "", 1, 1, 1), GemmCase("exact", "", 9, 17, 33, "integers", "row")):
        assert run(stem, case, right) == ()


def test_what_is_wrong_is_found() -> None:
    def one_element(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        right(a, b, out=out)[3, 5] *= 1.01
        return out

    def unwritten(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        out[:-1] = (a.double() @ b.double())[:-1]
        return out

    def outside(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        out.as_strided((41, 30), out.stride())[40] = 0
        return right(a, b, out=out)

    def inputs_changed(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        right(a, b, out=out)
        b[0, 0] = 7
        return out

    def another(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return right(a, b, out=out).clone()

    (found,) = run("g3", CASE, one_element)
    assert "D is off by" in found and "at row 3, column 5; 1 of 1200 are" in found
    (found,) = run("g3", CASE, unwritten)
    assert found == "D has NaN or infinity in 30 of 1200 elements (written nowhere, or computed so)"
    assert run("g3", CASE, outside) == ("wrote outside `out`",)
    assert "changed its input b" in run("g3", CASE, inputs_changed)
    assert run("g3", CASE, another) == ("raised ValueError: the tensor returned is not the `out` that was given",)


def test_limits_by_hand() -> None:
    """A sum of 3 x 1 x 2 = 6: half a unit in the last of 8 bits of a number in [4, 8) is 2^-6; S is 6."""
    spec = spec_of("g3")
    made = gemm_inputs.make(spec, GemmCase("hand", "", 1, 1, 3), device=CPU, seed=1)
    made.given["a"].fill_(1.0)
    made.given["b"].fill_(-2.0)
    wanted = expected(spec, made)
    # One WGMMA of depth 16 counts as 17 roundings of 2^-23 each.
    e = 17 * 2.0**-23 * 6
    assert wanted.out.item() == -6 and wanted.limit.item() == pytest.approx(e + 2.0**-6, rel=1e-12)
    assert expected(spec, made, exact=True).limit.item() == 2.0**-6
    # Float32 with C: no rounding at last, one more for C, which counts in S.
    spec = spec_of("g3_fp32_add")
    made = gemm_inputs.make(spec, GemmCase("hand", "", 1, 1, 3), device=CPU, seed=1)
    made.given["a"].fill_(1.0)
    made.given["b"].fill_(-2.0)
    made.given["c"].fill_(4.0)
    wanted = expected(spec, made)
    assert wanted.out.item() == -2 and wanted.limit.item() == pytest.approx(18 * 2.0**-23 * 10, rel=1e-12)
    # Scalar products round once for each multiply-add.
    assert expected(spec_of("g1"), made_for_g1()).limit.item() == pytest.approx(3 * 2.0**-23 * 6 + 2.0**-6, rel=1e-12)


def test_limits_of_8_bits_follow_the_sum() -> None:
    """Each instruction cuts off its products, the sum so far and the new one, 13 bits below the largest of them."""
    made = gemm_inputs.make(spec_of("g3_fp8"), GemmCase("hand", "", 1, 1, 3), device=CPU, seed=1)
    made.given["a"].fill_(1.0)
    made.given["b"].fill_(-2.0)
    lost = 5 * 2.0**-13 * 6  # of three products, the sum before and the sum, which is the largest: -6
    wanted = expected(spec_of("g3_fp8"), made)
    assert wanted.limit.item() == pytest.approx(lost + 33 * 2.0**-23 * 6 + 2.0**-6, rel=1e-12)
    assert expected(spec_of("g3_fp8"), made, exact=True).limit.item() == 2.0**-6
    # The sum of a step is at most 128, that of two steps of one level 256; two levels lose the same in each step.
    one, two = spec_of("g3_fp8"), spec_of("g3_fp8_two_levels")
    ones = torch.ones((1, 256), dtype=torch.float64)
    (step, _), (both, _), (apart, _) = (
        cut_off(spec, ones[:, :k], ones[:, :k].t()) for spec, k in ((one, 128), (one, 256), (two, 256))
    )
    assert apart.item() == 2 * step.item() and both.item() > 3 * step.item()
    assert step.item() == pytest.approx(34 * 2.0**-13 * (32 + 64 + 96 + 128), rel=0.02)


def test_a_missing_product_of_8_bits_is_found() -> None:
    """The limits of sums of 1024 are narrow enough to see that one instruction of 32 is missing."""

    def one_less(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return right(a[:, 32:], b[32:], out=out)

    for stem in ("g3_fp8", "g3_fp8_two_levels"):
        (found,) = run(stem, GemmCase("some", "", 40, 30, 1024), one_less)
        assert "D is off by" in found


def made_for_g1() -> gemm_inputs.GemmInputs:
    made = gemm_inputs.make(spec_of("g1"), GemmCase("hand", "", 1, 1, 3), device=CPU, seed=1)
    made.given["a"].fill_(1.0)
    made.given["b"].fill_(2.0)
    return made


@pytest.mark.parametrize("stem", gemm_stems())
def test_tensors_lie_in_nan_and_are_as_the_module_wants_them(stem: str) -> None:
    spec = spec_of(stem)
    made = gemm_inputs.make(spec, CASE, device=CPU, seed=1)
    for name, contiguous in (("a", spec.product.engine == "scalar"), ("b", spec.product.engine == "scalar")):
        x = made.given[name]
        assert 1 in x.stride() and x.data_ptr() % 16 == 0 and max(x.stride()) % 8 == 0
        assert not contiguous or x.stride(1) == 1
        around = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        assert int(torch.isnan(around).sum()) == around.numel() - x.numel()
    assert made.out.stride(1) == 1 and torch.isnan(made.out_storage).all() and wrote_outside(made) == ()


@pytest.mark.parametrize("stem", gemm_stems())
def test_the_cases_cover_what_they_must(stem: str) -> None:
    """On both sides: several tiles, bands, a last step cut short, a ring that wraps; more tiles than SMs on a GPU."""
    spec = spec_of(stem)
    tile, many = spec.tile, {case.name: case for case in gemm_inputs.gpu_cases(spec)}["many_tiles"]
    tiles = -(-many.m // tile.m) * -(-many.n // tile.n)
    assert tiles > SMS_OF_H200 and -(-many.m // tile.m) > tile.band
    for cases in (gemm_inputs.gpu_cases(spec), gemm_inputs.cpu_cases(spec)):
        assert len({case.name for case in cases}) == len(cases)
        assert any(case.m > tile.m and case.n > tile.n and case.k > tile.k and case.k % tile.k for case in cases)
        assert any(case.k > 2 * spec.load.stages * tile.k for case in cases)
        assert any(case.k < tile.k for case in cases)
        assert any(case.m > tile.band * tile.m for case in cases)
        assert {case.distribution for case in cases} == {"normal", "outlier", "integers"}


def test_compare_an_exact_zero() -> None:
    """A sum of nothing has no limit to spare, and zero is right."""
    spec = spec_of("g3")
    made = gemm_inputs.make(spec, GemmCase("hand", "", 2, 2, 3, "integers"), device=CPU, seed=1)
    made.given["a"].zero_()
    wanted = expected(spec, made, exact=True)
    assert compare(torch.zeros(2, 2, dtype=torch.bfloat16), wanted) == (0.0, ())


@pytest.mark.parametrize("stem", ["g1", "g2", "g3", "g3_fp32_add"])
def test_rows_that_end_within_16_bytes_are_stored_elsewhere(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200 a TMA store writes whole 16 bytes, past the end of a row: D lies where there is room for them."""
    module = load_file(CHECKOUT.module_path(stem), variety="whole_stores")
    spec = spec_of(stem)
    stored: list[torch.Tensor] = []

    def compiled(a: torch.Tensor, b: torch.Tensor, *others: Any) -> None:
        out = [each for each in others if isinstance(each, torch.Tensor)][-1]
        c = [each for each in others if isinstance(each, torch.Tensor)][:-1]
        stored.append(out)
        right(a, b, *c, out=out)

    monkeypatch.setattr(module, "compile_for_sm90a", lambda: compiled)
    monkeypatch.setattr(
        module, "empty", lambda shape, strides, dtype, gpu: torch.empty_strided(shape, strides, dtype=dtype)
    )
    for name in ("sm_count", "check_gpu"):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, lambda gpu: 132)
    for n in (16, 11, 1):
        made = gemm_inputs.make(spec, GemmCase("ends", "", 5, n, 3), device=CPU, seed=1)
        assert module.matmul(*made.given.values(), out=made.out) is made.out
        assert torch.isfinite(made.out).all() and wrote_outside(made) == ()
        fresh = module.matmul(*made.given.values())
        assert fresh.shape == (5, n) and torch.equal(fresh, made.out)
        given, own = stored[-2:]
        elsewhere = stem != "g1" and n != 16
        assert (given.data_ptr() != made.out.data_ptr()) == elsewhere
        for each in [own, *[given] * elsewhere]:
            whole = 16 // each.element_size()
            assert each.stride(0) % whole == 0 and each.stride(1) == 1
            if stem != "g1":
                assert each.untyped_storage().nbytes() >= 5 * each.stride(0) * each.element_size()
        if elsewhere:
            with pytest.raises(ValueError, match="out is"):
                module.matmul(*made.given.values(), out=made.out[:-1])
