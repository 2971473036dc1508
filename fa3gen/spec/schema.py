"""The JSON Schema of a spec file, for editors that complete and check YAML.

It is looser than fa3gen itself in one way: no field of the spec is required, because a base (`extends`) or an axis of
the matrix may supply it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa3gen.spec.complaints import UNIONS
from fa3gen.spec.model import OPERATIONS
from fa3gen.spec.specfile import SUMMARY_MAX

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def file_schema() -> Schema:
    """The schema of a spec file (draft 2020-12), as plain JSON values."""
    specs = [model.model_json_schema() for model in OPERATIONS.values()]
    definitions = {name: _partial(schema) for spec in specs for name, schema in spec["$defs"].items()}
    of_name: dict[str, list[Schema]] = {}
    for spec in specs:
        for name, schema in spec["properties"].items():
            of_name.setdefault(name, []).append(_field(name, schema))
    fields = {name: _of_any(schemas) for name, schemas in of_name.items()}
    summary = {
        "type": "string",
        "pattern": r"^\s*\S.*\s*$",
        "maxLength": SUMMARY_MAX,
        "description": "One line that says what the kernel is.",
    }
    extends = {"type": "string", "minLength": 1, "description": "Stem or relative path of the base spec."}
    return {
        "$schema": DIALECT,
        "title": "fa3gen spec file",
        "description": "A kernel for fa3gen to generate: attention, unless `operation` says another.",
        "type": "object",
        "properties": {"summary": summary, "extends": extends, **fields, "matrix": _matrix(fields, definitions)},
        "required": ["summary"],
        "additionalProperties": False,
        "$defs": definitions,
    }


def _of_any(schemas: Sequence[Schema]) -> Schema:
    """The schema of a field as the operations have it: one, or any of theirs."""
    if all(schema == schemas[0] for schema in schemas):
        return schemas[0]
    different: list[Schema] = []
    for schema in schemas:
        different += [arm for arm in schema.get("anyOf", [schema]) if arm not in different]
    return {"anyOf": different}


def _field(name: str, schema: Schema) -> Schema:
    """A field of the spec, taking what YAML may say in its place."""
    arms = schema.get("oneOf")
    if name not in UNIONS or arms is None:
        return schema
    # Without required tags a mapping may fit several arms, {kv_stages: 3} for one: anyOf, and no discriminator.
    kept = {key: value for key, value in schema.items() if key not in ("oneOf", "discriminator", "default")}
    shorthand = [{"enum": ["none", "causal"]}] if name == "mask" else []
    return {**kept, "anyOf": [*shorthand, *arms]}


def _partial(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key != "required"}


def _matrix(fields: dict[str, Schema], definitions: dict[str, Schema]) -> Schema:
    axes: dict[str, list[Schema]] = {}
    for name, schema in fields.items():
        _collect(name, schema, definitions, axes)
    return {
        "type": "object",
        "description": "Field path -> values; one module is generated for each combination.",
        "properties": {path: _axis(schemas, fields) for path, schemas in axes.items()},
        "additionalProperties": False,
    }


def _collect(path: str, schema: Schema, definitions: dict[str, Schema], axes: dict[str, list[Schema]]) -> None:
    """Gather the schemas that each field path may have, over the arms of unions."""
    if schema not in axes.setdefault(path, []):
        axes[path].append(schema)
    for arm in (schema, *schema.get("anyOf", ())):
        target = definitions[arm["$ref"].rpartition("/")[2]] if "$ref" in arm else {}
        for name, inner in target.get("properties", {}).items():
            _collect(f"{path}.{name}", inner, definitions, axes)


def _axis(schemas: list[Schema], fields: dict[str, Schema]) -> Schema:
    values = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    company = {"type": "object", "minProperties": 1, "properties": fields, "additionalProperties": False}
    accompanied = {
        "type": "object",
        "properties": {"value": values, "with": company},
        "required": ["value", "with"],
        "additionalProperties": False,
    }
    return {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"anyOf": [*_arms(values), accompanied]}}


def _arms(schema: Schema) -> list[Schema]:
    return list(schema["anyOf"]) if set(schema) == {"anyOf"} else [schema]
