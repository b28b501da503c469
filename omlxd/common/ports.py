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
JOIN_PORT = 8078
"""At which `omlxd join` waits for a lead, unless told otherwise."""


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


def free_addresses(host: str, count: int) -> list[str]:
    """`count` addresses, `host:PORT`, that nobody serves now. `host`: IPv4, of ours. Raises OSError."""
    held = [_bound(socket.AF_INET, (host, 0)) for _ in range(count)]
    addresses = [f"{host}:{each.getsockname()[1]}" for each in held]
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


def address_text(host: str, port: int) -> str:
    """Write an address as `peer_address` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def peer_address(text: str, port: int = PEER_PORT) -> tuple[str, int]:
    """Return (host, port) of a peer: `HOST`, `HOST:PORT`, an IPv6 address, or `[IPV6]:PORT`.

    port  where the text has none. Raises ValueError.
    """
    host, given = text, ""
    if text.startswith("["):
        host, _, given = text[1:].partition("]")
        if given and not given.startswith(":"):
            raise ValueError(text)
        given = given[1:]
    elif text.count(":") == 1:
        host, _, given = text.partition(":")
    if not host or (given and not (given.isascii() and given.isdigit() and int(given) < 65536)):
        raise ValueError(text)
    return host, int(given) if given else port
