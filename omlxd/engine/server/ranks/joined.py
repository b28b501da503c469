"""Ranks on other machines, which run `omlxd join`: how rank 0 reaches them, what they have of theirs."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from .... import wire
from ....common.ports import JOIN_PORT, peer_address
from ....errors import ModelError, NotNow
from ....kv.peer.client import lead, mend
from ....kv.peer.duplex import Duplex
from ....kv.peer.frames import Lead
from ....kv.peer.identity import Identity, PeerError
from ....kv.peer.versions import computing
from ... import mlx_adapter
from ...kvio.lease import FrontLease
from .link import Link

log = logging.getLogger(__name__)

AWAY_S = 20.0
"""Seconds for which a host that is away, or that still ends its last rank, is tried again."""
AGAIN_S = 0.5
HOME_S = 30.0
"""Seconds until a rank's own machine has said what it has of it."""


def reach(load: wire.Load, host: str, clock: Callable[[], float] = time.monotonic) -> Duplex:
    """Have `host` start a rank; returns the link to it. Raises ModelError; NotNow while it is away."""
    address = peer_address(host, JOIN_PORT)
    cache = load.cache
    kv = wire.kv_words(cache.kv_bits, cache.kv_group_size)
    asked = Lead(load.model_id, computing(), cache.block_size, kv)
    until = clock() + AWAY_S
    while True:
        try:
            return lead(Identity(Path(cache.peer_base)), address, asked)
        except PeerError as error:
            if not error.passing:
                # What mends it, a pairing say, changes no file of the model: the next request tries again.
                why = f"{host} does not join: {error}"
                raise ModelError(why, code="unavailable", param="--join") from error
            if clock() > until:
                more = mend(error)
                why = f"{host} does not join now: {error}" + f"; {more}" * bool(more)
                raise NotNow(why, param="--join") from error
        time.sleep(AGAIN_S)


class Far:
    """A rank's process on another machine: it ends there once the link does."""

    def __init__(self, host: str, duplex: Duplex):
        self.host, self._duplex = host, duplex

    def kill(self) -> None:
        self._duplex.close()

    def wait(self, timeout: float) -> None:
        """Its end is not seen here."""

    def __str__(self) -> str:
        return f"on {self.host}"


class Home:
    """The machine of a rank that another one leads, over a socket to its `omlxd join`: where the model lies,
    and room on its SSD. Its end ends this process.
    """

    def __init__(self, sock: socket.socket):
        self._link = Link(sock, wire.Home | wire.Grant | wire.ColdBytes)
        self._said: queue.SimpleQueue[wire.Home] = queue.SimpleQueue()
        self.lease = FrontLease(self._link.send)
        self.address = ""
        self.cold_bytes = -1
        threading.Thread(target=self._read, name="home", daemon=True).start()

    def _read(self) -> None:
        def take(message: Any) -> None:
            if isinstance(message, wire.Grant):
                self.lease.granted(message)
            elif isinstance(message, wire.ColdBytes):
                self.cold_bytes = message.nbytes
            else:
                self._said.put(message)

        self._link.read(take)
        mlx_adapter.release_memory()
        os._exit(1)

    def own(self, load: wire.Load) -> wire.Load:
        """Return `load`, of rank 0, as it is on this machine, which holds what it safely may."""
        said = self._said.get(timeout=HOME_S)
        self.address = said.address
        cache = replace(
            load.cache,
            cold_dir=said.cold_dir,
            cold_cache_bytes=said.cold_cache_bytes,
            hot_cache_bytes=said.hot_cache_bytes,
            hot_parts=1,
        )
        budget = wire.Budget(float32=load.budget.float32, slow=load.budget.slow)
        return replace(load, model_path=said.model_path, cache=cache, budget=budget)

    def loaded(self, load: wire.Load, namespace: str, weight_bytes: int, kv_bytes: int) -> None:
        """Say so to this machine's account of files."""
        info = wire.ModelInfo(
            model_id=load.model_id,
            model_type="",
            context_length=0,
            vocab_size=0,
            weight_bytes=weight_bytes,
            kv_bytes_per_token=kv_bytes,
            kv_reuse="",
            namespace=namespace,
            block_size=load.cache.block_size,
            backend=mlx_adapter.backend(),
        )
        self._link.send(wire.Loaded(info))
