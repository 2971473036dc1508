"""What a report shows, as data: held against definitions, the CPU model, the generated modules and the records."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import random
import re
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import numpy as np
import pytest
import rendering

from fa3gen.base import files
from fa3gen.compile import toolchain
from fa3gen.compile.cache import cached_compile
from fa3gen.compile.census.sass import parse_sass
from fa3gen.cpu import wgmma
from fa3gen.design import footprint, tile_order
from fa3gen.design.family import PackedShape, Shape
from fa3gen.design.footprint import persistent
from fa3gen.design.masks import USUAL_WINDOW, given_with_calls, of_call, reach
from fa3gen.design.schedule import full_tiles
from fa3gen.design.splits import counts_seen, seen_before, steps_of, tiles_of_step, whole_parts
from fa3gen.design.work import KeyTiles, Problem, key_tiles
from fa3gen.design.workspace import Workspace
from fa3gen.inspect import report
from fa3gen.inspect.report import drawing, fragments, highlighting, numerics, pictures, speeds, swizzles, tiles
from fa3gen.inspect.report.listing import Listing, make_listing
from fa3gen.inspect.report.liveness import live_registers
from fa3gen.records import evidence, tuning_records
from fa3gen.spec.model import (
    GlobalHandoff,
    NoMask,
    PingPongSchedule,
    Scheduler,
    Spec,
    Swizzle,
    WarpSpecializedSchedule,
    WindowMask,
)

STEM = "k4_2_d64"
TUNED = "fwd_d96"  # in the records of large problems, and of no other
SWIZZLES: dict[Swizzle, int] = {"none": 0, "32B": 3, "64B": 2, "128B": 1}  # code in a matrix descriptor


def spec_of(stem: str) -> Spec:
    return rendering.variants()[stem].spec


def tile(swizzle: Swizzle, rows: int = 64, columns: int = 128) -> swizzles.Operand:
    return swizzles.Operand("sX", "X", rows, 2 * columns, "row", "column", swizzle, "", ())


# -- swizzles


@pytest.mark.parametrize(("swizzle", "bits"), [("none", 0), ("32B", 1), ("64B", 2), ("128B", 3)])
def test_the_swizzle_is_cutes(swizzle: Swizzle, bits: int) -> None:
    """CuTe, swizzle.hpp: Swizzle<B, M, S> XORs bits M to M + B - 1 with those S further up; here on bytes, M 4, S 3."""
    m, s = 4, 3
    yyy = ((1 << bits) - 1) << (m + s)
    for address in range(0, 4096, 16):
        assert swizzles.swizzled(address, swizzle) == address ^ (address & yyy) >> s
    assert sorted(swizzles.swizzled(address, swizzle) for address in range(4096)) == list(range(4096))


@pytest.mark.parametrize(("swizzle", "code"), SWIZZLES.items())
@pytest.mark.parametrize("mn_major", [False, True])
def test_tiles_lie_where_wgmma_reads_them(swizzle: Swizzle, code: int, mn_major: bool) -> None:
    """The CPU model's reading of matrix descriptors, which is compared with an H200, finds the same chunks."""
    operand = tile(swizzle)
    span, rows, chunks = operand.span, operand.rows, operand.width // 16
    column = rows * span  # bytes from one column of spans to the next
    if mn_major:  # rows are k, eight of them 8 spans apart; chunks lie along M or N
        leading, stride = (8 * span, column) if code == 0 else (column, 8 * span)
        descriptor = code << 62 | stride >> 4 << 32 | leading >> 4 << 16
        found = wgmma.operand_chunks(descriptor, 8 * chunks, True) * 16
        wanted = [[swizzles.address(operand, row, chunk) for chunk in range(chunks)] for row in range(16)]
        assert found.tolist() == wanted
        return
    for step in range(operand.width // 32):  # 32 bytes along K
        start = swizzles.address(operand, 0, 2 * step, plain=True)
        descriptor = code << 62 | 8 * span >> 4 << 32 | column >> 4 << 16 | start >> 4
        found = wgmma.operand_chunks(descriptor, rows, False) * 16
        wanted = [[swizzles.address(operand, row, 2 * step + i) for i in range(2)] for row in range(rows)]
        assert found.tolist() == wanted


def test_conflicts_down_rows() -> None:
    """Eight rows of 16 bytes: none with a swizzle; without one as many as rows lie in the same place of 128 bytes."""
    counts = {name: [(access.swizzled, access.plain) for access in swizzles.accesses(tile(name))] for name in SWIZZLES}
    assert counts == {"none": [(1, 1)], "32B": [(1, 2)], "64B": [(1, 4)], "128B": [(1, 8)]}
    same_bytes = [swizzles.Chunk(0, 0, 256)] * 4
    assert swizzles.transactions(same_bytes) == 1  # a broadcast


@pytest.mark.parametrize(("swizzle", "wanted"), [("none", 8), ("32B", 4), ("64B", 2), ("128B", 1)])
@pytest.mark.parametrize("columns", [64, 128])
def test_conflicts_along_a_row(swizzle: Swizzle, wanted: int, columns: int) -> None:
    """A quarter of a warp reads 128 bytes of a row, 16 in each lane, as `O = P V` of a scalar module reads V.

    A row lies in pieces of one span, each a whole number of 128-byte lines after the one before it, since a tile has
    a multiple of eight rows. So the pieces begin at the same bank, and the XOR, which is the same along a row, moves
    them alike: as many of them lie over each other as 128 bytes have spans. Of 64 bytes two, of 32 four, of 16 eight.
    """
    operand = dataclasses.replace(tile(swizzle, columns=columns), along=True)
    [_, row] = swizzles.accesses(operand)
    assert (row.name, row.swizzled, row.plain) == ("1 row x 128 bytes", wanted, wanted)


def test_who_reads_along_a_row() -> None:
    """Lanes of the scalar modules read V so; TMA and the tensor cores take rows of a core matrix."""
    along = {
        stem: [operand.name for operand in swizzles.operands(spec_of(stem)) if operand.along]
        for stem in ("k2_d64", "k2_cp_async_d64", "k4_2_d64")
    }
    assert along == {"k2_d64": ["sKV"], "k2_cp_async_d64": ["sV"], "k4_2_d64": []}


@pytest.mark.parametrize(("swizzle", "wanted"), [("64B", 2), ("none", 1)])
def test_the_report_of_a_scalar_module_counts_them(swizzle: Swizzle, wanted: int) -> None:
    spec = spec_of("k2_cp_async_d128")
    assert spec.smem is not None
    changed = spec.model_copy(update={"smem": spec.smem.model_copy(update={"v": swizzle})})
    [view] = [view for view in pictures.swizzle_views(changed) if view.operands[0].name == "sV"]
    assert view.accesses[1] == swizzles.Access("1 row x 128 bytes", wanted, wanted)


def test_operands_are_those_of_the_plan() -> None:
    """Names, bytes and layouts are those that the module's own map and constants say."""
    for stem, plan in rendering.attention_plans().items():
        places = {region.name: region for region in plan.smem.regions}
        found = {operand.name: operand for operand in swizzles.operands(spec_of(stem))}
        merged = {"sO", "sMax", "sSum"} if plan.by_warps else set()  # what warps add up of one another, in float32
        assert found.keys() == places.keys() - {"sS", "sums", "tiles"} - merged, stem
        stages = {"sQ": plan.load.q_stages, **dict.fromkeys(("sK", "sV", "sVt"), plan.load.kv_stages)}
        stages |= dict.fromkeys(("sK8", "sV8"), spec_of(stem).kv.stages)
        for name, operand in found.items():
            count = 4 * plan.tile.warpgroups if name == "sO" else stages.get(name, 1)  # a slice for each warp
            assert places[name].bytes == count * operand.rows * operand.width, (stem, name)
        layouts = {"sQ": plan.smem.q, "sK": plan.smem.k, "sV": plan.smem.v, "sVt": plan.smem.vt, "sP": plan.smem.p}
        for name in layouts.keys() & found.keys():
            assert (layout := layouts[name]) and found[name].layout == (layout.atom or "row-major"), (stem, name)


# -- fragments


def test_accumulators_lie_as_in_the_cpu_model() -> None:
    numbers = np.arange(64 * 96, dtype=np.float32).reshape(64, 96)
    vectors = wgmma.accumulator_vectors(numbers, "f32")
    for row, column in itertools.product(range(64), range(96)):
        place = fragments.accumulator(row, column)
        assert vectors[place.register][place.thread] == numbers[row, column]
    assert max(fragments.accumulator(row, 95).register for row in range(64)) == 96 // 2 - 1


def test_operand_a_lies_as_in_the_cpu_model() -> None:
    held = np.zeros((4, 128), np.uint32)
    for row, column in itertools.product(range(64), range(16)):
        place = fragments.operand_a(row, column)
        assert place.part is not None
        bits = np.array([row * 16 + column], np.float16).view(np.uint16)[0]
        held[place.register, place.thread] |= np.uint32(bits) << np.uint32(16 * place.part)
    found = wgmma.fragment_matrix(list(held), "f16")
    assert np.array_equal(found, np.arange(64 * 16, dtype=np.float32).reshape(64, 16))


def test_p_does_not_move() -> None:
    """16 columns of the accumulator and the A operand of a k-step belong to the same threads, element by element."""
    for row, column in itertools.product(range(64), range(64)):
        s, p = fragments.accumulator(row, column), fragments.operand_a(row, column)
        assert (s.thread, s.register) == (p.thread, 2 * p.register + (p.part or 0))


def test_p_of_8_bits_does_not_move() -> None:
    """Where keys stand in V^T in the accumulator's order: position 4 t + j of 16 is key 2 t + j % 2 + 8 (j // 2)."""
    for row, position in itertools.product(range(64), range(128)):
        t, j = position % 16 // 4, position % 4
        key = position // 16 * 16 + 2 * t + j % 2 + 8 * (j // 2)
        assert fragments.accumulator(row, key).thread == fragments.operand_a_8bit(row, position).thread
    places = [fragments.operand_a_8bit(9, column) for column in (0, 3, 4, 16, 32)]
    # Row 9 is the second one of lanes 4 to 7: registers 1, 3 and, of the next k-step, 5.
    assert [(p.thread, p.register, p.part) for p in places] == [(4, 1, 0), (4, 1, 3), (5, 1, 0), (4, 3, 0), (4, 5, 0)]


# -- tiles

SHAPES = [(512, 512), (300, 1000), (1000, 300), (129, 257), (1, 700), (700, 1), (128, 128), (5, 1600)]


class Fake:
    """`cutlass` and `cute` as far as the arithmetic of tiles goes."""

    Int32, Int64, Boolean = int, int, bool
    Tensor = object
    min, max = staticmethod(min), staticmethod(max)
    jit = staticmethod(lambda function: function)
    ceil_div = staticmethod(lambda a, b: -(-a // b))
    range = staticmethod(lambda *bounds, unroll: range(*bounds))
    size = staticmethod(lambda x, mode: rendering.extent(x.shape[mode[0]]))

    def __init__(self) -> None:
        self.block = 0
        self.arch = types.SimpleNamespace(
            block_idx=lambda: (self.block, 0, 0), grid_dim=lambda: (1, 1, 1), make_warp_uniform=lambda x: x
        )


class FakeWarp(Fake):
    """32 lanes that look for a tile together: what differs among them is a list of 32."""

    def __init__(self) -> None:
        super().__init__()
        self.lane = 0
        self.size = lambda x, mode=None: len(x)  # type: ignore[assignment]
        self.arch = types.SimpleNamespace(
            lane_idx=lambda: self.lane,
            shuffle_sync=lambda x, lane: x[lane] if isinstance(x, list) else x,
            vote_ballot_sync=lambda lanes: lanes,
            popc=sum,
        )


class Lanes(list[int]):
    """A number of each lane, and what a warp does with such."""

    def __add__(self, other: Any) -> Any:
        others = other if isinstance(other, list) else [other] * len(self)
        return Lanes(a + b for a, b in zip(self, others, strict=True))

    def __radd__(self, other: int) -> Any:
        return Lanes(other + lane for lane in self)

    def __sub__(self, other: Any) -> Any:
        return Lanes(a - b for a, b in zip(self, other, strict=True))

    def __mul__(self, other: Any) -> Any:
        return Lanes(lane * other for lane in self)

    def __le__(self, other: Any) -> Any:
        return Lanes(lane <= other for lane in self)


def found_by_warp(
    stem: str, spec: Spec, sequences: Sequence[tuple[int, int]], told: tuple[int, int]
) -> Iterator[tuple[int, ...]]:
    """(sequence, m_block, head, head of k) of all tiles, by the module's `find_tile` for one number after the other.

    `told` is what the module is told of heads: of q those with tiles of their own, or how many share a head of k where
    there may be any number of them; and of k.
    """
    warp = FakeWarp()
    of_lane = division_of(stem, warp)
    begins = [[0, *itertools.accumulate(side)] for side in zip(*sequences, strict=True)]
    paged = spec.problem.layout == "paged"
    lengths = (begins[0], [], [seq_k for _, seq_k in sequences], begins[0][-1], 10**9)
    lengths = lengths if paged else (*begins, [], [], begins[0][-1], begins[1][-1])  # type: ignore[assignment]
    given = (*lengths, *told)
    look = of_lane["look_at"]

    def of_lanes(function: Any, *arguments: Any) -> list[Any]:
        seen = []
        for warp.lane in range(32):
            seen.append(function(*arguments, given))
        return seen

    def look_at(first: int, before: int, *kind_and_given: Any) -> tuple[Any, ...]:
        seen = [lane[2:-1] for lane in of_lanes(look, first, before, *kind_and_given[:-1])]
        columns = [Lanes(column) for column in zip(*seen, strict=True)]
        return first, before, *columns, Lanes(itertools.accumulate(columns[-1]))

    of_lane["sum_up_to_lane"] = lambda tiles: tiles
    totals: list[int] = []
    if woven := spec.order == "woven":  # each lane counts those of its sequences
        totals = [sum(lanes) for lanes in zip(*of_lanes(of_lane["count_tiles"]), strict=True)]
    of_lane["look_at"] = look_at
    groups = [look_at(0, 0, *kind, given) for kind in ([(0,), (1,)] if woven else [()])]
    groups = [(0, *groups[0])] if spec.order == "by_head" else groups
    for number in itertools.count():
        of_call = [totals, given] if woven else [given]
        (m_block, head, head_kv, sequence, *_), *groups = of_lane["find_tile"](number, *groups, *of_call)
        count = sum(totals) if woven else groups.pop()
        if m_block < 0:
            assert count == number
            return
        yield sequence, m_block, head, head_kv


DIVISION = ("Work", "first_work", "work_on", "piece_of_work", "kv_range", "tile_coordinates", "place_in_sequence")
DIVISION += ("find_tile", "look_at", "bounds_of", "Keys", "own_keys", "seen_before", "packings_of", "room_log2")
DIVISION += ("pack_log2_of", "tiles_of", "count_tiles", "several_before", "search")
"""Who does what, in the order of the modules; each has some of these."""


def division_of(stem: str, fake: Fake) -> dict[str, Any]:
    """The classes and functions of a generated module that divide the work, as plain Python."""
    module = rendering.tree(stem)
    nodes = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in DIVISION]
    space: dict[str, Any] = {**rendering.constants(module), "cute": fake, "cutlass": fake}
    space["dataclass"] = dataclasses.dataclass
    exec(compile(ast.Module([*nodes], []), stem, "exec"), space)
    return space


def asked_for(division: dict[str, Any], spec: Spec, block: int, seq_q: int, seq_k: int) -> KeyTiles:
    """What the module's own piece of work says, or its `kv_range` where there is no such thing.

    Without a mask no code says which tiles are full: the one with the end of the keys is visited first and masked.
    """
    unmasked = isinstance(spec.mask, NoMask)
    window = [USUAL_WINDOW] * given_with_calls(spec.mask)
    if not isinstance(spec.schedule, WarpSpecializedSchedule | PingPongSchedule):
        ranged = [seq_k] if unmasked else [block * tile_order.positions(spec), seq_q, seq_k, *window]
        found = division["kv_range"](*ranged)
        return KeyTiles(*found) if len(found) == 4 else KeyTiles(0, found[0], 0, found[1])
    rows = (spec.tile.pack_heads, seq_q) if spec.tile.pack_heads > 1 else seq_q
    mQ, mK = (types.SimpleNamespace(shape=(seq, 64, 1, 1)) for seq in (rows, seq_k))
    if spec.problem.layout != "dense":
        found = (block, 0, 0, 0, 0, seq_q, 0, seq_k) if spec.problem.layout == "packed" else ()
        found = found or (block, 0, 0, 0, 0, seq_q, seq_k, 0)
        if spec.scheduler == "even":  # all tiles of keys, which is no part
            pack_log2 = spec.tile.pack_heads.bit_length() - 1 if spec.tile.group == "fitted" else 0
            found = (*found[: -1 if footprint.paged(spec) else None], 0, max(-(-seq_k // spec.tile.kv), 1), -1)
            found += (pack_log2,)
            found += (0,) * footprint.paged(spec)
        if footprint.shares_packed(spec):  # a whole tile
            found = (*found, 0, max(-(-seq_k // spec.tile.kv), 1), 0, 0)
        work = division["work_on"](found, *window, 0)
    elif spec.scheduler == "stream_k":  # one whole tile, no step more
        work = division["piece_of_work"](0, (mQ, mK, (1, 0, 1)))
    else:
        number_and_valid = {"number": 0, "valid": True} if persistent(spec) else {}
        part = [] if spec.split is None else [(0, 1, -(-seq_k // spec.tile.kv))]  # the first of one part
        work = division["work_on"]((block, 0, 0, 0), *part, mQ, mK, *window, **number_and_valid)
    assert work.valid
    if full_tiles(spec) == "none":  # a module with a narrow window says nothing of full tiles: it has none
        counted = key_tiles(spec, (seq_q, seq_k), block)
        assert max(counted.start, counted.full_start) >= min(counted.end, counted.full_end)
        return KeyTiles(work.n_begin, work.n_end, counted.full_start, counted.full_end)
    first_key = work.k_begin if spec.tile.kv_from == "window" else 0
    if footprint.own_keys(spec):  # of a CTA's tiles only consumers say which are full, each of its own
        edges = division["kv_range"](block * spec.tile.q, seq_q, work.seq_k, *window)
        full = edges[2:] if isinstance(spec.mask, WindowMask) else (0, edges[1])
        own = [division["own_keys"](work, consumer) for consumer in range(spec.tile.warpgroups or 0)]
        visited = sum(keys.n_end - getattr(keys, "n_begin", work.n_begin) for keys in own)
        return KeyTiles(work.n_begin, work.n_end, *full, first_key, len(own) * (work.n_end - work.n_begin) - visited)
    full_end = seq_k // spec.tile.kv if unmasked else work.n_full_end
    full_begin = work.n_full_begin if isinstance(spec.mask, WindowMask) else 0
    unseen = 0
    if footprint.skips_absent(spec):  # all but one, by each consumer whose first row is behind the sequence's last
        firsts = range(block * spec.tile.q, (block + 1) * spec.tile.q, 64)
        unseen = sum(row >= seq_q * spec.tile.pack_heads for row in firsts) * (work.n_end - work.n_begin - 1)
    return KeyTiles(work.n_begin, work.n_end, full_begin, full_end, first_key, unseen)


def tiled_stems() -> list[str]:
    """Modules whose pages show tiles: all but the naive ones."""
    return [stem for stem in rendering.attention_stems() if tiles.tiled(spec_of(stem))]


def test_key_tiles_are_those_of_the_modules() -> None:
    def wrong(stem: str) -> list[str]:
        spec, problems = spec_of(stem), []
        if stem not in tiled_stems():
            return []
        division = division_of(stem, Fake())
        shapes = SHAPES if spec.problem.layout == "dense" else [*SHAPES, (300, 0)]
        for seq_q, seq_k in shapes:
            for block in range(-(-seq_q // tile_order.positions(spec))):
                wanted = asked_for(division, spec, block, seq_q, seq_k)
                found = key_tiles(spec, (seq_q, seq_k), block)
                if wanted != found:
                    problems.append(f"{seq_q} x {seq_k}, tile {block}: {found}, the module has {wanted}")
        return problems[:1]

    rendering.assert_none_in_modules(wrong)


@pytest.mark.parametrize(
    "stem", ["k4_2_d64", "k4_2_d64_causal", "k4_2_window_d64_window200_70", "fwd_d64_pack8_window"]
)
def test_states_are_those_of_every_element(stem: str) -> None:
    """Skipped: no row of a whole tile sees a key of it. Full: all rows see all keys, and there are as many."""
    import torch

    from fa3gen.verify.reference import visible_keys

    spec = spec_of(stem)
    m, n = tile_order.positions(spec), spec.tile.kv
    for seq_q, seq_k in SHAPES:
        plan = tiles.schedule(spec, seq_q, seq_k)
        rows = torch.arange(len(plan.rows) * m)  # beyond the last query, too: a tile is computed as a whole
        seen = visible_keys(reach(spec.mask), seq_q=seq_q, seq_k=seq_k, rows=rows)
        seen = torch.ones(len(rows), seq_k, dtype=torch.bool) if seen is None else seen
        for index, row in enumerate(plan.rows):
            for block in range(plan.key_tiles):
                part = seen[index * m : (index + 1) * m, block * n : (block + 1) * n]
                wanted = "full" if part.all() and part.shape[1] == n else "masked" if part.any() else "skipped"
                least = row.visited == 1 and wanted == "skipped"  # consumers that overlap visit one tile at least
                assert tiles.state(row, block) == wanted or least, (seq_q, seq_k, index, block)


def check_places(first_work: Any, fake: Fake, order: list[Any], sizes: tuple[int, ...], spec: Spec) -> None:
    """CTAs start along the first dimension of the grid first, then along the second, then the third.

    With keys in parts, which stand below each other there, a tile comes once for each part.
    """
    seq_q, seq_k, heads, batch, blocks = sizes
    rows = (spec.tile.pack_heads, seq_q) if spec.tile.pack_heads > 1 else seq_q
    tensors = [types.SimpleNamespace(shape=(seq, 64, heads, batch)) for seq in (rows, seq_k)]
    parts, steps = (1, 0) if spec.split is None else (3, -(-seq_k // spec.tile.kv // 3))
    schedule = (*tensors, 1) if spec.split is None else (*tensors, parts, steps)
    fake.arch.grid_dim = lambda: (heads, blocks * parts, batch)
    for entry, part in itertools.product(order, range(parts)):
        x, rest = entry.number % heads, entry.number // heads
        y = rest % blocks * parts + part
        fake.arch.block_idx = lambda place=(x, y, rest // blocks): place
        work = first_work(schedule)
        assert (work.m_block, work.head, work.batch) == (entry.m_block, entry.head, entry.batch), entry
        assert spec.split is None or (work.part, work.num_parts, work.n_begin) == (part, parts, part * steps)


def check_sequences(place_in_sequence: Any, spec: Spec, heads: int) -> None:
    """Tiles are numbered on from one sequence to the next; there the module says which one it is."""
    sequences = ((700, 40_000), (0, 9), (1, 0), (400, 400_000), (300, 300))
    shape = PackedShape(*map(tuple, zip(*sequences, strict=True)), heads * spec.tile.pack_heads, heads)
    wanted = [
        (number, *place_in_sequence(tile, seq_q, seq_k, heads))
        for number, (seq_q, seq_k) in enumerate(sequences)
        for tile in range(-(-seq_q // tile_order.positions(spec)) * heads)
    ]
    order = list(tile_order.taken(spec, shape))
    assert [entry.number for entry in order] == list(range(len(wanted)))
    assert [(entry.batch, entry.m_block, entry.head) for entry in order] == wanted


def test_a_warp_finds_tiles_in_this_order() -> None:
    """More sequences than lanes, some of them without queries; head after head, all heads of a sequence, or woven."""
    draw, ways = random.Random(0), set()
    for stem in tiled_stems():
        spec = spec_of(stem)
        if spec.problem.layout == "dense" or spec.scheduler != "dynamic":
            continue
        for count in (1, 33, 70):
            sequences = [(draw.choice((0, 1, 90, 300)), draw.choice((1, 700, 40_000))) for _ in range(count)]
            pack, of_any = spec.tile.pack_heads, spec.tile.group == "any"
            for group in (1, pack - 1, pack, pack + 1, 3 * pack) if of_any else (pack,):
                shape = PackedShape(*map(tuple, zip(*sequences, strict=True)), 3 * group, 3)
                packs = -(-group // pack)
                wanted = [
                    (entry.batch, entry.m_block, *place_of(entry.head, packs, group if of_any else 1, pack))
                    for entry in tile_order.taken(spec, shape)
                ]
                told = (group if of_any else 3, 3)
                assert list(found_by_warp(stem, spec, sequences, told)) == wanted, (stem, group)
        ways.add((spec.order, spec.tile.group))
    assert ways == {
        ("by_sequence", "multiple"),
        ("by_head", "multiple"),
        ("by_head", "any"),
        ("woven", "multiple"),
        ("woven", "any"),
    }


def place_of(number: int, packs: int, group: int, pack: int) -> tuple[int, int]:
    """The first head of q, and that of k, of the tile of heads with this number: `packs` for each head of k."""
    return number // packs * group + number % packs * pack, number // packs


def check_line(place_in_sequence: Any, spec: Spec, heads: int, group: int = 1) -> None:
    """Steps of a sequence: of each tile of queries all tiles of keys, or all whole parts of these, one at least.

    Where its queries decide how many heads of a `group` a tile holds, who looks for it is told how many these are.
    """
    sequences = ((70, 900), (0, 9), (1, 0), (5, 64))
    shape = PackedShape(*map(tuple, zip(*sequences, strict=True)), heads * group, heads)
    order = list(tile_order.taken(spec, shape))
    found: list[tuple[int, int, int]] = []
    for number, (seq_q, seq_k) in enumerate(sequences):
        own = tile_order.fitted(spec, shape, seq_q)
        told = [own.tile.pack_heads.bit_length() - 1] * (spec.tile.group == "fitted")
        steps = max(-(-seq_k // (spec.tile.kv * tiles_of_step(spec))), 1)
        for step in range(-(-seq_q // tile_order.positions(own)) * tile_order.head_tiles(own, shape) * steps):
            if spec.tile.kv_from == "window" or whole_parts(spec):  # the caller has to know how many there are
                m_block, head, n_block = place_in_sequence(step, seq_q, steps)
            else:
                m_block, head, n_block, n_blocks = place_in_sequence(step, seq_q, seq_k, *told)
                assert n_blocks == steps
            assert n_block == step % steps
            found += [(number, m_block, head)] * (n_block == 0)
    assert [(entry.batch, entry.m_block, entry.head) for entry in order] == found


def check_seen(stem: str, spec: Spec, heads: int) -> None:
    """Steps of a sequence where a tile of queries has about as many as its rows see tiles of keys."""
    warp, lanes = FakeWarp(), Lanes(range(32))
    division = division_of(stem, warp)
    seen, warp.arch.lane_idx = division["seen_before"], lambda: lanes
    smaller, warp.min = min, lambda a, b: Lanes(min(lane, b) for lane in a)  # type: ignore[misc,assignment]
    division["seen_before"] = lambda m_block, *lengths: (
        Lanes(seen(lane, *lengths) for lane in m_block) if isinstance(m_block, Lanes) else seen(m_block, *lengths)
    )
    for seq_q, seq_k in ((1, 0), (70, 900), (900, 70), (300, 300), (5, 64), (4500, 4500)):
        shape = PackedShape((seq_q,), (seq_k,), heads, heads)
        own = tile_order.fitted(spec, shape, seq_q)
        rows, kv, pack_log2 = tile_order.positions(own), spec.tile.kv, own.tile.pack_heads.bit_length() - 1
        blocks = -(-seq_q // rows)
        before = [seen_before(block, seq_q, seq_k, rows, kv) for block in range(blocks + 1)]
        assert before == [seen(block, seq_q, seq_k, pack_log2) for block in range(blocks + 1)]
        assert steps_of(spec, shape) == before[-1] * heads
        for block, seen_tiles in enumerate(Problem(spec, shape).of_lengths[seq_q, seq_k]):
            steps, last = before[block + 1] - before[block], block == blocks - 1  # whose rows the sequence may end
            assert steps >= 1 and abs(steps - seen_tiles.visited) <= 1 + last * (-(-rows // kv)) + (seq_q > seq_k)
        for head, block in itertools.product(range(heads), range(blocks)):
            steps = before[block + 1] - before[block]
            for step in {0, smaller(1, steps - 1), steps - 1}:
                wanted = head * before[-1] + before[block] + step
                found = division["place_in_sequence"](wanted, seq_q, seq_k, pack_log2)
                assert found == (block, head, step, steps)


def test_a_tile_holds_as_many_heads_as_the_modules_have() -> None:
    """Of sequences of few and of many queries; and each pack, and each of its tiles, is counted."""
    stems = [stem for stem in tiled_stems() if spec_of(stem).tile.group == "fitted"]
    assert stems
    for stem in stems:
        spec, division = spec_of(stem), division_of(stem, Fake())
        for group in range(1, spec.tile.pack_heads + 1):
            together, apart = division["packings_of"](group)
            for seq_q in (0, 1, 5, 9, 17, 33, 63, 64, 65, 127, 128, 129, 200, 253, 700, 5000):
                shape = PackedShape((seq_q,), (seq_q,), 3 * group, 3)
                own = tile_order.fitted(spec, shape, seq_q)
                pack_log2 = division["pack_log2_of"](seq_q, group, together, apart)
                assert 1 << pack_log2 == own.tile.pack_heads
                assert max(group >> pack_log2, 1) == tile_order.packs_of_kv(own, shape)
                assert division["tiles_of"](seq_q, pack_log2) == -(-seq_q // tile_order.positions(own))


def test_tiles_of_queries_are_taken_in_the_modules_order() -> None:
    heads, batch, seq_q, seq_k = 6, 2, 700, 40_000
    for stem in tiled_stems():
        spec = spec_of(stem)
        if counts_seen(spec):
            check_seen(stem, spec, heads)
            continue
        if spec.scheduler == "even":
            for group in (1, 4, 16) if spec.tile.group == "fitted" else (1,):
                check_line(division_of(stem, Fake())["place_in_sequence"], spec, heads, group)
            continue
        if spec.order != "by_sequence":  # the next test has those
            continue
        if spec.problem.layout != "dense":
            check_sequences(division_of(stem, Fake())["place_in_sequence"], spec, heads)
            continue
        pack = spec.tile.pack_heads
        order = list(tile_order.taken(spec, Shape(batch, seq_q, seq_k, heads * pack, heads)))
        blocks = -(-seq_q // tile_order.positions(spec))
        assert len({(entry.m_block, entry.head, entry.batch) for entry in order}) == blocks * heads * batch
        fake = Fake()
        division = division_of(stem, fake)
        if spec.scheduler == "grid":
            check_places(division["first_work"], fake, order, (seq_q, seq_k, heads, batch, blocks), spec)
            continue
        coordinates = division["tile_coordinates"]
        specialized = isinstance(spec.schedule, WarpSpecializedSchedule | PingPongSchedule)
        rows = (spec.tile.pack_heads, seq_q) if spec.tile.pack_heads > 1 else seq_q
        for entry in order:
            fake.block = entry.number
            if specialized:
                tensors = (types.SimpleNamespace(shape=(seq, 64, heads, batch)) for seq in (rows, seq_k))
                found = coordinates(entry.number, *tensors)
            else:
                found = coordinates(blocks, heads, heads)
            assert (found[0], found[1], found[3]) == (entry.m_block, entry.head, entry.batch), (stem, entry)


# -- live registers


def live(code: str) -> list[int]:
    """Of SASS without addresses."""
    rows = []
    for index, line in enumerate(code.strip().splitlines()):
        line = line.strip()
        rows.append(line if line.endswith(":") else f"/*{16 * index:04x}*/ {line} ;")
    [kernel] = parse_sass(".text.kernel:\n" + "\n".join(rows))
    return list(live_registers(kernel))


def test_a_register_is_live_until_it_is_last_read() -> None:
    assert live("MOV R2, 0x1\nMOV R3, 0x2\nIADD3 R4, R2, R3, RZ\nSTG.E desc[UR4][R6.64], R4\nEXIT") == [1, 2, 3, 1, 0]


def test_a_write_under_a_predicate_keeps_the_old_value() -> None:
    assert live("MOV R2, 0x1\n@P0 MOV R2, 0x2\nSTS [UR4], R2\nEXIT") == [1, 1, 1, 0]
    assert live("MOV R2, 0x1\nMOV R2, 0x2\nSTS [UR4], R2\nEXIT") == [1, 1, 1, 0]
    assert live("MOV R3, 0x1\nMOV R2, 0x1\n@P0 MOV R2, R3\nSTS [UR4], R2\nEXIT") == [1, 2, 2, 1, 0]


def test_what_a_loop_reads_stays_live_all_round() -> None:
    code = "MOV R2, 0x1\nMOV R3, 0x0\n.L_x_0:\nIADD3 R3, R3, R2, RZ\nISETP.GE.AND P0, PT, R3, 0x9, PT\n"
    assert live(code + "@!P0 BRA `(.L_x_0)\nSTS [UR4], R3\nEXIT") == [1, 2, 2, 2, 2, 1, 0]


@pytest.mark.parametrize(
    ("instruction", "count"),
    [
        ("HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", 32),
        ("HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], R24, gsb0", 32 + 4),
        ("HGMMA.64x64x16.F16 R24, gdesc[UR4], R24", 16),
        ("STSM.16.M88.4 [R21], R16", 1 + 4),
        ("STG.E.128 desc[UR6][R4.64], R8", 2 + 4),
        ("LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64]", 1 + 2),
        ("IMAD.WIDE.U32 R4, R15, 0x4, R10", 1 + 2),
        ("SHFL.BFLY PT, R5, R4, 0x1, 0x1f", 1),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5", 1),
    ],
)
def test_operands_have_the_widths_that_opcodes_say(instruction: str, count: int) -> None:
    """All registers are written before; those that the instruction reads are live when it comes."""
    before = "\n".join(f"MOV R{number}, 0x0" for number in range(64))
    assert live(f"{before}\n{instruction}\nEXIT")[63] in (count, count + 1)  # R63 itself is written there


def test_half_of_a_register_that_nobody_wrote_takes_none() -> None:
    assert live("LDS R2, [UR4]\nPRMT R3, R2, 0x7632, R3\nSTS [UR4], R3\nEXIT") == [1, 2, 1, 0]


def test_a_call_enters_the_function_and_goes_on_behind() -> None:
    code = "MOV R2, 0x1\nMOV R9, 0x1\nCALL.REL.NOINC `($f)\nIADD3 R3, R2, R9, RZ\nSTS [UR4], R3\nEXIT\n$f:\n"
    assert live(code + "FADD R2, R2, R2\nRET.REL.NODEC R4 `(kernel)")[:4] == [1, 2, 2, 3]


# -- listing


@pytest.fixture(scope="module")
def listing() -> Listing:
    path = rendering.CHECKOUT.module_path(STEM)
    return make_listing(path, cached_compile(path, line_info=True))


def test_products_copies_and_matrices_stand_on_their_lines(listing: Listing) -> None:
    facts = listing.by_line()
    lines = {
        opcode: [
            (listing.source[number - 1].strip(), sum(entry.opcode == opcode for entry in found.sass))
            for number, found in facts.items()
            if any(entry.opcode == opcode for entry in found.sass)
        ]
        for opcode in ("HGMMA", "UTMALDG", "UTMASTG", "STSM")
    }
    products = [(text.partition("  # ")[2], count) for text, count in lines["HGMMA"]]
    assert products == [("S = Q K^T", 4), ("O = O + P V", 4)]
    assert [count for _, count in lines["UTMALDG"]] == [1, 2, 2]  # Q; K and V, by a function that is called twice
    assert all(text.startswith("cute.copy(tma_") for text, _ in lines["UTMALDG"] + lines["UTMASTG"])
    assert [count for _, count in lines["STSM"]] == [4] and lines["STSM"][0][0].startswith("cute.copy(copy_O")
    exponentials = {number for number, found in facts.items() if any("ex2" in line.text for line in found.ptx)}
    assert all("exp2(" in listing.source[number - 1] for number in exponentials) and exponentials


def test_no_instruction_is_lost(listing: Listing) -> None:
    from fa3gen.compile import compiler

    [kernel] = listing.kernels
    compiled = cached_compile(rendering.CHECKOUT.module_path(STEM), line_info=True)
    census = compiler.analyse(compiled).census
    counted = [line for line in kernel.sass if line.opcode != "NOP"]
    assert len(counted) == census.sass.instructions and len(kernel.ptx) > 0
    nobodys = sum(line.line is None for line in kernel.sass)
    placed = sum(len(found.sass) for found in listing.by_line().values())
    assert placed + nobodys == len(kernel.sass) and nobodys < len(kernel.sass) / 4
    with_ptx = {line.line for line in kernel.ptx}
    assert {line.line for line in kernel.sass} - {None} <= with_ptx


def test_line_information_leaves_the_code_as_it_is(listing: Listing) -> None:
    """What the report says of the module compiled with it holds for the one that runs."""
    plain = cached_compile(rendering.CHECKOUT.module_path(STEM))
    [kernel] = parse_sass(toolchain.disassemble(plain.cubin))
    texts = [f"{instruction.opcode} {instruction.operands}".strip() for instruction in kernel.instructions]
    assert texts == [line.text for line in listing.kernels[0].sass]


def test_live_registers_fit_into_those_of_the_kernel(listing: Listing) -> None:
    """And hold both accumulators, 32 registers each, when O += P V is issued."""
    [kernel] = listing.kernels
    assert kernel.live <= kernel.registers == kernel.most
    assert min(line.live for line in kernel.sass if line.opcode == "HGMMA") >= 32
    assert kernel.live >= 2 * 32


def test_highlighting_keeps_the_text() -> None:
    source = rendering.source("fwd_d128_causal")
    plain = [line.striptags() if "<span" in line else line.unescape() for line in highlighting.lines(source)]
    squeezed = [" ".join(line.split()) for line in source.splitlines()]
    assert [" ".join(line.split()) for line in plain] == squeezed


def test_operands_in_registers_are_shown_with_their_steps() -> None:
    """Of 64 rows: Q has 128 / 16 steps of the head dim, P 64 / 16 of keys; both lie alike."""
    whats = [fragment.what for fragment in fragments.fragments(spec_of("k4_q_registers_d128"))]
    assert whats[1:] == ["A operand in 16 bits: one of 8 k-steps of Q or one of 4 k-steps of P (64 x 16, 4 registers)"]


# -- pictures


def test_pictures_of_every_module_are_well_formed() -> None:
    for stem in rendering.attention_stems():
        spec = spec_of(stem)
        if isinstance(spec.handoff, GlobalHandoff):
            assert pictures.swizzle_views(spec) == () and fragments.fragments(spec) == ()
            continue
        drawn = [pictures.shared_memory(spec), pictures.taking_order(spec, tiles.example_call(spec, 3))]
        for view in pictures.swizzle_views(spec):
            drawn += [picture for picture in (view.laid_out, view.plain) if picture]
        drawn += [pictures.fragment(fragment) for fragment in fragments.fragments(spec)]
        drawn += [pictures.tile_schedule(spec, *shape) for shape in tiles.examples(spec)]
        for picture in drawn:
            element = ElementTree.fromstring(picture)
            assert element.tag == "svg" and element.get("aria-label") and len(element) > 4, stem


def test_a_picture_as_a_file_brings_its_colours() -> None:
    """It is drawn like the one of the page, stands for itself, and is as large as the shapes and a margin."""
    spec = spec_of("k4_2_d64")
    tile, fragment = swizzles.operands(spec)[0], fragments.fragments(spec)[0]
    for picture in (pictures.banks(tile, plain=False), pictures.banks(tile, plain=True), pictures.owners(fragment)):
        text = picture.file()
        element = ElementTree.fromstring(text)
        assert element.tag == "{http://www.w3.org/2000/svg}svg" and element.get("aria-label") == picture.label
        assert float(element.get("width", 0)) == picture.width + 2 * drawing.MARGIN
        assert all(str(part) in text for part in picture.parts)
        assert set(re.findall(r"var\(--([\w-]+)\)", text)) - {"w"} <= set(re.findall(r"--([\w-]+):", text))
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "@import" not in text


def test_examples_show_all_there_is_to_see() -> None:
    """Every kind of tile that a mask has occurs in the first example or, for the cut last tile, in the second."""
    for stem in tiled_stems():
        spec = spec_of(stem)
        plans = [tiles.schedule(spec, *shape) for shape in tiles.examples(spec)]
        states = {state for plan in plans for state in ("full", "masked", "skipped") if plan.count(state)}
        wanted = {"full", "masked"} if isinstance(spec.mask, NoMask) else {"full", "masked", "skipped"}
        left, right = reach(of_call(spec.mask))
        if left is not None and right is not None and left + right < tile_order.positions(spec) + spec.tile.kv:
            wanted -= {"full"}  # no tile fits into so narrow a window
        assert states >= wanted, stem


def test_the_map_has_every_byte_once() -> None:
    rows = pictures.memory_rows(spec_of("fwd_d128_causal"))
    assert [(row.place.label, row.place.offset) for row in rows[:2]] == [("Q stage 0", 0), ("Q stage 1", 32768)]
    assert all(row.end + 1 == following.place.offset for row, following in itertools.pairwise(rows))


# -- numerics and speeds


def copied(tmp_path: Path, *stems: str) -> Workspace:
    """A workspace with some modules and their records, which say that they are of these very files."""
    here = rendering.CHECKOUT
    hashes = {stem: files.sha256(here.module_path(stem)) for stem in stems}
    for folder in ("specs", "generated/evidence/tuning"):
        (tmp_path / folder).mkdir(parents=True)
    for path in here.specs_dir.glob("*.yaml"):
        (tmp_path / "specs" / path.name).write_bytes(path.read_bytes())
    workspace = Workspace(tmp_path, here.bundled)
    for stem in stems:
        workspace.module_path(stem).write_bytes(here.module_path(stem).read_bytes())
        record = evidence.read(here, stem)
        assert record is not None
        evidence.write(workspace, record.model_copy(update={"source_sha256": hashes[stem]}))
    for record in tuning_records.load(tuning_records.directory(here) / "bf16_d96_full.json"):
        results = [
            result.model_copy(update={"sha256": hashes.get(result.stem, result.sha256)}) for result in record.results
        ]
        tuning_records.save(workspace, [record.model_copy(update={"results": results})])
    return workspace


def test_the_card_is_the_record(tmp_path: Path) -> None:
    workspace = copied(tmp_path, STEM)
    card = numerics.from_evidence(workspace, rendering.variants()[STEM])
    record = evidence.read(workspace, STEM)
    assert record is not None and card.on_gpu and record.gpu in card.origin and record.date in card.origin
    found = {point.name: (point.kernel, point.yardstick, point.kind, point.seq_k) for point in card.points}
    for case in record.cases:
        assert case.o_error and case.o_yardstick
        assert found[case.name][:2] == (case.o_error.relative, case.o_yardstick.relative)
    assert found["ramp"][2:] == ("ramp", 900) and found["outlier"][2:] == ("outlier", 384)
    assert found["long"][2:] == ("normal", 2048)


def test_records_of_an_older_file_are_not_shown(tmp_path: Path) -> None:
    workspace, variant = copied(tmp_path, STEM, "k4_smem_d64"), rendering.variants()[STEM]
    assert numerics.from_evidence(workspace, variant).points
    found = speeds.ladder(workspace, variant)
    assert found is not None and [row[0] for row in found.rows] == ["k4_smem_d64", STEM]
    path = workspace.module_path(STEM)
    path.write_text(path.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
    card = numerics.from_evidence(workspace, variant)
    assert not card.points and "older file" in card.problem
    assert speeds.ladder(workspace, variant) is None


def test_panels_of_an_older_file_are_not_shown(tmp_path: Path) -> None:
    workspace, variant = copied(tmp_path, TUNED), rendering.variants()[TUNED]
    [_] = speeds.panels(workspace, variant)
    path = workspace.module_path(TUNED)
    path.write_text(path.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
    assert speeds.panels(workspace, variant) == ()


def test_small_problems_stand_by_batch_and_eager_ratios_beside(tmp_path: Path) -> None:
    """Whatever their tokens: a panel for each batch and heads, and not one for each length."""
    workspace = copied(tmp_path, TUNED)
    path = tuning_records.directory(workspace) / "bf16_d96_full.json"
    record = tuning_records.load(path)[0]
    for seq_q, seq_k, batch in ((128, 128, 1), (256, 256, 1), (256, 256, 2), (64, 256, 1)):
        problem = record.problem.model_copy(update={"batch": batch, "seq_q": seq_q, "seq_k": seq_k})

        def timed(entry: Any, eager: float, problem: Any = problem) -> Any:
            return entry.model_copy(update=tuning_records.timed(problem, entry.rounds, eager=eager))

        results = [timed(result, 1.0) for result in record.results]
        peers = [timed(peer, 2.0 + number) for number, peer in enumerate(record.peers)]
        fresh = record.model_copy(update={"problem": problem, "results": results, "peers": peers})
        tuning_records.save(workspace, [fresh])
    small = [panel for panel in speeds.panels(workspace, rendering.variants()[TUNED]) if len(panel.shapes) < 6]
    titles = ["21 heads, 64 queries each, batch 1", "21 heads, batch 1", "21 heads, batch 2"]
    assert sorted(panel.title for panel in small) == titles
    assert {shape.eager_ratio for panel in small for shape in panel.shapes} == {2.0}


def test_speeds_are_those_of_the_records(tmp_path: Path) -> None:
    """Others that ran beside the module are shown where their files are the present ones."""
    workspace = copied(tmp_path, TUNED)
    [panel] = speeds.panels(workspace, rendering.variants()[TUNED])
    assert panel.names[0] == (TUNED, "this") and "cuDNN (torch SDPA)" in dict(panel.names)
    assert [shape.problem.seq_k for shape in panel.shapes] == sorted(shape.problem.seq_k for shape in panel.shapes)
    for shape in panel.shapes:
        assert shape.best_peer is not None and shape.ratio is not None
        assert shape.ratio == pytest.approx(shape.own.tflops / shape.best_peer.tflops)
        # The median lies between the slowest and the fastest round, up to the rounding of the records.
        assert all(s.slowest * 0.998 <= s.tflops <= s.fastest * 1.002 for s in shape.speeds)
        assert shape.eager_ratio is not None and shape.eager_ratio > 0


def test_the_sweep_has_every_kind_at_every_length() -> None:
    cases = numerics.sweep(spec_of("fwd_d128_pack4_causal"))
    lengths = sorted({case.seq_k for case in cases})
    assert len(lengths) > 3 and all(b == 2 * a for a, b in itertools.pairwise(lengths))
    assert {(case.distribution, case.seq_k) for case in cases} == set(
        itertools.product(("normal", "outlier", "ramp"), lengths)
    )
    assert all(case.heads_q % 4 == 0 and case.seq_q <= case.seq_k for case in cases)


def test_the_page_says_how_every_scheduler_hands_out_tiles() -> None:
    """Each by name, but for the last arm, which is that of a counter."""
    page = (Path(report.__file__).parent / "page.html.jinja").read_text(encoding="utf-8")
    named = {kind for kind in get_args(Scheduler) if f'spec.scheduler == "{kind}"' in page}
    assert set(get_args(Scheduler)) - named == {"dynamic"}
