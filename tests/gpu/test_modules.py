"""On a machine with a Hopper GPU: every generated module, against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fa3gen.design.workspace import Workspace
from fa3gen.records import evidence
from fa3gen.spec.specfile import Variant

WORKSPACE = Workspace.find(Path(__file__).parent)
VARIANTS = {variant.stem: variant for spec_file in WORKSPACE.load_all() for variant in spec_file.variants}


@pytest.mark.parametrize("stem", VARIANTS)
def test_generated_module(stem: str, hopper: Any) -> None:
    from fa3gen.run.launch import load_for_launch
    from fa3gen.verify.on_gpu import verify_module
    from fa3gen.verify.runner import DeviceLost

    variant: Variant = VARIANTS[stem]
    try:
        report = verify_module(load_for_launch(WORKSPACE.module_path(stem)), variant.spec, hopper, stem=stem)
    except DeviceLost as lost:
        pytest.exit(f"{stem} left the GPU unusable, the modules after it were not run: {lost}", returncode=1)
    assert report.passed, f"seed {report.seed}\n" + "\n".join(report.failures)


@pytest.mark.parametrize("stem", VARIANTS)
def test_committed_evidence_is_of_the_committed_module(stem: str, hopper: Any) -> None:
    state, _ = evidence.status(WORKSPACE, stem)
    assert state is evidence.Status.VERIFIED, f"{stem}: {state.value}; run `fa3gen verify {stem} --evidence`"
