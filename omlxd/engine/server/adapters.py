"""The LoRA adapters that one engine serves beside its model: their KV is never shared, the weights are.

The ids of requests say whose they are (wire/, `CHANNEL`). The stores of the last few adapters that went are
kept: one that comes back finds its own. One that was trained on has another store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from ... import wire
from ...common.units import human
from ...errors import AdapterError, NotNow, OmlxdError
from ...kv.cold.writer import Lease
from ...kv.files.paths import namespace_dir
from ...kv.hashing import BlockHash
from ...models.adapters import adapter_bytes
from ..kvio.bridge import KVBridge
from ..kvio.open_store import ModelStore
from ..mlx_adapter import Adapter, LoadedModel
from ..schedule.scheduler import Scheduler

log = logging.getLogger(__name__)

AGAIN_S = 0.2
"""Between two looks at whether an adapter that goes is still in use."""
MOST_GONE = 4
"""Stores of adapters that are gone. Each has threads, and a part of the hot tier."""


@dataclass(slots=True)
class Served:
    """The model, or one of its adapters.

    adapter  None: the model itself
    store    of its KV
    info     as the front is told
    """

    adapter: Adapter | None
    store: ModelStore
    info: wire.ModelInfo

    @property
    def namespace(self) -> BlockHash:
        return self.store.namespace

    @property
    def bridge(self) -> KVBridge | None:
        return self.store.bridge

    def salt(self, cache_salt: str) -> str:
        """Of remembered turns: those of one adapter are put back into its own prompts alone."""
        return cache_salt if self.adapter is None else f"{cache_salt}\0{self.namespace.hex()}"


class Adapters:
    """Thread-safe, but for what says otherwise.

    base    the model itself, `channel` that of its requests
    nbytes  of all adapters' matrices
    """

    def __init__(self, base: Served, channel: int, loaded: LoadedModel, scheduler: Scheduler, lease: Lease):
        self.base = base
        self._loaded, self._scheduler, self._lease = loaded, scheduler, lease
        self._lock = threading.Lock()
        self._served: dict[int, Served] = {channel: base}
        self._expected: dict[int, wire.LoadAdapter] = {}
        self.nbytes = 0
        self._stores: dict[BlockHash, ModelStore] = {}

    def find(self, id: int) -> Served | None:
        """What the request or the question of that id is for; None: it is gone."""
        with self._lock:
            return self._served.get(id // wire.CHANNEL)

    @property
    def channels(self) -> list[int]:
        """Of the model itself, and of each adapter."""
        with self._lock:
            return list(self._served)

    def of_request(self, id: int) -> Served:
        """As `find`. Raises OmlxdError."""
        if (served := self.find(id)) is None:
            raise OmlxdError("this adapter is being unloaded; retry", code="unavailable", retry_after=1)
        return served

    def expect(self, asked: wire.LoadAdapter) -> None:
        """`add` follows, on another thread, unless a `drop` comes first."""
        with self._lock:
            self._expected[asked.channel] = asked

    def add(self, asked: wire.LoadAdapter) -> Served:
        """Load an adapter; returns once it may be asked. Not on the engine thread. Raises OmlxdError."""
        try:
            store = self.base.store.of_adapter(asked.folder, asked.model_id)
        except OSError as error:
            why = error.strerror or error
            raise AdapterError(f"the adapter {asked.folder} can't be read: {why}") from error
        done: Future[Served] = Future()

        def load() -> None:
            try:
                done.set_result(self._load(asked, store))
            except Exception as error:
                done.set_exception(error)

        self._scheduler.change_model(load)
        served = done.result()
        with self._lock:
            wanted = self._expected.pop(asked.channel, None) is asked
            if wanted:
                self._served[asked.channel] = served
        if not wanted:
            self._scheduler.change_model(lambda: self._leave(served))
            raise NotNow(f"{asked.model_id} was unloaded before it was loaded.")
        return served

    def _load(self, asked: wire.LoadAdapter, store: ModelStore) -> Served:
        """On the engine thread."""
        if self._loaded.blind == "":
            raise AdapterError(f"{asked.folder}: a model that reads images takes no adapter here")
        self._check_room(asked)
        adapter = self._loaded.adapters.add(asked.folder)
        try:
            store.check_adapter()
            store = self._open(adapter, store)
        except BaseException:
            self._loaded.adapters.remove(adapter)
            raise
        finally:
            self._count()
        info = replace(
            self.base.info,
            model_id=asked.model_id,
            namespace=namespace_dir(store.namespace) if self._loaded.layout else "",
            weight_bytes=adapter.nbytes,
        )
        beside = "" if adapter.mixes else "; its rows share no pass with others"
        log.info("%s: its adapter shares the weights of this engine%s", asked.model_id, beside)
        return Served(adapter, store, info)

    def _open(self, adapter: Adapter, store: ModelStore) -> ModelStore:
        """The store of `adapter`, opened if the model's own is open. One of its namespace is used again."""
        if self.base.bridge is not None:
            store = self._stores.setdefault(store.namespace, store)
            if (bridge := store.bridge) is None:
                bridge = store.open(self._lease, self._scheduler.post)
                bridge.weights_changed = self.base.bridge.weights_changed
                store.read_newest(self._scheduler.post)
            self._scheduler.bridges[adapter] = bridge
            if self._scheduler.memory is not None:
                self._scheduler.memory.stores[adapter] = bridge.store
        return store

    def _count(self) -> None:
        before, self.nbytes = self.nbytes, self._loaded.adapters.nbytes
        self._loaded.weight_bytes += self.nbytes - before

    def _check_room(self, asked: wire.LoadAdapter) -> None:
        memory, need = self._scheduler.memory, 2 * adapter_bytes(Path(asked.folder))  # Once more, stacked.
        if memory is not None and need > (free := memory.room(self._scheduler.running)):
            raise NotNow(
                f"{asked.model_id} needs about {human(need)} and {human(free)} are free now; "
                "retry when other models or programs have given some back.",
                retry_after=15,
            )

    def drop(self, channel: int, gone: Callable[[], None]) -> None:
        """Admit no more requests for it; once those under way ended, free its memory, call `gone()`."""
        with self._lock:
            served = self._served.pop(channel, None)
            self._expected.pop(channel, None)

        def leave() -> None:
            if served is not None and served.adapter is not None and self._scheduler.uses(served.adapter):
                threading.Timer(AGAIN_S, lambda: self._scheduler.change_model(leave)).start()
                return
            if served is not None:
                self._leave(served)
            gone()

        self._scheduler.change_model(leave)

    def _leave(self, served: Served) -> None:
        """Give back what `served` holds, which nobody uses. On the engine thread."""
        adapter = served.adapter
        assert adapter is not None
        self._loaded.adapters.remove(adapter)
        self._count()
        self._scheduler.bridges.pop(adapter, None)
        self._scheduler.counts.forget(adapter)
        if self._scheduler.speculation is not None:
            self._scheduler.speculation.counts.pop(adapter, None)
        if self._scheduler.memory is not None:
            self._scheduler.memory.stores.pop(adapter, None)
        served.store.rest()
        if self._stores.pop(served.namespace, None) is not None:
            self._stores[served.namespace] = served.store  # The last to be closed.
        self._close_old_stores()

    def _close_old_stores(self) -> None:
        used = self._scheduler.bridges.values()
        gone = [store for store in self._stores.values() if store.bridge not in used]
        for store in gone[:-MOST_GONE]:
            if not store.has_work:
                del self._stores[store.namespace]
                store.close(0.0)

    def stores(self) -> list[ModelStore]:
        """Those of adapters, also of some that are gone."""
        return list(self._stores.values())
