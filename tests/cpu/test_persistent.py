"""Persistent kernels on the CPU model: any number of SMs, each tile taken once, what the compiled function refuses."""

from __future__ import annotations

import ast
import math
from collections import Counter
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosting import RecordedProgram, module, outputs
from rendering import attention_stems, extent, plans, source, tree, variants

from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.schedule import FAST, schedules
from fa3gen.design import tile_order
from fa3gen.design.family import Shape
from fa3gen.design.masks import reach
from fa3gen.design.tile_order import positions
from fa3gen.spec.model import CausalMask, Forward, NoMask
from fa3gen.verify import reference

DYNAMIC, STATIC = "fwd_d64_causal_short", "fwd_d64_short"  # of 128 and of 64 query rows
TILE_M = {DYNAMIC: 128, STATIC: 64}
WARPS = {DYNAMIC: 12, STATIC: 8}


def forward(stem: str) -> Forward:
    spec = variants()[stem].spec
    assert isinstance(spec, Forward)
    return spec


@cache
def tensors(seq_q: int, seq_k: int, heads_q: int = 4, heads_kv: int = 2) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, seq_q, heads_q, 64), (1, seq_k, heads_kv, 64), (1, seq_k, heads_kv, 64)]
    return tuple(torch.randn(shape, generator=generator).bfloat16() for shape in shapes)


# -- tiles and SMs


@pytest.mark.parametrize("stem", [DYNAMIC, STATIC])
def test_results_do_not_depend_on_who_takes_which_tile(stem: str) -> None:
    """One SM takes all tiles, 3 share them, of 20 there are some without; and warps meet in other orders."""
    rows = TILE_M[stem]
    given = tensors(rows + 9, 150)  # 8 tiles; 2 of keys. Under the causal mask rows of 159 see no key, or few.
    mask = CausalMask() if stem == DYNAMIC else NoMask()
    expected = reference.attention(*given, reach=reach(mask))
    first_out, first_lse = outputs(stem, Settings(sms=3), given)
    assert (first_out.double() - expected.out).abs().max() < 0.02
    finite = expected.lse.isfinite()
    assert (first_lse[finite] - expected.lse[finite]).abs().max() < 1e-5
    assert torch.equal(first_lse[~finite], torch.full_like(first_lse[~finite], -math.inf))
    by_warp = schedules(5, WARPS[stem])
    for sms, schedule in ((1, FAST), (2, by_warp[4]), (20, by_warp[1])):
        out, lse = outputs(stem, Settings(sms=sms, schedule=schedule), given)
        assert torch.equal(out, first_out) and torch.equal(lse, first_lse), sms


@cache
def recorded(stem: str) -> RecordedProgram:
    """Its host code alone; no kernel runs."""
    return RecordedProgram(module(stem).cpu.kernel.compiled)


@pytest.mark.parametrize("stem", [DYNAMIC, STATIC])
@pytest.mark.parametrize(("sms", "grid"), [(1, 1), (3, 3), (8, 8), (132, 8)])
def test_there_are_as_many_ctas_as_sms_or_as_tiles(stem: str, sms: int, grid: int) -> None:
    q, k, v = tensors(TILE_M[stem] + 1, 20)
    counter = [torch.zeros(1, dtype=torch.int32)] if stem == DYNAMIC else []
    lse = torch.empty(1, 1, 0)
    launched, _ = recorded(stem).launch(q, k, v, torch.empty_like(q), lse, sms, *counter, 0.125)
    assert (launched.grid, launched.block) == ((grid, 1, 1), (32 * WARPS[stem], 1, 1))


def test_a_launch_leaves_its_counter_as_it_was() -> None:
    """At zero, for the next launch of the stream, whoever draws last; two launches with one counter are right."""
    q, k, v = tensors(TILE_M[DYNAMIC] + 1, 20)
    counter, lse = torch.zeros(1, dtype=torch.int32), torch.empty(1, 1, 0)
    expected, _ = outputs(DYNAMIC, Settings(), (q, k, v))
    for sms in (1, 3, 20):
        o = torch.full_like(q, math.nan)
        module(DYNAMIC).compile_for_sm90a()(q, k, v, o, lse, sms, counter, 0.125)
        assert counter.tolist() == [0] and torch.equal(o, expected)


def test_the_counter_says_which_tiles_are_left() -> None:
    """With one that starts at 5 a CTA has its own first tile and the last two of 8; then it finds none left."""
    q, k, v = tensors(TILE_M[DYNAMIC] + 1, 20)
    o, counter = torch.full_like(q, math.nan), torch.tensor([5], dtype=torch.int32)
    module(DYNAMIC).cpu.settings = Settings()
    module(DYNAMIC).compile_for_sm90a()(q, k, v, o, torch.empty(1, 1, 0), 1, counter, 0.125)
    written = o.isfinite().all(-1)[0]  # (seq_q, heads)
    tiles = [(row, head) for row in (0, TILE_M[DYNAMIC]) for head in range(4) if written[row, head]]
    # Numbers 0 to 3 are the last rows of the heads, 4 to 7 their first rows.
    assert tiles == [(0, 2), (0, 3), (TILE_M[DYNAMIC], 0)]
    assert counter.tolist() == [0]


# -- the order of tiles, of every persistent module, from its own source


def tile_coordinates(stem: str, keys_in_l2: int | None, short: int = 0) -> Any:
    """The module's function, on plain numbers. `keys_in_l2` stands in for the module's own count, and up to `short`
    keys for that of a wave."""
    (function,) = [
        node for node in tree(stem).body if isinstance(node, ast.FunctionDef) and node.name == "tile_coordinates"
    ]
    function = ast.parse(ast.unparse(function)).body[0]  # type: ignore[assignment]
    function.decorator_list.clear()
    for argument in function.args.args:
        argument.annotation = None
    names = {
        "cutlass": SimpleNamespace(min=min, max=max),
        "cute": SimpleNamespace(ceil_div=lambda a, b: -(-a // b), size=lambda x, mode: extent(x.shape[mode[0]])),
        "TILE_M": variants()[stem].spec.tile.q,
        "KEYS_IN_L2": keys_in_l2 if not short else -1,
        **({"SHORT_KEYS": short, "KEYS_OF_WAVE": keys_in_l2} if tile_order.waves_when_short(forward(stem)) else {}),
    }
    exec(compile(ast.Module([function], []), stem, "exec"), names)
    return names["tile_coordinates"]


PERSISTENT = [stem for stem in attention_stems() if plans()[stem].scheduler.persistent]
DENSE = [stem for stem in PERSISTENT if not plans()[stem].problem.packed_sequences]  # whose tiles are numbered so
DRAWN = [stem for stem in PERSISTENT if plans()[stem].scheduler.kind == "dynamic"]
SHAPES = [  # batch, seq_q, seq_k, heads_q, heads_kv
    (1, 1, 1, 1, 1),
    (2, 700, 900, 6, 2),
    (3, 513, 100, 5, 5),
    (1, 1000, 1300, 7, 1),
    (2, 64, 4000, 12, 4),
]


@pytest.mark.parametrize("stem", DENSE)
def test_every_tile_has_one_number(stem: str) -> None:
    """With K and V of no head, of one, of 3, or of all heads in L2; the last section has the rest as well."""
    tile = plans()[stem].tile
    for batch, seq_q, seq_k, heads_q, heads_kv in SHAPES:  # where heads are packed, heads_q counts packs
        rows = (tile.pack_heads, seq_q) if tile.packed else seq_q
        q, k = SimpleNamespace(shape=(rows, 64, heads_q, batch)), SimpleNamespace(shape=(seq_k, 64, heads_kv, batch))
        blocks = -(-seq_q // positions(variants()[stem].spec))
        choices = [(keys, 0) for keys in ((seq_k - 1, seq_k, 3 * seq_k + 1, 10**9) if stem in DRAWN else (None,))]
        choices += [(seq_k + 1, seq_k)] * tile_order.waves_when_short(forward(stem))
        for keys, short in choices:
            of = tile_coordinates(stem, keys, short)
            tiles = [of(number, q, k) for number in range(blocks * heads_q * batch)]
            places = Counter((m_block, head, entry) for m_block, head, _, entry in tiles)
            assert places == Counter((i, h, b) for i in range(blocks) for h in range(heads_q) for b in range(batch))
            assert all(head_kv == head // (heads_q // heads_kv) for _, head, head_kv, _ in tiles)
            check_order([(m_block, entry * heads_q + head) for m_block, head, _, entry in tiles], blocks, keys, seq_k)


def check_order(tiles: list[tuple[int, int]], blocks: int, keys: int | None, seq_k: int) -> None:
    """(m_block, head of all batches) by number: head by head, or by sections of heads that share L2, longest first."""
    if keys is None:
        assert tiles == sorted(tiles, key=lambda tile: (tile[1], tile[0]))
        return
    share, heads = max(keys // seq_k, 1), len(tiles) // blocks
    starts = [*range(0, max(heads // share, 1) * share, share)]
    for first, end in pairwise([*starts, heads]):
        section = tiles[first * blocks : end * blocks]
        assert {head for _, head in section} == set(range(first, end))
        assert all(before[0] >= after[0] for before, after in pairwise(section))


@pytest.mark.parametrize("stem", [stem for stem in DRAWN if variants()[stem].spec.order == "by_sequence"])
def test_keys_in_l2(stem: str) -> None:
    """Those whose K and V, 2 bytes an element, or 1 where they have 8 bits in memory, take 32 MB."""
    problem, element = plans()[stem].problem, variants()[stem].spec.kv_element.bytes
    line = next(line for line in source(stem).splitlines() if line.startswith("KEYS_IN_L2 = "))
    values = {"HEAD_DIM": problem.head_dim, "HEAD_DIM_V": problem.v_dim}
    keys = eval(line.partition("=")[2].partition("#")[0], {"__builtins__": {}}, values)
    assert keys == 33554432 // (element * problem.head_dim + element * problem.v_dim)


def test_short_heads_come_by_waves() -> None:
    """Of 32 x 512 keys as many as fill 132 SMs, where memory binds; of 2,048 keys as many as L2 has room for."""
    waves = [stem for stem in DRAWN if tile_order.waves_when_short(forward(stem))]
    assert {"fwd_d128_causal", "fwd_fp16_d192_causal_short", "fwd_d64_sink_causal"} < set(waves)
    assert not {"fwd_d128_any_window", "fwd_fp8_d128_causal", "fwd_d128_pack4_causal", "fwd_packed_d128_causal"} & {
        *waves
    }
    for stem in DRAWN:
        line = next((line for line in source(stem).splitlines() if line.startswith("SHORT_KEYS, KEYS_OF_WAVE")), "")
        assert line.partition("  #")[0] == ("SHORT_KEYS, KEYS_OF_WAVE = 1024, 132 * TILE_M" if stem in waves else "")
    spec = forward("fwd_d128_causal")
    assert tile_order.keys_of_wave(spec) // 512 == 33
    short, long = (list(tile_order.taken(spec, Shape(32, keys, keys, 16, 16))) for keys in (512, 2048))
    assert {(tile.batch, tile.head) for tile in short[:132]} == {(head // 16, head % 16) for head in range(33)}
    assert [tile.m_block for tile in short[:132:33]] == [3, 2, 1, 0]
    assert {tile.m_block for tile in long[:32]} == {15} and long[32].m_block == 14


# -- what the compiled function refuses, where the module itself checks nothing


def zeros(seq: int, heads: int, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(1, seq, heads, dim, dtype=dtype)


SHIFTED = torch.zeros(7 * 64 + 8, dtype=torch.bfloat16)[1 : 1 + 7 * 64].view(1, 7, 1, 64)
REFUSED: dict[str, tuple[dict[str, torch.Tensor], str, str]] = {
    "dtype of q": ({"q": zeros(5, 2, dtype=torch.float16)}, "Mismatched Tensor on argument #0", "dtype=bfloat16"),
    "head dim of q": ({"q": zeros(5, 2, 128)}, "Mismatched q.shape[3] on argument #0", "to be 64"),
    "head dim of v": ({"v": zeros(7, 1, 32)}, "Mismatched v.shape[3] on argument #2", "to be 64"),
    "fewer keys in v": ({"v": zeros(6, 1)}, "Mismatched v.shape[1] on argument #2", "to match k.shape[1]"),
    "other heads of v": ({"v": zeros(7, 2)}, "Mismatched v.shape[2] on argument #2", "to match k.shape[2]"),
    "every second element": ({"q": zeros(5, 2, 128)[..., ::2]}, "Mismatched q.strides[3] on argument #0", "to be 1"),
    "rows of 136 bytes": (
        {"k": zeros(7, 2, 68)[..., :64], "v": zeros(7, 2)},
        "Invalid k.strides[2] on argument #1",
        "to be divisible by 8",
    ),
    "2 bytes too far": ({"k": SHIFTED}, "Misaligned Tensor data on argument #1", "data alignment=16 bytes"),
    "dimensions of v": ({"v": zeros(7, 1)[0]}, "Mismatched Tensor on argument #2", "ndim=4"),
    "rows of out": ({"out": zeros(6, 2)}, "Mismatched out.shape[1] on argument #3", "to match q.shape[1]"),
    "heads of out": ({"out": zeros(5, 1)}, "Mismatched out.shape[2] on argument #3", "to match q.shape[2]"),
    "dimensions of out": ({"out": zeros(5, 2)[0]}, "Mismatched Tensor on argument #3", "ndim=4"),
    "dtype of out": ({"out": zeros(5, 2, dtype=torch.float32)}, "Mismatched Tensor on argument #3", "dtype=bfloat16"),
}


@pytest.mark.parametrize("stem", [DYNAMIC, STATIC])
@pytest.mark.parametrize("what", REFUSED)
def test_the_compiled_function_names_the_argument(stem: str, what: str) -> None:
    changes, begins, ends = REFUSED[what]
    with pytest.raises(ValueError) as caught:
        module(stem).attention(**{"q": zeros(5, 2), "k": zeros(7, 1), "v": zeros(7, 1), **changes})
    message = str(caught.value)
    assert message.startswith(f"{begins} when calling: `launch(q: Tensor([n0, n1, n2, 64], bfloat16), ")
    assert message.endswith(f", expected {ends}")
