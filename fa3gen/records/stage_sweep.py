"""How fast the kernels of specs/sweep were: by stages, threads, and CTAs that share an SM.

`generated/evidence/sweep/stages.json` is written by tests/gpu/stage_sweep.py, never by hand. Its modules are rendered
to be measured and not committed. `fa3gen.inspect.stage_sweep` shows it in docs/ladder.md, beside the simulator.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from fa3gen.base.files import write_text
from fa3gen.base.parts import GrownPart, Part, read_file, rounded
from fa3gen.compile.one_bank import OneBank
from fa3gen.design.workspace import Workspace
from fa3gen.spec.model import Forward
from fa3gen.spec.specfile import Variant, attention_only

SPECS = Path("specs/sweep")
TOOL = "tests/gpu/stage_sweep.py"


class Measured(GrownPart):
    """One module, or a copy of it with shared memory that nobody uses, so that no more than `ctas` fit on an SM."""

    LATER: ClassVar[frozenset[str]] = frozenset({"one_bank"})

    stem: str
    held: bool = Field(description="Whether it is such a copy.")
    registers: int = Field(gt=0, description="Of a thread, as compiled.")
    ctas: int = Field(gt=0, description="That share an SM, by registers and shared memory.")
    tflops: dict[str, float] = Field(description="By sequence length; 16,384 tokens in all, heads x head dim = 2048.")
    one_bank: OneBank | None = Field(None, description="Multiply-adds that wait for registers; None with WGMMA alone.")
    sm_mhz: dict[str, float] = Field(description="Clock of the SMs in the middle of the launches, where it was read.")

    @property
    def held_to(self) -> int | None:
        """So many CTAs of a copy share an SM; None of a module as it is."""
        return self.ctas if self.held else None


class StageSweep(Part):
    """All of one run on one GPU."""

    gpu: str
    date: str = Field(description="UTC day.", pattern=r"^\d{4}-\d{2}-\d{2}$")
    timed: str
    torch: str | None
    dsl: str | None
    measured: list[Measured]

    def as_it_is(self, stem: str) -> Measured | None:
        """What was measured of a module, not of its copies."""
        return next((row for row in self.measured if row.stem == stem and not row.held), None)


def record_path(workspace: Workspace) -> Path:
    """Where the record lies; it need not exist yet."""
    return workspace.evidence_dir / "sweep" / "stages.json"


def write(workspace: Workspace, sweep: StageSweep) -> Path:
    """Write the record; return its path."""
    path = record_path(workspace)
    write_text(path, json.dumps(rounded(sweep.model_dump()), indent=2) + "\n")
    return path


def read(workspace: Workspace) -> StageSweep | None:
    """The record; None when there is none, UserError when it is not one."""
    way_out = f"make it again with {TOOL} on a Hopper GPU"
    return read_file(StageSweep, record_path(workspace), "a stage sweep", way_out)


def variants(workspace: Workspace) -> list[Variant[Forward]]:
    """All modules of the sweep, in the order of their files."""
    files = sorted((workspace.root / SPECS).glob("*.yaml"))
    return attention_only((variant for file in files for variant in workspace.load(file).variants), "the stage sweep")
