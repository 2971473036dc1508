"""The criteria of the CPU model, on modules in plain PyTorch: wide enough for what is right, and no wider.

Each wrong module is wrong by little: by one bit of P, one key, 2e-5 of LSE.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from rendering import changed
from torch_modules import Module, exact, nan_rows, online, past_the_end, to_bits, whole_tiles_only

from fa3gen.cpu.findings import Hazard, Kind, OutsideModel, Place
from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.schedule import FAST
from fa3gen.design.masks import reach
from fa3gen.spec.model import CausalMask, Mask, NoMask, OutputTensor, Spec, WindowMask
from fa3gen.verify import accuracy, inputs
from fa3gen.verify.inputs import Case, cpu_cases
from fa3gen.verify.on_cpu import CpuReport, verify_on_cpu
from fa3gen.verify.on_model import poisoned_allocations
from fa3gen.verify.reference import visible_keys

torch.set_num_threads(1)
MASKS = [NoMask(), CausalMask(), WindowMask(left=50, right=10)]
CAUSAL = CausalMask()


def spec_of(mask: Mask = CAUSAL, *, wgmma: bool = True, dtype: str = "bf16", lse: bool = True) -> Spec:
    """The spec of k4_2, where P is rounded to 16 bits, or of k2, where it is not, with a smaller ring."""
    base = changed("k4_2_d64" if wgmma else "k2_d64", outputs={"lse": lse}, problem={"head_dim": 64, "dtype": dtype})
    return base.spec.model_copy(update={"mask": mask})


def run(module: Module, spec: Spec, count: int = 1) -> CpuReport:
    return verify_on_cpu(module, spec, seed=7, count=count)


def p_rounded_to(bits: int) -> Callable[..., Any]:
    """Online softmax with P cut to so many significant bits (bf16 has 8), rounded to nearest."""

    def compute(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
        return online(q, k, v, scale, mask, round_p=lambda p: to_bits(p, bits))

    return compute


@pytest.mark.parametrize("p_factor", [1.0, 256.0])
def test_a_sink_that_outweighs_all_keys_may_leave_nothing(p_factor: float) -> None:
    """Where float32 has no factor that small, and only there."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, rows, 1, 8, generator=generator, dtype=torch.float64) for rows in (3, 5, 5))
    facts: dict[str, Any] = {"scale": 1.0, "mask": NoMask(), "p_dtype": torch.bfloat16, "out_dtype": torch.float32}
    lse = accuracy.expected(q, k, v, **facts).lse.max()
    for above, all_may_be_lost in ((20.0, False), (100.0, True)):
        found = accuracy.expected(q, k, v, **facts, p_factor=p_factor, sinks=(lse + above)[None])
        assert bool((found.out.abs() <= found.limit).all()) == all_may_be_lost
        assert bool((found.out.square() <= found.variance).all()) == all_may_be_lost


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_kernel_that_rounds_p_to_16_bits_passes(mask: Mask, dtype: str) -> None:
    report = run(Module(mask, online, dtype=verify_dtype(dtype)), spec_of(mask, dtype=dtype))
    assert report.failures == ()
    assert report.o_spread is not None and 0.5 < report.o_spread < 1.1  # the variance is what it says
    assert max(case.o_used or 0 for case in report.cases) > 0.4  # and the limits are no multiple of what is needed


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_kernel_that_keeps_p_in_float32_passes_its_narrower_limits_and_fills_them(mask: Mask) -> None:
    report = run(Module(mask, exact), spec_of(mask, wgmma=False))
    assert report.failures == ()
    assert report.o_spread is not None and 0.9 < report.o_spread < 1.1
    assert 0.97 < max(case.o_used or 0 for case in report.cases) <= 1


FLOAT32_O = {"o": OutputTensor(dtype="fp32")}


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_o_in_float32_is_off_by_the_rounding_of_p_alone(mask: Mask, dtype: str) -> None:
    spec = spec_of(mask, dtype=dtype).model_copy(update=FLOAT32_O)
    report = run(Module(mask, online, dtype=verify_dtype(dtype), out_dtype=torch.float32), spec)
    assert report.failures == ()
    assert report.o_spread is not None and 0.3 < report.o_spread < 1.1
    assert max(case.o_used or 0 for case in report.cases) > 0.4


def test_o_that_is_rounded_on_its_way_to_float32_is_seen() -> None:
    module = Module(CAUSAL, online, out_dtype=torch.float32, store=lambda out, o: out.copy_(o.bfloat16()))
    report = run(module, spec_of().model_copy(update=FLOAT32_O))
    assert any("O is rounded as planned" in failure for failure in report.failures), report.failures


def verify_dtype(name: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[name]


def truncates(out: torch.Tensor, result: torch.Tensor) -> None:
    """To bfloat16 by cutting bits off, as a move of the upper half would."""
    out.copy_((result.contiguous().view(torch.int32) & -65536).view(torch.float32))


def without_its_last_key(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
    """The last key is never seen, where there are others."""
    return online(q, k, v, scale, mask, hide_last=True)


def lse_off(by: float) -> Callable[..., Any]:
    def compute(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
        out, lse = online(q, k, v, scale, mask)
        return out, lse * (1 + by)

    return compute


def base_two(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
    out, lse = online(q, k, v, scale, mask)
    return out, lse / math.log(2)


def one_element_off(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
    """By 1 %, where its row is largest."""
    out, lse = online(q, k, v, scale, mask)
    row = out[0, -1, 0]
    row[row.abs().argmax()] *= 1.05
    return out, lse


WRONG: dict[str, tuple[Module, Spec, str]] = {
    "P with 7 bits": (Module(CAUSAL, p_rounded_to(7)), spec_of(), "O is rounded as planned"),
    "P of fp16 with 10 bits": (
        Module(CAUSAL, p_rounded_to(10), dtype=torch.float16),
        spec_of(dtype="fp16"),
        "O is rounded as planned",
    ),
    "P rounded where it should not be": (Module(CAUSAL, online), spec_of(wgmma=False), "O is off by"),
    "O truncated": (Module(CAUSAL, online, store=truncates), spec_of(), "O is rounded as planned"),
    "a key dropped": (Module(CAUSAL, without_its_last_key), spec_of(), "LSE is off by"),
    "a key dropped, no LSE": (Module(CAUSAL, without_its_last_key), spec_of(lse=False), "O is off by"),
    "one element": (Module(CAUSAL, one_element_off), spec_of(), "O is off by"),
    "LSE off by 2e-5": (Module(CAUSAL, lse_off(2e-5)), spec_of(), "LSE is off by"),
    "LSE in base 2": (Module(CAUSAL, base_two), spec_of(), "LSE is off by"),
    "NaN in rows without keys": (Module(CAUSAL, nan_rows), spec_of(), "O has NaN"),
    "tail rows unwritten": (Module(CAUSAL, online, store=whole_tiles_only), spec_of(), "O has NaN"),
    "writes past the end": (Module(CAUSAL, online, store=past_the_end), spec_of(), "wrote outside `out`"),
    "q changed": (Module(CAUSAL, online, before=lambda q, k, v: q.mul_(2)), spec_of(), "changed its input q"),
    "no rescale": (Module(CAUSAL, lambda *args: online(*args, rescale=False)), spec_of(), "O is off by"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_module_that_is_wrong_in_one_way_fails(what: str) -> None:
    module, spec, message = WRONG[what]
    report = run(module, spec)
    assert not report.passed
    assert any(message in failure for failure in report.failures), report.failures


def test_without_calls_the_cases_are_judged_and_nothing_else() -> None:
    module, spec, message = WRONG["P with 7 bits"]
    report = verify_on_cpu(module, spec, seed=7, count=1, calls=False)
    assert [check.name for check in report.checks] == [message] and not report.passed
    assert len(run(module, spec).checks) > 3


def test_lse_off_by_less_than_it_may_be_passes() -> None:
    assert run(Module(CAUSAL, lse_off(5e-6)), spec_of()).failures == ()


def test_an_lse_that_is_left_unwritten_is_nan() -> None:
    with poisoned_allocations():
        assert torch.empty(100).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


# -- schedules


def differs_by_schedule(module: Module) -> Callable[..., None]:
    def store(out: torch.Tensor, result: torch.Tensor) -> None:
        out.copy_(result)
        if module.cpu.settings.schedule != FAST:
            out[:, -1] = torch.nextafter(out[:, -1], torch.tensor(math.inf, dtype=out.dtype))

    return store


@pytest.mark.parametrize("name", ["counter", "flags"])
def test_scratch_that_is_not_at_zero_for_the_next_launch_fails(name: str) -> None:
    module = Module(CAUSAL, online)
    setattr(module.cpu, name, torch.zeros(3, dtype=torch.int32))
    assert run(module, spec_of()).failures == ()
    module.after = lambda out, lse: setattr(module.cpu, name, torch.tensor([0, 2, 1]))
    said = f"the launch left 2 words of the {name} that are not 0"
    assert all(said in failure for failure in run(module, spec_of()).failures[:5])


def test_other_bits_under_another_schedule_fail() -> None:
    module = Module(CAUSAL, online)
    module.store = differs_by_schedule(module)
    assert run(module, spec_of()).failures == ()
    failures = run(module, spec_of(), count=2).failures
    assert len(failures) == len(cpu_cases(spec_of()))
    assert failures[0] == (
        "ragged: by warp, random, late completion, seed 7: other bits than by warpgroup, in turn, late completion"
    )


def test_a_write_outside_under_another_schedule_fails() -> None:
    def store(out: torch.Tensor, result: torch.Tensor) -> None:
        (out.copy_ if module.cpu.settings.schedule == FAST else partial(past_the_end, out))(result)

    module = Module(CAUSAL, online)
    module.store = store
    assert run(module, spec_of()).failures == ()
    failures = run(module, spec_of(), count=2).failures
    assert (
        "ragged: by warp, random, late completion, seed 7: wrote outside `out`, or rows that are not used" in failures
    )


def raising(error: Exception) -> Module:
    def compute(*arguments: Any) -> Any:
        raise error

    return Module(CAUSAL, compute)


def test_a_hazard_fails_with_its_kind_place_and_schedule() -> None:
    place = Place(cta=(1, 0, 0), warps=(2,), ptx_line=12, text="bar.sync", source=("generated/x.py", 30))
    report = run(raising(Hazard(Kind.DEADLOCK, "no warp can go on:\n  a waits", place)), spec_of())
    assert report.cases[0].failures == (
        "by warpgroup, in turn, late completion: deadlock: no warp can go on: a waits at CTA (1, 0, 0), warp 2, "
        "PTX line 12: bar.sync, generated/x.py:30",
    )
    assert report.cases[0].o_used is None and report.o_spread is None


def test_a_kernel_outside_the_model_has_neither_passed_nor_failed() -> None:
    with pytest.raises(OutsideModel, match="no such instruction"):
        run(raising(OutsideModel("no such instruction")), spec_of())


# -- the report


def test_what_needs_a_gpu_is_listed_as_not_run() -> None:
    report = run(Module(CAUSAL, online), spec_of())
    assert [check.name for check in report.checks if check.passed is None] == [
        "runs on the current stream",
        "allocates only its outputs",
    ]
    assert report.as_dict()["executed_on"] == "CPU model of sm_90a" and "not a GPU result" in report.device


# -- cases and limits


@pytest.mark.parametrize(
    "stem", ["k1_d64", "k2_d64", "k3_3_d64", "k4_2_d64", "k4_2_window_d64_window200_70", "fwd_d64", "fwd_d192_causal"]
)
def test_the_cases_cover_what_they_must(stem: str) -> None:
    spec = changed(stem).spec
    cases = {case.name: case for case in cpu_cases(spec)}
    stages = getattr(spec.load, "kv_stages", 1)
    assert cases["wrap"].seq_k > 2 * stages * spec.tile.kv
    assert cases["few_keys"].seq_q - cases["few_keys"].seq_k >= spec.tile.q
    if stem.startswith("fwd"):  # persistent: some CTA takes a tile with a visible key, and one without
        case = cases["few_keys"]
        assert -(-case.seq_q // spec.tile.q) * case.heads_q * case.batch >= 2 * Settings().sms + 2
    assert cases["gqa"].heads_q > cases["gqa"].heads_kv > 1 and cases["mqa"].heads_kv == 1
    assert {case.layout for case in cases.values()} >= {"padded", "transposed", "packed", "expanded", "odd_strides"}
    assert all(case.why for case in cases.values())
    if isinstance(spec.mask, WindowMask):
        window = cases["window"]
        rows = torch.arange(window.seq_q)
        seen = visible_keys(reach(spec.mask), seq_q=window.seq_q, seq_k=window.seq_k, rows=rows)
        assert seen is not None
        assert (~seen[:, 0]).any() and (~seen[:, -1]).any()  # windows end on both sides
        assert (seen.sum(-1) == spec.mask.left + spec.mask.right + 1).any()  # and some fit as a whole


@pytest.mark.parametrize(
    ("heads_q", "heads_kv", "pack", "served"), [(4, 2, 1, 4), (4, 2, 4, 8), (8, 2, 4, 8), (6, 2, 2, 8), (1, 1, 8, 8)]
)
def test_cases_have_whole_packs_of_heads(heads_q: int, heads_kv: int, pack: int, served: int) -> None:
    assert inputs.served_heads(heads_q, heads_kv, pack) == served
    spec = changed("k5_d128", tile={"pack_heads": pack}).spec
    assert inputs.served(Case("x", "", 1, 1, 1, heads_q, heads_kv), spec).heads_q == served


def test_packed_rows_of_v_are_shorter_than_those_of_q() -> None:
    case = Case("packed", "", 1, 4, 4, 1, 1, layout="packed")
    made = inputs.make(case, head_dim=64, v_dim=32, dtype=torch.bfloat16, device=torch.device("cpu"), seed=1)
    assert (made.q.shape[-1], made.v.shape[-1], made.out.shape[-1]) == (64, 32, 32)
    assert torch.isfinite(made.v).all() and made.v.stride(1) == 3 * 64


def test_the_bounds_by_hand() -> None:
    """One query, two keys of equal score: p = 1/2 each, O their mean."""
    q, k = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 1, 64, dtype=torch.bfloat16)
    v = torch.tensor([1.0, 2.0], dtype=torch.bfloat16).view(1, 2, 1, 1).expand(1, 2, 1, 64)
    wanted = accuracy.expected(q, k, v, scale=None, mask=NoMask(), p_dtype=torch.bfloat16)
    assert wanted.out.unique().tolist() == [1.5]
    assert wanted.lse.item() == pytest.approx(math.log(2))
    float32 = 2**-24 * 32 * 1.5
    assert wanted.limit[0, 0, 0, 0].item() == pytest.approx(2**-8 + 2**-8 * 1.5 + float32, rel=1e-6)  # half an ulp + P
    assert wanted.variance[0, 0, 0, 0].item() == pytest.approx(2**-16 * (1 / 3 + 0.18 * (1 + 4) / 4), rel=1e-3)
    plain = accuracy.expected(q, k, v, scale=None, mask=NoMask(), p_dtype=None)
    assert plain.limit[0, 0, 0, 0].item() == pytest.approx(2**-8 + float32, rel=1e-6)


def test_lse_may_be_off_by_what_its_scores_cancel() -> None:
    """Two products of +-512 in a score of 0; a cap leaves of their rounding what its slope does."""
    q, v = torch.full((1, 1, 1, 64), 2.0**-5), torch.zeros(1, 1, 1, 64)
    q[..., 2:] = 0
    k = q.clone()
    k[..., :2] = torch.tensor([2.0**14, -(2.0**14)])

    def slack(**cap: float) -> float:
        return accuracy.expected(q, k, v, scale=1.0, mask=NoMask(), p_dtype=None, **cap).lse_slack.item()

    assert slack() == slack(softcap=30.0) == 2.0**-24 * 4 * 1024
    k[..., :2] = torch.tensor([2.0**15, -(2.0**14)])
    assert slack(softcap=30.0) < 2.0**-24 < slack()


def test_scores_of_ordinary_size_leave_the_criterion_of_lse_as_it_is() -> None:
    q, k, v = torch.randn(3, 1, 200, 1, 128, generator=torch.Generator().manual_seed(1))
    assert accuracy.expected(q, k, v, scale=None, mask=CAUSAL, p_dtype=None).lse_slack.max() < 3e-6


def test_a_row_without_keys_has_to_be_zero() -> None:
    case = Case("none", "", 1, 3, 1, 1, 1)
    made = inputs.make(case, head_dim=64, dtype=torch.bfloat16, device=torch.device("cpu"), seed=1)
    wanted = accuracy.expected(made.q, made.k, made.v, scale=None, mask=CAUSAL, p_dtype=torch.bfloat16)
    assert not wanted.limit[:, :2].any() and wanted.limit[:, 2].all()
    assert torch.isneginf(wanted.lse[..., :2]).all()
    error = torch.zeros_like(wanted.out)
    assert accuracy.used(error, wanted).max() == 0
    error[0, 0] = 1e-30
    assert torch.isposinf(accuracy.used(error, replace(wanted))[0, 0]).all()
