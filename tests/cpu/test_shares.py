"""Even shares of packed keys on the CPU model: tiles cut wherever shares end, parts added up, mistakes reported."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hosting import compiled, mistaken, module, path_of, small
from rendering import source, spec_of, variants

from fa3gen.cpu.driver import LaunchRefused
from fa3gen.cpu.host import HostProgram
from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.module import load_on_cpu
from fa3gen.design import ceiling
from fa3gen.design.family import PackedShape
from fa3gen.design.splits import num_lines, share_of, steps_of
from fa3gen.design.work import Problem
from fa3gen.spec.model import Forward
from fa3gen.verify import packed_inputs, paged_inputs
from fa3gen.verify.on_cpu import verify_on_cpu
from fa3gen.verify.packed_inputs import PackedCase, sequences

torch.set_num_threads(1)  # the workers of xdist share the cores
PACKED, CAUSAL, PAGED = "fwd_packed_decode_d128", "fwd_packed_decode_d128_causal", "fwd_paged_decode_d128_causal"


def in_layout(spec: Forward, case: PackedCase) -> PackedCase:
    """The case as a module's layout has it."""
    return next(paged_inputs.in_pages([case], spec)) if spec.problem.layout == "paged" else case


def failures(found: Any, spec: Forward, cases: list[PackedCase], sms: int, seed: int | None = None) -> tuple[str, ...]:
    """What goes wrong with so many SMs, under one schedule.

    Also in calls without work, but for as many SMs as test_every_module makes them with.
    """
    found.cpu.settings, calls = Settings(sms=sms), sms != Settings().sms
    try:
        report = verify_on_cpu(found, spec, cases=cases, count=1, calls=calls, seed=seed)
        return tuple(report.failures)
    finally:
        found.cpu.settings = Settings()


def drawn(draw: random.Random) -> PackedCase:
    """A step of serving: most sequences have a query or a few, some have many, or none; any group of heads."""
    count, heads_kv = draw.choice((1, 3, 9, 40)), draw.choice((1, 2, 3))
    lengths_q = [draw.choice((1, 1, 1, 2, 4, 5, 9, 0)) for _ in range(count)]
    most = draw.choice((5, 70, 300, 900)) if count < 9 else 70
    lengths_k = [draw.randint(0, most) for _ in range(count)]
    heads = draw.choice((1, 2, 3, 5, 8, 12, 16)) * heads_kv, heads_kv
    named: dict[str, Any] = {"heads": heads, "first": 2, "sinks": draw.choice(("float32", "bfloat16"))}
    named["window"] = draw.choice((0, 3, 63, 64, 130, 500, -1)), draw.choice((0, 0, 2, -1))
    return sequences(f"drawn {draw.randrange(10**6)}", "a step of serving", lengths_q, lengths_k, **named)


OTHERS = [f"fwd_{name}" for name in ("packed_decode_d64", "paged_decode_d256_causal", "paged_decode_rows_d64_causal")]
WINDOW, SINK = "fwd_paged_decode_any_window_d128", "fwd_packed_decode_sink_causal"
OF_SCORES = [WINDOW, SINK, "fwd_packed_decode_sink_any_window", "fwd_paged_decode_softcap_any_window"]


@pytest.mark.parametrize(
    ("stem", "sms"),
    [
        *itertools.product([PACKED, CAUSAL, PAGED], [1, 2, 3, 7]),
        *((stem, 3) for stem in OTHERS),
        *itertools.product(OF_SCORES, [2, 5]),
    ],
)
def test_steps_of_serving(stem: str, sms: int) -> None:
    draw, spec = random.Random(100 * sms + len(stem)), spec_of(stem)
    assert failures(module(stem), spec, [in_layout(spec, drawn(draw)) for _ in range(3)], sms, seed=sms) == ()


def shares(lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], heads_kv: int, sms: int) -> list[list[int]]:
    """By CTA the number of steps in each of its tiles, by the words of the module's `find_tiles`."""
    entry = module(PACKED)
    lines = heads_kv if heads_kv <= sms else 1
    in_lines: list[list[tuple[tuple[int, int, int], int]]] = [[] for _ in range(lines)]
    for number, (queries, keys) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        for head, row in itertools.product(range(heads_kv), range(-(-queries // entry.POSITIONS))):
            steps = range(max(-(-keys // entry.TILE_N), 1))
            in_lines[head % lines] += [((number, head, row), step) for step in steps]
    shape = PackedShape(lengths_q, lengths_k, heads_kv, heads_kv)
    spec = variants()[PACKED].spec
    share, ctas = share_of(spec, shape, sms), sms // lines
    assert sum(map(len, in_lines)) == steps_of(spec, shape) and share * ctas >= max(map(len, in_lines))
    found = [
        [sum(tile == other for other, _ in part) for tile in dict.fromkeys(tile for tile, _ in part)]
        for line in in_lines
        for part in (line[first : first + share] for first in range(0, share * ctas, share))
    ]
    assert visited(Problem(spec, shape), sms) == [part for part in found if part]
    return found


def visited(problem: Problem, sms: int) -> list[list[int]]:
    """Steps of each tile, or part of one, that the CTAs have, of CTAs with any."""
    return [[part.steps for part in parts] for parts in ceiling.parts(problem, sms)]


def test_what_a_share_is() -> None:
    """Steps in equal shares, two at least, where tiles are cut."""
    assert shares((1,), (64 * 12,), 1, 3) == [[4], [4], [4]]
    assert shares((1, 1), (64 * 3, 64 * 6), 1, 3) == [[3], [3], [3]]
    assert shares((1, 5, 1), (64, 0, 65), 1, 3) == [[1, 1], [1, 1], [1]]
    assert shares((1, 1), (64, 64), 1, 3) == [[1, 1], [], []]  # two steps at least, though two CTAs have none
    assert shares((), (), 1, 2) == [[], []]


def test_each_head_has_a_line() -> None:
    """CTAs have equal shares of one head each, as many of every head; one is left over, or all have one line."""
    assert shares((1, 5, 1), (64, 0, 65), 2, 3) == [[1, 1, 1, 2]] * 2
    assert shares((1, 5, 1), (64, 0, 65), 2, 4) == [[1, 1, 1], [2]] * 2
    assert shares((1,), (64 * 7,), 3, 2) == [[7, 4], [3, 7]]


@pytest.mark.parametrize(
    ("heads_kv", "sms", "lines"),
    [
        (1, 132, 1),
        (7, 132, 7),
        (8, 132, 8),
        (8, 7, 1),
        (10, 132, 2),
        (12, 132, 4),
        (16, 132, 8),
        (40, 132, 8),
        (9, 132, 1),
    ],
)
def test_how_many_lines_there_are(heads_kv: int, sms: int, lines: int) -> None:
    """By design as by the module: a dimension of the grid, whose other one is the CTAs of each."""
    spec, entry = variants()[PACKED].spec, module(PACKED)
    shape = PackedShape((1,), (64,), heads_kv, heads_kv)
    grids: list[tuple[int, int, int]] = []
    host = HostProgram(compiled(PACKED).host_module, lambda launch: grids.append(launch.grid))
    q = torch.zeros(1, heads_kv, 128).bfloat16()
    lengths = [torch.zeros(size, dtype=torch.int32) for size in (2, 2, 0, 0)]
    host(q, q, q, *lengths, q.clone(), torch.zeros(1, 0), sms, torch.zeros(sms, entry.CTA_WORDS), 1.0)
    ctas = sms // lines
    assert num_lines(spec, shape, sms) == lines and grids == [(lines, ctas, 1), (ctas * lines, 1, 1)]


def test_what_a_mask_hides_is_shared_out_and_skipped() -> None:
    spec = variants()[CAUSAL].spec
    problem = Problem(spec, PackedShape((128,), (128,), 1, 1))  # 32 tiles of 4 positions, two steps each
    found = visited(problem, 5)
    assert [len(part) for part in found] == [7, 7, 7, 7, 6] and found[0] == found[1] == [1] * 7
    assert sum(map(sum, found)) == problem.visited + 1  # a part that no row sees a key of has one


def scratch(found: Any, case: PackedCase, sms: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a launch leaves: LSE of the slots, (CTAs, 2, rows), and what each CTA says of the tile that it begins."""
    made: list[torch.Tensor] = []
    empty = found.empty

    def kept(*asked: Any) -> torch.Tensor:
        made.append(empty(*asked))
        return made[-1]

    found.cpu.settings, found.empty = Settings(sms=sms), kept
    try:
        made_for = packed_inputs.make(variants()[PACKED].spec, case, device=torch.device("cpu"), seed=1)
        found.attention(**made_for.given, return_lse=True)
    finally:
        found.cpu.settings, found.empty = Settings(), empty
    (workspace,) = [tensor for tensor in made if tensor.shape == (sms, found.CTA_WORDS)]
    slots = sms, 2, found.TILE_M
    sizes = math.prod(slots) * found.HEAD_DIM, math.prod(slots), sms * found.SHARE_WORDS
    _, lse, words = workspace.flatten().split(sizes)
    return lse.view(slots), words.view(torch.int32).view(sms, -1)


def test_slots_and_words() -> None:
    """A tile in three shares, one that ends where a share does, one in two."""
    case = sequences("slots", "", (1, 2, 1), (64 * 5, 64 * 3, 64 * 4), heads=(2, 1))
    lse, words = scratch(module(PACKED), case, 6)  # 12 steps: two each
    assert words.tolist() == [
        [3, 1, 0, 0],  # the first tile goes on in the next two
        [0, 0, 0, 0],
        [2, 2, 1, 0],  # the second begins in the middle of this one
        [0, 0, 0, 0],
        [2, 1, 3, 0],
        [0, 0, 0, 0],
    ]
    written = ~lse.isnan()  # rows: positions, each of up to 16 heads
    rows = [[slot.nonzero().flatten().tolist() for slot in cta] for cta in written]
    one, two = [0, 1], [0, 1, 16, 17]
    assert rows == [[[], one], [one, []], [one, two], [two, []], [[], one], [one, []]]


def test_heads_of_another_group_do_not_reach_a_row() -> None:
    """A box of Q holds heads of the next kv head where a group is small: they are computed, and stored nowhere."""
    spec = variants()[PACKED].spec
    case = sequences("groups", "", (1, 2), (200, 70), heads=(6, 2))
    made = packed_inputs.make(spec, case, device=torch.device("cpu"), seed=3)
    wanted = module(PACKED).attention(**made.given)
    made.q[:, 3:] = float("nan")
    found = module(PACKED).attention(**made.given)
    used = slice(*case.offsets_q[:: len(case.offsets_q) - 1])
    assert found[used, :3].equal(wanted[used, :3]) and found[used, 3:].isnan().all()


def test_more_steps_than_are_counted_are_refused() -> None:
    entry = module(PACKED)
    q, kv = torch.zeros(1, 1, 128).bfloat16(), torch.zeros(1, 1, 128).bfloat16()
    ends = torch.tensor([0, 1], dtype=torch.int32)
    entry.MOST_STEPS, most = 0, entry.MOST_STEPS
    try:
        with pytest.raises(ValueError, match="may be 1 tiles of keys, which are counted up to 0: call a module of sch"):
            entry.attention(q, kv, kv, ends, ends)
    finally:
        entry.MOST_STEPS = most


# Mistakes

MISTAKES = {
    "a share that begins a step late": (
        "step, end = line_cta * share,",
        "step, end = line_cta * share + (1 if cta > 0 else 0),",
    ),
    "a share that ends a step late": (
        "cutlass.min(line_cta * share + share, total)",
        "cutlass.min(line_cta * share + share + 1, total)",
    ),
    "fewer parts than there are": (
        "parts = cute.ceil_div(step + n_blocks, share) - line_cta",
        "parts = (step + n_blocks) // share - line_cta",
    ),
    "more parts than there are": (
        "parts = cute.ceil_div(step + n_blocks, share) - line_cta",
        "parts = cute.ceil_div(step + n_blocks, share) - line_cta + 1",
    ),
    "one line for all heads": ("head_kv = head * lines + line", "head_kv = head"),
    "two CTAs that write in one place": ("cta = line * line_ctas + line_cta", "cta = line_cta"),
    "both parts of a CTA in one slot": ("slot = 2 * cta + 1 if begins else 2 * cta", "slot = 2 * cta"),
    "a whole tile as a part": ("slot = -1 if begins and ends else slot", "slot = slot + 0"),
    "nothing said of a cut tile": ("if begins and not ends:", "if begins and not ends and cta < 0:"),
    "said of a tile that was begun before": ("if begins and not ends:", "if not ends:"),
    "the first position of another tile": ("q_begin + m_block * POSITIONS", "q_begin"),
    "heads of another group": ("m_block, head_kv * heads, head_kv,", "m_block, head_kv, head_kv,"),
    "keys of a part in another order": (
        "slot = 2 * (cta + part) if part > 0",
        "slot = 2 * (cta + part + 1) if part > 0",
    ),
    "words that are left as they were": (
        "    if cute.arch.lane_idx() == 0:\n        for i, word",
        "    if cute.arch.lane_idx() == 32:\n        for i, word",
    ),
    "rows of heads that do not exist": ("head < group and query < seq_q", "query < seq_q"),
    "the first 32 sequences only": ("while first + WARP < last:", "while first + WARP < 0:"),
    "positions that nobody adds up": (
        "cutlass.min(rows, POSITIONS), ctas_of_head",
        "cutlass.min(rows, 1), ctas_of_head",
    ),
    "a row added up where the one before still is": (
        "            cute.arch.sync_threads()  # the next row goes where this one was\n",
        "",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported(mistake: str, tmp_path: Path) -> None:
    (old, new), (text, spec) = MISTAKES[mistake], small(CAUSAL)
    assert text.count(old) == 1, f"the module has changed: {old}"
    found = mistaken(tmp_path, "wrong", text.replace(old, new))
    assert any(failures(found, spec, [case], 3) for case in cases_of_shares(spec))


def cases_of_shares(spec: Forward) -> list[PackedCase]:
    """Tiles cut, shared and whole."""
    kv = spec.tile.kv
    cut = sequences("cut", "tiles cut, whole, of several positions", (1, 6, 1), (kv * 6, kv * 4, kv), heads=(6, 2))
    long = sequences("long", "a tile in all shares", (1,), (kv * 12,))
    rows = sequences("rows", "a second tile of the same head, cut", (6,), (kv * 4,))
    many = sequences("many", "more than a warp looks at", [1] * 40, [kv + 1] * 40)
    several = sequences("several", "a CTA adds up several positions", (1, 1, 1, 4), (kv, kv, kv, kv * 12), heads=(1, 1))
    return [cut, long, rows, many, several]


def test_without_a_mistake_nothing_is_reported(tmp_path: Path) -> None:
    """In the small modules, which are no committed ones."""
    text, spec = small(CAUSAL)
    assert failures(mistaken(tmp_path, "right", text), spec, cases_of_shares(spec), 3) == ()


@pytest.mark.parametrize(("kernel", "place"), [("attention_kernel", 0), ("combine_kernel", 1)])
def test_what_the_kernel_before_has_not_written_yet_is_not_read(kernel: str, place: int, tmp_path: Path) -> None:
    """Lengths, and parts: either kernel may begin beside the one before."""
    wait = "    cute.arch.griddepcontrol_wait()\n"
    texts = source(CAUSAL).split(wait)
    assert len(texts) == 3 and kernel in texts[place]
    texts[place : place + 2] = ["".join(texts[place : place + 2])]
    found = load_on_cpu(path_of(tmp_path, "early", wait.join(texts)))
    with pytest.raises(LaunchRefused, match="uses global memory before griddepcontrol.wait; have it wait first"):
        scratch(found, sequences("one", "", (1,), (300,)), 2)


ROWS = "fwd_paged_decode_rows_d128"
# Of modules with windows, with sinks, and of those that gather rows: module, what stands there, what should not.
OTHER_MISTAKES = {
    "as many tiles as a window shows one row, from its first key on": (
        WINDOW,
        "+ window_right + POSITIONS + BOX_ROWS - 1 ",
        "+ window_right ",
    ),
    "tiles without an edge that are another part's": (WINDOW, "cutlass.max(n_full_begin, n_begin)", "n_full_begin"),
    "an end of a part that the window does not see": (
        WINDOW,
        "cutlass.min(n_end, n_seen_end), n_begin",
        "n_end, n_end",
    ),
    "a sink in every part": (SINK, "if work.slot < 0:\n            low", "if work.slot < 99:\n            low"),
    "no sink where parts are added up": (SINK, "weight_of(sink, largest)", "cutlass.Float32(0.0)"),
    "the sink of another head": (SINK, "read_sink(mSinks, head)", "read_sink(mSinks, 0 * head)"),
    "sinks of heads that do not exist": (
        SINK,
        "cutlass.min(work.head + row % PACK_HEADS, cute.size(mSinks, mode=[0]) - 1)",
        "work.head + row % PACK_HEADS",
    ),
    "told before it has landed": (ROWS, "cp_async_wait_group(on_their_way)", "cp_async_wait_group(on_their_way + 1)"),
    "entries of the table of another tile": (ROWS, "work.n_end - 3, pages)", "work.n_end - 2, pages)"),
    "a last tile that nobody is told of": (ROWS, "        v_told = tell_landed(v_ring, v_told, v_fill, 0)\n", ""),
    "tiles told before the barriers are made": (ROWS, "    cute.arch.sync_threads()  # the barriers are made\n", ""),
}


@pytest.mark.parametrize("mistake", OTHER_MISTAKES)
def test_mistakes_with_windows_sinks_and_rows_are_reported(mistake: str, tmp_path: Path) -> None:
    stem, old, new = OTHER_MISTAKES[mistake]
    text, spec = small(stem)
    assert text.count(old) == 1, f"the module has changed: {old}"
    found = mistaken(tmp_path, "wrong", text.replace(old, new))
    assert any(failures(found, spec, [case], 3) for case in cases_of_windows(spec))


def cases_of_windows(spec: Forward) -> list[PackedCase]:
    """Tiles that a window cuts, that all share, and that one CTA has."""
    kv = spec.tile.kv
    window, cut = (2 * kv - 1, 0), ((1, 6, 1), (kv * 9, kv * 4 + kv // 2 + 1, kv * 5 - kv // 3))
    cases = [
        sequences("narrow", "tiles that a window cuts on both sides", *cut, heads=(6, 2), window=window),
        sequences("wide", "a tile in all shares", (1,), (kv * 12,), heads=(3, 1), window=(-1, -1)),
        sequences("whole", "tiles that one CTA has", (1, 1, 1), (kv, kv, kv), heads=(6, 2), window=window),
    ]
    return [in_layout(spec, case) for case in cases]


@pytest.mark.parametrize("stem", sorted({stem for stem, *_ in OTHER_MISTAKES.values()}))
def test_without_a_mistake_with_windows_sinks_and_rows_nothing_is_reported(stem: str, tmp_path: Path) -> None:
    text, spec = small(stem)
    assert failures(mistaken(tmp_path, "right", text), spec, cases_of_windows(spec), 3) == ()
