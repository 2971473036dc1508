"""What the model reports: hazards of the program under test, and the limits of the model itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from fa3gen.base.errors import UserError


class Kind(StrEnum):
    """Kinds of hazard; the value is what reports print."""

    DEADLOCK = "deadlock"
    RACE = "data race in shared memory"
    GLOBAL_RACE = "data race in global memory"
    UNINITIALISED_READ = "uninitialised shared memory read"
    UNAWAITED_LOAD = "shared memory used before its load was awaited"
    OVERWRITE = "shared memory overwritten while an asynchronous operation uses it"
    MISSING_PROXY_FENCE = "missing fence.proxy.async"
    MISSING_WGMMA_FENCE = "missing wgmma.fence"
    REGISTER_IN_FLIGHT = "register of an unfinished wgmma touched"
    UNINITIALISED_REGISTER = "register read before it was written"
    WARPGROUP_DIVERGENCE = "warps of a warpgroup differ in a collective instruction"
    WARP_DIVERGENCE = "lanes of a warp differ in a collective instruction"
    BARRIER_NOT_INITIALISED = "mbarrier not initialised, or not visibly so"
    TRANSACTION_COUNT = "mbarrier transaction count does not add up"
    ARRIVAL_COUNT = "mbarrier or barrier arrivals do not add up"
    OUT_OF_BOUNDS = "access out of bounds"
    MISALIGNED = "misaligned access"
    REGISTER_POOL = "setmaxnreg against the register pool"
    UNFINISHED = "kernel ends with an asynchronous operation unfinished"
    TENSOR_MAP = "tensor map that the driver would refuse"
    TRAP = "trap"
    NOT_FINISHED = "no end in sight"


@dataclass(frozen=True)
class Place:
    """Where in the execution: CTA coordinates, warps, and the instruction. None where it does not apply."""

    cta: tuple[int, int, int] | None = None
    warps: tuple[int, ...] = ()
    instruction: int | None = None  # index in the kernel
    ptx_line: int | None = None
    text: str = ""  # the mnemonic
    source: tuple[str, int] | None = None  # generated file and line

    def __str__(self) -> str:
        """`CTA (0, 0, 0), warp 3, PTX line 12: bar.sync, generated/x.py:30`."""
        parts = []
        if self.cta is not None:
            parts.append(f"CTA {self.cta}")
        if self.warps:
            parts.append(f"warp{'s' if len(self.warps) > 1 else ''} {', '.join(map(str, self.warps))}")
        if self.ptx_line is not None:
            parts.append(f"PTX line {self.ptx_line}: {self.text}")
        if self.source is not None:
            parts.append(f"{self.source[0]}:{self.source[1]}")
        return ", ".join(parts)


class Hazard(UserError):
    """A fault of the executed kernel. `kind` classifies it, `detail` says what happened, `place` where."""

    def __init__(self, kind: Kind, detail: str, place: Place | None = None) -> None:
        """Build the message from the three."""
        self.kind = kind
        self.detail = detail
        self.place = place or Place()
        super().__init__(f"{kind}: {detail}" + (f"\n  at {self.place}" if str(self.place) else ""))

    def at(self, place: Place) -> Hazard:
        """The same hazard with the fields of `place` that it does not know itself."""
        known = {name: value for name, value in vars(self.place).items() if value not in (None, (), "")}
        return Hazard(self.kind, self.detail, replace(place, **known))


class OutsideModel(UserError):
    """The kernel uses something that this model of sm_90a does not have."""
