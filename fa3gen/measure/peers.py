"""The kernels to stand beside: torch SDPA (cuDNN, flash), FlashAttention-4 (CuTe DSL) and FlashAttention-3.

Each takes q, k, v of shape (batch, seq, heads, d) like the generated modules, with grouped heads too; FlashAttention
takes packed sequences and pages, too. Who cannot be imported, or does not serve what was asked, is left out with a
reason.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fa3gen.compile.loading import clean_argv
from fa3gen.spec.model import CausalMask, Mask, WindowMask

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True)
class PackedCall:
    """A call on packed sequences, or on pages: `fa3gen.attention_packed` says what its tensors are."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    cu_seqlens_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None


AttendPacked = Callable[[PackedCall], torch.Tensor]


class Unavailable(Exception):
    """This peer cannot run here, or cannot serve what was asked; the message says why."""


@dataclass(frozen=True)
class Peer:
    """A competitor: `bare` returns a function of (q, k, v) for one mask, or raises Unavailable; the function may, too.

    It has to be called within what `setting` returns, where there is one. `packed` is the same for packed sequences.
    """

    name: str
    bare: Callable[[Mask], Attend]
    setting: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    packed: Callable[[Mask], AttendPacked] | None = None

    def prepare(self, mask: Mask) -> Attend:
        """Return a function of (q, k, v) that can be called anywhere. Raises Unavailable."""
        attend, setting = self.bare(mask), self.setting
        if setting is None:
            return attend

        def within(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            with setting():
                return attend(q, k, v)

        return within

    def prepare_packed(self, mask: Mask) -> AttendPacked:
        """Return a function of a call on packed sequences or pages. Raises Unavailable."""
        if self.packed is None:
            raise Unavailable(f"{self.name} takes no packed sequences")
        return self.packed(mask)


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


def _imported(package: str, module_names: Sequence[str]) -> Any:
    """The first of the modules that exists. Raises Unavailable where none does, or it cannot be imported."""
    module_name = next(filter(_exists, module_names), None)
    if module_name is None:
        raise Unavailable(f"{package} is not installed")
    try:
        with clean_argv():
            return importlib.import_module(module_name)
    except Exception as error:  # a broken installation raises anything; it must not end the benchmark
        raise Unavailable(f"{package} cannot be imported: {type(error).__name__}: {error}") from error


def _masked(mask: Mask) -> dict[str, Any]:
    """A mask as FlashAttention takes it; both versions align masks to the bottom right."""
    keywords: dict[str, Any] = {"causal": isinstance(mask, CausalMask)}
    if isinstance(mask, WindowMask):
        keywords["window_size"] = (mask.left, mask.right)
    return keywords


def _first(returned: Any) -> torch.Tensor:
    """O, of what FlashAttention returns."""
    out: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
    return out


def _flash_attn(package: str, *module_names: str) -> Callable[[Mask], Attend]:
    """FlashAttention-3 and -4 share a signature."""

    def prepare(mask: Mask) -> Attend:
        function, keywords = _imported(package, module_names).flash_attn_func, _masked(mask)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return _first(function(q, k, v, **keywords))

        return attend

    return prepare


def _flash_attn_packed(package: str, *module_names: str) -> Callable[[Mask], AttendPacked]:
    """The same for packed sequences and pages; version 3 takes pages as a cache, version 4 by the varlen function."""

    def prepare(mask: Mask) -> AttendPacked:
        module, keywords = _imported(package, module_names), _masked(mask)
        of_cache = getattr(module, "flash_attn_with_kvcache", None)

        def attend(call: PackedCall) -> torch.Tensor:
            q, k, v, begins, longest = call.q, call.k, call.v, call.cu_seqlens_q, call.max_seqlen_q
            if call.page_table is not None and of_cache is not None:
                where: dict[str, Any] = {"cache_seqlens": call.seqused_k, "page_table": call.page_table}
                where |= {"cu_seqlens_q": begins, "max_seqlen_q": longest}
                return _first(of_cache(q, k, v, **where, **keywords))
            where = {"cu_seqlens_q": begins, "cu_seqlens_k": call.cu_seqlens_k}
            where |= {"max_seqlen_q": longest, "max_seqlen_k": call.max_seqlen_k}
            if call.page_table is not None:
                where |= {"page_table": call.page_table, "seqused_k": call.seqused_k}
            return _first(module.flash_attn_varlen_func(q, k, v, **where, **keywords))

        return attend

    return prepare


_FA4 = "flash-attn-4", "flash_attn.cute"
# Built from hopper/ of the repository it is a module by itself; some builds put it into their package.
_FA3 = "flash-attn-3", "flash_attn_interface", "flash_attn_3.flash_attn_interface"

PEERS: tuple[Peer, ...] = (
    _sdpa("cuDNN (torch SDPA)", "CUDNN_ATTENTION"),
    _sdpa("flash (torch SDPA)", "FLASH_ATTENTION"),
    Peer("flash-attn-4", _flash_attn(*_FA4), packed=_flash_attn_packed(*_FA4)),
    Peer("flash-attn-3", _flash_attn(*_FA3), packed=_flash_attn_packed(*_FA3)),
)
