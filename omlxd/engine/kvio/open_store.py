"""The KV store of one loaded model: its namespace, its tiers, and the bridge to its sequences."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from ... import wire
from ...common.ports import peer_address
from ...errors import ModelError
from ...kv.block_pool import BlockPool
from ...kv.checkpoint import CheckpointFiles, Checkpoints
from ...kv.cold.flusher import Flusher, write_policy
from ...kv.cold.tier import ColdTier
from ...kv.cold.writer import Lease, StoreWriter
from ...kv.files.block_file import EXTRA_ROOM, BlockFormat
from ...kv.files.namespace import NamespaceInfo, describe_namespace
from ...kv.files.paths import LOCK_NAME
from ...kv.files.record_file import RecordFiles
from ...kv.files.watched_fs import WatchedFileSystem
from ...kv.hashing import BlockHash, namespace_of
from ...kv.store import KVStore
from .. import mlx_adapter
from ..mlx_adapter import LoadedModel
from ..prompt.turn_store import TurnFiles
from ..vision.image_files import ImageFiles
from .bridge import KVBridge
from .checkpointer import Checkpointer
from .fingerprint import (
    adapter_fingerprint,
    adapter_identities,
    file_identities,
    tokenizer_fingerprint,
    weight_fingerprints,
)
from .hot_budget import HotTiers, evict_unused, memory
from .newest import Newest
from .reads.peer_reads import Connection, Peer, PeerReads
from .transport import transport

TICK_S = 2.0


log = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]
"""Runs a call on the engine thread, soon."""

Bridge = TypeVar("Bridge", bound=KVBridge)

KV_FORMAT = 1
"""Part of the namespace: raise it when the meaning of stored bytes changes."""

WRITE_QUEUE_FRACTION = 0.05
"""Of the memory where arrays live: payloads on their way to disk."""


class ModelStore:
    """`open` builds the store; until then, and for a model without reuse, there is only its name.

    files      `file_identities` from before the load. Raises ModelError if a file has changed since.
    digests    `weight_digests` under way; None: they are read now
    namespace  32 bytes: of whatever decides what stored KV means; zeros for a model without a layout
    bridge     to the store; None: not open
    turns      where remembered turns are kept; None: not open, or no cold tier
    images     where what is known of images is kept; None: as `turns`, or a model that takes none
    """

    def __init__(
        self,
        load: wire.Load,
        loaded: LoadedModel,
        files: Mapping[Path, str],
        digests: Future[dict[str, str]] | None = None,
    ):
        self._load = load
        self._loaded = loaded
        self._settings = load.cache
        self._closed = threading.Event()
        self._newest: Newest | None = None
        self._identities: dict[Path, str] = {}
        self.bridge: KVBridge | None = None
        self.turns: TurnFiles | None = None
        self.images: ImageFiles | None = None
        self._fs = WatchedFileSystem()
        self._tiers = HotTiers(load.cache.hot_cache_bytes, load.cache.hot_parts)
        self.namespace = self._namespace(Path(load.model_path), files, digests)

    @staticmethod
    def weight_digests(load: wire.Load) -> dict[str, str]:
        """`weight_fingerprints` of its model. Any thread."""
        return weight_fingerprints(Path(load.model_path), memo_dir(load))

    def of_adapter(self, adapter: str, model_id: str) -> ModelStore:
        """The same for the model with the adapter in folder `adapter`, not open; one RAM tier for both.

        Its name is what it would be in a process of its own. Raises OSError.
        """
        store = copy.copy(self)
        store._closed = threading.Event()
        store._load = replace(self._load, adapter=adapter, model_id=model_id)
        store._newest = store.bridge = store.turns = store.images = None
        store._identities = adapter_identities(adapter)
        if self._loaded.layout is not None:
            memo = memo_dir(self._load)
            store._facts = {**self._facts, "adapter": adapter_fingerprint(adapter, memo)}
            store.namespace = namespace_of(store._facts)
        return store

    def check_adapter(self) -> None:
        """Call it after the load. Raises OSError and ModelError."""
        if adapter_identities(self._load.adapter) != self._identities:
            raise ModelError(
                f"{self._load.adapter}: a file has changed while it was being loaded; load it again"
            )

    def open(self, lease: Lease, post: Post, kind: type[Bridge] = KVBridge, lead: str = "") -> Bridge:
        """`lease`: where the cold tier gets its room. The model must have a layout.

        lead  of a rank's share: folder of rank 0's namespace
        """
        bridge = self.bridge = self._build(lease, post, kind)
        self._describe(bridge.store.cold, lead)
        if (flusher := bridge.store.flusher) is not None:
            threading.Thread(target=self._tick, args=(flusher, post), name="kv-clock", daemon=True).start()
        return bridge

    def _tick(self, flusher: Flusher, post: Post) -> None:
        """Let the flusher write what is due: the engine's thread has no clock at rest."""
        while not self._closed.wait(TICK_S):
            if flusher.has_work:
                post(flusher.tick)

    def read_newest(self, post: Post) -> None:
        """Begin to read the blocks that were used last into RAM, until the first request comes."""
        if self.bridge is not None and self.bridge.store.cold is not None:
            self._newest = Newest(self.bridge, post)
            self._newest.start()

    def share_hot(self, nbytes: int | None) -> None:
        """What the hot tier may hold from now on; None: no limit but its own. Engine thread."""
        if self.bridge is not None:
            self._tiers.budget.share = nbytes
            self.bridge.store.trim_hot()
            mlx_adapter.give_memory_back()  # Else what was evicted stays ours.

    def rest(self) -> None:
        """No sequence will use it for a while: what it holds in RAM goes, as far as the SSD has it."""
        if self._newest is not None:
            self._newest.stop()
        if self.bridge is not None:
            evict_unused(self.bridge.store)

    @property
    def has_work(self) -> bool:
        """Whether something is still to be written or removed. Engine thread."""
        flusher = self.bridge.store.flusher if self.bridge is not None else None
        return flusher is not None and (flusher.has_work or not flusher.writer.flush(0.0))

    def leave_room_for(self, promised: Callable[[], int]) -> None:
        """`promised`: bytes that the hot tier leaves to requests which were admitted. Any thread calls it."""
        if self.bridge is not None:
            self._tiers.budget.promised = promised

    @property
    def hangs(self) -> bool:
        """Whether somebody waits in vain for the SSD cache's folder. Any thread."""
        return self._fs.hangs

    def close(self, deadline_s: float) -> None:
        """Write what is not on disk yet. Nothing may use the store any more."""
        self._closed.set()
        if self._newest is not None:
            self._newest.close()
        if self.bridge is not None:
            if not self.bridge.close(deadline_s):
                log.warning("not every block was stored before the deadline")
            self._tiers.leave(self.bridge.store.pool)

    # ----------------------------------------------------------------- building

    def _namespace(
        self, path: Path, files: Mapping[Path, str], digests: Future[dict[str, str]] | None
    ) -> BlockHash:
        layout = self._loaded.layout
        if layout is None:
            return bytes(32)
        memo = memo_dir(self._load)
        self._facts: dict[str, Any] = {
            "format": KV_FORMAT,
            "weights": digests.result() if digests is not None else self.weight_digests(self._load),
            "layout": layout.facts(),
            "states": self._loaded.states.facts() if self._loaded.states else [],
            "block_size": self._settings.block_size,
            "versions": mlx_adapter.versions(),
            "adapter": adapter_fingerprint(self._load.adapter, memo) if self._load.adapter else "",
            "kv_bits": _quantisation_facts(self._settings),
            "world": self._loaded.split or [1, 0],
        }
        if self._loaded.float32:
            self._facts["float32"] = True
        if self._loaded.blind == "":
            self._facts["vision"] = mlx_adapter.VLM_VERSION
        self._tokenizer = tokenizer_fingerprint(path)
        if file_identities(path, self._load.adapter) != files:
            raise ModelError(
                f"{path}: a file has changed while the model was being loaded; load it again",
                code="unavailable",
            )
        return namespace_of(self._facts)

    def _describe(self, cold: ColdTier | None, lead: str) -> None:
        """Say in the namespace's folder whose it is, for `omlxd cache`."""
        load = self._load
        if cold is not None:
            info = NamespaceInfo(
                model_id=load.model_id,
                model_path=load.model_path,
                adapter=load.adapter,
                model_type=self._loaded.model_type,
                block_size=load.cache.block_size,
                block_bytes=cold.bytes_per_block,
                facts_digest=self.namespace.hex(),
                facts=self._facts,
                lead=lead,
            )
            describe_namespace(Path(load.cache.cold_dir), info, self._fs)

    def _build(self, lease: Lease, post: Post, kind: type[Bridge]) -> Bridge:
        loaded, settings = self._loaded, self._settings
        assert loaded.layout is not None
        pool = BlockPool(settings.initial_blocks)
        cold = flusher = None
        if settings.cold_dir:
            format = BlockFormat(
                self.namespace,
                loaded.layout,
                settings.block_size,
                read_bytes=transport().read_bytes,
                extra_room=EXTRA_ROOM if loaded.blind == "" else 0,
            )
            root = Path(settings.cold_dir)
            self._fs = WatchedFileSystem(str(root / LOCK_NAME))
            cold = ColdTier(root, format, self._fs)
            queue_bytes = int(memory()[0] * WRITE_QUEUE_FRACTION)
            flusher = Flusher(
                pool,
                StoreWriter(cold, lease, max_queue_bytes=queue_bytes),
                post,
                write_policy(settings.admission),
                settings.write_back,
            )
            records = RecordFiles(root, self.namespace, self._fs)
            self.turns = TurnFiles(records, flusher.writer, lease, self._tokenizer)
            if loaded.blind == "":
                self.images = ImageFiles(records, flusher.writer, lease, write_policy(settings.admission))
        store = KVStore(
            block_size=settings.block_size,
            pool=pool,
            hot_budget=self._tiers.part_of(pool),
            post=post,
            cold=cold,
            flusher=flusher,
            lease=lease if cold else None,
            cold_limit=settings.cold_cache_bytes,
        )
        states = self._checkpointer(store)
        bridge = kind(loaded.model, loaded.layout, store, post, states, segments=loaded.segments)
        if settings.peer and kind is not KVBridge:
            log.warning("--peer is not asked for a model that several ranks share")
        elif settings.peer and cold is not None:
            checkpoints = states.checkpoints if states is not None else None
            bridge.peer = PeerReads(self._peer(), store, bridge.reads.rates, post, checkpoints)
        return bridge

    def _peer(self) -> Peer:
        """Whom this store asks for blocks that it lacks."""
        from ...kv.peer.client import connected  # Only an engine that has a peer needs these.
        from ...kv.peer.identity import Identity

        settings, address = self._settings, peer_address(self._settings.peer)
        identity, namespace = Identity(Path(settings.peer_base)), self.namespace

        def connect(seconds: float) -> AbstractContextManager[Connection]:
            return connected(identity, address, namespace, time.monotonic() + seconds)

        def unpaired() -> str:
            return identity.why_unpaired(settings.peer)

        return Peer(settings.peer, connect, self._load.model_id, self._facts, unpaired)

    def _checkpointer(self, store: KVStore) -> Checkpointer | None:
        """For a model with state that exists only at a position."""
        loaded, settings = self._loaded, self._settings
        states = loaded.states
        if states is None or not states.tensors or loaded.layout is None:
            return None
        files = None
        if settings.cold_dir:
            files = CheckpointFiles(
                Path(settings.cold_dir), self.namespace, states.at, self._fs, transport().read_bytes
            )
        return Checkpointer(states, loaded.layout, Checkpoints(store, files), settings.block_size)


def _quantisation_facts(settings: wire.CacheSettings) -> object:
    """Plain JSON, for the namespace."""
    return [settings.kv_bits, settings.kv_group_size] if settings.kv_bits else 0


def memo_dir(load: wire.Load) -> Path | None:
    """Where digests are remembered; None: nowhere."""
    return Path(load.cache.cold_dir) if load.cache.cold_dir else None
