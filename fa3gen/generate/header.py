"""The header docstring of a generated module, as rows of text: decisions, threads, barriers, shared memory, timeline.

Everything here is derived from the spec by the same arithmetic as the code below it, so that it cannot drift.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from fa3gen.design import footprint
from fa3gen.design.footprint import Region
from fa3gen.hardware import hopper
from fa3gen.spec.model import (
    CausalMask,
    CpAsyncLoad,
    GlobalHandoff,
    NoMask,
    PingPongSchedule,
    RegisterHandoff,
    SmemHandoff,
    Spec,
    TmaLoad,
    WgmmaProduct,
)

LINE_WIDTH = 112  # of a line of the docstring, which is indented by 4


@dataclass(frozen=True)
class Header:
    """Lines of the module's docstring."""

    title: str
    spec_path: str
    render_command: str
    mask: str
    decisions: tuple[str, ...]
    threads: tuple[str, ...]
    barriers: tuple[str, ...]
    named_barriers: tuple[str, ...]
    smem: tuple[str, ...]
    timeline_title: str
    timeline: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """What the header says, as rows of cells; the barriers' first row names the columns.

    A step is what happens, and how or by what; in a specialised kernel who does it comes first.
    """

    title: str
    mask: str
    decisions: tuple[tuple[str, str], ...]
    threads: tuple[str, ...]
    barriers: tuple[tuple[str, ...], ...]
    named_barriers: tuple[tuple[str, ...], ...]
    steps_title: str
    steps: tuple[tuple[str, ...], ...]


def describe(spec: Spec, summary: str) -> Description:
    """Describe one module in words; `summary` is that of its spec."""
    dtype = spec.element.long_name
    mask = {"none": "no mask", "causal": "causal", "window": "sliding window"}[spec.mask.kind]
    naive = isinstance(spec.handoff, GlobalHandoff)
    return Description(
        title=f"{summary.rstrip('.')}: {_head_dims(spec)}, {dtype}, {mask}.",
        mask=_mask_sentence(spec),
        decisions=tuple(_decisions(spec)),
        threads=tuple(_roles(spec) if footprint.specialized(spec) else _threads(spec)),
        barriers=tuple(_barriers(spec)),
        named_barriers=tuple(_named_barriers(spec)),
        steps_title="The three kernels" if naive else "Steady state, one tile of keys",
        steps=tuple(_steps(spec)),
    )


def make_header(spec: Spec, *, summary: str, source: PurePath) -> Header:
    """Describe one module; `source` is the path of its spec file relative to the workspace."""
    described = describe(spec, summary)
    return Header(
        title=described.title,
        spec_path=source.as_posix(),
        render_command=f"fa3gen render {source.as_posix()}",
        mask=described.mask,
        decisions=_columns(described.decisions),
        threads=described.threads,
        barriers=_columns(described.barriers),
        named_barriers=_columns(described.named_barriers),
        smem=_columns(_smem(spec), right_aligned=2),
        timeline_title=described.steps_title,
        timeline=_columns(_numbered(described.steps)),
    )


def _head_dims(spec: Spec) -> str:
    d, v_dim = spec.problem.head_dim, spec.problem.v_dim
    return f"head dim {d}" if d == v_dim else f"head dim {d}/{v_dim}"


def _steps(spec: Spec) -> list[tuple[str, ...]]:
    """What happens, in order: what, and how or by what; in a specialised kernel who does it comes first."""
    if isinstance(spec.handoff, GlobalHandoff):
        return _naive_timeline(spec)
    if footprint.persistent(spec):
        return [*_producers_timeline(), *_consumer_timeline(spec)]
    return [*_producer_timeline(), *_consumer_timeline(spec)] if footprint.specialized(spec) else _timeline(spec)


def _numbered(steps: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [(str(i), *step) for i, step in enumerate(steps, 1)]


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


def _mask_sentence(spec: Spec) -> str:
    if isinstance(spec.mask, NoMask):
        return "Every query sees every key."
    if isinstance(spec.mask, CausalMask):
        return "Causal: query i sees keys j <= i + seq_k - seq_q; the diagonal ends in the bottom right corner."
    return (
        f"Sliding window: query i sees keys j with -{spec.mask.left} <= j - (i + seq_k - seq_q) <= {spec.mask.right}."
    )


def _decisions(spec: Spec) -> list[tuple[str, str]]:
    if isinstance(spec.handoff, GlobalHandoff):
        return [
            ("tile", "none: one thread computes one score, one warp one row, one thread one element of O"),
            ("S, P", "materialised in global memory as f32, (batch, heads_q, seq_q, seq_k)"),
            ("products", "scalar f32 multiply-adds, operands straight from global memory"),
        ]
    rows = [("tile", _tile_sentence(spec)), ("loads", _load_sentence(spec))]
    if footprint.specialized(spec):
        rows.append(("schedule", _schedule_sentence(spec)))
    assert spec.smem is not None
    rows.append(("layouts", f"swizzle Q {spec.smem.q}, K {spec.smem.k}, V {spec.smem.v}{_p_swizzle(spec)}"))
    rows.append(("S = Q K^T", _product_sentence(spec.qk, spec.tile.kv, spec.problem.head_dim, "Q", "K")))
    rows.append(("softmax", _softmax_sentence(spec)))
    rows.append(("P", _handoff_sentence(spec)))
    rows.append(("O = P V", _product_sentence(spec.pv, spec.problem.v_dim, spec.tile.kv, "P", "V")))
    rows.append(("kv order", _order_sentence(spec)))
    rows.append(("output", _output_sentence(spec)))
    if footprint.persistent(spec):
        rows.append(("q order", _tiles_sentence(spec)))
    return rows


def _tile_sentence(spec: Spec) -> str:
    q, pack = spec.tile.q, spec.tile.pack_heads
    rows = f", {q // pack} positions of {pack} heads that share K and V," if pack > 1 else ""
    return f"{q} query rows{rows} x {spec.tile.kv} keys per step"


def _load_sentence(spec: Spec) -> str:
    if isinstance(spec.load, CpAsyncLoad):
        return f"cp.async, 16 bytes each; Q once, K and V in a ring of {_stages(spec.load.kv_stages)}"
    if isinstance(spec.load, TmaLoad):
        barrier = "one full barrier counts both" if spec.load.barrier == "shared" else "a full barrier each"
        q = "Q once" if spec.load.q_stages == 1 else f"Q in {spec.load.q_stages} buffers"
        return f"TMA; {q}, K and V in rings of {_stages(spec.load.kv_stages)}, {barrier}"
    return "16-byte loads through registers; K and V take turns in one buffer"


def _schedule_sentence(spec: Spec) -> str:
    turns = " in turn" if isinstance(spec.schedule, PingPongSchedule) else ""
    beside = "; S of the next tile and P V run beside the softmax" if footprint.overlapped(spec) else ""
    loads = "two warps load" if footprint.persistent(spec) else "one warp loads"
    multiply = "multiplies" if spec.tile.warpgroups == 1 else "multiply"
    return f"{loads}, {_warpgroups(spec.tile.warpgroups or 0)} {multiply}{turns}{beside}"


def _warpgroups(count: int) -> str:
    return "1 warpgroup" if count == 1 else f"{count} warpgroups"


def _stages(count: int) -> str:
    return "1 stage" if count == 1 else f"{count} stages"


def _p_swizzle(spec: Spec) -> str:
    return f", P {spec.handoff.swizzle}" if isinstance(spec.handoff, SmemHandoff) else ""


def _product_sentence(product: object, n: int, k: int, a: str, b: str) -> str:
    if not isinstance(product, WgmmaProduct):
        return f"scalar f32 multiply-adds, {a} and {b} read from shared memory"
    steps = k // hopper.WGMMA_K_16BIT
    source = "registers" if product.a.source == "registers" else "shared memory"
    return (
        f"{steps} wgmma m64n{n}k16 per warpgroup; A = {a} from {source}, {product.a.major.upper()}-major; "
        f"B = {b}, {product.b.major.upper()}-major"
    )


def _softmax_sentence(spec: Spec) -> str:
    where = "on the accumulator fragment" if isinstance(spec.pv, WgmmaProduct) else "on S in shared memory"
    above = spec.softmax.rescale_above
    when = "in every step" if above is None else f"when a maximum has grown by more than 2^{above}"
    return f"online, base 2, {where}; O is rescaled {when}"


def _handoff_sentence(spec: Spec) -> str:
    if isinstance(spec.handoff, RegisterHandoff):
        return "stays in registers: the accumulator fragment is read as the A fragment"
    if isinstance(spec.handoff, SmemHandoff):
        return "rounded to 16 bits, stmatrix to shared memory"
    if isinstance(spec.qk, WgmmaProduct):
        return "S is scattered from the accumulator to shared memory as f32 and becomes P there"
    return "S is written to shared memory as f32 and becomes P there"


def _order_sentence(spec: Spec) -> str:
    if isinstance(spec.mask, NoMask):
        return "from the last tile, which the end of the keys may cut, to the first"
    return "from the last visible tile to the first; hidden tiles are skipped, only boundary tiles are masked"


def _output_sentence(spec: Spec) -> str:
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


def _tiles_sentence(spec: Spec) -> str:
    """Which tiles of queries a CTA takes."""
    if spec.scheduler == "dynamic":
        return "a CTA per SM; each draws its next tile from a counter: longest first, a few heads at a time"
    if spec.scheduler == "stream_k":
        return "a CTA per SM; tiles are dealt out in turn, the last wave in equal shares of tiles of keys (Stream-K)"
    return "a CTA per SM; tiles are dealt out in turn, those of a head next to each other"


def _threads(spec: Spec) -> list[str]:
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


def _roles(spec: Spec) -> list[str]:
    """Who does what in a specialised kernel, and the registers that setmaxnreg gives to each."""
    count, consumers = footprint.threads(spec), spec.tile.warpgroups or 0
    producer_registers, consumer_registers = footprint.REGISTER_BUDGETS[consumers]
    launched = footprint.launch_registers(spec)
    held = footprint.registers_per_thread(spec)
    parts = ", ".join(f"{what} {n}" for what, n in held)
    warps, kept = count // hopper.WARP, producer_registers + consumers * consumer_registers
    sums = f"{producer_registers} + {consumers} x {consumer_registers} = {kept}"
    pool = f"{consumers + 1} x {launched} = {(consumers + 1) * launched}"
    return [
        f"{count} threads, {warps} warps, launched with {launched} registers each; setmaxnreg moves them: "
        f"{sums} of {pool}",
        f"producer: 1 warpgroup, {producer_registers} registers; {_producer_duties(spec)}",
        f"consumers: {_warpgroups(consumers)}, {consumer_registers} registers; 64 query rows each",
        f"    about {sum(n for _, n in held)} registers each: {parts}",
    ]


def _producer(spec: Spec) -> str:
    """The warp that issues the copies of K and V."""
    return f"warp {footprint.computing_threads(spec) // hopper.WARP if footprint.specialized(spec) else 0}"


def _producer_duties(spec: Spec) -> str:
    if not footprint.persistent(spec):
        return f"{_producer(spec)}, its first, issues the TMA copies"
    draws = "draws the tiles and " if spec.scheduler == "dynamic" else ""
    first = footprint.computing_threads(spec) // hopper.WARP
    return f"warp {first} {draws}copies Q and K, warp {first + 1} copies V (TMA)"


def _barriers(spec: Spec) -> list[tuple[str, ...]]:
    if not isinstance(spec.load, TmaLoad):
        return []
    warps, stages = footprint.computing_threads(spec) // hopper.WARP, str(spec.load.kv_stages)
    row, v_row = (d * hopper.BYTES_16BIT for d in (spec.problem.head_dim, spec.problem.v_dim))
    q, k, v = spec.tile.q * row, spec.tile.kv * row, spec.tile.kv * v_row
    tma, readers = "TMA", f"{warps} warps"
    if footprint.persistent(spec):
        return _persistent_barriers(spec, q, k, v)
    rows: list[tuple[str, ...]] = [("name", "stages", "producer -> consumer", "a phase completes with")]
    rows.append(("q_full", "1", f"{tma} -> {readers}", f"{q} bytes"))
    rings = [("kv", f"{k + v} bytes, K {k} + V {v}")]
    if spec.load.barrier == "separate":
        rings = [("k", f"{k} bytes"), ("v", f"{v} bytes")]
    for ring, announced in rings:
        rows.append((f"{ring}_full", stages, f"{tma} -> {readers}", announced))
        rows.append((f"{ring}_empty", stages, f"{readers} -> {_producer(spec)}", f"{warps} arrivals"))
    return rows


def _persistent_barriers(spec: Spec, q: int, k: int, v: int) -> list[tuple[str, ...]]:
    """Q is a ring like K and V; their bytes per stage."""
    assert isinstance(spec.load, TmaLoad)
    warps, stages = footprint.computing_threads(spec) // hopper.WARP, str(spec.load.kv_stages)
    consumers, arrivals = f"{warps} warps", f"{warps} arrivals"
    rows: list[tuple[str, ...]] = [("ring", "stages", "producer -> consumers", "full with", "empty with")]
    rows.append(("q", str(spec.load.q_stages), f"TMA, from warp {warps} -> {consumers}", f"{q} bytes", arrivals))
    rows.append(("k", stages, f"TMA, from warp {warps} -> {consumers}", f"{k} bytes", arrivals))
    rows.append(("v", stages, f"TMA, from warp {warps + 1} -> {consumers}", f"{v} bytes", arrivals))
    if spec.scheduler == "dynamic":
        to = f"warp {warps} -> {warps + 1} warps"
        rows.append(("tile", str(footprint.TILE_SLOTS), to, "1 arrival", f"{warps + 1} arrivals"))
    if isinstance(spec.schedule, PingPongSchedule):
        count = spec.tile.warpgroups or 0
        named = f"named barriers 1 to {count}"
        rows.append(("turn", str(count), "each consumer -> the next one", f"{2 * hopper.WARPGROUP} threads", named))
    return rows


def _named_barriers(spec: Spec) -> list[tuple[str, ...]]:
    """Those of a specialised kernel; a persistent one has them in the table of its rings."""
    if not footprint.specialized(spec) or footprint.persistent(spec):
        return []
    count = footprint.computing_threads(spec)
    rows: list[tuple[str, ...]] = [
        ("number", "name", "threads", "who -> whom, and what for"),
        ("1", "OUTPUT_BARRIER", str(count), "all consumers: Q has been read; then: O is in shared memory"),
    ]
    if isinstance(spec.schedule, PingPongSchedule):
        last = 1 + (spec.tile.warpgroups or 0)
        what = "each consumer -> the next one, the last -> the first: may multiply"
        rows.append((f"2 to {last}", "TURN_BARRIER", str(2 * hopper.WARPGROUP), what))
    return rows


def placed_regions(spec: Spec) -> list[tuple[int, Region]]:
    """Offset and region of each array in shared memory, and of the mbarriers behind them."""
    placed, offset = [], 0
    for region in footprint.shared_memory_map(spec):
        offset = -(-offset // region.align) * region.align
        placed.append((offset, region))
        offset += region.bytes
    barriers = footprint.barrier_bytes(spec)
    if barriers:
        formula = f"{barriers // hopper.MBARRIER_BYTES} mbarriers"
        placed.append((offset, Region("barriers", barriers, formula, hopper.MBARRIER_BYTES, "")))
    return placed


def _smem(spec: Spec) -> list[tuple[str, ...]]:
    regions, barriers = footprint.shared_memory_map(spec), footprint.barrier_bytes(spec)
    if not regions:
        return []
    rows: list[tuple[str, ...]] = [("offset", "bytes", "what", "")]
    for offset, region in placed_regions(spec):
        rows.append((str(offset), str(region.bytes), region.name, f"{region.formula}: {region.what}".rstrip(": ")))
    total = footprint.total_bytes(regions, barriers)
    rows.append(("", str(total), "total", f"of {hopper.SMEM_PER_CTA} per CTA"))
    return rows


def _timeline(spec: Spec) -> list[tuple[str, ...]]:
    """What a warp does for one tile of keys, in order, and what each step waits for."""
    ring = {"shared": "kv", "separate": "k", "none": ""}[
        spec.load.barrier if isinstance(spec.load, TmaLoad) else "none"
    ]
    steps: list[tuple[str, ...]] = []
    if isinstance(spec.load, TmaLoad):
        steps.append((f"wait {ring}_full", "the tile has landed"))
    elif isinstance(spec.load, CpAsyncLoad):
        steps.append(("cp.async.wait_group", f"the tile has landed; {_groups(spec.load.kv_stages)} stay in flight"))
    else:
        steps.append(("load K", "then a CTA barrier"))
    wgmma = isinstance(spec.qk, WgmmaProduct)
    steps.append(("S = Q K^T", "wgmma, wait_group 0" if wgmma else "multiply-adds"))
    if spec.handoff.through == "smem_f32":
        steps.append(("store S", "scattered from the accumulator, f32" if wgmma else "f32"))
    if isinstance(spec.load, TmaLoad) and spec.load.barrier == "separate":
        steps.append(("arrive k_empty", "K's stage is free"))
    if spec.load.engine == "sync":
        steps.append(("load V over K", "after a CTA barrier"))
    steps.append(("mask", "boundary tiles only"))
    steps.append(("softmax", "P = 2^(S - max), O and sums rescaled"))
    if isinstance(spec.handoff, SmemHandoff):
        steps.append(("store P", "stmatrix, fence.proxy.async, barrier of the warpgroup"))
    if isinstance(spec.load, TmaLoad) and spec.load.barrier == "separate":
        steps.append(("wait v_full", "V has landed"))
    steps.append(("O += P V", "wgmma, wait_group 0" if isinstance(spec.pv, WgmmaProduct) else "multiply-adds"))
    if isinstance(spec.load, TmaLoad):
        last = "v" if spec.load.barrier == "separate" else "kv"
        steps.append((f"arrive {last}_empty", "the stage is free"))
        steps.append(("warp 0 refills", f"waits for the stage to be empty, then loads the tile {_ahead(spec)}"))
    elif isinstance(spec.load, CpAsyncLoad):
        steps.append(("all refill", f"after a CTA barrier, with the tile {_ahead(spec)}"))
    else:
        steps.append(("CTA barrier", "before the next K takes V's place"))
    return steps


def _producer_timeline() -> list[tuple[str, ...]]:
    return [
        ("producer", "wait k_empty", "the stage of K is free"),
        ("producer", "load K", "TMA"),
        ("producer", "wait v_empty", "the stage of V is free"),
        ("producer", "load V", "TMA"),
    ]


def _producers_timeline() -> list[tuple[str, ...]]:
    """Each of the two producer warps goes its own way."""
    return [
        ("producers", "wait k_empty, load K", "by TMA, when the stage of K is free"),
        ("producers", "wait v_empty, load V", "by TMA, when the stage of V is free"),
    ]


def _consumer_timeline(spec: Spec) -> list[tuple[str, ...]]:
    """What a consumer warp does for one tile of keys. With overlap, P V is that of the tile before."""
    overlap, ping_pong = footprint.overlapped(spec), isinstance(spec.schedule, PingPongSchedule)
    wait_turn = [("wait TURN_BARRIER", "it is this warpgroup's turn")] * ping_pong
    pass_turn = [("arrive TURN_BARRIER", "it is the next warpgroup's turn")] * ping_pong
    mask = ("mask", "boundary tiles only")
    only_then = "" if spec.softmax.rescale_above is None else ", if it has grown much"
    first = spec.softmax.exp_before_wait
    held_back = "" if first is None else f"; not before {first} exponentials of each thread"
    if overlap:
        masks = [] if isinstance(spec.mask, NoMask) else [mask]
        steps = [
            ("wait k_full", "K has landed"),
            *wait_turn,
            ("S = Q K^T", "wgmma"),
            ("wait v_full", "V of the tile before has landed"),
            ("O += P V", "wgmma, of the tile before"),
            ("wait_group 1", "S is there; P V goes on"),
            *pass_turn,
            ("arrive k_empty", "K's stage is free"),
            *masks,
            ("softmax", "P = 2^(S - max) and sums"),
            ("wait_group 0", f"O is there{held_back}"),
            ("arrive v_empty", "V's stage is free"),
            ("rescale", f"O to the new maximum{only_then}; P is rounded"),
        ]
    else:
        steps = [
            ("wait k_full", "K has landed"),
            *wait_turn,
            ("S = Q K^T", "wgmma, wait_group 0"),
            ("arrive k_empty", "K's stage is free"),
            *pass_turn,
            mask,
            ("softmax", "P = 2^(S - max), O and sums rescaled"),
            ("wait v_full", "V has landed"),
            ("O += P V", "wgmma, wait_group 0"),
            ("arrive v_empty", "V's stage is free"),
        ]
    return [("consumer", *step) for step in steps]


def _ahead(spec: Spec) -> str:
    stages = footprint.kv_stages(spec)
    return "next in line" if stages == 1 else f"{stages} further on"


def _groups(stages: int) -> str:
    return f"{stages - 1} of {stages} groups"


def _naive_timeline(spec: Spec) -> list[tuple[str, ...]]:
    lse = ", LSE" if spec.outputs.lse else ""
    return [
        ("scores", "S = scale Q K^T, -inf where the mask hides the key"),
        ("softmax", f"P = softmax(S) in place{lse}"),
        ("output", "O = P V"),
    ]
