"""Simulations as one JSON document, and its schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fa3gen.simulation.results import Simulation
from fa3gen.simulation.run import Settings, StageRow
from fa3gen.simulation.times import Times

FORMAT = "fa3gen simulate"
VERSION = 1

_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_CYCLES: dict[str, Any] = {"type": "number", "minimum": 0}
_SHARE: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 1.000001}
_TEXT: dict[str, Any] = {"type": "string"}
_UNITS = ("tensor cores", "exponentials", "issue", "loads")


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"]}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_PIECE = _object(
    {
        "name": _TEXT,
        "issue": {**_CYCLES, "description": "Cycles of all issue slots of the SM, for four warps."},
        "exp": {**_CYCLES, "description": "Cycles of all exponential units of the SM."},
        "fixed": _CYCLES,
    }
)
_OPTIONAL_PIECE = {**_PIECE, "type": ["object", "null"]}
_TIMES = _object(
    {
        "qk_tensor": _CYCLES,
        "pv_tensor": _CYCLES,
        "qk": _OPTIONAL_PIECE,
        "pv": _OPTIONAL_PIECE,
        "softmax": _list(_PIECE),
        "rescale": _PIECE,
        "epilogue": _PIECE,
        "load_latency": _CYCLES,
        "load_rate": {**_CYCLES, "description": "Bytes a cycle."},
        "q_bytes": _COUNT,
        "k_bytes": _COUNT,
        "v_bytes": _COUNT,
        "copy_q": _OPTIONAL_PIECE,
        "copy_k": _OPTIONAL_PIECE,
        "copy_v": _OPTIONAL_PIECE,
    }
)
_SPAN = _object(
    {
        "actor": _TEXT,
        "kind": {"enum": ["load", "held", "product", "compute", "wait"]},
        "what": _TEXT,
        "start": _CYCLES,
        "end": _CYCLES,
        "stage": _nullable(_COUNT),
        "tile": _nullable(_COUNT),
        "cta": _COUNT,
    }
)
_STAGES = _object(
    {
        "stages": _COUNT,
        "legal": {"type": "boolean"},
        "ctas": _COUNT,
        "step_cycles": _CYCLES,
        "tensor": _SHARE,
        "exponentials": _SHARE,
        "issue": _SHARE,
        "waiting": _SHARE,
    }
)
_MODULE = _object(
    {
        "stem": _TEXT,
        "chip": _TEXT,
        "settings": _object(
            {
                "stages": _COUNT,
                "ctas": _COUNT,
                "tiles": _COUNT,
                "queries": _COUNT,
                "arbitration": {"enum": ["even", "oldest"]},
            }
        ),
        "times": {**_TIMES, "description": "Cycles of one group of four warps."},
        "end": _CYCLES,
        "step_cycles": {**_CYCLES, "description": "Of the SM, for one tile of keys of one CTA, in the steady state."},
        "utilisation": _object(dict.fromkeys(_UNITS, _SHARE)),
        "steady": _object(dict.fromkeys(_UNITS, _SHARE)),
        "stalls": _list(_object({"actor": _TEXT, "what": _TEXT, "cycles": _CYCLES, "share": _SHARE})),
        "stages": _list(_STAGES),
        "spans": _list(_SPAN),
    }
)
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Simulations of fa3gen modules",
    **_object({"format": {"const": FORMAT}, "version": {"const": VERSION}, "modules": _list(_MODULE)}),
}


@dataclass(frozen=True)
class Entry:
    """One module's simulation and what it was made with."""

    stem: str
    chip: str
    times: Times
    settings: Settings
    simulation: Simulation
    stages: tuple[StageRow, ...]


def document(entries: Sequence[Entry]) -> dict[str, Any]:
    """The document of some simulations, in types that JSON has; `SCHEMA` describes it."""
    return {"format": FORMAT, "version": VERSION, "modules": [_module(entry) for entry in entries]}


def _module(entry: Entry) -> dict[str, Any]:
    simulation = entry.simulation
    return {
        "stem": entry.stem,
        "chip": entry.chip,
        "settings": asdict(entry.settings),
        "times": asdict(entry.times),
        "end": simulation.end,
        "step_cycles": simulation.step_cycles,
        "utilisation": {unit: simulation.utilisation(unit) for unit in _UNITS},
        "steady": {unit: simulation.steady(unit) for unit in _UNITS},
        "stalls": [asdict(stall) for stall in simulation.stalls()],
        "stages": [asdict(row) for row in entry.stages],
        "spans": [asdict(span) for span in simulation.spans],
    }
