"""Rules about merges of parts: the exact message on hand-derived numbers, and silence right beside the limit."""

from __future__ import annotations

from typing import Any

import pytest

from fa3gen.design import rules
from fa3gen.design.rules import Violation, combines
from fa3gen.spec.model import Combine

BASE: dict[str, Any] = {
    "operation": "combine",
    "cta": {"threads": 256, "per_sm": 4},
    "parts": {"at_once": 2, "shares": 32},
}
HELD = [("parts of O", 16), ("their LSE", 2), ("sums", 10), ("addresses and counters", 36)]


def spec(**changes: int) -> Combine:
    """The base, with fields of `cta` and `parts` by their own names."""
    parts = {name: {**BASE[name], **{k: v for k, v in changes.items() if k in BASE[name]}} for name in ("cta", "parts")}
    return Combine.model_validate({**BASE, **parts})


def violations(**changes: int) -> dict[str, str]:
    """Field -> message of what `check` finds."""
    found = rules.check(spec(**changes))
    assert len({violation.field for violation in found}) == len(found), found
    return {violation.field: violation.message for violation in found}


def test_the_usual_specs_are_legal() -> None:
    for changes in ({}, {"threads": 32, "shares": 1}, {"at_once": 4, "per_sm": 2}, {"threads": 1024, "per_sm": 1}):
        assert violations(**changes) == {}
        assert rules.warnings(spec(**changes)) == []


def test_combine_threads() -> None:
    assert combines.combine_threads(1024) is None
    assert combines.combine_threads(2048) == Violation(
        "cta.threads", "a CTA has at most 1024 threads, not 2048; use fewer"
    )
    assert list(violations(threads=2048)) == ["cta.threads"]


@pytest.mark.parametrize(
    ("threads", "way_out"), [(192, "128 or 256"), (16, "32"), (33, "32 or 64"), (1000, "512 or 1024")]
)
def test_combine_power(threads: int, way_out: str) -> None:
    assert combines.combine_power(32) is combines.combine_power(512) is None
    assert combines.combine_power(threads) == Violation(
        "cta.threads",
        "a CTA has whole warps, divided among 1, 2, 4 and so on shares: a power of two from 32 on, not "
        f"{threads}; use {way_out}",
    )
    assert list(violations(threads=threads)) == ["cta.threads"]


def test_combine_shares() -> None:
    """Two threads read 2 x 16 = 32 bytes."""
    assert combines.combine_shares(128, 256) is combines.combine_shares(1, 32) is None
    assert combines.combine_shares(256, 256) == Violation(
        "parts.shares",
        "with 256 shares 256 / 256 threads of each read 16 bytes side by side, less than a sector of 32; use at most "
        "128",
    )
    assert combines.combine_shares(24, 256) == Violation(
        "parts.shares", "shares are doubled until all SMs are busy, and 24 is no power of two; use 16"
    )
    assert list(violations(shares=256)) == list(violations(shares=3)) == ["parts.shares"]


def test_combine_lines() -> None:
    """Eight threads read 128 bytes, four of them 64."""
    assert combines.combine_lines(32, 256) is None
    warned = combines.combine_lines(64, 256)
    assert warned == Violation(
        "parts.shares",
        "with 64 shares 256 / 64 = 4 threads of each read 64 bytes side by side, less than a line of 128; use 32",
    )
    assert violations(shares=64) == {} and rules.warnings(spec(shares=64)) == [warned]


def test_combine_registers() -> None:
    """64 x 256 x 4 are all of an SM; three parts at once take 24 + 3 + 10 + 36 = 73, so 80, of which 3 CTAs fit."""
    assert combines.combine_registers(256, 4, HELD) is None
    assert combines.combine_registers(256, 5, HELD) == Violation(
        "cta.per_sm",
        "registers per SM: parts of O 16 + their LSE 2 + sums 10 + addresses and counters 36 = 64, rounded up to 64; "
        "x 256 threads x 5 CTAs = 81920 > 65536; use at most 4",
    )
    assert "= 73, rounded up to 80; x 256 threads x 4 CTAs = 81920 > 65536; use at most 3" in str(violations(at_once=3))
    assert violations(at_once=3, per_sm=3) == {}
    assert violations(at_once=24, per_sm=1)["parts.at_once"] == (
        "registers: parts of O 192 + their LSE 24 + sums 10 + addresses and counters 36 = 262 for each of 256 threads, "
        "of 255 for a thread and 65536 for an SM; use fewer parts at once"
    )
