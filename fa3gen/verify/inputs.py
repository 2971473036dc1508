"""The inputs that every module is verified on: few, named, and each there to catch something.

q, k and v lie inside larger buffers filled with NaN wherever the layout allows it, so that a read past the end shows
as NaN; `out` lies inside a larger buffer filled with a NaN that nobody computes, so that an element left unwritten
shows, and a write past the end shows as changed bits. All drawn in float32 from one seed and rounded to the kernel's
dtype.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, Literal, TypeVar

import torch

from fa3gen.design import footprint
from fa3gen.design.family import PackedShape, Shape, blocks_of
from fa3gen.design.key_order import ORDER, UNIT, whole_units
from fa3gen.design.masks import Window, given_with_calls, of_call, options_of_call, reach
from fa3gen.design.operation import BATCH, HEADS_KV, SEQ_K, SEQ_V, Dense, Extent, Tensor, operation_of
from fa3gen.design.tiles import sequence_contiguous
from fa3gen.hardware.dtypes import BF16, DTYPES, VECTOR_BYTES, Dtype
from fa3gen.spec.model import WINDOW_MAX, Forward, Mask, NoMask, SyncLoad, WindowMask
from fa3gen.spec.quantizing import BLOCK_ROWS

GUARD = 8  # rows of NaN before and after each padded tensor, along the sequence
# By bytes of an element: a NaN, of any of the dtypes, that no instruction gives and torch.nan is not.
POISON = {1: (torch.uint8, 0xFF), 2: (torch.int16, 0x7FA5), 4: (torch.int32, 0x7FA5A5A5)}

# Of factors of blocks, base 2, which those of a head have in turn.
BLOCK_EXPONENTS = {"q": (-2.4, 0.0), "k": (-2.4, 0.0, 2.4), "v": (2.4, 0.0, -2.4)}
# In v, where keys are filled up to whole units: finite, as modules need them, and so large that a P of 2^-9 would show.
BEHIND_LAST_KEY = 448.0
# Beside ordinary ones, by head. The first leaves something of a row, the second nothing.
SINKS = (6.0, 3e38, -3e38, -math.inf)

Distribution = Literal["normal", "outlier", "ramp", "selection"]  # the last one in `fa3gen.cpu.comparison` only
Layout = Literal["padded", "contiguous", "transposed", "packed", "expanded", "odd_strides"]


@dataclass(frozen=True)
class Case:
    """One named set of shapes, values and strides. `scale` None means the module's default, 1 / sqrt(d).

    `window` is that of the call, where the module asks for one; None means `masks.USUAL_WINDOW`.
    """

    name: str
    why: str
    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int
    distribution: Distribution = "normal"
    layout: Layout = "padded"
    scale: float | None = None
    window: Window | None = None
    softcap: float = 50.0  # of modules that cap scores
    sinks: Literal["bfloat16", "float32"] = "float32"  # their dtype, of modules that have them

    @property
    def shape(self) -> str:
        """Shapes in one word: batch, query x key lengths, query/kv heads; and the window of a call that gives one."""
        window = "" if self.window is None else f" window {self.window[0]},{self.window[1]}"
        return f"b{self.batch} {self.seq_q}x{self.seq_k} h{self.heads_q}/{self.heads_kv}{window}"


def _times(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """x (batch, seq, heads, d) in float64, times factors of heads, which several may share, or of blocks of rows."""
    wide = factors.double().repeat_interleave(x.shape[2] // factors.shape[1], dim=1)  # (batch, heads, ..)
    if wide.ndim == 2:
        return x.double() * wide[:, None, :, None]
    return x.double() * wide.repeat_interleave(BLOCK_ROWS, dim=2)[..., : x.shape[1]].transpose(1, 2)[..., None]


Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k and v of four dimensions
AnyCase = TypeVar("AnyCase", bound=Case)


@dataclass(frozen=True)
class Inputs:
    """Tensors of one case. `out` is poisoned and lies inside `out_storage`, whose other elements stay as they are.

    `mask` is what the call computes, `options` what it says for that beside its tensors. `descales` are the factors of
    q, k and v by name, where these have 8 bits and the call gives any: (batch, heads_kv), or (batch, heads, blocks),
    each of BLOCK_ROWS rows.
    `v_in_order` is v with its keys in order, where the module is given them permuted.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    out_storage: torch.Tensor
    mask: Mask = NoMask()
    options: Mapping[str, Any] = field(default_factory=dict)
    sinks: torch.Tensor | None = None
    softcap: float | None = None
    descales: Mapping[str, torch.Tensor] = field(default_factory=dict)
    v_in_order: torch.Tensor | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """What the entry point of this module has to be given by name, and the reference alike."""
        named = {"sinks": self.sinks, "softcap": self.softcap}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def named(self) -> dict[str, Any]:
        """All that the entry point is given by name: these, and a window."""
        return {**self.options, **self.keywords}

    @property
    def given(self) -> dict[str, torch.Tensor]:
        """What the entry point is called with, by name."""
        return {"q": self.q, "k": self.k, "v": self.v, **self.descales}

    @property
    def shape(self) -> Shape | PackedShape:
        """Extents of the call."""
        (batch, seq_q, heads_q, _), (_, seq_k, heads_kv, _) = self.q.shape, self.k.shape
        return Shape(batch, seq_q, seq_k, heads_q, heads_kv)

    @property
    def parts(self) -> list[Part]:
        """What attends to itself and nothing else, as the reference takes it: as much as factors make of it."""
        values = self.v if self.v_in_order is None else self.v_in_order
        if not self.descales:
            return [(self.q, self.k, values)]
        of_q, of_k, of_v = (self.descales[f"{name}_descale"] for name in "qkv")
        return [(_times(self.q, of_q), _times(self.k, of_k), _times(values, of_v))]

    @property
    def written(self) -> list[torch.Tensor]:
        """What of `out` a call has to write; it may write nothing else."""
        return [self.out]

    @property
    def lengths(self) -> list[int]:
        """Query rows of each part."""
        return [q.shape[1] for q, _, _ in self.parts]

    def rows_of(self, out: torch.Tensor) -> torch.Tensor:
        """The parts of O one behind the other: (batch, rows, heads, d)."""
        return out

    def rows_of_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """The same of LSE: (batch, heads, rows)."""
        return lse

    def unwritten_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """What of the LSE a call may not write."""
        return lse[:0]

    def place(self, batch: int, row: int) -> str:
        """Where a row of `rows_of` stands, in words."""
        return f"batch {batch}, row {row}"


CASES: tuple[Case, ...] = (
    Case("random", "plain inputs, many tiles", 2, 512, 512, 4, 4, layout="contiguous"),
    Case("long", "2k, more tiles than any ring has stages", 1, 2048, 2048, 2, 2),
    Case("outlier", "a few large rows and channels", 2, 384, 384, 2, 2, "outlier"),
    Case("ramp", "scores that climb along the keys: every tile moves the row maximum", 2, 256, 900, 2, 2, "ramp"),
    Case("ragged", "no multiple of a tile, more keys than queries", 2, 77, 333, 2, 2),
    Case("ragged_more_queries", "more queries than keys: causal rows with no key", 1, 301, 131, 2, 2),
    Case("few_keys", "whole query tiles with no visible key", 2, 300, 5, 2, 1),
    Case("tile_edge", "one row past a tile on both sides", 1, 129, 257, 2, 2),
    Case("one", "one query, one key, a sequence stride that means nothing", 2, 1, 1, 2, 2, layout="odd_strides"),
    Case("decode", "one query, a long cache, grouped heads", 3, 1, 1031, 8, 2),
    Case("gqa", "grouped heads, (batch, heads, seq, d) storage", 2, 200, 200, 6, 2, layout="transposed"),
    Case("mqa", "one kv head", 1, 190, 260, 8, 1),
    Case("packed", "slices of one packed qkv tensor", 2, 193, 193, 4, 2, layout="packed"),
    Case("expanded", "k and v with batch stride 0", 3, 130, 140, 2, 2, layout="expanded"),
    Case("odd_strides", "batch and head strides that mean nothing", 1, 100, 90, 1, 1, layout="odd_strides"),
    Case("wrap", "wraps a ring of 5 stages of 128 keys twice", 1, 70, 1500, 2, 2),
    Case("scale", "a scale other than 1/sqrt(d)", 1, 150, 210, 2, 2, scale=0.3),
)  # fmt: skip

# For kernels whose CTAs take one tile after the other, on a GPU with fewer SMs than there are tiles: 240 tiles of 192
# rows, 300 of 128. Those that draw tiles go through the heads in sections, as many as have their K and V in L2: at 2400
# keys there are several, and the last has more heads; at 40 keys there is one.
PERSISTENT_CASES: tuple[Case, ...] = (
    Case("many_tiles", "more tiles than SMs, heads in sections", 3, 600, 2400, 20, 4),
    Case("many_tiles_few_keys", "more tiles than SMs, most causal ones with no visible key", 3, 600, 40, 20, 4),
)  # fmt: skip


# For kernels that split keys: parts whose last is cut short, more parts than a warp has lanes, rows that see no key.
SPLIT_CASES: tuple[Case, ...] = (
    Case("parts", "one query, a long cache, a part of it for each SM", 2, 1, 4113, 32, 8),
    Case("many_parts", "one kv head: more parts than a warp has lanes", 1, 1, 9000, 8, 1),
    Case("several_queries", "queries that see different keys, five heads in a group", 3, 7, 3001, 10, 2),
    Case("one_part", "more tiles of queries than SMs: one part of each", 40, 2, 700, 8, 4),
    Case("parts_hidden", "more queries than keys: causal rows without a key in any part", 1, 300, 280, 12, 1),
    Case("parts_ramp", "scores that climb: the last part outweighs all others", 2, 3, 2500, 4, 2, "ramp"),
)  # fmt: skip

# Of calls that give one: without bounds, wider than tiles, wider than most sequences, causal, the diagonal alone, open
# on the right, and on the left by a number. Seven divides no number of cases: going round twice, each has two of them.
WINDOWS: tuple[Window, ...] = ((-1, -1), (200, 70), (511, 0), (-1, 0), (0, 0), (0, -1), (WINDOW_MAX, 3))


def normal(shape: Sequence[int], dtype: Dtype, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Normal random numbers, rounded to the dtype; torch draws none of 8 bits, which come from bfloat16."""
    drawn = dtype if dtype.bits > 8 else BF16
    x = torch.randn(tuple(shape), dtype=drawn.in_torch(), device=device, generator=generator)
    return x.to(dtype.in_torch())


def gpu_cases(spec: Forward) -> tuple[Case, ...]:
    """The cases for a GPU: the same for all modules, and those of persistent kernels for these.

    Where calls give a window, each comes with two.
    """
    cases = (*CASES, *PERSISTENT_CASES) if footprint.persistent(spec) else CASES
    cases += gpu_score_cases(spec)
    if spec.split is not None:
        cases += SPLIT_CASES
    if not given_with_calls(spec.mask):
        return cases
    return windowed(twice(cases))


def gpu_score_cases(spec: Forward) -> tuple[Case, ...]:
    """Cases for a GPU of what changes scores or sums, where the spec has it."""
    cases: tuple[Case, ...] = ()
    if spec.softmax.sink:
        cases += (Case("sinks_16_bits", "sinks in bfloat16 on all rows", 2, 200, 300, 8, 2, sinks="bfloat16"),)
    if spec.softmax.softcap:
        # Standard deviations of scores of 18 to 36, and of 32 to 64: many are near the cap.
        cases += (
            Case("capped", "scores beyond a cap of 15", 1, 150, 400, 4, 2, scale=2.25, softcap=15.0),
            Case("capped_50", "scores beyond a cap of 50", 1, 300, 300, 2, 2, scale=4.0),
            Case("capped_64", "scores from end to end of a cap of 64", 1, 200, 300, 2, 2, scale=16.0, softcap=64.0),
            Case("capped_low", "a cap so low that a hidden key would count", 1, 150, 400, 4, 2, softcap=1.5),
        )
    return cases


def twice(cases: Sequence[AnyCase]) -> tuple[AnyCase, ...]:
    """The cases, and once more for another window."""
    return (*cases, *(replace(case, name=f"{case.name}_other_window") for case in cases))


def windowed(cases: Sequence[AnyCase]) -> tuple[AnyCase, ...]:
    """The cases, with windows in turn."""
    return tuple(replace(case, window=window) for case, window in zip(cases, cycle(WINDOWS), strict=False))


def cpu_cases(spec: Forward) -> tuple[Case, ...]:
    """The cases for the CPU model of sm_90a: small, since it is slow, and cut to the tiles and the ring of `spec`."""
    m, n = spec.tile.q // spec.tile.pack_heads, spec.tile.kv
    stages = 1 if isinstance(spec.load, SyncLoad) else spec.load.kv_stages
    heads = 4 if footprint.persistent(spec) else 1  # 8 tiles: several for each SM of the model
    cases = [
        Case("ragged", "two tiles of queries, three of keys, the last of each cut short", 1, m + 17, 2 * n + 9, 1, 1),
        Case("masked_rows", "more queries than keys: causal rows with no key", 1, m + 9, n // 2 + 3, 1, 1),
        Case("few_keys", "a whole tile of causal rows with no key", 1, m + 5, 5, heads, -(-heads // 2)),
        Case("one", "one query, one key, strides that mean nothing", 1, 1, 1, 1, 1, layout="odd_strides"),
        Case("gqa", "grouped heads, (batch, heads, seq, d) storage", 1, m // 2 + 1, n - 1, 4, 2, layout="transposed"),
        Case("mqa", "one kv head; k and v with batch stride 0", 2, 5, n // 2, 2, 1, layout="expanded"),
        Case("packed", "slices of one packed qkv tensor", 2, n // 2 + 5, n // 2 + 5, 1, 1, layout="packed"),
        Case("ramp", "scores that climb, or fall: every tile moves the maximum", 2, 5, 2 * n + 12, 1, 1, "ramp"),
        Case("outlier", "a few large rows and channels", 1, 9, n + 12, 1, 1, "outlier"),
        Case("scale", "a scale other than 1/sqrt(d)", 1, 7, n // 2 + 5, 1, 1, scale=0.3),
        Case("wrap", "goes round the ring of stages twice and a bit", 1, 3, 2 * stages * n + n // 2 + 1, 1, 1),
    ]  # fmt: skip
    if spec.split is not None:  # the model has three SMs
        heads = min(5, spec.tile.pack_heads)
        cases += [
            Case("parts", "two parts, the second cut short, a group with padding", 1, 3, 4 * n + 3, heads, 1),
            Case("parts_ramp", "scores that climb: the last part outweighs the others", 1, 1, 6 * n, 2, 1, "ramp"),
        ]
    if (every := footprint.promote_every(spec)) > 1:
        keys = (2 * every - 1) * n + 12  # a promotion, and all but one of the tiles to the next
        cases.append(
            Case("held_ramp", "every tile moves the maximum, from one promotion to the end", 2, 5, keys, 1, 1, "ramp")
        )
    return with_windows(spec, [*cases, *cpu_score_cases(spec)], _window_case)


def cpu_score_cases(spec: Forward) -> list[Case]:
    """Cases for the CPU model of what changes scores or sums, where the spec has it."""
    cases, n = [], spec.tile.kv
    if spec.softmax.sink:
        cases.append(Case("sinks_16_bits", "sinks in bfloat16 of every size", 1, 5, 7, 5, 1, sinks="bfloat16"))
        cases.append(Case("sinks", "sinks of every size, rows without a key", 1, 9, 7, 5, 1))
    if spec.softmax.softcap:
        cases.append(Case("capped", "scores beyond a cap of 15", 1, 9, n + 5, 1, 1, scale=2.25, softcap=15.0))
        cases.append(Case("capped_64", "from end to end of a cap of 64", 1, 9, n + 5, 1, 1, scale=16.0, softcap=64.0))
        cases.append(Case("capped_low", "so low that a hidden key would count", 1, 9, n + 5, 1, 1, softcap=1.5))
    return cases


def with_windows(
    spec: Forward, cases: Sequence[AnyCase], window_case: Callable[[int, int, int, int], AnyCase]
) -> tuple[AnyCase, ...]:
    """The cases for a module's mask: windows for those that calls give one, and what shows both edges.

    `window_case` makes a case of tiles of so many queries and keys for a reach left and right.
    """
    m, n = spec.tile.q // spec.tile.pack_heads, spec.tile.kv
    if given_with_calls(spec.mask):
        # Tiles of keys without an edge between those with one; then none such, and tiles with both edges.
        windows = (("wide_window", (m + n, 5)), ("narrow_window", (n // 3, n // 4)))
        return (*windowed(cases), *(replace(window_case(m, n, *w), name=name, window=w) for name, w in windows))
    if isinstance(spec.mask, WindowMask):
        left, right = reach(spec.mask)
        # The edges of a wider window are not met.
        return (*cases, window_case(m, n, min(left or 0, 1024), min(right or 0, 256)))
    return tuple(cases)


def _window_case(m: int, n: int, left: int, right: int) -> Case:
    """Tiles of m queries and n keys, so many that both edges of a window lie inside the keys."""
    seq_q = m + right + 9
    return Case("window", "windows that begin and end inside the keys", 1, seq_q, seq_q + left + n + 3, 1, 1)


def served_heads(heads_q: int, heads_kv: int, pack_heads: int) -> int:
    """Query heads, `heads_q` or as few more as make whole packs of `pack_heads` for each kv head."""
    return -(-heads_q // (heads_kv * pack_heads)) * heads_kv * pack_heads


def served(case: AnyCase, spec: Forward) -> AnyCase:
    """The case, with as many query heads as the tiles of `spec` need.

    Where there may be any number, one head becomes one less than a tile has room for.
    """
    if spec.tile.holds_group:
        return replace(case, heads_q=min(case.heads_q, case.heads_kv * spec.tile.pack_heads))
    if spec.tile.group == "any":
        return replace(case, heads_q=spec.tile.pack_heads - 1) if case.heads_q == case.heads_kv == 1 else case
    return replace(case, heads_q=served_heads(case.heads_q, case.heads_kv, spec.tile.pack_heads))


def case_seed(case: str, seed: int) -> int:
    """Derive a case's own seed from the run's, so that a case can be repeated by itself."""
    return (seed * 1_000_003 + zlib.crc32(case.encode())) % 2**63


def make_for(spec: Forward, case: Case, *, device: torch.device, seed: int) -> Inputs:
    """Draw the tensors of `case` as the module of `spec` takes them."""
    operation = operation_of(spec)
    q, k, v, out = (operation.tensor(name) for name in ("q", "k", "v", "out"))
    made = make(
        case,
        head_dim=q.row,
        v_dim=v.row,
        dtype=q.dtype.in_torch(),
        kv_dtype=k.dtype.in_torch(),
        out_dtype=out.dtype.in_torch(),
        device=device,
        seed=seed,
        by_sequence=sequence_contiguous(spec),
        permuted=footprint.permuted_keys(spec),
    )
    return replace(
        made,
        mask=of_call(spec.mask, case.window),
        options=options_of_call(spec.mask, case.window),
        sinks=_sinks(case, seed).to(device) if spec.softmax.sink else None,
        softcap=case.softcap if spec.softmax.softcap else None,
        descales=_descales(spec, case, seed, device) if footprint.eight_bits(spec) else {},
    )


def _descales(spec: Forward, case: Case, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Factors of q, k and v: none where all lie in one tensor, one for all heads with strides 0, or one for each.

    Of blocks, each differs by a factor of 4 and more from the next one of its head, from that of the next head, and of
    the next sequence: that of another one would show.
    """
    if case.layout == "packed":
        return {}
    generator = torch.Generator().manual_seed(case_seed(f"{case.name}, factors", seed))
    made = {}
    for name in ("q_descale", "k_descale", "v_descale"):
        shape = (1, 1) if case.layout == "expanded" else (case.heads_kv, case.batch)
        factors = torch.exp2(2 * torch.rand(shape, generator=generator) - 1).to(device)  # 0.5 to 2
        made[name] = factors.expand(case.heads_kv, case.batch).t()
    if footprint.block_scales(spec):
        of_keys = [(name, case.heads_kv, case.seq_k) for name in "kv"]
        for name, heads, rows in (("q", case.heads_q, case.seq_q), *of_keys):
            own = (1, 1) if case.layout == "expanded" else (heads, case.batch)
            exponents = torch.tensor(BLOCK_EXPONENTS[name])
            blocks = torch.arange(blocks_of(rows))[:, None, None] + torch.randint(0, 4, (1,), generator=generator)
            turn = blocks + torch.arange(own[0])[:, None] + torch.arange(own[1])
            each = exponents[turn % len(exponents)] + 0.2 * torch.rand(turn.shape, generator=generator)
            factors = torch.exp2(each).to(device)
            made[f"{name}_descale"] = factors.expand(-1, heads, case.batch).permute(2, 1, 0)
    return made


def usual_keywords(names: Sequence[str], heads_q: int, device: torch.device) -> dict[str, Any]:
    """What a call has to be given by these names (`Family.keywords`), of no particular case: to time it."""
    made = {"sinks": torch.linspace(-2, 2, heads_q, device=device), "softcap": 50.0}
    return {name: made[name] for name in names if name in made}


def _sinks(case: Case, seed: int) -> torch.Tensor:
    """Sinks of all sizes by turns: like scores, some above them, none, and both ends of what float32 can hold."""
    generator = torch.Generator().manual_seed(case_seed(f"{case.name}, sinks", seed))
    kinds = torch.stack(
        [2 * torch.randn(case.heads_q, generator=generator), *(torch.full((case.heads_q,), x) for x in SINKS)]
    )
    heads = torch.arange(case.heads_q)
    return kinds[heads % len(kinds), heads].to(getattr(torch, case.sinks))


def poison(storage: torch.Tensor) -> torch.Tensor:
    """Fill all of it with the NaN that nobody computes; returns it."""
    integer, bits = POISON[storage.element_size()]
    storage.view(integer).fill_(bits)
    return storage


def untouched(storage: torch.Tensor, written: Sequence[torch.Tensor]) -> bool:
    """Whether `storage` is poisoned still, but for these tensors that lie in it."""
    integer, bits = POISON[storage.element_size()]
    poisoned = storage.view(integer) == bits
    for part in written:
        poisoned.as_strided(part.shape, part.stride(), part.storage_offset()).fill_(True)
    return bool(poisoned.all())


def laid_out(described: Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The same values with strides that a module takes: the tensor itself where its contiguous dimension is the last.

    Such a tensor has to have them. Where the module is given keys permuted, they are.
    """
    if SEQ_V in described.dims:
        tensor = permuted_keys(tensor, fill=0.0)
    if described.contiguous == tensor.ndim - 1:
        return tensor
    made = torch.empty_strided(tensor.shape, described.strides(tensor.shape), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def by_sequence(v: torch.Tensor) -> torch.Tensor:
    """The same (batch, seq, heads, d) with a contiguous sequence, as modules take it that read v so."""
    element = next(dtype for dtype in DTYPES.values() if dtype.in_torch() == v.dtype)
    dims = BATCH, SEQ_K, HEADS_KV, Extent("head_dim_v")
    return laid_out(Tensor("v", "input", element, dims, "tma", Dense(contiguous=1)), v)


def permuted_keys(v: torch.Tensor, *, fill: float) -> torch.Tensor:
    """The keys of v (batch, seq, heads, d) in the order of `fa3gen.design.key_order`, filled up to whole units.

    The sequence is contiguous in the result.
    """
    batch, seq, heads, d = v.shape
    made = torch.full((batch, heads, d, whole_units(seq)), fill, dtype=v.dtype, device=v.device)
    made[..., :seq] = v.permute(0, 2, 3, 1)
    order = torch.tensor(ORDER, device=v.device)
    # Bytes, since torch takes no elements of 8 bits by their numbers.
    units = made.view(torch.uint8).view(batch, heads, d, whole_units(seq) // UNIT, UNIT)
    return units[..., order].flatten(3).view(v.dtype).permute(0, 3, 1, 2)


def keys_in_order(v: torch.Tensor, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `permuted_keys`, of `seq` keys, and what stands behind the last one; of any dtype but 8 bits."""
    units = v.reshape(v.shape[0], -1, UNIT, *v.shape[2:])
    keys = units[:, :, torch.tensor(ORDER, device=v.device).argsort()].flatten(1, 2)
    return keys[:, :seq], keys[:, seq:]


def make(
    case: Case,
    *,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    v_dim: int | None = None,
    kv_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    by_sequence: Sequence[str] = (),
    permuted: bool = False,
) -> Inputs:
    """Draw the tensors of `case` on `device`.

    `v_dim` is the head dim of v and O where it is not `head_dim`, `kv_dtype` and `out_dtype` the dtypes of k and v and
    of O where they are not `dtype`; `by_sequence` are the names of the inputs whose sequence is contiguous, `permuted`
    says that the keys of v are. The same seed gives the same numbers on every device.
    """
    v_dim = head_dim if v_dim is None else v_dim
    generator = torch.Generator().manual_seed(case_seed(case.name, seed))
    q = torch.randn(case.batch, case.seq_q, case.heads_q, head_dim, generator=generator)
    kv_batch = 1 if case.layout == "expanded" else case.batch
    k = torch.randn(kv_batch, case.seq_k, case.heads_kv, head_dim, generator=generator)
    v = torch.randn(kv_batch, case.seq_k, case.heads_kv, v_dim, generator=generator)
    if case.distribution == "outlier":
        _add_outliers(q, k, v, generator)
    elif case.distribution == "ramp":
        _add_ramp(q, k)
    dtypes = {"q": dtype, "k": kv_dtype or dtype, "v": kv_dtype or dtype}
    given = {name: x.to(device=device, dtype=dtypes[name]) for name, x in (("q", q), ("k", k), ("v", v))}
    v_in_order = given["v"] if permuted else None
    if v_in_order is not None:
        given["v"] = permuted_keys(v_in_order, fill=BEHIND_LAST_KEY)
    if case.layout == "packed":
        kinds = {(name in by_sequence, dtypes[name]) for name in given}
        given = {name: x for kind in kinds for name, x in _packed(given, by_sequence, *kind).items()}
    else:
        given = {name: _placed(tensor, case.layout, name in by_sequence) for name, tensor in given.items()}
    q, k, v = (given[name] for name in ("q", "k", "v"))
    if case.layout == "expanded":
        k, v = (tensor.expand(case.batch, -1, -1, -1) for tensor in (k, v))
        v_in_order = None if v_in_order is None else v_in_order.expand(case.batch, -1, -1, -1)
    out, storage = _poisoned_out(q, v_dim, dtype if out_dtype is None else out_dtype, case.layout)
    return Inputs(q=q, k=k, v=v, out=out, out_storage=storage, v_in_order=v_in_order)


def _add_outliers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    """Make a few channels of q and k, and a few rows of k and v, several times larger than the rest."""
    channels = torch.randperm(q.shape[-1], generator=generator)[:2]
    q[..., channels] *= 4
    k[..., channels] *= 4
    rows = torch.randperm(k.shape[1], generator=generator)[:4]
    k[:, rows] *= 4
    v[:, rows] *= 16


def _add_ramp(q: torch.Tensor, k: torch.Tensor) -> None:
    """Let scores climb along the keys in the first batch entry and fall in the others, by 20 over the length."""
    seq_k, dim = k.shape[1], k.shape[-1]
    climb = torch.linspace(0, 20, seq_k)[:, None] * math.sqrt(dim) / 4  # q's channel below is 4, the scale 1/sqrt(d)
    q[..., 0] = 4
    k[:1, ..., 0] = climb
    k[1:, ..., 0] = climb.flip(0)


# How the modes of (batch, seq, heads, d) lie in memory, the contiguous one last.
_ORDERS: dict[tuple[bool, Layout], tuple[int, ...]] = {
    (False, "padded"): (0, 1, 2, 3),
    (False, "transposed"): (0, 2, 1, 3),
    (True, "padded"): (0, 2, 3, 1),
    (True, "transposed"): (0, 3, 2, 1),
}


def _placed(tensor: torch.Tensor, layout: Layout, by_sequence: bool) -> torch.Tensor:
    """Copy `tensor` (batch, seq, heads, d) into the storage that `layout` names, d or the sequence contiguous."""
    if layout == "odd_strides":
        return _odd_strides(_placed(tensor, "contiguous", by_sequence))
    guard = 0 if layout in ("contiguous", "packed") else GUARD
    if by_sequence:  # which begins behind whole vectors, too
        guard = -(-guard * tensor.element_size() // VECTOR_BYTES) * VECTOR_BYTES // tensor.element_size()
    order = _ORDERS[by_sequence, "transposed" if layout == "transposed" else "padded"]
    seq, extents = tensor.shape[1], list(tensor.shape)
    extents[1] += 2 * guard
    if by_sequence:  # other strides are multiples of it
        extents[1] += -extents[1] % (VECTOR_BYTES // tensor.element_size())
    storage = tensor.new_full([extents[axis] for axis in order], math.nan)
    view = storage.permute(sorted(range(tensor.ndim), key=order.__getitem__))[:, guard : guard + seq]
    return view.copy_(tensor)


def _odd_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Give every mode of extent 1 a stride that breaks any alignment rule: it is never used to form an address."""
    strides = [
        stride if extent > 1 else 3 for extent, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    ]
    return tensor.as_strided(tensor.shape, (*strides, tensor.stride(3)))


def _packed(
    given: Mapping[str, torch.Tensor], by_sequence: Sequence[str], which: bool, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Lay q, k and v side by side along the heads of one tensor, as a fused projection leaves them.

    Those of this dtype and of `by_sequence`, or the others: tensors of one storage have the same contiguous mode. Where
    the rows of v are shorter, NaN fills them up.
    """
    parts = {name: x for name, x in given.items() if (name in by_sequence, x.dtype) == (which, dtype)}
    width = max(tensor.shape[3] for tensor in parts.values())
    wide = [torch.nn.functional.pad(x, (0, width - x.shape[3]), value=math.nan) for x in parts.values()]
    together = _placed(torch.cat(wide, dim=2), "packed", which)
    slices = torch.split(together, [tensor.shape[2] for tensor in parts.values()], dim=2)
    return {name: part[..., : parts[name].shape[3]] for name, part in zip(parts, slices, strict=True)}


def _poisoned_out(q: torch.Tensor, dim: int, dtype: torch.dtype, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output for q, rows of `dim`, inside a larger buffer, all poisoned; stored like q where that fits."""
    batch, seq, heads, _ = q.shape
    if layout == "transposed":
        storage = poison(q.new_empty((batch, heads, seq + 2 * GUARD, dim), dtype=dtype)).transpose(1, 2)
    else:
        storage = poison(q.new_empty((batch, seq + 2 * GUARD, heads, dim), dtype=dtype))
    return storage[:, GUARD : GUARD + seq], storage
