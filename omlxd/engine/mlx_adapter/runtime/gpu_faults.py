"""GPU faults: errors after which a process must compute nothing more, and what ends it.

MLX tells of a Metal command buffer that failed once, by a RuntimeError in whatever call comes next: that may
be another request's, whose handler would go on with KV that was never computed. Later the driver may ignore
all that the process submits. So whoever meets such an error ends the process. A handler that goes on after
errors either logs the error and its trace, which `_Listener` hears, or calls `end_if_fault`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

MOST_CHARS = 300
"""Of what an error says."""

_marks: Sequence[str] = ()
_end: Callable[[str], None] | None = None


def watch(marks: Sequence[str], end: Callable[[str], None]) -> None:
    """Call `end`, with what the error says, at each error whose text has one of `marks`."""
    global _marks, _end
    _marks, _end = marks, end
    root = logging.getLogger()
    if not any(isinstance(each, _Listener) for each in root.handlers):
        root.addHandler(_Listener())


def end_if_fault(error: BaseException | None) -> None:
    """End the process if `error`, or what it came of, is a GPU fault."""
    seen: set[int] = set()
    while error is not None and _end is not None and id(error) not in seen:
        # MLX raises no other type; an error of another may quote a client's text.
        if isinstance(error, RuntimeError) and any(mark in str(error) for mark in _marks):
            _end(str(error).splitlines()[0][:MOST_CHARS])
        seen.add(id(error))
        error = error.__cause__ or error.__context__


class _Listener(logging.Handler):
    """Hears of each error that is logged with its trace."""

    def createLock(self) -> None:
        self.lock = None  # It keeps nothing, and no other thread waits for one that ends the process.

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            end_if_fault(record.exc_info[1])
