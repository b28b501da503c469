"""SIGHUP: the configuration is read again, and what can change while serving does.

Live: the log's level, the API key, and what the pool can apply to its models. Everything else is
named in the log and waits for the next start. A configuration that makes no sense changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from ..config import OPTIONS, Settings
from ..errors import ConfigError
from .key_ring import KeyRing
from .logs import Logs
from .notify import Notifier

log = logging.getLogger(__name__)

LIVE = frozenset({"log_level", "api_key"})


class Reloader:
    """Call it on SIGHUP.

    read      the configuration as it is now; raises ConfigError
    loopback  whether only this machine can reach the daemon
    pool      told of the new settings by `apply(settings)`, if it has such a method; that may return
              the names of further settings that are live with it
    """

    def __init__(
        self,
        settings: Settings,
        read: Callable[[], Settings],
        *,
        logs: Logs,
        keys: KeyRing,
        notify: Notifier,
        pool: Any,
        loopback: bool,
    ):
        self.settings = settings
        self._read = read
        self._logs = logs
        self._keys = keys
        self._notify = notify
        self._pool = pool
        self._loopback = loopback

    def __call__(self) -> None:
        self._notify.reloading()
        self._logs.reopen()
        try:
            self._take(self._read())
        except ConfigError as error:
            log.error("the configuration was not read again, all stays as it was: %s", error.message)
        except Exception:
            log.exception("the configuration was not read again, all stays as it was")
        self._notify.ready()

    def _take(self, new: Settings) -> None:
        old = self.settings
        if not self._loopback and old.api_key and not new.api_key and not self._keys.has_file_keys:
            raise ConfigError("without a key, other machines could use this daemon.")
        live = set(LIVE)
        if (apply := getattr(self._pool, "apply", None)) is not None:
            told = apply(new)
            live |= set(told) if isinstance(told, Iterable) else set()
        self._logs.apply(new)
        self._keys.replace_own(new.api_key)
        changed = [o.name for o in OPTIONS if getattr(old, o.name) != getattr(new, o.name)]
        later = [name for name in changed if name not in live]
        # What waits must differ from what runs, also at the next SIGHUP: only live values are taken over.
        kept = {name: getattr(old, name) for name in later}
        fields = {name: getattr(new, name) for name in new.__struct_fields__} | kept
        self.settings = Settings(**fields)
        now = ", ".join(_flag(name) for name in changed if name in live) or "nothing else changed"
        log.info("configuration read again: %s", now)
        if later:
            log.warning("%s: changed, but only at the next start", ", ".join(_flag(name) for name in later))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
