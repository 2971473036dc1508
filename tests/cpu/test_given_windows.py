"""Windows that calls give, on the CPU model: one kernel for all of them, and what shows that one is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hosting import cases_of, mistaken, path_of, reported, small
from rendering import CHECKOUT, changed

from fa3gen.cpu.module import load_on_cpu
from fa3gen.design import tile_order
from fa3gen.generate.render import render_variant
from fa3gen.spec.model import Forward
from fa3gen.verify.inputs import Case, cpu_cases
from fa3gen.verify.on_cpu import CpuRunner, verify_on_cpu

torch.set_num_threads(1)  # the workers of xdist share the cores
ANY = {"kind": "window", "left": None, "right": None}
COOPERATIVE, OVERLAPPED = "k4_2_any_window", "fwd_d256_any_window"


def cases(spec: Forward) -> list[Case]:
    """Two tiles of queries, on more keys and on fewer, with windows that end before, in and behind them."""
    m, n = tile_order.positions(spec), spec.tile.kv
    keys = {"more": m + 2 * n + 33, "fewer": n // 2 + 3}
    windows = [(0, 0), (-1, 0), (0, -1), (-1, -1), (n - 1, 0), (m + n, 3), (2**30, 5)]
    return [
        Case(f"{name} keys, {window}", "", 1, m + 9, seq_k, 2 * spec.tile.pack_heads, 1, window=window)
        for name, seq_k in keys.items()
        for window in windows
    ]


@pytest.mark.parametrize(
    ("stem", "fields"),
    [
        ("k6_sequential_d128_window200_70", {"problem": {"head_dim": 64}}),  # shorter rows are multiplied faster
        ("fwd_d64_pack8_window", {"scheduler": "static"}),
    ],
)
def test_every_window_in_other_forms(stem: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Without overlap; several heads in a tile, dealt out. No committed module is one of these."""
    variant = changed(stem, mask=ANY, **fields)
    found = load_on_cpu(path_of(tmp_path, "any", render_variant(variant, CHECKOUT)))
    assert isinstance(variant.spec, Forward)
    report = verify_on_cpu(found, variant.spec, stem="any", cases=cases(variant.spec))
    assert report.failures == (), f"seed {report.seed}"


@pytest.mark.parametrize(
    ("stem", "old", "new", "shown_by"),
    [
        (COOPERATIVE, "diagonal - window_left - first_key", "diagonal - window_left + 1 - first_key", "wide_window"),
        (COOPERATIVE, "+ window_right + 1) - first_key", "+ window_right) - first_key", "wide_window"),
        (COOPERATIVE, "WINDOW_MAX if reach < 0", "0 if reach < 0", "ragged"),
        (COOPERATIVE, "WINDOW_MAX if reach < 0", "1 if reach < 0", "ragged"),
        (COOPERATIVE, "max(diagonal - window_left, 0))", "max(diagonal - window_left + TILE_N, 0))", "wide_window"),
        (OVERLAPPED, "n_full_start = cutlass.min(n_full_start, n_full_end)", "pass", "narrow_window"),
        (OVERLAPPED, "seq_k - seq_q - window_left:", "seq_k - seq_q - window_left - TILE_N:", "narrow_window"),
    ],
)
def test_a_wrong_window_shows(stem: str, old: str, new: str, shown_by: str, tmp_path: Path) -> None:
    """An edge or a tile off by one, no bound taken for one, a narrow window for a wide one: a case of its own fails."""
    text, spec = small(stem)
    assert text.count(old) == 1
    [case] = [case for case in cpu_cases(spec) if case.name == shown_by]
    found = mistaken(tmp_path, "wrong", text.replace(old, new))
    assert CpuRunner(found, spec, seed=1, count=1).run_case(case).failures != ()


@pytest.mark.parametrize("stem", [COOPERATIVE, OVERLAPPED])
def test_right_windows_show_nothing(stem: str, tmp_path: Path) -> None:
    """In the small modules, which are no committed ones."""
    text, spec = small(stem)
    shown_by = cases_of(spec, "wide_window", "narrow_window", "ragged")
    assert len(shown_by) == 3 and reported(mistaken(tmp_path, "right", text), spec, shown_by) == ()
