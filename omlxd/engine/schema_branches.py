"""A JSON schema as alternatives of one type each, references followed and keywords judged.

`branches` is what a generator of grammars needs: each branch has a `type`, or an `enum` of certain
values, or neither (anything). What can't be enforced by writing along is told by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
MAX_BRANCHES = 200
_MAX_STEPS = 32

_UNENFORCEABLE = (
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
    *("propertyNames", "patternProperties", "contains", "minContains", "maxContains"),
    *("additionalItems", "$dynamicRef", "$recursiveRef"),
)
_OF_TYPE: dict[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "format", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_LOOSE = ("format", "pattern", "minProperties", "maxProperties", "uniqueItems", *_UNENFORCEABLE)
"""Passed over where a schema need not be enforced."""


class Unenforceable(ValueError):
    """What of a schema can't be enforced; the text names it."""


def is_any(schema: Any) -> bool:
    """Whether `schema` says nothing of a value's type."""
    return schema is True or (isinstance(schema, dict) and not _asserts(schema))


def resolved(schema: Any, root: dict[str, Any]) -> Any:
    """What a `$ref` into `root` names; the schema itself if it has none. None: it leads nowhere."""
    for _ in range(8):  # they may lead to others, and in a circle
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(ref, str):
            return schema
        if ref == "#":
            found: Any = root
        elif ref.startswith("#/"):
            found = root
            for step in ref[2:].split("/"):
                step = step.replace("~1", "/").replace("~0", "~")
                found = found.get(step) if isinstance(found, dict) else None
        else:
            return None
        schema = found
    return None


def branches(schema: Any, root: dict[str, Any], strict: bool) -> list[dict[str, Any]]:
    """Alternatives that together are `schema`, or part of what it allows.

    strict  raises Unenforceable for what can't be enforced; else that is passed over
    """
    try:
        found = list(islice(_split(schema, root, strict, _MAX_STEPS), MAX_BRANCHES + 1))
    except (TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
        raise Unenforceable("what is no JSON schema") from error
    if len(found) > MAX_BRANCHES:
        raise Unenforceable("more alternatives than can be told apart")
    return found


def _split(schema: Any, root: dict[str, Any], strict: bool, steps: int) -> Iterator[dict[str, Any]]:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise Unenforceable("a schema that allows nothing" if schema is False else "what is no schema")
    if not steps:
        raise Unenforceable("a schema that leads to itself")
    if "$ref" in schema:
        target = resolved({"$ref": schema["$ref"]}, root)
        if target is None:
            raise Unenforceable(f"$ref {schema['$ref']!r}, which leads nowhere")
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        schema = _merged(target, rest) if _asserts(rest) else target
        yield from _split(schema, root, strict, steps - 1)
        return
    if "allOf" in schema:
        whole = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            whole = _merged(whole, resolved(part, root))
        yield from _split(whole, root, strict, steps - 1)
        return
    for name in ("anyOf", "oneOf"):
        if isinstance(given := schema.get(name), list):
            rest = {key: value for key, value in schema.items() if key != name}
            parts: list[list[dict[str, Any]]] = []
            for part in given:
                whole = resolved(part, root)
                whole = _merged(rest, {} if whole is True else whole) if _asserts(rest) else whole
                parts.append(list(islice(_split(whole, root, strict, steps - 1), MAX_BRANCHES + 1)))
            if name == "oneOf" and strict and not _apart(parts):
                raise Unenforceable("oneOf, whose alternatives may both be right")
            yield from (branch for part in parts for branch in part)
            return
    yield from _typed(_judged(schema, strict))


def _asserts(schema: dict[str, Any]) -> bool:
    """Whether `schema` says more than titles and defaults."""
    words = {"type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", *_UNENFORCEABLE}
    return any(name in schema for name in words.union(*_OF_TYPE.values()))


def _merged(one: dict[str, Any], two: Any) -> dict[str, Any]:
    """A schema of what both say. Raises Unenforceable where they say it with the same word."""
    if not isinstance(two, dict):
        raise Unenforceable("allOf")
    merged = {**one}
    for key, value in two.items():
        if key == "required" and key in one:
            merged[key] = [*one[key], *(name for name in value if name not in one[key])]
        elif key == "properties" and key in one and one[key].keys().isdisjoint(value):
            merged[key] = {**one[key], **value}
        elif key in one and one[key] != value and _asserts({key: value}):
            raise Unenforceable(f"{key} in two places of one schema")
        else:
            merged[key] = value
    return merged


def _judged(schema: dict[str, Any], strict: bool) -> dict[str, Any]:
    """`schema` without what need not be looked at. Raises Unenforceable."""
    if not strict:
        return {key: value for key, value in schema.items() if key not in _LOOSE}
    for name in _UNENFORCEABLE:
        if name in schema:
            raise Unenforceable(name)
    if schema.get("minProperties", 0) > len(schema.get("required") or ()):
        raise Unenforceable("minProperties")
    if "maxProperties" in schema and schema["maxProperties"] < len(schema.get("properties") or ()):
        raise Unenforceable("maxProperties")
    if "maxProperties" in schema and not schema.get("properties"):
        raise Unenforceable("maxProperties")
    if schema.get("uniqueItems") and schema.get("maxItems", 2) > 1:
        raise Unenforceable("uniqueItems")
    if (prefix := schema.get("prefixItems")) is not None:
        least, most = schema.get("minItems", 0), schema.get("maxItems", len(prefix))
        if not least <= len(prefix) <= most:
            raise Unenforceable("prefixItems beside minItems or maxItems")
    for name in ("unevaluatedProperties", "unevaluatedItems"):
        if isinstance(schema.get(name), dict):
            raise Unenforceable(name)
    return schema


def _typed(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """`schema` for each of its types."""
    if "const" in schema:
        schema = {**schema, "enum": [schema["const"]]}
    given = schema.get("type")
    kinds = [given] if isinstance(given, str) else list(given) if isinstance(given, list) else []
    if unknown := [kind for kind in kinds if kind not in TYPES]:
        raise Unenforceable(f"type {unknown[0]!r}")
    if isinstance(values := schema.get("enum"), list):
        if kinds:
            values = [value for value in values if any(_is(value, kind) for kind in kinds)]
        yield from [{"enum": values}] if values else []
        return
    if not kinds:
        kinds = [kind for kind, words in _OF_TYPE.items() if any(word in schema for word in words)]
    if not kinds:
        yield {}
    for kind in kinds:
        words = _OF_TYPE.get("number" if kind == "integer" else kind, ())
        yield {"type": kind, **{word: schema[word] for word in words if word in schema}}


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    match kind:
        case "integer":
            return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        case "number":
            return isinstance(value, (int, float))
    types = {"string": str, "array": list, "object": dict, "null": type(None)}
    return kind in types and isinstance(value, types[kind])


def _apart(told: list[list[dict[str, Any]]]) -> bool:
    """Whether no value can be as two of `told` say, each a list of branches."""
    return all(
        _two_apart(one, two)
        for index, those in enumerate(told)
        for others in told[index + 1 :]
        for one in those
        for two in others
    )


def _two_apart(one: dict[str, Any], two: dict[str, Any]) -> bool:
    if "enum" in one and "enum" in two:
        return all(value not in two["enum"] for value in one["enum"])
    if "enum" in one or "enum" in two:
        values, other = (one["enum"], two) if "enum" in one else (two["enum"], one)
        return "type" in other and not any(_is(value, other["type"]) for value in values)
    kinds = {one.get("type"), two.get("type")}
    if None in kinds:
        return False
    if len(kinds) == 2:
        return kinds != {"integer", "number"}
    if kinds != {"object"}:
        return False
    shared = set(one.get("required") or ()) & set(two.get("required") or ())
    return any(
        _tags(one, key) and _tags(two, key) and not _tags(one, key) & _tags(two, key) for key in shared
    )


def _tags(schema: dict[str, Any], key: str) -> set[str]:
    """The texts that a property may be, if it is one of some."""
    inner = (schema.get("properties") or {}).get(key)
    values = (
        inner.get("enum", [inner["const"]] if "const" in inner else []) if isinstance(inner, dict) else []
    )
    return {value for value in values if isinstance(value, str)}
