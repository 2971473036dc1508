"""What a mutation is: one fact of a compiled kernel changed, why that is wrong, and how the model has to report it.

A mutation edits the PTX text of a committed module before it is parsed. It names its lines by what they say, with `#`
for the number of a register and `...` for anything, by how many lines of the kernel say that, and by which of them is
meant. Where a template moves or rewrites them, applying the mutation fails and says so; nothing else gets mutated.

The mutations themselves are in `mutations_tuning.py`, `mutations_held_out.py` and `mutations_persistent.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import hosting

from fa3gen.cpu.findings import Hazard, Kind
from fa3gen.cpu.kernel import CpuKernel, Settings
from fa3gen.cpu.schedule import TELLING, schedules

NUMBERS = "numbers"
"""Reported by the comparison with the reference: O or LSE is wrong or was not written."""

Report = Kind | str


class Moved(AssertionError):
    """The PTX does not say what a mutation was written for."""


@dataclass(frozen=True)
class Line:
    """Line number `which` of the `of` lines that say `text`; only those right after `below` and before `above`."""

    text: str
    which: int = 0
    of: int = 1
    below: str = "..."
    above: str = "..."

    def find(self, lines: list[str]) -> int:
        """Its index. Raises Moved when there are more or fewer such lines than `of`."""
        texts = [" ".join(line.split()) for line in lines]
        significant = [
            index for index, text in enumerate(texts) if text and not text.startswith((".loc", "//", ".pragma"))
        ]
        pattern, below, above = _pattern(self.text), _pattern(self.below), _pattern(self.above)
        found = [
            index
            for before, index, after in zip(significant, significant[1:], significant[2:], strict=False)
            if pattern.fullmatch(texts[index]) and below.fullmatch(texts[before]) and above.fullmatch(texts[after])
        ]
        if len(found) != self.of:
            raise Moved(f"{self.of} lines like `{self.text}` expected, {len(found)} found: the kernel has changed")
        return found[self.which]


@dataclass(frozen=True)
class Drop:
    """Leave a line out."""

    line: Line

    def apply(self, lines: list[str]) -> None:
        """Edit in place."""
        lines[self.line.find(lines)] = ""


@dataclass(frozen=True)
class Change:
    """Put `new` for the one place of a line that says `old`; #1, #2 in `new` are the registers that `old` met."""

    line: Line
    old: str
    new: str

    def apply(self, lines: list[str]) -> None:
        """Edit in place. Raises Moved unless `old` occurs exactly once."""
        index = self.line.find(lines)
        text = " ".join(lines[index].split())
        matches = list(_pattern(self.old).finditer(text))
        if len(matches) != 1:
            raise Moved(f"`{self.old}` occurs {len(matches)} times in `{text}`")
        (match,) = matches
        new = re.sub(r"#(\d)", lambda number: match[int(number[1])], self.new)
        lines[index] = text[: match.start()] + new + text[match.end() :]


@dataclass(frozen=True)
class Move:
    """Take the lines from `first` to `last` out and put them after `after`."""

    first: Line
    last: Line
    after: Line

    def apply(self, lines: list[str]) -> None:
        """Edit in place."""
        start, end, target = self.first.find(lines), self.last.find(lines) + 1, self.after.find(lines)
        if not start < end or start <= target < end:
            raise Moved(f"lines {start} to {end} cannot go after line {target}: the kernel has changed")
        moved = lines[start:end]
        lines[target + 1 : target + 1] = moved
        start += len(moved) if target < start else 0
        del lines[start : start + len(moved)]


def move(line: Line, after: Line) -> Move:
    """Move one line."""
    return Move(line, line, after)


def skip_wait(line: Line) -> Change:
    """Leave a loop around mbarrier.try_wait at once."""
    return Change(line, "mbarrier.try_wait.parity.shared.b64 P1, [%r#], ..., 10000000;", "bra.uni DONE;")


Edit = Drop | Change | Move


@dataclass(frozen=True)
class Shape:
    """Of one call."""

    batch: int
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int


@dataclass(frozen=True)
class Mutation:
    """One changed fact of module `stem`.

    `why` says what PTX makes of it. `reports` are the reports that name the fault rightly; empty for a change that
    leaves the kernel correct, which must not be reported. `missed` marks a harmful one that the model is known not to
    see; should it see it, the test fails until the mark is gone. `shape` overrides the module's own.
    """

    name: str
    stem: str
    fact: str
    edits: tuple[Edit, ...]
    why: str
    reports: frozenset[Report]
    missed: bool = False
    shape: Shape | None = None

    @property
    def harmful(self) -> bool:
        """Whether the changed kernel is wrong."""
        return bool(self.reports)


@dataclass(frozen=True)
class SourceMutation:
    """One changed fact of a module's source: `old`, which occurs once, becomes `new`. Else like Mutation."""

    name: str
    stem: str
    fact: str
    old: str
    new: str
    why: str
    reports: frozenset[Report]
    missed: bool = False
    shape: Shape | None = None

    @property
    def harmful(self) -> bool:
        """Whether the changed kernel is wrong."""
        return bool(self.reports)

    def apply(self, source: str) -> str:
        """The changed source. Raises Moved unless `old` occurs exactly once."""
        if source.count(self.old) != 1:
            raise Moved(f"`{self.old}` occurs {source.count(self.old)} times in {self.stem}.py: the module has changed")
        return source.replace(self.old, self.new)


def apply(ptx: str, mutation: Mutation) -> str:
    """The changed PTX. Raises Moved when it is not the PTX that the mutation was written for."""
    lines = ptx.splitlines()
    for edit in mutation.edits:
        try:
            edit.apply(lines)
        except Moved as moved:
            raise Moved(f"{mutation.stem}, {mutation.name}: {moved}") from None
    return "\n".join(lines) + "\n"


def _pattern(text: str) -> re.Pattern[str]:
    escaped = re.escape(" ".join(text.split())).replace(r"\#", r"(\d+)").replace(r"\.\.\.", ".*")
    return re.compile(escaped)


# What each module runs on: one or two CTAs, ragged in both directions, with enough kv tiles to use stages again. Where
# a run is cheap there are two query heads for one kv head.
SHAPES = {
    "k2_d64": Shape(1, 40, 100, 1, 1),
    "k2_cp_async_d64": Shape(1, 40, 200, 1, 1),
    "k3_1_d64": Shape(1, 40, 100, 1, 1),
    "k3_2_d64": Shape(1, 40, 280, 1, 1),
    "k3_3_d64": Shape(1, 40, 330, 1, 1),
    "k4_1_d64": Shape(1, 40, 200, 1, 1),
    "k4_smem_d64": Shape(1, 100, 330, 2, 1),
    "k4_2_d64": Shape(1, 100, 330, 2, 1),
    "k4_2_fp16_d64": Shape(1, 100, 330, 2, 1),
    "k4_2_window_d64_window200_70": Shape(1, 100, 500, 2, 1),
    # On one SM: a CTA takes all 6 tiles, of which 2 have no visible key.
    "fwd_d64_causal_short": Shape(1, 270, 140, 2, 1),
}


def group(stem: str, fact: str) -> Callable[..., Mutation]:
    """A constructor of mutations of one module and one kind of fact: (name, why, edit, ..., reports=)."""

    def make(
        name: str, why: str, *edits: Edit, reports: set[Report], missed: bool = False, shape: Shape | None = None
    ) -> Mutation:
        return Mutation(name, stem, fact, edits, why, frozenset(reports), missed, shape)

    return make


@cache
def _committed(stem: str) -> CpuKernel:
    """A committed kernel, whose host code is compiled once for all mutations of its PTX."""
    return CpuKernel(hosting.compiled(stem))


def kernel_with(stem: str, ptx: str) -> CpuKernel:
    """A committed kernel with this PTX; there is one at a time."""
    kernel = _committed(stem)
    kernel.take_ptx(ptx)
    return kernel


def first_report(
    stem: str, ptx: str, arguments: Sequence[Any], *, refill: Callable[[], Any], wrong: Callable[[], Any], seed: int
) -> tuple[Report | None, str]:
    """What is the first thing wrong with a module's PTX under the telling schedules, as in test_mutations.

    `refill` makes the outputs what they were before each run, and `wrong` says what is wrong with them after it.
    """
    kernel = kernel_with(stem, ptx)
    for schedule in schedules(TELLING, 8, seed):
        refill()
        kernel.settings = Settings(schedule=schedule)
        try:
            kernel(*arguments)
        except Hazard as hazard:
            return hazard.kind, f"{schedule}: {hazard}"
        if found := wrong():
            return NUMBERS, f"{schedule}: {found}"
    return None, ""


def assert_reported(mutation: Mutation, judge: Callable[[str, str], tuple[Report | None, str]]) -> None:
    """By a right name, unless the mutation is harmless or known to be missed."""
    report, detail = judge(mutation.stem, apply(hosting.compiled(mutation.stem).ptx, mutation))
    if mutation.missed or not mutation.harmful:
        assert report is None, detail
    else:
        assert report in mutation.reports, detail
