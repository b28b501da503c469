"""Splits a JSON schema into branches of one type each, references followed and keywords checked.

A branch has a `type`, or an `enum` of certain values, or neither (anything).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any
from urllib.parse import unquote

TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")
MAX_BRANCHES = 200
_MAX_STEPS = 32

_RARE = (
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
LOOSE = ("format", "pattern", "minProperties", "maxProperties", "uniqueItems", *_RARE)
"""Keywords that are passed over where a schema need not be enforced."""


class Unenforceable(ValueError):
    """A part of a schema can't be enforced; the text names it."""


NO_SCHEMA = (Unenforceable, TypeError, AttributeError, KeyError, IndexError, RecursionError)
"""Errors of reading a schema whose words have values of any type."""


def why_not(error: Exception) -> str:
    return str(error) if isinstance(error, Unenforceable) else "what is no JSON schema"


def is_any(schema: Any) -> bool:
    """Return whether `schema` leaves a value's type open."""
    return schema is True or (isinstance(schema, dict) and not _asserts(schema))


def resolved(schema: Any, root: dict[str, Any]) -> Any:
    """Follow a schema's `$ref`, if any, into `root`; returns None if it leads nowhere."""
    for _ in range(8):  # they may lead to others, and in a circle
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(ref, str):
            return schema
        schema = pointed(ref, root)
    return None


def pointed(ref: str, root: dict[str, Any]) -> Any:
    """Return the target of `ref` in `root`, itself a `$ref` or not; None: nothing."""
    if not ref.startswith("#") and isinstance(own := root.get("$id"), str) and own:
        ref = ref.removeprefix(own.rstrip("#"))
    target: Any = root
    if ref not in ("", "#") and not ref.startswith("#/"):
        return None
    for step in unquote(ref).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            target = target[int(step)] if step.isdecimal() and int(step) < len(target) else None
        else:
            target = target.get(step) if isinstance(target, dict) else None
    return target


def branches(schema: Any, root: dict[str, Any], strict: bool) -> list[dict[str, Any]]:
    """Split `schema`, or part of it, into alternatives. `strict`: raises Unenforceable for the rest."""
    try:
        left = iter(range(MAX_BRANCHES * _MAX_STEPS))
        alternatives = list(islice(_split(schema, root, strict, _MAX_STEPS, left), MAX_BRANCHES + 1))
    except NO_SCHEMA as error:
        raise Unenforceable(why_not(error)) from error
    if len(alternatives) > MAX_BRANCHES:
        raise Unenforceable("more alternatives than can be told apart")
    return alternatives


def _split(
    schema: Any, root: dict[str, Any], strict: bool, steps: int, left: Iterator[int]
) -> Iterator[dict[str, Any]]:
    """Split a schema. `steps`: levels below it at most. `left`: an item for each call left."""
    if next(left, None) is None:
        raise Unenforceable("more alternatives than can be told apart")
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
        yield from _split(schema, root, strict, steps - 1, left)
        return
    if "allOf" in schema:
        merged = {key: value for key, value in schema.items() if key != "allOf"}
        for part in schema["allOf"]:
            merged = _merged(merged, resolved(part, root))
        yield from _split(merged, root, strict, steps - 1, left)
        return
    for name in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(name), list):
            rest = {key: value for key, value in schema.items() if key != name}
            for part in choices:
                merged = resolved(part, root)
                merged = _merged(rest, {} if merged is True else merged) if _asserts(rest) else merged
                yield from islice(_split(merged, root, strict, steps - 1, left), MAX_BRANCHES + 1)
            return
    yield from _typed(_judged(schema, strict))


def _asserts(schema: dict[str, Any]) -> bool:
    """Return whether `schema` has more than titles and defaults."""
    words = {"type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", *_RARE}
    return any(name in schema for name in words.union(*_OF_TYPE.values()))


def _merged(one: dict[str, Any], two: Any) -> dict[str, Any]:
    """Merge two schemas that both apply. Raises Unenforceable where they share a keyword."""
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
    """Return `schema` without irrelevant keywords. Raises Unenforceable.

    Strict: llguidance has taken the schema, so what it knows nothing of is not there.
    """
    if isinstance(items := schema.get("items"), list):  # as until draft 2019-09
        schema = {**{key: value for key, value in schema.items() if key != "items"}, "prefixItems": items}
    if not strict:
        return {key: value for key, value in schema.items() if key not in LOOSE}
    for name in ("patternProperties", "additionalItems"):
        if name in schema:
            raise Unenforceable(name)
    for name in ("minProperties", "maxProperties"):
        if name in schema and not schema.get("properties"):
            raise Unenforceable(name)
    if (prefix := schema.get("prefixItems")) is not None:
        least, most = schema.get("minItems", 0), schema.get("maxItems", len(prefix))
        if not least <= len(prefix) <= most:
            raise Unenforceable("prefixItems beside minItems or maxItems")
    return schema


def _typed(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `schema` for each of its types."""
    if "const" in schema:
        schema = {**schema, "enum": [schema["const"]]}
    declared = schema.get("type")
    kinds = [declared] if isinstance(declared, str) else list(declared) if isinstance(declared, list) else []
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


# --------------------------------------------------------------------------- closed objects

_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("items", "additionalProperties", "contains")
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_MOST_NODES = 20_000


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return `schema` for generating: an object has no properties but those that its schema names.

    JSON Schema allows others where `additionalProperties` is missing, and a small model invents keys until
    its limit of tokens. An object stays open if its schema allows others, or names no properties.
    """
    try:
        return _Closing(schema).alone(schema)
    except NO_SCHEMA:
        return schema


class _Closing:
    """Closes objects. `root`: the schema that `$ref` looks into."""

    def __init__(self, root: dict[str, Any]):
        self._root = root
        self._nodes = 0

    def alone(self, node: Any) -> Any:
        """Close a schema to which no other one in its place adds properties."""
        if not isinstance(node, dict):
            return node
        parts = [word for word in (*_IN_PLACE, "$ref") if word in node]
        own = any(word in node for word in ("properties", "patternProperties", "additionalProperties"))
        if not own and len(parts) == 1 and (parts[0] != "allOf" or len(node["allOf"]) == 1):
            inner = self._inner(node)
            return inner if parts == ["$ref"] else {**inner, parts[0]: [*map(self.alone, node[parts[0]])]}
        combined = self._open_to_siblings(node)
        names = self._names(node)
        if names is None or "additionalProperties" in node or not (names or own):
            return combined
        properties = {**dict.fromkeys(names, True), **combined.get("properties", {})}
        return {**combined, "properties": properties, "additionalProperties": False}

    def _open_to_siblings(self, node: Any) -> Any:
        """Keep open a schema beside which others may name properties too."""
        if not isinstance(node, dict):
            return node
        inner = {key: value for key, value in self._inner(node).items() if key != "$ref"}
        parts = {word: [*map(self._open_to_siblings, node[word])] for word in _IN_PLACE if word in node}
        if "$ref" in node:
            parts["allOf"] = [*parts.get("allOf", ()), self._open_to_siblings(self._target(node))]
        return {**inner, **parts}

    def _inner(self, node: dict[str, Any]) -> dict[str, Any]:
        """Return `node` with the schemas of an object's values and a list's items closed."""
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise Unenforceable("a schema that leads to itself")
        node = {**node}
        if not isinstance(unevaluated := node.get("unevaluatedProperties"), dict) or not unevaluated:
            node.pop("unevaluatedProperties", None)
        for word in node.keys() & {*_BY_NAME}:
            node[word] = {key: self.alone(value) for key, value in node[word].items()}
        node |= {word: self.alone(node[word]) for word in _SINGLE if word in node}
        if "prefixItems" in node:
            node["prefixItems"] = [*map(self.alone, node["prefixItems"])]
        others = is_any(node.get("additionalProperties"))
        if others and node.get("properties") and "patternProperties" not in node:
            # As a pattern: an escape in another property's name can't make it one of those named.
            node |= {"patternProperties": {"": True}, "additionalProperties": False}
        return node

    def _names(self, node: Any) -> dict[str, None] | None:
        """Return the properties that a schema and those in its place name, in order; None: open."""
        if not isinstance(node, dict):
            return {}
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise Unenforceable("a schema that leads to itself")
        if any(
            node.get(word, False) is not False for word in ("additionalProperties", "unevaluatedProperties")
        ):
            return None
        names = dict.fromkeys([*node.get("properties", ()), *node.get("required", ())])
        parts = [part for word in _IN_PLACE for part in node.get(word, ())]
        if "$ref" in node:
            parts.append(self._target(node))
        for inner in map(self._names, parts):
            if inner is None:
                return None
            names |= inner
        return names

    def _target(self, node: dict[str, Any]) -> Any:
        return resolved({"$ref": node["$ref"]}, self._root)
