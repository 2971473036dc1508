"""The inputs that copies are verified on: few, named, and each there to catch something.

x and out lie inside larger buffers wherever the layout allows it. Bits are random, NaN among them, around x as well, so
that an element from elsewhere shows; around out stands one pattern, so that a write past any end shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch

from fa3gen.base.wording import counted
from fa3gen.cpu.kernel import Settings
from fa3gen.design import boxes
from fa3gen.spec.model import Copy
from fa3gen.verify.inputs import case_seed

MODEL_SMS = Settings().sms  # whose CTAs share the tiles of a copy through rings

GUARD = 2  # elements of every dimension but the row before and after a padded tensor
ROW_GUARD = 16  # elements before and after a row of it: whole 16-byte units
CANARY = 0x2B67  # of 16-bit elements

Layout = Literal["contiguous", "padded", "permuted", "expanded", "odd_strides"]


@dataclass(frozen=True)
class CopyCase:
    """One named set of sizes and strides: all dimensions but the row; of packed rows the lengths of sequences.

    The first sequence begins at row `first`; `unused` rows follow the last.
    """

    name: str
    why: str
    sizes: tuple[int, ...]
    layout: Layout = "padded"
    lengths: tuple[int, ...] = ()
    first: int = 0
    unused: int = 0

    @property
    def shape(self) -> str:
        """`33 x 9`; of packed rows `5 sequences in 300 rows`."""
        if self.lengths:
            return f"{counted(len(self.lengths), 'sequence')} in {counted(self.sizes[0], 'row')}"
        return " x ".join(map(str, self.sizes))

    @property
    def offsets(self) -> list[int]:
        """Where sequences begin, and where the last one ends."""
        return list(accumulate(self.lengths, initial=self.first))


@dataclass(frozen=True)
class CopyInputs:
    """Tensors of one case. `out` lies inside `out_storage`; `wanted` is what that has to be after a call."""

    x: torch.Tensor
    offsets: torch.Tensor | None
    out: torch.Tensor
    out_storage: torch.Tensor
    wanted: torch.Tensor

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """What the entry point is called with, by name and in order."""
        return {"x": self.x} if self.offsets is None else {"x": self.x, "offsets": self.offsets}


def sequences(name: str, why: str, lengths: Sequence[int], *, first: int = 0, unused: int = 0) -> CopyCase:
    """A case of packed rows."""
    return CopyCase(name, why, (first + sum(lengths) + unused,), "padded", tuple(lengths), first, unused)


def cpu_cases(spec: Copy) -> tuple[CopyCase, ...]:
    """The cases for the CPU model of sm_90a: small, and cut to the box and the ring of `spec`."""
    rows = spec.box.extents[:-1]
    rings = 1 if spec.ring is None else spec.ring.stages * spec.ring.ctas_per_sm * MODEL_SMS
    if boxes.packed(spec):
        m = rows[0]
        return (
            sequences("ragged", "tiles cut at ends of sequences", (m + 3, 2 * m, 1, m - 1, m + 1), unused=5),
            sequences("empty_sequences", "some with nothing to copy", (0, 5, 0, 0, m, 0), first=3),
            sequences("one", "a single row, the first of all", (1,)),
            sequences("wrap", "goes round the ring", (3, 2 * rings * m + 7), first=m + 1, unused=1),
        )  # fmt: skip
    ragged = tuple(2 * extent + 1 if place < 2 else extent for place, extent in enumerate(reversed(rows)))[::-1]
    cases = [
        CopyCase("ragged", "several tiles, cut short in the last dimensions", ragged),
        CopyCase("small", "less than a box", tuple(max(1, extent - 1) for extent in rows), "contiguous"),
        CopyCase("one", "a single row, strides that mean nothing", (1,) * len(rows), "odd_strides"),
        CopyCase("expanded", "x repeats: a stride of 0", (3, *(extent for extent in rows[1:])), "expanded"),
        CopyCase("wrap", "goes round the ring", (*(1,) * (len(rows) - 1), (2 * rings + 1) * rows[-1] + 1)),
    ]
    if len(rows) > 1:
        cases.append(
            CopyCase("permuted", "dimensions in another order", tuple(extent + 1 for extent in rows), "permuted")
        )
    return tuple(cases)


def gpu_cases(spec: Copy) -> tuple[CopyCase, ...]:
    """The cases for a GPU: those of the CPU model, and larger ones."""
    rows = spec.box.extents[:-1]
    if boxes.packed(spec):
        many = [37 * number % 400 for number in range(3000)]
        long = [100_000, 1, 250_001]
        return (
            *cpu_cases(spec),
            sequences("many", "3000 sequences of 0 to 399 rows", many, first=7, unused=1000),
            sequences("long", "more tiles than CTAs, a sequence of one row among them", long),
        )
    inner = tuple(3 * extent + 1 for extent in rows[1:])
    return (
        *cpu_cases(spec),
        CopyCase("many", "more tiles than CTAs", (2**21 // (spec.problem.row * math.prod(inner)) + 1, *inner)),
        CopyCase("tall", "one dimension of many rows", (*(1,) * (len(rows) - 1), 300_001), "contiguous"),
    )


def make(spec: Copy, case: CopyCase, *, device: torch.device, seed: int) -> CopyInputs:
    """Draw the tensors of `case` on `device`; the same seed gives the same bits on every device."""
    generator, dtype = torch.Generator().manual_seed(case_seed(case.name, seed)), spec.element.in_torch()
    sizes = (*case.sizes, spec.problem.row)

    def bits(shape: Sequence[int]) -> torch.Tensor:
        drawn = torch.randint(-(2**15), 2**15, tuple(shape), dtype=torch.int16, generator=generator)
        return drawn.to(device)

    x, _ = _placed(sizes, case.layout, bits)
    layout = "padded" if case.layout == "expanded" else case.layout
    out, storage = _placed(
        sizes, layout, lambda shape: torch.full(tuple(shape), CANARY, dtype=torch.int16, device=device)
    )
    wanted, view = storage.clone(), out.storage_offset()
    copied = wanted.as_strided(out.shape, out.stride(), view)
    offsets = None
    if boxes.packed(spec):
        begin, end = case.offsets[0], case.offsets[-1]
        copied[begin:end] = x[begin:end]
        offsets = torch.tensor(case.offsets, dtype=torch.int32, device=device)
    else:
        copied.copy_(x)
    return CopyInputs(x.view(dtype), offsets, out.view(dtype), storage, wanted)


def _placed(
    sizes: tuple[int, ...], layout: Layout, fill: Callable[[Sequence[int]], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of these sizes in a buffer that `fill` makes, and the whole buffer."""
    *outer, row = sizes
    if layout == "contiguous":
        storage = fill(sizes)
        return storage, storage
    if layout == "odd_strides":  # of dimensions of one element, which are never used to form an address
        storage = fill(sizes)
        strides = [stride if extent > 1 else 3 for extent, stride in zip(outer, storage.stride(), strict=False)]
        return storage.as_strided(sizes, (*strides, 1)), storage
    if layout == "expanded":
        storage = fill((1, *sizes[1:]))
        return storage.expand(sizes), storage
    order = list(range(len(outer)))[:: -1 if layout == "permuted" else 1]
    storage = fill([*(outer[axis] + 2 * GUARD for axis in order), row + 2 * ROW_GUARD])
    inside = (*(slice(GUARD, GUARD + outer[axis]) for axis in order), slice(ROW_GUARD, ROW_GUARD + row))
    return storage[inside].permute(*order, len(outer)), storage
