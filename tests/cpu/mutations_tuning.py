"""The tuning set: mutations that the checks of the model may be, and were, improved on. See `mutations.py`."""

from __future__ import annotations

from mutations import NUMBERS, Change, Drop, Line, Move, Mutation, group, move, skip_wait

from fa3gen.cpu.findings import Kind

EXPECT = "mbarrier.arrive.expect_tx.shared.b64 %rd#, "
ARRIVE = "mbarrier.arrive.shared.b64 %rd#, "
LOAD = "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
STORE = "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint ..."
TRY_WAIT = "mbarrier.try_wait.parity.shared.b64 P1, [%r#], %r#, 10000000;"
TRY_WAIT_Q = "mbarrier.try_wait.parity.shared.b64 P1, [%r#], 0, 10000000;"
INIT_FENCE = "fence.mbarrier_init.release.cluster;"
PROXY_FENCE = "fence.proxy.async.shared::cta;"
WGMMA_FENCE = "wgmma.fence.sync.aligned;"
WGMMA_COMMIT = "wgmma.commit_group.sync.aligned;"
WGMMA_WAIT = "wgmma.wait_group.sync.aligned 0;"
WARP_SYNC = "bar.warp.sync -1;"


def _k4_2() -> list[Mutation]:
    """The pipeline of `k4_2_d64`: warp 0 loads for two warpgroups; K and V have a ring of two stages each."""
    stem = "k4_2_d64"
    init, barrier = group(stem, "initialisation"), group(stem, "barrier")
    wait, release = group(stem, "wait"), group(stem, "release")
    size, count = group(stem, "byte count"), group(stem, "arrival count")
    return [
        init(
            "init fence dropped",
            "fence.mbarrier_init makes mbarrier.init visible to the async proxy; the loads' complete_tx need that",
            Drop(Line(INIT_FENCE)),
            reports={Kind.BARRIER_NOT_INITIALISED},
        ),
        barrier(
            "bar.sync after the initialisation dropped",
            "seven warps wait on mbarriers that nothing orders after warp 0's mbarrier.init",
            Drop(Line("bar.sync 0;", below=INIT_FENCE)),
            reports={Kind.BARRIER_NOT_INITIALISED},
        ),
        size(
            "Q expects half its bytes",
            "the phase completes when half of Q is there: complete_tx goes past the expectation",
            Change(Line(EXPECT + "[%r#], %r#;"), ", %r#;", ", 8192;"),
            reports={Kind.TRANSACTION_COUNT},
        ),
        size(
            "K expects twice its bytes in the prologue",
            "the phase waits for 8192 bytes that no load brings",
            Change(Line(EXPECT + "[%r#+49160], %r#;", 0, 2), ", %r#;", ", 16384;"),
            reports={Kind.TRANSACTION_COUNT, Kind.DEADLOCK},
        ),
        release(
            "V's expect_tx dropped in the loop",
            "the only arrival of V's full barrier is missing: its phase never completes, and bytes land unexpected",
            Drop(Line(EXPECT + "[%r#+49192], %r#;", 1, 2)),
            reports={Kind.TRANSACTION_COUNT, Kind.DEADLOCK},
        ),
        wait(
            "Q not waited for",
            "the products read Q while it lands",
            skip_wait(Line(TRY_WAIT_Q)),
            reports={Kind.UNAWAITED_LOAD},
        ),
        wait(
            "K not waited for",
            "the products read K while it lands",
            skip_wait(Line(TRY_WAIT, 2, 6)),
            reports={Kind.UNAWAITED_LOAD},
        ),
        wait(
            "answer of the wait for V ignored",
            "mbarrier.try_wait may return false when its time limit passes, before the phase completes",
            Drop(Line("bra.uni LAB_WAIT;", 4, 7)),
            reports={Kind.UNAWAITED_LOAD},
        ),
        wait(
            "V loaded without waiting for the stage to be empty",
            "only warp 0 is known to have read the stage, seven other warps may still multiply with it",
            skip_wait(Line(TRY_WAIT, 5, 6)),
            reports={Kind.OVERWRITE, Kind.RACE},
        ),
        release(
            "release of K dropped",
            "the producer waits for eight arrivals that never come",
            Drop(Line(ARRIVE + "[%r#+49176], %r#;")),
            reports={Kind.DEADLOCK},
        ),
        release(
            "V released before its products are waited for",
            "wgmma reads V until wait_group returns; the arrival lets TMA overwrite it",
            move(Line(WGMMA_WAIT, 1, 2), Line("$L__BB0_#:", below=ARRIVE + "[%r#+49208], %r#;")),
            reports={Kind.OVERWRITE},
        ),
        count(
            "empty barrier of K with one arrival too few",
            "the stage counts as empty before the eighth warp has read it",
            Change(Line("mov.b32 %r#, 8;", 0, 2, above="mbarrier.init.shared.b64 ..."), "8;", "7;"),
            reports={Kind.OVERWRITE, Kind.RACE, Kind.ARRIVAL_COUNT},
        ),
        count(
            "empty barrier of V with one arrival too many",
            "nine arrivals never come, there are eight warps",
            Change(Line("mov.b32 %r#, 8;", 1, 2, above="mbarrier.init.shared.b64 ..."), "8;", "9;"),
            reports={Kind.DEADLOCK},
        ),
        count(
            "all lanes expect Q's bytes",
            "32 arrivals where mbarrier.init announced one",
            Drop(Line("@%p# bra $L__BB0_#;", above="mov.b32 %r#, 16384;")),
            reports={Kind.ARRIVAL_COUNT, Kind.TRANSACTION_COUNT},
        ),
        count(
            "all lanes release K",
            "32 arrivals of a warp where mbarrier.init announced one",
            Drop(Line("@%p# bra $L__BB0_#;", below=WGMMA_WAIT, which=0, of=2)),
            reports={Kind.ARRIVAL_COUNT},
        ),
        count(
            "all lanes load Q",
            "32 loads, and bytes of one are expected",
            Drop(Line("@%p# bra $L__BB0_#;", below="not.pred %p#, %p#;", which=5, of=14)),
            reports={Kind.TRANSACTION_COUNT, Kind.UNAWAITED_LOAD},
        ),
    ]


def _k4_2_products() -> list[Mutation]:
    """The products, phases, stages and the epilogue of `k4_2_d64`."""
    stem = "k4_2_d64"
    wgmma, phase, stage = group(stem, "wgmma"), group(stem, "phase"), group(stem, "stage")
    place, descriptor, epilogue = group(stem, "coordinate"), group(stem, "descriptor"), group(stem, "epilogue")
    other = {Kind.OVERWRITE, Kind.UNAWAITED_LOAD, Kind.RACE}
    return [
        wgmma(
            "wait for S dropped",
            "the softmax reads accumulators of a product in flight",
            Drop(Line(WGMMA_WAIT, 0, 2)),
            reports={Kind.REGISTER_IN_FLIGHT},
        ),
        wgmma(
            "one group may stay in flight after P V",
            "O is rescaled and V given back while the product runs",
            Change(Line(WGMMA_WAIT, 1, 2), "0;", "1;"),
            reports={Kind.REGISTER_IN_FLIGHT, Kind.OVERWRITE},
        ),
        wgmma(
            "commit of Q K^T dropped",
            "wait_group waits for committed groups only, so S is read in flight",
            Drop(Line(WGMMA_COMMIT, 0, 2)),
            reports={Kind.REGISTER_IN_FLIGHT},
        ),
        wgmma(
            "wgmma.fence before Q K^T dropped",
            "the accumulators were read by other instructions since the last fence",
            Drop(Line(WGMMA_FENCE, 0, 2)),
            reports={Kind.MISSING_WGMMA_FENCE},
        ),
        wgmma(
            "wgmma.fence before P V dropped",
            "O was rescaled and P written by other instructions since the last fence",
            Drop(Line(WGMMA_FENCE, 1, 2)),
            reports={Kind.MISSING_WGMMA_FENCE},
        ),
        phase(
            "parity of the consumer never flips",
            "the old phase of the full barrier lets every later wait through",
            Drop(Line("xor.b32 %r#, %r#, %r#;", 2, of=7)),
            reports=other | {Kind.DEADLOCK},
        ),
        phase(
            "parity of the producer does not flip in the loop",
            "the wait for an empty stage is let through by a phase of one round before",
            Drop(Line("xor.b32 %r#, %r#, %r#;", 1, of=7)),
            reports=other | {Kind.ARRIVAL_COUNT, Kind.TRANSACTION_COUNT, Kind.DEADLOCK},
        ),
        stage(
            "consumer's ring is one stage longer",
            "stage 2 does not exist: its full barrier is an empty barrier",
            Change(Line("setp.eq.b32 %p#, %r#, 2;", 2, 3), "2;", "3;"),
            reports=other | {Kind.DEADLOCK, Kind.ARRIVAL_COUNT, Kind.TRANSACTION_COUNT},
        ),
        stage(
            "K lands half a stage too low",
            "the load overwrites half of the other stage and leaves half of its own stale",
            Change(Line("shl.b32 %r#, %r#, 13;", 2, 4), "13;", "12;"),
            reports=other,
        ),
        stage(
            "descriptor advances half a stage",
            "the products read half of the other stage",
            Change(Line("shl.b32 %r#, %r#, 9;"), "9;", "8;"),
            reports={NUMBERS, *other},
        ),
        stage(
            "V signals K's barrier",
            "K's phase gets bytes that it does not expect, V's gets none",
            Change(Line(LOAD + "[%r#+32768], ...", 1, 2), "[%r#+49192]", "[%r#1+49160]"),
            reports={Kind.TRANSACTION_COUNT, Kind.DEADLOCK},
        ),
        place(
            "K of the wrong tile in the loop",
            "one tile is visited twice and another never",
            Change(Line("add.s32 %r#, %r#, -192;", 0, 2), "-192", "-128"),
            reports={NUMBERS},
        ),
        place(
            "V of the second kv head, of which there is one",
            "TMA fills a head outside the tensor with zeros",
            Change(Line(LOAD + "[%r#+32768], ...", 0, 2, below="mov.b32 %r#, 0;"), "%r#, %r#, %r#}", "%r#1, 1, %r#3}"),
            reports={NUMBERS},
        ),
        descriptor(
            "stride byte offset of K halved",
            "rows 8 and up are read from the rows between",
            Change(Line("mov.b32 %r#, 1073741888;", 0, 2), "1073741888", "1073741856"),
            reports={NUMBERS},
        ),
        descriptor(
            "K read with 64 byte swizzle",
            "TMA wrote it with 128 bytes",
            Change(Line("mov.b32 %r#, 1073741888;", 0, 2), "1073741888", "-2147483584"),
            reports={NUMBERS, Kind.UNINITIALISED_READ},
        ),
        descriptor(
            "second k step of K reads the third",
            "columns 32 to 47 count twice, 16 to 31 not at all",
            Change(Line("add.s64 %rd#, %rd#, 2;"), "2;", "4;"),
            reports={NUMBERS},
        ),
        epilogue(
            "fence.proxy.async before the store of O dropped",
            "the TMA store reads through the async proxy what stmatrix wrote through the generic one",
            Drop(Line(PROXY_FENCE)),
            reports={Kind.MISSING_PROXY_FENCE},
        ),
        epilogue(
            "bar.sync before the store of O dropped",
            "warp 0 stores what seven other warps may not have written",
            Drop(Line("bar.sync 0;", below=PROXY_FENCE)),
            reports={Kind.RACE},
        ),
        epilogue(
            "store of O not waited for",
            "the CTA may end, and its shared memory go, before TMA has read it",
            Drop(Line("cp.async.bulk.wait_group.read 0;")),
            reports={Kind.UNFINISHED},
        ),
        epilogue(
            "store of O not committed",
            "wait_group waits for committed groups only",
            Drop(Line("cp.async.bulk.commit_group;")),
            reports={Kind.UNFINISHED},
        ),
        epilogue(
            "a quarter of O staged after its store was issued",
            "TMA may already have read the place",
            move(Line("stmatrix.sync.aligned.m8n8.x4.shared.b16 ...", 3, 4), Line("cp.async.bulk.commit_group;")),
            reports={Kind.OVERWRITE},
        ),
        epilogue(
            "LSE left in base 2",
            "the factor ln 2 is missing",
            Change(Line("mul.f32 %r#, %r#, 0f3F317218;", 0, 2), "0f3F317218", "0f3F800000"),
            reports={NUMBERS},
        ),
        epilogue(
            "LSE of one row past the end stored",
            "the row belongs to the next head or lies behind the tensor",
            Change(Line("setp.ge.s32 %p#, %r#, %r#;", 0, 2), "setp.ge", "setp.gt"),
            reports={Kind.OUT_OF_BOUNDS, NUMBERS, Kind.GLOBAL_RACE},
        ),
        epilogue(
            "bar.sync before O is staged dropped",
            "no harm: a warp stages O over rows of Q that only its own warpgroup's products read, and it has waited "
            "for those",
            Drop(Line("bar.sync 0;", below="cvt.rn.bf16x2.f32 ...")),
            reports=set(),
        ),
    ]


def _k4_smem() -> list[Mutation]:
    """`k4_smem_d64`: P goes from registers to shared memory and from there to the product."""
    stem = "k4_smem_d64"
    handoff, ring = group(stem, "P handoff"), group(stem, "ring")
    named = "bar.sync %r#, 128;"
    return [
        handoff(
            "fence.proxy.async after storing P dropped",
            "wgmma reads P through the async proxy",
            Drop(Line(PROXY_FENCE, 0, 2)),
            reports={Kind.MISSING_PROXY_FENCE},
        ),
        handoff(
            "fence.proxy.async before P is stored",
            "a fence orders only what came before it",
            move(Line(PROXY_FENCE, 0, 2), Line("cvt.rn.bf16x2.f32 ...", above="stmatrix...", of=1)),
            reports={Kind.MISSING_PROXY_FENCE},
        ),
        handoff(
            "barrier of the warpgroup dropped",
            "the product reads rows of P that other warps may not have stored",
            Drop(Line(named)),
            reports={Kind.RACE, Kind.MISSING_PROXY_FENCE},
        ),
        handoff(
            "both warpgroups use barrier 1",
            "128 arrivals may come from warps of both warpgroups",
            Change(Line("add.s32 %r#, %r#, 1;", above=named), "%r#, 1;", "0, 1;"),
            reports={Kind.RACE, Kind.MISSING_PROXY_FENCE, Kind.ARRIVAL_COUNT, Kind.DEADLOCK},
        ),
        handoff(
            "barrier of the warpgroup expects 256 threads",
            "128 threads arrive at each of the two barriers",
            Change(Line(named), "128", "256"),
            reports={Kind.DEADLOCK},
        ),
        handoff(
            "a quarter of P not stored",
            "the product reads shared memory that nothing has written",
            Drop(Line("stmatrix.sync.aligned.m8n8.x4.shared.b16 ...", 1, 8)),
            reports={Kind.UNINITIALISED_READ},
        ),
        handoff(
            "fence.proxy.async after the barrier instead of before",
            "no harm: a proxy fence counts anywhere on the causality path from the write to the product",
            move(Line(PROXY_FENCE, 0, 2), Line(named)),
            reports=set(),
        ),
        ring(
            "V's bytes not expected in the loop",
            "the phase completes when the first 16 KiB are there, of K or of V",
            Change(Line(EXPECT + "[%r#+65544], %r#;", 1, 2), ", %r#;", ", 8192;"),
            reports={Kind.TRANSACTION_COUNT},
        ),
        ring(
            "stage released before P V is waited for",
            "TMA overwrites V that the product still reads",
            move(Line(WGMMA_WAIT, 1, 2), Line("$L__BB0_#:", below=ARRIVE + "[%r#+65560], %r#;")),
            reports={Kind.OVERWRITE},
        ),
    ]


def _k4_1() -> list[Mutation]:
    """`k4_1_d64`: Q K^T by wgmma, S through shared memory to the lanes of the same warp, P V by scalar arithmetic."""
    stem = "k4_1_d64"
    lanes, ring = group(stem, "lanes of a warp"), group(stem, "ring")
    return [
        lanes(
            "bar.warp.sync after storing S dropped",
            "lanes read what other lanes of their warp stored",
            Drop(Line(WARP_SYNC, 0, 3)),
            reports={Kind.RACE},
        ),
        lanes(
            "bar.warp.sync after storing P dropped",
            "lanes read what other lanes of their warp stored",
            Drop(Line(WARP_SYNC, 1, 3)),
            reports={Kind.RACE},
        ),
        lanes(
            "bar.warp.sync before the release of V dropped",
            "lane 0 releases the stage and S is stored over P while other lanes read",
            Drop(Line(WARP_SYNC, 2, 3)),
            reports={Kind.RACE, Kind.OVERWRITE},
        ),
        ring(
            "V not waited for",
            "lanes read V while it lands",
            skip_wait(Line(TRY_WAIT, 3, 6)),
            reports={Kind.UNAWAITED_LOAD},
        ),
        ring(
            "wait for S dropped",
            "S is stored from accumulators of a product in flight",
            Drop(Line(WGMMA_WAIT)),
            reports={Kind.REGISTER_IN_FLIGHT},
        ),
    ]


def _k3_1() -> list[Mutation]:
    """`k3_1_d64`: one stage that TMA fills with K and V for scalar arithmetic."""
    stem = "k3_1_d64"
    ring = group(stem, "ring")
    return [
        ring(
            "bar.warp.sync before the release dropped",
            "lane 0 releases the stage while other lanes read V",
            Drop(Line(WARP_SYNC, 2, 3)),
            reports={Kind.OVERWRITE, Kind.RACE},
        ),
        ring(
            "K loaded without waiting for the stage to be empty",
            "three warps may still read the tile",
            skip_wait(Line(TRY_WAIT, 2, 3)),
            reports={Kind.OVERWRITE, Kind.RACE},
        ),
        ring(
            "K's bytes not expected in the loop",
            "the phase completes before the second tile is there",
            Change(Line(EXPECT + "[%r#], %r#;", 2, 3), ", %r#;", ", 8192;"),
            reports={Kind.TRANSACTION_COUNT},
        ),
        ring(
            "parity of the consumer never flips",
            "the first phase lets every later wait through",
            Drop(Line("xor.b32 %r#, %r#, 1;", 1, 2)),
            reports={Kind.UNAWAITED_LOAD, Kind.OVERWRITE},
        ),
        ring(
            "empty barrier not initialised",
            "the producer waits on bytes that are no mbarrier",
            Drop(Line("mbarrier.init.shared.b64 [%r#], %r#;", 2, 3)),
            reports={Kind.BARRIER_NOT_INITIALISED},
        ),
        ring(
            "released before V is read",
            "lane 0 gives the stage back after the scores, before P V",
            Move(
                Line("@%p# bra $L__BB0_#;", below=WARP_SYNC),
                Line("$L__BB0_#:", below=ARRIVE + "[%r#], %r#;"),
                Line(WARP_SYNC, 1, 3),
            ),
            Move(
                Line("add.s32 %r#, %r#, 43024;", 1, 2),
                Line("setp.ne.b32 %p#, %r#, 0;", above=WARP_SYNC),
                Line(WARP_SYNC, 1, 3),
            ),
            reports={Kind.OVERWRITE, Kind.RACE},
        ),
    ]


def _k2() -> list[Mutation]:
    """`k2_d64`: lanes copy K and then V into one tile of shared memory, with bar.sync around it."""
    stem = "k2_d64"
    barrier = group(stem, "barrier")
    return [
        barrier(
            "bar.sync after storing K dropped",
            "warps read rows of K that other warps store",
            Drop(Line("bar.sync 0;", 0, 4)),
            reports={Kind.RACE},
        ),
        barrier(
            "bar.sync before storing V dropped",
            "V overwrites K that other warps still read",
            Drop(Line("bar.sync 0;", 1, 4)),
            reports={Kind.RACE},
        ),
        barrier(
            "bar.sync after storing V dropped",
            "warps read rows of V that other warps store",
            Drop(Line("bar.sync 0;", 2, 4)),
            reports={Kind.RACE},
        ),
        barrier(
            "bar.sync at the end of a tile dropped",
            "the next K overwrites V that other warps still read",
            Drop(Line("bar.sync 0;", 3, 4)),
            reports={Kind.RACE},
        ),
        barrier(
            "bar.warp.sync before a bar.sync dropped",
            "no harm: bar.sync orders the lanes of a warp as well",
            Drop(Line(WARP_SYNC, 0, 3, above="bar.sync 0;")),
            reports=set(),
        ),
    ]


TUNING = [*_k4_2(), *_k4_2_products(), *_k4_smem(), *_k4_1(), *_k3_1(), *_k2()]
