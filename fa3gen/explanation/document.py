"""Explanations as one JSON document, and its schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, get_args

from fa3gen import footprint, hopper
from fa3gen.ceiling import Ceiling, ProblemCeiling, Unit
from fa3gen.explanation.facts import Explanation

FORMAT = "fa3gen explain"
VERSION = 1

_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_NUMBER: dict[str, Any] = {"type": "number", "minimum": 0}
_TEXT: dict[str, Any] = {"type": "string"}
_UNIT: dict[str, Any] = {"enum": list(get_args(Unit))}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _list(items: dict[str, Any], about: str = "") -> dict[str, Any]:
    return {"type": "array", "items": items, **({"description": about} if about else {})}


_ROWS = _list(_list(_TEXT), "Rows of cells; the first row names the columns.")
_STEP = _object(
    {
        "flops": _COUNT,
        "tensor_flops": _COUNT,
        "wgmma_qk": {**_COUNT, "description": "Instructions of all warpgroups."},
        "wgmma_pv": _COUNT,
        "scalar_fmas": _COUNT,
        "exponentials": _COUNT,
        "instructions": {**_NUMBER, "description": "Warp instructions of all warps that compute, an estimate."},
        "smem_bytes": {**_COUNT, "description": "Through shared memory; through L1 in kernels without any."},
        "l2_bytes": _COUNT,
        "tma_loads": {**_COUNT, "description": "Copies for K and V."},
    }
)
_CEILING = _object(
    {
        "chip": _TEXT,
        "clock_hz": _NUMBER,
        "peak_tflops": {**_NUMBER, "description": "Of the tensor cores, dense, 16-bit operands."},
        "bounds": _list(
            _object({"unit": _UNIT, "amount": _NUMBER, "what": _TEXT, "cycles": _NUMBER}),
            "Of one step, on one SM, at the unit's peak rate.",
        ),
        "binding": _UNIT,
        "tflops": _NUMBER,
    }
)
_PROBLEM = _object(
    {
        "shape": _object(dict.fromkeys(("batch", "seq_q", "seq_k", "heads_q", "heads_kv"), _COUNT)),
        "tiles": {**_COUNT, "description": "Tiles of queries."},
        "steps": {**_COUNT, "description": "Tiles of keys visited, over all tiles of queries."},
        "masked": _COUNT,
        "skipped": _COUNT,
        "flops": _NUMBER,
        "over_compute": {**_NUMBER, "description": "FLOPs done over those counted."},
        "hbm_bytes": {**_COUNT, "description": "q, k, v, O and LSE once each; of k1 also S and P."},
        "chips": _list(
            _object(
                {
                    "chip": _TEXT,
                    "waves": _NUMBER,
                    "balance": {**_NUMBER, "maximum": 1, "description": "How busy the SMs are on average."},
                    "tflops": _NUMBER,
                    "bounded_by": _UNIT,
                }
            )
        ),
    }
)
_MODULE = _object(
    {
        "stem": _TEXT,
        "spec_file": _TEXT,
        "spec": {"type": "object", "description": "As `fa3gen schema` describes it, defaults filled in."},
        "title": _TEXT,
        "mask": _TEXT,
        "decisions": _list(_object({"name": _TEXT, "text": _TEXT})),
        "rules": _list(
            _object(
                {
                    "rule": _TEXT,
                    "about": _TEXT,
                    "design": {"type": "boolean", "description": "About what is rendered, not about the hardware."},
                    "text": _TEXT,
                    "facts": {"type": "object", "additionalProperties": _TEXT},
                }
            ),
            "Every question that the rules answered.",
        ),
        "limits": _list(
            _object({"field": _TEXT, "value": _COUNT, "largest": _COUNT, "refused": _COUNT, "message": _TEXT}),
            "How far a field could go, all others as they are, and why no further.",
        ),
        "threads": _list(_TEXT),
        "registers": _object(
            {"computing_thread": _list(_object({"what": _TEXT, "registers": _COUNT})), "at_launch": _COUNT}
        ),
        "barriers": _ROWS,
        "named_barriers": _ROWS,
        "shared_memory": _object(
            {
                "regions": _list(
                    _object({"name": _TEXT, "offset": _COUNT, "bytes": _COUNT, "formula": _TEXT, "what": _TEXT})
                ),
                "total": _COUNT,
                "limit": _COUNT,
                "left": _COUNT,
            }
        ),
        "steps": _list(_list(_TEXT), "Who (in specialised kernels), what, how: for one tile of keys."),
        "step": _STEP,
        "query_tile": _object(dict.fromkeys(("q_bytes", "o_bytes", "tma_loads", "tma_stores"), _COUNT)),
        "occupancy": _object(
            {
                "ctas": _COUNT,
                "registers": _COUNT,
                "registers_known": {"type": "boolean", "description": "Of the compiled kernel, not expected."},
                "allowed": {"type": "object", "additionalProperties": _COUNT},
            }
        ),
        "ceilings": _list(_CEILING),
        "problems": _list(_PROBLEM),
    }
)
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Explanations of fa3gen modules",
    **_object({"format": {"const": FORMAT}, "version": {"const": VERSION}, "modules": _list(_MODULE)}),
}


def document(explanations: Sequence[Explanation]) -> dict[str, Any]:
    """The document of some explanations, in types that JSON has; `SCHEMA` describes it."""
    return {"format": FORMAT, "version": VERSION, "modules": [_module(explanation) for explanation in explanations]}


def _module(explanation: Explanation) -> dict[str, Any]:
    spec, described, found = explanation.spec, explanation.description, explanation.occupancy
    regions = [
        {"name": region.name, "offset": offset, "bytes": region.bytes, "formula": region.formula, "what": region.what}
        for offset, region in explanation.smem
    ]
    held = [{"what": what, "registers": count} for what, count in footprint.registers_per_thread(spec)]
    return {
        "stem": explanation.stem,
        "spec_file": explanation.source.as_posix(),
        "spec": spec.model_dump(mode="json"),
        "title": described.title,
        "mask": described.mask,
        "decisions": [{"name": name, "text": text} for name, text in described.decisions],
        "rules": [{**asdict(question), "facts": dict(question.facts)} for question in explanation.asked],
        "limits": [asdict(limit) for limit in explanation.limits],
        "threads": list(described.threads),
        "registers": {"computing_thread": held, "at_launch": footprint.launch_registers(spec)},
        "barriers": [list(row) for row in described.barriers],
        "named_barriers": [list(row) for row in described.named_barriers],
        "shared_memory": {
            "regions": regions,
            "total": explanation.smem_total,
            "limit": hopper.SMEM_PER_CTA,
            "left": explanation.smem_left,
        },
        "steps": [list(step) for step in described.steps],
        "step": asdict(explanation.step),
        "query_tile": asdict(explanation.query_tile),
        "occupancy": {
            "ctas": found.ctas,
            "registers": found.registers,
            "registers_known": found.registers_known,
            "allowed": dict(found.allowed),
        },
        "ceilings": [_ceiling(ceiling) for ceiling in explanation.ceilings],
        "problems": [_problem(row) for row in explanation.problems],
    }


def _ceiling(ceiling: Ceiling) -> dict[str, Any]:
    return {
        "chip": ceiling.chip.name,
        "clock_hz": ceiling.chip.clock_hz.value,
        "peak_tflops": ceiling.chip.tensor_tflops,
        "bounds": [asdict(bound) for bound in ceiling.bounds],
        "binding": ceiling.binding.unit,
        "tflops": ceiling.tflops,
    }


def _problem(row: Sequence[ProblemCeiling]) -> dict[str, Any]:
    problem = row[0].problem
    return {
        "shape": asdict(problem.shape),
        "tiles": problem.tiles,
        "steps": problem.visited,
        "masked": problem.masked,
        "skipped": problem.skipped,
        "flops": problem.flops,
        "over_compute": problem.over_compute if problem.flops else 0.0,
        "hbm_bytes": problem.hbm_bytes,
        "chips": [
            {
                "chip": cell.chip.name,
                "waves": cell.waves,
                "balance": cell.balance,
                "tflops": cell.tflops,
                "bounded_by": cell.bounded_by,
            }
            for cell in row
        ],
    }
