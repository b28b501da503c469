"""Settings of the HTTP app."""

from __future__ import annotations

import msgspec

from .key_ring import KeyRing


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What `create_app` is told.

    host             address that the server is bound to; loopback turns the Host check on
    api_key          "": none is asked for
    keys             the keys to ask for, instead of `api_key`
    cors_origins     origins of pages that may read answers; "*" is any
    body_pause_s     most seconds between two parts of a request's body
    body_total_s     most seconds that a body may take
    allowed_hosts    further names that a Host header may hold, without port
    max_body_bytes   bytes of a request body; Anthropic's own limit by default
    bodies_bytes     bytes of all requests' bodies at once
    send_pause_s     most seconds that a client may take to read a piece of an answer (64 KiB)
    ping_interval_s  seconds of silence before a stream gets a ping; clients want one every 10 s
    header_grace_s   seconds that a stream's headers wait for a first event: a request that fails
                     at once gets a plain HTTP error, and every other stream starts this late at most
    drain_s          most seconds between two parts of a body that was refused: it is read to its end,
                     and discarded, as long as `body_total_s` allows
    """

    host: str = "127.0.0.1"
    api_key: str = ""
    keys: KeyRing | None = None
    cors_origins: tuple[str, ...] = ()
    body_pause_s: float = 30.0
    body_total_s: float = 300.0
    allowed_hosts: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 1024 * 1024
    bodies_bytes: int = 256 * 1024 * 1024
    send_pause_s: float = 120.0
    ping_interval_s: float = 8.0
    header_grace_s: float = 1.0
    drain_s: float = 30.0
