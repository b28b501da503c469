"""Lengths of time as people write them: `90s`, `5m`, `2h`, `1h30m`, plain seconds, negative for ever."""

from __future__ import annotations

import math
import re

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MOST_CHARS = 64
"""A client may send any text, and looking for units takes the square of its length."""
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_WHOLE = re.compile(r"-?(?:\d+(?:\.\d+)?|(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+)")


def duration(value: str | float) -> float:
    """Seconds that `value` stands for; infinite for anything negative, as Ollama has it.

    Raises ValueError for what is no length of time.
    """
    text = str(value).strip().lower()
    if len(text) > MOST_CHARS or not _WHOLE.fullmatch(text):
        raise ValueError(text)
    if text.startswith("-"):
        return math.inf
    parts = _PART.findall(text)
    return sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else float(text)


def spoken(seconds: float | None) -> str:
    """`seconds` as a person reads it: `45 s`, `5 min`, `2.5 h`; None and infinity: `for good`."""
    if seconds is None or math.isinf(seconds):
        return "for good"
    for unit, factor in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= factor:
            return f"{seconds / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.0f} s"
