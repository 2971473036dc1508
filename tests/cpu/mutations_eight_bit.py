"""Mutations of sums in two levels, what is promoted, when, and by which factor, and of mixed types. See `mutations.py`.

They change the module's source, as those of `mutations_packed.py` do, and are `PackedMutation`s of dense modules.
"""

from __future__ import annotations

from mutations_packed import PackedMutation

STRIPED, TWO_LEVELS, EVERY_FOURTH = "fwd_fp8_d256_two_levels", "k7_two_levels_d64", "k7_promote_4_d128"
MIXED = "k7_e5m2_d128"
OFF, IN_FLIGHT = "O is off by", "register of an unfinished wgmma touched"

STRIPES = [
    PackedMutation(
        "stripes other than the last promoted nowhere",
        "three quarters of P V never reach O",
        "        promote(acc_O, turns[stripe], rescale, stripe)\n",
        "",
        "ramp",
        (OFF,),
        STRIPED,
        128,  # four stripes
    ),
    PackedMutation(
        "the last stripe of a step promoted nowhere",
        "but for the last tile of keys a quarter of P V never reaches O",
        "    promote(acc_O, acc_step, rescale, STRIPES - 1)\n    warpgroup.wait_group(0)",
        "    warpgroup.wait_group(0)",
        "ragged",
        (OFF,),
        STRIPED,
        128,  # four stripes
    ),
    PackedMutation(
        "half of the columns promoted twice",
        "the second stripe of two goes where the first one went",
        "first = stripe * cute.size(acc_step_rows, mode=[1])",
        "first = stripe // 2 * 2 * cute.size(acc_step_rows, mode=[1])",
        "few_keys",
        (OFF,),
        STRIPED,
        128,  # four stripes
    ),
    PackedMutation(
        "P V rescaled with O",
        "it is relative to the new maximum already",
        "acc_O_rows[r, first + c] * rescale[r] + acc_step_rows[r, c]",
        "(acc_O_rows[r, first + c] + acc_step_rows[r, c]) * rescale[r]",
        "ramp",
        (OFF,),
        STRIPED,
        128,  # four stripes
    ),
    PackedMutation(
        "the factor of a thread's other row",
        "each row has a maximum of its own",
        "acc_O_rows[r, first + c] * rescale[r] + acc_step_rows[r, c]",
        "acc_O_rows[r, first + c] * rescale[1 - r] + acc_step_rows[r, c]",
        "ramp",
        (OFF,),
        STRIPED,
        128,  # four stripes
    ),
    PackedMutation(
        "a stripe promoted while the tensor core writes it",
        "with two groups in flight the older one is the stripe that is added",
        "        warpgroup.wait_group(1)  # a stripe is added",
        "        warpgroup.wait_group(2)  # a stripe is added",
        "gqa",
        (IN_FLIGHT,),
        STRIPED,
        128,  # four stripes
    ),
    PackedMutation(
        "S in the registers of the last stripe",
        "the next S is issued before that stripe is added",
        "(STRIPES - stripe) % 2 == 0",
        "(STRIPES - stripe) % 2 == 1",
        "ragged",
        (OFF, IN_FLIGHT),
        STRIPED,
        128,  # four stripes
    ),
    PackedMutation(
        "V given back before its last stripe is multiplied",
        "who transposes V writes the stage that the tensor core reads",
        "    warpgroup.wait_group(1)  # the last stripe is added",
        "    warpgroup.wait_group(2)  # the last stripe is added",
        "wrap",
        (IN_FLIGHT, "overwritten"),
        STRIPED,
        128,  # four stripes
    ),
]

PROMOTIONS = [
    PackedMutation(
        "P V of a step promoted nowhere",
        "O is that of the last tile of keys",
        "    promote(acc_O, acc_step, factors)\n",
        "",
        "ramp",
        (OFF,),
        TWO_LEVELS,
    ),
    PackedMutation(
        "the factor of the wrong step",
        "O comes to the maxima of the tile whose P V has not been added yet",
        "    promote(acc_O, acc_step, factors)\n",
        "    promote(acc_O, acc_step, (rescale[0], rescale[1]))\n",
        "ragged",
        (OFF,),
        TWO_LEVELS,
    ),
]

HELD = [
    PackedMutation(
        "tiles held rescaled with O",
        "they are relative to the new maxima already, as P is",
        "        rescale_held(acc_step, rescale)\n",
        "        rescale_held(acc_step, since)\n",
        "ragged",
        (OFF,),
        EVERY_FOURTH,
    ),
    PackedMutation(
        "tiles held not rescaled",
        "they stay relative to the maxima of the first of them",
        "        rescale_held(acc_step, rescale)\n",
        "",
        "ragged",
        (OFF,),
        EVERY_FOURTH,
    ),
    PackedMutation(
        "O promoted by the factor of one step",
        "it has not been rescaled for several",
        "        since.store(since.load() * rescale.load())\n",
        "        since.store(rescale.load())\n",
        "held_ramp",
        (OFF,),
        EVERY_FOURTH,
    ),
    PackedMutation(
        "P V of the last tiles promoted nowhere",
        "a tile of queries ends between two promotions, too",
        "        promote(acc_O, acc_step, since)\n        store_tile",
        "        store_tile",
        "few_keys",
        (OFF,),
        EVERY_FOURTH,
    ),
    PackedMutation(
        "what was promoted is not overwritten",
        "P V of four tiles reaches O twice",
        "        held[0] = 0\n",
        "        held[0] = 1\n",
        "wrap",
        (OFF,),
        EVERY_FOURTH,
    ),
    PackedMutation(
        "each product begins anew",
        "of four tiles only the last reaches O",
        "mma.set(warpgroup.Field.ACCUMULATE, held[0] > 0)",
        "mma.set(warpgroup.Field.ACCUMULATE, held[0] > 3)",
        "ragged",
        (OFF,),
        EVERY_FOURTH,
    ),
    PackedMutation(
        "the first product of a tile of queries adds to what is in the registers",
        "nothing was ever written there",
        "mma.set(warpgroup.Field.ACCUMULATE, held[0] > 0)",
        "mma.set(warpgroup.Field.ACCUMULATE, held[0] >= 0)",
        "few_keys",
        ("never written",),
        EVERY_FOURTH,
    ),
]

K_TYPES, V_TYPES = (f"MmaF8Op(DTYPE, KV_DTYPE, cutlass.Float32, (WGMMA_M, {n}" for n in ("TILE_N", "HEAD_DIM"))
MIXED_TYPES = [
    PackedMutation(
        f"{name} multiplied as e4m3",
        "its bytes are e5m2",
        types,
        types.replace("KV_DTYPE", "DTYPE"),
        case,
        (OFF, "O has NaN"),
        MIXED,
    )
    for name, types, case in (("K", K_TYPES, "ragged"), ("V", V_TYPES, "one"))
]

EIGHT_BIT = [*STRIPES, *PROMOTIONS, *HELD, *MIXED_TYPES]
