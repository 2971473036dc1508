"""The kernels to stand beside, without a GPU: what they are asked for, and why one of them is left out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fa3gen.design.masks import reach
from fa3gen.measure import peers
from fa3gen.measure.peers import PEERS, Unavailable
from fa3gen.spec.model import CausalMask, Mask, NoMask, WindowMask
from fa3gen.verify import reference

NAMES = ["cuDNN (torch SDPA)", "flash (torch SDPA)", "flash-attn-4", "flash-attn-3"]
INTERFACE = """
def flash_attn_func(q, k, v, causal=False, window_size=None):
    return "O", "LSE", causal, window_size
"""


def tensors(seq_q: int, seq_k: int, heads_q: int, heads_kv: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seq_q)
    shapes = ((2, seq_q, heads_q, 16), (2, seq_k, heads_kv, 16), (2, seq_k, heads_kv, 16))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def test_all_peers_are_there() -> None:
    assert [peer.name for peer in PEERS] == NAMES


@pytest.mark.parametrize("mask", [NoMask(), CausalMask()], ids=str)
@pytest.mark.parametrize(("heads_q", "heads_kv"), [(4, 4), (4, 2), (4, 1)])
def test_torch_serves_groups_of_heads(mask: Mask, heads_q: int, heads_kv: int) -> None:
    """By whichever backend there is on the CPU, which `bare` leaves open."""
    q, k, v = tensors(9, 9, heads_q, heads_kv)
    wanted = reference.attention(q, k, v, reach=reach(mask), compute_dtype=torch.float32).out
    for peer in PEERS[:2]:
        torch.testing.assert_close(peer.bare(mask)(q, k, v), wanted, rtol=1e-5, atol=1e-5)


def test_torch_is_not_compared_where_its_causal_mask_is_another_one() -> None:
    """It aligns to the top left; without a mask nothing is to align."""
    q, k, v = tensors(5, 9, 4, 2)
    for peer in PEERS[:2]:
        with pytest.raises(Unavailable, match="aligns a causal mask to the top left, the others to the bottom right"):
            peer.bare(CausalMask())(q, k, v)
        wanted = reference.attention(q, k, v, reach=reach(NoMask()), compute_dtype=torch.float32).out
        torch.testing.assert_close(peer.bare(NoMask())(q, k, v), wanted, rtol=1e-5, atol=1e-5)
        with pytest.raises(Unavailable, match="no sliding window"):
            peer.bare(WindowMask(left=5, right=0))


@pytest.mark.parametrize("place", ["flash_attn_interface.py", "flash_attn_3/flash_attn_interface.py"])
def test_flash_attention_3_is_found_wherever_it_was_installed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flash_attn_interface", "flash_attn_3", "flash_attn_3.flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(INTERFACE)
    monkeypatch.syspath_prepend(tmp_path)
    function: Any = PEERS[3].prepare(CausalMask())
    assert function(*tensors(5, 9, 4, 2)) == "O"
    for name in [name for name in sys.modules if name.startswith(("flash_attn_interface", "flash_attn_3"))]:
        del sys.modules[name]


def test_who_is_not_there_or_broken_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_exists", lambda name: False)
    with pytest.raises(Unavailable, match="flash-attn-3 is not installed"):
        PEERS[3].prepare(NoMask())
    monkeypatch.setattr(peers, "_exists", lambda name: name == "flash_attn_interface")
    monkeypatch.delitem(sys.modules, "flash_attn_interface", raising=False)
    (tmp_path / "flash_attn_interface.py").write_text("raise OSError('libcudart.so.12 is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unavailable, match=r"flash-attn-3 cannot be imported: OSError: libcudart.so.12 is missing"):
        PEERS[3].prepare(NoMask())
