"""The schedule of a merge: all warps add up parts; a step is a few parts of a row, and there is no ring."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fa3gen.design.schedule.model import Role, Schedule, Step
from fa3gen.hardware import hopper
from fa3gen.spec.combining import Combine

WARPS = "warps"


def schedule_of(spec: Combine) -> Schedule:
    """The one role, and its steps."""
    role = Role(WARPS, "all warps", spec.cta.threads // hopper.WARP, "add up", "combine_kernel")
    return Schedule((role,), (), (), tuple(_steps(spec.parts.at_once)))


def _steps(at_once: int) -> Iterator[Step]:
    step, end = partial(Step, WARPS, "step"), partial(Step, WARPS, "exit")
    yield step("load", "O and LSE", note=f"of {at_once} part{'s' * (at_once > 1)}, before one is used")
    yield step("rescale", note="the sums of the parts before to a new largest LSE")
    yield step("add_part", note="weights exp(LSE_i - largest), one of 0 for a part without a key")
    yield end("gather", "the sums", note="in shared memory, where parts are shared out")
    yield end("sync", on="sync_threads")
    yield end("add_part", note="the first share adds the others to its own")
    yield end("store", "O and LSE", note="O divided by the sum of the weights")
