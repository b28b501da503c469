"""Messages to systemd: sd_notify(3), a datagram of `NAME=value` lines. launchd wants nothing.

Without NOTIFY_SOCKET every call does nothing, and nothing wakes the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import MutableMapping


class Notifier:
    """Sends the messages, and takes its variables out of `environ`, so that no child speaks for us."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ):
        address = environ.pop("NOTIFY_SOCKET", "")
        # An abstract address is written with @ and means a leading zero byte.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watchdog, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        wanted = watchdog.isdigit() and pid in ("", str(os.getpid()))
        self._interval_s = int(watchdog) / 2e6 if wanted and self._address else 0.0
        self._timer: asyncio.TimerHandle | None = None

    def ready(self, status: str = "") -> None:
        """Report that the daemon serves, and the end of a reload."""
        self._send("READY=1", f"STATUS={status}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def reloading(self) -> None:
        # systemd compares this with when it asked.
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def watch(self) -> None:
        """Ping the watchdog while the event loop runs."""
        if self._interval_s:
            self._send("WATCHDOG=1")
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self.watch)

    def unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        # A manager that is gone or busy must not stop us.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.setblocking(False)
            to.sendto("\n".join(lines).encode(), self._address)
