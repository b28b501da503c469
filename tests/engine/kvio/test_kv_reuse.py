"""Models whose state omlxd can't store: served all the same, without reuse, and said so."""

from __future__ import annotations

import logging
from pathlib import Path

import mlx_lm.models.qwen3
import pytest
from cold_run import prompt
from families import build_family
from mlx_lm.models.cache import ConcatenateKVCache
from rig import Rig

from omlxd import wire
from omlxd.engine.server.host import EngineHost


class Unheard(ConcatenateKVCache):
    """A cache class that omlxd has never heard of, of one sequence only."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_family("qwen3", tmp_path / "model")


def test_an_unknown_cache_class_is_served_without_reuse(model: Path, monkeypatch: pytest.MonkeyPatch):
    prompts = [prompt(90 + 30 * i, seed=i) for i in range(3)]
    with Rig(model) as rig:
        want = [rig.run(p, 9).got for p in prompts]
    monkeypatch.setattr(
        mlx_lm.models.qwen3.Model,
        "make_cache",
        lambda self: [Unheard() for _ in self.layers],
        raising=False,
    )
    with Rig(model) as rig:
        assert rig.scheduler.bridge is None
        running = [rig.start(p, 9) for p in prompts]
        assert [output.tokens() for output in running] == want


def test_it_says_so(model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(
        mlx_lm.models.qwen3.Model,
        "make_cache",
        lambda self: [Unheard() for _ in self.layers],
        raising=False,
    )
    load = wire.Load(model_path=str(model), model_id="odd", cache=wire.CacheSettings())
    with caplog.at_level(logging.WARNING):
        host = EngineHost(load, output=None, lease=None)  # type: ignore[arg-type]
    assert "Unheard" in host.info.kv_reuse
    assert "odd: prefixes are not reused: layers of this model keep Unheard" in caplog.text
