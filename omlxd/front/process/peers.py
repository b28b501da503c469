"""Shares the SSD cache with omlxd that are paired with this one (--peer-listen)."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import TYPE_CHECKING

from ...common.ports import PEER_PORT, peer_address
from ...config import Settings, has_ssd_cache
from ...errors import ConfigError
from .sockets import CannotListen, bind

if TYPE_CHECKING:
    from ...kv.peer.server import PeerServer


def open_peer_socket(settings: Settings) -> socket.socket | None:
    """Open the socket of --peer-listen; None without one. Raises CannotListen and ConfigError."""
    for name, value in (("peer_listen", settings.peer_listen), ("peer", settings.peer)):
        if value and not has_ssd_cache(settings):
            raise ConfigError(
                f"{settings.sources[name]}: it is about the SSD cache, and this daemon has none."
            )
    if not settings.peer_listen:
        return None
    return open_named(settings, "peer_listen", PEER_PORT, "is for peers")


def open_named(settings: Settings, option: str, port: int, use: str) -> socket.socket:
    """Open the socket of a setting that names an address; `port` unless it names one, too.

    Raises CannotListen, and ConfigError for an address that is every network's.
    """
    place = settings.sources[option].replace("--join-listen", "--listen").replace("default", "--listen")
    host, port = peer_address(getattr(settings, option), port)
    try:
        made = bind(host, port)
    except OSError as error:
        why = error.strerror or str(error)
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            why = f"{host} is no address of this machine"
        raise CannotListen(f"{place}: {why}; port {port} of {host} {use}.") from error
    if ipaddress.ip_address(made.getsockname()[0].partition("%")[0]).is_unspecified:
        made.close()
        raise ConfigError(
            f"{place}: {host} is every network of this machine; name the address in one of them."
        )
    return made


def share_cache(settings: Settings, listening: socket.socket | None) -> PeerServer | None:
    """Begin to answer peers. Raises OSError."""
    if listening is None:
        return None
    from ...kv.peer.identity import Identity
    from ...kv.peer.server import PeerServer

    server = PeerServer(Identity(settings.base_path), settings.paged_ssd_cache_dir, listening)
    server.start()
    return server
