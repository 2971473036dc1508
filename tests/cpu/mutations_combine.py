"""Mutations of merges: weights, parts and shares left out, rows without a key, the barrier. See `mutations.py`."""

from __future__ import annotations

from mutations import NUMBERS, Change, Drop, Line, Mutation, group

from fa3gen.cpu.findings import Kind

LOG2_E = "0f3FB8AA3B"
ZERO, NO_KEY = "0f00000000", "0fFF800000"
OF_NO_KEY = f"setp.eq.f32 %p#, %r#, {NO_KEY};"
WEIGHTED = f"mul.f32 %r#, %r#, {LOG2_E};"  # the rescale, two parts of a step, a share


def merges() -> list[Mutation]:
    """Parts in shares, two steps each, rows and parts without a key, and a last CTA that is not full."""
    make = group("combine_fp32", "merge")
    return [
        make(
            "rows without a key are not told apart in a step",
            "-inf - -inf is NaN",
            Change(Line(f"selp.f32 %r#, {ZERO}, %r#, %p#;", below=OF_NO_KEY, above="sub.f32..."), ZERO, NO_KEY),
            reports={NUMBERS},
        ),
        make(
            "rows without a key are not told apart between shares",
            "-inf - -inf is NaN",
            Change(Line(f"selp.f32 %r#, {ZERO}, %r#, %p#;", below=OF_NO_KEY, above="mov.b32..."), ZERO, NO_KEY),
            reports={NUMBERS},
        ),
        make(
            "O of a part without a key counts",
            "it may be NaN, and its weight is 0",
            Change(
                Line(f"selp.f32 %r#, {ZERO}, %r#, %p#;", below=OF_NO_KEY, above="mul.f32..."),
                f"{ZERO}, %r#,",
                "%r#1, %r#1,",
            ),
            reports={NUMBERS},
        ),
        make(
            "weights of base 2",
            "LSE are natural logarithms",
            Change(Line(WEIGHTED, 1, 4), LOG2_E, "0f3F800000"),
            reports={NUMBERS},
        ),
        make(
            "sums rescaled as if LSE were of base 2",
            "in the second step",
            Change(Line(WEIGHTED, 0, 4), LOG2_E, "0f3F800000"),
            reports={NUMBERS},
        ),
        make(
            "shares weighted as if LSE were of base 2",
            "all but the one with the largest",
            Change(Line(WEIGHTED, 3, 4), LOG2_E, "0f3F800000"),
            reports={NUMBERS},
        ),
        make(
            "the second part of a step left out",
            "as if it were past the end",
            Change(Line("setp.ge.s32 %p#, %r#, %r#;", 1, 2), "%r#, %r#;", "%r#1, %r#1;"),
            reports={NUMBERS},
        ),
        make(
            "the second half of the shares left out",
            "the loop ends too early",
            Change(Line("setp.lt.u32 %p#, %r#, 256;", 1, 2), "256", "128"),
            reports={NUMBERS},
        ),
        make(
            "no largest LSE of the shares",
            "it stays -inf, and so does LSE",
            Drop(Line("max.f32 %r#, %r#, %r#;", 2, 3)),
            reports={NUMBERS},
        ),
        make(
            "no barrier before shares are merged",
            "the first share reads what others have not written yet",
            Drop(Line("bar.sync 0;")),
            reports={Kind.RACE, Kind.UNINITIALISED_READ},
        ),
        make(
            "threads without a place read",
            "rows behind the last one",
            Change(Line("selp.b32 %r#, %r#, 0, %p#;"), "%r#, 0, %p#", "%r#1, %r#1, %p#2"),
            reports={Kind.OUT_OF_BOUNDS},
        ),
        make(
            "threads without a place write",
            "O behind the last row",
            Change(Line("setp.le.s32 %p#, %r#, %r#;"), "%r#, %r#;", "0, -1;"),
            reports={Kind.OUT_OF_BOUNDS, NUMBERS},
        ),
        make(
            "LSE with a binary logarithm",
            "of the sum of the weights",
            Change(Line("fma.rn.f32 %r#, %r#, 0f3F317218, %r#;"), "0f3F317218", "0f3F800000"),
            reports={NUMBERS},
        ),
        make(
            "one share is merged, too",
            "right, and slower",
            Change(Line("setp.lt.u32 %p#, %r#, 2;"), "2;", "1;"),
            reports=set(),
        ),
    ]


COMBINE: list[Mutation] = merges()
