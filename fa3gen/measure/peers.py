"""The kernels to stand beside: torch SDPA (cuDNN, flash), FlashAttention-4 (CuTe DSL) and FlashAttention-3.

Each takes q, k, v of shape (batch, seq, heads, d) like the generated modules, with grouped heads too, and is left out,
with a reason, where it cannot be imported or does not serve what was asked.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fa3gen.compile.loading import clean_argv
from fa3gen.spec.model import CausalMask, Mask, WindowMask

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


class Unavailable(Exception):
    """This peer cannot run here, or cannot serve what was asked; the message says why."""


@dataclass(frozen=True)
class Peer:
    """A competitor: `bare` returns a function of (q, k, v) for one mask, or raises Unavailable; the function may, too.

    It has to be called within what `setting` returns, where there is one.
    """

    name: str
    bare: Callable[[Mask], Attend]
    setting: Callable[[], contextlib.AbstractContextManager[Any]] | None = None

    def prepare(self, mask: Mask) -> Attend:
        """Return a function of (q, k, v) that can be called anywhere. Raises Unavailable."""
        attend, setting = self.bare(mask), self.setting
        if setting is None:
            return attend

        def within(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            with setting():
                return attend(q, k, v)

        return within


def _sdpa(name: str, backend_name: str) -> Peer:
    def bare(mask: Mask) -> Attend:
        if isinstance(mask, WindowMask):
            raise Unavailable("torch SDPA has no sliding window")
        causal = isinstance(mask, CausalMask)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if q.dtype.itemsize == 1:
                raise Unavailable("torch SDPA takes no tensors of 8 bits")
            if causal and q.shape[1] != k.shape[1]:
                raise Unavailable("torch SDPA aligns a causal mask to the top left, the others to the bottom right")
            heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            grouped = q.shape[2] != k.shape[2]
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(*heads_first, is_causal=causal, enable_gqa=grouped).transpose(1, 2)

        return attend

    def setting() -> contextlib.AbstractContextManager[Any]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen: contextlib.AbstractContextManager[Any] = sdpa_kernel(getattr(SDPBackend, backend_name))
        return chosen

    return Peer(name, bare, setting)


def _exists(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is not None
    except ImportError:  # of the package that it would lie in
        return False


def _flash_attn(package: str, *module_names: str) -> Callable[[Mask], Attend]:
    """FlashAttention-3 and -4 share a signature; both align their masks to the bottom right.

    The first of the modules that exists is taken.
    """

    def prepare(mask: Mask) -> Attend:
        module_name = next(filter(_exists, module_names), None)
        if module_name is None:
            raise Unavailable(f"{package} is not installed")
        try:
            with clean_argv():
                function = importlib.import_module(module_name).flash_attn_func
        except Exception as error:  # a broken installation raises anything; it must not end the benchmark
            raise Unavailable(f"{package} cannot be imported: {type(error).__name__}: {error}") from error
        keywords: dict[str, Any] = {"causal": isinstance(mask, CausalMask)}
        if isinstance(mask, WindowMask):
            keywords["window_size"] = (mask.left, mask.right)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            returned = function(q, k, v, **keywords)
            out: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
            return out

        return attend

    return prepare


PEERS: tuple[Peer, ...] = (
    _sdpa("cuDNN (torch SDPA)", "CUDNN_ATTENTION"),
    _sdpa("flash (torch SDPA)", "FLASH_ATTENTION"),
    Peer("flash-attn-4", _flash_attn("flash-attn-4", "flash_attn.cute")),
    # Built from hopper/ of the repository it is a module by itself; some builds put it into their package.
    Peer("flash-attn-3", _flash_attn("flash-attn-3", "flash_attn_interface", "flash_attn_3.flash_attn_interface")),
)
