"""Every generated module, compiled for sm_90a without a GPU: the facts of PTX, cubin and SASS are what its plan says.

That includes no spills, no stack and no WGMMA that ptxas serialised.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fa3gen.census import compare
from fa3gen.plan import make_plan
from fa3gen.workspace import Workspace

WORKSPACE = Workspace.find(Path(__file__).parent)
VARIANTS = {variant.stem: variant for spec_file in WORKSPACE.load_all() for variant in spec_file.variants}


@pytest.mark.parametrize("stem", VARIANTS)
def test_compiles_as_planned(stem: str) -> None:
    from fa3gen.compile_cache import cached_compile
    from fa3gen.compiler import analyse

    expectation = make_plan(VARIANTS[stem]).expectation
    assert (expectation.spills, expectation.stack_bytes, expectation.serialized_wgmma) == (0, 0, False)
    census = analyse(cached_compile(WORKSPACE.module_path(stem))).census
    assert compare(census, expectation) == []
