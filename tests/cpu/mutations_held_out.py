"""The held-out set: written before any of it was run, and never used to improve the checks. See `mutations.py`.

On first contact the model reported 29 of 31 harmful mutations, all by a right name, and none of the three harmless
ones. One of the two it did not report was a matter of the input, another is still not reported; both are marked.
Whoever improves the checks on one of these moves it to the tuning set and writes a new one.
"""

from __future__ import annotations

from mutations import NUMBERS, Change, Drop, Line, Move, Mutation, Shape, SourceMutation, group, move, skip_wait
from mutations_tuning import ARRIVE, EXPECT, LOAD, STORE, TRY_WAIT, WARP_SYNC, WGMMA_WAIT

from fa3gen.cpu.findings import Kind

RACING = {Kind.OVERWRITE, Kind.UNAWAITED_LOAD, Kind.RACE}


def _k2_cp_async() -> list[Mutation]:
    """`k2_cp_async_d64`: lanes copy tiles with cp.async, two stages deep. No mutation of it is in the tuning set."""
    stem = "k2_cp_async_d64"
    copies, stage = group(stem, "cp.async"), group(stem, "stage")
    return [
        copies(
            "one group more may stay in flight",
            "the group of the tile that is read next may be the one in flight",
            Change(Line("cp.async.wait_group 1;"), "1;", "2;"),
            reports={Kind.UNAWAITED_LOAD},
        ),
        copies(
            "bar.sync after the wait dropped",
            "wait_group waits for the thread's own copies, not for other warps'",
            Drop(Line("bar.sync 0;", below="cp.async.wait_group 1;")),
            reports={Kind.UNAWAITED_LOAD, Kind.RACE},
        ),
        copies(
            "bar.sync before the next copies dropped",
            "the copies overwrite a tile that other warps still read",
            Drop(Line("bar.sync 0;", below=WARP_SYNC)),
            reports={Kind.RACE, Kind.OVERWRITE},
        ),
        copies(
            "commit in the loop dropped",
            "the wait counts groups, so it no longer covers the next tile",
            Drop(Line("cp.async.commit_group;", 2, 3)),
            reports={Kind.UNAWAITED_LOAD},
        ),
        copies(
            "rows past the last key are read",
            "the size 0 that keeps cp.async from reading them is gone",
            Change(Line("selp.b32 %r#, 16, 0, %p#;", 5, 16), "16, 0", "16, 16"),
            reports={Kind.OUT_OF_BOUNDS},
        ),
        copies(
            "bar.warp.sync after storing S dropped",
            "lanes read what other lanes of their warp stored",
            Drop(Line(WARP_SYNC, 0, 3)),
            reports={Kind.RACE},
        ),
        stage(
            "stage never changes",
            "the tile being copied is read",
            Drop(Line("xor.b32 %r#, %r#, 1;")),
            reports={Kind.UNAWAITED_LOAD},
        ),
        stage(
            "second K tile copied to the first stage",
            "two copies to one place are in flight",
            Change(Line("add.s32 %r#, %r#, 16384;"), "16384", "8192"),
            reports=RACING,
        ),
    ]


def _k3() -> list[Mutation]:
    """`k3_2_d64` and `k3_3_d64`: rings of two and five stages. No mutation of them is in the tuning set."""
    two, five = group("k3_2_d64", "ring"), group("k3_3_d64", "ring")
    confused = RACING | {Kind.ARRIVAL_COUNT, Kind.TRANSACTION_COUNT, Kind.DEADLOCK}
    return [
        two(
            "parity of the producer does not flip in the loop",
            "a phase of one round before lets the wait through",
            Drop(Line("xor.b32 %r#, %r#, %r#;", 1, 3, above="...", below="selp.b32 %r#, 1, 0, %p#;")),
            reports=confused,
        ),
        two(
            "K lands one stage too high",
            "stage 0's tile goes to stage 1, stage 1's over V",
            Change(Line(LOAD + "[%r#+8192], ...", 1, 2), "+8192]", "+16384]"),
            reports=RACING,
        ),
        two(
            "producer waits at the full barrier",
            "that the last tile has landed does not say that it was read",
            Change(Line("add.s32 %r#, %r#, 59416;", 1, 2), "59416", "59400"),
            reports=confused,
        ),
        two(
            "V not loaded in the prologue",
            "half of the expected bytes never come",
            Drop(Line(LOAD + "[%r#+24576], ...", 0, 2)),
            reports={Kind.TRANSACTION_COUNT, Kind.DEADLOCK},
        ),
        five(
            "consumer's ring is one stage shorter",
            "the fifth tile is never read and its stage never released",
            Change(Line("setp.eq.b32 %p#, %r#, 5;", 2, 3), "5;", "4;"),
            reports=confused | {NUMBERS, Kind.UNFINISHED},
        ),
        five(
            "full barrier of the last stage not initialised",
            "the fifth load signals bytes that are no mbarrier",
            Drop(Line("mbarrier.init.shared.b64 [%r#+108584], %r#;")),
            reports={Kind.BARRIER_NOT_INITIALISED},
        ),
        five(
            "release of the next stage instead of this one",
            "the producer may overwrite a tile that nobody has read",
            Change(Line(ARRIVE + "[%r#+108592], %r#;"), "+108592]", "+108600]"),
            reports=confused | {Kind.BARRIER_NOT_INITIALISED},
        ),
    ]


def _variants() -> list[Mutation]:
    """The window and the fp16 variant of K4.2. No mutation of them is in the tuning set."""
    window, half = group("k4_2_window_d64_window200_70", "window"), group("k4_2_fp16_d64", "numerics")
    pipeline = group("k4_2_window_d64_window200_70", "release")
    return [
        # The module's own shape has no row whose left edge falls into this column: missed on first contact.
        window(
            "left edge of one column off by one",
            "rows whose left edge falls into it see a key too many",
            Change(Line("setp.lt.s32 %p#, %r#, 1;", 0, 2, below="add.s32 %r#, %r#, 64;"), ", 1;", ", 2;"),
            reports={NUMBERS},
            shape=Shape(1, 100, 510, 2, 1),
        ),
        window(
            "first tile of the window skipped",
            "keys at the left edge are never visited",
            Change(Line("add.s32 %r#, %r#, -200;"), "-200", "-136"),
            reports={NUMBERS},
        ),
        pipeline(
            "K released before its products are waited for",
            "TMA overwrites K that wgmma still reads",
            move(Line(WGMMA_WAIT, 0, 2), Line("$L__BB0_#:", below=ARRIVE + "[%r#+49176], %r#;")),
            reports={Kind.OVERWRITE},
        ),
        half(
            "two columns of P exchanged",
            "the halves of a packed register of P are the wrong way round",
            Change(
                Line("cvt.rn.f16x2.f32 %r#, %r#, %r#;", 0, 15, above="cvt.rn.f16x2.f32 ..."), "%r#, %r#;", "%r#2, %r#1;"
            ),
            reports={NUMBERS},
        ),
        half(
            "row maximum over half of the lanes",
            "lanes of one row scale by different maxima",
            Change(Line("shfl.sync.bfly.b32 %r#, %r#, 1, 31, -1;", 0, 4), ", 1, 31", ", 2, 31"),
            reports={NUMBERS},
        ),
        half(
            "one k step reads bfloat16",
            "the operands are float16",
            Change(
                Line("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 ...", 1, 8), "f32.f16.f16", "f32.bf16.bf16"
            ),
            reports={NUMBERS},
        ),
    ]


def _more_of_tuned_kernels() -> list[Mutation]:
    """Other facts of kernels that the tuning set mutates too."""
    smem, scalar, main = group("k4_smem_d64", "P handoff"), group("k4_1_d64", "ring"), group("k4_2_d64", "various")
    return [
        smem(
            "warpgroup 0 uses barrier 0",
            "warpgroup 1 may already stand at bar.sync 0 of all threads",
            Change(Line("add.s32 %r#, %r#, 1;", above="bar.sync %r#, 128;"), ", 1;", ", 0;"),
            reports={Kind.ARRIVAL_COUNT, Kind.DEADLOCK, Kind.RACE},
        ),
        smem(
            "V read as K-major",
            "TMA leaves V with the head dimension contiguous",
            Change(
                Line("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {...}, %rd#, %rd#, p, 1, 1, 0, 1;", 0, 4),
                "1, 1, 0, 1;",
                "1, 1, 0, 0;",
            ),
            reports={NUMBERS, Kind.UNINITIALISED_READ, Kind.UNAWAITED_LOAD},
        ),
        smem(
            "descriptor of P points at the other warpgroup's",
            "P of other rows, or what lies behind P",
            Change(Line("add.s32 %r#, %r#, 49152;", 1, 2), "49152", "57344"),
            reports={NUMBERS, Kind.OUT_OF_BOUNDS, Kind.RACE, Kind.MISSING_PROXY_FENCE, Kind.UNINITIALISED_READ},
        ),
        # Warp 0 loads K after its own wait_group. The model takes a product to be complete for the whole warpgroup then
        # (PTX ISA, "wgmma.commit_group": groups are per warpgroup), so to it nothing is read any more.
        scalar(
            "K loaded without waiting for the stage to be empty",
            "three warps have not said that their part of the product has read K",
            skip_wait(Line(TRY_WAIT, 4, 6)),
            reports={Kind.OVERWRITE, Kind.RACE},
            missed=True,
        ),
        scalar(
            "last k step of Q reads the one before",
            "columns 32 to 47 of Q count twice, 48 to 63 not at all",
            Change(Line("add.s64 %rd#, %rd#, 4611686293305360390;"), "0390", "0388"),
            reports={NUMBERS},
        ),
        main(
            "O of the second head stored over the first",
            "rows of O are never written",
            Change(Line(STORE), "%r#, %r#, %r#}", "%r#1, 0, %r#3}"),
            reports={NUMBERS, Kind.GLOBAL_RACE},
        ),
        main(
            "tail of the keys not masked",
            "keys past the last one count with a score of zero",
            Change(Line("setp.lt.s32 %p#, %r#, %r#;"), "setp.lt", "setp.le"),
            reports={NUMBERS},
        ),
        main(
            "every tile masked",
            "no harm: in a full tile the mask leaves every score as it is",
            Drop(Line("@%p# bra $L__BB0_#;", below="setp.lt.s32 %p#, %r#, %r#;")),
            reports=set(),
        ),
        main(
            "store of O waited for altogether",
            "no harm: wait_group waits for more than wait_group.read",
            Change(Line("cp.async.bulk.wait_group.read 0;"), ".read", ""),
            reports=set(),
        ),
        main(
            "Q's bytes expected after its load",
            "no harm: the pending arrival keeps the phase open meanwhile",
            Move(
                Line("elect.sync %r#|%p#, -1;", 4, 14),
                Line("$L__BB0_#:", below=EXPECT + "[%r#], %r#;"),
                Line("$L__BB0_#:", below=LOAD + "[%r#], ..."),
            ),
            reports=set(),
        ),
    ]


def _sources() -> list[SourceMutation]:
    """Facts changed in the Python source of a module, which the DSL then compiles."""
    return [
        SourceMutation(
            "the ring refilled with the state of its readers",
            "k4_2_d64",
            "stage",
            "v_ring, fill, n_block - KV_STAGES)",
            "v_ring, drain, n_block - KV_STAGES)",
            "drain has the readers' phase: to wait for an empty stage with it is to wait for the stage to be filled",
            frozenset({Kind.DEADLOCK}),
        ),
        SourceMutation(
            "ring counts half of the consumer warps",
            "k4_smem_d64",
            "arrival count",
            "pipeline.CooperativeGroup(pipeline.Agent.Thread, THREADS // 32)",
            "pipeline.CooperativeGroup(pipeline.Agent.Thread, THREADS // 64)",
            "a stage counts as empty when four of eight warps have read it",
            frozenset({Kind.ARRIVAL_COUNT, Kind.OVERWRITE, Kind.RACE}),
        ),
        SourceMutation(
            "O not moved to the new maximum",
            "k4_2_fp16_d64",
            "numerics",
            "acc_O_rows[r, c] = acc_O_rows[r, c] * rescale",
            "acc_O_rows[r, c] = acc_O_rows[r, c] * 1.0",
            "tiles before a new maximum weigh too much in O, but not in the sum",
            frozenset({NUMBERS}),
        ),
    ]


HELD_OUT: list[Mutation | SourceMutation] = [
    *_k2_cp_async(),
    *_k3(),
    *_variants(),
    *_more_of_tuned_kernels(),
    *_sources(),
]
