"""Calls that say in how many parts keys come: the entry point of a module that splits them, told another number.

A generated module counts parts by itself, in its `attention`: for dense tensors its function `parts_of` follows from
lengths and SMs, for packed sequences there is a share for each of the SMs that its function `packed_constants` finds.
What it launches takes any number of either. So a copy of `attention` is made in which that one function is another. It
has names of its own, and shares all else with the module, whose file and other calls stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from fa3gen.design.splits import parts_asked, shares_asked
from fa3gen.design.tile_order import heads_in_a_tile

Attention = Callable[..., Any]

MOST_ELEMENTS = 2**31 - 1  # of a tensor that kernels count in 32 bits
KEPT = 1024  # entry points for as many numbers of CTAs, of each module and number of parts


@functools.lru_cache(maxsize=KEPT)
def in_parts(module: ModuleType, asked: int) -> Attention:
    """The `attention` of a module with `split: {count: auto}`, for `asked` parts of the keys of a tile of queries.

    Of dense tensors these are whole tiles of keys, equally many, so that there may be fewer. Of packed sequences so
    many in the mean: as many CTAs, times tiles of queries, have equal shares of all keys. There are fewer, too, where a
    launch has no room for as many.
    """
    return _of_dense(module, asked) if hasattr(module, "parts_of") else _of_shares(module, asked)


def _of_dense(module: Any, asked: int) -> Attention:
    """With the number of parts that is asked for in place of the one that follows from SMs."""
    tile, positions, places = module.TILE_N, module.POSITIONS, module.GRID_MAX

    @functools.lru_cache(maxsize=KEPT)
    def up_to(most: int) -> Attention:
        """The entry point for no more parts than these, however many tiles of queries and SMs there are."""
        return with_names(module.attention, parts_of=lambda seq_k, *_: parts_asked(-(-seq_k // tile), most))

    @functools.wraps(module.attention)
    def divided(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        batch, seq_q, heads_q, _ = q.shape
        in_grid = max(places // max(-(-seq_q // positions), 1), 1)
        return up_to(min(asked, in_grid, counted(batch * seq_q * heads_q * v.shape[3])))(q, k, v, **options)

    return divided


def _of_shares(module: Any, asked: int) -> Attention:
    """With as many CTAs as tiles of queries ask for in place of one on each SM."""
    constants, positions, words = module.packed_constants, module.POSITIONS, module.CTA_WORDS
    on_an_sm = getattr(module, "CTAS_PER_SM", 1)

    @functools.lru_cache(maxsize=KEPT)
    def on(ctas: int) -> Attention:
        """The entry point for so many CTAs, or as many more as always share an SM."""
        sms = -(-ctas // on_an_sm)
        return with_names(module.attention, packed_constants=lambda gpu: (sms, *constants(gpu)[1:]))

    @functools.wraps(module.attention)
    def divided(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, *others: Any, **options: Any) -> Any:
        heads, of_tile, sequences = v.shape[-2], positions, cu_seqlens_q.shape[0] - 1
        if hasattr(module, "PACKS"):  # calls decide how many heads a tile holds, all of a kv head or packs of them
            group = max(q.shape[1] // (heads or 1), 1)
            pack = heads_in_a_tile(module.PACKS, module.TILE_M, group, -(-q.shape[0] // max(sequences, 1)))
            heads, of_tile = heads * -(-group // pack), module.TILE_M // pack
        ctas = shares_asked(asked, q.shape[0], sequences, heads, of_tile)
        ctas = min(ctas, counted(words * on_an_sm) * on_an_sm)
        return on(max(ctas, 1))(q, k, v, cu_seqlens_q, *others, **options)

    return divided


def counted(elements: int) -> int:
    """Parts of so many elements of float32 each that kernels count in 32 bits; one at least."""
    return max(MOST_ELEMENTS // max(elements, 1), 1)


def with_names(function: Any, **names: Any) -> Attention:
    """A copy of a function, for which these names of its module mean something else; all others are the module's."""
    code, names = function.__code__, {**function.__globals__, **names}
    copied = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(copied, function)
