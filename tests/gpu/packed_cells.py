"""Packed cells: how fast modules for packed sequences, and pages, are, at lists of lengths as chats and documents have.

    python tests/gpu/packed_cells.py [STEM...]     on a machine with a Hopper GPU, from the root of a checkout

is `fa3gen tune --measure STEM... --write`, for all modules of packed sequences where none is named.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fa3gen import cli  # noqa: E402
from fa3gen.design.workspace import Workspace  # noqa: E402
from fa3gen.measure.packed_cells import cells  # noqa: E402

if __name__ == "__main__":
    every = {variant.stem for _, able in cells(Workspace.find(ROOT)) for variant in able}
    stems = sys.argv[1:] or sorted(every)
    sys.exit(cli.main(["tune", "--measure", *stems, "--write"]))
