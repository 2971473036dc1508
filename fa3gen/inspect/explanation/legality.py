"""Why a spec is legal: the rules that it was held against, with their facts, and the nearest specs that they refuse.

Nothing is decided here. `fa3gen.design.rules.check` runs once more in a private copy of that module in which every rule
notes what it was asked; limits are found by asking it about other specs.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from fa3gen.design import rules
from fa3gen.hardware import hopper
from fa3gen.spec.model import CpAsyncLoad, GlobalHandoff, Spec, TmaLoad, WgmmaProduct

DESIGN = "Design rule:"
MOST_STAGES = 16  # of K and V that are asked about
_FIRST_SENTENCE = re.compile(r"(.+?)\.(?:\s|$)")

# Rule -> the decision that it is about, as the header names them. "product" stands for one of the two, which the facts
# tell; "structure" for what hardly needs saying.
TOPICS = {
    "wgmma_rows": "tile",
    "wgmma_columns": "product",
    "wgmma_depth": "product",
    "a_from_registers": "structure",
    "b_from_smem": "structure",
    "q_from_smem": "S = Q K^T",
    "input_major": "product",
    "p_major": "O = P V",
    "swizzle_span": "layouts",
    "tma_box": "loads",
    "tma_stride": "loads",
    "kv_stages": "structure",
    "q_stages": "loads",
    "shared_memory": "shared memory",
    "registers_per_thread": "registers",
    "registers_per_sm": "registers",
    "scalar_threads": "tile",
    "scalar_grid": "tile",
    "scalar_vector": "O = P V",
    "copy_rows": "loads",
    "naive_grid": "tile",
    "scattered_scores": "P",
    "window_product": "kv order",
    "optional_lse": "output",
    "wgmma_threads": "structure",
    "thread_unit": "structure",
    "engine_pair": "O = P V",
    "wgmma_load": "loads",
    "handoff_engines": "P",
    "global_handoff_load": "loads",
    "smem_section": "layouts",
    "schedule_engines": "schedule",
    "schedule_handoff": "P",
    "schedule_barrier": "loads",
    "schedule_v_dim": "tile",
    "packed_rows": "structure",
    "schedule_pack": "tile",
    "output_over_q": "output",
    "output_columns": "output",
    "consumer_warpgroups": "structure",
    "ping_pong_partners": "structure",
    "consumer_registers": "registers",
    "scheduler_schedule": "q order",
    "scheduler_mask": "q order",
    "scheduler_lse": "output",
    "scheduler_pack": "tile",
    "scheduler_output": "output",
    "scheduler_rescale": "softmax",
    "exp_before_wait": "softmax",
    "direct_columns": "output",
    "output_dtype": "output",
    "float32_output": "output",
}


@dataclass(frozen=True)
class Asked:
    """One question to a rule that found nothing to refuse.

    `about` is a decision of the header, "shared memory", "registers" or "structure", `text` the rule's own
    documentation (with the source), `facts` what it was asked.
    """

    rule: str
    about: str
    design: bool
    text: str
    facts: tuple[tuple[str, str], ...]

    @property
    def statement(self) -> str:
        """The first sentence of the rule's documentation, without its label and full stop."""
        text = self.text.removeprefix(DESIGN).strip()
        found = _FIRST_SENTENCE.match(text)
        return found.group(1) if found else text


@dataclass(frozen=True)
class Limit:
    """How far one field could go: its value, the largest legal one tried, and the next one with the rule's words."""

    field: str
    value: int
    largest: int
    refused: int
    message: str


def rule_names() -> list[str]:
    """Every rule of `fa3gen.design.rules`: its public functions that return violations."""
    return [name for name, function in _functions(rules) if _is_rule(name, function)]


def questions(spec: Spec) -> tuple[Asked, ...]:
    """Everything that the rules were asked about this spec, in their order, each question once."""
    module, noted = _recording_rules()
    noted.clear()
    module.check(spec)
    return tuple(dict.fromkeys(noted))


def _functions(module: ModuleType) -> list[tuple[str, Callable[..., Any]]]:
    return [(name, value) for name, value in vars(module).items() if inspect.isfunction(value)]


def _is_rule(name: str, function: Callable[..., Any]) -> bool:
    returns = str(function.__annotations__.get("return", ""))
    return not name.startswith("_") and name != "check" and "Violation" in returns


@cache
def _recording_rules() -> tuple[ModuleType, list[Asked]]:
    """A copy of `fa3gen.design.rules` that nobody else has, and the list to which its rules add what they are asked."""
    found = importlib.util.find_spec("fa3gen.design.rules")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    noted: list[Asked] = []
    for name, function in _functions(module):
        if _is_rule(name, function):
            setattr(module, name, _noting(name, function, noted))
    return module, noted


def _noting(name: str, rule: Callable[..., Any], noted: list[Asked]) -> Callable[..., Any]:
    signature, text = inspect.signature(rule), " ".join((rule.__doc__ or "").split())

    def ask(*arguments: Any, **keywords: Any) -> Any:
        answer = rule(*arguments, **keywords)
        if not answer:
            given = signature.bind(*arguments, **keywords).arguments
            facts = tuple((key, _fact(value)) for key, value in given.items())
            noted.append(Asked(name, _about(name, given), text.startswith(DESIGN), text, facts))
        return answer

    return ask


def _fact(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " + ".join(f"{name} {count}" for name, count in value) or "nothing"
    return str(value)


def _about(rule: str, given: dict[str, Any]) -> str:
    topic = TOPICS.get(rule, "")
    if topic != "product":
        return topic
    which = str(given.get("product") or given.get("field", "")).lower()
    return "S = Q K^T" if which.startswith("qk") else "O = P V"


# -- limits


def limits(spec: Spec) -> tuple[Limit, ...]:
    """How far stages, keys per step and query rows could go, and which rule says so."""
    found = [_limit(*candidate) for candidate in _candidates(spec)]
    return tuple(limit for limit in found if limit is not None)


def _candidates(spec: Spec) -> Iterator[tuple[str, int, list[int], Callable[[int], Spec]]]:
    """Field, value, larger values to try, and the spec with such a value."""
    if isinstance(spec.handoff, GlobalHandoff):
        return
    if isinstance(spec.load, CpAsyncLoad | TmaLoad):
        stages = spec.load.kv_stages
        tried = list(range(stages + 1, MOST_STAGES + 1))
        yield "load.kv_stages", stages, tried, lambda count: _with(spec, "load", kv_stages=count)
    wgmma = isinstance(spec.pv, WgmmaProduct)
    step = spec.element.wgmma_k if wgmma else spec.tile.kv
    wider = list(range(spec.tile.kv + step, 2 * hopper.WGMMA_N_MAX + 1, step))
    yield "tile.kv", spec.tile.kv, wider, lambda kv: _with(spec, "tile", kv=kv)
    if wgmma:
        groups = spec.tile.warpgroups or 1
        more = list(range(groups + 1, hopper.THREADS_PER_CTA // hopper.WARPGROUP + 1))
        yield (
            "tile.warpgroups",
            groups,
            more,
            lambda count: _with(spec, "tile", warpgroups=count, q=count * hopper.WGMMA_M),
        )


def _limit(field: str, value: int, tried: list[int], changed: Callable[[int], Spec]) -> Limit | None:
    largest = value
    for candidate in tried:
        violations = rules.check(changed(candidate))
        if violations:
            return Limit(field, value, largest, candidate, violations[0].message)
        largest = candidate
    return None


def _with(spec: Spec, part: str, **changes: int) -> Spec:
    return spec.model_copy(update={part: getattr(spec, part).model_copy(update=changes)})
