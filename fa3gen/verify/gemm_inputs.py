"""The inputs that GEMM modules are verified on: few, named, and each there to catch something.

Tensors lie inside larger buffers filled with NaN, so that a read past an end shows as NaN, an element left unwritten as
well, and a write past the end as a changed guard. All are drawn in float32 from one seed and rounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from fa3gen.design.gemm import GemmShape
from fa3gen.design.operation import Tensor, operation_of
from fa3gen.spec.model import Gemm
from fa3gen.verify.inputs import GUARD, case_seed, poison

Distribution = Literal["normal", "outlier", "integers"]
CLayout = Literal["padded", "transposed", "row", "column"]


@dataclass(frozen=True)
class GemmCase:
    """One named set of sizes and values; `c_layout` says how C lies, where the module adds one."""

    name: str
    why: str
    m: int
    n: int
    k: int
    distribution: Distribution = "normal"
    c_layout: CLayout = "padded"

    @property
    def shape(self) -> str:
        """m x n x k."""
        return str(GemmShape(self.m, self.n, self.k))


@dataclass(frozen=True)
class GemmInputs:
    """Tensors of one case; `given` by name and in order. `out` is poisoned and lies inside `out_storage`."""

    given: dict[str, torch.Tensor]
    out: torch.Tensor
    out_storage: torch.Tensor

    @property
    def c(self) -> torch.Tensor | None:
        """What is added, if anything is."""
        return self.given.get("c")


def gpu_cases(spec: Gemm) -> tuple[GemmCase, ...]:
    """The cases for a GPU."""
    tile = spec.tile
    return (
        GemmCase("random", "plain inputs, many tiles", 512, 768, 512),
        GemmCase("long", "a long sum: the ring wraps many times", 256, 512, 8192, c_layout="row"),
        GemmCase("ragged", "no size is a multiple of anything", 333, 517, 203, c_layout="transposed"),
        GemmCase("tile_edge", "one past a tile everywhere", tile.m + 1, tile.n + 1, tile.k + 1, c_layout="column"),
        GemmCase("one", "a single product", 1, 1, 1),
        GemmCase("few_k", "less than a step", 300, 200, 5),
        GemmCase("wide", "few rows, many columns", 3, 4000, 64),
        GemmCase("tall", "many rows, few columns: several bands", 5000, 3, 64),
        GemmCase("outlier", "a few large rows and columns", 384, 384, 384, "outlier"),
        GemmCase("integers", "sums that float32 holds exactly: one rounding", 700, 900, 300, "integers"),
        GemmCase("many_tiles", "more tiles than SMs, several bands", 5000, 2600, 200),
    )  # fmt: skip


def cpu_cases(spec: Gemm) -> tuple[GemmCase, ...]:
    """The cases for the CPU model of sm_90a: small, and cut to the tiles and the ring of `spec`."""
    tile, stages = spec.tile, spec.load.stages
    cases = [
        GemmCase("ragged", "2 x 2 tiles, cut short on all sides", tile.m + 9, tile.n + 13, tile.k + 5),
        GemmCase("one", "a single product", 1, 1, 1, c_layout="column"),
        GemmCase("few_k", "less than a step", 5, 9, 3, c_layout="row"),
        GemmCase("outlier", "a few large rows and columns", 9, 40, tile.k, "outlier", "transposed"),
        GemmCase("integers", "sums that float32 holds exactly: one rounding", tile.m - 3, 23, tile.k + 7, "integers"),
        GemmCase("wrap", "goes round the ring of stages twice and a bit", 3, 10, 2 * stages * tile.k + tile.k // 2 + 1),
        GemmCase("bands", "more rows than a band has", tile.band * tile.m + 1, 5, 4),
    ]  # fmt: skip
    return tuple(cases)


def make(spec: Gemm, case: GemmCase, *, device: torch.device, seed: int) -> GemmInputs:
    """Draw the tensors of `case` as the module of `spec` takes them."""
    operation, sizes = operation_of(spec), GemmShape(case.m, case.n, case.k)
    generator = torch.Generator(device="cpu").manual_seed(case_seed(case.name, seed))
    given = {}
    for tensor in operation.inputs:
        values = _values(tensor.sizes(sizes), case, generator)
        if tensor.name == "c":
            given["c"] = _c(values, case.c_layout, tensor, device)
        else:
            _, given[tensor.name] = _placed(values, tensor, device)
    out_storage, out = _placed(torch.empty((case.m, case.n)), operation.output, device)
    poison(out_storage)
    return GemmInputs(given, out, out_storage)


def _values(sizes: tuple[int, ...], case: GemmCase, generator: torch.Generator) -> torch.Tensor:
    if case.distribution == "integers":
        return torch.randint(-2, 3, sizes, generator=generator).float()
    values = torch.randn(sizes, generator=generator)
    if case.distribution == "outlier":
        for mode, size in enumerate(sizes):
            chosen = torch.randperm(size, generator=generator)[:2]
            values.index_copy_(mode, chosen, 8 * values.index_select(mode, chosen))
    return values


def _placed(values: torch.Tensor, tensor: Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer of NaN, and `values` in its middle, contiguous and aligned as the tensor's layout says."""
    turned = values.t() if tensor.layout.contiguous == 0 else values
    rows, columns = turned.shape
    pitch = -(-columns // tensor.vector) * tensor.vector + tensor.vector
    storage = torch.full((rows + 2 * GUARD, pitch), math.nan, dtype=tensor.dtype.in_torch(), device=device)
    view = storage[GUARD : GUARD + rows, :columns]
    view.copy_(turned)
    return storage, view.t() if tensor.layout.contiguous == 0 else view


def _c(values: torch.Tensor, layout: CLayout, tensor: Tensor, device: torch.device) -> torch.Tensor:
    """C has any strides: a matrix either way, a row for all rows, or a column for all columns."""
    dtype = tensor.dtype.in_torch()
    if layout in ("row", "column"):
        part = values[:1] if layout == "row" else values[:, :1]
        return part.to(device, dtype).expand(values.shape)
    matrix = torch.full((values.shape[0] + 1, values.shape[1] + 1), math.nan, dtype=dtype, device=device)
    if layout == "transposed":
        matrix = matrix.t().contiguous().t()
    view = matrix[:-1, :-1]
    view.copy_(values)
    return view
