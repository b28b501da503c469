"""Reads the text of a tool call: a name and arguments, typed by the tool's schema.

JSON, tags (call_formats.py), Gemma's and Python's (languages.py) are known by their beginning; mlx-lm's
parser for the model reads others. Text that is no call gives None, never an exception, and is shown.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

from ....chat import Tool
from ...constrain.call_formats import READINGS, VALUE_CALLS, TagReading
from ...constrain.schema.json_schema import Unenforceable, branches
from ...prompt.template.messages import openai_tools
from .languages import gemma_calls, pythonic_calls

MAX_NAME = 520
"""Letters of a name: the APIs admit 256, and as many of a namespace."""
NAME = re.compile(rf"[\w.:/-]{{1,{MAX_NAME}}}")

_Call = tuple[str, dict[str, Any]]
"""A call's name and arguments."""
_Reader = Callable[[str], "list[_Call] | None"]


@dataclass(slots=True, frozen=True)
class ParsedCall:
    """A parsed call. `arguments` is JSON text of an object."""

    name: str
    arguments: str


class ToolCallReader:
    """Reads calls to `tools`. `fallback`: mlx-lm's parser, `(text, tools) -> call or calls`, or None."""

    def __init__(self, tools: Sequence[Tool], fallback: Callable[..., Any] | None = None):
        self._tools = {tool.name: tool for tool in tools}
        self._listed = openai_tools(tools)
        self._fallback = fallback

    @property
    def names(self) -> Iterable[str]:
        """Names of the tools."""
        return self._tools

    def read(self, text: str) -> list[ParsedCall] | None:
        """Return the calls in `text`, between a call's tags, or None if it holds anything else."""
        text = text.strip()
        for read in self._readers(text):
            try:
                if calls := read(text):
                    return [self.typed(name, arguments) for name, arguments in calls]
            except Exception:  # the model wrote something else; mlx-lm's parsers raise what they like
                continue
        return None

    def _readers(self, text: str) -> tuple[_Reader, ...]:
        """Choose readers by the text's looks. mlx-lm's parsers would guess a cut-off call's gaps."""
        if tags := next((tags for tags in READINGS if tags.fits(text)), None):
            return (lambda text: self._tagged(tags, text), self._json)
        for row in VALUE_CALLS:
            if text.startswith(row.begins):
                if row.python:
                    return (self._json, lambda text: pythonic_calls(text, self.parameters))
                return (gemma_calls, self._by_mlx_lm)
        if text in self._tools:  # a call without arguments, where those would have tags
            return (lambda name: [(name, {})],)
        return (self._json, self._by_mlx_lm)

    def typed(self, name: str, arguments: dict[str, Any]) -> ParsedCall:
        """Type a call's arguments by its tool. Raises ValueError for what is no call."""
        if not NAME.fullmatch(name):
            raise ValueError(f"no name of a tool: {name!r}")
        kinds = self.parameters(name)
        arguments = {key: coerce(value, kinds.get(key)) for key, value in arguments.items()}
        return ParsedCall(name, json_text(arguments))

    def accepts(self, call: ParsedCall) -> bool:
        """Return whether `call` is one of a listed tool whose schema allows its arguments."""
        if (tool := self._tools.get(call.name)) is None:
            return False
        import jsonschema_rs  # Few answers need it.

        try:
            schema = jsonschema_rs.validator_for(tool.parameters, retriever=_refuse)
        except ValueError:  # It is no schema, or refers to another place: it says nothing.
            return True
        return schema.is_valid(json.loads(call.arguments))

    def parameters(self, name: str) -> dict[str, Set[str]]:
        """Return the JSON types that each parameter of a tool may have; none for an untyped one."""
        tool = self._tools.get(name)
        properties = tool.parameters.get("properties") if tool else None
        if tool is None or not isinstance(properties, dict):
            return {}
        return {key: kinds_of(schema, tool.parameters) for key, schema in properties.items()}

    # ----------------------------------------------------------------- spellings

    def _json(self, text: str) -> list[_Call] | None:
        calls: list[_Call] = []
        at, text = 0, double_escapes(text)
        while at < len(text):  # one value, or several behind one another
            value, end = _decoder.raw_decode(text, at)
            at = end + len(text[end:]) - len(text[end:].lstrip(" \t\r\n,;"))
            calls += [_call_of(item) for item in (value if isinstance(value, list) else [value])]
        return calls

    def _tagged(self, tags: TagReading, text: str) -> list[_Call] | None:
        calls: list[_Call] = []
        at = 0
        while head := tags.head.match(text, at):
            at = head.end()
            name, arguments = head[1].strip(), {}
            kinds = self.parameters(name)
            while parameter := tags.parameter.match(text, at):
                at = parameter.end()
                key = parameter[1].strip()
                arguments[key] = typed_text(tags.value(parameter), kinds.get(key))
            if (end := tags.end.match(text, at)) is None:
                return None
            at = end.end()
            calls.append((name, arguments))
        return calls if at == len(text) else None

    def _by_mlx_lm(self, text: str) -> list[_Call] | None:
        if self._fallback is None:
            return None
        value = self._fallback(text, self._listed)
        calls = [_call_of(item) for item in (value if isinstance(value, list) else [value])]
        # GLM's parser makes `{"raw": text}` of what it can't read.
        if any(set(call[1]) == {"raw"} and "raw" not in self.parameters(call[0]) for call in calls):
            return None
        return calls


def _refuse(uri: str) -> Any:
    raise ValueError(f"{uri} is not read: a schema refers to itself alone")


_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')


def double_escapes(text: str) -> str:
    """Double each backslash that begins no escape of JSON, so that it stands for itself, as in Python.

    Models write `"\\d+"` for a regular expression. vLLM shows such a call as text, SGLang drops it.
    """
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda escape: escape[0] if len(escape[0]) > 1 else "\\\\", text)


def loads(text: str) -> Any:
    r"""Read JSON as models write it: raw newlines and `\d` in strings, huge numbers. Raises ValueError."""
    return _decoder.decode(double_escapes(text))


def valid_object(text: str) -> str:
    """Return `text` as strict JSON if it is an object as models write it, else an empty one."""
    try:
        return json_text(value) if isinstance(value := loads(text), dict) else "{}"
    except (ValueError, RecursionError):
        return "{}"


def _finite(text: str) -> float:
    return max(-sys.float_info.max, min(float(text), sys.float_info.max))


_decoder = json.JSONDecoder(strict=False, parse_float=_finite)


_HALF = re.compile("[\ud800-\udfff]")


def json_text(value: Any) -> str:
    """Return JSON text, U+FFFD for half of a surrogate pair. Raises ValueError for NaN and the infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() else _HALF.sub("\ufffd", text)


def _call_of(item: Any) -> _Call:
    """Read name and arguments of a call from parsed JSON. Raises ValueError."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise ValueError("no call")
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):
        arguments = loads(arguments) if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("arguments are no object")
    return item["name"], arguments


# --------------------------------------------------------------------------- values by schema

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def kinds_of(schema: Any, root: dict[str, Any]) -> Set[str]:
    """Return the JSON types that `schema` allows, whose `$ref` leads into `root`; empty: unknown."""
    try:
        alternatives = branches(schema, root, strict=False)
    except Unenforceable:
        declared = schema.get("type") if isinstance(schema, dict) else None
        return {kind for kind in _KINDS if kind in (declared if isinstance(declared, list) else [declared])}
    told = {branch["type"] for branch in alternatives if "type" in branch}
    values = [value for branch in alternatives for value in branch.get("enum", ())]
    return told | {kind for kind in _KINDS for value in values if _is(value, {kind})}


def coerce(value: Any, kinds: Set[str] | None) -> Any:
    """Convert `value` to a type of `kinds`, where that needs no guess."""
    if not kinds or _is(value, kinds):
        return value
    if isinstance(value, str):
        return _literal(value, kinds, value)
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return int(value)
    if "string" in kinds and value is not None:
        return json.dumps(value, ensure_ascii=False)
    return value


def typed_text(text: str, kinds: Set[str] | None) -> Any:
    """Type a value of bare text between tags. `kinds` None: the tool has no such parameter."""
    if kinds is None:
        return _literal(text.strip(), _KINDS.keys(), text)
    if "string" in kinds:
        # Of `string or null`, the word null is null; of `string or integer`, digits stay text.
        return None if "null" in kinds and text.strip() == "null" else text
    # No type told: only what can't be meant as text.
    return _literal(text.strip(), kinds or {"array", "object"}, text)


def _literal(text: str, kinds: Set[str], default: Any) -> Any:
    """Read `text` as a JSON (or Python) literal of one of `kinds`; returns `default` for others."""
    for parse in (loads, ast.literal_eval):
        try:
            value = parse(text)
            json_text(value)  # NaN, and sets and bytes within Python's literals, are none of JSON's.
        except Exception:
            continue
        if isinstance(value, float) and value.is_integer() and kinds.isdisjoint({"number"}):
            value = int(value)
        if _is(value, kinds):
            return value
    if "boolean" in kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return default


def _is(value: Any, kinds: Set[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in kinds
    return any(isinstance(value, _KINDS[kind]) for kind in kinds if kind != "boolean")
