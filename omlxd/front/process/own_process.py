"""Sets up a process that runs engines: its folder, its files, its signals, its log."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import os
import resource
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from ...errors import ConfigError
from .tasks import show_on_signal

if TYPE_CHECKING:
    from ...config import Settings
    from ...kv.ledger.ledger import LedgerBusy
    from ..engines.pool import EnginePool

log = logging.getLogger(__name__)

FILES = 8192
"""Open files asked of the system."""
WARN_AGAIN_S = 60.0


def make_base(settings: Settings) -> None:
    """Make the base folder, unless it is there. Its files show what was asked: its owner alone can read it.

    Raises ConfigError.
    """
    try:
        settings.base_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        source = settings.sources["base_path"]
        source = "--base-path" if source == "default" else source
        raise ConfigError(f"{source}: {settings.base_path} can't be made: {error.strerror}.") from error


def allow_many_files() -> None:
    """Raise the limit of open files: a connection is one, and service managers start us with 256 or 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit of its own.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def what_to_do(busy: LedgerBusy) -> str:
    """Say what to do if another omlxd holds the SSD cache's folder."""
    return (
        f"the SSD cache {busy}; stop that one, give this one another folder with --paged-ssd-cache-dir, "
        "or start it with --if-cache-busy no-ssd."
    )


class LogUnexpected:
    """Logs asyncio's exceptions without their text, which may be a prompt's."""

    def __init__(self) -> None:
        self._warned_of_files_at = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, asyncio.CancelledError):
            return  # Python 3.11's streams report every connection that we end.
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            if loop.time() - self._warned_of_files_at > WARN_AGAIN_S:
                self._warned_of_files_at = loop.time()
                log.warning("as many connections are open as files allow; others wait for them to close")
            return
        log.error("%s", context["message"], exc_info=error)


def pool_and_stop(settings: Settings) -> tuple[EnginePool, asyncio.Event]:
    """Return a pool that has begun nothing, and the event that a signal sets. In the running loop."""
    from ..engines.link import ENGINE_COMMAND
    from ..engines.pool import EnginePool

    command = shlex.split(os.environ.get("OMLXD_ENGINE_COMMAND", ""))
    pool = EnginePool(settings, command or ENGINE_COMMAND)
    stop = asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(LogUnexpected())
    _stop_on_signals(stop, pool)
    return pool, stop


def _stop_on_signals(stop: asyncio.Event, pool: EnginePool) -> None:
    """End in order at the first signal, and at once at the second."""

    def on_signal() -> None:
        if stop.is_set():
            pool.kill()
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # The terminal's; see front/process/serve.py.
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    show_on_signal()


def leave(status: int) -> NoReturn:
    """End the process once all has ended in order.

    A loop that closes gives its signals back to the system, and Python's own end those that it has left:
    from then on a second SIGTERM would be the exit status. And neither waits here for a thread.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # A closed window takes nothing any more; a stream that was closed from the beginning is None.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
