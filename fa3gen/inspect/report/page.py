"""A report as one HTML file that needs nothing else: no network, no font, no script of anybody else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jinja2
from markupsafe import Markup

from fa3gen.design import footprint
from fa3gen.design.rules import Kind
from fa3gen.design.schedule import schedule_of
from fa3gen.hardware import hopper
from fa3gen.inspect.report import charts, fragments, highlighting, pictures, tiles, timeline
from fa3gen.inspect.report.drawing import length_label, packaged
from fa3gen.inspect.report.gathering import Report
from fa3gen.inspect.report.listing import LineFacts
from fa3gen.inspect.report.speeds import Panel
from fa3gen.records import evidence
from fa3gen.records.evidence import Status
from fa3gen.records.packed_records import PackedProblem

ORDER_HEADS = 6  # of the example that shows in which order tiles are taken
HEAVIEST = 8  # lines of the module that are named for their many instructions
_KINDS = {
    "tensor core": ("HGMMA", "WARPGROUP"),
    "exponentials, reciprocals, logarithms": ("MUFU",),
    "barriers": ("SYNCS", "BAR", "NANOSLEEP"),
    "TMA and shared memory": ("UTMALDG", "UTMASTG", "STSM", "LDS", "STS", "LDSM", "LDGSTS"),
    "FP32 arithmetic": ("FFMA", "FMUL", "FADD", "FMNMX", "FSEL", "FSETP", "F2FP"),
}


@dataclass(frozen=True)
class Line:
    """One line of the module as the listing shows it."""

    number: int
    text: Markup
    ptx: int
    sass: int
    live: int
    tensor: bool


@dataclass(frozen=True)
class Figure:
    """A number at the top of the page: what it is, and where it comes from."""

    value: str
    unit: str
    what: str
    origin: str = ""


def render(report: Report) -> str:
    """The page."""
    spec = report.variant.spec
    by_line = report.listing.by_line()
    run = report.run.trace
    text = _template().render(
        report=report,
        spec=spec,
        stem=report.variant.stem,
        style=Markup(packaged("pictures.css") + packaged("page.css")),
        script=Markup(packaged("page.js")),
        figures=_figures(report),
        verified=report.status is Status.VERIFIED,
        whys=_whys(report),
        hopper=hopper,
        footprint=footprint,
        memory=pictures.shared_memory(spec) if report.explanation.smem else None,
        memory_rows=pictures.memory_rows(spec),
        swizzles=pictures.swizzle_views(spec),
        fragments=[(fragment, pictures.fragment(fragment)) for fragment in fragments.fragments(spec)],
        schedules=_schedules(report),
        taking=_taking(report),
        taken=tiles.example_call(spec, ORDER_HEADS).in_full,
        packed=footprint.packed_sequences(spec),
        simulated=None if report.simulated is None else Markup(report.simulated.picture),
        trace=run,
        timelines=[] if run is None else [timeline.draw(cta, schedule_of(spec).roles) for cta in run["ctas"]],
        lines=_lines(report, by_line),
        code=_code(report, by_line),
        heaviest=sorted(by_line.items(), key=lambda item: (-len(item[1].sass), item[0]))[:HEAVIEST],
        kernels=[(kernel, charts.live_registers(kernel)) for kernel in report.listing.kernels],
        mix=_mix(report),
        cards=[(card, charts.errors(card) if card.points else None) for card in (report.on_gpu, report.on_cpu)],
        timed=evidence.TIMED,
        panels=[(panel, charts.speeds(panel), _speed_rows(panel)) for panel in report.panels],
        ladder=charts.ladder(report.ladder) if report.ladder is not None else None,
        length_label=length_label,
    )
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(packaged),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["count"] = lambda value: f"{value:,}"
    return environment.get_template("page.html.jinja")


def _figures(report: Report) -> list[Figure]:
    """What a reader wants to know first."""
    census, explained = report.census, report.explanation
    spills = f"{census.spills} spills" if census.spills else "no spills"
    found = [Figure(str(census.registers), "registers", f"per thread at launch, {spills}", "compiled")]
    if census.smem:
        share = f"{census.smem / hopper.SMEM_PER_CTA:.0%} of what a CTA may have"
        found.append(Figure(f"{census.smem:,}", "bytes", f"of shared memory, {share}", "compiled"))
    if explained.work is not None:
        bound = explained.work.ceilings[-1]
        what = f"ceiling on {bound.chip.name}, bound by {bound.binding.unit}"
        found.append(Figure(f"{bound.tflops:.0f}", "TFLOP/s", what, "estimated"))
    shapes = [shape for panel in report.panels for shape in panel.shapes]
    if shapes:
        best = max(shapes, key=lambda shape: shape.own.tflops)
        of = best.problem.lengths if isinstance(best.problem, PackedProblem) else f"{best.problem.lengths} keys"
        what = f"fastest, at {of}; {best.origin.partition(',')[0]}"
        found.append(Figure(f"{best.own.tflops:.0f}", "TFLOP/s", what, "measured"))
    elif report.record is not None and report.status is Status.VERIFIED and report.record.tflops:
        length, speed = max(report.record.tflops.items(), key=lambda item: item[1])
        what = f"fastest, at {length_label(int(length))} keys; {report.record.gpu}"
        found.append(Figure(f"{speed:.0f}", "TFLOP/s", what, "measured"))
    normal = [point for point in report.on_gpu.points if point.kernel > 0 and point.yardstick > 0]
    if normal:
        worst = max(normal, key=lambda point: point.kernel / point.yardstick)
        what = f"PyTorch's error, at worst (case {worst.name})"
        found.append(Figure(f"{worst.kernel / worst.yardstick:.2f}", "times", what, "measured"))
    return found


def _whys(report: Report) -> dict[str, list[str]]:
    """Decision -> the statements of the hardware's rules that were checked about it."""
    found: dict[str, list[str]] = {}
    for question in report.explanation.asked:
        statements = found.setdefault(question.about, [])
        if question.rule.kind is Kind.HARDWARE and question.rule.statement not in statements:
            statements.append(question.rule.statement)
    return found


def _schedules(report: Report) -> list[dict[str, Any]]:
    spec = report.variant.spec
    if not tiles.tiled(spec):
        return []
    found = []
    for seq_q, seq_k in tiles.examples(spec):
        plan = tiles.schedule(spec, seq_q, seq_k)
        counts = {state: plan.count(state) for state in ("full", "masked", "skipped")}
        found.append({"plan": plan, "counts": counts, "picture": pictures.tile_schedule(spec, seq_q, seq_k)})
    return found


def _taking(report: Report) -> Markup | None:
    spec = report.variant.spec
    if not tiles.tiled(spec):
        return None
    return pictures.taking_order(spec, tiles.example_call(spec, ORDER_HEADS))


def _lines(report: Report, by_line: dict[int, LineFacts]) -> list[Line]:
    nothing = LineFacts((), ())
    found = []
    for number, text in enumerate(highlighting.lines(report.source), 1):
        facts = by_line.get(number, nothing)
        tensor = any(line.opcode == "HGMMA" for line in facts.sass)
        found.append(Line(number, text, len(facts.ptx), len(facts.sass), facts.live, tensor))
    return found


def _code(report: Report, by_line: dict[int, LineFacts]) -> Markup:
    """Instructions by line of the module, as JSON that is safe within a script element."""
    names = {kernel.name: kernel.label for kernel in report.census.kernels}
    data = {}
    for number, facts in by_line.items():
        texts = [line.text for line in facts.ptx]
        for name, label in names.items():  # parameters and labels are named after the mangled kernel
            texts = [text.replace(name, label) for text in texts]
        sass = [[f"{line.address:04x}", line.text, line.live] for line in facts.sass]
        data[number] = {"ptx": texts, "sass": sass}
    text = json.dumps(data, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _mix(report: Report) -> list[tuple[str, int]]:
    """SASS instructions by what they are for, NOPs left out."""
    opcodes: Counter[str] = Counter()
    for kernel in report.listing.kernels:
        opcodes.update(line.opcode for line in kernel.sass if line.opcode != "NOP")
    found = [(kind, sum(opcodes[name] for name in names)) for kind, names in _KINDS.items()]
    rest = sum(opcodes.values()) - sum(count for _, count in found)
    return [*((kind, count) for kind, count in found if count), ("everything else", rest)]


def _speed_rows(panel: Panel) -> Sequence[tuple[str, str, str, str, str, str]]:
    """(length, own, best peer, its name, ratio, ratio of eager calls) of each shape."""
    rows = []
    for shape in panel.shapes:
        peer = shape.best_peer
        rows.append(
            (
                shape.problem.lengths,
                f"{shape.own.tflops:.0f}",
                f"{peer.tflops:.0f}" if peer else "–",
                peer.name if peer else "none ran",
                f"{shape.ratio:.2f}" if shape.ratio else "–",
                f"{shape.eager_ratio:.2f}" if shape.eager_ratio else "–",
            )
        )
    return rows
