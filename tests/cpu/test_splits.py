"""Keys in parts on the CPU model: how many parts there are, what is added up, and mistakes that have to be reported."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hosting import mistaken, module, outputs, path_of
from rendering import source, variants

from fa3gen.cpu.driver import LaunchRefused
from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.module import load_on_cpu
from fa3gen.design.family import Shape
from fa3gen.design.splits import num_parts
from fa3gen.verify.inputs import Case, make_for
from fa3gen.verify.on_cpu import verify_on_cpu

torch.set_num_threads(1)  # the workers of xdist share the cores
STEM, CAUSAL = "fwd_decode_d64", "fwd_decode_d64_causal"
# Only the last one of the three queries sees the last part, which has one key.
PARTS = Case("parts", "several parts, the last cut short, a group with padding", 1, 3, 6 * 64 + 1, 5, 1)


@pytest.mark.parametrize("sms", [1, 3, 132])
@pytest.mark.parametrize(("seq_q", "heads"), [(1, (8, 1)), (5, (8, 2)), (16, (32, 2))])
def test_the_formula_is_the_modules(sms: int, seq_q: int, heads: tuple[int, int]) -> None:
    """`num_parts` counts as the entry point does; no part is empty, and the CTAs of several fit on the GPU."""
    spec, entry = variants()[STEM].spec, module(STEM)
    kv, most = spec.tile.kv, sms * spec.tile.ctas_per_sm
    for seq_k in (1, kv, kv + 1, 4 * kv, 4 * kv + 1, 1000, 4096, 131072):
        shape = Shape(2, seq_q, seq_k, *heads)
        tiles = 2 * heads[1] * -(-seq_q // entry.POSITIONS)
        parts = num_parts(spec, shape, sms)
        assert parts == entry.parts_of(seq_k, tiles, sms)
        steps = -(-seq_k // kv)
        assert 0 <= (parts - 1) * -(-steps // parts) < steps
        assert parts == 1 or (parts * tiles <= most and steps // parts >= 2)


def test_parts_give_what_one_part_gives() -> None:
    """The same O to the rounding of P and O, and the same LSE to that of float32, with any number of parts."""
    spec = variants()[CAUSAL].spec
    given = tuple(make_for(spec, PARTS, device=torch.device("cpu"), seed=2).given.values())
    assert [num_parts(spec, Shape(1, 3, 6 * 64 + 1, 5, 1), sms) for sms in (0, 1, 2, 3)] == [1, 2, 3, 3]
    results = [outputs(CAUSAL, Settings(sms=sms), given) for sms in (0, 1, 2, 3)]
    assert not results[0][1].equal(results[1][1]) and results[2][0].equal(results[3][0])
    for out, lse in results[1:]:
        torch.testing.assert_close(out.float(), results[0][0].float(), rtol=0, atol=4e-3)
        torch.testing.assert_close(lse, results[0][1], rtol=1e-5, atol=1e-5)


def test_more_parts_than_warps_ask_for_at_once() -> None:
    """A warp that comes to further parts brings what it has to a larger maximum, and back to none that is smaller."""
    spec, entry = variants()[STEM].spec, module(STEM)
    at_once = entry.COMBINE_WARPS * entry.PARTS_AT_ONCE
    shape = Shape(1, 1, 2 * (at_once + 5) * spec.tile.kv, 1, 1)
    assert num_parts(spec, shape, at_once) == at_once + 5
    case = Case("many", "many parts", shape.batch, shape.seq_q, shape.seq_k, shape.heads_q, shape.heads_kv)
    q, k, v = make_for(spec, case, device=torch.device("cpu"), seed=4).given.values()
    k *= torch.linspace(0.1, 3.0, shape.seq_k).view(1, -1, 1, 1)  # later parts have larger scores
    for keys in (k, k.flip(1)):
        parts, one = (outputs(STEM, Settings(sms=sms), (q, keys, v)) for sms in (at_once, 0))
        torch.testing.assert_close(parts[0].float(), one[0].float(), rtol=0, atol=4e-3)
        torch.testing.assert_close(parts[1], one[1], rtol=1e-5, atol=1e-5)


def test_rows_without_a_key_in_any_part() -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(1, rows, heads, 64, generator=generator).bfloat16() for rows, heads in ((4, 2), (2, 1), (2, 1))
    )
    out, lse = module(CAUSAL).attention(q, k, v, return_lse=True)
    assert (out[:, :2] == 0).all() and (lse[:, :, :2] == -math.inf).all() and (out[:, 2:] != 0).all()


# Mistakes

MISTAKES = {
    "parts that all count the same": ("weight = weight_of(rLSE[i], largest)", "weight = cutlass.Float32(1.0)"),
    "parts past the last one counted": (
        "part = first + i * COMBINE_WARPS\n",
        "part = cutlass.min(first + i * COMBINE_WARPS, num_parts - 1)\n",
    ),
    "what the warps have not brought to one maximum": (
        "weights[warp] = weight_of(sLargest[warp], largest)",
        "weights[warp] = cutlass.Float32(1.0)",
    ),
    "the first tile of a part left to nobody": (
        "n_begin = part * steps_of_part\n",
        "n_begin = part * steps_of_part + (1 if part > 0 else 0)\n",
    ),
    "a part that goes on into the next": (
        "n_end = cutlass.max(cutlass.min(n_end, n_begin + steps_of_part), n_begin + 1)",
        "n_end = cutlass.max(cutlass.min(n_end, n_begin + steps_of_part + 1), n_begin + 1)",
    ),
    "parts of another row": (
        "gO = parts[None, batch, row, head, None]",
        "gO = parts[None, batch, 0, head, None]",
    ),
    "rows of heads that do not exist": ("head < group and query < seq_q", "query < seq_q"),
    "-inf less -inf": ("shift = 0.0 if largest == -cutlass.Float32.inf else largest", "shift = largest"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported(mistake: str, tmp_path: Path) -> None:
    old, new = MISTAKES[mistake]
    text = source(CAUSAL)
    assert text.count(old) == 1, f"the module has changed: {old}"
    found = mistaken(tmp_path, "wrong", text.replace(old, new))
    rows = Case("rows", "rows without a key", 1, 4, 2, 5, 1)
    report = verify_on_cpu(found, variants()[CAUSAL].spec, stem="wrong", cases=[PARTS, rows], seed=1, calls=False)
    assert report.failures


def test_parts_read_before_they_are_written_are_refused(tmp_path: Path) -> None:
    """Launches follow one another on the model, so that no run would show it: the order of the PTX does."""
    before, wait, after = source(CAUSAL).rpartition("    cute.arch.griddepcontrol_wait()\n")
    assert wait
    found = load_on_cpu(path_of(tmp_path, "early", before + after))
    given = make_for(variants()[CAUSAL].spec, PARTS, device=torch.device("cpu"), seed=2).given.values()
    with pytest.raises(LaunchRefused, match="uses global memory before griddepcontrol.wait; have it wait first"):
        found.attention(*given)
