"""Charts of what was measured or counted: registers along the code, errors, speeds."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from fa3gen.inspect.report.drawing import COLOURS, Axis, Svg, length_label
from fa3gen.inspect.report.listing import KernelListing
from fa3gen.inspect.report.numerics import Card, Point
from fa3gen.inspect.report.speeds import Ladder, Panel

WIDTH, HEIGHT = 960, 320
ERRORS_WIDTH = 720
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 20, 44
KINDS = ("normal", "outlier", "ramp")  # of inputs, in the order of their colours
DODGE = 11
NAME_WIDTH = 7.5  # of a letter of a curve's name


def live_registers(kernel: KernelListing) -> Markup:
    """Registers live at each SASS instruction, along the code; loops are marked where they begin."""
    height, floor = 200, 170
    picture = Svg(WIDTH, height, f"Live registers of {kernel.label}")
    count = max(len(kernel.sass), 1)
    across = Axis(0, count, LEFT, WIDTH - RIGHT)
    up = Axis(0, max(kernel.most, kernel.live), floor, 16)
    for value in up.ticks(4):
        picture.line(LEFT, up.at(value), WIDTH - RIGHT, up.at(value), "axis")
        picture.text(LEFT - 8, up.at(value) + 4, f"{value:g}", "small", "end")
    points = [(across.at(0), up.at(0))]
    for index, line in enumerate(kernel.sass):
        points += [(across.at(index), up.at(line.live)), (across.at(index + 1), up.at(line.live))]
    points.append((across.at(count), up.at(0)))
    picture.path(_thinned(points), "area", closed=True)
    limits = {kernel.most: "after setmaxnreg", kernel.registers: "at launch"}  # the same without setmaxnreg
    for limit, words in limits.items():
        picture.line(LEFT, up.at(limit), WIDTH - RIGHT, up.at(limit), "mark")
        picture.text(LEFT + 6, up.at(limit) - 4, f"{limit} {words}", "small")
    starts = {line.address: index for index, line in enumerate(kernel.sass)}
    for loop in kernel.loops:
        x = across.at(starts.get(loop.address, 0))
        picture.line(x, floor, x, floor + 8, "mark")
        words = f"loop, {loop.gmma} HGMMA" if loop.gmma else "loop"
        if loop.innermost:
            picture.text(x + 3, floor + 13, words, "small")
    picture.text(LEFT, height - 2, "instruction →", "small")
    picture.text(WIDTH - RIGHT, height - 2, f"{count:,}", "small", "end")
    return picture.markup("wide")


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without the points in the middle of level stretches."""
    kept: list[tuple[float, float]] = []
    for index, point in enumerate(points):
        level = 0 < index < len(points) - 1 and points[index - 1][1] == point[1] == points[index + 1][1]
        if not level:
            kept.append(point)
    return kept


def errors(card: Card) -> Markup:
    """Relative error of O against the number of keys, the kernel's as discs and PyTorch's as rings."""
    picture = Svg(ERRORS_WIDTH, HEIGHT, f"Relative error of O; {card.origin}")
    shown = [point for point in card.points if point.kernel > 0 or point.yardstick > 0]
    values = [value for point in shown for value in (point.kernel, point.yardstick) if value > 0]
    if not values:
        return Markup("")
    keys = [point.seq_k for point in shown]
    across = Axis(max(1, min(keys)) / 1.3, max(keys) * 1.3, LEFT, ERRORS_WIDTH - RIGHT, log=True)
    up = Axis(min(values) / 1.4, max(values) * 1.4, HEIGHT - BOTTOM, TOP, log=True)
    for value in up.ticks():
        picture.line(LEFT, up.at(value), ERRORS_WIDTH - RIGHT, up.at(value), "axis")
        picture.text(LEFT - 8, up.at(value) + 4, f"{value:.0e}".replace("e-0", "e-"), "small", "end")
    for value in _lengths(keys):
        picture.text(across.at(value), HEIGHT - BOTTOM + 18, length_label(value), "small", "middle")
        picture.line(across.at(value), HEIGHT - BOTTOM, across.at(value), HEIGHT - BOTTOM + 5, "axis")
    picture.text(ERRORS_WIDTH - RIGHT, HEIGHT - 4, "keys", "small", "end")
    # Kinds of input at one length stand side by side; lines lie below all marks.
    placed = [(point, across.at(point.seq_k) + DODGE * (KINDS.index(point.kind) - 1)) for point in shown]
    for point, x in placed:
        if point.kernel > 0 and point.yardstick > 0:
            picture.line(x, up.at(point.kernel), x, up.at(point.yardstick), "pairing")
    _marks(picture, placed, up)
    return picture.markup("wide")


def _marks(picture: Svg, placed: Sequence[tuple[Point, float]], up: Axis) -> None:
    for point, x in placed:
        colour = KINDS.index(point.kind)
        for value, who, css in ((point.yardstick, "PyTorch", "ring"), (point.kernel, "kernel", "disc")):
            if value > 0:
                title = f"{point.name}, {point.shape}, {point.kind} inputs: {who} {value:.2e}"
                picture.circle(x, up.at(value), 5, f"{css} k{colour}", title)


def _lengths(keys: Sequence[int]) -> list[int]:
    """Powers of four between the shortest and the longest; all lengths where there are few."""
    different = sorted(set(keys))
    if len(different) <= 8:
        return different
    return [4**power for power in range(10) if min(keys) <= 4**power <= max(keys) * 1.2]


def speeds(panel: Panel) -> Markup:
    """TFLOP/s against the length, a line for each competitor; bars from the slowest to the fastest round."""
    picture = Svg(WIDTH, HEIGHT, f"TFLOP/s by length: {panel.title}")
    lengths = [shape.problem.seq_k for shape in panel.shapes]
    fastest = max(speed.fastest for shape in panel.shapes for speed in shape.speeds)
    end = WIDTH - max(190, 40 + NAME_WIDTH * max(len(name) for name, _ in panel.names))
    across = Axis(min(lengths) / 1.15, max(lengths) * 1.15, LEFT, end, log=True)
    up = Axis(0, fastest * 1.06, HEIGHT - BOTTOM, TOP)
    for value in up.ticks():
        picture.line(LEFT, up.at(value), end, up.at(value), "axis")
        picture.text(LEFT - 8, up.at(value) + 4, f"{value:g}", "small", "end")
    for shape in panel.shapes:
        x = across.at(shape.problem.seq_k)
        picture.text(x, HEIGHT - BOTTOM + 18, shape.problem.lengths, "small", "middle")
    picture.text(LEFT - 56, 12, "TFLOP/s", "small")
    picture.text(end, HEIGHT - 4, "keys", "small", "end")
    ends = []
    for index, (name, kind) in enumerate(panel.names):
        css = "own" if kind == "this" else f"line{index % COLOURS} {kind}"
        found = [(shape.problem, speed) for shape in panel.shapes for speed in shape.speeds if speed.name == name]
        points = [(across.at(problem.seq_k), up.at(speed.tflops)) for problem, speed in found]
        for (x, _), (_, speed) in zip(points, found, strict=True):
            picture.line(x, up.at(speed.slowest), x, up.at(speed.fastest), f"spread {css}")
        picture.path(points, f"curve {css}")
        for (x, y), (problem, speed) in zip(points, found, strict=True):
            rounds = f"rounds from {speed.slowest:.0f} to {speed.fastest:.0f}"
            title = f"{name}, {problem.lengths}: {speed.tflops:.0f} TFLOP/s, {rounds}"
            picture.circle(x, y, 4 if kind == "this" else 3, f"dot {css}", title)
        ends.append((points[-1][1], name, css))
    _names(picture, ends, end + 18)
    return picture.markup("wide")


def _names(picture: Svg, ends: list[tuple[float, str, str]], x: float) -> None:
    """Each curve's name beside its last point, moved apart where they would touch."""
    previous = -100.0
    for y, name, css in sorted(ends):
        previous = max(y + 4, previous + 16)
        picture.text(x, previous, name, f"name {css}")


def ladder(rows: Ladder) -> Markup:
    """Bars of the modules of one problem at the longest length of the table."""
    height = 24
    picture = Svg(WIDTH, len(rows.rows) * height + 26, "Speed beside the other modules of this problem")
    fastest = max(speed for _, _, speeds in rows.rows for speed in speeds if speed is not None)
    across = Axis(0, fastest, 240, WIDTH - 80)
    for tick in across.ticks():
        picture.line(across.at(tick), 0, across.at(tick), len(rows.rows) * height, "axis")
        picture.text(across.at(tick), len(rows.rows) * height + 18, f"{tick:g}", "small", "middle")
    for index, (stem, own, values) in enumerate(rows.rows):
        y = index * height
        picture.text(232, y + 16, stem, "name own" if own else "name", "end")
        for position, (length, value) in enumerate(zip(rows.seq_lens, values, strict=True)):
            if value is None:
                continue
            box = (across.start, y + 4 + position * 8, across.at(value) - across.start, 7)
            css = ("own" if own else "other") + (" late" if position else "")
            picture.rect(*box, f"bar {css}", f"{stem}, {length_label(length)}: {value:g} TFLOP/s")
        shown = [value for value in values if value is not None]
        words = ", ".join(f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in shown)
        picture.text(across.at(max(shown)) + 6, y + 16, words, "small")
    return picture.markup("wide")
