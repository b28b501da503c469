"""TCP sockets bound to a port that no other program serves."""

from __future__ import annotations

import errno
import os
import socket
import sys
from typing import Any

CONNECT_S = 1.0
PEER_PORT = 8077
"""At which an omlxd shares its SSD cache, unless told otherwise."""


def bind(family: int, address: Any) -> socket.socket:
    """Return a TCP socket bound to `address`. Raises OSError, EADDRINUSE where another program serves it.

    macOS lets one address of a port be bound beside a program that listens on all of them, whose connections
    would then come here. So a port at which somebody answers is in use there; it is not asked where it can't
    be bound: a service manager would start a daemon for that.
    """
    made = _bound(family, address)
    if sys.platform == "darwin" and address[1]:
        made.close()  # Bound, it would be asked itself.
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_S)
            if probe.connect_ex(address) == 0:
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        made = _bound(family, address)
    return made


def free_on_loopback(count: int) -> list[str]:
    """`count` addresses, `127.0.0.1:PORT`, that nobody serves now."""
    held = [_bound(socket.AF_INET, ("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in held]
    for each in held:
        each.close()
    return addresses


def _bound(family: int, address: Any) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restart must not wait for the old daemon's connections to leave TIME_WAIT.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made


def peer_address(text: str) -> tuple[str, int]:
    """Return (host, port) of a peer: `HOST`, `HOST:PORT`, an IPv6 address, or `[IPV6]:PORT`.

    Raises ValueError.
    """
    host, port = text, ""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        if port and not port.startswith(":"):
            raise ValueError(text)
        port = port[1:]
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or (port and not (port.isascii() and port.isdigit() and int(port) < 65536)):
        raise ValueError(text)
    return host, int(port) if port else PEER_PORT
