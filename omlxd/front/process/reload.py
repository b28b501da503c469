"""SIGHUP reads the configuration again, and applies what can change while serving.

Live: the log's level, the API key, and what models there are and how each is served. What belongs to
a loaded model holds from its next load on. Everything else is named in the log and waits for the next
start. A configuration that makes no sense changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from ...config import BY_NAME, Settings
from ...errors import ConfigError
from ..engines.pool import EnginePool
from ..http.settings import KeyRing
from .logs import Logs
from .notify import Notifier

log = logging.getLogger(__name__)

LIVE = frozenset(
    {
        *("log_level", "api_key", "models", "defaults", "keep_awake"),
        *("max_thinking_tokens", "loop_stop"),
        *("model_dir", "model_ttl", "max_loaded_models", "memory_limit", "no_jit_load", "no_hf_cache"),
    }
)
FROM_THE_NEXT_LOAD = frozenset(
    {
        *("hot_cache_max_size", "initial_cache_blocks", "block_size", "kv_bits", "kv_group_size", "seed"),
        *("cpu_weights", "weights_mmap", "cpu_blas", "speculation", "share_prefix"),
        *("kv_reserve", "metal_kernels", "ranks", "join", "link", "peer"),
    }
)


@dataclass
class Reloader:
    """Applies a changed configuration; called on SIGHUP.

    read      the configuration as it is now; raises ConfigError
    loopback  whether only this machine can reach the daemon
    pool      gets the new settings
    """

    settings: Settings
    read: Callable[[], Settings]
    logs: Logs
    keys: KeyRing
    notify: Notifier
    pool: EnginePool
    loopback: bool

    def __call__(self) -> None:
        self.notify.reloading()
        self.logs.reopen()
        try:
            self._apply(self.read())
        except ConfigError as error:
            why = error.message.replace("\n", " ")
            log.error("the configuration was not read again, all stays as it was: %s", why)
        except Exception:
            log.exception("the configuration was not read again, all stays as it was")
        self.notify.ready()

    def _apply(self, new: Settings) -> None:
        old = self.settings
        if not self.loopback and old.api_key and not new.api_key and not self.keys.has_file_keys:
            raise ConfigError("without a key, other machines could use this daemon.")
        fields = {name: option.field for name, option in BY_NAME.items()}
        fields |= {name: name for name in ("models", "defaults")}
        names = [name for name, field in fields.items() if getattr(old, field) != getattr(new, field)]
        later = [name for name in names if name not in LIVE | FROM_THE_NEXT_LOAD]
        # What waits must still count as a change at the next SIGHUP.
        self.settings = msgspec.structs.replace(
            new, **{fields[name]: getattr(old, fields[name]) for name in later}
        )
        self.logs.apply_settings(new)
        self.keys.replace_own(new.api_key)
        self.pool.apply_settings(self.settings)
        for sentence in new.overridden:
            log.warning("%s", sentence)
        log.info("configuration read again: %s", _flags([name for name in names if name in LIVE]))
        if at_load := [name for name in names if name in FROM_THE_NEXT_LOAD]:
            log.info("%s: changed for models that are loaded from now on", _flags(at_load))
        if later:
            log.warning("%s: changed, but only at the next start", _flags(later))


def _flags(names: Sequence[str]) -> str:
    shown = [BY_NAME[name].flag if name in BY_NAME else f"[{name}]" for name in names]
    return ", ".join(shown) or "nothing changed at once"
