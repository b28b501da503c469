"""Names a JSON schema's faults and their places in a sentence; and `$ref`s that lead only to themselves."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from .json_schema import NO_SCHEMA, TYPES, pointed

_NAMED = ("properties", "patternProperties")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties")
_MOST_CIRCLES = 32
_MOST_CHECKS = 300
_MOST_JUMPS = 16


def place_of(pointer: str) -> str:
    """Format a schema's place in a request's schema."""
    return f"at {pointer}" if pointer else "at the top"


def _inner(node: dict[str, Any]) -> Iterator[tuple[Any, Any, str, Any]]:
    """Yield (parent, key there, path below `node`, schema) of each schema in `node`."""
    for word in _NAMED:
        if isinstance(named := node.get(word), dict):
            for key, inner in named.items():
                yield named, key, f"/{word}/{key.replace('~', '~0').replace('/', '~1')}", inner
    for word in _LISTED:
        if isinstance(listed := node.get(word), list):
            yield from ((listed, index, f"/{word}/{index}", inner) for index, inner in enumerate(listed))
    for word in _SINGLE:
        if isinstance(inner := node.get(word), dict):
            yield node, word, f"/{word}", inner


# --------------------------------------------------------------------------- circles


def without_circles(schema: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return `schema` without each `$ref` that leads only to itself, and their JSON pointers."""
    dropped: list[str] = []
    try:
        while len(dropped) < _MOST_CIRCLES and (found := _circle(schema)) is not None:
            if not dropped:
                schema = copy.deepcopy(schema)
                found = _circle(schema) or found
            node, path = found
            del node["$ref"]
            dropped.append(f"{path}/$ref")
    except NO_SCHEMA:
        pass  # Whoever reads it next says what is wrong with it.
    return schema, dropped


class _Nodes:
    """Schemas that `root` leads to. `paths`: id → (the schema, its JSON pointer)."""

    def __init__(self, root: dict[str, Any]):
        self._root = root
        self._anchors: dict[str, Any] = {}
        for word in ("$defs", "definitions"):
            for key, inner in (root.get(word) or {}).items():
                if isinstance(inner, dict) and isinstance(anchor := inner.get("$anchor"), str):
                    self._anchors[f"#{anchor}"] = (inner, f"/{word}/{key}")
        self.paths: dict[int, tuple[dict[str, Any], str]] = {}
        left: list[tuple[Any, str]] = [(root, "")]
        while left:
            node, path = left.pop()
            if not isinstance(node, dict) or id(node) in self.paths:
                continue
            self.paths[id(node)] = (node, path)
            left += [(inner, path + step) for _, _, step, inner in _inner(node)]
            if (target := self.target(node)) is not None:
                left.append(target)

    def target(self, node: dict[str, Any]) -> tuple[Any, str] | None:
        """Return the target of a `$ref` of `node`, and its place."""
        if not isinstance(ref := node.get("$ref"), str):
            return None
        if ref in self._anchors:
            return self._anchors[ref]
        target = pointed(ref, self._root)
        return (target, ref.partition("#")[2]) if isinstance(target, dict) else None

    def blocking(self, node: dict[str, Any], grounded: set[int]) -> dict[str, Any] | None:
        """Return a schema whose missing values leave `node` none."""
        target = self.target(node)
        must = [target[0]] if target is not None else []
        must += node["allOf"] if isinstance(node.get("allOf"), list) else []
        for word in ("anyOf", "oneOf"):
            choices = node.get(word)
            if isinstance(choices, list) and choices and not any(_is_in(each, grounded) for each in choices):
                must.append(choices[0])
        return next((each for each in must if not _is_in(each, grounded)), None)


def _is_in(schema: Any, grounded: set[int]) -> bool:
    return not isinstance(schema, dict) or id(schema) in grounded


def _circle(root: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
    """Return a schema whose `$ref` leads back to it through every alternative, and its JSON pointer."""
    nodes = _Nodes(root)
    grounded: set[int] = set()
    left = [node for node, _ in reversed(nodes.paths.values())]
    while left:
        more = [node for node in left if nodes.blocking(node, grounded) is not None]
        grounded |= {id(node) for node in left} - {id(node) for node in more}
        if len(more) == len(left):
            break
        left = more
    if not left:
        return None
    node, seen = left[-1], set[int]()
    while id(node) not in seen:
        seen.add(id(node))
        node = nodes.blocking(node, grounded) or node
    while nodes.target(node) is None:  # `node` is in the circle, and a `$ref` closes each.
        node = nodes.blocking(node, grounded) or node
    return nodes.paths[id(node)]


# --------------------------------------------------------------------------- faults


def explained(schema: dict[str, Any], check: Callable[[dict[str, Any]], str], problem: str) -> str:
    """Put the `problem` that `check` finds in `schema` into a sentence that names the place."""
    if problem.startswith("circular references"):
        return "a `$ref` leads back to a schema that has other keywords beside it"
    try:
        return _Search(schema, check, problem).sentence()
    except NO_SCHEMA:
        return problem


class _Search:
    """Searches the smallest schema that has the problem by itself."""

    def __init__(self, schema: dict[str, Any], check: Callable[[dict[str, Any]], str], problem: str):
        self._schema = copy.deepcopy(schema)
        self._check = check
        self._problem = problem
        self._checks = 0

    def sentence(self) -> str:
        node, path = self._schema, ""
        if self._problem.startswith("Resource"):  # It is looked for wherever it stands.
            for node, path in _Nodes(self._schema).paths.values():
                if isinstance(ref := node.get("$ref"), str) and pointed(ref, self._schema) is None:
                    return _said(node, path, self._problem, "$ref")
        for _ in range(_MOST_JUMPS):
            node, path = self._deepest(node, path)
            target = pointed(ref, self._schema) if isinstance(ref := node.get("$ref"), str) else None
            if not isinstance(ref, str) or not isinstance(target, dict) or len(node) > 1:
                break
            node, path = target, ref.partition("#")[2]
        defs = {word: self._schema[word] for word in ("$defs", "definitions") if word in self._schema}
        problem = self._check({**node, **defs}) or self._problem  # Its own is plainer than its parents'.
        return _said(node, path, problem, self._word(node))

    def _fails(self) -> str:
        self._checks += 1
        return self._check(self._schema) if self._checks <= _MOST_CHECKS else ""

    def _deepest(self, node: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
        while (found := self._failing(node)) is not None:
            node, path = found[0], path + found[1]
        return node, path

    def _failing(self, node: dict[str, Any]) -> tuple[dict[str, Any], str] | None:
        """Return the first schema in `node` that fails alone; the others allow anything from then on."""
        inner = [each for each in _inner(node) if isinstance(each[3], dict)]
        for holder, key, _, _ in inner:
            holder[key] = True
        own = self._fails()
        for holder, key, _, was in inner:
            holder[key] = was
        if own:
            return None
        for at, (_, _, step, schema) in enumerate(inner):
            others = [each for index, each in enumerate(inner) if index != at]
            for holder, key, _, _ in others:
                holder[key] = True
            if problem := self._fails():
                self._problem = problem
                return schema, step
            for holder, key, _, was in others:
                holder[key] = was
        return None

    def _word(self, node: dict[str, Any]) -> str:
        """Return the keyword that causes the problem of `node`, "" if there is none."""
        for word in [word for word in node if word not in ("$defs", "definitions", "type")]:
            value = node.pop(word)
            fails = self._fails()
            node[word] = value
            if not fails and self._checks <= _MOST_CHECKS:
                return word
        return ""


_UNSATISFIABLE = "Unsatisfiable schema: "
_WORDS = (
    (re.compile(r"required property (.*) is unsatisfiable"), r"the required property \1 can have no value"),
    (re.compile("required item is unsatisfiable"), "an item must be there, and can have no value"),
    (re.compile("incompatible types"), "its keywords want different types"),
    (re.compile("schema is false"), "it allows nothing"),
    (re.compile(r"range .* does not contain (a multiple of .*)"), r"there is not \1 within its bounds"),
    (re.compile("minProperties > maxProperties"), "minProperties is greater than maxProperties"),
)


def _said(node: dict[str, Any], path: str, problem: str, word: str) -> str:
    where = place_of(path)
    kinds = node.get("type", [])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if unknown := [*islice((kind for kind in kinds if kind not in TYPES), 1)]:
        return f"`type` {_short(unknown[0])} {where} is none of {', '.join(TYPES)}"
    ref = node.get("$ref")
    if isinstance(ref, str) and (word == "$ref" or problem.startswith(("Pointer", "Anchor", "Resource"))):
        if not ref.startswith("#"):
            return f"`$ref` {_short(ref)} {where} points outside the schema, and nothing is fetched"
        if problem.startswith(("Pointer", "Anchor")):
            return f"`$ref` {_short(ref)} {where} points to nothing"
    if problem.startswith(_UNSATISFIABLE):
        why = problem.removeprefix(_UNSATISFIABLE)
        if why == "anyOf is empty":
            why = f"`{word or 'type'}` is empty"
        for pattern, words in _WORDS:
            why = pattern.sub(words, why)
        return f"no value fits the schema {where}: {why}"
    if problem.startswith("regex parse error") and word:
        of = f" {_short(node[word])}" if isinstance(node[word], str) else ""
        return f"`{word}`{of} {where} can't be read: {problem.rpartition('error: ')[2]}"
    if problem.startswith("Unimplemented keys") and word:
        return f"`{word}` {where} can't be enforced"
    if problem.startswith("Unknown format"):
        return f"`format` {_short(node.get('format'))} {where} can't be enforced"
    return f"`{word}` {where}: {problem}" if word else f"the schema {where}: {problem}"


def _short(value: Any) -> str:
    return "null" if value is None else repr(value)[:80]
