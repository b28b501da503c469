"""Tracebacks that tell where and what kind, but not what was said.

The text of an exception can hold a piece of a prompt: a ValueError that quotes its argument, a
KeyError whose key was the user's. Above debug level only the texts of `TELLING` are written.
"""

from __future__ import annotations

import logging
import traceback
from types import TracebackType

from .errors import ConfigError, ModelError

TELLING = (OSError, ImportError, AttributeError, NameError, MemoryError, ConfigError, ModelError)
"""Their texts tell of the machine or of the code, not of values."""

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def private_trace(error: BaseException) -> str:
    """A traceback like Python's own, causes included, with no text but that of `TELLING`."""
    whole = traceback.TracebackException.from_exception(error, capture_locals=False)
    lines = list(_lines(whole, error))
    return "".join(lines).rstrip("\n")


def _lines(told: traceback.TracebackException, error: BaseException):
    if told.__cause__ is not None and error.__cause__ is not None:
        yield from _lines(told.__cause__, error.__cause__)
        yield "\nThe above exception was the direct cause of the following exception:\n\n"
    elif told.__context__ is not None and error.__context__ is not None and not told.__suppress_context__:
        yield from _lines(told.__context__, error.__context__)
        yield "\nDuring handling of the above exception, another exception occurred:\n\n"
    yield "Traceback (most recent call last):\n"
    yield from told.stack.format()
    # MLX's errors (out of memory, a lost device) are RuntimeErrors, which carry no text of requests.
    telling = isinstance(error, TELLING) or type(error) is RuntimeError
    yield f"{type(error).__module__}.{type(error).__qualname__}{f': {error}' if telling else ''}\n"


class PrivateFormatter(logging.Formatter):
    """Python's, but for tracebacks; whole ones where the logger writes debug lines."""

    def formatException(self, ei: ExcInfo) -> str:
        if ei[1] is None or logging.getLogger("omlxd").isEnabledFor(logging.DEBUG):
            return super().formatException(ei)
        return private_trace(ei[1])
