"""Small pieces that the JSON schemas of the commands are made of (JSON Schema, draft 2020-12)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

Shape = dict[str, Any]

COUNT: Shape = {"type": "integer", "minimum": 0}
NUMBER: Shape = {"type": "number", "minimum": 0}
TEXT: Shape = {"type": "string"}


def record(properties: Shape, optional: Collection[str] = ()) -> Shape:
    """An object that has these properties, all of them but `optional` ones, and no others."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def listed(items: Shape, about: str = "") -> Shape:
    """A list of such items."""
    return {"type": "array", "items": items, **({"description": about} if about else {})}


def nullable(shape: Shape) -> Shape:
    """The shape, or null."""
    return {**shape, "type": [shape["type"], "null"]}


def document(title: str, form: str, version: int, module: Shape) -> Shape:
    """The schema of a document with a name and a version of its format, and one entry for each module."""
    properties = {"format": {"const": form}, "version": {"const": version}, "modules": listed(module)}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, **record(properties)}
