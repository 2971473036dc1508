"""What is kept as JSON and read again: base of its parts, its numbers, and what to say of a file that is not one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, ValidationError, model_serializer

from fa3gen.base.errors import UserError

DIGITS = 4  # significant digits of a number in a record: more would only be noise in a diff


class Part(BaseModel):
    """Base of all parts of a record: closed against unknown keys, so that a record says what it seems to say."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GrownPart(Part):
    """A part with fields that came later: those are written only where they say something, as older records do not."""

    LATER: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _without_what_says_nothing(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        return {name: value for name, value in fields.items() if value or name not in self.LATER}


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


_Kind = TypeVar("_Kind", bound=Part)


@functools.cache  # whatever their number: where one pass reads more than are kept, the next finds none of them
def _parsed(kind: type[Part], text: str) -> Part:
    """What a text holds. Pages read every record several times; parts are frozen, so that one is as good as another."""
    return kind.model_validate_json(text)


def read_file(kind: type[_Kind], path: Path, what: str, way_out: str) -> _Kind | None:
    """What a file holds; None when there is no file. UserError with the way out when it is not `what`."""
    if not path.exists():
        return None
    try:
        found = _parsed(kind, path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise UserError(f"{path} is not {what} ({first_problem(error)}); {way_out}") from error
    assert isinstance(found, kind)
    return found
