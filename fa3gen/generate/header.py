"""The header docstring of a generated module, as rows of text: decisions, threads, barriers, shared memory, timeline.

Numbers come from the spec by the same arithmetic as those of the code; roles, barriers and steps are those of
`fa3gen.design.schedule`, against whose order tests hold the code.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import NamedTuple

from fa3gen.base.wording import counted, listed
from fa3gen.design import footprint, splits
from fa3gen.design.cta import Cta, cta_of
from fa3gen.design.family import Family
from fa3gen.design.masks import given_with_calls
from fa3gen.design.schedule import PLACES, Place, Role, Schedule, Step, schedule_of, specialized
from fa3gen.design.schedule.model import Kind
from fa3gen.design.tiles import operand_tiles, sequence_contiguous
from fa3gen.hardware import hopper
from fa3gen.hardware.dtypes import Dtype
from fa3gen.spec.model import (
    CausalMask,
    CpAsyncLoad,
    Forward,
    GlobalHandoff,
    MmaProduct,
    NoMask,
    PingPongSchedule,
    RegisterHandoff,
    Smem,
    SmemHandoff,
    TmaLoad,
    WgmmaProduct,
)
from fa3gen.spec.quantizing import BLOCK_ROWS

EXPORT_NAME, COMMENTED_NAME = 24, 18  # longest names that fit 120 columns with an export call, with a comment
SPEC_PATH = 38  # the longest that fits them with what to change
TRANSPOSERS = {2: "two", 4: "four"}
LINE_WIDTH = 112  # of a line of the docstring, which is indented by 4
PLACE_TITLES: dict[Place, str] = {
    "cta": "per CTA",
    "ahead": "for each stage, before the first step",
    "tile": "per tile",
    "step": "per step",
    "end": "at a tile's end",
    "exit": "at last",
    "kernel": "",
}


@dataclass(frozen=True)
class Header:
    """Lines of the module's docstring.

    Two of them hold the module's name: `long_name` and `longish_name` say whether they would pass 120 columns. So does
    `long_path` of the one with that of the spec.
    """

    title: str
    spec_path: str
    render_command: str
    formula: str
    sentence: str
    decisions: tuple[str, ...]
    threads: tuple[str, ...]
    barriers: tuple[str, ...]
    named_barriers: tuple[str, ...]
    smem: tuple[str, ...]
    timeline_title: str
    timeline: tuple[str, ...]
    long_name: bool
    longish_name: bool
    long_path: bool


class StepRow(NamedTuple):
    """A step, or a few that are explained together: where in the program, who, what, and how or why."""

    place: str
    who: str
    what: str
    note: str


@dataclass(frozen=True)
class Description:
    """What the header says, as rows of cells; the barriers' first row names the columns.

    `formula` says what is computed, `sentence` what it leaves open: of attention, which keys a query sees.
    """

    title: str
    formula: str
    sentence: str
    decisions: tuple[tuple[str, str], ...]
    threads: tuple[str, ...]
    barriers: tuple[tuple[str, ...], ...]
    named_barriers: tuple[tuple[str, ...], ...]
    steps_title: str
    steps: tuple[StepRow, ...]


def describe(spec: Forward, summary: str) -> Description:
    """Describe one module of attention in words; `summary` is that of its spec."""
    dtype = spec.element.long_name + f", K and V {spec.kv_element.long_name}" * footprint.mixed(spec)
    schedule = schedule_of(spec)
    return Description(
        title=f"{summary.rstrip('.')} (head dim {Family.of(spec).dims}, {dtype}, {mask_phrase(spec)}).",
        formula=_formula(spec),
        sentence=_mask_sentence(spec),
        decisions=tuple(_decisions(spec)),
        threads=tuple(_roles(spec, schedule) if footprint.specialized(spec) else _threads(spec)),
        barriers=tuple(rings(schedule) if footprint.specialized(spec) else barriers(schedule)),
        named_barriers=tuple(named_barriers(schedule)),
        steps_title=_steps_title(spec),
        steps=tuple(step_rows(schedule)),
    )


def make_header(described: Description, cta: Cta, *, source: PurePath, stem: str) -> Header:
    """The docstring of the module `stem`; `source` is the path of its spec file relative to the workspace."""
    return Header(
        title=described.title,
        spec_path=source.as_posix(),
        render_command=f"fa3gen render {source.as_posix()}",
        formula=described.formula,
        sentence=described.sentence,
        decisions=_columns(described.decisions),
        threads=described.threads,
        barriers=_columns(described.barriers),
        named_barriers=_columns(described.named_barriers),
        smem=_columns(_smem(cta), right_aligned=2),
        timeline_title=described.steps_title,
        timeline=timeline(described.steps),
        long_name=len(stem) > EXPORT_NAME,
        longish_name=len(stem) > COMMENTED_NAME,
        long_path=len(source.as_posix()) > SPEC_PATH,
    )


def mask_phrase(spec: Forward) -> str:
    """The mask in a few words; a window's reach stands in the constants."""
    if given_with_calls(spec.mask):
        return "any window"
    return {"none": "no mask", "causal": "causal", "window": "sliding window"}[spec.mask.kind]


def timeline(steps: Sequence[StepRow]) -> tuple[str, ...]:
    """The steps as lines of text, numbered, below the names of their places."""
    text: list[str] = []
    lines = _columns([(str(i), *step[1:]) for i, step in enumerate(steps, 1)], right_aligned=1)
    for place, group in itertools.groupby(zip(steps, lines, strict=True), key=lambda pair: pair[0].place):
        text += [f"{place}:"] * bool(place)
        text += [f"{'  ' * bool(place)}{line}" for _, line in group]
    return tuple(text)


def _columns(rows: Sequence[Sequence[str]], right_aligned: int = 0) -> tuple[str, ...]:
    """Pad cells to columns; the first `right_aligned` columns are numbers."""
    if not rows:
        return ()
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return tuple(
        "  ".join(
            cell.rjust(width) if i < right_aligned else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _formula(spec: Forward) -> str:
    product, out, factors = "scale Q K^T", "P V", footprint.eight_bit_cache(spec) or footprint.eight_bits(spec)
    if footprint.eight_bit_cache(spec):
        product, out = "scale Q k_descale K^T", "P v_descale V"
    elif footprint.eight_bits(spec):
        product, out = "scale q_descale k_descale Q K^T", "v_descale P V"
    scores = f"softcap tanh({product} / softcap)" if spec.softmax.softcap else product
    if spec.softmax.sink and spec.softmax.softcap and factors:  # else it would not fit a line
        return f"S = {scores}    P = softmax(S, sink)    O = {out}"
    if spec.softmax.sink:
        return f"S = {scores}    LSE = log(exp(sink) + sum(exp(S)))    P = exp(S - LSE)    O = {out}"
    lse = "    LSE = log(sum(exp(S)))" if spec.outputs.lse else ""
    return f"S = {scores}    P = softmax(S)    O = {out}{lse}"


def _mask_sentence(spec: Forward) -> str:
    of_sequence = " of its sequence" if footprint.packed_sequences(spec) else ""
    if isinstance(spec.mask, NoMask):
        return f"Every query sees every key{of_sequence}."
    if isinstance(spec.mask, CausalMask):
        end = "at the last query and key of each sequence" if of_sequence else "in the bottom right corner"
        return f"Causal: query i sees keys j <= i + seq_k - seq_q; the diagonal ends {end}."
    if spec.mask.given:
        return "Window (left, right) of each call: query i sees keys j with -left <= j - (i + seq_k - seq_q) <= right."
    return (
        f"Sliding window: query i sees keys j with -{spec.mask.left} <= j - (i + seq_k - seq_q) <= {spec.mask.right}."
    )


def _decisions(spec: Forward) -> list[tuple[str, str]]:
    if isinstance(spec.handoff, GlobalHandoff):
        return [
            ("tile", "none: one thread computes one score, one warp one row, one thread one element of O"),
            ("S, P", "materialised in global memory as f32, (batch, heads_q, seq_q, seq_k)"),
            ("products", "scalar f32 multiply-adds, operands straight from global memory"),
        ]
    rows = [("tile", _tile_sentence(spec)), ("loads", _load_sentence(spec))]
    if footprint.packed_sequences(spec):
        rows.append(("sequences", "packed, lengths on the device; tensor maps of rank 5 clip at the end of each"))
    if footprint.paged(spec):
        rows.append(("pages", _pages_sentence(spec)))
    if footprint.specialized(spec):
        rows.append(("schedule", _schedule_sentence(spec)))
    assert spec.smem is not None
    rows.append(("layouts", _layout_sentence(spec, spec.smem)))
    if footprint.eight_bit_cache(spec):
        rows.append(("8 bits", _stored_sentence(spec)))
    keys = footprint.of_each_warp(spec) if footprint.by_warps(spec) else spec.tile.kv
    rows.append(("S = Q K^T", _product_sentence(spec.qk, spec.element, keys, spec.problem.head_dim, "Q", "K")))
    if spec.softmax.softcap:
        rows.append(
            (
                "cap",
                "S becomes tanh(scale S / softcap) by tanh.approx, before any mask; the softmax's factor is softcap",
            )
        )
    if footprint.block_scales(spec):
        rows.append(("scales", f"of {BLOCK_ROWS} rows of a head of Q, and of K: a step has one; maxima are scaled"))
        rows.append(("", f"of {BLOCK_ROWS} rows of V: O is in units of that of the last step, or of one near to it"))
    rows.append(("softmax", _softmax_sentence(spec)))
    if spec.softmax.sink:
        rows.append(("sink", "a logit of each query head, added to a row's sum once, after its last key; -inf: none"))
    rows.append(("P", _handoff_sentence(spec)))
    v = "V^T" if footprint.transposes(spec) else "V"
    columns, stripes = footprint.promoted_columns(spec), footprint.stripes(spec)
    times = f"{stripes} times " * (stripes > 1)
    rows.append(("O = P V", times + _product_sentence(spec.pv, spec.element, columns, keys, "P", v)))
    if footprint.eight_bits(spec):
        rows.append(("sums", _sums_sentence(spec)))
    rows.append(("kv order", _order_sentence(spec)))
    rows.append(("output", _output_sentence(spec)))
    if footprint.persistent(spec) or spec.scheduler == "grid":
        rows.append(("q order", _tiles_sentence(spec)))
    return rows


def _tile_sentence(spec: Forward) -> str:
    q, pack = spec.tile.q, spec.tile.pack_heads
    most = "up to " * (spec.tile.group != "multiple")
    if spec.tile.group == "fitted":
        return (
            f"{q} query rows, positions of all, or of a part, of up to {pack} heads that share K and V, "
            f"x {spec.tile.kv} keys per step"
        )
    rows = f", {counted(q // pack, 'position')} of {most}{pack} heads that share K and V," if pack > 1 else ""
    return f"{q} query rows{rows} x {spec.tile.kv} keys per step"


def _load_sentence(spec: Forward) -> str:
    if isinstance(spec.load, CpAsyncLoad):
        return f"cp.async, 16 bytes each; Q once, K and V in a ring of {stages(spec.load.kv_stages)}"
    if isinstance(spec.load, TmaLoad):
        barrier = "one full barrier counts both" if spec.load.barrier == "shared" else "a full barrier each"
        q = "Q once" if spec.load.q_stages == 1 else f"Q in {spec.load.q_stages} buffers"
        if footprint.transposes(spec) and footprint.gathered(spec):
            rings = f"K and V in rings of {stages(spec.load.kv_stages)}"
            return f"TMA for {q}; cp.async for {rings}; threads fill one of V transposed, V^T"
        if footprint.transposes(spec):
            return f"TMA; {q}, K and V in rings of {stages(spec.load.kv_stages)}; threads fill one of V transposed, V^T"
        if footprint.gathered(spec) and footprint.converts(spec):
            made = f"what is made of them in rings of {spec.load.kv_stages}"
            return f"TMA for {q}; cp.async for K and V in rings of {stages(spec.kv.stages)}, {made}"
        if footprint.gathered(spec):
            return f"TMA for {q}; cp.async for K and V in rings of {stages(spec.load.kv_stages)}, {barrier}"
        if footprint.converts(spec):
            made = f"those made of them in rings of {stages(spec.load.kv_stages)}"
            return f"TMA; {q}, K and V in rings of {stages(spec.kv.stages)}, {made}"
        return f"TMA; {q}, K and V in rings of {stages(spec.load.kv_stages)}, {barrier}"
    return "16-byte loads through registers; K and V take turns in one buffer"


def _stored_sentence(spec: Forward) -> str:
    element = spec.kv_element.long_name
    return f"K and V are {element} in memory and {spec.element.long_name}, exactly, in both products; factors outside"


def _pages_sentence(spec: Forward) -> str:
    if footprint.gathered(spec):
        return "of any size, found in a table; lanes of a warp find a row of keys each, and four copy it"
    rows = footprint.page_rows(spec)
    finder = "each lane of a warp finds one"
    if footprint.boxes_alike(spec):
        finder = "all lanes of a warp find all"
    elif footprint.many_boxes(spec):
        finder = "lanes of a warp find those of several tiles"
    return f"of a multiple of {rows} keys, found in a table; boxes of {rows} keys, {finder}"


def _schedule_sentence(spec: Forward) -> str:
    turns = " in turn" if isinstance(spec.schedule, PingPongSchedule) else ""
    beside = "; S of the next tile and P V run beside the softmax" if footprint.overlapped(spec) else ""
    multiply = "multiplies" if spec.tile.warpgroups == 1 else "multiply"
    if footprint.transposes(spec):
        beside = beside.replace("; S of the next tile and P V run", "; products run")
    if footprint.stripes(spec) > 1:
        beside = "; P V runs beside promotions"
    prepare = f"{TRANSPOSERS[spec.tile.transposers]} transpose V, " * footprint.transposes(spec)
    prepare += f"{2 * footprint.converting_warps(spec)} convert, " * footprint.converts(spec)
    load = "a warp loads" if footprint.loads_together(spec) else "two warps load"
    if footprint.by_warps(spec):
        keys = footprint.of_each_warp(spec)
        return f"{load}, 4 multiply, each its own {keys} keys of a step; what they have is merged for each tile"
    return f"{load}, {prepare}{warpgroups(spec.tile.warpgroups or 0)} {multiply}{turns}{beside}"


def warpgroups(count: int) -> str:
    """`1 warpgroup`, `2 warpgroups`."""
    return "1 warpgroup" if count == 1 else f"{count} warpgroups"


def stages(count: int) -> str:
    """`1 stage`, `2 stages`."""
    return "1 stage" if count == 1 else f"{count} stages"


def _layout_sentence(spec: Forward, smem: Smem) -> str:
    p = f", P {spec.handoff.swizzle}" if isinstance(spec.handoff, SmemHandoff) else ""
    names = sequence_contiguous(spec)
    contiguous = f"; of {listed(names)} the sequence is contiguous" if names else ""
    contiguous += ", its keys permuted" * footprint.permuted_keys(spec)
    rows = [tile.letter for tile in operand_tiles(spec).values() if tile.plain]
    plain = f"; rows of {listed(rows)} lie one below the other" if rows else ""
    vt = f", V^T {smem.vt}" if smem.vt is not None else ""
    return f"swizzle Q {smem.q}, K {smem.k}, V {smem.v}{vt}{p}{contiguous}{plain}"


def _product_sentence(product: object, element: Dtype, n: int, k: int, a: str, b: str) -> str:
    if isinstance(product, MmaProduct):
        count = n // hopper.MMA_N * (k // hopper.MMA_K)
        return f"{count} mma.sync m16n8k16 per warp, of {n if b == 'K' else k} keys; {a} and {b} from its registers"
    if not isinstance(product, WgmmaProduct):
        return f"scalar f32 multiply-adds, {a} and {b} read from shared memory"
    steps = k // element.wgmma_k
    source = "registers" if product.a.source == "registers" else "shared memory"
    return (
        f"{steps} wgmma m64n{n}k{element.wgmma_k} per warpgroup; "
        f"A = {a} from {source}, {product.a.major.upper()}-major; B = {b}, {product.b.major.upper()}-major"
    )


def _softmax_sentence(spec: Forward) -> str:
    where = "on the accumulator fragment" if isinstance(spec.pv, WgmmaProduct | MmaProduct) else "on S in shared memory"
    if spec.softmax.row_max == "first":
        return f"base 2, {where}, relative to a first maximum; O is never rescaled"
    above = spec.softmax.rescale_above
    when = "in every step"
    if above is not None:
        # The largest P of a row is then no longer exactly 1, and its rounding counts most (docs/performance.md).
        when = f"at 2^{above} x the maximum: up to 12 % more error"
    if spec.softmax.restart_every is not None:
        return f"online, base 2, {where}; begins anew every {spec.softmax.restart_every} keys"
    if footprint.eight_bits(spec):
        return f"online, base 2, {where}, P times 2^{footprint.P_EXPONENT}; O is rescaled {when}"
    return f"online, base 2, {where}; O is rescaled {when}"


def _handoff_sentence(spec: Forward) -> str:
    if footprint.transposes(spec):
        return "stays in registers: in V^T keys stand in the order in which a thread has them as accumulator"
    if footprint.permuted_keys(spec):
        return "stays in registers: v is given with its keys in the order in which a thread has them as accumulator"
    if footprint.eight_bits(spec):
        return "stays in registers; four threads exchange keys by two shuffles for every 16, in V's order"
    if isinstance(spec.handoff, RegisterHandoff):
        return "stays in registers: the accumulator fragment is read as the A fragment"
    if isinstance(spec.handoff, SmemHandoff):
        transposed = isinstance(spec.pv, WgmmaProduct) and spec.pv.a.major == "mn"
        return f"rounded to 16 bits, stmatrix to shared memory{', transposed on the way' * transposed}"
    if isinstance(spec.qk, WgmmaProduct):
        return "S is scattered from the accumulator to shared memory as f32 and becomes P there"
    return "S is written to shared memory as f32 and becomes P there"


def _sums_sentence(spec: Forward) -> str:
    """How O is summed: products of 8 bits keep few bits below the largest addend."""
    if footprint.stripes(spec) > 1:
        columns = footprint.promoted_columns(spec)
        return f"the tensor core sums P V of a tile of keys, {columns} columns at a time; threads add these in float32"
    if (every := footprint.promote_every(spec)) > 1:
        return f"the tensor core sums P V of {every} tiles of keys, threads add these in float32 or rescale them"
    if footprint.two_levels(spec):
        return "the tensor core sums P V of a tile of keys, threads add these in float32, where O is rescaled anyway"
    return "of all keys in the tensor core, with 13 bits below the largest addend: errors grow with the keys"


def _order_sentence(spec: Forward) -> str:
    if spec.split is not None:
        if splits.whole_parts(spec):
            return (
                f"in parts of {spec.split.keys} keys, each CTA has as many; of a part from the last tile to the first"
            )
        if splits.counts_seen(spec):
            return "in about equal shares of all tiles of keys that rows see; of each part from the last to the first"
        if spec.scheduler == "even":
            return "in equal shares of all tiles of keys of all sequences; of each part from the last one to the first"
        parts = f"of {spec.split.keys} keys" if spec.split.keys else "as many as the GPU has room for at once"
        return f"in parts, {parts}, from the last tile of each to the first"
    if spec.softmax.restart_every is not None:
        return f"in parts of {spec.softmax.restart_every} keys, from the last to the first; a CTA adds up its rows' O"
    if isinstance(spec.mask, NoMask):
        return "from the last tile, which the end of the keys may cut, to the first"
    return "from the last visible tile to the first; hidden tiles are skipped, only boundary tiles are masked"


def _output_sentence(spec: Forward) -> str:
    if splits.whole_parts(spec):
        return "of a part O in float32, not divided, its maxima and sums; a second kernel adds parts up, by rows"
    if spec.scheduler == "even":
        return "of a whole tile O and LSE from registers; of a part in float32, and a second kernel adds these up"
    if spec.split is not None:
        return "of one part O and LSE from registers; of several in float32, and a second kernel adds them up"
    lse = "; LSE when asked for" if spec.outputs.lse else ""
    if spec.outputs.o == "own_buffer":
        return f"each warp gathers its rows of O in shared memory and has TMA write them{lse}"
    if isinstance(spec.pv, WgmmaProduct) and spec.outputs.o == "over_q":
        return f"O is gathered in shared memory, over Q, and written by TMA{lse}"
    if spec.outputs.o == "direct" and spec.o_dtype == "fp32":
        return f"O goes from registers to global memory in float32, 8 bytes at a time{lse}"
    if spec.outputs.o == "direct":
        return f"O goes from registers to global memory, 16 bytes at a time{lse}"
    return f"O goes from registers to global memory{lse}"


def _ctas(spec: Forward) -> str:
    count = spec.tile.ctas_per_sm
    return "a CTA per SM" if count == 1 else f"{count} CTAs per SM"


def _tiles_sentence(spec: Forward) -> str:
    """Which tiles of queries a CTA takes."""
    if spec.scheduler == "grid":
        order = ", all heads' last rows first" if isinstance(spec.mask, CausalMask) else ""
        shared = f"; {spec.tile.ctas_per_sm} share an SM" if spec.tile.ctas_per_sm > 1 else ""
        if spec.split is not None:
            return f"a CTA per tile and part of the keys, placed by the grid{shared}"
        return f"a CTA per tile, placed by the grid{order}{shared}"
    if spec.scheduler == "dynamic":
        if footprint.packed_sequences(spec):
            drawn = {"by_head": " from a counter, head after head", "woven": ", a prompt's between steps'"}
            order = drawn.get(spec.order, " from a counter")
            return f"{_ctas(spec)}; each draws its next tile{order}, and a warp looks where that lies"
        return f"{_ctas(spec)}; each draws its next tile from a counter: longest first, a few heads at a time"
    if splits.whole_parts(spec):
        return f"{_ctas(spec)}; each has its share of all parts, of one tile of queries after the other"
    if spec.scheduler == "even":
        return f"{_ctas(spec)}; each has those of its share, of which the first and the last may be parts"
    if footprint.shares_packed(spec):
        return f"{_ctas(spec)}; each draws its next tile, or share of the last wave (Stream-K), which a warp looks for"
    if spec.scheduler == "stream_k":
        return "a CTA per SM; tiles are dealt out in turn, the last wave in equal shares of tiles of keys (Stream-K)"
    return "a CTA per SM; tiles are dealt out in turn, those of a head next to each other"


def _threads(spec: Forward) -> list[str]:
    count = footprint.threads(spec)
    held = footprint.registers_per_thread(spec)
    parts = ", ".join(f"{what} {n}" for what, n in held)
    registers = textwrap.wrap(
        f"about {sum(n for _, n in held)} registers each: {parts}", width=LINE_WIDTH, subsequent_indent="    "
    )
    if isinstance(spec.handoff, GlobalHandoff):
        return [f"{count} threads per CTA in each kernel"]
    warps = count // hopper.WARP
    if isinstance(spec.pv, WgmmaProduct):
        groups = spec.tile.warpgroups or 0
        who = "1 warpgroup owns the 64 query rows" if groups == 1 else f"{groups} warpgroups own 64 query rows each"
    elif isinstance(spec.qk, WgmmaProduct):
        who = "1 warpgroup issues S = Q K^T; each warp owns 16 query rows"
    else:
        who = f"each warp owns {spec.tile.q // warps} query rows; half a warp shares a row"
    loads = ["warp 0 issues the TMA copies, too"] if isinstance(spec.load, TmaLoad) else []
    return [f"{count} threads, {warps} warps: {who}", *loads, *registers]


def _roles(spec: Forward, schedule: Schedule) -> list[str]:
    # With scheduler grid a warp of a consumer loads, before it is one.
    first = [f"{role.label} {role.duty}" for role in schedule.roles if role.name == specialized.FIRST]
    owned = [f"{spec.tile.q} query rows, {footprint.of_each_warp(spec)} keys of a step each warp", *first]
    if not footprint.by_warps(spec):
        owned = ["64 query rows each", *first]
    prepared = 0, 0
    if footprint.transposing_warpgroups(spec):
        prepared = 1, footprint.transposer_registers(spec)
    elif count := footprint.converting_warpgroups(spec):
        prepared = count, footprint.converter_registers(spec)
    return roles(schedule, cta_of(spec), footprint.register_budget(spec), owned, preparing=prepared)


def roles(
    schedule: Schedule, cta: Cta, budget: tuple[int, int], owned: Sequence[str], *, preparing: tuple[int, int] = (0, 0)
) -> list[str]:
    """Who does what in a specialised kernel, and the registers that setmaxnreg gives to each.

    `budget`: registers of a thread of the producer and of a consumer, `preparing` how many warpgroups convert K
    and V, or transpose V, and what a thread of these has: none where two warps of the producer transpose V, whose duty
    then stands beside the producer's; `owned`: what a consumer has.
    """
    groups, (producer, consumer) = cta.threads // hopper.WARPGROUP, budget
    prepared, each = preparing
    consumers = groups - 1 - prepared
    parts = ", ".join(f"{what} {n}" for what, n in cta.held)
    launched, kept = cta.registers, producer + prepared * each + consumers * consumer
    sums = f"{producer} + {f'{prepared} x {each} + ' * bool(prepared)}{consumers} x {consumer} = {kept}"
    pool = f"{groups} x {launched} = {groups * launched}"
    duties = [f"{role.label} {role.duty}" for role in schedule.roles if role.warps == 1]
    duties = [duty for duty in duties if duty not in owned]
    names = {specialized.K_CONVERTERS: "converters", specialized.V_CONVERTERS: "converters"}
    names[specialized.TRANSPOSERS] = "transposers"
    working = [role for role in schedule.roles if role.name in names]
    duty = ", ".join(f"{role.label} {role.duty}" for role in working)
    name = names[working[0].name] if working else ""
    beside = f", {duty}" * bool(working and not prepared)
    return [
        *textwrap.wrap(
            f"{cta.threads} threads, {cta.threads // hopper.WARP} warps, launched with {launched} registers each; "
            f"setmaxnreg moves them: {sums} of {pool}",
            width=LINE_WIDTH + 4,
            subsequent_indent="    ",
        ),
        *textwrap.wrap(
            f"producer: 1 warpgroup, {producer} registers; {', '.join(duties)} (TMA){beside}",
            width=LINE_WIDTH + 4,
            subsequent_indent="    ",
        ),
        *[f"{name}: {warpgroups(prepared)}, {each} registers; {duty}"] * bool(prepared),
        "; ".join([f"consumers: {warpgroups(consumers)}, {consumer} registers", *owned]),
        f"    about {sum(n for _, n in cta.held)} registers each: {parts}",
    ]


def barriers(schedule: Schedule) -> list[tuple[str, ...]]:
    """The mbarriers of a cooperative kernel, where warp 0 loads for all."""
    rows: list[tuple[str, ...]] = [("name", "stages", "producer -> consumer", "a phase completes with")]
    for ring in schedule.rings:
        warps = schedule.role(ring.consumers[0]).warps
        stages, readers = str(ring.stages), f"{warps} warps" if warps > 1 else "1 warp"
        if ring.full_bytes:
            parts = ", ".join(f"{what} {size}" for what, size in zip(ring.holds, ring.sizes, strict=True))
            announced = f"{ring.full_bytes} bytes{f', {parts}' * (len(ring.holds) > 1)}"
            rows.append((f"{ring.name}_full", stages, f"{ring.filled_by} -> {readers}", announced))
        if ring.empty_arrivals:
            rows.append((f"{ring.name}_empty", stages, f"{readers} -> warp 0", f"{ring.empty_arrivals} arrivals"))
    return rows if len(rows) > 1 else []


def rings(schedule: Schedule) -> list[tuple[str, ...]]:
    """The rings of a specialised kernel: Q is one like K and V."""
    rows: list[tuple[str, ...]] = [("ring", "stages", "producer -> consumers", "full with", "empty with")]
    for ring in schedule.rings:
        producer, readers = schedule.role(ring.producer).label, sum(schedule.role(who).warps for who in ring.consumers)
        filler = f"TMA, from {producer}" if ring.filled_by == "TMA" else producer
        full = f"{ring.full_bytes} bytes" if ring.full_bytes else _arrivals(ring.full_arrivals)
        edge = f"{filler} -> {readers} warps"
        unsaid = "no reuse" if ring.producer == specialized.FIRST else "the last K"
        empty = _arrivals(ring.empty_arrivals) if ring.empty_arrivals else unsaid
        rows.append((ring.name, str(ring.stages), edge, full, empty))
    return rows


def _arrivals(count: int) -> str:
    return "1 arrival" if count == 1 else f"{count} arrivals"


def named_barriers(schedule: Schedule) -> list[tuple[str, ...]]:
    """The named barriers, whose number 0 is that of __syncthreads."""
    rows: list[tuple[str, ...]] = [("number", "name", "threads", "who -> whom, and what for")]
    for barrier in schedule.named_barriers:
        last = barrier.first + barrier.count - 1
        numbers = str(barrier.first) if barrier.count == 1 else f"{barrier.first} to {last}"
        rows.append((numbers, barrier.name, str(barrier.threads), barrier.note))
    return rows if len(rows) > 1 else []


def _smem(cta: Cta) -> list[tuple[str, ...]]:
    if not cta.regions:
        return []
    rows: list[tuple[str, ...]] = [("offset", "bytes", "what", "")]
    for offset, region in cta.placed():
        rows.append((str(offset), str(region.bytes), region.name, f"{region.formula}: {region.what}".rstrip(": ")))
    rows.append(("", str(cta.smem_bytes), "total", f"of {hopper.SMEM_PER_CTA} per CTA"))
    return rows


def _steps_title(spec: Forward) -> str:
    if isinstance(spec.handoff, GlobalHandoff):
        return "The three kernels"
    return "Timeline: a tile is one of queries, a step takes one tile of keys"


def step_rows(schedule: Schedule) -> Iterator[StepRow]:
    """The steps, place by place and role by role; what all roles do alike stands where the last of them does it."""
    for place in PLACES:
        of_roles = [tuple(_rows(schedule, place, role)) for role in schedule.roles]
        done = [{row[2:] for row in rows} for rows in of_roles]
        alike = set.intersection(*done) if len(done) > 1 else set()
        yield from (row for rows in of_roles[:-1] for row in rows if row[2:] not in alike)
        yield from (row._replace(who="all") if row[2:] in alike else row for row in of_roles[-1])


def _rows(schedule: Schedule, place: Place, role: Role) -> Iterator[StepRow]:
    """What a role does in one place; steps without words of their own share a row with the one that follows."""
    unsaid: list[str] = []
    for step in schedule.of(role.name, place):
        unsaid.append(_name(step))
        if step.note or step.kind == "kernel":
            yield StepRow(PLACE_TITLES[place], _who(role, step), ", ".join(unsaid), step.note)
            unsaid = []


def _who(role: Role, step: Step) -> str:
    """The role, or the part of it that takes the step."""
    last = role.warps * hopper.WARP // hopper.WARPGROUP - 1
    return {"": role.label, "first_warp": "warp 0", "first": "consumer 0", "last": f"consumer {last}"}[step.only]


def _name(step: Step) -> str:
    """A step in a word or two, mostly as the code has it."""
    names: dict[Kind, str] = {
        "announce": f"announce {step.what}'s bytes",
        "wait_empty": f"wait {step.on}_empty",
        "wait_read": f"wait {step.on} read",
        "load": f"load {step.what}",
        "fill": f"arrive {step.on}_full",
        "wait_full": f"wait {step.on}_full",
        "release": f"arrive {step.on}_empty",
        "commit": "commit",
        "wait_copies": "wait copies",
        "sync": step.on,
        "wait_turn": "wait turn",
        "pass_turn": "pass turn",
        "drop": f"drop {step.on}",
        "skip_turns": "skip turns",
        "product": {"S": "S = Q K^T", "O": "O += P V", "D": "D += A B"}.get(step.what, ""),
        "wait_products": f"wait_group {step.in_flight}",
        "transpose": f"transpose {step.what}",
        "promote": "promote",
        "convert": "convert",
        "cap": "cap S",
        "mask": "mask",
        "softmax": "softmax",
        "rescale": "rescale",
        "round": f"round {step.what or 'P'}",
        "rotate": f"rotate {step.what}",
        "find_scale": f"find {step.what}",
        "read": f"read {step.what}",
        "read_scale": "read a factor",
        "read_sink": "read sinks",
        "add_c": "add C",
        "add_step": "add the step",
        "gather": f"gather {step.what}",
        "store": f"store {step.what}",
        "wait_stores": "wait stores",
        "draw": "draw",
        "next": "next tile",
        "give_part": "give O",
        "add_part": "add O",
        "kernel": step.what,
    }
    return names[step.kind]
