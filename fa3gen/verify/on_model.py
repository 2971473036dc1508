"""What runs of all operations on the CPU model of sm_90a have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fa3gen.cpu.findings import Hazard
from fa3gen.verify.runner import essence

SPREAD_LIMIT = 1.25  # of the mean squared error over its variance, which is 0.6 to 1.0 when all is well
CPU = torch.device("cpu")


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Let `torch.empty` give NaN, so that what a kernel leaves unwritten shows."""
    settings: Any = torch.utils.deterministic
    was, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn_only)
        settings.fill_uninitialized_memory = filled


def said(error: Exception) -> str:
    """A hazard in full, on one line: kind, detail, place. Anything else cut short."""
    return " ".join(str(error).split()) if isinstance(error, Hazard) else f"raised {essence(error)}"
