"""Mutations of a persistent kernel: what it has beyond the kernels of the other two sets. See `mutations.py`.

Written before any of it was run, and never used to improve the checks. On first contact the model reported all harmful
mutations but two, by a right name. One had been thought to be harmful and was not, an arrival for nobody at the end:
today the kernel makes it. Mutations of the counter after which a CTA draws for ever are left out: it takes the model
minutes to call that no end in sight.
"""

from __future__ import annotations

from mutations import NUMBERS, Change, Drop, Line, Mutation, Shape, SourceMutation, group, move, skip_wait
from mutations_tuning import ARRIVE, PROXY_FENCE, TRY_WAIT, TRY_WAIT_Q, WARP_SYNC, WGMMA_WAIT
from rendering import source, variants

from fa3gen.cpu.findings import Kind
from fa3gen.cpu.places import SharedPlaces

STEM = "fwd_d64_causal_short"
READ_WAIT = "cp.async.bulk.wait_group.read 0;"
OFFSET = {place.name: place.offset for place in reversed(SharedPlaces.of(variants()[STEM].spec).barriers)}  # of stage 0
RELEASE_Q, RELEASE_K, RELEASE_V = (ARRIVE + f"[%r#+{OFFSET[f'{ring}_empty']}], %r#;" for ring in "qkv")
# Waits in the order of the code, of 13: V's producer for V to be empty and for a tile to be there; the other one for Q,
# K and tiles to be empty; the consumers for K and V in the two loops, for a tile, for V, the next Q and its first K.
Q_EMPTY, TILE_EMPTY, NEXT_Q, NEXT_K = (Line(TRY_WAIT, which, 13) for which in (2, 4, 11, 12))


def _tiles() -> list[Mutation]:
    """Tiles: drawn by one warp, whose coordinates it tells 9 others through two slots."""
    tiles, order = group(STEM, "tiles"), group(STEM, "order")
    slots = {Kind.RACE, Kind.ARRIVAL_COUNT}
    return [
        tiles(
            "bar.warp.sync of a consumer before it gives back the slot dropped",
            "one lane gives back what others may not have read",
            Drop(Line(WARP_SYNC, 1, 4)),
            reports={Kind.RACE},
        ),
        tiles(
            "bar.warp.sync of V's producer before it gives back the slot dropped",
            "one lane gives back what others may not have read",
            Drop(Line(WARP_SYNC, 0, 4)),
            reports={Kind.RACE},
        ),
        tiles(
            "slots with one arrival too few",
            "a slot counts as empty before the ninth warp has read it",
            Change(Line("mov.b32 %r#, 9;"), "9;", "8;"),
            reports=slots,
        ),
        tiles(
            "slots with one arrival too many",
            "nine warps read a slot, the tenth arrival never comes",
            Change(Line("mov.b32 %r#, 9;"), "9;", "10;"),
            reports={Kind.DEADLOCK},
        ),
        tiles(
            "a tile told without waiting for the slot",
            "the tile before it may not have been read",
            skip_wait(TILE_EMPTY),
            reports=slots,
        ),
        tiles(
            "coordinates written after the slot is said to be full",
            "the warps that are told may read those of the tile before",
            move(Line("st.shared.v4.b32 ..."), Line(ARRIVE + f"[%r#+{OFFSET['tile_full']}], %r#;")),
            reports={Kind.RACE, Kind.UNINITIALISED_READ},
        ),
        tiles(
            "counter left as the last draw leaves it",
            "the next launch of the stream finds no tile to draw",
            Drop(Line("st.global.b32 [%rd#], 0;")),
            reports={NUMBERS},
        ),
        order(
            "the drawn tiles begin one too late",
            "a tile is nobody's",
            Change(Line("mov.u32 %r#, %nctaid.x;"), "%nctaid.x", "2"),
            reports={NUMBERS},
        ),
    ]


def _from_tile_to_tile() -> list[Mutation]:
    """Q, K and V where one tile of queries ends and the next begins."""
    wait, release = group(STEM, "wait"), group(STEM, "release")
    return [
        wait(
            "next Q loaded without waiting for its buffer",
            "the products of the tile before the last still read it",
            skip_wait(Q_EMPTY),
            reports={Kind.OVERWRITE, Kind.RACE, Kind.ARRIVAL_COUNT, Kind.TRANSACTION_COUNT},
        ),
        wait(
            "next Q not waited for",
            "the first product of the next tile reads it while it lands",
            skip_wait(NEXT_Q),
            reports={Kind.UNAWAITED_LOAD},
        ),
        wait(
            "first K of the next tile not waited for",
            "the first product of the next tile reads it while it lands",
            skip_wait(NEXT_K),
            reports={Kind.UNAWAITED_LOAD},
        ),
        wait(
            "very first Q not waited for",
            "the product before all tiles reads it while it lands",
            skip_wait(Line(TRY_WAIT_Q, 0, 2)),
            reports={Kind.UNAWAITED_LOAD},
        ),
        release(
            "K of the next tile given back before its product is waited for",
            "wgmma reads K through the epilogue; the arrival lets TMA overwrite it",
            move(Line(WGMMA_WAIT, 3, 4), Line("$L__BB0_#:", 2, 3, below=RELEASE_K)),
            reports={Kind.OVERWRITE},
            shape=Shape(1, 200, 500, 1, 1),  # more tiles of keys than the ring has stages
        ),
        release(
            "last V given back before its product is waited for",
            "wgmma reads V until wait_group returns; the arrival lets TMA overwrite it",
            move(
                Line(WGMMA_WAIT.replace("0;", "1;"), 2, 3),
                Line("$L__BB0_#:", 2, 3, below=RELEASE_V),
            ),
            reports={Kind.OVERWRITE},
        ),
        release(
            "release of Q dropped",
            "the producer waits for eight arrivals that never come",
            Drop(Line(RELEASE_Q)),
            reports={Kind.DEADLOCK},
        ),
    ]


def _output() -> list[Mutation]:
    """O gathered in a buffer of its own, warp by warp, and stored while the next tile goes on."""
    store = group(STEM, "output")
    return [
        store(
            "store of the tile before not waited for",
            "stmatrix overwrites what TMA still reads",
            Drop(Line(READ_WAIT, 0, 2)),
            reports={Kind.OVERWRITE, Kind.RACE},
        ),
        # To the model stmatrix and the bulk copies are one instruction of the warp: all its lanes have executed what is
        # before it, and each lane copies, waits and fences for itself. The last is so in the PTX, too; that the lanes
        # meet is what PTX asks for (PTX ISA, "Memory Consistency Model"), and what no execution shows.
        store(
            "bar.warp.sync after that wait dropped",
            "one lane has waited for the store, the others overwrite what it reads",
            Drop(Line(WARP_SYNC, 2, 4)),
            reports={Kind.OVERWRITE, Kind.RACE},
            missed=True,
        ),
        store(
            "proxy fence dropped",
            "what stmatrix wrote is not visible to TMA",
            Drop(Line(PROXY_FENCE)),
            reports={Kind.MISSING_PROXY_FENCE},
        ),
        store(
            "bar.warp.sync after the proxy fence dropped",
            "the lane that stores has not seen the fences of the others",
            Drop(Line(WARP_SYNC, 3, 4)),
            reports={Kind.RACE, Kind.MISSING_PROXY_FENCE},
            missed=True,
        ),
        store(
            "last store not waited for",
            "shared memory goes to another CTA while TMA reads it",
            Drop(Line(READ_WAIT, 1, 2)),
            reports={Kind.UNFINISHED},
        ),
    ]


def _sources() -> list[SourceMutation]:
    """Facts changed in the Python source."""
    text, release = source(STEM), "        q_ring.consumer_release(q_drain)  # this warp has read Q\n"
    loops = text[text.index("        # Tiles of keys with an edge of the mask") : text.index(release)]
    return [
        SourceMutation(
            "Q given back before its last products",
            STEM,
            "release",
            loops + release,
            release + loops,
            "TMA may overwrite Q, which the loops over tiles of keys multiply with",
            frozenset({Kind.OVERWRITE, Kind.RACE}),
        ),
    ]


PERSISTENT: list[Mutation | SourceMutation] = [*_tiles(), *_from_tile_to_tile(), *_output(), *_sources()]
