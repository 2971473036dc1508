"""What is launched for packed sequences and pages without a key: K and V of the dtypes and dims that were compiled for.

TMA wants an address of both, of which no row is read. They are host code alone, so that nothing is compiled here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rendering import CHECKOUT, changed

from fa3gen.cpu.module import load_on_cpu
from fa3gen.generate.render import render_variant

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
WIDE_V = {"problem": {"head_dim": 64, "head_dim_v": 128}}
KINDS: dict[str, tuple[str, dict[str, Any], torch.dtype, torch.dtype, tuple[int, int]]] = {
    "as committed": ("d128_causal", {}, BF16, BF16, (128, 128)),
    "V narrower": ("d192_128_causal", {}, BF16, BF16, (192, 128)),
    "V wider": ("d128_causal", WIDE_V, BF16, BF16, (64, 128)),
    "V wider, O in float32": ("d128_causal", {**WIDE_V, "o": {"dtype": "fp32"}}, BF16, BF16, (64, 128)),
    "K and V of 8 bits": ("kv8_d128_causal", {}, BF16, E4M3, (128, 128)),
    "K and V of 8 bits, V wider": ("kv8_d128_causal", WIDE_V, BF16, E4M3, (64, 128)),
    "all of 8 bits": ("fp8_d128_causal", {}, E4M3, E4M3, (128, 128)),
    "all of 8 bits, of two kinds": ("fp8_d128_causal", {"kv": {"dtype": "e5m2"}}, E4M3, E5M2, (128, 128)),
}


def stem_of(layout: str, kind: str) -> str:
    """`d128_causal` of a layout is `fwd_packed_d128_causal`, and `fp8_d128_causal` is `fwd_fp8_packed_d128_causal`."""
    before, rest = ("fp8_", kind.removeprefix("fp8_")) if kind.startswith("fp8_") else ("", kind)
    return f"fwd_{before}{layout}_{rest}"


@pytest.mark.parametrize("layout", ["packed", "paged"])
@pytest.mark.parametrize("name", KINDS)
def test_k_and_v_are_as_compiled_for(name: str, layout: str, tmp_path: Path) -> None:
    kind, parts, q_dtype, kv_dtype, (dim, v_dim) = KINDS[name]
    path = tmp_path / "asked.py"
    path.write_text(render_variant(changed(stem_of(layout, kind), **parts), CHECKOUT), encoding="utf-8")
    module, launches = load_on_cpu(path), []
    module.compile_for_sm90a = lambda: lambda *given: launches.append(dict(zip(module.cpu.names, given, strict=False)))
    q, ends = torch.ones(5, 4, dim).to(q_dtype), torch.tensor([0, 5], dtype=torch.int32)
    k, v = (torch.empty(0, 2, width, dtype=kv_dtype) for width in (dim, v_dim))
    if layout == "packed":
        module.attention(q, k, v, ends, 0 * ends)
    else:
        table, used = torch.zeros((1, 3), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        module.attention(q, k[:, None].expand(-1, 16, -1, -1), v[:, None].expand(-1, 16, -1, -1), ends, table, used)
    [launched] = launches
    for x, width in ((launched["k"], dim), (launched["v"], v_dim)):
        assert x.dtype == kv_dtype and x.shape[-2:] == (2, width) and x.numel() and x.stride(-1) == 1
        assert x.ndim == (3 if layout == "packed" else 4)
    assert launched["k"].shape[:-1] == launched["v"].shape[:-1]
