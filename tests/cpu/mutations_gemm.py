"""Mutations of GEMM kernels: bytes, phases, stages, fences, waits, and the end of the sum. See `mutations.py`.

Written before any of it was run. On first contact the model reported all harmful ones but one, of a kind that it is
known not to see. One had been thought to be harmful and was not; to five the model gave a better name than was wanted.
"""

from __future__ import annotations

from mutations import NUMBERS, Change, Drop, Line, Mutation, group, skip_wait
from mutations_tuning import ARRIVE, PROXY_FENCE, TRY_WAIT, WARP_SYNC
from rendering import variants

from fa3gen.cpu.findings import Kind
from fa3gen.cpu.places import SharedPlaces


def _offset(stem: str, name: str) -> int:
    """Of stage 0 of the full or empty barriers."""
    return next(place.offset for place in SharedPlaces.of(variants()[stem].spec).barriers if place.name == name)


def _release(stem: str) -> str:
    """How a warp gives a stage back."""
    return ARRIVE + f"[%r#+{_offset(stem, 'ab_empty')}], %r#;"


PRODUCER, FIRST, LATER = (Line(TRY_WAIT, which, 3) for which in range(3))
WAIT = "wgmma.wait_group.sync.aligned"
STORES_READ = "cp.async.bulk.wait_group.read 1;"


def ring() -> list[Mutation]:
    """G3: bytes, arrivals and phases of the ring of A and B."""
    make = group("g3", "ring")
    return [
        make(
            "B not counted",
            "the stage counts as full when the 16,384 bytes of A, or as many of B, have landed",
            Change(Line("mov.b32 %r#, 49152;"), "49152", "16384"),
            reports={Kind.TRANSACTION_COUNT, Kind.UNAWAITED_LOAD},
        ),
        make(
            "one byte too many",
            "the phase never completes",
            Change(Line("mov.b32 %r#, 49152;"), "49152", "49153"),
            reports={Kind.TRANSACTION_COUNT},
        ),
        make(
            "empty with one arrival too few",
            "a stage counts as read before the eighth warp has read it",
            Change(Line("mov.b32 %r#, 8;"), "8;", "7;"),
            reports={Kind.OVERWRITE, Kind.ARRIVAL_COUNT, Kind.RACE, Kind.TRANSACTION_COUNT},
        ),
        make(
            "empty with one arrival too many",
            "the ninth never comes",
            Change(Line("mov.b32 %r#, 8;"), "8;", "9;"),
            reports={Kind.DEADLOCK},
        ),
        make(
            "stages loaded without waiting for them to be empty",
            "the products of an earlier step may still read them",
            skip_wait(PRODUCER),
            reports={Kind.OVERWRITE, Kind.ARRIVAL_COUNT, Kind.TRANSACTION_COUNT, Kind.RACE},
        ),
        make(
            "the producer begins with the other phase",
            "it waits for stages that nobody has had yet",
            Change(Line("mov.b32 %r#, 1;", above="mov.u32 %r#, %nctaid.x;"), "1;", "0;"),
            reports={Kind.DEADLOCK},
        ),
        make(
            "the first step not waited for",
            "its products read A and B while they land",
            skip_wait(FIRST),
            reports={Kind.UNAWAITED_LOAD, Kind.UNINITIALISED_READ},
        ),
        make(
            "later steps not waited for",
            "their products read A and B while they land",
            skip_wait(LATER),
            reports={Kind.UNAWAITED_LOAD},
        ),
        make(
            "init fence dropped",
            "TMA may not see the barriers initialised",
            Drop(Line("fence.mbarrier_init.release.cluster;")),
            reports={Kind.BARRIER_NOT_INITIALISED},
        ),
        make(
            "CTA barrier after the barriers' initialisation dropped",
            "warps wait on barriers that are none yet",
            Drop(Line("bar.sync 0;")),
            reports={Kind.BARRIER_NOT_INITIALISED},
        ),
    ]


def products() -> list[Mutation]:
    """G3: groups of products in flight, and the stages that they read."""
    make = group("g3", "products")
    return [
        make(
            "a stage released early",
            "with a group more in flight, the step before still reads the stage that is given back",
            Change(Line(f"{WAIT} 1;"), "1;", "2;"),
            reports={Kind.OVERWRITE},
        ),
        make(
            "D read without waiting for the last products",
            "the accumulators are still written",
            Change(Line(f"{WAIT} 0;"), "0;", "1;"),
            reports={Kind.REGISTER_IN_FLIGHT},
        ),
        make(
            "a stage released without a wait",
            "its products are still in flight",
            Drop(Line(f"{WAIT} 1;")),
            reports={Kind.OVERWRITE},
        ),
        make(
            "first fence dropped",
            "the epilogue of the tile before read and wrote registers without order",
            Drop(Line("wgmma.fence.sync.aligned;", 0, 2)),
            reports={Kind.MISSING_WGMMA_FENCE},
        ),
        make(
            "the stages of the last step kept",
            "the producer waits for ever for the next tile",
            Drop(Line(_release("g3"), 1, 2)),
            reports={Kind.DEADLOCK, Kind.ARRIVAL_COUNT},
        ),
    ]


def epilogue() -> list[Mutation]:
    """G3: parts of D through shared memory."""
    make = group("g3", "epilogue")
    return [
        make(
            "proxy fence of the first part dropped",
            "TMA may not see what stmatrix wrote",
            Drop(Line(PROXY_FENCE, 0, 4)),
            reports={Kind.MISSING_PROXY_FENCE},
        ),
        make(
            "bar.warp.sync after the first part dropped",
            "one lane stores what others may not have written",
            Drop(Line(WARP_SYNC, 1, 8)),
            reports={Kind.RACE, Kind.MISSING_PROXY_FENCE},
            missed=True,  # the model does not see where lanes of one warp have to meet around a bulk copy
        ),
        make(
            "the third part written over the first",
            "TMA may still read it",
            Drop(Line(STORES_READ, 2, 4)),
            reports={Kind.OVERWRITE},
        ),
        make(
            "stores not waited for at the end",
            "shared memory ends before they have read it",
            Drop(Line("cp.async.bulk.wait_group.read 0;")),
            reports={Kind.UNFINISHED},
        ),
        make(
            "tiles dealt out one too far",
            "a tile is nobody's",
            Change(Line("mov.u32 %r#, %nctaid.x;", 1, 2), "%nctaid.x", "2"),
            reports={NUMBERS, Kind.DEADLOCK, Kind.UNFINISHED, Kind.ARRIVAL_COUNT, Kind.NOT_FINISHED},
        ),
    ]


def registers() -> list[Mutation]:
    """A read by ldmatrix: one lane gives a stage back for all, and products read registers."""
    make = group("g3_registers", "registers")
    return [
        make(
            "bar.warp.sync after reading A dropped",
            "one lane gives back what others may not have read",
            Drop(Line(WARP_SYNC, 1, 10)),
            reports={Kind.OVERWRITE, Kind.RACE},
        ),
        make(
            "A of the next step read too early",
            "products of the step before still read the registers",
            Change(Line(f"{WAIT} 0;", 0, 2), "0;", "1;"),
            reports={Kind.REGISTER_IN_FLIGHT, Kind.OVERWRITE},  # the stage is given back early as well
        ),
    ]


def scalar() -> list[Mutation]:
    """G1: groups of cp.async, the CTA's barrier, and zeros beyond the ends."""
    make = group("g1", "scalar")
    return [
        make(
            "a group too few waited for",
            "the step is multiplied while it lands",
            Change(Line("cp.async.wait_group 1;"), "1;", "2;"),
            reports={Kind.UNAWAITED_LOAD, Kind.RACE},
        ),
        make(
            "CTA barrier dropped",
            "other threads' copies have not landed for this one, and it overwrites what others read",
            Drop(Line("bar.sync 0;")),
            reports={Kind.UNAWAITED_LOAD, Kind.RACE, Kind.OVERWRITE},
        ),
        make(
            "16 bytes copied where fewer exist",
            "what lies beyond the end of k, NaN here, is added",
            Change(Line("cp.async.cg.shared.global [%r#], [%rd#], 16, %r#;", 0, 18), ", 16, %r#;", ", 16, 16;"),
            reports={NUMBERS, Kind.OUT_OF_BOUNDS},
        ),
    ]


def cooperative() -> list[Mutation]:
    """G2: D in the place of A."""
    make = group("g2", "cooperative")
    return [
        make(
            "CTA barrier before D is written dropped",
            "harmless here: rows of D and of A are 128 bytes, and a warp's rows of D lie over its own rows of A",
            Drop(Line("bar.sync 0;", 1, 3)),
            reports=set(),
        ),
        make(
            "D stored before all have written it",
            "warp 0 stores what others may not have written",
            Drop(Line("bar.sync 0;", 2, 3)),
            reports={Kind.RACE, Kind.MISSING_PROXY_FENCE, Kind.UNINITIALISED_READ},
        ),
        make(
            "later stages announced with A only",
            "16,384 of 32,768 bytes complete the phase",
            Change(Line("mov.b32 %r#, 32768;", 1, 2), "32768", "16384"),
            reports={Kind.TRANSACTION_COUNT, Kind.UNAWAITED_LOAD},
        ),
    ]


def two_levels() -> list[Mutation]:
    """FP8, each step summed by itself: the tensor core begins anew, and threads add what it leaves in registers."""
    make = group("g3_fp8_two_levels", "two levels")
    return [
        make(
            "a promotion dropped",
            "one register of a step's sums is never added to D",
            Drop(Line("add.f32 %r#, %r#, %r#;", 1, 64)),
            reports={NUMBERS},
        ),
        make(
            "the first products of a step do not begin anew",
            "they add to the sums of the step before, which D has already",
            Change(Line("mov.b32 %r#, 0;", below="wgmma.fence.sync.aligned;"), "0;", "1;"),
            reports={NUMBERS, Kind.UNINITIALISED_REGISTER},
        ),
        make(
            "later products of a step begin anew",
            "of 128 of k only the last 32 are left",
            Change(Line("mov.b32 %r#, 1;", below="add.s64 %rd#, %rd#, 2;"), "1;", "0;"),
            reports={NUMBERS},
        ),
        make(
            "sums added without waiting for the products",
            "the tensor core still writes them, and the stage is given back while it is read",
            Change(Line(f"{WAIT} 0;"), "0;", "1;"),
            reports={Kind.REGISTER_IN_FLIGHT, Kind.OVERWRITE},
        ),
        make(
            "fence of a step dropped",
            "threads have read the registers that its products write, without order",
            Drop(Line("wgmma.fence.sync.aligned;")),
            reports={Kind.MISSING_WGMMA_FENCE},
        ),
        make(
            "no stage given back",
            "the producer waits for ever when it has filled all",
            Drop(Line(_release("g3_fp8_two_levels"))),
            reports={Kind.DEADLOCK},
        ),
    ]


def eight_bit() -> list[Mutation]:
    """FP8 with one level: the bytes of a stage, and where products read them."""
    make = group("g3_fp8", "8 bits")
    return [
        make(
            "bytes of a stage counted as of 16 bits",
            "twice as many as land: the phase never completes",
            Change(Line("mov.b32 %r#, 49152;"), "49152", "98304"),
            reports={Kind.TRANSACTION_COUNT, Kind.DEADLOCK},
        ),
        make(
            "the first products of a tile do not begin anew",
            "they add to what is in the registers: the tile before",
            Change(Line("mov.b32 %r#, 0;", below="wgmma.fence.sync.aligned;"), "0;", "1;"),
            reports={NUMBERS, Kind.UNINITIALISED_REGISTER},
        ),
        make(
            "A read 16 elements further on instead of 32",
            "16 of k are multiplied twice, with the wrong half of B, and others never",
            Change(Line("add.s64 %rd#, %rd#, 2;", 0, 4), ", 2;", ", 1;"),
            reports={NUMBERS},
        ),
        make(
            "a stage released early",
            "with a group more in flight, the step before still reads the stage that is given back",
            Change(Line(f"{WAIT} 1;"), "1;", "2;"),
            reports={Kind.OVERWRITE},
        ),
    ]


GEMM: list[Mutation] = [
    *ring(),
    *products(),
    *epilogue(),
    *registers(),
    *scalar(),
    *cooperative(),
    *two_levels(),
    *eight_bit(),
]
