"""Mutations of quantisations: maxima, scales, butterflies, edges, the turn in shared memory. See `mutations.py`."""

from __future__ import annotations

from mutations import NUMBERS, Change, Drop, Line, Mutation, group

from fa3gen.cpu.findings import Kind

BARRIER = "bar.sync 0;"
ROUND = "cvt.rn.satfinite.e4m3x2.f32 %rs#, %r#, %r#;"
UNIT = "xor.b32 %r#, %r#, %r#;"
BEHIND = "setp.le.s32 %p#, %r#, %r#;"
SMALLEST = "max.f32 %r#, %r#, 0f0D800000;"  # 2^-100
OVER_448 = "mul.f32 %r#, %r#, 0f3B124925;"


def columns() -> list[Mutation]:
    """V, whose scales are found, transposed: two tiles of each head, the second one not full."""
    make = group("quantize_v_d64", "columns")
    return [
        make(
            "only the first tile is looked at for maxima",
            "the loop ends",
            Drop(Line("@%p# bra $L__BB0_2;")),
            reports={NUMBERS},
        ),
        make(
            "maxima of half a warp",
            "lanes 16 apart do not meet",
            Change(Line("shfl.sync.bfly.b32 %r#, %r#, 16, 31, -1;", 0, 2), "16", "8"),
            reports={NUMBERS},
        ),
        make(
            "maxima of warps are read too early",
            "others have not left theirs yet",
            Drop(Line(BARRIER, 0, 2)),
            reports={Kind.RACE, Kind.UNINITIALISED_READ},
        ),
        make(
            "the last four warps are forgotten",
            "the first four are read twice",
            Change(Line("ld.shared.v4.b32 {%r#, %r#, %r#, %r#}, [%r#+8208];"), "8208", "8192"),
            reports={NUMBERS},
        ),
        make(
            "the maxima of parts are left unwritten",
            "which then are any number",
            Drop(Line("st.global.b32 [%rd#], %r#;", 0, 2)),
            reports={NUMBERS, Kind.UNINITIALISED_READ},
        ),
        make(
            "maxima of parts that there are not",
            "the number is not cut off",
            Change(
                Line("selp.b32 %r#, %r#, 0, %p#;", below="setp.gt.s32 %p#, %r#, %r#;", of=4),
                "%r#, 0, %p#",
                "%r#1, %r#1, %p#2",
            ),
            reports={Kind.OUT_OF_BOUNDS, NUMBERS},
        ),
        make(
            "scales for another format",
            "e4m3 ends at 448, and this is 1 / 240",
            Change(Line(OVER_448), "0f3B124925", "0f3B888889"),
            reports={NUMBERS},
        ),
        make(
            "zeros divided by 0",
            "0 / 0 is NaN",
            Change(Line(SMALLEST), "0f0D800000", "0f00000000"),
            reports={NUMBERS},
        ),
        make(
            "signs count for maxima",
            "of the fourth element of a thread's third row",
            Change(Line("abs.f32 %r#, %r#;", 14, 32), "abs.f32", "mov.b32"),
            reports={NUMBERS},
        ),
        make(
            "two rows trade places",
            "the first of a pair is the lower half",
            Change(Line(ROUND, 5, 16), "%r#, %r#;", "%r#2, %r#1;"),
            reports={NUMBERS},
        ),
        make(
            "units are exchanged where they are written only",
            "readers look elsewhere",
            Change(Line(UNIT, 1, 2), "%r#, %r#;", "%r#1, 0;"),
            reports={NUMBERS},
        ),
        make(
            "the tile is read before it is written",
            "by other warps",
            Drop(Line(BARRIER, 1, 2)),
            reports={Kind.RACE, Kind.UNINITIALISED_READ},
        ),
        make(
            "whole units behind the last row",
            "which overwrite what stands there",
            Change(Line("setp.lt.s32 %p#, %r#, %r#;", below="mov.b32...", above="xor.b32..."), "%r#, %r#;", "1, 0;"),
            reports={NUMBERS, Kind.OUT_OF_BOUNDS},
        ),
        make(
            "a row too many at the end",
            "one byte of each column",
            Change(Line(BEHIND, 9, 20), "%r#, %r#;", "1, 0;"),
            reports={NUMBERS, Kind.OUT_OF_BOUNDS},
        ),
        make(
            "units are not exchanged",
            "right, and slower: bank conflicts",
            Change(Line(UNIT, 0, 2), "%r#, %r#;", "%r#1, 0;"),
            Change(Line(UNIT), "%r#, %r#;", "%r#1, 0;"),
            reports=set(),
        ),
    ]


def permuted() -> list[Mutation]:
    """The same with keys permuted."""
    make = group("quantize_v_permuted_d64", "keys")
    return [
        make(
            "the third of four rows is the one behind the second",
            "as without a permutation",
            Change(Line("add.s32 %r#, %r#, 8;", 1, 2), "8;", "2;"),
            reports={NUMBERS},
        ),
        make(
            "two words of a unit are of the same rows",
            "of four there are two",
            Change(Line("and.b32 %r#, %r#, 6;", 1, 2), "6;", "4;"),
            reports={NUMBERS},
        ),
        make(
            "rows that there are not",
            "zeros have to stand for them",
            Change(Line("setp.le.s32 %p#, %r#, %r#;", 4, 8), "%r#, %r#;", "1, 0;"),
            reports={NUMBERS, Kind.OUT_OF_BOUNDS},
        ),
        make(
            "whole units behind the last row's",
            "which overwrite what stands there",
            Change(Line("setp.lt.s32 %p#, %r#, %r#;", above="xor.b32..."), "%r#, %r#;", "1, 0;"),
            reports={NUMBERS, Kind.OUT_OF_BOUNDS},
        ),
    ]


def blocks() -> list[Mutation]:
    """K rotated, a scale for each block."""
    make = group("quantize_rotate_block_d128", "blocks")
    return [
        make(
            "a sum for a difference",
            "of the first butterfly",
            Change(Line("sub.f32 %r#, %r#, %r#;", 0, 96), "sub.f32", "add.f32"),
            reports={NUMBERS},
        ),
        make(
            "bits of either thread",
            "of a quad, in the product's B, and not of both",
            Change(Line("and.b32 %r#, %r#, %r#;"), "and.b32", "or.b32"),
            reports={NUMBERS},
        ),
        make(
            "all threads have the sum",
            "of bits of their number",
            Change(Line("selp.b16 %rs#, 0xBF80, 0x3F80, %p#;", 0, 2), "0xBF80", "0x3F80"),
            reports={NUMBERS},
        ),
        make(
            "even elements for odd ones",
            "in which the product's sums are differences",
            Change(Line("selp.b16 %rs#, 0xBF80, 0x3F80, %p#;", 1, 2), "0xBF80", "0x3F80"),
            reports={NUMBERS},
        ),
        make(
            "no square root of the head dim for an element",
            "one term of butterflies is not scaled",
            Change(Line("mul.f32 %r#, %r#, 0f3DB504F3;", 4, 64), "0f3DB504F3", "0f3F800000"),
            reports={NUMBERS},
        ),
        make(
            "signs of other elements",
            "the second half of the first vector twice",
            Change(Line("ld.global.v4.b32 {%r#, %r#, %r#, %r#}, [%rd#+16];"), "+16", "+0"),
            reports={NUMBERS},
        ),
        make(
            "rows behind the last one are read",
            "of the last sequence there is nothing more",
            Change(Line(BEHIND, 1, 4), "%r#, %r#;", "1, 0;"),
            reports={Kind.OUT_OF_BOUNDS, NUMBERS},
        ),
        make(
            "rows behind the last one are written",
            "into what follows",
            Change(Line(BEHIND, 3, 4), "%r#, %r#;", "1, 0;"),
            reports={Kind.OUT_OF_BOUNDS, NUMBERS, Kind.GLOBAL_RACE},
        ),
        make(
            "maxima of warps are read too early",
            "others have not left theirs yet",
            Drop(Line(BARRIER)),
            reports={Kind.RACE, Kind.UNINITIALISED_READ},
        ),
    ]


QUANTIZE: list[Mutation] = [*columns(), *permuted(), *blocks()]
