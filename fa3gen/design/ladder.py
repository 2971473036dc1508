"""The ladder of specs, each a step from the one before, and the order in which pages show what specs generate."""

from __future__ import annotations

from fa3gen.design.workspace import Workspace
from fa3gen.spec.specfile import Variant, attention_among

FIRST_RUNGS = ("c1", "c2", "g1", "g2", "g3")  # copies and GEMMs, before attention
RUNGS = ("k1", "k2", "k2_cp_async", "k3_1", "k3_2", "k3_3", "k4_1", "k4_smem", "k4_2", "k5", "k6")


def generated_stems(workspace: Workspace) -> list[str]:
    """Return every stem that the specs generate, in the order of the ladder, then by name."""
    return [variant.stem for variant in _variants(workspace)]


def attention_stems(workspace: Workspace) -> list[str]:
    """Those of `generated_stems` whose modules are attention."""
    return [variant.stem for variant in attention_among(_variants(workspace))]


def _variants(workspace: Workspace) -> list[Variant]:
    files = sorted(workspace.load_all(), key=lambda file: ladder_order(file.stem))
    return [variant for file in files for variant in file.variants]


def ladder_order(spec_stem: str) -> tuple[int, str]:
    """What specs are sorted by: the ladder first, then by name."""
    rungs = (*FIRST_RUNGS, *RUNGS)
    return (rungs.index(spec_stem) if spec_stem in rungs else len(rungs)), spec_stem
