"""Makes a JSON schema one that llguidance enforces, and lists the keywords that this leaves out.

exact     says the same in words that llguidance has: `propertyNames` of certain names as properties, int32 as
          bounds, `oneOf` of alternatives that exclude each other as `anyOf`
enforce   what is left is taken away keyword by keyword, where it stands; the rest of the schema holds
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

from .faults import explained, place_of, without_circles
from .json_schema import NO_SCHEMA, TYPES, is_any, resolved

Check = Callable[[dict[str, Any]], str]
"""Tells why llguidance can't enforce a JSON schema; "" if it can."""

_MOST_INT = 9223372036854774784
"""Largest double below 2^63: llguidance reads bounds as doubles."""
_FORMATS = {f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)}
_FORMATS |= {f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)}
_NUMERIC = {*_FORMATS, "float", "double", "float32", "float64", "int", "uint", "decimal"}
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_IN_PLACE = ("allOf", "anyOf", "oneOf")
_SINGLE = ("items", "additionalProperties")
_ORDER = (
    *("format", "pattern", "multipleOf", "exclusiveMinimum", "exclusiveMaximum", "minimum", "maximum"),
    *("minLength", "maxLength", "minProperties", "maxProperties", "patternProperties", "additionalItems"),
    *("minItems", "maxItems", "$ref", "oneOf", "required", "prefixItems", "items", "additionalProperties"),
    *("anyOf", "allOf", "const", "enum", "properties", "type"),
)
"""Order in which keywords are dropped where several could be."""
_UNKNOWN = re.compile(r"Unimplemented keys: \[(.*?)\]")
_MOST_NODES = 20_000


def enforce(
    schema: dict[str, Any], check: Check, *, strict: bool, mend: bool = False
) -> tuple[dict[str, Any], list[str], str]:
    """Return (the schema that can be enforced, JSON pointers of the keywords it leaves out, a problem).

    strict   nothing is left out
    mend     a schema that allows nothing loses what contradicts, too
    problem  why the returned schema can't be enforced; "": it can
    """
    schema, circles = without_circles(schema)
    schema = exact(schema)
    if strict and circles:
        return schema, [], f"`$ref` {place_of(circles[0].removesuffix('/$ref'))} leads only to itself"
    problem = check(schema)
    if strict or not problem:
        return schema, circles, problem and explained(schema, check, problem)
    try:
        relaxing = _Relaxing(schema, check, mend)
        relaxed = relaxing.relaxed(schema, "")
        problem = check(relaxed)
        if problem and isinstance(properties := relaxed.get("properties"), dict):
            for name in properties:  # Some fail only together with what they refer to.
                alone = {**relaxed, "properties": {name: properties[name]}, "required": []}
                if check(alone):
                    relaxed = {**relaxed, "properties": {**relaxed["properties"], name: True}}
                    relaxing.left_out.append(f"/properties/{_escaped(name)}")
            problem = check(relaxed)
    except NO_SCHEMA:
        return schema, circles, explained(schema, check, problem)
    return relaxed, [*circles, *relaxing.left_out], problem and explained(relaxed, check, problem)


# --------------------------------------------------------------------------- in other words


def exact(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that means the same, but for the last thousand integers of 64 bits."""
    try:
        return _exact(schema, schema, itertools.count())
    except NO_SCHEMA:
        return schema


def _exact(node: Any, root: dict[str, Any], nodes: Iterator[int]) -> Any:
    if not isinstance(node, dict):
        return node
    if next(nodes) > _MOST_NODES:
        raise RecursionError
    node = _children(node, lambda inner, path: _exact(inner, root, nodes))
    _bound(node)
    if not isinstance(node.get("required", []), list) and isinstance(node["required"], bool):
        del node["required"]  # Draft 3 has it in the property.
    if "propertyNames" in node:
        _name(node, root)
    for word in ("uniqueItems", "nullable"):
        if node.get(word) is False:
            del node[word]
    if isinstance(choices := node.get("oneOf"), list) and "anyOf" not in node and _exclusive(choices, root):
        node = {"anyOf" if key == "oneOf" else key: value for key, value in node.items()}
    return node


def _children(node: dict[str, Any], change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Return a copy of `node` with its schemas changed; `change` gets their paths below `node`."""
    node = {**node}
    for word in _BY_NAME:
        if isinstance(named := node.get(word), dict):
            node[word] = {key: change(inner, f"/{word}/{_escaped(key)}") for key, inner in named.items()}
    for word in (*_LISTED, "items"):
        if isinstance(listed := node.get(word), list):
            node[word] = [change(inner, f"/{word}/{index}") for index, inner in enumerate(listed)]
    for word in _SINGLE:
        if isinstance(inner := node.get(word), dict):
            node[word] = change(inner, f"/{word}")
    return node


def _bound(node: dict[str, Any]) -> None:
    """Give integers of 8 to 64 bits bounds; draft 4's exclusive bounds become those of later drafts."""
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(says := node.get(exclusive), bool):
            del node[exclusive]
            if says and bound in node:
                node[exclusive] = node.pop(bound)
    kinds = node.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "string" in kinds or not {"integer", "number"} & {*filter(_is_text, kinds)}:
        return
    if _is_text(format := node.get("format")) and format in _NUMERIC:
        del node["format"]
        least, most = _FORMATS.get(format, (None, None))
        if least is not None and most is not None:
            node["minimum"] = max(least, _number(node.get("minimum"), least))
            node["maximum"] = min(most, _number(node.get("maximum"), most))
    if "integer" in kinds and "number" not in kinds:
        for word in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            if abs(value := _number(node.get(word), 0)) > _MOST_INT:
                node[word] = _MOST_INT if value > 0 else -_MOST_INT


def _name(node: dict[str, Any], root: dict[str, Any]) -> None:
    """Spell `propertyNames` as properties, or as the pattern of one."""
    names = resolved(node["propertyNames"], root)
    if is_any(names) or (isinstance(names, dict) and names.get("type") == "string" and len(names) == 1):
        del node["propertyNames"]
        return
    if not isinstance(names, dict) or "patternProperties" in node:
        return
    says = {word for word in names if word not in ("title", "description", "type", "$comment")}
    others = node.get("additionalProperties", True)
    values = [names["const"]] if says == {"const"} else names["enum"] if says == {"enum"} else None
    if values is not None and others is not False:
        own = node.get("properties", {})
        node["properties"] = {value: own.get(value, others) for value in values if _is_text(value)}
        node["additionalProperties"] = False
    elif says == {"pattern"} and others is not False and not node.get("properties"):
        node["patternProperties"] = {names["pattern"]: others}
        node["additionalProperties"] = False
    else:
        return
    del node["propertyNames"]


def _exclusive(choices: list[Any], root: dict[str, Any]) -> bool:
    """Return whether no value fits two of the schemas, where that is easily seen."""
    seen = [resolved(choice, root) for choice in choices]
    return all(_apart(one, two, root) for one, two in itertools.combinations(seen, 2))


def _apart(one: Any, two: Any, root: dict[str, Any]) -> bool:
    if not isinstance(one, dict) or not isinstance(two, dict):
        return one is False or two is False
    values = [_values(each) for each in (one, two)]
    if None not in values:
        return not {*values[0]} & {*values[1]}  # type: ignore[misc]
    kinds = [_kinds(each) for each in (one, two)]
    if all(kinds) and not kinds[0] & kinds[1]:
        return True
    if kinds != [{"object"}, {"object"}]:
        return False
    for key in {*one.get("required", ())} & {*two.get("required", ())}:
        tags = [_values(resolved(each.get("properties", {}).get(key), root)) for each in (one, two)]
        if None not in tags and not {*tags[0]} & {*tags[1]}:  # type: ignore[misc]
            return True
    return False


def _values(schema: Any) -> list[str] | None:
    """Return the values that a schema lists, as text; None: no list."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [repr(schema["const"])]
    return [*map(repr, schema["enum"])] if isinstance(schema.get("enum"), list) else None


def _kinds(schema: dict[str, Any]) -> set[str]:
    kinds = schema.get("type", ())
    kinds = {kinds} if isinstance(kinds, str) else {*kinds}
    return kinds | {"integer"} if "number" in kinds else kinds


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, int | float) else default


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _escaped(name: str) -> str:
    """Escape a name as a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


# --------------------------------------------------------------------------- with less


class _Relaxing:
    """Takes keywords away. `left_out`: their JSON pointers."""

    def __init__(self, root: dict[str, Any], check: Check, mend: bool):
        self.left_out: list[str] = []
        self._root = root
        self._check = check
        self._mend = mend
        self._nodes = 0

    def relaxed(self, node: Any, path: str) -> Any:
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise RecursionError
        if not isinstance(node, dict):
            if not isinstance(node, bool):
                self.left_out.append(path)
            return node if isinstance(node, bool) else True
        node = _children(node, lambda inner, step: self.relaxed(inner, path + step))
        self._mend_types(node, path)
        while problem := self._problem(node):
            words = self._to_drop(node, problem)
            if not words:
                break
            for word in words:
                self._drop(node, word, path)
        return node

    def _problem(self, node: dict[str, Any]) -> str:
        """Return a node's own problem."""
        problem = self._check(self._alone(node))
        return "" if problem.startswith("Unsatisfiable") and not self._mend else problem

    def _alone(self, node: Any) -> Any:
        """Return `node` with anything for its values and for what it refers to."""
        if not isinstance(node, dict):
            return node
        alone = {key: value for key, value in node.items() if key not in ("$defs", "definitions")}
        if "$ref" in node and resolved({"$ref": node["$ref"]}, self._root) is not None:
            del alone["$ref"]
        for word in ("properties", "patternProperties"):
            if isinstance(named := node.get(word), dict):
                alone[word] = dict.fromkeys(named, True)
        for word in ("prefixItems", "items"):
            if isinstance(listed := node.get(word), list):
                alone[word] = [True] * len(listed)
        for word in _IN_PLACE:
            if isinstance(listed := node.get(word), list):
                alone[word] = [self._alone(inner) for inner in listed]
        return alone | {word: True for word in _SINGLE if isinstance(node.get(word), dict)}

    def _mend_types(self, node: dict[str, Any], path: str) -> None:
        """Remove types that are none of JSON's."""
        kinds = node.get("type", "string")
        listed = kinds if isinstance(kinds, list) else [kinds]
        known = [kind for kind in listed if kind in TYPES]
        if len(known) < len(listed):
            self._drop(node, "type", path)
            if known:
                node["type"] = known

    def _to_drop(self, node: dict[str, Any], problem: str) -> list[str]:
        """Return the keywords that `problem` names, else one that causes it, else the next to try."""
        if unknown := _UNKNOWN.search(problem):
            return [word for word in re.findall(r'"(.*?)"', unknown[1]) if word in node] or self._inner(node)
        present = [word for word in _ORDER if word in node]
        for word in present:
            if not self._problem({key: value for key, value in node.items() if key != word}):
                return [word]
        return present[:1]

    @staticmethod
    def _inner(node: dict[str, Any]) -> list[str]:
        """Return the keyword whose content has the problem that `node` itself lacks."""
        return [word for word in _IN_PLACE if word in node][:1]

    def _drop(self, node: dict[str, Any], word: str, path: str) -> None:
        value = node.pop(word)
        self.left_out.append(f"{path}/{_escaped(word)}")
        if word == "oneOf" and "anyOf" not in node and isinstance(value, list):
            node["anyOf"] = value
        if word == "patternProperties":
            node["additionalProperties"] = True
