"""Which generated module `fa3gen.attention` and `fa3gen.attention_packed` call: the first row of a table that fits.

The table is `fa3gen/dispatch.yaml`, written by `fa3gen.records.dispatch_table` and never by hand. A row says for which
layout, dtype, head dims, mask, number of tiles per SM, number of keys, query heads for each head of k and queries of
the longest sequence it stands, names one module by its stem and its SHA-256, and holds what was measured there. A
workspace of your own has its own table, `dispatch.yaml` beside `specs/`, whose rows come before those of the package.
Where no row fits, a module that was never measured is taken only when there is no choice: one that fits exactly, or one
of the production set (`fwd_*`) among those that do.

Imports neither torch nor cutlass.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, PrivateAttr, ValidationError

from fa3gen.base.errors import Problem, SpecError, UserError
from fa3gen.base.files import sha256
from fa3gen.base.wording import counted, listed
from fa3gen.design import footprint, splits
from fa3gen.design.family import TILE_ROWS, Family, mask_text
from fa3gen.design.footprint import page_rows
from fa3gen.design.masks import options_for
from fa3gen.design.own_bits import own_bits
from fa3gen.design.proposed import Proposal, propose
from fa3gen.design.rules import Violation
from fa3gen.design.tile_order import takes_group
from fa3gen.design.workspace import Workspace
from fa3gen.hardware.chips import H200
from fa3gen.spec.model import (
    WINDOW_MAX,
    AttentionDType,
    CausalMask,
    Forward,
    Mask,
    NoMask,
    OutputDType,
    SpecModel,
    StoredDType,
    WindowMask,
)
from fa3gen.spec.specfile import Variant, attention_among
from fa3gen.spec.yamltree import read

FILE_NAME = "dispatch.yaml"
WRITE_TABLE = "fa3gen tune --write-table"
MEASURE = "fa3gen tune --measure"  # modules, of dense tensors at shapes that are named, of packed ones at lists
PRODUCTION_PREFIX = "fwd_"
NO_LIMIT = 2**63  # more keys, and more tiles, than any call has
FEW_QUERIES = 16  # of a sequence: what rows for decoding serve at most
UNEVEN = (2.0, 6.0, 20.0)  # times the queries in the mean: up to which the longest sequence has them, in rows
SETTLED_NS = 2 * 10**9  # after which a file that is written again has another time, on any file system
DIGEST_LENGTH = 16  # hex digits of a SHA-256 in a row: enough to tell one file from another, and short enough to read


def measuring(stems: Sequence[str]) -> str:
    """The command that measures modules and writes the table anew."""
    return f"{MEASURE} {' '.join(stems)} --write --write-table"


class NoKernel(UserError, ValueError):
    """No generated module computes what was asked for, or nothing says which of several is to be taken."""


class NotRendered(NoKernel):
    """No generated module computes what was asked for. `proposal`: a spec of one that would, where there can be one."""

    def __init__(self, message: str, proposal: Proposal | None) -> None:
        """The message is followed by the spec, as text that can be saved."""
        self.proposal = proposal
        super().__init__(f"{message}\n\n{proposal.text}" if proposal else message)


class NotPossible(NotRendered, NotImplementedError):
    """Nor is there a legal spec of one that would; the message says which rules are against it."""


class ArgumentError(UserError, ValueError):
    """An argument of `fa3gen.attention` or `fa3gen.attention_packed` that makes no sense."""


def seen(keys: int, window: Sequence[int] | None) -> int:
    """Of so many keys as many as a window (left, right) shows a query; right of the last query there are none."""
    if window is None or window[0] < 0:
        return keys
    left, right = window
    return min(keys, left + 1 + max(right, 0))


def unevenness(longest: int, mean: int) -> float:
    """Queries of the longest sequence over those of one in the mean.

    Where nobody says how many the longest has, all have as many, or, of few in the mean, one has any number: a chunk of
    a prompt among decoding steps.
    """
    if longest == NO_LIMIT:
        return math.inf if mean <= FEW_QUERIES else 1.0
    return longest / max(mean, 1)


def queries_in_key(longest: int, mean: int) -> int:
    """What rows have conditions on, of queries, in a number that is the same where they choose alike: as many as the
    longest sequence has, one at least, where these are few, else, negative, how many edges of UNEVEN they exceed."""
    if longest <= FEW_QUERIES:
        return max(longest, 1)
    return -bisect.bisect_left(UNEVEN, unevenness(longest, mean))


def tiles_of_packed(total_q: int, sequences: int, heads: tuple[int, int], longest: int) -> int:
    """Tiles of packed sequences as rows count them: of TILE_ROWS rows, of queries of all heads that share one of k, and
    one at least for each sequence and head of k; where all have few queries, a tile for each sequence and head of q."""
    heads_q, heads_kv = heads
    if longest <= FEW_QUERIES:
        return sequences * heads_q
    return max(sequences * heads_kv, -(-total_q * heads_q // TILE_ROWS))


@dataclass(frozen=True)
class Size:
    """What rows have conditions on, beside what is compiled in.

    Keys are those of a sequence: where sequences are packed of the longest, or in the mean if a call does not tell, and
    there as many as a window shows at most. Tiles are those of `Shape.tiles`, 128 query rows of one head whatever
    module serves the call, and of packed sequences those of `tiles_of_packed`. `sms_here` are the SMs of the GPU that
    it runs on; None where there is none, and an H200's are taken. `group` is the number of query heads that share a
    head of k and v. Queries are those of a sequence; where sequences are packed those of the longest, as far as a call
    tells, and `mean_queries` are those of one in the mean. `parts`: in how many the keys of a tile of queries are to
    come, in the mean where sequences are packed; 1: no module serves the call that splits keys, 0: any. `own_bits`: a
    row's bits are its own, in a module that serves calls of every size, or in two that give a row the same bits.
    `in_parts`: of these the one for few queries is wanted, and the host knows that there is room for what parts of the
    keys leave. `in_rows`: dense tensors lie so that a module of packed sequences can serve the call. `is_causal`: the
    window of the call hides what a causal mask would.
    """

    keys: int
    tiles: int
    sms_here: int | None = None
    group: int = 1
    queries: int = NO_LIMIT
    parts: int = 0
    own_bits: bool = False
    in_parts: bool = False
    in_rows: bool = False
    mean_queries: int = NO_LIMIT
    is_causal: bool = False

    @property
    def whole(self) -> bool:
        """Whether no module may split keys."""
        return self.parts == 1

    def divided_by(self, spec: Forward) -> bool:
        """Whether a module divides keys as the call asks; one whose parts are not of a fixed size has any number."""
        if self.parts < 2:
            return not (self.whole and spec.split)  # parts that a CTA adds up itself are none that a call asks for
        return spec.split is not None and spec.split.keys is None

    @property
    def division(self) -> str:
        """`, keys in 3 parts`, if anything is asked for."""
        return f", keys in {self.parts} parts" if self.parts > 1 else ", keys not split" * self.whole

    @property
    def unevenness(self) -> float:
        """How many times the queries in the mean the longest of packed sequences has."""
        return 1.0 if self.mean_queries == NO_LIMIT else unevenness(self.queries, self.mean_queries)

    @property
    def sms(self) -> int:
        """The number of SMs that tiles are divided by."""
        return H200.sms if self.sms_here is None else self.sms_here

    def __str__(self) -> str:
        """`1024 keys, 64 tiles of 128 query rows on 132 SMs`."""
        whose = ", as on an H200, since the tensors are on no GPU" if self.sms_here is None else ""
        tiles = f"{counted(self.tiles, 'tile')} of {TILE_ROWS} query rows"
        heads = f", {self.group} query heads for each of k" if self.group > 1 else ""
        uneven = self.unevenness > UNEVEN[0]
        few = counted(self.mean_queries, "query", "queries") + " of a sequence in the mean, " if uneven else ""
        if self.queries <= FEW_QUERIES:
            few = counted(self.queries, "query", "queries") + ", "
        how = self.division + ", the same bits in any batch" * self.own_bits
        return f"{few}{counted(self.keys, 'key')}, {tiles} on {self.sms} SMs{whose}{heads}{how}"


class Measurement(SpecModel):
    """One measured length of a row: the speed of its module and of the best other one, TFLOP/s."""

    seq: int = Field(gt=0, description="Keys.")
    tflops: float = Field(gt=0)
    runner_up: str | None = None
    runner_up_tflops: float | None = None
    runner_up_sha256: str | None = Field(default=None, description="First digits, of the measured file.")
    gpu: str

    def told(self, home: Workspace) -> str:
        """`at 1024 keys 455 TFLOP/s; k6_d128 420 (NVIDIA H200)`; of a runner-up that has changed since, no figure."""
        other = _runner_up(home, self.runner_up, self.runner_up_sha256, f"{self.runner_up_tflops or 0:g}")
        return f"at {self.seq} keys {self.tflops:g} TFLOP/s; {other} ({self.gpu})"


class Shapes(SpecModel):
    """Many measured shapes of a row in one line: how many times as long as its module the best other one took."""

    shapes: int = Field(gt=0)
    runner_up: str | None = Field(default=None, description="Of those that were measured at all of these shapes.")
    runner_up_ratio: float | None = Field(default=None, gt=0, description="Geometric mean over the shapes.")
    runner_up_sha256: str | None = Field(default=None, description="First digits, of the measured file.")
    gpu: str

    def told(self, home: Workspace) -> str:
        """`over 12 shapes; k6_d128 takes 1.08 times as long (NVIDIA H200)`; as `Measurement.told`."""
        figure = f"takes {self.runner_up_ratio or 0:g} times as long"
        other = _runner_up(home, self.runner_up, self.runner_up_sha256, figure)
        other += " at all of them" * (self.runner_up is None)
        return f"over {counted(self.shapes, 'shape')}; {other} ({self.gpu})"


def _runner_up(home: Workspace, stem: str | None, digest: str | None, figure: str) -> str:
    """A runner-up with its figure, which it has only as long as its file is the one that was measured."""
    if stem is None:
        return "no other module that serves this row was measured"
    file = home.module_path(stem)
    present = sha256(file)[:DIGEST_LENGTH] if file.is_file() else None
    if present is None or present != digest:
        return f"second was {stem}, of another file than the present one"
    return f"{stem} {figure}"


class Region(SpecModel):
    """Numbers of keys, or of queries, up to and including `up_to`."""

    up_to: int = Field(gt=0)


class Times(SpecModel):
    """Multiples up to and including `up_to`."""

    up_to: float = Field(ge=1)


class Load(SpecModel):
    """Numbers of tiles per SM up to and including `up_to`: up to 1, and every tile has an SM of its own."""

    up_to: float = Field(gt=0)


class Multiples(SpecModel):
    """Numbers of query heads for each head of k and v that are multiples of `multiple_of`."""

    multiple_of: int = Field(gt=1)

    def holds(self, group: int) -> bool:
        """Whether so many are among them."""
        return group % self.multiple_of == 0

    @property
    def tests(self) -> tuple[int, ...]:
        """Some of them: a module that takes these takes all."""
        return (self.multiple_of,)

    def __str__(self) -> str:
        """`groups of a multiple of 4 heads`."""
        return f"groups of a multiple of {self.multiple_of} heads"


class AtMost(SpecModel):
    """Numbers of query heads for each head of k and v up to `at_most`, from `at_least` on."""

    at_most: int = Field(gt=0)
    at_least: int | None = Field(default=None, gt=1)

    def holds(self, group: int) -> bool:
        """Whether so many are among them."""
        return (self.at_least or 1) <= group <= self.at_most

    @property
    def tests(self) -> tuple[int, ...]:
        """Some of them: a module that takes these takes all."""
        return self.at_least or 1, self.at_most

    def __str__(self) -> str:
        """`up to 8 heads of q for each of k`, `4 to 7 heads of q for each of k`."""
        most = counted(self.at_most, "head")
        if self.at_least == self.at_most:
            return f"{most} of q for each of k"
        return f"{f'{self.at_least} to' if self.at_least else 'up to'} {most} of q for each of k"


class Stretch(NamedTuple):
    """The numbers of keys and of tiles, from the least to the most, within which the choice is the same."""

    least_keys: int = 0
    most_keys: int = NO_LIMIT
    least_tiles: int = 0
    most_tiles: int = NO_LIMIT

    def meet(self, other: Stretch) -> Stretch:
        """The sizes that are in both."""
        keys = max(self.least_keys, other.least_keys), min(self.most_keys, other.most_keys)
        tiles = max(self.least_tiles, other.least_tiles), min(self.most_tiles, other.most_tiles)
        return Stretch(*keys, *tiles)


class Row(SpecModel):
    """One row: for which calls it stands, which module serves them, and why. Without a condition: any number."""

    dtype: AttentionDType
    head_dim: int = Field(gt=0)
    head_dim_v: int = Field(gt=0)
    mask: Mask
    out_dtype: OutputDType | None = Field(default=None, description="Of O, where it is not `dtype`.")
    kv_dtype: StoredDType | None = Field(default=None, description="Of k and v, where they have 8 bits.")
    block_scales: bool | None = Field(default=None, description="True: for factors of blocks of rows of q and k.")
    sink: bool | None = Field(default=None, description="True: for calls with sinks.")
    softcap: bool | None = Field(default=None, description="True: for calls with a cap of the scores.")
    by_sequence: Literal["v"] | None = Field(
        default=None, description="Of 8 bits, the input whose sequence is contiguous; without it, rows of all are."
    )
    v_permuted: bool | None = Field(default=None, description="True: that has its keys permuted.")
    layout: Literal["packed", "paged"] | None = Field(
        default=None, description="Packed sequences, or packed queries and pages; without it, dense tensors."
    )
    page_rows: int | None = Field(default=None, gt=0, description="Of pages: for sizes that are multiples of it.")
    group: Multiples | AtMost | None = None
    seq_q: Region | None = Field(default=None, description="Queries of each sequence, few for a decoding step.")
    longest_q: Times | None = Field(
        default=None, description="Queries of the longest of packed sequences, more than few, beside those in the mean."
    )
    tiles_per_sm: Load | None = Field(
        default=None,
        description="Tiles of 128 query rows of one head; of packed sequences with more than few queries, of all heads "
        "that share one of k.",
    )
    seq_k: Region | None = Field(default=None, description="Keys; of packed sequences the longest one's, if known.")
    module: str
    sha256: str = Field(pattern=f"^[0-9a-f]{{{DIGEST_LENGTH}}}$", description="First digits, of the measured file.")
    measured: list[Measurement | Shapes] = Field(min_length=1)

    def most_tiles(self, size: Size) -> int:
        """The largest number of tiles, as a size counts them, that it serves on a GPU with so many SMs."""
        return NO_LIMIT if self.tiles_per_sm is None else math.floor(self.tiles_per_sm.up_to * size.sms)

    @property
    def most_keys(self) -> int:
        """The largest number of keys that it serves."""
        return NO_LIMIT if self.seq_k is None else self.seq_k.up_to

    def serves(self, family: Family, size: Size) -> bool:
        """Whether this row stands for a call."""
        return self.family.serves(family) and self.serves_size(size)

    def serves_size(self, size: Size) -> bool:
        """Whether it stands for calls of this size, of its family."""
        return self.serves_rows(size) and size.keys <= self.most_keys and size.tiles <= self.most_tiles(size)

    def serves_rows(self, size: Size) -> bool:
        """Whether it stands for calls with so many query heads for each head of k and v, and so many queries."""
        if self.seq_q is not None and size.queries > self.seq_q.up_to:
            return False
        if self.longest_q is not None and (size.queries <= FEW_QUERIES or size.unevenness > self.longest_q.up_to):
            return False
        return self.group is None or self.group.holds(size.group)

    def narrowed(self, around: Stretch, size: Size) -> Stretch:
        """The part of a stretch around `size` in which this row serves every call, or none, as it does at `size`.

        All calls of a stretch have the same group, as many queries where these are few, else as uneven ones.
        """
        if not self.serves_rows(size):
            return around
        most_tiles = self.most_tiles(size)
        if size.tiles > most_tiles:
            return around._replace(least_tiles=max(around.least_tiles, most_tiles + 1))
        if size.keys > self.most_keys:
            return around._replace(least_keys=max(around.least_keys, self.most_keys + 1))
        return around.meet(Stretch(most_keys=self.most_keys, most_tiles=most_tiles))

    @property
    def family(self) -> Family:
        """What its module is compiled for."""
        return Family(
            *(self.dtype, self.head_dim, self.head_dim_v, self.mask, self.out_dtype),
            by_sequence=tuple(self.by_sequence or ""),
            layout=self.layout or "dense",
            sink=bool(self.sink),
            softcap=bool(self.softcap),
            page_rows=self.page_rows,
            kv_dtype=self.kv_dtype,
            block_scales=bool(self.block_scales),
            v_permuted=bool(self.v_permuted),
        )

    @property
    def region(self) -> str:
        """`up to 0.5 tiles per SM, up to 1024 keys` or `any number of keys`."""
        conditions = [
            f"the longest of up to {self.longest_q.up_to:g} times the queries in the mean" if self.longest_q else "",
            f"up to {self.seq_q.up_to} queries" if self.seq_q else "",
            f"{self.group}" if self.group else "",
            f"up to {self.tiles_per_sm.up_to:g} tiles per SM" if self.tiles_per_sm else "",
            f"up to {self.seq_k.up_to} keys" if self.seq_k else "any number of keys",
        ]
        return ", ".join(filter(None, conditions))


class Table(SpecModel):
    """All rows, in the order in which they are looked at."""

    rows: list[Row]
    _of_family: dict[Family, list[tuple[int, Row]]] = PrivateAttr(default_factory=dict)

    @cached_property
    def _compiled_for(self) -> dict[Family, list[tuple[int, Row]]]:
        """The rows, with their numbers from 1 on, by what their modules are compiled for: far fewer than rows."""
        found: dict[Family, list[tuple[int, Row]]] = {}
        for number, row in enumerate(self.rows, 1):
            found.setdefault(row.family, []).append((number, row))
        return found

    def of_family(self, family: Family) -> list[tuple[int, Row]]:
        """The rows for calls of a family, with their numbers from 1 on; found once, since every new size asks."""
        if family not in self._of_family:
            serving = (rows for own, rows in self._compiled_for.items() if own.serves(family))
            self._of_family[family] = sorted(chain.from_iterable(serving), key=itemgetter(0))
        return self._of_family[family]


def mask_of(causal: bool, window: Sequence[int] | None) -> Mask:
    """The mask that `causal` and `window` = (left, right) ask for: both together hide what either hides.

    -1 is no bound. Raises ArgumentError for a window that is no pair of whole numbers from -1 to 2^30.
    """
    if window is None:
        return CausalMask() if causal else NoMask()
    reach = tuple(window) if isinstance(window, (tuple, list)) else ()
    if len(reach) != 2 or any(type(keys) is not int or not -1 <= keys <= WINDOW_MAX for keys in reach):
        raise ArgumentError(
            f"window is {window!r}; it needs to be None or (left, right), how many keys a query sees left and right of "
            f"the diagonal, each from 0 to {WINDOW_MAX}, or -1 for all"
        )
    left, right = reach[0], 0 if causal else reach[1]
    if left == -1 and right in (-1, 0):
        return NoMask() if right else CausalMask()
    return WindowMask(left=WINDOW_MAX if left == -1 else left, right=WINDOW_MAX if right == -1 else right)


def is_causal(causal: bool, window: Sequence[int] | None, most_k: Any) -> bool:
    """Whether a window (left, right) hides of so many keys at most those that a causal mask hides, and no others.

    A number of keys that is no whole number is not known.
    """
    if window is None:
        return False
    left, right = window
    return type(most_k) is int and left >= most_k - 1 and (causal or right == 0)


# The choice

# Modules that this process has rendered for calls with render=True, which no workspace has: `fa3gen.run.rendering`.
rendered_here: list[tuple[Variant[Forward], Path]] = []


@dataclass(frozen=True)
class Choice:
    """The module for a call, and why: a row of the table, or (None) that no row fits and nothing else does.

    `measured` says in words what is known of the row's module and of its runner-up, `size` what was asked for, and
    `around` which other sizes have the same choice. `options` is what a call of the module has to say beside that.
    `as_packed`: the tensors are dense, and the module takes them as packed sequences of one length. `as_mask`: the
    mask that the module has, if it is not the call's, and why it hides the same keys; else empty. `parts` says in how
    many parts the keys of the call come, and why, where its shape is known.
    """

    stem: str
    file: Path
    spec: Forward
    source: Path
    row: Row | None
    reason: str
    measured: tuple[str, ...] = ()
    size: Size | None = None
    around: Stretch = Stretch()
    options: Mapping[str, Any] = field(default_factory=dict)
    as_packed: bool = False
    as_mask: str = ""
    parts: str | None = None

    @property
    def of_few_queries(self) -> bool:
        """Whether it is that of a row which was measured with few queries."""
        return self.row is not None and self.row.seq_q is not None

    def __str__(self) -> str:
        """The module, its spec in short, and why, in a few lines."""
        spec = self.spec
        how = f"tile {spec.tile.q} x {spec.tile.kv}, loads {spec.load.engine}, schedule {spec.schedule.kind}"
        lines = [f"{self.file}", f"  spec  {self.source}: {Family.of(spec).of_module}; {how}"]
        if self.size is not None:
            lines.append(f"  for   {self.size}")
        if self.as_packed:
            lines.append("  as    packed sequences of one length, which dense tensors are without a copy of k and v")
        if self.as_mask:
            lines.append(f"  as    {self.as_mask}")
        if self.parts is not None:
            lines.append(f"  parts {self.parts}")
        lines.append(f"  why   {self.reason}")
        return "\n".join([*lines, *(f"        {measured}" for measured in self.measured)])


def choose(family: Family, size: Size, *, lse: bool, workspace: Workspace) -> Choice:
    """The module that serves a call of this size; `lse`: LSE is wanted too.

    Dense tensors may be taken as packed sequences (`may_be_packed`): where the module of these splits keys or holds
    several heads of a group in a tile, by a measured row, or where there is no other module. A window that hides what a
    causal mask would is one, whose modules are faster, where there is a module for that; and so is no mask where a
    sequence has one query, see `_of_one_query`; where no module has the call's mask, one may that takes any window. But
    not where a row's bits are its own, which would be others then, by how many keys and queries there are.

    Raises NoKernel when there is none, when several fit and none was measured, and when the module of the row is
    missing or not the file that was measured. Raises UserError for a table that cannot be read.
    """
    if size.own_bits:
        return _for_call(_of_own_bits(family, size, lse, workspace), family, size, Stretch())
    if family.part_keys is not None:  # bits of their own, too
        return _of_layouts(family, size, lse, workspace)
    if size.is_causal:
        with contextlib.suppress(NoKernel):
            told = "a causal mask: no sequence has more keys than the window reaches back over"
            return _under(CausalMask(), told, family, size, lse, workspace)
    try:
        if isinstance(family.mask, NoMask) and size.queries <= 1:
            return _of_one_query(family, size, lse, workspace)
        return _of_layouts(family, size, lse, workspace)
    except NotRendered:
        if isinstance(family.mask, WindowMask):
            raise
        with contextlib.suppress(NoKernel):
            wide = WindowMask(left=WINDOW_MAX, right=WINDOW_MAX if isinstance(family.mask, NoMask) else 0)
            told = "a window that reaches over all keys: there is no module for the mask itself"
            return _under(wide, told, family, size, lse, workspace)
        raise


def _of_one_query(family: Family, size: Size, lse: bool, workspace: Workspace) -> Choice:
    """The choice for calls without a mask where no sequence has more than one query, which sees all keys under a causal
    mask, too: that of causal calls where these alone have a module, or a row that was measured with few queries."""

    def causal() -> Choice:
        told = "a causal mask: no sequence has more than one query"
        return _under(CausalMask(), told, family, size, lse, workspace)

    try:
        found = _of_layouts(family, size, lse, workspace)
    except NotRendered as missing:
        try:
            return causal()
        except NoKernel:
            raise missing from None
    if found.of_few_queries:
        return found
    with contextlib.suppress(NoKernel):
        other = causal()
        return replace(other if other.of_few_queries else found, around=found.around.meet(other.around))
    return found


def _under(mask: Mask, told: str, family: Family, size: Size, lse: bool, workspace: Workspace) -> Choice:
    """The choice for another mask than the call's, which hides the same keys, and what is told of it."""
    return replace(_of_layouts(family._replace(mask=mask), size, lse, workspace), as_mask=told)


def _of_layouts(family: Family, size: Size, lse: bool, workspace: Workspace) -> Choice:
    """The choice for a mask as it is, for dense tensors perhaps as packed sequences."""
    if size.in_rows and may_be_packed(family, size.queries, size.parts):
        return _dense_or_packed(family, size, lse, workspace)
    return _chosen(family, size, lse, workspace)


def _chosen(family: Family, size: Size, lse: bool, workspace: Workspace) -> Choice:
    choice, around = _measured(family, size, lse, workspace)
    return _for_call(choice or _unmeasured(family, size, lse, workspace), family, size, around)


def _measured(family: Family, size: Size, lse: bool, workspace: Workspace) -> tuple[Choice | None, Stretch]:
    """The module of the first row that serves a call, if there is one, and of which sizes this is so."""
    around = Stretch()
    for home, path in tables(workspace):
        for number, row in rows_for(path, family):
            around = row.narrowed(around, size)
            if not row.serves_size(size):
                continue
            choice = of_row(home, row, place_of_row(home, path, number, row))
            if (choice.spec.outputs.lse or not lse) and size.divided_by(choice.spec):
                return choice, around
    return None, around


def may_be_packed(family: Family, queries: int, parts: int) -> bool:
    """Whether dense calls may be served by modules of packed sequences: those with a window, a sink or a cap, of which
    there are more modules than for dense tensors; and those of 8 bits with few queries, or that ask for parts of the
    keys, which no module for dense tensors splits."""
    scores = isinstance(family.mask, WindowMask) or family.sink or family.softcap
    splitting = family.eight_bits and (queries <= FEW_QUERIES or parts > 1)
    dense = family.layout == "dense" and not (family.v_permuted or family.by_sequence or family.block_scales)
    return queries > 0 and (scores or splitting) and dense and family.part_keys is None


def _dense_or_packed(family: Family, size: Size, lse: bool, workspace: Workspace) -> Choice:
    """The choice for a dense call that a module of packed sequences may serve.

    One for dense tensors stays if a row says that it was measured with few queries, or if the one of packed sequences
    has no row, or neither splits keys nor holds several heads of a group: then it reads keys as the dense one does.
    Where several are held, the dense one stays if any row speaks of it.
    """
    packed = family._replace(layout="packed"), replace(size, keys=_shown(size.keys, family.mask))
    try:
        dense = _chosen(family, size, lse, workspace)
    except NotRendered as missing:
        try:
            found = _chosen(*packed, lse, workspace)
        except NotPossible:
            raise missing from None
        except NotRendered as packed_missing:  # whose spec, once rendered, serves this call, too
            raise (missing if missing.proposal else packed_missing) from None
        except NoKernel:
            raise missing from None
        return replace(found, size=size, around=_of_all_keys(found.around, family.mask), as_packed=True)
    if dense.of_few_queries:
        return dense
    try:
        by_row, around = _measured(*packed, lse, workspace)
    except NoKernel:  # its module is missing, or not the one that was measured; packed calls say so
        return dense
    around = dense.around.meet(_of_all_keys(around, family.mask))
    if by_row is None or not (by_row.spec.split or (by_row.spec.tile.pack_heads > 1 and dense.row is None)):
        return replace(dense, around=around)
    return replace(_for_call(by_row, family, size, around), as_packed=True)


def _of_all_keys(around: Stretch, mask: Mask) -> Stretch:
    """A stretch by as many keys as a window shows as one by all that there are."""
    return around._replace(most_keys=NO_LIMIT) if around.most_keys >= _shown(NO_LIMIT, mask) else around


def _shown(keys: int, mask: Mask) -> int:
    """`seen`, of a mask."""
    if not isinstance(mask, WindowMask) or mask.left is None or mask.left == WINDOW_MAX:
        return keys
    return seen(keys, (mask.left, -1 if mask.right in (None, WINDOW_MAX) else mask.right))


def _for_call(choice: Choice, family: Family, size: Size, around: Stretch) -> Choice:
    return replace(choice, size=size, around=around, options=options_for(choice.spec.mask, family.mask))


def tables(workspace: Workspace) -> Iterator[tuple[Workspace, Path]]:
    """The tables there are, first the workspace's own, each with the workspace that its modules lie in."""
    own, package = table_path(workspace), workspace.package
    if workspace.root != workspace.bundled and own.is_file():
        yield workspace, own
    yield package, table_path(package)


def table_path(workspace: Workspace) -> Path:
    """Where a workspace's table lies: that of the package's own data is part of the package."""
    if workspace.root == workspace.bundled:
        return Path(__file__).parents[1] / FILE_NAME
    return workspace.root / FILE_NAME


def place_of_row(home: Workspace, path: Path, number: int, row: Row) -> str:
    """`fa3gen/dispatch.yaml, row 3 (bf16, head dim 128, causal, up to 1024 keys)`."""
    return f"{home.shown(path)}, row {number} ({row.family.of_module}, {row.region})"


def of_row(home: Workspace, row: Row, place: str) -> Choice:
    """The module of a row. Raises NoKernel when it is missing, was not the one measured, or computes something else."""
    file = home.module_path(row.module)
    if not file.is_file():
        raise NoKernel(f"{place} names {row.module}, and {file} does not exist; run: fa3gen render {row.module}")
    if sha256(file)[:DIGEST_LENGTH] != row.sha256:
        raise NoKernel(
            f"{place} was measured with another {row.module} than the present {file}; "
            f"measure it again: {measuring([row.module])}"
        )
    variant = next((found for found in attention_among(home.resolve(row.module)) if found.stem == row.module), None)
    if variant is None:
        raise NoKernel(f"{place} names {row.module}, which is a spec with several modules; run: {WRITE_TABLE}")
    if not (computed := Family.of(variant.spec)).serves(row.family):
        raise NoKernel(f"{place} is served by {row.module}, and that computes {computed}; run: {WRITE_TABLE}")
    if not all(takes_group(variant.spec, group) for group in (row.group.tests if row.group else (1,))):
        heads = variant.spec.tile.pack_heads
        raise NoKernel(
            f"{place} is served by {row.module}, whose tiles hold {heads} heads of a group; run: {WRITE_TABLE}"
        )
    measured = tuple(measurement.told(home) for measurement in row.measured)
    return Choice(row.module, file, variant.spec, variant.source, row, place, measured)


def _unmeasured(family: Family, size: Size, lse: bool, workspace: Workspace) -> Choice:
    """The module to take without a measurement, when there is no choice. Raises NoKernel when there is one, or none.

    Tiles that hold several heads hold such of one group. Modules that are compiled for the window come before those
    that are for any, and those that split keys, which are made for few queries, come last where there are many, or
    where none is of the production set; of several of that set they come first where there are few. Modules that take
    prompts between steps are taken where there is no other. A call that asks
    for parts has the one with the smallest tiles of keys, of which parts are whole numbers. Of modules of 8 bits
    outside of the production set those are passed over that leave it to the tensor core to add up P V of all keys,
    where threads could do it in float32.
    """
    modules = [(variant, file) for variant, file in _modules(workspace) if _sums_in_float32(variant, family)]
    able = _able(modules, family, size, lse)
    able = {stem: found for stem, found in able.items() if found[0].spec.order == "by_sequence"} or able
    whole = {stem: found for stem, found in able.items() if found[0].spec.split is None}
    fitting = whole if whole and (size.queries > FEW_QUERIES or not _production(able)) else able
    exact = _nearest_pages([stem for stem in fitting if fitting[stem][0].spec.mask == family.mask], fitting)
    production = _production(exact) or _production(_nearest_pages(list(fitting), fitting))
    splitting = [stem for stem in production if fitting[stem][0].spec.split is not None]
    of_few = size.queries <= FEW_QUERIES and 0 < len(splitting) < len(production)
    production = splitting if of_few else production
    only = production if len(production) == 1 else exact or list(fitting)
    if len(only) == 1:
        variant, file = fitting[only[0]]
        what = "module" if len(fitting) == 1 else "production module"
        fits = "fits" if len(fitting) == len(able) else "fits and does not split keys"
        fits += " and splits keys, as it pays for few queries" * of_few
        fits += " and adds up tiles of keys in float32" * (family.two_levels and not production)
        reason = f"no row of the table is for {family}: no measurement, but this is the only {what} that {fits}"
        return Choice(variant.stem, file, variant.spec, variant.source, None, reason)
    if fitting and (size.parts > 1 or family.part_keys is not None):
        variant, file = min((fitting[stem] for stem in production or only), key=_coarseness)
        reason = f"no row of the table is for {family}{size.division}: of the modules that split keys like that, this "
        reason += f"one has the smallest tiles of keys, {variant.spec.tile.kv}"
        return Choice(variant.stem, file, variant.spec, variant.source, None, reason)
    if fitting:
        stems = production or only
        measure = measuring(stems)
        raise NoKernel(
            f"several modules compute {family}, and no row of the table says which is best: {', '.join(stems)}; "
            f'call one of them, fa3gen.load("{stems[-1]}").attention(...), or measure them on your GPU: {measure}'
        )
    raise _missing(modules, family, size, lse, workspace)


def _sums_in_float32(variant: Variant[Forward], family: Family) -> bool:
    """Whether a module may be taken unmeasured as far as its sums go: of 16 bits these are float32 in any module."""
    return not family.two_levels or footprint.promote_every(variant.spec) == 1 or _is_production(variant.stem)


def _able(
    modules: Iterable[tuple[Variant[Forward], Path]], family: Family, size: Size, lse: bool
) -> dict[str, tuple[Variant[Forward], Path]]:
    """By stem the modules that serve a call; the workspace's own come first."""
    able: dict[str, tuple[Variant[Forward], Path]] = {}
    for variant, file in modules:
        writes = (variant.spec.outputs.lse or not lse) and size.divided_by(variant.spec)
        if Family.of(variant.spec).serves(family) and writes and takes_group(variant.spec, size.group):
            able.setdefault(variant.stem, (variant, file))
    return able


def _of_own_bits(family: Family, size: Size, lse: bool, workspace: Workspace) -> Choice:
    """The module for calls of this family and group of heads, whatever their sizes. Raises NoKernel without any.

    Rows of the table go by sizes, and another module may add up in another order. So they are not asked. Of several
    modules it is one of the production set, made for this mask, that copies most of a page at once, reads keys for as
    many heads of a group at once as it can, and has the largest tile; one that takes head after head, which is made for
    chunks of prompts beside decoding steps, comes last.

    Where parts of so many keys are asked for, a CTA has all of a row and adds them up; for few queries it is the module
    in which each part has a CTA, with tiles of as many keys: it adds up the same numbers in the same order. If nobody
    says how many, keys in pages have parts of KEYS_OF_PAGED_PARTS, where there are such modules.
    """
    modules = list(_modules(workspace))
    asked = "split_keys" if family.part_keys is not None else "deterministic_batch"

    def of_parts(keys: int | None) -> dict[str, tuple[Variant[Forward], Path]]:
        found = _able(modules, family._replace(part_keys=keys), size, lse)
        return {stem: one for stem, one in found.items() if own_bits(one[0].spec)}

    keys = family.part_keys or splits.keys_of_own_parts(family.head_dim, paged=family.layout == "paged")
    able = of_parts(keys)
    if keys != family.part_keys and all(variant.spec.split is not None for variant, _ in able.values()):
        keys, able = None, of_parts(None)  # no CTA has all parts of its rows: parts would serve few queries only

    def rank(stem: str) -> tuple[Any, ...]:
        spec = able[stem][0].spec
        fit = not _is_production(stem), spec.mask != family.mask, -(page_rows(spec) or 0)
        return *fit, spec.order != "by_sequence", -spec.tile.pack_heads, -spec.tile.q, stem

    whole = [stem for stem, (variant, _) in able.items() if variant.spec.split is None]
    if not whole:
        raise _missing(modules, family, size, lse, workspace)
    stem = min(whole, key=rank)
    kv = able[stem][0].spec.tile.kv
    in_parts = [other for other in able if other not in whole and able[other][0].spec.tile.kv == kv]
    if keys is None:
        reason = (
            "deterministic_batch takes this one for calls of any size: no row shares what decides on another one's bits"
        )
    elif size.in_parts and in_parts:
        stem = min(in_parts, key=rank)
        reason = f"{asked}, few queries: a CTA for each part of {keys} keys, where else one has them all"
    else:
        reason = f"{asked}: parts of {keys} keys, which a CTA has all and adds up, of calls of any size"
    variant, file = able[stem]
    return Choice(stem, file, variant.spec, variant.source, None, reason + ", with the same bits" * (keys is not None))


def _missing(
    modules: Iterable[tuple[Variant[Forward], Path]], family: Family, size: Size, lse: bool, workspace: Workspace
) -> NotRendered:
    """The error where no module serves a call."""
    there = _served([variant for variant, _ in modules if own_bits(variant.spec) or not size.own_bits], family, lse)
    wanted = f"{family}{', with LSE' * lse}{size.division}"
    wanted += ", the same bits in any batch" * (size.own_bits and family.part_keys is None)
    problem = f"no generated module computes {wanted}; head dims served: {there or 'none'}"
    if family.part_keys is not None:
        alike = (Family.of(variant.spec) for variant, _ in modules)
        numbers = {one.part_keys for one in alike if one._replace(part_keys=family.part_keys).serves(family)} - {None}
        problem += f"; split_keys served there: {listed(sorted(map(str, numbers))) or 'none'}"
    if size.parts and not size.own_bits:
        with contextlib.suppress(NoKernel):
            free = choose(family, replace(size, parts=0), lse=lse, workspace=workspace)
            problem += f"; num_splits=0 takes {free.stem}"
    if family.v_permuted:
        problem += "; leave v_permuted out and pass v with its keys in order"
    elif family.eight_bits and family.by_sequence:
        problem += "; pass v.contiguous(), whose rows are contiguous"
    parts = size.parts > 1
    room = size.group if parts or family.part_keys is not None else 1  # other tiles hold one head, and take any group
    proposed = propose(family, workspace, own=size.own_bits, parts=parts, group=room)
    function = "fa3gen.attention" if family.layout == "dense" or size.in_rows else "fa3gen.attention_packed"
    return _not_rendered(problem, proposed, workspace, function)


def _coarseness(module: tuple[Variant[Forward], Path]) -> tuple[Any, ...]:
    """Tiles of keys, of which parts are whole numbers; then rows of heads that may not exist."""
    tile, stem = module[0].spec.tile, module[0].stem
    return tile.kv, tile.pack_heads, stem


def _nearest_pages(stems: Sequence[str], fitting: Mapping[str, tuple[Variant[Forward], Path]]) -> list[str]:
    """Of modules that fit those that copy most of a page at once; all, where there are no pages."""
    rows = {stem: page_rows(fitting[stem][0].spec) or 0 for stem in stems}
    return [stem for stem in stems if rows[stem] == max(rows.values())]


def _production(stems: Iterable[str]) -> list[str]:
    return [stem for stem in stems if _is_production(stem)]


def _modules(workspace: Workspace) -> Iterator[tuple[Variant[Forward], Path]]:
    """Every rendered module, those of the workspace first, those that this process has rendered for calls last.

    Specs of the workspace that are broken have none.
    """
    package = workspace.package
    for home in (workspace, package) if workspace.root != workspace.bundled else (package,):
        for path in home.spec_files():
            try:
                variants = attention_among(home.load(path).variants)
            except SpecError:
                continue
            yield from ((v, file) for v in variants if (file := home.module_path(v.stem)).is_file())
    yield from rendered_here


def _served(variants: Sequence[Variant[Forward]], family: Family, lse: bool) -> str:
    """The head dims for which there are modules of the family's layout and dtypes, by mask and the like; of any dtypes
    where there are none of these. Heads in a tile are said of head dims that no other module of the kind has."""
    able = [(Family.of(variant.spec), variant.spec) for variant in variants if variant.spec.outputs.lse or not lse]
    where = family.layout, family.by_sequence
    able = [(served, spec) for served, spec in able if (served.layout, served.by_sequence) == where]
    able = [(served, spec) for served, spec in able if served.dtypes == family.dtypes] or able
    dims: dict[str, dict[str, set[str]]] = {}  # by kind, then by heads in a tile
    for served, spec in able:
        kind = f"{served.dtypes}, {mask_text(served.mask)}" + "".join(f", {name}" for name in served.keywords)
        most = "up to " * (spec.tile.group != "multiple")
        heads = f", {most}{counted(spec.tile.pack_heads, 'head')} in a tile" if spec.tile.pack_heads > 1 else ""
        dims.setdefault(kind, {}).setdefault(heads, set()).add(served.dims)
    found = [
        (f"{kind}{heads}", of_heads[heads] - (of_heads.get("", set()) if heads else set()))
        for kind, of_heads in sorted(dims.items())
        for heads in sorted(of_heads)
    ]
    return "; ".join(f"{what}: {', '.join(sorted(here, key=_natural))}" for what, here in found if here)


def _not_rendered(
    problem: str, found: Proposal | tuple[Violation, ...], workspace: Workspace, function: str
) -> NotRendered:
    """The error where no module fits: with a spec of one that would, or with what is against that."""
    if not isinstance(found, Proposal):
        reasons = "".join(f"\n{one.field}: {one.message}" for one in found) or "\nthere is no spec to begin with"
        return NotPossible(f"{problem}. Nor can one be rendered:{reasons}", None)
    path, stem = workspace.specs_dir / f"{found.stem}.yaml", found.stem
    way_out = (
        f"This spec of one extends {found.base}, and was never measured. Save it as {path}, run `fa3gen render {stem}` "
        f"and `fa3gen verify {stem}`; or have {function}(..., render=True) render and compile it, once in each process"
    )
    return NotRendered(f"{problem}. {way_out}:", found)


def _is_production(stem: str) -> bool:
    return stem.startswith(PRODUCTION_PREFIX)


def _natural(dims: str) -> list[int]:
    return [int(number) for number in dims.split("/")]


# The table's file


def read_table(path: Path) -> Table:
    """Read a table. Raises UserError, with every problem, when it is not one.

    What was read is kept for as long as the file says the same.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError, ValueError, LookupError):
        return _as_written(_text(path))
    problems: list[Problem] = []
    tree = read(path, path, problems)
    if tree is None or problems:
        raise _spoilt(path, "; ".join(str(problem) for problem in problems))
    try:
        return Table.model_validate(tree.plain())
    except ValidationError as error:
        first = error.errors()[0]
        raise _spoilt(path, f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None


@lru_cache(maxsize=2)  # the workspace's own, and the package's
def _as_written(text: str) -> Table:
    """The table of such a text, of some ten thousand lines, which takes a parser of YAML seconds; raises ValueError for
    what is written otherwise."""
    return Table.model_validate({"rows": rows_as_written(text)})


def rows_for(path: Path, family: Family) -> list[tuple[int, Row]]:
    """The rows of a table for calls of a family, with their numbers from 1 on. Raises UserError as `read_table`.

    A call of a new size asks for them. A process makes calls of few families: the rows of others stay text, in a table
    that is written as ours.
    """
    with contextlib.suppress(OSError, UnicodeDecodeError, ValueError, LookupError):
        return _entries(_text(path)).of_family(family)
    return read_table(path).of_family(family)


_known: dict[Path, tuple[tuple[int, int, int], str]] = {}


def _text(path: Path) -> str:
    """What a table's file says: some megabytes, for which a call of a new size would wait each time.

    They are not read again while the file is the one that was read: by its times, unless these were so young then that
    a file that was written after it could have the same.
    """
    status = path.stat()
    written = status.st_mtime_ns, status.st_size, status.st_ino
    known = _known.get(path)
    if known is not None and known[0] == written:
        return known[1]
    text = path.read_text(encoding="utf-8")
    if time.time_ns() - status.st_mtime_ns > SETTLED_NS:
        _known[path] = written, text
    return text


def _entry_of(names: Iterable[str]) -> re.Pattern[str]:
    """The beginning of an entry of one of these names, behind another one."""
    return re.compile(rf"\n  (?:{'|'.join(names)}):")


_NAMES = list(Row.model_fields)
_OF_SIZES = _NAMES.index("group")  # the names before are what a family is
_IN_FAMILY, _BEHIND_FAMILY = _entry_of(_NAMES[:_OF_SIZES]), _entry_of(_NAMES[_OF_SIZES:])


class _Entries:
    """The text of each row, by what it says of its family, which is said first."""

    def __init__(self, text: str) -> None:
        """Raises ValueError for what is written otherwise, as far as that is looked at."""
        self._entries = _behind_comments(text).removeprefix("- ").removesuffix("\n").split("\n- ")
        self._numbers: dict[str, list[int]] = {}
        for number, entry in enumerate(self._entries):
            end = _BEHIND_FAMILY.search(entry)
            if end is None or _IN_FAMILY.search(entry, end.end()):
                raise ValueError(entry)
            self._numbers.setdefault(entry[: end.start()], []).append(number)
        self._rows: dict[str, list[tuple[int, Row]]] = {}
        firsts = self._made([numbers[0] for numbers in self._numbers.values()])
        self._families = {said: row.family for said, (_, row) in zip(self._numbers, firsts, strict=True)}
        self._of_family: dict[Family, list[tuple[int, Row]]] = {}

    def of_family(self, family: Family) -> list[tuple[int, Row]]:
        """As of a Table; raises ValueError for rows of this family that are none."""
        if family not in self._of_family:
            serving = [said for said, own in self._families.items() if own.serves(family)]
            for said in serving:
                if said not in self._rows:
                    self._rows[said] = self._made(self._numbers[said])
            rows = chain.from_iterable(self._rows[said] for said in serving)
            self._of_family[family] = sorted(rows, key=itemgetter(0))
        return self._of_family[family]

    def _made(self, numbers: list[int]) -> list[tuple[int, Row]]:
        rows = rows_as_written("\nrows:\n- " + "\n- ".join(self._entries[number] for number in numbers))
        return [
            (number + 1, row) for number, row in zip(numbers, Table.model_validate({"rows": rows}).rows, strict=True)
        ]


_entries = lru_cache(maxsize=2)(_Entries)  # the workspace's own, and the package's

_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|(?<![\d.])[A-Za-z][\w .()/-]*')


def _behind_comments(text: str) -> str:
    """The rows' lines of a table's text; raises ValueError where there are none behind comments."""
    head, begin, entries = text.partition("\nrows:\n")
    if not begin or any(not line.startswith("#") for line in head.splitlines()):
        raise ValueError("no rows behind comments")
    return entries


def rows_as_written(text: str) -> list[dict[str, Any]]:
    """The rows of a table in the form in which `fa3gen.records.dispatch_table` writes it, an entry a line.

    Raises ValueError for any other, which may be YAML all the same.
    """
    rows: list[dict[str, Any]] = []
    for line in _behind_comments(text).splitlines():
        if line.startswith("  - "):
            rows[-1]["measured"].append(_value(line[4:]))
            continue
        name, colon, value = line[2:].partition(":")
        if line.startswith("- "):
            rows.append({})
        elif not line.startswith("  "):
            raise ValueError(line)
        if not colon or (name := _value(name)) in rows[-1]:
            raise ValueError(line)
        rows[-1][name] = _value(value) if value else []
    return rows


@lru_cache(maxsize=4096)  # most stand there many times
def _value(text: str) -> Any:
    """What an entry says, in a form that nobody changes."""
    return json.loads(_WORD.sub(_quoted, text), object_pairs_hook=_unlike)


def _quoted(found: re.Match[str]) -> str:
    """A word in quotation marks, unless it has them or is one of JSON's."""
    word = found[0]
    return word if word.startswith('"') or word in ("true", "false") else json.dumps(word)


def _unlike(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping of names that stand there once."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _spoilt(path: Path, why: str) -> UserError:
    return UserError(f"{path} is no dispatch table ({why}); write it anew: {WRITE_TABLE}")
