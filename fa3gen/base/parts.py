"""What is kept as JSON and read again: base of its parts, its numbers, and what to say of a file that is not one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

DIGITS = 4  # significant digits of a number in a record: more would only be noise in a diff


class Part(BaseModel):
    """Base of all parts of a record: closed against unknown keys, so that a record says what it seems to say."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def rounded(value: Any) -> Any:
    """The same value with DIGITS significant digits in every float, through mappings, lists and tuples."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def first_problem(error: ValidationError) -> str:
    """The first thing that does not fit, with its place: `cases.0.name: Field required`."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "file"
    return f"{place}: {first['msg']}"
