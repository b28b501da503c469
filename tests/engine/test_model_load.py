"""What a load says of settings that this model can't follow."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import pytest

from omlxd import wire
from omlxd.engine import mlx_adapter
from omlxd.engine.mlx_adapter.attention import backend
from omlxd.engine.server import model_load


@pytest.mark.parametrize(
    ("share", "bits", "tokens", "why"),
    [
        ("on", 8, 0, "what this model keeps is not held in segments"),
        ("on", 0, 0, "what this model keeps is not held in segments"),
        ("on", 0, 2048, ""),
        ("auto", 8, 0, "what this model keeps is not held in segments"),
        ("off", 0, 0, ""),
    ],
)
def test_share_prefix_on_that_a_model_can_not_follow(
    share: str, bits: int, tokens: int, why: str, monkeypatch: pytest.MonkeyPatch, caplog
):
    loaded = SimpleNamespace(segments=SimpleNamespace(tokens=tokens))
    monkeypatch.setattr(mlx_adapter, "load", lambda *given: loaded)
    settings = wire.CacheSettings(kv_bits=bits)
    load = wire.Load(model_path="/nowhere", model_id="m", cache=settings, share_prefix=share)
    with caplog.at_level("INFO"):
        assert model_load.load_model(load) is loaded
    if share == "auto" and not mlx_adapter.attention_backend().shares_prefixes:
        why = ""
    told = [(each.levelname, each.getMessage()) for each in caplog.records if "--share" in each.getMessage()]
    level, words = {"on": "WARNING"}.get(share, "INFO"), f"--share-prefix {share}: m: prefixes are not shared"
    assert told == ([(level, f"{words}: {why}")] if why else [])


@pytest.mark.parametrize(("device", "kernels", "name"), [("metal", "off", "mlx"), ("metal", "auto", "metal")])
def test_metal_kernels_are_switched_off(
    device: str, kernels: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog
):
    monkeypatch.setattr(backend, "_current", None)
    monkeypatch.setattr(backend, "device", lambda: device)
    monkeypatch.setattr(mlx_adapter, "backend", lambda: device)
    monkeypatch.setattr(
        mlx_adapter, "load", lambda *given: SimpleNamespace(segments=SimpleNamespace(tokens=0))
    )
    load = wire.Load("/nowhere", "m", wire.CacheSettings(), metal_kernels=kernels)
    with caplog.at_level("INFO"):
        model_load.load_model(load)
    assert mlx_adapter.attention_backend().name == name
    why = "Metal kernels off (--metal-kernels), by which they are shared"
    assert (f"--share-prefix auto: m: prefixes are not shared: {why}" in caplog.text) == (kernels == "off")


def test_a_refused_kernel_is_why_prefixes_are_not_shared(monkeypatch: pytest.MonkeyPatch):
    from omlxd.engine.mlx_adapter.metal import rule
    from omlxd.engine.mlx_adapter.metal.attention.choice import Choice, Heads
    from omlxd.engine.mlx_adapter.metal.backend import MetalBackend

    made = MetalBackend()
    assert made.why_not_shared() == "" and made.kernels() == ()
    verdict = rule.Verdict("attend_rows", "64 wide", why="its numbers differ")
    monkeypatch.setattr(rule, "_verdicts", {("attend_rows", "64 wide"): verdict})
    made._attention.since_load = {Heads(2, 1, 64, mx.float16): Choice()}
    assert made.why_not_shared() == "omlxd's attention kernel is not used (its numbers differ)"
    made._attention.since_load = {Heads(2, 1, 64, mx.float16): Choice(True)}
    assert made.why_not_shared() == ""
