"""Reads calls whose arguments are a language of their own.

Gemma: `call:NAME{key:VALUE,…}`. VALUE is <|"|>text<|"|> (Gemma 4), <escape>text<escape> (FunctionGemma), a
number, true, false, null, [VALUE,…] or {key:VALUE,…}.

Pythonic: `[name(key="text", n=2), other()]`, sometimes with JSON's words; keys may be Python's keywords.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from ...constrain.call_formats import VALUE_CALLS

_STRING = r'"(?:[^"\\]|\\.)*"'
_QUOTES = "|".join(re.escape(row.values.quote) for row in VALUE_CALLS if row.values.quote)
_GEMMA = re.compile(
    rf"(?P<quote>{_QUOTES})(?P<text>.*?)(?P=quote)"
    rf"|{_STRING}"  # As in JSON, where a model forgets its own quotes.
    r"|(?<![^\s}])call:(?P<name>[^\s{}\[\],<\"]++)(?={)"
    r"|(?<![^\s{}\[\],])(?P<key>[^\s:{}\[\],<\"]++)(?=\s*+:)"
    r"|(?P<word>None|True|False)(?=[\s,\]}])"
    r"|,(?P<last>)(?=\s*+[\]}])",
    re.DOTALL,
)
"""Matches Gemma's deviations from JSON, and strings, so that nothing within them is replaced. Words are taken
whole, from their beginning: else a model that repeats itself takes minutes.
"""
_WORDS = {"None": "null", "True": "true", "False": "false"}
_decoder = json.JSONDecoder(strict=False)


def gemma_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Return (name, arguments) of each call; None for other text. Raises anything."""
    text = _GEMMA.sub(_in_json, text).strip()
    values: list[Any] = []
    at = 0
    while at < len(text):  # a name, its arguments, the next name
        value, end = _decoder.raw_decode(text, at)
        values.append(value)
        at = end + len(text[end:]) - len(text[end:].lstrip())
    calls = list(zip(values[::2], values[1::2], strict=True))
    named = all(isinstance(name, str) and isinstance(arguments, dict) for name, arguments in calls)
    return calls if calls and named else None


def _in_json(match: re.Match[str]) -> str:
    kind = match.lastgroup
    if kind is None:
        return match[0]
    return _WORDS[match[kind]] if kind == "word" else json.dumps(match[kind]) if kind != "last" else ""


_PYTHONIC_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_KEY = "key_of_a_call_"
_PYTHONIC = re.compile(
    rf"\"\"\".*?\"\"\"|'''.*?'''|(?P<string>{_STRING}|'(?:[^'\\]|\\.)*')"
    r"|(?<![\w.:/-])(?P<name>[\w./-][\w.:/-]*+)(?<!:)\s*+\("
    r"|(?<!\w)(?P<key>[^\W\d]\w*+)(?=\s*+=)",
    re.DOTALL,
)


_PAIR = re.compile(r"(?<!\\)\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
"""Matches the two JSON escapes of one letter."""


def pythonic_calls(
    text: str, parameters: Callable[[str], Iterable[str]]
) -> list[tuple[str, dict[str, Any]]] | None:
    """Return (name, arguments) of each call, or None. Raises anything. `parameters`: a tool's, in order."""
    names: list[str] = []

    def allowed(match: re.Match[str]) -> str:
        """Spell a match as Python allows: models leave newlines in strings, and names may be its keywords."""
        match match.lastgroup:
            case "string":
                paired = _PAIR.sub(lambda pair: json.loads(f'"{pair[0]}"'), match[0])
                return paired.replace("\n", "\\n")
            case "name":
                names.append(match["name"])
                return f"call_{len(names)}("
            case "key":
                return _KEY + match["key"]
        return match[0]

    body = ast.parse(_PYTHONIC.sub(allowed, text).strip(), mode="eval").body
    if not isinstance(body, ast.List) or not body.elts or len(body.elts) != len(names):
        return None
    calls: list[tuple[str, dict[str, Any]]] = []
    for node, name in zip(body.elts, names, strict=True):
        if not isinstance(node, ast.Call):
            return None
        keys = list(parameters(name))[: len(node.args)] if node.args else []
        positional = {key: _pythonic_value(value) for key, value in zip(keys, node.args, strict=True)}
        named = {(each.arg or "").removeprefix(_KEY): _pythonic_value(each.value) for each in node.keywords}
        calls.append((name, positional | named))
    return calls


def _pythonic_value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=word) if word in _PYTHONIC_WORDS:
            return _PYTHONIC_WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_pythonic_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {
                str(_pythonic_value(key)): _pythonic_value(value) for key, value in pairs if key is not None
            }
        case _:
            return ast.literal_eval(node)
