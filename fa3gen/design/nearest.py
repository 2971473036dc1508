"""The nearest legal spec to one that is refused: which fields to change, all at once.

Each rule names a way out of its own problem. A way out can lead to another rule, and with several problems nobody sees
which ways go together. Here candidates for the fields that rules object to are tried, in the order of what they cost,
until `check` finds nothing. What is computed (problem and mask) costs more to change than how.
"""

from __future__ import annotations

import copy
import functools
import heapq
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast, get_args

from pydantic import ValidationError

from fa3gen.design.rules import Violation, check
from fa3gen.hardware import hopper
from fa3gen.spec.model import Scheduler, Spec, Swizzle

Changes = tuple[tuple[str, Any], ...]  # dotted path and value, None: leave the field out
SpecT = TypeVar("SpecT", bound=Spec)

MOST_SPECS = 5000  # looked at before the search gives up: about a second
COST_OF_PROBLEM = 4  # of a field that says what is computed; others cost 1
HASTE = 2  # weight of each problem left: more finds an answer sooner, and not always the cheapest
NEAREST = 6  # numbers around the present one that are tried for a field, beside all powers of two

# What else may be changed where a rule objects to a field.
_ALSO: Mapping[str, tuple[str, ...]] = {
    "tile": ("tile.warpgroups", "tile.threads"),
    "tile.q": ("tile.warpgroups", "tile.threads"),
    "tile.kv": ("schedule", "tile.threads", "load.kv_stages", "tile.warpgroups", "tile.q"),
    "tile.warpgroups": ("tile.q", "schedule", "tile.kv", "tile.threads", "qk", "pv"),
    "tile.threads": ("tile.q", "tile.kv", "tile.warpgroups", "problem.head_dim", "qk", "pv"),
    "tile.pack_heads": ("schedule", "scheduler"),
    "problem.head_dim": ("pv", "smem.q", "smem.k", "smem.v", "outputs.o"),
    "problem.head_dim_v": ("schedule", "outputs.o"),
    "softmax.sink": ("schedule",),
    "split.keys": ("tile.kv",),
    "softmax.softcap": ("schedule",),
    "load.kv_stages": ("tile.kv",),
    "load.engine": ("load", "qk", "pv"),
    "load.q_stages": ("load.kv_stages",),
    "qk.engine": ("qk", "pv"),
    "handoff.through": ("handoff", "pv.a.source", "qk", "pv"),
    "smem": ("handoff",),
    "pv.a.source": ("handoff",),
    "schedule.kind": ("schedule",),
    "scheduler": ("schedule",),
    "mask": ("handoff", "pv"),
}
_NUMBERS: Mapping[str, Sequence[int]] = {
    "tile.q": sorted({*range(16, 257, 16)}),
    "tile.kv": range(16, 257, 16),
    "tile.threads": range(hopper.WARP, hopper.THREADS_PER_CTA + 1, hopper.WARP),
    "tile.warpgroups": range(1, 5),
    "tile.pack_heads": range(1, 65),
    "problem.head_dim": range(16, 257, 16),
    "problem.head_dim_v": range(16, 257, 16),
    "load.kv_stages": range(1, 9),
    "load.q_stages": (1, 2),
    "softmax.exp_before_wait": range(1, 65),
}
_TMA = {"engine": "tma", "kv_stages": 2, "barrier": "separate"}
_WGMMA = {"engine": "wgmma", "a": {"source": "smem", "major": "k"}}
_VALUES: Mapping[str, Sequence[Any]] = {
    "load": (_TMA, {"engine": "sync"}, {"engine": "cp_async", "kv_stages": 2}),
    "load.barrier": ("separate", "shared"),
    "smem": ({"q": "128B", "k": "128B", "v": "128B"}, None),
    **{f"smem.{tensor}": tuple(reversed(get_args(Swizzle))) for tensor in ("q", "k", "v", "vt")},
    "handoff.swizzle": tuple(reversed(get_args(Swizzle))),
    "qk": ({**_WGMMA, "b": {"source": "smem", "major": "k"}}, {"engine": "scalar"}),
    "pv": ({**_WGMMA, "b": {"source": "smem", "major": "mn"}}, {"engine": "scalar"}),
    **{f"{product}.{operand}.source": ("smem", "registers") for product in ("qk", "pv") for operand in "ab"},
    **{f"{product}.{operand}.major": ("k", "mn") for product in ("qk", "pv") for operand in "ab"},
    "handoff": ({"through": "registers"}, {"through": "smem_16bit", "swizzle": "128B"}, {"through": "smem_f32"}),
    "schedule": (
        *(
            {"kind": kind, "overlap": overlap}
            for overlap in (True, False)
            for kind in ("ping_pong", "warp_specialized")
        ),
        {"kind": "cooperative"},
    ),
    "scheduler": get_args(Scheduler),
    "order": ("by_sequence",),
    "problem.v_keys": ("in_order",),
    "mask": ({"kind": "causal"}, {"kind": "none"}),
    "softmax.rescale_above": (None,),
    "softmax.row_max": ("online",),
    "softmax.exp_before_wait": (None,),
    "softmax.mask_end": ("always",),
    "softmax.restart_every": (None,),
    "softmax.sink": (False,),
    "softmax.softcap": (False,),
    "problem.head_dim_v": (None,),
    "problem.scales": ("head",),
    "tile.pack_heads": (1,),
    "tile.kv_from": ("first_key", "window"),
    "tile.threads": (None, hopper.WARPGROUP),
    "tile.warpgroups": (None, 2),
    "outputs.lse": (True,),
    "outputs.o": ("over_q", "own_buffer", "direct"),
}


def nearest_legal(
    spec: SpecT, *, keeps: Callable[[SpecT], bool] = lambda changed: True, most: int | None = None
) -> Changes | None:
    """Changes that make a refused spec legal, cheap if not the cheapest; None when the search gave up.

    `keeps`: whether a spec is still what was asked for. `most`: specs to look at, instead of MOST_SPECS.
    """
    fields = spec.model_dump(exclude_none=True)
    order = itertools.count()  # of equals, the one found first
    waiting: list[tuple[float, int, int, Changes, list[Violation]]] = [
        (0.0, next(order), 0, (), check(with_changes(spec, ())))
    ]
    seen: set[str] = set()
    while waiting and len(seen) < (most or MOST_SPECS):
        _, _, cost, changes, violations = heapq.heappop(waiting)
        if not violations:
            return changes
        taken = {path for path, _ in changes}
        for path, value in _candidates(fields, dict.fromkeys(violation.field for violation in violations), taken):
            more = tuple(sorted((*changes, (path, value)), key=lambda change: change[0]))
            if repr(more) in seen:
                continue
            seen.add(repr(more))
            try:
                tried = with_changes(spec, more)
            except ValidationError:
                continue
            if not keeps(tried):
                continue
            costs = cost + (COST_OF_PROBLEM if path.partition(".")[0] in ("problem", "mask") else 1)
            left = check(tried)
            heapq.heappush(waiting, (costs + HASTE * len(left), next(order), costs, more, left))
    return None


def with_changes(spec: SpecT, changes: Changes) -> SpecT:
    """The spec with the changes. Raises ValidationError where a field has no such value or no such place."""
    fields = spec.model_dump(exclude_none=True)
    for path, value in changes:
        *parents, name = path.split(".")
        place: Any = fields
        for parent in parents:
            place = place.setdefault(parent, {})
        if value is None:
            place.pop(name, None)
        else:
            place[name] = copy.deepcopy(value)
    return cast(SpecT, type(spec).model_validate(fields))


def described(changes: Changes) -> str:
    """The changes in words: `load.q_stages: 1, outputs.o: over_q, scheduler: single_tile`."""
    return ", ".join(f"{path}: {yaml_text(value)}" for path, value in changes)


def yaml_text(value: Any) -> str:
    """A value as YAML has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {yaml_text(part)}" for name, part in value.items()) + "}"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _candidates(fields: Mapping[str, Any], objected: Mapping[str, None], taken: set[str]) -> Iterator[tuple[str, Any]]:
    """What may be tried for the fields that rules object to, and for those that hang together with them."""
    for path in dict.fromkeys(path for field in objected for path in (field, *_ALSO.get(field, ()))):
        if path in taken:
            continue
        now = _value(fields, path)
        for value in _VALUES.get(path, ()):
            if value != now:
                yield path, value
        if numbers := [number for number in _NUMBERS.get(path, ()) if number != now and now is not None]:
            numbers.sort(key=functools.partial(_far, max(1, now)))
            round_ones = [number for number in numbers[NEAREST:] if number.bit_count() == 1]
            yield from ((path, number) for number in (*numbers[:NEAREST], *round_ones))


def _far(number: int, other: int) -> float:
    """How far apart two numbers are, as a factor."""
    return abs(math.log(other / number))


def _value(fields: Mapping[str, Any], path: str) -> Any:
    value: Any = fields
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
