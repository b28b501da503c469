"""Settings of the HTTP app, and the keys that it accepts."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from hmac import compare_digest
from pathlib import Path

import msgspec

from ...chat import PriorityWord
from ...config.keys import Key, digest_of, is_open, read_keys
from ...errors import ConfigError

log = logging.getLogger(__name__)

OWN = "--api-key"
"""The name of the key in the settings."""


class KeyRing:
    """The accepted keys: `api_key`, "" for none, and those of `path`, the file of `omlxd key`.

    The file is looked at on every request (one stat) and read again when it changed, so that a
    revoked key is refused at once. A file that can't be trusted leaves the keys as they were, with
    one line in the log. Once a key was asked for, taking the last one out of the file does not open
    the daemon to everybody: it then refuses all, until it is started again, or its owner runs `omlxd key
    off` and only this machine reaches it.

    may_open  only this machine reaches the daemon
    """

    def __init__(self, api_key: str = "", path: Path | None = None):
        self._path = path
        self._own = digest_of(api_key.encode()) if api_key else ""
        self._keys: tuple[Key, ...] = ()
        self._seen: tuple[int, ...] | None = None
        self._had_keys = False
        self.may_open = False
        if path is not None:
            self._seen = _signature(path)
            self._use_keys(read_keys(path))

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        self._refresh()
        return bool(self._own) or self._had_keys

    @property
    def is_empty(self) -> bool:
        """Whether no key is right, required or not."""
        return not self._own and not self.has_file_keys

    @property
    def has_file_keys(self) -> bool:
        self._refresh()
        return bool(self._keys)

    def replace_own(self, api_key: str) -> None:
        self._own = digest_of(api_key.encode()) if api_key else ""

    def name_of(self, sent: Sequence[bytes]) -> str | None:
        """Return the name of the first right key in `sent`; None if none is. Every comparison is made."""
        self._refresh()
        keys = [(OWN, self._own)] if self._own else []
        keys += [(key.name, key.digest) for key in self._keys]
        right_name = None
        for text in sent:
            digest = digest_of(text)
            for name, right in keys:
                if compare_digest(digest, right) and right_name is None:
                    right_name = name
        return right_name

    def priority_of(self, name: str) -> PriorityWord | None:
        """Return the priority that requests with the key called `name` do not get past; None: any."""
        for key in self._keys:
            if key.name == name:
                return key.priority
        return None

    def _use_keys(self, keys: tuple[Key, ...]) -> None:
        self._keys = keys
        self._had_keys = self._had_keys or bool(keys)

    def _refresh(self) -> None:
        if self._path is None or (signature := _signature(self._path)) == self._seen:
            return
        self._seen = signature
        try:
            self._use_keys(read_keys(self._path))
        except ConfigError as error:
            log.error("%s The keys stay as they were.", error.message)
            return
        log.info("keys read again: %s", ", ".join(key.name for key in self._keys) or "none")
        if not self._keys and is_open(self._path):
            self._had_keys = self._had_keys and not self.may_open
            if not self.may_open:
                log.warning("a key is asked for all the same: other machines reach this daemon")


def _signature(path: Path) -> tuple[int, ...] | None:
    """Return what changes when the file does, its permissions included."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_mtime_ns, facts.st_ino, facts.st_size, facts.st_mode


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `create_app`.

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
    spool            folder of files on their way to an engine or from one; None: no such requests are served
    miss_log         file of why requests missed; None: it is not kept
    stopping         is set once the daemon is to stop; None: never
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
    spool: Path | None = None
    miss_log: Path | None = None
    stopping: asyncio.Event | None = None
