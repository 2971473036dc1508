"""What rounding Q and K to 8 bits does to attention, plain and rotated: the table of docs/ladder.md, in float64.

python tests/test_quantize_numerics.py      prints the rows of the table
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from rendering import ROOT

from fa3gen.verify import reference

SHAPE = (1, 1024, 4, 128)  # batch, seq, heads, head dim
BLOCK = 128
LARGE = 10.0  # times as large as other elements
Rows = tuple[torch.Tensor, torch.Tensor]


def normal(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64)


def few_large(generator: torch.Generator) -> torch.Tensor:
    """N(0, 1) + N(0, 100) Bernoulli(0.001), as in section 4.3 of the FlashAttention-3 paper (arXiv 2407.08608)."""
    there = torch.rand(SHAPE, generator=generator, dtype=torch.float64) < 1e-3
    return normal(generator) + LARGE * normal(generator) * there


def large_channels(generator: torch.Generator, *channels: int) -> Rows:
    """Q and K of a quarter the size, but for a channel of each."""
    found = []
    for channel in channels:
        x = normal(generator) / 4
        x[..., channel] *= LARGE
        found.append(x)
    return found[0], found[1]


INPUTS: dict[str, Callable[[torch.Generator], Rows]] = {
    "normal random numbers": lambda generator: (normal(generator), normal(generator)),
    "one element in a thousand ten times as large": lambda generator: (few_large(generator), few_large(generator)),
    "one channel ten times as large, of Q and K the same": lambda generator: large_channels(generator, 7, 7),
    "one channel ten times as large, of Q and K another": lambda generator: large_channels(generator, 7, 100),
}


def rounded(x: torch.Tensor, signs: torch.Tensor | None, scale: str) -> torch.Tensor:
    """x, or its rotation, as numbers of e4m3 with their scales."""
    y = x if signs is None else reference.rotate(x, signs)
    batch, seq, heads, _ = y.shape
    of_rows = y.abs().amax(-1)
    if scale == "head":
        largest = of_rows.amax(1, keepdim=True)
    elif scale == "block":
        largest = of_rows.reshape(batch, seq // BLOCK, BLOCK, heads).amax(2).repeat_interleave(BLOCK, 1)
    else:
        largest = of_rows
    descale = largest[..., None] / 448
    return reference.round_e4m3(y / descale) * descale


def errors(name: str) -> Iterator[float]:
    """Relative error of O, for scales of heads, blocks and rows: plain, rotated."""
    generator = torch.Generator().manual_seed(0)
    (q, k), v = INPUTS[name](generator), normal(generator)
    signs = 2.0 * torch.randint(0, 2, SHAPE[-1:], generator=generator) - 1.0
    wanted = reference.attention(q, k, v, reach=(None, None)).out
    for scale in ("head", "block", "token"):
        for turn in (None, signs):
            out = reference.attention(rounded(q, turn, scale), rounded(k, turn, scale), v, reach=(None, None)).out
            yield ((out - wanted).norm() / wanted.norm()).item()


def row(name: str) -> str:
    """Of the table in docs/ladder.md."""
    return f"| {name} | {' | '.join(f'{error:.3f}' for error in errors(name))} |"


@pytest.mark.parametrize("name", INPUTS)
def test_the_table_says_what_is_computed(name: str) -> None:
    assert row(name) in (ROOT / "docs" / "ladder.md").read_text(encoding="utf-8"), row(name)


if __name__ == "__main__":
    for each in INPUTS:
        print(row(each))
