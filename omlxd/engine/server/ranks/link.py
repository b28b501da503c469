"""Frames between two ranks, and whether the other one lives.

A thread reads. It alone answers pings, so that a long pass is never taken for a stopped process.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from .... import wire
from ....kv.peer.duplex import Duplex
from ....wire.plan import Ping, Pong

PING_S = 0.5
SILENCE_S = 4.0
"""Seconds without a frame after which another rank is taken for stopped: with `PING_S`, and what ending a
process takes, within five."""
LOADING_S = 20.0
"""The same of a rank on another machine that loads, as nobody here sees whether it is stopped."""
BUSY_S = 60.0
"""The same of a process of this machine that is not stopped. It waits for a processor: with a load of 15 on
two, the thread that had Python's lock while a tokenizer was read got 0.2 s of one within 13."""

_READ = 1 << 18


class Link:
    """One end of a connected socket. `type`: of the frames that come. Any thread.

    held  makes the answer to a ping
    last  the other end's last answer to one
    """

    def __init__(
        self,
        sock: socket.socket | Duplex,
        type: Any,
        clock: Callable[[], float] = time.monotonic,
        held: Callable[[], Pong] = Pong,
    ):
        self._sock = sock
        self._decoder = wire.FrameDecoder(type)
        self._lock = threading.Lock()
        self._clock = clock
        self._heard = False  # Since `silence` was asked for last.
        self._looked_at, self._silent = math.inf, 0.0
        self._held = held
        self.last = Pong()

    def send(self, message: Any) -> None:
        """Whether the other end still reads, the reader's thread learns."""
        frame = wire.encode(message)
        with self._lock, contextlib.suppress(OSError):
            self._sock.sendall(frame)

    def read(self, take: Callable[[Any], None]) -> None:
        """Give each frame to `take`, but for pings, until the other end is closed. Raises ValueError."""
        while data := self._receive():
            self._heard = True
            for message in self._decoder.feed(data):
                if isinstance(message, Ping):
                    self.send(self._held())
                elif isinstance(message, Pong):
                    self.last = message
                else:
                    take(message)

    def met(self) -> None:
        """The ranks have met, while MLX let no other thread of this process run: nothing was heard."""
        self._heard = True

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(_READ)
        except OSError:
            return b""

    def is_lost(self, pid: int | None, *, loads: bool) -> bool:
        """Whether the other rank is silent for longer than one that lives; ask each `PING_S`.

        pid    of its process; None: it is on another machine. `loads`: it loads its share
        """
        silent = self.silence()
        return silent > SILENCE_S and silent > silence_of(pid, loads=loads)

    def silence(self) -> float:
        """Seconds for which nothing was heard, once something was; ask each `PING_S`. While this process
        stands still, it hears nobody: a longer time between two calls counts as two pings."""
        now, heard = self._clock(), self._heard
        if heard:
            self._silent, self._heard = 0.0, False
        elif self._looked_at < math.inf:
            self._silent += min(now - self._looked_at, 2 * PING_S)
        if heard or self._looked_at < math.inf:
            self._looked_at = now
        return self._silent


def silence_of(pid: int | None, *, loads: bool) -> float:
    """Seconds for which a rank that lives may say nothing. `pid`, `loads`: as of `Link.is_lost`."""
    if pid is None:
        return LOADING_S if loads else SILENCE_S
    try:
        stopped = psutil.Process(pid).status() in _STOPPED
    except psutil.Error:
        stopped = True
    return SILENCE_S if stopped else BUSY_S


_STOPPED = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
