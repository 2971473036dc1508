"""What is imported when: specs, plans and rendering load neither torch nor the DSL."""

from __future__ import annotations

import subprocess
import sys

import pytest
from rendering import ROOT

LIGHT = [
    "fa3gen",
    "fa3gen.base.errors",
    "fa3gen.base.files",
    "fa3gen.base.markdown",
    "fa3gen.base.parts",
    "fa3gen.base.switches",
    "fa3gen.hardware.chips",
    "fa3gen.hardware.dtypes",
    "fa3gen.spec.model",
    "fa3gen.spec.schema",
    "fa3gen.spec.specfile",
    "fa3gen.design.ceiling",
    "fa3gen.design.family",
    "fa3gen.design.footprint",
    "fa3gen.design.ladder",
    "fa3gen.design.load",
    "fa3gen.design.masks",
    "fa3gen.design.operation",
    "fa3gen.design.proposed",
    "fa3gen.design.rules",
    "fa3gen.design.work",
    "fa3gen.design.workspace",
    "fa3gen.generate.expected",
    "fa3gen.generate.header",
    "fa3gen.generate.plan",
    "fa3gen.generate.predicted_sass",
    "fa3gen.generate.render",
    "fa3gen.run.dispatch",
    "fa3gen.run.launch",
    "fa3gen.run.rendering",
    "fa3gen.verify.pipeline",
    "fa3gen.verify.results",
    "fa3gen.records.dispatch_table",
    "fa3gen.records.evidence",
    "fa3gen.records.recording",
    "fa3gen.records.tuning_records",
    "fa3gen.measure.record_speeds",
    "fa3gen.measure.tuning.candidates",
    "fa3gen.measure.tuning.report",
    "fa3gen.measure.tuning.writeback",
    "fa3gen.inspect.difference.revisions",
    "fa3gen.inspect.difference.sides",
    "fa3gen.inspect.difference.text",
    "fa3gen.inspect.explanation.document",
    "fa3gen.inspect.explanation.text",
    "fa3gen.inspect.ladder_page",
    "fa3gen.inspect.matrix",
    "fa3gen.inspect.pages",
    "fa3gen.inspect.simulation.comparison",
    "fa3gen.inspect.simulation.document",
    "fa3gen.inspect.simulation.text",
    "fa3gen.cli",
    "fa3gen.cli.diff",
    "fa3gen.cli.matrix",
    "fa3gen.cli.refresh",
    "fa3gen.cli.render",
    "fa3gen.cli.specs",
    "fa3gen.cli.tune",
]
HEAVY = ["torch", "cutlass", "cuda", "numpy", "tvm_ffi", "matplotlib"]


def loaded_by(code: str) -> list[str]:
    """The heavy packages that a process has loaded after running `code`."""
    script = f"import sys\n{code}\nprint(*[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    return process.stderr.splitlines()[-1].split()


def test_the_generator_imports_nothing_heavy() -> None:
    """Nor does any of these modules for the others: they are imported together, and each name is checked."""
    assert loaded_by(f"import {', '.join(LIGHT)}") == []


def test_what_needs_torch_is_listed_before_it_is_imported() -> None:
    assert loaded_by("import fa3gen\nassert set(fa3gen.__all__) <= set(dir(fa3gen))") == []


def test_rendering_imports_nothing_heavy() -> None:
    code = """
from pathlib import Path
from fa3gen.generate.render import render_all
from fa3gen.design.workspace import Workspace

workspace = Workspace.find(Path.cwd())
assert render_all(workspace.resolve("k4_2_d64"), workspace)
"""
    assert loaded_by(code) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["matrix"],
        ["schema"],
        ["render", "--check", "k1_d64"],
        ["verify", "--help"],
        ["tune", "k6", "--dry-run"],
        ["explain", "k6"],
    ],
)
def test_commands_without_a_kernel_import_nothing_heavy(arguments: list[str]) -> None:
    assert loaded_by(f"from fa3gen.cli import main\nassert main({arguments}) == 0") == []


def test_explaining_and_simulating_import_nothing_heavy() -> None:
    code = "from fa3gen.cli import main\nassert main(['explain', 'k6']) == main(['simulate', 'k6_d64']) == 0"
    assert loaded_by(code) == []


def test_comparing_specs_imports_nothing_heavy() -> None:
    assert loaded_by("from fa3gen.cli import main\nassert main(['diff', 'k5_d64', 'k6_d64']) == 1") == []


def test_the_check_sees_what_is_loaded() -> None:
    assert loaded_by("import numpy") == ["numpy"]
