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

from .... import wire
from ....kv.peer.duplex import Duplex
from ....wire.plan import Ping, Pong

PING_S = 0.5
SILENCE_S = 4.0
"""Seconds without a frame after which the other rank is taken for stopped: with `PING_S`, and what ending a
process takes, within five."""

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
        self._heard_at = math.inf
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
            self._heard_at = self._clock()
            for message in self._decoder.feed(data):
                if isinstance(message, Ping):
                    self.send(self._held())
                elif isinstance(message, Pong):
                    self.last = message
                else:
                    take(message)

    def met(self) -> None:
        """The ranks have met, while MLX let no other thread of this process run: nothing was heard."""
        self._heard_at = self._clock()

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(_READ)
        except OSError:
            return b""

    @property
    def is_silent(self) -> bool:
        """Whether nothing was heard for longer than a rank that lives is silent, once something was."""
        return self._clock() - self._heard_at > SILENCE_S
