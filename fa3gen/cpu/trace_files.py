"""A recorded trace as files: a JSON document of its own (`SCHEMA`) and the Chrome trace event format.

The second opens in Perfetto (ui.perfetto.dev) and chrome://tracing. Source: "Trace Event Format" of the Chromium
project; used are complete events (X), instant events (i), nestable asynchronous events (b, e), counters (C) and
metadata (M). One tick is written as one microsecond.
"""

from __future__ import annotations

import ast
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fa3gen.base.json_shapes import COUNT, nullable, record
from fa3gen.compile.census import kernel_label
from fa3gen.cpu.places import SharedPlaces
from fa3gen.cpu.trace import ABOUT_TIME, CtaTrace, Event, Trace

FORMAT = "fa3gen trace"
VERSION = 2  # 2: the problem may be packed sequences, with lists of lengths
EXECUTED_ON = "CPU model of sm_90a (not a GPU)"
NO_PHASE = "before its first phase"  # a producer's first wait for an empty stage

_TICK: dict[str, Any] = {"type": "integer", "minimum": 0, "description": "Tick of the CTA's logical time."}
_OFFSET: dict[str, Any] = {"type": "integer", "description": "Bytes from the start of dynamic shared memory."}
_INDEX: dict[str, Any] = {"type": "array", "items": COUNT, "minItems": 3, "maxItems": 3}
_WAIT_ON = ["mbarrier", "barrier", "products", "stores", "copies", "registers", "warps"]


_PLACE = record(
    {
        "label": {"type": "string"},
        "name": {"type": "string"},
        "stage": nullable(COUNT),
        "offset": _OFFSET,
        "bytes": COUNT,
    }
)
_DETAILS: dict[str, Any] = {
    "on": {"enum": _WAIT_ON, "description": "What a wait waits for, or an arrival arrives at."},
    "completed": nullable({**_TICK, "description": "When what is waited for had happened; null if never."}),
    "place": _OFFSET,
    "phase": {"type": "integer", "minimum": -1, "description": "Of an mbarrier, from 0; -1 is before the first."},
    "arrivals": COUNT,
    "expected_bytes": COUNT,
    "number": COUNT,
    "bytes": COUNT,
    "coordinates": {"type": "array", "items": {"type": "integer"}, "description": "Of the box, innermost first."},
    "barrier": _OFFSET,
    "warpgroup": COUNT,
    "group": nullable({**COUNT, "description": "Of wgmma.commit_group, counted for each warpgroup."}),
    "shape": {"type": "array", "items": COUNT, "minItems": 3, "maxItems": 3, "description": "M, N, K."},
    "types": {"type": "array", "items": {"type": "string"}, "description": "Of A, of B, of the accumulator."},
    "a": nullable({**_OFFSET, "description": "Where A begins; null for registers."}),
    "b": _OFFSET,
    "issued": {**_TICK, "description": "When the last of the four warps had issued it."},
    "products": {**COUNT, "description": "How many products of the warpgroup have to be complete."},
    "pending_groups": COUNT,
    "action": {"enum": ["inc", "dec"]},
    "registers": COUNT,
}
_EVENT = record(
    {
        "kind": {"enum": ["wait", "arrive", "load", "store", "copies", "product", "registers"]},
        "label": {"type": "string"},
        "warps": {"type": "array", "items": COUNT},
        "begin": _TICK,
        "end": nullable(_TICK),
        "line": nullable({**COUNT, "description": "Of the generated module."}),
        "ptx_line": nullable({**COUNT, "description": "Of the PTX."}),
        "details": record(_DETAILS, optional=tuple(_DETAILS)),
    }
)
_WARP = record(
    {
        "warp": COUNT,
        "instructions": {**COUNT, "description": "PTX instructions issued."},
        "ticks": {**_TICK, "description": "When the warp ended."},
        "ended": {"type": "boolean"},
        "waits": COUNT,
        "waited": {**COUNT, "description": "Ticks spent in waits beyond the tick of the waiting instruction."},
        "code": {
            "type": "array",
            "items": {
                "type": "array",
                "prefixItems": [_TICK, _TICK, {"type": "string"}],
                "minItems": 3,
                "maxItems": 3,
            },
            "description": "[begin, end, function of the generated module], waits included.",
        },
    }
)
_CTA = record(
    {
        "kernel": {"type": "string"},
        "index": _INDEX,
        "grid": _INDEX,
        "shared_bytes": COUNT,
        "arrays": {"type": "array", "items": _PLACE},
        "barriers": {"type": "array", "items": _PLACE},
        "warps": {"type": "array", "items": _WARP},
        "events": {"type": "array", "items": _EVENT},
    }
)
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Trace of a generated kernel on the CPU model of sm_90a",
    **record(
        {
            "format": {"const": FORMAT},
            "version": {"const": VERSION},
            "executed_on": {"const": EXECUTED_ON},
            "time": {"type": "string"},
            "module": {"type": "string"},
            "file": {"type": "string"},
            "problem": {
                "type": "object",
                "additionalProperties": {"type": ["integer", "array"], "items": COUNT},
                "description": "Extents of the call; lengths of packed sequences are arrays.",
            },
            "schedule": {"type": "string"},
            "report": {"type": ["string", "null"], "description": "The fault that ended the run, if one did."},
            "ctas": {"type": "array", "items": _CTA},
        }
    ),
}
"""JSON Schema of the document that `document` makes."""


@dataclass
class Source:
    """The generated module that a trace is of: its text, and `file`, the path as people write it."""

    stem: str
    file: str
    path: str  # as the PTX names it
    text: str
    _functions: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Note for each line the innermost function that it belongs to."""
        for node in ast.walk(ast.parse(self.text)):  # outer ones come first
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                for line in range(first, (node.end_lineno or node.lineno) + 1):
                    self._functions[line] = node.name

    def line(self, cta: CtaTrace, instruction: int | None) -> int | None:
        """The line of this file that an instruction comes from."""
        if instruction is None:
            return None
        source = cta.kernel.instructions[instruction].source
        return source[1] if source is not None and source[0] == self.path else None

    def function(self, cta: CtaTrace, instruction: int) -> str:
        """The function of this file that an instruction comes from."""
        line = self.line(cta, instruction)
        return "unknown" if line is None else self._functions.get(line, "module")


def document(
    trace: Trace,
    source: Source,
    places: SharedPlaces,
    *,
    problem: dict[str, int | list[int]],
    schedule: str,
    report: str | None = None,
) -> dict[str, Any]:
    """The trace as a document of `SCHEMA`, in types that JSON has; `report` is the hazard that ended the run."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "executed_on": EXECUTED_ON,
        "time": ABOUT_TIME,
        "module": source.stem,
        "file": source.file,
        "problem": problem,
        "schedule": schedule,
        "report": report,
        "ctas": [_cta(cta, source, places) for cta in trace.ctas],
    }


def _cta(cta: CtaTrace, source: Source, places: SharedPlaces) -> dict[str, Any]:
    events = sorted(
        (_event(cta, event, source, places) for event in cta.events),
        key=lambda event: (event["begin"], event["warps"], event["kind"], event["label"]),
    )
    arrays = [(place, place.label) for place in places.arrays]
    barriers = [(place, place.barrier_label) for place in places.barriers]
    return {
        "kernel": kernel_label(cta.kernel.name),
        "index": list(cta.index),
        "grid": list(cta.grid),
        "shared_bytes": cta.shared_bytes,
        **{
            kind: [
                {
                    "label": label,
                    "name": place.name,
                    "stage": place.stage,
                    "offset": place.offset,
                    "bytes": place.bytes,
                }
                for place, label in listed
            ]
            for kind, listed in (("arrays", arrays), ("barriers", barriers))
        },
        "warps": [_warp(cta, number, events, source) for number in range(len(cta.warps))],
        "events": events,
    }


def _warp(cta: CtaTrace, number: int, events: list[dict[str, Any]], source: Source) -> dict[str, Any]:
    warp = cta.warps[number]
    waits = [event for event in events if event["kind"] == "wait" and number in event["warps"]]
    return {
        "warp": number,
        "instructions": warp.instructions,
        "ticks": warp.clock,
        "ended": warp.ended,
        "waits": len(waits),
        "waited": sum(waited(event) for event in waits),
        "code": list(_code(cta, number, source)),
    }


def waited(event: dict[str, Any]) -> int:
    """Ticks that a wait of the document kept its warps from going on; 0 where it never ended."""
    if event["end"] is None:
        return 0
    instruction = 0 if event["details"]["on"] == "warps" else 1  # nothing is executed while warps meet
    return int(event["end"] - event["begin"] - instruction)


def _code(cta: CtaTrace, number: int, source: Source) -> Iterator[list[Any]]:
    """[begin, end, function] of the stretches of one warp; a wait belongs to the function that waits."""
    runs: dict[tuple[int, int], list[tuple[int, str]]] = {}
    begin = tick = 0
    current: str | None = None
    for end, first, past in cta.warps[number].stretches:
        if (first, past) not in runs:
            names = [source.function(cta, index) for index in range(first, past)]
            runs[first, past] = [(len(list(same)), name) for name, same in itertools.groupby(names)]
        ends_before = end - (past - first)
        for count, name in runs[first, past]:
            if name != current:
                if current is not None and tick > begin:
                    yield [begin, tick, current]
                begin, current = tick, name
            ends_before += count
            tick = ends_before
    if current is not None and tick > begin:
        yield [begin, tick, current]


# ---------------------------------------------------------------------- events


def _event(cta: CtaTrace, event: Event, source: Source, places: SharedPlaces) -> dict[str, Any]:
    details = dict(event.details)
    on_mbarrier = details.get("on") == "mbarrier"
    for name in ("place", "barrier", "a", "b"):
        if details.get(name) is not None:
            details[name] -= cta.dynamic_start
    label = _label(event, details, places, on_mbarrier)
    known = event.instruction is not None
    return {
        "kind": event.kind,
        "label": label,
        "warps": list(event.warps),
        "begin": event.begin,
        "end": event.end,
        "line": source.line(cta, event.instruction),
        "ptx_line": cta.kernel.instructions[event.instruction].line if known else None,
        "details": details,
    }


def _label(event: Event, details: dict[str, Any], places: SharedPlaces, on_mbarrier: bool) -> str:
    """What the event is about, in a few words."""
    if on_mbarrier:
        phase = details["phase"]
        not_yet = event.kind == "wait" and event.end is not None and details["completed"] is None
        text = f"{places.barrier(details['place'])} {NO_PHASE if phase < 0 else f'phase {phase}'}"
        return f"{text}, not yet" if not_yet else text
    if details.get("on") == "barrier":
        return f"barrier {details['number']}"
    if event.kind in ("load", "store", "copies"):
        return places.array(details["place"])
    if event.kind == "product":
        a = "registers" if details["a"] is None else places.array(details["a"])
        return f"warpgroup {details['warpgroup']}: {a} x {places.array(details['b'])}"
    if event.kind == "registers":
        return f"setmaxnreg.{details['action']} {details['registers']}"
    return {
        "products": f"wgmma.wait_group {details.get('pending_groups', '')}".rstrip(),
        "stores": "cp.async.bulk.wait_group",
        "copies": "cp.async.wait_group",
        "registers": "setmaxnreg.inc",
        "warps": "other warps of the group",
    }[details["on"]]


# ---------------------------------------------------------------------- Chrome trace event format


def perfetto(trace: dict[str, Any]) -> dict[str, Any]:
    """A document of `SCHEMA` in the Chrome trace event format: a process for each CTA, a thread for each warp.

    Code, waits and arrivals stand on the warps' tracks. Copies and products in flight have tracks of their own, named
    by array and stage; so have the bytes that loads have in flight.
    """
    events: list[dict[str, Any]] = []
    numbers = itertools.count(1)
    for process, cta in enumerate(trace["ctas"], 1):
        events += _names(trace, cta, process)
        last = max([warp["ticks"] for warp in cta["warps"]] + [event["begin"] + 1 for event in cta["events"]])
        for warp in cta["warps"]:
            for begin, end, name in warp["code"]:
                events.append(_slice(process, warp["warp"], begin, end, name, "code", {}))
        events += _warp_events(cta, process, last)
        for begin, end, name, category, arguments in _in_flight(cta, last):
            pair = {"cat": category, "id": f"{next(numbers):#x}", "pid": process, "tid": 0, "name": name}
            events += [{"ph": "b", "ts": begin, **pair, "args": arguments}, {"ph": "e", "ts": end, **pair}]
        events += _bytes_in_flight(cta, process)
    about = {name: trace[name] for name in ("executed_on", "time", "module", "file", "problem", "schedule", "report")}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**about, "unit": "1 us stands for 1 tick"}}


def _names(trace: dict[str, Any], cta: dict[str, Any], process: int) -> Iterator[dict[str, Any]]:
    title = f"{trace['module']}: {cta['kernel']} CTA {tuple(cta['index'])}, CPU model, 1 us = 1 tick"
    yield {"ph": "M", "pid": process, "tid": 0, "ts": 0, "name": "process_name", "args": {"name": title}}
    yield {"ph": "M", "pid": process, "tid": 0, "ts": 0, "name": "process_sort_index", "args": {"sort_index": process}}
    for warp in cta["warps"]:
        number = warp["warp"]
        names = {
            "thread_name": {"name": f"warp {number} (warpgroup {number // 4})"},
            "thread_sort_index": {"sort_index": number},
        }
        for name, arguments in names.items():
            yield {"ph": "M", "pid": process, "tid": number + 1, "ts": 0, "name": name, "args": arguments}


def _slice(
    process: int, warp: int, begin: int, end: int, name: str, category: str, arguments: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": warp + 1,
        "ts": begin,
        "dur": end - begin,
        "name": name,
        "cat": category,
        "args": arguments,
    }


def _warp_events(cta: dict[str, Any], process: int, last: int) -> Iterator[dict[str, Any]]:
    """Waits as slices, what takes no time as instants."""
    for event in cta["events"]:
        arguments = {"line": event["line"], "ptx_line": event["ptx_line"], **event["details"]}
        for warp in event["warps"]:
            if event["kind"] == "wait":
                never = event["end"] is None
                end = max(last, event["begin"] + 1) if never else event["end"]
                name = f"wait {event['label']}" + (" (for ever)" if never else "")
                yield _slice(process, warp, event["begin"], end, name, "wait", arguments)
            elif event["kind"] != "product" or warp == event["warps"][0]:
                verb = {"arrive": "arrive ", "load": "load ", "store": "store from ", "copies": "cp.async to "}
                name = verb.get(event["kind"], "") + event["label"]
                where = {"pid": process, "tid": warp + 1, "ts": event["begin"], "s": "t"}
                yield {"ph": "i", **where, "name": name, "cat": event["kind"], "args": arguments}


def _in_flight(cta: dict[str, Any], last: int) -> Iterator[tuple[int, int, str, str, dict[str, Any]]]:
    """(begin, end, name, category, arguments) of copies, and of products by commit group."""
    verbs = {"load": "load", "store": "store from", "copies": "cp.async to"}
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for event in cta["events"]:
        if event["kind"] in verbs:
            name = f"{verbs[event['kind']]} {event['label']}"
            yield event["begin"], _end(event, last), name, event["kind"], {"line": event["line"], **event["details"]}
        elif event["kind"] == "product":
            details = event["details"]
            alone = details["number"] if details["group"] is None else None
            groups.setdefault((details["warpgroup"], details["group"], alone, event["label"]), []).append(event)
    for (_, group, _, label), products in groups.items():
        shapes = Counter("m{}n{}k{}".format(*product["details"]["shape"]) for product in products)
        text = ", ".join(f"{count} x {shape}" for shape, count in shapes.items())
        begin, end = min(product["begin"] for product in products), max(_end(product, last) for product in products)
        yield begin, end, label, "product", {"products": text, "group": group, "line": products[0]["line"]}


def _bytes_in_flight(cta: dict[str, Any], process: int) -> Iterator[dict[str, Any]]:
    changes: Counter[int] = Counter()
    for event in cta["events"]:
        if event["kind"] in ("load", "copies"):
            changes[event["begin"]] += event["details"]["bytes"]
            if event["end"] is not None:
                changes[event["end"]] -= event["details"]["bytes"]
    held = 0
    for tick in sorted(changes):
        held += changes[tick]
        yield {
            "ph": "C",
            "pid": process,
            "tid": 0,
            "ts": tick,
            "name": "bytes of loads in flight",
            "args": {"bytes": held},
        }


def _end(event: dict[str, Any], last: int) -> int:
    return max(last, event["begin"] + 1) if event["end"] is None else int(event["end"])
