"""The inputs that modules for packed sequences are verified on: few, named, and each there to catch something.

What stands in rows of q, k and v that no sequence uses has to stay there: it is NaN and infinity, which any product
hands on, or numbers that are larger than all others, which show where NaN hides in NaN. Offsets and lengths are those
of a call that knows what it does, or lie; then a sequence is what is left of it inside the tensor, see `spans`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch

from fa3gen.base.wording import counted
from fa3gen.design import footprint
from fa3gen.design.family import PackedShape
from fa3gen.design.masks import given_with_calls
from fa3gen.spec.model import Forward
from fa3gen.verify import inputs
from fa3gen.verify.inputs import Case, Inputs, Part

Unused = Literal["nan", "large"]
Span = tuple[int, int]  # first row, and the one behind the last
LARGE = 16  # times what is normal
INT_MAX = 2**31 - 1
NANS_OF_8_BITS = 0x7F, 0xFF  # e4m3 has no infinity


@dataclass(frozen=True)
class PackedCase(Case):
    """One batch entry of a Case, whose rows are cut into sequences: `seq_q` and `seq_k` are the tensors' rows.

    `offsets` say where sequences begin, and behind the last one's end; `used` how many rows of each are in use.
    `unused` is what stands in all others.
    """

    offsets_q: tuple[int, ...] = ()
    offsets_k: tuple[int, ...] = ()
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    unused: Unused = "nan"

    @property
    def shape(self) -> str:
        """Shapes in a few words: sequences, query x key rows, query/kv heads."""
        sequences = counted(len(self.offsets_q) - 1, "sequence")
        window = "" if self.window is None else f" window {self.window[0]},{self.window[1]}"
        return f"{sequences} {self.seq_q}x{self.seq_k} h{self.heads_q}/{self.heads_kv}{window}"

    @property
    def spans(self) -> tuple[tuple[Span, Span], ...]:
        """The rows of q and of k that each sequence uses."""
        of_q = spans(self.offsets_q, self.used_q, self.seq_q)
        return tuple(zip(of_q, spans(self.offsets_k, self.used_k, self.seq_k), strict=True))


@dataclass(frozen=True, kw_only=True)
class PackedInputs(Inputs):
    """Tensors of one case: q (total_q, heads_q, d), k (total_k, heads_kv, d), v (total_k, heads_kv, d_v), out like q.

    `spans` are the rows of q and of k that each sequence uses. Where k and v have 8 bits, `descales` are the factors of
    both by name, (sequences, heads_kv): powers of two, so that what they stand for has 16 bits. Where q has 8 bits as
    well, they are any numbers, and q has one, too.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    spans: tuple[tuple[Span, Span], ...]
    descales: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """What the entry point is called with, by name."""
        numbers = {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": self.cu_seqlens_k}
        numbers |= {"seqused_q": self.seqused_q, "seqused_k": self.seqused_k}
        return {
            **super().given,
            **{name: given for name, given in numbers.items() if given is not None},
            **self.descales,
        }

    @property
    def shape(self) -> PackedShape:
        """Extents of the call, of rows that are in use."""
        lengths_q, lengths_k = (tuple(end - begin for begin, end in side) for side in zip(*self.spans, strict=True))
        return PackedShape(lengths_q, lengths_k, self.q.shape[1], self.k.shape[1])

    @property
    def parts(self) -> list[Part]:
        """Sequences with queries; a part without rows where there are none."""
        numbered = [(number, (q, k)) for number, (q, k) in enumerate(self.spans) if q[0] < q[1]]
        used = [(number, slice(*q), slice(*k)) for number, (q, k) in numbered] or [(0, slice(0), slice(0))]
        return [
            (
                self.values("q", self.q[rows], number),
                self.values("k", self.k[keys], number),
                self.values("v", self.v[keys], number),
            )
            for number, rows, keys in used
        ]

    def values(self, name: str, rows: torch.Tensor, sequence: int) -> torch.Tensor:
        """What rows of q, k or v of a sequence stand for, as `stands_for` has it: themselves, or times their factor."""
        descale = self.descales.get(f"{name}_descale")
        if descale is None or not len(rows):
            return rows.to(self.stands_for)[None]
        factors = descale[sequence].repeat_interleave(rows.shape[1] // descale.shape[1])
        return (rows.to(self.stands_for) * factors[:, None].to(self.stands_for))[None]

    @property
    def stands_for(self) -> torch.dtype:
        """What the reference is given: q's dtype, or float64 where that has 8 bits, which products with factors fit."""
        return self.q.dtype if self.q.element_size() > 1 else torch.float64

    @property
    def written(self) -> list[torch.Tensor]:
        """Rows of `out` that are in use."""
        return [self.out[begin:end] for (begin, end), _ in self._of_queries]

    @property
    def _of_queries(self) -> list[tuple[Span, Span]]:
        return [(q, k) for q, k in self.spans if q[0] < q[1]]

    def rows_of(self, out: torch.Tensor) -> torch.Tensor:
        """The sequences of O one behind the other: (1, rows, heads, d)."""
        return torch.cat([out[:0], *(out[begin:end] for (begin, end), _ in self._of_queries)])[None]

    def rows_of_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """The same of LSE, (1, heads, rows). Raises TypeError for another shape or dtype."""
        total, heads, _ = self.out.shape
        if lse.shape != (heads, total) or lse.dtype != torch.float32:
            raise TypeError(f"LSE is {tuple(lse.shape)} {lse.dtype}; it should be {(heads, total)} torch.float32")
        return torch.cat([lse[:, :0], *(lse[:, begin:end] for (begin, end), _ in self._of_queries)], dim=1)[None]

    def unwritten_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """LSE of rows that no sequence uses."""
        return lse[:, unused_rows(lse.shape[1], [q for q, _ in self.spans])]

    def place(self, batch: int, row: int) -> str:
        """Where a row of `rows_of` stands: the sequence's number, and its own row."""
        for number, ((begin, end), _) in enumerate(self.spans):
            if row < end - begin:
                return f"sequence {number}, row {row}"
            row -= end - begin
        raise IndexError(f"there are {row} rows fewer")


def spans(offsets: Sequence[int], used: Sequence[int] | None, total: int) -> list[Span]:
    """The rows that each sequence uses of a tensor of `total` rows, whatever offsets and lengths say."""
    found = []
    for number, (first, behind) in enumerate(zip(offsets, offsets[1:], strict=False)):
        begin = min(max(first, 0), total)
        end = min(max(behind, begin), total)
        rows = end - begin if used is None else min(max(used[number], 0), end - begin)
        found.append((begin, begin + rows))
    return found


def unused_rows(total: int, used: Sequence[Span]) -> torch.Tensor:
    """Numbers of the rows that lie in no span."""
    free = torch.ones(total, dtype=torch.bool)
    for begin, end in used:
        free[begin:end] = False
    return free.nonzero().flatten()


def sequences(
    name: str,
    why: str,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    *,
    first: int = 0,
    behind: int = 0,
    heads: tuple[int, int] = (1, 1),
    **others: Any,
) -> PackedCase:
    """A case of sequences of these lengths, `first` rows before them and `behind` rows after; `heads` of q and of k."""
    offsets_q, offsets_k = (tuple(accumulate(lengths, initial=first)) for lengths in (lengths_q, lengths_k))
    totals = offsets_q[-1] + behind, offsets_k[-1] + behind
    return PackedCase(name, why, 1, *totals, *heads, offsets_q=offsets_q, offsets_k=offsets_k, **others)


def cpu_cases(spec: Forward) -> tuple[PackedCase, ...]:
    """The cases for the CPU model of sm_90a: small, each of several properties, cut to the tiles and ring of `spec`.

    A kernel looks at 32 sequences at a time, so there are 70; all but a few of them have no rows.
    """
    m, n = spec.tile.q // spec.tile.pack_heads, spec.tile.kv
    few = {3: (1, 2), 31: (2, 1), 32: (1, 3), 40: (0, 9), 63: (1, 1), 64: (1, 0), 69: (2, 5)}
    many = [few.get(number, (0, 0)) for number in range(70)]
    cut, steps = (9, n + 4, 5), 2 * footprint.kv_stages(spec)
    cases = [
        sequences("ragged", "ends inside of tiles; without queries, without keys, without both", (m + 3, 0, 5, 2, 0, 1),
                  (n + 5, 7, 0, n, 0, n // 2), first=3, behind=5),
        sequences("few_keys", "more queries than keys: rows with no key", (m + 9, 3), (5, 2), behind=m, unused="large"),
        sequences("tile_edge", "no row, or one, past a tile", (m, 1, m + 1), (n + 1, n, n)),
        sequences("used", "slices of one packed qkv tensor; fewer rows in use than there are", cut, cut, first=2,
                  used_q=(7, 5, 0), used_k=(9, n - 3, 4), layout="packed", unused="large"),
        sequences("many", "three groups of 32 sequences, few of them with rows", *zip(*many, strict=True), first=1),
        sequences("decode", "one query each; grouped heads, (heads, total, d) storage, a scale other than 1/sqrt(d)",
                  (1, 1, 1), (n - 1, 1, n // 2), heads=(4, 2), distribution="outlier", layout="transposed", scale=0.3),
        sequences("wrap", "goes round the ring of stages twice and a bit; scores that climb", (3,),
                  (steps * n + n // 2 + 1,), distribution="ramp"),
        sequences("no_rows", "queries and keys that no sequence uses", (0, 0, 0), (0, 4, 0), behind=5),
        sequences("one", "one query, one key, strides that mean nothing", (1,), (1,), layout="odd_strides"),
        lying(60, 50 + n),
    ]  # fmt: skip
    if spec.split is not None:  # the model has three SMs
        cases += [
            sequences("shares", "a tile in three shares, whole ones behind it; a group with padding, two kv heads",
                      (3, 1, 0, m + 1), (9 * n + 3, 3, 7, n + 9), heads=(min(10, 2 * spec.tile.pack_heads), 2)),
            sequences("shares_ramp", "scores that climb: the last part outweighs the others", (1,), (7 * n,),
                      heads=(2, 1), distribution="ramp"),
        ]  # fmt: skip
    if footprint.shares_packed(spec):
        cases += [
            sequences("last_wave", "three whole tiles, and two in three shares; scores that climb",
                      (m + 3, m + 9, 5), (5, 12 * n - 5, 11 * n + 2), distribution="ramp"),
        ]  # fmt: skip
    if spec.tile.group == "fitted":  # other cases have one, two, and five heads of a kv head
        cases += [
            sequences("of_one", "two tiles of as many positions as rows", (spec.tile.q + 3, 2), (n + 5, 9),
                      heads=(2, 2)),
            sequences("of_three", "two tiles, each with room for four heads", (spec.tile.q // 4 + 3, 1), (2 * n + 5, 7),
                      heads=(6, 2), first=1),
            sequences("of_all", "as many heads as a tile has room for, keys in shares", (m + 1, 2), (7 * n + 2, 9),
                      heads=(spec.tile.pack_heads, 1)),
        ]  # fmt: skip
    if spec.tile.group == "any":
        pack = spec.tile.pack_heads
        cases += [
            sequences("groups", "two kv heads, whose heads fill one tile and begin another; a slot taken twice",
                      (m + 1, 1, 0, 2), (n + 3, 5, 7, 2), heads=(2 * (pack + pack // 2), 2), first=1, behind=2),
            sequences("single", "a query head of its own for each kv head", (m + 1, 1), (n + 2, n), heads=(3, 3)),
            sequences("whole", "as many heads as a tile has room for", (2, 1), (n + 1, 9), heads=(2 * pack, 2)),
        ]  # fmt: skip
    cases += map(_with_neighbours, inputs.cpu_score_cases(spec))
    return inputs.with_windows(spec, cases, _window_case)


def _with_neighbours(case: Case) -> PackedCase:
    """Batch entries of a case as sequences, between one without keys and one with fewer keys than queries."""
    lengths_q, lengths_k = (3, *[case.seq_q] * case.batch, 4), (0, *[case.seq_k] * case.batch, 2)
    scores: dict[str, Any] = {"scale": case.scale, "sinks": case.sinks, "softcap": case.softcap}
    return sequences(case.name, case.why, lengths_q, lengths_k, heads=(case.heads_q, case.heads_kv), **scores)


def _window_case(m: int, n: int, left: int, right: int) -> PackedCase:
    """Tiles of m queries and n keys, so many that both edges of a window lie inside the keys."""
    rows = m + right + 9
    lengths = (4, rows), (n, rows + left + n + 3)
    return sequences("window", "windows that begin and end inside the keys", *lengths, first=1)


def drawn(draw: random.Random, *, rows: int, total: tuple[int, int] | None = None, count: int = 0) -> PackedCase:
    """A case of random lengths, of up to so many `rows` each, and of any kind.

    With `total`, `count` sequences are the rows of q and of k cut anywhere, and `used` says how many rows of each.
    """
    name, unused = f"drawn {draw.randrange(10**9)}", draw.choice(("nan", "large"))
    heads_kv = draw.choice((1, 2, 3))
    heads = draw.choice((1, 2, 4)) * heads_kv, heads_kv
    if total is not None:
        cuts_q, cuts_k = ([0, *sorted(draw.choices(range(side + 1), k=count - 1)), side] for side in total)
        lengths_q, lengths_k = ([behind - first for first, behind in pairwise(cuts)] for cuts in (cuts_q, cuts_k))
        first = behind = 0
    else:
        most = [draw.choice((1, 2, 70, rows)) for _ in range(draw.choice((1, 3, 30, 100)))]
        lengths_q = [draw.randint(0, length) for length in most]
        lengths_k = [draw.choice((length, draw.randint(0, rows))) for length in lengths_q]
        first, behind = draw.choice((0, 5)), draw.choice((0, 9))
    used = {
        name: [draw.randint(0, length) if draw.random() < 0.3 else length for length in lengths]
        for name, lengths in (("used_q", lengths_q), ("used_k", lengths_k))
        if total is not None or draw.random() < 0.5
    }
    layout = draw.choice(("padded", "contiguous", "transposed"))
    others: dict[str, Any] = {"heads": heads, "layout": layout, "unused": unused, **used}
    return sequences(name, "random lengths", lengths_q, lengths_k, first=first, behind=behind, **others)


def lying(total_q: int, total_k: int) -> PackedCase:
    """Offsets and lengths that go back, lie outside of the tensors, or say more rows than there are; 50 at least."""
    return PackedCase(
        "lying",
        "offsets that decrease or lie outside, more rows in use than there are, or fewer than none",
        *(1, total_q, total_k, 1, 1),
        offsets_q=(40, 40, -INT_MAX - 1, 30, INT_MAX),  # no rows, no rows, 0 to 30, 30 to the end
        offsets_k=(-7, 20, 5, 50, total_k + 1),  # 0 to 20, no rows, 5 to 50, 50 to the end
        used_q=(9, INT_MAX, 50, 21),
        used_k=(4, -3, INT_MAX, 33),
    )


def gpu_cases(spec: Forward) -> tuple[PackedCase, ...]:
    """The cases for a GPU: those of the CPU model, and larger ones."""
    draw = random.Random(19)
    chats = [int(draw.lognormvariate(4, 1.3)) for _ in range(1200)]  # of 55 in the middle, some of 2000
    some = [draw.choice((0, 1, 1, 3, 17, 64, 129, 300)) for _ in range(300)]
    longer = [length + draw.choice((0, 1, 100, 700)) for length in some]
    cached = [draw.randint(0, 3000) for _ in range(260)]
    rows = (16384, 1000, 24576, 7384, 16192)
    grouped: dict[str, Any] = {"heads": (8, 2)}
    cases: tuple[PackedCase, ...] = (
        sequences("chats", "1200 short sequences, and some longer ones", chats, chats, layout="packed", **grouped),
        sequences("chunks", "few queries or none, more keys", some, longer, first=7, behind=90, **grouped),
        sequences("long_and_short", "two long sequences between short ones", (5, 6000, 1, 0, 90, 3000, 2),
                  (5, 6000, 700, 9, 90, 4100, 2), heads=(8, 1), behind=3),
        sequences("decode_many", "more tiles than SMs, of one query", [1] * len(cached), cached, distribution="outlier",
                  **grouped),
        sequences("total_64k", "65,536 rows", rows, rows),
        sequences("more_queries", "most queries see no key", (900, 1300), (70, 200), behind=200, unused="large",
                  **grouped),
    )  # fmt: skip
    if footprint.shares_packed(spec):  # more than two waves, of which the last one leaves half of the SMs without tiles
        alike = [1500] * 5
        cases += (sequences("alike", "five sequences of one length", alike, alike, **grouped),)
    # Those of the CPU model come under their own names.
    cases += tuple(
        replace(case, name=f"{case.name}_large") for case in map(_with_neighbours, inputs.gpu_score_cases(spec))
    )
    if given_with_calls(spec.mask):
        cases = inputs.windowed(inputs.twice(cases))
    return (*cpu_cases(spec), *cases)


def make(spec: Forward, case: PackedCase, *, device: torch.device, seed: int) -> PackedInputs:
    """Draw the tensors of `case` as the module of `spec` takes them."""
    dense = inputs.make_for(spec, case, device=device, seed=seed)
    q, k, v = dense.q[0], dense.k[0], dense.v[0]
    of_q, of_k = ([pair[side] for pair in case.spans] for side in (0, 1))
    for tensor, used in ((q, of_q), (k, of_k), (v, of_k)):
        spoil(tensor, unused_rows(len(tensor), used).to(device), case.unused)

    def numbers(given: Sequence[int] | None) -> torch.Tensor | None:
        return None if given is None else torch.tensor(given, dtype=torch.int32, device=device)

    k, v = (stored(spec, tensor) for tensor in (k, v))
    return PackedInputs(
        q=q,
        k=k,
        v=v,
        descales=descales(spec, case, seed, device),
        out=dense.out[0],
        out_storage=dense.out_storage,
        mask=dense.mask,
        options=dense.options,
        sinks=dense.sinks,
        softcap=dense.softcap,
        cu_seqlens_q=torch.tensor(case.offsets_q, dtype=torch.int32, device=device),
        cu_seqlens_k=torch.tensor(case.offsets_k, dtype=torch.int32, device=device),
        seqused_q=numbers(case.used_q),
        seqused_k=numbers(case.used_k),
        spans=case.spans,
    )


def stored(spec: Forward, tensor: torch.Tensor) -> torch.Tensor:
    """K or V as it lies in memory: the tensor, or with the same strides in 8 bits."""
    if tensor.dtype == spec.kv_element.in_torch():
        return tensor
    storage = tensor.as_strided((tensor.untyped_storage().size() // tensor.element_size(),), (1,), 0)
    in_8_bits = storage.to(spec.kv_element.in_torch())
    return in_8_bits.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def descales(spec: Forward, case: PackedCase, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Factors of each sequence and kv head, where K and V, or Q as well, have 8 bits.

    Beside q of 16 bits no two that are neighbours are the same.
    Those of K are a part of a larger tensor, those of V are the same for all heads, with a stride of 0; those of q are
    transposed. None of them are given where all lie in one tensor.
    """
    count, heads_kv = len(case.spans), case.heads_kv
    if footprint.eight_bits(spec):
        if case.layout == "packed":
            return {}
        draw = torch.Generator().manual_seed(inputs.case_seed(f"{case.name}, factors", seed))
        of_q, of_k, of_v = (
            torch.exp2(2 * torch.rand(shape, generator=draw) - 1).to(device)  # 0.5 to 2
            for shape in ((heads_kv, count), (count, heads_kv), (count, 1))
        )
    elif footprint.eight_bit_cache(spec):
        number, head = torch.arange(count, device=device)[:, None], torch.arange(heads_kv, device=device)[None]
        of_k, of_v = 2.0 ** ((number + 2 * head) % 3 - 1), 2.0 ** (number % 4 - 2)
    else:
        return {}
    wide = torch.stack([of_k, torch.full_like(of_k, math.nan)], dim=2)
    made = {"k_descale": wide[..., 0], "v_descale": of_v.expand(-1, heads_kv)}
    return {"q_descale": of_q.t(), **made} if footprint.eight_bits(spec) else made


def spoil(tensor: torch.Tensor, rows: torch.Tensor, unused: Unused) -> None:
    """Put NaN and infinity in turn into these rows, or numbers that are too large; of 8 bits both kinds of NaN."""
    if tensor.element_size() == 1:  # torch indexes bytes, and no such numbers
        in_bytes = tensor.view(torch.uint8)
        if unused == "large":
            most = torch.finfo(tensor.dtype).max
            large = (tensor.float()[rows] * LARGE).clamp(-most, most)
            in_bytes[rows] = large.to(tensor.dtype).view(torch.uint8)
        else:
            in_bytes[rows[0::2]], in_bytes[rows[1::2]] = NANS_OF_8_BITS
    elif unused == "large":
        tensor[rows] = tensor[rows] * LARGE
    else:
        tensor[rows[0::2]] = math.nan
        tensor[rows[1::2]] = math.inf
