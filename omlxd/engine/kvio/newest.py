"""After a load the blocks that were used last come from SSD into RAM, so that the first turn is a hot hit.

They are read newest first, which is root before leaf in each chain (`KVStore.record_use`), until the first
request is matched, `SHARE` of the hot tier's budget is full, or `SECONDS` are over. What is read holds a
reference until then, so that all of it gets into the order of use at once, older than whatever a request
uses; and nothing is evicted for it. A load that a request waits for reads nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ...kv.block import Block
from ...kv.checkpoint import checkpoint_name
from ...kv.files.block_file import BlockKey
from ...kv.files.paths import namespace_dir
from ...kv.hashing import BlockHash, hash_blocks
from ..process.children import block_files, read_claims
from .bridge import KVBridge
from .payload import MLXPayload, read_payload

log = logging.getLogger(__name__)

Read = Callable[[], MLXPayload | None]
Keep = Callable[[MLXPayload], None]

IDLE_S = 5.0
"""Seconds after a load without a request before the first read."""
SECONDS = 10.0
SHARE = 0.5


class Newest:
    """One load's. `bridge`: its store has a cold tier. `post(f)` runs `f` on the engine thread."""

    def __init__(
        self, bridge: KVBridge, post: Callable[[Callable[[], None]], None], idle_s: float | None = None
    ):
        cold = bridge.store.cold
        assert cold is not None
        self._cold, self._store, self._states = cold, bridge.store, bridge.states
        self._post = post
        self._idle_s = IDLE_S if idle_s is None else idle_s
        self._held: list[Block] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-newest", daemon=True)
        self.nbytes = 0
        bridge.on_match = self.stop

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No more is read; what was read may be evicted. Engine thread, any number of times."""
        self._over.set()
        held, self._held = self._held, []
        self._store.pool.free(held)

    def close(self) -> None:
        """The engine thread has ended."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    # ----------------------------------------------------------------- on its own thread

    def _run(self) -> None:
        try:
            if not self._over.wait(self._idle_s):
                self._read_all()
        except Exception:
            log.exception("blocks that were used last stay on SSD")
        self._post(self.stop)

    def _read_all(self) -> None:
        began = time.monotonic()
        found = 0
        for path in _newest_first(Path(self._cold.root) / namespace_dir(self._cold.format.namespace)):
            room = self.nbytes < SHARE * self._store.hot_budget()
            if self._over.is_set() or not room or time.monotonic() - began > SECONDS:
                break
            with contextlib.suppress(OSError, ValueError):
                found += self._read(path)
        if found:
            seconds = time.monotonic() - began
            log.info(
                "%d blocks used last (%.1f MB) are in RAM after %.2f s", found, self.nbytes / 1e6, seconds
            )

    def _read(self, path: str) -> bool:
        """Raises OSError, or ValueError for a file that is not what its name says."""
        claims = read_claims(path)
        if claims is None:
            return False
        parent, child = claims
        name, block = child.block_hash, self._store.block_size
        # Nobody's prompt vouches for the name, as at a match.
        if name == checkpoint_name(parent):
            read, keep = self._checkpoint(parent, child.tokens[0])
        elif [name] == hash_blocks(parent, child.tokens, block, {0: child.extra_keys}):
            read, keep = self._block(BlockKey(name, parent, child.tokens, child.extra_keys))
        else:
            raise ValueError("its name is another's")
        if self._store.where(name) != "cold":
            return False
        payload = read()
        if payload is None:
            return False
        self.nbytes += payload.nbytes
        self._post(lambda: keep(payload) if not self._over.is_set() else None)
        return True

    def _block(self, key: BlockKey) -> tuple[Read, Keep]:
        store, layout = self._store, self._cold.format.layout

        def read() -> MLXPayload | None:
            return read_payload(layout, store.block_size, lambda views: store.load_into(key, views))

        def keep(payload: MLXPayload) -> None:
            pool = store.pool
            if pool.get_cached_block(key.block_hash) is None and self._fits(payload):
                block = pool.cache(pool.allocate(), key.block_hash, payload)
                block.on_disk = True
                self._held.append(block)

        return read, keep

    def _checkpoint(self, block_hash: BlockHash, position: int) -> tuple[Read, Keep]:
        states = self._states
        if states is None or position < 1:
            raise ValueError("this model has no checkpoints")

        def keep(payload: MLXPayload) -> None:
            if self._fits(payload):
                states.checkpoints.put(block_hash, position, payload, write=False)

        return lambda: states.read_file(block_hash, position), keep

    def _fits(self, payload: MLXPayload) -> bool:
        """Whether it evicts nothing."""
        return self._store.pool.hot_bytes + payload.nbytes <= self._store.hot_budget()


def _newest_first(namespace: Path) -> list[str]:
    dated: list[tuple[int, str]] = []
    for path in block_files(namespace):
        with contextlib.suppress(OSError):
            dated.append((os.stat(path).st_mtime_ns, path))
    return [path for _, path in sorted(dated, reverse=True)]
