"""What a module is compiled for, and how much work a call of it is: the one place that says either.

Imports neither torch nor cutlass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fa3gen.base.wording import listed
from fa3gen.design.masks import counted_pairs
from fa3gen.design.tiles import sequence_contiguous
from fa3gen.spec.model import CausalMask, DType, Forward, Mask, OutputDType, WindowMask

TILE_ROWS = 128  # in which calls are counted; the tiles of a module may have fewer


@dataclass(frozen=True)
class Shape:
    """Extents of one call: q (batch, seq_q, heads_q, d), k (batch, seq_k, heads_kv, d)."""

    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int

    @property
    def tiles(self) -> int:
        """Tiles of TILE_ROWS query rows of one head: how many SMs the call could fill."""
        return self.batch * self.heads_q * -(-self.seq_q // TILE_ROWS)

    def __str__(self) -> str:
        """`batch 4, 4096 x 4096, 16 heads`."""
        heads = f"{self.heads_q}" if self.heads_q == self.heads_kv else f"{self.heads_q}/{self.heads_kv}"
        return f"batch {self.batch}, {self.seq_q} x {self.seq_k}, {heads} heads"


class Family(NamedTuple):
    """What a module is compiled for. Modules of one family can take each other's place at any shape.

    `out_dtype` is None where O has the dtype of q, k and v. `by_sequence` are the inputs whose sequence is contiguous,
    and not their rows.
    """

    dtype: DType
    head_dim: int
    head_dim_v: int
    mask: Mask
    out_dtype: OutputDType | None = None
    by_sequence: tuple[str, ...] = ()

    @classmethod
    def of(cls, spec: Forward) -> Family:
        """The family of a spec's module."""
        problem = spec.problem
        out_dtype = None if spec.o_dtype == problem.dtype else spec.o_dtype
        return cls(problem.dtype, problem.head_dim, problem.v_dim, spec.mask, out_dtype, sequence_contiguous(spec))

    def __str__(self) -> str:
        """`bf16, head dim 192/128, window (512, 0)`; `bf16, O in fp32, head dim 128, causal`."""
        where = f", contiguous sequence in {listed(self.by_sequence)}" if self.by_sequence else ""
        return f"{self.dtypes}, head dim {self.dims}, {mask_text(self.mask)}{where}"

    @property
    def dtypes(self) -> str:
        """`bf16`, or `bf16, O in fp32`."""
        return self.dtype if self.out_dtype is None else f"{self.dtype}, O in {self.out_dtype}"

    @property
    def dims(self) -> str:
        """`128`, or `192/128`: of q and k, and of v and O where they differ."""
        return f"{self.head_dim}" + ("" if self.head_dim_v == self.head_dim else f"/{self.head_dim_v}")

    @property
    def label(self) -> str:
        """`bf16_d128_causal`, `bf16_d192_128_full`, `bf16_d128_causal_o_fp32`: names the file of tuning records."""
        out = "" if self.out_dtype is None else f"_o_{self.out_dtype}"
        where = f"_sequence_{''.join(self.by_sequence)}" if self.by_sequence else ""
        return f"{self.dtype}_d{self.dims.replace('/', '_')}_{mask_label(self.mask)}{out}{where}"

    def flops(self, shape: Shape) -> float:
        """FLOPs of both products, as the literature counts them: see `counted_pairs`."""
        pairs = counted_pairs(self.mask, seq_q=shape.seq_q, seq_k=shape.seq_k) * shape.batch * shape.heads_q
        return products_flops(self.head_dim, self.head_dim_v, pairs)


def mask_text(mask: Mask) -> str:
    """`no mask`, `causal` or `window (512, 0)`."""
    if isinstance(mask, WindowMask):
        return f"window ({mask.left}, {mask.right})"
    return "causal" if isinstance(mask, CausalMask) else "no mask"


def mask_label(mask: Mask) -> str:
    """`full`, `causal` or `window512_0`, as in the tables of `fa3gen bench` and the names of tuning records."""
    if isinstance(mask, WindowMask):
        return f"window{mask.left}_{mask.right}"
    return "causal" if isinstance(mask, CausalMask) else "full"


def products_flops(head_dim: int, head_dim_v: int, pairs: float) -> float:
    """FLOPs of both products for so many pairs of a query and a key: 2 d for Q K^T and 2 d_v for P V each."""
    return 2 * pairs * (head_dim + head_dim_v)
