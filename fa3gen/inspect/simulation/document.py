"""Simulations as one JSON document, and its schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fa3gen.base import json_shapes
from fa3gen.base.json_shapes import COUNT, NUMBER, TEXT, Shape, listed, nullable, record
from fa3gen.inspect.simulation.results import Simulation
from fa3gen.inspect.simulation.run import Dealt, Settings, StageRow
from fa3gen.inspect.simulation.times import UNITS, Times

FORMAT = "fa3gen simulate"
# 2: shared memory is a unit, products are pieces; 3: a piece has a chain, loads a landing rate; 4: tiles of keys are a
# list, whose tiles of queries may differ, and a problem may be dealt out; 5: what memory does, and parts of keys.
VERSION = 5

_CYCLES = NUMBER
_SHARE: Shape = {"type": "number", "minimum": 0, "maximum": 1.000001, "description": "With rounding."}


_PIECE = record(
    {
        "name": TEXT,
        "issue": {**_CYCLES, "description": "Cycles of all issue slots of the SM, for four warps."},
        "exp": {**_CYCLES, "description": "Cycles of all exponential units of the SM."},
        "smem": {**_CYCLES, "description": "Cycles of shared memory at its full width."},
        "tensor": {**_CYCLES, "description": "Cycles of all tensor cores of the SM; 0 for what warps compute."},
        "chain": {**_CYCLES, "description": "Cycles of a warp that has the SM to itself; 0 for products on WGMMA."},
    }
)
_OPTIONAL_PIECE = {**_PIECE, "type": ["object", "null"]}
_TIMES = record(
    {
        "qk": _PIECE,
        "pv": _PIECE,
        "softmax": listed(_PIECE),
        "rescale": _PIECE,
        "epilogue": _PIECE,
        "load_latency": _CYCLES,
        "landing_rate": {**_CYCLES, "description": "Bytes a cycle of a lone load."},
        "load_rate": {**_CYCLES, "description": "Bytes a cycle."},
        "smem_rate": {**_CYCLES, "description": "Bytes a cycle."},
        "q_bytes": COUNT,
        "k_bytes": COUNT,
        "v_bytes": COUNT,
        "copy_q": _OPTIONAL_PIECE,
        "copy_k": _OPTIONAL_PIECE,
        "copy_v": _OPTIONAL_PIECE,
        "transpose": _OPTIONAL_PIECE,
        "convert_k": _OPTIONAL_PIECE,
        "convert_v": _OPTIONAL_PIECE,
        "read_q": _OPTIONAL_PIECE,
        "read_k": _OPTIONAL_PIECE,
        "read_v": _OPTIONAL_PIECE,
    }
)
_SPAN = record(
    {
        "actor": TEXT,
        "kind": {"enum": ["load", "held", "product", "compute", "wait"]},
        "what": TEXT,
        "start": _CYCLES,
        "end": _CYCLES,
        "stage": nullable(COUNT),
        "tile": nullable(COUNT),
        "cta": COUNT,
    }
)
_STAGES = record(
    {
        "stages": COUNT,
        "legal": {"type": "boolean"},
        "ctas": COUNT,
        "step_cycles": _CYCLES,
        "tensor": _SHARE,
        "tensor_even": _SHARE,
        "exponentials": _SHARE,
        "issue": _SHARE,
        "waiting": _SHARE,
    }
)
_MODULE = record(
    {
        "stem": TEXT,
        "chip": TEXT,
        "settings": record(
            {
                "stages": COUNT,
                "ctas": COUNT,
                "tiles": listed(COUNT, "Of keys, for each tile of queries."),
                "arbitration": {"enum": ["even", "oldest"]},
            }
        ),
        "times": {**_TIMES, "description": "Cycles of one group of four warps."},
        "end": _CYCLES,
        "step_cycles": {**_CYCLES, "description": "Of the SM, for one tile of keys of one CTA, in the steady state."},
        "problem": nullable(
            record(
                {
                    "lengths_q": listed(COUNT),
                    "lengths_k": listed(COUNT),
                    "heads_q": COUNT,
                    "heads_kv": COUNT,
                    "tiles": {**COUNT, "description": "Of queries."},
                    "cycles": _CYCLES,
                    "balance": {**_SHARE, "description": "How busy the SMs are on average."},
                    "tflops": NUMBER,
                    "gigabytes": {**NUMBER, "description": "GB/s of q, k, v and O."},
                    "adding_up": {**_CYCLES, "description": "Of parts of keys, at the end."},
                    "memory": record(
                        {
                            "loaded": {**COUNT, "description": "Bytes of K and V that tiles of queries load."},
                            "from_hbm": {**COUNT, "description": "Of these; the others are in L2."},
                            "busy_sms": {**COUNT, "description": "SMs that load at a time, in the mean."},
                            "in_flight": {**COUNT, "description": "Bytes that all their stages have room for."},
                        }
                    ),
                }
            )
        ),
        "utilisation": record(dict.fromkeys(UNITS, _SHARE)),
        "steady": record(dict.fromkeys(UNITS, _SHARE)),
        "stalls": listed(record({"actor": TEXT, "what": TEXT, "cycles": _CYCLES, "share": _SHARE})),
        "stages": listed(_STAGES),
        "spans": listed(_SPAN),
    }
)
SCHEMA = json_shapes.document("Simulations of fa3gen modules", FORMAT, VERSION, _MODULE)


@dataclass(frozen=True)
class Entry:
    """One module's simulation and what it was made with; `dealt` is a whole problem, where one was asked for."""

    stem: str
    chip: str
    times: Times
    settings: Settings
    simulation: Simulation
    stages: tuple[StageRow, ...]
    dealt: Dealt | None = None


def document(entries: Sequence[Entry]) -> dict[str, Any]:
    """The document of some simulations, in types that JSON has; `SCHEMA` describes it."""
    return {"format": FORMAT, "version": VERSION, "modules": [_module(entry) for entry in entries]}


def _module(entry: Entry) -> dict[str, Any]:
    simulation = entry.simulation
    return {
        "stem": entry.stem,
        "chip": entry.chip,
        "settings": {**asdict(entry.settings), "tiles": list(entry.settings.tiles)},
        "times": asdict(entry.times),
        "end": simulation.end,
        "step_cycles": simulation.step_cycles,
        "problem": None if entry.dealt is None else _problem(entry.dealt),
        "utilisation": {unit: simulation.utilisation(unit) for unit in UNITS},
        "steady": {unit: simulation.steady(unit) for unit in UNITS},
        "stalls": [asdict(stall) for stall in simulation.stalls()],
        "stages": [asdict(row) for row in entry.stages],
        "spans": [asdict(span) for span in simulation.spans],
    }


def _problem(dealt: Dealt) -> dict[str, Any]:
    shape = dealt.problem.shape
    lengths_q, lengths_k = (list(side) for side in zip(*shape.sequences, strict=True))
    return {
        "lengths_q": lengths_q,
        "lengths_k": lengths_k,
        "heads_q": shape.heads_q,
        "heads_kv": shape.heads_kv,
        "tiles": dealt.problem.tiles,
        "cycles": dealt.cycles,
        "balance": dealt.balance,
        "tflops": dealt.tflops,
        "gigabytes": dealt.gigabytes,
        "adding_up": dealt.adding_up,
        "memory": asdict(dealt.memory),
    }
