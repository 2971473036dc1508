"""Consumers that visit only the tiles of keys that their own rows see, on the CPU model: who multiplies what."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from hosting import compiled, mistaken, reported
from rendering import CHECKOUT, attention_stems, plans, source, spec_of, variants

from fa3gen.cpu.kernel import CpuKernel
from fa3gen.cpu.schedule import FAST
from fa3gen.cpu.trace import Trace
from fa3gen.design import footprint, work
from fa3gen.design.family import Shape
from fa3gen.design.masks import Window, of_call, reach
from fa3gen.generate.render import render_variant
from fa3gen.hardware import hopper
from fa3gen.inspect import tracing
from fa3gen.verify.inputs import Case

torch.set_num_threads(1)  # the workers of xdist share the cores
ANY, CAUSAL = "fwd_d64_any_window", "fwd_d64_causal"
SHORT_RING = "fwd_d96_causal"
EVERYTHING = 10**6  # keys to one side


def visited(stem: str, shape: Shape) -> Counter[int]:
    """Tiles of keys of which each warpgroup multiplied P by V, over all tiles of queries of a call."""
    recorded, plan = Trace(), plans()[stem]
    kernel = CpuKernel(compiled(stem))
    fault = tracing.run_kernel(kernel, variants()[stem], tracing.Problem(shape), None, FAST, recorded)
    assert fault is None
    of_pv = list(plan.pv.instruction)
    assert of_pv != list(plan.qk.instruction)
    products = (event.details for cta in recorded.ctas for event in cta.events if event.kind == "product")
    counts = Counter(each["warpgroup"] for each in products if each["shape"] == of_pv)
    assert all(count % plan.pv.steps == 0 for count in counts.values())
    return Counter({group: count // plan.pv.steps for group, count in counts.items()})


def seen(stem: str, shape: Shape) -> Counter[int]:
    """The same from the definition of a mask: tiles of which one of a warpgroup's rows sees a key, at least one."""
    plan, counts = plans()[stem], Counter[int]()
    rows = torch.arange(-(-shape.seq_q // plan.tile.m) * plan.tile.m)[:, None] + shape.seq_k - shape.seq_q
    keys = torch.arange(-(-shape.seq_k // plan.tile.n) * plan.tile.n)[None]
    left, right = (EVERYTHING if side is None else side for side in reach(of_call(spec_of(stem).mask, shape.window)))
    visible = (keys >= rows - left) & (keys <= rows + right) & (keys < shape.seq_k)
    blocks = visible.view(-1, hopper.WGMMA_M, keys.shape[1] // plan.tile.n, plan.tile.n).any(3).any(1)
    for number, block in enumerate(blocks.tolist()):
        counts[number % plan.tile.warpgroups] += max(1, sum(block)) * shape.heads_q * shape.batch
    return counts


def test_those_that_do() -> None:
    """Three consumers and tiles of 128 keys, or two and 64; one head in a tile; a ring that is long enough."""
    own = {stem for stem in attention_stems() if plans()[stem].mask.by_consumer}
    tiles = {(plans()[stem].tile.m, plans()[stem].tile.n) for stem in own}
    assert own >= {ANY, CAUSAL, "fwd_d256_any_window", "fwd_packed_d64_causal", "fwd_paged_any_window_d64"}
    assert tiles == {(192, 128), (128, 64)}
    assert not own & {SHORT_RING, "fwd_d64", "fwd_d128_causal", "fwd_d64_pack8_window", "fwd_packed_fixed_d64_causal"}


@pytest.mark.parametrize(
    ("stem", "seq_q", "seq_k", "window"),
    [
        (ANY, 384, 384, (127, 0)),
        (ANY, 192, 520, (300, 70)),
        (ANY, 384, 512, (-1, -1)),
        (CAUSAL, 576, 576, None),
        (CAUSAL, 192, 333, None),
        (CAUSAL, 384, 100, None),
        ("fwd_d192_causal_short", 256, 320, None),
    ],
)
def test_each_multiplies_what_its_rows_see(stem: str, seq_q: int, seq_k: int, window: Window | None) -> None:
    shape = Shape(1, seq_q, seq_k, 2, 1, window=window)
    found = visited(stem, shape)
    assert found == seen(stem, shape)
    told = work.Problem(spec_of(stem), shape)
    assert sum(found.values()) == pytest.approx((told.visited - told.unseen) * plans()[stem].tile.warpgroups)
    if window != (-1, -1) and seq_k > plans()[stem].tile.n:
        assert len(set(found.values())) > 1  # else the CTA's range would do


MISTAKES = {
    # Its rows see more than those of the first one do.
    "the first consumer's range for all": ("work.m_block * TILE_M + consumer * WGMMA_M", "work.m_block * TILE_M"),
    # The one before waits for its turn, which nobody passes on.
    "a turn kept": ("skip_turns(consumer, work.n_end - own.n_end)", "skip_turns(consumer, 0)"),
    # P of its first tile meets V of the hidden one.
    "V not dropped": ("v_drain = drop(v_ring, v_drain, work.n_end - own.n_end)", "pass"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_reported(name: str, tmp_path: Path) -> None:
    old, new = MISTAKES[name]
    text = source(CAUSAL)
    assert text.count(old) == 1
    wrong = mistaken(tmp_path, CAUSAL, text.replace(old, new))
    case = Case("two tiles", "", 1, 384, 384, 1, 1)
    assert reported(wrong, spec_of(CAUSAL), [case])


def test_a_ring_too_short_for_hidden_tiles_stops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 112 keys may be hidden from a consumer: its own first K is the third, and waits for readers behind it."""
    spec = spec_of(SHORT_RING)
    assert footprint.kv_stages(spec) == 2 and not footprint.own_keys(spec)
    monkeypatch.setattr(footprint, "own_keys", lambda spec: True)
    forced = mistaken(tmp_path, "forced", render_variant(variants()[SHORT_RING], CHECKOUT))
    case = Case("two hidden", "", 1, 384, 417, 1, 1)  # the second tile of queries ends 33 keys into the third from it
    assert any("deadlock" in failure for failure in reported(forced, spec, [case]))
