"""A picture of a recorded trace: what warps, copies and products did when, in the logical time of the CPU model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from markupsafe import Markup

from fa3gen.design.schedule import Role
from fa3gen.inspect.report.drawing import COLOURS, Axis, Svg

WIDTH, LEFT, ROW = 1100, 170, 26
FLIGHTS = {
    "in": "copies to shared memory",
    "out": "copies from it",
    "first": "products, A in shared memory",
    "second": "products, A in registers",
}


@dataclass(frozen=True)
class Lane:
    """Warps that did the same at the same time."""

    name: str
    warps: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """The picture of a kernel's CTA, and what its colours mean: `functions` of the module, those that take most first.

    `flights` are the kinds of copies and products that there are: (class of the style sheet, words).
    """

    kernel: str
    picture: Markup
    functions: tuple[str, ...]
    flights: tuple[tuple[str, str], ...]


def draw(cta: dict[str, Any], roles: Sequence[Role]) -> Timeline:
    """The picture of one CTA of a trace document, see `fa3gen.cpu.trace_files`; `roles` are those of the kernel."""
    last = max([warp["ticks"] for warp in cta["warps"]] + [event["begin"] + 1 for event in cta["events"]])
    lanes = _lanes(cta, {role.label: role.duty for role in roles})
    flights = _flights(cta, last)
    functions = _functions(cta)
    colours = {name: index % COLOURS for index, (name, _) in enumerate(functions[:COLOURS])}
    rows = len(lanes) + len(flights)
    picture = Svg(WIDTH, 24 + rows * ROW + 20, f"Trace of {cta['kernel']} on the CPU model: logical time")
    across = Axis(0, last, LEFT, WIDTH - 8)
    for value in across.ticks(8):
        picture.line(across.at(value), 18, across.at(value), 24 + rows * ROW, "axis")
        picture.text(across.at(value), 13, f"{value:g}", "small", "middle")
    picture.text(0, 13, "tick", "small")
    y = 24.0
    for name, spans in flights:
        picture.text(LEFT - 8, y + 17, name, "small", "end")
        for begin, end, title, css in spans:
            width = max(across.at(end) - across.at(begin), 1)
            picture.rect(across.at(begin), y + 5, width, ROW - 10, f"flight {css}", title, 2)
        y += ROW
    for lane in lanes:
        picture.text(LEFT - 8, y + 17, lane.name, "small", "end")
        _warp(picture, cta, lane.warps[0], across, y, colours)
        y += ROW
    kinds = {css for _, spans in flights for *_, css in spans}
    return Timeline(
        cta["kernel"],
        picture.markup("wide"),
        tuple(name for name, _ in functions[:COLOURS]),
        tuple((css, words) for css, words in FLIGHTS.items() if css in kinds),
    )


def _lanes(cta: dict[str, Any], duties: Mapping[str, str]) -> list[Lane]:
    """Runs of neighbouring warps with the same code, waits and ticks are one lane; a role of one warp has its duty."""

    def same(warp: dict[str, Any]) -> tuple[Any, ...]:
        return warp["instructions"], warp["ticks"], warp["waited"], len(warp["code"])

    lanes = []
    for _, members in groupby(cta["warps"], key=same):
        numbers = [warp["warp"] for warp in members]
        name = f"warp {numbers[0]}" if len(numbers) == 1 else f"warps {numbers[0]} to {numbers[-1]}"
        lanes.append(Lane(f"{name} {duties.get(name, '')}".strip(), tuple(numbers)))
    return lanes


def _functions(cta: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    ticks: Counter[str] = Counter()
    for warp in cta["warps"]:
        for begin, end, name in warp["code"]:
            ticks[name] += end - begin
    return tuple(sorted(ticks.items(), key=lambda item: (-item[1], item[0])))


def _warp(picture: Svg, cta: dict[str, Any], warp: int, across: Axis, y: float, colours: dict[str, int]) -> None:
    code = next(entry["code"] for entry in cta["warps"] if entry["warp"] == warp)
    for begin, end, name in code:
        css = f"c{colours[name]}" if name in colours else "rest"
        title = f"{name}: ticks {begin} to {end}"
        picture.rect(across.at(begin), y + 3, max(across.at(end) - across.at(begin), 0.4), ROW - 6, css, title)
    for event in cta["events"]:
        if event["kind"] != "wait" or warp not in event["warps"] or event["end"] is None:
            continue
        if event["end"] - event["begin"] <= 1:
            continue
        line = f", line {event['line']}" if event["line"] is not None else ""
        title = f"waits for {event['label']}{line}: ticks {event['begin']} to {event['end']}"
        left, right = across.at(event["begin"]), across.at(event["end"])
        picture.rect(left, y + 3, right - left, ROW - 6, "waiting", title)


def _flights(cta: dict[str, Any], last: int) -> list[tuple[str, list[tuple[int, int, str, str]]]]:
    """(name, spans) of the arrays that copies fill, and of each warpgroup's products by commit group."""
    loads: dict[str, list[tuple[int, int, str, str]]] = {}
    products: dict[tuple[int, Any], list[dict[str, Any]]] = {}
    for event in cta["events"]:
        end = last if event["end"] is None else event["end"]
        if event["kind"] in ("load", "copies", "store"):
            verb = {"load": "TMA load of", "copies": "cp.async to", "store": "TMA store from"}[event["kind"]]
            title = f"{verb} {event['label']}, {event['details']['bytes']:,} bytes: ticks {event['begin']} to {end}"
            css = "out" if event["kind"] == "store" else "in"
            loads.setdefault(event["label"], []).append((event["begin"], end, title, css))
        elif event["kind"] == "product":
            details = event["details"]
            products.setdefault((details["warpgroup"], details["group"]), []).append(event)
    order = [place["label"] for place in cta["arrays"]]
    labels = sorted(loads, key=lambda label: order.index(label) if label in order else len(order))
    found = [(label, _joined(loads[label])) for label in labels]
    by_group: dict[int, list[tuple[int, int, str, str]]] = {}
    for (warpgroup, _), members in products.items():
        begin = min(event["begin"] for event in members)
        end = max(last if event["end"] is None else event["end"] for event in members)
        what = " and ".join(dict.fromkeys(event["label"].partition(": ")[2] for event in members))
        shape = "m{}n{}k{}".format(*members[0]["details"]["shape"])
        title = f"{len(members)} wgmma {shape}, {what}: ticks {begin} to {end}"
        css = "first" if members[0]["details"]["a"] is not None else "second"
        by_group.setdefault(warpgroup, []).append((begin, end, title, css))
    found += [(f"products, warpgroup {number}", spans) for number, spans in sorted(by_group.items())]
    return found


def _joined(spans: Sequence[tuple[int, int, str, str]]) -> list[tuple[int, int, str, str]]:
    """Copies of several boxes, or of several warps, at the same time are one span."""
    found: dict[tuple[int, int, str], list[str]] = {}
    for begin, end, title, css in sorted(spans):
        found.setdefault((begin, end, css), []).append(title)
    return [
        (begin, end, titles[0] if len(titles) == 1 else f"{len(titles)} times: {titles[0]}", css)
        for (begin, end, css), titles in found.items()
    ]
