"""What a module is compiled for, and how much work a call of it is: the one place that says either.

Imports neither torch nor cutlass.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import NamedTuple

from fa3gen.base.wording import counted, listed
from fa3gen.design.footprint import block_scales, page_rows, permuted_keys
from fa3gen.design.key_order import whole_units
from fa3gen.design.masks import Window, computes, counted_pairs, given_with_calls, of_call
from fa3gen.design.tiles import sequence_contiguous
from fa3gen.hardware.dtypes import DTYPES
from fa3gen.spec.model import (
    WINDOW_MAX,
    AttentionDType,
    CausalMask,
    Forward,
    Mask,
    OutputDType,
    SequenceLayout,
    StoredDType,
    WindowMask,
    usual_output,
)
from fa3gen.spec.quantizing import BLOCK_ROWS

Lengths = tuple[int, int]  # queries and keys of one sequence
ODD_PAGE = 24  # rows of a page where nobody says how many, and any number will do
NAMED = 8  # sequences whose lengths are said one by one
MOST_DIM_OF_TWO_LEVELS = 128  # of v: accumulators of O and of P V of a step leave a thread registers for S up to it
TILE_ROWS = 128  # in which calls are counted; the tiles of a module may have fewer


def blocks_of(rows: int) -> int:
    """How many blocks of BLOCK_ROWS so many rows are, the last of which may have fewer: each may have its factor."""
    return -(-rows // BLOCK_ROWS)


@dataclass(frozen=True)
class Shape:
    """Extents of one call: q (batch, seq_q, heads_q, d), k (batch, seq_k, heads_kv, d).

    `window` is that of a call which gives one; of other modules it says nothing.
    """

    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int
    window: Window | None = None

    @property
    def sequences(self) -> tuple[Lengths, ...]:
        """Queries and keys of each batch entry, which has those of the others."""
        return ((self.seq_q, self.seq_k),) * self.batch

    @property
    def tiles(self) -> int:
        """Tiles of TILE_ROWS query rows of one head: how many SMs the call could fill."""
        return self.batch * self.heads_q * -(-self.seq_q // TILE_ROWS)

    @property
    def extents(self) -> dict[str, int]:
        """Sizes by the names that tensors have for them, also those of as many packed sequences of these lengths.

        In pages each has one, which its keys fill.
        """
        totals = {"total_q": self.batch * self.seq_q, "total_k": self.batch * self.seq_k}
        pages = {"pages": self.batch, "page": self.seq_k, "most_pages": 1}
        blocks = {"blocks_q": blocks_of(self.seq_q), "blocks_k": blocks_of(self.seq_k)}
        permuted = {"seq_v": whole_units(self.seq_k)}
        return {**asdict(self), **totals, **pages, **blocks, **permuted, "offsets": self.batch + 1}

    @property
    def lengths_text(self) -> str:
        """`4096 x 4096`: queries and keys of each."""
        return f"{self.seq_q} x {self.seq_k}"

    @property
    def in_full(self) -> str:
        """All that there is to say, as in `__str__`."""
        return str(self)

    def __str__(self) -> str:
        """`batch 4, 4096 x 4096, 16 heads`."""
        heads = heads_text(self.heads_q, self.heads_kv)
        return f"batch {self.batch}, {self.lengths_text}, {heads} heads"


@dataclass(frozen=True)
class PackedShape:
    """Extents of one call on packed sequences: q (total_q, heads_q, d), k (total_k, heads_kv, d), of these lengths."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    heads_q: int
    heads_kv: int
    window: Window | None = None

    @property
    def sequences(self) -> tuple[Lengths, ...]:
        """Queries and keys of each."""
        return tuple(zip(self.lengths_q, self.lengths_k, strict=True))

    @property
    def batch(self) -> int:
        """How many sequences there are."""
        return len(self.lengths_q)

    @property
    def mean(self) -> Shape:
        """The shape of as many sequences of the mean lengths, rounded up: all that the host knows of a call."""
        seq_q, seq_k = (-(-sum(lengths) // max(1, self.batch)) for lengths in (self.lengths_q, self.lengths_k))
        return Shape(self.batch, seq_q, seq_k, self.heads_q, self.heads_kv)

    @property
    def extents(self) -> dict[str, int]:
        """Sizes by the names that tensors have for them."""
        return {
            "total_q": sum(self.lengths_q),
            "total_k": sum(self.lengths_k),
            "batch": self.batch,
            "offsets": self.batch + 1,
            "heads_q": self.heads_q,
            "heads_kv": self.heads_kv,
        }

    @property
    def lengths_text(self) -> str:
        """`16384 x 16384`: queries and keys of all."""
        return f"{sum(self.lengths_q)} x {sum(self.lengths_k)}"

    @property
    def in_full(self) -> str:
        """`3 sequences, 304 x 618, 1 heads: 240 x 554, 0 x 0, 64 x 64`; of many the first ones."""
        first = [f"{seq_q} x {seq_k}" for seq_q, seq_k in self.sequences[:NAMED]]
        more = ["and so on"] * (self.batch > NAMED)
        return f"{self}: {', '.join([*first, *more])}"

    def __str__(self) -> str:
        """`58 sequences, 16384 x 16384, 32/8 heads`."""
        heads = heads_text(self.heads_q, self.heads_kv)
        return f"{counted(self.batch, 'sequence')}, {self.lengths_text}, {heads} heads"


@dataclass(frozen=True)
class PagedShape(PackedShape):
    """The same with k and v (pages, page, heads_kv, d), of which each sequence has as many pages as its keys take."""

    page: int = 1

    @property
    def extents(self) -> dict[str, int]:
        """Sizes by the names that tensors have for them."""
        counts = [-(-length // self.page) for length in self.lengths_k]
        return {**super().extents, "pages": sum(counts), "page": self.page, "most_pages": max(counts, default=0)}

    def __str__(self) -> str:
        """`58 sequences, 16384 x 16384, 32/8 heads, pages of 16`."""
        return f"{super().__str__()}, pages of {self.page}"


def call_of_lengths(
    spec: Forward,
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    *,
    heads: tuple[int, int],
    page: int | None = None,
) -> PackedShape:
    """A call of a module on sequences of these lengths. With pages these have `page` rows, or as few as it takes."""
    least = page_rows(spec)
    if least is None:
        return PackedShape(lengths_q, lengths_k, *heads)
    return PagedShape(lengths_q, lengths_k, *heads, page=page or (least if least > 1 else ODD_PAGE))


class Family(NamedTuple):
    """What a module is compiled for. Modules of one family can take each other's place at any shape.

    `out_dtype` is None where O has the dtype of q, k and v. `by_sequence` are the inputs whose sequence is contiguous,
    and not their rows. `layout` is `packed` where sequences stand one behind the other, `paged` where only queries do.
    `sink` and `softcap`: whether a call gives sinks, and a cap of the scores; `any_cap`: whether a call's cap is more
    than MOST_CAP_OF_FIRST_MAX, or may be one of a module's calls. `page_rows`: the page size of a call;
    of a module the number that its calls' page sizes are multiples of. `part_keys`: how many keys a part has where that
    is fixed, so that a row's bits are the same whatever else a call has, and whoever adds parts up. `kv_dtype`: that of
    k and v where they have 8 bits beside queries of 16, or of other 8. `block_scales`: whether factors of q and k are
    of blocks of rows, and not of heads. `v_permuted`: whether v, whose sequence is contiguous, has its keys in the
    order of `fa3gen.design.key_order`.
    """

    dtype: AttentionDType
    head_dim: int
    head_dim_v: int
    mask: Mask
    out_dtype: OutputDType | None = None
    by_sequence: tuple[str, ...] = ()
    layout: SequenceLayout = "dense"
    sink: bool = False
    softcap: bool = False
    page_rows: int | None = None
    any_cap: bool = False
    part_keys: int | None = None
    kv_dtype: StoredDType | None = None
    block_scales: bool = False
    v_permuted: bool = False

    @classmethod
    def of(cls, spec: Forward) -> Family:
        """The family of a spec's module."""
        problem = spec.problem
        out_dtype = None if spec.o_dtype == problem.dtype else spec.o_dtype
        return cls(
            *(problem.dtype, problem.head_dim, problem.v_dim, spec.mask, out_dtype),
            by_sequence=sequence_contiguous(spec),
            layout=problem.layout,
            sink=spec.softmax.sink,
            softcap=spec.softmax.softcap,
            page_rows=page_rows(spec),
            any_cap=spec.softmax.softcap and spec.softmax.row_max == "online",
            part_keys=spec.split.keys if spec.split is not None else spec.softmax.restart_every,
            kv_dtype=spec.kv.dtype,
            block_scales=block_scales(spec),
            v_permuted=permuted_keys(spec),
        )

    def of_call(self, window: Window | None = None) -> Family:
        """What one call of a module computes, where calls give the window: `masks.of_call`."""
        return self._replace(mask=of_call(self.mask, window))

    def serves(self, wanted: Family) -> bool:
        """Whether a module of this family has calls that compute another."""
        if (wanted.page_rows or 0) % (self.page_rows or 1) or wanted.any_cap > self.any_cap:
            return False
        alike = self._replace(mask=wanted.mask, page_rows=wanted.page_rows, any_cap=wanted.any_cap) == wanted
        return alike and computes(self.mask, wanted.mask)

    def __str__(self) -> str:
        """`bf16, head dim 192/128, window (512, 0)`; `bf16, O in fp32, head dim 128, causal, sinks, pages of 16`."""
        return self._told(f"pages of {self.page_rows}")

    @property
    def of_module(self) -> str:
        """The same of a module, or a row, of pages: `.., pages of a multiple of 16`, `.., pages of any size`."""
        return self._told(f"pages of a multiple of {self.page_rows}" if self.page_rows != 1 else "pages of any size")

    def _told(self, pages: str) -> str:
        score = "".join(f", {name}" for name in self.keywords) + " of any size" * self.any_cap
        where = f", contiguous sequence in {listed(self.by_sequence)}" if self.by_sequence else ""
        where += ", its keys permuted" * self.v_permuted
        packed = {"dense": "", "packed": ", packed sequences", "paged": f", {pages}"}[self.layout]
        same = "" if self.part_keys is None else f", keys in parts of {self.part_keys}: the same bits in any batch"
        return f"{self.dtypes}, head dim {self.dims}, {mask_text(self.mask)}{score}{where}{packed}{same}"

    @property
    def dtypes(self) -> str:
        """`bf16`, `bf16, O in fp32`, `bf16, K and V in e4m3`, or `e4m3, scales of blocks, O in bf16`."""
        keys = "" if self.kv_dtype is None else f", K and V in {self.kv_dtype}"
        keys += ", scales of blocks" * self.block_scales
        return self.dtype + keys + ("" if self.out_dtype is None else f", O in {self.out_dtype}")

    @property
    def dims(self) -> str:
        """`128`, or `192/128`: of q and k, and of v and O where they differ."""
        return f"{self.head_dim}" + ("" if self.head_dim_v == self.head_dim else f"/{self.head_dim_v}")

    @property
    def label(self) -> str:
        """`bf16_d128_causal`, `bf16_d192_128_full`, `bf16_d128_causal_o_fp32`: names the file of tuning records."""
        out = "" if self.out_dtype is None else f"_o_{self.out_dtype}"
        where = f"_sequence_{''.join(self.by_sequence)}" if self.by_sequence else ""
        where += "_permuted" * self.v_permuted
        score = "_sink" * self.sink + "_softcap" * self.softcap + "_any" * self.any_cap + "_block" * self.block_scales
        packed = {"dense": "", "packed": "_packed", "paged": f"_pages_{self.page_rows}"}[self.layout]
        same = "" if self.part_keys is None else f"_parts_of_{self.part_keys}"
        keys = "" if self.kv_dtype is None else f"_kv_{self.kv_dtype}"
        what = f"{self.dtype}{keys}_d{self.dims.replace('/', '_')}_{mask_label(self.mask)}"
        return f"{what}{score}{out}{where}{packed}{same}"

    @property
    def eight_bits(self) -> bool:
        """Whether q, k and v have 8 bits, and calls may give factors of them."""
        return DTYPES[self.dtype].bits == 8

    @property
    def two_levels(self) -> bool:
        """Whether P V of tiles of keys is to be added up in float32, as far as registers allow that.

        Of products of 8 bits the tensor core keeps 13 bits below the largest addend.
        """
        return self.eight_bits and self.head_dim_v <= MOST_DIM_OF_TWO_LEVELS

    @property
    def keywords(self) -> tuple[str, ...]:
        """What a call has to be given by name, beside a window."""
        return ("sinks",) * self.sink + ("softcap",) * self.softcap

    def flops(self, shape: Shape | PackedShape) -> float:
        """FLOPs of both products, as the literature counts them: see `counted_pairs`."""
        mask, sequences = of_call(self.mask, shape.window), Counter(shape.sequences)
        pairs = sum(
            count * counted_pairs(mask, seq_q=seq_q, seq_k=seq_k) for (seq_q, seq_k), count in sequences.items()
        )
        return products_flops(self.head_dim, self.head_dim_v, pairs * shape.heads_q)


def usual_out_dtype(dtype: AttentionDType) -> OutputDType | None:
    """The `out_dtype` of a family where nothing else is said: None, or bf16 beside q, k and v of 8 bits."""
    usual = usual_output(dtype)
    return None if usual == dtype else usual


def heads_text(heads_q: int, heads_kv: int) -> str:
    """`16`, or `32/8`: query heads, and heads of k and v where they are fewer."""
    return f"{heads_q}" if heads_q == heads_kv else f"{heads_q}/{heads_kv}"


def mask_text(mask: Mask) -> str:
    """`no mask`, `causal`, `window (512, 0)`, `window (all, 5)`, or `any window` where calls give it."""
    if given_with_calls(mask):
        return "any window"
    if isinstance(mask, WindowMask):
        left, right = ("all" if keys == WINDOW_MAX else keys for keys in (mask.left, mask.right))
        return f"window ({left}, {right})"
    return "causal" if isinstance(mask, CausalMask) else "no mask"


def mask_label(mask: Mask) -> str:
    """`full`, `causal`, `window512_0` or `any_window`: in the tables of `fa3gen bench`, and in names of records."""
    if given_with_calls(mask):
        return "any_window"
    if isinstance(mask, WindowMask):
        return f"window{mask.left}_{mask.right}"
    return "causal" if isinstance(mask, CausalMask) else "full"


def products_flops(head_dim: int, head_dim_v: int, pairs: float) -> float:
    """FLOPs of both products for so many pairs of a query and a key: 2 d for Q K^T and 2 d_v for P V each."""
    return 2 * pairs * (head_dim + head_dim_v)
