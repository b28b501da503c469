"""Parameters of which a few are in the fast suite. CI runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

SOME_FAMILIES = ("qwen3", "gemma3_text", "qwen3_5", "mamba2", "deepseek_v3", "gpt_oss")
"""One of each kind of cache, and those whose attention is the oddest."""


def rest_slow(values: Iterable[Any], *fast: Any) -> list[Any]:
    """`values`, all slow but those in `fast`. A tuple is of several parameters."""
    return [
        value
        if value in fast
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]


def counts(fast: int, slow: int) -> pytest.MarkDecorator:
    """A test's `count`: how much it tries."""
    return pytest.mark.parametrize("count", rest_slow((fast, slow), fast))


def diagonal(rows: Iterable[str], columns: Iterable[Any], whole: Iterable[str] = SOME_FAMILIES) -> list[Any]:
    """Pairs of `rows` in `whole` with each column, of any other row with one, in turn. All are slow."""
    columns, whole = list(columns), set(whole)
    return [
        pytest.param(row, column, marks=pytest.mark.slow)
        for number, row in enumerate(rows)
        for column in (columns if row in whole else [columns[number % len(columns)]])
    ]
