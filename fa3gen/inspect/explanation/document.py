"""Explanations as one JSON document, and its schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, get_args

from fa3gen.base import json_shapes
from fa3gen.base.json_shapes import COUNT, NUMBER, TEXT, Shape, listed, nullable, record
from fa3gen.design import splits
from fa3gen.design.ceiling import Ceiling, ProblemCeiling, Unit
from fa3gen.design.rules import Answer, Kind
from fa3gen.hardware import hopper
from fa3gen.inspect.explanation.facts import AttentionWork, Explanation
from fa3gen.spec.model import Forward

FORMAT = "fa3gen explain"
VERSION = 4

_UNIT: Shape = {"enum": list(get_args(Unit))}
_KIND: Shape = {
    "enum": [kind.value for kind in Kind],
    "description": "Who says so: the chip, the generator (no template for it) or taste (a warning).",
}

_ROWS = listed(listed(TEXT), "Rows of cells; the first row names the columns.")
_STEP = record(
    {
        "flops": COUNT,
        "tensor_flops": COUNT,
        "wgmma_qk": {**COUNT, "description": "Instructions of all warpgroups."},
        "wgmma_pv": COUNT,
        "scalar_fmas": COUNT,
        "exponentials": COUNT,
        "instructions": {**NUMBER, "description": "Warp instructions of all warps that compute, an estimate."},
        "smem_bytes": {**COUNT, "description": "Through shared memory; through L1 in kernels without any."},
        "l2_bytes": COUNT,
        "tma_loads": {**COUNT, "description": "Copies for K and V."},
    }
)
_CEILING = record(
    {
        "chip": TEXT,
        "clock_hz": NUMBER,
        "peak_tflops": {**NUMBER, "description": "Of the tensor cores, dense, for operands of this size."},
        "bounds": listed(
            record({"unit": _UNIT, "amount": NUMBER, "what": TEXT, "cycles": NUMBER}),
            "Of one step, on one SM, at the unit's peak rate.",
        ),
        "binding": _UNIT,
        "tflops": NUMBER,
    }
)
_PROBLEM = record(
    {
        "shape": record(
            {**dict.fromkeys(("batch", "seq_q", "seq_k", "heads_q", "heads_kv"), COUNT), "window": listed(NUMBER)},
            optional=("window",),
        ),
        "tiles": {**COUNT, "description": "Tiles of queries."},
        "steps": {**COUNT, "description": "Tiles of keys visited, over all tiles of queries."},
        "masked": COUNT,
        "skipped": COUNT,
        "flops": NUMBER,
        "over_compute": {**NUMBER, "description": "FLOPs done over those counted."},
        "hbm_bytes": {**COUNT, "description": "q, k, v, O and LSE once each; of k1 also S and P."},
        "chips": listed(
            record(
                {
                    "chip": TEXT,
                    "waves": NUMBER,
                    "balance": {**NUMBER, "maximum": 1, "description": "How busy the SMs are on average."},
                    "tflops": NUMBER,
                    "bounded_by": _UNIT,
                    "parts": {**TEXT, "description": "In how many parts keys come, and why."},
                }
            )
        ),
    }
)
_WORK = {
    **record(
        {
            "step": _STEP,
            "query_tile": record(dict.fromkeys(("q_bytes", "o_bytes", "tma_loads", "tma_stores"), COUNT)),
            "ceilings": listed(_CEILING),
            "problems": listed(_PROBLEM),
        }
    ),
    "description": "Of attention; null for other operations.",
}

_MODULE = record(
    {
        "stem": TEXT,
        "spec_file": TEXT,
        "fields_from": {
            "type": "object",
            "additionalProperties": listed(TEXT),
            "description": "Forward file, this one or one that it extends -> the fields that come from it.",
        },
        "spec": {"type": "object", "description": "As `fa3gen schema` describes it, defaults filled in."},
        "title": TEXT,
        "sentence": TEXT,
        "decisions": listed(record({"name": TEXT, "text": TEXT})),
        "rules": listed(
            record(
                {
                    "rule": TEXT,
                    "about": TEXT,
                    "kind": _KIND,
                    "text": TEXT,
                    "facts": {"type": "object", "additionalProperties": TEXT},
                    "field": {
                        "type": ["string", "null"],
                        "description": "Where a rule of taste warns: what to change.",
                    },
                    "warning": {"type": ["string", "null"]},
                }
            ),
            "Every question that the rules answered.",
        ),
        "limits": listed(
            record({"field": TEXT, "value": COUNT, "largest": COUNT, "refused": COUNT, "kind": _KIND, "message": TEXT}),
            "How far a field could go, all others as they are, and why no further.",
        ),
        "threads": listed(TEXT),
        "registers": record(
            {"computing_thread": listed(record({"what": TEXT, "registers": COUNT})), "at_launch": COUNT}
        ),
        "barriers": _ROWS,
        "named_barriers": _ROWS,
        "shared_memory": record(
            {
                "regions": listed(
                    record({"name": TEXT, "offset": COUNT, "bytes": COUNT, "formula": TEXT, "what": TEXT})
                ),
                "total": COUNT,
                "limit": COUNT,
                "left": COUNT,
            }
        ),
        "steps": listed(listed(TEXT), "Where in the program, who, what, and how or why."),
        "occupancy": record(
            {
                "ctas": COUNT,
                "registers": COUNT,
                "registers_known": {"type": "boolean", "description": "Of the compiled kernel, not expected."},
                "allowed": {"type": "object", "additionalProperties": COUNT},
            }
        ),
        "work": nullable(_WORK),
    }
)
SCHEMA = json_shapes.document("Explanations of fa3gen modules", FORMAT, VERSION, _MODULE)


def document(explanations: Sequence[Explanation]) -> dict[str, Any]:
    """The document of some explanations, in types that JSON has; `SCHEMA` describes it."""
    return {"format": FORMAT, "version": VERSION, "modules": [_module(explanation) for explanation in explanations]}


def _module(explanation: Explanation) -> dict[str, Any]:
    spec, described, found = explanation.spec, explanation.description, explanation.occupancy
    regions = [
        {"name": region.name, "offset": offset, "bytes": region.bytes, "formula": region.formula, "what": region.what}
        for offset, region in explanation.smem
    ]
    at_launch = explanation.cta.launch_registers or hopper.registers_at_launch(explanation.cta.threads)
    held = [{"what": what, "registers": count} for what, count in explanation.cta.held]
    return {
        "stem": explanation.stem,
        "spec_file": explanation.source.as_posix(),
        "fields_from": {file: list(fields) for file, fields in explanation.fields_from.items()},
        "spec": spec.model_dump(mode="json"),
        "title": described.title,
        "sentence": described.sentence,
        "decisions": [{"name": name, "text": text} for name, text in described.decisions],
        "rules": [_rule(answer) for answer in explanation.asked],
        "limits": [asdict(limit) for limit in explanation.limits],
        "threads": list(described.threads),
        "registers": {"computing_thread": held, "at_launch": at_launch},
        "barriers": [list(row) for row in described.barriers],
        "named_barriers": [list(row) for row in described.named_barriers],
        "shared_memory": {
            "regions": regions,
            "total": explanation.smem_total,
            "limit": hopper.SMEM_PER_CTA,
            "left": explanation.smem_left,
        },
        "steps": [list(step) for step in described.steps],
        "occupancy": {
            "ctas": found.ctas,
            "registers": found.registers,
            "registers_known": found.registers_known,
            "allowed": dict(found.allowed),
        },
        "work": None if explanation.work is None else _work(explanation.work),
    }


def _work(work: AttentionWork) -> dict[str, Any]:
    return {
        "step": asdict(work.step),
        "query_tile": asdict(work.query_tile),
        "ceilings": [_ceiling(ceiling, work.spec) for ceiling in work.ceilings],
        "problems": [_problem(row) for row in work.problems],
    }


def _rule(answer: Answer) -> dict[str, Any]:
    field, warning = answer.violation or (None, None)
    return {
        "rule": answer.rule.name,
        "about": answer.about,
        "kind": answer.rule.kind.value,
        "text": answer.rule.text,
        "facts": dict(answer.facts),
        "field": field,
        "warning": warning,
    }


def _ceiling(ceiling: Ceiling, spec: Forward) -> dict[str, Any]:
    return {
        "chip": ceiling.chip.name,
        "clock_hz": ceiling.chip.clock_hz.value,
        "peak_tflops": ceiling.chip.tensor_tflops(spec.element.bytes),
        "bounds": [asdict(bound) for bound in ceiling.bounds],
        "binding": ceiling.binding.unit,
        "tflops": ceiling.tflops,
    }


def _problem(row: Sequence[ProblemCeiling]) -> dict[str, Any]:
    problem = row[0].problem
    return {
        "shape": {name: value for name, value in asdict(problem.shape).items() if value is not None},
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
                "parts": splits.told(problem.spec, problem.shape, cell.chip.sms, problem.num_splits),
            }
            for cell in row
        ],
    }
