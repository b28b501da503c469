"""The store of an adapter in its base's engine: what it is named, and what RAM it may hold."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from adapters import make_adapter
from host import Host

from omlxd.engine.kvio.hot_budget import HotTiers
from omlxd.engine.kvio.open_store import ModelStore
from omlxd.engine.server.adapters import MOST_GONE
from omlxd.engine.server.host import EngineHost
from omlxd.errors import NotNow
from omlxd.models import demo
from omlxd.wire import CacheSettings, Load, LoadAdapter


def test_its_name_is_that_of_an_engine_of_its_own(tmp_path: Path):
    """So files of either are hits for the other."""
    base = demo.build_demo(tmp_path / "base")
    adapter = str(make_adapter(base, tmp_path / "style"))

    def host(**more: Any) -> EngineHost:
        load = Load(model_path=str(base), model_id="base", cache=CacheSettings(), **more)
        return EngineHost(load, None, None)  # type: ignore[arg-type]

    own, shared = host(adapter=adapter), host()
    other = str(make_adapter(base, tmp_path / "tone", 1))
    names = [shared._store.of_adapter(folder, "base:x").namespace for folder in (adapter, other)]
    assert names[0] == own.namespace
    assert len({shared.namespace, *names}) == 3


def test_one_that_memory_is_too_short_for_is_refused_for_now(tmp_path: Path):
    base = demo.build_demo(tmp_path / "base")
    asked = LoadAdapter(channel=1, folder=str(make_adapter(base, tmp_path / "style")), model_id="base:style")
    load = Load(model_path=str(base), model_id="base", cache=CacheSettings())
    host = EngineHost(load, None, None)  # type: ignore[arg-type]
    host.adapters._check_room(asked)
    assert host.scheduler.memory is not None
    host.scheduler.memory.live = 0
    with pytest.raises(NotNow, match=r"base:style needs about .* and 0 bytes are free now"):
        host.adapters._check_room(asked)


def test_tiers_of_one_engine_divide_its_budget():
    tiers = HotTiers(120)
    pools = [SimpleNamespace(hot_bytes=0) for _ in range(3)]
    first, second, third = (tiers.part_of(cast(Any, pool)) for pool in pools)
    assert [first(), second(), third()] == [120, 120, 120]
    pools[0].hot_bytes = 120
    assert [first(), second()] == [
        120,
        80,
    ]  # Room for the second's part, which the first gives up when it grows.
    pools[1].hot_bytes = 30
    assert [first(), second(), third()] == [90, 80, 50]
    tiers.budget.share = 60
    assert [first(), second(), third()] == [40, 40, 20]


def test_one_that_is_trained_on_again_and_again_leaves_a_few_stores(tmp_path: Path):
    base, folder = demo.build_demo(tmp_path / "base"), tmp_path / "style"
    host = Host(base, cold_dir=str(tmp_path / "cache"))
    adapters = host.engine.adapters

    def served(seed: int) -> ModelStore:
        make_adapter(base, folder, seed)
        adapters.expect(asked := LoadAdapter(1, str(folder), "base:style"))
        store, gone = adapters.add(asked).store, threading.Event()
        adapters.drop(1, gone.set)
        assert gone.wait(60)
        shutil.rmtree(folder)
        return store

    stores = [served(seed) for seed in range(MOST_GONE + 3)]
    assert adapters.stores() == stores[3:] and len(stores[0]._tiers._pools) == 1 + MOST_GONE
    flusher = stores[0].bridge and stores[0].bridge.store.flusher
    assert flusher is not None
    for thread in flusher.writer._threads:
        thread.join(60)
        assert not thread.is_alive()
    assert served(3) is stores[3], "one that comes back finds its own"
    assert adapters.stores() == [*stores[4:], stores[3]]
    assert served(0) is not stores[0]
    host.close()


def test_one_whose_store_can_not_be_opened_leaves_nothing(tmp_path: Path, monkeypatch):
    base = demo.build_demo(tmp_path / "base")
    asked = LoadAdapter(channel=1, folder=str(make_adapter(base, tmp_path / "style")), model_id="base:style")
    host = Host(base)
    engine, weights = host.engine, host.engine.loaded.weight_bytes

    def fails(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ModelStore, "open", fails)
    with pytest.raises(OSError, match="No space left"):
        engine.adapters.add(asked)
    left, held = list(engine.loaded.adapters.loaded), engine.loaded.weight_bytes
    host.close()
    assert left == [] and held == weights
