"""The Python entry points of generated modules, without a GPU: arguments, messages, empty tensors, compilation."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pretended_cuda import PretendedCuda
from rendering import CHECKOUT, ROOT, attention_plans, attention_stems, source, variants

import fa3gen
from fa3gen.base.errors import UserError

NO_LSE = "k4_2_o_only_d128_causal"
NARROW_V, PACKED = "fwd_d192_128_window", "fwd_d128_pack4_causal"
# Persistent ones: tiles from a counter, tiles dealt out, the last of them in shares, a head dim of v's own.
DYNAMIC, STATIC, SPLIT, PERSISTENT_NARROW_V = "fwd_d64_causal", "fwd_d64_short", "fwd_d64", "fwd_d192_128"
SMS = 5


@pytest.fixture(params=["k4_2_d64", "k1_d64", DYNAMIC, STATIC, SPLIT])
def loaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module on WGMMA, a naive one and persistent ones, as a user gets them."""
    monkeypatch.chdir(ROOT)
    return fa3gen.load(request.param)


@pytest.fixture
def module(loaded: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module on a machine where every device passes for a Hopper GPU, and where a launch is an error."""
    pretend_hopper(loaded, monkeypatch)
    return loaded


def pretend_hopper(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, asks_for_hopper(module), lambda gpu: of_any_gpu(module))
    monkeypatch.setattr(
        module, "empty", lambda shape, strides, dtype, gpu: torch.empty_strided(shape, strides, dtype=dtype)
    )
    if hasattr(module, "current_stream"):
        PretendedCuda(current_gpu=-1).install(module, monkeypatch)
    monkeypatch.setattr(module, "compile_for_sm90a", no_launch)


def no_launch() -> Callable[..., None]:
    pytest.fail("nothing is to be launched here")


def asks_for_hopper(module: ModuleType) -> str:
    """The function that does: it returns what launches on a GPU share, which differs with the kind of module."""
    (name,) = {"launch_constants", "sm_count", "unasked_lse", "check_gpu"} & vars(module).keys()
    return name


def of_any_gpu(module: ModuleType) -> Any:
    """What that function returns for a GPU of SMS SMs."""
    no_lse = torch.empty(1, 1, 0)
    return {"launch_constants": (SMS, no_lse), "sm_count": SMS, "unasked_lse": no_lse, "check_gpu": None}[
        asks_for_hopper(module)
    ]


def tensor(batch: int = 2, seq: int = 5, heads: int = 4, dim: int = 64, dtype: Any = torch.bfloat16) -> Any:
    return torch.zeros(batch, seq, heads, dim, dtype=dtype)


def arguments(**changes: Any) -> dict[str, Any]:
    """Arguments that pass every check, with some of them changed."""
    return {"q": tensor(), "k": tensor(seq=7, heads=2), "v": tensor(seq=7, heads=2), **changes}


# Loading


def test_load_is_idempotent(loaded: ModuleType) -> None:
    assert loaded.__file__ is not None
    path = Path(loaded.__file__)
    assert fa3gen.load(path.stem) is loaded
    assert path == CHECKOUT.module_path(path.stem)
    assert loaded.HEAD_DIM == 64


def test_load_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="^k4_2 is a spec with several modules; load one of k4_2_d64, "):
        fa3gen.load("k4_2")
    with pytest.raises(UserError, match="^there is no spec or module 'k4_2_d65'.*k4_2_d64"):
        fa3gen.load("k4_2_d65")


def test_load_of_a_module_that_is_not_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "specs", tmp_path / "specs")
    (tmp_path / "generated").mkdir()
    (tmp_path / "specs" / "k4_2.yaml").rename(tmp_path / "specs" / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "generated" / "mine_d64.py"
    with pytest.raises(UserError) as caught:
        fa3gen.load("mine_d64")
    assert str(caught.value) == f"{path} does not exist; run `fa3gen render specs/mine.yaml`"


def test_load_takes_no_module_of_the_package_for_one_of_the_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspace's spec may say something else under the same name."""
    shutil.copytree(ROOT / "specs", tmp_path / "specs")
    (tmp_path / "generated").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="k4_2_d64.py does not exist; run `fa3gen render specs/k4_2.yaml`"):
        fa3gen.load("k4_2_d64")


def test_a_module_that_fails_to_import_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "specs").mkdir()
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated" / "broken.py").write_text("raise RuntimeError('half way')\n")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="half way"):
            fa3gen.load("broken")


# Devices


def test_cpu_tensors_are_refused(loaded: ModuleType) -> None:
    with pytest.raises(ValueError) as caught:
        loaded.attention(**arguments())
    hint = re.escape('; for CPU tensors there is fa3gen.load("') + r'\w+", on="cpu"\)'
    assert re.fullmatch(f"q is not on a GPU; it needs to be on a Hopper GPU({hint})?", str(caught.value))


@pytest.mark.parametrize("stem", ["k4_2_d64", STATIC, NO_LSE])
def test_other_gpus_are_refused(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module = fa3gen.load(stem)
    of_gpu = getattr(module, asks_for_hopper(module)).__wrapped__
    gpus = {0: SimpleNamespace(major=9, minor=0, multi_processor_count=132), 1: SimpleNamespace(major=10, minor=3)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.get)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: (shape, dtype, device))
    no_lse = ((1, 1, 0), torch.float32, 0)
    assert of_gpu(0) == {"k4_2_d64": no_lse, STATIC: (132, no_lse), NO_LSE: None}[stem]
    with pytest.raises(ValueError) as caught:
        of_gpu(1)
    assert str(caught.value) == "q is on a GPU of compute capability 10.3; it needs 9.0 (H100, H200)"


# Arguments. The compiled function checks the rest, and its messages are tested with the CPU model.

NEEDED = "it needs to be (batch, seq, heads, head_dim)"
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": None}, TypeError, "q is a NoneType; it needs to be a torch.Tensor"),
    ({"k": "K"}, TypeError, "k is a str; it needs to be a torch.Tensor"),
    ({"v": [[0.0]]}, TypeError, "v is a list; it needs to be a torch.Tensor"),
    ({"out": 1}, TypeError, "out is a int; it needs to be a torch.Tensor"),
    ({"q": tensor()[0]}, ValueError, f"q has shape (5, 4, 64); {NEEDED}"),
    ({"k": tensor(heads=2)[0]}, ValueError, f"k has shape (5, 2, 64); {NEEDED}"),
    ({"q": tensor(heads=3)}, ValueError, "q has 3 heads and k has 2; heads of q must be a multiple of those of k"),
    (
        {"k": tensor(seq=7, heads=0), "v": tensor(seq=7, heads=0)},
        ValueError,
        "q has 4 heads and k has 0; heads of q must be a multiple of those of k",
    ),
    (
        {"out": tensor(heads=1).expand(2, 5, 4, 64)},
        ValueError,
        "out has strides (320, 64, 0, 1): several elements share one address; pass out.contiguous()",
    ),
    *(
        ({"scale": scale}, ValueError, f"scale is {scale!r}; it needs to be a finite and positive number")
        for scale in ("1", torch.tensor(1.0), 0, -0.5, math.nan, math.inf)
    ),
    *(
        (
            {name: tensor(seq=seq, heads=heads).requires_grad_()},
            ValueError,
            "q, k or v requires grad; this kernel is forward only: call it under torch.no_grad()",
        )
        for name, seq, heads in (("q", 5, 4), ("k", 7, 2), ("v", 7, 2))
    ),
]


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG)
def test_wrong_arguments_are_named(
    module: ModuleType, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        module.attention(**arguments(**changes))
    assert str(caught.value) == message


def test_a_module_of_transposed_inputs_says_how_to_make_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the message tells to pass does pass, padded to multiples of 8, and holds the same numbers."""
    monkeypatch.chdir(ROOT)
    turned: Any = fa3gen.load("k4_transposed_d64")
    pretend_hopper(turned, monkeypatch)
    q, k, v = (torch.randn(2, seq, heads, 64).bfloat16() for seq, heads in ((5, 4), (7, 2), (7, 2)))
    for name in ("q", "k", "v"):
        with pytest.raises(ValueError) as caught:
            turned.attention(q, k, v)
        said, _, how = str(caught.value).partition(": pass ")
        strides = {"q": q, "k": k, "v": v}[name].stride()
        assert said == f"{name} has strides {strides}; that of its sequence needs to be 1, the others multiples of 8"
        made = eval(how, {"torch": torch, "q": q, "k": k, "v": v})
        assert torch.equal(made, {"q": q, "k": k, "v": v}[name]) and made.stride()[1::2] == (1, 8)
        q, k, v = (made if name == other else x for other, x in (("q", q), ("k", k), ("v", v)))
    launch = Launch()
    monkeypatch.setattr(turned, "compile_for_sm90a", lambda: launch)
    assert turned.attention(q, k, v) is launch.arguments[3]
    for bad in (q[:, :1].expand(2, 5, 4, 64), tensor(seq=64, dim=5).permute(0, 3, 2, 1)):  # strides 0; 5 and 20
        with pytest.raises(ValueError, match="q has strides"):
            turned.attention(bad, k, v)


RIGHT: list[dict[str, Any]] = [
    {},
    {"scale": 1},
    {"scale": 0.125},
    {"out": tensor()},
    {"q": torch.zeros(2, 4, 5, 64, dtype=torch.bfloat16).transpose(1, 2)},  # (batch, heads, seq, d) in memory
    {"q": tensor(dim=192)[..., 64:128]},  # one of three packed in a row
    {"k": tensor(seq=7, heads=1).expand(2, 7, 2, 64)},  # inputs may share addresses
    {"q": tensor(heads=2)},
    {"k": tensor(seq=1, heads=1), "v": tensor(seq=1, heads=1)},
    {
        "q": tensor(1, 1, 4).as_strided((1, 1, 4, 64), (3, 5, 64, 1)),
        "k": tensor(1),
        "v": tensor(1),
    },  # size 1: any stride
]


@pytest.mark.parametrize("changes", RIGHT)
def test_right_arguments_pass(module: ModuleType, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch()
    monkeypatch.setattr(module, "compile_for_sm90a", lambda: launch)
    assert module.attention(**arguments(**changes)) is launch.arguments[3]
    assert changes.get("out", launch.arguments[3]) is launch.arguments[3]


def test_grad_is_no_matter_without_autograd(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (argument.requires_grad_() for argument in arguments().values())
    monkeypatch.setattr(module, "compile_for_sm90a", Launch)
    with torch.no_grad():
        assert not module.attention(q, k, v).requires_grad


def test_options_are_keywords(module: ModuleType) -> None:
    with pytest.raises(TypeError, match="positional"):
        module.attention(*arguments().values(), 0.5)


# Empty tensors


@pytest.mark.parametrize(("batch", "seq_q", "heads"), [(0, 5, 4), (2, 0, 4), (2, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("return_lse", [False, True])
def test_empty_results(module: ModuleType, batch: int, seq_q: int, heads: int, return_lse: bool) -> None:
    q, k = tensor(batch, seq_q, heads), tensor(batch, 7, heads // 2)
    result = module.attention(q, k, k, return_lse=return_lse)
    out, lse = result if return_lse else (result, None)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    if lse is not None:
        assert (lse.shape, lse.dtype) == ((batch, heads, seq_q), torch.float32)


def test_no_keys(module: ModuleType) -> None:
    """Rows with no visible key: O = 0 and LSE = -inf, never NaN."""
    q, k = tensor(), tensor(seq=0, heads=2)
    given = torch.full_like(q, math.nan)
    out, lse = module.attention(q, k, k, out=given, return_lse=True)
    assert out is given
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((2, 4, 5), -math.inf))
    assert torch.equal(module.attention(q, k, k), torch.zeros_like(q))


NEEDED_WITHOUT_KEYS = "it needs to be ((2, {}, {}, 64), torch.bfloat16, device(type='cpu'))"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": tensor().float()}, f"q is (2, 5, 4, 64), torch.float32 on cpu; {NEEDED_WITHOUT_KEYS.format(5, 4)}"),
        ({"k": tensor(3, 0, 2)}, f"k is (3, 0, 2, 64), torch.bfloat16 on cpu; {NEEDED_WITHOUT_KEYS.format(0, 2)}"),
        ({"v": tensor(heads=2)}, f"v is (2, 5, 2, 64), torch.bfloat16 on cpu; {NEEDED_WITHOUT_KEYS.format(0, 2)}"),
        ({"out": tensor(dim=32)}, f"out is (2, 5, 4, 32), torch.bfloat16 on cpu; {NEEDED_WITHOUT_KEYS.format(5, 4)}"),
    ],
)  # fmt: skip
def test_a_call_that_launches_nothing_is_checked(module: ModuleType, changes: dict[str, Any], message: str) -> None:
    """By the module itself: the compiled function, which checks these otherwise, is not called."""
    no_keys = {"k": tensor(seq=0, heads=2), "v": tensor(seq=0, heads=2)}
    with pytest.raises(ValueError) as caught:
        module.attention(**arguments(**{**no_keys, **changes}))
    assert str(caught.value) == message


# What a launch is given


class Launch:
    """Stands in for the compiled kernel; keeps the arguments of the call."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()

    def __call__(self, *arguments: Any) -> None:
        assert self.arguments == ()
        self.arguments = arguments


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(("scale", "factor"), [(None, 0.125), (2, 2)])
def test_launch(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, return_lse: bool, scale: float | None, factor: float
) -> None:
    launch, given = Launch(), arguments()
    monkeypatch.setattr(module, "compile_for_sm90a", lambda: launch)
    result = module.attention(**given, scale=scale, return_lse=return_lse)
    q, k, v, out, lse, *others, last = launch.arguments
    assert all(passed is mine for passed, mine in zip((q, k, v), given.values(), strict=True))
    assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)
    # Without rows its other sizes are no matter: one tensor serves all calls that ask for none.
    assert (lse.shape, lse.dtype) == ((2, 4, 5) if return_lse else (1, 1, 0), torch.float32)
    assert lse.is_contiguous() and lse.untyped_storage().nbytes() == 4 * lse.numel()
    assert last == factor
    if hasattr(module, "scores_kernel"):
        assert [x.shape for x in others] == [(2, 4, 5, 7)]
    else:
        assert others[:1] == ([SMS] if {"launch_constants", "sm_count"} & vars(module).keys() else [])
    if return_lse:
        assert result[0] is out and result[1] is lse
    else:
        assert result is out


def test_launch_into_a_given_tensor(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, given = Launch(), tensor(dim=128)[..., :64]
    monkeypatch.setattr(module, "compile_for_sm90a", lambda: launch)
    assert module.attention(**arguments(), out=given) is given
    assert launch.arguments[3] is given


def test_new_tensors_lie_where_the_operands_do(loaded: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the current GPU, which is the only one that the faster of the two functions knows."""
    guards = torch._C._dynamo.guards
    monkeypatch.setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)
    for place, device in {-1: "cpu", "meta": "meta"}.items():
        made = loaded.empty((2, 3, 5), (15, 5, 1), torch.bfloat16, place)
        assert (made.device.type, made.dtype) == (device, torch.bfloat16)
        assert made.shape == (2, 3, 5) and made.is_contiguous()


def test_private_functions_of_torch_have_public_ones_behind_them(
    loaded: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cuda")
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    made = loaded.empty((2, 3, 5), (15, 5, 1), torch.float16, "cpu")
    assert (made.shape, made.dtype, made.stride()) == ((2, 3, 5), torch.float16, (15, 5, 1))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda gpu: SimpleNamespace(cuda_stream=40 + gpu))
    assert fa3gen.load(DYNAMIC).current_stream(2) == 42


def test_the_result_is_contiguous_for_any_strides_of_q(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "compile_for_sm90a", Launch)
    q = torch.zeros(2, 4, 5, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert module.attention(**arguments(q=q)).is_contiguous()


def test_a_module_without_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module = fa3gen.load(NO_LSE)
    pretend_hopper(module, monkeypatch)
    q, k = tensor(dim=128), tensor(seq=7, heads=2, dim=128)
    with pytest.raises(ValueError) as caught:
        module.attention(q, k, k, return_lse=True)
    message = "return_lse=True: this kernel has no LSE output; render the spec with `outputs: {lse: true}`"
    assert str(caught.value) == message
    launch = Launch()
    monkeypatch.setattr(module, "compile_for_sm90a", lambda: launch)
    assert module.attention(q, k, k) is launch.arguments[3]
    assert launch.arguments[4:] == (128**-0.5,)
    empty = tensor(seq=0, heads=2, dim=128)
    assert torch.equal(module.attention(q, empty, empty, out=torch.full_like(q, math.nan)), torch.zeros_like(q))


# Every module


def checks(stem: str) -> str:
    """What `attention` checks before it looks at the device."""
    text = source(stem)
    return text[text.index("# What the compiled function lets pass") : text.index("    gpu = q.get_device()")]


CHECK_DESCALES = "    check_descales(offsets, heads_kv, k_descale, v_descale)\n"
CHECK_THREE = "    check_descales(offsets, heads_kv, *(q_descale, k_descale, v_descale))\n"  # of q as well


def usual_checks(stem: str) -> str:
    """`checks`, without that of the factors, which modules for packed keys of 8 bits have beside it."""
    text, spec = checks(stem), variants()[stem].spec
    assert text.count(CHECK_DESCALES) == (spec.kv.dtype is not None), stem
    assert text.count(CHECK_THREE) == (spec.problem.dtype == "e4m3" and spec.problem.layout != "dense"), stem
    return text.replace(CHECK_DESCALES, "").replace(CHECK_THREE, "")


def text_of_cap_check(stem: str) -> str:
    """How a module checks the cap of the scores."""
    text = checks(stem)
    return text[text.index("    if not (isinstance(softcap") : text.index("    if torch.is_grad_enabled()")]


def allocating(stem: str) -> str:
    """How the module makes a new tensor."""
    text = source(stem)
    return text[text.index("\ndef empty(") :].partition("\n\n\n")[0]


def asking(stem: str) -> str:
    """How the module makes sure of a Hopper GPU."""
    text = source(stem)
    return text[text.index("    if gpu < 0") :].partition("\n\n")[0].partition("\n    return ")[0].strip()


def after_asking(stem: str) -> str:
    """What follows: the memory that launches of persistent modules need."""
    text = source(stem)
    return text[text.index("    if gpu < 0") :].partition("\n\n")[2]


def kind_of(stem: str) -> str:
    """Where keys lie: `dense`, `packed`, or in pages, which `tma` or `cp_async` copies."""
    plan = attention_plans()[stem]
    return plan.load.pages or ("packed" if plan.problem.packed_sequences else "dense")


def test_all_modules_check_alike() -> None:
    """What is tested here on few modules holds for all attention: checks are the same text."""
    sequences = {stem for stem, plan in attention_plans().items() if plan.problem.packed_sequences}
    dense = set(attention_stems()) - sequences
    packed = {stem for stem in dense if attention_plans()[stem].tile.packed}
    padded = {stem for stem in packed if attention_plans()[stem].tile.padded}
    packed -= padded
    assert packed == {PACKED, "fwd_d64_pack8_window", "fwd_d64_pack8_sink_window"}
    scored = {stem for stem, plan in attention_plans().items() if plan.softmax.sink or plan.softmax.softcap}
    permuted = {stem for stem in dense if (of_8 := attention_plans()[stem].eight_bit) and of_8.permuted}
    assert {checks(stem) for stem in dense - packed - padded - scored - permuted} == {checks("k4_2_d64")}
    # Those whose v has its keys permuted also check how many there are, in a paragraph of its own.
    paragraph = re.compile(r"    seq_v = .*?whole units of \{KEYS_OF_UNIT\}\"\)\n", re.S)
    counted = {tuple(paragraph.findall(checks(stem))) for stem in permuted}
    assert len(counted) == 1 and {paragraph.sub("", checks(stem)) for stem in permuted} == {checks("k4_2_d64")}
    assert len({checks(stem) for stem in padded}) == 1 and checks("fwd_decode_d64") != checks(PACKED)
    assert {checks(stem) for stem in packed - scored} == {checks(PACKED)} != {checks("k4_2_d64")}
    # Those for packed sequences have checks of their own, alike but for heads in a tile.
    usual_of = {("dense", False): checks("k4_2_d64"), ("dense", True): checks(PACKED)}
    plans = attention_plans()
    # Any number of heads may share one of k in modules of a head in a tile, and in some of several.
    of_some = {stem for stem in sequences if plans[stem].tile.packed and not plans[stem].tile.any_group}
    padded, padded_of = {stem for stem in of_some if plans[stem].tile.padded}, {}
    for kind in {kind_of(stem) for stem in padded}:
        alike = [usual_checks(stem) for stem in padded - scored if kind_of(stem) == kind]
        assert len(alike) > 5 and len(set(alike)) == 1
        padded_of[kind] = alike[0]
    for kind, heads in {(kind_of(stem), stem in of_some) for stem in sequences - padded}:
        alike = [
            usual_checks(stem)
            for stem in sequences - scored - padded
            if (kind_of(stem), stem in of_some) == (kind, heads)
        ]
        assert len(alike) > 5 and len(set(alike)) == 1
        usual_of[kind, heads] = alike[0]
    # Those with sinks or a cap check these as well, all alike.
    sinks, cap = "    check_sinks(sinks, heads_q, q.device)\n", text_of_cap_check("k4_scores_d64_window200_70")
    bounded = text_of_cap_check("fwd_packed_softcap_d64_causal")  # where exponents are relative to a first maximum
    assert "softcap < math.inf" in cap and "softcap <= MOST_SOFTCAP" in bounded
    for stem in scored:
        softmax, kind = attention_plans()[stem].softmax, kind_of(stem)
        usual = padded_of[kind] if stem in padded else usual_of[kind, plans[stem].tile.packed]
        own = sinks * softmax.sink + (bounded if softmax.most_cap else cap) * softmax.softcap
        before, grad, after = usual.partition("    if torch.is_grad_enabled()")
        assert usual_checks(stem) == before + own + grad + after, stem
    for of in (allocating, asking):
        assert {of(stem) for stem in dense} == {of("k4_2_d64")}
    for kind, packed in (("dynamic", False), ("stream_k", False), ("stream_k", True)):
        kept = {stem: (plan.scheduler.kind, plan.scheduler.packed_shares) for stem, plan in attention_plans().items()}
        scratch = {after_asking(stem) for stem, found in kept.items() if found == (kind, packed)}
        assert len(scratch) == 1 and scratch != {""}
    assert {after_asking(stem) for stem, plan in attention_plans().items() if not plan.scheduler.persistent} == {""}


@pytest.mark.parametrize("stem", [NARROW_V, PERSISTENT_NARROW_V])
def test_a_head_dim_of_its_own_for_v(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module = fa3gen.load(stem)
    pretend_hopper(module, monkeypatch)
    launch = Launch()
    monkeypatch.setattr(module, "compile_for_sm90a", lambda: launch)
    q, k, v = tensor(dim=192), tensor(seq=7, heads=2, dim=192), tensor(seq=7, heads=2, dim=128)
    out, lse = module.attention(q, k, v, return_lse=True)
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 5, 4, 128), q.dtype, True)
    assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)
    assert all(passed is mine for passed, mine in zip(launch.arguments, (q, k, v, out, lse), strict=False))
    no_keys = {"k": k[:, :0], "v": v[:, :0]}
    assert module.attention(q, **no_keys).shape == out.shape
    with pytest.raises(ValueError, match=r"v is \(2, 0, 2, 192\), .*; it needs to be \(\(2, 0, 2, 128\)"):
        module.attention(q, no_keys["k"], no_keys["k"])


SUNK, BOTH = "fwd_d64_sink_causal", "k4_scores_d64_window200_70"


def test_sinks_go_to_the_kernel_as_16_bit_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module = fa3gen.load(BOTH)
    pretend_hopper(module, monkeypatch)
    for dtype in (torch.float32, torch.bfloat16):
        launch = Launch()
        monkeypatch.setattr(module, "compile_for_sm90a", lambda launch=launch: launch)
        sinks = torch.tensor([1.5, -2.0, 0.0, 3.0], dtype=dtype)
        module.attention(**arguments(), sinks=sinks, softcap=30)
        words, softcap, scale = launch.arguments[-3:]
        assert (words.dtype, words.numel()) == (torch.int16, 2 * sinks.itemsize)
        assert words.data_ptr() == sinks.data_ptr() and (softcap, scale) == (30, 0.125)


@pytest.mark.parametrize(
    ("sinks", "error", "message"),
    [
        ([1.0] * 4, TypeError, "sinks is a list; it needs to be a torch.Tensor"),
        (
            torch.zeros(3),
            ValueError,
            r"sinks is \(3,\), .*; it needs to be \(4,\), bfloat16 or float32, contiguous, on cpu",
        ),
        (torch.zeros(4, 1), ValueError, r"sinks is \(4, 1\)"),
        (torch.zeros(8)[::2], ValueError, r"strides \(2,\)"),
        (torch.zeros(4).half(), ValueError, "torch.float16"),
        (torch.zeros(4, device="meta"), ValueError, "on meta"),
        (torch.zeros(4, requires_grad=True), ValueError, "sinks requires grad"),
    ],
)
def test_sinks_that_are_none(sinks: Any, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module = fa3gen.load(SUNK)
    pretend_hopper(module, monkeypatch)
    with pytest.raises(error, match=message):
        module.attention(**arguments(), sinks=sinks)


def test_sinks_where_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without keys LSE is the sink of each row's head, also where nobody asked for it."""
    monkeypatch.chdir(ROOT)
    module = fa3gen.load(SUNK)
    pretend_hopper(module, monkeypatch)
    empty, sinks = tensor(seq=0, heads=2), torch.tensor([1.5, -2.0, -math.inf, 3.0])
    out, lse = module.attention(tensor(), empty, empty, sinks=sinks, return_lse=True)
    assert (out == 0).all() and lse.equal(sinks[None, :, None].expand(2, 4, 5))
    assert (module.attention(tensor(), empty, empty, sinks=sinks) == 0).all()


CAPS = {  # how large a cap may be depends on what the exponentials are relative to
    "k4_scores_d64_window200_70": ("a finite and positive number", math.inf),
    "fwd_d128_softcap_causal": ("a positive number of at most 64", 64.5),
}


@pytest.mark.parametrize("stem", CAPS)
@pytest.mark.parametrize("softcap", [0.0, -1.0, "too large", math.nan, None, "50"])
def test_caps_that_are_none(stem: str, softcap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module, (needed, too_large) = fa3gen.load(stem), CAPS[stem]
    pretend_hopper(module, monkeypatch)
    q, k = tensor(dim=module.HEAD_DIM), tensor(seq=7, heads=2, dim=module.HEAD_DIM)
    sinks = {"sinks": torch.zeros(4)} if attention_plans()[stem].softmax.sink else {}
    with pytest.raises(ValueError, match=f"softcap is .*; it needs to be {needed}"):
        module.attention(q, k, k, softcap=too_large if softcap == "too large" else softcap, **sinks)


def test_checks_of_packed_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module = fa3gen.load(PACKED)
    pretend_hopper(module, monkeypatch)
    monkeypatch.setattr(module, "compile_for_sm90a", Launch)
    k = tensor(seq=7, heads=2, dim=128)
    assert module.attention(tensor(heads=8, dim=128), k, k).shape[2] == 8
    with pytest.raises(ValueError, match="q has 4 heads and k has 2; heads of q must be a multiple of 4 times those"):
        module.attention(tensor(heads=4, dim=128), k, k)


# Persistent modules


@pytest.mark.parametrize("stem", [DYNAMIC, STATIC, SPLIT, PERSISTENT_NARROW_V])
def test_launch_of_a_persistent_module(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides what all are given: the number of SMs, a counter or flags at zero, room for parts."""
    launch = Launch()
    monkeypatch.chdir(ROOT)
    module = fa3gen.load(stem)
    pretend_hopper(module, monkeypatch)
    monkeypatch.setattr(module, "compile_for_sm90a", lambda: launch)
    dim, v_dim = module.HEAD_DIM, getattr(module, "HEAD_DIM_V", module.HEAD_DIM)
    q, k, v = tensor(dim=dim), tensor(seq=7, heads=2, dim=dim), tensor(seq=7, heads=2, dim=v_dim)
    module.attention(q, k, v)
    sms, *scratch, scale = launch.arguments[5:]
    assert not any(x.any() for x in scratch if x.dtype == torch.int32)
    threads, vectors = attention_plans()[stem].tile.warpgroups * 128, v_dim // 8 + 1
    parts = [((SMS, threads // 32), torch.int32), ((SMS, vectors, threads, 4), torch.float32)]
    counter = [((1,), torch.int32)] * (stem == DYNAMIC)
    assert [(x.shape, x.dtype) for x in scratch] == (counter if stem in (DYNAMIC, STATIC) else parts)
    assert (scale, sms) == (dim**-0.5, SMS)


VENDORED = r"""
import importlib.util, sys

sys.modules["fa3gen"] = None  # the module must not need it
spec = importlib.util.spec_from_file_location("vendored", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["vendored"] = module
spec.loader.exec_module(module)
compiled = module.compile_for_sm90a()
assert callable(compiled) and module.compile_for_sm90a() is compiled
import cutlass.cute as cute

exec("\n".join(sys.argv[2:]), {**vars(module), sys.argv[1].removesuffix(".py"): module})
assert callable(module.compile_for_sm90a()) and module.compile_for_sm90a() is not compiled
print("compiled")
"""


def test_a_vendored_module_compiles_without_gpu_or_settings(tmp_path: Path) -> None:
    path = Path(shutil.copy(CHECKOUT.module_path("k4_2_d64"), tmp_path))
    # What the header says of compiling ahead of time, and of loading that.
    lines = [
        line.strip() for line in path.read_text().split('"""')[1].splitlines() if "compile" in line and "(" in line
    ]
    lines += [line.strip() for line in path.read_text().split('"""')[1].splitlines() if "= lambda" in line]
    assert len(lines) == 3
    kept = {name: value for name, value in os.environ.items() if name == "CUTE_DSL_LIBS" or "CUTE" not in name}
    process = subprocess.run(
        [sys.executable, "-c", VENDORED, path.name, *lines],
        env={**kept, "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "compiled"
