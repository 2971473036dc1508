"""What modules for packed sequences compute, in plain PyTorch, and what stands in for them and for the table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rendering import CHECKOUT
from stand_ins import division, generated_module

from fa3gen.design.family import Family
from fa3gen.design.masks import reach
from fa3gen.run.dispatch import Choice, Size, Stretch
from fa3gen.spec.model import Mask
from fa3gen.verify import reference

SPARE_PAGES = 3  # that no sequence has
UNTOUCHED = -7.0  # what stands in rows of a new O and LSE that are in no sequence


def offsets(lengths: Sequence[int], device: Any = None) -> torch.Tensor:
    """Where sequences of these lengths begin and end."""
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def packed_tensors(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    device: Any = None,
) -> tuple[torch.Tensor, ...]:
    """Random q, k, v and the offsets."""
    generator = torch.Generator(device or "cpu").manual_seed(sum(lengths_q))
    (heads_q, heads_kv), (rows_q, rows_k) = heads, (sum(lengths_q), sum(lengths_k))
    shapes = ((rows_q, heads_q, head_dim), (rows_k, heads_kv, head_dim), (rows_k, heads_kv, head_dim))
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(torch.bfloat16) for shape in shapes)
    return q, k, v, offsets(lengths_q, device), offsets(lengths_k, device)


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    mask: Mask,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    **scores: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O and LSE (heads_q, total_q) in float32, sequence by sequence; rows in no sequence are UNTOUCHED.

    `scores`: scale, sinks and softcap of the reference.
    """
    out = torch.full((*q.shape[:2], v.shape[2]), UNTOUCHED, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), UNTOUCHED, device=q.device)
    for index in range(len(cu_seqlens_q) - 1):
        rows = [
            slice(begin, min(end, math.inf if used is None else begin + int(used[index]), x.shape[0]))
            for x, used, (begin, end) in (
                (q, seqused_q, cu_seqlens_q[index : index + 2].tolist()),
                (k, seqused_k, cu_seqlens_k[index : index + 2].tolist()),
            )
        ]
        one = (q[None, rows[0]], k[None, rows[1]], v[None, rows[1]])
        expected = reference.attention(*one, reach=reach(mask), compute_dtype=torch.float32, **scores)
        out[rows[0]], lse[:, rows[0]] = expected.out[0], expected.lse[0]
    return out, lse


def out_of_pages(pages: torch.Tensor, table: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
    """The rows of all sequences one behind the other."""
    rows = pages[table.long().clamp(0, len(pages) - 1)].flatten(1, 2)
    return torch.cat([x[:length] for x, length in zip(rows, used, strict=True)])


def into_pages(rows: torch.Tensor, lengths: Sequence[int], page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(total, heads, head_dim) in pages in no order, a few of which no sequence has, and the table that finds them."""
    columns = [-(-length // page) for length in lengths]
    free = torch.randperm(sum(columns) + SPARE_PAGES, generator=torch.Generator().manual_seed(page))
    pages = torch.full((len(free), page, *rows.shape[1:]), torch.nan, dtype=rows.dtype)
    table = torch.full((len(columns), max(columns)), -1, dtype=torch.int32)  # -1: no page
    for sequence, keys in enumerate(rows.split(list(lengths))):
        taken, free = free[: columns[sequence]], free[columns[sequence] :]
        table[sequence, : len(taken)] = taken
        for number, part in zip(taken, keys.split(page), strict=True):
            pages[number, : len(part)] = part
    return pages, table


@dataclass
class PackedModules:
    """Stands in for the dispatch table, with two rows, and for their modules; keeps what it was asked."""

    bound: int = 6  # keys; longer ones are served by another module
    asked: list[tuple[Family, Size, bool]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    divided: list[int | None] = field(default_factory=list)

    def choose(self, family: Family, size: Size, *, lse: bool, workspace: Any) -> Choice:
        self.asked.append((family, size, lse))
        short = size.keys <= self.bound
        around = Stretch(most_keys=self.bound) if short else Stretch(least_keys=self.bound + 1)
        [variant] = CHECKOUT.resolve("fwd_packed_d128")
        file = Path(f"{'short' if short else 'long'}.py")
        return Choice(file.stem, file, variant.spec, variant.source, None, "made up", size=size, around=around)

    def module_at(self, path: Path) -> Any:
        family = self.asked[-1][0]

        def attention(q: Any, k: Any, v: Any, *rest: Any, **options: Any) -> Any:
            self.calls.append(path.stem)
            self.options.append(dict(options))
            self.divided.append(division(globals(), k.shape[1]))
            return_lse, into = options.pop("return_lse", False), options.pop("out", None)
            k, v = (x.to(q.dtype) for x in (k, v))  # of 8 bits; factors are only looked at
            options = {name: given for name, given in options.items() if not name.endswith("_descale")}
            if family.layout == "paged":
                cu_seqlens_q, table, used = rest
                k, v = (out_of_pages(x, table, used.tolist()) for x in (k, v))
                rest = cu_seqlens_q, offsets(used.tolist())
            if family.layout != "dense":
                out, lse = packed_attention(q, k, v, *rest, mask=family.mask, **options)
            else:
                found = reference.attention(q, k, v, reach=reach(family.mask), compute_dtype=torch.float32, **options)
                out, lse = found.out, found.lse
            written = out.to(q.dtype) if into is None else into.copy_(out)
            return (written, lse) if return_lse else written

        return generated_module(attention, packed=family.layout != "dense")
