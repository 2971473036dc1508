"""Groups of asynchronous copies that a warp commits and waits for in order: cp.async and bulk stores alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Copy = TypeVar("Copy")


@dataclass
class CommitGroups(Generic[Copy]):
    """Copies of one warp: those not committed yet, and the committed groups in order. `completed` counts groups."""

    open: list[Copy] = field(default_factory=list)
    groups: list[list[Copy]] = field(default_factory=list)
    completed: int = 0

    @property
    def open_epoch(self) -> int:
        """The epoch of copies issued now."""
        return self.completed + len(self.groups) + 1

    @property
    def unfinished(self) -> bool:
        """Whether any copy has not been waited for."""
        return bool(self.open) or any(self.groups)

    def commit(self) -> None:
        """Close the open group; an empty one counts."""
        self.groups.append(self.open)
        self.open = []

    def wait(
        self, pending: int, perform: Callable[[Copy], None], may_wait: Callable[[Copy], bool] | None = None
    ) -> None:
        """Perform the copies of all but the latest `pending` groups; stop at one that this thread cannot wait for."""
        while len(self.groups) > pending:
            if may_wait is not None and not all(map(may_wait, self.groups[0])):
                return
            for copy in self.groups.pop(0):
                perform(copy)
            self.completed += 1
