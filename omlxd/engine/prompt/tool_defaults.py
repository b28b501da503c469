"""Leaves out of a call's arguments the values that equal the `default` of the tool's JSON schema.

Clients fill defaults in before they echo a call (zod and pydantic do, so Claude Code sends
`"replace_all": false` back), and models write them or not: it is the same call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from ... import chat

_MOST_SCHEMAS = 32
"""Schemas followed for one value: `$ref` may lead in a circle."""
_MOST_DEPTH = 32


class ToolDefaults:
    """The defaults of a conversation's tools."""

    def __init__(self, tools: Iterable[chat.Tool] = ()):
        self._schemas = {tool.name: tool.parameters for tool in tools if tool.parameters}

    def without(self, name: str, arguments: Any) -> Any:
        """Return the `arguments` of a call of `name` without members that equal their default."""
        schema = self._schemas.get(name)
        return arguments if schema is None else _without(arguments, schema, schema, 0)


def _without(value: Any, schema: Any, root: dict[str, Any], depth: int) -> Any:
    if depth > _MOST_DEPTH or not isinstance(value, dict | list):
        return value
    schemas = list(_parts(schema, root))
    if isinstance(value, list):
        items = next((each["items"] for each in schemas if "items" in each), None)
        return [_without(item, items, root, depth + 1) for item in value]
    kept: dict[str, Any] = {}
    for key, item in value.items():
        inner = [properties[key] for each in schemas if key in (properties := _properties(each))]
        bare = _without(item, {"allOf": inner}, root, depth + 1)
        defaults = [part["default"] for part in _parts({"allOf": inner}, root) if "default" in part]
        if defaults:
            default = _without(defaults[0], {"allOf": inner}, root, depth + 1)
            if canonical_json(bare) == canonical_json(default):
                continue
        kept[key] = bare
    return kept


def _parts(schema: Any, root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `schema` and those that apply beside it: `$ref`, `allOf`, and the only object of an `anyOf` or
    `oneOf` (pydantic's `Model | None`); of several none is chosen.
    """
    waiting = [schema]
    for _ in range(_MOST_SCHEMAS):
        if not waiting:
            return
        part = waiting.pop(0)
        if not isinstance(part, dict):
            continue
        yield part
        if isinstance(part.get("$ref"), str):
            waiting.append(_referred(part["$ref"], root))
        if isinstance(part.get("allOf"), list):
            waiting += part["allOf"]
        for word in ("anyOf", "oneOf"):
            branches = part.get(word)
            if isinstance(branches, list):
                objects = [each for each in branches if not _is_plain(each)]
                waiting += objects if len(objects) == 1 else ()


def _is_plain(schema: Any) -> bool:
    """Return whether a value of `schema` has no members."""
    words = ("properties", "items", "$ref", "allOf", "anyOf", "oneOf")
    return not (isinstance(schema, dict) and any(word in schema for word in words))


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _referred(reference: str, root: dict[str, Any]) -> Any:
    """Return the target of a `$ref` within the document, or None."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for step in filter(None, reference[1:].split("/")):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def canonical_json(value: Any) -> str:
    """Return the same JSON text for equal values."""
    return json.dumps(_plain(value), ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # JavaScript writes 1.0 as 1.
    return int(value) if isinstance(value, float) and value.is_integer() else value
