"""pydantic's complaints about a spec in plain words, each with the dotted path of the field it is about."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from fa3gen.spec.model import OPERATIONS, Spec

# Fields of the specs of all operations.
FIELDS: tuple[str, ...] = tuple(dict.fromkeys(name for model in OPERATIONS.values() for name in model.model_fields))

# Tag key of each tagged union, by field: {"load": "engine", ...}. All of them are fields of the spec itself. A field
# that several operations have is the same kind of union in all.
UNIONS: dict[str, str] = {
    name: info.discriminator
    for model in OPERATIONS.values()
    for name, info in model.model_fields.items()
    if isinstance(info.discriminator, str)
}

# By operation, a spec that has all the keys it needs, for who has none to begin with.
BASES = {"forward": "k4_2", "gemm": "g3", "copy": "c1", "combine": "combine", "quantize": "quantize"}

# Keys of a spec file that are no fields of the spec.
FILE_KEYS = ("summary", "extends", "matrix")


class Complaint(NamedTuple):
    """What is wrong, and with which field (keys from the top of the spec down)."""

    field: tuple[str, ...]
    message: str


def explain(error: ErrorDetails, model: type[Spec]) -> Complaint:
    """Translate one entry of `ValidationError.errors()` on a spec of this model."""
    field = _without_tags(error["loc"])
    context = error.get("ctx", {})
    value = error["input"]
    match error["type"]:
        case "missing":
            return Complaint(field, _missing(error["loc"], model))
        case "extra_forbidden":
            return Complaint(field, _unknown_key(error["loc"], model))
        case "literal_error":
            return Complaint(field, _not_one_of(value, re.findall(r"'([^']*)'", context["expected"])))
        case "union_tag_invalid":
            tag = context["discriminator"].strip("'")
            got = value[tag] if isinstance(value, dict) else context["tag"]
            return Complaint((*field, tag), _not_one_of(got, re.findall(r"'([^']*)'", context["expected_tags"])))
        case "union_tag_not_found":
            tag = context["discriminator"].strip("'")
            return Complaint(field, f"missing key '{tag}'; it must be one of {', '.join(union_tags(field[0], model))}")
        case "int_type":
            return Complaint(field, f"an integer is needed, got {described(value)}")
        case "bool_type":
            return Complaint(field, f"true or false is needed, got {described(value)}{_yaml_bool_hint(value)}")
        case "model_type" | "model_attributes_type" | "dict_type":
            return Complaint(field, f"a mapping{_mapping_hint(field, model)} is needed, got {described(value)}")
        case "greater_than" | "greater_than_equal":
            bound = f"more than {context['gt']}" if "gt" in context else f"at least {context['ge']}"
            return Complaint(field, f"{value} is too small; it must be {bound}")
        case "less_than_equal":
            return Complaint(field, f"{value} is too large; it must be at most {context['le']}")
        case _:
            return Complaint(field, error["msg"].removeprefix("Value error, "))


def described(value: Any) -> str:
    """A YAML value with its type, for a message: "the string 'no'"."""
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return f"the boolean {str(value).lower()}"
        case int():
            return f"the integer {value}"
        case float():
            return f"the number {value}"
        case str():
            return f"the string '{value}'" if len(value) <= 60 else f"a string of {len(value)} characters"
        case list():
            return "a list"
        case _:
            return "a mapping"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint, such as "; did you mean 'kv_stages'?", when `name` is close to something known; else nothing.

    Names that are almost as close as the closest one are given too.
    """
    scores = {other: difflib.SequenceMatcher(None, name, other).ratio() for other in sorted(known)}
    best = max(scores.values(), default=0.0)
    if best < 0.5:
        return ""
    close = sorted((other for other in scores if scores[other] >= best - 0.1), key=lambda other: -scores[other])
    return f"; did you mean {' or '.join(repr(other) for other in sorted(close[:3]))}?"


def union_tags(field: str, model: type[Spec]) -> list[str]:
    """The tags of the union `field` of a spec of this model, in the order of `fa3gen.spec.model`."""
    return [_tag(arm, UNIONS[field]) for arm in models_of(model.model_fields[field])]


def models_of(info: FieldInfo) -> list[type[BaseModel]]:
    """The models that a field may hold: one for a plain part of the spec, one per arm of a union."""
    candidates = get_args(info.annotation) or (info.annotation,)
    return [candidate for candidate in candidates if isinstance(candidate, type) and issubclass(candidate, BaseModel)]


def _tag(arm: type[BaseModel], key: str) -> str:
    return str(get_args(arm.model_fields[key].annotation)[0])


def _without_tags(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """pydantic puts the arm of a union into the location, ("load", "tma", "kv_stages"); a YAML path has none."""
    parts = tuple(str(part) for part in loc)
    return (parts[0], *parts[2:]) if parts and parts[0] in UNIONS and len(parts) > 1 else parts


def _enclosing_model(loc: tuple[int | str, ...], spec: type[Spec]) -> type[BaseModel]:
    """The model whose field (or unknown key) the last part of `loc` is."""
    model: type[BaseModel] = spec
    parts = [str(part) for part in loc]
    while len(parts) > 1:
        name = parts.pop(0)
        arms = models_of(model.model_fields[name])
        if model is spec and name in UNIONS:
            tag = parts.pop(0)
            arms = [arm for arm in arms if _tag(arm, UNIONS[name]) == tag]
        model = arms[0]
    return model


def _missing(loc: tuple[int | str, ...], spec: type[Spec]) -> str:
    name = str(loc[-1])
    if len(loc) == 1:
        base = next(BASES[operation] for operation, model in OPERATIONS.items() if model is spec)
        hint = _mapping_hint((name,), spec)
        what = f", a mapping{hint}" if hint else ""
        return f"missing required key '{name}'{what}; write it, or begin with `extends: {base}`"
    info = _enclosing_model(loc, spec).model_fields[name]
    choices = [str(choice) for choice in get_args(info.annotation) if isinstance(choice, str)]
    hint = f"one of {', '.join(choices)}" if choices else (info.description or "").rstrip(".")
    return f"missing required key '{name}'" + (f" ({hint})" if hint else "")


def _unknown_key(loc: tuple[int | str, ...], spec: type[Spec]) -> str:
    name = str(loc[-1])
    model = _enclosing_model(loc, spec)
    known = [*(FILE_KEYS if model is spec else ()), *model.model_fields]
    owners = _arms_with(str(loc[0]), name, spec) if len(loc) == 3 and loc[0] in UNIONS else []
    if owners:
        tag = UNIONS[str(loc[0])]
        return f"unknown key '{name}' for {tag}: {loc[1]}; it belongs to {tag}: {' and '.join(owners)}"
    return f"unknown key '{name}'{nearest(name, known) or '; known here: ' + ', '.join(known)}"


def _arms_with(union: str, key: str, spec: type[Spec]) -> list[str]:
    return [_tag(arm, UNIONS[union]) for arm in models_of(spec.model_fields[union]) if key in arm.model_fields]


def _not_one_of(value: Any, choices: list[str]) -> str:
    hint = nearest(value, choices) if isinstance(value, str) else ""
    return f"{described(value)} is none of {', '.join(choices)}{hint}"


def _yaml_bool_hint(value: Any) -> str:
    wordy = isinstance(value, str) and value.lower() in {"yes", "no", "on", "off", "y", "n", "true", "false"}
    return " (YAML 1.2 has no other booleans, and no quoted ones)" if wordy else ""


def _mapping_hint(field: tuple[str, ...], spec: type[Spec]) -> str:
    if not field:
        return ""
    if field[0] in UNIONS and len(field) == 1:
        return f" such as {{{UNIONS[field[0]]}: {union_tags(field[0], spec)[0]}, ...}}"
    models = models_of(_enclosing_model(field, spec).model_fields[field[-1]]) if len(field) == 1 else []
    return f" with the keys {', '.join(models[0].model_fields)}" if models else ""
