"""Turns Gemini's schemas, OpenAPI's of version 3.0 with types in capitals, into JSON schemas."""

from __future__ import annotations

from typing import Any

_COUNTS = frozenset(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"))
"""Keywords of int64, which proto JSON writes as text."""
_DROPPED = frozenset(("nullable", "propertyOrdering", "property_ordering", "example"))
_SNAKE = {
    "any_of": "anyOf",
    "min_items": "minItems",
    "max_items": "maxItems",
    "min_length": "minLength",
    "max_length": "maxLength",
    "min_properties": "minProperties",
    "max_properties": "maxProperties",
}


def json_schema(schema: Any) -> Any:
    """Return `schema` as JSON Schema. What is JSON Schema already stays as it is."""
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for spelled, value in dict[str, Any](schema).items():
        key: str = _SNAKE.get(spelled, spelled)
        if key in _DROPPED:
            continue
        if key == "properties" and isinstance(value, dict):
            value = {name: json_schema(inner) for name, inner in value.items()}
        elif key in ("items", "additionalProperties", "not"):
            value = json_schema(value)
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            value = [json_schema(inner) for inner in value]
        elif key == "type" and isinstance(value, str):
            if value == "TYPE_UNSPECIFIED":
                continue
            value = value.lower()
        elif key in _COUNTS and isinstance(value, str) and value.isdigit() and len(value) < 19:
            value = int(value)
        made[key] = value
    return _nullable(made) if schema.get("nullable") is True else made


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    about = {key: schema[key] for key in ("title", "description", "default") if key in schema}
    inner = {key: value for key, value in schema.items() if key not in about}
    return {**about, "anyOf": [inner, {"type": "null"}]}
