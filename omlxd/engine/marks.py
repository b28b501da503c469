"""Marks in texts on their way through a chat template: characters that no text of the prompt holds.

Unicode keeps thirty-two code points from U+FDD0 on that are no characters and never will be. A mark is
one of them that the prompt doesn't hold; it is put into a message before the template is applied,
found again in what the template made, and taken out before the text is tokenised.

The first use is control tokens that somebody typed. `<|im_end|>` in a file that a tool has read must
not end the turn: a mark goes behind its first letter, and the text is cut there before it is
tokenised, so the tokenizer never sees the token whole. Only tokens that the tokenizer calls `special`
are treated so: `<think>` or `<tool_call>` are text by their own tokenizer's word where it does not, and
templates look for them in an assistant's content.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


def unused_marks(text: str, count: int) -> list[str]:
    """Marks that don't occur in `text`; fewer than `count` when somebody has used them up."""
    return [mark for mark in MARKS if mark not in text][:count]


def special_starts(contents: list[str]) -> re.Pattern[str] | None:
    """Matches (empty) behind the first letter of each special token in a text; None: there is none."""
    contents = [content for content in contents if len(content) > 1]
    if not contents:
        return None
    by_first: dict[str, list[str]] = {}
    for content in contents:
        by_first.setdefault(content[0], []).append(re.escape(content[1:]))
    # A look-behind and a look-ahead, so that tokens which overlap are all found.
    return re.compile("|".join(f"(?<={re.escape(a)})(?={'|'.join(rest)})" for a, rest in by_first.items()))


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON-like `value`, every string in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    return value


def holds(value: Any, pattern: re.Pattern[str]) -> bool:
    """Whether any string in JSON-like `value` matches."""
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, dict):
        return any(pattern.search(key) or holds(item, pattern) for key, item in value.items())
    return isinstance(value, list) and any(holds(item, pattern) for item in value)
