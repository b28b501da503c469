"""Tracebacks that tell where and what kind, but not what was said.

The text of an exception can hold a piece of a prompt: a ValueError that quotes its argument, a
KeyError whose key was the user's. Above debug level only the texts of `TELLING` are written.

The level can change while a process runs, and an engine's lines are judged once more by the front that
reads them: so each of them says its own level.
"""

from __future__ import annotations

import logging
import traceback
from types import TracebackType

from ..errors import ConfigError, ModelError

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


class LineFormatter(PrivateFormatter):
    """`LEVEL logger: text` in each line of a record.

    At debug level the whole traceback follows the private one, in lines of that level: whoever reads
    them may have left it by then.
    """

    LONGEST = 8000
    """Characters of a line. Of one that is too long for its reader, the end would come without a level."""

    def formatException(self, ei: ExcInfo) -> str:
        return private_trace(ei[1]) if ei[1] is not None else ""

    def format(self, record: logging.LogRecord) -> str:
        lines = [(record.levelname, line) for line in super().format(record).split("\n")]
        whole = record.exc_info and record.exc_info[1] is not None
        if whole and logging.getLogger("omlxd").isEnabledFor(logging.DEBUG):
            assert record.exc_info
            trace = logging.Formatter.formatException(self, record.exc_info)
            lines += [("DEBUG", line) for line in trace.split("\n")]
        return "\n".join(f"{level} {record.name}: {line[: self.LONGEST]}" for level, line in lines)
