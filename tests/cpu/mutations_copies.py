"""Mutations of copies: bytes, phases, stages, fences, waits, and where tiles are cut. See `mutations.py`."""

from __future__ import annotations

from mutations import NUMBERS, Change, Drop, Line, Mutation, group, skip_wait
from mutations_tuning import EXPECT, TRY_WAIT, TRY_WAIT_Q, WARP_SYNC

from fa3gen.cpu.findings import Kind

INIT_FENCE = "fence.mbarrier_init.release.cluster;"
COMMIT = "cp.async.bulk.commit_group;"
LAST_WAIT = "cp.async.bulk.wait_group.read 0;"
EXPECTED = EXPECT + "[%r#], %r#;"


def one_tile() -> list[Mutation]:
    """C1, one copy each way."""
    make = group("c1_folded", "one tile")
    load, store = "cp.async.bulk.tensor.3d.shared::cta...", "cp.async.bulk.tensor.3d.global...{%r#, %r#, %r#}..."
    return [
        make(
            "half of the bytes announced",
            "the tile counts as landed when half of it has",
            Change(Line("mov.b32 %r#, 4096;"), "4096", "2048"),
            reports={Kind.TRANSACTION_COUNT, Kind.UNAWAITED_LOAD},
        ),
        make(
            "more bytes announced than land",
            "the phase never completes",
            Change(Line("mov.b32 %r#, 4096;"), "4096", "4112"),
            reports={Kind.TRANSACTION_COUNT, Kind.DEADLOCK},
        ),
        make(
            "no bytes announced",
            "no thread arrives",
            Drop(Line(EXPECTED)),
            reports={Kind.TRANSACTION_COUNT, Kind.DEADLOCK},
        ),
        make("no wait for the tile", "the store may read what was there before", skip_wait(Line(TRY_WAIT_Q)),
             reports={Kind.UNAWAITED_LOAD, Kind.UNINITIALISED_READ}),
        make(
            "wait for the phase before",
            "which a new barrier counts as over",
            Change(Line(TRY_WAIT_Q), "0, 10000000", "1, 10000000"),
            reports={Kind.UNAWAITED_LOAD, Kind.UNINITIALISED_READ},
        ),
        make(
            "barrier of two arrivals",
            "the second never comes",
            Change(Line("mov.b32 %r#, 1;"), "1;", "2;"),
            reports={Kind.DEADLOCK},
        ),
        make(
            "no fence after the barrier's initialisation",
            "the TMA unit may not see it",
            Drop(Line(INIT_FENCE)),
            reports={Kind.BARRIER_NOT_INITIALISED},
        ),
        make(
            "store not committed",
            "the wait is for committed groups",
            Drop(Line(COMMIT)),
            reports={Kind.UNFINISHED},
        ),
        make("no wait for the store", "the next CTA may take its shared memory", Drop(Line(LAST_WAIT)),
             reports={Kind.UNFINISHED}),
        make(
            "wait for all groups but one",
            "there is only one",
            Change(Line(LAST_WAIT), "read 0", "read 1"),
            reports={Kind.UNFINISHED},
        ),
        make(
            "every CTA loads the first tile",
            "coordinates of another tile",
            Change(Line(load), "{%r#, %r#, %r#}", "{%r#1, %r#1, %r#3}"),
            reports={NUMBERS},
        ),
        make(
            "every CTA stores the first tile",
            "coordinates of another tile",
            Change(Line(store), "{%r#, %r#, %r#}", "{%r#1, %r#1, %r#3}"),
            reports={Kind.GLOBAL_RACE},
        ),
    ]  # fmt: skip


def ring() -> list[Mutation]:
    """C2: several tiles of a CTA, several boxes of a tile."""
    make = group("c2", "ring")
    return [
        make(
            "bytes of one box announced for later tiles",
            "three of the four may still be under way",
            Change(Line("mov.b32 %r#, 16384;", 1, 2), "16384", "4096"),
            reports={Kind.TRANSACTION_COUNT, Kind.UNAWAITED_LOAD},
        ),
        make(
            "the phase never changes",
            "from the second round on, the phase that is waited for is over",
            Drop(Line("xor.b32 %r#, %r#, %r#;")),
            reports={Kind.UNAWAITED_LOAD, Kind.UNINITIALISED_READ, Kind.TRANSACTION_COUNT, Kind.OVERWRITE},
        ),
        make(
            "a stage taken while its store may read it",
            "two stores may still read, and the older one's stage is loaded next",
            Change(Line("cp.async.bulk.wait_group.read 1;"), "read 1", "read 2"),
            reports={Kind.OVERWRITE},
        ),
        make(
            "no wait before a stage is taken",
            "no store has to have read it",
            Drop(Line("cp.async.bulk.wait_group.read 1;")),
            reports={Kind.OVERWRITE},
        ),
        make(
            "a wait for all stores",
            "right, and slower",
            Change(Line("cp.async.bulk.wait_group.read 1;"), "read 1", "read 0"),
            reports=set(),
        ),
        make("stores not committed", "nothing is waited for", Drop(Line(COMMIT)),
             reports={Kind.OVERWRITE, Kind.UNFINISHED}),
        make(
            "one load too many at first",
            "the stage that the first step fills is full already",
            Change(Line("setp.ne.b32 %p#, %r#, 3;"), "3;", "4;"),
            reports={Kind.TRANSACTION_COUNT, Kind.OVERWRITE, Kind.ARRIVAL_COUNT},
        ),
        make("no wait for a tile", "the store may read what was there before", skip_wait(Line(TRY_WAIT)),
             reports={Kind.UNAWAITED_LOAD, Kind.UNINITIALISED_READ}),
        make("no wait at the end", "the next CTA may take its shared memory", Drop(Line(LAST_WAIT)),
             reports={Kind.UNFINISHED}),
        make(
            "lanes do not meet after the wait for stores",
            "another lane than the one that waited may issue the next load",
            Drop(Line(WARP_SYNC, 1, 2)),
            reports={Kind.OVERWRITE},
            missed=True,
        ),
    ]  # fmt: skip


def packed() -> list[Mutation]:
    """C1 for packed rows: where a tile is cut."""
    make = group("c1_packed", "sequences")
    rows = Line("min.s32 %r#, %r#, 8;")
    return [
        make(
            "tiles are not cut where their sequence ends",
            "the last tile of all has rows behind its sequence",
            Change(rows, "min.s32", "max.s32"),
            reports={Kind.GLOBAL_RACE},
        ),
        make(
            "no tile but the last of a sequence has all rows",
            "its last row is left out",
            Change(rows, "8;", "7;"),
            reports={NUMBERS},
        ),
    ]


COPIES: list[Mutation] = [*one_tile(), *ring(), *packed()]
