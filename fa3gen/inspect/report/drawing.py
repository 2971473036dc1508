"""A little SVG: shapes whose colours come from the page's style sheet, so that a picture follows light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources

from markupsafe import Markup, escape

COLOURS = 8  # classes c0 to c7 of the style sheet
MARGIN = 12  # units around a picture that is a file: text may reach a little beyond the shapes


@dataclass
class Svg:
    """A picture of `width` x `height` units, at most that many CSS pixels; `label` says what it is."""

    width: float
    height: float
    label: str
    parts: list[Markup] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, css: str, title: str = "", radius: float = 0
    ) -> None:
        """A rectangle; `title` appears when the pointer rests on it."""
        rounded = f' rx="{number(radius)}"' if radius else ""
        box = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
        self._add("rect", f'class="{escape(css)}" {box}{rounded}', title)

    def circle(self, x: float, y: float, radius: float, css: str, title: str = "") -> None:
        """A disc."""
        self._add("circle", f'class="{escape(css)}" cx="{number(x)}" cy="{number(y)}" r="{number(radius)}"', title)

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        """A straight line."""
        ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
        self._add("line", f'class="{escape(css)}" {ends}', "")

    def path(self, points: Sequence[tuple[float, float]], css: str, closed: bool = False) -> None:
        """Straight lines from point to point."""
        if not points:
            return
        joined = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        self._add("path", f'class="{escape(css)}" d="M{joined}{"Z" if closed else ""}"', "")

    def text(self, x: float, y: float, content: str, css: str = "", anchor: str = "start") -> None:
        """A line of text whose baseline is at y; `anchor`: start, middle or end."""
        place = f'x="{number(x)}" y="{number(y)}"' + (f' text-anchor="{anchor}"' if anchor != "start" else "")
        style = f' class="{escape(css)}"' if css else ""
        self.parts.append(Markup(f"<text {place}{style}>{escape(content)}</text>"))

    def raw(self, markup: Markup) -> None:
        """Elements that are markup already."""
        self.parts.append(markup)

    def markup(self, css: str = "", attributes: str = "") -> Markup:
        """The element. It fills the width that it is given, up to its own."""
        box = f"0 0 {number(self.width)} {number(self.height)}"
        style = f"--w:{number(self.width)}"
        head = f'<svg class="pic {escape(css)}" viewBox="{box}" style="{style}" role="img" {attributes}'
        return Markup(f'{head} aria-label="{escape(self.label)}">{"".join(self.parts)}</svg>')

    def file(self) -> str:
        """The picture as a file of its own: on a ground in the page's colours, light or dark as its reader has it."""
        width, height = self.width + 2 * MARGIN, self.height + 2 * MARGIN
        box = f"{-MARGIN} {-MARGIN} {number(width)} {number(height)}"
        size = f'width="{number(width)}" height="{number(height)}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="pic" viewBox="{box}" {size} role="img"'
        ground = f'<rect class="ground" x="{-MARGIN}" y="{-MARGIN}" {size}/>'
        # The style sheet sizes a picture for its place in the page; this one is as large as it was drawn.
        own = f".pic {{ width: {number(width)}px; height: {number(height)}px; max-width: none; }}"
        style = f'{packaged("pictures.css")}{own} .pic .ground {{ fill: var(--card); }}'
        parts = [f"<style>{escape(style)}</style>", ground, *self.parts, "</svg>"]
        return "\n".join([f'{head} aria-label="{escape(self.label)}">', *parts]) + "\n"

    def _add(self, element: str, attributes: str, title: str) -> None:
        inside = f"><title>{escape(title)}</title></{element}>" if title else "/>"
        self.parts.append(Markup(f"<{element} {attributes}{inside}"))


def number(value: float) -> str:
    """A coordinate, to a hundredth of a unit."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else str(int(value))


def packaged(name: str) -> str:
    """The text of a file that lies beside this module."""
    return resources.files("fa3gen.inspect.report").joinpath(name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on pixels from `start` to `end`, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Where a value lies."""
        low, high, value = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        share = 0.5 if high == low else (value - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Round values that fit between the ends."""
        if self.log:
            return self._decades()
        step = _round_step((self.high - self.low) / max(count, 1))
        first = math.ceil(self.low / step)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _decades(self) -> list[float]:
        exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        steps = (1,) if len(exponents) > 4 else (1, 2, 5)
        values = [step * 10.0**exponent for exponent in exponents for step in steps]
        return [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]


def _round_step(rough: float) -> float:
    if rough <= 0:
        return 1.0
    scale = 10.0 ** math.floor(math.log10(rough))
    return next(step * scale for step in (1, 2, 5, 10) if step * scale >= rough * 0.999)


def length_label(length: int) -> str:
    """`4k` for 4096; others in full."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else f"{length:,}"
