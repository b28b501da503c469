"""Reads calls whose arguments are a language of their own.

Gemma: `call:NAME{key:VALUE,…}`. VALUE is <|"|>text<|"|> (Gemma 4), <escape>text<escape> (FunctionGemma), a
number, true, false, null, [VALUE,…] or {key:VALUE,…}.

Pythonic: `[name(key="text", n=2), other()]`, sometimes with JSON's words; keys may be Python's keywords.
"""

from __future__ import annotations

import ast
import io
import json
import re
import tokenize
from collections.abc import Callable, Iterable
from typing import Any

from ..constrain.call_formats import VALUE_CALLS

_QUOTES = tuple(row.values.quote for row in VALUE_CALLS if row.values.quote)
_HEAD = re.compile(r"\s*call:([^\s{}]+)\{")
_KEY = re.compile(r"([^\s:{}\[\],<]+)\s*:\s*")
_NUMBER = re.compile(r"-?\d+(?P<float>(?:\.\d+)?(?:[eE][+-]?\d+)?)(?=[\s,\]}])")
_WORD = re.compile(r"(true|false|null|None|True|False)(?=[\s,\]}])")
_WORDS: dict[str, Any] = {"true": True, "True": True, "false": False, "False": False}
_COLON = re.compile(r"\s*:\s*")
_json_string = json.JSONDecoder(strict=False).raw_decode
_SPACE = re.compile(r"\s*")
MAX_DEPTH = 64


def gemma_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """(name, arguments) of each call; None: `text` holds something else."""
    calls: list[tuple[str, dict[str, Any]]] = []
    at = 0
    while head := _HEAD.match(text, at):
        try:
            arguments, at = _object(text, head.end(), MAX_DEPTH)
        except ValueError:
            return None
        calls.append((head[1], arguments))
    return calls if calls and not text[at:].strip() else None


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """The value at `at` and where it ends. Raises ValueError."""
    if quoted := _quoted(text, at):
        return quoted
    if text.startswith("{", at):
        return _object(text, at + 1, depth - 1)
    if text.startswith("[", at):
        return _array(text, at + 1, depth - 1)
    if match := _NUMBER.match(text, at):
        return (float(match[0]) if match["float"] else int(match[0])), match.end()
    if match := _WORD.match(text, at):
        return _WORDS.get(match[0]), match.end()
    raise ValueError("no value")


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    at = _after_space(text, at, depth)
    while not text.startswith("}", at):
        key, at = _key(text, at)
        members[key], at = _value(text, at, depth)
        at = _between(text, at, "}")
    return members, at + 1


def _array(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    at = _after_space(text, at, depth)
    while not text.startswith("]", at):
        value, at = _value(text, at, depth)
        items.append(value)
        at = _between(text, at, "]")
    return items, at + 1


def _quoted(text: str, at: int) -> tuple[str, int] | None:
    """A string and where it ends; None: no string begins here. Raises ValueError."""
    for quote in _QUOTES:
        if text.startswith(quote, at):
            end = text.index(quote, at + len(quote))
            return text[at + len(quote) : end], end + len(quote)
    # As in JSON, where a model forgets its own quotes.
    return _json_string(text, at) if text.startswith('"', at) else None


def _key(text: str, at: int) -> tuple[str, int]:
    if quoted := _quoted(text, at):
        if (colon := _COLON.match(text, quoted[1])) is None:
            raise ValueError("no key")
        return quoted[0], colon.end()
    match = _KEY.match(text, at)
    if match is None:
        raise ValueError("no key")
    return match[1], match.end()


def _between(text: str, at: int, close: str) -> int:
    """Behind a comma, or at `close`."""
    at = _after_space(text, at, 1)
    if text.startswith(",", at):
        return _after_space(text, at + 1, 1)
    if not text.startswith(close, at):
        raise ValueError("neither a comma nor an end")
    return at


def _after_space(text: str, at: int, depth: int) -> int:
    if not depth:
        raise ValueError("nested too deeply")
    match = _SPACE.match(text, at)
    return match.end() if match else at


_PYTHONIC_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_PYTHONIC_KEY = "key_of_a_call_"
_SKIPPED = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'', re.DOTALL)
"""A string, in which models leave newlines as they are."""


def pythonic_calls(
    text: str, parameters: Callable[[str], Iterable[str]]
) -> list[tuple[str, dict[str, Any]]] | None:
    """Return (name, arguments) of each call, or None. Raises anything. `parameters`: a tool's, in order."""
    if '"""' not in text and "'''" not in text:
        text = _STRING.sub(lambda string: string[0].replace("\n", "\\n"), text)
    source, names = _renamed(text)
    body = ast.parse(source, mode="eval").body
    if not isinstance(body, ast.List) or not body.elts or len(body.elts) != len(names):
        return None
    calls: list[tuple[str, dict[str, Any]]] = []
    for node, name in zip(body.elts, names, strict=True):
        if not isinstance(node, ast.Call):
            return None
        keys = list(parameters(name))[: len(node.args)] if node.args else []
        positional = {key: _pythonic_value(value) for key, value in zip(keys, node.args, strict=True)}
        named = {
            (each.arg or "").removeprefix(_PYTHONIC_KEY): _pythonic_value(each.value)
            for each in node.keywords
        }
        calls.append((name, positional | named))
    return calls


def _renamed(text: str) -> tuple[str, list[str]]:
    """The source with names that Python allows, and the calls' names in order."""
    out: list[str] = []
    names: list[str] = []
    depth, name = 0, ""
    tokens = [
        token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in _SKIPPED
    ]
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        word = token.string
        if token.type == tokenize.ERRORTOKEN and not word.isspace():
            raise ValueError("no Python")
        if depth == 1 and word not in ("(", ")", ",", "]"):
            name += word
            continue
        if depth == 1 and word == "(":
            names.append(name)
            out.append(f"call_{len(names)}")
            name = ""
        depth += (word in ("(", "[", "{")) - (word in (")", "]", "}"))
        key = depth == 2 and token.type == tokenize.NAME and after is not None and after.string == "="
        out.append(_PYTHONIC_KEY + word if key else word)
    return " ".join(out), names


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
