"""The spec: what a person writes to ask for an attention kernel, and nothing that follows from it.

Every model forbids unknown keys and refuses to coerce types. Choices that exclude one another are tagged unions, so
that a state without meaning (a swizzle for a P that never leaves the registers) cannot be written down. A model says
what a field can be by itself; what depends on another field or on the chip is judged in `fa3gen.design.rules`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field

from fa3gen.hardware.dtypes import DTYPES, Dtype
from fa3gen.spec.combining import Combine
from fa3gen.spec.common import (
    AttentionDType,
    CooperativeSchedule,
    DType,
    Major,
    MmaProduct,
    OperandA,
    OperandB,
    OutputDType,
    Product,
    ScalarProduct,
    Source,
    SpecModel,
    StoredDType,
    Swizzle,
    WarpSpecializedSchedule,
    WgmmaProduct,
)
from fa3gen.spec.copying import Copy
from fa3gen.spec.gemm import Gemm
from fa3gen.spec.quantizing import BLOCK_ROWS, Quantize

__all__ = [
    "AttentionDType",
    "Combine",
    "CooperativeSchedule",
    "Copy",
    "DType",
    "Gemm",
    "Major",
    "MmaProduct",
    "OperandA",
    "OperandB",
    "OutputDType",
    "Product",
    "Quantize",
    "ScalarProduct",
    "Source",
    "SpecModel",
    "StoredDType",
    "Swizzle",
    "WarpSpecializedSchedule",
    "WgmmaProduct",
]

SequenceLayout = Literal["dense", "packed", "paged"]
ScalesOf = Literal["head", "block"]
Scheduler = Literal["single_tile", "grid", "static", "stream_k", "dynamic", "even"]

# The kernels count keys in 32 bits: row + reach stays below 2^31 for up to 2^30 keys.
WINDOW_MAX = 2**30
# P and its sums grow by so many powers of two before O is rescaled; errors were measured up to here.
RESCALE_ABOVE_MAX = 8
# Of the exponentials of capped scores that are relative to a maximum which may be exceeded: 2^86 at most, so that sums
# over 2^20 keys with values up to 2^15 stay below 2^128, the end of float32 and bfloat16. With caps of at most 64 the
# largest of a row is then 2^-99 at least: 86 - 2 log2(e) 64.
MOST_EXPONENT, MOST_CAP_OF_FIRST_MAX = 86, 64.0


class Problem(SpecModel):
    """What is computed: O = softmax(scale * Q K^T) V for one head dim and one dtype of q, k and v, of 16 or 8 bits."""

    head_dim: int = Field(gt=0, description="Elements per head of q, k, v and O.")
    head_dim_v: int | None = Field(default=None, gt=0, description="Elements per head of v and O, where not head_dim.")
    dtype: AttentionDType = Field(
        default="bf16", description="Element type of q, k, v and, unless `o` gives another, O, which e4m3 has in bf16."
    )
    layout: SequenceLayout = Field(
        default="dense",
        description="`dense`: q, k, v are (batch, seq, heads, head_dim), sequences of one length; `packed` (varlen): "
        "(total, heads, head_dim), sequences of any lengths one behind the other, with their offsets on the device; "
        "`paged`: q as in `packed`, k and v (pages, page, heads, head_dim), with a table of each sequence's pages.",
    )
    scales: ScalesOf = Field(
        default="head",
        description="What a factor of q and k of 8 bits is for. `head`: a sequence and a head of k, whose query heads "
        f"share that of q; `block`: {BLOCK_ROWS} rows of a head of theirs, as `quantize` makes them with scale "
        "block, and of v, too.",
    )
    v_keys: Literal["in_order", "permuted"] = Field(
        default="in_order",
        description="Of a v of 8 bits whose sequence is contiguous: its keys one after the other, or of each 16 in the "
        "order in which a thread has P as accumulator, so that P needs no exchange. `quantize` writes v so.",
    )

    @property
    def v_dim(self) -> int:
        """Elements per head of v and O."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v


class NoMask(SpecModel):
    """Every query sees every key."""

    kind: Literal["none"] = "none"


class CausalMask(SpecModel):
    """Query i sees keys j <= i + (seq_k - seq_q): the diagonal ends in the bottom right corner."""

    kind: Literal["causal"] = "causal"


class WindowMask(SpecModel):
    """Query i sees keys with -left <= j - i - (seq_k - seq_q) <= right; without either, each call gives both."""

    kind: Literal["window"] = "window"
    left: int | None = Field(
        default=None,
        ge=0,
        le=WINDOW_MAX,
        description="Keys visible left of the diagonal, the diagonal not counted; null: an argument of each call.",
    )
    right: int | None = Field(
        default=None, ge=0, le=WINDOW_MAX, description="The same right of the diagonal; null where `left` is."
    )

    @property
    def given(self) -> bool:
        """Whether calls give the window, as `window=(left, right)`, and the module is compiled for any."""
        return self.left is None


def _expand_shorthand(value: Any) -> Any:
    """Let `mask: causal` stand for `mask: {kind: causal}`."""
    return {"kind": value} if isinstance(value, str) else value


Mask = Annotated[Union[NoMask, CausalMask, WindowMask], Field(discriminator="kind"), BeforeValidator(_expand_shorthand)]


class Tile(SpecModel):
    """What one CTA holds at a time, and who works on it."""

    q: int = Field(gt=0, description="Query rows per CTA.")
    kv: int = Field(gt=0, description="Key/value rows per step of the loop.")
    threads: int | None = Field(default=None, gt=0, description="Threads per CTA, for kernels without WGMMA.")
    warpgroups: int | None = Field(
        default=None, gt=0, description="Warpgroups of 128 threads that compute, for kernels with WGMMA."
    )
    pack_heads: int = Field(
        default=1,
        gt=0,
        description="Query heads of one kv head in a tile (GQA): its rows are q / pack_heads positions of each.",
    )
    group: Literal["multiple", "at_most", "fitted", "any"] = Field(
        default="multiple",
        description="How many query heads share a kv head: a multiple of `pack_heads`, in tiles of as many; at most "
        "as many, all of them in a tile, of which the other rows are padding; the same, fitted to the queries of each "
        "sequence: a tile holds the least power of two of heads that is enough, and the more positions of them, or of "
        "many queries the largest that divides them; or any number, in tiles of as many, of which the last one of a "
        "kv head has padding where fewer are left.",
    )
    ctas_per_sm: int = Field(default=1, gt=0, description="CTAs of a specialised kernel that are to share an SM.")
    transposers: Literal[2, 4] = Field(
        default=4,
        description="Warps that transpose V, where `smem.vt` asks for that: a warpgroup of their own, or the 2 beside "
        "those that load, which leaves registers for one consumer more or for more columns of O.",
    )
    kv_from: Literal["first_key", "window"] = Field(
        default="first_key",
        description="Where tiles of keys begin: at the first key, so that all tiles of queries have the same, or at "
        "the first one that the window of a tile of queries shows it, so that as few as possible hold what it sees.",
    )

    @property
    def holds_group(self) -> bool:
        """Whether a tile has all query heads of a kv head, of which there may be fewer than it has room for."""
        return self.group in ("at_most", "fitted")


class SyncLoad(SpecModel):
    """Plain loads through registers; K and V take turns in one buffer."""

    engine: Literal["sync"]


class CpAsyncLoad(SpecModel):
    """cp.async with commit and wait groups; a ring of `kv_stages` buffers for K and for V."""

    engine: Literal["cp_async"]
    kv_stages: int = Field(gt=0, description="Depth of the ring; one stage holds a tile of K and a tile of V.")


class TmaLoad(SpecModel):
    """The tensor memory accelerator, completing on mbarriers."""

    engine: Literal["tma"]
    q_stages: int = Field(default=1, gt=0, description="Buffers for Q.")
    kv_stages: int = Field(gt=0, description="Depth of the ring; one stage holds a tile of K and a tile of V.")
    barrier: Literal["shared", "separate"] = Field(
        description="`shared`: one full barrier per stage counts the bytes of K and V; `separate`: one each."
    )
    page_rows: int | None = Field(
        default=None,
        gt=0,
        description="Keys of one page that are copied at once, with layout paged: page sizes are multiples of it. 8 "
        "and more come in a TMA box; 1: row by row, by cp.async.",
    )
    tile_slots: Literal[1] | None = Field(
        default=None,
        description="1: of packed sequences a CTA draws its next tile when K of the one that it is at is on its way, "
        "and not a tile earlier, which pays where tiles are long and few.",
    )


Load = Annotated[Union[SyncLoad, CpAsyncLoad, TmaLoad], Field(discriminator="engine")]


class Smem(SpecModel):
    """Swizzle of each operand's tile in shared memory."""

    q: Swizzle
    k: Swizzle
    v: Swizzle
    vt: Swizzle | None = Field(
        default=None,
        description="Of V transposed, which warps of their own make of tiles of V, with dtype e4m3: operands of 8 "
        "bits are K-major only. Left out: P V reads tiles of V as they were loaded.",
    )


class GlobalHandoff(SpecModel):
    """Scores and P are materialised in global memory as f32 (k1)."""

    through: Literal["global_f32"]


class SmemScoresHandoff(SpecModel):
    """Scores go to shared memory as f32, softmax works there, and the scalar PV product reads P from there."""

    through: Literal["smem_f32"]


class SmemHandoff(SpecModel):
    """P is rounded to 16 bits and stored to shared memory (stmatrix) as the A operand of the PV product."""

    through: Literal["smem_16bit"]
    swizzle: Swizzle


class RegisterHandoff(SpecModel):
    """P stays in registers: the C fragment of QK is read as the A fragment of PV."""

    through: Literal["registers"]


Handoff = Annotated[
    Union[GlobalHandoff, SmemScoresHandoff, SmemHandoff, RegisterHandoff], Field(discriminator="through")
]


class PingPongSchedule(SpecModel):
    """Warp specialised, and the consumer warpgroups issue their products in turn, each beside the others' softmax."""

    kind: Literal["ping_pong"]
    overlap: bool = Field(
        description="Whether a warpgroup runs Q K^T of the next tile and P V of this one beside its softmax."
    )


Schedule = Annotated[Union[CooperativeSchedule, WarpSpecializedSchedule, PingPongSchedule], Field(discriminator="kind")]


class Softmax(SpecModel):
    """The online softmax."""

    rescale_above: int | None = Field(
        default=None,
        gt=0,
        le=RESCALE_ABOVE_MAX,
        description="O is brought to a new maximum only when a row has outgrown the old one by more than this many "
        "powers of two; null: in every step.",
    )
    exp_before_wait: int | None = Field(
        default=None,
        gt=0,
        description="How many exponentials a thread computes in a step before it waits for P V of the step before; "
        "null: as many as ptxas leaves there.",
    )
    row_max: Literal["online", "first"] = Field(
        default="online",
        description="What exponents are relative to: the running maximum of each row, or that of the first tile in "
        f"which it sees keys, where a cap of at most {MOST_CAP_OF_FIRST_MAX:g} bounds others; O is never rescaled.",
    )
    mask_end: Literal["always", "when_cut"] = Field(
        default="always",
        description="Whether the last tile of keys is always masked past the end of the keys, which leaves straight "
        "code, or behind a branch and only when the end cuts it.",
    )
    sink: bool = Field(
        default=False,
        description="Whether a logit of each query head, an argument of each call, takes part in a row's softmax once.",
    )
    restart_every: int | None = Field(
        default=None,
        gt=0,
        description="Of packed sequences: after so many keys, from the first one on, a row's maximum, sum and O begin "
        "anew. The CTA adds up such parts in float32, one after the other, as the second kernel of `split: {keys: N}` "
        "does: of as many keys, with the same bits. null: they go on to the last key.",
    )
    softcap: bool = Field(
        default=False,
        description="Whether scores are capped before the mask, softcap tanh(scale S / softcap); how far they may go "
        "is an argument of each call.",
    )


class Split(SpecModel):
    """Keys in parts, a CTA for each part of a tile of queries, and a second kernel that adds the parts up."""

    count: Literal["auto"] | None = Field(
        default=None,
        description="`auto`: as many parts as let all CTAs be on the GPU at once, one where tiles of queries do.",
    )
    keys: int | None = Field(
        default=None,
        gt=0,
        description="In place of `count`: of how many keys a part is, from the first key on. A row's bits are then the "
        "same whatever else a call has. With scheduler even a CTA has an equal share of whole parts.",
    )


class Accumulate(SpecModel):
    """Sums of O = P V in two levels, with dtype e4m3: the tensor core keeps 13 bits below the largest addend."""

    promote_every: int = Field(
        gt=0, description="Tiles of keys whose P V the tensor core sums; threads add such sums in float32."
    )
    columns: int | None = Field(
        default=None,
        gt=0,
        description="Columns of O whose P V a thread holds at a time, one stripe of O after the other, so that wide "
        "heads have registers for it; null: all of them at once.",
    )


class Outputs(SpecModel):
    """What the kernel writes, and how."""

    o: Literal["over_q", "own_buffer", "direct"] = Field(
        default="over_q",
        description="How O reaches global memory: by TMA from shared memory, where Q was or from a buffer of its own, "
        "or straight from the registers.",
    )
    lse: bool = Field(default=True, description="Log-sum-exp of each row (natural logarithm, float32), when asked for.")


def usual_output(dtype: AttentionDType) -> OutputDType:
    """Element type of O beside q, k and v of this one, unless something else is said."""
    return "bf16" if dtype == "e4m3" else dtype


class OutputTensor(SpecModel):
    """What is O's own among the properties of tensors."""

    dtype: OutputDType | None = Field(default=None, description="Element type; null: that of the problem.")


class StoredTensors(SpecModel):
    """What is K's and V's own among the properties of tensors: 8 bits in memory, of which threads make 16.

    Beside q of 8 bits nothing is made of them: both products multiply them as they are.
    """

    dtype: StoredDType | None = Field(
        default=None,
        description="Element type of k and v in memory; null: that of the problem. Where that has 16 bits, tiles of "
        "them are converted to it, by a warpgroup or, with engine mma, by the warps that multiply them, and each call "
        "may give factors of both, `k_descale` and `v_descale`. Beside e4m3, e5m2 is multiplied as it is.",
    )
    stages: int = Field(
        default=1, gt=0, description="Tiles of K, and of V, in 8 bits that are in flight or in use, with such a dtype."
    )
    warpgroups: Literal[1, 2] = Field(default=1, description="Warpgroups that convert: half of their warps K, half V.")


class Forward(SpecModel):
    """One attention forward kernel."""

    operation: Literal["forward"] = "forward"
    problem: Problem
    mask: Mask = NoMask()
    tile: Tile
    load: Load
    smem: Smem | None = Field(
        default=None, description="Shared-memory layouts of Q, K and V; left out only by k1, which has none."
    )
    qk: Product
    pv: Product
    handoff: Handoff
    accumulate: Accumulate | None = Field(
        default=None, description="Left out: the tensor core sums P V of all tiles of keys."
    )
    schedule: Schedule = CooperativeSchedule()
    scheduler: Scheduler = Field(
        default="single_tile",
        description="`single_tile`: a CTA for each tile of queries; `grid`: the same for few tiles, placed by the "
        "grid, the first loads before all else, with programmatic dependent launch; the others: a CTA for each SM, "
        "which takes tile after tile, those known from the start (`static`), these and an equal share of the last "
        "wave's steps (`stream_k`, after arXiv 2301.03598), or the next one of all (`dynamic`). Of packed sequences "
        "`stream_k` draws tiles as `dynamic` does, and shares of the last wave where its tiles are about equally long.",
    )
    order: Literal["by_sequence", "by_head", "woven"] = Field(
        default="by_sequence",
        description="Of packed sequences with scheduler dynamic. `by_sequence`: a sequence's tiles of all heads, then "
        "the next sequence's; `by_head`: all sequences' tiles of one head, then the next head's, so that the tiles of "
        "a prompt, which the tensor cores bound, run beside those of decoding steps, which memory bounds; `woven`: "
        "those of sequences that have several for each head come evenly between those of sequences that have one, "
        "wherever the list has them, and a warpgroup whose rows a sequence does not have lets its keys go.",
    )
    split: Split | None = Field(default=None, description="Left out: a CTA visits all keys of its tile of queries.")
    softmax: Softmax = Softmax()
    outputs: Outputs = Outputs()
    o: OutputTensor = OutputTensor()
    kv: StoredTensors = StoredTensors()

    @property
    def o_dtype(self) -> OutputDType:
        """Element type of O."""
        return usual_output(self.problem.dtype) if self.o.dtype is None else self.o.dtype

    @property
    def element(self) -> Dtype:
        """What is known of the element type of q, k, v, and of P where a WGMMA reads it."""
        return DTYPES[self.problem.dtype]

    @property
    def kv_element(self) -> Dtype:
        """What is known of the element type of k and v in memory."""
        return DTYPES[self.kv.dtype or self.problem.dtype]

    @property
    def o_element(self) -> Dtype:
        """What is known of the element type of O."""
        return DTYPES[self.o_dtype]


# Specs of all operations. The next one is a model in a file of its own, imported here.
Other = Union[Gemm, Copy, Combine, Quantize]
Spec = Union[Forward, Other]

# By the value of `operation`, which files of attention may leave out.
DEFAULT_OPERATION = "forward"
OPERATIONS: dict[str, type[Spec]] = {
    "forward": Forward,
    "gemm": Gemm,
    "copy": Copy,
    "combine": Combine,
    "quantize": Quantize,
}
