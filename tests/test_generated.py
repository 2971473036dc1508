"""The Python entry points of generated modules, without a GPU: arguments, messages, empty tensors, compilation."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rendering import CHECKOUT, ROOT, STEMS, plans, source

import fa3gen
from fa3gen.errors import UserError

NO_LSE = "k4_2_o_only_d128_causal"
NARROW_V, PACKED = "fwd_d192_128_window", "fwd_d128_pack4_causal"
# Persistent ones: tiles from a counter, tiles dealt out, the last of them in shares, a head dim of v's own.
DYNAMIC, STATIC, SPLIT, PERSISTENT_NARROW_V = "fwd_d64_causal", "fwd_d64_short", "fwd_d64", "fwd_d192_128"


@pytest.fixture(params=["k4_2_d64", "k1_d64"])
def loaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module on WGMMA and a naive one, as a user gets them."""
    monkeypatch.chdir(ROOT)
    return fa3gen.load(request.param)


@pytest.fixture
def module(loaded: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module on a machine where every device passes for a Hopper GPU, and where a launch is an error."""
    pretend_hopper(loaded, monkeypatch)
    return loaded


def pretend_hopper(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_launch() -> Callable[..., None]:
        pytest.fail("nothing is to be launched here")

    monkeypatch.setattr(module, "check_device", lambda name, device: None)
    monkeypatch.setattr(module, "compile_for_sm90a", no_launch)


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
    assert str(caught.value) == "q is on cpu; it needs to be on a Hopper GPU"


def test_other_gpus_are_refused(loaded: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {0: (9, 0), 1: (10, 0)}[device.index])
    check = loaded.check_device.__wrapped__
    assert check("q", torch.device("cuda", 0)) is None
    with pytest.raises(ValueError) as caught:
        check("q", torch.device("cuda", 1))
    assert str(caught.value) == "q is on a GPU of compute capability (10, 0); this kernel needs 9.0 (H100, H200)"


# Arguments. The first group is checked before the device, the second where the device has passed.

BEFORE_THE_DEVICE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": None}, TypeError, "q is a NoneType; it needs to be a torch.Tensor"),
    ({"q": [[0.0]]}, TypeError, "q is a list; it needs to be a torch.Tensor"),
    (
        {"q": tensor(dtype=torch.float16)},
        TypeError,
        "q has dtype torch.float16; this kernel was generated for torch.bfloat16",
    ),
    ({"q": tensor()[0]}, ValueError, "q has shape (5, 4, 64); it needs to be (batch, seq, heads, 64)"),
    ({"q": tensor(dim=128)}, ValueError, "q has shape (2, 5, 4, 128); it needs to be (batch, seq, heads, 64)"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BEFORE_THE_DEVICE)
def test_wrong_tensors_are_named_on_any_machine(
    loaded: ModuleType, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        loaded.attention(**arguments(**changes))
    assert str(caught.value) == message


def misaligned(*shape: int) -> Any:
    """A tensor that starts 2 bytes past a multiple of 16."""
    return torch.zeros(math.prod(shape) + 8, dtype=torch.bfloat16)[1 : 1 + math.prod(shape)].view(shape)


# Rows of 68 elements: 136 bytes are no multiple of 16.
NARROW = torch.zeros(2, 7, 2, 68, dtype=torch.bfloat16)[..., :64]
SCATTERED = tensor(dim=128)[..., ::2]

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"k": "K"}, TypeError, "k is a str; it needs to be a torch.Tensor"),
    (
        {"v": tensor(dtype=torch.float32)},
        TypeError,
        "v has dtype torch.float32; this kernel was generated for torch.bfloat16",
    ),
    ({"v": tensor(dim=32)}, ValueError, "v has shape (2, 5, 4, 32); it needs to be (batch, seq, heads, 64)"),
    ({"k": tensor().to("meta")}, ValueError, "k is on meta; q is on cpu"),
    ({"out": tensor().to("meta")}, ValueError, "out is on meta; q is on cpu"),
    (
        {"q": SCATTERED},
        ValueError,
        "q has stride 2 in its last dimension; it needs 1: pass q.contiguous()",
    ),
    (
        {"out": SCATTERED},
        ValueError,
        "out has stride 2 in its last dimension; it needs 1: pass out.contiguous()",
    ),
    (
        {"k": NARROW},
        ValueError,
        "k has strides (952, 136, 68, 1); all but the last need to be multiples of 8 elements (16 bytes)",
    ),
    (
        {"v": misaligned(2, 7, 2, 64)},
        ValueError,
        "v starts at an address that is 2 bytes past a multiple of 16; it needs 0",
    ),
    ({"k": tensor(batch=3, heads=2)}, ValueError, "k has batch 3 (dimension 0); q has 2"),
    ({"v": tensor(seq=6, heads=2)}, ValueError, "v has shape (2, 6, 2, 64); it needs that of k, (2, 7, 2, 64)"),
    ({"v": tensor(seq=7, heads=1)}, ValueError, "v has shape (2, 7, 1, 64); it needs that of k, (2, 7, 2, 64)"),
    (
        {"q": tensor(heads=3)},
        ValueError,
        "q has 3 heads and k has 2; heads of q must be a multiple of those of k",
    ),
    (
        {"k": tensor(seq=7, heads=0), "v": tensor(seq=7, heads=0)},
        ValueError,
        "q has 4 heads and k has 0; heads of q must be a multiple of those of k",
    ),
    ({"out": 1}, TypeError, "out is a int; it needs to be a torch.Tensor"),
    (
        {"out": tensor(dtype=torch.float32)},
        TypeError,
        "out has dtype torch.float32; this kernel was generated for torch.bfloat16",
    ),
    ({"out": tensor(seq=6)}, ValueError, "out has shape (2, 6, 4, 64); it needs that of q, (2, 5, 4, 64)"),
    (
        {"out": tensor(heads=1).expand(2, 5, 4, 64)},
        ValueError,
        "out has strides (320, 64, 0, 1): several elements share one address; pass out.contiguous()",
    ),
    ({"scale": "1"}, TypeError, "scale is a str; it needs to be a number"),
    ({"scale": torch.tensor(1.0)}, TypeError, "scale is a Tensor; it needs to be a number"),
    ({"scale": 0}, ValueError, "scale is 0; it needs to be finite and positive"),
    ({"scale": -0.5}, ValueError, "scale is -0.5; it needs to be finite and positive"),
    ({"scale": math.nan}, ValueError, "scale is nan; it needs to be finite and positive"),
    ({"scale": math.inf}, ValueError, "scale is inf; it needs to be finite and positive"),
    *(
        (
            {name: tensor(seq=seq, heads=heads).requires_grad_()},
            ValueError,
            "q, k or v requires grad; this kernel is forward only: call it under torch.no_grad()",
        )
        for name, seq, heads in (("q", 5, 4), ("k", 7, 2), ("v", 7, 2))
    ),
]


@pytest.mark.parametrize(("changes", "kind", "message"), [*BEFORE_THE_DEVICE, *WRONG])
def test_wrong_arguments_are_named(
    module: ModuleType, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        module.attention(**arguments(**changes))
    assert str(caught.value) == message


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
def test_right_arguments_pass(module: ModuleType, changes: dict[str, Any]) -> None:
    given = arguments(**changes)
    module.check_arguments(given["q"], given["k"], given["v"], given.get("scale"), given.get("out"))


def test_grad_is_no_matter_without_autograd(module: ModuleType) -> None:
    q, k, v = (argument.requires_grad_() for argument in arguments().values())
    with torch.no_grad():
        module.check_arguments(q, k, v, None, None)


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
    q, k, v, out, lse, *scores, last = launch.arguments
    assert all(passed is mine for passed, mine in zip((q, k, v), given.values(), strict=True))
    assert (out.shape, out.dtype, out.is_contiguous()) == (q.shape, q.dtype, True)
    assert (lse.shape, lse.dtype) == ((2, 4, 5 if return_lse else 0), torch.float32)
    assert last == factor
    assert [tuple(x.shape) for x in scores] == ([(2, 4, 5, 7)] if hasattr(module, "scores_kernel") else [])
    if return_lse:
        assert result[0] is out and result[1] is lse
    else:
        assert result is out


def test_launch_into_a_given_tensor(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, given = Launch(), tensor(dim=128)[..., :64]
    monkeypatch.setattr(module, "compile_for_sm90a", lambda: launch)
    assert module.attention(**arguments(), out=given) is given
    assert launch.arguments[3] is given


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


def entry_points(stem: str) -> str:
    """The argument checks and what follows them; those of persistent modules stand in `attention` itself."""
    text = source(stem)
    if not plans()[stem].tiles.persistent:
        return text[text.index("\ndef check_arguments(") :]
    checks, called = text.index("# What the compiled function lets pass"), text.index("    device = q.device")
    return text[checks:called] + text[text.index("\ndef prototype(") :]


def test_all_modules_check_alike() -> None:
    """What is tested here on few modules holds for all: the checks are the same text, in terms of the constants.

    Modules with a head dim of v's own, or packs of heads, have checks of their own, tested below; and so have
    persistent modules, which leave to the compiled function what it checks itself.
    """
    persistent = {stem for stem, plan in plans().items() if plan.tiles.persistent}
    own = {stem for stem, plan in plans().items() if plan.problem.asymmetric or plan.tile.packed} - persistent
    assert own == {NARROW_V, PACKED, "fwd_d64_pack8_window"} and own | persistent < set(STEMS)
    assert {entry_points(stem) for stem in set(STEMS) - own - persistent} == {entry_points("k4_2_d64")}
    assert persistent >= {DYNAMIC, STATIC, PERSISTENT_NARROW_V}
    dynamic = {stem for stem in persistent if plans()[stem].tiles.dynamic}
    split = {stem for stem in persistent if plans()[stem].tiles.split}
    assert {entry_points(stem) for stem in dynamic} == {entry_points(DYNAMIC)}
    assert {entry_points(stem) for stem in split} == {entry_points(SPLIT)}
    assert {entry_points(stem) for stem in persistent - dynamic - split} == {entry_points(STATIC)}
    assert all(entry_points(stem).startswith(entry_points(STATIC)) for stem in (DYNAMIC, SPLIT))
    assert entry_points(STATIC) != entry_points("k4_2_d64")


def test_checks_of_a_head_dim_of_its_own_for_v(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module = fa3gen.load(NARROW_V)
    pretend_hopper(module, monkeypatch)
    launch = Launch()
    monkeypatch.setattr(module, "compile_for_sm90a", lambda: launch)
    q, k, v = tensor(dim=192), tensor(seq=7, heads=2, dim=192), tensor(seq=7, heads=2, dim=128)
    out = module.attention(q, k, v)
    assert out.shape == (*q.shape[:3], 128) and out is launch.arguments[3]
    for name, given in {
        "v has shape .*needs to be .*, 128": {"v": k},
        "k has shape .*needs to be .*, 192": {"k": v},
        "out has shape .*needs to be .*, 128": {"out": torch.empty_like(q)},
        "up to head_dim it needs that of k": {"v": v[:, :-1]},
        "up to head_dim it needs that of q": {"out": torch.empty_like(out)[:, :-1]},
    }.items():
        with pytest.raises(ValueError, match=name):
            module.attention(**{"q": q, "k": k, "v": v, **given})


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


SMS = 5


def load_persistent(stem: str, monkeypatch: pytest.MonkeyPatch, launch: Any) -> ModuleType:
    """A persistent module on a machine where every device passes for a Hopper GPU with SMS SMs."""
    monkeypatch.chdir(ROOT)
    module = fa3gen.load(stem)
    monkeypatch.setattr(module, "launch_constants", lambda device: (SMS, torch.empty(1, 1, 0)))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)  # the default stream
    monkeypatch.setattr(module, "compile_for_sm90a", launch)
    return module


def no_launch() -> Callable[..., None]:
    pytest.fail("nothing is to be launched here")


@pytest.fixture(params=[DYNAMIC, STATIC])
def persistent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_persistent(request.param, monkeypatch, no_launch)


NEEDED = "it needs to be (batch, seq, heads, head_dim)"
WRONG_FOR_PERSISTENT: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": None}, TypeError, "q is a NoneType; it needs to be a torch.Tensor"),
    ({"k": "K"}, TypeError, "k is a str; it needs to be a torch.Tensor"),
    ({"v": [[0.0]]}, TypeError, "v is a list; it needs to be a torch.Tensor"),
    ({"out": 1}, TypeError, "out is a int; it needs to be a torch.Tensor"),
    ({"q": tensor()[0]}, ValueError, f"q has shape (5, 4, 64); {NEEDED}"),
    ({"k": tensor(heads=2)[0]}, ValueError, f"k has shape (5, 2, 64); {NEEDED}"),
    *(
        ({"scale": scale}, ValueError, f"scale is {scale!r}; it needs to be a finite and positive number")
        for scale in ("1", torch.tensor(1.0), 0, -0.5, math.nan, math.inf)
    ),
    *(
        (changes, kind, message)
        for changes, kind, message in WRONG
        if " requires grad" in message or " heads and k has " in message or "share one" in message
    ),
]


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG_FOR_PERSISTENT)
def test_wrong_arguments_of_a_persistent_module(
    persistent: ModuleType, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind) as caught:
        persistent.attention(**arguments(**changes))
    assert str(caught.value) == message


@pytest.mark.parametrize("changes", RIGHT)
def test_right_arguments_pass_a_persistent_module(
    persistent: ModuleType, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch()
    monkeypatch.setattr(persistent, "compile_for_sm90a", lambda: launch)
    assert persistent.attention(**arguments(**changes)) is launch.arguments[3]
    assert changes.get("out", launch.arguments[3]) is launch.arguments[3]


def test_grad_is_no_matter_to_a_persistent_module_without_autograd(
    persistent: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (argument.requires_grad_() for argument in arguments().values())
    monkeypatch.setattr(persistent, "compile_for_sm90a", Launch)
    with torch.no_grad():
        assert not persistent.attention(q, k, v).requires_grad


@pytest.mark.parametrize(("batch", "seq_q", "heads"), [(0, 5, 4), (2, 0, 4), (2, 5, 0)])
def test_empty_results_of_a_persistent_module(persistent: ModuleType, batch: int, seq_q: int, heads: int) -> None:
    q, k = tensor(batch, seq_q, heads), tensor(batch, 7, heads // 2)
    out, lse = persistent.attention(q, k, k, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (batch, heads, seq_q), torch.float32)


def test_a_persistent_module_without_keys(persistent: ModuleType) -> None:
    q, k = tensor(), tensor(seq=0, heads=2)
    given = torch.full_like(q, math.nan)
    out, lse = persistent.attention(q, k, k, out=given, return_lse=True)
    assert out is given and torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full((2, 4, 5), -math.inf))


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
def test_a_call_that_launches_nothing_is_checked(persistent: ModuleType, changes: dict[str, Any], message: str) -> None:
    """By the module itself: the compiled function, which checks these otherwise, is not called."""
    no_keys = {"k": tensor(seq=0, heads=2), "v": tensor(seq=0, heads=2)}
    with pytest.raises(ValueError) as caught:
        persistent.attention(**arguments(**{**no_keys, **changes}))
    assert str(caught.value) == message


@pytest.mark.parametrize("stem", [DYNAMIC, STATIC, SPLIT, PERSISTENT_NARROW_V])
@pytest.mark.parametrize("return_lse", [False, True])
def test_launch_of_a_persistent_module(stem: str, return_lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs as the kernel writes them, a counter or flags at zero, room for parts, the scale, the number of SMs."""
    launch = Launch()
    module = load_persistent(stem, monkeypatch, lambda: launch)
    dim, v_dim = module.HEAD_DIM, getattr(module, "HEAD_DIM_V", module.HEAD_DIM)
    q, k, v = tensor(dim=dim), tensor(seq=7, heads=2, dim=dim), tensor(seq=7, heads=2, dim=v_dim)
    result = module.attention(q, k, v, return_lse=return_lse)
    *inputs, out, lse, sms = launch.arguments[:6]
    *scratch, scale = launch.arguments[6:]
    assert inputs[0] is q and inputs[1] is k and inputs[2] is v
    assert (out.shape, out.dtype, out.is_contiguous()) == ((2, 5, 4, v_dim), q.dtype, True)
    # Without rows its other sizes are no matter: one tensor serves all calls that ask for none.
    assert (lse.shape, lse.dtype) == ((2, 4, 5) if return_lse else (1, 1, 0), torch.float32)
    assert lse.is_contiguous() and lse.untyped_storage().nbytes() == 4 * lse.numel()
    assert not any(x.any() for x in scratch if x.dtype == torch.int32)
    threads, vectors = plans()[stem].tile.warpgroups * 128, v_dim // 8 + 1
    parts = [((SMS, threads // 32), torch.int32), ((SMS, vectors, threads, 4), torch.float32)]
    counter = [((1,), torch.int32)] * (stem == DYNAMIC)
    assert [(x.shape, x.dtype) for x in scratch] == (counter if stem in (DYNAMIC, STATIC) else parts)
    assert (scale, sms) == (dim**-0.5, SMS)
    assert (result[0] is out and result[1] is lse) if return_lse else result is out


@pytest.mark.parametrize("stem", [DYNAMIC, SPLIT])
def test_only_launches_of_the_default_stream_share_memory(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters, or flags and parts, of launches on other streams are their own: these may belong to a graph."""
    monkeypatch.chdir(ROOT)
    module = fa3gen.load(stem)
    stream, device = 0, torch.device("cpu")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stream, raising=False)

    def made() -> tuple[torch.Tensor, ...]:
        return (module.tile_counter(device),) if stem == DYNAMIC else module.flags_and_parts(device, 3)

    first = made()
    assert not first[0].any() and first[0].dtype == torch.int32
    assert all(x is y for x, y in zip(first, made(), strict=True))
    stream = 7
    others = [*made(), *made()]
    assert len({id(tensor) for tensor in (*first, *others)}) == 3 * len(first)
    stream = 0
    assert all(x is y for x, y in zip(first, made(), strict=True))


def test_output_of_a_persistent_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a given tensor, or a new contiguous one for any strides of q."""
    launch, given = Launch(), tensor(dim=128)[..., :64]
    module = load_persistent(STATIC, monkeypatch, lambda: launch)
    assert module.attention(**arguments(), out=given) is given and launch.arguments[3] is given
    monkeypatch.setattr(module, "compile_for_sm90a", Launch)
    q = torch.zeros(2, 4, 5, 64, dtype=torch.bfloat16).transpose(1, 2)
    assert module.attention(**arguments(q=q)).is_contiguous()


def test_sms_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    constants = fa3gen.load(STATIC).launch_constants.__wrapped__
    gpus = {0: SimpleNamespace(major=9, minor=0, multi_processor_count=132), 1: SimpleNamespace(major=10, minor=3)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpus[device.index])
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: (shape, dtype, device))
    first = torch.device("cuda", 0)
    assert constants(first) == (132, ((1, 1, 0), torch.float32, first))
    for device, message in {
        torch.device("cpu"): "q is on cpu; it needs to be on a Hopper GPU",
        torch.device("cuda", 1): "q is on a GPU of compute capability 10.3; it needs 9.0 (H100, H200)",
    }.items():
        with pytest.raises(ValueError) as caught:
            constants(device)
        assert str(caught.value) == message


def test_a_persistent_module_refuses_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    module = fa3gen.load(DYNAMIC)
    monkeypatch.setattr(module, "compile_for_sm90a", Launch)
    with pytest.raises(ValueError, match="^q is on cpu; it needs to be on a Hopper GPU$"):
        module.attention(**arguments())


VENDORED = """
import importlib.util, sys

sys.modules["fa3gen"] = None  # the module must not need it
spec = importlib.util.spec_from_file_location("vendored", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["vendored"] = module
spec.loader.exec_module(module)
compiled = module.compile_for_sm90a()
assert callable(compiled) and module.compile_for_sm90a() is compiled
print("compiled")
"""


def test_a_vendored_module_compiles_without_gpu_or_settings(tmp_path: Path) -> None:
    path = shutil.copy(CHECKOUT.module_path("k4_2_d64"), tmp_path / "vendored.py")
    kept = {name: value for name, value in os.environ.items() if name == "CUTE_DSL_LIBS" or "CUTE" not in name}
    process = subprocess.run(
        [sys.executable, "-c", VENDORED, str(path)],
        env={**kept, "CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "compiled"
