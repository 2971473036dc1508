"""`fa3gen.load(stem, on="cpu")`: the committed module with CPU tensors, its settings, its errors."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rendering import CHECKOUT, ROOT, source, variants

import fa3gen
from fa3gen.base.errors import UserError
from fa3gen.compile import toolchain
from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.module import load_on_cpu
from fa3gen.cpu.schedule import Schedule
from fa3gen.design.masks import reach
from fa3gen.spec.model import NoMask
from fa3gen.verify import reference
from fa3gen.verify.inputs import Case
from fa3gen.verify.on_cpu import verify_on_cpu

STEM = "k4_2_d64"


@pytest.fixture(scope="module")
def module() -> Any:
    return load_on_cpu(CHECKOUT.module_path(STEM))


def tensors(seq_q: int = 5, seq_k: int = 7, heads: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, seq_q, heads, 64), (1, seq_k, heads, 64), (1, seq_k, heads, 64)]
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def test_attention_takes_cpu_tensors(module: Any) -> None:
    q, k, v = tensors()
    expected = reference.attention(q, k, v, reach=reach(NoMask()))
    out, lse = module.attention(q, k, v, return_lse=True)
    assert out.device.type == lse.device.type == "cpu"
    assert (out.double() - expected.out).abs().max() < 0.02
    assert (lse - expected.lse).abs().max() < 1e-5
    assert module.cpu.kernel.instructions > 0


def test_load_gives_a_module_of_its_own_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    on_gpu = fa3gen.load(STEM)
    first, second = fa3gen.load(STEM, on="cpu"), fa3gen.load(STEM, on="cpu")
    assert first is not second and first is not on_gpu
    assert fa3gen.load(STEM) is on_gpu and fa3gen.load(STEM, on="gpu") is on_gpu
    assert not hasattr(on_gpu, "cpu") and sys.modules[on_gpu.__name__] is on_gpu
    with pytest.raises(ValueError, match="q is not on a GPU; it needs to be on a Hopper GPU"):
        on_gpu.attention(*tensors())


def test_settings_may_be_changed_between_calls(module: Any) -> None:
    q, k, v = tensors(3, 70)
    plain = module.attention(q, k, v)
    everything = module.cpu.kernel.instructions
    module.cpu.settings.schedule = Schedule("warp", "random", seed=1)
    assert torch.equal(module.attention(q, k, v), plain)
    module.cpu.settings = Settings(ctas=[])
    module.attention(q, k, v)
    assert everything > 0 and module.cpu.kernel.instructions == 0
    module.cpu.settings = Settings()


@pytest.mark.parametrize("on", ["cuda", "", None])
def test_another_place_to_run_on_is_refused(on: Any) -> None:
    with pytest.raises(UserError, match="it needs to be 'gpu' \\(the default\\) or 'cpu'$"):
        fa3gen.load(STEM, on=on)


def test_tensors_elsewhere_are_refused(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    for wrong, name in (((q.to("meta"), k, v), "q"), ((q, k.to("meta"), v), "k")):
        with pytest.raises(UserError, match=rf"^{name} is on meta; .*pass {name}\.cpu\(\), "):
            module.attention(*wrong)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 1)
    with pytest.raises(ValueError) as caught:
        module.attention(q, k, v)
    assert isinstance(caught.value, UserError)
    assert str(caught.value) == (
        "q is on GPU 1, and this module was loaded with on='cpu'; pass q.cpu(), or load the module without `on` to run "
        "it on a GPU"
    )


@pytest.mark.parametrize(("version", "said"), [(None, "install it with"), ("4.9.0", "4.9.0 is installed; the CPU")])
def test_a_dsl_that_is_missing_or_not_supported_is_an_error(
    monkeypatch: pytest.MonkeyPatch, version: str | None, said: str
) -> None:
    monkeypatch.setattr(toolchain, "installed_version", lambda package: version)
    with pytest.raises(UserError, match=said):
        load_on_cpu(CHECKOUT.module_path(STEM))


def test_options_of_the_compiler_are_refused(module: Any) -> None:
    with pytest.raises(UserError, match="'--generate-line-info' have no meaning on the CPU model"):
        module.compile_for_sm90a("--generate-line-info")


def test_every_product_is_found_in_the_source(module: Any) -> None:
    (name, kernel), *_ = module.cpu.kernel.kernels.items()
    lines = source(STEM).splitlines()
    products = [one.index for one in kernel.instructions if one.mnemonic.startswith("wgmma.mma_async")]
    places = [module.cpu.locate(name, index) for index in products]
    assert len(places) == 8 and {file for file, _ in places} == {f"generated/{STEM}.py"}
    assert {lines[line - 1].split("(")[0].split()[-1] for _, line in places} == {"cute.gemm"}
    assert module.cpu.locate(name, len(kernel.instructions)) is None


# -- a module that is wrong

DROPPED = "        warpgroup.wait_group(0)  # the softmax reads S now: no group stays in flight\n"


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The committed module without the wait for S = Q K^T."""
    text = source(STEM)
    assert text.count(DROPPED) == 1
    folder = tmp_path_factory.mktemp("workspace")
    for name in ("specs", "generated"):
        (folder / name).mkdir()
    path = folder / "generated" / "broken.py"
    path.write_text(text.replace(DROPPED, ""))
    return load_on_cpu(path)


def test_a_hazard_names_the_line_of_the_generated_file(broken: Any) -> None:
    with pytest.raises(Hazard) as caught:
        broken.attention(*tensors())
    assert caught.value.kind is Kind.REGISTER_IN_FLIGHT
    place = caught.value.place
    assert place.source is not None and place.source[0] == "generated/broken.py"
    before = Path(broken.__file__).read_text().splitlines()[: place.source[1]]
    function = next(line for line in reversed(before) if line.startswith("def "))
    assert function.startswith(("def mask_scores(", "def softmax_step("))  # the first to read S
    assert f"generated/broken.py:{place.source[1]}" in str(caught.value)


def test_verify_reports_the_hazard_as_a_failure(broken: Any) -> None:
    report = verify_on_cpu(broken, variants()[STEM].spec, cases=[Case("small", "", 1, 5, 7, 1, 1)], seed=1)
    assert not report.passed
    assert (
        "register of an unfinished wgmma touched" in report.failures[0] and "generated/broken.py:" in report.failures[0]
    )
