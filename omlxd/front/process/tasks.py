"""Logs what each asyncio task waits for: the stack of a request that hangs."""

from __future__ import annotations

import asyncio
import logging
from types import CoroutineType

from ...common.stacks import SIGNAL, show_threads_on_signal

log = logging.getLogger(__name__)


def show_on_signal() -> None:
    """Log the tasks of the running event loop at the signal, behind the stacks of threads."""
    asyncio.get_running_loop().add_signal_handler(SIGNAL, lambda: log.warning("tasks:\n%s", tasks()))
    show_threads_on_signal(chain=True)


def tasks() -> str:
    """List a line for each task, and one for each call in it, the innermost last."""
    lines: list[str] = []
    for task in asyncio.all_tasks():
        lines.append(task.get_name())
        step = task.get_coro()
        while isinstance(step, CoroutineType) and (frame := step.cr_frame) is not None:
            lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {step.__qualname__}')
            step = step.cr_await
    return "\n".join(lines)
