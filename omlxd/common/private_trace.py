"""Tracebacks without the texts of exceptions, which may quote a prompt.

A ValueError quotes its argument, a KeyError its key. Above debug level the log shows only the texts of
`LOGGABLE` errors, and of errors whose class says `loggable = True`.

Each line of an engine starts with its own level: the front filters these lines again, and levels can change
while both processes run.
"""

from __future__ import annotations

import logging
import traceback
from types import TracebackType

LOGGABLE = (OSError, ImportError, AttributeError, NameError, MemoryError)
"""Errors whose texts describe the machine or the code, not values."""

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


def private_trace(error: BaseException) -> str:
    """Format a traceback like Python's own, causes included, with the texts of loggable errors alone."""
    trace = traceback.TracebackException.from_exception(error, capture_locals=False)
    return "".join(_lines(trace, error)).rstrip("\n")


def _lines(trace: traceback.TracebackException, error: BaseException):
    if trace.__cause__ is not None and error.__cause__ is not None:
        yield from _lines(trace.__cause__, error.__cause__)
        yield "\nThe above exception was the direct cause of the following exception:\n\n"
    elif trace.__context__ is not None and error.__context__ is not None and not trace.__suppress_context__:
        yield from _lines(trace.__context__, error.__context__)
        yield "\nDuring handling of the above exception, another exception occurred:\n\n"
    yield "Traceback (most recent call last):\n"
    yield from trace.stack.format()
    # MLX's errors (out of memory, a lost device) are RuntimeErrors, which carry no text of requests.
    shown = isinstance(error, LOGGABLE) or getattr(error, "loggable", False) or type(error) is RuntimeError
    yield f"{type(error).__module__}.{type(error).__qualname__}{f': {error}' if shown else ''}\n"


class PrivateFormatter(logging.Formatter):
    """Formats records with private tracebacks; with full ones where the logger writes debug lines."""

    def formatException(self, ei: ExcInfo) -> str:
        if ei[1] is None or logging.getLogger("omlxd").isEnabledFor(logging.DEBUG):
            return super().formatException(ei)
        return private_trace(ei[1])


class LineFormatter(PrivateFormatter):
    """Formats each line of a record as `LEVEL logger: text`.

    At debug level the full traceback follows the private one, in lines of level DEBUG, so that the reader can
    drop them.
    """

    LONGEST = 8000
    """Characters of a line: the reader cuts longer lines, and a second piece has no level."""

    def formatException(self, ei: ExcInfo) -> str:
        return private_trace(ei[1]) if ei[1] is not None else ""

    def format(self, record: logging.LogRecord) -> str:
        lines = [(record.levelname, line) for line in super().format(record).split("\n")]
        raised = record.exc_info and record.exc_info[1] is not None
        if raised and logging.getLogger("omlxd").isEnabledFor(logging.DEBUG):
            assert record.exc_info
            trace = logging.Formatter.formatException(self, record.exc_info)
            lines += [("DEBUG", line) for line in trace.split("\n")]
        return "\n".join(f"{level} {record.name}: {line[: self.LONGEST]}" for level, line in lines)
