"""Mistakes where one CTA gives a part of O to another: a flag that is not released, not acquired, or not waited for.

They are made in the PTX of modules whose CTAs share the last wave of tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hosting import compiled, module
from mutations import Change, Drop, Edit, Line
from rendering import plans, variants

from fa3gen.cpu.findings import Kind
from fa3gen.cpu.kernel import Settings
from fa3gen.cpu.schedule import TELLING
from fa3gen.spec.model import Forward
from fa3gen.verify.attention_on_cpu import CpuRunner
from fa3gen.verify.inputs import Case
from fa3gen.verify.packed_inputs import sequences
from fa3gen.verify.packed_on_cpu import CpuPackedRunner

DENSE, PACKED = "fwd_d64", "fwd_packed_shared_d64"
SMS, TILES, STEPS = (
    3,
    2,
    12,
)  # 8 steps for each CTA: the second ends one tile, with the first one's part, and begins another

GIVEN, SEEN = Line("st.release.gpu.global.b32 ..."), Line("ld.acquire.gpu.global.b32 ...")
STORED = Line("bar.warp.sync -1;", below="st.global.v4.b32 ...", above="elect.sync ...")
LOOP = Line("@%p# bra $L__BB0_#;", below="setp.eq.b32 ...", above="ld.param.b32 ...")

RACE = f"{Kind.GLOBAL_RACE}: a load of global memory that warp "
# Who looks once puts the flag back to zero, beside the CTA that sets it.
BESIDE = f"{Kind.GLOBAL_RACE}: a store of global memory that warp "
MISTAKES: dict[str, tuple[Edit, str]] = {
    "given without a release": (Change(GIVEN, "release.gpu", "relaxed.gpu"), RACE),
    "given to its own CTA": (Change(GIVEN, "release.gpu", "release.cta"), RACE),
    "given as any word is stored": (Change(GIVEN, "st.release.gpu.", "st."), RACE),
    "given before all lanes have stored": (Drop(STORED), RACE),
    "seen without an acquire": (Change(SEEN, "acquire.gpu", "relaxed.gpu"), RACE),
    "seen as any word is loaded": (Change(SEEN, "ld.acquire.gpu.", "ld."), RACE),
    "looked at once": (Drop(LOOP), BESIDE),
}


@contextmanager
def with_ptx(stem: str, ptx: str) -> Iterator[Any]:
    """The module of a stem, on few SMs, with other PTX; the tests of a process share it."""
    found = module(stem)
    kernel, locate = found.cpu.kernel, found.cpu.kernel.locate
    kernel.take_ptx(ptx)
    kernel.locate = lambda kernel, instruction: None  # for which it would be compiled once more
    found.cpu.settings = Settings(sms=SMS)
    try:
        yield found
    finally:
        kernel.take_ptx(compiled(stem).ptx)
        kernel.locate = locate
        found.cpu.settings = Settings()


def failures(stem: str, ptx: str) -> tuple[str, ...]:
    """What is wrong with the module when it runs this PTX."""
    spec, tile = variants()[stem].spec, plans()[stem].tile
    assert isinstance(spec, Forward)
    with with_ptx(stem, ptx) as found:
        if stem == PACKED:
            case = sequences("wave", "", [TILES * tile.m - 9], [STEPS * tile.n - 7], heads=(1, 1))
            return CpuPackedRunner(found, spec, seed=3, count=TELLING).run_case(case).failures
        dense = Case("wave", "", 1, tile.m - 9, STEPS * tile.n - 7, TILES, TILES)
        return CpuRunner(found, spec, seed=3, count=TELLING).run_case(dense).failures


@pytest.mark.parametrize("stem", [DENSE, PACKED])
def test_none_is_right(stem: str) -> None:
    assert failures(stem, compiled(stem).ptx) == ()


@pytest.mark.parametrize("stem", [DENSE, PACKED])
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported(stem: str, name: str) -> None:
    edit, report = MISTAKES[name]
    lines = compiled(stem).ptx.splitlines()
    edit.apply(lines)
    found = failures(stem, "\n".join(lines) + "\n")
    assert found and report in found[0], found
