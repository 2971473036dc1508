"""On a machine with a Hopper GPU: caches of 8 bits with windows, sinks and caps, as models ask for them.

By whatever dispatch chooses, or else by what the call renders: `pytest tests/gpu/test_eight_bit_scores_on_gpu.py`
compiles about a dozen modules. What is expected is attention in float64 to what the 8 bits stand for, times factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fa3gen import flash_attn_interface as fa3
from fa3gen.design.workspace import Workspace
from fa3gen.run.eight_bits import FACTORS
from fa3gen.verify import reference

WORKSPACE = Workspace.find(Path(__file__).parent)
E4M3 = torch.float8_e4m3fn
TOLERANCE = {torch.bfloat16: 0.01, E4M3: 0.06}  # of O, by q's dtype: P has 8 bits beside q of 16, and 4 beside q of 8
BATCH, ROOM, PAGE = 5, 2048, 16


class Model(NamedTuple):
    """Head dim, query and kv heads, and what a call says of its mask and scores."""

    dim: int
    heads: tuple[int, int]
    window: tuple[int, int] = (-1, -1)
    sinks: bool = False
    softcap: float = 0.0


MODELS = {
    "Mistral": Model(128, (32, 8), window=(900, 0)),
    "GPT-OSS, windows": Model(64, (64, 8), window=(127, 0), sinks=True),
    "GPT-OSS, all keys": Model(64, (64, 8), sinks=True),
    "Gemma 2": Model(256, (8, 4), window=(1000, 0), softcap=50.0),
    "Gemma 3": Model(256, (8, 4), window=(511, 0)),
}


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where specs are found, with FA3GEN_RENDER=1."""
    monkeypatch.chdir(WORKSPACE.root)
    monkeypatch.setattr(fa3, "RENDER", True)
    with torch.no_grad():
        yield


def expected(
    model: Model, given: tuple[torch.Tensor, ...], used: torch.Tensor, of: dict[str, Any], sinks: torch.Tensor | None
) -> reference.Attention:
    """O and LSE of each sequence, in float64, with the factors in q, k and v; causal, or with the window."""
    reach = (None, 0) if model.window[0] < 0 else model.window
    parts = []
    for i, keys in enumerate(used.tolist()):
        q, k, v = (
            x[i : i + 1, : keys if name != "q_descale" else None] for name, x in zip(FACTORS, given, strict=True)
        )
        wide = []
        for name, x in zip(FACTORS, (q, k, v), strict=True):
            factor = of[name][i].double() if name in of else torch.ones(model.heads[1], device=x.device).double()
            wide.append(x.double() * factor.repeat_interleave(x.shape[2] // model.heads[1])[:, None])
        facts: dict[str, Any] = {"reach": reach, "sinks": sinks, "softcap": model.softcap or None}
        parts.append(reference.attention(*wide, **facts))
    return reference.Attention(torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "pages"])
@pytest.mark.parametrize("seq_q", [1, 100])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, seq_q: int, paged: bool, dtype: torch.dtype, hopper: torch.device) -> None:
    """A cache, contiguous and in pages that lie in any order; decoding steps and chunks of prompts."""
    model, generator = MODELS[name], torch.Generator(hopper).manual_seed(seq_q)
    (heads_q, heads_kv), dim = model.heads, model.dim

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=hopper)

    q = (2 * drawn(BATCH, seq_q, heads_q, dim)).to(dtype)
    k, v = (drawn(BATCH, ROOM, heads_kv, dim).to(E4M3) for _ in range(2))
    of: dict[str, Any] = {
        factor: torch.rand(BATCH, heads_kv, generator=generator, device=hopper) + 0.5
        for factor in (FACTORS if dtype == E4M3 else FACTORS[1:])
    }
    sinks = drawn(heads_q) if model.sinks else None
    used = torch.tensor([ROOM, 700, seq_q, 1500, 900], dtype=torch.int32, device=hopper)
    options: dict[str, Any] = {"cache_seqlens": used, "causal": True, "window_size": model.window, "s_aux": sinks}
    options |= {"softcap": model.softcap, "return_softmax_lse": True, **of}
    caches = k, v
    if paged:
        order = torch.randperm(BATCH * ROOM // PAGE, device=hopper)
        caches = tuple(x.view(-1, PAGE, *x.shape[2:]).view(torch.uint8)[order].view(E4M3) for x in (k, v))
        options["page_table"] = order.argsort().int().view(BATCH, -1)
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, *caches, **options)
    wanted = expected(model, (q, k, v), used, of, sinks)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - wanted.out).norm() / wanted.out.norm()).item() < TOLERANCE[dtype]
    torch.testing.assert_close(lse.double(), wanted.lse, rtol=1e-3, atol=2e-3)  # tanh.approx is off by 2^-11 of itself
