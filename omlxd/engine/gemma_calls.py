"""Gemma's calls: `call:NAME{key:VALUE,…}`, where text stands between marks and all else as in JSON.

VALUE  <|"|>text<|"|> (Gemma 4), <escape>text<escape> (FunctionGemma), a number, true, false, null,
       [VALUE,…], {key:VALUE,…}
"""

from __future__ import annotations

import json
import re
from typing import Any

_MARKS = ('<|"|>', "<escape>")
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
    for mark in _MARKS:
        if text.startswith(mark, at):
            end = text.index(mark, at + len(mark))
            return text[at + len(mark) : end], end + len(mark)
    if text.startswith('"', at):  # as in JSON, where a model forgets its own marks
        return _json_string(text, at)
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
    found: dict[str, Any] = {}
    at = _after_space(text, at, depth)
    while not text.startswith("}", at):
        key, at = _key(text, at)
        found[key], at = _value(text, at, depth)
        at = _between(text, at, "}")
    return found, at + 1


def _array(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    at = _after_space(text, at, depth)
    while not text.startswith("]", at):
        value, at = _value(text, at, depth)
        found.append(value)
        at = _between(text, at, "]")
    return found, at + 1


def _key(text: str, at: int) -> tuple[str, int]:
    for mark in _MARKS:
        if text.startswith(mark, at):
            end = text.index(mark, at + len(mark))
            if (colon := _COLON.match(text, end + len(mark))) is None:
                raise ValueError("no key")
            return text[at + len(mark) : end], colon.end()
    if text.startswith('"', at):
        key, after = _json_string(text, at)
        if colon := _COLON.match(text, after):
            return key, colon.end()
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
