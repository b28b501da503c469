"""Shares the SSD cache with omlxd that are paired with this one (--peer-listen)."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import TYPE_CHECKING

import psutil

from ...common.ports import PEER_PORT, address_text, peer_address
from ...config import Settings, has_ssd_cache
from ...errors import ConfigError
from .sockets import CannotListen, bind

if TYPE_CHECKING:
    from ...kv.peer.server import Given


def open_peer_socket(settings: Settings) -> socket.socket | None:
    """Open the socket of --peer-listen; None without one. Raises CannotListen and ConfigError."""
    for name, value in (("peer_listen", settings.peer_listen), ("peer", settings.peer)):
        if value and not has_ssd_cache(settings):
            raise ConfigError(
                f"{settings.sources[name]}: it is about the SSD cache, and this daemon has none."
            )
    if not settings.peer_listen:
        return None
    return open_named(settings, "peer_listen", PEER_PORT)


def open_named(settings: Settings, option: str, port: int) -> socket.socket:
    """Open the socket of a setting that names an address; `port` unless it names one, too.

    Raises CannotListen, and ConfigError for an address that is every network's.
    """
    place = settings.sources[option].replace("--join-listen", "--listen").replace("default", "--listen")
    host, port = peer_address(getattr(settings, option), port)
    try:
        made = bind(host, port)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            why = f"{host} is no address of this machine; give one of its own: {', '.join(_addresses())}"
        elif error.errno == errno.EADDRINUSE:
            why = f"port {port} of {host} is in use; give another one, as {address_text(host, port + 1)}"
        else:
            why = f"port {port} of {host}: {error.strerror or error}"
        raise CannotListen(f"{place}: {why}.") from error
    if ipaddress.ip_address(made.getsockname()[0].partition("%")[0]).is_unspecified:
        made.close()
        raise ConfigError(
            f"{place}: {host} is every network of this machine; name the address in one of them."
        )
    return made


def _addresses() -> list[str]:
    """Return this machine's IPv4 addresses, as far as the system tells."""
    return [
        each.address
        for found in psutil.net_if_addrs().values()
        for each in found
        if each.family == socket.AF_INET
    ]


def peer_rows(settings: Settings, listening: socket.socket | None) -> list[tuple[str, str]]:
    """Say for the start page where the cache is shared, and whose is asked."""
    rows: list[tuple[str, str]] = []
    if listening is not None:
        at = address_text(*listening.getsockname()[:2])
        rows.append(("peers", f"shares its cache with paired machines at {at}"))
    if settings.peer:
        from ...kv.peer.identity import Identity

        unpaired = Identity(settings.base_path).why_unpaired(settings.peer)
        rows.append(("peer", f"{settings.peer}: {unpaired or 'is asked for what this cache lacks'}"))
    return rows


def share_cache(settings: Settings, listening: socket.socket | None) -> Given | None:
    """Begin to answer peers; returns what they are given, None: nothing. Raises OSError."""
    if listening is None:
        return None
    from ...kv.peer.identity import Identity
    from ...kv.peer.server import PeerServer

    server = PeerServer(Identity(settings.base_path), settings.paged_ssd_cache_dir, listening)
    server.start()
    return server.given
