"""What is imported when: specs, plans and rendering load neither torch nor the DSL."""

from __future__ import annotations

import subprocess
import sys

import pytest
from rendering import ROOT

LIGHT = [
    "fa3gen",
    "fa3gen.errors",
    "fa3gen.spec",
    "fa3gen.specfile",
    "fa3gen.schema",
    "fa3gen.rules",
    "fa3gen.footprint",
    "fa3gen.header",
    "fa3gen.plan",
    "fa3gen.render",
    "fa3gen.workspace",
    "fa3gen.dispatch",
    "fa3gen.launch",
    "fa3gen.chips",
    "fa3gen.work",
    "fa3gen.ceiling",
    "fa3gen.explanation.document",
    "fa3gen.explanation.text",
    "fa3gen.simulation.comparison",
    "fa3gen.simulation.document",
    "fa3gen.simulation.text",
    "fa3gen.cli",
    "fa3gen.cli.specs",
    "fa3gen.cli.render",
    "fa3gen.cli.tune",
    "fa3gen.tuning_records",
    "fa3gen.tuning.candidates",
    "fa3gen.tuning.report",
    "fa3gen.tuning.writeback",
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


def test_rendering_imports_nothing_heavy() -> None:
    code = """
from pathlib import Path
from fa3gen.render import render_all
from fa3gen.workspace import Workspace

workspace = Workspace.find(Path.cwd())
assert render_all(workspace.resolve("k4_2_d64"), workspace)
"""
    assert loaded_by(code) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
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


def test_the_check_sees_what_is_loaded() -> None:
    assert loaded_by("import numpy") == ["numpy"]
