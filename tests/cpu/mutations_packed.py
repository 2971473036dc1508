"""Mutations of a kernel for packed sequences: where a sequence begins and ends, and who finds it. See `mutations.py`.

They change the module's source, since what they change is arithmetic that a compiler moves about.
"""

from __future__ import annotations

from dataclasses import dataclass

from hosting import small
from mutations import Moved
from rendering import source, spec_of

from fa3gen.cpu.findings import Kind
from fa3gen.spec.model import Forward

STEM = "fwd_packed_short_d64_causal"
SUNK, CAPPED = "fwd_packed_pack8_sink_any_window", "fwd_packed_softcap_d128_causal"
ANY_GROUP = "fwd_packed_mixed_any_group_d64_causal"
SHARED = "fwd_packed_shared_d64"


@dataclass(frozen=True)
class PackedMutation:
    """`old`, which the source of `base` says once, becomes `new`: a case of `cpu_cases` has to fail with a report.

    `reports`: one of these is said. `head_dim` is that of `base`, in small tiles; None: the module as committed.
    """

    name: str
    why: str
    old: str
    new: str
    case: str
    reports: tuple[str, ...]
    stem: str = STEM
    head_dim: int | None = 64

    @property
    def base(self) -> tuple[str, Forward]:
        """What is changed, and its spec."""
        if self.head_dim is None:
            return source(self.stem), spec_of(self.stem)
        return small(self.stem, self.head_dim)

    def apply(self) -> str:
        """The changed source. Raises Moved unless `old` occurs exactly once."""
        text, _ = self.base
        if text.count(self.old) != 1:
            raise Moved(f"`{self.old}` occurs {text.count(self.old)} times in {self.stem}.py: the module has changed")
        return text.replace(self.old, self.new)


OUTSIDE = "wrote outside `out`"
TWICE = f"{Kind.GLOBAL_RACE}: a store"  # to what another CTA has written, too

PACKED = [
    PackedMutation(
        "O not clipped where its sequence ends",
        "the store writes whole tiles, over the rows of the next sequence, or behind the last",
        "gO = rows_of(mO, work.head, work.q_begin, work.seq_q)",
        "gO = rows_of(mO, work.head, work.q_begin, cute.ceil_div(work.seq_q, TILE_M) * TILE_M)",
        "few_keys",
        (OUTSIDE, TWICE),
    ),
    PackedMutation(
        "V not clipped where its sequence ends",
        "P is 0 behind the last key, and 0 times NaN is NaN",
        "columns_of(mVt, work.head_kv, work.k_begin, work.seq_k)",
        "columns_of(mVt, work.head_kv, work.k_begin, work.seq_k + 1)",
        "ragged",
        ("O has NaN",),
    ),
    PackedMutation(
        "LSE a row late",
        "each row has that of the row before, and one behind the sequence is written",
        "slice_rows(mLSE, work.head, work.q_begin, work.seq_q)",
        "slice_rows(mLSE, work.head, work.q_begin + 1, work.seq_q)",
        "ragged",
        ("LSE ",),
    ),
    PackedMutation(
        "every other group of 32 sequences skipped",
        "tiles of the second group are nobody's",
        "first + WARP, before + tiles_of_all, sequences",
        "first + 2 * WARP, before + tiles_of_all, sequences",
        "many",
        ("O has NaN",),
    ),
    PackedMutation(
        "lengths in use ignored",
        "rows that are not in use are written, and seen as keys",
        "rows = cutlass.min(rows, seqused[sequence])",
        "rows = cutlass.min(rows, rows)",
        "used",
        (OUTSIDE, "O is off by"),
    ),
    PackedMutation(
        "keys begin where queries do",
        "a sequence sees keys of another",
        "for x in (q_begin, seq_q, k_begin, seq_k))",
        "for x in (q_begin, seq_q, q_begin, seq_k))",
        "ragged",
        ("O ",),
        head_dim=None,  # fewer keys in a tile begin where no row is
    ),
    PackedMutation(
        "diagonal of the whole tensors",
        "it ends at the last row of the sequence, counted from the first row of all",
        "(work.n_end - 1) * TILE_N, work.seq_q, work.seq_k)",
        "(work.n_end - 1) * TILE_N, work.q_begin + work.seq_q, work.k_begin + work.seq_k)",
        "ragged",
        ("O ",),
    ),
    PackedMutation(
        "counter left as the last draw leaves it",
        "the next launch of the stream finds no tile to draw",
        "counter[0] = 0",
        "counter[0] = draw",
        "ragged",
        ("the launch left 1 words of the counter that are not 0",),
    ),
    PackedMutation(
        "sinks of the first heads",
        "the heads of a tile have those of the tile before",
        "mSinks[head * PACK_HEADS + row % PACK_HEADS, None]",
        "mSinks[head + row % PACK_HEADS, None]",
        "decode",
        ("LSE ",),
        SUNK,
    ),
    PackedMutation(
        "sinks a word apart",
        "the words of a float32 are those of two heads in bfloat16",
        "cute.make_layout((heads_q, words), stride=(words, 1))",
        "cute.make_layout((heads_q, words), stride=(1, 1))",
        "sinks",
        ("LSE ",),
        SUNK,
    ),
    PackedMutation(
        "exponents of scores, not of what is left of them",
        "the kernel has scores divided by the cap, and the softmax takes them for scores",
        "softcap * LOG2_E",
        "scale * LOG2_E",
        "capped",
        ("O is off by",),
        CAPPED,
    ),
    PackedMutation(
        "heads of the next kv head written",
        "a tile of fewer heads than it has room for writes the rows of others",
        "shape, strides = ((group - head, rows), *rest), (row_strides, *rest_strides)",
        "shape, strides = ((group, rows), *rest), (row_strides, *rest_strides)",
        "groups",
        ("access out of bounds", "O is off by", OUTSIDE),
        ANY_GROUP,
    ),
    PackedMutation(
        "a group's last heads left out",
        "only whole tiles of heads are found",
        "packs = cute.ceil_div(heads, PACK_HEADS)",
        "packs = cutlass.max(heads // PACK_HEADS, 1)",
        "groups",
        ("O ",),
        ANY_GROUP,
    ),
    PackedMutation(
        "heads begin where those of the kv head before are padded to",
        "queries of one group see the keys of another",
        "first_head = head_kv * heads + head % packs * PACK_HEADS",
        "first_head = head * PACK_HEADS",
        "groups",
        ("O ", OUTSIDE),
        ANY_GROUP,
    ),
    PackedMutation(
        "O of a group's later heads over that of its first",
        "its second tile begins with the head of its first one",
        "first = cute.domain_offset(((head, begin), *(0 for _ in rest), head_kv), x)",
        "first = cute.domain_offset(((0, begin), *(0 for _ in rest), head_kv), x)",
        "groups",
        ("O ", TWICE),
        ANY_GROUP,
    ),
    PackedMutation(
        "a share waits for itself",
        "the part that it adds is the one that it gives",
        "part_of_thread(scratch, work.share - 1)",
        "part_of_thread(scratch, work.share)",
        "last_wave",
        ("deadlock",),
        SHARED,
    ),
    PackedMutation(
        "another warp's flag set",
        "who waits for a part is never told of it",
        'cute.arch.store(flag, cutlass.Int32(1), sem="release", scope="gpu")',
        'cute.arch.store(flag + 1, cutlass.Int32(1), sem="release", scope="gpu")',
        "last_wave",
        ("deadlock",),
        SHARED,
    ),
    PackedMutation(
        "flag of a part not taken back",
        "the next launch takes a part that nobody has given yet",
        "cute.arch.store(flag, cutlass.Int32(0))",
        "cute.arch.store(flag, cutlass.Int32(1))",
        "last_wave",
        ("the launch left 24 words of the flags that are not 0",),
        SHARED,
    ),
    PackedMutation(
        "counter of shares left as it is",
        "the next launch begins with the last of its numbers",
        "number == numbers + num_ctas - 1:",
        "number == numbers + num_ctas:",
        "last_wave",
        ("the launch left 1 words of the counter that are not 0",),
        SHARED,
    ),
    PackedMutation(
        "as many numbers as tiles",
        "there are more shares than tiles, and a draw that is not the last one",
        "numbers = whole + cute.ceil_div(tail_steps, size)",
        "numbers = numbers + 0",
        "last_wave",
        # Who puts it back too early does so beside the draws of other CTAs.
        ("the launch left 1 words of the counter that are not 0", f"{Kind.GLOBAL_RACE}: a load"),
        SHARED,
    ),
    PackedMutation(
        "the rest of a share forgotten",
        "the tile before the one with which it ends lacks keys",
        "left_now = start if start > begin else 0",
        "left_now = cutlass.Int32(0)",
        "last_wave",
        ("the launch left 12 words of the flags", "O has NaN"),
        SHARED,
    ),
    PackedMutation(
        "a share that begins a step late",
        "a step of its first tile is nobody's",
        "n_begin, n_end = cutlass.max(begin - start, 0), end - start",
        "n_begin, n_end = cutlass.max(begin + 1 - start, 0), end - start",
        "last_wave",
        ("access out of bounds", "deadlock"),
        SHARED,
    ),
    PackedMutation(
        "tiles of the whole waves shared once more",
        "the last wave begins with the first tile of a sequence, and not with its first one behind",
        "tile = cute.arch.shuffle_sync(before + tiles_to_here - tail_tiles, owner) + place",
        "tile = cute.arch.shuffle_sync(before + tiles_to_here - tiles, owner) + place",
        "last_wave",
        ("O has NaN", TWICE),
        SHARED,
    ),
    PackedMutation(
        "maxima of a part ignored",
        "both halves of a tile count as if relative to one maximum",
        "theirs[r] = cute.math.exp2((their_max - row_max[r]) * scale_log2, fastmath=True)",
        "theirs[r] = cutlass.Float32(1.0)",
        "last_wave",
        ("O is off by",),
        SHARED,
    ),
]
