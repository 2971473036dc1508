"""The cells that modules for packed sequences, and for pages, are measured at: lists of lengths, heads, masks, pages.

`fa3gen.measure.packed_speeds` measures at them on a GPU; `fa3gen.records.packed_records` keeps what it found.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator

from fa3gen.design.family import Family, PackedShape
from fa3gen.design.masks import Window, given_with_calls
from fa3gen.design.tile_order import takes_group
from fa3gen.design.workspace import Workspace
from fa3gen.records.packed_records import PackedProblem
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import Variant, attention_among

_Lengths = tuple[tuple[int, ...], tuple[int, ...]]  # of queries and of keys

# Requests as a chat server packs them, many short ones and few long ones, 16,384 and 65,536 tokens in all; documents as
# they are packed for training; and batches of equally long sequences, as dense calls have them.
LENGTHS = {
    "chat16k": (
        *(217, 385, 327, 75, 85, 153, 142, 365, 653, 160, 60, 92, 422, 324, 127, 488, 150, 270, 1358, 118, 409, 493),
        *(178, 104, 780, 698, 630, 376, 266, 600, 176, 76, 167, 140, 80, 92, 577, 167, 45, 156, 134, 361, 80, 188, 319),
        *(399, 227, 56, 175, 231, 114, 368, 166, 236, 270, 215, 549, 115),
    ),
    "chat64k": (
        *(749, 5270, 4436, 390, 879, 498, 4631, 291, 556, 254, 208, 2505, 2114, 400, 388, 4781, 1921, 2275, 1467, 191),
        *(2336, 40, 1063, 355, 419, 1299, 315, 1325, 407, 265, 369, 461, 2685, 157, 703, 726, 625, 267, 1533, 400),
        *(1040, 175, 409, 1644, 1041, 2197, 994, 744, 597, 392, 6349),
    ),
    "documents64k": (15087, 30308, 11024, 2105, 2515, 916, 3581),
    "equal512": (512,) * 32,
    "equal1k": (1024,) * 16,
}

# Queries and keys of calls on packed sequences: as many of either.
PACKED_LENGTHS = {name: (lengths, lengths) for name, lengths in LENGTHS.items()}
# Queries and keys of calls on pages: prompts that are not in the cache yet, and chunks of prompts that partly are.
PAGED_LENGTHS = {
    "chat16k": (LENGTHS["chat16k"], LENGTHS["chat16k"]),
    "prefill1k_on_8k": ((1024,) * 8, (8192,) * 8),
}
# Queries and keys of decoding steps, of contiguous keys and of pages: one sequence, some, and many; four queries each,
# of which a draft model made three; and keys of all lengths, one sequence of them long.
DECODING_LENGTHS = {
    "decode1_on_4k": ((1,), (4096,)),
    "decode1_on_32k": ((1,), (32768,)),
    "decode8_on_4k": ((1,) * 8, (4096,) * 8),
    "decode64_on_1k": ((1,) * 64, (1024,) * 64),
    "decode64_on_4k": ((1,) * 64, (4096,) * 64),
    "decode128_on_8k": ((1,) * 128, (8192,) * 128),
    "draft8_on_8k": ((4,) * 8, (8192,) * 8),
    "decode32_one_long": ((1,) * 32, (131072, *(1024,) * 31)),
}


def _spread(count: int, longest: int) -> tuple[int, ...]:
    """Lengths from the longest down to about an eighth of it, each as much less as the next, in no order.

    `count` is no multiple of 11.
    """
    return tuple(round(longest / 8 ** (11 * i % count / count)) for i in range(count))


# The same of drafts of as many queries as engines propose, and of more. And of chunks of prompts: on many keys with few
# tiles of queries, where it pays that several CTAs read the keys of a tile, and of what lies beside, where it does not.
DRAFT_LENGTHS = {
    "draft_of_16_on_32k": ((16,), (32768,)),
    "8_drafts_of_8_on_8k": ((8,) * 8, (8192,) * 8),
    "8_drafts_of_16_on_4k": ((16,) * 8, (4096,) * 8),
    "64_drafts_of_8_on_2k": ((8,) * 64, (2048,) * 64),
    "64_drafts_of_16_on_2k": ((16,) * 64, (2048,) * 64),
    "32_drafts_of_8_to_12k": ((8,) * 32, _spread(32, 12288)),
    "2_drafts_of_3_to_1k": ((3,) * 2, _spread(2, 1024)),
    "4_drafts_of_4_to_5k": ((4,) * 4, _spread(4, 5120)),
    "32_drafts_of_5_to_3k": ((5,) * 32, _spread(32, 3072)),
    "64_drafts_of_3_to_9k": ((3,) * 64, _spread(64, 9216)),
}
CHUNK_LENGTHS = {
    "chunk128_on_4k": ((128,), (4096,)),
    "chunk256_on_16k": ((256,), (16384,)),
    "chunk1k_on_4k": ((1024,), (4096,)),
    "chunk512_on_8k": ((512,), (8192,)),
    "chunk512_on_32k": ((512,), (32768,)),
    "chunk2k_on_8k": ((2048,), (8192,)),
    "chunk2k_on_32k": ((2048,), (32768,)),
    "8_chunks_of_64_on_8k": ((64,) * 8, (8192,) * 8),
    "8_chunks_of_128_one_on_16k": ((128,) * 8, (16384, *(2048,) * 7)),
    "chunk1k_and_7_steps_one_on_24k": ((1024, *(1,) * 7), (24576, *(2048,) * 7)),
    "prompt3k": ((3072,), (3072,)),
    "3_chunks_to_1k_on_8k": (_spread(3, 1024), _spread(3, 8192)),
    "4_chunks_to_512_on_24k": (_spread(4, 512), _spread(4, 24576)[::-1]),
    # Lists of which a call does not tell that one sequence has nearly all keys, and such where none has.
    "16_chunks_of_64_one_on_16k": ((64,) * 16, (16384, *(128,) * 15)),
    "4_prompts_of_512_one_on_16k": ((512,) * 4, (16896, *(512,) * 3)),
    "8_prompts_of_1k_one_on_12k": ((1024,) * 8, (12288, *(1024,) * 7)),
    "prompts_of_512_to_4k_one_on_16k": ((512, 1024, 2048, 4096), (16384, 1024, 2048, 4096)),
    "chunks_of_1k_to_3k_on_12k": ((1024, 1024, 2048, 2048, 3072, 3072), (12288,) * 6),
    "4_chunks_of_2k_on_8k": ((2048,) * 4, (8192,) * 4),
    "prompts_of_256_to_2k": ((256, 512, 1024, 2048) * 2, (256, 512, 1024, 2048) * 2),
    "8_prompts_of_512": ((512,) * 8, (512,) * 8),
    "8_prompts_to_2752": (_spread(8, 2752), _spread(8, 2752)),
    "8_chunks_to_2k_on_16k": (_spread(8, 2048), _spread(8, 16384)[::-1]),
}
# Prompts alone, and two and three, with the heads that a GPU has of a model which is divided among several: so few that
# it matters how their tiles are dealt out, and so long that nothing else does.
PROMPT_LENGTHS = {
    **{f"prompt{thousands}k": ((1024 * thousands,),) * 2 for thousands in (1, 2, 5, 8, 12, 20, 32)},
    "2_prompts_to_8k": (_spread(2, 8192),) * 2,
    "3_prompts_to_16k": (_spread(3, 16384),) * 2,
}
# Queries and keys of a step of serving in which chunks of prompts come with decoding steps: one chunk before them and
# behind them, and several.
_STEPS = tuple(2048 + 32 * i for i in range(63))
MIXED_LENGTHS = {
    "chunk_and_63_steps": ((512, *(1,) * 63), (4096, *_STEPS)),
    "63_steps_and_chunk": ((*(1,) * 63, 512), (*_STEPS, 4096)),
    "4_chunks_and_140_steps": ((512, *(1,) * 35) * 4, (4096, *_STEPS[:35]) * 4),
}
# The same on more keys, or with fewer steps, on as many keys each and, as batches are, on very different numbers.
MIXED_CHUNK_LENGTHS = {
    "chunk128_and_15_steps_on_8k": ((128, *(1,) * 15), (8192,) * 16),
    "chunk512_and_7_steps_on_8k": ((512, *(1,) * 7), (8192,) * 8),
    "chunk512_and_7_steps_one_on_16k": ((512, *(1,) * 7), (1024, 16384, *(1024,) * 6)),
    "chunk1k_and_31_steps_to_8k": ((1024, *(1,) * 31), (1024, *(256 * i for i in range(1, 32)))),
    "chunk256_and_31_steps_on_2k": ((256, *(1,) * 31), (2048,) * 32),
    "chunk512_and_63_steps_on_16k": ((512, *(1,) * 63), (16384,) * 64),
    "chunk256_and_31_steps_to_32k": ((256, *(1,) * 31), tuple(1024 * i for i in range(1, 33))),
    "chunk128_and_20_steps_to_6k": ((128, *(1,) * 20), _spread(21, 6144)),
    "chunk256_and_63_steps_to_12k": ((*(1,) * 63, 256), _spread(64, 12288)),
    "chunk256_and_63_steps_to_4k": ((256, *(1,) * 63), _spread(64, 4096)),
    "chunk2k_and_20_steps_to_24k": ((2048, *(1,) * 20), _spread(21, 24576)),
    "chunk512_and_31_steps_to_2k": ((512, *(1,) * 31), _spread(32, 2048)),
    "chunk1k_and_15_steps_to_16k": ((1024, *(1,) * 15), _spread(16, 16384)),
    "chunk64_and_7_steps_to_20k": ((64, *(1,) * 7), _spread(8, 20480)),
    "chunk192_and_7_steps_to_12k": ((*(1,) * 7, 192), _spread(8, 12288)),
}
# Drafts, chunks and what lies beside them on so few keys that it may take longer to deal out their parts than to read
# them: here modules that take head after head are measured too.
SHORT_LENGTHS = {
    "draft_of_8_on_1k": ((8,), (1024,)),
    "4_drafts_of_8_to_1k": ((8,) * 4, _spread(4, 1280)),
    "16_drafts_of_16_to_2k": ((16,) * 16, _spread(16, 2304)),
    "32_drafts_of_8_to_2k": ((8,) * 32, _spread(32, 1792)),
    "chunk64_on_1k": ((64,), (1024,)),
    "chunk512_on_2k": ((512,), (2048,)),
    "prompt2k_and_2_steps": ((2048, 1, 1), (2048, 1024, 1024)),
    "chunk128_on_700": ((128,), (704,)),
    "4_chunks_to_256_on_1k": (_spread(4, 256), _spread(4, 1344)[::-1]),
    "chunk1k_on_2k": ((1152,), (2112,)),
    "3_chunks_to_1k_on_3k": (_spread(3, 1152), _spread(3, 3200)),
    "chunk128_and_15_steps_to_2k": ((128, *(1,) * 15), _spread(16, 1920)),
    "3_chunks_to_384_on_2k": (_spread(3, 384), _spread(3, 2048)),
    "2_chunks_to_64_on_2k": (_spread(2, 64), _spread(2, 2048)),
    "3_prompts_to_1k": (_spread(3, 1088), _spread(3, 1088)),
    "chunk1k_and_7_steps_to_3k": ((1024, *(1,) * 7), _spread(8, 3072)),
    "chunk80_and_7_steps_to_2k": ((80, *(1,) * 7), _spread(8, 2304)),
    "chunk768_and_20_steps_to_1k": ((*(1,) * 20, 768), (*_spread(20, 1408), 1408)),
}


def drawn_chunks(at: random.Random) -> list[int]:
    """Queries of a chunk of a prompt, or of some: 32 to 2,896 each."""
    return [int(2 ** at.uniform(5, 11.5)) for _ in range(at.choice((1, 1, 2, 3, 4, 8)))]


def drawn_steps(at: random.Random) -> list[int]:
    """Queries of decoding steps, and anywhere among them of a chunk of a prompt: 64 to 2,048."""
    queries = [1] * at.choice((7, 15, 20, 31, 63)) + [int(2 ** at.uniform(6, 11))]
    at.shuffle(queries)
    return queries


def drawn_keys(at: random.Random, queries: Iterable[int], longest: float) -> list[int]:
    """Keys of sequences with so many queries: an eighth of `longest` to all of it, and the queries' own."""
    return [max(seq_q, int(longest * 2 ** at.uniform(-3, 0))) for seq_q in queries]


def _drawn_prompts(seed: int) -> _Lengths:
    """The longest prompt and others, an eighth of it and more, on as many keys each or on up to eight times as many.

    Up to three are short enough for the reference, and so is, of the seeds below, the shortest of more.
    """
    at = random.Random(seed)
    others, more = at.choice((0, 0, 1, 2, 3, 7, 15)), at.choice((0, 0, 3))
    longest = 2 ** at.uniform(8, 14 if others > 2 else 11.9)
    queries = [int(longest), *(int(longest * 2 ** at.uniform(-3, 0)) for _ in range(others))]
    return tuple(queries), tuple(int(seq_q * 2 ** at.uniform(0, more)) for seq_q in queries)


def _drawn(
    queries_of: Callable[[random.Random], list[int]], seed: int, octaves: tuple[float, float] = (10, 15)
) -> _Lengths:
    """Queries, and keys of which the most are a power of two between these."""
    at = random.Random(seed)
    longest = 2 ** at.uniform(*octaves)
    queries = queries_of(at)
    return tuple(queries), tuple(drawn_keys(at, queries, longest))


# Chunks, and chunks beside decoding steps, at random, since in lists that somebody writes a chunk tends to have the
# most keys of all, and tells of the large tiles that suit it.
DRAWN_CHUNK_LENGTHS = {f"drawn_chunks_{seed}": _drawn(drawn_chunks, seed) for seed in range(1, 25)}
DRAWN_STEP_LENGTHS = {f"drawn_steps_{seed}": _drawn(drawn_steps, seed) for seed in range(1, 37)}
# And chunks on so few keys that a prompt may have as many.
DRAWN_SHORT_LENGTHS = {f"drawn_short_chunks_{seed}": _drawn(drawn_chunks, seed, (9, 11.6)) for seed in range(101, 125)}
# Prompts of packed sequences at random; and those that are measured without a mask only, with all heads.
DRAWN_PROMPT_LENGTHS = {f"drawn_prompts_{seed}": _drawn_prompts(seed) for seed in range(201, 225)}
DRAWN_UNMASKED_LENGTHS = {f"drawn_prompts_{seed}": _drawn_prompts(seed) for seed in range(401, 425)}
DRAWN_TURNS = 3  # other lists are measured with every third entry of heads, which take turns
EIGHT_BIT_TURNS = 6  # and with keys of 8 bits, and fewer modules to choose among, all lists but those of decoding steps
FEW_KEYS = 3200  # as SHORT_LENGTHS have: with up to so many every module is measured with drawn chunks and prompts
DRAWN_LENGTHS = DRAWN_CHUNK_LENGTHS | DRAWN_STEP_LENGTHS | DRAWN_SHORT_LENGTHS
DRAWN_LENGTHS |= DRAWN_PROMPT_LENGTHS | DRAWN_UNMASKED_LENGTHS
# All of them by name.
ALL_LENGTHS = PACKED_LENGTHS | PAGED_LENGTHS | MIXED_LENGTHS | MIXED_CHUNK_LENGTHS | CHUNK_LENGTHS
ALL_LENGTHS |= DRAFT_LENGTHS | DECODING_LENGTHS | SHORT_LENGTHS | DRAWN_LENGTHS | PROMPT_LENGTHS
# Windows (left, right) as models have them, and the decoding steps that they are measured with.
_SHORT = "decode1_on_32k", "decode8_on_4k", "decode64_on_4k"
_LONG = "decode1_on_32k", "decode64_on_4k", "draft8_on_8k"
DECODING_WINDOWS = {(127, 0): _SHORT, (1023, 0): _SHORT, (4095, 0): _LONG}
# And the prompts, of which one has any number of keys before them, with the windows of their calls.
PROMPTS_OF_WINDOWS = "chat16k", "equal1k", "prefill1k_on_8k", "drawn_chunks_12"
PROMPT_WINDOWS = (127, 0), (511, 0), (1023, 0), (4095, 0)
# And chunks beside steps, where there are modules for these.
STEPS_OF_WINDOWS = "63_steps_and_chunk", "4_chunks_and_140_steps", "drawn_steps_5", "drawn_steps_11"
PAGE_SIZES = (1, 16, 64)  # other sizes are served as the largest of these that divides them

# Query heads and heads of k and v, by head dim: of their own, and in the groups that models of this head dim have.
HEADS = {64: ((16, 16), (64, 8)), 128: ((16, 16), (32, 8)), 256: ((8, 8), (16, 4))}
# The same, and of further groups, of chunks of prompts beside decoding steps, where it matters more how often K and V
# are read: by as many tiles as a group has.
MIXED_HEADS = {64: HEADS[64], 128: (*HEADS[128], (40, 8), (64, 8), (96, 8)), 256: (*HEADS[256], (16, 8))}
# And the same of drafts, and of chunks on many keys, with the fewest tiles that there are: those of one or two kv
# heads; and of further groups that models have, alone or divided among GPUs.
_FEW_HEADS = (8, 1), (10, 2), (12, 1)
CHUNK_HEADS = {
    64: (*HEADS[64], (8, 1), (20, 5)),
    128: (*HEADS[128], *_FEW_HEADS, (28, 4), (64, 8), (96, 8)),
    256: (*HEADS[256], (8, 1), (4, 2), (16, 8)),
}
# And of long prompts: of groups that models have, divided among GPUs until one or two kv heads are left.
PROMPT_HEADS = {
    64: ((4, 1), (8, 1), (16, 2)),
    128: ((4, 1), (5, 1), (7, 1), (8, 1), (8, 2), (12, 1)),
    256: ((2, 1), (4, 2), (8, 2)),
}
# And of prompts with windows: with groups that tiles of several heads hold.
WINDOW_HEADS = {
    64: ((32, 8), (64, 8)),
    128: ((16, 16), (16, 8), (28, 4), (32, 8), (64, 8)),
    256: ((16, 8), (16, 4)),
}


def packed_modules(workspace: Workspace, named: Iterable[Variant] = ()) -> Iterator[Variant[Forward]]:
    """The rendered modules for packed sequences and for pages, with v as wide as k, among which sizes choose.

    These are the workspace's own, and such among those `named`: of the package, or of a spec outside `specs/`. Those
    that add up parts of so many keys are chosen by what calls ask for, and have no rows.
    """
    own = (variant for file in workspace.load_all() for variant in file.variants)
    by_stem = {variant.stem: variant for variant in (*own, *named)}
    for variant in attention_among(by_stem.values()):
        problem = variant.spec.problem
        served = problem.layout != "dense" and problem.head_dim in HEADS and problem.v_dim == problem.head_dim
        served = served and Family.of(variant.spec).part_keys is None
        if served and workspace.path_of(variant).is_file():
            yield variant


def cells(
    workspace: Workspace, named: Iterable[Variant] = ()
) -> Iterator[tuple[PackedProblem, list[Variant[Forward]]]]:
    """Each cell with the modules that can serve it, those of a group of heads among them; see `packed_modules`.

    Modules that split keys are measured where there are few queries, beside all others; without any, nothing is. Those
    of them with large tiles are measured with drafts, and beside modules that split none where there are chunks; with
    decoding steps only where no others split keys.
    Decoding steps with chunks of prompts are measured where there are modules that take head after head, and these
    elsewhere with few keys only, where everybody is. Prompts at random are where sequences are packed, those without a
    mask with modules that split no keys; and prompts alone, on few heads, where some modules split keys for chunks, on
    few keys with all others for prompts. With windows prompts are, too, where there are modules whose tiles hold
    several heads, and chunks beside steps where some take head after head; with sinks or a cap only decoding steps: of
    many queries there is one module for each call, and nothing to choose.
    """
    families: dict[Family, list[Variant[Forward]]] = {}
    for variant in packed_modules(workspace, named):
        families.setdefault(Family.of(variant.spec), []).append(variant)
    for family in _families_of_calls(families):
        variants = [variant for own, served in families.items() if own.serves(family) for variant in served]
        plain = not given_with_calls(family.mask) and not family.keywords
        for heads in MIXED_HEADS[family.head_dim]:
            able = _able(variants, heads)
            whole = [variant for variant in able if variant.spec.split is None]
            served = [*whole, *filter(_for_chunks, able)]
            mixed = not given_with_calls(family.mask) and any(map(_for_mixed, whole))
            for name, lengths in MIXED_LENGTHS.items() if mixed else ():
                yield PackedProblem.of(family, name, PackedShape(*lengths, *heads)), served
        for heads in CHUNK_HEADS[family.head_dim]:
            able = _able(variants, heads)
            whole = [variant for variant in able if variant.spec.split is None]
            large = [variant for variant in able if _for_chunks(variant)]
            several, in_any_order = ([each for each in found if not _for_mixed(each)] for found in (able, whole))
            chunks, steps = (_in_turn(lists, family, heads) for lists in _drawn_lists(family))
            few_keys = [name for name, (_, keys) in chunks.items() if max(keys) <= FEW_KEYS]
            short = {name: chunks.pop(name) for name in few_keys}
            for written, drawn, served in (
                (DRAFT_LENGTHS, {}, several),
                (CHUNK_LENGTHS, chunks, [*in_any_order, *large]),
                (MIXED_CHUNK_LENGTHS, steps, [*whole, *large]),
                (SHORT_LENGTHS, short, able),
            ):
                lists = (_in_turn(written, family, heads) if _eight_bit_keys(family) else written) | drawn
                for name, lengths in lists.items() if large else ():
                    yield PackedProblem.of(family, name, PackedShape(*lengths, *heads)), served
            prompts = chunks | short | DRAWN_UNMASKED_LENGTHS if family.page_rows is None else {}
            for name, lengths in prompts.items() if plain and not large and len(in_any_order) > 1 else ():
                yield PackedProblem.of(family, name, PackedShape(*lengths, *heads)), in_any_order
        for heads in PROMPT_HEADS[family.head_dim]:
            able = _able(variants, heads)
            prompts = _prompts(family, heads) if any(map(_for_chunks, able)) else {}
            able = [variant for variant in able if variant.spec.split is None or _for_chunks(variant)]
            in_any_order = [variant for variant in able if not _for_mixed(variant)]
            for name, lengths in prompts.items():
                served = able if max(lengths[1]) <= FEW_KEYS else in_any_order
                yield PackedProblem.of(family, name, PackedShape(*lengths, *heads)), served
        windows_alone = given_with_calls(family.mask) and not family.keywords
        yield from _prompts_with_windows(family, variants) if given_with_calls(family.mask) else ()
        for heads in HEADS[family.head_dim]:
            able = [variant for variant in _able(variants, heads) if not _for_mixed(variant)]
            if any(variant.spec.split and not _for_chunks(variant) for variant in able):
                able = [variant for variant in able if not _for_chunks(variant)]
            whole = [variant for variant in able if variant.spec.split is None]
            for name, lengths in _lengths(family) if whole and plain else ():
                yield PackedProblem.of(family, name, PackedShape(*lengths, *heads)), whole
            if windows_alone:  # where tiles that hold several heads are for prompts
                able = [variant for variant in able if variant.spec.split or variant.spec.tile.pack_heads == 1]
            for name, window in _steps(family) if any(variant.spec.split for variant in able) else ():
                shape = PackedShape(*DECODING_LENGTHS[name], *heads, window=window)
                yield PackedProblem.of(family, name, shape), able


def _prompts_with_windows(
    family: Family, variants: Iterable[Variant[Forward]]
) -> Iterator[tuple[PackedProblem, list[Variant[Forward]]]]:
    """Where there are several modules that split no keys: else there is nothing to choose."""
    for heads in WINDOW_HEADS[family.head_dim]:
        whole = [variant for variant in _able(variants, heads) if variant.spec.split is None]
        if len(whole) > 1:
            names = (*PROMPTS_OF_WINDOWS, *STEPS_OF_WINDOWS) if any(map(_for_mixed, whole)) else PROMPTS_OF_WINDOWS
            for name, window in itertools.product(names, PROMPT_WINDOWS):
                shape = PackedShape(*ALL_LENGTHS[name], *heads, window=window)
                yield PackedProblem.of(family, name, shape), whole


def _drawn_lists(family: Family) -> tuple[dict[str, _Lengths], dict[str, _Lengths]]:
    """Drawn prompts or chunks, and steps beside chunks: as engines have them, which is not in pages of a row."""
    if family.page_rows is None:
        return DRAWN_PROMPT_LENGTHS, {}
    if family.page_rows == 1:
        return {}, {}
    return DRAWN_CHUNK_LENGTHS | DRAWN_SHORT_LENGTHS, DRAWN_STEP_LENGTHS


def _in_turn(lists: dict[str, _Lengths], family: Family, heads: tuple[int, int]) -> dict[str, _Lengths]:
    """Those that are measured with these heads: with keys of 8 bits others in pages of each size."""
    place = CHUNK_HEADS[family.head_dim].index(heads)
    return _every(lists, family, place + _place_of_pages(family) if _eight_bit_keys(family) else place)


def _prompts(family: Family, heads: tuple[int, int]) -> dict[str, _Lengths]:
    """Those that are measured with these heads: others in pages of each size, of which a row is none."""
    if family.page_rows == 1:
        return {}
    return _every(PROMPT_LENGTHS, family, PROMPT_HEADS[family.head_dim].index(heads) + _place_of_pages(family))


def _place_of_pages(family: Family) -> int:
    """Which turn pages of this size have among all sizes; packed sequences come last."""
    return (*PAGE_SIZES, None).index(family.page_rows)


def _every(lists: dict[str, _Lengths], family: Family, place: int) -> dict[str, _Lengths]:
    """One list of as many as take turns, those that it is the turn of `place` for."""
    turns = EIGHT_BIT_TURNS if _eight_bit_keys(family) else DRAWN_TURNS
    return {name: own for number, (name, own) in enumerate(lists.items()) if (number + place) % turns == 0}


def _eight_bit_keys(family: Family) -> bool:
    """Whether k and v have 8 bits, beside queries of 8 or of 16."""
    return family.eight_bits or family.kv_dtype is not None


def _able(variants: Iterable[Variant[Forward]], heads: tuple[int, int]) -> list[Variant[Forward]]:
    """Those whose tiles can hold the query heads of each kv head.

    Of a group that several tiles hold each reads the keys of a step again: of woven modules only those that any group
    may take have to be measured for it.
    """
    group = heads[0] // heads[1]
    held = [variant for variant in variants if takes_group(variant.spec, group)]
    return [
        each
        for each in held
        if each.spec.order != "woven" or each.spec.tile.group == "any" or each.spec.tile.pack_heads == group
    ]


def _for_mixed(variant: Variant[Forward]) -> bool:
    """Whether its order is for prompts beside steps: head after head, or those between these."""
    return variant.spec.order != "by_sequence"


def _for_chunks(variant: Variant[Forward]) -> bool:
    """Whether it splits keys and has tiles that the queries of a chunk fill: of more rows than a decoding step has, or
    of as many, and fewer heads where there are more queries."""
    tile = variant.spec.tile
    return variant.spec.split is not None and tile.q >= (64 if tile.group == "fitted" else 128)


def _families_of_calls(families: Iterable[Family]) -> list[Family]:
    """The families of the calls that modules of these serve: those of pages once for each page size, caps small."""
    found: dict[Family, None] = {}
    for family in families:
        sizes = (None,) if family.page_rows is None else PAGE_SIZES
        found |= dict.fromkeys(family._replace(page_rows=size, any_cap=False) for size in sizes)
    return list(found)


def _steps(family: Family) -> Iterable[tuple[str, Window | None]]:
    """Names of decoding steps, with the windows of their calls where calls give them."""
    if given_with_calls(family.mask):
        return [(name, window) for window, names in DECODING_WINDOWS.items() for name in names]
    return [(name, None) for name in DECODING_LENGTHS]


def _lengths(family: Family) -> Iterable[tuple[str, _Lengths]]:
    """Lists of lengths of queries and keys, with their names."""
    return (PACKED_LENGTHS if family.page_rows is None else PAGED_LENGTHS).items()
