"""The inputs that modules with K and V in pages are verified on: those for packed sequences, with their keys in pages.

Pages lie in any order, others between them, and what no sequence uses of them is spoiled as rows of packed tensors are;
what the table says behind a sequence's last page names no page at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, Literal

import torch

from fa3gen.design import footprint
from fa3gen.design.family import PagedShape
from fa3gen.spec.model import Forward
from fa3gen.verify import inputs, packed_inputs
from fa3gen.verify.inputs import Part
from fa3gen.verify.packed_inputs import INT_MAX, PackedCase, PackedInputs

# How k and v lie: in tensors of their own; side by side, a page of each in turn; or heads before the rows of a page.
Storage = Literal["apart", "interleaved", "heads_first"]
STORAGES: tuple[Storage, ...] = ("apart", "interleaved", "heads_first")
SPARE_PAGES = 3
NO_PAGES = (INT_MAX, -1, -INT_MAX - 1, 2**20)  # what a table says where there is no page


@dataclass(frozen=True)
class PagedCase(PackedCase):
    """A PackedCase with its keys in pages of `page` rows; `offsets_k` say no more than how many each sequence has.

    `filled`: all pages hold ordinary numbers, and nothing is spoiled. `lies`: the table names pages that are not there,
    and lengths are more than it has room for, or less than none.
    """

    page: int = 16
    storage: Storage = "apart"
    filled: bool = False
    lies: bool = False

    @property
    def shape(self) -> str:
        """Shapes in a few words, and the page size."""
        return f"{super().shape} pages of {self.page}"

    @property
    def lengths_k(self) -> list[int]:
        """Keys of each sequence."""
        return [end - begin for _, (begin, end) in self.spans]

    @property
    def columns(self) -> int:
        """Entries of the table for a sequence: as many as any needs that has all keys, and one more."""
        return -(-self.seq_k // self.page) + 1

    @property
    def pages(self) -> int:
        """As many as any sequences need that have these keys, and some more."""
        return self.columns + len(self.offsets_k) + SPARE_PAGES


@dataclass(frozen=True, kw_only=True)
class PagedInputs(PackedInputs):
    """Tensors of one case: q and out as of packed sequences, k (pages, page, heads_kv, d), v (.., d_v)."""

    page_table: torch.Tensor

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """What the entry point is called with, by name."""
        return {**super().given, "page_table": self.page_table}

    @property
    def shape(self) -> PagedShape:
        """Extents of the call, of rows that are in use."""
        lengths_q = tuple(end - begin for (begin, end), _ in self.spans)
        _, page, heads_kv, _ = self.k.shape
        return PagedShape(lengths_q, tuple(self._lengths()), self.q.shape[1], heads_kv, page=page)

    @property
    def parts(self) -> list[Part]:
        """Sequences with queries; a part without rows where there are none."""
        found = [
            (
                self.values("q", self.q[slice(*span)], number),
                self.values("k", self._rows(self.k, table, keys), number),
                self.values("v", self._rows(self.v, table, keys), number),
            )
            for number, ((span, _), table, keys) in enumerate(
                zip(self.spans, self.page_table, self._lengths(), strict=True)
            )
            if span[0] < span[1]
        ]
        nothing = self.page_table.new_empty(0)
        none = [self.values(name, self._rows(pages, nothing, 0), 0) for name, pages in (("k", self.k), ("v", self.v))]
        return found or [(self.values("q", self.q[:0], 0), none[0], none[1])]

    def _lengths(self) -> list[int]:
        """Keys of each sequence, no more than its table has room for.

        Counted on the host: a tensor of the device would take the memory that a runner has left for the next LSE.
        """
        assert self.seqused_k is not None
        most = self.page_table.shape[1] * self.k.shape[1]
        return [min(max(keys, 0), most) for keys in self.seqused_k.tolist()]

    def _rows(self, pages: torch.Tensor, table: torch.Tensor, keys: int) -> torch.Tensor:
        """The rows of a sequence one behind the other, (keys, heads, d); zeros where there is no such page."""
        pages = pages.to(self.stands_for)
        count, page, *_ = pages.shape
        number = torch.arange(keys, device=pages.device)
        at = table.long()[number // page]
        found = pages[at.clamp(0, count - 1), number % page]
        found[(at < 0) | (at >= count)] = 0
        return found


def in_pages(cases: Iterable[PackedCase], spec: Forward) -> Iterator[PagedCase]:
    """The cases with their keys in pages, of sizes and in storage that change from one to the next."""
    least = footprint.page_rows(spec) or 1
    most = -(-2 * spec.tile.kv // least) * least  # more than a tile of keys
    sizes = cycle((least, 3 * least, most, 4 * least))
    for case, page, storage in zip(cases, sizes, cycle(STORAGES), strict=False):
        yield PagedCase(**vars(case), page=page, storage=storage)


def cpu_cases(spec: Forward) -> tuple[PagedCase, ...]:
    """The cases for the CPU model of sm_90a: those of packed sequences in pages, and a table that lies."""
    return _with_lies_of_pages(packed_inputs.cpu_cases(spec), spec)


def gpu_cases(spec: Forward) -> tuple[PagedCase, ...]:
    """The cases for a GPU."""
    return _with_lies_of_pages(packed_inputs.gpu_cases(spec), spec)


def _with_lies_of_pages(cases: Iterable[PackedCase], spec: Forward) -> tuple[PagedCase, ...]:
    """The cases in pages; in place of the one whose offsets lie, one whose table does as well."""
    return (*in_pages((case for case in cases if case.name != "lying"), spec), lying(spec))


def lying(spec: Forward) -> PagedCase:
    """Offsets as `packed_inputs.lying` has them, lengths from less than none to 2^31, a table that names no pages."""
    keys = 2 * spec.tile.kv
    (case,) = in_pages([packed_inputs.lying(60, keys)], spec)
    return replace(
        case, offsets_k=(0,) * len(case.offsets_k), used_k=(keys - 1, 5, INT_MAX, -3), filled=True, lies=True
    )


def make(spec: Forward, case: PagedCase, *, device: torch.device, seed: int) -> PagedInputs:
    """Draw the tensors of `case` as the module of `spec` takes them."""
    made = packed_inputs.make(spec, case, device=device, seed=seed)
    draw = torch.Generator().manual_seed(inputs.case_seed(f"{case.name}, pages", seed))
    free, taken = torch.randperm(case.pages, generator=draw), 0
    entries = len(case.spans) * case.columns
    table = torch.tensor(NO_PAGES).repeat(entries)[:entries].view(-1, case.columns)
    k, v = _pages_of(case, made, draw)
    for row, (_, (begin, end)) in enumerate(case.spans):
        key, count = torch.arange(end - begin), -(-(end - begin) // case.page)
        table[row, :count] = free[taken : taken + count]
        place = table[row][key // case.page].to(device), (key % case.page).to(device)
        k[place], v[place] = made.k[begin:end].to(k.dtype), made.v[begin:end].to(v.dtype)
        taken += count
    if case.lies:
        assert case.used_k is not None
        lengths = list(case.used_k)
        table[:, ::2] = torch.randint(case.pages, table[:, ::2].shape, generator=draw)  # the others name no page
    else:
        lengths = case.lengths_k
    k, v = (packed_inputs.stored(spec, tensor) for tensor in (k, v))
    fields: dict[str, Any] = {**vars(made), "k": k, "v": v, "cu_seqlens_k": None}
    fields["seqused_k"] = torch.tensor(lengths, dtype=torch.int32, device=device)
    return PagedInputs(**fields, page_table=table.to(dtype=torch.int32, device=device))


def _pages_of(case: PagedCase, made: PackedInputs, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V in pages, of numbers that no sequence may use, or of ordinary ones."""
    heads, (d, d_v) = made.k.shape[1], (made.k.shape[2], made.v.shape[2])
    rows = (case.pages, case.page, heads)
    width = max(d, d_v)
    dtype = made.q.dtype if made.q.element_size() > 1 else torch.bfloat16  # what has 8 bits is made of it at the end
    new = partial(made.q.new_empty, dtype=dtype)
    if case.storage == "interleaved":
        k, v = new((case.pages, 2, case.page, heads, width)).unbind(1)
        k, v = k[..., :d], v[..., :d_v]
    elif case.storage == "heads_first":
        k, v = (new((case.pages, heads, case.page, dim)).transpose(1, 2) for dim in (d, d_v))
    else:
        k, v = (new((*rows, dim)) for dim in (d, d_v))
    for pages in (k, v):
        if case.filled or case.unused == "large":
            pages.copy_(torch.randn(pages.shape, generator=draw) * (1 if case.filled else packed_inputs.LARGE))
        else:
            pages[:, 0::2], pages[:, 1::2] = math.nan, math.inf
            pages[1::2, 0::2] = math.inf  # the first rows of every second page, which may have one row
    return k, v
