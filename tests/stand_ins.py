"""What stands in for the dispatch table and its modules, and for a GPU, where calls of `fa3gen.run` are tested."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fa3gen.run import calls, dispatch


@contextlib.contextmanager
def standing_in(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Have the `choose` of `stand_in` asked instead of the table, and its `module_at` for modules.

    Calls before and after know nothing of what was found meanwhile.
    """
    monkeypatch.setattr(dispatch, "choose", stand_in.choose)
    monkeypatch.setattr(calls, "module_at", stand_in.module_at)
    calls.stretches.clear()
    yield stand_in
    calls.stretches.clear()
    torch._dynamo.reset()


def generated_module(attention: Any, *, packed: bool) -> ModuleType:
    """A module with this entry point, and with what the ones that split keys have beside it."""
    module = ModuleType("stand_in")
    constants = {"POSITIONS": 4, "CTA_WORDS": 1, "TILE_N": 2, "GRID_MAX": 65535}
    counting: dict[str, Any] = {"packed_constants": lambda gpu: (132, None)} if packed else {"parts_of": None}
    vars(module).update(constants, attention=attention, **counting)
    return module


def division(names: dict[str, Any], seq_k: int) -> int | None:
    """Parts of so many keys, or CTAs, that the globals of an entry point say; None where nobody asked for any."""
    if "parts_of" in names:
        return int(names["parts_of"](seq_k, 1, 1))
    return int(names["packed_constants"](0)[0]) if "packed_constants" in names else None


def pass_for_cuda(monkeypatch: pytest.MonkeyPatch, *, capturing: bool = False, stream: int = 0) -> None:
    """CPU tensors go the short way that leaves torch's dispatcher out, as on a GPU, whose current stream this is."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=stream))
