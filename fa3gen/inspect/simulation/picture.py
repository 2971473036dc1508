"""A simulation as a picture: plain SVG, which follows the reader's light or dark colour scheme."""

from __future__ import annotations

from xml.sax.saxutils import escape

from fa3gen.inspect.simulation.lanes import Lane, lanes
from fa3gen.inspect.simulation.results import Simulation, Span

WIDTH, LABEL, RIGHT = 1200, 168, 16  # pixels: of the picture, of the labels on the left, of the margin on the right
ROW, BAR, TOP = 20, 14, 62  # pixels: distance of rows, height of bars, space above the first row
HEADING = 22  # pixels above the rows of each CTA, where there are several
TICKS = 10  # at most so many along the time axis

STYLE = """
  .back { fill: #ffffff } .ink { fill: #1b1f24 } .faint { fill: #59636e } .line { stroke: #d1d9e0; stroke-width: 1 }
  text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif }
  .title { font-size: 15px; font-weight: 600 }
  .load { fill: #c8ddf6 } .held { fill: #5b9be0 } .scores { fill: #2b8a57 } .output { fill: #d9822b }
  .compute { fill: #8a63c9 } .exp { fill: #b08fe0 } .wait { fill: #e6e8eb }
  @media (prefers-color-scheme: dark) {
    .back { fill: #14181d } .ink { fill: #e6edf3 } .faint { fill: #9aa5b1 } .line { stroke: #343c46 }
    .load { fill: #27415f } .held { fill: #4c8edb } .scores { fill: #3fae73 } .output { fill: #e0964a }
    .compute { fill: #9d7ae0 } .exp { fill: #6f52a6 } .wait { fill: #2a313a }
  }
"""
_LEGEND = (
    ("load", "in flight"),
    ("held", "stage in use"),
    ("scores", "S = Q K^T"),
    ("output", "O += P V"),
    ("exp", "exponentials"),
    ("compute", "other computing"),
    ("wait", "waiting"),
)


def svg(simulation: Simulation, title: str = "") -> str:
    """Draw the timeline of a simulation: rows for ring stages, producers and warpgroups; hovering names the spans."""
    rows = lanes(simulation)
    several = simulation.ctas > 1
    height = TOP + len(rows) * ROW + several * simulation.ctas * HEADING + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img">',
        f"<title>{escape(title or 'Pipeline timeline')}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{WIDTH}" height="{height}"/>',
        f'<text class="ink title" x="12" y="24">{escape(title)}</text>',
        *_legend(),
    ]
    scale = (WIDTH - LABEL - RIGHT) / simulation.end if simulation.end else 1.0
    bottom = height - 24
    parts += _axis(simulation.end, scale, bottom)
    y, cta = TOP, -1
    for lane in rows:
        if several and lane.cta != cta:
            cta = lane.cta
            parts.append(f'<text class="ink" x="12" y="{y + 15}">CTA {cta}</text>')
            y += HEADING
        parts += _row(lane, y, scale)
        y += ROW
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> list[str]:
    parts, x = [], LABEL
    for name, text in _LEGEND:
        parts.append(f'<rect class="{name}" x="{x}" y="36" width="12" height="12" rx="2"/>')
        parts.append(f'<text class="faint" x="{x + 17}" y="46">{escape(text)}</text>')
        x += 34 + 7 * len(text)
    return parts


def _axis(end: float, scale: float, bottom: int) -> list[str]:
    step = tick_step(end)
    parts, time = [], 0
    while time <= end:
        x = LABEL + time * scale
        parts.append(f'<line class="line" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom}"/>')
        parts.append(f'<text class="faint" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{time:,}</text>')
        time += step
    return [*parts, f'<text class="faint" x="12" y="{bottom + 16}">cycles</text>']


def tick_step(end: float) -> int:
    """A round number of cycles, of which at most TICKS fit into the time."""
    step = 1
    while end / step > TICKS:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    return step


def _row(lane: Lane, y: int, scale: float) -> list[str]:
    parts = [f'<text class="ink" x="12" y="{y + 11}">{escape(lane.label)}</text>']
    for span in lane.spans:
        x, width = LABEL + span.start * scale, span.cycles * scale
        place = f'x="{x:.2f}" y="{y}" width="{max(width - 0.6, 0.4):.2f}" height="{BAR}" rx="1.5"'
        parts.append(f'<rect class="{_class(span)}" {place}><title>{escape(_about(span))}</title></rect>')
    return parts


def _class(span: Span) -> str:
    if span.kind == "product":
        return "scores" if span.what.startswith("S") else "output"
    if span.kind == "compute" and span.what.startswith("S ="):
        return "scores"
    if span.kind == "compute" and span.what.startswith("O +="):
        return "output"
    if span.kind == "compute" and span.what == "exponentials":
        return "exp"
    return span.kind


def _about(span: Span) -> str:
    verbs = {"load": "in flight", "held": "in use", "product": "", "compute": "", "wait": "waits for"}
    tile = "" if span.tile is None else f", tile {span.tile}"
    what = f"{verbs[span.kind]} {span.what}" if span.kind == "wait" else f"{span.what} {verbs[span.kind]}".rstrip()
    return f"{what}{tile}: {span.start:,.0f} to {span.end:,.0f}, {span.cycles:,.0f} cycles"
