"""A TLS connection that one thread reads while others write; Python's own takes one call at a time."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading


class Duplex:
    """`tls`, which it takes over; `of` closes it. `recv`: by one thread; `sendall`: by one at a time."""

    def __init__(self, tls: ssl.SSLSocket, of: object = None):
        self._lock = threading.Lock()
        self._tls, self._of = tls, of
        tls.setblocking(False)

    @property
    def own_host(self) -> str:
        """The address of this machine, as the other one sees it."""
        return str(self._tls.getsockname()[0])

    def recv(self, most: int) -> bytes:
        """Return what has come, once something has; b"": the other end is closed. Raises OSError."""
        while True:
            try:
                with self._lock:
                    return self._tls.recv(most)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)

    def sendall(self, data: bytes | memoryview) -> None:
        """Raises OSError."""
        view = memoryview(data)
        while view:
            try:
                with self._lock:
                    view = view[self._tls.send(view) :]
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._tls, event)
        poll.poll()

    def close(self) -> None:
        """End the connection: whoever reads or writes returns. Any thread."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._tls, socket.SHUT_RDWR)
