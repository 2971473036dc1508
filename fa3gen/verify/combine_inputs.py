"""The inputs that merges of parts are verified on: few, named, and each there to catch something.

Parts are normal random numbers, their LSE too, about as far apart as those of real parts. All tensors lie inside larger
buffers of NaN; parts without a key are NaN as well, and out is poisoned, so that what is left unwritten shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from fa3gen.cpu.kernel import Settings
from fa3gen.design.combining import COLUMNS
from fa3gen.spec.model import Combine
from fa3gen.verify.inputs import case_seed, poison

Distribution = Literal["normal", "far", "equal"]
Layout = Literal["padded", "contiguous", "transposed", "expanded"]
GUARD = 1  # elements of every dimension but the last around a padded tensor
ROW_GUARD = 8  # and of the last one: whole vectors
SPREAD = 3.0  # of LSE
FAR = 60.0  # exp(-FAR) is less than a rounding of float32, and more than the smallest number


@dataclass(frozen=True)
class CombineCase:
    """One named set of sizes.

    `without` parts of each row have no key, in the second half of the rows; one row in `rows_without` has none at all.
    """

    name: str
    why: str
    parts: int
    batch: int
    seq: int
    heads: int
    dim: int
    distribution: Distribution = "normal"
    layout: Layout = "padded"
    without: int = 0
    rows_without: int = 0

    @property
    def shape(self) -> str:
        """`3 parts of 2 x 5 x 4 x 64`."""
        sizes = " x ".join(map(str, (self.batch, self.seq, self.heads, self.dim)))
        return f"{self.parts} part{'s' * (self.parts != 1)} of {sizes}"


@dataclass(frozen=True)
class CombineInputs:
    """Tensors of one case; `given` by name and in order. `out` is poisoned and lies inside `out_storage`."""

    given: dict[str, torch.Tensor]
    out: torch.Tensor
    out_storage: torch.Tensor


def cpu_cases(spec: Combine) -> tuple[CombineCase, ...]:
    """The cases for the CPU model of sm_90a: small, and cut to the CTA and the shares of `spec`."""
    threads, at_once, shares = spec.cta.threads, spec.parts.at_once, spec.parts.shares
    enough = Settings().sms * spec.cta.per_sm * threads  # places for which a thread has all parts of a row
    wide = enough * COLUMNS // 256 + 1  # rows of 256
    return (
        CombineCase("few_rows", "parts in shares, one of them short", 2 * shares + 3, 2, 3, 5, 64),
        CombineCase("many_parts", "several steps of each share", 128, 1, 2, 3, 128, layout="transposed"),
        CombineCase("one_part", "nothing to merge", 1, 2, 3, 4, 128),
        CombineCase("two_parts", "two shares", 2, 3, 2, 4, 72, layout="transposed"),
        CombineCase("rows", "a thread has all parts; the last CTA is not full", 2 * at_once + 1, 1, wide, 1, 256),
        CombineCase("no_keys", "parts without a key, rows without any", 7, 2, 5, 3, 64, without=4, rows_without=4),
        CombineCase("nothing", "no part has a key", 3, 2, 3, 2, 64, rows_without=1),
        CombineCase("far", "one part outweighs all others", 17, 2, 3, 4, 96, "far"),
        CombineCase("equal", "all weights are the same", 3, 1, 4, 2, 40, "equal", "contiguous"),
        CombineCase("expanded", "parts repeat: a stride of 0", 5, 3, 2, 2, 512, layout="expanded"),
    )  # fmt: skip


def gpu_cases(spec: Combine) -> tuple[CombineCase, ...]:
    """The cases for a GPU: those of the CPU model, and larger ones."""
    return (
        *cpu_cases(spec),
        CombineCase("decode", "32 sequences of a query", 17, 32, 1, 32, 128, without=5, rows_without=9),
        CombineCase("long", "more rows than places of all SMs", 3, 1, 4099, 16, 128, layout="transposed"),
        CombineCase("most_parts", "512 parts of a row", 512, 1, 1, 8, 64),
        CombineCase("wide_rows", "head dim 512", 8, 3, 129, 16, 512, without=3),
    )  # fmt: skip


def make(spec: Combine, case: CombineCase, *, device: torch.device, seed: int) -> CombineInputs:
    """Draw the tensors of `case`; the same seed gives the same numbers on every device."""
    generator = torch.Generator().manual_seed(case_seed(case.name, seed))
    rows = case.batch, case.seq, case.heads
    values = torch.randn((case.parts, *rows, case.dim), generator=generator)
    lse = _lse(case, rows, generator)
    values.masked_fill_(torch.isneginf(lse)[..., None], math.nan)
    if case.layout == "expanded":
        values, lse = (x[:, :1].expand(x.shape) for x in (values, lse))
    given = {
        "out_partial": _placed(values, case.layout, device),
        "lse_partial": _placed(lse, "padded" if case.layout == "transposed" else "transposed", device),
    }
    storage, out = _surrounded(rows, case, spec.element.in_torch(), device)
    return CombineInputs(given, out, storage)


def _lse(case: CombineCase, rows: tuple[int, int, int], generator: torch.Generator) -> torch.Tensor:
    lse = SPREAD * torch.randn((case.parts, *rows), generator=generator)
    if case.distribution == "far":
        lse += FAR * torch.randint(-2, 3, lse.shape, generator=generator)
    if case.distribution == "equal":
        lse = lse[:1].expand(lse.shape).clone()
    flat = lse.view(case.parts, -1)
    count = flat.shape[1]
    for row in range(count // 2, count):
        flat[torch.randperm(case.parts, generator=generator)[: case.without], row] = -math.inf
    if case.rows_without:
        flat[:, :: case.rows_without] = -math.inf
    return lse


def _placed(values: torch.Tensor, layout: Layout, device: torch.device) -> torch.Tensor:
    """The values where this layout has them, NaN around them; a part's rows as heads x seq where it is transposed."""
    if layout in ("contiguous", "expanded"):
        return values.to(device) if layout == "contiguous" else values[:, :1].to(device).expand(values.shape)
    order = (0, 1, 3, 2, *range(4, values.ndim)) if layout == "transposed" else tuple(range(values.ndim))
    turned = values.permute(order)
    guards = [GUARD] * (values.ndim - 1) + [ROW_GUARD]
    storage = torch.full([size + 2 * guard for size, guard in zip(turned.shape, guards, strict=True)], math.nan)
    inside = tuple(slice(guard, guard + size) for size, guard in zip(turned.shape, guards, strict=True))
    storage = storage.to(device)
    storage[inside] = turned.to(device)
    return storage[inside].permute(order)


def _surrounded(
    rows: tuple[int, int, int], case: CombineCase, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned buffer, and where O goes in its middle."""
    batch, seq, heads = rows
    storage = torch.empty((batch, seq + 2 * GUARD, heads, case.dim + 2 * ROW_GUARD), dtype=dtype, device=device)
    return poison(storage), storage[:, GUARD : GUARD + seq, :, ROW_GUARD : ROW_GUARD + case.dim]
