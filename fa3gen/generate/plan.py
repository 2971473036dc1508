"""The plan: every number, name and section that a template prints, derived once from a checked spec.

Templates decide nothing that stands here. A plan is frozen and complete: rendering is a function of the plan alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, Literal

from fa3gen.base.wording import listed
from fa3gen.design import footprint, splits, tile_order
from fa3gen.design.cta import cta_of
from fa3gen.design.footprint import Region
from fa3gen.design.masks import given_with_calls
from fa3gen.design.operation import BATCH, Argument, Scalar, Scratch, Tensor, operation_of
from fa3gen.design.schedule import Schedule, full_tiles, schedule_of
from fa3gen.design.tiles import Letter, OperandTile, layout_atom, operand_tiles, sequence_contiguous, tiles_in_memory
from fa3gen.generate import combining, copying, gemm_header, gemm_plan, header, predicted_sass, quantizing
from fa3gen.generate.expected import Expectation
from fa3gen.generate.module_plan import ImportsPlan, ModulePlan, Named, Parameter
from fa3gen.hardware import hopper
from fa3gen.hardware.dtypes import FP32, INT32, VECTOR_BYTES, Dtype
from fa3gen.spec.model import (
    MOST_CAP_OF_FIRST_MAX,
    MOST_EXPONENT,
    CausalMask,
    Combine,
    Copy,
    CpAsyncLoad,
    Forward,
    Gemm,
    MmaProduct,
    NoMask,
    PingPongSchedule,
    Quantize,
    Scheduler,
    SmemHandoff,
    Spec,
    SyncLoad,
    TmaLoad,
    WgmmaProduct,
)
from fa3gen.spec.quantizing import BLOCK_ROWS
from fa3gen.spec.specfile import Variant

STORED_NAMES: dict[str, Any] = {
    "k_smem": "sK8",
    "v_smem": "sV8",
    "k_ring": "k8_ring",
    "v_ring": "v8_ring",
    "stages": "STORED_STAGES",
    "dtype_name": "KV_DTYPE",
    "v_rows": "sV8",
    "emptied_by": "all threads that convert K, or V,",
    "readers": "CONVERTER_WARPS",
    "told": "those who convert",
    "told_of_tile": "those who convert it know. They read as cp.async writes: no fence.",
    "q_ring_made_of": "storage.q_barriers, Q_STAGES, TILE_M * HEAD_DIM * 2, CONSUMER_WARPS",
}
# The same where one warp gathers rows of K, which consumers read, and of V, which others transpose.
TOGETHER_NAMES: dict[str, Any] = {
    "ring_parameters": "barriers, readers: cutlass.Constexpr",
    "emptied_by": "all threads of so many warps",
    "readers": "readers",
    "told": "the readers",
    "told_of_tile": "the readers know.",
}
# When entries of the table of pages are waited for.
AHEAD_OF_TABLE = "Nobody waits for the table: it is used when the next tile has been asked for."
BESIDE_TABLE = "The table is waited for while a tile is on its way."
MATRIX_COLUMNS = 16  # of a warp's 16 rows: what one stmatrix or ldmatrix of four 8 x 8 matrices moves


@dataclass(frozen=True)
class ProblemPlan:
    """Head dims, what v's is called in the module, the dtype as each library names it, elements that are aligned.

    `kv_name`: what the dtype of K and V, as shared memory has them for who multiplies, is called in the module.
    """

    head_dim: int
    v_dim: int
    v_dim_name: str
    asymmetric: bool
    dtype: str
    kv_name: str
    cutlass_dtype: str
    torch_dtype: str
    vector: int
    packed_sequences: bool
    paged: bool
    seq_v_name: str  # of the keys that v has: seq_k, or seq_v, which is that in whole units of permuted keys


@dataclass(frozen=True)
class RowsPlan:
    """How the module writes the part of each tensor that a tile of queries works with: a head of one sequence.

    `heads`: how its host side writes the number of heads of q; `sequence` names the number of a packed sequence, which
    not all kernels need. `factor` is where a factor of q, k or v stands, of those of 8 bits.
    """

    q: str
    k: str
    v: str
    o: str
    lse: str
    heads: str
    sequence: str = "_"
    factor: str = "work.batch, work.head_kv"


@dataclass(frozen=True)
class TilePlan:
    """Rows of Q (m) and of K and V (n) per step; threads per CTA; warpgroups that compute; query heads per tile.

    `padded`: some of these heads may not exist. `fitted`: how many a tile holds follows from how many queries its
    sequence has, one of `packs`; `pack` is what the module calls that, `pack_words` are those that say it of a tile
    (others fill up a vector), `rows_of_part` says which rows of a part exist, `adding_warp` which of the `adding_warps`
    adds up a share of a row's parts, `cut_short` bounds the tiles of a kv head that sequences cut short, and positions
    of a tile are `positions`, `work_positions` where a work item is known, and `most_positions` at most; those of a
    consumer's rows are `consumer_positions`.
    `any_group`: tiles of one kv head may be several, the last one padded.
    `rows` and `positions` are the module's names for the rows of Q as TMA moves them and for the positions they hold;
    `head_tiles` is how many tiles beside each other hold all heads. Whoever finds tiles of packed sequences is told
    `heads_told` beside the heads of k, has `heads_counted` of these, counts `tiles_found`, and finds `heads_found`: of
    q the first, and of k.
    `from_window`: whether tiles of keys begin with the first one that rows see. `k_begin` is what a work item says of
    where its keys begin, if it does; `ctas` how many CTAs are started for each SM. `register_shares`: see `footprint`;
    `launch_bound` is the module's name for what bounds the registers at launch, if it has one, `keys` that for the keys
    of a product.
    """

    m: int
    n: int
    threads: int
    warpgroups: int
    pack_heads: int
    padded: bool
    fitted: bool
    packs: str
    pack: str
    pack_words: tuple[str, ...]
    adding_warp: str
    adding_warps: str
    cut_short: str
    any_group: bool
    ctas_per_sm: int
    register_shares: int
    launch_bound: str
    shares_sm: bool
    packed: bool
    rows: str
    positions: str
    work_positions: str
    consumer_positions: str
    rows_of_part: str
    most_positions: str
    head_tiles: str
    heads_told: str
    heads_counted: str
    tiles_found: str
    heads_found: str
    from_window: bool
    k_begin: str
    ctas: str
    keys: str


@dataclass(frozen=True)
class MaskPlan:
    """Which keys a row sees; left and right are the window's reach in keys, 0 for other masks.

    `given`: calls give the window. The kernel is right for all of them then, and asks which tiles hold which edge.
    `full_tiles`: where the tiles of keys without an edge of the mask lie among those that a tile of queries visits:
    all but the first visited, which may reach past the end of the keys; before or between those with an edge; or none,
    because the window is too narrow. `both_edges`: whether a tile may hold the left and the right edge of a window.
    `by_consumer`: whether each consumer visits only the tiles of keys that its own rows see. `skips_absent`: whether
    one whose rows a sequence does not have multiplies none but the first and the last of them. `rows`: of how many
    rows, or positions of packed heads, a range of tiles is asked for.
    """

    kind: str
    left: int
    right: int
    full_tiles: Literal["all", "before", "between", "none"]
    both_edges: bool
    given: bool = False
    by_consumer: bool = False
    skips_absent: bool = False
    rows: str = "TILE_M"

    @property
    def whose_row(self) -> str:
        """Whose row sees none of the tiles of keys that are skipped."""
        return "one of the rows" if self.by_consumer else "a row of this CTA"

    @property
    def no_row(self) -> str:
        """The same, where a sentence begins with it."""
        return "None of the rows" if self.by_consumer else "No row of this CTA"

    @property
    def left_name(self) -> str:
        """What the left reach of a window is called where the kernel uses it: a constant or a variable."""
        return "window_left" if self.given else "WINDOW_LEFT"

    @property
    def right_name(self) -> str:
        """The same of the right."""
        return "window_right" if self.given else "WINDOW_RIGHT"


@dataclass(frozen=True)
class Matched(Named):
    """The same, with the tensor whose sizes it has to have but for the row."""

    like: Tensor

    def __str__(self) -> str:
        """`("v", v, k)`."""
        return f'("{self.tensor}", {self.tensor}, {self.like})'


@dataclass(frozen=True)
class Fake:
    """A tensor of unknown sizes that a module is compiled for; with its dtype, where that is not that of the others.

    Also with its contiguous dimension, where that is not the last.
    """

    tensor: Tensor
    own_dtype: bool = False

    def __str__(self) -> str:
        """`fake(seq_k, heads_kv, HEAD_DIM)`."""
        named = self.tensor.role == "input" or self.tensor.dims[0] is not BATCH  # packed ones have any number of dims
        dtype = [f"{'dtype=' * named}cutlass.{self.tensor.dtype.cutlass_name}"] * self.own_dtype
        contiguous, dims = self.tensor.contiguous, self.tensor.dims
        where = [f"contiguous={contiguous}"] * (contiguous != len(dims) - 1)
        dims = dims[1:] if dims[0] is BATCH else dims  # which all tensors have
        return f"fake({', '.join([*map(str, dims), *dtype, *where])})"


@dataclass(frozen=True)
class ArgumentsPlan:
    """Names of what functions take, where that differs from module to module; `load_kv` is of cooperative kernels.

    `launch` and `kernel` are whole signatures, `kernel_call` is what the kernel is given: tensors with their TMA atoms,
    `factors` of the scores, a window that calls give, and how much there is to schedule. `consume` is what a consumer
    gets beside shared memory and rings; `schedule` is what the scheduler reads, beginning with what a work item is made
    of (`made_of`), `work` what a role is given to know its tiles by. `k_loads` and `v_loads` are what one that loads
    begins with, `loaded_by` what it ends with. `ranged` is what decides which tiles of keys are visited, `seen` the
    same of a work item, `keys` what has the tiles of keys that a consumer visits. Of packed sequences `sequences` is
    what says where they lie, `bounds` where one does, `seen_by_lane` what a lane keeps of one, and `looked_at` what a
    warp knows of 32 of them and of what comes before; it looks on until it has the tile of the number `searched`, and
    tells `look_at` what `look_in` names. `softmax_step` is what the softmax of a step takes, `rows` what a thread keeps
    of its rows, and `lse_from` what their LSE is made of. Of parts `summed` is what a warp that adds them up reads,
    `combined` what the kernel that does takes, `combine_call` what it is given, and `row_outputs` what it needs to
    finish a row. `descales` are the factors of q, k and v; with those of q and k what a call gives by `call_` and its
    name becomes `scaled`, which S is multiplied by first, and `scales` has both where q has 8 bits. `normalize` is what
    brings O to its sums, `add_sink` what a sink adds to these needs. `accumulators` are a consumer's, of which
    `only_acc_s` names S, `multiplied` those that products write; P V of `pv_columns` goes to `acc_pv`, and from there
    into O by `promoted_by`. `products` and `operands` are those that it names. It finds V in `smem_v` and `v_ring`,
    where it has landed or been transposed (`v_ready`), and gives it back by `release_v`; in `multiplied_smem` stands
    what products and sums are made of, in `sums_before` the sum of O over the parts before. A part of a tile is given
    away and added to another by functions that take `of_part`; it is that of a `giver`.
    """

    factors: tuple[str, ...] = ()
    launch: tuple[Parameter, ...] = ()
    kernel: tuple[Parameter, ...] = ()
    kernel_call: tuple[str, ...] = ()
    schedule: tuple[str, ...] = ()
    made_of: tuple[str, ...] = ()
    ranged: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    keys: str = "work"
    work: tuple[str, ...] = ()
    k_loads: str = "tma_Q, tma_K, mQ, mK"
    v_loads: str = "tma_V, mVt"
    loaded_by: tuple[str, ...] = ()
    sequences: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()
    seen_by_lane: tuple[str, ...] = ()
    looked_at: tuple[str, ...] = ()
    look_in: tuple[str, ...] = ("sequences",)
    searched: str = "tile"
    work_on: tuple[str, ...] = ()
    consume: tuple[str, ...] = ()
    normalize: tuple[str, ...] = ()
    accumulators: tuple[str, ...] = ()
    only_acc_s: tuple[str, ...] = ()
    multiplied: tuple[str, ...] = ()
    acc_pv: tuple[str, ...] = ("acc_O",)
    products: str = "qk_mma, pv_mma"
    operands: str = "(tSrQ, _, tOrP, tOrV)"
    pv_columns: str = "HEAD_DIM"
    smem: tuple[str, ...] = ("sQ", "sK", "sVt")
    merge_warps: tuple[str, ...] = ()
    multiplied_smem: str = "sVt"
    sums_before: str = ""
    v_ring: str = "v_ring"
    v_ready: str = "landed"
    release_v: str = "v_ring.consumer_release(v_drain)"
    store_tile: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    multiply: tuple[str, ...] = ()
    multiply_first: tuple[str, ...] = ()
    finish_step: tuple[str, ...] = ()
    promoted_by: tuple[str, ...] = ()
    softmax_step: tuple[str, ...] = ()
    summed: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    combined: tuple[str, ...] = ()
    combine_call: tuple[str, ...] = ()
    row_outputs: tuple[str, ...] = ()
    lse_from: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    num_rows: int = 0
    descales: tuple[str, ...] = ()
    num_descales: int = 0
    scaled: str = "scale_log2"
    scales: tuple[str, ...] = ()
    of_part: tuple[str, ...] = ("scratch", "acc_O", "row_max", "row_sum")
    giver: str = "cta"
    add_sink: tuple[str, ...] = ("row_max", "row_sum", "row_sink", "scale_log2")
    load_kv: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadPlan:
    """How tiles come from global to shared memory.

    `q_ring`: whether consumers of a specialised kernel give Q's place back; `q_barrier` is what they wait for Q at.
    `page_rows`: keys of one page that are copied at once, 0 without pages; `pages`: what copies them, or nothing.
    `ahead`: tiles of K, or of V, that cp.async has on their way at once. `k_smem` to `table_read` are the module's
    names and words for where they come to, which is not where they are multiplied if they are converted, and who reads
    them there. `together`: one warp copies Q, K and V, where `v_tensor` is what V is called, TMA's `atoms` what it
    copies by, and `prefetched` those of them all that it fetches ahead: of Q there may be several. `clips_bytes`: some
    of what is clipped at the end of a sequence has elements of one byte, and some of two. `span`: bytes within which a
    swizzle exchanges pieces of 16, `span_units` of them, of a row that is copied singly; in the same way in as many
    rows as `rows_alike` divides a row's number by. `boxes_alike`: all lanes find all boxes of a tile of keys in pages;
    `many_boxes`: lanes find those of several tiles; `reads_ahead`: those of a tile, before they are needed. `unit`:
    elements of K or V in 16 bytes, with a comment.
    """

    engine: str
    q_stages: int
    kv_stages: int
    barrier: str
    q_ring: bool
    q_barrier: str
    page_rows: int
    pages: str
    ahead: int
    k_smem: str = "sK"
    v_smem: str = "sVt"
    k_ring: str = "k_ring"
    v_ring: str = "v_ring"
    stages: str = "KV_STAGES"
    dtype_name: str = "DTYPE"
    v_rows: str = "sV"
    around: str = "AROUND"
    unit: str = "8  # elements of 16 bytes"
    ring_parameters: str = "barriers"
    emptied_by: str = "all consumer threads"
    readers: str = "CONSUMER_WARPS"
    told: str = "the consumers"
    told_of_tile: str = "the consumers know."
    table_read: str = AHEAD_OF_TABLE
    q_ring_made_of: str = "storage.q_barriers, Q_STAGES, TILE_M * HEAD_DIM * 2"
    together: bool = False
    v_tensor: str = "mVt"
    atoms: str = ""
    prefetched: str = ""
    clips_bytes: bool = False
    span: int = 0
    span_units: int = 0
    rows_alike: str = ""
    boxes_alike: bool = False
    many_boxes: bool = False
    reads_ahead: bool = False

    @property
    def runs_ahead(self) -> bool:
        """Whether a tile is begun before the one before it has landed."""
        return self.ahead > 1

    @property
    def q_stage(self) -> str:
        """Where a function that copies Q puts it: into the stage that it is told, or the only one."""
        return "stage" if self.q_ring else "0"

    @property
    def q_copied_to(self) -> str:
        """Its parameters for that, the barrier with it."""
        return "stage, q_full" if self.q_ring else "q_full"

    @property
    def reads_entries(self) -> bool:
        """Whether entries of the table are read before they say where single rows lie."""
        return self.runs_ahead or self.together


@dataclass(frozen=True)
class EightBitPlan:
    """Products of 8 bits: P is 2^`exponent` times itself, and O is rounded to a dtype of its own.

    `keys_of_p`: whether V has its keys in the order in which a thread has P; `permuted`: because it is given so.
    `transposes`: whether warps, `transposers` of them, make V transposed of what was loaded: a warpgroup of their own,
    with so many `registers`, or, where that is 0, two beside those that load. Keys then stand in the order in which a
    thread holds P, and columns of O in the order in which it stores V. `v_keys_atom` is the layout of V as it was
    loaded, seen as rows of keys; `v_span` and `vt_span` are the bytes within which the swizzles of V and V transposed
    exchange pieces. `two_levels`: whether threads add up P V of tiles of keys, `striped`: of one stripe of O after the
    other; `holds`: of `promote_every` tiles of keys, which the tensor core has summed. `mixed`: whether K and V are of
    another dtype than Q and P, `kv_cutlass` or `kv_torch`, so that an input's is `dtype_by_name`. `block_rows`: rows of
    a head that share a factor of q, or of k; 0 where a factor is of a head.
    """

    exponent: int
    transposes: bool
    permuted: bool
    keys_of_p: bool
    transposers: int
    registers: int
    two_levels: bool
    block_rows: int
    striped: bool
    mixed: bool
    dtype_by_name: str
    kv_cutlass: str
    kv_torch: str
    holds: bool
    promote_every: int
    cutlass_out: str
    torch_out: str
    o_atom: str
    v_keys_atom: str
    v_span: int
    vt_span: int


@dataclass(frozen=True)
class StoredPlan:
    """K and V of 8 bits in memory, and the warps that make tiles of the products' dtype of them, if there are any.

    `warps` convert K, and as many V; `at_once` is how many units a thread has read before it converts one. Who converts
    in registers reads a group of its keys of V at once, or in `several_reads`.
    """

    dtype: str
    cutlass_dtype: str
    torch_dtype: str
    stages: int
    warps: int
    registers: int
    at_once: int
    warpgroups: int
    several_reads: bool


@dataclass(frozen=True)
class LayoutPlan:
    """A tile in shared memory: CuTe's name of the layout atom (major order and swizzle), and how atoms are lined up.

    `plain`: there is no atom, rows stand one below the other. `along` is the contiguous dimension and `shape` has all
    dimensions, as the module calls them. `order`: atoms stand below each other along the dimension that is not
    contiguous, so that TMA's boxes are large.
    """

    letter: str
    atom: str
    plain: bool
    along: str
    shape: str
    order: str


@dataclass(frozen=True)
class SmemPlan:
    """Shared memory of one CTA, and the layouts of operands there; None for those that never are.

    `o` is that of O, which is gathered in a layout of its own where Q's is another.
    """

    regions: tuple[Region, ...]
    barrier_bytes: int
    total_bytes: int
    q: LayoutPlan | None
    k: LayoutPlan | None
    v: LayoutPlan | None
    p: LayoutPlan | None
    o: LayoutPlan | None
    vt: LayoutPlan | None = None

    @property
    def inputs(self) -> tuple[LayoutPlan, ...]:
        """Those of Q, K and V."""
        return tuple(layout for layout in (self.q, self.k, self.v, self.vt) if layout is not None)

    @property
    def plain(self) -> bool:
        """Whether some are not made of atoms."""
        return any(layout.plain for layout in self.inputs)

    @property
    def canonical(self) -> tuple[LayoutPlan, ...]:
        """Those that are made of atoms."""
        return tuple(layout for layout in (*self.inputs, self.p, self.o) if layout is not None and layout.atom)


@dataclass(frozen=True)
class ProductPlan:
    """One of the two products; m, n, k of its WGMMA instruction and how many of them one step issues."""

    engine: str
    a_source: str
    a_major: str
    b_major: str
    instruction: tuple[int, int, int]
    steps: int


@dataclass(frozen=True)
class HandoffPlan:
    """How P gets from the first product to the second."""

    through: str


@dataclass(frozen=True)
class SchedulerPlan:
    """How tiles of queries are given to CTAs.

    `longest_first`: of each head the tiles that see the most keys come first. stream_k deals out the last wave by
    tiles of keys, in at most `parts` parts of a tile of queries, where that saves at least `steps_saved` of them.
    dynamic draws tiles `slots` ahead, those of as many heads at a time as have K and V in `l2_mib` MiB, or with
    `waves_when_short`, of up to `short_keys` keys, as a wave of tiles has on `wave_sms` SMs; other warps
    are told where a tile lies (`passes_coordinates`) or its number, `told` warps beside the consumers' among them.
    `key_bytes` are those of a key in memory, as the module counts them.
    `shuffles_coordinates`: see `footprint`. `by_head`: of packed sequences those of one head come first; `woven`: those
    of sequences that have several come between `spread_eighths` eighths of the others. even has all
    steps in equal shares, of which a CTA leaves `share_words`. `split`: keys come in parts, of `min_steps` tiles at
    least, or (not 0) of `keys_of_part` keys. Shares of even stand in `most_lines` lines at most.
    `packed_shares`: stream_k of packed sequences, whose tiles and then shares are drawn, the latter where the longest
    tile has at most `longest_halves` halves of their mean length. `counts_seen`: steps of a tile are about as many as
    its rows see tiles of keys. `deals_rows`: see `splits`.
    """

    kind: Scheduler
    persistent: bool
    longest_first: bool
    passes_coordinates: bool
    shuffles_coordinates: bool
    slots: int
    told: str
    key_bytes: str
    parts: int = tile_order.PARTS
    steps_saved: int = tile_order.STEPS_SAVED
    l2_mib: int = tile_order.BYTES_IN_L2 // 2**20
    waves_when_short: bool = False
    short_keys: int = tile_order.SHORT_KEYS
    wave_sms: int = tile_order.WAVE_SMS
    share_words: int = 0
    most_lines: int = splits.MOST_LINES
    by_head: bool = False
    woven: bool = False
    spread_eighths: int = tile_order.SPREAD_EIGHTHS
    split: bool = False
    min_steps: int = splits.STEPS_OF_PART
    keys_of_part: int = 0
    num_shares: str = "num_sms"
    packed_shares: bool = False
    longest_halves: int = tile_order.LONGEST_HALVES
    counts_seen: bool = False
    deals_rows: bool = False

    @property
    def whole_parts(self) -> bool:
        """Whether a CTA of scheduler even has whole parts of so many keys, which leave one by one."""
        return self.kind == "even" and self.keys_of_part > 0

    @property
    def beside_previous(self) -> bool:
        """Whether every launch may begin beside the end of the kernel before; grid asks the caller."""
        return self.kind == "even" and not self.keys_of_part

    @property
    def tile_ring(self) -> bool:
        """Whether one warp tells the others of a CTA which tiles it has, through a ring."""
        return self.kind in footprint.TELLING or self.packed_shares

    @property
    def draws(self) -> bool:
        """Whether CTAs draw their tiles from a counter."""
        return self.kind == "dynamic" or self.packed_shares

    @property
    def tells_keys(self) -> bool:
        """Whether a CTA is told which tiles of keys it has of a tile of queries."""
        return self.kind == "even" or self.packed_shares

    @property
    def giver(self) -> str:
        """What a part of a tile is numbered by."""
        return "share" if self.packed_shares else "cta"

    @property
    def counts_sms(self) -> bool:
        """Whether the number of SMs says how many CTAs there are."""
        return self.persistent or (self.split and not self.keys_of_part)


@dataclass(frozen=True)
class CapsPlan:
    """Which caps a call may give: in words, as a test of one, and what is needed to whoever gives another."""

    words: str = "finite and positive"
    test: str = "0.0 < softcap < math.inf"
    needed: str = "a finite and positive number"


@dataclass(frozen=True)
class SoftmaxPlan:
    """Whether O is rescaled only now and then: when a maximum has grown by more than 2^rescale_above.

    `exp_before_wait`: exponentials of a thread that stay before the wait for P V, 0 for as many as ptxas likes.
    `mask_end`: whether the last tile of keys is masked always, or only when the end of the keys cuts it.
    `sink`: whether a logit of each head takes part; `softcap`: whether scores are capped. `most_cap`: how far they may
    be, where exponentials are relative to a first maximum; 0 where that moves. `caps` says the same.
    `largest` is the logit that a row's sum of exponentials is relative to, as the module writes it, and `sum_of` in
    words; `shrink` brings O to that of a larger sink, and to the factor of V, if it has one.
    """

    lazy: bool
    rescale_above: int
    exp_before_wait: int = 0
    mask_end: Literal["always", "when_cut"] = "always"
    sink: bool = False
    softcap: bool = False
    most_cap: float = 0.0
    most_exponent: int = MOST_EXPONENT
    caps: CapsPlan = CapsPlan()
    restart_every: int = 0
    sums_in_smem: bool = False
    largest: str = "row_max[r] * scale_log2 * LN_2"
    sum_of: str = "scale max"
    shrink: str = "shrink"

    @property
    def restarts(self) -> bool:
        """Whether a row's maximum, sum and O begin anew after so many keys, and a CTA adds up what it has of each."""
        return self.restart_every > 0


@dataclass(frozen=True)
class OutputPlan:
    """Where O lies in shared memory, if it does, the name of the rows that one TMA copy stores, and O's dtype.

    `smem` is the module's name for O's place there, of cooperative kernels: Q's, or its own where the layouts differ;
    `smem_dtype` is that for its dtype there.
    `own_dtype`: another one than that of q, k and v. `torch_name` is its dtype's in the module; `needed_name` is that
    of the dtype which a check asks of any tensor of a call. `clipped`: what of O is clipped where its sequence ends.
    `in_order`: O in registers, with its columns in the order in which they are stored from there.
    """

    place: Literal["over_q", "own_buffer", "direct"]
    smem: str
    smem_dtype: str
    stored_rows: str
    own_dtype: bool
    torch_name: str
    needed_name: str
    clipped: str
    in_order: str


@dataclass(frozen=True)
class SchedulePlan:
    """Who loads and who computes; registers are per thread after setmaxnreg, 0 without it.

    `flattened`: the loop over tiles of keys runs on from one tile of queries to the next. `roles`: how many there are,
    told apart by warpgroup, of which the `givers` give registers back.
    """

    specialized: bool
    overlap: bool
    flattened: bool
    ping_pong: bool
    producer_registers: int
    consumer_registers: int
    roles: str = "Two"
    givers: str = "producers"


@dataclass(frozen=True)
class EntryPlan:
    """Words and arguments of the Python entry points.

    `named` and `matched` are the tensors that a caller may give, for checks. `fakes` stand for the inputs when the
    module is compiled, `fake_out` for the output, and `stand_ins` are what follows these in a launch. `keeps_scratch`:
    some scratch outlives a call, in slots for streams and CUDA graphs.
    `by_sequence` are the inputs whose sequence is contiguous.
    `launched` are all arguments of a launch, in order, as the module is compiled for them.
    `given` are the names of what the entry point has at hand when it launches: all but the scratch that outlives a
    call, and the scale. `options` are the keywords of the entry point, with their defaults. `no_values` stands for a V
    without keys, of which TMA wants an address.
    """

    named: tuple[Named, ...]
    matched: tuple[Matched, ...]
    fakes: tuple[Fake, ...]
    fake_out: Fake
    stand_ins: tuple[Argument, ...]
    given: tuple[str, ...]
    options: tuple[str, ...]
    launched: tuple[str, ...]
    keeps_scratch: bool
    mask_phrase: str
    output_phrase: str
    empty_phrase: str
    heads_phrase: str
    kv_phrase: str
    by_sequence: tuple[Named, ...]
    by_sequence_phrase: str
    no_values: str
    page_phrase: str = ""
    page_checks: str = ""
    ctas_phrase: str = ", each of which gets one CTA"


@dataclass(frozen=True)
class SectionsPlan:
    """Which template file fills each section of the spine."""

    spine: str
    kernel: str
    range: str
    loads: str
    producers: str
    consumer: str
    work: str
    qk: str
    mask: str
    softmax: str
    pv: str
    epilogue: str
    host: str
    scheduler: str = ""
    pages: str = ""


@dataclass(frozen=True)
class Plan(ModulePlan):
    """Everything that the templates print for one module of attention."""

    spec: Forward
    problem: ProblemPlan
    rows: RowsPlan
    tile: TilePlan
    mask: MaskPlan
    load: LoadPlan
    eight_bit: EightBitPlan | None
    stored: StoredPlan | None
    smem: SmemPlan
    qk: ProductPlan
    pv: ProductPlan
    p: HandoffPlan
    schedule: SchedulePlan
    scheduler: SchedulerPlan
    arguments: ArgumentsPlan
    softmax: SoftmaxPlan
    output: OutputPlan
    lse: bool
    imports: ImportsPlan
    entry: EntryPlan
    sections: SectionsPlan

    @property
    def spine(self) -> str:
        """The template of the family of kernels."""
        return self.sections.spine

    @property
    def converts(self) -> bool:
        """Whether a warpgroup makes tiles of 16 bits of what was loaded."""
        return self.stored is not None and self.stored.warpgroups > 0

    @property
    def by_warps(self) -> bool:
        """Whether each warp multiplies keys of its own."""
        return self.pv.engine == "mma"

    @property
    def each_warp(self) -> str:
        """What a loop over warps counts in the kernel that adds parts up: `warp` is a module where warps use it."""
        return "number" if self.eight_bit or self.by_warps else "warp"

    @property
    def templates(self) -> dict[str, str]:
        """The section files that the plan chose, by what they are for."""
        return {name: value for name, value in vars(self.sections).items() if value}


def make_plan(variant: Variant) -> ModulePlan:
    """Derive the plan of one variant; its spec has passed `fa3gen.design.rules.check`."""
    match variant.spec:
        case Forward() as spec:
            return _attention(variant, spec)
        case Gemm() as spec:
            source = PurePath(variant.source)
            return gemm_plan.make_plan(variant.stem, spec, summary=variant.summary, source=source)
        case Copy() as spec:
            return copying.make_plan(variant, spec)
        case Combine() as spec:
            return combining.make_plan(variant, spec)
        case Quantize() as spec:
            return quantizing.make_plan(variant, spec)


def describe(spec: Spec, summary: str) -> header.Description:
    """Describe one module in words; `summary` is that of its spec."""
    match spec:
        case Forward():
            return header.describe(spec, summary)
        case Gemm():
            return gemm_header.describe(spec, summary)
        case Copy():
            return copying.describe(spec, summary)
        case Combine():
            return combining.describe(spec, summary)
        case Quantize():
            return quantizing.describe(spec, summary)


def _attention(variant: Variant, spec: Forward) -> Plan:
    described, cta = header.describe(spec, variant.summary), cta_of(spec)
    return Plan(
        stem=variant.stem,
        spec=spec,
        problem=_problem(spec),
        rows=_rows(spec),
        tile=_tile(spec),
        mask=_mask(spec),
        load=_load(spec),
        eight_bit=_eight_bit(spec),
        stored=_stored(spec),
        smem=_smem(spec),
        qk=_product(spec.qk, spec.element, spec.tile.kv, spec.problem.head_dim),
        pv=_product(spec.pv, spec.element, footprint.promoted_columns(spec), spec.tile.kv),
        p=HandoffPlan(spec.handoff.through),
        schedule=_schedule(spec),
        scheduler=_scheduler(spec),
        arguments=_arguments(spec),
        softmax=_softmax(spec),
        output=_output(spec),
        lse=spec.outputs.lse,
        imports=_imports(spec),
        operation=operation_of(spec),
        entry=_entry(spec),
        sections=_sections(spec),
        cta=cta,
        described=described,
        header=header.make_header(described, cta, source=PurePath(variant.source), stem=variant.stem),
        expectation=expectation(spec),
    )


def _problem(spec: Forward) -> ProblemPlan:
    dtype = spec.element
    d, v_dim = spec.problem.head_dim, spec.problem.v_dim
    return ProblemPlan(
        head_dim=d,
        v_dim=v_dim,
        v_dim_name="HEAD_DIM" if v_dim == d else "HEAD_DIM_V",
        asymmetric=v_dim != d,
        dtype=spec.problem.dtype,
        kv_name="KV_DTYPE" if spec.kv_element is not spec.element and not footprint.converts(spec) else "DTYPE",
        cutlass_dtype=dtype.cutlass_name,
        torch_dtype=dtype.torch_name,
        vector=operation_of(spec).tensor("q").vector,
        packed_sequences=footprint.packed_sequences(spec),
        paged=footprint.paged(spec),
        seq_v_name="seq_v" if footprint.permuted_keys(spec) else "seq_k",
    )


def _rows(spec: Forward) -> RowsPlan:
    if not footprint.packed_sequences(spec):
        of_q, of_k = "[None, None, work.head, work.batch]", "[None, None, work.head_kv, work.batch]"
        lse, heads = "mLSE[None, work.head, work.batch]", "cute.size(q, mode=[2])"
        k, v = f"mK{of_k}", f"mVt{of_k}"
        if spec.tile.kv_from == "window":
            k, v = f"cute.domain_offset((work.k_begin, 0), {k})", f"cute.domain_offset((0, work.k_begin), {v})"
        return RowsPlan(f"mQ{of_q}", k, v, f"mO{of_q}", lse, heads)
    queries, keys = "work.head, work.q_begin, work.seq_q", "work.head_kv, work.k_begin, work.seq_k"
    numbered = footprint.paged(spec) or footprint.eight_bit_cache(spec) or footprint.eight_bits(spec)
    sequence, factor = "sequence" if numbered else "_", "work.sequence, work.head_kv"
    if spec.tile.group != "multiple":
        of_heads = {"any": "(work.head, work.head_kv)", "fitted": "heads"}.get(spec.tile.group, "work.head_kv")
        of_group = f"{of_heads}, work.q_begin, work.seq_q"
        o, lse = f"slice_rows(mO, {of_group})", f"slice_rows(mLSE, {of_group})"
        q = f"packed_rows_of(mQ, {queries})"
        k, v = f"rows_of(mK, {keys})", f"columns_of(mVt, {keys})"
        return RowsPlan(q, k, v, o, lse, "heads_q", sequence, factor)
    rows_of = "packed_rows_of" if spec.tile.pack_heads > 1 else "rows_of"
    o_rows_of = "slice_rows" if spec.outputs.o == "direct" else rows_of
    return RowsPlan(
        q=f"{rows_of}(mQ, {queries})",
        k=f"rows_of(mK, {keys})",
        v=f"columns_of(mVt, {keys})",
        o=f"{o_rows_of}(mO, {queries})",
        lse=f"slice_rows(mLSE, {queries})",
        heads="heads_q",
        sequence=sequence,
        factor=factor,
    )


def _positions(spec: Forward) -> str:
    """The module's name for the positions of a tile of queries, or what they are where calls decide on its heads."""
    if spec.tile.group == "fitted":
        return "(TILE_M >> pack_log2)"
    return "POSITIONS" if spec.tile.pack_heads > 1 else "TILE_M"


def _cut_short(spec: Forward) -> str:
    """How many tiles of queries of a kv head a host counts that may be cut short by their sequences' ends."""
    if spec.tile.group != "fitted":
        return "tables" if footprint.paged(spec) else "offsets - 1"
    return "tables * packs_of_kv" if footprint.paged(spec) else "(offsets - 1) * packs_of_kv"


def _tile(spec: Forward) -> TilePlan:
    packed, any_group = spec.tile.pack_heads > 1, spec.tile.group == "any"
    fitted, positions = spec.tile.group == "fitted", _positions(spec)
    return TilePlan(
        m=spec.tile.q,
        n=spec.tile.kv,
        threads=footprint.threads(spec),
        warpgroups=spec.tile.warpgroups or 0,
        pack_heads=spec.tile.pack_heads,
        ctas_per_sm=spec.tile.ctas_per_sm,
        shares_sm=spec.tile.ctas_per_sm > 1,
        register_shares=footprint.register_shares(spec),
        launch_bound=_launch_bound(spec),
        packed=packed,
        padded=spec.tile.group != "multiple",
        fitted=fitted,
        packs=str(tile_order.packs(spec)),
        pack="pack" if fitted else "PACK_HEADS",
        pack_words=("pack_log2" if fitted else "zero", *["zero"] * footprint.paged(spec)),
        adding_warp="warp_idx, COMBINE_WARPS" if splits.deals_rows(spec) else "warp_idx",
        adding_warps="warps" if splits.deals_rows(spec) else "COMBINE_WARPS",
        cut_short=_cut_short(spec),
        any_group=any_group,
        rows="PACKED_M" if packed else "TILE_M",
        positions=positions,
        work_positions=positions.replace("pack_log2", "work.pack_log2"),
        consumer_positions="(WGMMA_M // PACK_HEADS)" if spec.tile.pack_heads > 1 else "WGMMA_M",
        rows_of_part="rows, work.pack_log2" if fitted else "rows",
        most_positions="TILE_M >> apart" if fitted else "POSITIONS",
        head_tiles=_head_tiles(spec),
        heads_told="heads_q // heads_kv" if any_group else _head_tiles(spec),
        heads_counted="heads, heads_kv" if any_group else "heads_q, _",
        tiles_found="heads_kv * packs" if any_group else "heads_q",
        heads_found="first_head, head_kv" if any_group else "head, head // (heads_q // heads_kv)",
        from_window=spec.tile.kv_from == "window",
        k_begin=_k_begin(spec),
        ctas="CTAS_PER_SM CTAs" if spec.tile.ctas_per_sm > 1 else "one CTA",
        keys="WARP_KEYS" if footprint.by_warps(spec) else "TILE_N",
    )


def _head_tiles(spec: Forward) -> str:
    """Of packed sequences the heads with tiles of their own; where a tile has all of a group, how many these are."""
    if spec.tile.group == "any":
        return "heads_kv * cute.ceil_div(heads_q // heads_kv, PACK_HEADS)"
    if spec.tile.holds_group:
        return "heads_q // heads_kv"
    return "heads_q // PACK_HEADS" if spec.tile.pack_heads > 1 else "heads_q"


def _launch_bound(spec: Forward) -> str:
    """Which constant of the module says how many CTAs are to have room on an SM, if there is one."""
    if footprint.register_shares(spec) > spec.tile.ctas_per_sm:
        return "REGISTER_SHARES"
    return "CTAS_PER_SM" if spec.tile.ctas_per_sm > 1 else ""


def _k_begin(spec: Forward) -> str:
    in_memory = "in k and v" * (footprint.packed_sequences(spec) and not footprint.paged(spec))
    seen = "the first key that a row sees" if spec.tile.kv_from == "window" else ""
    of_box = ", or the first one of its box" if seen and (footprint.page_rows(spec) or 1) > 1 else ""
    return f"{in_memory}, of {seen}" if in_memory and seen else in_memory + seen + of_box


def _mask(spec: Forward) -> MaskPlan:
    own = footprint.own_keys(spec)
    rows = "rows" if own else _positions(spec)
    return replace(_edges(spec), by_consumer=own, skips_absent=footprint.skips_absent(spec), rows=rows)


def _edges(spec: Forward) -> MaskPlan:
    if isinstance(spec.mask, NoMask):
        return MaskPlan("none", 0, 0, "all", False)
    if isinstance(spec.mask, CausalMask):
        return MaskPlan("causal", 0, 0, "before", False)
    left, right = spec.mask.left, spec.mask.right
    if left is None or right is None:
        return MaskPlan("window", 0, 0, full_tiles(spec), both_edges=not footprint.overlapped(spec), given=True)
    if not footprint.specialized(spec):
        return MaskPlan("window", left, right, "between", True)
    full = full_tiles(spec)
    # The tile with the end of the keys may hold the left edge of the last row, too: that row sees left + 1 keys.
    near_end = left + 1 < spec.tile.kv
    both_edges = full == "none" or near_end or not footprint.overlapped(spec)
    return MaskPlan("window", left, right, full, both_edges)


def _scheduler(spec: Forward) -> SchedulerPlan:
    # Where a CTA takes many tiles, the dynamic scheduler has an order of its own.
    longest_first = isinstance(spec.mask, CausalMask) and not footprint.persistent(spec)
    shuffles = footprint.shuffles_coordinates(spec)
    passes, slots = footprint.passes_coordinates(spec), footprint.tile_slots(spec)
    v_dim = "HEAD_DIM" if spec.problem.v_dim == spec.problem.head_dim else "HEAD_DIM_V"
    preparing = " + 2 * CONVERTER_WARPS" * footprint.converts(spec)
    preparing += " + TRANSPOSER_WARPS" * footprint.transposes(spec)
    return SchedulerPlan(
        spec.scheduler,
        footprint.persistent(spec),
        longest_first,
        passes,
        shuffles,
        slots,
        f"{1 + (footprint.packed_sequences(spec) and not footprint.loads_together(spec))}{preparing}",
        f"(HEAD_DIM + {v_dim})" if spec.kv_element.bytes == 1 else f"((HEAD_DIM + {v_dim}) * 2)",
        by_head=spec.order == "by_head",
        woven=spec.order == "woven",
        split=spec.split is not None,
        keys_of_part=(spec.split and spec.split.keys) or 0,
        num_shares="num_ctas" if spec.tile.ctas_per_sm > 1 else "num_sms",
        packed_shares=footprint.shares_packed(spec),
        waves_when_short=tile_order.waves_when_short(spec),
        counts_seen=splits.counts_seen(spec),
        deals_rows=splits.deals_rows(spec),
        share_words=splits.share_words(spec) if spec.scheduler == "even" else 0,
    )


def _arguments(spec: Forward) -> ArgumentsPlan:
    # A capped score is softcap times what the kernel has of it.
    factors = ("softcap * LOG2_E", "scale / softcap") if spec.softmax.softcap else ("scale * LOG2_E",)
    window = ["window"] * given_with_calls(spec.mask)
    ranged = ("seq_q", "seq_k", *["pack_log2"] * (spec.tile.group == "fitted"), *window)
    if not footprint.specialized(spec):
        shared = isinstance(spec.load, TmaLoad) and spec.load.barrier == "shared"
        rings = ["kv_ring"] if shared else ["k_ring", "v_ring"]
        load_kv = ("tma_K", "tma_V", "tKgK", "tVgV", "tKsK", "tVsV", *rings, "fill")
        return ArgumentsPlan(factors, load_kv=load_kv, ranged=ranged)
    stored = spec.outputs.o != "direct"
    operation = operation_of(spec)
    handed_on = ["scratch"] * (spec.scheduler == "stream_k") + ["parts"] * (spec.split is not None)
    num_tiles = Parameter("num_tiles", INT32)
    extents = {"stream_k": [Parameter("tail")], "static": [num_tiles], "dynamic": [num_tiles]}
    extents["grid"] = [Parameter("group")]
    even, whole = spec.scheduler == "even", splits.whole_parts(spec)
    eight_bits, two_levels = footprint.eight_bits(spec), footprint.two_levels(spec)
    transposes, striped = footprint.transposes(spec), footprint.stripes(spec) > 1
    restarts, in_smem = spec.softmax.restart_every is not None, footprint.sums_in_smem(spec)
    sums_before = ["sO_before" if in_smem else "acc_all"] * restarts
    held, since = ((name,) if footprint.promote_every(spec) > 1 else () for name in ("held", "since"))
    v_ring = "vt_ring" if transposes else "v_ring"
    descaled = eight_bits or footprint.eight_bit_cache(spec)
    descales = [*["q_descale"] * eight_bits, *["k_descale", "v_descale"] * descaled]
    if spec.split is not None:
        extents["grid"] = [Parameter("num_parts", INT32), Parameter("steps_of_part", INT32)]
    sides = [Parameter(f"window_{side}", INT32) for side in ("left", "right")] * bool(window)
    packed, shares = footprint.packed_sequences(spec), footprint.shares_packed(spec)
    gathered = footprint.gathered(spec)
    pages = ["pages"] * footprint.paged(spec)
    extent = [Parameter("sequences")] if packed else extents.get(spec.scheduler, [])
    made_of = window if packed else ["mQ", "mK", *window]
    sinks = ["mSinks"] * spec.softmax.sink
    parts = ("mParts", *(("mPartsMax", "mPartsSum") if whole else ("mPartsLSE",))) if spec.split is not None else ()
    tensors = (
        "mQ",
        "mK",
        "mV" if pages else "mVt",
        *["mO"] * (not whole),
        *["mLSE"] * (spec.outputs.lse and not whole),
        *sinks,
        *(parts or map(str, operation.scratch)),
        *["shares"] * (even and not whole),
        *descales,
    )
    atoms = ("tma_Q", *["tma_K", "tma_V"] * (not gathered), *["tma_O"] * stored)
    # Whole parts leave in memory of their own, and O is written by whoever adds them up.
    outputs = () if whole else ("mO", *["mLSE"] * spec.outputs.lse, *["tma_O", "sO"] * stored)
    turn = ["consumer"] * isinstance(spec.schedule, PingPongSchedule)
    cap = ["cap_scale"] * spec.softmax.softcap
    bounds = "q_begin", "seq_q", *["k_begin"] * (not pages), "seq_k"
    work = ("schedule",) if packed else ("work", "schedule")
    draws = [{"even": "shares"}.get(spec.scheduler, "counter")] * (not whole) + ["tile_ring", "tiles"]
    draws *= footprint.tells_tiles(spec)
    has_max = spec.softmax.row_max == "online"
    rows = ("row_max", "row_sum", "rescale") if has_max else ("row_shift", "row_sum")
    sums: tuple[str, ...] = ("row_sum",)
    if footprint.by_warps(spec):  # a sink enters where those of the warps are merged
        sums = ("scale_log2", *sinks)
    elif spec.softmax.sink:
        sums = ("row_lse", "row_inverse")
    elif whole:
        sums = ("row_max", *sums)
    elif spec.outputs.lse:
        scaled = [] if footprint.block_scales(spec) else ["scale_log2"]  # else the maxima are
        sums = ("row_max", *sums, *scaled) if has_max else ("row_shift", *sums)
    v_factor = ["v_factor"] * descaled
    of_o = v_factor if not sinks or footprint.by_warps(spec) else []  # with a sink it is in what O is multiplied by
    of_v = ["v_unit", "v_scale"] * footprint.block_scales(spec)  # of what O is in, and of the step's V
    # With factors of q and k, which a tile of queries finds, a scale of the call becomes that of the softmax, or cap.
    of_scores = "cap_scale" if cap else "scale_log2"
    given = [f"call_{name}" if descales and name == of_scores else name for name in ("scale_log2", *cap)]
    return ArgumentsPlan(
        factors=factors,
        launch=tuple(_parameter(argument) for argument in operation.arguments),
        kernel=(
            *map(Parameter, (*tensors, *atoms)),
            *(Parameter(name, FP32) for name in given),
            *sides,
            *extent,
            *map(Parameter, pages),
        ),
        kernel_call=(*tensors, *atoms, *factors, *(each.name for each in (*sides, *extent)), *pages),
        schedule=(*made_of, *(each.name for each in extent), *draws),
        made_of=tuple(made_of),
        ranged=ranged,
        seen=tuple(f"work.{name}" for name in ranged),
        keys="own" if footprint.own_keys(spec) else "work",
        work=work,
        k_loads="tma_Q, mQ, mK" if gathered else "tma_Q, tma_K, mQ, mK",
        v_loads="mV" if gathered else "tma_V, mV" if pages else "tma_V, mVt",
        loaded_by=(*pages, *work),
        sequences=_sequences(spec),
        bounds=bounds,
        seen_by_lane=(*bounds, *["lane_log2"] * (spec.tile.group == "fitted")),
        looked_at=("first", "before", *bounds, "tiles", "tiles_to_here"),
        look_in=("kind", "sequences") if spec.order == "woven" else ("sequences",),
        searched="number" if spec.order == "woven" else "tile",
        work_on=_work_on(spec, window),
        consume=(*outputs, *handed_on, *sinks, *(["scales"] if eight_bits else [*given, *descales]), *work),
        merge_warps=("merged", *of_o, "scale_log2"),
        normalize=("acc_O", "row_inverse" if sinks else "row_sum", *of_o),
        scaled=of_scores,
        scales=(*given, *descales),
        add_sink=("row_max", "row_sum", "row_sink", "scale_log2", *v_factor),
        accumulators=("acc_S", "acc_O", *["acc_step"] * two_levels, *held, *sums_before),
        only_acc_s=("acc_S", "_", *["_"] * two_levels, *["_"] * len(held), *["_"] * restarts),
        multiplied=("acc_S", "_", "acc_step", *held) if two_levels else ("acc_S", "acc_O", *["_"] * restarts),
        acc_pv=("acc_step" if two_levels else "acc_O", *[f"{name}={name}" for name in held]),
        products="qk_mma, _" if striped else "qk_mma, pv_mma",
        operands="(tSrQ, _, _, _)" if striped else "(tSrQ, _, tOrP, tOrV)",
        pv_columns="TILE_N" if striped else "HEAD_DIM",
        smem=_smem_of_consumers(spec),
        multiplied_smem="sVt, sums" if in_smem else "sVt",
        sums_before=", ".join(sums_before),
        v_ring=v_ring,
        v_ready="been transposed" if transposes else "landed",
        release_v=f"release_by_warp({v_ring}, v_drain)" if transposes else f"{v_ring}.consumer_release(v_drain)",
        store_tile=(
            *(*["merged"] * footprint.by_warps(spec), *outputs, *["parts"] * (spec.split is not None), "work"),
            *("of_warp" if footprint.by_warps(spec) else "acc_O", *of_o, *sums),
        ),
        stored=(
            (
                *(f"{name}={name}" for name in (*outputs, "work")),
                f"acc_O={'acc_O' if in_smem else 'acc_all'}",
                *("row_max=all_max", "row_sum=all_sum", "scale_log2=scale_log2"),
            )
            if restarts
            else (*outputs, *["parts"] * (spec.split is not None), "work", "acc_O", *of_o, *sums)
        ),
        multiply=(
            *("products", "tSrQ_tile", "operands", "accumulators", *["rescale"] * striped),
            *("k_ring", v_ring, "k_drain", "v_drain"),
            *cap,
            *turn,
        ),
        multiply_first=("products", "operands", "accumulators", "k_ring", "q_drain", "k_drain", *turn),
        finish_step=(
            *("accumulators", "rP", "rows", "scale_log2", *[v_ring, "v_drain"] * (not striped)),
            *(*["n_block"] * restarts, *["n_end"] * in_smem, *of_v),
        ),
        promoted_by=("factors", *of_v[1:]),
        of_part=("scratch", *["work"] * shares, "acc_O", "row_max", "row_sum"),
        giver="work.share" if shares else "cta",
        summed=("gO", "gLSE", *["cta", "num_parts"] * even),
        parts=parts,
        combined=(
            ("parts", "parts_max", "parts_sum", "out", "lse", "scale_log2: cutlass.Float32", "sequences")
            if whole
            else ("parts", "parts_lse", "shares", *sinks, "out", "lse")
        ),
        combine_call=(
            ("parts", "parts_max", "parts_sum", "out", "lse", factors[0], "sequences")
            if whole
            else ("mParts", "mPartsLSE", "shares", *sinks, "out", "lse", *["group"] * splits.deals_rows(spec))
        ),
        row_outputs=(*sinks, "out", "lse"),
        lse_from=("row_lse",) if sinks else ("row_max", "row_sum", "scale_log2"),
        softmax_step=("acc_S", *rows, "scale_log2"),
        rows=(*rows, *since, *["all_max", "all_sum"] * restarts),
        num_rows=len(rows) + len(since) + 2 * restarts,
        descales=tuple(descales),
        num_descales=len(descales),
    )


def _smem_of_consumers(spec: Forward) -> tuple[str, ...]:
    """What consumers read, and where they keep sums."""
    if footprint.by_warps(spec):
        return "sQ", "sK_bytes", "sV_bytes", "merged"
    if footprint.transposes(spec):
        return "sQ", "sK", "sVt_made"
    return "sQ", "sK", "sVt", *["sums"] * footprint.sums_in_smem(spec)


def _sequences(spec: Forward) -> tuple[str, ...]:
    """What says where packed sequences lie."""
    if footprint.paged(spec):
        return "cu_seqlens_q", "seqused_q", "seqused_k", "total_q", "most_keys"
    return "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "total_q", "total_k"


def _work_on(spec: Forward, window: Sequence[str]) -> tuple[str, ...]:
    if footprint.packed_sequences(spec):
        return "found", *window, "number"
    numbered = ["number", "valid"] * footprint.persistent(spec)
    part = ["part_of_keys"] * (spec.split is not None)
    # A mask depends on how many queries there are.
    return "coordinates", *part, "_" if spec.mask.kind == "none" else "mQ", "mK", *window, *numbered


def _parameter(argument: Argument) -> Parameter:
    return Parameter(argument.name, argument.dtype if isinstance(argument, Scalar) else None)


def _caps(spec: Forward) -> CapsPlan:
    if spec.softmax.row_max == "online":
        return CapsPlan()
    most = f"at most {MOST_CAP_OF_FIRST_MAX:g}"
    needed = f"a positive number of {most}; softmax.row_max: online takes any"
    return CapsPlan(f"positive, {most}", "0.0 < softcap <= MOST_SOFTCAP", needed)


def _softmax(spec: Forward) -> SoftmaxPlan:
    above, bounded = spec.softmax.rescale_above, spec.softmax.row_max == "first"
    # Of 8 bits P, and so its sums, are 2^P_EXPONENT times themselves.
    eight_bits = footprint.eight_bits(spec)
    return SoftmaxPlan(
        above is not None,
        above or 0,
        spec.softmax.exp_before_wait or 0,
        spec.softmax.mask_end,
        sink=spec.softmax.sink,
        softcap=spec.softmax.softcap,
        most_cap=MOST_CAP_OF_FIRST_MAX if bounded else 0.0,
        caps=_caps(spec),
        restart_every=spec.softmax.restart_every or 0,
        sums_in_smem=footprint.sums_in_smem(spec),
        largest="(row_max[r] * scale_log2 - P_EXPONENT) * LN_2" if eight_bits else SoftmaxPlan.largest,
        sum_of="largest" if eight_bits else SoftmaxPlan.sum_of,
        shrink="v_factor * shrink" if eight_bits or footprint.eight_bit_cache(spec) else SoftmaxPlan.shrink,
    )


def _output(spec: Forward) -> OutputPlan:
    packed, dtype = spec.tile.pack_heads > 1, spec.o_element
    rows = "WARP_ROWS" if spec.outputs.o == "own_buffer" else "TILE_M"
    packed_rows = {"WARP_ROWS": "PACKED_WARP_ROWS", "TILE_M": "PACKED_M"}[rows]
    names = ("TORCH_DTYPE", "TORCH_DTYPE")
    own = spec.o_dtype != spec.problem.dtype
    if own:
        names = ("TORCH_OUT_DTYPE" if footprint.eight_bits(spec) else dtype.torch_name, "dtype")
    elif footprint.eight_bit_cache(spec):
        names = ("TORCH_DTYPE", "dtype")
    smem = "sQ" if _smem(spec).o is None else "sO"
    smem_dtype = "OUT_DTYPE" if footprint.eight_bits(spec) else "DTYPE"
    clipped = "out, OUT_AROUND" if footprint.eight_bits(spec) else "out"
    in_order = "in_order_of_columns(acc_O)" if footprint.transposes(spec) else "acc_O"
    return OutputPlan(spec.outputs.o, smem, smem_dtype, packed_rows if packed else rows, own, *names, clipped, in_order)


def _load(spec: Forward) -> LoadPlan:
    barrier = spec.load.barrier if isinstance(spec.load, TmaLoad) else "none"
    q_ring = not footprint.keys_free_q(spec)
    pages = "cp_async" if footprint.gathered(spec) else "tma"
    of_keys = "" if footprint.gathered(spec) else " tma_K, tma_V"
    return LoadPlan(
        engine=spec.load.engine,
        q_stages=footprint.q_stages(spec),
        kv_stages=footprint.kv_stages(spec),
        barrier=barrier,
        q_ring=q_ring,
        q_barrier="q_ring" if q_ring else "q_full",
        page_rows=footprint.page_rows(spec) or 0,
        pages=pages if footprint.paged(spec) else "",
        ahead=footprint.gathered_ahead(spec),
        **(STORED_NAMES if footprint.converts(spec) else {}),
        **(TOGETHER_NAMES if footprint.loads_together(spec) else {}),
        around="KV_AROUND" if footprint.eight_bit_cache(spec) else LoadPlan.around,
        unit="16  # elements of K or V of 16 bytes" if spec.kv_element.bytes == 1 else LoadPlan.unit,
        table_read=AHEAD_OF_TABLE if footprint.gathered_ahead(spec) > 1 else BESIDE_TABLE,
        together=footprint.loads_together(spec),
        boxes_alike=footprint.boxes_alike(spec),
        many_boxes=footprint.many_boxes(spec),
        reads_ahead=footprint.in_boxes(spec) and footprint.converts(spec),
        v_tensor="mV" if footprint.paged(spec) else "mVt",
        atoms=f"(tma_Q,{of_keys})",
        prefetched=f"({'*' * (spec.tile.group == 'fitted')}tma_Q,{of_keys})",
        **(_swizzled_rows(spec) if footprint.gathered(spec) and not footprint.converts(spec) else {}),
        clips_bytes=(footprint.eight_bits(spec) and spec.outputs.o != "direct")
        or (footprint.eight_bit_cache(spec) and not footprint.paged(spec)),
    )


def _swizzled_rows(spec: Forward) -> dict[str, Any]:
    """How single rows of K and V are copied to where the products, or who transposes V, read them."""
    assert spec.smem is not None
    span = hopper.SWIZZLE_SPAN[spec.smem.k]
    alike = hopper.SWIZZLE_SPAN["128B"] // span
    return {
        "dtype_name": "KV_DTYPE" if footprint.mixed(spec) else "DTYPE",
        "span": span,
        "span_units": span // VECTOR_BYTES,
        "rows_alike": f" // {alike}" * (alike > 1),
    }


def _stored(spec: Forward) -> StoredPlan | None:
    if not footprint.eight_bit_cache(spec):
        return None
    element, converts = spec.kv_element, footprint.converts(spec)
    return StoredPlan(
        dtype=element.long_name,
        cutlass_dtype=element.cutlass_name,
        torch_dtype=element.torch_name,
        stages=spec.kv.stages,
        warps=footprint.converting_warps(spec),
        registers=footprint.converter_registers(spec) if converts else 0,
        at_once=footprint.converted_at_once(spec) if converts else 0,
        warpgroups=footprint.converting_warpgroups(spec),
        several_reads=_matrices_of_v(spec) > footprint.of_each_warp(spec) // hopper.MMA_N,
    )


def _eight_bit(spec: Forward) -> EightBitPlan | None:
    if not footprint.eight_bits(spec):
        return None
    transposes = footprint.transposes(spec)
    tiles = operand_tiles(spec)
    return EightBitPlan(
        exponent=footprint.P_EXPONENT,
        transposes=transposes,
        permuted=footprint.permuted_keys(spec),
        keys_of_p=footprint.keys_of_p(spec),
        transposers=spec.tile.transposers,
        registers=footprint.transposer_registers(spec) if footprint.transposing_warpgroups(spec) else 0,
        two_levels=footprint.two_levels(spec),
        block_rows=BLOCK_ROWS * footprint.block_scales(spec),
        striped=footprint.stripes(spec) > 1,
        mixed=footprint.mixed(spec),
        dtype_by_name='TORCH_KV_DTYPE if name in ("k", "v") else ' * footprint.mixed(spec) + "TORCH_DTYPE",
        kv_cutlass=spec.kv_element.cutlass_name,
        kv_torch=spec.kv_element.torch_name,
        holds=footprint.promote_every(spec) > 1,
        promote_every=footprint.promote_every(spec),
        cutlass_out=spec.o_element.cutlass_name,
        torch_out=spec.o_element.torch_name,
        o_atom=tiles["O"].atom if "O" in tiles else "",
        v_keys_atom=layout_atom("k", tiles["V"].swizzle),
        v_span=hopper.SWIZZLE_SPAN[tiles["V"].swizzle],
        vt_span=hopper.SWIZZLE_SPAN[tiles["Vt"].swizzle] if transposes else 0,
    )


def _smem(spec: Forward) -> SmemPlan:
    regions, barriers = tuple(footprint.shared_memory_map(spec)), footprint.barrier_bytes(spec)
    layouts = {letter: _layout(spec, tile) for letter, tile in operand_tiles(spec).items()}
    q, o = layouts.get("Q"), layouts.get("O")
    return SmemPlan(
        regions=regions,
        barrier_bytes=barriers,
        total_bytes=footprint.total_bytes(regions, barriers),
        q=q,
        k=layouts.get("K"),
        v=layouts.get("V"),
        p=layouts.get("P"),
        vt=layouts.get("Vt"),
        o=o if q and o and (q.atom, q.along) != (o.atom, o.along) else None,
    )


def _layout(spec: Forward, tile: OperandTile) -> LayoutPlan:
    columns = {"P": "TILE_N"}.get(tile.letter, "HEAD_DIM")
    of_keys = tile.letter in ("K", "V", "Vt")
    shape = ["TILE_N" if of_keys else "TILE_M", columns]
    if tile.letter in ("V", "Vt") and isinstance(spec.pv, WgmmaProduct | MmaProduct):
        shape.reverse()  # the B operand is V transposed
    order = ["0", "1"] if tile.major == "k" else ["1", "0"]
    if of_keys and not isinstance(spec.load, SyncLoad):
        shape, order = [*shape, "KV_STAGES"], [*order, "2"]
    along = tile.along.replace("head dim", "HEAD_DIM")
    return LayoutPlan(tile.letter, tile.atom, tile.plain, along, ", ".join(shape), ", ".join(order))


def _product(product: object, element: Dtype, n: int, k: int) -> ProductPlan:
    if isinstance(product, MmaProduct):
        return ProductPlan("mma", "", "", "", (hopper.MMA_M, hopper.MMA_N, hopper.MMA_K), 0)
    if not isinstance(product, WgmmaProduct):
        return ProductPlan("scalar", "", "", "", (0, 0, 0), 0)
    source = {"smem": "SMEM", "registers": "RMEM"}[product.a.source]
    instruction = (hopper.WGMMA_M, n, element.wgmma_k)
    majors = product.a.major.upper(), product.b.major.upper()
    return ProductPlan("wgmma", source, *majors, instruction, k // element.wgmma_k)


def _schedule(spec: Forward) -> SchedulePlan:
    if not footprint.specialized(spec):
        return SchedulePlan(False, False, False, False, 0, 0)
    producer, consumer = footprint.register_budget(spec)
    ping_pong = isinstance(spec.schedule, PingPongSchedule)
    overlap, flattened = footprint.overlapped(spec), footprint.flattened(spec)
    transposing = bool(footprint.transposing_warpgroups(spec))
    roles = "Three" if footprint.converts(spec) or transposing else "Two"
    givers = "others" if transposing else "producers"
    return SchedulePlan(True, overlap, flattened, ping_pong, producer, consumer, roles, givers)


def _imports(spec: Forward) -> ImportsPlan:
    tma, wgmma = isinstance(spec.load, TmaLoad), isinstance(spec.qk, WgmmaProduct)
    # O is gathered in shared memory, V transposed: by ldmatrix and stmatrix.
    gathered = operation_of(spec).tensor("out").moved == "tma" or footprint.transposes(spec)
    names = {
        "OperandMajorMode": wgmma,
        "cpasync": spec.load.engine != "sync",
        "warp": gathered
        or isinstance(spec.handoff, SmemHandoff)
        or footprint.q_in_registers(spec)
        or footprint.by_warps(spec),
        "warpgroup": bool(_smem(spec).canonical),
    }
    dataclasses = ["dataclass"] * footprint.specialized(spec)
    # Of a work item there is nothing to replace but where nothing is left.
    dataclasses += ["replace"] * (footprint.specialized(spec) and not footprint.persistent(spec))
    return ImportsPlan(
        dataclasses=", ".join(dataclasses),
        pipeline=tma,
        nvgpu=", ".join(name for name, needed in names.items() if needed),
        smem_allocator=spec.smem is not None,
    )


def _entry(spec: Forward) -> EntryPlan:
    like = "like q"
    if spec.problem.v_dim != spec.problem.head_dim:
        like = f"(batch, seq_q, heads_q, {spec.problem.v_dim})"
    if spec.o_dtype != spec.problem.dtype:
        like += f" but in {spec.o_element.torch_name}"
    pack = spec.tile.pack_heads
    multiple = pack > 1 and spec.tile.group == "multiple"
    heads = f"a multiple of {pack} x heads_kv" if multiple else "a multiple of heads_kv (GQA, MQA)"
    if spec.tile.holds_group:
        heads = f"1 to {pack} x heads_kv (GQA, MQA)"
    operation = operation_of(spec)
    arguments = operation.arguments
    kept = [argument.name for argument in arguments if isinstance(argument, Scratch) and argument.kept]
    # What has no default in the module has no usual value either.
    own = [name for name in ("sinks", "softcap") if name in (argument.name for argument in arguments)]
    descales = set(operation.optional_inputs) - set(operation.optional_lengths)  # which stand before the output
    # Tensors of q's dims, and not offsets.
    given = [tensor for tensor in operation.given if tensor.dims[-1].size is not None]
    fakes = {tensor.name: Fake(tensor, own_dtype=tensor.dtype is not spec.element) for tensor in given}
    return EntryPlan(
        named=tuple(Named(tensor) for tensor in operation.given),
        matched=tuple(Matched(tensor, operation.like(tensor)) for tensor in given),
        fakes=tuple(fakes[tensor.name] for tensor in given if tensor.role == "input"),
        fake_out=fakes["out"],
        stand_ins=tuple(argument for argument in arguments if argument not in (*operation.given, *descales)),
        given=tuple(_given(argument) for argument in arguments if argument.name not in (*kept, "scale")),
        options=(
            *own,
            *(f"{tensor}=None" for tensor in operation.optional_inputs),
            *["max_seqlen_k=None"] * splits.whole_parts(spec),
            *["window=(-1, -1)"] * given_with_calls(spec.mask),
            *("scale=None", "out=None", "return_lse=False"),
            *["enable_pdl=False"] * (spec.scheduler == "grid"),
        ),
        launched=tuple(str(fakes.get(argument.name, argument)) for argument in arguments),
        keeps_scratch=bool(kept),
        mask_phrase=header.mask_phrase(spec),
        output_phrase=like,
        empty_phrase=("a sink" if footprint.eight_bits(spec) else "its sink") if spec.softmax.sink else "-inf",
        heads_phrase=heads,
        kv_phrase=f", {spec.kv_element.torch_name}" if footprint.mixed(spec) else "",
        by_sequence=tuple(Named(operation.tensor(name)) for name in sequence_contiguous(spec)),
        by_sequence_phrase=listed(sequence_contiguous(spec)),
        no_values=_no_values(spec),
        page_checks="offsets, tables" + ", page" * (not footprint.gathered(spec)),
        page_phrase=f"page a multiple of {rows}, " if (rows := footprint.page_rows(spec) or 1) > 1 else "",
    )


def _no_values(spec: Forward) -> str:
    """A tensor with as many rows as K has where q stands for it: of q again, which is wide enough as a rule."""
    page = "None, " if spec.problem.layout == "paged" else ""
    if spec.problem.v_dim <= spec.problem.head_dim:
        return f"q[:, {page}:heads_kv, :HEAD_DIM_V]"
    return f"q.new_empty(total_q, {'1, ' if page else ''}heads_kv, HEAD_DIM_V)"


def _given(argument: Argument) -> str:
    """What the entry point passes on for an argument of a launch."""
    return "sinks.view(torch.int16)" if argument.name == "sinks" else argument.name


def _sections(spec: Forward) -> SectionsPlan:
    if spec.handoff.through == "global_f32":
        return SectionsPlan("naive.py.jinja", *[""] * 12)
    both_wgmma = isinstance(spec.pv, WgmmaProduct)
    family = "wgmma" if both_wgmma else "scalar"
    space = "fragment" if both_wgmma else "smem"
    pv = {"registers": "pv_wgmma_registers", "smem_16bit": "pv_wgmma_smem", "smem_f32": "pv_scalar"}
    sections = SectionsPlan(
        spine="fused.py.jinja",
        host=_section(f"host_{family}"),
        kernel=_section("kernel_wgmma" if both_wgmma else f"kernel_scalar_{spec.load.engine}"),
        range=_section(f"range_{spec.mask.kind}"),
        loads=_section(f"loads_{spec.load.engine}"),
        producers="",
        consumer="",
        work=_section("work_fragment" if both_wgmma else "work_scalar"),
        qk=_section(f"qk_{spec.qk.engine}"),
        mask=_section(f"mask_{space}_{spec.mask.kind}"),
        softmax=_section(f"softmax_{space}"),
        pv=_section(pv[spec.handoff.through]),
        epilogue=_section("epilogue_direct" if spec.outputs.o == "direct" else f"epilogue_{family}"),
    )
    if not footprint.specialized(spec):
        return sections
    if footprint.by_warps(spec):
        return replace(
            sections,
            spine="specialized.py.jinja",
            pages=_pages_section(spec),
            loads=_section(_loads_section(spec)),
            scheduler=_section(_scheduler_section(spec)),
            producers=_section(_producers_section(spec)),
            consumer=_section("consumer_warps"),
            work=_section("work_warps"),
            qk=_section("qk_warps"),
            mask=_section(f"mask_fragment_{spec.mask.kind}"),
            softmax=_section("softmax_fragment"),
            pv=_section("pv_warps"),
            epilogue=_section("epilogue_warps"),
        )
    overlap = footprint.overlapped(spec)
    return replace(
        sections,
        spine="specialized.py.jinja",
        pages=_pages_section(spec),
        loads=_section(_loads_section(spec)),
        scheduler=_section(_scheduler_section(spec)),
        producers=_section(_producers_section(spec)),
        consumer=_section("consumer_overlapped" if overlap else "consumer_sequential"),
        softmax=_section("softmax_overlapped" if overlap else "softmax_fragment"),
        pv=_section("pv_eight_bit" if footprint.eight_bits(spec) else "pv_wgmma_fragment"),
        epilogue=_section(_specialized_epilogue(spec)),
    )


def _loads_section(spec: Forward) -> str:
    if footprint.transposes(spec):
        return "loads_transposing"
    return "loads_gathered" if footprint.gathered(spec) else "loads_specialized"


def _producers_section(spec: Forward) -> str:
    if footprint.loads_together(spec):
        return "producers_together"
    return "producers_grid" if spec.scheduler == "grid" else "producers"


def _scheduler_section(spec: Forward) -> str:
    if spec.scheduler == "even":
        return "scheduler_parts" if splits.whole_parts(spec) else "scheduler_even"
    if footprint.packed_sequences(spec):
        return "scheduler_packed_shared" if footprint.shares_packed(spec) else "scheduler_packed"
    return "scheduler_split" if spec.split is not None else f"scheduler_{spec.scheduler}"


def _pages_section(spec: Forward) -> str:
    if not footprint.paged(spec):
        return ""
    return _section("page_rows" if footprint.gathered(spec) else "page_boxes")


def _specialized_epilogue(spec: Forward) -> str:
    if spec.o_dtype == "fp32":
        return "epilogue_direct_f32"
    if splits.whole_parts(spec):
        return "epilogue_parts"
    return {"over_q": "epilogue_wgmma", "own_buffer": "epilogue_own_buffer", "direct": "epilogue_direct"}[
        spec.outputs.o
    ]


def _warp_products(spec: Forward, schedule: Schedule) -> int:
    """Instructions mma.sync that stand in the code: 8 keys and 16 elements of a row at a time, or the reverse."""
    if not footprint.by_warps(spec):
        return 0
    dims = {"S": spec.problem.head_dim, "O": spec.problem.v_dim}
    elements = sum(schedule.count("product", what) * dim for what, dim in dims.items()) * footprint.of_each_warp(spec)
    return elements // (hopper.MMA_N * hopper.MMA_K)


def _matrices_of_v(spec: Forward) -> int:
    """Instructions by which a warp reads V of its keys in a step: four matrices of 8 keys and 16 bytes each."""
    return footprint.of_each_warp(spec) * spec.problem.v_dim * spec.kv_element.bytes // (4 * 8 * VECTOR_BYTES)


def _section(name: str) -> str:
    return f"sections/{name}.py.jinja"


def expectation(spec: Forward) -> Expectation:
    """What the compiled code must show, as static instruction counts; `fa3gen compile` holds PTX and SASS against them.

    The schedule says which steps there are, and how often the code has each: no loop over tiles is unrolled, and the
    tiles of keys before the first step, and those with an edge of the mask, may have code of their own.
    """
    schedule, threads = schedule_of(spec), footprint.threads(spec)
    d, v_dim, q, kv = spec.problem.head_dim, spec.problem.v_dim, spec.tile.q, spec.tile.kv
    wgmma: dict[tuple[int, int, int, str], int | None] = {}
    for what, product in (
        ("S", _product(spec.qk, spec.element, kv, d)),
        ("O", _product(spec.pv, spec.element, footprint.promoted_columns(spec), kv)),
    ):
        if product.steps:
            kind = (*product.instruction, {"SMEM": "smem", "RMEM": "registers"}[product.a_source])
            wgmma[kind] = (wgmma.get(kind) or 0) + schedule.count("product", what) * product.steps
    groups = schedule.count("wait_products")
    tma_loads = tma_stores = expect_tx = cp_async = stmatrix = ldmatrix = 0
    tiles = operand_tiles(spec)
    if isinstance(spec.load, TmaLoad):
        in_memory: dict[Letter, OperandTile] = tiles_in_memory(spec)
        letters: tuple[Letter, ...] = ("Q",) if footprint.gathered(spec) else ("Q", "K", "V")
        by_tma = [in_memory[letter] for letter in letters]
        tma_loads = sum(schedule.count("load", tile.letter) * tile.boxes for tile in by_tma)
        if (
            spec.tile.group == "fitted"
        ):  # a copy of Q for each number of heads that a tile may hold, of which one is made
            tma_loads += (len(tile_order.packs(spec)) - 1) * schedule.count("load", "Q") * in_memory["Q"].boxes
        filled = [ring.name for ring in schedule.rings if ring.filled_by == "TMA"]
        expect_tx = schedule.count("announce") + sum(schedule.count("wait_empty", on=name) for name in filled)
    if isinstance(spec.load, CpAsyncLoad):
        elements = {"Q": q * d, "K": kv * d, "V": kv * v_dim}
        copied = sum(schedule.count("load", what) * size for what, size in elements.items())
        cp_async = copied // footprint.SCALAR_VECTOR // threads
    if footprint.gathered(spec):  # by one warp each
        copied = kv * d * schedule.count("load", "K") + kv * v_dim * schedule.count("load", "V")
        cp_async = copied * spec.kv_element.bytes // VECTOR_BYTES // hopper.WARP
    if spec.smem is not None:
        columns = v_dim * schedule.count("gather", "O") + kv * schedule.count("store", "P")
        # What is transposed goes to the registers and back, 32 keys x 16 columns at a time.
        blocks = footprint.transposed_blocks(spec) * schedule.count("transpose")
        ldmatrix, stmatrix = blocks, columns // MATRIX_COLUMNS + blocks
        ldmatrix += schedule.count("read", "rV") * _matrices_of_v(spec)
        if schedule.count("gather", "O"):
            tma_stores = schedule.count("store", "O") * tiles["O"].boxes
    setmaxnreg, max_registers = {}, min(hopper.REGISTERS_PER_THREAD, hopper.REGISTERS_PER_SM // threads)
    if footprint.specialized(spec):
        # ptxas reports what the launch hands out, not what setmaxnreg makes of it.
        budgets, max_registers = _schedule(spec), footprint.launch_registers(spec)
        lowered = [budgets.producer_registers]
        if footprint.converts(spec):
            lowered.append(footprint.converter_registers(spec))
        if footprint.transposing_warpgroups(spec):
            lowered.append(footprint.transposer_registers(spec))
        setmaxnreg = {f"inc {budgets.consumer_registers}": 1, **Counter(f"dec {count}" for count in lowered)}
    regions, barriers = footprint.shared_memory_map(spec), footprint.barrier_bytes(spec)
    softmaxes = schedule.count("softmax")
    return Expectation(
        kernels=operation_of(spec).kernels,
        wgmma=wgmma,
        mma=_warp_products(spec, schedule),
        wgmma_commits=groups,
        wgmma_waits=groups,
        tma_loads=tma_loads,
        tma_stores=tma_stores,
        cp_async=cp_async,
        mbarrier_inits=sum(ring.mbarriers for ring in schedule.rings),
        mbarrier_expect_tx=expect_tx,
        ldmatrix=ldmatrix + d // MATRIX_COLUMNS * schedule.count("read", "Q"),
        stmatrix=stmatrix,
        tanh=schedule.count("cap") * footprint.thread_scores(spec),
        setmaxnreg=setmaxnreg,
        smem_bytes=footprint.total_bytes(regions, barriers),
        max_registers=max_registers,
        sass=predicted_sass.expectation(spec, waits=groups, softmaxes=softmaxes, o_boxes=tma_stores, matrices=stmatrix),
    )
