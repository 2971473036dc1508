"""verify_module against modules written in plain PyTorch: a right one, and many that are wrong in one way each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rendering import attention_stems, plans, variants
from torch_modules import (
    Module,
    check_arguments,
    check_scores,
    exact,
    nan_rows,
    online,
    past_the_end,
    to_bits,
    whole_tiles_only,
)

from fa3gen.design.masks import of_call, reach
from fa3gen.design.operation import operation_of
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.spec.model import CausalMask, Forward, Mask, NoMask, Spec, WindowMask
from fa3gen.verify import attention_on_gpu, inputs, reference
from fa3gen.verify.inputs import CASES, Case
from fa3gen.verify.on_gpu import Report, verify_module
from fa3gen.verify.runner import ModuleRunner, blamed, half_ulp

CPU = torch.device("cpu")
torch.set_num_threads(1)  # the workers of xdist share the cores
NOT_LONG = tuple(case for case in CASES if case.name != "long")
FEW = tuple(case for case in CASES if case.name not in ("random", "long", "wrap", "outlier"))


def spec_of(mask: Mask, dtype: str = "bf16", head_dim: int = 64, o_dtype: str | None = None) -> Spec:
    return Forward.model_validate(
        {
            "problem": {"head_dim": head_dim, "dtype": dtype},
            "mask": mask,
            "o": {"dtype": o_dtype},
            "tile": {"q": 64, "kv": 64, "threads": 128},
            "load": {"engine": "sync"},
            "qk": {"engine": "scalar"},
            "pv": {"engine": "scalar"},
            "handoff": {"through": "global_f32"},
        }
    )


def run(module: Module, cases: tuple[Case, ...] = FEW, dtype: str = "bf16") -> Report:
    return verify_module(module, spec_of(module.mask, dtype), CPU, cases=cases, seed=7)


@pytest.mark.parametrize("mask", [NoMask(), CausalMask(), WindowMask(left=50, right=10)], ids=str)
def test_a_right_module_passes_everything_that_can_be_tried_on_a_cpu(mask: Mask) -> None:
    report = run(Module(mask), NOT_LONG)
    assert report.failures == ()
    assert report.passed
    assert [check.name for check in report.checks if check.passed is None] == [
        "runs on the current stream",
        "allocates only its outputs",
    ]


class OfTheCall(Module):
    """A module whose calls give the window; `taken` is what it makes of that, before it computes."""

    taken: Callable[[Any], Any] = staticmethod(lambda window: window)

    def attention(self, *given: Any, window: Any = (-1, -1), **options: Any) -> Any:
        if len(window) != 2 or min(window) < -1:
            raise ValueError(f"window is {window}; it needs to be (left, right)")
        self.mask = of_call(WindowMask(), self.taken(window))
        return super().attention(*given, **options)


def run_given(taken: Callable[[Any], Any]) -> Report:
    module = OfTheCall(NoMask())
    module.taken = taken
    spec = variants()["k4_2_any_window"].spec
    cases = tuple(case for case in inputs.gpu_cases(spec) if case.name.removesuffix("_other_window") in set(FEW_NAMES))
    return verify_module(module, spec, CPU, cases=cases, seed=7)


FEW_NAMES = [case.name for case in FEW]


def test_a_module_whose_calls_give_the_window_passes() -> None:
    report = run_given(lambda window: window)
    assert report.failures == ()
    assert any("window 200,70" in case.shape for case in report.cases)


@pytest.mark.parametrize(
    "taken",
    [
        lambda window: (512, 0),
        lambda window: (window[1], window[0]),
        lambda window: tuple(abs(keys) for keys in window),
        lambda window: (window[0] + (window[0] > 0), window[1]),
    ],
    ids=["always the same", "sides exchanged", "-1 taken for 1", "one key too many on the left"],
)
def test_a_module_that_takes_another_window_fails(taken: Callable[[Any], Any]) -> None:
    assert not run_given(taken).passed


def test_every_window_is_tried_on_every_kind_of_shape() -> None:
    cases = inputs.gpu_cases(variants()["fwd_d128_any_window"].spec)
    assert {case.window for case in cases} == set(inputs.WINDOWS) and len({case.name for case in cases}) == len(cases)
    assert all(len({case.window for case in cases if case.name.startswith(name)}) >= 2 for name in FEW_NAMES)
    small = {case.name: case.window for case in inputs.cpu_cases(variants()["fwd_d128_any_window"].spec)}
    assert set(inputs.WINDOWS) <= set(small.values()) and small["wrap"] == (-1, 0)  # which goes round the ring


def test_a_right_fp16_module_passes() -> None:
    report = run(Module(CausalMask(), dtype=torch.float16), dtype="fp16")
    assert report.failures == ()


def test_same_precision_itself_passes() -> None:
    """O of the yardstick is within twice its own error; its LSE is not exact enough, so it is given the exact one."""

    def compute(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
        out = reference.same_precision(q, k, v, scale=scale, reach=reach(mask)).out
        return out, exact(q, k, v, scale, mask)[1]

    assert run(Module(CausalMask(), compute)).failures == ()


# -- sinks and capped scores


class Scored:
    """A module with sinks and a cap in plain PyTorch, whose tanh is off by `share` of itself, up and down by turns."""

    def __init__(self, share: float, forget: str = "") -> None:
        self.share, self.forget = share, forget

    def attention(self, q: Any, k: Any, v: Any, *, out: Any = None, return_lse: bool = False, **options: Any) -> Any:
        check_arguments(q, k, v, out, dtype=torch.bfloat16, head_dim=64)
        check_scores(q, options["sinks"], options["softcap"])
        exact_tanh = torch.tanh

        def off(x: torch.Tensor) -> torch.Tensor:
            signs = torch.arange(x.numel()).reshape(x.shape) % 2 * 2.0 - 1
            return exact_tanh(x) * (1 + self.share * signs)

        options.pop(self.forget, None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "tanh", off)
            facts = {**options, "reach": reach(CausalMask()), "compute_dtype": torch.float32}
            result, lse = reference.attention(q, k, v, **facts)
        out = torch.empty_like(q) if out is None else out
        out.copy_(result)
        return (out, lse) if return_lse else out


def run_scored(module: Scored) -> Report:
    spec = variants()["k4_scores_d64_window200_70"].spec.model_copy(update={"mask": CausalMask()})
    cases = [case for case in inputs.gpu_cases(spec) if case not in (CASES[0], CASES[1])]
    assert {"capped", "capped_50", "capped_low", "sinks_16_bits"} <= {case.name for case in cases}
    return verify_module(module, spec, CPU, cases=cases, seed=7)


def test_the_error_of_the_hardware_s_tanh_is_allowed_for() -> None:
    assert run_scored(Scored(reference.TANH_ERROR)).failures == ()


@pytest.mark.parametrize(
    "module", [Scored(2.0**-8), Scored(0.0, "softcap"), Scored(0.0, "sinks")], ids=["tanh", "softcap", "sinks"]
)
def test_more_than_that_is_not(module: Scored) -> None:
    failed = {failure.partition(":")[0] for failure in run_scored(module).failures}
    assert len(failed) >= (3 if module.share else 2 if module.forget == "softcap" else 10)


# -- modules that are wrong in one way


def wrong_scale(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
    return exact(q, k, v, 1 / math.sqrt(q.shape[-1]), mask)  # whatever was asked


def top_left(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
    """Causal, aligned to the top left corner."""
    seq_q, seq_k = q.shape[1], k.shape[1]
    padded = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, max(0, seq_k - seq_q)))
    keys, values = k[:, : padded.shape[1]], v[:, : padded.shape[1]]
    if seq_k < seq_q:
        rest = reference.attention(q[:, seq_k:], k, v, scale=scale, reach=reach(NoMask()), compute_dtype=torch.float32)
        first = exact(q[:, :seq_k], k, v, scale, mask)
        return torch.cat([first.out, rest.out], dim=1), torch.cat([first.lse, rest.lse], dim=2)
    out, lse = exact(padded, keys, values, scale, mask)
    return out[:, :seq_q], lse[:, :, :seq_q]


def base_two(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
    out, lse = exact(q, k, v, scale, mask)
    return out, lse / math.log(2)


def plus_infinity(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
    out, lse = exact(q, k, v, scale, mask)
    return out, lse.masked_fill(torch.isneginf(lse), math.inf)


def small_rows_off(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
    """Late causal rows are small beside the first ones: a thirtieth off there hides under the maximum."""
    out, lse = exact(q, k, v, scale, mask)
    out[:, 192:] *= 1.03
    return out, lse


def reads_past_the_end(q: Any, k: torch.Tensor, v: torch.Tensor, scale: Any, mask: Mask) -> Any:
    """P = 0 for a key past the end, but 0 times what lies there is NaN when that is NaN."""
    out, lse = exact(q, k, v, scale, mask)
    beyond = v.as_strided(v[:, -1:].shape, v.stride(), v.storage_offset() + v.shape[1] * v.stride(1))
    last = beyond.float().repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return out + 0 * last, lse


def never_the_same(out: torch.Tensor, result: torch.Tensor) -> None:
    out.copy_(result)
    row = torch.randint(out.shape[1], ())
    out[:, row] = torch.nextafter(out[:, row], torch.tensor(math.inf, dtype=out.dtype))


CAUSAL = CausalMask()
WRONG: dict[str, tuple[Module, str, str]] = {
    "scale ignored": (Module(CAUSAL, wrong_scale), "scale", "O is off by"),
    "mask aligned to the top left": (Module(CAUSAL, top_left), "ragged", "O is off by"),
    "mask aligned to the top left, more queries": (Module(CAUSAL, top_left), "ragged_more_queries", "not -inf in"),
    "LSE in base 2": (Module(CAUSAL, base_two), "ragged", "LSE is off by"),
    "no rescale": (Module(NoMask(), lambda *args: online(*args, rescale=False)), "ramp", "O is off by"),
    "NaN in rows without keys": (Module(CAUSAL, nan_rows), "few_keys", "O has NaN"),
    "LSE +inf in rows without keys": (Module(CAUSAL, plus_infinity), "few_keys", "not -inf in exactly"),
    "tail rows unwritten": (Module(CAUSAL, store=whole_tiles_only), "tile_edge", "NaN or infinity in 2 of 258 rows"),
    "reads past the end": (Module(CAUSAL, reads_past_the_end), "ragged", "O has NaN"),
    "writes past the end": (Module(CAUSAL, store=past_the_end), "ragged", "wrote outside `out`"),
    "q changed": (Module(CAUSAL, before=lambda q, k, v: q.mul_(2)), "ragged", "changed its input q"),
    "v changed": (Module(CAUSAL, before=lambda q, k, v: v[:, -1:].mul_(2)), "gqa", "changed its input v"),
    "not repeatable": (Module(CAUSAL, store=never_the_same), "ragged", "differs from the first"),
    "LSE in half precision": (
        Module(CAUSAL, lambda *args: (exact(*args)[0], exact(*args)[1].half())),
        "ragged",
        "LSE is (2, 2, 77) torch.float16",
    ),
    "LSE with rows before heads": (
        Module(CAUSAL, lambda *args: (exact(*args)[0], exact(*args)[1].transpose(1, 2).contiguous())),
        "ragged",
        "LSE is (2, 77, 2)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_module_that_is_wrong_in_one_way_fails(what: str) -> None:
    module, case_name, message = WRONG[what]
    case = next(case for case in CASES if case.name == case_name)
    report = run(module, (case,))
    assert not report.passed
    assert any(message in failure for failure in report.cases[0].failures), report.failures


@pytest.mark.parametrize("mask", [NoMask(), CausalMask(), WindowMask(left=50, right=10)], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_flash_kernels_own_rounding_passes(mask: Mask, dtype: str) -> None:
    """The criteria leave room for P rounded before it is normalised; the mutant above fails for its rescale alone."""
    report = run(Module(mask, online, dtype=DTYPES[dtype].in_torch()), NOT_LONG, dtype)
    assert report.failures == ()


@pytest.mark.parametrize("mask", [NoMask(), CausalMask(), WindowMask(left=50, right=10)], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_o_in_float32_has_room_for_the_rounding_of_p(mask: Mask, dtype: str) -> None:
    report = run_float32(Module(mask, online, dtype=DTYPES[dtype].in_torch(), out_dtype=torch.float32), dtype)
    assert report.failures == ()


def run_float32(module: Module, dtype: str = "bf16", cases: tuple[Case, ...] = NOT_LONG) -> Report:
    return verify_module(module, spec_of(module.mask, dtype, o_dtype="fp32"), CPU, cases=cases, seed=7)


FEW_KEYS_EACH = Case("many_heads", "4,096 blocks of two rows and nine keys", 16, 2, 9, 256, 32, layout="contiguous")


def test_roundings_of_one_yardstick_that_are_tiny_by_chance_refuse_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module(CausalMask(), online, out_dtype=torch.float32)
    assert run_float32(module, cases=(FEW_KEYS_EACH,)).failures == ()
    monkeypatch.setattr(attention_on_gpu, "P_SCALES", (1.0,))
    (failure,) = run_float32(module, cases=(FEW_KEYS_EACH,)).failures
    assert "O in the worst block of 64 rows is off by 1." in failure


def test_one_head_of_many_whose_p_has_two_bits_too_few_is_seen() -> None:
    def rough(q: Any, k: Any, v: Any, scale: Any, mask: Mask) -> Any:
        out, right = online(q, k, v, scale, mask)[0], exact(q, k, v, scale, mask)[1]
        out[3, :, 77] = online(q, k, v, scale, mask, round_p=lambda p: to_bits(p, 6))[0][3, :, 77]
        return out, right

    failures = run_float32(Module(CausalMask(), rough, out_dtype=torch.float32), cases=(FEW_KEYS_EACH,)).failures
    assert any("O in the worst block of 64 rows is off by" in failure for failure in failures), failures


FLOAT32: dict[str, tuple[Module, str]] = {
    "O in 16 bits": (Module(CAUSAL, online), "out is torch.float32; it needs to be torch.bfloat16"),
    "O rounded on the way": (
        Module(CAUSAL, online, out_dtype=torch.float32, store=lambda out, o: out.copy_(o.bfloat16())),
        "float32 in name only",
    ),
    "O cut to 12 bits": (
        Module(CAUSAL, lambda *args: (exact(*args)[0] * (1 + 2**-11), exact(*args)[1]), out_dtype=torch.float32),
        "O is off by",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", FLOAT32)
def test_a_module_of_float32_o_that_is_wrong_fails(what: str) -> None:
    module, message = FLOAT32[what]
    one = tuple(case for case in CASES if case.name == "one")
    report = run_float32(module, cases=one)
    assert any(message in failure for failure in report.failures), report.failures


def test_an_error_in_small_rows_is_caught_by_the_blocks_and_not_by_the_maximum() -> None:
    case = next(case for case in CASES if case.name == "long")
    result = run(Module(CAUSAL, small_rows_off), (case,)).cases[0]
    assert result.o_error and result.o_error.max_abs and result.o_max_abs_limit
    assert result.o_error.max_abs < result.o_max_abs_limit
    assert result.o_block_ratio and result.o_block_ratio > 1
    assert len(result.failures) == 1 and "worst block" in result.failures[0]


def test_a_module_that_raises_fails_with_its_message() -> None:
    def compute(*args: Any) -> Any:
        raise RuntimeError("no such kernel")

    result = run(Module(CAUSAL, compute), FEW[:1]).cases[0]
    assert result.failures == ("raised RuntimeError: no such kernel",) and not result.passed


def test_out_that_is_not_returned_fails() -> None:
    module = Module(CAUSAL)
    given = module.attention

    def attention(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        keywords.pop("out", None)
        return given(q, k, v, **keywords)

    module.attention = attention  # type: ignore[method-assign]
    assert "not the `out` that was given" in run(module, FEW[:1]).cases[0].failures[0]


def failing_checks(module: Module) -> dict[str, str]:
    return {check.name: check.detail for check in run(module, ()).checks if check.passed is False}


def test_missing_argument_checks_fail() -> None:
    detail = failing_checks(Module(CAUSAL, check=lambda *args, **facts: None))["bad arguments are refused"]
    assert "v whose last mode is not contiguous: accepted" in detail
    assert "k that starts off a 16-byte boundary: accepted" in detail
    assert "v on meta: raised NotImplementedError" in detail


def test_argument_errors_that_name_nothing_fail() -> None:
    def check(*args: Any, **facts: Any) -> None:
        try:
            check_arguments(*args, **facts)
        except (TypeError, ValueError) as error:
            raise ValueError("bad arguments") from error

    detail = failing_checks(Module(CAUSAL, check=check))["bad arguments are refused"]
    assert "float32 q: the message names no argument q: ValueError: bad arguments" in detail


def test_a_signature_names_no_argument() -> None:
    """A compiled function prints all names after the number of the one at fault."""
    signature = "`launch(q: Tensor([n0, 128], bfloat16), k: Tensor([n1], bfloat16), out: Tensor([n0], bfloat16))`"
    for said, wanted in {
        f"Mismatched Tensor on argument #1 when calling: {signature}, expected dtype=bfloat16": "Mismatched Tensor k",
        f"Mismatched out.shape[1] on argument #2 when calling: {signature}, expected": "Mismatched out.shape[1] out",
        "q has dtype torch.float32": "q has dtype torch.float32",
    }.items():
        assert blamed(said) == wanted

    def check(*args: Any, **facts: Any) -> None:
        try:
            check_arguments(*args, **facts)
        except (TypeError, ValueError) as error:
            raise ValueError(f"Mismatched Tensor on argument #2 when calling: {signature}") from error

    detail = failing_checks(Module(CAUSAL, check=check))["bad arguments are refused"]
    assert "float32 q: the message names no argument q: ValueError: Mismatched Tensor on argument #2" in detail
    assert "out of another shape" not in detail


def test_an_empty_batch_that_raises_fails() -> None:
    def check(q: Any, *args: Any, **facts: Any) -> None:
        if isinstance(q, torch.Tensor) and not q.shape[0]:
            raise ValueError("q is empty")
        check_arguments(q, *args, **facts)

    assert failing_checks(Module(CAUSAL, check=check)) == {"empty batch": "raised ValueError: q is empty"}


# -- inputs and measures


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inputs_are_as_the_case_says(case: Case) -> None:
    made = inputs.make(case, head_dim=64, dtype=torch.bfloat16, device=CPU, seed=3)
    assert made.q.shape == made.out.shape == (case.batch, case.seq_q, case.heads_q, 64)
    assert made.k.shape == made.v.shape == (case.batch, case.seq_k, case.heads_kv, 64)
    for tensor in (made.q, made.k, made.v, made.out):
        assert tensor.stride(3) == 1 and tensor.data_ptr() % 16 == 0
        assert all(tensor.stride(mode) % 8 == 0 for mode in range(3) if tensor.shape[mode] > 1)
    assert all(torch.isfinite(tensor).all() for tensor in (made.q, made.k, made.v))
    assert torch.isnan(made.out_storage).all()
    again = inputs.make(case, head_dim=64, dtype=torch.bfloat16, device=CPU, seed=3)
    other = inputs.make(case, head_dim=64, dtype=torch.bfloat16, device=CPU, seed=4)
    assert torch.equal(made.q, again.q) and not torch.equal(made.v, other.v)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inputs_of_two_kinds_of_8_bits(case: Case) -> None:
    """Rounded once, from the same numbers; those of q are as without, and no two kinds lie in one storage."""
    facts = {"head_dim": 64, "dtype": torch.float8_e4m3fn, "device": CPU, "seed": 3}
    made, usual = inputs.make(case, kv_dtype=torch.float8_e5m2, **facts), inputs.make(case, **facts)
    wide = inputs.make(case, **{**facts, "dtype": torch.float32})
    assert torch.equal(made.q.float(), usual.q.float())
    for name in ("k", "v"):
        tensor = made.given[name]
        assert tensor.dtype == torch.float8_e5m2 and tensor.stride(3) == 1
        assert torch.equal(tensor.float(), wide.given[name].to(torch.float8_e5m2).float())
    assert made.q.untyped_storage().data_ptr() != made.k.untyped_storage().data_ptr()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inputs_with_a_contiguous_sequence(case: Case) -> None:
    """The numbers are the same; every stride but that of the sequence is a multiple of 8 elements, 16 bytes."""
    usual, made = (
        inputs.make(case, head_dim=64, dtype=torch.bfloat16, device=CPU, seed=3, by_sequence=names)
        for names in ((), ("q", "v"))
    )
    for name, tensor in made.given.items():
        assert torch.equal(tensor, usual.given[name]) and tensor.data_ptr() % 16 == 0
        inner = 3 if name == "k" else 1
        assert tensor.stride(inner) == 1 or tensor.shape[inner] == 1
        others = [mode for mode in range(4) if mode != inner and tensor.shape[mode] > 1]
        assert all(tensor.stride(mode) % 8 == 0 for mode in others)
    if case.layout == "packed":
        assert made.q.untyped_storage().data_ptr() == made.v.untyped_storage().data_ptr()
        assert made.q.untyped_storage().data_ptr() != made.k.untyped_storage().data_ptr()
    if case.layout == "expanded":
        assert made.v.stride(0) == 0


def test_layouts_have_the_strides_they_are_there_for() -> None:
    made = {
        case.name: inputs.make(case, head_dim=64, dtype=torch.bfloat16, device=CPU, seed=3)
        for case in CASES
        if case.name in ("gqa", "packed", "expanded", "odd_strides", "one", "ragged")
    }
    assert made["gqa"].q.stride(1) == 64 and made["gqa"].q.stride(2) > 64 * 200
    assert made["packed"].q.stride(1) == made["packed"].v.stride(1) == (4 + 2 + 2) * 64
    assert made["expanded"].k.stride(0) == 0
    assert made["odd_strides"].k.stride()[::2] == (3, 3) and made["one"].k.stride(1) == 3
    assert not made["ragged"].k.is_contiguous()


def test_the_cases_cover_what_they_must() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert any(case.seq_q == 1 and case.seq_k > 1 for case in CASES)
    assert any(case.seq_k < case.seq_q for case in CASES)
    assert any(case.seq_k > 2 * 5 * 128 for case in CASES)
    assert any(1 < case.heads_kv < case.heads_q for case in CASES)
    assert any(case.heads_kv == 1 < case.heads_q for case in CASES)
    assert {case.layout for case in CASES} == set(inputs.Layout.__args__)  # type: ignore[attr-defined]


SMS_OF_H200 = 132


@pytest.mark.parametrize("stem", [stem for stem in attention_stems() if plans()[stem].scheduler.persistent])
def test_the_cases_of_persistent_kernels_cover_what_they_must(stem: str) -> None:
    """CTAs take several tiles each; some of these have no visible key; heads come in sections, the last one smaller."""
    spec = variants()[stem].spec
    cases = {case.name: case for case in inputs.gpu_cases(spec)}
    assert {case.name for case in CASES} < set(cases)
    many, few = cases["many_tiles"], cases["many_tiles_few_keys"]
    for case in (many, few):
        heads = case.batch * case.heads_q
        assert -(-case.seq_q // spec.tile.q) * heads > SMS_OF_H200 and 1 < case.heads_kv < case.heads_q
    assert few.seq_q - few.seq_k > 2 * spec.tile.q
    in_l2 = 32 * 2**20 // (2 * (spec.problem.head_dim + spec.problem.v_dim))
    sections = [min(in_l2 // case.seq_k, case.batch * case.heads_q) for case in (many, few)]
    heads = many.batch * many.heads_q
    assert sections[0] < heads and heads % sections[0] != 0 and sections[1] == heads


def test_other_kernels_have_no_cases_of_persistent_ones() -> None:
    assert inputs.gpu_cases(variants()["k6_d128"].spec) == CASES


def test_half_ulp_by_hand() -> None:
    values = torch.tensor([1.0, 1.9, 2.0, -4.0, 0.75, 0.0], dtype=torch.float64)
    ulps = [2**-8, 2**-8, 2**-7, 2**-6, 2**-9]  # half of bf16's 2**-7 at 1
    assert half_ulp(values, torch.bfloat16)[:5].tolist() == ulps
    assert half_ulp(values, torch.float16)[0].item() == 2**-11
    assert 0 < half_ulp(values, torch.bfloat16)[5].item() < 1e-37


def test_lse_error_is_relative_with_a_floor_of_one() -> None:
    expected = torch.tensor([0.5, 10.0, -math.inf], dtype=torch.float64)
    found = torch.tensor([0.5 + 2e-6, 10.0 + 5e-5, -math.inf])
    errors = attention_on_gpu.lse_errors(found, expected)
    assert errors.max_abs == pytest.approx(5e-5, rel=0.02)
    assert errors.relative == pytest.approx(5e-6, rel=0.1)
    assert attention_on_gpu.lse_errors(torch.tensor([math.nan, 10.0, -math.inf]), expected).relative is None


def test_the_report_is_json_and_names_its_seed() -> None:
    import json

    report = run(Module(CAUSAL, store=whole_tiles_only), FEW[:1])
    text = json.dumps(report.as_dict(), allow_nan=False)
    assert json.loads(text)["seed"] == 7 and json.loads(text)["passed"] is False


def test_memory_beyond_what_a_call_may_take_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first call keeps is not counted; what a later one takes is, to the byte."""
    memory = {"now": 100, "peak": 0}

    def call() -> None:
        memory["now"], memory["peak"] = 900, 900 + 64

    runner = ModuleRunner(None, operation_of(spec_of(NoMask())), torch.device("cpu"), seed=1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: memory["now"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: memory["peak"])
    for allowed, wrong in ((63, "took 64 bytes of device memory; 63 are allowed"), (64, "")):
        monkeypatch.setattr(runner, "_call_given_out", lambda allowed=allowed: (call, allowed))
        memory["now"] = 100
        assert runner._allocates_only_outputs() == wrong
