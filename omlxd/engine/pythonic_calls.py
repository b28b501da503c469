"""Calls as a list of Python's: `[name(key="text", n=2), other()]`, containers at times in JSON's words.

Names are any that a tool may have, and keys may be Python's keywords: a tool's author knows of neither.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable
from typing import Any

_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_KEY = "key_of_a_call_"
_SKIPPED = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'', re.DOTALL)
"""A string, in which models leave newlines as they are."""


def pythonic_calls(
    text: str, parameters: Callable[[str], Iterable[str]]
) -> list[tuple[str, dict[str, Any]]] | None:
    """(name, arguments) of each call; None: `text` holds something else. May raise anything at all.

    parameters  a tool's name → its parameters' names, in order, for values that stand without one
    """
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
        given = {key: _value(value) for key, value in zip(keys, node.args, strict=True)}
        named = {(each.arg or "").removeprefix(_KEY): _value(each.value) for each in node.keywords}
        calls.append((name, given | named))
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
        told = token.string
        if token.type == tokenize.ERRORTOKEN and not told.isspace():
            raise ValueError("no Python")
        if depth == 1 and told not in ("(", ")", ",", "]"):
            name += told
            continue
        if depth == 1 and told == "(":
            names.append(name)
            out.append(f"call_{len(names)}")
            name = ""
        depth += (told in ("(", "[", "{")) - (told in (")", "]", "}"))
        key = depth == 2 and token.type == tokenize.NAME and after is not None and after.string == "="
        out.append(_KEY + told if key else told)
    return " ".join(out), names


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
        case _:
            return ast.literal_eval(node)
